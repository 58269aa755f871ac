"""Defences and their strengths in words, as a command line takes them."""

from __future__ import annotations

import ast
import inspect
import itertools
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, get_args, get_type_hints

from lightning_fedleak import defenses as known
from lightning_fedleak.cli.finetuning import SourceError, refuse_errors
from lightning_fedleak.cli.studies.names import did_you_mean
from lightning_fedleak.defenses import Defense, DefenseError, TokenLDP
from lightning_fedleak.defenses.token_ldp.mechanisms import Mechanism

NONE = "none"
MECHANISMS = get_args(Mechanism)
"""Mechanisms of TokenLDP; each name is short for that defence with this mechanism."""


@dataclass(frozen=True)
class DefenseSpec:
    """One defence with its settings; ``none`` for no defence.

    Attributes:
        kind: ``Defense.name``.
        settings: arguments of its class.
    """

    kind: str
    settings: Mapping[str, Any]

    def __str__(self) -> str:
        """Return the defence as a user writes it."""
        settings = ",".join(f"{name}={_written(value)}" for name, value in self.settings.items())
        return f"{self.kind}:{settings}" if settings else self.kind

    @property
    def arguments(self) -> dict[str, Any]:
        """Return the arguments of the class, with the settings that it groups in their groups."""
        groups = _groups(defense_kinds()[self.kind])
        arguments: dict[str, Any] = {}
        grouped = defaultdict[tuple[str, type], dict[str, Any]](dict)
        for name, value in self.settings.items():
            values = grouped[groups[name]] if name in groups else arguments
            values[name] = value
        return arguments | {name: kind(**values) for (name, kind), values in grouped.items()}

    def build(self) -> list[Defense]:
        """Return a new defence, for one run; an empty list for ``none``.

        Raises:
            SourceError: a setting out of its range.
        """
        if self.kind == NONE:
            return []
        kind, wrong = defense_kinds()[self.kind], (DefenseError, ValueError, TypeError)
        hint = f"'{self.kind}' takes {', '.join(inspect.signature(kind).parameters)}"
        with refuse_errors(f"'{self}' cannot be built", *wrong, hint=hint):
            return [kind(**self.arguments)]


def defense_kinds() -> dict[str, type[Defense]]:
    """Return the package's defences by name."""
    return {
        kind.name: kind
        for kind in vars(known).values()
        if isinstance(kind, type) and issubclass(kind, Defense) and kind is not Defense
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
        SourceError: an unknown defence or setting, or a value that it does not take.
    """
    kind, _, text_of_settings = text.strip().partition(":")
    if kind == NONE:
        if text_of_settings:
            raise SourceError(f"'{NONE}' is no defence and takes no settings")
        return [DefenseSpec(NONE, {})]
    names = [NONE, *defense_kinds(), *MECHANISMS]
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
    defense = defense_kinds()[kind]
    settings = _settings(kind, defense, text_of_settings)
    specs = [
        DefenseSpec(kind, dict(zip(settings, values, strict=True)))
        for values in itertools.product(*settings.values())
    ]
    for spec in specs:
        spec.build()
    return specs


def _settings(kind: str, defense: type[Defense], text: str) -> dict[str, list[Any]]:
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
        settings[name] = [_value(value) for value in values.split("/")]
    return settings


def _groups(defense: type[Defense]) -> dict[str, tuple[str, type]]:
    """Return each setting in a dataclass that a defence takes: its argument, and the class."""
    return {
        field.name: (argument, kind)
        for argument, hint in get_type_hints(defense.__init__).items()
        for kind in get_args(hint)
        if isinstance(kind, type) and is_dataclass(kind)
        for field in fields(kind)
    }


def _value(text: str) -> Any:
    text = text.strip()
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        value = None
    return value if isinstance(value, int | float) else text


def _written(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)
