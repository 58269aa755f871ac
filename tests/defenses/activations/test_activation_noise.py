"""Noise and compression of states: laws, gradients, checkpointing, compilation, refusals."""

import math
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import dp_accounting
import pytest
import scipy.stats
import torch
from lightning.pytorch.utilities.compile import from_compiled
from torch import Tensor, nn

from lightning_fedleak.defenses import Defense, DefenseError
from lightning_fedleak.defenses.activations import ActivationCompression, ActivationNoise
from lightning_fedleak.model.anatomy import find_anatomy
from lightning_fedleak.model.anatomy.blocks import (
    place_of,
    states_in,
    states_out,
    with_states_in,
    with_states_out,
)
from lightning_fedleak.model.model_runs import undisturbed
from lightning_fedleak.strategies import DefendedStrategy
from tests.helpers.inputs import context
from tests.helpers.inputs import padded_batch as batch
from tests.helpers.lightning_modules import CausalLMModule, random_token_loader
from tests.helpers.models import DIM, own_rng, tiny_bert_mlm, tiny_gpt2, tiny_llama, tiny_t5
from tests.strategies.toy import trainer
from tests.taps.test_activation_tap import PlainModel, WithLoss, checkpointed


class Passing:
    """Records what comes to a layer: ``local`` before the hooks that are there, ``shared`` after.

    ``local`` must be made before the defence's ``before_setup``, ``shared`` after it.
    """

    def __init__(self, model: nn.Module, layer: int) -> None:
        self.seen: list[Tensor] = []
        place = place_of(find_anatomy(model), layer)

        def entering(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.seen.append(states_in(args, kwargs).detach().clone())

        def leaving(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            self.seen.append(states_out(output).detach().clone())

        if place.side == "input":
            place.module.register_forward_pre_hook(entering, with_kwargs=True)
        else:
            place.module.register_forward_hook(leaving)


def rewriting(model: nn.Module, layer: int, rewrite: Callable[[Tensor], Tensor]) -> None:
    """The model with hidden states rewritten by a plain function: an independent reference."""
    place = place_of(find_anatomy(model), layer)
    forward = place.module.forward

    def replaced(*args: Any, **kwargs: Any) -> Any:
        if place.side == "input":
            args, kwargs = with_states_in(args, kwargs, rewrite(states_in(args, kwargs)))
            return forward(*args, **kwargs)
        output = forward(*args, **kwargs)
        return with_states_out(output, rewrite(states_out(output)))

    place.module.forward = replaced


def step(model: nn.Module, *batches: dict[str, Tensor], defense: Defense | None = None) -> list:
    """Gradients after one training step whose loss is the sum over ``batches``, seed 5."""
    model.zero_grad()

    def forwards() -> Tensor:
        with own_rng(5):
            return sum(model(**inputs).loss for inputs in batches)

    if defense is None:
        loss = forwards()
    else:
        where = context(CausalLMModule(model), clients=2)
        loss = defense.on_training_step(forwards, batches, where)
    loss.backward()
    return [p.grad.clone() for p in model.parameters()]


def distance(a: list[Tensor], b: list[Tensor]) -> float:
    """Largest difference relative to the largest number of ``b``."""
    pairs = list(zip(a, b, strict=True))
    largest = max(float(y.abs().max()) for _, y in pairs)
    return max(float((x - y).abs().max()) for x, y in pairs) / largest


SIGMA = 0.3


def noised(
    model: nn.Module, defense: ActivationNoise, entropy: bytes = b"e" * 32, **fields: Any
) -> tuple[Passing, Passing]:
    """What comes to the layer and what leaves it, once the defence is set up."""
    local = Passing(model, defense.layer)
    defense.before_setup(context(CausalLMModule(model), entropy=entropy, **fields))
    return local, Passing(model, defense.layer)


def noise_of(defense: ActivationNoise, runs: int = 1, **fields: Any) -> Tensor:
    """The noise of the next training forwards, flat."""
    model = tiny_gpt2(layers=3, dropout=0.0)
    local, shared = noised(model, defense, **fields)
    for seed in range(runs):
        step(model, batch(seed), defense=defense)
    pairs = zip(local.seen, shared.seen, strict=True)
    defense.teardown()
    return torch.cat([(b - a).flatten() for a, b in pairs])


@pytest.mark.parametrize(
    ("build", "layer"),
    [(tiny_gpt2, 0), (tiny_gpt2, 2), (tiny_llama, 0), (tiny_bert_mlm, 2), (tiny_t5, 2)],
)
def test_every_number_that_leaves_has_the_noise_padding_too(build, layer: int) -> None:
    model = build(layers=3).train()
    defense = ActivationNoise(layer, SIGMA)
    local, shared = noised(model, defense)
    where = context(CausalLMModule(model))
    with torch.no_grad():
        for seed in range(12):
            defense.on_training_step(partial(model, **batch(seed)), None, where)
    noise = torch.stack([b - a for a, b in zip(local.seen, shared.seen, strict=True)]) / SIGMA
    assert noise.shape == (12, 4, 7, DIM)
    low, high = scipy.stats.chi2.ppf([1e-5, 1 - 1e-5], noise.numel())
    assert low < float(noise.double().square().sum()) < high
    assert scipy.stats.kstest(noise.flatten().numpy(), "norm").pvalue > 1e-5
    padding = batch(0)["attention_mask"] == 0
    assert 0.5 < float(noise[0][padding].std()) < 1.5


def test_relative_noise_follows_each_dimension() -> None:
    model = tiny_gpt2(layers=3, dropout=0.0)
    with torch.no_grad():
        model.transformer.wte.weight[:, 3] *= 50
        model.transformer.wte.weight[:, 5] = 0.0
        model.transformer.wpe.weight[:, 5] = 0.0
    defense = ActivationNoise(0, SIGMA, relative=True)
    local, shared = noised(model, defense)
    for seed in range(30):
        step(model, batch(seed), defense=defense)
    units = []
    for before, after in zip(local.seen, shared.seen, strict=True):
        tokens = before.reshape(-1, DIM).double()
        std = (tokens - tokens.mean(0)).square().mean(0).sqrt()
        assert float(std[5]) == 0
        assert torch.equal(after[..., 5], before[..., 5])
        units.append(((after - before).double() / (SIGMA * std))[..., [0, 3, 9]])
    unit = torch.cat([u.flatten() for u in units])
    assert float(unit.std()) == pytest.approx(1.0, rel=0.05)
    assert scipy.stats.kstest(unit.numpy(), "norm").pvalue > 1e-5


@pytest.mark.parametrize(
    ("layer", "setting"),
    [
        *((0, s) for s in ({}, {"relative": True}, {"clip": 0.1}, {"clip": 1e6})),
        (1, {"relative": True}),
        (3, {"clip": 0.1}),
    ],
    ids=str,
)
def test_the_gradient_is_that_of_a_constant_added(layer: int, setting: dict[str, Any]) -> None:
    model = tiny_gpt2(layers=3).train()
    defense = ActivationNoise(layer, SIGMA, **setting)
    local, shared = noised(model, defense)
    got = step(model, batch(), defense=defense)
    clip = setting.get("clip")

    def clipped(states: Tensor) -> Tensor:
        if clip is None:
            return states
        norms = states.square().sum(-1, keepdim=True).sqrt()
        return torch.where(norms > clip, states * clip / norms, states)

    with torch.no_grad():
        constant = shared.seen[0] - clipped(local.seen[0])
    reference = tiny_gpt2(layers=3).train()
    rewriting(reference, layer, lambda states: clipped(states) + constant)
    assert distance(got, step(reference, batch())) < 1e-5
    plain = step(tiny_gpt2(layers=3).train(), batch())
    assert distance(plain, got) > 0.01


def test_clip_bounds_what_the_noise_hides() -> None:
    model = tiny_gpt2(layers=2, dropout=0.0)
    defense = ActivationNoise(1, 0.0, clip=0.05)
    local, shared = noised(model, defense)
    step(model, batch(), defense=defense)
    assert float(local.seen[0].norm(dim=-1).min()) > 0.05
    torch.testing.assert_close(shared.seen[0].norm(dim=-1), torch.full((4, 7), 0.05))
    with_noise = ActivationNoise(1, 2.0, clip=0.1)
    noise = noise_of(with_noise, runs=10)
    assert float(noise.std()) > 0.15


@pytest.mark.parametrize(
    ("reentrant", "inside", "layer", "setting"),
    [
        *((*how, 2 * (how[0] == how[1]), {}) for how in product([False, True], repeat=2)),
        (True, False, 1, {"relative": True}),
        (False, True, 1, {"relative": True}),
    ],
    ids=str,
)
def test_checkpointing_gives_the_same_gradient(reentrant, inside, layer, setting) -> None:
    """Several forwards in a step, two of them of the same text, whose noise differs."""
    batches = [batch(1), batch(2), batch(1)]
    plain = tiny_gpt2(layers=3, dropout=0.0).train()
    defense = ActivationNoise(layer, SIGMA, **setting)
    noised(plain, defense)
    expected = step(plain, *batches, defense=defense)
    model = checkpointed(tiny_gpt2(layers=3, dropout=0.0).train(), reentrant, inside)
    again = ActivationNoise(layer, SIGMA, **setting)
    noised(model, again)
    assert distance(step(model, *batches, defense=again), expected) < 1e-5
    assert again._n_forwards == {"training": 3, "inference": 0}


def test_states_that_do_not_repeat_themselves_are_the_nearest_and_never_refused() -> None:
    """What a text holds decides nothing: near twins, numbers that overflow, far rounding."""
    states = torch.randn(4, 5, 8, generator=torch.Generator().manual_seed(0))
    observed = [states, states + 1e-5, 100 * states, torch.full_like(states, math.inf), -states]
    defense = ActivationNoise(1, 0.0)
    for tensor in observed:
        defense.rewrite(tensor, recomputed=False, training=True)
    for number, tensor in [*enumerate(observed)][::-1]:
        assert defense._index_of_states(tensor * (1 + 1e-7), exact=False) == number
    assert defense._index_of_states(0.9 * states, exact=False) in (0, 1)
    for tensor, exact in ((0.9 * states, True), (states[:2], False)):
        with pytest.raises(DefenseError, match="with other hidden states"):
            defense._index_of_states(tensor, exact=exact)


def test_noise_differs_by_client_process_forward_layer_name_base_and_kind() -> None:
    first = {"client": 0, "process": 0, "entropy": b"a" * 32}
    others = ({}, {"client": 1}, {"process": 3}, {"entropy": b"b" * 32})
    draws = [noise_of(ActivationNoise(1, 1.0), **first | other) for other in others]
    draws.append(noise_of(ActivationNoise(0, 1.0), **first))
    other = ActivationNoise(1, 1.0)
    other.name = "more_noise"
    draws.append(noise_of(other, **first))
    refitted = ActivationNoise(1, 1.0)
    draws += [
        noise_of(refitted, entropy=b"c" * 32) for _ in range(2)
    ]  # a second fit, the same base
    model = tiny_gpt2(layers=3, dropout=0.0)
    local, shared = noised(model, ActivationNoise(1, 1.0), entropy=b"a" * 32)
    with torch.no_grad():
        model(**batch())
    draws.append((shared.seen[0] - local.seen[0]).flatten())
    n = draws[0].numel()
    for i, first in enumerate(draws):
        for second in draws[:i]:
            assert abs(float(torch.corrcoef(torch.stack([first, second]))[0, 1])) < 5 / math.sqrt(n)


def test_half_precision() -> None:
    model = tiny_llama(layers=2)
    defense = ActivationNoise(1, 0.5)
    local, shared = noised(model, defense)
    with torch.autocast("cpu", torch.bfloat16):
        got = step(model, batch(), defense=defense)
    constant = shared.seen[0].float() - local.seen[0].float()
    reference = tiny_llama(layers=2)
    rewriting(reference, 1, lambda states: (states.float() + constant).to(states.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        expected = step(reference, batch())
    assert distance(got, expected) < 0.02


@pytest.mark.slow
@pytest.mark.parametrize("what", ["a part", "training_step", "the module"])
def test_compiled_and_run_before_the_fit_and_clean_after_it(what: str) -> None:
    """A graph that was compiled without the hook would go on without it, and one with it, with."""
    root = CausalLMModule(WithLoss(PlainModel()))
    block = root.model.model.blocks[0]
    if what == "a part":
        root.model.model = torch.compile(root.model.model, backend="eager")
    elif what == "training_step":
        root.training_step = torch.compile(root.training_step, backend="eager")
    else:  # as a Trainer takes it
        root = from_compiled(torch.compile(root, backend="eager"))

    def loss() -> Tensor:
        return root.training_step(batch(), 0)

    clean = loss()
    late: list[int] = []
    handle = block.register_forward_hook(lambda *_: late.append(1))
    loss()
    assert late == []  # this is what a defence must not do
    handle.remove()
    defense = ActivationNoise(1, 3.0)
    defense.before_setup(context(root))
    losses = [float(defense.on_training_step(loss, None, context(root))) for _ in range(3)]
    assert len({*losses, float(clean)}) == 4
    defense.teardown()
    assert torch.equal(loss(), clean)


def test_the_servers_copy_has_no_noise() -> None:
    model = tiny_gpt2(layers=2, dropout=0.0)
    with torch.no_grad():
        clean = model(**batch()).loss
        noised(model, ActivationNoise(1, 3.0))
        assert not torch.equal(model(**batch()).loss, clean)
        with undisturbed(find_anatomy(model)):
            assert torch.equal(model(**batch()).loss, clean)
        assert not torch.equal(model(**batch()).loss, clean)


class Measured(CausalLMModule):
    """Keeps the losses of evaluations."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.seen: list[float] = []

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.seen.append(float(self.model(**batch).loss))

    test_step = validation_step


def test_in_a_trainer_it_acts_in_inference() -> None:
    model = Measured(tiny_gpt2(layers=2, dropout=0.0))
    loader = random_token_loader(n=8)
    clean = [float(model.model(**inputs).loss.detach()) for inputs in loader]
    strategy = DefendedStrategy(defenses=[ActivationNoise(1, 5.0)])
    run = trainer(strategy, max_steps=2)
    for evaluate in (run.validate, run.test):
        model.seen.clear()
        evaluate(model, loader, verbose=False)
        assert model.seen != clean
    hooks = [len(m._forward_hooks) for m in model.modules()]
    run.fit(model, loader)
    assert [len(m._forward_hooks) for m in model.modules()] == hooks
    assert [float(model.model(**inputs).loss.detach()) for inputs in loader] != clean


@pytest.mark.parametrize(("checkpoints", "precision"), [(None, "bf16-mixed"), (True, "32-true")])
def test_without_noise_the_run_is_the_plain_one(checkpoints, precision: str) -> None:
    """With dropout: neither the hook nor its noise touches the global generator."""
    results = []
    for defenses in ([], [ActivationNoise(1, 0.0), ActivationNoise(0, 0.0)]):
        torch.manual_seed(3)
        model = tiny_gpt2(layers=2, dropout=0.2).train()
        if checkpoints is not None:
            model = checkpointed(model, checkpoints)
        if defenses:
            defenses[1].name = "at_the_embeddings"
        run = trainer(DefendedStrategy(defenses=defenses), max_steps=3, precision=precision)
        run.fit(CausalLMModule(model), random_token_loader())
        results.append([*(p.detach() for p in model.parameters()), torch.get_rng_state()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


class Elsewhere(CausalLMModule):
    """Runs its blocks in a way that no hook of the module sees."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        blocks = self.model.transformer.h
        hidden = self.model.transformer.wte(batch["input_ids"])
        for block in blocks:
            hidden = hidden + block.mlp(block.ln_2(hidden))
        loss: Tensor = self.model.lm_head(hidden).logsumexp(-1).mean()
        return loss


class ByHand(Elsewhere):
    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.automatic_optimization = False

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        self.optimizers().step()


@pytest.mark.parametrize("kind", [Elsewhere, ByHand])
def test_a_step_that_no_hidden_states_passed_is_refused(kind) -> None:
    model = kind(tiny_gpt2(layers=2, dropout=0.0))
    before = [p.detach().clone() for p in model.parameters()]
    run = trainer(DefendedStrategy(defenses=[ActivationNoise(1, 1.0)]), max_steps=2)
    with pytest.raises(DefenseError, match="no hidden states passed layer 1"):
        run.fit(model, random_token_loader())
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize(("sigma", "positions"), [(0.5, 1), (30.0, 64)])
def test_epsilon_of_one_forward(sigma: float, positions: int) -> None:
    """Google's dp-accounting: two states in a ball of radius C are at most 2 C apart."""
    expected = dp_accounting.get_epsilon_gaussian(sigma / (2 * math.sqrt(positions)), 1e-6)
    got = ActivationNoise(0, sigma, clip=7.0).epsilon(1e-6, positions=positions)
    assert got == pytest.approx(expected, rel=1e-6)


def test_what_guarantees_nothing_says_so() -> None:
    for defense in (
        ActivationNoise(1, 1.0),
        ActivationNoise(1, 1.0, relative=True),
        ActivationNoise(1, 0.0, clip=1.0),
    ):
        assert defense.epsilon(1e-5) == math.inf
        assert defense.guarantee.startswith("none")
    assert not ActivationNoise(1, 1.0, clip=1.0).guarantee.startswith("none")
    assert ActivationNoise(3, 1.0).activation_layers == (3,)


def test_a_gate_turns_the_noise_up_and_a_resumed_run_keeps_it() -> None:
    defense = ActivationNoise(1, 1.0, clip=1.0, max_hardenings=1)
    before = float(noise_of(defense, runs=8).std())
    epsilon = defense.epsilon(1e-5)
    assert defense.can_harden
    assert "2" in str(defense.harden())
    assert defense.harden() is None
    resumed = ActivationNoise(1, 1.0, clip=1.0)
    resumed.load_state_dict(defense.state_dict())
    assert float(noise_of(resumed, runs=8).std()) == pytest.approx(2 * before, rel=0.05)
    assert resumed.epsilon(1e-5) == epsilon
    assert not ActivationNoise(1, 0.0).can_harden


def test_a_recomputation_of_unknown_states_is_refused() -> None:
    model = checkpointed(tiny_gpt2(layers=3, dropout=0.0).train(), True)
    defense = ActivationNoise(0, SIGMA)
    noised(model, defense)
    root = context(CausalLMModule(model))
    loss = defense.on_training_step(lambda: model(**batch()).loss, None, root)
    defense.on_training_step(lambda: model(**batch(2)).loss, None, root)
    with pytest.raises(DefenseError, match="with other hidden states"):
        loss.backward()


K = 5


def compressed(model, defense: ActivationCompression) -> tuple[Passing, Passing]:
    local = Passing(model, defense.layer)
    defense.before_setup(context(CausalLMModule(model)))
    return local, Passing(model, defense.layer)


@pytest.mark.parametrize(("build", "layer"), [(tiny_gpt2, 0), (tiny_llama, 2), (tiny_t5, 2)])
def test_k_numbers_of_each_state_leave(build, layer: int) -> None:
    model = build(layers=3).train()
    local, shared = compressed(model, ActivationCompression(layer, keep_dims=K))
    for seed in range(3):
        step(model, batch(seed), defense=None)
    before = torch.cat([s.flatten(0, 1) for s in local.seen]).double()
    after = torch.cat([s.flatten(0, 1) for s in shared.seen]).double()
    values = torch.linalg.svdvals(after)
    assert float(values[K - 1]) > 1e-3 * float(values[0]) > 1e3 * float(values[K])
    # An orthogonal projection: the closest point in the span of what leaves.
    span = torch.linalg.svd(after, full_matrices=False)[2][:K]
    torch.testing.assert_close(before @ span.T @ span, after, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("layer", "reentrant"), [(0, None), (1, False), (0, True)])
def test_the_gradient_is_that_of_the_linear_map(layer, reentrant) -> None:
    model = tiny_gpt2(layers=2, dropout=0.0).train()
    if reentrant is not None:
        model = checkpointed(model, reentrant)
    defense = ActivationCompression(layer, keep_dims=K)
    local, shared = compressed(model, defense)
    got = step(model, batch(), defense=defense)
    # The projection, from what came and what left, by least squares.
    tokens = torch.cat([s.flatten(0, 1) for s in local.seen[:1]]).double()
    sent = torch.cat([s.flatten(0, 1) for s in shared.seen[:1]]).double()
    matrix = torch.linalg.lstsq(tokens, sent).solution
    reference = tiny_gpt2(layers=2, dropout=0.0).train()

    def linear(states: Tensor) -> Tensor:
        return states @ matrix.float()

    rewriting(reference, layer, linear)
    expected = step(reference, batch())
    assert distance(got, expected) < 1e-3
    assert distance(step(tiny_gpt2(layers=2, dropout=0.0).train(), batch()), got) > 0.02


def test_noise_belongs_in_front() -> None:
    noise, smaller = ActivationNoise(2, 1.0), ActivationCompression(2, K)
    with pytest.raises(DefenseError, match="after 'activation_compression' at layer 2"):
        DefendedStrategy("auto", [smaller, noise])
    DefendedStrategy("auto", [noise, smaller])
    DefendedStrategy("auto", [smaller, ActivationNoise(3, 1.0)])
