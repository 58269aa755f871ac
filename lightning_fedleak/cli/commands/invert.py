"""``fedleak invert``: recovers texts from hidden states with noise, and measures how well.

A client runs the first blocks of a model (up to the split) and sends their output with noise; the
server attacks it. A cell is the measurement of one attack at one split, for texts of one length and
one strength of the noise.

Texts are cut to one length. The noise on the hidden states that a client sends is Gaussian (Zheng,
Sect. 5.2).
"""

from __future__ import annotations

import itertools
import json
import math
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any, Literal

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedTokenizerBase

from lightning_fedleak import attacks
from lightning_fedleak.attacks import InversionAttack
from lightning_fedleak.cli import finetuning, printing
from lightning_fedleak.cli.finetuning import SourceError, check_option
from lightning_fedleak.cli.printing import format_share
from lightning_fedleak.cli.studies.models import check_context, find_model
from lightning_fedleak.evaluation.metrics import Rate
from lightning_fedleak.evaluation.metrics.texts import reconstruction_rates, sentence_scores
from lightning_fedleak.model.anatomy import Anatomy, place_of
from lightning_fedleak.model.model_runs import hidden_states, undisturbed
from lightning_fedleak.progress import bars, track
from lightning_fedleak.report.records import as_json

UTILITY_TEXTS = 16  # smallest number of texts that measure the task; not tuned, more take longer


def run(options: Namespace, console: Console | None = None) -> int:
    """Measure all cells, print a table, and write JSON.

    Args:
        options: The options of the command.
        console: The console to print on; stdout by default.

    Returns:
        0; 1 if no cell has a result; 130 after an interrupt, with the finished cells written.

    Raises:
        SourceError: Model, text and settings do not go together.
        AnatomyError: The model's parts could not be found.
    """
    console = console or Console(highlight=False)
    printing.make_folder(options.out, options.out)
    tokenizer = finetuning.load_tokenizer(options.model)
    anatomy = find_model(options.model)
    introduction, names, measured = _plan(options, anatomy, tokenizer)
    console.print(introduction)
    file = options.out / "inversion.json"
    cells: list[Cell] = []
    interrupted = False
    with bars(console.is_terminal):
        try:
            for _, cell in zip(track(names, "cells:", str), measured, strict=True):
                cells.append(cell)
                _write(file, options, cells)
        except KeyboardInterrupt:
            interrupted = True
    if cells:
        printing.print_table(console, cells_table(cells))
        console.print(explain_cells(cells))
        console.print(f"Results: {file}", soft_wrap=True)
    if interrupted:
        console.print(f"Interrupted after {len(cells)} cells.")
        return printing.INTERRUPTED
    return 0 if any(c.rates for c in cells) else 1


# ---- the plan of the measurements ---------------------------------------------------------------


def _plan(
    options: Namespace, anatomy: Anatomy, tokenizer: Any
) -> tuple[str, list[str], Iterator[Cell]]:
    """Return the introduction, the names of the cells, and the cells, which are yet to measure."""
    layers = _layers(options, anatomy)
    causal = anatomy.kind == "causal"
    attacks = list(dict.fromkeys(options.attack or ("prefix" if causal else "sweeps",)))
    if not causal and "prefix" in attacks:
        raise finetuning.SourceError(
            "--attack prefix goes from left to right, and in an encoder each hidden state also "
            "depends on the tokens after it: give sweeps or descent"
        )
    rows = _rows(options, anatomy, tokenizer, options.texts, max(options.texts, UTILITY_TEXTS))
    hello = tokenizer("hello", add_special_tokens=False)["input_ids"]
    settings: dict[str, Any] = {
        "steps": options.steps,
        "budget_seconds": _budget(options),
        "hello": hello[-1] if hello else None,
        "special_ids": tokenizer.all_special_ids,
    }
    makers = [(name, partial(make_adversary, name, **settings)) for name in attacks]
    noises = [Noise(s, options.relative, options.seed) for s in sorted(set(options.noise))]
    unit = " standard deviations of each dimension" if options.relative else ""
    introduction = (
        f"A client holds {printing.model_name(options.model)} (fp32) up to block "
        f"{' or '.join(map(str, layers))} of {len(anatomy.blocks)}, and sends the hidden "
        f"states of {options.texts} texts of {printing.text_name(options.text)}, each of "
        f"{_join_numbers(rows)} tokens, with Gaussian noise of "
        f"{_join_numbers(noise.sigma for noise in noises)}{unit}. The server has the same "
        "weights, and recovers the texts."
    )
    names = [
        f"{name}, split {layer}, {length} tokens, noise {noise.sigma:g}"
        for layer, name, length, noise in itertools.product(layers, attacks, rows, noises)
    ]
    measured = run_cells(anatomy, rows, makers, layers, noises, texts=options.texts)
    return introduction, names, measured


