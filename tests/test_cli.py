"""The command line: help, errors, its form in fragments, what it shows and what it refuses."""

import math
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch.cli import LightningArgumentParser
from torch.utils.data import DataLoader

import lightning_fedleak
from lightning_fedleak import (
    DPSGD,
    DefendedStrategy,
    FCMembership,
    LeakageCallback,
    LeakageMonitor,
    PrefixInversion,
    RiskGate,
    Threshold,
    progress,
)
from lightning_fedleak.attacks import AlignedFlatChat
from lightning_fedleak.attacks.words import aligned_readout
from lightning_fedleak.callbacks import WatchSettings
from lightning_fedleak.cli import main
from lightning_fedleak.cli.commands import demo
from lightning_fedleak.cli.commands.fit import fit
from lightning_fedleak.cli.commands.options import parsers
from lightning_fedleak.defenses import Freeze, GradientNoise
from lightning_fedleak.extras import install
from lightning_fedleak.report.records import MEMBERSHIP
from lightning_fedleak.report.records import TEXTS as TEXTS_FAMILY
from lightning_fedleak.validate import check_choice, check_integer, check_number
from tests.callbacks import runs
from tests.callbacks.runs import Probe
from tests.helpers.folders import TEXTS, save_tiny_causal_lm
from tests.helpers.lightning_modules import CausalLMModule, random_token_loader
from tests.helpers.models import tiny_gpt2


@pytest.mark.parametrize(
    ("arguments", "shown", "unloaded"),
    [
        (["--help"], "demo", "torch lightning transformers"),
        (["fit", "--data.length=3", "--help"], "--recipe NAME", "jsonargparse"),
    ],
)
def test_help_is_short_and_loads_no_library(arguments, shown, unloaded) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "lightning_fedleak", *arguments]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.startswith("usage: fedleak ")
    assert shown in finished.stdout
    assert finished.stdout.count("\n") <= 60
    loaded = {line.rpartition("|")[2].strip() for line in finished.stderr.splitlines()}
    assert "lightning_fedleak.cli" in loaded
    assert not loaded & {*unloaded.split()}


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out.strip() == version("lightning-fedleak")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["demo", "--steps", "0"], "argument --steps: '0' is not a whole number of at least 1"),
        (["demo", "--at-most", "1.5"], "argument --at-most: '1.5' is not a number from 0 to 1"),
        (["demo", "--lr", "inf"], "argument --lr: 'inf' is not a positive number"),
        (["demo", "--seed", "-1"], "argument --seed: '-1' is not a whole number from 0"),
        (["demo", "--batchsize", "3"], "unrecognized arguments: --batchsize 3. See fedleak --help"),
        (["invrt"], "invalid choice: 'invrt'"),
    ],
)
def test_numbers_out_of_range_and_wrong_names_are_refused_in_one_line(arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["demo", "--text", "nofile.txt"], "there is no file 'nofile.txt'"),
        (["invert", "--text", "./letters"], "there is no file './letters'"),
        (["invert", "--text", "t.csv"], "name one with column= (--column)"),
        (["invert", "--column", "review"], "has no column 'review'"),
        (["demo", "--model", "inside"], "could be loaded from 'inside'"),
        (["invert", "--model", "./nomodel"], "there is no folder './nomodel'"),
        (["invert", "--model", "."], "is no folder of a model (no config.json)"),
    ],
)
def test_missing_sources_are_reported_in_one_line(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.csv").write_text("id,review\n1,x\n")
    (tmp_path / "inside").mkdir()
    (tmp_path / "inside" / "config.json").touch()
    assert main(arguments) == 1
    error = capsys.readouterr().err
    assert error.startswith("fedleak: ")
    assert message in error
    assert error.count("\n") == 1


def test_demo_without_tensorboard_says_what_to_install(monkeypatch, capsys) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["demo"]) == 1
    assert install("demo") in capsys.readouterr().err


