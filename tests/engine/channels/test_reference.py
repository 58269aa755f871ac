"""A reference model beside the one that trains, in live looks at its weights."""

import math
import re
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.data import Subset

from lightning_fedleak import DPSGD, DefendedStrategy, LeakageMonitor, RiskGate
from lightning_fedleak.attacks.memorization import Combined, CombinedReference
from lightning_fedleak.callbacks import WatchSettings
from lightning_fedleak.engine import Memorization
from lightning_fedleak.engine.reference import describe_reference, measure_strength
from lightning_fedleak.evaluation.canaries import leave_out
from lightning_fedleak.evaluation.metrics.released import check_unseen, membership_values
from lightning_fedleak.model.anatomy import find_anatomy
from lightning_fedleak.model.snapshots import References, ReleasedModel, TokenSnapshot
from lightning_fedleak.model.taps.tokens import Text, token_log_probs
from lightning_fedleak.private_files import hash_tensors, plain_name
from lightning_fedleak.report import findings, model_card, page, read
from tests.engine.channels.test_memorization import fit, lines, monitor, of_kind, tiny, trained

LORA = {"r": 4, "target_modules": ["c_attn"], "fan_in_fan_out": True}
BOTH = [Combined(), CombinedReference()]


def language(n: int, seed: int) -> list[dict[str, Tensor]]:
    """Return rows of a language of 2,000 words in which each word has three that may follow it."""
    rule = torch.randint(3, 2000, (2000, 3), generator=torch.Generator().manual_seed(9))
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 2000, (n, 1), generator=draw)
    for _ in range(13):
        choices = torch.randint(3, (n,), generator=draw)
        ids = torch.cat([ids, rule[ids[:, -1], choices][:, None]], 1)
    return [{"input_ids": row, "labels": row} for row in ids]


def with_reference(folder, reference, attacks=BOTH, rows=None) -> LeakageMonitor:
    memorization = Memorization(max_overhead=4 / 3, reference=reference, reference_rows=rows)
    return monitor(folder, attacks, memorization)


@pytest.fixture(scope="module")
def reference() -> nn.Module:
    """Return a model that the same recipe has trained on other rows of the language."""
    _, module = fit([], data=language(260, seed=1))
    return module.model


@pytest.fixture(scope="module")
def whole(reference: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    folder = tmp_path_factory.mktemp("reference")
    data = leave_out(language(400, seed=2), 140, seed=1)[0]
    checkpoint = ModelCheckpoint(folder / "kept", every_n_epochs=1, save_top_k=-1)
    watching = with_reference(folder, reference, rows=260)
    _, module = fit([watching, checkpoint], data=data, enable_checkpointing=True)
    early = min((folder / "kept").glob("*.ckpt"), key=lambda path: path.stat().st_mtime)
    return SimpleNamespace(folder=folder, watching=watching, module=module, data=data, early=early)


def test_the_score_is_that_of_the_attack_on_base_and_reference(
    whole: Any, reference: nn.Module
) -> None:
    [channel] = {c for s, c in whole.watching.engine.series.items() if s.name == "combined"}
    pool = channel.pool
    now, base, other = (
        token_log_probs(find_anatomy(m), pool.texts)
        for m in (whole.module.model, tiny(), reference)
    )
    game = ReleasedModel(
        now, base, torch.ones(len(pool.texts)), references=References.unseen(other)
    )
    expected = membership_values(CombinedReference().score(game), pool.trains)["auc"]
    last, without = (lines(whole.folder, name)[-1] for name in ("combined_reference", "combined"))
    assert last["metrics"]["auc"]["value"] == pytest.approx(expected, abs=2e-3)
    assert last["pool"] == without["pool"]
    assert last["metrics"]["auc"]["value"] > 0.9


def test_a_resumed_fit_goes_on_with_what_the_reference_said(whole: Any, tmp_path: Path) -> None:
    other = tiny()  # is not asked
    fit([with_reference(tmp_path, other)], data=whole.data, ckpt_path=whole.early)
    before, resumed = (
        [line["metrics"]["auc"]["value"] for line in lines(folder, "combined_reference")]
        for folder in (whole.folder, tmp_path)
    )
    assert resumed[-1] == pytest.approx(before[-1], abs=0.05)
    assert resumed[-1] > 0.9


@pytest.mark.parametrize("kind", ["model", "adapters"])
def test_a_folder_is_read_and_training_is_the_same(kind, reference, tmp_path) -> None:
    data = leave_out(language(400, seed=2), 140, seed=1)[0]
    reference.save_pretrained(tmp_path / "model")
    model = tiny()
    if kind == "adapters":
        model = type(model).from_pretrained(tmp_path / "model")
        adapted = get_peft_model(model, LoraConfig(**LORA, init_lora_weights=False))
        adapted.save_pretrained(tmp_path / "adapters")
    make = (lambda: get_peft_model(tiny(), LoraConfig(**LORA))) if kind == "adapters" else tiny
    torch.manual_seed(0)
    plain = trained([], make(), data=data, max_epochs=1)
    torch.manual_seed(0)
    watching = with_reference(tmp_path / "run", str(tmp_path / kind), [CombinedReference()])
    watched = trained([watching], make(), data=data, max_epochs=1)
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))
    assert math.isfinite(watching.latest["leakage/combined_reference/auc"])


