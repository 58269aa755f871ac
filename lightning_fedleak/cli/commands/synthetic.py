"""``fedleak synthetic``: what generated texts reveal of the rows that a model was trained on.

:func:`run` fits an auxiliary model on the generated texts, queries it and its base with rows that
were trained on (members) and rows that were held out (non-members), and counts passages that rows
and generated texts have in common. It compares both sides in pools of long and of short texts,
prints and writes the results, and checks the limit of ``--at-most``.

Generated texts are enough to test membership in the training data (Meeus et al. 2025, arXiv
2502.14921). Here an auxiliary model is fitted on the generated texts, and queried with the rows
(Mitchell et al. 2026, arXiv 2606.10481, query such a model with canaries). In addition, runs of
tokens that rows and generated texts have in common are counted, for rows that were trained on and
for held-out rows: passages that held-out rows share with the texts are no disclosure (Amin et al.
2026, arXiv 2606.16952).
"""

import re
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from rich.console import Console
from scipy.stats import fisher_exact
from torch import Tensor

from lightning_fedleak.cli.commands import memorization, verdicts
from lightning_fedleak.cli.finetuning import SourceError, load_tokenizer
from lightning_fedleak.cli.printing import write_json
from lightning_fedleak.cli.studies.models import check_read_by, find_model, query_texts, with_lora
from lightning_fedleak.cli.studies.references import Recipe, fit_texts
from lightning_fedleak.cli.studies.training_rows import RowReader
from lightning_fedleak.engine.channels.released.audit import Audit, Comparison, all_attacks
from lightning_fedleak.engine.channels.released.pool import Pool
from lightning_fedleak.evaluation.canaries.repeats import RUN, Part
from lightning_fedleak.evaluation.metrics.record_list import used_up_mark
from lightning_fedleak.evaluation.metrics.released import membership_values
from lightning_fedleak.model.batches import IGNORE_INDEX
from lightning_fedleak.model.snapshots import TokenSnapshot
from lightning_fedleak.model.taps import Text
from lightning_fedleak.progress import bars


def run(options: Namespace, console: Console | None = None) -> int:
    """Fit the auxiliary model, compare the rows, print, and write JSON to ``--out`` if given.

    Args:
        options: The options of the command.
        console: The console to print to; stdout by default.

    Returns:
        3 if a score or its interval exceeds ``--at-most``, or is unknown; if more rows than others
        are copied, with ``--at-most``; if the rows refute ``--drawn``; or if it is unknown which
        tokens of the rows to compare. Else 0.

    Raises:
        SourceError: The base or a text cannot be used, or the auxiliary model diverged.
        AnatomyError: The parts of the base could not be found.
    """
    console = console or Console(highlight=False)
    return verdicts.run_measurement(_measure_texts, options, console)


