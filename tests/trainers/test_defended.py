"""Defences under transformers' Trainer: what is released, accounted and resumed."""

import json
import math
from collections.abc import Sequence
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
from dp_accounting.rdp import RdpAccountant
from safetensors import safe_open
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_module
from torch.utils import data
from transformers import Trainer, TrainerCallback

from lightning_fedleak import BagOfWords, FCMembership
from lightning_fedleak.defenses import (
    DPSGD,
    ActivationNoise,
    BudgetSpent,
    Defense,
    DefenseError,
    Freeze,
    GradientNoise,
    ReleaseSettings,
    TokenLDP,
    mean_of_sample_means,
)
from lightning_fedleak.defenses.dpsgd import step
from lightning_fedleak.defenses.dpsgd.logical import pieces_of
from lightning_fedleak.defenses.processes import Team
from lightning_fedleak.engine import Games, WatchSettings
from lightning_fedleak.model.anatomy import EMBEDDING_WEIGHT
from lightning_fedleak.trainers import DefendedMixin, LeakageCallback, defended
from lightning_fedleak.trainers.defended_loop import DEFENSES
from lightning_fedleak.trainers.defended_trainer import _split
from tests.callbacks.runs import Probe
from tests.helpers.models import tiny_gpt2, tiny_llama
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
        ("llama", {"pieces": 2}, 1e-6),
        ("lora", {"bf16": True, "pieces": 3}, 2e-2),
        ("dora", {"pieces": 3}, 3e-6),  # processors differ in what they round off
        ("experts", {}, 3e-6),
        ("encoder-decoder", {}, 3e-6),
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
    ("name", "epochs", "build"),
    [
        ("gpt2 tied", 2, lambda: [DPSGD(CLIP, 1.0, seed=3, max_physical_batch_size=2)]),
        ("dora", 1, lambda: [DPSGD(CLIP, 1.0, seed=3)]),
        ("experts", 1, lambda: [DPSGD(CLIP, 1.0, seed=3)]),
        (
            "llama",
            1,
            lambda: [
                Freeze("head"),
                TokenLDP("grr", 9.0, per="token", special_ids=[0], seed=3),
                DPSGD(CLIP, 1.0, seed=3),
                GradientNoise(2.0, 0.1, seed=1),
            ],
        ),
    ],
)
def test_hosts_share_the_same_bits(name: str, epochs: int, build: Any, tmp_path: Path) -> None:
    first, *others = (
        HOSTS[host](tmp_path / host, MODELS[name](), build(), 0.05, num_train_epochs=epochs)
        for host in HOSTS
    )
    assert first.steps == epochs * N // BATCH
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


def of_target() -> DPSGD:
    return DPSGD(CLIP, target_epsilon=3.0, target_delta=1e-3, accountant="rdp")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[DPSGD, Any]:
    """Return a run of two epochs that nothing stops."""
    place, defense = tmp_path_factory.mktemp("whole"), of_target()
    return defense, traced(trainer_of(place, MODELS["llama"](), [defense], num_train_epochs=2))


