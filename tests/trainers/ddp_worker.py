"""One of two gloo processes of test_ddp.py."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from lightning_fedleak import BagOfWords
from lightning_fedleak.trainers import Threshold, Watch, WatchSettings
from tests.callbacks.runs import Probe
from tests.helpers.models import tiny_gpt2
from tests.trainers.test_transformers import Recorder, rows, trainer_of, user_logs, watched


def head_gradient(model: Any, ids: torch.Tensor) -> torch.Tensor:
    (gradient,) = torch.autograd.grad(model(input_ids=ids, labels=ids).loss, [model.lm_head.weight])
    return gradient


def under_trainer(root: Path, rank: int) -> dict[str, Any]:
    out: dict[str, Any] = {}
    runs = []
    stages = ("shared", "aggregate")
    for on in (False, True):
        trainer = trainer_of(
            root / f"same-{on}", dropout=0.2, ddp_backend="gloo", gradient_accumulation_steps=2
        )
        recorder = Recorder()
        if on:
            watched(trainer, [BagOfWords(), Probe()], stages=stages)
        trainer.add_callback(recorder)
        trainer.train()
        weights = [*trainer.model.parameters()]  # type: ignore[union-attr]
        runs.append((user_logs(trainer), recorder.states, weights))
    (logs, states, weights), (logs_on, states_on, weights_on) = runs
    out["same"] = (
        logs == logs_on
        and len(states) == 2
        and all(map(torch.equal, states, states_on))
        and all(map(torch.equal, weights, weights_on))
    )
    probe, gate = Probe(), Threshold("leakage/worst/words", at_most=0.5, patience=1)
    trainer = trainer_of(root / "gate", ddp_backend="gloo")
    watched(trainer, [BagOfWords(), probe], [gate], stages=stages)
    trainer.train()
    out["steps"] = trainer.state.global_step
    out["saved"] = gate.fired is not None and Path(str(gate.fired.checkpoint)).is_dir()
    model = tiny_gpt2(tied=False, dropout=0.0)
    ids = torch.stack([row["input_ids"] for row in rows()[:8]])
    # The Trainer divides by the number of labels, also of those that nothing predicts.
    each = [head_gradient(model, part) * 8 / 9 for part in ids.split(4)]
    close = torch.testing.assert_close
    close(probe.at("shared")[0], each[rank])
    close(probe.at("aggregate")[0], (each[0] + each[1]) / 2)
    return out


def in_a_loop(root: Path, rank: int) -> dict[str, Any]:
    model = DistributedDataParallel(tiny_gpt2(tied=False, dropout=0.0).train())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    probe = Probe()
    ids = torch.stack([row["input_ids"] for row in rows()[:8]])
    expected = head_gradient(tiny_gpt2(tied=False, dropout=0.0), ids[rank * 4 : rank * 4 + 4])
    settings = WatchSettings(stages=("shared", "aggregate"))
    place = {"folder": root / "loop", "every_n_steps": 1, "settings": settings}
    with Watch(model, optimizer, [BagOfWords(), probe], **place) as watch:
        for _ in range(2):
            batch = {"input_ids": ids[rank * 4 : rank * 4 + 4]}
            with watch.step(batch):
                model(**batch, labels=batch["input_ids"]).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
    torch.testing.assert_close(probe.at("shared")[0], expected)
    return {"loop": watch.latest["leakage/bag_of_words/f1"]}


def main(root: Path) -> None:
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    out = in_a_loop(root, rank) | under_trainer(root, rank)
    (root / f"{rank}.json").write_text(json.dumps(out))
    distributed.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
