"""Edits of a run's files are found, and honest runs are not accused."""

import hashlib
import json
import multiprocessing
import random
import re
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.utils.data import DataLoader, TensorDataset

from lightning_fedleak import BagOfWords
from lightning_fedleak.engine.record import ROW_KEY
from lightning_fedleak.evidence import CONTRADICTED, HOLDS, OPEN, verify_run
from lightning_fedleak.evidence.chain import Verdict, _ChainedFile, check_plans, read_chain
from lightning_fedleak.private_files import hash_weights, plain_name
from lightning_fedleak.report import ReportError, write, write_live
from lightning_fedleak.report.records import (
    RECORD,
    RESULTS,
    append_line,
    closing_of,
    fields,
    hash_line,
)
from lightning_fedleak.trainers import Threshold, Watch
from tests.helpers import loops
from tests.helpers.models import tiny_gpt2
from tests.report.lines import begin, look, result

GATE: dict[str, Any] = {
    "name": "g", "metric": "leakage/flatchat/f1", "at_most": 0.5, "action": "warn",
}  # fmt: skip


class Written:
    """A run whose lines are written as a watch writes them, of invented numbers."""

    def __init__(
        self, folder: Path, run: str, resumed: str | None = None, metric: str = GATE["metric"]
    ) -> None:
        self.folder, self.run, self.step = folder, run, 0
        gate = {**GATE, "strict": True, "patience": 0, "metric": metric}
        more = {} if resumed is None else {"resumed": {"run": resumed, "privacy": []}}
        more["next_look"] = 0
        self._append(RECORD, begin(run, gates=[gate], schema=4, **more))

    def _append(self, name: str, line: dict[str, Any]) -> None:
        append_line(self.folder / name, line)

    def look(self, f1: float) -> None:
        line = result(self.step, run=self.run, f1=f1)
        self._append(RESULTS, line | {"schema": 4})
        plan = {"schema": 4, "next_look": self.step + 1}
        self._append(RECORD, look(self.step, self.run) | plan)
        if f1 > GATE["at_most"]:
            did = {"gate": "g", "did": "warn", "step": self.step, "at_most": GATE["at_most"]}
            decision = did | {"metric": GATE["metric"], "measured": f1}
            self._append(RECORD, {"schema": 4, "run": self.run, "kind": "gate"} | decision)
        self.step += 1
        if self.step % 3 == 0:
            checkpoint = {"kind": "checkpoint", "step": self.step, "weights": "e" * 64}
            self._append(RECORD, {"schema": 4, "run": self.run} | checkpoint)

    def end(self) -> None:
        count, head = closing_of(self.folder / RESULTS)
        closing = {"results": count, "results_head": head, "how": "finished", "privacy": []}
        closing |= {"row_order": "c" * 64, "weights": {"a": "float32 " + "d" * 64}}
        self._append(
            RECORD, {"schema": 4, "run": self.run, "kind": "end", "step": self.step} | closing
        )


def honest(folder: Path, random_: random.Random, runs: int = 1, looks: int = 6) -> None:
    """Write runs of one folder: some are killed, in a line or between two, and go on."""
    resumed = None
    for number in range(runs):
        written = Written(folder, f"run{number}", resumed)
        for _ in range(looks):
            written.look(random_.random())
        resumed = None
        if number + 1 == runs:
            written.end()
        elif random_.random() < 0.6:
            resumed = written.run
            if random_.random() < 0.5:
                path = folder / random_.choice([RECORD, RESULTS])
                with path.open("ab") as file:
                    file.write(b'{"schema": 4, "run": "run')  # what a killed process wrote
        else:
            written.end()


