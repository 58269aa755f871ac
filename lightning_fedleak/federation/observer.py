"""Attacks on the updates of a federation's rounds, by whoever sees them: a client, or the server.

The same channels, attacks, names and files as :class:`~lightning_fedleak.LeakageMonitor`'s, without
a Trainer. The x axis is the round.
"""

from __future__ import annotations

import importlib.util
import math
import uuid
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn
from torch.optim import Optimizer

from lightning_fedleak.anatomy import find_anatomy
from lightning_fedleak.anatomy.wrappers import matrix_shape
from lightning_fedleak.attacks.base import Attack, UnusableObservation
from lightning_fedleak.attacks.local_steps import LocalSteps
from lightning_fedleak.attacks.public_text import TextSource
from lightning_fedleak.batches import BatchAdapter, BatchError, TokenBatch, read_batch
from lightning_fedleak.defenses import Defense
from lightning_fedleak.federation.trained_on import Recorded
from lightning_fedleak.federation.updates import (
    State,
    UpdateError,
    joint_norm,
    observe,
    parameter_names,
)
from lightning_fedleak.looks import choice
from lightning_fedleak.looks.cache import CalibrationCache
from lightning_fedleak.looks.cadence import MaxOverhead
from lightning_fedleak.looks.channels.base import Channel, Settings, channels_of, no_sum
from lightning_fedleak.looks.channels.targets import Games
from lightning_fedleak.looks.engine import selected
from lightning_fedleak.looks.exchange import Exchange
from lightning_fedleak.looks.facts import defense_facts, facts_of, optimizers_of
from lightning_fedleak.looks.lineup import Lineup
from lightning_fedleak.looks.log import JsonLines, Report, RunRecord, privacy_values
from lightning_fedleak.looks.look import (
    Look,
    Moment,
    NothingShared,
    Outcome,
    Result,
    Series,
    Unknown,
    reason,
    unknown,
)
from lightning_fedleak.looks.plan import check_optimizers, check_texts
from lightning_fedleak.looks.results import MAX_WAITS, WORST, Results
from lightning_fedleak.looks.run import AUTOCAST, Run
from lightning_fedleak.looks.tensorboard import BoardLogger, add_pages
from lightning_fedleak.records import GateDecision
from lightning_fedleak.snapshots import GradientSnapshot, Inapplicable, Stage, UpdateSnapshot
from lightning_fedleak.threats import Capability
from lightning_fedleak.validate import check_choice, check_integer

SUM = "sum"
"""The client whose update is that of all clients together."""

UNKNOWN_HERE = (
    "whoever looks here does not hold the client's texts, so that what was read off the update "
    "cannot be scored"
)

Side = Literal["client", "server"]


@dataclass(frozen=True)
class _RoundRun(Run):
    """Describes a federation to channels: one process, in which a client is a number."""

    watcher: ClassVar[str] = "RoundObserver"

    number_: int
    optimizer: Optimizer
    trained_in: str
    tokenizer: Any
    round_defenses: tuple[Defense, ...]

    @property
    def rank(self) -> int:
        return self.number_

    @property
    def processes(self) -> int:
        return 1

    @property
    def device(self) -> torch.device:
        return self.anatomy.device

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        return [self.optimizer]

    @property
    def defenses(self) -> tuple[Defense, ...]:
        return self.round_defenses

    @property
    def precision(self) -> str:
        return self.trained_in

    @property
    def tokenizers(self) -> Sequence[Any]:
        return [self.tokenizer]

    def forward_context(self) -> AbstractContextManager[Any]:
        dtype = AUTOCAST.get(self.trained_in)
        return nullcontext() if dtype is None else torch.autocast(self.device.type, dtype)


@dataclass(frozen=True)
class RoundLook:
    """What was read off one client's update in one round.

    Attributes:
        round_: number of the round.
        client: whose update it was; :data:`SUM` for that of all together.
        values: by log name, rates of games pooled over the client's rounds; NaN is unknown, and
            what is waited for is missing.
        now: the same of this round alone.
        unknown: why results are unknown, by the log name that their values begin with.
        not_yet: why nothing can be read so far that will be later (words of a LoRA whose B is
            zero), by that name, and by that of the worst of the family.
        too_few: why rates of this round alone are no judgement of it, by that name.
        seconds: that the look took.
    """

    round_: int
    client: str | int
    values: Mapping[str, float]
    now: Mapping[str, float]
    unknown: Mapping[str, str]
    not_yet: Mapping[str, str]
    too_few: Mapping[str, str]
    seconds: float
    _entry: _LookEntry = field(repr=False, compare=False)


