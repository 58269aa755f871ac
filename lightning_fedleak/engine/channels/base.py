"""Channels: one object for each family of leak, which does all that the engine needs.

A channel taps what its attacks read, lets them guess at each stage, scores the guesses, and packs,
pools, names and shows the results. The engine holds a list of channels and knows no family. A
user's own family is a subclass of :class:`Channel` and its attacks, in one file:
``Channel.reads`` names the class of attacks that it takes.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import nn

from lightning_fedleak.attacks import (
    HONEST_BUT_CURIOUS,
    Attack,
    Capability,
    Guess,
    Query,
    UnusableObservation,
)
from lightning_fedleak.attacks.local_steps import LocalSteps, explain_stale_optimizer
from lightning_fedleak.attacks.memorization import Canaries, Entities
from lightning_fedleak.defenses import Defense, DefenseContext
from lightning_fedleak.engine.channels.plans import Plan, gradient_plan, no_sum
from lightning_fedleak.engine.options import Options
from lightning_fedleak.engine.outcomes import (
    Found,
    NothingShared,
    Outcome,
    Result,
    Series,
    Unknown,
    Waiting,
)
from lightning_fedleak.engine.run import Look, Run, reason
from lightning_fedleak.evaluation.entities import EntityFinder, finders_of
from lightning_fedleak.evaluation.metrics.found_entities import entity_names
from lightning_fedleak.model.batches import TokenBatch
from lightning_fedleak.model.compression import explain_compression
from lightning_fedleak.model.snapshots import (
    GradientSnapshot,
    Inapplicable,
    NotYet,
    Observation,
    Stage,
    UpdateSnapshot,
)
from lightning_fedleak.model.taps import Step
from lightning_fedleak.report.records import Family


@dataclass(frozen=True)
class Requirement:
    """What a rate needs to be known.

    Attributes:
        looks: after so many it is first known.
        why: why it takes so many.
        never: why it cannot become known in this run, and the mend; None: it can.
        never_alone: why it cannot judge one client's update alone; None: it can.
    """

    looks: int = 1
    why: str = ""
    never: str | None = None
    never_alone: str | None = None


class Channel(ABC):
    """Do everything that the engine needs for the attacks of one family of leak.

    Lives as long as its monitor. :meth:`open` begins a fit; a look is :meth:`arm`, then
    :meth:`batch_ends` for each micro-batch but the last, :meth:`at_stages` and
    :meth:`before_defense` on the gradient's way out, :meth:`batch_ends` for the last, :meth:`score`
    and :meth:`disarm`. A family must define how a guess is scored (:meth:`score`) and how the
    results of clients are combined (:meth:`pooled`).

    Args:
        attacks: the attacks of this family; may be empty.
        settings: how the run is watched.

    Attributes:
        listed_attacks: the attacks of this family.
        attacks: the attacks that are played in this fit.
        plans: of those of them that give results, in their order.
        all_series: of the attacks of this family at the stages that are looked at.
        removers: remove what :meth:`open` and :meth:`arm` have put into the model.
        guesses: the class of what ``run`` of its attacks returns.
        reads: the class of the attacks that it takes (of several channels the one whose class is
            nearest to the attack's own).
        leak: what it measures, and the words in which a report speaks of it.
        family: the leak's name, as in the logs.
        metrics: names of its rates, each logged with ``_low`` and ``_high``.
        width: numbers in a packed result.
        headline: the leak's main metric, on a page or in a table.
        extras: names of its values that have no interval.
        ranges: smallest, largest and uninformed value by metric; "a_" is of all that begin so.
        own_threshold: rates of the attacks' own decisions, low even where all scores are right.
        parted: each process holds a part of the result, also where all processes are one client.
        plays_games: its attacks score candidate texts, the user's too.
        reads_updates: its attacks can read the weight change of several steps.
        reads_states: an attack may read hidden states, or layers that a server adds, in place of
            gradients of the client's own parameters.
        adversary: what its adversaries have by default, besides what they see.
        sees: what they see because the monitor shows it to them.
        at_weights: its attacks read the trained weights and nothing of a step, as those of
            :class:`~lightning_fedleak.engine.channels.MemorizationChannel` do; its looks are of
            the same texts, so that the intervals of all hold together.
        tests_looks: one look is tested by itself, so that each has a p-value.
        controlled: its attacks are given the control of a look, see :meth:`control_rates`.
        finds_entities: it has series of the values in texts that ``entities=`` names.
        entity_kinds: of these values.
        finder: of these values; None before a fit, and where none are named.

    Raises:
        ValueError: the settings do not fit the family.
    """

    guesses: ClassVar[type[Guess]] = Guess
    reads: ClassVar[type[Attack]]
    leak: ClassVar[Family]
    family: ClassVar[str]
    metrics: ClassVar[tuple[str, ...]]
    headline: ClassVar[str]
    width: int
    extras: ClassVar[tuple[str, ...]] = ()
    ranges: ClassVar[Mapping[str, tuple[float, float, float]]] = {}
    own_threshold: ClassVar[tuple[str, ...]] = ()
    parted: ClassVar[bool] = False
    plays_games: ClassVar[bool] = False
    reads_updates: ClassVar[bool] = False
    reads_states: ClassVar[bool] = False
    adversary: frozenset[Capability] = HONEST_BUT_CURIOUS
    sees: ClassVar[frozenset[Capability]] = frozenset()
    at_weights: ClassVar[bool] = False
    tests_looks: ClassVar[bool] = False
    controlled: ClassVar[bool] = False
    finds_entities: ClassVar[bool] = False

    registry: ClassVar[dict[type[Attack], type[Channel]]] = {}

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "leak" in vars(cls):
            cls.family, cls.headline = cls.leak.name, cls.leak.headline
        if "reads" in vars(cls):
            Channel.registry[cls.reads] = cls

    def __init__(self, attacks: Sequence[Any], settings: Options) -> None:
        self.listed_attacks: tuple[Any, ...] = tuple(attacks)
        self.attacks: tuple[Any, ...] = self.listed_attacks
        self.settings = settings
        self.plans: tuple[Plan, ...] = ()
        self.all_series: tuple[Series, ...] = ()
        self.removers: list[Callable[[], object]] = []
        self.entity_kinds = (*finders_of(settings.entities),) if self.finds_entities else ()
        self.finder: EntityFinder | None = None
        if attacks:
            self._check_settings()

    def _check_settings(self) -> None:
        """Refuse settings that do not fit the attacks.

        Raises:
            ValueError: says which setting to change.
        """
        rounds = self.settings.local_steps is not None
        for attack in self.attacks if rounds else ():
            if not self._reads_updates(attack):
                raise ValueError(
                    f"a round sends a weight change, and '{attack.name}' reads what one step sends"
                )

    def _reads_updates(self, attack: Attack) -> bool:
        """Return whether an attack can read the weight change of several steps."""
        return self.reads_updates

    # ---- names ------------------------------------------------------------------------------

    def series(self, attack: Attack, stages: Collection[Stage]) -> list[Series]:
        """Return the series of an attack's results at those of the stages where it has one."""
        return [Series.at(stage, attack.name) for stage in stages if stage != Stage.RELEASED]

    def metrics_of(self, series: Series) -> tuple[str, ...]:
        """Return the names of the rates of a series."""
        if kind_of(series) is not None:
            return ("recall",)
        kinds = self.entity_kinds
        return ("auc",) if kinds and series.name in entity_names(kinds) else self.metrics

    def headline_of(self, series: Series) -> str:
        """Return the main metric of a series."""
        metrics = self.metrics_of(series)
        return self.headline if self.headline in metrics else metrics[0]

    def requirement(self, metric: str, clients: int = 1) -> Requirement:
        """Return what a rate needs to be known. Default: nothing, it is known at every look.

        Args:
            metric: its name, or that of an end of its interval.
            clients: whose results are pooled.
        """
        return Requirement()

    # ---- a fit ------------------------------------------------------------------------------

    def open(self, run: Run) -> None:
        """Begin a fit: insert taps.

        Raises:
            ValueError: values are to be found, and no tokenizer tells what ids mean.
        """
        self.run = run
        self.finder = find_entities(self.settings, run) if self.entity_kinds else None

    def check(self, attack: Attack) -> None:  # noqa: B027
        """Try as much of a calibrated attack as is possible before the first step.

        Raises:
            ValueError: an attack does not work on this model.
        """

    # ---- a look -----------------------------------------------------------------------------

    def arm(self) -> None:  # noqa: B027
        """Start a look."""

    def batch_ends(self, batch: TokenBatch | None) -> None:  # noqa: B027
        """Take the batch of a micro-step that ended in a look; None where it trained nothing."""

    def at_stages(self, look: Look) -> None:
        """Let each attack guess once from what leaves at the look's stages. Default: gradients."""
        for plan in self.plans if look.wanted else ():
            if not (plan.exposed and plan.roles and look.steps_with(plan.optimizer)):
                continue
            series = [s for s in self.all_series if s.attack == plan.attack.name]
            unanswered = [s for s in series if s.stage in look.wanted and s not in look.answers]
            if unanswered:
                answer = self._guess_from_gradients(plan, look.training_step, look.wanted[0])
                look.answers |= dict.fromkeys(unanswered, answer)

    def _guess_from_gradients(self, plan: Plan, step: Step, stage: Stage) -> object:
        """Return what an attack guesses from a step's gradients, or why it has no guess (yet)."""
        return guess(plan, step, stage, self.run)

    def before_defense(  # noqa: B027
        self, defense: Defense, parameters: Sequence[nn.Parameter], context: DefenseContext
    ) -> None:
        """Prepare for a defence that acts on the gradients next."""

    def _holds_nothing(self, look: Look) -> bool:
        """Return whether no batch of the look can leak anything; called once in a look."""
        return not any(batch.input_ids.numel() for batch in look.training_step.batches)

    @abstractmethod
    def score(self, look: Look, series: Series, answer: Any) -> Sequence[float]:
        """Return the score of a guess against the truth, as :attr:`width` packed numbers.

        Args:
            look: the look with its batches; ``look.notes`` may get a function that writes what was
                recovered.
            series: the series of the guess.
            answer: the guess that :meth:`at_stages` stored in ``look.answers``.

        Raises:
            Exception: there is no score; the result is unknown.
        """

    def rates(self, step: Step, plan: Plan, answer: Any) -> Mapping[str, float]:
        """Return the rates of a guess against the truth of this process so far in a step."""
        return {}

    def control_rates(self, plan: Plan, control: Step) -> Mapping[str, float] | Unknown | Waiting:
        """Return the rates of an attack on a control, or why there are none (yet).

        Args:
            plan: of the attack.
            control: a step of known words, whose gradient is at stage ``local``.
        """
        answer = guess(plan, control, Stage.LOCAL, self.run)
        return (
            answer if isinstance(answer, Unknown | Waiting) else self.rates(control, plan, answer)
        )

    def disarm(self, look: Look) -> None:  # noqa: B027
        """End a look, also one that failed: free what it used."""

    # ---- over clients and looks -------------------------------------------------------------

    @abstractmethod
    def pooled(self, series: Series, rows: Mapping[int, Sequence[float]]) -> Outcome:
        """Return the outcome of all clients' packed results.

        Args:
            series: the series of the results.
            rows: by number of the client; at least one.
        """

    def state_dict(self) -> dict[str, object]:
        """Return the state for a checkpoint, by names that no other channel uses."""
        return {}

    def load_state_dict(self, state: Mapping[str, object]) -> None:  # noqa: B027
        """Restore what :meth:`state_dict` returned, from the joint state of all channels.

        An empty state forgets the looks of an earlier fit.
        """


# ---- values in texts ------------------------------------------------------------------------

_ENTITY = "/entity/"


def entity_series(series: Sequence[Series], kinds: Sequence[str]) -> list[Series]:
    """Return series, each with those of the kinds of values in the texts behind it."""
    return [
        replace(one, name=f"{one.name}{end}")
        for one in series
        for end in ("", *(f"{_ENTITY}{kind}" for kind in kinds))
    ]


def kind_of(series: Series) -> str | None:
    """Return the kind of values that a series of words or texts is of; None: of all tokens."""
    return series.name.partition(_ENTITY)[2] or None


def find_entities(settings: Options, run: Run) -> EntityFinder | None:
    """Return what finds the values that the settings name, if they name any.

    Raises:
        ValueError: no tokenizer tells what ids mean.
    """
    if not settings.entities:
        return None
    return EntityFinder(settings.entities, (settings.tokenizer, *run.tokenizers))


# ---- what channels have in common -----------------------------------------------------------


def results_of(channel: Channel, look: Look) -> dict[Series, Result]:
    """Return this process's result of each series; every process calls it at every look."""
    empty = channel._holds_nothing(look)
    return {
        series: _result(channel, look, plan, series, empty=empty)
        for plan in channel.plans
        for series in channel.all_series
        if series.attack == plan.attack.name
    }


def _result(channel: Channel, look: Look, plan: Plan, series: Series, *, empty: bool) -> Result:
    if (unread := look.training_step.error) is not None:
        return Unknown(f"the batch could not be read: {unread}")
    if empty or not look.stepped or not plan.exposed:
        return NothingShared()
    answer = look.answers.get(series, Unknown("the attack was not run"))
    if isinstance(answer, Unknown | Waiting):
        return answer
    try:
        return Found(channel.score(look, series, answer), look.controls.get(plan.attack.name))
    except Exception as error:
        return Unknown(reason(error))


def exclude(channel: Channel, names: Collection[str]) -> None:
    """Exclude some attacks from this fit."""
    channel.attacks = tuple(a for a in channel.attacks if a.name not in names)


def gives_control(channel: Channel, attack: str) -> bool:
    """Return whether an attack is given the control of a look, by its name."""
    named = (a for a in channel.attacks if a.name == attack)
    return channel.controlled and any(a.needs_control for a in named)


def plan_of(channel: Channel, attack: Attack) -> Plan:
    """Check an attack against the model and the run at this moment, and return its plan.

    Raises:
        ValueError: it cannot read this model.
    """
    if channel.reads_states and not attack.needs(channel.run.anatomy).gradients:
        return Plan(attack, (), True, None)
    return gradient_plan(attack, channel.run)


def never_read(channel: Channel, name: str, *, fresh: bool) -> Unknown | NothingShared | None:
    """Return what an attack answers to every update of a federation; None where it varies."""
    attack = next(a for a in channel.listed_attacks if a.name == name)
    plan = None
    with suppress(ValueError):
        plan = plan_of(channel, attack)
    if plan is None or not plan.exposed:
        return NothingShared()
    if (why := no_sum(plan)) is not None:
        return Unknown(why, applies=False)
    facts, steps = plan.facts(channel.run, channel.settings.local_steps, 0), None
    if (how := facts.compression) and how.method not in attack.reads_compressed:
        return Unknown(explain_compression(how.method), applies=False)
    with suppress(UnusableObservation):  # some attacks read updates of any optimizer
        steps = LocalSteps.from_facts(facts)
    try:
        attack.check_updates(facts)
        if steps is not None:
            steps.check_fresh(fresh)
    except UnusableObservation as error:
        return Unknown(str(error), applies=not isinstance(error, Inapplicable))
    return None


def channels_of(attacks: Sequence[Attack], settings: Options) -> list[Channel]:
    """Return one channel of every known family, with the attacks of that family.

    Raises:
        ValueError: the settings do not fit.
    """
    channels = [
        kind([a for a in attacks if family_of(a) is kind], settings)
        for kind in Channel.registry.values()
    ]
    for name, kind in (("canaries", Canaries), ("entities", Entities)):
        has_attack = any(isinstance(attack, kind) for attack in attacks)
        if getattr(settings.games, name) is not None and not has_attack:
            raise ValueError(
                f"{name}= are planted for attacks on the trained weights, and there are none: add "
                f"{kind.__name__}()"
            )
    return channels


def family_of(attack: Attack) -> type[Channel]:
    """Return the class of an attack's channel."""
    return next(Channel.registry[c] for c in type(attack).__mro__ if c in Channel.registry)


def guess(
    plan: Plan, step: Step, stage: Stage, run: Run, query: Query | None = None
) -> Guess | Unknown | Waiting:
    """Return what an attack guesses from the gradients of a step, or why it has no guess (yet)."""
    try:
        view = step.view(stage)
    except NotYet as error:
        return Waiting(str(error))
    except Exception as error:
        return Unknown(reason(error))
    if (unreadable := find_unreadable(plan, view)) is not None:
        return unreadable
    try:
        with run.timed(plan.attack.name), torch.no_grad():
            answer = plan.attack.run(Observation((view,)), query)
        check_guess(plan.attack, answer, family_of(plan.attack).guesses)
        return answer
    except NotYet as error:
        zeros = tuple(role for role in plan.roles if not bool(view.tensors[role].any()))
        return Waiting(str(error), zeros=zeros)
    except Exception as error:
        return Unknown(reason(error), applies=not isinstance(error, Inapplicable))


def find_unreadable(plan: Plan, view: GradientSnapshot) -> Unknown | None:
    """Return why an attack's method cannot read a view; None where it can."""
    if isinstance(view, UpdateSnapshot):
        if (why := no_sum(plan)) is not None:
            return Unknown(why, applies=False)
        groups = plan.optimizer.param_groups if plan.optimizer is not None else ()
        carries = not plan.attack.reads_adaptive_updates and any(g.get("momentum") for g in groups)
        if carries and not view.fresh:
            return Unknown(explain_stale_optimizer("SGD"))
    if view.compression not in ("", *plan.attack.reads_compressed):
        return Unknown(explain_compression(view.compression), applies=False)
    absent = [role for role in plan.roles if role not in view.tensors]
    return Unknown(f"no gradient of {', '.join(absent)} in this step") if absent else None


def check_guess(attack: Attack, answer: object, expected: type[Guess]) -> None:
    """Refuse a return value of an attack's ``run`` that is no guess of its family.

    Raises:
        UnusableObservation: names both classes.
    """
    if not isinstance(answer, expected):
        raise UnusableObservation(
            f"run of attack '{attack.name}' returned a {type(answer).__name__}, and must return a "
            f"{expected.__name__} ({expected.__module__})"
        )


def worst_of(clients: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return each metric at the client where it is highest; empty for one client."""
    names = clients[0] if len(clients) > 1 else ()
    numbers = {n: [each[n] for each in clients if not math.isnan(each[n])] for n in names}
    return {name: max(values, default=math.nan) for name, values in numbers.items()}
