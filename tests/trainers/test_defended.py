"""Defences under transformers' Trainer: what is released, accounted and resumed."""

from __future__ import annotations

import json
import math
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
from dp_accounting.rdp import RdpAccountant
from peft import LoraConfig, get_peft_model
from safetensors import safe_open
from transformers import (
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainerCallback,
    default_data_collator,
)

from lightning_fedleak import BagOfWords, FCMembership
from lightning_fedleak.defenses import (
    DPSGD,
    BudgetSpent,
    Defense,
    DefenseError,
    Freeze,
    GradientNoise,
    ReleaseSettings,
    TokenLDP,
)
from lightning_fedleak.engine import Games, WatchSettings
from lightning_fedleak.model.anatomy import EMBEDDING_WEIGHT
from lightning_fedleak.trainers import DefendedMixin, LeakageCallback, defended
from lightning_fedleak.trainers.defended_loop import DEFENSES
from tests.callbacks.runs import Probe
from tests.helpers.models import tiny_gpt2, tiny_t5
from tests.trainers import hosts
from tests.trainers.hosts import (
    BATCH,
    CLIP,
    HOSTS,
    MODELS,
    N,
    clipped_sum,
    in_a_loop,
    rows,
    traced,
    trainer_of,
)
from tests.trainers.test_transformers import trainer_of as plain_trainer

CLIPS = {"lora": 0.25}


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b).norm() / b.norm().clamp(min=1e-12))


@pytest.mark.parametrize(
    ("name", "settings", "most"),
    [
        ("gpt2 tied", {}, 1e-6),
        ("llama", {"pieces": 2}, 1e-6),
        ("lora", {}, 3e-6),  # processors differ in what they round off: 1.02e-6 was seen
        ("lora", {"bf16": True, "pieces": 3}, 2e-2),
        ("dora", {"pieces": 3}, 3e-6),
        ("experts", {}, 3e-6),
        ("experts", {"bf16": True, "pieces": 2}, 2e-2),
        ("gpt2 tied", {"per_device_train_batch_size": 1}, 1e-6),
    ],
)
def test_what_is_shared_is_the_clipped_sum(name, settings, most, tmp_path) -> None:
    """In a loop; the other hosts share the same bits."""
    settings = dict(settings)
    pieces, clip = settings.pop("pieces", None), CLIPS.get(name, CLIP)
    defense = DPSGD(clip, noise_multiplier=0.0, seed=1, max_physical_batch_size=pieces)
    trace = in_a_loop(tmp_path, MODELS[name](), [defense], 0.0, **settings)
    batch = settings.get("per_device_train_batch_size", BATCH)
    assert trace.steps == defense.releases == N // batch == len(trace.drawn)
    assert len({len(drawn) for drawn in trace.drawn}) > 1
    for shared, drawn in zip(trace.shared, trace.drawn, strict=True):
        if drawn:
            brute = clipped_sum(trace.model, drawn, clip, bf16=settings.get("bf16", False))
            assert distance(shared * batch, brute) < most
        else:
            assert not shared.any()


@pytest.mark.parametrize(
    ("name", "build"),
    [
        ("llama", lambda: [DPSGD(CLIP, noise_multiplier=1.0, seed=3)]),
        ("gpt2 tied", lambda: [DPSGD(CLIP, 1.0, seed=3, max_physical_batch_size=2)]),
        ("dora", lambda: [DPSGD(CLIP, 1.0, seed=3)]),
        ("experts", lambda: [DPSGD(CLIP, 1.0, seed=3)]),
        (
            "llama",
            lambda: [
                Freeze("head"),
                TokenLDP("grr", 9.0, per="token", special_ids=[0], seed=3),
                DPSGD(CLIP, 1.0, seed=3),
                GradientNoise(2.0, 0.1, seed=1),
            ],
        ),
    ],
)
def test_hosts_share_the_same_bits(name: str, build: Any, tmp_path: Path) -> None:
    first, *others = (
        HOSTS[host](tmp_path / host, MODELS[name](), build(), 0.05, num_train_epochs=2)
        for host in HOSTS
    )
    assert first.steps == 2 * N // BATCH
    for other in others:
        assert other.drawn == first.drawn
        for a, b in zip(first.shared, other.shared, strict=True):
            assert torch.equal(a, b)
        for p, q in zip(first.model.parameters(), other.model.parameters(), strict=True):
            assert torch.equal(p, q)