@dataclass(frozen=True)
class _LookEntry:
    """Holds what is needed to write a look down, or to forget it."""

    look: Look
    seat: _Seat
    outcomes: Mapping[Series, Outcome]
    utility: Mapping[str, float]
    before: Mapping[str, object]


@dataclass
class _Seat:
    """Holds the state of one client over its rounds."""

    run: _RoundRun
    stage: Stage
    channels: list[Channel]
    series: dict[Series, Channel]
    results: Results
    report: Report
    exchange: Exchange
    last: tuple[int, dict[str, tuple[float, float]]] | None = None


class RoundObserver:
    """Attacks what clients return in the rounds of a federation, and logs how much it gives away.

    ::

        observer = RoundObserver(model, partial(torch.optim.AdamW, lr=1e-4), local_steps=10)
        for round_ in range(rounds):
            observer.begin(round_, sent)
            for client, returned in enumerate(train_clients(sent)):
                observer.look(returned, client, batches=client_batches)
        observer.end()

    **Who knows the truth.** Only the client holds its texts. On the client's side ``batches=`` are
    those that its local steps were trained on, and every result is scored. A server that looks has
    none (``batches=None``): results are *unknown*, but for what an adversary can tell by itself,
    the certificates. A simulation holds both sides, and may hand the batches over.

    Attacks are calibrated once, on the first model that is sent, and follow those of later rounds.
    Results go to ``leakage.jsonl`` in ``folder``, one line for each round, client and attack, to
    ``run.jsonl``, and to TensorBoard, one run for each client. They hold numbers only. What fails
    is *unknown* and counted in ``monitor/failures``, never 0. Rates of membership games are pooled
    over the rounds of a client.

    Args:
        model: of the architecture that clients train, with ``requires_grad`` as they have it. The
            observer's own: it takes the weights of what is sent.
        optimizer: makes the optimizer that the server prescribed, of given parameters, as
            ``partial(torch.optim.AdamW, lr=1e-4)`` does. It is never stepped.
        local_steps: optimizer steps of a round.
        attacks: as :class:`~lightning_fedleak.LeakageMonitor`'s, of those that read updates.
        folder: where the files go.
        side: where the looks are made, for the record: ``"client"`` or ``"server"``.
        fresh: whether clients begin each round with a fresh optimizer.
        precision: that clients train in, in the Trainer's words.
        defenses: that act on what is returned, so that attacks know of them and the record has
            what they spend.
        gates: what the record says of gates.
        batch_adapter: as :class:`~lightning_fedleak.LeakageMonitor`'s, like all up to ``cache``.
        assume: capabilities of the adversary.
        tokenizer: reads the texts of ``public_text``.
        anatomy: where the model keeps its parts.
        games: how membership games are played.
        texts: that are reconstructed at a look, at most.
        public_text: that attacks which choose themselves are calibrated on.
        look_seconds: attacks that choose themselves and would take longer are not played.
        cache: keep calibrations on disk.
        tensorboard: log to TensorBoard, where it is installed.
        max_overhead: the largest share of the time of rounds that looks may take: after one that
            was dear, rounds go by without (:meth:`due`). None looks at every round, as a gate does
            whatever is said here. Calibration is not counted.
        federation: a name that observers of one federation have alike, in whatever process they
            are: ``fedleak report`` takes their files as of one run. Flower's mod gives one.

    Attributes:
        round_: number of the round at work; -1 before the first.
        next_look: by client, the first round that ``max_overhead`` lets it be looked at again.

    Raises:
        ValueError: contradictory or unknown arguments, or an attack that cannot read this model.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Callable[[list[nn.Parameter]], Optimizer],
        local_steps: int,
        *,
        attacks: Sequence[Attack] | Attack | Literal["auto"] = "auto",
        folder: str | Path = "fedleak_runs/federation",
        side: Side = "client",
        fresh: bool = True,
        precision: str = "32-true",
        defenses: Sequence[Defense] = (),
        gates: Sequence[Mapping[str, Any]] = (),
        batch_adapter: BatchAdapter | None = None,
        assume: Collection[Capability] | None = None,
        tokenizer: Any | None = None,
        anatomy: Mapping[str, Any] | None = None,
        games: Games | None = None,
        texts: int = 4,
        public_text: TextSource | None = None,
        look_seconds: float = 30.0,
        cache: bool = True,
        tensorboard: bool = True,
        max_overhead: float | None = None,
        federation: str | None = None,
    ) -> None:
        check_integer("local_steps", local_steps)
        check_choice("side", side, get_args(Side))
        selection = selected(attacks, assume, public_text, tokenizer, rounds=True)
        self._auto = selection.auto
        self.attacks = list(selection.attacks)
        self.model = model
        self.local_steps = local_steps
        self.side: Side = side
        self.folder = Path(folder)
        self.games = games or Games()
        self._texts = texts
        self._fresh = fresh
        self._adapter = batch_adapter
        self._tokenizer = tokenizer
        self._look_seconds = look_seconds
        self._cache = CalibrationCache() if cache else None
        self._tensorboard = tensorboard and importlib.util.find_spec("tensorboard") is not None
        self._gates = [dict(gate) for gate in gates]
        self._described: list[Defense] = list(defenses)
        self.federation = federation
        if max_overhead is not None:
            MaxOverhead(max_overhead)  # refuses what is no share
        self._share = max_overhead
        self.next_look: dict[str | int, int] = {}
        self._stale = False
        self._anatomy = find_anatomy(model, **dict(anatomy or {}))
        check_texts(self.attacks, {"games=Games(held_out=)": self.games.held_out}, self._anatomy)
        trained = [p for p in model.parameters() if p.requires_grad]
        if not trained:
            raise ValueError(
                "no parameter of the model is trained (requires_grad): give the observer a model "
                "that is set up as the clients' are"
            )
        self._optimizer = optimizer(trained)
        check_optimizers([self._optimizer], self.attacks)
        channels = self._channels_at(Stage.SHARED)
        adversaries = frozenset().union(*(c.adversary for c in channels if c.attacks))
        assumed = adversaries if selection.assume is None else selection.assume
        round_defenses = tuple(defenses)
        self._run = _RoundRun(
            self._anatomy, "rank", assumed, 0, self._optimizer, precision, tokenizer, round_defenses
        )
        self._names = parameter_names(model)
        self._sent: State | None = None
        self._key_of: dict[str, str] = {}
        self._channels = [channel for channel in channels if channel.attacks]
        for channel in self._channels:
            channel.open(self._run)
        self._series = _series(self._channels, Stage.SHARED)
        self._lineup: Lineup | None = None
        self._failed: dict[str, str] = {}
        self._seats: dict[tuple[str | int, Stage], _Seat] = {}
        self._jsonl = JsonLines(self.folder / "leakage.jsonl")
        self._record = RunRecord(self.folder / "run.jsonl", self._jsonl.run, _warn)
        self.round_ = -1

    def _channels_at(self, stage: Stage) -> list[Channel]:
        return channels_of(
            self.attacks, Settings((stage,), self.local_steps, False, self.games, self._texts)
        )

    # ---- a round ----------------------------------------------------------------------------

    def begin(self, round_: int, sent: State) -> None:
        """Begin a round: the model is the one that is sent, and attacks follow it.

        Args:
            round_: its number, larger than that of the round before. The same again is the same
                round, in which the same is sent to another client.
            sent: what clients get: a whole model's state, that of its trained parameters, or a PEFT
                adapter's, by names of ``model``. It must not change until the round is over.

        Raises:
            UpdateError: other names or shapes than the model's, or not all that is trained.
            ValueError: an attack cannot read this model, a round that is not a later one, or
                another model in the same round.
        """
        whole = isinstance(round_, int) and not isinstance(round_, bool)
        if not whole or round_ < max(self.round_, 0):
            raise ValueError(
                f"rounds are numbered upwards: round {round_!r} cannot follow round {self.round_}"
            )
        if round_ == self.round_ and self._sent is not None:
            if not _is_equal(sent, self._sent):
                raise ValueError(
                    f"another model is sent in round {round_} than before: where clients get "
                    "models of their own, give each an observer of its own"
                )
            return
        self._load(sent)
        if self._lineup is None:
            self._open(round_)
        assert self._lineup is not None
        self._stale = True
        self._sent = sent
        self.round_ = round_

    @torch.no_grad()
    def _load(self, sent: State) -> None:
        """Put what is sent into the observer's model."""
        parameters = dict(self.model.named_parameters())
        buffers = dict(self.model.named_buffers(remove_duplicate=False))
        unknown_names = [n for n in sent if n not in self._names and n not in buffers]
        if unknown_names:
            raise UpdateError(
                f"'{unknown_names[0]}' is sent, and {type(self.model).__name__} has no such "
                f"parameter ({len(unknown_names)} of {len(sent)} names are not the model's): give "
                "the observer the model whose state is sent, under the same names"
            )
        keys = {self._names[n]: n for n in sent if n in self._names}
        absent = [n for n, p in parameters.items() if p.requires_grad and n not in keys]
        if absent:
            raise UpdateError(
                f"'{absent[0]}' is trained in the observer's model and is not sent "
                f"({len(absent)} such): the model must be set up as the clients' are"
            )
        for name, tensor in sent.items():
            target = parameters[self._names[name]] if name in self._names else buffers[name]
            if target.shape != tensor.shape:
                raise UpdateError(
                    f"'{name}' is sent with shape {tuple(tensor.shape)}, and the observer's model "
                    f"has {tuple(target.shape)}"
                )
            values = tensor.detach().to(target.device)
            target.copy_(values)
            if not torch.equal(target.to(values.dtype), values):
                raise UpdateError(
                    f"'{name}' is sent with values that the observer's model, in "
                    f"{str(target.dtype).removeprefix('torch.')}, cannot hold (or NaN): make the "
                    "observer's model of the dtype that clients train"
                )
        self._key_of = keys

    def _open(self, round_: int) -> None:
        """Calibrate the attacks on the first model that is sent."""
        lineup = Lineup(
            self._run,
            self.attacks,
            self._channels,
            local_steps=self.local_steps,
            begins_at=round_ * self.local_steps,
            choosing=self._auto,
            most_seconds=self._look_seconds,
            cache=self._cache,
        )
        lineup.follow()
        lineup.calibrate({})
        if not self._auto and not lineup.exposed:
            raise ValueError(
                "no attack reads anything that is shared in this federation: "
                f"{len(lineup.trained)} parameters are trained, and none of "
                f"{', '.join(a.name for a in self.attacks)} reads them. attacks='auto' takes all "
                "that can"
            )
        self._lineup = lineup
        if self._auto:
            choice.show(lineup.rows, lineup.unread, self._run.assumed, watcher=self._run.watcher)
            every = Report([], [], self.attacks, self._jsonl, None, client="all", round_of=int)
            every.write_not_played(lineup.rows, round_)
        self._record.begins(
            facts_of(
                self._run,
                lineup,
                self._series,
                fit=self.federation or uuid.uuid4().hex,
                training={
                    "optimizers": optimizers_of([self._optimizer]),
                    "strategy": "federation",
                    "precision": self._run.precision,
                    "local_steps": self.local_steps,
                    "begins_at_round": round_,
                },
                gates=self._gates,
                monitor={
                    "looks": "every round",
                    "stages": [str(Stage.SHARED)],
                    "local_steps": self.local_steps,
                    "attacks": "auto" if self._auto else "listed",
                    "side": self.side,
                },
                resumed={},
            )
        )

    def update(
        self,
        returned: State,
        *,
        learning_rate: float | None = None,
        stage: Stage = Stage.SHARED,
        noise_std: float = 0.0,
    ) -> UpdateSnapshot:
        """Return what is seen of a client's round by names that were sent; see :func:`observe`.

        Raises:
            RuntimeError: no round has begun.
            UpdateError: no update can be read.
        """
        if self._sent is None:
            raise RuntimeError("begin(round_, sent) comes before a client's update is looked at")
        return observe(
            self._sent,
            returned,
            self._optimizer,
            self.local_steps,
            trained=self.trained_names(),
            learning_rate=learning_rate,
            round_=self.round_,
            stage=stage,
            fresh=self._fresh,
            noise_std=noise_std,
        )

    def trained_names(self) -> list[str]:
        """Return the names of what is trained, among those that were sent.

        Raises:
            RuntimeError: no round has begun.
        """
        if self._sent is None:
            raise RuntimeError("begin(round_, sent) says which names are sent")
        parameters = dict(self.model.named_parameters())
        model_names = ((n, self._names[n]) for n in self._sent if n in self._names)
        return [n for n, name in model_names if parameters[name].requires_grad]

    def shares_twice(self, names: Sequence[str]) -> bool:
        """Return whether two of these names belong to one parameter."""
        return len({self._names[n] for n in names}) < len(names)

    def look(
        self,
        returned: State,
        client: str | int = 0,
        *,
        batches: Sequence[Any] | None = None,
        learning_rate: float | None = None,
        noise_std: float = 0.0,
        utility: Mapping[str, float] | None = None,
        logged: bool = True,
    ) -> RoundLook:
        """Attack what a client returned in this round.

        Args:
            returned: what it gave back, or is about to.
            client: who. :data:`SUM`: the mean over clients, what a server behind a secure
                aggregation sees; logged as ``leakage_aggregate/...``.
            batches: that its local steps were trained on, one for each, whoever looks holds them;
                None: unknown. Those of ``recording`` know of steps that accumulate several.
            learning_rate: the mean over the local steps, where a schedule changes it within a round
                or over rounds; by default what ``recording`` recorded, or the optimizer's.
            noise_std: of the noise that is known to be on each number of ``returned``.
            utility: further values of this round, logged as ``utility/<name>``.
            logged: write it down at once; else by :meth:`log`, or not at all (:meth:`forget`).

        Returns:
            What was found. An update that cannot be read is *unknown*.

        Raises:
            RuntimeError: no round has begun.
        """
        if self._sent is None:
            raise RuntimeError("begin(round_, sent) comes before a client's update is looked at")
        stage = Stage.AGGREGATE if client == SUM else Stage.SHARED
        seat = self._seat(client, stage)
        look, before = Look(self.round_), seat.results.state_dict()
        if learning_rate is None and isinstance(batches, Recorded):
            learning_rate = batches.learning_rate
        with look.clock(self._run.device):
            if self._stale:
                # Attacks count optimizer steps: those of a client before this round.
                assert self._lineup is not None
                self._failed = self._lineup.refresh(self.round_ * self.local_steps)
                self._stale = False
            self._attack(
                look, seat, returned, batches, learning_rate=learning_rate, noise_std=noise_std
            )
            outcomes = self._score(look, seat, has_truth=batches is not None)
        for channel in seat.channels:
            channel.disarm(look)
        beside = {f"utility/{n}": float(v) for n, v in (utility or {}).items()}
        if batches is None:
            values = now = _facts(outcomes) | beside | {"monitor/seconds": look.seconds}
        else:
            assert self._lineup is not None
            shared = bool(self._lineup.trained)
            outcomes = seat.results.add(look, outcomes, beside, shared=shared)
            now = dict(seat.results.look_values)
            values = {n: v for n, v in seat.results.latest.items() if n in now}
        why = {s.log_name: o.unknown for s, o in outcomes.items() if o.unknown is not None}
        few = {s.log_name: o.too_few for s, o in outcomes.items() if o.too_few is not None}
        not_yet = _not_yet(outcomes, seat.series)
        entry = _LookEntry(look, seat, outcomes, utility or {}, before)
        round_look = RoundLook(
            self.round_, client, values, now, why, not_yet, few, look.seconds, entry
        )
        if logged:
            self.log(round_look)
        return round_look

    def log(
        self,
        look: RoundLook,
        beside: Mapping[str, float] | None = None,
        defenses: Sequence[Defense] = (),
    ) -> None:
        """Write a look down.

        Args:
            look: that was made with ``logged=False``.
            beside: further values by log name.
            defenses: that have spent on this round, besides the observer's own.
        """
        entry = look._entry
        spending = [*self._run.defenses, *(d for d in defenses if d not in self._run.defenses)]
        for defense in spending:
            if all(defense is not described for described in self._described):
                self._described.append(defense)
                self._record.defended(defense_facts(defense))
        seat = entry.seat
        for channel in seat.channels:
            channel_outcomes = {
                s: o for s, o in entry.outcomes.items() if seat.series[s] is channel
            }
            try:
                channel.published(entry.look, channel_outcomes, seat.report)
            except Exception as error:
                seat.report.warn_once(f"not all of a look was written: {reason(error)}")
        values = privacy_values(spending) | dict(look.values) | dict(beside or {})
        seat.report.write(entry.look, entry.outcomes, values)
        self._record.looked(
            look.round_,
            entry.utility,
            look.seconds,
            seat.results.failures,
            spending,
            look.client,
        )

    def due(self, client: str | int) -> bool:
        """Return whether ``max_overhead`` lets a client's update of this round be looked at."""
        return self.round_ >= self.next_look.get(client, self.round_)

    def paid(
        self,
        client: str | int,
        look_seconds: float,
        round_seconds: float,
        beside_seconds: float = 0.0,
    ) -> None:
        """Fix a client's next look by what this one cost.

        That is the next round where an attack can read nothing yet (``results.Waiting.soon``).

        Args:
            client: whose update was looked at.
            look_seconds: that it took.
            round_seconds: what the round took to train.
            beside_seconds: what each round costs beside that, looked at or not.
        """
        seats = (s for (seat_client, _), s in self._seats.items() if client in (seat_client, SUM))
        waiting = any(seat.results.waiting for seat in seats)
        if self._share is not None and not waiting:
            # A hundredth at least, so that a next look comes where the rest takes all of the share.
            free = max(round_seconds - beside_seconds / self._share, round_seconds / 100)
            cadence = MaxOverhead(self._share)
            self.next_look[client] = cadence.after_look(self.round_, look_seconds, free)

    def forget(self, look: RoundLook) -> None:
        """Take back a look that was not written down, the newest of its client.

        One at an update that did not leave, say, which is to count in no rate.
        """
        look._entry.seat.results.load_state_dict(look._entry.before)

    def _attack(
        self,
        look: Look,
        seat: _Seat,
        returned: State,
        batches: Sequence[Any] | None,
        *,
        learning_rate: float | None,
        noise_std: float,
    ) -> None:
        try:
            look.batches = [] if batches is None else [self._read(b) for b in batches]
            if batches is not None and not look.batches:
                raise BatchError("no batch of the round was handed over")
        except Exception as error:
            look.truth_error = reason(error)
        for series in seat.series:
            if series.attack in self._failed:
                look.answers[series] = Unknown(self._failed[series.attack])

        def take() -> GradientSnapshot:
            if batches and seat.stage is not Stage.AGGREGATE:
                _check_steps(batches, self.local_steps)
            _check_new(seat, look.step, returned)
            snapshot = self.update(
                returned, learning_rate=learning_rate, stage=seat.stage, noise_std=noise_std
            )
            return replace(
                snapshot,
                tensors={role: snapshot.tensors[key] for role, key in self._keys().items()},
                tied=self._anatomy.tied,
                client=seat.run.number,
            )

        moment = Moment(look, (seat.stage,), (seat.stage,), None, 1.0, take)
        for channel in seat.channels:
            if batches is None and channel.plays_games:
                continue  # of which texts should a game ask?
            try:
                channel.arm()
                channel.at_moment(moment)
            except Exception as error:
                for series, owner in seat.series.items():
                    if owner is channel:
                        look.answers[series] = Unknown(reason(error))
        look.stepped.add(0)

    def _keys(self) -> dict[str, str]:
        """Return the name that was sent for every role that an attack reads."""
        assert self._lineup is not None
        first = {id(p): n for n, p in self.model.named_parameters()}
        roles = dict.fromkeys(r for plan in self._lineup.exposed for r in plan.roles)
        return {role: self._key_of[first[id(self._anatomy.parameter(role))]] for role in roles}

    def _read(self, batch: Any) -> TokenBatch:
        if isinstance(batch, TokenBatch):
            tokens = batch
        elif self._adapter is not None:
            tokens = self._adapter(batch)
        else:
            tokens = read_batch(batch, self._anatomy.kind)
        rows = matrix_shape(self._anatomy.embedding)
        tokens.check_values(None if rows is None else rows[0], self._anatomy.vocab_size)
        return tokens

    def _score(self, look: Look, seat: _Seat, *, has_truth: bool) -> dict[Series, Outcome]:
        assert self._lineup is not None
        plans = {plan.attack.name: plan for plan in self._lineup.plans}
        if not has_truth:
            return {
                series: _outcome_without_truth(
                    channel, look.answers.get(series), plans[series.attack].exposed
                )
                for series, channel in seat.series.items()
            }
        results: dict[Series, Result] = {}
        for channel in seat.channels:
            results |= channel.results(look)
        ordered = {series: results[series] for series in seat.series if series in results}
        shared = {series: plans[series.attack].exposed for series in ordered}
        outcomes, _ = seat.exchange.outcomes(ordered, shared, look.step)
        if outcomes is None:
            why = "the client's batches hold nothing that a loss was computed on"
            outcomes = {s: unknown(c.metrics, why) for s, c in seat.series.items()}
        return outcomes

    def _seat(self, client: str | int, stage: Stage) -> _Seat:
        """Return the state of a client, and create it at the first look."""
        if (client, stage) in self._seats:
            return self._seats[client, stage]
        assert self._lineup is not None
        # Games are drawn by it: the same whoever was looked at before, and in which process.
        run = replace(self._run, number_=zlib.crc32(str(client).encode()))
        playing = {plan.attack.name: plan for plan in self._lineup.plans}
        channels = [c for c in self._channels_at(stage) if c.attacks]
        for channel in channels:
            channel.leave_out({a.name for a in channel.given} - playing.keys())
            channel.open(run)
            channel.follow([playing[a.name] for a in channel.attacks])
        series = _series(channels, stage)
        results = Results(series, most_waited=MAX_WAITS)
        results.untested = self._lineup.untested
        results.begin()
        boards: list[BoardLogger] = []
        full: Exception | None = None  # a disk that is full must not end a round
        try:
            boards = self._boards(client)
        except Exception as error:
            full = error
        report = Report(
            boards,
            [board.writer for board in boards],
            self.attacks,
            self._jsonl,
            None,
            client=client,
            round_of=int,
            watcher=self._run.watcher,
            unit="round",
        )
        self._seats[client, stage] = seat = _Seat(
            run, stage, channels, series, results, report, Exchange(run, series)
        )
        families = {channel.family for channel in series.values()}
        if full is not None:
            report.leave_loggers(full)
        try:
            add_pages(
                report.boards,
                (),
                series,
                privacy=["privacy/epsilon"] if self._run.defenses else [],
                decisions=[f"gate/{gate['name']}" for gate in self._gates],
                worst=[f"leakage/worst/{f}" for f in results.families if f in families],
                settings={"local_steps": self.local_steps, "client": client, "side": self.side},
            )
        except Exception as error:
            report.leave_loggers(error)
        return seat

    def _boards(self, client: str | int) -> list[BoardLogger]:
        """Return the writer of a client's TensorBoard run: each client has a line of its own."""
        name = f"client_{client}" if client != SUM else SUM
        return [BoardLogger(self.folder / "tensorboard" / name)] if self._tensorboard else []

    # ---- what is written --------------------------------------------------------------------

    def expect_gates(self, gates: Sequence[Mapping[str, Any]]) -> None:
        """Add gates to the record of the run, which is written when the first round begins."""
        self._gates += [dict(gate) for gate in gates if dict(gate) not in self._gates]

    def record_decision(self, decision: GateDecision) -> None:
        """Record in ``run.jsonl`` what a gate has done."""
        self._record.decided(decision)

    def end(self, how: str = "finished") -> None:
        """End the federation; ``how`` is ``"finished"``, or the class of what was raised."""
        self._record.ends(self.round_ + 1, how, self._run.defenses)
        for seat in self._seats.values():
            for channel in seat.channels:
                channel.close()
            try:
                for board in seat.report.boards:
                    board.close()
            except Exception as error:
                seat.report.leave_loggers(error)

    # ---- names ------------------------------------------------------------------------------

    def metric_names(self) -> list[str]:
        """Return the names of the values that are logged of each client's update."""
        return ["monitor/failures", "monitor/seconds", *Results(self._series).names()]

    def headlines_of(self, name: str) -> tuple[str, ...]:
        """Return the log names of which ``leakage/worst/<family>`` is the highest."""
        return Results(self._series).headlines(name.rpartition("/")[-1])

    def headlines(self) -> list[str]:
        """Return the log names of each family's worst, and of the values it is taken from."""
        results = Results(self._series)
        worst = [f"{WORST}/{family}" for family in results.families]
        return worst + [n for family in results.families for n in results.headlines(family)]

    def never_judged(self, name: str) -> str | None:
        """Return why no update can ever be judged by a value; None where one can.

        It depends on the optimizer, the steps of a round, what is trained, and the games.

        Args:
            name: in the logs.
        """
        root, _, rate = name.rpartition("/")
        names = self.headlines_of(name) if root == WORST else (name,)
        verdicts = [
            (channel.never_judged(one.rpartition("/")[-1]), self._never_read(series, channel))
            for one in names
            for series, channel in self._series.items()
            if one.rpartition("/")[0] == series.log_name and rate != "exposed"
        ]
        is_judged = any(why is None and answer is None for why, answer in verdicts)
        unread = [answer for _, answer in verdicts if isinstance(answer, Unknown)]
        # As in Results: an attack that is made for these updates, and fails, leaves the worst open.
        if not verdicts or (is_judged and not any(answer.applies for answer in unread)):
            return None
        reasons = [why for why, _ in verdicts if why] or [answer.why for answer in unread]
        return "; ".join(dict.fromkeys(reasons or ["what it reads is not trained, so not shared"]))

    def _never_read(self, series: Series, channel: Channel) -> Unknown | NothingShared | None:
        """Return what an attack answers to every update of these rounds; None where it varies."""
        attack = next(a for a in channel.given if a.name == series.attack)
        try:
            plan = channel.plan(attack)
        except ValueError:
            return NothingShared()
        if not plan.exposed:
            return NothingShared()
        if (why := no_sum(plan)) is not None:
            return Unknown(why, applies=False)
        facts, steps = plan.facts(self._run, self.local_steps, 0), None
        with suppress(UnusableObservation):  # some attacks read updates of any optimizer
            steps = LocalSteps.from_facts(facts)
        try:
            attack.check_updates(facts)
            if steps is not None:
                steps.check_fresh(self._fresh)
        except UnusableObservation as error:
            return Unknown(str(error), applies=not isinstance(error, Inapplicable))
        return None


