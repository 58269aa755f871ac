"""Attacks on the updates of a federation's rounds, by whoever sees them: a client, or the server.

The same channels, attacks, names and files as :class:`~lightning_fedleak.LeakageMonitor`'s, without
a Trainer. The x axis is the round.
"""

from __future__ import annotations

import importlib.util
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_fedleak.attacks import Attack, TextSource
from lightning_fedleak.defenses import Defense
from lightning_fedleak.engine import (
    WORST,
    BoardLogger,
    Destination,
    Engine,
    Games,
    GateDecision,
    Look,
    Memory,
    Options,
    Unknown,
    announce,
    family_of,
    optimizers_of,
    overhead_of,
    reason,
    selected,
    why_never_judged,
)
from lightning_fedleak.federation import updates
from lightning_fedleak.federation.compression import seen_compression
from lightning_fedleak.federation.hand_over import Recorded
from lightning_fedleak.federation.memory import recall, remember
from lightning_fedleak.federation.round_look import LookEntry, RoundLook
from lightning_fedleak.federation.round_run import RoundRun, RoundSettings
from lightning_fedleak.federation.round_start import CraftedValuesError, prepare_start
from lightning_fedleak.federation.updates import State, UpdateError
from lightning_fedleak.model.anatomy import find_anatomy
from lightning_fedleak.model.snapshots import GradientSnapshot, Stage, UpdateSnapshot
from lightning_fedleak.validate import (
    check_choice,
    check_integer,
)

SUM = "sum"
"""The client whose update is that of all clients together."""

