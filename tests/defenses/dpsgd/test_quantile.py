"""A clip norm that follows a quantile: its account is of both queries, and its path is public."""

import copy
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import norm as normal

from lightning_fedleak import DPSGD, DefenseError, PlantedGradients, QuantileClip
from lightning_fedleak.private_files import load_state, save_state
from tests.defenses.dpsgd.test_dpsgd import Net, Pieces, Run, first, trainer
from tests.trainers import hosts

EXPECTED, RATE = 8, 0.2


def path_of(run: Run, batches: list[Any]) -> list[float]:
    """The norms that a training clips at."""
    norms = [run.defense.clip_norm]
    for batch in batches:
        run.step(batch)
        norms.append(run.defense.clip_norm)
    return norms


def masses(gradients: float, count: float, points: int) -> tuple[Any, Any]:
    """Masses on a grid of one release of two Gaussians, without and with one more example.

    Args:
        gradients: standard deviation of the gradients' noise; one example moves them by 1.
        count: of the count's noise; one example moves it by 1/2.
        points: of each axis.
    """
    x = np.linspace(-9 * gradients, 9 * gradients + 1, points)[:, None]
    y = np.linspace(-9 * count, 9 * count + 1, points)[None, :]
    without = normal.pdf(x, 0, gradients) * normal.pdf(y, 0, count)
    present = normal.pdf(x, 1, gradients) * normal.pdf(y, 0.5, count)
    area = (x[1, 0] - x[0, 0]) * (y[0, 1] - y[0, 0])
    return without * area, ((1 - RATE) * without + RATE * present) * area


@pytest.mark.parametrize("accountant", ["prv", "rdp"])
def test_a_target_holds_for_both_queries_by_googles_accountants(accountant: Any) -> None:
    dp = pytest.importorskip("dp_accounting")
    from dp_accounting.pld import privacy_loss_distribution as pld
    from dp_accounting.rdp import RdpAccountant

    clip = QuantileClip(0.4, count_noise=0.8)
    defense = DPSGD(clip, target_epsilon=4.0, target_delta=1e-3, accountant=accountant)
    root = Net()
    root._trainer = trainer()
    run = Run(defense, root)
    steps = 2 * len(run.loader)
    gradients = defense.noise_std(run.context) * EXPECTED / 0.4
    count = 0.8 * float(defense.noise_multiplier or 0)
    if accountant == "rdp":
        both = dp.ComposedDpEvent([dp.GaussianDpEvent(gradients), dp.GaussianDpEvent(2 * count)])
        theirs = RdpAccountant()
        theirs.compose(dp.SelfComposedDpEvent(dp.PoissonSampledDpEvent(RATE, both), steps))
        epsilon = theirs.get_epsilon(1e-3)
    else:
        logs = [dict(enumerate(np.log(m.ravel()).tolist())) for m in masses(gradients, count, 161)]
        one = pld.from_two_probability_mass_functions(
            *logs, value_discretization_interval=1e-3, symmetric=False
        )
        epsilon = one.self_compose(steps).get_epsilon_for_delta(1e-3)
    assert epsilon == pytest.approx(4.0, rel=0.01)


@pytest.mark.parametrize("most", [None, 3])
def test_the_path_is_that_of_a_simulation(most: int | None) -> None:
    clip = QuantileClip(1.0, quantile=0.3, learning_rate=0.5)
    run = Pieces(DPSGD(clip, noise_multiplier=0.0, max_physical_batch_size=most))
    batches = [[value[k:].clone() for value in first(k + 5 + k % 3)] for k in range(12)]
    for batch in batches:
        batch[0] *= torch.logspace(-2, 1, len(batch[0]))[:, None]
    expected, moved = clip.initial, []
    for batch in batches:
        local = run.one_by_one(batch).double()
        sizes = local.norm(dim=1)
        update = (local * (expected / sizes.clamp(min=expected))[:, None]).sum(0) / EXPECTED
        result = run.step(batch).double()
        assert float((result - update).norm() / update.norm()) < 1e-6
        share = float((sizes <= expected).double().sub(0.5).sum()) / EXPECTED + 0.5
        expected *= math.exp(-0.5 * (share - 0.3))
        moved.append(share)
        assert run.defense.clip_norm == pytest.approx(expected, rel=1e-12)
    assert len(set(moved)) > 3


def test_noise_of_count_and_gradients_are_those_of_the_account() -> None:
    steps, z, clip = 500, 1.7, QuantileClip(0.4, learning_rate=0.01, count_noise=1.5)
    run = Run(DPSGD(clip, noise_multiplier=z, target_delta=1e-3, accountant="rdp"))
    counts, noises = [], []
    for _ in range(steps):
        before = run.defense.clip_norm
        noises.append(EXPECTED * run.step(first(0), lr=0.0).double() / before)
        moved = -math.log(run.defense.clip_norm / before) / 0.01 + 0.5
        counts.append((moved - 0.5) * EXPECTED)  # of no example: noise alone
    assert np.std(counts) == pytest.approx(1.5 * z, rel=6 / math.sqrt(2 * steps))
    assert abs(np.mean(counts)) < 6 * 1.5 * z / math.sqrt(steps)
    drawn = torch.cat(noises)
    wanted = z / math.sqrt(1 - 1 / 9)
    assert float(drawn.std()) == pytest.approx(wanted, rel=6 / math.sqrt(2 * len(drawn)))
    assert run.defense.accountant.history == ((z, RATE, steps),)
    first_numbers = [float(n[0]) for n in noises]
    assert abs(np.corrcoef(counts, first_numbers)[0, 1]) < 6 / math.sqrt(steps)


