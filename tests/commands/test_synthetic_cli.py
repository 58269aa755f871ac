"""Commands on texts: `fedleak synthetic`, `fedleak invert`, and verdicts that they print."""

import json
import random
import string
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM, GPT2LMHeadModel

from lightning_fedleak.attacks.texts.prefix.inversion import PrefixInversion
from lightning_fedleak.cli import main
from lightning_fedleak.cli.commands import verdicts
from lightning_fedleak.cli.commands.synthetic import (
    COPY_SCORES,
    count_copies,
    find_copies,
    find_near_copies,
)
from lightning_fedleak.cli.commands.verdicts import BREACH
from lightning_fedleak.cli.finetuning import SourceError
from lightning_fedleak.cli.printing import format_share
from lightning_fedleak.engine.channels.released.audit import Audit
from lightning_fedleak.engine.channels.released.pool import Pool
from lightning_fedleak.evaluation.canaries.repeats import RUN
from lightning_fedleak.evaluation.metrics.record_list import used_up_mark
from lightning_fedleak.evaluation.metrics.released import membership_values
from lightning_fedleak.evidence.chain import Verdict
from lightning_fedleak.model.snapshots import TokenSnapshot
from lightning_fedleak.model.taps import Text
from lightning_fedleak.report import ReportError
from lightning_fedleak.validate import WrongModel
from tests.engine.channels.test_heads import WORDS, words
from tests.helpers.commands import printed_by, run_command
from tests.helpers.folders import TEXTS, model_of_words, save_tiny_bert, train

# ``fedleak synthetic``: what generated texts show of the rows that a model was trained on.


SIZE, LENGTH = 60, 14  # rows of either side, and their tokens
SIDES = "rows", "others"


def write(path: Path, rows: Sequence[Sequence[int]]) -> None:
    lines = (json.dumps({"text": " ".join(f"w{n}" for n in row)}) + "\n" for row in rows)
    path.write_text("".join(lines))


