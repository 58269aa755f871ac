"""Attacks on the updates of a federation's rounds, by whoever sees them: a client, or the server.

The same channels, attacks, names and files as :class:`~lightning_fedleak.LeakageMonitor`'s, without
a Trainer. The x axis is the round.
"""

from __future__ import annotations

import importlib.util
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_fedleak.anatomy import find_anatomy
from lightning_fedleak.attacks import Attack, TextSource
from lightning_fedleak.defenses import Defense
from lightning_fedleak.federation.updates import (
    Recorded,
    State,
    UpdateError,
    equal_states,
    joint_norm,
    load_sent,
    observe,
    parameter_names,
)
from lightning_fedleak.looks import (
    AUTOCAST,
    WORST,
    BoardLogger,
    Channel,
    Destination,
    Engine,
    Games,
    GateDecision,
    Look,
    LookSettings,
    MaxOverhead,
    Options,
    Outcome,
    Run,
    Series,
    Unknown,
    family_of,
    optimizers_of,
    selected,
    why_never_judged,
)
from lightning_fedleak.snapshots import GradientSnapshot, Stage, UpdateSnapshot
from lightning_fedleak.validate import check_choice, check_integer, group_old_arguments

SUM = "sum"
"""The client whose update is that of all clients together."""

Side = Literal["client", "server"]
_Spans = dict[str, tuple[float, float]]


@dataclass(frozen=True)
class RoundSettings(LookSettings):
    """The rare settings of a :class:`RoundObserver`, beside those that a monitor has too.

    Attributes:
        fresh: whether clients begin each round with a fresh optimizer.
        precision: that clients train in, in the Trainer's words.
        gates: what the record says of gates.
        tensorboard: log to TensorBoard, where it is installed.
        federation: a name that all observers of one federation have: one run in a report.
    """

    fresh: bool = True
    precision: str = "32-true"
    gates: Sequence[Mapping[str, Any]] = ()
    tensorboard: bool = True
    federation: str | None = None


@dataclass(frozen=True)
class _RoundRun(Run):
    """Describes a federation to the engine: one process, in which a client is a number."""

    watcher: ClassVar[str] = "RoundObserver"
    unit: ClassVar[Literal["step", "round"]] = "round"

    optimizer: Optimizer
    local_steps: int
    settings: RoundSettings
    tokenizer: Any
    round_defenses: tuple[Defense, ...]
    client_number: int = 0
    rounds: list[int] = field(default_factory=lambda: [0])
    processes = 1

    @property
    def rank(self) -> int:
        return self.client_number

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
        return self.settings.precision

    @property
    def tokenizers(self) -> Sequence[Any]:
        return [self.tokenizer]

    @property
    def step(self) -> int:
        return self.rounds[0]

    @property
    def optimizer_step(self) -> int:
        return self.rounds[0] * self.local_steps

    def forward_context(self) -> AbstractContextManager[Any]:
        dtype = AUTOCAST.get(self.precision)
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
        not_yet: why nothing can be read so far, by that name, and by the family's worst.
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
    engine: Engine
    outcomes: Mapping[Series, Outcome]
    utility: Mapping[str, float]
    before: Mapping[str, object]


