"""Settings of DP-SGD: the rare ones in groups, their checks, and what they guarantee."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lightning_fedleak.defenses.accounting.accounting import Trust
from lightning_fedleak.defenses.base import State, refuse
from lightning_fedleak.defenses.checks import check_choice, check_integer, check_number
from lightning_fedleak.defenses.dpsgd.clipped_sum import MaxGradNorm, QuantileClip
from lightning_fedleak.defenses.dpsgd.per_sample import Clipping

GroupBy = str | Callable[[Any], Any] | Sequence[Any]


@dataclass(frozen=True)
class ClipSettings:
    """How gradients are clipped.

    Attributes:
        form: The form of per-sample gradients in memory: ``"ghost"`` for factors, ``"per_sample"``
            for all numbers, ``"auto"`` for the smaller one in each layer.
        gamma: The gamma of automatic clipping, ``max_grad_norm="auto"``.
        loss: ``"trusted"`` if you have proved that the loss is a mean over samples of terms that
            depend on one sample each, ``"checked"`` to let DPSGD check it.

    Raises:
        DefenseError: a value out of range.
    """

    form: Clipping = "auto"
    gamma: float = 0.01
    loss: Literal["checked", "trusted"] = "checked"

    def __post_init__(self) -> None:
        check_choice("DPSGD: form", self.form, ("auto", "per_sample", "ghost"))
        check_number("DPSGD: gamma", self.gamma, above=0)
        check_choice("DPSGD: loss", self.loss, ("checked", "trusted"))


@dataclass(frozen=True)
class ReleaseSettings:
    """Whom releases are hidden from, and when they end.

    Attributes:
        trust: ``"local"`` where the server sees each client's update, ``"central"`` where it sees
            their sum alone (secure aggregation): each client then adds a share of the noise.
        on_budget: whether a spent ``target_epsilon`` ends the fit (``"stop"``) or raises
            :class:`BudgetSpent` (``"raise"``). Nothing is released beyond it.
        max_hardenings: how often a gate may double the noise, with ``accountant="filter"``; None
            for no limit.

    Raises:
        DefenseError: a value out of range.
    """

    trust: Trust = "local"
    on_budget: Literal["stop", "raise"] = "stop"
    max_hardenings: int | None = None

    def __post_init__(self) -> None:
        check_choice("DPSGD: trust", self.trust, ("local", "central"))
        check_choice("DPSGD: on_budget", self.on_budget, ("stop", "raise"))
        check_integer("DPSGD: max_hardenings", self.max_hardenings, at_least=0, optional=True)


@dataclass(frozen=True)
class Users:
    """Users as the unit of privacy: all rows of one are drawn, clipped and accounted together.

    Examples:
        >>> from lightning_fedleak import DPSGD, Users
        >>> user = Users(group_by="author", rows_per_user=4)
        >>> DPSGD(1.0, noise_multiplier=1.0, target_delta=1e-5, unit=user).name
        'dpsgd'

    Attributes:
        group_by: the user of a row: the name of a column, a function of an example, or one key for
            each row.
        rows_per_user: most rows of one user in a batch, drawn at random; None for all.

    Raises:
        DefenseError: a value out of range.
    """

    group_by: GroupBy
    rows_per_user: int | None = None

    def __post_init__(self) -> None:
        hint = "None takes all rows"
        check_integer("DPSGD: rows_per_user", self.rows_per_user, optional=True, hint=hint)


Unit = Literal["example"] | Users
"""What is added or removed."""


def check_budget(
    noise_multiplier: float | None,
    target_epsilon: float | None,
    target_delta: float | None,
    seed: int | None,
    accountant: str,
) -> None:
    """Raise an error for numbers out of range, or that contradict each other.

    With ``accountant="filter"`` the noise may be given beside the epsilon, which must be given.

    Raises:
        DefenseError: says which.
    """
    check_choice("DPSGD: accountant", accountant, ("prv", "rdp", "filter"))
    filtered, targeted = accountant == "filter", target_epsilon is not None
    count = "neither" if noise_multiplier is None else "both"
    check_number("DPSGD: noise_multiplier", noise_multiplier, at_least=0, optional=True)
    check_number("DPSGD: target_epsilon", target_epsilon, above=0, optional=True)
    neither_or_both = (noise_multiplier is None) == (target_epsilon is None)
    refusals: dict[str, object] = {
        "accountant='filter' needs target_epsilon and target_delta": filtered and not targeted,
        f"{count} of noise_multiplier and target_epsilon given: give one": (
            not filtered and neither_or_both
        ),
        "target_epsilon needs target_delta, below one over the number of examples": (
            targeted and target_delta is None
        ),
        "with a seed no epsilon holds: leave out seed or target_epsilon": targeted
        and seed is not None,
    }
    refuse("DPSGD: ", refusals)
    check_number("DPSGD: target_delta", target_delta, above=0, below=1, optional=True)


def check_combination(
    max_grad_norm: MaxGradNorm, unit: Unit, max_physical_batch_size: int | None
) -> None:
    """Raise an error for a clip norm or a number of rows out of range, and what contradicts.

    Raises:
        DefenseError: says which.
    """
    if max_grad_norm != "auto" and not isinstance(max_grad_norm, QuantileClip):
        hint = "or 'auto', or a QuantileClip"
        check_number("DPSGD: max_grad_norm", max_grad_norm, above=0, hint=hint)
    max_rows, rows, by_user = max_physical_batch_size, None, isinstance(unit, Users)
    hint = "rows that are run at once"
    check_integer("DPSGD: max_physical_batch_size", max_rows, optional=True, hint=hint)
    if isinstance(unit, Users):
        rows = unit.rows_per_user
    else:
        check_choice("DPSGD: unit", unit, ("example",), hint="or Users(group_by)")
    refusals = {
        f"max_physical_batch_size={max_rows} runs whole users: pass "
        f"Users(..., rows_per_user={max_rows}) or fewer": (
            by_user and max_rows is not None and (rows is None or rows > max_rows)
        )
    }
    refuse("DPSGD: ", refusals)


def check_referee(
    check: bool | int, unit: Unit, noise_multiplier: float | None, max_grad_norm: MaxGradNorm
) -> None:
    """Raise an error for a training in which no planted gradient could be tested.

    Raises:
        DefenseError: says why.
    """
    every = int(check) if isinstance(check, bool) else check
    check_integer("DPSGD: check", every, at_least=0, hint="True, or steps between looks")
    refusals = {
        "check plants a gradient in each row, and Users clips several rows together: leave one of "
        "them out": check and isinstance(unit, Users),
        "check compares releases with one clip norm, and QuantileClip changes it: leave one of "
        "them out": check and isinstance(max_grad_norm, QuantileClip),
        "check compares noise with noise_multiplier, which is 0: leave check out": (
            check and noise_multiplier == 0
        ),
    }
    refuse("DPSGD: ", refusals)


def check_continued(state: State, releases: int, trust: Trust, unit: str) -> None:
    """Raise an error for a checkpoint whose releases do not add up with those of this run.

    Raises:
        DefenseError: they were made under ``trust="central"`` and this run is under ``"local"``, or
            for another unit of privacy.
    """
    earlier_trust, earlier_unit = state.get("trust", trust), state.get("unit", "example")
    refusals = {
        "under trust='central', in which each client adds a share of the noise. Go on with that, "
        "or begin a new run.": earlier_trust == "central" and trust == "local",
        f"with unit={earlier_unit!r}, and this run has unit={unit!r}. Go on with that, or begin a "
        "new run from a model that this data did not train.": earlier_unit != unit,
    }
    refuse(f"DPSGD: the checkpoint's {releases} releases were made ", refusals)


def guarantee_of(trust: Trust, seed: int | None, unit: str, *, fixed_budget: bool) -> str:
    """Return what DP-SGD with these settings guarantees, and against whom.

    Args:
        trust: in the server.
        seed: The seed of noise that can be guessed; None: none can.
        unit: The unit of privacy.
        fixed_budget: whether the account is a filter's.
    """
    if seed is not None:
        return "none: with a seed the noise can be guessed and subtracted"
    central = "only the sum of all clients' updates (secure aggregation)"
    server = "every client's shared updates" if trust == "local" else central
    protected = "one example" if unit == "example" else "one user with all of their rows,"
    shared = "an example" if unit == "example" else "a user"
    budget = "the budget that was fixed before the run"
    if not fixed_budget:
        budget = "the epsilon that `privacy` gives"
    return (
        f"against whoever sees {server}: (epsilon, delta)-differential privacy of {protected} "
        f"added or removed, for all releases together, with {budget}. If several clients hold "
        f"{shared}, add their epsilons. Not covered: what is logged or sent otherwise, and "
        "decisions taken in sight of the data."
    )
