"""What a user gave ``fedleak fit``, read before and beside LightningCLI so that errors are short.

Nothing is decided here that LightningCLI would decide otherwise: a missing file is told before
libraries are loaded, and names are compared with those that exist once LightningCLI has refused.
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

from lightning_fedleak.finetuning.assets import SourceError, check_model, nearest
from lightning_fedleak.finetuning.texts import check_texts

_CONFIG = ("--config", "-c")
_COLUMN = "data.column="
_OF_CLASSES = (
    *("trainer.callbacks", "trainer.strategy", "trainer.logger", "trainer.plugins"),
    *("trainer.profiler", "optimizer", "lr_scheduler"),
)


def check_files(arguments: Sequence[str]) -> None:
    """Refuses configs, a model and a text that are meant as places of this machine and are none.

    Args:
        arguments: behind ``fit``.

    Raises:
        SourceError: what is not there, or is no config.
    """
    if arguments and not arguments[0].startswith("-"):
        first = arguments[0]
        raise SourceError(f"'{first}' names no setting; a config is given as --config {first}")
    given: dict[str, Any] = {}
    for name, value in _pairs(arguments):
        if name in _CONFIG and isinstance(value, str):
            if not Path(value).exists() and "\n" not in value and "{" not in value:
                raise SourceError(f"there is no file '{value}'{nearest(Path(value))}")
            given |= _flat(_config(value))
        else:
            given[name.removeprefix("--")] = value
    model, text, column = (
        value if isinstance(value := given.get(name), str) and value != "null" else None
        for name in ("model.model", "data.text", "data.column")
    )
    check_model(model)
    if text is not None:
        check_texts(text, column, option=_COLUMN)


def misspelt(arguments: Sequence[str], names: Collection[str]) -> list[str]:
    """Every name on the command line and in its configs that nothing has, and the nearest that is.

    Args:
        arguments: behind ``fit``.
        names: of the settings, ``trainer.max_steps`` say.

    Returns:
        One phrase for each; empty where all names are right.
    """
    told: list[str] = []
    kinds: dict[str, type] = {}
    for name, value in _pairs(arguments):
        plain = name.removeprefix("--").removesuffix("+")
        owner = next((o for o in _OF_CLASSES if plain.startswith(f"{o}.")), None)
        if name in _CONFIG:
            _compare(_config(value), names, "", told)
        elif owner is not None:  # a setting of the class that was named last
            own = plain.removeprefix(f"{owner}.").removeprefix("init_args.")
            known = _settings_of(kinds[owner]) if owner in kinds else None
            if known is not None and own.partition(".")[0] not in known:
                told.append(f"'--{plain}'{_meant(own, known)} of {kinds[owner].__name__}")
        elif plain not in names:
            told.append(f"'--{plain}'{_meant(plain, names, '--')}")
        elif plain in _OF_CLASSES and _reads_like_a_class(value):
            kind, meant = _class(value)
            kinds |= {} if kind is None else {plain: kind}
            if meant is not None:
                told.append(f"class '{value}' at --{plain}{meant}")
    return told


def _reads_like_a_class(value: Any) -> bool:
    last = value.rpartition(".")[2] if isinstance(value, str) else ""
    return last.isidentifier() and last[0].isupper() and last not in ("True", "False", "None")


def _pairs(arguments: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Options and their values; the value is None where there is none."""
    for index, argument in enumerate(arguments):
        if not argument.startswith("-"):
            continue
        name, equals, value = argument.partition("=")
        following = arguments[index + 1] if index + 1 < len(arguments) else "-"
        yield name, value if equals else None if following.startswith("-") else following


def _config(path: Any) -> Mapping[str, Any]:
    """A config's content; empty where LightningCLI is the one to say what is wrong with it.

    Raises:
        SourceError: it is not YAML. LightningCLI does not say which file that is.
    """
    import yaml

    try:
        found = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except yaml.MarkedYAMLError as error:
        line = "" if error.problem_mark is None else f", line {error.problem_mark.line + 1}"
        raise SourceError(f"'{path}'{line} is not YAML: {error.problem}") from None
    except (OSError, TypeError, ValueError, yaml.YAMLError):
        return {}
    return found if isinstance(found, Mapping) else {}


