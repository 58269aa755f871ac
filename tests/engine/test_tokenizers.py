"""Public text of another model's tokenizer, refused or warned of before anything is calibrated."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

from lightning_fedleak.attacks import AlignedFlatChat, FlatChat, PublicText
from lightning_fedleak.callbacks import Games
from lightning_fedleak.engine.lineup import check_texts, warn_of_other_tokenizers
from lightning_fedleak.model.anatomy import find_anatomy
from tests.callbacks.runs import Probe
from tests.helpers.loops import watched
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


@pytest.mark.parametrize("auto", [True, False])
def test_ids_that_the_model_does_not_have_are_refused(auto: bool, tmp_path: Path) -> None:
    tokenizer, probe = Words(150), Probe()
    attacks = "auto" if auto else [probe, FlatChat(LONG, tokenizer=tokenizer)]
    given = {"public_text": LONG, "tokenizer": tokenizer} if auto else {}
    message = (
        r"public text of attack '(aligned_)?flatchat' holds token id 140 \(by 'another-model', of "
        rf"150 tokens\), and the model's 'transformer.wte' has {VOCAB} rows"
    )
    with pytest.raises(ValueError, match=message):
        watched(tmp_path, attacks, **given)
    assert probe.prepared == 0
    games = Games(held_out=PublicText([[1, 2, 500]]))
    with pytest.raises(ValueError, match=r"Games\(held_out=\) holds token id 500, and"):
        watched(tmp_path, probe, games=games)


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


@pytest.mark.parametrize(
    ("tokenizer", "why"),
    [
        (Words(50), "has 97 rows"),
        (Words(120), "has 97 rows"),
        (Words(97), None),
        (Words(90), None),  # embeddings are padded
        (Words(99), None),  # tokens were added
        (object(), None),
    ],
)
def test_another_models_tokenizer_whose_ids_fit_is_warned_of(
    tokenizer: Any, why: str | None
) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_of_other_tokenizers([None, tokenizer, tokenizer], find_anatomy(tiny_gpt2()))
    messages = [str(warning.message) for warning in caught]
    assert len(messages) == (why is not None)
    assert all("'another-model'" in message and str(why) in message for message in messages)


def test_a_warning_comes_with_the_run(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="'another-model', of 40 tokens, is hardly this model's"):
        watched(tmp_path, Probe(), n=4, tokenizer=Words(40))
