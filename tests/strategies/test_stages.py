"""Stages on one device; without defences the plain run; state over fits and checkpoints."""

import math

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import SingleDeviceStrategy

from lightning_fedleak.defenses import Defense, DefenseContext, DefenseError, Freeze, GradientNoise
from lightning_fedleak.model.snapshots import Stage
from lightning_fedleak.strategies import DefendedStrategy
from lightning_fedleak.strategies.seams import CHECKPOINT_KEY
from tests.strategies import toy


class Scale(Defense):
    """Multiplies the update; remembers what it was given."""

    guarantee = "none"

    def __init__(self, factor: float, name: str = "scale") -> None:
        self.factor, self.name = factor, name
        self.contexts: list[DefenseContext] = []
        self.events: list[str] = []

    def before_setup(self, context: DefenseContext) -> None:
        self.events.append("before_setup")
        self.contexts.append(context)

    def on_gradients(self, parameters, context: DefenseContext) -> None:
        assert not torch.is_grad_enabled()
        self.contexts.append(context)
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(self.factor)

    def teardown(self) -> None:
        self.events.append("teardown")


class Recorder:
    """A tap that copies what it sees, and the weights at that moment."""

    def __init__(self) -> None:
        self.seen: list[tuple[Stage, list[torch.Tensor]]] = []
        self.weights: list[list[torch.Tensor]] = []

    def __call__(self, stage: Stage, optimizer: torch.optim.Optimizer) -> None:
        assert not torch.is_grad_enabled()
        self.seen.append((stage, toy.grads(optimizer)))
        if stage is Stage.LOCAL:
            groups = optimizer.param_groups
            self.weights.append([p.detach().clone() for g in groups for p in g["params"]])

    def at(self, stage: Stage) -> list[list[torch.Tensor]]:
        return [gradient for seen, gradient in self.seen if seen is stage]


def brute_force(weights: list[torch.Tensor], batches: list[list[torch.Tensor]]) -> list:
    """Mean gradient over micro-batches of a dropout-free ToyLM, in float64."""
    model = toy.ToyLM("sgd").double()
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), weights, strict=True):
            parameter.copy_(value)
    logits = [model(b[0][:, :-1]).flatten(0, 1) for b in batches]
    losses = [
        torch.nn.functional.cross_entropy(x, b[0][:, 1:].flatten())
        for x, b in zip(logits, batches, strict=True)
    ]
    return list(torch.autograd.grad(sum(losses) / len(losses), list(model.parameters())))


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("clip", [None, 0.05])
def test_values_at_each_stage(accumulate: int, clip: float | None) -> None:
    tap, first, second = Recorder(), Scale(0.5, "first"), Scale(-3.0, "second")
    strategy = DefendedStrategy("auto", [first, Freeze("embeddings"), second])
    remove = strategy.add_tap(tap)
    start: list[torch.Tensor] = []

    def build() -> toy.ToyLM:
        model = toy.ToyLM("sgd")
        start.extend(p.detach().clone() for p in model.parameters())
        return model

    settings = {"accumulate_grad_batches": accumulate, "gradient_clip_val": clip}
    model, _ = toy.fit(strategy, build, shuffle=False, **settings)
    batches = list(toy.loader())
    steps = len(batches) // accumulate
    assert [stage for stage, _ in tap.seen] == [Stage.LOCAL, Stage.SHARED, Stage.AGGREGATE] * steps
    for step in range(steps):
        micro = batches[step * accumulate : (step + 1) * accumulate]
        expected = brute_force(tap.weights[step], micro)
        expected[0].zero_()
        norm = float(torch.linalg.vector_norm(torch.cat([g.flatten() for g in expected])))
        factor = 1.0 if clip is None else min(1.0, clip / norm)
        stages = (Stage.LOCAL, 1.0), (Stage.SHARED, -1.5), (Stage.AGGREGATE, -1.5)
        for stage, scale in stages:
            for seen, gradient in zip(tap.at(stage)[step], expected, strict=True):
                want = scale * factor * gradient
                torch.testing.assert_close(seen.double(), want, rtol=1e-3, atol=1e-6)
    # The optimizer got the aggregate, and the frozen embedding nothing.
    total = [torch.stack(g).sum(0) for g in zip(*tap.at(Stage.AGGREGATE), strict=True)]
    for begin, parameter, moved in zip(start, model.parameters(), total, strict=True):
        torch.testing.assert_close(parameter.detach(), begin - 0.1 * moved, rtol=1e-4, atol=1e-6)
    assert torch.equal(start[0], model.embedding.weight)
    assert [context.step for context in first.contexts] == [0, *range(steps)]
    assert first.events == ["before_setup", "teardown"]
    assert first.contexts[0].root is model
    assert len({c.entropy for c in first.contexts}) == 1
    assert len(first.contexts[0].entropy) == 32
    remove()


