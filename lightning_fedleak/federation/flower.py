"""Flower: a mod that looks at a client's update before it leaves, and strategies for the server.

The only file that knows Flower. It needs ``pip install lightning-fedleak[flower]``.
"""

from __future__ import annotations

import logging
import math
import time
import traceback
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lightning_fedleak.defenses import DefenseError
from lightning_fedleak.extras import install
from lightning_fedleak.federation.client_dp import ClientDP
from lightning_fedleak.federation.gate import Leaving, OutgoingUpdates, RoundGate
from lightning_fedleak.federation.observer import SUM, RoundObserver
from lightning_fedleak.federation.trained_on import recording
from lightning_fedleak.federation.updates import (
    State,
    UpdateError,
    difference,
    moved,
    parameter_names,
    trained_state,
)
from lightning_fedleak.looks.gates import LeakageLimitExceeded
from lightning_fedleak.looks.run import reason

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
    from flwr.common import (
        Code,
        FitRes,
        Parameters,
        Status,
        ndarrays_to_parameters,
        parameters_to_ndarrays,
    )
    from flwr.common.constant import ErrorCode
    from flwr.common.secure_aggregation.secaggplus_constants import (
        RECORD_KEY_CONFIGS,
        RECORD_KEY_STATE,
        Key,
        Stage,
    )
    from flwr.compat.common import recorddict_compat as compat
    from flwr.serverapp import Grid
    from flwr.serverapp.strategy import Strategy
except ImportError as error:
    raise ImportError(
        f"lightning_fedleak.federation.flower needs Flower: {install('flower')}"
    ) from error

log = logging.getLogger("flwr")

ROUND = "server-round"
WEIGHT = "num-examples"

_Watch = tuple[RoundObserver, tuple[RoundGate, ...]]
_WATCHES: dict[str, tuple[int, _Watch]] = {}
"""The newest run of each mod, and what looks at its updates in this process."""
_STATE = "lightning-fedleak"
_NEXT = "next_look"
_LISTED, _LISTED_BACK = "fitins.parameters", "fitres.parameters"
"""Where messages of the older interface hold a model."""

LEAST_MODULUS = 2**32
"""SecAgg+ draws masks below its modulus less one, so that a modulus of 2 masks nothing. This is
Flower's default; one number in so many then shows that its mask was not uniform."""
LEAST_CLIENTS = 2
"""Whose sum a mask may hide where no ClientDP says how many there are."""
SURE_DEVIATIONS = 8.0
"""Noise is beyond so many standard deviations once in 10**15 numbers."""


# ---- the client ---------------------------------------------------------------------------------


