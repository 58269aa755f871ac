"""Settings of DP-SGD: groups of rarely used arguments, checks of arguments, and the guarantee.

A *release* is one noised update. A *gate* is a rule that acts during training if measured leakage
is too high; with ``action="harden"`` it doubles the noise.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from lightning_fedleak.defenses import base
from lightning_fedleak.defenses.accounting.accounting import Trust as Trust
from lightning_fedleak.defenses.dpsgd.clipped_sum import MaxGradNorm, QuantileClip
from lightning_fedleak.defenses.dpsgd.per_sample import Clipping

# How the user of a row is found: by the name of a column, a function of an example, or a sequence
# with a key for each row.
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
        DefenseError: A value is out of range.
    """

    form: Clipping = "auto"
    gamma: float = 0.01
    loss: Literal["checked", "trusted"] = "checked"

    def __post_init__(self) -> None:
        base.check_choice("DPSGD: form", self.form, ("auto", "per_sample", "ghost"))
        base.check_number("DPSGD: gamma", self.gamma, above=0)
        base.check_choice("DPSGD: loss", self.loss, ("checked", "trusted"))


@dataclass(frozen=True)
class ReleaseSettings:
    """The trust in the server, and what happens when the budget is spent.

    Attributes:
        trust: ``"local"`` if the server sees the update of each client, ``"central"`` if it sees
            only their sum (secure aggregation), so that each client adds a share of the noise.
        on_budget: Whether the fit ends (``"stop"``) or :class:`BudgetSpent` is raised (``"raise"``)
            when ``target_epsilon`` is spent. Nothing more is released.
        max_hardenings: The number of times that a gate may double the noise, which needs
            ``accountant="filter"``; None for no limit.

    Raises:
        DefenseError: A value is out of range.
    """

    trust: Trust = "local"
    on_budget: Literal["stop", "raise"] = "stop"
    max_hardenings: int | None = None

    def __post_init__(self) -> None:
        base.check_choice("DPSGD: trust", self.trust, ("local", "central"))
        base.check_choice("DPSGD: on_budget", self.on_budget, ("stop", "raise"))
        base.check_integer("DPSGD: max_hardenings", self.max_hardenings, at_least=0, optional=True)


@dataclass(frozen=True)
class Users:
    """Users as the unit of privacy: all rows of a user are drawn, clipped and accounted together.

    Examples:
        >>> from lightning_fedleak import DPSGD, Users
        >>> user = Users(group_by="author", rows_per_user=4)
        >>> DPSGD(1.0, noise_multiplier=1.0, target_delta=1e-5, unit=user).name
        'dpsgd'

    Attributes:
        group_by: What gives the user of a row: the name of a column, a function of an example, or
            a sequence with a key for each row.
        rows_per_user: The largest number of rows of one user in a batch, drawn at random; None for
            all rows.

    Raises:
        DefenseError: A value is out of range.
    """

    group_by: GroupBy
    rows_per_user: int | None = None

    def __post_init__(self) -> None:
        base.check_integer("DPSGD: rows_per_user", self.rows_per_user, optional=True)


Unit = Literal["example"] | Users
"""The unit of privacy: what is added or removed between neighbouring datasets."""


def check_budget(
    noise_multiplier: float | None,
    target_epsilon: float | None,
    target_delta: float | None,
    seed: int | None,
    accountant: str,
) -> None:
    """Raise an error for arguments of the budget that are out of range or contradict each other.

    ``accountant="filter"`` needs ``target_epsilon``; ``noise_multiplier`` may be passed with it.
    Other accountants need exactly one of them.

    Raises:
        DefenseError: Names the arguments.
    """
    base.check_choice("DPSGD: accountant", accountant, ("prv", "rdp", "filter"))
    is_filter, has_target = accountant == "filter", target_epsilon is not None
    has_both_or_none = (noise_multiplier is not None) == has_target
    base.check_number("DPSGD: noise_multiplier", noise_multiplier, at_least=0, optional=True)
    base.check_number("DPSGD: target_epsilon", target_epsilon, above=0, optional=True)
    refusals: dict[str, object] = {
        "give one of noise_multiplier and target_epsilon": not is_filter and has_both_or_none,
        "target_epsilon needs target_delta, and accountant='filter' needs both": (
            target_delta is None if has_target else is_filter
        ),
        "with a seed no epsilon holds: leave out seed or target_epsilon": has_target
        and seed is not None,
    }
    base.refuse("DPSGD: ", refusals)
    base.check_number("DPSGD: target_delta", target_delta, above=0, below=1, optional=True)


