"""No attack on what DP-SGD releases tells members better than its noise lets anyone.

A release ``sum_i clip(g_i) + N(0, (sigma C)^2)`` with and without one example is two Gaussians at a
distance of at most C, so that no score of it has an AUC above Phi(1 / (sigma sqrt 2)); where the
example is replaced by another they are 2 C apart, and the bound is Phi(sqrt 2 / sigma) (Dong, Roth
and Su 2022, Gaussian differential privacy).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from scipy.stats import norm
from torch import Tensor, nn

from lightning_fedleak.attacks import GradientMembership, Query, SubspaceMembership
from lightning_fedleak.evaluation.metrics import membership_rates
from lightning_fedleak.model.anatomy import find_anatomy
from lightning_fedleak.model.snapshots import GradientSnapshot, Observation, Stage
from tests.attacks.row_space.models import backward, llama, ready, texts, with_lora

POOL, BATCH, LENGTH, RELEASES = 60, 6, 10, 40
ADD, REPLACE = "add or remove", "replace one"
ATTACKS = {"gradient": GradientMembership, "subspace": SubspaceMembership}


def clipped(model: nn.Module, anatomy: Any, names: tuple[str, ...], ids: Tensor) -> list[Tensor]:
    """Of each text's gradient, clipped to 1 over all that is trained, the part that is read."""
    result = []
    for row in ids:
        backward(model, row[None])
        trained = [p.grad for p in model.parameters() if p.requires_grad]
        size = torch.cat([g.flatten() for g in trained]).norm()
        read = torch.cat([anatomy.parameter(name).grad.flatten() for name in names])
        result.append(read / size.clamp_min(1.0))
    return result


@dataclass(frozen=True)
class Victim:
    """An attack on a model, and each pool text's clipped gradient; nothing of it changes."""

    attack: GradientMembership | SubspaceMembership
    pool: Tensor
    gradients: list[Tensor]
    shapes: dict[str, torch.Size]

    @classmethod
    def of(cls, kind: str) -> Victim:
        model = with_lora(ready(llama()), 4, ["q_proj", "v_proj"])
        with torch.no_grad():  # a head that is sure of itself, so that gradients are long
            model.get_output_embeddings().weight *= 20
        anatomy = find_anatomy(model)
        attack = ATTACKS[kind](texts(24, LENGTH))
        names = attack.needs(anatomy).gradients
        attack.prepare(anatomy)
        attack.refresh(anatomy, 0)
        pool = texts(POOL, LENGTH)
        gradients = clipped(model, anatomy, names, pool)
        return cls(attack, pool, gradients, {n: anatomy.parameter(n).shape for n in names})


@pytest.fixture(scope="module")
def victims() -> dict[str, Victim]:
    """By kind of attack."""
    return {kind: Victim.of(kind) for kind in ATTACKS}


def auc_of(victim: Victim, sigma: float, game: str) -> Any:
    """The AUC of an attack in 120 games, with its interval."""
    attack, pool, gradients, shapes = victim.attack, victim.pool, victim.gradients, victim.shapes
    scores, bits, cluster = [], [], []
    for release in range(RELEASES):
        chosen = torch.randperm(POOL)[: BATCH + 3]
        rest, targets = chosen[:BATCH], chosen[BATCH:]
        members = torch.rand(3) < 0.5
        instead = torch.randint(POOL, (3,))
        total = sum(gradients[i] for i in rest.tolist())
        for target, other, member in zip(targets, instead, members, strict=True):
            if member:
                total = total + gradients[int(target)]
            elif game == REPLACE:
                total = total + gradients[int(other)]
        total = total + sigma * torch.randn_like(total)
        parts = torch.split(total, [shape.numel() for shape in shapes.values()])
        tensors = {n: v.view(s) for (n, s), v in zip(shapes.items(), parts, strict=True)}
        view = Observation((GradientSnapshot(0, Stage.SHARED, tensors, noise_std=sigma),))
        scores.append(attack.run(view, Query(pool[targets])).scores)
        bits.append(members)
        cluster.append(torch.full((3,), release))
    return membership_rates(torch.cat(scores), torch.cat(bits), torch.cat(cluster))["auc"]


def bound(sigma: float, game: str) -> float:
    """What no score of a release exceeds."""
    return float(norm.cdf((1 if game == ADD else 2) / (sigma * 2**0.5)))


@pytest.mark.slow
@pytest.mark.parametrize("game", [ADD, REPLACE])
@pytest.mark.parametrize("sigma", [1.0, 2.0])
@pytest.mark.parametrize("kind", ATTACKS)
def test_no_more_than_the_noise_lets_through(
    victims: dict[str, Victim], kind: str, sigma: float, game: str
) -> None:
    assert auc_of(victims[kind], sigma, game).low <= bound(sigma, game)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ATTACKS)
def test_the_same_games_without_noise_break_the_bound(
    victims: dict[str, Victim], kind: str
) -> None:
    for game in (ADD, REPLACE):
        assert auc_of(victims[kind], 0.0, game).low > bound(2.0, game)
