"""How much of the texts was reconstructed, token by token, against what was really sent.

A sentence's tokens share one run of the model and one draw of noise, and a wrong one spoils its
neighbours, so that tokens are no independent trials. The intervals of means here treat *sentences*
as independent; those of rates over sentences are Clopper-Pearson's.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment
from scipy.special import stdtrit
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.functional.text.rouge import rouge_score
from torchmetrics.utilities import dim_zero_cat

from lightning_fedleak.attacks.texts.base import NOTHING, TextGuess
from lightning_fedleak.metrics.rates import UNKNOWN, Rate, flat, proportion

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

POSITIONS = 2048
CHUNK = 1 << 21


@dataclass(frozen=True)
class SentenceScores:
    """What became of each of n sentences.

    Attributes:
        hits: (n,) tokens guessed right at their place.
        lengths: (n,) tokens, without padding, at least 1.
        rouge_l: (n,) F measure of ROUGE-L in [0, 1]; NaN where it was not asked for.
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
    """Which tokens were guessed right, and which there are.

    Args:
        guessed: (B, L) token ids; :data:`~lightning_fedleak.attacks.texts.base.NOTHING` is wrong.
        input_ids: (B, L) the tokens that were sent.
        attention_mask: (B, L), 0 where padded: these count neither as right nor as wrong.

    Returns:
        ``hits`` and ``real``, both (B, L) bool on the CPU. No hit lies outside ``real``.

    Raises:
        ValueError: shapes differ, or a true id is negative.
    """
    if input_ids.dim() != 2 or guessed.shape != input_ids.shape:
        raise ValueError(
            "guess and truth must both be (B, L) and of one shape, got "
            f"{tuple(guessed.shape)} and {tuple(input_ids.shape)}"
        )
    if attention_mask is not None and attention_mask.shape != input_ids.shape:
        raise ValueError(
            f"attention_mask is {tuple(attention_mask.shape)}, but input_ids is "
            f"{tuple(input_ids.shape)}"
        )
    guessed, truth = guessed.detach().cpu(), input_ids.detach().cpu()
    real = torch.ones_like(truth) if attention_mask is None else attention_mask.detach().cpu()
    real = real != 0
    if bool((truth[real] < 0).any()):
        raise ValueError(
            f"input_ids holds the id {int(truth[real].min())}: give the tokens and not the labels, "
            "and mask padding out"
        )
    return (guessed == truth) & real, real


def in_true_order(
    guessed: Tensor, input_ids: Tensor, attention_mask: Tensor | None = None
) -> Tensor:
    """Texts that were guessed in any order, beside the true ones that they are most like.

    Every guessed text is given to one true one at most, so that as many tokens as possible are
    right at their place, and where that leaves it open as many as possible are in it anywhere.

    Args:
        guessed: (n, k) token ids, each text from the left.
        input_ids: (B, L) the texts that were sent, each from the left.
        attention_mask: (B, L), 0 where padded: these count neither as right nor as wrong.

    Returns:
        (B, L) guessed ids on the CPU,
        :data:`~lightning_fedleak.attacks.texts.base.NOTHING` where there is none.
    """
    truth = input_ids.detach().cpu()
    real = torch.ones_like(truth) if attention_mask is None else attention_mask.detach().cpu()
    length = truth.shape[1]
    said = guessed.detach().cpu()[:, :length]
    said = torch.nn.functional.pad(said, (0, length - said.shape[1]), value=NOTHING)
    hits = (said[:, None] == truth) & (real != 0)
    anywhere = torch.tensor(
        [
            [(Counter(one) & Counter(other)).total() for other in _known(truth, real)]
            for one in _known(said, said >= 0)
        ],
        dtype=torch.int64,
    ).view(len(said), len(truth))
    likeness = hits.sum(2) * (truth.numel() + 1) + anywhere
    found, true = linear_sum_assignment(likeness.numpy(), maximize=True)
    told = torch.full_like(truth, NOTHING)
    told[torch.from_numpy(true)] = said[torch.from_numpy(found)]
    return told


def _known(tokens: Tensor, real: Tensor) -> list[list[int]]:
    return [row[there != 0].tolist() for row, there in zip(tokens, real, strict=True)]


