"""One of two gloo processes of test_ddp.py: ``python -m tests.callbacks.ddp_worker DIR RANK``."""

from __future__ import annotations

import json
import math
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytorch_lightning as pl
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler
from transformers import DataCollatorWithFlattening

from lightning_fedleak.attacks import EmbeddingDescent, TextGuess
from lightning_fedleak.attacks.membership.base import MembershipGuess
from lightning_fedleak.attacks.membership.fc import FCMembership
from lightning_fedleak.attacks.membership.gradients import GradientMembership
from lightning_fedleak.callbacks import LeakageMonitor, MonitorSettings, RiskGate
from lightning_fedleak.cli.finetuning import CausalLMFineTuning
from lightning_fedleak.cli.finetuning import pytorch_lightning as of_pytorch_lightning
from lightning_fedleak.defenses import GradientNoise
from lightning_fedleak.lightning_packages import package_of
from lightning_fedleak.model.batches import BatchError, TokenBatch
from lightning_fedleak.strategies import DefendedStrategy
from tests.callbacks.runs import Probe, fit, footprint, logged_losses
from tests.helpers.lightning_modules import CausalLMModule, FusedLossModule, random_token_loader
from tests.helpers.models import tiny_gpt2

STAGES = ("local", "shared", "aggregate")


class FailsOnOne(Probe):
    default_name = "fails_on_one"

    def run(self, view: Any, query: Any = None) -> Any:
        if dist.get_rank() == 1:
            raise RuntimeError("only here")
        return super().run(view, query)


class WorseOnOne(Probe):
    """Finds more on client 1."""

    default_name = "worse_on_one"

    def run(self, view: Any, query: Any = None) -> Any:
        self.k = 20 if view.gradients[-1].client == 1 else 5
        return super().run(view, query)


class GamesFailOnOne(FCMembership):
    default_name = "games_fail_on_one"

    def run(self, view: Any, query: Any = None) -> Any:
        if dist.get_rank() == 1 and view.gradients[-1].step == 2:
            raise RuntimeError("only here")
        return super().run(view, query)


class BlindOnOne(FCMembership):
    """Distinguishes nothing on client 1."""

    default_name = "blind_on_one"

    def run(self, view: Any, query: Any = None) -> Any:
        guess = super().run(view, query)
        if view.gradients[-1].client == 1:
            return MembershipGuess(torch.zeros_like(guess.scores), guess.members)
        return guess


class ReadsOne(EmbeddingDescent):
    """Names no token of the second process."""

    default_name = "reads_one"

    def reconstruct(self, hidden: Tensor, mask: Any, positions: Any) -> TextGuess:
        if dist.get_rank() == 1:
            return TextGuess(torch.zeros(hidden.shape[:2], dtype=torch.int64))
        return super().reconstruct(hidden, mask, positions)


class ReadsFailOnOne(EmbeddingDescent):
    default_name = "reads_fail_on_one"

    def reconstruct(self, hidden: Tensor, mask: Any, positions: Any) -> TextGuess:
        if dist.get_rank() == 1:
            raise RuntimeError("only here")
        return super().reconstruct(hidden, mask, positions)


class FailsThere(RuntimeError):
    pass


def unreadable_on(rank: int, *, at: int) -> Any:
    """An adapter that one process's batch number ``at`` defeats."""
    count = iter(range(10**6))

    def adapter(batch: dict[str, Tensor]) -> TokenBatch:
        if next(count) == at and dist.get_rank() == rank:
            raise FailsThere
        return TokenBatch(batch["input_ids"], batch["labels"], None, "causal")

    return adapter


def outside_on(rank: int) -> Any:
    """An adapter that gives ids no model has, on one process."""

    def adapter(batch: dict[str, Tensor]) -> TokenBatch:
        labels = batch["labels"] + (10**6 if dist.get_rank() == rank else 0)
        return TokenBatch(batch["input_ids"], labels, None, "causal")

    return adapter


