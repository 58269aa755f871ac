"""Rules on values that a server sends, against computations of their own."""

from __future__ import annotations

import dataclasses
import math

import pytest
import scipy.stats
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor

from benchmarks.federation.crafted_rows import craft
from lightning_fedleak import PublicText
from lightning_fedleak.federation import inspection, trained_state
from lightning_fedleak.federation.inspection import (
    Agreed,
    LastRound,
    agree,
    inspect_received,
)
from lightning_fedleak.model.anatomy import find_anatomy
from tests.helpers.bottlenecks import EMBEDDING_ADAPTER, adapted_llama, zipf_texts
from tests.helpers.models import tiny_llama

A = "base_model.model.model.layers.0.mlp.up_proj.lora_A.weight"
B = "base_model.model.model.layers.0.mlp.up_proj.lora_B.weight"
DOWN, UP = f"{EMBEDDING_ADAPTER}.down.weight", f"{EMBEDDING_ADAPTER}.up.weight"
BIAS = f"{EMBEDDING_ADAPTER}.down.bias"
TYPES = 400


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def lora(share: float = 0.05) -> tuple[dict[str, Tensor], Agreed]:
    """A LoRA of rank 4 whose product is a small share of its base, as after honest training."""
    base = normal(64, 32)
    state = {A: normal(4, 32, seed=1), B: share * normal(64, 4, seed=2)}
    return state, Agreed(base={A: base}, scales={A: 0.5})


def answer(result: inspection.Inspection, rule: str) -> inspection.Answer:
    return next(a for a in result.answers if a.rule == rule)


@pytest.fixture(scope="module")
def bottleneck():
    """An honest state, a crafted one, and what the honest client agreed."""
    model = adapted_llama(TYPES, width=64, rank=32)
    ids = zipf_texts(300, 16, TYPES)
    crafted = craft(find_anatomy(model), EMBEDDING_ADAPTER, PublicText(ids), 256).tensors
    honest = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
    table = model.model.embed_tokens.weight.detach()
    text = zipf_texts(20, 16, TYPES, seed=5).flatten()
    usual = inspection.sum_inputs(table[text], text, inspection.usual_types(text))
    return honest, {**honest, **crafted}, Agreed(usual={DOWN: usual}, start=honest)


def test_honest_bottleneck_shows_nothing(bottleneck):
    honest, _, agreed = bottleneck
    result = inspect_received(honest, agreed, first=True)
    assert result.verdict == "nothing found"
    assert {a.rule for a in result.answers if a.why} == {
        *("extra", "replaced", "few_rows", "cancelled", "jump")
    }


def test_crafted_bottleneck_is_found_at_the_start_and_by_blind_rows(bottleneck):
    _, crafted, agreed = bottleneck
    result = inspect_received(crafted, agreed, first=True)
    assert {a.rule for a in result.found} == {"start", "blind_rows"}
    assert answer(result, "start").rows[0].startswith(f"{BIAS}[")
    later = inspect_received(crafted, agreed)
    assert {a.rule for a in later.found} == {"blind_rows"}
    assert answer(later, "start").why == "this is not the first round"


def test_thresholds_in_rows_without_a_bias_are_found_at_the_start_alone(bottleneck):
    """All inputs have a part in common, and the product with it stands in for the bias."""
    honest, _, agreed = bottleneck
    state = honest | {DOWN: honest[DOWN] - 3 * normal(64, seed=3) / 64}
    result = inspect_received(state, agreed, first=True)
    assert {a.rule for a in result.found} == {"start"}
    assert answer(result, "start").rows[0].startswith(f"{DOWN}[")
    assert inspect_received(state, agreed).verdict == "nothing found"


def test_rows_of_one_direction_are_named_by_how_much_they_have_of_it():
    rows, common = normal(32, 64), normal(64, seed=1)
    rows[:12] += 2 * common
    share = inspection.shared_direction(rows)
    assert share[:12].min() > 0.8
    assert share[12:].max() < 0.5
    assert not inspection.shared_direction(rows, rows).any()  # it was agreed so


def test_with_a_shared_seed_every_number_is_compared(bottleneck):
    honest, _, agreed = bottleneck
    shared = dataclasses.replace(agreed, shared_seed=True)
    assert inspect_received(honest, shared, first=True).verdict == "nothing found"
    state = honest | {UP: honest[UP].clone()}
    state[UP][3, 2] += 1e-4
    assert answer(inspect_received(state, agreed, first=True), "start").count == 0
    assert answer(inspect_received(state, shared, first=True), "start").rows == (f"{UP}[3]",)


