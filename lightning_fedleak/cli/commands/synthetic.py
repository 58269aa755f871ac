"""``fedleak synthetic``: what generated texts reveal of the rows that a model was trained on.

:func:`run` fits an auxiliary model on the generated texts, queries it and its base with rows that
were trained on (members) and rows that were held out (non-members), and counts passages that rows
and generated texts have in common. It compares both sides in pools of long and of short texts,
prints and writes the results, and checks the limit of ``--at-most``.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping

import torch
from rich.console import Console

from lightning_fedleak.cli.commands import memorization
from lightning_fedleak.cli.finetuning import SourceError, load_tokenizer
from lightning_fedleak.cli.printing import write_json
from lightning_fedleak.cli.studies.memorization import ReleasedPool, used_up_mark
from lightning_fedleak.cli.studies.synthetic import ask_auxiliary, compare_generated, gated_scores
from lightning_fedleak.cli.studies.training_rows import RowReader, UnknownLabels
from lightning_fedleak.model.taps import Text


def run(options: Namespace, console: Console | None = None) -> int:
    """Fit the auxiliary model, compare the rows, print, and write JSON to ``--out`` if given.

    Args:
        options: The options of the command.
        console: The console to print to; stdout by default.

    Returns:
        3 if a score or its interval exceeds ``--at-most``, if such a score is unknown, or if it is
        unknown which tokens of the rows to compare; else 0.

    Raises:
        SourceError: The base or a text cannot be used, or the auxiliary model diverged.
        AnatomyError: The parts of the base could not be found.
    """
    console = console or Console(highlight=False)
    try:
        pools, not_compared, generated = _read(options)
    except UnknownLabels as error:
        console.print(f"UNKNOWN: {error}.")
        memorization.summarize(options.summary, memorization.FAILED, [f"UNKNOWN: {error}."], [])
        return memorization.BREACH
    for sentence in not_compared.values():
        console.print(sentence)
    steps = -(-len(generated) // options.batch_size) * options.epochs
    console.print(
        f"An auxiliary model is fitted on {len(generated)} generated texts: {steps} steps at a "
        f"constant rate of {options.lr:g}."
    )
    queried = [text for pool in pools for text in pool.texts]
    before, after = ask_auxiliary(queried, generated, options)
    is_known = not used_up_mark(options.rows).exists()
    sentences = [] if is_known else [memorization.USED_UP.replace("--members", "--rows")]
    values: dict[str, Mapping[str, float]] = {}
    content: dict[str, object] = {}
    tables = []
    score_names = [name for pool in pools for name in gated_scores(pool)]
    alpha = 0.05 / len(score_names)  # the worst score counts
    indices = torch.split(torch.arange(len(queried)), [len(pool.texts) for pool in pools])
    for pool, rows in zip(pools, indices, strict=True):
        outputs = before.rows(rows), after.rows(rows)
        result, copied = compare_generated(pool, outputs, generated, alpha)
        memorization.print_pool(console, pool, result, is_drawn=options.drawn)
        is_known &= options.drawn or result.distribution_shift is None
        values |= result.values
        tables.append(memorization.table_of(result.values))
        record = memorization.content_of(result, pool) | {"kind": "synthetic", "copied": copied}
        content |= {"short_answers": record} if content else record
        sentences.append(
            f"{copied['members']:.0f} of {result.n_members} rows that were trained on have 13 "
            f"tokens in a row in the generated texts, and {copied['others']:.0f} of "
            f"{result.n_others} non-members (p {copied['p_value']:.1g})."
        )
    for sentence in sentences:
        console.print(sentence)
    content |= {"drawn": options.drawn, "known": is_known, "generated": len(generated)}
    content |= {"not_compared": not_compared}
    if options.out is not None:
        write_json(console, options.out, content)
    names = (*not_compared, *score_names)
    evidence = values if is_known else {}
    breaches = memorization.breaches_among(names, evidence, options.metric, options.at_most)
    for breach in breaches:
        console.print(f"BREACH: {breach}")
    outcome = memorization.FAILED if breaches else "no breach" if is_known else "UNKNOWN"
    sentences += [*breaches, *not_compared.values()]
    memorization.summarize(options.summary, outcome, sentences, tables)
    return memorization.BREACH if breaches else 0


def _read(options: Namespace) -> tuple[list[ReleasedPool], dict[str, str], list[Text]]:
    """Return the pools of rows, the reasons why others are not compared, and the generated texts.

    Pools of prompts are left out. The reasons are given by the name of the score.
    """
    tokenizer = load_tokenizer(options.base)
    columns = options.column, options.prompt_column, options.loss
    reader = RowReader(tokenizer, options.length, *columns)
    column = options.generated_column
    text_reader = RowReader(tokenizer, options.length, column) if column else reader
    rows, others = reader.read(options.rows), reader.read(options.others)
    texts = text_reader.read(options.generated)
    generated = [text for text in texts.values() if text.n_labels]
    if not generated:
        raise SourceError(
            f"--generated '{options.generated}' holds no text of two tokens or more: give the "
            "texts that the model wrote"
        )
    pools, reasons = memorization.pools_of(rows, others, lambda ids: str(tokenizer.decode(ids)))
    reasons = {name: text for name, text in reasons.items() if name in memorization.HEADLINES[:2]}
    return [pool for pool in pools if pool.part != "prompts"], reasons, generated
