"""No operation mixes devices, and only measurement steps synchronise with the host.

A fake device (:mod:`tests.helpers.fake_device`) computes on the host, refuses what a GPU refuses,
and counts what makes the host wait. Where there is a CUDA device, the same is tested on it.
"""

import argparse
import inspect
import tempfile
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import lightning as L
import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import DataLoader

import lightning_fedleak as fedleak
from benchmarks import shared
from benchmarks.cost import gpu
from lightning_fedleak import attacks
from lightning_fedleak.attacks import (
    Guess,
    MembershipAttack,
    PassiveMembership,
    Query,
    RunFacts,
    gradient_of,
)
from lightning_fedleak.attacks import base as attacks_base
from lightning_fedleak.attacks.membership.base import CRAFTED
from lightning_fedleak.attacks.memorization import Loss, MemorizationAttack
from lightning_fedleak.attacks.words import aligned_readout
from lightning_fedleak.defenses.dpsgd.setup_checks import check_trainer
from lightning_fedleak.defenses.host import Host
from lightning_fedleak.engine import scheduler
from lightning_fedleak.engine.channels.released.weights import WeightLooks
from lightning_fedleak.evaluation.games import GameConfig, SentencePool, play
from lightning_fedleak.evaluation.games.play import generic_upstream
from lightning_fedleak.model.anatomy import find_anatomy
from lightning_fedleak.model.batches import TokenBatch
from lightning_fedleak.model.model_runs import hidden_states
from lightning_fedleak.model.snapshots import (
    ActivationSnapshot,
    GradientSnapshot,
    Observation,
    Stage,
)
from lightning_fedleak.model.taps.tokens import Text, token_log_probs
from tests.callbacks.runs import monitor_with
from tests.engine.channels.test_memorization import monitor as memorization_monitor
from tests.engine.channels.test_memorization import rows
from tests.helpers.fake_device import DEVICE, FakeDevice, MixedDevices, single_device
from tests.helpers.gpu import DEVICES, Gpu, strategy_of
from tests.helpers.lightning_modules import CausalLMModule, random_token_loader
from tests.helpers.models import VOCAB, tiny_bert_mlm, tiny_llama
from tests.helpers.settings import QUIET

ROWS, LENGTH = 2, 6


def ids_of(rows: int, length: int, seed: int) -> Tensor:
    return torch.randint(3, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


PUBLIC = fedleak.PublicText(ids_of(24, 12, seed=1))
ATTACKS: dict[str, Callable[[], fedleak.Attack]] = {
    "flatchat": lambda: fedleak.FlatChat(PUBLIC, shapes=((2, 4), (3, 6))),
    "aligned": lambda: fedleak.AlignedFlatChat(PUBLIC, calibration_tokens=100),
    "bag_of_words": fedleak.BagOfWords,
    "bias_sign": fedleak.BiasSign,
    "subspace_words": lambda: fedleak.SubspaceWords(PUBLIC, capacity_seconds=1e-9),
    "fc, token": lambda: fedleak.FCMembership(1),
    "fc, full": lambda: fedleak.FCMembership(1, "full", tokens=LENGTH),
    "words, token": lambda: attacks.WordMembership(1, PUBLIC, "token", tokens=LENGTH, batch=2),
    "words, full": lambda: attacks.WordMembership(1, PUBLIC, tokens=LENGTH, batch=2),
    "attention": lambda: fedleak.AttentionMembership(1, PUBLIC, batch=2),
    "gradient": lambda: fedleak.GradientMembership(PUBLIC, public_rows=8, controls=3),
    "subspace": lambda: fedleak.SubspaceMembership(PUBLIC, public_rows=8),
    "subspace_texts": lambda: fedleak.SubspaceTexts(budget_seconds=None),
    "prefix_inversion": lambda: fedleak.PrefixInversion(1, PUBLIC, types=32),
    "embedding_descent": lambda: fedleak.EmbeddingDescent(1, steps=3, sweeps=1),
}


@pytest.fixture(autouse=True)
def _few_rehearsals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aligned_readout, "_REPEATS", 2)


