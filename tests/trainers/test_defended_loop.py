"""Defences in a loop of one's own: what it must do, what is refused, what goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor
from torch.nn import DataParallel
from torch.utils.data import DataLoader

from lightning_fedleak import BagOfWords
from lightning_fedleak.defenses import (
    DPSGD,
    DefenseError,
    GradientNoise,
)
from lightning_fedleak.engine import WatchSettings
from lightning_fedleak.trainers import DefendedLoop, Threshold, Watch
from tests.helpers.models import tiny_gpt2, tiny_llama
from tests.trainers.hosts import BATCH, CLIP, N, rows


class Loop:
    """A model, its optimizer, and a training as a user writes it."""

    def __init__(self, defense: Any, model: Any = None, lr: float = 0.05, **settings: Any) -> None:
        self.model = tiny_llama().train() if model is None else model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr)
        self.schedule = torch.optim.lr_scheduler.LinearLR(self.optimizer, total_iters=6)
        self.defense, loader = defense, DataLoader(rows(), batch_size=BATCH, shuffle=True)
        given = {"epochs": 1} | settings
        self.private = DefendedLoop(self.model, self.optimizer, loader, [defense], **given)

    def compute(self, batch: Any) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        return loss

    def step(self, batch: Any) -> None:
        self.private.loss(self.compute, batch).backward()
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()

    def train(self, epochs: int = 1) -> int:
        """Return how many batches came."""
        count = 0
        with self.private:
            for _ in range(epochs):
                for batch in self.private:
                    self.step(batch)
                    count += 1
        return count


def test_a_loop_ends_with_its_budget_and_goes_on_from_a_folder(tmp_path: Path) -> None:
    known: dict[str, Any] = {"target_epsilon": 5.0, "target_delta": 1e-3, "accountant": "rdp"}
    first = Loop(DPSGD(CLIP, **known), epochs=2)
    assert first.train() == len(first.private) == N // BATCH == 6
    first.private.save(tmp_path)
    again = Loop(DPSGD(CLIP, **known), epochs=2)
    again.private.restore(tmp_path)
    assert again.train(epochs=3) == 6
    assert again.private.should_stop
    assert again.defense.noise_multiplier == first.defense.noise_multiplier
    assert again.defense.privacy.releases == 12
    assert 4.95 < again.defense.privacy.epsilon <= 5.0
    again.private.save(tmp_path)
    last = Loop(DPSGD(CLIP, **known), epochs=2)
    last.private.restore(tmp_path)
    assert last.train() == 0
    with pytest.raises(DefenseError, match=r"has no defenses.safetensors"):
        last.private.restore(tmp_path / "other")


def forgets(loop: Loop, batch: Any) -> None:
    loop.private.loss(loop.compute, batch).backward()
    loop.optimizer.step()


def accumulates(loop: Loop, batch: Any) -> None:
    loop.private.loss(loop.compute, batch).backward()


def clips(loop: Loop, batch: Any) -> None:
    loop.private.loss(loop.compute, batch).backward()
    torch.nn.utils.clip_grad_norm_(loop.model.parameters(), 1e-3)
    loop.optimizer.step()


def casts(loop: Loop, batch: Any) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        loop.private.loss(loop.compute, batch)


def twice(loop: Loop, batch: Any) -> None:
    loop.private.loss(loop.compute, batch).backward()
    loop.optimizer.step()
    loop.optimizer.step()


def writes(loop: Loop, batch: Any) -> None:
    loop.private.loss(loop.compute, batch).backward()
    for p in loop.model.parameters():
        p.data -= 0.1 * p.grad
    loop.optimizer.zero_grad()


def other(loop: Loop, batch: Any) -> None:
    loop.private.loss(loop.compute, batch).backward()
    torch.optim.SGD(loop.model.parameters(), 0.1).step()


def repeats(loop: Loop, batch: Any) -> None:
    loop.step(batch)
    loop.step(batch)


def skips(loop: Loop, batch: Any) -> None:
    """Continue with the next batch."""


def own_batch(loop: Loop, batch: Any) -> None:
    loop.private.loss(loop.compute, {name: value[:1] for name, value in batch.items()})
    loop.private.loss(loop.compute, {name: value[1:] for name, value in batch.items()})


def test_weights_written_after_the_last_step_are_refused() -> None:
    loop = Loop(DPSGD(CLIP, 1.0, seed=2))

    def train() -> None:
        with loop.private:
            for batch in loop.private:
                loop.step(batch)
            loop.model.lm_head.weight.data[0] += 1e-3

    with pytest.raises(DefenseError, match=r"'lm_head.weight' was written to since"):
        train()
    assert loop.train() > 1  # its hooks are removed, and the weights are read again


def test_two_optimizers_are_refused_where_an_example_is_clipped_as_a_whole() -> None:
    loop = Loop(DPSGD(CLIP, 1.0, seed=2))
    both = [torch.optim.SGD([p], 0.1) for p in list(loop.model.parameters())[:2]]
    loader = DataLoader(rows(), batch_size=BATCH)
    with pytest.raises(DefenseError, match="one optimizer, with parameter groups"):
        DefendedLoop(loop.model, both, loader, [DPSGD(CLIP, 1.0)], epochs=1)
    DefendedLoop(loop.model, both, loader, [GradientNoise(1.0, 1.0)], epochs=1)


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (forgets, r"gradients are there before backward.*zero_grad\(set_to_none=True\)"),
        (accumulates, "To accumulate gradients, use DPSGD.max_physical_batch_size"),
        (clips, "is not the sum of its recorded per-sample gradients"),
        (casts, "autocast to torch.bfloat16.*pass precision='bf16-mixed'"),
        (twice, "nothing was released"),
        (writes, "not released once"),
        (repeats, "released once.*one loss"),
        (skips, "released once.*even an empty"),
        (other, r"DefendedLoop does not know.*Pass it to DefendedLoop"),
        (own_batch, "let no hook or callback add|before the first was released"),
    ],
)
def test_what_breaks_the_guarantee_is_refused(step: Any, message: str) -> None:
    loop = Loop(DPSGD(CLIP, 1.0, seed=2))

    def train() -> None:
        with loop.private:
            for batch in loop.private:
                step(loop, batch)

    with pytest.raises(DefenseError, match=message):
        train()


@pytest.mark.parametrize("more", [0, 1], ids=["one batch", "several"])
def test_batches_in_a_list_are_refused_before_any_release(more: int) -> None:
    loop = Loop(DPSGD(CLIP, 1.0, seed=2))
    if not more:
        loop.private._loader = DataLoader(rows(BATCH), batch_size=BATCH)
    with loop.private, pytest.raises(DefenseError, match="For each batch of this loop"):
        list(loop.private)
    assert loop.defense.releases == 0


def test_workers_that_draw_ahead_do_not_let_a_batch_be_released_twice() -> None:
    loop = Loop(DPSGD(CLIP, 1.0, seed=2))
    loop.private._loader = DataLoader(rows(), batch_size=BATCH, num_workers=1)
    with loop.private:
        batches = iter(loop.private)
        batch = next(batches)
        loop.step(batch)
        with pytest.raises(DefenseError, match="released once"):
            loop.step(batch)
        batches.close()  # type: ignore[attr-defined]
    assert loop.defense.releases == 1


def test_an_empty_batch_must_not_be_left_out() -> None:
    loop = Loop(DPSGD(CLIP, 1.0, seed=2), epochs=4)
    loop.private._loader = DataLoader(rows(), batch_size=1)
    sizes = list[int]()

    def train() -> None:
        for _ in range(4):
            for batch in loop.private:
                sizes.append(len(batch["input_ids"]))
                if sizes[-1] == 0:
                    continue
                loop.step(batch)

    with loop.private, pytest.raises(DefenseError, match="even an empty one"):
        train()
    assert sizes[-1] == 0
    assert loop.defense.releases == len(sizes) - 1


def test_a_batch_of_another_loader_is_refused() -> None:
    loop = Loop(DPSGD(CLIP, 1.0, seed=2))
    with loop.private, pytest.raises(DefenseError, match="is of another loop"):
        loop.step(next(iter(DataLoader(rows(), batch_size=BATCH))))


def test_a_loop_may_end_in_the_middle_of_an_epoch() -> None:
    loop = Loop(DPSGD(CLIP, 1.0, seed=2), epochs=2)
    with loop.private:
        for _ in range(2):
            for number, batch in enumerate(loop.private):
                loop.step(batch)
                if number == 1:
                    break
    assert loop.defense.releases == 4


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Loop(DPSGD(CLIP, 1.0), tiny_llama().eval()), r"Call `model.train\(\)`"),
        (lambda: Loop(DPSGD(CLIP, 1.0), DataParallel(tiny_llama().train())), "Under DataParallel"),
        (lambda: Loop(DPSGD(CLIP, 1.0), precision="16-mixed"), "Use 'bf16-mixed'"),
        (
            lambda: Loop(DPSGD(CLIP, target_epsilon=3.0, target_delta=1e-3), epochs=None),
            "give DefendedLoop epochs= or steps=",
        ),
    ],
)
def test_settings_are_refused_when_the_loop_begins(build: Any, message: str) -> None:
    with pytest.raises(DefenseError, match=message):
        build().train()


def test_a_loader_that_accelerate_has_prepared_is_refused_and_a_plain_one_taken() -> None:
    accelerator = Accelerator(cpu=True)
    loader = DataLoader(rows(), batch_size=BATCH)
    model, optimizer = tiny_llama().train(), None
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    defense = DPSGD(CLIP, 1.0)
    refused = DefendedLoop(model, optimizer, accelerator.prepare(loader), [defense], epochs=1)
    with pytest.raises(DefenseError, match="return a plain torch DataLoader"):
        refused.__enter__()
    with DefendedLoop(model, optimizer, loader, [defense], epochs=1) as private:
        for batch in private:
            accelerator.backward(private.loss(lambda given: model(**given).loss, batch))
            optimizer.step()
            optimizer.zero_grad()
    assert defense.releases == 6


def test_noise_is_added_once_an_accumulated_step(tmp_path: Path) -> None:
    loop = Loop(defense := GradientNoise(1.0, 0.1))
    with loop.private:
        for number, batch in enumerate(loop.private):
            loop.private.loss(loop.compute, batch).backward()
            if number % 2:
                loop.optimizer.step()
                loop.optimizer.zero_grad()
    assert defense.releases == 3


def test_a_watch_reads_what_is_shared(tmp_path: Path) -> None:
    defense = DPSGD(CLIP, target_epsilon=8.0, target_delta=1e-3, accountant="filter")
    loop = Loop(defense, tiny_gpt2(tied=False, dropout=0.0).train(), 1e-3)
    settings = WatchSettings(stages=("local", "shared"))
    gate = Threshold("leakage/bag_of_words/f1", at_most=-1.0, action="harden")
    watch = Watch(
        loop.model, loop.optimizer, [BagOfWords()], [gate], folder=tmp_path, every_n_steps=1,
        settings=settings,
    )  # fmt: skip
    with loop.private, watch:
        for batch in loop.private:
            with watch.step(batch):
                loop.step(batch)
    latest = watch.latest
    assert latest["leakage_local/bag_of_words/f1"] > latest["leakage/bag_of_words/f1"] + 0.1
    assert latest["privacy/epsilon"] == defense.privacy.epsilon
    assert gate.notches == defense.notches > 0
