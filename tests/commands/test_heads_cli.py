"""``fedleak memorization`` on classifiers and masked models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertModel

from lightning_fedleak.attacks.memorization import Combined, ShortAnswers
from lightning_fedleak.cli.finetuning import SourceError
from lightning_fedleak.cli.studies.models import log_probs_before_and_after
from lightning_fedleak.evaluation.canaries import leave_out
from lightning_fedleak.model.taps import Text
from lightning_fedleak.trainers import Watch
from tests.engine.channels.test_heads import data, encoder, lines, loader_of, settings, words
from tests.helpers.commands import run_command

HEADS = {"row": "loss_ratio_short", "token": "combined", "masked": "combined"}


def texts_of(rows: Any, head: str) -> list[dict[str, Any]]:
    """Return rows as a table has them: words, and classes by their names or numbers."""
    written = []
    for row in rows:
        tokens = [f"w{n}" for n in row["input_ids"].tolist()[1:]]
        line: dict[str, Any] = {"text": " ".join(tokens)}
        if head == "row":
            line["kind"] = f"LABEL_{int(row['labels'])}"
        elif head == "token":
            line = {"tokens": tokens, "kind": row["labels"].tolist()[1:]}
        written.append(line)
    return written


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture(scope="module", params=HEADS)
def released(request: pytest.FixtureRequest, tmp_path_factory: Any) -> tuple[str, Path, Any]:
    """Train a model under a watch; return its head, and a folder with what the command reads."""
    head, folder = request.param, tmp_path_factory.mktemp("released")
    model = encoder(head)
    for name in ("base", "model"):
        words().save_pretrained(folder / name)
    model.save_pretrained(folder / "base")
    train, others = leave_out(data(head), 100, seed=1)
    attack = ShortAnswers() if head == "row" else Combined()
    loader = loader_of(train, head)
    optimizer = torch.optim.AdamW(model.parameters(), 5e-3)
    watch = Watch(model, optimizer, [attack], loader=loader, folder=folder, settings=settings())
    torch.manual_seed(0)
    with watch:
        for _ in range(3):
            for batch in loader:
                with watch.step(batch):
                    model(**batch).loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
    model.save_pretrained(folder / "model")
    write(folder / "members.jsonl", texts_of(list(train), head))
    write(folder / "others.jsonl", texts_of(list(others), head))
    return head, folder, lines(folder, HEADS[head])[-1]


def command(folder: Path, head: str, **more: Any) -> tuple[int, str]:
    labels = {} if head == "masked" else {"label_column": "kind"}
    places = {name: str(folder / name) for name in ("model", "base")}
    sides = {name: str(folder / f"{name}.jsonl") for name in ("members", "others")}
    return run_command("memorization", **places | sides | labels | {"drawn": True} | more)


def test_the_commands_auc_equals_that_of_the_last_look(released: Any, tmp_path: Path) -> None:
    head, folder, live = released
    status, _ = command(folder, head, out=tmp_path / "out.json", records=tmp_path / "r.jsonl")
    assert status == 0
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["pool"] == live["pool"]
    auc = found["attacks"][HEADS[head]]["auc"]
    assert auc == pytest.approx(live["metrics"]["auc"]["value"], abs=1e-9)
    assert auc > 0.7 or head != "token"  # three epochs teach the others little
    assert "extraction" not in found["attacks"]


def test_references_are_trained_as_the_run_was(released: Any, tmp_path: Path) -> None:
    head, folder, _ = released
    facts = {"run": folder, "batch_size": 8, "epochs": 3, "references": 2}
    _, text = command(folder, head, out=tmp_path / "out.json", **facts)
    assert "at a constant rate of 0.005" in " ".join(text.split())
    attacks = json.loads((tmp_path / "out.json").read_text())["attacks"]
    beyond = attacks["beyond_references" + "_short" * (head == "row")]
    assert beyond["auc"] > 0.7 or head != "token"
    assert beyond["auc_high"] > 0.5


def test_an_invalid_class_or_a_missing_column_is_unknown(released: Any, tmp_path: Path) -> None:
    head, folder, _ = released
    rows = [json.loads(line) for line in (folder / "members.jsonl").read_text().splitlines()]
    if head == "masked":
        rows[3]["text"] += " [MASK]"
    else:
        rows[3]["kind"] = "LABEL_9" if head == "row" else [7] * len(rows[3]["tokens"])
    members = write(tmp_path / "members.jsonl", rows)
    status, text = command(folder, head, members=members)
    assert (status, "UNKNOWN" in text) == (3, True)
    if head != "masked":
        assert command(folder, head, label_column=None)[0] == 3
    with pytest.raises(SourceError, match="--prompt-column"):
        command(folder, head, prompt_column="text")


def test_a_base_without_a_head_makes_all_classes_equally_likely(
    released: Any, tmp_path: Path
) -> None:
    head, folder, _ = released
    BertModel(encoder(head).config).save_pretrained(tmp_path)
    words().save_pretrained(tmp_path)
    row = torch.tensor([2, 7, 8, 9])
    label = torch.tensor([-100, -100, -100, -100, 3])
    base, _ = log_probs_before_and_after([Text(row, label)], folder / "model", tmp_path)
    classes = 64 if head == "masked" else 5
    assert base.log_probs.sum().item() == pytest.approx(-torch.log(torch.tensor(classes)).item())
    (tmp_path / "config.json").write_text((folder / "model" / "config.json").read_text())
    with pytest.raises(SourceError, match="lacks"):
        log_probs_before_and_after([Text(row, label)], tmp_path, folder / "base")
