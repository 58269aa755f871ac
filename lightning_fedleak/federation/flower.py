"""Flower: a mod that looks at a client's update before it leaves, and strategies for the server.

The only file that knows Flower. It needs ``pip install lightning-fedleak[flower]``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from lightning_fedleak.callbacks import LeakageLimitExceeded
from lightning_fedleak.defenses import DefenseError
from lightning_fedleak.extras import install
from lightning_fedleak.federation.client_dp import ClientDP
from lightning_fedleak.federation.gate import Leaving, OutgoingUpdates, RoundGate
from lightning_fedleak.federation.observer import SUM, RoundObserver
from lightning_fedleak.federation.trained_on import recording
from lightning_fedleak.federation.updates import UpdateError, difference, moved

try:
    from flwr.app import (
        ArrayRecord,
        ConfigRecord,
        Context,
        Error,
        Message,
        MessageType,
        MetricRecord,
        RecordDict,
    )
    from flwr.common.constant import ErrorCode
    from flwr.serverapp import Grid
    from flwr.serverapp.strategy import Strategy
except ImportError as error:
    raise ImportError(
        f"lightning_fedleak.federation.flower needs Flower: {install('flower')}"
    ) from error

log = logging.getLogger("flwr")

ROUND = "server-round"
WEIGHT = "num-examples"


# ---- the client ---------------------------------------------------------------------------------


class FedLeakMod:
    """A Flower mod: what a client returns is attacked, gated and defended before it leaves.

    ::

        app = ClientApp(mods=[FedLeakMod(make_observer, [RoundGate("leakage/worst/words",
                                                                   at_most=0.3)])])

    It acts on training messages alone. The train function tells what it trains on, by
    :func:`~lightning_fedleak.federation.trained_on` in a loop of its own, or by the callback
    :class:`~lightning_fedleak.federation.TrainedOn`. One that does not leaves every result unknown,
    and unknown does not pass a gate.

    A withheld update is answered with an error: the round goes on without this client, and says so.
    Under a ``dp`` whose noise the client adds, zero with that noise leaves instead. Metrics, which
    would tell of the data, are left out then, and every client weighs 1.

    Args:
        observer: makes the :class:`RoundObserver` of this process, once in a run, given the first
            context.
        gates: of each client.
        dp: makes a client's own :class:`ClientDP`, in every round, given its context. It needs a
            ledger, since Flower may run each round in another process.
        weight: the metric by which the server's strategy weighs clients.
    """

    def __init__(
        self,
        observer: Callable[[Context], RoundObserver],
        gates: Sequence[RoundGate] = (),
        dp: Callable[[Context], ClientDP] | None = None,
        *,
        weight: str = WEIGHT,
    ) -> None:
        self._make = observer
        self._gates = tuple(gates)
        self._dp = dp
        self._weight = weight
        self._observers: dict[int, RoundObserver] = {}

    def __call__(
        self, message: Message, context: Context, call_next: Callable[[Message, Context], Message]
    ) -> Message:
        """Lets the client train, and returns what may leave.

        Raises:
            DefenseError: differential privacy of the client without a ledger.
        """
        if message.metadata.message_type.split(".")[0] != MessageType.TRAIN:
            return call_next(message, context)
        _, sent = _arrays_of(message)
        round_ = _round_of(message)
        dp = None if self._dp is None else self._dp(context)
        if dp is not None and dp.trust != "central" and dp.ledger is None:
            raise DefenseError(
                "FedLeakMod: Flower may run each round of a client in another process, which would "
                "forget what earlier ones have released: give ClientDP(ledger=...), a path for "
                "each client"
            )
        if context.run_id not in self._observers:
            made = self._make(context)
            made.federation = made.federation or f"flower-{context.run_id}"
            self._observers = {context.run_id: made}
        observer = self._observers[context.run_id]
        client = context.node_config.get("partition-id", context.node_id)
        out = OutgoingUpdates(observer, self._gates, dp, client=client)
        with recording() as batches:
            reply = call_next(message, context)
        if reply.has_error():
            return reply
        answered, returned = _arrays_of(reply)
        try:
            leaving = out.leaves(round_, sent, returned, batches)
        except LeakageLimitExceeded as exceeded:
            log.error("%s", exceeded)  # here: an exception's words would travel to the server
            return _refused(message, "a gate ended this client's round")
        return self._answer(message, reply, answered, leaving, own=out.own is not None)

    def _answer(
        self, message: Message, reply: Message, key: str, leaving: Leaving, *, own: bool
    ) -> Message:
        if leaving.state is None:
            why = "; ".join(event.gate for event in leaving.events) or "the update cannot be read"
            error = Error(ErrorCode.MOD_FAILED_PRECONDITION, f"lightning-fedleak: withheld ({why})")
            return Message(error, reply_to=message)
        reply.content[key] = ArrayRecord(leaving.state)
        if own:
            for name in list(reply.content.metric_records):
                reply.content[name] = MetricRecord({self._weight: 1.0})
            for name in list(reply.content.config_records):
                del reply.content[name]
        return reply


def _refused(message: Message, why: str) -> Message:
    """The answer of a client that returns no update."""
    error = Error(ErrorCode.MOD_FAILED_PRECONDITION, f"lightning-fedleak: {why}")
    return Message(error, reply_to=message)


# ---- the server ---------------------------------------------------------------------------------


class _Around(Strategy):  # type: ignore[misc, unused-ignore]
    """A strategy that hands everything on to another one."""

    def __init__(self, strategy: Strategy) -> None:
        self.strategy = strategy

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """As the strategy inside."""
        return self.strategy.configure_train(server_round, arrays, config, grid)  # type: ignore[no-any-return, unused-ignore]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """As the strategy inside."""
        return self.strategy.aggregate_train(server_round, replies)  # type: ignore[no-any-return, unused-ignore]

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """As the strategy inside."""
        return self.strategy.configure_evaluate(server_round, arrays, config, grid)  # type: ignore[no-any-return, unused-ignore]

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """As the strategy inside."""
        return self.strategy.aggregate_evaluate(server_round, replies)

    def summary(self) -> None:
        """As the strategy inside."""
        self.strategy.summary()


class Observed(_Around):
    """What a curious server reads off each client's update, and off their mean.

    **The order of wrappers is the threat model**, and is written to the log: ``Observed(X)`` sees
    what arrives, before ``X`` acts on it. Under a defence of the server, it still sees every raw
    update.

    Args:
        strategy: any; what it returns is not changed.
        observer: with ``side="server"``.
        truth: a simulation's: the batches that a client trained on in a round, by the client's
            number here and the round; None where nobody but the client knows.
    """

    def __init__(
        self,
        strategy: Strategy,
        observer: RoundObserver,
        truth: Callable[[int, int], Sequence[Any] | None] | None = None,
    ) -> None:
        super().__init__(strategy)
        self.observer = observer
        self._truth = truth
        self._numbers: dict[int, int] = {}

    def summary(self) -> None:
        """Says who sees what."""
        inside = type(self.strategy).__name__
        log.info("Observed(%s): sees each client's update as it arrives, before %s", inside, inside)
        self.strategy.summary()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Remembers what is sent."""
        self.observer.begin(server_round, arrays.to_torch_state_dict())
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Looks at each client's update, then at their mean, then lets the strategy work."""
        arrived = list(replies)
        states: list[dict[str, Tensor]] = []
        known: list[Any] | None = []
        for reply in sorted(arrived, key=lambda r: r.metadata.src_node_id):
            node = reply.metadata.src_node_id
            client = self._numbers.setdefault(node, len(self._numbers))
            if reply.has_error():
                log.info("lightning-fedleak: client %d sent nothing", client)
                continue
            _, state = _arrays_of(reply)
            batches = None if self._truth is None else self._truth(client, server_round)
            self.observer.look(state, client, batches=batches)
            states.append(state)
            known = None if known is None or batches is None else [*known, *batches]
        mean = _mean(states)
        if mean is not None:
            self.observer.look(mean, SUM, batches=known)
        return super().aggregate_train(server_round, arrived)


