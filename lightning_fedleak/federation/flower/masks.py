"""What Flower's SecAgg+ masks a reply with, and whether that hides a client's share of noise.

An update under a share of noise may leave in a masked sum alone, and which message is masked, and
how, is the server's to choose: so the mod reads it off the node's own state before it answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flwr.app import Context, Message, MessageType
from flwr.common.secure_aggregation.secaggplus_constants import (
    RECORD_KEY_CONFIGS,
    RECORD_KEY_STATE,
    Key,
    Stage,
)
from torch import Tensor

from lightning_fedleak.defenses import DefenseError
from lightning_fedleak.federation import ClientDP

MIN_MODULUS = 2**32
"""SecAgg+ draws masks below its modulus less one, so that a modulus of 2 masks nothing. This is
Flower's default; one number in so many then shows that its mask was not uniform."""
MIN_CLIENTS = 2
"""Whose sum a mask may hide where no ClientDP says how many there are."""
SURE_DEVIATIONS = 8.0
"""Noise is beyond so many standard deviations once in 10**15 numbers."""


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
    kind, stage = message.metadata.message_type, node_state.get("current_stage")
    if configs is None or kind != MessageType.TRAIN or stage != Stage.SHARE_KEYS:
        raise DefenseError(
            f"FedLeakMod: this node takes part in SecAgg+, whose mod would not mask the reply to "
            f"this message of type '{kind}': train by SecAggPlusWorkflow alone"
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
    needed, share = MIN_CLIENTS, dp is not None and dp.trust == "secure_aggregation"
    if dp is not None and share:
        needed = max(needed, int(dp.per_round) - dp.dropouts)
    together = len({*protocol[Key.SOURCE_LIST], protocol["nid"]})
    modulus = protocol["mod_range"]
    if min(together, protocol["threshold"]) < needed or modulus < MIN_MODULUS:
        raise DefenseError(
            f"FedLeakMod: SecAgg+ masks this update among {together} clients by numbers below "
            f"{modulus}, and unmasks the sum of {protocol['threshold']}, where at least {needed} "
            "are needed: give SecAggPlusWorkflow(num_shares=, reconstruction_threshold=, "
            f"modulus_range={MIN_MODULUS}), or ClientReleaseSettings(dropouts=) of one at least"
        )
    if dp is None or not share:
        return
    largest = max((float(t.abs().max()) for t in trained), default=0.0) + dp.clip
    largest = (largest + SURE_DEVIATIONS * dp.own_noise_std) / abs(protocol["max_weight"])
    whole = 0 < protocol["target_range"] < 2**31  # its whole numbers have 32 bits
    if not (whole and largest <= protocol["clipping_range"]):
        raise DefenseError(
            f"FedLeakMod: SecAgg+ clips numbers at {protocol['clipping_range']}, and noise as "
            f"large as {largest:.3g} would be cut off: give SecAggPlusWorkflow(clipping_range=..., "
            "max_weight=1)"
        )
