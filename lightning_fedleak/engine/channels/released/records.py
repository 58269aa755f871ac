"""The list of training rows that the trained weights reveal, in a private file of the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from lightning_fedleak.engine.channels.released.pool import Pool
from lightning_fedleak.engine.outcomes import Waiting
from lightning_fedleak.engine.record import accounting
from lightning_fedleak.engine.run import Run, reason
from lightning_fedleak.evaluation.canaries.repeats import PoolRows
from lightning_fedleak.evaluation.metrics.record_list import FALSE_DISCOVERIES, list_records
from lightning_fedleak.model.snapshots import ReleasedModel

RECORDS = "records"
"""The name of the list's counts in the logs, ``leakage/records/at_least``."""
FILE = "records.jsonl"
# The answer of the series at looks within an epoch, which write no list.
BETWEEN = Waiting("rows are listed after each epoch, and at the end", soon=False)


def write_list(
    run: Run,
    path: Path,
    pool: Pool,
    released: ReleasedModel,
    rows: Tensor,
    members: Tensor,
    look: int,
    share: float,
    alpha: float,
) -> dict[str, float] | str:
    """Write the list of rows that count as revealed; return its counts, or why there is none.

    Args:
        run: The run, whose first process writes.
        path: The path of the file.
        pool: The pool of the run.
        released: The answers of the model and its base to n texts.
        rows: (n,) the indices of these texts in the pool.
        members: (n,) bool, whether each was trained on.
        look: The number of the list, counted from 1.
        share: The share of the rate of false discoveries and of ``alpha`` that this list spends.
        alpha: The probability of error of ``at_least`` over all lists together.
    """
    assert pool.rows is not None
    copies = [pool.rows.copies[row] for row in rows.tolist()]
    inside = {*rows.tolist()}
    excluded = {  # rows of the training data that are not compared, and why
        number: "short" if bool(pool.is_short[row]) else "unknown"
        for row in pool.trains.nonzero()[:, 0].tolist()
        if row not in inside
        for number in pool.rows.copies[row]
    }
    excluded = {**pool.rows.apart, **excluded}
    listed = PoolRows(copies, pool.times[rows], excluded, pool.rows.short_copies)
    facts: dict[str, Any] = {
        "pool": pool.digest(rows, members),
        "account": bool(accounting(run.defenses)),
        "training_rows": pool.length,
        "short": bool(pool.is_short[rows].all()),
        "look": look,
        "rate": FALSE_DISCOVERIES * share,
        "alpha": alpha * share,
    }
    try:
        records = list_records(released, members, listed, **facts)
        if run.rank == 0 or run.processes == 1:
            records.save(path)
    except Exception as error:
        return reason(error)
    if not records.head["provable"]:
        return "too few texts are compared to say of any row that it is given away: leave out more"
    return records.counts
