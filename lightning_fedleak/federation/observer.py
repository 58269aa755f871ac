"""Attacks on the updates of a federation's rounds, by whoever sees them: a client, or the server.

The same channels, attacks, names and files as :class:`~lightning_fedleak.LeakageMonitor`'s, without
a Trainer. The x axis is the round.
"""

from __future__ import annotations

import copy
import importlib.util
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_fedleak import engine as core
from lightning_fedleak.attacks import Attack
from lightning_fedleak.defenses import Defense
from lightning_fedleak.federation import updates
from lightning_fedleak.federation.client_engine import ClientEngine
from lightning_fedleak.federation.hand_over import Recorded
from lightning_fedleak.federation.round_look import RoundLook, failed_look, read_look
from lightning_fedleak.federation.updates import State, UpdateError
from lightning_fedleak.model.anatomy import find_anatomy
from lightning_fedleak.model.compression import AVERAGED
from lightning_fedleak.model.snapshots import GradientSnapshot, Stage
from lightning_fedleak.private_files import hash_tensors
from lightning_fedleak.validate import check_choice, check_integer, explain_arguments

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

SUM = "sum"
"""The client whose update is that of all clients together."""

Side = Literal["client", "server"]


@dataclass(frozen=True)
class RoundSettings(core.WatchSettings):
    """The rare settings of a :class:`RoundObserver`, beside those that a monitor has too.

    Stages, clients and rounds are its own, and it writes neither texts nor a report.

    Attributes:
        fresh: whether clients begin each round with a fresh optimizer.
        federation: a name that all observers of one federation have: one run in a report. A second
            federation needs another name.
    """

    fresh: bool = True
    federation: str | None = None

    def refuse(self, watcher: str, *names: str) -> None:
        """Refuse settings that a watcher does not have, and every watcher but RoundObserver.

        Raises:
            ValueError: the watcher watches no rounds; or names the first setting that is set.
        """
        if watcher != "RoundObserver":
            raise ValueError(f"{watcher} watches no rounds: pass settings=WatchSettings(...)")
        super().refuse(watcher, *names)


@dataclass(frozen=True, kw_only=True)
class _RoundRun(core.Run):
    """Describe a federation to the engine: one process, in which a client is a number, its rank.

    Attributes:
        optimizers: the one that the server prescribed.
        local_steps: optimizer steps of a round.
        rounds: holds the number of the round at work.
    """

    watcher: ClassVar[str] = "RoundObserver"
    unit: ClassVar[Literal["step", "round"]] = "round"

    client: str = "rank"
    optimizers: Sequence[Optimizer] = ()
    local_steps: int = 1
    rounds: list[int] = field(default_factory=lambda: [0])

    @property
    def step(self) -> int:
        """Return the number of the round at work."""
        return self.rounds[0]

    @property
    def optimizer_step(self) -> int:
        """Return the number of local steps before this round."""
        return self.rounds[0] * self.local_steps

    def forward_context(self) -> AbstractContextManager[Any]:
        """Return autocast, where clients train in it."""
        dtype = core.AUTOCAST.get(self.precision)
        return nullcontext() if dtype is None else torch.autocast(self.device.type, dtype)


