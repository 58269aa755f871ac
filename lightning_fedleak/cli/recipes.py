"""``fedleak fit --recipe NAME``: ready-made fragments of a LightningCLI config. Imports little."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

from lightning_fedleak.cli.finetuning import SourceError
from lightning_fedleak.cli.studies.names import did_you_mean

_OPTION = "--recipe"


def recipe_files() -> dict[str, Traversable]:
    """Return the file of each recipe, by its name.

    They are in ``callbacks/`` of a checkout, and are installed as ``lightning_fedleak.recipes``.
    """
    try:
        folder: Traversable = files("lightning_fedleak.recipes")
    except ModuleNotFoundError:  # a checkout that is not installed
        folder = Path(__file__).parents[2] / "callbacks"
    paths = sorted(folder.iterdir(), key=lambda path: path.name)
    return {path.name[:-5]: path for path in paths if path.name.endswith(".yaml")}


def with_configs(arguments: Sequence[str]) -> list[str]:
    """Return the arguments of ``fit``, with ``--config FILE`` for each ``--recipe NAME``.

    Args:
        arguments: of the command line.

    Raises:
        SourceError: there is no such recipe; the message lists the recipes and their folder.
    """
    configs: list[str] = []
    words = iter(arguments)
    for word in words:
        option, equals, name = word.partition("=")
        if option != _OPTION:
            configs.append(word)
            continue
        name = name if equals else next(words, "")
        path = recipe_files().get(name.removesuffix(".yaml"))
        if path is None:
            names = list(recipe_files())
            folder = Path(str(recipe_files()[names[0]])).parent
            raise SourceError(
                f"no such recipe: '{name}'{did_you_mean(name, names)}. There are "
                f"{', '.join(names)}. Files for your own LightningCLI: {folder}"
            )
        configs += ["--config", str(path)]
    return configs
