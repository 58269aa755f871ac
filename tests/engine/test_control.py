"""A low number counts only as far as the control of its look is high."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.papers.baselines import reveal_labels
from lightning_fedleak.attacks import (
    Attack,
    BagOfWords,
    FlatChat,
    GradientMembership,
    PublicText,
    SubspaceWords,
    WordGuess,
)
from lightning_fedleak.attacks.base import HONEST_BUT_CURIOUS
from lightning_fedleak.engine import Games
from lightning_fedleak.engine.channels.control import Controls
from lightning_fedleak.model.snapshots import Inapplicable, NotYet
from lightning_fedleak.model.taps import Step
from lightning_fedleak.report import findings, read
from lightning_fedleak.trainers import Threshold
from tests.engine.test_auto import configure
from tests.helpers import loops
from tests.helpers.loops import check_undisturbed, still_gpt2
from tests.helpers.models import tiny_gpt2, tiny_llama


def rows_of(rows: int, length: int, steps: int) -> list[dict[str, Tensor]]:
    ids = [
        torch.randint(3, 97, (rows, length), generator=torch.Generator().manual_seed(step))
        for step in range(steps)
    ]
    return [{"input_ids": x, "labels": x} for x in ids]


def watched(
    folder: Path,
    attacks: Attack | Sequence[Attack] | str,
    gates: Sequence[Threshold] = (),
    *,
    model: nn.Module | None = None,
    rows: int = 3,
    length: int = 8,
    steps: int = 4,
    **settings: Any,
) -> Any:
    """Return the watch of a plain loop that is looked at in each step."""
    model = still_gpt2(tied=False) if model is None else model
    batches = rows_of(rows, length, steps)
    return loops.watched(folder, attacks, model, batches=batches, gates=gates, **settings)


def gate_lines(folder: Path) -> list[dict[str, Any]]:
    """Return the decisions of gates in a run's record."""
    lines = [json.loads(line) for line in (folder / "run.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == "gate"]


class Scripted(BagOfWords):
    """Names as many words of a step, or of its control, as a script says, which may raise.

    Args:
        script: is given the step, whether it is a control, and how many words there are.
    """

    default_name = "scripted"
    needs_control = True

    def __init__(self, script: Callable[[int, bool, int], int]) -> None:
        super().__init__()
        self.script, self.steps = script, list[int]()

    def run(self, view: Any, query: Any = None) -> WordGuess:
        types, step = super().run(view, query).types, view.gradients[-1].step
        self.steps.append(step)  # controls of a step come after it
        n = self.script(step, step in self.steps[:-1], len(types))
        return WordGuess(types[:n], surface="input")


def blind() -> Scripted:
    """Return an attack that is broken or was not made for what it reads."""
    return Scripted(lambda *_: 0)


def partial(in_step: float, in_control: float) -> Scripted:
    """Return an attack that names parts of the words of the step, and of those of its control."""
    return Scripted(lambda _, is_control, n: int((in_control if is_control else in_step) * n))


def test_no_control_is_made_where_there_is_no_number_yet(tmp_path: Path) -> None:
    def late(step: int, _: bool, n: int) -> int:
        if step == 0:
            raise NotYet("nothing is there")
        return n

    attack = Scripted(late)
    watch = watched(tmp_path, attack, steps=2)
    assert attack.steps == [0, 1, 1, 1, 1]  # words are few: three of step 1 are its controls
    assert watch.latest["leakage/scripted/control"] == 1


def test_a_gate_is_unknown_without_a_control(tmp_path: Path) -> None:
    gate = Threshold("leakage/scripted/f1", at_most=0.5, action="warn")
    batches = rows_of(3, 8, 4)
    make, given = tiny_gpt2, {"batches": batches, "gates": [gate]}
    watch = check_undisturbed(tmp_path, blind(), lambda: make(tied=False), **given)
    assert watch.latest["leakage/scripted/f1"] == watch.latest["leakage/scripted/control"] == 0
    assert gate.fired is not None
    assert math.isnan(gate.fired.value)
    assert gate.fired.read == 0
    decision = gate_lines(tmp_path)[0]
    assert decision["measured"] is None
    assert "0.00 of known words in the same step" in decision["why"]


@pytest.mark.parametrize("metric", ["leakage/scripted/f1", "leakage/worst/words"])
def test_a_low_number_counts_as_its_share_of_the_control(tmp_path: Path, metric: str) -> None:
    gate = Threshold(metric, at_most=0.6)
    watch = watched(tmp_path, partial(0.34, 0.5), [gate], steps=1)
    value, control = (watch.latest[f"leakage/scripted/{name}"] for name in ("f1", "control"))
    assert value < 0.6 < control < 1
    assert gate.fired is not None
    assert (gate.fired.read, gate.fired.value) == (value, pytest.approx(value / control))
    [decision] = gate_lines(tmp_path)
    assert decision["measured"] == pytest.approx(value / control)
    assert f"{value:.2f}, and {control:.2f} of known words in the same step" in str(gate.fired)


def test_nothing_recovered_where_all_could_be_is_safe(tmp_path: Path) -> None:
    """As behind a defence: the words of the step itself alone are hidden."""
    gate = Threshold("leakage/scripted/f1", at_most=0.2)
    watch = watched(tmp_path, partial(0.0, 1.0), [gate], steps=1)
    assert watch.latest["leakage/scripted/control"] == 1
    assert watch.latest["leakage/scripted/f1"] == 0
    assert gate.fired is None


def test_of_two_that_read_the_same_the_one_with_a_control_counts(tmp_path: Path) -> None:
    for at_most, value in ((0.999, 1), (1.0, None)):
        gate = Threshold("leakage/worst/words", at_most=at_most)
        watched(tmp_path / str(at_most), [blind(), BagOfWords()], [gate])
        assert (gate.fired and gate.fired.value) == value


def lora(rank: int, moved: float = 0.05) -> nn.Module:
    torch.manual_seed(0)
    config = LoraConfig(r=rank, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(tiny_llama(), config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter += moved * torch.randn_like(parameter)
    return model


def test_a_batch_larger_than_an_attack_can_hold_is_low_by_aggregation(tmp_path: Path) -> None:
    gate = Threshold("leakage/subspace_words/f1", at_most=0.7)
    watch = watched(tmp_path, SubspaceWords(capacity_seconds=0), [gate], model=lora(1))
    assert watch.latest["leakage/subspace_words/control"] < 0.7
    assert watch.latest["leakage/subspace_words/control_of_a_part"] > 0.7
    assert gate.fired is None


def played_steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the steps at which controls are made."""
    played: list[int] = []
    real = Controls._play

    def spy(self: Controls, look: Any, *plans: Any) -> None:
        played.append(look.step)
        real(self, look, *plans)

    monkeypatch.setattr(Controls, "_play", spy)
    return played


@pytest.mark.parametrize(
    ("holds", "says", "part"), [(20, 20, 1), (20, 200, None), (20, None, None), (2, 20, None)]
)
def test_a_part_of_a_control_shows_that_a_batch_has_too_many_words(
    tmp_path: Path, holds: int, says: float | None, part: float | None
) -> None:
    """128 labels; the attack says how many words it can distinguish, and holds that many or not."""
    attack = Scripted(lambda _, __, n: n if n <= holds else 0)
    attack.n_distinct = lambda anatomy: says  # type: ignore[method-assign]
    gate = Threshold("leakage/scripted/f1", at_most=0.5)
    watch = watched(
        tmp_path, attack, [gate], model=still_gpt2(tied=False), rows=8, length=17, steps=1
    )
    [line] = watch.lines("scripted")
    assert line["metrics"].get("f1_of_a_part", {}).get("value") == part
    assert (gate.fired is None) == (part == 1)


@pytest.mark.parametrize(
    ("results", "controls"),
    [
        ([0], [0]),
        ([1], [0, 1]),  # the first look has one, which could show that the attack waits
        ([0, 3, 4], [0, 4]),  # it failed at step 0: the second low number has the next one
    ],
)
def test_after_its_first_control_an_attack_without_a_result_needs_none(
    results: list[int], controls: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(step: int, _: bool, n: int) -> int:
        if step not in results:
            raise Inapplicable("too many rows")
        return n // 3

    played = played_steps(monkeypatch)
    watch = watched(tmp_path, Scripted(refuse), steps=6)
    assert played == controls
    assert math.isnan(watch.latest["leakage/scripted/f1"])


@pytest.mark.parametrize("control", [0, None], ids=["low", "none"])
def test_an_attack_that_fails_on_its_controls_gets_them_ever_more_rarely(
    control: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: int, is_control: bool, n: int) -> int:
        if is_control and control is None:
            raise Inapplicable("it does no better than random")
        return 0

    attack, played = Scripted(fail), played_steps(monkeypatch)
    gate = Threshold("leakage/scripted/f1", at_most=0.5, action="warn")
    watch = watched(tmp_path, attack, [gate], steps=16)
    assert played == [0, 2, 6, 14]
    assert len(gate_lines(tmp_path)) == 16  # the looks between are unknown too
    assert watch.latest.get("leakage/scripted/control") == control


class Noisy(SubspaceWords):
    """Reads noise where nothing was shared yet, as behind a defence."""

    silent = 0

    def run(self, view: Any, query: Any = None) -> Any:
        if not any(bool(tensor.any()) for tensor in view.gradients[-1].tensors.values()):
            self.silent += 1
            if self.silent % 2:
                return WordGuess(torch.empty(0, dtype=torch.long), surface="input")
        return super().run(view, query)


def test_noise_on_a_step_without_words_has_no_result(tmp_path: Path) -> None:
    watch = watched(tmp_path, Noisy(capacity_seconds=0), model=lora(4, moved=0.0))
    assert watch.lines("subspace_words")[0]["step"] == 1


def test_members_and_held_out_texts_are_shuffled_alike(tmp_path: Path) -> None:
    watch = watched(tmp_path, GradientMembership("sampled"), rows=4, steps=3)
    assert watch.latest["leakage/gradient_membership/auc"] == 1
    assert watch.latest["leakage/gradient_membership/control"] == 1


def test_a_control_is_kept_until_a_number_falls_and_over_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    played = played_steps(monkeypatch)
    watch = watched(tmp_path, partial(1.0, 1.0), rows=2, steps=5)
    assert played == [0]
    again = watched(tmp_path, partial(1.0, 1.0), rows=2, steps=2, state=watch.state_dict())
    [control] = again.engine.results.controls.values()
    assert control.rates["f1"] == again.latest["leakage/scripted/control"] == 1


def test_training_is_bit_identical_with_a_control_in_every_step(
    tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(Controls, "_is_due", lambda *_: True)
    attacks = [SubspaceWords(capacity_seconds=0), GradientMembership("sampled")]
    check_undisturbed(tmp_path, attacks, lambda: tiny_gpt2(tied=False), batches=rows_of(3, 8, 4))


class Even(BagOfWords):
    """Names every word, but says that it misses words whose labels weigh little."""

    default_name = "even"
    needs_control = True
    for_even_losses = True


def weighted(model: Any, batch: Any) -> Tensor:
    weights = torch.ones(97)
    weights[:40] = 0.05
    ids = batch["input_ids"]
    logits = model(input_ids=ids).logits[:, :-1]
    return functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), weight=weights)


@pytest.mark.parametrize(
    ("loss", "rows", "noise", "known"),
    [
        (weighted, 2, 0.0, False),
        (loops.model_loss, 2, 0.0, True),
        (weighted, 4, 0.0, True),  # 28 labels in 16 dimensions: the light ones are hidden
        (weighted, 2, 1e-3, True),
    ],
    ids=["few labels", "even", "many labels", "noise"],
)
def test_of_few_labels_of_uneven_weight_a_low_number_is_unknown(
    loss: Any, rows: int, noise: float, known: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = Step.view
    monkeypatch.setattr(Step, "view", lambda *of: replace(taken(*of), noise_std=noise))
    watch = watched(tmp_path, Even(), rows=rows, steps=1, loss=loss)
    judged = watch.engine.results.judge("leakage/even/f1", 0.4, 0.5)
    assert math.isnan(judged.value) != known
    assert ("weigh unevenly" in judged.why) != known


def test_light_labels_that_linear_programs_read_are_not_low(tmp_path: Path) -> None:
    """Of a head whose labels weigh .05 and 1, in a batch that AlignedFlatChat reads in part."""
    model = still_gpt2(tied=False, d=32)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name == "lm_head.weight")
    found: list[set[int]] = []

    def read(model: Any) -> None:
        found.append(set(reveal_labels(model.lm_head.weight.grad).tolist()))

    gate = Threshold("leakage/worst/words", at_most=0.9, action="warn")
    watch = watched(
        tmp_path, "auto", [gate], model=model, rows=2, steps=1, loss=weighted, before_step=read,
        configure=configure, assume=HONEST_BUT_CURIOUS,
    )  # fmt: skip
    assert found == [set(rows_of(2, 8, 1)[0]["input_ids"][:, 1:].flatten().tolist())]
    assert watch.latest["leakage/aligned_flatchat/f1"] < 0.9
    assert gate.fired is not None
    assert math.isnan(gate.fired.value)


def test_what_dropout_hides_it_hides_from_the_control_too(tmp_path: Path) -> None:
    gate = Threshold("leakage/subspace_words/f1", at_most=0.5, action="warn")
    config = LoraConfig(r=16, target_modules=["q_proj", "v_proj"], lora_dropout=0.6)
    torch.manual_seed(1)
    model = get_peft_model(tiny_llama(d=64), config)
    ids = torch.randint(3, 97, (3, 4, 12), generator=torch.Generator().manual_seed(4))
    batches = [{"input_ids": x, "labels": x} for x in ids]
    more: Any = {"batches": batches, "optimizer": "adamw", "lr": 1e-3, "gates": [gate]}
    loops.watched(tmp_path, SubspaceWords(capacity_seconds=0), model, **more)
    assert gate.fired is not None
    assert math.isnan(gate.fired.value)
    assert "this attack cannot show more than" in gate.fired.why


def preferring(logits: Tensor, labels: Tensor, **_: Any) -> Tensor:
    """Return a loss that prefers the first half of the texts to the second, as DPO does."""
    targets = labels[:, 1:]
    losses = functional.cross_entropy(logits[:, :-1].transpose(1, 2), targets, reduction="none")
    chosen, rejected = (-losses.sum(1)).chunk(2)
    return -functional.logsigmoid(0.1 * (chosen - rejected)).mean()


def test_of_a_loss_that_prefers_texts_the_control_says_who_reads_it(tmp_path: Path) -> None:
    """Labels are read by the sizes of rows; a gradient of the likelihood shows no members."""
    public, held_out = (
        PublicText(torch.randint(3, 97, (n, 12), generator=torch.Generator().manual_seed(n)))
        for n in (60, 40)
    )
    gate = Threshold("leakage/gradient_membership/auc", at_most=0.7, action="warn")
    model: Any = tiny_llama()
    model.loss_function = preferring
    listed = [FlatChat(public, shapes=((2, 12), (4, 12))), GradientMembership(public)]
    games = Games(held_out=held_out, targets=8)
    given = {"model": model, "rows": 4, "length": 12, "steps": 3, "optimizer": "adamw"}
    watch = watched(tmp_path, listed, [gate], games=games, lr=1e-3, **given)
    assert watch.latest["leakage/flatchat/f1"] > 0.9
    assert watch.latest["leakage/gradient_membership/auc"] < 0.7
    assert gate.fired is not None
    assert math.isnan(gate.fired.value)


def test_the_table_and_the_report_of_a_run_have_its_controls(tmp_path: Path) -> None:
    watch = watched(tmp_path, partial(0.34, 0.5))
    control = watch.latest["leakage/scripted/control"]
    assert "leakage/scripted/control" in watch.engine.metric_names()
    table = watch.to_dataframe()
    assert table[table.metric == "f1_of_control"].value.tolist()[-1] == control
    [attack] = findings(read([tmp_path])).runs[0].attacks
    assert attack.control == control
