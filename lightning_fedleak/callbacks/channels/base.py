"""What a channel is: one object for one family of leak, which does all that the callbacks need.

A channel taps what its attacks read, lets them guess at each stage, scores the guesses, and packs,
pools, names and shows the results. The monitor holds a list of channels and knows no family. A
family of one's own is a subclass of :class:`Channel` and its attacks, in one file:
``Channel.reads`` names the class of attacks that it takes.
"""

from __future__ import annotations

import math
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_fedleak.anatomy import Anatomy
from lightning_fedleak.attacks.base import (
    Attack,
    Guess,
    Query,
    RunFacts,
    UnusableObservation,
)
from lightning_fedleak.attacks.clipping import check_uncut
from lightning_fedleak.attacks.local_steps import explain_stale_optimizer
from lightning_fedleak.batches import BatchError, TokenBatch
from lightning_fedleak.callbacks.checks import Plan, gradient_plan, require_capabilities
from lightning_fedleak.callbacks.results import (
    Found,
    NothingShared,
    Outcome,
    Result,
    Series,
    Unknown,
    Waiting,
)
from lightning_fedleak.defenses import Defense, DefenseContext, DefenseError
from lightning_fedleak.lightning_packages import both
from lightning_fedleak.snapshots import (
    GradientSnapshot,
    Inapplicable,
    NotYet,
    Observation,
    Stage,
    UpdateSnapshot,
    explain_weight_term,
)
from lightning_fedleak.strategies import DefendedStrategy
from lightning_fedleak.taps.activations import ChangedInPlace
from lightning_fedleak.taps.gradients import UpdateError
from lightning_fedleak.threats import HONEST_BUT_CURIOUS, Capability

if TYPE_CHECKING:
    import lightning.pytorch as L

    from lightning_fedleak.callbacks.channels.targets import CanaryScores, Games
    from lightning_fedleak.callbacks.report import Report

T = TypeVar("T")

AUTOCAST = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


@dataclass(frozen=True)
class Settings:
    """The monitor's arguments that are about what its attacks read, see :class:`LeakageMonitor`.

    Attributes:
        stages: where to measure.
        local_steps: optimizer steps of a round; None for single gradients.
        head_own_part: attack the head's own part of a tied matrix too.
        games: of membership attacks.
        texts: that are reconstructed at a look, at most.
    """

    stages: tuple[Stage, ...]
    local_steps: int | None
    head_own_part: bool
    games: Games
    texts: int


