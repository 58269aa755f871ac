"""Intervals of games over looks, of these looks as they were, and the looks that are saved."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import mannwhitneyu

from lightning_fedleak.attacks import FCMembership
from lightning_fedleak.engine.channels import MembershipChannel
from lightning_fedleak.engine.options import Games, Options
from lightning_fedleak.engine.outcomes import Outcome, Series
from lightning_fedleak.model.snapshots import Stage

SHOWN = ("auc", "advantage", "accuracy", "f1")
ATTACK = FCMembership(1, name="recording")
SERIES = Series.at(Stage.SHARED, "recording")


def channel(window: int = 100) -> MembershipChannel:
    return MembershipChannel([ATTACK], Options(games=Games(window=window)))


def packed(scores: torch.Tensor, members: torch.Tensor, cut: float = 0.0) -> list[float]:
    """Return the trials (score, member, decision) of games as they are sent."""
    return torch.stack([scores.double(), members, scores > cut], 1).flatten().tolist()


def right(n: int) -> list[float]:
    """A look at n members that all rank above n others."""
    return packed(torch.cat([torch.ones(n), -torch.ones(n)]), torch.arange(2 * n) < n)


def over(looks: int, look: list[float], clients: int = 1) -> list[Outcome]:
    games = channel()
    return [games.pooled(SERIES, dict.fromkeys(range(clients), look)) for _ in range(looks)]


@pytest.mark.parametrize("n", [4, 8, 16])
def test_looks_that_agree_never_lower_what_is_shown(n: int) -> None:
    outcomes = over(10, right(n))
    for before, after in itertools.pairwise(outcomes):
        for name in SHOWN:
            assert after.rates[name].low > before.rates[name].low
            assert after.rates[name].high == 1.0
    assert outcomes[0].rates["auc"].low == pytest.approx(0.025 ** (1 / n))
    assert outcomes[-1].rates["auc"].low == pytest.approx(0.025 ** (1 / (10 * n)))


@given(st.lists(st.integers(0, 3), min_size=4, max_size=10), st.integers(0, 10**6))
def test_looks_that_are_the_same_never_widen_what_is_shown(values: list[int], seed: int) -> None:
    scores = torch.tensor(values, dtype=torch.float64) - 1.5
    members = torch.randperm(len(values), generator=torch.Generator().manual_seed(seed)) % 2 == 0
    widths = [o.rates["auc"].high - o.rates["auc"].low for o in over(5, packed(scores, members))]
    assert all(after <= before + 1e-9 for before, after in itertools.pairwise(widths))


def test_each_look_has_the_p_value_of_its_own_games() -> None:
    games, generator = channel(), torch.Generator().manual_seed(0)
    for _ in range(3):
        scores = torch.randn(20, generator=generator, dtype=torch.float64)
        members = torch.randperm(20, generator=generator) < 10
        outcome = games.pooled(SERIES, {0: packed(scores, members)})
        expected = mannwhitneyu(
            scores[members], scores[~members], alternative="greater", method="exact"
        ).pvalue
        assert outcome.p_value == pytest.approx(expected, rel=1e-9)
    assert over(2, right(16))[-1].p_value == pytest.approx(1 / math.comb(32, 16))


def test_of_several_clients_the_lowest_p_value_counts_times_their_number() -> None:
    tied = packed(torch.zeros(16), torch.arange(16) < 8)
    outcome = channel().pooled(SERIES, {0: right(8), 1: tied})
    assert outcome.p_value == pytest.approx(2 / math.comb(16, 8))


def test_games_of_members_alone_have_no_p_value() -> None:
    members = packed(torch.ones(3), torch.ones(3, dtype=torch.bool))
    outcome = channel().pooled(SERIES, {0: members})
    assert math.isnan(outcome.p_value)
    assert "leakage/x/p_of_this_look" not in outcome.values("leakage/x")


def test_a_window_is_saved_by_look_and_that_of_version_0_3_is_read() -> None:
    window = channel(window=2)
    for n in (2, 3, 4):
        window.pooled(SERIES, {0: right(n), 1: right(n)})
    saved = window.state_dict()
    looks = [torch.tensor(right(n) * 2, dtype=torch.float64).view(-1, 3) for n in (3, 4)]
    name = "games of leakage/recording"
    assert [look.tolist() for look in saved[name]] == [look.tolist() for look in looks]
    numbers = [torch.tensor([[i + 1, 0.0]]).expand(len(look), -1) for i, look in enumerate(looks)]
    table = torch.cat([torch.cat(columns, 1) for columns in zip(numbers, looks, strict=True)])
    for state in (saved, {name: {"games": table}}):
        again = channel(window=2)
        again.load_state_dict(state)
        assert [look.tolist() for look in again.state_dict()[name]] == [x.tolist() for x in looks]
        assert again.pooled(SERIES, {0: right(5)}).n == 2 * 2 * 4 + 2 * 5
