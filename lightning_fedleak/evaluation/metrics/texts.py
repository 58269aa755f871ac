"""Rates of reconstructed text, token by token, against the text that was sent.

A sentence's tokens share one run of the model and one draw of noise, and a wrong token spoils its
neighbours, so tokens are not independent trials. The intervals of means treat *sentences* as
independent; those of rates over sentences are Clopper-Pearson's.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment
from scipy.special import stdtrit
from torch import Tensor
from torchmetrics.functional.text.rouge import rouge_score
from torchmetrics.utilities import dim_zero_cat

from lightning_fedleak.attacks.texts.base import NOTHING, TextGuess
from lightning_fedleak.evaluation.metrics.rates import ALPHA, UNKNOWN, Rate, RateMetric, proportion
from lightning_fedleak.validate import check_integer

Floats = NDArray[np.float64]

RECONSTRUCTION_RATES = (
    "token_accuracy",
    "token_accuracy_pooled",
    "exact_sentences",
    "texts_found",
    "rouge_1",
    "rouge_2",
    "rouge_l",
)
"""Names of the rates, in the order in which they are reported."""


class SentenceScores(NamedTuple):
    """How much of each of n sentences was reconstructed.

    Attributes:
        hits: (n,) tokens guessed right at their place.
        lengths: (n,) tokens, without padding, at least 1.
        rouge_l: (n,) F measure of ROUGE-L in [0, 1]; NaN where it was not computed.
        rouge_1: (n,) that of ROUGE-1.
        rouge_2: (n,) that of ROUGE-2.
    """

    hits: Tensor
    lengths: Tensor
    rouge_l: Tensor
    rouge_1: Tensor
    rouge_2: Tensor


def token_hits(
    guessed: Tensor, input_ids: Tensor, attention_mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return which tokens were guessed right, and which are real.

    Args:
        guessed: (B, L) token ids; :data:`~lightning_fedleak.attacks.texts.base.NOTHING` is wrong.
        input_ids: (B, L) the tokens that were sent.
        attention_mask: (B, L), 0 where padded: these count neither as right nor as wrong.

    Returns:
        ``hits`` and ``real``, both (B, L) bool on the CPU. No hit lies outside ``real``.

    Raises:
        ValueError: shapes differ.
    """
    if guessed.shape != input_ids.shape:
        raise ValueError(
            f"a guess of shape {tuple(guessed.shape)} for texts of {tuple(input_ids.shape)}"
        )
    guessed, truth = guessed.detach().cpu(), input_ids.detach().cpu()
    real = _real_places(truth, attention_mask)
    return (guessed == truth) & real, real


def in_true_order(
    guessed: Tensor, input_ids: Tensor, attention_mask: Tensor | None = None
) -> Tensor:
    """Return texts that were guessed in any order, each beside the true text that it is most like.

    Every guessed text is matched with at most one true text, so that as many tokens as possible
    are right at their place; ties are broken by the number of tokens that occur in both texts.

    Args:
        guessed: (n, k) token ids, each text from the left.
        input_ids: (B, L) the texts that were sent, each from the left.
        attention_mask: (B, L), 0 where padded: these count neither as right nor as wrong.

    Returns:
        (B, L) guessed ids on the CPU,
        :data:`~lightning_fedleak.attacks.texts.base.NOTHING` where there is none.
    """
    truth = input_ids.detach().cpu()
    real = _real_places(truth, attention_mask)
    length = truth.shape[1]
    guess_tokens = guessed.detach().cpu()[:, :length]
    guess_tokens = torch.nn.functional.pad(
        guess_tokens, (0, length - guess_tokens.shape[1]), value=NOTHING
    )
    hits = (guess_tokens[:, None] == truth) & real
    anywhere = torch.tensor(
        [
            [(Counter(guess) & Counter(other)).total() for other in _real_tokens(truth, real)]
            for guess in _real_tokens(guess_tokens, guess_tokens >= 0)
        ],
        dtype=torch.int64,
    ).view(len(guess_tokens), len(truth))
    likeness = hits.sum(2) * (truth.numel() + 1) + anywhere
    rows, true = linear_sum_assignment(likeness.numpy(), maximize=True)
    ordered = torch.full_like(truth, NOTHING)
    ordered[torch.from_numpy(true)] = guess_tokens[torch.from_numpy(rows)]
    return ordered


