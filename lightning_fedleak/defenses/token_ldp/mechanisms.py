"""Mechanisms of local differential privacy for one of k values, and draws from them by secret keys.

A mechanism replaces an index of a public domain {0, ..., k-1}, the value, by a random index of the
domain. Three of the four mechanisms report a vector, and a decoding rule chooses an index from it.
A rule that uses only the vector is post-processing, so the index is as private as the vector. The
vector is never computed here: the index is drawn directly from its exact distribution.

The mechanisms (Wang et al., USENIX Security 2017; Erlingsson et al., CCS 2014; Ding et al., NeurIPS
2017), for an epsilon ``eps``:

- **grr**, generalized randomized response: reports the value with probability
  e^eps / (e^eps + k - 1), and otherwise one of the other values, each equally likely.
- **rappor**, the basic one-time RAPPOR (its permanent response): reports k bits. The bit of the
  value is set with probability p = e^(eps/2) / (e^(eps/2) + 1), every other bit with q = 1 - p. Two
  inputs differ in two bits, so the ratio of probabilities is at most (p/q)^2 = e^eps.
- **the**, thresholding with histogram encoding: takes k numbers, 1 at the value and 0 elsewhere,
  and adds Laplace noise of scale 2/eps to each (two inputs differ by 2 in L1). The bits of the
  numbers above a threshold are set.
- **dbitflip**, dBitFlipPM with a bucket for each value: reports the bits of d of the k values,
  which are drawn independently of the value, with the p and q of RAPPOR. With d = k it is RAPPOR.

The decoding rules:

- **uniform**: one of the set bits, each equally likely; if none is set, any index of the domain.
- **first**: the set bit of the smallest index; if none is set, index 0. This is ``argmax`` of the
  bits, as in the published code of Vu et al. 2024. Large indices are hardly ever the result.
- **argmax** (for ``the`` only): the index of the largest noised number, without a threshold, also
  as in the published code.

Under ``uniform`` and ``argmax`` all other indices are equally likely, so the distribution is given
by one number: the probability that the index is the value.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from scipy.integrate import quad
from scipy.optimize import minimize_scalar
from torch import Tensor

from lightning_fedleak.validate import check_choice, check_integer

Mechanism = Literal["grr", "rappor", "the", "dbitflip"]
Decode = Literal["uniform", "first", "argmax"]

THRESHOLD_ERROR = 1e-10  # error of THE's threshold; p and q change by at most epsilon / 4 of it


def grr_keep(k: int, epsilon: float) -> float:
    """Return the probability that generalized randomized response reports the value."""
    return 1.0 / (1.0 + (k - 1) * math.exp(-epsilon))


def bit_rates(epsilon: float) -> tuple[float, float]:
    """Return (p, q) of RAPPOR and dBitFlipPM, the probabilities of the module's docstring."""
    q = math.exp(-epsilon / 2) / (1.0 + math.exp(-epsilon / 2))
    return 1.0 - q, q


@functools.lru_cache(maxsize=1024)
def the_threshold(epsilon: float) -> float:
    """Return THE's threshold in (1/2, 1) of least variance in frequencies (Wang et al. 2017)."""

    def variance(theta: float) -> float:
        half = math.exp(-epsilon * theta / 2)
        # The paper's Var* of THE, with numerator and denominator multiplied by e^(-eps theta).
        return (2 * half - half**2) / (half + math.exp(epsilon * (theta - 1) / 2) - 2) ** 2

    options = {"xatol": THRESHOLD_ERROR}
    return float(minimize_scalar(variance, bounds=(0.5, 1.0), method="bounded", options=options).x)


def the_rates(epsilon: float) -> tuple[float, float]:
    """Return (p, q) of THE: the probabilities that the value's bit, or another bit, is set."""
    theta = the_threshold(epsilon)
    return 1.0 - 0.5 * math.exp(epsilon * (theta - 1) / 2), 0.5 * math.exp(-epsilon * theta / 2)


def uniform_keep(k: int, p: float, q: float, sampled: int | None = None) -> float:
    """Return the probability that the rule ``"uniform"`` returns the value.

    If the value's bit is set and N ~ Bin(d - 1, q) other bits are, it is chosen with probability
    1 / (1 + N), whose mean is (1 - (1 - q)^d) / (d q).

    Args:
        k: The number of bits.
        p: The probability that the value's bit is set.
        q: The probability that another bit is set, below 1.
        sampled: d, the number of bits that are reported; None for all k.
    """
    d = k if sampled is None else sampled
    log_none = d * math.log1p(-q)  # log of the probability that none of d other bits is set
    share = -math.expm1(log_none) / (d * q) if q > 0 else 1.0
    none_with = (1.0 - p) * math.exp((d - 1) * math.log1p(-q))  # the value's bit is among the d
    none_without = math.exp(log_none)
    p_reported = d / k
    return p_reported * (p * share + none_with / k) + (1.0 - p_reported) * none_without / k


