"""``fedleak memorization``: attacks, lists of rows, references, and values in texts."""

import json
import math
import random
import re
import shutil
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from lightning_fedleak.attacks.memorization import Combined
from lightning_fedleak.cli import main
from lightning_fedleak.cli.commands.verdicts import BREACH
from lightning_fedleak.cli.finetuning import SourceError
from lightning_fedleak.cli.finetuning.assets import EMBEDDED_MESSAGES, EMBEDDED_MODEL
from lightning_fedleak.cli.finetuning.module import load_tokenizer
from lightning_fedleak.cli.finetuning.texts import read_texts
from lightning_fedleak.evaluation.canaries.repeats import PoolRows
from lightning_fedleak.evaluation.metrics.record_list import RecordList, used_up_mark
from tests.helpers.commands import run_command

TEXTS = 24
"""On each side."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a trained model, one trained on neither side, and both sides."""
    folder = tmp_path_factory.mktemp("released")
    words = list(dict.fromkeys(read_texts(EMBEDDED_MESSAGES)))
    sides = {"members": words[: 2 * TEXTS : 2], "others": words[1 : 2 * TEXTS : 2]}
    for name, side in sides.items():
        lines = "".join(json.dumps({"text": text}) + "\n" for text in side)
        (folder / f"{name}.jsonl").write_text(lines)
    save_trained(folder / "model", sides["members"])
    save_trained(folder / "null", words[2 * TEXTS : 3 * TEXTS], 1e-5, 1)
    return folder


def save_trained(folder: Path, texts: list[str], rate: float = 1e-3, epochs: int = 4) -> None:
    """Save a model that was trained on texts, and its tokenizer."""
    tokenizer, rows = rows_of(texts)
    model = AutoModelForCausalLM.from_pretrained(EMBEDDED_MODEL, dtype=torch.float32)
    train(model, rows, rate, epochs)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def rows_of(texts: list[str]) -> tuple[PreTrainedTokenizerBase, list[torch.Tensor]]:
    tokenizer = load_tokenizer(None)
    rows = tokenizer(texts, truncation=True, max_length=32)["input_ids"]
    return tokenizer, [torch.tensor(row) for row in rows if row]


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


