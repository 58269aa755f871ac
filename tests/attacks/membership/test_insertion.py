from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_fedleak.attacks.membership.fc import FCMembership
from lightning_fedleak.attacks.membership.insertion import Inserted, direction_of, upstream_of
from lightning_fedleak.model.anatomy import Anatomy, find_anatomy
from lightning_fedleak.model.anatomy.blocks import text_blocks
from lightning_fedleak.model.model_runs import hidden_states
from lightning_fedleak.model.taps.activations import ActivationTap
from tests.callbacks.runs import fit
from tests.helpers.lightning_modules import CausalLMModule
from tests.helpers.models import (
    DIM,
    VOCAB,
    own_rng,
    tiny_bert_mlm,
    tiny_distilbert_mlm,
    tiny_gpt2,
    tiny_llama,
    tiny_roberta_mlm,
    tiny_t5,
)

MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt2": lambda: tiny_gpt2(layers=3, dropout=0.0),
    "llama": lambda: tiny_llama(layers=3),
    "bert": lambda: tiny_bert_mlm(layers=3, dropout=0.0),
    "distilbert": lambda: tiny_distilbert_mlm(layers=3, dropout=0.0),
    "roberta": lambda: tiny_roberta_mlm(layers=3, dropout=0.0),
    "t5 encoder": lambda: tiny_t5(layers=3, dropout=0.0),
}
LADDER = (0.1, 1.0, 4.0, 10.0, 30.0, 60.0, 80.0, 90.0, 200.0)


def batch(seed: int = 1, b: int = 4, length: int = 7) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCAB, (b, length), generator=generator)
    ends = torch.randint(3, length + 1, (b, 1), generator=generator)
    ends[0] = length
    mask = (torch.arange(length) < ends).long()
    return {
        "input_ids": ids * mask,
        "attention_mask": mask,
        "labels": ids.masked_fill(mask == 0, -100),
    }


def attack_and_target(
    anatomy: Anatomy,
    layer: int,
    granularity: str,
    inputs: dict[str, Tensor],
    ladder: tuple[float, ...] = LADDER,
) -> tuple[FCMembership, Tensor]:
    """Its widest rungs reach many tokens of the batch, and its target is one of them."""
    attack = FCMembership(
        layer, granularity, tau=1.0, dead_zone=1e-9, ladder=ladder, tokens=5, name="fc"
    )
    hidden = hidden_states(anatomy, layer, inputs["input_ids"], inputs["attention_mask"])
    target = hidden[2, 1] if granularity == "token" else hidden[2, :5].reshape(-1)
    if granularity == "full":
        real = inputs["attention_mask"][2, :5, None].to(hidden)
        target = (hidden[2, :5] * real).reshape(-1)
    return attack, target


class Seen:
    """What an inserted run shows: hidden states read, and the gradient where they are added to."""

    def __init__(self, handle: Inserted) -> None:
        self.hidden: list[Tensor] = []
        self.delta: list[Tensor] = []
        self.mask: list[Tensor | None] = []
        handle.inside.register_forward_hook(self._hook)

    def _hook(self, _: nn.Module, args: tuple[Any, ...], mixed: Tensor) -> None:
        self.hidden.append(args[0].detach())
        self.mask.append(args[1])
        mixed.register_hook(lambda g: self.delta.append(g.detach()))


@pytest.mark.parametrize("granularity", ["token", "full"])
@pytest.mark.parametrize("name", MODELS)
def test_closed_form_is_the_gradient_of_autograd(name: str, granularity: str) -> None:
    model = MODELS[name]().double().train()
    anatomy = find_anatomy(model)
    inputs = batch()
    for layer in (0, 2):
        attack, target = attack_and_target(anatomy, layer, granularity, inputs)
        with Inserted(anatomy, layer, attack.craft(target), scale=0.7) as handle:
            observed = Seen(handle)
            model(**inputs).loss.backward()
            assert torch.equal(observed.mask[0], inputs["attention_mask"])
            expected = hidden_states(anatomy, layer, inputs["input_ids"], inputs["attention_mask"])
            torch.testing.assert_close(observed.hidden[0], expected, rtol=1e-12, atol=1e-14)
            upstream = upstream_of(
                observed.delta[0],
                handle.inside.direction,
                handle.inside.scale,
                whole_sentence=granularity == "full",
                mask=inputs["attention_mask"],
            )
            closed = attack.gradient(
                target[None], observed.hidden[0], inputs["attention_mask"], upstream
            ).sum(0)[0]
            assert closed.abs().min() > 0
            assert len(closed.unique()) > 1
            torch.testing.assert_close(handle.bias.grad, closed, rtol=1e-10, atol=0)


