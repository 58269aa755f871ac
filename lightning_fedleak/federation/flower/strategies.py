"""Strategies of the server: one that watches, and one that adds the noise of clients' privacy."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from torch import Tensor

from lightning_fedleak.defenses import DefenseError
from lightning_fedleak.engine import reason
from lightning_fedleak.federation import HEAD, HeadRecord, note_head
from lightning_fedleak.federation.client_dp import ClientDP
from lightning_fedleak.federation.flower.messages import ROUND, arrays_of
from lightning_fedleak.federation.observer import SUM, RoundObserver
from lightning_fedleak.federation.updates import State, moved

log = logging.getLogger("flwr")


def _hand_on(name: str) -> Callable[..., Any]:
    """Return a method that calls that of the strategy inside."""

    def method(self: _Around, *arguments: Any, **named: Any) -> Any:
        return getattr(self.strategy, name)(*arguments, **named)

    method.__doc__ = f"Hand ``{name}`` on to the strategy inside."
    return method


class _Around(Strategy):  # type: ignore[misc, unused-ignore]
    """A strategy that hands everything on to another one."""

    def __init__(self, strategy: Strategy) -> None:
        self.strategy = strategy

    configure_train = _hand_on("configure_train")
    aggregate_train = _hand_on("aggregate_train")
    configure_evaluate = _hand_on("configure_evaluate")
    aggregate_evaluate = _hand_on("aggregate_evaluate")
    summary = _hand_on("summary")


class Observed(_Around):
    """What a curious server reads off each client's update, and off their mean.

    A reply that holds no model is *unknown*. Those that can be added up make the mean, weighted as
    the strategy inside weighs them.

    **The order of wrappers is the threat model**, and is written to the log: ``Observed(X)`` sees
    what arrives, before ``X`` acts on it. Under a defence of the server, it still sees every raw
    update.

    Args:
        strategy: any; what it returns is not changed. Where it returns no model, since every client
            withheld say, the one that was sent is kept and the log says so.
        observer: with ``side="server"``.
        learning_rate: of a round, the mean over its local steps, where a schedule changes it; by
            default that of the observer's optimizer.
    """

    def __init__(
        self,
        strategy: Strategy,
        observer: RoundObserver,
        learning_rate: Callable[[int], float] | None = None,
    ) -> None:
        super().__init__(strategy)
        self.observer = observer
        self._rate = learning_rate
        self._numbers: dict[int, int] = {}
        self._sent: State = {}
        self._arrays: ArrayRecord | None = None
        self._round_start = 0.0

    def summary(self) -> None:
        """Log who sees what."""
        inside = type(self.strategy).__name__
        log.info("Observed(%s): sees each client's update as it arrives, before %s", inside, inside)
        self.strategy.summary()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Remember what is sent."""
        self._arrays, self._sent = arrays, arrays.to_torch_state_dict()
        self.observer.begin(server_round, self._sent)
        self._round_start = time.perf_counter()
        messages: Iterable[Message] = super().configure_train(server_round, arrays, config, grid)
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Look at each client's update, then at their mean, then let the strategy work.

        Where no client has sent a model, the one that was sent is the result: without it a
        federation in which every client always withholds would end with an empty one.
        """
        arrived = list(replies)
        for reply in _by_node(arrived):
            note_head(
                self.observer.engine.record, server_round, self._number_of(reply), _code_in(reply)
            )
        seconds = time.perf_counter() - self._round_start
        if self.observer.due(SUM):
            start = time.perf_counter()
            self._look(server_round, arrived)
            self.observer.paid(SUM, time.perf_counter() - start, seconds)
        model, metrics = super().aggregate_train(server_round, arrived)
        if model is None:
            withheld = sum(reply.has_error() for reply in arrived)
            log.warning(
                "lightning-fedleak: round %d trained nothing: of %d replies %d are errors (a "
                "withheld update is one), and the strategy made no model of the others. The model "
                "stays the one that was sent",
                server_round, len(arrived), withheld,
            )  # fmt: skip
            model = self._arrays
        return model, metrics

    def _number_of(self, reply: Message) -> int:
        return self._numbers.setdefault(reply.metadata.src_node_id, len(self._numbers))

    def _look(self, server_round: int, arrived: Sequence[Message]) -> None:
        floats = {n: t for n, t in self._sent.items() if t.is_floating_point()}
        total = {n: torch.zeros_like(t, dtype=torch.float64) for n, t in floats.items()}
        weights = 0.0
        rate = None if self._rate is None else self._rate(server_round)
        for reply in _by_node(arrived):
            client = self._number_of(reply)
            if reply.has_error():
                log.info("lightning-fedleak: client %d sent nothing", client)
                continue
            state = _state_of(reply)
            self.observer.look(state, client, learning_rate=rate)
            if not _can_be_averaged(state, self._sent):
                continue
            weight = _weight_of(reply, self.strategy)
            weights += weight
            for name, tensor in total.items():
                tensor.add_(state[name], alpha=weight)
        if weights > 0:
            mean = {n: t.div_(weights).to(self._sent[n].dtype) for n, t in total.items()}
            mean = {**self._sent, **mean}
            self.observer.look(mean, SUM, learning_rate=rate)


class ClientHeads(_Around):
    """Writes to ``run.jsonl`` how far each client's logs went in each round.

    What a client's mod sends is a code that the server cannot read. ``fedleak verify`` compares it
    with that client's logs: one who changes them later is found. :class:`Observed` does it as well.

    Args:
        strategy: any; it is started through this one, which must be the outermost.
        folder: of the server's log.
    """

    def __init__(self, strategy: Strategy, folder: str | Path) -> None:
        super().__init__(strategy)
        self._folder = folder
        self._record: HeadRecord | None = None

    def summary(self) -> None:
        """Check that this strategy is the outermost one.

        Raises:
            ValueError: another one is around it, so that its log would not be closed.
        """
        if self._record is None:
            raise ValueError(
                "ClientHeads must be the outermost strategy: say ClientHeads(X(...), folder) in "
                "the place of X(ClientHeads(...)). Observed notes the codes without it"
            )
        self.strategy.summary()

    def start(self, *arguments: Any, **named: Any) -> Any:
        """Run all rounds of the strategy, and close the log."""
        self._record = record = HeadRecord(self._folder)
        with ExitStack() as stack:
            stack.push(lambda error, *_: record.end(error.__name__ if error else "finished"))
            return super().start(*arguments, **named)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Write down the codes of the clients, each by its node's number."""
        arrived = list(replies)
        assert self._record is not None, "start() has been called"
        for reply in arrived:
            self._record.note(server_round, str(reply.metadata.src_node_id), _code_in(reply))
        model, metrics = super().aggregate_train(server_round, arrived)
        return model, metrics


