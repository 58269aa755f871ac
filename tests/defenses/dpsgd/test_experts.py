"""Whole mixture-of-experts models under DP-SGD, against one backward pass for each sample."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.models.mixtral.modeling_mixtral import MixtralExperts, MixtralTopKRouter

from lightning_fedleak.defenses import DPSGD, ClipSettings, DefenseError, Users
from lightning_fedleak.defenses.dpsgd import experts
from lightning_fedleak.defenses.dpsgd.per_sample import _ExpertRows, weighted_sum
from lightning_fedleak.defenses.dpsgd.recorder import Recorder
from lightning_fedleak.defenses.dpsgd.setup_checks import check_model
from tests.defenses.dpsgd.test_dpsgd import Run
from tests.defenses.dpsgd.test_dpsgd_per_sample import CLIPPINGS, batch_of, compare, loss_of, ours
from tests.helpers.models import own_rng, tiny_mixtral

SIZES: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "max_position_embeddings": 64,
}  # fmt: skip
FEW = {"intermediate_size": 12, "num_experts": 5, "num_experts_per_tok": 3}
LATENT = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
    "n_shared_experts": 1, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4,
    "v_head_dim": 8, "qk_nope_head_dim": 4, "first_k_dense_replace": 1,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Mixtral": ("Mixtral", {"intermediate_size": 24, "num_local_experts": 4}),
    "Qwen3-MoE": ("Qwen3Moe", FEW | {"moe_intermediate_size": 12, "head_dim": 8}),
    "GPT-OSS": (
        "GptOss",
        {"intermediate_size": 12, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}
        | {"layer_types": ["full_attention"] * 2},
    ),
    "DeepSeek-V3": ("DeepseekV3", {"intermediate_size": 24, "moe_intermediate_size": 12} | LATENT),
    "without a gate": (
        "NemotronH",
        {"layers_block_type": ["attention", "moe"], "head_dim": 8, "n_group": 1, "topk_group": 1}
        | {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
        | {"moe_shared_expert_intermediate_size": 12, "intermediate_size": 24},
    ),
}


def model_of(name: str, **more: Any) -> Any:
    kind, settings = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(**SIZES | settings | more)
    with own_rng(0):
        model = getattr(transformers, f"{kind}ForCausalLM")(config).train()
        for parameter in model.parameters():  # biases and scales begin as zeros and ones
            parameter.data += 0.1 * torch.randn_like(parameter)
    for key, parameter in model.named_parameters():
        parameter.requires_grad_(not key.endswith("sinks"))
    model.set_experts_implementation("eager")
    return model


def adapted(**settings: Any) -> Any:
    peft = pytest.importorskip("peft")
    with own_rng(1):
        return peft.get_peft_model(tiny_mixtral(), peft.LoraConfig(r=2, **settings)).train()


def check(model: Any, *forms: Any, samples: int = 5) -> None:
    model = model.double()
    check_model(model)
    compare(model, batch_of("causal", samples), loss_of("causal"), forms or ["auto"])


@pytest.mark.parametrize("name", MODELS)
def test_norms_and_clipped_sums_are_exact(name: str) -> None:
    model = model_of(name)
    assert any(experts.is_experts(module) for module in model.modules())
    check(model, *CLIPPINGS)


@pytest.mark.parametrize("samples", [1, 2, 3])
def test_experts_that_multiply_all_rows_at_once_are_exact(samples: int) -> None:
    model = model_of("GPT-OSS")
    model.set_experts_implementation("batched_mm")
    check(model, samples=samples)


@pytest.mark.parametrize("name", ["Mixtral", "GPT-OSS"])
@pytest.mark.parametrize("trained", ["up_proj", "down_proj", "_bias", "gate.weight", "router"])
def test_a_part_of_the_experts_may_be_frozen(name: str, trained: str) -> None:
    model = model_of(name)
    for key, parameter in model.named_parameters():
        parameter.requires_grad_("embed" in key or (".mlp." in key and trained in key))
    check(model)


@pytest.mark.parametrize("saved", ["gate", "experts"])
def test_a_lora_beside_whole_experts_is_exact(saved: str) -> None:
    settings = {"target_modules": ["q_proj"], "modules_to_save": [saved]}
    check(adapted(init_lora_weights=False, **settings))


def test_checkpointed_blocks_are_exact() -> None:
    model = model_of("Qwen3-MoE")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    check(model)


def test_experts_that_nobody_chose_get_zeros() -> None:
    model = tiny_mixtral().double().train()
    gates = [layer.mlp.gate.weight for layer in model.model.layers]
    for gate in gates:
        gate.data[2:] = 0.0
        gate.data[:2] *= 1e3
    with torch.no_grad():
        gates[1][1] = -gates[1][0]
    check(model)
    batch, loss = batch_of("causal"), loss_of("causal")
    for clipping in CLIPPINGS:
        _, _, parts = ours(model, batch, loss, 1.0, clipping)
        stacked = model.model.layers[0].mlp.experts.gate_up_proj
        total = weighted_sum(parts[stacked], torch.ones(5), stacked.shape)
        torch.testing.assert_close(total, stacked.grad)


def test_rows_of_experts_take_the_memory_of_factors_not_of_all_experts() -> None:
    model = tiny_mixtral().train()
    recorder, batch = Recorder(model), batch_of("causal", 2, 4)
    with recorder.step(2):
        loss = loss_of("causal")(model, batch)
    loss.backward()
    [part] = recorder.parts[model.model.layers[0].mlp.experts.gate_up_proj]
    assert isinstance(part, _ExpertRows)
    assert (part.left.shape, part.right.shape) == ((2, 8, 48), (2, 8, 16))


class ExpertBlock(nn.Module):
    """A linear layer, a block of experts, and a head; its batch are numbers (B, T, 6)."""

    def __init__(self, kind: str = "batched_mm") -> None:
        super().__init__()
        model = tiny_mixtral(kind)
        with own_rng(2):
            self.below, self.above = nn.Linear(6, 16), nn.Linear(16, 3)
        self.mlp = model.model.layers[0].mlp

    def forward(self, x: Tensor) -> Tensor:
        return self.above(self.mlp(self.below(x)))


class BlockRun(Run):
    def loss(self, batch: Any) -> Tensor:
        return self.root(batch[0]).square().mean((1, 2)).mean()


def a_batch(samples: int) -> list[Tensor]:
    x = torch.randn(samples, 7, 6, generator=torch.Generator().manual_seed(0))
    return [x, torch.zeros(samples)]


@pytest.mark.parametrize("form", CLIPPINGS[:2])
def test_a_release_of_users_is_exact(form: Any) -> None:
    """Two rows of a user are clipped together."""
    users = Users([i // 2 for i in range(40)])
    defense = DPSGD(0.3, noise_multiplier=0.0, unit=users, clip=ClipSettings(form=form))
    run = BlockRun(defense, ExpertBlock())
    sampler: Any = run.loader.batch_sampler
    rows = next(iter(sampler))
    batch = a_batch(40)
    taken = [value[rows] for value in batch]
    gradients = run.one_by_one(taken)
    pairs = gradients.view(len(rows) // 2, 2, -1).mean(1)
    clipped = pairs * (0.3 / pairs.norm(dim=1).clamp(min=0.3))[:, None]
    expected, update = clipped.sum(0), run.step(taken)
    torch.testing.assert_close(update / update.norm(), expected / expected.norm())


@pytest.mark.slow
def test_compiled_experts_release_what_plain_ones_do() -> None:
    """The router stays out of compiled code, also in a copy of the model."""
    updates = []
    for backend in ("", "aot_eager"):
        root = ExpertBlock()
        if backend:
            root.compile(backend=backend)
        run = BlockRun(DPSGD(0.3, noise_multiplier=0.0), root)
        updates.append(run.step(a_batch(5), lr=0.0))
    torch.testing.assert_close(*updates)
    twin, x = copy.deepcopy(root.mlp.gate), torch.randn(3, 16)
    torch.nn.init.zeros_(twin.weight)
    assert not twin(x)[0].any()
    run.defense.teardown()
    assert "forward" not in vars(root.mlp.gate)
    assert root.mlp.gate(x)[0].any()


class Scaled(MixtralExperts):
    """Experts that scale what they take."""

    __module__ = "transformers_modules.own"

    def forward(self, hidden: Tensor, index: Tensor, scores: Tensor) -> Tensor:
        return super().forward(2 * hidden, index, scores)


class WarmRouter(MixtralTopKRouter):
    """A router whose first output is no logits."""

    __module__ = "transformers_modules.own"

    def forward(self, hidden: Tensor) -> Any:
        logits, scores, index = super().forward(hidden)
        return logits * 2, scores, index


class BiasedRouter(MixtralTopKRouter):
    """A router with a parameter more, which its scores depend on."""

    __module__ = "transformers_modules.own"

    def forward(self, hidden: Tensor) -> Any:
        logits, scores, index = super().forward(hidden)
        return logits, scores * self.scale, index


@pytest.mark.parametrize("kind", [Scaled, WarmRouter, BiasedRouter])
def test_what_computes_otherwise_is_refused_in_the_first_step(kind: type) -> None:
    block = ExpertBlock()
    inner = block.mlp.experts if kind is Scaled else block.mlp.gate
    inner.__class__ = kind
    if kind is BiasedRouter:
        inner.scale = nn.Parameter(torch.ones(1))
        block.mlp.requires_grad_(False).gate.scale.requires_grad_(True)
        for parameter in block.parameters():  # its gradient is small beside others
            parameter.data *= 5
    run = BlockRun(DPSGD(0.3, noise_multiplier=0.0), block)
    with pytest.raises(DefenseError, match=r"is not the sum of its recorded"):
        run.step(a_batch(5))


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "attention sinks": (
        lambda: model_of("GPT-OSS").requires_grad_(True),
        r"GptOssAttention\) trains \['sinks'\].*freeze them",
    ),
    "experts that take all rows": (
        lambda: transformers.Llama4ForCausalLM(
            transformers.Llama4TextConfig(
                **SIZES, intermediate_size=12, intermediate_size_mlp=12, num_local_experts=2,
                head_dim=8, moe_layers=[0, 1],
            )
        ).train(),
        r"experts' \(Llama4TextExperts\) holds experts in a form.*LoRA of the attention",
    ),
    "experts as layers": (
        lambda: transformers.SwitchTransformersForConditionalGeneration(
            transformers.SwitchTransformersConfig(
                vocab_size=97, d_model=16, d_kv=8, d_ff=12, num_layers=2, num_heads=2,
                num_experts=2, dropout_rate=0.0,
            )
        ).train(),
        r"\(SwitchTransformersExperts\) holds experts in a form.*Freeze it",
    ),
    "adapted experts": (
        lambda: adapted(target_parameters=["mlp.experts.gate_up_proj"]),
        r"\(ParamWrapper\) adapts a stacked parameter.*modules_to_save=\['experts'\]",
    ),
    "tokens that are left out": (
        lambda: transformers.NllbMoeForConditionalGeneration(
            transformers.NllbMoeConfig(
                vocab_size=97, d_model=16, encoder_layers=1, decoder_layers=1, num_experts=2,
                encoder_ffn_dim=12, decoder_ffn_dim=12, encoder_attention_heads=2,
                decoder_attention_heads=2,
            )
        ).train(),
        "drops tokens of one example if other examples fill an expert",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_couples_examples_or_is_not_known_is_refused_at_setup(name: str) -> None:
    build, message = REFUSED[name]
    with own_rng(0):
        model = build()
    with pytest.raises(DefenseError, match=message):
        check_model(model)


class Balanced(Run):
    """Adds the router's loss, which is asked for in the call or by the model's config."""

    asks: bool | None = True

    def loss(self, batch: Any) -> Tensor:
        ids = batch[0]
        loss: Tensor = self.root(input_ids=ids, labels=ids, output_router_logits=self.asks).loss
        return loss


@pytest.mark.parametrize("by_config", [False, True])
def test_a_routers_loss_is_refused_in_the_first_step(by_config: bool) -> None:
    model = tiny_mixtral().train()
    model.config.output_router_logits = by_config
    run = Balanced(DPSGD(0.3, noise_multiplier=0.0), model)
    run.asks = None if by_config else True
    ids = torch.randint(3, 97, (5, 6), generator=torch.Generator().manual_seed(0))
    with pytest.raises(DefenseError, match="loss is not known to be a mean of per-sample means"):
        run.step([ids, torch.zeros(5)])