def test_chance_of_a_blind_row_is_above_that_of_the_beta_law():
    d, k = 64, 8
    rows = normal(5, d).double()
    types = torch.arange(k).repeat_interleave(3)
    inputs = normal(len(types), d, seed=1).double()
    means = torch.stack([inputs[types == t].mean(0) for t in range(k)])
    projector = torch.linalg.pinv(means) @ means
    energy = (rows @ projector).square().sum(1) / rows.square().sum(1)
    usual = inspection.sum_inputs(inputs, types, torch.arange(k))
    assert torch.allclose(usual, 3 * means)
    p = 10 ** -inspection.blind_rows(rows, usual)
    chi = (5 * scipy.stats.chi2.cdf((energy * d).numpy(), k)).clip(max=1)
    assert p.numpy() == pytest.approx(chi)
    share = torch.linspace(0.001, k / d, 50, dtype=torch.float64).numpy()
    beta = scipy.stats.beta.cdf(share, k / 2, (d - k) / 2)
    assert (scipy.stats.chi2.cdf(share * d, k) >= beta)[share < 0.5 * k / d].all()


def test_rewritten_rows_equal_those_of_the_product_under_any_rotation():
    state, agreed = lora()
    base, product = agreed.base[A].double(), 0.5 * state[B].double() @ state[A].double()
    ratio = product.norm(dim=1) / base.norm(dim=1)
    cosine = torch.cosine_similarity(-product, base, dim=1) * ratio.clamp(max=1)
    turn = normal(4, 4, seed=7)
    for down, up in ((state[A], state[B]), (turn @ state[A], state[B] @ torch.linalg.inv(turn))):
        computed = inspection.rewritten_rows(
            inspection.Adapter(A, B, down, up), agreed.base[A], 0.5
        )
        assert torch.allclose(computed[0].double(), ratio, rtol=1e-3)
        assert torch.allclose(computed[1].double(), cosine, rtol=1e-3, atol=1e-5)


def test_lora_that_takes_neurons_away_is_found_and_named():
    state, agreed = lora()
    assert inspect_received(state, agreed).verdict == "nothing found"
    state[B][[5, 9]] = 0
    state[B][[5, 9], [0, 1]] = 1.0
    state[A][:2] = -agreed.base[A][[5, 9]] / 0.5
    result = inspect_received(state, agreed)
    assert set(answer(result, "cancelled").rows) == {f"{A}[5]", f"{A}[9]"}
    assert answer(result, "cancelled").value == pytest.approx(1, abs=1e-3)
    assert result.verdict == "crafted"


def test_lora_that_adds_large_rows_is_found_without_a_cancelled_one():
    state, agreed = lora(0.01)
    state[B][7] = 0
    state[B][7, 0] = 5.0
    result = inspect_received(state, agreed)
    assert {a.rule for a in result.found} == {"replaced", "few_rows"}
    assert answer(result, "few_rows").rows == (f"{A}[7]",)


def test_a_diverged_lora_is_not_called_crafted():
    state, agreed = lora(20.0)
    result = inspect_received(state, agreed)
    assert (result.verdict, result.diverged) == ("diverged", (A,))
    assert "diverged" in answer(result, "replaced").why
    state[B][0] = math.nan
    assert inspect_received(state, agreed).diverged == (B,)


def test_lora_that_starts_at_other_values_is_compared_with_these():
    state, agreed = lora(3.0)
    effective = agreed.base[A] + 0.5 * state[B] @ state[A]
    start = Agreed({A: effective}, agreed.scales, start=dict(state))
    result = inspect_received(state, start, first=True)
    assert result.verdict == "nothing found"
    assert answer(result, "replaced").value == pytest.approx(0, abs=1e-2)
    assert inspect_received(state, agreed, first=True).verdict == "crafted"  # B should be 0


def test_equal_rows_are_found_whatever_their_sign_and_bias(bottleneck):
    honest, _, agreed = bottleneck
    state = honest | {DOWN: honest[DOWN].clone(), BIAS: torch.linspace(-1, 1, 32)}
    state[DOWN][4] = -3 * state[DOWN][11]
    outcome = answer(inspect_received(state, agreed), "equal_rows")
    assert set(outcome.rows) == {f"{DOWN}[4]", f"{DOWN}[11]"}


def test_what_was_never_agreed_is_named(bottleneck):
    honest, _, agreed = bottleneck
    state = honest | {"fc.second": torch.ones(1, 8), UP: torch.ones(64, 33)}
    shapes = dataclasses.replace(agreed, shapes={n: t.shape for n, t in honest.items()})
    assert set(answer(inspect_received(state, shapes), "extra").rows) == {"fc.second", UP}
    assert inspect_received(honest | {"fc": torch.ones(1)}, shapes).unread == ("fc",)
    last = LastRound(honest, {})
    assert answer(inspect_received(state, agreed, last), "extra").count == 2


