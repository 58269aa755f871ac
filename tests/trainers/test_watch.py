"""A loop of one's own is watched as a Trainer is, and runs as it does without the watch."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from lightning_fedleak import BagOfWords, FCMembership, FlatChat, LeakageMonitor
from lightning_fedleak.attacks.memorization import Extraction
from lightning_fedleak.engine import Games, Memorization
from lightning_fedleak.trainers import LeakageLimitExceeded, Threshold, Watch
from tests.callbacks.runs import Probe
from tests.helpers.lightning_modules import CausalLMModule
from tests.helpers.models import tiny_gpt2

F1 = "leakage/bag_of_words/f1"


def batches(count: int = 8) -> list[dict[str, torch.Tensor]]:
    ids = torch.randint(3, 60, (count, 4, 9), generator=torch.Generator().manual_seed(2))
    return [{"input_ids": x, "labels": x, "attention_mask": torch.ones_like(x)} for x in ids]


def attacks() -> list[Any]:
    return [FlatChat(scorer="abs", oracle_n_types=12), BagOfWords(), FCMembership(1)]


def lines(folder: Path, name: str = "leakage") -> list[dict[str, Any]]:
    (path,) = folder.rglob(f"{name}.jsonl")
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "run"} for line in found]


def train(model: Any, optimizer: Any, watch: Watch | None, rows: Any, accumulated: int = 1) -> Any:
    """Return the losses of a loop, and the random state at its end."""
    losses = []
    for number, batch in enumerate(rows, 1):
        with nothing() if watch is None else watch.step(batch):
            loss = model(**batch).loss
            (loss / accumulated).backward()
            if number % accumulated == 0:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
        losses.append(loss.item())
        if watch is not None and watch.should_stop:
            break
    return losses, torch.get_rng_state()


def nothing() -> Any:
    return torch.enable_grad()


def model_and_optimizer(dropout: float = 0.0) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(7)
    model = tiny_gpt2(tied=False, dropout=dropout).train()
    return model, torch.optim.AdamW(model.parameters(), 1e-2)


@pytest.mark.parametrize("accumulated", [1, 2])
def test_a_loop_logs_what_a_trainer_logs(tmp_path: Path, accumulated: int) -> None:
    games = Games(targets=4)
    watched = CausalLMModule(tiny_gpt2(tied=False, dropout=0.0))
    trainer = L.Trainer(
        max_epochs=1,
        accumulate_grad_batches=accumulated,
        gradient_clip_val=0.5,
        default_root_dir=tmp_path / "trainer",
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[LeakageMonitor(attacks(), every_n_steps=2, games=games)],
    )
    loader: Any = DataLoader(batches(), batch_size=None)  # type: ignore[arg-type]
    trainer.fit(watched, loader)
    module = CausalLMModule(tiny_gpt2(tied=False, dropout=0.0))
    optimizer = module.configure_optimizers()
    settings = {"every_n_steps": 2, "games": games, "folder": tmp_path / "loop"}
    with Watch(module.model.train(), optimizer, attacks(), **settings) as watch:
        train(module.model, optimizer, watch, batches(), accumulated)
    for trained, looped in zip(watched.parameters(), module.parameters(), strict=True):
        assert torch.equal(trained, looped)
    assert lines(tmp_path / "loop") == lines(tmp_path / "trainer")
    assert {line["attack"] for line in lines(tmp_path / "loop")} == {
        *("flatchat", "bag_of_words", "fc_membership"),
    }
    assert all(line["unknown"] is None for line in lines(tmp_path / "loop")[3:])
    assert lines(tmp_path / "loop", "run")[-1]["how"] == "finished"


def test_the_loop_is_not_disturbed(tmp_path: Path) -> None:
    plain, optimizer = model_and_optimizer(dropout=0.2)
    expected = train(plain, optimizer, None, batches(), 2)
    model, optimizer = model_and_optimizer(dropout=0.2)
    with Watch(model, optimizer, attacks(), folder=tmp_path, every_n_steps=1) as watch:
        losses, state = train(model, optimizer, watch, batches(), 2)
    assert losses == expected[0]
    assert torch.equal(state, expected[1])
    for a, b in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert watch.engine.results.looks == 4
    assert "step" not in vars(optimizer)


def test_what_is_read_is_the_clipped_sum_of_the_batches(tmp_path: Path) -> None:
    model, optimizer = model_and_optimizer()
    probe = Probe()
    with Watch(model, optimizer, [probe], folder=tmp_path, every_n_steps=1) as watch:
        train(model, optimizer, watch, batches(4), 2)
    again, optimizer = model_and_optimizer()
    for n, (step, _, seen) in enumerate(probe.seen):
        rows = [torch.cat([b["input_ids"] for b in batches(4)[2 * n : 2 * n + 2]])]
        again(input_ids=rows[0], labels=rows[0]).loss.backward()
        torch.nn.utils.clip_grad_norm_(again.parameters(), 0.5)
        torch.testing.assert_close(seen, again.lm_head.weight.grad, rtol=1e-3, atol=1e-6)
        optimizer.step()
        optimizer.zero_grad()
        assert step == n
    assert len(probe.seen) == 2
    # Nothing predicts a text's first token, so that its row of the head has no part of its own.
    types = len(torch.cat([b["input_ids"][:, 1:] for b in batches(4)[:2]]).unique())
    assert lines(tmp_path)[0]["n"] == types


def at_end(model: Any, optimizer: Any) -> None:
    optimizer.zero_grad()


def of_model(model: Any, optimizer: Any) -> None:
    model.zero_grad()


def to_zeros(model: Any, optimizer: Any) -> None:
    optimizer.zero_grad(set_to_none=False)


@pytest.mark.parametrize("clear", [at_end, of_model, to_zeros])
@pytest.mark.parametrize("when", ["at the end", "at the start"])
def test_a_skipped_step_is_not_looked_at(
    tmp_path: Path, clear: Callable[..., None], when: str
) -> None:
    model, optimizer = model_and_optimizer()
    with Watch(model, optimizer, [BagOfWords()], folder=tmp_path, every_n_steps=1) as watch:
        for number, batch in enumerate(batches(4)):
            with watch.step(batch):
                if when == "at the start":
                    clear(model, optimizer)
                model(**batch).loss.backward()
                if number != 1:
                    optimizer.step()
                if when == "at the end":
                    clear(model, optimizer)
    assert watch.loop.steps == 4
    # Whether a step at the start is skipped is known after the batch's own forward.
    steps = [0, 2, 3] if when == "at the end" else [0, 3]
    assert [line["step"] for line in lines(tmp_path)] == steps
    assert all(line["metrics"]["f1"]["value"] == 1.0 for line in lines(tmp_path))


def test_a_scaler_that_skips(tmp_path: Path) -> None:
    model, optimizer = model_and_optimizer()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)  # type: ignore[attr-defined]
    probe = Probe()
    with Watch(
        model, optimizer, [BagOfWords(), probe], folder=tmp_path, every_n_steps=1, scaler=scaler
    ) as watch:
        for number, batch in enumerate(batches(3)):
            with watch.step(batch):
                loss = model(**batch).loss * (float("inf") if number == 1 else 1.0)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
    found = [line for line in lines(tmp_path) if line["attack"] == "bag_of_words"]
    assert [line["step"] for line in found] == [0, 2]
    assert all(line["metrics"]["f1"]["value"] == 1.0 for line in found)
    again, _ = model_and_optimizer()
    again(**batches(3)[0]).loss.backward()
    torch.testing.assert_close(probe.seen[0][2], again.lm_head.weight.grad)


def test_several_optimizers(tmp_path: Path) -> None:
    model, _ = model_and_optimizer()
    head = [*model.lm_head.parameters()]
    other = [p for p in model.parameters() if p is not head[0]]
    pair = [torch.optim.SGD(head, 0.1), torch.optim.Adam(other)]
    with Watch(model, pair, [FlatChat(oracle_n_types=12), BagOfWords()], folder=tmp_path,
               every_n_steps=1) as watch:  # fmt: skip
        for batch in batches(3):
            with watch.step(batch):
                model(**batch).loss.backward()
                for optimizer in pair:
                    optimizer.step()
                    optimizer.zero_grad()
    assert [line["step"] for line in lines(tmp_path)] == [0, 0, 1, 1, 2, 2]
    assert watch.latest[F1] == 1.0


@pytest.mark.slow
def test_a_compiled_model(tmp_path: Path) -> None:
    plain, optimizer = model_and_optimizer()
    expected, _ = train(torch.compile(plain, backend="aot_eager"), optimizer, None, batches(4))
    torch.compiler.reset()
    model, optimizer = model_and_optimizer()
    compiled: Any = torch.compile(model, backend="aot_eager")
    with Watch(compiled, optimizer, attacks(), folder=tmp_path, every_n_steps=1) as watch:
        losses, _ = train(compiled, optimizer, watch, batches(4))
    assert losses == expected
    assert watch.latest[F1] == 1.0
    assert watch.latest["leakage/fc_membership/auc"] == 1.0


def test_an_exception_ends_the_record_and_removes_every_tap(tmp_path: Path) -> None:
    model, optimizer = model_and_optimizer()
    backward = torch.autograd.backward
    watch = Watch(model, optimizer, attacks(), folder=tmp_path, every_n_steps=1)

    def run() -> None:
        with watch:
            for number, batch in enumerate(batches()):
                with watch.step(batch):
                    model(**batch).loss.backward()
                    1 / (1 - number)
                    optimizer.step()
                    optimizer.zero_grad()

    with pytest.raises(ZeroDivisionError):
        run()
    assert lines(tmp_path, "run")[-1]["how"] == "ZeroDivisionError"
    assert torch.autograd.backward is backward
    assert "step" not in vars(optimizer)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    with pytest.raises(RuntimeError, match="no run has begun"), watch.step(batches()[0]):
        pass


def test_a_batch_that_is_lost_makes_its_look_unknown(tmp_path: Path) -> None:
    model, optimizer = model_and_optimizer()
    with Watch(model, optimizer, [BagOfWords()], folder=tmp_path, every_n_steps=1) as watch:
        for number, batch in enumerate(batches(4)):
            try:
                with watch.step(batch):
                    model(**batch).loss.backward()
                    if number == 1:
                        raise MemoryError
                    optimizer.step()
                    optimizer.zero_grad()
            except MemoryError:
                pass  # its gradient stays, and is part of the next step
    unknown = [line["unknown"] for line in lines(tmp_path)]
    assert [why is None for why in unknown] == [True, False, True]
    assert "MemoryError" in unknown[1]


def test_gates(tmp_path: Path) -> None:
    model, optimizer = model_and_optimizer()
    gate = Threshold("leakage/worst/words", at_most=0.5, patience=2)
    with Watch(model, optimizer, [BagOfWords()], [gate], every_n_steps=1, folder=tmp_path) as watch:
        losses, _ = train(model, optimizer, watch, batches())
    assert len(losses) == 3
    assert gate.fired is not None
    assert gate.fired.step == 2
    assert "CausalLMFineTuning" in str(gate.fired)
    decided = [line for line in lines(tmp_path, "run") if line["kind"] == "gate"]
    assert [line["did"] for line in decided] == ["stopped"]
    gate = Threshold(F1, at_most=0.5, action="raise")
    model, optimizer = model_and_optimizer()
    with (
        pytest.raises(LeakageLimitExceeded, match="Threshold 'bag_of_words/f1' raised"),
        Watch(model, optimizer, [BagOfWords()], [gate], folder=tmp_path / "raise") as watch,
    ):
        train(model, optimizer, watch, batches())
    assert lines(tmp_path / "raise", "run")[-1]["how"] == "LeakageLimitExceeded"


def test_a_strict_gate_fires_where_nothing_was_ever_known(tmp_path: Path) -> None:
    model, optimizer = model_and_optimizer()
    gate = Threshold(F1, at_most=0.5)
    with Watch(model, optimizer, [BagOfWords()], [gate], folder=tmp_path) as watch:
        for batch in batches(3):
            with watch.step(batch):
                model(**batch).loss.backward()  # accumulates for ever
        watch.loop.steps += 1
    assert gate.fired is not None
    assert watch.should_stop


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"gates": [Threshold(F1, at_most=0.5, action="harden")]}, ValueError, "nothing to turn"),
        ({"every_steps": 2}, TypeError, "Did you mean every_n_steps="),
        ({"precision": "bf16"}, ValueError, "precision must be"),
        ({"stages": "released"}, ValueError, "stages must be"),
    ],
)
def test_what_cannot_be_meant_is_refused(
    tmp_path: Path, settings: Any, error: type[Exception], words: str
) -> None:
    model, optimizer = model_and_optimizer()
    with pytest.raises(error, match=words):
        Watch(model, optimizer, [BagOfWords()], folder=tmp_path, **settings).__enter__()
    assert "step" not in vars(optimizer)


@pytest.mark.parametrize(
    ("gates", "words"),
    [
        ([Threshold("leakage/no/f1", at_most=0.5)], "Watch does not log"),
        ([Threshold(F1, at_most=0.5)] * 2, "two gates are named"),
    ],
)
def test_gates_are_checked_before_the_loop(tmp_path: Path, gates: Any, words: str) -> None:
    model, optimizer = model_and_optimizer()
    with pytest.raises(ValueError, match=words):
        Watch(model, optimizer, [BagOfWords()], gates, folder=tmp_path)


def test_autocast_that_was_not_declared_is_refused(tmp_path: Path) -> None:
    batch = batches(1)[0]
    for precision, works in (("bf16-mixed", True), (None, False)):
        model, optimizer = model_and_optimizer()
        expected = torch.enable_grad() if works else pytest.raises(ValueError, match="bfloat16")
        with (
            expected,
            Watch(
                model, optimizer, [BagOfWords()], folder=tmp_path / str(works), precision=precision
            ) as watch,
            watch.step(batch),
            torch.autocast("cpu", torch.bfloat16),
        ):
            model(**batch).loss.backward()
            optimizer.step()


def test_the_trained_weights_are_tested_where_the_loader_is_known(tmp_path: Path) -> None:
    model, optimizer = model_and_optimizer()
    generator = torch.Generator().manual_seed(1)
    rows = [{"input_ids": x, "labels": x} for x in torch.randint(3, 60, (400, 12), generator=generator)]  # fmt: skip  # noqa: E501
    loader: Any = DataLoader(rows, batch_size=8, shuffle=True)  # type: ignore[arg-type]
    looks = Memorization(max_overhead=4 / 3, looks=(0.5, 0.9))
    with Watch(
        model, optimizer, [Extraction()], loader=loader, folder=tmp_path, memorization=looks
    ) as watch:
        train(model, optimizer, watch, loader)
    steps = [line["step"] for line in lines(tmp_path)]
    assert steps == [25, 45, 50]
    assert "leakage/extraction/extracted" in watch.latest


def test_a_loop_goes_on_from_its_state(tmp_path: Path) -> None:
    model, optimizer = model_and_optimizer()
    gate = Threshold(F1, at_most=0.5, patience=4)
    with Watch(model, optimizer, [BagOfWords()], [gate], every_n_steps=1, folder=tmp_path) as first:
        train(model, optimizer, first, batches(3))
        state = first.state_dict()
    gate = Threshold(F1, at_most=0.5, patience=4)
    again = Watch(model, optimizer, [BagOfWords()], [gate], every_n_steps=1, folder=tmp_path)
    again.load_state_dict(state)
    with again:
        train(model, optimizer, again, batches())
    assert gate.fired is not None
    assert gate.fired.step == 4
    assert [line["step"] for line in lines(tmp_path)] == [0, 1, 2, 3, 4]


def test_metrics_of_a_loop_are_logged_where_they_change(tmp_path: Path) -> None:
    model, optimizer = model_and_optimizer()
    rows = batches(8) * 8  # 64 steps
    with Watch(model, optimizer, [BagOfWords()], every_n_steps=1000, folder=tmp_path) as watch:
        for step, batch in enumerate(rows, 1):
            with watch.step(batch):
                loss = model(**batch).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                watch.utility["train_loss"] = 100.0 - step  # changes at each step
                if step in (20, 40, 60):
                    watch.utility["val_loss"] = {20: 3.0, 40: 2.0, 60: 2.5}[step]
    record = [line for line in lines(tmp_path, "run") if line["kind"] == "metrics"]
    values = {
        name: [(line["step"], line["utility"][name]) for line in record if name in line["utility"]]
        for name in ("val_loss", "train_loss")
    }
    assert values["val_loss"] == [(20, 3), (40, 2), (60, 2.5), (64, 2.5)]
    assert values["train_loss"] == [(51, 49), (64, 36)]  # the look at step 0 has the first
    assert watch.latest["utility/val_loss_best"] == 2.0
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [one.step for one in events.Scalars("utility/val_loss")] == [20, 40, 60, 64]


def test_steps_that_would_be_missed_are_refused(tmp_path: Path) -> None:
    model, optimizer = model_and_optimizer()
    watch = Watch(model, optimizer, [BagOfWords()], every_n_steps=1, folder=tmp_path)
    [batch] = batches(1)
    with pytest.raises(RuntimeError, match="put the loop into `with Watch"), watch.step(batch):
        pass

    def step_outside() -> None:
        with watch.step(batch):
            model(**batch).loss.backward()
        optimizer.step()

    with pytest.raises(RuntimeError, match=r"put forward, backward and optimizer.step"), watch:
        step_outside()
    optimizer.step()  # the tap is removed


class OneOf(torch.nn.Module):
    """Holds a model, as a class of another package's name would."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.module = model


