"""A reference model beside the one that trains, in live looks at its weights."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from scipy.stats import rankdata
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn

from lightning_fedleak import DPSGD, DefendedStrategy, LeakageMonitor
from lightning_fedleak.attacks.memorization import Combined, CombinedReference
from lightning_fedleak.attacks.memorization.scores import MOST_GAIN
from lightning_fedleak.callbacks import WatchSettings
from lightning_fedleak.engine import Memorization
from lightning_fedleak.evaluation.canaries import leave_out
from lightning_fedleak.evaluation.metrics.released import check_unseen
from lightning_fedleak.model.anatomy import find_anatomy
from lightning_fedleak.model.taps.tokens import Text, token_log_probs
from tests.engine.channels.test_memorization import fit, lines, monitor, tiny, trained

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


def with_reference(folder: Path, reference: Any, attacks: Any = BOTH) -> LeakageMonitor:
    memorization = Memorization(max_overhead=4 / 3, reference=reference)
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
    watching = with_reference(folder, reference)
    _, module = fit([watching, checkpoint], data=data, enable_checkpointing=True)
    early = min((folder / "kept").glob("*.ckpt"), key=lambda path: path.stat().st_mtime)
    return SimpleNamespace(folder=folder, watching=watching, module=module, data=data, early=early)


def normal(values: np.ndarray) -> Tensor:
    return torch.special.ndtri((torch.tensor(rankdata(values)) - 0.5) / len(values))


def test_the_score_is_that_of_the_reference_in_the_place_of_the_base(
    whole: Any, reference: nn.Module
) -> None:
    [channel] = {c for s, c in whole.watching.engine.series.items() if s.name == "combined"}
    pool = channel.pool
    now, beside = (
        token_log_probs(find_anatomy(m), pool.texts) for m in (whole.module.model, reference)
    )
    gains = (now.log_probs - beside.log_probs).double()
    capped = (now.log_probs.double() - (gains - MOST_GAIN).clamp_min(0)).mean(1)
    ratio = capped / -beside.log_probs.double().mean(1)
    wrong = gains * ~now.greedy
    zone = torch.log1p(wrong.clamp_min(0).sum(1)) - torch.log1p(-wrong.clamp_max(0).sum(1))
    zone[~(~now.greedy).any(1) & (~beside.greedy).any(1)] = zone.max() + 1
    expected = roc_auc_score(pool.trains, normal(ratio.numpy()) + normal(zone.numpy()))
    last, without = (lines(whole.folder, name)[-1] for name in ("combined_reference", "combined"))
    assert last["metrics"]["auc"]["value"] == pytest.approx(expected, abs=2e-3)
    assert last["pool"] == without["pool"]
    assert 0.9 < last["metrics"]["auc"]["value"] != without["metrics"]["auc"]["value"]


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
def test_a_folder_is_read_and_training_is_the_same(
    kind: str, reference: nn.Module, tmp_path: Path
) -> None:
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
    with pytest.raises(ValueError, match="has seen some of them"):
        fit([watching], data=data)


def test_a_sound_reference_is_refused_by_chance_alone() -> None:
    torch.manual_seed(0)
    base, other = (token_log_probs(find_anatomy(tiny()), texts()) for _ in range(2))
    refused = 0
    for seed in range(300):
        draw = torch.Generator().manual_seed(seed)
        noisy = other._replace(log_probs=-torch.rand(other.log_probs.shape, generator=draw))
        trains = torch.rand(len(other.labels), generator=draw) < 0.5
        try:
            check_unseen(noisy, base, torch.ones(len(trains)), trains)
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
def test_what_cannot_be_a_reference_is_refused_before_the_first_step(
    reference: Any, message: str, tmp_path: Path
) -> None:
    watching = with_reference(tmp_path, reference if isinstance(reference, str) else reference())
    with pytest.raises(ValueError, match=message):
        fit([watching], data=leave_out(language(400, seed=2), 140, seed=1)[0])


def test_a_folder_of_another_model_is_refused(tmp_path: Path) -> None:
    tiny().transformer.save_pretrained(tmp_path / "other")
    file = tmp_path / "other" / "model.safetensors"
    weights = {name: w for name, w in load_file(file).items() if "ln_f" not in name}
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(ValueError, match="lacks 2 tensors of a GPT2LMHeadModel"):
        fit([with_reference(tmp_path / "run", tmp_path / "other")])


def test_the_model_that_trains_is_no_reference(tmp_path: Path) -> None:
    model = tiny()
    with pytest.raises(ValueError, match="it shares weights with the model that trains"):
        fit([with_reference(tmp_path, model)], model)


def test_attack_and_reference_belong_together() -> None:
    with pytest.raises(TypeError, match="must be a model or the folder of one, got a int"):
        Memorization(reference=3)
    given = WatchSettings(memorization=Memorization(reference="folder"))
    for attacks, settings in ((Combined(), given), (CombinedReference(), None)):
        with pytest.raises(ValueError, match="belong together"):
            LeakageMonitor(attacks, settings=settings)
    names = [attack.name for attack in LeakageMonitor(settings=given).attacks]
    assert "combined_reference" in names
    assert "combined_reference" not in [attack.name for attack in LeakageMonitor().attacks]


@pytest.mark.parametrize("allowed", [False, True])
def test_under_dp_a_reference_is_outside_of_epsilon(
    allowed: bool, reference: nn.Module, tmp_path: Path
) -> None:
    memorization = Memorization(max_overhead=4 / 3, reference=reference, outside_epsilon=allowed)
    watching = monitor(tmp_path, BOTH, memorization)
    strategy = DefendedStrategy("auto", [DPSGD(1.0, noise_multiplier=1.0, target_delta=1e-3)])
    data = leave_out(language(400, seed=2), 140, seed=1)[0]
    if allowed:
        fit([watching], data=data, strategy=strategy, max_epochs=1)
        assert lines(tmp_path, "combined_reference")
        return
    with pytest.raises(ValueError, match=r"reference=\) may have been trained on private rows"):
        fit([watching], data=data, strategy=strategy, max_epochs=1)
