"""TRL's trainers: what is read is of the rows that they make, each number recomputed."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

pytest.importorskip("trl")

from datasets import Dataset
from peft import LoraConfig, get_peft_model
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from lightning_fedleak import BagOfWords, FCMembership, FlatChat, SubspaceWords
from lightning_fedleak.attacks import GradientMembership, PublicText, SubspaceMembership
from lightning_fedleak.attacks.memorization import LossRatio, PreferenceMargin
from lightning_fedleak.engine import Games, Memorization
from lightning_fedleak.evaluation.canaries import leave_out
from lightning_fedleak.trainers import LeakageCallback, Threshold, WatchSettings
from tests.callbacks.runs import Probe
from tests.helpers.folders import TEXTS, tiny_tokenizer
from tests.helpers.models import tiny_llama
from tests.trainers.test_transformers import watched
from tests.trainers.test_watch import lines

VOCABULARY = 384
ANSWERS = ["no card is at number nine", "the bakery has a piano", "send the code to Odile"]
CHAT = (
    "{% for message in messages %}{% if message.role == 'assistant' %}{% generation %}"
    "{{ message.content + eos_token }}{% endgeneration %}{% else %}{{ message.content + ': ' }}"
    "{% endif %}{% endfor %}"
)


def model_of(tied: bool = False) -> Any:
    return tiny_llama(tied=tied, vocab=VOCABULARY, d=160)


def tokenizer() -> Any:
    tokenizer_ = tiny_tokenizer()
    tokenizer_.pad_token = tokenizer_.eos_token
    tokenizer_.chat_template = CHAT
    return tokenizer_


def pairs() -> list[dict[str, str]]:
    return [
        {"prompt": text[:18], "completion": f"{text[18:40]} {number}"}
        for number, text in enumerate(TEXTS * 3)
    ]


def conversations() -> list[dict[str, Any]]:
    return [
        {
            "messages": [
                {"role": "user", "content": row["prompt"]},
                {"role": "assistant", "content": row["completion"]},
            ]
        }
        for row in pairs()
    ]


ROWS: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "padded": ([{"text": r["prompt"] + r["completion"]} for r in pairs()], {}),
    "packed": (
        [{"text": r["prompt"] + r["completion"]} for r in pairs()],
        {"packing": True, "max_length": 60},
    ),
    "padding-free": (
        [{"text": r["prompt"] + r["completion"]} for r in pairs()],
        {"padding_free": True, "max_length": None, "pad_to_multiple_of": 64},
    ),
    "completion only": (pairs(), {}),
    "assistant only": (conversations(), {"assistant_only_loss": True}),
}

COMMON: dict[str, Any] = {
    "max_steps": 3,
    "per_device_train_batch_size": 4,
    "learning_rate": 1e-2,
    "max_grad_norm": 0.0,
    "report_to": [],
    "use_cpu": True,
    "save_strategy": "no",
    "disable_tqdm": True,
    "logging_steps": 1,
    "bf16": False,
    "gradient_checkpointing": False,
    "dataloader_pin_memory": False,
}


def sft(folder: Path, rows: str, model: Any = None, **more: Any) -> SFTTrainer:
    data, settings = ROWS[rows]
    arguments = SFTConfig(str(folder), **({"max_length": 48} | COMMON | settings | more))
    torch.manual_seed(3)
    return SFTTrainer(
        model_of() if model is None else model,
        args=arguments,
        train_dataset=Dataset.from_list(data),
        processing_class=tokenizer(),
    )


def dpo(folder: Path, copies: int = 1, kind: Any = DPOTrainer, **more: Any) -> DPOTrainer:
    rows = [
        {"prompt": r["prompt"], "chosen": r["completion"], "rejected": ANSWERS[number % 3]}
        for number, r in enumerate(pairs() * copies)
    ]
    torch.manual_seed(3)
    return kind(
        model_of(),
        ref_model=model_of(),
        args=DPOConfig(str(folder), **({"max_length": 48} | COMMON | more)),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer(),
    )


class Batches:
    """Keeps the batches that a trainer gets, and the weights it begins each of them with."""

    def __init__(self, trainer: Any) -> None:
        self.kept: list[dict[str, Any]] = []
        self.models: list[Any] = []
        step = trainer.training_step

        def noted(model: Any, inputs: Any, *more: Any, **settings: Any) -> Any:
            self.kept.append(copy.deepcopy(dict(inputs)))
            self.models.append(copy.deepcopy({n: p.detach() for n, p in model.named_parameters()}))
            return step(model, inputs, *more, **settings)

        trainer.training_step = noted

    def model(self, number: int) -> Any:
        """Return a fresh model with the weights that a batch began with."""
        model = model_of()
        model.load_state_dict(self.models[number], strict=False)
        return model.train()


def documents(batch: dict[str, Any]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return ids and labels of each document of a batch, by loops over tokens."""
    texts: list[tuple[list[int], list[int]]] = []
    for row, (ids, labels) in enumerate(zip(batch["input_ids"], batch["labels"], strict=True)):
        for column in range(len(ids)):
            if "attention_mask" in batch and not batch["attention_mask"][row, column]:
                continue
            places = batch.get("position_ids")
            if column == 0 if places is None else places[row, column] == 0:
                texts.append(([], []))
            texts[-1][0].append(int(ids[column]))
            texts[-1][1].append(int(labels[column]))
    return [(torch.tensor(ids), torch.tensor(labels)) for ids, labels in texts]


