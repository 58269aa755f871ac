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

from __future__ import annotations

import re
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from lightning_fedleak.cli.studies.memorization import (
    Comparison,
    ReleasedPool,
    all_attacks,
    used_up_mark,
)
from lightning_fedleak.cli.studies.models import check_read_by, find_model, query_texts, with_lora
from lightning_fedleak.cli.studies.references import Recipe, fit_texts
from lightning_fedleak.cli.studies.training_rows import RowReader
from lightning_fedleak.evaluation.canaries.repeats import RUN
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
    pools, not_compared, generated, whole, decode = _read_texts(options, console)
    _print_lines(console, not_compared.values())
    steps = -(-len(generated) // options.batch_size) * options.epochs
    console.print(
        f"An auxiliary model is fitted on {len(generated)} generated texts: {steps} steps at a "
        f"constant rate of {options.lr:g}."
    )
    queried = [text for pool in pools for text in pool.texts]
    before, after = ask_auxiliary(queried, generated, options)
    is_known, is_refuted = not used_up_mark(options.rows).exists(), False
    sentences = [] if is_known else [memorization.USED_UP.replace("--members", "--rows")]
    values: dict[str, Mapping[str, float]] = {}
    content: dict[str, object] = {}
    tables, found = [], list[str]()
    score_names = [name for pool in pools for name in gated_scores(pool)]
    alpha = 0.05 / (len(score_names) + 2 * len(pools))  # the worst score or count decides
    indices = torch.split(torch.arange(len(queried)), [len(pool.texts) for pool in pools])
    for pool, rows in zip(pools, indices, strict=True):
        outputs = before.rows(rows), after.rows(rows)
        result, copied = compare_generated(pool, outputs, generated, alpha)
        shift = pool.why_unknown(outputs[0], result, drawn=options.drawn)
        memorization.print_pool(console, pool, result, shift, is_drawn=options.drawn)
        is_known &= shift is None
        is_refuted |= options.drawn and shift is not None
        values |= result.values
        tables.append(memorization.table_of(result.values))
        record = memorization.content_of(result, pool) | {"kind": "synthetic", "copied": copied}
        near = find_near_copies(pool, whole, decode)
        counts = {"passages": copied, "whole rows": count_copies(near, pool.members[pool.alone])}
        record["near_copies"] = counts["whole rows"]
        content |= {"short_answers": record} if content else record
        words, copies = judge_copies(counts, result, alpha)
        sentences += [*words, *_name_rows(pool, near)]
        found += copies if shift is None else []
    _print_lines(console, sentences)
    content |= {"drawn": options.drawn, "known": is_known, "generated": len(generated)}
    content |= {"not_compared": not_compared}
    names = (*not_compared, *score_names)
    evidence = values if is_known else {}
    breaches = verdicts.breaches_among(names, evidence, options.metric, options.at_most)
    breaches += found if options.at_most is not None else []
    _print_lines(console, [f"BREACH: {breach}" for breach in breaches])
    fails = bool(breaches) or is_refuted
    outcome = verdicts.FAILED if fails else "no breach" if is_known else "UNKNOWN"
    sentences += [*breaches, *not_compared.values()]

    status, results = verdicts.BREACH if fails else 0, (console, options.out, content)
    add_summary = partial(verdicts.summarize, options.summary, outcome, sentences, tables)
    return verdicts.write_last(console, status, partial(write_json, *results), add_summary)


def _name_rows(pool: ReleasedPool, near: Tensor) -> list[str]:
    """Return the sentence with the numbers of the rows that are copied whole, if there are any."""
    numbers = ", ".join(str(row) for row in row_numbers(pool, near))
    return [f"Row numbers of whole copies: {numbers}."] if numbers else []


def _print_lines(console: Console, lines: Iterable[str]) -> None:
    """Print each line."""
    for line in lines:
        console.print(line)


def _read_texts(
    options: Namespace, console: Console
) -> tuple[list[ReleasedPool], dict[str, str], list[Text], list[Text], Callable[[list[int]], str]]:
    """Return the pools of rows, the reasons why others are not compared, and the generated texts.

    Also return generated texts that are not cut, and the function from token ids to their text.
    Pools of prompts are left out. The reasons are given by the name of the score.
    """
    tokenizer = load_tokenizer(options.base)
    columns = options.column, options.prompt_column, options.loss
    reader = RowReader(tokenizer, options.length, *columns)
    column = options.generated_column
    text_reader = RowReader(tokenizer, options.length, column) if column else reader
    rows, others = memorization.read_sides(reader, console, options.rows, options.others)
    texts = text_reader.read(options.generated)
    generated = [text for text in texts.values() if text.n_labels]
    # A copy may take more tokens than the row, such as one in capitals.
    whole = [*replace(text_reader, length=8 * options.length).read(options.generated).values()]
    if not generated:
        raise SourceError(
            f"--generated '{options.generated}' holds no text of two tokens or more: give the "
            "texts that the model wrote"
        )

    def decode(ids: list[int]) -> str:
        return str(tokenizer.decode(ids))

    pools, reasons = memorization.pools_of(rows, others, decode)
    reasons = {name: text for name, text in reasons.items() if name in verdicts.HEADLINES[:2]}
    pools = [pool for pool in pools if pool.part != "prompts"]
    return pools, reasons, generated, whole, decode


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


def gated_scores(pool: ReleasedPool) -> list[str]:
    """Return the names of the scores of a pool that ``--at-most`` limits."""
    if pool.is_short:
        return ["loss_ratio_short", *(f"{name}_short" for name in COPY_SCORES)]
    return ["combined", *COPY_SCORES]


def compare_generated(
    pool: ReleasedPool,
    answers: tuple[TokenSnapshot, TokenSnapshot],
    generated: Sequence[Text],
    alpha: float,
) -> tuple[Comparison, dict[str, float]]:
    """Compare members with non-members, and count the rows that are copied.

    The scores come from the auxiliary model and from passages that are copied. The attacks are
    those on a released model, without extraction, because the auxiliary model is not released. In a
    pool of short rows the names of all scores end with ``_short``.

    Args:
        pool: The rows that were trained on, and the non-members.
        answers: The log probabilities of the pool's texts by the base and by the auxiliary model.
        generated: The generated texts.
        alpha: The probability of error of each score.

    Returns:
        The comparison, and ``copied`` of
        :func:`~lightning_fedleak.cli.commands.synthetic.copy_values`.
    """
    result = pool.compare(*answers, () if pool.is_short else all_attacks()[:-1], alpha=alpha)
    rows = [text for text, once in zip(pool.texts, pool.alone.tolist(), strict=True) if once]
    values = copy_values(find_copies(rows, generated), pool.members[pool.alone], alpha)
    copied = values.pop("copied")
    scores = dict(zip(gated_scores(pool)[1:], values.values(), strict=True))
    return replace(result, values={**result.values, **scores}), copied


# Tokens of an n-gram. Of 2 to 6, 2 had the highest AUC on a sample of WikiText-2 that was used for
# nothing else (benchmarks.attacks.synthetic): .92, against .79 with 4.
NGRAM = 2
# Largest p-value of copied rows if no other is copied: three rows, and none of as many others.
MAX_PLAIN_P_VALUE = 0.15
WORDS = 4  # words of a sequence in which near copies are found; fewer: common phrases count
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


def copy_values(copies: _Copies, members: Tensor, alpha: float) -> dict[str, dict[str, float]]:
    """Return how well copies distinguish rows that were trained on from held-out rows.

    Args:
        copies: The copies of N rows.
        members: (N,) bool, the rows that were trained on.
        alpha: The probability of error of each score.

    Returns:
        By each name of ``COPY_SCORES`` the values of
        :func:`~lightning_fedleak.evaluation.metrics.released.membership_values`, with p-values of
        the permutation test because the scores are coarse. ``copied`` holds ``members`` and
        ``others``, the rows of each side with a run of 13 or more tokens in the texts, and the
        ``p_value`` of Fisher's exact test that such runs are not more common among members.
    """
    values = {
        name: membership_values(scores.double(), members, alpha=alpha, exact=True)
        for name, scores in zip(COPY_SCORES, copies, strict=True)
    }
    return values | {"copied": count_copies(copies.longest >= RUN, members)}


def judge_copies(
    counts: Mapping[str, Mapping[str, float]], result: Comparison, alpha: float
) -> tuple[list[str], list[str]]:
    """Return a sentence for each kind of copy, and one for each with more rows than others show.

    Args:
        counts: Of passages and of whole rows, the numbers of :func:`count_copies`.
        result: The comparison of the pool.
        alpha: The largest p-value with which copies are more than chance.
    """
    sentences, found = [], []
    phrases = f"{RUN} tokens in a row in the generated texts", "a copy or a near copy there"
    for phrase, (what, count) in zip(phrases, counts.items(), strict=True):
        sentences.append(
            f"{count['members']:.0f} of {result.n_members} rows that were trained on have "
            f"{phrase}, and {count['others']:.0f} of {result.n_others} non-members "
            f"(p {count['p_value']:.1g})."
        )
        is_plain = what == "whole rows" and not count["others"]
        if count["p_value"] <= (MAX_PLAIN_P_VALUE if is_plain else alpha):
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


def find_near_copies(
    pool: ReleasedPool, generated: Sequence[Text], decode: Callable[[list[int]], str]
) -> Tensor:
    """Return (N,) which unique rows of a pool a generated text repeats, in other words at most.

    Case, spaces and punctuation do not count. A text repeats a row if it has half of the row's
    sequences of :data:`WORDS` words: one changed word in eleven leaves half.

    Args:
        pool: The rows; of short ones none is found, since any text may have their words.
        generated: The generated texts.
        decode: The function from token ids to their text.
    """

    def sequences(text: Text) -> set[tuple[str, ...]]:
        ids = text.ids[text.labels != IGNORE_INDEX]
        words = re.findall(r"\w+", decode(ids.tolist()).casefold())
        return {(*words[n : n + WORDS],) for n in range(len(words) - WORDS + 1)}

    rows = [text for text, once in zip(pool.texts, pool.alone.tolist(), strict=True) if once]
    holders: dict[tuple[str, ...], list[int]] = {}
    sizes = []
    for row, text in enumerate(() if pool.is_short else rows):
        sizes.append(len(found := sequences(text)))
        for words in found:
            holders.setdefault(words, []).append(row)
    copied = torch.zeros(len(rows), dtype=torch.bool)
    for text in generated if holders else ():
        counts = Counter(row for words in sequences(text) for row in holders.get(words, ()))
        copied[[row for row, count in counts.items() if 2 * count >= sizes[row]]] = True
    return copied


def row_numbers(pool: ReleasedPool, copied: Tensor) -> list[int]:
    """Return the numbers of the copied unique rows that were trained on."""
    unique = pool.alone.nonzero()[:, 0]
    rows = unique[copied & pool.members[unique]].tolist()
    return sorted(number for row in rows for number in pool.rows.copies[row])