class PrivateMean(_Around):
    """Federated averaging under a :class:`ClientDP` of central trust, by a trusted server.

    Draws clients as the account says, and takes the noised mean of their updates. A client that
    fails, withholds, is gone or returns what cannot be read counts as zero. Metrics of training are
    not published: they are not covered.

    The first round waits for all clients to be there, and no more, since the account depends on
    their number. One that is gone later is drawn like every other; a node that comes takes a free
    place.

    Args:
        strategy: for everything but training: evaluation, say.
        dp: with ``trust="central"`` and a ledger.
        minutes: to wait for all clients to be there.

    Raises:
        DefenseError: another trust, no ledger, or a strategy inside that was to be watched.
    """

    def __init__(self, strategy: Strategy, dp: ClientDP, *, minutes: float = 10.0) -> None:
        super().__init__(strategy)
        if isinstance(strategy, Observed):
            raise DefenseError(
                "PrivateMean trains in place of the strategy inside, so that an Observed there "
                "would see nothing: say Observed(PrivateMean(...))"
            )
        dp.check_server("PrivateMean")
        self.dp = dp
        self._seconds = 60 * minutes
        self._sent: dict[str, Tensor] = {}
        self._places: list[int] = []
        self._nodes: list[int] = []

    def summary(self) -> None:
        """Log what is guaranteed."""
        log.info("PrivateMean: %s", self.dp.guarantee)
        self.strategy.summary()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Draw the clients of a round, and send them the model.

        Raises:
            DefenseError: not all clients came in time, or more of them.
            BudgetSpent: the account allows no more.
        """
        self.dp.check_affords_another()
        self._sent = arrays.to_torch_state_dict()
        connected = self._arrived(grid)
        self._nodes = self.dp.drawn(self._places)
        config[ROUND] = server_round
        record = RecordDict({"arrays": arrays, "config": config})
        return [
            Message(content=record, message_type=MessageType.TRAIN, dst_node_id=node)
            for node in self._nodes
            if node in connected
        ]

    def _arrived(self, grid: Grid) -> set[int]:
        """Return the connected nodes; each has a place, and keeps it when it disconnects."""
        connected = set(grid.get_node_ids())
        until = time.monotonic() + self._seconds
        while not self._places and len(connected) != self.dp.clients and time.monotonic() < until:
            time.sleep(0.2)
            connected = set(grid.get_node_ids())
        if not self._places:
            self._places = sorted(connected)
        new = sorted(connected.difference(self._places))
        for place, node in enumerate(self._places):
            if node not in connected and new:
                self._places[place] = new.pop(0)
        if new:  # one that comes back may do so before its old node is seen to be gone
            log.info("lightning-fedleak: %d nodes wait for a place to be free", len(new))
        return connected

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Return the next model, which is one release, and no metrics.

        Raises:
            BudgetSpent: the account allows no more.
        """
        like = {n: t for n, t in self._sent.items() if t.is_floating_point()}
        sums = self.dp.begin(self._nodes, like)
        arrived = {r.metadata.src_node_id: r for r in replies if not r.has_error()}
        for node in self._nodes:  # in their order: the same replies make the same sum
            if node in arrived:
                sums.add_returned(node, self._sent, _state_of(arrived[node]))
        release = sums.end()
        for node, zero in release.zeros.items():
            place = self._nodes.index(node)
            log.info("lightning-fedleak: drawn client %d counts as zero: %s", place, zero)
        return ArrayRecord(moved(self._sent, release.update)), None