def test_an_interrupt_while_loading_is_no_traceback(monkeypatch, capsys) -> None:
    def interrupted(options: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "run", interrupted)
    assert main(["demo"]) == 130
    assert "interrupted" in capsys.readouterr().err


@pytest.mark.parametrize("partly", [False, True])
def test_fit_without_jsonargparse_says_what_to_install(partly, monkeypatch, capsys) -> None:
    if partly:  # of jsonargparse[signatures] a part: Lightning's own error, which names no module
        message = "Requirement 'jsonargparse[signatures]>=4.27.7' not met"

        def refuses(*args: object, **settings: object) -> None:
            raise ModuleNotFoundError(message)

        monkeypatch.setattr("lightning_fedleak.cli.commands.fit._FitCLI", refuses)
    else:
        monkeypatch.setitem(sys.modules, "jsonargparse", None)
        monkeypatch.delitem(sys.modules, "lightning_fedleak.cli.commands.fit", raising=False)
    assert main(["fit"]) == 1
    assert install("cli") in capsys.readouterr().err


def test_every_option_has_a_help_text() -> None:
    for name, command in parsers()[1].items():
        assert all(action.help for action in command._actions), name


# Each ready-made fragment, appended to a user's config and run for a few steps.


ROOT = Path(__file__).parents[1]
FRAGMENTS = ROOT / "callbacks"

USERS_OWN = """
trainer:
  callbacks:
    - class_path: lightning.pytorch.callbacks.LearningRateMonitor
"""
DEFENSE = """
trainer:
  strategy:
    class_path: lightning_fedleak.strategies.DefendedStrategy
    init_args:
      defenses+:
        - class_path: lightning_fedleak.defenses.{kind}
          init_args: {settings}
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_causal_lm(tmp_path_factory.mktemp("model")))


@pytest.fixture
def fitted(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Runs `fedleak fit` with fragments; gives the Trainer."""
    text, config = tmp_path / "private.txt", tmp_path / "config.yaml"
    text.write_text("\n".join(TEXTS))
    config.write_text(USERS_OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["fedleak"])
    trainers: list[L.Trainer] = []
    original = L.Trainer.fit

    def keep(self: L.Trainer, *args, **kwargs) -> None:
        trainers.append(self)
        original(self, *args, **kwargs)

    monkeypatch.setattr(L.Trainer, "fit", keep)
    defaults = AlignedFlatChat.__init__.__wrapped__.__kwdefaults__
    assert defaults["calibration_tokens"] > 2_000
    monkeypatch.setitem(defaults, "calibration_tokens", 2_000)
    monkeypatch.setattr(aligned_readout, "_REPEATS", 2)

    def run(*fragments: tuple[str, ...]) -> L.Trainer:
        """Each fragment comes with the options that change it."""
        arguments = [f"--config={path}" for path in (ROOT / "examples" / "finetune.yaml", config)]
        for name, *options in fragments:
            arguments += [f"--config={FRAGMENTS / f'{name}.yaml'}", *options]
        arguments += [f"--model.model={model}", f"--data.text={text}", "--data.batch_size=4"]
        arguments += ["--data.length=32", "--trainer.max_steps=3", "--trainer.accelerator=cpu"]
        arguments += ["--trainer.devices=1", "--trainer.enable_progress_bar=false"]
        fit(["fit", *arguments])
        callback(trainers[-1], L.callbacks.LearningRateMonitor)  # the user's own is still there
        return trainers[-1]

    return run


def callback(trainer: L.Trainer, kind: type) -> L.Callback:
    [match] = [c for c in trainer.callbacks if isinstance(c, kind)]
    return match


def test_every_fragment_is_tested() -> None:
    here = Path(__file__).read_text(encoding="utf-8")
    names = {path.stem.removeprefix("gate_") for path in FRAGMENTS.glob("*.yaml")}
    assert {name for name in names if f'"{name}"' not in here} == set()


def test_leakage_and_its_gate(fitted) -> None:
    trainer = fitted(("leakage",), ("gate_leakage",))
    monitor, gate = callback(trainer, LeakageMonitor), callback(trainer, RiskGate)
    assert monitor.engine.selection.auto
    assert (gate.metric, gate.at_most) == ("leakage/worst/words", 0.5)
    assert 0 <= monitor.latest["leakage/worst/words"] <= 1


