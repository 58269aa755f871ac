"""What is read while training of gradients that are compressed on their way."""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import transformers

from lightning_fedleak import DefendedStrategy, GradientCompression, GradientNoise, RiskGate
from lightning_fedleak.attacks import (
    AlignedFlatChat,
    BagOfWords,
    GradientMembership,
    PublicText,
    RevealLabels,
    SubspaceMembership,
    SubspaceTexts,
    SubspaceWords,
)
from lightning_fedleak.callbacks import LeakageMonitor
from lightning_fedleak.defenses.gradient_compression import Method
from lightning_fedleak.engine.channels import Games
from tests.attacks.row_space.models import VOCABULARY
from tests.callbacks.runs import Kept, Probe, assert_same, fit
from tests.helpers.lightning_modules import CausalLMModule, random_token_loader

METHODS = get_args(Method)
LENGTH = 10


def module() -> CausalLMModule:
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=192,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return CausalLMModule(transformers.LlamaForCausalLM(config).train(), optimizer="sgd")


def watched(root: Path, attacks: list[Any], *defenses: Any, n: int = 2, **settings: Any) -> Any:
    monitor = LeakageMonitor(attacks, every_n_steps=1, **settings)
    data = random_token_loader(n=n, batch_size=1, length=LENGTH, vocab=VOCABULARY)
    strategy = DefendedStrategy("auto", [*defenses]) if defenses else "auto"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = fit([monitor], root, module=module(), loader=data, strategy=strategy)
    return monitor, trainer


def lossy(method: Method, **settings: Any) -> GradientCompression:
    return GradientCompression(method, rank=8, error_feedback=False, **settings)


def lines(root: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in next(root.rglob("leakage.jsonl")).open()]


@pytest.mark.parametrize("method", METHODS)
def test_what_an_attack_cannot_read_is_unknown_and_not_low(tmp_path: Path, method: Method) -> None:
    attacks = [BagOfWords(), RevealLabels(), SubspaceWords(capacity_seconds=0)]
    stages = ("local", "shared", "aggregate")
    monitor, _ = watched(tmp_path, attacks, lossy(method), n=1, stages=stages)
    for attack in attacks:
        assert monitor.latest[f"leakage_local/{attack.name}/f1"] > 0.5
        for root in (f"leakage/{attack.name}", f"leakage_aggregate/{attack.name}"):
            read = {n: v for n, v in monitor.latest.items() if n.startswith(f"{root}/")}
            if method in attack.reads_compressed:
                assert read[f"{root}/f1"] > 0
                continue
            rates = [v for n, v in read.items() if not n.endswith("exposed")]
            assert rates
            assert all(map(math.isnan, rates)), read
    said = {(x["attack"], x["stage"]): x.get("unknown") or "" for x in lines(tmp_path)}
    for stage in ("shared", "aggregate"):
        assert f"compressed (method '{method}')" in said["bag_of_words", stage]
    assert not said["bag_of_words", "local"]


def test_a_gate_takes_what_cannot_be_read_for_a_breach(tmp_path: Path) -> None:
    monitor = LeakageMonitor([BagOfWords()], every_n_steps=1)
    gate = RiskGate("leakage/bag_of_words/f1", at_most=0.99, patience=0)
    data = random_token_loader(n=4, batch_size=1, length=LENGTH, vocab=VOCABULARY)
    strategy = DefendedStrategy("auto", [lossy("sign")])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = fit([monitor, gate], tmp_path, module=module(), loader=data, strategy=strategy)
    assert trainer.global_step < len(data)


@pytest.mark.parametrize("method", sorted(SubspaceWords.reads_compressed))
def test_words_are_read_through_it(tmp_path: Path, method: Method) -> None:
    monitor, _ = watched(tmp_path, [SubspaceWords(capacity_seconds=0)], lossy(method))
    assert monitor.latest["leakage/subspace_words/f1"] == 1
    if method != "low_rank":  # whose rows are combinations of the rows that there were
        assert monitor.latest["leakage/subspace_words/certified"] == 0