@pytest.mark.parametrize(  # at an epoch's end, and in its middle
    ("step", "skip"), [(6, True), (4, True), (4, False)]
)
def test_a_resumed_run_forgets_nothing_and_draws_again(step, skip, whole, tmp_path) -> None:
    settings: dict[str, Any] = {"num_train_epochs": 2, "save_strategy": "steps", "save_steps": step}
    (first, uninterrupted), stopped = whole, of_target()
    trainer = trainer_of(tmp_path, MODELS["llama"](), [stopped], **settings)
    trainer.add_callback(Stop(step))
    trainer.train()
    folder = tmp_path / f"checkpoint-{step}"
    with safe_open(folder / DEFENSES, "pt") as file:  # safetensors, and JSON
        assert json.loads(file.metadata()["state"])
    again = of_target()
    trainer = trainer_of(
        tmp_path / "again", MODELS["llama"](), [again], ignore_data_skip=not skip, **settings
    )
    resumed = traced(trainer, str(folder))
    assert uninterrupted.steps == resumed.steps == first.releases == again.releases == 12
    assert len(resumed.shared) == 12 - step
    assert again.noise_multiplier == stopped.noise_multiplier == first.noise_multiplier
    assert again.privacy.epsilon == pytest.approx(first.privacy.epsilon)
    if skip:
        assert len(resumed.drawn) == 12 - step  # none is drawn and left out
    assert resumed.drawn[: 12 - step] != uninterrupted.drawn[step:]


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
        trainer, [BagOfWords(), FCMembership(1), probe], folder=tmp_path, every_n_steps=2,
        games=Games(targets=2), settings=WatchSettings(stages=("local", "shared")),
    )  # fmt: skip
    trainer.add_callback(callback)
    trace, latest = traced(trainer), callback.latest
    size = probe.seen[0][2].numel()
    for number, stage, gradient in probe.seen:
        released = {"local": trace.local, "shared": trace.shared}[stage][number]
        assert torch.equal(gradient.flatten(), released[:size])
    assert latest["leakage_local/bag_of_words/f1"] > 0.9 > latest["leakage/bag_of_words/f1"] + 0.1
    assert latest["privacy/noise_multiplier"] == 4.0
    (record,) = tmp_path.rglob("run.jsonl")
    assert json.loads(record.read_text().splitlines()[0])["defenses"][0]["name"] == "dpsgd"


# Settings of transformers' Trainer under defences: handled, or refused with the mend.


def private() -> DPSGD:
    return DPSGD(CLIP, 1.0, seed=1)


PUBLIC = {"eval_strategy": "steps", "save_strategy": "steps", "eval_dataset": rows(4)}
BEST = {"load_best_model_at_end": True, "eval_steps": 1, "save_steps": 1, "max_steps": 1}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"auto_find_batch_size": True}, "Pass max_physical_batch_size to DPSGD"),
        ({"label_smoothing_factor": 0.1}, "compute_loss_func=.* smoothed mean"),
        ({"train_sampling_strategy": "group_by_length"}, "Leave train_sampling_strategy out"),
        ({"torch_compile": True}, "torch_compile=True hides .* Leave it out"),
        (PUBLIC | BEST, "load_best_model_at_end decides by evaluations.*outside_epsilon=True"),
        (
            {"lr_scheduler_type": "reduce_lr_on_plateau", **PUBLIC},
            "the scheduler ReduceLROnPlateau decides .*outside_epsilon=True",
        ),
        (
            {"metric_for_best_model": "loss", "save_total_limit": 1, "save_steps": 1, **PUBLIC},
            "metric_for_best_model with save_total_limit decides .*outside_epsilon=True",
        ),
        ({"optim": "adalomo"}, "steps while backward runs.*use another"),
        # The size of that noise depends on the longest text of a batch.
        ({"neftune_noise_alpha": 5.0}, "Leave out neftune_noise_alpha"),
    ],
)
def test_refused_with_the_mend(settings: Any, message: str, tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, tiny_llama(), [private()], **settings)
    before = [p.detach().clone() for p in trainer.model.parameters()]
    with pytest.raises(DefenseError, match=message):
        trainer.train()
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))


@pytest.mark.parametrize(
    "schedule", [torch.optim.lr_scheduler.ReduceLROnPlateau, transformers.optimization.GreedyLR]
)
def test_a_scheduler_on_a_metric_is_refused(schedule: Any, tmp_path: Path) -> None:
    model, defense = tiny_llama(), private()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizers = (optimizer, schedule(optimizer))
    trainer = trainer_of(tmp_path, model, [defense], optimizers=optimizers, **PUBLIC)
    with pytest.raises(DefenseError, match=f"the scheduler {schedule.__name__} decides"):
        trainer.train()
    assert defense.releases == 0


def early(trainer: Any) -> None:
    trainer.add_callback(transformers.EarlyStoppingCallback())


