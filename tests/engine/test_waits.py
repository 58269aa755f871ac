"""What waits for a result, and what is trained changes on the way: adapters, frozen parts."""

import math
import time
import warnings
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import AdaLoraConfig, LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn

from lightning_fedleak.attacks import (
    BagOfWords,
    GradientMembership,
    SubspaceMembership,
    SubspaceTexts,
    SubspaceWords,
)
from lightning_fedleak.attacks.base import Surfaces
from lightning_fedleak.attacks.membership import gradients
from lightning_fedleak.attacks.public_text import PublicText
from lightning_fedleak.engine import lineup, scheduler
from lightning_fedleak.engine.fit import Fit
from lightning_fedleak.model.snapshots import NotYet
from lightning_fedleak.trainers import Threshold
from tests.attacks.row_space.models import VOCABULARY, llama
from tests.helpers.lightning_modules import random_token_loader
from tests.helpers.loops import assert_same_training, model_loss, train, watched, work_for
from tests.helpers.models import own_rng

F1 = "leakage/subspace_words/f1"
WORST = "leakage/worst/words"
LORA = partial(LoraConfig, r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"])


def adapted(config: Any = None, second: bool = False) -> nn.Module:
    with own_rng(1):
        model: nn.Module = get_peft_model(llama(), LORA() if config is None else config)
        if second:
            model.add_adapter("other", LORA(r=4))  # type: ignore[operator]
        return model


class Counting(SubspaceWords):
    """Counts its runs."""

    needs_control = False

    def __init__(self) -> None:
        super().__init__(capacity_seconds=0)
        self.runs: list[int] = []
        self.refreshed: list[int] = []

    def refresh(self, anatomy: Any, step: int) -> None:
        self.refreshed.append(step)
        super().refresh(anatomy, step)

    def run(self, view: Any, query: Any = None) -> Any:
        self.runs.append(view.gradients[-1].step)
        return super().run(view, query)


def run(
    folder: Path | None,
    attacks: Any,
    model: nn.Module | None = None,
    *,
    zero_steps: int = 1,
    steps: int = 10,
    accumulate: int = 1,
    optimizer: str = "adamw",
    **settings: Any,
) -> Any:
    """Run a loop whose rate is 0 in its first steps, as warm-ups have it."""
    model = adapted() if model is None else model
    kind = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[optimizer]
    stepper = kind([p for p in model.parameters() if p.requires_grad], lr=0.0)
    taken: list[int] = []

    def warm_up(model: Any) -> None:
        stepper.param_groups[0]["lr"] = 1e-2 * max(0, len(taken) - zero_steps + 1) / 4
        taken.append(1)

    rows = 2 * steps * accumulate
    data = random_token_loader(n=rows, batch_size=2, length=10, vocab=VOCABULARY)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return train(
            folder, attacks, model, batches=data, optimizers=[stepper], before_step=warm_up,
            accumulate=accumulate, **({"every_n_steps": 50} | settings),
        )  # fmt: skip


SETUPS: dict[str, tuple[Any, dict[str, Any]]] = {
    "lora": (adapted, {}),
    "accumulation": (adapted, {"accumulate": 2}),
    "two adapters": (partial(adapted, second=True), {}),
}


@pytest.mark.parametrize("setup", SETUPS)
def test_words_are_recovered_and_gated_as_soon_as_b_has_moved(setup: str, tmp_path: Path) -> None:
    make, settings = SETUPS[setup]
    gate = Threshold(WORST, at_most=0.5)
    training = run(tmp_path, Counting(), make(), gates=[gate], **settings)
    assert gate.fired is not None
    assert (gate.fired.step, training.steps) == (2, 3)
    assert gate.fired.value > 0.8
    assert training.watch.failures == 0
    assert training.watch.looks == 2, "steps in which nothing can be read yet are no looks"


def test_adalora_is_tried_until_it_has_a_result(tmp_path: Path) -> None:
    """Its regulariser is not in this loss: A has a gradient once the singular values have moved."""
    config = AdaLoraConfig(
        init_r=8, target_r=4, total_step=40, tinit=30, tfinal=5, target_modules=["q_proj", "v_proj"]
    )
    watch = run(tmp_path, Counting(), adapted(config), steps=5).watch
    assert not math.isnan(watch.latest[F1])
    assert watch.engine.results.last_step <= 2


def test_trying_again_costs_little_and_does_not_disturb(tmp_path: Path) -> None:
    attack = Counting()
    training = run(tmp_path, attack, zero_steps=8, steps=14)
    assert attack.runs == [0, 9], "in steps 1 to 8 its gradients are zero, which is all it takes"
    assert attack.refreshed == [0, 9]
    assert (training.watch.looks, training.watch.engine.results.last_step) == (2, 9)
    assert training.watch.latest[F1] > 0.9
    assert_same_training(run(None, None, zero_steps=8, steps=14), training)


def test_membership_is_looked_at_while_words_wait(tmp_path: Path) -> None:
    """B has a gradient while it is zero: what reads it does not wait for A's."""
    text = PublicText(torch.randint(3, VOCABULARY, (40, 10)).unbind())
    attacks = [
        Counting(),
        GradientMembership(text, public_rows=8, controls=4),
        SubspaceMembership(text, public_rows=8),
    ]
    watch = run(tmp_path, attacks, zero_steps=3, steps=7).watch
    first: dict[str, int] = {}
    for line in watch.lines():
        first.setdefault(line["attack"], line["step"])
    assert first["gradient_membership"] == 1
    assert first["subspace_words"] == first["subspace_membership"] == 4
    assert watch.failures == 0


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("waits", [1000, 4])
def test_a_wait_that_ends_without_a_result_is_unknown(
    strict: bool, waits: int, tmp_path: Path
) -> None:
    """It ends with the run, or beyond the largest number of steps."""

    def shorten(watch: Any) -> None:
        watch.engine.results._max_steps_waited = waits

    gate = Threshold(WORST, at_most=0.5, strict=strict)
    settings = {"zero_steps": 99, "steps": 9, "gates": [gate], "configure": shorten}
    training = run(tmp_path, Counting(), **settings)
    assert math.isnan(training.watch.latest[F1])
    assert training.watch.failures == 1
    assert (gate.fired is not None) == strict
    assert training.steps == (6 if strict and waits == 4 else 9)


def test_a_run_that_resumes_goes_on_waiting(tmp_path: Path) -> None:
    model, gate = adapted(), Threshold(WORST, at_most=0.5)
    first = run(tmp_path / "a", Counting(), model, zero_steps=99, steps=3).watch
    state = first.state_dict()
    run(tmp_path / "b", Counting(), model, zero_steps=2, gates=[gate], state=state)
    assert gate.fired is not None
    assert (gate.fired.step, gate.fired.value) == (6, pytest.approx(1, abs=0.1))


# ---- calibrations -------------------------------------------------------------------------------


def test_auto_calibrates_for_b_and_again_for_a_and_leaves_training_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calibrated: list[int | None] = []
    calibrate, try_few = GradientMembership._calibrate, gradients._all_reached

    def tried(anatomy: Any, maps: Any, batch: Any) -> bool:
        calibrated.append(len(batch.input_ids))
        return try_few(anatomy, maps, batch)

    def counted(self: GradientMembership, anatomy: Any) -> None:
        calibrated.append(None)
        calibrate(self, anatomy)

    monkeypatch.setattr(gradients, "_all_reached", tried)
    monkeypatch.setattr(GradientMembership, "_calibrate", counted)
    monkeypatch.setattr(scheduler, "MAX_CURVE_SHARE", 1e3)  # looks at steps 1, 2, 4, ...
    training = run(tmp_path, "auto", every_n_steps=None)
    assert_same_training(run(None, None), training)
    # A has no gradient at first, as a few texts show: all are run for B, and again once A has one.
    assert calibrated == [gradients.TIMED_TEXTS, None, None]
    assert not math.isnan(training.watch.latest["leakage/gradient_membership/auc"])


def test_what_would_take_too_long_is_not_calibrated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: GradientMembership, anatomy: Any) -> None:
        raise AssertionError("calibrated, to be dropped then")

    monkeypatch.setattr(GradientMembership, "prepare", refuse)
    monkeypatch.setattr(GradientMembership, "estimate", lambda *_: 31.0)
    watch = run(tmp_path, "auto", optimizer="sgd", every_n_steps=None, steps=4).watch
    assert not any("gradient_membership" in name for name in watch.latest)
    [line] = watch.lines("gradient_membership")
    assert line["unknown"] == "not played: it takes about 31 s each time, and look_seconds=30"