HOSTILE = {"large": 1e30, "infinite": math.inf, "not a number": math.nan, "zero": 0.0}


@pytest.mark.parametrize("content", HOSTILE)
def test_one_example_moves_the_count_by_a_half(content: str) -> None:
    def exponent(rows: int) -> float:
        run = Run(DPSGD(QuantileClip(0.4, learning_rate=1.0), noise_multiplier=0.0))
        batch = first(rows)
        batch[0] = batch[0].clone()
        batch[0][5:] = HOSTILE[content]
        run.step(batch)
        return EXPECTED * math.log(run.defense.clip_norm / 0.4)

    assert abs(exponent(6) - exponent(5)) == pytest.approx(0.5)


@pytest.mark.parametrize("accountant", ["prv", "filter"])
def test_a_checkpoint_has_the_norm(accountant: Any, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"noise_multiplier": 2.0, "seed": 3}
    if accountant == "filter":
        settings = {"noise_multiplier": 2.0, "target_epsilon": 30.0, "accountant": "filter"}
    settings["target_delta"] = 1e-3
    batches = [first(k) for k in (4, 0, 9, 7, 8, 5)]
    clip = QuantileClip(0.4)
    whole = Run(DPSGD(clip, **settings), entropy=b"e" * 32)
    path = path_of(whole, batches)
    before = Run(DPSGD(clip, **settings), entropy=b"e" * 32)
    path_of(before, batches[:3])
    save_state(tmp_path / "state", {"dpsgd": dict(before.defense.state_dict())})
    resumed = DPSGD(clip, **settings)
    resumed.load_state_dict(load_state(tmp_path / "state")["dpsgd"])
    after = Run(resumed, copy.deepcopy(before.root), entropy=b"e" * 32)
    assert path_of(after, batches[3:]) == path[3:]
    assert len({*path}) == len(path)
    assert all(map(torch.equal, after.root.parameters(), whole.root.parameters()))


def test_all_hosts_have_one_path(tmp_path: Path) -> None:
    found = []
    for name, host in hosts.HOSTS.items():
        defense = DPSGD(QuantileClip(0.5), noise_multiplier=1.0, target_delta=1e-3, seed=1)
        torch.manual_seed(0)
        model = hosts.tiny_gpt2(dropout=0.0)
        trace = host(tmp_path / name, model, [defense], 0.1, num_train_epochs=2)
        assert defense.releases == trace.steps > 2
        found.append((defense.clip_norm, [p.detach() for p in model.parameters()]))
        settings = defense.settings()
        assert (settings["max_grad_norm"], settings["clip_quantile"]) == (0.5, 0.5)
    (norm, weights), *others = found
    assert norm != 0.5
    for other, theirs in others:
        assert other == norm
        assert all(map(torch.equal, weights, theirs))


def test_harden_keeps_the_two_noises_in_proportion() -> None:
    defense = DPSGD(
        QuantileClip(0.4, count_noise=1.0), 3.0, target_epsilon=30.0, target_delta=1e-3,
        accountant="filter",
    )  # fmt: skip
    run = Run(defense)
    before = defense.noise_std(run.context)
    run.step(first(4), lr=0.0)
    assert defense.harden()
    after = defense.noise_std(run.context)
    assert after / defense.clip_norm == pytest.approx(2 * before / 0.4)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(DefenseError, match="count_noise"):
        QuantileClip(1.0, count_noise=0.5)
    with pytest.raises(DefenseError, match="needs noise, a fixed clip norm"):
        DPSGD(QuantileClip(1.0), noise_multiplier=1.0, check=PlantedGradients())
    with pytest.raises(DefenseError, match="client='world'"):
        Run(DPSGD(QuantileClip(1.0), noise_multiplier=1.0), clients=2)


@pytest.mark.parametrize(("counted", "end"), [(-1e9, 1e5), (1e9, 1e-7)])
def test_noise_far_above_the_batch_moves_the_norm_to_an_end_of_its_range(
    counted: float, end: float
) -> None:
    clip = QuantileClip(initial=0.1)
    assert clip.next_norm(0.1, counted, 1.0, 1.0, b"k" * 32) == pytest.approx(end)


def test_half_precision_that_is_known_is_refused_at_setup() -> None:
    with pytest.raises(DefenseError, match="in half precision other rows move an example's norm"):
        Run(DPSGD(QuantileClip(1.0), noise_multiplier=1.0), precision="bf16-mixed")
