"""What is trained changes while a fit goes on: adapters, frozen parts, rows of some tokens."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn

from lightning_fedleak.attacks import (
    BagOfWords,
    GradientMembership,
    SubspaceMembership,
    SubspaceTexts,
    SubspaceWords,
)
from lightning_fedleak.callbacks import LeakageMonitor
from lightning_fedleak.trainers import Watch
from tests.attacks.row_space.models import VOCABULARY, llama
from tests.callbacks.runs import fit
from tests.helpers.lightning_modules import CausalLMModule, random_token_loader

TARGETS = ["q_proj", "v_proj"]
Change = Callable[[nn.Module, int], None]


def seeded(family: Callable[..., nn.Module] = llama, **options: Any) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return family(**options)


def config(**more: Any) -> LoraConfig:
    return LoraConfig(**{"r": 12, "target_modules": TARGETS, "task_type": "CAUSAL_LM"} | more)


def two_adapters(**more: Any) -> PeftModel:
    """The second has another rank; both are ready to be trained."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = get_peft_model(llama(), config(**more), adapter_name="even")
        model.add_adapter("odd", config(**{"r": 8} | more))
        return model


def adapter_at(model: nn.Module, step: int) -> None:
    model.set_adapter("odd" if step % 2 else "even")


def batch_at(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(3, VOCABULARY, (2, 10), generator=generator)


def train(
    model: nn.Module,
    attacks: Sequence[Any] | None,
    folder: Path | None,
    change: Change = lambda model, step: None,
    *,
    inside: bool = False,
    steps: int = 6,
    more: Sequence[nn.Parameter] = (),
) -> list[dict[str, Any]]:
    """Lines of a loop that changes the model before each step, or within; no folder: unwatched."""
    optimizer = torch.optim.AdamW([*model.parameters(), *more], lr=1e-3)
    watch = nullcontext()
    if folder is not None:
        options = {"every_n_steps": 1, "look_seconds": 300, "tensorboard": False}
        listed = [] if attacks is None else [attacks]
        watch = Watch(model, optimizer, *listed, folder=folder, **options)
    with watch:
        for step in range(steps):
            ids = batch_at(step)
            if not inside:
                change(model, step)
            with nullcontext() if folder is None else watch.step({"input_ids": ids, "labels": ids}):
                if inside:
                    change(model, step)
                model(input_ids=ids, labels=ids).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
    if folder is None:
        return []
    return [json.loads(line) for line in next(folder.rglob("leakage.jsonl")).open()]


def values(lines: list[dict[str, Any]], attack: str, metric: str) -> dict[int, float]:
    """A metric by step, of looks that are known and exposed."""
    own = [line for line in lines if line["attack"] == attack and line["stage"] == "shared"]
    assert all(line["unknown"] is None and line["exposed"] for line in own)
    return {line["step"]: line["metrics"][metric]["value"] for line in own}


@pytest.mark.parametrize("inside", [False, True], ids=["before the step", "in the step"])
def test_attacks_follow_the_adapter_that_is_trained_at_a_step(tmp_path: Path, inside: bool) -> None:
    attacks = [
        SubspaceWords(capacity_seconds=0),
        SubspaceTexts(),
        SubspaceMembership(public_rows=8),
        GradientMembership(public_rows=8),
    ]
    lines = train(two_adapters(), attacks, tmp_path, adapter_at, inside=inside)
    assert values(lines, "subspace_words", "f1") == dict.fromkeys(range(2, 6), 1.0)
    assert values(lines, "subspace_texts", "exact_sentences") == dict.fromkeys(range(2, 6), 1.0)
    for attack in ("subspace_membership", "gradient_membership"):
        found = values(lines, attack, "auc")
        assert found.keys() >= {2, 3, 4, 5}
        assert min(found.values()) > 0.9


def test_copies_of_an_embedding_are_followed_with_their_adapter(tmp_path: Path) -> None:
    """Their role has one name, and another parameter at each step."""
    model = two_adapters(modules_to_save=["embed_tokens"])
    lines = train(model, [BagOfWords()], tmp_path, adapter_at)
    assert values(lines, "bag_of_words", "f1") == dict.fromkeys(range(6), 1.0)


def test_training_with_switched_adapters_is_not_disturbed(tmp_path: Path) -> None:
    watched = two_adapters()
    alone = copy.deepcopy(watched)
    torch.manual_seed(3)
    train(watched, [SubspaceWords(), SubspaceTexts()], tmp_path, adapter_at, inside=True)
    states = torch.get_rng_state()
    torch.manual_seed(3)
    train(alone, None, None, adapter_at, inside=True)
    assert torch.equal(states, torch.get_rng_state())
    for (name, one), other in zip(watched.named_parameters(), alone.parameters(), strict=True):
        assert torch.equal(one, other), name


class Switching(CausalLMModule):
    """Chooses the adapter in ``training_step``, after the callbacks have seen the batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        adapter_at(self.model, batch_idx)
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for n, p in self.named_parameters() if "lora_" in n], lr=1e-3)


def test_a_lightning_module_may_switch_in_its_step(tmp_path: Path) -> None:
    monitor = LeakageMonitor([SubspaceWords(capacity_seconds=0)], every_n_steps=1)
    data = random_token_loader(n=12, batch_size=2, length=10, vocab=VOCABULARY)
    fit([monitor], tmp_path, module=Switching(two_adapters().train()), loader=data)
    lines = [json.loads(line) for line in next(tmp_path.rglob("leakage.jsonl")).open()]
    assert values(lines, "subspace_words", "f1") == dict.fromkeys(range(2, 6), 1.0)


def test_trained_tokens_are_read_at_every_look(tmp_path: Path) -> None:
    """Their rows move at each step, and the table that 298 other tokens read does not."""

    def mark(model: nn.Module, step: int) -> None:
        batches.append(batch_at(step))

    batches: list[Tensor] = []
    tokens = batch_at(3).flatten().unique()[:2].tolist()
    model = get_peft_model(seeded(), config(trainable_token_indices=tokens))
    lines = train(model, [SubspaceWords(), SubspaceTexts()], tmp_path, mark)
    assert any(bool(torch.isin(torch.tensor(tokens), ids).all()) for ids in batches)
    assert values(lines, "subspace_words", "f1") == dict.fromkeys(range(1, 6), 1.0)
    assert values(lines, "subspace_words", "certified") == dict.fromkeys(range(1, 6), 1.0)
    assert values(lines, "subspace_texts", "exact_sentences") == dict.fromkeys(range(1, 6), 1.0)


def test_blocks_that_are_unfrozen_one_by_one_are_read_as_they_come(tmp_path: Path) -> None:
    def thaw(model: nn.Module, step: int) -> None:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("layers.1." in name or step >= 3)

    attacks = [SubspaceWords(), BagOfWords(), SubspaceMembership(public_rows=8)]
    lines = train(seeded(tie_word_embeddings=False), attacks, tmp_path, thaw)
    early = [line for line in lines if line["step"] < 3]
    late = [line for line in lines if line["step"] >= 3]
    assert not any(line["exposed"] for line in early if line["attack"] != "subspace_membership")
    for attack in ("subspace_words", "bag_of_words"):
        assert values(late, attack, "f1") == dict.fromkeys(range(3, 6), 1.0)
    found = values([line for line in lines if line["step"]], "subspace_membership", "auc")
    assert found.keys() == {1, 2, 3, 4, 5}
    assert min(found.values()) > 0.9


def test_layers_that_are_replaced_are_followed(tmp_path: Path) -> None:
    """The optimizer owns the new ones from the start; they take their places at step 3."""
    model = seeded(tie_word_embeddings=False)
    embedding, values_map = nn.Embedding(VOCABULARY, 64), nn.Linear(64, 32, bias=False)
    block = model.model.layers[0]
    norm = type(block.input_layernorm)(64)
    nn.init.uniform_(norm.weight, 0.5, 2.0)

    def replace(model: nn.Module, step: int) -> None:
        if step == 3:
            model.set_input_embeddings(embedding)
            block.self_attn.v_proj, block.input_layernorm = values_map, norm

    more = [p for layer in (embedding, values_map, norm) for p in layer.parameters()]
    lines = train(model, [SubspaceWords(), SubspaceTexts()], tmp_path, replace, more=more)
    assert values(lines, "subspace_words", "f1") == dict.fromkeys(range(6), 1.0)
    assert values(lines, "subspace_words", "certified") == dict.fromkeys(range(6), 1.0)
    texts = [line for line in lines if line["attack"] == "subspace_texts"]
    assert values(texts[:3], "subspace_texts", "exact_sentences") == dict.fromkeys(range(3), 1.0)
    assert all(line["unknown"] for line in texts[3:])  # its copy of the model has the old embedding


# ---- attacks that choose themselves -----------------------------------------------------------


@pytest.mark.parametrize("more", [
    {"layers_to_transform": [1]}, {"target_modules": ["o_proj", "down_proj"]},
])  # fmt: skip
def test_members_are_told_where_no_adapter_shows_words(
    tmp_path: Path, more: dict[str, Any]
) -> None:
    model = get_peft_model(seeded(), config(**more))
    lines = train(model, None, tmp_path, steps=5)
    for attack in ("subspace_membership", "gradient_membership"):
        found = values([line for line in lines if line["step"] > 2], attack, "auc")
        assert found.keys() == {3, 4}
        assert min(found.values()) > 0.8


def test_an_attack_whose_trial_fails_does_not_choose_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others are played all the same, and are left out where they take too long."""

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("a layer of another kind")

    monkeypatch.setattr(SubspaceMembership, "run", fail)
    model = get_peft_model(seeded(), config())
    lines = train(model, None, tmp_path, steps=5)
    (refused,) = (line for line in lines if line["attack"] == "subspace_membership")
    assert refused["unknown"].startswith("not played: its looks fail on this model (RuntimeError")
    late = [line for line in lines if line["step"] > 2]
    assert values(late, "subspace_words", "f1") == {3: 1.0, 4: 1.0}
    assert values(late, "gradient_membership", "auc").keys() == {3, 4}
