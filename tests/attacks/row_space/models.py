"""Small models of many families, and what a client of each would share."""

from collections.abc import Callable

import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from lightning_fedleak.attacks.words.subspace import SubspaceWords
from lightning_fedleak.model.anatomy import Anatomy, find_anatomy
from lightning_fedleak.model.snapshots import GradientSnapshot, Observation, Stage

VOCABULARY = 300
WIDTH = 64
LENGTH = 24


SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_hidden_layers": 2,
    "num_attention_heads": 4, "intermediate_size": 96,
}  # fmt: skip


def llama(**more: object) -> nn.Module:
    config = transformers.LlamaConfig(**SIZES, num_key_value_heads=2, **more)
    return transformers.LlamaForCausalLM(config)


def gpt2(**more: object) -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=WIDTH, n_layer=2, n_head=4, n_positions=LENGTH, **more
    )
    return transformers.GPT2LMHeadModel(config)


def bert(**more: object) -> nn.Module:
    config = transformers.BertConfig(**SIZES, max_position_embeddings=LENGTH, **more)
    return transformers.BertForMaskedLM(config)


def classifier(**more: object) -> nn.Module:
    config = transformers.BertConfig(**SIZES, max_position_embeddings=LENGTH, **more)
    return transformers.BertForSequenceClassification(config)


def roberta() -> nn.Module:
    config = transformers.RobertaConfig(**SIZES, max_position_embeddings=LENGTH + 2)
    return transformers.RobertaForMaskedLM(config)


def opt() -> nn.Module:
    config = transformers.OPTConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        word_embed_proj_dim=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        ffn_dim=96,
        max_position_embeddings=LENGTH,
    )
    return transformers.OPTForCausalLM(config)


def gemma() -> nn.Module:
    # A padding token's row would be zero, and leave no trace.
    more = {"num_key_value_heads": 1, "head_dim": 16, "pad_token_id": None}
    return transformers.GemmaForCausalLM(transformers.GemmaConfig(**SIZES, **more))


def neox() -> nn.Module:
    return transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**SIZES))


def albert() -> nn.Module:
    more = {"hidden_size": 80, "embedding_size": WIDTH, "max_position_embeddings": LENGTH}
    return transformers.AlbertForMaskedLM(transformers.AlbertConfig(**SIZES | more))


def t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=VOCABULARY,
        d_model=WIDTH,
        d_kv=16,
        num_layers=2,
        num_heads=4,
        d_ff=96,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(config)


FAMILIES: dict[str, Callable[[], nn.Module]] = {
    f.__name__: f for f in (llama, gpt2, bert, roberta, opt, gemma, neox, albert)
}


def ready(model: nn.Module, seed: int = 0) -> nn.Module:
    """Norms with gains and biases of their own, no dropout."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in model.modules():
            if "norm" in type(module).__name__.lower():
                for parameter in module.parameters(recurse=False):
                    parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    return model.eval()


def with_lora(model, rank, targets, **more) -> nn.Module:
    """The model with PEFT's LoRA, moved away from B = 0."""
    settings = {"r": rank, "lora_alpha": 2 * rank, "target_modules": targets, **more}
    adapted = get_peft_model(model, LoraConfig(**settings))
    move_b(adapted)
    return adapted.eval()


def move_b(model: nn.Module) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter += 0.05 * torch.randn(parameter.shape)


def texts(rows: int, length: int, kinds: int = VOCABULARY - 10) -> Tensor:
    """Random ids; from 5 on, since models keep the first ones for themselves."""
    return torch.randint(5, 5 + kinds, (rows, length))


def backward(model: nn.Module, ids: Tensor, **more: Tensor) -> None:
    model.zero_grad()
    more.setdefault("labels", ids)
    model(input_ids=ids, **more).loss.backward()


def observed(attack, anatomy, change=torch.clone) -> Observation:
    """What the attack reads of the gradients as they are now."""
    roles = attack.needs(anatomy).gradients
    grads = {r: anatomy.parameter(r).grad for r in roles}
    tensors = {r: change(g) for r, g in grads.items() if g is not None}
    return Observation((GradientSnapshot(0, Stage.SHARED, tensors),))


def prepared(model, attack=None) -> tuple[SubspaceWords, Anatomy]:
    """Return the attack, by default one that measures no capacity, on a model."""
    anatomy = find_anatomy(model)
    attack = attack or SubspaceWords(capacity_seconds=0)
    attack.needs(anatomy)
    attack.prepare(anatomy)
    return attack, anatomy


def exposed_types(ids: Tensor, *, causal: bool) -> set[int]:
    """Types with a part in the first block's gradients: not a causal text's last."""
    return set((ids[:, :-1] if causal else ids).flatten().tolist())