def test_attacks_and_a_metric_of_the_users_own(fitted) -> None:
    """As the recipes' comments have it: other attacks and another number, a line each."""
    attacks = "[{class_path: lightning_fedleak.attacks.FCMembership, init_args: {layer: 1}}]"
    metric = "leakage/fc_membership/auc"
    trainer = fitted(
        ("leakage", f"--trainer.callbacks.attacks={attacks}"),
        ("gate_leakage", f"--trainer.callbacks.metric={metric}", "--trainer.callbacks.at_most=0.6"),
    )
    monitor, gate = callback(trainer, LeakageMonitor), callback(trainer, RiskGate)
    assert [type(a) for a in monitor.attacks] == [FCMembership]
    assert monitor.failures == 0
    assert float(trainer.callback_metrics[metric]) == 1
    assert (gate.metric, gate.at_most, gate.action) == (metric, 0.6, "stop")


def test_memorization_needs_enough_texts(fitted) -> None:
    with pytest.raises(ValueError, match=r"allow \d+ of \d+ texts: 20 rows are"):
        fitted(("memorization",))


@pytest.mark.slow
def test_dp_sgd(fitted) -> None:
    pytest.importorskip("opacus")
    trainer = fitted(("leakage",), ("dp_sgd", "--model.loss=sample_mean"))
    [defense] = trainer.strategy.defenses
    assert isinstance(defense, DPSGD)
    assert defense.releases == trainer.global_step == 3
    assert 0 < float(trainer.callback_metrics["privacy/epsilon"]) <= 8
    assert float(trainer.callback_metrics["privacy/delta"]) == pytest.approx(1e-5)


def test_defences_add_up(fitted, tmp_path: Path) -> None:
    """Lines of the user's own, as docs/defend.md has them, for each defence."""
    kinds = {"GradientNoise": "{clip: 1.0, sigma: 0.001}", "Freeze": "{part: head+embeddings}"}
    for kind, settings in kinds.items():
        (tmp_path / f"{kind}.yaml").write_text(DEFENSE.format(kind=kind, settings=settings))
    attacks = ", ".join(
        f"{{class_path: lightning_fedleak.attacks.{kind}, init_args: {{public_text: sampled}}}}"
        for kind in ("FlatChat", "AlignedFlatChat")
    )
    leakage = "leakage", f"--trainer.callbacks.attacks=[{attacks}]"
    trainer = fitted(*((str(tmp_path / kind),) for kind in kinds), leakage)
    noise, freeze = trainer.strategy.defenses
    assert isinstance(trainer.strategy, DefendedStrategy)
    assert isinstance(noise, GradientNoise)
    assert isinstance(freeze, Freeze)
    assert noise.releases == trainer.global_step == 3
    for name in ("flatchat", "aligned_flatchat"):
        assert float(trainer.callback_metrics[f"leakage/{name}/exposed"]) == 0
        assert float(trainer.callback_metrics[f"leakage/{name}/f1"]) == 0


def test_a_config_has_rare_settings_of_the_monitor_in_a_group() -> None:
    parser = LightningArgumentParser()
    parser.add_subclass_arguments(L.Callback, "callback")
    kind = "lightning_fedleak.callbacks.LeakageMonitor"
    attacks = [{"class_path": "lightning_fedleak.attacks.BagOfWords"}]
    settings = {"texts": 2, "client": "world", "utility": ["loss"]}
    keys = {"attacks": attacks, "settings": settings}
    config = parser.parse_object({"callback": {"class_path": kind, "init_args": keys}})
    monitor = parser.instantiate_classes(config).callback
    assert monitor.engine.options.texts == 2
    assert monitor.engine.options.utility == ("loss",)
    again = parser.parse_string(parser.dump(config))  # as the config.yaml of a run is read again
    assert again.callback.init_args.settings.client == "world"
    keys = {"attacks": attacks, "settings": {"memorization": {"max_overhead": 0.1}}}
    config = parser.parse_object({"callback": {"class_path": kind, "init_args": keys}})
    monitor = parser.instantiate_classes(config).callback
    assert monitor.engine.options.memorization.max_overhead == 0.1


