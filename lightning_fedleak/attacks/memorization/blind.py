"""Scores that know nothing of the training: are members and non-members exchangeable?

If members can be distinguished from non-members before the first step, by the base model or by
their words, then a membership attack may read that difference and not the training. With
non-members that a random draw chose it is chance; with any other set of texts the comparison is
void.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_fedleak.attacks.memorization.scores import Loss, MinK, Zlib
from lightning_fedleak.model.snapshots import ReleasedModel, TokenSnapshot
from lightning_fedleak.model.taps import Text

FOLDS = 5  # of the cross-fitted word counts, the usual number; more: slower
MIN_BLIND_AUC, MAX_BLIND_AUC = 0.45, 0.55  # limits of the interval of each blind AUC


def blind_scores(
    base: TokenSnapshot, compressed: Tensor, texts: Sequence[Text], members: Tensor, seed: int = 0
) -> dict[str, Tensor]:
    """Return (N,) scores by name, none of which has seen the trained model.

    They are the base's loss, its zlib ratio and Min-K%++, the number of label tokens, and
    cross-fitted word counts.

    Args:
        base: what the base model said of the texts.
        compressed: (N,) bytes that zlib compresses each text to.
        texts: N texts.
        members: (N,) bool.
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
    """Return (N,) log odds a token that a text is a member, by its words alone.

    A multinomial naive Bayes classifier with one added count is fitted on the other folds. Each
    fold has its share of members.

    Args:
        texts: N texts.
        members: (N,) bool, with at least one member and one other in each of five folds.
        seed: The seed of the folds.
    """
    member = members.bool()
    ids, lengths = torch.cat([text.ids for text in texts]), [len(text.ids) for text in texts]
    owners = torch.arange(len(texts)).repeat_interleave(torch.tensor(lengths))
    folds = torch.empty(len(texts), dtype=torch.long)
    generator = torch.Generator().manual_seed(seed)
    for group in (member, ~member):
        order = torch.randperm(int(group.sum()), generator=generator)
        folds[group] = order % FOLDS
    scores = torch.empty(len(texts), dtype=torch.float64)
    for fold in range(FOLDS):
        inside, size = folds == fold, 1 + int(ids.max())
        rates = (_log_rates(ids[(~inside & side)[owners]], size) for side in (member, ~member))
        odds = next(rates) - next(rates)
        sums = torch.zeros_like(scores).index_add_(0, owners, odds[ids])
        scores[inside] = (sums / torch.tensor(lengths))[inside]
    return scores


def _log_rates(ids: Tensor, size: int) -> Tensor:
    """Return (size,) the log of each word's share of token ids, with one added."""
    totals = torch.bincount(ids, minlength=size).double() + 1
    return (totals / totals.sum()).log()
