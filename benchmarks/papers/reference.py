"""Reference implementations beside ours: scikit-learn's for FLATCHAT, multi-freq-ldpy's for LDP.

FLATCHAT is Algorithm 1 of its paper with ``GaussianMixture`` and ``LinearRegression`` at their
defaults, but for starts at random: the paper's footnote 8 fits the mixture again while its clusters
are alike (it does not say how alike), and k-means would start at the same place again, on some
gradients with a cluster of one word.

The clients of multi-freq-ldpy report values and vectors, one at a time; the decoding rules are
those of :mod:`lightning_fedleak.defenses.token_ldp.mechanisms`. The clients run as plain Python:
numba's compiled ones ignore numpy's seed.
"""

import hashlib
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lightning_fedleak.attacks.base import WordGuess
from lightning_fedleak.attacks.words.flatchat import MIN_RATIO
from lightning_fedleak.defenses import TokenLDP
from lightning_fedleak.defenses.token_ldp.mechanisms import Randomizer, the_threshold
from lightning_fedleak.extras import require_package

with require_package("papers", "the reference implementations need two packages"):
    from multi_freq_ldpy.long_freq_est.dBitFlipPM import dBitFlipPM_Client
    from multi_freq_ldpy.pure_frequency_oracles.GRR import GRR_Client
    from multi_freq_ldpy.pure_frequency_oracles.HE import HE_Client
    from multi_freq_ldpy.pure_frequency_oracles.UE import UE_Client
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LinearRegression
    from sklearn.mixture import GaussianMixture

FITS = 10
"""Random starts of a mixture, of which the first that separates the clusters is taken."""


@dataclass(frozen=True)
class Flattened:
    """One gradient as Algorithm 1 sees it.

    Attributes:
        sums: (V,) row sums of norm 1.
        mixture: two clusters, fitted to them.
    """

    sums: npt.NDArray[np.float64]
    mixture: GaussianMixture

    @classmethod
    def fit(cls, gradient: Tensor) -> "Flattened":
        """Return lines 1 to 3 for the gradient of a head, (V, d)."""
        sums = gradient.numpy().sum(axis=1, dtype=np.float64)
        sums /= np.linalg.norm(sums)
        fits = []
        for seed in range(FITS):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ConvergenceWarning)
                mixture = GaussianMixture(2, init_params="random", random_state=seed)
                fits.append(mixture.fit(sums[:, None]))
            if _ratio(fits[-1]) >= MIN_RATIO:
                return cls(sums, fits[-1])
        return cls(sums, max(fits, key=_ratio))

    @property
    def weight(self) -> float:
        """Of the positive cluster, the one of larger variance (Remark 1)."""
        return float(self.mixture.weights_[self.mixture.covariances_.argmax()])

    def guess(self, n_types: float | LinearRegression, scorer: str) -> WordGuess:
        """Return the types of largest score (Eq. 11, or absolute row sum)."""
        if isinstance(n_types, LinearRegression):
            n_types = float(n_types.predict([[self.weight]])[0])
        variances = self.mixture.covariances_.ravel()
        far = (self.sums[:, None] - self.mixture.means_.ravel()) ** 2 / variances
        p = int(variances.argmax())
        scores = np.abs(self.sums) if scorer == "abs" else far[:, 1 - p] - far[:, p]
        top = np.argsort(-scores)[: max(1, round(n_types))]
        return WordGuess(torch.from_numpy(top), n_types=n_types)


def _ratio(mixture: GaussianMixture) -> float:
    return float(mixture.covariances_.max() / mixture.covariances_.min())


def fit_count(weights: Sequence[float], counts: Sequence[float]) -> LinearRegression:
    """Return the number of types by the positive cluster's weight (Remark 2)."""
    return LinearRegression().fit(np.array(weights)[:, None], counts)


CLIENTS: dict[str, Any] = {
    "grr": GRR_Client.py_func, "rappor": UE_Client.py_func, "the": HE_Client.py_func,
    "dbitflip": dBitFlipPM_Client.py_func,
}  # fmt: skip
"""Clients of multi-freq-ldpy, not compiled."""


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed numpy's global generator, from which the clients draw, within this context."""
    state = np.random.get_state()
    np.random.seed(seed % 2**32)
    try:
        yield
    finally:
        np.random.set_state(state)


def reference_sample(randomizer: Randomizer, index: Tensor, epsilon: float, seed: int) -> Tensor:
    """Return one draw for each index, as :meth:`Randomizer.sample` does.

    Args:
        randomizer: mechanism, domain and rule.
        index: (n,) int64 in [0, k), on the CPU.
        epsilon: of each draw.
        seed: of this call.

    Returns:
        (n,) int64.
    """
    rng = np.random.default_rng(seed)
    with seeded(seed):
        indices = [_sample_one(randomizer, x, epsilon, rng) for x in index.tolist()]
    return torch.tensor(indices, dtype=torch.int64)


def _sample_one(randomizer: Randomizer, x: int, epsilon: float, rng: np.random.Generator) -> int:
    client, k = CLIENTS[randomizer.mechanism], randomizer.k
    if randomizer.mechanism == "grr":
        return int(client(x, k, epsilon))
    if randomizer.mechanism == "rappor":
        return _decoded(client(x, k, epsilon, False) == 1, randomizer, rng)
    if randomizer.mechanism == "the":
        noised = client(x, k, epsilon)
        if randomizer.decode == "argmax":
            return int(noised.argmax())
        return _decoded(noised > the_threshold(epsilon), randomizer, rng)
    return _decoded(client(x, k, k, randomizer.bits, epsilon) == 1, randomizer, rng)


def _decoded(
    set_bits: npt.NDArray[np.bool_], randomizer: Randomizer, rng: np.random.Generator
) -> int:
    if randomizer.decode == "first":
        return int(set_bits.argmax())
    places = np.flatnonzero(set_bits)
    return int(rng.choice(places) if len(places) else rng.integers(len(set_bits)))


class _Clients(Randomizer):
    """A randomizer that the clients draw for."""

    def draw(self, index, outside, epsilon, keys, counts) -> Tensor:
        """Draw without words outside of the domain, as the published protocol has none."""
        assert outside is None
        seed = int.from_bytes(hashlib.sha256(b"".join(keys)).digest()[:4])
        return reference_sample(self, index, epsilon, seed)


class ReferenceLDP(TokenLDP):
    """Token-index LDP as published whose replacements multi-freq-ldpy's clients draw."""

    def _randomizer(self, k: int) -> Randomizer:
        return _Clients(**vars(super()._randomizer(k)))