def _state_of(reply: Message) -> State:
    """Return the model of a reply; it is empty unless one model is there and can be read."""
    try:
        _, arrays = arrays_of(reply)
        for name in arrays:
            arrays[name]
    except Exception as error:  # whatever a client's bytes provoke
        log.info("lightning-fedleak: a reply holds no model: %s", reason(error))
        return {}
    return arrays


def _by_node(replies: Sequence[Message]) -> list[Message]:
    return sorted(replies, key=lambda reply: reply.metadata.src_node_id)


def _code_in(reply: Message) -> object:
    """Return the code of a client's logs in a reply; None where there is none."""
    records = {} if reply.has_error() else reply.content.config_records
    return records[HEAD].get("code") if HEAD in records else None


def _can_be_averaged(state: State, sent: State) -> bool:
    """Return whether a model has the names, shapes and dtypes that were sent."""
    return state.keys() == sent.keys() and all(
        (state[n].shape, state[n].dtype) == (t.shape, t.dtype) for n, t in sent.items()
    )


def _weight_of(reply: Message, strategy: Strategy) -> float:
    """Return a reply's weight in the mean of a strategy; 1 where it does not say."""
    if isinstance(strategy, PrivateMean):
        return 1.0
    if isinstance(strategy, _Around):
        return _weight_of(reply, strategy.strategy)
    name = getattr(strategy, "weighted_by_key", None)
    weights = [r[name] for r in reply.content.metric_records.values() if name in r]
    weight = float(weights[0]) if len(weights) == 1 and isinstance(weights[0], int | float) else 1.0
    return weight if math.isfinite(weight) and weight >= 0 else 1.0
