"""How many types rows of an update tell apart: predicted, and measured on planted sets.

    python -m benchmarks.attacks.capacity --model DIR --rows 2,4,8,16,32 --seconds 60

Rows are those of all maps that read the first block's input: a LoRA of rank r on q and v gives 2 r.
Planted are sets of equally likely types with Gaussian weights of uneven size, in single precision.
*found* is the largest set of which all but one in a hundred was found, *missed* the smallest of
which it was not.
"""

from __future__ import annotations

import argparse
import platform
import time
from datetime import date
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from lightning_fedleak.anatomy import find_anatomy
from lightning_fedleak.attacks.row_space.atoms import Atoms
from lightning_fedleak.attacks.row_space.dictionary import build_dictionary
from lightning_fedleak.attacks.row_space.explanation import measure_capacity
from lightning_fedleak.attacks.row_space.linear_maps import find_known_inputs, find_linear_maps

SMOKE = ("--model {model} --rows 4 --seconds 0",)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--rows", default="2,4,8,16,32")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--positions", type=int, default=32)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    anatomy = find_anatomy(model.to(options.device).eval())
    inputs = find_known_inputs(anatomy, find_linear_maps(anatomy))
    known = next(i for i in inputs if i.width == anatomy.hidden_size)
    atoms = Atoms(*build_dictionary(anatomy, known).atoms(options.positions))
    print(f"# {platform.machine()}, one thread, {options.device}, {date.today()}")
    for rows in map(int, options.rows.split(",")):
        start = time.perf_counter()
        capacity = measure_capacity(atoms, rows, seconds=options.seconds, seed=options.seed)
        print(
            f"{Path(options.model).name} {rows} rows | found {capacity.types} | missed "
            f"{capacity.failed} | predicted {capacity.predicted:.0f} | "
            f"{time.perf_counter() - start:.0f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