def sentence_scores(
    guessed: Tensor, input_ids: Tensor, attention_mask: Tensor | None = None, *, rouge: bool = True
) -> SentenceScores:
    """Scores of each sentence, all on the CPU; sentences without any token are left out.

    ROUGE-L is torchmetrics' over token ids as words. Guess and truth are of one length, so that it
    is the longest common subsequence over the number of tokens: what accuracy would be if a
    reconstruction that slipped by some places were pushed back. What is right at both ends is left
    out before; the time grows with the square of the length between (0.3 s for 1,000 tokens).
    ROUGE-1 and ROUGE-2 are the shares of tokens, and of pairs of neighbours, that are in both,
    wherever they stand. A right text of one token, which has no pair, has 1.

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
    found = torch.full((int(any_token.sum()), 3), math.nan, dtype=torch.float64)
    for i, row in enumerate(any_token.nonzero().flatten().tolist() if rouge else ()):
        said, sent = guessed[row][real[row]].tolist(), truth[row][real[row]].tolist()
        of = _rouge_l(said, sent), _rouge_n(said, sent, 1), _rouge_n(said, sent, 2)
        found[i] = torch.tensor(of, dtype=torch.float64)
    return SentenceScores(hits.sum(1)[any_token], real.sum(1)[any_token], *found.unbind(1))


def _rouge_n(guessed: list[int], truth: list[int], n: int) -> float:
    """F measure of two texts of equally many tokens: n-grams in both, over all of one."""
    if guessed == truth:
        return 1.0
    grams = [Counter(zip(*(ids[i:] for i in range(n)), strict=False)) for ids in (guessed, truth)]
    return (grams[0] & grams[1]).total() / max(1, len(truth) - n + 1)


def _rouge_l(guessed: list[int], truth: list[int]) -> float:
    """F measure of two texts of n tokens; equal ends belong to a longest common subsequence."""
    wrong = [i for i, (a, b) in enumerate(zip(guessed, truth, strict=True)) if a != b]
    if not wrong:
        return 1.0
    between = slice(wrong[0], wrong[-1] + 1)
    scores = rouge_score(
        " ".join(map(str, guessed[between])),
        " ".join(map(str, truth[between])),
        normalizer=str,
        tokenizer=str.split,
        rouge_keys="rougeL",
    )
    length = between.stop - between.start
    common = round(float(scores["rougeL_fmeasure"]) * length)
    return 1 - (length - common) / len(truth)


def reconstruction_rates(
    scores: SentenceScores, *, confidence: float = 0.95, resamples: int = 1000, seed: int = 0
) -> dict[str, Rate]:
    """How much was reconstructed over n sentences, each rate with its interval.

    ``token_accuracy``: Zheng's attack accuracy (Eq. 5), the mean over sentences of the share of
    their tokens that is right. ``token_accuracy_pooled``: the share of all tokens, so that long
    sentences weigh more. ``exact_sentences``: share of sentences without an error.
    ``texts_found``: of those of which half the tokens are right at least. ``rouge_1``, ``rouge_2``,
    ``rouge_l``: means over sentences.

    The intervals of ``exact_sentences`` and ``texts_found`` are Clopper-Pearson's. Those of the
    means are ``expit(logit(mean) +- t s)``, Student's t on one less than the number of sentences
    and s from a bootstrap that draws sentences, but not less than for independent tokens. No lower
    end lies above what a perfect score would get if the tokens of a sentence stood and fell
    together, ``(alpha / 2) ** (1 / n)``, nor an upper end below the mirror image: ten perfect
    sentences read [.69, 1].

    Args:
        scores: of all sentences.
        confidence: of the intervals, between 0 and 1.
        resamples: of the bootstrap.
        seed: of the bootstrap; no global random numbers are used.

    Returns:
        Rates by the names in ``RECONSTRUCTION_RATES``; NaN where there is nothing to count.

    Raises:
        ValueError: a confidence outside (0, 1), or fewer than 100 resamples.
    """
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must lie between 0 and 1, got {confidence}")
    if isinstance(resamples, bool) or resamples < 100:
        raise ValueError(f"resamples must be at least 100, got {resamples!r}")
    of = (scores.rouge_1, scores.rouge_2, scores.hits, scores.lengths, scores.rouge_l)
    columns = [column.double().numpy() for column in of]
    # One order, so that the bootstrap draws the same whichever process saw a sentence.
    order = np.lexsort(columns)
    rouge_1, rouge_2, hits, lengths, rouge_l = (column[order] for column in columns)
    n = hits.size
    if n == 0:
        return dict.fromkeys(RECONSTRUCTION_RATES, UNKNOWN)
    times = _draws(n, resamples, seed)
    ones, each = np.ones(n), float((1 / lengths).sum()) / n**2
    alpha = 1 - confidence
    return {
        "token_accuracy": _mean(hits / lengths, ones, times, each, alpha),
        "token_accuracy_pooled": _mean(hits, lengths, times, 1 / lengths.sum(), alpha),
        "exact_sentences": proportion(int((hits == lengths).sum()), n, confidence),
        "texts_found": proportion(int((2 * hits >= lengths).sum()), n, confidence),
        **{
            name: UNKNOWN if np.isnan(rouge).any() else _mean(rouge, ones, times, each, alpha)
            for name, rouge in (("rouge_1", rouge_1), ("rouge_2", rouge_2), ("rouge_l", rouge_l))
        },
    }


def _draws(n: int, resamples: int, seed: int) -> Floats:
    """(resamples, n) how often each sentence is drawn."""
    rng = np.random.default_rng(seed)
    return rng.multinomial(n, np.full(n, 1 / n), size=resamples).astype(np.float64)


def _mean(top: Floats, bottom: Floats, times: Floats, share: float, alpha: float) -> Rate:
    """``sum(top) / sum(bottom)`` over sentences, with its interval.

    Args:
        top: (n,) a sentence's part.
        bottom: (n,) its weight.
        times: (resamples, n) how often it is drawn.
        share: the sum of the squared weights of all tokens, one over their number if all are alike.
        alpha: of the interval.
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


