"""One of two gloo processes with DeepSpeed's ZeRO: transformers' Trainer, and Accelerate.

Started by test_zero.py, which says what is right. Asked for a CPU accelerate trains without
DeepSpeed, else it takes two processes without GPUs for one; :func:`deepspeed_on_cpus` mends that.
"""

import os
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any
from unittest.mock import patch

os.environ |= {"RANK": os.environ["LOCAL_RANK"], "DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0"}

import accelerate
import deepspeed
import torch
from accelerate.state import AcceleratorState, PartialState
from deepspeed.utils import safe_get_full_fp32_param
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import training_args

from lightning_fedleak import FCMembership
from lightning_fedleak.attacks import AlignedFlatChat
from lightning_fedleak.model.anatomy import find_anatomy
from lightning_fedleak.trainers import Watch
from lightning_fedleak.trainers.zero import ZeROStep, check_engine
from tests.callbacks.runs import Probe
from tests.helpers.cases import Cases, gathered
from tests.helpers.settings import grouped
from tests.helpers.words import agreement
from tests.trainers import sharded
from tests.trainers.sharded import (
    CLIP,
    STEPS,
    Recorded,
    expected_head,
    model_of,
    read_by_step,
    rows,
    same,
    texts,
    words,
)
from tests.trainers.test_transformers import trainer_of, user_logs, watched
from tests.trainers.test_watch import lines

RANK = int(os.environ["RANK"])
CASES = Cases()


def config(stage: int, persistent: bool = False, **more: Any) -> dict[str, Any]:
    threshold = {} if persistent else {"stage3_param_persistence_threshold": 0}
    zero = {"stage": stage, "overlap_comm": False} | threshold
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_allow_untested_optimizer": True,
        "zero_optimization": zero,
        "bf16": {"enabled": "auto"},
    } | more


def trained(
    folder: Path,
    stage: int,
    attacks: Any = None,
    gates: Any = (),
    model: Any = None,
    resume: str | None = None,
    watch: Any = None,
    counts: bool = False,
    **more: Any,
) -> tuple[Any, Any]:
    AcceleratorState._reset_state(True)
    settings = {
        "train_dataset": rows(), "max_steps": STEPS, "per_device_train_batch_size": 1,
        "max_grad_norm": CLIP, "learning_rate": 1e-3, "optim": "adamw_torch", "use_cpu": False,
        "deepspeed": config(stage), "kind": Recorded,
    } | more  # fmt: skip
    trainer = trainer_of(folder, model_of() if model is None else model, **settings)
    callback = None
    if attacks is not None:
        callback = watched(trainer, attacks, gates, **(watch or {}))
    trainer.counted = Counted(trainer)
    with trainer.counted if counts else nullcontext():
        trainer.train(resume_from_checkpoint=resume)
    assert isinstance(trainer.model_wrapped, deepspeed.DeepSpeedEngine)
    assert trainer.model_wrapped.zero_optimization_stage() == stage
    assert trainer.accelerator.num_processes == 2
    return trainer, callback


class Counted(TorchDispatchMode):
    """Counts the collectives of each batch, and their bytes, from its begin to the next one's."""

    def __init__(self, trainer: Any) -> None:
        super().__init__()
        self.counts: list[int] = []
        self.brought: list[int] = []
        original = trainer.get_batch_samples

        def get_batch_samples(*args: Any, **kwargs: Any) -> Any:
            self.counts.append(0)
            self.brought.append(0)
            return original(*args, **kwargs)

        trainer.get_batch_samples = get_batch_samples

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], float | int):
            return args[0]  # a number that an operation was called with arrives as it is
        result = func(*args, **(kwargs or {}))
        if func.namespace == "c10d" and self.counts:
            self.counts[-1] += 1
            self.brought[-1] += sum(t.nbytes for t in tree_leaves(result) if isinstance(t, Tensor))
        return result


def state(engine: nn.Module) -> list[Tensor]:
    """Return the weights, whole and in float32, and random numbers."""
    return [*map(safe_get_full_fp32_param, engine.parameters()), torch.get_rng_state()]


def checkpointed(reentrant: bool) -> dict[str, Any]:
    return {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": reentrant},
    }


RUNS: dict[str, Callable[[], dict[str, Any]]] = {
    "1": lambda: {"stage": 1},
    "2": lambda: {"stage": 2},
    "3": lambda: {"stage": 3},
    "1 accumulated": lambda: {"stage": 1, "gradient_accumulation_steps": 2},
    "2 accumulated": lambda: {"stage": 2, "gradient_accumulation_steps": 2},
    "3 accumulated": lambda: {"stage": 3, "gradient_accumulation_steps": 2},
    "3 tied": lambda: {"stage": 3, "model": model_of(tie_word_embeddings=True)},
    "3 reentrant": lambda: {"stage": 3} | checkpointed(True),
    "3 not reentrant": lambda: {"stage": 3} | checkpointed(False),
    "3 persistent": lambda: {"stage": 3, "deepspeed": config(3, persistent=True)},
}


