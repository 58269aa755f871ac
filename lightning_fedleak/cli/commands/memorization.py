"""``fedleak memorization``: what a trained model leaks of its training texts, before its release.

:func:`run` reads members (texts that were trained on) and non-members, and sorts them into pools:
long texts, short texts and prompts. It queries the trained model and its base (before training),
and compares the scores in each pool, with reference models if there are any. Then it lists rows,
writes results, and checks the limits of ``--at-most``, which an unknown rate breaches too.
"""

from __future__ import annotations

import math
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from lightning_fedleak.attacks import UnusableObservation
from lightning_fedleak.attacks.memorization.scores import MAX_GAIN, CombinedReference
from lightning_fedleak.cli.commands.verdicts import (
    BEYOND,
    BREACH,
    FAILED,
    HEADLINES,
    breaches_of,
    check_run,
    run_measurement,
    summarize,
    write_last,
)
from lightning_fedleak.cli.finetuning import SourceError, load_tokenizer, refuse_errors
from lightning_fedleak.cli.printing import print_table, share, write_json
from lightning_fedleak.cli.studies import models
from lightning_fedleak.cli.studies.memorization import Comparison, ReleasedPool, used_up_mark
from lightning_fedleak.cli.studies.references import Recipe, References
from lightning_fedleak.cli.studies.training_rows import RowReader
from lightning_fedleak.engine.reference import beside, describe_reference, measure_strength
from lightning_fedleak.evaluation.canaries.repeats import MIN_LABELS, Part
from lightning_fedleak.evaluation.entities import EntityFinder, FoundEntities, entity_names
from lightning_fedleak.evaluation.metrics.record_list import RecordList
from lightning_fedleak.evaluation.metrics.released import (
    FPR,
    FPRS,
    check_unseen,
    membership_values,
    rate_name,
)
from lightning_fedleak.model.snapshots import ReleasedModel, TokenSnapshot
from lightning_fedleak.model.taps import Text, label_places
from lightning_fedleak.report import records

Answer = tuple[TokenSnapshot, TokenSnapshot]
"""The token log probabilities of a pool's texts: by the base model, and by the trained model."""

# How often texts were trained on, by the end of the name of an extraction rate.
TIERS = {"_x1": ", once", "_x2": ", 2 to 4 times", "_x5": ", 5 to 16 times", "_x17": ", more often"}
USED_UP = (
    "Membership is UNKNOWN: rows were dropped from --members by a list that depends on the "
    "held-out rows, which are used up. Hold out rows of a new draw, and train on the rest."
)
UNKNOWN = "Membership is UNKNOWN: members and others are not exchangeable, or are used up."
_PARTS: tuple[Part, ...] = ("long", "short", "prompts")  # the pools, in the order of HEADLINES
_TEXTS = "8 label tokens or more", "1 to 7 label tokens", "a prompt of 8 tokens or more"  # by pool


def run(options: Namespace, console: Console | None = None) -> int:
    """Compare members with non-members, print the results, and write the requested files.

    Args:
        options: The options of the command.
        console: The console to print on; stdout by default.

    Returns:
        The exit status: 3 if a limited metric is unknown, or its interval reaches above
        ``--at-most``; if a model lacks weights or is its own base; if the rows refute ``--drawn``;
        if nothing says which tokens the loss was computed on; or if ``--records`` gives no list and
        there is no limit. Else 0.

    Raises:
        SourceError: A model or text cannot be used.
        AnatomyError: A model's parts could not be found.
    """
    console = console or Console(highlight=False)
    return run_measurement(_measure_model, options, console)


def read_sides(
    reader: RowReader, console: Console, members: str, others: str
) -> tuple[dict[int, Text], dict[int, Text]]:
    """Return the texts of both sides by row number, and print how many rows have no text.

    Raises:
        SourceError: A source cannot be read, or both are the same rows.
    """
    sides = reader.read(members), reader.read(others)
    contents = [[text.content for text in side.values()] for side in sides]
    if contents[0] == contents[1]:
        raise SourceError(f"'{members}' and '{others}' are the same rows: give others")
    for source, count in reader.empty.items():
        if count:
            console.print(f"{count} rows of '{source}' have no text.", markup=False)
    return sides


