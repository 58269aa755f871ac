"""DPSGD without Lightning: releases, canaries, settings, checks in the run."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import scipy.stats
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_fedleak.defenses import (
    DPSGD,
    BudgetSpent,
    CanaryGradient,
    ClipSettings,
    DefenseError,
    GradientNoise,
    ReleaseSettings,
)
from lightning_fedleak.defenses import noise as noises
from lightning_fedleak.defenses.dpsgd import loss_graph
from lightning_fedleak.defenses.dpsgd.recorder import count_samples
from lightning_fedleak.strategies.seams import _LightningHost
from tests.helpers.inputs import context
from tests.helpers.models import own_rng, tiny_llama

N, CLIP = 40, 0.3


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with own_rng(0):
            self.below, self.above = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.above(torch.tanh(self.below(x)))


def data(n: int = N) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, 6, generator=generator)
    return TensorDataset(x, torch.randint(0, 3, (n,), generator=generator))


class Run:
    """What Lightning and DefendedStrategy do with one defence, in short."""

    def __init__(
        self, defense: DPSGD, root: nn.Module | None = None, loader: Any = None, **fields: Any
    ) -> None:
        self.root = Net() if root is None else root
        if hasattr(self.root, "_trainer"):
            fields = {"host": Unnumbered(self.root._trainer), **fields}  # type: ignore[arg-type]
        self.defense, self.context = defense, context(self.root, **fields)
        self.parameters = [p for p in self.root.parameters() if p.requires_grad]
        defense.before_setup(self.context)
        given = DataLoader(data(), batch_size=8) if loader is None else loader
        self.loader = defense.on_dataloader(given, self.context)

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.root(batch[0]), batch[1])

    def backward(self, batch: Any) -> Tensor:
        self.root.zero_grad()
        loss = self.defense.on_training_step(lambda: self.loss(batch), batch, self.context)
        loss.backward()
        return loss

    def release(self) -> Tensor:
        self.defense.before_release()
        with torch.no_grad():
            self.defense.on_gradients(self.parameters, self.context)
        return self.update()

    def update(self) -> Tensor:
        return torch.cat([p.grad.flatten() for p in self.parameters])

    def step(self, batch: Any, lr: float = 0.1) -> Tensor:
        self.backward(batch)
        update = self.release()
        with torch.no_grad():
            for parameter in self.parameters:
                parameter -= lr * parameter.grad
        return update

    def one_by_one(self, batch: Any) -> Tensor:
        """(B, d), the gradient of each sample's own loss."""
        rows = []
        for i in range(len(batch[0])):
            loss = self.loss([value[i : i + 1] for value in batch])
            rows.append(
                torch.cat([g.flatten() for g in torch.autograd.grad(loss, self.parameters)])
            )
        return torch.stack(rows)


class Pieces(Run):
    """Runs every batch as a logical one."""

    def __init__(self, defense: DPSGD, **settings: Any) -> None:
        super().__init__(defense, **settings)
        self.sizes: list[int] = []

    def piece(self, batch: Any) -> Tensor:
        def training_step() -> Tensor:
            # Neither in the rehearsal of the step, nor in that of its isolation.
            if torch.is_grad_enabled() and not self.defense._isolation.is_running:
                self.sizes.append(count_samples(batch))
            return self.loss(batch)

        return self.defense.on_training_step(training_step, batch, self.context)

    def backward(self, batch: Any) -> Tensor:
        loss = self.defense.on_logical_batch(self.piece, batch, self.context)
        self.root.zero_grad()
        loss.backward()
        return loss


def first(samples: int) -> list[Tensor]:
    return [value[:samples] for value in data().tensors]


def clipped(rows: Tensor, clip: float = CLIP) -> Tensor:
    return rows * (clip / rows.norm(dim=1).clamp(min=clip))[:, None]