@pytest.fixture(autouse=True)
def _math_attention():
    """Use SDPA's MATH kernel on both devices, so that results agree to rounding."""
    with sdpa_kernel(SDPBackend.MATH):
        yield


Device = type[FakeDevice | Gpu]


@pytest.fixture(params=DEVICES)
def device_type(request: pytest.FixtureRequest) -> Device:
    return request.param


def model_for(name: str) -> nn.Module:
    return (tiny_bert_mlm() if name == "bias_sign" else tiny_llama()).eval()


def observation_for(attack, anatomy, to_device) -> tuple[Observation, Query | None]:
    """A client's shared update for two texts, and the query, on the model's device."""
    ids = to_device(ids_of(ROWS, LENGTH, seed=2))
    if isinstance(attack, MembershipAttack):
        hidden = hidden_states(anatomy, attack.layer, ids)
        targets = attack.embed(hidden, Query(ids))
        generator = torch.Generator().manual_seed(3)
        upstream = generic_upstream(hidden, attack.granularity == "full", generator)
        crafted = attack.gradient(targets, hidden, None, upstream).sum(0)
        return Observation((GradientSnapshot(0, Stage.SHARED, {CRAFTED: crafted}),)), Query(ids)
    needs = attack.needs(anatomy)
    if needs.layers:
        hidden = hidden_states(anatomy, 1, ids)
        sent = ActivationSnapshot(0, Stage.SHARED, {needs.layers[0]: hidden})
        return Observation((), (sent,)), None
    batch = TokenBatch(ids, ids, None, anatomy.kind)
    shared = gradient_of(anatomy, batch, needs.gradients)
    query = Query(ids) if isinstance(attack, PassiveMembership) else None
    return Observation((GradientSnapshot(0, Stage.SHARED, shared, anatomy.tied),)), query


def run_attack(
    attack: fedleak.Attack, model: nn.Module, to_device: Callable[[Tensor], Tensor]
) -> Guess:
    """Calibrate the attack, refresh it and run it on one observation."""
    anatomy = find_anatomy(model)
    attack.meet(RunFacts())
    attack.prepare(anatomy)
    attack.refresh(anatomy, 0)
    return attack.run(*observation_for(attack, anatomy, to_device))


def unchanged(value: Tensor) -> Tensor:
    return value


def assert_same(one: Guess, other: Guess, *, without: Collection[str] = ()) -> None:
    for field in (field for field in fields(one) if field.name not in without):
        a, b = getattr(one, field.name), getattr(other, field.name)
        if not isinstance(a, Tensor) or not isinstance(b, Tensor):
            assert isinstance(a, Tensor) == isinstance(b, Tensor), field.name
            continue
        b = b.cpu()
        if field.name == "types":  # near ties change places by rounding
            a, b = a.sort().values, b.sort().values
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4, msg=field.name)


def concrete_subclasses(kind: type) -> set[type]:
    subclasses = set().union(*(concrete_subclasses(sub) for sub in kind.__subclasses__()))
    in_package = kind.__module__.startswith(attacks.__name__)
    return subclasses | ({kind} if in_package and not inspect.isabstract(kind) else set())


def test_every_attack_is_tested() -> None:
    tested = {type(make()) for make in ATTACKS.values()}
    # Those on the trained weights compute on the CPU, from the token log-probabilities.
    assert tested == concrete_subclasses(fedleak.Attack) - concrete_subclasses(MemorizationAttack)


def test_token_log_probs_agree_across_devices(device_type: Device) -> None:
    model = model_for("flatchat")
    texts = [Text(ids, ids) for ids in torch.arange(3, 33).view(3, 10)]
    here = token_log_probs(find_anatomy(model), texts)
    with device_type() as device:
        there = token_log_probs(find_anatomy(device.model(model)), texts)
    torch.testing.assert_close([*there], [*here])


