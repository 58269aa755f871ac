"""Local differential privacy on one of k values: exact distributions, and draws by secret keys.

A mechanism turns an index of a public domain {0, ..., k-1} into another one. Three of the four
report a vector, and a decoding rule makes an index of it. A rule that reads nothing but the vector
is post-processing, so that the decoded index is as private as the vector. Here the index is drawn
from its distribution, without the vector.

The reports (sources: Wang et al., USENIX Security 2017; Erlingsson et al., CCS 2014; Ding et al.,
NeurIPS 2017):

- **grr**, generalized randomized response: the value itself with probability
  e^eps / (e^eps + k - 1), else a uniform other one.
- **rappor**, the basic one-time RAPPOR: k bits, the value's own set with probability
  p = e^(eps/2) / (e^(eps/2) + 1), every other one with q = 1 - p. Two inputs differ in two bits, so
  that the ratio is (p/q)^2 = e^eps. This is RAPPOR's permanent response.
- **the**, histogram encoding: k numbers, 1 at the value and 0 elsewhere, each with Laplace noise of
  scale 2/eps (two inputs are 2 apart in L1). THE sets the bits of the numbers above a threshold.
- **dbitflip**: one bit for each of d of the k values that are drawn without regard to the value,
  with the p and q of RAPPOR (dBitFlipPM with a bucket for each value). With d = k it has RAPPOR's
  distribution.

The rules:

- **uniform**: a uniform one among the set bits; a uniform one of all where none is set.
- **first**: the set bit of the smallest index, index 0 where none is set. This is ``argmax`` of the
  bits, the rule of the published code of Vu et al. 2024. Small indices survive and large ones
  hardly ever do.
- **argmax** (``the`` only): the largest of the noised numbers, without a threshold; likewise the
  published code's.

Under ``uniform`` and ``argmax`` all other indices are equally likely, so that it is one
number, the probability to keep the index.
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

THRESHOLD_ERROR = 1e-10  # of THE's threshold; its rates change by at most epsilon / 4 times it


def grr_keep(k: int, epsilon: float) -> float:
    """Return the probability that generalized randomized response reports the value itself."""
    return 1.0 / (1.0 + (k - 1) * math.exp(-epsilon))


def bit_rates(epsilon: float) -> tuple[float, float]:
    """Return RAPPOR's and dBitFlipPM's (p, q): rates of the value's own bit and of another one."""
    q = math.exp(-epsilon / 2) / (1.0 + math.exp(-epsilon / 2))
    return 1.0 - q, q


@functools.lru_cache(maxsize=1024)
def the_threshold(epsilon: float) -> float:
    """Return THE's threshold in (1/2, 1) that estimates frequencies best (Wang et al. 2017)."""

    def variance(theta: float) -> float:
        half = math.exp(-epsilon * theta / 2)
        # Eq. for Var* of THE, with numerator and denominator multiplied by e^(-eps theta).
        return (2 * half - half**2) / (half + math.exp(epsilon * (theta - 1) / 2) - 2) ** 2

    options = {"xatol": THRESHOLD_ERROR}
    return float(minimize_scalar(variance, bounds=(0.5, 1.0), method="bounded", options=options).x)


def the_rates(epsilon: float) -> tuple[float, float]:
    """Return (p, q) of THE's bits above :func:`the_threshold`."""
    theta = the_threshold(epsilon)
    return 1.0 - 0.5 * math.exp(epsilon * (theta - 1) / 2), 0.5 * math.exp(-epsilon * theta / 2)


def uniform_keep(k: int, p: float, q: float, sampled: int | None = None) -> float:
    """Return the probability that a uniform set bit of k, or of all if none is set, is the own.

    With N ~ Bin(d - 1, q) other bits set, E[1 / (1 + N)] = (1 - (1 - q)^d) / (d q).

    Args:
        k: number of bits.
        p: rate of the value's own bit.
        q: rate of the others, below 1.
        sampled: d, bits that are reported at all; None for all k.
    """
    d = k if sampled is None else sampled
    silent = d * math.log1p(-q)
    share = -math.expm1(silent) / (d * q) if q > 0 else 1.0
    none_with = (1.0 - p) * math.exp((d - 1) * math.log1p(-q))
    none_without = math.exp(silent)
    reported = d / k
    return reported * (p * share + none_with / k) + (1.0 - reported) * none_without / k


