"""Differential privacy of a whole client: what is clipped, noised, counted and refused."""

from __future__ import annotations

import math
import os
import signal
from dataclasses import fields

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from lightning_fedleak.defenses import BudgetSpent, DefenseError
from lightning_fedleak.defenses.accounting.accounting import ORDERS, epsilon_of, rdp_of
from lightning_fedleak.defenses.noise import gaussian_epsilon
from lightning_fedleak.federation import (
    ClientDP,
    ClientReleaseSettings,
    UpdateError,
    clipped,
    joint_norm,
)
from lightning_fedleak.strategies import DefendedStrategy

pytest.importorskip("opacus")

DELTA = 1e-5
LIKE = {"a": torch.zeros(3, 2), "b": torch.zeros(4)}
ONCE = (Phase.explicit, Phase.generate)


def update(seed, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return {n: scale * torch.randn(t.shape, generator=generator) for n, t in LIKE.items()}


def dp(noise=1.0, clip=1.0, clients=10, **more):
    rare = [f.name for f in fields(ClientReleaseSettings) if f.name in more]
    if rare:
        more["release"] = ClientReleaseSettings(**{name: more.pop(name) for name in rare})
    return ClientDP(clip, noise, clients=clients, **({"target_delta": DELTA} | more))


def long(tensors):
    return torch.cat([tensors[n].double().flatten() for n in LIKE])


# ---- clipping -----------------------------------------------------------------------------------


@given(seed=st.integers(0, 10**6), scale=st.floats(1e-6, 1e6), clip=st.floats(1e-3, 1e3))
@settings(phases=ONCE)
def test_the_joint_norm_is_clipped(seed, scale, clip):
    given = update(seed, scale)
    out = clipped(given, clip, LIKE)
    whole = long(given)
    expected = whole * min(1.0, clip / math.sqrt(math.fsum((whole**2).tolist())))
    torch.testing.assert_close(long(out), expected, rtol=1e-10, atol=0)
    assert math.sqrt(math.fsum((long(out) ** 2).tolist())) <= clip


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (update(0) | {"b": torch.full((4,), math.nan)}, "NaN or infinity"),
        (update(0) | {"b": torch.full((4,), -math.inf)}, "NaN or infinity"),
        ({n: torch.full(t.shape, 1e200, dtype=torch.float64) for n, t in LIKE.items()}, "overflow"),
        (update(0) | {"c": torch.zeros(1)}, "'c' has another name or shape"),
        (update(0) | {"b": torch.zeros(2)}, "'b' has another name or shape"),
    ],
)
def test_what_has_no_norm_or_another_form_is_no_update(given, message):
    with pytest.raises(UpdateError, match=message):
        clipped(given, 1.0, LIKE)


# ---- the mean of a trusted server ---------------------------------------------------------------


@given(
    seeds=st.lists(st.integers(0, 999), min_size=2, max_size=5, unique=True),
    scale=st.floats(0.1, 100),
    fixed=st.booleans(),
)
@settings(phases=ONCE)
def test_neighbours_are_no_further_apart_than_is_accounted(seeds, scale, fixed):
    clip, n = 0.7, 5
    more = {"sampling": "fixed", "per_round": n, "clients": 20} if fixed else {"clients": n}
    first, *rest = (update(s, scale) for s in seeds)
    here = dict(enumerate([first, *rest]))
    # Replaced by the worst there is, or taken away.
    there = here | {0: {n: -t for n, t in first.items()} if fixed else None}
    a, b = (dp(1.0, clip, seed=3, **more).mean(x, LIKE).update for x in (here, there))
    apart = float((long(a) - long(b)).norm())
    assert apart <= (2 if fixed else 1) * clip / n * (1 + 1e-5)
    assert apart >= (2 if fixed else 1) * min(clip, joint_norm(first)) / n * (1 - 1e-3)


def test_the_sum_is_divided_by_the_number_expected():
    """Whoever is there: with noise that is next to nothing."""
    parts = {c: update(c, 0.01) for c in range(3)}
    want = sum(long(u) for u in parts.values())
    for more, expected in (
        ({"clients": 10}, 10),
        ({"clients": 10, "sampling": "poisson", "per_round": 2.5}, 2.5),
        ({"clients": 10, "sampling": "fixed", "per_round": 4}, 4),
    ):
        result = dp(1e-9, 1.0, **more).mean(parts | {9: None}, LIKE)
        torch.testing.assert_close(long(result.update), want / expected, rtol=1e-4, atol=1e-7)
        assert result.zeros == {9: "failed or withheld"}


