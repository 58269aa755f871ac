"""A number that noise, dropout, clipping or a loss makes low for an attack alone is unknown."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn import functional
from transformers import Trainer, TrainingArguments
from transformers.integrations import activate_neftune

from lightning_fedleak import BagOfWords, PublicText
from lightning_fedleak.attacks import (
    FlatChat,
    GradientMembership,
    SubspaceMembership,
    SubspaceTexts,
    SubspaceWords,
)
from lightning_fedleak.engine import Games
from lightning_fedleak.trainers import LeakageCallback, Threshold, Watch
from tests.helpers.models import tiny_llama

STEPS = 3


def texts(n: int, seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 97, (n, 12), generator=generator).tolist()


def adapted(dropout: float = 0.0) -> Any:
    model = tiny_llama(d=64)
    config = LoraConfig(r=16, target_modules=["q_proj", "v_proj"], lora_dropout=dropout)
    torch.manual_seed(1)
    return get_peft_model(model, config)


def by_setting(model: Any) -> None:
    activate_neftune(model, 5.0)


def by_a_hook(model: Any, size: float = 0.3) -> None:
    def noisy(layer: nn.Module, _: Any, output: Tensor) -> Tensor:
        rms = output.square().mean().sqrt()
        return output + size * rms * torch.randn_like(output) if layer.training else output

    model.get_input_embeddings().register_forward_hook(noisy)


def attacks() -> list[Any]:
    public = PublicText(texts(60, 1))
    return [
        SubspaceWords(capacity_seconds=0),
        GradientMembership(public),
        SubspaceMembership(public),
        SubspaceTexts(budget_seconds=5),
    ]


def run(
    folder: Path,
    model: Any,
    listed: list[Any],
    step: Callable[..., Any] = Tensor.backward,
    gates: Sequence[Threshold] = (),
) -> tuple[list[Tensor], dict[str, Any]]:
    """Return the weights that a loop ends with, and what was logged of its last step."""
    trained = [p for p in model.train().parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    torch.manual_seed(2)
    games = Games(held_out=PublicText(texts(40, 3)), targets=8)
    options = {"every_n_steps": 1, "folder": folder, "tensorboard": False, "games": games}
    options |= {"gates": gates}
    with Watch(model, optimizer, listed, **options) if listed else nullcontext() as watch:
        for rows in torch.tensor(texts(4 * STEPS, 4)).split(4):
            batch = {"input_ids": rows, "labels": rows}
            with nullcontext() if watch is None else watch.step(batch):
                step(model(**batch).loss)
                optimizer.step()
            optimizer.zero_grad()
    if not listed:
        return trained, {}
    (path,) = folder.rglob("leakage.jsonl")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return trained, {line["attack"]: line for line in lines if line["step"] == STEPS - 1}


@pytest.mark.parametrize("noise", [by_setting, by_a_hook])
def test_noise_on_embeddings_is_unknown_with_its_size(tmp_path: Path, noise: Any) -> None:
    models = [adapted(), adapted()]
    for model in models:
        noise(model)
    alone, _ = run(tmp_path, models[0], [])
    watched, lines = run(tmp_path, models[1], attacks())
    assert all(torch.equal(*pair) for pair in zip(alone, watched, strict=True))
    assert len(lines) == 4
    for line in lines.values():
        assert "times their size to the embeddings (NEFTune" in line["unknown"]
    if noise is by_a_hook:
        assert "adds 0.3 times" in lines["subspace_words"]["unknown"]


def test_small_noise_is_read(tmp_path: Path) -> None:
    model = adapted()
    by_a_hook(model, 0.005)
    _, lines = run(tmp_path, model, attacks()[:3])
    assert lines["subspace_words"]["metrics"]["f1"]["value"] > 0.95
    assert lines["gradient_membership"]["metrics"]["auc"]["value"] == 1


def test_gradients_that_noise_does_not_hide_are_read(tmp_path: Path) -> None:
    model = tiny_llama(d=64)
    by_setting(model)
    _, lines = run(tmp_path, model, [BagOfWords()])
    assert lines["bag_of_words"]["metrics"]["f1"]["value"] == 1


@pytest.mark.slow
def test_a_compiled_model_says_it_by_its_settings(tmp_path: Path) -> None:
    model = adapted()
    by_setting(model)
    compiled = torch.compile(model, backend="eager")
    _, lines = run(tmp_path, compiled, [SubspaceWords(capacity_seconds=0)])
    assert "to the embeddings (NEFTune" in lines["subspace_words"]["unknown"]


def test_the_transformers_trainer_sets_it(tmp_path: Path) -> None:
    rows = [{"input_ids": torch.tensor(x), "labels": torch.tensor(x)} for x in texts(16, 4)]
    settings = {"max_steps": STEPS, "per_device_train_batch_size": 4, "report_to": "none"}
    arguments = TrainingArguments(
        str(tmp_path / "trainer"), neftune_noise_alpha=5.0, use_cpu=True, **settings
    )
    trainer = Trainer(adapted(), arguments, train_dataset=rows)
    words = SubspaceWords(capacity_seconds=0)
    trainer.add_callback(LeakageCallback(trainer, [words], every_n_steps=1, folder=tmp_path))
    trainer.train()
    lines = [json.loads(x) for x in (tmp_path / "leakage.jsonl").read_text().splitlines()]
    assert "to the embeddings (NEFTune" in lines[-1]["unknown"]


@pytest.mark.parametrize("dropout", [0.05, 0.6])
def test_what_dropout_hides_it_hides_from_the_control_too(tmp_path: Path, dropout: float) -> None:
    gate = Threshold("leakage/subspace_words/f1", at_most=0.5, action="warn")
    run(tmp_path, adapted(dropout), [SubspaceWords(capacity_seconds=0)], gates=[gate])
    assert gate.fired is not None
    assert math.isnan(gate.fired.value) or gate.fired.value > 0.5
    if dropout > 0.5:
        assert "this attack cannot show more than" in gate.fired.why


def preferring(logits: Tensor, ids: Tensor) -> Tensor:
    """Return a loss that prefers the first half of the texts to the second, as DPO does."""
    losses = functional.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")
    chosen, rejected = (-losses.sum(1)).chunk(2)
    return -functional.logsigmoid(0.1 * (chosen - rejected)).mean()


def test_of_a_loss_that_prefers_texts_the_control_says_who_reads_it(tmp_path: Path) -> None:
    """Labels are read by the sizes of rows; a gradient of the likelihood tells no members."""
    public = PublicText(texts(60, 1))
    listed = [FlatChat(public), GradientMembership(public)]
    gate = Threshold("leakage/gradient_membership/auc", at_most=0.7, action="warn")

    model = tiny_llama()
    model.loss_function = lambda logits, labels, **_: preferring(logits, labels)
    _, lines = run(tmp_path, model, listed, gates=[gate])
    assert lines["flatchat"]["metrics"]["f1"]["value"] > 0.9
    assert lines["gradient_membership"]["metrics"]["auc"]["value"] < 0.7
    assert gate.fired is not None
    assert math.isnan(gate.fired.value)


@pytest.mark.parametrize("scale", [1 / 1024, 1024.0])
def test_a_scaled_loss_is_read_as_it_is(tmp_path: Path, scale: float) -> None:
    _, lines = run(tmp_path, adapted(), attacks()[:3], lambda loss: (scale * loss).backward())
    assert lines["subspace_words"]["metrics"]["f1"]["value"] == 1
    assert lines["gradient_membership"]["metrics"]["auc"]["value"] == 1
    assert lines["subspace_membership"]["metrics"]["auc"]["value"] == 1


def test_clipping_by_value_in_a_loop_is_found_in_the_gradient(tmp_path: Path) -> None:
    """Nothing says it there. What is left of the words is never less than the truth, or unknown."""
    model = adapted()

    def step(loss: Tensor) -> None:
        loss.backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        size = torch.cat([g.flatten() for g in gradients if g.any()]).abs().quantile(0.7)
        nn.utils.clip_grad_value_(model.parameters(), float(size))

    _, lines = run(tmp_path, model, [SubspaceWords(capacity_seconds=0)], step)
    line = lines["subspace_words"]
    assert line["unknown"] is None or "clip" in line["unknown"]
    assert line["unknown"] is not None or line["metrics"]["f1"]["value"] > 0.95
