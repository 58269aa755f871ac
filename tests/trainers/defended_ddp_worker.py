"""One of two gloo processes of test_defended_ddp.py: they are one client."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from lightning_fedleak.defenses import DPSGD, DefenseError
from lightning_fedleak.trainers import DefendedLoop
from tests.helpers.cases import gathered
from tests.helpers.models import tiny_llama
from tests.trainers.hosts import (
    BATCH,
    CLIP,
    N,
    Trace,
    clipped_sum,
    dora,
    drawing,
    rows,
    traced,
    trainer_of,
)


def distances(trace: Trace, clip: float) -> list[float]:
    """How far each release is from the clipped sum over the rows of both processes."""
    both = gathered(trace.drawn)
    far = []
    for shared, one, other in zip(trace.shared, *both, strict=True):
        brute = clipped_sum(trace.model, [*one, *other], clip)
        far.append(float((shared * 2 * BATCH - brute).norm() / brute.norm().clamp(min=1e-12)))
    return far


def facts(trace: Trace) -> dict[str, Any]:
    flat = torch.cat([p.detach().flatten() for p in trace.model.parameters()])
    one, other = gathered(flat.tolist())
    drawn = gathered([row for rows_ in trace.drawn for row in rows_])
    return {"alike": one == other, "apart": not set(drawn[0]) & set(drawn[1])}


def under_trainer(root: Path) -> dict[str, Any]:
    exact = DPSGD(CLIP, 0.0, seed=1, max_physical_batch_size=2)
    more: dict[str, Any] = {"ddp_backend": "gloo"}
    trace = traced(trainer_of(root / "exact", tiny_llama(), [exact], 0.0, **more))
    found = {"distance": max(distances(trace, CLIP)), "releases": exact.releases, **facts(trace)}
    adapted = trainer_of(root / "dora", dora(), [DPSGD(0.3, 0.0, seed=1)], 0.0, **more)
    found["distance of adapters"] = max(distances(traced(adapted), 0.3))
    more |= {"num_train_epochs": 2, "save_strategy": "steps", "save_steps": 2}
    known = {"target_epsilon": 4.0, "target_delta": 1e-3}
    first = DPSGD(CLIP, **known)
    trace = traced(trainer_of(root / "run", tiny_llama(), [first], **more))
    found["noisy alike"] = facts(trace)["alike"]
    again = DPSGD(CLIP, **known)
    trainer = trainer_of(root / "again", tiny_llama(), [again], **more)
    resumed = traced(trainer, str(root / "run" / "checkpoint-2"))
    found |= {
        "resumed": [again.releases, len(resumed.shared)],
        "resumed alike": facts(resumed)["alike"],
        "epsilons": [first.privacy.epsilon, again.privacy.epsilon],
    }
    return found


def in_a_loop() -> dict[str, Any]:
    inner = tiny_llama().train()
    model, trace = DistributedDataParallel(inner), Trace(inner)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    data = rows()
    loader = DataLoader(data, batch_size=BATCH, sampler=DistributedSampler(data))
    defense = DPSGD(CLIP, 0.0, seed=1)

    def compute(batch: Any) -> Tensor:
        loss: Tensor = model(**batch).loss
        return loss

    with drawing(trace), DefendedLoop(model, optimizer, loader, [defense], epochs=1) as private:
        private._release.add_tap(trace.tap)
        for batch in private:
            private.loss(compute, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    try:
        DefendedLoop(inner, optimizer, loader, [defense]).__enter__()
    except DefenseError as error:
        refused = str(error)
    return {"distance": max(distances(trace, CLIP)), "refused": refused, **facts(trace)}


def main(root: Path) -> None:
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    found = {"trainer": under_trainer(root), "loop": in_a_loop(), "steps": N // (2 * BATCH)}
    (root / f"{rank}.json").write_text(json.dumps(found))
    distributed.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
