"""A client's mod: what a client returns is attacked, gated and defended before it leaves."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, MessageType
from flwr.common.constant import ErrorCode
from flwr.common.secure_aggregation import secaggplus_constants as secagg
from torch import Tensor

from lightning_fedleak import federation
from lightning_fedleak.defenses import DefenseError
from lightning_fedleak.federation.flower.messages import WEIGHT, NamedArrays, read_sent
from lightning_fedleak.federation.updates import State

_Watch = tuple[federation.RoundObserver, tuple[federation.RoundGate, ...]]
_WATCHES: dict[str, tuple[int, _Watch]] = {}
"""The newest run of each mod, with its observer and gates in this process."""
_STATE = "lightning-fedleak"
_MEMORY = f"{_STATE}-compression"

MIN_MODULUS = 2**32
"""SecAgg+ draws masks below its modulus less one, so that a modulus of 2 masks nothing. This is
Flower's default; one number in so many then shows that its mask was not uniform."""
MIN_CLIENTS = 2
"""The smallest number of clients in an unmasked sum if no ClientDP requires more."""
MAX_DEVIATIONS = 8.0
"""Gaussian noise exceeds so many standard deviations once in 10**15 numbers."""


class FedLeakMod:
    """A Flower mod: what a client returns is attacked, gated and defended before it leaves.

    ::

        app = ClientApp(mods=[FedLeakMod(make_observer, [RoundGate("leakage/worst/words",
                                                                   at_most=0.3)])])

    The train function reports its batches, by :func:`~lightning_fedleak.federation.trained_on` in a
    training loop, or by the callback :class:`~lightning_fedleak.federation.TrainedOn`. Without
    reports every result is unknown, and an unknown result passes no gate.

    A client of the older interface (``NumPyClient``) sends arrays without names. They must be the
    values of ``trained_state(model)``, or of ``model.state_dict()``, in that order.

    A withheld update is answered with an error: the round goes on without this client, and says so.
    Under a ``dp`` whose noise the client adds, zero with that noise leaves instead, also if the
    train function fails, which the data may cause. Every reply then has the same form: the model,
    and a weight of 1 in place of metrics, which would reveal the data. Every other message
    (evaluate, query, parameters of the older interface) is answered with an error before the
    client's app sees it: the loss of a model that the server chose would leave without noise.

    **Secure aggregation** (``SecAgg+``): ``mods=[secaggplus_mod, FedLeakMod(...)]``, in this order,
    looks at the update before it is masked. A withheld update, or one that cannot be read, leaves
    as zero, masked like every other; see :class:`~lightning_fedleak.federation.OutgoingUpdates`. A
    function of ``@app.train()`` needs a mod behind it, ``examples/flower/secure_aggregation``.
    A node that takes part in SecAgg+ answers no training message that its mod does not mask, nor
    one whose masks hide the sum of fewer clients than the noise is meant for. The number of
    examples and the metrics are not masked by Flower, and leave as they are.

    Args:
        observer: a function that makes the :class:`RoundObserver` of this process from the first
            context of a run.
        gates: the gates of each client, or a function that makes them from the first context, for
            example from the run's configuration.
        dp: a function that makes a client's :class:`ClientDP` from its context in every round; None
            for no ClientDP. It needs a ledger, because Flower may run each round in another
            process.
        weight: the metric by which the server's strategy weighs clients.
        secure_aggregation: whether updates are masked by other means than Flower's SecAgg+. SecAgg+
            is detected in the messages.
    """

    def __init__(
        self,
        observer: Callable[[Context], federation.RoundObserver],
        gates: Sequence[federation.RoundGate]
        | Callable[[Context], Sequence[federation.RoundGate]] = (),
        dp: Callable[[Context], federation.ClientDP | None] | None = None,
        *,
        weight: str = WEIGHT,
        secure_aggregation: bool = False,
    ) -> None:
        self._make = observer
        self._gates = gates
        self._dp = dp
        self._weight = weight
        self._secure = secure_aggregation
        self._id = uuid.uuid4().hex  # also of its copies

    def __call__(
        self, message: Message, context: Context, call_next: Callable[[Message, Context], Message]
    ) -> Message:
        """Let the client train, and return what may leave.

        Raises:
            DefenseError: the ClientDP has no ledger, an update with a share of its noise is not
                masked, or the masks of a SecAgg+ hide the sum of too few clients.
            ValueError: this mod comes before the mod of a secure aggregation.
            UpdateError: the message holds no model, or a model that does not fit the observer's.
        """
        message_type = message.metadata.message_type
        dp = None if self._dp is None else self._dp(context)
        adds_noise = dp is not None and dp.trust != "central"
        if message_type.split(".")[0] != MessageType.TRAIN:
            if adds_noise:
                return _refuse(
                    message,
                    "under a ClientDP that adds noise of its own this client answers training "
                    f"alone, and not '{message_type}': evaluate on the server "
                    "(fraction_evaluate=0)",
                )
            return call_next(message, context)
        protocol = read_masks(message, context)
        is_masked = self._secure or protocol is not None
        if dp is not None and adds_noise:
            dp.check_client(
                masked=is_masked,
                mend="say mods=[secaggplus_mod, FedLeakMod(...)] and run SecAggPlusWorkflow on the "
                "server, or FedLeakMod(secure_aggregation=True) where something else masks it",
            )
        observer, gates = self._watch_run(context)
        outgoing = federation.OutgoingUpdates(
            observer,
            gates,
            dp,
            client=context.node_config.get("partition-id", context.node_id),
            secure_aggregation=is_masked,
        )
        codec = read_sent(message, observer)
        if protocol is not None:
            names = federation.parameter_names(observer.model)
            trained = {n for n, p in observer.model.named_parameters() if p.requires_grad}
            check_masks(protocol, dp, [t for n, t in codec.sent.items() if names.get(n) in trained])
        _recall(outgoing, context)
        try:
            return self._answer(outgoing, codec, message, lambda: call_next(message, context))
        finally:
            _remember(outgoing, context)

    def _watch_run(self, context: Context) -> _Watch:
        """Return the observer of a run and its gates; each round may make a new mod."""
        run, watch = _WATCHES.get(self._id, (None, None))
        if run != context.run_id or watch is None:
            observer = self._make(context)
            observer.federation = observer.federation or f"flower-{context.run_id}"
            gates = self._gates(context) if callable(self._gates) else self._gates
            watch = observer, tuple(gates)
            _WATCHES[self._id] = context.run_id, watch
        return watch

    def _answer(
        self,
        outgoing: federation.OutgoingUpdates,
        codec: NamedArrays,
        message: Message,
        call_next: Callable[[], Message],
    ) -> Message:
        """Return the reply to a training message."""
        replies: list[Message] = []

        def train() -> tuple[State, Sequence[object]]:
            with federation.recording() as batches:
                replies.append(call_next())
            if replies[0].has_error():
                raise RuntimeError(replies[0].error.reason)
            return codec.returned(replies[0]), batches

        leaving = outgoing.answer(codec.round_, codec.sent, train)
        if outgoing.dp is None and replies and replies[0].has_error():
            return replies[0]
        if leaving.state is None:
            return _refuse(message, leaving.answer)
        if outgoing.dp is not None:
            return Message(codec.alone(leaving.state, self._weight), reply_to=message)
        if not replies:
            replies.append(Message(codec.alone(leaving.state, self._weight), reply_to=message))
        codec.put(leaving.state, replies[0])
        return replies[0]


