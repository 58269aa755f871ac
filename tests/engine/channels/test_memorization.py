"""The trained weights, looked at in a Trainer."""

import copy
import json
import math
import random
import re
import stat
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch import callbacks as lightning_callbacks
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from lightning_fedleak import DPSGD, DefendedStrategy, LeakageMonitor, RiskGate
from lightning_fedleak.attacks.memorization import Combined, Extraction, Loss
from lightning_fedleak.attacks.memorization.scores import blind_scores
from lightning_fedleak.callbacks import WatchSettings
from lightning_fedleak.defenses.accounting.accounting import curve_of
from lightning_fedleak.engine import Memorization
from lightning_fedleak.engine.channels.released.audit import Audit
from lightning_fedleak.engine.channels.released.pool import Pool, affordable, collect, forwards_of
from lightning_fedleak.engine.channels.released.training_rows import UnplayableGame
from lightning_fedleak.evaluation.auditing import curve_auc, curve_tpr
from lightning_fedleak.evaluation.canaries import leave_out
from lightning_fedleak.evaluation.metrics.released import (
    FPRS,
    highest_auc,
    min_non_members,
    visible_tpr,
)
from lightning_fedleak.model.anatomy import find_anatomy
from lightning_fedleak.model.batches import read_batch
from lightning_fedleak.model.taps.tokens import Text, compressed_bytes, token_log_probs
from lightning_fedleak.private_files import hash_tensors
from lightning_fedleak.report import findings, page, read
from tests.helpers.lightning_modules import CausalLMModule
from tests.helpers.notices import announced
from tests.helpers.processes import two_processes

SETTINGS = Memorization(max_overhead=4 / 3)
READ = partial(read_batch, kind="causal")


def rows(n: int = 400, length: int = 14) -> list[dict[str, torch.Tensor]]:
    ids = torch.randint(3, 2000, (n, length), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in ids]


def tiny(positions: int = 32) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    sizes = {"vocab_size": 2000, "n_embd": 24, "n_head": 2, "n_layer": 1, "n_positions": positions}
    return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.1, bos_token_id=0, eos_token_id=0))


def monitor(
    folder: Path, attacks: Any = None, memorization: Memorization = SETTINGS, **settings: Any
) -> LeakageMonitor:
    attacks = [Combined(), Loss(), Extraction(tokens=4)] if attacks is None else attacks
    settings = {"memorization": memorization, **settings}
    return LeakageMonitor(attacks, folder=folder, settings=WatchSettings(**settings))


def fit(
    callbacks: list[Any], model: Any = None, data: Any = None, *, lr: float = 1e-2, **more: Any
) -> tuple[L.Trainer, Any]:
    L.seed_everything(0)
    model = tiny() if model is None else model
    module = model if isinstance(model, L.LightningModule) else CausalLMModule(model, lr, "adamw")
    settings = {"max_epochs": 3, "enable_checkpointing": False, **more}
    path, validate = settings.pop("ckpt_path", None), settings.pop("validate", False)
    collate, shuffle = settings.pop("collate_fn", None), settings.pop("shuffle", True)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = L.Trainer(accelerator="cpu", callbacks=callbacks, **quiet | settings)
    data = leave_out(rows(), 140, seed=1)[0] if data is None else data
    validation = DataLoader(data, batch_size=8) if validate else None
    loader = DataLoader(data, batch_size=8, shuffle=shuffle, collate_fn=collate)
    trainer.fit(module, loader, validation, ckpt_path=path)
    return trainer, module


def combined(folder: Path, settings: Memorization = SETTINGS) -> LeakageMonitor:
    """Return a monitor with one attack on membership."""
    return monitor(folder, [Combined()], settings)


