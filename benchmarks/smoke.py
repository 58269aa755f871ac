"""Runs every script in this folder and below in its smallest setting: does it still work?

    make smoke
    python -m benchmarks.smoke overhead dpsgd        # these alone

A script says in ``SMOKE`` how it is run: a tuple of argument strings, one for each run. In these
``{model}`` stands for a folder with the embedded model, ``{text}`` for a file with the embedded
messages, ``{out}`` for a folder to write to. ``FEDLEAK_ASSETS`` names a folder made of the same, so
that nothing is downloaded and no other model is needed. A script without ``SMOKE`` fails; a file
without ``__main__`` is no script but a module of others. The numbers that scripts print here mean
nothing. Examples take no arguments: ``EXAMPLES`` holds those of their ``main``.

Each run is a process of its own, forked from one that has imported the large packages and this one:
these take seven seconds of a core, and numba, for the papers, two more.
"""

import argparse
import ast
import gc
import gzip
import importlib.util
import json
import multiprocessing
import os
import runpy
import shlex
import shutil
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

from lightning_fedleak.cli.finetuning.assets import EMBEDDED_MESSAGES, EMBEDDED_MODEL
from lightning_fedleak.cli.finetuning.texts import read_texts

HERE = Path(__file__).resolve().parent
AT_ONCE = 2
LIMIT_S = 600.0
PRINTED = "printed"
IMPORTED = ["lightning", "peft", "opacus", "torch.distributed.fsdp", "lightning_fedleak.callbacks"]
IMPORTED += ["benchmarks.papers.reference"]
NEEDS = {"accounting.py": "dp_accounting", "__main__.py": "multi_freq_ldpy", "rl_prompts.py": "trl"}
"""Packages without which a script has nothing to train or to compare with."""
EXAMPLES: dict[str, dict[str, Any]] = {
    "membership.py": {"games": 8},
    "sweep.py": {"max_steps": 2, "names": ["DPSGD 0.5"]},
    "federate.py": {"rounds": 1, "local_steps": 1},
}
"""The examples that are run too, with the arguments of their smallest setting."""
EXIT_STATUS = threading.Lock()
"""Held by the thread that reads exit statuses: each can be read once, and a second reader gets 255.

The start of a process reads those of all that have ended, so it happens under this lock.
"""


@dataclass(frozen=True)
class Done:
    """One run: wall seconds, and what went wrong (empty: nothing)."""

    command: str
    seconds: float
    problem: str


def scripts(names: list[str]) -> list[Path]:
    """All files that are scripts, or those named."""
    results = [
        path
        for path in sorted(HERE.rglob("*.py"))
        if path != Path(__file__).resolve() and "__main__" in path.read_text("utf-8")
    ]
    results += [path for path in (HERE.parent / "examples" / n for n in EXAMPLES) if path.exists()]
    unknown = set(names) - {path.stem for path in results}
    if unknown:
        raise SystemExit(f"no script is called {', '.join(sorted(unknown))}")
    return [path for path in results if not names or path.stem in names]


def runs_of(path: Path) -> tuple[str, ...]:
    """``SMOKE`` of a script, which is not imported for it; an example has one run."""
    if path.parent.name == "examples":
        return ("",)
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "SMOKE":
            runs = ast.literal_eval(node.value)
            if runs and isinstance(runs, tuple):
                return runs
    raise SystemExit(f"{path}: give SMOKE, a tuple of the arguments of its smallest runs")


