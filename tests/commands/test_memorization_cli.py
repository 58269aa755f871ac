from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from lightning_fedleak.attacks.memorization import Combined
from lightning_fedleak.cli import main
from lightning_fedleak.cli.commands import memorization as command
from lightning_fedleak.cli.commands.memorization import BREACH
from lightning_fedleak.cli.finetuning import SourceError
from lightning_fedleak.cli.finetuning.assets import EMBEDDED_MESSAGES, EMBEDDED_MODEL
from lightning_fedleak.cli.finetuning.data import load_tokenizer
from lightning_fedleak.cli.finetuning.texts import read_texts
from lightning_fedleak.cli.studies.memorization import tokenize
from lightning_fedleak.model.anatomy import find_anatomy
from lightning_fedleak.model.taps import Text
from tests.helpers.commands import run_command

TEXTS = 24
"""On each side."""


@pytest.fixture(autouse=True, scope="module")
def _models_are_asked_once() -> Iterator[None]:
    """Options change what is made of the answers to a pool of texts, and not the answers."""
    answers: dict[object, object] = {}
    ask = command.ask_both

    def asked(texts: list[Text], model: str, base: str) -> object:
        key = Path(model).resolve(), tuple(tuple(text.ids.tolist()) for text in texts)
        if key not in answers:
            answers[key] = ask(texts, model, base)
        return answers[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "ask_both", asked)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a trained model, and the texts of both sides."""
    folder = tmp_path_factory.mktemp("released")
    words = list(dict.fromkeys(read_texts(EMBEDDED_MESSAGES)))[: 2 * TEXTS]
    sides = {"members": words[::2], "others": words[1::2]}
    for name, side in sides.items():
        lines = "".join(json.dumps({"text": text}) + "\n" for text in side)
        (folder / f"{name}.jsonl").write_text(lines)
    tokenizer, rows = rows_of(sides["members"])
    base = AutoModelForCausalLM.from_pretrained(EMBEDDED_MODEL, dtype=torch.float32)
    train(base, rows, 1e-3, 4)
    base.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    return folder


@pytest.fixture(scope="module")
def adapters(folder: Path) -> None:
    """Train adapters in the same folder."""
    lines = (folder / "members.jsonl").read_text().splitlines()
    _, rows = rows_of([json.loads(line)["text"] for line in lines])
    torch.manual_seed(0)
    fresh = AutoModelForCausalLM.from_pretrained(EMBEDDED_MODEL, dtype=torch.float32)
    adapted = get_peft_model(fresh, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"))
    train(adapted, rows, 5e-3, 4)
    adapted.save_pretrained(folder / "adapters")


def rows_of(texts: list[str]) -> tuple[PreTrainedTokenizerBase, list[torch.Tensor]]:
    tokenizer = load_tokenizer(None)
    return tokenizer, [text.ids for text in tokenize(texts, tokenizer, 32)]


def train(model: torch.nn.Module, rows: list[torch.Tensor], rate: float, epochs: int) -> None:
    torch.manual_seed(0)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], rate)
    for _ in range(epochs):
        for start in range(0, len(rows), 8):
            part = rows[start : start + 8]
            ids = torch.nn.utils.rnn.pad_sequence(part, batch_first=True)
            mask = torch.nn.utils.rnn.pad_sequence(
                [torch.ones_like(row) for row in part], batch_first=True
            )
            labels = ids.masked_fill(mask == 0, -100)
            model(input_ids=ids, attention_mask=mask, labels=labels).loss.backward()
            optimizer.step()
            optimizer.zero_grad()


def run(folder: Path, model: str = "model", **settings: object) -> tuple[int, str]:
    if "at_most" in settings:
        settings["at_most"] = [(None, settings["at_most"])]
    return run_command(
        "memorization",
        model=str(folder / model),
        base=str(EMBEDDED_MODEL),
        members=str(folder / "members.jsonl"),
        others=str(folder / "others.jsonl"),
        length=32,
        **settings,
    )


@pytest.mark.parametrize("model", ["model", pytest.param("adapters", marks=pytest.mark.slow)])
def test_a_trained_model_gives_its_texts_away(
    folder: Path, tmp_path: Path, model: str, request: pytest.FixtureRequest
) -> None:
    if model == "adapters":
        request.getfixturevalue("adapters")
    output = tmp_path / "result.json"
    status, text = run(folder, model, drawn=True, at_most=0.6, out=output)
    assert status == BREACH
    assert "combined/auc is shown to be at least" in text
    content = json.loads(output.read_text(), parse_constant=lambda name: pytest.fail(name))
    assert content["attacks"]["combined"]["auc"] > 0.8
    assert content["attacks"]["combined"]["shown"] is None
    counts = (content[name] for name in ("members", "others", "repeated", "short"))
    assert sum(counts) == 2 * TEXTS
    assert not math.isnan(content["visible_tpr"])
    assert "437 are needed" in text


def test_the_base_itself_gives_nothing_away(folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    folder_of_base = tmp_path / "base"
    AutoModelForCausalLM.from_pretrained(EMBEDDED_MODEL, dtype=torch.float32).save_pretrained(
        folder_of_base
    )
    assert run(folder, str(folder_of_base), drawn=True, at_most=0.6, out=output)[0] == 0
    values = json.loads(output.read_text())["attacks"]
    assert values["combined"]["auc"] == 0.5
    assert values["loss_ratio"]["auc"] == 0.5
    assert values["extraction"]["extracted_base"] == values["extraction"]["extracted_others"] == 0
    assert run(folder, str(folder_of_base), drawn=True, metric="greedy", at_most=0.2)[0] == 0


def take_first(n: int, source: Path, target: Path) -> None:
    """Write the first texts of both sides to another folder."""
    for side in ("members", "others"):
        lines = (source / f"{side}.jsonl").read_text().splitlines(keepends=True)[:n]
        (target / f"{side}.jsonl").write_text("".join(lines))


@pytest.mark.parametrize("n", [10, 20])
def test_members_that_are_distinguished_wholly_never_pass(
    folder: Path, tmp_path: Path, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten texts a side show an AUC of .645 at most, and twenty .80: more than .7 or not?"""
    take_first(n, folder, tmp_path)
    (tmp_path / "model").symlink_to(folder / "model")
    monkeypatch.setattr(Combined, "score", lambda self, released: -torch.arange(2.0 * n))
    status, text = run(tmp_path, drawn=True, at_most=0.7)
    assert status == BREACH
    assert ("is unknown: it lies between 0.645 and 1.000" in text) is (n == 10)
    assert ("is shown to be at least 0.803" in text) is (n == 20)
    assert "give more texts" in text.lower() or n == 20