@pytest.mark.parametrize("deferred", [False, True])
def test_the_run_says_what_a_readout_is_fitted_on(tmp_path: Path, deferred: bool) -> None:
    """With error feedback what goes into the compression is read, and nothing else."""
    text = torch.randint(VOCABULARY, (16, LENGTH), generator=torch.Generator().manual_seed(2))
    attack = AlignedFlatChat(PublicText(text), lengths=(LENGTH,))
    defense = GradientCompression("topk", share=0.2, error_feedback=deferred)
    monitor, _ = watched(tmp_path, [attack], defense)
    assert attack.arguments().get("compression") == (None if deferred else "topk 0.2")
    assert math.isfinite(monitor.latest["leakage/aligned_flatchat/f1"])


@pytest.mark.slow
@pytest.mark.parametrize("method", sorted(SubspaceTexts.reads_compressed))
def test_texts_are_read_through_it(tmp_path: Path, method: Method) -> None:
    monitor, _ = watched(tmp_path, [SubspaceTexts(budget_seconds=20)], lossy(method), n=1)
    assert monitor.latest["leakage/subspace_texts/token_accuracy"] == 1
    assert monitor.latest["leakage/subspace_texts/exact_sentences"] == 1


@pytest.mark.parametrize("method", METHODS)
def test_members_are_told_apart_through_it(tmp_path: Path, method: Method) -> None:
    public = [[5 + (7 * i + 3 * j) % 290 for j in range(LENGTH)] for i in range(12)]
    attacks = [
        SubspaceMembership(public, blocks=2),
        GradientMembership(public, public_rows=6, controls=4),
    ]
    monitor, _ = watched(tmp_path, attacks, lossy(method), games=Games(targets=4))
    assert monitor.latest["leakage/gradient_membership/auc"] == 1
    assert monitor.latest["leakage/subspace_membership/auc"] > 0.9


@pytest.mark.parametrize("method", METHODS)
def test_with_error_feedback_all_that_goes_in_is_read(tmp_path: Path, method: Method) -> None:
    stages, probe = ("local", "shared", "aggregate"), Probe()
    attacks = [probe, SubspaceWords(capacity_seconds=0)]
    compression = GradientCompression(method, share=0.01)
    monitor, _ = watched(tmp_path, attacks, compression, stages=stages)
    local = probe.at("local")
    assert len(local) == 2
    later = probe.at("shared")
    assert len(later) == 2
    assert all(torch.equal(a, b) for a, b in zip(local, later, strict=True))
    assert monitor.latest["leakage/subspace_words/f1"] == 1
    assert monitor.latest["leakage_aggregate/subspace_words/f1"] == 1
    assert compression.memory


def test_with_error_feedback_what_goes_in_has_the_noise_of_the_defences_before(
    tmp_path: Path,
) -> None:
    probe, plain = Probe(), Probe()
    noise = [GradientNoise(None, 1e-3, seed=3) for _ in range(2)]
    watched(tmp_path / "a", [plain], noise[0], n=1)
    watched(tmp_path / "b", [probe], noise[1], GradientCompression("topk"), n=1)
    assert torch.equal(plain.at("shared")[0], probe.at("shared")[0])


def test_several_steps_of_compressed_gradients_are_unknown(tmp_path: Path) -> None:
    attacks = [SubspaceWords(capacity_seconds=0)]
    monitor, _ = watched(tmp_path, attacks, lossy("topk"), n=4, local_steps=2)
    assert math.isnan(monitor.latest["leakage/subspace_words/f1"])
    assert all("compressed one by one" in line["unknown"] for line in lines(tmp_path))


@pytest.mark.parametrize("error_feedback", [False, True])
def test_training_is_bit_identical(tmp_path: Path, error_feedback: bool) -> None:
    data = random_token_loader(n=3, batch_size=1, length=LENGTH, vocab=VOCABULARY)
    compressions = [
        GradientCompression("low_rank", error_feedback=error_feedback) for _ in range(2)
    ]
    strategy = DefendedStrategy("auto", [compressions[0]])
    plain = Kept.of(fit([], tmp_path / "a", module=module(), loader=data, strategy=strategy))
    attacks = [BagOfWords(), SubspaceWords(capacity_seconds=0)]
    _, seen = watched(tmp_path / "b", attacks, compressions[1], n=3)
    assert_same(plain, seen)
    memories = [compression.memory for compression in compressions]
    assert memories[0].keys() == memories[1].keys()
    assert all(torch.equal(t, memories[1][n]) for n, t in memories[0].items())