class Spied:
    """Counts what gives every process the others' tensors, or pickles them."""

    NAMES = ("all_gather", "all_gather_into_tensor", "all_gather_object", "gather_object")

    def __enter__(self) -> Spied:
        self.calls: list[str] = []
        self._functions = {name: getattr(dist, name) for name in self.NAMES}
        for name, function in self._functions.items():
            setattr(dist, name, self._counting(name, function))
        return self

    def _counting(self, name: str, function: Any) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.calls.append(name)
            return function(*args, **kwargs)

        return counted

    def __exit__(self, *_: object) -> None:
        for name, function in self._functions.items():
            setattr(dist, name, function)


def games_of(monitor: LeakageMonitor) -> Tensor:
    """(n, 5) the games that this process keeps."""
    kept = monitor.state_dict()["ledger"]["kinds"]["leakage/blind_on_one"]
    return kept.get("games", torch.empty(0, 5))


def run(
    root: Path,
    callbacks: list[L.Callback],
    kind: type[CausalLMModule] = CausalLMModule,
    **settings: Any,
) -> L.Trainer:
    module = kind(tiny_gpt2(dropout=0.0).train(), optimizer="adamw")
    settings = {"strategy": "ddp", "devices": 2, "n": 16} | settings
    return fit(callbacks, root, module=module, **settings)


def same(root: Path, monitor: LeakageMonitor, **settings: Any) -> tuple[bool, L.Trainer]:
    """Whether a fit ends in the same state with and without a monitor, and the fit with it."""
    ends = []
    for name, callbacks in (("plain", []), ("watched", [monitor])):
        trainer = run(root / name, callbacks, **settings)
        losses = logged_losses(trainer) if trainer.is_global_zero else []
        ends.append((footprint(trainer), losses))
    (one, one_losses), (other, other_losses) = ends
    equal = all(torch.equal(x, y) for x, y in zip(one, other, strict=True))
    return equal and one_losses == other_losses, trainer


def first_line(monitor: LeakageMonitor) -> dict[str, Any]:
    """Return the first line of the log, on the process that writes it."""
    if dist.get_rank():
        return {}
    return json.loads(monitor.engine.jsonl.path.read_text().splitlines()[0])


def of_either_package(root: Path) -> dict[str, Any]:
    """Return one defended run until its gate stops it, by the Trainer of each package."""
    results = {}
    for kind, module in (
        (L.Trainer, CausalLMFineTuning),
        (pl.Trainer, of_pytorch_lightning.CausalLMFineTuning),
    ):
        model = module(tiny_gpt2(dropout=0.0), lr=1e-2)
        strategy = DefendedStrategy("ddp", defenses=[GradientNoise(1.0, 0.01, seed=0)])
        monitor = LeakageMonitor(Probe(), every_n_steps=1, stages=STAGES)
        gate = RiskGate("leakage/probe/recall", at_most=0.0, patience=1)
        trainer = fit(
            [monitor, gate], root / kind.__module__, module=model, n=32, kind=kind,
            strategy=strategy, devices=2,
        )  # fmt: skip
        results[package_of(trainer)] = {
            "strategy": type(trainer.strategy).__mro__[3].__module__,
            "steps": trainer.global_step,
            "values": {
                name: value
                for name, value in monitor.latest.items()
                if name.startswith("leakage") and not name.endswith("_worst_client")
            },
            "weights": sum(float(p.double().abs().sum()) for p in model.parameters()),
            "saved": gate.fired is not None and Path(str(gate.fired.checkpoint)).exists(),
        }
    return results


def first_rows(rank: int) -> list[int]:
    """Rows of one process's first batch: Lightning shuffles with the run's seed."""
    data = random_token_loader(16).dataset
    return list(DistributedSampler(data, num_replicas=2, rank=rank, seed=7))[:4]


