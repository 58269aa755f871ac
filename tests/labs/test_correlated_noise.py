"""Noise that is correlated over steps: by dense matrices, through files, and what is refused."""

from __future__ import annotations

import math
import os
import stat
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_fedleak.defenses import DPSGD, DefenseError
from lightning_fedleak.defenses.dpsgd.poisson import Draws, PoissonBatchSampler
from lightning_fedleak.defenses.noise import noise_key, standard_normal
from lightning_fedleak.labs.correlated_noise import NoisePlan, banded
from tests.defenses.dpsgd.test_dpsgd import CLIP, N, Net, Run, clipped, data, first, trainer
from tests.helpers.dpsgd_settings import grouped

pytestmark = pytest.mark.slow

SIGMA, STEPS, BATCH = 1.5, 11, 8


class Steps(Run):
    """With a Trainer that says how many steps there are."""

    def __init__(self, defense: DPSGD, steps: int = STEPS, n: int = N, **fields: Any) -> None:
        root = Net()
        root._trainer = trainer(max_epochs=None, max_steps=steps)
        loader = DataLoader(data(n), batch_size=BATCH)
        super().__init__(defense, root, loader, **fields)
        defense.on_train_start(self.context)

    def noise(self, samples: int = 5) -> Tensor:
        """What a step adds to its clipped sum."""
        rows = self.one_by_one(first(samples)).double()
        return BATCH * self.step(first(samples)).double() - clipped(rows).sum(0)


def correlated(mechanism: Any = "banded", bands: int = 3, **settings: Any) -> DPSGD:
    given = {"noise_multiplier": SIGMA, "accountant": "rdp", **settings}
    return DPSGD(CLIP, **grouped(mechanism=mechanism, bands=bands, **given))


def draws(run: Run, entropy: list[bytes]) -> Tensor:
    """Independent noise of releases 0, 1, ..., the t-th of a run with ``entropy[t]``."""
    rows = []
    for release, base in enumerate(entropy):
        keys = [
            noise_key(base, release, i, client=0, name="dpsgd") for i in range(len(run.parameters))
        ]
        own = [
            standard_normal(key, p.shape, p.device, p.dtype).flatten()
            for key, p in zip(keys, run.parameters, strict=True)
        ]
        rows.append(torch.cat(own).double())
    return torch.stack(rows)


def dense(rows: np.ndarray) -> np.ndarray:
    steps, bands = rows.shape
    matrix = np.zeros((steps, steps))
    for t in range(steps):
        for j in range(min(bands, t + 1)):
            matrix[t, t - j] = rows[t, j]
    return matrix


def inverse_of(bands: int) -> np.ndarray:
    """C^-1 for all steps."""
    return np.linalg.inv(dense(banded(STEPS, bands).rows))


@pytest.mark.parametrize("steps", [1, 2, 9, 40, 600])
@pytest.mark.parametrize("bands", [1, 2, 5])
def test_factorizations_are_those_of_dense_matrices(steps: int, bands: int) -> None:
    factorization = banded(steps, bands)
    matrix = dense(factorization.rows)
    np.testing.assert_allclose(np.linalg.norm(matrix, axis=0), 1)
    norms = np.linalg.norm(np.linalg.inv(matrix), axis=1)
    np.testing.assert_allclose(factorization.noise_norms, norms)


def mean_error(matrix: np.ndarray) -> float:
    """Of running sums, by a C whose columns are normalised first."""
    matrix = matrix / np.linalg.norm(matrix, axis=0)
    return np.square(np.tri(len(matrix)) @ np.linalg.inv(matrix)).sum(1).mean()


@pytest.mark.parametrize(("steps", "bands"), [(2, 2), (60, 4)])
def test_the_matrix_is_within_two_percent_of_the_best(steps: int, bands: int) -> None:
    """Best of all banded matrices, which SciPy finds from this one."""
    start = banded(steps, bands).rows
    mask = start != 0
    assert mean_error(dense(start)) < mean_error(dense(banded(steps, bands - 1).rows))

    def loss(free: np.ndarray) -> float:
        rows = np.zeros_like(start)
        rows[mask] = free
        return mean_error(dense(rows))

    best = minimize(loss, start[mask], method="L-BFGS-B", options={"maxfun": 20_000})
    assert best.fun <= mean_error(dense(start)) <= 1.04 * best.fun


