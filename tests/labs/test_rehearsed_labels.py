"""``RehearsedLabels`` behind adapters, beside another gradient, scikit-learn and float64."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.attacks.setups import adapters
from lightning_fedleak.attacks import PublicText, gradient_of
from lightning_fedleak.callbacks import LeakageMonitor
from lightning_fedleak.labs import rehearsed_labels
from lightning_fedleak.labs.rehearsed_labels import RehearsedLabels
from lightning_fedleak.model.anatomy import Anatomy, find_anatomy
from lightning_fedleak.model.batches import TokenBatch
from lightning_fedleak.model.snapshots import (
    GradientSnapshot,
    Inapplicable,
    NotYet,
    Observation,
    Stage,
    UnusableObservation,
    UpdateSnapshot,
)
from lightning_fedleak.threats import ThreatModelError
from tests.helpers.lightning_modules import CausalLMModule
from tests.helpers.models import own_rng, tiny_bert_mlm, tiny_gpt2, tiny_llama

pytestmark = pytest.mark.slow

ROWS, LENGTH, TYPES = 2, 9, 97


def texts(rows: int, seed: int) -> Tensor:
    return torch.randint(3, TYPES, (rows, LENGTH), generator=torch.Generator().manual_seed(seed))


def adapted(moved: bool = True) -> nn.Module:
    """A Llama with adapters, whose up maps have moved if asked."""
    with own_rng(0):
        model = adapters(tiny_llama(d=32))
        for name, p in model.named_parameters():
            if moved and ".up." in name:
                nn.init.normal_(p, std=0.02)
    return model


@pytest.fixture(scope="module")
def anatomy() -> Anatomy:
    return find_anatomy(adapted())


@pytest.fixture(scope="module")
def attack(anatomy: Anatomy) -> RehearsedLabels:
    attack = RehearsedLabels(PublicText(texts(60, 1)), shapes=[(ROWS, LENGTH)], rehearsals=48)
    attack.prepare(anatomy)
    return attack


def observed(anatomy: Anatomy, attack: RehearsedLabels, ids: Tensor) -> Observation:
    batch = TokenBatch(ids, ids, torch.ones_like(ids), "causal")
    tensors = gradient_of(anatomy, batch, attack.needs(anatomy).gradients)
    return Observation((GradientSnapshot(0, Stage.SHARED, tensors),))


def changed(view: Observation, **fields: Any) -> Observation:
    return Observation((replace(view.gradients[-1], **fields),))


def test_labels_are_read_off_a_batchs_own_gradient_alone(
    anatomy: Anatomy, attack: RehearsedLabels
) -> None:
    own, other, named, expected = [], [], [], []
    batches = [texts(ROWS, seed) for seed in range(20, 28)]
    guesses = [attack.run(observed(anatomy, attack, ids)) for ids in batches]
    for ids, guess, another in zip(batches, guesses, guesses[1:] + guesses[:1], strict=True):
        truth = set(ids[:, 1:].flatten().tolist())
        assert guess.surface == "output"
        for hits, one in ((own, guess), (other, another)):
            hits.append(2 * len(truth & set(one.types.tolist())) / (len(truth) + len(one.types)))
        named.append(len(guess.types) / len(truth))
        expected.append(guess.n_types / len(truth))
    mean = [sum(values) / len(values) for values in (own, other, named, expected)]
    assert mean[0] > mean[1] + 0.2  # tokens are uniform: nothing but the gradient tells them
    assert 0.6 < mean[2] < 2
    assert 0.7 < mean[3] < 1.4


def test_the_readout_is_a_penalised_logistic_regression() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, 3, generator=generator).double() * torch.tensor([1.0, 5.0, 0.2]) + 1
    truth = (torch.rand(400, generator=generator) < torch.sigmoid(x[:, 0] + x[:, 2] - 2)).double()
    count = torch.ones(400).double()
    count[300:] = 7
    mean, scale, weights = rehearsed_labels.logistic_regression(x, truth, count)
    scaled = ((x - mean) / scale).numpy()
    inverse = 1 / (2 * rehearsed_labels._PENALTY * len(x))
    peer = LogisticRegression(C=inverse, tol=1e-10, max_iter=1000)
    peer.fit(scaled, truth.numpy(), sample_weight=count.numpy())
    both = [*peer.coef_[0], peer.intercept_[0]]
    assert weights.tolist() == pytest.approx(both, abs=1e-5)


def test_a_filter_is_the_whitened_energy_along_each_vector() -> None:
    generator = torch.Generator().manual_seed(0)
    rows, atoms = (torch.randn(*s, generator=generator) for s in ((12, 4, 6), (20, 6)))
    part = rehearsed_labels._Part("w", 1, atoms)
    fitted = rehearsed_labels._Filter.fit(part, rows)
    white = (fitted.root @ rows).reshape(-1, 6).double()
    covariance = white.T @ white / len(white)
    covariance += torch.eye(6) * covariance.diagonal().mean() * rehearsed_labels._RIDGE
    gradient = torch.randn(6, 4, generator=generator)
    for token in (0, 7):
        a = atoms[token].double()
        solved = torch.linalg.solve(covariance, a)
        energy = [float(solved @ row) ** 2 for row in fitted.root.double() @ gradient.T.double()]
        expected = sum(energy) / len(energy) / float(a @ solved)
        score = fitted.scores(gradient, torch.tensor([token]))
        # The last alternation turned the rows once more than the covariance.
        assert float(score.exp()) == pytest.approx(expected, rel=0.05)


def test_what_rehearsals_do_not_show_is_unknown(anatomy: Anatomy, attack: RehearsedLabels) -> None:
    view = observed(anatomy, attack, texts(ROWS, 5))
    tensors = view.gradients[-1].tensors
    with pytest.raises(Inapplicable, match="noise"):
        attack.run(changed(view, noise_std=0.1))
    with pytest.raises(Inapplicable, match="noise"):
        attack.run(changed(view, noise_std=float("nan")))
    with pytest.raises(UnusableObservation, match="all zero"):
        attack.run(changed(view, tensors={n: torch.zeros_like(g) for n, g in tensors.items()}))
    with pytest.raises(UnusableObservation, match="NaN"):
        attack.run(changed(view, tensors={n: g / 0 for n, g in tensors.items()}))
    update = UpdateSnapshot(0, Stage.SHARED, tensors, local_steps=1, learning_rate=0.1)
    with pytest.raises(Inapplicable, match="single steps"):
        attack.run(Observation((update,)))
    with pytest.raises(NotYet, match="no map"):
        RehearsedLabels(PublicText(texts(4, 1))).run(view)


@pytest.mark.parametrize("seed", [0, 8, 15])
def test_frequency_alone_is_unknown(
    anatomy: Anatomy, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """A readout of gradients that hold nothing of their batch names frequent tokens.

    With the last two seeds it names labels of the rehearsals that it was fitted to.
    """
    generator = torch.Generator().manual_seed(seed)

    def noise(anatomy: Anatomy, batch: TokenBatch, roles: Sequence[str]) -> dict[str, Tensor]:
        shapes = {name: anatomy.root.get_parameter(name).shape for name in roles}
        return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}

    monkeypatch.setattr(rehearsed_labels, "gradient_of", noise)
    attack = RehearsedLabels(PublicText(texts(60, 1)), shapes=[(ROWS, LENGTH)], rehearsals=12)
    attack.prepare(anatomy)
    with pytest.raises(UnusableObservation, match="frequent tokens"):
        attack.run(observed(anatomy, attack, texts(ROWS, 5)))


def test_rehearsals_are_read_by_what_others_were_fitted_to(
    anatomy: Anatomy, monkeypatch: pytest.MonkeyPatch
) -> None:
    fits: list[list[int]] = []
    fit = rehearsed_labels._Readout.fit

    def retained(gradients: Any, labels: Any, *rest: Any) -> Any:
        fits.append([id(used) for used in labels])
        return fit(gradients, labels, *rest)

    monkeypatch.setattr(rehearsed_labels._Readout, "fit", retained)
    RehearsedLabels(PublicText(texts(60, 1)), shapes=[(ROWS, LENGTH)], rehearsals=15).prepare(
        anatomy
    )
    every, *halves = fits
    assert len(every) == 5
    assert halves == [every[:2], every[2:]]


def test_a_gain_has_to_exceed_chance() -> None:
    assert rehearsed_labels._exceed(torch.tensor([0.1, 0.12, 0.08, 0.1]))
    assert not rehearsed_labels._exceed(torch.tensor([0.3, -0.2, 0.1, -0.1]))
    assert not rehearsed_labels._exceed(torch.tensor([0.5]))
    assert not rehearsed_labels._exceed(torch.zeros(4))


def test_a_scaled_gradient_reads_the_same(anatomy: Anatomy, attack: RehearsedLabels) -> None:
    view = observed(anatomy, attack, texts(ROWS, 6))
    scaled = {n: g * 1e-3 for n, g in view.gradients[-1].tensors.items()}
    one, other = attack.run(view), attack.run(changed(view, tensors=scaled))
    assert one.scores is not None
    assert other.scores is not None
    assert torch.equal(one.scores.topk(20).indices, other.scores.topk(20).indices)


def test_a_model_without_such_maps_is_refused() -> None:
    public = PublicText(texts(4, 1))
    for model in (tiny_bert_mlm(), tiny_llama().requires_grad_(False)):
        with pytest.raises(ThreatModelError, match="remove the attack"):
            RehearsedLabels(public).needs(find_anatomy(model))
    with pytest.raises(ValueError, match="shapes must hold"):
        RehearsedLabels(public, shapes=[])


def test_it_reads_a_fit_live_and_again_when_the_steps_have_doubled(tmp_path: Path) -> None:
    attack = RehearsedLabels(PublicText(texts(40, 1)), shapes=[(ROWS, LENGTH)], rehearsals=36)
    steps: list[int] = []
    prepare = attack.prepare
    attack.prepare = lambda anatomy: (steps.append(1), prepare(anatomy))[1]  # type: ignore
    data = [{"input_ids": ids, "labels": ids} for ids in texts(10, 9)]
    trainer = L.Trainer(
        max_steps=5,
        accelerator="cpu",
        callbacks=[LeakageMonitor([attack], every_n_steps=1, folder=tmp_path)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(CausalLMModule(adapted(moved=False), lr=0.05), DataLoader(data, ROWS))
    lines = map(json.loads, (tmp_path / "leakage.jsonl").read_text().splitlines())
    values = [line["metrics"]["f1"]["value"] for line in lines if line["metrics"]]
    assert len(values) == 5
    assert all(0 < value < 1 for value in values)
    assert len(steps) == 4  # before the first step, and at steps 1, 2 and 4


@pytest.mark.parametrize("make", [tiny_llama, tiny_gpt2])
def test_a_labels_vector_is_the_slope_of_its_logit(make: Callable[[], nn.Module]) -> None:
    """Beside autograd, through the norm, of states whose own norm no change alters."""
    anatomy = find_anatomy(make())
    vectors = rehearsed_labels._label_vectors(anatomy).detach()
    norm = {"llama": "model.norm", "gpt2": "transformer.ln_f"}[anatomy.model.config.model_type]
    x = torch.randn(16, generator=torch.Generator().manual_seed(0))
    x = (x - x.mean()).requires_grad_()
    scale = float(x.detach().square().mean().sqrt())
    logits = anatomy.head(anatomy.model.get_submodule(norm)(x))
    for token in (3, 50):
        (slope,) = torch.autograd.grad(logits[token] - logits.mean(), x, retain_graph=True)
        plain = vectors[token] / scale
        across = torch.stack([x.detach(), torch.ones(16)])  # which the norm takes away
        basis = torch.linalg.qr(across.T).Q
        rest = plain - basis @ (basis.T @ plain)
        seen_rest = slope - basis @ (basis.T @ slope)
        torch.testing.assert_close(seen_rest, rest, rtol=1e-3, atol=1e-5)
