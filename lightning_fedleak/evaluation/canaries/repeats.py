"""Find the texts of a pool that occur elsewhere in the data, as a whole, nearly, or in part.

A text that stands in the training data twice is memorized more, and a text that was left out while
its copy was trained on looks like a member. So neither plays a game of membership. Copies are
grouped, and a group is asked about as one text, by how many of its rows were trained on. Who is
whose copy is decided on all rows, by a rule that looks at neither coin nor order.
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
"""What is compared: texts of 8 label tokens or more, of 1 to 7, prompts, or pairs of answers."""
MIN_LABELS = 8  # label tokens of a long text; shorter ones are a pool of their own. Not tuned
RUN = 13  # label tokens in a row, as GPT-3's check of contamination has it; fewer: more texts leave
PIECE = 8  # label tokens in a row that near copies share: one word in ten may differ. Not tuned
COPY_SHARE = 0.8  # of a text's label tokens in common pieces; lower: forms with a gap are copies
FRAME_SHARE = 0.5  # of the texts; a piece in more of them is their frame, and tells no copies
TEMPLATE_SHARE = 0.01  # of the texts; a run in more of them is a template or a system prompt
ROWS_AT_ONCE = 512  # rows hashed together; more take memory and are no faster
TEMPLATE_ROWS = 20  # texts at least, so that in small data a run that 16 of them share still counts

Hashes = NDArray[np.uint64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
_MIX = np.uint64(0x9E3779B97F4A7C15)  # odd, the usual multiplier of Fibonacci hashing
_POWERS = np.cumprod(np.full(RUN, 0xD6E8FEB86659FD93, np.uint64), dtype=np.uint64)


@dataclass(frozen=True)
class _ScoredTexts:
    """The texts of a pool that are scored.

    Attributes:
        rows: n places in the pool: texts that occur nowhere else, in their order, and one for each
            text of which two rows or more were trained on.
        times: (n,) int64, rows of the training data that a text stands in; 1 for all that occur
            nowhere else, trained on or not.
        short: texts that were left out because they have fewer than 8 label tokens.
        repeated: texts of which another row repeats the whole or a part.
        copies: places of the rows that each scored text stands for, itself included, as far as
            they are in the pool.
        short_rows: places of the texts with 1 to 7 label tokens that occur nowhere else, prompt
            and answer together; they are a pool of their own.
        short_copies: For each such text that two rows or more were trained on, the places of its
            rows in the pool and the number of all that were trained on.
        prompt_rows: places of the texts whose prompt has 8 tokens or more, and which no other
            row's prompt repeats as a whole or, in the pool, in part.
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
    """Say which rows of the training data the texts of a pool are.

    Attributes:
        copies: of each of N texts, the numbers of the rows that it stands for; of those that were
            not trained on, anything.
        times: (N,) int64, rows of the training data that each text stands in.
        apart: numbers of the rows that are not scored, and why: ``"short"`` or ``"unknown"``.
        short_copies: numbers of the rows of each short text that repeats, and how often it does;
            they are not scored.
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
            texts: that might have been scored.
            scored: those of them that are.
            numbers: of the row that each of the texts is; -1 where it was not trained on.
            short: the short ones stand behind the scored ones in the pool.
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

    A group of copies stands for itself by a row that was trained on. A text of which one row was
    trained on and a copy was left out is none, and is not scored.

    Args:
        texts: The texts that may be scored.
        trained: whether each of them was trained on.
        elsewhere: all other rows of the data, and whether each was trained on.
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
                prompts[_name(text.prompt)] += 1
            yield text, side

    stream = rows()
    repeats = find_repeats(pool, stream)
    deque(stream, 0)  # where no text is long, nothing has read the rows
    short = [row for row, text in enumerate(texts) if 0 < text.n_labels < MIN_LABELS]
    chosen = [row for row, again in zip(long, repeats.again.tolist(), strict=True) if not again]
    asked = [(row, text.prompt) for row, text in enumerate(texts)]
    asked = [(row, prompt) for row, prompt in asked if prompt.n_labels >= MIN_LABELS]
    parts = find_repeats([p for _, p in asked], [(p, trained[row]) for row, p in asked]).again
    prompt_rows = [
        row
        for (row, prompt), again in zip(asked, parts.tolist(), strict=True)
        if not again and prompts[_name(prompt)] == 1
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
    ordered = sorted(map(sorted, groups.values()))  # the first by content, not by order
    return _ScoredTexts(
        chosen + [group[0][1] for group in ordered],
        torch.tensor([1] * len(chosen) + [group[0][2] for group in ordered], dtype=torch.long),
        len(texts) - len(long),
        len(long) - len(chosen),
        [[row] for row in chosen] + [[row for _, row, _ in group] for group in ordered],
        [row for row in short if contents[texts[row].content] == 1],
        [(rows, trained_on[content]) for content, rows in copies.items()],
        prompt_rows,
    )


@dataclass(frozen=True)
class _Repeats:
    """What repeats the texts of a pool.

    Attributes:
        again: (N,) bool, whether another row repeats a text's whole, nearly all of it or a part.
        units: (N,) int64, the same for copies of one text.
        times: (N,) int64, rows that were trained on among the copies of each text, itself included.
    """

    again: Bools
    units: Ints
    times: Ints


def find_repeats(pool: Sequence[Text], rows: Iterable[tuple[Text, bool]]) -> _Repeats:
    """Find the copies of each text of a pool, and texts that share a run with another one.

    Rows with the same label tokens are copies; of a classifier or a masked
    model, rows with the same tokens, all of which then count. A text is a near copy where .8 of its
    label tokens
    lie in pieces of 8 in a row that other texts have. Tokens in pieces that more than half of the
    texts have (and more than 20) are a frame, and do not count. Where no more than 8 others are
    left the frame is the text. Copies that share a piece, of each one of its rarer ones, are one
    text.

    A text is repeated in part where it shares 13 label tokens in a row with another one. Runs that
    more than 1% of the texts have (and more than 20) are templates and do not count; copies count
    once, so that what is often repeated is no template. A text with fewer than 13 label tokens in a
    row is compared as a whole.

    The memory is that of the pool's runs, 80 bytes a token, and of rows that may be near copies.
    The time is linear in the tokens of all rows.

    Args:
        pool: N texts that may be scored.
        rows: all rows of the data, those of the pool among them, and whether each was trained on.

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
    """The runs of a pool's texts.

    Attributes:
        runs: the hashes, sorted, each once.
        owners: For each place, the text.
        places: For each place, the run.
    """

    def __init__(self, pool: Sequence[Text], size: int) -> None:
        hashes, self.owners = _runs(pool, size)
        self.runs, self.places = np.unique(hashes, return_inverse=True)
        self._size = size

    def found_in(self, texts: Sequence[Text]) -> tuple[Ints, Ints, Ints]:
        """Return which runs of the pool stand in texts, each once a text, as rows and runs; and of
        each place of the texts the run, -1 for none of the pool.
        """
        hashes, row = _runs(texts, self._size)
        place = np.searchsorted(self.runs, hashes).clip(max=len(self.runs) - 1)
        in_pool = self.runs[place] == hashes
        once = np.unique((row * len(self.runs) + place)[in_pool])
        return once // len(self.runs), once % len(self.runs), np.where(in_pool, place, -1)