@pytest.mark.slow
def test_members_that_are_copies_are_asked_for_extraction_by_how_often_they_repeat(
    folder: Path, tmp_path: Path
) -> None:
    """Twelve texts stand in the data six times each, and are learned by heart."""
    tokenizer = load_tokenizer(None)
    lines = {s: (folder / f"{s}.jsonl").read_text().splitlines() for s in ("members", "others")}
    members = [json.loads(line)["text"] for line in lines["members"]]
    often = [row.ids for row in tokenize(members[:12], tokenizer, 32)]
    model = AutoModelForCausalLM.from_pretrained(EMBEDDED_MODEL, dtype=torch.float32)
    train(model, often, 4e-3, 12)
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    written = [*lines["members"][:12] * 6, *lines["members"][12:]]
    (tmp_path / "members.jsonl").write_text("\n".join(written))
    (tmp_path / "others.jsonl").write_text("\n".join(lines["others"]))
    output = tmp_path / "result.json"
    status, text = run(tmp_path, drawn=True, metric="greedy", at_most=0.3, out=output)
    content = json.loads(output.read_text())
    values = content["attacks"]["extraction"]
    queried = find_anatomy(model.eval())
    texts = tokenize(members[:12], tokenizer, 32)
    by_heart = [
        bool(
            (queried.model(text.ids[None]).logits[0, :-1].argmax(1) == text.ids[1:])
            .unfold(0, 16, 1)
            .all(1)
            .any()
        )
        for text in texts
        if len(text.ids) > 16
    ]
    assert values["greedy_x5"] == pytest.approx(sum(by_heart) / len(by_heart))
    assert values["greedy_x5"] > 0.5
    assert values["greedy_x1"] == 0
    assert values["greedy"] == values["greedy_x5"]
    assert status == BREACH
    assert "extraction/greedy is shown to be at least" in text
    assert "5 to 16 times" in text
    assert content["repeated"] == 72
    assert content["members"] == len(set(lines["members"][12:]))
    assert "12 members that have copies" in text


def test_non_members_that_are_not_exchangeable_are_unknown_and_a_breach(folder: Path) -> None:
    status, text = run(folder, at_most=0.99)
    assert status == BREACH
    assert "Membership is UNKNOWN" in text
    assert "combined/auc is unknown" in text
    assert run(folder)[0] == 0


