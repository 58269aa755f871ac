"""PEFT's kinds of adapters under DP-SGD, against one backward pass for each sample in float64."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_fedleak.defenses import DPSGD, DefenseError, mean_of_sample_means
from lightning_fedleak.defenses.dpsgd import rerun
from lightning_fedleak.defenses.dpsgd.recorder import Recorder
from lightning_fedleak.defenses.dpsgd.setup_checks import check_model
from tests.defenses.dpsgd.test_dpsgd import Run
from tests.defenses.dpsgd.test_dpsgd_per_sample import batch_of, compare, loss_of, mixed
from tests.helpers.models import own_rng, tiny_gpt2, tiny_llama, tiny_mixtral

peft = pytest.importorskip("peft")

MAPS = {"target_modules": ["q_proj", "v_proj"]}
RANK = {"r": 2, **MAPS}
RANDOM = {"init_lora_weights": False}
PROMPT = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 3}
WORDS = list(range(3, 60))  # every text has some of them
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "LoRA": ("LoraConfig", RANK | RANDOM),
    "rsLoRA": ("LoraConfig", RANK | RANDOM | {"use_rslora": True}),
    "PiSSA": ("LoraConfig", RANK | {"init_lora_weights": "pissa"}),
    "DoRA": ("LoraConfig", RANK | RANDOM | {"use_dora": True}),
    "LoRA on embeddings": ("LoraConfig", RANK | RANDOM | {"target_modules": ["embed_tokens"]}),
    "IA3": (
        "IA3Config",
        {
            "target_modules": ["v_proj", "down_proj"],
            "feedforward_modules": ["down_proj"],
            "init_ia3_weights": False,
        },
    ),
    "VeRA": ("VeraConfig", RANK | {"init_weights": False}),
    "LoHa": ("LoHaConfig", RANK | {"init_weights": False}),
    "LoKr": ("LoKrConfig", RANK | {"init_weights": False}),
    "HRA": ("HRAConfig", RANK | {"init_weights": False}),
    "FourierFT": ("FourierFTConfig", MAPS | {"n_frequency": 10}),
    "OFT": ("OFTConfig", MAPS | {"r": 0, "oft_block_size": 4, "init_weights": False}),
    "BOFT": ("BOFTConfig", MAPS | {"boft_block_size": 4, "init_weights": False}),
    "LayerNorm": ("LNTuningConfig", {"target_modules": ["input_layernorm"]}),
    "trainable tokens": (
        "TrainableTokensConfig",
        {"token_indices": WORDS, "target_modules": ["embed_tokens"], "init_weights": False},
    ),
    "prompt tuning": ("PromptTuningConfig", PROMPT),
    "p-tuning": ("PromptEncoderConfig", PROMPT | {"encoder_hidden_size": 8}),
    "prefix tuning": ("PrefixTuningConfig", PROMPT),
    # Beside the nineteen kinds above and AdaLoRA:
    "LoRA and tokens": ("LoraConfig", RANK | RANDOM | {"trainable_token_indices": WORDS}),
    "VB-LoRA": ("VBLoRAConfig", RANK | {"num_vectors": 6, "vector_length": 4, "topk": 2}),
    "C3A": ("C3AConfig", MAPS | {"block_size": 4, "init_weights": False}),
    "MiSS": ("MissConfig", RANK | {"init_weights": False}),
    "LoHa with dropped ranks": (
        "LoHaConfig",
        RANK | {"init_weights": False, "rank_dropout": 0.4, "module_dropout": 0.3},
    ),
}


def adapted(name: str, **settings: Any) -> nn.Module:
    kind, more = KINDS[name]
    with own_rng(1):
        model = peft.get_peft_model(tiny_llama(), getattr(peft, kind)(**(more | settings)))
    return model.double().train()


@pytest.mark.parametrize("name", list(KINDS))
def test_clipped_sums_of_every_kind_are_exact(name: str) -> None:
    model, batch, loss = adapted(name), batch_of("causal"), loss_of("causal")
    check_model(model)

    def drawn(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """The loss with the same ranks dropped in every call."""
        with own_rng(4):
            return loss(model, batch)

    parts = compare(model, batch, drawn, ["auto", "per_sample"])
    assert set(parts) == {p for p in model.parameters() if p.grad is not None}
    assert parts


@pytest.mark.parametrize("name", ["DoRA", "HiRA"])
@pytest.mark.parametrize("at_once", [1, 1 << 26])
def test_dropout_in_an_adapter_is_that_of_the_step(
    name: str, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rerun, "SIZE_AT_ONCE", at_once)
    monkeypatch.setitem(KINDS, "HiRA", ("HiraConfig", RANK))
    drop = {"lora_dropout": 0.4} if name == "DoRA" else {"hira_dropout": 0.4}
    model, batch = adapted(name, **drop), batch_of("causal")
    check_model(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    labels = batch["labels"]

    def logits() -> Tensor:
        inputs = {key: value for key, value in batch.items() if key != "labels"}
        return model(**inputs, use_cache=False).logits

    torch.manual_seed(3)
    every = logits()
    losses = [
        mean_of_sample_means(every[i : i + 1], labels[i : i + 1], causal=True) for i in range(5)
    ]
    expected = [torch.autograd.grad(one, trained, retain_graph=True) for one in losses]
    after = torch.get_rng_state()
    recorder = Recorder(model)
    torch.manual_seed(3)
    with recorder.step(5):
        value = mean_of_sample_means(logits(), labels, causal=True)
    value.backward()
    assert torch.equal(torch.get_rng_state(), after)
    recorder.check()
    for index, parameter in enumerate(trained):
        (part,) = recorder.parts[parameter]
        true = torch.stack([gradients[index] for gradients in expected])
        assert float((part.values * 5 - true).norm()) < 1e-6 * max(1e-3, float(true.norm()))


def test_a_lora_on_positions_keeps_samples_apart() -> None:
    """GPT-2 looks its positions up once for all samples; as many as samples would be confused."""
    config = peft.LoraConfig(r=2, target_modules=["wpe"], **RANDOM)
    with own_rng(1):
        model = peft.get_peft_model(tiny_gpt2(dropout=0.0), config).double().train()
    compare(model, batch_of("causal", samples=6, length=6), loss_of("causal"), ["auto"])


@pytest.mark.parametrize("name", ["DoRA", "LoKr"])
def test_sums_under_autocast_and_checkpointing(name: str) -> None:
    model, batch, plain = adapted(name).float(), batch_of("causal"), loss_of("causal")
    for loss, bound in ((mixed(plain), 2e-2), (plain, 1e-5)):
        compare(model, batch, loss, ["auto"], bound)
        model.gradient_checkpointing_enable({"use_reentrant": False})


class Mixed(nn.Linear):
    """A base layer that adds its batch's mean."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + x.mean(0, keepdim=True))


