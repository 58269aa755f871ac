"""Channels: one object for each family of leak, through which the engine uses its attacks.

A family is what attacks recover: words, whole texts, membership, or what the weights memorized. A
*look* is one measurement at a step. In it a channel records the tensors that its attacks read, and
lets them guess. A guess is scored as *trials*: a table with a row for each thing that could be
recovered, such as a text. Rates, intervals and p-values come from such tables alone, be it of a
look, of its *control* (the same step on known words), of several clients or of several looks. A
*stage* is a point on the gradient's way: ``local`` before the defences, ``shared`` as a client
sends it, ``aggregate`` after the reduction over clients; or the ``released`` weights. The results
of one attack at one stage are a *series* in the logs. A *plan* says which gradients an attack reads
in this run.

The engine holds a list of channels and knows no family. To add a family, write a subclass of
:class:`StepChannel` and its attacks: ``Channel.reads`` is the base class of the attacks that it
takes. Channels that query the trained weights read no step
(:mod:`~lightning_fedleak.engine.channels.released.weights`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from lightning_fedleak.attacks import HONEST_BUT_CURIOUS, Attack, Capability, Guess
from lightning_fedleak.attacks.memorization import Canaries, CombinedReference, Entities
from lightning_fedleak.engine.options import Options
from lightning_fedleak.engine.outcomes import Series
from lightning_fedleak.engine.run import Run
from lightning_fedleak.evaluation.entities import EntityFinder, entity_names, finders_of
from lightning_fedleak.model.snapshots import Stage
from lightning_fedleak.report.records import Family


@dataclass(frozen=True)
class Requirement:
    """What a rate needs to be known, so that a gate (a limit for it) can decide.

    Attributes:
        looks: The number of looks after which it is known.
        why: Why it takes more than one look.
        never: Why it cannot become known in this run, and what to change; None if it can.
        never_alone: Why it cannot judge one client's update by itself; None if it can.
    """

    looks: int = 1
    why: str = ""
    never: str | None = None
    never_alone: str | None = None


class Channel(ABC):
    """Name the attacks of one family of leak, their rates and their series.

    A channel lives as long as its monitor. :meth:`open` begins a fit.

    Args:
        attacks: The attacks of this family; may be empty.
        settings: The settings by which the run is watched.

    Attributes:
        listed_attacks: The attacks that the user chose.
        attacks: The attacks that run in this fit.
        all_series: The series of the attacks at the measured stages.
        removers: Functions that remove the hooks of :meth:`open` and :meth:`arm` from the model.
        guesses: The class that ``run`` of its attacks returns.
        reads: The base class of its attacks. If several channels match an attack, it goes to the
            one whose class comes first in the attack's method resolution order.
        leak: The kind of leak that it measures, with the words for reports.
        family: The name of the leak in the logs.
        metrics: The names of its rates, each logged with ``_low`` and ``_high``.
        headline: The main metric, for pages and tables.
        extras: The names of its values without an interval.
        ranges: The smallest, the largest and the uninformed value (that of an attack that guesses)
            of each metric. A key that ends in "_" holds for all metrics that begin with it.
        own_threshold: The rates that use the attacks' own decisions, which may be low although the
            scores separate everything.
        adversary: The capabilities of its adversaries by default, besides what they see.
        sees: The capabilities that they have because the monitor shows them something.
        tests_looks: Whether each look has its own p-value.
        controlled: Whether its attacks also run on the *control* of a look, the same step on known
            words, which shows whether they work at all; see :meth:`control_answer`.
        finds_entities: Whether it has series of the values in texts that ``entities=`` names.
        entity_kinds: The kinds of these values.
        uninformed: The headline of an answer that names everything, whatever the gradient, at the
            newest look; 0 if that is not known.
        finder: Finds these values in texts; None before a fit, and if none are named.

    Raises:
        ValueError: The settings do not fit the family.
    """

    guesses: ClassVar[type[Guess]] = Guess
    reads: ClassVar[type[Attack]]
    leak: ClassVar[Family]
    family: ClassVar[str]
    metrics: ClassVar[tuple[str, ...]]
    headline: ClassVar[str]
    extras: ClassVar[tuple[str, ...]] = ()
    ranges: ClassVar[Mapping[str, tuple[float, float, float]]] = {}
    own_threshold: ClassVar[tuple[str, ...]] = ()
    adversary: frozenset[Capability] = HONEST_BUT_CURIOUS
    sees: ClassVar[frozenset[Capability]] = frozenset()
    tests_looks: ClassVar[bool] = False
    controlled: ClassVar[bool] = False
    finds_entities: ClassVar[bool] = False
    uninformed: float = 0.0

    registry: ClassVar[dict[type[Attack], type[Channel]]] = {}  # the channels by `reads`

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
        self.all_series: tuple[Series, ...] = ()
        self.removers: list[Callable[[], object]] = []
        self.entity_kinds = (*finders_of(settings.entities),) if self.finds_entities else ()
        self.finder: EntityFinder | None = None
        if attacks:
            self._check_settings()

    def _check_settings(self) -> None:  # noqa: B027
        """Refuse settings that do not fit the attacks.

        Raises:
            ValueError: The message says which setting to change.
        """

    # ---- names ------------------------------------------------------------------------------

    @abstractmethod
    def series(self, attack: Attack, stages: Collection[Stage]) -> list[Series]:
        """Return the series of an attack's results at those of the stages where it has one."""

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
        """Return what a rate needs to be known. By default it is known at every look.

        Args:
            metric: The name of the rate, or of an end of its interval.
            clients: The number of clients whose results are pooled.
        """
        return Requirement()

    # ---- a fit ------------------------------------------------------------------------------

    def open(self, run: Run) -> None:
        """Begin a fit: insert taps.

        Raises:
            ValueError: Values in texts are to be found, and there is no tokenizer.
        """
        self.run = run
        self.finder = find_entities(self.settings, run) if self.entity_kinds else None

    def state_dict(self) -> dict[str, object]:
        """Return the state for a checkpoint, by names that no other channel uses."""
        return {}

    def load_state_dict(self, state: Mapping[str, object]) -> None:  # noqa: B027
        """Restore what :meth:`state_dict` returned, from the joint state of all channels.

        An empty state forgets the looks of an earlier fit.
        """