def lines_of(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines()


def chained_again(lines: list[bytes]) -> list[bytes]:
    """Return lines whose hashes fit again: what an editor does who knows the chain."""
    result, head = [], hash_line(b"")
    for line in lines:
        content = json.loads(line) | {"before": head}
        del content["hash"]
        text = json.dumps(content)
        result.append(f'{text[:-1]}, "hash": "{hash_line(text.encode())}"}}'.encode())
        head = hash_line(result[-1])
    return result


def remove(lines: list[bytes], n: int) -> None:
    del lines[n]


def double(lines: list[bytes], n: int) -> None:
    lines.insert(n, lines[n])


def swap(lines: list[bytes], n: int) -> None:
    other = n - 1 if n else n + 1
    lines[n], lines[other] = lines[other], lines[n]


def change(lines: list[bytes], n: int, /, **changes: Any) -> None:
    lines[n] = json.dumps(json.loads(lines[n]) | changes).encode()


def change_number(lines: list[bytes], n: int) -> None:
    change(lines, n, step=json.loads(lines[n]).get("step", 0) + 1)


def lower(lines: list[bytes], n: int) -> None:
    content = json.loads(lines[n])
    if "metrics" not in content:
        return change_number(lines, n)
    content["metrics"]["f1"]["value"] /= 2
    return change(lines, n, **content)


def move_plan(lines: list[bytes], n: int) -> None:
    change(lines, n, next_look=json.loads(lines[n]).get("next_look", 0) + 3)


def change_commitment(lines: list[bytes], n: int) -> None:
    content = json.loads(lines[n])
    named = {name: "0" * 64 for name in ("weights", "row_order") if name in content}
    change(lines, n, **named, checkpoint=n)


@pytest.mark.parametrize(
    "edit",
    [remove, double, swap, change_number, lower, move_plan, change_commitment],
    ids=lambda e: e.__name__,
)
@pytest.mark.parametrize("name", [RECORD, RESULTS])
def test_an_edit_without_new_hashes_needs_no_noted_one(tmp_path, edit, name) -> None:
    honest(tmp_path, random.Random(0))
    assert verify_run(tmp_path).status == HOLDS
    original = lines_of(tmp_path / name)
    for n in range(len(original)):
        lines = original[:]
        edit(lines, n)
        (tmp_path / name).write_bytes(b"\n".join(lines) + b"\n")
        is_cut_end = edit is remove and name == RECORD and n == len(original) - 1
        expected = OPEN if is_cut_end else CONTRADICTED
        assert verify_run(tmp_path).status == expected, n


@pytest.mark.parametrize("metric", [GATE["metric"], "leakage/worst/words"])
def test_a_lifted_gate_is_named_although_all_hashes_fit(tmp_path: Path, metric: str) -> None:
    written = Written(tmp_path, "a", metric=metric)
    for f1 in (0.2, 0.9, 0.3):
        written.look(f1)
    written.end()
    lines = [line for line in lines_of(tmp_path / RECORD) if b'"kind": "gate"' not in line]
    (tmp_path / RECORD).write_bytes(b"\n".join(chained_again(lines)) + b"\n")
    [text] = verify_run(tmp_path).contradictions
    assert f"step 1: {metric} is 0.9" in text
    assert "did not act" in text


def plans(folder, *lines, looks="every_n_steps=2", goes_on=False) -> Verdict:
    """Return what is found of a run with these lines after its first."""
    monitor = {"client": "rank", "looks": looks}
    start = begin("a", schema=4, monitor=monitor, next_look=0)
    start["resumed"] = {"run": "b", "privacy": []} if goes_on else None
    record = _ChainedFile(RECORD, contents=[start, *({"run": "a"} | line for line in lines)])
    verdict = Verdict()
    assert check_plans(record, verdict)
    return verdict


def at(step: int, next_look: int | None) -> dict[str, Any]:
    return {"kind": "look", "step": step, "next_look": next_look}


END = {"kind": "end", "step": 5}


@pytest.mark.parametrize(
    ("lines", "missing"),
    [
        ([at(0, 2), at(2, 4), at(4, 6), END], None),
        ([at(0, 2), at(3, None), at(1, 2), at(2, 4), at(4, 6), END], None),  # weights, and a retry
        ([at(0, 2), at(2, 4)], None),  # it was killed
        ([at(0, 2), at(2, 4), END], "planned at step 4 is missing; the run ended at step 5"),
        ([at(0, 2), at(4, 6), END], "planned at step 2 is missing; the next one is at step 4"),
        ([at(0, 4), at(4, 6), END], "its settings ask for one at step 2"),
        ([at(2, 4), at(4, 6), END], "planned at step 0 is missing"),
    ],
)
def test_planned_looks(tmp_path: Path, lines: list[dict[str, Any]], missing: str | None) -> None:
    verdict = plans(tmp_path, *lines)
    assert [missing in text for text in verdict.contradictions] == (
        [] if missing is None else [True]
    )
    assert not verdict.notes


def test_a_plan_that_changed_is_a_note(tmp_path: Path) -> None:
    moved = {"kind": "plan", "step": 3, "next_look": 3}
    verdict = plans(tmp_path, at(0, 2), moved, at(3, 4), {"kind": "plan", "step": 5}, END)
    assert verdict.status == HOLDS
    assert [text.partition("planned ")[2] for text in verdict.notes] == [
        "at step 2 was at step 3",
        "at step 4 was not made",
    ]
    assert plans(tmp_path, at(0, 9), at(9, 11), looks="max_overhead=0.1").status == HOLDS
    resumed = [{"kind": "plan", "step": 3, "next_look": 3}, at(3, 4), at(4, 6), END]
    verdict = plans(tmp_path, *resumed, goes_on=True)
    assert (verdict.status, verdict.notes) == (HOLDS, [])
    del resumed[1]
    [text] = plans(tmp_path, *resumed, goes_on=True).contradictions
    assert "planned at step 3 is missing" in text


def watched(folder: Path, *, steps: int = 3) -> tuple[torch.nn.Module, Watch]:
    """Watch a loop that saves what is there after two steps."""
    model = tiny_gpt2(tied=False)
    gate = Threshold("leakage/bag_of_words/f1", at_most=0.9, action="warn")
    made: list[Watch] = []

    def batches() -> Iterator[dict[str, torch.Tensor]]:
        for step in range(steps):
            ids = torch.randint(3, 60, (2, 6), generator=torch.Generator().manual_seed(step))
            yield {"input_ids": ids, "labels": ids}
            if step == 1:
                made[0].state_dict()
                save_file(dict(model.state_dict()), folder / "checkpoint.safetensors")

    settings = {"batches": batches(), "gates": [gate], "lr": 0.1, "configure": made.append}
    return model, loops.watched(folder, [BagOfWords()], model, report=True, **settings)


def test_a_watched_run_is_closed_and_its_weights_and_report_are_its_own(tmp_path, capsys) -> None:
    model, _ = watched(tmp_path / "run")
    [folder] = {path.parent for path in (tmp_path / "run").rglob(RESULTS)}
    saved = tmp_path / "saved"
    saved.mkdir()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    save_file(state, saved / "model.safetensors")
    write([folder])
    check = verify_run(folder, weights=saved)
    assert check.status == HOLDS, check
    assert {"report.json", "weights"} <= set(check.checked)
    heads = [word for head in check.heads.values() for word in ("--head", head)]
    arguments = [str(folder), "--weights", str(saved), *heads]
    assert fedleak("verify", *arguments) == HOLDS
    assert "holds" in capsys.readouterr().out

    name = next(name for name, p in model.named_parameters() if p.requires_grad)
    save_file({**state, name: state[name] + 1e-3}, saved / "model.safetensors")
    verdict = verify_run(folder, weights=saved)
    assert verdict.status == CONTRADICTED
    assert "1 of" in verdict.contradictions[0]
    save_file({"head": torch.ones(2)}, saved / "model.safetensors")
    assert verify_run(folder, weights=saved).status == OPEN
    check = verify_run(folder, weights=folder / "checkpoint.safetensors")
    assert check.status == HOLDS
    assert re.search(r"the checkpoint of run \w+ at step 2$", check.notes[0])
    assert "looks at the planned steps" in check.checked

    save_file(state, saved / "model.safetensors")
    assert fedleak("report", str(folder), "--model-card", "--out", str(saved)) == 0
    check = verify_run(folder, weights=saved)
    assert (check.status, "leakage.json" in check.checked) == (HOLDS, True)
    other = folder / "version_1" / RECORD  # a later run of the same folder
    other.parent.mkdir()
    other.touch()
    assert fedleak("verify", str(folder)) == OPEN
    assert "other runs are in version_1" in capsys.readouterr().out
    other.unlink()
    card = json.loads((saved / "leakage.json").read_text())
    card["runs"][0]["attacks"][0]["value"] = 0.01
    (saved / "leakage.json").write_text(json.dumps(card))
    [text] = verify_run(folder, weights=saved).contradictions
    assert text == "leakage.json differs from the report that the logs give"
    verdict = verify_run(folder, weights=saved / "model.safetensors")
    assert verdict.contradictions == [text]  # beside a file too
    (saved / "leakage.json").rename(tmp_path / "elsewhere.json")
    (saved / "leakage.json").symlink_to(tmp_path / "elsewhere.json")
    check = verify_run(folder, weights=saved)
    assert check.open == ["leakage.json is a link, which is not followed: copy its file"]

    report = json.loads((folder / "report.json").read_text())
    report["runs"][0]["outcome"] = "invented"
    (folder / "report.json").write_text(json.dumps(report))
    [text] = verify_run(folder).contradictions
    assert text == "report.json differs from the report that the logs give"


def test_the_first_line_and_checkpoints_hold_hashes_of_the_weights(tmp_path: Path) -> None:
    """Computed again here; the same for the same beginning, and not hashed where it is large."""
    torch.manual_seed(0)
    model = tiny_gpt2(tied=False)
    frozen = dict(model.named_parameters())
    expected = {n: hash_weights({n: p})[plain_name(n)] for n, p in frozen.items()}
    pairs = sorted((plain_name(name), one) for name, one in expected.items())
    watched(tmp_path, steps=2)
    first, *rest = [json.loads(line) for line in lines_of(tmp_path / RECORD)]
    digest = hashlib.sha256(json.dumps(pairs).encode()).hexdigest()
    nothing = hashlib.sha256(b"[]").hexdigest()
    assert first["weights"] == {"trained": digest, "frozen": nothing}
    [checkpoint] = [line for line in rest if line["kind"] == "checkpoint"]
    assert checkpoint["step"] == 2
    assert len(checkpoint["weights"]) == 64
    assert checkpoint["weights"] != digest
    assert not [line for line in rest if line["kind"] == "plan"]


def write_many(path: Path, name: str) -> None:
    for number in range(200):
        append_line(path, {"schema": 4, "run": name, "number": number})


def test_processes_that_write_to_one_file_do_not_interleave(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    path = tmp_path / RESULTS
    writers = [context.Process(target=write_many, args=(path, name)) for name in "abc"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    verdict = Verdict()
    assert len(read_chain(path, verdict).hashes) == 600
    assert verdict.status == HOLDS, verdict.contradictions[:3]


def test_a_signal_handler_writes_after_the_line_that_it_interrupts(tmp_path, monkeypatch) -> None:
    path, hashed = tmp_path / RESULTS, []

    def interrupted(line: bytes) -> str:
        if not hashed:  # between the lock and the line
            hashed.append(line)
            append_line(path, {"schema": 4, "run": "handler"})
        return hash_line(line)

    monkeypatch.setattr(fields, "hash_line", interrupted)
    append_line(path, {"schema": 4, "run": "main"})
    verdict = Verdict()
    lines = read_chain(path, verdict).contents
    assert [line and line["run"] for line in lines] == ["main", "handler"]
    assert verdict.status == HOLDS, verdict


def test_a_stopped_process_blocks_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fcntl = pytest.importorskip("fcntl")
    monkeypatch.setattr(fields, "LOCK_TRIES", 2)
    path = tmp_path / RESULTS
    with path.open("ab") as stopped:
        fcntl.flock(stopped, fcntl.LOCK_EX)
        with pytest.warns(UserWarning, match="is locked by another process"):
            append_line(path, {"schema": 4, "run": "a"})
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # it is said once
            append_line(path, {"schema": 4, "run": "b"})
    assert len(lines_of(path)) == 2


def fedleak(*arguments: str) -> int:
    from lightning_fedleak.cli import main

    return main(list(arguments))


def test_what_wraps_a_model_does_not_change_its_hashes() -> None:
    weight = torch.randn(3, 2)
    names = (
        "base_model.model.transformer.h.0.attn.lora_A.default.weight",
        "base_model.model.transformer.h.0.attn.lora_A.weight",
        "model.base_model.model.transformer.h.0.attn.lora_A.default.weight",
    )
    assert len({str(hash_weights({name: weight})) for name in names}) == 1
    assert hash_weights({"a": weight}) != hash_weights({"a": weight.bfloat16()})


def test_errors_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match=r"Name the folder that holds leakage\.jsonl"):
        verify_run(tmp_path)
    honest(tmp_path, random.Random(0))
    assert verify_run(tmp_path, heads=["a" * 64]).contradictions == [
        f"no line has the hash {'a' * 64}: lines were changed or cut"
    ]
    with pytest.raises(ReportError, match=r"no weights are in|name a folder of \.safetensors"):
        verify_run(tmp_path, weights=tmp_path / "missing")


ODD = [
    {"kind": "end", "run": "run0", "results": "7", "how": "finished"},
    {"kind": "end", "run": "run0", "results": -50, "results_head": 1, "weights": {"a": 1}},
    {"kind": "begin", "run": "b", "resumed": {"run": [1]}},
    {"kind": ["end"], "run": {"a": 1}, "results": True},
]


@pytest.mark.parametrize("line", ODD, ids=str)
def test_odd_lines_are_contradictions_and_no_error(tmp_path: Path, line: dict[str, Any]) -> None:
    honest(tmp_path, random.Random(0))
    append_line(tmp_path / RECORD, {"schema": 4} | line)
    saved = tmp_path / "saved.safetensors"
    save_file({"a": torch.ones(2)}, saved)
    assert verify_run(tmp_path, weights=saved).status in (OPEN, CONTRADICTED)


@pytest.mark.parametrize("content", ["[]", "{}", "[" * 50_000, '{"runs": 1}', "nonsense"])
def test_an_odd_report_is_a_contradiction(tmp_path: Path, content: str) -> None:
    honest(tmp_path, random.Random(0))
    (tmp_path / "report.json").write_text(content)
    assert verify_run(tmp_path).status == CONTRADICTED


def test_a_run_killed_before_its_gate_was_asked_is_open(tmp_path: Path) -> None:
    written = Written(tmp_path, "a")
    written.look(0.2)
    line = result(1, run="a", f1=0.9) | {"schema": 4}
    append_line(tmp_path / RESULTS, line)
    assert verify_run(tmp_path).status == OPEN


@pytest.fixture(scope="module")
def watched_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("watched")
    watched(folder)
    return folder


@pytest.fixture
def reported(watched_once: Path, tmp_path: Path) -> Path:
    """Return the folder of a watched run with its report."""
    folder = shutil.copytree(watched_once, tmp_path / "run")
    [logs] = {path.parent for path in folder.rglob(RESULTS)}
    write([logs])
    return logs


def test_a_report_elsewhere_says_the_same(reported, tmp_path: Path, monkeypatch) -> None:
    """Another path to the folder gives the same, and so does a copy under another name."""
    folder = reported
    monkeypatch.chdir(folder.parent)
    assert verify_run(Path(folder.name)).status == HOLDS
    shutil.copytree(folder, tmp_path / "a copy")
    check = verify_run(tmp_path / "a copy")
    assert check.status == HOLDS, check
    assert {"report.json", "report.html"} <= set(check.checked)
    monkeypatch.chdir(tmp_path / "a copy")
    write([Path()])
    check = verify_run(tmp_path / "a copy")
    assert check.status == HOLDS, check
    lines = (tmp_path / "a copy" / RECORD).read_bytes().splitlines(keepends=True)
    cut = json.dumps(json.loads(lines[0]) | {"schema": 1})  # a problem that names the file
    (tmp_path / "a copy" / RECORD).write_text(cut + "\n")
    for place in (Path(), tmp_path / "a copy"):
        write([place])
        [problem] = json.loads(Path("report.json").read_text())["problems"]
        assert problem.startswith("1 of the lines of a copy/run.jsonl are of another version")
        for run in (Path(), tmp_path / "a copy"):
            assert not [x for x in verify_run(run).contradictions if "report" in x]


@pytest.mark.parametrize(
    ("old", "new"), [("1.00", "0.52"), ("</main>", "<p>All is well.</p></main>"), ("UTC", "CET")]
)
def test_an_edited_page_is_a_contradiction(reported: Path, old: str, new: str) -> None:
    path = reported / "report.html"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    [contradiction] = verify_run(path.parent).contradictions
    assert contradiction == "report.html differs from the page that report.json gives"


@pytest.mark.parametrize("key", ["problems", "people", "made"])
def test_what_a_report_adds_to_the_logs_must_fit_its_page(reported: Path, key: str) -> None:
    path = reported / "report.json"
    report = json.loads(path.read_text())
    for odd in ("2026-01-01", ["a problem that no log has"], {"release": {"form": "safe"}}, 7):
        path.write_text(json.dumps(report | {key: odd}))
        assert verify_run(path.parent).status == CONTRADICTED


def test_a_page_that_cannot_be_compared_is_open(reported: Path, tmp_path: Path) -> None:
    folder = reported
    (tmp_path / "words.txt").write_text("private")
    (tmp_path / "link.txt").symlink_to("words.txt")  # the reader's own: it may be a link
    write([folder], reveal=[tmp_path / "link.txt"])
    [question] = verify_run(folder).open
    assert question == "report.html shows revealed texts, which are not compared"
    path = folder / "report.html"
    revealed = path.read_text()
    path.write_text(revealed.replace("1.00", "0.52"))
    assert verify_run(folder).status == CONTRADICTED
    write([folder])
    path.write_text(path.read_text().replace("<html", '<html data-live="1"'))
    assert verify_run(folder).status == CONTRADICTED  # the run is over
    write([folder])
    append_line(folder / RECORD, begin("later", schema=4, time="2999-01-01T00:00:00+00:00"))
    write_live(folder / RECORD, "later")
    assert "report.html is not compared: its run goes on" in verify_run(folder).open
    report = json.loads((folder / "report.json").read_text()) | {"made_by": "lightning-fedleak 0.1"}
    (folder / "report.json").write_text(json.dumps(report))
    assert verify_run(folder).open[1:] == [
        "report.json is not compared: it was made by another version, lightning-fedleak 0.1"
    ]
    (folder / "report.json").unlink()
    [_, question] = verify_run(folder).open
    assert question == "a report: there is no report.json"


# A training that is repeated gives the same to the bit, or it is said which value differs.


FILES = RESULTS, RECORD  # in this order: the last line of a record closes the results
IDS = torch.randint(3, 60, (12, 6), generator=torch.Generator().manual_seed(1))


def train(folder, key_of=None, *, start=0.0, order=0, rate=0.1, every_n_steps=2, extra=0.0) -> Path:
    """Train two epochs of three batches, watched; ``extra`` is added to the loss of one batch."""
    folder.mkdir()
    if key_of is not None:
        (folder / ROW_KEY).write_bytes((key_of / ROW_KEY).read_bytes())
        (folder / ROW_KEY).chmod(0o600)
    torch.manual_seed(0)
    model = tiny_gpt2(tied=False)
    model.lm_head.weight.data[0, 0] += start
    optimizer = torch.optim.SGD(model.parameters(), rate)
    rows = DataLoader(
        TensorDataset(IDS), 4, shuffle=True, generator=torch.Generator().manual_seed(order)
    )
    watch = Watch(
        model, optimizer, [BagOfWords()], loader=rows, folder=folder, every_n_steps=every_n_steps
    )
    with watch:
        for epoch in range(2):
            for number, [ids] in enumerate(rows):
                with watch.step({"input_ids": ids, "labels": ids}):
                    loss = model(input_ids=ids, labels=ids).loss
                    if number == 1 == epoch:
                        loss = loss * (1 + extra)
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    watch.utility["train_loss"] = float(loss.detach())
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("runs") / "first")


@pytest.fixture(scope="module")
def repeated(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("runs") / "again", run)


def repetition_change(folder: Path, name: str, number: int, edit: Any) -> None:
    """Edit one line of a log as who knows the chain does, and close the run again."""
    logs = {file: [json.loads(line) for line in lines_of(folder / file)] for file in FILES}
    edit(logs[name][number])
    for file in FILES:
        lines = chained_again([json.dumps(one).encode() for one in logs[file]])
        (folder / file).write_bytes(b"\n".join(lines) + b"\n")
        logs[RECORD][-1]["results_head"] = hash_line(lines[-1])


def read_lines(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in lines_of(folder / name)]


def compared(folder: Path, again: Path) -> str:
    """Return what a check compared, which must hold."""
    check = verify_run(folder, repetition=again)
    assert check.status == HOLDS, check
    return next(one for one in check.checked if one.startswith("repetition"))


def test_the_same_training_again_holds(run: Path, repeated: Path) -> None:
    results, record = read_lines(run, RESULTS), read_lines(run, RECORD)
    values = sum(len(line["metrics"]) for line in results)
    losses = sum(len(line.get("utility") or {}) for line in record)
    assert losses >= len(results) - 1 > 0
    tensors, total = len(record[-1]["weights"]), values + losses
    text = f"repetition: {tensors} hashes of weights, {total} values of losses and leakage"
    assert compared(run, repeated) == text


def test_looks_at_other_steps_leave_weights_and_losses(run: Path, tmp_path: Path) -> None:
    """Training is the same however often it is looked at; both look at the first step."""
    metrics = len(read_lines(run, RESULTS)[0]["metrics"])
    again = train(tmp_path / "again", run, every_n_steps=3)
    assert int(compared(run, again).split(", ")[1].split()[0]) >= metrics
    [note] = verify_run(run, repetition=again).notes
    assert note == "leakage from step 2 on is not compared: only one run looked there"


def test_another_training_is_a_contradiction(run: Path, tmp_path: Path) -> None:
    check = verify_run(run, repetition=train(tmp_path / "again", run, extra=1e-3))
    assert check.status == CONTRADICTED
    [text] = check.contradictions
    assert "look, train_loss is not what" in text
    differing = int(text.split("; ")[1].split()[0])
    assert differing > len(read_lines(run, RECORD)[-1]["weights"]) // 2


@pytest.mark.parametrize("name", ["metrics", "utility"])
def test_what_one_log_alone_has_is_open(run, repeated, tmp_path: Path, name: str) -> None:
    """An invented name does not end the comparison of the others."""
    first = shutil.copytree(run, tmp_path / "first")
    file = RESULTS if name == "metrics" else RECORD
    number = next(
        n for n, one in enumerate(read_lines(first, file)) if one.get(name) and "step" in one
    )
    value = {"value": 0.0, "low": None, "high": None} if name == "metrics" else 0.0
    repetition_change(first, file, number, lambda line: line[name].update(invented_loss=value))
    verdict = verify_run(first, repetition=repeated)
    assert verdict.status == OPEN
    assert "only one run logged" in verdict.open[0]
    assert "invented_loss; " in verdict.open[0]


@pytest.mark.parametrize(("seconds", "is_timed"), [(None, False), (5.0, True)])
def test_results_are_not_compared_if_a_budget_of_seconds_is_set(
    run, repeated, tmp_path, seconds, is_timed
):
    first, again = (shutil.copytree(one, tmp_path / one.name) for one in (run, repeated))
    for folder in (first, again):
        repetition_change(
            folder, RECORD, 0, lambda line: line["attacks"][0].update(config={"s_seconds": seconds})
        )
        for number in range(len(read_lines(folder, RESULTS))):
            repetition_change(
                folder, RESULTS, number, lambda line: line.update(config={"s_seconds": seconds})
            )
    notes = verify_run(first, repetition=again).notes
    assert any("because of a budget of seconds" in note for note in notes) == is_timed


def test_other_settings_of_attacks_leave_their_results(run, repeated, tmp_path: Path) -> None:
    again = shutil.copytree(repeated, tmp_path / "again")
    repetition_change(again, RECORD, 0, lambda line: line["attacks"][0].update(config={"other": 1}))
    check = verify_run(run, repetition=again)
    assert check.status == HOLDS
    assert "leakage is not compared" in check.notes[0]


@pytest.mark.parametrize(
    ("file", "edit", "named"),
    [
        (RESULTS, lambda x: x["metrics"]["f1"].update(value=0.1), "bag_of_words, f1 is not what"),
        (RECORD, lambda line: line["utility"].update(train_loss=0.1), "train_loss is not what"),
    ],
)
def test_an_invented_number_is_found_although_all_hashes_fit(
    run, repeated, tmp_path, file, edit, named
) -> None:
    first = shutil.copytree(run, tmp_path / "first")
    field = "metrics" if file == RESULTS else "utility"
    number = next(n for n, one in enumerate(read_lines(first, file)) if one.get(field))
    repetition_change(first, file, number, edit)
    assert verify_run(first).status == HOLDS
    check = verify_run(first, repetition=repeated)
    assert check.status == CONTRADICTED
    [text] = check.contradictions
    assert named in text
    assert "1 of" in text


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"rate": 0.2}, "different training"),
        ({"start": 1e-3}, "different weights before the first step"),
        ({"order": 1}, "the order of rows"),
    ],
    ids=str,
)
def test_what_is_no_repetition_is_open(run, tmp_path, changes, reason) -> None:
    verdict = verify_run(run, repetition=train(tmp_path / "again", run, **changes))
    assert verdict.status == OPEN
    assert reason in verdict.open[0]


