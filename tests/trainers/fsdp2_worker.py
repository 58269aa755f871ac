"""One of two gloo processes with FSDP2: a loop of one's own, Accelerate, and transformers' Trainer.

Started by test_fsdp2.py, which says what is right. On a CPU accelerate trains DDP in place of
FSDP2; :func:`fsdp2_on_a_cpu` lets it take its own path.
"""

import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

os.environ |= {"RANK": os.environ["LOCAL_RANK"], "ACCELERATE_USE_CPU": "true"}

import torch
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from torch import Tensor, distributed
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from transformers import Trainer
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from lightning_fedleak import FCMembership
from lightning_fedleak.engine.channels import control
from lightning_fedleak.model import whole_models
from lightning_fedleak.model.taps import Step, shuffle_words
from lightning_fedleak.model.whole_models import whole_model
from lightning_fedleak.trainers import Watch
from tests.callbacks.runs import Probe
from tests.helpers.cases import Cases
from tests.helpers.settings import grouped
from tests.helpers.sharded import whole
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
BF16 = torch.bfloat16
POLICIES = {
    "accelerate's": MixedPrecisionPolicy(BF16, BF16, BF16),
    "reduced in float32": MixedPrecisionPolicy(BF16, torch.float32),
    "reduced in bfloat16 alone": MixedPrecisionPolicy(None, BF16),
}


def shard(model: Any, policy: MixedPrecisionPolicy | None = None, **more: Any) -> Any:
    more |= {} if policy is None else {"mp_policy": policy}
    for module in [*model.modules()]:
        if isinstance(module, LlamaDecoderLayer):
            fully_shard(module, **more)
    return fully_shard(model, **more)


def state(model: Any, optimizer: Any) -> list[Tensor]:
    """Return weights, optimizer state and random numbers."""
    kept = [v for entry in optimizer.state.values() for v in entry.values()]
    return [*map(whole, [*model.parameters(), *kept]), torch.get_rng_state()]


# ---- a loop of one's own ---------------------------------------------------------------------


