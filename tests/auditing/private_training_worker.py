"""One of two gloo processes whose loops are watched; see test_private_training.py."""

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from benchmarks.defenses import referee
from lightning_fedleak.evaluation.auditing import PrivacyClaim, PrivateTrainingCheck

SIZES = {"world": ((7, 12), (16, 9), (10, 10)), "rank": ((7, 12),)}  # of ranks 0 and 1, in turn


class Sizes(torch.utils.data.Sampler[list[int]]):
    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes

    def __iter__(self) -> Any:
        return (torch.randperm(referee.TEXTS)[:size] for size in self.sizes)


def run(rank: int, client: Any, folder: str) -> None:
    """Write the verdict on a sound loop, of which both processes draw a part."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    torch.manual_seed(rank)
    model, mispaired = referee.LM(), False
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(batch: Any) -> None:
        nonlocal mispaired
        optimizer.zero_grad()
        gradients = [torch.zeros_like(p) for p in model.parameters()]
        for text in batch[0]:
            found = torch.autograd.grad(referee.loss_of(model, text[None]), [*model.parameters()])
            norm = torch.stack([g.norm() for g in found]).norm()
            for total, gradient in zip(gradients, found, strict=True):
                total += gradient * (0.5 / norm).clamp(max=1)
        noise = 0.5**0.5 if client == "world" else 1.0  # of each process
        for parameter, total in zip(model.parameters(), gradients, strict=True):
            total += torch.randn_like(total) * 0.5 * noise
            if client == "world":
                dist.all_reduce(total)
            parameter.grad = total / 32
        if client == "world":  # a probe of one beside a batch of the other has other weights
            is_probe = torch.tensor([float(watching._scales is not None)])
            dist.all_reduce(is_probe)
            mispaired |= float(is_probe) == 1
        optimizer.step()

    claim = PrivacyClaim(1.0, 0.5, sample_rate=1 / 16, divisor=32, delta=1e-5, client=client)
    watching = PrivateTrainingCheck(step, model, optimizer, claim, every_n_steps=2)
    sizes = [pair[rank] for _ in range(12) for pair in SIZES[client]][:12]
    for batch in watching.watch(DataLoader(referee.texts(), batch_sampler=Sizes(sizes))):
        step(batch)
    verdict = watching.verdict()
    values = {"result": verdict.result, "looks": verdict.looks, "text": str(verdict)}
    probes = {check.result for check in verdict.checks[:4]}
    values["probes"] = "refuted" if "refuted" in probes else "sound"
    Path(folder, f"{rank}.json").write_text(json.dumps({**values, "mispaired": mispaired}))
    dist.destroy_process_group()
