"""Rates of reconstructed text, token by token, against the text that was sent.

A sentence's tokens share one run of the model and one draw of noise, and a wrong token spoils its
neighbours, so tokens are not independent trials. The intervals of means treat *sentences* as
independent; those of rates over sentences are Clopper-Pearson's.
"""

import math
from collections import Counter
from typing import NamedTuple

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from scipy.special import stdtrit
from torch import Tensor
from torchmetrics.functional.text.rouge import rouge_score

from lightning_fedleak.attacks.texts.base import NOTHING, TextGuess
from lightning_fedleak.evaluation.metrics.clustered import Floats
from lightning_fedleak.evaluation.metrics.rates import ALPHA, UNKNOWN, Rate, RateMetric, proportion
from lightning_fedleak.validate import check_integer

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
        hits: (n,) The number of tokens that are correct at their position.
        lengths: (n,) The number of tokens without padding, at least 1.
        rouge_l: (n,) The F measure of ROUGE-L in [0, 1]; NaN if it was not computed.
        rouge_1: (n,) The F measure of ROUGE-1.
        rouge_2: (n,) The F measure of ROUGE-2.
    """

    hits: Tensor
    lengths: Tensor
    rouge_l: Tensor
    rouge_1: Tensor
    rouge_2: Tensor

    def table(self) -> Tensor:
        """Return a row for each sentence, with the columns in this order, (n, 5) float64."""
        return torch.stack([column.double() for column in self], 1)


def token_hits(
    guessed: Tensor, input_ids: Tensor, attention_mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return which tokens are correct at their position, and which are real (no padding).

    Args:
        guessed: (B, L) The token ids of the guess. The id
            :data:`~lightning_fedleak.attacks.texts.base.NOTHING` marks a position without a guess,
            and counts as wrong.
        input_ids: (B, L) The true tokens.
        attention_mask: (B, L) 0 at padding, which counts neither as correct nor as wrong.

    Returns:
        ``hits`` and ``real``, both (B, L) bool on the CPU. Every hit is a real token.

    Raises:
        ValueError: The shapes differ.
    """
    if guessed.shape != input_ids.shape:
        raise ValueError("the guess and the texts have different shapes")
    guessed, truth = guessed.detach().cpu(), input_ids.detach().cpu()
    real = _real_positions(truth, attention_mask)
    return (guessed == truth) & real, real


def in_true_order(
    guessed: Tensor, input_ids: Tensor, attention_mask: Tensor | None = None
) -> Tensor:
    """Return texts that were guessed in any order, in the order of the most similar true texts.

    Every guessed text is matched with at most one true text, so that as many tokens as possible
    are correct at their position; ties are broken by the number of tokens in both texts.

    Args:
        guessed: (n, k) The token ids of the guess, each text from the left.
        input_ids: (B, L) The true texts, each from the left.
        attention_mask: (B, L) 0 at padding, which counts neither as correct nor as wrong.

    Returns:
        (B, L) guessed ids on the CPU, and
        :data:`~lightning_fedleak.attacks.texts.base.NOTHING` at positions without a guess.
    """
    truth = input_ids.detach().cpu()
    real = _real_positions(truth, attention_mask)
    length = truth.shape[1]
    guess_tokens = guessed.detach().cpu()[:, :length]
    guess_tokens = torch.nn.functional.pad(
        guess_tokens, (0, length - guess_tokens.shape[1]), value=NOTHING
    )
    hits = (guess_tokens[:, None] == truth) & real
    n_common = torch.tensor(
        [
            [(Counter(guess) & Counter(text)).total() for text in _real_tokens(truth, real)]
            for guess in _real_tokens(guess_tokens, guess_tokens >= 0)
        ],
        dtype=torch.int64,
    ).view(len(guess_tokens), len(truth))
    similarity = hits.sum(2) * (truth.numel() + 1) + n_common  # the factor makes hits decide first
    guess_rows, true_rows = linear_sum_assignment(similarity.numpy(), maximize=True)
    ordered = torch.full_like(truth, NOTHING)
    ordered[torch.from_numpy(true_rows)] = guess_tokens[torch.from_numpy(guess_rows)]
    return ordered


