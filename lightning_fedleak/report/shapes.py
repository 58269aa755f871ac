"""What the lines of a run look like, and what in a line is odd."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from types import FunctionType
from typing import Any, TypeGuard

RESULTS, RECORD = "leakage.jsonl", "run.jsonl"

_MOST = 2**53
"""Steps, counts and epsilons that are higher are no run's."""
_DIGITS = 20
"""Whole numbers of more are unknown."""


def parsed(text: str) -> Any:
    """JSON as its standard has it: NaN and infinity, and numbers without end, are unknown.

    Raises:
        ValueError: it is no JSON.
        RecursionError: it is nested without end.
    """

    def whole(digits: str) -> int | None:
        return int(digits) if len(digits) <= _DIGITS else None

    def real(digits: str) -> float | None:
        value = float(digits)
        return value if math.isfinite(value) else None

    return json.loads(text, parse_constant=lambda _: None, parse_int=whole, parse_float=real)


def wrong_in(line: Any, name: str) -> str:
    """What is odd in a line of one of the files, as a path into it; empty where nothing is."""
    if name == RESULTS:
        return _wrong(line, _RESULT)
    return _wrong(line, _OF_ANY_KIND) or _wrong(line, _RECORD.get(line["kind"], {}))


def _is_number(value: Any) -> TypeGuard[float]:
    return type(value) in (float, int) and abs(value) < math.inf


def _amount(value: object) -> bool:
    """Zero or above, infinite, or unknown."""
    return value in (None, "infinite") or (_is_number(value) and 0 <= value <= _MOST)


def _chance(value: object) -> bool:
    """From 0 to 1, or unknown."""
    return value is None or (_is_number(value) and 0 <= value <= 1)


def _limit(value: object) -> bool:
    """A number, infinite, or unknown."""
    return value in (None, "infinite") or _is_number(value)


def _release(value: object) -> bool:
    """Noise multiplier, sample rate, and how many."""
    return (
        isinstance(value, list)
        and len(value) == 3
        and all(_is_number(one) and 0 <= one <= _MOST for one in value)
        and value[1] <= 1
        and isinstance(value[2], int)
    )


Shape = Any
"""Of a value: a type, a choice of shapes in a tuple, a list of one shape, a function that says
whether it is one, or a dict: a name that ends in ? may be missing, and ``...`` stands for any."""


def _number(value: object) -> bool:
    return value is None or _is_number(value)


_CLIENT = (str, int, None)
_SPENT = {
    "defense": str,
    "epsilon?": _amount,
    "delta?": _chance,
    "noise_multiplier?": _amount,
    "sample_rate?": _chance,
    "releases?": (int, None),
    "history?": (None, [_release]),
}
_SETTINGS = {
    **dict.fromkeys(("trust?", "unit?", "sampling?", "accountant?", "ledger?"), str),
    **dict.fromkeys(("target_epsilon?", "clip?"), _amount),
    "max_grad_norm?": (_amount, str),  # "auto", or of norms by layers
    "clients?": int,
    "poisson?": (bool, None),
}
_DEFENSE = {
    "name": str,
    "class?": str,
    "guarantee?": str,
    "settings?": (None, _SETTINGS),
}
_RESULT: Mapping[str, Shape] = {
    "run?": str,
    "schema?": int,
    "step": int,
    "attack": str,
    "stage": str,
    "client?": _CLIENT,
    "round?": (int, None),
    "config?": (None, {}),
    "n?": (int, None),
    "exposed?": (bool, None),
    "metrics": {...: (None, {...: _number})},
    "unknown?": (str, None),
}
_OF_ANY_KIND = {"run": str, "kind": str, "schema?": int}
_RECORD: Mapping[str, Mapping[str, Shape]] = {
    "begin": {
        "fit?": (str, None),
        "time?": str,
        "resumed?": (
            None,
            {"run?": str, "privacy?": [{"defense": str, "history": [_release]}]},
        ),
        "versions?": (None, {...: str}),
        "machine?": (None, {}),
        "training?": (None, {}),
        "model?": (
            None,
            {
                "class": str,
                "peft?": [str],
                "trained?": [str],
                "trained_parameters?": (int, None),
                "parameters?": (int, None),
            },
        ),
        "monitor?": {
            "clients?": int,
            "local_steps?": (int, None),
            "adversary?": [str],
            "stages?": [str],
        },
        "attacks?": [
            {
                "name": str,
                "family": str,
                "needs?": [str],
                "reads?": [str],
                "adversary?": str,
                "config?": (None, {}),
            }
        ],
        "not_played?": [{"name": str, "why": str}],
        "unread?": [str],
        "defenses?": [_DEFENSE],
        "gates?": [
            {
                "name": str,
                "metric": str,
                "at_most?": _limit,
                "action?": str,
                "bound?": str,
                "alpha?": _number,
            }
        ],
        "settings_hash?": str,
    },
    "defense": _DEFENSE,
    "look": {
        "step": int,
        "client?": _CLIENT,
        "utility?": (None, {...: _limit}),
        "privacy?": (None, [_SPENT]),
    },
    "gate": {
        "gate": str,
        "did": str,
        "step": int,
        "client?": _CLIENT,
        "metric?": str,
        "of?": (str, None),
        "measured?": _number,
        "at_most?": _limit,
        "why?": (str, None),
        "hardened?": (None, [str]),
    },
    "end": {"step": int, "how": str, "privacy?": (None, [_SPENT])},
}
"""Of ``run.jsonl``, by the kind of the line."""


def _wrong(value: Any, shape: Shape, where: str = "") -> str:
    """The first place in a value that is not of its shape; empty where all are."""
    if isinstance(shape, FunctionType):
        fits = shape(value)
    elif isinstance(shape, type):
        fits = isinstance(value, shape) and isinstance(value, bool) == (shape is bool)
        fits = fits and not (shape is int and abs(value) > _MOST)
    elif shape is None:
        fits = value is None
    elif isinstance(shape, tuple):
        told = [_wrong(value, one, where) for one in shape]
        return "" if "" in told else max(told, key=len)
    elif isinstance(shape, dict) and isinstance(value, dict):
        return _wrong_of(value, shape, where)
    elif isinstance(shape, list) and isinstance(value, list):
        return next(filter(None, (_wrong(one, shape[0], where) for one in value)), "")
    else:
        fits = False
    return "" if fits else where or "an empty name"


def _wrong_of(value: Mapping[str, Any], shape: Mapping[Any, Shape], where: str) -> str:
    at = f"{where}/" if where else ""
    for name, one in shape.items():
        if name is ...:
            continue
        own = name.removesuffix("?")
        if own in value:
            if wrong := _wrong(value[own], one, at + own):
                return wrong
        elif own == name:
            return f"{at}{name} is missing"
    if ... in shape:  # then there are no names of its own
        of = shape[...]
        return next(filter(None, (_wrong(v, of, at + n[:40]) for n, v in value.items())), "")
    return ""


__all__ = ["RECORD", "RESULTS", "parsed", "wrong_in"]
