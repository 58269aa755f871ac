"""Rows of one length."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import BertTokenizer

from lightning_fedleak.cli.commands.invert import rows_of_length, special_ends
from lightning_fedleak.cli.finetuning import SourceError
from tests.helpers.folders import TEXTS, tiny_tokenizer


def test_rows_are_texts_cut_or_joined() -> None:
    tokenizer = tiny_tokenizer()
    whole = [tokenizer(t)["input_ids"] for t in TEXTS]
    rows = rows_of_length(TEXTS, tokenizer, 5, 12, seed=1)
    assert rows.shape == (12, 5)
    assert {tuple(r) for r in rows.tolist()} == {tuple(w[:5]) for w in whole}
    long = rows_of_length(TEXTS, tokenizer, 60, 12, seed=1)
    assert 1 < len(long) < 12
    order = torch.randperm(12, generator=torch.Generator().manual_seed(1)).tolist()
    decoded = tokenizer.decode(long[0].tolist())
    assert " ".join(TEXTS[i] for i in order).startswith(decoded)
    with_start = rows_of_length(TEXTS, tokenizer, 5, 12, seed=1, start_token_id=0)
    assert torch.equal(with_start[:, 1:], rows[:, :4])
    assert with_start[:, 0].tolist() == [0] * 12
    assert len(rows_of_length(TEXTS, tokenizer, 5, 3)) == 3
    with pytest.raises(SourceError, match=r"make only \d+ of 60 tokens"):
        rows_of_length(TEXTS, tokenizer, 60, 12, min_rows=12)


def test_special_tokens_stay_at_the_ends(tmp_path: Path) -> None:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b", "c"]
    file = tmp_path / "vocab.txt"
    file.write_text("\n".join(words))
    tokenizer = BertTokenizer(str(file))
    assert special_ends(tokenizer) == ([2], [3])
    rows = rows_of_length(["a b c a b c a b c"], tokenizer, 6, 1)
    assert rows.tolist() == [[2, 5, 6, 7, 5, 3]]
    with pytest.raises(SourceError, match="special tokens"):
        rows_of_length(["a b"], tokenizer, 2, 1)
