"""The verdict of a command on trained weights: breaches of limits, files, and the exit status."""

import math
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from rich.console import Console
from rich.table import Table

from lightning_fedleak.attacks.memorization import CombinedReference
from lightning_fedleak.cli.finetuning import SourceError
from lightning_fedleak.cli.studies.training_rows import UnknownLabels
from lightning_fedleak.evidence import HOLDS, match_weights
from lightning_fedleak.report import ReportError, records
from lightning_fedleak.validate import WrongModel

HEADLINES = "combined", "loss_ratio_short", "prompt_ratio"
"""The attacks whose AUC --at-most limits, by pool; that of prompts only with --metric prompts."""
FAILED = "FAILED: above a limit, or unknown"
BREACH = 3  # exit status if leakage exceeds --at-most or is unknown; an error has status 1


def run_measurement(
    measure: Callable[[Namespace, Console], int], options: Namespace, console: Console
) -> int:
    """Return the exit status of a measurement, or say why nothing is known, also in the summary."""
    try:
        return measure(options, console)
    except (UnknownLabels, WrongModel) as error:
        sentence = f"UNKNOWN: {error}."
        console.print(sentence, markup=False)
        summarize(options.summary, FAILED, [sentence], [])
        return BREACH


def write_last(console: Console, status: int, *writes: Callable[[], None]) -> int:
    """Write files after the verdict, and return its status; 1 if it is 0 and one is not written.

    Args:
        console: The console to print on.
        status: The exit status of the verdict.
        writes: Each writes a file.
    """
    for write in writes:
        try:
            write()
        except OSError as error:
            console.print(f"A file is missing: {error}. The verdict above holds.", markup=False)
            status = status or 1
    return status


def summarize(
    path: Path | None, outcome: str, sentences: Sequence[str], tables: Sequence[Table]
) -> None:
    """Append the results to a Markdown file, without texts or row numbers; None writes no file."""
    if path is None:
        return
    lines = [f"### What the trained weights give away: {outcome}", ""]
    for table in tables:
        headers = [str(column.header) for column in table.columns]
        cells = zip(*(column.cells for column in table.columns), strict=True)
        rows = [headers, ["---"] * len(headers), *cells]
        lines += [f"| {' | '.join(map(str, row))} |" for row in rows] + [""]
    lines += [f"- {' '.join(sentence.split())}" for sentence in sentences]
    with path.open("a", encoding="utf-8") as file:
        file.write("\n".join(lines) + "\n")


def breaches_of(
    values: Mapping[str, Mapping[str, float]], metric: str, at_most: float
) -> list[str]:
    """Return a sentence for each result that is or may be above a limit, or is unknown.

    Args:
        values: The values of each attack, and of ``records``; empty if they are unknown.
        metric: A metric, as ``--metric`` takes it.
        at_most: The limit.
    """
    attacks = [name for name in HEADLINES[:2] if name in values] or [HEADLINES[0]]
    attacks += [name for name in values if name.startswith(CombinedReference.default_name)]
    if metric.startswith("entity/"):
        attacks, metric = [metric], "auc"
    elif metric == "prompts":
        attacks, metric = [HEADLINES[2]], "auc"
    elif metric == "at_least":
        attacks = ["records"]
    elif metric in ("extracted", "greedy"):
        attacks = ["extraction"]
    return breaches_among(attacks, values, metric, at_most)


def breaches_among(
    attacks: Sequence[str],
    values: Mapping[str, Mapping[str, float]],
    metric: str,
    at_most: float | None,
) -> list[str]:
    """Return a sentence for each of these attacks whose metric may be above a limit, or unknown."""
    if at_most is None:
        return []
    reasons = {name: breach_of(values.get(name, {}), metric, at_most) for name in attacks}
    return [f"{name}/{metric} {reason}" for name, reason in reasons.items() if reason is not None]


def breach_of(values: Mapping[str, float], metric: str, at_most: float) -> str | None:
    """Return why a result is or may be above a limit, or is unknown; None if it is not above."""
    if values.get("at_least_provable", math.inf) <= at_most:
        return f"is unknown: too few others to show more than --at-most {at_most:g}. Hold out more."
    low = values.get("shown" if metric == "shown" else f"{metric}_low", math.nan)
    high = low if metric == "at_least" else values.get(f"{metric}_high", math.nan)
    if math.isnan(low):
        return "is unknown."
    if values.get(records.WEAK) and low <= at_most:
        return f"is unknown: {records.WEAK_REFERENCE}."
    if low > at_most:
        return f"is shown to be at least {low:.3f}, above --at-most {at_most:g}."
    if high > at_most:
        return (
            f"is unknown: it is between {low:.3f} and {high:.3f}, which does not decide "
            f"--at-most {at_most:g}. Give more texts."
        )
    return None


def check_run(run: Path, model: Path) -> None:
    """Check that a model has the weights in the logs of one of the runs in a folder.

    Logs that do not have its hashes, as of sharded weights, decide nothing.

    Raises:
        SourceError: There are no logs.
        WrongModel: The logs of a run contradict it, and those of no other run hold it.
    """
    verdicts, paths = [], sorted(run.rglob(records.RECORD))
    if not paths:
        raise SourceError(f"--run '{run}' holds no {records.RECORD}")
    for path in paths:
        with suppress(ReportError):  # a run that was cut off has no hashes
            verdicts.append(match_weights(path.parent, model))
    refuting = [verdict.contradictions[0] for verdict in verdicts if verdict.contradictions]
    if refuting and not any(verdict.status == HOLDS for verdict in verdicts):
        raise WrongModel(f"--run '{run}' is not of --model: {refuting[0]}")
