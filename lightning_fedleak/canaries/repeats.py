"""Which texts of a pool occur elsewhere in the data: runs of 13 label tokens that rows share.

A text that stands in the training data twice is memorized more, and a text that was left out while
its copy was trained on looks like a member. Both leave the pool that is scored, by one rule that
looks at neither coin nor order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, islice

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view as windows
from numpy.typing import NDArray
from torch import Tensor

from lightning_fedleak.batches import IGNORE_INDEX
from lightning_fedleak.taps import Text

LEAST_LABELS = 8  # label tokens of a text that is scored; fewer say little. Not tuned
RUN = 13  # label tokens in a row, as GPT-3's check of contamination has it; fewer: more texts leave
TEMPLATE_SHARE = 0.01  # of the rows; a run in more of them is a template or a system prompt
ROWS_AT_ONCE = 512  # rows hashed together; more take memory and are no faster
TEMPLATE_ROWS = 20  # rows at least, so that in small data a text repeated 16 times still counts

Hashes = NDArray[np.uint64]
_MIX = np.uint64(0x9E3779B97F4A7C15)  # odd, the usual multiplier of Fibonacci hashing
_POWERS = np.cumprod(np.full(RUN, 0xD6E8FEB86659FD93, np.uint64), dtype=np.uint64)


def scored_texts(
    texts: Sequence[Text], elsewhere: Iterable[Text] = ()
) -> tuple[list[int], int, int]:
    """Return which texts are scored, how many are too short, and how many are repeated.

    Args:
        texts: that may be scored.
        elsewhere: all other rows of the data.
    """
    long = [row for row, text in enumerate(texts) if text.n_labels >= LEAST_LABELS]
    repeats = repeated_texts([texts[row] for row in long], chain(texts, elsewhere)).tolist()
    chosen = [row for row, again in zip(long, repeats, strict=True) if not again]
    return chosen, len(texts) - len(long), len(long) - len(chosen)


def repeated_texts(pool: Sequence[Text], rows: Iterable[Text]) -> Tensor:
    """Return (N,) bool, whether each text of the pool shares a run with another row of the data.

    Runs that more than 1% of the rows have (and more than 20 rows) do not count. A text with fewer
    than 13 label tokens in a row is compared as a whole. The memory is that of the pool's runs, 40
    bytes a token; the time is linear in the tokens of all rows.

    Args:
        pool: N texts that may be scored.
        rows: all rows of the data, those of the pool among them.

    Examples:
        >>> import torch
        >>> from lightning_fedleak.canaries.repeats import repeated_texts
        >>> from lightning_fedleak.taps.tokens import Text
        >>> texts = [Text(ids, ids) for ids in torch.arange(60).view(3, 20)]
        >>> copy = Text(texts[0].ids.clone(), texts[0].labels.clone())
        >>> repeated_texts(texts, [*texts, copy])
        tensor([ True, False, False])
    """
    if not pool:
        return torch.zeros(0, dtype=torch.bool)
    hashes, owners = _runs(pool)
    runs, places = np.unique(hashes, return_inverse=True)
    counts, n_rows, stream = np.zeros(len(runs), np.int64), 0, iter(rows)
    while part := list(islice(stream, ROWS_AT_ONCE)):
        n_rows += len(part)
        hashes, row = _runs(part)
        place = np.searchsorted(runs, hashes).clip(max=len(runs) - 1)
        once = np.unique((row * len(runs) + place)[runs[place] == hashes])  # for each row
        counts += np.bincount(once % len(runs), minlength=len(runs))
    most = max(TEMPLATE_ROWS, TEMPLATE_SHARE * n_rows)
    again = np.zeros(len(pool), bool)
    again[owners[((counts > 1) & (counts <= most))[places]]] = True
    return torch.from_numpy(again)


def _runs(texts: Sequence[Text]) -> tuple[Hashes, NDArray[np.int64]]:
    """Return the hashes of the runs of label tokens of all texts, and the text that each is of."""
    gap = torch.full((RUN,), IGNORE_INDEX)  # no run reaches into the next text
    labels = torch.cat([part for text in texts for part in (text.labels[1:], gap)]).numpy()
    owners = np.repeat(np.arange(len(texts)), [len(t.labels[1:]) + RUN for t in texts])
    tokens = (labels.astype(np.uint64) + np.uint64(1)) * _MIX
    tokens ^= tokens >> np.uint64(29)
    whole = np.flatnonzero(windows(labels != IGNORE_INDEX, RUN).all(1))
    hashes, rows = [windows(tokens, RUN)[whole] @ _POWERS], owners[whole]
    short = np.setdiff1d(np.arange(len(texts)), rows)
    for n in short:
        every = tokens[(owners == n) & (labels != IGNORE_INDEX)]
        powers = np.resize(_POWERS, len(every)) + np.arange(len(every), dtype=np.uint64)
        hashes.append((every * powers).sum(keepdims=True) + np.uint64(len(every)))
    return np.concatenate(hashes), np.append(rows, short)
