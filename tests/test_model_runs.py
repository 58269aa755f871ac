from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import weight_norm

from lightning_fedleak.model.anatomy import find_anatomy
from lightning_fedleak.model.anatomy.blocks import states_out, text_blocks, with_states_out
from lightning_fedleak.model.model_runs import call_with, context_length, hidden_states, undisturbed
from tests.helpers import models
from tests.helpers.inputs import padded_text
from tests.taps.test_activation_tap import MODELS as TAPPED
from tests.taps.test_activation_tap import PlainModel

MODELS: dict[str, Callable[[], nn.Module]] = TAPPED | {
    "bert classifier": lambda: models.tiny_bert_classifier(layers=3),
    "bart": lambda: models.tiny_bart(layers=3),
    "marian": lambda: models.tiny_marian(layers=3),
}
FINAL_NORM = {"gpt2": "transformer.ln_f", "llama": "model.norm", "t5": "encoder.final_layer_norm"}


def by_hugging_face(model: nn.Module, ids: Tensor, mask: Tensor | None) -> tuple[Tensor, ...]:
    model = copy.deepcopy(model).eval()
    inputs = {"input_ids": ids, "output_hidden_states": True}
    if mask is not None:
        inputs["attention_mask"] = mask
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        if model.config.is_encoder_decoder:
            return tuple(model(**inputs, decoder_input_ids=ids[:, :2]).encoder_hidden_states)
        return tuple(model(**inputs).hidden_states)


@pytest.mark.parametrize("padding", ["right", "left", "none"])
@pytest.mark.parametrize("name", MODELS)
def test_as_hugging_face_gives_them(name: str, padding: str) -> None:
    model = MODELS[name]().train()
    ids, mask = padded_text(5, 9, side="left" if padding == "left" else "right")
    given = None if padding == "none" else mask
    ids = ids.masked_fill(ids == 0, 5) if padding == "none" else ids
    expected = by_hugging_face(model, ids, given)
    anatomy = find_anatomy(model)
    assert len(text_blocks(anatomy)) == 3
    for layer in range(4):
        got = hidden_states(anatomy, layer, ids, given)
        if layer == 3 and name in FINAL_NORM:
            with torch.no_grad():
                got = model.get_submodule(FINAL_NORM[name])(got)
        assert got.shape == (5, 9, models.DIM)
        assert not got.requires_grad
        assert torch.equal(got, expected[layer]), layer


def _noting(forward: Callable[..., Any], note: Callable[[], None]) -> Callable[..., Any]:
    def noting(*args: Any, **kwargs: Any) -> Any:
        note()
        return forward(*args, **kwargs)

    return noting


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "t5"])
def test_no_work_above_the_layer(name: str) -> None:
    model = MODELS[name]()
    anatomy = find_anatomy(model)
    ids, mask = padded_text(5, 9)
    for layer in range(3):
        calls: list[list[int]] = [[] for _ in text_blocks(anatomy)]
        head: list[int] = []
        for (_, block), runs in zip(text_blocks(anatomy), calls, strict=True):
            plain = type(block).forward.__get__(block)
            block.forward = _noting(plain, lambda s=runs: s.append(1))
        plain = type(anatomy.head).forward.__get__(anatomy.head)
        anatomy.head.forward = _noting(plain, lambda s=head: s.append(1))
        hidden_states(anatomy, layer, ids, mask)
        assert [len(c) for c in calls] == [1] * layer + [0] * (3 - layer)
        assert head == []


def test_no_hook_of_others_runs_and_all_run_again_after() -> None:
    model = models.tiny_gpt2(dropout=0.0, layers=3)
    anatomy = find_anatomy(model)
    ids, mask = padded_text(5, 9)
    clean = hidden_states(anatomy, 2, ids, mask)
    fired: list[str] = []
    for name, module in model.named_modules():
        module.register_forward_hook(lambda *_, n=name: fired.append(f"forward {n}"))
        module.register_forward_pre_hook(lambda *_, n=name: fired.append(f"pre {n}"))
        module.register_full_backward_hook(lambda *_, n=name: fired.append(f"backward {n}"))
    changing = model.transformer.h[0].register_forward_hook(
        lambda _, __, out: with_states_out(out, states_out(out) + 1.0)
    )
    everywhere = [
        nn.modules.module.register_module_forward_hook(lambda *_: fired.append("global")),
        nn.modules.module.register_module_forward_pre_hook(lambda *_: fired.append("global pre")),
    ]
    try:
        assert torch.equal(hidden_states(anatomy, 2, ids, mask), clean)
        with pytest.raises(IndexError):  # an error changes nothing of it
            hidden_states(anatomy, 2, ids + models.VOCAB, mask)
        assert fired == []
        model(input_ids=ids, attention_mask=mask).logits.sum().backward()
    finally:
        for handle in everywhere:
            handle.remove()
    kinds = {f.split(" ")[0] for f in fired}
    assert kinds == {"forward", "pre", "backward", "global"}
    changing.remove()
    assert torch.equal(hidden_states(anatomy, 2, ids, mask), clean)


