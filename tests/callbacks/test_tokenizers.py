"""Public text of another model's tokenizer, refused or warned of before anything is calibrated."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_fedleak.attacks import AlignedFlatChat, FlatChat, PublicText
from lightning_fedleak.callbacks import Games, LeakageMonitor
from lightning_fedleak.engine.lineup import check_texts, warn_of_other_tokenizers
from lightning_fedleak.model.anatomy import find_anatomy
from tests.callbacks.runs import Probe, fit
from tests.helpers.models import VOCAB, tiny_gpt2, tiny_marian


class Words:
    """A tokenizer in which a word is its length, with as many tokens as is said."""

    name_or_path = "another-model"

    def __init__(self, size: int) -> None:
        self.size = size

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [len(word) for word in text.split()]}

    def __len__(self) -> int:
        return self.size


LONG = ["a bb ccc", "a " + 140 * "d"]
SHORT = ["a bb ccc dddd", "eeeee ffffff"]


@pytest.mark.parametrize("auto", [True, False])
def test_ids_that_the_model_does_not_read_are_refused(auto: bool, tmp_path: Path) -> None:
    tokenizer = Words(150)
    probe = Probe()
    if auto:
        monitor = LeakageMonitor(public_text=LONG, tokenizer=tokenizer, every_n_steps=1)
    else:
        monitor = LeakageMonitor([probe, FlatChat(LONG, tokenizer=tokenizer)], every_n_steps=1)
    message = (
        r"public text of attack '(aligned_)?flatchat' holds token id 140 \(by 'another-model', of "
        rf"150 tokens\), and the model's 'model.transformer.wte' has {VOCAB} rows"
    )
    with pytest.raises(ValueError, match=message):
        fit([monitor], tmp_path)
    assert probe.prepared == 0


def test_texts_that_games_hold_out_are_checked_too(tmp_path: Path) -> None:
    games = Games(held_out=PublicText([[1, 2, 500]]))
    with pytest.raises(ValueError, match=r"Games\(held_out=\) holds token id 500, and"):
        fit([LeakageMonitor(Probe(), games=games)], tmp_path)


def test_targets_are_compared_with_the_target_s_vocabulary() -> None:
    anatomy = find_anatomy(tiny_marian(decoder_vocab=60))
    sources = [[70, 71, 72], [73, 74, 75]]

    def given(targets: list[list[int]] | None) -> list[Any]:
        return [AlignedFlatChat(PublicText(sources, targets=targets))]

    check_texts(given([[5, 6], [7, 8]]), {}, anatomy)
    with pytest.raises(ValueError, match=r"holds token id 61, and the model's 'lm_head' has 60"):
        check_texts(given([[5, 61], [7, 8]]), {}, anatomy)
    with pytest.raises(ValueError, match=r"vocabularies of their own: give PublicText\(texts, tar"):
        check_texts(given(None), {}, anatomy)


def warned(tokenizer: Any, model: torch.nn.Module) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_of_other_tokenizers([None, tokenizer, tokenizer], find_anatomy(model))
    return [str(w.message) for w in caught]


@pytest.mark.parametrize(
    ("tokenizer", "why"),
    [
        (Words(50), "has 97 rows"),
        (Words(120), "has 97 rows"),
    ],
)
def test_another_model_s_tokenizer_whose_ids_fit_is_warned_of(tokenizer: Words, why: str) -> None:
    (said,) = warned(tokenizer, tiny_gpt2())
    assert "'another-model'" in said
    assert why in said


@pytest.mark.parametrize(
    "tokenizer",
    [
        Words(97),
        Words(90),  # embeddings are padded
        Words(99),  # tokens were added
        object(),
        lambda text: {"input_ids": [1]},
    ],
)
def test_what_may_be_the_model_s_own_is_not_warned_of(tokenizer: Any) -> None:
    assert warned(tokenizer, tiny_gpt2()) == []


def test_a_warning_comes_with_the_fit(tmp_path: Path) -> None:
    monitor = LeakageMonitor(Probe(), tokenizer=Words(40))
    with pytest.warns(UserWarning, match="'another-model', of 40 tokens, is hardly this model's"):
        fit([monitor], tmp_path)