def check_combination(
    max_grad_norm: MaxGradNorm, unit: Unit, max_physical_batch_size: int | None
) -> None:
    """Raise an error for a clip norm, unit or piece size that is invalid or contradicts another.

    Raises:
        DefenseError: Names the argument.
    """
    if max_grad_norm != "auto" and not isinstance(max_grad_norm, QuantileClip):
        base.check_number(
            "DPSGD: max_grad_norm", max_grad_norm, above=0, hint="or 'auto', QuantileClip()"
        )
    max_rows = max_physical_batch_size
    base.check_integer("DPSGD: max_physical_batch_size", max_rows, optional=True)
    if not isinstance(unit, Users):
        base.check_choice("DPSGD: unit", unit, ("example",), hint="or Users(group_by)")
    elif max_rows is not None and (unit.rows_per_user or math.inf) > max_rows:
        raise base.DefenseError(
            f"DPSGD: with max_physical_batch_size={max_rows} pass Users(..., "
            f"rows_per_user={max_rows}) or fewer"
        )


class PlantedCheck(Protocol):
    """What tests a training while it runs, such as :class:`~lightning_fedleak.PlantedGradients`.

    Attributes:
        every_n_steps: The number of steps from one test to the next.
    """

    every_n_steps: int

    def begin(self, defense: Any, context: Any, sampling: Any, save: Any) -> Any:
        """Return the audit of one fit.

        Args:
            defense: The DPSGD that is tested.
            context: The client and the process.
            sampling: The Poisson sampling.
            save: Saves the state of the defence, and returns a function that restores it.
        """


def check_audit(
    check: PlantedCheck | None,
    unit: Unit,
    noise_multiplier: float | None,
    max_grad_norm: MaxGradNorm,
) -> None:
    """Raise an error for settings under which an audit cannot test the training.

    Raises:
        DefenseError: Names the contradicting arguments.
    """
    if check is not None and not hasattr(check, "begin"):
        raise base.DefenseError(
            f"DPSGD: check must be PlantedGradients(every_n_steps=160), or None, got {check!r}"
        )
    is_other = isinstance(unit, Users) or isinstance(max_grad_norm, QuantileClip)
    if check is not None and (is_other or noise_multiplier == 0):
        raise base.DefenseError(
            "DPSGD: check=PlantedGradients() needs noise, a fixed clip norm, and unit='example'"
        )


def check_continued(state: base.State, releases: int, trust: Trust, unit: str) -> None:
    """Raise an error for a checkpoint whose releases cannot be accounted together with this run.

    Raises:
        DefenseError: They were made under ``trust="central"`` and this run is under ``"local"``, or
            they were made for another unit of privacy.
    """
    earlier_trust, earlier_unit = state.get("trust", trust), state.get("unit", "example")
    refusals = {
        "trust='central'": earlier_trust == "central" and trust == "local",
        f"unit={earlier_unit!r}": earlier_unit != unit,
    }
    owner = f"DPSGD: continue with the setting of the checkpoint's {releases} releases, or begin a "
    base.refuse(f"{owner}new run from a model that this data did not train: ", refusals)


def guarantee_of(trust: Trust, seed: int | None, unit: str, *, fixed_budget: bool) -> str:
    """Return what DP-SGD with these settings guarantees, and against whom.

    Args:
        trust: The trust in the server.
        seed: The seed of the noise, which can be guessed; None for secret noise.
        unit: The unit of privacy, ``"example"`` or ``"user"``.
        fixed_budget: Whether the accountant is a filter, with a budget fixed before the run.
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
