"""Defenses of gradients: noise, freezing, canaries, and settings that resume."""

import math
import textwrap
from pathlib import Path

import dp_accounting
import lightning as L
import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lightning_fedleak import DPSGD, DefendedStrategy
from lightning_fedleak.defenses import (
    ActivationNoise,
    CanaryGradient,
    Defense,
    DefenseContext,
    DefenseError,
    Freeze,
    GradientCompression,
    GradientNoise,
    TokenLDP,
    base,
    noise,
)
from lightning_fedleak.defenses.noise import (
    add_noise,
    base_of,
    gaussian_epsilon,
    noise_key,
    standard_normal,
)
from lightning_fedleak.model.anatomy import AnatomyError
from lightning_fedleak.model.snapshots import compression_error
from tests.callbacks import runs
from tests.helpers.inputs import context
from tests.helpers.lightning_modules import CausalLMModule, random_token_loader
from tests.helpers.models import tiny_bert_mlm, tiny_gpt2, tiny_llama, tiny_t5
from tests.strategies.toy import ToyLM, fit, grads, trainer

# The example in the documentation of `Defense` is a whole defence.


def test_the_documented_example_runs() -> None:
    code = textwrap.dedent(str(base.__doc__).split("::\n", 1)[1])
    names: dict[str, type[Defense]] = {"Defense": Defense}
    exec(code, names)
    top = names["TopK"](0.1)
    shares: list[float] = []
    strategy = DefendedStrategy("auto", [top])

    def tap(stage: str, optimizer: torch.optim.Optimizer) -> None:
        if stage == "shared":
            shares.append(float((grads(optimizer)[-2] != 0).double().mean()))

    strategy.add_tap(tap)
    fit(strategy, lambda: ToyLM("sgd"))
    assert len(shares) == 6
    assert all(abs(share - 0.1) < 0.02 for share in shares)


def test_what_acts_on_gradients_is_seen_from_the_class() -> None:
    assert GradientNoise(1.0, 1.0).acts_on_gradients
    assert not Freeze("head").acts_on_gradients


def test_settings_are_those_that_a_defence_was_built_with() -> None:
    dpsgd = DPSGD(1.0, 1.0)
    defenses = [dpsgd, Freeze("head", "hardened"), GradientNoise(1.0, 1.0), ActivationNoise(1, 1.0)]
    built = [defense.settings() for defense in defenses]
    dpsgd.releases, dpsgd.measured_noise_multiplier = 3, 0.97
    for defense in defenses[1:]:
        assert defense.harden() is not None
    assert [defense.settings() for defense in defenses] == built
    assert built[0]["max_grad_norm"] == built[0]["noise_multiplier"] == 1.0
    assert built[1]["when"] == "hardened"
    assert built[2]["sigma"] == built[3]["sigma"] == 1.0
    counts = {"releases", "measured_noise_multiplier", "active", "notches"}
    assert not any(counts & settings.keys() for settings in built)


# What a defence does to layers that are not there, against a model in which they are.


B, G, K = 5, 3, 4


def canary(seed: int = 0, scale: float = 1.0, dtype: torch.dtype = torch.float64) -> CanaryGradient:
    generator = torch.Generator().manual_seed(seed)
    return CanaryGradient(scale * torch.randn(B, G, K, generator=generator, dtype=dtype))


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("clip", [0.1, 30.0, 1e5])
def test_each_game_is_clipped_as_if_its_layers_were_in_the_update(scale, clip):
    given = canary(scale=scale)
    defense = GradientNoise(clip=clip, sigma=0.0)
    got = defense.on_canary(given, parameters_with(dtype=torch.float64), context())
    for game in range(G):
        update = parameters_with(dtype=torch.float64)
        crafted = nn.Parameter(torch.zeros(K, dtype=torch.float64))
        crafted.grad = given.samples[:, game].sum(0)
        GradientNoise(clip=clip, sigma=0.0).on_gradients([*update, crafted], context())
        torch.testing.assert_close(got.released[game], crafted.grad, rtol=1e-12, atol=0)
    assert got.noise_std == 0


