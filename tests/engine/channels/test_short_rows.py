"""Rows with few label tokens, and classifiers, looked at in a Trainer."""

import json
import logging
import math
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
)

from lightning_fedleak import LeakageMonitor, RiskGate
from lightning_fedleak.attacks.memorization import Combined, Extraction, ShortAnswers
from lightning_fedleak.engine import Memorization
from lightning_fedleak.evaluation.canaries import leave_out
from lightning_fedleak.evaluation.metrics.record_list import RecordList
from lightning_fedleak.model.anatomy import find_anatomy
from lightning_fedleak.model.batches import read_batch
from lightning_fedleak.model.taps.tokens import answer_groups, texts_in, token_log_probs
from tests.engine.channels.test_memorization import fit, lines, monitor, rows

SIZES = {"n_embd": 24, "n_head": 2, "n_layer": 1, "resid_pdrop": 0.0}


def short(data: list[dict[str, torch.Tensor]], n: int = 3) -> list[dict[str, torch.Tensor]]:
    """Return rows of which the last n tokens are labels."""
    masked = []
    for row in data:
        labels = row["input_ids"].clone()
        labels[:-n] = -100
        masked.append({"input_ids": row["input_ids"], "labels": labels})
    return masked


def watching(folder: Path, attacks: Any, **settings: Any) -> LeakageMonitor:
    return monitor(folder, attacks, Memorization(max_overhead=10, looks=(), **settings))


def classes(n: int = 400) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    labels = torch.randint(0, 3, (n,), generator=generator)
    return [
        {"input_ids": row["input_ids"], "labels": label}
        for row, label in zip(rows(n), labels, strict=True)
    ]


class Classifying(L.LightningModule):
    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: Any) -> torch.Tensor:
        return self.model(**batch).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-2)


