"""``DPSGD(check=...)`` under each host: sound trainings stay equal, and its faults are refuted."""

import json
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_fedleak import DPSGD, DefendedLoop, DefenseError, FlatChat, PlantedGradients, Users
from lightning_fedleak.defenses import accounting, noise
from lightning_fedleak.defenses.dpsgd import clipped_sum, per_sample
from lightning_fedleak.evaluation.auditing import PrivateTrainingCheck, private_training
from lightning_fedleak.report import findings, model_card, read
from lightning_fedleak.trainers import Watch
from tests.trainers import hosts

STEPS, LOOK = 6, 2


def every(steps: int) -> PlantedGradients | None:
    return PlantedGradients(steps) if steps else None


def train(
    check: int = LOOK,
    norm: float = hosts.CLIP,
    folder: Path | None = None,
    steps: int = STEPS,
    **settings: Any,
) -> tuple[list[torch.Tensor], DPSGD]:
    """Return the weights that a loop of one's own ends with, and its defence."""
    torch.manual_seed(0)
    model = hosts.tiny_gpt2(dropout=0.0).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(hosts.rows(64), batch_size=16)
    dp = DPSGD(norm, noise_multiplier=1.0, target_delta=1e-3, check=every(check), **settings)
    watch: Any = None
    if folder is not None:
        watch = Watch(model, optimizer, [FlatChat(n_types=5)], folder=folder, every_n_steps=steps)
    with (
        DefendedLoop(model, optimizer, loader, [dp], steps=steps) as private,
        watch or nullcontext(),
    ):
        while dp.releases < steps:
            for batch in private:
                with nullcontext() if watch is None else watch.step(batch):
                    private.loss(lambda rows: model(**rows).loss, batch).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                if dp.releases == steps:
                    break
    return [p.detach().clone() for p in model.parameters()], dp


def test_the_claim_has_the_noise_that_half_precision_adds(tmp_path: Path) -> None:
    """Autocast within the model alone is found by the first step, after the audit has begun."""
    model = hosts.tiny_gpt2(dropout=0.0)
    model.forward = torch.autocast("cpu", torch.bfloat16)(model.forward)
    dp = DPSGD(hosts.CLIP, noise_multiplier=1.0, target_delta=1e-3, check=PlantedGradients(LOOK))
    settings = {"per_device_train_batch_size": 16, "num_train_epochs": 1}
    hosts.in_lightning(tmp_path, model, [dp], 0.1, **settings)
    assert dp._audit._claim.noise_multiplier == pytest.approx(1 + 0.01 * 16**0.5)


@cache
def trained_without(**settings: Any) -> tuple[list[torch.Tensor], DPSGD]:
    return train(0, seed=1, **settings)


def results(dp: DPSGD) -> dict[str, str]:
    return {check.name: check.result for check in dp.verdict.checks}


