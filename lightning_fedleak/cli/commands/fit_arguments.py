"""The arguments of ``fedleak fit``, read before and beside LightningCLI so that errors are short.

Nothing is decided here that LightningCLI would decide otherwise: a missing file is reported before
libraries are loaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_fedleak.cli.finetuning.assets import SourceError, check_model_source, nearest
from lightning_fedleak.cli.finetuning.texts import check_text_source

_CONFIG = ("--config", "-c")
_COLUMN = "data.column="


def check_files(arguments: Sequence[str]) -> None:
    """Raise an error for configs, a model or a text that should be on this machine and are not.

    Args:
        arguments: after ``fit``.

    Raises:
        SourceError: what is not there, or is no config.
    """
    if arguments and not arguments[0].startswith("-"):
        first = arguments[0]
        raise SourceError(f"'{first}' names no setting; a config is given as --config {first}")
    settings: dict[str, Any] = {}
    for name, value in _pairs(arguments):
        if name in _CONFIG and isinstance(value, str):
            if not Path(value).exists() and "\n" not in value and "{" not in value:
                raise SourceError(f"there is no file '{value}'{nearest(Path(value))}")
            settings |= _flat(_config(value))
        else:
            settings[name.removeprefix("--")] = value
    model, text, column = (
        value if isinstance(value := settings.get(name), str) and value != "null" else None
        for name in ("model.model", "data.text", "data.column")
    )
    check_model_source(model)
    if text is not None:
        check_text_source(text, column, option=_COLUMN)


def _pairs(arguments: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yield options and their values; the value is None where there is none."""
    for index, argument in enumerate(arguments):
        if not argument.startswith("-"):
            continue
        name, equals, value = argument.partition("=")
        following = arguments[index + 1] if index + 1 < len(arguments) else "-"
        yield name, value if equals else None if following.startswith("-") else following


def _config(path: Any) -> Mapping[str, object]:
    """Return a config's content; empty where LightningCLI reports what is wrong with it.

    Raises:
        SourceError: it is not YAML. LightningCLI does not say which file that is.
    """
    import yaml

    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except yaml.MarkedYAMLError as error:
        line = "" if error.problem_mark is None else f", line {error.problem_mark.line + 1}"
        raise SourceError(f"'{path}'{line} is not YAML: {error.problem}") from None
    except (OSError, TypeError, ValueError, yaml.YAMLError):
        return {}
    return content if isinstance(content, Mapping) else {}


def _flat(settings: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    flat: dict[str, object] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
