"""Lists of the training rows that a trained model leaks, and their private files.

A list holds a membership score and a p-value of each row, whether the row is *listed* (passes at a
false-discovery rate), and a lower bound on the number of leaked rows.

The score of a row is compared with the scores of non-members: rows that a random draw held out of
training. The p-value is over that draw: the probability that a row that was not trained on scores
as high. It is not a p-value of this row alone, because some texts score high whether they were
trained on or not. The texts that are scored, members and non-members, are the *pool*.
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
from scipy.special import gammaln
from scipy.stats import false_discovery_control, nhypergeom
from torch import Tensor

from lightning_fedleak.attacks.memorization import ShortAnswers, gain_beyond
from lightning_fedleak.evaluation.canaries.repeats import PoolRows
from lightning_fedleak.evaluation.metrics.clustered import Bools, Floats, Ints
from lightning_fedleak.evaluation.metrics.released import _pool
from lightning_fedleak.model.snapshots import ReleasedModel
from lightning_fedleak.private_files import check_private, write_lines
from lightning_fedleak.validate import explain_errors

BARS = 256  # ranks of non-members used as thresholds; more: slower, and the bound hardly rises
HALVINGS = 24  # bisections of the level of each rank; more: the bound hardly rises


def record_p_values(scores: Tensor, members: Tensor) -> Floats:
    """Return the p-value of each member, ``(1 + h) / (m + 1)``.

    Of the m non-members, h score at least as high as the member.

    Args:
        scores: (N,) higher is more likely a member.
        members: (N,) bool.

    Raises:
        ValueError: There are no members or no non-members, or a score is NaN.
    """
    score, member = _pool(scores, members)
    controls = np.sort(score[~member])
    above = len(controls) - np.searchsorted(controls, score[member], "left")
    p_values: Floats = (1 + above) / (len(controls) + 1)
    return p_values


def listed(p_values: Floats, rate: float) -> Bools:
    """Return which members are in the list at a false-discovery rate (Benjamini-Hochberg).

    The rate holds although all p-values share the same non-members (Bates et al. 2023, arXiv
    2104.08279, section 2).

    Args:
        p_values: The p-values of all members.
        rate: The false-discovery rate: the expected share of false discoveries in the list.
    """
    chosen: Bools = false_discovery_control(p_values, method="bh") <= rate
    return chosen


def smallest_list(n_members: int, n_others: int, rate: float) -> int:
    """Return the smallest number of records in a list that is not empty.

    A p-value is at least ``1 / (m + 1)``. So with fewer non-members, only longer lists can pass.

    Args:
        n_members: The number of members that are tested.
        n_others: m, the number of non-members.
        rate: The false-discovery rate of the list.

    Examples:
        >>> from lightning_fedleak.evaluation.metrics.record_list import smallest_list
        >>> smallest_list(1000, 999, 0.1)
        10
    """
    # 1e-9: a quotient that is an integer up to rounding errors is not rounded up.
    return math.ceil(n_members / (rate * (n_others + 1)) - 1e-9)


def at_least(scores: Tensor, members: Tensor, alpha: float) -> int:
    """Return a lower bound on the number of members that training made to score higher.

    Suppose that n texts are exchangeable with m non-members. Then with probability ``1 - alpha``,
    for all tested ranks j at once (at most ``BARS``), at most V_j of the n texts score above the
    j-th highest non-member. V_j is a quantile of the negative hypergeometric distribution, at one
    level for all j. The level is chosen by counting the orders of all texts in which no V_j is
    exceeded. Members above the j-th non-member in excess of V_j are due to training. The bound is
    the largest excess over j. Ties count against the members.

    Args:
        scores: (N,) higher is more likely a member.
        members: (N,) bool.
        alpha: The largest probability that the bound is too high.

    Raises:
        ValueError: There are no members or no non-members, or a score is NaN.
    """
    score, member = _pool(scores, members)
    inside, others = np.sort(score[member]), np.sort(score[~member])[::-1]
    bars, limits = _envelope(len(inside), len(others), alpha)
    hits = len(inside) - np.searchsorted(inside, others[bars - 1], "right")
    return max(0, int((hits - limits).max()))


def most_provable(n_members: int, n_others: int, alpha: float) -> int:
    """Return the bound of :func:`at_least` if every member scores above all non-members.

    Args:
        n_members: The number of members of the pool.
        n_others: The number of non-members of the pool.
        alpha: The probability that the bound is too high.
    """
    return max(0, n_members - int(_envelope(n_members, n_others, alpha)[1].min()))


@lru_cache(maxsize=64)
def _envelope(n: int, m: int, alpha: float) -> tuple[Ints, Ints]:
    """Return ranks among m non-members, from 1, and how many of n texts may score above each."""
    bars = np.unique(np.geomspace(1, m, min(m, BARS)).round().astype(np.int64))
    # (bars, n) the probability that at least 1, 2, ... n texts are above the j-th of m.
    chances = np.stack([nhypergeom(n + m, n, j).pmf(np.arange(n + 1)) for j in bars.tolist()])
    tails = chances[:, ::-1].cumsum(1)[:, ::-1][:, 1:]
    low, high = math.log(alpha / len(bars)), math.log(alpha)  # low is valid by the union bound
    limits = (tails > math.exp(low)).sum(1)
    for _ in range(HALVINGS):
        level = (low + high) / 2
        candidates = (tails > math.exp(level)).sum(1)
        if _stays_below(n, m, bars, candidates) >= 1 - alpha:
            low, limits = level, candidates
        else:
            high = level
    return bars, limits


def _stays_below(n: int, m: int, bars: Ints, limits: Ints) -> float:
    """Return the share of all orders of n and m texts in which no limit is exceeded.

    A dynamic program over j counts the prefixes of orders that end at the j-th of the m texts, by
    how many of the n texts they hold.
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