def test_manual_optimization_releases_each_optimizers_own_parameters() -> None:
    tap, noise = Recorder(), GradientNoise(clip=1e-3, sigma=0.0)
    strategy = DefendedStrategy("auto", [noise])
    strategy.add_tap(tap)
    toy.fit(strategy, toy.ManualLM)
    assert noise.releases == 2 * 6
    assert [len(g) for g in tap.at(Stage.SHARED)] == [3, 2] * 6
    for update in tap.at(Stage.AGGREGATE):
        norm = float(torch.linalg.vector_norm(torch.cat([g.flatten() for g in update])))
        assert norm == pytest.approx(1e-3, rel=1e-5)


def test_an_optimizer_stepped_around_lightning_is_defended_too() -> None:
    class Around(toy.ManualLM):
        def training_step(self, batch, batch_idx) -> None:
            below, above = self.optimizers(use_pl_optimizer=False)
            self.zero_grad()
            self.manual_backward(self.loss(batch))
            below.step()
            above.step()

    noise = GradientNoise(clip=1e-3, sigma=0.0)
    toy.fit(DefendedStrategy("auto", [noise]), Around)
    assert noise.releases == 2 * 6


def test_a_skipped_amp_step_releases_nothing() -> None:
    noise = GradientNoise(clip=1.0, sigma=1.0, seed=1)
    toy.fit(DefendedStrategy("auto", [noise]), toy.Bursting, plugins=toy.scaled())
    assert noise.releases == 5


def test_a_guarantee_is_refused_where_steps_are_skipped_by_their_gradients() -> None:
    noise = GradientNoise(clip=1.0, sigma=1.0)
    with pytest.raises(DefenseError, match="'bf16-mixed' or '32-true'"):
        toy.fit(DefendedStrategy("auto", [noise]), toy.Bursting, plugins=toy.scaled())
    assert noise.releases == 0
    toy.fit(DefendedStrategy("auto", [noise]), toy.Bursting)
    assert noise.releases == 6


def test_an_empty_update_is_noised_too() -> None:
    class Skipping(toy.ToyLM):
        def training_step(self, batch, batch_idx):
            return None if batch_idx == 1 else super().training_step(batch, batch_idx)

    tap, noise = Recorder(), GradientNoise(clip=1.0, sigma=1.0, seed=1)
    strategy = DefendedStrategy("auto", [noise])
    strategy.add_tap(tap)
    toy.fit(strategy, Skipping, max_steps=3)
    norms = [float(torch.cat([g.flatten() for g in u]).norm()) for u in tap.at(Stage.LOCAL)]
    assert [norm > 0 for norm in norms] == [True, False, True]
    released = torch.cat([g.flatten() for g in tap.at(Stage.SHARED)[1]])
    assert float(released.std()) == pytest.approx(1.0, abs=0.25)
    assert noise.releases == 3


