"""Find the texts of a pool that occur elsewhere in the data, as a whole, nearly, or in part.

A *pool* holds the texts whose membership is tested. A text that is in the training data twice is
memorized more. A held-out text with a copy in the training data looks like a member. So neither
takes part in a test of membership. Copies are grouped, and a group is queried as one text, with the
number of its rows that were trained on. Copies are identified on all rows, by a rule that depends
on neither membership nor order.

:func:`scored_texts` selects the texts of a pool. It calls :func:`find_repeats`, which hashes runs
of label tokens: long runs to find shared passages, short *pieces* to find near copies.
"""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Literal

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view as windows
from numpy.typing import NDArray
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from lightning_fedleak.model.batches import IGNORE_INDEX
from lightning_fedleak.model.taps import Text

Part = Literal["long", "short", "prompts", "pairs"]
"""The kind of a pool: texts of 8 label tokens or more, of 1 to 7, prompts, or pairs of answers."""
MIN_LABELS = 8  # label tokens of a long text; shorter texts form a pool of their own. Not tuned
RUN = 13  # label tokens of a shared passage, as in GPT-3's contamination check; fewer: more repeats
PIECE = 8  # label tokens of a piece, which near copies share: one word in ten may differ. Not tuned
COPY_SHARE = 0.8  # share of tokens in common pieces of a copy; lower: filled-in forms are copies
FRAME_SHARE = 0.5  # share of texts; a piece in more texts is a frame, which does not make copies
TEMPLATE_SHARE = 0.01  # share of texts; a run in more texts is a template or a system prompt
ROWS_AT_ONCE = 512  # rows hashed together; more take memory and are no faster
TEMPLATE_ROWS = 20  # texts with a template, at least, if these are not most of all
MIN_FORM = 20  # texts that have a form; a part of 11 or more is one. Fewer: copies of a few are one
REPEATS = (
    f"wholly, to {COPY_SHARE:.0%}, or in {RUN} tokens in a row, with loss or without; what most "
    f"rows have, or 1% and more than {TEMPLATE_ROWS}, is their form"
)
"""Which texts are excluded because they repeat others, in words."""

