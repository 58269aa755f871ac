"""A Flower mod that attacks, gates and defends the update of a client before it leaves.

A mod wraps a client's app: it gets each message of the server first, and each reply last. Here a
:class:`~lightning_fedleak.federation.RoundObserver` attacks the update in the reply, *gates*
(thresholds on the results) may withhold it, and a ClientDP may add noise. SecAgg+ is Flower's
secure aggregation: it masks each update, so that the server can read only the sum.

Messages of Flower's current interface hold the model as arrays by name. Messages of the older
interface (``NumPyClient``) hold a list of arrays without names.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_fedleak import federation
from lightning_fedleak.defenses import DefenseError
from lightning_fedleak.extras import require_package
from lightning_fedleak.federation.observer import RoundObserver
from lightning_fedleak.federation.updates import State, UpdateError, trained_state
from lightning_fedleak.messages import rank_zero_warn

with require_package("flower", "lightning_fedleak.federation.flower needs Flower"):
    from flwr import app, common
    from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MessageType, MetricRecord
    from flwr.common.constant import ErrorCode
    from flwr.common.secure_aggregation import secaggplus_constants as secagg
    from flwr.compat.common import recorddict_compat as compat

# The keys by which Flower's strategies send the round's number and weigh the clients, by default.
ROUND = "server-round"
WEIGHT = "num-examples"

# The keys of the model in messages of the older interface: sent to a client, and in its reply.
LISTED, _LISTED_REPLY = "fitins.parameters", "fitres.parameters"


class _Arrays(Mapping[str, Tensor]):
    """A mapping that decodes an array of a record only when it is read.

    Args:
        record: the record of a message.
    """

    def __init__(self, record: ArrayRecord) -> None:
        self._record = record

    def __getitem__(self, name: str) -> Tensor:
        return torch.from_numpy(self._record[name].numpy())

    def __iter__(self) -> Iterator[str]:
        return iter(self._record)

    def __len__(self) -> int:
        return len(self._record)


class NamedArrays:
    """Reads the model of a training message, and reads and writes the model of the reply.

    Both messages hold the model by name.

    Args:
        message: the training message that the server sent.

    Attributes:
        round_: the number of the round.
        sent_state: the model that the server sent.
    """

    def __init__(self, message: Message) -> None:
        self._key, arrays = arrays_of(message)
        self.sent_state: dict[str, Tensor] = dict(arrays)
        self.round_ = _round_of(message)

    def read_reply(self, reply: Message) -> State:
        """Return the model that the client has trained."""
        return dict(arrays_of(reply)[1])

    def replace_model(self, state: State, reply: Message) -> None:
        """Replace the model in a reply by ``state``."""
        [key] = reply.content.array_records
        reply.content[key] = ArrayRecord(dict(state))

    def make_content(self, state: State, weight: str) -> app.RecordDict:
        """Return the content of a reply that holds only a model and a weight of 1.

        Args:
            state: the model.
            weight: the name of the weight among the metrics.
        """
        metrics = MetricRecord({weight: 1.0})
        return app.RecordDict({self._key: ArrayRecord(dict(state)), "metrics": metrics})


class _ListedArrays(NamedArrays):
    """Does the same for the messages of a NumPyClient, which hold arrays without names.

    Args:
        message: the training message that the server sent.
        observer: the observer, whose model has the names, in the order of the arrays.
    """

    def __init__(self, message: Message, observer: RoundObserver) -> None:
        group = message.metadata.group_id  # the round's number, in Flower's own workflows
        self.round_ = int(group) if group.isdecimal() else _round_of(message)
        arrays = arrays_in(message, LISTED)
        full_state = {n: t.detach() for n, t in observer.model.state_dict().items()}
        shapes = [a.shape for a in arrays]
        for candidate in (trained_state(observer.model), full_state):
            if [tuple(t.shape) for t in candidate.values()] == shapes:
                self._names = list(candidate)
                # A mean over clients is float64 in Flower; a client trains in its model's dtype.
                self.sent_state = {
                    n: a.to(t.dtype) for (n, t), a in zip(candidate.items(), arrays, strict=True)
                }
                return
        raise UpdateError(
            f"the {len(arrays)} arrays that the server sent have neither the order and shapes of "
            "trained_state(model) nor those of model.state_dict(), for the observer's model"
        )

    def read_reply(self, reply: Message) -> State:
        arrays = arrays_in(reply, _LISTED_REPLY)
        state = dict(zip(self._names, arrays, strict=False))
        return state | {f"array {n}": a for n, a in enumerate(arrays) if n >= len(self._names)}

    def replace_model(self, state: State, reply: Message) -> None:
        # False: Flower may free each array as soon as it is converted.
        reply.content[_LISTED_REPLY] = compat.parameters_to_arrayrecord(self._list(state), False)

    def make_content(self, state: State, weight: str) -> app.RecordDict:
        # The older interface's form of a weight of 1 (one example) and no metrics.
        reply = common.FitRes(common.Status(common.Code.OK, ""), self._list(state), 1, {})
        return compat.fitres_to_recorddict(reply, False)

    def _list(self, state: State) -> common.Parameters:
        """Return the arrays of a model in the order in which the server sent them."""
        return common.ndarrays_to_parameters([state[n].cpu().numpy() for n in self._names])


def arrays_of(message: Message) -> tuple[str, _Arrays]:
    """Return the key of the model in a message, and the model.

    Raises:
        UpdateError: the message holds no model, or several models.
    """
    records = message.content.array_records
    if len(records) != 1:
        raise UpdateError(f"a message holds one model, and this one has {len(records)}")
    [(key, record)] = records.items()
    return key, _Arrays(record)


def arrays_in(message: Message, key: str) -> list[Tensor]:
    """Return the arrays in the record ``key`` of a message of the older interface."""
    record = message.content.array_records[key]
    parameters = compat.arrayrecord_to_parameters(record, keep_input=True)
    return [torch.from_numpy(array) for array in common.parameters_to_ndarrays(parameters)]


def _round_of(message: Message) -> int:
    """Return the number of the round that a message states."""
    for config in message.content.config_records.values():
        if ROUND in config:
            return int(config[ROUND])
    raise UpdateError(
        f"the message does not state its round: the server's strategy must send '{ROUND}' in the "
        "ConfigRecord, as Flower's strategies do"
    )


_Watch = tuple[federation.RoundObserver, tuple[federation.RoundGate, ...]]
# The newest run of each mod in this process: by the mod's id, the run's id, observer and gates.
_WATCHES: dict[str, tuple[int, _Watch]] = {}
# The keys of the records that a node keeps for its client from round to round: the client's state,
# and the error memory of its compression.
_STATE_KEY = "lightning-fedleak"
_COMPRESSION_KEY = f"{_STATE_KEY}-compression"

# The smallest modulus of SecAgg+ that is accepted: Flower's default. Masks are drawn uniformly from
# [0, modulus - 1), so that the largest value never occurs: with a modulus of 2 every mask is 0, and
# with this one the missing value shows in about one of 2**32 numbers.
MIN_MODULUS = 2**32
# The smallest number of clients in an unmasked sum if no ClientDP requires more.
MIN_CLIENTS = 2
# The number of standard deviations of noise for which SecAgg+ must have room before it clips.
# Gaussian noise exceeds them in about one of 10**15 numbers.
MAX_DEVIATIONS = 8.0


class FedLeakMod:
    """A Flower mod that attacks, gates and defends the update of a client before it leaves.

    ::

        app = ClientApp(mods=[FedLeakMod(make_observer, [RoundGate("leakage/worst/words",
                                                                   at_most=0.3)])])

    The train function reports its batches, by :func:`~lightning_fedleak.federation.trained_on` in a
    training loop, or by the callback :class:`~lightning_fedleak.federation.TrainedOn`. Without
    reports every result is unknown, and an unknown result passes no gate.

    A client of the older interface (``NumPyClient``) sends arrays without names. They must be the
    values of ``trained_state(model)``, or of ``model.state_dict()``, in that order.

    If a gate withholds the update, the reply is an error, and the round goes on without this
    client. Under a ``dp`` whose noise the client adds, the reply is a zero update with that noise
    instead. It is also the reply if the train function fails, since the data may cause a failure.
    Every reply then has the same form: the model, and a weight of 1 in place of metrics, which
    would reveal the data. Every other message (evaluate, query, parameters of the older interface)
    is answered with an error before the client's app sees it: the loss of a model that the server
    chose would leave without noise.

    **Secure aggregation** (``SecAgg+``): ``mods=[secaggplus_mod, FedLeakMod(...)]``, in this order,
    attacks the update before it is masked. A withheld or unreadable update is replaced by zero,
    masked like every other update; see :class:`~lightning_fedleak.federation.OutgoingUpdates`. A
    function of ``@app.train()`` also needs the mod in ``examples/flower/secure_aggregation``, as
    the last of the three. Once a node takes part in SecAgg+, a training message is refused if
    SecAgg+ would not mask the reply, or would unmask the sum of fewer clients than the noise is
    meant for. Flower does not mask the number of examples and the metrics: they are sent as they
    are.

    Args:
        observer: a function that makes the :class:`RoundObserver` of this process from the first
            context of a run.
        gates: the gates of each client, or a function that makes them from the first context, for
            example from the run's configuration.
        dp: a function that makes a client's :class:`ClientDP` from its context in every round, or
            returns None for a client without one; None if no client has a ClientDP. Strategies of
            Flower need replies with the same metrics, so that either all clients add noise or none.
            The ClientDP needs a ledger, because Flower may run each round in another process.
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
        self._make_observer = observer
        self._gates = gates
        self._make_dp = dp
        self._weight = weight
        self._is_masked_otherwise = secure_aggregation
        self._id = uuid.uuid4().hex  # shared by copies of this mod, which a round may use

    def __call__(
        self, message: Message, context: Context, call_next: Callable[[Message, Context], Message]
    ) -> Message:
        """Let the client train, and return the reply that may leave.

        Raises:
            DefenseError: the ClientDP has no ledger, an update with a share of its noise is not
                masked, or SecAgg+ would unmask the sum of too few clients.
            ValueError: this mod comes before the mod of a secure aggregation.
            UpdateError: the message holds no model, or one that does not fit the observer's model.
        """
        message_type = message.metadata.message_type
        dp = None if self._make_dp is None else self._make_dp(context)
        adds_noise = dp is not None and dp.trust != "central"
        if message_type.split(".")[0] != MessageType.TRAIN:
            if adds_noise:
                return _refuse(
                    message,
                    "under a ClientDP whose noise the client adds, the client answers only "
                    f"training, and not '{message_type}': evaluate on the server "
                    "(fraction_evaluate=0)",
                )
            return call_next(message, context)
        client = context.node_config.get("partition-id", context.node_id)
        protocol = read_masks(message, context)
        is_masked = self._is_masked_otherwise or protocol is not None
        if dp is not None and adds_noise:
            dp.check_client(
                masked=is_masked,
                mend="pass mods=[secaggplus_mod, FedLeakMod(...)] and run SecAggPlusWorkflow on "
                "the server, or FedLeakMod(secure_aggregation=True) if something else masks it",
            )
            rank_zero_warn(
                f"FedLeakMod: client {client} has a ClientDP and sends '{self._weight}' as its "
                "only metric: give all clients a ClientDP, or none, else Flower ends the run"
            )
        observer, gates = self._watch_run(context)
        outgoing = federation.OutgoingUpdates(
            observer, gates, dp, client=client, secure_aggregation=is_masked
        )
        is_listed = LISTED in message.content
        codec = _ListedArrays(message, observer) if is_listed else NamedArrays(message)
        if protocol is not None:
            names = federation.parameter_names(observer.model)
            trained = {n for n, p in observer.model.named_parameters() if p.requires_grad}
            tensors = codec.sent_state.items()
            check_masks(protocol, dp, [t for n, t in tensors if names.get(n) in trained])
        _recall(outgoing, context)
        try:
            return self._answer(outgoing, codec, message, lambda: call_next(message, context))
        finally:
            _remember(outgoing, context)

    def _watch_run(self, context: Context) -> _Watch:
        """Return the observer and gates of a run. They are kept outside of this mod, see `_id`."""
        run_id, watch = _WATCHES.get(self._id, (None, None))
        if run_id != context.run_id or watch is None:
            observer = self._make_observer(context)
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
            return codec.read_reply(replies[0]), batches

        leaving = outgoing.answer(codec.round_, codec.sent_state, train)
        if outgoing.dp is None and replies and replies[0].has_error():
            return replies[0]
        if leaving.state is None:
            return _refuse(message, leaving.answer)
        if outgoing.dp is not None or not replies:
            return Message(codec.make_content(leaving.state, self._weight), reply_to=message)
        codec.replace_model(leaving.state, replies[0])
        return replies[0]