class _Search:
    """What is known of a pool's texts after some rows of the data."""

    def __init__(self, pool: Sequence[Text]) -> None:
        self.pool = pool
        self.runs, self.pieces = _Index(pool, RUN), _Index(pool, PIECE)
        self.run_counts = np.zeros(len(self.runs.runs), np.int64)  # in texts of no copies
        self.piece_counts = np.zeros(len(self.pieces.runs), np.int64)  # in different texts
        names = [_name(text) for text in pool]
        self.numbers = {name: n for n, name in enumerate(dict.fromkeys(names))}
        self.contents = np.array([self.numbers[name] for name in names])
        self.copies = np.zeros((2, len(self.numbers)), np.int64)  # by side
        self.known: set[bytes] = set()
        self.near: list[tuple[Text, bool, bool]] = []  # what may be near copies

    def read(self, texts: Sequence[Text], trained: Sequence[bool]) -> None:
        """Count what some rows of the data share with the pool."""
        fresh, others = np.zeros((2, len(texts)), bool)
        for row, name in enumerate(map(_name, texts)):
            fresh[row], others[row] = name not in self.known, name not in self.numbers
            self.known.add(name)
            if not others[row]:
                self.copies[int(trained[row]), self.numbers[name]] += 1
        rows, pieces, places = self.pieces.found_in(texts)
        np.add.at(self.piece_counts, pieces[fresh[rows]], 1)
        near = others & (_shares(texts, places >= 0, places < -1)[0] >= COPY_SHARE)
        rows, runs, _ = self.runs.found_in(texts)
        np.add.at(self.run_counts, runs[(fresh & others & ~near)[rows]], 1)
        self.near += [
            (texts[row], bool(trained[row]), bool(fresh[row]))
            for row in np.flatnonzero(near).tolist()
        ]

    def found(self) -> _Repeats:
        """Return what all rows say."""
        n_texts, counts = len(self.known), self.piece_counts
        frame = counts > max(TEMPLATE_ROWS, FRAME_SHARE * n_texts)
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
        max_copies = max(TEMPLATE_ROWS, TEMPLATE_SHARE * n_texts)
        repeated = (run_counts > 1) & (run_counts <= max_copies)
        again = near | (self.copies.sum(0)[self.contents] > 1)
        again[self.runs.owners[repeated[self.runs.places]]] = True
        return _Repeats(again, units, times[units])

    def _count_near(self, common: Bools, frame: Bools, unit_of: Ints, times: Ints) -> Ints:
        """Add other rows that are near copies to the ``times`` of their unit, and return how many
        other texts have each run.
        """
        run_counts = self.run_counts.copy()
        if not self.near:
            return run_counts
        texts, trained, fresh = zip(*self.near, strict=True)
        rows, pieces, places = self.pieces.found_in(texts)
        known = (np.append(pieces_are, False)[places] for pieces_are in (common, frame))
        copies = _shares(texts, *known)[0] >= COPY_SHARE
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
        """Return (N,) the unit of each text, and that of near copies with each piece, -1 for none.

        Args:
            near: (N,) near copies.
            binding: of each place of a text, whether its piece may tell whose copy it is.

        A near copy is bound to all that have the piece at the lower quartile of its common ones by
        their number: rarer than what many texts have in common, and not the rarest, which two
        copies of many may share.
        """
        owners, places = self.pieces.owners, self.pieces.places
        bound = near[owners] & binding
        owners, places = owners[bound], places[bound]
        order = np.lexsort((self.pieces.runs[places], self.piece_counts[places], owners))
        owners, places = owners[order], places[order]
        first, sizes = np.unique(owners, return_index=True, return_counts=True)[1:]
        binds = np.isin(places, places[first + sizes // 4])
        n, n_contents = len(self.pool), len(self.numbers)
        nodes = n + n_contents + len(self.pieces.runs)
        ends = np.append(owners[binds], np.arange(n))
        others = np.append(n + n_contents + places[binds], n + self.contents)
        graph = coo_array((np.ones(len(ends)), (ends, others)), (nodes, nodes))
        labels = connected_components(graph, directed=False)[1]
        units = np.unique(labels[:n], return_inverse=True)[1]
        unit_of = np.full(len(self.pieces.runs), -1)
        unit_of[places] = units[owners]
        return units, unit_of


def _name(text: Text) -> bytes:
    """Return 16 bytes that the label tokens of a text are known by."""
    labels = text.words
    labels = labels[labels != IGNORE_INDEX].contiguous()
    return hashlib.blake2b(labels.numpy().tobytes(), digest_size=16).digest()


def _labels(texts: Sequence[Text], size: int) -> tuple[Ints, Ints]:
    """Return the labels of all texts, a gap after each that no run reaches over, and the owners."""
    gap = torch.full((size,), IGNORE_INDEX)
    labels = torch.cat([part for text in texts for part in (text.words, gap)]).numpy()
    return labels, np.repeat(np.arange(len(texts)), [len(t.words) + size for t in texts])


def _shares(
    texts: Sequence[Text], common: Bools, frame: Bools
) -> tuple[NDArray[np.float64], Bools]:
    """Return (N,) the share of each text's label tokens outside of frames that common pieces hold.

    With it (N,) whether no more label tokens are outside of frames than one other word may uncover
    at an end: such a text is all frame, and its share 1.

    Args:
        texts: N texts.
        common: of each piece of :func:`_runs`.
        frame: of each of these pieces.
    """
    labels, owners = _labels(texts, PIECE)
    inside = labels != IGNORE_INDEX
    starts = np.flatnonzero(windows(inside, PIECE).all(1))
    covered = []
    for known in (common, frame):
        edges = np.zeros(len(labels) + 1, np.int64)
        np.add.at(edges, starts[known[: len(starts)]], 1)
        np.add.at(edges, starts[known[: len(starts)]] + PIECE, -1)
        covered.append(edges.cumsum()[:-1] > 0)
    own = inside & ~covered[1]
    n_own, n_held = (
        np.bincount(owners[part], minlength=len(texts)) for part in (own, own & covered[0])
    )
    framed = (n_own <= PIECE) & (np.bincount(owners[inside], minlength=len(texts)) > n_own)
    return np.where(framed, 1.0, n_held / np.maximum(n_own, 1)), framed


def _runs(texts: Sequence[Text], size: int) -> tuple[Hashes, Ints]:
    """Return the hashes of runs of so many label tokens in texts, and the text that each is of.

    Texts without such a run have one of all their label tokens, behind the others.
    """
    labels, owners = _labels(texts, size)
    tokens = (labels.astype(np.uint64) + np.uint64(1)) * _MIX
    tokens ^= tokens >> np.uint64(29)
    whole = np.flatnonzero(windows(labels != IGNORE_INDEX, size).all(1))
    hashes, rows = [windows(tokens, size)[whole] @ _POWERS[:size]], owners[whole]
    short = np.setdiff1d(np.arange(len(texts)), rows)
    for n in short:
        every = tokens[(owners == n) & (labels != IGNORE_INDEX)]
        powers = np.resize(_POWERS, len(every)) + np.arange(len(every), dtype=np.uint64)
        hashes.append((every * powers).sum(keepdims=True) + np.uint64(len(every)))
    return np.concatenate(hashes), np.append(rows, short)