def _budget(options: Namespace) -> float | None:
    """Return the seconds of ``--budget-seconds``; None for ``inf``."""
    return None if math.isinf(options.budget_seconds) else options.budget_seconds


def _layers(options: Namespace, anatomy: Anatomy) -> list[int]:
    """Return the splits, by default at a third and two thirds of the blocks.

    Raises:
        SourceError: The model has no such block.
    """
    blocks = len(anatomy.blocks)
    layers = list(dict.fromkeys(options.layer or (round(blocks / 3), round(2 * blocks / 3))))
    for layer in layers:
        with finetuning.refuse_errors(f"--layer {layer}", ValueError):
            place_of(anatomy, layer)
    return layers


def _rows(
    options: Namespace, anatomy: Anatomy, tokenizer: Any, min_rows: int, max_rows: int
) -> dict[int, Tensor]:
    """Return token ids (n, L) by their length L, n from ``min_rows`` to ``max_rows``."""
    texts = finetuning.read_texts(options.text or finetuning.EMBEDDED_MESSAGES, options.column)
    rows: dict[int, Tensor] = {}
    for length in sorted(set(options.lengths)):
        check_context(anatomy, length, "--lengths")
        min_tokens = 2 if anatomy.kind == "causal" else 1
        finetuning.check_option("--lengths", length, at_least=min_tokens, hint="tokens")
        rows[length] = rows_of_length(
            texts,
            tokenizer,
            length,
            max_rows,
            min_rows=min_rows,
            seed=options.seed,
            start_token_id=options.bos,
        )
    return rows


def _write(file: Path, options: Namespace, cells: Sequence[Cell]) -> None:
    """Write the settings and the cells that are done as JSON."""
    content = {
        "schema": 1,
        "model": options.model or "embedded",
        "text": options.text or "embedded",
        "column": options.column,
        "precision": "fp32",
        "steps": options.steps,
        "seed": options.seed,
        "budget_seconds": _budget(options),
        "cells": cells,
    }
    unfinished = file.with_suffix(".part")
    unfinished.write_text(json.dumps(as_json(content), indent=1, allow_nan=False) + "\n")
    unfinished.replace(file)  # an interrupt leaves the last complete file


def _join_numbers(values: Any) -> str:
    return ", ".join(f"{value:g}" for value in sorted(set(values)))


# ---- the table ----------------------------------------------------------------------------------


def cells_table(cells: Sequence[Cell]) -> Table:
    """Return a row for each cell: the share of tokens at the correct position with its interval."""
    budget = next((f"{c.budget_seconds:g} s" for c in cells if c.budget_seconds), "none")
    names = ["attack", "split", "len", "noise", "token accuracy", "exact", "ROUGE"]
    names += ["task", "ppl", "ms"]
    table = Table(
        title="what the hidden states at the split reveal\n"
        f"budget: {budget} for the texts of a line",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        show_edge=False,
    )
    for i, name in enumerate(names):
        table.add_column(name, justify="left" if i in (0, 4) else "right")
    for cell in cells:
        star = "" if cell.finished or not cell.rates else "*"  # explained below the table
        keys = (cell.attack + star, str(cell.layer), str(cell.length), f"{cell.sigma:g}")
        table.add_row(*keys, *_numbers(cell))
    return table


def _numbers(cell: Cell) -> list[str]:
    """Return the results of a cell, from token accuracy to milliseconds per token."""
    utility, rouge = cell.utility, cell.rates.get("rouge_l")
    accuracy, exact, per_token = "failed", "", ""
    if cell.rates:
        rate = cell.rates["token_accuracy"]
        low, high = format_share(rate.low, 2), format_share(rate.high, 2)
        accuracy = f"{format_share(rate.value)} [{low}, {high}]"
        exact = f"{round(cell.rates['exact_sentences'].value * cell.texts)}/{cell.texts}"
        per_token = f"{1e3 * cell.seconds / (cell.texts * cell.length):.3g}"
    return [
        accuracy,
        exact,
        "" if rouge is None or math.isnan(rouge.value) else format_share(rouge.value),
        "unknown" if utility is None else format_share(utility.accuracy),
        "" if utility is None else f"{utility.perplexity:.3g}",
        per_token,
    ]


