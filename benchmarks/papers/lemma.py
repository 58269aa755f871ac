"""How far the attention adversary must succeed: Lemma 2 of Vu et al. 2024, Eq. 4 and 5.

The lemma bounds the advantage of Algorithm 1 with gamma = 2 Delta-bar from below. It asks of the
data: the *separation* Delta (Definition 2), the largest norm M of a token, how tokens lie to each
other (``P_proj``) and how to their mean (``P_box``). It is a guarantee for the attacker; at or
below 0 it says nothing, least of all that the data are safe.

Where the paper can be read in two ways, or slips:

- ``beta`` is what multiplies the products of tokens. Algorithm 1's is divided by ``sqrt(d_attn)``
  in the attention; here it is the quotient (Appx. B.1, after Eq. 14: "rescaled").
- Lemma 3's proof ends in ``exp(-2/l - ...)`` and its statement has ``exp(2/l - ...)``. The latter
  is right, and what ``Delta-bar`` has.
- (4) holds for beta near 0 too, where its logarithm is negative; but ``P_box`` is 1 there.
- ``P_box`` is the probability that *every* component is within 3 Delta-bar of the mean. The code of
  the authors leaves out the absolute value, and takes 0 for the mean.
- ``P_box`` is around the mean of the law, where the proof needs that of the sentence: the same for
  long sentences only.
- The authors' simulation counts ``P_proj`` over the pairs of one sentence, raises that estimate to
  the power 2 l and cuts (5) at 0, in each run: its mean is too high, both for the convex power and
  for the cut.
- The proof gives the direction u, which the *second* head leaves out, the law of a token. But u is
  the null direction of a random matrix, uniform on the sphere. For spherical and Gaussian tokens
  that is the same; for one-hot tokens and real embeddings it is not. ``random_direction`` in the
  results is the bound with u as it is: the advantage of 1 for one-hot data (Remark 4) is then
  proven for large d only.
- Tokens are taken to be i.i.d. and the data Delta-separated for sure. Continuous laws are separated
  by no positive Delta for sure; as in Fig. 5, Delta and M are those of the data drawn.
- Remark 4's "lower bound (4)" is (5), and the cube of Appx. B.2 has d_X sides, not l_X.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import betainc

Floats = NDArray[np.float64]

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Estimate:
    """A mean with its uncertainty.

    Attributes:
        value: the mean.
        standard_error: 0 where the value is exact, NaN where it cannot be told.
        low, high: 95% interval.
    """

    value: float
    standard_error: float
    low: float
    high: float


def condition(beta: ArrayLike, tokens: int, max_norm: ArrayLike) -> Floats:
    """Right side of (4): ``2 / (beta l) + log(2 (l - 1) l beta M^2) / beta``."""
    beta, norm = floats(beta), floats(max_norm)
    inner = np.log(2.0 * (tokens - 1) * tokens) + np.log(beta) + 2 * np.log(norm)
    return floats((2 / tokens + inner) / beta)


def retrieval_error(
    beta: ArrayLike, tokens: int, separation: ArrayLike, max_norm: ArrayLike
) -> Floats:
    """Delta-bar: ``2 M (l - 1) exp(2 / l - beta Delta)``; infinite where it overflows."""
    with np.errstate(over="ignore"):
        decay = np.exp(2 / tokens - floats(beta) * floats(separation))
    return floats(2 * floats(max_norm) * (tokens - 1) * decay)


def projection_radius(beta: ArrayLike, tokens: int, max_norm: ArrayLike) -> Floats:
    """``1 / (beta l M)``: how much of a token a head may leave out and still retrieve it."""
    return floats(1 / (floats(beta) * tokens * floats(max_norm)))


def advantage_bound(
    p_proj: ArrayLike, p_box: ArrayLike, tokens: int, p_direction: ArrayLike
) -> Floats:
    """(5): ``q + (p q)^l - P_box - 1`` for a batch of one sentence, as Fig. 5 has it.

    Args:
        p_proj: probability that a token's component along another token is within the radius.
        p_box: probability that a token lies in the cube around the mean.
        tokens: l_X.
        p_direction: q, the same for the direction that the second head leaves out; in the paper
            ``p_proj``.
    """
    p, q = floats(p_proj), floats(p_direction)
    return floats(q + (p * q) ** tokens - floats(p_box) - 1)


def direction_probability(dim: int, radius: ArrayLike) -> Floats:
    """P(|<x, u>| <= radius) for u uniform on the sphere of R^d and ``|x| = 1``."""
    share = np.clip(floats(radius), 0.0, 1.0)
    return floats(betainc(0.5, (dim - 1) / 2, share**2))


def floats(value: ArrayLike) -> Floats:
    """As float64."""
    return np.asarray(value, dtype=np.float64)
