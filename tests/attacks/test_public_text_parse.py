"""Every attack that owns public text takes it in the same forms, and refuses the same."""

from collections.abc import Callable

import pytest

from lightning_fedleak.attacks import (
    AlignedFlatChat,
    Attack,
    AttentionMembership,
    FlatChat,
    PrefixInversion,
    PublicText,
)

TAKERS: dict[str, Callable[..., Attack]] = {
    "flatchat": FlatChat,
    "aligned": AlignedFlatChat,
    "attention": lambda *a, **k: AttentionMembership(1, *a, **k),
    "prefix": lambda *a, **k: PrefixInversion(1, *a, **k),
}


class Letters:
    """A tokenizer of one id a letter."""

    def __call__(self, text: str, **_: object) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) % 64 for letter in text]}


@pytest.mark.parametrize("build", TAKERS.values(), ids=TAKERS)
def test_texts_ids_and_public_text_are_one(build: Callable[..., Attack]) -> None:
    texts, tokenizer = ["some text", "another one"], Letters()
    expected = PublicText(texts, tokenizer)
    ids = [tokenizer(text)["input_ids"] for text in texts]
    for attack in (build(texts, tokenizer=tokenizer), build(ids), build(expected)):
        assert attack.public_text.digest == expected.digest
    assert build("sampled").public_text == "sampled"


@pytest.mark.parametrize("build", TAKERS.values(), ids=TAKERS)
def test_what_cannot_be_meant_is_refused_alike(build: Callable[..., Attack]) -> None:
    with pytest.raises(ValueError, match="must be 'sampled'"):
        build("one string of text")
    with pytest.raises(ValueError, match="tokenizer"):
        build(["some text"])
