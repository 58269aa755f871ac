"""Peak memory of a whole fit, bare and under the monitor, which chooses the attacks.

    python -m benchmarks.cost.whole_fit 128256x2048x16 --steps 3        # a Llama-3.2-1B's shape

The model is a Llama of random numbers in bfloat16, vocabulary x width x blocks, with a LoRA on the
queries and values; batches are random tokens. Both fits run in a process of its own, with one
thread. Peak is the highest resident memory of the process (Linux), what packages and loading take
included. Words is the F1 of ``SubspaceWords`` at its last look, where it had one.
"""

import multiprocessing
import resource
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from benchmarks import shared
from lightning_fedleak import LeakageMonitor
from lightning_fedleak.callbacks import WatchSettings

SMOKE = ("512x64x2 --steps 2 --batch 2x8 --rank 4",)
HEAD = 64
"""Width of a head of attention, as Llama-3.2-1B's."""


LOOK_SECONDS = 600.0
"""Of a look, at most; 30, the default, leaves attacks out for a billion parameters on one core."""


def llama(shape: tuple[int, int, int], rank: int) -> nn.Module:
    """Return a Llama of random numbers in bfloat16 with a LoRA."""
    width = shape[1]
    sizes = {"intermediate_size": 4 * width, "num_key_value_heads": max(1, width // HEAD // 4)}
    torch.set_default_dtype(torch.bfloat16)
    base = shared.llama(*shape, heads=width // HEAD, tie_word_embeddings=True, **sizes)
    torch.set_default_dtype(torch.float32)
    return shared.with_lora(base, rank, ["q_proj", "v_proj"]).bfloat16()


def one_fit(shape: tuple[int, int, int], watched: bool) -> dict[str, Any]:
    """Return the peak in bytes, processor seconds of the fit, and what attacks gave."""
    rows, length = map(int, OPTIONS.batch.split("x"))
    torch.manual_seed(0)
    module = shared.FineTuning(llama(shape, OPTIONS.rank))
    ids = torch.randint(3, shape[0], (OPTIONS.steps * rows, length))
    data = [{"input_ids": row, "labels": row} for row in ids]
    settings = WatchSettings(look_seconds=LOOK_SECONDS)
    with tempfile.TemporaryDirectory() as folder:
        begin = time.process_time()
        shared.fit(
            module, DataLoader(data, batch_size=rows, shuffle=True), max_steps=OPTIONS.steps,
            callbacks=[LeakageMonitor(every_n_steps=1, settings=settings)] if watched else [],
            precision="bf16-true", default_root_dir=folder,
        )  # fmt: skip
        seconds = time.process_time() - begin
        logs = Path(folder).rglob("leakage.jsonl")
        lines = [line for file in logs for line in shared.read_lines(file)]
    metrics = {x["attack"]: x["metrics"] for x in lines if x["unknown"] is None}
    words = metrics.get("subspace_words", {}).get("f1", {}).get("value")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"peak": peak, "seconds": seconds, "words": words, "results": sorted(metrics)}


def main() -> None:
    """Print one row for each shape and fit."""
    shared.quieten()
    shapes = {text: tuple(map(int, text.split("x"))) for text in OPTIONS.shapes}
    shared.print_place(f"LoRA r {OPTIONS.rank}")
    head = "shape", "fit", "peak (GB)", "processor (s)", "words F1", "attacks with a result"
    print(shared.table(head, []))
    for shape, numbers in shapes.items():
        for kind in ("bare", "watched"):
            # Of a process of its own, for its peak; what is imported is so already.
            with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
                measured = pool.submit(one_fit, numbers, kind == "watched").result()
            words = "" if measured["words"] is None else f"{measured['words']:.3f}"
            row = f"{measured['peak'] / 1e9:.2f}", f"{measured['seconds']:.0f}", words
            shared.print_row(shape, kind, *row, ", ".join(measured["results"]))


if __name__ == "__main__":
    parser = shared.parser_of(__doc__, steps=3, batch=("1x64", "rows x tokens"), rank=16)
    parser.add_argument("shapes", nargs="+", help="vocabulary x width x blocks, as 128256x2048x16")
    OPTIONS = parser.parse_args()
    main()