def test_the_noise_has_the_law_of_the_updates_and_is_no_noise_of_the_update():
    defense = GradientNoise(clip=2.0, sigma=0.5, seed=3)
    zero = CanaryGradient(torch.zeros(1, 200, 100))
    got = defense.on_canary(zero, parameters_with(scale=1e-3), context())
    assert got.noise_std == 1.0
    noise = got.released.flatten().numpy()
    assert scipy.stats.kstest(noise, "norm").pvalue > 1e-3
    again = defense.on_canary(zero, parameters_with(scale=1e-3), context())
    assert abs(torch.corrcoef(torch.stack([got.released, again.released]).flatten(1))[0, 1]) < 0.05
    parameters = [nn.Parameter(torch.zeros(200, 100))]
    defense.on_gradients(parameters, context())
    update = parameters[0].grad
    assert abs(torch.corrcoef(torch.stack([got.released, update]).flatten(1))[0, 1]) < 0.05


def test_the_update_and_its_noise_stay_what_they_would_have_been():
    plain, watched = GradientNoise(1.0, 0.3, seed=1), GradientNoise(1.0, 0.3, seed=1)
    for seed in range(3):
        expected, got = parameters_with(seed), parameters_with(seed)
        before = flat(got)
        watched.on_canary(canary(seed), got, context())
        assert torch.equal(flat(got), before)
        plain.on_gradients(expected, context())
        watched.on_gradients(got, context())
        assert torch.equal(flat(got), flat(expected))
    assert plain.state_dict() == watched.state_dict()


def test_two_defences_in_a_row_scale_and_add_their_noise():
    first, second = GradientNoise(None, 2.0, seed=0), GradientNoise(0.5, 3.0, seed=1)
    zero = CanaryGradient(torch.zeros(1, 5000, 4, dtype=torch.float64))
    between = first.on_canary(zero, parameters_with(), context())
    after = second.on_canary(between, parameters_with(), context())
    norm = float(flat(parameters_with()).norm())
    joint = between.released.norm(dim=1).square().add(norm**2).sqrt()
    clipped = between.released * (0.5 / joint).clamp(max=1)[:, None]
    torch.testing.assert_close(after.released - after.noise, torch.zeros(5000, 4).double())
    assert after.noise_std == pytest.approx(float((after.released).std()), rel=0.02)
    assert float((after.released - clipped).std()) == pytest.approx(1.5, rel=0.02)
    assert math.hypot(2 * float((0.5 / joint).square().mean().sqrt()), 1.5) == pytest.approx(
        after.noise_std, rel=1e-6
    )


class Halves(Defense):
    name, guarantee = "halves", "none"

    def on_gradients(self, parameters, context):
        for p in parameters:
            p.grad.mul_(0.5)


def test_a_defence_that_does_not_say_what_it_does_to_a_canary_is_known_as_such():
    class Says(Halves):
        def on_canary(self, canary, parameters, context):
            return canary.scaled(torch.full((canary.samples.shape[1],), 0.5))

    class Other(Says):
        def on_gradients(self, parameters, context):
            for p in parameters:
                p.grad.sign_()

    class OtherNoise(GradientNoise):
        def on_gradients(self, parameters, context):
            pass

    assert [d.acts_on_canaries for d in (Halves(), Says(), Other(), OtherNoise(1.0, 1.0))] == [
        False, True, False, False,
    ]  # fmt: skip
    assert GradientNoise(1.0, 1.0).acts_on_canaries
    assert Freeze("head").acts_on_canaries
    assert Freeze("head").on_canary(given := canary(), [], context()) is given


# Freeze: what is frozen, for how long, and what is refused.


def frozen_by(part: str, root: nn.Module) -> tuple[Freeze, set[str]]:
    before = {name for name, p in root.named_parameters() if p.requires_grad}
    freeze = Freeze(part)
    freeze.before_setup(context(root))
    return freeze, before - {name for name, p in root.named_parameters() if p.requires_grad}


@pytest.mark.parametrize(
    ("part", "build", "expected"),
    [
        ("head", lambda: tiny_llama(tied=False), {"lm_head.weight"}),
        ("embeddings", lambda: tiny_llama(tied=False), {"model.embed_tokens.weight"}),
        (
            "head+embeddings",
            lambda: tiny_llama(tied=False),
            {"lm_head.weight", "model.embed_tokens.weight"},
        ),
        ("head", lambda: tiny_gpt2(tied=False), {"lm_head.weight"}),
        ("head+embeddings", lambda: tiny_gpt2(tied=True), {"transformer.wte.weight"}),
        (
            "head+embeddings",
            tiny_bert_mlm,
            {"bert.embeddings.word_embeddings.weight", "cls.predictions.bias"},
        ),
        ("head+embeddings", tiny_t5, {"shared.weight"}),
    ],
)
def test_what_is_frozen_and_given_back(part: str, build, expected: set[str]) -> None:
    root = CausalLMModule(build())
    freeze, names = frozen_by(part, root)
    assert names == {f"model.{name}" for name in expected}
    freeze.teardown()
    freeze.teardown()
    assert all(p.requires_grad for p in root.parameters())