class FedLeakMod:
    """A Flower mod: what a client returns is attacked, gated and defended before it leaves.

    ::

        app = ClientApp(mods=[FedLeakMod(make_observer, [RoundGate("leakage/worst/words",
                                                                   at_most=0.3)])])

    Of training messages it lets leave what may. The train function reports what it trains on, by
    :func:`~lightning_fedleak.federation.trained_on` in a loop of its own, or by the callback
    :class:`~lightning_fedleak.federation.TrainedOn`. One that does not leaves every result unknown,
    and unknown does not pass a gate.

    A client of the older interface (``NumPyClient``) sends arrays without names. They must be the
    values of ``trained_state(model)``, or of ``model.state_dict()``, in that order.

    A withheld update is answered with an error: the round goes on without this client, and says so.
    Under a ``dp`` whose noise the client adds, zero with that noise leaves instead, also where the
    train function fails, which data may provoke. Every reply has the same form then: the model, and
    a weight of 1 in place of metrics, which would tell of the data. Every other message (evaluate,
    query, parameters of the older interface) is answered with an error before the client's app sees
    it: an exact loss of a model that the server chose is under no noise.

    **Secure aggregation** (``SecAgg+``): ``mods=[secaggplus_mod, FedLeakMod(...)]``, in this order,
    looks at the update before it is masked. A withheld update, or one that cannot be read, leaves
    as zero, masked like every other; see :class:`~lightning_fedleak.federation.OutgoingUpdates`.
    A node that takes part in SecAgg+ answers no training message that its mod does not mask, nor
    one whose masks hide the sum of fewer clients than the noise is meant for. The number of
    examples and the metrics are not masked by Flower, and leave as they are.

    Args:
        observer: makes the :class:`RoundObserver` of this process, once in a run, given the first
            context.
        gates: of each client; or what makes them of the first context, of the run's configuration
            say.
        dp: makes a client's own :class:`ClientDP`, in every round, given its context; None for
            none. It needs a ledger, since Flower may run each round in another process.
        weight: the metric by which the server's strategy weighs clients.
        drop: what never leaves, see :class:`~lightning_fedleak.federation.OutgoingUpdates`.
        secure_aggregation: what leaves is masked by other means than Flower's SecAgg+, which is
            known by its messages.
        uncovered: types of messages, ``"evaluate"`` or ``"query.size"`` say, that are answered
            under a ``dp`` whose noise the client adds all the same. *No epsilon covers them.*
    """

    def __init__(
        self,
        observer: Callable[[Context], RoundObserver],
        gates: Sequence[RoundGate] | Callable[[Context], Sequence[RoundGate]] = (),
        dp: Callable[[Context], ClientDP | None] | None = None,
        *,
        weight: str = WEIGHT,
        drop: Sequence[str] = (),
        secure_aggregation: bool = False,
        uncovered: Sequence[str] = (),
    ) -> None:
        self._make = observer
        self._gates = gates
        self._dp = dp
        self._weight = weight
        self._drop = tuple(drop)
        self._secure = secure_aggregation
        self._uncovered = {_full_type(kind) for kind in uncovered}
        self._id = uuid.uuid4().hex  # also of its copies

    def __call__(
        self, message: Message, context: Context, call_next: Callable[[Message, Context], Message]
    ) -> Message:
        """Let the client train, and return what may leave.

        Raises:
            DefenseError: differential privacy of the client without a ledger, a share of its noise
                on what is not masked, or masks of a SecAgg+ that hide too little.
            ValueError: this mod stands before that of a secure aggregation.
            UpdateError: the message holds no model, or another one than the observer's.
        """
        kind = message.metadata.message_type
        dp = None if self._dp is None else self._dp(context)
        noises = dp is not None and dp.trust != "central"
        if kind.split(".")[0] != MessageType.TRAIN:
            if noises and _full_type(kind) not in self._uncovered:
                return _refuse(
                    message,
                    f"under a ClientDP that adds noise of its own this client answers training "
                    f"alone, and this is '{kind}'. What it holds of the client's data would be "
                    "under no noise: evaluate on the server (fraction_evaluate=0, evaluate_fn=). "
                    f"FedLeakMod(uncovered=['{kind}']) answers it, and no epsilon covers that",
                )
            return call_next(message, context)
        protocol = _read_masks(message, context)
        if dp is not None and noises and dp.ledger is None:
            raise DefenseError(
                "FedLeakMod: Flower may run each round of a client in another process, which would "
                "forget what earlier ones have released: give ClientDP(ledger=...), a path for "
                "each client"
            )
        masked = self._secure or protocol is not None
        if dp is not None and dp.trust == "secure_aggregation" and not masked:
            raise DefenseError(
                "FedLeakMod: ClientDP(trust='secure_aggregation') adds a share of the noise, and "
                "nothing here masks this message's update: it would leave with that share alone. "
                "Say mods=[secaggplus_mod, FedLeakMod(...)] and run SecAggPlusWorkflow on the "
                "server; FedLeakMod(secure_aggregation=True) where something else masks what "
                "leaves; or ClientDP(trust='local')"
            )
        observer, gates = self._watch_run(context)
        client = context.node_config.get("partition-id", context.node_id)
        outgoing = OutgoingUpdates(
            observer,
            gates,
            dp,
            client=client,
            drop=self._drop,
            secure_aggregation=masked,
        )
        codec = _Listed(message, observer) if _LISTED in message.content else _Named(message)
        if protocol is not None:
            names = parameter_names(observer.model)
            trained = {n for n, p in observer.model.named_parameters() if p.requires_grad}
            sent = [t for n, t in codec.sent.items() if names.get(n) in trained]
            _check_masks(protocol, dp, sent)
        with _keep_memory(observer, gates, client, context):
            return self._answer_training(
                outgoing, codec, message, lambda: call_next(message, context)
            )

    def _watch_run(self, context: Context) -> _Watch:
        """Return the observer of a run and its gates; each round may build this mod again."""
        run, watch = _WATCHES.get(self._id, (None, None))
        if run != context.run_id or watch is None:
            observer = self._make(context)
            observer.federation = observer.federation or f"flower-{context.run_id}"
            gates = self._gates(context) if callable(self._gates) else self._gates
            watch = observer, tuple(gates)
            _WATCHES[self._id] = context.run_id, watch
        return watch

    def _answer_training(
        self,
        outgoing: OutgoingUpdates,
        codec: _Named,
        message: Message,
        train: Callable[[], Message],
    ) -> Message:
        """Return the reply to a training message."""
        if outgoing.own is not None:
            leaving = self._train_under_noise(outgoing, codec, train)
            if leaving is None or leaving.state is None:
                return _refuse(message, "a gate ended this client's round")
            return Message(codec.alone(leaving.state, self._weight), reply_to=message)
        start = time.perf_counter()
        try:
            with recording() as batches:
                reply = train()
        except Exception as error:  # whose words, of private text perhaps, Flower would send on
            why = f"training failed: {reason(error)}"
            trace = "".join(traceback.format_tb(error.__traceback__))
            log.error("lightning-fedleak: %s\n%s", why, trace)  # lines of code, no words or values
            return _refuse(message, why)
        seconds = time.perf_counter() - start
        if reply.has_error():
            return reply
        leaving = _gate_update(outgoing, codec, codec.returned(reply), batches, seconds)
        if leaving is None:
            return _refuse(message, "a gate ended this client's round")
        if leaving.state is None:
            why = "; ".join(event.gate for event in leaving.events) or "the update cannot be read"
            return _refuse(message, f"withheld ({why})")
        codec.put(leaving.state, reply)
        return reply

    def _train_under_noise(
        self, outgoing: OutgoingUpdates, codec: _Named, train: Callable[[], Message]
    ) -> Leaving | None:
        """Return what leaves under noise that the client adds, in which a failure does not show."""
        start = time.perf_counter()
        try:
            with recording() as batches:
                reply = train()
            seconds = time.perf_counter() - start
            if reply.has_error():
                raise RuntimeError(reply.error.reason)
            returned = codec.returned(reply)
        except Exception as error:
            why = f"training failed: {reason(error)}"  # an exception's words may be private text
            log.error("lightning-fedleak: %s", why)
            return outgoing.nothing(codec.round_, codec.sent, why)
        return _gate_update(outgoing, codec, returned, batches, seconds)