def _real_positions(truth: Tensor, attention_mask: Tensor | None) -> Tensor:
    """Return (B, L) bool on the CPU, True at positions that are not padding."""
    if attention_mask is None:
        return torch.ones_like(truth, dtype=torch.bool)
    return attention_mask.detach().cpu() != 0


def _real_tokens(tokens: Tensor, real: Tensor) -> list[list[int]]:
    """Return the token ids (B, L) of each text at the positions where ``real`` is True."""
    return [row[mask].tolist() for row, mask in zip(tokens, real, strict=True)]


def sentence_scores(
    guessed: Tensor, input_ids: Tensor, attention_mask: Tensor | None = None, *, rouge: bool = True
) -> SentenceScores:
    """Return the scores of each sentence, all on the CPU; sentences without tokens are omitted.

    ROUGE-L is the score of torchmetrics, with token ids as words. Guess and truth have the same
    length, so it is the length of their longest common subsequence over the number of tokens: an
    accuracy that allows shifted tokens. Correct tokens at both ends are cut off first; the time
    grows with the square of the remaining length (0.3 s for 1,000 tokens). ROUGE-1 and ROUGE-2 are
    the shares of tokens, and of pairs of adjacent tokens, that are in both texts at any position. A
    correct text of one token, which has no pair, scores 1.

    Args:
        guessed: (B, L) The token ids of the guess; NOTHING matches no token.
        input_ids: (B, L) The true tokens.
        attention_mask: (B, L) 0 at padding.
        rouge: Whether to compute the ROUGE scores; else they are NaN.

    Raises:
        ValueError: The shapes differ.
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
    """Return the F measure of two texts of the same length: the share of common n-grams."""
    if guessed == truth:
        return 1.0
    grams = [Counter(zip(*(ids[i:] for i in range(n)), strict=False)) for ids in (guessed, truth)]
    return (grams[0] & grams[1]).total() / max(1, len(truth) - n + 1)


def _rouge_l(guessed: list[int], truth: list[int]) -> float:
    """Return the F measure of the longest common subsequence of two texts of the same length.

    Equal tokens at both ends belong to it, so that only the part between is compared.
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


def reconstruction_rates(
    scores: SentenceScores, *, resamples: int = 1000, seed: int = 0
) -> dict[str, Rate]:
    """Return the rates of reconstruction over n sentences, each with its interval.

    - ``token_accuracy``: Zheng's attack accuracy (2023, Eq. 5), the mean over sentences of the
      share of their tokens that are correct.
    - ``token_accuracy_pooled``: the share of all tokens that are correct; long sentences weigh
      more.
    - ``exact_sentences``: the share of sentences without an error.
    - ``texts_found``: the share of sentences with at least half of the tokens correct.
    - ``rouge_1``, ``rouge_2``, ``rouge_l``: means over sentences.

    The intervals of ``exact_sentences`` and ``texts_found`` are Clopper-Pearson's. The intervals of
    the means are ``expit(logit(mean) +- t s)``: t is Student's quantile with n - 1 degrees of
    freedom, and s is the larger of the bootstrap's standard error over sentences and the error of
    independent tokens, on the logit scale. If all tokens of a sentence had one outcome, perfect
    scores would have the lower end ``(alpha / 2) ** (1 / n)``. No lower end is above that, and no
    upper end is below one minus it: ten perfect sentences have [.69, 1].

    Args:
        scores: The scores of all sentences.
        resamples: The number of resamples of the bootstrap.
        seed: The seed of the bootstrap; no global random numbers are used.

    Returns:
        Rates by the names in ``RECONSTRUCTION_RATES``; NaN without a sentence.

    Raises:
        ValueError: ``resamples`` is below 100.
    """
    check_integer("resamples", resamples, at_least=100)
    hits, lengths, rouge_l, rouge_1, rouge_2 = (column.double().numpy() for column in scores)
    # A fixed order, so that the bootstrap's draws do not depend on which process added a sentence.
    order = np.lexsort((rouge_1, rouge_2, hits, lengths, rouge_l))
    hits, lengths = hits[order], lengths[order]
    n = hits.size
    if n == 0:
        return dict.fromkeys(RECONSTRUCTION_RATES, UNKNOWN)
    draws = np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), size=resamples)
    times = draws.astype(np.float64)  # (resamples, n): how often each sentence is drawn
    ones, squared_weights = np.ones(n), float((1 / lengths).sum()) / n**2
    return {
        "token_accuracy": _mean(hits / lengths, ones, times, squared_weights, ALPHA),
        "token_accuracy_pooled": _mean(hits, lengths, times, 1 / lengths.sum(), ALPHA),
        "exact_sentences": proportion(int((hits == lengths).sum()), n),
        "texts_found": proportion(int((2 * hits >= lengths).sum()), n),
        **{
            name: UNKNOWN
            if np.isnan(rouge).any()
            else _mean(rouge[order], ones, times, squared_weights, ALPHA)
            for name, rouge in (("rouge_1", rouge_1), ("rouge_2", rouge_2), ("rouge_l", rouge_l))
        },
    }