def _measure_model(options: Namespace, console: Console) -> int:
    """Compare, print and write, and return the exit status; see :func:`run`.

    Raises:
        SourceError: A model or text cannot be used.
        UnknownLabels: Nothing says which tokens the loss was computed on.
        WrongModel: A model lacks weights, or the trained one is its base.
    """
    limits = _limits(options)
    recipe = Recipe.of(options)
    if options.run is not None:
        check_run(options.run, Path(options.model))
    reader = _reader(options)
    members, others = read_sides(reader, console, options.members, options.others)
    pools, not_compared = pools_of(members, others, lambda ids: str(reader.tokenizer.decode(ids)))
    for sentence in not_compared.values():
        console.print(sentence)
    rows = [*((text, True) for text in members.values())]
    rows += [(text, False) for text in others.values()]
    finder = EntityFinder(options.entities, [reader.tokenizer])
    entities = FoundEntities(finder, reader.head == "causal")
    entities.locate([text for text, _ in entities.counting(rows)])
    whole_rows = [text.whole for text, _ in rows] if options.entities else []
    start = time.perf_counter()
    groups = [*(pool.texts for pool in pools), whole_rows]
    answers, references, reference = _query(groups, options)
    gains: dict[int, Tensor] = {}
    if recipe is not None:
        seconds = time.perf_counter() - start
        gains = _train_references(console, pools, answers, options, recipe, seconds)
    n_scores = 1 + bool(gains) + bool(references)
    alpha = 0.05 / n_scores  # Bonferroni: the worst score counts
    results, shifts = _compare(
        console, pools, answers, references, gains, alpha, options, len(members)
    )
    pool = pools[0]
    is_refuted = options.drawn and any(s for part, s in shifts.items() if part != "prompts")
    if used_up_mark(options.members).exists():
        shifts = dict.fromkeys(shifts, USED_UP)
        console.print(USED_UP)
    is_known = all(shift is None for part, shift in shifts.items() if part != "prompts")
    is_member = torch.tensor([row_is_member for _, row_is_member in rows])
    by_kind = _compare_entities(entities, answers[-1], is_member, shifts)
    entity_values = {name: rates for name, rates in by_kind.items() if not isinstance(rates, str)}
    tables = [table_of(result.values) for result in results]
    if entity_values:
        tables.append(table_of(entity_values))
        print_table(console, tables[-1])
    unknown_kinds = _unknown_kinds(by_kind)
    for sentence in unknown_kinds:
        console.print(sentence)
    counts: Mapping[str, float] = {}
    uncounted, ranking = 0, None
    if options.records is not None and is_known:
        ranking, counts = _list_rows(console, pool, answers[0], gains.get(0), alpha, options)
        if uncounted := _sizes(members)[not pool.is_short]:
            console.print(
                f"The list holds only rows with {_TEXTS[pool.is_short]}. {uncounted} members with "
                f"{_TEXTS[not pool.is_short]} are not counted: --metric at_least is UNKNOWN."
            )
    values: dict[str, Mapping[str, float]] = {attack: {} for attack in not_compared}
    for result in results:
        values |= result.values
    reference_sentences = reference_in_words(reference, values)
    for sentence in reference_sentences:
        console.print(f"{sentence}.")
    values |= {"prompt_ratio": {}} if shifts.get("prompts") is not None else {}
    values |= {} if uncounted else {"records": counts}
    values |= entity_values
    evidence = values if is_known else {}
    breaches = [breach for limit in limits for breach in breaches_of(evidence, *limit)]
    for breach in breaches:
        console.print(f"BREACH: {breach}")
    is_unlisted = not limits and options.records is not None and not counts
    status = BREACH if breaches or is_unlisted or is_refuted else 0
    sentences = [*breaches, *not_compared.values(), *unknown_kinds, *[UNKNOWN] * (not is_known)]
    sentences += [f"{metric} at most {limit:g}" for metric, limit in limits] + reference_sentences
    success = "passed" if limits else "no limit was set" if is_known else "UNKNOWN"
    outcome = FAILED if status else success
    content = content_of(results[0], pool) | {"drawn": options.drawn, "known": is_known}
    optional: dict[str, object] = {"records": counts, "not_compared": not_compared}
    optional |= {"entities": by_kind, "reference": reference}
    content |= {name: entries for name, entries in optional.items() if entries}
    for part_pool, part_result in zip(pools[1:], results[1:], strict=True):
        part = part_pool.part
        name = {"short": "short_answers"}.get(part, part)
        content[name] = {**content_of(part_result, part_pool), "known": shifts[part] is None}

    def list_rows() -> None:
        if ranking is not None:
            ranking.save(options.records)
            console.print(f"{options.records} holds the numbers of the rows.")

    write_results = partial(write_json, console, options.out, content)
    add_summary = partial(summarize, options.summary, outcome, sentences, tables)
    return write_last(console, status, list_rows, write_results, add_summary)


