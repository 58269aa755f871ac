"""What one of two processes trains and records that hold a model in parts: FSDP2, ZeRO."""

from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_fedleak.attacks.memorization import LossRatio
from lightning_fedleak.engine import Memorization
from lightning_fedleak.evaluation.canaries import leave_out
from lightning_fedleak.trainers import Threshold
from tests.attacks.row_space.models import llama, with_lora
from tests.helpers.cases import gathered
from tests.helpers.words import Kept
from tests.trainers.test_transformers import Sequential
from tests.trainers.test_watch import lines

Trains = Callable[..., tuple[Any, Any]]
"""Trains in a folder, and returns the Trainer and its callback."""

STEPS, CLIP = 3, 0.5


def words() -> Kept:
    return Kept(capacity_seconds=0)


def texts(count: int = 24, length: int = 8, seed: int = 2) -> Tensor:
    return torch.randint(3, 300, (count, length), generator=torch.Generator().manual_seed(seed))


def rows(count: int = 24, length: int = 8) -> list[dict[str, Tensor]]:
    return [{"input_ids": ids, "labels": ids} for ids in texts(count, length)]


def model_of(lora: bool = False, **more: Any) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = llama(**more)
        return (with_lora(model, 16, ["q_proj", "k_proj", "v_proj"]) if lora else model).train()


class Recorded(Sequential):
    """Keeps the texts that this process trains on."""

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        self.__dict__.setdefault("texts", []).append(inputs["input_ids"].clone())
        return super().training_step(model, inputs, *args, **kwargs)


def read_by_step(trainer: Any, accumulated: int = 1) -> tuple[list[list[int]], bool]:
    """Return the words of both processes at each step, and whether no two texts were the same."""
    mine, other = gathered([ids[:, :-1].flatten().tolist() for ids in trainer.texts])
    both = [[*a, *b] for a, b in zip(mine, other, strict=True)]
    steps = [[*chain(*both[i : i + accumulated])] for i in range(0, len(both), accumulated)]
    distinct = len({tuple(ids) for ids in mine + other}) == len(mine + other)
    return [sorted(set(step)) for step in steps], distinct


def expected_head(accumulated: int, **more: Any) -> tuple[Tensor, float]:
    """Return plain autograd's clipped mean of the head over both processes' rows, and its norm."""
    model, ids = model_of(**more), texts()[: 2 * accumulated]
    parameters = [*model.parameters()]
    each = [
        torch.autograd.grad(model(input_ids=i, labels=i).loss, parameters) for i in ids[:, None]
    ]
    mean = [torch.stack(parts).mean(0) for parts in zip(*each, strict=True)]
    norm = torch.stack([g.norm() for g in mean]).norm()
    head = mean[[id(p) for p in parameters].index(id(model.lm_head.weight))]
    return head * (CLIP / (norm + 1e-6)).clamp(max=1), float(norm)


def same(one: list[Any], other: list[Any]) -> bool:
    pairs = list(zip(one, other, strict=True))
    return all((a is None and b is None) or torch.equal(a, b) for a, b in pairs)


def gated(train: Trains, folder: Path) -> dict[str, Any]:
    """Return where a gate stops a Trainer, and whether it has saved a checkpoint."""
    gate = Threshold("leakage/worst/words", at_most=0.5, patience=1)
    trainer, _ = train(folder, attacks=[words()], gates=[gate])
    saved = gate.fired is not None and Path(str(gate.fired.checkpoint)).is_dir()
    return {"steps": trainer.state.global_step, "saved": saved}


def resumed(train: Trains, folder: Path, state: Callable[[Any], list[Any]]) -> dict[str, Any]:
    """Return whether a resumed training ends as one that was not stopped, and what it logs."""
    saving = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    once, _ = train(folder / "once", attacks=[words()], **saving)
    train(folder / "parts", attacks=[words()], **saving | {"max_steps": 2})
    path = str(folder / "parts" / "checkpoint-2")
    again, callback = train(folder / "parts", attacks=[words()], resume=path, **saving)
    return {
        "same": same(state(once), state(again)),
        "steps": [line["step"] for line in lines(folder / "parts")],
        "f1": callback.latest["leakage/subspace_words/f1"],
    }


def asked(train, folder, state, **more) -> dict[str, Any]:
    """Return what is logged of trained weights, and whether training was as without a callback."""
    part, _ = leave_out(rows(400, 10), 200, seed=1)
    more |= {
        "max_steps": 12, "train_dataset": part, "per_device_train_batch_size": 8,
        "accelerator_config": {"use_seedable_sampler": False},
    }  # fmt: skip
    memorization = Memorization(max_overhead=4, looks=(0.5,))
    plain, _ = train(folder / "plain", **more)
    watch = {"memorization": memorization}
    read, callback = train(folder / "read", attacks=[LossRatio()], watch=watch, **more)
    return {
        "same": same(state(plain), state(read)),
        "auc": callback.latest["leakage/loss_ratio/auc"],
        "looks": [line["step"] for line in lines(folder / "read")],
    }