@functools.lru_cache(maxsize=4096)
def argmax_keep(k: int, epsilon: float) -> float:
    """Return the probability that the rule ``"argmax"`` returns the value.

    It is the probability that 1 + X exceeds k - 1 draws, all of Laplace(2/eps) like X. With the
    density f and the distribution function F of the draws, it is the integral of
    f(t - 1) F(t)^(k-1) over t. Let E = e^(eps/2). For t < 0 and t > 1, f(t - 1) is f(t) / E and
    E f(t), and the integral has a closed form. In between, with s = 1 - F(t), it is 1 / (4E) times
    the integral of (1 - s)^(k-1) / s^2 from 1/(2E) to 1/2, which is computed over v = log(2 s).
    """
    half = epsilon / 2
    below_zero = math.exp(-half - k * math.log(2)) / k
    # E (1 - (1 - 1/(2E))^k) / k, without cancellation
    above_one = -math.expm1(k * math.log1p(-0.5 * math.exp(-half))) * math.exp(half) / k

    def density(v: float) -> float:  # (1 / 4E) (2 e^-v) (1 - e^v / 2)^(k-1)
        return math.exp(-v - half + (k - 1) * math.log1p(-math.exp(v) / 2)) / 2

    between = quad(density, -half, 0.0, epsabs=0, epsrel=1e-12, limit=200)[0]
    return below_zero + above_one + float(between)


def sample_symmetric(index: Tensor, keep: Tensor, k: int, uniforms: Tensor) -> Tensor:
    """Return each index with probability ``keep``, and otherwise any other, each equally likely.

    Args:
        index: (n,) int64 in [0, k).
        keep: (n,) or () float64, the probability.
        k: The size of the domain, at least 2.
        uniforms: (n, 2) float64, independent random numbers in [0, 1).

    Returns:
        (n,) int64.
    """
    replacement = (uniforms[:, 1] * (k - 1)).long().clamp_(max=k - 2)
    replacement += replacement >= index
    return torch.where(uniforms[:, 0] < keep, index, replacement)


def sample_first(index: Tensor, p: Tensor, q: Tensor, k: int, uniforms: Tensor) -> Tensor:
    """Return a draw of the first set bit for each index, or 0 if none is set.

    The number of unset bits before the first set one, among the bits other than the index's, is
    geometric.

    Args:
        index: (n,) int64 in [0, k).
        p: (n,) or () float64, the probability that the bit of the index is set.
        q: (n,) or () float64, the probability that another bit is set.
        k: The size of the domain.
        uniforms: (n, 2) float64, independent random numbers in [0, 1).

    Returns:
        (n,) int64.
    """
    gap = torch.log1p(-uniforms[:, 1]) / torch.log1p(-q.clamp(min=1e-300))
    rank = gap.floor().clamp_(max=k - 1).long()  # of the first set bit among the other k - 1
    first = rank + (rank >= index)
    none_set = rank >= k - 1  # of the other bits
    is_set = uniforms[:, 0] < p
    unset = torch.where(none_set, 0, first)
    return torch.where(is_set & ((index < first) | none_set), index, unset)


