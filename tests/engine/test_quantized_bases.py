"""LoRA on quantized bases: training is not disturbed, and as much is read as of plain weights.

``make test-quantized`` installs the packages that these tests need, and runs them.
"""

import json
import logging
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from peft.tuners.lora.awq import AwqLoraLinear
from peft.tuners.lora.gptq import GPTQLoraLinear
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_fedleak import LeakageMonitor, PublicText
from lightning_fedleak.attacks import SubspaceWords
from lightning_fedleak.callbacks import Games, WatchSettings
from lightning_fedleak.model.anatomy import find_anatomy
from lightning_fedleak.model.model_runs import undisturbed
from tests.helpers.folders import save_tiny_llama
from tests.helpers.lightning_modules import CausalLMModule
from tests.helpers.settings import QUIET

logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)  # of every layer
VOCAB, LENGTH, STEPS = 512, 16, 4
SINGLE = LoraConfig(r=16, lora_alpha=32, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
HALF = {"dtype": torch.bfloat16}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a tiny Llama lies, whose layers have biases, as those of Qwen2 do."""
    folder = tmp_path_factory.mktemp("llama")
    return save_tiny_llama(folder, vocab_size=VOCAB, attention_bias=True)


def load(folder: Path, settings: Any, **options: Any) -> nn.Module:
    options = {"dtype": torch.float32, **options}
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, device_map={"": "cpu"}, quantization_config=settings, **options
    )


def nf4(folder: Path, *, compute: torch.dtype = torch.float32, **options: Any) -> nn.Module:
    pytest.importorskip("bitsandbytes")
    double = options.pop("double", False)
    settings = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=compute,
        bnb_4bit_use_double_quant=double,
    )  # fmt: skip
    return load(folder, settings, **options)


def nf4_ready(folder: Path) -> nn.Module:
    base = nf4(folder, compute=torch.bfloat16, double=True)
    return prepare_model_for_kbit_training(
        base, gradient_checkpointing_kwargs={"use_reentrant": False}
    )


def int8(folder: Path, **options: Any) -> nn.Module:
    pytest.importorskip("bitsandbytes")
    return load(folder, transformers.BitsAndBytesConfig(load_in_8bit=True), **options)


def torchao(folder: Path, **options: Any) -> nn.Module:
    quantization = pytest.importorskip("torchao.quantization")
    return load(folder, transformers.TorchAoConfig(quantization.Int8WeightOnlyConfig()), **options)


BASES: dict[str, Any] = {
    "nf4, double, checkpointing": (nf4_ready, SINGLE),
    "nf4, bf16 head and embeddings trained": (
        lambda folder: nf4(folder, compute=torch.bfloat16, **HALF),
        replace(SINGLE, modules_to_save=["embed_tokens", "lm_head"]),
    ),
    "int8, bf16, all layers": (
        lambda folder: int8(folder, **HALF),
        replace(SINGLE, target_modules="all-linear"),
    ),
    "torchao int8": (torchao, SINGLE),
}


def contents(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield by name all tensors and plain values that a module and its tensors hold."""
    if isinstance(value, Tensor):
        whole = value.dequantize() if "torchao" in type(value).__module__ else value.data
        yield name, (value.dtype, value.requires_grad, whole.detach().as_subclass(Tensor).clone())
    elif not hasattr(value, "__dict__") or isinstance(value, type):
        if isinstance(value, dict):
            for key, entry in value.items():
                yield from contents(entry, f"{name}[{key}]")
        elif isinstance(value, bool | int | float | str | torch.dtype | torch.Size | None):
            yield name, value
    modules = isinstance(value, nn.Module) or "bitsandbytes" in type(value).__module__
    if modules or isinstance(value, Tensor):
        for key, entry in vars(value).items():
            if key != "module":  # Params4bit's, of its own layer
                yield from contents(entry, f"{name}.{key}")


def check_equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        if isinstance(value, tuple) and value and isinstance(value[-1], Tensor):
            assert value[:-1] == other[name][:-1], name
            assert torch.equal(value[-1], other[name][-1]), name
        else:
            assert value == other[name], name


class Drawing(CausalLMModule):
    """Keeps each step's loss and a draw of every random generator."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.train(), 1e-3, "adamw")
        self.steps: list[tuple[float, ...]] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        drawn = float(torch.rand(())), random.random(), float(np.random.rand())
        self.steps.append((float(loss.detach()), *drawn))
        return loss


def texts(n: int, seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(5, VOCAB - 5, (n, LENGTH), generator=generator).tolist()


def fit(model: nn.Module, callbacks: list[Any]) -> Drawing:
    L.seed_everything(3)
    rows = [{"input_ids": torch.tensor(x), "labels": torch.tensor(x)} for x in texts(64, 0)]
    module = Drawing(model)
    trainer = L.Trainer(max_steps=STEPS, callbacks=callbacks, **QUIET)
    trainer.fit(module, DataLoader(rows, batch_size=4, shuffle=True))
    return module


def looked(folder: Path, model: nn.Module, attack: Any = None) -> tuple[Drawing, list[Any]]:
    """Return what a fit with a monitor trained, and what was logged."""
    public = PublicText(texts(40, 1)) if attack is None else None
    listed = [] if attack is None else [[attack]]
    monitor = LeakageMonitor(
        *listed, every_n_steps=1, folder=folder,
        games=Games(held_out=PublicText(texts(40, 2)), targets=8),
        settings=WatchSettings(look_seconds=1e4, public_text=public),
    )  # fmt: skip
    module = fit(model, [monitor])
    assert monitor.failures == 0
    lines = (folder / "leakage.jsonl").read_text().splitlines()
    return module, [json.loads(line) for line in lines]


def values(lines: list[Any], attack: str, metric: str) -> list[float]:
    found = [line["metrics"][metric]["value"] for line in lines if line["attack"] == attack]
    return [value for value in found if value is not None]


def adapted(base: nn.Module, config: LoraConfig) -> nn.Module:
    torch.manual_seed(1)
    return get_peft_model(base, config)


@pytest.mark.slow
@pytest.mark.parametrize("name", BASES)
def test_training_is_the_same_to_the_last_bit_and_words_are_read(folder, tmp_path, name) -> None:
    make, config = BASES[name]
    alone = fit(adapted(make(folder), config), [])
    watched, lines = looked(tmp_path, adapted(make(folder), config))
    assert watched.steps == alone.steps
    check_equal(dict(contents(alone.model)), dict(contents(watched.model)))
    assert min(values(lines, "subspace_words", "f1")) >= 0.99
    assert min(values(lines, "gradient_membership", "auc")) == 1
    assert len(values(lines, "subspace_words", "f1")) == STEPS - 1  # the first has no gradient
    if config.modules_to_save:
        assert min(values(lines, "bag_of_words", "f1")) == 1


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("make", [nf4, nf4_ready, int8, torchao])
def test_a_first_run_leaves_what_it_would_fix_for_good(folder, make, training) -> None:
    """Types to compute in, where int8 keeps its weight, and how some CPUs pack four bits."""
    model = make(folder).train(training)
    before = dict(contents(model))
    ids = torch.tensor(texts(2, 3))
    with undisturbed(find_anatomy(model)), torch.no_grad():
        first = model(input_ids=ids).logits
    check_equal(before, dict(contents(model)))
    with undisturbed(find_anatomy(model)):
        again = model(input_ids=ids).logits
        again.sum().backward(inputs=[model.get_input_embeddings().weight.requires_grad_()])
    assert torch.equal(first, again)
    assert all(torch.equal(a[-1], b[-1]) for a, b in tensors(before, dict(contents(model))))


def tensors(*states: dict[str, Any]) -> Iterator[tuple[Any, ...]]:
    for name, value in states[0].items():
        if isinstance(value, tuple) and value and isinstance(value[-1], Tensor):
            yield tuple(state[name] for state in states)


# ---- AWQ and GPTQ --------------------------------------------------------------------------------


class PackedLinear(nn.Module):
    """A layer as gptqmodel makes it: integers in buffers, no ``weight``."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        scales = layer.weight.detach().abs().amax(1) / 7
        whole = (layer.weight.detach() / scales[:, None]).round().to(torch.int32) + 8
        shifts = torch.arange(0, 32, 4, dtype=torch.int32)
        packed = (whole.view(self.out_features, -1, 8) << shifts).sum(-1).to(torch.int32)
        self.register_buffer("qweight", packed)
        self.register_buffer("scales", scales)
        self.register_buffer("shifts", shifts)

    def forward(self, x: Tensor) -> Tensor:
        whole = (self.qweight[:, :, None] >> self.shifts & 15) - 8
        return x @ (whole.flatten(1) * self.scales[:, None]).to(x.dtype).T


@pytest.mark.slow
@pytest.mark.parametrize("kind", [GPTQLoraLinear, AwqLoraLinear])
def test_words_are_read_behind_awq_and_gptq(folder: Path, tmp_path: Path, kind: Any) -> None:
    def make() -> nn.Module:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        for name, layer in [*model.model.layers.named_modules()]:
            if isinstance(layer, nn.Linear):
                model.model.layers.set_submodule(name, PackedLinear(layer))
        config = replace(SINGLE)
        config._register_custom_module({PackedLinear: kind})
        return adapted(model, config)

    model = make()
    anatomy = find_anatomy(model)
    assert (anatomy.vocab_size, anatomy.hidden_size, len(anatomy.blocks)) == (VOCAB, 64, 2)
    assert isinstance(anatomy.blocks[0].self_attn.q_proj, kind)
    watched, lines = looked(tmp_path, model, SubspaceWords(capacity_seconds=0.0))
    assert min(values(lines, "subspace_words", "f1")) >= 0.99
    assert watched.steps == fit(make(), []).steps