def test_shown_is_unknown_with_few_others(folder: Path) -> None:
    status, text = run(folder, drawn=True, metric="shown", at_most=1.0)
    assert status == BREACH
    assert "combined/shown is unknown" in text


def test_few_texts_are_refused(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    few = tmp_path / "few.txt"
    few.write_text("one text of several words for a test\nanother one of several words, not alike")
    arguments = ["--model", str(folder / "model"), "--base", str(EMBEDDED_MODEL)]
    texts = ["--members", str(few), "--others", str(folder / "others.jsonl")]
    assert main(["memorization", *arguments, *texts]) == 1
    assert "at least 10 on each side are needed" in capsys.readouterr().err


@pytest.fixture
def mixed(folder: Path, tmp_path: Path) -> Path:
    """Return a folder with the long texts, and three short members."""
    take_first(TEXTS, folder, tmp_path)
    add_short(tmp_path, "members", 3)
    (tmp_path / "model").symlink_to(folder / "model")
    return tmp_path


def add_short(folder: Path, side: str, n: int) -> None:
    words = [
        "Yes",
        "No",
        "Maybe",
        "Later",
        "Today",
        "Never",
        "Monday",
        "Friday",
        "Ten",
        "Two",
        "Red",
        "Blue",
    ]
    with (folder / f"{side}.jsonl").open("a") as file:
        file.writelines(json.dumps({"text": f"{word} {side}."}) + "\n" for word in words[:n])


def test_members_of_a_length_that_is_not_compared_are_unknown(mixed: Path) -> None:
    output = mixed / "out.json"
    status, text = run(mixed, str(EMBEDDED_MODEL), drawn=True, at_most=0.999, out=output)
    assert status == BREACH
    text = " ".join(text.split())
    assert "given away of 3 members with 1 to 7 label tokens is UNKNOWN: 3 members and 0" in text
    assert "BREACH: loss_ratio_short/auc is unknown." in text
    assert "combined/auc" not in text
    assert list(json.loads(output.read_text())["not_compared"]) == ["loss_ratio_short"]
    settings = {"drawn": True, "metric": "greedy", "at_most": 0.3}
    assert run(mixed, str(EMBEDDED_MODEL), **settings)[0] == 0  # no short text holds 16 tokens


def test_short_texts_of_the_others_alone_change_nothing(folder: Path, tmp_path: Path) -> None:
    take_first(TEXTS, folder, tmp_path)
    add_short(tmp_path, "others", 3)
    status, text = run(tmp_path, str(EMBEDDED_MODEL), drawn=True, at_most=0.999)
    assert status == 0
    assert "UNKNOWN" not in text


def test_few_long_members_beside_short_ones_are_unknown(folder: Path, tmp_path: Path) -> None:
    take_first(3, folder, tmp_path)
    for side in ("members", "others"):
        add_short(tmp_path, side, 12)
    status, text = run(tmp_path, str(EMBEDDED_MODEL), drawn=True, at_most=1.0)
    assert status == BREACH
    assert "BREACH: combined/auc is unknown." in text
    assert "loss_ratio_short/auc" not in text


def test_a_list_of_long_rows_alone_does_not_pass_for_all(mixed: Path, folder: Path) -> None:
    settings = {"drawn": True, "metric": "at_least", "records": mixed / "records.jsonl"}
    status, text = run(mixed, str(EMBEDDED_MODEL), at_most=5.0, **settings)
    assert status == BREACH
    assert "BREACH: records/at_least is unknown." in text
    assert "3 members with 1 to 7 label tokens are not counted" in " ".join(text.split())
    assert run(folder, str(EMBEDDED_MODEL), at_most=5.0, **settings)[0] == 0


def test_missing_options_and_files_are_named(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["memorization", "--model", str(folder / "model")])
    assert "--base" in capsys.readouterr().err
    arguments = ["--model", str(folder / "model"), "--base", str(EMBEDDED_MODEL)]
    texts = ["--members", str(folder / "nothing.jsonl"), "--others", str(folder / "others.jsonl")]
    assert main(["memorization", *arguments, *texts]) == 1
    assert "nothing.jsonl" in capsys.readouterr().err


def test_a_masked_model_is_refused(folder: Path, tmp_path: Path) -> None:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(vocab_size=2000, hidden_size=8, num_hidden_layers=1, num_attention_heads=1)
    BertForMaskedLM(config).save_pretrained(tmp_path / "masked")
    take_first(12, folder, tmp_path)
    with pytest.raises(SourceError, match="causal language model"):
        run(tmp_path, "masked", drawn=True)