def _flat(found: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in found.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


# ---- names ----------------------------------------------------------------------------------


def _meant(name: str, names: Collection[str], mark: str = "") -> str:
    """The nearest of some names, or of their last parts, as a question."""
    close = difflib.get_close_matches(name, names, n=1)
    if not close:
        last = name.rpartition(".")[2]
        ends = {known.rpartition(".")[2]: known for known in sorted(names)}
        close = [ends[end] for end in difflib.get_close_matches(last, ends, n=1)]
    return f" (did you mean '{mark}{close[0]}'?)" if close else ""


def _compare(found: Mapping[str, Any], names: Collection[str], place: str, told: list[str]) -> None:
    """Names that a mapping has and should not have; ``names`` are relative to it."""
    for key, value in found.items():
        plain = str(key).removesuffix("+")
        inner = {n.removeprefix(f"{plain}.") for n in names if n.startswith(f"{plain}.")}
        if plain not in names and not inner:
            own = {name.partition(".")[0] for name in names}
            told.append(f"'{place}{plain}'{_meant(plain, own)}")
        elif inner and isinstance(value, Mapping) and "class_path" not in value:
            _compare(value, inner, f"{place}{plain}.", told)
        else:
            _classes(value, f"{place}{plain}", told)


def _classes(value: Any, place: str, told: list[str]) -> None:
    """Looks for classes, and for what they are given that they do not take."""
    if isinstance(value, list):
        for index, one in enumerate(value):
            _classes(one, f"{place}.{index}", told)
    if not isinstance(value, Mapping) or "class_path" not in value:
        return
    path = str(value["class_path"])
    kind, meant = _class(path)
    if meant is not None:
        told.append(f"class '{path}' at {place}{meant}")
    given = value.get("init_args")
    if kind is None or not isinstance(given, Mapping):
        return
    names = _settings_of(kind)
    if names is not None:
        own: list[str] = []
        _compare(given, names, "", own)
        told += [f"{phrase} of {kind.__name__} at {place}" for phrase in own]


def _class(path: str) -> tuple[type | None, str | None]:
    """A class by its path or bare name, or the nearest; and the question, where it is not that."""
    module, _, name = path.rpartition(".")
    known: Collection[str]
    if module:
        try:
            home = importlib.import_module(module)
        except ImportError:
            return None, f" (there is no module '{module}')"
        found = getattr(home, name, None)  # some modules import a name when it is asked for
        if found is not None:  # a class, or something that gives one
            return found if inspect.isclass(found) else None, None
        known = {n for n, value in vars(home).items() if inspect.isclass(value)}
        known |= {n for n in getattr(home, "__all__", ()) if n[:1].isupper()}
    else:
        bare = _bare_names()
        if name in bare:
            return bare[name], None
        known = bare
    close = difflib.get_close_matches(name, [n for n in known if not n.startswith("_")], n=1)
    if not close:
        return None, ""
    kind = getattr(home, close[0]) if module else bare[close[0]]
    return kind, f" (did you mean '{close[0]}'?)"


def _bare_names() -> dict[str, type]:
    """Classes that LightningCLI finds without their module."""
    import torch
    from lightning.pytorch.callbacks import Callback
    from lightning.pytorch.loggers import Logger
    from lightning.pytorch.strategies import Strategy

    from lightning_fedleak.attacks.base import Attack
    from lightning_fedleak.defenses import Defense

    bases: list[type] = [Callback, Logger, Strategy, Attack, Defense, torch.optim.Optimizer]
    bases.append(torch.optim.lr_scheduler.LRScheduler)
    found: dict[str, type] = {}
    while bases:
        kind = bases.pop()
        if kind.__name__ not in found:
            found[kind.__name__] = kind
            bases += kind.__subclasses__()
    return found


def _settings_of(kind: type) -> set[str] | None:
    """What a class takes, with the fields of dataclasses in it; None where it cannot be told."""
    from jsonargparse import ArgumentParser

    try:
        parser = ArgumentParser(exit_on_error=False)
        names = set(parser.add_class_arguments(kind, None, fail_untyped=False))
        hints = typing.get_type_hints(kind.__init__)  # type: ignore[misc]
    except (TypeError, ValueError, NameError):
        return None
    for name in sorted(names & hints.keys()):
        for one in (hints[name], *typing.get_args(hints[name])):
            if dataclasses.is_dataclass(one) and isinstance(one, type):
                names |= {f"{name}.{field.name}" for field in dataclasses.fields(one)}
    return names
