"""A plugin of pytest: tests of how much a model or a training step leaks.

The fixture ``fedleak_release`` compares trained weights with their base on members (texts that were
trained on) and held-out texts. The fixture ``fedleak_step`` attacks the gradient of one step. Its
*control* is the result of the same attack on known words: if that is low, the result is unknown.
Installed with the package; imports nothing heavy before a fixture is used.
"""

from __future__ import annotations

import functools
import io
import json
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pytest

if TYPE_CHECKING:
    import torch

    from lightning_fedleak.attacks import Attack

# The attacks that the summary shows: on long texts, on short texts, and by extraction.
_HEADLINES = ["combined", "loss_ratio_short", "extraction"]
SUMMARY = pytest.StashKey[list[str]]()
"""Key of what the checks of a session measured, a line each."""


class _ReleaseCheck:
    """Test how much trained weights leak of their training texts.

    Args:
        content: The result of ``fedleak memorization``; empty if it could score nothing.
        printed: The output of the command.
        notes: The lines for the summary of the session.
    """

    def __init__(self, content: Mapping[str, Any], printed: str, notes: list[str]) -> None:
        pools = [content, content.get("short_answers", {})]
        unknown = content.get("not_compared", ())  # attacks on members that could not be compared
        attacks: dict[str, dict[str, float | None]] = {attack: {} for attack in unknown}
        for pool in pools:
            attacks |= pool.get("attacks", {})
        for name, values in content.get("entities", {}).items():
            attacks[name] = {} if isinstance(values, str) else values  # a reason why it is unknown
        self._values = {
            attack: {name: math.nan if value is None else value for name, value in values.items()}
            for attack, values in attacks.items()
        }
        self._is_known = bool(content.get("known"))
        self._reference = content.get("reference")
        self._printed = printed
        self._notes = notes

    def assert_at_most(self, at_most: float, metric: str = "auc") -> None:
        """Fail unless a metric is shown to be at most a limit; an unknown metric fails too.

        Args:
            at_most: the limit.
            metric: ``"auc"``, ``"shown"``, ``"tpr_at_fpr_0.001"``, ``"extracted"`` or ``"greedy"``,
                as the command has it, or with ``entities`` ``"entity/<kind>/<place>"``.
        """
        from lightning_fedleak.cli.commands.memorization import breaches_of

        breaches = breaches_of(self._values if self._is_known else {}, metric, at_most)
        visible = [metric] if metric in self._values else _HEADLINES
        rate = "auc" if metric in self._values else metric
        numbers = ", ".join(
            f"{attack}/{rate} {values[rate]:.3f} "
            f"({values.get(f'{rate}_low', math.nan):.3f} to "
            f"{values.get(f'{rate}_high', math.nan):.3f})"
            for attack, values in self._values.items()
            if rate in values and attack in visible
        )
        line = f"{numbers or metric}, limit {at_most:g}"
        self._notes.append(f"{line}: {'FAILED' if breaches else 'passed'}")
        self._notes += self._low_rates()
        if breaches:
            pytest.fail("\n".join([line, *breaches, self._printed]), pytrace=False)

    def _low_rates(self) -> Iterator[str]:
        """Yield the TPRs at small FPRs of each score that a gate reads, and the reference."""
        from lightning_fedleak.cli.commands.memorization import reference_in_words, tpr_in_words
        from lightning_fedleak.evaluation.metrics.released import FPRS, rate_name
        from lightning_fedleak.report.records import ReferenceFacts

        for attack in (*_HEADLINES[:2], "combined_reference"):
            if self._values.get(attack):
                rates = (
                    f"{rate_name(fpr)} {tpr_in_words(self._values[attack], rate_name(fpr))}"
                    for fpr in FPRS
                )
                yield f"{attack}: {', '.join(rates)}"
        if self._reference is not None:
            facts = ReferenceFacts.from_json(self._reference)
            yield from reference_in_words(facts, self._values)


