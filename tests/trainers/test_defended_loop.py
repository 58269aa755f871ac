"""Defences in a loop of one's own: what it must do, what is refused, what goes on."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from accelerate import Accelerator
from opacus import GradSampleModule, PrivacyEngine
from opacus.accountants import RDPAccountant
from opacus.optimizers import DistributedDPOptimizer, DPOptimizer
from torch import Tensor, nn
from torch.nn import DataParallel
from torch.utils.data import DataLoader

from lightning_fedleak import BagOfWords, FCMembership, LeakageMonitor
from lightning_fedleak.defenses import DPSGD, DefenseContext, DefenseError, GradientNoise
from lightning_fedleak.defenses.dp_optimizers import declared
from lightning_fedleak.engine import Games, WatchSettings
from lightning_fedleak.model.anatomy import EMBEDDING_WEIGHT
from lightning_fedleak.strategies import DefendedStrategy
from lightning_fedleak.trainers import DefendedLoop, Threshold, Watch
from tests.callbacks.runs import Probe
from tests.helpers.loops import lines_of
from tests.helpers.models import tiny_gpt2, tiny_llama
from tests.helpers.settings import QUIET, grouped
from tests.trainers.hosts import BATCH, CLIP, N, rows


class Loop:
    """A model, its optimizer, and a training as a user writes it."""

    def __init__(self, defense: Any, model: Any = None, lr: float = 0.05, **settings: Any) -> None:
        self.model = tiny_llama().train() if model is None else model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr)
        self.schedule = torch.optim.lr_scheduler.LinearLR(self.optimizer, total_iters=6)
        self.defense, loader = defense, DataLoader(rows(), batch_size=BATCH, shuffle=True)
        given = {"epochs": 1} | settings
        self.private = DefendedLoop(self.model, self.optimizer, loader, [defense], **given)

    def compute(self, batch: Any) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        return loss

    def step(self, batch: Any) -> None:
        self.private.loss(self.compute, batch).backward()
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()

    def train(self, epochs: int = 1) -> int:
        """Return how many batches came."""
        count = 0
        with self.private:
            for _ in range(epochs):
                for batch in self.private:
                    self.step(batch)
                    count += 1
        return count


def test_a_loop_ends_with_its_budget_and_goes_on_from_a_folder(tmp_path: Path) -> None:
    known: dict[str, Any] = {"target_epsilon": 5.0, "target_delta": 1e-3, "accountant": "rdp"}
    first = Loop(DPSGD(CLIP, **known), epochs=2)
    assert first.train() == len(first.private) == N // BATCH == 6
    first.private.save(tmp_path)
    again = Loop(DPSGD(CLIP, **known), epochs=2)
    again.private.restore(tmp_path)
    assert again.train(epochs=3) == 6
    assert again.private.should_stop
    assert again.defense.noise_multiplier == first.defense.noise_multiplier
    assert again.defense.privacy.releases == 12
    assert 4.95 < again.defense.privacy.epsilon <= 5.0
    again.private.save(tmp_path)
    last = Loop(DPSGD(CLIP, **known), epochs=2)
    last.private.restore(tmp_path)
    assert last.train() == 0
    with pytest.raises(DefenseError, match=r"has no defenses.safetensors"):
        last.private.restore(tmp_path / "other")


def forgets(loop: Loop, batch: Any) -> None:
    loop.private.loss(loop.compute, batch).backward()
    loop.optimizer.step()


def accumulates(loop: Loop, batch: Any) -> None:
    loop.private.loss(loop.compute, batch).backward()


def clips(loop: Loop, batch: Any) -> None:
    loop.private.loss(loop.compute, batch).backward()
    torch.nn.utils.clip_grad_norm_(loop.model.parameters(), 1e-3)
    loop.optimizer.step()


def casts(loop: Loop, batch: Any) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        loop.private.loss(loop.compute, batch)


def twice(loop: Loop, batch: Any) -> None:
    loop.private.loss(loop.compute, batch).backward()
    loop.optimizer.step()
    loop.optimizer.step()


def writes(loop: Loop, batch: Any) -> None:
    loop.private.loss(loop.compute, batch).backward()
    for p in loop.model.parameters():
        p.data -= 0.1 * p.grad
    loop.optimizer.zero_grad()


def other(loop: Loop, batch: Any) -> None:
    loop.private.loss(loop.compute, batch).backward()
    torch.optim.SGD(loop.model.parameters(), 0.1).step()


def repeats(loop: Loop, batch: Any) -> None:
    loop.step(batch)
    loop.step(batch)


def skips(loop: Loop, batch: Any) -> None:
    """Continue with the next batch."""


def own_batch(loop: Loop, batch: Any) -> None:
    loop.private.loss(loop.compute, {name: value[:1] for name, value in batch.items()})
    loop.private.loss(loop.compute, {name: value[1:] for name, value in batch.items()})


def test_weights_written_after_the_last_step_are_refused() -> None:
    loop = Loop(DPSGD(CLIP, 1.0, seed=2))

    def train() -> None:
        with loop.private:
            for batch in loop.private:
                loop.step(batch)
            loop.model.lm_head.weight.data[0] += 1e-3

    with pytest.raises(DefenseError, match=r"'lm_head.weight' was written to since"):
        train()
    assert loop.train() > 1  # its hooks are removed, and the weights are read again


def test_two_optimizers_are_refused_where_an_example_is_clipped_as_a_whole() -> None:
    loop = Loop(DPSGD(CLIP, 1.0, seed=2))
    both = [torch.optim.SGD([p], 0.1) for p in list(loop.model.parameters())[:2]]
    loader = DataLoader(rows(), batch_size=BATCH)
    with pytest.raises(DefenseError, match="one optimizer, with parameter groups"):
        DefendedLoop(loop.model, both, loader, [DPSGD(CLIP, 1.0)], epochs=1)
    DefendedLoop(loop.model, both, loader, [GradientNoise(1.0, 1.0)], epochs=1)


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (forgets, r"gradients are there before backward.*zero_grad\(set_to_none=True\)"),
        (accumulates, "To accumulate gradients, use DPSGD.max_physical_batch_size"),
        (clips, "is not the sum of its recorded per-sample gradients"),
        (casts, "autocast to torch.bfloat16.*pass precision='bf16-mixed'"),
        (twice, "nothing was released"),
        (writes, "not released once"),
        (repeats, "released once.*one loss"),
        (skips, "released once.*even an empty"),
        (other, r"DefendedLoop does not know.*Pass it to DefendedLoop"),
        (own_batch, "let no hook or callback add|before the first was released"),
    ],
)
def test_what_breaks_the_guarantee_is_refused(step: Any, message: str) -> None:
    loop = Loop(DPSGD(CLIP, 1.0, seed=2))

    def train() -> None:
        with loop.private:
            for batch in loop.private:
                step(loop, batch)

    with pytest.raises(DefenseError, match=message):
        train()


@pytest.mark.parametrize("more", [0, 1], ids=["one batch", "several"])
def test_batches_in_a_list_are_refused_before_any_release(more: int) -> None:
    loop = Loop(DPSGD(CLIP, 1.0, seed=2))
    if not more:
        loop.private._loader = DataLoader(rows(BATCH), batch_size=BATCH)
    with loop.private, pytest.raises(DefenseError, match="For each batch of this loop"):
        list(loop.private)
    assert loop.defense.releases == 0


def test_workers_that_draw_ahead_do_not_let_a_batch_be_released_twice() -> None:
    loop = Loop(DPSGD(CLIP, 1.0, seed=2))
    loop.private._loader = DataLoader(rows(), batch_size=BATCH, num_workers=1)
    with loop.private:
        batches = iter(loop.private)
        batch = next(batches)
        loop.step(batch)
        with pytest.raises(DefenseError, match="released once"):
            loop.step(batch)
        batches.close()  # type: ignore[attr-defined]
    assert loop.defense.releases == 1


def test_a_batch_of_another_loader_is_refused() -> None:
    loop = Loop(DPSGD(CLIP, 1.0, seed=2))
    with loop.private, pytest.raises(DefenseError, match="is of another loop"):
        loop.step(next(iter(DataLoader(rows(), batch_size=BATCH))))


def test_a_loop_may_end_in_the_middle_of_an_epoch() -> None:
    loop = Loop(DPSGD(CLIP, 1.0, seed=2), epochs=2)
    with loop.private:
        for _ in range(2):
            for number, batch in enumerate(loop.private):
                loop.step(batch)
                if number == 1:
                    break
    assert loop.defense.releases == 4


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Loop(DPSGD(CLIP, 1.0), tiny_llama().eval()), r"Call `model.train\(\)`"),
        (lambda: Loop(DPSGD(CLIP, 1.0), DataParallel(tiny_llama().train())), "Under DataParallel"),
        (lambda: Loop(DPSGD(CLIP, 1.0), precision="16-mixed"), "Use 'bf16-mixed'"),
        (
            lambda: Loop(DPSGD(CLIP, target_epsilon=3.0, target_delta=1e-3), epochs=None),
            "give DefendedLoop epochs= or steps=",
        ),
    ],
)
def test_settings_are_refused_when_the_loop_begins(build: Any, message: str) -> None:
    with pytest.raises(DefenseError, match=message):
        build().train()


def test_a_loader_that_accelerate_has_prepared_is_refused_and_a_plain_one_taken() -> None:
    accelerator = Accelerator(cpu=True)
    loader = DataLoader(rows(), batch_size=BATCH)
    model, optimizer = tiny_llama().train(), None
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    defense = DPSGD(CLIP, 1.0)
    refused = DefendedLoop(model, optimizer, accelerator.prepare(loader), [defense], epochs=1)
    with pytest.raises(DefenseError, match="return a plain torch DataLoader"):
        refused.__enter__()
    with DefendedLoop(model, optimizer, loader, [defense], epochs=1) as private:
        for batch in private:
            accelerator.backward(private.loss(lambda given: model(**given).loss, batch))
            optimizer.step()
            optimizer.zero_grad()
    assert defense.releases == 6


def test_noise_is_added_once_an_accumulated_step(tmp_path: Path) -> None:
    loop = Loop(defense := GradientNoise(1.0, 0.1))
    with loop.private:
        for number, batch in enumerate(loop.private):
            loop.private.loss(loop.compute, batch).backward()
            if number % 2:
                loop.optimizer.step()
                loop.optimizer.zero_grad()
    assert defense.releases == 3


def test_a_watch_reads_what_is_shared(tmp_path: Path) -> None:
    defense = DPSGD(CLIP, target_epsilon=8.0, target_delta=1e-3, accountant="filter")
    loop = Loop(defense, tiny_gpt2(tied=False, dropout=0.0).train(), 1e-3)
    settings = WatchSettings(stages=("local", "shared"))
    gate = Threshold("leakage/bag_of_words/f1", at_most=-1.0, action="harden")
    watch = Watch(
        loop.model, loop.optimizer, [BagOfWords()], [gate], folder=tmp_path, every_n_steps=1,
        settings=settings,
    )  # fmt: skip
    with loop.private, watch:
        for batch in loop.private:
            with watch.step(batch):
                loop.step(batch)
    latest = watch.latest
    assert latest["leakage_local/bag_of_words/f1"] > latest["leakage/bag_of_words/f1"] + 0.1
    assert latest["privacy/epsilon"] == defense.privacy.epsilon
    assert gate.notches == defense.notches > 0


# Under a DP optimizer of another library what leaves is read inside its step, or is unknown.


WORDS, WIDTH, ROWS, LENGTH = 200, 16, 4, 6
NOISE, OPTIMIZERS_CLIP = 1.0, 0.5
F1 = "leakage/bag_of_words/f1"


class LM(nn.Module):
    """A language model of layers that Opacus knows."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        states = self.emb(input_ids)
        for block in self.blocks:
            states = torch.tanh(block(states))
        logits = self.head(states)
        if labels is None:
            return {"logits": logits}
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": loss, "logits": logits}


