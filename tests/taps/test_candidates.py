"""Candidates after a cached context, against whole forwards in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, TaskType, get_peft_model
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from lightning_fedleak.model.anatomy import find_anatomy
from lightning_fedleak.model.taps import candidate_log_probs, tokens


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
