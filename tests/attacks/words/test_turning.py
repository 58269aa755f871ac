"""Turning towards a gradient's own hidden states: closed forms, and a model that was moved."""

import copy

import pytest
import torch
from torch.nn import functional as F

from lightning_fedleak.attacks.public_text import PublicText, gradient_of
from lightning_fedleak.attacks.words.aligned import AlignedFlatChat
from lightning_fedleak.attacks.words.aligned_readout import refit_direction
from lightning_fedleak.attacks.words.aligned_rows import RowSummary
from lightning_fedleak.attacks.words.head_gradients import head_gradient
from lightning_fedleak.cli.finetuning import CausalLMFineTuning, TextDataModule
from lightning_fedleak.model.anatomy import find_anatomy
from lightning_fedleak.model.batches import read_batch
from lightning_fedleak.model.snapshots import GradientSnapshot, Observation, Stage
from tests.attacks.words.language import generator

VOCAB, WIDTH, TOKENS = 1500, 24, 120


def observed(gradient):
    return Observation((GradientSnapshot(0, Stage.SHARED, {"head.weight": gradient}),))


@pytest.fixture
def away():
    """(gradient, hidden, labels, u): hidden states on both sides of u, all on one of another."""
    g = generator(1)
    u, other = F.normalize(torch.randn(2, WIDTH, generator=g), dim=1)
    hidden = torch.randn(TOKENS, WIDTH, generator=g) + 5 * other - 1.5 * u
    weight = 0.6 * torch.randn(VOCAB, WIDTH, generator=g)
    labels = torch.randint(VOCAB, (TOKENS,), generator=g)
    assert (hidden @ u < 0).float().mean() > 0.8
    return head_gradient(hidden, labels, weight), hidden, labels, u


def test_unused_rows_are_positive_afterwards(away):
    gradient, hidden, labels, u = away
    summary, turned = refit_direction(gradient, RowSummary.read(gradient, u), u)
    assert (hidden @ turned > 0).all()
    torch.testing.assert_close(summary.projection, gradient @ turned)
    unused = torch.ones(VOCAB, dtype=torch.bool)
    unused[labels] = False
    assert (summary.projection[unused] > 0).all()
    assert turned.norm() == pytest.approx(1.0)


def test_noise_that_hides_the_unused_rows_leaves_u_alone(away):
    gradient, _, _, u = away
    noised = gradient + 0.03 * gradient.norm(dim=1).max() * torch.randn(
        gradient.shape, generator=generator(2)
    )
    summary = RowSummary.read(noised, u)
    after, turned = refit_direction(noised, summary, u)
    assert turned is u
    assert after is summary


def test_rows_of_used_types_are_not_turned_to_the_positive_side(away):
    """Small rows of the opposite sign, as label smoothing that was not found leaves them."""
    gradient, hidden, labels, _ = away
    u = F.normalize(F.normalize(hidden, dim=1).mean(0), dim=0)
    unused = ~torch.isin(torch.arange(VOCAB), labels)
    gradient[unused] = -1e-3 * torch.rand(int(unused.sum()), 1, generator=generator(4)) * u
    none = torch.zeros(WIDTH)
    summary = RowSummary(gradient @ u, gradient.norm(dim=1), none)
    assert refit_direction(gradient, summary, u)[1] is u


@pytest.fixture(scope="module")
def tuned():
    """The embedded model, text of its own, and private batches with their gradients.

    Before and after 15 steps on them.
    """
    module = CausalLMFineTuning(None)
    start = find_anatomy(copy.deepcopy(module))
    data = TextDataModule(batch_size=8, length=48)
    data.setup()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)
    cases = []
    for step, raw in zip(range(16), data.train_dataloader(), strict=False):
        batch = read_batch(raw, "causal")
        if step in (0, 15):
            anatomy = find_anatomy(module)
            gradient = gradient_of(anatomy, batch, ["head.weight"])["head.weight"]
            cases.append((gradient, batch.target_ids().unique()))
        optimizer.zero_grad()
        module(**raw).backward()
        optimizer.step()
    return start, PublicText.sampled_from(start, n=64, length=48), cases


@pytest.mark.slow
def test_text_and_model_that_calibration_has_not_seen(tuned):
    """Calibrated on the model's own text before training, without a start token and after it."""
    start, public, cases = tuned
    attack = AlignedFlatChat(public, lengths=(24, 48), calibration_tokens=1200)
    attack.prepare(start)
    for gradient, truth in cases:
        types = attack.run(observed(gradient)).types
        right = torch.isin(types, truth).sum().item()
        assert right / len(types) > 0.94
        assert right / len(truth) > 0.85
