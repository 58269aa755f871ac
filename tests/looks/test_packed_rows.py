"""Documents packed into rows: what a look says of them, against each document alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DataCollatorWithFlattening

from lightning_fedleak import BagOfWords
from lightning_fedleak.batches import TokenBatch
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


def test_what_was_not_tried_is_unknown_until_it_is_said(tmp_path: Path) -> None:
    for line in lines(tmp_path / "tried", Twice(), BagOfWords(), "flattened"):
        assert "attend to each other could not be tried" in line["unknown"]
        assert "called 2 times" in line["unknown"]

    def adapter(batch: dict[str, Any]) -> TokenBatch:
        marks = batch["position_ids"]
        return TokenBatch(batch["input_ids"], batch["labels"], None, "causal", marks, None, False)

    for line in lines(tmp_path / "said", Twice(), BagOfWords(), "flattened", batch_adapter=adapter):
        assert line["metrics"]["f1"]["value"] == 1