class _Named:
    """Reads and writes the model in the messages of a round, which hold it by name.

    Attributes:
        round_: number of the round.
        sent: what the client got.
    """

    def __init__(self, message: Message) -> None:
        self._key, self.sent = _arrays_of(message)
        self.round_ = _round_of(message)

    def returned(self, reply: Message) -> State:
        """Return the model as the client has trained it."""
        return _arrays_of(reply)[1]

    def put(self, state: State, reply: Message) -> None:
        """Put ``state`` in place of the model in a reply."""
        [key] = reply.content.array_records
        reply.content[key] = ArrayRecord(dict(state))

    def alone(self, state: State, weight: str) -> RecordDict:
        """Return a reply that holds nothing but a model, and a weight of 1."""
        metrics = MetricRecord({weight: 1.0})
        return RecordDict({self._key: ArrayRecord(dict(state)), "metrics": metrics})


class _Listed(_Named):
    """Reads and writes the model in the messages of a NumPyClient: arrays one after the other."""

    def __init__(self, message: Message, observer: RoundObserver) -> None:
        group = message.metadata.group_id  # the round, in Flower's own workflows
        self.round_ = int(group) if group.isdecimal() else _round_of(message)
        arrays = _arrays_in(message, _LISTED)
        whole = {n: t.detach() for n, t in observer.model.state_dict().items()}
        shapes = [a.shape for a in arrays]
        for like in (trained_state(observer.model), whole):
            if [tuple(t.shape) for t in like.values()] == shapes:
                self._names = list(like)
                # A mean over clients is float64 in Flower; a client trains in its model's dtype.
                self.sent = {
                    n: a.to(t.dtype) for (n, t), a in zip(like.items(), arrays, strict=True)
                }
                return
        raise UpdateError(
            f"the {len(arrays)} arrays that were sent are not those of the observer's model: they "
            "must have the order and shapes of trained_state(model) or of model.state_dict()"
        )

    def returned(self, reply: Message) -> State:
        arrays = _arrays_in(reply, _LISTED_BACK)
        state = dict(zip(self._names, arrays, strict=False))
        return state | {f"array {n}": a for n, a in enumerate(arrays) if n >= len(self._names)}

    def put(self, state: State, reply: Message) -> None:
        reply.content[_LISTED_BACK] = compat.parameters_to_arrayrecord(self._list(state), False)

    def alone(self, state: State, weight: str) -> RecordDict:
        reply = FitRes(Status(Code.OK, ""), self._list(state), 1, {})
        return compat.fitres_to_recorddict(reply, False)

    def _list(self, state: State) -> Parameters:
        return ndarrays_to_parameters([state[n].cpu().numpy() for n in self._names])