def test_an_attack_that_is_slow_twice_is_left_out_and_tried_again_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lineup, "LOOKS_OUT", 2)
    runs: list[int] = []
    real_run = SubspaceWords.run

    def run_slowly(self: SubspaceWords, view: Any, query: Any = None) -> Any:
        guess = real_run(self, view, query)
        runs.append(view.gradients[-1].step)
        (time.sleep if len(set(runs)) == 1 else work_for)(0.5)  # a pause is nothing that it takes
        return guess

    monkeypatch.setattr(SubspaceWords, "run", run_slowly)
    monkeypatch.setattr(SubspaceMembership, "needs", lambda *_: Surfaces())  # it runs the former
    watch = run(tmp_path, "auto", every_n_steps=1, steps=8, look_seconds=0.2).watch
    lines = {line["step"]: line["unknown"] for line in watch.lines("subspace_words")}
    steps = sorted(set(runs))
    assert [step - steps[0] for step in steps] == [0, 1, 2, 5], lines
    for step, reason in lines.items():
        assert (reason is None) == (step in steps)
        if reason is not None:
            assert reason.startswith("not run at ")
            assert reason.endswith("s, and look_seconds=0.2")


@pytest.mark.parametrize("accounted", [False, True])
def test_no_attack_is_dropped_for_its_seconds_under_an_account(accounted: bool) -> None:
    """One example could make an attack slow, and a gate on it unknown, which is seen outside."""
    dropped: list[dict[str, float]] = []
    fit: Any = SimpleNamespace(
        accounting=[object()] if accounted else [],
        lineup=SimpleNamespace(leave_out_slow=dropped.append),
        run=SimpleNamespace(longest={"words": 99.0}),
    )
    Fit._leave_out_slow(fit)
    assert dropped == ([] if accounted else [{"words": 99.0}])