@pytest.mark.parametrize("part", ["head", "embeddings"])
@pytest.mark.parametrize("build", [tiny_gpt2, tiny_bert_mlm, tiny_t5])
def test_a_tied_matrix_cannot_be_frozen_in_part(part: str, build) -> None:
    root = CausalLMModule(build())
    with pytest.raises(DefenseError, match=r"head\+embeddings.*tied.*tie_word_embeddings=False"):
        frozen_by(part, root)
    assert all(p.requires_grad for p in root.parameters())


def test_other_refusals() -> None:
    with pytest.raises(
        DefenseError, match=r"part must be 'head' or 'embeddings' or .* got 'heads'"
    ):
        Freeze("heads")
    with pytest.raises(AnatomyError, match="found no language model"):
        frozen_by("head", nn.Sequential(nn.Conv1d(2, 2, 1)))


def test_lora_inside_the_head_is_frozen_with_it() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["lm_head", "q_proj"], r=2)
    root = CausalLMModule(peft.get_peft_model(tiny_llama(tied=False), config))
    _, names = frozen_by("head", root)
    assert {n.split(".")[-3] for n in names} == {"lora_A", "lora_B"}
    assert all("lm_head" in name for name in names)
    assert len(names) == 2


class Decaying(CausalLMModule):
    """Hands every parameter to an optimizer with weight decay, frozen or not."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.1, weight_decay=0.5)


def test_a_fit_leaves_the_frozen_weights_and_moves_the_others() -> None:
    L.seed_everything(0, verbose=False)
    model = Decaying(tiny_llama(tied=False))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    run = trainer(DefendedStrategy(defenses=[Freeze("head+embeddings")]), max_steps=2)
    for _ in range(2):
        run.fit(model, random_token_loader())
        run.fit_loop.epoch_loop.max_steps += 2
        run.fit_loop.max_epochs += 1
        unmoved = {n for n, p in model.named_parameters() if torch.equal(p, before[n])}
        assert unmoved == {"model.lm_head.weight", "model.model.embed_tokens.weight"}
        assert all(p.requires_grad for p in model.parameters())
    assert run.global_step == 4


class Unfreezing(L.Callback):
    """Makes everything trainable at the second step, as a gradual unfreezing schedule does."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        if batch_idx == 1:
            pl_module.requires_grad_(True)


def test_what_is_unfrozen_on_the_way_is_not_released() -> None:
    model = Decaying(tiny_llama(tied=False))
    head = model.model.lm_head.weight.detach().clone()
    strategy = DefendedStrategy(defenses=[Freeze("head")])
    run = trainer(strategy, max_steps=3, callbacks=[Unfreezing()])
    with pytest.raises(DefenseError, match=r"lm_head\.weight.*was not released"):
        run.fit(model, random_token_loader())
    assert run.global_step == 1
    assert torch.equal(model.model.lm_head.weight, head)


# GradientNoise by float64 arithmetic and the chi-square law; the generators behind it.


SHAPES = [(40, 30), (30,), (7, 3, 5)]


def parameters_with(
    seed: int = 0, dtype: torch.dtype = torch.float32, scale: float = 1.0
) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    parameters = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in SHAPES]
    for parameter in parameters:
        gradient = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.grad = (scale * gradient).to(dtype)
    return parameters


def flat(parameters: list[nn.Parameter]) -> torch.Tensor:
    return torch.cat([p.grad.double().flatten() for p in parameters])


def noise_of(defense: GradientNoise, where: DefenseContext) -> torch.Tensor:
    """The next release's noise: what it makes of a zero gradient."""
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    defense.on_gradients(parameters, where)
    return flat(parameters)