def _compare(
    console: Console,
    pools: Sequence[ReleasedPool],
    answers: Sequence[Answer],
    references: Sequence[TokenSnapshot],
    gains: Mapping[int, Tensor],
    alpha: float,
    options: Namespace,
    n_members: int,
) -> tuple[list[Comparison], dict[Part, str | None]]:
    """Compare members with non-members in each pool, and print the results.

    Also return why members and non-members of each pool may not be exchangeable, or None.

    ``references`` holds the answers of ``--reference`` for each pool, if there is one; ``gains``
    the gains beyond the trained ``--references``, by the pool's index.
    """
    results, shifts = [], dict[Part, str | None]()
    for i, (pool, answer) in enumerate(zip(pools, answers, strict=False)):
        message = f"--model '{options.model}' cannot be read"
        with refuse_errors(message, UnusableObservation):
            reference = references[i] if references else None
            result = pool.compare(*answer, reference=reference, alpha=alpha)
        shift = shifts[pool.part] = pool.why_unknown(answer[0], result, drawn=options.drawn)
        if reference is not None and pool.part == "long" and shift is None:
            unique = pool.alone
            sides = pool.compressed[unique], pool.members[unique]
            with refuse_errors("--reference", ValueError):
                check_unseen(reference.rows(unique), answer[0].rows(unique), *sides)
        if reference is not None and CombinedReference.default_name in result.values:
            released = ReleasedModel(answer[1], answer[0], pool.compressed, None, reference)
            rows = options.reference_rows, n_members
            strength = measure_strength(released.rows(pool.alone), pool.members[pool.alone], *rows)
            name = CombinedReference.default_name
            values = beside(strength, result.values[name])
            result = replace(result, values={**result.values, name: values})
            if strength.note:
                console.print(f"Of the reference: {strength.note}.")
        if (scores := gains.get(i)) is not None:
            unique, name = pool.alone, f"{BEYOND}{'_short' * pool.is_short}"
            sides = scores[unique], pool.members[unique]
            beyond_references = membership_values(*sides, alpha=alpha, exact=pool.is_short)
            result = replace(result, values={**result.values, name: beyond_references})
        results.append(result)
        print_pool(console, pool, result, shift, is_drawn=options.drawn)
        base, now = (snapshot.rows(pool.alone) for snapshot in answer)
        gained, members = (now.log_probs > base.log_probs) & base.labels, pool.members[pool.alone]
        shares = [float(gained[s].sum() / base.labels[s].sum()) for s in (members, ~members)]
        console.print(
            "The model is better than its base on {:.0%} of the tokens of members, and on {:.0%} "
            "of those of others.".format(*shares)
        )
    return results, shifts


def _compare_entities(
    entities: FoundEntities, answer: Answer, is_member: Tensor, shifts: Mapping[Part, str | None]
) -> dict[str, Mapping[str, float] | str]:
    """Return the rates by kind of personal data and position, or the reason if they are unknown."""
    base, now = answer
    by_kind: dict[str, Mapping[str, float] | str] = dict(
        entities.compare(now, base, torch.arange(len(is_member)), is_member)
    )
    if shift := shifts.get("prompts"):
        by_kind |= {name: f"prompts are {shift}" for name in by_kind if "/prompt" in name}
    return by_kind


