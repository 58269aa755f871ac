"""Documents packed into rows: what a look says of them, against each document alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DataCollatorWithFlattening

from lightning_fedleak import (
    AttentionMembership,
    BagOfWords,
    FCMembership,
    PrefixInversion,
    PublicText,
)
from lightning_fedleak.attacks import GradientMembership, SubspaceTexts
from lightning_fedleak.engine import Games
from lightning_fedleak.model.batches import TokenBatch
from lightning_fedleak.trainers import Watch
from tests.helpers.models import tiny_gpt2, tiny_llama

SHARED = {"use_cache": False}


def documents(step: int) -> list[list[int]]:
    """Texts of distinct tokens, so that each token counts by itself in the truth."""
    generator = torch.Generator().manual_seed(step)
    ids = (3 + torch.randperm(90, generator=generator)[:24]).tolist()
    return [ids[:7], ids[7:9], ids[9:17], ids[17:24]]


def flattened(texts: list[list[int]], **options: Any) -> dict[str, Any]:
    features = [{"input_ids": ids, "labels": ids} for ids in texts]
    return DataCollatorWithFlattening(**options)(features, return_tensors="pt")


def block_diagonal(texts: list[list[int]]) -> dict[str, Any]:
    """Two rows of two documents; labels at the boundaries count."""
    ids = torch.tensor([[*texts[0], *texts[1], *[0] * 6], [*texts[2], *texts[3]]])
    lengths = [[7, 2, 6], [8, 7]]
    number = torch.stack([torch.arange(len(n)).repeat_interleave(torch.tensor(n)) for n in lengths])
    positions = torch.stack([torch.cat([torch.arange(k) for k in n]) for n in lengths])
    sees = (number[:, :, None] == number[:, None]).tril()[:, None]
    labels = ids.masked_fill(ids == 0, -100)
    return {"input_ids": ids, "labels": labels, "position_ids": positions, "attention_mask": sees}


FORMS = {
    "flattened, with a cache": flattened,
    "flattened": lambda texts: {**flattened(texts), **SHARED},
    "marked three times": lambda texts: {
        **flattened(texts, return_seq_idx=True), "cu_seq_lens": [0, 7, 9, 17, 24], **SHARED,
    },
    "block-diagonal": block_diagonal,
    "rows at positions of their own": lambda texts: {
        k: v for k, v in block_diagonal(texts).items() if k != "position_ids"
    },
    "concatenated": lambda texts: flattened(texts, return_position_ids=False),
}  # fmt: skip


def lines(
    folder: Path, model: nn.Module, attack: Any, form: str, steps: int = 3, **options: Any
) -> list[dict[str, Any]]:
    """What is logged of a loop on packed rows."""
    optimizer = torch.optim.SGD(model.train().parameters(), lr=1e-3)
    watch = Watch(
        model, optimizer, [attack], every_n_steps=1, folder=folder, tensorboard=False, **options
    )
    with watch:
        for step in range(steps):
            batch = FORMS[form](documents(step))
            with watch.step(batch):
                model(**batch).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
    (path,) = folder.rglob("leakage.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_words_read_are_those_with_a_gradient(tmp_path: Path, name: str, form: str) -> None:
    """BagOfWords names every row of the embedding's gradient: it is right if the truth is."""
    model = tiny_llama() if name == "llama" else tiny_gpt2(tied=False, dropout=0.0)
    read = lines(tmp_path, model, BagOfWords(), form)
    assert len(read) == 3
    for line in read:
        assert line["unknown"] is None
        assert line["metrics"]["precision"]["value"] == 1
        assert line["metrics"]["recall"]["value"] == 1


def test_training_is_not_disturbed_by_the_trial(tmp_path: Path) -> None:
    weights = []
    for watched in (False, True):
        model = tiny_gpt2(tied=False, dropout=0.1).train()
        torch.manual_seed(5)
        if watched:
            lines(tmp_path, model, BagOfWords(), "flattened, with a cache")
        else:
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
            for step in range(3):
                model(**flattened(documents(step))).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(*weights)