def test_a_broken_update_that_nothing_bounds_stops_training_before_it_leaves() -> None:
    class Broken(toy.ToyLM):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) * float("nan")

    kept: list[toy.ToyLM] = []

    def build() -> toy.ToyLM:
        kept.append(Broken())
        return kept[0]

    stages: list[Stage] = []
    strategy = DefendedStrategy("auto", [GradientNoise(None, 1.0)])
    strategy.add_tap(lambda stage, _: stages.append(stage))
    with pytest.raises(DefenseError, match="nothing was released"):
        toy.fit(strategy, build)
    assert stages == [Stage.LOCAL]
    assert all(torch.isfinite(p).all() for p in kept[0].parameters())
    # Under a clip whether a run goes on must not depend on the data.
    bounded = GradientNoise(1.0, 1.0)
    toy.fit(DefendedStrategy("auto", [bounded]), build)
    assert bounded.releases == 6
    assert all(torch.isfinite(p).all() for p in kept[-1].parameters())


def checkpointed(folder, **settings):
    keep = ModelCheckpoint(dirpath=folder, save_last=True)
    return {"callbacks": [keep], "enable_checkpointing": True, "shuffle": False, **settings}


def sgd() -> toy.ToyLM:
    return toy.ToyLM("sgd")


def test_a_resumed_run_makes_the_releases_of_the_uninterrupted_one(tmp_path) -> None:
    def defended() -> DefendedStrategy:
        return DefendedStrategy("auto", [GradientNoise(0.1, 1.0, seed=7)])

    whole = toy.fit(defended(), sgd, shuffle=False, max_epochs=2)
    toy.fit(defended(), sgd, **checkpointed(tmp_path))
    path = str(tmp_path / "last.ckpt")
    assert torch.load(path, weights_only=True)[CHECKPOINT_KEY] == {
        "gradient_noise": {"notches": 0, "releases": 6, "spent": math.inf}
    }
    resumed = toy.fit(defended(), sgd, shuffle=False, max_epochs=2, ckpt_path=path)
    assert toy.same(toy.state_of(*whole)["weights"], toy.state_of(*resumed)["weights"])
    (noise,) = resumed[1].strategy.defenses
    assert noise.releases == 12


def test_resuming_with_fresh_entropy_or_without_state_never_replays(tmp_path) -> None:
    def first_noise(strategy: DefendedStrategy, **settings) -> torch.Tensor:
        tap = Recorder()
        strategy.add_tap(tap)
        toy.fit(strategy, sgd, shuffle=False, max_steps=settings.pop("max_steps", 1), **settings)
        local, shared = tap.at(Stage.LOCAL)[0], tap.at(Stage.SHARED)[0]
        return torch.cat([(b - a).flatten() for a, b in zip(local, shared, strict=True)])

    def noisy(seed: int | None) -> DefendedStrategy:
        return DefendedStrategy("auto", [GradientNoise(None, 1.0, seed=seed)])

    assert not torch.allclose(first_noise(noisy(None)), first_noise(noisy(None)), atol=1e-3)
    torch.testing.assert_close(first_noise(noisy(3)), first_noise(noisy(3)), atol=1e-4, rtol=1e-3)
    plain = checkpointed(tmp_path, max_steps=1)
    toy.fit("auto", sgd, **plain)
    path = str(tmp_path / "last.ckpt")
    resumed = first_noise(noisy(3), ckpt_path=path, max_epochs=2, max_steps=2)
    assert not torch.allclose(resumed, first_noise(noisy(3)), atol=1e-3)


def test_a_checkpoint_of_a_defended_run_warns_where_the_defence_is_gone(tmp_path) -> None:
    toy.fit(DefendedStrategy("auto", [GradientNoise(1.0, 1.0)]), sgd, **checkpointed(tmp_path))
    run = toy.trainer(DefendedStrategy(), max_epochs=2)
    with pytest.warns(UserWarning, match="gradient_noise"):
        run.fit(sgd(), toy.loader(), ckpt_path=str(tmp_path / "last.ckpt"))


