"""Saved models are loaded whole, or refused; and a base's own weights are recognised."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor

from lightning_fedleak.model.loading import are_equal, load_adapters, load_whole, weight_sums
from lightning_fedleak.validate import WrongModel

SIZES = {"vocab_size": 40, "n_positions": 8, "n_embd": 8, "n_layer": 2, "n_head": 1}
Rename = Callable[[str], str]


def new(seed: int) -> transformers.GPT2LMHeadModel:
    torch.manual_seed(seed)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**SIZES))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    new(1).save_pretrained(tmp_path)
    return tmp_path


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], object], pickled: bool) -> None:
    """Change the tensors in a model's folder, which may then be in a file of torch."""
    path = folder / "model.safetensors"
    content = change(load_file(path))
    path.unlink()
    if pickled:
        torch.save(content, folder / "pytorch_model.bin")
    else:
        save_file(content, path, {"format": "pt"})


@pytest.mark.parametrize("pickled", [False, True])
@pytest.mark.parametrize("prefix", ["model.", "_orig_mod.", "module.", "net.", "a.b.", ""])
def test_one_prefix_is_removed(saved: Path, prefix: str, pickled: bool) -> None:
    rewrite(saved, lambda state: {prefix + name: tensor for name, tensor in state.items()}, pickled)
    model, head = load_whole(transformers.AutoModelForCausalLM, str(saved))
    assert not head
    assert are_equal(weight_sums(model), weight_sums(new(1)))


@pytest.mark.parametrize("prefix", ["", "model."])
def test_a_checkpoint_of_lightning_is_read(saved: Path, prefix: str) -> None:
    def wrap(state: dict[str, Tensor]) -> object:
        return {"state_dict": {prefix + n: t for n, t in state.items()}, "epoch": 3}

    rewrite(saved, wrap, True)
    model, _ = load_whole(transformers.AutoModelForCausalLM, str(saved))
    assert are_equal(weight_sums(model), weight_sums(new(1)))


@pytest.mark.parametrize(
    ("part", "first"), [("wte", "transformer.wte.weight"), ("h.0.", "transformer.h.0.attn")]
)
def test_missing_tensors_are_named(saved: Path, part: str, first: str) -> None:
    rewrite(saved, lambda state: {n: t for n, t in state.items() if part not in n}, False)
    with pytest.raises(WrongModel, match=f"lacks .*{first}"):
        load_whole(transformers.AutoModelForCausalLM, str(saved))


def test_several_prefixes_are_refused_and_further_tensors_named(saved, tmp_path_factory) -> None:
    def double(state: dict[str, Tensor]) -> dict[str, Tensor]:
        return {f"{p}.{n}": t.clone() for n, t in state.items() for p in ("a", "b")}

    rewrite(saved, double, False)
    with pytest.raises(WrongModel, match="after several prefixes"):
        load_whole(transformers.AutoModelForCausalLM, str(saved))
    other = tmp_path_factory.mktemp("other")
    new(2).save_pretrained(other)
    rewrite(other, lambda state: {**state, "v_head.weight": torch.zeros(3)}, False)
    with pytest.warns(UserWarning, match=r"also holds v_head\.weight"):
        load_whole(transformers.AutoModelForCausalLM, str(other))


def test_a_wrong_shape_and_a_damaged_file_are_refused(saved: Path) -> None:
    wide = "model.transformer.wpe.weight"

    def widen(state: dict[str, Tensor]) -> dict[str, Tensor]:
        return {f"model.{n}": t for n, t in state.items()} | {wide: torch.zeros(9, 8)}

    rewrite(saved, widen, True)
    with pytest.raises(WrongModel, match=r"wpe.weight has the shape \(9, 8\)"):
        load_whole(transformers.AutoModelForCausalLM, str(saved))


def test_only_a_head_may_be_missing(tmp_path: Path) -> None:
    config = transformers.BertConfig(
        vocab_size=40, hidden_size=8, num_hidden_layers=1, num_attention_heads=1,
        intermediate_size=8, num_labels=3,
    )  # fmt: skip
    transformers.BertForMaskedLM(config).save_pretrained(tmp_path)
    kind = transformers.AutoModelForSequenceClassification
    _, head = load_whole(kind, str(tmp_path), may_lack_head=True)
    assert {"classifier.weight", "classifier.bias"} <= head
    assert all("classifier" in name or "pooler" in name for name in head)
    with pytest.raises(WrongModel, match="lacks"):
        load_whole(kind, str(tmp_path))
    rewrite(tmp_path, lambda s: {n: t for n, t in s.items() if "word_emb" not in n}, False)
    with pytest.raises(WrongModel, match="word_embeddings"):
        load_whole(kind, str(tmp_path), may_lack_head=True)


@pytest.mark.parametrize("prefix", ["", "model."])
def test_the_head_is_read_after_the_prefix_too(tmp_path: Path, prefix: str) -> None:
    torch.manual_seed(0)
    saved = transformers.BertForSequenceClassification(
        transformers.BertConfig(
            vocab_size=40, hidden_size=8, num_hidden_layers=1, num_attention_heads=1,
            intermediate_size=8, num_labels=3,
        )
    )  # fmt: skip
    saved.save_pretrained(tmp_path)
    rewrite(tmp_path, lambda state: {prefix + n: t for n, t in state.items()}, False)
    model, head = load_whole(
        transformers.AutoModelForSequenceClassification, str(tmp_path), may_lack_head=True
    )
    assert not head
    assert are_equal(weight_sums(model), weight_sums(saved))


@pytest.mark.parametrize(
    "rename",
    [
        lambda name: name,
        lambda name: "model." + name,
        lambda name: name.replace("base_model.model.", "base_model.model._orig_mod."),
        lambda name: name.replace(".weight", ".default.weight"),
    ],
)
def test_adapters_are_loaded_whatever_wrapped_them(tmp_path: Path, rename: Rename) -> None:
    adapted = get_peft_model(new(1), LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True))
    for parameter in adapted.parameters():
        torch.nn.init.normal_(parameter) if parameter.requires_grad else None
    adapted.save_pretrained(tmp_path)
    path = tmp_path / "adapter_model.safetensors"
    state = load_file(path)
    save_file({rename(name): tensor for name, tensor in state.items()}, path, {"format": "pt"})
    loaded = load_adapters(new(1), str(tmp_path))
    assert are_equal(weight_sums(loaded), weight_sums(adapted))
    save_file({n: t for n, t in state.items() if "h.0" in n}, path, {"format": "pt"})
    with pytest.raises(WrongModel, match=r"lacks .*h\.1"):
        load_adapters(new(1), str(tmp_path))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_equal_weights_are_recognised_up_to_their_stored_dtype(dtype: torch.dtype) -> None:
    base, rounded = new(1), new(1).to(dtype).float()
    for first, second in ((base, rounded), (rounded, base)):
        assert are_equal(weight_sums(first), weight_sums(second))
    assert are_equal(weight_sums(base), weight_sums(new(1).to(dtype)))
    trained = new(1)
    trained.transformer.h[1].ln_1.bias.data[0] += 0.1
    assert not are_equal(weight_sums(base), weight_sums(trained.to(dtype)))
    assert not are_equal(weight_sums(base), weight_sums(new(2)))
