"""Two strategies of a Flower server, each wrapped around another strategy.

A strategy chooses the clients of a round and averages their replies. A *look* is one run of the
attacks on one update.

:class:`Observed` attacks the updates that clients send, and changes no result. :class:`PrivateMean`
samples the clients of a round, and releases the noised mean of their updates: client-level
differential privacy.
"""

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
from lightning_fedleak.federation.flower.mod import ROUND, arrays_of
from lightning_fedleak.federation.observer import SUM, RoundObserver
from lightning_fedleak.federation.updates import State, moved

log = logging.getLogger("flwr")


def _delegate(name: str) -> Callable[..., Any]:
    """Return a method that calls the method of the same name of the inner strategy."""

    def method(self: _StrategyWrapper, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.strategy, name)(*args, **kwargs)

    method.__doc__ = f"Call ``{name}`` of the inner strategy."
    return method


class _StrategyWrapper(Strategy):  # type: ignore[misc, unused-ignore]
    """A strategy that leaves its methods to an inner strategy. Subclasses override some of them."""

    def __init__(self, strategy: Strategy) -> None:
        self.strategy = strategy

    # The methods that Flower's `Strategy.start` calls.
    configure_train = _delegate("configure_train")
    aggregate_train = _delegate("aggregate_train")
    configure_evaluate = _delegate("configure_evaluate")
    aggregate_evaluate = _delegate("aggregate_evaluate")
    summary = _delegate("summary")


class Observed(_StrategyWrapper):
    """Attacks each client's update, and the mean of all updates, as a curious server could.

    A client whose reply holds no readable model has *unknown* results. The mean is taken over the
    models that have the names, shapes and dtypes of the sent model, with the weights of the inner
    strategy.

    **The order of wrappers is the threat model**, and is written to the log: ``Observed(X)`` sees
    what arrives, before ``X`` acts on it. If ``X`` is a defence of the server, the attacks still
    see every raw update.

    Args:
        strategy: the inner strategy, whose results are not changed. If it returns no model, for
            example because every client withheld its update, the sent model is returned instead,
            and a warning is logged.
        observer: the observer that runs the attacks, with ``side="server"``.
        learning_rate: a function that gets the number of a round and returns the mean learning rate
            over its local steps, if a schedule changes it. By default the learning rate of the
            observer's optimizer is used.
    """

    def __init__(
        self,
        strategy: Strategy,
        observer: RoundObserver,
        learning_rate: Callable[[int], float] | None = None,
    ) -> None:
        super().__init__(strategy)
        self.observer = observer
        self._learning_rate = learning_rate
        self._indices: dict[int, int] = {}  # the index of each client in the logs, by its node's id
        self._sent_state: State = {}
        self._sent_arrays: ArrayRecord | None = None
        self._round_start = 0.0

    def summary(self) -> None:
        """Log at which point the updates are attacked."""
        inner = type(self.strategy).__name__
        log.info("Observed(%s): sees each client's update as it arrives, before %s", inner, inner)
        self.strategy.summary()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Begin a round of the observer with the sent model; return the messages to clients."""
        self._sent_arrays, self._sent_state = arrays, arrays.to_torch_state_dict()
        self.observer.begin(server_round, self._sent_state)
        self._round_start = time.perf_counter()
        messages: Iterable[Message] = super().configure_train(server_round, arrays, config, grid)
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Attack each client's update and their mean; return the result of the inner strategy.

        If the inner strategy returns no model, the sent model is returned. Otherwise a federation
        in which every client always withholds its update would end with an empty model.
        """
        reply_list = list(replies)
        round_seconds = time.perf_counter() - self._round_start
        if self.observer.due(SUM):
            start = time.perf_counter()
            self._look(server_round, reply_list)
            self.observer.paid(SUM, time.perf_counter() - start, round_seconds)
        _compare_metrics(server_round, reply_list)
        model, metrics = super().aggregate_train(server_round, reply_list)
        if model is None:
            n_errors = sum(reply.has_error() for reply in reply_list)
            log.warning(
                "lightning-fedleak: round %d trained nothing: of %d replies %d are errors (a "
                "withheld update counts as one), and the inner strategy made no model from the "
                "rest. The model that was sent is kept",
                server_round, len(reply_list), n_errors,
            )  # fmt: skip
            model = self._sent_arrays
        return model, metrics

    def _look(self, server_round: int, replies: Sequence[Message]) -> None:
        """Let the observer attack the update of each reply, and then their weighted mean."""
        floats = {n: t for n, t in self._sent_state.items() if t.is_floating_point()}
        total = {n: torch.zeros_like(t, dtype=torch.float64) for n, t in floats.items()}
        total_weight = 0.0
        rate = None if self._learning_rate is None else self._learning_rate(server_round)
        for reply in sorted(replies, key=lambda reply: reply.metadata.src_node_id):
            client = self._indices.setdefault(reply.metadata.src_node_id, len(self._indices))
            if reply.has_error():
                log.info("lightning-fedleak: client %d sent nothing", client)
                continue
            state = _state_of(reply)
            self.observer.look(state, client, learning_rate=rate)
            if not _can_be_averaged(state, self._sent_state):
                continue
            weight = _weight_of(reply, self.strategy)
            total_weight += weight
            for name, tensor in total.items():
                tensor.add_(state[name], alpha=weight)
        if total_weight > 0:
            mean = {n: t.div_(total_weight).to(floats[n].dtype) for n, t in total.items()}
            mean = {**self._sent_state, **mean}
            self.observer.look(mean, SUM, learning_rate=rate)


