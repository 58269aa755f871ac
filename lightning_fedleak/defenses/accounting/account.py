"""Counts of releases and what they cost: with noise fixed before the run, or chosen in it."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from lightning_fedleak.defenses.accounting import accounting, renyi
from lightning_fedleak.defenses.accounting.ledger import (
    Event,
    LedgerFile,
    LedgerPath,
    check_release,
)
from lightning_fedleak.defenses.accounting.renyi import SamplingScheme, check_opacus
from lightning_fedleak.defenses.base import DefenseError, State
from lightning_fedleak.defenses.checks import check_number

CACHED = 64  # histories whose PRV epsilon an accountant stores. Not tuned


class _Ledger:
    """Counts of releases by their noise multiplier and sample rate.

    Composition does not depend on the order, so an accountant needs nothing else. A checkpoint
    misses what was released between it and a crash. A ledger with a file does not: every release is
    a line on the disk before :meth:`record` returns. Record before you release: then no release is
    missing, and at worst one is counted that was not made.

    Args:
        path: The path of a :class:`~lightning_fedleak.defenses.accounting.ledger.LedgerFile`; None
            for none.

    Raises:
        DefenseError: the file cannot be used.
    """

    def __init__(self, path: LedgerPath | None = None) -> None:
        self._file = None if path is None else LedgerFile(path)
        self._counts = Counter[Event]() if self._file is None else self._file.counts

    @property
    def steps(self) -> int:
        """Return the number of releases."""
        return sum(self._counts.values())

    @property
    def history(self) -> accounting.History:
        """Return noise multiplier, sample rate and count of every kind of release."""
        return tuple((*event, count) for event, count in self._counts.items())

    def record(self, noise_multiplier: float, sample_rate: float, count: int = 1) -> None:
        """Count releases that are about to happen.

        Raises:
            DefenseError: a value out of range, or the file cannot be written or has changed;
                nothing is counted.
        """
        event = float(noise_multiplier), float(sample_rate)
        if event not in self._counts or count != 1:
            check_release(noise_multiplier, sample_rate, count)
        if self._file is not None:
            self._file.append(event, int(count))
        self._counts[event] += int(count)

    def state_dict(self) -> dict[str, Tensor]:
        """Return ``releases``: (K, 3) float64, noise multiplier, sample rate and count."""
        rows = [[sigma, rate, float(count)] for sigma, rate, count in self.history]
        return {"releases": torch.tensor(rows, dtype=torch.float64).reshape(-1, 3)}

    def load_state_dict(self, state: State) -> None:
        """Set every kind of release to the larger count; an empty state changes nothing.

        Raises:
            DefenseError: a number out of range.
        """
        if "releases" not in state:
            return
        rows = torch.as_tensor(state["releases"], dtype=torch.float64)
        for sigma, rate, count in rows.tolist():
            check_release(sigma, rate, count)
        for sigma, rate, count in rows.tolist():
            counted = self._counts[sigma, rate]
            if count > counted:
                self.record(sigma, rate, int(count) - counted)


class _Search:
    """A search for the largest n that fits, in few calls, because every smaller n fits too."""

    def __init__(self) -> None:
        self._fits, self._too_many = 0, 0

    def answer(self, n: int, fits: Callable[[int], bool]) -> bool:
        """Return whether n fits; n grows from call to call."""
        while n > self._fits and not (self._too_many and n >= self._too_many):
            probe = 2 * n
            if self._too_many:
                probe = max(n, (n + self._too_many) // 2)
            if fits(probe):
                self._fits = probe
            else:
                self._too_many = probe
        return n <= self._fits


def _milestone(count: int, slack: float) -> int:
    """Return the smallest number of a fixed growing sequence that is at least ``count``."""
    milestone = 1
    while milestone < count:
        milestone = max(milestone + 1, int(milestone * (1 + slack)))
    return milestone


class Accountant(_Ledger):
    """A count of releases, and their cost.

    :meth:`step` comes before the release. The noise must not depend on earlier releases, for which
    there is :class:`~lightning_fedleak.defenses.RenyiFilter`, so a second noise multiplier or
    sample rate is refused unless ``planned``.

    Args:
        kind: ``"prv"`` (tight) or ``"rdp"`` (fast).
        ledger: file that remembers every release through a crash, one for each client, see
            :class:`_Ledger`. None: a crash forgets the releases after the last checkpoint.
        sampling: how batches are drawn.

    Raises:
        DefenseError: an unknown kind or sampling, Opacus is missing, or the ledger's file cannot be
            used.
    """

    def __init__(
        self,
        kind: accounting.AccountantKind = "prv",
        ledger: LedgerPath | None = None,
        *,
        sampling: SamplingScheme = "poisson",
    ) -> None:
        super().__init__(ledger)
        accounting.check_kind(kind, sampling)
        check_opacus()
        self.kind: accounting.AccountantKind = kind
        self.sampling: SamplingScheme = sampling
        self._epsilons: dict[tuple[float, accounting.History], float] = {}
        self._search: tuple[object, _Search] | None = None

    def step(
        self, noise_multiplier: float, sample_rate: float, count: int = 1, *, planned: bool = False
    ) -> None:
        """Count releases that are about to happen.

        Args:
            noise_multiplier: standard deviation of the noise over the clip norm.
            sample_rate: chance of each example to be in the batch.
            count: how many such releases.
            planned: whether a change of noise multiplier or rate was fixed before the run began.

        Raises:
            DefenseError: a value out of range, or a change that was not ``planned``.
        """
        if not planned:
            self._check_same(noise_multiplier, sample_rate)
        self.record(noise_multiplier, sample_rate, count)

    def counter(self, noise_multiplier: float, sample_rate: float) -> Callable[[], None]:
        """Return a function that counts one such release, which is about to happen.

        Args:
            noise_multiplier: standard deviation of the noise over the clip norm.
            sample_rate: chance of each example to be in the batch.

        Raises:
            DefenseError: a value out of range, or other ones than those of earlier releases.
        """
        self._check_same(noise_multiplier, sample_rate)
        check_release(noise_multiplier, sample_rate)
        return functools.partial(self.record, noise_multiplier, sample_rate)

    def _check_same(self, noise_multiplier: float, sample_rate: float) -> None:
        kinds = self._counts
        if kinds and (noise_multiplier, sample_rate) not in kinds:
            raise DefenseError(
                f"noise_multiplier={noise_multiplier!r}, sample_rate={sample_rate!r} differ from "
                f"those of earlier releases, {sorted(kinds)}. If they were fixed before the run, "
                "pass planned=True, else use a RenyiFilter."
            )

    def epsilon(self, delta: float, *, slack: float = 0.0) -> float:
        """Return the epsilon of all releases so far, at ``delta``: an upper bound.

        RDP takes microseconds. PRV takes a tenth of a second to a second for a new history. With
        ``slack`` the epsilon of up to ``1 + slack`` times as many releases, the further ones of the
        latest kind, is computed once, which bounds every count until then.

        Args:
            delta: in (0, 1).
            slack: of PRV only. For logs 0.02 is a good choice: about ``100 + 55 log(T / 100)``
                calls in T steps, and an epsilon that is at most about 1% too large.

        Returns:
            0 where nothing was released; ``inf`` as the module's docstring says.

        Raises:
            DefenseError: delta or slack out of range.
        """
        accounting.check_probability(delta)
        check_number("slack", slack, at_least=0, below=1)
        history = self.history
        if self.kind == "rdp" or not history:
            return accounting.epsilon_of(history, delta, self.kind, self.sampling)
        *earlier, (noise_multiplier, sample_rate, count) = history
        coarse = max(1, int(slack * sum(row[2] for row in earlier)))
        bounding_count = max(_milestone(count, slack), coarse * math.ceil(count / coarse))
        ahead: accounting.History = (*earlier, (noise_multiplier, sample_rate, bounding_count))
        if (delta, ahead) not in self._epsilons:
            if len(self._epsilons) >= CACHED:
                self._epsilons.clear()
            self._epsilons[delta, ahead] = accounting.epsilon_of(
                ahead, delta, self.kind, self.sampling
            )
        return self._epsilons[delta, ahead]

    def allows(
        self,
        epsilon: float,
        delta: float,
        noise_multiplier: float,
        sample_rate: float,
        count: int = 1,
    ) -> bool:
        """Return whether ``count`` more releases stay within (epsilon, delta); count none.

        It is exact for both kinds. PRV is called about ``2 log2(T)`` times in T steps, because a
        budget that allows more releases allows fewer.

        Raises:
            DefenseError: a value out of range.
        """
        accounting.check_probability(delta)
        check_release(noise_multiplier, sample_rate, count)
        event = noise_multiplier, sample_rate
        other_rows = tuple(row for row in self.history if row[:2] != event)
        total = count + sum(row[2] for row in self.history if row[:2] == event)
        question = epsilon, delta, event, other_rows
        if self._search is None or self._search[0] != question:
            self._search = question, _Search()

        def fits(releases: int) -> bool:
            history = (*other_rows, (*event, releases))
            return accounting.epsilon_of(history, delta, self.kind, self.sampling) <= epsilon

        return self._search[1].answer(total, fits)


class RenyiFilter(_Ledger):
    """A budget that keeps a run within (epsilon, delta) although its noise is chosen in the run.

    Fully adaptive composition (Feldman & Zrnic 2021, Theorem 3.1 and Sect. 4.1; Lecuyer 2021): at a
    fixed order each release may depend on all before, as long as the sum of their Renyi divergences
    stays within a budget that was fixed before the run. The budget of an order is what converts to
    (epsilon, delta)-DP by Balle et al. 2020, Theorem 21.

    The guarantee is (epsilon, delta) for the whole run, from the start; there is no smaller epsilon
    "so far". It covers the releases. It does not cover *why* the noise was turned up, if data
    decided that which were not released, as a leakage metric against the true batch does.

    PRV does not apply: its composition is proven for noise that was fixed before the run.

    Args:
        epsilon: The epsilon of the whole run.
        delta: The delta of the whole run.
        ledger: as for :class:`Accountant`. It stores releases, not the budget: begin again with the
            same budget.
        sampling: how batches are drawn.

    Attributes:
        order: Renyi order of the budget; None until :meth:`begin` or a checkpoint fixes it.

    Raises:
        DefenseError: a value out of range.
    """

    def __init__(
        self,
        epsilon: float,
        delta: float,
        ledger: LedgerPath | None = None,
        *,
        sampling: SamplingScheme = "poisson",
    ) -> None:
        super().__init__(ledger)
        self.epsilon = check_number("epsilon", epsilon, above=0)
        self.delta = check_number("delta", delta, above=0, below=1)
        self.sampling: SamplingScheme = sampling
        self.order: float | None = None
        self._restored = False

    def begin(self, noise_multiplier: float, sample_rate: float) -> None:
        """Fix the order for the noise that the run begins with, unless it was restored.

        It stays from the first release on. Where a ledger holds releases of an earlier process, it
        is the order for the noise of the first of them.

        Raises:
            DefenseError: not one such release fits in the budget at any order.
        """
        if self.order is None or not (self._restored or self.steps):
            for sigma, rate, _ in self.history[:1]:
                noise_multiplier, sample_rate = sigma, rate
            event = noise_multiplier, sample_rate, self.sampling
            self.order = best_order(self.epsilon, self.delta, *event)

    @property
    def share_spent(self) -> float:
        """Return the share of the budget that is spent."""
        return self._share(self._spent())

    def allows(self, noise_multiplier: float, sample_rate: float, count: int = 1) -> bool:
        """Return whether ``count`` more releases stay within the budget; count none.

        Raises:
            DefenseError: a value out of range, or :meth:`begin` was not called.
        """
        check_release(noise_multiplier, sample_rate, count)
        spent = self._spent()
        return self._share(spent + count * self._rdp(noise_multiplier, sample_rate)) <= 1

    def step(self, noise_multiplier: float, sample_rate: float, count: int = 1) -> None:
        """Count releases that are about to happen.

        Raises:
            DefenseError: they would exceed the budget; nothing is counted.
        """
        if not self.allows(noise_multiplier, sample_rate, count):
            raise DefenseError(
                f"{count} more release{'s' * (count > 1)} at noise_multiplier={noise_multiplier!r} "
                f"would exceed (epsilon={self.epsilon:g}, delta={self.delta:g}) after {self.steps} "
                "releases: stop, or turn the noise up"
            )
        self.record(noise_multiplier, sample_rate, count)

    def counter(self, noise_multiplier: float, sample_rate: float) -> Callable[[], None]:
        """Return a function that does one :meth:`step`, as :meth:`Accountant.counter` does."""
        return functools.partial(self.step, noise_multiplier, sample_rate)

    def state_dict(self) -> dict[str, Tensor | float]:  # type: ignore[override]
        """Return the counts, the budget and the order."""
        orders = torch.tensor([] if self.order is None else [self.order], dtype=torch.float64)
        budget: dict[str, Tensor | float] = {"epsilon": self.epsilon, "delta": self.delta}
        return {**super().state_dict(), **budget, "orders": orders}

    def load_state_dict(self, state: State) -> None:
        """Adopt the order, and set every kind of release to the larger count.

        Raises:
            DefenseError: another budget or order: both are fixed before the run.
        """
        if "orders" in state:
            epsilon, delta = float(state["epsilon"]), float(state["delta"])
            if (epsilon, delta) != (self.epsilon, self.delta):
                raise DefenseError(
                    f"the checkpoint's budget is (epsilon={epsilon!r}, delta={delta!r}): go on "
                    f"with that, and not with (epsilon={self.epsilon!r}, delta={self.delta!r})"
                )
            orders = torch.as_tensor(state["orders"], dtype=torch.float64).tolist()
            if len(orders) == 1 and self.order is None:
                (self.order,), self._restored = orders, True
            if orders and orders != [self.order]:
                mend = (
                    "go on with that, or begin a new run" if len(orders) == 1 else "begin a new run"
                )
                raise DefenseError(
                    f"order={self.order} differs from that of the checkpoint, {orders}: {mend}"
                )
        super().load_state_dict(state)

    def _rdp(self, noise_multiplier: float, sample_rate: float) -> float:
        """Return the divergence of one release at the order."""
        if noise_multiplier < accounting.MIN_NOISE:
            return math.inf
        return float(renyi.rdp_of(noise_multiplier, sample_rate, self.sampling)[self._place])

    @property
    def _place(self) -> int:
        if self.order is None:
            raise DefenseError("RenyiFilter: there is no budget yet; call begin first")
        return renyi.ORDERS.index(self.order)

    def _spent(self) -> float:
        return sum(count * self._rdp(sigma, rate) for sigma, rate, count in self.history)

    def _share(self, spent: float) -> float:
        budget = float(self.epsilon - renyi.conversion(self.delta)[self._place])
        return spent / budget if budget > 0 else math.inf


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
    if not releases[best] >= 1 or noise_multiplier < accounting.MIN_NOISE:
        raise DefenseError(
            f"not one release at noise_multiplier={noise_multiplier!r}, sample_rate="
            f"{sample_rate!r} fits in (epsilon={epsilon:g}, delta={delta:g}): more noise is needed"
        )
    return renyi.ORDERS[best]
