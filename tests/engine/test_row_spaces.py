"""Words, texts and members off the row spaces of gradients, of LoRA and whole models."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig, get_peft_model
from torch import nn

from lightning_fedleak.attacks import SubspaceMembership, SubspaceTexts, SubspaceWords
from lightning_fedleak.engine import Games
from lightning_fedleak.model.snapshots import UnusableObservation
from tests.attacks.row_space.models import VOCABULARY, bert, gpt2, llama
from tests.helpers.lightning_modules import random_token_loader
from tests.helpers.loops import check_undisturbed, watched
from tests.helpers.models import own_rng

NAME = "leakage/subspace_words"
TEXTS = "leakage/subspace_texts"
LORA: dict[str, Any] = {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]}
LOADER = {"n": 8, "batch_size": 2, "length": 10, "vocab": VOCABULARY}
PUBLIC = [[5 + (7 * i + 3 * j) % 290 for j in range(10)] for i in range(12)]


def model_of(family: Any = llama, lora: Any = None, dropout: bool = True, **more: Any) -> nn.Module:
    with own_rng(1):
        model: nn.Module = family(**more)
        if lora is not None:
            model = get_peft_model(model, LoraConfig(**lora))
    for part in model.modules():
        if isinstance(part, nn.Dropout) and not dropout:
            part.p = 0.0
    return model


def words() -> SubspaceWords:
    return SubspaceWords(capacity_seconds=0)


def look(folder: Path, attacks: Any, model: nn.Module, **settings: Any) -> Any:
    """Return the watch of a loop of four steps."""
    given = {"batches": random_token_loader(**LOADER), "optimizer": "adamw"} | settings
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return watched(folder, attacks, model, **given)


def test_a_padding_row_that_is_divided_by_its_norm_is_no_word(tmp_path: Path) -> None:
    """Its input is NaN: no batch has it, and an attack whose own texts have it says so."""
    model = model_of(dropout=False)
    embedding: Any = model.get_input_embeddings()  # type: ignore[operator]
    with torch.no_grad():
        embedding.weight[0] = 0
    nn.utils.parametrizations.weight_norm(embedding, dim=0)
    watch = look(tmp_path, [words()], model)
    assert watch.latest[f"{NAME}/f1"] > 0.9
    with pytest.raises(UnusableObservation, match="are NaN, infinite or all zero"):
        look(tmp_path / "membership", [SubspaceMembership([[0, *PUBLIC[0]], *PUBLIC])], model)


def test_training_is_bit_identical(tmp_path: Path) -> None:
    attacks = [words(), SubspaceMembership(PUBLIC), SubspaceTexts()]
    given = {"batches": list(random_token_loader(**LOADER)), "games": Games(targets=2)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        watch = check_undisturbed(tmp_path, attacks, model_of, optimizer="adamw", **given)
    assert watch.looks == 4


@pytest.mark.parametrize("family", [llama, gpt2, bert])
def test_whole_models_are_read_at_every_look(family: Any, tmp_path: Path) -> None:
    watch = look(tmp_path, words(), model_of(family, dropout=False))
    assert watch.failures == 0
    assert watch.latest[f"{NAME}/f1"] == watch.latest[f"{NAME}/certified"] == 1


def test_parts_that_are_not_shared_are_not_exposed(tmp_path: Path) -> None:
    config = IA3Config(target_modules=["k_proj"], feedforward_modules=[])
    watch = look(tmp_path / "a", words(), get_peft_model(llama(), config))
    assert (watch.latest[f"{NAME}/exposed"], watch.failures) == (0, 0)
    model = model_of()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers" not in name)
    with pytest.warns(UserWarning, match="not shared in this run"):
        watch = watched(
            tmp_path / "b", SubspaceTexts(), model, batches=random_token_loader(**LOADER)
        )
    assert watch.latest[f"{TEXTS}/exposed"] == 0


@pytest.mark.parametrize("case", ["whole", "lora", "encoder"])
def test_whole_texts_are_read_while_training(tmp_path: Path, case: str) -> None:
    lora = {**LORA, "target_modules": ["q_proj", "k_proj", "v_proj"]} if case == "lora" else None
    rows = {"n": 4, "batch_size": 1} if case == "encoder" else {}
    batches = random_token_loader(**LOADER | rows)
    model = model_of(bert if case == "encoder" else llama, lora, dropout=False)
    watch = look(tmp_path, SubspaceTexts(), model, batches=batches)
    for metric in ("token_accuracy", "exact_sentences", "certified", "finished", "exposed"):
        assert watch.latest[f"{TEXTS}/{metric}"] == 1, metric


@pytest.mark.parametrize(("texts", "counted"), [(8, 3), (1, 1)])
def test_tokens_that_no_label_depends_on_do_not_count(tmp_path, texts, counted) -> None:
    """Row 1 has no labels on its last tokens, row 2 none on its ends of text, row 3 none at all."""
    ids = torch.randint(5, VOCABULARY, (4, 9), generator=torch.Generator().manual_seed(3))
    labels = ids.clone()
    labels[1, -3:] = -100
    ids[2, 5:], labels[2, 5:], labels[3] = 2, -100, -100
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
    settings = {"batches": [batch] * 2, "optimizer": "sgd", "lr": 0.0, "texts": texts}
    watch = look(tmp_path, SubspaceTexts(), model_of(), **settings)
    assert watch.failures == 0
    for line in watch.lines():
        assert line["n"] == counted
        assert line["metrics"]["token_accuracy"]["value"] == 1
        assert line["metrics"]["exact_sentences"]["value"] == 1
