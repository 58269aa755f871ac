"""``fedleak recipes``: lists and copies the ready-made LightningCLI fragments. Imports little."""

from __future__ import annotations

import argparse
import textwrap
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

from lightning_fedleak.finetuning import SourceError
from lightning_fedleak.studies.names import did_you_mean

_WIDTH = 79  # characters of a line
_USAGE = (
    "Copy some with 'fedleak recipes NAME ...' and append them to a config of your own: fedleak "
    "fit --config your_run.yaml --config NAME.yaml. A config to begin with: fedleak fit "
    "--print_config > your_run.yaml. Without Lightning: examples/transformers_trainer.py, "
    "examples/trl_sft.py, examples/plain_loop.py and examples/accelerate_loop.py"
)


def recipe_files() -> dict[str, Traversable]:
    """Return the file of each recipe, by its name.

    They lie in ``callbacks/`` of a checkout, and are installed as ``lightning_fedleak.recipes``.
    """
    try:
        folder: Traversable = files("lightning_fedleak.recipes")
    except ModuleNotFoundError:  # a checkout that is not installed
        folder = Path(__file__).parents[2] / "callbacks"
    paths = sorted(folder.iterdir(), key=lambda path: path.name)
    return {path.name[:-5]: path for path in paths if path.name.endswith(".yaml")}


def recipes() -> dict[str, str]:
    """Return what each recipe does, the first sentence of its comment, by its name."""
    return {name: _first_sentence(path) for name, path in recipe_files().items()}


def _first_sentence(path: Traversable) -> str:
    lines = path.read_text(encoding="utf-8").splitlines()
    comment = " ".join(line.removeprefix("#").strip() for line in lines if line.startswith("#"))
    return comment.partition(". ")[0].removesuffix(".") + "."


def list_or_copy(options: argparse.Namespace) -> int:
    """List all recipes, or copy those that are named, with or without ``.yaml``, and return 0.

    Raises:
        SourceError: there is no such recipe, or another file of its name is there.
    """
    sentences, to = recipes(), options.to or Path()
    if not options.names:
        indent = max(map(len, sentences)) + 2
        for name, sentence in sentences.items():
            first, *lines = textwrap.wrap(sentence, _WIDTH - indent)
            print(f"{name:<{indent}}{first}", *(" " * indent + line for line in lines), sep="\n")
        print("", *textwrap.wrap(_USAGE, _WIDTH, break_on_hyphens=False), sep="\n")
        return 0
    chosen = list(dict.fromkeys(name.removesuffix(".yaml") for name in options.names))
    wrong = [name for name in chosen if name not in sentences]
    if wrong:
        questions = [f"'{name}'{did_you_mean(name, [*sentences])}" for name in wrong]
        raise SourceError(f"no such recipe: {', '.join(questions)}.")
    content = {f"{name}.yaml": recipe_files()[name].read_bytes() for name in chosen}
    try:
        to.mkdir(parents=True, exist_ok=True)
        for name, text in content.items():
            if (to / name).exists() and (to / name).read_bytes() != text:
                raise SourceError(
                    f"'{to / name}' exists and differs from the recipe: move it, or name another "
                    "folder with --to. Nothing was copied."
                )
        for name, text in content.items():
            (to / name).write_bytes(text)
            print(to / name)
    except OSError as error:
        raise SourceError(f"'{to}' cannot be written to ({error.strerror}).") from error
    return 0
