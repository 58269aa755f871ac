"""Settings of transformers' Trainer under defences: handled, or refused with the mend."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_module
from torch.utils import data

from lightning_fedleak.defenses import (
    DPSGD,
    ActivationNoise,
    DefenseError,
    GradientNoise,
    mean_of_sample_means,
)
from lightning_fedleak.defenses.dpsgd import step
from lightning_fedleak.defenses.dpsgd.logical import pieces_of
from lightning_fedleak.defenses.processes import Team
from lightning_fedleak.trainers import DefendedMixin, defended
from lightning_fedleak.trainers.defended_trainer import _split
from tests.helpers.models import tiny_llama
from tests.trainers.hosts import CLIP, rows, traced, trainer_of


def private() -> DPSGD:
    return DPSGD(CLIP, 1.0, seed=1)


PUBLIC = {"eval_strategy": "steps", "save_strategy": "steps", "eval_dataset": rows(4)}
BEST = {"load_best_model_at_end": True, "eval_steps": 1, "save_steps": 1, "max_steps": 1}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"auto_find_batch_size": True}, "Pass max_physical_batch_size to DPSGD"),
        ({"label_smoothing_factor": 0.1}, "compute_loss_func=.* mean_of_sample_means"),
        ({"train_sampling_strategy": "group_by_length"}, "Leave train_sampling_strategy out"),
        ({"torch_compile": True}, "torch_compile=True hides .* Leave it out"),
        (PUBLIC | BEST, "load_best_model_at_end decides by evaluations.*outside_epsilon=True"),
        (
            {"lr_scheduler_type": "reduce_lr_on_plateau", **PUBLIC},
            "lr_scheduler_type=reduce_lr_on_plateau decides .*outside_epsilon=True",
        ),
        (
            {"metric_for_best_model": "loss", "save_total_limit": 1, "save_steps": 1, **PUBLIC},
            "metric_for_best_model with save_total_limit decides .*outside_epsilon=True",
        ),
        ({"optim": "adalomo"}, "steps while backward runs.*use another"),
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


def test_noise_on_embeddings_is_refused(tmp_path: Path) -> None:
    """The size of NEFTune's noise depends on the longest text of a batch."""
    trainer = trainer_of(tmp_path, tiny_llama(), [private()], 0.0, neftune_noise_alpha=5.0)
    with pytest.raises(DefenseError, match="Leave out neftune_noise_alpha"):
        trainer.train()


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
