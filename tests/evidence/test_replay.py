"""A kept step that is repeated gives the same to the bit, or it is said what differs."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from transformers import Trainer

from lightning_fedleak import DPSGD, BagOfWords, DefendedStrategy
from lightning_fedleak.cli.command_line import main
from lightning_fedleak.engine import Evidence, WatchSettings
from lightning_fedleak.evidence import CONTRADICTED, HOLDS, OPEN, verify_run
from lightning_fedleak.private_files import load_state, save_state
from lightning_fedleak.report.records import RECORD, RESULTS, hash_line, is_drawn
from lightning_fedleak.trainers import LeakageCallback, Watch
from tests.callbacks.runs import Probe, fit, monitor_with
from tests.evidence.test_repetition import IDS, change, read_lines
from tests.helpers.lightning_modules import random_token_loader
from tests.helpers.models import tiny_gpt2
from tests.trainers.test_transformers import trainer_of

STEPS = (0, 2, 4, 5)


def own_loop(
    folder: Path, evidence: Evidence | None = None, *, order: int = 0, attacks: Any = None
) -> list[Any]:
    """Train six steps of two batches, with dropout and a schedule; return all that may differ."""
    torch.manual_seed(0)
    model = tiny_gpt2(tied=False).train()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer)
    rows = DataLoader(IDS, 2, shuffle=True, generator=torch.Generator().manual_seed(order))
    settings = WatchSettings(evidence=evidence, tensorboard=False)
    played = attacks or [BagOfWords()]
    watch = Watch(model, optimizer, played, folder=folder, every_n_steps=4, settings=settings)
    with watch:
        for number, ids in enumerate(batch for _ in range(2) for batch in rows):
            if watch.skips():
                continue
            with watch.step(ids):
                (model(input_ids=ids, labels=ids).loss / 2).backward()
                if number % 2:
                    optimizer.step()
                    optimizer.zero_grad()
                    schedule.step()
    return [*model.state_dict().values(), torch.get_rng_state()]


def other_rows(folder: Path, evidence: Evidence | None = None) -> list[Any]:
    return own_loop(folder, evidence, order=1)


def by_all_attacks(folder: Path, evidence: Evidence | None = None) -> list[Any]:
    return own_loop(folder, evidence, attacks="auto")


def by_lightning(folder: Path, evidence: Evidence | None = None) -> list[Any]:
    """Fit two epochs of four steps, with dropout and AdamW."""
    monitor = monitor_with([Probe()], every_n_steps=3, folder=folder, evidence=evidence)
    loader = random_token_loader(32)
    trainer = fit([monitor], folder.parent, logger=False, max_epochs=2, loader=loader)
    return [*trainer.lightning_module.state_dict().values(), torch.get_rng_state()]


def by_trainer(folder: Path, evidence: Evidence | None = None) -> list[Any]:
    """Train two epochs of three steps of two batches, in an order that the Trainer draws."""
    torch.manual_seed(0)
    model = tiny_gpt2(tied=False)
    rows = [{"input_ids": row.tolist(), "labels": row.tolist()} for row in IDS]
    trainer = trainer_of(
        folder, model, kind=Trainer, train_dataset=rows, num_train_epochs=2,
        per_device_train_batch_size=2, gradient_accumulation_steps=2,
    )  # fmt: skip
    settings = WatchSettings(evidence=evidence, tensorboard=False)
    callback = LeakageCallback(trainer, [BagOfWords()], every_n_steps=2, settings=settings)
    trainer.add_callback(callback)
    trainer.train()
    return [*model.state_dict().values(), torch.get_rng_state()]


TRAININGS = own_loop, by_lightning, by_trainer


def replay(place: Path, step: int, train: str = "own_loop") -> int:
    """Return the exit code of the command."""
    arguments = ["--evidence", str(place / "kept"), "--step", str(step), "--train"]
    return main(["replay", str(place / "run"), *arguments, f"{__name__}:{train}"])


@pytest.fixture(scope="module", params=TRAININGS, ids=lambda train: train.__name__)
def each(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A training, and the folder of its run, its kept steps and its state at the end."""
    place = tmp_path_factory.mktemp(request.param.__name__)
    state = request.param(place / "run", Evidence(place / "kept", steps=STEPS))
    return request.param, place, state


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    own_loop(tmp_path / "run", Evidence(tmp_path / "kept", steps=STEPS))
    return tmp_path


