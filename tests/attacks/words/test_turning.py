"""Turning towards a gradient's own hidden states: closed forms, and a model that was moved."""

import copy

import pytest
import torch
from torch.nn import functional as F

from lightning_fedleak.attacks.public_text import PublicText
from lightning_fedleak.attacks.words.aligned import AlignedFlatChat
from lightning_fedleak.attacks.words.aligned_readout import turn
from lightning_fedleak.attacks.words.aligned_rows import RowSummary, kth_smallest
from lightning_fedleak.attacks.words.public_gradients import gradient_of, head_gradient
from lightning_fedleak.cli.finetuning import CausalLMFineTuning, TextDataModule
from lightning_fedleak.model.anatomy import find_anatomy
from lightning_fedleak.model.batches import read_batch
from lightning_fedleak.model.snapshots import GradientSnapshot, Observation, Stage

VOCAB, WIDTH, TOKENS = 1500, 24, 120


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


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
    summary, turned = turn(gradient, RowSummary.read(gradient, u), u)
    assert (hidden @ turned > 0).all()
    torch.testing.assert_close(summary.projection, gradient @ turned)
    unused = torch.ones(VOCAB, dtype=torch.bool)
    unused[labels] = False
    assert (summary.projection[unused] > 0).all()
    assert turned.norm() == pytest.approx(1.0)


def test_only_the_given_rows_are_looked_at(away):
    gradient, _, labels, u = away
    among = torch.arange(VOCAB)[~torch.isin(torch.arange(VOCAB), labels)][:300]
    changed = gradient.clone()
    changed[~torch.isin(torch.arange(VOCAB), among)] *= 1.0001
    one = turn(gradient, RowSummary.read(gradient, u), u, among)[1]
    two = turn(changed, RowSummary.read(changed, u), u, among)[1]
    torch.testing.assert_close(one, two)


def test_noise_that_hides_the_unused_rows_leaves_u_alone(away):
    gradient, _, _, u = away
    noised = gradient + 0.03 * gradient.norm(dim=1).max() * torch.randn(
        gradient.shape, generator=generator(2)
    )
    summary = RowSummary.read(noised, u)
    after, turned = turn(noised, summary, u)
    assert turned is u
    assert after is summary


def test_no_row_to_choose_from_leaves_u_alone(away):
    """Public text of a small vocabulary uses every type."""
    gradient, _, _, u = away
    none = torch.zeros(0, dtype=torch.int64)
    assert turn(gradient, RowSummary.read(gradient, u), u, none)[1] is u


def test_too_few_rows_leave_u_alone():
    g = generator(3)
    hidden, weight = torch.randn(5, 8, generator=g), torch.randn(40, 8, generator=g)
    gradient = head_gradient(hidden, torch.tensor([1, 2, 3, 4, 5]), weight)
    u = F.normalize(hidden.mean(0), dim=0)
    assert turn(gradient, RowSummary.read(gradient, u), u)[1] is u


def test_rows_of_used_types_are_not_turned_to_the_positive_side(away):
    """Small rows of the opposite sign, as label smoothing that was not found leaves them."""
    gradient, hidden, labels, _ = away
    u = F.normalize(F.normalize(hidden, dim=1).mean(0), dim=0)
    unused = ~torch.isin(torch.arange(VOCAB), labels)
    gradient[unused] = -1e-3 * torch.rand(int(unused.sum()), 1, generator=generator(4)) * u
    none = torch.zeros(WIDTH)
    summary = RowSummary(gradient @ u, gradient.norm(dim=1), none)
    assert turn(gradient, summary, u)[1] is u


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes_are_read_in_float32(away, dtype):
    gradient, _, _, u = away
    gradient = gradient.to(dtype)
    summary = RowSummary.read(gradient, u)
    torch.testing.assert_close(summary.norms, gradient.float().norm(dim=1))
    torch.testing.assert_close(summary.projection, gradient.float() @ u)


def test_kth_smallest_is_that_of_the_sorted_values():
    values = torch.randn(1000, generator=generator(7)).round(decimals=1)
    ordered = sorted(values.tolist())
    for k in (1, 2, 100, 500, 999, 1000):
        assert float(kth_smallest(values, k)) == ordered[k - 1]


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
@pytest.mark.parametrize("readout", ["sign", "learned"])
def test_text_and_model_that_calibration_has_not_seen(tuned, readout):
    """Calibrated on the model's own text before training, without a start token and after it."""
    start, public, cases = tuned
    attack = AlignedFlatChat(public, readout=readout, lengths=(24, 48), calibration_tokens=1200)
    attack.prepare(start)
    for gradient, truth in cases:
        types = attack.run(observed(gradient)).types
        right = torch.isin(types, truth).sum().item()
        assert right / len(types) > 0.94
        assert right / len(truth) > 0.85