@given(
    seed=st.integers(0, 100),
    scale=st.floats(1e-4, 1e4),
    clip=st.floats(1e-3, 1e3),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
)
def test_clipping_is_exact(seed: int, scale: float, clip: float, dtype: torch.dtype) -> None:
    parameters = parameters_with(seed, dtype, scale)
    before = flat(parameters)
    norm = float(torch.linalg.vector_norm(before))
    expected = before * min(1.0, clip / norm)
    GradientNoise(clip=clip, sigma=0.0).on_gradients(parameters, context())
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2**-8, torch.float64: 1e-12}[dtype]
    torch.testing.assert_close(flat(parameters), expected, rtol=tolerance, atol=1e-12)


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_noise_has_the_standard_deviation(clip: float | None, dtype: torch.dtype) -> None:
    defense = GradientNoise(clip=clip, sigma=0.8)
    assert defense.standard_deviation == (0.8 if clip is None else 0.4)
    residues = []
    for _ in range(20):
        parameters = parameters_with(dtype=dtype)
        before = flat(parameters)
        norm = float(torch.linalg.vector_norm(before))
        expected = before if clip is None else before * min(1.0, clip / norm)
        defense.on_gradients(parameters, context())
        residues.append(flat(parameters) - expected)
    residue = torch.cat(residues) / defense.standard_deviation
    n = residue.numel()
    statistic = float(residue.square().sum())
    if dtype == torch.float32:
        low, high = scipy.stats.chi2.ppf([1e-4, 1 - 1e-4], n)
        assert low < statistic < high
        assert scipy.stats.kstest(residue.numpy(), "norm").pvalue > 1e-4
    else:
        assert math.sqrt(statistic / n) == pytest.approx(1.0, abs=0.02)
    assert abs(float(residue.mean())) < 4 / math.sqrt(n)


def test_noise_differs_by_client_release_parameter_and_base() -> None:
    draws = [
        noise_of(GradientNoise(None, 1.0), context(client=client, entropy=entropy))
        for client in (0, 1, 2**40)
        for entropy in (b"a" * 32, b"b" * 32)
    ]
    defense = GradientNoise(None, 1.0)
    draws += [noise_of(defense, context(entropy=b"c" * 32)) for _ in range(3)]
    n = draws[0].numel()
    for i, first in enumerate(draws):
        assert len(first.unique()) > 0.98 * n
        for second in draws[:i]:
            assert abs(float((first * second).mean())) < 5 / math.sqrt(n)
            assert float(torch.isin(first, second).double().mean()) < 0.02


def test_a_gradient_of_none_counts_as_zero_and_is_noised() -> None:
    parameters = parameters_with()
    parameters[1].grad = None
    GradientNoise(clip=1.0, sigma=1.0).on_gradients(parameters, context())
    assert parameters[1].grad is not None
    assert float(parameters[1].grad.std()) == pytest.approx(1.0, rel=0.5)
    parameters[1].grad = None
    GradientNoise(clip=1.0, sigma=0.0).on_gradients(parameters, context())
    assert parameters[1].grad is None


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_broken_update_is_not_released_where_nothing_bounds_it(value: float) -> None:
    root = nn.Linear(3, 2)
    root.weight.grad, root.bias.grad = torch.ones(2, 3), torch.ones(2)
    root.weight.grad[1, 2] = value
    defense = GradientNoise(clip=None, sigma=1.0)
    with pytest.raises(DefenseError, match="the norm is not finite; nothing was released"):
        defense.on_gradients(list(root.parameters()), context(root=root))
    assert torch.equal(root.bias.grad, torch.ones(2))
    assert defense.releases == 0


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e30])
def test_a_broken_update_counts_as_zero_under_a_clip(value: float) -> None:
    root = nn.Linear(3, 2)
    root.weight.grad, root.bias.grad = torch.ones(2, 3), torch.ones(2)
    root.weight.grad[1, 2] = value
    defense, silent = GradientNoise(clip=1.0, sigma=1.0), nn.Linear(3, 2)
    defense.on_gradients([*root.parameters()], context(root=root))
    GradientNoise(clip=1.0, sigma=1.0).on_gradients([*silent.parameters()], context(root=silent))
    assert torch.equal(flat([*root.parameters()]), flat([*silent.parameters()]))
    assert defense.releases == 1