@pytest.mark.parametrize(
    "build", [lambda: DPSGD(CLIP, 1.0, seed=3), lambda: GradientNoise(1.0, 1.0)]
)
def test_no_norm_of_an_undefended_gradient_is_logged(build: Any, tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, MODELS["llama"](), [build()], logging_steps=1)
    sent: list[dict[str, float]] = []

    class Send(TrainerCallback):
        def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
            sent.append(logs)

    trainer.add_callback(Send())
    trainer.train()
    assert sum("loss" in logs for logs in sent) == trainer.state.global_step > 1
    assert not any("grad_norm" in logs for logs in [*sent, *trainer.state.log_history])


def test_weights_written_when_training_ends_are_refused(tmp_path: Path) -> None:
    class Writes(TrainerCallback):
        def on_train_end(self, *_: Any, model: Any, **__: Any) -> None:
            model.lm_head.weight.data[0] += 1e-3

    trainer = trainer_of(tmp_path, MODELS["llama"](), [DPSGD(CLIP, 1.0, seed=3)])
    trainer.add_callback(Writes())
    with pytest.raises(DefenseError, match=r"'lm_head.weight' was written to since"):
        trainer.train()


def test_accumulated_batches_become_one_that_is_run_in_pieces(tmp_path: Path) -> None:
    """A batch of 8 is released once, whether it is accumulated or run by four rows at a time."""
    accumulated = DPSGD(CLIP, 1.0, seed=3)
    trainer = trainer_of(
        tmp_path, MODELS["llama"](), [accumulated], gradient_accumulation_steps=2, max_grad_norm=1.0
    )
    args = trainer.args
    assert (args.gradient_accumulation_steps, args.per_device_train_batch_size) == (1, 8)
    assert args.max_grad_norm == 0.0
    first = traced(trainer)
    pieces = DPSGD(CLIP, 1.0, seed=3, max_physical_batch_size=4)
    second = traced(
        trainer_of(tmp_path, MODELS["llama"](), [pieces], per_device_train_batch_size=8)
    )
    assert first.steps == accumulated.releases == second.steps == 3
    assert max(map(len, first.drawn)) > 4
    assert all(torch.equal(a, b) for a, b in zip(first.shared, second.shared, strict=True))


class Identity(Defense):
    """Acts on gradients, and leaves them as they are."""

    name = "identity"
    guarantee = "none"

    def on_gradients(self, parameters: Any, context: Any) -> None:
        assert context.root is not None


@pytest.mark.parametrize("defenses", [[], [Identity()]], ids=["none", "identity"])
def test_training_is_the_trainers_own(defenses: list[Defense], tmp_path: Path) -> None:
    """Accumulation, clipping, shuffling and the number of words in a batch stay as they are."""
    settings: dict[str, Any] = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.3}
    weights = []
    for given in (None, defenses):
        kind: Any = Trainer
        if given is not None:
            kind = type("T", (DefendedMixin, Trainer), {})
            kind = type("G", (kind,), {"__init__": partialmethod(kind.__init__, defenses=given)})
        trainer = plain_trainer(tmp_path, kind=kind, train_dataset=rows(), dropout=0.1, **settings)
        trainer.train()
        weights.append([p.detach() for p in trainer.model.parameters()])
    assert all(torch.equal(p, q) for p, q in zip(*weights, strict=True))