@pytest.mark.parametrize(
    ("wrapper", "words"),
    [
        ("DeepSpeedEngine", "DeepSpeed keeps"),
        ("FullyShardedDataParallel", "FSDP and tensor"),
        ("DataParallel", "DataParallel copies"),
    ],
)
def test_wrappers_of_gradients_in_parts_are_refused(
    tmp_path: Path, wrapper: str, words: str
) -> None:
    model, optimizer = model_and_optimizer()
    wrapped = type(wrapper, (OneOf,), {})(model)
    with pytest.raises(ValueError, match=words):
        Watch(wrapped, optimizer, [BagOfWords()], folder=tmp_path).__enter__()
    assert "step" not in vars(optimizer)


def test_what_fully_shard_makes_is_refused(tmp_path: Path) -> None:
    model, optimizer = model_and_optimizer()
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        fully_shard(model)
        with pytest.raises(ValueError, match="FSDP and tensor"):
            Watch(model, optimizer, [BagOfWords()], folder=tmp_path).__enter__()
    finally:
        torch.distributed.destroy_process_group()


def test_zeros_are_looked_for_at_looks_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = model_and_optimizer()
    reads: set[int] = set()
    plain, number = torch.Tensor.any, -1
    weights = {p.shape for p in model.parameters()}

    def noted(tensor: torch.Tensor, *more: Any, **settings: Any) -> torch.Tensor:
        if tensor.shape in weights:
            reads.add(number)
        return plain(tensor, *more, **settings)

    monkeypatch.setattr(torch.Tensor, "any", noted)
    with Watch(model, optimizer, [BagOfWords()], folder=tmp_path, every_n_steps=3) as watch:
        for number, batch in enumerate(batches()):
            with watch.step(batch):
                model(**batch).loss.backward()
                if number % 2:
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=False)
    assert reads == {0, 1, 6, 7}  # those of steps 0 and 3
    assert [line["step"] for line in lines(tmp_path)] == [0, 3]


