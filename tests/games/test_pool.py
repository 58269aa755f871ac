from __future__ import annotations

import pytest

from lightning_fedleak.evaluation.games import SentencePool
from lightning_fedleak.evaluation.games.pool import pad


class Words:
    """A tokenizer of three ids and special tokens, as Hugging Face's are called."""

    pad_token_id = 9

    def __call__(self, texts, truncation, max_length):
        assert truncation
        ids = [[*[7, *(int(w) for w in t.split())][: max_length - 1], 8] for t in texts]
        return {"input_ids": ids}


def test_what_is_equal_after_cutting_is_kept_once_and_in_order() -> None:
    rows = [[1, 2, 3, 4], [5], [2, 1], [1, 2, 3, 9], [2, 1, 7], [2, 1]]
    pool = SentencePool(rows, tokens=3)
    assert [r.tolist() for r in pool.rows] == [[1, 2, 3], [2, 1], [2, 1, 7]]
    assert (pool.duplicates, pool.short, len(pool)) == (2, 1, 3)
    longer = SentencePool(rows, tokens=4, at_least=3)
    assert [r.tolist() for r in longer.rows] == [[1, 2, 3, 4], [1, 2, 3, 9], [2, 1, 7]]


def test_padding_is_masked() -> None:
    pool = SentencePool([[1, 2, 3], [4, 5], [6, 7]], pad_id=9)
    ids, mask = pad([pool.rows[1], pool.rows[0]], pool.pad_id)
    assert ids.tolist() == [[4, 5, 9], [1, 2, 3]]
    assert mask.tolist() == [[1, 1, 0], [1, 1, 1]]
    ids, mask = pad([pool.rows[1]], pool.pad_id, length=4)
    assert ids.tolist() == [[4, 5, 9, 9]]
    assert mask.sum() == 2


def test_the_tokenizer_cuts_so_that_special_tokens_stay() -> None:
    pool = SentencePool.from_texts(["1 2 3 4 5", "3"], Words(), tokens=4)
    assert [r.tolist() for r in pool.rows] == [[7, 1, 2, 8], [7, 3, 8]]
    assert pool.pad_id == 9
    started = SentencePool.from_texts(["1 2 3 4 5", "3"], Words(), tokens=4, start_token_id=6)
    assert [r.tolist() for r in started.rows] == [[6, 7, 1, 8], [6, 7, 3, 8]]


@pytest.mark.parametrize(
    ("rows", "tokens"), [([], 4), ([[1, 2], [1, 2, 3]], 2), ([[1, 2], [3, 4]], 1)]
)
def test_too_little_text_is_said(rows: list[list[int]], tokens: int) -> None:
    with pytest.raises(ValueError, match="distinct sentences: give more"):
        SentencePool(rows, tokens)
