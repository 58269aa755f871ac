"""Strategies of the server: one that watches, and one that adds the noise of clients' privacy."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from torch import Tensor

from lightning_fedleak.defenses import DefenseError
from lightning_fedleak.engine import reason
from lightning_fedleak.federation.client_dp import ClientDP
from lightning_fedleak.federation.flower.messages import ROUND, arrays_of
from lightning_fedleak.federation.observer import SUM, RoundObserver
from lightning_fedleak.federation.updates import State, moved

log = logging.getLogger("flwr")


def _hand_on(name: str) -> Callable[..., Any]:
    """Return a method that calls the method of the same name of the inner strategy."""

    def method(self: _Around, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.strategy, name)(*args, **kwargs)

    method.__doc__ = f"Call ``{name}`` of the inner strategy."
    return method


class _Around(Strategy):  # type: ignore[misc, unused-ignore]
    """A strategy that calls an inner strategy."""

    def __init__(self, strategy: Strategy) -> None:
        self.strategy = strategy

    configure_train = _hand_on("configure_train")
    aggregate_train = _hand_on("aggregate_train")
    configure_evaluate = _hand_on("configure_evaluate")
    aggregate_evaluate = _hand_on("aggregate_evaluate")
    summary = _hand_on("summary")


class Observed(_Around):
    """Attacks of a curious server on each client's update, and on their mean.

    A reply that holds no model is *unknown*. The others make the mean, with the weights of the
    inner strategy.

    **The order of wrappers is the threat model**, and is written to the log: ``Observed(X)`` sees
    what arrives, before ``X`` acts on it. Under a defence of the server, it still sees every raw
    update.

    Args:
        strategy: the inner strategy, whose results are not changed. If it returns no model, for
            example because every client withheld, the sent model is kept, which is logged.
        observer: the observer, with ``side="server"``.
        learning_rate: a function that returns the mean learning rate over a round's local steps, if
            a schedule changes it. By default it is that of the observer's optimizer.
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
        """Log which updates are seen."""
        inside = type(self.strategy).__name__
        log.info("Observed(%s): sees each client's update as it arrives, before %s", inside, inside)
        self.strategy.summary()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Begin the round with the model that is sent."""
        self._arrays, self._sent = arrays, arrays.to_torch_state_dict()
        self.observer.begin(server_round, self._sent)
        self._round_start = time.perf_counter()
        messages: Iterable[Message] = super().configure_train(server_round, arrays, config, grid)
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Attack each client's update, then their mean, then call the inner strategy.

        If no client has sent a model, the result is the model that was sent. Otherwise a federation
        in which every client always withholds would end with an empty model.
        """
        arrived = list(replies)
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

    def _look(self, server_round: int, arrived: Sequence[Message]) -> None:
        floats = {n: t for n, t in self._sent.items() if t.is_floating_point()}
        total = {n: torch.zeros_like(t, dtype=torch.float64) for n, t in floats.items()}
        weights = 0.0
        rate = None if self._rate is None else self._rate(server_round)
        for reply in sorted(arrived, key=lambda reply: reply.metadata.src_node_id):
            client = self._numbers.setdefault(reply.metadata.src_node_id, len(self._numbers))
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


class PrivateMean(_Around):
    """Federated averaging under a :class:`ClientDP` of central trust, by a trusted server.

    It samples clients as the account assumes, and takes the noised mean of their updates. A client
    counts as zero if it fails, withholds, has disconnected, or returns an update that cannot be
    read. Metrics of training are not published, because no epsilon covers them.

    The first round waits until exactly all clients are connected, because the account depends on
    their number. A client that disconnects later is still sampled. A new node takes the place of a
    client that has disconnected.

    Args:
        strategy: the inner strategy for everything except training, such as evaluation.
        dp: the ClientDP, with ``trust="central"`` and a ledger.
        minutes: the time to wait until all clients are connected.

    Raises:
        DefenseError: the ClientDP has another trust or no ledger, or the inner strategy is an
            :class:`Observed`, which would see nothing.
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
        self._slots: list[int] = []  # the node of each client
        self._nodes: list[int] = []

    def summary(self) -> None:
        """Log the guarantee."""
        log.info("PrivateMean: %s", self.dp.guarantee)
        self.strategy.summary()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Sample the clients of a round, and send them the model.

        Raises:
            DefenseError: the number of clients that connected in time is not that of the account.
            BudgetSpent: one more release would cost more than the budget.
        """
        self.dp.check_affords_another()
        self._sent = arrays.to_torch_state_dict()
        connected = self._arrived(grid)
        self._nodes = self.dp.drawn(self._slots)
        config[ROUND] = server_round
        record = RecordDict({"arrays": arrays, "config": config})
        return [
            Message(content=record, message_type=MessageType.TRAIN, dst_node_id=node)
            for node in self._nodes
            if node in connected
        ]

    def _arrived(self, grid: Grid) -> set[int]:
        """Return the connected nodes. A node that disconnects keeps its slot until it is needed."""
        connected = set(grid.get_node_ids())
        until = time.monotonic() + self._seconds
        while not self._slots and len(connected) != self.dp.clients and time.monotonic() < until:
            time.sleep(0.2)
            connected = set(grid.get_node_ids())
        if not self._slots:
            self._slots = sorted(connected)
        new = sorted(connected.difference(self._slots))
        for slot, node in enumerate(self._slots):
            if node not in connected and new:
                self._slots[slot] = new.pop(0)
        if new:  # a client may reconnect before Flower notices that its old node has disconnected
            log.info("lightning-fedleak: %d nodes wait for a place to be free", len(new))
        return connected

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Return the next model, which is one release, and no metrics.

        Raises:
            BudgetSpent: one more release would cost more than the budget.
        """
        like = {n: t for n, t in self._sent.items() if t.is_floating_point()}
        sums = self.dp.begin(self._nodes, like)
        arrived = {r.metadata.src_node_id: r for r in replies if not r.has_error()}
        for node in self._nodes:  # in a fixed order: the same replies give the same sum
            if node in arrived:
                sums.add_returned(node, self._sent, _state_of(arrived[node]))
        release = sums.end()
        for node, zero in release.zeros.items():
            position = self._nodes.index(node)
            log.info("lightning-fedleak: drawn client %d counts as zero: %s", position, zero)
        return ArrayRecord(moved(self._sent, release.update)), None


def _state_of(reply: Message) -> State:
    """Return the model of a reply; it is empty unless one model is there and can be read."""
    try:
        _, arrays = arrays_of(reply)
        for name in arrays:
            arrays[name]
    except Exception as error:  # a client's bytes may cause any error
        log.info("lightning-fedleak: a reply holds no model: %s", reason(error))
        return {}
    return arrays


def _can_be_averaged(state: State, sent: State) -> bool:
    """Return whether a model has the names, shapes and dtypes that were sent."""
    return state.keys() == sent.keys() and all(
        (state[n].shape, state[n].dtype) == (t.shape, t.dtype) for n, t in sent.items()
    )


def _weight_of(reply: Message, strategy: Strategy) -> float:
    """Return a reply's weight in the mean of a strategy; 1 if the reply has none."""
    if isinstance(strategy, PrivateMean):
        return 1.0
    if isinstance(strategy, _Around):
        return _weight_of(reply, strategy.strategy)
    name = getattr(strategy, "weighted_by_key", None)
    weights = [r[name] for r in reply.content.metric_records.values() if name in r]
    weight = float(weights[0]) if len(weights) == 1 and isinstance(weights[0], int | float) else 1.0
    return weight if math.isfinite(weight) and weight >= 0 else 1.0