def test_nobody_at_all_is_a_release_of_noise():
    result = dp(1.0, sampling="poisson", per_round=1).mean({}, LIKE)
    assert float(long(result.update).abs().min()) > 0


def test_updates_that_arrive_one_by_one_are_released_as_a_mean_of_all():
    """With a seed to the bit: what cannot be read and a client that is silent are zeros."""
    unread = {2: update(2, math.nan), 4: update(4) | {"b": torch.zeros(7)}, 5: {"a": LIKE["a"]}}
    updates = {0: update(0), 1: None, 3: update(3, 5.0)} | unread
    one, other = (dp(0.3, 0.5, clients=6, seed=7) for _ in range(2))
    expected = one.mean(updates, LIKE)
    sums = other.begin(updates, LIKE)
    for client in (0, 2, 3, 4, 5):
        sums.add(client, updates[client])
    assert other.accountant.steps == 0
    release = sums.end()
    assert other.accountant.steps == 1
    assert all(torch.equal(release.update[n], t) for n, t in expected.update.items())
    assert release.zeros == expected.zeros
    assert release.zeros.keys() == {1, *unread}


def test_a_second_update_of_a_client_and_one_that_was_not_drawn_are_refused():
    sums = dp(seed=0).begin([0, 1], LIKE)
    sums.add(0, update(0))
    total = {n: t.clone() for n, t in sums.total.items()}
    for client in (0, 2):
        with pytest.raises(UpdateError, match=f"client {client}, which was not sampled or sent"):
            sums.add(client, update(1))
        with pytest.raises(UpdateError, match=f"client {client}, which was not sampled or sent"):
            sums.add_returned(client, LIKE, {})
    assert all(torch.equal(sums.total[n], t) for n, t in total.items())
    assert sums.zeros.keys() == {1}
    sums.add_returned(1, LIKE, {})  # cannot be read, and takes the turn of its client
    with pytest.raises(UpdateError, match="client 1, which was not sampled or sent"):
        sums.add(1, update(1))


# ---- noise --------------------------------------------------------------------------------------

WIDE = {"w": torch.zeros(200, 200)}


def spread(tensors):
    return float(tensors["w"].double().std())


def test_noise_is_as_large_as_it_is_said_to_be():
    central = dp(0.8, 2.0, clients=5)
    assert spread(central.mean({}, WIDE).update) == pytest.approx(0.8 * 2.0 / 5, rel=0.02)
    assert central.mean_noise_std == pytest.approx(0.32)
    fixed = dp(0.8, 2.0, clients=5, sampling="fixed", per_round=2)
    assert spread(fixed.mean({}, WIDE).update) == pytest.approx(0.8 * 2.0 / 2, rel=0.02)
    local = dp(0.8, 2.0, clients=5, trust="local")
    assert spread(local.privatized(None, WIDE)) == pytest.approx(1.6, rel=0.02)
    assert local.own_noise_std == pytest.approx(1.6)


def test_shares_add_up_to_the_whole_noise_without_the_dropouts():
    each = [dp(0.8, 2.0, clients=9, trust="secure_aggregation", dropouts=5) for _ in range(4)]
    total = sum(one.privatized(None, WIDE)["w"] for one in each)
    assert float(total.std()) == pytest.approx(1.6, rel=0.02)


def test_no_noise_is_used_twice_and_no_global_generator_is_touched():
    torch.manual_seed(1)
    np.random.seed(1)
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    defense, twin = dp(trust="local"), dp(trust="local")
    drawn = [defense.rehearsed(None, LIKE), *(defense.privatized(None, LIKE) for _ in range(2))]
    drawn.append(twin.privatized(None, LIKE))
    flat = [long(d) for d in drawn]
    assert all(not torch.equal(a, b) for i, a in enumerate(flat) for b in flat[:i])
    for column in torch.stack(flat).T:  # not one number is repeated
        assert len(column.unique()) == len(flat)
    assert torch.equal(before[0], torch.get_rng_state())
    assert np.array_equal(before[1], np.random.get_state()[1])


