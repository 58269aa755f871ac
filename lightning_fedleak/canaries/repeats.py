"""Which texts of a pool occur elsewhere in the data: runs of 13 label tokens that rows share.

A text that stands in the training data twice is memorized more, and a text that was left out while
its copy was trained on looks like a member. Both leave the pool that is scored, by one rule that
looks at neither coin nor order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_fedleak.batches import IGNORE_INDEX
from lightning_fedleak.taps.tokens import Text

RUN = 13  # label tokens in a row, as GPT-3's check of contamination has it; fewer: more texts leave
TEMPLATE_SHARE = 0.01  # of the rows; a run in more of them is a template or a system prompt
TEMPLATE_ROWS = 20  # rows at least, so that in small data a text repeated 16 times still counts

Hashes = NDArray[np.uint64]
_MIX = np.uint64(0x9E3779B97F4A7C15)  # odd, the usual multiplier of Fibonacci hashing
_POWERS = np.cumprod(np.full(RUN, 0xD6E8FEB86659FD93, np.uint64), dtype=np.uint64)


def repeated_texts(pool: Sequence[Text], rows: Iterable[Text]) -> Tensor:
    """Return (N,) bool, whether each text of the pool shares a run with another row of the data.

    Runs that more than 1% of the rows have (and more than 20 rows) do not count. A text with fewer
    than 13 label tokens in a row is compared as a whole. The memory is that of the pool's runs, 16
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
    hashes = [_runs(text) for text in pool]
    known = np.unique(np.concatenate(hashes)) if hashes else np.empty(0, np.uint64)
    counts, n_rows = np.zeros(len(known), np.int64), 0
    for row in rows:
        n_rows += 1
        counts[_places(known, _runs(row))] += 1
    most = max(TEMPLATE_ROWS, TEMPLATE_SHARE * n_rows)
    repeats = (counts > 1) & (counts <= most)
    return torch.tensor([bool(repeats[_places(known, each)].any()) for each in hashes])


def _places(known: Hashes, hashes: Hashes) -> NDArray[np.int64]:
    """Return where the hashes stand in the sorted known ones; unknown ones are left out."""
    places = np.searchsorted(known, hashes)
    places[places == len(known)] = 0
    return places[known[places] == hashes] if len(known) else places[:0]


def _runs(text: Text) -> Hashes:
    """Return the distinct hashes of a text's runs of label tokens."""
    labels = text.labels[1:].numpy()
    tokens = (labels.astype(np.uint64) + np.uint64(1)) * _MIX
    tokens ^= tokens >> np.uint64(29)
    counted = labels != IGNORE_INDEX
    if len(tokens) >= RUN:
        windows = np.lib.stride_tricks.sliding_window_view(tokens, RUN)
        whole = np.lib.stride_tricks.sliding_window_view(counted, RUN).all(1)
        if whole.any():
            return np.unique((windows[whole] * _POWERS).sum(1, dtype=np.uint64))
    short = tokens[counted]
    powers = np.resize(_POWERS, len(short)) + np.arange(len(short), dtype=np.uint64)
    return np.array([(short * powers).sum(dtype=np.uint64) + np.uint64(len(short))], np.uint64)