@dataclass(frozen=True)
class Run(ABC):
    """One run, as channels and attacks know it.

    Attributes:
        anatomy: the model's parts.
        client: ``"rank"`` (each process is a client) or ``"world"`` (all are one).
        assumed: what the adversary has besides what it sees.
        watcher: the class that watches the run, for messages.
    """

    watcher: ClassVar[str] = "LeakageMonitor"

    anatomy: Anatomy
    client: str
    assumed: frozenset[Capability]

    @property
    @abstractmethod
    def rank(self) -> int:
        """Number of this process."""

    @property
    @abstractmethod
    def processes(self) -> int:
        """How many there are."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where the model is."""

    @property
    @abstractmethod
    def optimizers(self) -> Sequence[Optimizer]:
        """Those of the run: which own which parameters, and their settings."""

    @property
    @abstractmethod
    def defenses(self) -> tuple[Defense, ...]:
        """The defences of the run, in their order."""

    @property
    @abstractmethod
    def precision(self) -> str:
        """In the Trainer's words."""

    @property
    @abstractmethod
    def tokenizers(self) -> Sequence[Any]:
        """Those that are known of in the run; some may be None."""

    @abstractmethod
    def forward_context(self) -> AbstractContextManager[Any]:
        """In which the client runs its model: autocast, say."""

    @property
    def number(self) -> int:
        """Number of this process's client."""
        return self.rank if self.client == "rank" else 0

    @property
    def under_ddp(self) -> bool:
        """Whether every trained parameter's gradient is shared, whatever optimizers own."""
        return False

    @property
    def shows_progress(self) -> bool:
        """Whether bars are shown while attacks are calibrated."""
        return False

    def first_one_says(self, value: T) -> T:
        """What the first process has, on every process."""
        return value

    def all_together(self, value: Tensor) -> Tensor:
        """The sum over processes."""
        return value

    @property
    def clip_value(self) -> float | None:
        """Size that entries of gradients are cut to before they are shared; None if not known."""
        return None

    def facts(self, plan: Plan, local_steps: int | None, step: int) -> RunFacts:
        """What an attack is told of this run, see :meth:`Attack.meet`.

        Args:
            plan: of the attack.
            local_steps: optimizer steps of a round; None for single gradients.
            step: optimizer step that the fit begins at.
        """
        optimizer = plan.optimizer
        defended: set[Literal["gradients", "batches", "activations"]] = set()
        for defense in self.defenses:
            if defense.acts_on_gradients:
                defended.add("gradients")
            if defense.acts_on_batches:
                defended.add("batches")
            if defense.activation_layers:
                defended.add("activations")
        return RunFacts(
            precision=self.precision,
            autocast=AUTOCAST.get(self.precision),
            optimizer=None if optimizer is None else type(optimizer).__name__,
            optimizer_settings=self._settings(plan),
            local_steps=local_steps,
            defended=frozenset(defended),
            step=step,
            clip_value=self.clip_value,
        )

    def _settings(self, plan: Plan) -> Mapping[str, Any]:
        """Of the group of the optimizer that owns what an attack reads, but for tensors."""
        if plan.optimizer is None:
            return {}
        read = {id(self.anatomy.parameter(role)) for role in plan.roles}
        groups = plan.optimizer.param_groups
        group = next((g for g in groups if read & {id(p) for p in g["params"]}), groups[0])
        known = (int, float, bool, str, tuple, type(None))
        return {name: value for name, value in group.items() if isinstance(value, known)}


@dataclass(frozen=True)
class TrainerRun(Run):
    """One fit of a Trainer whose strategy is set up.

    Attributes:
        trainer: of this fit.
    """

    trainer: L.Trainer

    @property
    def rank(self) -> int:
        """Number of this process."""
        return self.trainer.global_rank

    @property
    def processes(self) -> int:
        """How many there are."""
        return self.trainer.world_size

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self.trainer.strategy.root_device

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        """The Trainer's."""
        return self.trainer.optimizers

    @cached_property
    def under_ddp(self) -> bool:
        """Whether a DDPStrategy reduces the gradients, or may."""
        return isinstance(self.trainer.strategy, both("strategies.DDPStrategy"))

    @property
    def defenses(self) -> tuple[Defense, ...]:
        """The defences of the strategy, in their order."""
        strategy = self.trainer.strategy
        return tuple(strategy.defenses) if isinstance(strategy, DefendedStrategy) else ()

    @property
    def precision(self) -> str:
        """The Trainer's."""
        return str(self.trainer.precision)

    @cached_property
    def clip_value(self) -> float | None:
        """The Trainer's, unless the module clips itself, or DDP has reduced what is shared."""
        trainer = self.trainer
        value = float(trainer.gradient_clip_val or math.inf)
        clips = [kind.configure_gradient_clipping for kind in both("core.LightningModule")]
        by_value = trainer.gradient_clip_algorithm == "value" and value < math.inf
        separated = getattr(trainer.strategy, "separates_stages", False)
        reduced_before = self.under_ddp and self.client == "rank" and not separated
        own = type(trainer.lightning_module).configure_gradient_clipping not in clips
        return value if by_value and not own and not reduced_before else None

    @property
    def tokenizers(self) -> Sequence[Any]:
        """The ``tokenizer`` of callbacks, the module and the data."""
        trainer = self.trainer
        callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        holders = (*callbacks, trainer.lightning_module, getattr(trainer, "datamodule", None))
        return [getattr(holder, "tokenizer", None) for holder in holders]

    def forward_context(self) -> AbstractContextManager[Any]:
        """That of the Trainer's precision."""
        return self.trainer.precision_plugin.forward_context()

    @property
    def shows_progress(self) -> bool:
        """Where the Trainer does, on the first process."""
        return self.trainer.is_global_zero and self.trainer.progress_bar_callback is not None

    def first_one_says(self, value: T) -> T:
        """Broadcast."""
        said: T = self.trainer.strategy.broadcast(value)
        return said

    def all_together(self, value: Tensor) -> Tensor:
        """Reduced by the strategy."""
        summed: Tensor = self.trainer.strategy.reduce(value, reduce_op="sum")
        return summed


