"""Checks of arguments that raise a :class:`DefenseError`."""

from __future__ import annotations

from functools import partial

from lightning_fedleak import validate
from lightning_fedleak.defenses.base import DefenseError

check_choice = partial(validate.check_choice, error=DefenseError)
check_integer = partial(validate.check_integer, error=DefenseError)
check_number = partial(validate.check_number, error=DefenseError)