def log_likelihood(model: Any, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the summed log-likelihood of a text's labels, computed alone."""
    if len(ids) < 2:
        return torch.zeros(())
    logits = model(input_ids=ids[None]).logits[0, :-1]
    return -functional.cross_entropy(logits, labels[1:], ignore_index=-100, reduction="sum")


def true_types(texts: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[set[int], set[int]]:
    """Return the types that are read before a label, and those that are labels."""
    read, predicted = set(), set()
    for ids, labels in texts:
        counted = [n for n in range(1, len(ids)) if labels[n] != -100]
        predicted |= {int(labels[n]) for n in counted}
        read |= {int(i) for i in ids[: max(counted, default=0)]}
    return read, predicted


@pytest.mark.parametrize("rows", ROWS)
def test_sft_reads_the_rows_that_the_trainer_made(tmp_path: Path, rows: str) -> None:
    trainer, probe = sft(tmp_path, rows), Probe()
    batches = Batches(trainer)
    gate = Threshold("leakage/worst/words", at_most=0.99, action="warn")
    watched(trainer, [probe, BagOfWords(), FlatChat(n_types=20)], [gate])
    trainer.train()
    assert gate.fired is not None
    logged = {(line["attack"], line["step"]): line for line in lines(tmp_path)}
    for number, batch in enumerate(batches.kept):
        texts = documents(batch)
        if rows in ("packed", "padding-free"):
            assert len(batch["input_ids"]) == 1
            assert len(texts) >= 4
        read, predicted = true_types(texts)
        assert logged["bag_of_words", number]["n"] == len(read)
        assert logged["flatchat", number]["n"] == len(predicted)
        model = batches.model(number)
        labels = sum(int((labels[1:] != -100).sum()) for _, labels in texts)
        loss = -sum(log_likelihood(model, *text) for text in texts)
        loss.backward()
        gradient = probe.seen[number][2]
        expected = model.lm_head.weight.grad
        assert (
            functional.cosine_similarity(gradient.flatten(), expected.flatten(), dim=0) > 1 - 1e-5
        )
        divisor = float(expected.norm() / gradient.norm())
        total = sum(int((labels != -100).sum()) for _, labels in texts)
        assert labels - 1e-2 < divisor < total + 1e-2
        rows_read = model.get_input_embeddings().weight.grad.any(1).nonzero().flatten().tolist()
        assert set(rows_read) == read
        assert logged["bag_of_words", number]["metrics"]["f1"]["value"] == 1.0
    if rows in ("completion only", "assistant only"):
        assert all(bool((labels == -100).any()) for _, labels in texts)


def test_a_base_in_float16_under_bfloat16_is_made_again(tmp_path: Path) -> None:
    """TRL computes its loss outside of the autocast that Accelerate wraps around the forward."""
    model = get_peft_model(model_of(), LoraConfig(r=16, target_modules=["q_proj", "v_proj"]))
    for name, parameter in model.named_parameters():
        if "lora" not in name:
            parameter.data = parameter.data.half()
    trainer = sft(tmp_path, "padded", model, bf16=True, per_device_train_batch_size=1)
    callback = watched(trainer, [SubspaceWords(capacity_seconds=0)])
    trainer.train()
    assert callback.latest["leakage/step/unexplained"] < 1e-6


def test_training_is_not_disturbed(tmp_path: Path) -> None:
    weights, losses = [], []
    for on in (False, True):
        trainer = sft(tmp_path / str(on), "packed", neftune_noise_alpha=5.0)
        if on:
            watched(trainer, [BagOfWords(), FlatChat(n_types=20)])
        trainer.train()
        weights.append([*trainer.model.parameters()])
        kept = ("loss", "entropy", "num_tokens", "mean_token_accuracy")
        logs = [{n: log[n] for n in kept if n in log} for log in trainer.state.log_history]
        losses.append([log for log in logs if "entropy" in log])
    assert losses[0] == losses[1]
    assert len(losses[0]) == 3
    assert all(map(torch.equal, *weights))


def test_dpo_reads_pairs_or_says_why_not(tmp_path: Path) -> None:
    trainer, probe = dpo(tmp_path), Probe()
    batches = Batches(trainer)
    public = PublicText([torch.tensor(tokenizer()(text)["input_ids"]) for text in TEXTS])
    played = [
        *(probe, BagOfWords(), FlatChat(n_types=20), FCMembership(1), SubspaceMembership()),
        GradientMembership(public_text=public),
    ]
    callback = watched(trainer, played, games=Games(targets=4))
    trainer.train()
    logged = {(line["attack"], line["step"]): line for line in lines(tmp_path)}
    reference = model_of()
    for number, batch in enumerate(batches.kept):
        labels = batch["input_ids"].masked_fill(batch["completion_mask"] == 0, -100)
        texts = documents({**batch, "labels": labels})
        assert len(texts) == 8
        read, _ = true_types(texts)
        assert logged["bag_of_words", number]["n"] == len(read)
        assert logged["bag_of_words", number]["metrics"]["f1"]["value"] == 1.0
        model = batches.model(number)
        ratios = [log_likelihood(model, *t) - log_likelihood(reference, *t).detach() for t in texts]
        margins = torch.stack(ratios[:4]) - torch.stack(ratios[4:])
        (-functional.logsigmoid(trainer.beta * margins).mean()).backward()
        torch.testing.assert_close(
            probe.seen[number][2], model.lm_head.weight.grad, rtol=1e-3, atol=1e-6
        )
        if number:  # games wait for texts of another batch
            assert "rejected" in logged["fc_membership", number]["unknown"]
    assert callback.latest["leakage/subspace_membership/auc"] == 1.0
    assert callback.latest["leakage/worst/words"] == 1.0
    assert all(logged["flatchat", n]["unknown"] is None for n in range(len(batches.kept)))
    assert "leakage/flatchat/control" in callback.latest
    assert math.isnan(callback.latest["leakage/fc_membership/auc"])


def test_gates_on_what_pairs_hide_are_breached(tmp_path: Path) -> None:
    trainer = dpo(tmp_path)
    gate = Threshold("leakage/flatchat/f1", at_most=0.99)
    watched(trainer, [FlatChat(n_types=20)], [gate])
    trainer.train()
    assert trainer.state.global_step == 1
    assert gate.fired is not None


def test_weights_are_asked_about_pairs_by_attacks_on_pairs_alone(tmp_path: Path) -> None:
    trainer = dpo(tmp_path, copies=25)
    trainer.train_dataset, _ = leave_out(trainer.train_dataset, 400, seed=1)
    settings = WatchSettings(memorization=Memorization(max_overhead=4 / 3, looks=(0.5,)))
    words = r"DPOTrainer .* remove loss_ratio from attacks=; PreferenceMargin"
    with pytest.raises(ValueError, match=words):
        LeakageCallback(trainer, [LossRatio(), PreferenceMargin()], settings=settings)
