"""Runs of tokens that generated texts share with training rows and with held-out rows.

Runs shared with held-out rows disclose nothing. They show how many runs are shared without any
memorization (Amin et al. 2026, arXiv 2606.16952).
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

# Tokens of an n-gram. Of 2 to 6, 2 had the highest AUC on a sample of WikiText-2 that was used for
# nothing else (benchmarks.attacks.synthetic): .92, against .79 with 4.
NGRAM = 2
COPY_SCORES = "longest_copy", "shared_ngrams"  # names of the fields of _Copies, in its order


class _Copies(NamedTuple):
    """The runs of tokens that each of N rows shares with a set of texts.

    Attributes:
        longest: (N,) int64, the length of the longest run of the row that a text contains.
        shares: (N,) float64, the share of the row's n-grams that the texts contain; 0 for a row
            without n-grams.
    """

    longest: Tensor
    shares: Tensor


def find_copies(rows: Sequence[Text], generated: Sequence[Text], size: int = NGRAM) -> _Copies:
    """Return the runs that rows share with generated texts.

    Tokens without a label are in no run. Runs are compared exactly, not by a hash. They grow by one
    token at a time, and only runs that are in both sets continue to grow. Each step sorts the
    remaining runs.

    Args:
        rows: The N rows, at least one.
        generated: The generated texts.
        size: The number of tokens of an n-gram.

    Examples:
        >>> import torch
        >>> from lightning_fedleak.evaluation.metrics.copies import find_copies
        >>> from lightning_fedleak.model.taps.tokens import Text
        >>> row, other, copy = (torch.tensor(ids) for ids in ([1, 2, 3, 4], [5, 6], [9, 1, 2, 3]))
        >>> find_copies([Text(row, row), Text(other, other)], [Text(copy, copy)], size=2).shares
        tensor([0.6667, 0.0000], dtype=torch.float64)
    """
    parts, owners = [], []
    # Separators are 0 in rows and 1 in generated texts, so that no shared run contains one.
    for separator, texts in enumerate((rows, generated)):
        end = torch.tensor([separator])
        for index, text in enumerate(texts):
            labels = text.labels + 2  # ids from 2 on, and below 2 where there is no label
            parts.append(torch.cat([torch.where(labels < 2, separator, labels), end]))
            owners.append(torch.full((len(parts[-1]),), index))
    tokens, owner = torch.cat(parts), torch.cat(owners)
    # The starts of the runs of ``length`` tokens that both sides have, and a number of each run.
    first_generated, length = sum(map(len, parts[: len(rows)])), 0
    longest, shares = torch.zeros(len(rows), dtype=torch.long), torch.zeros(len(rows)).double()
    starts, ids = torch.arange(len(tokens)), torch.zeros_like(tokens)
    n_tokens = int(tokens.max()) + 1
    while True:
        # Two longer runs are equal if the shorter ones were, and the new tokens are.
        ids = torch.unique(ids * n_tokens + tokens[starts + length], return_inverse=True)[1]
        common = torch.ones(int(ids.max()) + 1, dtype=torch.bool)
        for side in (starts < first_generated, starts >= first_generated):
            common &= torch.bincount(ids[side], minlength=len(common)) > 0
        starts, ids, length = starts[common[ids]], ids[common[ids]], length + 1
        if not len(starts):
            return _Copies(longest, shares)
        row_of_run = owner[starts[starts < first_generated]]
        longest[row_of_run] = length
        if length == size:
            lengths = torch.tensor([len(part) - 1 for part in parts[: len(rows)]])
            n_grams = (lengths - size + 1).clamp_min(1)
            shares = torch.bincount(row_of_run, minlength=len(rows)).double() / n_grams


def copy_values(copies: _Copies, members: Tensor, alpha: float) -> dict[str, dict[str, float]]:
    """Return how well copies distinguish rows that were trained on from held-out rows.

    Args:
        copies: The copies of N rows.
        members: (N,) bool, the rows that were trained on.
        alpha: The probability of error of each score.

    Returns:
        By each name of ``COPY_SCORES`` the values of
        :func:`~lightning_fedleak.evaluation.metrics.released.membership_values`, with p-values of
        the permutation test because the scores are coarse. ``copied`` holds ``members`` and
        ``others``, the rows of each side with a run of 13 or more tokens in the texts, and the
        ``p_value`` of Fisher's exact test that such runs are not more common among members.
    """
    has_copy = copies.longest >= RUN
    sides = members, ~members
    counts = [[int((rows & side).sum()) for side in sides] for rows in (has_copy, ~has_copy)]
    p_value = float(fisher_exact(counts, alternative="greater").pvalue)
    values = {
        name: membership_values(scores.double(), members, alpha=alpha, exact=True)
        for name, scores in zip(COPY_SCORES, copies, strict=True)
    }
    numbers = dict(zip(("members", "others"), map(float, counts[0]), strict=True))
    return values | {"copied": numbers | {"p_value": p_value}}
