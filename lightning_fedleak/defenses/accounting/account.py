"""Counts of releases, what they cost, and whether one more fits a budget."""

from __future__ import annotations

import functools
import math
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from lightning_fedleak.defenses.accounting import renyi
from lightning_fedleak.defenses.accounting.accounting import (
    LEAST_NOISE,
    MOST_NOISE,
    AccountantKind,
    History,
    check_delta,
    check_kind,
    curve_of,
    epsilon_of,
    factor_at,
    noise_multiplier_for,
)
from lightning_fedleak.defenses.accounting.groups import group_epsilon
from lightning_fedleak.defenses.accounting.ledger import (
    Event,
    LedgerFile,
    check_count,
    check_release,
    client_path,
)
from lightning_fedleak.defenses.accounting.renyi import (
    Floats,
    SamplingScheme,
    TruncatedPoisson,
    check_opacus,
)
from lightning_fedleak.defenses.base import Curve, DefenseError, Privacy, State, refuse
from lightning_fedleak.validate import check_number

CACHED = 64  # histories whose PRV epsilon an accountant stores. Not tuned
EPSILON_SLACK = 0.02  # share of more releases in the epsilon that is reported; saves calls of PRV
# Orders without a fixed noise: the usual range of best orders; each more costs log(K). Not tuned
DEFAULT_ORDERS = (1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0, 64.0, 128.0)
_ACCOUNT = "accountant/"

Account = AccountantKind | Literal["filter"]