def test_an_overflow_is_told_and_a_sparse_gradient_becomes_dense() -> None:
    root = nn.Embedding(4, 2, sparse=True)
    root.weight.grad = torch.full((4, 2), 1e30)
    with pytest.raises(DefenseError, match="not finite"):
        GradientNoise(clip=None, sigma=1.0).on_gradients([root.weight], context(root=root))
    root.weight.grad = None
    root(torch.tensor([1, 1])).sum().backward()
    silent = nn.Embedding(4, 2)
    silent.weight.grad = torch.zeros(4, 2)
    for one in (root, silent):
        GradientNoise(clip=1.0, sigma=1.0).on_gradients([one.weight], context(root=one))
    assert root.weight.grad.layout == torch.strided
    expected = torch.zeros(4, 2)
    expected[1] = math.sqrt(0.5)
    torch.testing.assert_close(root.weight.grad - silent.weight.grad, expected)


@pytest.mark.parametrize("sigma", [0.5, 1.0, 4.0, 20.0])
@pytest.mark.parametrize("releases", [1, 37])
def test_epsilon_is_that_of_the_composed_gaussian_mechanism(sigma, releases) -> None:
    """Independent: Google's dp-accounting, one Gaussian event of the composed noise."""
    one = sigma * math.sqrt(1 / releases) / 2
    expected = dp_accounting.get_epsilon_gaussian(one, 1e-5)
    defense = GradientNoise(0.7, sigma)
    for _ in range(releases):
        noise_of(defense, context())
    assert defense.epsilon(1e-5) == pytest.approx(expected, rel=1e-6)


def test_epsilon_is_zero_without_a_release_and_infinite_where_nothing_holds() -> None:
    defense = GradientNoise(1.0, 2.0)
    assert defense.epsilon(1e-5) == 0
    for void in (
        GradientNoise(None, 1.0),
        GradientNoise(1.0, 0.0),
        GradientNoise(1.0, 1.0, seed=1),
    ):
        void.on_gradients([nn.Parameter(torch.zeros(3))], context())
        assert void.epsilon(1e-5) == math.inf
        assert void.guarantee.startswith("none")
    assert not GradientNoise(1.0, 1.0).guarantee.startswith("none")
    with pytest.raises(ValueError, match="delta"):
        defense.epsilon(0.0)


@pytest.mark.parametrize("kind", [GradientNoise, ActivationNoise])
def test_noise_is_turned_up_to_the_limit_of_hardenings(kind: type) -> None:
    defense = kind(1, 1.0, max_hardenings=1)
    assert defense.harden() is not None
    assert defense.harden() is None
    with pytest.raises(DefenseError, match=r"max_hardenings must be .* got -1"):
        kind(1, 1.0, max_hardenings=-1)


CPU = torch.device("cpu")