@pytest.mark.parametrize("granularity", ["token", "full"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_the_clean_run_gives_it_where_little_is_added(name: str, granularity: str) -> None:
    model = MODELS[name]().double().train()
    anatomy = find_anatomy(model)
    inputs = batch()
    layer, scale = 1, 1e-18
    attack, target = attack_and_target(anatomy, layer, granularity, inputs)
    tap = ActivationTap(anatomy, [1, 2])
    tap.arm()
    model(**inputs).loss.backward()
    hidden = tap.states(1)[0]
    (delta,) = tap.gradients(1)
    tap.close()
    upstream = upstream_of(
        delta,
        direction_of(DIM),
        scale,
        whole_sentence=granularity == "full",
        mask=inputs["attention_mask"],
    )
    closed = attack.gradient(target[None], hidden, inputs["attention_mask"], upstream).sum(0)[0]
    with Inserted(anatomy, layer, attack.craft(target), scale=scale) as handle:
        model(**inputs).loss.backward()
        assert closed.abs().min() > 0
        torch.testing.assert_close(handle.bias.grad, closed, rtol=1e-10, atol=0)


def test_the_gradient_is_that_of_finite_differences() -> None:
    """Also for the part of the sum that goes through the layers above."""
    model = tiny_gpt2(layers=3, dropout=0.0).double()
    anatomy = find_anatomy(model)
    inputs = batch()
    ladder = (0.3, 0.6, 1.0)
    attack, target = attack_and_target(anatomy, 1, "token", inputs, ladder)
    with Inserted(anatomy, 1, attack.craft(target), scale=0.5) as handle:
        loss = model(**inputs).logits.square().mean()
        (gradient,) = torch.autograd.grad(loss, handle.bias)
        for k in range(len(ladder)):
            values = []
            for step in (1e-5, -1e-5):
                with torch.no_grad():
                    handle.bias[k] += step
                    values.append(float(model(**inputs).logits.square().mean()))
                    handle.bias[k] -= step
            assert (values[0] - values[1]) / 2e-5 == pytest.approx(float(gradient[k]), rel=1e-5)


class One(nn.Module):
    def forward(self, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
        self.read = hidden
        return torch.ones((*hidden.shape[:2], 1), dtype=hidden.dtype)


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_states_are_read_and_changed_after_the_block(name: str) -> None:
    model = MODELS[name]().double().eval()
    anatomy = find_anatomy(model)
    inputs = batch()
    entering: dict[int, Tensor] = {}
    for i, (_, block) in enumerate(text_blocks(anatomy)):
        block.register_forward_pre_hook(
            lambda _, args, kwargs, i=i: entering.__setitem__(
                i, args[0] if args else kwargs["hidden_states"]
            ),
            with_kwargs=True,
        )
    with torch.no_grad():
        model(**inputs)
        clean = dict(entering)
        for layer in (0, 1):
            crafted = One()
            with Inserted(anatomy, layer, crafted, scale=0.25):
                model(**inputs)
            assert torch.equal(crafted.read, clean[layer])
            changed = {i: entering[i] - clean[i] for i in clean}
            if layer:
                step = 0.25 * direction_of(DIM).expand(4, 7, DIM)
                torch.testing.assert_close(changed[layer], step)
            assert all(float(changed[i].abs().max()) == 0 for i in range(layer))
            assert all(float(changed[i].abs().max()) > 0 for i in range(layer + 1, 3))


def test_it_is_a_part_of_the_model_until_it_is_removed() -> None:
    model = tiny_gpt2(layers=3, dropout=0.0).eval()
    root = CausalLMModule(model)
    anatomy = find_anatomy(root)
    inputs = batch()
    names = list(root.state_dict())
    hooks = [_hooks(m) for m in root.modules()]
    with torch.no_grad():
        clean = model(**inputs).logits
    attack, target = attack_and_target(anatomy, 1, "token", inputs)
    state = torch.get_rng_state()
    handle = Inserted(anatomy, 1, attack.craft(target))
    assert torch.equal(torch.get_rng_state(), state)
    assert any(p is handle.bias for p in root.parameters())
    optimizer = root.configure_optimizers()
    assert any(p is handle.bias for g in optimizer.param_groups for p in g["params"])
    added = [n for n in root.state_dict() if n not in names]
    assert any(n.startswith("model.fedleak_crafted") and n.endswith("crafted.bias") for n in added)
    assert not any(m.training for m in handle.inside.modules())
    again = find_anatomy(root)
    assert (again.head_name, again.embedding_name, again.block_names) == (
        anatomy.head_name,
        anatomy.embedding_name,
        anatomy.block_names,
    )
    handle.remove()
    handle.remove()
    assert list(root.state_dict()) == names
    assert [_hooks(m) for m in root.modules()] == hooks
    with torch.no_grad():
        assert torch.equal(model(**inputs).logits, clean)


def _hooks(module: nn.Module) -> list[list[Any]]:
    return [list(v.items()) for k, v in module.__dict__.items() if "hooks" in k]


def test_hidden_states_are_read_without_what_is_inserted() -> None:
    model = tiny_gpt2(layers=3, dropout=0.0)
    anatomy = find_anatomy(model)
    inputs = batch()
    given = (inputs["input_ids"], inputs["attention_mask"])
    clean = [hidden_states(anatomy, n, *given) for n in range(4)]
    attack, target = attack_and_target(anatomy, 1, "token", inputs)
    with Inserted(anatomy, 1, attack.craft(target), scale=1.0):
        for layer in range(4):
            assert torch.equal(hidden_states(anatomy, layer, *given), clean[layer])


def test_two_can_be_inserted_and_removed_in_any_order() -> None:
    model = tiny_gpt2(layers=3, dropout=0.0)
    anatomy = find_anatomy(model)
    inputs = batch()
    attack, target = attack_and_target(anatomy, 1, "token", inputs)
    first = Inserted(anatomy, 1, attack.craft(target))
    second = Inserted(anatomy, 2, attack.craft(target))
    model(**inputs).loss.backward()
    assert first.bias.grad is not None
    assert second.bias.grad is not None
    first.remove()
    model(**inputs).loss.backward()
    assert len([n for n in model.state_dict() if n.endswith("crafted.bias")]) == 1
    second.remove()
    assert not any("fedleak" in n for n in model.state_dict())


def test_the_mask_is_found_by_keyword_by_position_or_missing() -> None:
    model = tiny_bert_mlm(layers=3, dropout=0.0)
    anatomy = find_anatomy(model)
    inputs = batch()
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    attack, target = attack_and_target(anatomy, 1, "token", inputs)
    with Inserted(anatomy, 1, attack.craft(target)) as handle:
        observed = Seen(handle)
        model(ids, mask)
        model(input_ids=ids, attention_mask=mask)
        model(ids)
        assert torch.equal(observed.mask[0], mask)
        assert torch.equal(observed.mask[1], mask)
        assert observed.mask[2] is None
        with pytest.raises(
            ValueError, match=r"need an attention_mask \(B, L\), got \(4, 1, 1, 7\)"
        ):
            model(ids, mask[:, None, None])
    gpt2 = tiny_gpt2()
    with Inserted(find_anatomy(gpt2), 1, attack.craft(target)) as handle:
        observed = Seen(handle)
        before = list(inspect.signature(gpt2.forward).parameters).index("attention_mask")
        gpt2(ids, *[None] * (before - 1), mask)
        assert torch.equal(observed.mask[0], mask)


@pytest.mark.parametrize("kind", ["lora", "prompt"])
def test_under_peft(kind: str) -> None:
    config: peft.PeftConfig
    if kind == "lora":
        config = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)
    else:
        config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    with own_rng(2):
        model = peft.get_peft_model(tiny_gpt2(layers=3, dropout=0.0), config).double()
    anatomy = find_anatomy(model)
    inputs = batch()
    attack, target = attack_and_target(anatomy, 1, "token", inputs)
    with Inserted(anatomy, 1, attack.craft(target)) as handle:
        observed = Seen(handle)
        model(**inputs).loss.backward()
        mask = observed.mask[0]
        extra = 3 if kind == "prompt" else 0
        assert mask.shape == (4, 7 + extra)
        assert int(mask[:, :extra].sum()) == 0
        upstream = upstream_of(observed.delta[0], handle.inside.direction, handle.inside.scale)
        closed = attack.gradient(target[None], observed.hidden[0], mask, upstream).sum(0)[0]
        assert closed.abs().min() > 0
        torch.testing.assert_close(handle.bias.grad, closed, rtol=1e-10, atol=0)
        if kind == "prompt":
            model(input_ids=inputs["input_ids"])
            assert torch.equal(observed.mask[1][:, 3:], torch.ones(4, 7).long())
            assert int(observed.mask[1][:, :3].sum()) == 0


def gradient_of_two(model: nn.Module, together: bool) -> Tensor:
    """Gradient of the rungs over two batches with different masks, one backward or two."""
    anatomy = find_anatomy(model)
    first, second = batch(1), batch(2)
    attack, target = attack_and_target(anatomy, 1, "token", first)
    with Inserted(anatomy, 2, attack.craft(target), scale=0.5) as handle:
        if together:
            (model(**first).loss + model(**second).loss).backward()
        else:
            model(**first).loss.backward()
            model(**second).loss.backward()
        return handle.bias.grad


@pytest.mark.parametrize("reentrant", [True, False])
def test_under_gradient_checkpointing(reentrant: bool) -> None:
    plain = gradient_of_two(tiny_gpt2(layers=3, dropout=0.0).double().train(), together=True)
    model = tiny_gpt2(layers=3, dropout=0.0).double().train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    for together in (True, False):
        gradient = gradient_of_two(model, together)
        torch.testing.assert_close(gradient, plain, rtol=1e-12, atol=0)


@pytest.mark.parametrize("reentrant", [True, False])
def test_inside_a_checkpoint_each_recomputation_has_its_own_mask(reentrant: bool) -> None:
    plain = gradient_of_two(tiny_gpt2(layers=3, dropout=0.0).double().train(), together=True)
    model = tiny_gpt2(layers=3, dropout=0.0).double().train()
    model.config.use_cache = False
    calls: list[int] = []
    for _, block in text_blocks(find_anatomy(model)):
        block.register_forward_pre_hook(lambda *_: calls.append(1))
        call = block._call_impl

        def through(hidden: Tensor, *args: Any, _call: Any = call, **kwargs: Any) -> Any:
            return checkpoint(lambda h: _call(h, *args, **kwargs), hidden, use_reentrant=reentrant)

        block.forward_through = through
    for block in model.transformer.h:
        block.__class__ = type("Through", (type(block),), {"__call__": _call_through})
    gradient = gradient_of_two(model, together=True)
    assert len(calls) >= 12
    torch.testing.assert_close(gradient, plain, rtol=1e-12, atol=0)


def _call_through(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return self.forward_through(*args, **kwargs)


def test_bf16_mixed() -> None:
    model = tiny_gpt2(layers=3, dropout=0.0).train()
    anatomy = find_anatomy(model)
    inputs = batch()
    attack, target = attack_and_target(anatomy, 1, "token", inputs)
    with Inserted(anatomy, 1, attack.craft(target), scale=0.5) as handle:
        observed = Seen(handle)
        with torch.autocast("cpu", torch.bfloat16):
            model(**inputs).loss.backward()
        assert handle.bias.grad.dtype == torch.float32
        upstream = upstream_of(observed.delta[0], handle.inside.direction, handle.inside.scale)
        mask = inputs["attention_mask"]
        closed = attack.gradient(target[None], observed.hidden[0], mask, upstream).sum(0)[0]
        assert closed.abs().min() > 0
        torch.testing.assert_close(handle.bias.grad, closed, rtol=1e-4, atol=0)


def test_a_model_in_bf16_keeps_its_dtype() -> None:
    model = tiny_gpt2(layers=3, dropout=0.0).bfloat16()
    anatomy = find_anatomy(model)
    inputs = batch()
    attack, target = attack_and_target(anatomy, 1, "token", inputs)
    with Inserted(anatomy, 1, attack.craft(target), scale=0.5) as handle:
        out = model(**inputs)
        assert out.logits.dtype == torch.bfloat16
        out.loss.backward()
        assert handle.bias.grad.dtype == torch.float32
        assert handle.bias.grad.abs().max() > 0


def test_a_copy_of_the_model_has_crafted_layers_of_its_own() -> None:
    model = tiny_gpt2(layers=3, dropout=0.0)
    anatomy = find_anatomy(model)
    inputs = batch()
    attack, target = attack_and_target(anatomy, 1, "token", inputs)
    with Inserted(anatomy, 1, attack.craft(target)) as handle:
        twin = copy.deepcopy(model)
        twin(**inputs).loss.backward()
        (theirs,) = [p for n, p in twin.named_parameters() if n.endswith("crafted.bias")]
        assert theirs.grad is not None
        assert handle.bias.grad is None
        model(**inputs).loss.backward()
        assert torch.equal(handle.bias.grad, theirs.grad)


def test_a_fit_trains_the_rungs_and_a_checkpoint_holds_them(tmp_path: Path) -> None:
    module = CausalLMModule(tiny_gpt2(layers=2).train(), lr=1.0)
    anatomy = find_anatomy(module)
    inputs = batch(b=4, length=12)
    attack, target = attack_and_target(anatomy, 1, "token", inputs)
    handle = Inserted(anatomy, 1, attack.craft(target), scale=0.1)
    before = handle.bias.detach().clone()
    trainer = fit([], tmp_path, module=module)
    assert not torch.equal(handle.bias, before)
    trainer.save_checkpoint(tmp_path / "saved.ckpt")
    saved = torch.load(tmp_path / "saved.ckpt", weights_only=False)["state_dict"]
    assert torch.equal(saved["model.fedleak_crafted.crafted.bias"], handle.bias.detach())


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"layer": 4}, ValueError, "layer=4 is out of range: the model has 3 blocks"),
        ({"scale": 0.0}, ValueError, "scale must "),
        ({"scale": float("nan")}, ValueError, "scale must "),
    ],
)
def test_bad_input_is_refused(change: dict[str, Any], error: type, message: str) -> None:
    model = tiny_gpt2(layers=3)
    names = list(model.state_dict())
    arguments = {"layer": 1, "crafted": nn.Identity(), **change}
    with pytest.raises(error, match=message):
        Inserted(find_anatomy(model), **arguments)
    assert list(model.state_dict()) == names
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())


