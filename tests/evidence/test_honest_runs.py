"""Honest loops hold and drawn edits of them do not; the order of rows is an HMAC."""

import gc
import hmac
import json
import random
import shutil
import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import Parameter
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter
from transformers import Trainer

from lightning_fedleak import DPSGD, BagOfWords, DefendedStrategy
from lightning_fedleak.engine import WatchSettings, record
from lightning_fedleak.engine import record as engine_record
from lightning_fedleak.engine.record import ROW_KEY, _RowOrder
from lightning_fedleak.engine.run import Look
from lightning_fedleak.evidence import CONTRADICTED, HOLDS, OPEN, verification, verify_run
from lightning_fedleak.model.snapshots import NotYet
from lightning_fedleak.report import write
from lightning_fedleak.report.records import RECORD, RESULTS
from lightning_fedleak.trainers import Threshold, Watch
from tests.callbacks.runs import Probe, fit, monitor_with
from tests.evidence import test_verification as edits
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


@pytest.mark.parametrize(
    ("run", "settings"),
    [
        (whole, {}),
        *(
            (run, {"every_n_steps": 2})
            for run in (whole, accumulated, skipping, failing_looks, failing, retrying, stopped)
        ),
        (stopped_by_an_unknown_and_gone_on, {"every_n_steps": 2}),
    ],
)
def test_an_honest_loop(tmp_path: Path, run: Any, settings: dict[str, Any]) -> None:
    gates = [Threshold("leakage/worst/words", at_most=0.5)]
    gates = gates if run in (stopped, stopped_by_an_unknown_and_gone_on) else []
    run(Loop(tmp_path, gates, **settings))
    check = verify_run(tmp_path)
    assert check.status == HOLDS, check
    assert "looks at the planned steps" in check.checked


def test_a_next_look_beyond_the_end_is_no_missing_one(tmp_path: Path) -> None:
    loop, steps = Loop(tmp_path, max_overhead=1e-4), 4
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


def test_weights_that_were_not_hashed_are_open(tmp_path, monkeypatch) -> None:
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


KEY = bytes(range(32))


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Any:
    before = [*record._active_orders]  # of tests that end no run
    yield
    assert record._active_orders == before
    if not before:
        assert _BaseDataLoaderIter._next_index.__name__ == "_next_index"


def loader(seed: int, workers: int = 0, **settings: Any) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(seed)
    settings = {"batch_size": 4, "shuffle": True, "generator": generator} | settings
    return DataLoader(TensorDataset(torch.arange(10)), num_workers=workers, **settings)


def expected(batches: list[list[int]]) -> str:
    text = "".join(f"{batch}\n" for batch in batches)
    return hmac.digest(KEY, text.encode(), "sha256").hex()


@pytest.mark.parametrize("workers", [0, 2])
def test_the_code_is_of_all_rows_in_order(workers: int) -> None:
    """A data set whose values are its rows' numbers says what they were; another one is apart."""
    plain, watched, beside = loader(1), loader(1, workers), loader(3)
    order = _RowOrder(KEY)
    taken = [batch.tolist() for _ in range(2) for [batch] in watched]
    assert len(list(beside)) == 3
    assert order.code_of(watched.dataset) == expected(taken)
    order.close()
    order.close()
    assert taken == [batch.tolist() for _ in range(2) for [batch] in plain]
    swapped = [taken[1], taken[0], *taken[2:]]
    assert expected(swapped) != expected(taken)
    assert order.code_of(plain.dataset) is None


def test_single_rows_and_streams() -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Any:
            return iter(range(4))

    order = _RowOrder(KEY)
    single, stream = loader(1, batch_size=None), DataLoader(Stream())
    taken = [[int(row)] for [row] in single]
    assert len(list(stream)) == 4
    order.close()
    assert order.code_of(single.dataset) == expected(taken)
    assert order.code_of(stream.dataset) is None


class ReadOnce:
    """A batch sampler whose batches can be read once, or raise where they are read as numbers."""

    def __iter__(self) -> Any:
        yield from (iter(range(start, start + 5)) for start in (0, 5))


