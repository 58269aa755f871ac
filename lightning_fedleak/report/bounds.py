"""What epsilons allow beside what was measured, and what several fits have spent together."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_fedleak.report.attacks import AttackSummary
from lightning_fedleak.report.composition import FPR, LARGEST_SHOWN_EPSILON, composed_epsilon
from lightning_fedleak.report.logs import FitLog
from lightning_fedleak.report.privacy import Account
from lightning_fedleak.report.records import MetricValue, Releases, named
from lightning_fedleak.report.wording import FOR_UNIT, NOT_RECORDED, digits, rounded_up


@dataclass(frozen=True, kw_only=True)
class Allowance:
    """The most that an epsilon allows a test of membership, beside what was measured.

    Attributes:
        defense: whose epsilon it is.
        stage: where membership was measured for the comparison.
        epsilon, delta: the bound.
        largest_tpr, largest_auc: of any test of who was in the training data.
        largest_tpr_in_a_batch, largest_auc_in_a_batch: of any test of who was in one batch.
        measured_tpr, measured_auc: the highest that attacks reached; None where none measured it.
    """

    defense: str
    stage: str
    epsilon: float
    delta: float
    largest_tpr: float = named("largest_tpr_at_fpr_0.01")
    largest_auc: float
    largest_tpr_in_a_batch: float | None = named("largest_tpr_at_fpr_0.01_in_a_batch")
    largest_auc_in_a_batch: float | None
    measured_tpr: float | None = named("measured_tpr_at_fpr_0.01")
    measured_auc: float | None


@dataclass(frozen=True, kw_only=True)
class JointAccount:
    """What several fits have spent, if they were on the same examples: an upper bound.

    Attributes:
        defense: its name in all of them.
        fits: how many there are.
        delta, epsilon: of all releases together; words where epsilon was not computed.
        sum_of_epsilons, sum_of_deltas: added up one by one.
        unit: what all of them protect.
        whole: whether the end of each was recorded.
    """

    defense: str
    fits: int
    delta: float
    epsilon: float | str | None
    sum_of_epsilons: float | None
    sum_of_deltas: float
    unit: str
    whole: bool

    @property
    def statement(self) -> str:
        """What the fits have spent together, in a sentence."""
        so_far = "" if self.whole else ", as far as was recorded"
        return (
            f"{self.fits} fits by {self.defense}, if on the same examples, cost epsilon "
            f"{digits(self.epsilon)} at delta {digits(self.delta)} together"
            f"{FOR_UNIT.get(self.unit, '')}{so_far}."
        )


def allowances(
    accounts: Sequence[Account], attacks: Sequence[AttackSummary], clients: int
) -> list[Allowance]:
    """Return the most that each epsilon that holds allows a test of membership.

    Epsilon bounds a test of whether an example was in the training data. What is measured is
    whether it is in one batch, to which sampling adds nothing: the noise of one release bounds it.
    Where epsilon covers the sum over several clients, that is measured at stage aggregate.
    """
    limits = []
    for account in (account for account in accounts if account.holds):
        assert account.largest_tpr is not None
        assert account.largest_auc is not None
        summed = account.trust in ("secure_aggregation", "central")
        stage = "aggregate" if summed and clients > 1 else "shared"
        if account.is_of_clients and account.trust == "central":
            stage = "the noised mean, which is not attacked"
        games = [a for a in attacks if a.headline == "auc" and a.stage == stage]
        tprs = [a.rates.get("tpr_at_fpr_0.01") for a in games]
        epsilon, delta = account.bound
        tpr_in_a_batch, auc_in_a_batch = _in_a_batch(account)
        limits.append(
            Allowance(
                defense=account.defense,
                stage=stage,
                epsilon=epsilon,
                delta=delta,
                largest_tpr=account.largest_tpr,
                largest_auc=account.largest_auc,
                largest_tpr_in_a_batch=tpr_in_a_batch,
                largest_auc_in_a_batch=auc_in_a_batch,
                measured_tpr=_highest(tprs),
                measured_auc=_highest([a.last for a in games]),
            )
        )
    return limits


def _in_a_batch(account: Account) -> tuple[float, float] | tuple[None, None]:
    """Return the largest TPR at 1% FPR and the largest AUC of a test of who is in one batch.

    For independent Gaussian noise this is exact, by its least multiplier. An example in a truncated
    batch may have another's place, which moves the sum by two norms. Else it follows from the
    epsilon of all releases without sampling.
    """
    from lightning_fedleak.evaluation.auditing import dp_auc, dp_tpr, gaussian_auc, gaussian_tpr

    if account.settings.get("mechanism", "independent") != "independent":  # of 0.2.0: correlated
        return None, None
    least = min((one.noise_multiplier for one in account.history), default=0.0)
    least /= 2 if account.settings.get("truncated_batch_size") else 1
    if least > 0:
        return gaussian_tpr(FPR, least), gaussian_auc(least)
    sampled = not account.is_of_tokens and account.poisson is not False
    epsilon, delta = account.bound
    unsampled = account.without_sampling if sampled else epsilon
    if not isinstance(unsampled, int | float):
        return None, None
    largest = min(unsampled, LARGEST_SHOWN_EPSILON)
    return dp_tpr(FPR, largest, delta), dp_auc(largest, delta)


def _highest(rates: Sequence[MetricValue | None]) -> float | None:
    values = [rate.value for rate in rates if rate is not None and rate.value is not None]
    return max(values, default=None)


# ---- several fits -------------------------------------------------------------------------------


@dataclass(frozen=True)
class _FitAccount:
    """The account of one fit, which may have begun with releases of another.

    Attributes:
        account: what it spent.
        origin: name of the fit whose checkpoint it went on from; None where that is not here.
        restored: the releases that the checkpoint held.
    """

    account: Account
    origin: str | None
    restored: Sequence[Releases]

    def new_releases(self, origin: _FitAccount | None) -> list[Releases]:
        """Return the releases without those from the checkpoint that its own fit has recorded.

        A fit that was killed has recorded fewer than its last checkpoint holds: the rest stays
        here. Where the checkpoint's are no part of the history, nothing is taken off.
        """
        counts, restored = _by_kind(self.account.history), _by_kind(self.restored)
        if origin is not None and restored <= counts:
            counts -= restored & _by_kind(origin.account.history)
        return [Releases(*kind, count) for kind, count in counts.items() if count]


def _by_kind(history: Sequence[Releases]) -> Counter[tuple[float, float]]:
    return Counter({(one.noise_multiplier, one.sample_rate): one.number for one in history})


def joint_accounts(logs: Sequence[tuple[FitLog, Sequence[Account]]]) -> list[JointAccount]:
    """Return what all fits have spent, for each defence that several had.

    Several monitors of one fit count once, by the one that recorded most. The releases that a fit
    had restored with a checkpoint count once too, as far as the fit that made them recorded them
    and is among these. Where noise was turned up in the run (``accountant="filter"``) epsilons are
    added up.
    """
    by_defense: dict[str, dict[str, _FitAccount]] = {}
    fit_names = {log.run: log.fit_name for log, _ in logs}
    for log, accounts in logs:
        resumed = log.begin.resumed if log.begin else None
        restored = {one.defense: one.history for one in resumed.privacy} if resumed else {}
        for account in accounts:
            fits = by_defense.setdefault(account.defense, {})
            other = fits.get(log.fit_name)
            if other is None or _releases(other.account) < _releases(account):
                origin = fit_names.get(resumed.run if resumed else "")
                fits[log.fit_name] = _FitAccount(account, origin, restored.get(account.defense, ()))
    return [_joint(name, fits) for name, fits in by_defense.items() if len(fits) > 1]


def _releases(account: Account) -> int:
    return sum(one.number for one in account.history)


def _joint(defense: str, fits: Mapping[str, _FitAccount]) -> JointAccount:
    accounts = [fit.account for fit in fits.values()]
    epsilons = [account.epsilon for account in accounts if account.epsilon is not None]
    added = rounded_up(math.fsum(epsilons)) if len(epsilons) == len(accounts) else None
    deltas = rounded_up(math.fsum(account.delta or 0.0 for account in accounts))
    delta = max(account.delta or 0.0 for account in accounts)
    epsilon: float | str | None = math.inf
    if all(account.holds for account in accounts):
        epsilon, delta = _composed(fits, delta) or (added, deltas)
    units = {account.unit for account in accounts}
    # Hiding all rows of a user hides each example.
    mixed = NOT_RECORDED if NOT_RECORDED in units else "example"
    return JointAccount(
        defense=defense,
        fits=len(fits),
        delta=delta,
        epsilon=epsilon,
        sum_of_epsilons=added,
        sum_of_deltas=deltas,
        unit=next(iter(units)) if len(units) == 1 else mixed,
        whole=all(account.whole for account in accounts),
    )


def _composed(
    fits: Mapping[str, _FitAccount], delta: float
) -> tuple[float | str | None, float] | None:
    """Return the epsilon of all releases at a delta; None where one accountant cannot take all."""
    accounts = [fit.account for fit in fits.values()]
    accountants = {account.accountant for account in accounts}
    samplings = {account.sampling for account in accounts}
    recorded = all(account.history for account in accounts)
    if not recorded or not accountants <= {"prv", "rdp"} or len(samplings) > 1:
        return None
    origins = {name: fits.get(fit.origin or "") for name, fit in fits.items()}
    history = [one for name, fit in fits.items() for one in fit.new_releases(origins[name])]
    kind = "prv" if accountants == {"prv"} else "rdp"
    return composed_epsilon(history, delta, kind, *samplings), delta