def test_a_step_in_a_batch_that_fails_counts(tmp_path: Path) -> None:
    model, optimizer = model_and_optimizer()
    with Watch(model, optimizer, [BagOfWords()], folder=tmp_path, every_n_steps=1) as watch:
        for number, batch in enumerate(batches(5)):
            try:
                with watch.step(batch):
                    model(**batch).loss.backward()
                    if number != 2:  # adds to the next batch
                        optimizer.step()
                        optimizer.zero_grad()
                    if number == 1:
                        raise MemoryError
            except MemoryError:
                pass
    assert watch.loop.steps == 4
    assert [line["step"] for line in lines(tmp_path)] == [0, 1, 2, 3]
    assert [line["unknown"] is None for line in lines(tmp_path)] == [True, False, True, True]


def test_the_board_is_closed(tmp_path: Path) -> None:
    model, optimizer = model_and_optimizer()
    with Watch(model, optimizer, [BagOfWords()], folder=tmp_path, every_n_steps=1) as watch:
        (board,) = watch._loggers
        train(model, optimizer, watch, batches(2))
    assert board.writer.file_writer is None


def test_arguments_that_are_wrong_are_named() -> None:
    model, _ = model_and_optimizer()
    with pytest.raises(TypeError, match="optimizer must be a torch optimizer, got NoneType"):
        Watch(model, None)  # type: ignore[arg-type]
