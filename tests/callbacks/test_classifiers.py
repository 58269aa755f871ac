"""Words from classifiers and encoder-decoders, in fits of Lightning's Trainer."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, TaskType, get_peft_model
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_fedleak.attacks import (
    AlignedFlatChat,
    Attack,
    BagOfWords,
    BiasSign,
    FlatChat,
    RevealLabels,
    SubspaceWords,
)
from lightning_fedleak.callbacks import LeakageMonitor, MonitorSettings
from lightning_fedleak.engine.channels.words import WordTruth
from lightning_fedleak.model.anatomy import find_anatomy
from lightning_fedleak.model.batches import TokenBatch
from lightning_fedleak.model.model_runs import sees_no_later
from lightning_fedleak.threats import ThreatModelError
from tests.callbacks.runs import fit
from tests.helpers.lightning_modules import CausalLMModule
from tests.helpers.models import own_rng, tiny_marian

VOCABULARY, WIDTH, POSITIONS, TARGETS = 300, 64, 40, 200
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": POSITIONS,
}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
SIDES = {
    f"{side}_{name}": size
    for side in ("encoder", "decoder")
    for name, size in {"layers": 2, "attention_heads": 4, "ffn_dim": 96}.items()
}


def bert(task: str, **more: Any) -> nn.Module:
    config = transformers.BertConfig(**SIZES, **NO_DROPOUT, **more)
    return getattr(transformers, f"BertFor{task}")(config)


def roberta(task: str) -> nn.Module:
    sizes = SIZES | {"max_position_embeddings": POSITIONS + 2}
    config = transformers.RobertaConfig(**sizes, **NO_DROPOUT)
    return getattr(transformers, f"RobertaFor{task}")(config)


def llama(task: str, **more: Any) -> nn.Module:
    return getattr(transformers, f"LlamaFor{task}")(transformers.LlamaConfig(**SIZES, **more))


def gpt2(task: str) -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=WIDTH,
        n_layer=2,
        n_head=4,
        n_positions=POSITIONS,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=1,
    )
    return getattr(transformers, f"GPT2For{task}")(config)


def t5(task: str) -> nn.Module:
    config = transformers.T5Config(
        vocab_size=VOCABULARY,
        d_model=WIDTH,
        d_kv=16,
        num_layers=2,
        num_heads=4,
        d_ff=96,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        eos_token_id=1,
    )
    return getattr(transformers, f"T5For{task}")(config)


def bart(task: str) -> nn.Module:
    config = transformers.BartConfig(
        vocab_size=VOCABULARY,
        d_model=WIDTH,
        max_position_embeddings=POSITIONS,
        dropout=0.0,
        **SIDES,
    )
    return getattr(transformers, f"BartFor{task}")(config)


def marian() -> nn.Module:
    return tiny_marian(vocab=VOCABULARY, d=WIDTH, dropout=0.0, decoder_vocab=TARGETS)


Build = Callable[[], nn.Module]
SEQUENCE = "SequenceClassification"
# Model, the last token of each text where the head needs one, rows of a batch.
CLASSIFIERS: dict[str, tuple[Build, int | None, int]] = {
    "bert": (lambda: bert(SEQUENCE), None, 3),
    "roberta": (lambda: roberta(SEQUENCE), None, 3),
    "llama": (lambda: llama(SEQUENCE, pad_token_id=0), None, 3),
    "llama without padding": (lambda: llama(SEQUENCE), None, 1),
    "gpt2 without padding": (lambda: gpt2(SEQUENCE), None, 1),
    "t5": (lambda: t5(SEQUENCE), 1, 3),
    "bart": (lambda: bart(SEQUENCE), 2, 3),
}
ZERO_ROWS = {"llama"}  # models whose padding token has no input, so that it would leave no trace
ADAPTED = {"bert": ["query", "value"], "roberta": ["query", "value"], "gpt2": ["c_attn"]}


def made(build: Build, *, lora: list[str] | None = None, task: TaskType | None = None) -> nn.Module:
    with own_rng(3):
        model = build()
        if lora is not None:
            model = get_peft_model(model, LoraConfig(r=16, target_modules=lora, task_type=task))
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    if "lora_B" in name:
                        parameter += 0.05 * torch.randn_like(parameter)
    return model


def texts(rows: int, length: int = 9, tokens: int = VOCABULARY, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(5, tokens, (rows, length), generator=generator)


def monitored(
    tmp_path: Path, model: nn.Module, batch: dict[str, Tensor], *attacks: Attack, **more: Any
) -> LeakageMonitor:
    """A fit of one step on a batch, looked at."""
    monitor = LeakageMonitor(list(attacks) or "auto", every_n_steps=1, **more)
    loader = DataLoader([batch], batch_size=None)  # type: ignore[arg-type]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit([monitor], tmp_path, module=CausalLMModule(model.train()), loader=loader)
    return monitor


def check_words(
    monitor: LeakageMonitor, attack: Attack, *, certified: bool | None = None, f1: float = 1.0
) -> None:
    assert monitor.failures == 0
    found = monitor.latest
    assert found[f"leakage/{attack.name}/f1"] == pytest.approx(f1)
    if certified is not None:
        assert found[f"leakage/{attack.name}/certified"] == certified


# ---- classifiers ----------------------------------------------------------------------------


@pytest.mark.parametrize("family", CLASSIFIERS)
def test_a_classifier_gives_its_words_away(family: str, tmp_path: Path) -> None:
    build, last, rows = CLASSIFIERS[family]
    ids = texts(rows)
    if last is not None:
        ids[:, -1] = last
    batch = {"input_ids": ids, "labels": torch.arange(rows) % 2}
    monitor = monitored(tmp_path, made(build), batch, BagOfWords(), SubspaceWords())
    check_words(monitor, SubspaceWords(), certified=family not in ZERO_ROWS)
    if family == "t5":  # and the token that its decoder begins with
        assert monitor.latest["leakage/bag_of_words/recall"] == 1
    else:
        check_words(monitor, BagOfWords())


@pytest.mark.parametrize("family", ["bert", "llama", "gpt2 without padding", "bart"])
def test_a_classifier_under_lora_does_too(family: str, tmp_path: Path) -> None:
    build, last, rows = CLASSIFIERS[family]
    ids = texts(rows)
    if last is not None:
        ids[:, -1] = last
    lora = ADAPTED.get(family.split()[0], ["q_proj", "v_proj"])
    model = made(build, lora=lora, task=TaskType.SEQ_CLS)
    batch = {"input_ids": ids, "labels": torch.arange(rows) % 2}
    monitor = monitored(tmp_path, model, batch, BagOfWords(), SubspaceWords())
    check_words(monitor, SubspaceWords(), certified=family not in ZERO_ROWS)
    assert monitor.latest["leakage/bag_of_words/exposed"] == 0


@pytest.mark.parametrize("labels", ["regression", "several classes", "places"])
def test_labels_that_are_no_class_are_read_past(labels: str, tmp_path: Path) -> None:
    ids = texts(3)
    batch: dict[str, Tensor] = {"input_ids": ids}
    if labels == "regression":
        model = made(lambda: bert(SEQUENCE, num_labels=1))
        batch["labels"] = torch.rand(3)
    elif labels == "several classes":
        kind = "multi_label_classification"
        model = made(lambda: bert(SEQUENCE, num_labels=4, problem_type=kind))
        batch["labels"] = torch.eye(4)[:3]
    else:
        model = made(lambda: bert("QuestionAnswering"))
        batch |= {name: torch.tensor([2, 3, 4]) for name in ("start_positions", "end_positions")}
    monitor = monitored(tmp_path, model, batch, BagOfWords(), SubspaceWords())
    check_words(monitor, BagOfWords())
    check_words(monitor, SubspaceWords(), certified=True)


@pytest.mark.parametrize("family", [bert, llama])
def test_of_a_token_classifier_what_a_label_hangs_on_counts(family: Any, tmp_path: Path) -> None:
    """A causal one's tokens behind the last that has a label have no part in any gradient."""
    ids = texts(3)
    labels = ids % 2
    labels[:, 0] = labels[:, -2:] = -100
    model = made(lambda: family("TokenClassification"))
    batch = {"input_ids": ids, "labels": labels}
    monitor = monitored(tmp_path, model, batch, BagOfWords(), SubspaceWords())
    check_words(monitor, BagOfWords())
    check_words(monitor, SubspaceWords(), certified=True)
    assert sees_no_later(find_anatomy(model)) == (family is llama)
    held = TokenBatch(ids, labels, None, "classifier")
    truth = WordTruth.from_batches([held], one_way=family is llama)
    seen = ids[:, :-2] if family is llama else ids
    assert set(truth.input_types.tolist()) == set(seen.flatten().tolist())
    assert not len(truth.output_types)
    assert truth.n_targets == 3