def _recall(outgoing: federation.OutgoingUpdates, context: Context) -> None:
    """Load this client's state from the node: each round may run in another process."""
    outgoing.recall(context.state.config_records.get(_STATE_KEY))
    if outgoing.compression is not None and _COMPRESSION_KEY in context.state.array_records:
        tensors = context.state.array_records[_COMPRESSION_KEY].to_torch_state_dict()
        outgoing.compression.memory = dict(tensors)


def _remember(outgoing: federation.OutgoingUpdates, context: Context) -> None:
    """Store this client's state on the node, for its next round."""
    if outgoing.compression is not None and outgoing.compression.memory:
        context.state.array_records[_COMPRESSION_KEY] = ArrayRecord(outgoing.compression.memory)
    context.state.config_records[_STATE_KEY] = ConfigRecord(outgoing.memory())


def _refuse(message: Message, cause: str) -> Message:
    """Return an error as the reply to a message, with the cause in it."""
    error = app.Error(ErrorCode.MOD_FAILED_PRECONDITION, f"lightning-fedleak: {cause}")
    return Message(error, reply_to=message)


# ---- the masks of Flower's SecAgg+ ----------------------------------------------------------


def read_masks(message: Message, context: Context) -> dict[str, Any] | None:
    """Return the settings by which SecAgg+ masks the reply to a training message; None without it.

    SecAgg+ masks the reply only if three facts agree. Its mod acts only on messages of the type
    ``"train"``. It removes the stage of the protocol from such a message. And it keeps its state on
    the node, where the stage before masking is stored until the masks are applied. A server could
    forge one of these facts in its messages, but not all of them.

    Raises:
        ValueError: this mod comes before the mod of SecAgg+.
        DefenseError: the node takes part in SecAgg+, whose mod would not mask the reply.
    """
    configs = message.content.config_records.get(secagg.RECORD_KEY_CONFIGS)
    if configs is not None and secagg.Key.STAGE in configs:
        raise ValueError(
            "FedLeakMod comes before the mod of a secure aggregation, and would see masked "
            "numbers: pass mods=[secaggplus_mod, FedLeakMod(...)]"
        )
    node_state = context.state.config_records.get(secagg.RECORD_KEY_STATE)
    if node_state is None:
        return None
    message_type, stage = message.metadata.message_type, node_state.get("current_stage")
    if configs is None or message_type != MessageType.TRAIN or stage != secagg.Stage.SHARE_KEYS:
        raise DefenseError(
            f"FedLeakMod: this node takes part in SecAgg+, whose mod would not mask the reply to "
            f"this message of type '{message_type}': train only by SecAggPlusWorkflow"
        )
    # The node's state was set up earlier, and overrides settings that the server sends now.
    return dict(configs) | dict(node_state)