# Measured seconds and memory; progress bars are tested with their callers.


@pytest.mark.parametrize(
    ("passed", "processor", "seconds"),
    [
        pytest.param(8.0, 2.0, 2.0, id="other programs run"),
        pytest.param(2.0, 8.0, 2.0, id="four threads work"),
        pytest.param(62.0, 0.0, 0.0, id="the process is stopped"),
    ],
)
def test_work_takes_the_smaller_of_time_and_processor_time(passed, processor, seconds, monkeypatch):
    for name, end in {"perf_counter": 5 + passed, "process_time": 10 + processor}.items():
        readings = iter([end - (passed if name == "perf_counter" else processor), end])
        monkeypatch.setattr(progress.time, name, lambda readings=readings: next(readings))
    assert progress.measure_seconds(lambda: None, torch.device("cpu")) == seconds


PAUSED = """
import sys, time
from lightning_fedleak.progress import Stopwatch
watch, begin = Stopwatch(), time.perf_counter()
print("begun", flush=True)
while time.perf_counter() - begin < 3:
    time.sleep(0.01)
print(watch.seconds, flush=True)
"""


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="needs SIGSTOP")
def test_a_stopped_process_spends_no_time() -> None:
    child = subprocess.Popen([sys.executable, "-c", PAUSED], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "begun\n"
    child.send_signal(signal.SIGSTOP)
    time.sleep(3)
    child.send_signal(signal.SIGCONT)
    assert float(child.communicate(timeout=60)[0]) < 1.5


# Checks of arguments.


@given(st.integers(), st.integers(), st.integers(0, 5))
def test_an_integer_is_compared_with_its_bounds(value: int, low: int, width: int) -> None:
    if low <= value <= low + width:
        check_integer("steps", value, at_least=low, at_most=low + width)
        check_integer("steps", np.int64(value) if abs(value) < 2**62 else value, at_least=low)
        return
    with pytest.raises(ValueError, match=rf"^steps must be an integer from {low} to {low + width}"):
        check_integer("steps", value, at_least=low, at_most=low + width)


@pytest.mark.parametrize("value", [True, False, 1.0, "1", None, math.nan])
def test_what_is_no_integer_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match=r"steps must be an integer of at least 0, got "):
        check_integer("steps", value, at_least=0)


@given(st.floats(), st.floats(-10, 10), st.floats(-10, 10))
def test_a_number_is_compared_with_its_bounds(value: float, low: float, high: float) -> None:
    for bounds, holds in (
        ({"above": low, "below": high}, low < value < high),
        ({"at_least": low, "at_most": high}, low <= value <= high),
        ({}, True),
    ):
        if holds and math.isfinite(value):
            check_number("lr", value, **bounds)
            continue
        with pytest.raises(ValueError, match=r"^lr must be a number"):
            check_number("lr", value, **bounds)


@pytest.mark.parametrize("value", [True, "1", None, math.nan, math.inf, 1j])
def test_what_is_no_number_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match=r"lr must be a number above 0, got "):
        check_number("lr", value, above=0)


def test_a_choice_is_one_of_its_values() -> None:
    check_choice("unit", "row", ("row", "user"))
    check_choice("level", 1, (1, 2))
    for value in ("rows", None, 1, True):
        with pytest.raises(ValueError, match=r"^unit must be 'row' or 'user', got "):
            check_choice("unit", value, ("row", "user"))
    with pytest.raises(ValueError, match="level must be 1 or 2, got True"):
        check_choice("level", True, (1, 2))