class TextReconstruction(Metric):
    """:func:`reconstruction_rates` over all sentences seen, on all processes.

    Args:
        confidence: of the intervals.
        rouge: False leaves all ROUGE out; the time of ROUGE-L grows with the square of the length.
        positions: that :meth:`by_position` counts; tokens further back count in all other rates.
        resamples: of the bootstrap.
        seed: of the bootstrap.
        kwargs: passed to :class:`torchmetrics.Metric`.

    ``compute()`` gives each of ``RECONSTRUCTION_RATES``, each also with ``_low`` and ``_high``:
    scalars on the CPU, NaN where unknown.
    """

    is_differentiable = False
    higher_is_better = None
    full_state_update = False

    sentences: list[Tensor]
    position_hits: Tensor
    position_counts: Tensor

    def __init__(
        self,
        *,
        confidence: float = 0.95,
        rouge: bool = True,
        positions: int = POSITIONS,
        resamples: int = 1000,
        seed: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if positions < 1:
            raise ValueError(f"positions must be at least 1, got {positions}")
        self.confidence = confidence
        self.rouge = rouge
        self.positions = positions
        self.resamples = resamples
        self.seed = seed
        # The type in which a process that saw no sentence takes part in the exchange.
        self.set_dtype(torch.float64)
        self.add_state("sentences", [], dist_reduce_fx="cat")
        for name in ("position_hits", "position_counts"):
            self.add_state(name, torch.zeros(positions, dtype=torch.int64), dist_reduce_fx="sum")

    def update(
        self,
        guess: TextGuess | Tensor,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
    ) -> None:
        """Adds sentences.

        Args:
            guess: what the attack said, or its (B, L) token ids.
            input_ids: (B, L) the tokens that were sent.
            attention_mask: (B, L), 0 where padded, also at tokens that shall not count.

        Raises:
            ValueError: as :func:`token_hits`.
        """
        guessed = guess.tokens if isinstance(guess, TextGuess) else guess
        hits, real = token_hits(guessed, input_ids, attention_mask)
        self.add(sentence_scores(guessed, input_ids, attention_mask, rouge=self.rouge))
        place = (real.cumsum(1) - 1)[real]
        inside = place < self.positions
        place = place[inside]
        for state, seen in (("position_hits", hits), ("position_counts", real)):
            counts = torch.zeros(self.positions, dtype=torch.int64)
            counts.index_add_(0, place, seen[real][inside].long())
            held: Tensor = getattr(self, state)
            held += counts.to(held.device)

    def add(self, scores: SentenceScores) -> None:
        """Adds sentences that were scored elsewhere, and are in no place's rate."""
        columns = [getattr(scores, field.name).double() for field in fields(SentenceScores)]
        # Flat, as the empty tensor is with which a process that saw no sentence takes part.
        self.sentences.append(torch.stack(columns, 1).flatten().to(self.device))

    def rates(self) -> dict[str, Rate]:
        """Each of ``RECONSTRUCTION_RATES`` over all sentences, on this process."""
        held = dim_zero_cat(self.sentences) if len(self.sentences) else torch.zeros(0)
        columns = held.reshape(-1, len(fields(SentenceScores))).cpu().double().unbind(1)
        return reconstruction_rates(
            SentenceScores(*columns),
            confidence=self.confidence,
            resamples=self.resamples,
            seed=self.seed,
        )

    def compute(self) -> dict[str, Tensor]:
        """The rates over all sentences."""
        values = flat(self.rates())
        return {name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()}

    def by_position(self) -> list[Rate]:
        """Share of the sentences whose token at place 0, 1, ... was right, Clopper-Pearson's.

        Places count a sentence's own tokens, whichever side is padded, up to the longest sentence.
        Over all processes, so that all must call it.
        """
        with self.sync_context(
            dist_sync_fn=self.dist_sync_fn,
            should_sync=self._to_sync,
            should_unsync=self._should_unsync,
        ):
            pairs = zip(self.position_hits.tolist(), self.position_counts.tolist(), strict=True)
            return [proportion(hits, n, self.confidence) for hits, n in pairs if n]


__all__ = [
    "RECONSTRUCTION_RATES",
    "SentenceScores",
    "TextReconstruction",
    "in_true_order",
    "reconstruction_rates",
    "sentence_scores",
    "token_hits",
]
