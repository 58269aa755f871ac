"""One of two gloo processes with FSDP2; started by test_monitor_fsdp2.py, which says what is right.

The reference is computed here too: one process, without sharding, on the same texts as both.
"""

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.strategies import ModelParallelStrategy, SingleDeviceStrategy, Strategy
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Subset

from lightning_fedleak.attacks import (
    AlignedFlatChat,
    BagOfWords,
    FlatChat,
    PrefixInversion,
    SubspaceWords,
)
from lightning_fedleak.attacks.base import Attack, Query
from lightning_fedleak.attacks.public_text import PublicText
from lightning_fedleak.callbacks import LeakageMonitor, RiskGate, WatchSettings
from lightning_fedleak.defenses import Defense, GradientNoise
from lightning_fedleak.model.anatomy import find_anatomy
from lightning_fedleak.model.snapshots import Observation
from lightning_fedleak.strategies import DefendedStrategy
from tests.attacks.row_space.models import gpt2, llama, with_lora
from tests.callbacks.runs import Probe, fit, footprint
from tests.helpers.cases import Cases, gathered
from tests.helpers.lightning_modules import random_token_loader
from tests.helpers.models import tiny_gpt2
from tests.helpers.sharded import ShardedModule, whole

CLIP, SIGMA, TEXTS, STEPS = 0.05, 0.02, 4, 3
RANK = int(os.environ["LOCAL_RANK"])
STAGES = ("local", "shared", "aggregate")
CASES = Cases()


def gpt2_module(dropout: float = 0.0, optimizer: Any = "sgd") -> ShardedModule:
    model = tiny_gpt2(layers=2, dropout=dropout, tied=False).train()
    return ShardedModule(model, 1.0 if optimizer == "sgd" else 1e-3, optimizer)


def texts(rank: int | None) -> DataLoader[Any]:
    """Step by step ``TEXTS`` of a process's own; of both, one after the other, for None."""
    data = random_token_loader(2 * TEXTS * STEPS).dataset
    ranks = (0, 1) if rank is None else (rank,)
    rows = [
        2 * TEXTS * s + TEXTS * r + i for s in range(STEPS) for r in ranks for i in range(TEXTS)
    ]
    return DataLoader(Subset(data, rows), batch_size=TEXTS * len(ranks))


def run(
    root: Path,
    callbacks: Sequence[L.Callback],
    defenses: Sequence[Defense],
    *,
    alone: bool = False,
    dropout: float = 0.0,
    optimizer: str = "sgd",
    **settings: Any,
) -> tuple[L.Trainer, Strategy]:
    inner = (
        SingleDeviceStrategy("cpu")
        if alone
        else ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    )
    strategy = DefendedStrategy(inner, defenses, client="world")
    trainer = fit(
        list(callbacks), root, module=gpt2_module(dropout, optimizer),
        loader=texts(None if alone else RANK), strategy=strategy, devices=1 if alone else 2,
        use_distributed_sampler=False, **settings,
    )  # fmt: skip
    return trainer, strategy


def public_text() -> PublicText:
    generator = torch.Generator().manual_seed(5)
    return PublicText(torch.randint(3, 97, (32, 12), generator=generator))


def attacks() -> list[Attack]:
    aligned = AlignedFlatChat(public_text(), calibration_tokens=200, lengths=(12,))
    aligned.refresh_every = 1
    return [
        FlatChat(n_types=40),
        FlatChat(public_text=public_text(), shapes=((4, 12), (8, 12)), name="counting"), aligned,
        AlignedFlatChat("sampled", calibration_tokens=200, lengths=(12,), name="sampled"),
        PrefixInversion(1, public_text(), types=None), BagOfWords(),
    ]  # fmt: skip


def values_of(monitor: LeakageMonitor) -> dict[str, str]:
    return {n: str(v) for n, v in monitor.latest.items() if n.startswith("leakage")}


def state(trainer: L.Trainer) -> list[Tensor]:
    """Weights, optimizer state and random numbers."""
    return [*map(whole, footprint(trainer))]