def classifier(kind: str) -> torch.nn.Module:
    torch.manual_seed(0)
    if kind == "gpt2":
        config = GPT2Config(vocab_size=2000, n_positions=32, num_labels=3, pad_token_id=0, **SIZES)
        return GPT2ForSequenceClassification(config)
    config = BertConfig(
        vocab_size=2000, hidden_size=24, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=48, max_position_embeddings=32, num_labels=3,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return BertForSequenceClassification(config)


def test_short_rows_are_a_pool_of_their_own(tmp_path: Path) -> None:
    data = rows()
    data = data[:200] + short(data[200:])
    train = leave_out(data, 140, seed=1)[0]
    attacks = [Combined(), Extraction(tokens=4), ShortAnswers()]
    fit([watching(tmp_path, attacks, records=True)], data=train)
    n_short = [train.number_of(index) >= 200 for index in range(len(train))]
    last = {name: lines(tmp_path, name)[-1]["metrics"] for name in ("combined", "loss_ratio_short")}
    assert last["loss_ratio_short"]["members"]["value"] == sum(n_short)
    assert last["combined"]["members"]["value"] == len(n_short) - sum(n_short)
    assert last["loss_ratio_short"]["auc"]["value"] > 0.9
    assert last["loss_ratio_short"]["p_value"]["value"] < 0.01
    asked = lines(tmp_path, "extraction")[-1]["metrics"]["members"]["value"]
    assert asked == last["combined"]["members"]["value"]  # not of short rows
    pools = {lines(tmp_path, name)[-1]["pool"] for name in last}
    assert len(pools) == 2
    records = RecordList.load(tmp_path / "records.jsonl")
    assert records.head["short"] == sum(n_short)
    assert {line.row for line in records.lines if line.status == "short"} == {
        train.number_of(index) for index, one in enumerate(n_short) if one
    }


def test_a_classifier_gives_its_rows_away(tmp_path: Path) -> None:
    train = leave_out(classes(), 140, seed=1)[0]
    watch = watching(tmp_path, [ShortAnswers()], records=True)
    fit([watch], Classifying(classifier("bert")), train, max_epochs=8)
    looks = lines(tmp_path, "loss_ratio_short")
    assert len(looks) == 8
    last = looks[-1]["metrics"]
    assert last["auc"]["value"] > 0.8
    assert last["members"]["value"] == len(train)
    assert last["p_value"]["value"] < 0.01
    head = RecordList.load(tmp_path / "records.jsonl").head
    assert head["members"] == len(train)
    assert head["at_least"] > 0
    ids = json.dumps(train[0]["input_ids"].tolist())[1:-1]
    assert ids not in (tmp_path / "records.jsonl").read_text()


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_a_class_is_asked_as_the_loss_is_computed(kind: str) -> None:
    model = classifier(kind).eval()
    anatomy = find_anatomy(model)
    assert anatomy.kind == "classifier"
    data = [{**row, "input_ids": row["input_ids"][: 5 + n % 3]} for n, row in enumerate(classes(9))]
    texts = [
        text
        for row in data
        for text in texts_in(
            read_batch({name: value[None] for name, value in row.items()}, "classifier")
        )
    ]
    assert [text.n_labels for text in texts] == [1] * 9
    losses = [
        model(input_ids=row["input_ids"][None], labels=row["labels"][None]).loss for row in data
    ]
    said = token_log_probs(anatomy, texts).mean_log_probs()
    assert said.tolist() == pytest.approx([-float(loss) for loss in losses], abs=1e-5)
    groups = answer_groups(texts)
    same = [[a["labels"] == b["labels"] for b in data] for a in data]
    assert (groups[:, None] == groups[None]).tolist() == same


@pytest.mark.parametrize(
    ("attack", "data", "words"),
    [
        (Combined(), short(rows()), r"no row has 8 label.*: ShortAnswers\(\) compares"),
        (ShortAnswers(), rows(), "no row has 1 to 7 label tokens"),
    ],
)
def test_an_attack_without_rows_is_refused(tmp_path, attack, data, words) -> None:
    with pytest.raises(ValueError, match=words):
        fit([watching(tmp_path, [attack])], data=leave_out(data, 140, seed=1)[0])


def test_auto_says_that_too_few_short_rows_are_there(tmp_path, caplog) -> None:
    data = rows()
    train = leave_out(data[:-8] + short(data[-8:]), 140, seed=1)[0]
    with caplog.at_level(logging.INFO):
        fit([watching(tmp_path, "auto")], data=train, max_steps=1)
    by = "the trained weights are not tested by "
    assert re.search(
        rf"{by}[^:]*loss_ratio_short[^:]*: \d rows of the kind were trained on", caplog.text
    )
    assert not re.search(rf"{by}[^:]*combined", caplog.text)


def test_a_gate_is_unknown_where_no_permutation_could_show_a_leak(tmp_path: Path) -> None:
    """With 20 permutations the least p-value is 1/21, above the look's .0125."""
    gate = RiskGate("leakage/loss_ratio_short/auc", at_most=0.7, action="warn")
    with mock.patch("lightning_fedleak.evaluation.metrics.released.PERMUTATIONS", 20):
        train = leave_out(short(rows()), 140, seed=1)[0]
        fit([watching(tmp_path, [ShortAnswers()]), gate], data=train, max_epochs=1)
    assert lines(tmp_path, "loss_ratio_short")[-1]["metrics"]["auc"]["high"] > 0.7
    assert gate.fired is not None
    assert math.isnan(gate.fired.value)
    assert "too few texts" in str(gate.fired)


@pytest.mark.parametrize("pairs", [False, True])
def test_pairs_of_texts_are_unknown_to_a_classifier(tmp_path: Path, pairs: bool) -> None:
    """The model would be asked about them as about one text each."""
    data = [
        {**row, "token_type_ids": (torch.arange(len(row["input_ids"])) > 3).long() * pairs}
        for row in classes(300)
    ]
    watch, module = watching(tmp_path, [ShortAnswers()]), Classifying(classifier("bert"))
    train = leave_out(data, 140, seed=1)[0]
    refusal = (
        pytest.raises(ValueError, match="token_type_ids that are not zero")
        if pairs
        else nullcontext()
    )
    with refusal:
        fit([watch], module, train, max_steps=2)
    assert (tmp_path / "leakage.jsonl").exists() is not pairs