@pytest.mark.parametrize("side", ["held out", "trained on"])
def test_a_reference_that_has_seen_rows_is_refused(side: str, tmp_path: Path) -> None:
    data, held_out = leave_out(language(400, seed=2), 140, seed=1)
    _, module = fit([], data=held_out if side == "held out" else data)
    watching = with_reference(tmp_path, module.model)
    with pytest.raises(ValueError, match="a model of other rows only"):
        fit([watching], data=data)


def test_several_references_with_and_without_each_row(tmp_path: Path) -> None:
    """Four are trained on random halves of all rows, which their data sets name."""
    rows = language(400, seed=2)
    data = leave_out(rows, 140, seed=1)[0]
    halves, models = [], []
    for seed in range(4):
        order = torch.randperm(400, generator=torch.Generator().manual_seed(seed)).tolist()
        halves.append(Subset(rows, sorted(order[:200])))
        models.append(fit([], data=halves[-1], max_epochs=2)[1].model)
    watching = with_reference(tmp_path, models, rows=halves)
    fit([watching], data=data, max_epochs=2)
    [channel] = {c for s, c in watching.engine.series.items() if s.name == "combined"}
    numbers = {tuple(row["input_ids"].tolist()): n for n, row in enumerate(rows)}
    asked = [numbers[tuple(text.ids.tolist())] for text in channel.pool.texts]
    expected = [[n in half.indices for n in asked] for half in halves]
    assert channel._references.inside.tolist() == expected
    several, without = (lines(tmp_path, name)[-1] for name in ("combined_reference", "combined"))
    assert several["metrics"]["auc"]["value"] > without["metrics"]["auc"]["value"]
    [pool] = of_kind(tmp_path, "pool")
    assert (pool["reference"]["models"], pool["reference"]["rows"]) == (4, 200)
    with pytest.raises(ValueError, match="before the training"):  # of members alone
        fit([with_reference(tmp_path / "own", models, rows=[data, *halves[1:]])], data=data)
    with pytest.raises(ValueError, match="as many entries as reference has"):
        Memorization(reference=models, reference_rows=halves[:2])
    with pytest.raises(ValueError, match="for reference='auto' or a function"):
        Memorization(reference=models, references=2)


def test_a_sound_reference_is_refused_by_chance_alone() -> None:
    torch.manual_seed(0)
    base, other = (token_log_probs(find_anatomy(tiny()), texts()) for _ in range(2))
    refused = 0
    for seed in range(300):
        draw = torch.Generator().manual_seed(seed)
        noisy = other._replace(log_probs=-torch.rand(other.log_probs.shape, generator=draw))
        trains = torch.rand(len(other.labels), generator=draw) < 0.5
        try:
            check_unseen(References.unseen(noisy), base, torch.ones(len(trains)), trains)
        except ValueError:
            refused += 1
    assert refused <= 3  # 0.3 are expected


def texts() -> list[Text]:
    return [Text(row["input_ids"], row["input_ids"]) for row in language(60, seed=3)]


def narrow() -> nn.Module:
    model = tiny()
    model.resize_token_embeddings(1500)
    return model


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("nowhere", r"reference='nowhere'\) cannot be loaded"),
        (narrow, "predicts 1500 tokens or classes, and the model that trains 2000"),
    ],
    ids=["no folder", "another vocabulary"],
)
def test_what_cannot_be_a_reference_is_refused_before_the_first_step(reference, message, tmp_path):
    watching = with_reference(tmp_path, reference if isinstance(reference, str) else reference())
    with pytest.raises(ValueError, match=message):
        fit([watching], data=leave_out(language(400, seed=2), 140, seed=1)[0])


