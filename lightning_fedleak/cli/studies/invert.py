"""Attack and task accuracy over splits, lengths and noise levels, one cell at a time.

Texts are cut to one length. The noise on the hidden states that a client sends is Gaussian (Zheng,
Sect. 5.2).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
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
from lightning_fedleak.labs.token_relaxation import TokenRelaxation
from lightning_fedleak.model.anatomy import Anatomy, place_of
from lightning_fedleak.model.model_runs import hidden_states, undisturbed

LOGITS_AT_ONCE = 1 << 25  # numbers, 128 MiB in float32; fewer take less memory and more runs
MOST_NATS = 700.0  # cross-entropy above which the perplexity would overflow a float


@dataclass(frozen=True)
class Noise:
    """Gaussian noise on the hidden states that a client sends.

    Attributes:
        sigma: standard deviation.
        relative: whether it counts in the standard deviations that the d dimensions have over the
            B * L states. Else it is absolute, as in the paper.
        seed: of the draw, which is the same for every sigma.
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


@contextmanager
def noised(anatomy: Anatomy, layer: int, noise: Tensor) -> Iterator[None]:
    """Let the model add ``noise`` (B, L, d) to its hidden states at ``layer``, within the context.

    Raises:
        ValueError: the model has no such layer.
    """
    with place_of(anatomy, layer).on_states(lambda states: states + noise):
        yield


@dataclass(frozen=True)
class _Utility:
    """Next-token prediction of the whole model from noised hidden states.

    Attributes:
        accuracy: mean over tokens.
        perplexity: of the tokens that are predicted.
    """

    accuracy: float
    perplexity: float


def utility(anatomy: Anatomy, layer: int, input_ids: Tensor, noise: Noise) -> _Utility | None:
    """Return what a causal model in eval mode predicts with noise added at the split.

    Args:
        anatomy: of the model; the result is None where it predicts no next tokens.
        layer: the split.
        input_ids: (B, L) texts without padding, L at least 2; run in parts of the batch.
        noise: at the split.
    """
    if anatomy.kind != "causal":
        return None
    ids = input_ids.to(anatomy.device)
    draw = gaussian_noise(hidden_states(anatomy, layer, ids), noise)
    rows = max(1, LOGITS_AT_ONCE // (ids.shape[1] * (anatomy.vocab_size or 1)))
    right, nats = 0, 0.0
    with torch.no_grad(), undisturbed(anatomy) as model:
        for a in range(0, len(ids), rows):
            part = slice(a, a + rows)
            with noised(anatomy, layer, draw[part]):
                logits = model(input_ids=ids[part]).logits[:, :-1].flatten(0, 1).float()
            truth = ids[part, 1:].flatten()
            right += int((logits.argmax(1) == truth).sum())
            nats += float(F.cross_entropy(logits, truth, reduction="sum"))
    n = ids[:, 1:].numel()
    return _Utility(right / n, math.exp(min(MOST_NATS, nats / n)))


ROUGE_UP_TO = 512  # tokens of a text; ROUGE-L of longer ones takes time with the square


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One attack on texts of one length, sent through one split with one noise level.

    Attributes:
        attack: its name.
        layer: the split.
        blocks: of the whole model.
        length: tokens of each text.
        sigma: of the noise.
        relative: whether in a unit of what is shared, see :class:`Noise`.
        texts: that count in the rates.
        rates: by the names of :func:`~lightning_fedleak.evaluation.metrics.texts.
            reconstruction_rates`, each with its 95% interval; empty where there are none.
        seconds: wall time of the attack.
        cpu_seconds: processor time of it, of all threads: what counts on a busy machine.
        budget_seconds: wall time that the attack was given; None for no bound.
        finished: False where the time budget cut anything off.
        problem: what went wrong, or None.
        utility: of a causal model from the noised states; None where it could not be measured.
        steps: gradient steps per text, or None.
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
    announce: Callable[[str], None] = lambda _: None,
) -> Iterator[Cell]:
    """Yield each cell when it is measured: layers, attacks on them, lengths, noise levels.

    The first ``texts`` of the rows are attacked, all of them measure the utility, with noise of the
    same law. An attack that raises costs its own cells and no other's; so does a utility that
    cannot be measured. ``KeyboardInterrupt`` is passed on.

    Args:
        anatomy: of the model.
        rows: (n, L) token ids without padding, by their length L.
        attacks: names, and how to make each for a split.
        layers: splits.
        noises: on what is sent.
        texts: attacked in each cell.
        announce: called with the name of what comes next.
    """
    for layer in layers:
        useful: dict[tuple[int, Noise], _Utility | str | None] = {}
        for name, make in attacks:
            announce(f"preparing {name}@{layer}")
            attack = _prepared(make, layer, anatomy)
            for length, ids in rows.items():
                for noise in noises:
                    if (length, noise) not in useful:
                        announce(f"utility, split {layer}, {length} tokens")
                        try:
                            useful[length, noise] = utility(anatomy, layer, ids, noise)
                        except Exception as error:
                            useful[length, noise] = f"utility: {_describe(error)}"
                    announce(f"{name}, split {layer}, {length} tokens, noise {noise.sigma:g}")
                    task = useful[length, noise]
                    cell = Cell(
                        attack=name,
                        layer=layer,
                        blocks=len(anatomy.blocks),
                        length=length,
                        sigma=noise.sigma,
                        relative=noise.relative,
                        texts=min(texts, len(ids)),
                        utility=task if isinstance(task, _Utility) else None,
                        problem=task if isinstance(task, str) else None,
                    )
                    yield _attacked(cell, attack, anatomy, ids, noise)