@pytest.mark.filterwarnings("ignore:attack 'aligned_flatchat'")
@pytest.mark.parametrize("name", ATTACKS)
def test_attack_results_agree_across_devices(name: str, device_type: Device) -> None:
    here = run_attack(ATTACKS[name](), model_for(name), unchanged)
    attack = ATTACKS[name]()
    with device_type(without_float64=not attack.needs_float64) as device:
        there = run_attack(attack, device.model(model_for(name)), device.put)
    assert device.synchronisations.total() > 0
    # A readout is learned from what the generator of the device draws, which has its own numbers.
    drawn = ("scores",) if name == "aligned" and device_type is Gpu else ()
    assert_same(here, there, without=drawn)
    if attack.needs_float64 and device_type is FakeDevice:
        with (
            FakeDevice(without_float64=True) as device,
            pytest.raises(TypeError, match="no float64"),
        ):
            run_attack(ATTACKS[name](), device.model(model_for(name)), device.put)


@pytest.mark.filterwarnings("ignore:attack 'aligned_flatchat'")
@pytest.mark.parametrize("name", ["flatchat", "aligned"])
def test_a_restored_calibration_moves_to_the_device_of_the_model(name, device_type) -> None:
    """A checkpoint's tensors are on the host."""
    calibrated = ATTACKS[name]()
    here = run_attack(calibrated, model_for(name), unchanged)
    state = {key: value.cpu().clone() for key, value in calibrated.state_dict().items()}
    with device_type() as device:
        attack = ATTACKS[name]()
        anatomy = find_anatomy(device.model(model_for(name)))
        attack.meet(RunFacts())
        attack.load_state_dict(state)
        attack.refresh(anatomy, 0)
        assert_same(here, attack.run(*observation_for(attack, anatomy, device.put)))


# ---- games ----------------------------------------------------------------------------------


def games(model: nn.Module, attacks: list[Any], **settings: Any) -> list[Any]:
    pool = SentencePool([ids_of(1, 3 + i % 4, seed=i)[0] for i in range(12)], tokens=LENGTH)
    return play(find_anatomy(model), attacks, pool, GameConfig(games=3, batch=3, **settings))


def crafted() -> list[fedleak.Attack]:
    return [ATTACKS[name]() for name in ("fc, token", "fc, full", "attention")]


def passive() -> list[fedleak.Attack]:
    return [ATTACKS[name]() for name in ("gradient", "subspace")]


@pytest.mark.parametrize(
    ("make_attacks", "settings"),
    [(crafted, {}), (crafted, {"targets_per_batch": 2}), (passive, {})],
)
def test_games_agree_across_devices(make_attacks, settings, device_type) -> None:
    here = games(tiny_llama().eval(), make_attacks(), **settings)
    with device_type() as device:
        there = games(device.model(tiny_llama().eval()), make_attacks(), **settings)
    for one, other in zip(here, there, strict=True):
        assert torch.equal(one.bits, other.bits)
        assert torch.equal(one.guesses, other.guesses)
        torch.testing.assert_close(one.scores, other.scores, rtol=1e-3, atol=1e-4)


# ---- fits -----------------------------------------------------------------------------------


class SyncCounter(L.Callback):
    """Counts what makes the host wait in each step, everything between two batches included."""

    def __init__(self, device: FakeDevice | Gpu) -> None:
        self.device, self.steps = device, []
        self.before: Counter[str] | None = None

    def count_step(self) -> None:
        now = self.device.synchronisations.copy()
        if self.before is not None:
            self.steps.append(now - self.before)
        self.before = now

    def on_train_batch_start(self, *args: object) -> None:
        self.count_step()

    def on_train_end(self, *args: object) -> None:
        self.count_step()