def optimizers_rows(count: int) -> list[dict[str, Tensor]]:
    ids = torch.randint(3, WORDS, (count, LENGTH), generator=torch.Generator().manual_seed(3))
    return [{"input_ids": x, "labels": x} for x in ids]


def batch(step: int) -> dict[str, Tensor]:
    part = optimizers_rows(64)[step * ROWS : (step + 1) * ROWS]
    return {name: torch.stack([row[name] for row in part]) for name in part[0]}


def private(kind: type[DPOptimizer] = DPOptimizer, **settings: Any) -> tuple[nn.Module, Any]:
    """Return a model, and a DP optimizer whose noise has a seed of its own."""
    torch.manual_seed(7)
    model = GradSampleModule(LM())
    generator = torch.Generator().manual_seed(11)
    known = {
        "noise_multiplier": NOISE, "max_grad_norm": OPTIMIZERS_CLIP, "expected_batch_size": ROWS,
    }  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return model, kind(optimizer, generator=generator, **grouped(known | settings))


def train(model, optimizer, watch, steps=3, parts=1) -> list[Tensor]:
    """Return the gradient of the embeddings that each step was really taken with."""
    applied: list[Tensor] = []
    inner = getattr(optimizer, "original_optimizer", optimizer)
    embedding = model.get_submodule("_module.emb" if hasattr(model, "_module") else "emb")
    inner.register_step_pre_hook(lambda *_: applied.append(embedding.weight.grad.clone()))
    for number in range(steps * parts):
        one = batch(number)
        with torch.enable_grad() if watch is None else watch.step(one):
            if parts > 1:
                optimizer.signal_skip_step(do_skip=(number + 1) % parts != 0)
            optimizer.zero_grad()
            model(**one)["loss"].backward()
            optimizer.step()
    return applied