def moved_state(honest: dict[str, Tensor], size: float, seed: int) -> dict[str, Tensor]:
    return {n: size * normal(*t.shape, seed=seed) for n, t in honest.items()}


def test_rows_that_jump_are_found_and_those_of_a_mean_are_not(bottleneck):
    honest, crafted, agreed = bottleneck
    local, other = moved_state(honest, 1e-3, 1), moved_state(honest, 1e-3, 2)
    mean = {n: t + (local[n] + other[n]) / 2 for n, t in honest.items()}
    last = LastRound(honest, local)
    assert answer(inspect_received(mean, agreed, last), "jump").count == 0
    state = mean | {DOWN: mean[DOWN].clone()}
    state[DOWN][[3, 20]] = crafted[DOWN][[3, 20]]
    outcome = answer(inspect_received(state, agreed, last), "jump")
    assert set(outcome.rows) == {f"{DOWN}[3]", f"{DOWN}[20]"}


@pytest.mark.parametrize(("rows", "verdict"), [([3, 20], "crafted"), (slice(None), "diverged")])
def test_rows_that_a_bias_puts_to_sleep_jump(bottleneck, rows, verdict):
    """They would have no gradient, so that what is sent a round later could not be compared."""
    honest, _, agreed = bottleneck
    local, other = moved_state(honest, 1e-3, 1), moved_state(honest, 1e-3, 2)
    state = {n: t + (local[n] + other[n]) / 2 for n, t in honest.items()}
    state[BIAS] = state[BIAS].clone()
    state[BIAS][rows] = -10.0
    assert inspect_received(state, agreed, LastRound(honest, local)).verdict == verdict


def test_rows_that_were_dead_for_this_client_alone_do_not_jump():
    """Its own update of them is decay; other clients moved them as all others were moved."""
    names = [f"layers.{i}.{part}" for i in range(3) for part in ("down.weight", "up.weight")]
    shapes = [(8, 64), (64, 8)] * 3
    state = {n: normal(*s, seed=i) for i, (n, s) in enumerate(zip(names, shapes, strict=True))}
    state |= {f"layers.{i}.down.bias": torch.zeros(8) for i in range(3)}
    local, other = moved_state(state, 1e-3, 10), moved_state(state, 1e-3, 11)
    local[names[0]] = -1e-6 * state[names[0]]
    change = {n: (local[n] + other[n]) / 2 for n in state}
    sent = {n: t + change[n] for n, t in state.items()}
    outcome = answer(inspect_received(sent, Agreed(), LastRound(state, local)), "jump")
    assert (outcome.count, outcome.unasked) == (0, (names[0],))
    sent[names[2]][5] *= -1
    outcome = answer(inspect_received(sent, Agreed(), LastRound(state, local)), "jump")
    assert outcome.rows == (f"{names[2]}[5]",)


@pytest.mark.parametrize("growth", [1.0, 2.5])
def test_a_jump_is_away_from_ones_own_update_which_the_opposite_is(growth):
    """Rows along one's own, against it, across it, and smaller ones, by a loop in float64."""
    update = normal(9, 40, seed=3)
    change = update.clone()
    change[:3] *= torch.tensor([3.0, -3.0, -0.5])[:, None]
    change[3:] = 5 * normal(6, 40, seed=4)
    scores = inspection.jumps(change, update, growth)
    sizes = [float(row.double().norm()) for row in update]
    usual = growth * max(1.5 * sorted(sizes)[4], max(sizes))
    for row, local, size, score in zip(change, update, sizes, scores.tolist(), strict=True):
        norm = float(row.double().norm())
        cosine = float(row.double() @ local.double()) / norm / size
        expected = norm / usual if cosine < 0.2 and norm > size else 0.0
        assert score == pytest.approx(expected, rel=1e-5)
    assert scores[1] > 0 == scores[0] == scores[2]


def test_a_row_that_was_turned_around_is_found(bottleneck):
    honest, _, agreed = bottleneck
    local = moved_state(honest, 1e-3, 1)
    sent = {n: t + local[n] for n, t in honest.items()}
    sent[DOWN][7] = honest[DOWN][7] - 40 * local[DOWN][7]
    sent[BIAS][7] = honest[BIAS][7] - 40 * local[BIAS][7]
    outcome = answer(inspect_received(sent, agreed, LastRound(honest, local)), "jump")
    assert outcome.rows == (f"{DOWN}[7]",)


