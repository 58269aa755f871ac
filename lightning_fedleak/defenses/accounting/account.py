"""Accountants, which count releases and compute their epsilon.

A *release* is one noised update. Releases with the same noise multiplier and sample rate are of one
*kind*. :class:`Accountant` is for noise that is fixed before the run, :class:`RenyiFilter` for
noise that may be changed during the run.
"""

import math
from collections import Counter
from collections.abc import Callable
from typing import get_args

import numpy as np
import torch
from torch import Tensor

from lightning_fedleak.defenses.accounting import accounting
from lightning_fedleak.defenses.accounting.accounting import SamplingScheme, check_opacus
from lightning_fedleak.defenses.accounting.ledger import (
    Event,
    LedgerFile,
    LedgerPath,
    check_release,
)
from lightning_fedleak.defenses.base import DefenseError, State, check_choice, check_number

CACHED = 64  # the number of histories whose PRV epsilon an accountant stores. Not tuned


class _Ledger:
    """Counts of releases by their noise multiplier and sample rate.

    Composition does not depend on the order, so an accountant needs nothing else. A checkpoint
    misses the releases between it and a crash. A ledger with a file does not: every release is a
    line on the disk before :meth:`record` returns. Record before you release. Then no release is
    missing, and after a crash at most one is counted that was not made.

    Args:
        path: The path of a :class:`~lightning_fedleak.defenses.accounting.ledger.LedgerFile`; None
            to use no file.

    Raises:
        DefenseError: The file cannot be used.
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
            DefenseError: A value is out of range, or the file cannot be written or has changed.
                Nothing is counted.
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
            DefenseError: A number is out of range.
        """
        if "releases" not in state:
            return
        rows = torch.as_tensor(state["releases"], dtype=torch.float64)
        for sigma, rate, count in rows.tolist():
            check_release(sigma, rate, count)
        for sigma, rate, count in rows.tolist():
            current = self._counts[sigma, rate]
            if count > current:
                self.record(sigma, rate, int(count) - current)