def test_a_rehearsal_is_no_release():
    defense = dp(trust="local")
    defense.rehearsed(update(0), LIKE)
    assert defense.accountant.steps == 0
    defense.privatized(update(0), LIKE)
    assert defense.accountant.steps == 1


def test_who_withholds_sends_what_nan_sends():
    defenses = [dp(trust="local", seed=5) for _ in range(2)]
    nan = update(0) | {"b": torch.full((4,), math.nan)}
    with pytest.warns(UserWarning, match="Zero leaves in its place"):
        a = defenses[0].privatized(nan, LIKE)
    b = defenses[1].privatized(None, LIKE)
    assert torch.equal(long(a), long(b))


# ---- the account --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["prv", "rdp"])
@pytest.mark.parametrize(("sigma", "rate", "rounds"), [(0.8, 0.1, 20), (3, 1, 40)])
def test_poisson_rounds_are_accounted(kind, sigma, rate, rounds):
    more = {"sampling": "poisson", "per_round": 1000 * rate} if rate < 1 else {}
    defense = dp(sigma, clients=1000, accountant=kind, **more)
    for _ in range(rounds):
        defense._record_release()
    assert defense.privacy.epsilon == epsilon_of([(sigma, rate, rounds)], DELTA, kind)
    assert defense.privacy.releases == rounds


@pytest.mark.slow
@given(sigma=st.floats(0.3, 60), rate=st.floats(1e-4, 0.999))
@settings(phases=ONCE)
def test_drawing_a_fixed_number_never_costs_more_than_taking_all(sigma, rate):
    ours = rdp_of(sigma, rate, "without_replacement")
    assert (ours >= 0).all()
    assert (ours <= np.asarray(ORDERS) / 2 / sigma**2 * (1 + 1e-12)).all()
    assert (np.diff(ours) >= -1e-12 * ours[1:]).all()


@pytest.mark.parametrize("trust", ["local", "secure_aggregation"])
def test_sampling_does_not_help_against_a_server_that_knows_who_takes_part(trust):
    defense = dp(2.0, clients=100, sampling="fixed", per_round=10, trust=trust)
    for _ in range(7):
        defense.privatized(update(1), LIKE)

    exact = gaussian_epsilon(sigma=1 / math.sqrt(7), delta=DELTA)
    assert exact <= defense.privacy.epsilon <= 1.01 * exact


def test_a_fixed_number_is_accounted_by_the_tightest():
    defense = dp(clients=200, sampling="fixed", per_round=2)
    defense._record_release()
    assert defense.settings()["accountant"] == "prv"
    expected = epsilon_of([(0.5, 0.01, 1)], DELTA, "prv", "without_replacement")
    assert defense.privacy.epsilon == expected


@pytest.mark.slow
def test_noise_is_found_from_a_target():
    for more in (
        {},
        {"sampling": "poisson", "per_round": 2},
        {"sampling": "fixed", "per_round": 2},
    ):
        defense = dp(None, target_epsilon=3.0, rounds=5, **more)
        for _ in range(5):
            defense.mean({0: update(0)}, LIKE)
        assert 2.8 < defense.privacy.epsilon <= 3.0
        with pytest.raises(BudgetSpent, match="ClientDP: after 5 releases"):
            defense.mean({0: update(0)}, LIKE)
        assert defense.accountant.steps == 5


def test_noise_may_be_turned_up_within_a_filters_budget():
    defense = dp(4.0, target_epsilon=4.0, accountant="filter", trust="local")
    assert defense.can_harden
    defense.privatized(update(0), LIKE)
    assert defense.harden() == "clientdp: noise multiplier 2 -> 4"  # over the sensitivity
    assert defense.noise_multiplier == 8.0
    spent = []
    while defense._budget.affords_another():
        defense.privatized(None, LIKE)
        spent.append(defense.accountant._share(defense.accountant._spent()))
    with pytest.raises(BudgetSpent):
        defense.privatized(None, LIKE)
    assert spent == sorted(spent)
    assert spent[-1] <= 1 < 2 * spent[-1]
    assert {row[0] for row in defense.accountant.history} == {2.0, 4.0}
    assert dp().harden() is None


