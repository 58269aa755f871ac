"""Two gloo processes: a loop of one's own and transformers' Trainer, watched and defended."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from lightning_fedleak import BagOfWords
from lightning_fedleak.defenses import DPSGD, DefenseError
from lightning_fedleak.trainers import DefendedLoop, Threshold, Watch, WatchSettings
from tests.callbacks.runs import Probe
from tests.helpers.cases import Cases, gathered, of
from tests.helpers.models import tiny_gpt2, tiny_llama
from tests.helpers.processes import Found, two_processes
from tests.trainers import hosts
from tests.trainers.hosts import BATCH, CLIP, N, Trace, clipped_sum, dora, drawing, traced
from tests.trainers.test_transformers import Recorder, rows, trainer_of, user_logs, watched
from tests.trainers.test_watch import lines

CASES = Cases()


def head_gradient(model: Any, ids: torch.Tensor) -> torch.Tensor:
    (gradient,) = torch.autograd.grad(model(input_ids=ids, labels=ids).loss, [model.lm_head.weight])
    return gradient


@CASES.named("watched trainer")
def watched_trainer(root: Path) -> dict[str, Any]:
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
    close(probe.at("shared")[0], each[distributed.get_rank()])
    close(probe.at("aggregate")[0], (each[0] + each[1]) / 2)
    return out


@CASES.named("watched loop")
def watched_loop(root: Path) -> dict[str, Any]:
    model = DistributedDataParallel(tiny_gpt2(tied=False, dropout=0.0).train())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    probe = Probe()
    ids = torch.stack([row["input_ids"] for row in rows()[:8]])
    mine = ids.split(4)[distributed.get_rank()]
    expected = head_gradient(tiny_gpt2(tied=False, dropout=0.0), mine)
    settings = WatchSettings(stages=("shared", "aggregate"))
    place = {"folder": root / "loop", "every_n_steps": 1, "settings": settings}
    with Watch(model, optimizer, [BagOfWords(), probe], **place) as watch:
        for _ in range(2):
            batch = {"input_ids": mine}
            with watch.step(batch):
                model(**batch, labels=batch["input_ids"]).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
    torch.testing.assert_close(probe.at("shared")[0], expected)
    return {"loop": watch.latest["leakage/bag_of_words/f1"]}


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


@CASES.named("defended trainer")
def defended_trainer(root: Path) -> dict[str, Any]:
    exact = DPSGD(CLIP, 0.0, seed=1, max_physical_batch_size=2)
    more: dict[str, Any] = {"ddp_backend": "gloo"}
    trace = traced(hosts.trainer_of(root / "exact", tiny_llama(), [exact], 0.0, **more))
    found = {"distance": max(distances(trace, CLIP)), "releases": exact.releases, **facts(trace)}
    adapted = hosts.trainer_of(root / "dora", dora(), [DPSGD(0.3, 0.0, seed=1)], 0.0, **more)
    found["distance of adapters"] = max(distances(traced(adapted), 0.3))
    more |= {"num_train_epochs": 2, "save_strategy": "steps", "save_steps": 2}
    known = {"target_epsilon": 4.0, "target_delta": 1e-3}
    first = DPSGD(CLIP, **known)
    trace = traced(hosts.trainer_of(root / "run", tiny_llama(), [first], **more))
    found["noisy alike"] = facts(trace)["alike"]
    again = DPSGD(CLIP, **known)
    trainer = hosts.trainer_of(root / "again", tiny_llama(), [again], **more)
    resumed = traced(trainer, str(root / "run" / "checkpoint-2"))
    found |= {
        "resumed": [again.releases, len(resumed.shared)],
        "resumed alike": facts(resumed)["alike"],
        "epsilons": [first.privacy.epsilon, again.privacy.epsilon],
    }
    return found


@CASES.named("defended loop")
def defended_loop(_: Path) -> dict[str, Any]:
    inner = tiny_llama().train()
    model, trace = DistributedDataParallel(inner), Trace(inner)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    data = hosts.rows()
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


pytestmark = [pytest.mark.ddp, pytest.mark.slow]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ddp")


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[Found]:
    """What each rank found, by case."""
    return two_processes("tests.trainers.test_ddp", folder)


def test_each_process_shares_its_own_gradient_and_gates_agree(ranks, folder: Path) -> None:
    """Training is bit-identical too."""
    for found in of(ranks, "watched trainer"):
        assert found == {"same": True, "steps": 2, "saved": True}
    assert of(ranks, "watched loop") == [{"loop": 1.0}] * 2
    first = lines(folder / "watched-trainer" / "gate")[0]
    assert (first["client"], first["metrics"]["f1"]["value"]) == ("pooled", 1.0)


def test_two_processes_release_one_clipped_sum(ranks) -> None:
    """Sums are those of the rows of both, each in one process; noise, weights and account agree."""
    pairs = zip(of(ranks, "defended trainer"), of(ranks, "defended loop"), strict=True)
    for trainer, loop in pairs:
        assert trainer["distance"] < 1e-6
        assert trainer["distance of adapters"] < 1e-6
        assert loop["distance"] < 1e-6
        assert trainer["releases"] == N // (2 * BATCH) == 3
        assert trainer["resumed"] == [6, 4]
        assert trainer["epsilons"][0] == pytest.approx(trainer["epsilons"][1])
        assert 3.9 < trainer["epsilons"][0] <= 4.0
        for name in ("alike", "apart", "noisy alike", "resumed alike"):
            assert trainer[name], name
        assert loop["alike"]
        assert loop["apart"]
        assert "Wrap the model in DistributedDataParallel" in loop["refused"]


if __name__ == "__main__":
    distributed.init_process_group("gloo")
    CASES.run()