@pytest.mark.parametrize("experts", ["eager", "batched_mm"])
def test_a_lora_around_frozen_experts_is_exact(experts: str) -> None:
    model = tiny_mixtral(experts)
    with own_rng(1):
        model = peft.get_peft_model(model, peft.LoraConfig(**(RANK | RANDOM))).double().train()
    check_model(model)
    compare(model, batch_of("causal"), loss_of("causal"), ["auto"])


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "AdaLoRA": (
        lambda: adapted_by("AdaLoraConfig", init_r=4, target_r=2, total_step=10, **MAPS),
        r"changes ranks by gradients.*LoraConfig\(use_rslora=True\)",
    ),
    "an adapter within attention": (
        lambda: adapted_by(
            "AdaptionPromptConfig", task_type="CAUSAL_LM", adapter_len=3, adapter_layers=1
        ),
        "AdaptedAttention.* trains .*one tensor",
    ),
}


def adapted_by(kind: str, **settings: Any) -> nn.Module:
    with own_rng(1):
        return peft.get_peft_model(tiny_llama(), getattr(peft, kind)(**settings)).train()


def mixing() -> nn.Module:
    model = tiny_llama()
    for block in model.model.layers:
        block.self_attn.q_proj.__class__ = Mixed
    config = peft.LoraConfig(**(RANK | {"target_modules": ["q_proj"]}), use_dora=True)
    with own_rng(1):
        return peft.get_peft_model(model, config).train()


@pytest.mark.parametrize("name", list(REFUSED))
def test_what_is_not_exact_is_refused_at_setup(name: str) -> None:
    build, message = REFUSED[name]
    with pytest.raises(DefenseError, match=message):
        check_model(build())


IN_A_STEP: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "PVeRA draws its own numbers": (
        lambda: adapted_by("PveraConfig", **RANK),
        "pvera_lambda_b.* is not the sum of its recorded",
    ),
    "a layer that mixes samples": (mixing, "reaches rows of .*q_proj' of other samples"),
    "Poly needs its task": (
        lambda: adapted_by("PolyConfig", n_tasks=2, n_skills=2, **RANK),
        "task_ids should not be None",
    ),
}


class Causal(Run):
    def loss(self, batch: Any) -> torch.Tensor:
        loss: torch.Tensor = self.root(input_ids=batch[0], labels=batch[0]).loss
        return loss


@pytest.mark.parametrize("name", IN_A_STEP)
def test_what_is_not_exact_is_refused_in_the_first_step(name: str) -> None:
    build, message = IN_A_STEP[name]
    ids = torch.randint(3, 97, (5, 6), generator=torch.Generator().manual_seed(0))
    with pytest.raises((DefenseError, ValueError), match=message):
        Causal(DPSGD(0.3, noise_multiplier=0.0), build()).step([ids, torch.zeros(5)])