def test_checkpointed_activations_give_the_same_sums(tmp_path: Path) -> None:
    defenses, more = [DPSGD(CLIP, 0.0, seed=1)], {"gradient_checkpointing": True, "max_steps": 2}
    trace = traced(trainer_of(tmp_path, MODELS["llama"](), defenses, 0.0, **more))
    trace.model.gradient_checkpointing_disable()
    for shared, drawn in zip(trace.shared, trace.drawn, strict=True):
        assert distance(shared * BATCH, clipped_sum(trace.model, drawn, CLIP)) < 1e-6


# ---- the account -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "steps"),
    [({"num_train_epochs": 1.5}, 9), ({"max_steps": 8, "num_train_epochs": 9}, 8)],
)
def test_the_account_is_that_of_the_steps(settings, steps, tmp_path) -> None:
    defense = DPSGD(CLIP, target_epsilon=3.0, target_delta=1e-3, accountant="rdp")
    trainer = trainer_of(tmp_path, MODELS["llama"](), [defense], **settings)
    trainer.train()
    privacy = defense.privacy
    assert trainer.state.global_step == privacy.releases == steps
    assert 2.97 < privacy.epsilon <= 3.0
    event = PoissonSampledDpEvent(BATCH / N, GaussianDpEvent(defense.noise_multiplier))
    account = RdpAccountant().compose(SelfComposedDpEvent(event, steps))
    assert privacy.epsilon == pytest.approx(account.get_epsilon(1e-3), rel=5e-3)
    assert 0.8 < defense.measured_noise_multiplier / defense.noise_multiplier < 1.25