def compared(folder: Path) -> dict[str, Any]:
    """Every look of the sharded run, and of the run of one process on the same texts."""

    def found_in(root: Path, *, alone: bool) -> dict[str, Any]:
        settings = WatchSettings(texts=TEXTS * (1 + alone), stages=STAGES)
        monitor = LeakageMonitor(attacks(), every_n_steps=1, settings=settings)
        looks: list[dict[str, str]] = []
        run(root, [monitor, Each(monitor, looks)], [GradientNoise(CLIP, 0.0)], alone=alone)
        return {"looks": looks, "failures": monitor.failures}

    return {
        "sharded": found_in(folder / "sharded", alone=False),
        "single": found_in(folder / f"alone-{RANK}", alone=True),
    }


class Each(L.Callback):
    """Keeps what a monitor found at each look."""

    def __init__(self, monitor: LeakageMonitor, looks: list[dict[str, str]]) -> None:
        self.monitor, self.looks = monitor, looks

    def on_train_batch_end(self, *_: Any) -> None:
        if self.monitor.looks > len(self.looks):
            self.looks.append(values_of(self.monitor))


CASES["values"] = compared


@CASES.named("undisturbed")
def undisturbed(folder: Path) -> dict[str, Any]:
    """Dropout, AdamW and noise that a seed gives, with and without looks."""
    found = []
    settings: dict[str, Any] = {"dropout": 0.2, "optimizer": "adamw"}
    for name in ("plain", "watched"):
        callbacks: list[L.Callback] = []
        if name == "watched":
            callbacks = [
                LeakageMonitor(attacks(), every_n_steps=1, settings=WatchSettings(stages=STAGES)),
                RiskGate("leakage/flatchat/f1", at_most=1.0, action="harden"),
            ]
        noise = GradientNoise(CLIP, SIGMA, seed=3)
        trainer, _ = run(folder / name, callbacks, [noise], **settings)
        found.append(state(trainer))
    sharded = all(isinstance(p, DTensor) for p in trainer.lightning_module.parameters())
    same = all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    return {"same": same, "sharded": sharded, "steps": trainer.global_step}


class FailsOnOne(FlatChat):
    default_name = "fails_on_one"

    def run(self, view: Observation, query: Query | None = None) -> Any:
        if RANK == 1:
            raise RuntimeError("only here")
        return super().run(view, query)


class ReadsFailOnOne(PrefixInversion):
    default_name = "reads_fail_on_one"

    def reconstruct(self, *given: Any) -> Any:
        if RANK == 1:
            raise RuntimeError("only here")
        return super().reconstruct(*given)


@CASES.named("fails on one")
def fails_on_one(folder: Path) -> dict[str, Any]:
    failing: list[Attack] = [FailsOnOne(n_types=40), ReadsFailOnOne(1, public_text(), types=None)]
    monitor = LeakageMonitor([*failing, *attacks()], every_n_steps=1)
    trainer, _ = run(folder, [monitor], [GradientNoise(CLIP, 0.0)])
    return {
        "steps": trainer.global_step,
        "failures": monitor.failures,
        "values": {n: v for n, v in values_of(monitor).items() if n.endswith(("/f1", "accuracy"))},
    }


@CASES.named("hardened")
def hardened(folder: Path) -> dict[str, Any]:
    """A gate turns the noise up at the first two looks; the run is saved, and goes on."""
    out: dict[str, Any] = {}
    path = folder / "saved.ckpt"
    settings: dict[str, Any] = {"max_epochs": 1, "at_most": -1.0}
    for part in ("first", "resumed"):
        noise = GradientNoise(CLIP, SIGMA, max_hardenings=2)
        monitor = LeakageMonitor(Probe(k=20), every_n_steps=1)
        gate = RiskGate("leakage/probe/f1", at_most=settings.pop("at_most"), action="harden")
        trainer, _ = run(folder / part, [gate, monitor], [noise], **settings)
        if part == "first":
            trainer.save_checkpoint(path)
            settings = {"max_epochs": 2, "at_most": 1.0, "ckpt_path": str(path)}
        out[part] = {
            "notches": [noise.notches, gate.notches],
            "steps": trainer.global_step,
            "equal": all(
                torch.equal(*pair)
                for pair in zip(*gathered([whole(p) for p in state(trainer)[:-2]]), strict=True)
            ),
            "looks": monitor.looks,
        }
    return out