class Ledger:
    """Counts of releases by their noise multiplier and sample rate.

    Composition does not depend on the order, so an accountant needs nothing else. A checkpoint
    misses what was released between it and a crash. A ledger with a file does not: every release is
    a line on the disk before :meth:`record` returns. Record before you release: then no release is
    missing, and at worst one is counted that was not made.

    Args:
        path: of a :class:`~lightning_fedleak.defenses.accounting.ledger.LedgerFile`; None for none.

    Raises:
        DefenseError: the file cannot be used.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self._file = None if path is None else LedgerFile(path)
        self._counts: dict[Event, int] = {} if self._file is None else self._file.counts

    @property
    def steps(self) -> int:
        """Return the number of releases."""
        return sum(self._counts.values())

    @property
    def history(self) -> History:
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
        self._counts[event] = self._counts.get(event, 0) + int(count)

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
            counted = self._counts.get((sigma, rate), 0)
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


class Accountant(Ledger):
    """A count of releases, and their cost.

    :meth:`step` comes before the release. The noise must not depend on earlier releases, for which
    there is :class:`~lightning_fedleak.defenses.RenyiFilter`, so a second noise multiplier or
    sample rate is refused unless ``planned``.

    Args:
        kind: ``"prv"`` (tight) or ``"rdp"`` (fast).
        ledger: file that remembers every release through a crash, one for each client, see
            :class:`Ledger`. None: what was released
            after the last checkpoint is forgotten in a crash.
        sampling: how batches are drawn.

    Raises:
        DefenseError: an unknown kind or sampling, Opacus is missing, or the ledger's file cannot be
            used.
    """

    def __init__(
        self,
        kind: AccountantKind = "prv",
        ledger: str | os.PathLike[str] | None = None,
        *,
        sampling: SamplingScheme = "poisson",
    ) -> None:
        super().__init__(ledger)
        check_kind(kind, sampling)
        check_opacus()
        self.kind: AccountantKind = kind
        self.sampling: SamplingScheme = sampling
        self._epsilons: dict[tuple[float, History], float] = {}
        self._search: tuple[object, _Search] | None = None

    share_spent: float | None = None

    @property
    def releases(self) -> tuple[tuple[float, float, int, SamplingScheme], ...]:
        """Return the rows of :attr:`history` with their sampling, as ``private_search`` takes."""
        return tuple((*row, self.sampling) for row in self.history)

    def step(
        self,
        noise_multiplier: float,
        sample_rate: float,
        count: int = 1,
        *,
        planned: bool = False,
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
        kinds = self._counts
        if kinds and not planned and (noise_multiplier, sample_rate) not in kinds:
            raise DefenseError(
                f"noise_multiplier={noise_multiplier!r}, sample_rate={sample_rate!r} differ from "
                f"those of earlier releases, {sorted(kinds)}. If they were fixed before the run, "
                "pass planned=True. If they were chosen in the run (a gate that turns noise up), "
                f"accountant='{self.kind}' does not hold: use a RenyiFilter."
            )
        self.record(noise_multiplier, sample_rate, count)

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
        check_delta(delta)
        check_number("slack", slack, at_least=0, below=1, error=DefenseError)
        history = self.history
        if self.kind == "rdp" or not history:
            return epsilon_of(history, delta, self.kind, self.sampling)
        *earlier, (noise_multiplier, sample_rate, count) = history
        coarse = max(1, int(slack * sum(row[2] for row in earlier)))
        most = max(_milestone(count, slack), coarse * math.ceil(count / coarse))
        ahead: History = (*earlier, (noise_multiplier, sample_rate, most))
        if (delta, ahead) not in self._epsilons:
            if len(self._epsilons) >= CACHED:
                self._epsilons.clear()
            self._epsilons[delta, ahead] = epsilon_of(ahead, delta, self.kind, self.sampling)
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
        check_delta(delta)
        check_release(noise_multiplier, sample_rate, count)
        event = noise_multiplier, sample_rate
        others = tuple(row for row in self.history if row[:2] != event)
        total = count + sum(row[2] for row in self.history if row[:2] == event)
        question = epsilon, delta, event, others
        if self._search is None or self._search[0] != question:
            self._search = question, _Search()

        def fits(releases: int) -> bool:
            history = (*others, (*event, releases))
            return epsilon_of(history, delta, self.kind, self.sampling) <= epsilon

        return self._search[1].answer(total, fits)


class RenyiFilter(Ledger):
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
        ledger: as for :class:`Accountant`. It
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
        super().__init__(ledger)
        self.epsilon = check_number("epsilon", epsilon, above=0, error=DefenseError)
        self.delta = check_number("delta", delta, above=0, below=1, error=DefenseError)
        self.sampling: SamplingScheme = sampling
        self.orders: tuple[float, ...] = ()
        self._orders_fixed = orders is not None
        if orders is not None:
            self._fix(orders)

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
        self.record(noise_multiplier, sample_rate, count)

    def state_dict(self) -> dict[str, Tensor | float]:  # type: ignore[override]
        """Return ``releases``, (K, 3) float64, the budget, and (K,) ``orders``."""
        orders = torch.tensor(self.orders, dtype=torch.float64)
        budget: dict[str, Tensor | float] = {"epsilon": self.epsilon, "delta": self.delta}
        return {**super().state_dict(), **budget, "orders": orders}

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
        super().load_state_dict(state)

    def _fix(self, orders: Sequence[float]) -> None:
        if not orders or not set(orders) <= set(renyi.ORDERS):
            raise DefenseError(f"orders={tuple(orders)!r}: give at least one, out of renyi.ORDERS")
        orders = tuple(sorted(set(orders)))
        places = np.array([renyi.ORDERS.index(order) for order in orders])
        budget = self.epsilon - renyi.conversion(self.delta / len(orders))[places]
        if not (budget > 0).any():
            raise DefenseError(
                f"epsilon={self.epsilon!r} at delta={self.delta!r} leaves no budget at the orders "
                f"{orders}: take larger orders, or a larger epsilon or delta"
            )
        self.orders, self._places, self._budget = orders, places, budget

    def _rdp(self, noise_multiplier: float, sample_rate: float) -> Floats:
        if noise_multiplier < LEAST_NOISE:
            return np.full(len(self.orders), np.inf)
        rdp: Floats = renyi.rdp_of(noise_multiplier, sample_rate, self.sampling)[self._places]
        return rdp

    def _spent(self) -> Floats:
        spent = np.zeros(len(self.orders))
        for sigma, rate, count in self.history:
            spent = spent + count * self._rdp(sigma, rate)
        return spent

    def _share(self, spent: Floats) -> float:
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


AnyAccountant = Accountant | RenyiFilter


class BudgetSpent(DefenseError):
    """One more release would cost more than ``target_epsilon``; it was not made."""


@dataclass(eq=False)
class Budget:
    """The noise of the next release, the account of all before it, and whether one more fits.

    Attributes:
        kind: how to account.
        noise_multiplier: sigma at the beginning; None until it is found from ``target_epsilon``.
        target_epsilon: what the whole run may cost; None for no limit.
        target_delta: delta of the guarantee; None for a tenth of one over the examples.
        seeded: whether the noise can be guessed, so that epsilon is infinite.
        harden_factor: by which a hardening multiplies the noise.
        max_hardenings: hardenings that are allowed; None for no limit.
        sampling: how batches are drawn.
        owner: class of the defence, for messages.
        accountant: counts releases.
        notches: how often the noise was turned up.
        rate: chance of each example to be in a batch; None until the training data are known.
        delta: of the guarantee; None until then, unless it was passed.
        factors: of sigma in equal parts of the run; none where it stays.
        horizon: releases of the plan that factors are for; 0 until it is known.
    """

    kind: Account
    noise_multiplier: float | None
    target_epsilon: float | None
    target_delta: float | None
    _: KW_ONLY
    seeded: bool
    harden_factor: float
    max_hardenings: int | None
    sampling: SamplingScheme = "poisson"
    owner: str = "DPSGD"

    def __post_init__(self) -> None:
        self.notches = 0
        self.factors: tuple[float, ...] = ()
        self.horizon = 0
        self.rate: float | None = None
        self.delta = self.target_delta
        self.accountant = self._new_accountant(None)
        self._calibrates = self.noise_multiplier is None
        self._calibrated = False
        self._covered = 0  # releases for which the noise was found, all of its kind

    @property
    def privacy(self) -> Privacy:
        """Return epsilon and delta of the releases so far, and the noise of the next.

        Raises:
            DefenseError: before the training data are known.
        """
        if self.rate is None or self.delta is None or self.noise_multiplier is None:
            raise DefenseError(f"{self.owner}.privacy is known once a fit has begun")
        account, epsilon = self.accountant, math.inf
        if isinstance(account, RenyiFilter):
            epsilon = account.epsilon
        elif not self.seeded:
            epsilon = account.epsilon(self.delta, slack=EPSILON_SLACK)
            if self.target_epsilon is not None and epsilon > self.target_epsilon:
                epsilon = account.epsilon(self.delta)
        return Privacy(epsilon, self.delta, self.noise_now, self.rate, account.steps)

    def curve(self) -> Curve:
        """Return the pairs (epsilon, delta) that hold for the releases so far.

        Raises:
            DefenseError: before the training data are known.
        """
        delta = self.privacy.delta
        if isinstance(self.accountant, RenyiFilter):
            return ((self.accountant.epsilon, delta),)
        if self.seeded:
            return ()
        return curve_of(self.accountant.history, self.accountant.kind, self.sampling)

    def group_privacy(self, rows: int, *, independent: bool) -> Privacy:
        """Return the cost of the releases so far to so many examples, added or removed together.

        Args:
            rows: of the group.
            independent: whether the releases' noise is.

        Raises:
            DefenseError: ``rows`` is below 1, or the training data are not known yet.
        """
        check_count(rows, "rows")
        single = self.privacy
        if independent and not isinstance(self.accountant, RenyiFilter):
            epsilon = group_epsilon(self.accountant.history, single.delta, rows)
            return replace(single, epsilon=max(epsilon, single.epsilon))
        log_delta = math.log(single.delta * rows) + (rows - 1) * single.epsilon
        if log_delta >= 0:
            return replace(single, epsilon=math.inf)
        return replace(single, epsilon=rows * single.epsilon, delta=math.exp(log_delta))

    @property
    def noise_now(self) -> float:
        """Return sigma of the next release, as planned and with all hardenings.

        Raises:
            DefenseError: before the training data are known, where sigma is found from them.
        """
        if self.noise_multiplier is None:
            raise DefenseError(f"{self.owner}: no training data yet, so the noise is not known")
        if not self.factors:
            return self.noise_multiplier * self.harden_factor**self.notches
        planned = factor_at(self.factors, self.accountant.steps, self.horizon)
        return self.noise_multiplier * planned * self.harden_factor**self.notches

    @property
    def planned_noise(self) -> list[float]:
        """Return sigma of every planned kind of release; 0 where it is guessed, or not found."""
        sigma = 0.0 if self.seeded else (self.noise_multiplier or 0.0)
        notched = sigma * self.harden_factor**self.notches
        return [notched * factor for factor in self.factors or (1.0,)]

    @property
    def can_harden(self) -> bool:
        """Return whether noise may be turned up: all but a filter need it fixed before the run."""
        return self.kind == "filter" and self.max_hardenings != 0

    def harden(self) -> str | None:
        """Multiply the noise by ``harden_factor``, from the next release on.

        Returns:
            What changed, in words; None where the noise may not be larger.
        """
        if not self.can_harden or self.notches == self.max_hardenings:
            return None
        previous = self.noise_now
        if previous * self.harden_factor > MOST_NOISE:
            return None
        self.notches += 1
        return f"{self.owner.lower()}: noise multiplier {previous:g} -> {self.noise_now:g}"

    def open_ledger(
        self,
        path: str | os.PathLike[str],
        client: int = 0,
        clients: int = 1,
        unit: str | None = None,
    ) -> None:
        """Record every release in a file from now on, and continue with its releases.

        Args:
            path: of the file, or with a ``unit`` of the files of all clients.
            client: whose file it is.
            clients: how many there are.
            unit: of privacy, by which files are distinguished; None for the path as it is.

        Raises:
            DefenseError: the file holds something else, or cannot be written.
        """
        if unit is not None:
            path = client_path(path, client, clients, unit)
        accountant = self._new_accountant(path)
        accountant.load_state_dict(self.accountant.state_dict())
        self.accountant = accountant

    def plan(self, planned_steps: Callable[[], int]) -> None:
        """Fix the number of releases that factors are for, unless releases were made by it.

        Args:
            planned_steps: returns how many the run is going to make.
        """
        if not (self.horizon and self.accountant.steps):
            self.horizon = planned_steps()

    def draw_by(self, sampling: SamplingScheme) -> None:
        """Fix how batches are drawn, now that the training data are known.

        Raises:
            DefenseError: releases were drawn otherwise.
        """
        if sampling == self.sampling:
            return
        if self.accountant.steps:
            raise DefenseError(
                f"{self.owner}: the {self.accountant.steps} releases before were drawn by "
                f"{self.sampling}, and this run draws by {sampling}. Go on with the data and the "
                "truncated_batch_size of those, or begin a new run."
            )
        self.sampling = self.accountant.sampling = sampling

    def settle(self, rate: float, delta: float, planned_steps: Callable[[], int]) -> None:
        """Find the noise, now that the training data are known.

        Noise of an earlier call is found again as long as nothing was released with it, because the
        data or the number of steps may have changed.

        Args:
            rate: chance of each example to be in a batch.
            delta: of the guarantee.
            planned_steps: returns how many releases the run is going to make; called if needed.

        Raises:
            DefenseError: no noise fits the target, not one release fits the filter's budget, or
                noise or rate are not those of earlier releases, which only a filter allows.
            BudgetSpent: a resumed run has cost more than ``target_epsilon`` already.
        """
        self.rate, self.delta = rate, delta
        if self.noise_multiplier is None or (self._calibrated and self.accountant.steps == 0):
            assert self.target_epsilon is not None
            steps = planned_steps()
            kind: AccountantKind = "prv" if self.kind == "prv" else "rdp"
            parts = range(steps if self.factors else 0)
            plan = Counter(factor_at(self.factors, n, self.horizon) for n in parts)
            self.noise_multiplier = noise_multiplier_for(
                self.target_epsilon, delta, rate, steps, kind, self.sampling, plan
            )
            self._covered = steps if self.accountant.steps == 0 else 0
            self._calibrated = True
        if isinstance(self.accountant, RenyiFilter):
            self.accountant.begin(self.noise_multiplier, rate)
        self.check_not_overdrawn()

    def check_not_overdrawn(self) -> None:
        """Raise an error where the releases so far cost more than ``target_epsilon``.

        A filter checks that in every release.

        Raises:
            DefenseError: the earlier releases were made with another noise or rate.
            BudgetSpent: says by how much.
        """
        account = self.accountant
        self._check_unchanged()
        if self.target_epsilon is None or self.delta is None or isinstance(account, RenyiFilter):
            return
        if account.steps <= self._covered:
            return
        epsilon = account.epsilon(self.delta)
        if epsilon > self.target_epsilon:
            raise BudgetSpent(
                f"{self.owner}: the {account.steps} releases of the checkpoint or ledger cost "
                f"epsilon={epsilon:.4g} at delta={self.delta} already, more than target_epsilon="
                f"{self.target_epsilon}. Raise target_epsilon, or begin a new run from a model "
                "that this data did not train."
            )

    def _check_unchanged(self) -> None:
        rows = self.accountant.history
        if isinstance(self.accountant, RenyiFilter) or not rows:
            return
        assert self.rate is not None
        noises, noise = self.planned_noise, 0.0 if self.seeded else self.noise_now
        if not any(
            math.isclose(one, sigma, rel_tol=1e-9) and self.rate == rate
            for sigma, rate, _ in rows
            for one in noises
        ):
            raise DefenseError(
                f"{self.owner}: noise_multiplier={noise:g} and a sample rate of {self.rate:g} are "
                f"not those of the {self.accountant.steps} releases before, {rows[-1][0]:g} and "
                f"{rows[-1][1]:g} (noise of a seed counts as 0). accountant={self.kind!r} holds "
                "for noise and rate that are fixed before the run: go on with the noise, "
                "batch_size and data of those, use accountant='filter' from the start, or begin a "
                "new run."
            )

    def check_affords_another(self) -> None:
        """Raise an error for a release that the budget does not cover.

        Raises:
            BudgetSpent: says how many were made.
        """
        if not self.affords_another():
            raise BudgetSpent(
                f"{self.owner}: after {self.accountant.steps} releases one more would cost more "
                f"than target_epsilon={self.target_epsilon} at delta={self.delta}. It was not "
                "made; the weights are those of the last one."
            )

    def affords_another(self) -> bool:
        """Return whether one more release fits, with the present noise."""
        if self.target_epsilon is None:
            return True
        assert self.rate is not None
        assert self.delta is not None
        if isinstance(self.accountant, RenyiFilter):
            return self.accountant.allows(self.noise_now, self.rate)
        if self.accountant.steps < self._covered:
            return True
        return self.accountant.allows(self.target_epsilon, self.delta, self.noise_now, self.rate)

    def record(self, noise_multiplier: float) -> None:
        """Count a release that is about to happen; noise that can be guessed counts as 0.

        Raises:
            DefenseError: the account cannot be written.
        """
        assert self.rate is not None
        more = {"planned": True} if self.factors else {}
        self.accountant.step(0.0 if self.seeded else noise_multiplier, self.rate, **more)

    def state_dict(self) -> dict[str, Tensor | int | float | str]:
        """Return what releases were accounted as, the noise, and its hardenings."""
        state: dict[str, Tensor | int | float | str] = {}
        if isinstance(self.sampling, TruncatedPoisson):
            state |= {"truncated_at": self.sampling.most, "examples": self.sampling.examples}
        if self.rate is not None and self.delta is not None:
            state["rate"], state["delta"] = self.rate, self.delta
        if self.notches:
            state["notches"] = self.notches
        if self.horizon:
            state["horizon"], state["factors"] = self.horizon, repr(self.factors)
        if self.noise_multiplier is not None:
            state["noise_multiplier"] = self.noise_multiplier
        for key, value in self.accountant.state_dict().items():
            state[_ACCOUNT + key] = value
        return state

    def load_state_dict(self, state: State, releases: int) -> int:
        """Continue the account, in which no count ever decreases.

        Noise that was found from ``target_epsilon`` stays.

        Args:
            state: a result of :meth:`state_dict`.
            releases: how many had been made by then.

        Returns:
            How many releases the state has accounted; a ledger may hold more.

        Raises:
            DefenseError: they were made under another kind of accountant or, with a filter, under
                another budget.
        """
        account = {k.removeprefix(_ACCOUNT): v for k, v in state.items() if k.startswith(_ACCOUNT)}
        filtered = "orders" in account
        earlier = state.get("factors", repr(()))
        refusals = {
            f"{'' if filtered else 'not '}made under accountant='filter', and this run has "
            f"accountant={self.kind!r}. A budget holds from the first release on: go on with the "
            "accountant of the checkpoint, or begin a new run.": (
                filtered != (self.kind == "filter")
            ),
            f"made with noise by the factors {earlier}, and this run has {self.factors!r}. Noise "
            "is fixed before a run: go on with the same schedule, or begin a new run.": (
                earlier != repr(self.factors)
            ),
        }
        owner = f"{self.owner}: the checkpoint's {releases} releases were "
        refuse(owner, refusals if releases else {})
        self.draw_by(self._sampling_in(state) if releases else self.sampling)
        self.horizon = int(state.get("horizon", 0)) if releases else self.horizon
        self.notches = max(self.notches, int(state.get("notches", 0)))
        if self.rate is None and "rate" in state:
            # Until the data are known, `privacy` needs them.
            self.rate = float(state["rate"])
            self.delta = float(state["delta"]) if self.delta is None else self.delta
        if self._calibrates and "noise_multiplier" in state:
            self.noise_multiplier = float(state["noise_multiplier"])
            self._calibrated = True
        self._covered = 0
        self.accountant.load_state_dict(account)
        counted = account.get("releases")
        return 0 if counted is None else int(torch.as_tensor(counted)[:, 2].sum())

    def _sampling_in(self, state: State) -> SamplingScheme:
        """Return how the releases of a state were drawn."""
        if "truncated_at" in state:
            return TruncatedPoisson(int(state["examples"]), int(state["truncated_at"]))
        return "poisson" if isinstance(self.sampling, TruncatedPoisson) else self.sampling

    def _new_accountant(self, ledger: str | os.PathLike[str] | None) -> AnyAccountant:
        if self.kind == "filter":
            assert self.target_epsilon is not None
            assert self.target_delta is not None
            return RenyiFilter(
                self.target_epsilon, self.target_delta, None, ledger, sampling=self.sampling
            )
        return Accountant(self.kind, ledger, sampling=self.sampling)