@pytest.mark.parametrize(
    ("key", "edit", "reason"),
    [
        (False, lambda first: None, "copy row_order.key of the run"),
        (True, lambda first: first["versions"].update(torch="1.0"), "different versions"),
        (True, lambda first: first["machine"].update(instructions="AVX"), "different machine"),
        (True, lambda first: first.update(resumed={"run": "a"}), "from its first step"),
    ],
)
def test_other_orders_and_platforms_cannot_be_compared(
    run, repeated, tmp_path, key, edit, reason
) -> None:
    again = tmp_path / "again"
    again = shutil.copytree(repeated, again) if key else train(again)
    repetition_change(again, RECORD, 0, edit)
    verdict = verify_run(run, repetition=again)
    assert verdict.status == OPEN
    assert reason in verdict.open[0]


def test_a_repetition_that_was_edited_is_not_compared(run, repeated, tmp_path: Path) -> None:
    again = shutil.copytree(repeated, tmp_path / "again")
    lines = lines_of(again / RESULTS)
    (again / RESULTS).write_bytes(b"\n".join(lines[:1] + lines[2:]) + b"\n")
    check = verify_run(run, repetition=again)
    assert check.status == OPEN
    assert "was not compared" in check.open[0]


def test_a_run_is_no_repetition_of_itself(run: Path) -> None:
    assert "the same run" in verify_run(run, repetition=run).open[0]