def watch_of(model, optimizer, folder, *more, **settings) -> tuple[Watch, Probe]:
    probe = Probe(role=EMBEDDING_WEIGHT)
    attacks = [BagOfWords(), probe, *more]
    defaults = {"every_n_steps": 1, "tensorboard": False, "games": Games(targets=2)}
    given = grouped(settings, folder=folder, **defaults)
    return Watch(model, optimizer, attacks, **given), probe


class Levels(Probe):
    """Keeps the standard deviation of the noise that it knows of."""

    def run(self, view: Any, query: Any = None) -> Any:
        self.levels = [*getattr(self, "levels", []), view.gradients[-1].noise_std]
        return super().run(view, query)


def test_what_is_read_is_what_the_step_is_taken_with_and_its_noise_known(tmp_path: Path) -> None:
    model, optimizer = private()
    unwatched, plain_optimizer = private()
    levels = Levels(name="levels", role=EMBEDDING_WEIGHT)
    watch, probe = watch_of(model, optimizer, tmp_path, levels)
    with watch:
        applied = train(model, optimizer, watch)
    assert all(map(torch.equal, applied, train(unwatched, plain_optimizer, None)))
    assert len(probe.at("shared")) == 3
    assert all(map(torch.equal, probe.at("shared"), applied))
    assert watch.latest[F1] < 0.5  # every row of the noise is other than 0
    assert all(map(torch.equal, model.state_dict().values(), unwatched.state_dict().values()))
    assert "step" not in vars(optimizer.original_optimizer)
    assert levels.levels == [NOISE * OPTIMIZERS_CLIP / ROWS] * 3
    for step, gradient in enumerate(applied):
        silent = torch.ones(WORDS, dtype=torch.bool)
        silent[batch(step)["input_ids"].unique()] = False
        assert float(gradient[silent].std()) == pytest.approx(levels.levels[0], rel=0.05)


