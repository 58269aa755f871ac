"""Blind scores, which do not use the trained model: are members and non-members exchangeable?

If the base model's outputs or the words alone distinguish members from non-members, a membership
attack may measure this difference instead of the training. If a random draw chose the non-members,
such a difference is chance. With any other non-members, the comparison is invalid.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_fedleak.attacks.memorization.scores import Loss, MinK, Zlib
from lightning_fedleak.model.snapshots import ReleasedModel, TokenSnapshot
from lightning_fedleak.model.taps import Text

FOLDS = 5  # folds of the cross-fitted word counts, the usual number; more are slower
MIN_BLIND_AUC, MAX_BLIND_AUC = 0.45, 0.55  # limits of a blind AUC's interval, to be near chance


def blind_scores(
    base: TokenSnapshot, compressed: Tensor, texts: Sequence[Text], members: Tensor, seed: int = 0
) -> dict[str, Tensor]:
    """Return scores (N,) by name that do not use the trained model.

    They are minus the base's loss, its zlib ratio and Min-K%++, the number of label tokens, and
    cross-fitted word counts.

    Args:
        base: The base model's outputs for the texts.
        compressed: (N,) the zlib-compressed size of each text in bytes.
        texts: The N texts.
        members: (N,) bool, whether each text is a member.
        seed: The seed of the folds.
    """
    released = ReleasedModel(base, base, compressed)
    return {
        "loss": Loss().score(released),
        "zlib": Zlib().score(released),
        "min_k": MinK().score(released),
        "length": base.labels.sum(1).double(),
        "words": word_scores(texts, members, seed),
    }


def word_scores(texts: Sequence[Text], members: Tensor, seed: int = 0) -> Tensor:
    """Return (N,) the log odds per token that a text is a member, by its words alone.

    The score of a text is from a multinomial naive Bayes classifier with add-one smoothing, fitted
    on the other folds. The folds are stratified by membership.

    Args:
        texts: The N texts.
        members: (N,) bool, with at least one member and one non-member in each of five folds.
        seed: The seed of the folds.
    """
    labels = members.bool()
    ids, lengths = torch.cat([text.ids for text in texts]), [len(text.ids) for text in texts]
    owners = torch.arange(len(texts)).repeat_interleave(torch.tensor(lengths))
    folds = torch.empty(len(texts), dtype=torch.long)
    generator = torch.Generator().manual_seed(seed)
    for group in (labels, ~labels):
        order = torch.randperm(int(group.sum()), generator=generator)
        folds[group] = order % FOLDS
    scores = torch.empty(len(texts), dtype=torch.float64)
    for fold in range(FOLDS):
        inside, size = folds == fold, 1 + int(ids.max())
        rates = (_log_rates(ids[(~inside & side)[owners]], size) for side in (labels, ~labels))
        odds = next(rates) - next(rates)
        sums = torch.zeros_like(scores).index_add_(0, owners, odds[ids])
        scores[inside] = (sums / torch.tensor(lengths))[inside]
    return scores


def _log_rates(ids: Tensor, size: int) -> Tensor:
    """Return (size,) the log frequency of each token id, with add-one smoothing."""
    totals = torch.bincount(ids, minlength=size).double() + 1
    return (totals / totals.sum()).log()
