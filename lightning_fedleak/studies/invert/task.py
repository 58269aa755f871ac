"""How well the top model works with noised hidden states."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_fedleak.anatomy import Anatomy
from lightning_fedleak.model_runs import hidden_states, undisturbed
from lightning_fedleak.studies.invert.noise import gaussian_noise, noised

MASKED_SHARE = 0.15  # of the tokens of a text, as in BERT's pre-training
LOGITS_AT_ONCE = 1 << 25  # numbers, 128 MiB in float32; fewer take less memory and more runs
MOST_NATS = 700.0  # cross-entropy above which the perplexity would overflow a float


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
    sigma: float,
    *,
    relative: bool,
    seed: int = 0,
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
        sigma: of the noise, as in :func:`~lightning_fedleak.studies.invert.noise.gaussian_noise`.
        relative: as there.
        seed: of the noise, and of the choice of masked tokens.
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
        targets = ids.roll(-1, 1)
        return _predictions(
            anatomy, layer, ids, targets, targeted, "next-token", sigma, relative, seed
        )
    if anatomy.kind == "masked" and anatomy.head is not None:
        if mask_token_id is None:
            raise ValueError("a masked model predicts the tokens that are masked: give its mask id")
        targeted = chosen_places(ids, special_ids, seed)
        masked = ids.masked_fill(targeted, mask_token_id)
        return _predictions(
            anatomy, layer, masked, ids, targeted, "masked-token", sigma, relative, seed
        )
    if anatomy.kind == "seq2seq":
        raise ValueError("utility is defined for causal models, masked models and plain encoders")
    return _pooled(anatomy, layer, ids, sigma, relative, seed)


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
    sigma: float,
    relative: bool,
    seed: int,
) -> Utility:
    """Return accuracy and perplexity at the places ``targeted`` (B, L), in parts of the batch."""
    noise = gaussian_noise(hidden_states(anatomy, layer, ids), sigma, relative=relative, seed=seed)
    vocabulary = anatomy.vocab_size or 1
    rows = max(1, LOGITS_AT_ONCE // (ids.shape[1] * vocabulary))
    right, nats = 0, 0.0
    with torch.no_grad(), undisturbed(anatomy) as model:
        for a in range(0, len(ids), rows):
            part = slice(a, a + rows)
            with noised(anatomy, layer, noise[part]):
                logits = model(input_ids=ids[part]).logits[targeted[part]].float()
            truth = targets[part][targeted[part]]
            right += int((logits.argmax(1) == truth).sum())
            nats += float(F.cross_entropy(logits, truth, reduction="sum"))
    n = int(targeted.sum())
    return Utility(f"{task} accuracy", right / n, math.exp(min(MOST_NATS, nats / n)))


def _pooled(
    anatomy: Anatomy, layer: int, ids: Tensor, sigma: float, relative: bool, seed: int
) -> Utility:
    noise = gaussian_noise(hidden_states(anatomy, layer, ids), sigma, relative=relative, seed=seed)
    with torch.no_grad(), undisturbed(anatomy) as model:
        states = model(input_ids=ids)[0]
        if states.dim() != 3:
            raise ValueError("a model with a head of classes: give the encoder without its head")
        clean = states.float().mean(1)
        with noised(anatomy, layer, noise):
            noisy = model(input_ids=ids)[0].float().mean(1)
    cosine = F.cosine_similarity(noisy, clean, dim=1).mean()
    return Utility("cosine of the pooled output", float(cosine))
