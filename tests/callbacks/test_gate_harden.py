"""A gate that turns defences up instead of stopping."""

import csv
import logging
import math
from pathlib import Path
from typing import Any

import pytest

from lightning_fedleak.callbacks import GateEvent, LeakageMonitor, RiskGate
from lightning_fedleak.defenses import Defense, Freeze, GradientNoise
from lightning_fedleak.strategies import DefendedStrategy
from tests.callbacks.runs import Probe, fit
from tests.helpers.lightning_modules import CausalLMModule
from tests.helpers.models import tiny_gpt2
from tests.helpers.notices import announced

F1 = "leakage/probe/f1"


def run(
    tmp_path: Path, *defenses: Defense, epochs: int = 1, ckpt_path: str | None = None, **gate: Any
) -> tuple[Any, RiskGate, LeakageMonitor, Probe]:
    probe = Probe(k=20)
    monitor = LeakageMonitor(probe, every_n_steps=1)
    found = RiskGate(F1, **({"at_most": 0.0, "action": "harden"} | gate))
    strategy = DefendedStrategy("auto", list(defenses))
    module = CausalLMModule(tiny_gpt2(tied=False).train(), optimizer="adamw")
    callbacks: list[Any] = [monitor, found]
    trainer = fit(
        callbacks, tmp_path, module=module, strategy=strategy, ckpt_path=ckpt_path,
        max_epochs=epochs,
    )  # fmt: skip
    return trainer, found, monitor, probe


def column(trainer: Any, name: str) -> list[str]:
    with (Path(trainer.logger.log_dir) / "metrics.csv").open() as file:
        return [row[name] for row in csv.DictReader(file) if row.get(name)]


def test_each_breach_is_a_notch_and_then_it_stops(tmp_path: Path) -> None:
    noise = GradientNoise(clip=None, sigma=1e-9, max_hardenings=3)
    with announced("RiskGate") as caught:
        trainer, gate, _, _ = run(tmp_path, noise)
    assert trainer.global_step == 4
    assert (gate.notches, noise.notches) == (3, 3)
    assert noise.standard_deviation == pytest.approx(8e-9)
    said = [text for text in caught if "RiskGate" in text]
    assert [("hardened" in text, "stopped training" in text) for text in said] == [
        *[(True, False)] * 3,
        (False, True),
    ]
    assert "gradient_noise: sigma 1e-09 -> 2e-09" in said[0]
    assert "defences: gradient_noise, turned up as far as it goes" in said[3]
    assert "turned up further (max_hardenings)" in said[3]
    assert "defenses=[" not in said[3], "the run has a defence"
    assert len(list(Path(trainer.log_dir).rglob("*.ckpt"))) == 1
    assert column(trainer, f"gate/{gate.name}_notches") == ["1.0", "2.0", "3.0", "3.0"]


def test_notches_are_a_curve_that_begins_before_the_first(tmp_path: Path) -> None:
    with announced("hardened the run"):
        trainer, gate, _, _ = run(tmp_path, GradientNoise(clip=None, sigma=1e-9), patience=2)
    notches = ["0.0"] * 2 + ["1.0"] * 3 + ["2.0"] * 3
    assert column(trainer, f"gate/{gate.name}_notches") == notches


@pytest.mark.parametrize(
    ("value", "said"), [(0.30034, "= 0.300340"), (0.4, "= 0.400"), (0.30000000012, "= 0.30000000")]
)
def test_a_breach_does_not_read_as_none(value: float, said: str) -> None:
    event = GateEvent(F1, 3, value, math.nan, math.nan, 0.3, None)
    found = str(event).partition("measured: leakage/probe/f1 ")[2].split()[1]
    assert f"= {found}".startswith(said)
    assert float(found) > 0.3


def test_noise_that_is_turned_up_is_in_the_next_update(tmp_path: Path) -> None:
    noise = GradientNoise(clip=None, sigma=10.0, max_hardenings=1, seed=1)
    with announced("hardened the run"):
        _, _, _, probe = run(tmp_path, noise, at_most=0.0)
    before, after = probe.at("shared")
    assert float(before.std()) == pytest.approx(10.0, rel=0.05)
    assert float(after.std()) == pytest.approx(20.0, rel=0.05)


def test_a_head_that_a_strict_gate_froze_is_no_pass_while_all_else_is_shared(
    tmp_path: Path,
) -> None:
    freeze = Freeze("head", when="hardened")
    with announced("RiskGate") as caught:
        trainer, gate, monitor, probe = run(tmp_path, freeze)
    assert (trainer.global_step, gate.notches, len(probe.at("shared"))) == (2, 1, 1)
    assert monitor.latest["leakage/probe/exposed"] == 0
    assert math.isnan(monitor.latest["leakage/worst/words"])
    stopped = caught[-1]
    assert "no attack on words of this monitor reads anything that is shared" in stopped


def test_what_is_frozen_by_a_gate_is_exposed_no_more_and_the_run_goes_on(tmp_path: Path) -> None:
    freeze = Freeze("head", when="hardened")
    with announced("is frozen from now on"):
        trainer, gate, monitor, probe = run(tmp_path, freeze, strict=False)
    assert trainer.global_step == trainer.num_training_batches == 8
    assert len(probe.at("shared")) == 1
    assert monitor.latest["leakage/probe/exposed"] == 0
    assert gate.notches == 1
    head = trainer.lightning_module.model.lm_head.weight
    assert head.requires_grad  # given back when the fit has ended
    assert float(trainer.optimizers[0].state[head]["step"]) == 1


def test_a_resumed_run_stays_hardened_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def noise() -> GradientNoise:
        return GradientNoise(clip=None, sigma=1e-9, max_hardenings=2)

    with announced("hardened the run"):
        trainer, gate, _, _ = run(
            tmp_path, noise(), Freeze("head", when="hardened"), patience=1, strict=False
        )
    path = tmp_path / "hardened.ckpt"
    trainer.save_checkpoint(path)
    hardened = gate.notches
    assert hardened == 1
    again = noise()
    with (
        pytest.warns(UserWarning, match="not shared"),
        caplog.at_level(logging.INFO, "lightning.pytorch"),
    ):
        _, resumed, monitor, probe = run(
            tmp_path, again, Freeze("head", when="hardened"), epochs=2, ckpt_path=str(path),
            at_most=1.0, strict=False,
        )  # fmt: skip
    assert again.notches == 1
    assert resumed.notches == 1
    assert "RiskGate 'probe/f1': the run goes on as hardened, 1 notch so far" in caplog.text
    assert probe.seen == []
    assert monitor.latest["leakage/probe/exposed"] == 0


@pytest.mark.parametrize(
    ("defenses", "found"),
    [
        ([], "this run has no defence"),
        ([GradientNoise(clip=1.0, sigma=0.0), Freeze("head")], "has gradient_noise, freeze"),
    ],
)
def test_nothing_to_turn_up_is_refused(tmp_path: Path, defenses: list[Defense], found: str) -> None:
    with pytest.raises(ValueError, match=f"nothing to turn up: .*{found}"):
        run(tmp_path, *defenses)
