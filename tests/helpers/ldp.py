"""The exact distribution of what a randomizer of tokens returns."""

import torch
from torch import Tensor

from lightning_fedleak.defenses.token_ldp.mechanisms import Randomizer


def transition_of(randomizer: Randomizer, epsilon: float) -> Tensor:
    """Return (k, k) float64: row x is the distribution of the output for input x."""
    k = randomizer.k
    if randomizer.decode != "first":
        keep = randomizer.keep(epsilon)
        transition = torch.full((k, k), (1.0 - keep) / (k - 1), dtype=torch.float64)
        return transition.fill_diagonal_(keep)
    p, q = randomizer._rates(epsilon)
    x, y = torch.arange(k)[:, None], torch.arange(k, dtype=torch.float64)[None, :]
    silent = 1.0 - q
    transition = torch.where(y < x, q * silent**y, (1.0 - p) * q * silent ** (y - 1))
    transition = torch.where(y == x, p * silent**y, transition)
    transition[:, 0] += (1.0 - p) * silent ** (k - 1)
    return transition
