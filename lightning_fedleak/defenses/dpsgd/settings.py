"""Settings of DP-SGD that are rarely changed, in groups."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from lightning_fedleak.defenses.accounting.accounting import Trust
from lightning_fedleak.defenses.base import DefenseError
from lightning_fedleak.defenses.dpsgd.clipped_sum import LayerNoise
from lightning_fedleak.defenses.dpsgd.correlated_noise import Mechanism
from lightning_fedleak.defenses.dpsgd.per_sample import Clipping
from lightning_fedleak.validate import check_choice, check_integer, check_number

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
        layer_noise: with several clip norms, ``"equal"`` noise on every number, or ``"by_clip"``:
            in proportion to the norm of the number's layer.
        loss: ``"trusted"`` if you have proved that the loss is a mean over samples of terms that
            depend on one sample each, ``"checked"`` to let DPSGD check it.

    Raises:
        DefenseError: a value out of range.
    """

    form: Clipping = "auto"
    gamma: float = 0.01
    per_layer: bool = False
    layer_noise: LayerNoise = "equal"
    loss: Literal["checked", "trusted"] = "checked"

    def __post_init__(self) -> None:
        _check_choice("form", self.form, ("auto", "per_sample", "ghost"))
        check_number("DPSGD: gamma", self.gamma, above=0, error=DefenseError)
        _check_choice("layer_noise", self.layer_noise, ("equal", "by_clip"))
        _check_choice("loss", self.loss, ("checked", "trusted"))


@dataclass(frozen=True)
class ReleaseSettings:
    """Whom releases are hidden from, how their noise is correlated, and when they end.

    Attributes:
        trust: ``"local"`` where the server sees each client's update, ``"central"`` where it sees
            their sum alone (secure aggregation): each client then adds a share of the noise.
        mechanism: of correlated noise: ``"banded"`` (BandMF with cyclic Poisson sampling) or
            ``"banded_inverse"`` (BISR, the same batches in every epoch). ``"independent"`` noise is
            not correlated over steps.
        bands: of the matrix that correlates noise, or of its inverse.
        on_budget: whether a spent ``target_epsilon`` ends the fit (``"stop"``) or raises
            :class:`BudgetSpent` (``"raise"``). Nothing is released beyond it.
        harden_factor: by which a gate multiplies the noise, with ``accountant="filter"``.
        max_hardenings: how often it may; None for no limit.

    Raises:
        DefenseError: a value out of range.
    """

    trust: Trust = "local"
    mechanism: Mechanism = "independent"
    bands: int | None = None
    on_budget: Literal["stop", "raise"] = "stop"
    harden_factor: float = 2.0
    max_hardenings: int | None = None

    def __post_init__(self) -> None:
        _check_choice("trust", self.trust, ("local", "central"))
        _check_choice("mechanism", self.mechanism, ("independent", "banded", "banded_inverse"))
        _check_choice("on_budget", self.on_budget, ("stop", "raise"))
        check_number("DPSGD: harden_factor", self.harden_factor, above=1, error=DefenseError)
        _check_integer("max_hardenings", self.max_hardenings, at_least=0, optional=True)
        if self.mechanism != "independent":
            hint = f"over how many steps {self.mechanism!r} correlates noise. 4 to 16 are usual"
            _check_integer("bands", self.bands, hint=hint)
        elif self.bands is not None:
            raise DefenseError(
                f"DPSGD: bands={self.bands!r} is for mechanism='banded' or 'banded_inverse', and "
                "the noise is independent. Pass one of them, or leave bands out."
            )


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


Unit = Literal["example", "user"] | Users
"""What is added or removed; ``"user"`` is a spelling of 0.1.0."""


CLIP_FIELDS = {
    "clipping": "form",
    "gamma": "gamma",
    "per_layer": "per_layer",
    "layer_noise": "layer_noise",
    "loss": "loss",
}
RELEASE_FIELDS = {
    "trust": "trust",
    "mechanism": "mechanism",
    "bands": "bands",
    "on_budget": "on_budget",
    "harden_factor": "harden_factor",
    "most_notches": "max_hardenings",
}
USER_FIELDS = {"group_by": "group_by", "rows_per_user": "rows_per_user"}
FLAT = {"poisson": "poisson_sampling", "max_physical_batch": "max_physical_batch_size"}


