"""Checks of arguments, one line each: the message names the argument, its range and the value."""

from __future__ import annotations

import difflib
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, fields, replace
from inspect import Parameter, Signature
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


Settings = TypeVar("Settings", bound="DataclassInstance")
Value = TypeVar("Value")


def check_integer(
    name: str,
    value: Value,
    *,
    at_least: int = 1,
    at_most: int | None = None,
    optional: bool = False,
    hint: str = "",
    error: type[Exception] = ValueError,
) -> Value:
    """Return the value, or raise an error unless it is an integer within its bounds.

    True and False are no integers here.

    Args:
        name: the argument's name, which begins the message.
        value: what the user passed.
        at_least: smallest value that is allowed.
        at_most: largest value that is allowed; None sets no limit.
        optional: whether None is allowed.
        hint: ends the message: what the value means, or what to do.
        error: class of the error.

    Raises:
        ValueError: or ``error``: the value is not such an integer.
    """
    if value is None and optional:
        return value
    n: Any = value
    whole = isinstance(n, Integral) and not isinstance(n, bool)
    if whole and n >= at_least and (at_most is None or n <= at_most):
        return value
    bounds = f"of at least {at_least}" if at_most is None else f"from {at_least} to {at_most}"
    raise error(_message(name, f"an integer {bounds}", value, optional, hint))


def check_number(
    name: str,
    value: Value,
    *,
    above: float | None = None,
    at_least: float | None = None,
    below: float | None = None,
    at_most: float | None = None,
    optional: bool = False,
    hint: str = "",
    error: type[Exception] = ValueError,
) -> Value:
    """Return the value, or raise an error unless it is a finite number within its bounds.

    True and False are no numbers here, and neither are NaN and infinities.

    Args:
        name: the argument's name, which begins the message.
        value: what the user passed.
        above: the value must be larger.
        at_least: smallest value that is allowed.
        below: the value must be smaller.
        at_most: largest value that is allowed.
        optional: whether None is allowed.
        hint: ends the message: what the value means, or what to do.
        error: class of the error.

    Raises:
        ValueError: or ``error``: the value is not such a number.
    """
    if value is None and optional:
        return value
    x: Any = value
    finite = not isinstance(x, bool) and isinstance(x, Real) and math.isfinite(x)
    if (
        finite
        and (above is None or x > above)
        and (at_least is None or x >= at_least)
        and (below is None or x < below)
        and (at_most is None or x <= at_most)
    ):
        return value
    limits = {"above": above, "of at least": at_least, "below": below, "of at most": at_most}
    bounds = " and ".join(
        f"{word} {limit:g}" for word, limit in limits.items() if limit is not None
    )
    raise error(_message(name, f"a number {bounds}".rstrip(), value, optional, hint))


def check_choice(
    name: str,
    value: Value,
    choices: Sequence[Any],
    *,
    optional: bool = False,
    hint: str = "",
    error: type[Exception] = ValueError,
) -> Value:
    """Return the value, or raise an error unless it is one of a few.

    Args:
        name: the argument's name, which begins the message.
        value: what the user passed.
        choices: the values that are allowed.
        optional: whether None is allowed.
        hint: ends the message: what the value means, or what to do.
        error: class of the error.

    Raises:
        ValueError: or ``error``: the value is none of them.
    """
    if (value is None and optional) or any(
        isinstance(value, bool) == isinstance(choice, bool) and value == choice
        for choice in choices
    ):
        return value
    raise error(_message(name, " or ".join(map(repr, choices)), value, optional, hint))


def group_old_arguments(
    owner: str,
    argument: str,
    settings: Settings,
    old: Mapping[str, object],
    renamed: Mapping[str, str] | None = None,
    depth: int = 4,
) -> Settings:
    """Return settings with arguments that 0.1.0 took one by one, and warn where there are any.

    Args:
        owner: name of the class whose constructor was called.
        argument: the constructor's argument that takes the settings.
        settings: a frozen dataclass.
        old: arguments that the constructor does not name.
        renamed: fields of the settings by the names that 0.1.0 had for them.
        depth: see :func:`warn_of_old_spelling`.

    Raises:
        TypeError: the settings have no such field either.
    """
    if not old:
        return settings
    renamed = renamed or {}
    check_names(owner, old, [*(one.name for one in fields(settings)), *renamed])
    new = {renamed.get(name, name): value for name, value in old.items()}
    grouped = f"{argument}={type(settings).__name__}({spelled(new)})"
    warn_of_old_spelling(f"{owner}({spelled(old)})", f"{owner}({grouped})", depth)
    return replace(settings, **new)


def old_spelling(settings: type[DataclassInstance], **more: Any) -> Callable[..., dict[str, Any]]:
    """Return a function of a constructor's old arguments that drops those with their defaults.

    LightningCLI reads its signature where a constructor passes ``**old`` to it, and then gives
    each of these arguments to the constructor, whether the user named it or not. Fields that hold
    settings of their own are left out: 0.1.0 took none of them one by one.

    Args:
        settings: the dataclass that groups the arguments.
        more: types of further arguments, by name; their default is None.
    """
    hints = get_type_hints(settings) | {name: kind | None for name, kind in more.items()}
    simple = [one for one in fields(settings) if one.default is not MISSING]
    defaults = {one.name: one.default for one in simple} | dict.fromkeys(more)

    def drop_defaults(**old: Any) -> dict[str, Any]:
        return {
            name: value
            for name, value in old.items()
            if name not in defaults
            or (tuple(value) if isinstance(value, list) else value) != defaults[name]
        }

    drop_defaults.__signature__ = Signature(  # type: ignore[attr-defined]
        [
            Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=hints[name])
            for name, default in defaults.items()
        ]
    )
    return drop_defaults


def check_names(owner: str, names: Iterable[str], accepted: Sequence[str]) -> None:
    """Raise an error for an argument that is not accepted, with the nearest one that is.

    Raises:
        TypeError: names the argument.
    """
    for name in (one for one in names if one not in accepted):
        close = difflib.get_close_matches(name, accepted, n=1)
        hint = f". Did you mean {close[0]}=?" if close else ""
        raise TypeError(f"{owner}() got an unexpected keyword argument '{name}'{hint}")


def warn_of_old_spelling(old: str, new: str, depth: int = 4) -> None:
    """Warn that a call is spelled in another way than in 0.1.0.

    Args:
        old: the call.
        new: the call as it is spelled now.
        depth: calls from here up to the user's code, which the warning names.
    """
    message = f"{old} is spelled {new} now. The old spelling works through 0.2."
    warnings.warn(message, FutureWarning, stacklevel=depth)


def spelled(names: Iterable[str]) -> str:
    """Return arguments as they stand in a call."""
    return ", ".join(f"{name}=" for name in names)


def _message(name: str, allowed: str, value: Any, optional: bool, hint: str) -> str:
    """Return the sentence of a refusal."""
    end = f": {hint}" if hint else ""
    return f"{name} must be {allowed}{', or None' if optional else ''}, got {value!r}{end}"