def _unknown_kinds(by_kind: Mapping[str, Mapping[str, float] | str]) -> list[str]:
    """Return a sentence for each reason why results are unknown, with their names."""
    reasons = {name: reason for name, reason in by_kind.items() if isinstance(reason, str)}
    return [f"UNKNOWN: {names}: {reason}." for reason, names in records.by_reason(reasons).items()]


def _list_rows(
    console: Console,
    pool: ReleasedPool,
    answer: Answer,
    gains: Tensor | None,
    alpha: float,
    options: Namespace,
) -> tuple[RecordList, Mapping[str, float]]:
    """Return the list of rows of a pool and its counts, which are printed.

    ``gains`` beyond trained references order the list; None: the default score does. With gains,
    the counts are those of the score with the higher lower bound on the number of leaked rows.
    """
    ranking = pool.list_records(*answer, alpha, scores=gains, references=options.references)
    text = (
        "Of {members} rows at least {at_least} leak from the trained model (95%), and {listed} are "
        "listed at a false-discovery rate of {rate:g} (a list holds {smallest_list} or more). "
        "{repeated} rows have copies, {short} are short, and {unknown} share passages."
    ).format(**ranking.head)
    text = text.replace("None", "an unknown number")
    console.print(text)
    if gains is None:
        return ranking, ranking.counts
    default_counts = pool.list_records(*answer, alpha).counts
    return ranking, max(ranking.counts, default_counts, key=lambda counts: counts["at_least"])


def _query(
    groups: Sequence[Sequence[Text]], options: Namespace
) -> tuple[list[Answer], list[TokenSnapshot], records.ReferenceFacts | None]:
    """Query the base, the trained model and the reference model once for each text.

    Returns:
        For each group of texts the answers of base and trained model; for each group those of the
        reference model, and facts about it. Without a reference these are empty and None.
    """
    if options.reference is not None:  # checked before the queries, which may take minutes
        with refuse_errors("--reference cannot be loaded", SourceError):
            models.released_config(options.reference, options.base)
    texts = {text.whole.content: text.whole for group in groups for text in group}
    answers = models.log_probs_before_and_after([*texts.values()], options.model, options.base)
    indices = {key: i for i, key in enumerate(texts)}

    def select(snapshot: TokenSnapshot, texts: Sequence[Text]) -> TokenSnapshot:
        rows = [indices[text.whole.content] for text in texts]
        positions = label_places(texts, snapshot.labels.shape[1])
        return snapshot.rows(torch.tensor(rows, dtype=torch.long)).within(positions)

    pairs = [(select(answers[0], group), select(answers[1], group)) for group in groups]
    if options.reference is None:
        return pairs, [], None
    reference = models.load_trained(options.reference, options.base, "--reference")
    facts = describe_reference(options.reference, options.reference_rows, reference)
    mask = models.mask_of(options.base, models.released_config(options.reference, options.base)[1])
    outputs = models.query_texts(reference, [*texts.values()], mask, "--reference")
    return pairs, [select(outputs, group) for group in groups], facts


def _train_references(
    console: Console,
    pools: Sequence[ReleasedPool],
    answers: Sequence[Answer],
    options: Namespace,
    recipe: Recipe,
    seconds: float,
) -> dict[int, Tensor]:
    """Train reference models, and print their effect. Pools of prompts are skipped.

    Return the gains beyond the references, by the pool's index. ``seconds`` is the time that the
    base and the trained model took for all texts.
    """
    by_number = {n: pool for n, pool in enumerate(pools) if pool.part != "prompts"}
    texts = {text.content: text for pool in by_number.values() for text in pool.texts}
    indices = {content: n for n, content in enumerate(texts)}
    references = References([*texts.values()], options, recipe)
    console.print(references.describe(seconds / 2))
    references.ask(answers[0][0].log_probs)
    scores = {}
    for n, pool in by_number.items():
        rows = [indices[text.content] for text in pool.texts]
        scores[n] = references.scores(rows, *answers[n], None if pool.is_short else MAX_GAIN)
        before, after = (pool.list_records(*answers[n], scores=s) for s in (None, scores[n]))
        text = (
            f"Of {after.head['members']} rows with {_TEXTS[pool.is_short]}, {_tpr(after)} are "
            f"detected at 1% FPR with {options.references} references and {_tpr(before)} without; "
            f"{after.head['listed']} are listed with them and {before.head['listed']} without."
        )
        console.print(text.replace("None", "an unknown number"))
    return scores