class PrivateMean(_Around):
    """Federated averaging under a :class:`ClientDP` of central trust, by a trusted server.

    Draws clients as the account says, and takes the noised mean of their updates. A client that
    fails, withholds or returns what cannot be read counts as zero. Metrics of training are not
    published: they are not covered.

    Args:
        strategy: for everything but training: evaluation, say.
        dp: with ``trust="central"`` and a ledger.
        minutes: to wait for all clients to be there; the account hangs on their number.

    Raises:
        DefenseError: another trust, no ledger, or a strategy inside that was to be watched.
    """

    def __init__(self, strategy: Strategy, dp: ClientDP, *, minutes: float = 10.0) -> None:
        super().__init__(strategy)
        if isinstance(strategy, Observed):
            raise DefenseError(
                "PrivateMean trains in place of the strategy inside, so that an Observed there "
                "would see nothing: Observed(PrivateMean(...)) sees each client's update, as the "
                "trusted server does"
            )
        if dp.trust != "central" or dp.ledger is None:
            raise DefenseError(
                "PrivateMean adds the noise on the server: give ClientDP(trust='central', "
                "ledger=...), whose account survives a restart"
            )
        self.dp = dp
        self._seconds = 60 * minutes
        self._sent: dict[str, Tensor] = {}
        self._drawn: list[int] = []

    def summary(self) -> None:
        """Says what is guaranteed."""
        log.info("PrivateMean: %s", self.dp.guarantee)
        self.strategy.summary()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Draws the clients of a round, and sends them the model.

        Raises:
            DefenseError: not all clients came in time.
        """
        self._sent = arrays.to_torch_state_dict()
        until = time.monotonic() + self._seconds
        nodes = sorted(grid.get_node_ids())
        while len(nodes) < self.dp.clients and time.monotonic() < until:
            time.sleep(0.2)
            nodes = sorted(grid.get_node_ids())
        self._drawn = self.dp.drawn(nodes)
        config[ROUND] = server_round
        record = RecordDict({"arrays": arrays, "config": config})
        return [
            Message(content=record, message_type=MessageType.TRAIN, dst_node_id=node)
            for node in self._drawn
        ]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """One release: the next model, and no metrics.

        Raises:
            BudgetSpent: the account allows no more.
        """
        updates: dict[int, Mapping[str, Tensor] | None] = dict.fromkeys(self._drawn)
        trained = [n for n, t in self._sent.items() if t.is_floating_point()]
        why: dict[int, str] = {}
        for reply in replies:
            node = reply.metadata.src_node_id
            if reply.has_error() or node not in updates:
                continue
            try:
                updates[node] = difference(self._sent, _arrays_of(reply)[1], trained=trained)
            except (UpdateError, ValueError) as error:
                why[node] = str(error)
        release = self.dp.mean(updates, {n: self._sent[n] for n in trained})
        for node, reason in (dict(release.zeros) | why).items():
            place = self._drawn.index(node)
            log.info("lightning-fedleak: drawn client %d counts as zero: %s", place, reason)
        return ArrayRecord(moved(self._sent, release.update)), None


def _arrays_of(message: Message) -> tuple[str, dict[str, Tensor]]:
    """The one model of a message, and its key.

    Raises:
        UpdateError: it holds none, or several.
    """
    records = message.content.array_records
    if len(records) != 1:
        raise UpdateError(
            f"a message of a round holds one model, and this one has {len(records)} ArrayRecords"
        )
    [(key, arrays)] = records.items()
    state: dict[str, Tensor] = arrays.to_torch_state_dict()
    return key, state


def _round_of(message: Message) -> int:
    for config in message.content.config_records.values():
        if ROUND in config:
            return int(config[ROUND])
    raise UpdateError(
        f"the message does not say which round it is of: the server's strategy must send '{ROUND}' "
        "in its ConfigRecord, as those of Flower do"
    )


def _mean(states: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor] | None:
    """Of what can be added up; None of nothing."""
    if not states:
        return None
    first = states[0]
    alike = [
        s
        for s in states
        if s.keys() == first.keys() and all(s[n].shape == first[n].shape for n in first)
    ]
    return {
        name: sum((s[name].double() for s in alike), 0.0 * tensor.double())
        .div(len(alike))
        .to(tensor.dtype)
        if tensor.is_floating_point()
        else tensor
        for name, tensor in first.items()
    }


__all__ = ["FedLeakMod", "Observed", "PrivateMean"]