def _not_yet(
    outcomes: Mapping[Series, Outcome], channels: Mapping[Series, Channel]
) -> dict[str, str]:
    """Return why results wait, and why the worst of a family waits if all else in it is known.

    A game that waits for texts to ask about is none of them: its result could be had at once.
    """
    reasons = {
        series.log_name: outcome.pending
        for series, outcome in outcomes.items()
        if outcome.pending is not None and not channels[series].plays_games
    }
    for series in outcomes:
        family = channels[series].family
        of_family = [s for s in outcomes if channels[s].family == family]
        fails = any(outcomes[s].unknown is not None and outcomes[s].applies for s in of_family)
        if series.log_name in reasons and not fails:
            reasons[f"{WORST}/{family}"] = reasons[series.log_name]
    return reasons


def _is_equal(one: State, other: State) -> bool:
    """Return whether two states hold the same names and values."""
    return one.keys() == other.keys() and all(
        t is other[n] or torch.equal(t.to(other[n].device), other[n]) for n, t in one.items()
    )


def _check_steps(batches: Sequence[Any], local_steps: int) -> None:
    """Refuse a round of another length than the attacks assume.

    Raises:
        UpdateError: with both numbers.
    """
    steps = len(batches.rates if isinstance(batches, Recorded) else batches)
    if steps != local_steps:
        raise UpdateError(
            f"the client took {steps} optimizer steps in this round, and the observer assumes "
            f"local_steps={local_steps}, on which what an update holds depends: give "
            f"RoundObserver(local_steps={steps}), or report each batch of each step "
            "(trained_on(batch, step=False) of one whose gradient is accumulated)"
        )


