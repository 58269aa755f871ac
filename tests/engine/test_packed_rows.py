"""Documents packed into rows: what a look says of them, against each document alone."""

from pathlib import Path
from typing import Any

import pytest
import torch
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
from tests.helpers.loops import check_undisturbed, watched
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


def lines(folder, model, attack, form, steps=3, **options) -> list[dict[str, Any]]:
    """Return what is logged of a loop on packed rows."""
    batches = [FORMS[form](documents(step)) for step in range(steps)]
    return watched(folder, [attack], model, batches=batches, lr=1e-3, **options).lines()


@pytest.mark.parametrize("form", FORMS)
def test_words_read_are_those_with_a_gradient(tmp_path: Path, form: str) -> None:
    """BagOfWords names every row of the embedding's gradient: it is right if the truth is."""
    model = tiny_gpt2(tied=False, dropout=0.0) if "cache" in form else tiny_llama()
    looks = lines(tmp_path, model, BagOfWords(), form)
    assert len(looks) == 3
    for line in looks:
        assert line["unknown"] is None
        assert line["metrics"]["precision"]["value"] == 1
        assert line["metrics"]["recall"]["value"] == 1


def test_training_is_not_disturbed_by_the_trial(tmp_path: Path) -> None:
    batches = [flattened(documents(step)) for step in range(3)]
    check_undisturbed(tmp_path, BagOfWords(), lambda: tiny_gpt2(tied=False), batches=batches)


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
HELD_OUT = PublicText([torch.tensor(ids) for step in range(50, 70) for ids in documents(step)])


def games_of(folder: Path, name: str, attack: str, form: str) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    model = tiny_llama() if name == "llama" else tiny_gpt2(tied=False, dropout=0.0)
    games = Games(targets=4, held_out=HELD_OUT)
    return lines(folder, model, MEMBERSHIP[attack](), form, games=games)


@pytest.mark.parametrize(
    ("name", "attack"),
    [("llama", "crafted layer"), ("gpt2", "crafted attention"), ("llama", "passive")],
)
def test_games_about_packed_documents_are_those_of_documents_alone(tmp_path, name, attack) -> None:
    looks = games_of(tmp_path / "packed", name, attack, "flattened")
    expected = games_of(tmp_path / "alone", name, attack, "one in a row")
    assert len(looks) == len(expected) == 3
    for packed, alone in zip(looks, expected, strict=True):
        assert packed["unknown"] is alone["unknown"] is None
        assert packed["n"] == alone["n"] > 0
        for metric in ("auc", "accuracy"):
            value, reference = (line["metrics"][metric]["value"] for line in (packed, alone))
            assert value == pytest.approx(reference, abs=1e-6)


@pytest.mark.parametrize(
    ("attack", "form", "why"),
    [
        ("crafted layer", "flattened, with a cache", "may attend to the others"),
        ("passive", "flattened, with a cache", "may attend to the others"),
        ("crafted attention", "rows at positions of their own", "position_ids that begin again"),
    ],
)
def test_what_is_not_read_alone_is_no_member(tmp_path, attack, form, why) -> None:
    for line in games_of(tmp_path, "gpt2", attack, form):
        assert why in line["unknown"]


# ---- texts --------------------------------------------------------------------------------------

TEXTS = {
    "from a split": lambda: PrefixInversion(1, None, language_model=False),
    "from gradients": lambda: SubspaceTexts(),
}


def texts_of(folder: Path, name: str, attack: str, form: str) -> list[dict[str, Any]]:
    model = tiny_llama(d=64) if name == "llama" else tiny_gpt2(tied=False, dropout=0.0, d=64)
    played: Any = TEXTS[attack]()
    played.needs_control = False  # which takes most of the time
    return lines(folder, model, played, form, steps=1, texts=4)


@pytest.mark.parametrize(
    ("name", "attack"), [("llama", "from gradients"), ("gpt2", "from a split")]
)
def test_packed_texts_are_read_as_alone(tmp_path: Path, name: str, attack: str) -> None:
    [packed] = texts_of(tmp_path / "packed", name, attack, "flattened")
    [alone] = texts_of(tmp_path / "alone", name, attack, "one in a row")
    assert packed["unknown"] is alone["unknown"] is None
    assert packed["n"] == alone["n"] == 4, "documents, not rows"
    for metric in ("token_accuracy", "exact_sentences", "texts_found"):
        value, reference = (line["metrics"][metric]["value"] for line in (packed, alone))
        assert value == reference == 1


@pytest.mark.parametrize("attack", TEXTS)
def test_texts_in_one_row_are_read_only_where_none_attends_to_another(tmp_path, attack) -> None:
    [line] = texts_of(tmp_path / "apart", "llama", attack, "block-diagonal")
    assert line["metrics"]["token_accuracy"]["value"] == 1
    [line] = texts_of(tmp_path / "joined", "gpt2", attack, "flattened, with a cache")
    assert "may attend to the others" in line["unknown"]