@pytest.mark.parametrize(
    ("mode", "clipping"), [("hooks", "flat"), ("hooks", "per_layer"), ("ghost", "flat")]
)
def test_optimizers_of_an_engine_are_read_and_their_epsilon_is_logged(tmp_path, mode, clipping):
    torch.manual_seed(7)
    model = LM()
    engine = PrivacyEngine()
    model, optimizer, *_ = engine.make_private(
        module=model, optimizer=torch.optim.AdamW(model.parameters(), 1e-3),
        data_loader=torch.utils.data.DataLoader(optimizers_rows(64), batch_size=ROWS),
        criterion=nn.CrossEntropyLoss(), noise_multiplier=NOISE,
        max_grad_norm=OPTIMIZERS_CLIP if clipping == "flat" else [OPTIMIZERS_CLIP / 2] * 6,
        clipping=clipping, grad_sample_mode=mode,
    )  # fmt: skip
    watch, probe = watch_of(model, optimizer, tmp_path)
    with watch:
        if mode == "hooks":
            applied = train(model, optimizer, watch)
        else:
            applied = train_ghost(model, optimizer, watch)
    assert all(map(torch.equal, probe.at("shared"), applied))
    assert len(probe.at("shared")) == 3
    known = watch.latest["privacy/epsilon"]
    assert known == pytest.approx(engine.get_epsilon(watch.latest["privacy/delta"]), rel=0.02)


