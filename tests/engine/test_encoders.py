"""Models without an output head, whose loss is of hidden states: pairs of texts, no labels."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn import functional

from lightning_fedleak.attacks import BagOfWords, SubspaceMembership, SubspaceWords
from lightning_fedleak.model.anatomy import AnatomyError, find_anatomy
from lightning_fedleak.model.taps.step_tap import _EncoderTap
from tests.attacks.row_space.models import SIZES, VOCABULARY
from tests.helpers.loops import check_undisturbed
from tests.helpers.models import own_rng

LENGTH = 8
TEXT = torch.randint(3, VOCABULARY, (40, LENGTH), generator=torch.Generator().manual_seed(4))


def encoder(lora: bool = False) -> Any:
    dropouts = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    with own_rng(1):
        model: Any = transformers.BertModel(transformers.BertConfig(**SIZES, **dropouts))
        if not lora:
            return model
        config = LoraConfig(r=24, target_modules=["query", "value"])
        model = get_peft_model(model, config)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.02)
    return model


def pairs(n: int, rows: int = 2) -> list[dict[str, Tensor]]:
    """Return batches of pairs, the second text of each shorter by two; no field is 'input_ids'."""
    generator = torch.Generator().manual_seed(6)
    batches = []
    for _ in range(n):
        ids = torch.randint(3, VOCABULARY, (2, rows, LENGTH), generator=generator)
        mask = torch.ones_like(ids)
        mask[1, :, -2:] = 0
        anchors = {"anchor_ids": ids[0], "anchor_mask": mask[0]}
        batches.append({**anchors, "positive_ids": ids[1], "positive_mask": mask[1]})
    return batches


def embedded(model: Any, ids: Tensor, mask: Tensor) -> Tensor:
    states = model(input_ids=ids, attention_mask=mask).last_hidden_state
    return functional.normalize((states * mask[..., None]).sum(1) / mask.sum(1, True), dim=-1)


def contrastive_loss(model: Any, batch: Any) -> Tensor:
    """Return the loss of each anchor's positive among all, beside a text that trains nothing."""
    with torch.no_grad():
        embedded(model, torch.full((1, 4), 2), torch.ones(1, 4))
    anchors, positives = (
        embedded(model, batch[f"{part}_ids"], batch[f"{part}_mask"])
        for part in ("anchor", "positive")
    )
    scores = anchors @ positives.T / 0.05
    return functional.cross_entropy(scores, torch.arange(len(scores)))


@pytest.mark.parametrize("lora", [False, True])
def test_both_texts_of_a_pair_are_read(lora: bool, tmp_path: Path) -> None:
    batches, text = pairs(4), TEXT.tolist()
    chosen: list[Any] = [SubspaceWords(text, capacity_seconds=0), SubspaceMembership(text)]
    chosen += [] if lora else [BagOfWords()]
    settings = {"batches": batches, "loss": contrastive_loss, "optimizer": "adamw"}
    watch = check_undisturbed(tmp_path, chosen, lambda: encoder(lora), **settings)
    lines = [line for line in watch.lines() if line["stage"] == "shared" and line["metrics"]]
    assert not [line["unknown"] for line in watch.lines() if line["unknown"]]
    words = [line for line in lines if line["attack"].endswith("words")]
    assert {line["attack"] for line in words} == {a.name for a in chosen if "words" in a.name}
    for line in words:
        f1 = line["metrics"]["f1"]["value"]
        assert f1 == 1.0, line["step"]
    members = [line for line in lines if line["attack"] == "subspace_membership"]
    assert min(line["metrics"]["auc"]["value"] for line in members[1:]) > 0.9
    assert not [name for name in watch.latest if name.endswith("/control")]


def test_the_truth_is_what_was_trained_on() -> None:
    model, [batch] = encoder(), pairs(1)
    tap = _EncoderTap(find_anatomy(model))
    tap.arm()
    contrastive_loss(model, batch).backward()
    calls = tap.take()
    anchors, positives = calls
    assert anchors.ids is batch["anchor_ids"]
    assert positives.ids is batch["positive_ids"]
    assert torch.equal(positives.reached, batch["positive_mask"] > 0)
    assert tap.take() == []
    embedded(model, batch["anchor_ids"], batch["anchor_mask"])  # which gets no gradient
    assert tap.take() == []
    tap.close()


def test_torch_compile_is_why_a_compiled_encoder_cannot_be_read() -> None:
    model = encoder()
    model.compile()
    why_not = _EncoderTap(find_anatomy(model)).why_not
    assert why_not is not None
    assert "torch.compile" in why_not


def test_a_model_without_words_is_refused_in_a_sentence() -> None:
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = transformers.ViTForImageClassification(
        transformers.ViTConfig(**small, intermediate_size=16, image_size=32, num_labels=3)
    )
    clip = transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**small, image_size=32))
    for model in (vision, clip, nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))):
        with pytest.raises(AnatomyError, match="found no "):
            find_anatomy(model)