def test_canaries_are_asked_before_each_defence_acts_on_what_it_is_about_to_get() -> None:
    halves, thirds = Scale(0.5, "halves"), Scale(1 / 3, "thirds")
    strategy = DefendedStrategy("auto", [Freeze("head"), halves, thirds])
    recorder, asked = Recorder(), []

    def canaries(defense, parameters, context) -> None:
        asked.append((defense.name, context.step, [p.grad.clone() for p in parameters]))

    strategy.add_tap(recorder)
    remove = strategy.add_canaries(canaries)
    remove()
    remove()
    remaining = strategy.add_canaries(canaries)
    toy.fit(strategy, lambda: toy.ToyLM("sgd"))
    assert [name for name, *_ in asked] == ["halves", "thirds"] * 6
    assert [step for _, step, _ in asked] == [s for s in range(6) for _ in range(2)]
    for step, local in enumerate(recorder.at(Stage.LOCAL)):
        for (_, _, seen), factor in zip(asked[2 * step : 2 * step + 2], (1, 0.5), strict=True):
            assert toy.same([factor * g for g in local[: len(seen)]], seen)
    asked.clear()
    remaining()
    assert not asked


CASES = {
    "fp32": {},
    "bf16-mixed": {"precision": "bf16-mixed"},
    "accumulation": {"accumulate_grad_batches": 2},
    "clipping by value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    "manual": {"build": toy.ManualLM},
}


@pytest.mark.parametrize("name", CASES)
def test_no_defenses_is_the_plain_strategy(name: str) -> None:
    plain = toy.state_of(*toy.fit("auto", **CASES[name]))
    taps: list[object] = []
    for strategy in ("auto", "single_device", SingleDeviceStrategy("cpu")):
        defended = DefendedStrategy(strategy)
        defended.add_tap(lambda stage, _: taps.append(stage))
        assert toy.same(plain, toy.state_of(*toy.fit(defended, **CASES[name])))
    assert taps
    assert len(plain["losses"]) == 6


def test_a_skipping_grad_scaler_is_the_plain_one() -> None:
    stages: list[object] = []
    plain = toy.state_of(*toy.fit("auto", toy.Bursting, plugins=toy.scaled()))
    strategy = DefendedStrategy()
    strategy.add_tap(lambda stage, _: stages.append(stage))
    assert toy.same(plain, toy.state_of(*toy.fit(strategy, toy.Bursting, plugins=toy.scaled())))
    assert len(stages) == 5 * 3


def test_validation_without_a_fit_is_the_plain_one() -> None:
    found = []
    for strategy in ("auto", DefendedStrategy(), DefendedStrategy(defenses=[Freeze("head")])):
        torch.manual_seed(0)
        model = toy.ToyLM()
        [result] = toy.trainer(strategy).validate(model, toy.loader(8), verbose=False)
        trained = all(p.requires_grad for p in model.parameters())
        found.append((result, trained, torch.get_rng_state()))
    assert toy.same(found[0], found[1])
    assert toy.same(found[0], found[2])


class Reseeding(toy.ToyLM):
    """Dropout draws from the global RNG, whose state a checkpoint does not hold."""

    def on_train_batch_start(self, batch, batch_idx) -> None:
        torch.manual_seed(self.trainer.global_step)


def test_resume_is_the_uninterrupted_run(tmp_path) -> None:
    whole = toy.state_of(*toy.fit("auto", Reseeding, shuffle=False, max_epochs=2))
    keep = ModelCheckpoint(dirpath=tmp_path, save_last=True)
    more = {"callbacks": [keep], "enable_checkpointing": True}
    toy.fit(DefendedStrategy(), Reseeding, shuffle=False, **more)
    last = str(tmp_path / "last.ckpt")
    assert CHECKPOINT_KEY not in torch.load(last, weights_only=True)
    again = toy.fit(DefendedStrategy(), Reseeding, shuffle=False, max_epochs=2, ckpt_path=last)
    resumed = toy.state_of(*again)
    assert toy.same(whole["weights"], resumed["weights"])
    assert toy.same(whole["optimizers"], resumed["optimizers"])
    assert whole["losses"][6:] == resumed["losses"]
