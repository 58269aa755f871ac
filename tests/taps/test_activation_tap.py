""""""

import hashlib
import importlib.util
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, TaskType, get_peft_model
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from lightning_fedleak import private_files
from lightning_fedleak.model.anatomy import find_anatomy
from lightning_fedleak.model.anatomy.blocks import states_out, text_blocks
from lightning_fedleak.model.batches import TokenBatch, read_batch
from lightning_fedleak.model.snapshots import UnusableObservation
from lightning_fedleak.model.taps import Text, candidate_log_probs, pool_digest, tokens
from lightning_fedleak.model.taps.activations import ActivationTap, ChangedInPlace
from lightning_fedleak.model.taps.calls import ModelCalls, arguments_of, crosses
from lightning_fedleak.model.taps.hooks import taps_paused
from tests.helpers import models
from tests.helpers.inputs import padded_batch as batch
from tests.helpers.models import tiny_bert_mlm, tiny_gpt2, tiny_llama
from tests.test_batches import block_diagonal, flattened

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


# Whether packed documents attend to each other, tried on the call that a step made.


CALLS_MODELS = {
    "llama": tiny_llama,
    "gpt2": lambda: tiny_gpt2(dropout=0.1),
    "bert": lambda: tiny_bert_mlm(dropout=0.1),
}
CALLS: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "no cache": {"use_cache": False},
    "with a mask of padding": {"use_cache": False, "attention_mask": torch.ones(1, 10).long()},
    "block-diagonal": {"attention_mask": block_diagonal()},
}


def gradient_crosses(model: nn.Module, call: dict[str, Any], batch: TokenBatch) -> bool:
    """Whether the last document's hidden states have a gradient in the others' embeddings."""
    model.eval()
    inputs = {k: v for k, v in call.items() if k not in ("input_ids", "labels")}
    embedded = model.get_input_embeddings()(batch.input_ids).detach().requires_grad_()  # type: ignore[operator]
    states = model(inputs_embeds=embedded, output_hidden_states=True, **inputs).hidden_states[-1]
    last = batch.documents == batch.documents.max()  # type: ignore[union-attr]
    (gradient,) = torch.autograd.grad(states[last].square().sum(), embedded)
    return bool((gradient[~last] != 0).any())


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", CALLS_MODELS)
def test_it_is_what_the_gradient_says(name: str, call: str, attention: str) -> None:
    model = CALLS_MODELS[name]()
    model.set_attn_implementation(attention)
    arguments = {**flattened(), **CALLS[call]}
    if name == "bert":
        arguments.pop("use_cache", None)
    if call == "block-diagonal" and attention == "eager":
        hidden = ~arguments["attention_mask"]
        arguments["attention_mask"] = torch.zeros(hidden.shape).masked_fill(hidden, -1e9)
    batch = read_batch(arguments, "masked" if name == "bert" else "causal")
    calls = ModelCalls(find_anatomy(model))
    calls.arm()
    model.train()(**arguments).loss.backward()
    with torch.no_grad():
        model(input_ids=batch.input_ids)  # an evaluation in between
    [seen] = calls.calls
    calls.close()
    found = crosses(find_anatomy(model), batch, seen)
    assert model.training
    assert found == gradient_crosses(model, arguments, batch)
    if call == "as it comes":
        assert found  # causal models make a cache, and BERT passes no positions on
    if call == "block-diagonal":
        assert not found


def test_what_cannot_be_tried_is_said() -> None:
    model = tiny_llama()
    batch = read_batch(flattened(), "causal")
    embedded = model.get_input_embeddings()(batch.input_ids)
    for call, why in (
        ({"inputs_embeds": embedded}, "not on the batch's input_ids"),
        ({"input_ids": batch.input_ids, "past_key_values": object()}, "cannot be repeated"),
        ({"input_ids": batch.input_ids, "cache": object()}, "cannot be repeated"),
    ):
        with pytest.raises(UnusableObservation, match=why):
            crosses(find_anatomy(model), batch, call)


def test_arguments_get_the_names_of_the_model_that_is_called() -> None:
    from peft import LoraConfig, get_peft_model

    ids, mask = torch.ones(1, 3).long(), torch.zeros(1, 3)
    model = tiny_llama()
    assert arguments_of(model, (ids, mask), {"labels": ids}).keys() == {
        "input_ids", "attention_mask", "labels",
    }  # fmt: skip
    adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
    third = list(arguments_of(adapted, (ids, mask, mask), {}))[2]
    assert third == "inputs_embeds"


# Candidates after a cached context, against whole forwards in float64.