def documents() -> list[dict[str, Tensor]]:
    """The rows of 16 texts of several lengths."""
    rows = random_token_loader(16).dataset
    return [{n: rows[i][n][: 12 - i % 3 * 3] for n in ("input_ids", "labels")} for i in range(16)]


def pack(texts: list[dict[str, Tensor]]) -> dict[str, Any]:
    """One row, whose positions begin again with each text."""
    return {**DataCollatorWithFlattening()(texts, return_tensors="pt"), "use_cache": False}


def client_gradient(rank: int) -> Tensor:
    """The head's gradient of one process's first batch, by plain autograd."""
    model = tiny_gpt2(dropout=0.0).train()
    data = random_token_loader(16).dataset
    batch = torch.utils.data.default_collate([data[i] for i in first_rows(rank)])
    (gradient,) = torch.autograd.grad(model(**batch).loss, model.lm_head.weight)
    return gradient


def gradients(root: Path) -> dict[str, Any]:
    """What is read at each stage, against gradients by hand."""
    out: dict[str, Any] = {}
    for client in ("rank", "world"):
        probe, settings = Probe(), MonitorSettings(client=client)
        monitor = LeakageMonitor(probe, every_n_steps=100, stages=STAGES, settings=settings)
        run(root / client, [monitor])
        rank = dist.get_rank()
        each = [client_gradient(r) for r in (0, 1)]
        mean = (each[0] + each[1]) / 2
        expected = {"local": each[rank], "shared": each[rank], "aggregate": mean}
        if client == "world":
            expected = dict.fromkeys(STAGES, mean)
        read = {stage: gradient for _, stage, gradient in probe.seen}
        read = {stage: read.get(stage, read["local"]) for stage in STAGES}
        close = [torch.allclose(read[s], expected[s], rtol=1e-4, atol=1e-7) for s in STAGES]
        out[client] = {
            "close": all(close),
            "recall": monitor.latest["leakage/probe/recall"],
            "line": [first_line(monitor).get(name) for name in ("client", "n")],
        }
    probe = Probe()
    defended = DefendedStrategy("ddp", defenses=[GradientNoise(clip=1.0, sigma=0.0, seed=0)])
    monitor = LeakageMonitor(probe, every_n_steps=100, stages=STAGES)
    run(root / "defended", [monitor], strategy=defended)
    read = {stage: gradient for _, stage, gradient in probe.seen}
    shared = [torch.empty_like(read["shared"]) for _ in range(2)]
    dist.all_gather(shared, read["shared"].contiguous())
    mean = (shared[0] + shared[1]) / 2
    out["defended"] = torch.allclose(read["local"], each[rank], rtol=1e-4, atol=1e-7)
    out["defended"] &= torch.allclose(read["aggregate"], mean, rtol=1e-5, atol=1e-8)
    return out


def games(root: Path) -> dict[str, Any]:
    """Games of each client, and those of a run that is resumed."""

    def monitor_of() -> LeakageMonitor:
        attacks = [GamesFailOnOne(layer=1), BlindOnOne(layer=1), Probe()]
        return LeakageMonitor(attacks, every_n_steps=1)

    monitor = monitor_of()
    with Spied() as spied:
        equal, trainer = same(root, monitor, n=32)
    kept = games_of(monitor)
    path = root / "games.ckpt"
    trainer.save_checkpoint(path)
    again = monitor_of()
    resumed = run(root / "again", [again], n=32, max_epochs=2, ckpt_path=str(path))
    return {
        "same": equal,
        "looks": monitor.looks,
        "failures": monitor.failures,
        "values": {n: str(v) for n, v in monitor.latest.items() if n.startswith("leakage")},
        "games": kept.tolist(),
        "gathered": spied.calls,
        "again": [resumed.global_step, again.looks],
        "first": games_of(again)[: len(kept)].tolist() == kept.tolist(),
        "more": len(games_of(again)),
    }