def _check_new(seat: _Seat, round_: int, returned: State) -> None:
    """Refuse what a client has returned in an earlier round already.

    Raises:
        UpdateError: says in which.
    """
    sums = {n: (float(t.double().sum()), joint_norm({n: t})) for n, t in returned.items()}
    if seat.last is not None and seat.last[0] < round_ and seat.last[1] == sums:
        raise UpdateError(
            f"the client returned what it returned in round {seat.last[0]}, and not what it made "
            f"of the model of round {round_}: an update of an earlier round"
        )
    seat.last = (round_, sums)


def _series(channels: Sequence[Channel], stage: Stage) -> dict[Series, Channel]:
    per_attack = {
        series: channel
        for channel in channels
        for attack in channel.attacks
        if (series := channel.series(attack, stage)) is not None
    }
    return per_attack | {s: channel for channel in channels for s in channel.further_series()}


def _outcome_without_truth(channel: Channel, answer: object, exposed: bool) -> Outcome:
    """Return why a guess has no rate without the truth, and the certificates that it has."""
    if not exposed:
        return replace(unknown(channel.metrics, "what it reads is not shared"), exposed=False)
    if isinstance(answer, Unknown):
        return unknown(channel.metrics, answer.why, applies=answer.applies)
    certificates = channel.without_truth(answer)
    return replace(unknown(channel.metrics, UNKNOWN_HERE), extra=certificates)


def _facts(outcomes: Mapping[Series, Outcome]) -> dict[str, float]:
    """Return what is logged where the truth is not known: no rate, not even an unknown one."""
    values = {}
    for series, outcome in outcomes.items():
        values[f"{series.log_name}/exposed"] = float(outcome.exposed)
        for name, value in outcome.extra.items():
            if not math.isnan(value):
                values[f"{series.log_name}/{name}"] = value
    return values


def _warn(text: str) -> None:
    rank_zero_warn(f"RoundObserver: {text}")
