"""Write what looks and DP-SGD cost on this machine's GPU into a page.

python -m benchmarks.cost.gpu                                 # into docs/what_ran.md
python -m benchmarks.cost.gpu --device cpu --small --page FILE
"""

import contextlib
import multiprocessing
import runpy
import sys
import tempfile
from pathlib import Path

import torch

from benchmarks.shared import parser_of

SMOKE = ("--device cpu --small --page {out}/gpu.md",)
PAGE = Path(__file__).parents[2] / "docs" / "what_ran.md"
HEADING = "\n## Measured\n"
SMALL = (
    ("overhead", "--steps 1 --size 1 64 --vocabulary 512 --shape 2x8"),
    ("dpsgd", "--layers 1 --width 24 --vocabulary 64 --batch 2 8 --rounds 1 --peers plain"),
)
WHOLE = (  # each fills the GPU: a step of a smaller model waits for the host
    ("overhead", "--steps 16 --size 12 768 --shape 32x128 --fits 200"),
    ("overhead", "--steps 16 --size 12 768 --shape 32x128 --precision bf16-mixed"),
    (  # 1.2 billion weights
        "overhead",
        "--steps 8 --size 16 2048 --vocabulary 128000 --lora 8 --shape 8x256 "
        "--precision bf16-mixed --fits 200",
    ),
    ("dpsgd", "--layers 12 --width 768 --batch 32 128"),
    ("dpsgd", "--layers 12 --width 768 --batch 32 128 --lora"),
)


def write_output(script: str, arguments: list[str], path: Path) -> None:
    """Run a script of this folder, and write what it prints to a file."""
    sys.argv = [script, *arguments]
    with path.open("w") as file, contextlib.redirect_stdout(file):
        runpy.run_module(f"benchmarks.cost.{script}", run_name="__main__")


def main() -> None:
    small, page = (False, "a model of one block, a step of each"), (PAGE, "what it holds is kept")
    parser = parser_of(__doc__, device=("cuda", ("cpu", "cuda")), small=small, page=page)
    options = parser.parse_args()
    tables = ""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "printed")
        for script, settings in SMALL if options.small else WHOLE:
            arguments = [*settings.split(), "--device", options.device]
            # Forked, so that what is imported stays so; a GPU is not touched here before.
            context = multiprocessing.get_context("fork")
            process = context.Process(target=write_output, args=(script, arguments, path))
            process.start()
            process.join()
            if process.exitcode:
                raise SystemExit(f"{script} failed; on a machine without CUDA say --device cpu")
            printed = path.read_text()
            command = f"python -m benchmarks.cost.{script} {' '.join(arguments)}"
            tables += f"\n```text\n$ {command}\n{printed.strip()}\n```\n"
            print(printed, flush=True)
    page = (options.page if options.page.exists() else PAGE).read_text().split(HEADING)[0]
    name = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    options.page.write_text(f"{page}{HEADING}\nOn {name}, by `make gpu`:\n{tables}")


if __name__ == "__main__":
    main()
