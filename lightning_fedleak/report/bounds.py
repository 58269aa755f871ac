"""What epsilons allow beside what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_fedleak.report.attacks import AttackSummary
from lightning_fedleak.report.composition import FPR, LARGEST_SHOWN_EPSILON
from lightning_fedleak.report.privacy import Account
from lightning_fedleak.report.records import MetricValue, named


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

    For independent Gaussian noise this is exact, by its least multiplier. Else it follows from the
    epsilon of all releases without sampling.
    """
    from lightning_fedleak.evaluation.auditing import dp_auc, dp_tpr, gaussian_auc, gaussian_tpr

    least = min((one.noise_multiplier for one in account.history), default=0.0)
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
