"""A logical batch in pieces, without Lightning; clipping, rounding of sums, token means."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.functional import cross_entropy
from transformers import BatchEncoding

from lightning_fedleak.defenses import (
    DPSGD,
    CanaryGradient,
    ClipSettings,
    DefenseError,
    mean_of_sample_means,
)
from lightning_fedleak.defenses.dpsgd import loss_graph
from lightning_fedleak.defenses.dpsgd.logical import _combine, pieces_of
from lightning_fedleak.defenses.processes import Team
from tests.defenses.dpsgd.test_dpsgd import CLIP, Net, Pieces, Run, clipped, data, first
from tests.defenses.dpsgd.test_dpsgd_per_sample import CLIPPINGS, MODELS, batch_of
from tests.helpers.dpsgd_settings import grouped
from tests.helpers.models import tiny_gpt2


def quiet(most: int | None = 5, **settings: Any) -> DPSGD:
    settings = {"noise_multiplier": 0.0, "max_physical_batch_size": most, **settings}
    return DPSGD(CLIP, **grouped(**settings))


class Fields(NamedTuple):
    ids: Tensor
    names: list[str]


def test_rows_of_a_batch_are_those_of_everything_that_has_one_for_each_sample() -> None:
    ids = torch.arange(14).view(7, 2)
    batch = {
        "encoded": BatchEncoding({"input_ids": ids}),
        "fields": Fields(ids + 1, [*"abcdefg"]),
        "pair": (ids, [ids]),
        "array": np.arange(7),
        "scale": torch.tensor(2.0),
        "task": "sst2xyz",
        "classes": ["no", "yes"],
    }
    pieces = pieces_of(batch, 7, 3, Team())
    assert [piece.rows for piece in pieces] == [3, 3, 1]
    second = pieces[1].batch
    assert type(second["encoded"]) is BatchEncoding
    assert torch.equal(second["encoded"]["input_ids"], ids[3:6])
    assert type(second["fields"]) is Fields
    assert torch.equal(second["fields"].ids, ids[3:6] + 1)
    assert second["fields"].names == ["d", "e", "f"]
    assert torch.equal(second["pair"][1][0], ids[3:6])
    assert second["array"].tolist() == [3, 4, 5]
    assert float(second["scale"]) == 2.0
    assert second["task"] == "sst2xyz"
    assert second["classes"] == ["no", "yes"]
    assert [piece.batch is batch for piece in pieces_of(batch, 7, 7, Team())] == [True]
    assert [piece.rows for piece in pieces_of(batch, 0, 3, Team())] == [0]


@pytest.mark.parametrize("samples", [0, 2])
def test_spare_pieces_are_objects_of_their_own(samples: int) -> None:
    batch = {"ids": torch.arange(max(1, samples)), "labels": [torch.ones(max(1, samples))]}
    team = Team()
    team.largest = lambda values: [4.0 for _ in values]  # its peers need 4 pieces
    pieces = pieces_of(batch, samples, 1, team)
    assert [piece.rows for piece in pieces] == [1] * samples + [0] * (4 - samples)
    for piece in pieces:
        assert piece.batch.pop("labels")[0].shape == piece.batch["ids"].shape == (1,)
    assert "labels" in batch


def test_what_training_step_gives_is_put_together_by_rows() -> None:
    given = [
        {"loss": torch.tensor(1.0), "rows": torch.ones(3, 2), "odd": torch.ones(2), "n": 3},
        {"loss": torch.tensor(5.0), "rows": torch.zeros(1, 2), "odd": torch.zeros(2), "n": 1},
    ]
    result = _combine(None, given[0], 0, 3, 4)
    result = _combine(result, given[1], 3, 1, 4)
    assert float(result["loss"]) == 2.0
    assert result["rows"].tolist() == [[1.0, 1.0]] * 3 + [[0.0, 0.0]]
    assert result["odd"].tolist() == [0.0, 0.0]
    assert result["n"] == 1


def test_many_pieces_in_half_precision_add_up() -> None:
    """In bfloat16 what comes after the 256th piece would be lost in the local gradient."""

    class Half(Pieces):
        def loss(self, batch: Any) -> Tensor:
            return F.cross_entropy(self.root(batch[0]).float(), batch[1])

    n = 300
    batch = [torch.ones(n, 6).bfloat16(), torch.zeros(n, dtype=torch.long)]
    run = Half(quiet(1), root=Net().bfloat16(), precision="bf16-true")
    expected = run.one_by_one([value[:1] for value in batch])[0].float()
    run.backward(batch)
    local = run.update().float()
    assert float((local - expected).norm() / expected.norm()) < 0.01
    run.release()
    assert run.defense.releases == 1


def test_a_canary_joins_the_norms_of_all_pieces() -> None:
    batch = first(12)
    generator = torch.Generator().manual_seed(2)
    canary = CanaryGradient(torch.randn(12, 3, 40, generator=generator) * 0.01)
    result = []
    for most in (5, None):
        run = Pieces(quiet(most))
        run.backward(batch)
        result.append(run.defense.on_canary(canary, run.parameters, run.context).samples)
        single = run.one_by_one(batch)
    torch.testing.assert_close(*result, rtol=1e-5, atol=1e-9)
    joint = torch.cat([single, 12 * canary.samples[:, 0]], dim=1)
    expected = clipped(joint)[:, single.shape[1] :] / 8
    torch.testing.assert_close(result[0][:, 0], expected, rtol=1e-4, atol=1e-8)
    with pytest.raises(DefenseError, match="canary has 5 samples, and the batch 12"):
        run.defense.on_canary(CanaryGradient(torch.ones(5, 1, 2)), run.parameters, run.context)


def test_what_the_layers_do_not_explain_is_seen_in_any_piece() -> None:
    class Beside(Pieces):
        def loss(self, batch: Any) -> Tensor:
            hidden = self.root(batch[0])
            if self.sizes and len(self.sizes) == 2:
                hidden = hidden + torch.tanh(batch[0]) @ self.root.below.weight.T[:, :3]
            return F.cross_entropy(hidden, batch[1])

    run = Beside(quiet(4, loss="trusted"))
    with pytest.raises(DefenseError, match="not the sum of its recorded per-sample gradients"):
        run.step(first(12))
    assert run.defense.releases == 0


def test_a_batch_is_drawn_and_released_once_also_in_pieces() -> None:
    run = Pieces(quiet(4, noise_multiplier=1.0))
    batch = first(12)
    run.step(batch)
    with pytest.raises(DefenseError, match="released already"):
        run.step(batch)
    run = Pieces(quiet(4, noise_multiplier=1.0))
    run.backward(first(12))
    with pytest.raises(DefenseError, match="max_physical_batch_size"):
        run.backward(first(12))


# Automatic clipping: sums against brute force, sensitivity, noise, account.


GAMMA = 0.01
FORMS: dict[str, tuple[dict[str, Any], float, float | None]] = {
    "fixed": ({"max_grad_norm": 0.4}, 0.4, None),
    "auto": ({"max_grad_norm": "auto"}, 1.0, GAMMA),
    "gamma": ({"max_grad_norm": "auto", "gamma": 0.5}, 1.0, 0.5),
}
"""Settings; to what norm they clip; gamma of automatic clipping."""


def brute(run: Run, batch: Any, name: str) -> Tensor:
    """(B, d) clipped gradients, each sample by itself, in float64."""
    _, clip, gamma = FORMS[name]
    gradients = run.one_by_one(batch).double()
    norm = gradients.norm(dim=1, keepdim=True)
    return gradients * (clip / norm.clamp(min=clip) if gamma is None else clip / (norm + gamma))


@pytest.mark.parametrize(("samples", "most", "pieces"), [(1, 5, 1), (12, None, 1), (12, 5, 3)])
@pytest.mark.parametrize("form", ["auto", "per_sample", "ghost"])
@pytest.mark.parametrize("name", FORMS)
def test_clipped_sums_are_those_of_brute_force(
    name: str, form: Any, samples: int, most: int | None, pieces: int
) -> None:
    settings = grouped(form=form, **FORMS[name][0])
    run = Pieces(DPSGD(noise_multiplier=0.0, max_physical_batch_size=most, **settings))
    batch = first(samples)
    batch[0] = batch[0] * torch.logspace(-3, 6, samples)[:, None]
    expected = brute(run, batch, name).sum(0) / 8
    result = run.step(batch).double()
    assert float((result - expected).norm() / expected.norm()) < 1e-6
    assert (len(run.sizes), run.defense.releases) == (pieces, 1)


@pytest.mark.parametrize("name", ["auto", "gamma"])
def test_noise_is_accounted_as_one_gaussian_of_the_noise_multiplier(name: str) -> None:
    settings, clip, _ = FORMS[name]
    sigma = 1.7
    defense = DPSGD(
        noise_multiplier=sigma, target_delta=1e-3, accountant="rdp", **grouped(**settings)
    )
    run = Run(defense)
    noise = torch.cat([8 * run.step(first(0), lr=1e-3).double() for _ in range(250)])
    assert float(noise.std()) == pytest.approx(sigma * clip, rel=6 / math.sqrt(2 * len(noise)))
    assert defense.accountant.history == ((sigma, 0.2, 250),)
    assert defense.measured_noise_multiplier == pytest.approx(sigma, rel=0.35)
    assert defense.noise_std(run.context) == pytest.approx(sigma * clip / 8, rel=1e-9)


def test_a_canary_is_clipped_automatically_too() -> None:
    run, batch = Run(DPSGD("auto", noise_multiplier=0.0)), first(5)
    local = run.one_by_one(batch)
    run.backward(batch)
    canary = CanaryGradient(torch.randn(5, 2, 30, generator=torch.Generator().manual_seed(1)))
    result = run.defense.on_canary(canary, run.parameters, run.context).samples
    joint = torch.cat([local, 5 * canary.samples[:, 0]], 1)
    expected = 5 * canary.samples[:, 0] / (joint.norm(dim=1, keepdim=True) + GAMMA) / 8
    torch.testing.assert_close(result[:, 0], expected, rtol=1e-4, atol=1e-8)


# The comparison with autograd where products are rounded: no example's content stops a run.


LAYER = "transformer.h.0.mlp.c_fc.weight"
ACROSS = [16, 17, 27, 56, 73, 165, 186, 190, 212, 226, 246, 293]
"""Rows with a gradient that lies across the random direction along which it is compared."""


def in_bf16(
    defense: DPSGD | None = None,
    precision: str = "bf16-mixed",
    root: nn.Module | None = None,
    **model: float,
) -> Pieces:
    root = (root or tiny_gpt2(**model)).train()  # type: ignore[arg-type]
    run = Pieces(defense or DPSGD(CLIP, 0.0), root=root, precision=precision)

    def loss(batch: dict[str, Tensor]) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return run.root(**batch).loss  # type: ignore[no-any-return]

    run.loss = loss  # type: ignore[method-assign]
    return run


def rows(*numbers: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    vocabulary = tiny_gpt2().config.vocab_size
    ids = torch.randint(5, vocabulary, (300, 12), generator=generator)[list(numbers)]
    return {"input_ids": ids, "labels": ids}


def test_no_ordinary_row_stops_a_run_in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_graph, "CHECK_EVERY", 1)
    run = in_bf16()
    for number in ACROSS:
        run.backward(rows(number))
        run.release()
    assert run.defense.releases == len(ACROSS)


@pytest.mark.parametrize("factor", [0.0, 1.3, 2.0])
@pytest.mark.parametrize("samples", [1, 32])
def test_a_hook_that_changes_a_gradient_is_noticed_in_bf16(factor: float, samples: int) -> None:
    run = in_bf16()
    run.root.get_parameter(LAYER).register_hook(lambda gradient: factor * gradient)
    run.backward(rows(*range(samples)))
    with pytest.raises(DefenseError, match="is not the sum of its recorded per-sample gradients"):
        run.release()


@pytest.mark.parametrize("precision", ["highest", "high"])
def test_products_that_a_card_may_round_are_compared_less_closely(precision: str) -> None:
    """What TF32 may do to a gradient is too much of a difference in float32."""
    run = Run(DPSGD(CLIP, noise_multiplier=0.0))
    run.root.above.weight.register_hook(lambda gradient: 1.03 * gradient)
    run.backward(first(5))
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        if precision == "highest":
            with pytest.raises(DefenseError, match=r"'above\.weight' is not the sum"):
                run.release()
        else:
            run.release()
    finally:
        torch.set_float32_matmul_precision(before)


def check_removal(total: Callable[..., Tensor], clip: float = CLIP) -> None:
    """Of 33 rows, one that is removed takes away its own clipped gradient, and no more."""
    whole = total(*range(33))
    for removed in (0, 32):
        rest = total(*(number for number in range(33) if number != removed))
        assert float((whole - rest - total(removed)).norm()) < 1e-3 * clip
        assert float((whole - rest).norm()) < (1 + 1e-3) * clip


@pytest.mark.parametrize("form", ["sample means", "token mean"])
@pytest.mark.parametrize("most", [None, 7])
def test_a_row_that_is_removed_leaves_the_others_as_they_were(form: str, most: int | None) -> None:
    """With a mean over 33 rows each of them was rounded otherwise than in one over 32."""
    run = in_bf16(DPSGD(CLIP, 0.0, max_physical_batch_size=most), dropout=0.0)
    batch = rows(*range(33))
    batch["labels"] = batch["labels"].clone()
    for number, length in enumerate(torch.arange(33) % 10 + 2):
        batch["labels"][number, int(length) :] = -100

    def loss(given: dict[str, Tensor]) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            if form == "token mean":
                return run.root(**given).loss  # type: ignore[no-any-return]
            logits = run.root(input_ids=given["input_ids"]).logits
            return mean_of_sample_means(logits, given["labels"], causal=True)

    run.loss = loss  # type: ignore[method-assign]

    def clipped_sum(*numbers: int) -> Tensor:
        run.backward({key: value[list(numbers)] for key, value in batch.items()})
        return run.release().double() * 8

    check_removal(clipped_sum)


def exact_sum(run: Pieces, batch: dict[str, Tensor]) -> Tensor:
    """Return the clipped sum of a step, (d,) float64, before it is stored in the weights' type."""
    run.backward(batch)
    clipped = run.defense._step.clipped(run.parameters, run.context)
    total = torch.cat([clipped.sum_of(p).double().flatten() for p in run.parameters])
    run.release()
    return total


@pytest.mark.parametrize("half", ["weights", "autocast"])
def test_removal_holds_where_no_precision_flag_says_half(half: str) -> None:
    """Lightning calls it 32-true where weights are in bf16, or training_step has an autocast."""
    run = in_bf16(precision="32-true", dropout=0.0)
    if half == "weights":
        run = Pieces(DPSGD(CLIP, 0.0), root=run.root.bfloat16(), precision="32-true")
        run.loss = lambda batch: run.root(**batch).loss  # type: ignore[method-assign]
    check_removal(lambda *numbers: exact_sum(run, rows(*numbers)))


# A mean over all labels of the batch: each sample is clipped as its own mean.


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
