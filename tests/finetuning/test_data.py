from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lightning_fedleak.cli.finetuning.assets import SourceError
from lightning_fedleak.cli.finetuning.module import TextDataModule
from tests.helpers.folders import TEXTS, tiny_tokenizer


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "private.txt"
    path.write_text("\n".join(TEXTS))
    return str(path)


def rows(loader) -> list[list[int]]:
    return [
        ids[mask.bool()].tolist()
        for batch in loader
        for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
    ]


def test_rows_hold_the_texts_and_nothing_else(text: str) -> None:
    tokenizer = tiny_tokenizer()
    data = TextDataModule(text, tokenizer, batch_size=1, length=64, val_fraction=0.25)
    data.setup()
    observed = sorted(tokenizer.decode(r) for r in rows(data.train_dataloader()))
    held_out = sorted(tokenizer.decode(r) for r in rows(data.val_dataloader()))
    assert len(held_out) == 3
    assert sorted(observed + held_out) == sorted(TEXTS)


def test_long_texts_go_on_in_the_next_row(text: str) -> None:
    tokenizer = tiny_tokenizer()
    data = TextDataModule(text, tokenizer, batch_size=1, length=5, val_fraction=0.1)
    data.setup()
    val = rows(data.val_dataloader())
    whole = [i for row in val for i in row]
    assert max(map(len, val)) == 5
    expected = [tokenizer(t)["input_ids"] for t in TEXTS]
    retained = [ids[: len(ids) - (len(ids) % 5 == 1)] for ids in expected]
    assert whole in retained


def test_padding_is_masked_and_never_a_label(text: str) -> None:
    data = TextDataModule(text, tiny_tokenizer(), batch_size=4)
    data.setup()
    for batch in data.train_dataloader():
        real = batch["attention_mask"].bool()
        assert not real.all()
        assert torch.equal(batch["labels"][real], batch["input_ids"][real])
        assert (batch["labels"][~real] == -100).all()
        assert (real.int().diff(dim=1) <= 0).all()


def test_order_and_split_follow_from_the_seed_alone(text: str) -> None:
    def epochs(seed: int) -> list[list[list[int]]]:
        data = TextDataModule(text, tiny_tokenizer(), batch_size=2, seed=seed)
        data.setup()
        loader = data.train_dataloader()
        return [rows(loader), rows(loader), rows(data.val_dataloader())]

    before = torch.get_rng_state()
    first = epochs(0)
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(3)
    assert epochs(0) == first
    assert epochs(1) != first
    assert first[0] != first[1]


def test_refuses_what_cannot_work(text: str, tmp_path: Path) -> None:
    for wrong in ({"batch_size": 0}, {"length": 1}, {"val_fraction": 1.0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            TextDataModule(text, tiny_tokenizer(), **wrong)
    with pytest.raises(SourceError, match=r"length must be .* to 64, got 65: tokens"):
        TextDataModule(text, tiny_tokenizer(), length=65).setup()
    with pytest.raises(SourceError, match=r"fewer than batch_size=50"):
        TextDataModule(text, tiny_tokenizer(), batch_size=50).setup()
    single = tmp_path / "one.txt"
    single.write_text("hi\n")
    with pytest.raises(SourceError, match="in a plain file one a line"):
        TextDataModule(str(single), None, batch_size=1).setup()
    with pytest.raises(SourceError, match=r"no folder './nowhere'"):
        TextDataModule(text, "./nowhere").setup()
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(SourceError, match="no tokenizer could be loaded from"):
        TextDataModule(text, str(tmp_path)).setup()
