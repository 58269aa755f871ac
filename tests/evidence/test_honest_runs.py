"""Runs of a loop that stop, fail, skip steps, accumulate and go on are not accused."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import Parameter
from transformers import Trainer

from lightning_fedleak import BagOfWords
from lightning_fedleak.engine import WatchSettings
from lightning_fedleak.engine import record as engine_record
from lightning_fedleak.engine.run import Look
from lightning_fedleak.evidence import CONTRADICTED, HOLDS, OPEN, verify_run
from lightning_fedleak.model.snapshots import NotYet
from lightning_fedleak.report.records import RECORD
from lightning_fedleak.trainers import Threshold, Watch
from tests.callbacks.runs import Probe, fit, monitor_with
from tests.helpers.models import tiny_gpt2
from tests.trainers.test_transformers import trainer_of, watched


class Loop:
    """A loop of 12 batches, in which something may happen."""

    def __init__(self, folder: Path, gates: Any = (), **arguments: Any) -> None:
        torch.manual_seed(0)
        self.model = tiny_gpt2(tied=False)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
        settings = WatchSettings(tensorboard=False)
        self.watch = Watch(
            self.model, self.optimizer, [BagOfWords()], gates, folder=folder,
            settings=settings, **arguments,
        )  # fmt: skip

    def batches(self, n: int = 12) -> Iterator[int]:
        """Yield numbers of batches, and take each to its gradient."""
        for number in range(n):
            ids = torch.randint(3, 60, (2, 6), generator=torch.Generator().manual_seed(number))
            with self.watch.step({"input_ids": ids, "labels": ids}):
                self.model(input_ids=ids, labels=ids).loss.backward()
                yield number

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def whole(loop: Loop) -> None:
    with loop.watch:
        for _ in loop.batches():
            loop.step()


def accumulated(loop: Loop) -> None:
    with loop.watch:
        for number in loop.batches():
            if number % 3 == 2:
                loop.step()


def skipping(loop: Loop) -> None:
    with loop.watch:
        for number in loop.batches():
            if number % 4 == 2:
                loop.optimizer.zero_grad()  # as a GradScaler does where a gradient is infinite
            else:
                loop.step()


def failing_looks(loop: Loop) -> None:
    attack = loop.watch.engine.selection.attacks[0]
    with loop.watch:
        for number in loop.batches():
            attack.run = None if 3 < number < 8 else type(attack).run.__get__(attack)
            loop.step()


def failing(loop: Loop) -> None:
    with suppress(RuntimeError), loop.watch:
        for number in loop.batches():
            loop.step()
            if number == 6:
                raise RuntimeError


def retrying(loop: Loop) -> None:
    """An attack waits for so long that its retry comes after the planned look, which failed."""
    engine, attack = loop.watch.engine, loop.watch.engine.selection.attacks[0]
    publish, failed = engine._publish, []

    def fail_once(look: Look, outcomes: Any) -> None:
        if look.step and look.scope is None and not failed:
            failed.append(look.step)
            raise RuntimeError
        publish(look, outcomes)

    def wait(*_: Any) -> None:
        raise NotYet("it waits")

    engine._publish = fail_once
    with loop.watch:
        for _ in loop.batches():
            attack.run = type(attack).run.__get__(attack) if failed else wait
            loop.step()
    assert failed


def stopped(loop: Loop) -> None:
    with loop.watch:
        for _ in loop.batches():
            loop.step()
            if loop.watch.should_stop:
                break


def stopped_by_an_unknown_and_gone_on(loop: Loop) -> None:
    """The gate stops at a failed look; the loop takes no notice, and later looks read all words."""
    attack = loop.watch.engine.selection.attacks[0]
    with loop.watch:
        for number in loop.batches():
            attack.run = None if number < 2 else type(attack).run.__get__(attack)
            loop.step()


@pytest.mark.parametrize("settings", [{"every_n_steps": 2}, {}], ids=str)
@pytest.mark.parametrize(
    "run",
    [
        *(whole, accumulated, skipping, failing_looks, failing, retrying, stopped),
        stopped_by_an_unknown_and_gone_on,
    ],
    ids=lambda f: f.__name__,
)
def test_an_honest_loop(tmp_path: Path, run: Any, settings: dict[str, Any]) -> None:
    gates = [Threshold("leakage/worst/words", at_most=0.5)]
    gates = gates if run in (stopped, stopped_by_an_unknown_and_gone_on) else []
    run(Loop(tmp_path, gates, **settings))
    check = verify_run(tmp_path)
    assert check.status == HOLDS, check
    assert "looks at the planned steps" in check.checked


@pytest.mark.parametrize("steps", [4, 12])
def test_a_next_look_beyond_the_end_is_no_missing_one(tmp_path: Path, steps: int) -> None:
    loop = Loop(tmp_path, max_overhead=1e-4)
    with loop.watch:
        for _ in loop.batches(steps):
            loop.step()
    lines = map(json.loads, (tmp_path / RECORD).read_text().splitlines())
    plans = [line["next_look"] for line in lines if "next_look" in line]
    assert plans[0] == 0
    assert plans[-1] > steps
    check = verify_run(tmp_path)
    assert check.status == HOLDS, check
    assert "looks at the planned steps" in check.checked


def test_weights_that_were_not_hashed_are_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_record, "MAX_HASHED_BYTES", 1000)
    loop = Loop(tmp_path)
    save_in(loop, 6)
    check = verify_run(tmp_path, weights=tmp_path / "model.safetensors")
    assert check.status == OPEN, check
    assert "not hashed" in check.open[0]


def test_a_checkpoint_after_layers_were_unfrozen(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    frozen = [p for name, p in loop.model.named_parameters() if ".h.0." in name]
    for parameter in frozen:
        parameter.requires_grad = False
    save_in(loop, 6, frozen)
    saved = load_file(tmp_path / "model.safetensors")
    check = verify_run(tmp_path, weights=tmp_path / "model.safetensors")
    assert check.status == HOLDS, check
    assert "at step 6" in check.notes[-1]

    name = next(name for name in saved if ".h.0." in name)
    save_file({**saved, name: saved[name] + 1}, tmp_path / "model.safetensors")
    check = verify_run(tmp_path, weights=tmp_path / "model.safetensors")
    assert check.status == CONTRADICTED
    half = {n: t.half() if ".h.1." in n else t for n, t in saved.items()}
    save_file(half, tmp_path / "model.safetensors")
    check = verify_run(tmp_path, weights=tmp_path / "model.safetensors")
    assert check.status == OPEN, check


def save_in(loop: Loop, step: int, unfrozen: Sequence[Parameter] = ()) -> None:
    """Train, unfreeze parameters half way, and save the weights at a step."""
    with loop.watch:
        for number in loop.batches():
            loop.step()
            if number == step // 2:
                for parameter in unfrozen:
                    parameter.requires_grad = True
            if number == step:  # the step counts when its batch has ended
                loop.watch.state_dict()
                save_file(loop.model.state_dict(), loop.watch.folder / "model.safetensors")


def test_a_fit_of_lightning_that_is_resumed(tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"logger": False, "max_epochs": 2, "enable_checkpointing": True}
    fit([monitor_with([Probe()], every_n_steps=3)], tmp_path, **arguments)
    [saved] = tmp_path.rglob("*.ckpt")
    arguments["max_epochs"] = 3
    fit([monitor_with([Probe()], every_n_steps=3)], tmp_path, ckpt_path=str(saved), **arguments)
    [record] = tmp_path.rglob(RECORD)
    check = verify_run(record.parent)
    assert check.status in (HOLDS, OPEN), check
    assert not [text for text in check.notes if "planned" in text]


def test_a_trainer_of_transformers_that_is_resumed(tmp_path: Path) -> None:
    """Its checkpoints, too, are those of the run that wrote them."""
    for checkpoint in (None, str(tmp_path / "checkpoint-4")):
        trainer = trainer_of(tmp_path, kind=Trainer, save_strategy="steps", save_steps=4)
        watched(trainer, [BagOfWords()])
        trainer.train(resume_from_checkpoint=checkpoint)
    for step, words in ((4, "at step 4"), (8, None)):
        check = verify_run(tmp_path, weights=tmp_path / f"checkpoint-{step}")
        assert check.status == HOLDS, check
        notes = [text for text in check.notes if "checkpoint" in text or "planned" in text]
        assert [words in text for text in notes] == ([] if words is None else [True])
    end = json.loads((tmp_path / RECORD).read_text().splitlines()[-1])
    assert len(end["row_order"]) == 64