@CASES.named("trainers")
def trainers(folder: Path) -> dict[str, Any]:
    out = {}
    for name, make in RUNS.items():
        accumulated = make().get("gradient_accumulation_steps", 1)
        attacks = [words(), AlignedFlatChat(texts(40, seed=3)), Probe()]
        plain, _ = trained(folder / f"{name} plain", **make())
        read, callback = trained(folder / name, attacks=attacks, **make())
        named, distinct = read_by_step(read, accumulated)
        tied = {"tie_word_embeddings": "tied" in name}
        head, norm = expected_head(accumulated, **tied)
        difference = attacks[-1].at("shared")[0] - head
        out[name] = {
            "same": same(state(plain.model_wrapped), state(read.model_wrapped))
            and user_logs(plain) == user_logs(read),
            "lowest": min(map(agreement, attacks[0].named, named)),
            "distance": float(difference.norm() / head.norm()),
            "clipped": norm > CLIP,
            "distinct": distinct,
            "looks": len(attacks[0].named),
            "f1": callback.latest["leakage/subspace_words/f1"],
            "flatchat": callback.latest["leakage/aligned_flatchat/f1"],
            "controls": [callback.latest[f"leakage/{a.name}/control"] for a in attacks[:2]],
            "strategy": lines(folder / name, "run")[0]["training"]["strategy"],
        }
    return out


@CASES.named("lora")
def lora(folder: Path) -> dict[str, Any]:
    out = {}
    for stage in (2, 3):
        attack = words()
        plain, _ = trained(folder / f"{stage} plain", stage, model=model_of(lora=True))
        read, _ = trained(folder / str(stage), stage, [attack], model=model_of(lora=True))
        named, _ = read_by_step(read)
        out[str(stage)] = {
            "same": same(state(plain.model_wrapped), state(read.model_wrapped)),
            "lowest": min(map(agreement, attack.named, named)),
        }
    return out


@CASES.named("mixed precision")
def mixed_precision(folder: Path) -> dict[str, Any]:
    out = {}
    for stage in (2, 3):
        for kind in ("full", "lora", "accumulated")[: 1 if stage == 2 else 3]:
            attack, accumulated = words(), 1 + (kind == "accumulated")
            place = folder / f"{stage} {kind}"
            model = model_of(lora=kind == "lora")
            read, callback = trained(
                place, stage, [attack], model=model, gradient_accumulation_steps=accumulated,
                bf16=True,
            )  # fmt: skip
            named, _ = read_by_step(read, accumulated)
            controls = [line["metrics"]["f1_of_control"]["value"] for line in lines(place)]
            out[f"{stage} {kind}"] = {
                "lowest": min(map(agreement, attack.named, named)),
                "control": mean(controls),  # each is rounded anew
                "f1": callback.latest["leakage/subspace_words/f1"],
                "facts": lines(place, "run")[0]["training"].get("mixed_precision"),
            }
    return out


@CASES.named("collectives")
def collectives(folder: Path) -> dict[str, Any]:
    """Of each batch, with a look at every second one, and without a callback."""
    out: dict[str, Any] = {}
    anatomy = find_anatomy(model_of())
    reads = [anatomy.parameter(role) for role in words().needs(anatomy).gradients]
    reads += [anatomy.embedding.weight, *anatomy.blocks[0].input_layernorm.parameters()]
    out["declared"] = sum(p.nbytes for p in reads)
    for stage in (1, 2, 3):
        more = {"counts": True, "max_steps": 5}
        plain, _ = trained(folder / f"{stage} plain", stage, **more)
        watch = {"every_n_steps": 2}
        read, callback = trained(folder / str(stage), stage, [words()], watch=watch, **more)
        without_control = words()
        without_control.needs_control = False
        alone, _ = trained(folder / f"{stage} alone", stage, [without_control], watch=watch, **more)
        pairs = zip(alone.counted.brought, plain.counted.brought, strict=True)
        out[str(stage)] = {
            "brought": [a - b for a, b in pairs],
            "plain": plain.counted.counts,
            "watched": read.counted.counts,
            "f1": callback.latest["leakage/subspace_words/f1"],
        }
    return out


@CASES.named("attacks choose themselves")
def chosen(folder: Path) -> dict[str, Any]:
    _, callback = trained(folder, 3, "auto", watch={"public_text": texts(40, seed=3)})
    return {n: v for n, v in callback.latest.items() if n.startswith("leakage/")}


@CASES.named("gate")
def gate(folder: Path) -> dict[str, Any]:
    return sharded.gated(partial(trained, stage=2), folder)


@CASES.named("resumed")
def resumed(folder: Path) -> dict[str, Any]:
    weights = lambda trainer: state(trainer.model_wrapped)[:-1]  # noqa: E731
    return sharded.resumed(partial(trained, stage=2), folder, weights)


@CASES.named("weights")
def weights(folder: Path) -> dict[str, Any]:
    more = {"deepspeed": config(3, train_micro_batch_size_per_gpu=8)}
    whole = lambda trainer: state(trainer.model_wrapped)  # noqa: E731
    return sharded.asked(partial(trained, stage=3), folder, whole, **more)