def draw(key: bytes, n: int = 4096, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return standard_normal(key, torch.Size([n]), CPU, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(), (0,), (3, 5), (2 * noise._BLOCK + 1,)])
def test_what_is_added_is_bit_for_bit_the_same(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    key = noise_key(b"k" * 32, 3, 2, client=1, name="n")
    for form in (lambda x: x, lambda x: x.mT if x.dim() == 2 else x):
        onto = form(torch.linspace(-1, 1, int(np.prod(shape)), dtype=dtype).reshape(shape))
        expected = onto.clone()
        expected.add_(standard_normal(key, onto.shape, CPU, dtype), alpha=0.3)
        add_noise(b"k" * 32, 3, 1, "n", 2, onto, 0.3)
        assert torch.equal(onto, expected)


def test_it_is_box_and_muller_of_philox() -> None:
    # Not of a generator that is linear over bits, whose state follows from numbers it has drawn.
    key, n = bytes(range(32)), 1000
    counter = int.from_bytes(key[16:], "big") << 128
    philox = np.random.Philox(key=int.from_bytes(key[:16], "big"), counter=counter)
    words = philox.random_raw(n // 2).view(np.int32).astype(np.float64)
    radius = np.sqrt(-2 * np.log((np.abs(words[: n // 2]) + 0.5) / 2**31))
    angle = np.pi * words[n // 2 :] / 2**31
    expected = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])
    assert np.allclose(draw(key, n).numpy(), expected, atol=2e-6)


def test_every_byte_of_the_key_counts() -> None:
    keys = [bytes(32)] + [bytes(i) + b"\1" + bytes(31 - i) for i in range(32)]
    draws = torch.stack([draw(key, 64) for key in keys])
    assert len(draws.unique(dim=0)) == len(keys)
    again = draw(keys[5], 64)
    assert torch.equal(again, draws[5])


def test_keys_differ_in_every_field() -> None:
    keys = {
        noise_key(base, release, index, client=client, name=name, stream=stream)
        for base in (b"a" * 32, b"b" * 32)
        for client in (0, 1)
        for release in (0, 1)
        for index in (0, 1)
        for name in ("x", "y")
        for stream in ("gradient", "canary")
    }
    assert len(keys) == 64
    assert base_of(b"e" * 32, None) == b"e" * 32
    assert base_of(b"e" * 32, 1) == base_of(b"f" * 32, 1) != base_of(b"e" * 32, 2)


# What a run costs that changes a defence's settings on the way, or is resumed with others.


IDS = torch.randint(3, 97, (4, 10), generator=torch.Generator().manual_seed(0))


def after(defense: GradientNoise, releases: int) -> GradientNoise:
    parameter = nn.Parameter(torch.zeros(3))
    for _ in range(releases):
        defense.on_gradients([parameter], context(nn.Module()))
    return defense


def resumed(before: GradientNoise, now: GradientNoise) -> GradientNoise:
    now.load_state_dict(before.state_dict())
    return now


def test_gradient_noise_remembers_how_little_it_was() -> None:
    weak = after(GradientNoise(1.0, 0.5), 3)
    strong = after(resumed(weak, GradientNoise(1.0, 4.0)), 2)
    expected = gaussian_epsilon(sigma=0.5 / math.sqrt(3 / 0.5**2 + 2 / 4.0**2), delta=1e-5)
    assert strong.epsilon(1e-5) == pytest.approx(expected, rel=1e-12)
    assert strong.epsilon(1e-5) > weak.epsilon(1e-5)


@pytest.mark.parametrize(
    "void", [GradientNoise(None, 1.0), GradientNoise(1.0, 0.0), GradientNoise(1.0, 1.0, seed=1)]
)
def test_gradient_noise_does_not_forget_that_nothing_held(void: GradientNoise) -> None:
    assert resumed(after(void, 1), GradientNoise(1.0, 4.0)).epsilon(1e-5) == math.inf


def released(defense: TokenLDP) -> TokenLDP:
    model = tiny_gpt2()
    defense.before_setup(context(model))
    defense.on_batch({"input_ids": IDS, "labels": IDS}, context(model))
    defense.teardown()
    return defense


def test_token_ldp_counts_each_release_as_the_dearest() -> None:
    dear = released(TokenLDP("grr", 50.0, memoize=False))
    assert dear.epsilon_spent == 50.0
    cheap = TokenLDP("grr", 1.0, memoize=False)
    cheap.load_state_dict(dear.state_dict())
    assert cheap.epsilon_per_sequence == 1.0
    assert cheap.epsilon_spent == 50.0
    assert released(cheap).epsilon_spent == 100.0
    again = TokenLDP("grr", 1.0, memoize=False)
    again.load_state_dict(cheap.state_dict())
    assert again.epsilon_spent == 100.0
    dear.epsilon = 1.0
    assert released(dear).epsilon_spent == 100.0


@pytest.mark.filterwarnings("ignore:TokenLDP")
def test_token_ldp_does_not_forget_that_nothing_held() -> None:
    void = released(TokenLDP("grr", 5.0, domain="batch"))
    resumed = TokenLDP("grr", 5.0)
    resumed.load_state_dict(void.state_dict())
    assert resumed.epsilon_spent == math.inf


# GradientCompression against NumPy in float64, and what error feedback owes to the server.


METHODS = ("topk", "int8", "int4", "sign", "low_rank")


def updates(seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"matrix": (12, 9), "vector": (7,), "filter": (6, 2, 4), "thin": (10, 2)}
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        for name, shape in shapes.items()
    }


def nearest(values: np.ndarray, levels: int) -> np.ndarray:
    """The nearest of 2 levels + 1 evenly spaced values from minus to plus the largest entry."""
    grid = np.linspace(-np.abs(values).max(), np.abs(values).max(), 2 * levels + 1)
    return grid[np.abs(values[..., None] - grid).argmin(-1)]


def largest(values: np.ndarray, share: float) -> np.ndarray:
    """All but the largest entries set to zero, one by one."""
    order = sorted(range(values.size), key=lambda i: -abs(values.flat[i]))
    selected = np.zeros_like(values)
    for i in order[: max(1, math.floor(share * values.size))]:
        selected.flat[i] = values.flat[i]
    return selected


@pytest.mark.parametrize("share", [0.01, 0.3, 1.0])
def test_topk_sends_the_largest_entries_as_they_are(share: float) -> None:
    sent = GradientCompression("topk", share=share, error_feedback=False).send(updates())
    for name, update in updates().items():
        assert np.array_equal(sent[name].numpy(), largest(update.numpy(), share)), name


@pytest.mark.parametrize(("method", "levels"), [("int8", 127), ("int4", 7)])
def test_rounding_sends_the_nearest_of_evenly_spaced_values(method, levels: int) -> None:
    big = {"large": torch.randn(4000, generator=torch.Generator().manual_seed(1)).double()}
    given = updates(dtype=torch.float64) | big
    sent = GradientCompression(method, error_feedback=False).send(given)
    for name, update in given.items():
        expected = nearest(update.numpy(), levels)
        np.testing.assert_allclose(sent[name].numpy(), expected, rtol=1e-12, atol=1e-15)
    assert levels < len(sent["large"].unique()) <= 2 * levels + 1


def projected(matrix: np.ndarray, directions: np.ndarray) -> np.ndarray:
    """The part of a matrix whose columns lie in the span of (n, r) directions."""
    return directions @ np.linalg.lstsq(directions, matrix, rcond=None)[0]


def test_low_rank_is_a_step_of_the_power_iteration() -> None:
    rank, compression = 3, GradientCompression("low_rank", rank=3, error_feedback=False)
    for seed in range(4):
        update = updates(seed, torch.float64)
        before = {n.removeprefix("factor/"): t.numpy() for n, t in compression.memory.items()}
        sent = compression.send(update)
        for name in ("matrix", "filter"):
            matrix = update[name].numpy().reshape(len(update[name]), -1)
            got = sent[name].numpy().reshape(matrix.shape)
            if seed:
                expected = projected(matrix, matrix @ before[name])
            else:  # the first factor is random: whatever it was, the span is of this rank
                columns, sizes, _ = np.linalg.svd(got)
                assert sizes[rank - 1] > 1e-3
                assert sizes[rank:].max() < 1e-12
                expected = projected(matrix, columns[:, :rank])
            np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-12)
        for name in ("vector", "thin"):
            assert torch.equal(sent[name], update[name])


@given(
    method=st.sampled_from(METHODS),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    steps=st.integers(1, 5),
    seed=st.integers(0, 100),
)
def test_what_left_and_the_residual_are_all_updates(method, dtype, steps: int, seed: int) -> None:
    compression = GradientCompression(method, share=0.1, rank=2)
    sums = {name: np.zeros(t.shape) for name, t in updates().items()}
    for step in range(steps):
        update = updates(seed + step, dtype)
        for name, sent in compression.send(update).items():
            assert sent.dtype == dtype
            sums[name] += sent.double().numpy() - update[name].double().numpy()
    assert compression.memory.keys() >= {f"residual/{name}" for name in sums}
    for name, missing in sums.items():
        residual = compression.memory[f"residual/{name}"].double().numpy()
        np.testing.assert_allclose(residual, -missing, atol=1e-12 if dtype.itemsize == 8 else 1e-5)


def model_with(*gradients: torch.Tensor | None) -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 5, bias=False), nn.Linear(5, 4, bias=False))
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        parameter.grad = gradient
    return model


def test_it_replaces_gradients_and_flushes_what_has_none() -> None:
    compression = GradientCompression("topk", share=0.2)
    a, b = torch.randn(5, 6), torch.randn(4, 5)
    model = model_with(a.clone(), b.clone())
    compression.on_gradients([*model.parameters()], context(root=model))
    assert np.array_equal(model[0].weight.grad.numpy(), largest(a.numpy(), 0.2))
    remaining = b - model[1].weight.grad
    model[1].weight.grad = None  # this step's loss does not reach it
    compression.on_gradients([*model.parameters()], context(root=model))
    assert np.array_equal(model[1].weight.grad.numpy(), largest(remaining.numpy(), 0.2))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_refused_before_anything_changed(value: float) -> None:
    compression = GradientCompression("topk")
    broken = torch.ones(4, 5)
    broken[2, 3] = value
    model = model_with(torch.randn(5, 6), broken)
    untouched = model[0].weight.grad.clone()
    with pytest.raises(DefenseError, match=r"'1\.weight' holds NaN or infinity"):
        compression.on_gradients([*model.parameters()], context(root=model))
    assert torch.equal(model[0].weight.grad, untouched)
    assert compression.memory == {}


@pytest.mark.parametrize(
    "late", [GradientNoise(1.0, 1.0), DPSGD(1.0, noise_multiplier=1.0)], ids=["noise", "dpsgd"]
)
def test_nothing_that_rewrites_gradients_acts_behind_it(late) -> None:
    with pytest.raises(DefenseError, match=f"put 'gradient_compression' after {late.name}"):
        DefendedStrategy("auto", defenses=[GradientCompression("int8"), late])
    accepted = DefendedStrategy("auto", defenses=[late, GradientCompression("int8")])
    assert [d.name for d in accepted.defenses] == [late.name, "gradient_compression"]


def test_the_residual_behind_noise_holds_noised_values() -> None:
    shapes = [(5, 6), (4, 5)]
    gradients = [torch.randn(shape) for shape in shapes]
    noised, both = model_with(*gradients), model_with(*(g.clone() for g in gradients))
    GradientNoise(None, 1.0, seed=4).on_gradients([*noised.parameters()], context(root=noised))
    where, compression = context(root=both), GradientCompression("topk", share=0.1)
    for defense in (GradientNoise(None, 1.0, seed=4), compression):
        defense.on_gradients([*both.parameters()], where)
    for name, parameter in noised.named_parameters():
        selected = torch.from_numpy(largest(parameter.grad.numpy(), 0.1))
        assert torch.equal(compression.memory[f"residual/{name}"], parameter.grad - selected)


def run(root: Path, compression: GradientCompression, **settings):
    strategy = DefendedStrategy("auto", [compression])
    module = CausalLMModule(tiny_gpt2(dropout=0.0).train(), optimizer="sgd")
    trainer = runs.fit([], root, module=module, n=16, strategy=strategy, **settings)
    return [p.detach().clone() for p in trainer.model.parameters()], trainer


def drop_memory(state: dict) -> bool:
    """Remove residuals and factors wherever a checkpoint holds them; whether there were any."""
    names = [n for n in state if str(n).startswith(("residual/", "factor/"))]
    for name in names:
        del state[name]
    inner = [drop_memory(value) for value in state.values() if isinstance(value, dict)]
    return bool(names) or any(inner)


def test_where_each_process_is_a_client_the_checkpoint_holds_nothing() -> None:
    compression = GradientCompression("topk")
    compression.send(updates())
    assert compression.state_dict().keys() == compression.memory.keys()
    compression.before_setup(context(clients=2))
    assert compression.state_dict() == {}


def test_a_resumed_fit_goes_on_with_residuals_and_factors(tmp_path: Path) -> None:
    for method in ("topk", "low_rank"):
        root = tmp_path / method
        whole, _ = run(root, GradientCompression(method, rank=2), max_epochs=2)
        _, first = run(root, GradientCompression(method, rank=2), max_epochs=1)
        first.save_checkpoint(root / "a.ckpt")
        resumed = GradientCompression(method, rank=2)
        again, _ = run(root, resumed, max_epochs=2, ckpt_path=str(root / "a.ckpt"))
        assert all(torch.equal(a, b) for a, b in zip(whole, again, strict=True))
        # Without the memory it ends elsewhere.
        state = torch.load(root / "a.ckpt", weights_only=False)
        assert drop_memory(state)
        torch.save(state, root / "b.ckpt")
        resumed = GradientCompression(method, rank=2)
        lost, _ = run(root, resumed, max_epochs=2, ckpt_path=str(root / "b.ckpt"))
        assert not all(torch.equal(a, b) for a, b in zip(whole, lost, strict=True))


@pytest.mark.parametrize("method", METHODS)
def test_a_canary_is_compressed_as_a_tensor_and_wholly_sent_in_time(method) -> None:
    generator = torch.Generator().manual_seed(0)
    canary = CanaryGradient(torch.randn(5, 3, 8, generator=generator, dtype=torch.float64))
    where, parameters = context(), [nn.Parameter(torch.zeros(2))]
    later = GradientCompression(method, share=0.3)
    assert later.on_canary(canary, parameters, where) is canary
    lost = GradientCompression(method, share=0.3, error_feedback=False)
    got = lost.on_canary(canary, parameters, where)
    errors = []
    for game in range(3):
        sent = lost.send({"game": canary.samples[:, game].sum(0)})["game"]
        torch.testing.assert_close(got.released[game], sent, rtol=1e-12, atol=1e-12)
        errors.append(compression_error(sent, method))
    assert got.noise_std == pytest.approx(np.sqrt(np.mean(np.square(errors))))