def test_a_folder_of_another_model_is_refused(tmp_path: Path) -> None:
    tiny().transformer.save_pretrained(tmp_path / "other")
    file = tmp_path / "other" / "model.safetensors"
    weights = {name: w for name, w in load_file(file).items() if "ln_f" not in name}
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(ValueError, match=r"is not the whole model: it lacks .*ln_f"):
        fit([with_reference(tmp_path / "run", tmp_path / "other")])


def test_the_model_that_trains_is_no_reference(tmp_path: Path) -> None:
    model = tiny()
    with pytest.raises(ValueError, match="it shares weights with the model that trains"):
        fit([with_reference(tmp_path, model)], model)


def test_attack_and_reference_belong_together() -> None:
    given = WatchSettings(memorization=Memorization(reference="folder"))
    for attacks, settings in ((Combined(), given), (CombinedReference(), None)):
        with pytest.raises(ValueError, match="belong together"):
            LeakageMonitor(attacks, settings=settings)
    names = [attack.name for attack in LeakageMonitor(settings=given).attacks]
    assert "combined_reference" in names
    assert "combined_reference" not in [attack.name for attack in LeakageMonitor().attacks]


@pytest.mark.parametrize("allowed", [False, True])
def test_under_dp_a_reference_is_outside_of_epsilon(allowed, reference, tmp_path) -> None:
    memorization = Memorization(max_overhead=4 / 3, reference=reference, outside_epsilon=allowed)
    watching = monitor(tmp_path, BOTH, memorization)
    strategy = DefendedStrategy("auto", [DPSGD(1.0, noise_multiplier=1.0, target_delta=1e-3)])
    data = leave_out(language(400, seed=2), 140, seed=1)[0]
    if allowed:
        fit([watching], data=data, strategy=strategy, max_epochs=1)
        assert lines(tmp_path, "combined_reference")
        return
    with pytest.raises(ValueError, match=r"Memorization\(reference=\) uses private texts"):
        fit([watching], data=data, strategy=strategy, max_epochs=1)


# ---- which reference it was, and how strong -----------------------------------------------------


def test_the_record_the_report_and_the_model_card_say_which_reference(whole, reference) -> None:
    [pool] = of_kind(whole.folder, "pool")
    expected = hash_tensors({plain_name(n): p for n, p in reference.named_parameters()})
    facts = {"kind": "module", "model": "GPT2LMHeadModel", "rows": 260, "weights": expected}
    facts["models"] = 1
    assert pool["reference"] == facts
    content = findings(read([whole.folder]))
    card = model_card(content)
    named = rf"GPT2LMHeadModel \(module\), trained on 260 rows, weights {expected[:16]}"
    for text in (page(content), card):
        assert re.search(named, text)
    for attack in ("combined", "combined_reference"):  # too few others for 1 in 100
        name = attack.replace("_", r"\\_")
        assert re.search(rf"TPR at 0.1% FPR, {name} \| unknown", card)
        assert re.search(rf"TPR at 0.1% FPR, {attack}</th><td>\s*unknown\s*<", page(content))
    rows = {tuple(row["input_ids"].tolist()) for row in language(260, seed=1)}
    record = (whole.folder / "run.jsonl").read_text()
    assert not any(", ".join(map(str, row)) in record for row in rows)


def test_the_fingerprint_is_of_the_weights_wherever_they_are(reference, tmp_path) -> None:
    reference.save_pretrained(tmp_path / "model")
    changed = deepcopy(reference)
    next(changed.parameters()).data[0, 0] += 1e-3
    loaded = type(reference).from_pretrained(tmp_path / "model")
    hashes = [
        describe_reference(source, 5, find_anatomy(model)).weights
        for source, model in (
            (reference, reference),
            (str(tmp_path / "model"), loaded),
            (changed, changed),
        )
    ]
    assert hashes[0] == hashes[1] != hashes[2]


def snapshot(gains: Tensor) -> TokenSnapshot:
    """Return what a model says of texts of four tokens, given its gain over a base of -2 nats."""
    values = (gains - 2.0)[:, None].expand(-1, 4)
    zeros, ones = torch.zeros_like(values), torch.ones_like(values, dtype=torch.bool)
    return TokenSnapshot(values, zeros, zeros + 1, ~ones, ones)


