"""What is trained changes while a run goes on: adapters, frozen parts, rows of some tokens."""

from __future__ import annotations

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
from tests.attacks.row_space.models import VOCABULARY, llama
from tests.helpers.loops import check_undisturbed, model_loss, watched
from tests.helpers.models import own_rng


def seeded(**options: Any) -> nn.Module:
    with own_rng(1):
        return llama(**options)


def config(**more: Any) -> LoraConfig:
    targets = ["q_proj", "v_proj"]
    return LoraConfig(**{"r": 12, "target_modules": targets, "task_type": "CAUSAL_LM"} | more)


def two_adapters(**more: Any) -> PeftModel:
    """Return a model with two adapters of different ranks, both ready to be trained."""
    with own_rng(1):
        model = get_peft_model(llama(), config(**more), adapter_name="even")
        model.add_adapter("odd", config(**{"r": 8} | more))
        return model


def adapter_at(model: nn.Module, step: int) -> None:
    model.set_adapter("odd" if step % 2 else "even")


def batch_at(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(3, VOCABULARY, (2, 10), generator=generator)
    return {"input_ids": ids, "labels": ids}


def settings(
    model: nn.Module, change: Any = None, *, inside: bool = True, steps: int = 6, more: Any = ()
) -> dict[str, Any]:
    """Return the settings of a loop that changes the model within each step, or before it."""

    def batches() -> Any:
        for step in range(steps):
            if change is not None and not inside:
                change(model, step)
            yield batch_at(step)

    steps_taken: list[int] = []

    def loss(model: Any, batch: Any) -> Tensor:
        if change is not None and inside:
            change(model, len(steps_taken))
        steps_taken.append(1)
        return model_loss(model, batch)

    optimizer = torch.optim.AdamW([*model.parameters(), *more], lr=1e-3)
    given = {"batches": batches(), "loss": loss, "optimizers": [optimizer]}
    return given | {"look_seconds": 300}


def values(lines: list[dict[str, Any]], metric: str, start: int = 0) -> dict[int, float]:
    """Return a metric by step, of looks that are known and exposed."""
    lines = [line for line in lines if line["stage"] == "shared" and line["step"] >= start]
    assert all(line["unknown"] is None and line["exposed"] for line in lines)
    return {line["step"]: line["metrics"][metric]["value"] for line in lines}


def ones(steps: range) -> dict[int, float]:
    return dict.fromkeys(steps, 1.0)


def test_attacks_follow_the_adapter_that_is_trained_at_a_step(tmp_path: Path) -> None:
    """Also in the harder case, where the set changes within the step."""
    members = [SubspaceMembership(public_rows=8), GradientMembership(public_rows=8)]
    attacks: list[Any] = [SubspaceWords(capacity_seconds=0)]
    attacks += [SubspaceTexts(), *members]
    model = two_adapters()
    watch = watched(tmp_path, attacks, model, **settings(model, adapter_at, steps=4))
    assert values(watch.lines("subspace_words"), "f1") == ones(range(2, 4))
    assert values(watch.lines("subspace_texts"), "exact_sentences") == ones(range(2, 4))
    for attack in members:
        aucs = values(watch.lines(attack.name), "auc")
        assert aucs.keys() >= {2, 3}
        assert min(aucs.values()) > 0.9


def test_copies_of_an_embedding_are_followed_with_their_adapter(tmp_path: Path) -> None:
    """Their role has one name, and another parameter at each step."""
    model = two_adapters(modules_to_save=["embed_tokens"])
    given = settings(model, adapter_at, inside=False, steps=4)
    watch = watched(tmp_path, [BagOfWords()], model, **given)
    assert values(watch.lines(), "f1") == ones(range(4))


def test_training_with_switched_adapters_is_not_disturbed(tmp_path: Path) -> None:
    def loss(model: Any, batch: Any) -> Tensor:
        adapter_at(model, int(batch["input_ids"][0, 0]))
        return model_loss(model, batch)

    def make() -> nn.Module:
        """Return a model of which the optimizer gets both adapters."""
        model = two_adapters()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("lora_" in name)
        return model

    batches = [batch_at(step) for step in range(6)]
    attacks = [SubspaceWords(capacity_seconds=0)]
    check_undisturbed(tmp_path, attacks, make, loss=loss, batches=batches, optimizer="adamw")


def test_trained_tokens_are_read_at_every_look(tmp_path: Path) -> None:
    """Their rows move at each step, and the table that 298 other tokens read does not."""
    tokens = batch_at(3)["input_ids"].flatten().unique()[:2].tolist()
    model = get_peft_model(seeded(), config(trainable_token_indices=tokens))
    attacks = [SubspaceWords(capacity_seconds=0.0), SubspaceTexts()]
    watch = watched(tmp_path, attacks, model, **settings(model, steps=4))
    for metric in ("f1", "certified"):
        assert values(watch.lines("subspace_words"), metric) == ones(range(1, 4))
    assert values(watch.lines("subspace_texts"), "exact_sentences") == ones(range(1, 4))


def test_blocks_that_are_unfrozen_one_by_one_are_read_as_they_come(tmp_path: Path) -> None:
    def thaw(model: nn.Module, step: int) -> None:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("layers.1." in name or step >= 2)

    attacks = [SubspaceWords(capacity_seconds=0.0), BagOfWords(), SubspaceMembership(public_rows=8)]
    model = seeded(tie_word_embeddings=False)
    watch = watched(tmp_path, attacks, model, **settings(model, thaw, inside=False, steps=4))
    for name in ("subspace_words", "bag_of_words"):
        assert not any(line["exposed"] for line in watch.lines(name) if line["step"] < 2)
        assert values(watch.lines(name), "f1", start=2) == ones(range(2, 4))
    aucs = values(watch.lines("subspace_membership"), "auc", start=1)
    assert aucs.keys() == {1, 2, 3}
    assert min(aucs.values()) > 0.9


def test_layers_that_are_replaced_are_followed(tmp_path: Path) -> None:
    """The optimizer owns the new ones from the start; they take their places at step 2."""
    model = seeded(tie_word_embeddings=False)
    embedding, values_map = nn.Embedding(VOCABULARY, 64), nn.Linear(64, 32, bias=False)
    block = model.model.layers[0]
    norm = type(block.input_layernorm)(64)
    nn.init.uniform_(norm.weight, 0.5, 2.0)

    def replace(model: nn.Module, step: int) -> None:
        if step == 2:
            model.set_input_embeddings(embedding)
            block.self_attn.v_proj, block.input_layernorm = values_map, norm

    more = [p for layer in (embedding, values_map, norm) for p in layer.parameters()]
    given = settings(model, replace, inside=False, more=more, steps=4)
    watch = watched(
        tmp_path, [SubspaceWords(capacity_seconds=0.0), SubspaceTexts()], model, **given
    )
    for metric in ("f1", "certified"):
        assert values(watch.lines("subspace_words"), metric) == ones(range(4))
    texts = watch.lines("subspace_texts")
    assert values(texts[:2], "exact_sentences") == ones(range(2))
    assert all(line["unknown"] for line in texts[2:])  # its copy of the model has the old embedding


# ---- attacks that choose themselves -------------------------------------------------------------


def test_members_are_recognised_where_no_adapter_shows_words(tmp_path: Path) -> None:
    model = get_peft_model(seeded(), config(layers_to_transform=[1]))
    watch = watched(tmp_path, "auto", model, **settings(model, steps=5))
    for name in ("subspace_membership", "gradient_membership"):
        aucs = values(watch.lines(name), "auc", start=3)
        assert aucs.keys() == {3, 4}
        assert min(aucs.values()) > 0.8


def test_an_attack_whose_looks_fail_leaves_the_others_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("a layer of another kind")

    monkeypatch.setattr(SubspaceMembership, "run", fail)
    model = get_peft_model(seeded(), config())
    watch = watched(tmp_path, "auto", model, **settings(model, steps=5))
    reasons = {line["unknown"] for line in watch.lines("subspace_membership")}
    assert {reason[:12] for reason in reasons} == {"RuntimeError"}
    assert values(watch.lines("subspace_words"), "f1", start=3) == {3: 1.0, 4: 1.0}
    assert values(watch.lines("gradient_membership"), "auc", start=3).keys() == {3, 4}


@pytest.mark.parametrize("method", ["needs", "meet", "estimate", "prepare"])
def test_an_attack_that_fails_at_set_up_leaves_the_others_playing(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        try:
            raise KeyError("a layer of another kind")
        except KeyError as error:
            raise RuntimeError("wrapped") from error

    monkeypatch.setattr(GradientMembership, method, fail)
    model = get_peft_model(seeded(), config())
    watch = watched(tmp_path, "auto", model, **settings(model, steps=5))
    [refused] = watch.lines("gradient_membership")
    assert refused["unknown"].startswith("not played: fails on LlamaForCausalLM (KeyError at ")
    assert "a layer of another kind" in refused["unknown"]
    assert values(watch.lines("subspace_words"), "f1", start=3) == {3: 1.0, 4: 1.0}
    if method == "estimate":  # which is for those that choose themselves
        return
    listed = [GradientMembership()]
    with pytest.raises(RuntimeError, match="wrapped"):
        watched(tmp_path / "listed", listed, model, **settings(model, steps=1))
