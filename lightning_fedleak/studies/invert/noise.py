"""Gaussian noise on the hidden states that a client sends, and how well the model works with it.

Zheng, Sect. 5.2.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_fedleak.anatomy import Anatomy
from lightning_fedleak.anatomy.text_layers import place_of
from lightning_fedleak.model_runs import hidden_states, undisturbed
from lightning_fedleak.validate import check_number

MASKED_SHARE = 0.15  # of the tokens of a text, as in BERT's pre-training
LOGITS_AT_ONCE = 1 << 25  # numbers, 128 MiB in float32; fewer take less memory and more runs
MOST_NATS = 700.0  # cross-entropy above which the perplexity would overflow a float


@dataclass(frozen=True)
class Noise:
    """Gaussian noise on what a client shares.

    Attributes:
        sigma: standard deviation.
        relative: whether it counts in a unit of what is shared: for hidden states in the standard
            deviations that the d dimensions have over the B * L states, for gradients in the root
            mean square of all entries. Else it is absolute, as in the paper.
        seed: of the draw, which is the same for every sigma.
    """

    sigma: float
    relative: bool
    seed: int = 0


def gaussian_noise(hidden: Tensor, noise: Noise) -> Tensor:
    """Return noise of the shape, dtype and device of hidden states (B, L, d).

    Raises:
        ValueError: a sigma that is negative or not finite.
    """
    check_number("sigma", noise.sigma, at_least=0)
    generator = torch.Generator().manual_seed(noise.seed)
    standard = torch.randn(hidden.shape, generator=generator).to(hidden.device)
    states = hidden.detach().flatten(0, 1).float()
    unit = states.std(0) if noise.relative else states.new_ones(())
    return (noise.sigma * standard * unit).to(hidden.dtype)


@contextmanager
def noised(anatomy: Anatomy, layer: int, noise: Tensor) -> Iterator[None]:
    """Let the model add ``noise`` (B, L, d) to its hidden states at ``layer``, within the context.

    Raises:
        ValueError: the model has no such layer.
    """
    handle = place_of(anatomy, layer).change_states(lambda states: states + noise)
    try:
        yield
    finally:
        handle.remove()


@dataclass(frozen=True)
class Utility:
    """Accuracy of the whole model from noised hidden states.

    Attributes:
        task: what ``accuracy`` is: ``"next-token accuracy"``, ``"masked-token accuracy"``, or, of
            an encoder without a head, ``"cosine of the pooled output"`` with that without noise.
        accuracy: mean over tokens, or over texts for the cosine.
        perplexity: of the tokens that are predicted; None where none are.
    """

    task: str
    accuracy: float
    perplexity: float | None = None


def utility(
    anatomy: Anatomy,
    layer: int,
    input_ids: Tensor,
    noise: Noise,
    *,
    mask_token_id: int | None = None,
    special_ids: Sequence[int] = (),
) -> Utility:
    """Return the accuracy of the whole model in eval mode with noise added at the split.

    A causal model predicts each next token. A masked one predicts 15% of the tokens of each text
    (one at least, no special ones), which ``mask_token_id`` stands for in its input: the hidden
    states that are noised are those of the masked text.

    Args:
        anatomy: of the model.
        layer: the split.
        input_ids: (B, L) texts without padding; L at least 2 for a causal model.
        noise: at the split; its seed is that of the choice of masked tokens too.
        mask_token_id: for a masked model.
        special_ids: never masked.

    Raises:
        ValueError: a text that is too short, a masked model without ``mask_token_id``, a model that
            is none of causal, masked and a plain encoder, or a layer that it has not.
    """
    ids = input_ids.to(anatomy.device)
    if anatomy.kind == "causal":
        if ids.shape[1] < 2:
            raise ValueError("texts of one token have no next token to predict: give longer ones")
        targeted = torch.zeros_like(ids, dtype=torch.bool)
        targeted[:, :-1] = True
        return _predictions(anatomy, layer, ids, ids.roll(-1, 1), targeted, "next-token", noise)
    if anatomy.kind == "masked" and anatomy.head is not None:
        if mask_token_id is None:
            raise ValueError("a masked model predicts the tokens that are masked: give its mask id")
        targeted = chosen_places(ids, special_ids, noise.seed)
        masked = ids.masked_fill(targeted, mask_token_id)
        return _predictions(anatomy, layer, masked, ids, targeted, "masked-token", noise)
    if anatomy.kind == "seq2seq":
        raise ValueError("utility is defined for causal models, masked models and plain encoders")
    return _pooled(anatomy, layer, ids, noise)


def chosen_places(ids: Tensor, special_ids: Sequence[int], seed: int) -> Tensor:
    """Return (B, L) bool: 15% of each text's tokens that are not special, at least one of each."""
    special = torch.tensor(list(special_ids), dtype=ids.dtype, device=ids.device)
    may = ~torch.isin(ids, special)
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(ids.shape, generator=generator).to(ids.device).masked_fill(~may, 2.0)
    rank = order.argsort(1).argsort(1)
    quota = (may.sum(1, keepdim=True) * MASKED_SHARE).ceil()
    return (rank < quota) & may


def _predictions(
    anatomy: Anatomy,
    layer: int,
    ids: Tensor,
    targets: Tensor,
    targeted: Tensor,
    task: str,
    noise: Noise,
) -> Utility:
    """Return accuracy and perplexity at the places ``targeted`` (B, L), in parts of the batch."""
    draw = gaussian_noise(hidden_states(anatomy, layer, ids), noise)
    vocabulary = anatomy.vocab_size or 1
    rows = max(1, LOGITS_AT_ONCE // (ids.shape[1] * vocabulary))
    right, nats = 0, 0.0
    with torch.no_grad(), undisturbed(anatomy) as model:
        for a in range(0, len(ids), rows):
            part = slice(a, a + rows)
            with noised(anatomy, layer, draw[part]):
                logits = model(input_ids=ids[part]).logits[targeted[part]].float()
            truth = targets[part][targeted[part]]
            right += int((logits.argmax(1) == truth).sum())
            nats += float(F.cross_entropy(logits, truth, reduction="sum"))
    n = int(targeted.sum())
    return Utility(f"{task} accuracy", right / n, math.exp(min(MOST_NATS, nats / n)))


def _pooled(anatomy: Anatomy, layer: int, ids: Tensor, noise: Noise) -> Utility:
    draw = gaussian_noise(hidden_states(anatomy, layer, ids), noise)
    with torch.no_grad(), undisturbed(anatomy) as model:
        states = model(input_ids=ids)[0]
        if states.dim() != 3:
            raise ValueError("a model with a head of classes: give the encoder without its head")
        clean = states.float().mean(1)
        with noised(anatomy, layer, draw):
            noisy = model(input_ids=ids)[0].float().mean(1)
    cosine = F.cosine_similarity(noisy, clean, dim=1).mean()
    return Utility("cosine of the pooled output", float(cosine))
