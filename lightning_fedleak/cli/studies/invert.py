"""Attack and task accuracy over splits, lengths and noise levels, one cell at a time.

The *split* is the block whose output a client sends to the server, which recovers the texts from
it. A *cell* is one attack at one split, on texts of one length and with noise of one strength.

Texts are cut to one length. The noise on the hidden states that a client sends is Gaussian (Zheng,
Sect. 5.2).
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedTokenizerBase

from lightning_fedleak import attacks
from lightning_fedleak.attacks import InversionAttack
from lightning_fedleak.cli.finetuning import SourceError, check_option
from lightning_fedleak.evaluation.metrics import Rate
from lightning_fedleak.evaluation.metrics.texts import reconstruction_rates, sentence_scores
from lightning_fedleak.model.anatomy import Anatomy, place_of
from lightning_fedleak.model.model_runs import hidden_states, undisturbed

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
        budget_seconds: The time budget of the attack, in wall time; None for no bound.
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
        budget_seconds: The wall time for one observation; None for no bound.
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