@pytest.mark.slow
def test_the_model_can_be_compiled_after_the_insertion() -> None:
    model = tiny_gpt2(layers=2, dropout=0.0).double().train()
    anatomy = find_anatomy(model)
    attack, target = attack_and_target(anatomy, 1, "token", batch())
    result = []
    with Inserted(anatomy, 1, attack.craft(target), scale=0.5) as handle:
        for compiled in (False, True):
            if compiled:
                model.transformer.h[0].compile(backend="aot_eager")  # which the layers follow
            for seed in (1, 2):
                model.zero_grad()
                model(**batch(seed)).loss.backward()
                result.append(handle.bias.grad.clone())
    assert not torch.equal(result[0], result[1])
    for plain, through in zip(result[:2], result[2:], strict=True):
        torch.testing.assert_close(through, plain, rtol=1e-12, atol=0)


def test_a_compiled_model_is_refused() -> None:
    model = tiny_gpt2(layers=3)
    model.transformer.h[0].compile(backend="eager")
    with pytest.raises(TypeError, match="insert first, then"):
        Inserted(find_anatomy(model), 1, nn.Identity())


def test_the_direction_is_a_unit_vector_of_its_own_generator() -> None:
    state = torch.get_rng_state()
    first, second = direction_of(DIM), direction_of(DIM, seed=1)
    assert torch.equal(torch.get_rng_state(), state)
    assert float(first.norm()) == pytest.approx(1.0, abs=1e-15)
    assert abs(float(first @ second)) < 0.9
    assert torch.equal(direction_of(DIM), first)