def _mean(
    scores: Floats, weights: Floats, times: Floats, squared_weights: float, alpha: float
) -> Rate:
    """Return ``sum(scores) / sum(weights)`` over sentences, with its interval.

    Args:
        scores: (n,) The score of each sentence, times its weight.
        weights: (n,) The weight of each sentence.
        times: (resamples, n) How often each sentence is drawn.
        squared_weights: The sum of the squared weights of all tokens, whose weights add up to 1.
        alpha: The error probability of the interval.
    """
    n = scores.size
    value = float(scores.sum() / weights.sum())
    low = high = value
    if n > 1 and 0 < value < 1:
        means = times @ scores / (times @ weights)
        error = float(np.std(means, ddof=1)) * math.sqrt(n / (n - 1))
        error = max(error, math.sqrt(value * (1 - value) * squared_weights))
        step = float(stdtrit(n - 1, 1 - alpha / 2)) * error / (value * (1 - value))
        logit = math.log(value) - math.log1p(-value)
        low, high = (1 / (1 + math.exp(-(logit + sign * step))) for sign in (-1, 1))
    cap = (alpha / 2) ** (1 / n)  # the lower end for n perfect sentences
    return Rate(value, min(low, cap, value), max(high, 1 - cap, value))


class TextReconstruction(RateMetric):
    """Compute :func:`reconstruction_rates` over the sentences that all processes have added.

    ``compute()`` returns the rates in ``RECONSTRUCTION_RATES``, each also with ``_low`` and
    ``_high``: scalars on the CPU, NaN if unknown.

    Args:
        kwargs: Further arguments of :class:`torchmetrics.Metric`.

    Examples:
        >>> import torch
        >>> from lightning_fedleak.evaluation.metrics import TextReconstruction
        >>> metric = TextReconstruction()
        >>> metric.update(torch.tensor([[5, 8, 7, 9]]), torch.tensor([[5, 6, 7, 9]]))
        >>> metric.compute()["token_accuracy"].item()
        0.75
    """

    n_columns = len(SentenceScores._fields)

    def update(
        self, guess: TextGuess | Tensor, input_ids: Tensor, attention_mask: Tensor | None = None
    ) -> None:
        """Add sentences.

        Args:
            guess: The attack's guess, or its (B, L) token ids.
            input_ids: (B, L) The true tokens.
            attention_mask: (B, L) 0 at padding, and at other tokens that should not count.

        Raises:
            ValueError: The shapes differ.
        """
        guessed = guess.tokens if isinstance(guess, TextGuess) else guess
        self._add(sentence_scores(guessed, input_ids, attention_mask).table())

    def rates(self) -> dict[str, Rate]:
        """Return the rates in ``RECONSTRUCTION_RATES`` over all sentences, on this process."""
        return reconstruction_rates(SentenceScores(*self._trials().unbind(1)))