class Twice(nn.Module):
    """Runs its model twice in a step, so that which call the batch was read in is not known."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = tiny_llama()

    def forward(self, **batch: Any) -> Any:
        self.inner(**batch)
        return self.inner(**batch)


def test_each_call_of_a_model_is_read_off_its_own_graph(tmp_path: Path) -> None:
    for line in lines(tmp_path, Twice(), BagOfWords(), "flattened"):
        assert line["metrics"]["f1"]["value"] == 1


def test_what_was_not_tried_is_unknown_until_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_fedleak.model.taps.graph.is_compiled", lambda _: True)
    for line in lines(tmp_path / "tried", Twice(), BagOfWords(), "flattened"):
        assert "could not be tested whether they attend to each other" in line["unknown"]
        assert "called 2 times" in line["unknown"]

    def adapter(batch: dict[str, Any]) -> TokenBatch:
        marks = batch["position_ids"]
        return TokenBatch(batch["input_ids"], batch["labels"], None, "causal", marks, None, False)

    for line in lines(tmp_path / "said", Twice(), BagOfWords(), "flattened", batch_adapter=adapter):
        assert line["metrics"]["f1"]["value"] == 1


# ---- membership ---------------------------------------------------------------------------------


def one_in_a_row(texts: list[list[int]]) -> dict[str, Any]:
    """The same documents without packing: the reference."""
    width = max(map(len, texts))
    mask = torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids in texts])
    ids = torch.tensor([ids + [0] * (width - len(ids)) for ids in texts])
    return {"input_ids": ids, "labels": ids.masked_fill(mask == 0, -100), "attention_mask": mask}


FORMS["one in a row"] = one_in_a_row
MEMBERSHIP = {
    "crafted layer": lambda: FCMembership(1),
    "crafted attention": lambda: AttentionMembership(
        1, PublicText([torch.arange(5, 15) + k for k in range(60)]), tokens=8, batch=4
    ),
    "passive": lambda: GradientMembership(
        PublicText([torch.arange(5, 15) + k for k in range(30)]), tokens=8, controls=4
    ),
}
OTHERS = PublicText([torch.tensor(ids) for step in range(50, 70) for ids in documents(step)])


def games_of(folder: Path, name: str, attack: str, form: str) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    model = tiny_llama() if name == "llama" else tiny_gpt2(tied=False, dropout=0.0)
    games = Games(targets=4, held_out=OTHERS)
    return lines(folder, model, MEMBERSHIP[attack](), form, games=games)


@pytest.mark.parametrize("attack", MEMBERSHIP)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_games_about_packed_documents_are_those_of_documents_alone(
    tmp_path: Path, name: str, attack: str
) -> None:
    found = games_of(tmp_path / "packed", name, attack, "flattened")
    expected = games_of(tmp_path / "alone", name, attack, "one in a row")
    assert len(found) == len(expected) == 3
    for packed, alone in zip(found, expected, strict=True):
        assert packed["unknown"] is alone["unknown"] is None
        assert packed["n"] == alone["n"] > 0
        for metric in ("auc", "accuracy"):
            value, reference = (line["metrics"][metric]["value"] for line in (packed, alone))
            assert value == pytest.approx(reference, abs=1e-6)


@pytest.mark.parametrize("attack", MEMBERSHIP)
@pytest.mark.parametrize(
    ("form", "why"),
    [
        ("flattened, with a cache", "attend to the others of its row"),
        ("rows at positions of their own", "position_ids that begin again"),
    ],
)
def test_what_is_not_read_alone_is_no_member(
    tmp_path: Path, attack: str, form: str, why: str
) -> None:
    for line in games_of(tmp_path, "gpt2", attack, form):
        assert why in line["unknown"]


# ---- texts --------------------------------------------------------------------------------------

TEXTS = {
    "from a split": lambda: PrefixInversion(1, None, language_model=False),
    "from gradients": lambda: SubspaceTexts(),
}


def texts_of(folder: Path, name: str, attack: str, form: str) -> list[dict[str, Any]]:
    model = tiny_llama(d=64) if name == "llama" else tiny_gpt2(tied=False, dropout=0.0, d=64)
    return lines(folder, model, TEXTS[attack](), form, steps=1, texts=4)


@pytest.mark.parametrize("attack", TEXTS)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_packed_texts_are_read_as_alone(tmp_path: Path, name: str, attack: str) -> None:
    [packed] = texts_of(tmp_path / "packed", name, attack, "flattened")
    [alone] = texts_of(tmp_path / "alone", name, attack, "one in a row")
    assert packed["unknown"] is alone["unknown"] is None
    assert packed["n"] == alone["n"] == 4, "documents, not rows"
    for metric in ("token_accuracy", "exact_sentences", "texts_found"):
        value, reference = (line["metrics"][metric]["value"] for line in (packed, alone))
        assert value == reference == 1


@pytest.mark.parametrize("attack", TEXTS)
def test_a_block_diagonal_mask_keeps_texts_apart(tmp_path: Path, attack: str) -> None:
    [line] = texts_of(tmp_path, "llama", attack, "block-diagonal")
    assert line["metrics"]["token_accuracy"]["value"] == 1


@pytest.mark.parametrize("attack", TEXTS)
def test_a_text_that_reads_others_is_unknown(tmp_path: Path, attack: str) -> None:
    [line] = texts_of(tmp_path, "gpt2", attack, "flattened, with a cache")
    assert "attend to the others of its row" in line["unknown"]