@contextmanager
def _keep_memory(
    observer: RoundObserver, gates: Sequence[RoundGate], client: str | int, context: Context
) -> Iterator[None]:
    """Keep how often a gate has let unknown pass, and when the next look is due.

    The node's state holds them, because its next round may run in another process.
    """
    if _STATE in context.state.config_records:
        before = context.state.config_records[_STATE]
        for gate in gates:
            gate.unknown[client] = int(before.get(f"gate/{gate.name}", 0))
            if (round_ := before.get(f"unread/{gate.name}")) is not None:
                gate.unread[client] = int(round_)
        if _NEXT in before:
            observer.next_look[client] = int(before[_NEXT])
    try:
        yield
    finally:
        memory = {f"gate/{gate.name}": gate.unknown.get(client, 0) for gate in gates}
        memory |= {f"unread/{g.name}": g.unread[client] for g in gates if client in g.unread}
        if client in observer.next_look:
            memory[_NEXT] = observer.next_look[client]
        context.state.config_records[_STATE] = ConfigRecord(memory)


def _gate_update(
    outgoing: OutgoingUpdates,
    codec: _Named,
    returned: State,
    batches: Sequence[Any],
    seconds: float,
) -> Leaving | None:
    """Return what leaves, or None where a gate raised: its message would travel to the server."""
    try:
        return outgoing.leaves(codec.round_, codec.sent, returned, batches, seconds=seconds)
    except LeakageLimitExceeded as exceeded:
        log.error("%s", exceeded)
        return None


def _full_type(kind: str) -> str:
    """Return the full name of a message's type: ``"evaluate"`` is ``"evaluate.default"``."""
    return kind if "." in kind else f"{kind}.default"


def _read_masks(message: Message, context: Context) -> dict[str, Any] | None:
    """Return what SecAgg+ masks the reply to a training message with; None without SecAgg+.

    Its mod acts on messages of the type ``"train"`` alone, takes their stage out, and keeps its own
    state on the node, where the last stage before the masks is written until they are applied. A
    server can send any record, but not these together.

    Raises:
        ValueError: this mod stands before that of SecAgg+.
        DefenseError: the node takes part in SecAgg+, whose mod lets this message pass.
    """
    configs = message.content.config_records.get(RECORD_KEY_CONFIGS)
    if configs is not None and Key.STAGE in configs:
        raise ValueError(
            "FedLeakMod stands before the mod of a secure aggregation, where all that it would "
            "see is masked: say mods=[secaggplus_mod, FedLeakMod(...)]"
        )
    node_state = context.state.config_records.get(RECORD_KEY_STATE)
    if node_state is None:
        return None
    kind = message.metadata.message_type
    if (
        configs is None
        or kind != MessageType.TRAIN
        or node_state.get("current_stage") != Stage.SHARE_KEYS
    ):
        raise DefenseError(
            f"FedLeakMod: this node takes part in SecAgg+, whose mod would not mask the reply to "
            f"this message of type '{kind}': it is none of the protocol's. Train by "
            "SecAggPlusWorkflow alone"
        )
    # What the server sends now does not change the set-up.
    return dict(configs) | dict(node_state)


