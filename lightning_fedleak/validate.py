"""Checks of arguments, whose messages name the argument, its allowed values and its value.

:func:`explain_errors` and :func:`explain_arguments` replace the messages of other errors.
"""

import difflib
import functools
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from numbers import Integral, Real
from typing import Any, TypeVar

Value = TypeVar("Value")
Decorated = TypeVar("Decorated", bound=Callable[..., Any])


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

    True and False do not count as integers.

    Args:
        name: The name of the argument, which begins the message.
        value: The value that the user passed.
        at_least: The smallest allowed value.
        at_most: The largest allowed value; None for no limit.
        optional: Whether None is allowed.
        hint: The end of the message: the meaning of the value, or what to do.
        error: The class of the error.

    Raises:
        ValueError: The value is not such an integer. The error is of the class ``error``.
    """
    if value is None and optional:
        return value
    n: Any = value
    is_integer = isinstance(n, Integral) and not isinstance(n, bool)
    if is_integer and n >= at_least and (at_most is None or n <= at_most):
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

    True, False, NaN and infinities do not count as numbers.

    Args:
        name: The name of the argument, which begins the message.
        value: The value that the user passed.
        above: The value must be larger than this.
        at_least: The smallest allowed value.
        below: The value must be smaller than this.
        at_most: The largest allowed value.
        optional: Whether None is allowed.
        hint: The end of the message: the meaning of the value, or what to do.
        error: The class of the error.

    Raises:
        ValueError: The value is not such a number. The error is of the class ``error``.
    """
    if value is None and optional:
        return value
    x: Any = value
    is_finite = not isinstance(x, bool) and isinstance(x, Real) and math.isfinite(x)
    if (
        is_finite
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
    """Return the value, or raise an error unless it is one of the choices.

    Args:
        name: The name of the argument, which begins the message.
        value: The value that the user passed.
        choices: The allowed values.
        optional: Whether None is allowed.
        hint: The end of the message: the meaning of the value, or what to do.
        error: The class of the error.

    Raises:
        ValueError: The value is none of the choices. The error is of the class ``error``.
    """
    if (value is None and optional) or any(
        isinstance(value, bool) == isinstance(choice, bool) and value == choice
        for choice in choices
    ):
        return value
    raise error(_message(name, " or ".join(map(repr, choices)), value, optional, hint))


@contextmanager
def explain_errors(
    message: str, *caught: type[Exception], error: type[Exception], hint: str = ""
) -> Iterator[None]:
    """Replace errors in the block by an error with an explanation.

    Args:
        message: The beginning of the new message: what failed. The text of the replaced error and
            the file that it names follow.
        caught: The classes of errors that are replaced.
        error: The class of the new error.
        hint: The end of the message: what to do.
    """
    try:
        yield
    except caught as cause:
        words = str(getattr(cause, "strerror", None) or cause)
        if not words or isinstance(cause, KeyError):
            words = f"{type(cause).__name__} {words}".rstrip()
        if (file := getattr(cause, "filename", None)) and str(file) not in message:
            words += f" ({file})"
        # Without the cause: an error of the JSON parser holds the whole text, which may be private.
        raise error(f"{message}: {words}{hint and f'. {hint}'}") from None


def explain_arguments(
    example: str = "", *, settings: type | None = None, elsewhere: Mapping[str, str] | None = None
) -> Callable[[Decorated], Decorated]:
    """Return a decorator that adds the correct call to the error of a wrong one.

    It is for an ``__init__``, or for a data class.

    Args:
        example: A correct call; ``{}`` is replaced by the name of the class.
        settings: A data class that the class takes as ``settings=``. If one of its fields is passed
            directly, the error says where it belongs.
        elsewhere: What to write for an argument that belongs to another class, by its name.

    Returns:
        The decorator. A wrong call raises ``TypeError``, as Python does, with the name of the class
        and the nearest name or the example.
    """
    setting_names = [] if settings is None else [field.name for field in fields(settings)]

    def decorate(init: Decorated) -> Decorated:
        if isinstance(init, type):
            init.__init__ = decorate(init.__init__)  # type: ignore[misc]
            return init
        signature = inspect.signature(init)

        def hint(named: Sequence[str]) -> str:
            """Return the end of the message for a call with these keyword arguments."""
            unknown = [name for name in named if name not in signature.parameters]
            for name in unknown:
                if elsewhere and name in elsewhere:
                    return f". Write {elsewhere[name]}"
                if settings is not None and name in setting_names:
                    return f". It belongs in settings={settings.__name__}({name}=...)"
                if close := difflib.get_close_matches(name, signature.parameters, 1, 0.5):
                    return f". Did you mean {close[0]}=?"
            return f". For example: {example}" if example else ""

        @functools.wraps(init)
        def checked(self: Any, *arguments: Any, **named: Any) -> None:
            try:
                bound = signature.bind(self, *arguments, **named)
            except TypeError as error:
                message = f"{type(self).__name__}: {error}{hint([*named])}"
                raise TypeError(message.replace("{}", type(self).__name__)) from None
            value = bound.arguments.get("settings")
            if settings is not None and type(value) not in (settings, type(None)):
                raise TypeError(f"{type(self).__name__}: write settings={settings.__name__}(...)")
            init(self, *arguments, **named)

        return checked  # type: ignore[return-value]

    return decorate


def _message(name: str, allowed: str, value: Any, optional: bool, hint: str) -> str:
    """Return the message for a value that is not allowed."""
    end = f": {hint}" if hint else ""
    return f"{name} must be {allowed}{', or None' if optional else ''}, got {value!r}{end}"


class WrongModel(ValueError):
    """A folder does not hold the weights of the model that is to be measured."""
