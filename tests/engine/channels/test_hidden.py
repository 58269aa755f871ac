"""What declared noise hides: the bound on every reader, and what a gate makes of it."""

import itertools
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.func import functional_call

from lightning_fedleak import (
    DPSGD,
    ActivationNoise,
    DefendedStrategy,
    Games,
    GradientCompression,
    GradientMembership,
    GradientNoise,
    LeakageMonitor,
    PublicText,
    RiskGate,
    SubspaceWords,
    TokenLDP,
)
from lightning_fedleak.attacks import WordGuess
from lightning_fedleak.callbacks import WatchSettings
from lightning_fedleak.defenses import Defense, mean_of_sample_means
from lightning_fedleak.engine.channels import hidden
from lightning_fedleak.engine.channels.hidden import best_f1
from lightning_fedleak.model.snapshots import NotYet, Stage
from tests.engine.test_step_again import VOCAB, adapted, trained
from tests.helpers.settings import QUIET


@pytest.mark.parametrize(("distances", "types"), [((0.5, 3.0), 20), ((4.0,), 100), ((0.0,), 30)])
def test_no_reader_of_drawn_noise_exceeds_the_bound_and_the_best_one_reaches_it(distances, types):
    vocabulary, generator = 400, np.random.default_rng(1)
    distance = np.resize(distances, vocabulary)
    projections = generator.normal(size=(400, vocabulary))
    projections[:, :types] += distance[:types]
    ratios = distance * projections - distance**2 / 2  # log of the likelihoods with and without

    def f1(named: Any) -> float:
        right = named[:, :types].sum(1)
        return float(np.mean(2 * right / (types + named.sum(1))))

    best = max(f1(ratios > t) for t in np.linspace(-8, 8, 65))
    assert best == pytest.approx(best_f1(distances, types, vocabulary), abs=0.01)
    assert max(f1(projections > z) for z in np.linspace(-4, 8, 61)) <= best + 0.01


@pytest.mark.parametrize("sigma", [0.7, 1.0, 2.0])
def test_the_best_reader_of_candidates_of_which_half_are_in_reaches_the_bound(sigma) -> None:
    """Of each pair with opposite gradients one is in the batch, so that its size shows nothing."""
    generator = np.random.default_rng(1)
    signs = generator.choice([-1.0, 1.0], 2000)
    released = signs + sigma * generator.normal(size=2000)
    members, others = signs * released, -signs * released
    auc = float((members[:, None] > others).mean())
    run = SimpleNamespace(defenses=[], client="rank", is_sharded=False, anatomy=SimpleNamespace())
    run.anatomy.embedding_rows = 400
    bound = hidden.HiddenWords(run, lambda *_: {}, frozenset()).bound(
        SimpleNamespace(example_norm=0.5), 0.5 * sigma, games=True
    )
    assert auc == pytest.approx(bound, abs=0.02)


def test_clipped_gradients_differ_by_no_more_than_is_said() -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(50):
        g, h = torch.randn(2, 5, generator=generator) * 3 ** torch.randn(2, 1, generator=generator)
        sizes = g.norm(), h.norm()
        most = max((g / sizes[0] - h / sizes[1]).norm(), (g - h).norm() / max(sizes))
        for scale in 10.0 ** torch.linspace(-3, 3, 25):
            clipped = [scale * x / max(1.0, scale * x.norm()) for x in (g, h)]
            assert (clipped[0] - clipped[1]).norm() <= most * (1 + 1e-5)


def batches(steps: int, texts: int = 2) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(3, VOCAB, (steps, texts, 8), generator=generator)
    return [{"input_ids": row, "labels": row} for row in ids.flatten(0, 1)]