@pytest.mark.parametrize("bands", [1, 2, 5, 30])
def test_the_noise_of_a_run_is_that_of_the_dense_matrix(bands: int) -> None:
    defense = correlated(bands=bands)
    run = Steps(defense, n=300)
    result = []
    for step in range(STEPS):
        scale = defense.noise_std(run.context) * BATCH / SIGMA / CLIP
        row = inverse_of(bands)[step]
        assert scale == pytest.approx(np.linalg.norm(row))
        result.append(run.noise())
    z = draws(run, [b"e" * 32] * STEPS)
    expected = SIGMA * CLIP * torch.from_numpy(inverse_of(bands)) @ z
    torch.testing.assert_close(torch.stack(result), expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(DefenseError, match="planned for 11 steps, and all were"):
        run.step(first(5))


def test_one_band_is_dp_sgd() -> None:
    plain = Steps(DPSGD(CLIP, noise_multiplier=SIGMA, accountant="rdp"))
    one = Steps(correlated(bands=1))
    for _ in range(3):
        assert torch.equal(plain.step(first(5)), one.step(first(5)))
    assert plain.defense.accountant.history == one.defense.accountant.history
    assert plain.loader.batch_sampler.draw(4) == one.loader.batch_sampler.draw(4)


def test_releases_are_accounted_by_rounds_at_the_rate_of_a_group() -> None:
    defense = correlated(bands=3, target_delta=1e-3)
    run = Steps(defense)
    rate = 3 * BATCH / N
    for made in range(1, STEPS + 1):
        run.step(first(5))
        assert defense.accountant.history == ((SIGMA, rate, math.ceil(made / 3)),)
        assert defense.releases == made


def test_epsilon_that_is_asked_for_is_spent_in_the_planned_steps() -> None:
    defense = correlated(
        bands=2, noise_multiplier=None, target_epsilon=2.0, target_delta=1e-3, on_budget="raise"
    )
    run = Steps(defense, steps=7)
    for _ in range(7):
        run.step(first(5))
    assert 1.9 < defense.privacy.epsilon <= 2.0
    assert NoisePlan(2, 7, 2, N).rounds == 4 == defense.privacy.releases


class Turn:
    def __init__(self) -> None:
        self.row = 0

    def __call__(self) -> int:
        return self.row


@pytest.mark.parametrize(("groups", "rate"), [(4, 0.5), (4, 1.0), (7, 0.9), (1, 0.3)])
def test_an_example_is_drawn_in_the_turns_of_its_group_alone(groups: int, rate: float) -> None:
    """Also where epochs are left early after batches were fetched ahead."""
    turn = Turn()
    sampler = PoissonBatchSampler(
        range(3, 90, 2), rate, 9, Draws(b"e" * 32, groups=groups, turn=turn)
    )
    observed: dict[int, list[int]] = {place: [] for place in sampler.shard}
    for epoch in range(60):
        batches, used = iter(sampler), 9 - epoch % 4
        for batch in [next(batches) for _ in range(min(9, used + 2))][:used]:
            sampler.claim(len(batch), turn.row)
            for place in batch:
                observed[place].append(turn.row)
            turn.row += 1
    own = [{row % groups for row in rows} for rows in observed.values()]
    assert all(len(one) == 1 for one in own)
    sizes = np.bincount([one.pop() for one in own])
    assert len(sizes) == groups
    assert sizes.max() - sizes.min() <= 1
    drawn = sum(map(len, observed.values()))
    chances = sum(turn.row // groups for _ in observed)
    assert drawn == pytest.approx(rate * chances, abs=5 * math.sqrt(chances))
    if rate == 1:
        assert all(
            np.diff(rows).tolist() == [groups] * (len(rows) - 1) for rows in observed.values()
        )


def test_a_batch_of_another_turn_is_refused() -> None:
    run = Steps(correlated(), steps=40)
    run.defense._noise.row = 1
    batches = iter(run.loader)
    given = [next(batches) for _ in range(4)]
    assert len(given[1][0]) != len(given[2][0])
    run.step(given[0])
    with pytest.raises(DefenseError, match="comes in step 2 that was not drawn for it"):
        run.step(given[2])
    run = Steps(correlated(), steps=40)
    given = next(iter(run.loader))
    run.defense._noise.row = 1
    with pytest.raises(DefenseError, match="comes in step 1 that was not drawn for it"):
        run.step(given)


# ---- files ------------------------------------------------------------------------------------


def resumed(state: Any, path: Path, bands: int, **fields: Any) -> Steps:
    defense = correlated(bands=bands)
    defense.load_state_dict(state)
    if not defense.load_secrets(path, "cpu"):
        defense.forget_secrets()
    return Steps(defense, n=300, entropy=b"f" * 32, **fields)


@pytest.mark.parametrize(("bands", "made"), [(1, 3), (4, 2), (4, 7)])
def test_a_run_goes_on_with_the_noise_of_its_last_release(
    bands: int, made: int, tmp_path: Path
) -> None:
    """New draws are of new entropy."""
    path = tmp_path / "secret"
    run = Steps(correlated(bands=bands), n=300)
    result = [run.noise() for _ in range(made)]
    run.defense.save_secrets(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    state = run.defense.state_dict()
    assert all(isinstance(v, str | int | float) or v.numel() <= 3 for v in state.values())
    run.defense.teardown()
    after = resumed(state, path, bands)
    assert path.exists()
    result.append(after.noise())
    assert not path.exists()
    result += [after.noise() for _ in range(STEPS - made - 1)]
    z = draws(run, [b"e" * 32] * made + [b"f" * 32] * (STEPS - made))
    expected = SIGMA * CLIP * torch.from_numpy(inverse_of(bands)) @ z
    torch.testing.assert_close(torch.stack(result), expected, rtol=1e-4, atol=1e-4)
    assert after.defense.accountant.steps == math.ceil(STEPS / bands)


def test_a_killed_run_begins_a_new_mechanism_and_pays_for_both(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    run = Steps(correlated(bands=4), n=300)
    for _ in range(5):
        run.noise()
    run.defense.save_secrets(path)
    state = run.defense.state_dict()
    run.noise()  # lost: the checkpoint is that of five
    assert not path.exists()
    with pytest.warns(UserWarning, match="A new mechanism begins"):
        after = resumed(state, path, 4)
    result = torch.stack([after.noise() for _ in range(3)])
    z = draws(run, [b""] * 5 + [b"f" * 32] * 3)[5:]
    own = torch.from_numpy(inverse_of(4))[:3, :3]
    torch.testing.assert_close(result, SIGMA * CLIP * own @ z, rtol=1e-4, atol=1e-4)
    assert after.defense.accountant.steps == 2 + 1


def test_of_two_runs_that_hold_one_noise_the_second_is_refused(tmp_path: Path) -> None:
    path, beside = tmp_path / "secret", tmp_path / "elsewhere" / "secret"
    run = Steps(correlated(bands=4), n=300)
    run.noise()
    run.noise()
    run.defense.save_secrets(beside)
    run.defense.save_secrets(path)  # of the same release, so the other goes
    assert not beside.exists()
    state = run.defense.state_dict()
    second, third = (resumed(state, path, 4) for _ in range(2))
    assert second.defense._noise.row == third.defense._noise.row == 2
    second.noise()
    second.defense.save_secrets(tmp_path / "later")
    third.defense.save_secrets(beside)
    assert not beside.exists()
    for late in (third, run):  # also the one that wrote it
        releases = late.defense.releases, late.defense.accountant.steps
        with pytest.raises(DefenseError, match="Another run has gone on"):
            late.step(first(5))
        assert (late.defense.releases, late.defense.accountant.steps) == releases
    assert (tmp_path / "later").exists()


def test_at_its_end_a_run_leaves_no_noise_behind(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    run = Steps(correlated(), steps=2)
    run.noise()
    run.defense.save_secrets(path)
    old, newest = path.with_name(".secret.1a"), path.with_name(".secret.2b")
    old.write_bytes(b"of a kill")
    newest.write_bytes(b"of a run beside this one")
    os.utime(old, (0, 0))
    run.noise()
    run.defense.save_secrets(path)
    assert [*tmp_path.iterdir()] == [newest]
    defense = correlated()
    defense.load_state_dict(run.defense.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Steps(defense, steps=2)


def test_a_copy_of_the_noise_is_refused_where_the_ledger_knows_of_later_releases(
    tmp_path: Path,
) -> None:
    path, ledger = tmp_path / "secret", tmp_path / "ledger"
    run = Steps(correlated(bands=2, ledger=ledger))
    run.noise()
    run.noise()
    run.defense.save_secrets(path)
    copied, state = path.read_bytes(), run.defense.state_dict()
    for more in (False, True):
        if more:
            run.noise()
        path.write_bytes(copied)
        path.chmod(0o600)
        for before_setup in (True, False):
            defense = correlated(bands=2, ledger=ledger)
            if not before_setup:  # as under FSDP2
                Steps(defense)
            defense.load_state_dict(state)
            defense.load_secrets(path, "cpu")
            if before_setup:
                Steps(defense)
            assert defense._noise.row == (0 if more else 2)


def edited(path: Path, change: Callable[[Any, Any], None]) -> None:
    from safetensors import safe_open
    from safetensors.torch import save_file

    with safe_open(path, "pt") as file:
        declared, tensors = file.metadata(), {n: file.get_tensor(n) for n in file.keys()}  # noqa: SIM118
    change(declared, tensors)
    save_file(tensors, path, metadata=declared)
    path.chmod(0o600)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: path.write_bytes(b"no tensors"),
        lambda path: edited(path, lambda declared, _: declared.update(row="3")),
        lambda path: edited(path, lambda declared, _: declared.update(releases="7")),
        lambda path: edited(path, lambda declared, _: declared.update(examples="301")),
        lambda path: edited(path, lambda declared, _: declared.update(device="cuda")),
        lambda path: edited(path, lambda _, tensors: tensors["0 0"].zero_()),
        lambda path: path.chmod(0o604),
        lambda path: path.unlink(),
    ],
)
def test_noise_of_another_release_or_device_is_not_gone_on_with(spoil: Any, tmp_path: Path) -> None:
    path = tmp_path / "secret"
    run = Steps(correlated(), n=300)
    run.noise()
    run.noise()
    run.defense.save_secrets(path)
    spoil(path)
    with pytest.warns(UserWarning, match="A new mechanism begins"):
        after = resumed(run.defense.state_dict(), path, 3)
    assert after.defense._noise.row == 0


def test_a_file_that_cannot_be_deleted_stops_the_run(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    run = Steps(correlated())
    run.noise()
    run.defense.save_secrets(path)
    path.unlink()
    path.mkdir()
    releases = run.defense.releases
    with pytest.raises(DefenseError, match="must not be used twice"):
        run.step(first(5))
    assert run.defense.releases == releases


@pytest.mark.parametrize(
    ("settings", "fields", "said"),
    [
        ({}, {"steps": 12}, "number of steps was 11 when the noise was planned, and is 12 now"),
        ({}, {"n": 600}, "number of examples was 300"),
        ({"bands": 5}, {}, "'bands': 4}, and this run has"),
        (
            {"mechanism": "independent", "bands": None},
            {},
            "'mechanism': 'banded', 'bands': 4}, and",
        ),
    ],
)
def test_another_plan_is_refused_on_resume(settings: Any, fields: Any, said: str) -> None:
    run = Steps(correlated(bands=4), n=300)
    run.step(first(5))
    defense = correlated(**{"bands": 4, **settings})

    def resume() -> None:
        defense.load_state_dict(run.defense.state_dict())
        Steps(defense, **{"n": 300, **fields})

    with pytest.raises(DefenseError, match=said):
        resume()


def test_a_parameter_that_was_not_trained_in_the_step_before_is_refused() -> None:
    run = Steps(correlated())
    frozen = run.parameters.pop()
    frozen.requires_grad_(False)
    run.step(first(5))
    run.parameters.append(frozen.requires_grad_(True))
    with pytest.raises(DefenseError, match="train the same parameters in all steps"):
        run.step(first(5))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"bands": None}, "bands must be .* at least 1, got None"),
        ({"bands": 0}, "bands must be .* at least 1, got 0"),
        (
            {"accountant": "filter", "target_epsilon": 1.0, "target_delta": 1e-3},
            "fixed before the run",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings: Any, said: str) -> None:
    with pytest.raises(DefenseError, match=said):
        correlated(**settings)


def test_too_many_bands_and_an_endless_run_are_refused() -> None:
    with pytest.raises(DefenseError, match="Use at most bands=5, or smaller batches"):
        Steps(correlated(bands=6))
    with pytest.raises(DefenseError, match=r"mechanism='banded' needs to know.*max_steps\.$"):
        Steps(correlated(), steps=-1)
    assert not correlated().can_harden
