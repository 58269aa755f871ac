"""Tiny Llamas with bottleneck adapters, and texts whose types are as uneven as words."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

WIDTH, RANK = 16, 8
EMBEDDING_ADAPTER = "model.embed_tokens.adapter"


class Bottleneck(nn.Module):
    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(width, rank), nn.Linear(rank, width)
        for linear in (self.down, self.up):
            nn.init.normal_(linear.weight, std=0.01)
            nn.init.zeros_(linear.bias)

    def forward(self, states: Tensor) -> Tensor:
        return states + self.up(self.down(states).relu())


class AdaptedEmbedding(nn.Embedding):
    def __init__(self, types: int, width: int, rank: int) -> None:
        super().__init__(types, width)
        self.adapter = Bottleneck(width, rank)

    def forward(self, ids: Tensor) -> Tensor:
        return self.adapter(super().forward(ids))


class Adapted(nn.Module):
    def __init__(self, inner: nn.Module, width: int, rank: int) -> None:
        super().__init__()
        self.inner, self.adapter = inner, Bottleneck(width, rank)

    def forward(self, states: Tensor) -> Tensor:
        return self.adapter(self.inner(states))


def adapted_llama(
    types: int, *, width: int = WIDTH, rank: int = RANK, behind_blocks: bool = False
) -> LlamaForCausalLM:
    """A frozen Llama with an adapter behind its embedding, and behind its feed-forward layers."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=types,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=2,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    embedding = AdaptedEmbedding(types, width, rank)
    embedding.weight = model.model.embed_tokens.weight
    model.model.embed_tokens = embedding
    if behind_blocks:
        for block in model.model.layers:
            block.mlp = Adapted(block.mlp, width, rank)
    return model


def zipf_texts(texts: int, length: int, types: int, seed: int = 0) -> Tensor:
    """Ids (texts, length), of which id i has odds of 1 / (3 + i)."""
    odds = 1 / (3.0 + torch.arange(types))
    generator = torch.Generator().manual_seed(seed)
    ids = torch.multinomial(odds, texts * length, replacement=True, generator=generator)
    return ids.view(texts, length)