@pytest.mark.parametrize("training", [True, False])
def test_layers_that_pack_their_weights_in_eval_mode_do_not(training: bool) -> None:
    """As those of bitsandbytes in four bits are marked; packed, they have no backward."""
    model = models.tiny_gpt2(layers=2).train(training)
    layer = model.transformer.h[0].mlp
    layer.support_avx512bf16_for_cpu = True
    with undisturbed(find_anatomy(model)), undisturbed(find_anatomy(model)):
        assert not layer.support_avx512bf16_for_cpu
        assert not any(m.training for m in model.modules())
    assert layer.support_avx512bf16_for_cpu
    assert all(m.training == training for m in model.modules())


def test_hooks_that_the_model_needs_still_run() -> None:
    model = models.tiny_bert_mlm(layers=3, dropout=0.0)
    with pytest.warns(FutureWarning):
        weight_norm(model.bert.encoder.layer[0].output.dense)
    layer = model.bert.encoder.layer[0].output.dense
    with torch.no_grad():
        layer.weight_g.mul_(3.0)
    ids, mask = padded_text(5, 9)
    got = hidden_states(find_anatomy(model), 2, ids, mask)
    with torch.no_grad():
        expected = model.eval()(input_ids=ids, attention_mask=mask, output_hidden_states=True)
    assert torch.equal(got, expected.hidden_states[2])
    norm = layer.weight.norm(dim=1, keepdim=True)
    torch.testing.assert_close(norm, layer.weight_g)


def test_capturing_hooks_that_transformers_installs_meanwhile_stay() -> None:
    model = models.tiny_bert_mlm()
    model.config.output_hidden_states = True
    model.register_forward_hook(lambda *_: None)
    ids, mask = padded_text(5, 9)
    got = hidden_states(find_anatomy(model), 1, ids, mask)
    model.eval()
    out = model(input_ids=ids, attention_mask=mask)
    assert len(out.hidden_states) == 3
    assert torch.equal(out.hidden_states[1], got)


@pytest.mark.parametrize("reentrant", [True, False])
def test_under_gradient_checkpointing(reentrant: bool) -> None:
    model = models.tiny_gpt2(layers=3).train()
    ids, mask = padded_text(5, 9)
    expected = by_hugging_face(model, ids, mask)[2]
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    assert torch.equal(hidden_states(find_anatomy(model), 2, ids, mask), expected)


@pytest.mark.slow
@pytest.mark.parametrize("whole", [True, False])
def test_compiled_models_run_eagerly_and_are_not_recompiled(whole: bool) -> None:
    model = models.tiny_gpt2(layers=3, dropout=0.0)
    ids, mask = padded_text(5, 9)
    expected = by_hugging_face(model, ids, mask)[2]
    compiled: list[int] = []

    def backend(graph: Any, _: Any) -> Any:
        compiled.append(1)
        return graph.forward

    if whole:
        root = nn.Module()
        root.model = torch.compile(model, backend=backend)
        run = root.model
    else:
        for i, block in enumerate(model.transformer.h):
            if i == 1:
                block.compile(backend=backend)
            else:
                model.transformer.h[i] = torch.compile(block, backend=backend)
        root = run = model
    anatomy = find_anatomy(root)
    assert torch.equal(hidden_states(anatomy, 2, ids, mask), expected)
    assert compiled == []
    run(input_ids=ids, attention_mask=mask)
    first = len(compiled)
    assert first > 0
    assert torch.equal(hidden_states(anatomy, 2, ids, mask), expected)
    run(input_ids=ids, attention_mask=mask)
    assert len(compiled) == first


