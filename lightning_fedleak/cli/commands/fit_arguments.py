"""The arguments of ``fedleak fit``, read before and beside LightningCLI so that errors are short.

Nothing is decided here that LightningCLI would decide otherwise. A missing file is reported before
libraries are loaded, and names are compared with those that exist after LightningCLI has raised.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import inspect
import typing
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_fedleak.cli.finetuning.assets import SourceError, check_model_source, nearest
from lightning_fedleak.cli.finetuning.texts import check_text_source

_CONFIG = ("--config", "-c")
_COLUMN = "data.column="
_OF_CLASSES = (
    *("trainer.callbacks", "trainer.strategy", "trainer.logger", "trainer.plugins"),
    *("trainer.profiler", "optimizer", "lr_scheduler"),
)


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


def misspelt(arguments: Sequence[str], names: Collection[str]) -> list[str]:
    """Return every name in arguments and configs that does not exist, with the nearest.

    Args:
        arguments: after ``fit``.
        names: of the settings, ``trainer.max_steps`` say.

    Returns:
        One phrase for each; empty where all names are right.
    """
    phrases: list[str] = []
    kinds: dict[str, type] = {}
    for name, value in _pairs(arguments):
        option = name.removeprefix("--").removesuffix("+")
        owner = next((o for o in _OF_CLASSES if option.startswith(f"{o}.")), None)
        if name in _CONFIG:
            _compare(_config(value), names, "", phrases)
        elif owner is not None:  # a setting of the class that was named last
            setting = option.removeprefix(f"{owner}.").removeprefix("init_args.")
            accepted = _settings_of(kinds[owner]) if owner in kinds else None
            if accepted is not None and setting.partition(".")[0] not in accepted:
                phrase = f"'--{option}'{_meant(setting, accepted)}"
                phrases.append(f"{phrase} of {kinds[owner].__name__}")
        elif option not in names:
            phrases.append(f"'--{option}'{_meant(option, names, '--')}")
        elif option in _OF_CLASSES and _reads_like_a_class(value):
            kind, question = _class(value)
            kinds |= {} if kind is None else {option: kind}
            if question is not None:
                phrases.append(f"class '{value}' at --{option}{question}")
    return phrases


def _reads_like_a_class(value: Any) -> bool:
    last = value.rpartition(".")[2] if isinstance(value, str) else ""
    return last.isidentifier() and last[0].isupper() and last not in ("True", "False", "None")


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


# ---- names ----------------------------------------------------------------------------------


def _meant(name: str, names: Collection[str], mark: str = "") -> str:
    """Return the nearest of some names, or of their last parts, as a question."""
    close = difflib.get_close_matches(name, names, n=1)
    if not close:
        last = name.rpartition(".")[2]
        ends = {option.rpartition(".")[2]: option for option in sorted(names)}
        close = [ends[end] for end in difflib.get_close_matches(last, ends, n=1)]
    return f" (did you mean '{mark}{close[0]}'?)" if close else ""


def _compare(
    settings: Mapping[str, object], names: Collection[str], place: str, phrases: list[str]
) -> None:
    """Append the names that a mapping should not have; ``names`` are relative to it."""
    for key, value in settings.items():
        name = str(key).removesuffix("+")
        inner = {n.removeprefix(f"{name}.") for n in names if n.startswith(f"{name}.")}
        if name not in names and not inner:
            first_parts = {name.partition(".")[0] for name in names}
            phrases.append(f"'{place}{name}'{_meant(name, first_parts)}")
        elif inner and isinstance(value, Mapping) and "class_path" not in value:
            _compare(value, inner, f"{place}{name}.", phrases)
        else:
            _classes(value, f"{place}{name}", phrases)


def _classes(value: Any, place: str, phrases: list[str]) -> None:
    """Append classes that do not exist, and arguments that classes do not take."""
    if isinstance(value, list):
        for index, element in enumerate(value):
            _classes(element, f"{place}.{index}", phrases)
    if not isinstance(value, Mapping) or "class_path" not in value:
        return
    path = str(value["class_path"])
    kind, question = _class(path)
    if question is not None:
        phrases.append(f"class '{path}' at {place}{question}")
    arguments = value.get("init_args")
    if kind is None or not isinstance(arguments, Mapping):
        return
    names = _settings_of(kind)
    if names is not None:
        inner: list[str] = []
        _compare(arguments, names, "", inner)
        phrases += [f"{phrase} of {kind.__name__} at {place}" for phrase in inner]


def _class(path: str) -> tuple[type | None, str | None]:
    """Return a class by its path or bare name, or else the nearest one and a question."""
    module, _, name = path.rpartition(".")
    names: Collection[str]
    if module:
        try:
            home = importlib.import_module(module)
        except ImportError:
            return None, f" (there is no module '{module}')"
        attribute = getattr(home, name, None)  # some modules import a name on its first use
        if attribute is not None:  # a class, or a function that returns one
            return attribute if inspect.isclass(attribute) else None, None
        names = {n for n, value in vars(home).items() if inspect.isclass(value)}
        names |= {n for n in getattr(home, "__all__", ()) if n[:1].isupper()}
    else:
        bare = _bare_names()
        if name in bare:
            return bare[name], None
        names = bare
    close = difflib.get_close_matches(name, [n for n in names if not n.startswith("_")], n=1)
    if not close:
        return None, ""
    kind = getattr(home, close[0]) if module else bare[close[0]]
    return kind, f" (did you mean '{close[0]}'?)"


def _bare_names() -> dict[str, type]:
    """Return the classes that LightningCLI finds without their module."""
    import torch
    from lightning.pytorch.callbacks import Callback
    from lightning.pytorch.loggers import Logger
    from lightning.pytorch.strategies import Strategy

    from lightning_fedleak.attacks import Attack
    from lightning_fedleak.defenses import Defense

    bases: list[type] = [Callback, Logger, Strategy, Attack, Defense, torch.optim.Optimizer]
    bases.append(torch.optim.lr_scheduler.LRScheduler)
    classes: dict[str, type] = {}
    while bases:
        kind = bases.pop()
        if kind.__name__ not in classes:
            classes[kind.__name__] = kind
            bases += kind.__subclasses__()
    return classes


def _settings_of(kind: type) -> set[str] | None:
    """Return what a class takes, with fields of dataclasses in it; None if unknown."""
    from jsonargparse import ArgumentParser

    try:
        parser = ArgumentParser(exit_on_error=False)
        names = set(parser.add_class_arguments(kind, None, fail_untyped=False))
        hints = typing.get_type_hints(kind.__init__)  # type: ignore[misc]
    except (TypeError, ValueError, NameError):
        return None
    for name in sorted(names & hints.keys()):
        for hint in (hints[name], *typing.get_args(hints[name])):
            if dataclasses.is_dataclass(hint) and isinstance(hint, type):
                names |= {f"{name}.{field.name}" for field in dataclasses.fields(hint)}
    return names