def test_the_noise_is_what_is_accounted_also_in_an_empty_batch() -> None:
    defense = DPSGD(CLIP, noise_multiplier=1.5)
    run, residues = Run(defense), []
    for samples in [0, 5, 0, 12, 7] * 20:
        batch = first(samples)
        expected = clipped(run.one_by_one(batch)).sum(0) if samples else 0.0
        residues.append((8 * run.step(batch, lr=1e-3) - expected) / (1.5 * CLIP))
    residue = torch.cat(residues)
    low, high = scipy.stats.chi2.ppf([1e-4, 1 - 1e-4], residue.numel())
    assert low < float(residue.square().sum()) < high
    assert scipy.stats.kstest(residue.numpy(), "norm").pvalue > 1e-4
    assert defense.measured_noise_multiplier == pytest.approx(1.5, rel=0.4)
    assert defense.releases == defense.privacy.releases == 100


def test_an_empty_batch_does_not_run_the_module() -> None:
    run = Run(DPSGD(CLIP, noise_multiplier=1.0))
    called = []
    loss = run.defense.on_training_step(lambda: called.append(1), first(0), run.context)
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert not called
    assert bool(torch.isfinite(run.release()).all())


def test_noise_differs_by_client_and_release_and_is_not_replayed() -> None:
    draws = []
    for client in range(2):
        run = Run(DPSGD(CLIP, noise_multiplier=1.0), client=client, clients=2)
        draws += [run.step(first(0), lr=0.01) for _ in range(2)]
    resumed = DPSGD(CLIP, noise_multiplier=1.0)
    resumed.load_state_dict(run.defense.state_dict())
    later = Run(resumed, client=1, clients=2)
    draws.append(later.step(first(0)))
    for i, one in enumerate(draws):
        assert all(not torch.isin(one, other).any() for other in draws[:i])
    assert resumed.releases == resumed.privacy.releases == 3


def test_a_seed_is_ignored_after_a_resume_without_state() -> None:
    fresh, resumed = (DPSGD(CLIP, noise_multiplier=1.0, seed=3) for _ in range(2))
    resumed.load_state_dict({})
    a, b = Run(fresh).step(first(0)), Run(resumed).step(first(0))
    assert not torch.isin(a, b).any()
    assert fresh.privacy.epsilon == math.inf
    assert resumed.privacy.epsilon < math.inf
    assert "none" in fresh.guarantee


@pytest.mark.parametrize(("trust", "share"), [("local", 1.0), ("central", 2.0)])
def test_trust(trust: Any, share: float) -> None:
    defense = DPSGD(CLIP, noise_multiplier=1.0, release=ReleaseSettings(trust=trust))
    run = Run(defense, clients=4)
    noise = torch.cat([8 * run.step(first(0), lr=0.01) / CLIP for _ in range(60)])
    assert float(noise.std()) == pytest.approx(1 / share, rel=0.05)
    [variance] = set(defense.noise_variances(run.parameters, run.context).values())
    assert variance == pytest.approx((CLIP / share / 8) ** 2 / 4)  # of the mean over four clients
    assert defense.privacy.noise_multiplier == 1.0
    assert ("only the sum" in defense.guarantee) == (trust == "central")


# ---- the canary ------------------------------------------------------------------------------


def test_a_canary_is_clipped_in_each_samples_norm_and_noised_alike() -> None:
    defense = DPSGD(CLIP, noise_multiplier=0.7)
    run = Run(defense)
    batch = first(5)
    single = run.one_by_one(batch)
    generator = torch.Generator().manual_seed(2)
    canary = CanaryGradient(torch.randn(5, 3, 4000, generator=generator) * 0.004)
    run.backward(batch)
    gradients = [p.grad.clone() for p in run.parameters]
    first_look, second = (defense.on_canary(canary, run.parameters, run.context) for _ in range(2))
    assert all(torch.equal(p.grad, g) for p, g in zip(run.parameters, gradients, strict=True))
    for game in range(3):
        joint = torch.cat([single, 5 * canary.samples[:, game]], dim=1)
        expected = clipped(joint)[:, single.shape[1] :] / 8
        torch.testing.assert_close(first_look.samples[:, game], expected, rtol=1e-4, atol=1e-8)
    assert first_look.noise_std == pytest.approx(0.7 * CLIP / 8)
    assert float(first_look.noise.std()) == pytest.approx(0.7 * CLIP / 8, rel=0.05)
    product = first_look.noise * second.noise / first_look.noise_std**2
    assert abs(float(product.mean())) < 5 / math.sqrt(product.numel())
    update = run.release()
    plain = Run(DPSGD(CLIP, noise_multiplier=0.7)).step(batch)
    assert torch.equal(update, plain)


