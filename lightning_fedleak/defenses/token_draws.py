"""Replacements for words, from secret random streams."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from lightning_fedleak.defenses.ldp_mechanisms import Randomizer
from lightning_fedleak.defenses.ldp_reference import reference_sample
from lightning_fedleak.defenses.token_streams import uniforms

Implementation = Literal["torch", "multi-freq-ldpy"]


def draw(
    randomizer: Randomizer,
    index: Tensor,
    outside: Tensor | None,
    epsilon: float | Tensor,
    keys: Sequence[bytes],
    counts: Sequence[int],
    *,
    implementation: Implementation = "torch",
) -> Tensor:
    """One replacement for each word, as an index of the domain.

    Args:
        randomizer: mechanism, domain and decoding rule.
        index: (n,) int64, each word's index in the domain.
        outside: (n,) bool, words that the domain lacks: a uniform one of it goes into the mechanism
            in their place. None where there are none and could be none.
        epsilon: of each draw: one number, or (n,) float64.
        keys: of the random streams, each used for ``counts`` words in turn.
        counts: likewise; they add up to n.
        implementation: ``"multi-freq-ldpy"`` draws one by one by that package's clients.

    Returns:
        (n,) int64.

    Raises:
        ImportError: multi-freq-ldpy is not installed.
    """
    k = randomizer.k
    drawn = uniforms(keys, counts, randomizer.n_uniforms + (outside is not None))
    if outside is not None:
        index = torch.where(outside, (drawn[:, -1] * k).long().clamp_(max=k - 1), index)
    if implementation == "torch":
        return randomizer.sample(index, epsilon, drawn)
    each = torch.as_tensor(epsilon, dtype=torch.float64).expand(len(index))
    parts = zip(keys, *(torch.split(t, list(counts)) for t in (index, each)), strict=True)
    return torch.cat(
        [reference_sample(randomizer, i, e, int.from_bytes(key, "big")) for key, i, e in parts]
    )


__all__ = ["Implementation", "draw"]