@dataclass(frozen=True)
class _StepCheck:
    """Attack the gradient of one training step, as a client would share it.

    Attributes:
        notes: lines for the summary of the session.
        model: the model, as it is trained.
        batch: keyword arguments of its forward, with labels.
        attacks: as :class:`~lightning_fedleak.trainers.Watch` takes them.
    """

    notes: list[str]
    model: torch.nn.Module
    batch: Mapping[str, torch.Tensor]
    attacks: Sequence[Attack] | Literal["auto"] = "auto"

    def assert_at_most(self, at_most: float, metric: str = "leakage/worst/words") -> None:
        """Fail if a metric is above a limit, or unknown: not read, or with a low control.

        Args:
            at_most: the limit.
            metric: a name in the logs.
        """
        import torch

        from lightning_fedleak.engine import WatchSettings
        from lightning_fedleak.trainers import Threshold, Watch

        events: list[object] = []
        model, quiet = self.model, WatchSettings(tensorboard=False)
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=0.0)  # the step does not change the model
        gate = Threshold(metric, at_most=at_most, action=events.append)
        with tempfile.TemporaryDirectory() as logs:
            watch = Watch(
                model, optimizer, self.attacks, [gate], folder=logs, every_n_steps=1, settings=quiet
            )
            optimizer.zero_grad()
            with watch, watch.step(self.batch):
                model(**self.batch).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        names = watch.engine.results.headlines_of(metric) or (metric,)
        line = f"{metric} {_as_text(watch.latest.get(metric))}, limit {at_most:g}"
        line += "".join(_sources(watch.latest, names))
        self.notes.append(f"{line}: {'FAILED' if events else 'passed'}")
        if events:
            pytest.fail(f"{line}: {events[0]}", pytrace=False)


def _sources(latest: Mapping[str, float], names: Sequence[str]) -> Iterator[str]:
    """Yield the values of some attacks, each with its interval and its control."""
    for name in names:
        if f"{name}_low" in latest:
            value, low, high = (_as_text(latest[f"{name}{end}"]) for end in ("", "_low", "_high"))
            attack = name.rpartition("/")[0]
            yield f"; {attack.removeprefix('leakage/')} {value} ({low} to {high})"
            if (control := f"{attack}/control") in latest:
                yield f", control {latest[control]:.3f}"


def _as_text(value: float | None) -> str:
    """Return a number with three decimals; ``unknown`` for None and NaN."""
    return "unknown" if value is None or math.isnan(value) else f"{value:.3f}"


@pytest.fixture
def fedleak_release(request: pytest.FixtureRequest) -> Callable[..., _ReleaseCheck]:
    """Return a function that compares trained weights with their base on members and non-members.

    ::

        def test_the_release_gives_away_little(fedleak_release):
            check = fedleak_release("out/model", base="gpt2", members="train.jsonl",
                                    held_out="held_out.jsonl", drawn=True)
            check.assert_at_most(0.6)

    Its arguments are the options of ``fedleak memorization``; ``held_out`` is ``--others``.
    """
    notes = request.config.stash.setdefault(SUMMARY, [])

    def check(
        model: str | Path,
        base: str | Path,
        members: str | Path,
        held_out: str | Path,
        **options: object,
    ) -> _ReleaseCheck:
        from rich.console import Console

        from lightning_fedleak.cli.commands import memorization
        from lightning_fedleak.cli.commands.parser import parse

        with tempfile.TemporaryDirectory() as folder:
            result_path = Path(folder) / "result.json"
            arguments = {"model": model, "base": base, "members": members, "others": held_out}
            words = ["memorization"]
            for name, value in {**arguments, "out": result_path, **options}.items():
                if value is not None and value is not False:
                    words.append(f"--{name.replace('_', '-')}")
                    words += [] if value is True else [str(value)]
            console = Console(record=True, width=100, file=io.StringIO())
            memorization.run(parse(words), console)
            content = (
                json.loads(result_path.read_text(encoding="utf-8")) if result_path.exists() else {}
            )
        return _ReleaseCheck(content, console.export_text(), notes)

    return check


@pytest.fixture
def fedleak_step(request: pytest.FixtureRequest) -> Callable[..., _StepCheck]:
    """Return a function that attacks the gradient of a model on one batch.

    ::

        def test_a_step_shares_few_words(fedleak_step, model, batch):
            fedleak_step(model, batch).assert_at_most(0.5)
    """
    return functools.partial(_StepCheck, request.config.stash.setdefault(SUMMARY, []))


def pytest_configure(config: pytest.Config) -> None:
    """Name the marker of tests that use a fixture of this plugin."""
    config.addinivalue_line("markers", "fedleak: measures what a model or a step gives away")


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that use a fixture of this plugin."""
    for item in items:
        if {"fedleak_release", "fedleak_step"}.intersection(getattr(item, "fixturenames", ())):
            item.add_marker("fedleak")


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Print what was measured, also where every test passed."""
    if notes := config.stash.get(SUMMARY, []):
        terminalreporter.section("leakage")
        for note in notes:
            terminalreporter.write_line(note)
