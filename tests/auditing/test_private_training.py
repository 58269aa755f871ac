"""The referee refutes seeded faults, spares sound runs, and leaves training as it is."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.defenses import referee
from lightning_fedleak.evaluation.auditing import (
    PrivacyClaim,
    PrivacyVerdict,
    PrivateTrainingCheck,
    training_checks,
)
from lightning_fedleak.evaluation.auditing.training_checks import Observations, judge
from tests.auditing import private_training_worker
from tests.helpers.processes import spawn_imported

pytest.importorskip("opacus")
STEPS, LOOK = 32, 8
CLAIMED = PrivacyClaim(1.0, max_grad_norm=0.5, sample_rate=1 / 16, divisor=32, delta=1e-5)


def results(verdict: PrivacyVerdict) -> dict[str, str]:
    return {check.name: check.result for check in verdict.checks}


@pytest.mark.parametrize(
    ("fault", "refuted"),
    [
        ("noise once, at the start", "fresh noise"),
        ("norm without the embedding", "clipping"),
        ("shuffled batches accounted as Poisson", "inclusion"),
        ("epsilon of delta 1e-3 shown as of 1e-5", "account"),
        ("LoRA outside of the hooks", "noise"),
        ("clipping after the mean", "opposed rows"),
        ("raw gradients added to the head", "side effects"),
        ("signs of raw gradients added to the head", "side effects"),
        ("raw gradients in the optimizer's state", "side effects"),
        ("a buffer of batch means", "side effects"),
        ("release divided by raw gradients", "noise"),
        ("noise minus that of the step before", "noise"),
        ("clip factor C / norm^2", "near the norm"),
        ("drawn with replacement", "repeats"),
        ("rate lowered by the batches' loss", "learning rates"),
    ],
)
def test_a_fault_is_refuted_by_the_test_that_is_for_it(fault: str, refuted: str) -> None:
    verdict = referee.FAULTS[fault](0, STEPS, look=LOOK)
    assert verdict.result == "refuted"
    assert results(verdict)[refuted] == "refuted"


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_a_sound_run_of_opacus_is_not_refuted_and_says_what_was_visible(mode: str) -> None:
    verdict = referee.opacus(1, STEPS, mode=mode, look=LOOK)
    assert set(results(verdict).values()) == {"not refuted"}
    assert all(check.visible for check in verdict.checks)
    assert str(verdict).startswith(f"not refuted, by 4 looks in {STEPS} steps")


@pytest.mark.parametrize("kind", ["two views", "average"])
def test_what_a_sound_loop_may_do_beside_its_release_is_not_refuted(kind: str) -> None:
    verdict = referee.own(1, STEPS, fault=kind, look=LOOK)
    unknown = {"account"} | ({"near the norm", "opposed rows"} if kind == "two views" else set())
    assert {name for name, result in results(verdict).items() if result == "unknown"} == unknown
    assert verdict.result == "unknown", str(verdict)


def test_noise_across_a_planted_gradient_is_that_of_a_projection() -> None:
    draw = np.random.default_rng(7)
    value, raw = draw.normal(size=(2, 5, 6))
    seen = Observations()
    seen.add_repeated("planted", {"a": torch.tensor(value)}, CLAIM, {"a": torch.tensor(raw)})
    complement = np.eye(30) - np.outer(raw, raw) / (raw**2).sum()
    unit = CLAIM.divisor / CLAIM.noise_multiplier / CLAIM.max_grad_norm
    square, count = seen.repeated["planted"][0]["a"]
    assert count == 29
    assert square == pytest.approx(((complement @ value.ravel() * unit) ** 2).sum(), rel=1e-10)


def trained(watch: bool, step_of: Callable[..., Any]) -> Any:
    """Return the weights that a run ends with, and its verdict."""
    torch.manual_seed(2)
    model = referee.LM()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    loader = DataLoader(referee.texts(), batch_sampler=referee.Poisson(referee.RATE))
    step = step_of(model, optimizer)
    check = PrivateTrainingCheck(step, model, optimizer, CLAIMED, every_n_steps=4)
    for batch in check.watch(loader) if watch else loader:
        step(batch)
    return [*model.parameters()], check.verdict()


def noisy(model: nn.Module, optimizer: Any) -> Callable[[Any], None]:
    def step(batch: Any) -> None:
        optimizer.zero_grad()
        referee.loss_of(model, batch[0]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for parameter in model.parameters():
            parameter.grad += torch.randn_like(parameter)
        optimizer.step()

    return step


def test_training_is_equal_bit_for_bit_with_and_without_it() -> None:
    (watched, verdict), (plain, _) = trained(True, noisy), trained(False, noisy)
    assert verdict.looks == 4
    assert all(map(torch.equal, watched, plain))


def test_a_look_leaves_gradients_that_a_step_writes_in_place() -> None:
    torch.manual_seed(2)
    model = referee.LM()
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)

    def step(batch: Any) -> None:
        optimizer.zero_grad(set_to_none=False)
        referee.loss_of(model, batch[0]).backward()
        optimizer.step()

    loader = DataLoader(referee.texts(), batch_sampler=referee.Poisson(referee.RATE))
    check = PrivateTrainingCheck(step, model, optimizer, CLAIMED, every_n_steps=4)
    earlier: list[torch.Tensor] = []
    for batch in check.watch(loader):
        gradients = [parameter.grad for parameter in model.parameters()]
        assert all(map(torch.equal, earlier, gradients[: len(earlier)]))
        step(batch)
        earlier = [parameter.grad.clone() for parameter in model.parameters()]
    assert check.verdict().looks == 4


class NoiseInside(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            parameter.data.add_(torch.randn_like(parameter))
        super().step()


def test_noise_that_cannot_be_read_is_unknown_not_refuted() -> None:
    def step_of(model: nn.Module, optimizer: Any) -> Callable[[Any], None]:
        hidden = NoiseInside(model.parameters(), 0.1)

        def step(batch: Any) -> None:
            optimizer.zero_grad()
            referee.loss_of(model, batch[0]).backward()
            optimizer.step()
            hidden.step()

        return step

    _, verdict = trained(True, step_of)
    assert results(verdict)["noise"] == "unknown"


class LossOnly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lm = referee.LM()

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        return {"loss": referee.loss_of(self.lm, ids)}


@pytest.mark.parametrize("problem", ["no logits", "no step", "two steps"])
def test_a_step_in_which_nothing_can_be_planted_is_refused_or_unknown(problem: str) -> None:
    model: nn.Module = LossOnly() if problem == "no logits" else referee.LM()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(batch: Any) -> None:
        output = model(batch[0])
        (output["loss"] if problem == "no logits" else output.mean()).backward()
        for _ in range({"no step": 0, "two steps": 2}.get(problem, 1)):
            optimizer.step()

    check = PrivateTrainingCheck(step, model, optimizer, CLAIMED, every_n_steps=1)
    loader, weights = DataLoader(referee.texts(), batch_size=32), model.state_dict()
    weights = {name: value.clone() for name, value in weights.items()}
    assert len(list(check.watch(loader))) == 16  # the training is not ended
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    for probe in check.verdict().checks[:6]:
        assert probe.result == "unknown"
        assert ("no logits" if problem == "no logits" else "all optimizers") in probe.evidence


def test_a_step_that_skips_a_huge_gradient_ends_the_looks_not_the_training() -> None:
    def step_of(model: nn.Module, optimizer: Any) -> Callable[[Any], None]:
        def step(batch: Any) -> None:
            optimizer.zero_grad()
            referee.loss_of(model, batch[0]).backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            for parameter in model.parameters():
                parameter.grad += torch.randn_like(parameter) * 0.5 / 32
            if norm < 1e4:  # as a GradScaler does where the norm is not finite
                optimizer.step()

        return step

    (watched, verdict), (plain, _) = trained(True, step_of), trained(False, step_of)
    assert (verdict.steps, verdict.looks) == (16, 1)
    assert all(map(torch.equal, watched, plain))
    assert [results(verdict)[name] for name in ("noise", "clipping")] == ["unknown", "unknown"]


def in_parts(watch: bool) -> Any:
    """Return what a run under Opacus' BatchMemoryManager ends with."""
    from opacus import PrivacyEngine
    from opacus.utils.batch_memory_manager import BatchMemoryManager

    torch.manual_seed(4)
    engine, model = PrivacyEngine(), referee.LM()
    private, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), 0.1),
        data_loader=DataLoader(referee.texts(), batch_size=32),
        noise_multiplier=1.0,
        max_grad_norm=0.5,
    )

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        referee.loss_of(private, batch[0]).backward()
        optimizer.step()

    check = PrivateTrainingCheck(step, private, optimizer, CLAIMED, every_n_steps=7)
    with BatchMemoryManager(
        data_loader=loader, max_physical_batch_size=12, optimizer=optimizer
    ) as parts:
        for batch in check.watch(parts) if watch else parts:
            step(batch)
    return [*model.parameters()], check.verdict()


