"""Planted values, ranked by the trained weights in a Trainer."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

from lightning_fedleak import Games, LeakageMonitor, RiskGate
from lightning_fedleak.attacks.memorization import Entities, Loss
from lightning_fedleak.callbacks import WatchSettings
from lightning_fedleak.engine import Memorization
from lightning_fedleak.evaluation.canaries import with_entities
from lightning_fedleak.report import findings, model_card, page, read
from tests.canaries.test_with_entities import PHONE, TOKENIZER
from tests.engine.channels.test_memorization import fit, lines


@cache
def planted(seed: int = 2, count: int = 48) -> Any:
    ids = torch.randint(40, 90, (140, 60), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[:, :30] = -100
    rows = [{"input_ids": a, "labels": b} for a, b in zip(ids, labels, strict=True)]
    return with_entities(rows, PHONE, times=(1, 8), tokenizer=TOKENIZER, count=count, seed=seed)


def model(layers: int = 2) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    sizes = {"vocab_size": 100, "n_embd": 48, "n_head": 4, "n_layer": layers, "n_positions": 60}
    return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, bos_token_id=0, eos_token_id=0))


def watch(data: Any, folder: Path, candidates: int = 30, **more: Any) -> LeakageMonitor:
    return LeakageMonitor(
        [Entities(candidates)], games=Games(entities=data.entities), folder=folder,
        settings=WatchSettings(**more),
    )  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any, RiskGate, RiskGate]:
    folder, data = tmp_path_factory.mktemp("run"), planted()
    monitor = watch(data, folder, 20, report=True)
    gates = [
        RiskGate(f"leakage/entity/phone/{place}/first", at_most=0.1, action="warn")
        for place in ("label", "prompt")
    ]
    _, module = fit([], model(layers=1), data, max_epochs=2, lr=1e-2)
    fit([monitor, *gates], module, data, max_epochs=2)
    return folder, monitor, module.model.eval(), *gates


def test_values_in_labels_rank_first_and_masked_ones_do_not(run: Any) -> None:
    folder, monitor, _, label, prompt = run
    many = lines(folder, "entity/phone/label_x8")[-1]["metrics"]
    assert many["first"]["value"] > 0.8
    assert 0.15 < many["first"]["low"] <= many["first_provable"]["value"]
    assert many["median_rank"]["value"] == 1
    assert many["first_others"]["value"] <= 0.1
    assert label.fired is not None
    assert prompt.fired is None
    assert prompt._has_result
    masked = lines(folder, "entity/phone/prompt")[-1]["metrics"]
    assert masked["first"]["low"] <= 0
    assert masked["p_value"]["value"] > 0.01
    assert len(lines(folder, "entity/phone/label")) == 2  # after each epoch
    assert not any(name.startswith("leakage/worst/entity") for name in monitor.latest)


@pytest.mark.slow
def test_values_in_masked_prompts_are_flagged_in_at_most_two_of_ten_runs(tmp_path: Path) -> None:
    """Where none leaks 5% are: more than two of ten with a probability of .012.

    Where seven of ten are, as of values in labels, with a probability of .998.
    """
    flagged, label_flagged = 0, 0
    once = Memorization(looks=())  # at the end
    for seed in range(10):
        data, folder, trained = planted(seed), tmp_path / f"{seed}", model(layers=1)
        optimizer = torch.optim.AdamW(trained.parameters(), 1e-2, fused=True)
        for _ in range(3):
            for batch in DataLoader(data, batch_size=8, shuffle=True):
                trained(**batch).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        fit([watch(data, folder, 20, memorization=once)], trained, data, max_epochs=1)
        [prompt] = lines(folder, "entity/phone/prompt")
        [label] = lines(folder, "entity/phone/label")
        metrics = prompt["metrics"]
        flagged += metrics["p_value"]["value"] <= 0.05 or metrics["first"]["low"] > 0
        label_flagged += label["unknown"] is None and label["metrics"]["p_value"]["value"] <= 0.05
    assert flagged <= 2
    assert label_flagged >= 7


def test_no_value_and_no_token_is_in_a_file_of_the_run(run: Any) -> None:
    folder, *_ = run
    entities = planted().entities
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert {"leakage.jsonl", "run.jsonl", "report.html"} <= {path.name for path in files}
    for path in files:
        content = path.read_bytes()
        for row, entity in enumerate(entities.entities):
            value = entities.kinds["phone"].value(entity.number)
            assert value.encode() not in content, path
            ids = entities.token_ids[row].tolist()
            for run_of_ids in (ids[:6], ids[entity.start : entity.start + 6]):
                assert json.dumps(run_of_ids)[1:-1].encode() not in content, path
                assert ",".join(map(str, run_of_ids)).encode() not in content, path


def test_the_report_and_the_card_say_what_by_kind_and_place(run: Any) -> None:
    folder, *_ = run
    found = findings(read([folder]))
    html, card = page(found), model_card(found)
    assert "Which records, what in them" in html
    assert "which records, what in them" in card
    for text in (html, card):
        text = text.replace("\\", "")
        assert "Planted values, phone in the label, 8 times" in text
        assert "Planted values, phone in the prompt" in text
        assert "rate of rank 1, above that of values left out" in text
    assert "regurgitation (entity" not in html  # planted values are no texts of the data


def test_training_is_the_same_with_and_without(tmp_path: Path) -> None:
    data = planted(count=12)
    weights = [
        fit(callbacks, model(), data, max_epochs=1)[1].model.state_dict()
        for callbacks in ([], [watch(data, tmp_path)])
    ]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_what_is_missing_is_said_at_setup(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"games=Games\(entities=train.entities\)"):
        LeakageMonitor([Entities()])
    with pytest.raises(ValueError, match=r"Entities\(\) and .* belong together"):
        LeakageMonitor([Loss()], games=Games(entities=planted().entities))
    data = planted(count=12)
    fit([watch(data, tmp_path)], model(), [data.dataset[n] for n in range(20)], max_epochs=1)
    assert "no planted row was in a batch" in lines(tmp_path, "entity/phone/label")[-1]["unknown"]


def test_a_checkpoint_of_other_values_is_refused(tmp_path: Path) -> None:
    first, second = (watch(planted(seed, 12), tmp_path) for seed in (1, 2))
    fit([first], model(), planted(1, 12), max_steps=2, max_epochs=1)
    state = first.engine.state_dict()
    with pytest.raises(ValueError, match="is of other canaries"):
        second.engine.load_state_dict(state)