def searched(trainer: Any) -> None:
    trainer.train(trial={"learning_rate": 1.0})


def flattened(trainer: Any) -> None:
    trainer.data_collator = transformers.DataCollatorWithFlattening()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (early, "EarlyStoppingCallback decides by evaluations.*leave it out"),
        (searched, "hyperparameter_search .*choose on public data"),
        (flattened, "rows of"),
        (lambda t: setattr(t, "is_fsdp_enabled", True), "FullySharded.*torchrun"),
        (lambda t: setattr(t, "is_deepspeed_enabled", True), "DeepSpeedEngine .*torchrun"),
        (lambda t: setattr(t.args, "_n_gpu", 2), "DataParallel.*torchrun"),
        (
            lambda t: setattr(t.accelerator.state, "_mixed_precision", "fp16"),
            "fp16 .*use bf16=True",
        ),
        (lambda t: setattr(t, "compute_loss", print), "changes the loss outside of the defences"),
        (
            lambda t: setattr(t.args, "push_to_hub", True),
            r"from before the defence.*trainer.model.push_to_hub",
        ),
        (lambda t: setattr(t.args, "packing", True), "packed or padding-free .*packing=False"),
    ],
)
def test_what_is_changed_later_is_refused_too(change: Any, message: str, tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, tiny_llama(), [private()])

    def change_and_train() -> None:
        change(trainer)
        trainer.train()

    with pytest.raises(DefenseError, match=message):
        change_and_train()
    trainer.accelerator.state._mixed_precision = "no"


def test_a_model_that_was_loaded_sharded_is_refused(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, tiny_llama(), [private()])
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        distribute_module(trainer.model.lm_head, mesh)
        with pytest.raises(DefenseError, match=r"tensor parallelism .*load it whole"):
            trainer.train()
    finally:
        distributed.destroy_process_group()


class Outside(DefendedMixin, transformers.Trainer):
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(*args, **kwargs) * 2.0


def adalora() -> torch.nn.Module:
    import peft

    settings = {"target_modules": ["q_proj"], "init_r": 4, "target_r": 2, "total_step": 9}
    return peft.get_peft_model(tiny_llama(), peft.AdaLoraConfig(**settings))


class OwnStep(transformers.Trainer):
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        return super().training_step(*args, **kwargs)


class KTOTrainer(transformers.Trainer):
    """Named as TRL's."""


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Outside, "Outside changes the loss outside .*pass it to defended"),
        (OwnStep, "OwnStep.training_step is not known: change compute_loss"),
        (KTOTrainer, "KTOTrainer compares several texts .*train on single texts"),
    ],
)
def test_trainers_that_compute_otherwise_are_refused(kind, message, tmp_path) -> None:
    with pytest.raises(DefenseError, match=message):
        trainer_of(tmp_path, tiny_llama(), [private()], kind=kind).train()


@pytest.mark.parametrize(
    ("build", "defenses", "message"),
    [
        (adalora, lambda: [private()], r"changes ranks.*LoraConfig\(use_rslora=True\)"),
        (tiny_llama, lambda: [ActivationNoise(1, sigma=0.1)], "hidden states.*DefendedStrategy"),
        (
            tiny_llama,
            lambda: [GradientNoise(1.0, 0.1), private()],
            "put 'dpsgd' before gradient_noise",
        ),
    ],
)
def test_models_and_defences_that_do_not_fit(build, defenses, message, tmp_path) -> None:
    with pytest.raises(DefenseError, match=message):
        trainer_of(tmp_path, build(), defenses()).train()


def test_a_loader_that_is_split_keeps_its_settings() -> None:
    plain = data.DataLoader(rows(9), 2, num_workers=1, prefetch_factor=3, pin_memory=True)
    parts = [_split(plain, 2, rank) for rank in range(2)]
    for part in parts:
        for name in ("batch_size", "num_workers", "prefetch_factor", "pin_memory", "collate_fn"):
            assert getattr(part, name) == getattr(plain, name), name
    examples = [number for part in parts for number in part.sampler]
    assert set(examples) == set(range(9))


