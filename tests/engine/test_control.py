"""A low number counts only as far as the control of its look is high."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn import functional

from lightning_fedleak.attacks import (
    Attack,
    BagOfWords,
    GradientMembership,
    RevealLabels,
    SubspaceWords,
    WordGuess,
)
from lightning_fedleak.attacks.public_text import PublicText
from lightning_fedleak.callbacks import LeakageMonitor
from lightning_fedleak.engine import Games
from lightning_fedleak.engine.channels.control import Controls
from lightning_fedleak.labs.beam_from_words import BeamFromWords
from lightning_fedleak.report import findings, read
from lightning_fedleak.trainers import Threshold, Watch
from tests.callbacks.runs import fit
from tests.callbacks.test_monitor import charts_and_tags
from tests.helpers.lightning_modules import CausalLMModule
from tests.helpers.models import tiny_gpt2, tiny_llama

STEPS = 4


def own_loss(model: nn.Module, ids: Tensor) -> Tensor:
    """Return the loss that the model computes itself."""
    loss: Tensor = model(input_ids=ids, labels=ids).loss
    return loss


def watched(
    folder: Path,
    attacks: Attack | Sequence[Attack],
    gates: Sequence[Threshold] = (),
    *,
    model: nn.Module | None = None,
    rows: int = 3,
    length: int = 8,
    loss: Callable[[nn.Module, Tensor], Tensor] | None = None,
    steps: int = STEPS,
    **settings: Any,
) -> Watch:
    """Return the watch of a plain loop that is looked at in each step."""
    torch.manual_seed(0)
    model = tiny_gpt2(tied=False, dropout=0.0) if model is None else model
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 1e-2)
    settings = {"every_n_steps": 1, "tensorboard": False, "report": False} | settings
    with Watch(model.train(), optimizer, attacks, gates=gates, folder=folder, **settings) as watch:
        for step in range(steps):
            generator = torch.Generator().manual_seed(step)
            ids = torch.randint(3, 97, (rows, length), generator=generator)
            with watch.step({"input_ids": ids, "labels": ids}):
                step_loss = (
                    model(input_ids=ids, labels=ids).loss if loss is None else loss(model, ids)
                )
                step_loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            if watch.should_stop:
                break
    return watch


class Blind(BagOfWords):
    """Names no word, as an attack does that is broken or was not made for what it reads."""

    default_name = "blind"
    needs_control = True

    def run(self, view: Any, query: Any = None) -> WordGuess:
        super().run(view, query)
        return WordGuess(torch.empty(0, dtype=torch.long), surface="input")


def test_a_broken_attack_is_unknown_to_a_gate(tmp_path: Path) -> None:
    gate = Threshold("leakage/blind/f1", at_most=0.5)
    watch = watched(tmp_path, Blind(), [gate])
    assert watch.latest["leakage/blind/f1"] == 0
    assert watch.latest["leakage/blind/control"] == 0
    assert gate.fired is not None
    assert math.isnan(gate.fired.value)
    assert "0.00 of known words in the same step" in gate.fired.why
    assert gate.fired.read == 0
    assert "its low number says nothing" in str(gate.fired)
    [decision] = gate_lines(tmp_path)
    assert decision["measured"] is None
    assert "cannot show more than 0.00 here" in decision["why"]


def test_an_attack_that_prefers_likely_texts_is_tried_on_held_out_ones(tmp_path: Path) -> None:
    texts = PublicText([[5 + i, 40 + i, 60 + i, 30 + i, 20 + i, 9, 8, 7] for i in range(12)])
    name = "leakage/beam_from_words/token_accuracy"
    for folder, held_out in (("with", texts), ("without", None)):
        attack = BeamFromWords(8, 2, moves=0, beam=4, budget_seconds=None)
        gate = Threshold(name, at_most=0.9, action="warn")
        games = Games(held_out=held_out, targets=2)
        model = tiny_llama()
        watch = watched(
            tmp_path / folder, attack, [gate], model=model, rows=2, games=games, steps=1
        )
        control = watch.latest.get("leakage/beam_from_words/control")
        assert gate.fired is not None  # a model that has learned nothing orders no words
        if held_out is None:
            assert control is None
            assert "games=Games(held_out=texts)" in gate.fired.why
        else:
            assert 0 <= control <= 0.9
            assert f"{control:.2f} of known" in gate.fired.why


def round_weights(folder: Path | None, gates: Sequence[Threshold] = ()) -> list[Tensor]:
    """Return the weights after three rounds of two steps with dropout, watched or not."""
    torch.manual_seed(0)
    model = tiny_gpt2(tied=False, dropout=0.1).train()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    settings = {"local_steps": 2, "tensorboard": False, "report": False, "gates": gates}
    watch = None if folder is None else Watch(model, optimizer, Blind(), folder=folder, **settings)
    with watch or nullcontext():
        for step in range(6):
            if step % 2 == 0:
                optimizer.state.clear()
            ids = torch.randint(3, 97, (3, 8), generator=torch.Generator().manual_seed(step))
            batch = {"input_ids": ids, "labels": ids}
            with nullcontext() if watch is None else watch.step(batch):
                model(**batch).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
    return [*model.state_dict().values()]


def test_a_broken_attack_on_rounds_is_unknown_to_a_gate(tmp_path: Path) -> None:
    gate = Threshold("leakage/blind/f1", at_most=0.5, action="warn")
    watched = round_weights(tmp_path, [gate])
    assert all(torch.equal(*pair) for pair in zip(watched, round_weights(None), strict=True))
    decision = gate_lines(tmp_path)[0]
    assert decision["measured"] is None
    assert "0.00 of known words in the same step" in decision["why"]


def gate_lines(folder: Path) -> list[dict[str, Any]]:
    """Return the decisions of gates in a run's record."""
    lines = [json.loads(line) for line in (folder / "run.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == "gate"]


class Partial(BagOfWords):
    """Names a third of the words of the step itself, and less than two thirds of those it knows."""

    default_name = "partial"
    needs_control = True
    answers = 0

    def run(self, view: Any, query: Any = None) -> WordGuess:
        self.answers += 1
        types = super().run(view, query).types
        n = len(types) // 3 if self.answers % 2 else len(types) // 2
        return WordGuess(types[:n], surface="input")


@pytest.mark.parametrize("metric", ["leakage/partial/f1", "leakage/worst/words"])
def test_a_gate_says_what_was_read_and_what_it_counts_as(tmp_path: Path, metric: str) -> None:
    gate = Threshold(metric, at_most=0.6)
    watch = watched(tmp_path, Partial(), [gate], steps=1)
    read, control = (watch.latest[f"leakage/partial/{name}"] for name in ("f1", "control"))
    assert read < 0.6 < control < 1
    assert gate.fired is not None
    assert (gate.fired.read, gate.fired.value) == (read, pytest.approx(read / control))
    text = str(gate.fired)
    assert f"measured: {metric} = {read:.3f}" in text
    assert f"{read:.2f}, and {control:.2f} of known words in the same step" in text
    assert f"counts as {read / control:.2f}" in text
    assert "of what can be read here, the update of this step gives away more" in text
    [decision] = gate_lines(tmp_path)
    assert decision["measured"] == pytest.approx(read / control)
    assert decision["why"] == gate.fired.why


def test_of_two_that_read_the_same_the_one_with_a_control_counts(tmp_path: Path) -> None:
    gate = Threshold("leakage/worst/words", at_most=0.999)
    watch = watched(tmp_path, [Blind(), BagOfWords()], [gate])
    assert gate.fired is not None
    assert gate.fired.value == 1
    gate = Threshold("leakage/worst/words", at_most=1.0)
    watch = watched(tmp_path / "allowed", [Blind(), BagOfWords()], [gate])
    assert gate.fired is None
    assert watch.latest["leakage/bag_of_words/f1"] == 1


def test_nothing_read_where_all_could_be_is_safe(tmp_path: Path) -> None:
    class Defended(BagOfWords):
        """Stands for a defence: the words of the step itself alone are hidden."""

        default_name = "defended"
        needs_control = True
        answers = 0

        def run(self, view: Any, query: Any = None) -> WordGuess:
            self.answers += 1
            guess = super().run(view, query)
            return guess if self.answers % 2 == 0 else WordGuess(guess.types[:0], surface="input")

    gate = Threshold("leakage/defended/f1", at_most=0.2)
    watch = watched(tmp_path, Defended(), [gate], steps=1)
    assert watch.latest["leakage/defended/control"] == 1
    assert watch.latest["leakage/defended/f1"] == 0
    assert gate.fired is None


def lora(rank: int) -> nn.Module:
    torch.manual_seed(0)
    config = LoraConfig(r=rank, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(tiny_llama(), config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter += 0.05 * torch.randn_like(parameter)
    return model


def test_a_batch_above_what_can_be_told_apart_is_low_by_aggregation(tmp_path: Path) -> None:
    gate = Threshold("leakage/subspace_words/f1", at_most=0.7)
    watch = watched(
        tmp_path, SubspaceWords(capacity_seconds=0), [gate], model=lora(1), rows=3, length=8
    )
    assert watch.latest["leakage/subspace_words/control"] < 0.7
    assert watch.latest["leakage/subspace_words/control_of_a_part"] > 0.7
    assert gate.fired is None


def test_noise_on_a_step_without_words_has_no_result(tmp_path: Path) -> None:
    class Noisy(SubspaceWords):
        """Reads noise where nothing was shared yet, as behind a defence."""

        def run(self, view: Any, query: Any = None) -> Any:
            shared = view.gradients[-1].tensors
            if not any(bool(t.any()) for t in shared.values()):
                self.silent = getattr(self, "silent", 0) + 1
                if self.silent % 2:
                    return WordGuess(torch.empty(0, dtype=torch.long), surface="input")
            return super().run(view, query)

    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(tiny_llama(), config)
    watched(tmp_path, Noisy(capacity_seconds=0), model=model)
    lines = [json.loads(line) for line in (tmp_path / "leakage.jsonl").read_text().splitlines()]
    assert next(line["step"] for line in lines if line["attack"] == "subspace_words") == 1


def test_weights_that_belong_to_words_are_drawn_both_ways(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[bool] = []
    original = torch.ones(97)
    original[:40] = 0.05

    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        logits = model(input_ids=ids).logits[:, :-1]
        return functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), weight=original)

    from lightning_fedleak.engine.channels import control

    real = control.draw_words

    def spy(*args: Any, sizes_go_with_words: bool) -> Any:
        drawn.append(sizes_go_with_words)
        return real(*args, sizes_go_with_words=sizes_go_with_words)

    monkeypatch.setattr(control, "draw_words", spy)
    watched(tmp_path, RevealLabels(), loss=loss, steps=1)
    assert drawn == [False, True]
    drawn.clear()
    watched(tmp_path / "plain", RevealLabels(), steps=1)
    assert drawn == [False]


def test_members_and_others_are_shuffled_alike(tmp_path: Path) -> None:
    watch = watched(tmp_path, GradientMembership("sampled"), rows=4, steps=3)
    assert watch.latest["leakage/gradient_membership/auc"] == 1
    assert watch.latest["leakage/gradient_membership/control"] == 1


def test_a_control_is_kept_until_a_number_falls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    played: list[int] = []
    real = Controls._play

    def spy(self: Controls, look: Any, plans: Any) -> None:
        played.append(look.step)
        real(self, look, plans)

    monkeypatch.setattr(Controls, "_play", spy)
    watch = watched(tmp_path, RevealLabels(), rows=2, steps=5)
    assert played == [0]
    assert watch.latest["leakage/reveal_labels/control"] == 1


def test_a_resumed_watch_has_its_controls(tmp_path: Path) -> None:
    watch = watched(tmp_path, RevealLabels(), rows=2, steps=2)
    state = watch.engine.results.state_dict()
    fresh = Watch(tiny_gpt2(), torch.optim.SGD(tiny_gpt2().parameters(), 1), RevealLabels())
    fresh.engine.results.load_state_dict(state)
    [control] = fresh.engine.results.controls.values()
    assert control.rates["f1"] == 1


def test_training_is_bit_identical_with_a_control_in_every_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Controls, "_is_due", lambda *_: True)
    weights = []
    for attacks in ([], [RevealLabels(), GradientMembership("sampled")]):
        torch.manual_seed(1)
        model = tiny_gpt2(tied=False, dropout=0.1)
        if attacks:
            watched(tmp_path, attacks, model=model)
        else:
            torch.manual_seed(0)
            optimizer = torch.optim.SGD(model.train().parameters(), 1e-2)
            for step in range(STEPS):
                generator = torch.Generator().manual_seed(step)
                ids = torch.randint(3, 97, (3, 8), generator=generator)
                model(input_ids=ids, labels=ids).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(*weights)


def test_an_attack_for_uneven_losses_chooses_itself_where_labels_weigh_unevenly(
    tmp_path: Path,
) -> None:
    weights = torch.ones(97)
    weights[:40] = 0.05

    def weighted(model: nn.Module, ids: Tensor) -> Tensor:
        logits = model(input_ids=ids).logits[:, :-1]
        return functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), weight=weights)

    for name, loss in (("plain", None), ("weighted", weighted)):
        model = tiny_gpt2(tied=False, dropout=0.0)
        watch = watched(tmp_path / name, "auto", model=model, rows=2, loss=loss, steps=1)
        assert ("leakage/reveal_labels/f1" in watch.latest) == (name == "weighted")


def test_the_page_and_the_table_of_a_run_with_controls(tmp_path: Path) -> None:
    board = TensorBoardLogger(tmp_path)
    monitor = LeakageMonitor(Partial(), every_n_steps=1)
    module = CausalLMModule(tiny_gpt2(tied=False, dropout=0.0).train())
    fit([monitor], tmp_path, logger=board, module=module)
    charts, logged, _ = charts_and_tags(board)
    named = {s.value for chart in charts for s in chart.margin.series}
    name = "leakage/partial/control"
    assert name in named & logged & set(monitor.engine.metric_names())
    table = monitor.to_dataframe()
    shown = table[table.metric == "f1_of_control"]
    assert shown.value.tolist()[-1] == monitor.latest[name]
    [attack] = findings(read([Path(board.log_dir)])).runs[0].attacks
    assert attack.control == monitor.latest[name]
