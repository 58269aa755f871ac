"""The referee refutes seeded faults, spares sound runs, and leaves training as it is."""

from __future__ import annotations

from collections.abc import Callable
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

pytest.importorskip("opacus")
STEPS, LOOK = 32, 8


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


def trained(watch: bool, step_of: Callable[..., Any]) -> Any:
    """Return the weights that a run ends with, and its verdict."""
    torch.manual_seed(2)
    model = referee.LM()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    loader = DataLoader(referee.texts(), batch_sampler=referee.Poisson(referee.RATE))
    step = step_of(model, optimizer)
    claim = PrivacyClaim(1.0, max_grad_norm=0.5, sample_rate=1 / 16, divisor=32, delta=1e-5)
    check = PrivateTrainingCheck(step, model, optimizer, claim, every_n_steps=4)
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
def test_a_step_in_which_nothing_can_be_planted_is_refused(problem: str) -> None:
    model: nn.Module = LossOnly() if problem == "no logits" else referee.LM()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(batch: Any) -> None:
        output = model(batch[0])
        (output["loss"] if problem == "no logits" else output.mean()).backward()
        for _ in range({"no step": 0, "two steps": 2}.get(problem, 1)):
            optimizer.step()

    claim = PrivacyClaim(1.0, max_grad_norm=0.5, sample_rate=1 / 16, divisor=32, delta=1e-5)
    check = PrivateTrainingCheck(step, model, optimizer, claim, every_n_steps=1)
    words = "no logits" if problem == "no logits" else "step each optimizer once"
    with pytest.raises(ValueError, match=words):
        list(check.watch(DataLoader(referee.texts(), batch_size=32)))


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
        seen.opposed.append((draw.normal(1 + look, noise * 2**0.5), 1 + look))
    return seen


def test_no_test_alarms_more_often_than_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_checks, "ERROR", 0.35)  # 5% for each of seven tests
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