def test_none_hint_and_error() -> None:
    check_integer("width", None, optional=True)
    check_number("tau", None, optional=True)
    check_choice("unit", None, ("row",), optional=True)
    message = "^width must be an integer of at least 2, or None, got 1: how many neurons are read$"
    with pytest.raises(TypeError, match=message):
        check_integer(
            "width", 1, at_least=2, optional=True, hint="how many neurons are read", error=TypeError
        )
    with pytest.raises(ValueError, match=r"^q must be a number above 0 and of at most 1, got 2$"):
        check_number("q", 2, above=0, at_most=1)


# What newcomers get wrong is refused before a step, in three lines at most, with what to write.


WORDS = "leakage/worst/words"
DP = DPSGD(max_grad_norm=1.0, noise_multiplier=1.0)
MOST_LINES = 3


class Counts(CausalLMModule):
    """Counts its training steps."""

    steps = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.steps += 1
        return super().training_step(batch, batch_idx)


def shuffled() -> DataLoader[Any]:
    return DataLoader(random_token_loader(32).dataset, batch_size=4, shuffle=True)


def a_trainer(**data: Any) -> transformers.Trainer:
    arguments = transformers.TrainingArguments("unused", report_to=[], use_cpu=True, max_steps=2)
    return transformers.Trainer(tiny_gpt2(), arguments, **data)


def gated(*arguments: Any, **more: Any) -> Callable[[], list[Any]]:
    return lambda: [LeakageMonitor(), RiskGate(*arguments, **more)]


CALLBACKS: dict[str, tuple[Callable[[], list[Any]], str]] = {
    "a gate alone": (
        lambda: [RiskGate(WORDS, at_most=0.5)],
        "Trainer(callbacks=[LeakageMonitor(), gate])",
    ),
    "two monitors": (lambda: [LeakageMonitor(), LeakageMonitor()], "use one for all attacks"),
    "a gate on two monitors": (
        lambda: [RiskGate(WORDS, 0.3), LeakageMonitor(Probe()), LeakageMonitor(Probe(name="b"))],
        "which one LeakageMonitor with all attacks has to log: Trainer(",
    ),
    "a typo": (gated("leakage/worst/word", at_most=0.5), f"Did you mean '{WORDS}'?"),
    "no prefix": (gated("worst/words", at_most=0.5), f"Did you mean '{WORDS}'?"),
    "a metric of one's own": (gated("val_loss", at_most=0.5), f"the highest: {WORDS}"),
    "percent": (gated(WORDS, at_most=50), "rates are shares, not percent"),
    "a string": (gated(WORDS, at_most="0.5"), "at_most must be a number"),
    "no limit": (gated(WORDS), f"For example: RiskGate('{WORDS}', at_most=0.5)"),
    "at_least": (gated(WORDS, at_least=0.5), "Did you mean at_most=?"),
    "an action": (gated(WORDS, at_most=0.5, action="halt"), "'stop' or 'harden'"),
    "texts": (gated("leakage/worst/texts", at_most=0.5), "attacks=[SubspaceTexts()]"),
    "a stage that is not measured": (
        gated("leakage_local/subspace_words/f1", at_most=0.5),
        "Stage 'local' is not measured: settings=WatchSettings(stages=('local', ...))",
    ),
    "an attack without a metric": (
        gated("leakage/subspace_words", at_most=0.5),
        "Did you mean 'leakage/subspace_words/f1'?",
    ),
    "a gate of other loops": (
        lambda: [LeakageMonitor(), Threshold(WORDS, 0.5)],
        f"Lightning's takes RiskGate('{WORDS}', at_most=0.5)",
    ),
    "a callback of transformers": (
        lambda: [LeakageCallback(a_trainer())],
        "in Lightning's write callbacks=[LeakageMonitor()]",
    ),
    "memorization": (
        gated("leakage/worst/memorization", at_most=0.6),
        "settings=WatchSettings(memorization=Memorization(max_overhead=",
    ),
    "an argument": (lambda: [LeakageMonitor(every_n_step=5)], "Did you mean every_n_steps=?"),
    "no steps": (lambda: [LeakageMonitor(every_n_steps=0)], "an integer of at least 1"),
    "too much": (lambda: [LeakageMonitor(max_overhead=5)], "it is a share"),
    "a name": (lambda: [LeakageMonitor("FlatChat")], "'auto' or instances of Attack"),
    "a class": (lambda: [LeakageMonitor], "write callbacks=[LeakageMonitor()]"),
    "a dict": (
        lambda: [LeakageMonitor(settings={"stages": ("local",)})],
        "write settings=WatchSettings(...)",
    ),
    "a stage": (
        lambda: [LeakageMonitor(settings=WatchSettings(stages=("locl",)))],
        "stages must be some of",
    ),
    "a defence": (
        lambda: [LeakageMonitor(), DP],
        "Trainer(strategy=DefendedStrategy('auto', defenses=[DPSGD(...)]))",
    ),
    "a defence of the monitor": (
        lambda: [LeakageMonitor(defenses=[DP])],
        "Write L.Trainer(strategy=DefendedStrategy('auto', defenses=[...]))",
    ),
    "a defence of the callback": (
        lambda: [LeakageCallback(a_trainer(), defenses=[DP])],
        "Write defended(Trainer)(..., defenses=[...])",
    ),
}