def _real_places(truth: Tensor, attention_mask: Tensor | None) -> Tensor:
    """Return (B, L) bool on the CPU: the places that are not padded."""
    if attention_mask is None:
        return torch.ones_like(truth, dtype=torch.bool)
    return attention_mask.detach().cpu() != 0


def _real_tokens(tokens: Tensor, real: Tensor) -> list[list[int]]:
    return [row[places].tolist() for row, places in zip(tokens, real, strict=True)]


def sentence_scores(
    guessed: Tensor, input_ids: Tensor, attention_mask: Tensor | None = None, *, rouge: bool = True
) -> SentenceScores:
    """Return the scores of each sentence, all on the CPU; sentences without tokens are omitted.

    ROUGE-L is torchmetrics' over token ids as words. Guess and truth have one length, so it is the
    longest common subsequence over the number of tokens: the accuracy of a reconstruction whose
    tokens may be shifted. Right tokens at both ends are cut off first; the time grows with the
    square of the remaining length (0.3 s for 1,000 tokens). ROUGE-1 and ROUGE-2 are the shares of
    tokens, and of pairs of neighbours, that are in both, wherever they stand. A right text of one
    token, which has no pair, scores 1.

    Args:
        guessed: (B, L) token ids; NOTHING is a word that matches none.
        input_ids: (B, L) the tokens that were sent.
        attention_mask: (B, L), 0 where padded.
        rouge: False leaves all ROUGE out.

    Raises:
        ValueError: as :func:`token_hits`.
    """
    hits, real = token_hits(guessed, input_ids, attention_mask)
    guessed, truth = guessed.detach().cpu(), input_ids.detach().cpu()
    any_token = real.any(1)
    rows = torch.full((int(any_token.sum()), 3), math.nan, dtype=torch.float64)
    for i, row in enumerate(any_token.nonzero().flatten().tolist() if rouge else ()):
        guess_tokens, true_tokens = guessed[row][real[row]].tolist(), truth[row][real[row]].tolist()
        pair = guess_tokens, true_tokens
        values = _rouge_l(*pair), _rouge_n(*pair, 1), _rouge_n(*pair, 2)
        rows[i] = torch.tensor(values, dtype=torch.float64)
    return SentenceScores(hits.sum(1)[any_token], real.sum(1)[any_token], *rows.unbind(1))


def _rouge_n(guessed: list[int], truth: list[int], n: int) -> float:
    """Return the F measure of two texts of equally many tokens: the share of common n-grams."""
    if guessed == truth:
        return 1.0
    grams = [Counter(zip(*(ids[i:] for i in range(n)), strict=False)) for ids in (guessed, truth)]
    return (grams[0] & grams[1]).total() / max(1, len(truth) - n + 1)


def _rouge_l(guessed: list[int], truth: list[int]) -> float:
    """Return the F measure of two texts of n tokens; equal ends belong to a longest common
    subsequence.
    """
    wrong = [i for i, (a, b) in enumerate(zip(guessed, truth, strict=True)) if a != b]
    if not wrong:
        return 1.0
    middle = slice(wrong[0], wrong[-1] + 1)
    scores = rouge_score(
        " ".join(map(str, guessed[middle])),
        " ".join(map(str, truth[middle])),
        normalizer=str,
        tokenizer=str.split,
        rouge_keys="rougeL",
    )
    length = middle.stop - middle.start
    common = round(float(scores["rougeL_fmeasure"]) * length)
    return 1 - (length - common) / len(truth)