def make_assets(folder: Path) -> dict[str, str]:
    """A folder like that of ``FEDLEAK_ASSETS``, from what the package holds."""
    texts = read_texts(EMBEDDED_MESSAGES)
    model, data = folder / "models" / "stories15M", folder / "data"
    shutil.copytree(EMBEDDED_MODEL, model)
    lines = folder / "messages.txt"
    lines.write_text("\n".join(texts) + "\n", "utf-8")
    records = "".join(json.dumps({"text": " ".join([t] * 4)}) + "\n" for t in texts)
    plain = "\n".join(texts)
    files = {"imdb/test.jsonl.gz": records, "wikitext2/train.raw.txt.gz": plain}
    pairs = [{"translation": {"de": text, "en": text}} for text in texts]
    training_records = [json.dumps({"text": text}) for text in reversed(texts)]
    files["imdb/train.jsonl.gz"] = "\n".join(training_records[: len(training_records) // 2])
    files |= {f"iwslt17_de_en/{part}.json.gz": json.dumps(pairs) for part in ("test", "validation")}
    for part in ("train", "test_2016_flickr"):
        files |= {f"multi30k/{part}.{language}.gz": plain for language in ("de", "en")}
    for name, content in files.items():
        (data / name).parent.mkdir(parents=True, exist_ok=True)
        (data / name).write_bytes(gzip.compress(content.encode("utf-8")))
    return {"model": str(model), "text": str(lines), "records": str(data / "imdb/test.jsonl.gz")}


def imported() -> ForkServerContext:
    """What starts the runs; IMPORTED is imported there, at the first of them."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    return context


def as_script(path: Path, arguments: list[str], folder: Path, environment: dict[str, str]) -> None:
    """``python -m`` with the script in ``folder``; what it prints goes to ``<folder>/printed``."""
    gc.freeze()  # what was imported is no garbage
    for stream in (1, 2):
        os.dup2(os.open(folder / PRINTED, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.path.insert(0, str(HERE.parent))
    sys.argv = [str(path), *arguments]
    if path.parent.name == "examples":
        runpy.run_path(str(path))["main"](**EXAMPLES[path.name])
    else:
        runpy.run_path(str(path), run_name="__main__")


def ended(process: ForkServerProcess, seconds: float) -> bool:
    """Return whether a process ends within so many seconds."""
    wait([process.sentinel], seconds)
    with EXIT_STATUS:
        return process.exitcode is not None


def run(path: Path, arguments: str, places: dict[str, str], folder: Path) -> Done:
    """One run of a script, in a folder of its own."""
    output = Path(tempfile.mkdtemp(dir=folder))
    settings = shlex.split(arguments.format(**places, out=output))
    python_path = [str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {
        "FEDLEAK_ASSETS": str(folder),
        "PYTHONPATH": os.pathsep.join(python_path),
    }
    start_time = time.monotonic()
    process = imported().Process(target=as_script, args=(path, settings, output, environment))
    with EXIT_STATUS:
        process.start()
    late = not ended(process, LIMIT_S)
    if late:
        with EXIT_STATUS:
            process.kill()
            process.join()
    printed = output / PRINTED
    message = printed.read_text("utf-8", "replace").rstrip() if printed.exists() else ""
    problem = ""
    if late:
        problem = f"{message}\nnot done after {LIMIT_S:g} s"
    elif process.exitcode:
        problem = f"{message}\nexit status {process.exitcode}"
    elif not message:
        problem = "printed nothing"
    name = path.relative_to(HERE.parent)
    return Done(f"{name} {arguments}".strip(), time.monotonic() - start_time, problem)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="of scripts, without .py; default all")
    chosen = scripts(parser.parse_args().names)
    os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    jobs = []
    for path in chosen:
        lacking = NEEDS.get(path.name)
        if lacking and importlib.util.find_spec(lacking) is None:
            print(f"skipped  {path.relative_to(HERE.parent)}: {lacking} is not installed")
            continue
        jobs += [(path, arguments) for arguments in runs_of(path)]
    start_time, failed = time.monotonic(), 0
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(AT_ONCE) as pool:
        folder = Path(name)
        places = make_assets(folder)
        for finished in pool.map(lambda job: run(*job, places, folder), jobs):
            print(
                f"{'FAILED ' if finished.problem else 'ok     '} {finished.seconds:6.1f} s  "
                f"{finished.command}"
            )
            if finished.problem:
                failed += 1
                print(f"{finished.problem}\n")
            sys.stdout.flush()
    print(f"\n{len(jobs)} runs, {failed} failed, {time.monotonic() - start_time:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