def lines(folder: Path, attack: str = "combined") -> list[dict[str, Any]]:
    text = (folder / "leakage.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, text) if line["attack"] == attack]


def of_kind(folder: Path, kind: str) -> list[dict[str, Any]]:
    text = (folder / "run.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, text) if line["kind"] == kind]


class Validated(CausalLMModule):
    """Its validation loss falls at every epoch."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", -float(self.trainer.global_step))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """Return a fit of three epochs that is saved after each, under gates that only warn."""
    folder = tmp_path_factory.mktemp("whole")
    checkpoint = ModelCheckpoint(folder / "kept", every_n_epochs=1, save_top_k=-1)
    watching, data = monitor(folder), leave_out(rows(), 140, seed=1)[0]
    gate, worst = (
        RiskGate(name, at_most=0.6, action="warn")
        for name in ("leakage/combined/auc", "leakage/worst/memorization")
    )
    with announced("leakage/choose was infinite at all 3 validations") as messages:
        _, module = fit(
            [watching, gate, worst, checkpoint], Validated(tiny(), 1e-2, "adamw"), data=data,
            enable_checkpointing=True, validate=True,
        )  # fmt: skip
    early = min((folder / "kept").glob("*.ckpt"), key=lambda path: path.stat().st_mtime)
    return SimpleNamespace(
        folder=folder, latest=watching.latest, module=module, data=data, early=early,
        series=watching.engine.series, gate=gate, worst=worst, messages=messages,
    )  # fmt: skip


def test_members_are_distinguished_from_rows_that_were_held_out(whole: Any) -> None:
    looks = lines(whole.folder)
    assert [line["step"] for line in looks] == [17, 30, 33, 66, 99]
    assert {line["stage"] for line in looks} == {"released"}
    first, second, third, *_, last = (line["metrics"] for line in looks)
    assert last["auc"]["value"] > 0.95
    assert last["auc"]["low"] > 0.7
    assert last["shown"]["value"] is None  # with far fewer non-members than 437
    assert last["p_value"]["value"] < 1e-6
    assert first["members"]["value"] < third["members"]["value"]
    assert second["alpha"]["value"] == pytest.approx(0.05 / 6)
    extraction = lines(whole.folder, "extraction")[-1]["metrics"]
    assert extraction["extracted"]["value"] is not None
    assert extraction["extracted_base"]["value"] == 0
    assert 0 < extraction["visible"]["value"] < 1
    counts = (int(last[name]["value"]) for name in ("members", "others"))
    assert last["visible"]["value"] == visible_tpr(*counts, look=5)
    assert whole.latest["leakage/worst/memorization"] == pytest.approx(last["auc"]["value"])
    assert whole.latest["monitor/failures"] == 0


def test_a_validation_after_the_fit_chooses_nothing(whole: Any) -> None:
    loader = DataLoader([whole.data[n] for n in range(8)], batch_size=8)
    whole.module.trainer.validate(whole.module, loader, verbose=False)
    assert set(whole.module.trainer.callback_metrics) == {"val_loss"}


def test_the_live_numbers_are_those_of_the_command_on_the_same_pool(whole: Any) -> None:
    pool, base = query_base(whole.data)
    after = token_log_probs(find_anatomy(whole.module.model), pool.texts)
    [facts] = of_kind(whole.folder, "pool")
    counts = int(pool.trains.sum()), int((~pool.trains).sum())
    assert (facts["way"], facts["train"], facts["others"]) == ("left out", *counts)
    assert (facts["repeated"], facts["short"], facts["searched"]) == (0, 0, 1)
    line = lines(whole.folder)[-1]
    assert line["pool"] == pool.digest(*pool.everyone("long"))
    values, _ = Audit(pool, base).part("long", after, look=5).measure(Combined(), 0.05 / 2)
    logged = line["metrics"]
    assert logged["auc"]["value"] == pytest.approx(values["auc"])
    assert logged["auc"]["low"] == pytest.approx(values["auc_low"], abs=1e-9)
    assert logged["p_value"]["value"] == pytest.approx(values["p_value"])
    assert logged["auc_joint_low"]["value"] == pytest.approx(values["auc_joint_low"])


def test_a_draw_that_the_rows_refute_is_unknown(whole: Any, tmp_path: Path) -> None:
    """A base that was trained on the members tells them apart before the run begins."""
    watching = combined(tmp_path)
    fit([watching], copy.deepcopy(whole.module.model), whole.data, max_epochs=1)
    [first, *_] = lines(tmp_path)
    assert "the rows left out are not drawn at random" in first["unknown"]
    assert "the base knows one side" in first["unknown"]
    assert math.isnan(watching.latest["leakage/worst/memorization"])


def test_the_draw_of_packed_rows_is_tested_too(tmp_path: Path) -> None:
    """Each row holds two texts; a base that was trained on the members refutes the draw."""
    packed = [row | {"position_ids": torch.arange(28) % 14} for row in rows(400, 28)]
    data = leave_out(packed, 140, seed=1)[0]
    pool = collect(DataLoader(data, batch_size=8, shuffle=True), SETTINGS, READ)
    assert pool.owners is not None
    assert {*torch.bincount(pool.owners).tolist()} == {2}
    _, module = fit([], data=data)
    fit([combined(tmp_path)], module.model, data, max_epochs=1)
    assert "the base knows one side" in lines(tmp_path)[-1]["unknown"]


def test_members_that_are_first_in_order_are_not_compared(tmp_path: Path) -> None:
    """Halves in different words come one after the other: the first alone is not like the rest."""
    data = rows()
    for row in data[200:]:
        row["input_ids"] = row["labels"] = 3 + row["input_ids"] % 100
    data = leave_out(data, 140, seed=1)[0]
    for is_shuffled in (False, True):
        folder = tmp_path / str(is_shuffled)
        fit([combined(folder)], data=data, lr=0.0, max_epochs=1, shuffle=is_shuffled)
        half, *_, end = (line.get("unknown") or "" for line in lines(folder))
        assert ("members so far and non-members are not drawn" in half) is not is_shuffled
        assert end == ""


def test_what_scores_know_without_the_training_is_logged(whole: Any) -> None:
    [channel] = {c for s, c in whole.series.items() if s.name == "combined"}
    pool, base = channel._pool, channel._base
    assert pool is not None
    assert base is not None
    scores = blind_scores(base, compressed_bytes(pool.texts), pool.texts, pool.trains)
    areas = [roc_auc_score(pool.trains.numpy(), score.numpy()) for score in scores.values()]
    expected = max(max(one, 1 - one) for one in areas)
    assert highest_auc(scores, pool.trains) == pytest.approx(expected)
    logged = whole.latest["leakage/blind/auc"]
    assert logged == pytest.approx(expected)
    assert lines(whole.folder)[-1]["metrics"]["blind/auc"]["value"] == logged


def query_base(data: Any) -> tuple[Pool, Any]:
    """Return the rows that the channel draws of some data, as the command pools them."""
    drawn = collect(DataLoader(data, batch_size=8, shuffle=True), SETTINGS, READ)
    members = drawn.trains.tolist()
    sides = [
        [text for text, inside in zip(drawn.texts, members, strict=True) if inside is side]
        for side in (True, False)
    ]
    pool = Pool.of_sides(*sides)
    return pool, token_log_probs(find_anatomy(tiny()), pool.texts)


def test_a_resumed_fit_goes_on_with_the_base_of_its_begin(whole: Any, tmp_path: Path) -> None:
    file = whole.folder / "memorization_base.safetensors"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    [channel] = {c for s, c in whole.series.items() if s.name == "combined"}
    texts = {f"text{n}": text.ids for n, text in enumerate(channel._pool.texts)}
    answers = {name: part for name, part in load_file(file).items() if name != "key"}
    # Without a key anyone could test a guess of the texts by a checkpoint: the base may be public.
    assert hash_tensors({**answers, **texts}).encode() not in whole.early.read_bytes()
    digest = hash_tensors({**load_file(file), **texts})
    assert digest.encode() in whole.early.read_bytes()
    fit([monitor(tmp_path)], ckpt_path=whole.early)
    before, resumed = lines(whole.folder)[-2:], lines(tmp_path)
    for name in ("step", "pool"):
        assert [line[name] for line in resumed] == [line[name] for line in before]
    for line, expected in zip(resumed, before, strict=True):
        for name in ("members", "others", "alpha"):
            assert line["metrics"][name] == expected["metrics"][name]
        assert line["metrics"]["auc"]["value"] > 0.7


def test_no_file_of_the_run_holds_the_ids_of_a_text(whole: Any) -> None:
    """Checkpoints are written too, and a tensor of ids is stored as its bytes."""
    [channel] = {c for s, c in whole.series.items() if s.name == "combined"}
    stored = b"".join(path.read_bytes() for path in whole.folder.rglob("*") if path.is_file())
    assert len(stored) > 10_000
    for text in channel._pool.texts:
        for kind in (torch.int64, torch.int32):
            assert text.ids.to(kind).numpy().tobytes() not in stored


@pytest.mark.parametrize("damage", ["missing", "open", "changed"])
def test_without_its_file_a_resumed_fit_is_unknown(whole: Any, tmp_path: Path, damage: str) -> None:
    file = whole.folder / "memorization_base.safetensors"
    content = file.read_bytes()
    if damage == "missing":
        file.unlink()
    elif damage == "open":
        file.chmod(0o644)
    else:
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    watching = monitor(tmp_path)
    try:
        fit([watching], ckpt_path=whole.early, max_epochs=2)
    finally:
        file.write_bytes(content)
        file.chmod(0o600)
    [line] = lines(tmp_path)
    assert "resumed without their file" in line["unknown"]
    assert math.isnan(watching.latest["leakage/combined/auc"])


def trained(callbacks: list[Any], model: Any, **more: Any) -> list[Tensor]:
    """Return the weights, optimizer state and random states that a fit ends with."""
    trainer, module = fit(callbacks, model, **more)
    [optimizer] = trainer.optimizers
    moments = [v for entry in optimizer.state.values() for v in entry.values()]
    _, words, place, *_ = np.random.get_state()
    states = [torch.get_rng_state(), torch.tensor(words.astype(np.int64)), torch.tensor(place)]
    return [*module.parameters(), *moments, *states, torch.tensor(random.getstate()[1])]


def test_lora_with_dropout_is_trained_the_same_and_read(tmp_path: Path) -> None:
    def adapted() -> Any:
        config = LoraConfig(r=8, lora_alpha=16, lora_dropout=0.1, target_modules=["c_attn", "c_fc"])
        model = tiny()
        torch.manual_seed(1)
        return get_peft_model(model, config)

    watching, more = monitor(tmp_path), {"precision": "bf16-mixed", "max_epochs": 1}
    with_looks, alone = trained([watching], adapted(), **more), trained([], adapted(), **more)
    assert all(torch.equal(*pair) for pair in zip(with_looks, alone, strict=True))
    assert watching.failures == 0
    assert watching.latest["leakage/combined/auc"] > 0.5


def test_rows_to_come_are_controls_in_the_first_epoch_only(tmp_path: Path) -> None:
    watching = combined(tmp_path)
    fit([watching], data=rows(), max_epochs=2)
    looks = lines(tmp_path)
    known = [line["metrics"]["auc"]["value"] is not None for line in looks]
    assert known == [True, True, False, False]
    assert "add leave_out" in looks[-1]["unknown"]
    assert math.isnan(watching.latest["leakage/combined/auc"])
    assert math.isnan(watching.latest["leakage/worst/memorization"])


def test_texts_of_another_distribution_and_too_few_texts_are_unknown(tmp_path: Path) -> None:
    ids = torch.randint(1900, 2000, (120, 14), generator=torch.Generator().manual_seed(3))
    other = [{"input_ids": row, "labels": row} for row in ids]
    different = (other, "from different distributions")
    for texts, why in (different, (rows(430)[400:], "are too few to decide")):
        settings = Memorization(others=texts, max_overhead=4 / 3)
        fit([combined(tmp_path / why, settings)], data=rows(), max_epochs=1)
        assert all(why in line["unknown"] for line in lines(tmp_path / why))


def test_an_attack_that_is_listed_is_refused_before_the_first_step(tmp_path: Path) -> None:
    few = LeakageMonitor([Combined()], folder=tmp_path)
    with pytest.raises(ValueError, match=r"no texts to compare: .*max_overhead"):
        fit([few], data=rows())
    bert = BertForMaskedLM(
        BertConfig(vocab_size=2000, hidden_size=8, num_hidden_layers=1, num_attention_heads=1)
    )
    with pytest.raises(ValueError, match="no tokenizer with a mask token is known"):
        fit([monitor(tmp_path)], model=bert, data=rows())


@pytest.mark.parametrize(
    ("averaging", "settings", "first"),
    [
        ("StochasticWeightAveraging", {"swa_lrs": 1e-2, "swa_epoch_start": 1}, True),
        pytest.param("EMAWeightAveraging", {"decay": 0.98}, False, marks=pytest.mark.slow),
    ],
)
def test_the_last_look_is_at_the_weights_that_a_fit_ends_with(
    tmp_path: Path, averaging: str, settings: dict[str, float], first: bool
) -> None:
    """Averages replace the weights when training ends, before or after the monitor's own end."""
    if not hasattr(lightning_callbacks, averaging):
        pytest.skip(f"this Lightning has no {averaging}")
    watching, average = combined(tmp_path), getattr(lightning_callbacks, averaging)(**settings)
    data = leave_out(rows(), 140, seed=1)[0]
    gate = RiskGate("leakage/combined/auc", at_most=0.999, action="warn")
    callbacks = [watching, average, gate] if first else [average, watching, gate]
    _, module = fit(callbacks, data=data, max_epochs=2)
    pool, answers = query_base(data)
    averaged = token_log_probs(find_anatomy(module.model), pool.texts)
    looks = lines(tmp_path)
    assert [line["step"] for line in looks] == [17, 30, 33, 66, 66]
    expected, _ = Audit(pool, answers).part("long", averaged, look=5).measure(Combined())
    *_, before, last = (line["metrics"]["auc"] for line in looks)
    assert last["value"] == pytest.approx(expected["auc"])
    assert last["low"] == pytest.approx(expected["auc_low"], abs=1e-9)
    assert before["value"] != last["value"]
    assert watching.latest["leakage/combined/auc"] == pytest.approx(expected["auc"])
    [summary] = findings(read([tmp_path])).runs
    shown = next(one for one in summary.attacks if one.name == "combined")
    assert shown.last.value == pytest.approx(expected["auc"])


def test_texts_that_repeat_are_asked_for_extraction_by_how_often(tmp_path: Path) -> None:
    """Each of 30 texts is in six rows: none plays a game, and all are learned first."""
    ids = torch.randint(3, 2000, (30, 24), generator=torch.Generator().manual_seed(5))
    often = [{"input_ids": row.clone(), "labels": row.clone()} for row in ids for _ in range(6)]
    data = leave_out([*rows(180, 24), *often], 120, seed=1)[0]
    settings = Memorization(max_overhead=10, looks=())
    watching = monitor(tmp_path, [Combined(), Extraction(tokens=4)], settings)
    pool = collect(DataLoader(data, batch_size=8, shuffle=True), settings, READ)
    _, module = fit([watching], data=data, max_epochs=6, lr=2e-2)
    inside = [tuple(data[n]["input_ids"].tolist()) for n in range(len(data))]
    counts = [inside.count(tuple(row)) for row in ids.tolist()]
    groups = pool.times[~pool.alone]
    assert sorted(groups.tolist()) == sorted(n for n in counts if n > 1)
    line, membership = (lines(tmp_path, n)[-1]["metrics"] for n in ("extraction", "combined"))
    for values, n in ((membership, int(pool.alone.sum())), (line, len(pool.texts))):
        assert values["members"]["value"] + values["others"]["value"] == n
    # What greedy decoding writes, by hand.
    written = {}
    for fewest, highest in ((2, 4), (5, 6)):
        tier = [
            text
            for text, n in zip(pool.texts, pool.times.tolist(), strict=True)
            if fewest <= n <= highest
        ]
        hits = [greedy_run(module.model, text.ids, 4) for text in tier]
        written[fewest] = len(tier), sum(hits) / max(1, len(hits))
    others = [
        text for text, inside in zip(pool.texts, pool.trains.tolist(), strict=True) if not inside
    ]
    by_chance = sum(greedy_run(module.model, text.ids, 4) for text in others) / len(others)
    assert min(n for n, _ in written.values()) >= 10
    for times, (_, share) in written.items():
        assert line[f"greedy_x{times}"]["value"] == pytest.approx(share - by_chance)
    assert line["greedy"]["value"] == max(line[f"greedy_x{t}"]["value"] for t in (1, 2, 5)) > 0.5
    assert "greedy_x17" not in line
    assert watching.latest["leakage/extraction/greedy_x5_low"] == line["greedy_x5"]["low"]
    [facts] = of_kind(tmp_path, "pool")
    assert (facts["copied"], facts["repeated"]) == (len(groups), pool.repeated)


def greedy_run(model: Any, ids: Tensor, k: int) -> bool:
    """Return whether greedy decoding writes k tokens of a text in a row."""
    model.eval()
    with torch.no_grad():
        right = model(ids[None]).logits[0, :-1].argmax(1) == ids[1:]
    return bool(right.unfold(0, k, 1).all(1).any())


# ---- gates --------------------------------------------------------------------------------------


def gated(folder: Path, gate: RiskGate, **more: Any) -> tuple[L.Trainer, LeakageMonitor]:
    watching = combined(folder)
    trainer, _ = fit([watching, gate], **more)
    return trainer, watching


def test_a_gate_acts_once_the_lower_end_is_above(whole: Any) -> None:
    gate, looks = whole.gate, lines(whole.folder)
    lows = {line["step"]: line["metrics"]["auc"]["low"] for line in looks}
    first = min(step for step, low in lows.items() if low is not None and low > 0.6)
    assert gate.bound == "lower"
    assert (gate.fired.step, gate.fired.value) == (first, lows[first])
    assert looks[0]["step"] < first < 99


def test_a_gate_on_the_worst_attack_compares_joint_intervals(whole: Any) -> None:
    joint = {}
    for attack in ("combined", "loss"):
        for line in lines(whole.folder, attack):
            low = line["metrics"]["auc_joint_low"]["value"]
            joint[line["step"]] = max(low, joint.get(line["step"], low))
    first = min(step for step, low in joint.items() if low > 0.6)
    assert (whole.worst.fired.step, whole.worst.fired.value) == (first, joint[first])


def test_that_no_weights_were_allowed_is_said_at_the_end_with_the_nearest(whole: Any) -> None:
    highs = {line["metrics"]["auc"]["high"]: line["step"] for line in lines(whole.folder)}
    ends = {high: step for high, step in highs.items() if step in (33, 66, 99)}
    nearest = f"The nearest were those of step {ends[min(ends)]}, up to {min(ends):.3f}."
    assert any(nearest in text and "at most 0.6" in text for text in whole.messages)


def test_what_cannot_be_known_is_refused_before_the_first_step(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'shown' needs 706 non-members at look 5, and has 108"):
        gated(tmp_path, RiskGate("leakage/combined/shown", at_most=0.2))
    rare = RiskGate("leakage/combined/tpr_at_fpr_0.001", at_most=0.2)
    needed = r"needs 7087 non-members at look 5, and has 108: .*most_texts=14174\) or more"
    with pytest.raises(ValueError, match=needed):
        gated(tmp_path, rare)
    with pytest.raises(ValueError, match="no controls after epoch 1: add leave_out"):
        gated(tmp_path, RiskGate("leakage/combined/auc", at_most=0.7), data=rows())
    patient = RiskGate("leakage/combined/shown", at_most=0.2, strict=False)
    trainer, _ = gated(tmp_path, patient, max_steps=1)
    assert patient.fired is None
    assert trainer.global_step == 1


def test_the_default_asks_about_enough_texts_for_the_smallest_rate_at_five_looks() -> None:
    """Where the data and max_overhead allow it."""
    settings = Memorization(max_overhead=1e6)
    asked = affordable(10**6, settings, 40, forwards_of(settings, last_step=True))
    assert asked // 2 >= min_non_members(5, settings.alpha, min(FPRS))
    few = Memorization(max_overhead=1e6, most_texts=2 * min_non_members(1, fpr=min(FPRS)))
    assert affordable(10**6, few, 40, 4) == 8760
    with pytest.raises(
        UnplayableGame, match=r"Memorization\(max_overhead=1e\+06, most_texts=200\)"
    ):
        affordable(10**6, Memorization(max_overhead=1e6, most_texts=199), 200, 4)


def test_a_strict_gate_stops_where_no_leak_could_be_shown_by_so_few_texts(tmp_path: Path) -> None:
    """Of 20 members and 20 others a look shows an AUC of (.05 / 2 / 2)^(1 / 20) = .80 at most."""
    settings = Memorization(max_overhead=10, looks=(), most_texts=40)
    gates = {}
    for at_most in (0.79, 0.81):
        watching = combined(tmp_path, settings)
        gate = gates[at_most] = RiskGate("leakage/combined/auc", at_most=at_most, action="warn")
        train = leave_out(rows(300), 100, seed=1)[0]
        with mock.patch("lightning_fedleak.engine.channels.released.pool.MIN_POOL", 40):
            fit([watching, gate], data=train, max_epochs=1)
        assert watching.latest["leakage/combined/auc_provable"] == pytest.approx(0.0125**0.05)
    assert gates[0.79].fired is None
    assert gates[0.81].fired is not None
    assert math.isnan(gates[0.81].fired.value)
    assert "too few texts" in str(gates[0.81].fired)


@pytest.mark.parametrize("allowed", [False, True])
def test_under_dp_a_gate_on_private_texts_is_outside_of_epsilon(
    tmp_path: Path, allowed: bool
) -> None:
    settings = Memorization(max_overhead=4 / 3, outside_epsilon=allowed)
    watching = combined(tmp_path, settings)
    gate = RiskGate("leakage/combined/auc", at_most=0.9)
    defense = DPSGD(1.0, noise_multiplier=1.0, target_delta=1e-3)
    if allowed:
        fit([watching, gate], strategy=DefendedStrategy("auto", [defense]), max_steps=2)
        assert lines(tmp_path)
        return
    with pytest.raises(ValueError, match="outside_epsilon=True"):
        fit([watching, gate], strategy=DefendedStrategy("auto", [defense]), max_epochs=1)
    for name in ("leakage/combined/auc_high", "leakage/worst/memorization"):
        stop = EarlyStopping(name)
        with pytest.raises(ValueError, match=f"stops or chooses by '{name}' uses private"):
            fit([watching, stop], strategy=DefendedStrategy("auto", [defense]), max_epochs=1)


def chosen(folder: Path, *gates: RiskGate) -> ModelCheckpoint:
    """Return the checkpoints of a fit of three epochs that chooses."""
    keep = ModelCheckpoint(folder / "kept", "{step}", "leakage/choose", mode="min", save_top_k=-1)
    data = leave_out(rows(), 140, seed=1)[0]
    settings = {"validate": True, "enable_checkpointing": True, "data": data}
    fit([combined(folder), *gates, keep], Validated(tiny(), 1e-2, "adamw"), **settings)
    return keep


def gate_on_auc(at_most: float = 0.95) -> RiskGate:
    return RiskGate("leakage/combined/auc", at_most=at_most, action="warn", name=f"{at_most}")


def test_the_checkpoint_is_chosen_among_those_that_leak_little(tmp_path: Path) -> None:
    """By the loss alone the last epoch would be kept; its interval reaches above the threshold."""
    keep = chosen(tmp_path / "whole", gate_on_auc(), gate_on_auc(0.99))
    highs = {line["step"]: line["metrics"]["auc"]["high"] for line in lines(tmp_path / "whole")}
    epochs = [33, 66, 99]
    allowed = [step for step in epochs if highs[step] <= 0.95]
    assert 0 < len(allowed) < 3
    step = max(allowed)
    assert keep.best_model_score == -step


@pytest.mark.slow
@pytest.mark.ddp
def test_two_processes_know_the_same(tmp_path: Path) -> None:
    """Under DDP each asks about half of the texts; under FSDP2 both about all, in one order."""
    pair = two_processes("tests.engine.channels.memorization_worker", tmp_path)
    data = leave_out(rows(), 140, seed=1)[0]
    pool, answers = query_base(data)
    alone = sorted(answers.log_probs.double().sum(1).tolist())
    for kind in ("ddp", "fsdp2"):
        first, second = (rank[kind] for rank in pair)
        assert first["latest"] == pytest.approx(second["latest"], nan_ok=True)
        assert first["base"] == pytest.approx(second["base"])
        assert first["failures"] == second["failures"] == 0
        assert first["seen"] == second["seen"] == 108
        assert first["same"]
        assert second["same"]
        assert 0.5 < first["latest"]["leakage/combined/auc"] <= 1
        assert len(lines(tmp_path / kind)) == first["looks"]
        assert sorted(first["base"]) == pytest.approx(alone, abs=1e-4)
        assert len(pool.texts) == len(first["base"])
    assert pair[0]["fsdp2"]["parts"] < pair[0]["ddp"]["parts"]


# ---- accounts -----------------------------------------------------------------------------------


def accounted(folder: Path, noise: float, **more: Any) -> LeakageMonitor:
    """Fit under DPSGD whose account takes its noise to be 1."""
    defense = DPSGD(1.0, noise_multiplier=noise, target_delta=1e-3)
    step = defense.accountant.step
    defense.accountant.step = lambda _, rate: step(1.0, rate)  # type: ignore[method-assign]
    watching = monitor(folder)
    data = leave_out(rows(), 140, seed=1, coins=True)[0]
    fit([watching], data=data, strategy=DefendedStrategy("auto", [defense]), **more)
    return watching


def test_what_an_account_allows_is_logged_beside_the_attacks(tmp_path: Path) -> None:
    watching = accounted(tmp_path, 1.0, max_epochs=1)
    looks = lines(tmp_path)
    assert [line["step"] for line in looks] == [16, 29, 32]
    for line in looks:
        values = {name: one["value"] for name, one in line["metrics"].items()}
        curve = curve_of([(1.0, 8 / 260, line["step"])], "prv")
        assert values["bound/auc"] == pytest.approx(curve_auc(curve))
        assert values["bound/tpr_at_fpr_0.01"] == pytest.approx(curve_tpr(0.01, curve))
        assert values["refuted"] == 0
        # all that a coin let in count, drawn or not
        assert values["members"] + values["others"] == looks[0]["n"] > 200
    assert "bound/auc" not in lines(tmp_path, "extraction")[0]["metrics"]
    latest = watching.latest
    assert latest["leakage/bound/auc"] == looks[-1]["metrics"]["bound/auc"]["value"]
    assert 0.01 < latest["leakage/bound/tpr_at_fpr_0.01"] < 0.05
    assert latest["leakage/combined/refuted"] == latest["leakage/loss/refuted"] == 0
    report = findings(read([tmp_path]))
    assert any("was not refuted by" in one for one in report.verdict.sentences)
    assert not any("REFUTED" in one for one in report.verdict.sentences)
    assert "the account is" in page(report)


@pytest.mark.slow
def test_noise_that_is_accounted_and_not_added_refutes_the_account(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="THE ACCOUNT IS REFUTED by 'combined' at step"):
        watching = accounted(tmp_path, 0.01, max_epochs=4)
    assert watching.latest["leakage/combined/refuted"] == 1  # also where a later look shows less
    report = findings(read([tmp_path]))
    assert re.search("is REFUTED by .*combined", report.verdict.sentences[0])
    assert ">REFUTED</td>" in page(report)
    assert report.verdict.level == "high"


def four_bit(*, dequantized: bool = False) -> Any:
    """Return LoRA on a base in NF4, or on the same numbers in float32."""
    layers = pytest.importorskip("bitsandbytes").nn
    torch.manual_seed(0)
    size = {"hidden_size": 64, "intermediate_size": 64, "max_position_embeddings": 32}
    heads = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=2000, **size, **heads))
    for name, linear in [*model.model.layers.named_modules()]:
        if type(linear) is nn.Linear:
            kept = layers.Params4bit(linear.weight.data, requires_grad=False, quant_type="nf4")
            four = layers.Linear4bit(linear.in_features, linear.out_features, bias=False)
            four.weight = kept
            four.to("cpu")
            if dequantized:
                whole = four(torch.eye(linear.in_features)).T
                linear.weight.data = whole.contiguous()
            else:
                model.model.layers.set_submodule(name, four)
    torch.manual_seed(1)
    config = LoraConfig(r=16, lora_alpha=32, lora_dropout=0.05, target_modules="all-linear")
    return get_peft_model(model, config)


def test_a_base_of_four_bits_reads_as_its_dequantized_weights_do() -> None:
    texts = [Text(row["input_ids"], row["labels"]) for row in rows(20)]
    models = [find_anatomy(model) for model in (four_bit(), four_bit(dequantized=True), tiny())]
    four, whole, other = (token_log_probs(model, texts).log_probs for model in models)
    torch.testing.assert_close(four, whole, atol=1e-4, rtol=1e-4)
    assert not torch.equal(four, other)