def _measure_texts(options: Namespace, console: Console) -> int:
    """Fit, compare, print and write, and return the exit status; see :func:`run`."""
    pool, parts, not_compared, generated, whole, decode = _read_texts(options, console)
    for sentence in not_compared.values():
        console.print(sentence)
    steps = -(-len(generated) // options.batch_size) * options.epochs
    console.print(
        f"An auxiliary model is fitted on {len(generated)} generated texts: {steps} steps at a "
        f"constant rate of {options.lr:g}."
    )
    before, after = ask_auxiliary(pool.texts, generated, options)
    audit = Audit(pool, before, decode)
    is_known, is_refuted = not used_up_mark(options.rows).exists(), False
    sentences = [] if is_known else [memorization.USED_UP.replace("--members", "--rows")]
    values: dict[str, Mapping[str, float]] = {}
    content: dict[str, object] = {}
    tables, found = [], list[str]()
    score_names = [name for part in parts for name in gated_scores(part)]
    alpha = 0.05 / (len(score_names) + 2 * len(parts))  # the worst score or count decides
    for part in parts:
        result = audit.part(part, after, alpha=alpha)
        copied = compare_generated(result, whole)
        shift = result.why_unknown(drawn=options.drawn)
        memorization.print_part(console, result, shift, is_drawn=options.drawn)
        is_known &= shift is None
        is_refuted |= options.drawn and shift is not None
        values |= result.values
        tables.append(memorization.table_of(result.values))
        near = find_near_copies(result, whole)
        counts = {"passages": copied, "whole rows": count_copies(near, result.sides)}
        record = memorization.content_of(result) | {"kind": "synthetic", "copied": copied}
        record["near_copies"] = counts["whole rows"]
        content |= {"short_answers": record} if content else record
        words, copies = judge_copies(counts, result)
        sentences += words
        if numbers := row_numbers(result, near):  # not in the summary, which others may read
            console.print(f"Row numbers of whole copies: {numbers}.")
        found += copies if shift is None else []
    for sentence in sentences:
        console.print(sentence)
    content |= {"drawn": options.drawn, "known": is_known, "generated": len(generated)}
    content |= {"not_compared": not_compared}
    names = (*not_compared, *score_names)
    evidence = values if is_known else {}
    breaches = verdicts.breaches_among(names, evidence, options.metric, options.at_most)
    breaches += found if options.at_most is not None else []
    for breach in breaches:
        console.print(f"BREACH: {breach}")
    fails = bool(breaches) or is_refuted
    outcome = verdicts.FAILED if fails else "no breach" if is_known else "UNKNOWN"
    sentences += [*breaches, *not_compared.values()]

    status, results = verdicts.BREACH if fails else 0, (console, options.out, content)
    add_summary = partial(verdicts.summarize, options.summary, outcome, sentences, tables)
    return verdicts.write_last(console, status, partial(write_json, *results), add_summary)


def _read_texts(
    options: Namespace, console: Console
) -> tuple[Pool, list[Part], dict[str, str], list[Text], list[Text], Callable[[list[int]], str]]:
    """Return the pool of rows, its parts, why others are not compared, and the generated texts.

    Also return generated texts that are not cut, and the function from token ids to their text.
    Prompts are left out. The reasons are given by the name of the score.
    """
    tokenizer = load_tokenizer(options.base)
    columns = options.column, options.prompt_column, options.loss
    reader = RowReader(tokenizer, options.length, *columns)
    column = options.generated_column
    text_reader = RowReader(tokenizer, options.length, column) if column else reader
    rows, others = memorization.read_sides(reader, console, options.rows, options.others)
    texts = text_reader.read(options.generated)
    generated = [text for text in texts.values() if text.n_labels]
    whole = [*replace(text_reader, length=_WHOLE).read(options.generated).values()]
    if not generated:
        raise SourceError(
            f"--generated '{options.generated}' holds no text of two tokens or more: give the "
            "texts that the model wrote"
        )

    if n_cut := sum(len(text.ids) > options.length for text in whole):
        console.print(
            f"{n_cut} generated texts are longer than --length {options.length}: the auxiliary "
            "model is fitted on their beginnings, and copies are searched in the whole texts."
        )

    def decode(ids: list[int]) -> str:
        return str(tokenizer.decode(ids))

    pool = Pool.of_sides([*rows.values()], [*others.values()], [*rows])
    parts, reasons = memorization.find_parts(pool, rows)
    reasons = {name: text for name, text in reasons.items() if name in verdicts.HEADLINES[:2]}
    parts = [part for part in parts if part != "prompts"]
    return pool, parts, reasons, generated, whole, decode


def ask_auxiliary(
    texts: Sequence[Text], generated: Sequence[Text], options: Namespace
) -> tuple[TokenSnapshot, TokenSnapshot]:
    """Return the log probabilities of texts by a base, and by the base fitted on generated texts.

    It sets the global seed of torch.

    Args:
        texts: The texts that both models are queried with.
        generated: The generated texts, on which the auxiliary model is trained; at least one.
        options: The options of the command, which hold the base, the recipe of the training and the
            LoRA.

    Raises:
        SourceError: The base cannot be loaded, is no causal language model or reads fewer tokens
            than the texts have; adapters do not fit it; or the training diverged.
        AnatomyError: The parts of the base could not be found.
    """
    anatomy = find_model(options.base)
    if anatomy.kind != "causal":
        raise SourceError(
            f"--base '{options.base}' is a {anatomy.kind} model, which writes no texts: give a "
            "causal language model, such as the base of the model that wrote --generated"
        )
    check_read_by(anatomy, generated, "--base")
    before = query_texts(anatomy, texts, None, "--base")
    torch.manual_seed(options.seed)
    auxiliary = with_lora(anatomy, options.lora_r, options.targets, options.seed)
    recipe = Recipe(options.epochs, options.batch_size, options.lr)
    tokenizer = load_tokenizer(options.base)
    with bars(sys.stderr.isatty()):
        fitted = fit_texts(auxiliary.model, generated, recipe, "causal", tokenizer)
    after = query_texts(fitted, texts, None, "--base")
    if not bool(after.log_probs.isfinite().all()):
        raise SourceError("the auxiliary model diverged: give a lower --lr, or fewer --epochs")
    return before, after


def gated_scores(part: Part) -> list[str]:
    """Return the names of the scores of a part that ``--at-most`` limits."""
    if part == "short":
        return ["loss_ratio_short", *(f"{name}_short" for name in COPY_SCORES)]
    return ["combined", *COPY_SCORES]


def compare_generated(result: Comparison, generated: Sequence[Text]) -> dict[str, float]:
    """Compare members with non-members, and return how many rows of each side are copied.

    The scores come from the auxiliary model and from passages that are copied, with p-values of the
    permutation test because these scores are coarse. The attacks are those on a released model,
    without extraction, because the auxiliary model is not released. Of short rows the names of all
    scores end with ``_short``.

    Args:
        result: The rows, with the answers of the base and of the auxiliary model.
        generated: The generated texts.

    Returns:
        The counts of :func:`count_copies`, of rows with a run of 13 or more tokens in the texts.
    """
    result.measure_all(() if result.part == "short" else all_attacks()[:-1])
    copies = find_copies(result.once, generated)
    for name, scores in zip(gated_scores(result.part)[1:], copies, strict=True):
        result.values[name] = membership_values(
            scores.double(), result.sides, alpha=result.alpha, exact=True
        )
    return count_copies(copies.longest >= RUN, result.sides)


# Tokens of an n-gram. Of 2 to 6, 2 had the highest AUC on a sample of WikiText-2 that was used for
# nothing else (benchmarks.attacks.synthetic): .92, against .79 with 4.
NGRAM = 2
# Largest p-value of copied rows if no other is copied: three rows, and none of as many others.
MAX_PLAIN_P_VALUE = 0.15
WORDS = 4  # words of a sequence in which near copies are found; fewer: common phrases count
CHARACTERS = 6  # the same for scripts without spaces, in which a word has one or two characters
# Characters of scripts without spaces: Thai to Tibetan, Myanmar, Khmer, kana, and Han.
_SCRIPTS = r"\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
_SCRIPTS += r"\uff66-\uff9f\U00020000-\U0003ffff"
_UNSPACED, _PIECES = re.compile(f"[{_SCRIPTS}]"), re.compile(f"[{_SCRIPTS}]|[^\\W{_SCRIPTS}]+")
_WHOLE = 1_000_000_000  # tokens of a generated text in which copies are searched: it is not cut
COPY_SCORES = "longest_copy", "shared_ngrams"  # names of the fields of _Copies, in its order


class _Copies(NamedTuple):
    """The runs of tokens that each of N rows shares with a set of texts.

    Attributes:
        longest: (N,) int64, the length of the longest run of the row that a text contains.
        shares: (N,) float64, the share of the row's n-grams that the texts contain; 0 for a row
            without n-grams.
    """

    longest: Tensor
    shares: Tensor


def find_copies(rows: Sequence[Text], generated: Sequence[Text], size: int = NGRAM) -> _Copies:
    """Return the runs that rows share with generated texts.

    Tokens without a label are in no run. Runs are compared exactly, not by a hash. They grow by one
    token at a time, and only runs that are in both sets continue to grow. Each step sorts the
    remaining runs.

    Args:
        rows: The N rows, at least one.
        generated: The generated texts.
        size: The number of tokens of an n-gram.

    Examples:
        >>> import torch
        >>> from lightning_fedleak.cli.commands.synthetic import find_copies
        >>> from lightning_fedleak.model.taps.tokens import Text
        >>> row, other, copy = (torch.tensor(ids) for ids in ([1, 2, 3, 4], [5, 6], [9, 1, 2, 3]))
        >>> find_copies([Text(row, row), Text(other, other)], [Text(copy, copy)], size=2).shares
        tensor([0.6667, 0.0000], dtype=torch.float64)
    """
    parts, owners = [], []
    # Separators are 0 in rows and 1 in generated texts, so that no shared run contains one.
    for separator, texts in enumerate((rows, generated)):
        end = torch.tensor([separator])
        for index, text in enumerate(texts):
            labels = text.labels + 2  # ids from 2 on, and below 2 where there is no label
            parts.append(torch.cat([torch.where(labels < 2, separator, labels), end]))
            owners.append(torch.full((len(parts[-1]),), index))
    tokens, owner = torch.cat(parts), torch.cat(owners)
    # The starts of the runs of ``length`` tokens that both sides have, and a number of each run.
    first_generated, length = sum(map(len, parts[: len(rows)])), 0
    longest, shares = torch.zeros(len(rows), dtype=torch.long), torch.zeros(len(rows)).double()
    starts, ids = torch.arange(len(tokens)), torch.zeros_like(tokens)
    n_tokens = int(tokens.max()) + 1
    while True:
        # Two longer runs are equal if the shorter ones were, and the new tokens are.
        ids = torch.unique(ids * n_tokens + tokens[starts + length], return_inverse=True)[1]
        common = torch.ones(int(ids.max()) + 1, dtype=torch.bool)
        for side in (starts < first_generated, starts >= first_generated):
            common &= torch.bincount(ids[side], minlength=len(common)) > 0
        starts, ids, length = starts[common[ids]], ids[common[ids]], length + 1
        if not len(starts):
            return _Copies(longest, shares)
        row_of_run = owner[starts[starts < first_generated]]
        longest[row_of_run] = length
        if length == size:
            lengths = torch.tensor([len(part) - 1 for part in parts[: len(rows)]])
            n_grams = (lengths - size + 1).clamp_min(1)
            shares = torch.bincount(row_of_run, minlength=len(rows)).double() / n_grams


def judge_copies(
    counts: Mapping[str, Mapping[str, float]], result: Comparison
) -> tuple[list[str], list[str]]:
    """Return a sentence for each kind of copy, and one for each with more rows than others show.

    Args:
        counts: Of passages and of whole rows, the numbers of :func:`count_copies`.
        result: The comparison, whose ``alpha`` is the largest p-value of more than chance.
    """
    sentences, found = [], []
    n_members, n_others = int(result.sides.sum()), int((~result.sides).sum())
    phrases = f"{RUN} tokens in a row in the generated texts", "a copy or a near copy there"
    for phrase, (what, count) in zip(phrases, counts.items(), strict=True):
        sentences.append(
            f"{count['members']:.0f} of {n_members} rows that were trained on have {phrase}, and "
            f"{count['others']:.0f} of {n_others} non-members (p {count['p_value']:.1g})."
        )
        is_plain = what == "whole rows" and not count["others"]
        if count["p_value"] <= (MAX_PLAIN_P_VALUE if is_plain else result.alpha):
            found.append(f"{what} of the training are in the texts, beyond what others show")
    return sentences, found


def count_copies(copied: Tensor, members: Tensor) -> dict[str, float]:
    """Return how many of N rows are copied on each side, and the p-value of Fisher's exact test.

    Args:
        copied: (N,) bool, the rows that are copied.
        members: (N,) bool, the rows that were trained on.
    """
    sides = members, ~members
    counts = [[int((rows & side).sum()) for side in sides] for rows in (copied, ~copied)]
    p_value = float(fisher_exact(counts, alternative="greater").pvalue)
    return {"members": float(counts[0][0]), "others": float(counts[0][1]), "p_value": p_value}


def find_near_copies(result: Comparison, generated: Sequence[Text]) -> Tensor:
    """Return (N,) which unique rows a generated text repeats, in other words at most.

    Case, spaces and punctuation do not count. A text repeats a row if it has half of the row's
    sequences of :data:`WORDS` words: one changed word in eleven leaves half. In scripts without
    spaces a row is compared by sequences of :data:`CHARACTERS` characters. A row of fewer is its
    only sequence.

    Args:
        result: The rows; of rows of few tokens none is found, since any text may have their words.
        generated: The generated texts.
    """
    decode = result.audit.decode
    assert decode is not None

    def read(text: Text) -> list[str]:
        ids = text.ids[text.labels != IGNORE_INDEX]
        return _PIECES.findall(decode(ids.tolist()).casefold())

    def sequences(pieces: list[str], size: int) -> set[tuple[str, ...]]:
        return {(*pieces[n : n + size],) for n in range(len(pieces) - size + 1)}

    rows = [] if result.part == "short" else [read(text) for text in result.once]
    holders: dict[tuple[str, ...], list[int]] = {}
    counts, sizes = [], {WORDS, CHARACTERS}
    for row, pieces in enumerate(rows):
        is_spaced = 2 * sum(bool(_UNSPACED.match(piece)) for piece in pieces) <= len(pieces)
        size = min(WORDS if is_spaced else CHARACTERS, max(1, len(pieces)))
        sizes.add(size)
        found = sequences(pieces, size)
        counts.append(len(found))
        for sequence in found:
            holders.setdefault(sequence, []).append(row)
    copied = torch.zeros(len(result.sides), dtype=torch.bool)
    for pieces in map(read, generated if holders else ()):
        found = set[tuple[str, ...]]().union(*(sequences(pieces, size) for size in sizes))
        shared = Counter(row for sequence in found for row in holders.get(sequence, ()))
        copied[[row for row, count in shared.items() if 2 * count >= counts[row]]] = True
    return copied


def row_numbers(result: Comparison, copied: Tensor) -> str:
    """Return the numbers of the copied unique rows that were trained on."""
    rows = result.index[result.alone][copied & result.sides].tolist()
    pool = result.audit.pool
    assert pool.rows is not None
    return ", ".join(map(str, sorted(n for row in rows for n in pool.rows.copies[row])))