def _check_masks(
    protocol: Mapping[str, Any], dp: ClientDP | None, trained: Sequence[Tensor]
) -> None:
    """Refuse masks behind which the server sees more than the sum that the noise is made for.

    All of it is the server's to choose: who shares masks with this client, of how many at least a
    sum is unmasked, and how numbers are clipped and rounded to whole ones.

    Args:
        protocol: from :func:`_read_masks`.
        dp: of the client.
        trained: what was sent of what is trained.

    Raises:
        DefenseError: says which setting of the server's to change.
    """
    share = dp is not None and dp.trust == "secure_aggregation"
    least = max(LEAST_CLIENTS, int(dp.per_round) - dp.dropouts) if dp and share else LEAST_CLIENTS
    together = len({*protocol[Key.SOURCE_LIST], protocol["nid"]})
    if min(together, protocol["threshold"]) < least:
        raise DefenseError(
            f"FedLeakMod: SecAgg+ masks this update among {together} clients, and unmasks the sum "
            f"of {protocol['threshold']}, where at least {least} are needed for the noise that "
            f"each adds: give SecAggPlusWorkflow(num_shares=, reconstruction_threshold=) as many, "
            "or ClientReleaseSettings(dropouts=) so many as a sum may lack (in Flower one at least)"
        )
    modulus = protocol["mod_range"]
    if modulus < LEAST_MODULUS:
        raise DefenseError(
            f"FedLeakMod: SecAgg+ draws its masks below {modulus}, which hides too little: give "
            f"SecAggPlusWorkflow(modulus_range={LEAST_MODULUS})"
        )
    if dp is None or not share:
        return
    most = max((float(t.abs().max()) for t in trained), default=0.0) + dp.clip
    most = (most + SURE_DEVIATIONS * dp.own_noise_std) / abs(protocol["max_weight"])
    whole = 0 < protocol["target_range"] < 2**31  # its whole numbers have 32 bits
    if not (whole and most <= protocol["clipping_range"]):
        raise DefenseError(
            f"FedLeakMod: SecAgg+ clips numbers at {protocol['clipping_range']}, and those that "
            f"leave may be as large as {most:.3g}: the noise would be cut off with them. Give "
            "SecAggPlusWorkflow(clipping_range=..., max_weight=1)"
        )


def _refuse(message: Message, why: str) -> Message:
    """Return the answer of a client that returns no update."""
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
        """Hand ``configure_train`` on to the strategy inside."""
        return self.strategy.configure_train(server_round, arrays, config, grid)  # type: ignore[no-any-return, unused-ignore]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Hand ``aggregate_train`` on to the strategy inside."""
        return self.strategy.aggregate_train(server_round, replies)  # type: ignore[no-any-return, unused-ignore]

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Hand ``configure_evaluate`` on to the strategy inside."""
        return self.strategy.configure_evaluate(server_round, arrays, config, grid)  # type: ignore[no-any-return, unused-ignore]

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Hand ``aggregate_evaluate`` on to the strategy inside."""
        return self.strategy.aggregate_evaluate(server_round, replies)

    def summary(self) -> None:
        """Hand ``summary`` on to the strategy inside."""
        self.strategy.summary()


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
        truth: a simulation's: the batches that a client trained on in a round, by the client's
            number here and the round; None where nobody but the client knows.
        learning_rate: of a round, the mean over its local steps, where a schedule changes it; by
            default that of the observer's optimizer.
    """

    def __init__(
        self,
        strategy: Strategy,
        observer: RoundObserver,
        truth: Callable[[int, int], Sequence[Any] | None] | None = None,
        learning_rate: Callable[[int], float] | None = None,
    ) -> None:
        super().__init__(strategy)
        self.observer = observer
        self._rate = learning_rate
        self._truth = truth
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
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Look at each client's update, then at their mean, then let the strategy work.

        Where no client has sent a model, the one that was sent is the result: without it a
        federation in which every client always withholds would end with an empty one.
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
        mean = _Mean(self._sent)
        rate = None if self._rate is None else self._rate(server_round)
        all_batches: list[Any] | None = []
        for reply in sorted(arrived, key=lambda r: r.metadata.src_node_id):
            node = reply.metadata.src_node_id
            client = self._numbers.setdefault(node, len(self._numbers))
            if reply.has_error():
                log.info("lightning-fedleak: client %d sent nothing", client)
                continue
            state = _state_of(reply)
            batches = None if self._truth is None else self._truth(client, server_round)
            self.observer.look(state, client, batches=batches, learning_rate=rate)
            if not _can_be_averaged(state, self._sent):
                continue
            mean.add(state, _weight_of(reply, self.strategy))
            all_batches = (
                None if all_batches is None or batches is None else [*all_batches, *batches]
            )
        if mean.weight > 0:
            self.observer.look(mean.compute(), SUM, batches=all_batches, learning_rate=rate)


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
        trained = [n for n, t in self._sent.items() if t.is_floating_point()]
        updates = _Updates(self._nodes, replies, self._sent, trained)
        release = self.dp.mean(updates, {n: self._sent[n] for n in trained})
        for node, zero in (dict(release.zeros) | updates.why).items():
            place = self._nodes.index(node)
            log.info("lightning-fedleak: drawn client %d counts as zero: %s", place, zero)
        return ArrayRecord(moved(self._sent, release.update)), None


def _arrays_of(message: Message) -> tuple[str, dict[str, Tensor]]:
    """Return the key of the one model of a message, and the model.

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