class RoundObserver:
    """Attacks what clients return in the rounds of a federation, and logs how much it leaks::

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
            what they spend. A :class:`~lightning_fedleak.GradientCompression` is applied by
            :class:`OutgoingUpdates`, in Flower's mod and NVFlare's filter too.
        games: how membership games are played.
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

    @explain_arguments(settings=RoundSettings)
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
        games: core.Games | None = None,
        max_overhead: float | None = None,
        settings: RoundSettings | None = None,
    ) -> None:
        settings = settings or RoundSettings()
        if not isinstance(settings, RoundSettings):
            raise TypeError("RoundObserver(settings=) takes RoundSettings, which has all of theirs")
        self.local_steps = check_integer("local_steps", local_steps)
        check_choice("side", side, get_args(Side))
        unused = ("stages", "reveal", "report", "utility", "client", "scaler")
        settings.refuse(type(self).__name__, *unused, "memorization")
        self.engine = core.Engine(*core.parts_of(attacks, settings, games, local_steps=local_steps))
        if any(c.attacks for c in self.engine.channels if c.at_weights):
            raise ValueError(
                "attacks on trained weights read no update of a round: run `fedleak memorization`"
            )
        self.model = model
        self.side: Side = side
        self.folder = Path(folder)
        self.federation = settings.federation
        self.settings = settings
        self._cadence = None if max_overhead is None else core.cadence_of(None, max_overhead)
        self.next_look: dict[str | int, int] = {}
        trained = [p for p in model.parameters() if p.requires_grad]
        anatomy = find_anatomy(model, **dict(settings.anatomy or {}))
        self.run = _RoundRun(
            anatomy=anatomy,
            assumed=self.engine.assume,
            device=anatomy.device,
            precision=settings.precision or "32-true",
            tokenizers=[settings.tokenizer],
            defenses=tuple(defenses),
            optimizers=[optimizer(trained)],
            local_steps=local_steps,
        )
        self.engine.open(self.run)
        self._names = updates.parameter_names(model)
        self._sent: State | None = None
        self._keys_sent: dict[str, str] = {}
        self._is_stale = False
        self._failures: dict[str, str] = {}
        self._clients: dict[tuple[str | int, Stage], ClientEngine] = {}
        self._returned: dict[tuple[str | int, Stage], tuple[int, str]] = {}
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
        check_integer("round_", round_, at_least=max(self.round_, 0), hint="rounds go upwards")
        if round_ == self.round_ and self._sent is not None:
            if not updates.equal_states(sent, self._sent):
                raise ValueError(
                    f"another model is sent in round {round_} than before: give each client an "
                    "observer of its own"
                )
            return
        self._keys_sent = updates.load_sent(self.model, self._names, sent)
        self.run.rounds[0] = round_
        if self._sent is None:
            self.engine.begin(self.run, self._destination(round_))
        self._is_stale, self._sent, self.round_ = True, sent, round_

    def _destination(self, round_: int) -> core.Destination:
        return core.Destination(
            self.folder,
            training={
                "optimizers": core.optimizers_of(self.run.optimizers),
                "strategy": "federation",
                "precision": self.run.precision,
                "local_steps": self.local_steps,
                "begins_at_round": round_,
            },
            fit=self.federation,
            client="all",
            watch={"looks": "every round", "side": self.side},
        )

    def trained_names(self) -> list[str]:
        """Return the names of what is trained, among those that were sent."""
        assert self._sent is not None, "begin(round_, sent) says which names are sent"
        parameters = dict(self.model.named_parameters())
        model_names = ((n, self._names[n]) for n in self._sent if n in self._names)
        return [n for n, name in model_names if parameters[name].requires_grad]

    def shares_twice(self, names: Collection[str]) -> bool:
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
        compression: str | None = None,
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
            compression: method of what is in ``returned``; None: as the ``defenses`` say.
            utility: further values of this round, logged as ``utility/<name>``.
            logged: write it down at once, as of an update that leaves; else by :meth:`log`, or not
                at all (:meth:`forget`).

        Returns:
            What was found. An update that cannot be read is *unknown*.

        Raises:
            RuntimeError: no round has begun.
        """
        if (sent := self._sent) is None:
            raise RuntimeError("begin(round_, sent) comes before a client's update is looked at")
        stage = Stage.AGGREGATE if client == SUM else Stage.SHARED
        engine = self._engine_of(client, stage)
        look, utility = core.Look(self.round_), utility or {}
        before: Mapping[str, Any] = {}
        if learning_rate is None and isinstance(batches, Recorded):
            learning_rate = batches.learning_rate

        def take() -> GradientSnapshot:
            self._check_new(client, stage, returned)
            if batches and stage is Stage.SHARED:
                steps = len(batches.rates if isinstance(batches, Recorded) else batches)
                if steps != self.local_steps:
                    raise UpdateError(
                        f"the client took {steps} steps in this round, and not "
                        f"local_steps={self.local_steps} (trained_on(batch, step=False) "
                        "accumulates)"
                    )
            snapshot = updates.observe(
                sent,
                returned,
                self.run.optimizers[0],
                self.local_steps,
                trained=self.trained_names(),
                learning_rate=learning_rate,
                round_=self.round_,
                stage=stage,
                fresh=self.settings.fresh,
                noise_std=noise_std,
            )
            return replace(
                snapshot,
                tensors={role: snapshot.tensors[key] for role, key in self._keys().items()},
                tied=self.run.anatomy.tied,
                compression=self._declared_compression(client)
                if compression is None
                else compression,
                client=zlib.crc32(str(client).encode()),
            )

        try:
            before = _state_of(engine)
            self._refresh(look, engine)
            outcomes = engine.read_update(look, batches, take)
            round_look = read_look(
                look, engine, outcomes, client, before, utility, scored=batches is not None
            )
        except Exception as error:  # of ours, which is to end no round
            round_look = failed_look(look, engine, client, before, core.reason(error), utility)
        if logged:
            try:
                self.log(round_look)
            except Exception as error:  # the update leaves all the same
                core.announce(f"RoundObserver: not all of a look was written: {core.reason(error)}")
        return round_look

    def _declared_compression(self, client: str | int) -> str:
        """Return how what is seen of a client was compressed, as the defences say."""
        defenses = [d for d in self.run.defenses if d.compression is not None]
        if client == SUM or any(d.defers for d in defenses):
            return AVERAGED if defenses else ""
        return next((d.compression.method for d in defenses if d.compression is not None), "")

    def _check_new(self, client: str | int, stage: Stage, returned: State) -> None:
        """Refuse what a client has returned in an earlier round already."""
        digest = hash_tensors(returned)
        round_, earlier = self._returned.get((client, stage), (self.round_, ""))
        if round_ < self.round_ and earlier == digest:
            raise UpdateError(f"the client returned what it returned in round {round_} already")
        self._returned[client, stage] = (self.round_, digest)

    def _refresh(self, look: core.Look, engine: core.Engine) -> None:
        """Let the attacks follow the model that was sent, at the first look of a round."""
        assert engine.fit is not None
        if self._is_stale:
            with look.clock(self.run.device):
                lineup = engine.fit.lineup
                self._failures = lineup.refresh(self.run.optimizer_step, lineup.playing)
            self._is_stale = False
        for series in engine.series:
            if series.attack in self._failures:
                look.answers[series] = core.Unknown(self._failures[series.attack])

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
        engine, values = look.engine, {**look.values, **(beside or {})}
        spending = [*self.run.defenses, *(d for d in defenses if d not in self.run.defenses)]
        engine.spent = look.client, spending
        assert engine.report is not None
        found = look.look, look.outcomes, values, look.utility, spending
        engine.report.write(*found, engine.results.failures, look.client)

    def due(self, client: str | int) -> bool:
        """Return whether ``max_overhead`` lets a client's update of this round be looked at."""
        return self.round_ >= self.next_look.get(client, self.round_)

    def paid(
        self, client: str | int, seconds: float, round_seconds: float, beside_seconds: float = 0.0
    ) -> None:
        """Fix a client's next look by what this one cost.

        That is the next round where an attack can read nothing yet (``results.Waiting.soon``).

        Args:
            client: whose update was looked at.
            seconds: that it took.
            round_seconds: what the round took to train.
            beside_seconds: what each round costs beside that, looked at or not.
        """
        engines = (e for (name, _), e in self._clients.items() if client in (name, SUM))
        waiting = any(engine.results.waiting for engine in engines)
        if self._cadence is not None and not waiting:
            # A hundredth at least, so that a next look comes where the rest takes all of the share.
            free = max(round_seconds - beside_seconds / self._cadence.share, round_seconds / 100)
            self.next_look[client] = self._cadence.after_look(self.round_, seconds, free)

    def forget(self, look: RoundLook) -> None:
        """Take back a look that was not written down, the newest of its client.

        One at an update that did not leave, say, which is to count in no rate.
        """
        if look.before:  # empty where a look failed that was not added
            look.engine.results.load_state_dict(look.before["results"])
            states = look.before["channels"]
            for channel, state in zip(_in_rounds(look.engine), states, strict=True):
                channel.load_state_dict(state)
            assert look.engine.fit is not None
            look.engine.fit.controls.restore(look.before["controls"])

    def _keys(self) -> dict[str, str]:
        """Return the name that was sent for every role that an attack reads."""
        assert self.engine.fit is not None
        anatomy, lineup = self.run.anatomy, self.engine.fit.lineup
        first = {id(p): n for n, p in self.model.named_parameters()}
        roles = dict.fromkeys(r for plan in lineup.exposed for r in plan.roles)
        return {role: self._keys_sent[first[id(anatomy.parameter(role))]] for role in roles}

    def _engine_of(self, client: str | int, stage: Stage) -> ClientEngine:
        """Return the engine of a client, and create it at the first look."""
        if (client, stage) not in self._clients:
            destination = core.Destination(self.folder, (), self._boards(client), client=client)
            # Games are drawn by it: the same whoever was looked at before, and in which process.
            run = replace(self.run, rank=zlib.crc32(str(client).encode()))
            self._clients[client, stage] = ClientEngine(self.engine, run, stage, destination)
        return self._clients[client, stage]

    def _boards(self, client: str | int) -> list[SummaryWriter]:
        """Return the writer of a client's TensorBoard run: each client has a line of its own."""
        if not self.settings.tensorboard or importlib.util.find_spec("tensorboard") is None:
            return []
        name = f"client_{client}" if client != SUM else SUM
        try:
            return [core.BoardLogger(self.folder / "tensorboard" / name).writer]
        except Exception as error:  # a disk that is full must not end a round
            core.announce(f"RoundObserver: no TensorBoard of client {client}: {core.reason(error)}")
            return []

    # ---- what is written --------------------------------------------------------------------

    def end(self, how: str = "finished") -> None:
        """End the federation; ``how`` is ``"finished"``, or the class of what was raised."""
        self.run.rounds[0] = self.round_ + 1
        for engine in self._clients.values():
            engine.rounds_end()
        self.engine.end(how)
        for engine in self._clients.values():
            for remove in (one for channel in engine.channels for one in channel.removers):
                remove()
            assert engine.report is not None
            try:
                engine.report.cards.close()
                for board in engine.report.boards:
                    board.close()
            except Exception as error:
                engine.report.leave_boards(error)

    # ---- names ------------------------------------------------------------------------------

    def headlines(self) -> list[str]:
        """Return the log names of each family's worst, and of the values it is taken from."""
        results = self.engine.results
        worst = [f"{core.WORST}/{family}" for family in results.families]
        return worst + [n for family in results.families for n in results.headlines(family)]

    def never_judged(self, name: str) -> str | None:
        """Return why no update can ever be judged by a value's log name; None where one can."""
        return core.why_never_judged(self.engine, name, fresh=self.settings.fresh)


def _in_rounds(engine: core.Engine) -> list[core.Channel]:
    """Return the channels that read updates of rounds."""
    return [channel for channel in engine.channels if not channel.at_weights]


def _state_of(engine: core.Engine) -> dict[str, Any]:
    """Return what one look adds to: results, and the games that rates are pooled over."""
    states = [copy.deepcopy(channel.state_dict()) for channel in _in_rounds(engine)]
    assert engine.fit is not None
    controls = engine.fit.controls.state()
    return {"results": engine.results.state_dict(), "channels": states, "controls": controls}