@dataclass
class Look:
    """What one look has gathered so far.

    Attributes:
        step: optimizer step looked at.
        batches: the step's micro-batches, by reference, before any defence touched them.
        batch: the micro-batch at work, which may yet turn out to train nothing.
        said: what an attack said in a series, or why it said nothing (yet).
        truth_error: why a batch could not be read; None where all were.
        stepped: ids of the optimizers that were really about to step (none: nothing was shared).
        seconds: time spent so far.
        processor_seconds: processor time spent so far, of all threads.
        step_seconds: time that the step itself took so far; 0 until it is known.
        learning_rates: of what the attacks read, at each local step.
        noise_std: of what defences have added to each number of this client's update so far; NaN
            where one of them did not say.
        loss_terms: ids of the parameters of which a loss of the step has a term of their own.
        kept: what channels keep until the look is published, by keys of their own.
        asked: the series that are tried again, where it is of these alone; None: of all.
    """

    step: int
    batches: list[TokenBatch] = field(default_factory=list)
    batch: TokenBatch | None = None
    said: dict[Series, object] = field(default_factory=dict)
    truth_error: str | None = None
    stepped: set[int] = field(default_factory=set)
    seconds: float = 0.0
    processor_seconds: float = 0.0
    started: float = field(default_factory=lambda: time.perf_counter())
    step_seconds: float = 0.0
    learning_rates: list[set[float]] = field(default_factory=list)
    noise_std: float = 0.0
    loss_terms: set[int] = field(default_factory=set)
    kept: dict[object, Any] = field(default_factory=dict)
    asked: frozenset[Series] | None = None

    def elapsed(self) -> float:
        """Seconds since the look began that were not its own."""
        return time.perf_counter() - self.started - self.seconds

    @contextmanager
    def clock(self, device: torch.device) -> Iterator[None]:
        """Adds the time of a block; waits for a GPU before and after, as looks may."""
        _wait(device)
        start, busy = time.perf_counter(), time.process_time()
        try:
            yield
        finally:
            _wait(device)
            self.seconds += time.perf_counter() - start
            self.processor_seconds += time.process_time() - busy


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass
class Moment:
    """A moment of a step at which what leaves the client is the same at all of ``stages``.

    Attributes:
        look: the look.
        stages: at all of which the gradient is now.
        wanted: those of them that are measured.
        optimizer: that is about to step; None: all that the round's update is of.
        scale: loss scale that is still in gradients which no GradScaler has unscaled.
        take: the gradients of what the attacks read, as they are now.
    """

    look: Look
    stages: tuple[Stage, ...]
    wanted: tuple[Stage, ...]
    optimizer: Optimizer | None
    scale: float
    take: Callable[[], GradientSnapshot]
    _view: GradientSnapshot | Unknown | Waiting | None = None

    def gradients(self) -> GradientSnapshot | Unknown | Waiting:
        """What :attr:`take` gives, taken once, or why there is nothing."""
        if self._view is None:
            self._view = taken(self.take)
        return self._view


