"""A budget for noise that is chosen while training, in sight of what was released before."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from lightning_fedleak.defenses.accounting.accounting import (
    LEAST_NOISE,
    ORDERS,
    Floats,
    History,
    Sampling,
    conversion,
    rdp_of,
)
from lightning_fedleak.defenses.accounting.ledger import (
    Ledger,
    check_count,
    check_noise_multiplier,
    check_sample_rate,
)
from lightning_fedleak.defenses.base import DefenseError, State
from lightning_fedleak.validate import check_number

DEFAULT_ORDERS = (1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0, 64.0, 128.0)


class RenyiFilter:
    """Keeps a run within (epsilon, delta) although its noise is chosen on the way.

    Fully adaptive composition (Feldman & Zrnic 2021, Theorem 3.1 and Sect. 4.1; Lecuyer 2021): at a
    fixed order ``a`` releases may each be chosen in sight of all before, as long as the sum of
    their Renyi divergences stays within a budget that was fixed beforehand. The budget of an order
    is what converts to (epsilon, delta)-DP by Balle et al. 2020, Theorem 21. With K orders a
    release is allowed while *any* of them has room, and each converts at ``delta / K``: which order
    is the last with room may hang on the data, and the union over orders pays for that.

    The guarantee is (epsilon, delta) for the whole run, from the start; there is no smaller epsilon
    "so far". It covers the releases. It does not cover *why* the noise was turned up, if that was
    decided by data that were not released, such as a leakage metric against the true batch.

    Unlike with :class:`~lightning_fedleak.defenses.accounting.accounting.Accountant` PRV is of no
    use here: its composition is proven for noise that was settled beforehand only.

    Args:
        epsilon: of the whole run.
        delta: of the whole run.
        orders: Renyi orders above 1. One alone pays no union: :func:`best_order` finds the one for
            the noise that the run begins with. None: :meth:`begin` fixes that one.
        ledger: as for :class:`~lightning_fedleak.defenses.accounting.accounting.Accountant`. It
            remembers releases, not the budget, which a checkpoint does: begin again with the same
            one.
        sampling: how batches are drawn.

    Raises:
        DefenseError: a value out of range, or orders of which none leaves any budget.
    """

    def __init__(
        self,
        epsilon: float,
        delta: float,
        orders: Sequence[float] | None = DEFAULT_ORDERS,
        ledger: str | os.PathLike[str] | None = None,
        *,
        sampling: Sampling = "poisson",
    ) -> None:
        check_number("epsilon", epsilon, above=0, error=DefenseError)
        check_number("delta", delta, above=0, below=1, error=DefenseError)
        self.epsilon = epsilon
        self.delta = delta
        self.sampling: Sampling = sampling
        self.orders: tuple[float, ...] = ()
        self._given = orders is not None
        if orders is not None:
            self._fix(orders)
        self._ledger = Ledger(ledger)

    def begin(self, noise_multiplier: float, sample_rate: float) -> None:
        """Fixes the order for the noise that the run begins with; given or restored orders stay.

        It stays from the first release on. Where a ledger holds releases of an earlier process, it
        is the one for the noise of the first of them: that with which the run began.

        Raises:
            DefenseError: not one such release fits in the budget at any order.
        """
        if not self.orders or not (self._given or self.steps):
            for sigma, rate, _ in self._ledger:
                noise_multiplier, sample_rate = sigma, rate
                break
            event = noise_multiplier, sample_rate, self.sampling
            self._fix((best_order(self.epsilon, self.delta, *event),))

    @property
    def steps(self) -> int:
        """Number of releases."""
        return len(self._ledger)

    @property
    def history(self) -> History:
        """Noise multiplier, sample rate and count of every kind of release."""
        return self._ledger.rows

    @property
    def share_spent(self) -> float:
        """How much of the budget is used up, by the order with the most room; 1 is all of it."""
        return self._share(self._spent())

    def allows(self, noise_multiplier: float, sample_rate: float, count: int = 1) -> bool:
        """Whether ``count`` more such releases fit in the budget. Counts nothing.

        Raises:
            DefenseError: a value out of range.
        """
        check_noise_multiplier(noise_multiplier)
        check_sample_rate(sample_rate)
        check_count(count, "count")
        spent = self._spent()
        return self._share(spent + count * self._rdp(noise_multiplier, sample_rate)) <= 1

    def step(self, noise_multiplier: float, sample_rate: float, count: int = 1) -> None:
        """Counts releases that are about to happen.

        Raises:
            DefenseError: they do not fit; nothing is counted, and they must not happen.
        """
        if not self.allows(noise_multiplier, sample_rate, count):
            raise DefenseError(
                f"{count} more release{'s' * (count > 1)} at noise_multiplier={noise_multiplier!r} "
                f"would exceed (epsilon={self.epsilon:g}, delta={self.delta:g}) after {self.steps} "
                "releases: stop here, or turn the noise up"
            )
        self._ledger.record(noise_multiplier, sample_rate, count)

    def state_dict(self) -> dict[str, Tensor | float]:
        """For the checkpoint: ``releases``, (K, 3) float64; the budget and (K,) ``orders``."""
        orders = torch.tensor(self.orders, dtype=torch.float64)
        budget: dict[str, Tensor | float] = {"epsilon": self.epsilon, "delta": self.delta}
        return {**self._ledger.state_dict(), **budget, "orders": orders}

    def load_state_dict(self, state: State) -> None:
        """Goes on counting: of every kind of release the larger count stays.

        Raises:
            DefenseError: the state is of another budget or of other orders, which are fixed before
                the run.
        """
        if "orders" in state:
            self._check_budget(float(state["epsilon"]), float(state["delta"]))
            fixed = tuple(torch.as_tensor(state["orders"], dtype=torch.float64).tolist())
            if fixed and not self.orders:
                self._fix(fixed)
                self._given = True
            elif fixed and fixed != self.orders:
                raise DefenseError(
                    f"orders={self.orders} differ from those of the checkpoint, {fixed}: they are "
                    "fixed before the run, so go on with those"
                )
        self._ledger.load_state_dict(state)

    def _check_budget(self, epsilon: float, delta: float) -> None:
        if (epsilon, delta) != (self.epsilon, self.delta):
            raise DefenseError(
                f"the checkpoint's budget is (epsilon={epsilon!r}, delta={delta!r}), this run's "
                f"(epsilon={self.epsilon!r}, delta={self.delta!r}): a budget is fixed before the "
                "run, so go on with the checkpoint's"
            )

    def _fix(self, orders: Sequence[float]) -> None:
        unknown = sorted(set(orders) - set(ORDERS))
        if not orders or unknown:
            raise DefenseError(
                f"orders={tuple(orders)!r}: give at least one, out of renyi.ORDERS"
                + (f"; {unknown} are not in it" if unknown else "")
            )
        known = tuple(sorted(set(orders)))
        places = np.array([ORDERS.index(order) for order in known])
        budget = self.epsilon - conversion(self.delta / len(known))[places]
        if not (budget > 0).any():
            raise DefenseError(
                f"epsilon={self.epsilon!r} at delta={self.delta!r} leaves no budget at the orders "
                f"{known}: take larger orders, or a larger epsilon or delta"
            )
        self.orders, self._places, self._budget = known, places, budget

    def _rdp(self, noise_multiplier: float, sample_rate: float) -> Floats:
        if noise_multiplier < LEAST_NOISE:
            return np.full(len(self.orders), np.inf)
        rdp: Floats = rdp_of(noise_multiplier, sample_rate, self.sampling)[self._places]
        return rdp

    def _spent(self) -> Floats:
        if not self.orders:
            raise DefenseError("a RenyiFilter without orders has no budget yet: call begin first")
        spent = np.zeros(len(self.orders))
        for sigma, rate, count in self._ledger:
            spent = spent + count * self._rdp(sigma, rate)
        return spent

    def _share(self, spent: Floats) -> float:
        open_ = self._budget > 0
        return float((spent[open_] / self._budget[open_]).min())


@functools.lru_cache(maxsize=64)
def best_order(
    epsilon: float,
    delta: float,
    noise_multiplier: float,
    sample_rate: float,
    sampling: Sampling = "poisson",
) -> float:
    """The order at which the most releases of one kind fit in (epsilon, delta).

    To be chosen before the run, for the noise it begins with.

    Raises:
        DefenseError: not one release fits at any order.
    """
    check_noise_multiplier(noise_multiplier)
    check_sample_rate(sample_rate)
    budget = epsilon - conversion(delta)
    with np.errstate(invalid="ignore", divide="ignore"):
        rdp = rdp_of(noise_multiplier, sample_rate, sampling)
        releases = np.where(budget > 0, budget / rdp, 0.0)
    best = int(np.nanargmax(releases))
    if not releases[best] >= 1 or noise_multiplier < LEAST_NOISE:
        raise DefenseError(
            f"not one release at noise_multiplier={noise_multiplier!r}, sample_rate="
            f"{sample_rate!r} fits in (epsilon={epsilon:g}, delta={delta:g}): more noise is needed"
        )
    return ORDERS[best]