def _recall(outgoing: federation.OutgoingUpdates, context: Context) -> None:
    """Load this client's memory from the node: each round may run in another process."""
    outgoing.recall(context.state.config_records.get(_STATE))
    if outgoing.compression is not None and _MEMORY in context.state.array_records:
        tensors = context.state.array_records[_MEMORY].to_torch_state_dict()
        outgoing.compression.memory = dict(tensors)


def _remember(outgoing: federation.OutgoingUpdates, context: Context) -> None:
    """Store this client's memory on the node, for its next round."""
    if outgoing.compression is not None and outgoing.compression.memory:
        context.state.array_records[_MEMORY] = ArrayRecord(outgoing.compression.memory)
    context.state.config_records[_STATE] = ConfigRecord(outgoing.memory())


def _refuse(message: Message, why: str) -> Message:
    """Return the answer of a client that returns no update."""
    error = Error(ErrorCode.MOD_FAILED_PRECONDITION, f"lightning-fedleak: {why}")
    return Message(error, reply_to=message)


# ---- the masks of Flower's SecAgg+ ----------------------------------------------------------


def read_masks(message: Message, context: Context) -> dict[str, Any] | None:
    """Return the settings by which SecAgg+ masks the reply to a training message; None without it.

    The mod of SecAgg+ acts only on messages of the type ``"train"``. It removes their stage, and
    keeps its own state on the node. There the last stage before masking is stored until the masks
    are applied. A server can send any one of these records, but cannot make all of them agree.

    Raises:
        ValueError: this mod comes before the mod of SecAgg+.
        DefenseError: the node takes part in SecAgg+, and its mod does not mask this message.
    """
    configs = message.content.config_records.get(secagg.RECORD_KEY_CONFIGS)
    if configs is not None and secagg.Key.STAGE in configs:
        raise ValueError(
            "FedLeakMod stands before a secure aggregation: mods=[secaggplus_mod, FedLeakMod(...)]"
        )
    node_state = context.state.config_records.get(secagg.RECORD_KEY_STATE)
    if node_state is None:
        return None
    message_type, stage = message.metadata.message_type, node_state.get("current_stage")
    if configs is None or message_type != MessageType.TRAIN or stage != secagg.Stage.SHARE_KEYS:
        raise DefenseError(
            f"FedLeakMod: this node takes part in SecAgg+, whose mod would not mask the reply to "
            f"this message of type '{message_type}': train by SecAggPlusWorkflow alone"
        )
    # What the server sends now does not change the set-up.
    return dict(configs) | dict(node_state)