class _Search:
    """Answers, in few calls of ``fits``, whether n releases fit a budget.

    If n releases fit, fewer do too. So it stores a number that fits and one that is too large.
    """

    def __init__(self) -> None:
        self._fits, self._too_many = 0, 0

    def answer(self, n: int, fits: Callable[[int], bool]) -> bool:
        """Return whether n releases fit; n grows from call to call."""
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
    """The count of releases, and their epsilon.

    Call :meth:`step` before the release. The noise must not depend on earlier releases, so another
    noise multiplier or sample rate is refused unless it is ``planned``. If the noise may depend on
    them, use a :class:`~lightning_fedleak.defenses.RenyiFilter`.

    Args:
        kind: ``"prv"`` (tight) or ``"rdp"`` (fast).
        ledger: The path of a file that keeps every release through a crash, one for each client.
            None: a crash loses the releases after the last checkpoint.
        sampling: The sampling scheme of the batches.

    Raises:
        DefenseError: The kind or sampling is unknown, Opacus is missing, or the ledger's file
            cannot be used.
    """

    def __init__(
        self,
        kind: accounting.AccountantKind = "prv",
        ledger: LedgerPath | None = None,
        *,
        sampling: SamplingScheme = "poisson",
    ) -> None:
        super().__init__(ledger)
        check_opacus()
        self.kind = check_choice("accountant", kind, get_args(accounting.AccountantKind))
        self.sampling = check_choice("sampling", sampling, get_args(SamplingScheme))
        self._epsilons: dict[tuple[float, accounting.History], float] = {}
        self._search: tuple[object, _Search] | None = None

    def step(
        self, noise_multiplier: float, sample_rate: float, count: int = 1, *, planned: bool = False
    ) -> None:
        """Count releases that are about to happen.

        Args:
            noise_multiplier: The standard deviation of the noise over the clip norm.
            sample_rate: The probability of each example to be in the batch.
            count: The number of such releases.
            planned: Whether a change of noise multiplier or rate was fixed before the run began.

        Raises:
            DefenseError: A value is out of range, or was changed without ``planned``.
        """
        counts = self._counts
        if counts and not planned and (noise_multiplier, sample_rate) not in counts:
            raise DefenseError(
                f"noise_multiplier={noise_multiplier!r}, sample_rate={sample_rate!r} are not those "
                "of earlier releases: pass planned=True if fixed before, else use a RenyiFilter"
            )
        self.record(noise_multiplier, sample_rate, count)

    def epsilon(self, delta: float, *, slack: float = 0.0) -> float:
        """Return an upper bound of the epsilon of all releases so far, at ``delta``.

        RDP takes microseconds. PRV takes a tenth of a second to a second for a new history. With
        ``slack`` PRV is called for up to ``1 + slack`` times as many releases, with further ones of
        the latest kind. The result is stored, and is a bound for every count until then.

        Args:
            delta: The delta, in (0, 1).
            slack: The share of further releases, for PRV only. For logs 0.02 is a good choice: it
                needs about ``100 + 55 log(T / 100)`` calls of PRV in T steps, and epsilon is at
                most about 1% too large.

        Returns:
            The epsilon; 0 for no releases, and ``inf`` above ``MAX_EPSILON`` or with a noise
            multiplier below ``MIN_NOISE`` (module ``accounting``).

        Raises:
            DefenseError: ``delta`` or ``slack`` is out of range.
        """
        check_number("slack", slack, at_least=0, below=1)
        history = self.history
        if self.kind == "rdp" or not history:
            return accounting.epsilon_of(history, delta, self.kind, self.sampling)
        *earlier, (noise_multiplier, sample_rate, count) = history
        stride = max(1, int(slack * sum(row[2] for row in earlier)))
        max_count = max(_milestone(count, slack), stride * math.ceil(count / stride))
        max_history: accounting.History = (*earlier, (noise_multiplier, sample_rate, max_count))
        if (delta, max_history) not in self._epsilons:
            if len(self._epsilons) >= CACHED:
                self._epsilons.clear()
            self._epsilons[delta, max_history] = accounting.epsilon_of(
                max_history, delta, self.kind, self.sampling
            )
        return self._epsilons[delta, max_history]

    def allows(
        self,
        epsilon: float,
        delta: float,
        noise_multiplier: float,
        sample_rate: float,
        count: int = 1,
    ) -> bool:
        """Return whether ``count`` more releases stay within (epsilon, delta); count none.

        No slack is used. PRV is called about ``2 log2(T)`` times in T steps, because a budget that
        allows n releases allows fewer too.

        Raises:
            DefenseError: A value is out of range.
        """
        check_release(noise_multiplier, sample_rate, count)
        event = noise_multiplier, sample_rate
        other_rows = tuple(row for row in self.history if row[:2] != event)
        total = count + sum(row[2] for row in self.history if row[:2] == event)
        query = epsilon, delta, event, other_rows
        if self._search is None or self._search[0] != query:
            self._search = query, _Search()

        def fits(releases: int) -> bool:
            history = (*other_rows, (*event, releases))
            return accounting.epsilon_of(history, delta, self.kind, self.sampling) <= epsilon

        return self._search[1].answer(total, fits)


