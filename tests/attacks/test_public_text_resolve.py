"""Public text: the forms in which attacks take it, and how it is sampled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from lightning_fedleak import attacks
from lightning_fedleak.attacks.public_text import PublicText, share_work
from lightning_fedleak.model.anatomy import Anatomy, find_anatomy
from tests.helpers.models import VOCAB, tiny_gpt2, tiny_llama


def test_a_begin_that_the_model_has_no_embedding_of_is_none() -> None:
    """GPT-2's configured token 50256 in a small model: texts begin with any token."""
    model = tiny_gpt2()
    model.config.bos_token_id = 50256
    texts = PublicText.sampled_from(find_anatomy(model), 20, 4).sentences
    firsts = {int(text[0]) for text in texts}
    assert len(firsts) > 1
    assert max(firsts) < VOCAB


def test_sampled_text_follows_from_the_seed_and_leaves_the_model_alone() -> None:
    model = tiny_gpt2()
    model.config.max_position_embeddings = 16
    before = {name: p.clone() for name, p in model.named_parameters()}
    rng = torch.get_rng_state()
    first = PublicText.resolve("sampled", find_anatomy(model), seed=3)
    again = PublicText.resolve("sampled", find_anatomy(model), seed=3)
    other = PublicText.resolve("sampled", find_anatomy(model), seed=4)
    assert torch.equal(torch.get_rng_state(), rng)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert [s.tolist() for s in first.sentences] == [s.tolist() for s in again.sentences]
    assert [s.tolist() for s in first.sentences] != [s.tolist() for s in other.sentences]
    assert len(first) == 256
    assert max(len(s) for s in first.sentences) == 16
    assert all(int(s.min()) >= 0 and int(s.max()) < VOCAB for s in first.sentences)


def test_second_tokens_follow_the_models_distribution() -> None:
    anatomy = find_anatomy(tiny_gpt2().eval())
    with torch.no_grad():  # far from uniform, with tokens that never come
        anatomy.model.get_output_embeddings().weight.mul_(30)
        logits = anatomy.model(torch.tensor([[1]])).logits[0, -1]
    law = logits.double().softmax(0)
    n = 6_000
    texts = PublicText.sampled_from(anatomy, n, 2).sentences
    observed = torch.bincount(torch.stack(texts)[:, 1], minlength=VOCAB).double()
    counted = law * n >= 5
    assert 3 < int(counted.sum()) < VOCAB
    expected = torch.cat([law[counted], law[~counted].sum()[None]]) * n
    result = torch.cat([observed[counted], observed[~counted].sum()[None]])
    assert chisquare(result.numpy(), expected.numpy()).pvalue > 1e-3


def test_fewer_texts_than_were_written_are_not_written_again(monkeypatch) -> None:
    written: list[int] = []
    sample = attacks.public_text._sample

    def counted(anatomy: Anatomy, lengths: list[int], *rest: Any) -> list[Tensor]:
        written.append(len(lengths))
        return sample(anatomy, lengths, *rest)

    monkeypatch.setattr(attacks.public_text, "_sample", counted)
    anatomy = find_anatomy(tiny_gpt2())
    with share_work():
        few = PublicText.resolve("sampled", anatomy, n=4)
        many = PublicText.resolve("sampled", anatomy, n=9)
        again = PublicText.resolve("sampled", anatomy, n=4)
    assert written == [4, 9]
    assert [len(text) for text in (few, many, again)] == [4, 9, 4]
    assert all(map(torch.equal, again.sentences, many.sentences[:4]))


@pytest.mark.parametrize("vocabulary", [600, 3 * attacks.public_text._BLOCK])
def test_tokens_are_drawn_by_their_probabilities(vocabulary: int) -> None:
    generator = torch.Generator().manual_seed(0)
    law = torch.rand(vocabulary, generator=generator).square()
    law[torch.randperm(vocabulary, generator=generator)[: vocabulary // 2]] = 0
    law[-50:] = 0
    n = 200_000
    drawn = attacks.public_text._draw((law / law.sum()).expand(n, -1), generator)[:, 0]
    observed, expected = torch.bincount(drawn, minlength=vocabulary), law.double() / law.sum() * n
    assert int(observed[law == 0].sum()) == 0
    counted = expected >= 5
    assert chisquare(observed[counted].numpy(), _as_many(observed, expected, counted)).pvalue > 1e-3


def _as_many(observed: Tensor, expected: Tensor, counted: Tensor) -> Any:
    """Return expected counts of some tokens that add up to as many as were observed."""
    chosen = expected[counted].double()
    return (chosen * observed[counted].sum() / chosen.sum()).numpy()


@pytest.mark.parametrize("make", [tiny_gpt2, tiny_llama])
@pytest.mark.parametrize("has_cache", [True, False])
def test_shorter_texts_are_written_in_the_same_run(make, has_cache, monkeypatch) -> None:
    """Random starts, and then always the most likely token: all texts are known."""
    model = make().eval()
    model.config.bos_token_id = model.config.eos_token_id = None
    anatomy = find_anatomy(model)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(1e4)
    if not has_cache:
        monkeypatch.setattr(attacks.public_text, "cache_argument", lambda model: None)
    text = PublicText.sampled_from(anatomy, 3, 9, shorter=[6, 6, 2])
    assert [len(ids) for ids in text.sentences] == [9, 9, 9, 6, 6, 2]
    for ids in text.sentences:
        for i in range(1, len(ids)):
            with torch.no_grad():
                assert int(model(ids[None, :i]).logits[0, -1].argmax()) == int(ids[i])


@pytest.mark.parametrize("shorter", [[4, 6], [10]])
def test_lengths_of_shorter_texts_descend(shorter: list[int]) -> None:
    with pytest.raises(ValueError, match=r"shorter=.* in descending order, at most length=9"):
        PublicText.sampled_from(find_anatomy(tiny_gpt2()), 3, 9, shorter=shorter)


TAKERS: dict[str, Callable[..., attacks.Attack]] = {
    "flatchat": attacks.FlatChat,
    "aligned": attacks.AlignedFlatChat,
    "attention": lambda *a, **k: attacks.AttentionMembership(1, *a, **k),
    "prefix": lambda *a, **k: attacks.PrefixInversion(1, *a, **k),
}


class Letters:
    """A tokenizer of one id a letter."""

    def __call__(self, text: str, **_: object) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) % 64 for letter in text]}


@pytest.mark.parametrize("build", TAKERS.values(), ids=TAKERS)
def test_texts_ids_and_public_text_are_one(build: Callable[..., attacks.Attack]) -> None:
    texts, tokenizer = ["some text", "another one"], Letters()
    expected = PublicText(texts, tokenizer)
    ids = [tokenizer(text)["input_ids"] for text in texts]
    for attack in (build(texts, tokenizer=tokenizer), build(ids), build(expected)):
        assert attack.public_text.digest == expected.digest
    assert build("sampled").public_text == "sampled"


@pytest.mark.parametrize("build", TAKERS.values(), ids=TAKERS)
def test_what_cannot_be_meant_is_refused_alike(build: Callable[..., attacks.Attack]) -> None:
    with pytest.raises(ValueError, match="must be 'sampled'"):
        build("one string of text")
    with pytest.raises(ValueError, match="tokenizer"):
        build(["some text"])
