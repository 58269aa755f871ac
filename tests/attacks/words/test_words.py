"""Words from gradients of a head, and from chats in a flat order."""

import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig, TrainableTokensConfig, get_peft_model
from sklearn.linear_model import LinearRegression
from sklearn.mixture import GaussianMixture
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from lightning_fedleak.attacks import FlatChat, PublicText, UnusableObservation, gradient_of
from lightning_fedleak.attacks.base import RunFacts
from lightning_fedleak.attacks.words import aligned_readout
from lightning_fedleak.attacks.words.aligned import AlignedFlatChat
from lightning_fedleak.attacks.words.direct import BagOfWords, BiasSign, bag_of_words, bias_sign
from lightning_fedleak.attacks.words.flatchat import (
    _Mixture,
    fit_two_gaussians,
    fit_type_counts,
    flatchat,
    flatten,
    separate_clusters,
    tail_start,
)
from lightning_fedleak.attacks.words.head_gradients import gradient_parts, head_parameters
from lightning_fedleak.cli.finetuning import EMBEDDED_MESSAGES, EMBEDDED_MODEL, read_texts
from lightning_fedleak.cli.finetuning.module import load_tokenizer
from lightning_fedleak.model.anatomy import (
    EMBEDDING_WEIGHT,
    HEAD_WEIGHT,
    find_anatomy,
    head_surface,
)
from lightning_fedleak.model.batches import TokenBatch
from lightning_fedleak.model.snapshots import (
    GradientSnapshot,
    Inapplicable,
    Observation,
    Stage,
    UpdateSnapshot,
)
from tests.attacks.row_space.models import backward, llama, ready, texts, with_lora
from tests.helpers.models import tiny_gpt2, tiny_llama

# Non-zero embedding rows are the words read.


def embedding_gradient(ids: torch.Tensor, sparse: bool, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    table = nn.Embedding.from_pretrained(
        torch.randn(60, 8, generator=generator), freeze=False, sparse=sparse
    )
    weights = torch.randn(8, generator=generator) * scale
    (table(ids).tanh() @ weights).sum().backward()
    assert table.weight.grad is not None
    return table.weight.grad


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("scale", [1.0, 1e-30])
def test_names_exactly_the_words_read(sparse: bool, scale: float) -> None:
    ids = torch.tensor([[3, 5, 5, 59], [0, 3, 17, 21]])
    guess = bag_of_words(embedding_gradient(ids, sparse, scale))
    assert sorted(guess.types.tolist()) == ids.unique().tolist()
    assert guess.surface == "input"
    assert guess.n_types == 6
    assert guess.scores is not None
    assert guess.scores.shape == (60,)
    assert bool((guess.scores[guess.types][:-1] >= guess.scores[guess.types][1:]).all())


def test_under_noise_half_a_type_is_named_by_chance_and_rows_above_it_are() -> None:
    """On 400 draws; words whose rows are 20 standard deviations long are always named."""
    generator = torch.Generator().manual_seed(1)
    named, std, used = 0, 3e-4, torch.tensor([3, 17, 250])
    for _ in range(400):
        gradient = torch.randn(500, 16, generator=generator)
        assert len(bag_of_words(gradient, 1.0).types) <= 8
        named += len(bag_of_words(gradient * std, std).types)
        directions = torch.nn.functional.normalize(torch.randn(3, 16, generator=generator))
        gradient[used] += 20 * directions
        types = bag_of_words(gradient * std, std).types[:3]
        assert sorted(types.tolist()) == used.tolist()
    assert 0.5 * 400 - 4 * 200**0.5 <= named <= 0.5 * 400 + 4 * 200**0.5  # a Poisson count


def test_noise_of_unknown_size_or_rows_that_all_exceed_it_are_unknown() -> None:
    gradient = torch.randn(500, 16, generator=torch.Generator().manual_seed(1))
    with pytest.raises(UnusableObservation, match="size of the noise"):
        bag_of_words(gradient, float("nan"))
    with pytest.raises(Inapplicable, match="500 of 500 rows"):
        bag_of_words(gradient, 1e-3)
    attack = BagOfWords()
    settings = {"lr": 1e-3, "weight_decay": 0.1}
    attack.meet(RunFacts(optimizer="AdamW", optimizer_settings=settings, local_steps=3))
    update = UpdateSnapshot(0, Stage.SHARED, {EMBEDDING_WEIGHT: gradient}, noise_std=1e-3)
    with pytest.raises(Inapplicable, match="weight decay alone"):
        attack.run(Observation((update,)))


@pytest.mark.parametrize(("lora", "tied"), [(False, False), (True, False), (True, True)])
def test_words_are_given_away_but_those_that_only_end_a_text(lora: bool, tied: bool) -> None:
    """By a LoRA on the embedding too, from its first step on."""
    model: nn.Module = tiny_gpt2(tied=tied).eval()
    if lora:
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["wte"])).eval()
    ids = torch.tensor([[4, 8, 15, 16, 23, 42], [7, 8, 9, 10, 11, 90]])
    model(input_ids=ids, labels=ids).loss.backward()
    anatomy, attack = find_anatomy(model), BagOfWords()
    (name,) = attack.needs(anatomy).gradients
    assert (".lora_embedding_A." in name) == lora != (name == EMBEDDING_WEIGHT)
    gradient = anatomy.parameter(name).grad
    view = Observation((GradientSnapshot(0, Stage.SHARED, {name: gradient}),))
    assert sorted(attack.run(view).types.tolist()) == ids[:, :-1].unique().tolist()


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("rates", [(0.0, 5e-4, 1e-3), (1e-3, 5e-3, 2e-2)])
def test_rounds_of_adamw_name_the_words_of_all_their_steps(lora, rates) -> None:
    model: nn.Module = tiny_gpt2(tied=False).eval()
    if lora:
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["wte"])).eval()
    anatomy, attack = find_anatomy(model), BagOfWords()
    (name,) = attack.needs(anatomy).gradients
    settings = {"lr": 1e-3, "weight_decay": 0.1}
    attack.meet(RunFacts(optimizer="AdamW", optimizer_settings=settings, local_steps=3))
    words = torch.arange(1, 25).view(3, 1, 8)
    for _ in range(2):  # of the first, a LoRA's A is zero
        weight = anatomy.parameter(name)
        before = weight.detach().clone()
        attack.refresh(anatomy, 0)
        optimizer = torch.optim.AdamW([weight], **settings)
        for rate, ids in zip(rates, words, strict=True):  # a warm-up
            optimizer.param_groups[0]["lr"] = rate
            optimizer.zero_grad()
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
        tensors = {name: (before - weight.detach()) / 1e-3}
        update = UpdateSnapshot(0, Stage.SHARED, tensors, local_steps=3, learning_rate=1e-3)
        guess = attack.run(Observation((update,)))
        assert sorted(guess.types.tolist()) == words[..., :-1].flatten().tolist()
        words = words + 1