@functools.lru_cache(maxsize=4096)
def argmax_keep(k: int, epsilon: float) -> float:
    """Return the probability that 1 + Laplace(2/eps) exceeds k - 1 times Laplace(2/eps).

    The integral of f(t - 1) F(t)^(k-1) over t, with E = e^(eps/2): where t < 0 and t > 1 the
    density is F'(t) / E and E F'(t), which integrates in closed form; between, with s = 1 - F(t),
    it is (1 / 4E) times the integral of (1 - s)^(k-1) / s^2 from 1/(2E) to 1/2, done over
    log s.
    """
    half = epsilon / 2
    below_zero = math.exp(-half - k * math.log(2)) / k
    # E (1 - (1 - 1/(2E))^k) / k
    above_one = -math.expm1(k * math.log1p(-0.5 * math.exp(-half))) * math.exp(half) / k

    def density(v: float) -> float:  # (1 / 4E) (2 e^-v) (1 - e^v / 2)^(k-1), v = log(2 s)
        return math.exp(-v - half + (k - 1) * math.log1p(-math.exp(v) / 2)) / 2

    inner = quad(density, -half, 0.0, epsabs=0, epsrel=1e-12, limit=200)[0]
    return below_zero + above_one + float(inner)


def sample_symmetric(index: Tensor, keep: Tensor, k: int, uniforms: Tensor) -> Tensor:
    """Draw the index itself with probability ``keep``, else a uniform other one.

    Args:
        index: (n,) int64 in [0, k).
        keep: (n,) or () float64.
        k: size of the domain, at least 2.
        uniforms: (n, 2) float64 in [0, 1), independent.

    Returns:
        (n,) int64.
    """
    replacement = (uniforms[:, 1] * (k - 1)).long().clamp_(max=k - 2)
    replacement += replacement >= index
    return torch.where(uniforms[:, 0] < keep, index, replacement)


def sample_first(index: Tensor, p: Tensor, q: Tensor, k: int, uniforms: Tensor) -> Tensor:
    """Draw the first set bit, 0 where none is set; the first of the other bits is geometric.

    Args:
        index: (n,) int64 in [0, k).
        p: (n,) or () float64.
        q: likewise.
        k: size of the domain.
        uniforms: (n, 2) float64 in [0, 1), independent.

    Returns:
        (n,) int64.
    """
    gap = torch.log1p(-uniforms[:, 1]) / torch.log1p(-q.clamp(min=1e-300))
    rank = gap.floor().clamp_(max=k - 1).long()  # among the other bits
    first = rank + (rank >= index)
    none_set = rank >= k - 1
    is_set = uniforms[:, 0] < p
    unset = torch.where(none_set, 0, first)
    return torch.where(is_set & ((index < first) | none_set), index, unset)


