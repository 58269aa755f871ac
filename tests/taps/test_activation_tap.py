from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_fedleak.model.anatomy import find_anatomy
from lightning_fedleak.model.anatomy.blocks import states_out, text_blocks
from lightning_fedleak.model.taps.activations import ActivationTap, ChangedInPlace
from lightning_fedleak.model.taps.hooks import taps_paused
from tests.helpers import models
from tests.helpers.inputs import padded_batch as batch

MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt2": lambda: models.tiny_gpt2(layers=3),
    "llama": lambda: models.tiny_llama(layers=3),
    "bert": lambda: models.tiny_bert_mlm(layers=3),
    "distilbert": lambda: models.tiny_distilbert_mlm(layers=3),
    "roberta": lambda: models.tiny_roberta_mlm(layers=3),
    "t5": lambda: models.tiny_t5(layers=3),
}


def reference(model: nn.Module, layer: int, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Hidden states and the loss's gradient by autograd.grad, in a pass of their own, seed 5.

    The block's forward is replaced by one that goes on with a leaf.
    """
    block = text_blocks(find_anatomy(model))[max(0, layer - 1)][1]
    forward = block.forward
    leaves: list[Tensor] = []

    def leaf(states: Tensor) -> Tensor:
        leaves.append(states.detach().requires_grad_())
        return leaves[-1]

    def cut(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        if layer == 0:
            return forward(leaf(hidden_states), *args, **kwargs)
        out = forward(hidden_states, *args, **kwargs)
        return (leaf(out[0]), *out[1:]) if isinstance(out, tuple) else leaf(out)

    block.forward = cut
    try:
        with models.own_rng(5):
            loss = model(**inputs).loss
    finally:
        block.forward = forward
    return leaves[0].detach(), torch.autograd.grad(loss, leaves[0])[0]


def step(model: nn.Module, *micro_batches: dict[str, Tensor], **autocast: Any) -> list[Tensor]:
    """Gradients of the parameters after backward of each micro-batch, each with seed 5."""
    model.zero_grad()
    for inputs in micro_batches:
        with models.own_rng(5), torch.autocast("cpu", torch.bfloat16, enabled=bool(autocast)):
            model(**inputs).loss.backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def same(first: list[Tensor], second: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def checkpointed(model: nn.Module, reentrant: bool, inside: bool = True) -> nn.Module:
    """Checkpoints blocks as Hugging Face does, or around the call (then hooks are inside)."""
    if not inside:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        return model
    model.config.use_cache = False
    for _, block in text_blocks(find_anatomy(model)):
        call = block._call_impl

        def through(hidden: Tensor, *args: Any, _call: Any = call, **kwargs: Any) -> Any:
            if not (hidden.requires_grad and torch.is_grad_enabled()):
                return _call(hidden, *args, **kwargs)
            return checkpoint(lambda h: _call(h, *args, **kwargs), hidden, use_reentrant=reentrant)

        block._compiled_call_impl = through
    return model


@pytest.mark.parametrize("name", MODELS)
def test_states_and_gradient_are_those_of_autograd(name: str) -> None:
    model = MODELS[name]().train()
    inputs = batch()
    plain = step(model, inputs)
    expected = {layer: reference(model, layer, inputs) for layer in range(4)}
    tap = ActivationTap(find_anatomy(model), range(4))
    assert same(step(model, inputs), plain)
    assert tap.states(1) == ()
    tap.arm()
    assert same(step(model, inputs), plain)
    for layer, (states, gradient) in expected.items():
        assert torch.equal(tap.states(layer)[0], states)
        assert gradient.abs().max() > 0
        torch.testing.assert_close(tap.gradients(layer)[0], gradient, rtol=1e-5, atol=1e-9)
        assert len(tap.states(layer)) == len(tap.gradients(layer)) == 1
        assert not tap.states(layer)[0].requires_grad


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_one_record_a_micro_batch_under_checkpointing(reentrant: bool, inside: bool) -> None:
    first, second = batch(1), batch(2, length=5)
    model = checkpointed(models.tiny_gpt2(layers=3).train(), reentrant, inside)
    plain = step(model, first, second)
    fresh = models.tiny_gpt2(layers=3).train()
    expected = {n: [reference(fresh, n, i) for i in (first, second)] for n in (0, 1, 2)}
    tap = ActivationTap(find_anatomy(model), [0, 1, 2])
    tap.arm()
    assert same(step(model, first, second), plain)
    for layer, micro_batches in expected.items():
        assert [len(tap.states(layer)), len(tap.gradients(layer))] == [2, 2]
        for k, (states, gradient) in enumerate(micro_batches):
            torch.testing.assert_close(tap.states(layer)[k], states, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(tap.gradients(layer)[k], gradient, rtol=1e-4, atol=1e-8)


@pytest.mark.parametrize("inside", [None, False, True])
def test_a_check_of_the_graph_before_the_backward_leaves_no_record(inside: bool | None) -> None:
    model, inputs = models.tiny_gpt2(layers=3).train(), batch()
    if inside is not None:
        model = checkpointed(model, False, inside)
    states, gradient = reference(models.tiny_gpt2(layers=3).train(), 1, inputs)
    tap = ActivationTap(find_anatomy(model), [1])
    tap.arm()
    with models.own_rng(5):
        loss = model(**inputs).loss
    with taps_paused():
        first = next(model.parameters())
        (of_check,) = torch.autograd.grad(3 * loss, first, retain_graph=True)
    assert of_check.abs().max() > 0
    assert tap.gradients(1) == ()
    loss.backward()
    assert [len(tap.states(1)), len(tap.gradients(1))] == [1, 1]
    torch.testing.assert_close(tap.states(1)[0], states, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(tap.gradients(1)[0], gradient, rtol=1e-4, atol=1e-8)


def test_forwards_without_gradient_leave_no_record() -> None:
    model = models.tiny_gpt2().train()
    tap = ActivationTap(find_anatomy(model), [1])
    tap.arm()
    with torch.no_grad():
        model(**batch())
    with torch.inference_mode():
        model(**batch())
    assert tap.states(1) == ()
    step(model, batch())
    assert len(tap.states(1)) == 1


def test_a_look_ends_and_the_next_begins_empty() -> None:
    model = models.tiny_gpt2().train()
    tap = ActivationTap(find_anatomy(model), [1])
    tap.arm()
    loss = model(**batch()).loss
    tap.arm()
    loss.backward()
    assert tap.states(1) == tap.gradients(1) == ()
    step(model, batch())
    tap.disarm()
    assert tap.states(1) == tap.gradients(1) == ()
    step(model, batch())
    assert tap.states(1) == ()
    tap.arm()
    tap.close()
    assert not tap.armed
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())


def test_what_was_overwritten_is_refused() -> None:
    def overwritten(block: nn.Module, args: tuple[Tensor, ...]) -> None:
        with torch.no_grad():
            args[0].mul_(2.0)

    model = models.tiny_gpt2().train()
    tap = ActivationTap(find_anatomy(model), [1])
    tap.arm()
    step(model, batch())
    [gradient] = tap.gradients(1)
    gradient.mul_(2.0)
    with pytest.raises(ChangedInPlace, match=r"overwrote the gradient at layer 1 in place"):
        tap.gradients(1)
    model.transformer.h[1].register_forward_pre_hook(overwritten)
    tap.arm()
    with models.own_rng(5):
        model(**batch())
    with pytest.raises(ChangedInPlace, match=r"overwrote hidden states at layer 1 in place"):
        tap.states(1)


def lora(layers_to_transform: list[int] | None = None) -> nn.Module:
    config = peft.LoraConfig(
        r=2, target_modules=["c_attn"], fan_in_fan_out=True, lora_dropout=0.1,
        init_lora_weights=False, layers_to_transform=layers_to_transform,
    )  # fmt: skip
    with models.own_rng(1):
        return peft.get_peft_model(models.tiny_gpt2(layers=3).train(), config)


def test_under_lora_a_gradient_reaches_what_lies_above_a_trained_part() -> None:
    model = lora([1])
    tap = ActivationTap(find_anatomy(model), [0, 1, 2])
    tap.arm()
    step(model, batch())
    assert [len(tap.states(n)) for n in range(3)] == [1, 1, 1]
    assert [len(tap.gradients(n)) for n in range(3)] == [0, 0, 1]


def test_reach_goes_on_down_and_changes_no_gradient_of_the_training() -> None:
    model = lora([1])
    plain = step(model, batch())
    expected = [reference(model, n, batch()) for n in range(3)]
    tap = ActivationTap(find_anatomy(model), [0, 1, 2], reach=True)
    tap.arm()
    assert same(step(model, batch()), plain)
    for layer, (states, gradient) in enumerate(expected):
        assert torch.equal(tap.states(layer)[0], states)
        torch.testing.assert_close(tap.gradients(layer)[0], gradient, rtol=1e-5, atol=1e-9)


class PlainBlock(nn.Module):
    """Returns its states, or a tuple that begins with them."""

    def __init__(self, in_a_tuple: bool) -> None:
        super().__init__()
        self.inner, self.in_a_tuple = nn.Linear(models.DIM, models.DIM), in_a_tuple

    def forward(self, hidden: Tensor) -> Any:
        hidden = hidden + self.inner(hidden).tanh()
        return (hidden, None) if self.in_a_tuple else hidden


class PlainModel(nn.Module):
    def __init__(self, in_a_tuple: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(models.VOCAB, models.DIM)
        self.blocks = nn.ModuleList(PlainBlock(in_a_tuple) for _ in range(2))
        self.out = nn.Linear(models.DIM, models.VOCAB)

    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.embed(input_ids)
        for block in self.blocks:
            hidden = states_out(block(hidden))
        return self.out(hidden)


class WithLoss(nn.Module):
    """Calls a plain model as the helpers here expect it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, **_: Any) -> Any:
        return SimpleNamespace(loss=self.model(input_ids=input_ids).square().mean())


