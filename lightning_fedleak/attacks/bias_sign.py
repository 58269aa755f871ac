"""Word types from the sign of the output head's bias gradient."""

from __future__ import annotations

from torch import Tensor

from lightning_fedleak.anatomy import HEAD_BIAS, Anatomy
from lightning_fedleak.attacks.base import (
    Attack,
    Query,
    Surfaces,
    UnusableObservation,
    WordGuess,
)
from lightning_fedleak.snapshots import Observation, whole_tensor
from lightning_fedleak.threats import Capability, ThreatModel, ThreatModelError


def bias_sign(gradient: Tensor) -> WordGuess:
    """Types whose bias gradient is negative (Zhao et al. 2020, iDLG, from one sample to many).

    The bias gradient of a softmax with cross-entropy is ``sum_i (p_i - onehot(y_i))``, over the
    tokens i of the batch. A row of an unused type is a sum of probabilities, so never negative:
    every type named was used. A used type is missed where the model's probabilities for it over
    the whole batch outweigh its count, which happens to frequent words. With label smoothing an
    unused row turns negative too, and the rule does not hold.

    Args:
        gradient: (V,) of the output head's bias; its scale does not matter.

    Returns:
        The negative rows, most negative first; scores are ``-gradient``.

    Raises:
        UnusableObservation: non-finite or all zero.
    """
    gradient = whole_tensor(gradient)
    if gradient.ndim != 1:
        raise ValueError(f"gradient must be (V,), got shape {tuple(gradient.shape)}")
    if not bool(gradient.isfinite().all()):
        raise UnusableObservation("the head's bias gradient has NaN or infinity")
    if not bool(gradient.any()):
        raise UnusableObservation(
            "the head's bias gradient is all zero: no token was trained on in this step"
        )
    scores = -(gradient if gradient.dtype.itemsize >= 4 else gradient.float())
    order = scores.argsort(descending=True, stable=True)
    types = order[: int((scores > 0).sum())]
    return WordGuess(types=types, scores=scores, n_types=float(len(types)))


class BiasSign(Attack):
    """The sign rule on the output head's bias, see :func:`bias_sign`.

    Few language models have such a bias (BERT-style masked models do, GPT-2 and Llama do not).

    Args:
        name: as in the logs.
    """

    threat_model = ThreatModel.of(
        "an honest but curious server that reads one update of the output head's bias",
        Capability.SEES_HEAD_BIAS_GRADIENT,
    )
    default_name = "bias_sign"

    def needs(self, anatomy: Anatomy) -> Surfaces:
        """The head's bias.

        Raises:
            ThreatModelError: the head has none.
        """
        if anatomy.parameter(HEAD_BIAS) is None:
            raise ThreatModelError(
                f"attack '{self.name}' reads the gradient of the output head's bias, and this "
                "model's head has no bias: remove the attack; FlatChat reads the head's weight."
            )
        return Surfaces(gradients=(HEAD_BIAS,))

    def run(self, view: Observation, query: Query | None = None) -> WordGuess:
        """Names the types whose bias gradient is negative in the newest snapshot."""
        return bias_sign(view.gradient(HEAD_BIAS))
