"""No edit that is drawn of a run whose last hashes were noted holds, whatever wrote the run."""

from __future__ import annotations

import json
import random
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file
from torch import Tensor

from lightning_fedleak.evidence import (
    CONTRADICTED,
    HOLDS,
    OPEN,
    verification,
    verify_run,
)
from lightning_fedleak.report import write
from lightning_fedleak.report.records import RECORD, RESULTS
from lightning_fedleak.trainers import Threshold
from tests.evidence import test_verification as edits
from tests.evidence.test_honest_runs import Loop, whole

State = dict[str, Tensor]
GATED = "leakage/worst/words"


def own_loop(folder: Path) -> State:
    loop = Loop(folder, [Threshold(GATED, at_most=0.5, action="warn")], every_n_steps=2)
    whole(loop)
    return loop.model.state_dict()


def resumed(folder: Path) -> State:
    first = Loop(folder, every_n_steps=3)
    with suppress(RuntimeError), first.watch:
        for number in first.batches():
            first.step()
            if number == 4:
                state = first.watch.state_dict()
            if number == 7:
                raise RuntimeError
    second = Loop(folder, max_overhead=0.9)
    second.watch.load_state_dict(state)
    whole(second)
    return second.model.state_dict()


def killed(folder: Path) -> State:
    """Kept as it was on the disk in the middle of a run, which wrote half a line."""
    loop = Loop(folder / "running", every_n_steps=2)
    with loop.watch:
        for number in loop.batches():
            loop.step()
            if number == 8:
                shutil.copytree(folder / "running", folder, dirs_exist_ok=True)
    with (folder / RESULTS).open("ab") as file:
        file.write(b'{"half')
    shutil.rmtree(folder / "running")
    return loop.model.state_dict()


def written(folder: Path) -> State:
    """Of invented numbers: killed between two lines and resumed, finished, and begun again."""
    edits.honest(folder, random.Random(0), runs=4)
    return {}


def cut_tail(lines: list[bytes], n: int) -> None:
    del lines[max(1, n) :]


def set_clock_back(lines: list[bytes], n: int) -> None:
    edits.change(lines, n, time="2020-01-01T00:00:00+00:00")


def lift_gate(lines: list[bytes], n: int) -> None:
    gates = [line for line in lines if b'"kind": "gate"' in line]
    lines.remove(gates[n % len(gates)] if gates else lines[n])


def leave_out_look(lines: list[bytes], n: int) -> None:
    step = json.loads(lines[n]).get("step")
    lines[:] = [
        line for m, line in enumerate(lines) if m != n and json.loads(line).get("step") != step
    ]


EDITS = (
    *(edits.move_plan, edits.change_commitment, edits.remove, edits.double, edits.swap),
    *(edits.change_number, edits.lower, cut_tail, set_clock_back, lift_gate, leave_out_look),
)
KINDS = own_loop, resumed, killed, written


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_no_drawn_edit_of_a_run_with_noted_hashes_holds(
    tmp_path: Path, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With and without hashes that are computed again; each edit is of a line that is drawn.

    The first two of each kind are compared with the report too, which is made again for each; the
    others are contradicted without it.
    """
    place = tmp_path / "run"
    state = kind(place)
    [folder] = {path.parent for path in place.rglob(RECORD)}
    write([folder])
    check = verify_run(folder)
    heads, status = [*check.heads.values()], check.status
    assert status == (OPEN if kind is killed else HOLDS)
    originals = {name: (folder / name).read_bytes() for name in (RECORD, RESULTS)}
    draw = random.Random(kind.__name__)
    for number in range(210):
        if number == 2 * len(EDITS):
            monkeypatch.setattr(verification, "_check_report", lambda *_: None)
        name, edit = draw.choice([RECORD, RESULTS]), EDITS[number % len(EDITS)]
        lines = [line for line in originals[name].splitlines() if line.endswith(b"}")]
        edit(lines, draw.randrange(len(lines)))
        again = draw.random() < 0.5
        content = b"\n".join(edits.chained_again(lines) if again else lines) + b"\n"
        (folder / name).write_bytes(content)
        verdict = verify_run(folder, heads=heads)
        # Lines that are added to a run which is open, with hashes that fit: it may go on.
        goes_on = kind is killed and again and content.startswith(originals[name])
        expected = OPEN if goes_on else CONTRADICTED
        assert verdict.status == expected, (edit.__name__, name, again, verdict)
        said = [text for text in verdict.contradictions if name in text or "the hash" in text]
        assert said or goes_on, verdict
        (folder / name).write_bytes(originals[name])
    monkeypatch.undo()
    if kind in (own_loop, resumed):
        check_other_weights(folder, state, heads)
    check_other_files(folder, tmp_path / "other", heads)


def check_other_weights(folder: Path, state: State, heads: list[str]) -> None:
    saved = folder / "model.safetensors"
    state = {name: tensor.clone() for name, tensor in state.items()}
    save_file(state, saved)
    assert verify_run(folder, weights=saved, heads=heads).status == HOLDS
    for name in random.Random(0).sample(sorted(state), 5):
        save_file({**state, name: state[name] + 1e-3}, saved)
        verdict = verify_run(folder, weights=saved, heads=heads)
        assert verdict.status == CONTRADICTED, name
        assert name in verdict.contradictions[0]


def check_other_files(folder: Path, other: Path, heads: list[str]) -> None:
    """Its report, and then its logs, are those of another run, whose own hashes fit."""
    edits.honest(other, random.Random(1))
    write([other])
    shutil.copy(other / "report.json", folder)
    assert verify_run(folder, heads=heads).status != HOLDS
    for name in (RECORD, RESULTS):
        shutil.copy(other / name, folder)
    texts = verify_run(folder, heads=heads).contradictions
    assert all(any(head in text for text in texts) for head in heads)
