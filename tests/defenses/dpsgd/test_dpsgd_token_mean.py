"""A mean over all labels of the batch: each sample is clipped as its own mean."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from lightning_fedleak.defenses import DPSGD, CanaryGradient, ClipSettings
from tests.defenses.dpsgd.test_dpsgd import CLIP, Net, Run, clipped, data
from tests.defenses.dpsgd.test_dpsgd_per_sample import CLIPPINGS, MODELS, batch_of


def run_of(name: str, clipping: Any = "auto") -> tuple[Run, dict[str, torch.Tensor]]:
    """A run whose loss is what the Hugging Face model returns, and a batch of five."""
    kind, build = MODELS[name]
    run = Run(
        DPSGD(CLIP, noise_multiplier=0.0, clip=ClipSettings(form=clipping)),
        build().double().train(),
        precision="64-true",
    )
    run.loss = lambda b: run.root(**b).loss  # type: ignore[method-assign]
    batch = batch_of(kind)
    batch["labels"][1, 2:] = -100  # one label, or one token that predicts it
    return run, batch


def alone(run: Run, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """(B, P) the gradient of each sample's own mean, one backward each; zero without a label."""
    rows = []
    for i in range(len(batch["labels"])):
        one = {key: value[i : i + 1] for key, value in batch.items()}
        grads = torch.autograd.grad(run.loss(one), run.parameters)
        rows.append(torch.cat([g.flatten() for g in grads]))
    return torch.stack(rows).nan_to_num(0.0)


@pytest.mark.parametrize(
    ("name", "clipping"),
    [
        *(("gpt2 tied", clipping) for clipping in CLIPPINGS),
        ("llama", "ghost"),
        ("bert mlm", "auto"),
        ("gpt2 lora", "per_sample"),
    ],
)
def test_each_sample_is_clipped_as_its_own_mean(name: str, clipping: Any) -> None:
    run, batch = run_of(name, clipping)
    counts = (batch["labels"] != -100).sum(1)
    assert len(counts.unique()) > 2
    expected = clipped(alone(run, batch)).sum(0) / 8
    for _ in range(2):
        run.backward({**batch})
        torch.testing.assert_close(run.release(), expected, rtol=1e-5, atol=1e-7)


def test_canaries_beside_it_are_weighed_alike() -> None:
    run, batch = run_of("gpt2 tied")
    counts = (batch["labels"][:, 1:] != -100).sum(1).double()
    local = torch.randn(5, 2, 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    norms = alone(run, batch).norm(dim=1)[:, None]
    run.backward(batch)
    # As a server's layers get it: a share of the batch's labels.
    shares = (counts / counts.sum())[:, None, None]
    out = run.defense.on_canary(CanaryGradient(local * shares), run.parameters, run.context)
    joint = torch.hypot(local.norm(dim=2), norms)
    expected = local * (CLIP / joint.clamp(min=CLIP))[..., None] / 8
    torch.testing.assert_close(out.samples, expected, rtol=1e-5, atol=1e-7)


def classes_first(run: Run, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    logits = run.root(**{k: v for k, v in batch.items() if k != "labels"}).logits
    return cross_entropy(logits.transpose(1, 2), batch["labels"])


def test_labels_of_two_dimensions_are_known_to_be_in_order() -> None:
    run, batch = run_of("gpt2 tied")
    run.loss = lambda b: classes_first(run, b)  # type: ignore[method-assign]
    expected = clipped(alone(run, batch)).sum(0) / 8
    run.backward({**batch})
    torch.testing.assert_close(run.release(), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("ignored", [[], [1], [1, 3], [0, 1, 2, 3, 4]])
@pytest.mark.parametrize("form", ["two terms", "with a penalty", "unknown order"])
def test_an_answer_that_does_not_count_changes_no_other_examples_gradient(
    form: str, ignored: list[int]
) -> None:
    """As where a span's end was cut off; whether it counts decides neither divisor nor refusal."""
    run = Run(DPSGD(CLIP, noise_multiplier=0.0), Net().double(), precision="64-true")
    x, y = (value[:5] for value in data().tensors)
    first, second = y.clone(), y.roll(1)
    first[ignored] = -100

    def loss(batch: Any) -> torch.Tensor:
        logits = run.root(batch[0])
        if form == "unknown order":
            return cross_entropy(torch.tanh(logits), batch[1])
        if form == "with a penalty":
            return cross_entropy(logits, batch[1]) + 0.1 * logits.square().mean()
        return (cross_entropy(logits, batch[1]) + cross_entropy(logits, batch[2])) / 2

    run.loss = loss  # type: ignore[method-assign]
    rows = []
    for i in range(5):
        logits = run.root(x.double()[i : i + 1])
        term = cross_entropy(
            torch.tanh(logits) if form == "unknown order" else logits, y[i : i + 1]
        )
        own = term * (i not in ignored)
        if form == "with a penalty":
            own = own + 0.1 * logits.square().mean()
        elif form == "two terms":
            own = (own + cross_entropy(logits, second[i : i + 1])) / 2
        rows.append(torch.cat([g.flatten() for g in torch.autograd.grad(own, run.parameters)]))
    run.backward([x.double(), first, second])
    expected = clipped(torch.stack(rows)).sum(0) / 8
    torch.testing.assert_close(run.release(), expected, rtol=1e-5, atol=1e-7)
