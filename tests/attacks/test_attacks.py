"""What attacks share: observations of clipped, repeated and local steps, and work done once."""

import copy
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_fedleak import LeakageMonitor, attacks
from lightning_fedleak.attacks import (
    AlignedFlatChat,
    GradientMembership,
    PassiveMembership,
    PublicText,
    Query,
    SubspaceMembership,
    SubspaceWords,
)
from lightning_fedleak.attacks.base import RunFacts, UnusableObservation
from lightning_fedleak.attacks.local_steps import LocalSteps
from lightning_fedleak.attacks.membership import token_parts
from lightning_fedleak.attacks.public_text import do_once, share_work
from lightning_fedleak.attacks.texts.bottom_model import BottomModel, NextTokens
from lightning_fedleak.attacks.words import head_gradients
from lightning_fedleak.attacks.words.aligned_rows import Directions, ExpectedRows
from lightning_fedleak.callbacks import Games
from lightning_fedleak.engine.channels.control import MAX_UNEXPLAINED
from lightning_fedleak.engine.results import UNEXPLAINED
from lightning_fedleak.model.anatomy import Anatomy, find_anatomy
from lightning_fedleak.model.model_runs import hidden_states
from lightning_fedleak.model.snapshots import (
    GradientSnapshot,
    NotYet,
    Observation,
    Stage,
    UpdateSnapshot,
)
from tests.attacks.row_space.models import VOCABULARY, bert, gpt2, llama, with_lora
from tests.callbacks.runs import fit
from tests.helpers.lightning_modules import CausalLMModule, random_token_loader
from tests.helpers.models import VOCAB, own_rng, tiny_bart, tiny_bert_mlm, tiny_gpt2, tiny_llama

# Clipping by value: no attack reads little, known, off entries that were cut to one size.
#
# The step made again is not cut, which shows how much of the gradient the clipping has changed.


TEXT = torch.randint(3, VOCABULARY, (60, 12), generator=torch.Generator().manual_seed(5))
HELD = torch.randint(3, VOCABULARY, (24, 10), generator=torch.Generator().manual_seed(9))


def aligned(**more: Any) -> attacks.AlignedFlatChat:
    text = attacks.PublicText(TEXT)
    return attacks.AlignedFlatChat(text, calibration_tokens=600, lengths=(8, 12), **more)


def lora() -> nn.Module:
    return with_lora(llama(), 8, ["q_proj", "v_proj"])


WORDS: dict[str, tuple[Callable[[], nn.Module], Callable[[], attacks.Attack]]] = {
    "head": (llama, aligned),
    "flattened": (
        llama,
        lambda: attacks.FlatChat(attacks.PublicText(TEXT), shapes=((1, 10), (2, 10), (4, 10))),
    ),
    "bias": (bert, attacks.BiasSign),
    "rows": (lambda: gpt2(tie_word_embeddings=False), attacks.BagOfWords),
    "whole": (gpt2, lambda: attacks.SubspaceWords(capacity_seconds=0)),
    "lora": (lora, lambda: attacks.SubspaceWords(capacity_seconds=0)),
    "texts": (lora, lambda: attacks.SubspaceTexts(budget_seconds=3)),
    "own gradient": (lora, lambda: attacks.GradientMembership(attacks.PublicText(TEXT))),
    "row spaces": (lora, lambda: attacks.SubspaceMembership(attacks.PublicText(TEXT))),
}
READS = {"bias", "rows", "own gradient"}
"""Those that read what was cut at .01."""


def looked(root: Path, case: str, **trainer: Any) -> dict[str, float]:
    family, make = WORDS[case]
    with torch.random.fork_rng():
        torch.manual_seed(1)
        module = CausalLMModule(family().train(), optimizer="sgd")  # type: ignore[arg-type]
        for part in module.modules():
            if isinstance(part, nn.Dropout):
                part.p = 0.0
    monitor = LeakageMonitor(
        make(), every_n_steps=1, games=Games(held_out=attacks.PublicText(HELD))
    )
    loader = random_token_loader(n=2, batch_size=2, length=10, vocab=VOCABULARY)
    fit([monitor], root, module=module, loader=loader, **trainer)
    name = monitor.attacks[0].name
    values = {m: monitor.latest.get(f"leakage/{name}/{m}") for m in ("f1", "auc", "token_accuracy")}
    values["unexplained"] = monitor.latest.get(UNEXPLAINED)
    return {metric: value for metric, value in values.items() if value is not None}