class RoundObserver:
    """Attacks what clients return in the rounds of a federation, and logs how much it gives away::

        observer = RoundObserver(model, partial(torch.optim.AdamW, lr=1e-4), local_steps=10)
        for round_ in range(rounds):
            observer.begin(round_, sent)
            for client, returned in enumerate(train_clients(sent)):
                observer.look(returned, client, batches=client_batches)
        observer.end()

    **Who knows the truth.** Only the client holds its texts: on its side ``batches=`` are those of
    its local steps, and every result is scored. A server that looks has none (``batches=None``):
    results are *unknown*, but for the certificates that an adversary can check by itself.

    Attacks are calibrated once, on the first model that is sent, and follow those of later rounds.
    Results, numbers only, go to ``leakage.jsonl`` in ``folder``, a line for each round, client and
    attack, to ``run.jsonl``, and to TensorBoard. What fails is *unknown* and counted in
    ``monitor/failures``. Rates of membership games are pooled over the rounds of a client.

    Args:
        model: of the architecture that clients train, with ``requires_grad`` as they have it. The
            observer's own: it takes the weights of what is sent.
        optimizer: makes the optimizer that the server prescribed; it is never stepped.
        local_steps: optimizer steps of a round.
        attacks: as :class:`~lightning_fedleak.LeakageMonitor`'s, of those that read updates.
        folder: where the files go.
        side: where the looks are made, for the record: ``"client"`` or ``"server"``.
        defenses: that act on what is returned, so that attacks know of them and the record has
            what they spend.
        games: how membership games are played.
        public_text: that attacks which choose themselves are calibrated on.
        tokenizer: reads the texts of ``public_text``.
        max_overhead: the largest share of the time of rounds that looks may take (:meth:`due`).
            None looks at every round, as a gate always does. Calibration is not counted.
        settings: what is rarely changed: :class:`RoundSettings`.

    Attributes:
        engine: calibrates the attacks, and knows the names of what is logged.
        run: the federation, as attacks know it.
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
        defenses: Sequence[Defense] = (),
        games: Games | None = None,
        public_text: TextSource | None = None,
        tokenizer: Any | None = None,
        max_overhead: float | None = None,
        settings: RoundSettings | None = None,
        **old: Any,
    ) -> None:
        settings = group_old_arguments(
            "RoundObserver", "settings", settings or RoundSettings(), old
        )
        check_integer("local_steps", local_steps)
        check_choice("side", side, get_args(Side))
        selection = selected(attacks, settings.assume, public_text, tokenizer, rounds=True)
        options = Options(
            batch_adapter=settings.batch_adapter,
            local_steps=local_steps,
            games=games or Games(),
            texts=settings.texts,
            look_seconds=settings.look_seconds,
            cache=settings.cache,
        )
        self.engine = Engine(selection, options)
        if listed := [a.name for c in self.engine.channels if c.at_weights for a in c.attacks]:
            raise ValueError(
                f"attack '{listed[0]}' reads trained weights and no update: play it in a "
                "LeakageMonitor, or by `fedleak memorization` on the final model"
            )
        self.model = model
        self.local_steps = local_steps
        self.side: Side = side
        self.folder = Path(folder)
        self.federation = settings.federation
        self.settings = settings
        self._cadence = None if max_overhead is None else MaxOverhead(max_overhead)
        self.next_look: dict[str | int, int] = {}
        trained = [p for p in model.parameters() if p.requires_grad]
        if not trained:
            raise ValueError(
                "no parameter of the model is trained (requires_grad): give the observer a model "
                "that is set up as the clients' are"
            )
        self.run = _RoundRun(
            find_anatomy(model, **dict(settings.anatomy or {})),
            "rank",
            self.engine.assume,
            optimizer(trained),
            local_steps,
            settings,
            tokenizer,
            tuple(defenses),
        )
        self.engine.open(self.run)
        self.engine.subscribe(before_first=self._check_read)
        self.expect_gates(settings.gates)
        self._names = parameter_names(model)
        self._sent: State | None = None
        self._keys_sent: dict[str, str] = {}
        self._is_stale = False
        self._failures: dict[str, str] = {}
        self._clients: dict[tuple[str | int, Stage], Engine] = {}
        self._returned: dict[tuple[str | int, Stage], tuple[int, _Spans]] = {}
        self.round_ = -1

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
            if not equal_states(sent, self._sent):
                raise ValueError(
                    f"another model is sent in round {round_} than before: where clients get "
                    "models of their own, give each an observer of its own"
                )
            return
        self._keys_sent = load_sent(self.model, self._names, sent)
        self.run.rounds[0] = round_
        if self._sent is None:
            self.engine.begin(self.run, self._destination(round_))
        self._is_stale = True
        self._sent = sent
        self.round_ = round_

    def _destination(self, round_: int) -> Destination:
        return Destination(
            self.folder,
            training={
                "optimizers": optimizers_of(self.run.optimizers),
                "strategy": "federation",
                "precision": self.run.precision,
                "local_steps": self.local_steps,
                "begins_at_round": round_,
            },
            fit=self.federation,
            client="all",
            watch={"looks": "every round", "side": self.side},
        )

    def _check_read(self) -> None:
        """Refuse listed attacks that read nothing of what is trained."""
        assert self.engine.fit is not None
        lineup, selection = self.engine.fit.lineup, self.engine.selection
        if not selection.auto and not lineup.exposed:
            raise ValueError(
                "no attack reads anything that is shared in this federation: "
                f"{len(lineup.trained)} parameters are trained, and none of "
                f"{', '.join(a.name for a in selection.attacks)} reads them. attacks='auto' takes "
                "all that can"
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
            self.run.optimizer,
            self.local_steps,
            trained=self.trained_names(),
            learning_rate=learning_rate,
            round_=self.round_,
            stage=stage,
            fresh=self.settings.fresh,
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
        engine = self._engine_of(client, stage)
        look, before = Look(self.round_), engine.results.state_dict()
        if learning_rate is None and isinstance(batches, Recorded):
            learning_rate = batches.learning_rate
        self._refresh(look, engine)

        def take() -> GradientSnapshot:
            if batches and stage is Stage.SHARED:
                _check_steps(batches, self.local_steps)
            self._check_new(client, stage, returned)
            snapshot = self.update(
                returned, learning_rate=learning_rate, stage=stage, noise_std=noise_std
            )
            return replace(
                snapshot,
                tensors={role: snapshot.tensors[key] for role, key in self._keys().items()},
                tied=self.run.anatomy.tied,
                client=zlib.crc32(str(client).encode()),
            )

        outcomes = engine.read_update(look, batches, take)
        utility = utility or {}
        if batches is None:
            values = now = _facts(outcomes) | {f"utility/{n}": float(v) for n, v in utility.items()}
            values["monitor/seconds"] = look.seconds
        else:
            outcomes = engine.add(look, outcomes, utility)
            values, now = engine.new_values(), dict(engine.results.look_values)
        round_look = RoundLook(
            self.round_,
            client,
            values,
            now,
            {s.log_name: o.unknown for s, o in outcomes.items() if o.unknown is not None},
            _not_yet(outcomes, engine.series),
            {s.log_name: o.too_few for s, o in outcomes.items() if o.too_few is not None},
            look.seconds,
            _LookEntry(look, engine, outcomes, utility, before),
        )
        if logged:
            self.log(round_look)
        return round_look

    def _refresh(self, look: Look, engine: Engine) -> None:
        """Let the attacks follow the model that was sent, at the first look of a round."""
        assert engine.fit is not None
        if self._is_stale:
            with look.clock(self.run.device):
                self._failures = engine.fit.lineup.refresh(self.run.optimizer_step)
            self._is_stale = False
        for series in engine.series:
            if series.attack in self._failures:
                look.answers[series] = Unknown(self._failures[series.attack])

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
        spending = [*self.run.defenses, *(d for d in defenses if d not in self.run.defenses)]
        values = {**look.values, **(beside or {})}
        entry.engine.write(entry.look, entry.outcomes, values, entry.utility, spending, look.client)

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
        engines = (e for (name, _), e in self._clients.items() if client in (name, SUM))
        waiting = any(engine.results.waiting for engine in engines)
        if self._cadence is not None and not waiting:
            # A hundredth at least, so that a next look comes where the rest takes all of the share.
            free = max(round_seconds - beside_seconds / self._cadence.share, round_seconds / 100)
            self.next_look[client] = self._cadence.after_look(self.round_, look_seconds, free)

    def forget(self, look: RoundLook) -> None:
        """Take back a look that was not written down, the newest of its client.

        One at an update that did not leave, say, which is to count in no rate.
        """
        look._entry.engine.results.load_state_dict(look._entry.before)

    def _keys(self) -> dict[str, str]:
        """Return the name that was sent for every role that an attack reads."""
        assert self.engine.fit is not None
        anatomy, lineup = self.run.anatomy, self.engine.fit.lineup
        first = {id(p): n for n, p in self.model.named_parameters()}
        roles = dict.fromkeys(r for plan in lineup.exposed for r in plan.roles)
        return {role: self._keys_sent[first[id(anatomy.parameter(role))]] for role in roles}

    def _check_new(self, client: str | int, stage: Stage, returned: State) -> None:
        """Refuse what a client has returned in an earlier round already.

        Raises:
            UpdateError: says in which.
        """
        sums = {n: (float(t.double().sum()), joint_norm({n: t})) for n, t in returned.items()}
        round_, earlier = self._returned.get((client, stage), (self.round_, {}))
        if round_ < self.round_ and earlier == sums:
            raise UpdateError(
                f"the client returned what it returned in round {round_}, and not what it made "
                f"of the model of round {self.round_}: an update of an earlier round"
            )
        self._returned[client, stage] = (self.round_, sums)

    def _engine_of(self, client: str | int, stage: Stage) -> Engine:
        """Return the engine of a client, and create it at the first look."""
        if (client, stage) in self._clients:
            return self._clients[client, stage]
        # Results are in the order of the channels.
        order = [type(channel) for channel in self.engine.channels]
        attacks = sorted(self.engine.selection.attacks, key=lambda a: order.index(family_of(a)))
        engine = Engine(
            replace(self.engine.selection, attacks=tuple(attacks)),
            replace(self.engine.options, stages=(stage,)),
            self.engine,
        )
        boards: list[BoardLogger] = []
        failure: Exception | None = None  # a disk that is full must not end a round
        try:
            boards = self._boards(client)
        except Exception as error:
            failure = error
        destination = Destination(
            self.folder,
            boards,
            [board.writer for board in boards],
            {"local_steps": self.local_steps, "client": client, "side": self.side},
            client=client,
        )
        # Games are drawn by it: the same whoever was looked at before, and in which process.
        engine.join(replace(self.run, client_number=zlib.crc32(str(client).encode())), destination)
        if failure is not None and engine.report is not None:
            engine.report.leave_loggers(failure)
        self._clients[client, stage] = engine
        return engine

    def _boards(self, client: str | int) -> list[BoardLogger]:
        """Return the writer of a client's TensorBoard run: each client has a line of its own."""
        if not self.settings.tensorboard or importlib.util.find_spec("tensorboard") is None:
            return []
        name = f"client_{client}" if client != SUM else SUM
        return [BoardLogger(self.folder / "tensorboard" / name)]

    # ---- what is written --------------------------------------------------------------------

    def expect_gates(self, gates: Sequence[Mapping[str, Any]]) -> None:
        """Add gates to the record of the run, which is written when the first round begins."""
        for gate in gates:
            self.engine.subscribe(logs=[f"gate/{gate['name']}"], facts=dict(gate))

    def record_decision(self, decision: GateDecision) -> None:
        """Record in ``run.jsonl`` what a gate has done."""
        self.engine.record_decision(decision)

    def end(self, how: str = "finished") -> None:
        """End the federation; ``how`` is ``"finished"``, or the class of what was raised."""
        self.run.rounds[0] = self.round_ + 1
        self.engine.end(how)
        for engine in self._clients.values():
            for channel in engine.channels:
                channel.close()
            assert engine.report is not None
            try:
                for board in engine.report.boards:
                    board.close()
            except Exception as error:
                engine.report.leave_loggers(error)

    # ---- names ------------------------------------------------------------------------------

    def metric_names(self) -> list[str]:
        """Return the names of the values that are logged of each client's update."""
        return self.engine.metric_names()

    def headlines_of(self, name: str) -> tuple[str, ...]:
        """Return the log names of which ``leakage/worst/<family>`` is the highest."""
        return self.engine.headlines_of(name)

    def headlines(self) -> list[str]:
        """Return the log names of each family's worst, and of the values it is taken from."""
        results = self.engine.results
        worst = [f"{WORST}/{family}" for family in results.families]
        return worst + [n for family in results.families for n in results.headlines(family)]

    def never_judged(self, name: str) -> str | None:
        """Return why no update can ever be judged by a value's log name; None where one can."""
        return why_never_judged(self.engine, name, fresh=self.settings.fresh)


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


def _facts(outcomes: Mapping[Series, Outcome]) -> dict[str, float]:
    """Return what is logged where the truth is not known: no rate, not even an unknown one."""
    values = {}
    for series, outcome in outcomes.items():
        values[f"{series.log_name}/exposed"] = float(outcome.exposed)
        for name, value in outcome.extra.items():
            if not math.isnan(value):
                values[f"{series.log_name}/{name}"] = value
    return values
