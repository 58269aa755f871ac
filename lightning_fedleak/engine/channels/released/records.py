"""Write the list of training rows that the trained weights reveal to a private file of the run.

At a *look* (a measurement during training) the weights are queried with the *pool*: texts that were
trained on, the members, and texts that a random draw held out, the non-members. At the end of each
epoch the list is written again. It has each member's membership score and p-value, and which
members pass a false-discovery rate; its counts, among them a lower bound on the number of revealed
rows, are logged (:mod:`lightning_fedleak.evaluation.metrics.record_list`). All lists of a run share
the rate and the probability of error.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lightning_fedleak.engine.channels.released.audit import Comparison
from lightning_fedleak.engine.options import Options
from lightning_fedleak.engine.outcomes import Series, Waiting
from lightning_fedleak.engine.record import accounting
from lightning_fedleak.engine.run import Run, reason
from lightning_fedleak.evaluation.metrics.record_list import FALSE_DISCOVERIES

RECORDS = "records"
"""The name of the list's counts in the logs, ``leakage/records/at_least``."""
FILE = "records.jsonl"
# The answer of the series at looks within an epoch, which write no list.
BETWEEN = Waiting("rows are listed after each epoch, and at the end", soon=False)


def check_listed(all_series: Iterable[Series], options: Options) -> None:
    """Raise an error if records or entities are asked for that no attack reads."""
    names = [series.log_name for series in all_series if "entity/" in series.name]
    unread = options.memorization.records and all(s.name != RECORDS for s in all_series)
    if unread or (options.entities and len({*names}) < max(1, len(names))):
        raise ValueError(
            "records=True and entities= need an attack that reads texts or the trained "
            "weights: add Combined(), and give planted kinds names that are not in entities="
        )


def write_list(
    run: Run, path: Path, compared: Comparison, number: int, share: float
) -> dict[str, float] | str:
    """Write the list of a look, and return its counts by logged name, or why there is none.

    Args:
        run: The run, whose first process writes.
        path: The path of the file.
        compared: The texts of the look.
        number: The number of the list, counted from 1.
        share: The share of the rate of false discoveries and of the error that this list spends.
    """
    pool = compared.audit.pool
    facts: dict[str, Any] = {
        "pool": pool.digest(compared.index, compared.members),
        "account": bool(accounting(run.defenses)),
        "training_rows": pool.length,
        "look": number,
        "rate": FALSE_DISCOVERIES * share,
        "alpha": compared.alpha * share,
    }
    try:
        records = compared.list_records(**facts)
        if run.rank == 0 or run.processes == 1:
            records.save(path)
    except Exception as error:
        return reason(error)
    if not records.head["provable"]:
        return "too few texts are compared for any row to count as revealed: leave out more rows"
    return records.counts
