"""Nothing in a watch ends a training: what a look raises is a failure of that look.

Every function of the package that a plain watched run calls after its set-up is found by a trace
of such a run. Each of them then raises at a look of its own: every fourth here, the others in the
slow row.
"""

import json
import math
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lightning_fedleak
from lightning_fedleak import BagOfWords, FCMembership, FlatChat
from lightning_fedleak.engine import Games, WatchSettings
from lightning_fedleak.engine.channels.control import Controls
from lightning_fedleak.engine.results import Results
from lightning_fedleak.trainers import Threshold, Watch
from tests.helpers.models import tiny_gpt2

PACKAGE = str(Path(lightning_fedleak.__file__).parent)
BACKWARD = torch.autograd.backward
F1 = "leakage/bag_of_words/f1"


class Injected(RuntimeError):
    """What a function raises here."""


@contextmanager
def profiled(callback: Callable[[CodeType], None]) -> Iterator[None]:
    """Call a function with the code of each function that is entered; what it raises, that raises.

    Python takes a trace away once it has raised. A profile would be called for functions of C too.
    """

    def enter(frame: FrameType, *_: object) -> None:
        callback(frame.f_code)

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        yield
    finally:
        sys.settrace(before)


@contextmanager
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


THIN = {
    # Hand over what the user's loop calls, and have no more than a line of their own.
    *("Watch.step", "Watch.batch_begins", "Watch.batch_ends", "Watch._backward_begins"),
    *("Watch.optimizer_steps", "Watch.end", "Watch.close"),
    *("Engine.batch_ends", "Engine._conclude"),
    *("Engine.look_at_end", "Engine.training_ends", "Engine.metrics_changed", "Engine.close"),
    # Catch what is raised below them.
    *("contained.<locals>.run", "raised_when_read.<locals>.run"),
    "Place.on_states.<locals>.hook",
    # Stand where the user's own backward and step stand, and call these.
    *("before_backward", "before_backward.<locals>.backward", "_Chain.__init__.<locals>.step"),
    *("_Chain._step", "_Chain._step.<locals>.closure_then_run", "_Chain._run"),
}
"""What raises in the user's own loop: nothing in it can fail but the next call."""
REMOVERS = {
    *(
        "_Chain.remove",
        "Fit.close",
        "Fit.each",
        "MembershipChannel._remove_taps",
        "ActivationTap.close",
    )
}
"""What leaves its own hook where it fails."""
PAGES = {
    *("_reveal", "RevealFiles.append", "RevealFiles.each"),
    *(
        "Report.write_between_looks",
        *("UserMetrics.changed", "UserMetrics.measured"),
        "privacy_values",
        "LoopRun.progress",
        "is_training",
    ),
}
"""Show more than numbers: where they fail the result is known, and a warning is given."""
AFTER_LINES = {
    "RunRecord.append", "RunRecord.write_new_defenses", "Report.log", "FlatChat.config",
    "FCMembership.config",
}  # fmt: skip
"""Run after (the first) lines of a look: its values are unknown, and the lines of the next look."""
AFTER_LOOK = {"Results.waiting"}
"""Run after a look has been published: the lines of the next look are unknown."""
CONTROL = {"precision_recall_f1", "Results._controlled", "Results.judge"}
"""Are entered for the control of a look alone."""


def nothing(_: CodeType) -> None:
    """Take notice of no function."""


QUARTERS = [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 3))]
"""Which of every four functions raise."""
RAISED: set[CodeType] = set()
"""Functions that have raised; one whose result is cached is not entered again."""
IN_CONTROL: set[CodeType] = set()
"""Functions that have raised while a control was made."""


def in_control() -> bool:
    """Return whether a control is being made or attacked by what runs now."""
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_filename.endswith("/control.py") or code.co_qualname in CONTROL:
            return True
        frame = frame.f_back
    return False


def raises(target: CodeType) -> Callable[[CodeType], None]:
    def callback(code: CodeType) -> None:
        if code is target:
            RAISED.add(code)
            if in_control():
                IN_CONTROL.add(code)
            raise Injected

    return callback


def set_up() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(7)
    model = tiny_gpt2(tied=False, dropout=0.1).train()
    return model, torch.optim.AdamW(model.parameters(), 1e-2)


