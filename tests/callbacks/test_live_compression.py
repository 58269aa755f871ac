"""Attacks behind compression and noise: what is hidden is unknown or low, never certified."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import transformers

from lightning_fedleak import DefendedStrategy, GradientCompression, GradientNoise
from lightning_fedleak.attacks import (
    BagOfWords,
    GradientMembership,
    SubspaceMembership,
    SubspaceTexts,
    SubspaceWords,
)
from lightning_fedleak.callbacks import LeakageMonitor
from lightning_fedleak.defenses.gradient_compression import Method
from lightning_fedleak.engine import Games
from tests.attacks.row_space.models import VOCABULARY
from tests.callbacks.runs import Kept, Probe, assert_same, fit
from tests.engine.test_row_spaces import LOADER, LORA, model_of
from tests.helpers.lightning_modules import CausalLMModule, random_token_loader
from tests.helpers.loops import lines_of
from tests.helpers.models import own_rng
from tests.helpers.settings import grouped

METHODS = get_args(Method)
LENGTH = 10
STAGES = ("local", "shared", "aggregate")


def module() -> CausalLMModule:
    sizes = {"hidden_size": 192, "intermediate_size": 192, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    with own_rng(1):
        config = transformers.LlamaConfig(vocab_size=VOCABULARY, **sizes, **heads)
        return CausalLMModule(transformers.LlamaForCausalLM(config).train(), optimizer="sgd")


def fit_under(root: Path, callbacks: Any, *defenses: Any, n: int = 2) -> Any:
    data = random_token_loader(n=n, batch_size=1, length=LENGTH, vocab=VOCABULARY)
    strategy = DefendedStrategy("auto", [*defenses])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return fit(callbacks, root, module=module(), loader=data, strategy=strategy)


def watched(root: Path, attacks: list[Any], *defenses: Any, n: int = 2, **settings: Any) -> Any:
    monitor = LeakageMonitor(attacks, every_n_steps=1, folder=root, **grouped(settings))
    fit_under(root, [monitor], *defenses, n=n)
    return monitor


def lossy(method: Method) -> GradientCompression:
    return GradientCompression(method, rank=8, error_feedback=False)


@pytest.mark.parametrize("method", METHODS)
def test_an_attack_reads_compressed_gradients_or_is_unknown(tmp_path: Path, method: Method) -> None:
    public = [[5 + (7 * i + 3 * j) % 290 for j in range(LENGTH)] for i in range(12)]
    words = [BagOfWords(), SubspaceWords(capacity_seconds=0)]
    members = [SubspaceMembership(public), GradientMembership(public, public_rows=6, controls=4)]
    games = Games(targets=4)
    monitor = watched(tmp_path, [*words, *members], lossy(method), stages=STAGES[:2], games=games)
    assert monitor.latest["leakage/gradient_membership/auc"] == 1
    assert monitor.latest["leakage/subspace_membership/auc"] > 0.9
    for attack in words:
        assert monitor.latest[f"leakage_local/{attack.name}/f1"] > 0.5
        value = monitor.latest[f"leakage/{attack.name}/f1"]
        if method in attack.reads_compressed:
            assert value > 0
        else:
            assert math.isnan(value)
    if method in SubspaceWords.reads_compressed:
        assert monitor.latest["leakage/subspace_words/f1"] == 1
        if method != "low_rank":  # whose rows are combinations of the rows that there were
            assert monitor.latest["leakage/subspace_words/certified"] == 0
    why = {line["stage"]: line["unknown"] for line in lines_of(tmp_path, "bag_of_words")}
    assert f"compressed by '{method}'" in why["shared"]
    assert why["local"] is None


@pytest.mark.slow
@pytest.mark.parametrize("method", sorted(SubspaceTexts.reads_compressed))
def test_texts_are_read_through_it(tmp_path: Path, method: Method) -> None:
    monitor = watched(tmp_path, [SubspaceTexts(budget_seconds=20)], lossy(method), n=1)
    assert monitor.latest["leakage/subspace_texts/token_accuracy"] == 1
    assert monitor.latest["leakage/subspace_texts/exact_sentences"] == 1


@pytest.mark.parametrize("method", ["topk", "low_rank"])  # whose memory is a factor too
def test_with_error_feedback_what_goes_in_is_read_with_the_noise_before(
    tmp_path: Path, method: Method
) -> None:
    probe = Probe()
    noise, compression = GradientNoise(None, 1e-6, seed=3), GradientCompression(method, share=0.01)
    attacks = [probe, SubspaceWords(capacity_seconds=0)]
    monitor = watched(tmp_path / "a", attacks, noise, compression, stages=STAGES)
    plain = Probe()
    watched(tmp_path / "b", [plain], GradientNoise(None, 1e-6, seed=3))
    assert torch.equal(plain.at("shared")[0], probe.at("shared")[0])
    assert not torch.equal(probe.at("local")[0], probe.at("shared")[0])
    assert "leakage_aggregate/subspace_words/f1" in monitor.latest
    assert compression.memory


@pytest.mark.parametrize("error_feedback", [False, True])
def test_training_is_bit_identical(tmp_path: Path, error_feedback: bool) -> None:
    first, second = (
        GradientCompression("low_rank", error_feedback=error_feedback) for _ in range(2)
    )
    plain = Kept.of(fit_under(tmp_path / "a", [], first, n=3))
    attacks = [BagOfWords(), SubspaceWords(capacity_seconds=0)]
    monitor = LeakageMonitor(attacks, every_n_steps=1)
    assert_same(plain, fit_under(tmp_path / "b", [monitor], second, n=3))
    assert first.memory.keys() == second.memory.keys()
    assert all(torch.equal(t, second.memory[n]) for n, t in first.memory.items())


def defended(root: Path, attacks: Any, *defenses: Any, lora: Any = None, **settings: Any) -> Any:
    monitor = LeakageMonitor(attacks, every_n_steps=1, **grouped(settings))
    module = CausalLMModule(model_of(lora=lora).train(), optimizer="adamw")
    strategy = DefendedStrategy("auto", [*defenses])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit([monitor], root, module=module, loader=random_token_loader(**LOADER), strategy=strategy)
    return monitor


class Levels(SubspaceWords):
    """Keeps the standard deviation of the noise that it knows of."""

    needs_control = False  # its runs are counted

    def __init__(self) -> None:
        super().__init__(capacity_seconds=0)
        self.levels: list[float] = []

    def run(self, view: Any, query: Any = None) -> Any:
        self.levels.append(view.gradients[-1].noise_std)
        return super().run(view, query)


class Mute(GradientNoise):
    name = "mute"

    def noise_std(self, context: Any) -> float:
        raise RuntimeError("private")


class Second(GradientNoise):
    name = "second"


def test_attacks_know_the_noise_of_the_defences_or_are_unknown(tmp_path: Path) -> None:
    attack, stages = Levels(), ("local", "shared", "aggregate")
    noise = (GradientNoise(None, 3e-3), Second(1.0, 4e-3))
    defended(tmp_path / "a", attack, *noise, lora=LORA, stages=stages)
    assert attack.levels == pytest.approx([0.0, 5e-3, 5e-3] * 4)
    monitor = defended(
        tmp_path / "b", SubspaceWords(capacity_seconds=0), Mute(None, 1e-3), lora=LORA
    )
    assert (monitor.looks, monitor.failures) == (4, 3)  # a LoRA's first step has no result yet