def seeded(**options: Any) -> nn.Module:
    with own_rng(1):
        return llama(**options)


def config(**more: Any) -> LoraConfig:
    targets = ["q_proj", "v_proj"]
    return LoraConfig(**{"r": 12, "target_modules": targets, "task_type": "CAUSAL_LM"} | more)


def two_adapters(**more: Any) -> PeftModel:
    """Return a model with two adapters of different ranks, both ready to be trained."""
    with own_rng(1):
        model = get_peft_model(llama(), config(**more), adapter_name="even")
        model.add_adapter("odd", config(**{"r": 8} | more))
        return model


def adapter_at(model: nn.Module, step: int) -> None:
    model.set_adapter("odd" if step % 2 else "even")


def batch_at(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(3, VOCABULARY, (2, 10), generator=generator)
    return {"input_ids": ids, "labels": ids}


def settings(
    model: nn.Module, change: Any = None, *, inside: bool = True, steps: int = 6, more: Any = ()
) -> dict[str, Any]:
    """Return the settings of a loop that changes the model within each step, or before it."""

    def batches() -> Any:
        for step in range(steps):
            if change is not None and not inside:
                change(model, step)
            yield batch_at(step)

    steps_taken: list[int] = []

    def loss(model: Any, batch: Any) -> Tensor:
        if change is not None and inside:
            change(model, len(steps_taken))
        steps_taken.append(1)
        return model_loss(model, batch)

    optimizer = torch.optim.AdamW([*model.parameters(), *more], lr=1e-3)
    given = {"batches": batches(), "loss": loss, "optimizers": [optimizer]}
    return given | {"look_seconds": 300}


def values(lines: list[dict[str, Any]], metric: str, start: int = 0) -> dict[int, float]:
    """Return a metric by step, of looks that are known and exposed."""
    lines = [line for line in lines if line["stage"] == "shared" and line["step"] >= start]
    assert all(line["unknown"] is None and line["exposed"] for line in lines)
    return {line["step"]: line["metrics"][metric]["value"] for line in lines}


def ones(steps: range) -> dict[int, float]:
    return dict.fromkeys(steps, 1.0)


def test_attacks_follow_the_adapter_that_is_trained_at_a_step(tmp_path: Path) -> None:
    """Also in the harder case, where the set changes within the step."""
    members = [SubspaceMembership(public_rows=8), GradientMembership(public_rows=8)]
    attacks: list[Any] = [SubspaceWords(capacity_seconds=0)]
    attacks += [SubspaceTexts(), *members]
    model = two_adapters()
    watch = watched(tmp_path, attacks, model, **settings(model, adapter_at, steps=4))
    assert values(watch.lines("subspace_words"), "f1") == ones(range(2, 4))
    assert values(watch.lines("subspace_texts"), "exact_sentences") == ones(range(2, 4))
    for attack in members:
        aucs = values(watch.lines(attack.name), "auc")
        assert aucs.keys() >= {2, 3}
        assert min(aucs.values()) > 0.9


def test_copies_of_an_embedding_are_followed_with_their_adapter(tmp_path: Path) -> None:
    """Their role has one name, and another parameter at each step."""
    model = two_adapters(modules_to_save=["embed_tokens"])
    given = settings(model, adapter_at, inside=False, steps=4)
    watch = watched(tmp_path, [BagOfWords()], model, **given)
    assert values(watch.lines(), "f1") == ones(range(4))


def test_trained_tokens_are_read_at_every_look(tmp_path: Path) -> None:
    """Their rows move at each step, and the table that 298 other tokens read does not."""
    tokens = batch_at(3)["input_ids"].flatten().unique()[:2].tolist()
    model = get_peft_model(seeded(), config(trainable_token_indices=tokens))
    attacks = [SubspaceWords(capacity_seconds=0.0), SubspaceTexts()]
    watch = watched(tmp_path, attacks, model, **settings(model, steps=4))
    for metric in ("f1", "certified"):
        assert values(watch.lines("subspace_words"), metric) == ones(range(1, 4))
    assert values(watch.lines("subspace_texts"), "exact_sentences") == ones(range(1, 4))


def test_blocks_that_are_unfrozen_one_by_one_are_read_as_they_come(tmp_path: Path) -> None:
    def thaw(model: nn.Module, step: int) -> None:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("layers.1." in name or step >= 2)

    attacks = [SubspaceWords(capacity_seconds=0.0), BagOfWords(), SubspaceMembership(public_rows=8)]
    model = seeded(tie_word_embeddings=False)
    watch = watched(tmp_path, attacks, model, **settings(model, thaw, inside=False, steps=4))
    for name in ("subspace_words", "bag_of_words"):
        assert not any(line["exposed"] for line in watch.lines(name) if line["step"] < 2)
        assert values(watch.lines(name), "f1", start=2) == ones(range(2, 4))
    aucs = values(watch.lines("subspace_membership"), "auc", start=1)
    assert aucs.keys() == {1, 2, 3}
    assert min(aucs.values()) > 0.9


def test_layers_that_are_replaced_are_followed(tmp_path: Path) -> None:
    """The optimizer owns the new ones from the start; they take their places at step 2."""
    model = seeded(tie_word_embeddings=False)
    embedding, values_map = nn.Embedding(VOCABULARY, 64), nn.Linear(64, 32, bias=False)
    block = model.model.layers[0]
    norm = type(block.input_layernorm)(64)
    nn.init.uniform_(norm.weight, 0.5, 2.0)

    def replace(model: nn.Module, step: int) -> None:
        if step == 2:
            model.set_input_embeddings(embedding)
            block.self_attn.v_proj, block.input_layernorm = values_map, norm

    more = [p for layer in (embedding, values_map, norm) for p in layer.parameters()]
    given = settings(model, replace, inside=False, more=more, steps=4)
    watch = watched(
        tmp_path, [SubspaceWords(capacity_seconds=0.0), SubspaceTexts()], model, **given
    )
    for metric in ("f1", "certified"):
        assert values(watch.lines("subspace_words"), metric) == ones(range(4))
    texts = watch.lines("subspace_texts")
    assert values(texts[:2], "exact_sentences") == ones(range(2))
    assert all(line["unknown"] for line in texts[2:])  # its copy of the model has the old embedding


# ---- attacks that choose themselves -------------------------------------------------------------


def test_members_are_recognised_where_no_adapter_shows_words(tmp_path: Path) -> None:
    model = get_peft_model(seeded(), config(layers_to_transform=[1]))
    watch = watched(tmp_path, "auto", model, **settings(model, steps=5))
    aucs = values(watch.lines("gradient_membership"), "auc", start=3)
    assert aucs.keys() == {3, 4}
    assert min(aucs.values()) > 0.8


def let_fail(monkeypatch: pytest.MonkeyPatch, *steps: int, waits: tuple[int, ...] = ()) -> None:
    """Let GradientMembership fail at some steps, and have no result yet at others."""
    run = GradientMembership.run

    def fail(attack: Any, view: Any, query: Any = None) -> Any:
        if view.gradients[-1].step in steps:
            raise RuntimeError("a layer of another kind")
        if view.gradients[-1].step in waits:
            raise NotYet("nothing is shared yet")
        return run(attack, view, query)

    monkeypatch.setattr(GradientMembership, "run", fail)


def test_an_attack_runs_while_one_that_reads_as_much_has_no_result(tmp_path, monkeypatch) -> None:
    let_fail(monkeypatch, 4, 6)
    model = get_peft_model(seeded(), config())
    gate = Threshold("leakage/worst/membership", at_most=0.99, action="warn")
    given = settings(model, steps=13) | {"every_n_steps": 2}
    watch = watched(tmp_path, "auto", model, gates=[gate], **given)
    first = {line["step"]: line["unknown"] for line in watch.lines("gradient_membership")}
    assert {step for step, why in first.items() if why} == {4, 6}
    # Step 5 is looked at for it alone; at step 8 it runs as the other one was unknown at step 6.
    second = values(watch.lines("subspace_membership"), "auc", start=1)
    assert second.keys() == {5, 6, 8}
    assert values(watch.lines("subspace_words"), "f1", start=3) == ones(range(4, 13, 2))
    newest = watch.latest["leakage/gradient_membership/auc"]
    assert watch.latest["leakage/worst/membership"] == newest
    assert gate.fired is None or not math.isnan(gate.fired.value)
    assert "leakage/subspace_membership/auc" not in watch.latest  # nothing judges an old value


def test_an_attack_in_doubt_stays_so_while_it_waits(tmp_path: Path, monkeypatch: Any) -> None:
    let_fail(monkeypatch, 4, waits=(6, 7))
    model = get_peft_model(seeded(), config())
    watch = watched(tmp_path, "auto", model, **settings(model, steps=11) | {"every_n_steps": 2})
    second = values(watch.lines("subspace_membership"), "auc", start=1)
    assert second.keys() == {5, 6, 8}


def test_a_gate_is_not_silent_where_the_last_look_has_no_result(tmp_path, monkeypatch) -> None:
    """The other attack ran after step 4, and would run again after the last step, 12."""
    let_fail(monkeypatch, 4, 12)
    model = get_peft_model(seeded(), config())
    given = settings(model, steps=13) | {"every_n_steps": 2}
    watch = watched(tmp_path, "auto", model, **given)
    assert math.isnan(watch.latest["leakage/worst/membership"])


def test_a_gate_on_an_attack_lets_it_run_beside_one_that_reads_as_much(tmp_path: Path) -> None:
    model = get_peft_model(seeded(), config())
    gate = Threshold("leakage/subspace_membership/auc", at_most=0.99, action="warn")
    watch = watched(tmp_path, "auto", model, gates=[gate], **settings(model, steps=5))
    for name in ("subspace_membership", "gradient_membership"):
        assert values(watch.lines(name), "auc", start=3).keys() == {3, 4}


@pytest.mark.parametrize("method", ["needs", "meet", "estimate", "prepare"])
def test_an_attack_that_fails_at_set_up_leaves_the_others_playing(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        try:
            raise KeyError("a layer of another kind")
        except KeyError as error:
            raise RuntimeError("wrapped") from error

    monkeypatch.setattr(GradientMembership, method, fail)
    model = get_peft_model(seeded(), config())
    watch = watched(tmp_path, "auto", model, **settings(model, steps=5))
    [refused] = watch.lines("gradient_membership")
    assert refused["unknown"].startswith("not played: fails on LlamaForCausalLM (KeyError at ")
    assert "a layer of another kind" in refused["unknown"]
    assert values(watch.lines("subspace_words"), "f1", start=3) == {3: 1.0, 4: 1.0}
    if method == "estimate":  # which is for those that choose themselves
        return
    listed = [GradientMembership()]
    with pytest.raises(RuntimeError, match="wrapped"):
        watched(tmp_path / "listed", listed, model, **settings(model, steps=1))