@pytest.mark.parametrize("kind", ["lora", "prompt", "prefix"])
def test_under_peft(kind: str) -> None:
    model = models.tiny_gpt2(layers=3)
    config: peft.PeftConfig
    if kind == "lora":
        config = peft.LoraConfig(
            task_type="CAUSAL_LM", r=2, target_modules=["c_attn"], init_lora_weights=False
        )
    elif kind == "prompt":
        config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    else:
        config = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    with models.own_rng(2):
        wrapped = peft.get_peft_model(model, config)
    anatomy = find_anatomy(wrapped)
    ids, mask = padded_text(5, 9)
    got = hidden_states(anatomy, 2, ids, mask)
    wrapped.eval()
    with torch.no_grad():
        out = wrapped(input_ids=ids, attention_mask=mask, output_hidden_states=True)
    assert torch.equal(got, out.hidden_states[2][:, -ids.shape[1] :])
    plain = by_hugging_face(models.tiny_gpt2(layers=3), ids, mask)[2]
    assert (got - plain).abs().max() > 1e-4
    assert context_length(anatomy) == (models.POSITIONS if kind == "lora" else models.POSITIONS - 4)


def test_autocast_and_a_model_in_bf16() -> None:
    ids, mask = padded_text(5, 9)
    model = models.tiny_gpt2(layers=3).train()
    anatomy = find_anatomy(model)
    full = hidden_states(anatomy, 2, ids, mask)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = hidden_states(anatomy, 2, ids, mask)
        expected = by_hugging_face(model, ids, mask)[2]
    assert torch.equal(mixed, expected)
    assert 0 < (mixed - full).abs().max() < 0.1
    half = hidden_states(find_anatomy(models.tiny_gpt2(layers=3).bfloat16()), 2, ids, mask)
    assert half.dtype == torch.bfloat16


def test_weights_cast_for_it_are_not_kept_for_the_training_step() -> None:
    model = models.tiny_gpt2(layers=2, dropout=0.0).train()
    ids, mask = padded_text(5, 9)
    cached: list[bool] = []
    model.transformer.wte.forward = _noting(
        model.transformer.wte.forward, lambda: cached.append(torch.is_autocast_cache_enabled())
    )
    with torch.autocast("cpu", torch.bfloat16):
        hidden_states(find_anatomy(model), 2, ids, mask)
        assert cached == [False]
        assert torch.is_autocast_cache_enabled()
        model(input_ids=ids, attention_mask=mask).logits.float().sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_positions_can_be_those_of_generate() -> None:
    model = models.tiny_gpt2(layers=3)
    anatomy = find_anatomy(model)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, models.VOCAB, (1, 6), generator=generator)
    padded = torch.nn.functional.pad(ids, (3, 0))
    mask = torch.nn.functional.pad(torch.ones_like(ids), (3, 0))
    alone = hidden_states(anatomy, 2, ids)
    shifted = hidden_states(anatomy, 2, padded, mask)[:, 3:]
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    aligned = hidden_states(anatomy, 2, padded, mask, position_ids=positions)[:, 3:]
    assert (shifted - alone).abs().max() > 1e-3
    torch.testing.assert_close(aligned, alone, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("in_a_tuple", [True, False])
def test_a_plain_module_with_a_list_of_blocks(in_a_tuple: bool) -> None:
    with models.own_rng(0):
        model = PlainModel(in_a_tuple)
    ids = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        zero = model.embed(ids)
        one = states_out(model.blocks[0](zero))
        two = states_out(model.blocks[1](one))
    for layer, expected in enumerate((zero, one, two)):
        assert torch.equal(hidden_states(find_anatomy(model), layer, ids), expected)


class Twice(nn.Module):
    """An embedding that stands at two places and is tied to the head, as T5's and BART's may be."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Embedding(7, 4)
        self.encoder = nn.ModuleDict({"embed": self.shared})
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.shared.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.encoder["embed"](ids)).square().sum()


def test_every_call_with_other_tensors_replaces_what_is_tied_and_leaves_the_model() -> None:
    model, ids = Twice(), torch.tensor([1, 2])
    own = model.shared.weight
    [wanted] = torch.autograd.grad(model(ids), own)
    other = own.detach().clone().requires_grad_()
    for _ in range(3):
        [found] = torch.autograd.grad(call_with(model, {"shared.weight": other}, ids=ids), other)
        assert torch.equal(found, wanted)
        assert model.shared.weight is model.head.weight is own
