"""``fedleak memorization``: what a trained model leaks of its training texts, before its release.

:func:`run` reads members (texts that were trained on) and non-members, and sorts them into pools:
long texts, short texts and prompts. It queries the trained model and its base (before training),
and compares the scores in each pool, with reference models if there are any. Then it lists rows,
writes results, and checks the limits of ``--at-most``, which an unknown rate breaches too.
"""

import math
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from lightning_fedleak.attacks import UnusableObservation
from lightning_fedleak.cli.commands.verdicts import (
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
from lightning_fedleak.cli.studies.references import Recipe, TrainedReferences
from lightning_fedleak.cli.studies.training_rows import RowReader
from lightning_fedleak.engine.channels.released.audit import Audit, Comparison
from lightning_fedleak.engine.channels.released.pool import MIN_TEXTS, Pool
from lightning_fedleak.engine.reference import describe_all, describe_reference, inside_of
from lightning_fedleak.evaluation.canaries.repeats import MIN_LABELS, REPEATS, Part
from lightning_fedleak.evaluation.entities import EntityFinder, FoundEntities, entity_names
from lightning_fedleak.evaluation.metrics.record_list import RecordList, used_up_mark
from lightning_fedleak.evaluation.metrics.released import (
    FPRS,
    blind_aucs,
    min_non_members,
    rate_name,
    visible_tpr,
)
from lightning_fedleak.model.snapshots import References, TokenSnapshot
from lightning_fedleak.model.taps import Text
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
OF_ONE_FORM = (
    "If the rows are one form, filled in, give rows of input_ids and labels, with -100 at the "
    "tokens of the form, so that only what was filled in is compared. If rows quote one another, "
    "make each thread one row, and draw again"
)
MIN_STEP = 6.0  # standard errors; lower: ends by chance. A cut to a third of the tokens had 13
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
    pool = Pool.of_sides([*members.values()], [*others.values()], [*members])
    parts, not_compared = find_parts(pool, members)
    for sentence in not_compared.values():
        console.print(sentence)
    rows = [*((text, True) for text in members.values())]
    rows += [(text, False) for text in others.values()]
    finder = EntityFinder(options.entities, [reader.tokenizer])
    entities = FoundEntities(finder, reader.head == "causal")
    entities.locate([text for text, _ in entities.counting(rows)])
    start = time.perf_counter()
    seen = _read_rows_of_references(reader, options)
    before, after, references, reference = _query(
        [pool.texts, [text for text, _ in rows] if options.entities else []], seen, options
    )
    seconds = time.perf_counter() - start
    n_rows = [] if reference is None else [reference.rows]
    if recipe is not None:
        index = torch.cat([pool.everyone(part)[0] for part in parts if part != "prompts"])
        trained = TrainedReferences(pool.texts, index, options, recipe)
        console.print(trained.describe(seconds / 2))
        references = trained.ask(before[0]).beside(references)
        n_rows += map(len, trained.rows)
    audit = Audit(
        pool,
        before[0],
        lambda ids: str(reader.tokenizer.decode(ids)),
        references,
        None if None in n_rows else min(filter(None, n_rows), default=None),
        halves=recipe is not None and reference is None,
    )
    alpha = 0.05 / (1 + (references is not None))  # Bonferroni: the worst score counts
    results = [audit.part(part, after[0], alpha=alpha) for part in parts]
    shifts = _compare(console, results, options)
    first = results[0]
    is_refuted = options.drawn and any(shifts.values())
    if used_up_mark(options.members).exists():
        shifts = dict.fromkeys(shifts, USED_UP)
        console.print(USED_UP)
    is_known = all(shift is None for part, shift in shifts.items() if part != "prompts")
    is_member = torch.tensor([row_is_member for _, row_is_member in rows])
    by_kind = _compare_entities(entities, (before[1], after[1]), is_member, shifts)
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
        ranking, counts = _list_rows(console, first)
        is_short = first.part == "short"
        if uncounted := _sizes(members)[not is_short]:
            console.print(
                f"The list holds only rows with {_TEXTS[is_short]}. {uncounted} members with "
                f"{_TEXTS[not is_short]} are not counted: --metric at_least is UNKNOWN."
            )
    values: dict[str, Mapping[str, float]] = {attack: {} for attack in not_compared}
    facts = [f"Reference of combined_reference: {one.in_words()}" for one in [reference] if one]
    for result in results:
        values |= result.values
        if result.beside_references() and result.strength is not None and result.strength.note:
            facts.append(f"Of the reference: {result.strength.note}")
    for sentence in facts:
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
    if limits and not status:
        console.print("Every limit of --at-most holds.")
    sentences = [*breaches, *not_compared.values(), *unknown_kinds, *[UNKNOWN] * (not is_known)]
    sentences += [f"{metric} at most {limit:g}" for metric, limit in limits] + facts
    success = "passed" if limits else "no limit was set" if is_known else "UNKNOWN"
    outcome = FAILED if status else success
    content = content_of(first) | {"drawn": options.drawn, "known": is_known}
    optional: dict[str, object] = {"records": counts, "not_compared": not_compared}
    optional |= {"entities": by_kind, "reference": reference}
    content |= {name: entries for name, entries in optional.items() if entries}
    for result in results[1:]:
        name = {"short": "short_answers"}.get(result.part, result.part)
        content[name] = {**content_of(result), "known": shifts[result.part] is None}

    def list_rows() -> None:
        if ranking is not None:
            ranking.save(options.records)
            console.print(f"{options.records} holds the numbers of the rows.")

    write_results = partial(write_json, console, options.out, content)
    add_summary = partial(summarize, options.summary, outcome, sentences, tables)
    return write_last(console, status, list_rows, write_results, add_summary)


def _compare(
    console: Console, results: Sequence[Comparison], options: Namespace
) -> dict[Part, str | None]:
    """Compare members with non-members of each part, and print the results.

    Return why members and non-members of each part may not be exchangeable, or None.
    """
    shifts = dict[Part, str | None]()
    for result in results:
        with refuse_errors("the models' answers cannot be compared", UnusableObservation):
            result.measure_all()
        shift = shifts[result.part] = result.why_unknown(drawn=options.drawn)
        if result.part != "prompts" and shift is None:
            with refuse_errors("--reference", ValueError):
                result.check_reference()
        print_part(console, result, shift, is_drawn=options.drawn)
        base, now, sides = result.game.base, result.game.now, result.sides
        gained = (now.log_probs > base.log_probs) & base.labels
        shares = [float(gained[s].sum() / base.labels[s].sum()) for s in (sides, ~sides)]
        console.print(
            "The model is better than its base on {:.0%} of the tokens of members, and on {:.0%} "
            "of those of others.".format(*shares)
        )
        if (length := end_of_gain(base, now, sides) or 0) > MIN_LABELS:
            console.print(
                f"The members' gain over others ends at token {length}: if training cut its rows "
                f"there, give --length {length}, by which more is detected."
            )
    return shifts


def end_of_gain(base: TokenSnapshot, now: TokenSnapshot, members: Tensor) -> int | None:
    """Return the number of tokens after which members hardly gain more than others, or None.

    Positions are divided where the two parts differ most. The end is known if they do by
    :data:`MIN_STEP` standard errors, and members gain less than a quarter of it, and not more than
    chance, in the later part, which has a quarter of the tokens or more.

    Args:
        base: The base's answers to N texts.
        now: The trained model's answers.
        members: (N,) bool, the texts that were trained on.
    """
    gains = (now.log_probs - base.log_probs).double()
    n, mean, square = (
        torch.stack([(part * base.labels)[side].sum(0) for side in (members, ~members)])
        for part in (torch.ones_like(gains), gains, gains**2)
    )
    mean, square = mean / n, square / n  # NaN where no text has a label
    weights = (n >= MIN_TEXTS).all(0) / ((square - mean**2) / n).sum(0).clamp_min(1e-12)
    heads = torch.stack([weights * (mean[0] - mean[1]), weights, n.sum(0)]).nan_to_num().cumsum(1)
    tails = heads[:, -1:] - heads
    early, late = (part[0] / part[1] for part in (heads, tails))
    steps = ((early - late) / (1 / heads[1] + 1 / tails[1]).sqrt()).nan_to_num()
    cut = int(steps.where(tails[2] >= 0.25 * n.sum(), 0.0).argmax())
    error = 2 / tails[1][cut].sqrt()
    if steps[cut] < MIN_STEP or late[cut] > error or late[cut] + error > early[cut] / 4:
        return None
    return cut + 2  # the first token has no prediction


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


def _list_rows(console: Console, result: Comparison) -> tuple[RecordList, Mapping[str, float]]:
    """Return the list of rows of a part and its counts, which are printed.

    The score beside references orders the list, if they are used; else the default score. With
    references, the counts are those of the score with the higher bound on the rows that leak.
    """
    # Nothing says whether the model was trained under differential privacy.
    facts: dict[str, Any] = {"account": None, "alpha": result.alpha}
    default = ranking = result.list_records(**facts)
    is_used = result.strength is not None and result.strength.is_used
    for attack in result.beside_references() if is_used else ():
        assert result.released.references is not None
        facts |= {"references": len(result.released.references.answers)}
        ranking = result.list_records(scores=attack.score(result.released), **facts)
    text = (
        "Of {members} rows at least {at_least} leak from the trained model (95%), and {listed} are "
        "listed at a false-discovery rate of {rate:g} (a list holds {smallest_list} or more). "
        "{repeated} rows have copies, {short} are short, and {unknown} share passages."
    ).format(**ranking.head)
    console.print(text.replace("None", "an unknown number"))
    return ranking, max(ranking.counts, default.counts, key=lambda counts: counts["at_least"])


def _read_rows_of_references(
    reader: RowReader, options: Namespace
) -> list[tuple[int | None, set[bytes]]]:
    """Return the number of rows of each reference, None if it is not known, and their contents.

    Raises:
        SourceError: A file cannot be read, or there are not as many entries as references.
    """
    entries = options.reference_rows or [None] * len(options.reference or ())
    if len(entries) != len(options.reference or ()):
        raise SourceError("--reference-rows: give a number or a file for each --reference")
    found = list[tuple[int | None, set[bytes]]]()
    for entry in entries:
        if entry is None or (entry.isdecimal() and int(entry)):
            found.append((entry and int(entry), set()))
        else:
            texts = reader.read(entry)
            found.append((len(texts), {text.content for text in texts.values()}))
    return found


def _query(
    groups: Sequence[Sequence[Text]],
    seen: Sequence[tuple[int | None, set[bytes]]],
    options: Namespace,
) -> tuple[
    list[TokenSnapshot], list[TokenSnapshot], References | None, records.ReferenceFacts | None
]:
    """Query the base, the trained model and the reference models once for each whole text.

    ``seen`` is from :func:`_read_rows_of_references`.

    Returns:
        For each group of texts the answers of the base, and those of the trained model; the
        references' answers to the first group and facts about them, None without a reference.
    """
    mask = None
    for source in options.reference or ():  # checked before the queries, which may take minutes
        with refuse_errors("--reference cannot be loaded", SourceError):
            _, head = models.released_config(source, options.base)
            mask = models.mask_of(options.base, head)
    texts = {text.whole.content: text.whole for group in groups for text in group}
    sources = options.model, options.base, options.dtype
    pair = models.log_probs_before_and_after([*texts.values()], *sources)
    places = {content: n for n, content in enumerate(texts)}

    def select(answers: TokenSnapshot, group: Sequence[Text]) -> TokenSnapshot:
        rows = [places[text.whole.content] for text in group]
        return answers.rows(torch.tensor(rows, dtype=torch.long))

    before, after = ([select(answers, group) for group in groups] for answers in pair)
    answers, facts = list[TokenSnapshot](), list[records.ReferenceFacts]()
    for source, (count, _) in zip(options.reference or (), seen, strict=True):
        reference = models.load_trained(source, options.base, "--reference")
        facts.append(describe_reference(source, count, reference))
        asked = [*texts.values()], mask, "--reference", options.dtype
        outputs = models.query_texts(reference, *asked)
        answers.append(select(outputs, groups[0]))
    if not facts:
        return before, after, None, None
    inside = inside_of([text.content for text in groups[0]], [rows for _, rows in seen])
    return before, after, References(answers, inside), describe_all(facts)


def find_parts(pool: Pool, members: Mapping[int, Text]) -> tuple[list[Part], dict[str, str]]:
    """Return the parts of a pool that have enough texts: long texts, short texts and prompts.

    Also return why the members of other parts are not compared, by the names in ``HEADLINES``.

    Raises:
        ValueError: No part of texts has enough.
    """
    parts, failures, not_compared = list[Part](), [], dict[str, str]()
    excluded = f"{pool.n_short} of fewer than {MIN_LABELS} label tokens"
    for part, attack, n, words in zip(_PARTS, HEADLINES, _sizes(members), _TEXTS, strict=True):
        try:
            pool.everyone(part)
            parts.append(part)
        except ValueError as error:
            why = f"{error} ({part}, without {excluded} and {pool.repeated} that repeat others "
            why += f"{REPEATS})"
            if pool.repeated > len(members):
                why += f". {OF_ONE_FORM}"
            failures.append(ValueError(why))
            if n:
                sentence = f"The leakage of {n} members with {words} is UNKNOWN: {why}."
                not_compared[attack] = sentence
    if not parts or parts[0] == "prompts":
        raise failures[0]
    return parts, not_compared


def _sizes(texts: Mapping[int, Text]) -> tuple[int, int, int]:
    """Return the numbers of long texts, of short texts, and of texts with a prompt."""
    n_labels = [text.n_labels for text in texts.values()]
    n_short = sum(0 < n < MIN_LABELS for n in n_labels)
    n_prompts = sum(text.prompt.n_labels >= MIN_LABELS for text in texts.values())
    return sum(n >= MIN_LABELS for n in n_labels), n_short, n_prompts


def print_part(console: Console, result: Comparison, shift: str | None, *, is_drawn: bool) -> None:
    """Print the results of a part, and why they are unknown if there is a shift."""
    print_table(console, table_of(result.values))
    pool, copies = result.audit.pool, int((~result.alone).sum())
    copies_remark = f"; {copies} members that have copies were tested for extraction only"
    remark = {
        "short": "all with 1 to 7 label tokens",
        "prompts": "by their prompts only, which the loss is not computed on",
    }.get(
        result.part,
        f"{pool.repeated} texts that repeat others ({REPEATS}) and {pool.n_short} short texts "
        f"were excluded{copies_remark * (copies > 0)}",
    )
    counts = content_of(result)
    console.print(
        f"{HEADLINES[_PARTS.index(result.part)]} counts. "
        f"{counts['members']} members and {counts['others']} others were compared; {remark}. "
        f"A TPR below {counts['visible_tpr']:.3f} may not be detected with so many texts."
    )
    if shift is not None:
        advice = "" if is_drawn else ", or some 1,000 texts of the same kind on each side"
        console.print(
            f"Members and others are {shift}. Membership is UNKNOWN: give others that were drawn "
            f"from the same rows (leave_out) and --drawn{advice}."
        )
    needed = {f"{fpr:.1%}": min_non_members(1, result.alpha, fpr) for fpr in FPRS}
    needed = {fpr: n for fpr, n in needed.items() if n > int((~result.sides).sum())}
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
    config, head = models.released_config(options.model, options.base)
    tokenizer = load_tokenizer(options.base)
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


def content_of(result: Comparison) -> dict[str, Any]:
    """Return the results of a part for JSON."""
    n, n_others = int(result.sides.sum()), int((~result.sides).sum())
    return {
        "kind": "memorization",
        "version": version("lightning-fedleak"),
        "members": n,
        "others": n_others,
        "repeated": result.audit.pool.repeated,
        "short": result.audit.pool.n_short,
        "visible_tpr": visible_tpr(n, n_others, look=1, alpha=result.alpha),
        "blind": blind_aucs(result.blind, result.sides),
        "attacks": result.values,
    }


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
