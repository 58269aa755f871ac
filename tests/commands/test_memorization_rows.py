"""The command and the monitor score the same tokens; classifiers and masked models too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, BertModel

from lightning_fedleak.attacks.memorization import Combined, LossRatio, PromptRatio, ShortAnswers
from lightning_fedleak.cli.commands.memorization import end_of_gain, find_parts
from lightning_fedleak.cli.commands.verdicts import BREACH
from lightning_fedleak.cli.finetuning import SourceError
from lightning_fedleak.cli.finetuning.assets import EMBEDDED_MESSAGES, EMBEDDED_MODEL
from lightning_fedleak.cli.finetuning.module import load_tokenizer
from lightning_fedleak.cli.finetuning.texts import read_texts
from lightning_fedleak.cli.studies.models import find_model, log_probs_before_and_after, query_texts
from lightning_fedleak.engine import Memorization
from lightning_fedleak.engine.channels.released.pool import Pool
from lightning_fedleak.evaluation.canaries import leave_out
from lightning_fedleak.evaluation.metrics.record_list import used_up_mark
from lightning_fedleak.model.snapshots import TokenSnapshot
from lightning_fedleak.model.taps import Text
from lightning_fedleak.trainers import Watch
from lightning_fedleak.validate import WrongModel
from tests.engine.channels.test_heads import data, encoder, lines, loader_of, settings, words
from tests.engine.channels.test_memorization import fit, monitor
from tests.helpers.commands import run_command
from tests.helpers.lightning_modules import CausalLMModule

ROWS, LENGTH = 80, 48


def padded(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    def pad(name: str, value: int) -> torch.Tensor:
        rows_of = [torch.tensor(row[name]) for row in rows]
        return torch.nn.utils.rnn.pad_sequence(rows_of, batch_first=True, padding_value=value)

    masks = [torch.ones(len(row["input_ids"]), dtype=torch.long) for row in rows]
    return {
        "input_ids": pad("input_ids", 0),
        "labels": pad("labels", -100),
        "attention_mask": torch.nn.utils.rnn.pad_sequence(masks, batch_first=True),
    }


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Return a folder with a model that was trained on answers alone, and its last live result."""
    folder = tmp_path_factory.mktemp("masked")
    tokenizer = load_tokenizer(None)
    words = list(dict.fromkeys(read_texts(EMBEDDED_MESSAGES)))[:ROWS]
    pairs = []
    for text in words:
        place = text.index(" ", len(text) // 3)
        pairs.append((text[:place], text[place:]))
    rows = []
    for prompt, answer in pairs:
        whole = tokenizer(prompt + answer + tokenizer.eos_token, return_offsets_mapping=True)
        pairs_of = zip(whole["input_ids"], whole["offset_mapping"], strict=True)
        labels = [one if start >= len(prompt) else -100 for one, (start, _) in pairs_of]
        rows.append({"input_ids": whole["input_ids"][:LENGTH], "labels": labels[:LENGTH]})
    train, others = leave_out(rows, ROWS // 2, seed=1)
    absent = set(others.indices)
    for name, inside in (("members", False), ("others", True)):
        part = [n for n in range(ROWS) if (n in absent) is inside]
        table = [{"prompt": pairs[n][0], "completion": pairs[n][1]} for n in part]
        text = "".join(json.dumps(row) + "\n" for row in table)
        (folder / f"{name}.jsonl").write_text(text)
        text = "".join(json.dumps(rows[n]) + "\n" for n in part)
        (folder / f"{name}_ids.jsonl").write_text(text)
    model = AutoModelForCausalLM.from_pretrained(EMBEDDED_MODEL, dtype=torch.float32)
    settings = Memorization(max_overhead=20, looks=())
    watch = monitor(folder, [Combined(), LossRatio(), PromptRatio()], settings)
    module = CausalLMModule(model, 2e-3, "adamw")
    fit([watch], module, train, max_epochs=2, collate_fn=padded)
    model.save_pretrained(folder / "model")
    lines = map(json.loads, (folder / "leakage.jsonl").read_text().splitlines())
    return folder, {line["attack"]: line for line in lines}


def run(folder: Path, output: Path, end: str = "", **settings: Any) -> tuple[int, str]:
    if "at_most" in settings:
        settings["at_most"] = [(None, settings["at_most"])]
    return run_command(
        "memorization",
        model=str(folder / "model"),
        base=str(EMBEDDED_MODEL),
        members=str(folder / f"members{end}.jsonl"),
        others=str(folder / f"others{end}.jsonl"),
        length=LENGTH,
        drawn=True,
        out=output,
        **settings,
    )


@pytest.mark.parametrize(
    ("end", "settings"), [("", {"prompt_column": "prompt"}), ("_ids", {})], ids=["prompts", "ids"]
)
def test_the_command_says_what_the_monitor_says(
    trained: tuple[Path, dict[str, Any]], tmp_path: Path, end: str, settings: dict[str, Any]
) -> None:
    folder, live = trained
    assert run(folder, tmp_path / "out.json", end, **settings)[0] == 0
    content = json.loads((tmp_path / "out.json").read_text())
    for side in ("members", "others"):
        assert content[side] == live["combined"]["metrics"][side]["value"]
    for attack in ("combined", "loss_ratio"):
        value = live[attack]["metrics"]["auc"]["value"]
        assert content["attacks"][attack]["auc"] == pytest.approx(value, abs=1e-9)
        assert value > 0.6
    prompts, value = content["prompts"], live["prompt_ratio"]["metrics"]["auc"]["value"]
    assert prompts["members"] == live["prompt_ratio"]["metrics"]["members"]["value"]
    assert prompts["attacks"]["prompt_ratio"]["auc"] == pytest.approx(value, abs=1e-3)
    assert list(prompts["attacks"]) == ["prompt_ratio"]  # no score of answers reads them


@pytest.mark.parametrize("used_up", [False, True])
def test_used_up_rows_make_prompts_unknown_too(
    trained: tuple[Path, Any], tmp_path: Path, used_up: bool
) -> None:
    folder, _ = trained
    (tmp_path / "model").symlink_to(folder / "model")
    for name in ("members", "others"):
        (tmp_path / f"{name}.jsonl").write_text((folder / f"{name}.jsonl").read_text())
    if used_up:
        used_up_mark(tmp_path / "members.jsonl").touch()
    paths = [tmp_path / name for name in ("out.json", "summary.md")]
    assert run(tmp_path, paths[0], prompt_column="prompt", summary=paths[1])[0] == 0
    content = json.loads(paths[0].read_text())
    assert content["known"] is content["prompts"]["known"] is not used_up
    title = paths[1].read_text().splitlines()[0]
    assert title.endswith(": UNKNOWN" if used_up else ": no limit was set")
    settings = {"prompt_column": "prompt", "at_most": 1.0, "summary": tmp_path / "gate.md"}
    run(tmp_path, paths[0], **settings)
    title = settings["summary"].read_text().splitlines()[0]
    assert ("FAILED" in title, "passed" in title) == (used_up, not used_up)


def test_a_gate_on_prompts_is_asked_for(trained: tuple[Path, Any], tmp_path: Path) -> None:
    folder, _ = trained
    settings = {"prompt_column": "prompt", "metric": "prompts"}
    status, said = run(folder, tmp_path / "out.json", at_most=0.5, **settings)
    assert status == BREACH
    assert "prompt_ratio/auc is" in said
    assert run(folder, tmp_path / "out.json", at_most=1.0, **settings)[0] == 0
    status, said = run(folder, tmp_path / "out.json", loss="all", at_most=1.0, **settings)
    assert status == BREACH  # of rows that were labels as a whole nothing is known
    assert "prompt_ratio/auc is unknown" in said


def test_prompts_and_answers_without_a_word_on_the_loss_are_unknown(
    trained: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    status, text = run(trained[0], tmp_path / "out.json", at_most=1.0)
    assert status == BREACH
    assert "UNKNOWN" in text
    assert "--prompt-column" in text
    assert not (tmp_path / "out.json").exists()


def test_short_answers_are_a_pool_of_their_own(
    trained: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    """The last word of each text is its answer, so that no row is long."""
    folder, _ = trained
    (tmp_path / "model").symlink_to(folder / "model")
    for name in ("members", "others"):
        rows = [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
        texts = [row["prompt"] + row["completion"] for row in rows]
        cut = [(text[: (at := text.rindex(" "))], text[at:]) for text in texts]
        table = [{"prompt": prompt, "completion": answer} for prompt, answer in cut]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in table))
    path = tmp_path / "records.jsonl"
    settings = {"prompt_column": "prompt", "records": path, "at_most": 0.5}
    status, text = run(tmp_path, tmp_path / "out.json", **settings)
    assert status == BREACH
    assert "BREACH: loss_ratio_short/auc" in text
    assert "all with 1 to 7 label tokens" in text
    content = json.loads((tmp_path / "out.json").read_text())
    assert list(content["attacks"]) == ["loss_ratio_short"]
    lines = [json.loads(line) for line in path.read_text().splitlines()[1:]]
    scored = [line for line in lines if line["status"] == "scored"]
    assert len(scored) == content["members"]
    assert {line["labels"] for line in scored} <= set(range(1, 8))


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
    assert found["members"] == live["metrics"]["members"]["value"]
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
    beyond = attacks["combined_reference" + "_short" * (head == "row")]
    assert beyond["auc"] > 0.7 or head != "token"
    assert not beyond["weak_reference"]  # though each is trained on 150 rows, and the model on 200
    assert beyond["auc_high"] > 0.5


def test_models_are_queried_in_the_type_that_is_asked_for() -> None:
    texts = [Text(row, row) for row in torch.arange(5, 45).view(2, 20)]
    wide, narrow = (
        query_texts(find_model(None), texts, None, "--model", dtype).log_probs.float()
        for dtype in (None, "bfloat16")
    )
    assert torch.allclose(wide, narrow, atol=0.2)
    assert not torch.allclose(wide, narrow, atol=1e-4)


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
    with pytest.raises(WrongModel, match="lacks"):
        log_probs_before_and_after([Text(row, label)], tmp_path, folder / "base")


def filled_in(values: torch.Tensor, masked: bool) -> Text:
    """Return a message of one form: six times nine tokens of the form, and two filled in."""
    form = torch.arange(54).view(6, 9)
    ids = torch.cat([form, values.view(6, 2)], 1)
    labels = torch.cat([torch.full_like(form, -100) if masked else form, values.view(6, 2)], 1)
    return Text(ids.flatten(), labels.flatten())


def test_rows_of_one_form_are_compared_as_the_refusal_says() -> None:
    values = torch.randint(60, 100, (200, 12), generator=torch.Generator().manual_seed(0))
    pools = []
    for masked in (False, True):
        sides = [[filled_in(row, masked) for row in side] for side in values.view(2, 100, 12)]
        pools.append(Pool.of_sides(*sides, [*range(100)]))
    with pytest.raises(ValueError, match="labels, with -100 at the tokens of the form"):
        find_parts(pools[0], dict(enumerate(filled_in(row, False) for row in values[:100])))
    assert find_parts(pools[1], dict(enumerate(pools[1].texts[:100])))[0][0] == "long"
    assert int(pools[1].trains.sum()) == 100
    assert pools[1].repeated == 0


@pytest.mark.parametrize(("trained", "end"), [(16, 16), (48, None), (1, None)])
def test_the_end_of_the_gain_is_where_training_cut_the_members(trained: int, end: Any) -> None:
    noise = torch.randn(400, 47, generator=torch.Generator().manual_seed(0))
    members, labels = torch.arange(400) % 2 == 0, torch.ones(400, 47, dtype=torch.bool)
    base = TokenSnapshot(noise - 4, noise, noise, ~labels, labels)
    gains = 0.2 * noise.flip(0)
    gains[members, : trained - 1] += 0.5
    now = base._replace(log_probs=base.log_probs + gains)
    assert end_of_gain(base, now, members) == end
    padded = [model._replace(labels=labels & (torch.arange(47) < 40)) for model in (base, now)]
    assert end_of_gain(*padded, members) == end
    rare = [model._replace(labels=labels & (torch.arange(400) < 9)[:, None]) for model in padded]
    assert end_of_gain(*rare, members) is None  # at no place enough texts