class PrivateMean(_StrategyWrapper):
    """Federated averaging with client-level differential privacy, by a trusted server.

    It samples clients in the way that the :class:`ClientDP` accounts for, and takes the noised mean
    of their updates. The update of a client counts as zero if the client fails, withholds it or has
    disconnected, or if it cannot be read. Metrics of training are not published, because no epsilon
    covers them.

    The first round waits until exactly ``dp.clients`` nodes are connected, because the account
    depends on this number. A client that disconnects later is still sampled. The next new node that
    connects is taken for this client.

    Args:
        strategy: the inner strategy for everything except training, such as evaluation.
        dp: the ClientDP, with ``trust="central"`` and a ledger.
        minutes: the number of minutes to wait until all clients are connected.

    Raises:
        DefenseError: the ClientDP has another trust or no ledger, or the inner strategy is an
            :class:`Observed`, which would see nothing.
    """

    def __init__(self, strategy: Strategy, dp: ClientDP, *, minutes: float = 10.0) -> None:
        super().__init__(strategy)
        if isinstance(strategy, Observed):
            raise DefenseError(
                "PrivateMean replaces the training of its inner strategy, so an Observed inside it "
                "would see nothing: use Observed(PrivateMean(...))"
            )
        dp.check_server("PrivateMean")
        self.dp = dp
        self._seconds = 60 * minutes
        self._sent_state: dict[str, Tensor] = {}
        self._client_nodes: list[int] = []  # the id of each client's node, by the client's index
        self._sampled_nodes: list[int] = []

    def summary(self) -> None:
        """Log the guarantee."""
        log.info("PrivateMean: %s", self.dp.guarantee)
        self.strategy.summary()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Sample the clients of a round, and send them the model.

        Raises:
            DefenseError: the number of clients that connected in time is not ``dp.clients``.
            BudgetSpent: one more release would cost more than the budget.
        """
        self.dp.check_affords_another()
        self._sent_state = arrays.to_torch_state_dict()
        connected = self._wait_for_nodes(grid)
        self._sampled_nodes = self.dp.drawn(self._client_nodes)
        config[ROUND] = server_round
        record = RecordDict({"arrays": arrays, "config": config})
        return [
            Message(content=record, message_type=MessageType.TRAIN, dst_node_id=node)
            for node in self._sampled_nodes
            if node in connected
        ]

    def _wait_for_nodes(self, grid: Grid) -> set[int]:
        """Return the ids of the connected nodes, and update the node of each client.

        The first call waits until all clients are connected, or the time is over. Later a client
        whose node has disconnected keeps that node until a new node connects and replaces it.
        """
        connected = set(grid.get_node_ids())
        deadline = time.monotonic() + self._seconds
        while (
            not self._client_nodes
            and len(connected) != self.dp.clients
            and time.monotonic() < deadline
        ):
            time.sleep(0.2)
            connected = set(grid.get_node_ids())
        if not self._client_nodes:
            self._client_nodes = sorted(connected)
        new_nodes = sorted(connected.difference(self._client_nodes))
        for client, node in enumerate(self._client_nodes):
            if node not in connected and new_nodes:
                self._client_nodes[client] = new_nodes.pop(0)
        # A client may reconnect before Flower notices that its old node has disconnected.
        if new_nodes:
            log.info("lightning-fedleak: %d new nodes wait until others disconnect", len(new_nodes))
        return connected

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Return the next model and no metrics. The model counts as one release.

        Raises:
            BudgetSpent: one more release would cost more than the budget.
        """
        floats = {n: t for n, t in self._sent_state.items() if t.is_floating_point()}
        update_sum = self.dp.begin(self._sampled_nodes, floats)
        reply_of = {r.metadata.src_node_id: r for r in replies if not r.has_error()}
        for node in self._sampled_nodes:  # in a fixed order: the same replies give the same sum
            if node in reply_of:
                update_sum.add_returned(node, self._sent_state, _state_of(reply_of[node]))
        release = update_sum.end()
        for node, cause in release.zeros.items():
            index = self._sampled_nodes.index(node)
            log.info("lightning-fedleak: sampled client %d counts as zero: %s", index, cause)
        return ArrayRecord(moved(self._sent_state, release.update)), None