@dataclass(frozen=True)
class Randomizer:
    """A mechanism with its decoding rule on a domain of k values.

    Attributes:
        mechanism: see the module.
        k: size of the domain, at least 2.
        decode: the rule; ``"uniform"`` is the only one of ``grr``, which reports a value and needs
            none.
        bits: d of dBitFlipPM, k for every other mechanism.

    Raises:
        ValueError: a value out of range, or a rule that the mechanism does not have.
    """

    mechanism: Mechanism
    k: int
    decode: Decode
    bits: int

    @classmethod
    def with_defaults(
        cls, mechanism: Mechanism, k: int, decode: Decode | None = None, bits: int | None = None
    ) -> Randomizer:
        """Return a randomizer; by default ``"argmax"`` for ``the``, else ``"uniform"``, with all
        bits.
        """
        rule = decode or ("argmax" if mechanism == "the" else "uniform")
        return cls(mechanism, k, rule, k if bits is None else bits)

    def __post_init__(self) -> None:
        check_choice("mechanism", self.mechanism, get_args(Mechanism))
        rules = {"grr": ("uniform",), "the": ("argmax", "uniform", "first")}
        allowed = rules.get(self.mechanism, ("uniform", "first"))
        check_choice("decode", self.decode, allowed, hint=f"mechanism='{self.mechanism}'")
        check_integer("domain", self.k, at_least=2, hint="the number of its values")
        if self.mechanism != "dbitflip" and self.bits != self.k:
            raise ValueError("bits belong to mechanism='dbitflip'")
        check_integer("bits", self.bits, at_most=self.k, hint=f"the domain has {self.k} values")
        if self.decode == "first" and self.bits < self.k:
            raise ValueError("decode='first' needs all bits: leave `bits` out")

    def keep(self, epsilon: float) -> float:
        """Return the probability that the value is kept, under a symmetric rule."""
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
            index: (n,) int64, each word's index in the domain.
            outside: (n,) bool, words that the domain lacks: a uniform one of the domain enters the
                mechanism in their place. None where every word is in the domain.
            epsilon: The epsilon of each draw: one number, or (n,) float64.
            keys: The keys of the random streams, each used for ``counts`` words in turn.
            counts: likewise; they add up to n.

        Returns:
            (n,) int64.
        """
        numbers = _keyed_uniforms(keys, counts, 2 + (outside is not None))
        if outside is not None:
            uniform = (numbers[:, -1] * self.k).long().clamp_(max=self.k - 1)
            index = torch.where(outside, uniform, index)
        return self.sample(index, epsilon, numbers)

    def sample(self, index: Tensor, epsilon: float | Tensor, uniforms: Tensor) -> Tensor:
        """Return one draw for each index.

        Args:
            index: (n,) int64 in [0, k).
            epsilon: The epsilon of each draw: one number, or (n,) float64.
            uniforms: (n, 2) float64 in [0, 1), independent.

        Returns:
            (n,) int64 in [0, k).
        """
        if self.decode == "first":
            p, q = _each(self._rates, epsilon, index.device)
            return sample_first(index, p, q, self.k, uniforms)
        keep = _each(lambda e: (self.keep(e),), epsilon, index.device)[0]
        return sample_symmetric(index, keep, self.k, uniforms)

    def _rates(self, epsilon: float) -> tuple[float, float]:
        return the_rates(epsilon) if self.mechanism == "the" else bit_rates(epsilon)


def _each(
    function: Callable[[float], tuple[float, ...]], epsilon: float | Tensor, device: torch.device
) -> tuple[Tensor, ...]:
    """Return ``function`` at every epsilon, computed once for each distinct value."""
    if not isinstance(epsilon, Tensor):
        return tuple(torch.tensor(function(epsilon), dtype=torch.float64, device=device))
    values, inverse = torch.unique(epsilon, return_inverse=True)
    table = torch.tensor([function(v) for v in values.tolist()], dtype=torch.float64, device=device)
    return tuple(table[inverse].unbind(1)) if len(values) else (epsilon,) * 2


def _keyed_uniforms(keys: Sequence[bytes], counts: Sequence[int], columns: int) -> Tensor:
    """Return (n, columns) float64 in [0, 1), n the sum of ``counts``: a function of the keys alone.

    Args:
        keys: one for each stream.
        counts: draws of each stream, (len(keys),).
        columns: numbers of each draw.
    """
    streams = b"".join(
        hashlib.shake_128(key).digest(8 * columns * count)
        for key, count in zip(keys, counts, strict=True)
    )
    words = np.frombuffer(streams, dtype="<u8") >> np.uint64(11)
    return torch.from_numpy(words * 2.0**-53).reshape(-1, columns)