class Plain(nn.Module):
    """A model of one's own, without a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(50, 8), nn.Linear(8, 50)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.embedding(input_ids).cumsum(1))


class Blind(LlamaForCausalLM):
    """A model that lets each token see all before it, whatever it is told."""

    def forward(
        self, *args: Any, attention_mask: Any = None, past_key_values: Any = None, **kwargs: Any
    ) -> Any:
        return super().forward(*args, past_key_values=past_key_values, **kwargs)


def model_of(name: str) -> Any:
    torch.manual_seed(0)
    if name == "plain":
        return Plain()
    if name in ("llama", "blind"):
        sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
        kind = Blind if name == "blind" else LlamaForCausalLM
        return kind(LlamaConfig(vocab_size=50, num_hidden_layers=2, **sizes))
    model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=16, n_head=2, n_layer=2))
    if name == "lora":
        return get_peft_model(
            model, LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)
        )
    if name == "prompt":
        return get_peft_model(
            model, PromptTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=3)
        )
    return model


@pytest.mark.parametrize("name", ["gpt2", "llama", "blind", "lora", "prompt", "plain"])
def test_sums_are_those_of_whole_forwards(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "MAX_NODES", 5)
    model = model_of(name).train()
    context = torch.tensor([1, 7, 4, 9])
    values = [torch.randint(50, (n,)) for n in (3, 1, 3, 2, 3, 3, 1, 3)]
    state = torch.get_rng_state()
    log_probs, greedy = candidate_log_probs(find_anatomy(model), context, values)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    model = model.eval().double()
    for value, log_prob in zip(values, log_probs.tolist(), strict=True):
        with torch.no_grad():
            logits = model(input_ids=torch.cat([context, value])[None])
        logits = getattr(logits, "logits", logits)[0, -len(value) - 1 : -1].log_softmax(1)
        assert log_prob == pytest.approx(float(logits.gather(1, value[:, None]).sum()), abs=1e-4)
    written = list[int]()
    for _ in range(3):
        with torch.no_grad():
            logits = model(input_ids=torch.cat([context, torch.tensor(written).long()])[None])
        written.append(int(getattr(logits, "logits", logits)[0, -1].argmax()))
    values[0] = torch.tensor(written)
    assert candidate_log_probs(find_anatomy(model), context, values)[1]
    values[0] = torch.tensor([*written[:2], (written[2] + 1) % 50])
    assert not candidate_log_probs(find_anatomy(model), context, values)[1]
    assert not greedy


@pytest.mark.parametrize("first", [[1], [1, 5, 5, 5]])
def test_a_model_that_ignores_the_mask_is_found_at_the_first_branch(first, monkeypatch) -> None:
    """Before it there are a forward without a prefix, or with one branch only."""
    monkeypatch.setattr(tokens, "MAX_NODES", 2)
    model, context = model_of("blind"), torch.tensor([1, 7, 4, 9])
    values = [torch.tensor(ids) for ids in (first, [2, 3, 4, 5], [3, 9], [4, 9])]
    log_probs, _ = candidate_log_probs(find_anatomy(model), context, values)
    for value, log_prob in zip(values, log_probs.tolist(), strict=True):
        with torch.no_grad():
            logits = model.eval()(input_ids=torch.cat([context, value])[None]).logits[0]
        scores = logits[-len(value) - 1 : -1].log_softmax(1)
        assert log_prob == pytest.approx(float(scores.gather(1, value[:, None]).sum()), abs=1e-4)


def test_a_candidates_place_changes_nothing() -> None:
    anatomy = find_anatomy(model_of("llama"))
    values = [torch.tensor([n, n + 1]) for n in range(40)]
    context = torch.tensor([1, 2, 3])
    log_probs, _ = candidate_log_probs(anatomy, context, values)
    order = torch.randperm(40)
    shuffled, _ = candidate_log_probs(anatomy, context, [values[n] for n in order.tolist()])
    assert torch.equal(shuffled, log_probs[order])


# A published name of a pool of texts lets nobody test a guess of the texts or of the members.


def pool(*pins: int) -> list[Text]:
    return [Text(torch.tensor([5, 6, pin]), torch.tensor([5, 6, pin])) for pin in pins]


def test_a_pool_has_one_name_in_any_order_and_another_pool_has_another() -> None:
    members = torch.tensor([True, False, True])
    name = pool_digest(pool(1, 2, 3), members)
    order = torch.tensor([2, 0, 1])
    assert pool_digest([pool(1, 2, 3)[n] for n in order.tolist()], members[order]) == name
    assert pool_digest(pool(1, 2, 4), members) != name
    assert pool_digest(pool(1, 2, 3), ~members) != name


def test_the_name_is_no_hash_that_others_can_compute() -> None:
    """Neither by the formula without a key, nor by this package in another process."""
    texts, members = pool(4711), torch.tensor([True])
    row = hashlib.sha256(texts[0].content + b"\1").digest()
    name = pool_digest(texts, members)
    assert name == private_files.name_content(row)
    for content in (row, texts[0].content):
        assert name != hashlib.sha256(content).hexdigest()[:16]
    spec = importlib.util.find_spec(private_files.__name__)
    assert spec is not None
    assert spec.loader is not None
    again = importlib.util.module_from_spec(spec)  # what a second process has
    spec.loader.exec_module(again)
    assert again.name_content(row) != name
