"""Whether packed documents attend to each other, tried on the call that a step made."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lightning_fedleak.model.anatomy import find_anatomy
from lightning_fedleak.model.batches import TokenBatch, read_batch
from lightning_fedleak.model.snapshots import UnusableObservation
from lightning_fedleak.model.taps.calls import ModelCalls, arguments_of, crosses
from tests.helpers.models import tiny_bert_mlm, tiny_gpt2, tiny_llama
from tests.test_batches_documents import block_diagonal, flattened

MODELS = {
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
@pytest.mark.parametrize("name", MODELS)
def test_it_is_what_the_gradient_says(name: str, call: str, attention: str) -> None:
    model = MODELS[name]()
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