class PerSampleLossModule(CausalLMModule):
    """Uses the mean of per-sample losses, as DP-SGD requires."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        logits = self.model(input_ids=batch["input_ids"]).logits
        loss = fedleak.mean_of_sample_means(logits, batch["labels"], causal=True)
        self.log("train_loss", loss)
        return loss


@dataclass
class Fitted:
    steps: list[Counter[str]]
    metrics: dict[str, float]


def fit(
    monitor: fedleak.LeakageMonitor | None,
    *defenses: fedleak.Defense,
    there: bool = True,
    steps: int = 4,
    optimizer: Literal["sgd", "adamw"] = "adamw",
    device_type: Device = FakeDevice,
    **device_settings: Any,
) -> Fitted:
    private = any(isinstance(d, fedleak.DPSGD) for d in defenses)
    module = PerSampleLossModule if private else CausalLMModule
    # Words behind noise are unknown where a batch uses up the vocabulary.
    model = tiny_llama(vocab=2000 if private else 97).train()
    with device_type(**device_settings) as device:
        inner = strategy_of(device_type) if there else SingleDeviceStrategy("cpu")
        counter = SyncCounter(device)
        trainer = L.Trainer(
            strategy=fedleak.DefendedStrategy(inner, list(defenses)) if defenses else inner,
            max_steps=steps,
            max_epochs=-1,
            callbacks=[counter, *([monitor] if monitor else [])],
            default_root_dir=tempfile.mkdtemp(),
            **QUIET | {"accelerator": "auto" if there else "cpu"},
        )
        trainer.fit(
            module(device.model(model) if there else model, optimizer=optimizer),
            # Poisson batches of 20 of 160 are never empty.
            random_token_loader(160, 20) if private else random_token_loader(padded=True),
        )
    return Fitted(counter.steps, {k: float(v) for k, v in trainer.callback_metrics.items()})


def monitor_of(*names: str, every: int = 10, **settings: Any) -> fedleak.LeakageMonitor:
    return monitor_with(
        [ATTACKS[name]() for name in names],
        every_n_steps=every,
        games=fedleak.Games(targets=2),
        **settings,
    )


def test_the_host_waits_twice_in_a_step_of_dpsgd() -> None:
    """Before the forward for the last step's weights, and before the release for all checks.

    Steps 0, 1, 3 and 7 check the model's loss too.
    """
    private = fit(None, fedleak.DPSGD(1.0, noise_multiplier=1.0), steps=7).steps
    batches = fit(None).steps[2]["copy to the device"]  # and what the model copies
    for step in (2, 4, 5):
        waits = {"_local_scalar_dense": 1, "copy to the host": 1}
        assert private[step] == {"copy to the device": batches, **waits}
    assert private[3].total() > private[2].total()


@pytest.mark.parametrize(
    ("names", "defenses"),
    [
        (("flatchat", "fc, token", "subspace", "embedding_descent"), ()),
        (("flatchat", "fc, token"), (lambda: fedleak.DPSGD(1.0, noise_multiplier=1.0),)),
    ],
    ids=["plain", "dpsgd"],
)
def test_steps_without_a_look_add_no_host_synchronisation(names, defenses, device_type) -> None:
    """One attack per surface: words, crafted layers, trained gradients, hidden states."""
    plain = fit(None, *(make() for make in defenses), device_type=device_type)
    monitor = monitor_of(*names, assume=fedleak.DISHONEST_SERVER)
    watched = fit(monitor, *(make() for make in defenses), device_type=device_type)
    # Step 0 is a look, and step 1 too, since games need texts of another batch.
    assert watched.steps[0].total() > plain.steps[0].total()
    assert watched.steps[2:-1] == plain.steps[2:-1]
    # An epoch ends with the last step: the cost is logged to the Trainer's metrics at once, and the
    # training loss that the step has measured is read.
    at_end = watched.steps[-1] - plain.steps[-1]
    assert at_end.total() <= 2
    assert set(at_end) <= {"copy to the device", "waits", "_local_scalar_dense"}
    assert plain.steps[2].total() > 0
    assert watched.metrics["monitor/failures"] == 0


@pytest.mark.filterwarnings("ignore:attack 'aligned_flatchat'")
def test_looks_of_a_fit_agree_across_devices(device_type: Device) -> None:
    def monitor() -> fedleak.LeakageMonitor:
        names = ("flatchat", "fc, full", "embedding_descent")  # of each surface; all: above
        return monitor_of(*names, assume=fedleak.DISHONEST_SERVER, stages=("local", "shared"))

    noise = fedleak.GradientNoise(None, 0.0)
    here = fit(monitor(), noise, there=False, steps=2)
    there = fit(monitor(), noise, steps=2, device_type=device_type)
    assert there.metrics["monitor/failures"] == here.metrics["monitor/failures"] == 0
    rates = {name for name in here.metrics if name.startswith("leakage")}
    assert len(rates) > 30
    for name in rates:
        assert there.metrics[name] == pytest.approx(here.metrics[name], abs=2e-3, nan_ok=True), name


def test_trained_weights_are_asked_once_at_the_end_and_where_they_were_trained(
    device_type: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lightning moves the model to the CPU before the last hook, where sums round otherwise."""
    devices = []
    sums_of_weights = WeightLooks._sums_of_weights

    def noted(looks: WeightLooks) -> Tensor:
        devices.append(next(model.parameters()).device.type)
        return sums_of_weights(looks)

    monkeypatch.setattr(WeightLooks, "_sums_of_weights", noted)
    settings = fedleak.Memorization(max_overhead=20, looks=())
    monitor = memorization_monitor(tmp_path, [Loss()], settings)
    loader = DataLoader(fedleak.leave_out(rows(80), 40, seed=1)[0], batch_size=20, shuffle=True)
    with device_type() as device:
        model = device.model(tiny_llama(vocab=2000))
        settings = QUIET | {"accelerator": "auto", "strategy": strategy_of(device_type)}
        trainer = L.Trainer(max_epochs=1, callbacks=[monitor], **settings)
        trainer.fit(CausalLMModule(model), loader)
    # At the look, and at the ends of training and fit.
    assert devices == [strategy_of(device_type).root_device.type] * 3
    assert next(model.parameters()).device.type == "cpu"  # where Lightning put it
    assert monitor.engine.results.looks == 1