def test_a_trained_model_gives_its_texts_away(folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    status, text = run(folder, drawn=True, at_most=0.6, out=output)
    assert status == BREACH
    assert "combined/auc is shown to be at least" in text
    content = json.loads(output.read_text(), parse_constant=lambda name: pytest.fail(name))
    assert content["attacks"]["combined"]["auc"] > 0.8
    assert content["attacks"]["combined"]["shown"] is None
    counts = (content[name] for name in ("members", "others", "repeated", "short"))
    assert sum(counts) == 2 * TEXTS
    assert not math.isnan(content["visible_tpr"])
    assert "437 and 4380 are needed" in text


def test_a_model_of_other_texts_gives_nothing_away(folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    assert run(folder, "null", drawn=True, at_most=0.85, out=output)[0] == 0
    values = json.loads(output.read_text())["attacks"]
    status, text = run(folder, "null", drawn=True, at_most=values["combined"]["auc"])
    assert status == BREACH
    assert "Give more texts" in text
    assert values["combined"]["auc_low"] < 0.5 < values["combined"]["auc_high"]
    assert values["extraction"]["extracted_base"] == values["extraction"]["extracted_others"] == 0
    assert run(folder, "null", drawn=True, metric="greedy", at_most=0.2)[0] == 0


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
    assert ("is unknown: it is between 0.645 and 1.000" in text) is (n == 10)
    assert ("is shown to be at least 0.803" in text) is (n == 20)
    assert "give more texts" in text.lower() or n == 20


def test_non_members_that_are_not_exchangeable_are_unknown_and_a_breach(folder: Path) -> None:
    status, text = run(folder, at_most=0.99)
    assert status == BREACH
    assert "Membership is UNKNOWN" in text
    assert "combined/auc is unknown" in text
    assert run(folder)[0] == 0


def test_few_texts_are_refused(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    few = tmp_path / "few.txt"
    few.write_text("one text of several words for a test\nanother one of several words, not alike")
    arguments = ["--model", str(folder / "model"), "--base", str(EMBEDDED_MODEL)]
    texts = ["--members", str(few), "--others", str(folder / "others.jsonl")]
    assert main(["memorization", *arguments, *texts]) == 1
    assert "10 of each are needed" in capsys.readouterr().err


@pytest.fixture
def mixed(folder: Path, tmp_path: Path) -> Path:
    """Return a folder with the long texts, and three short members."""
    take_first(TEXTS, folder, tmp_path)
    add_short(tmp_path, "members", 3)
    (tmp_path / "model").symlink_to(folder / "model")
    return tmp_path


def add_short(folder: Path, side: str, n: int) -> None:
    with (folder / f"{side}.jsonl").open("a") as file:
        file.writelines(json.dumps({"text": f"{number} {side}."}) + "\n" for number in range(n))


def test_members_of_a_length_that_is_not_compared_are_unknown(mixed: Path, folder: Path) -> None:
    output = mixed / "out.json"
    status, text = run(mixed, str(folder / "null"), drawn=True, at_most=0.999, out=output)
    assert status == BREACH
    text = " ".join(text.split())
    assert (
        "The leakage of 3 members with 1 to 7 label tokens is UNKNOWN: 3 texts were trained on, 0"
        in text
    )
    assert "BREACH: loss_ratio_short/auc is unknown." in text
    assert "combined/auc" not in text
    assert list(json.loads(output.read_text())["not_compared"]) == ["loss_ratio_short"]
    settings = {"drawn": True, "metric": "greedy", "at_most": 0.3}
    assert run(mixed, str(folder / "null"), **settings)[0] == 0  # no short text holds 16 tokens


def test_short_texts_of_the_others_alone_change_nothing(folder: Path, tmp_path: Path) -> None:
    take_first(TEXTS, folder, tmp_path)
    add_short(tmp_path, "others", 3)
    status, text = run(tmp_path, str(folder / "null"), drawn=True, at_most=0.999)
    assert status == 0
    assert "UNKNOWN" not in text


def test_few_long_members_beside_short_ones_are_unknown(folder: Path, tmp_path: Path) -> None:
    take_first(3, folder, tmp_path)
    for side in ("members", "others"):
        add_short(tmp_path, side, 12)
    status, text = run(tmp_path, str(folder / "null"), drawn=True, at_most=1.0)
    assert status == BREACH
    assert "BREACH: combined/auc is unknown." in text
    assert "loss_ratio_short/auc" not in text


def test_a_list_of_long_rows_alone_does_not_pass_for_all(mixed: Path, folder: Path) -> None:
    settings = {"drawn": True, "metric": "at_least", "records": mixed / "records.jsonl"}
    status, text = run(mixed, str(folder / "null"), at_most=5.0, **settings)
    assert status == BREACH
    assert "BREACH: records/at_least is unknown." in text
    assert "3 members with 1 to 7 label tokens are not counted" in " ".join(text.split())
    assert run(folder, str(folder / "null"), at_most=5.0, **settings)[0] == 0


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


def test_a_masked_model_without_a_mask_is_refused(folder: Path, tmp_path: Path) -> None:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(vocab_size=2000, hidden_size=8, num_hidden_layers=1, num_attention_heads=1)
    BertForMaskedLM(config).save_pretrained(tmp_path / "masked")
    take_first(12, folder, tmp_path)
    with pytest.raises(SourceError, match="has no mask token"):
        run(tmp_path, "masked", drawn=True)


# ---- lists of rows from the command, shown and dropped ----


def test_the_command_writes_the_list_and_gates_on_it(folder: Path, tmp_path: Path) -> None:
    path, output = tmp_path / "records.jsonl", tmp_path / "out.json"
    settings = {"drawn": True, "records": path, "out": output, "metric": "at_least"}
    status, text = run(folder, at_most=2.0, **settings)
    assert status == BREACH
    records = RecordList.load(path)
    counts = json.loads(output.read_text())["records"]
    assert counts["at_least"] == records.head["at_least"] > 2
    assert records.head["account"] is None
    assert f"at least {records.head['at_least']} leak" in text
    assert {line.row for line in records.lines} == set(range(TEXTS))
    words = (folder / "members.jsonl").read_text().splitlines()
    assert json.loads(words[0])["text"] not in path.read_text()
    assert run(folder, str(folder / "null"), at_most=5.0, **settings)[0] == 0
    assert json.loads(output.read_text())["records"]["at_least"] == 0
    status, text = run(folder, at_most=29.0, **settings)
    assert status == BREACH
    assert "is unknown: too few others" in text


def test_without_a_draw_no_list_is_written(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    assert run(folder, records=path)[0] == BREACH
    assert not path.exists()


@pytest.mark.parametrize(
    ("settings", "words"),
    [({"metric": "at_least", "at_most": 3.0}, "--records FILE"), ({"at_most": 3.0}, "is above 1")],
)
def test_options_that_contradict_each_other(
    folder: Path, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(SourceError, match=words):
        run(folder, drawn=True, **settings)


def write(tmp_path: Path, *, account: bool | None = False, others: int = 40) -> tuple[Path, Path]:
    """Return a list of twenty rows, of which 4 and 9 are copies, and the rows."""
    n = 19 + others
    data = tmp_path / "train.jsonl"
    rows = [{"text": f"text number {n}\x1b[31m", "id": n} for n in range(20)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    scores = torch.cat([torch.arange(19.0).flip(0) + 100, torch.zeros(others)])
    times, copies = torch.ones(n, dtype=torch.long), [[row] for row in range(n)]
    for text in range(9, 19):
        copies[text] = [text + 1]
    times[4], copies[4] = 2, [4, 9]
    rows_of = PoolRows(copies, times)
    labels = torch.full((n,), 12)
    members = torch.arange(n) < 19
    path = tmp_path / "records.jsonl"
    RecordList.of(scores, members, labels, rows_of, account=account).save(path)
    return path, data


def test_rows_are_shown_on_a_terminal_alone(tmp_path: Path) -> None:
    path, data = write(tmp_path)
    settings = {"action": "show", "file": path, "data": str(data), "top": 0.2}
    status, text = run_command("records", terminal=True, **settings)
    assert status == 0
    text = re.sub(r"\x1b\[[0-9;]*m", "", text)
    assert "\x1b" not in text
    shown = [n for n in range(20) if f"text number {n}" in text.replace("\n", " ")]
    places = [text.index(f"row {n},") for n in (4, 9, 0, 1)]
    assert places == sorted(places)
    assert {4, 9, 0} <= {*shown}
    assert "p is a probability over the draw of rows" in text
    with pytest.raises(SourceError, match="only on a terminal") as refusal:
        run_command("records", **settings)
    assert "text number" not in str(refusal.value)


@pytest.mark.parametrize("account", [None, False])
def test_kept_rows_are_written_and_the_draw_is_used_up(
    tmp_path: Path, folder: Path, account: bool | None
) -> None:
    path, data = write(tmp_path, account=account)
    kept = tmp_path / "kept.jsonl"
    settings = {"action": "drop", "file": path, "data": str(data)}
    settings["no_account"] = account is None
    status, text = run_command("records", top=0.15, out=kept, **settings)
    assert status == 0
    assert "new draw" in text
    rows = [json.loads(line)["id"] for line in kept.read_text().splitlines()]
    assert rows == [n for n in range(20) if n not in (4, 9, 0)]
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert RecordList.load(path).head["used_up"] is True
    members = (folder / "members.jsonl").read_text()
    kept.write_text(members)
    (tmp_path / "members.jsonl").symlink_to(kept)
    used_up_mark(kept).rename(used_up_mark(tmp_path / "members.jsonl"))
    (tmp_path / "others.jsonl").write_text((folder / "others.jsonl").read_text())
    (tmp_path / "model").symlink_to(folder / "model")
    status, text = run(tmp_path, drawn=True, at_most=1.0)
    assert status == BREACH
    assert "used up" in text


@pytest.mark.parametrize(
    ("head", "out", "words"),
    [
        ({"account": True}, "kept.jsonl", "under differential privacy: dropping"),
        ({"account": None}, "kept.jsonl", "--no-account"),
        ({"others": 1}, "kept.jsonl", "too few texts"),
        ({}, None, "--out FILE.jsonl"),
        ({}, "kept.csv", "--out FILE.jsonl"),
    ],
)
def test_what_must_not_be_dropped(
    tmp_path: Path, head: dict[str, Any], out: str | None, words: str
) -> None:
    path, data = write(tmp_path, **head)
    settings: dict[str, Any] = {} if out is None else {"out": tmp_path / out}
    settings["no_account"] = head.get("account") is True  # no word overrules an account
    with pytest.raises(SourceError, match=words):
        run_command("records", action="drop", file=path, data=str(data), **settings)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["records.jsonl", "train.jsonl"]


def test_rows_of_other_data_are_refused(tmp_path: Path) -> None:
    path, data = write(tmp_path)
    data.write_text('{"text": "one"}\n')
    with pytest.raises(SourceError, match="row 19"):
        run_command("records", action="drop", file=path, data=str(data), out=tmp_path / "k.jsonl")


def test_a_reference_is_compared_with_and_must_have_seen_no_text(
    folder: Path, tmp_path: Path
) -> None:
    words = list(dict.fromkeys(read_texts(EMBEDDED_MESSAGES)))
    for name, texts in (("other", words[2 * TEXTS : 3 * TEXTS]), ("held_out", words[1::2][:TEXTS])):
        save_trained(tmp_path / name, texts, 2e-3, 2)
    output = tmp_path / "result.json"
    reference = str(tmp_path / "other")
    status, text = run(folder, drawn=True, at_most=0.6, out=output, reference=[reference])
    assert status == BREACH
    assert "combined_reference/auc is shown to be at least" in text
    values = json.loads(output.read_text())["attacks"]["combined_reference"]
    assert values["auc"] > 0.8
    facts = json.loads(output.read_text())["reference"]
    assert (facts["kind"], facts["rows"]) == ("folder", None)
    named = f"Reference of combined_reference: {facts['model']} (folder), trained on an unstated"
    assert named in " ".join(text.split())
    assert values["tpr_at_fpr_0.01"] is None  # too few others
    rare = {"metric": "tpr_at_fpr_0.001", "at_most": 0.999}
    status, text = run(folder, drawn=True, out=output, reference=[reference], **rare)
    assert status == BREACH
    for name in ("combined", "combined_reference"):
        assert f"{name}/tpr_at_fpr_0.001 is unknown." in text
    few = {
        "reference": [reference],
        "reference_rows": [str(TEXTS - 1)],
        "summary": tmp_path / "summary.md",
    }
    status, text = run(folder, drawn=True, at_most=0.999, out=output, **few)
    assert status == BREACH
    for place in (text, few["summary"].read_text()):
        words = " ".join(place.split())
        assert "combined_reference/auc is unknown: weak reference" in words
        assert f"trained on {TEXTS - 1} rows" in words
    with pytest.raises(SourceError, match=r"--reference cannot be loaded: .*nowhere"):
        run(folder, drawn=True, reference=[str(tmp_path / "nowhere")])
    pool_error = "--reference: Memorization.* a model of other rows only"
    with pytest.raises(SourceError, match=pool_error):
        run(folder, drawn=True, reference=[str(tmp_path / "held_out")])


def test_several_references_and_the_rows_of_each(folder: Path, tmp_path: Path) -> None:
    lines = [(folder / f"{n}.jsonl").read_text().splitlines() for n in ("members", "others")]
    draw, words = random.Random(0), lines[0] + lines[1]
    models, files = [], []
    for number in range(3):
        rows = draw.sample(words, len(words) // 2)
        files.append(str(tmp_path / f"rows{number}.jsonl"))
        Path(files[-1]).write_text("".join(f"{row}\n" for row in rows))
        models.append(str(tmp_path / f"model{number}"))
        save_trained(Path(models[-1]), [json.loads(row)["text"] for row in rows], 2e-3, 2)
    output = tmp_path / "out.json"
    settings = {"drawn": True, "out": output, "reference": models}
    status, text = run(folder, reference_rows=files, **settings)
    assert status == 0
    words_of_all = f"3 of LlamaForCausalLM (folder), trained on {len(words) // 2} rows"
    assert words_of_all in " ".join(text.split())
    content = json.loads(output.read_text())
    assert (content["reference"]["models"], content["reference"]["rows"]) == (3, len(words) // 2)
    assert content["attacks"]["combined_reference"]["auc"] > 0.8
    files[0] = str(folder / "members.jsonl")  # not those that it was trained on
    with pytest.raises(SourceError, match="distinguishes training rows from held-out rows"):
        run(folder, reference_rows=files, **settings)
    with pytest.raises(SourceError, match="a number or a file for each --reference"):
        run(folder, reference_rows=["5"], **settings)


N = 20
"""Texts on each side."""


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """Return a learned with a model that learned the texts of one side, and all numbers."""
    learned, draw = tmp_path_factory.mktemp("entities"), random.Random(0)
    heads, tails = (draw.sample(range(n, 10 * n), 2 * N + 1) for n in (100, 1000))
    numbers = [f"{head}-{tail}" for head, tail in zip(heads, tails, strict=True)]
    words = ["river", "stone", "cloud", "paper", "green", "house", "winter", "orange", "silver"]
    texts = [
        f"{' '.join(draw.choices(words, k=9))}: call {number} {' '.join(draw.choices(words, k=3))}"
        for number in numbers[: 2 * N]
    ]
    shared = f"{' '.join(draw.choices(words, k=12))} dial {numbers[-1]}"
    sides = {"members": [*texts[:N], shared], "others": [*texts[N:], f"stone {shared} garden"]}
    for name, side in sides.items():
        lines = "".join(json.dumps({"text": text}) + "\n" for text in side)
        (learned / f"{name}.jsonl").write_text(lines)
    save_trained(learned / "model", sides["members"], 5e-3, 5)
    save_trained(learned / "null", [" ".join(draw.choices(words, k=12)) for _ in range(N)], 1e-5, 1)
    return learned, numbers


def run_on(learned: Path, model: str, *limits: tuple[str, float], **more: Any) -> tuple[int, str]:
    return run_command(
        "memorization",
        model=model,
        base=str(EMBEDDED_MODEL),
        members=str(learned / "members.jsonl"),
        others=str(learned / "others.jsonl"),
        length=64,
        at_most=list(limits),
        out=learned / "out.json",
        summary=learned / "summary.md",
        **{"entities": ["phone", "email"], "drawn": True} | more,
    )


def test_learned_values_breach_a_limit_and_those_left_out_do_not(
    learned: tuple[Path, list[str]],
) -> None:
    path, numbers = learned
    places = "entity/phone/label", "entity/phone/prompt", "entity/email/label"
    limits = [(place, 0.6) for place in places]
    status, printed = run_on(path, str(path / "model"), *limits)
    content = json.loads((path / "out.json").read_text())
    phone = content["entities"]["entity/phone/label"]
    assert (phone["members"], phone["others"]) == (N, N)  # the number on both sides is of neither
    assert phone["auc_low"] > 0.6
    assert phone["p_value"] < 0.01
    assert status == BREACH
    assert "BREACH: entity/phone/label/auc is shown to be at least" in printed
    for unknown in places[1:]:
        assert f"BREACH: {unknown}/auc is unknown" in printed
    assert content["entities"]["entity/email/label"].startswith("0 values were trained on")
    for text in (printed, *(file.read_text() for file in (path / "out.json", path / "summary.md"))):
        assert not any(number in text for number in numbers)
    assert "entity/phone/label" in (path / "summary.md").read_text()
    assert run_on(path, str(path / "model"), ("entity/phone/label", 1.0))[0] == 0


def test_a_model_that_learned_nothing_shows_chance(learned: tuple[Path, list[str]]) -> None:
    path, _ = learned
    status, _ = run_on(path, str(path / "null"), ("entity/phone/label", 0.95))
    phone = json.loads((path / "out.json").read_text())["entities"]["entity/phone/label"]
    assert phone["auc_low"] < 0.5 < phone["auc_high"]
    assert status == 0


def test_a_limit_on_values_needs_their_kinds(learned: tuple[Path, list[str]]) -> None:
    path, _ = learned
    with pytest.raises(SourceError, match="give --entities"):
        run_on(path, str(EMBEDDED_MODEL), ("entity/phone/label", 0.9), entities=())
    with pytest.raises(SourceError, match="none of entity/phone/prompt, "):
        run_on(path, str(EMBEDDED_MODEL), ("entity/phone", 0.9))
    with pytest.raises(ValueError, match="'fone': give"):
        run_on(path, str(EMBEDDED_MODEL), entities=["fone"])


def test_values_in_prompts_of_another_law_are_unknown_in_the_file(
    learned: tuple[Path, list[str]], tmp_path: Path
) -> None:
    draw = random.Random(1)
    for side, words in (("members", "river stone cloud paper"), ("others", "green house cat gold")):
        rows = [
            {
                "prompt": f"{' '.join(draw.choices(words.split(), k=12))} {number}",
                "answer": " ".join(map(str, draw.choices(range(9), k=12))),
            }
            for number in learned[1][(side == "others") * N :][:N]
        ]
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / f"{side}.jsonl").write_text(lines)
    limit = "entity/phone/prompt", 1.0
    null = str(learned[0] / "null")
    status, printed = run_on(tmp_path, null, limit, drawn=False, prompt_column="prompt")
    content = json.loads((tmp_path / "out.json").read_text())
    assert content["prompts"]["known"] is False
    assert content["entities"]["entity/phone/prompt"].startswith("prompts are from different")
    assert status == BREACH
    assert "BREACH: entity/phone/prompt/auc is unknown" in printed
    settings = {"drawn": True, "prompt_column": "prompt"}  # without a limit
    assert run_on(tmp_path, null, **settings)[0] == BREACH
    content = json.loads((tmp_path / "out.json").read_text())
    assert content["entities"]["entity/phone/prompt"].startswith("prompts are not drawn")


# ---- is this the model, and were the rows drawn? ----


def test_the_base_under_another_name_is_no_trained_model(folder: Path, tmp_path: Path) -> None:
    summary = tmp_path / "summary.md"
    status, text = run(folder, str(EMBEDDED_MODEL), drawn=True, at_most=1.0, summary=summary)
    assert status == BREACH
    assert "the weights of --model" in text
    assert "FAILED" in summary.read_text()


def test_a_base_that_knows_the_members_refutes_the_draw(folder: Path, tmp_path: Path) -> None:
    words = [json.loads(n)["text"] for n in (folder / "members.jsonl").read_text().splitlines()]
    save_trained(tmp_path / "twice", words, 4e-3, 4)
    settings = {"members": str(folder / "members.jsonl"), "others": str(folder / "others.jsonl")}
    settings |= {"base": str(tmp_path / "twice"), "model": str(folder / "model")}
    status, text = run_command("memorization", length=32, drawn=True, **settings)
    text = " ".join(text.split())
    assert status == BREACH
    assert "not drawn at random from the same rows" in text
    assert "the base knows one side" in text


def test_adapters_are_no_base(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "a/b"}')
    (tmp_path / "tokenizer.json").write_text((EMBEDDED_MODEL / "tokenizer.json").read_text())
    settings = {"model": str(folder / "model"), "base": str(tmp_path)}
    settings |= {side: str(folder / f"{side}.jsonl") for side in ("members", "others")}
    with pytest.raises(SourceError, match="holds adapters, and no model: their base is 'a/b'"):
        run_command("memorization", **settings)
    (tmp_path / "tokenizer.json").unlink()  # adapters are often saved without one
    with pytest.raises(SourceError, match="holds adapters, and no model: their base is 'a/b'"):
        run_command("memorization", **settings)


def test_a_model_of_another_shape_and_a_run_without_logs_are_named(
    folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(folder / "model", tmp_path / "wide")
    weights = load_file(tmp_path / "wide" / "model.safetensors")
    name = next(name for name in weights if name.endswith("down_proj.weight"))
    weights[name] = torch.cat([weights[name]] * 2)
    save_file(weights, tmp_path / "wide" / "model.safetensors", {"format": "pt"})
    status, text = run(folder, str(tmp_path / "wide"), drawn=True)
    assert status == BREACH
    assert f"{name} has the shape ({len(weights[name])}," in " ".join(text.split())
    with pytest.raises(SourceError, match=r"holds no run\.jsonl"):
        run(folder, drawn=True, run=tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "are the same rows"),
        (b"", "has 0 rows"),
        (b"\x1f\x8b0", "packed by gzip"),
        ("a text".encode("utf-16"), "in UTF-16"),
        ("a text".encode("utf-32"), "in UTF-32"),
        (b"[" * 100_000, "line 1 is not JSON"),
        (b'{"text": ' + b"9" * 5000 + b"}", "line 1 is not JSON"),
    ],
)
def test_files_are_named_as_what_they_are(
    folder: Path, tmp_path: Path, content: bytes | None, words: str
) -> None:
    members = (folder / "members.jsonl").read_bytes()
    (tmp_path / "members.jsonl").write_bytes(members)
    (tmp_path / "others.jsonl").write_bytes(members if content is None else content)
    (tmp_path / "model").symlink_to(folder / "model")
    with pytest.raises(SourceError, match=words):
        run(tmp_path, drawn=True)


def test_rows_without_text_are_counted_and_the_verdict_precedes_the_files(
    folder: Path, tmp_path: Path
) -> None:
    take_first(TEXTS, folder, tmp_path)
    with (tmp_path / "others.jsonl").open("a") as file:
        file.write('{"text": ""}\n' * 3)
    (tmp_path / "model").symlink_to(folder / "model")
    (tmp_path / "file").write_text("no folder")
    summary = tmp_path / "summary.md"
    settings = {"drawn": True, "at_most": 0.6, "out": tmp_path / "file" / "out.json"}
    settings |= {"summary": summary}
    status, text = run(tmp_path, **settings)
    assert status == BREACH
    text = " ".join(text.split())
    assert re.search(r"3 rows of '\S+others.jsonl' have no text", text)
    assert text.index("BREACH: combined/auc") < text.index("A file is missing")
    assert "FAILED" in summary.read_text()  # other files are written all the same
    assert run(tmp_path, drawn=True, out=settings["out"])[0] == 1


def test_a_model_that_is_too_small_for_the_rows_is_refused(folder: Path, tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    for name, sizes, words in (
        ("vocabulary", {"vocab_size": 50}, "--model knows 50 tokens"),
        ("context", {"vocab_size": 10_000, "n_positions": 4}, "context of 4"),
    ):
        config = GPT2Config(**sizes, n_embd=8, n_layer=1, n_head=1)
        GPT2LMHeadModel(config).save_pretrained(tmp_path / name)
        with pytest.raises(SourceError, match=words):
            run(folder, str(tmp_path / name), drawn=True)