def train_ghost(model: Any, optimizer: Any, watch: Watch) -> list[Tensor]:
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    criterion = DPLossFastGradientClipping(model, optimizer, nn.CrossEntropyLoss())
    applied: list[Tensor] = []
    inner = optimizer.original_optimizer
    inner.register_step_pre_hook(lambda *_: applied.append(model._module.emb.weight.grad.clone()))
    for number in range(3):
        one = batch(number)
        with watch.step(one):
            optimizer.zero_grad()
            logits = model(one["input_ids"])["logits"][:, -1]
            criterion(logits, one["labels"][:, -1]).backward()
            optimizer.step()
    return applied


def test_parts_of_a_virtual_batch_are_no_steps(tmp_path: Path) -> None:
    """What leaves is of all parts, and so is the truth."""
    model, optimizer = private(noise_multiplier=0.0, expected_batch_size=2 * ROWS)
    watch, probe = watch_of(model, optimizer, tmp_path)
    with watch:
        applied = train(model, optimizer, watch, steps=3, parts=2)
    assert watch.loop.steps == 3
    assert [step for step, *_ in probe.seen] == [0, 1, 2]
    assert all(map(torch.equal, probe.at("shared"), applied))
    words = lines_of(tmp_path, "bag_of_words")
    for step, line in enumerate(words):
        both = torch.cat([batch(2 * step)["input_ids"], batch(2 * step + 1)["input_ids"]])
        assert line["n"] == len(both[:, :-1].unique())
        assert line["metrics"]["f1"]["value"] == 1.0


def test_before_its_step_nothing_is_known_and_without_an_account_no_epsilon(tmp_path: Path) -> None:
    model, optimizer = private()
    watch, _ = watch_of(
        model, optimizer, tmp_path, FCMembership(1), stages=("local", "shared"),
        anatomy={"blocks": "_module.blocks"},
    )  # fmt: skip
    with watch, pytest.warns(UserWarning, match="per-example ones"):
        train(model, optimizer, watch)
    assert math.isnan(watch.latest["leakage_local/bag_of_words/f1"])
    assert not any("epsilon" in name for name in watch.latest)
    whys = {line["unknown"] for line in lines_of(tmp_path, "fc_membership")}
    assert any("does not say what it does to a canary" in (why or "") for why in whys)


class Noises(torch.optim.SGD):
    """Adds noise inside of its step, where nobody sees what it is taken with."""

    noise_multiplier = 1.0

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad += torch.randn(parameter.shape)
        return super().step(closure)


