"""A list of training rows by what the trained model gives away of them, and its private file.

Lists of the training texts that a trained model leaks, with p-values and a lower bound.

A text's score is compared with those of texts that a random draw left out. Its p-value is over that
draw: how often a text that was not trained on would score as high. It is no p-value of this text
alone, since some texts score high whether they were trained on or not.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import gammaln
from scipy.stats import false_discovery_control
from torch import Tensor

from lightning_fedleak.attacks.memorization import ShortAnswers, gain_beyond
from lightning_fedleak.evaluation.canaries.repeats import PoolRows
from lightning_fedleak.evaluation.metrics.released import _pool
from lightning_fedleak.model.snapshots import ReleasedModel
from lightning_fedleak.private_files import check_private, write_lines
from lightning_fedleak.validate import explain_errors

BARS = 256  # places in the order of others that count; more: slower, and the bound hardly rises
HALVINGS = 24  # of the search for the level of each bar; more: the bound hardly rises

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def record_p_values(scores: Tensor, members: Tensor) -> Floats:
    """Return the p-value of each of n members, ``(1 + others that score as high) / (m + 1)``.

    Args:
        scores: (N,) higher is more likely a member.
        members: (N,) bool.

    Raises:
        ValueError: no members, no others, or a score that is NaN.
    """
    score, member = _pool(scores, members)
    others = np.sort(score[~member])
    above = len(others) - np.searchsorted(others, score[member], "left")
    p_values: Floats = (1 + above) / (len(others) + 1)
    return p_values


def listed(p_values: Floats, rate: float) -> NDArray[np.bool_]:
    """Return which records a list with a false-discovery rate holds (Benjamini-Hochberg).

    P-values that share their others keep the rate (Bates et al. 2023, arXiv 2104.08279, section 2).

    Args:
        p_values: The p-values of all members.
        rate: expected share of records in the list that chance explains.
    """
    chosen: NDArray[np.bool_] = false_discovery_control(p_values, method="bh") <= rate
    return chosen


def smallest_list(n_members: int, n_others: int, rate: float) -> int:
    """Return how many records a list holds at least, if it holds any.

    A p-value is at least ``1 / (m + 1)``, so that fewer others make only longer lists.

    Args:
        n_members: The number of members that are tested.
        n_others: m, that they are compared with.
        rate: The rate of the list's false discoveries.

    Examples:
        >>> from lightning_fedleak.evaluation.metrics.record_list import smallest_list
        >>> smallest_list(1000, 999, 0.1)
        10
    """
    return math.ceil(n_members / (rate * (n_others + 1)) - 1e-9)


def at_least(scores: Tensor, members: Tensor, alpha: float) -> int:
    """Return how many members score higher than chance explains, but for a probability alpha.

    If n exchangeable texts were put among m others, at most V_j of them would lie above the j-th
    highest other, at all j at once, with probability 1 - alpha. V is a level of the exact law of
    each place (negative hypergeometric); that it holds at all of them at once is counted over all
    orders. Members above the j-th other beyond V_j were recognised by what training did to them.
    The bound is the highest over j. Ties are counted against the members.

    Args:
        scores: (N,) higher is more likely a member.
        members: (N,) bool.
        alpha: probability that the bound is too high.

    Raises:
        ValueError: as :func:`record_p_values` does.
    """
    score, member = _pool(scores, members)
    inside, others = np.sort(score[member]), np.sort(score[~member])[::-1]
    bars, limits = _envelope(len(inside), len(others), alpha)
    hits = len(inside) - np.searchsorted(inside, others[bars - 1], "right")
    return max(0, int((hits - limits).max()))


def most_provable(n_members: int, n_others: int, alpha: float) -> int:
    """Return what :func:`at_least` says where every member scores above all others.

    Args:
        n_members: The number of members of the pool.
        n_others: The number of non-members of the pool.
        alpha: probability that the bound is too high.
    """
    return max(0, n_members - int(_envelope(n_members, n_others, alpha)[1].min()))


@lru_cache(maxsize=64)
def _envelope(n: int, m: int, alpha: float) -> tuple[Ints, Ints]:
    """Return places in the order of m others, from 1, and how many of n may lie above each."""
    bars = np.unique(np.geomspace(1, m, min(m, BARS)).round().astype(np.int64))
    tails = np.stack([_tail(n, m, int(j)) for j in bars])
    low, high = math.log(alpha / len(bars)), math.log(alpha)  # the first holds by the union bound
    limits = (tails > math.exp(low)).sum(1)
    for _ in range(HALVINGS):
        level = (low + high) / 2
        tried = (tails > math.exp(level)).sum(1)
        if _stays_below(n, m, bars, tried) >= 1 - alpha:
            low, limits = level, tried
        else:
            high = level
    return bars, limits


def _tail(n: int, m: int, j: int) -> Floats:
    """Return (n,) the probability that at least 1, 2, ... n lie above the j-th of m others."""
    h = np.arange(n + 1)

    def choices(total: int | Ints, part: int | Ints) -> Floats:
        value: Floats = gammaln(total + 1) - gammaln(part + 1) - gammaln(total - part + 1)
        return value

    logs = choices(h + j - 1, h) + choices(n - h + m - j, n - h) - choices(n + m, n)
    tail: Floats = np.exp(logs)[::-1].cumsum()[::-1][1:]
    return tail


def _stays_below(n: int, m: int, bars: Ints, limits: Ints) -> float:
    """Return the share of all orders of n and m texts in which no bar has more of n above it.

    Orders are counted by their begin, up to the j-th of the m, by how many of n it holds.
    """
    caps = np.full(m + 1, n)
    caps[bars] = limits
    counts, scale = np.zeros(n + 1), 0.0
    counts[0] = 1
    for cap in caps[1:]:
        counts = counts.cumsum()
        counts[cap + 1 :] = 0
        largest = counts.max()
        counts /= largest
        scale += math.log(largest)
    orders = gammaln(n + m + 1) - gammaln(n + 1) - gammaln(m + 1)
    return math.exp(scale + math.log(counts.sum()) - float(orders))


FALSE_DISCOVERIES = 0.1  # rate of a list; lower: shorter lists, which need more others
NOT_SAID = (
    "p is over the draw of rows, and not of this row: some texts score high though they were not "
    "trained on.",
    "The order within the list says little. When a row was trained on orders as well.",
    "Dropping these rows protects them, and no others.",
    "A row that is not listed is not shown to be safe.",
    "After rows are dropped by this list the rows that were left out are used up: draw again.",
)
"""What may not be concluded, which each file says first."""


@dataclass(frozen=True)
class _RecordLine:
    """What is known of a row of the training data.

    Attributes:
        row: its number, counted from 0.
        status: ``"scored"``; ``"repeated"``: the row has copies, so that no draw of one row says
            anything of it; ``"short"``; or ``"unknown"``: it shares a passage with another row.
        score: what it gained beyond texts like it, in nats a token; None where it was not asked,
            as short rows with copies are not.
        p: how often a row that was left out scores as high; None where there is no such draw.
        listed: whether it is in the list; None where no list can be shown.
        labels: tokens that the loss was computed on; None where it was not asked.
        repeats: rows of the training data that hold the text.
        group: number of its group of copies; None without copies.
    """

    row: int
    status: str
    score: float | None = None
    p: float | None = None
    listed: bool | None = None
    labels: int | None = None
    repeats: int = 1
    group: int | None = None


@dataclass(frozen=True)
class RecordList:
    """Training rows by what the trained model gives away of them, without any of their words.

    Rows with copies come first, then all others from the highest score on, then those that were not
    scored.

    Examples:
        >>> import torch
        >>> from lightning_fedleak.evaluation.metrics.record_list import PoolRows, RecordList
        >>> scores = torch.arange(400.0).flip(0)                  # members score higher
        >>> members = torch.arange(400) < 200
        >>> rows = PoolRows([[row] for row in range(400)], torch.ones(400, dtype=torch.long))
        >>> records = RecordList.of(scores, members, torch.full((400,), 63), rows)
        >>> records.head["listed"], records.head["at_least"], records.lines[0].row
        (200, 193, 0)

    Attributes:
        head: the counts, what they rest on, and what may not be concluded.
        lines: The lines of each row.
    """

    head: Mapping[str, Any]
    lines: Sequence[_RecordLine]

    @classmethod
    def of(
        cls,
        scores: Tensor,
        members: Tensor,
        labels: Tensor,
        rows: PoolRows,
        *,
        rate: float = FALSE_DISCOVERIES,
        alpha: float = 0.05,
        **facts: Any,
    ) -> RecordList:
        """Return the list of a pool's members.

        Args:
            scores: (N,) higher is more likely a member.
            members: (N,) bool, those that were trained on.
            labels: (N,) tokens that the loss is computed on.
            rows: which rows the texts are.
            rate: The rate of false discoveries.
            alpha: probability that ``at_least`` is too high.
            **facts: of the run, for the head.

        Raises:
            ValueError: no members or no others that occur once, or a score that is NaN.
        """
        alone = rows.times == 1
        score, member = scores[alone], members[alone]
        n, m = int(member.sum()), int((~member).sum())
        p_values = record_p_values(score, member)
        min_size, provable = smallest_list(n, m, rate), most_provable(n, m, alpha)
        inside = listed(p_values, rate) if min_size <= n else None

        def line(row: int, text: int, status: str) -> _RecordLine:
            score = round(float(scores[text]), 4)
            return _RecordLine(row, status, score, labels=int(labels[text]))

        lines = [
            replace(
                line(rows.copies[text][0], text, "scored"),
                p=round(float(p_values[place]), 6),
                listed=None if inside is None else bool(inside[place]),
            )
            for place, text in enumerate((alone & members).nonzero()[:, 0].tolist())
        ]
        groups = [
            replace(line(row, text, "repeated"), repeats=int(rows.times[text]), group=group)
            for group, text in enumerate((~alone & members).nonzero()[:, 0].tolist(), 1)
            for row in sorted(rows.copies[text])
        ]
        first = len({line.group for line in groups}) + 1
        groups += [
            _RecordLine(row, "repeated", repeats=times, group=group)
            for group, (copies, times) in enumerate(rows.short_copies, first)
            for row in sorted(copies)
        ]
        apart = [_RecordLine(row, why) for row, why in sorted(rows.apart.items())]
        head = {
            "kind": "records",
            "version": version("lightning-fedleak"),
            **facts,
            "members": n,
            "others": m,
            "rate": rate,
            "listed": None if inside is None else int(inside.sum()),
            "smallest_list": min_size,
            "alpha": alpha,
            "at_least": at_least(score, member, alpha) if provable else None,
            "provable": provable,
            **dict.fromkeys(("repeated", "short", "unknown"), 0),
            **Counter(line.status for line in groups + apart),
            "used_up": False,
            "not_said": NOT_SAID,
        }

        def by_score(line: _RecordLine) -> float:
            return -(line.score or 0.0)

        return cls(head, [*sorted(groups, key=by_score), *sorted(lines, key=by_score), *apart])

    @property
    def counts(self) -> dict[str, float]:
        """Return the counts for the logs; NaN where one is unknown."""
        names = ("listed", "at_least", "smallest_list", "repeated", "members", "others", "alpha")
        values = {name: self.head[name] for name in names}
        values |= {
            "at_least_low": values["at_least"],
            "at_least_high": values["members"],
            "at_least_provable": self.head["provable"],
        }
        return {n: math.nan if value is None else float(value) for n, value in values.items()}

    def riskiest(self, share: float) -> list[_RecordLine]:
        """Return the first lines, a share of all that have a score; of copies all or none."""
        scored = [line for line in self.lines if line.score is not None]
        count = math.ceil(share * len(scored))
        while 0 < count < len(scored) and scored[count - 1].group is not None:
            if scored[count].group != scored[count - 1].group:
                break
            count += 1
        return scored[:count]

    def save(self, path: Path) -> None:
        """Write the list to a file of mode 0600, whole or not at all, over an earlier one.

        Raises:
            OSError: it cannot be written.
        """
        write_lines(path, [self.head, *map(asdict, self.lines)])

    @classmethod
    def load(cls, path: Path) -> RecordList:
        """Return what :meth:`save` wrote.

        Raises:
            ValueError: others may use the file, or it is no such list.
            OSError: it cannot be read.
        """
        unread = f"'{path}' cannot be used as a list of records"
        with explain_errors(unread, ValueError, KeyError, TypeError, error=ValueError):
            check_private(path)
            head, *lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
            if head["kind"] != "records":
                raise ValueError("it is no list of records")
            return cls(head, [_RecordLine(**line) for line in lines])

    def used_up(self) -> RecordList:
        """Return the list, marked as one that rows were dropped by."""
        return replace(self, head={**self.head, "used_up": True})


def list_records(
    released: ReleasedModel,
    members: Tensor,
    rows: PoolRows,
    *,
    short: bool = False,
    scores: Tensor | None = None,
    **settings: Any,
) -> RecordList:
    """Return the list of a pool that a model and its base were asked about.

    Args:
        released: what they said of N texts.
        members: (N,) bool, those that were trained on.
        rows: which rows the texts are.
        short: they have 1 to 7 label tokens, and the score of those.
        scores: (N,) others to list by, such as those beyond reference models; None: the texts' own.
        **settings: as :meth:`RecordList.of` takes them.

    Raises:
        ValueError: no members or no others that occur once, or numbers that are not finite.
    """
    if scores is None and short:
        scores = ShortAnswers().score(released)
    elif scores is None:
        scores = gain_beyond(released, rows.times == 1)  # copies would bend the others' fit
    return RecordList.of(scores, members, released.now.labels.sum(1), rows, **settings)