def test_no_jump_is_judged_of_a_lora_whose_b_was_zero():
    state, agreed = lora()
    before = state | {B: torch.zeros(64, 4)}
    last = LastRound(before, {n: 1e-3 * torch.ones_like(t) for n, t in state.items()})
    assert (
        "hardly moved the rows of any adapter"
        in answer(inspect_received(state, agreed, last), "jump").why
    )


# ---- what a rule could not be asked of -------------------------------------------------------


def two_loras() -> tuple[dict[str, Tensor], Agreed, str, str]:
    """Two honest LoRAs, with the base and scale of the first alone, and the names of the second."""
    state, agreed = lora()
    other_a, other_b = (name.replace("layers.0", "layers.1") for name in (A, B))
    return state | {other_a: state[A] + 1, other_b: state[B] + 1}, agreed, other_a, other_b


def unasked(result: inspection.Inspection) -> dict[str, set[str]]:
    return {a.rule: set(a.unasked) for a in result.answers if a.unasked}


def test_loras_without_a_base_are_named_beside_what_the_rules_say_of_the_others():
    state, agreed, other, _ = two_loras()
    result = inspect_received(state, agreed)
    assert unasked(result) == {rule: {other} for rule in ("replaced", "few_rows", "cancelled")}
    alone = inspect_received({A: state[A], B: state[B]}, agreed)
    assert unasked(alone) == {}
    for rule in ("replaced", "few_rows", "cancelled"):
        assert answer(result, rule).value == answer(alone, rule).value
        assert not answer(result, rule).why
    without = inspect_received(state, Agreed())
    assert set(answer(without, "cancelled").unasked) == {A, other}
    assert "are known" in answer(without, "cancelled").why


def test_matrices_whose_rows_are_not_compared_are_named(monkeypatch):
    state = {"wide.weight": normal(20, 32), "narrow.weight": normal(20, 15)}
    state |= {f"{name}.bias": torch.zeros(20) for name in ("wide", "narrow")}
    result = inspect_received(state, Agreed())
    assert unasked(result)["equal_rows"] == {"narrow.weight"}
    assert not answer(result, "equal_rows").why
    monkeypatch.setattr(inspection, "MOST_ROWS", 19)
    result = inspect_received(state, Agreed())
    assert unasked(result)["equal_rows"] == {"wide.weight", "narrow.weight"}
    assert "too large" in answer(result, "equal_rows").why


def test_neurons_of_a_conv1d_are_its_columns():
    """As in transformers' GPT-2: the weight is (in, out)."""
    weight = normal(32, 20)
    weight[:, 4] = -3 * weight[:, 11]
    outcome = answer(
        inspect_received({"fc.weight": weight, "fc.bias": torch.zeros(20)}, Agreed()), "equal_rows"
    )
    assert set(outcome.rows) == {"fc.weight[4]", "fc.weight[11]"}


def test_adapters_whose_change_is_not_compared_are_named():
    state, agreed, other, _ = two_loras()
    update = {name: 1e-3 * normal(*tensor.shape) for name, tensor in state.items()}
    last = LastRound(state, update)
    shift = {name: tensor + update[name] for name, tensor in state.items()}
    assert "jump" not in unasked(inspect_received(shift, agreed, last))
    assert "jump" not in unasked(inspect_received(shift, agreed))  # there is no round before
    still = LastRound(state, update | {other: torch.zeros_like(state[other])})
    result = inspect_received(shift, agreed, still)
    assert unasked(result)["jump"] == {other}
    assert not answer(result, "jump").why
    far = {name: tensor + 10 * update[name] for name, tensor in state.items()}
    idle = LastRound(state, {name: torch.zeros_like(tensor) for name, tensor in state.items()})
    for all_unasked in (inspect_received(shift, agreed, idle), inspect_received(far, agreed, last)):
        assert unasked(all_unasked)["jump"] == {A, other}
        assert answer(all_unasked, "jump").why


@pytest.mark.parametrize("start", [True, "pissa", "olora"])
def test_base_and_scale_of_a_lora_are_those_of_peft(start: bool | str) -> None:
    base = tiny_llama()
    before = base.model.layers[0].mlp.up_proj.weight.detach().clone()
    config = LoraConfig(r=4, lora_alpha=6, target_modules=["up_proj"], init_lora_weights=start)
    model = get_peft_model(base, config)
    agreed = agree(model)
    name = "base_model.model.model.layers.0.mlp.up_proj.lora_A.default.weight"
    assert torch.allclose(agreed.base[name], before, atol=1e-5)
    assert agreed.scales[name] == 6 / 4
    assert agreed.start is not None
    assert agreed.start.keys() == trained_state(model).keys()
