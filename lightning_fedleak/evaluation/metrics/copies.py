"""Runs of tokens that rows and generated texts have in common: rows trained on, and rows held out.

What rows that were held out have in common with the texts is no disclosure, and says how much of
the rest is none (Amin et al. 2026, arXiv 2606.16952).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from scipy.stats import fisher_exact
from torch import Tensor

from lightning_fedleak.evaluation.canaries.repeats import RUN
from lightning_fedleak.evaluation.metrics.released import membership_values
from lightning_fedleak.model.taps import Text

# Tokens of an n-gram whose share is counted. Of 2 to 6 it told most on a draw of WikiText-2 that no
# table reports (benchmarks.attacks.synthetic): AUC .92, and .79 with 4.
NGRAM = 2
COPIES = "longest_copy", "shared_ngrams"  # the names of both scores of _Copies, in its order


class _Copies(NamedTuple):
    """What each of N rows has in common with a set of texts, token for token.

    Attributes:
        longest: (N,) int64, the tokens of the row's longest run that stands in one of the texts.
        shares: (N,) float64, the share of the row's n-grams that stand in the texts; 0 for a row
            that has none.
    """

    longest: Tensor
    shares: Tensor


def find_copies(rows: Sequence[Text], generated: Sequence[Text], size: int = NGRAM) -> _Copies:
    """Return the copies of rows in generated texts.

    Tokens without a label are in no run. Runs are compared exactly, and not by a hash. Each length
    takes time that is linear in the tokens, but for sorting, and only runs that rows and texts have
    in common are made longer.

    Args:
        rows: N rows, at least one.
        generated: the texts.
        size: tokens of an n-gram.

    Examples:
        >>> import torch
        >>> from lightning_fedleak.evaluation.metrics.copies import find_copies
        >>> from lightning_fedleak.model.taps.tokens import Text
        >>> row, other, copy = (torch.tensor(ids) for ids in ([1, 2, 3, 4], [5, 6], [9, 1, 2, 3]))
        >>> find_copies([Text(row, row), Text(other, other)], [Text(copy, copy)], size=2).shares
        tensor([0.6667, 0.0000], dtype=torch.float64)
    """
    parts, owners = [], []
    for mark, texts in enumerate((rows, generated)):
        end = torch.tensor([mark])  # a token that the other side does not have, behind each text
        for number, text in enumerate(texts):
            labels = text.labels + 2
            parts.append(torch.cat([torch.where(labels < 2, mark, labels), end]))
            owners.append(torch.full((len(parts[-1]),), number))
    tokens, owner = torch.cat(parts), torch.cat(owners)
    border, length = sum(map(len, parts[: len(rows)])), 0
    longest, shares = torch.zeros(len(rows), dtype=torch.long), torch.zeros(len(rows)).double()
    starts, names = torch.arange(len(tokens)), torch.zeros_like(tokens)
    width = int(tokens.max()) + 1
    while True:
        # Runs of one more token have one name where the shorter ones had one, and the token is one.
        names = torch.unique(names * width + tokens[starts + length], return_inverse=True)[1]
        common = torch.ones(int(names.max()) + 1, dtype=torch.bool)
        for side in (starts < border, starts >= border):
            common &= torch.bincount(names[side], minlength=len(common)) > 0
        starts, names, length = starts[common[names]], names[common[names]], length + 1
        if not len(starts):
            return _Copies(longest, shares)
        inside = owner[starts[starts < border]]
        longest[inside] = length
        if length == size:
            lengths = torch.tensor([len(part) - 1 for part in parts[: len(rows)]])
            n_grams = (lengths - size + 1).clamp_min(1)
            shares = torch.bincount(inside, minlength=len(rows)).double() / n_grams


def copy_values(copies: _Copies, members: Tensor, alpha: float) -> dict[str, dict[str, float]]:
    """Return what copies show of rows that were trained on beside rows that were not.

    Args:
        copies: of N rows.
        members: (N,) bool, the rows that were trained on.
        alpha: probability of error of each score.

    Returns:
        By each name of ``COPIES`` the values of
        :func:`~lightning_fedleak.evaluation.metrics.released.membership_values`, with p-values of
        the permutation test since the scores are coarse. ``copied`` holds ``members`` and
        ``others``, the rows of each side with a run of 13 or more tokens in the texts, and the
        ``p_value`` of Fisher's exact test that such runs are not more common among members.
    """
    copied = copies.longest >= RUN
    sides = members, ~members
    counts = [[int((rows & side).sum()) for side in sides] for rows in (copied, ~copied)]
    p_value = float(fisher_exact(counts, alternative="greater").pvalue)
    values = {
        name: membership_values(scores.double(), members, alpha=alpha, exact=True)
        for name, scores in zip(COPIES, copies, strict=True)
    }
    numbers = dict(zip(("members", "others"), map(float, counts[0]), strict=True))
    return values | {"copied": numbers | {"p_value": p_value}}
