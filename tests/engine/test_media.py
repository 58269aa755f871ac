"""Models that read images or sounds too: their text is told, and that nobody asks for the rest."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from lightning_fedleak.attacks import BagOfWords
from lightning_fedleak.attacks.words.subspace import SubspaceWords
from lightning_fedleak.model.anatomy import find_anatomy
from lightning_fedleak.model.model_runs import context_length, undisturbed
from tests.helpers.loops import check_undisturbed
from tests.helpers.models import own_rng

VOCABULARY, IMAGE, WIDTH = 200, 199, 64
NOBODY = "no attack recovers the images or sounds that the model reads: "


def whisper() -> Any:
    sizes = {"d_model": WIDTH, "encoder_layers": 1, "decoder_layers": 1, "num_mel_bins": 8}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "dropout": 0.0}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3}
    lengths = {"max_source_positions": 20, "max_target_positions": 16}
    config = transformers.WhisperConfig(vocab_size=VOCABULARY, **sizes, **heads, **ids, **lengths)
    with own_rng(1):
        return transformers.WhisperForConditionalGeneration(config)


def llava() -> Any:
    small = {"num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 96}
    vision = transformers.CLIPVisionConfig(hidden_size=32, image_size=16, patch_size=8, **small)
    text = transformers.LlamaConfig(vocab_size=VOCABULARY, hidden_size=WIDTH, **small)
    image = {"image_token_index": IMAGE, "image_seq_length": 4, "vision_feature_layer": -1}
    with own_rng(1):
        return transformers.LlavaForConditionalGeneration(
            transformers.LlavaConfig(vision_config=vision, text_config=text, **image)
        )


def batches(image: bool) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    texts = [torch.randint(5, 190, (2, 10), generator=generator) for _ in range(2)]
    if not image:
        sound = torch.randn(2, 8, 40, generator=generator)
        return [{"input_features": sound, "labels": ids} for ids in texts]
    pixels = torch.randn(2, 3, 16, 16, generator=generator)
    for ids in texts:
        ids[:, 1:5] = IMAGE
    return [
        {"input_ids": ids, "pixel_values": pixels, "labels": ids.masked_fill(ids == IMAGE, -100)}
        for ids in texts
    ]


def test_the_text_beside_a_sound_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        attacks = [SubspaceWords(capacity_seconds=0)]
        watch = check_undisturbed(tmp_path, attacks, whisper, batches=batches(image=False))
    assert watch.latest["leakage/subspace_words/f1"] == 1
    assert watch.latest["leakage/subspace_words/control"] > 0.9
    assert caplog.text.count(f"{NOBODY}input_features") == 1


def test_a_decoder_is_run_on_ids_without_a_sound() -> None:
    model = whisper().eval()
    anatomy, ids = find_anatomy(model), torch.arange(5, 13)[None]
    assert context_length(anatomy) == 16
    silence = torch.zeros(1, 1, WIDTH)
    with undisturbed(anatomy) as run, torch.no_grad():
        logits = run(input_ids=ids).logits
        expected = model(decoder_input_ids=ids, encoder_outputs=(silence,)).logits
    assert torch.equal(logits, expected)


def test_places_of_an_image_are_no_words(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        watch = check_undisturbed(tmp_path, [BagOfWords()], llava, batches=batches(image=True))
    for line in watch.lines("bag_of_words"):
        assert line["metrics"]["f1"]["value"] == 1
    assert caplog.text.count(f"{NOBODY}pixel_values") == 1
