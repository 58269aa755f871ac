"""Write the list of training rows that the trained weights reveal to a private file of the run.

At a *look* (a measurement during training) the weights are queried with the *pool*: texts that were
trained on, the members, and texts that a random draw held out, the non-members. At the end of each
epoch the list is written again. It has each member's membership score and p-value, and which
members pass a false-discovery rate; its counts, among them a lower bound on the number of revealed
rows, are logged (:mod:`lightning_fedleak.evaluation.metrics.record_list`). All lists of a run share
the rate and the probability of error.
"""

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
    """Write the list of a look, and return its counts by logged name, or why there is none.

    Args:
        run: The run, whose first process writes.
        path: The path of the file.
        pool: The pool of the run, which knows the row numbers of its texts.
        released: The answers of the model and its base to n texts.
        rows: (n,) the indices of these texts in the pool.
        members: (n,) bool, whether each was trained on.
        look: The number of the list, counted from 1.
        share: The share of the rate of false discoveries and of ``alpha`` that this list spends.
        alpha: The probability of error of ``at_least`` over all lists together.
    """
    assert pool.rows is not None
    copies = [pool.rows.copies[row] for row in rows.tolist()]
    compared = {*rows.tolist()}
    excluded = {  # by row number, why a row of the training data is not compared
        number: "short" if bool(pool.is_short[row]) else "unknown"
        for row in pool.trains.nonzero()[:, 0].tolist()
        if row not in compared
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
        return "too few texts are compared for any row to count as revealed: leave out more rows"
    return records.counts