class RenyiFilter(_Ledger):
    """A budget that keeps a run within (epsilon, delta), even if its noise is chosen in the run.

    Fully adaptive composition (Feldman & Zrnic 2021, Theorem 3.1 and Sect. 4.1; Lecuyer 2021): at a
    fixed order each release may depend on all earlier ones, as long as the sum of their Renyi
    divergences stays within a budget that was fixed before the run. The budget of an order is the
    divergence that converts to (epsilon, delta)-DP by Balle et al. 2020, Theorem 21.

    The guarantee is (epsilon, delta) for the whole run, from the start; there is no smaller epsilon
    "so far". It covers the releases. It does not cover the decision to increase the noise, if that
    depends on data that were not released, such as a leakage metric against the true batch.

    PRV does not apply, because its composition is proven for noise that is fixed before the run.

    Args:
        epsilon: The epsilon of the whole run.
        delta: The delta of the whole run.
        ledger: The path of a file that keeps every release through a crash, one for each client. It
            does not store the budget, so resume with the same budget.
        sampling: The sampling scheme of the batches.

    Attributes:
        order: The Renyi order of the budget; None until :meth:`begin` or a checkpoint fixes it.

    Raises:
        DefenseError: A value is out of range.
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

        The order stays from the first release on. If a ledger holds releases of an earlier process,
        the order is chosen for the noise of the first of them.

        Raises:
            DefenseError: Not even one such release fits in the budget at any order.
        """
        if self.order is None or not (self._restored or self.steps):
            for sigma, rate, _ in self.history[:1]:
                noise_multiplier, sample_rate = sigma, rate
            event = noise_multiplier, sample_rate, self.sampling
            self.order = best_order(self.epsilon, self.delta, *event)

    def allows(self, noise_multiplier: float, sample_rate: float, count: int = 1) -> bool:
        """Return whether ``count`` more releases stay within the budget; count none.

        Raises:
            DefenseError: A value is out of range, or :meth:`begin` was not called.
        """
        check_release(noise_multiplier, sample_rate, count)
        return self._share((*self.history, (noise_multiplier, sample_rate, count))) <= 1

    def step(self, noise_multiplier: float, sample_rate: float, count: int = 1) -> None:
        """Count releases that are about to happen.

        Raises:
            DefenseError: The releases would exceed the budget. Nothing is counted.
        """
        if not self.allows(noise_multiplier, sample_rate, count):
            raise DefenseError(
                f"{count} more at {noise_multiplier=} would exceed epsilon={self.epsilon:g}: stop, "
                "or increase the noise"
            )
        self.record(noise_multiplier, sample_rate, count)

    def state_dict(self) -> dict[str, Tensor | float]:  # type: ignore[override]
        """Return the counts, the budget and the order."""
        orders = torch.tensor([] if self.order is None else [self.order], dtype=torch.float64)
        budget: dict[str, Tensor | float] = {"epsilon": self.epsilon, "delta": self.delta}
        return {**super().state_dict(), **budget, "orders": orders}

    def load_state_dict(self, state: State) -> None:
        """Adopt the order, and set every kind of release to the larger count.

        Raises:
            DefenseError: The state has another budget or order; both are fixed before the run.
        """
        if "orders" in state:
            orders = torch.as_tensor(state["orders"], dtype=torch.float64).tolist()
            if len(orders) == 1 and self.order is None:
                (self.order,), self._restored = orders, True
            earlier = [float(state["epsilon"]), float(state["delta"]), *orders]
            limits = [self.epsilon, self.delta, *[self.order] * bool(orders)]
            if earlier != limits:
                raise DefenseError(
                    f"the checkpoint's epsilon, delta and order are {earlier}, not {limits}: go on "
                    "with them, or begin a new run"
                )
        super().load_state_dict(state)

    def _share(self, releases: accounting.History) -> float:
        """Return the share of the budget that the Renyi divergence of releases takes."""
        if self.order is None:
            raise DefenseError("RenyiFilter: the order is not fixed yet; call begin first")
        if any(sigma < accounting.MIN_NOISE for sigma, _, _ in releases):
            return math.inf
        index = accounting.ORDERS.index(self.order)
        budget = float(self.epsilon - accounting.conversion_terms(self.delta)[index])
        spent = float(accounting.composed_rdp(releases, self.sampling)[index])
        return spent / budget if budget > 0 else math.inf


def best_order(
    epsilon: float,
    delta: float,
    noise_multiplier: float,
    sample_rate: float,
    sampling: SamplingScheme = "poisson",
) -> float:
    """Return the order at which the most releases of one kind fit in (epsilon, delta).

    It must be chosen before the run, for the noise at the beginning.

    Raises:
        DefenseError: Not even one release fits at any order.
    """
    check_release(noise_multiplier, sample_rate)
    budget = epsilon - accounting.conversion_terms(delta)
    with np.errstate(invalid="ignore", divide="ignore"):
        rdp = accounting.rdp_of(noise_multiplier, sample_rate, sampling)
        releases = np.where(budget > 0, budget / rdp, 0.0)
    best_index = int(np.nanargmax(releases))
    if not releases[best_index] >= 1 or noise_multiplier < accounting.MIN_NOISE:
        raise DefenseError(f"not one release at {noise_multiplier=} fits: more noise is needed")
    return accounting.ORDERS[best_index]
