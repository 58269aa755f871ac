"""A mean over all labels of the batch: each sample is clipped as its own mean."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_fedleak.defenses import DPSGD, CanaryGradient, ClipSettings
from tests.defenses.dpsgd.test_dpsgd import CLIP, Run, clipped
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