def test_a_canary_of_other_samples_or_with_noise_is_unknown() -> None:
    run = Run(DPSGD(CLIP, noise_multiplier=1.0))
    run.backward(first(5))
    with pytest.raises(DefenseError, match="4 samples, and the batch 5"):
        run.defense.on_canary(CanaryGradient(torch.ones(4, 1, 2)), run.parameters, run.context)
    noised = CanaryGradient(torch.ones(5, 1, 2), torch.ones(1, 2), 1.0)
    with pytest.raises(DefenseError, match="DPSGD before other noise"):
        run.defense.on_canary(noised, run.parameters, run.context)


# ---- accounting ------------------------------------------------------------------------------


def trainer(**settings: Any) -> SimpleNamespace:
    defaults = {
        "gradient_clip_val": None,
        "lr_scheduler_configs": [],
        "accumulate_grad_batches": 1,
        "world_size": 1,
        "max_epochs": 2,
        "max_steps": -1,
        "limit_train_batches": 1.0,
        "overfit_batches": 0,
        "optimizers": [],
        "should_stop": False,
        "train_dataloader": None,
        "callbacks": [],
        "strategy": SimpleNamespace(model=None, defenses=()),
        "lightning_module": SimpleNamespace(automatic_optimization=True),
    }
    return SimpleNamespace(**{**defaults, **settings})


class Unnumbered(_LightningHost):
    """Batches are told apart by what they are, and tests read gradients before releases."""

    batch_number = None  # type: ignore[assignment]
    reads_gradients = True  # type: ignore[assignment]


def test_the_budget_ends_the_run_before_it_is_overdrawn() -> None:
    root = Net()
    root._trainer = trainer()
    defense = DPSGD(CLIP, target_epsilon=3.0, target_delta=1e-3, accountant="rdp")
    run = Run(defense, root)
    assert len(run.loader) == 5
    for remaining in range(9, -1, -1):
        run.step(first(3))
        assert root._trainer.should_stop == (remaining == 0)
    assert 2.9 < defense.privacy.epsilon <= 3.0
    run.backward(first(3))
    before = run.update()
    with pytest.raises(BudgetSpent, match="after 10 releases one more would cost more"):
        run.release()
    assert torch.equal(run.update(), before)
    assert defense.releases == defense.accountant.steps == 10
    resumed = DPSGD(CLIP, target_epsilon=3.0, target_delta=1e-3, accountant="rdp")
    resumed.load_state_dict(defense.state_dict())
    assert resumed.noise_multiplier == defense.noise_multiplier
    longer = Net()
    longer._trainer = trainer(max_epochs=100)
    with pytest.raises(BudgetSpent):
        Run(resumed, longer).step(first(3))


def test_each_client_has_a_ledger_and_their_number_stays(tmp_path) -> None:
    def begun(ledger: str, client: int, clients: int) -> DPSGD:
        defense = DPSGD(CLIP, noise_multiplier=1.0, ledger=tmp_path / ledger)
        Run(defense, client=client, clients=clients).step(first(3))
        return defense

    assert [begun("a", client, 2).accountant.steps for client in (0, 1, 1)] == [1, 1, 2]
    assert begun("b", 0, 1).accountant.steps == begun("a.b", 0, 1).accountant.steps == 1
    for ledger, clients in (("a", 1), ("a", 3), ("b", 2)):
        with pytest.raises(DefenseError, match="another number of clients"):
            begun(ledger, 0, clients)


def test_releases_of_a_trusted_sum_are_not_accounted_as_each_clients_own() -> None:
    def made(trust: Any) -> DPSGD:
        return DPSGD(CLIP, noise_multiplier=1.0, release=ReleaseSettings(trust=trust))

    central, local = made("central"), made("local")
    Run(central, clients=4).step(first(0))
    Run(local, clients=4).step(first(0))
    with pytest.raises(DefenseError, match=r"begin a new run.*trust='central'"):
        made("local").load_state_dict(central.state_dict())
    made("central").load_state_dict(central.state_dict())
    made("central").load_state_dict(local.state_dict())