@pytest.mark.slow
def test_what_make_gpu_measures_runs_on_the_device(monkeypatch, tmp_path) -> None:
    """Steps with looks of each kind, and DP-SGD beside its peers, as `make gpu` times them."""
    monkeypatch.setattr(scheduler, "Look", scheduler.Look)  # which the first of them replaces
    from benchmarks.cost import dpsgd, overhead

    looks = overhead.parser().parse_args(dict(gpu.SMALL)["overhead"].split())
    steps = dpsgd.parser().parse_args(dict(gpu.SMALL)["dpsgd"].split())
    looks.device = steps.device = DEVICE.type
    looks.out = tmp_path
    with FakeDevice() as device:

        def fit_there(module: L.LightningModule, loader: Any, **settings: Any) -> L.Trainer:
            settings = {"strategy": single_device(), **settings, "accelerator": "auto"}
            return shared.fit(device.model(module), loader, **settings)

        def defended(_: str, defenses: list[fedleak.Defense]) -> fedleak.DefendedStrategy:
            return fedleak.DefendedStrategy(single_device(), defenses)

        def built(options: argparse.Namespace) -> nn.Module:
            here = argparse.Namespace(**vars(options) | {"device": "cpu"})
            return device.model(build(here))

        build = dpsgd.build
        monkeypatch.setattr(overhead, "fit", fit_there)
        monkeypatch.setattr(dpsgd, "fit", fit_there)
        monkeypatch.setattr(dpsgd, "DefendedStrategy", defended)
        monkeypatch.setattr(dpsgd, "build", built)
        seconds = overhead.timed(looks)
        private = dpsgd.timed(steps, dpsgd.batch(steps))
    assert device.synchronisations.total() > 0
    counts = {arm: len(times) for arm, times in seconds.items()}
    counts["look"] += counts.pop("control")  # no control may be due
    assert counts == {"off": 2, "idle": 1, "look": 2, "all": 1}
    assert {arm: len(times) for arm, times in private.items()} == {"ours": 2, "plain": 2}