def test_batches_in_parts_are_looked_at_and_their_sums_stay_as_they_are() -> None:
    (watched, verdict), (plain, _) = in_parts(True), in_parts(False)
    assert all(map(torch.equal, watched, plain))
    assert (verdict.steps, verdict.looks) == (16, 7)
    account = {"account": "unknown"}  # no epsilon is given
    assert results(verdict) == dict.fromkeys(results(verdict), "not refuted") | account


def test_a_loss_that_bypasses_the_logits_is_unknown_not_refuted() -> None:
    def step_of(model: nn.Module, optimizer: Any) -> Callable[[Any], None]:
        def step(batch: Any) -> None:
            optimizer.zero_grad()
            router = 10 * model.emb.weight[batch[0][:, 0]].sum()  # type: ignore[union-attr,index]
            (referee.loss_of(model, batch[0]) + router).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 16.0)  # the sum of 32 rows at .5
            for parameter in model.parameters():
                parameter.grad = (parameter.grad + torch.randn_like(parameter) * 0.5) / 32
            optimizer.step()

        return step

    _, verdict = trained(True, step_of)
    probes = verdict.checks[:6]
    assert [probe.result for probe in probes if probe.name != "clipping"] == ["unknown"] * 5
    assert "bypass the logits" in probes[1].evidence


