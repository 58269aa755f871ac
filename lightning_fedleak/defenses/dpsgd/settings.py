"""Settings of DP-SGD: the rare ones in groups, their checks, and what they guarantee."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from lightning_fedleak import validate
from lightning_fedleak.defenses.accounting.accounting import Trust
from lightning_fedleak.defenses.accounting.schedules import Factors, QuantileClip, factors_of
from lightning_fedleak.defenses.base import DefenseError, State, refuse
from lightning_fedleak.defenses.dpsgd.clipped_sum import MaxGradNorm
from lightning_fedleak.defenses.dpsgd.per_sample import Clipping
from lightning_fedleak.defenses.noise import ReleaseNoise

GroupBy = str | Callable[[Any], Any] | Sequence[Any]


@dataclass(frozen=True)
class ClipSettings:
    """How gradients are clipped.

    Attributes:
        form: of per-sample gradients in memory: ``"ghost"`` for factors, ``"per_sample"`` for all
            numbers, ``"auto"`` for the smaller one in each layer.
        gamma: of automatic clipping, ``max_grad_norm="auto"``.
        per_layer: whether each layer is clipped separately, to ``max_grad_norm`` over the root of
            their number.
        loss: ``"trusted"`` if you have proved that the loss is a mean over samples of terms that
            depend on one sample each, ``"checked"`` to let DPSGD check it.
        schedule: of ``max_grad_norm``: factors over the run, planned before it. It changes no
            epsilon, because the noise follows the norm.
        quantile: lets the norm follow a quantile of the gradients' norms, at its own cost.

    Raises:
        DefenseError: a value out of range.
    """

    form: Clipping = "auto"
    gamma: float = 0.01
    per_layer: bool = False
    loss: Literal["checked", "trusted"] = "checked"
    schedule: Factors | None = None
    quantile: QuantileClip | None = None

    def __post_init__(self) -> None:
        factors_of("ClipSettings(schedule=)", self.schedule)
        _check_choice("form", self.form, ("auto", "per_sample", "ghost"))
        _check_number("gamma", self.gamma, above=0)
        _check_choice("loss", self.loss, ("checked", "trusted"))


class NoiseMechanism(Protocol):
    """How the noise of a run's releases is drawn, such as ``labs.correlated_noise`` does it."""

    def noise(self) -> ReleaseNoise:
        """Return the noise of one run."""


@dataclass(frozen=True)
class ReleaseSettings:
    """Whom releases are hidden from, how their noise is correlated, and when they end.

    Attributes:
        trust: ``"local"`` where the server sees each client's update, ``"central"`` where it sees
            their sum alone (secure aggregation): each client then adds a share of the noise.
        mechanism: that correlates noise over steps (``labs.correlated_noise``); None for
            independent noise.
        on_budget: whether a spent ``target_epsilon`` ends the fit (``"stop"``) or raises
            :class:`BudgetSpent` (``"raise"``). Nothing is released beyond it.
        harden_factor: by which a gate multiplies the noise, with ``accountant="filter"``.
        max_hardenings: how often it may; None for no limit.
        noise_schedule: of the noise multiplier: factors over the run, planned before it and
            accounted as they are.
        truncated_batch_size: rows of every batch in each process, whatever is drawn: a random
            subset where more are, filled up with rows that do not count where fewer are.

    Raises:
        DefenseError: a value out of range.
    """

    trust: Trust = "local"
    mechanism: NoiseMechanism | None = None
    on_budget: Literal["stop", "raise"] = "stop"
    harden_factor: float = 2.0
    max_hardenings: int | None = None
    noise_schedule: Factors | None = None
    truncated_batch_size: int | None = None

    def __post_init__(self) -> None:
        factors_of("ReleaseSettings(noise_schedule=)", self.noise_schedule)
        _check_choice("trust", self.trust, ("local", "central"))
        if self.mechanism is not None and not hasattr(self.mechanism, "noise"):
            raise DefenseError(
                f"ReleaseSettings: mechanism={self.mechanism!r} must be None, or for example "
                "lightning_fedleak.labs.correlated_noise.CorrelatedNoise(bands=4)"
            )
        _check_choice("on_budget", self.on_budget, ("stop", "raise"))
        _check_number("harden_factor", self.harden_factor, above=1)
        _check_integer("max_hardenings", self.max_hardenings, at_least=0, optional=True)
        hint = "batch_size and six times its root leave epsilon as it is"
        _check_integer("truncated_batch_size", self.truncated_batch_size, optional=True, hint=hint)


