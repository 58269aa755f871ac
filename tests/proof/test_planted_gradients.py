"""DPSGD itself under audit, whole runs of it; ``benchmarks/defenses/audit.py`` is the long form."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning.pytorch as L
import numpy as np
import pytest
import scipy.stats
import torch
from torch.utils.data import DataLoader

from benchmarks.defenses.audit import drawn_twice_as_often, half_the_noise, twice_the_clip
from benchmarks.defenses.dp_sgd_games import Refutations, best_threshold, refutations
from benchmarks.defenses.planted_gradients import PlantedGradients, owners
from lightning_fedleak.callbacks import CanaryScorer
from lightning_fedleak.cli.finetuning.module import PadRight
from lightning_fedleak.defenses import DPSGD, DefenseError, noise
from lightning_fedleak.defenses.accounting.accounting import epsilon_of
from lightning_fedleak.defenses.dpsgd.clipped_sum import ClippedSum, EarlierPieces
from lightning_fedleak.defenses.noise import NoiseGauge
from lightning_fedleak.evaluation.auditing import audit_canaries, audit_scores
from lightning_fedleak.evaluation.canaries import new_token_canaries, with_canaries
from lightning_fedleak.strategies import DefendedStrategy
from tests.helpers.dpsgd_settings import grouped
from tests.helpers.models import tiny_llama
from tests.helpers.settings import QUIET
from tests.strategies.dpsgd_runs import CausalLM

pytest.importorskip("opacus")
pytestmark = pytest.mark.slow


GAMES, DELTA = 400, 1e-3


def planted(sigma: float, rate: float = 1.0, steps: int = 1, **settings: Any) -> PlantedGradients:
    given = {"max_grad_norm": 0.7, "target_delta": DELTA, **settings}

    def defense() -> DPSGD:
        return DPSGD(noise_multiplier=sigma, **grouped(**given))

    return PlantedGradients(
        defense, targets=GAMES, batch_size=round(rate * GAMES), steps=steps, seed=1
    )


def audited(game, audits, sigma, rate=1.0, **settings) -> tuple[Refutations, float]:
    """Refutations of the accounted epsilon, and the median bound over it."""
    played = [game.games(number, sigma, rate) for number in range(audits)]
    bounds = [audit_scores(own.scores, own.members, **settings).epsilon for own in played]
    epsilon = epsilon_of(game.history, settings["delta"], "prv")
    return refutations(bounds, epsilon), float(np.median(bounds)) / epsilon


@pytest.mark.parametrize(
    ("sigma", "settings"),
    [(0.5, {}), (1.0, {"max_physical_batch_size": 90}), (1.0, {"max_grad_norm": "auto"})],
)
def test_no_more_audits_of_dpsgd_than_allowed_exceed_its_epsilon(sigma, settings) -> None:
    game = planted(sigma, **settings)
    count, power = audited(game, 120, sigma, delta=DELTA, claim="gaussian", threshold=0.0)
    assert game.history == ((sigma, 1.0, 1),)
    assert count.audits == 120
    assert count.p_value > 0.01
    assert power > 0.4


@pytest.mark.parametrize(
    ("sigma", "rate", "steps", "most"),
    [(0.5, 0.5, 1, None), (1.0, 0.5, 4, None), (0.5, 0.5, 1, 64)],
)
def test_nor_under_poisson_sampling(sigma, rate, steps, most) -> None:
    game = planted(sigma, rate, steps, max_physical_batch_size=most)
    cut = best_threshold(sigma, rate, steps, games=GAMES, delta=0.1)
    count, power = audited(game, 120, sigma, rate, delta=0.1, threshold=cut)
    assert game.history == ((sigma, rate, steps),)
    assert count.p_value > 0.01
    assert power > 0.15


ROWS = [1 + target % 4 for target in range(GAMES)]
USERS: dict[str, Any] = {"group_by": owners(ROWS)}


def of_users(sigma: float, rate: float = 1.0, steps: int = 1, **settings: Any) -> PlantedGradients:
    """Targets are users of one to four rows."""

    def defense() -> DPSGD:
        return DPSGD(
            0.7, noise_multiplier=sigma, target_delta=DELTA, **grouped(**{**USERS, **settings})
        )

    return PlantedGradients(
        defense, targets=GAMES, batch_size=round(rate * GAMES), steps=steps, seed=2, rows=ROWS
    )


@pytest.mark.parametrize(
    "settings",
    [
        {"rows_per_user": 2},
        {"rows_per_user": 4, "max_physical_batch_size": 150},
        {"rows_per_user": 4, "max_physical_batch_size": 4},
    ],
)
def test_a_user_with_all_of_their_rows_is_told_no_better_than_accounted(settings: Any) -> None:
    game = of_users(1.0, **settings)
    audits = 5 if settings.get("max_physical_batch_size") == 4 else 80
    count, power = audited(game, audits, 1.0, delta=DELTA, claim="gaussian", threshold=0.0)
    assert game.history == ((1.0, 1.0, 1),)
    assert count.p_value > 0.01
    assert power > 0.4


def test_nor_where_users_are_drawn_by_chance() -> None:
    game = of_users(1.0, 0.5, 4)
    cut = best_threshold(1.0, 0.5, 4, games=GAMES, delta=0.1)
    count, power = audited(game, 80, 1.0, 0.5, delta=0.1, threshold=cut)
    assert game.history == ((1.0, 0.5, 4),)
    assert count.p_value > 0.01
    assert power > 0.15


def rows_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row is clipped, and all of a user's are added."""
    right = ClippedSum.__init__

    def by_rows(self: ClippedSum, *given: Any, **named: Any) -> None:
        right(self, *given, **{**named, "users": None})

    monkeypatch.setattr(ClippedSum, "__init__", by_rows)