def taken(take: Callable[[], GradientSnapshot]) -> GradientSnapshot | Unknown | Waiting:
    """What a tap gives, or why it gives nothing (yet)."""
    try:
        return take()
    except NotYet as error:
        return Waiting(str(error))
    except Exception as error:
        return Unknown(reason(error))


class Channel(ABC):
    """One family of leak: everything that the callbacks do for its attacks.

    Lives as long as its monitor. :meth:`open` begins a fit and :meth:`close` ends it; a look is
    :meth:`arm`, then :meth:`batch_ends` for each micro-batch but the last, :meth:`at_moment` and
    :meth:`before_defense` on the gradient's way out, :meth:`batch_ends` for the last,
    :meth:`results`, :meth:`disarm` and :meth:`published`. What a family must say for itself is how
    a guess is scored (:meth:`score`) and how clients are put together (:meth:`pooled`).

    Args:
        attacks: of this family; may be none.
        settings: the monitor's.

    Attributes:
        given: the attacks of this family.
        attacks: those of them that are played in this fit.
        guesses: the class of what ``run`` of its attacks returns.
        reads: the class of the attacks that it takes (of several channels the one whose class is
            nearest to the attack's own).
        family: its name in the logs.
        metrics: names of its rates, each logged with ``_low`` and ``_high``.
        headline: the one that stands for the others on a page or in a table.
        charts: the further rates that have a chart.
        width: numbers in a packed result.
        extras: names of its values that have no interval.
        own_threshold: rates of the attacks' own decisions, which may all be *no* where scores are
            right without an error.
        parted: each process holds a part of the result, also where all are one client.
        plays_games: its attacks are asked about texts, of the user's own too.
        reads_updates: its attacks can read the weight change of several steps.
        adversary: what its adversaries have by default, besides what they see.
        sees: what they see because the monitor shows it to them.
        canary_scores: of the user's own texts over looks, where it keeps them.

    Raises:
        ValueError: settings that do not fit.
    """

    guesses: ClassVar[type[Guess]] = Guess
    reads: ClassVar[type[Attack]]
    family: ClassVar[str]
    metrics: ClassVar[tuple[str, ...]]
    headline: ClassVar[str]
    charts: ClassVar[tuple[str, ...]] = ()
    width: int
    extras: ClassVar[tuple[str, ...]] = ()
    own_threshold: ClassVar[tuple[str, ...]] = ()
    parted: ClassVar[bool] = False
    plays_games: ClassVar[bool] = False
    reads_updates: ClassVar[bool] = False
    adversary: ClassVar[frozenset[Capability]] = HONEST_BUT_CURIOUS
    sees: ClassVar[frozenset[Capability]] = frozenset()

    known: ClassVar[dict[type[Attack], type[Channel]]] = {}

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        if "reads" in vars(cls):
            Channel.known[cls.reads] = cls

    def __init__(self, attacks: Sequence[Any], settings: Settings) -> None:
        self.given: tuple[Any, ...] = tuple(attacks)
        self.attacks: tuple[Any, ...] = self.given
        self.settings = settings
        self.plans: tuple[Plan, ...] = ()
        self.canary_scores: CanaryScores | None = None
        if settings.local_steps is not None and attacks and not self.reads_updates:
            raise ValueError(
                f"local_steps attacks a weight change, and '{attacks[0].name}' reads what one step "
                "sends: give it a LeakageMonitor of its own, without local_steps"
            )

    # ---- names ------------------------------------------------------------------------------

    def series(self, attack: Attack, stage: Stage) -> Series | None:
        """Under which name an attack's results at a stage are logged; None: there are none."""
        return Series.at(stage, attack.name)

    def further_series(self) -> list[Series]:
        """Series besides those of the attacks at the stages."""
        return []

    def looks_until_known(self, metric: str, clients: int) -> tuple[int, str] | None:
        """After how many looks a rate is first known, and why; None: it is at every look."""
        return None

    def never_judged(self, metric: str) -> str | None:
        """Why one client's update alone never gives a rate to judge it by; None: it can."""
        return None

    # ---- a fit ------------------------------------------------------------------------------

    def setup(self, trainer: L.Trainer, client: str, anatomy: Callable[[], Anatomy]) -> None:  # noqa: B027
        """Refuses what does not fit the run, before the model is on its device.

        Args:
            trainer: of the fit.
            client: ``"rank"`` or ``"world"``.
            anatomy: finds the model's parts.

        Raises:
            ValueError: says which argument to change.
        """

    def open(self, run: Run) -> None:
        """Begins a fit: puts taps in."""
        self.run = run

    def admit(self, attack: Attack) -> None:
        """Checks once in a fit whether an attack can be played at all.

        Raises:
            ThreatModelError: its adversary lacks a capability.
        """
        require_capabilities(attack, self.run, self.sees)

    def leave_out(self, names: Collection[str]) -> None:
        """Does not play some of its attacks in this fit."""
        self.attacks = tuple(a for a in self.attacks if a.name not in names)

    def plan(self, attack: Attack) -> Plan:
        """Checks an attack against the model and the run, as they are now.

        Default: one that reads gradients of the client's own parameters.

        Raises:
            ValueError: it cannot read this model.
        """
        return gradient_plan(attack, self.run)

    def follow(self, plans: Sequence[Plan]) -> None:
        """Works by these plans from now on, one for each of its attacks."""
        self.plans = tuple(plans)

    def check(self, attack: Attack) -> None:  # noqa: B027
        """Tries what can be tried of an attack before the first step, once it is calibrated.

        Raises:
            ValueError: an attack does not work on this model.
        """

    def close(self) -> None:  # noqa: B027
        """Ends a fit: removes taps. May be called twice, and without :meth:`open`."""

    # ---- a look -----------------------------------------------------------------------------

    def wants_batch(self, steps_to_look: int) -> bool:
        """Whether a batch that is not looked at may serve the next look."""
        return False

    def remember(self, batch: TokenBatch) -> None:  # noqa: B027
        """Keeps a batch that is not looked at, by reference."""

    def arm(self) -> None:  # noqa: B027
        """Starts a look."""

    def batch_ends(self, batch: TokenBatch | None) -> None:  # noqa: B027
        """A micro-batch of a look is over; None where it trained nothing."""

    def at_moment(self, moment: Moment) -> None:
        """Lets the attacks guess from what is now at some stages. Default: from gradients."""
        self.read_gradients(moment, self.plans)

    def before_defense(  # noqa: B027
        self, defense: Defense, parameters: Sequence[nn.Parameter], context: DefenseContext
    ) -> None:
        """A defence is about to act on the gradients."""

    def results(self, look: Look) -> dict[Series, Result]:
        """This process's result of each series; every process calls it at every look."""
        empty = self.holds_nothing(look)
        return {
            series: self._result(look, plan, series, empty=empty)
            for plan in self.plans
            for series in self.series_of(plan)
        }

    def _result(self, look: Look, plan: Plan, series: Series, *, empty: bool) -> Result:
        if look.truth_error is not None:
            return Unknown(f"the batch could not be read: {look.truth_error}")
        if empty or not look.stepped or not plan.exposed:
            return NothingShared()
        said = look.said.get(series, Unknown("the attack was not run"))
        if isinstance(said, Unknown | Waiting):
            return said
        try:
            return Found(self.score(look, series, said))
        except Exception as error:
            return Unknown(reason(error))

    def holds_nothing(self, look: Look) -> bool:
        """Whether the look's batches hold nothing that could leak; called once in a look."""
        return not any(batch.input_ids.numel() for batch in look.batches)

    @abstractmethod
    def score(self, look: Look, series: Series, said: Any) -> Sequence[float]:
        """What an attack's guess is worth against the truth, as :attr:`width` packed numbers.

        Args:
            look: with the batches; what is to be shown of the guess goes into ``look.kept``.
            series: whose.
            said: what :meth:`at_moment` left in ``look.said``.

        Raises:
            Exception: there is no score; the result is unknown.
        """

    def without_truth(self, said: Any) -> dict[str, float]:
        """What a guess says where the truth is not known: what the adversary itself can tell.

        Args:
            said: what :meth:`at_moment` left in ``look.said``.

        Returns:
            Values by name, among :attr:`extras`. Default: none.
        """
        return {}

    def disarm(self, look: Look) -> None:  # noqa: B027
        """Ends a look: lets go of what was held, whatever became of it."""

    def published(self, look: Look, outcomes: Mapping[Series, Outcome], report: Report) -> None:  # noqa: B027
        """The look counts: shows more of it than numbers, on every process."""

    # ---- over clients and looks -------------------------------------------------------------

    @abstractmethod
    def pooled(self, series: Series, rows: Mapping[int, Sequence[float]]) -> Outcome:
        """What the clients' packed results make together.

        Args:
            series: whose.
            rows: by number of the client; at least one.
        """

    def clear(self) -> None:  # noqa: B027
        """A new fit: earlier looks were at another run."""

    def series_state(self, series: Series) -> dict[str, Tensor]:
        """What must survive a checkpoint of one series. Default: nothing."""
        return {}

    def load_series_state(self, series: Series, state: Mapping[str, Tensor]) -> None:  # noqa: B027
        """Takes back what :meth:`series_state` gave."""

    def state_dict(self) -> dict[str, Any]:
        """What must survive a checkpoint besides, by names that no other channel uses."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: B027
        """Takes back what :meth:`state_dict` gave, from among what others gave."""

    # ---- what channels have in common -------------------------------------------------------

    def series_of(self, plan: Plan) -> list[Series]:
        """The series that an attack gives results of in this fit."""
        return self.series_at(plan.attack, self.settings.stages)

    def series_at(self, attack: Attack, stages: Collection[Stage]) -> list[Series]:
        """The series of an attack at those of the stages where there is one."""
        found = (self.series(attack, stage) for stage in stages)
        return [series for series in found if series is not None]

    def read_gradients(self, moment: Moment, plans: Sequence[Plan]) -> None:
        """Lets attacks guess from the gradients that are now at the wanted stages, once each."""
        mine = [
            p
            for p in plans
            if p.exposed
            and p.roles
            and (moment.optimizer is None or p.optimizer in (None, moment.optimizer))
        ]
        if not moment.wanted or not mine:
            return
        view = moment.gradients()
        for plan in mine:
            series = self.series_at(plan.attack, moment.wanted)
            if silent := [s for s in series if s not in moment.look.said]:
                moment.look.said |= dict.fromkeys(silent, guess(plan, view, self.run))


def channels_of(attacks: Sequence[Attack], settings: Settings) -> list[Channel]:
    """One channel of every known family, with those of the attacks that are its own.

    Raises:
        ValueError: settings that do not fit.
    """
    channels = [
        kind([a for a in attacks if family_of(a) is kind], settings)
        for kind in Channel.known.values()
    ]
    if settings.games.canaries is not None and not any(
        channel.plays_games and channel.attacks for channel in channels
    ):
        raise ValueError(
            "canaries= are texts that membership attacks are asked for, and none is listed: add "
            "FCMembership(layer=6), say"
        )
    return channels


def family_of(attack: Attack) -> type[Channel]:
    """The class of an attack's channel."""
    return next(Channel.known[c] for c in type(attack).__mro__ if c in Channel.known)