@pytest.mark.parametrize("settings", [{}, {"max_physical_batch_size": 6}])
def test_a_sound_loop_is_not_refuted_and_trains_as_without_the_check(settings: Any) -> None:
    (checked, dp), (plain, other) = train(seed=1, **settings), trained_without(**settings)
    assert all(map(torch.equal, checked, plain))
    assert dp.releases == other.releases == dp.accountant.steps == STEPS
    assert (dp.verdict.result, dp.verdict.looks) == ("not refuted", STEPS // LOOK)
    assert all(check.visible for check in dp.verdict.checks)
    assert other.verdict is None


@pytest.mark.parametrize("host", [hosts.in_lightning, hosts.under_the_trainer])
def test_other_hosts_are_checked_and_train_as_without_the_check(host: Any, tmp_path: Path) -> None:
    weights = []
    for check in (LOOK, 0):
        dp = DPSGD(hosts.CLIP, noise_multiplier=1.0, target_delta=1e-3, seed=1, check=every(check))
        torch.manual_seed(0)
        model = hosts.tiny_gpt2(dropout=0.0)
        settings = {"per_device_train_batch_size": 16, "num_train_epochs": 2}
        assert host(tmp_path, model, [dp], 0.1, **settings).steps == dp.releases
        weights.append([*model.parameters()])
        if check:
            assert dp.verdict.looks == dp.releases // LOOK, str(dp.verdict)
            assert {results(dp)[n] for n in ("noise", "clipping", "opposed rows")} == {
                "not refuted"
            }
    assert all(map(torch.equal, *weights))


@pytest.mark.parametrize("place", ["forward", "backward"])
def test_an_error_in_a_look_ends_the_looks_and_not_the_training(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:

    def fail(*_: Any) -> None:
        raise ArithmeticError("only in a look")

    scale = PrivateTrainingCheck._scale_rows

    def scale_rows(self: Any, module: Any, inputs: Any, output: Any) -> None:
        scale(self, module, inputs, output)
        fail() if place == "forward" else output.register_hook(fail)

    monkeypatch.setattr(PrivateTrainingCheck, "_scale_rows", scale_rows)
    checked, dp = train(seed=1)
    assert all(map(torch.equal, checked, trained_without()[0]))
    assert results(dp)["noise"] == "unknown"
    assert "raised ArithmeticError at test_own_check.py:" in str(dp.verdict)
    assert "only in a look" not in str(dp.verdict)  # such a message may quote a text


def unclipped(clip: Any, norms: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(norms)


def squared(clip: Any, norms: torch.Tensor) -> torch.Tensor:
    return clip.norm / norms.square().clamp(min=clip.norm)


@pytest.mark.parametrize(
    ("fault", "refuted"),
    [
        ("no noise", "noise"),
        ("half of the noise", "noise"),
        ("the same noise in each step", "fresh noise"),
        ("no clipping", "clipping"),
        ("factor C / norm^2", "near the norm"),
        ("norms without the first layer", "clipping"),
        ("counts no release", "account"),
    ],
)
def test_a_fault_in_dpsgd_is_refuted(
    fault: str, refuted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    add, squares = noise.add_noise, per_sample.squared_norms
    factors = {"no clipping": unclipped, "factor C / norm^2": squared}
    if fault in factors:
        monkeypatch.setattr(clipped_sum.Clip, "factors", factors[fault])
    elif fault == "norms without the first layer":
        monkeypatch.setattr(per_sample, "squared_norms", lambda parts: [*squares(parts)][1:])
    elif fault == "counts no release":
        monkeypatch.setattr(accounting.Budget, "count_release", lambda budget: None)
    else:
        share = {"no noise": 0.0, "half of the noise": 0.5}.get(fault, 1.0)

        def changed(base: Any, release: int, client: int, name: str, *rest: Any) -> None:
            number, total, std = rest
            release = 0 if fault.startswith("the same") else release
            add(base, release, client, name, number, total, std * share)

        monkeypatch.setattr(noise, "add_noise", changed)
        # DPSGD measures the noise of the first release itself, and refuses one that is wrong.
        monkeypatch.setattr(noise.NoiseGauge, "measured", lambda _: None)
    _, dp = train(norm=0.25)
    assert results(dp)[refuted] == "refuted", str(dp.verdict)


def test_what_cannot_be_checked_is_refused() -> None:
    known = {"noise_multiplier": 1.0, "check": PlantedGradients()}
    for settings in ({"noise_multiplier": 0.0}, {"unit": Users("author")}, {"check": True}):
        with pytest.raises(DefenseError, match="check"):
            DPSGD(1.0, **(known | settings))
    with pytest.raises(DefenseError, match="every_n_steps"):
        PlantedGradients(2.5)  # type: ignore[arg-type]


@pytest.mark.parametrize("fault", [None, "no clipping", "too few rows", "several processes", "off"])
def test_the_record_and_the_report_say_what_was_found(
    fault: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if fault == "no clipping":
        monkeypatch.setattr(clipped_sum.Clip, "factors", unclipped)
    if fault == "too few rows":
        monkeypatch.setattr(private_training, "MIN_COPIES", 100)
    if fault == "several processes":
        begin = PlantedGradients.begin

        def begin_as_two(self: Any, defense: Any, context: Any, *more: Any) -> Any:
            return begin(self, defense, replace(context, clients=2), *more)

        monkeypatch.setattr(PlantedGradients, "begin", begin_as_two)
    steps = STEPS if fault in (None, "no clipping") else LOOK  # others are seen in one look
    check = 0 if fault == "off" else LOOK
    _, dp = train(check, norm=0.25, seed=1, folder=tmp_path, steps=steps)
    lines = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    [spent] = lines[-1]["privacy"]
    [account] = findings(read([tmp_path])).runs[0].privacy
    begins = {
        None: "not refuted; smallest fault that could have been seen: noise: below ",
        "no clipping": "refuted: clipping: an example moves a release by up to ",
        "too few rows": "unknown: noise: no look: ",
        "several processes": "unknown: several processes trained",
        "off": "None",
    }[fault]
    assert str(account.check).startswith(begins)
    assert account.check == spent.get("check") == dp.finding
    assert not any(one["check"] for line in lines[:-1] for one in line.get("privacy") or ())
    word = begins.partition(";")[0].partition(":")[0]
    assert (f"to refute this: {word}. " in account.statement) == (fault != "off")
    assert (f"; planted gradients: {word}" in account.claim) == (fault != "off")
    assert (f"planted gradients: {word}" in model_card(findings(read([tmp_path])))) == (
        fault != "off"
    )
    if fault in (None, "no clipping"):
        wanted = [c for c in dp.verdict.checks if c.result == dp.verdict.result]
        assert all(str(c.visible if fault is None else c.evidence) in dp.finding for c in wanted)
    if fault is None:  # and where the fit was killed
        record = tmp_path / "run.jsonl"
        record.write_text("".join(record.read_text().splitlines(keepends=True)[:-1]))
        [account] = findings(read([tmp_path])).runs[0].privacy
        assert account.check == "unknown: no verdict was recorded"
