"""Attacks on what a released model would write: texts, and planted values among candidates.

Nothing is generated. A model that samples at temperature 1 from its whole vocabulary writes k
tokens after their context with probability ``p = exp(sum lp)``. The tokens are (n, q)-discoverable
if n such samples contain them with probability at least q: ``1 - (1 - p)^n >= q`` (Hayes et al.
2024, arXiv 2410.19482, section 3). Greedy decoding writes them if each is the most likely token.

A language model also writes texts that it was not trained on, such as set phrases. Only the excess
over held-out texts shows memorization.

*Planted values* are ranked among candidates of the same set, in the same context. The user plants
random values, such as phone numbers, in some training texts before the run. If the trained model
finds a planted value likelier than other values that could have been drawn instead, it has
memorized it.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_fedleak.attacks.base import Guess, Query
from lightning_fedleak.attacks.memorization.scores import MemorizationAttack, _finite, released_part
from lightning_fedleak.model import snapshots
from lightning_fedleak.validate import check_integer

DRAWS = 10_000  # n, the number of samples, as in docs/memorization.md; not tuned
PROBABILITY = 0.5  # q, of a run in one of the samples: more likely than not


@dataclass(frozen=True)
class ExtractionGuess(Guess):
    """Which of N texts contain a run of k label tokens that the model would write.

    Attributes:
        log_probs: (N,) the highest log probability of a run of k tokens, in nats; NaN for a text
            without such a run.
        base_log_probs: (N,) the same under the base.
        greedy: (N,) bool, whether greedy decoding writes some run.
        has_run: (N,) bool, whether the text has a run of k label tokens at all.
    """

    log_probs: Tensor
    base_log_probs: Tensor
    greedy: Tensor
    has_run: Tensor


class Extraction(MemorizationAttack):
    """Count texts with k consecutive tokens that are (n, q)-discoverable, or decoded greedily.

    Examples:
        >>> from lightning_fedleak import Extraction, LeakageMonitor
        >>> monitor = LeakageMonitor([Extraction(tokens=16)])
        >>> "leakage/extraction/extracted" in monitor.metric_names()
        True

    Args:
        tokens: k, the number of consecutive label tokens.
        name: The name in the logs.

    Raises:
        ValueError: ``tokens`` is below 1.
    """

    default_name = "extraction"
    config_names = ("tokens",)

    def __init__(self, tokens: int = 16, name: str | None = None) -> None:
        super().__init__(name)
        self.tokens = check_integer("tokens", tokens)

    def run(self, view: snapshots.Observation, query: Query | None = None) -> Guess:
        """Return for each text how likely its likeliest run of k tokens is, and if it is greedy.

        Raises:
            UnusableObservation: No model is released, or its outputs are not finite.
        """
        released = _finite(view.released)
        highest, base = self._highest(released.now), self._highest(released.base)
        hits = _window_sums(released.now.greedy.double(), released.now, self.tokens)
        # :meth:`extracted` decides on the log probabilities, which are NaN without a run.
        return ExtractionGuess(highest, base, (hits == self.tokens).any(1), ~highest.isnan())

    def _highest(self, tokens: snapshots.TokenSnapshot) -> Tensor:
        """Return (N,) the highest log probability of a run of k tokens; NaN without a run."""
        highest = _window_sums(tokens.log_probs.double(), tokens, self.tokens).amax(1)
        return highest.masked_fill(highest.isneginf(), math.nan)

    def extracted(self, log_probs: Tensor, draws: int = DRAWS) -> Tensor:
        """Return (N,) bool, whether n samples contain the run with probability q.

        Args:
            log_probs: (N,) log probabilities of runs, see :class:`ExtractionGuess`.
            draws: n, the number of samples.
        """
        # 1 - (1 - q)^(1 / n), accurate for large n.
        min_probability = -math.expm1(math.log1p(-PROBABILITY) / draws)
        return log_probs >= math.log(min_probability)


class Canaries(Extraction):
    """Query the model for the probability of the last tokens of planted texts.

    The texts are those of :func:`~lightning_fedleak.evaluation.canaries.with_canaries`, in the data
    or held out, see :class:`~lightning_fedleak.engine.channels.CanaryChannel`. Their first tokens
    prompt the model and are not scored (Carlini et al. 2019, arXiv 1802.08232).

    Args:
        tokens: The number of last tokens of each canary that are scored; None for all that are
            predicted.
        name: The name in the logs.

    Raises:
        ValueError: ``tokens`` is below 1.

    Examples:
        >>> from lightning_fedleak import Games, LeakageMonitor, with_canaries
        >>> from lightning_fedleak.attacks.memorization import Canaries
        >>> canaries = [[7, n, n + 1] for n in range(10, 50, 2)]
        >>> train = with_canaries([[1, 2, 3]] * 100, canaries, seed=0, times=(1, 4, 16))
        >>> monitor = LeakageMonitor([Canaries(tokens=2)], games=Games(canaries=train.canaries))
    """

    default_name = "canary"

    def __init__(self, tokens: int | None = None, name: str | None = None) -> None:
        super().__init__(1 if tokens is None else tokens, name)
        self.n_scored = tokens

    def run(self, view: snapshots.Observation, query: Query | None = None) -> Guess:
        """Return the log probability of each canary's last tokens and if they are decoded greedily.

        Raises:
            UnusableObservation: No model is released, or its outputs are not finite.
        """
        released = _finite(view.released)
        # Labels are counted from the end, and the last ``n_scored`` are scored.
        scored = labels = released.now.labels
        if self.n_scored is not None:
            scored = labels & (labels.long().flip(1).cumsum(1).flip(1) <= self.n_scored)
        return ExtractionGuess(
            (released.now.log_probs * scored).double().sum(1),
            (released.base.log_probs * scored).double().sum(1),
            (released.now.greedy | ~scored).all(1),
            labels.any(1),
        )

    def config(self) -> dict[str, object]:
        """Return the number of last tokens that are scored."""
        return super().config() | {"tokens": self.n_scored}


def _window_sums(values: Tensor, tokens: snapshots.TokenSnapshot, k: int) -> Tensor:
    """Return sums over each k consecutive tokens, (N, windows); -inf if one is no label."""
    if tokens.labels.shape[1] < k:
        return values.new_full((len(values), 1), -math.inf)
    all_labels = tokens.labels.unfold(1, k, 1).all(2)
    return values.unfold(1, k, 1).sum(2).masked_fill(~all_labels, -math.inf)


@dataclass(frozen=True)
class EntityGuess(Guess):
    """The rank of each of N values among its candidates.

    Attributes:
        ranks: (N,) int64, 1 for the most likely value; ties are broken at random.
        candidates: (N,) int64, the number of candidates that each value is compared with.
        greedy: (N,) bool, whether greedy decoding writes the value.
    """

    ranks: Tensor
    candidates: Tensor
    greedy: Tensor


class Entities(MemorizationAttack):
    """Rank each planted value among candidates that were drawn from the same set as it.

    The values are those of :func:`~lightning_fedleak.evaluation.canaries.with_entities`. All
    candidates of a value are in the same context, are distinct, and were not planted. So the rank
    of a value that was not trained on is uniform, whatever the model has learned about the sentence
    or the format of values. The exposure of Carlini et al. 2019 (arXiv 1802.08232, section 4) uses
    the rank among all values; here it is the rank among random ones.

    Args:
        candidates: The number of candidates of each value; all remaining ones if the set has
            fewer.
        name: The name in the logs.

    Raises:
        ValueError: fewer than 20 candidates: one in so many ranks first by chance.

    Examples:
        >>> from lightning_fedleak.attacks.memorization import Entities
        >>> Entities(candidates=100).candidates
        100
    """

    default_name = "entity"
    config_names = ("candidates",)

    def __init__(self, candidates: int = 1000, name: str | None = None) -> None:
        super().__init__(name)
        self.candidates = check_integer("candidates", candidates, at_least=20)

    def run(self, view: snapshots.Observation, query: Query | None = None) -> Guess:
        """Return the ranks.

        Raises:
            UnusableObservation: No model is released, or its outputs are not finite.
        """
        snapshot = released_part(view.candidates, "value")
        # Column 0 holds the value itself, columns 1 to ``sizes`` its candidates.
        columns = torch.arange(snapshot.log_probs.shape[1]) <= snapshot.sizes[:, None]
        snapshots.check_finite(snapshot.log_probs[columns], "the model's log probabilities")
        value = snapshot.log_probs[:, :1]
        columns[:, 0] = False
        above = ((snapshot.log_probs > value) & columns).sum(1)
        ties = ((snapshot.log_probs == value) & columns).sum(1)
        generator = torch.Generator().manual_seed(0)
        places = torch.rand(len(ties), generator=generator, dtype=torch.float64) * (ties + 1)
        return EntityGuess(1 + above + places.long(), snapshot.sizes, snapshot.greedy)