def headline(values: dict[str, float]) -> float:
    return values.get("auc", values.get("token_accuracy", values.get("f1", math.nan)))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("case", "size"),
    [*((case, 0.01) for case in WORDS), *((case, 1e-4) for case in ("head", *sorted(READS)))],
)
def test_what_is_cut_is_read_or_unknown(tmp_path: Path, case: str, size: float) -> None:
    clipped = {"gradient_clip_val": size, "gradient_clip_algorithm": "value"}
    values = looked(tmp_path, case, **clipped)
    value = headline(values)
    assert math.isnan(value) or value > 0.85 or values["unexplained"] > MAX_UNEXPLAINED
    if case in READS:
        assert value > 0.85


@pytest.mark.filterwarnings("ignore")
def test_clipping_by_norm_changes_nothing(tmp_path: Path) -> None:
    norm = {"gradient_clip_val": 1e-4, "gradient_clip_algorithm": "norm"}
    assert headline(looked(tmp_path, "lora", **norm)) > 0.95


# What optimizers make of gradients, against torch's own and against sums done by hand.


def facts(optimizer: str, steps: int = 1, **made: Any) -> RunFacts:
    return RunFacts(optimizer=optimizer, optimizer_settings=made, local_steps=steps)


def known(optimizer: str, steps: int = 1, **made: Any) -> LocalSteps:
    result = LocalSteps.from_facts(facts(optimizer, steps, **made))
    assert result is not None
    return result


def trained(kind: type, before: Tensor, gradients: list[Tensor], **made: Any) -> Tensor:
    moved = nn.Parameter(before.clone())
    optimizer = kind([moved], **made)
    for gradient in gradients:
        moved.grad = gradient
        optimizer.step()
    return moved.detach()


