"""Defences with their settings, parsed from text such as ``gradient_noise:clip=1,sigma=1e-3``."""

from __future__ import annotations

import ast
import inspect
import itertools
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, get_args, get_type_hints

from lightning_fedleak import defenses as package_defenses
from lightning_fedleak.cli.finetuning import SourceError, refuse_errors
from lightning_fedleak.cli.studies.names import did_you_mean
from lightning_fedleak.defenses import Defense, TokenLDP
from lightning_fedleak.defenses.token_ldp.mechanisms import Mechanism

NONE = "none"
MECHANISMS = get_args(Mechanism)
"""Mechanisms of TokenLDP; the name of each is short for TokenLDP with this mechanism."""


@dataclass(frozen=True)
class DefenseSpec:
    """One defence with its settings; ``none`` for no defence.

    Attributes:
        kind: The name of the defence, ``Defense.name``; or ``none``.
        settings: The arguments of its class by name.
    """

    kind: str
    settings: Mapping[str, Any]

    def __str__(self) -> str:
        """Return the defence as a user writes it."""
        settings = ",".join(f"{name}={_format(value)}" for name, value in self.settings.items())
        return f"{self.kind}:{settings}" if settings else self.kind

    @property
    def arguments(self) -> dict[str, Any]:
        """Return the arguments of the class; settings of a dataclass are put into it."""
        groups = _groups(defense_classes()[self.kind])
        arguments: dict[str, Any] = {}
        grouped = defaultdict[tuple[str, type], dict[str, Any]](dict)
        for name, value in self.settings.items():
            values = grouped[groups[name]] if name in groups else arguments
            values[name] = value
        return arguments | {name: group(**values) for (name, group), values in grouped.items()}

    def build(self) -> list[Defense]:
        """Return a new defence, for one run; an empty list for ``none``.

        Raises:
            SourceError: a setting is out of its range.
        """
        if self.kind == NONE:
            return []
        defense = defense_classes()[self.kind]
        hint = f"'{self.kind}' takes {', '.join(inspect.signature(defense).parameters)}"
        with refuse_errors(f"'{self}' cannot be built", ValueError, TypeError, hint=hint):
            return [defense(**self.arguments)]


def defense_classes() -> dict[str, type[Defense]]:
    """Return the classes of the package's defences by their names."""
    return {
        cls.name: cls
        for cls in vars(package_defenses).values()
        if isinstance(cls, type) and issubclass(cls, Defense) and cls is not Defense
    }


def parse_defenses(text: str) -> list[DefenseSpec]:
    """Return every combination of the settings in ``name:setting=value/value,setting=value``.

    Values are numbers, ``true``, ``false``, ``none`` or words; several of one setting are separated
    by ``/`` and make a grid: ``gradient_noise:clip=1,sigma=0/1e-4/1e-3``. A mechanism of
    TokenLDP may replace the defence's name: ``grr:epsilon=5`` is
    ``token_ldp:mechanism=grr,epsilon=5``.

    Args:
        text: one defence, or ``none``.

    Raises:
        SourceError: the defence or a setting is unknown, or a value is not allowed.
    """
    kind, _, text_of_settings = text.strip().partition(":")
    if kind == NONE:
        if text_of_settings:
            raise SourceError(f"'{NONE}' is no defence and takes no settings")
        return [DefenseSpec(NONE, {})]
    names = [NONE, *defense_classes(), *MECHANISMS]
    if kind not in names:
        raise SourceError(
            f"there is no defence '{kind}'{did_you_mean(kind, names)}. These exist: "
            f"{', '.join(names)}"
        )
    if kind in MECHANISMS:
        kind, text_of_settings = (
            TokenLDP.name,
            ",".join([f"mechanism={kind}", *filter(None, [text_of_settings])]),
        )
    settings = _parse_settings(kind, text_of_settings)
    specs = [
        DefenseSpec(kind, dict(zip(settings, values, strict=True)))
        for values in itertools.product(*settings.values())
    ]
    for spec in specs:
        spec.build()
    return specs


def _parse_settings(kind: str, text: str) -> dict[str, list[Any]]:
    """Return the values of each setting in ``setting=a/b,setting=c``."""
    defense = defense_classes()[kind]
    parameters = inspect.signature(defense).parameters.values()
    allowed = [p.name for p in parameters if p.kind is not p.VAR_KEYWORD] + [*_groups(defense)]
    settings: dict[str, list[Any]] = {}
    for part in text.split(",") if text else []:
        name, equals, values = part.strip().partition("=")
        if not equals or not values:
            raise SourceError(f"'{part}' of '{kind}:{text}' must be setting=value or setting=a/b/c")
        if name not in allowed:
            raise SourceError(
                f"'{kind}' has no setting '{name}'{did_you_mean(name, allowed)}. It has: "
                f"{', '.join(allowed)}"
            )
        settings[name] = [_parse_value(value) for value in values.split("/")]
    return settings


def _groups(defense: type[Defense]) -> dict[str, tuple[str, type]]:
    """Return the argument and the dataclass of each setting that a defence takes in a group."""
    return {
        field.name: (argument, group)
        for argument, hint in get_type_hints(defense.__init__).items()
        for group in get_args(hint)
        if isinstance(group, type) and is_dataclass(group)
        for field in fields(group)
    }


def _parse_value(text: str) -> Any:
    """Return the value of a setting: a bool, None, a number, or the text itself."""
    text = text.strip()
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        value = None
    return value if isinstance(value, int | float) else text


def _format(value: Any) -> str:
    """Return a value as :func:`_parse_value` reads it."""
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)
