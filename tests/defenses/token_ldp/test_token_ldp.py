"""TokenLDP: the distribution of what the model sees, what stays, refusals, and a real fit."""

import copy
import itertools
import math
from collections import Counter
from types import MappingProxyType, SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import scipy.integrate
import scipy.optimize
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.defenses.token_ldp import decoded_epsilon
from benchmarks.papers.reference import reference_sample
from lightning_fedleak.defenses import BatchForm, DefenseError, TokenLDP
from lightning_fedleak.defenses.token_ldp.mechanisms import (
    Randomizer,
    argmax_keep,
    bit_rates,
    grr_keep,
    the_rates,
    the_threshold,
    uniform_keep,
)
from lightning_fedleak.defenses.token_ldp.token_ldp import _ReleaseCounter
from lightning_fedleak.defenses.token_ldp.words import special_of
from lightning_fedleak.strategies import DefendedStrategy
from tests.helpers.inputs import context
from tests.helpers.ldp import transition_of
from tests.helpers.lightning_modules import CausalLMModule, random_token_loader
from tests.helpers.models import VOCAB, tiny_bert_classifier, tiny_bert_mlm, tiny_gpt2, tiny_t5
from tests.helpers.settings import QUIET

SPECIAL = {0, 1, 2}
"""Pad, start and end of tiny_gpt2."""
MASK_ID = 4


@pytest.fixture(scope="module")
def gpt2() -> nn.Module:
    return tiny_gpt2()


def rows(n: int, length: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (n, length), generator=generator)


def defended(defense: TokenLDP, root: nn.Module, batch: Any, **fields: Any) -> Any:
    where = context(root, **fields)
    defense.before_setup(where)
    return defense.on_batch(batch, where)


def test_short_rows_spend_more_on_each_token(gpt2: nn.Module) -> None:
    ids = rows(4000, 6)
    mask = torch.ones_like(ids)
    mask[::2, 2:] = 0
    ids[::2, 2:] = 0
    batch = {"input_ids": ids, "attention_mask": mask}
    drawn = defended(TokenLDP("grr", 12.0), gpt2, batch)["input_ids"]
    unchanged = (drawn == ids).double()
    k = VOCAB - len(SPECIAL)
    for start, n in ((0, 2), (1, 6)):
        expected = Randomizer.with_defaults("grr", k).keep(12.0 / n)
        sigma = math.sqrt(expected * (1 - expected) / (2000 * n))
        assert float(unchanged[start::2, :n].mean()) == pytest.approx(expected, abs=5 * sigma)
    assert torch.equal(drawn[::2, 2:], ids[::2, 2:])


def test_tokens_outside_of_a_public_set(gpt2: nn.Module) -> None:
    public = [10, 12, 14, 16]
    ids = rows(4000, 3)
    ids[:, 0], ids[:, 1], ids[:, 2] = 11, 14, 1
    defense = TokenLDP("grr", 2.0, "token", domain=public, memoize=False)
    drawn = defended(defense, gpt2, ids)
    assert set(drawn[:, :2].unique().tolist()) == set(public)
    assert (drawn[:, 2] == 1).all()
    expected = torch.zeros(VOCAB, dtype=torch.float64)
    expected[torch.tensor(public)] = 0.25
    assert chi_square(drawn[:, 0], expected) > 1e-4
    expected[torch.tensor(public)] = transition_of(Randomizer.with_defaults("grr", 4), 2.0)[2]
    assert chi_square(drawn[:, 1], expected) > 1e-4


def test_what_can_be_guessed_guarantees_nothing(gpt2: nn.Module) -> None:
    defense = TokenLDP("grr", 4.0, seed=0)
    defended(defense, gpt2, rows(2, 5))
    assert defense.guarantee.startswith("none")
    assert defense.epsilon_per_sequence == defense.epsilon_spent == math.inf


def test_special_tokens_stay_and_none_comes_in(gpt2: nn.Module) -> None:
    ids = rows(300, 8)
    ids[:, 0], ids[:, -1] = 1, 2
    tokenizer = SimpleNamespace(
        all_special_ids=[7, 8, 9], unk_token_id=9, pad_token_id=7, cls_token_id=8
    )
    drawn = defended(TokenLDP("grr", 30.0, special_ids=tokenizer), gpt2, ids)
    assert int(drawn.min()) < 3
    assert special_of(tokenizer, "causal", True, None).tolist() == [7, 8]
    gpt_like = SimpleNamespace(all_special_ids=[9], unk_token_id=9, eos_token_id=9)
    assert special_of(gpt_like, "causal", True, None).tolist() == [9]