Side = Literal["client", "server"]


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

    **What the model that is sent has memorized** is asked with ``RoundSettings(data=...)``, on the
    client's side: of the texts of this client that left in earlier updates, against those that
    :func:`~lightning_fedleak.evaluation.canaries.leave_out` left out of its data, beside what the
    first model that it was sent said of both. :meth:`look` does so once in a round; :meth:`ask`
    does so of a model that is not trained any more, the last one.

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
        public_text: that attacks which choose themselves are calibrated on.
        tokenizer: reads the texts of ``public_text``.
        max_overhead: the largest share of the time of rounds that looks may take (:meth:`due`).
            None looks at every round, as a gate always does. Calibration is not counted.
        settings: what is rarely changed: :class:`RoundSettings`.

    Attributes:
        engine: calibrates the attacks, and knows the names of what is logged.
        run: the federation, as attacks know it.
        start: the check of what is sent; None without one.
        round_: number of the round at work; -1 before the first.
        next_look: by client, the first round that ``max_overhead`` lets it be looked at again.
        took_part: by client, whether an update of it may have left already, so that what it is sent
            is no base; by default where the first round here is later than round 1.

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
    ) -> None:
        settings = settings or RoundSettings()
        self.local_steps = check_integer("local_steps", local_steps)
        check_choice("side", side, get_args(Side))
        data = settings.data
        if data is not None and side == "server":
            raise ValueError(
                "RoundSettings(data=...) holds the texts of a client, which a server does not have"
            )
        selection = selected(
            attacks,
            settings.assume,
            public_text,
            tokenizer,
            rounds=True,
            weights=data is not None,
        )
        options = Options(
            batch_adapter=settings.batch_adapter,
            local_steps=local_steps,
            games=games or Games(),
            texts=settings.texts,
            look_seconds=settings.look_seconds,
            cache=settings.cache,
            memorization=settings.memorization,
        )
        self.engine = Engine(selection, options)
        at_weights = [a.name for c in self.engine.channels if c.at_weights for a in c.attacks]
        if data is None and at_weights:
            raise ValueError(
                f"attack '{at_weights[0]}' asks the model about texts of a client: "
                "give settings=RoundSettings(data=...), a function that returns a client's loader, "
                "on the client's side; or run `fedleak memorization` on the final model"
            )
        self.model = model
        self.side: Side = side
        self.folder = Path(folder)
        self.federation = settings.federation
        self.settings = settings
        self._cadence = None if max_overhead is None else overhead_of(max_overhead)
        self.next_look: dict[str | int, int] = {}
        trained = [p for p in model.parameters() if p.requires_grad]
        if not trained:
            raise ValueError(
                "no parameter of the model is trained (requires_grad): give the observer a model "
                "that is set up as the clients' are"
            )
        anatomy = find_anatomy(model, **dict(settings.anatomy or {}))
        self.run = RoundRun(
            anatomy=anatomy,
            assumed=self.engine.assume,
            device=anatomy.device,
            precision=settings.precision,
            tokenizers=[tokenizer],
            defenses=tuple(defenses),
            optimizers=[optimizer(trained)],
            local_steps=local_steps,
        )
        self.start = prepare_start(self.run, settings.inspect, public_text)
        self.engine.open(self.run)
        self.engine.subscribe(before_first=self._check_read)
        self.expect_gates(settings.gates)
        self._names = updates.parameter_names(model)
        self._sent: State | None = None
        self._keys_sent: dict[str, str] = {}
        self._is_stale = False
        self._failures: dict[str, str] = {}
        self._clients: dict[tuple[str | int, Stage], Engine] = {}
        self._returned: dict[tuple[str | int, Stage], tuple[int, dict[str, int]]] = {}
        self.took_part: dict[str | int, bool] = {}
        self._memories: dict[str | int, Memory] = {}
        self._first_round = 0
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
            CraftedValuesError: ``inspect=StartCheck("refuse")`` found something. The round has
                begun all the same, and nobody should train in it.
        """
        whole = isinstance(round_, int) and not isinstance(round_, bool)
        if not whole or round_ < max(self.round_, 0):
            raise ValueError(
                f"rounds are numbered upwards: round {round_!r} cannot follow round {self.round_}"
            )
        if round_ == self.round_ and self._sent is not None:
            if not updates.equal_states(sent, self._sent):
                raise ValueError(
                    f"another model is sent in round {round_} than before: where clients get "
                    "models of their own, give each an observer of its own"
                )
            if self.start is not None and self.start.refused is not None:
                raise self.start.refused  # of another client too
            return
        self._keys_sent = updates.load_sent(self.model, self._names, sent)
        self.run.rounds[0] = round_
        if self._sent is None:
            self._first_round = round_
            self.engine.begin(self.run, self._destination(round_))
        self._is_stale, self._sent, self.round_ = True, sent, round_
        if self.start is not None:
            self.start.judge(round_, self._by_parameter(sent))

    def refusal(self, round_: int, sent: State) -> str | None:
        """Begin a round, and return why what is sent is refused; None where it is not."""
        try:
            self.begin(round_, sent)
        except CraftedValuesError as error:
            return str(error)
        return None

    def _by_parameter(self, state: State) -> dict[str, Tensor]:
        """Return what is trained of a state that was sent or returned, by parameter name."""
        return {self._names[n]: state[n] for n in self.trained_names() if n in state}

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
        if not (
            selection.auto
            or lineup.exposed
            or any(c.at_weights for c in self.engine.channels if c.attacks)
        ):
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
        return updates.observe(
            self._sent,
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
                at all (:meth:`forget`), and :meth:`leaves` says that it leaves.

        Returns:
            What was found. An update that cannot be read is *unknown*.

        Raises:
            RuntimeError: no round has begun.
        """
        if self._sent is None:
            raise RuntimeError("begin(round_, sent) comes before a client's update is looked at")
        stage = Stage.AGGREGATE if client == SUM else Stage.SHARED
        asked = None if client == SUM else self.ask(client)
        engine = self._engine_of(client, stage)
        look = Look(self.round_)
        before: Mapping[str, object] = {}
        if learning_rate is None and isinstance(batches, Recorded):
            learning_rate = batches.learning_rate
        declared = compression

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
                compression=seen_compression(self.run.defenses, summed=client == SUM)
                if declared is None
                else declared,
                client=zlib.crc32(str(client).encode()),
            )

        utility, scored = utility or {}, batches is not None
        seconds = 0.0 if asked is None else asked.seconds
        try:
            before = engine.results.state_dict()
            self._refresh(look, engine)
            outcomes = engine.read_update(look, batches, take)
            entry = LookEntry(look, engine, outcomes, utility, before)
            round_look = entry.as_round_look(client, scored=scored, beside=seconds)
        except Exception as error:  # of ours, which is to end no round
            outcomes = engine.results.all_unknown(reason(error))
            entry = LookEntry(look, engine, outcomes, utility, before)
            round_look = entry.as_failed_look(client, reason(error))
        if logged:
            self._write(round_look, () if batches is None else batches, returned)
        return round_look

    def _write(self, look: RoundLook, batches: Sequence[Any], returned: State) -> None:
        """Write a look down, and note that the update leaves; where that fails, warn."""
        functions: list[Callable[[], None]] = [partial(self.log, look)]
        if look.client != SUM:
            functions.append(partial(self.leaves, look.client, batches, returned))
        for function in functions:
            try:
                function()
            except Exception as error:
                announce(f"RoundObserver: not all of a look was written: {reason(error)}")

    # ---- the model that was sent ------------------------------------------------------------

    def ask(self, client: str | int = 0) -> RoundLook | None:
        """Ask the model that was sent about a client's own texts, and log what it gives away.

        Once in a round: again in the same round, or without ``data``, nothing is asked.

        Args:
            client: whose texts.

        Returns:
            What was found; None where nothing was asked.

        Raises:
            RuntimeError: no round has begun.
            ValueError: nobody can be compared, and the attack was listed.
        """
        if self._sent is None:
            raise RuntimeError("begin(round_, sent) says which model is asked")
        if self.settings.data is None:
            return None
        engine = self._recalled(client)
        if engine.weights is None:
            return None
        try:
            asked = engine.weights.look_at_end()
        except Exception as error:  # of ours, which is to end no round
            every = engine.results.all_unknown(reason(error))
            own = {s: o for s, o in every.items() if s in engine.weights.series}
            asked = Look(self.round_), own
        if asked is None:
            return None
        look, outcomes = asked
        entry = LookEntry(look, engine, outcomes, {}, engine.results.state_dict())
        round_look = entry.as_round_look(client, scored=True)
        self.log(round_look)
        self._remember(client, engine.weights.state_dict())
        return round_look

    def leaves(
        self, client: str | int, batches: Sequence[Any], returned: State | None = None
    ) -> None:
        """Note that an update which was trained on these batches leaves the client in this round.

        From the next round on its texts are among those that the models may have memorized.

        Args:
            client: whose update it is.
            batches: that it was trained on.
            returned: what leaves; the next round's start is compared with it.
        """
        if self.start is not None and returned is not None:
            self.start.note(client, self._by_parameter(returned))
        if self.settings.data is None:
            return
        try:
            engine = self._recalled(client)
        except Exception:  # what left is not known, so that no later model is a base
            self._remember(client, {})
            raise
        finally:
            self.took_part[client] = True
        if engine.weights is not None:
            for batch in batches:
                engine.weights.batch_begins(batch)
            self._remember(client, engine.weights.state_dict())

    def _recalled(self, client: str | int) -> Engine:
        """Return the engine of a client, with what other processes have noted of it."""
        engine = self._engine_of(client, Stage.SHARED)
        _, state = self._recall(client) or (0, {})
        if engine.weights is not None and state and state != self._memories[client]:
            engine.weights.follow(state)
        return engine

    def _remember(self, client: str | int, state: Memory) -> None:
        if self.federation is not None:
            folder = self.folder / f"client_{client}"
            self._memories[client] = remember(folder, self.federation, self.round_, state)

    def _recall(self, client: str | int) -> tuple[int, Memory] | None:
        if self.federation is None:
            return None
        return recall(self.folder / f"client_{client}", self.federation)

    def _meet_client(self, client: str | int) -> tuple[RoundRun, Memory]:
        """Return the federation as this client, and what it remembers of earlier rounds.

        What a client is first sent is its base, unless an update of it has left before.
        """
        run = replace(self.run, rank=zlib.crc32(str(client).encode()))
        if self.settings.data is None or client == SUM:
            return run, {}
        memory = self._recall(client)
        took_part = self.took_part.get(client, self._first_round > 1)
        is_base = memory is None and not took_part
        round_, state = memory or (0, {})
        self._memories[client] = state = state if round_ <= self.round_ else {}
        return replace(run, training_loader=self.settings.data(client), holds_base=is_base), state

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
        entry = look.entry
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
        if look.entry.before:  # empty where a look failed that was not added
            look.entry.engine.results.load_state_dict(look.entry.before)

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
        sums = {name: _checksum(tensor) for name, tensor in returned.items()}
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
        if stage is Stage.AGGREGATE:  # which has no texts of its own
            attacks = [a for a in attacks if not family_of(a).at_weights]
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
        run, memory = self._meet_client(client)
        engine.join(run, destination, memory)
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
        for engine in self._clients.values():
            engine.rounds_end()
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
        return self.engine.results.headlines_of(name)

    def headlines(self) -> list[str]:
        """Return the log names of each family's worst, and of the values it is taken from."""
        results = self.engine.results
        worst = [f"{WORST}/{family}" for family in results.families]
        return worst + [n for family in results.families for n in results.headlines(family)]

    def never_judged(self, name: str) -> str | None:
        """Return why no update can ever be judged by a value's log name; None where one can."""
        return why_never_judged(self.engine, name, fresh=self.settings.fresh)


def _checksum(tensor: Tensor) -> int:
    """Return a checksum of a tensor's bytes, which makes no copy of a tensor on a CPU."""
    values = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return zlib.crc32(values.numpy().data)


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