def guess(
    plan: Plan,
    view: GradientSnapshot | Unknown | Waiting,
    run: Run,
    query: Query | None = None,
) -> Guess | Unknown | Waiting:
    """What an attack says of gradients, or why it says nothing (yet)."""
    if isinstance(view, Unknown | Waiting):
        return view
    if isinstance(view, UpdateSnapshot):
        if (why := no_sum(plan)) is not None:
            return Unknown(why, applies=False)
        groups = plan.optimizer.param_groups if plan.optimizer is not None else ()
        carries = not plan.attack.reads_adaptive_updates and any(g.get("momentum") for g in groups)
        if carries and not view.fresh:
            return Unknown(explain_stale_optimizer("SGD"))
    regularised = [r for r in plan.roles if r in view.loss_terms]
    if regularised and not plan.attack.removes_loss_terms:
        return Unknown(explain_weight_term(regularised[0]))
    absent = [r for r in plan.roles if r not in view.tensors]
    if absent:
        return Unknown(f"no gradient of {', '.join(absent)} in this step")
    try:
        if not plan.attack.reads_clipped:
            check_uncut(view, plan.roles, run.facts(plan, None, view.step))
        with torch.no_grad():
            found = plan.attack.run(Observation((view,)), query)
        check_guess(plan.attack, found, family_of(plan.attack).guesses)
        return found
    except NotYet as error:
        zeros = tuple(role for role in plan.roles if not bool(view.tensors[role].any()))
        return Waiting(str(error), zeros=zeros)
    except Exception as error:
        return Unknown(reason(error), applies=not isinstance(error, Inapplicable))