@dataclass(frozen=True)
class Users:
    """Users as the unit of privacy: all rows of one are drawn, clipped and accounted together.

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
        _check_integer("rows_per_user", self.rows_per_user, optional=True, hint=hint)


Unit = Literal["example"] | Users
"""What is added or removed."""


MOST_KINDS = 32  # of planned noise under PRV, which takes .1 s longer a call for each


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
    _check_choice("accountant", accountant, ("prv", "rdp", "filter"))
    filtered, targeted = accountant == "filter", target_epsilon is not None
    count = "neither" if noise_multiplier is None else "both"
    _check_number("noise_multiplier", noise_multiplier, at_least=0, optional=True)
    _check_number("target_epsilon", target_epsilon, above=0, optional=True)
    refusals: dict[str, object] = {
        "accountant='filter' keeps the run within a budget that is fixed before it. Give "
        "target_epsilon and target_delta.": filtered and not targeted,
        f"{count} of noise_multiplier and target_epsilon given. Give one: the noise, or the "
        "epsilon that the whole run may cost.": (
            not filtered and (noise_multiplier is None) == (target_epsilon is None)
        ),
        "target_epsilon means nothing without target_delta. Give one, below one over the number "
        "of examples.": targeted and target_delta is None,
        "with a seed the noise can be guessed and no epsilon holds. Leave out seed or "
        "target_epsilon.": targeted and seed is not None,
    }
    refuse("DPSGD: ", refusals)
    _check_number("target_delta", target_delta, above=0, below=1, optional=True)


def check_combination(
    max_grad_norm: MaxGradNorm,
    clip: ClipSettings,
    release: ReleaseSettings,
    unit: Unit,
    accountant: str,
    *,
    poisson: bool,
) -> None:
    """Raise an error for clip norms out of range, and settings that do not hold together.

    Raises:
        DefenseError: says which.
    """
    by_name, automatic = isinstance(max_grad_norm, Mapping), max_grad_norm == "auto"
    norms: Sequence[object] = () if automatic else (max_grad_norm,)
    if isinstance(max_grad_norm, Mapping):
        norms = [*max_grad_norm.values()] or [max_grad_norm]
    for norm in norms:
        hint = "or 'auto', or such numbers by the names of layers"
        _check_number("max_grad_norm", norm, above=0, hint=hint)
    by_user = isinstance(unit, Users)
    if not by_user:
        _check_choice("unit", unit, ("example",), hint="or Users(group_by)")
    filtered = accountant == "filter"
    correlated, truncated = release.mechanism is not None, release.truncated_batch_size is not None
    _check_plans(clip, release, accountant, whole=not (by_name or automatic or by_user))
    refusals = {
        "max_grad_norm names layers already; leave per_layer out, which gives each layer an equal "
        "share of one norm": by_name and clip.per_layer,
        "max_grad_norm='auto' has no clip norm that could change: pass a number, or leave "
        "schedule= out": automatic and clip.schedule is not None,
        "users are drawn by chance, and poisson_sampling=False takes the loader's batches as they "
        "are: leave it out": by_user and not poisson,
        "truncated_batch_size fixes the rows of a batch, and users have different numbers of "
        "rows: leave unit=Users() out": truncated and by_user,
        "truncated_batch_size fixes the rows of a batch, and the loader's batches have one size: "
        "leave poisson_sampling=False out": truncated and not poisson,
        "mechanism= is not accounted for an example that takes another's place: leave it or "
        "truncated_batch_size out": truncated and correlated,
        "mechanism= decides itself how batches are drawn, and poisson_sampling=False takes the "
        "loader's as they are: leave one out": correlated and not poisson,
        "mechanism= needs noise that is fixed before the run, and accountant='filter' is there to "
        "turn it up. Use accountant='prv' or 'rdp'.": correlated and filtered,
    }
    refuse("DPSGD: ", refusals)


def _check_plans(
    clip: ClipSettings, release: ReleaseSettings, accountant: str, *, whole: bool
) -> None:
    """Raise an error for a schedule or a quantile beside what it does not hold with.

    Args:
        clip: schedule and quantile of the clip norm.
        release: schedule of the noise.
        accountant: of the releases.
        whole: whether examples are clipped at one given norm.
    """
    quantile, scheduled = clip.quantile is not None, clip.schedule is not None
    filtered, kinds = accountant == "filter", len(set(factors_of("", release.noise_schedule)))
    planned = bool(kinds) or scheduled or quantile
    refusals: dict[str, object] = {
        "a schedule or quantile changes the noise from step to step, and mechanism= correlates it "
        "over steps of one clip norm: leave one out": planned and release.mechanism is not None,
        "a schedule or quantile follows each client's own count of releases, which a crash may "
        "make differ, and trust='central' adds shares of one noise: leave one out": (
            planned and release.trust != "local"
        ),
        "noise_schedule= is planned before the run, and accountant='filter' is there for noise "
        "that is not: use accountant='prv' or 'rdp'": bool(kinds) and filtered,
        f"noise_schedule= has {kinds} different factors, and PRV takes longer with each: give at "
        f"most {MOST_KINDS}, or use accountant='rdp'": accountant == "prv" and kinds > MOST_KINDS,
        "ClipSettings(schedule=, quantile=) both change the clip norm: leave one out": (
            quantile and scheduled
        ),
        "ClipSettings(quantile=) follows the norms of whole gradients of examples, with a fixed "
        "noise: pass a plain max_grad_norm, unit='example' and accountant='prv' or 'rdp'": (
            quantile and (not whole or clip.per_layer or filtered)
        ),
    }
    refuse("DPSGD: ", refusals)


def check_rows(max_physical_batch_size: int | None) -> None:
    """Raise an error for a number of rows out of range."""
    hint = "the rows that are run at once"
    _check_integer("max_physical_batch_size", max_physical_batch_size, optional=True, hint=hint)


def check_continued(state: State, releases: int, trust: Trust, unit: str) -> None:
    """Raise an error for a checkpoint whose releases do not add up with those of this run.

    Raises:
        DefenseError: they were made under ``trust="central"`` and this run is under ``"local"``, or
            for another unit of privacy.
    """
    earlier_trust, earlier_unit = state.get("trust", trust), state.get("unit", "example")
    refusals = {
        "under trust='central', in which each client adds a share of the noise: whoever sees each "
        "client's updates learns more than is accounted. Go on with trust='central', or begin a "
        "new run.": earlier_trust == "central" and trust == "local",
        f"with unit={earlier_unit!r}, and this run has unit={unit!r}. What is added or removed is "
        "clipped as a whole in the one and not in the other, so no epsilon would hold for both. Go "
        f"on with unit={earlier_unit!r}, or begin a new run from a model that this data did not "
        "train.": earlier_unit != unit,
    }
    refuse(f"DPSGD: the checkpoint's {releases} releases were made ", refusals)


def guarantee_of(
    trust: Trust, poisson: bool, seed: int | None, fixed_budget: bool, unit: str = "example"
) -> str:
    """Return what DP-SGD with these settings guarantees, and against whom."""
    if seed is not None:
        return "none: with a seed the noise can be guessed and subtracted"
    server = (
        "whoever sees every client's shared updates"
        if trust == "local"
        else "whoever sees only the sum of all clients' updates (secure aggregation)"
    )
    change = "added or removed" if poisson else "put in the place of nothing"
    protected = "one example" if unit == "example" else "one user with all of their rows,"
    shared = "an example" if unit == "example" else "a user"
    budget = (
        "with the budget (`target_epsilon`, `target_delta`) that was fixed before the run, at "
        "whatever step it ends, also where noise was turned up in sight of earlier releases"
        if fixed_budget
        else "with the epsilon that `privacy` gives"
    )
    return (
        f"against {server}: (epsilon, delta)-differential privacy of {protected} {change}, for all "
        f"releases together, {budget}. If several clients hold {shared}, add their epsilons. "
        "Give each client separate data. Not covered: what is logged or sent otherwise, and "
        "decisions taken in sight of the data."
    )


def _check_choice(name: str, value: object, choices: Sequence[object], hint: str = "") -> None:
    validate.check_choice(f"DPSGD: {name}", value, choices, hint=hint, error=DefenseError)


def _check_integer(name: str, value: object, **limits: Any) -> None:
    validate.check_integer(f"DPSGD: {name}", value, error=DefenseError, **limits)


def _check_number(name: str, value: object, **limits: Any) -> None:
    validate.check_number(f"DPSGD: {name}", value, error=DefenseError, **limits)
