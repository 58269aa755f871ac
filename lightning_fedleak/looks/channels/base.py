"""What a channel is: one object for one family of leak, which does all that the callbacks need.

A channel taps what its attacks read, lets them guess at each stage, scores the guesses, and packs,
pools, names and shows the results. The monitor holds a list of channels and knows no family. A
family of one's own is a subclass of :class:`Channel` and its attacks, in one file:
``Channel.reads`` names the class of attacks that it takes.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lightning_fedleak.anatomy import Anatomy
from lightning_fedleak.attacks.base import Attack, Guess, Query, UnusableObservation
from lightning_fedleak.attacks.clipping import check_uncut
from lightning_fedleak.attacks.local_steps import explain_stale_optimizer
from lightning_fedleak.batches import TokenBatch
from lightning_fedleak.defenses import Defense, DefenseContext
from lightning_fedleak.looks.channels.targets import Games
from lightning_fedleak.looks.look import (
    Found,
    Look,
    Moment,
    NothingShared,
    Outcome,
    Pages,
    Result,
    Series,
    Unknown,
    Waiting,
    reason,
)
from lightning_fedleak.looks.plan import gradient_plan, require_capabilities
from lightning_fedleak.looks.run import Plan, Processes, Run
from lightning_fedleak.records import Family
from lightning_fedleak.snapshots import (
    GradientSnapshot,
    Inapplicable,
    NotYet,
    Observation,
    Stage,
    UpdateSnapshot,
    explain_weight_term,
)
from lightning_fedleak.threats import HONEST_BUT_CURIOUS, Capability


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
        leak: what it measures, and the words in which a report speaks of it.
        family: the leak's name, as in the logs.
        metrics: names of its rates, each logged with ``_low`` and ``_high``.
        headline: the leak's metric that stands for the others on a page or in a table.
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

    Raises:
        ValueError: settings that do not fit.
    """

    guesses: ClassVar[type[Guess]] = Guess
    reads: ClassVar[type[Attack]]
    leak: ClassVar[Family]
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
        if "leak" in vars(cls):
            cls.family, cls.headline = cls.leak.name, cls.leak.headline
        if "reads" in vars(cls):
            Channel.known[cls.reads] = cls

    def __init__(self, attacks: Sequence[Any], settings: Settings) -> None:
        self.given: tuple[Any, ...] = tuple(attacks)
        self.attacks: tuple[Any, ...] = self.given
        self.settings = settings
        self.plans: tuple[Plan, ...] = ()
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

    def setup(self, processes: Processes, anatomy: Callable[[], Anatomy]) -> None:  # noqa: B027
        """Refuse what does not fit the run, before the model is on its device.

        Args:
            processes: how the run is spread.
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
        answer = look.answers.get(series, Unknown("the attack was not run"))
        if isinstance(answer, Unknown | Waiting):
            return answer
        try:
            return Found(self.score(look, series, answer))
        except Exception as error:
            return Unknown(reason(error))

    def holds_nothing(self, look: Look) -> bool:
        """Whether the look's batches hold nothing that could leak; called once in a look."""
        return not any(batch.input_ids.numel() for batch in look.batches)

    @abstractmethod
    def score(self, look: Look, series: Series, answer: Any) -> Sequence[float]:
        """What an attack's guess is worth against the truth, as :attr:`width` packed numbers.

        Args:
            look: with the batches; what is to be shown of the guess goes into ``look.notes``.
            series: whose.
            answer: what :meth:`at_moment` left in ``look.answers``.

        Raises:
            Exception: there is no score; the result is unknown.
        """

    def without_truth(self, answer: Any) -> dict[str, float]:
        """What a guess says where the truth is not known: what the adversary itself can tell.

        Args:
            answer: what :meth:`at_moment` left in ``look.answers``.

        Returns:
            Values by name, among :attr:`extras`. Default: none.
        """
        return {}

    def disarm(self, look: Look) -> None:  # noqa: B027
        """Ends a look: lets go of what was held, whatever became of it."""

    def published(self, look: Look, outcomes: Mapping[Series, Outcome], pages: Pages) -> None:  # noqa: B027
        """The look counts: shows more of it than numbers, on every process."""

    # ---- over clients and looks -------------------------------------------------------------

    @abstractmethod
    def pooled(self, series: Series, rows: Mapping[int, Sequence[float]]) -> Outcome:
        """What the clients' packed results make together.

        Args:
            series: whose.
            rows: by number of the client; at least one.
        """

    def canary_scores(self, attack: str | None) -> Tensor | None:
        """Return (m,) one score for each of the user's own canaries; None: none are kept.

        Args:
            attack: name of the attack; None where one alone scores them.

        Raises:
            ValueError: no such attack, or no look has scored them.
        """
        return None

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
            if silent := [s for s in series if s not in moment.look.answers]:
                moment.look.answers |= dict.fromkeys(silent, guess(plan, view, self.run))


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
            check_uncut(view, plan.roles, plan.facts(run, None, view.step))
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
