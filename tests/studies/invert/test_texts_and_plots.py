"""Rows of one length, and pictures whose lines are the numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import BertTokenizer

from lightning_fedleak.cli.finetuning import SourceError
from lightning_fedleak.cli.studies.invert import (
    ActivationCell,
    Utility,
    rows_of_length,
)
from lightning_fedleak.cli.studies.invert.cells import special_ends
from lightning_fedleak.cli.studies.invert.plots import plot_cells
from lightning_fedleak.evaluation.metrics.rates import Rate
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
        rows_of_length(TEXTS, tokenizer, 60, 12, least=12)


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


def cells() -> list[ActivationCell]:
    results = []
    for layer in (1, 2):
        for attack, height in (("prefix", 1.0), ("descent", 0.5)):
            for sigma in (0.0, 0.1, 1.0):
                value = height / (1 + sigma)
                rate = Rate(value, value / 2, min(1.0, value * 1.5))
                results.append(
                    ActivationCell(
                        attack=attack, layer=layer, blocks=3, length=32, sigma=sigma,
                        relative=True, texts=4,
                        utility=Utility("next-token accuracy", 0.4 / (1 + sigma), 20.0 + sigma),
                        rates=dict.fromkeys(("token_accuracy", "exact_sentences", "rouge_l"), rate),
                    )
                )  # fmt: skip
    failed = ActivationCell(
        attack="descent", layer=2, blocks=3, length=32, sigma=3.0, relative=True, texts=4,
        problem="no luck",
    )  # fmt: skip
    return [*results, failed]


def test_lines_are_the_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figure_module = pytest.importorskip("matplotlib.figure")
    figures = []
    plain = figure_module.Figure.savefig
    monkeypatch.setattr(
        figure_module.Figure,
        "savefig",
        lambda self, *a, **k: (figures.append(self), plain(self, *a, **k))[1],
    )
    plot_cells(cells(), "sigma", tmp_path / "noise.png", model="m")
    assert (tmp_path / "noise.png").read_bytes().startswith(b"\x89PNG")
    remaining, right = figures[0].axes[:2]
    assert remaining.get_title() == "split 1 of 3, 32 tokens"
    assert right.get_title() == "split 2 of 3, 32 tokens"
    lines = {line.get_label(): line for line in right.get_lines()}
    assert lines["descent: tokens"].get_xdata().tolist() == [0.0, 0.1, 1.0]
    assert lines["descent: tokens"].get_ydata().tolist() == [0.5, 0.5 / 1.1, 0.25]
    assert lines["task: next-token accuracy"].get_ydata().tolist() == [0.4, 0.4 / 1.1, 0.2]
