"""``fedleak memorization``: what a trained model gives away, before it is released."""

from __future__ import annotations

import json
import math
from argparse import Namespace
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

from rich.console import Console
from rich.table import Table

from lightning_fedleak.attacks import UnusableObservation
from lightning_fedleak.cli.commands.printing import print_table, three_digits
from lightning_fedleak.cli.finetuning import SourceError, load_tokenizer
from lightning_fedleak.cli.studies.memorization import Comparison, ReleasedPool
from lightning_fedleak.cli.studies.models import ask_both
from lightning_fedleak.cli.studies.training_rows import RowReader, UnknownLabels
from lightning_fedleak.report.records import as_json

TIERS = {
    "_x1": ", once",
    "_x2": ", 2 to 4 times",
    "_x5": ", 5 to 16 times",
    "_x17": ", more often",
}
BREACH = 3  # exit status where leakage exceeds --at-most or is unknown, apart from an error's 1


def run(options: Namespace, console: Console | None = None) -> int:
    """Compare, print, and write JSON where ``--out`` asks for it.

    Args:
        options: of the command.
        console: where to print; stdout by default.

    Returns:
        0; 3 where the metric is above ``--at-most``, unknown, or may be above by its interval, and
        where nothing says which tokens the loss was computed on.

    Raises:
        SourceError: a model or text cannot be used.
        AnatomyError: a model's parts could not be found.
    """
    console = console or Console(highlight=False)
    reader = _reader(options)
    try:
        members, others = reader.read(options.members), reader.read(options.others)
    except UnknownLabels as error:
        console.print(f"UNKNOWN: {error}.")
        return BREACH
    decode = reader.tokenizer.decode
    pool = ReleasedPool([*members.values()], [*others.values()], lambda ids: str(decode(ids)))
    base, now = ask_both(pool.texts, options.model, options.base)
    try:
        result = pool.compare(base, now)
    except UnusableObservation as error:
        raise SourceError(f"--model '{options.model}' cannot be read: {error}") from error
    is_known = options.drawn or result.other_law is None
    print_table(console, _table(result))
    copies = int((~pool.alone).sum())
    of_copies = f"; {copies} members that have copies were asked for extraction alone"
    console.print(
        f"{result.n_members} members and {result.n_others} others were compared; "
        f"{pool.repeated} texts that repeat others or parts of them and {pool.short} short "
        f"ones were left out{of_copies * (copies > 0)}. A TPR below {result.visible:.3f} could "
        f"stay unseen with so many. Results compare on the same texts only: pool {pool.digest}."
    )
    for sentence in _warnings(result, drawn=options.drawn):
        console.print(sentence)
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        content = _content(result, pool) | {"drawn": options.drawn, "known": is_known}
        options.out.write_text(json.dumps(as_json(content), indent=1, allow_nan=False) + "\n")
        console.print(str(options.out))
    if options.at_most is None:
        return 0
    attack = "extraction" if options.metric in ("extracted", "greedy") else "combined"
    values = result.values[attack] if is_known else {}
    breach = _breach(values, options.metric, options.at_most)
    if breach is not None:
        console.print(f"BREACH: {attack}/{options.metric} {breach}")
    return 0 if breach is None else BREACH


def _reader(options: Namespace) -> RowReader:
    """Return the reader of rows, with the chat template of the trained model where it has one."""
    tokenizer = load_tokenizer(options.base)
    template = None
    if (Path(options.model) / "tokenizer_config.json").is_file():
        template = load_tokenizer(options.model).chat_template
    return RowReader(
        tokenizer, options.length, options.column, options.prompt_column, options.loss, template
    )


def _warnings(result: Comparison, *, drawn: bool) -> list[str]:
    """Return what makes numbers unknown, and what to do."""
    sentences = []
    if (why := result.other_law) is not None:
        finding = f"Members and others are {why}."
        sentences.append(
            f"{finding} --drawn says that the others were chosen at random, so that this is chance."
            if drawn
            else f"{finding} Membership is UNKNOWN: give others that were drawn from the same "
            "rows (leave_out) and --drawn, or more texts of the same kind."
        )
    if result.n_others < result.needed:
        sentences.append(
            f"'shown' is unknown: {result.n_others} others were scored, {result.needed} are needed."
        )
    return sentences


def _breach(values: Mapping[str, float], metric: str, at_most: float) -> str | None:
    """Return why a result is above a threshold, or may be; None where it is not."""
    low = values.get("shown" if metric == "shown" else f"{metric}_low", math.nan)
    high = values.get(f"{metric}_high", math.nan)
    if math.isnan(low):
        return "is unknown."
    if low > at_most:
        return f"is shown to be at least {low:.3f}, above --at-most {at_most:g}."
    if high > at_most:
        return (
            f"is unknown: it lies between {low:.3f} and {high:.3f}, which does not decide "
            f"--at-most {at_most:g}. Give more texts."
        )
    return None


def _content(result: Comparison, pool: ReleasedPool) -> dict[str, object]:
    """Return the result for JSON."""
    return {
        "kind": "memorization",
        "version": version("lightning-fedleak"),
        "members": result.n_members,
        "others": result.n_others,
        "repeated": pool.repeated,
        "short": pool.short,
        "pool": pool.digest,
        "visible_tpr": result.visible,
        "blind": result.blind,
        "attacks": result.values,
    }


def _table(result: Comparison) -> Table:
    """Return a table with a row for each attack."""
    rows = Table("attack", "AUC", "95%", "p", "shown TPR at 1% FPR")
    for name, values in result.values.items():
        if "auc" in values:
            rows.add_row(
                name,
                three_digits(values["auc"]),
                f"{values['auc_low']:.3f} to {values['auc_high']:.3f}",
                f"{values['p_value']:.1g}",
                three_digits(values["shown"]),
            )
            continue
        for tier, words in {"": "", **TIERS}.items():
            if (excess := f"extracted{tier}") not in values:
                continue
            rows.add_row(
                f"{name}: excess of members{words}",
                three_digits(values[excess]),
                " to ".join(three_digits(values[f"{excess}_{end}"]) for end in ("low", "high")),
                "",
                f"greedy {three_digits(values[f'greedy{tier}'])}",
            )
    return rows