def test_training_is_the_same_as_without(each: Any, tmp_path: Path) -> None:
    train, _, state = each
    plain = train(tmp_path / "plain")
    assert all(torch.equal(a, b) for a, b in zip(plain, state, strict=True))


@pytest.mark.parametrize("step", STEPS)
def test_a_kept_step_is_repeated_to_the_bit(
    each: Any, step: int, capsys: pytest.CaptureFixture[str]
) -> None:
    train, place, _ = each
    results = [line for line in read_lines(place / "run", RESULTS) if line["step"] == step]
    values = sum(len(line["metrics"]) for line in results)
    assert values
    assert replay(place, step, train.__name__) == HOLDS
    text = f"checked: step {step} again: its update, loss and {values} values of leakage"
    assert text in capsys.readouterr().out


def test_what_depends_on_earlier_looks_is_noted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Words are compared, with the controls of earlier looks."""
    by_all_attacks(tmp_path / "run", Evidence(tmp_path / "kept", steps=STEPS))
    assert replay(tmp_path, 5, "by_all_attacks") == HOLDS
    assert "not compared: gradient_membership, subspace_membership" in capsys.readouterr().out


def test_what_is_kept_is_private_and_trained(tmp_path: Path) -> None:
    module = tiny_gpt2(tied=False)
    module.transformer.requires_grad_(False)
    ids, optimizer = IDS[:2], torch.optim.SGD(module.lm_head.parameters(), 0.1)
    settings = WatchSettings(evidence=Evidence(tmp_path / "kept", steps=[0]), tensorboard=False)
    watch = Watch(module, optimizer, [BagOfWords()], folder=tmp_path / "run", settings=settings)
    with watch, watch.step(ids):
        module(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    [file] = (tmp_path / "kept").rglob("*.safetensors")
    modes = [one.stat().st_mode & 0o777 for one in (tmp_path / "kept", file.parent, file)]
    assert modes == [0o700, 0o700, 0o600]
    assert [*load_state(file)["weights"]] == ["lm_head.weight"]


def number_of(place: Path, name: str, step: int, **fields: Any) -> int:
    """Return the number of the line of a step."""
    lines = enumerate(read_lines(place / "run", name))
    fields["step"] = step
    return next(n for n, one in lines if all(one.get(k) == v for k, v in fields.items()))


@pytest.mark.parametrize(
    ("name", "change_line", "named"),
    [
        (RESULTS, lambda line: line["metrics"]["f1"].update(value=0.1), "leakage, shared"),
        (RECORD, lambda line: line.update(loss=[1.0, 2.0]), "loss is not what"),
        (RECORD, lambda line: line.update(weights="0" * 64), "update is not what"),
        (RECORD, lambda line: line.update(file="0" * 64), "is not the file that was kept"),
    ],
    ids=["leakage", "loss", "update", "file"],
)
def test_a_log_that_was_changed_is_contradicted(
    kept: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    change_line: Callable[[Any], object],
    named: str,
) -> None:
    """All its hashes fit again."""
    kinds = {} if name == RESULTS else {"kind": "kept"}
    change(kept / "run", name, number_of(kept, name, 2, **kinds), change_line)
    assert verify_run(kept / "run").verdict.status == HOLDS
    assert replay(kept, 2) == CONTRADICTED
    assert named in capsys.readouterr().out


def test_kept_weights_that_were_changed_are_found_although_the_log_names_the_file(
    kept: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    [file] = kept.rglob("step-2.safetensors")
    state = load_state(file)
    state["weights"]["lm_head.weight"][0, 0] += 1e-3
    save_state(file, state)
    assert replay(kept, 2) == CONTRADICTED
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    number = number_of(kept, RECORD, 2, kind="kept")
    change(kept / "run", RECORD, number, lambda line: line.update(file=digest))
    capsys.readouterr()
    assert replay(kept, 2) == CONTRADICTED
    assert "is not what the repetition gives" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("fact", "train", "named"),
    [
        ({}, "other_rows", "another batch"),
        ({"training": {"strategy": "DDP"}}, "own_loop", "different training"),
        ({"machine": {"instructions": "?"}}, "own_loop", "Losses are within 0.1% of each other"),
    ],
    ids=["rows", "settings", "platform"],
)
def test_what_cannot_be_compared_is_open(
    kept: Path, capsys: pytest.CaptureFixture[str], fact: Any, train: str, named: str
) -> None:
    for name, values in fact.items():
        change(kept / "run", RECORD, 0, lambda line, n=name, v=values: line[n].update(v))
    assert replay(kept, 5, train) == OPEN
    assert named in capsys.readouterr().out


def test_a_step_that_was_not_kept_is_refused(
    kept: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert replay(kept, 1) == 1
    assert "takes one of [0, 2, 4, 5]" in capsys.readouterr().err
    assert main(["replay", "x", "--evidence", "y", "--step", "0", "--train", "no:f"]) == 1


# ---- which steps are kept -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("drawn")
    while not place.exists() or len([*(place / "kept").rglob("*.safetensors")]) in (0, 6):
        place = tmp_path_factory.mktemp("drawn")
        own_loop(place / "run", Evidence(place / "kept", share=0.5))
    return place


def test_kept_steps_are_those_of_the_seed_that_was_committed_to(drawn: Path) -> None:
    begin, *_, end = lines = read_lines(drawn / "run", RECORD)
    seed_hash = hash_line(end["seed"].encode())
    assert begin["evidence"] == {"first": 0, "share": 0.5, "seed_hash": seed_hash}
    steps = [line["step"] for line in lines if line["kind"] == "kept"]
    assert steps == [step for step in range(6) if is_drawn(end["seed"], 0.5, step)]
    check = verify_run(drawn / "run")
    assert check.verdict.status == HOLDS
    assert "that the kept steps are those that were to be" in check.checked


@pytest.mark.parametrize("edit", ["seed", "step", "share"])
def test_other_steps_than_the_seed_draws_are_contradicted(
    drawn: Path, tmp_path: Path, edit: str
) -> None:
    place = Path(shutil.copytree(drawn, tmp_path / "copy"))
    number = next(
        n for n, one in enumerate(read_lines(place / "run", RECORD)) if one["kind"] == "kept"
    )
    edits: dict[str, tuple[int, Callable[[Any], object]]] = {
        "seed": (-1, lambda line: line.update(seed="0" * 64)),
        "step": (number, lambda line: line.update(step=7)),
        "share": (0, lambda line: line["evidence"].update(share=1.0)),
    }
    change(place / "run", RECORD, *edits[edit])
    verdict = verify_run(place / "run").verdict
    assert verdict.status == CONTRADICTED
    assert ("seed" if edit == "seed" else "step") in verdict.contradictions[0]


def test_a_step_that_could_not_be_kept_is_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr("lightning_fedleak.engine.evidence.save_state", full)
    with pytest.warns(UserWarning, match="is not kept as evidence"):
        own_loop(tmp_path / "run", Evidence(tmp_path / "kept", steps=[1]))
    verdict = verify_run(tmp_path / "run").verdict
    assert verdict.status == OPEN
    assert "steps [1] could not be kept" in verdict.open[0]


# ---- refusals -----------------------------------------------------------------------------------


def test_noise_is_not_kept(tmp_path: Path) -> None:
    strategy = DefendedStrategy("auto", defenses=[DPSGD(1.0, noise_multiplier=1.0)])
    monitor = monitor_with([Probe()], every_n_steps=4, evidence=Evidence(tmp_path / "kept"))
    with pytest.raises(ValueError, match="noise that is kept voids its guarantee"):
        fit([monitor], tmp_path / "run", strategy=strategy, logger=False)


def test_folders_that_others_may_get_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="lies in the run's folder"):
        own_loop(tmp_path, Evidence(tmp_path / "kept"))
    (tmp_path / "open").mkdir(mode=0o755)
    with pytest.raises(ValueError, match="chmod 700"):
        own_loop(tmp_path / "run", Evidence(tmp_path / "open"))