def test_private_choices_may_be_said_to_be_outside(tmp_path: Path) -> None:
    defense = private()
    trainer = trainer_of(tmp_path, tiny_llama(), [defense], outside_epsilon=True, **(PUBLIC | BEST))
    trainer.add_callback(transformers.EarlyStoppingCallback())
    trainer.train()
    assert defense.releases == 1


class Scaled(transformers.Trainer):
    """Has a loss of its own, as TRL's SFTTrainer does."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        labels = inputs["labels"]
        rest = {name: value for name, value in inputs.items() if name != "labels"}
        return mean_of_sample_means(model(**rest).logits, labels, causal=True)


def smooth(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
    assert num_items_in_batch is None
    return mean_of_sample_means(outputs.logits, labels, causal=True)


def test_losses_of_ones_own_give_the_same_sums(tmp_path: Path) -> None:
    """Each text's gradient is that of its own mean, however the Trainer is given the loss."""
    runs = [
        traced(trainer_of(tmp_path, tiny_llama(), [private()], **more))
        for more in ({}, {"kind": Scaled}, {"compute_loss_func": smooth})
    ]
    for run in runs[1:]:
        for a, b in zip(runs[0].shared, run.shared, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


class Peers(Team):
    """Stands for a process whose peers need 6 pieces."""

    def largest(self, values: Sequence[float]) -> list[float]:
        return [max(float(value), 6.0) for value in values]


def test_a_process_with_fewer_rows_than_others_computes_the_same(tmp_path, monkeypatch) -> None:
    """Pieces that stand in for no rows add nothing; the Trainer takes labels out of each."""

    def among_peers(batch: Any, samples: int, max_rows: int, *_: Any) -> Any:
        return pieces_of(batch, samples, max_rows, Peers())

    def run() -> list[torch.Tensor]:
        trainer = trainer_of(
            tmp_path, tiny_llama(), [DPSGD(CLIP, 0.0, seed=1)], compute_loss_func=smooth,
            per_device_train_batch_size=2, gradient_accumulation_steps=2,
        )  # fmt: skip
        return traced(trainer).shared

    alone = run()
    monkeypatch.setattr(step, "pieces_of", among_peers)
    for a, b in zip(alone, run(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_the_users_arguments_serve_two_runs(tmp_path: Path) -> None:
    arguments = transformers.TrainingArguments(
        str(tmp_path), max_steps=1, report_to=[], use_cpu=True, per_device_train_batch_size=2,
        gradient_accumulation_steps=3,
    )  # fmt: skip
    before = arguments.to_dict()
    for _ in range(2):
        defense = private()
        trainer = defended(transformers.Trainer)(
            tiny_llama(), arguments, train_dataset=rows(), defenses=[defense]
        )
        trainer.train()
        assert trainer.args.per_device_train_batch_size == 6
        assert trainer.args.max_grad_norm == 0.0
        assert defense.max_physical_batch_size == 2
        assert arguments.to_dict() == before


def test_arguments_stay_where_they_are_and_model_init_is_called(tmp_path: Path) -> None:
    class Own(DefendedMixin, transformers.Seq2SeqTrainer):
        pass

    arguments = transformers.Seq2SeqTrainingArguments(
        str(tmp_path), max_steps=2, report_to=[], use_cpu=True
    )
    defense = private()
    trainer = Own(tiny_llama(), arguments, None, rows(), defenses=[defense])
    trainer.train()
    assert defense.releases == 2
    assert defended(Own) is Own
    again = private()
    plain = transformers.TrainingArguments(str(tmp_path), max_steps=2, report_to=[], use_cpu=True)
    defended(transformers.Trainer)(
        None, plain, train_dataset=rows(), model_init=lambda: tiny_llama(), defenses=[again]
    ).train()
    assert again.releases == 2
    with pytest.raises(TypeError, match="defenses"):
        defended(transformers.Trainer)(tiny_llama(), plain)