@pytest.mark.slow
@pytest.mark.parametrize(("client", "looks"), [("world", 6), ("rank", 0)])
def test_two_processes_look_together_and_probes_are_not_refuted(
    client: str, looks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spawn_imported(monkeypatch)
    torch.multiprocessing.spawn(private_training_worker.run, (client, str(tmp_path)), nprocs=2)
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found["probes"] != "refuted", found["text"]
        assert client == "rank" or found["result"] == "unknown", found["text"]
        assert found["looks"] == (looks or rank * 6)
        assert found["mispaired"] is False


class TensorDraws(referee.Poisson):
    def __iter__(self) -> Any:
        return map(torch.tensor, super().__iter__())


@pytest.mark.parametrize("draws", ["tensors", "not what was run"])
def test_inclusions_are_counted_by_value_and_only_where_they_were_run(draws: str) -> None:
    torch.manual_seed(5)
    model = referee.LM()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = DataLoader(referee.texts(), batch_sampler=TensorDraws(referee.RATE))
    step = noisy(model, optimizer)
    check = PrivateTrainingCheck(step, model, optimizer, CLAIMED)
    for (ids,) in check.watch(loader):
        step([ids if draws == "tensors" else ids[1:]])
    expected = "not refuted" if draws == "tensors" else "unknown"
    assert results(check.verdict())["inclusion"] == expected


CLAIM = PrivacyClaim(1.3, max_grad_norm=2.0, sample_rate=0.02, divisor=7, delta=1e-5)


def drawn(seed: int, claim: PrivacyClaim = CLAIM, noise: float = 1.3, rate: float = 0.02) -> Any:
    """Return what is seen of a run, by numpy alone."""
    draw = np.random.default_rng(seed)
    seen = Observations(examples=300, draws=60)
    taken = draw.random((60, 300)) < rate
    seen.sizes = [int(count) for count in taken.sum(1)]
    seen.inclusions.update(dict(enumerate(taken.sum(0).tolist())))
    for look in range(4):
        parts = {"a": (20, 5), "b": (64,), "c": (2,)}
        std = noise * claim.max_grad_norm / claim.divisor
        released = {n: torch.from_numpy(draw.normal(0, std, size)) for n, size in parts.items()}
        seen.add_noise(released, claim)
        seen.planted.append((draw.normal(8, noise), 8))
        seen.near.append((draw.normal(8, noise), 8))
        seen.opposed.append((draw.normal(1 + look, noise * 2**0.5), 1 + look))
        for kind in ("again", "planted"):
            released = {n: torch.from_numpy(draw.normal(0, std, size)) for n, size in parts.items()}
            seen.add_repeated(kind, released, claim)
        seen.add_pair(*({"a": torch.from_numpy(draw.normal(size=40))} for _ in range(2)))
    return seen


def test_no_test_alarms_more_often_than_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_checks, "ERROR", 0.4)  # 5% for each of eight tests
    verdicts = [results(judge(CLAIM, drawn(seed))) for seed in range(120)]
    for name in verdicts[0]:
        alarms = sum(verdict[name] == "refuted" for verdict in verdicts)
        assert alarms <= 15, name  # a binomial of 120 and 5% has more with a chance of 3e-4


@pytest.mark.parametrize(("name", "fault"), [("noise", {"noise": 1.0}), ("rate", {"rate": 0.03})])
def test_what_is_called_visible_is_refuted(name: str, fault: dict[str, float]) -> None:
    verdicts = [results(judge(CLAIM, drawn(seed, **fault))) for seed in range(20)]
    assert sum(verdict[name] == "refuted" for verdict in verdicts) >= 17


def test_nothing_seen_is_unknown() -> None:
    verdict = judge(CLAIM, Observations())
    assert set(results(verdict).values()) == {"unknown"}
    assert verdict.result == "unknown"