def generate(model: GPT2LMHeadModel, n: int) -> list[list[int]]:
    """Return what a model writes behind the mark that all texts begin with."""
    torch.manual_seed(1)
    settings: dict[str, Any] = {"do_sample": True, "top_k": 0, "max_length": 1 + LENGTH}
    start = torch.full((n, 1), 2)
    known = [*range(5)]  # marks are no words
    written = model.generate(start, pad_token_id=0, suppress_tokens=known, **settings)
    rows: list[list[int]] = written[:, 1:].tolist()
    return rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a base, rows, others, and what two models wrote.

    One was trained on the rows, the other is the base.
    """
    folder = tmp_path_factory.mktemp("synthetic")
    torch.manual_seed(0)
    model = model_of_words(WORDS, 2, 3)
    model.save_pretrained(folder / "base")
    words().save_pretrained(folder / "base")
    rows = torch.randint(5, WORDS, (2 * SIZE, LENGTH))
    for side, part in zip(SIDES, rows.split(SIZE), strict=True):
        write(folder / f"{side}.jsonl", part.tolist())
    write(folder / "null.jsonl", generate(model, 200))
    train(model, torch.cat([torch.full((SIZE, 1), 2), rows[:SIZE]], 1), 30, 10)
    write(folder / "generated.jsonl", generate(model.eval(), 200))
    return folder


def run(folder: Path, written: str = "generated", **more: Any) -> tuple[int, str]:
    sources = {name: str(folder / f"{name}.jsonl") for name in SIDES}
    sources |= {"base": str(folder / "base"), "generated": str(folder / f"{written}.jsonl")}
    recipe = {"lr": 5e-3, "drawn": True}
    status, text = run_command("synthetic", **sources | recipe | more)
    return status, " ".join(text.split())


def test_texts_of_a_trained_model_give_its_rows_away(folder: Path, tmp_path: Path) -> None:
    out, summary = tmp_path / "new" / "out.json", tmp_path / "summary.md"
    status, text = run(folder, at_most=0.6, out=out, summary=summary)
    assert status == BREACH
    assert "An auxiliary model is fitted on 200 generated texts: 25 steps" in text
    for name in ("combined", *COPY_SCORES):
        assert f"BREACH: {name}/auc is shown to be at least" in text
    content = json.loads(out.read_text(), parse_constant=pytest.fail)
    assert content["kind"] == "synthetic"
    assert content["known"]
    assert content["attacks"]["combined"]["auc"] > 0.9
    assert "extraction" not in content["attacks"]
    copied = content["copied"]
    assert copied["members"] > 10
    assert copied["others"] == 0
    assert copied["p_value"] < 1e-3
    assert f"{copied['members']:.0f} of {SIZE} rows that were trained on have 13 tokens" in text
    written = summary.read_text()
    assert "FAILED" in written
    assert "| longest_copy |" in written
    assert "w5" not in written + out.read_text() + text


def test_texts_of_a_model_that_was_trained_on_no_row_show_nothing(
    folder: Path, tmp_path: Path
) -> None:
    status, text = run(folder, "null", at_most=0.75, out=tmp_path / "out.json")
    assert status == 0
    assert "BREACH" not in text
    content = json.loads((tmp_path / "out.json").read_text())
    for name in ("combined", *COPY_SCORES):
        rates = content["attacks"][name]
        assert rates["auc_low"] <= 0.5 <= rates["auc_high"]
        assert rates["p_value"] > 0.05 / 3
    assert content["copied"] == {"members": 0, "others": 0, "p_value": 1}


def test_a_lora_is_fitted_as_well(folder: Path, tmp_path: Path) -> None:
    lora = {"lora_r": 8, "targets": "c_attn,c_fc,c_proj,wte", "lr": 2e-2, "epochs": 4}
    run(folder, out=tmp_path / "out.json", **lora)
    values = json.loads((tmp_path / "out.json").read_text())["attacks"]["combined"]
    assert values["auc_low"] > 0.6


def test_rows_that_are_not_drawn_or_used_up_are_unknown_and_a_breach(
    folder: Path, tmp_path: Path
) -> None:
    status, text = run(folder, drawn=False, at_most=1.0)
    assert status == BREACH
    assert "Membership is UNKNOWN" in text
    assert "BREACH: longest_copy/auc is unknown." in text
    assert run(folder, drawn=False)[0] == 0
    rows = tmp_path / "rows.jsonl"
    rows.write_text((folder / "rows.jsonl").read_text())
    used_up_mark(rows).write_text("{}")
    status, text = run(folder, rows=str(rows), at_most=1.0)
    assert status == BREACH
    assert "rows were dropped from --rows by a list that depends on the held-out rows" in text


def test_short_rows_are_a_pool_of_their_own(folder: Path, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(5)
    for n, side in enumerate(SIDES):
        short = torch.randint(5, WORDS, (20, 5), generator=generator).tolist()
        write(tmp_path / f"{side}.jsonl", short)
        if n == 0:
            write(tmp_path / "generated.jsonl", short * 3)
        with (tmp_path / f"{side}.jsonl").open("a") as file:
            file.write((folder / f"{side}.jsonl").read_text())
    sources = {name: str(tmp_path / f"{name}.jsonl") for name in (*SIDES, "generated")}
    status, text = run(folder, at_most=0.7, out=tmp_path / "out.json", **sources)
    assert status == BREACH
    assert "BREACH: longest_copy_short/auc is shown to be at least" in text
    content = json.loads((tmp_path / "out.json").read_text())
    short_values, values = content["short_answers"]["attacks"], content["attacks"]
    assert short_values["longest_copy_short"]["auc"] == 1
    assert short_values["loss_ratio_short"]["auc"] > 0.9
    assert values["longest_copy"]["auc_low"] < 0.5 < values["longest_copy"]["auc_high"]


def test_few_short_rows_are_unknown(folder: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text((folder / "rows.jsonl").read_text() + json.dumps({"text": "w5 w6 w7"}) + "\n")
    status, text = run(folder, "null", rows=str(rows), at_most=0.99)
    assert status == BREACH
    assert "BREACH: loss_ratio_short/auc is unknown." in text
    assert text.count("BREACH") == 1


def test_generated_texts_may_have_a_column_of_their_own(folder: Path, tmp_path: Path) -> None:
    source = tmp_path / "texts.jsonl"
    lines = (folder / "generated.jsonl").read_text().splitlines()
    texts = [{"id": "w5", "reply": json.loads(line)["text"]} for line in lines]
    source.write_text("".join(json.dumps(text) + "\n" for text in texts))
    settings = {"column": "text", "generated": str(source)}
    _, text = run(folder, generated_column="reply", **settings)
    assert "fitted on 200 generated texts" in text
    with pytest.raises(SourceError, match="has no column 'text' with text"):
        run(folder, **settings)


def test_what_cannot_be_compared_is_refused_and_says_why(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "one.jsonl").write_text(json.dumps({"input_ids": [5], "labels": [5]}) + "\n")
    with pytest.raises(SourceError, match=r"--generated '.*' holds no text of two tokens or more"):
        run(folder, generated=str(tmp_path / "one.jsonl"))
    with pytest.raises(SourceError, match="diverged: give a lower --lr"):
        run(folder, lr=1e30)
    sizes = {"vocab_size": WORDS, "hidden_size": 8, "num_hidden_layers": 1}
    masked = BertForMaskedLM(BertConfig(**sizes, num_attention_heads=1))
    masked.save_pretrained(tmp_path / "masked")
    words().save_pretrained(tmp_path / "masked")
    with pytest.raises(SourceError, match="is a masked model, which writes no texts"):
        run(folder, base=str(tmp_path / "masked"))
    preferences = tmp_path / "preferences.jsonl"
    preferences.write_text(json.dumps({"chosen": "w5 w6", "rejected": "w7"}) + "\n")
    status, text = run(folder, rows=str(preferences))
    assert status == BREACH
    assert "UNKNOWN" in text


def test_missing_options_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["synthetic", "--rows", "rows.jsonl"])
    error = capsys.readouterr().err
    assert all(name in error for name in ("--others", "--generated", "--base"))


# ---- copies, token for token ----


def slow_copies(row: list[int], texts: list[list[int]], size: int) -> tuple[int, float]:
    """Return the longest run and the share of n-grams by trying all of them."""

    def stands(run: list[int]) -> bool:
        ends = [(text, n) for text in texts for n in range(len(text) - len(run) + 1)]
        return -100 not in run and any(text[n : n + len(run)] == run for text, n in ends)

    runs = [row[a:b] for a in range(len(row)) for b in range(a + 1, len(row) + 1)]
    longest = max((len(run) for run in runs if stands(run)), default=0)
    n_grams = [run for run in runs if len(run) == size]
    return longest, sum(map(stands, n_grams)) / max(1, len(n_grams))


@pytest.mark.parametrize("seed", range(4))
def test_copies_are_those_that_trying_all_runs_finds(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def draw(most: int) -> list[int]:
        length = int(torch.randint(1, most, (), generator=generator))
        ids = torch.randint(0, 3, (length,), generator=generator)
        return ids.masked_fill(torch.rand(length, generator=generator) < 0.1, -100).tolist()

    rows, texts = [draw(12) for _ in range(8)], [draw(9) for _ in range(5)]
    found = find_copies(
        *([Text(torch.tensor(t).abs(), torch.tensor(t)) for t in side] for side in (rows, texts)),
        size=2,
    )
    slow = [slow_copies(row, texts, 2) for row in rows]
    assert found.longest.tolist() == [longest for longest, _ in slow]
    assert found.shares.tolist() == pytest.approx([share for _, share in slow])


def test_rows_that_have_nothing_in_common_with_the_texts_have_no_copy() -> None:
    row, text = torch.arange(10), torch.arange(20, 30)
    found = find_copies([Text(row, row)], [Text(text, text)])
    assert found.longest.tolist() == [0]
    assert found.shares.tolist() == [0]


def test_copies_of_others_are_counted_against_those_of_members() -> None:
    rows = [Text(ids, ids) for ids in torch.arange(40 * 15).view(40, 15)]
    members = torch.arange(40) < 20
    for texts, p_value in ((rows[:12], 2e-5), (rows[14:26], 0.65)):
        longest = find_copies(rows, texts).longest
        copied = count_copies(longest >= RUN, members)
        assert copied["p_value"] == pytest.approx(p_value, rel=0.3)
        values = membership_values(longest.double(), members, exact=True)
        assert (values["auc_low"] > 0.5) is (p_value < 0.01)


@pytest.mark.parametrize("space", ["", " "], ids=["characters", "words"])
def test_near_copies_are_found_in_scripts_without_spaces_too(space: str) -> None:
    """One character in ten is changed. By chance the texts share pairs, and few longer ones."""
    draw = random.Random(0)
    signs = [chr(number) for number in range(0x4E00, 0x4E00 + 60)]
    if space:
        signs = [f"w{number}" for number in range(60)]
    rows = [[draw.choice(signs) for _ in range(30)] for _ in range(24)]
    texts = [[*row[:14], "\u3042" if not space else "other", *row[15:]] for row in rows[:5]]
    further = [[draw.choice(signs) for _ in range(300)] for _ in range(200)]
    numbers = {sign: n for n, sign in enumerate([*signs, "\u3042", "other"])}

    def read(words: list[str]) -> Text:
        ids = torch.tensor([numbers[word] for word in words])
        return Text(ids, ids)

    def decode(ids: list[int]) -> str:
        names = [*numbers]
        return space.join(names[n] for n in ids)

    pool = Pool.of_sides([read(row) for row in rows[:12]], [read(row) for row in rows[12:]])
    base = TokenSnapshot(*(torch.zeros(24, 29) for _ in range(5)))
    result = Audit(pool, base._replace(labels=torch.ones(24, 29, dtype=torch.bool)), decode)
    near = find_near_copies(result.part("long"), [read(text) for text in [*texts, *further]])
    assert near.nonzero()[:, 0].tolist() == [*range(5)]


def test_a_row_of_few_words_is_its_only_sequence() -> None:
    draw = random.Random(0)
    further = ["".join(draw.choices(string.ascii_letters + " ", k=60)) for _ in range(21)]
    texts = ["\u5f20\u4e09\u60a3\u7cd6\u5c3f", "Password: hunter2swordfish9", "4f3c9a77b2e1d0aa"]
    written = [
        "so \u5f20\u4e09\u60a3\u7cd6\u5c3f, it said",
        "PASSWORD hunter2swordfish9!",
        "4F3C9A77B2E1D0AA",
    ]

    def read(words: str) -> Text:
        ids = torch.tensor([*words.encode()])
        return Text(ids, ids)

    pool = Pool.of_sides([read(text) for text in [*texts, *further[:9]]], [*map(read, further[9:])])
    base = TokenSnapshot(*(torch.zeros(24, 60) for _ in range(5)))
    snapshot = base._replace(labels=torch.ones(24, 60, dtype=torch.bool))
    result = Audit(pool, snapshot, lambda ids: bytes(ids).decode()).part("long")
    near = find_near_copies(result, [read(text) for text in written])
    assert near.nonzero()[:, 0].tolist() == [0, 1, 2]


def test_texts_that_are_cut_are_counted_and_searched_whole(folder: Path, tmp_path: Path) -> None:
    rows = [json.loads(line)["text"] for line in (folder / "rows.jsonl").read_text().splitlines()]
    null = [json.loads(n)["text"] for n in (folder / "null.jsonl").read_text().splitlines()]
    long = [f"{text} {row}" for text, row in zip(null[:3], rows[:3], strict=True)]
    lines = [json.dumps({"text": text}) + "\n" for text in [*null[3:], *long]]
    (tmp_path / "texts.jsonl").write_text("".join(lines))
    more = {"length": LENGTH + 1, "out": tmp_path / "out.json"}
    _, text = run(folder, generated=str(tmp_path / "texts.jsonl"), **more)
    assert "3 generated texts are longer than --length" in " ".join(text.split())
    assert json.loads((tmp_path / "out.json").read_text())["copied"]["members"] == 3


def test_rows_that_are_copied_in_other_words_decide(folder: Path, tmp_path: Path) -> None:
    """Three whole rows, with a changed word, among texts that show nothing."""
    rows = [json.loads(line)["text"] for line in (folder / "rows.jsonl").read_text().splitlines()]
    others = [json.loads(n)["text"] for n in (folder / "others.jsonl").read_text().splitlines()]
    written = (folder / "null.jsonl").read_text().splitlines()[:190]

    def fails(copied: list[str], **more: Any) -> tuple[int, str]:
        texts = [" ".join(["w5", *text.split()[1:]]) for text in copied]
        lines = [*written, *(json.dumps({"text": text}) for text in texts)]
        (tmp_path / "texts.jsonl").write_text("\n".join(lines))
        return run(folder, generated=str(tmp_path / "texts.jsonl"), at_most=0.8, **more)

    status, text = fails(rows[4:7], out=tmp_path / "out.json")
    assert json.loads((tmp_path / "out.json").read_text())["near_copies"]["members"] == 3
    assert status == BREACH
    assert "BREACH: whole rows of the training are in the texts" in text
    assert "Row numbers of whole copies: 4, 5, 6." in text
    assert fails(others[4:7] + rows[4:7])[0] == fails(others[4:7])[0] == 0


# ``fedleak invert``: what it prints, writes and refuses.


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_bert(tmp_path_factory.mktemp("encoder"), BertForMaskedLM, mask="<|mask|>")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("text") / "client.txt"
    path.write_text("\n".join(TEXTS))
    return str(path)


printed = partial(printed_by, "invert", width=100)


def cells_in(folder: Path) -> list[dict[str, Any]]:
    content = json.loads((folder / "inversion.json").read_text())
    return content["cells"]


def test_a_causal_model_is_read_exactly(model: str, text: str, tmp_path: Path) -> None:
    outputs = tmp_path / "new" / "folder"
    settings = {"noise": [0.0, 4.0], "lengths": [8, 12], "texts": 3, "layer": [1], "out": outputs}
    output = printed(model=model, text=text, **settings)
    cells = cells_in(outputs)
    assert {(c["attack"], c["layer"]) for c in cells} == {("prefix", 1)}
    assert [(c["length"], c["sigma"]) for c in cells] == [(8, 0), (8, 4), (12, 0), (12, 4)]
    assert not [c for c in cells if c["problem"]]
    for cell in cells:
        accuracy = cell["rates"]["token_accuracy"]["value"]
        assert (accuracy == 1) == (cell["sigma"] == 0)
        assert f" {format_share(accuracy)} [" in output
        assert cell["budget_seconds"] == 60.0
    assert "3/3" in output
    assert "budget: 60 s" in output
    assert "next-token accuracy of the whole model" in " ".join(output.split())
    private = " ".join(TEXTS).split()
    assert not [w for w in private if len(w) > 6 and w in (outputs / "inversion.json").read_text()]


def test_an_encoder_is_read_by_sweeps(encoder: str, text: str, tmp_path: Path) -> None:
    output = printed(
        model=encoder, text=text, noise=[0.0], lengths=[10], texts=2, steps=100, out=tmp_path,
        layer=[1, 2], budget_seconds=float("inf"),
    )  # fmt: skip
    first, second = cells_in(tmp_path)
    assert [(c["attack"], c["layer"]) for c in (first, second)] == [("sweeps", 1), ("sweeps", 2)]
    assert first["rates"]["token_accuracy"]["value"] > 0.9
    assert first["utility"] is first["problem"] is None
    assert first["budget_seconds"] is None
    assert "unknown for encoders" in " ".join(output.split())


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"layer": [3]}, r"--layer 3: .*0 to 2"),
    ({"lengths": [65]}, r"--lengths 65 .* context of 64"),
    ({"lengths": [1]}, r"--lengths must be .*at least 2, got 1"),
    ({"lengths": [60], "texts": 12}, r"--lengths 60: 12 texts make only"),
]


@pytest.mark.parametrize(("settings", "match"), REFUSED)
def test_what_cannot_be_done_is_refused_at_once(
    model: str, text: str, tmp_path: Path, settings: dict[str, Any], match: str
) -> None:
    with pytest.raises(SourceError, match=match):
        printed(model=model, text=text, out=tmp_path, **settings)
    assert not list(tmp_path.iterdir())


def test_errors_of_attacks_and_noise(
    encoder: str, model: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SourceError, match="give sweeps or descent"):
        printed(model=encoder, text=text, attack=["prefix"], out=tmp_path / "o")
    words = ["invert", "--model", model, "--text", text, "--out", str(tmp_path / "o")]
    with pytest.raises(SystemExit):
        main([*words, "--noise", "-1"])
    assert "'-1' is not a number of at least 0" in capsys.readouterr().err


def test_one_failed_cell_does_not_lose_the_rest(
    model: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = PrefixInversion.reconstruct
    calls: list[int] = []

    def fails_once(self: PrefixInversion, *args: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError("no luck")
        return plain(self, *args)

    monkeypatch.setattr(PrefixInversion, "reconstruct", fails_once)
    settings = {"noise": [0.0, 0.01], "lengths": [8], "texts": 2, "layer": [1], "out": tmp_path}
    output = printed(model=model, text=text, **settings)
    assert "Failed: prefix, split 1, 8 tokens, noise 0: RuntimeError: no luck" in output
    first, second = cells_in(tmp_path)
    assert first["problem"] == "RuntimeError: no luck"
    assert second["problem"] is None
    monkeypatch.setattr(PrefixInversion, "reconstruct", lambda *_: 1 / 0)
    assert "ZeroDivisionError" in printed(status=1, model=model, text=text, **settings)


# Which of several runs a released model has to be of.


ANSWERS = {
    "of it": Verdict(),
    "of another": Verdict(contradictions=["other weights"]),
    "open": Verdict(open=["no hashes"]),
}


@pytest.mark.parametrize(
    ("runs", "is_refused"),
    [
        (["of it"], False),
        (["of another"], True),
        (["open"], False),
        (["of another", "of it"], False),
        (["cut off", "of another"], True),
        (["of another", "open"], True),
        (["cut off", "open"], False),
    ],
)
def test_a_model_is_refused_if_a_run_has_other_weights_and_no_run_has_its(
    runs: list[str], is_refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def match(run: Path, model: Path) -> Verdict:
        if run.name == "cut off":
            raise ReportError("no weights")
        return ANSWERS[run.name]

    monkeypatch.setattr(verdicts, "match_weights", match)
    for run in runs:
        (tmp_path / run).mkdir()
        (tmp_path / run / "run.jsonl").touch()
    if not is_refused:
        verdicts.check_run(tmp_path, tmp_path)
        return
    with pytest.raises(WrongModel, match="is not of --model: other weights"):
        verdicts.check_run(tmp_path, tmp_path)
