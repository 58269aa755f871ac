"""Time and memory of attacks on LoRA by the shape of the model, beside what is predicted.

    make scale                                        # a few shapes up to the width of Llama-3.2-1B
    python -m benchmarks.cost.scale --models stories15M=DIR 128256x2048x1
    python -m benchmarks.cost.scale --arithmetic 128256x4096x32      # predicted alone

A model is a folder with a configuration, or vocabulary x width x blocks of a Llama with tied
embeddings. Its weights are random, and it has a LoRA on queries and values. What ``fedleak cost``
predicts comes from models of one and two blocks and of 4,096 and 12,288 tokens. Every model runs in
a process of its own. Seconds are of the processor. Memory is the highest resident memory in
calibration, and at a look, over what was resident before the calibration; Linux only.
``entry`` is that of the calibration in bytes for each of the V x d numbers of a dictionary.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
import warnings
from datetime import date

import torch
from transformers import AutoConfig, LlamaConfig, PreTrainedConfig

from lightning_fedleak.attacks import PublicText, frequent_tokens
from lightning_fedleak.studies.cost import (
    ATTACKS,
    LENGTH,
    measure_cost,
    predict_costs,
    random_anatomy,
)

SMOKE = ("--models 256x64x3 --rank 2 --tokens 32",)
MODELS = ("32000x512x4", "128256x640x4", "262144x640x2", "128256x2048x2")
LARGEST = "128256x4096x32"  # Llama-3.1-8B's


def config_of(model: str, dtype: torch.dtype) -> PreTrainedConfig:
    """Return a configuration, of a folder (after ``=``) or by vocabulary x width x blocks."""
    name, _, folder = model.partition("=")
    if folder:
        config = AutoConfig.from_pretrained(folder)
        config.dtype = dtype
        return config
    vocabulary, width, blocks = map(int, name.split("x"))
    heads = max(4, width // 64)
    return LlamaConfig(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=4 * width,
        num_hidden_layers=blocks, num_attention_heads=heads, num_key_value_heads=heads // 4,
        tie_word_embeddings=True, max_position_embeddings=2048, dtype=dtype,
    )  # fmt: skip


def report(model: str, options: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    """Return what was predicted and what was measured, by attack."""
    config = config_of(model, getattr(torch, options.dtype))
    started = time.process_time()
    predicted = predict_costs(config, options.rank, options.targets, options.tokens)
    print(f"predicted in {time.process_time() - started:.0f} s", file=sys.stderr)
    found = {name: [vars(cost)] for name, cost in predicted.items()}
    if not options.arithmetic:
        sizes = config.vocab_size, config.num_hidden_layers
        anatomy = random_anatomy(config, *sizes, options.rank, options.targets)
        texts = PublicText(list(frequent_tokens(anatomy, 40, LENGTH, torch.Generator())))
        for name, attack in ATTACKS.items():
            found[name].append(vars(measure_cost(attack(texts), anatomy, options.tokens)))
    entries = config.vocab_size * config.hidden_size
    for costs in (cost for row in found.values() for cost in row):
        costs["entry"] = costs["calibration_bytes"] / entries
    return found


def main() -> None:
    """Read the options, and print a line for each attack of each model."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--arithmetic", nargs="?", const=LARGEST, help="predict a model alone")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--targets", default="q_proj,v_proj")
    parser.add_argument("--tokens", type=int, default=128, help="of a client's batch")
    parser.add_argument("--json", action="store_true", help="of one model, in this process")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if options.json:
        print(json.dumps(report(options.models[0], options)))
        return
    print(f"# {platform.machine()}, one thread, {date.today()}, {options.dtype}, r {options.rank}")
    print("| model | attack | calibration (s) | (MB) | an entry | refresh (s) | look (s) | (MB) |")
    print("|---|---|---|---|---|---|---|---|")
    for model in [options.arithmetic] if options.arithmetic else options.models:
        command = [sys.executable, "-m", "benchmarks.cost.scale", "--json", "--models", model]
        for name in ("dtype", "rank", "targets", "tokens"):
            command += [f"--{name}", str(getattr(options, name))]
        command += ["--arithmetic", model] if options.arithmetic else []
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        for attack, costs in json.loads(done.stdout.splitlines()[-1]).items():
            for kind, c in zip(("predicted", "measured"), costs, strict=False):
                print(
                    f"| {model.partition('=')[0]} | {attack}, {kind} | {c['calibration']:.1f} "
                    f"| {c['calibration_bytes'] / 1e6:.0f} | {c['entry']:.1f} "
                    f"| {c['refresh']:.2f} | {c['look']:.1f} | {c['look_bytes'] / 1e6:.0f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
