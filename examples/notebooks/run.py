"""Executes the notebooks of this folder, and checks what they show: `make notebooks`.

Each runs in an empty folder, without a network. It must end without an error, show what its gate
said, and end with a table of numbers. Nothing that it prints may hold codes of a terminal, or the
complaint that a widget is missing. The notebooks are stored with outputs, so that they can be read
where nothing runs; `python examples/notebooks/run.py --store` writes them again.
"""

import argparse
import html
import os
import re
import sys
import tempfile
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

FOLDER = Path(__file__).parent
_CODES = re.compile(r"\x1b|[\x00-\x08\x0b\x0c\x0e-\x1f]")
_TAG = re.compile(r"<style.*?</style>|<[^>]*>", re.DOTALL)
_GATE = re.compile(
    r"(RiskGate|RoundGate|Threshold) '[^']+' (warns|stopped training|withheld the update) "
    r"(at step|in round) \d+\s+measured: leakage/\S+ = "
)
_NUMBER = re.compile(r"\b\d\.\d+\b")
_PATH = re.compile(r"/(?:tmp|home|root|work|Users)/")
_WIDGETS = re.compile(r"ipywidgets|IProgress")
SECONDS = 600


def executed(path: Path) -> nbformat.NotebookNode:
    """The notebook with its outputs.

    Raises:
        CellExecutionError: a cell raised.
    """
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        where = {"metadata": {"path": folder}}
        return NotebookClient(notebook, timeout=SECONDS, resources=where).execute()


def text_of(cell: nbformat.NotebookNode) -> str:
    """What a person sees under a cell, as text."""
    shown = []
    for output in cell.get("outputs", ()):
        if output.output_type == "stream":
            shown.append(output.text)
        elif "text/html" in output.get("data", ()):
            shown.append(html.unescape(_TAG.sub("", output.data["text/html"])))
        elif "data" in output:
            shown.append(output.data.get("text/plain", ""))
    return "\n".join(shown)


def problems(notebook: nbformat.NotebookNode) -> list[str]:
    """What is wrong with an executed notebook, a sentence each."""
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    everything = "\n".join(map(text_of, code))
    found = []
    if _GATE.search(everything) is None:
        found.append("what the gate said is not shown")
    if codes := sorted({repr(one) for one in _CODES.findall(everything)}):
        found.append(f"it prints codes of a terminal: {', '.join(codes)}")
    if _WIDGETS.search(everything):
        found.append("it complains of missing widgets")
    tables = [output.data for output in code[-1].outputs if "data" in output]
    if not tables or "<table" not in tables[-1].get("text/html", ""):
        found.append("its last cell shows no table")
    elif len(_NUMBER.findall(tables[-1]["text/plain"])) < 3:
        found.append("the table of its last cell holds no numbers")
    return found


def store(path: Path, notebook: nbformat.NotebookNode) -> None:
    """Writes a notebook with what it shows, but for bars, and warnings that name a path."""
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        outputs, cell_outputs = [], cell.get("outputs", ())
        for output in cell_outputs:
            if output.output_type == "stream":
                lines = output.text.splitlines(keepends=True)
                output.text = "".join(n for n in lines if not (_PATH.search(n) or "\r" in n))
                shown = bool(output.text.strip())
            else:
                shown = _PATH.search(str(output.data)) is None
            outputs += [output] * shown
        if cell_outputs:
            cell.outputs = outputs
    nbformat.write(notebook, path)


def stored_problems(path: Path) -> list[str]:
    """What is wrong with a notebook as it is stored."""
    found = problems(nbformat.read(path, as_version=4))
    if _PATH.search(path.read_text(encoding="utf-8")):
        found.append("it shows a path of the machine that ran it")
    return [f"as it is stored, {one}: run with --store" for one in found]


def main() -> int:
    """Runs all notebooks, or those that are named; 1 if anything is wrong."""
    parser = argparse.ArgumentParser(description="Executes and checks the notebooks.")
    parser.add_argument("names", nargs="*", help="of notebooks, without .ipynb; default: all")
    parser.add_argument("--show", action="store_true", help="print what they show")
    parser.add_argument("--store", action="store_true", help="write what they show into them")
    options = parser.parse_args()
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "IPYTHONDIR": tempfile.mkdtemp(),
        "OMP_NUM_THREADS": "1",  # the models are tiny
    }
    paths = [FOLDER / f"{name}.ipynb" for name in options.names] or sorted(FOLDER.glob("*.ipynb"))
    failed = 0
    for path in paths:
        began = time.perf_counter()
        wrong = [] if options.store else stored_problems(path)
        try:
            notebook = executed(path)
        except CellExecutionError as error:
            wrong.append(str(error))
        else:
            wrong += problems(notebook)
            if options.store:
                store(path, notebook)
                wrong += stored_problems(path)
            if options.show:
                cells = [text_of(cell) for cell in notebook.cells if cell.cell_type == "code"]
                print("\n--------\n".join(cells))
        failed += bool(wrong)
        said = "; ".join(wrong) or "passed"
        print(f"{path.name}: {said} ({time.perf_counter() - began:.0f} s)", flush=True)
    print(f"{len(paths) - failed} passed, {failed} failed")
    return int(failed > 0 or not paths)


if __name__ == "__main__":
    sys.exit(main())