def patched(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    optimizer.privacy_engine = object()  # type: ignore[attr-defined]
    return optimizer


@pytest.mark.parametrize("make", [Noises, lambda p, lr: patched(torch.optim.SGD(p, lr))])
def test_what_cannot_be_read_inside_is_unknown_and_never_the_raw_gradient(tmp_path, make) -> None:
    torch.manual_seed(7)
    model = LM()
    optimizer = make(model.parameters(), 0.1)
    stages = ("local", "shared", "aggregate")
    watch, probe = watch_of(model, optimizer, tmp_path, stages=stages)
    with watch, pytest.warns(UserWarning, match="adds noise inside its step"):
        train(model, optimizer, watch)
    assert math.isnan(watch.latest[F1])
    assert math.isnan(watch.latest["leakage_aggregate/bag_of_words/f1"])
    assert watch.latest["leakage_local/bag_of_words/f1"] == 1.0
    assert not probe.at("shared")
    assert not probe.at("aggregate")


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    file = f"file://{tmp_path}/store"
    torch.distributed.init_process_group("gloo", init_method=file, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("client", ["rank", "world"])
def test_a_client_shares_what_it_noised_and_all_what_was_reduced(tmp_path, one_process, client):
    """The sum over processes is made twice as large here, as if there were another process."""
    model, optimizer = private(DistributedDPOptimizer)
    reduce = optimizer.reduce_gradients

    def doubled() -> None:
        reduce()
        for parameter in optimizer.params:
            parameter.grad *= 2

    optimizer.reduce_gradients = doubled
    stages = ("shared", "aggregate")
    watch, probe = watch_of(model, optimizer, tmp_path, stages=stages, client=client)
    with watch:
        applied = train(model, optimizer, watch)
    assert all(map(torch.equal, probe.at("aggregate") or probe.at("shared"), applied))
    factor = 1.0 if client == "world" else 2.0
    shared = [gradient * factor for gradient in probe.at("shared")]
    assert len(shared) == 3
    assert all(map(torch.equal, shared, applied))
    assert optimizer.reduce_gradients is doubled


@pytest.mark.parametrize(
    ("rank", "clients", "reduced", "std"),
    [(0, 1, False, 0.125), (1, 1, False, 0.0), (1, 1, True, 0.0625), (0, 2, True, 0.0625)],
)
def test_the_noise_of_several_processes(rank: int, clients: int, reduced: bool, std: float) -> None:
    """One process adds it; behind the mean over clients it is divided as a monitor divides it."""
    _, optimizer = private()
    optimizer.rank, optimizer.world_size = rank, 2
    for parameter in optimizer.params:
        parameter.grad_sample = torch.zeros(1)
    (dp,) = declared([optimizer], under_ddp=False)
    dp._reduced = reduced
    device = torch.device("cpu")
    context = DefenseContext(nn.Linear(1, 1), rank, clients, device, "32-true", 0, b"")
    assert dp.noise_std(context) / clients**0.5 == pytest.approx(std)


def test_releases_of_several_kinds_are_counted_once() -> None:
    _, optimizer = private()
    accountant = RDPAccountant()
    optimizer.attach_step_hook(accountant.get_optimizer_hook_fn(sample_rate=0.1))
    (dp,) = declared([optimizer], under_ddp=False)
    for noise in (2.0, 1.0, 2.0, 2.0, 1.0):
        accountant.step(noise_multiplier=noise, sample_rate=0.1)
        cost = dp.privacy
    assert (cost.releases, cost.noise_multiplier, cost.sample_rate) == (5, 1.0, 0.1)
    assert cost.epsilon <= accountant.get_epsilon(cost.delta)
    assert cost.epsilon > 0.7 * accountant.get_epsilon(cost.delta)


def test_under_ddp_the_raw_gradients_leave_before_it() -> None:
    _, optimizer = private()
    (dp,) = declared([optimizer], under_ddp=True)
    assert "DifferentiallyPrivateDistributedDataParallel" in (dp.why_hidden("shared") or "")


class Module(L.LightningModule):
    def __init__(self, applied: list[Tensor], parts: int) -> None:
        super().__init__()
        self.model, self.optimizer = private(expected_batch_size=ROWS * parts)
        self.applied, self.parts = applied, parts

    def training_step(self, batch: Any, index: int) -> Tensor:
        if self.parts > 1:
            self.optimizer.signal_skip_step(do_skip=(index + 1) % self.parts != 0)
        loss: Tensor = self.model(**batch)["loss"]
        return loss

    def configure_optimizers(self) -> Any:
        weight = self.model._module.emb.weight
        inner = self.optimizer.original_optimizer
        inner.register_step_pre_hook(lambda *_: self.applied.append(weight.grad.clone()))
        return self.optimizer


def test_a_lightning_trainer(tmp_path: Path) -> None:
    parts = 2

    def run(callbacks: list[L.Callback], strategy: Any = "auto") -> list[Tensor]:
        applied: list[Tensor] = []
        trainer = L.Trainer(max_steps=4, callbacks=callbacks, strategy=strategy, **QUIET)
        trainer.fit(
            Module(applied, parts),
            torch.utils.data.DataLoader(optimizers_rows(64), batch_size=ROWS),
        )
        return applied

    probe = Probe(role=EMBEDDING_WEIGHT)
    monitor = LeakageMonitor([BagOfWords(), probe], every_n_steps=1, folder=tmp_path)
    applied = run([monitor])
    assert all(map(torch.equal, applied, run([])))
    assert len(probe.at("shared")) == len(applied) == 4 // parts
    assert all(map(torch.equal, probe.at("shared"), applied))
    words = lines_of(tmp_path, "bag_of_words")
    for number, line in enumerate(words):
        read = [batch(number * parts + part)["input_ids"] for part in range(parts)]
        assert line["n"] == len(torch.cat(read)[:, :-1].unique())
    with pytest.raises(ValueError, match="use one of the two"):
        run([monitor], DefendedStrategy(defenses=[GradientNoise(1.0, 1e-3)]))
