"""A list of training rows by what the trained model gives away of them, and its private file."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_fedleak.attacks.memorization import ShortAnswers, gain_beyond
from lightning_fedleak.evaluation.canaries.repeats import LEAST_LABELS, ScoredTexts
from lightning_fedleak.evaluation.metrics.records import (
    at_least,
    listed,
    most_provable,
    record_p_values,
    smallest_list,
)
from lightning_fedleak.model.snapshots import ReleasedModel
from lightning_fedleak.model.taps import Text
from lightning_fedleak.private_files import check_private, write_lines

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
        cls,
        texts: Sequence[Text],
        scored: ScoredTexts,
        numbers: Sequence[int],
        *,
        short: bool = False,
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
                numbers[row]: "short" if texts[row].n_labels < LEAST_LABELS else "unknown"
                for row in apart
                if numbers[row] >= 0
            },
            [([numbers[row] for row in rows], n) for rows, n in scored.short_copies],
        )


@dataclass(frozen=True)
class RecordLine:
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
        lines: of each row.
    """

    head: Mapping[str, Any]
    lines: Sequence[RecordLine]

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
            rate: of false discoveries.
            alpha: probability that ``at_least`` is too high.
            **facts: of the run, for the head.

        Raises:
            ValueError: no members or no others that occur once, or a score that is NaN.
        """
        alone = rows.times == 1
        score, member = scores[alone], members[alone]
        n, m = int(member.sum()), int((~member).sum())
        p_values = record_p_values(score, member)
        least, provable = smallest_list(n, m, rate), most_provable(n, m, alpha)
        inside = listed(p_values, rate) if least <= n else None

        def line(row: int, text: int, status: str) -> RecordLine:
            score = round(float(scores[text]), 4)
            return RecordLine(row, status, score, labels=int(labels[text]))

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
            RecordLine(row, "repeated", repeats=times, group=group)
            for group, (copies, times) in enumerate(rows.short_copies, first)
            for row in sorted(copies)
        ]
        apart = [RecordLine(row, why) for row, why in sorted(rows.apart.items())]
        head = {
            "kind": "records",
            "version": version("lightning-fedleak"),
            **facts,
            "members": n,
            "others": m,
            "rate": rate,
            "listed": None if inside is None else int(inside.sum()),
            "smallest_list": least,
            "alpha": alpha,
            "at_least": at_least(score, member, alpha) if provable else None,
            "provable": provable,
            **dict.fromkeys(("repeated", "short", "unknown"), 0),
            **Counter(line.status for line in groups + apart),
            "used_up": False,
            "not_said": NOT_SAID,
        }

        def by_score(line: RecordLine) -> float:
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

    def riskiest(self, share: float) -> list[RecordLine]:
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
        try:
            check_private(path)
            head, *lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
            if head["kind"] != "records":
                raise ValueError("it is no list of records")
            return cls(head, [RecordLine(**line) for line in lines])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"'{path}' cannot be used as a list of records: {error}") from error

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
