"""Attacks the updates of a federation's rounds, on the client's or the server's side.

:class:`RoundObserver` runs the same attacks, and writes the same files with the same names, as
:class:`~lightning_fedleak.LeakageMonitor`. It needs no Trainer, and its x axis is the round.

A *look* is one run of the attacks on one update, scored against the client's texts if they are
known. An update is observed at a *stage*: ``SHARED`` is one client's, ``AGGREGATE`` the sum or mean
of all. An *engine* runs the attacks and logs their results: one engine calibrates the attacks, and
one for each client and stage has its results. A *channel* is the part of an engine for one kind of
attack. A *gate* is a threshold that may withhold an update.
"""

from __future__ import annotations

import importlib.util
import math
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from torch import nn
from torch.optim import Optimizer

from lightning_fedleak import engine as core
from lightning_fedleak.attacks import Attack
from lightning_fedleak.defenses import Defense
from lightning_fedleak.federation import updates
from lightning_fedleak.federation.hand_over import Recorded
from lightning_fedleak.federation.round_look import ClientEngine, RoundLook
from lightning_fedleak.federation.updates import State, UpdateError
from lightning_fedleak.model.anatomy import find_anatomy
from lightning_fedleak.model.snapshots import AVERAGED, GradientSnapshot, Stage
from lightning_fedleak.private_files import file_name, hash_tensors
from lightning_fedleak.validate import check_choice, check_integer, explain_arguments

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

SUM = "sum"
"""The name that stands for a client if the update is the sum, or mean, of all clients' updates."""

Side = Literal["client", "server"]


@dataclass(frozen=True)
class RoundSettings(core.WatchSettings):
    """The rarely changed settings of a :class:`RoundObserver`, including those of a monitor.

    An observer sets stages and clients itself, and writes neither recovered texts nor a report.

    Attributes:
        fresh: whether clients begin each round with a new optimizer, without state of earlier
            rounds.
        federation: the name of the federation. A report shows all observers with the same name as
            one run. A second federation needs another name.
    """

    fresh: bool = True
    federation: str | None = None


class _RoundRun(core.Run):
    """A federation as a run of the engine, in one process. The hash of a client's name is its rank.

    Its optimizer is the one that the server prescribed.
    """

    watcher = "RoundObserver"
    unit = "round"