@pytest.mark.parametrize(
    "config",
    [
        TrainableTokensConfig(token_indices=[7, 20, 9, 31], target_modules=["wte"]),
        LoraConfig(r=4, target_modules=["c_attn"], trainable_token_indices={"wte": [7, 20, 9, 31]}),
    ],
    ids=["tokens alone", "beside a LoRA"],
)
def test_the_rows_of_listed_tokens_show_which_of_them_were_read(config: Any) -> None:
    model = get_peft_model(tiny_gpt2(tied=False, dropout=0.0), config)
    anatomy, attack = find_anatomy(model), BagOfWords()
    (role,) = attack.needs(anatomy).gradients
    attack.prepare(anatomy)
    for ids, read in (([7, 9, 3, 3, 31], [7, 9]), ([4, 5, 6], [])):  # the last id is no input
        model.zero_grad()
        text = torch.tensor([ids])
        model(input_ids=text, labels=text).loss.backward()
        gradient = anatomy.parameter(role).grad
        snapshot = GradientSnapshot(0, Stage.SHARED, {role: gradient})
        guess = attack.run(Observation((snapshot,)))
        assert (sorted(guess.types.tolist()), guess.surface) == (read, "input")
    assert not attack.needs_control
    attack.needs(find_anatomy(tiny_gpt2(tied=False)))
    assert attack.needs_control


def test_a_tied_matrix_is_refused_at_setup() -> None:
    with pytest.raises(ValueError, match="this model ties head and embedding"):
        BagOfWords().needs(find_anatomy(tiny_gpt2(tied=True)))


# FLATCHAT against Algorithm 1 by scikit-learn; its mixture fit against the one there.


SHAPES = ((1, 8), (2, 8), (4, 16), (8, 16))


