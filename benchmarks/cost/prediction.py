"""What ``fedleak cost`` predicts, beside what attacks then take on the model and real text.

    python -m benchmarks.cost.prediction --models embedded stories15M=DIR SmolLM2=DIR gpt2-shape \
        --text FILE --out FILE

A model is ``embedded``, a name and a folder, or ``gpt2-shape``: GPT-2's with 124 million random
numbers. It gets a LoRA (PEFT's choice of modules; none with ``--rank 0``), and takes two steps of
AdamW. The attacks read the gradient of a batch of ``--text``, and membership is asked of 8 texts.
Every model runs in processes of its own, with one thread. Seconds are of the processor. Memory is
the highest resident memory in calibration, and at a look, over what was resident before the
calibration (Linux only), where malloc gives back what is freed; in brackets with its defaults,
where a part stays for the next tensors. ``probe`` is what the prediction itself takes.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
import warnings
from datetime import date
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, PreTrainedConfig

from lightning_fedleak.anatomy import Anatomy, find_anatomy
from lightning_fedleak.attacks import PublicText, frequent_tokens
from lightning_fedleak.finetuning import EMBEDDED_MESSAGES, EMBEDDED_MODEL, read_texts
from lightning_fedleak.studies.cost import (
    ATTACKS,
    LENGTH,
    Cost,
    measure_cost,
    predict_costs,
    random_anatomy,
)
from lightning_fedleak.studies.models import find_config, with_lora

SMOKE = ("--models embedded --shapes 1x16 --rank 2 --attacks subspace_words",)
RANDOM = "gpt2-shape"
PARTS = ("calibration", "calibration_bytes", "look", "look_bytes")
GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "4194304"}


def config_of(model: str) -> PreTrainedConfig:
    """Return the configuration of a model by its name, or of the folder after ``=``."""
    if model == RANDOM:
        return GPT2Config()
    return find_config(model.partition("=")[2] or None)


def load(model: str, rank: int) -> tuple[Anatomy, PublicText, PublicText]:
    """Return the model with a LoRA, the public text, and the texts of clients."""
    config = config_of(model)
    if model == RANDOM:
        anatomy = random_anatomy(config, config.vocab_size, config.num_hidden_layers, rank)
        generator = torch.Generator().manual_seed(0)
        rows = frequent_tokens(anatomy, 400, LENGTH, generator)
        return anatomy, PublicText(list(rows[200:])), PublicText(list(rows[:200]))
    folder = model.partition("=")[2] or str(EMBEDDED_MODEL)
    dtype = config.dtype or torch.float32
    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    for parameter in whole.parameters():  # a file's pages would count when they are first read
        parameter.data = parameter.data.clone()
    anatomy = with_lora(find_anatomy(whole), rank, None, 0)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = read_texts(OPTIONS.text or EMBEDDED_MESSAGES, None, option="--text")[:400]
    half = len(texts) // 2
    public, private = PublicText(texts[half:], tokenizer), PublicText(texts[:half], tokenizer)
    train(anatomy, public)
    return anatomy, public, private


def train(anatomy: Anatomy, text: PublicText) -> None:
    """Take two steps of AdamW, so that the gradient of LoRA's A is none of zeros."""
    trained = [p for p in anatomy.model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4)
    generator = torch.Generator().manual_seed(2)
    for _ in range(2):
        ids = text.batch(2, 32, generator).input_ids
        optimizer.zero_grad()
        anatomy.model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    optimizer.zero_grad()


def report(model: str, shape: str) -> dict[str, object]:
    """Return the seconds of the probe, and both costs by attack."""
    rows, length = map(int, shape.split("x"))
    random_anatomy(config_of(model), 64, 1, OPTIONS.rank)  # imports what any command imports
    start = time.process_time()
    predicted = {}
    if GIVE_BACK.keys().isdisjoint(os.environ):
        predicted = predict_costs(config_of(model), OPTIONS.rank, None, rows * length)
    probe = time.process_time() - start
    anatomy, public, private = load(model, OPTIONS.rank)
    batch = private.batch(rows, length, torch.Generator().manual_seed(1))
    costs = {
        name: [measure_cost(ATTACKS[name](public), anatomy, rows * length, batch)]
        for name in OPTIONS.attacks
    }
    for name, cost in predicted.items():
        costs.get(name, []).insert(0, cost)
    return {"probe": probe, **{name: [parts(c) for c in row] for name, row in costs.items()}}


def parts(cost: Cost) -> dict[str, float]:
    """Return seconds, and bytes as MB; a look includes following the model."""
    numbers = vars(cost) | {"look": cost.refresh + cost.look}
    return {n: numbers[n] / (1e6 if n.endswith("bytes") else 1) for n in PARTS}


def main() -> None:
    """Print a row for each attack, model and shape."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if OPTIONS.json:
        print(json.dumps(report(OPTIONS.models[0], OPTIONS.shapes[0])))
        return
    lines = [f"# {platform.machine()}, one thread, {date.today()}, LoRA r {OPTIONS.rank}"]
    lines += ["| model, batch (probe) | attack | calibration (s) | (MB) | look (s) | (MB) |"]
    lines += ["|---|---|---|---|---|---|"]
    print(*lines, sep="\n")
    for shape in OPTIONS.shapes:
        for model in OPTIONS.models:
            command = [sys.executable, "-m", "benchmarks.cost.prediction", "--json"]
            command += ["--models", model, "--shapes", shape, "--rank", str(OPTIONS.rank)]
            command += ["--text", OPTIONS.text] if OPTIONS.text else []
            command += ["--attacks", *OPTIONS.attacks]
            costs, in_use = (
                json.loads(
                    subprocess.check_output(command, text=True, env=os.environ | more).splitlines()[
                        -1
                    ]
                )
                for more in ({}, GIVE_BACK)
            )
            row = f"{model.partition('=')[0]}, {shape} ({costs['probe']:.1f} s)"
            for name in OPTIONS.attacks:
                (expected, found), (given_back,) = costs[name], in_use[name]
                cells = [f"{expected[n]:,.3g} / {found[n]:,.3g}" for n in PARTS]
                for i in (1, 3):
                    part = PARTS[i]
                    cells[i] = (
                        f"{expected[part]:,.3g} / {given_back[part]:,.3g} ({found[part]:,.3g})"
                    )
                lines.append("| " + " | ".join([row, name, *cells]) + " |")
                print(lines[-1], flush=True)
    if OPTIONS.out:
        Path(OPTIONS.out).write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=["embedded", RANDOM])
    parser.add_argument("--shapes", nargs="+", default=["4x64", "8x64"])
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--attacks", nargs="+", choices=[*ATTACKS], default=[*ATTACKS])
    parser.add_argument("--text", help="file with a text a line; the embedded messages")
    parser.add_argument("--out", help="file for the table")
    parser.add_argument("--json", action="store_true", help="of one model, in this process")
    OPTIONS = parser.parse_args()
    if unknown := [m for m in OPTIONS.models if "=" not in m and m not in ("embedded", RANDOM)]:
        parser.error(f"--models {unknown[0]}: embedded, {RANDOM}, or NAME=FOLDER")
    main()