def _tpr(ranking: RecordList) -> str:
    """Return the TPR at 1% FPR of the score that orders the list, as text."""
    p_values = [line.p for line in ranking.lines if line.p is not None]
    n_others = int(ranking.head["others"])
    if n_others * FPR < 1:
        return f"an unknown share (with {n_others} others)"
    max_p = (1 + int(FPR * n_others)) / (n_others + 1) + 1e-6  # the list's p are rounded
    return f"{sum(p <= max_p for p in p_values) / len(p_values):.0%}"


def pools_of(
    members: Mapping[int, Text], others: Mapping[int, Text], decode: Callable[[list[int]], str]
) -> tuple[list[ReleasedPool], dict[str, str]]:
    """Return the pools of long texts, short texts and prompts that have enough texts.

    Also return why the members of other pools are not compared, by the names in ``HEADLINES``.

    Raises:
        ValueError: There is no pool of texts.
    """
    pools, failures, not_compared = [], [], dict[str, str]()
    for part, attack, n, words in zip(_PARTS, HEADLINES, _sizes(members), _TEXTS, strict=True):
        sides = [*members.values()], [*others.values()]
        try:
            pools.append(ReleasedPool(*sides, decode, [*members], part=part))
        except ValueError as error:
            failures.append(error)
            unknown = f"The leakage of {n} members with {words} is UNKNOWN: {error}."
            not_compared |= {attack: unknown} if n else {}
    if not pools or pools[0].part == "prompts":
        raise failures[0]
    return pools, not_compared


def _sizes(texts: Mapping[int, Text]) -> tuple[int, int, int]:
    """Return the numbers of long texts, of short texts, and of texts with a prompt."""
    n_labels = [text.n_labels for text in texts.values()]
    n_short = sum(0 < n < MIN_LABELS for n in n_labels)
    n_prompts = sum(text.prompt.n_labels >= MIN_LABELS for text in texts.values())
    return sum(n >= MIN_LABELS for n in n_labels), n_short, n_prompts


def print_pool(
    console: Console, pool: ReleasedPool, result: Comparison, shift: str | None, *, is_drawn: bool
) -> None:
    """Print the results of a pool, and why they are unknown if there is a shift."""
    print_table(console, table_of(result.values))
    copies = int((~pool.alone).sum())
    copies_remark = f"; {copies} members that have copies were tested for extraction only"
    remark = {
        "short": "all with 1 to 7 label tokens",
        "prompts": "by their prompts only, which the loss is not computed on",
        "long": f"{pool.repeated} texts that repeat others or parts of them and {pool.short} short "
        f"texts were excluded{copies_remark * (copies > 0)}",
    }[pool.part]
    console.print(
        f"{HEADLINES[_PARTS.index(pool.part)]} counts. "
        f"{result.n_members} members and {result.n_others} others were compared; {remark}. "
        f"A TPR below {result.visible:.3f} may not be detected with so many texts. Results are "
        f"comparable only on the same texts: pool {pool.digest}."
    )
    if shift is not None:
        advice = "" if is_drawn else ", or some 1,000 texts of the same kind on each side"
        console.print(
            f"Members and others are {shift}. Membership is UNKNOWN: give others that were drawn "
            f"from the same rows (leave_out) and --drawn{advice}."
        )
    needed = {f"{fpr:.1%}": n for fpr, n in result.needed.items() if n > result.n_others}
    if needed:
        console.print(
            f"TPRs at {' and '.join(needed)} FPR are unknown: "
            f"{' and '.join(map(str, needed.values()))} are needed of others."
        )