class Stop(TrainerCallback):
    """Ends the training after a step, with its checkpoint."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = state.global_step == self.step


@pytest.mark.parametrize(  # at an epoch's end, and in its middle
    ("step", "skip"), [(6, True), (4, True), (4, False)]
)
def test_a_resumed_run_forgets_nothing_and_draws_again(step, skip, tmp_path) -> None:
    def defense() -> DPSGD:
        return DPSGD(CLIP, target_epsilon=3.0, target_delta=1e-3, accountant="rdp")

    settings: dict[str, Any] = {"num_train_epochs": 2, "save_strategy": "steps", "save_steps": step}
    first, stopped = defense(), defense()
    whole = traced(trainer_of(tmp_path, MODELS["llama"](), [first], num_train_epochs=2))
    trainer = trainer_of(tmp_path, MODELS["llama"](), [stopped], **settings)
    trainer.add_callback(Stop(step))
    trainer.train()
    folder = tmp_path / f"checkpoint-{step}"
    with safe_open(folder / DEFENSES, "pt") as file:  # safetensors, and JSON
        assert json.loads(file.metadata()["state"])
    again = defense()
    trainer = trainer_of(
        tmp_path / "again", MODELS["llama"](), [again], ignore_data_skip=not skip, **settings
    )
    resumed = traced(trainer, str(folder))
    assert whole.steps == resumed.steps == first.releases == again.releases == 12
    assert len(resumed.shared) == 12 - step
    assert again.noise_multiplier == stopped.noise_multiplier == first.noise_multiplier
    assert again.privacy.epsilon == pytest.approx(first.privacy.epsilon)
    if skip:
        assert len(resumed.drawn) == 12 - step  # none is drawn and left out
    assert resumed.drawn[: 12 - step] != whole.drawn[step:]


def test_a_checkpoint_without_an_account_is_refused(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "max_steps": 2}
    trainer_of(tmp_path, MODELS["llama"](), [DPSGD(CLIP, 1.0)], **settings).train()
    (tmp_path / "checkpoint-2" / DEFENSES).unlink()
    trainer = trainer_of(tmp_path, MODELS["llama"](), [DPSGD(CLIP, 1.0)], max_steps=4)
    with pytest.raises(
        DefenseError, match=r"checkpoint-2 has no defenses.safetensors.*Resume from"
    ):
        trainer.train(resume_from_checkpoint=tmp_path / "checkpoint-2")


def test_the_last_affordable_step_ends_the_training(tmp_path: Path) -> None:
    known: dict[str, Any] = {"target_epsilon": 5.0, "target_delta": 1e-3, "accountant": "rdp"}
    settings: dict[str, Any] = {"save_strategy": "epoch"}
    trainer = trainer_of(tmp_path, MODELS["llama"](), [DPSGD(CLIP, **known)], **settings)
    trainer.train()
    longer = DPSGD(CLIP, **known)
    trainer = trainer_of(tmp_path, MODELS["llama"](), [longer], num_train_epochs=3)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == longer.releases == 6
    assert math.isclose(longer.privacy.epsilon, 5.0, rel_tol=0.01)
    raises = DPSGD(CLIP, release=ReleaseSettings(on_budget="raise"), **known)
    trainer = trainer_of(tmp_path, MODELS["llama"](), [raises], num_train_epochs=3)
    with pytest.raises(BudgetSpent, match="after 6 releases"):
        trainer.train(resume_from_checkpoint=True)


def test_a_second_training_adds_to_the_account(tmp_path: Path) -> None:
    defense = DPSGD(CLIP, 1.0)
    trainer = trainer_of(
        tmp_path, MODELS["llama"](), [defense], max_steps=2, eval_dataset=rows(4),
        eval_strategy="steps", eval_steps=1,
    )  # fmt: skip
    trainer.train()
    trainer.train()
    assert defense.releases == defense.accountant.steps == 4
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in trainer.model.modules())


def test_a_watch_reads_what_is_released_and_before_it_the_bare_gradient(tmp_path: Path) -> None:
    probe = Probe(role=EMBEDDING_WEIGHT)
    trainer = trainer_of(tmp_path, tiny_gpt2(tied=False, dropout=0.0), [DPSGD(CLIP, 4.0, seed=3)])
    callback = LeakageCallback(
        trainer,
        [BagOfWords(), FCMembership(1), probe],
        folder=tmp_path,
        every_n_steps=2,
        games=Games(targets=2),
        settings=WatchSettings(stages=("local", "shared")),
    )
    trainer.add_callback(callback)
    trace, latest = traced(trainer), callback.latest
    size = probe.seen[0][2].numel()
    for step, stage, gradient in probe.seen:
        released = {"local": trace.local, "shared": trace.shared}[stage][step]
        assert torch.equal(gradient.flatten(), released[:size])
    assert latest["leakage_local/bag_of_words/f1"] > 0.9 > latest["leakage/bag_of_words/f1"] + 0.1
    assert latest["privacy/noise_multiplier"] == 4.0
    (record,) = tmp_path.rglob("run.jsonl")
    assert json.loads(record.read_text().splitlines()[0])["defenses"][0]["name"] == "dpsgd"


def test_a_seq2seq_lora_shares_the_clipped_sum(tmp_path, monkeypatch) -> None:
    model = get_peft_model(
        tiny_t5(dropout=0.0), LoraConfig(r=2, target_modules=["q", "v"], init_lora_weights=False)
    )
    defense = DPSGD(CLIP, noise_multiplier=0.0, seed=1)
    arguments = Seq2SeqTrainingArguments(
        str(tmp_path), per_device_train_batch_size=BATCH, num_train_epochs=1, learning_rate=0.0,
        report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    pairs = [dict(row) for row in rows()]
    trainer = defended(Seq2SeqTrainer)(
        model, arguments, default_data_collator, train_dataset=pairs, defenses=[defense]
    )
    trace = hosts.traced(trainer)
    assert trace.steps == N // BATCH
    monkeypatch.setattr(hosts, "rows", lambda: pairs)
    for shared, drawn in zip(trace.shared, trace.drawn, strict=True):
        if drawn:
            expected = hosts.clipped_sum(trace.model, drawn, CLIP)
            # Processors differ in what they round off: up to 1.6e-6 was seen.
            assert float((shared * BATCH - expected).norm() / expected.norm()) < 3e-6