@dataclass(frozen=True)
class Randomizer:
    """A mechanism with its decoding rule on a domain of k values.

    Attributes:
        mechanism: The name of the mechanism, see the module's docstring.
        k: The size of the domain, at least 2.
        decode: The decoding rule. It must be ``"uniform"`` for ``grr``, which reports a value and
            needs no rule.
        bits: d of ``dbitflip``; k for every other mechanism.

    Raises:
        ValueError: A value is out of range, or the mechanism does not have this rule.
    """

    mechanism: Mechanism
    k: int
    decode: Decode
    bits: int

    @classmethod
    def with_defaults(
        cls, mechanism: Mechanism, k: int, decode: Decode | None = None, bits: int | None = None
    ) -> Randomizer:
        """Return a randomizer, by default with all bits.

        The default rule is ``"argmax"`` for ``the``, and ``"uniform"`` otherwise.
        """
        rule = decode or ("argmax" if mechanism == "the" else "uniform")
        return cls(mechanism, k, rule, k if bits is None else bits)

    def __post_init__(self) -> None:
        check_choice("mechanism", self.mechanism, get_args(Mechanism))
        rules = {"grr": ("uniform",), "the": ("argmax", "uniform", "first")}
        allowed = rules.get(self.mechanism, ("uniform", "first"))
        check_choice("decode", self.decode, allowed, hint=f"mechanism='{self.mechanism}'")
        check_integer("domain", self.k, at_least=2)
        check_integer("bits", self.bits, at_most=self.k)
        if self.bits != self.k and (self.mechanism != "dbitflip" or self.decode == "first"):
            raise ValueError("bits needs mechanism='dbitflip', and not decode='first'")

    def keep(self, epsilon: float) -> float:
        """Return the probability that the value is the result, under ``uniform`` or ``argmax``."""
        if self.mechanism == "grr":
            return grr_keep(self.k, epsilon)
        if self.decode == "argmax":
            return argmax_keep(self.k, epsilon)
        return uniform_keep(self.k, *self._rates(epsilon), self.bits)

    def draw(
        self,
        index: Tensor,
        outside: Tensor | None,
        epsilon: float | Tensor,
        keys: Sequence[bytes],
        counts: Sequence[int],
    ) -> Tensor:
        """Return one replacement for each word, as an index of the domain.

        Args:
            index: (n,) int64, the index of each word in the domain.
            outside: (n,) bool, whether a word is not in the domain. A uniformly drawn value of the
                domain then enters the mechanism instead. None if every word is in the domain.
            epsilon: The epsilon of each draw: one number, or (n,) float64.
            keys: The keys of the random streams.
            counts: The number of words that use each stream, in order; the sum is n.

        Returns:
            (n,) int64, in [0, k).
        """
        uniforms = _keyed_uniforms(keys, counts, 2 + (outside is not None))
        if outside is not None:
            substitute = (uniforms[:, -1] * self.k).long().clamp_(max=self.k - 1)
            index = torch.where(outside, substitute, index)
        return self.sample(index, epsilon, uniforms)

    def sample(self, index: Tensor, epsilon: float | Tensor, uniforms: Tensor) -> Tensor:
        """Return one draw for each index.

        Args:
            index: (n,) int64 in [0, k).
            epsilon: The epsilon of each draw: one number, or (n,) float64.
            uniforms: (n, 2) float64, random numbers in [0, 1); further columns are ignored.

        Returns:
            (n,) int64 in [0, k).
        """
        if self.decode == "first":
            p, q = _for_each_epsilon(self._rates, epsilon, index.device)
            return sample_first(index, p, q, self.k, uniforms)
        keep = _for_each_epsilon(lambda e: (self.keep(e),), epsilon, index.device)[0]
        return sample_symmetric(index, keep, self.k, uniforms)

    def _rates(self, epsilon: float) -> tuple[float, float]:
        """Return (p, q) of the mechanism."""
        return the_rates(epsilon) if self.mechanism == "the" else bit_rates(epsilon)


def _for_each_epsilon(
    function: Callable[[float], tuple[float, ...]], epsilon: float | Tensor, device: torch.device
) -> tuple[Tensor, ...]:
    """Return each result of ``function`` as a tensor: () for one epsilon, (n,) for n of them."""
    if not isinstance(epsilon, Tensor):
        return tuple(torch.tensor(function(epsilon), dtype=torch.float64, device=device))
    values, inverse = torch.unique(epsilon, return_inverse=True)
    table = torch.tensor([function(v) for v in values.tolist()], dtype=torch.float64, device=device)
    return tuple(table[inverse].unbind(1)) if len(values) else (epsilon,) * 2


def _keyed_uniforms(keys: Sequence[bytes], counts: Sequence[int], columns: int) -> Tensor:
    """Return (n, columns) float64 in [0, 1), which depend on the keys only; n is the sum of counts.

    Args:
        keys: The keys of the random streams.
        counts: The number of rows from each stream.
        columns: The number of random numbers in a row.
    """
    streams = b"".join(
        hashlib.shake_128(key).digest(8 * columns * count)
        for key, count in zip(keys, counts, strict=True)
    )
    words = np.frombuffer(streams, dtype="<u8") >> np.uint64(11)  # 53 bits, exact in float64
    return torch.from_numpy(words * 2.0**-53).reshape(-1, columns)