def explain_cells(cells: Sequence[Cell]) -> str:
    """Return sentences that explain the table, and name the errors of failed attacks."""
    unit = " in those of each dimension of the hidden states" if cells[0].relative else ""
    lines = [
        "Token accuracy (Zheng 2023, Eq. 5): the share of a text's tokens that are at the correct "
        "position, mean over texts; in brackets its 95% interval. exact: texts without an error. "
        f"ROUGE: ROUGE-L. ms: wall time per token. split: block, of {cells[0].blocks}. len: "
        f"tokens. noise: standard deviations{unit}. task: next-token accuracy of the whole model "
        "from the states with noise, unknown for encoders; ppl: perplexity."
    ]
    problems = dict.fromkeys(
        f"{c.attack}, split {c.layer}, {c.length} tokens, noise {c.sigma:g}: {c.problem}"
        for c in cells
        if c.problem
    )
    if not all(c.finished for c in cells if c.rates):
        lines.append(
            f"*: stopped by the budget of {cells[0].budget_seconds:g} s; the best result until "
            "then. --budget-seconds gives more time, inf sets no bound."
        )
    lines.append(
        "A low number says that these attacks fail here, not that none succeeds: a server may know "
        "more, or search longer."
    )
    return "\n".join(["", *lines, *(f"Failed: {problem}" for problem in problems)])


LOGITS_AT_ONCE = 1 << 25  # numbers, 128 MiB in float32; fewer take less memory and more runs
MAX_NATS = 700.0  # cross-entropy above which the perplexity would overflow a float


@dataclass(frozen=True)
class Noise:
    """Gaussian noise on the hidden states that a client sends.

    Attributes:
        sigma: The standard deviation.
        relative: Whether ``sigma`` is in units of each dimension's standard deviation over the
            B * L states. Otherwise it is absolute, as in the paper.
        seed: The seed of the draw, which is the same for every sigma.
    """

    sigma: float
    relative: bool
    seed: int = 0


def gaussian_noise(hidden: Tensor, noise: Noise) -> Tensor:
    """Return noise of the shape, dtype and device of hidden states (B, L, d)."""
    generator = torch.Generator().manual_seed(noise.seed)
    standard = torch.randn(hidden.shape, generator=generator).to(hidden.device)
    states = hidden.detach().flatten(0, 1).float()
    unit = states.std(0) if noise.relative else states.new_ones(())
    return (noise.sigma * standard * unit).to(hidden.dtype)


@dataclass(frozen=True)
class _Utility:
    """Next-token prediction of the whole model from noised hidden states.

    Attributes:
        accuracy: The share of tokens that are predicted correctly.
        perplexity: The perplexity of the predicted tokens.
    """

    accuracy: float
    perplexity: float