@dataclass(frozen=True)
class Inverted:
    """What an attack made of n texts that were sent, and what they were.

    Attributes:
        guess: tokens (n, L).
        input_ids: (n, L) the tokens sent.
        real: (n, L) bool, False where padded.
        age: optimizer steps that the adversary's bottom model was behind; NaN where the attack
            does not say.
        matched: whether the attack named texts without saying which is which, so that one that is
            not named is missed.
    """

    guess: TextGuess
    input_ids: Tensor
    real: Tensor
    age: float
    matched: bool = False

    @property
    def started(self) -> Tensor:
        """Return (n,) bool, False for texts that the time budget left untouched."""
        some = ((self.guess.tokens >= 0).to(self.real.device) & self.real).any(1)
        return torch.ones_like(some) if self.guess.finished or self.matched else some

    def pack(self, texts: int, counted: Tensor | None = None) -> list[float]:
        """Scores of the texts that were begun, as numbers in a fixed order.

        Of tokens that count alone, (n, L) bool; None: all do.

        n; age; whether the attack finished; whether it certified its texts, NaN where it never
        does; what :class:`SentenceScores` holds of each text, one after the other, each filled up
        to ``texts``.
        """
        started = self.started
        guessed, truth, real = (
            self.guess.tokens[started],
            self.input_ids[started],
            (self.real if counted is None else self.real & counted.to(self.real.device))[started],
        )
        scores = sentence_scores(guessed, truth, real)
        certified = self.guess.certified
        numbers = [
            float(len(scores.hits)),
            self.age,
            float(self.guess.finished),
            math.nan if certified is None else float(certified),
        ]
        for column in scores:
            numbers += column.double().tolist() + [0.0] * (texts - len(column))
        return numbers


def unpack(row: Sequence[float], texts: int) -> SentenceScores:
    """Return the scores that :meth:`Inverted.pack` gave of at most ``texts`` texts."""
    width = len(SentenceScores._fields) * texts
    columns = torch.tensor(row[4 : 4 + width], dtype=torch.float64)
    return SentenceScores(*columns.view(-1, texts)[:, : int(row[0])])


def reconstruction_rates(
    scores: SentenceScores, *, resamples: int = 1000, seed: int = 0
) -> dict[str, Rate]:
    """Return how much was reconstructed over n sentences: each rate with its interval.

    - ``token_accuracy``: Zheng's attack accuracy (Eq. 5), the mean over sentences of the share of
      their tokens that is right.
    - ``token_accuracy_pooled``: the share of all tokens that is right; long sentences weigh more.
    - ``exact_sentences``: the share of sentences without an error.
    - ``texts_found``: the share of sentences with at least half of the tokens right.
    - ``rouge_1``, ``rouge_2``, ``rouge_l``: means over sentences.

    The intervals of ``exact_sentences`` and ``texts_found`` are Clopper-Pearson's. Those of the
    means are ``expit(logit(mean) +- t s)``, with Student's t on one less than the number of
    sentences, and s from a bootstrap that draws sentences, but at least that of independent tokens.
    No lower end lies above what a perfect score would get if all tokens of a sentence had one
    outcome, ``(alpha / 2) ** (1 / n)``, nor an upper end below the mirror image: ten perfect
    sentences read [.69, 1].

    Args:
        scores: The scores of all sentences.
        resamples: The number of resamples of the bootstrap.
        seed: The seed of the bootstrap; no global random numbers are used.

    Returns:
        Rates by the names in ``RECONSTRUCTION_RATES``; NaN where there is nothing to count.

    Raises:
        ValueError: fewer than 100 resamples.
    """
    check_integer("resamples", resamples, at_least=100)
    hits, lengths, rouge_l, rouge_1, rouge_2 = (column.double().numpy() for column in scores)
    # One order, so that the bootstrap's draws do not depend on which process added a sentence.
    order = np.lexsort((rouge_1, rouge_2, hits, lengths, rouge_l))
    hits, lengths = hits[order], lengths[order]
    n = hits.size
    if n == 0:
        return dict.fromkeys(RECONSTRUCTION_RATES, UNKNOWN)
    draws = np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), size=resamples)
    times = draws.astype(np.float64)  # (resamples, n): how often each sentence is drawn
    ones, each = np.ones(n), float((1 / lengths).sum()) / n**2
    return {
        "token_accuracy": _mean(hits / lengths, ones, times, each, ALPHA),
        "token_accuracy_pooled": _mean(hits, lengths, times, 1 / lengths.sum(), ALPHA),
        "exact_sentences": proportion(int((hits == lengths).sum()), n),
        "texts_found": proportion(int((2 * hits >= lengths).sum()), n),
        **{
            name: UNKNOWN
            if np.isnan(rouge).any()
            else _mean(rouge[order], ones, times, each, ALPHA)
            for name, rouge in (("rouge_1", rouge_1), ("rouge_2", rouge_2), ("rouge_l", rouge_l))
        },
    }


