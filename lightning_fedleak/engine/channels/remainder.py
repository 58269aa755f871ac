"""The remainder: what of a step's gradients the same step does not give when it is made again."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from lightning_fedleak.engine.channels.hidden import in_float64


def remainder_of(
    gradients: Mapping[str, Tensor], again: Mapping[str, Tensor]
) -> tuple[float, dict[str, Tensor]]:
    """Return the share of the gradients that recomputing does not explain, and each remainder.

    The remainders are whole: no difference is taken for rounding. They are in the scale of the
    recomputed step, and roles without one are absent. One factor is fitted for all gradients,
    because clipping by norm and a loss scale multiply all of them. It is exactly 1 if a gradient
    came out again bit by bit.

    Args:
        gradients: The gradients of a step, by role.
        again: The gradients of the recomputed step, by role; absent ones are 0.
    """
    dot = square = square_again = unexplained = 0.0
    factor, remainder = math.nan, dict[str, Tensor]()
    pairs = {r: (x, again[r] if r in again else torch.zeros_like(x)) for r, x in gradients.items()}
    for x, y in pairs.values():
        if torch.equal(x, y) and bool(x.any()):
            factor = 1.0
        first, second = in_float64(x), in_float64(y)
        dot += float((first * second).sum())
        square += float(first.square().sum())
        square_again += float(second.square().sum())
    if math.isnan(factor):  # brings the step's gradients nearest to the recomputed ones
        factor = square_again / dot if dot > 0 else 0.0
    if not 0 < factor < math.inf:
        return 1.0, {}
    for role, (x, y) in pairs.items():
        residual = torch.sub(in_float64(x) * factor, in_float64(y))
        if bool(residual.any()):
            unexplained += float(residual.square().sum())
            remainder[role] = residual.to(x.device, torch.promote_types(x.dtype, torch.float32))
    return min(1.0, math.sqrt(unexplained / square) / factor), remainder
