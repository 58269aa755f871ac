from __future__ import annotations

import pytest
import torch

from lightning_fedleak.anatomy import find_anatomy
from lightning_fedleak.attacks.public_text import PublicText
from tests.helpers.models import VOCAB, tiny_gpt2


def test_given_text_is_handed_back() -> None:
    given = PublicText([[1, 2, 3]])
    assert PublicText.given_or_sampled(given, find_anatomy(tiny_gpt2())) is given


def test_sampled_text_follows_from_the_seed_and_leaves_the_model_alone() -> None:
    model = tiny_gpt2()
    model.config.max_position_embeddings = 16
    before = {name: p.clone() for name, p in model.named_parameters()}
    rng = torch.get_rng_state()
    first = PublicText.given_or_sampled("sampled", find_anatomy(model), seed=3)
    again = PublicText.given_or_sampled("sampled", find_anatomy(model), seed=3)
    other = PublicText.given_or_sampled("sampled", find_anatomy(model), seed=4)
    assert torch.equal(torch.get_rng_state(), rng)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert [s.tolist() for s in first.sentences] == [s.tolist() for s in again.sentences]
    assert [s.tolist() for s in first.sentences] != [s.tolist() for s in other.sentences]
    assert len(first) == 256
    assert max(len(s) for s in first.sentences) == 16
    assert all(int(s.min()) >= 0 and int(s.max()) < VOCAB for s in first.sentences)


def test_another_string_is_refused() -> None:
    with pytest.raises(ValueError, match="'sampled', got 'wikitext'"):
        PublicText.given_or_sampled("wikitext", find_anatomy(tiny_gpt2()))  # type: ignore[arg-type]
