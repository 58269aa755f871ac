"""What the report says that an account allows: against Google's accountant, and in closed form."""

from typing import Any

import numpy as np
import pytest

from lightning_fedleak.defenses.accounting.accounting import epsilon_of
from lightning_fedleak.evaluation.auditing import dp_auc, dp_tpr, gaussian_auc, gaussian_tpr
from lightning_fedleak.report.privacy import Account
from lightning_fedleak.report.records.fields import Releases
from tests.report.lines import begin, dpsgd, end, found_in, look, result, spent

pytest.importorskip("opacus")
DELTA = 1e-5


def account_of(tmp_path, spendings: list[dict[str, Any]], **settings: Any) -> Account:
    """The account of a fit that ended with these spendings, one for each client."""
    record = [begin(defenses=[dpsgd(**settings)]), end(9, privacy=spendings)]
    [fit] = found_in(tmp_path, [result(1, f1=0.0)], record).runs
    [account] = fit.privacy
    assert account.largest_tpr == fit.implied[0].largest_tpr
    assert account.largest_auc == fit.implied[0].largest_auc
    return account


def spending(sigma: float, rate: float, count: int, **more: Any) -> dict[str, Any]:
    epsilon = epsilon_of([(sigma, rate, count)], DELTA, "prv")
    return spent(epsilon, count, sigma, rate) | more


@pytest.mark.parametrize(("sigma", "count"), [(1.0, 1), (2.0, 4), (3.0, 30)])
def test_the_limit_is_the_gaussian_mechanisms(tmp_path, sigma, count):
    account = account_of(tmp_path, [spending(sigma, 1.0, count)])
    exact = gaussian_tpr(0.01, sigma / count**0.5)
    assert exact <= account.largest_tpr <= exact * 1.02
    assert account.largest_auc == pytest.approx(gaussian_auc(sigma / count**0.5), abs=2e-3)
    assert f"finds at most {np.ceil(1e3 * account.largest_tpr) / 10:g} in 100" in account.limit


def test_the_limit_is_googles_trade_off_where_one_pair_allows_nearly_all(tmp_path):
    dp = pytest.importorskip("dp_accounting")
    from dp_accounting.pld import PLDAccountant

    sigma, rate, count = 0.7, 0.05, 50
    theirs = PLDAccountant(value_discretization_interval=1e-3)
    event = dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(sigma))
    theirs.compose(dp.SelfComposedDpEvent(event, count))
    pairs = [(epsilon, theirs.get_delta(epsilon)) for epsilon in np.linspace(0, 12, 600)]
    exact = min(dp_tpr(0.01, *pair) for pair in pairs)
    account = account_of(tmp_path, [spending(sigma, rate, count)])
    assert account.epsilon > 6
    assert dp_tpr(0.01, *account.bound) > 0.9
    assert exact * 0.995 <= account.largest_tpr <= exact * 1.05
    assert account.largest_tpr < 0.2
    assert "weak limit" not in account.limit


def test_several_clients_have_the_limit_of_the_one_that_is_limited_least(tmp_path):
    few, many = spending(4.0, 1.0, 16), spending(0.7, 0.01, 40)
    both = account_of(tmp_path, [few, many])
    apart = [account_of(tmp_path, [one], accountant="rdp") for one in (few, many)]
    assert both.largest_tpr >= gaussian_tpr(0.01, 1.0)
    assert both.largest_tpr == max(one.largest_tpr for one in apart)


@pytest.mark.parametrize(
    ("more", "settings"),
    [
        ({"history": None}, {}),
        ({"history": [[0.7, 0.01, 4]]}, {}),  # releases that cost less than what was recorded
        ({}, {"accountant": "filter"}),
        ({"sampling": None}, {}),
        ({"sampling": "by moonlight"}, {}),
    ],
)
def test_without_all_releases_the_pair_alone_limits(tmp_path, more, settings):
    account = account_of(tmp_path, [spending(0.7, 0.05, 40) | more], **settings)
    assert account.largest_tpr == dp_tpr(0.01, *account.bound)
    assert account.largest_auc == dp_auc(*account.bound)


def test_of_sampling_that_no_accountant_knows_only_the_pair_is_told(tmp_path):
    line = spending(1.0, 0.01, 100, sampling="by moonlight")
    account = account_of(tmp_path, [line])
    assert account.largest_tpr == dp_tpr(0.01, *account.bound)
    assert account.without_sampling.startswith("not computed: ")


def test_a_history_that_grows_is_one(tmp_path):
    grown = [look(s, privacy=[spending(2.0, 1.0, s)]) for s in (1, 2, 3)]
    record = [begin(defenses=[dpsgd()]), *grown, end(4, privacy=[spending(2.0, 1.0, 4)])]
    [account] = found_in(tmp_path, [result(1, f1=0.0)], record).runs[0].privacy
    assert account.history == [Releases(2.0, 1.0, 4)]
    assert account.largest_tpr == pytest.approx(gaussian_tpr(0.01, 1.0), rel=0.02)