def no_sum(plan: Plan) -> str | None:
    """Why an attack does not read an optimizer's updates, where it reads sums of gradients."""
    optimizer = plan.optimizer
    adaptive = optimizer is not None and type(optimizer) is not torch.optim.SGD
    if not adaptive or plan.attack.reads_adaptive_updates:
        return None
    return (
        f"the update of {type(optimizer).__name__} is no sum of gradients, and this attack reads "
        "these; AlignedFlatChat and GradientMembership read such updates"
    )


def check_guess(attack: Attack, found: object, wanted: type[Guess]) -> None:
    """Refuses what an attack's ``run`` returns where it is no guess of its family.

    Raises:
        UnusableObservation: names both.
    """
    if not isinstance(found, wanted):
        raise UnusableObservation(
            f"run of attack '{attack.name}' returned a {type(found).__name__}, and must return a "
            f"{wanted.__name__} ({wanted.__module__})"
        )


def worst_of(each: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Each metric at the client where it is highest; empty for one client."""
    worst: dict[str, float] = {}
    if len(each) > 1:
        for name in each[0]:
            known = [values[name] for values in each if not math.isnan(values[name])]
            worst[name] = max(known) if known else math.nan
    return worst


class NoTargets(ValueError):
    """The batch holds no sentence that could be asked for."""


_OURS = (
    UnusableObservation,
    BatchError,
    ChangedInPlace,
    NoTargets,
    UpdateError,
    torch.OutOfMemoryError,
)
_PACKAGE = Path(__file__).parents[2]


def reason(error: Exception) -> str:
    """Why there is no result, for logs: the error's kind, and its words or its place.

    Only words written here are repeated: another error's may quote the private batch. So may a
    ``DefenseError`` of a defence of the user's own, or one that repeats another error.
    """
    kind = type(error).__name__
    if isinstance(error, _OURS):
        return f"{kind}: {error}"
    place = traceback.extract_tb(error.__traceback__)[-1]
    path = Path(place.filename)
    ours = path.is_relative_to(_PACKAGE) and error.__cause__ is None
    if isinstance(error, DefenseError) and ours:
        return f"{kind}: {error}"
    return f"{kind} at {path.name}:{place.lineno}"


__all__ = [
    "Channel",
    "Found",
    "Look",
    "Moment",
    "NoTargets",
    "Plan",
    "Run",
    "Settings",
    "TrainerRun",
    "channels_of",
    "family_of",
    "guess",
    "no_sum",
    "reason",
    "taken",
    "worst_of",
]