def _compare_metrics(server_round: int, replies: Sequence[Message]) -> None:
    """Log which nodes send a weight as their only metric, if others send more metrics."""
    n_metrics = {
        reply.metadata.src_node_id: sum(map(len, reply.content.metric_records.values()))
        for reply in replies
        if not reply.has_error()
    }
    alone = sorted(node for node, count in n_metrics.items() if count == 1)
    if 0 < len(alone) < len(n_metrics):
        log.warning(
            "lightning-fedleak: round %d: nodes %s send a weight as their only metric, as clients "
            "with a ClientDP do, and nodes %s do not, so that Flower's strategies end the run: "
            "give all clients a ClientDP, or none",
            server_round, alone, sorted(n_metrics.keys() - alone),
        )  # fmt: skip


def _state_of(reply: Message) -> State:
    """Return the model of a reply; empty if the reply does not hold exactly one readable model."""
    try:
        _, arrays = arrays_of(reply)
        for name in arrays:
            arrays[name]
    except Exception as error:  # a client's bytes may cause any error
        log.info("lightning-fedleak: a reply holds no model: %s", reason(error))
        return {}
    return arrays


def _can_be_averaged(state: State, sent: State) -> bool:
    """Return whether a model has the names, shapes and dtypes of the sent model."""
    return state.keys() == sent.keys() and all(
        (state[n].shape, state[n].dtype) == (t.shape, t.dtype) for n, t in sent.items()
    )


def _weight_of(reply: Message, strategy: Strategy) -> float:
    """Return a reply's weight in the mean of a strategy; 1 if the reply has no valid weight."""
    if isinstance(strategy, PrivateMean):
        return 1.0
    if isinstance(strategy, _StrategyWrapper):
        return _weight_of(reply, strategy.strategy)
    name = getattr(strategy, "weighted_by_key", None)
    weights = [r[name] for r in reply.content.metric_records.values() if name in r]
    weight = float(weights[0]) if len(weights) == 1 and isinstance(weights[0], int | float) else 1.0
    return weight if math.isfinite(weight) and weight >= 0 else 1.0