Hashes = NDArray[np.uint64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
_MIX = np.uint64(0x9E3779B97F4A7C15)  # odd, the usual multiplier of Fibonacci hashing
# Powers of an odd number: the hash of a run is the sum of its mixed tokens times these.
_POWERS = np.cumprod(np.full(RUN, 0xD6E8FEB86659FD93, np.uint64), dtype=np.uint64)


@dataclass(frozen=True)
class _ScoredTexts:
    """The texts of a pool that are scored.

    Attributes:
        rows: The n indices of the scored texts: first the unique texts, in their order; then one
            text for each group of copies of which two rows or more were trained on.
        times: (n,) int64, number of rows of the training data with each text; 1 for unique texts,
            trained on or not.
        short: The number of texts with fewer than 8 label tokens.
        repeated: The number of long texts of which another row repeats the whole or a part.
        copies: For each scored text, the indices of the rows that it stands for, itself included.
        short_rows: The indices of the texts with 1 to 7 label tokens that are unique, prompt and
            answer together. They form a pool of their own.
        short_copies: For each short text that two rows or more were trained on, the indices of its
            rows, and the number of all its rows that were trained on.
        prompt_rows: The indices of the texts with a prompt of 8 tokens or more that no other row
            repeats as a whole, and no other text of the pool in part.
    """

    rows: list[int]
    times: Tensor
    short: int
    repeated: int
    copies: list[list[int]]
    short_rows: list[int]
    short_copies: list[tuple[list[int], int]]
    prompt_rows: list[int]


@dataclass(frozen=True)
class PoolRows:
    """The rows of the training data that the texts of a pool stand for.

    Attributes:
        copies: For each of N texts, the numbers of its rows; arbitrary for texts that were not
            trained on.
        times: (N,) int64, number of rows of the training data with each text.
        apart: The reason by the number of each row that is not scored: ``"short"`` or
            ``"unknown"``.
        short_copies: For each short text with copies, the numbers of its rows, and how many rows
            were trained on; they are not scored.
    """

    copies: Sequence[Sequence[int]]
    times: Tensor
    apart: Mapping[int, str] = field(default_factory=dict)
    short_copies: Sequence[tuple[Sequence[int], int]] = ()

    @classmethod
    def of(
        cls, texts: Sequence[Text], scored: _ScoredTexts, numbers: Sequence[int], *, short: bool
    ) -> PoolRows:
        """Return the rows of a pool's texts.

        Args:
            texts: The texts that might have been scored.
            scored: The texts that are scored.
            numbers: The number of each text's row; -1 if it was not trained on.
            short: Whether the pool also holds the short texts, after the scored ones.
        """
        groups = scored.copies + [[row] for row in scored.short_rows if short]
        repeated = [places for places, _ in scored.short_copies]
        apart = {*range(len(texts))}.difference(*groups, *repeated)
        alone = torch.ones(len(groups) - len(scored.copies), dtype=torch.long)
        return cls(
            [[numbers[row] for row in group] for group in groups],
            torch.cat([scored.times, alone]),
            {
                numbers[row]: "short" if texts[row].n_labels < MIN_LABELS else "unknown"
                for row in apart
                if numbers[row] >= 0
            },
            [([numbers[row] for row in rows], n) for rows, n in scored.short_copies],
        )


def scored_texts(
    texts: Sequence[Text], trained: Sequence[bool], elsewhere: Iterable[tuple[Text, bool]] = ()
) -> _ScoredTexts:
    """Return which texts are scored.

    One row that was trained on represents a group of copies. A group with only one row that was
    trained on is not scored.

    Args:
        texts: The texts that may be scored.
        trained: Whether each of them was trained on.
        elsewhere: All other rows of the data, and whether each was trained on.
    """
    long = [row for row, text in enumerate(texts) if text.n_labels >= MIN_LABELS]
    pool = [texts[row] for row in long]

    contents: Counter[bytes] = Counter()
    trained_on: Counter[bytes] = Counter()
    prompts: Counter[bytes] = Counter()

    def rows() -> Iterator[tuple[Text, bool]]:
        for text, side in chain(zip(texts, trained, strict=True), elsewhere):
            if text.n_labels < MIN_LABELS:
                contents[text.content] += 1
                trained_on[text.content] += side
            if text.n_labels < len(text.ids) - MIN_LABELS:
                prompts[_digest(text.prompt)] += 1
            yield text, side

    stream = rows()
    repeats = find_repeats(pool, stream)
    deque(stream, 0)  # without long texts, find_repeats has not consumed the rows
    short = [row for row, text in enumerate(texts) if 0 < text.n_labels < MIN_LABELS]
    unique = [row for row, again in zip(long, repeats.again.tolist(), strict=True) if not again]
    queries = [(row, text.prompt) for row, text in enumerate(texts)]
    queries = [(row, prompt) for row, prompt in queries if prompt.n_labels >= MIN_LABELS]
    parts = find_repeats([p for _, p in queries], [(p, trained[row]) for row, p in queries]).again
    prompt_rows = [
        row
        for (row, prompt), again in zip(queries, parts.tolist(), strict=True)
        if not again and prompts[_digest(prompt)] == 1
    ]
    groups: dict[int, list[tuple[bytes, int, int]]] = {}
    for place, row in enumerate(long):
        unit, times = int(repeats.units[place]), int(repeats.times[place])
        if trained[row] and times > 1:
            groups.setdefault(unit, []).append((texts[row].content, row, times))
    copies: dict[bytes, list[int]] = {}
    for row in short:
        if trained[row] and trained_on[texts[row].content] > 1:
            copies.setdefault(texts[row].content, []).append(row)
    ordered = sorted(map(sorted, groups.values()))  # by content, so that order does not matter
    return _ScoredTexts(
        unique + [group[0][1] for group in ordered],
        torch.tensor([1] * len(unique) + [group[0][2] for group in ordered], dtype=torch.long),
        len(texts) - len(long),
        len(long) - len(unique),
        [[row] for row in unique] + [[row for _, row, _ in group] for group in ordered],
        [row for row in short if contents[texts[row].content] == 1],
        [(rows, trained_on[content]) for content, rows in copies.items()],
        prompt_rows,
    )


@dataclass(frozen=True)
class _Repeats:
    """The repetitions of the texts of a pool.

    Attributes:
        again: (N,) bool, whether another row repeats a text as a whole, nearly, or in part.
        units: (N,) int64, a number of each group of copies.
        times: (N,) int64, number of rows that were trained on in each text's group.
    """

    again: Bools
    units: Ints
    times: Ints


def find_repeats(pool: Sequence[Text], rows: Iterable[tuple[Text, bool]]) -> _Repeats:
    """Find the copies of each text of a pool, and texts that share a passage with another text.

    Rows with the same label tokens are copies. For a classifier or a masked model, all tokens must
    be the same.

    A text is a near copy if 80% of its label tokens are in common pieces: 8 tokens in a row that
    other texts also have. Pieces in more than half of the texts (and more than 10) form a frame,
    whose tokens do not count. If the frame leaves no more than 8 tokens, the frame is the text.
    Near copies form one group if they share a piece that is among the rarer ones of each.

    A text is repeated in part if it shares a run of 13 label tokens with another text, or if such a
    run is anywhere in another row: what a row quotes may have been trained on. Runs in more
    than 1% of the texts (and more than 20), or in more than half (and more than 10), are templates
    and do not count. Copies count once here,
    so that a text with many copies is no template. A text without 13 label tokens in a row is
    compared as a whole.

    It needs memory for the pool's runs, 80 bytes a token, and for rows that may be near copies. The
    time is linear in the tokens of all rows.

    Args:
        pool: N texts that may be scored.
        rows: All rows of the data, with those of the pool, and whether each was trained on.

    Examples:
        >>> import torch
        >>> from lightning_fedleak.evaluation.canaries.repeats import find_repeats
        >>> from lightning_fedleak.model.taps.tokens import Text
        >>> texts = [Text(ids, ids) for ids in torch.arange(60).view(3, 20)]
        >>> copy = Text(texts[0].ids.clone(), texts[0].labels.clone())
        >>> find_repeats(texts, [(text, True) for text in [*texts, copy]]).times.tolist()
        [2, 1, 1]
    """
    if not pool:
        return _Repeats(np.zeros(0, bool), np.zeros(0, np.int64), np.zeros(0, np.int64))
    search, stream = _Search(pool), iter(rows)
    while part := list(islice(stream, ROWS_AT_ONCE)):
        search.read([text for text, _ in part], [trained for _, trained in part])
    return search.found()


class _Index:
    """The hashed runs of a pool's texts, of one length.

    Attributes:
        runs: The distinct hashes, sorted.
        owners: The index of the text of each occurrence of a run.
        places: The index of the run of each occurrence.
    """

    def __init__(self, pool: Sequence[Text], size: int) -> None:
        hashes, self.owners = _runs(pool, size)
        self.runs, self.places = np.unique(hashes, return_inverse=True)
        self._size = size

    def found_in(self, texts: Sequence[Text]) -> tuple[Ints, Ints, Ints]:
        """Return the runs of the pool that occur in texts.

        Returns:
            The index of a text and of a run, once for each pair; and the run of each place of the
            texts, -1 for a run that is not in the pool.
        """
        hashes, row = _runs(texts, self._size)
        place = np.searchsorted(self.runs, hashes).clip(max=len(self.runs) - 1)
        in_pool = self.runs[place] == hashes
        once = np.unique((row * len(self.runs) + place)[in_pool])
        return once // len(self.runs), once % len(self.runs), np.where(in_pool, place, -1)


class _Search:
    """Counts of the runs and copies of a pool's texts in the rows so far.

    :meth:`read` adds rows, and :meth:`found` returns the repetitions at the end. ``candidates`` are
    rows that may be near copies: the text, whether it was trained on, and whether it is the first
    row with this text.
    """

    def __init__(self, pool: Sequence[Text]) -> None:
        self.pool = pool
        self.runs, self.pieces = _Index(pool, RUN), _Index(pool, PIECE)
        self.run_counts = np.zeros(len(self.runs.runs), np.int64)  # in texts that are no copies
        self.quote_counts = np.zeros_like(self.run_counts)  # in rows that have it without labels
        self.piece_counts = np.zeros(len(self.pieces.runs), np.int64)  # in different texts
        names = [_digest(text) for text in pool]
        self.numbers = {name: n for n, name in enumerate(dict.fromkeys(names))}
        self.contents = np.array([self.numbers[name] for name in names])
        # The rows with each content: [0] those that were not trained on, [1] those that were.
        self.copies = np.zeros((2, len(self.numbers)), np.int64)
        self.digests: set[bytes] = set()  # of all different rows so far
        self.whole_digests: set[bytes] = set()  # the same with the tokens that have no label
        self.candidates: list[tuple[Text, bool, bool]] = []

    def read(self, texts: Sequence[Text], trained: Sequence[bool]) -> None:
        """Count the runs and copies that some rows of the data share with the pool."""
        # Whether each row's text is the first such text, and whether it is no text of the pool.
        fresh, fresh_whole, others = np.zeros((3, len(texts)), bool)
        for row, name in enumerate(map(_digest, texts)):
            fresh[row], others[row] = name not in self.digests, name not in self.numbers
            self.digests.add(name)
            if not others[row]:
                self.copies[int(trained[row]), self.numbers[name]] += 1
        rows, pieces, places = self.pieces.found_in(texts)
        np.add.at(self.piece_counts, pieces[fresh[rows]], 1)
        # No piece counts as part of a frame yet: which pieces are is known only after all rows.
        near = others & (_shares(texts, places >= 0, places < -1)[0] >= COPY_SHARE)
        rows, runs, _ = self.runs.found_in(texts)
        np.add.at(self.run_counts, runs[(fresh & others & ~near)[rows]], 1)
        if any(text.n_labels + 1 < len(text.ids) for text in texts):
            size, labelled = len(self.runs.runs), rows * len(self.runs.runs) + runs
            whole = [text.whole for text in texts]
            for row, name in enumerate(map(_digest, whole)):
                fresh_whole[row] = name not in self.whole_digests
                self.whole_digests.add(name)
            rows, runs, _ = self.runs.found_in(whole)
            quotes = np.setdiff1d(rows * size + runs, labelled)
            np.add.at(self.quote_counts, (quotes % size)[fresh_whole[quotes // size]], 1)
        self.candidates += [
            (texts[row], bool(trained[row]), bool(fresh[row]))
            for row in np.flatnonzero(near).tolist()
        ]

    def found(self) -> _Repeats:
        """Return the repetitions, after all rows were read."""
        n_texts, counts = len(self.digests), self.piece_counts
        most = FRAME_SHARE * max(MIN_FORM, n_texts)
        frame = counts > most
        common = (counts > 1) & ~frame
        places, owners = self.pieces.places, self.pieces.owners
        shares, framed = _shares(self.pool, common[places], frame[places])
        near = shares >= COPY_SHARE
        units, unit_of = self._units(near, common[places] | (frame[places] & framed[owners]))
        times = np.zeros(len(self.pool), np.int64)
        firsts = np.unique(self.contents, return_index=True)[1]
        np.add.at(times, units[firsts], self.copies[1])
        run_counts = self._count_near(common, frame, unit_of, times)
        once = np.unique(units[self.runs.owners] * len(run_counts) + self.runs.places)
        run_counts += np.bincount(once % len(run_counts), minlength=len(run_counts))
        max_copies = min(most, max(TEMPLATE_ROWS, TEMPLATE_SHARE * n_texts))
        quoted = (self.quote_counts > 0) & (self.quote_counts <= most)
        repeated = ((run_counts > 1) | quoted) & (run_counts <= max_copies)
        again = near | (self.copies.sum(0)[self.contents] > 1)
        again[self.runs.owners[repeated[self.runs.places]]] = True
        return _Repeats(again, units, times[units])

    def _count_near(self, common: Bools, frame: Bools, unit_of: Ints, times: Ints) -> Ints:
        """Add rows outside of the pool that are near copies to the ``times`` of their unit.

        Return the number of other texts with each run.
        """
        run_counts = self.run_counts.copy()
        if not self.candidates:
            return run_counts
        texts, trained, fresh = zip(*self.candidates, strict=True)
        rows, pieces, places = self.pieces.found_in(texts)
        flags = (np.append(pieces_are, False)[places] for pieces_are in (common, frame))
        copies = _shares(texts, *flags)[0] >= COPY_SHARE
        shared = unit_of[pieces]
        edges = np.searchsorted(rows, np.arange(len(texts) + 1))  # rows are sorted
        for row, is_trained in enumerate(trained):
            units = shared[edges[row] : edges[row + 1]]
            units = units[units >= 0]
            copies[row] &= len(units) > 0
            if copies[row]:
                times[np.bincount(units).argmax()] += is_trained
        rows, runs, _ = self.runs.found_in(texts)
        np.add.at(run_counts, runs[(np.array(fresh) & ~copies)[rows]], 1)
        return run_counts

    def _units(self, near: Bools, binding: Bools) -> tuple[Ints, Ints]:
        """Return (N,) the unit of each text, and the unit of each piece, -1 for none.

        A unit is a group of copies. A near copy joins all near copies with its *binding piece*: of
        its common pieces, sorted by the number of texts that have them, the one at the lower
        quartile. This piece is rarer than passages that many texts share. It is not the rarest one,
        which may be shared by only two of many copies.

        Args:
            near: (N,) whether each text is a near copy.
            binding: Whether the piece at each place of a text may bind it.
        """
        owners, places = self.pieces.owners, self.pieces.places
        bound = near[owners] & binding
        owners, places = owners[bound], places[bound]
        order = np.lexsort((self.pieces.runs[places], self.piece_counts[places], owners))
        owners, places = owners[order], places[order]
        starts, sizes = np.unique(owners, return_index=True, return_counts=True)[1:]
        binds = np.isin(places, places[starts + sizes // 4])
        n, n_contents = len(self.pool), len(self.numbers)
        # Texts, contents and pieces are nodes; texts with a common content or piece are connected.
        nodes = n + n_contents + len(self.pieces.runs)
        sources = np.append(owners[binds], np.arange(n))
        targets = np.append(n + n_contents + places[binds], n + self.contents)
        graph = coo_array((np.ones(len(sources)), (sources, targets)), (nodes, nodes))
        labels = connected_components(graph, directed=False)[1]
        units = np.unique(labels[:n], return_inverse=True)[1]
        unit_of = np.full(len(self.pieces.runs), -1)
        unit_of[places] = units[owners]
        return units, unit_of


def group_texts(texts: Sequence[Text], members: Bools, owners: Ints | None = None) -> Ints:
    """Return (N,) the group of each text, counted from 0: texts of a row, or that share a passage.

    A passage is a piece in 20 texts or fewer. Groups with texts of both sides were not drawn as
    one, so that each of their rows is a group.

    Args:
        texts: N texts.
        members: (N,) the side of each text.
        owners: (N,) the row that holds each text; None: each text is a row.
    """
    hashes, texts_of_hashes = _runs(texts, PIECE)
    pieces, places = np.unique(hashes, return_inverse=True)
    n = len(texts)
    rows = np.unique(np.arange(n) if owners is None else owners, return_inverse=True)[1]
    once = np.unique(places * n + texts_of_hashes)  # each piece of a text
    counts = np.bincount(once // n, minlength=len(pieces))
    shared = once[((counts > 1) & (counts <= TEMPLATE_ROWS))[once // n]]
    sources = np.append(shared % n, np.arange(n))
    targets = n + np.append(shared // n, len(pieces) + rows)  # texts, pieces and rows are nodes
    graph = coo_array((np.ones(len(sources)), (sources, targets)), (2 * n + len(pieces),) * 2)
    groups = connected_components(graph, directed=False)[1][:n]
    sizes, inside = np.bincount(groups), np.bincount(groups, members)
    is_mixed = (inside > 0) & (inside < sizes)
    apart = np.where(is_mixed[groups], groups.max() + 1 + rows, groups)
    return np.unique(apart, return_inverse=True)[1]


def _digest(text: Text) -> bytes:
    """Return a digest of 16 bytes of a text's label tokens."""
    labels = text.words
    labels = labels[labels != IGNORE_INDEX].contiguous()
    return hashlib.blake2b(labels.numpy().tobytes(), digest_size=16).digest()


def _labels(texts: Sequence[Text], size: int) -> tuple[Ints, Ints]:
    """Return the labels of all texts, with a gap after each that no run spans, and their texts."""
    gap = torch.full((size,), IGNORE_INDEX)
    labels = torch.cat([part for text in texts for part in (text.words, gap)]).numpy()
    return labels, np.repeat(np.arange(len(texts)), [len(t.words) + size for t in texts])


def _shares(
    texts: Sequence[Text], common: Bools, frame: Bools
) -> tuple[NDArray[np.float64], Bools]:
    """Return (N,) the share of each text's label tokens outside of frames that is in common pieces.

    Also return (N,) whether a text is all frame: no more than 8 of its label tokens are outside of
    frames, as many as one changed word at an end may uncover. Its share is 1.

    Args:
        texts: N texts.
        common: Whether each piece of :func:`_runs` is common.
        frame: Whether each of these pieces is part of a frame.
    """
    labels, owners = _labels(texts, PIECE)
    inside = labels != IGNORE_INDEX
    starts = np.flatnonzero(windows(inside, PIECE).all(1))
    covered = []
    for flags in (common, frame):
        edges = np.zeros(len(labels) + 1, np.int64)
        np.add.at(edges, starts[flags[: len(starts)]], 1)
        np.add.at(edges, starts[flags[: len(starts)]] + PIECE, -1)
        covered.append(edges.cumsum()[:-1] > 0)
    body = inside & ~covered[1]
    n_body, n_common = (
        np.bincount(owners[part], minlength=len(texts)) for part in (body, body & covered[0])
    )
    framed = (n_body <= PIECE) & (np.bincount(owners[inside], minlength=len(texts)) > n_body)
    return np.where(framed, 1.0, n_common / np.maximum(n_body, 1)), framed


def _runs(texts: Sequence[Text], size: int) -> tuple[Hashes, Ints]:
    """Return the hashes of all runs of ``size`` label tokens in texts, and the text of each.

    A text without such a run has a hash of all its label tokens instead, after all other hashes.
    """
    labels, owners = _labels(texts, size)
    tokens = (labels.astype(np.uint64) + np.uint64(1)) * _MIX
    tokens ^= tokens >> np.uint64(29)
    whole = np.flatnonzero(windows(labels != IGNORE_INDEX, size).all(1))
    hashes, rows = [windows(tokens, size)[whole] @ _POWERS[:size]], owners[whole]
    short = np.setdiff1d(np.arange(len(texts)), rows)
    for n in short:
        values = tokens[(owners == n) & (labels != IGNORE_INDEX)]
        powers = np.resize(_POWERS, len(values)) + np.arange(len(values), dtype=np.uint64)
        hashes.append((values * powers).sum(keepdims=True) + np.uint64(len(values)))
    return np.concatenate(hashes), np.append(rows, short)