@given(
    data=st.data(),
    shape=st.tuples(st.integers(0, 4), st.integers(1, 9)),
    mechanism=st.sampled_from(["grr", "rappor", "the", "dbitflip"]),
    per=st.sampled_from(["token", "sequence"]),
    memoize=st.booleans(),
    dtype=st.sampled_from([torch.int64, torch.int32]),
)
def test_whatever_the_batch_holds(
    data: st.DataObject, shape: tuple, mechanism: str, per: str, memoize: bool, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    ids, mask, ignored = (torch.randint(high, shape, generator=generator) for high in (12, 2, 2))
    ids = ids.to(dtype)
    labels = ids.masked_fill(ignored == 1, -100)
    batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    before = copy.deepcopy(batch)
    defense = TokenLDP(
        mechanism,
        data.draw(st.floats(0.01, 50)),
        per,
        domain=range(3, 90),
        special_ids=SPECIAL,
        form=BatchForm(kind="causal"),
        memoize=memoize,
    )
    new = defended(defense, nn.Identity(), batch)
    torch.testing.assert_close(batch, before, rtol=0, atol=0)
    special = ids < 3
    read = (mask == 1) | (labels != -100)
    assert torch.equal(new["input_ids"][special], ids[special])
    assert (new["input_ids"][~special & ~read] == 0).all()
    drawn = new["input_ids"][~special & read]
    assert ((drawn >= 3) & (drawn < 90)).all()
    assert torch.equal(new["labels"], new["input_ids"].masked_fill(labels == -100, -100))
    assert new["input_ids"].dtype == new["labels"].dtype == dtype


def test_masked_words_have_one_replacement() -> None:
    ids = rows(400, 8, seed=2).clamp(min=5)
    chosen = torch.rand(ids.shape, generator=torch.Generator().manual_seed(0)) < 0.4
    how = torch.rand(ids.shape, generator=torch.Generator().manual_seed(1))
    inputs = torch.where(chosen & (how < 0.8), MASK_ID, ids)
    inputs = torch.where(chosen & (how > 0.9), rows(400, 8, seed=3).clamp(min=5), inputs)
    labels = ids.masked_fill(~chosen, -100)
    batch = {"input_ids": inputs, "labels": labels}
    model = tiny_bert_mlm()
    new = defended(TokenLDP("grr", 4.0, "token", special_ids=[0, MASK_ID]), model, batch)
    masked = inputs == MASK_ID
    assert torch.equal(new["input_ids"] == MASK_ID, masked)
    assert torch.equal(new["labels"] == -100, ~chosen)
    both = chosen & ~masked
    assert torch.equal(new["input_ids"][both], new["labels"][both])
    # A position that masking has filled with a random word keeps the word like any other.
    expected = Randomizer.with_defaults("grr", VOCAB - 2).keep(4.0)
    for place in (chosen & masked, chosen & (how > 0.9), chosen & (how > 0.8) & (how < 0.9)):
        unchanged = float((new["labels"] == ids)[place].double().mean())
        assert unchanged == pytest.approx(expected, abs=5 * math.sqrt(0.25 / int(place.sum())))
    # Masked anew, the words of a row are the same, and so are their replacements.
    defense = TokenLDP("grr", 4.0, "token", special_ids=[0, MASK_ID])
    first = defended(defense, model, {"input_ids": ids, "labels": torch.full_like(ids, -100)})
    second = defense.on_batch(batch, context(model))
    assert torch.equal(second["labels"][chosen], first["input_ids"][chosen])
    assert torch.equal(second["input_ids"][~chosen], first["input_ids"][~chosen])


def test_both_texts_of_an_encoder_decoder() -> None:
    source, target = rows(300, 5), rows(300, 4, seed=1)
    target[:, -1] = -100
    batch = {"input_ids": source, "labels": target}
    defense = TokenLDP("grr", 8 * 3.0)
    new = defended(defense, tiny_t5(), batch)
    assert defense.longest == 8
    expected = Randomizer.with_defaults("grr", VOCAB - len(defense._words.special)).keep(3.0)
    for key, text in (("input_ids", source), ("labels", target[:, :3])):
        unchanged = float((new[key][:, : text.shape[1]] == text).double().mean())
        assert unchanged == pytest.approx(expected, abs=5 * math.sqrt(0.25 / text.numel()))
    assert (new["labels"][:, -1] == -100).all()
    with pytest.raises(DefenseError, match="would get decoder_input_ids unchanged"):
        defense.on_batch({**batch, "decoder_input_ids": target}, context(tiny_t5()))


def test_classes_are_not_covered_as_the_guarantee_says() -> None:
    ids, classes = rows(5, 6), torch.tensor([0, 1, 2, 0, 1])
    model = tiny_bert_classifier()
    with pytest.raises(DefenseError, match="special_ids must be given for a classifier"):
        defended(TokenLDP("grr", 1.0), model, {"input_ids": ids, "labels": classes})
    defense = TokenLDP("grr", 1.0, special_ids=[])
    new = defended(defense, model, {"input_ids": ids, "labels": classes})
    assert new["labels"] is classes
    assert not torch.equal(new["input_ids"], ids)
    assert "Not covered: labels of a classifier" in defense.guarantee


def test_memoised_rows_keep_their_replacement(gpt2: nn.Module) -> None:
    ids = rows(6, 8)
    where = context(gpt2)
    defense = TokenLDP("rappor", 40.0)
    first = defended(defense, gpt2, ids)
    order = torch.tensor([4, 0, 2])
    padded = torch.cat([torch.zeros(3, 2, dtype=torch.int64), ids[order]], dim=1)
    again = defense.on_batch(padded, where)
    assert torch.equal(again[:, 2:], first[order])
    assert torch.equal(again[:, :2], padded[:, :2])
    changed = ids.clone()
    changed[:, 7] = (changed[:, 7] - 3 + 1) % (VOCAB - 3) + 3
    other = defense.on_batch(changed, where)
    assert float((other == first).double().mean()) < 0.9
    for fields in ({"client": 1}, {"entropy": b"f" * 32}):
        assert not torch.equal(defense.on_batch(ids, context(gpt2, **fields)), first)
    assert defense.releases_per_example == 1
    assert defense.epsilon_spent == defense.epsilon_per_sequence == 40.0
    state = defense.state_dict()
    defense.teardown()
    defense.load_state_dict(state)  # another fit in one process: its own past counts once
    assert not torch.equal(defended(defense, gpt2, ids, entropy=b"h" * 32), first)
    assert (defense.releases_per_example, defense.epsilon_spent) == (2, 80.0)


def test_equal_rows_get_one_replacement_only_with_memoisation(gpt2: nn.Module) -> None:
    ids = rows(1, 40).expand(2, 40)
    assert torch.equal(*defended(TokenLDP("grr", 40.0), gpt2, ids))
    assert not torch.equal(*defended(TokenLDP("grr", 40.0, memoize=False), gpt2, ids))


def test_the_published_protocol_is_available_and_warned_about(gpt2: nn.Module) -> None:
    ids = rows(6, 8)
    ids[:, 0], ids[:, -2:] = 1, 0
    mask = (ids != 0).long()
    for mechanism in ("grr", "rappor", "the", "dbitflip"):
        with pytest.warns(UserWarning, match="which words occur in the batch is visible"):
            defense = TokenLDP.as_published(mechanism, 1.0)
        new = defended(defense, gpt2, {"input_ids": ids, "attention_mask": mask})["input_ids"]
        assert set(new.unique().tolist()) <= set(ids.unique().tolist())
        assert not torch.equal(new[:, -2:], ids[:, -2:])
        assert defense.guarantee.startswith("none")
        assert defense.epsilon_per_sequence == math.inf
        assert not defense.memoize
    with pytest.warns(UserWarning, match="holds no guarantee"):
        defense = TokenLDP.as_published("grr", 1.0)
    assert defense.epsilon == 1.0
    one = torch.full((3, 3), 9)
    assert torch.equal(defended(defense, gpt2, one), one)


def test_labels_that_are_shifted_are_refused(gpt2: nn.Module) -> None:
    text = rows(4, 9)
    with pytest.raises(DefenseError, match="its inputs, not shifted"):
        defended(TokenLDP("grr", 1.0), gpt2, (text[:, :-1], text[:, 1:]))


def test_a_batch_of_unknown_form_is_refused_with_what_to_do(gpt2: nn.Module) -> None:
    ids = rows(2, 4)
    for batch, message in (
        ({"ids": ids}, "no 'input_ids'"),
        (MappingProxyType({"input_ids": ids}), "cannot be copied with other ids"),
    ):
        with pytest.raises(DefenseError, match=f"{message}.*Let the collate function") as refused:
            defended(TokenLDP("grr", 1.0), gpt2, batch)
        assert "batch_adapter" not in str(refused.value)


def test_fields_that_may_be_text_stop_training(gpt2: nn.Module) -> None:
    batch = {"input_ids": rows(2, 4), "text": ["a b", "c d"], "position_ids": rows(2, 4)}
    with pytest.raises(DefenseError, match=r"would get text unchanged.*public_fields=\['text'\]"):
        defended(TokenLDP("grr", 1.0), gpt2, batch)
    new = defended(TokenLDP("grr", 1.0, form=BatchForm(public_fields=["text"])), gpt2, batch)
    assert new["text"] is batch["text"]


class Recording(CausalLMModule):
    def __init__(self) -> None:
        super().__init__(tiny_gpt2())
        self.seen: list[dict[str, Tensor]] = []
        self.validated: list[Tensor] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.seen.append({k: v.clone() for k, v in batch.items()})
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.validated.append(batch["input_ids"].clone())


class Truth(pl.Callback):
    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def on_train_batch_end(self, _t: Any, _m: Any, _o: Any, batch: Any, _i: int) -> None:
        self.seen.append(batch["input_ids"].clone())


def ordered(loader: DataLoader[Any]) -> DataLoader[Any]:
    return DataLoader(loader.dataset, batch_size=loader.batch_size)


def fit(defense: TokenLDP | None, epochs: int = 2) -> tuple[Recording, Truth, Tensor]:
    module, truth = Recording(), Truth()
    trainer = pl.Trainer(
        strategy=DefendedStrategy("auto", [] if defense is None else [defense]),
        max_epochs=epochs,
        callbacks=[truth],
        **QUIET,
    )
    torch.manual_seed(5)
    loader = ordered(random_token_loader(n=8, padded=True))
    trainer.fit(module, loader, ordered(random_token_loader(n=4, seed=9)))
    return module, truth, torch.rand(3)


def test_in_a_fit_the_module_sees_other_words_and_callbacks_the_truth() -> None:
    plain, truth, after = fit(None)
    defense = TokenLDP("rappor", 60.0, seed=7)
    module, same_truth, same_after = fit(defense)
    assert torch.equal(torch.stack(truth.seen), torch.stack(same_truth.seen))
    assert torch.equal(torch.stack(plain.validated), torch.stack(module.validated))
    for batch, true in zip(module.seen, truth.seen, strict=True):
        words = batch["attention_mask"] == 1
        assert not torch.equal(batch["input_ids"][words], true[words])
        assert torch.equal(batch["input_ids"][~words], true[~words])
        assert torch.equal(batch["labels"], batch["input_ids"].masked_fill(~words, -100))
    for first, second in zip(module.seen[:2], module.seen[2:], strict=True):
        assert torch.equal(first["input_ids"], second["input_ids"])
    assert defense.releases_per_example == 1
    assert torch.equal(after, same_after)  # no global generator was drawn from

    again, _, _ = fit(TokenLDP("rappor", 60.0, seed=7))
    for one, other in zip(module.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)
    other, _, _ = fit(TokenLDP("rappor", 60.0, seed=8))
    assert not torch.equal(module.seen[0]["input_ids"], other.seen[0]["input_ids"])


def test_a_checkpoint_carries_the_counts_and_no_secret(tmp_path: Any) -> None:
    loader = ordered(random_token_loader(n=8))
    options = {**QUIET}
    first = TokenLDP("grr", 20.0, memoize=False)
    trainer = pl.Trainer(strategy=DefendedStrategy("auto", [first]), max_epochs=2, **options)
    before = Recording()
    trainer.fit(before, loader)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    state = torch.load(tmp_path / "a.ckpt", weights_only=True)["lightning_fedleak_defenses"]
    assert state == {"token_ldp": {"batches": 4, "releases": 2, "longest": 12, "epsilon": 20.0}}
    second = TokenLDP("grr", 20.0, memoize=False)
    trainer = pl.Trainer(strategy=DefendedStrategy("auto", [second]), max_epochs=3, **options)
    after = Recording()
    trainer.fit(after, loader, ckpt_path=tmp_path / "a.ckpt")
    assert len(after.seen) == 2
    assert second.releases_per_example == 3
    assert second.epsilon_spent == 60.0
    for observed in before.seen:
        assert not torch.equal(observed["input_ids"], after.seen[0]["input_ids"])


# Mechanisms of local DP against enumeration, quadrature and multi-freq-ldpy's clients.


RULES = [
    ("grr", "uniform"),
    ("rappor", "uniform"),
    ("rappor", "first"),
    ("the", "argmax"),
    ("the", "uniform"),
    ("the", "first"),
    ("dbitflip", "uniform"),
    ("dbitflip", "first"),
]
ALIKE = 1e-4
"""A true distribution is rejected once in 10,000 runs; all draws are seeded."""


def by_enumeration(randomizer: Randomizer, p: float, q: float) -> Tensor:
    """The distribution of the decoded value from all reported vectors, subset by subset."""
    b, d = randomizer.k, randomizer.bits
    distribution = torch.zeros(b, b, dtype=torch.float64)
    subsets = list(itertools.combinations(range(b), d))
    for x, subset in itertools.product(range(b), subsets):
        for bits in itertools.product([0, 1], repeat=d):
            probability = 1.0 / len(subsets)
            for place, bit in zip(subset, bits, strict=True):
                rate = p if place == x else q
                probability *= rate if bit else 1 - rate
            result = [place for place, bit in zip(subset, bits, strict=True) if bit]
            if randomizer.decode == "first":
                distribution[x, min(result, default=0)] += probability
            else:
                for place in result or range(b):
                    distribution[x, place] += probability / len(result or range(b))
    return distribution


def draws(randomizer: Randomizer, x: int, epsilon: float, n: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    uniforms = torch.rand((n, 2), generator=generator, dtype=torch.float64)
    return randomizer.sample(torch.full((n,), x), epsilon, uniforms)


def chi_square(drawn: Tensor, distribution: Tensor) -> float:
    """p-value of the draws under the distribution; rare outcomes are pooled."""
    n = len(drawn)
    observed = torch.bincount(drawn, minlength=len(distribution)).double()
    assert len(observed) == len(distribution)
    assert not bool((observed[distribution == 0] > 0).any())
    common = distribution * n >= 5
    observed = torch.cat([observed[common], observed[~common].sum()[None]])
    expected = torch.cat([distribution[common], distribution[~common].sum()[None]]) * n
    selected = expected > 1e-9
    distance = ((observed[selected] - expected[selected]) ** 2 / expected[selected]).sum()
    return float(scipy.stats.chi2.sf(distance, len(expected[selected]) - 1))


@st.composite
def randomizers(draw: st.DrawFn, largest: int, rules: list[tuple[str, str]] = RULES) -> Randomizer:
    """Return one of a rule for at most so many words; dBitFlipPM may sample its bits."""
    (mechanism, decode), k = draw(st.sampled_from(rules)), draw(st.integers(2, largest))
    if mechanism == "dbitflip" and draw(st.booleans()):
        return Randomizer.with_defaults(mechanism, k, None, draw(st.integers(1, k)))
    return Randomizer.with_defaults(mechanism, k, decode)


@given(
    randomizers(6, [r for r in RULES if r[0] != "grr" and r[1] != "argmax"]), st.floats(0.05, 12)
)
@settings(max_examples=40)
def test_the_law_is_that_of_the_decoded_vector(randomizer: Randomizer, epsilon: float) -> None:
    rates = the_rates(epsilon) if randomizer.mechanism == "the" else bit_rates(epsilon)
    expected = by_enumeration(randomizer, *rates)
    torch.testing.assert_close(transition_of(randomizer, epsilon), expected, rtol=1e-10, atol=1e-13)


@given(randomizers(40), st.floats(0.01, 20))
@settings(max_examples=200)
def test_epsilon_holds_exactly(randomizer: Randomizer, epsilon: float) -> None:
    k = randomizer.k
    distribution = transition_of(randomizer, epsilon)
    torch.testing.assert_close(
        distribution.sum(1), torch.ones(k, dtype=torch.float64), rtol=1e-12, atol=0
    )
    assert float(distribution.min()) > 0
    worst = float((distribution.amax(0) / distribution.amin(0)).max().log())
    assert worst <= epsilon * (1 + 1e-6) + 1e-9
    assert decoded_epsilon(randomizer, epsilon) == pytest.approx(worst, rel=1e-5, abs=1e-7)
    if randomizer.mechanism == "grr":
        assert worst == pytest.approx(epsilon, rel=1e-6)


@pytest.mark.parametrize(
    ("k", "epsilon"), [(2, 0.1), (3, 30.0), (17, 5.0), (1000, 1.0), (50257, 7.5)]
)
def test_the_largest_of_noised_numbers(k: int, epsilon: float) -> None:
    scale = 2 / epsilon

    def density(t: float) -> float:
        """Return Laplace's density at t - 1, times its chance to be below t to the k - 1."""
        below = math.log(0.5) + t / scale if t < 0 else math.log1p(-0.5 * math.exp(-t / scale))
        return math.exp((k - 1) * below - abs(t - 1) / scale) / (2 * scale)

    breaks = [-np.inf, 0.0, 0.5, 1.0, *(1 + 2 / epsilon * np.arange(1, 40)), np.inf]
    parts = [
        scipy.integrate.quad(density, a, b, epsabs=1e-14, epsrel=1e-11, limit=200)[0]
        for a, b in itertools.pairwise(breaks)
    ]
    assert argmax_keep(k, epsilon) == pytest.approx(sum(parts), rel=1e-8)


def test_closed_forms() -> None:
    assert grr_keep(50257, 10.0) == pytest.approx(math.exp(10) / (math.exp(10) + 50256), rel=1e-12)
    assert grr_keep(50257, 2000.0) == 1.0
    p, q = bit_rates(3.0)
    assert (p / q) ** 2 == pytest.approx(math.exp(3.0), rel=1e-12)
    assert p + q == 1.0
    binomial = scipy.stats.binom(999, q)
    n = np.arange(1000)
    expected = p * float((binomial.pmf(n) / (1 + n)).sum()) + (1 - p) * binomial.pmf(0) / 1000
    assert uniform_keep(1000, p, q) == pytest.approx(expected, rel=1e-10)
    assert uniform_keep(10, 1.0, 0.0) == 1.0
    assert math.isfinite(uniform_keep(50257, *bit_rates(1e-9)))
    assert uniform_keep(50257, *bit_rates(1e-9)) == pytest.approx(1 / 50257, rel=1e-6)
    assert argmax_keep(50257, 1e-9) == pytest.approx(1 / 50257, rel=1e-6)


@pytest.mark.parametrize("epsilon", [0.5, 5.0, 40.0])
def test_the_threshold_is_that_of_the_aggregator(epsilon: float) -> None:
    from multi_freq_ldpy.pure_frequency_oracles.HE import find_tresh

    result = scipy.optimize.minimize_scalar(
        find_tresh.py_func,
        bounds=[0.5, 1],
        method="bounded",
        args=(epsilon,),
        options={"xatol": 1e-9},
    )
    assert the_threshold(epsilon) == pytest.approx(result.x, abs=1e-5)
    theta = the_threshold(epsilon)
    laplace = scipy.stats.laplace(scale=2 / epsilon)
    expected = (laplace.sf(theta - 1), laplace.sf(theta))
    assert the_rates(epsilon) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("mechanism", "decode", "k", "x", "bits"),
    [
        *((*rule, k, x, None) for rule in RULES for k, x in ((2, 1), (7, 0), (300, 120))),
        *(("dbitflip", None, k, x, d) for k, d, x in ((11, 4, 5), (6, 1, 5))),
    ],
)
def test_draws_follow_the_law(
    mechanism: str, decode: str | None, k: int, x: int, bits: int | None
) -> None:
    randomizer = Randomizer.with_defaults(mechanism, k, decode, bits)
    for epsilon in (0.7, 5.0):
        drawn = draws(randomizer, x, epsilon, 60_000, seed=k + x)
        assert chi_square(drawn, transition_of(randomizer, epsilon)[x]) > ALIKE


@pytest.mark.parametrize(("mechanism", "decode"), [RULES[0], RULES[2], RULES[3], RULES[6]])
def test_each_draw_has_its_own_epsilon(mechanism: str, decode: str) -> None:
    randomizer = Randomizer.with_defaults(mechanism, 9, decode)
    epsilon = torch.tensor([0.5, 8.0], dtype=torch.float64).repeat(40_000)
    index = torch.tensor([3, 6]).repeat(40_000)
    generator = torch.Generator().manual_seed(4)
    uniforms = torch.rand((80_000, 2), generator=generator, dtype=torch.float64)
    drawn = randomizer.sample(index, epsilon, uniforms)
    assert chi_square(drawn[::2], transition_of(randomizer, 0.5)[3]) > ALIKE
    assert chi_square(drawn[1::2], transition_of(randomizer, 8.0)[6]) > ALIKE
    assert randomizer.sample(index[:0], epsilon[:0], uniforms[:0]).shape == (0,)


@pytest.mark.parametrize(
    ("mechanism", "decode", "bits"), [*((*rule, None) for rule in RULES), ("dbitflip", None, 2)]
)
def test_the_reference_path_has_the_same_law(
    mechanism: str, decode: str | None, bits: int | None
) -> None:
    for k, x, epsilon in ((5, 1, 1.0), (20, 19, 5.0)):
        randomizer = Randomizer.with_defaults(mechanism, k, decode, bits)
        drawn = reference_sample(randomizer, torch.full((2_500,), x), epsilon, seed=11 * k + x)
        assert chi_square(drawn, transition_of(randomizer, epsilon)[x]) > ALIKE
        ours = draws(randomizer, x, epsilon, 2_500)
        table = torch.stack([torch.bincount(d, minlength=k) for d in (drawn, ours)])
        table = table[:, table.sum(0) >= 10]
        assert scipy.stats.chi2_contingency(table.numpy()).pvalue > ALIKE


# The counter of releases against a plain count of all releases of all fits.


ROWS = [bytes([i]) for i in range(4)]
FITS = st.lists(
    st.lists(st.lists(st.sampled_from(ROWS), max_size=5), max_size=5), min_size=1, max_size=4
)


@given(fits=FITS, interruption=st.sampled_from(["none", "same process", "new process"]))
def test_no_release_is_forgotten(fits: list[list[list[bytes]]], interruption: str) -> None:
    """Exact within a fit; over several at least the truth, whatever carries the counts over."""
    counter, truth, bound, longest = _ReleaseCounter(), Counter[bytes](), 0, 0
    for fit in fits:
        in_fit = Counter[bytes]()
        for batch in fit:
            counter.count(batch, len(batch), memoized=False)
            in_fit.update(batch)
            longest = max(longest, len(batch))
            assert counter.max_releases == bound + max(in_fit.values(), default=0)
        truth += in_fit
        bound = counter.max_releases
        assert bound >= max(truth.values(), default=0)
        state = counter.state_dict()
        if interruption == "new process":
            counter = _ReleaseCounter()
        if interruption != "none":
            counter.load(**state)
        counter.next_fit()
        assert (counter.max_releases, counter.longest) == (bound, longest)
    assert counter.batches == sum(map(len, fits))


def test_an_older_checkpoint_takes_no_release_back() -> None:
    counter = _ReleaseCounter()
    for _ in range(3):
        counter.count(ROWS, 7, memoized=False)
    counter.load(batches=1, releases=1, longest=2)
    assert counter.state_dict() == {"batches": 3, "releases": 3, "longest": 7}


def test_memoised_rows_are_released_once_in_a_fit() -> None:
    counter = _ReleaseCounter()
    for fit in range(1, 4):
        for _ in range(5):
            counter.count(ROWS * 2, 3, memoized=True)
        assert counter.max_releases == fit
        counter.next_fit()


@given(
    by_process=st.lists(st.lists(st.sampled_from(ROWS), max_size=8), min_size=2, max_size=4),
    add=st.booleans(),
)
def test_what_all_processes_count_bounds_each(by_process: list[list[bytes]], add: bool) -> None:
    counters = [_ReleaseCounter() for _ in by_process]
    for counter, rows in zip(counters, by_process, strict=True):
        counter.load(batches=0, releases=2, longest=3)
        counter.count(rows, len(rows), memoized=False)
    local = [counter.counts for counter in counters]
    each = [Counter(rows) for rows in by_process]
    truth = (
        sum(each, Counter()) if add else Counter({row: max(c[row] for c in each) for row in ROWS})
    )
    for counter in counters:
        counter.merge(local, add)
        assert counter.max_releases >= 2 + max(truth.values(), default=0)
        assert counter.longest == max(3, *map(len, by_process))
    assert len({str(counter.state_dict()) for counter in counters}) == 1
    after = _ReleaseCounter()
    after.load(**counters[0].state_dict())
    after.count(ROWS, 1, memoized=False)
    assert after.max_releases == counters[0].max_releases + 1
    if not add:
        assert counters[0].max_releases == 2 + max(truth.values(), default=0)