# ---- a device without float64 ---------------------------------------------------------------


@pytest.fixture
def without_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the fake device lack float64, as Apple's GPUs do."""
    monkeypatch.setattr(attacks_base, "WITHOUT_FLOAT64", frozenset({DEVICE.type}))


REFUSED = r"attack '{}' needs float64, which 'meta' does not have: use accelerator='cpu'"


def test_apples_gpus_have_no_float64() -> None:
    apple: Any = SimpleNamespace(device=torch.device("mps"))
    with pytest.raises(ValueError, match=r"'subspace_words' needs float64.*'mps'"):
        fedleak.SubspaceWords(PUBLIC).check_device(apple)
    fedleak.FCMembership(1).check_device(apple)
    context: Any = SimpleNamespace(device=torch.device("mps"), precision="32-true", host=Host())
    with pytest.raises(fedleak.DefenseError, match=r"float64.*mps.*accelerator='cpu'"):
        check_trainer(context)


def test_attacks_in_float64_are_refused_before_the_first_step(without_float64: None) -> None:
    with pytest.raises(ValueError, match=REFUSED.format("subspace_words")):
        fit(monitor_of("flatchat", "subspace_words"), without_float64=True)
    with FakeDevice(without_float64=True) as device:
        model = device.model(tiny_llama().eval())
        with pytest.raises(ValueError, match=REFUSED.format("attention_membership")):
            games(model, crafted())


# ---- the fake device itself -----------------------------------------------------------------


def test_the_fake_device_refuses_what_a_gpu_refuses_and_counts_synchronisations() -> None:
    with FakeDevice() as device:
        x = torch.arange(6.0, device=DEVICE)
        for mixed in (
            lambda: x + torch.ones(6),
            lambda: torch.cat([x, torch.ones(2)]),
            lambda: torch.ones(6)[x.long()],
            lambda: torch.randn(2, generator=torch.Generator(), device=DEVICE),
            lambda: torch.randn(2, generator=torch.Generator(DEVICE)),
        ):
            with pytest.raises(MixedDevices):
                mixed()
        with pytest.raises(TypeError, match="NumPy"):
            x.numpy()
        assert not device.synchronisations
        assert (x * torch.tensor(2.0)).device == DEVICE  # a number without dimensions may be mixed
        weights = nn.Parameter(x.clone())
        (weights.square().sum() * 2).backward()
        weights.grad.mul_(0.5).unsqueeze_(0)
        assert weights.grad.shape == (1, 6)
        assert not device.synchronisations
        assert (weights.grad.tolist(), x.sum().item()) == ([[0.0, 2.0, 4.0, 6.0, 8.0, 10.0]], 15.0)
        assert x[x > 3].tolist() == [4.0, 5.0]
        assert x[[1, 2]].tolist() == x[torch.tensor([1, 2])].tolist() == [1.0, 2.0]
        x[[0]] = torch.tensor([7.0], device=DEVICE)
        assert x.double().to("cpu", torch.int64)[0] == 7
    assert device.synchronisations == {
        "copy to the host": 5,
        "_local_scalar_dense": 1,
        "mask as an index": 1,
        "copy to the device": 4,
    }
    with FakeDevice(without_float64=True), pytest.raises(TypeError, match="no float64"):
        torch.ones(2, device=DEVICE).double()