@given(
    steps=st.integers(1, 5),
    rate=st.floats(1e-3, 0.5),
    decay=st.floats(0.0, 0.3),
    momentum=st.floats(0.0, 0.95),
    dampening=st.floats(0.0, 0.5),
    seed=st.integers(0, 2**16),
)
def test_without_decay_an_update_of_sgd_is_a_combination_of_its_gradients(
    steps: int, rate: float, decay: float, momentum: float, dampening: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    before = torch.randn(4, 9, generator=generator, dtype=torch.float64)
    gradients = [torch.randn(4, 9, generator=generator, dtype=torch.float64) for _ in range(steps)]
    made = {"lr": rate, "weight_decay": decay, "momentum": momentum, "dampening": dampening}
    after = trained(torch.optim.SGD, before, gradients, **made)
    gradient = known("SGD", steps, **made).without_decay((before - after) / rate, before, rate)
    basis = torch.stack([g.flatten() for g in gradients], 1)
    weights = torch.linalg.lstsq(basis, gradient.flatten()[:, None]).solution
    assert torch.allclose(basis @ weights, gradient.flatten()[:, None], atol=1e-8)


@pytest.mark.parametrize("steps", [1, 3])
def test_decay_that_is_decoupled_is_undone(steps: int) -> None:
    generator = torch.Generator().manual_seed(0)
    before = torch.randn(5, 7, generator=generator, dtype=torch.float64)
    gradients = [torch.randn(5, 7, generator=generator, dtype=torch.float64) for _ in range(steps)]
    plain = trained(torch.optim.AdamW, before, gradients, lr=1e-3, weight_decay=0.0)
    decayed = trained(torch.optim.AdamW, before, gradients, lr=1e-3, weight_decay=0.3)
    made = known("AdamW", steps, lr=1e-3, weight_decay=0.3)
    gradient = made.without_decay((before - decayed) / 1e-3, before, 1e-3)
    assert torch.allclose(gradient, (before - plain) / 1e-3, atol=4e-3)


@pytest.mark.parametrize(
    ("kind", "steps", "largest"),
    [
        ("Adam", 1, 1.0),
        ("AdamW", 4, 1.0),
        ("SGD", 4, 1.0),
        ("RMSprop", 1, 10.0),
        ("Adagrad", 1, 1.0),
        ("NAdam", 1, 1.0),
    ],
)
def test_the_largest_step(kind: str, steps: int, largest: float) -> None:
    settings = {"momentum_decay": 0.0} if kind == "NAdam" else {}
    result = known(kind, steps, lr=1e-3, weight_decay=0.1, **settings).largest
    assert result == pytest.approx(largest, rel=0.3 if kind == "NAdam" else 1e-6)


@pytest.mark.parametrize(
    ("kind", "steps", "made", "properties"),
    [
        ("SGD", 1, {}, "linear"),
        ("SGD", 1, {"momentum": 0.9}, "linear carries"),
        ("Adam", 1, {}, "carries invertible"),
        ("AdamW", 1, {}, "carries invertible"),
        ("AdamW", 2, {}, "carries"),
        ("RMSprop", 1, {}, "carries"),
    ],
)
def test_what_is_linear_what_carries_and_what_is_invertible(kind, steps, made, properties) -> None:
    found = known(kind, steps, lr=0.1, **made)
    for name in ("linear", "carries", "invertible"):
        assert getattr(found, name) == (name in properties)


def test_settings_of_a_group_make_the_optimizer_again() -> None:
    parameter = nn.Parameter(torch.zeros(3))
    for kind in (torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop, torch.optim.Adagrad):
        optimizer = kind([parameter], lr=0.25)
        group = {k: v for k, v in optimizer.param_groups[0].items() if k != "params"}
        made = known(kind.__name__, 2, **group, initial_lr=0.5)
        again = made.make_optimizer([parameter]).param_groups[0]
        assert {k: again[k] for k in group if k in again and k != "foreach"} == {
            k: v for k, v in group.items() if k in again and k != "foreach"
        }
    assert known("AdamW", lr=0.0, initial_lr=3e-4).rate == 3e-4


@pytest.mark.parametrize(
    ("given", "match"),
    [
        (facts("Sophia"), "Sophia makes of gradients is not known"),
        (facts("LBFGS"), "not known"),
        (facts("Optimizer"), "not known"),
        (facts("SGD", lr=0.1, maximize=True), "ascends"),
    ],
)
def test_what_is_not_known_is_said(given: RunFacts, match: str) -> None:
    with pytest.raises(UnusableObservation, match=match):
        LocalSteps.from_facts(given)


@given(
    kind=st.sampled_from(["Adam", "AdamW"]),
    decay=st.sampled_from([0.0, 0.01, 0.3]),
    rate=st.floats(1e-5, 1e-2),
    eps=st.sampled_from([1e-8, 1e-6]),
    seed=st.integers(0, 2**16),
)
def test_a_first_step_of_adam_gives_its_gradient_back(kind, decay, rate, eps, seed) -> None:
    generator = torch.Generator().manual_seed(seed)
    before = torch.randn(8, 400, generator=generator) * 0.1
    size = 10 ** (8 * torch.rand(8, 400, generator=generator) - 10)
    gradient = size * torch.randn(8, 400, generator=generator).sign()
    made = {"lr": rate, "weight_decay": decay, "eps": eps}
    after = trained(getattr(torch.optim, kind), before, [gradient], **made)
    result, error = known(kind, **made).invert((before - after) / rate, before, rate)
    off = (result - gradient.double()).abs()
    visible = error < 0.1 * result.abs()
    assert bool((off <= 6 * error)[visible].all())
    # With a decay that Adam divides, a gradient far below that decay is not seen.
    small = (gradient.abs() < 30 * eps) & (torch.tensor(rate) > 1e-4)
    if decay == 0.0 or kind == "AdamW":
        assert float(visible[small].double().mean() if bool(small.any()) else 1.0) > 0.8
    assert bool((error > 0).all())
    beyond = ~error.isfinite()
    if decay == 0.0 or kind == "AdamW":
        assert bool((result.sign() == gradient.sign())[beyond].all())
        assert bool((gradient.abs() >= 0.2 * result.abs())[beyond].all())


def test_the_error_of_an_inverted_step_covers_noise() -> None:
    torch.manual_seed(0)
    before, gradient = torch.randn(40, 30), 1e-7 * torch.randn(40, 30)
    made = {"lr": 1e-3, "eps": 1e-8, "weight_decay": 0.0}
    after = trained(torch.optim.AdamW, before, [gradient], **made)
    update = (before - after) / 1e-3
    spoilt = update + 1e-2 * torch.randn(40, 30)
    result, error = known("AdamW", **made).invert(spoilt, before, 1e-3, 1e-2)
    observed = error.isfinite()
    assert 0.3 < float(observed.double().mean()) < 1.0
    off = (result - gradient.double()).abs()
    assert float((off <= 3 * error)[observed].double().mean()) > 0.95
    ignored = known("AdamW", **made).invert(spoilt, before, 1e-3)[1]
    assert float((off <= 3 * ignored)[observed].double().mean()) < 0.6


# The gradient that is rehearsed is autograd's, whatever the model makes of its head's product.


SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def bart() -> nn.Module:
    model = tiny_bart(layers=1)
    model.final_logits_bias.copy_(torch.randn(1, VOCAB))
    return model


def biased_head() -> transformers.GPT2LMHeadModel:
    model = tiny_gpt2(tied=False)
    model.lm_head = nn.Linear(16, VOCAB)
    return model


MODELS = {
    "gemma 2": lambda: transformers.Gemma2ForCausalLM(
        transformers.Gemma2Config(**SIZES, final_logit_softcapping=3.0)
    ),
    "cohere": lambda: transformers.CohereForCausalLM(
        transformers.CohereConfig(**SIZES, logit_scale=0.3)
    ),
    "granite": lambda: transformers.GraniteForCausalLM(
        transformers.GraniteConfig(**SIZES, logits_scaling=0.25)
    ),
    "bart": bart,
    "bert": tiny_bert_mlm,
    "gpt2": tiny_gpt2,
    "gpt2 with a bias": biased_head,
    "llama": tiny_llama,
}


def made(name: str) -> nn.Module:
    with own_rng(3):
        model = MODELS[name]()
        weight = model.get_output_embeddings().weight
        weight.data.normal_(0, 0.7)  # logits large enough for a cap to matter
    return model


def anatomy_of(name: str) -> Anatomy:
    return find_anatomy(made(name))


def public() -> PublicText:
    g = torch.Generator().manual_seed(5)
    return PublicText(torch.randint(5, VOCAB, (12, 9), generator=g).tolist())


@pytest.mark.parametrize("name", MODELS)
def test_rehearsed_gradient_is_autograds(name: str) -> None:
    anatomy = anatomy_of(name)
    generator = torch.Generator().manual_seed(1)
    batch = public().batch(5, 8, generator, kind=anatomy.kind, mask_token_id=4)
    twin = copy.deepcopy(anatomy.model).eval()
    mask = batch.attention_mask
    twin(input_ids=batch.input_ids, attention_mask=mask, labels=batch.labels).loss.backward()
    wanted = twin.get_output_embeddings().weight.grad
    parts = head_gradients.gradient_parts(anatomy, batch)
    result = parts.gradient(*head_gradients.head_parameters(anatomy))
    assert wanted.abs().max() > 1e-3
    assert float((result - wanted).norm() / wanted.norm()) < 2e-5
    rows = torch.tensor([int(batch.labels.max()), 3, 90])
    some = parts.gradient(*head_gradients.head_parameters(anatomy), rows)
    torch.testing.assert_close(some, result[rows], atol=1e-6, rtol=1e-4)
    halves = head_gradients.GradientParts.concatenate(
        [parts.select(torch.tensor([0, 1])), parts.select(torch.tensor([2, 3, 4]))]
    )
    torch.testing.assert_close(
        halves.gradient(*head_gradients.head_parameters(anatomy)), result, atol=1e-6, rtol=1e-4
    )


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("bias", [False, True])
def test_closed_form_is_autograds(softcap: float | None, bias: bool) -> None:
    g = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(30, 8, generator=g), torch.randn(20, 8, generator=g)
    b = torch.randn(20, generator=g) if bias else None
    shift = None if softcap else torch.randn(20, generator=g)
    labels = torch.randint(20, (30,), generator=g)
    leaf = weight.double().requires_grad_()
    logits = 0.7 * F.linear(hidden.double(), leaf, None if b is None else b.double())
    logits = logits if shift is None else logits + shift
    logits = softcap * (logits / softcap).tanh() if softcap else logits
    F.cross_entropy(logits, labels, reduction="sum").backward()
    form = head_gradients.LogitMap(0.7, shift, softcap)
    result = head_gradients.head_gradient(hidden, labels, weight, b, logit_map=form)
    torch.testing.assert_close(result, leaf.grad.float(), atol=1e-5, rtol=1e-5)
    partition = head_gradients.log_partitions(hidden, weight, b, form)
    torch.testing.assert_close(partition, logits.logsumexp(1).float())
    rows = torch.tensor([3, 17, 0, 5])
    given = {"logit_map": form, "log_partition": partition}
    some = head_gradients.head_gradient(hidden, labels, weight, b, rows=rows, **given)
    torch.testing.assert_close(some, result[rows])


@pytest.mark.parametrize("name", ["gemma 2", "granite"])
def test_expected_rows_are_those_of_unused_types(name: str) -> None:
    anatomy = anatomy_of(name)
    batch = public().batch(8, 9, torch.Generator().manual_seed(1), kind="causal")
    parts = head_gradients.gradient_parts(anatomy, batch, inputs=False)
    weight, bias = head_gradients.head_parameters(anatomy)
    directions = Directions.fit(parts, torch.Generator().manual_seed(0))
    centres = directions.centres
    expected, with_partitions = ExpectedRows.compute(parts, weight, bias, directions, centres)
    unused = torch.ones(VOCAB, dtype=torch.bool)
    unused[parts.labels] = False
    along = (parts.gradient(weight, bias) @ directions.u)[unused]
    result = expected.mass.sum(1)[unused] * directions.scale * parts.logit_map.scale
    torch.testing.assert_close(result, along, atol=1e-6, rtol=1e-4)
    # Probabilities that were computed once give the rows of any of the sentences.
    known, rows = torch.tensor([7, 50, int(batch.labels[0, 1])]), torch.tensor([8, 51])
    some = with_partitions.with_known(known, weight, bias).select(torch.tensor([0, 3]))
    rows = torch.cat([known, rows])
    without = parts.select(torch.tensor([0, 3])).gradient(weight, bias, rows)
    assert bool(without.any(1).all())
    torch.testing.assert_close(some.gradient(weight, bias, rows), without, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("name", ["gemma 2", "cohere", "granite", "llama"])
def test_next_tokens_have_the_models_own_logits(name: str) -> None:
    anatomy = anatomy_of(name)
    ids = torch.randint(5, VOCAB, (2, 7), generator=torch.Generator().manual_seed(2))
    after = NextTokens(BottomModel(anatomy, 1), hidden_states(anatomy, 1, ids))
    with torch.no_grad():
        wanted = copy.deepcopy(anatomy.model).eval()(input_ids=ids).logits
    rows, columns = torch.tensor([0, 1, 1]), torch.tensor([3, 0, 6])
    torch.testing.assert_close(
        after.logits(rows, columns), wanted[rows, columns], atol=1e-5, rtol=1e-4
    )
    torch.testing.assert_close(
        after.log_probabilities(ids[:, :4], None, None),
        wanted[:, 3].log_softmax(1),
        atol=1e-5,
        rtol=1e-4,
    )
    tokens = torch.tensor([[4, 9], [50, 3], [7, 8]])
    torch.testing.assert_close(
        after.token_logits(rows, columns, tokens),
        wanted[rows, columns].gather(1, tokens),
        atol=1e-5,
        rtol=1e-4,
    )


class Squared(nn.Module):
    """A model whose logits are none of what is known."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, 16)
        self.head = nn.Linear(16, VOCAB)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        logits: Tensor = self.head(self.embedding(input_ids))
        return logits + 0.1 * logits.square()


def test_an_unknown_map_is_refused() -> None:
    with own_rng(0):
        model = Squared()
    anatomy = find_anatomy(model, kind="causal", embedding="embedding", head="head")
    attack = AlignedFlatChat(public_text=public())
    with pytest.raises(ValueError, match="scale, shift or softcap"):
        attack.prepare(anatomy)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", ["gemma 2", "granite", "gpt2"])
def test_rounded_models_have_the_same_map(name: str, dtype: torch.dtype) -> None:
    anatomy = find_anatomy(made(name).to(dtype))
    batch = public().batch(5, 8, torch.Generator().manual_seed(1), kind="causal")
    result = head_gradients.gradient_parts(anatomy, batch).logit_map
    assert result.softcap == (3.0 if name == "gemma 2" else None)
    assert result.scale == pytest.approx(4.0 if name == "granite" else 1.0, rel=2e-3)
    if name == "gpt2":
        assert result == head_gradients.PLAIN


# Public text: the forms in which attacks take it, and how it is sampled.


def test_a_begin_that_the_model_has_no_embedding_of_is_none() -> None:
    """GPT-2's configured token 50256 in a small model: texts begin with any token."""
    model = tiny_gpt2()
    model.config.bos_token_id = 50256
    texts = PublicText.sampled_from(find_anatomy(model), 20, 4).sentences
    firsts = {int(text[0]) for text in texts}
    assert len(firsts) > 1
    assert max(firsts) < VOCAB


def test_sampled_text_follows_from_the_seed_and_leaves_the_model_alone() -> None:
    model = tiny_gpt2()
    model.config.max_position_embeddings = 16
    before = {name: p.clone() for name, p in model.named_parameters()}
    rng = torch.get_rng_state()
    first = PublicText.resolve("sampled", find_anatomy(model), seed=3)
    again = PublicText.resolve("sampled", find_anatomy(model), seed=3)
    other = PublicText.resolve("sampled", find_anatomy(model), seed=4)
    assert torch.equal(torch.get_rng_state(), rng)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert [s.tolist() for s in first.sentences] == [s.tolist() for s in again.sentences]
    assert [s.tolist() for s in first.sentences] != [s.tolist() for s in other.sentences]
    assert len(first) == 256
    assert max(len(s) for s in first.sentences) == 16
    assert all(int(s.min()) >= 0 and int(s.max()) < VOCAB for s in first.sentences)


def test_second_tokens_follow_the_models_distribution() -> None:
    anatomy = find_anatomy(tiny_gpt2().eval())
    with torch.no_grad():  # far from uniform, with tokens that never come
        anatomy.model.get_output_embeddings().weight.mul_(30)
        logits = anatomy.model(torch.tensor([[1]])).logits[0, -1]
    law = logits.double().softmax(0)
    n = 6_000
    texts = PublicText.sampled_from(anatomy, n, 2).sentences
    observed = torch.bincount(torch.stack(texts)[:, 1], minlength=VOCAB).double()
    counted = law * n >= 5
    assert 3 < int(counted.sum()) < VOCAB
    expected = torch.cat([law[counted], law[~counted].sum()[None]]) * n
    result = torch.cat([observed[counted], observed[~counted].sum()[None]])
    assert chisquare(result.numpy(), expected.numpy()).pvalue > 1e-3


def test_fewer_texts_than_were_written_are_not_written_again(monkeypatch) -> None:
    written: list[int] = []
    sample = attacks.public_text._sample

    def counted(anatomy: Anatomy, lengths: list[int], *rest: Any) -> list[Tensor]:
        written.append(len(lengths))
        return sample(anatomy, lengths, *rest)

    monkeypatch.setattr(attacks.public_text, "_sample", counted)
    anatomy = find_anatomy(tiny_gpt2())
    with share_work():
        few = PublicText.resolve("sampled", anatomy, n=4)
        many = PublicText.resolve("sampled", anatomy, n=9)
        again = PublicText.resolve("sampled", anatomy, n=4)
    assert written == [4, 9]
    assert [len(text) for text in (few, many, again)] == [4, 9, 4]
    assert all(map(torch.equal, again.sentences, many.sentences[:4]))


@pytest.mark.parametrize("vocabulary", [600, 3 * attacks.public_text._BLOCK])
def test_tokens_are_drawn_by_their_probabilities(vocabulary: int) -> None:
    generator = torch.Generator().manual_seed(0)
    law = torch.rand(vocabulary, generator=generator).square()
    law[torch.randperm(vocabulary, generator=generator)[: vocabulary // 2]] = 0
    law[-50:] = 0
    n = 200_000
    drawn = attacks.public_text._draw((law / law.sum()).expand(n, -1), generator)[:, 0]
    observed, expected = torch.bincount(drawn, minlength=vocabulary), law.double() / law.sum() * n
    assert int(observed[law == 0].sum()) == 0
    counted = expected >= 5
    assert chisquare(observed[counted].numpy(), _as_many(observed, expected, counted)).pvalue > 1e-3


def _as_many(observed: Tensor, expected: Tensor, counted: Tensor) -> Any:
    """Return expected counts of some tokens that add up to as many as were observed."""
    chosen = expected[counted].double()
    return (chosen * observed[counted].sum() / chosen.sum()).numpy()


@pytest.mark.parametrize("make", [tiny_gpt2, tiny_llama])
@pytest.mark.parametrize("has_cache", [True, False])
def test_shorter_texts_are_written_in_the_same_run(make, has_cache, monkeypatch) -> None:
    """Random starts, and then always the most likely token: all texts are known."""
    model = make().eval()
    model.config.bos_token_id = model.config.eos_token_id = None
    anatomy = find_anatomy(model)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(1e4)
    if not has_cache:
        monkeypatch.setattr(attacks.public_text, "cache_argument", lambda model: None)
    text = PublicText.sampled_from(anatomy, 3, 9, shorter=[6, 6, 2])
    assert [len(ids) for ids in text.sentences] == [9, 9, 9, 6, 6, 2]
    for ids in text.sentences:
        for i in range(1, len(ids)):
            with torch.no_grad():
                assert int(model(ids[None, :i]).logits[0, -1].argmax()) == int(ids[i])


@pytest.mark.parametrize("shorter", [[4, 6], [10]])
def test_lengths_of_shorter_texts_descend(shorter: list[int]) -> None:
    with pytest.raises(ValueError, match=r"shorter=.* in descending order, at most length=9"):
        PublicText.sampled_from(find_anatomy(tiny_gpt2()), 3, 9, shorter=shorter)


TAKERS: dict[str, Callable[..., attacks.Attack]] = {
    "flatchat": attacks.FlatChat,
    "aligned": attacks.AlignedFlatChat,
    "attention": lambda *a, **k: attacks.AttentionMembership(1, *a, **k),
    "prefix": lambda *a, **k: attacks.PrefixInversion(1, *a, **k),
}


class Letters:
    """A tokenizer of one id a letter."""

    def __call__(self, text: str, **_: object) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) % 64 for letter in text]}


@pytest.mark.parametrize("build", TAKERS.values(), ids=TAKERS)
def test_texts_ids_and_public_text_are_one(build: Callable[..., attacks.Attack]) -> None:
    texts, tokenizer = ["some text", "another one"], Letters()
    expected = PublicText(texts, tokenizer)
    ids = [tokenizer(text)["input_ids"] for text in texts]
    for attack in (build(texts, tokenizer=tokenizer), build(ids), build(expected)):
        assert attack.public_text.digest == expected.digest
    assert build("sampled").public_text == "sampled"


@pytest.mark.parametrize("build", TAKERS.values(), ids=TAKERS)
def test_what_cannot_be_meant_is_refused_alike(build: Callable[..., attacks.Attack]) -> None:
    with pytest.raises(ValueError, match="must be 'sampled'"):
        build("one string of text")
    with pytest.raises(ValueError, match="tokenizer"):
        build(["some text"])


# What attacks share at a look: results as each alone, and gradients that none can read.


def test_an_unusable_gradient_is_not_tried_again_and_other_errors_are() -> None:
    tries: list[int] = []

    def fail(error: type[Exception]) -> int:
        tries.append(1)
        raise error("no")

    with share_work():
        for error in (NotYet, NotYet, ValueError, ValueError):
            with pytest.raises(error, match="no"):
                do_once(error.__name__, partial(fail, error))
    assert len(tries) == 3


def test_without_a_shared_block_all_is_computed_again() -> None:
    assert [do_once("key", iter([i]).__next__) for i in range(2)] == [0, 1]


def snapshot(ids: torch.Tensor, names: Any, model: torch.nn.Module) -> Observation:
    model.zero_grad()
    model(input_ids=ids, labels=ids).loss.backward()
    anatomy = find_anatomy(model)
    tensors = {name: anatomy.parameter(name).grad.clone() for name in names}
    return Observation((GradientSnapshot(0, Stage.SHARED, tensors),))


def test_attacks_at_one_look_guess_as_each_would_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_gpt2(d=64).eval()
    anatomy = find_anatomy(model)
    ids = torch.randint(3, VOCAB, (24, 8), generator=torch.Generator().manual_seed(0))
    attacks = [
        SubspaceWords(capacity_seconds=0),
        SubspaceMembership(ids[8:], public_rows=8),
        GradientMembership(ids[8:], public_rows=8),
    ]
    names: dict[str, None] = {}
    for attack in attacks:
        attack.prepare(anatomy)
        attack.refresh(anatomy, 0)
        names |= dict.fromkeys(attack.needs(anatomy).gradients)
    views = [snapshot(ids[:2], names, model), snapshot(ids[2:4], names, model)]
    query = Query(ids[:8])
    runs: list[int] = []
    read_texts = token_parts.map_token_parts

    def counted(*arguments: Any) -> list[Any]:
        runs.append(1)
        return read_texts(*arguments)

    monkeypatch.setattr(token_parts, "map_token_parts", counted)

    def scores() -> list[torch.Tensor]:
        return [attack.run(view, query).scores for view in views for attack in attacks]

    alone = scores()
    assert len(runs) == 4  # candidates and public texts, for each gradient
    runs.clear()
    with share_work():
        shared = scores()
    assert len(runs) == 2
    assert all(torch.equal(a, b) for a, b in zip(alone, shared, strict=True))
    assert not torch.equal(shared[0], shared[3])


@pytest.mark.parametrize("case", WORDS)
@pytest.mark.filterwarnings("ignore:attack 'aligned_flatchat'")
def test_gradients_of_zeros_or_with_nan_are_unknown(case: str) -> None:
    make_model, make = WORDS[case]
    anatomy, attack = find_anatomy(make_model().eval()), make()
    attack.meet(RunFacts())
    names = attack.needs(anatomy).gradients
    attack.prepare(anatomy)
    attack.refresh(anatomy, 0)
    query = Query(TEXT[:2]) if isinstance(attack, PassiveMembership) else None
    for value, said in (
        (0.0, "zero|no gradient until B"),
        (math.nan, "NaN"),
        (-math.inf, "NaN or infinity"),
    ):
        tensors = {name: torch.zeros_like(anatomy.parameter(name)) for name in names}
        tensors[names[0]].view(-1)[3] = value
        with pytest.raises(UnusableObservation, match=said):
            attack.run(Observation((GradientSnapshot(0, Stage.SHARED, tensors),)), query)


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
@pytest.mark.parametrize("case", ["rows", "lora", "texts", "own gradient", "row spaces"])
def test_a_round_that_goes_on_with_momentum_is_unknown(case: str, optimizer: str) -> None:
    make_model, make = WORDS[case]
    anatomy, attack = find_anatomy(make_model().eval()), make()
    made = {"momentum": 0.9} if optimizer == "SGD" else {}
    attack.meet(RunFacts(optimizer=optimizer, optimizer_settings=made, local_steps=1))
    attack.needs(anatomy)
    attack.prepare(anatomy)
    attack.refresh(anatomy, 0)
    tensors = {n: torch.randn_like(anatomy.parameter(n)) for n in attack.needs(anatomy).gradients}
    stale = UpdateSnapshot(0, Stage.SHARED, tensors, fresh=False)
    query = Query(TEXT[:2]) if isinstance(attack, PassiveMembership) else None
    with pytest.raises(UnusableObservation, match=r"optimizer\.state\.clear\(\)"):
        attack.run(Observation((stale,)), query)