def _arrays_in(message: Message, key: str) -> list[Tensor]:
    """Return the arrays of a message of the older interface, from the record of this key.

    Raises:
        UpdateError: it has no such record.
    """
    if key not in message.content.array_records:
        raise UpdateError(f"a NumPyClient's reply holds its arrays in '{key}'; this one does not")
    record = message.content.array_records[key]
    arrays = parameters_to_ndarrays(compat.arrayrecord_to_parameters(record, keep_input=True))
    return [torch.from_numpy(array) for array in arrays]


def _round_of(message: Message) -> int:
    for config in message.content.config_records.values():
        if ROUND in config:
            return int(config[ROUND])
    raise UpdateError(
        f"the message does not say which round it is of: the server's strategy must send '{ROUND}' "
        "in its ConfigRecord, as those of Flower do"
    )


def _state_of(reply: Message) -> dict[str, Tensor]:
    """Return the model of a reply; it is empty unless one model is there and can be read."""
    try:
        return _arrays_of(reply)[1]
    except Exception as error:  # whatever a client's bytes provoke
        log.info("lightning-fedleak: a reply holds no model: %s", reason(error))
        return {}


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


class _Mean:
    """Adds up the mean of models one by one; what is not a float stays as it was sent.

    Attributes:
        weight: sum of the weights.
    """

    def __init__(self, sent: State) -> None:
        self._sent = sent
        self._sum: dict[str, Tensor] = {}
        self.weight = 0.0

    def add(self, state: State, weight: float) -> None:
        """Add one more model with its weight."""
        self.weight += weight
        for name, tensor in state.items():
            if tensor.is_floating_point():
                if name not in self._sum:
                    self._sum[name] = torch.zeros_like(tensor, dtype=torch.float64)
                self._sum[name].add_(tensor, alpha=weight)

    def compute(self) -> dict[str, Tensor]:
        """Return the mean, in the dtypes that were sent."""
        mean = {n: t.div_(self.weight).to(self._sent[n].dtype) for n, t in self._sum.items()}
        return {n: mean.get(n, t) for n, t in self._sent.items()}


class _Updates(Mapping[int, Mapping[str, Tensor] | None]):
    """Reads the updates of the drawn clients one by one, so that only one is in memory.

    A client that sent nothing readable has None.

    Attributes:
        why: why an update that was read is no update, by node.
    """

    def __init__(
        self, nodes: Sequence[int], replies: Iterable[Message], sent: State, trained: Sequence[str]
    ) -> None:
        self._nodes = nodes
        self._replies = {r.metadata.src_node_id: r for r in replies if not r.has_error()}
        self._sent = sent
        self._trained = trained
        self.why: dict[int, str] = {}

    def __getitem__(self, node: int) -> Mapping[str, Tensor] | None:
        if node not in self._replies:
            return None
        try:
            return difference(self._sent, _state_of(self._replies[node]), trained=self._trained)
        except UpdateError as error:
            self.why[node] = str(error)
            return None

    def __iter__(self) -> Iterator[int]:
        return iter(self._nodes)

    def __len__(self) -> int:
        return len(self._nodes)