def check_masks(
    protocol: Mapping[str, Any], dp: federation.ClientDP | None, trained: Sequence[Tensor]
) -> None:
    """Refuse masks that hide the sum of fewer clients than the noise is made for.

    The server chooses all settings: the clients that share masks with this client, the smallest
    number of clients whose sum is unmasked, and the clipping and rounding of numbers.

    Args:
        protocol: the settings that :func:`read_masks` returns.
        dp: the client's ClientDP.
        trained: the trained tensors that were sent.

    Raises:
        DefenseError: the masks hide too little. The message names the server's setting to change.
    """
    min_clients, adds_share = MIN_CLIENTS, dp is not None and dp.trust == "secure_aggregation"
    if dp is not None and adds_share:
        min_clients = max(min_clients, int(dp.per_round) - dp.dropouts)
    n_clients = len({*protocol[secagg.Key.SOURCE_LIST], protocol["nid"]})
    modulus = protocol["mod_range"]
    if min(n_clients, protocol["threshold"]) < min_clients or modulus < MIN_MODULUS:
        raise DefenseError(
            f"FedLeakMod: SecAgg+ masks this update among {n_clients} clients by numbers below "
            f"{modulus}, and unmasks the sum of {protocol['threshold']}, where at least "
            f"{min_clients} are needed: give SecAggPlusWorkflow(num_shares=, "
            f"reconstruction_threshold=, modulus_range={MIN_MODULUS}), or "
            "ClientReleaseSettings(dropouts=) of one at least"
        )
    if dp is None or not adds_share:
        return
    largest = max((float(t.abs().max()) for t in trained), default=0.0) + dp.clip
    largest = (largest + MAX_DEVIATIONS * dp.own_noise_std) / abs(protocol["max_weight"])
    fits_int32 = 0 < protocol["target_range"] < 2**31  # SecAgg+ rounds to integers of 32 bits
    if not (fits_int32 and largest <= protocol["clipping_range"]):
        raise DefenseError(
            f"FedLeakMod: SecAgg+ clips numbers at {protocol['clipping_range']}, and noise as "
            f"large as {largest:.3g} would be cut off: give SecAggPlusWorkflow(clipping_range=..., "
            "max_weight=1)"
        )