def test_a_seed_costs_the_guarantee():
    defense = dp(seed=1)
    defense.mean({}, LIKE)
    assert defense.privacy.epsilon == math.inf
    assert defense.guarantee.startswith("none")


# ---- the ledger ---------------------------------------------------------------------------------


def test_a_killed_server_forgets_no_release(tmp_path):
    path = tmp_path / "ledger"
    child = os.fork()
    if child == 0:  # is killed between the account and the release
        defense = dp(clients=7, ledger=path)
        defense.mean({0: update(0)}, LIKE)
        defense._add_noise = lambda *a, **k: os.kill(os.getpid(), signal.SIGKILL)
        defense.mean({0: update(0)}, LIKE)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    again = dp(clients=7, ledger=path)
    assert again.privacy.releases == 2
    again.mean({}, LIKE)
    assert dp(clients=7, ledger=path).accountant.steps == 3


def test_a_spent_budget_stays_spent(tmp_path):
    def make():
        return dp(None, target_epsilon=1.0, rounds=2, ledger=tmp_path / "ledger")

    first = make()
    for _ in range(2):
        first.mean({}, LIKE)
    with pytest.raises(BudgetSpent):
        make().mean({}, LIKE)


def test_a_ledger_of_other_terms_is_refused(tmp_path):
    path = tmp_path / "ledger"
    dp(clients=7, ledger=path).mean({}, LIKE)
    for more in (
        {"clients": 8},
        {"clients": 7, "sampling": "poisson", "per_round": 7},
        {"clients": 7, "trust": "local"},
    ):
        with pytest.raises(DefenseError, match="other terms"):
            dp(ledger=path, **more)
    (tmp_path / "ledger.terms").unlink()
    with pytest.raises(DefenseError, match="written under other terms"):
        dp(clients=7, ledger=path)


def test_a_ledger_that_cannot_be_written_lets_nothing_out(tmp_path):
    with pytest.raises(DefenseError, match="cannot be used"):
        dp(ledger=tmp_path / "missing" / "ledger")
    defense = dp(ledger=tmp_path / "ledger")
    defense.mean({}, LIKE)
    (tmp_path / "ledger").write_text("")
    with pytest.raises(DefenseError, match="changed by something else"):
        defense.mean({}, LIKE)
    assert defense.accountant.steps == 1


def test_terms_of_which_a_full_disk_took_half_are_written_anew(tmp_path):
    path, terms = tmp_path / "ledger", tmp_path / "ledger.terms"
    dp(clients=7, ledger=path)
    whole = terms.read_bytes()
    for half in (b"", whole[:20]):
        terms.write_bytes(half)
        dp(clients=7, ledger=path)
        assert terms.read_bytes() == whole
    dp(clients=7, ledger=path).mean({}, LIKE)
    terms.write_bytes(whole[:20])
    with pytest.raises(DefenseError, match="other terms"):  # there are releases already
        dp(clients=7, ledger=path)


@pytest.mark.parametrize(("before", "after"), [("fixed", "poisson"), ("poisson", "fixed")])
def test_a_checkpoint_of_other_draws_is_refused(before, after):
    """Fixed draws counted as Poisson would show too small an epsilon."""
    first, same, other = (
        dp(clients=20, sampling=sampling, per_round=5) for sampling in (before, before, after)
    )
    first.mean({}, LIKE)
    same.load_state_dict(first.state_dict())
    assert same.privacy == first.privacy
    with pytest.raises(DefenseError, match="another accountant, sampling or noise"):
        other.load_state_dict(first.state_dict())


# ---- who is drawn -------------------------------------------------------------------------------


def test_clients_are_drawn_as_is_accounted():
    everyone = list(range(20))
    assert dp(clients=20).drawn(everyone) == everyone
    fixed = dp(clients=20, sampling="fixed", per_round=5)
    assert all(len(set(fixed.drawn(everyone))) == 5 for _ in range(20))
    poisson = dp(clients=20, sampling="poisson", per_round=5)
    drawn = [poisson.drawn(everyone) for _ in range(2000)]
    sizes = torch.tensor([float(len(d)) for d in drawn])
    assert float(sizes.mean()) == pytest.approx(5, abs=5 * math.sqrt(3.75 / 2000))
    assert float(sizes.var()) == pytest.approx(3.75, rel=0.2)
    observed = torch.bincount(torch.tensor([c for d in drawn for c in d]), minlength=20) / 2000
    assert float((observed - 0.25).abs().max()) < 5 * math.sqrt(0.25 * 0.75 / 2000)
    with pytest.raises(DefenseError, match="19 are there"):
        poisson.drawn(everyone[1:])


