"""A sample whose gradient holds NaN or infinity counts as zero, and nothing else changes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_fedleak.defenses import DPSGD, CanaryGradient, ClipSettings, mean_of_sample_means
from lightning_fedleak.defenses.dpsgd import per_sample
from tests.defenses.dpsgd.test_dpsgd import CLIP, Net, Run, clipped, first
from tests.defenses.dpsgd.test_dpsgd_per_sample import CLIPPINGS, MODELS, batch_of, loss_of
from tests.defenses.dpsgd.test_dpsgd_silent import IDS, Rows, Words, noisy, side_by_side

BROKEN = 2


def spoilt(value: float, samples: int = 5) -> list[Tensor]:
    """A batch in which one sample holds ``value``."""
    x, y = first(samples)
    x = x.clone()
    x[BROKEN, 1] = value
    return [x, y]


def without(batch: list[Tensor]) -> list[Tensor]:
    keep = torch.arange(len(batch[0])) != BROKEN
    return [value[keep] for value in batch]


class Deep(Net):
    """Something of a sample's own value that NaN and overflow pass on their way back."""

    def forward(self, x: Tensor) -> Tensor:
        return self.above(self.below(x).square())


@pytest.mark.parametrize("clipping", CLIPPINGS)
@pytest.mark.parametrize(
    ("model", "value"), [(Net, math.nan), (Net, math.inf), (Deep, math.nan), (Deep, 1e22)], ids=str
)
def test_a_broken_sample_counts_as_zero(model: Any, value: float, clipping: Any) -> None:
    batch = spoilt(value)
    root = model()
    run = Run(DPSGD(CLIP, noise_multiplier=0.0, clip=ClipSettings(form=clipping)), root)
    run.loss = lambda b: run.root(b[0]).square().mean(1).mean()  # type: ignore[method-assign]
    expected = clipped(run.one_by_one(without(batch))).sum(0) / 8
    for _ in range(2):
        run.backward([*batch])
        torch.testing.assert_close(run.release(), expected, rtol=1e-5, atol=1e-8)
    assert run.defense.releases == run.defense.accountant.steps == 2


def test_a_finite_gradient_of_an_infinite_norm_counts_as_zero() -> None:
    run = Run(DPSGD(CLIP, noise_multiplier=0.0), nn.Sequential(nn.Linear(6, 3)))
    run.loss = lambda b: run.root(b[0]).mean(1).mean()  # type: ignore[method-assign]
    batch = spoilt(1e25)
    expected = clipped(run.one_by_one(without(batch))).sum(0) / 8
    run.backward(batch)
    assert all(bool(p.grad.isfinite().all()) for p in run.parameters)
    torch.testing.assert_close(run.release(), expected, rtol=1e-5, atol=1e-8)


def test_a_batch_of_broken_samples_releases_noise_alone() -> None:
    run = Run(DPSGD(CLIP, noise_multiplier=0.0))
    x, y = first(3)
    assert not bool(run.step([x * math.nan, y]).any())
    run = Run(DPSGD(CLIP, noise_multiplier=1.0))
    assert bool(run.step([x * math.nan, y]).isfinite().all())


def spoils(model: nn.Module, sample: int) -> Any:
    """Lets one sample's numbers be NaN behind the first layer of words."""

    def hook(_: nn.Module, args: Any, output: Tensor) -> Tensor:
        scale = torch.ones(len(output), *[1] * (output.dim() - 1))
        scale[sample] = math.nan
        return output * scale

    words = next(m for m in model.modules() if isinstance(m, nn.Embedding))
    return words.register_forward_hook(hook)


@pytest.mark.parametrize(
    ("name", "clipping"),
    [
        *(("gpt2 tied", clipping) for clipping in CLIPPINGS),
        *(("gpt2 lora", clipping) for clipping in CLIPPINGS[1:]),
        ("gpt2 checkpointed", "auto"),
        ("llama", "ghost"),
        ("bert mlm", "auto"),
        ("gpt2 prompt tuning", "ghost"),
    ],
)
def test_nan_in_one_sample_reaches_no_other(name: str, clipping: Any) -> None:
    """Against one backward pass for each of the others, in float64 (Llama's norms are float32)."""
    kind, build = MODELS[name]
    model = build().double().train()
    run = Run(
        DPSGD(CLIP, noise_multiplier=0.0, clip=ClipSettings(form=clipping)),
        model,
        precision="64-true",
    )
    batch, loss = batch_of(kind), loss_of(kind)
    rows = []
    for i in [i for i in range(5) if i != BROKEN]:
        alone = loss(model, {key: value[i : i + 1] for key, value in batch.items()})
        rows.append(torch.cat([g.flatten() for g in torch.autograd.grad(alone, run.parameters)]))
    expected = clipped(torch.stack(rows)).sum(0) / 8
    handle = spoils(model, BROKEN)
    run.loss = lambda b: loss(model, b)  # type: ignore[method-assign]
    run.backward(batch)
    handle.remove()
    assert any(bool(p.grad.isnan().any()) for p in run.parameters)
    torch.testing.assert_close(run.release(), expected, rtol=1e-6, atol=1e-8)


