"""The gradient at the output of crafted layers, as if they stood behind a block (Vu et al. 2024).

Fig. 3 b: the output of the crafted layers, z (B, R, K), is added to the residual stream along one
fixed unit direction w: ``h <- h + scale * sum_k z_k w``. So the gradient of the loss at every z_k is
``scale * <dL/dh, w>`` for every rung (:func:`upstream_of`). w is random, not constant: a constant
lies in the null space of LayerNorm.

The server has to *choose the architecture*. A real LoRA adapter has neither a ReLU nor a bias, and
a Houlsby adapter one ReLU between two trained matrices: neither can be set to fire on one text
only, so these attacks do not reach a client who fixes the trained modules itself.

Only the rungs' biases are trained. The first layer W_1, which holds the target, and the second
layer's weights W_2 are frozen. The paper trains them too, but the attack reads only the gradient of
b_2. With the others frozen the shared update is smaller than that of any adapter, the target does
not drift during training, and under per-sample clipping no other part of the crafted layers takes a
share of the norm. A client can notice an adapter whose matrices are not trained. If they were
trained, W_2's gradient would show the same.
"""

from __future__ import annotations

import torch
from torch import Tensor


def upstream_of(
    delta: Tensor,
    direction: Tensor,
    scale: float,
    *,
    whole_sentence: bool = False,
    mask: Tensor | None = None,
) -> Tensor:
    """Return the gradient of the loss at the crafted layers' output, the same for all rungs.

    Args:
        delta: (B, L, d) gradient of the loss in the hidden states at ``layer``. With that of a run
            without the inserted layers the result is exact to first order in ``scale``, with that
            of a run with them exact.
        direction: (d,) w, from :func:`direction_of`.
        scale: factor of what is added.
        whole_sentence: for granularity ``"full"``, whose output is added at every real token.
        mask: (B, L), 0 where padded; read for ``whole_sentence`` only.

    Returns:
        (B, L), or (B, 1) with ``whole_sentence``; at least in float32.
    """
    dtype = torch.promote_types(delta.dtype, torch.float32)
    upstream = scale * (delta.to(dtype) * direction.to(delta.device, dtype)).sum(-1)
    if not whole_sentence:
        return upstream
    if mask is not None:
        upstream = upstream * (mask.to(upstream.device) != 0)
    return upstream.sum(1, keepdim=True)


def direction_of(width: int, seed: int = 0) -> Tensor:
    """Return the unit vector w, (width,), float64, drawn from its own generator."""
    normal = torch.randn(width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    unit: Tensor = normal / normal.norm()
    return unit