def _mean(top: Floats, bottom: Floats, times: Floats, share: float, alpha: float) -> Rate:
    """Return ``sum(top) / sum(bottom)`` over sentences, with its interval.

    Args:
        top: (n,) a sentence's part.
        bottom: (n,) its weight.
        times: (resamples, n) how often it is drawn.
        share: the sum of the squared weights of all tokens, one over their number if all are equal.
        alpha: The error probability of the interval.
    """
    n = top.size
    value = float(top.sum() / bottom.sum())
    low = high = value
    if n > 1 and 0 < value < 1:
        error = float(np.std(times @ top / (times @ bottom), ddof=1)) * math.sqrt(n / (n - 1))
        error = max(error, math.sqrt(value * (1 - value) * share))
        step = float(stdtrit(n - 1, 1 - alpha / 2)) * error / (value * (1 - value))
        logit = math.log(value) - math.log1p(-value)
        low, high = (1 / (1 + math.exp(-(logit + sign * step))) for sign in (-1, 1))
    best = (alpha / 2) ** (1 / n)
    return Rate(value, min(low, best, value), max(high, 1 - best, value))


class TextReconstruction(RateMetric):
    """Compute :func:`reconstruction_rates` over all sentences that were added, on all processes.

    Args:
        kwargs: passed to :class:`torchmetrics.Metric`.

    ``compute()`` returns each of ``RECONSTRUCTION_RATES``, each also with ``_low`` and ``_high``:
    scalars on the CPU, NaN where unknown.

    Examples:
        >>> import torch
        >>> from lightning_fedleak.evaluation.metrics import TextReconstruction
        >>> metric = TextReconstruction()
        >>> metric.update(torch.tensor([[5, 8, 7, 9]]), torch.tensor([[5, 6, 7, 9]]))
        >>> metric.compute()["token_accuracy"].item()
        0.75
    """

    sentences: list[Tensor]

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        # The type in which a process that saw no sentence takes part in the exchange.
        self.set_dtype(torch.float64)
        self.add_state("sentences", [], dist_reduce_fx="cat")

    def update(
        self, guess: TextGuess | Tensor, input_ids: Tensor, attention_mask: Tensor | None = None
    ) -> None:
        """Add sentences.

        Args:
            guess: the attack's guess, or its (B, L) token ids.
            input_ids: (B, L) the tokens that were sent.
            attention_mask: (B, L), 0 where padded, also at tokens that should not count.

        Raises:
            ValueError: as :func:`token_hits`.
        """
        guessed = guess.tokens if isinstance(guess, TextGuess) else guess
        scores = sentence_scores(guessed, input_ids, attention_mask)
        # Flat, like the empty tensor that a process without sentences gathers.
        rows = torch.stack([column.double() for column in scores], 1)
        self.sentences.append(rows.flatten().to(self.device))

    def rates(self) -> dict[str, Rate]:
        """Return each of ``RECONSTRUCTION_RATES`` over all sentences, on this process."""
        state = dim_zero_cat(self.sentences) if len(self.sentences) else torch.zeros(0)
        columns = state.reshape(-1, len(SentenceScores._fields)).cpu().double().unbind(1)
        return reconstruction_rates(SentenceScores(*columns))