@dataclass(frozen=True)
class OldArguments:
    """Arguments of DPSGD as 0.1.0 spelled them, which work through 0.2; None where not passed."""

    poisson: bool | None = None
    max_physical_batch: int | None = None
    clipping: Clipping | None = None
    gamma: float | None = None
    per_layer: bool | None = None
    layer_noise: LayerNoise | None = None
    loss: Literal["checked", "trusted"] | None = None
    trust: Trust | None = None
    mechanism: Mechanism | None = None
    bands: int | None = None
    on_budget: Literal["stop", "raise"] | None = None
    harden_factor: float | None = None
    most_notches: int | None = None
    group_by: GroupBy | None = None
    rows_per_user: int | None = None

    def convert(
        self,
        poisson_sampling: bool,
        max_physical_batch_size: int | None,
        clip: ClipSettings | None,
        release: ReleaseSettings | None,
        unit: Unit,
    ) -> tuple[bool, int | None, ClipSettings, ReleaseSettings, Unit]:
        """Return the arguments with those of 0.1.0 in their places, and warn where there are any.

        Raises:
            DefenseError: a value out of range, ``unit="user"`` without ``group_by``, or the other
                way round.
        """
        names = [name for name, value in vars(self).items() if value is not None]
        users = self.group_by is not None or self.rows_per_user is not None
        if unit == "user" and self.group_by is None:
            raise DefenseError(
                "DPSGD: unit='user' needs group_by: pass unit=Users(group_by), with the name of a "
                "column, a function of an example, or one key for each row"
            )
        if users and unit != "user":
            raise DefenseError(
                "DPSGD: group_by and rows_per_user are for users, and the unit is an example. Pass "
                "unit=Users(group_by, rows_per_user), or leave them out."
            )
        if names:
            warnings.warn(
                f"DPSGD({_spelled(names)}) is spelled DPSGD({_new_spelling(names)}) now. The old "
                "spelling works through 0.2.",
                FutureWarning,
                stacklevel=3,
            )
        if self.poisson is not None:
            poisson_sampling = self.poisson
        if self.max_physical_batch is not None:
            max_physical_batch_size = self.max_physical_batch
        if self.group_by is not None:
            unit = Users(self.group_by, self.rows_per_user)
        return (
            poisson_sampling,
            max_physical_batch_size,
            replace(clip or ClipSettings(), **self._fields(CLIP_FIELDS)),
            replace(release or ReleaseSettings(), **self._fields(RELEASE_FIELDS)),
            unit,
        )

    def _fields(self, fields: Mapping[str, str]) -> dict[str, Any]:
        values = {field: getattr(self, name) for name, field in fields.items()}
        return {field: value for field, value in values.items() if value is not None}


def _spelled(names: Iterable[str]) -> str:
    return ", ".join(f"{name}=" for name in names)


def _new_spelling(names: Sequence[str]) -> str:
    """Return the arguments in which those of 0.1.0 are passed now."""
    arguments = [_spelled([FLAT[name]]) for name in names if name in FLAT]
    for group, fields in (
        ("clip=ClipSettings", CLIP_FIELDS),
        ("release=ReleaseSettings", RELEASE_FIELDS),
        ("unit=Users", USER_FIELDS),
    ):
        if grouped := [fields[name] for name in names if name in fields]:
            arguments.append(f"{group}({_spelled(grouped)})")
    return ", ".join(arguments)


def _check_choice(name: str, value: object, choices: Sequence[object]) -> None:
    check_choice(f"DPSGD: {name}", value, choices, error=DefenseError)


def _check_integer(name: str, value: object, **limits: Any) -> None:
    check_integer(f"DPSGD: {name}", value, error=DefenseError, **limits)