def utility(anatomy: Anatomy, layer: int, input_ids: Tensor, noise: Noise) -> _Utility | None:
    """Return what a causal model in eval mode predicts with noise added at the split.

    Args:
        anatomy: The anatomy of the model; the result is None if it predicts no next tokens.
        layer: The split.
        input_ids: (B, L) texts without padding, L at least 2. They are run in smaller batches.
        noise: The noise at the split.
    """
    if anatomy.kind != "causal":
        return None
    ids = input_ids.to(anatomy.device)
    draw, split = (
        gaussian_noise(hidden_states(anatomy, layer, ids), noise),
        place_of(anatomy, layer),
    )
    rows = max(1, LOGITS_AT_ONCE // (ids.shape[1] * (anatomy.vocab_size or 1)))
    n_correct, nats = 0, 0.0
    with torch.no_grad(), undisturbed(anatomy) as model:
        for start in range(0, len(ids), rows):
            batch = slice(start, start + rows)
            with split.on_states(draw[batch].add):
                logits = model(input_ids=ids[batch]).logits[:, :-1].flatten(0, 1).float()
            truth = ids[batch, 1:].flatten()
            n_correct += int((logits.argmax(1) == truth).sum())
            nats += float(F.cross_entropy(logits, truth, reduction="sum"))
    n = ids[:, 1:].numel()
    return _Utility(n_correct / n, math.exp(min(MAX_NATS, nats / n)))


MAX_ROUGE_TOKENS = 512  # tokens of a text; ROUGE-L of longer ones takes time with the square


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One attack on texts of one length, sent through one split with one noise level.

    Attributes:
        attack: The name of the attack.
        layer: The split.
        blocks: The number of blocks of the model.
        length: The number of tokens of each text.
        sigma: The standard deviation of the noise.
        relative: Whether ``sigma`` is relative to the hidden states, see :class:`Noise`.
        texts: The number of texts that the rates are means over.
        rates: The rates by the names of :func:`~lightning_fedleak.evaluation.metrics.texts.
            reconstruction_rates`, each with its 95% interval; empty if the attack failed.
        seconds: The wall time of the attack.
        cpu_seconds: The processor time of the attack over all threads, which a busy machine does
            not lengthen.
        budget_seconds: About the time of the attack, counted as work; None for no bound.
        finished: Whether the attack ended within its time budget.
        problem: The message of an error; None if there was none.
        utility: The utility of a causal model from the noised states; None if it was not measured.
        steps: The mean number of gradient steps per text; None for attacks without any.
    """

    attack: str
    layer: int
    blocks: int
    length: int
    sigma: float
    relative: bool
    texts: int
    rates: Mapping[str, Rate] = field(default_factory=dict)
    seconds: float = math.nan
    cpu_seconds: float = math.nan
    budget_seconds: float | None = None
    finished: bool = True
    problem: str | None = None
    utility: _Utility | None = None
    steps: float | None = None


def run_cells(
    anatomy: Anatomy,
    rows: Mapping[int, Tensor],
    attacks: Sequence[tuple[str, Callable[[int], InversionAttack]]],
    layers: Sequence[int],
    noises: Sequence[Noise],
    *,
    texts: int,
) -> Iterator[Cell]:
    """Yield each cell when it is measured: layers, attacks on them, lengths, noise levels.

    The first ``texts`` rows are attacked, and all rows measure the utility, with noise from one
    distribution. An attack that raises an error, or a utility that cannot be measured, loses only
    its own cells. ``KeyboardInterrupt`` is passed on.

    Args:
        anatomy: The anatomy of the model.
        rows: (n, L) token ids without padding, by their length L.
        attacks: The names of the attacks, each with a function from a split to the attack.
        layers: The splits.
        noises: The noise on the hidden states that the client sends.
        texts: The number of texts attacked in each cell.
    """

    @lru_cache(maxsize=1)
    def prepare(make: Callable[[int], InversionAttack], layer: int) -> InversionAttack | Exception:
        """Return a new attack after its preparation, or the error that it raised."""
        try:
            attack = make(layer)
            attack.prepare(anatomy)
        except Exception as error:
            return error
        return attack

    @cache
    def measure_utility(layer: int, length: int, noise: Noise) -> _Utility | str | None:
        """Return the utility, or the error in words."""
        try:
            return utility(anatomy, layer, rows[length], noise)
        except Exception as error:
            return f"utility: {_describe(error)}"

    for layer, (name, make), length, noise in itertools.product(layers, attacks, rows, noises):
        attack, result = prepare(make, layer), measure_utility(layer, length, noise)
        cell = Cell(
            attack=name,
            layer=layer,
            blocks=len(anatomy.blocks),
            length=length,
            sigma=noise.sigma,
            relative=noise.relative,
            texts=min(texts, len(rows[length])),
            utility=result if isinstance(result, _Utility) else None,
            problem=result if isinstance(result, str) else None,
        )
        yield _run_attack(cell, attack, anatomy, rows[length], noise)


def _run_attack(
    cell: Cell, attack: InversionAttack | Exception, anatomy: Anatomy, ids: Tensor, noise: Noise
) -> Cell:
    """Return the cell with the results of the attack."""
    try:
        if isinstance(attack, Exception):
            raise attack
        cell = replace(cell, budget_seconds=attack.budget_seconds)
        hidden = hidden_states(anatomy, cell.layer, ids)
        sent = (hidden + gaussian_noise(hidden, noise))[: cell.texts]
        truth = ids[: cell.texts]
        start, cpu_seconds = time.perf_counter(), time.process_time()
        guess = attack.reconstruct(sent, None, None)
        seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_seconds
        scores = sentence_scores(guess.tokens, truth, rouge=cell.length <= MAX_ROUGE_TOKENS)
    except Exception as error:
        problems = [p for p in (cell.problem, _describe(error)) if p]
        return replace(cell, problem="; ".join(problems), finished=False)
    steps = getattr(guess, "steps", None)
    return replace(
        cell,
        rates=reconstruction_rates(scores, seed=noise.seed),
        seconds=seconds,
        cpu_seconds=cpu_seconds,
        steps=None if steps is None else float(steps.double().mean()),
        finished=guess.finished,
    )


def _describe(error: Exception) -> str:
    """Return the class and the message of an error."""
    return f"{type(error).__name__}: {error}"


PROBE = "a"  # any text without special tokens


def special_ends(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """Return the ids that the tokenizer puts before and after a text, such as [CLS] and [SEP]."""
    ids = list(tokenizer(PROBE, add_special_tokens=False)["input_ids"])
    with_special = list(tokenizer(PROBE)["input_ids"])
    for start in range(len(with_special) - len(ids) + 1):
        if with_special[start : start + len(ids)] == ids:
            return with_special[:start], with_special[start + len(ids) :]
    return [], []


def rows_of_length(
    texts: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    max_rows: int,
    *,
    min_rows: int = 1,
    seed: int = 0,
    start_token_id: int | None = None,
) -> Tensor:
    """Return texts of exactly ``length`` tokens, with the tokenizer's special ones.

    They are drawn from ``texts`` in random order. A text that is too short is joined with the next
    one, and a text that is too long is cut.

    Args:
        texts: The texts to draw from.
        tokenizer: The tokenizer of the model.
        length: The number of tokens of every row.
        max_rows: The number of rows to return if there is enough text.
        min_rows: The smallest number of rows.
        seed: The seed of the order.
        start_token_id: The id before every row, for a tokenizer that adds none; None for no id.

    Returns:
        (n, length) token ids, n from ``min_rows`` to ``max_rows``.

    Raises:
        SourceError: fewer than ``min_rows`` rows, or a length that the special tokens fill.
    """
    front, end = special_ends(tokenizer)
    if start_token_id is not None:
        front = [start_token_id, *front]
    available = length - len(front) - len(end)
    special = len(front) + len(end)
    hint = f"{special} are special tokens"
    check_option("--lengths", length, at_least=special + 1, hint=hint)
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(seed)).tolist()
    rows: list[Tensor] = []
    collected: list[int] = []
    for i in order:
        text = texts[i] if not collected else " " + texts[i]
        collected += tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        if len(collected) >= available:
            rows.append(torch.tensor([*front, *collected[:available], *end]))
            collected = []
        if len(rows) == max_rows:
            break
    if len(rows) < min_rows:
        raise SourceError(
            f"--lengths {length}: {len(texts)} texts make only {len(rows)} of {length} tokens, and "
            f"{min_rows} are asked for: give more text, fewer texts or a smaller length"
        )
    return torch.stack(rows)


STEPS_A_SWEEP = 50  # gradient steps between two sweeps of verified changes; not tuned
PAPER_LR = 0.3  # learning rate of the descent with the paper's choices; not tuned


def make_adversary(
    name: str,
    layer: int,
    *,
    steps: int = 1000,
    budget_seconds: float | None = None,
    hello: int | None = None,
    special_ids: Sequence[int] = (),
    public_text: attacks.PublicText | Literal["sampled"] | None = "sampled",
) -> attacks.InversionAttack:
    """Return an attack on activations by its name; it is called ``name@layer``.

    Args:
        name: A name in ``INVERT_ATTACKS``: ``prefix`` is :class:`PrefixInversion`; ``descent``
            :class:`EmbeddingDescent` as it comes, ``sweeps`` with verified changes, ``paper`` with
            the paper's choices (Eq. 3 and 4 from 'hello') but for its stop at a cosine of .98: it
            goes on until settled.
        layer: The split.
        steps: The largest number of gradient steps of a descent.
        budget_seconds: About the time for one observation; None for no bound.
        hello: The id that ``paper`` starts from; None for the mean of the vocabulary.
        special_ids: The ids that ``sweeps`` tries at every position.
        public_text: The public text of :class:`PrefixInversion`.

    Raises:
        ValueError: the attack refuses a setting.
    """
    label = f"{name}@{layer}"
    common: dict[str, Any] = {"budget_seconds": budget_seconds, "name": label}
    if name == "prefix":
        return attacks.PrefixInversion(layer, public_text, **common)
    common |= {"steps": steps}
    if name == "paper":
        common["descent"] = attacks.DescentSettings(weighting="paper")
        start: Literal["mean"] | int = "mean" if hello is None else hello
        return attacks.EmbeddingDescent(
            layer, lr=PAPER_LR, likeness="cosine", initial=start, **common
        )
    if name == "sweeps":
        return attacks.EmbeddingDescent(
            layer, sweeps=max(1, steps // STEPS_A_SWEEP), always_try=tuple(special_ids), **common
        )
    return attacks.EmbeddingDescent(layer, **common)
