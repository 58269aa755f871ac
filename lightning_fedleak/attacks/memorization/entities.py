"""Ranks of planted values among candidates of the same set, in the same context.

The user plants random values, such as phone numbers, in some training texts before the run. If the
trained model finds a planted value likelier than other values that could have been drawn instead,
it has memorized it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_fedleak.attacks.base import Guess, Query, UnusableObservation
from lightning_fedleak.attacks.memorization.scores import MemorizationAttack, released_part
from lightning_fedleak.model.snapshots import Observation, ReleasedModel, check_finite
from lightning_fedleak.validate import check_integer


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

    def run(self, view: Observation, query: Query | None = None) -> Guess:
        """Return the ranks.

        Raises:
            UnusableObservation: No model is released, or its outputs are not finite.
        """
        snapshot = released_part(view.candidates, "value")
        # Column 0 holds the value itself, columns 1 to ``sizes`` its candidates.
        columns = torch.arange(snapshot.log_probs.shape[1]) <= snapshot.sizes[:, None]
        check_finite(snapshot.log_probs[columns], "the model's log probabilities")
        value = snapshot.log_probs[:, :1]
        columns[:, 0] = False
        above = ((snapshot.log_probs > value) & columns).sum(1)
        ties = ((snapshot.log_probs == value) & columns).sum(1)
        generator = torch.Generator().manual_seed(0)
        places = torch.rand(len(ties), generator=generator, dtype=torch.float64) * (ties + 1)
        return EntityGuess(1 + above + places.long(), snapshot.sizes, snapshot.greedy)

    def score(self, released: ReleasedModel) -> Tensor:
        """Raise an error: a value has a rank, and no score without its candidates.

        Raises:
            UnusableObservation: always.
        """
        raise UnusableObservation("a value has a rank among its candidates, and no score alone")