def _prepared(
    make: Callable[[int], InversionAttack], layer: int, anatomy: Anatomy
) -> InversionAttack | Exception:
    """Return a new attack, prepared, or the error where one came."""
    try:
        attack = make(layer)
        attack.prepare(anatomy)
    except Exception as error:
        return error
    return attack


def _attacked(
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
        scores = sentence_scores(guess.tokens, truth, rouge=cell.length <= ROUGE_UP_TO)
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


PROBE = "a"


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
    most: int,
    *,
    least: int = 1,
    seed: int = 0,
    start_token_id: int | None = None,
) -> Tensor:
    """Return texts of exactly ``length`` tokens, with the tokenizer's special ones.

    Drawn from ``texts`` in random order; one that is too short is joined with the next, one that is
    too long is cut.

    Args:
        texts: the source.
        tokenizer: of the model.
        length: of every row.
        most: rows wanted.
        least: rows that there must be.
        seed: of the order.
        start_token_id: id put before every row where the tokenizer puts none, or None.

    Returns:
        (n, length) token ids, n from ``least`` to ``most``.

    Raises:
        SourceError: fewer than ``least`` rows, or a length that the special tokens fill.
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
        if len(rows) == most:
            break
    if len(rows) < least:
        raise SourceError(
            f"--lengths {length}: {len(texts)} texts make only {len(rows)} of {length} tokens, and "
            f"{least} are asked for: give more text, fewer texts or a smaller length"
        )
    return torch.stack(rows)


STEPS_A_SWEEP = 50  # gradient steps between two sweeps of verified changes; not tuned
PAPER_LR = 0.3  # learning rate of the descent with the paper's choices; not tuned
RELAXATION_LR = 0.3  # learning rate of the relaxation; not tuned


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
        name: out of ``INVERT_ATTACKS``: ``prefix`` is :class:`PrefixInversion`; ``descent``
            :class:`EmbeddingDescent` as it comes, ``sweeps`` with verified changes, ``paper`` with
            the paper's choices (Eq. 3 and 4 from 'hello') but for its stop at a cosine of .98: it
            goes on until settled; ``relaxation`` :class:`TokenRelaxation`.
        layer: the split.
        steps: most gradient steps of a descent.
        budget_seconds: wall time for one observation, or None.
        hello: id that ``paper`` starts from; None for the mean of the vocabulary.
        special_ids: that ``sweeps`` tries at every position.
        public_text: of :class:`PrefixInversion`.

    Raises:
        ValueError: a setting that the attack refuses.
    """
    label = f"{name}@{layer}"
    common: dict[str, Any] = {"budget_seconds": budget_seconds, "name": label}
    if name == "prefix":
        return attacks.PrefixInversion(layer, public_text, **common)
    common |= {"steps": steps}
    if name == "relaxation":
        return TokenRelaxation(layer, lr=RELAXATION_LR, initial="mean", **common)
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