def test_users_whose_rows_are_clipped_by_themselves_are_refuted(monkeypatch) -> None:
    rows_by_themselves(monkeypatch)
    count, power = audited(of_users(1.0), 20, 1.0, delta=DELTA, claim="gaussian", threshold=0.0)
    assert count.refuted > 15
    assert power > 1


@contextmanager
def a_piece_twice() -> Iterator[None]:
    right = EarlierPieces.add

    def again(self: EarlierPieces, *given: Any) -> None:
        right(self, *given)
        self._count -= given[0].samples
        right(self, *given)

    with patch.object(EarlierPieces, "add", again):
        yield


@pytest.mark.parametrize(
    ("broken", "most"),
    [(half_the_noise, None), (twice_the_clip, None), (twice_the_clip, 150), (a_piece_twice, 150)],
)
def test_a_broken_step_is_refuted(broken, most, monkeypatch) -> None:
    monkeypatch.setattr(NoiseGauge, "measured", lambda self: None)
    if broken is a_piece_twice:
        monkeypatch.setattr(ClippedSum, "check_complete", lambda *_: True)
    game = planted(1.0, max_physical_batch_size=most)
    with broken():
        count, power = audited(game, 30, 1.0, delta=DELTA, claim="gaussian", threshold=0.0)
    assert count.refuted > 20
    assert count.p_value < 1e-9
    assert power > 1


@pytest.mark.parametrize("broken", [half_the_noise, twice_the_clip, drawn_twice_as_often])
def test_a_broken_run_is_refuted_under_poisson_sampling(broken, monkeypatch) -> None:
    monkeypatch.setattr(NoiseGauge, "measured", lambda self: None)
    cut = best_threshold(1.0, 0.5, 4, games=GAMES, delta=0.1)
    with broken():
        count, _ = audited(planted(1.0, 0.5, 4), 40, 1.0, 0.5, delta=0.1, threshold=cut)
    assert count.refuted > 6
    assert count.p_value < 1e-3


def test_a_piece_that_is_added_twice_is_seen_by_dpsgd_itself() -> None:
    said = "not the sum of its recorded per-sample gradients"
    with a_piece_twice(), pytest.raises(DefenseError, match=said):
        planted(1.0, max_physical_batch_size=150).games(0, 1.0, 1.0)


def test_half_the_noise_is_seen_by_dpsgd_itself() -> None:
    seen = patch.object(NoiseGauge, "measured", NoiseGauge.measured)
    with half_the_noise(), seen, pytest.raises(DefenseError, match="noise measured"):
        planted(1.0).games(0, 1.0, 1.0)


def test_the_releases_are_the_sampled_gaussian_mechanism() -> None:
    """Law, noise to 1%, rates; and games of one run that know nothing of each other."""
    sigma, steps, runs = 0.1, 3, 60
    game = planted(sigma, 0.25, steps)
    members = torch.arange(GAMES) % 2 == 0
    released = torch.stack([game.run(members, number) for number in range(runs)])
    held, absent = released[..., members], released[..., ~members]
    inside = held > 0.5
    assert scipy.stats.binomtest(int(inside.sum()), inside.numel(), 0.25).pvalue > 1e-4
    rest = torch.cat([(held - inside.double()), absent], 2) / sigma
    assert float(rest.std()) == pytest.approx(1.0, rel=0.01)
    assert scipy.stats.kstest(rest.flatten().numpy(), "norm").pvalue > 1e-4
    alike = np.corrcoef(rest.flatten(0, 1).numpy())
    np.fill_diagonal(alike, 0.0)
    assert np.abs(alike).max() < 0.3
    places = np.corrcoef(rest.flatten(0, 1).numpy().T)
    np.fill_diagonal(places, 0.0)
    rows = runs * steps
    assert np.mean(places**2) == pytest.approx(1 / (rows - 1), rel=0.05)


# Whole fits under DPSGD, audited by canary texts; the long form: ``one_run_audit.py --texts``.


CANARIES = 100


def canary_audited(audits: int, folder: Path, sigma: float = 1.0) -> tuple[Refutations, float]:
    """Refutations of the accounted epsilon, and the mean bound over it."""
    bounds = []
    for seed in range(audits):
        model = tiny_llama(tied=True)
        texts = new_token_canaries(model, CANARIES)
        train = with_canaries([torch.arange(5, 8) + i for i in range(10)], texts, seed=seed)
        scorer = CanaryScorer(train.canaries)
        defense = DPSGD(0.1, noise_multiplier=sigma, target_delta=DELTA)
        L.Trainer(
            max_steps=1,
            strategy=DefendedStrategy("auto", [defense]),
            callbacks=[scorer],
            default_root_dir=folder,
            **QUIET,
        ).fit(CausalLM(model), DataLoader(train, len(train), collate_fn=PadRight(0)))
        audit = audit_canaries(train.canaries, scorer.scores(), delta=DELTA, claim="gaussian")
        bounds.append(audit.epsilon)
        epsilon = defense.accountant.epsilon(DELTA)
    return refutations(bounds, epsilon), sum(bounds) / len(bounds) / epsilon


def test_no_more_audits_by_canary_texts_than_allowed_exceed_epsilon(tmp_path: Path) -> None:
    count, power = canary_audited(6, tmp_path)
    assert count.audits == 6
    assert count.p_value > 0.01
    assert power >= 0.1


def test_an_eighth_of_the_noise_is_refuted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = noise._add

    def little(key: bytes, target: torch.Tensor, std: float) -> None:
        right(key, target, std / 8)

    monkeypatch.setattr(noise, "_add", little)
    monkeypatch.setattr(NoiseGauge, "measured", lambda self: None)
    count, _ = canary_audited(3, tmp_path)
    assert count.refuted >= 2
    assert count.p_value < 0.01