@pytest.mark.parametrize("mistake", CALLBACKS)
def test_a_mistake_in_callbacks_is_refused_before_a_step(tmp_path: Path, mistake: str) -> None:
    callbacks, hint = CALLBACKS[mistake]
    module = Counts(tiny_gpt2())
    with pytest.raises((ValueError, TypeError)) as refusal:
        runs.fit(callbacks(), tmp_path, module=module, loader=shuffled())
    message = str(refusal.value)
    assert hint in message
    assert len(message.splitlines()) <= MOST_LINES
    assert module.steps == 0


class Names(dict[str, Any]):
    """Names in a line of advice: those of the package's root, and what the reader has."""

    def __missing__(self, name: str) -> Any:
        return getattr(lightning_fedleak, name)


def bracketed(text: str, start: str) -> str:
    """Return the expression that follows a start, to the bracket that closes its first one."""
    depth, rest = 0, text.partition(start)[2]
    for i, one in enumerate(rest):
        depth += (one in "([") - (one in ")]")
        if depth == 0 and one in ")]":
            return rest[: i + 1]
    raise AssertionError(f"{start} is not in: {text}")


def follow(advice: str, rows: Any) -> tuple[list[Any], Any]:
    """Do what a message advises, and return the callbacks and the rows to train on."""
    names = Names(rows=rows, n=len(rows) // 2)
    if "train, others = " in advice:
        names["train"], _ = eval(bracketed(advice, "train, others = "), {}, names)
    given = {
        name: eval(bracketed(advice, f"{name}=").replace("...", "'shared'"), {}, names)
        for name in ("settings", "attacks")
        if f"{name}=" in advice
    }
    assert given or "train" in names, advice
    return [LeakageMonitor(**given)], names.get("train", rows)


@pytest.mark.parametrize("mistake", ["texts", "a stage that is not measured", "memorization"])
def test_what_a_refusal_advises_is_the_whole_mend(tmp_path: Path, mistake: str) -> None:
    callbacks, _ = CALLBACKS[mistake]
    with pytest.raises(ValueError, match="=") as refusal:
        runs.fit(callbacks(), tmp_path, loader=shuffled())
    monitors, rows = follow(str(refusal.value), shuffled().dataset)
    gate = callbacks()[-1]
    loader = DataLoader(rows, batch_size=4, shuffle=True)
    runs.fit([*monitors, gate], tmp_path, loader=loader, max_epochs=1)
    assert gate.metric in monitors[0].latest


@pytest.mark.parametrize("family", [MEMBERSHIP, TEXTS_FAMILY])
def test_what_a_report_advises_to_test_is_tested(tmp_path: Path, family: Any) -> None:
    monitors, _ = follow(family.untested, shuffled().dataset)
    runs.fit(monitors, tmp_path, loader=shuffled(), max_epochs=1)
    assert f"leakage/worst/{family.name}" in monitors[0].latest


@pytest.mark.parametrize(
    ("call", "hint"),
    [
        (lambda: DPSGD(max_grad_norm=1.0, target_epsilon="8", target_delta=1e-5), "a number above"),
        (lambda: DPSGD(max_grad_norm=1.0, target_epsilon=8), "needs target_delta"),
        (lambda: DPSGD(max_grad_norm=1.0), "give one"),
        (lambda: DPSGD(1.0, epsilon=8), "Did you mean target_epsilon=?"),
        (lambda: DPSGD(1.0, 1.0, target_delta=1e-5, check=True), "PlantedGradients(every_n_steps="),
        (lambda: DPSGD(1.0, noise_multiplier=1.0, target_epsilon=8, target_delta=1e-5), "give one"),
        (lambda: DefendedStrategy([DP]), ": DefendedStrategy('auto', defenses=[...])."),
        (lambda: WatchSettings(stage=("local",)), "WatchSettings: got an unexpected"),
        (lambda: WatchSettings(stage=("local",)), "Did you mean stages=?"),
        (lambda: PrefixInversion(), "PrefixInversion(layer=2)"),
        (lambda: lightning_fedleak.LeakMonitor, "Did you mean LeakageMonitor?"),
        (lambda: LeakageMonitor().latest[WORDS], "nothing has been measured yet"),
        (lambda: RiskGate(LeakageMonitor(), 0.5), "name of a metric first, not a LeakageMonitor"),
    ],
)
def test_a_wrong_call_says_what_to_write(call: Callable[[], Any], hint: str) -> None:
    with pytest.raises((ValueError, TypeError, AttributeError, KeyError)) as refusal:
        call()
    assert hint in str(refusal.value)
    assert len(str(refusal.value).splitlines()) <= MOST_LINES


@pytest.mark.parametrize("gate", [Threshold, RiskGate])
def test_a_gate_among_the_callbacks_of_transformers_says_where_it_belongs(gate: Any) -> None:
    trainer = a_trainer(train_dataset=[{"input_ids": torch.arange(4), "labels": torch.arange(4)}])
    trainer.add_callback(gate(WORDS, 0.5))
    with pytest.raises(TypeError, match=r"LeakageCallback\(trainer, gates=\[Threshold\('leakage/w"):
        trainer.train()
    assert trainer.state.global_step == 0


def test_labels_that_never_count_are_named(tmp_path: Path) -> None:
    rows = [
        {"input_ids": ids, "labels": torch.full_like(ids, -100)} for ids in torch.ones(8, 4).long()
    ]
    with pytest.warns(
        UserWarning, match="in 2 steps in a row: all labels of their batches were -100"
    ):
        runs.fit(
            [LeakageMonitor(Probe())], tmp_path, loader=DataLoader(rows, batch_size=4), max_epochs=1
        )


def test_a_run_without_a_step_says_nothing_of_a_run_that_was_resumed(tmp_path, recwarn) -> None:
    trainer = runs.fit([LeakageMonitor()], tmp_path, max_epochs=0)
    assert trainer.global_step == 0
    said = [str(warning.message) for warning in recwarn]
    assert not [text for text in said if "AssertionError" in text or "resumed" in text]


def test_weights_that_are_not_tested_are_one_short_line_at_the_start(tmp_path, caplog) -> None:
    with caplog.at_level("INFO"):
        runs.fit([LeakageMonitor()], tmp_path, loader=shuffled())
    lines = [one.getMessage() for one in caplog.records if "trained weights" in one.getMessage()]
    [line] = lines
    assert "are not tested: 32 rows allow 0 of 32 texts" in line
    assert "WatchSettings(memorization=Memorization(max_overhead=" in line
    assert "`train` of train, others = leave_out(rows, 16, seed=1)" in line
    assert len(line) < 280
    monitors, rows = follow(line, shuffled().dataset)
    runs.fit(monitors, tmp_path, loader=DataLoader(rows, batch_size=4), max_epochs=1)
    assert "leakage/combined/auc" in monitors[0].latest