def _limits(options: Namespace) -> list[tuple[str, float]]:
    """Return each limited metric with its limit.

    Raises:
        SourceError: A limit does not fit the other options.
    """
    limits = [(metric or options.metric, limit) for metric, limit in options.at_most or ()]
    if options.records is None and "at_least" in {options.metric, *(name for name, _ in limits)}:
        raise SourceError("--metric at_least counts the rows of a list: give --records FILE")
    names = entity_names(Path(kind).stem for kind in options.entities or ())
    for metric, limit in limits:
        if metric.startswith("entity/") and metric not in names:
            kinds = ", ".join(names) if names else "the values in the texts: give --entities"
            raise SourceError(f"--at-most {metric}=... is none of {kinds}")
        if metric != "at_least" and limit > 1:
            raise SourceError(f"--at-most {limit:g} is above 1: {metric} is a share")
    return limits


def _reader(options: Namespace) -> RowReader:
    """Return the reader of rows, with the trained model's chat template if it has one.

    Raises:
        SourceError: The options do not fit the task of the model.
    """
    tokenizer = load_tokenizer(options.base)
    config, head = models.released_config(options.model, options.base)
    template = None
    if (Path(options.model) / "tokenizer_config.json").is_file():
        template = load_tokenizer(options.model).chat_template
    has_one_label = getattr(config, "problem_type", None) in (None, "single_label_classification")
    problem = None
    if head == "causal" and options.label_column is not None:
        problem = "--label-column is for classifiers, and --model is none: leave it out"
    elif head == "row" and not (has_one_label and config.num_labels > 1):
        problem = "--model must predict one class for each row, not several classes or a number"
    if problem:
        raise SourceError(problem)
    return RowReader(
        tokenizer,
        options.length,
        options.column,
        options.prompt_column,
        options.loss,
        template,
        head,
        options.label_column,
        getattr(config, "label2id", None) or {},
    )


def content_of(result: Comparison, pool: ReleasedPool) -> dict[str, object]:
    """Return the results of a pool for JSON."""
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


def reference_in_words(
    reference: records.ReferenceFacts | None, values: Mapping[str, Mapping[str, float]]
) -> list[str]:
    """Return a sentence about the reference model; an empty list without one."""
    if reference is None:
        return []
    rates = values.get(CombinedReference.default_name, {})
    strength = rates.get(records.STRENGTH, math.nan)
    weak = bool(rates.get(records.WEAK))
    words = reference.in_words(None if math.isnan(strength) else strength, weak=weak)
    return [f"Reference of {CombinedReference.default_name}: {words}"]


def tpr_in_words(values: Mapping[str, float], name: str) -> str:
    """Return a TPR with its interval; "unknown" with too few non-members, empty without one."""
    if math.isnan(value := values.get(name, math.nan)):
        return "unknown" if name in values else ""
    low, high = values[f"{name}_low"], values[f"{name}_high"]
    return f"{value:.3f} ({low:.3f} {'or more' if math.isnan(high) else f'to {high:.3f}'})"


def table_of(results: Mapping[str, Mapping[str, float]]) -> Table:
    """Return a table with a row for each attack, or for each kind and place of personal data."""
    rows = Table("attack", "AUC", "95%", "p", *(f"TPR at {fpr:.1%} FPR" for fpr in FPRS))
    for name, values in results.items():
        if "auc" in values:
            rows.add_row(
                name,
                share(values["auc"]),
                f"{values['auc_low']:.3f} to {share(values['auc_high'])}",
                f"{values['p_value']:.1g}",
                *(tpr_in_words(values, rate_name(fpr)) for fpr in FPRS),
            )
            continue
        for tier, words in {"": "", **TIERS}.items():
            if (excess := f"extracted{tier}") not in values:
                continue
            rows.add_row(
                f"{name}: excess of members{words}",
                share(values[excess]),
                " to ".join(share(values[f"{excess}_{end}"]) for end in ("low", "high")),
                "",
                f"greedy {share(values[f'greedy{tier}'])}",
                "",
            )
    return rows
