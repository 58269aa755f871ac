"""Each of TRL's trainers, whose losses never call the output head: words, signs, and controls.

Words are told by rows of the embedding's gradient that are not zero. Signs are told by what the
trainer gives its loss: chosen or rejected, a desirable label, an advantage.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl")

import trl
from datasets import Dataset
from peft import LoraConfig
from transformers import LlamaConfig, LlamaForSequenceClassification
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

from lightning_fedleak import BagOfWords, FlatChat
from lightning_fedleak.attacks import GradientMembership, SubspaceWords
from lightning_fedleak.attacks.memorization import PreferenceMargin
from lightning_fedleak.engine import Memorization
from lightning_fedleak.engine.channels.control import Controls
from lightning_fedleak.evaluation.canaries import leave_out
from lightning_fedleak.trainers import LeakageCallback, WatchSettings
from tests.helpers.folders import TEXTS
from tests.trainers.test_watch import lines
from tests.trl.test_trl import ANSWERS, COMMON, model_of, preferences, tokenizer, watched

PROMPTS = [text[:18] for text in TEXTS * 4]
ROWS: dict[str, Callable[[], dict[str, list[Any]]]] = {
    "SFT": lambda: {"text": [*TEXTS * 4]},
    "KTO": lambda: {
        "prompt": PROMPTS,
        "completion": [ANSWERS[n % 3] + f" {n}" for n in range(len(PROMPTS))],
        "label": [n % 2 == 0 for n in range(len(PROMPTS))],
    },
    "GRPO": lambda: {"prompt": PROMPTS},
    "RLOO": lambda: {"prompt": PROMPTS},
}
PAIRS = {
    "prompt": PROMPTS,
    "chosen": [text[18:40] for text in TEXTS * 4],
    "rejected": [ANSWERS[n % 3] for n in range(len(PROMPTS))],
}
KINDS: dict[str, tuple[Any, Any]] = {
    "SFT": (trl.SFTTrainer, trl.SFTConfig),
    "DPO": (trl.DPOTrainer, trl.DPOConfig),
    "KTO": (trl.KTOTrainer, trl.KTOConfig),
    "GRPO": (trl.GRPOTrainer, trl.GRPOConfig),
    "RLOO": (trl.RLOOTrainer, trl.RLOOConfig),
    "ORPO": (ORPOTrainer, ORPOConfig),
    "CPO": (CPOTrainer, CPOConfig),
    "Reward": (trl.RewardTrainer, trl.RewardConfig),
}

PADDING = {0}


def reward(completions: list[str], **_: Any) -> list[float]:
    return [float(len({*text})) for text in completions]


def trainer_of(name: str, folder: Path, **more: Any) -> Any:
    """Return a trainer of a tiny model, two steps long."""
    kind, config = KINDS[name]
    lora = more.pop("lora", False)
    rows = more.pop("rows", None) or Dataset.from_dict(ROWS.get(name, lambda: PAIRS)())
    settings = COMMON | {"max_steps": 2, "per_device_train_batch_size": 4} | more
    given: dict[str, Any] = {}
    if name in ("GRPO", "RLOO"):
        settings |= {"per_device_train_batch_size": 8, "num_generations": 4}
        settings |= {"max_completion_length": 10}
        given["reward_funcs"] = reward
    if name in ("ORPO", "CPO"):
        settings |= {"max_length": 64}
    if lora:
        given["peft_config"] = LoraConfig(r=8, target_modules=["q_proj", "v_proj"])
    torch.manual_seed(3)
    model = model_of()
    if name == "Reward":
        model = LlamaForSequenceClassification(
            LlamaConfig(**{**model.config.to_dict(), "num_labels": 1, "pad_token_id": 0})
        )
    model.save_pretrained(folder / "model")  # some load it again, as what they compare with
    return kind(
        str(folder / "model"),
        args=config(str(folder), **settings),
        train_dataset=rows,
        processing_class=tokenizer(),
        **given,
    )


@dataclass
class Truth:
    """What a trainer computes its loss on, beside the callback."""

    words: list[set[int]] = field(default_factory=list)
    inputs: list[dict[str, Any]] = field(default_factory=list)
    reads: list[Any] = field(default_factory=list)

    @classmethod
    def of(cls, trainer: Any, monkeypatch: pytest.MonkeyPatch) -> Truth:
        truth, step, loss, play = cls(), trainer.training_step, trainer.compute_loss, Controls._play

        def stepped(model: Any, *more: Any, **settings: Any) -> Any:
            result = step(model, *more, **settings)
            rows = trainer.model.get_input_embeddings().weight.grad
            truth.words.append(set() if rows is None else {*rows.any(1).nonzero()[:, 0].tolist()})
            return result

        def noted(model: Any, inputs: Any, *more: Any, **settings: Any) -> Any:
            truth.inputs.append(dict(inputs))
            return loss(model, inputs, *more, **settings)

        def played(controls: Controls, look: Any, *plans: Any) -> None:
            truth.reads.append([*look.training_step.calls])
            play(controls, look, *plans)

        trainer.training_step, trainer.compute_loss = stepped, noted
        monkeypatch.setattr(Controls, "_play", played)
        monkeypatch.setattr(Controls, "_is_due", lambda *_: True)
        return truth

    def pushed(self, name: str, step: int) -> torch.Tensor | None:
        """Return (B,) whether the loss makes each text less likely; None where signs vary."""
        inputs = self.inputs[step]
        if name == "SFT":
            return torch.zeros(4, dtype=torch.bool)
        if name in ("DPO", "ORPO", "CPO"):
            return torch.arange(8) >= 4
        if name == "KTO":
            return ~torch.tensor(inputs["label"])
        return inputs["advantages"].flatten() < 0


@pytest.mark.parametrize("name", [*KINDS])
def test_words_signs_and_controls(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = trainer_of(name, tmp_path)
    attacks = [BagOfWords()] if name == "Reward" else [BagOfWords(), FlatChat(n_types=20)]
    truth = Truth.of(trainer, monkeypatch)
    callback = watched(
        trainer, [*attacks, GradientMembership("sampled")] if name != "Reward" else attacks
    )
    trainer.train()
    assert trainer.state.global_step == 2
    values = callback.watch.engine.results.look_values
    # ORPO and CPO begin a text with the token that pads, whose embedding has no gradient.
    assert values["leakage/worst/words"] >= values["leakage/bag_of_words/f1"] > 0.99
    if name == "Reward":
        return
    assert values["leakage/step/unexplained"] < 1e-5
    assert values["leakage/flatchat/control"] > 0
    for step, reads in enumerate(truth.reads):
        [read] = reads
        batch, rows = read.batch, read.placed.rows
        assert {*batch.context_ids().tolist()} - PADDING == truth.words[step]
        assert not batch.soft_labels
        expected = truth.pushed(name, step)
        assert expected is not None
        signs = torch.zeros(len(expected), dtype=torch.long)
        counted = rows.labels != -100
        signs.index_add_(0, read.placed.text[counted], 1 - 2 * rows.pushed[counted].long())
        live = signs != 0
        assert bool(live.any())
        assert torch.equal((signs < 0)[live], expected[live])
        assert bool((rows.pushed == expected[read.placed.text])[counted].all())


@pytest.mark.parametrize("name", ["DPO", "GRPO"])
def test_words_of_a_lora_with_a_temperature(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = {"temperature": 0.7} if name == "GRPO" else {"gradient_accumulation_steps": 2}
    trainer = trainer_of(name, tmp_path, lora=True, gradient_checkpointing=True, **more)
    Truth.of(trainer, monkeypatch)
    callback = watched(trainer, [SubspaceWords(capacity_seconds=0)])
    trainer.train()
    assert trainer.state.global_step == 2
    values = callback.watch.engine.results.look_values
    assert values["leakage/step/unexplained"] < 1e-5
    assert values["leakage/subspace_words/control"] > 0.9
    assert values["leakage/worst/words"] > 0.9


@pytest.mark.parametrize("name", ["KTO", "ORPO", "CPO"])
def test_the_weights_are_asked_about_preferences_of_other_losses(name: str, tmp_path: Path) -> None:
    more = {"max_steps": -1, "num_train_epochs": 6, "per_device_train_batch_size": 8, "beta": 1.0}
    rows = preferences()
    if name == "KTO":
        rows = rows.rename_column("chosen", "completion").remove_columns("rejected")
        rows = rows.add_column("label", [n % 2 == 0 for n in range(len(rows))])
    trainer = trainer_of(name, tmp_path, rows=rows, learning_rate=5e-3, **more)
    trainer.train_dataset, _ = leave_out(trainer.train_dataset, 140, seed=1)
    settings = WatchSettings(memorization=Memorization(max_overhead=10, looks=()))
    trainer.add_callback(LeakageCallback(trainer, [PreferenceMargin()], settings=settings))
    trainer.train()
    looks = [line for line in lines(tmp_path) if line["attack"] == "preference_margin"]
    assert len(looks) == 6
    last = looks[-1]["metrics"]
    assert last["members"]["value"] + last["others"]["value"] > 380
    assert last["auc"]["low"] > 0.5


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("GRPO", "trains on texts that it writes"),
        ("Reward", "trains a score of texts and not their likelihood"),
    ],
)
def test_other_trainers_have_no_pairs_to_ask_about(name: str, why: str, tmp_path: Path) -> None:
    trainer = trainer_of(name, tmp_path)
    expected = f"{name}Trainer {why}, so .* remove preference_margin from attacks=$"
    with pytest.raises(ValueError, match=expected):
        LeakageCallback(trainer, [PreferenceMargin()])
