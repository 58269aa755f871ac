"""A model as litgpt has it, in a loop of Fabric: ``forward(idx)``, LoRA on parts of a fused map."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.nn import functional

from lightning_fedleak.attacks import BagOfWords, GradientMembership, SubspaceMembership
from lightning_fedleak.attacks.row_space import find_linear_maps
from lightning_fedleak.attacks.words.subspace import SubspaceWords
from lightning_fedleak.model.anatomy import find_anatomy
from lightning_fedleak.model.model_runs import hidden_states, undisturbed
from tests.helpers.loops import check_undisturbed, watched
from tests.helpers.models import own_rng

VOCABULARY, WIDTH, LENGTH, CHUNK = 200, 64, 12, 8
PUBLIC = torch.randint(VOCABULARY, (24, 10), generator=torch.Generator().manual_seed(2)).tolist()


class FusedLoRA(nn.Module):
    """Queries, keys and values in one map, with LoRA on queries and values."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.linear, self.rank = nn.Linear(WIDTH, 3 * WIDTH, bias=False), rank
        self.lora_dropout = nn.Dropout(0.0)
        if rank:
            self.lora_A = nn.Parameter(torch.randn(2 * rank, WIDTH) / 8)
            self.lora_B = nn.Parameter(torch.zeros(2 * WIDTH, rank))

    def forward(self, x: Tensor) -> Tensor:
        whole: Tensor = self.linear(x)
        if not self.rank:
            return whole
        inner = functional.linear(self.lora_dropout(x), self.lora_A).transpose(1, 2)
        parts = functional.conv1d(inner, self.lora_B[:, :, None], groups=2).transpose(1, 2)
        queries, values = parts.chunk(2, -1)
        return whole + torch.cat([queries, torch.zeros_like(queries), values], -1)


class Block(nn.Module):
    def __init__(self, rank: int) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(WIDTH), FusedLoRA(rank)
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.split(x))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.proj(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.qkv(self.norm(x)).chunk(3, -1)  # type: ignore[no-any-return]


class GPT(nn.Module):
    """A decoder that reads at most ``max_seq_length`` tokens, with logits in chunks if asked."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.max_seq_length = LENGTH
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        blocks = nn.ModuleList(Block(rank) for _ in range(2))
        self.transformer = nn.ModuleDict({"wte": nn.Embedding(VOCABULARY, WIDTH), "h": blocks})
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(not rank or "lora_" in name)

    def forward(self, idx: Tensor, input_pos: Any = None, lm_head_chunk_size: int = 0) -> Any:
        if idx.shape[1] > self.max_seq_length:
            raise ValueError("too long")
        x = self.transformer["wte"](idx)
        for block in self.transformer["h"]:
            x = block(x)
        if lm_head_chunk_size:
            return [self.lm_head(part) for part in x.split(lm_head_chunk_size, 1)]
        return self.lm_head(x)


def fabric_model(rank: int) -> Any:
    with own_rng(3):
        return Fabric(accelerator="cpu", devices=1).setup_module(GPT(rank))


def chunked_loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    logits = torch.cat(model(batch["input_ids"], lm_head_chunk_size=CHUNK), 1)[:, :-1]
    return functional.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())


def batches(n: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    texts = [torch.randint(VOCABULARY, (2, LENGTH), generator=generator) for _ in range(n)]
    return [{"input_ids": ids, "labels": ids} for ids in texts]


def attacks() -> list[Any]:
    return [
        SubspaceWords(PUBLIC, capacity_seconds=0),
        GradientMembership(PUBLIC, public_rows=8),
        SubspaceMembership(PUBLIC, public_rows=8),
    ]


@pytest.mark.parametrize("rank", [0, 16], ids=["whole", "lora"])
def test_words_and_members_are_read_whatever_the_name_of_ids(rank: int, tmp_path: Path) -> None:
    chosen = [*attacks(), *([] if rank else [BagOfWords()])]
    settings = {"batches": batches(4), "loss": chunked_loss, "optimizer": "adamw"}
    watch = check_undisturbed(tmp_path, chosen, lambda: fabric_model(rank), **settings)
    assert watch.failures == 0
    words = [name for name in watch.latest if name.endswith("words/f1")]
    assert len(words) == len(chosen) - 2
    assert min(watch.latest[name] for name in words) == 1
    for name in ("gradient", "subspace"):
        assert watch.latest[f"leakage/{name}_membership/auc"] > 0.9
    played = {series.attack for series in watch.engine.results.playing}
    assert played == {attack.name for attack in chosen}


def test_ids_go_to_the_only_argument_without_a_default() -> None:
    model = fabric_model(4)._forward_module
    anatomy = find_anatomy(model)
    ids = batches(1)[0]["input_ids"]
    with undisturbed(anatomy) as run, torch.no_grad():
        assert torch.equal(run(input_ids=ids), run(ids))
    assert "forward" not in vars(model)
    states = hidden_states(anatomy, 0, ids)
    torch.testing.assert_close(states, model.transformer["wte"](ids).detach())
    with pytest.raises(ValueError, match="truncate texts to 12 tokens"):
        hidden_states(anatomy, 0, torch.zeros(1, LENGTH + 1, dtype=torch.long))


def test_a_factor_of_a_fused_map_reads_what_the_map_reads() -> None:
    anatomy = find_anatomy(GPT(4))
    maps = {m.name: m for m in find_linear_maps(anatomy)}
    factor = maps["transformer.h.0.qkv.lora_A"]
    assert (factor.factor, factor.rows, factor.axis) == ("A", 8, 1)
    assert factor.reader is anatomy.root.get_submodule("transformer.h.0.qkv")
    assert factor.dropouts == (factor.reader.lora_dropout,)
    assert not [name for name in maps if "lora_B" in name]
    assert not [m for m in find_linear_maps(find_anatomy(GPT(0))) if "lora" in m.name]


class OfTwo(GPT):
    def forward(self, idx: Tensor, more: Any) -> Any:  # type: ignore[override]
        return super().forward(idx)


def test_a_message_names_the_users_class(tmp_path: Path) -> None:
    with own_rng(3):
        model = Fabric(accelerator="cpu", devices=1).setup_module(OfTwo(0))

    def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
        return chunked_loss(lambda ids, **_: [model(ids, None)], batch)

    watch = watched(tmp_path, "auto", model, batches=batches(2), loss=loss, public_text=PUBLIC)
    [refused] = {line["unknown"] for line in watch.lines("gradient_membership")}
    assert "OfTwo.forward takes no input_ids: give OfTwo a method" in refused
    assert watch.latest["leakage/bag_of_words/f1"] == 1