FALSE_DISCOVERIES = 0.1  # default false-discovery rate; lower: shorter lists, more non-members
NOT_SAID = (
    "p is a probability over the draw of rows, not of this row alone: some texts score high "
    "although they were not trained on.",
    "The order within the list says little, since scores also depend on when a row was trained on.",
    "Dropping these rows protects only these rows.",
    "A row that is not listed is not shown to be safe.",
    "After rows are dropped by this list, the held-out rows are used up: draw them again.",
)
"""Conclusions that a list does not support; the head of each file holds them."""


@dataclass(frozen=True)
class _RecordLine:
    """The results of a row of the training data.

    Attributes:
        row: The number of the row, counted from 0.
        status: ``"scored"``; ``"repeated"``: the row has copies, so that the draw of one row says
            nothing about it; ``"short"``; or ``"unknown"``: it shares a passage with another row.
        score: The membership score; None if the row was not scored, as for short rows with copies.
        p: The p-value of :func:`record_p_values`; None if the row has none.
        listed: Whether the row is in the list; None if it has no p-value, or if there are too few
            non-members for a list of any length.
        labels: The number of tokens that the loss was computed on; None if it was not scored.
        repeats: The number of rows of the training data with this text.
        group: The number of its group of copies; None without copies.
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
    """The training rows by what the trained model leaks of them, without their text.

    Rows with copies come first, then the rows that were scored alone, both from the highest score
    on (short rows with copies have no score, and count as 0). Other rows without a score come last.

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
        head: The counts, the settings behind them, and the conclusions that they do not support.
        lines: The line of each row.
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
            members: (N,) bool, whether each text was trained on.
            labels: (N,) number of tokens that the loss is computed on.
            rows: The rows of the training data that the texts stand for.
            rate: The false-discovery rate.
            alpha: The probability that ``at_least`` is too high.
            **facts: Facts about the run, for the head.

        Raises:
            ValueError: There is no member, or no non-member, that occurs once; or a score is NaN.
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
        first_group = len({line.group for line in groups}) + 1
        groups += [
            _RecordLine(row, "repeated", repeats=times, group=group)
            for group, (copies, times) in enumerate(rows.short_copies, first_group)
            for row in sorted(copies)
        ]
        unscored = [_RecordLine(row, reason) for row, reason in sorted(rows.apart.items())]
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
            **Counter(line.status for line in groups + unscored),
            "used_up": False,  # whether rows were dropped by this list: see the end of NOT_SAID
            "not_said": NOT_SAID,
        }

        def by_score(line: _RecordLine) -> float:
            return -(line.score or 0.0)

        return cls(head, [*sorted(groups, key=by_score), *sorted(lines, key=by_score), *unscored])

    @property
    def counts(self) -> dict[str, float]:
        """Return the counts for the logs; unknown counts are NaN."""
        names = ("listed", "at_least", "smallest_list", "repeated", "members", "others", "alpha")
        values = {name: self.head[name] for name in names}
        # The bound as an interval: at least so many members, and at most all of them.
        values |= {
            "at_least_low": values["at_least"],
            "at_least_high": values["members"],
            "at_least_provable": self.head["provable"],
        }
        return {n: math.nan if value is None else float(value) for n, value in values.items()}

    def riskiest(self, share: float) -> list[_RecordLine]:
        """Return the first lines, a share of those with a score; groups of copies stay whole."""
        scored = [line for line in self.lines if line.score is not None]
        count = math.ceil(share * len(scored))
        while 0 < count < len(scored) and scored[count - 1].group is not None:
            if scored[count].group != scored[count - 1].group:
                break
            count += 1
        return scored[:count]

    def save(self, path: Path) -> None:
        """Write the list to a file of mode 0600, atomically; an existing file is replaced.

        Raises:
            OSError: The file cannot be written.
        """
        write_lines(path, [self.head, *map(asdict, self.lines)])

    @classmethod
    def load(cls, path: Path) -> RecordList:
        """Return the list from a file of :meth:`save`.

        Raises:
            ValueError: Other users may access the file, or it is not such a list.
            OSError: The file cannot be read.
        """
        unread = f"'{path}' cannot be used as a list of records"
        with explain_errors(unread, ValueError, KeyError, TypeError, error=ValueError):
            check_private(path)
            head, *lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
            if head["kind"] != "records":
                raise ValueError("it is no list of records")
            return cls(head, [_RecordLine(**line) for line in lines])

    def used_up(self) -> RecordList:
        """Return the list, marked as used to drop rows."""
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
    """Return the list of a pool, from the outputs of a model and its base.

    Args:
        released: The outputs on N texts.
        members: (N,) bool, whether each text was trained on.
        rows: The rows of the training data that the texts stand for.
        short: Whether the texts have 1 to 7 label tokens, and get the score for short answers.
        scores: (N,) scores to use instead, such as those beside references; None: the default score
            is computed.
        **settings: as :meth:`RecordList.of` takes them.

    Raises:
        ValueError: There is no member, or no non-member, that occurs once; or a number is not
            finite.
    """
    if scores is None and short:
        scores = ShortAnswers().score(released)
    elif scores is None:
        scores = gain_beyond(released, rows.times == 1)  # a fit on copies would be biased
    return RecordList.of(scores, members, released.now.labels.sum(1), rows, **settings)


def used_up_mark(rows: str | Path) -> Path:
    """Return the path of the file that marks the held-out rows beside ``rows`` as used up.

    It exists if a list of leaked rows was used to drop rows.
    """
    return Path(f"{rows}.used_up.json")
