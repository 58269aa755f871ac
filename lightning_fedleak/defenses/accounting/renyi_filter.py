"""A budget for noise that is chosen while training, with the earlier releases known."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from lightning_fedleak.defenses.accounting import renyi
from lightning_fedleak.defenses.accounting.accounting import LEAST_NOISE, History
from lightning_fedleak.defenses.accounting.ledger import Ledger, check_release
from lightning_fedleak.defenses.accounting.renyi import SamplingScheme
from lightning_fedleak.defenses.base import DefenseError, State
from lightning_fedleak.validate import check_number

# Orders without a fixed noise: the usual range of best orders; each more costs log(K). Not tuned
DEFAULT_ORDERS = (1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0, 64.0, 128.0)


class RenyiFilter:
    """A budget that keeps a run within (epsilon, delta) although its noise is chosen in the run.

    Fully adaptive composition (Feldman & Zrnic 2021, Theorem 3.1 and Sect. 4.1; Lecuyer 2021): at a
    fixed order each release may depend on all before, as long as the sum of their Renyi divergences
    stays within a budget that was fixed before the run. The budget of an order is what converts to
    (epsilon, delta)-DP by Balle et al. 2020, Theorem 21. With K orders a release is allowed while
    *any* of them has budget, and each converts at ``delta / K``, because the data may decide which
    order is the last.

    The guarantee is (epsilon, delta) for the whole run, from the start; there is no smaller epsilon
    "so far". It covers the releases. It does not cover *why* the noise was turned up, if data
    decided that which were not released, as a leakage metric against the true batch does.

    PRV does not apply: its composition is proven for noise that was fixed before the run.

    Args:
        epsilon: of the whole run.
        delta: of the whole run.
        orders: Renyi orders above 1. With one order all of delta is its own: :func:`best_order`
            returns the one for the noise that the run begins with. None: :meth:`begin` fixes it.
        ledger: as for :class:`~lightning_fedleak.defenses.accounting.accounting.Accountant`. It
            stores releases, not the budget: begin again with the same one.
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
        sampling: SamplingScheme = "poisson",
    ) -> None:
        self.epsilon = check_number("epsilon", epsilon, above=0, error=DefenseError)
        self.delta = check_number("delta", delta, above=0, below=1, error=DefenseError)
        self.sampling: SamplingScheme = sampling
        self.orders: tuple[float, ...] = ()
        self._orders_fixed = orders is not None
        if orders is not None:
            self._fix(orders)
        self._ledger = Ledger(ledger)

    def begin(self, noise_multiplier: float, sample_rate: float) -> None:
        """Fix the order for the noise that the run begins with, unless orders were set or restored.

        It stays from the first release on. Where a ledger holds releases of an earlier process, it
        is the order for the noise of the first of them.

        Raises:
            DefenseError: not one such release fits in the budget at any order.
        """
        if not self.orders or not (self._orders_fixed or self.steps):
            for sigma, rate, _ in self.history[:1]:
                noise_multiplier, sample_rate = sigma, rate
            event = noise_multiplier, sample_rate, self.sampling
            self._fix((best_order(self.epsilon, self.delta, *event),))

    @property
    def steps(self) -> int:
        """Return the number of releases."""
        return len(self._ledger)

    @property
    def history(self) -> History:
        """Return noise multiplier, sample rate and count of every kind of release."""
        return self._ledger.rows

    @property
    def share_spent(self) -> float:
        """Return the share of the budget that is spent, by the order with the most left."""
        return self._share(self._spent())

    def allows(self, noise_multiplier: float, sample_rate: float, count: int = 1) -> bool:
        """Return whether ``count`` more such releases fit in the budget; count none.

        Raises:
            DefenseError: a value out of range.
        """
        check_release(noise_multiplier, sample_rate, count)
        spent = self._spent()
        return self._share(spent + count * self._rdp(noise_multiplier, sample_rate)) <= 1

    def step(self, noise_multiplier: float, sample_rate: float, count: int = 1) -> None:
        """Count releases that are about to happen.

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
        """Return ``releases``, (K, 3) float64, the budget, and (K,) ``orders``."""
        orders = torch.tensor(self.orders, dtype=torch.float64)
        budget: dict[str, Tensor | float] = {"epsilon": self.epsilon, "delta": self.delta}
        return {**self._ledger.state_dict(), **budget, "orders": orders}

    def load_state_dict(self, state: State) -> None:
        """Continue counting: of every kind of release the larger count stays.

        Raises:
            DefenseError: the state is of another budget or of other orders, which are fixed before
                the run.
        """
        if "orders" in state:
            epsilon, delta = float(state["epsilon"]), float(state["delta"])
            if (epsilon, delta) != (self.epsilon, self.delta):
                raise DefenseError(
                    f"the checkpoint's budget is (epsilon={epsilon!r}, delta={delta!r}), this "
                    f"run's (epsilon={self.epsilon!r}, delta={self.delta!r}): a budget is fixed "
                    "before the run, so go on with the checkpoint's"
                )
            fixed = tuple(torch.as_tensor(state["orders"], dtype=torch.float64).tolist())
            if fixed and not self.orders:
                self._fix(fixed)
                self._orders_fixed = True
            elif fixed and fixed != self.orders:
                raise DefenseError(
                    f"orders={self.orders} differ from those of the checkpoint, {fixed}: they are "
                    "fixed before the run, so go on with those"
                )
        self._ledger.load_state_dict(state)

    def _fix(self, orders: Sequence[float]) -> None:
        unknown = sorted(set(orders) - set(renyi.ORDERS))
        if not orders or unknown:
            raise DefenseError(
                f"orders={tuple(orders)!r}: give at least one, out of renyi.ORDERS"
                + (f"; {unknown} are not in it" if unknown else "")
            )
        orders = tuple(sorted(set(orders)))
        places = np.array([renyi.ORDERS.index(order) for order in orders])
        budget = self.epsilon - renyi.conversion(self.delta / len(orders))[places]
        if not (budget > 0).any():
            raise DefenseError(
                f"epsilon={self.epsilon!r} at delta={self.delta!r} leaves no budget at the orders "
                f"{orders}: take larger orders, or a larger epsilon or delta"
            )
        self.orders, self._places, self._budget = orders, places, budget

    def _rdp(self, noise_multiplier: float, sample_rate: float) -> renyi.Floats:
        if noise_multiplier < LEAST_NOISE:
            return np.full(len(self.orders), np.inf)
        rdp: renyi.Floats = renyi.rdp_of(noise_multiplier, sample_rate, self.sampling)[self._places]
        return rdp

    def _spent(self) -> renyi.Floats:
        if not self.orders:
            raise DefenseError("a RenyiFilter without orders has no budget yet: call begin first")
        spent = np.zeros(len(self.orders))
        for sigma, rate, count in self.history:
            spent = spent + count * self._rdp(sigma, rate)
        return spent

    def _share(self, spent: renyi.Floats) -> float:
        positive = self._budget > 0
        return float((spent[positive] / self._budget[positive]).min())


@functools.lru_cache(maxsize=64)
def best_order(
    epsilon: float,
    delta: float,
    noise_multiplier: float,
    sample_rate: float,
    sampling: SamplingScheme = "poisson",
) -> float:
    """Return the order at which the most releases of one kind fit in (epsilon, delta).

    It must be chosen before the run, for the noise that it begins with.

    Raises:
        DefenseError: not one release fits at any order.
    """
    check_release(noise_multiplier, sample_rate)
    budget = epsilon - renyi.conversion(delta)
    with np.errstate(invalid="ignore", divide="ignore"):
        rdp = renyi.rdp_of(noise_multiplier, sample_rate, sampling)
        releases = np.where(budget > 0, budget / rdp, 0.0)
    best = int(np.nanargmax(releases))
    if not releases[best] >= 1 or noise_multiplier < LEAST_NOISE:
        raise DefenseError(
            f"not one release at noise_multiplier={noise_multiplier!r}, sample_rate="
            f"{sample_rate!r} fits in (epsilon={epsilon:g}, delta={delta:g}): more noise is needed"
        )
    return renyi.ORDERS[best]