def test_a_broken_sample_adds_nothing_to_a_canary() -> None:
    run = Run(DPSGD(CLIP, noise_multiplier=0.0))
    local = torch.randn(5, 2, 3, generator=torch.Generator().manual_seed(3))
    local[BROKEN, 0] = math.inf
    run.backward(spoilt(math.nan))
    with_it = run.defense.on_canary(CanaryGradient(local), run.parameters, run.context)
    assert not bool(with_it.samples[BROKEN].any())
    run.release()
    run.backward(without(first(5)))
    keep = torch.arange(5) != BROKEN
    alone = run.defense.on_canary(CanaryGradient(local[keep] * 5 / 4), run.parameters, run.context)
    torch.testing.assert_close(with_it.released, alone.released)


class Uneven(Net):
    """Its slope is infinite where a sample's first number is 0, and meets others' zeros."""

    def forward(self, x: Tensor) -> Tensor:
        return self.above((self.below(x) * x[:, :1]).abs().sqrt())


def test_a_look_at_the_graph_does_not_stop_at_one_samples_infinite_slope() -> None:
    run = Run(DPSGD(CLIP, noise_multiplier=0.0), Uneven())
    batch = first(5)
    batch[0][0, 0] = 0.0
    run.step(batch)
    assert run.defense.releases == 1


@pytest.mark.parametrize("clipping", CLIPPINGS)
def test_a_broken_sample_makes_no_copy_of_the_others(
    clipping: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy took a third of the step, so that its time told which batch held the sample."""
    summed, views = per_sample.weighted_sum, []

    def looked_at(parts: Any, *args: Any) -> Tensor:
        views.extend(value for part in parts for value in vars(part).values())
        return summed(parts, *args)

    monkeypatch.setattr(per_sample, "weighted_sum", looked_at)
    run = Run(DPSGD(CLIP, noise_multiplier=0.0, clip=ClipSettings(form=clipping)))
    for batch, rows in ((first(5), [5]), (spoilt(math.nan), [2, 2])):
        views.clear()
        run.backward(batch)
        kept = run.defense._fit_step.clipped(run.parameters, run.context).parts.values()
        values = [value for parts in kept for part in parts for value in vars(part).values()]
        storages = {value.untyped_storage().data_ptr() for value in values}
        run.release()
        assert {len(view) for view in views} == {*rows}
        assert len(views) == len(values) * len(rows)
        assert {view.untyped_storage().data_ptr() for view in views} <= storages


def test_a_look_that_a_broken_sample_hides_is_taken_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient that layers do not explain is looked for again soon, whatever a look showed."""

    class Again(nn.Linear):
        """It is run again for its gradients, so that its uses are not counted."""

    class Twice(Net):
        def __init__(self) -> None:
            super().__init__()
            self.below, self.above = Again(6, 8), Again(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + nn.functional.linear(
                nn.functional.linear(x, self.below.weight), self.above.weight
            )

    run = Run(noisy(loss="trusted"), Twice())
    run.step(spoilt(math.nan))
    with pytest.raises(Exception, match="is not the sum of its recorded per-sample gradients"):
        run.step(first(5))
    assert run.defense.releases == 1


# ---- refusals that one example's content could provoke -------------------------------------------


def test_an_example_that_looks_like_positions_stops_nothing() -> None:
    class Placed(Words):
        def __init__(self) -> None:
            super().__init__()
            self.places = nn.Embedding(6, 8)

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(torch.tanh(self.words(ids) + self.places(torch.arange(6)[None])))

    run = Run(noisy(), Placed())
    run.loss = lambda b: mean_of_sample_means(run.root(b[0]), b[0], causal=True)  # type: ignore[method-assign]
    ids = IDS.clone()
    ids[1] = torch.arange(6)
    run.step([ids])
    assert run.defense.releases == 1


@pytest.mark.parametrize("like", [0, 3])
@pytest.mark.parametrize("samples", [2, 5])
def test_an_example_that_reads_like_anothers_second_row_stops_nothing(
    like: int, samples: int
) -> None:
    run = Rows(side_by_side)
    ids = IDS[:samples].clone()
    ids[1] = ids[like % samples].flip(0)
    run.step([ids])
    assert run.defense.releases == 1