@pytest.mark.parametrize(
    ("own", "its", "rows", "weak"),
    [
        (1.0, 0.95, None, ""),
        (1.0, 0.95, 100, ""),
        (1.0, 0.95, 99, "trained on 99 rows, and the model on 100"),
        (1.0, 0.5, 100, "has gained 50% of what the model has"),
        (1.0, 0.5, None, "has gained 50% of what the model has"),
        (1.0, 1.3, 100, "it may have seen them"),
        (1.0, 1.3, None, "it may have seen them"),
        (1.0, 1.3, 300, ""),
        (0.0, 0.5, 100, ""),
        (0.0, 0.5, None, "nothing shows how far it was trained"),
    ],
)
def test_a_weak_reference_by_its_gain_on_the_others_and_its_rows(own, its, rows, weak) -> None:
    members = torch.arange(60) < 20
    noise = torch.randn(60, generator=torch.Generator().manual_seed(0)) * 0.1
    noise -= noise[~members].mean()
    memorized = members * 1.5  # of the members alone: says nothing of the reference
    base, now = snapshot(torch.zeros(60)), snapshot(own + noise + memorized)
    references = References.unseen(snapshot(its + noise))
    game = ReleasedModel(now, base, torch.ones(60), references=references)
    strength = measure_strength(game, members, rows, 100)
    assert math.isnan(strength.share) if own == 0 else strength.share == pytest.approx(its / own)
    assert bool(strength.weak) == bool(weak)
    assert weak in strength.weak


@pytest.mark.parametrize(("epochs", "unknown"), [(0, True), (3, False)])
def test_a_low_number_beside_a_weak_reference_is_unknown_and_a_high_one_stands(
    epochs: int, unknown: bool, reference: nn.Module, tmp_path: Path
) -> None:
    """A model that nobody trained on other rows is weak: no text of the kind gained in it."""
    data = leave_out(language(400, seed=2), 140, seed=1)[0]
    watching = with_reference(tmp_path, tiny())
    gates = [
        RiskGate(metric, at_most=0.75, action="warn", strict=strict, name=f"{metric} {strict}")
        for metric, strict in (
            ("leakage/combined_reference/auc", True),
            ("leakage/combined_reference/auc", False),
            ("leakage/combined_reference/auc_low", True),
        )
    ]
    fit([watching, *gates], data=data, max_epochs=max(1, epochs), lr=1e-2 if epochs else 0)
    line = lines(tmp_path, "combined_reference")[-1]["metrics"]
    assert line["weak_reference"]["value"] == 1
    assert line["auc"]["high"] is None
    assert "auc_joint_high" not in line
    assert (line["auc"]["low"] > 0.75) != unknown
    assert (gates[1].fired is None) == unknown
    for gate in (gates[0], gates[2]):
        assert gate.fired is not None
        assert math.isnan(gate.fired.value) == unknown
        assert ("weak reference" in gate.fired.why) == unknown
    content = findings(read([tmp_path]))
    [summary] = [a for a in content.runs[0].attacks if a.name == "combined_reference"]
    assert summary.is_blind == unknown
    assert "weak reference" in model_card(content)


def test_reference_rows_count_the_rows_of_a_reference() -> None:
    with pytest.raises(ValueError, match="reference_rows must be an integer"):
        Memorization(reference="folder", reference_rows=0)


def test_beside_a_reference_a_model_of_none_of_the_rows_is_not_told(reference) -> None:
    """The null: trained on other rows than those that are asked about, the coins decide nothing."""
    _, module = fit([], data=language(260, seed=20))
    asked = [Text(row["input_ids"], row["input_ids"]) for row in language(600, seed=30)]
    coins = torch.rand(600, generator=torch.Generator().manual_seed(0)) < 0.5
    now, base, beside = (
        token_log_probs(find_anatomy(model), asked) for model in (module.model, tiny(), reference)
    )
    game = ReleasedModel(now, base, torch.ones(600), references=References.unseen(beside))
    values = membership_values(CombinedReference().score(game), coins, alpha=0.01)
    assert values["auc_low"] < 0.5 < values["auc_high"]
    assert values["auc"] == pytest.approx(0.5, abs=0.08)  # 3.4 standard errors
    assert 0.7 < measure_strength(game, coins, None, 260).share < 1.4  # one recipe, other seeds