def batch_of(step: int) -> dict[str, Tensor]:
    ids = torch.randint(3, 60, (3, 6), generator=torch.Generator().manual_seed(step))
    return {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> float:
    loss: Tensor = model(**batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def watched(folder, model, optimizer, *more) -> Watch:
    return Watch(
        model, optimizer, [BagOfWords(), *more, FCMembership(1)], folder=folder,
        games=Games(targets=2), settings=WatchSettings(tensorboard=False, reveal=True),
        every_n_steps=1,
    )  # fmt: skip


def functions(callback: Callable[[Callable[[CodeType], None]], object]) -> list[CodeType]:
    """Return the functions of the package that are entered by what a callback profiles."""
    codes: dict[CodeType, None] = {}

    def note(code: CodeType) -> None:
        if code.co_filename.startswith(PACKAGE) and not code.co_name.startswith("<"):
            codes.setdefault(code)

    callback(note)
    # A DPSGD that another test has not closed still listens to the steps of all optimizers.
    plain = (code for code in codes if not code.co_filename.endswith("/dpsgd/writes.py"))
    return [code for code in plain if code.co_qualname not in THIN]


def hooks_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Return how many hooks and patches there are, by where they are."""
    counts: dict[str, int] = {}
    for name, module in model.named_modules():
        for kind in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks"):
            counts[f"{name}{kind}"] = len(getattr(module, kind))
        counts[f"{name}.forward"] = int("forward" in vars(module))
    for name, parameter in model.named_parameters():
        counts[f"{name} hooks"] = len(getattr(parameter, "_post_accumulate_grad_hooks", None) or ())
        counts[f"{name} hooks of its gradient"] = len(parameter._backward_hooks or ())
        counts[f"{name}.grad"] = int(parameter.grad is not None)
    counts["step"] = int("step" in vars(optimizer))
    counts["backward"] = int(torch.autograd.backward is not BACKWARD)
    return {name: count for name, count in counts.items() if count}


def whys(folder: Path) -> dict[int, list[str | None]]:
    """Return why results are unknown, as the file has it, by step."""
    (path,) = folder.rglob("leakage.jsonl")
    by_step: dict[int, list[str | None]] = {}
    for line in map(json.loads, path.read_text().splitlines()):
        by_step.setdefault(line["step"], []).append(line["unknown"])
    return by_step


def steps_with(folder: Path, note: Callable[[CodeType], None]) -> None:
    model, optimizer = set_up()
    with watched(folder, model, optimizer, FlatChat(n_types=6)) as watch:
        for step in range(3):
            with profiled(note if step else nothing), watch.step(batch_of(step)):
                one_step(model, optimizer, batch_of(step))


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


def check_logged(folder: Path, targets: list[CodeType], latest: list[dict[str, float]]) -> None:
    """Each failure is in the file as unknown; where that cannot be written, in the values."""
    by_step = whys(folder)
    assert len(RAISED.intersection(targets)) > 0.95 * len(targets)
    for number, target in enumerate(targets):
        is_next = target.co_qualname in AFTER_LOOK
        lines, values = by_step.get(number + 1 + is_next), latest[number]
        if target.co_qualname in PAGES or target not in RAISED:
            continue
        if target.co_qualname == "StepTap.read" or target.co_filename.endswith("/batches.py"):
            continue  # the batch is read beside the step's own graph, which shows all of it
        if target in IN_CONTROL or target.co_qualname in CONTROL:
            continue  # the number is known, and its control is not: a gate says so where it counts
        is_late = target.co_qualname in AFTER_LINES
        is_reported = math.isnan(values[F1]) if is_late or lines is None else any(lines)
        assert is_reported, f"nothing reports that {target.co_qualname} failed"
    assert None in by_step[len(targets) + 2], "the look without a failure is not known"


@pytest.mark.parametrize("quarter", QUARTERS)
def test_what_a_function_of_a_look_raises_is_a_failure_of_that_look(tmp_path, quarter, monkeypatch):
    """Each function raises in a step of its own, and none does in the last two.

    A control is made where a function is entered for controls alone: it takes most of a step.
    """
    due = [False]
    monkeypatch.setattr(Controls, "_is_due", lambda *_: due[0])
    targets = functions(lambda note: steps_with(tmp_path / "plain", note))
    due[0] = True
    both = functions(lambda note: steps_with(tmp_path / "control", note))
    controls = [code for code in both if code not in targets]
    assert len(targets) > 200
    assert len(controls) > 40
    targets = targets[quarter::4] + controls[quarter::4]
    plain, plain_optimizer = set_up()
    losses = [one_step(plain, plain_optimizer, batch_of(n)) for n in range(len(targets) + 3)]
    after = torch.rand(3)

    model, optimizer = set_up()
    latest: list[dict[str, float]] = []
    attack = FlatChat(n_types=6)
    with quiet(), watched(tmp_path / "failing", model, optimizer, attack) as watch:
        with watch.step(batch_of(0)):  # the set-up ends with the first batch that is read
            assert one_step(model, optimizer, batch_of(0)) == losses[0]
        hooks = hooks_of(model, optimizer)
        for step, target in enumerate([*targets, None, None], 1):
            name = "no function" if target is None else target.co_qualname
            callback, due[0] = nothing if target is None else raises(target), target in controls
            with profiled(callback), watch.step(batch_of(step)):
                loss = one_step(model, optimizer, batch_of(step))
            assert loss == losses[step], name
            assert hooks_of(model, optimizer) == hooks, name
            latest.append(watch.latest)
        assert watch.latest[F1] == 1.0
    assert torch.equal(after, torch.rand(3))
    assert same(model.state_dict(), plain.state_dict())
    check_logged(tmp_path / "failing", targets, latest)
    assert not hooks_of(model, optimizer)


@pytest.mark.parametrize("quarter", QUARTERS)
def test_what_the_end_of_a_watch_raises_does_not_reach_the_loop(tmp_path, quarter) -> None:
    def ended(folder: Path, callback: Callable[[CodeType], None]) -> dict[str, int]:
        model, optimizer = set_up()
        with watched(folder, model, optimizer) as watch:
            with watch.step(batch_of(0)):
                one_step(model, optimizer, batch_of(0))
            with profiled(callback):
                watch.end()
        return hooks_of(model, optimizer)

    targets = functions(lambda note: ended(tmp_path / "plain", note))
    assert len(targets) > 20
    for number, target in enumerate(targets[quarter::4]):
        name = target.co_qualname
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            hooks = ended(tmp_path / str(number), raises(target))
        assert bool(hooks) == (name in REMOVERS), f"{name} does not remove {hooks}"
        is_reported = any("Injected" in str(warning.message) for warning in caught)
        reasons = whys(tmp_path / str(number)).values()
        is_reported |= any(why is not None for every in reasons for why in every)
        assert is_reported, f"nothing reports that {name} failed"


def test_a_state_that_cannot_be_made_ends_no_checkpoint(tmp_path, monkeypatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise Injected

    model, optimizer = set_up()
    with quiet(), watched(tmp_path, model, optimizer) as watch:
        with watch.step(batch_of(0)):
            one_step(model, optimizer, batch_of(0))
        with monkeypatch.context() as patch:
            patch.setattr(Results, "state_dict", fails)
            state = watch.state_dict()
        with watch.step(batch_of(1)):
            one_step(model, optimizer, batch_of(1))
        assert math.isnan(watch.latest[F1])  # said at the next look
    resumed = watched(tmp_path / "resumed", model, optimizer)
    resumed.load_state_dict(state)
    with quiet(), resumed:
        assert resumed.loop.steps == 1


def test_a_strict_gate_decides_where_every_look_fails(tmp_path, monkeypatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise Injected

    model, optimizer = set_up()
    gate = Threshold(F1, at_most=1.0, patience=1)
    attacks = [BagOfWords()]
    watch = Watch(model, optimizer, attacks, [gate], folder=tmp_path, every_n_steps=1)
    with quiet(), watch:
        monkeypatch.setattr(Results, "add", fails)
        for step in range(4):
            with watch.step(batch_of(step)):
                one_step(model, optimizer, batch_of(step))
            if watch.should_stop:
                break
    assert (step, gate.fired is not None) == (1, True)