def texts(root: Path) -> dict[str, Any]:
    """Texts packed in a row, and texts that are reconstructed from hidden states."""
    public = torch.randint(3, 50, (32, 8), generator=torch.Generator().manual_seed(3))
    packed = DataLoader(documents(), batch_size=4, collate_fn=pack)
    attacks = [Probe(), GradientMembership(public, public_rows=16)]
    monitor = LeakageMonitor(attacks, every_n_steps=1)
    equal, _ = same(root / "packed", monitor, loader=packed)
    out: dict[str, Any] = {
        "packed": {
            "same": equal,
            "auc": monitor.latest["leakage/gradient_membership/auc"],
            "failures": monitor.failures,
            "line": [first_line(monitor).get(name) for name in ("attack", "client", "n")],
        }
    }
    attacks = [ReadsOne(0, steps=40), ReadsFailOnOne(0, steps=1), Probe()]
    monitor = LeakageMonitor(attacks, every_n_steps=1, settings=MonitorSettings(texts=3))
    equal, _ = same(root / "inversion", monitor)
    out["inversion"] = {
        "same": equal,
        "looks": monitor.looks,
        "failures": monitor.failures,
        "values": {n: str(v) for n, v in monitor.latest.items() if n.startswith("leakage")},
        "line": first_line(monitor),
    }
    return out


def failures(root: Path) -> dict[str, Any]:
    """What fails on one client, and gates that act on both."""
    out: dict[str, Any] = {}
    monitor = LeakageMonitor([FailsOnOne(), WorseOnOne()], every_n_steps=2)
    trainer = run(root / "failing", [monitor])
    name = "leakage/worse_on_one/f1"
    out["failing"] = {
        "finished": trainer.global_step,
        "failures": monitor.failures,
        "unknown": math.isnan(monitor.latest["leakage/fails_on_one/f1"]),
        "pooled": monitor.latest[name],
        "worst": monitor.latest.get(f"{name}_worst_client"),
        "worst in metrics": f"{name}_worst_client" in trainer.callback_metrics,
    }
    gate = RiskGate(f"{name}_worst_client", at_most=monitor.latest[name])
    trainer = run(root / "gate", [gate, LeakageMonitor(WorseOnOne(), every_n_steps=1)])
    assert gate.fired is not None
    saved = Path(str(gate.fired.checkpoint)).exists()
    out["gate"] = (trainer.global_step, gate.fired.step, gate.fired.value, saved)

    monitor = LeakageMonitor(Probe(), max_overhead=0.2)
    run(root / "overhead", [monitor], max_epochs=4)
    out["overhead"] = (monitor.looks, monitor.last_step)

    for client, adapter in (("rank", unreadable_on(1, at=2)), ("world", outside_on(1))):
        settings = MonitorSettings(client=client, batch_adapter=adapter)
        monitor = LeakageMonitor(Probe(), every_n_steps=1, settings=settings)
        trainer = run(root / f"unreadable-{client}", [monitor], FusedLossModule)
        out[f"unreadable/{client}"] = (trainer.global_step, monitor.looks, monitor.failures)
    settings = MonitorSettings(batch_adapter=unreadable_on(1, at=0))
    try:
        run(root / "first", [LeakageMonitor(Probe(), settings=settings)], FusedLossModule)
    except (BatchError, FailsThere) as error:
        out["first"] = type(error).__name__
    return out


def main(root: Path) -> None:
    warnings.simplefilter("ignore")
    monitor = LeakageMonitor(Probe(), every_n_steps=1, stages=STAGES)
    clipped = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.01}
    equal, trainer = same(root / "bits", monitor, **clipped)
    out = {
        "bits": [equal, monitor.looks == trainer.global_step > 0, monitor.failures],
        "gradients": gradients(root / "gradients"),
        "games": games(root / "games"),
        **texts(root / "texts"),
        **failures(root / "failures"),
        "either package": of_either_package(root / "either"),
    }
    (root / f"{dist.get_rank()}.json").write_text(json.dumps(out))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
