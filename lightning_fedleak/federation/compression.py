"""Compression of what leaves a client in a round, with error feedback from round to round."""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence

from torch import Tensor

from lightning_fedleak.defenses import Defense, DefenseError, GradientCompression
from lightning_fedleak.federation.client_dp import ClientDP
from lightning_fedleak.federation.updates import State, difference, moved
from lightning_fedleak.model.compression import AVERAGED


def client_compression(
    defenses: Sequence[Defense], dp: ClientDP | None
) -> GradientCompression | None:
    """Return a copy of the compression among an observer's defences, with a client's own memory.

    Args:
        defenses: of the observer.
        dp: client-level privacy of the same rounds.

    Raises:
        DefenseError: the noise would come after the compression, or be of a sum.
    """
    compression = next((d for d in defenses if isinstance(d, GradientCompression)), None)
    if compression is None:
        return None
    if dp is not None and dp.trust != "local":
        raise DefenseError(
            f"GradientCompression beside ClientDP(trust='{dp.trust}'): each client would compress "
            "before the noise is whole, and carry what is not noised into later rounds, which no "
            "account covers. Use ClientDP(trust='local'), whose noise comes first, or leave one of "
            "the two out"
        )
    own = copy.copy(compression)
    own.memory = {}
    return own


def compressed_state(
    compression: GradientCompression,
    sent: State,
    returned: State,
    trained: Collection[str],
    *,
    leaves: bool,
) -> dict[str, Tensor]:
    """Return what the server makes of a client's compressed update, by the names that were sent.

    Args:
        compression: the client's own.
        sent: what the client got.
        returned: what it would give back.
        trained: names of what is trained.
        leaves: remember what is left out; else nothing is remembered, as of a rehearsal.
    """
    update = difference(sent, returned, trained=trained)
    return moved(sent, compression.send(update) if leaves else compression.compressed(update)[0])


def seen_compression(defenses: Sequence[Defense], *, summed: bool) -> str:
    """Return how what the server sees was compressed, as attacks know it.

    Args:
        defenses: of the clients.
        summed: what is seen is a mean over clients.
    """
    methods = [(d.compression.method, d.defers) for d in defenses if d.compression is not None]
    averaged = summed or any(defers for _, defers in methods)
    return next((AVERAGED if averaged else method for method, _ in methods), "")