@pytest.mark.parametrize("task", [SEQUENCE, "TokenClassification"])
@pytest.mark.parametrize("lora", [True, False])
def test_attacks_choose_themselves_on_classifiers(
    task: str, lora: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tasks = {SEQUENCE: TaskType.SEQ_CLS, "TokenClassification": TaskType.TOKEN_CLS}
    adapted = ["query", "value"] if lora else None
    model = made(lambda: bert(task), lora=adapted, task=tasks[task] if lora else None)
    ids = texts(3)
    labels = torch.arange(3) % 2 if task == SEQUENCE else ids % 2
    monitor = LeakageMonitor(every_n_steps=1, settings=MonitorSettings(cache=False))
    loader = DataLoader([{"input_ids": ids, "labels": labels}], batch_size=None)  # type: ignore[arg-type]
    with warnings.catch_warnings(), caplog.at_level(logging.INFO):
        warnings.filterwarnings("error", ".*could not be tried.*")
        fit([monitor], tmp_path, module=CausalLMModule(model.train()), loader=loader)
    assert monitor.failures == 0
    assert monitor.latest["leakage/worst/words"] == 1
    assert (
        "aligned_flatchat     not played: reads words off an output head with a row" in caplog.text
    )
    assert "subspace_words       played" in caplog.text
    said = "not played: what it reads is not trained" if lora else "played"
    assert f"bag_of_words         {said}" in caplog.text


# ---- what cannot be read, and why -----------------------------------------------------------


@pytest.mark.parametrize(
    "attack",
    [FlatChat(n_types=5), AlignedFlatChat([[5, 6, 7] * 9]), RevealLabels(), BiasSign()],
    ids=lambda attack: attack.name,
)
def test_what_reads_a_vocabulary_head_is_refused_with_the_true_reason(
    attack: Attack, tmp_path: Path
) -> None:
    batch = {"input_ids": texts(2), "labels": torch.tensor([0, 1])}
    message = "head with a row for each token, and the rows of 'model.classifier' of BertForSeq.* 3"
    with pytest.raises(ThreatModelError, match=message) as refused:
        monitored(tmp_path, made(lambda: bert(SEQUENCE, num_labels=3)), batch, attack)
    assert "BagOfWords reads the gradient of the embeddings" in str(refused.value)


# ---- two vocabularies -----------------------------------------------------------------------


@pytest.mark.parametrize("lora", [True, False])
def test_of_two_vocabularies_the_source_s_words_are_named(lora: bool, tmp_path: Path) -> None:
    model = made(marian, lora=["q_proj", "v_proj"] if lora else None)
    anatomy = find_anatomy(model)
    assert (anatomy.vocab_size, anatomy.target_rows) == (TARGETS, TARGETS)
    ids = texts(3)
    batch = {"input_ids": ids, "labels": texts(3, 7, TARGETS, seed=1)}
    monitor = monitored(tmp_path, model, batch, SubspaceWords(), BagOfWords())
    check_words(monitor, SubspaceWords(), certified=True)
    if not lora:  # the decoder's matrix is the head's, the encoder's is its own
        check_words(monitor, BagOfWords())
    assert all(".encoder." in f".{r}" for r in SubspaceWords().needs(anatomy).gradients)


def test_what_attacks_cost_is_tried_on_two_vocabularies(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    batch = {"input_ids": texts(3), "labels": texts(3, 7, TARGETS, seed=1)}
    monitor = LeakageMonitor(every_n_steps=1, settings=MonitorSettings(cache=False))
    loader = DataLoader([batch], batch_size=None)  # type: ignore[arg-type]
    with warnings.catch_warnings(), caplog.at_level(logging.INFO):
        warnings.filterwarnings("error", ".*could not be tried.*")
        fit([monitor], tmp_path, module=CausalLMModule(made(marian).train()), loader=loader)
    assert monitor.latest["leakage/subspace_words/f1"] == 1
    assert "bag_of_words         played, about" in caplog.text


def test_one_vocabulary_is_told_from_two() -> None:
    assert find_anatomy(made(lambda: t5("ConditionalGeneration"))).target_rows is None
    assert find_anatomy(tiny_marian()).target_rows is None
    assert find_anatomy(tiny_marian(decoder_vocab=97)).target_rows == 97


@pytest.mark.parametrize("family", [t5, bart])
def test_an_encoder_decoder_of_one_vocabulary_gives_both_sides_away(
    family: Any, tmp_path: Path
) -> None:
    model = made(lambda: family("ConditionalGeneration"))
    batch = {"input_ids": texts(3), "labels": texts(3, 7, seed=1)}
    monitor = monitored(tmp_path, model, batch, SubspaceWords())
    assert monitor.latest["leakage/subspace_words/recall"] == 1
    assert monitor.latest["leakage/subspace_words/certified"] == 1