@CASES.named("loops")
def loops(folder: Path) -> dict[str, Any]:
    """Two batches a step, by Accelerate, and by an engine of one's own."""
    mine, other = gathered([ids[:-1].tolist() for ids in texts()[RANK::2][: 2 * STEPS]])
    both = [{*a, *b} for a, b in zip(mine, other, strict=True)]
    named = [sorted(both[i] | both[i + 1]) for i in range(0, len(both), 2)]
    out = {}
    for name in ("1", "3", "2 without Accelerate"):
        states, attack = [], words()
        for attacks in (None, [attack]):
            states.append(loop(folder / name, name, attacks))
        out[name] = {
            "same": same(*states),
            "lowest": min(map(agreement, attack.named, named)),
            "looks": len(attack.named),
            "strategy": lines(folder / name, "run")[0]["training"]["strategy"],
        }
    loop(folder / "zeroed", "3 without Accelerate, zeroed", [words()])
    zeroed = [line["metrics"]["f1"]["value"] for line in lines(folder / "zeroed")]
    return {**out, "zeroed": {"f1": zeroed}}


def loop(folder: Path, name: str, attacks: Any) -> list[Tensor]:
    settings = config(
        int(name[0]), gradient_accumulation_steps=2, gradient_clipping=CLIP, bf16={"enabled": False}
    )
    model: Any = model_of()
    optimizer: Any = torch.optim.AdamW(model.parameters(), 1e-3)
    accelerator = None
    if "without" in name:
        model, optimizer, _, _ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=settings
        )
    else:
        AcceleratorState._reset_state(True)
        plugin = accelerate.DeepSpeedPlugin(hf_ds_config=settings)
        accelerator = accelerate.Accelerator(deepspeed_plugin=plugin)
        model, optimizer = accelerator.prepare(model, optimizer)
    watch = None
    if attacks is not None:
        watch = Watch(model, optimizer, attacks, **grouped({}, folder=folder, every_n_steps=1))
    with watch or nullcontext():
        for ids in texts()[RANK::2][: 2 * STEPS, None]:
            with (
                nullcontext() if accelerator is None else accelerator.accumulate(model),
                nullcontext() if watch is None else watch.step({"input_ids": ids}),
            ):
                loss = model(input_ids=ids, labels=ids).loss
                if accelerator is None:
                    if "zeroed" in name:
                        model.optimizer.zero_grad()
                    model.backward(loss)
                    model.step()
                else:
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
    return state(model)


@CASES.named("refused")
def refused(folder: Path) -> dict[str, Any]:
    out = {}
    tried: dict[str, dict[str, Any]] = {
        "rank": {"attacks": [words()], "watch": {"client": "rank"}},
        "membership": {"attacks": [FCMembership(layer=1)]},
        "stage": {"attacks": [words()], "stage": 0},
    }
    for name, settings in tried.items():
        out[name] = message(lambda s=settings, n=name: trained(folder / n, **{"stage": 2} | s))
    engine = trained(folder / "engine", 2)[0].model_wrapped
    check_engine(engine, "Watch")
    settings = {
        "offload_optimizer": {"device": "cpu"},
        "offload_param": {"device": "nvme"},
        "zero_quantized_gradients": True,
        "zero_quantized_weights": True,
        "zero_quantized_nontrainable_weights": True,
        "zero_hpz_partition_size": 2,
    }
    for name, value in settings.items():
        zero = type(engine._config.zero_config)(**{"stage": 2, name: value})
        with patch.object(engine._config, "zero_config", zero):
            out[name] = message(lambda: check_engine(engine, "Watch"))
    for name, asked in {"fp16": "fp16_enabled", "torch_autocast": "torch_autocast_enabled"}.items():
        with patch.object(engine, asked, lambda: True):
            out[name] = message(lambda: check_engine(engine, "Watch"))
    with patch.object(engine, "gradient_average", False):
        out["gradient_allreduce_op"] = message(lambda: check_engine(engine, "Watch"))
    out["inner"] = message(lambda: ZeROStep.of_engine(engine.module, "Watch"))
    with patch.object(engine, "dp_world_size", 1):
        out["parallelism"] = message(lambda: check_engine(engine, "Watch"))
    return out


def deepspeed_on_cpus() -> None:
    """Let accelerate count processes on gloo, and transformers train in bfloat16 without a GPU."""
    original = PartialState._prepare_backend
    PartialState._prepare_backend = lambda self, cpu, *more: original(self, True, *more)
    training_args.is_torch_bf16_gpu_available = lambda: True


def message(function: Callable[[], object]) -> str:
    try:
        function()
    except ValueError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    torch.set_num_threads(1)
    deepspeed.ops.__compatible_ops__.clear()  # nothing is compiled
    deepspeed_on_cpus()
    deepspeed.init_distributed("gloo", rank=RANK, world_size=2)
    CASES.run()