@pytest.mark.parametrize("gone", [{"mechanism": "banded", "bands": 4}, {"truncated_at": 8}])
def test_releases_by_a_rule_that_is_gone_are_not_gone_on_with(gone: dict[str, Any]) -> None:
    defense = DPSGD(CLIP, noise_multiplier=1.0)
    Run(defense).step(first(3))
    with pytest.raises(DefenseError, match="1 releases were made with another"):
        DPSGD(CLIP, noise_multiplier=1.0).load_state_dict(defense.state_dict() | gone)


# ---- what is refused -------------------------------------------------------------------------


def test_a_run_without_end_has_no_noise_for_an_epsilon() -> None:
    root = Net()
    root._trainer = trainer(max_epochs=-1)
    with pytest.raises(DefenseError, match="max_epochs or max_steps"):
        Run(DPSGD(CLIP, target_epsilon=1.0, target_delta=1e-4), root)


@pytest.mark.parametrize("delta", [1 / N, 0.5])
def test_delta_must_be_below_one_over_the_number_of_examples(delta: float) -> None:
    with pytest.raises(DefenseError, match=r"target_delta must be .* below 0\.025.*1 / examples"):
        Run(DPSGD(CLIP, noise_multiplier=1.0, target_delta=delta))


class Loose(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(6, 3), nn.Parameter(torch.ones(3))


class Scaled(nn.Linear):
    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return super().forward(x * scale)


class Listed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.prompts = nn.ParameterList([nn.Parameter(torch.ones(3))])


def evaluated() -> nn.Module:
    return tiny_llama().eval()


def frozen() -> nn.Module:
    return Net().requires_grad_(False)


MODELS: list[tuple[Any, str]] = [
    (lambda: Loose(), r"Loose.* trains \['scale'\].*module of their own"),
    (lambda: nn.Sequential(Loose()), r"'0' \(Loose\) trains"),
    (lambda: Listed(), r"'prompts' \(ParameterList\) trains"),
    (lambda: nn.Sequential(Scaled(6, 3)), r"\(Scaled\) trains.*one tensor"),
    (lambda: nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3)), "Use GroupNorm or LayerNorm"),
    (evaluated, r"eval mode.*Call `model.train\(\)`"),
    (frozen, "every parameter is frozen"),
    (lambda: nn.Sequential(nn.LSTM(3, 3)), "opacus.layers.DPLSTM"),
    (lambda: nn.Sequential(nn.MultiheadAttention(4, 2)), "scaled_dot_product_attention"),
    (lambda: nn.Sequential(nn.Embedding(4, 2, max_norm=1.0)), "`max_norm`"),
    (lambda: nn.Sequential(nn.Embedding(4, 2, sparse=True)), "`sparse`"),
]


@pytest.mark.parametrize(("build", "message"), MODELS)
def test_a_model_without_per_sample_gradients(build, message: str) -> None:
    with pytest.raises(DefenseError, match=message):
        Run(DPSGD(CLIP, noise_multiplier=1.0), build())


def test_it_must_come_before_what_acts_on_gradients() -> None:
    defense, noise = DPSGD(CLIP, noise_multiplier=1.0), GradientNoise(1.0, 1.0)
    defense.check_order([], [noise])
    with pytest.raises(DefenseError, match="put 'dpsgd' before gradient_noise"):
        defense.check_order([noise], [])


def test_two_batches_in_one_release_are_refused() -> None:
    run = Run(DPSGD(CLIP, noise_multiplier=1.0))
    run.backward(first(3))
    with pytest.raises(DefenseError, match="own optimizer step"):
        run.backward(first(3))


@pytest.mark.parametrize(
    ("batch", "message"),
    [(["a", "b"], r"one first dimension.*\[\]"), ([torch.ones(3), torch.ones(4)], r"\[3, 4\]")],
)
def test_a_batch_whose_samples_cannot_be_counted(batch: Any, message: str) -> None:
    run = Run(DPSGD(CLIP, noise_multiplier=1.0))
    with pytest.raises(DefenseError, match=message):
        run.defense.on_training_step(lambda: None, batch, run.context)


# ---- checks in the run -----------------------------------------------------------------------