def loop(
    folder: Path,
    model: Any,
    attacks: Any = None,
    *,
    optimizer: Any = None,
    accumulated: int = 1,
    every: int = 1,
    around: Callable[[int], Any] = lambda batch: nullcontext(),
    backward: Callable[[Tensor], object] = Tensor.backward,
    **settings: Any,
) -> tuple[list[Tensor], Watch | None]:
    """Train on every second text; what is accumulated is reduced with its last batch."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = optimizer or torch.optim.AdamW(trained, 1e-3)
    data = texts()[RANK::2]
    watch = None
    if attacks is not None:
        watch = Watch(
            model, optimizer, attacks, **grouped(settings, folder=folder, every_n_steps=every)
        )
    with watch or nullcontext():
        for number in range(STEPS * accumulated):
            ids = data[number : number + 1]
            last = number % accumulated == accumulated - 1
            with around(number), watch.step({"input_ids": ids}) if watch else nullcontext():
                if accumulated > 1 and hasattr(model, "set_requires_gradient_sync"):
                    model.set_requires_gradient_sync(last)
                backward(model(input_ids=ids, labels=ids).loss)
                if last:
                    torch.nn.utils.clip_grad_norm_(trained, CLIP)
                    optimizer.step()
                    optimizer.zero_grad()
            if watch is not None and watch.should_stop:
                break
    return state(model, getattr(optimizer, "optimizer", optimizer)), watch


def truth(accumulated: int = 1) -> list[list[int]]:
    """Return the words of both processes at each step."""
    n = 2 * accumulated
    places = texts()[: n * STEPS, :-1]  # nothing is predicted at the last place
    return [sorted(set(part.flatten().tolist())) for part in places.split(n)]


@CASES.named("own loop")
def own_loop(folder: Path) -> dict[str, Any]:
    attack, probe = words(), Probe()
    plain, _ = loop(folder, shard(model_of()))
    read, watch = loop(folder, shard(model_of()), [attack, probe])
    assert watch is not None
    expected, norm = expected_head(1)
    distance = (probe.at("shared")[0] - expected).norm() / expected.norm()
    return {
        "same": same(plain, read), "named": attack.named == truth(), "distance": float(distance),
        "clipped": norm > CLIP, "f1": watch.latest["leakage/subspace_words/f1"],
        "client": lines(folder)[0]["client"],
        "strategy": lines(folder, "run")[0]["training"]["strategy"],
    }  # fmt: skip


@CASES.named("collectives")
def collectives(folder: Path) -> dict[str, Any]:
    """Of each step, with a look at every second one, and without a watch."""
    counts: dict[str, list[int]] = {}
    for name in ("plain", "watched"):
        modes: list[CommDebugMode] = []

        def counted(_: int, modes: list[CommDebugMode] = modes) -> CommDebugMode:
            modes.append(CommDebugMode())
            return modes[-1]

        attacks = [words()] if name == "watched" else None
        loop(folder, shard(model_of()), attacks, every=2, around=counted)
        counts[name] = [mode.get_total_counts() for mode in modes]
    return counts


@CASES.named("mixed precision")
def mixed_precision(folder: Path) -> dict[str, Any]:
    """The lowest F1 of words at a look under policies of FSDP2, and their control."""
    out = {}
    for policy, value in POLICIES.items():
        for kind in ("full", "lora", "accumulated"):
            attack, accumulated = words(), 1 + (kind == "accumulated")
            model = shard(model_of(lora=kind == "lora"), value)
            place = folder / policy / kind
            _, watch = loop(place, model, [attack], accumulated=accumulated)
            assert watch is not None
            name = "leakage/subspace_words"
            out[f"{policy}, {kind}"] = {
                "f1": min(map(agreement, attack.named, truth(accumulated))),
                "control": watch.latest[f"{name}/control"],
                "certified": watch.latest[f"{name}/certified"],
                "facts": lines(place, "run")[0]["training"]["mixed_precision"],
            }
    return out


@CASES.named("control fails on one")
def control_fails_on_one(folder: Path) -> dict[str, Any]:
    """The first of two calls of a control cannot be made again, on one process alone."""

    def with_cache(*args: Any, **kwargs: Any) -> Step:
        step = shuffle_words(*args, **kwargs)
        if RANK == 0:
            call = step.calls[0]
            call = replace(call, arguments=call.arguments | {"past_key_values": object()})
            step.calls[0] = call
        return step

    plain, _ = loop(folder / "plain", shard(model_of()), accumulated=2)
    with patch.object(control, "shuffle_words", with_cache):
        read, watch = loop(folder, shard(model_of()), [words()], accumulated=2)
    assert watch is not None
    controlled = [line["metrics"]["f1_of_control"]["value"] for line in lines(folder)]
    return {"same": same(plain, read), "controls": controlled}


@CASES.named("embedding's own weight")
def embedding_weight(folder: Path) -> dict[str, Any]:
    """A module reads an embedding's weight, and not only rows of it, while parts are gathered."""
    model = shard(model_of(tie_word_embeddings=True))
    embedding, ids = model.model.embed_tokens, texts()[:2]
    expected = whole(embedding.weight)
    with whole_model(model, as_read=True):
        rows, norm = embedding(ids), embedding.weight.norm()
    return {"rows": torch.equal(rows, expected[ids]), "norm": torch.equal(norm, expected.norm())}


@CASES.named("refused")
def refused(folder: Path) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    partly = model_of()
    for block in partly.model.layers:
        fully_shard(block)
    half = MixedPrecisionPolicy(torch.float16)
    ignoring = model_of()
    fully_shard(ignoring, ignored_params={ignoring.model.embed_tokens.weight})
    tried: dict[str, tuple[Any, dict[str, Any]]] = {
        "rank": (shard(model_of()), {"client": "rank"}),
        "hybrid": (shard(model_of(), mesh=mesh), {}), "partly": (partly, {}),
        "half": (shard(model_of(), half), {}), "ignored": (ignoring, {}),
    }  # fmt: skip
    out = {}
    for name, (model, settings) in tried.items():
        try:
            loop(folder / name, model, [words()], **settings)
        except ValueError as error:
            out[name] = str(error)
    return out


# ---- accelerate ------------------------------------------------------------------------------


