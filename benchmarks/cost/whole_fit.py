"""Peak memory of a whole fit, bare and under the monitor, which chooses the attacks.

    python -m benchmarks.cost.whole_fit 128256x2048x16 --steps 3        # a Llama-3.2-1B's shape

The model is a Llama of random numbers in bfloat16, vocabulary x width x blocks, with a LoRA on the
queries and values; batches are random tokens. Both fits run in a process of its own, with one
thread. Peak is the highest resident memory of the process (Linux), what packages and loading take
included. Words is the F1 of ``SubspaceWords`` at its last look, where it had one.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import tempfile
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.shared import FineTuning, fit, print_place, read_lines
from lightning_fedleak import LeakageMonitor
from lightning_fedleak.callbacks import WatchSettings

SMOKE = ("512x64x2 --steps 2 --batch 2x8 --rank 4",)
HEAD = 64
"""Width of a head of attention, as Llama-3.2-1B's."""


LOOK_SECONDS = 600.0
"""Of a look, at most; 30, the default, leaves attacks out for a billion parameters on one core."""


def llama(shape: tuple[int, int, int], rank: int) -> nn.Module:
    """Return a Llama of random numbers with a LoRA."""
    vocabulary, width, blocks = shape
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=blocks,
        num_attention_heads=width // HEAD,
        num_key_value_heads=max(1, width // HEAD // 4),
        tie_word_embeddings=True,
    )
    torch.set_default_dtype(torch.bfloat16)
    base = LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=["q_proj", "v_proj"])
    return get_peft_model(base, config, autocast_adapter_dtype=False)


def one_fit(shape: tuple[int, int, int], watched: bool) -> dict[str, Any]:
    """Return the peak in bytes, processor seconds of the fit, and what attacks gave."""
    rows, length = map(int, OPTIONS.batch.split("x"))
    torch.manual_seed(0)
    module = FineTuning(llama(shape, OPTIONS.rank))
    ids = torch.randint(3, shape[0], (OPTIONS.steps * rows, length))
    data = [{"input_ids": row, "labels": row} for row in ids]
    settings = WatchSettings(look_seconds=LOOK_SECONDS)
    with tempfile.TemporaryDirectory() as folder:
        begin = time.process_time()
        fit(
            module,
            DataLoader(data, batch_size=rows, shuffle=True),
            max_steps=OPTIONS.steps,
            precision="bf16-true",
            callbacks=[LeakageMonitor(every_n_steps=1, settings=settings)] if watched else [],
            default_root_dir=folder,
        )
        seconds = time.process_time() - begin
        lines = [line for file in Path(folder).rglob("leakage.jsonl") for line in read_lines(file)]
    metrics = {x["attack"]: x["metrics"] for x in lines if x["unknown"] is None}
    words = metrics.get("subspace_words", {}).get("f1", {}).get("value")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"peak": peak, "seconds": seconds, "words": words, "results": sorted(metrics)}


def main() -> None:
    """Print one row for each shape and fit."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    shapes = {text: tuple(map(int, text.split("x"))) for text in OPTIONS.shapes}
    print_place(f"LoRA r {OPTIONS.rank}")
    print("| shape | fit | peak (GB) | processor (s) | words F1 | attacks with a result |")
    print("|---|---|---|---|---|---|")
    for shape, numbers in shapes.items():
        for kind in ("bare", "watched"):
            # Of a process of its own, for its peak; what is imported is so already.
            with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
                measured = pool.submit(one_fit, numbers, kind == "watched").result()
            words = "" if measured["words"] is None else f"{measured['words']:.3f}"
            row = f"{measured['peak'] / 1e9:.2f} | {measured['seconds']:.0f} | {words}"
            print(f"| {shape} | {kind} | {row} | {', '.join(measured['results'])} |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shapes", nargs="+", help="vocabulary x width x blocks, as 128256x2048x16")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--batch", default="1x64", help="rows x tokens")
    parser.add_argument("--rank", type=int, default=16)
    OPTIONS = parser.parse_args()
    main()