def randn(*shape: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def gradient(vocab: int = 3000, d: int = 24, used: int = 60, seed: int = 0) -> torch.Tensor:
    """A gradient whose first ``used`` rows are wide and whose others are narrow."""
    rows = randn(vocab, d, seed=seed) * 1e-5
    rows[:used] = randn(used, d, seed=seed + 1) * 1e-2 - 2e-2
    return rows


def observation(tensor: torch.Tensor) -> Observation:
    return Observation((GradientSnapshot(0, Stage.SHARED, {HEAD_WEIGHT: tensor}),))


def algorithm_1(grad: torch.Tensor, k: int, scorer: str) -> set[int]:
    """The paper's Algorithm 1 with scikit-learn's mixture at its default regularisation."""
    s = grad.double().numpy().sum(axis=1)
    s = s / np.linalg.norm(s)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit = GaussianMixture(2, tol=1e-12, max_iter=10_000, random_state=0).fit(s[:, None])
    p = int(fit.covariances_.ravel().argmax())
    mean, sd = fit.means_.ravel(), fit.covariances_.ravel() ** 0.5
    rank = ((s - mean[1 - p]) / sd[1 - p]) ** 2 - ((s - mean[p]) / sd[p]) ** 2
    return set((rank if scorer == "gmm" else abs(s)).argsort()[::-1][:k].tolist())


@pytest.mark.parametrize("scorer", ["gmm", "abs"])
@pytest.mark.parametrize("k", [30, 60, 100])
def test_names_the_types_of_algorithm_1(scorer: str, k: int) -> None:
    guess = flatchat(gradient(), k, scorer)
    assert set(guess.types.tolist()) == algorithm_1(gradient(), k, scorer)
    assert guess.n_types == k
    assert guess.surface == "output"


def test_finds_the_used_types_and_their_share() -> None:
    guess = flatchat(gradient(), torch.tensor([0.0, 3000.0]))
    assert len(guess.types) == pytest.approx(60, abs=6)
    assert len(set(guess.types.tolist()) & set(range(60))) >= 52
    assert guess.scores is not None
    ordered = guess.scores[guess.types]
    assert bool((ordered[:-1] >= ordered[1:]).all())
    assert float(ordered.min()) >= float(guess.scores.topk(len(guess.types)).values.min())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_row_sums_are_accumulated_widely(dtype: torch.dtype) -> None:
    rows = randn(70, 3000, seed=4).to(dtype)
    sums = flatten(rows)
    assert sums.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(sums.double(), rows.double().sum(1), rtol=1e-5, atol=1e-4)


def test_a_sharded_gradient_is_gathered_after_the_sum() -> None:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        for dtype in (torch.float32, torch.bfloat16):
            rows = gradient(200).to(dtype)
            for placement in (Shard(0), Shard(1), Replicate()):
                torch.testing.assert_close(
                    flatten(distribute_tensor(rows, mesh, [placement])), flatten(rows)
                )
    finally:
        dist.destroy_process_group()


def test_sums_that_are_equal_are_unknown() -> None:
    with pytest.raises(UnusableObservation, match="are equal"):
        flatchat(torch.ones(50, 4), 5)


def test_the_regression_is_least_squares() -> None:
    x = (randn(20, seed=7).abs() * 0.1).tolist()
    y = [30 + 900 * w + 5000 * w * w + e for w, e in zip(x, randn(20, seed=8), strict=True)]
    constant, slope = fit_type_counts(x, [float(v) for v in y]).tolist()
    other = LinearRegression().fit(np.array(x)[:, None], np.array([float(v) for v in y]))
    for weight in (0.01, 0.2):
        expected = other.predict([[weight]])[0]
        assert constant + slope * weight == pytest.approx(expected, rel=1e-6)


def test_the_regression_needs_distinct_weights() -> None:
    with pytest.raises(ValueError, match="one positive weight"):
        fit_type_counts([0.1, 0.1], [3, 4])


def public_text(vocab: int) -> PublicText:
    generator = torch.Generator().manual_seed(9)
    return PublicText(torch.randint(3, vocab, (30, 20), generator=generator))


@pytest.mark.parametrize("tied", [True, False])
def test_prepare_fits_the_regression_on_public_gradients(tied: bool) -> None:
    anatomy = find_anatomy(tiny_llama(tied=tied, vocab=400))
    attack = FlatChat(public_text(400), shapes=SHAPES * 2, seed=5)
    rng = torch.get_rng_state()
    attack.prepare(anatomy)
    assert torch.equal(rng, torch.get_rng_state())
    assert all(p.grad is None for p in anatomy.model.parameters())

    generator = torch.Generator().manual_seed(5)
    weights, counts = [], []
    for size, length in SHAPES * 2:
        batch = public_text(400).batch(size, length, generator)
        s = gradient_of(anatomy, batch, [HEAD_WEIGHT])[HEAD_WEIGHT].double().sum(1)
        mixture = separate_clusters(s / s.norm())
        weights.append([float(mixture.weights[1])])
        counts.append(len({int(t) for row in batch.labels[:, 1:] for t in row}))
    by_hand = LinearRegression().fit(weights, counts)
    assert attack.regressor is not None
    np.testing.assert_allclose(attack.regressor, [by_hand.intercept_, by_hand.coef_[0]], rtol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hidden_states_that_sum_to_zero_are_unknown_not_a_guess(dtype: torch.dtype) -> None:
    """GPT-2's last LayerNorm starts with gain one and no bias: its output sums to zero."""
    model = tiny_gpt2(vocab=400).to(dtype)
    model.transformer.ln_f.weight.data.fill_(1)
    anatomy = find_anatomy(model)
    batch = public_text(400).batch(8, 16, torch.Generator())
    rows = gradient_of(anatomy, batch, [HEAD_WEIGHT])[HEAD_WEIGHT]
    with pytest.raises(UnusableObservation, match="hidden states sum to zero"):
        flatchat(rows, 10)
    attack = FlatChat(public_text(400), shapes=SHAPES)
    attack.prepare(anatomy)
    with pytest.raises(UnusableObservation, match="could not be fitted"):
        attack.run(observation(gradient(400)))

    model.transformer.ln_f.weight.data.mul_(torch.linspace(0.5, 1.5, 16))
    attack.refresh(anatomy, step=10)
    assert attack.regressor is not None
    moved = gradient_of(anatomy, batch, [HEAD_WEIGHT])[HEAD_WEIGHT]
    assert len(flatchat(moved, 10).types) == 10


def test_the_state_carries_the_regression() -> None:
    anatomy = find_anatomy(tiny_llama(vocab=300))
    first = FlatChat(public_text(300), shapes=SHAPES)
    first.prepare(anatomy)
    second = FlatChat(name="again")
    with pytest.raises(UnusableObservation, match="call prepare"):
        second.run(observation(gradient(300)))
    second.load_state_dict(first.state_dict())
    one, two = (a.run(observation(gradient(300))) for a in (first, second))
    assert torch.equal(one.types, two.types)
    assert one.n_types == two.n_types is not None


def test_another_word_for_the_number_of_types_is_refused() -> None:
    with pytest.raises(ValueError, match="'predicted'"):
        FlatChat(n_types="oracle")


def test_a_prediction_without_public_text_is_refused_at_setup() -> None:
    with pytest.raises(ValueError, match="public_text="):
        FlatChat().prepare(find_anatomy(tiny_gpt2()))


def normal(n: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, generator=generator, dtype=torch.float64)


def peaked(n: int, seed: int = 0) -> torch.Tensor:
    """Log-normal unused rows and a few wide used ones, as the row sums of a real model."""
    x = normal(n, seed).mul(2).exp() * 1e-6
    used = n // 50
    x[:used] = normal(used, seed + 1) * 2e-3 - 3e-3
    return x / x.norm()


SAMPLES = {
    "two gaussians": torch.cat([normal(5000, 0) * 1e-4, normal(120, 1) * 3e-2 - 0.01]),
    "peaked": peaked(6000),
    "heavy tails": normal(6000, 2) / normal(6000, 3).abs().sqrt(),
    "offset": normal(3000, 4) * torch.where(normal(3000, 5) > 1, 20.0, 1.0) + 1e4,
    "spike": torch.cat([normal(2000, 8) * 1e-7, normal(2000, 9) * 1e-3, normal(80, 10)]),
    "few": torch.cat([normal(50, 6), normal(10, 7) * 30]),
}


def log_likelihood(x: torch.Tensor, mixture: _Mixture) -> float:
    """The mean log density of values, one by one."""
    parts = torch.distributions.Normal(mixture.means, mixture.variances.sqrt())
    each = mixture.weights.log() + parts.log_prob(x.double()[:, None])
    return float(each.logsumexp(1).mean())


def sklearn_fit(x: torch.Tensor, start: _Mixture, reg_covar: float = 0.0) -> GaussianMixture:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return GaussianMixture(
            2,
            tol=1e-13,
            max_iter=50_000,
            reg_covar=reg_covar,
            weights_init=start.weights.numpy(),
            means_init=start.means.numpy()[:, None],
            precisions_init=(1 / start.variances).numpy()[:, None, None],
        ).fit(x.numpy()[:, None])


@pytest.mark.parametrize("name", SAMPLES)
def test_reaches_the_optimum_that_scikit_learn_reaches_from_the_same_start(name: str) -> None:
    x = SAMPLES[name]
    fitted = fit_two_gaussians(x, start=0.05)
    other = sklearn_fit(x, tail_start(x.numpy(), 0.05))
    reached = other.score(x.numpy()[:, None])
    assert abs(log_likelihood(x, fitted) - reached) <= 1e-6 * abs(reached)
    order = other.covariances_.ravel().argsort()
    np.testing.assert_allclose(fitted.weights, other.weights_[order], rtol=2e-3)
    np.testing.assert_allclose(fitted.variances, other.covariances_.ravel()[order], rtol=5e-3)
    spread = other.covariances_.ravel()[order] ** 0.5
    assert (abs(fitted.means.numpy() - other.means_.ravel()[order]) <= 3e-3 * spread).all()


def test_scale_order_and_dtype_do_not_matter() -> None:
    x = SAMPLES["peaked"]
    fitted = fit_two_gaussians(x)
    scaled = fit_two_gaussians(x.flip(0) * 1e-9)
    torch.testing.assert_close(scaled.weights, fitted.weights, rtol=1e-6, atol=0)
    torch.testing.assert_close(scaled.variances * 1e18, fitted.variances, rtol=1e-6, atol=0)
    single = fit_two_gaussians(x.float())
    torch.testing.assert_close(single.weights, fitted.weights, rtol=1e-3, atol=0)


def test_values_that_are_mostly_one_number() -> None:
    x = torch.zeros(1000, dtype=torch.float64)
    x[:40] = normal(40, 0)
    fitted = fit_two_gaussians(x)
    assert float(fitted.weights[1]) == pytest.approx(0.04, rel=0.01)
    assert bool((fitted.variances > 0).all())
    assert math.isfinite(log_likelihood(x, fitted))


def test_tail_start_splits_by_distance_from_the_median() -> None:
    start = tail_start(np.array([0.0, 1.0, 2.0, 3.0, 100.0]), 0.2)
    assert start.weights.tolist() == [0.8, 0.2]
    assert start.means.tolist() == [1.5, 100.0]
    assert start.variances.tolist() == [1.25, 98.5**2]


# Words off the head: rows of a LoRA's B are words, and the sign rule on its bias.


NAME = "base_model.model.lm_head.lora_B.default.weight"
TARGETS = ["q_proj", "lm_head"]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("scaled", [False, True])
def test_the_parts_of_public_text_add_up_to_bs_gradient(*, tied: bool, scaled: bool) -> None:
    model = with_lora(
        ready(llama(tie_word_embeddings=tied)), 4, TARGETS, use_rslora=scaled, lora_dropout=0.1
    )
    anatomy = find_anatomy(model)
    surface = head_surface(anatomy)
    assert surface.role == NAME
    ids = texts(3, 8)
    backward(model, ids)
    parts = gradient_parts(anatomy, TokenBatch(ids, ids, None, "causal"))
    result = parts.gradient(*head_parameters(anatomy))
    torch.testing.assert_close(result, anatomy.parameter(NAME).grad, rtol=1e-4, atol=1e-7)
    some = torch.tensor([7, 5, 100])
    torch.testing.assert_close(parts.gradient(*head_parameters(anatomy), some), result[some])
    logits = model(input_ids=ids).logits
    mine = F.linear(parts.hidden.view(3, 7, -1), *head_parameters(anatomy))
    torch.testing.assert_close(mine, logits[:, :-1], rtol=1e-4, atol=1e-5)


def test_a_head_that_is_trained_itself_is_read_itself() -> None:
    model = with_lora(ready(llama()), 4, TARGETS)
    anatomy = find_anatomy(model)
    anatomy.parameter(HEAD_WEIGHT).requires_grad_(True)
    assert head_surface(anatomy).role == HEAD_WEIGHT
    copied = get_peft_model(
        ready(llama()), LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"])
    )
    anatomy = find_anatomy(copied)
    assert head_surface(anatomy).role == HEAD_WEIGHT
    assert anatomy.trainable(HEAD_WEIGHT)
    elsewhere = find_anatomy(with_lora(ready(llama()), 4, ["q_proj"]))
    assert AlignedFlatChat(texts(4, 8)).needs(elsewhere).gradients == (HEAD_WEIGHT,)
    assert not elsewhere.trainable(HEAD_WEIGHT)


@pytest.fixture(scope="module")
def embedded() -> tuple[nn.Module, list[Tensor], list[Tensor]]:
    """The embedded model with a LoRA on its head, and texts of two kinds."""
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_pretrained(EMBEDDED_MODEL, dtype=torch.float32)
    config = LoraConfig(r=8, lora_alpha=16, target_modules=["lm_head"])
    tokenizer = load_tokenizer(None)
    ids = [torch.tensor(tokenizer(t)["input_ids"]) for t in read_texts(EMBEDDED_MESSAGES)]
    return get_peft_model(plain, config).eval(), ids[:150], ids[150:]


def shared(model: nn.Module, rows: list[Tensor]) -> tuple[Any, Observation, set[int]]:
    anatomy = find_anatomy(model)
    ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = torch.arange(ids.shape[1])[None] < torch.tensor([[len(r)] for r in rows])
    labels = ids.masked_fill(~mask, -100)
    backward(model, ids, labels=labels, attention_mask=mask.long())
    view = Observation((GradientSnapshot(0, Stage.SHARED, {NAME: anatomy.parameter(NAME).grad}),))
    truth = labels[:, 1:]
    return anatomy, view, set(truth[truth >= 0].tolist())


def f1(result: Tensor, truth: set[int]) -> float:
    guess = set(result.tolist())
    return 2 * len(guess & truth) / (len(guess) + len(truth))


@pytest.fixture(scope="module")
def learned(embedded: Any) -> AlignedFlatChat:
    model, public, _ = embedded
    attack = AlignedFlatChat(public, calibration_tokens=1_500)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(aligned_readout, "_REPEATS", 2)
        attack.prepare(find_anatomy(model))
    return attack


def test_flatchat_sums_its_columns(embedded: Any) -> None:
    model, _, private = embedded
    anatomy, view, truth = shared(model, private[:8])
    attack = FlatChat(n_types=len(truth))
    assert attack.needs(anatomy).gradients == (NAME,)
    attack.prepare(anatomy)
    assert f1(attack.run(view).types, truth) > 0.5


def test_updates_of_adam_are_unknown_and_of_sgd_are_read(embedded, learned) -> None:
    model, public, private = embedded
    anatomy, view, truth = shared(model, private[:8])
    assert learned.needs(anatomy).gradients == (NAME,)
    gradient = view.gradient(NAME)
    update = UpdateSnapshot(0, Stage.SHARED, {NAME: gradient}, local_steps=1, learning_rate=0.1)
    attack = AlignedFlatChat(public, calibration_tokens=1_500)
    for optimizer in ("AdamW", "SGD"):
        attack.meet(RunFacts(optimizer=optimizer, optimizer_settings={"lr": 0.1}, local_steps=1))
        if optimizer == "SGD":  # as fitted on gradients
            attack.load_state_dict(learned.state_dict())
            attack.refresh(anatomy, 0)
            assert f1(attack.run(Observation((update,))).types, truth) > 0.85
            continue
        attack.calibration_seconds = 60.0  # of an earlier run
        attack.prepare(anatomy)
        assert attack.calibration_seconds < 60.0
        attack.refresh(anatomy, 0)
        with pytest.raises(
            UnusableObservation, match="LoRA head's updates by AdamW are not supported"
        ):
            attack.run(Observation((update,)))


def bias_gradient(seed: int, tokens: int, spread: float) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(tokens, 50, generator=generator, dtype=torch.float64) * spread
    labels = torch.randint(50, (tokens,), generator=generator)
    bias = torch.zeros(50, dtype=torch.float64, requires_grad=True)
    loss = torch.nn.functional.cross_entropy(logits + bias, labels)
    return torch.autograd.grad(loss, bias)[0], labels


@given(seed=st.integers(0, 10**6), tokens=st.integers(1, 60), spread=st.floats(0.01, 4))
def test_names_used_types_only_and_all_that_outweigh_their_probability(seed, tokens, spread):
    gradient, labels = bias_gradient(seed, tokens, spread)
    guess = bias_sign(gradient)
    assert set(guess.types.tolist()) <= set(labels.tolist())
    assert set(guess.types.tolist()) == {t for t in range(50) if gradient[t] < 0}
    assert guess.n_types == len(guess.types)
    values = gradient[guess.types]
    assert bool((values[:-1] <= values[1:]).all())


def test_a_head_without_bias_is_refused_at_setup() -> None:
    with pytest.raises(ValueError, match="this head has none"):
        BiasSign().needs(find_anatomy(tiny_gpt2()))