def check_masks(
    protocol: Mapping[str, Any], dp: federation.ClientDP | None, trained: Sequence[Tensor]
) -> None:
    """Refuse settings of SecAgg+ under which the masks or the noise would not protect the client.

    The server chooses all settings: the clients that share masks with this client, the smallest
    number of clients whose sum is unmasked, and the clipping and rounding of numbers. The sum must
    hold as many shares of noise as the ClientDP accounts for, and no noise may be clipped.

    Args:
        protocol: the settings that :func:`read_masks` returns.
        dp: the client's ClientDP.
        trained: the trained tensors that were sent.

    Raises:
        DefenseError: a setting protects too little. The message names the server's setting.
    """
    min_clients, adds_share = MIN_CLIENTS, dp is not None and dp.trust == "secure_aggregation"
    if dp is not None and adds_share:
        min_clients = max(min_clients, int(dp.per_round) - dp.dropouts)
    # Counts this client ("nid" is its node's id), and the clients whose masks it shares.
    n_clients = len({*protocol[secagg.Key.SOURCE_LIST], protocol["nid"]})
    modulus = protocol["mod_range"]
    if min(n_clients, protocol["threshold"]) < min_clients or modulus < MIN_MODULUS:
        raise DefenseError(
            f"FedLeakMod: SecAgg+ masks this update among {n_clients} clients by numbers below "
            f"{modulus}, and may unmask the sum of {protocol['threshold']} clients. At least "
            f"{min_clients} clients and numbers below {MIN_MODULUS} are needed: give "
            "SecAggPlusWorkflow(num_shares=, reconstruction_threshold=, modulus_range=), or allow "
            "at least one dropout by ClientReleaseSettings(dropouts=)"
        )
    if dp is None or not adds_share:
        return
    largest = max((float(t.abs().max()) for t in trained), default=0.0) + dp.clip
    largest = (largest + MAX_DEVIATIONS * dp.own_noise_std) / abs(protocol["max_weight"])
    fits_int32 = 0 < protocol["target_range"] < 2**31  # SecAgg+ rounds to 32-bit integers
    if not (fits_int32 and largest <= protocol["clipping_range"]):
        raise DefenseError(
            f"FedLeakMod: SecAgg+ clips numbers at {protocol['clipping_range']}, but noise makes "
            f"them as large as {largest:.3g}, or its {protocol['target_range']} steps do not fit "
            "into 32 bits: give SecAggPlusWorkflow(clipping_range=..., quantization_range=..., "
            "max_weight=1)"
        )
