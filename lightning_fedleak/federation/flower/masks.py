"""Secure aggregation by Flower's SecAgg+: what masks a reply, and messages behind the masks.

Flower has SecAgg+ for clients of its older interface alone: its mod and its workflow read and write
a model as a list of arrays without names.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.common import Code, FitRes, Status, ndarrays_to_parameters
from flwr.common.secure_aggregation.secaggplus_constants import (
    RECORD_KEY_CONFIGS,
    RECORD_KEY_STATE,
    Key,
    Stage,
)
from flwr.compat.common import recorddict_compat as compat
from torch import Tensor

from lightning_fedleak.defenses import DefenseError
from lightning_fedleak.federation import ClientDP, UpdateError
from lightning_fedleak.federation.flower.messages import (
    LISTED,
    ROUND,
    WEIGHT,
    arrays_in,
    arrays_of,
)

LEAST_MODULUS = 2**32
"""SecAgg+ draws masks below its modulus less one, so that a modulus of 2 masks nothing. This is
Flower's default; one number in so many then shows that its mask was not uniform."""
LEAST_CLIENTS = 2
"""Whose sum a mask may hide where no ClientDP says how many there are."""
SURE_DEVIATIONS = 8.0
"""Noise is beyond so many standard deviations once in 10**15 numbers."""


class SecAggMessages:
    """A Flower mod: lets a function of ``@app.train()`` take part in SecAgg+.

    The last mod of three. The function gets and returns the messages that Flower's strategies send
    without a secure aggregation, and its reply is masked::

        app = ClientApp(mods=[secaggplus_mod, FedLeakMod(make_observer, gates),
                              SecAggMessages(lambda context: trained_state(make_model()))])

        @app.train()
        def train(message, context):
            model.load_state_dict(message.content["arrays"].to_torch_state_dict(), strict=False)
            ...
            return Message(RecordDict({"arrays": ArrayRecord(trained_state(model)),
                                       "metrics": MetricRecord({"num-examples": 1})}),
                           reply_to=message)

    ``message.content["config"]`` holds what the strategy's ``on_fit_config_fn`` gives, and the
    number of the round as ``"server-round"``. The server runs ``SecAggPlusWorkflow``.

    A training message that SecAgg+ would not mask the reply to is refused before the function sees
    it. Of the function's metrics the weight alone leaves, as it is, since nothing masks metrics.

    Args:
        names: of the arrays that the server sends, in its order: those of ``trained_state(model)``,
            or of ``model.state_dict()``; or what returns them for a context.
        weight: the metric by which the server weighs clients, a whole number; 1 without it.
    """

    def __init__(
        self,
        names: Sequence[str] | Callable[[Context], Sequence[str] | Mapping[str, Tensor]],
        *,
        weight: str = WEIGHT,
    ) -> None:
        self._names = names
        self._weight = weight

    def __call__(
        self, message: Message, context: Context, call_next: Callable[[Message, Context], Message]
    ) -> Message:
        """Let the client train on a model by name, and return its reply as SecAgg+ reads it.

        Raises:
            DefenseError: SecAgg+ would not mask the reply to this training message.
            UpdateError: the arrays that were sent, or those of the reply, are not those of
                ``names``.
            ValueError: the weight is no whole number, or this mod stands before that of SecAgg+.
        """
        if message.metadata.message_type.split(".")[0] != MessageType.TRAIN:
            return call_next(message, context)
        if read_masks(message, context) is None:
            raise DefenseError(
                "SecAggMessages: nothing masks the reply to this message: this client trains under "
                "SecAgg+ alone. Say mods=[secaggplus_mod, FedLeakMod(...), SecAggMessages(...)], "
                "and run SecAggPlusWorkflow on the server"
            )
        names = list(self._names(context) if callable(self._names) else self._names)
        reply = call_next(self._name_arrays(message, names), context)
        if reply.has_error():
            return reply
        return Message(self._list_arrays(reply, names), reply_to=message)

    def _name_arrays(self, message: Message, names: list[str]) -> Message:
        """Return the message that Flower's strategies send: a model by name, and the settings."""
        arrays = arrays_in(message, LISTED)
        if len(arrays) != len(names):
            raise UpdateError(
                f"SecAggMessages: the server sent {len(arrays)} arrays, and names= has "
                f"{len(names)}: give those of trained_state(model), or of model.state_dict(), as "
                "the server's start has them"
            )
        group = message.metadata.group_id  # the round, in Flower's own workflows
        settings = {ROUND: int(group)} if group.isdecimal() else {}
        settings |= dict(message.content.config_records.get("fitins.config", {}))
        named = copy.copy(message)
        named.content = RecordDict(
            {
                "arrays": ArrayRecord(dict(zip(names, arrays, strict=True))),
                "config": ConfigRecord(settings),
            }
        )
        return named

    def _list_arrays(self, reply: Message, names: list[str]) -> RecordDict:
        """Return what a client of the older interface replies: arrays in the server's order."""
        state = arrays_of(reply)[1]
        if set(state) != set(names):
            different = sorted(set(state) ^ set(names))
            raise UpdateError(
                f"SecAggMessages: the train function returned {len(state)} arrays, where names= "
                f"has {len(names)}; in one of them alone are {', '.join(different[:3])}"
                f"{', ...' if len(different) > 3 else ''}: return the arrays that were sent"
            )
        weights = [
            r[self._weight] for r in reply.content.metric_records.values() if self._weight in r
        ]
        weight = weights[0] if weights else 1
        if isinstance(weight, list) or not float(weight).is_integer():
            raise ValueError(
                f"SecAggMessages: the metric '{self._weight}' is {weight!r}, and SecAgg+ weighs "
                "clients by whole numbers: return one, or 1 where all weigh alike"
            )
        arrays = ndarrays_to_parameters([state[name].numpy() for name in names])
        return compat.fitres_to_recorddict(
            FitRes(Status(Code.OK, "Success"), arrays, int(weight), {}), False
        )


def read_masks(message: Message, context: Context) -> dict[str, Any] | None:
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


def check_masks(
    protocol: Mapping[str, Any], dp: ClientDP | None, trained: Sequence[Tensor]
) -> None:
    """Refuse masks behind which the server sees more than the sum that the noise is made for.

    All of it is the server's to choose: who shares masks with this client, of how many at least a
    sum is unmasked, and how numbers are clipped and rounded to whole ones.

    Args:
        protocol: from :func:`read_masks`.
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