class Weak(SubspaceWords):
    """Names a fifth of the words that it could name, as an attack does that something blinds."""

    def run(self, view: Any, query: Any = None) -> WordGuess:
        guess = super().run(view, query)
        return replace(guess, types=guess.types[: len(guess.types) // 5], certified=False)


class Tuned(L.LightningModule):
    """Fine-tunes a LoRA."""

    def __init__(self) -> None:
        super().__init__()
        self.net = adapted()

    def forward(self, input_ids: Tensor) -> Tensor:
        logits: Tensor = self.net(input_ids=input_ids).logits
        return logits

    def training_step(self, batch: Any, index: int) -> Tensor:
        return mean_of_sample_means(self(batch["input_ids"]), batch["labels"], causal=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(trained(self), lr=1e-2)


def fit(module, defenses, steps, callbacks, folder) -> None:
    strategy = DefendedStrategy("auto", [*defenses])
    where = {"devices": 1, "default_root_dir": folder, "strategy": strategy, **QUIET}
    trainer = L.Trainer(max_steps=steps, callbacks=callbacks, **where)
    trainer.fit(module, torch.utils.data.DataLoader(batches(steps), batch_size=2))


def look(folder, *defenses, attack=SubspaceWords, steps=2, kind=Tuned) -> Any:
    """Return the gate of a run and the table of its last look, by metric."""
    monitor = LeakageMonitor([attack(capacity_seconds=0)], every_n_steps=1)
    gate = RiskGate("leakage/worst/words", at_most=0.5, action="warn")
    module = kind()
    fit(module, defenses, steps, [monitor, gate], folder)
    table = monitor.to_dataframe()
    last = table[table.step == table.step.max()]
    return gate, dict(zip(last.metric, last.value, strict=True))


@pytest.mark.parametrize(("sigma", "known"), [(1e-2, False), (1.0, True)])
def test_a_low_number_behind_noise_is_known_where_no_reader_can_have_more(tmp_path, sigma, known):
    gate, values = look(tmp_path, GradientNoise(None, sigma), steps=1)
    assert values["f1"] < 0.5
    assert (values["bound"] <= 0.5) == known
    assert (gate.fired is None) == known
    if gate.fired is not None:
        assert math.isnan(gate.fired.value)
        assert "behind the declared defences" in gate.fired.why


class Scaled(Tuned):
    """Multiplies its gradients, as code does whose loss was divided by too much."""

    def on_after_backward(self) -> None:
        for p in trained(self):
            if p.grad is not None:
                p.grad *= 1e4


class ScaledBehind(Tuned):
    """Multiplies the gradients of the second block, which the attack does not read."""

    def on_after_backward(self) -> None:
        scaled = [p.grad for n, p in self.named_parameters() if "layers.1" in n]
        assert scaled
        for gradient in scaled:
            if gradient is not None:
                gradient *= 1e4


class Beside(Tuned):
    """Trains a number for each word of the batch, beside the model."""

    def __init__(self) -> None:
        super().__init__()
        self.net.counts = torch.nn.Parameter(torch.zeros(VOCAB))

    def training_step(self, batch: Any, index: int) -> Tensor:
        loss = super().training_step(batch, index)
        return loss + 10 * self.net.counts[batch["input_ids"]].mean()


class Thawed(Tuned):
    """Trains the second block from the second step on."""

    def on_train_batch_start(self, batch: Any, index: int) -> None:
        for name, p in self.named_parameters():
            if "layers.1" in name and "lora" in name:
                p.requires_grad_(index > 0)
        for name, module in self.named_modules():
            if "layers.1" in name and isinstance(getattr(module, "scaling", None), dict):
                module.scaling = {"default": 300.0}


class Once(Tuned):
    """Has a forward that cannot be run again."""

    calls = -math.inf  # set-up may run it

    def __init__(self) -> None:
        super().__init__()
        adapter = next(module for module in self.net.modules() if hasattr(module, "lora_A"))
        self.real, adapter.forward = adapter.forward, self.run_once

    def training_step(self, batch: Any, index: int) -> Tensor:
        self.calls = 0
        return super().training_step(batch, index)

    def run_once(self, *given: Any, **settings: Any) -> Any:
        self.calls += 1
        if self.calls > 1:
            raise RuntimeError("only once")
        return self.real(*given, **settings)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (Scaled, "behind the declared defences"),
        (ScaledBehind, "behind the declared defences"),
        (Beside, "behind the declared defences"),
        (Once, "could not be made again"),
    ],
)
def test_a_bound_is_of_the_gradient_that_was_trained_on(tmp_path, kind, why) -> None:
    gate, values = look(tmp_path, GradientNoise(None, 1.0), attack=Weak, steps=1, kind=kind)
    assert 0 <= values["f1"] < 0.5
    assert not values.get("bound", math.nan) <= 0.5
    assert gate.fired is not None
    assert math.isnan(gate.fired.value)
    assert why in gate.fired.why


def test_changes_are_measured_again_where_other_weights_are_trained(tmp_path) -> None:
    settings = {"attack": Weak, "kind": Thawed}
    before, after = (
        look(tmp_path / str(n), GradientNoise(None, 1.0), steps=n, **settings)[1] for n in (1, 2)
    )
    assert before["bound"] < 0.5 < after["bound"]


def test_a_bound_of_older_changes_is_no_less_than_that_of_new_ones(tmp_path, monkeypatch) -> None:
    """A word moves the mean loss over a few tokens by more than that over many."""
    [text, *_] = batches(1)
    padding = [{name: torch.full_like(ids, 3) for name, ids in text.items()}] * 15
    rows = [[*range(16)], [0], [*range(16)], [0]]
    bounds = []
    for looks in (hidden.LOOKS, 1):
        monkeypatch.setattr(hidden, "LOOKS", looks)
        monitor = LeakageMonitor([Weak(capacity_seconds=0)], every_n_steps=1)
        torch.manual_seed(0)
        strategy = DefendedStrategy("auto", [GradientNoise(None, 0.1, seed=1)])
        where = {"devices": 1, "default_root_dir": tmp_path, "strategy": strategy, **QUIET}
        loader: Any = torch.utils.data.DataLoader([text, *padding], batch_sampler=rows)  # type: ignore[arg-type]
        L.Trainer(max_steps=len(rows), callbacks=[monitor], **where).fit(Tuned(), loader)
        table = monitor.to_dataframe()
        bounds.append(table[table.metric == "bound"].value.to_numpy())
    old, new = bounds
    assert len(old) == len(new) == len(rows)
    assert new[1] > new[0] + 0.1
    assert (old >= new - 0.05).all(), (old, new)


@pytest.mark.parametrize("clip", [None, 50.0])
@pytest.mark.parametrize(
    ("factor", "again"), [(1.5, False), (1e3, True), (math.nan, True), (None, True)]
)
def test_a_factor_on_a_small_gradient_that_begins_between_measurements_is_seen(
    monkeypatch, clip, factor, again
) -> None:
    """It leaves the norm of all gradients as it is, and each word as far apart as it reads.

    Without a factor, the small gradient is not there when changes are measured, and 0 is read.
    """
    measured: list[int] = []
    parameters = {name: torch.nn.Parameter(torch.zeros(40)) for name in ("large", "small")}
    anatomy = SimpleNamespace(
        embedding_rows=40, parameter=parameters.get, trainable_names=lambda: tuple(parameters)
    )
    defense = GradientNoise(clip, 1.0)
    run = SimpleNamespace(
        defenses=[defense], client="rank", is_sharded=False, anatomy=anatomy, optimizers=[None]
    )

    def gradient(ids: Tensor, _: Any) -> dict[str, Tensor]:
        counts = torch.bincount(ids, minlength=40).double()
        small = {"small": (1e-3 if factor else 1.0) * counts} if factor or bounds else {}
        return {"large": torch.full((40,), 10.0), **small}

    def replaced(step: Any, old: int, new: int) -> Tensor:
        measured.append(step.number)
        return ids.masked_fill(ids == old, new)

    monkeypatch.setattr(hidden, "replace_word", replaced)
    ids = torch.arange(12)
    batch = SimpleNamespace(context_ids=lambda: ids, labels=ids)
    words = hidden.HiddenWords(run, gradient, frozenset())
    bounds: list[float] = []
    for number, scale in enumerate((1.0, factor or 1.0)):
        now = {"small": torch.zeros(40), **gradient(ids, None)}
        sizes = {
            id(parameters[n]): float(g.norm()) * (scale if n == "small" else 1.0)
            for n, g in now.items()
        }
        step = SimpleNamespace(number=number, batches=[batch], sizes=sizes, example_norm=math.nan)
        bounds.append(words.bound(step, 0.1))
    assert bounds[0] < 0.5
    assert (1 in measured) == again
    assert (bounds[1] > 0.9) == again


def test_the_change_of_a_word_is_that_of_a_second_backward(tmp_path, monkeypatch) -> None:
    pairs: list[tuple[int, int]] = []
    changes: list[Any] = []
    replaced, real = hidden.replace_word, hidden.HiddenWords._change

    def spy_words(step: Any, old: int, new: int) -> Any:
        pairs.append((old, new))
        return replaced(step, old, new)

    def spy_change(self: Any, *gradients: Any) -> Any:
        changes.append(real(self, *gradients))
        return changes[-1]

    monkeypatch.setattr(hidden, "replace_word", spy_words)
    monkeypatch.setattr(hidden.HiddenWords, "_change", spy_change)
    look(tmp_path, GradientNoise(None, 1e-6), steps=1)
    assert len(changes) == len(pairs) - 1 == hidden.N_TYPES
    model = adapted()
    ids = torch.stack([batch["input_ids"] for batch in batches(1)])
    weights = {n: p for n, p in model.named_parameters() if p.requires_grad}

    def gradient(ids: Tensor) -> Tensor:
        loss = functional_call(model, weights, (ids,), {"labels": ids}).loss
        found = torch.autograd.grad(loss, [*weights.values()], allow_unused=True)
        return torch.cat([g.flatten().double() for g in found if g is not None])

    # A row of the repeated step keeps the size of its label's gradient, which differs a little.
    for change, (old, new) in zip(changes, pairs[1:], strict=True):
        expected = (gradient(ids) - gradient(ids.masked_fill(ids == old, new))).norm()
        assert math.hypot(*change.values()) == pytest.approx(float(expected), rel=0.05)


@pytest.mark.parametrize(("multiplier", "known"), [(0.05, False), (20.0, True)])
def test_dp_sgd_bounds_its_own_reader(tmp_path: Path, multiplier: float, known: bool) -> None:
    gate, values = look(tmp_path, noise_multiplier(multiplier))
    assert (values["bound"] <= 0.5) == known
    if values["f1"] <= 0.5:
        assert (gate.fired is None) == known


def noise_multiplier(multiplier: float) -> DPSGD:
    return DPSGD(max_grad_norm=1.0, noise_multiplier=multiplier, target_delta=1e-3, seed=5)


@pytest.mark.parametrize(
    ("defenses", "auc"),
    [
        ([], None),
        ([noise_multiplier(1.0)], 0.921),  # of N(-1, 1) and N(1, 1)
        ([noise_multiplier(20.0)], 0.528),
        ([GradientNoise(1.0, 100.0)], 1.0),
        ([GradientNoise(1.0, 100.0), GradientCompression("int8")], 1.0),
        ([TokenLDP("grr", 1.0, seed=1)], 1.0),
    ],
)
def test_low_membership_is_known_only_where_clipped_texts_bound_it(
    tmp_path: Path, defenses: list[Defense], auc: float | None
) -> None:
    public = PublicText([row["input_ids"] for row in batches(16, 2)])
    games = Games(held_out=PublicText([x["input_ids"] - 1 for x in batches(20, 2)]), targets=8)
    monitor = LeakageMonitor([GradientMembership(public)], every_n_steps=1, games=games)
    gate = RiskGate("leakage/worst/membership", at_most=0.6, action="warn")
    fit(Tuned(), defenses, 2, [monitor, gate], tmp_path)
    table = monitor.to_dataframe()
    bounds = table[table.metric == "bound"].value.tolist()
    assert bounds == ([] if auc is None else pytest.approx([auc] * len(bounds), abs=1e-3))
    assert bool(bounds) == bool(defenses)
    if auc is not None and auc > 0.6:  # a low number does not count
        assert gate.fired is not None
        assert gate.fired.value > 0.6 or "behind the declared defences" in gate.fired.why


@pytest.mark.parametrize(
    ("epsilon", "attack"), itertools.product((1.0, 50.0), (SubspaceWords, Weak))
)
def test_behind_replaced_tokens_an_attack_has_to_read_what_was_written(tmp_path, epsilon, attack):
    gate, values = look(tmp_path, TokenLDP("grr", epsilon, seed=1), attack=attack)
    if attack is Weak:  # it recovers little of the written words too
        assert gate.fired is not None
        assert math.isnan(gate.fired.value)
    else:
        assert (values["f1"] > 0.5) == (gate.fired is not None) == (epsilon > 1)


def test_behind_noise_on_states_a_low_number_is_unknown(tmp_path: Path) -> None:
    gate, _ = look(tmp_path, ActivationNoise(1, 1e-6), attack=Weak)
    assert gate.fired is not None
    assert "nothing bounds what a reader" in gate.fired.why


class Late(Weak):
    """Waits for the gradient of A, as of more tokens than B can distinguish."""

    def run(self, view: Any, query: Any = None) -> WordGuess:
        if view.gradients[-1].step == 0:
            raise NotYet("A has no gradient yet")
        return super().run(view, query)


def test_a_retry_between_looks_has_a_control(tmp_path: Path) -> None:
    """Where defences act, stages are read one by one; the last one is no stage that is measured."""
    module = Tuned()
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter *= 0 if "lora_B" in name else 1  # A's gradient is zero in the first step
    monitor = LeakageMonitor([Late(capacity_seconds=0)], every_n_steps=9)
    gate = RiskGate("leakage/worst/words", at_most=0.5, action="warn")
    fit(module, [GradientNoise(1.0, 0.0)], 2, [monitor, gate], tmp_path)  # it clips
    assert 0 < monitor.latest["leakage/subspace_words/f1"] < 0.5
    assert monitor.latest["leakage/subspace_words/control"] < 0.5
    assert gate.fired is not None
    assert gate.fired.step == 1
    assert "this attack cannot show more than" in gate.fired.why


def test_behind_a_defence_an_attack_is_played_whatever_another_one_reads(
    tmp_path, monkeypatch
) -> None:
    run = GradientMembership.run

    def fail(attack: Any, view: Any, query: Any = None) -> Any:
        if view.gradients[-1].stage is Stage.LOCAL:
            raise RuntimeError("a layer of another kind")
        return run(attack, view, query)

    monkeypatch.setattr(GradientMembership, "run", fail)
    games = Games(held_out=PublicText([x["input_ids"] - 1 for x in batches(20, 2)]), targets=8)
    settings = WatchSettings(stages=["local", "shared"])
    monitor = LeakageMonitor(every_n_steps=1, games=games, settings=settings)
    fit(Tuned(), [GradientNoise(1.0, 0.0)], 3, [monitor], tmp_path)
    table = monitor.to_dataframe()
    rows = table[table.attack == "subspace_membership"]
    assert {*rows.stage} == {"local", "shared"}
    assert rows.unknown.isna().all()


class Dithered(Defense):
    """Adds random numbers of torch and of its own generator, and counts its releases."""

    name, guarantee = "dithered", "none"

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(3)
        self.sizes: list[float] = []

    def on_gradients(self, parameters: Any, context: Any) -> None:
        for p in parameters:
            if p.grad is not None:
                self.sizes.append(float(p.grad.norm()))
                p.grad.add_(1e-6 * torch.randn_like(p.grad))
                p.grad.add_(1e-6 * torch.randn(p.grad.shape, generator=self.generator))


def test_a_control_draws_no_random_number_of_a_defence(tmp_path, monkeypatch) -> None:
    calls: list[int] = []
    real = Dithered.on_gradients

    def spy(self: Dithered, *given: Any) -> None:
        calls.append(id(self))
        real(self, *given)

    monkeypatch.setattr(Dithered, "on_gradients", spy)
    sizes = []
    for watches in (True, False):
        torch.manual_seed(0)
        defense, module = Dithered(), Tuned()
        monitor = LeakageMonitor([SubspaceWords(capacity_seconds=0)], every_n_steps=1)
        fit(module, [defense], 3, [monitor] * watches, tmp_path)
        sizes.append((defense.sizes, torch.get_rng_state().tolist()))
    assert len(set(calls)) > 2  # copies acted on controls
    assert sizes[0] == sizes[1]


def test_a_control_goes_through_a_copy_of_a_compression(tmp_path: Path) -> None:
    compression = GradientCompression("low_rank", rank=2, error_feedback=False)
    alone = GradientCompression("low_rank", rank=2, error_feedback=False)
    _, values = look(tmp_path / "watched", compression)
    module = Tuned()
    fit(module, [alone], 2, [], tmp_path)
    assert compression.memory.keys() == alone.memory.keys()
    assert all(torch.equal(alone.memory[name], x) for name, x in compression.memory.items())
    assert values["f1_of_control"] < 1  # rank 2 is too little for the control too