def fsdp2_on_a_cpu() -> None:
    """Let accelerate take its FSDP2 path with gloo, which it does for GPUs alone."""
    original = AcceleratorState.__init__

    def __init__(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        original(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.FSDP
            if self._mixed_precision != "no":
                fsdp_plugin.set_mixed_precision(self._mixed_precision)
            self.fsdp_plugin = fsdp_plugin
            PartialState._shared_state["distributed_type"] = self.distributed_type

    AcceleratorState.__init__ = __init__  # type: ignore[method-assign]


def forget_accelerate() -> None:
    AcceleratorState._reset_state(False)
    if PartialState._shared_state:
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_CPU


# ---- transformers' Trainer -------------------------------------------------------------------

FSDP = {
    "fsdp": True,
    "fsdp_config": {
        "version": 2,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
    },
    "max_steps": STEPS,
    "per_device_train_batch_size": 1,
    "max_grad_norm": CLIP,
    "learning_rate": 1e-3,
}


def trained(
    folder: Path,
    attacks: Any = None,
    gates: Any = (),
    model: Any = None,
    kind: Any = Recorded,
    fsdp_config: Any = None,
    resume: str | None = None,
    watch: Any = None,
    **more: Any,
) -> tuple[Any, Any]:
    forget_accelerate()
    settings = FSDP | {"train_dataset": rows()} | more
    settings["fsdp_config"] = FSDP["fsdp_config"] | (fsdp_config or {})  # type: ignore[operator]
    trainer = trainer_of(folder, model_of() if model is None else model, kind=kind, **settings)
    callback = None
    if attacks is not None:
        callback = watched(trainer, attacks, gates, **(watch or {}))
    trainer.train(resume_from_checkpoint=resume)
    assert isinstance(trainer.model_wrapped, FSDPModule)
    return trainer, callback


def final(trainer: Any) -> list[Tensor]:
    return state(trainer.model_wrapped, trainer.optimizer.optimizer)


TRAINERS: dict[str, Callable[[], dict[str, Any]]] = {
    "full": dict,
    "lora": lambda: {"model": model_of(lora=True)},
    "tied": lambda: {"model": model_of(tie_word_embeddings=True)},
    "accumulated": lambda: {"gradient_accumulation_steps": 2},
    "not reentrant": lambda: {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
    },
    "checkpoint_wrapper": lambda: {"fsdp_config": {"activation_checkpointing": True}},
    "evaluated": lambda: {
        "eval_strategy": "steps", "eval_steps": 1, "eval_on_start": True, "eval_dataset": rows(4),
    },
    "bf16 lora": lambda: {"bf16": True, "model": model_of(lora=True)},
}  # fmt: skip


@CASES.named("trainers")
def trainers(folder: Path) -> dict[str, Any]:
    out = {}
    for name, make in TRAINERS.items():
        attack = words()
        plain, _ = trained(folder / f"{name} plain", **make())
        read, callback = trained(folder / name, [attack], **make())
        expected, distinct = read_by_step(read, make().get("gradient_accumulation_steps", 1))
        out[name] = {
            "same": same(final(plain), final(read)) and user_logs(plain) == user_logs(read),
            "lowest": min(map(agreement, attack.named, expected)), "distinct": distinct,
            "looks": len(attack.named), "f1": callback.latest["leakage/subspace_words/f1"],
        }  # fmt: skip
    return out


@CASES.named("trainer's attacks choose themselves")
def chosen(folder: Path) -> dict[str, Any]:
    out = {}
    for bf16 in (False, True):
        _, callback = trained(
            folder / str(bf16), "auto", bf16=bf16, watch={"public_text": texts(40)}
        )
        out[str(bf16)] = {n: v for n, v in callback.latest.items() if n.startswith("leakage/")}
    return out


@CASES.named("attacks on a LoRA choose themselves")
def chosen_for_lora(folder: Path) -> dict[str, Any]:
    replaced = whole_models.parameters_replaced
    with patch.object(whole_models, "parameters_replaced", wraps=replaced) as whole:
        _, watch = loop(folder, shard(model_of(lora=True)), "auto")
    assert watch is not None
    return {"f1": watch.latest["leakage/subspace_words/f1"], "whole": whole.call_count}


@CASES.named("trainer saves and resumes")
def resumes(folder: Path) -> dict[str, Any]:
    return sharded.resumed(trained, folder, final)


@CASES.named("trainer's gate")
def gate(folder: Path) -> dict[str, Any]:
    return sharded.gated(trained, folder)


@CASES.named("trainer's weights")
def weights(folder: Path) -> dict[str, Any]:
    return sharded.asked(trained, folder, final, kind=Trainer)


@CASES.named("trainer refuses")
def trainer_refuses(folder: Path) -> dict[str, Any]:
    tried: dict[str, dict[str, Any]] = {
        "rank": {"attacks": [words()], "watch": {"client": "rank"}},
        "membership": {"attacks": [FCMembership(layer=1)]},
    }
    out = {}
    for name, settings in tried.items():
        try:
            trained(folder / name, **settings)
        except ValueError as error:
            out[name] = str(error)
    return out


if __name__ == "__main__":
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", rank=RANK, world_size=2)
    fsdp2_on_a_cpu()
    CASES.run()