class RoundObserver:
    """Attacks the states that clients return in a federation's rounds, and logs what they leak::

        observer = RoundObserver(model, partial(torch.optim.AdamW, lr=1e-4), local_steps=10)
        for round_ in range(rounds):
            observer.begin(round_, sent)
            for client, returned in enumerate(train_clients(sent)):
                observer.look(returned, client, batches=client_batches)
        observer.end()

    **Who can score the attacks.** A *look* is one run of the attacks on one update. Only the client
    holds its texts. On its side ``batches=`` are the batches of its local steps, and every guess is
    scored against them. On the server's side there are none (``batches=None``): results are
    *unknown*, except certificates, which an adversary can check without the texts.

    Attacks are calibrated once, on the first model that is sent, and are adapted to the model of
    each later round. Results are only numbers. They go to ``leakage.jsonl`` in ``folder``, with a
    line for each round, client and attack, to ``run.jsonl``, and to TensorBoard. The result of an
    attack that fails is *unknown*, and counted in ``monitor/failures``. Rates of membership games
    are pooled over the rounds of a client.

    Examples:
        >>> from functools import partial
        >>> import torch
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> from lightning_fedleak import BagOfWords, RoundObserver, trained_state
        >>> config = GPT2Config(vocab_size=64, n_embd=8, n_head=1, tie_word_embeddings=False)
        >>> model, local = GPT2LMHeadModel(config), GPT2LMHeadModel(config)
        >>> sent = trained_state(model)
        >>> observer = RoundObserver(
        ...     model, partial(torch.optim.SGD, lr=0.1), local_steps=1, attacks=[BagOfWords()]
        ... )
        >>> observer.begin(0, sent)
        >>> _ = local.load_state_dict(sent, strict=False)
        >>> ids = torch.arange(16).view(2, 8)
        >>> local(input_ids=ids, labels=ids).loss.backward()
        >>> torch.optim.SGD(local.parameters(), lr=0.1).step()
        >>> batch = {"input_ids": ids, "labels": ids}
        >>> look = observer.look(trained_state(local), batches=[batch])
        >>> observer.end()
        >>> look.values["leakage/bag_of_words/f1"]
        1.0

    Args:
        model: a model of the clients' architecture, with the same ``requires_grad``. Nothing else
            may use it: the weights that are sent are loaded into it.
        optimizer: a function of the trained parameters that makes the optimizer that the server
            prescribed. It is never stepped.
        local_steps: the number of optimizer steps in a round.
        attacks: attacks that read updates, see :class:`~lightning_fedleak.LeakageMonitor`.
        folder: the folder of the files.
        side: the side on which updates are observed, for the record: ``"client"`` or ``"server"``.
        defenses: the defences that act on the returned update. Attacks take them into account, and
            the record has their budgets. The observer does not apply them:
            :class:`OutgoingUpdates`, and so Flower's mod and NVFlare's filter, apply a
            :class:`~lightning_fedleak.GradientCompression`.
        games: the settings of membership games.
        max_overhead: the largest fraction of the time of rounds that looks may take (:meth:`due`).
            With None, and if there is a gate, each round has a look. Calibration is not counted.
        settings: the rarely changed settings: :class:`RoundSettings`.

    Attributes:
        engine: the engine that calibrates the attacks, and has the names of logged values.
        run: the federation, in the form in which attacks read facts about it.
        round_: the number of the current round; -1 before the first.
        next_look: the round of the next look that ``max_overhead`` allows, by client.

    Raises:
        ValueError: arguments are unknown or contradict each other, or an attack cannot read this
            model.
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
        self.local_steps = check_integer("local_steps", local_steps)
        check_choice("side", side, get_args(Side))
        unused = ("stages", "reveal", "report", "utility", "client", "scaler", "shares")
        settings.refuse(type(self).__name__, *unused, "memorization")
        self.engine = core.Engine(*core.parts_of(attacks, settings, games, local_steps=local_steps))
        if any(c.attacks for c in self.engine.channels if not isinstance(c, core.StepChannel)):
            raise ValueError(
                "attacks on trained weights read no update of a round: run `fedleak memorization` "
                "on the trained model"
            )
        self.model = model
        self.side: Side = side
        self.folder = Path(folder)
        self.federation = settings.federation
        self.settings = settings
        self._max_overhead = core.cadence_of(None, max_overhead).max_overhead
        self.next_look: dict[str | int, int] = {}
        trained = [p for p in model.parameters() if p.requires_grad]
        anatomy = find_anatomy(model, **dict(settings.anatomy or {}))
        self.run = run = _RoundRun(anatomy, "rank", self.engine.assume)
        run.precision, run.tokenizers = settings.precision or "32-true", [settings.tokenizer]
        run.defenses, run.optimizers = tuple(defenses), [optimizer(trained)]
        run.local_steps = local_steps
        self.engine.open(self.run)
        self._names = updates.parameter_names(model)
        self._sent: State | None = None
        self._sent_names: dict[str, str] = {}  # the sent name of each parameter
        self._is_stale = False  # whether the attacks are not adapted to the sent model yet
        self._failures: dict[str, str] = {}  # why an attack could not be adapted, by its name
        self._clients: dict[tuple[str | int, Stage], ClientEngine] = {}
        # By client and stage: the newest round in which it returned a state, and the state's hash.
        self._returned_hashes: dict[tuple[str | int, Stage], tuple[int, str]] = {}
        self.round_ = -1

    # ---- a round ----------------------------------------------------------------------------

    def begin(self, round_: int, sent: State) -> None:
        """Begin a round: load the model that is sent.

        Args:
            round_: the number of the round, larger than that of the previous round. The same number
                continues a round, in which the same model is sent to another client.
            sent: the state that clients get: of the whole model, of its trained parameters, or of a
                PEFT adapter, by the names of ``model``. It must not change until the round is over.

        A later model that holds NaN, because a client's update did, makes its round *unknown*.

        Raises:
            UpdateError: names or shapes differ from the model's, a trained parameter is missing, or
                the first model holds NaN.
            ValueError: an attack cannot read this model, ``round_`` is smaller than before, or
                another model was sent in the same round.
        """
        check_integer("round_", round_, at_least=max(self.round_, 0), hint="rounds go upwards")
        if round_ == self.round_ and self._sent is not None:
            if not updates.equal_states(sent, self._sent):
                raise ValueError(
                    f"in round {round_} another model was sent before: use a separate observer for "
                    "each client"
                )
            return
        if self._sent is None and (nans := [n for n, t in sent.items() if bool(t.isnan().any())]):
            raise UpdateError(f"no attack can be calibrated on the sent model: NaN in '{nans[0]}'")
        self._sent_names = updates.load_sent(self.model, self._names, sent)
        self._set_round(round_)
        if self._sent is None:
            self.engine.begin(self.run, self._destination(round_))
        self._is_stale, self._sent, self.round_ = True, sent, round_

    def _set_round(self, round_: int) -> None:
        """Set the number of the current round, for the runs of all clients."""
        for engine_run in (self.run, *(engine.run for engine in self._clients.values())):
            engine_run.step = round_

    def _destination(self, round_: int) -> core.Destination:
        """Return the folder and the facts for the record of the federation."""
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
        """Return the names in the sent state that belong to trained parameters."""
        assert self._sent is not None, "call begin(round_, sent) first"
        parameters = dict(self.model.named_parameters())
        model_names = ((n, self._names[n]) for n in self._sent if n in self._names)
        return [n for n, name in model_names if parameters[name].requires_grad]

    def shares_twice(self, names: Collection[str]) -> bool:
        """Return whether two of these names belong to one parameter."""
        return len({self._names[n] for n in names}) < len(names)

    def look(self, returned: State, client: str | int = 0, **facts: Any) -> RoundLook:
        """Attack the state that a client returns in this round, and log the results.

        Args:
            returned: the state that the client returns.
            client: the client.
            facts: further arguments of :meth:`measure`, such as ``batches``.
        """
        look = self.measure(returned, client, **facts)
        try:
            look.log()
        except Exception as error:  # a failed log must not end a round
            core.announce(f"RoundObserver: not all results were written: {core.reason(error)}")
        return look

    def measure(
        self,
        returned: State,
        client: str | int = 0,
        *,
        batches: Sequence[Any] | None = None,
        learning_rate: float | None = None,
        noise_std: float = 0.0,
        compression: str | None = None,
        utility: Mapping[str, float] | None = None,
        undefended: State | None = None,
    ) -> RoundLook:
        """Attack the state that a client returns in this round, like :meth:`look`, without a log.

        At the end of a ``with`` it is discarded, unless :meth:`RoundLook.log` was called.

        Args:
            returned: the state that the client returns.
            client: the client. :data:`SUM` means that ``returned`` is the mean over clients, which
                a server under secure aggregation sees. It is logged as ``leakage_aggregate/...``.
            batches: the batches of the local steps, one for each step; None if they are unknown.
                The batches of ``recording`` may have several for one step with accumulation.
            learning_rate: the mean learning rate over the local steps, if a schedule changes it
                within a round or over rounds. By default it is the rate that ``recording`` has
                recorded, or the optimizer's.
            noise_std: the standard deviation of the noise that is known to be on each entry of
                ``returned``.
            compression: the method by which ``returned`` was compressed, empty for none; None for
                the method of the ``defenses``.
            utility: further values of this round, logged as ``utility/<name>``.
            undefended: the state before the client's own noise, for controls; it is not attacked.

        Returns:
            The results of the look. If the update cannot be read, they are *unknown*.

        Raises:
            RuntimeError: no round has begun.
        """
        if (sent := self._sent) is None:
            raise RuntimeError("no round has begun: call begin(round_, sent) before look(...)")
        stage = Stage.AGGREGATE if client == SUM else Stage.SHARED
        engine = self._engine_of(client, stage)
        look, utility = core.Look(self.round_), utility or {}
        before: dict[str, Any] = {}
        if learning_rate is None and isinstance(batches, Recorded):
            learning_rate = batches.learning_rate

        def take() -> GradientSnapshot:
            """Return the update that leaves."""
            self._check_new(client, stage, returned)
            if batches and stage is Stage.SHARED:
                steps = len(batches.rates if isinstance(batches, Recorded) else batches)
                if steps != self.local_steps:
                    raise UpdateError(
                        f"the client took {steps} steps in this round, not "
                        f"local_steps={self.local_steps} (trained_on(batch, step=False) "
                        "accumulates)"
                    )
            if undefended is not None:
                look.training_step.undefended = observe(undefended, 0.0)
            return observe(returned, noise_std)

        def observe(state: State, noise_std: float) -> GradientSnapshot:
            """Return an update, with the tensors that the attacks read by their roles."""
            snapshot = updates.observe(
                sent,
                state,
                self.run.optimizers[0],
                self.local_steps,
                trained=self.trained_names(),
                learning_rate=learning_rate,
                round_=self.round_,
                stage=stage,
                fresh=self.settings.fresh,
                noise_std=noise_std,
            )
            if state is undefended:
                parameters, named = dict(self.model.named_parameters()), snapshot.tensors.items()
                look.training_step.sizes = {
                    id(parameters[self._names[n]]): float(x.float().norm()) for n, x in named
                }
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
            before = engine.state_of_looks()
            self._refresh(look, engine)
            outcomes = engine.read_update(look, batches, take)
            counted = engine.count_look(look, outcomes, utility, scored=batches is not None)
        except Exception as error:  # an error of this package must not end a round
            counted = engine.lose_look(core.reason(error))
        outcomes, values, now = counted
        return RoundLook(client, values, now, look, engine, outcomes, before, utility)

    def _declared_compression(self, client: str | int) -> str:
        """Return the method by which the defences compressed a client's update; empty for none."""
        defenses = [d for d in self.run.defenses if d.compression is not None]
        if client == SUM or any(d.defers for d in defenses):
            return AVERAGED if defenses else ""
        return next((d.compression.method for d in defenses if d.compression is not None), "")

    def _check_new(self, client: str | int, stage: Stage, returned: State) -> None:
        """Raise an error for a state that the client has returned in an earlier round."""
        digest = hash_tensors(returned)
        round_, earlier = self._returned_hashes.get((client, stage), (self.round_, ""))
        if round_ < self.round_ and earlier == digest:
            raise UpdateError(f"the client returned the same state as in round {round_}")
        self._returned_hashes[client, stage] = (self.round_, digest)

    def _refresh(self, look: core.Look, engine: core.Engine) -> None:
        """Adapt the attacks to the model that was sent, at the first look of a round."""
        if self._is_stale:
            with look.clock(self.run.device):
                lineup = engine.current.lineup
                self._failures = lineup.refresh(self.run.step * self.local_steps, lineup.playing)
            self._is_stale = False
        for series in engine.series:
            if series.attack in self._failures:
                look.answers[series] = core.Unknown(self._failures[series.attack])

    def due(self, client: str | int) -> bool:
        """Return whether ``max_overhead`` allows a look at a client's update of this round."""
        return self.round_ >= self.next_look.get(client, self.round_)

    def paid(
        self, client: str | int, seconds: float, round_seconds: float, beside_seconds: float = 0.0
    ) -> None:
        """Plan a client's next look by the time that this look took.

        If an attack cannot recover anything yet, the next look is in the next round.

        Args:
            client: the client whose update was looked at.
            seconds: the duration of the look.
            round_seconds: the duration of the round's training.
            beside_seconds: the duration of the other work of each round, with or without a look.
        """
        engines = (e for (name, _), e in self._clients.items() if client in (name, SUM))
        waiting = any(engine.results.waiting for engine in engines)
        if (share := self._max_overhead) is not None and not waiting:
            # At least 1% of the round, so that looks go on even if other work takes too long.
            free = max(round_seconds - beside_seconds / share, round_seconds / 100)
            rounds = math.ceil(seconds / (share * free)) if free > 0 else 1
            self.next_look[client] = self.round_ + max(1, rounds)

    def _keys(self) -> dict[str, str]:
        """Return the sent name of every role that an attack reads, such as ``head.weight``."""
        anatomy, lineup = self.run.anatomy, self.engine.current.lineup
        names = {id(p): n for n, p in self.model.named_parameters()}
        roles = dict.fromkeys(r for plan in lineup.exposed for r in plan.roles)
        return {role: self._sent_names[names[id(anatomy.parameter(role))]] for role in roles}

    def _engine_of(self, client: str | int, stage: Stage) -> ClientEngine:
        """Return the engine of a client, and create it at the first look."""
        if (client, stage) not in self._clients:
            destination = core.Destination(self.folder, (), self._boards(client), client=client)
            # The rank seeds the games, so it must not depend on the process or the order of looks.
            run = self.run.altered(rank=zlib.crc32(str(client).encode()))
            self._clients[client, stage] = ClientEngine(self.engine, run, stage, destination)
        return self._clients[client, stage]

    def _boards(self, client: str | int) -> list[SummaryWriter]:
        """Return a list with the writer of a client's TensorBoard run; empty if there is none."""
        if not self.settings.tensorboard or importlib.util.find_spec("tensorboard") is None:
            return []
        name = f"client_{file_name(client)}" if client != SUM else SUM
        try:
            return [core.BoardLogger(self.folder / "tensorboard" / name).writer]
        except Exception as error:  # a full disk must not end a round
            core.announce(f"RoundObserver: no TensorBoard of client {client}: {core.reason(error)}")
            return []

    # ---- the end of the federation ----------------------------------------------------------

    def end(self, how: str = "finished") -> None:
        """End the federation, and close its files.

        Args:
            how: the outcome for the record: ``"finished"``, or the class name of an exception.
        """
        self._set_round(self.round_ + 1)
        for engine in self._clients.values():
            engine.rounds_end()
        self.engine.end(how)
        for engine in self._clients.values():
            for channel in engine.channels:
                for remove in channel.removers:
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
        """Return the log names of each family's worst value, and of the values it is taken from."""
        results = self.engine.results
        worst = [f"{core.WORST}/{family}" for family in results.families]
        return worst + [n for family in results.families for n in results.headlines(family)]

    def never_judged(self, name: str) -> str | None:
        """Return the reason why a gate on this log name cannot judge any update; None if it can."""
        return core.why_never_judged(self.engine, name, fresh=self.settings.fresh)