def test_a_gradient_that_no_layer_explains_is_noticed() -> None:
    run = Run(DPSGD(CLIP, noise_multiplier=1.0))
    run.backward(first(5))
    stray = nn.Parameter(torch.ones(3))
    stray.grad = torch.ones(3)
    run.parameters.append(stray)
    with pytest.raises(DefenseError, match="is not the sum of its recorded per-sample gradients"):
        run.release()


@pytest.mark.parametrize(
    ("norm", "message"),
    [
        (nn.BatchNorm1d(3).requires_grad_(False), "normalises by statistics of the batch"),
        (
            nn.BatchNorm1d(3, affine=False, track_running_stats=False),
            "normalises by statistics of the batch",
        ),
        (
            nn.InstanceNorm1d(3, affine=True, track_running_stats=True),
            "keeps statistics of the data",
        ),
    ],
)
def test_statistics_of_the_data_are_refused_at_setup(norm: Any, message: str) -> None:
    root = nn.Sequential(nn.Unflatten(1, (3, 2)), norm, nn.Flatten(), nn.Linear(6, 3))
    with pytest.raises(DefenseError, match=message):
        Run(DPSGD(CLIP, noise_multiplier=1.0), root).step(first(5))


def test_a_canary_among_several_processes_is_unknown() -> None:
    run = Run(DPSGD(CLIP, noise_multiplier=1.0, seed=1))
    run.backward(first(3))
    run.defense._team.size = 2
    with pytest.raises(DefenseError, match="needs client='rank' or one process"):
        run.defense.on_canary(CanaryGradient(torch.ones(3, 1, 2)), run.parameters, run.context)


def test_noise_of_another_size_is_noticed(monkeypatch) -> None:
    model = nn.Sequential(nn.Linear(6, 2000))
    run = Run(DPSGD(CLIP, noise_multiplier=1.0), model)
    real = noises.add_noise
    weak: Any = lambda *place: real(*place[:-1], 0.9 * place[-1])  # noqa: E731
    monkeypatch.setattr(noises, "add_noise", weak)
    with pytest.raises(DefenseError, match=r"noise measured is 0\.(89|90|91)"):
        run.step(first(0))


def test_several_loaders_at_once_are_refused() -> None:
    root = Net()
    root._trainer = trainer(train_dataloader={"a": 1, "b": 2})
    run = Run(DPSGD(CLIP, noise_multiplier=1.0), root)
    with pytest.raises(DefenseError, match="return one DataLoader"):
        run.step(first(3))


class Normed(Net):
    """With operations between its layers whose numbers backward needs."""

    def forward(self, x: Tensor) -> Tensor:
        below = self.below(x)
        return self.above(torch.tanh(below / below.norm(dim=-1, keepdim=True)).exp())


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["checked", "trusted"])
def test_a_compiled_model_releases_what_a_plain_one_does(loss, monkeypatch) -> None:
    """Also where it ran without privacy before, and with batches of every size, all checked."""
    monkeypatch.setattr(loss_graph, "CHECK_EVERY", 1)
    root, plain = Normed(), Normed()
    root.compile(backend="aot_eager")
    F.cross_entropy(root(first(4)[0]), first(4)[1]).backward()
    for _ in range(2):
        run = Run(DPSGD(CLIP, noise_multiplier=0.0, clip=ClipSettings(loss=loss)), root)
        for samples in (4, 3, 6, 1, 12):
            plain.load_state_dict(root.state_dict())
            rows = Run(DPSGD(CLIP, noise_multiplier=1.0), plain).one_by_one(first(samples))
            assert bool((rows.norm(dim=1) > CLIP).any())
            expected = clipped(rows).sum(0) / 8
            torch.testing.assert_close(run.step(first(samples)), expected, rtol=1e-5, atol=1e-7)
        run.defense.teardown()


@pytest.mark.slow
def test_a_loss_in_compiled_code_is_refused_and_the_mend_is_said() -> None:
    run = Run(DPSGD(CLIP, noise_multiplier=1.0))
    run.loss = torch.compile(run.loss, backend="aot_eager")
    with pytest.raises(DefenseError, match="compile the model's blocks instead"):
        run.step(first(4))