@pytest.mark.slow
@pytest.mark.parametrize("whole", [True, False])
def test_under_torch_compile(whole: bool) -> None:
    """Whose models ran before there was a tap."""
    with models.own_rng(0):
        model = WithLoss(PlainModel()) if whole else models.tiny_gpt2(dropout=0.0).train()
    expected = {n: reference(model, n, batch()) for n in (0, 1)}
    if whole:
        model.model = torch.compile(model.model, backend="aot_eager")
    else:
        for i, block in enumerate(model.transformer.h):
            model.transformer.h[i] = torch.compile(block, backend="aot_eager")
    step(model, batch())
    tap = ActivationTap(find_anatomy(model), [0, 1])
    unarmed = step(model, batch())
    for _ in range(2):
        tap.arm()
        assert same(step(model, batch()), unarmed)
        for layer, (states, gradient) in expected.items():
            assert len(tap.states(layer)) == 1
            torch.testing.assert_close(tap.states(layer)[0], states, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(tap.gradients(layer)[0], gradient, rtol=1e-4, atol=1e-8)
        tap.disarm()
    assert same(step(model, batch()), unarmed)
    assert tap.states(1) == ()


@pytest.mark.parametrize("layer", [0, 1])
def test_the_first_hook_reads_what_later_ones_rewrite(layer: int) -> None:
    model = models.tiny_gpt2(dropout=0.0).train()
    block = model.transformer.h[0]

    def shift(*args: Any) -> Any:
        if layer == 0:
            return (args[1][0] + 1, *args[1][1:])
        out = args[2]
        return (out[0] + 1, *out[1:]) if isinstance(out, tuple) else out + 1

    if layer == 0:
        block.register_forward_pre_hook(shift)
    else:
        block.register_forward_hook(shift)
    anatomy = find_anatomy(model)
    taps = [
        ActivationTap(anatomy, [layer], gradients=False, first=first) for first in (True, False)
    ]
    for tap in taps:
        tap.arm()
    model(**batch()).loss.backward()
    [before], [behind] = (tap.states(layer) for tap in taps)
    assert torch.equal(behind, before + 1)
    for tap in taps:
        tap.close()
    assert len(block._forward_hooks) + len(block._forward_pre_hooks) == 1