def test_batches_that_can_be_read_once_reach_the_training() -> None:
    batches: Any = ReadOnce()
    order = _RowOrder(KEY)
    rows = DataLoader(TensorDataset(torch.arange(10)), batch_sampler=batches)
    assert [batch.tolist() for [batch] in rows] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    order.add(rows.dataset, torch.tensor([float("nan")]))  # which int() refuses
    order.close()
    assert order.code_of(rows.dataset) is None


def test_data_sets_are_not_kept_in_memory() -> None:
    order, beside = _RowOrder(KEY), loader(1)
    plain = [torch.tensor(number) for number in range(4)]  # a list takes no weak reference
    list(beside)
    list(DataLoader(plain))  # type: ignore[arg-type]
    gone = weakref.ref(beside.dataset)
    del beside
    gc.collect()
    assert gone() is None
    order.close()
    assert order.code_of(plain) == expected([[0], [1], [2], [3]])


def end_of(folder: Path) -> dict[str, Any]:
    [path] = folder.rglob(RECORD)
    return json.loads(path.read_text().splitlines()[-1])


def test_a_watch_commits_with_a_key_of_its_own(tmp_path: Path) -> None:
    model = tiny_gpt2(tied=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    ids = torch.randint(3, 60, (10, 6))
    rows = DataLoader(TensorDataset(ids), 4, shuffle=True)
    order = []
    with Watch(model, optimizer, [BagOfWords()], loader=rows, folder=tmp_path) as watch:
        for [batch] in rows:
            order.append([int((ids == row).all(1).nonzero()) for row in batch])
            with watch.step({"input_ids": batch, "labels": batch}):
                model(input_ids=batch, labels=batch).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
    file = tmp_path / ROW_KEY
    assert file.stat().st_mode & 0o777 == 0o600
    key = bytes.fromhex(json.loads(file.read_text())["key"])
    text = "".join(f"{batch}\n" for batch in order)
    assert end_of(tmp_path)["row_order"] == hmac.digest(key, text.encode(), "sha256").hex()


def test_monitors_of_one_fit_share_a_key(tmp_path: Path) -> None:
    monitors = [monitor_with([Probe(name=n)], every_n_steps=4) for n in ("one", "two")]
    fit(monitors, tmp_path, logger=False)
    lines = [json.loads(line) for path in tmp_path.rglob(RECORD) for line in path.open()]
    codes = [line["row_order"] for line in lines if line["kind"] == "end"]
    assert len(codes) == 2
    assert len(set(codes)) == 1
    [key] = tmp_path.rglob(ROW_KEY)
    again = tmp_path / "again"
    again.mkdir()
    shutil.copy(key, again)
    fit([monitor_with([Probe()], every_n_steps=4)], again, logger=False)
    assert json.loads((again / RECORD).read_text().splitlines()[-1])["row_order"] == codes[0]


def test_with_an_account_there_is_none(tmp_path: Path) -> None:
    strategy = DefendedStrategy("auto", defenses=[DPSGD(1.0, noise_multiplier=1.0)])
    fit([monitor_with([Probe()], every_n_steps=4)], tmp_path, strategy=strategy, logger=False)
    assert end_of(tmp_path)["row_order"] is None
    assert not list(tmp_path.rglob(ROW_KEY))


def test_a_key_that_others_may_read_is_refused_with_a_warning(tmp_path: Path) -> None:
    (tmp_path / ROW_KEY).write_text(json.dumps({"key": KEY.hex()}))
    (tmp_path / ROW_KEY).chmod(0o644)
    with pytest.warns(UserWarning, match="order of rows is not committed to"):
        fit([monitor_with([Probe()], every_n_steps=4)], tmp_path, logger=False)
    assert end_of(tmp_path)["row_order"] is None


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
def test_no_drawn_edit_of_a_run_with_noted_hashes_holds(tmp_path, kind, monkeypatch) -> None:
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
    for number in range(10 * len(EDITS)):
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