def module_of(lora: bool, make: Callable[[], nn.Module]) -> ShardedModule:
    """Wide enough for its inputs to be distinguished; with LoRA or whole."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = make()
        if lora:
            model = with_lora(model, 8, ["q_proj", "v_proj"] if make is llama else ["c_attn"])
    return ShardedModule(model.train(), optimizer="adamw")


class BroughtBytes(TorchDispatchMode):
    """Counts the bytes that collectives bring to this process, of whatever kind they are."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        own = func.namespace in ("c10d", "_c10d_functional")
        if own and not any(word in str(func) for word in ("wait", "_wrap_tensor")):
            self.total += sum(t.nbytes for t in tree_leaves(result) if isinstance(t, Tensor))
        return result


class BytesBySteps(L.Callback):
    """Notes how many bytes each step brings to this process, and before them the fit's start."""

    def __init__(self, counted: BroughtBytes) -> None:
        self.counted, self.by_step = counted, list[int]()

    def on_train_batch_end(self, *_: Any) -> None:
        self.by_step.append(self.counted.total - sum(self.by_step))


class WithoutControl(SubspaceWords):
    """Has no control, for which the whole model runs forward and backward."""

    needs_control = False


@CASES.named("gathered parts")
def gathered_parts(folder: Path) -> dict[str, Any]:
    """What looks bring to a process beyond what training does, and what their attack reads."""
    out: dict[str, Any] = {}
    data = random_token_loader(16, length=8, vocab=300).dataset
    for name, make, lora, kinds in (
        ("lora", llama, True, (None, WithoutControl, SubspaceWords)),
        ("whole", llama, False, (None, WithoutControl)),
        ("positions", gpt2, True, (None, WithoutControl)),
    ):
        steps = []
        for kind in kinds:
            monitor, module = None, module_of(lora, make)
            if kind is not None:
                settings = WatchSettings(client="world")
                attack = kind(capacity_seconds=0)
                monitor = LeakageMonitor(attack, every_n_steps=1, settings=settings)
            with BroughtBytes() as counted:
                noted = BytesBySteps(counted)
                fit(
                    [noted] if monitor is None else [monitor, noted],
                    folder / f"{name}-{len(steps)}", module=module,
                    loader=DataLoader(Subset(data, range(8 * RANK, 8 * RANK + 8)), batch_size=2),
                    strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
                    devices=2, use_distributed_sampler=False,
                )  # fmt: skip
            steps.append(noted.by_step)
        anatomy = find_anatomy(module)
        gradients = [anatomy.parameter(role) for role in attack.needs(anatomy).gradients]
        tables = [m.weight for m in module.modules() if isinstance(m, nn.Embedding)]
        norm = anatomy.blocks[0].input_layernorm if make is llama else anatomy.blocks[0].ln_1
        # Positions are told from words by some texts of a few words, which are embedded again.
        probes = [table[:16] for table in tables if make is gpt2]
        out[name] = {
            # Of a LoRA its factors are read beside their gradients.
            "declared": _bytes([*gradients * (1 + lora), *tables, *norm.parameters(), *probes]),
            "whole": _bytes(module.parameters()),
            "step": steps[0][-1],
            "looks": [[a - b for a, b in zip(one, steps[0], strict=True)] for one in steps[1:]],
            "f1": monitor.latest["leakage/subspace_words/f1"],
            "failures": monitor.failures,
        }
    return out


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


if __name__ == "__main__":
    CASES.run()