# ---- values in texts ------------------------------------------------------------------------

ENTITY = "/entity/"  # between the name of an attack and a kind of values


def kind_of(series: Series) -> str | None:
    """Return the kind of values that a series counts; None if it counts all tokens."""
    return series.name.partition(ENTITY)[2] or None


def find_entities(settings: Options, run: Run) -> EntityFinder | None:
    """Return a finder of the values that the settings name; None if they name none.

    Raises:
        ValueError: There is no tokenizer.
    """
    if not settings.entities:
        return None
    return EntityFinder(settings.entities, (settings.tokenizer, *run.tokenizers))


# ---- functions of all channels --------------------------------------------------------------


def exclude(channel: Channel, names: Collection[str]) -> None:
    """Exclude some attacks from this fit."""
    channel.attacks = tuple(a for a in channel.attacks if a.name not in names)


def gives_control(channel: Channel, attack: str) -> bool:
    """Return whether an attack of this name also runs on the control of a look."""
    matches = (a for a in channel.attacks if a.name == attack)
    return channel.controlled and any(a.needs_control for a in matches)


def channels_of(attacks: Sequence[Attack], settings: Options) -> list[Channel]:
    """Return one channel of every known family, with the attacks of that family.

    Raises:
        ValueError: The settings do not fit, or an attack and the setting that it needs are not
            given together.
    """
    for kind, setting, value in (
        (Canaries, "games=Games(canaries=train.canaries)", settings.games.canaries),
        (Entities, "games=Games(entities=train.entities)", settings.games.entities),
        (CombinedReference, "Memorization(reference=)", settings.memorization.reference),
    ):
        if (value is not None) != any(isinstance(attack, kind) for attack in attacks):
            raise ValueError(f"{kind.__name__}() and {setting} belong together: give both")
    return [
        channel([a for a in attacks if family_of(a) is channel], settings)
        for channel in Channel.registry.values()
    ]


def family_of(attack: Attack) -> type[Channel]:
    """Return the class of an attack's channel."""
    return next(Channel.registry[c] for c in type(attack).__mro__ if c in Channel.registry)


def highest(values: Sequence[float]) -> float:
    """Return the highest of the known values; NaN if none is known."""
    return max((value for value in values if not math.isnan(value)), default=math.nan)