# ---- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"noise": 0.0}, "noise_multiplier must be .* got 0.0"),
        ({"noise": None}, "noise_multiplier, or target_epsilon and rounds"),
        ({"noise": None, "target_epsilon": 1.0}, "rounds"),
        ({"target_epsilon": 0.0}, "target_epsilon must be .* got 0.0"),
        ({"target_delta": 0.0}, "target_delta must be .* got 0.0"),
        ({"target_delta": 0.2}, "target_delta must be .* below 0.1"),
        ({"clip": 0.0}, "clip must be .* got 0.0"),
        ({"clip": math.nan}, "clip must be .* got nan"),
        ({"clients": 2.5}, "clients must be .* got 2.5"),
        ({"per_round": 3}, "sampling='all'"),
        ({"sampling": "poisson"}, "needs per_round="),
        ({"sampling": "poisson", "per_round": 11}, "of at most 10"),
        ({"sampling": "fixed", "per_round": 2.5}, "must be whole"),
        ({"sampling": "some"}, "sampling must be .* got 'some'"),
        ({"trust": "me"}, "trust must be .* got 'me'"),
        ({"trust": "secure_aggregation", "sampling": "poisson", "per_round": 2}, "shares of noise"),
        ({"trust": "secure_aggregation", "dropouts": 10}, "dropouts must be .* got 10"),
        ({"dropouts": 1}, "for shares of noise"),
        ({"accountant": "filter"}, "keeps a budget"),
        ({"accountant": "pld"}, "'prv' or 'rdp' or 'filter'"),
        ({"noise": None, "target_epsilon": 1.0, "rounds": 0}, "rounds must be .* got 0"),
    ],
)
def test_settings_that_hold_no_guarantee_are_refused(more, text):
    with pytest.raises(DefenseError, match=text):
        dp(**more)


def test_who_adds_the_noise_is_held_to_it():
    with pytest.raises(DefenseError, match="the server adds the noise"):
        dp().privatized(update(0), LIKE)
    with pytest.raises(DefenseError, match="the clients add the noise"):
        dp(trust="local").mean({0: update(0)}, LIKE)


@pytest.mark.slow
def test_it_is_no_defence_of_a_trainers_steps(tmp_path):
    from tests.callbacks.runs import fit

    with pytest.raises(DefenseError, match="acts on the update of a federation's round"):
        fit([], tmp_path, strategy=DefendedStrategy("auto", defenses=[dp()]))


def test_the_record_of_a_run_says_who_is_trusted():
    report = dp(trust="local").settings()
    assert (report["trust"], report["accountant"], report["clip"]) == ("local", "prv", 1.0)
    assert "server" in dp(trust="local").guarantee
    assert "added or removed" in dp().guarantee
    assert "must stay secret" in dp(sampling="poisson", per_round=2).guarantee


def test_a_client_whose_process_may_end_needs_a_ledger_and_a_mask(tmp_path):
    def client(trust, ledger):
        path = tmp_path / trust if ledger else None
        defense = dp(clients=7, trust=trust, ledger=path)
        return lambda masked: defense.check_client(masked=masked, mend="mask it")

    with pytest.raises(DefenseError, match=r"ClientDP\(ledger=...\), a path for each client"):
        client("local", ledger=False)(masked=True)
    client("local", ledger=True)(masked=False)
    share = client("secure_aggregation", ledger=True)
    share(masked=True)
    with pytest.raises(DefenseError, match=r"nothing here masks this client's update.*: mask it"):
        share(masked=False)


def test_a_server_that_adds_the_noise_needs_a_ledger(tmp_path):
    words = "PrivateMean adds the noise on the server"
    for defense in (dp(clients=7), dp(clients=7, trust="local", ledger=tmp_path / "own")):
        with pytest.raises(DefenseError, match=words):
            defense.check_server("PrivateMean")
    dp(clients=7, ledger=tmp_path / "server").check_server("PrivateMean")
