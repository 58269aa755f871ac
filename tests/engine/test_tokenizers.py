"""Public text of another model's tokenizer, refused before anything is calibrated."""

from pathlib import Path
from typing import Any

import pytest

from lightning_fedleak.attacks import AlignedFlatChat, FlatChat, PublicText
from lightning_fedleak.callbacks import Games
from lightning_fedleak.engine.lineup import check_texts
from lightning_fedleak.model.anatomy import find_anatomy
from tests.callbacks.runs import Probe
from tests.helpers.loops import watched
from tests.helpers.models import VOCAB, tiny_marian


class Words:
    """A tokenizer in which a word is its length."""

    name_or_path = "another-model"

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [len(word) for word in text.split()]}


LONG = ["a bb ccc", "a " + 140 * "d"]


@pytest.mark.parametrize("auto", [True, False])
def test_ids_that_the_model_does_not_have_are_refused(auto: bool, tmp_path: Path) -> None:
    tokenizer, probe = Words(), Probe()
    attacks = "auto" if auto else [probe, FlatChat(LONG, tokenizer=tokenizer)]
    given = {"public_text": LONG, "tokenizer": tokenizer} if auto else {}
    message = (
        r"public text of attack '(aligned_)?flatchat' holds token id 140, "
        rf"and the model's 'transformer.wte' has {VOCAB} rows"
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
