"""Per-sample norms and clipped sums against one backward pass for each sample."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_fedleak.defenses import DPSGD, ClipSettings, Users, mean_of_sample_means
from lightning_fedleak.defenses.dpsgd.per_sample import (
    Part,
    _Dense,
    _EmbeddingRows,
    _ExpertRows,
    _Outer,
    full_precision,
    probe,
    squared_norms,
    to_dense,
    to_form,
    weighted_sum,
)
from lightning_fedleak.defenses.dpsgd.recorder import Recorder
from tests.defenses.dpsgd.test_dpsgd import Pieces, data
from tests.helpers.models import own_rng, tiny_bert_classifier, tiny_bert_mlm, tiny_gpt2, tiny_llama

CLIPPINGS = ["auto", "per_sample", "ghost"]
Batch = dict[str, Tensor]
Loss = Callable[[nn.Module, Batch], Tensor]


def batch_of(kind: str, samples: int = 5, length: int = 12) -> Batch:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 97, (samples, length), generator=generator)
    if kind == "classifier":
        return {"input_ids": ids, "labels": torch.arange(samples) % 3}
    ends = torch.randint(length // 2, length + 1, (samples, 1), generator=generator)
    mask = torch.arange(length) < ends
    labels = ids.masked_fill(~mask, -100)
    return {"input_ids": ids.masked_fill(~mask, 0), "attention_mask": mask.long(), "labels": labels}


def loss_of(kind: str) -> Loss:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        if kind == "classifier":
            return model(**batch).loss
        inputs = {key: value for key, value in batch.items() if key != "labels"}
        logits = (model(**inputs, use_cache=False) if kind == "causal" else model(**inputs)).logits
        labels = batch["labels"]
        read = logits[:, -labels.shape[1] :]  # PEFT's virtual tokens come first
        return mean_of_sample_means(read, labels, causal=kind == "causal")

    return loss


def lora(build: Callable[..., nn.Module], targets: list[str]) -> nn.Module:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        r=2, lora_alpha=4, lora_dropout=0.0, target_modules=targets, init_lora_weights=False
    )
    with own_rng(1):
        return peft.get_peft_model(build(dropout=0.0), config)


def prompts(build: Callable[..., nn.Module], kind: str, task: str = "CAUSAL_LM") -> nn.Module:
    peft = pytest.importorskip("peft")
    more = {"encoder_hidden_size": 8} if kind == "PromptEncoderConfig" else {}
    config = getattr(peft, kind)(task_type=task, num_virtual_tokens=3, **more)
    with own_rng(1):
        return peft.get_peft_model(build(), config)


def checkpointed() -> nn.Module:
    model = tiny_gpt2(dropout=0.0)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


MODELS: dict[str, tuple[str, Callable[[], nn.Module]]] = {
    "gpt2 tied": ("causal", lambda: tiny_gpt2(dropout=0.0)),
    "gpt2 untied": ("causal", lambda: tiny_gpt2(tied=False, dropout=0.0)),
    "gpt2 checkpointed": ("causal", checkpointed),
    "llama": ("causal", tiny_llama),
    "bert mlm": ("masked", lambda: tiny_bert_mlm(dropout=0.0)),
    "bert classifier": ("classifier", lambda: tiny_bert_classifier(dropout=0.0)),
    "gpt2 lora": ("causal", lambda: lora(tiny_gpt2, ["c_attn", "c_fc"])),
    "gpt2 prompt tuning": (
        "causal",
        lambda: prompts(lambda: tiny_gpt2(dropout=0.0), "PromptTuningConfig"),
    ),
    "llama p-tuning": ("causal", lambda: prompts(tiny_llama, "PromptEncoderConfig")),
    "llama prefix tuning": ("causal", lambda: prompts(tiny_llama, "PrefixTuningConfig")),
    "bert classifier prompt tuning": (
        "classifier",
        lambda: prompts(lambda: tiny_bert_classifier(dropout=0.0), "PromptTuningConfig", "SEQ_CLS"),
    ),
}


def one_by_one(
    model: nn.Module, batch: Batch, loss: Loss, clip: float
) -> tuple[Tensor, list[Tensor]]:
    """Norms and clipped sums from a backward pass for each sample, summed in float64."""
    trained = [p for p in model.parameters() if p.requires_grad]
    norms, sums = [], [torch.zeros_like(p, dtype=torch.float64) for p in trained]
    for i in range(len(batch["input_ids"])):
        alone = loss(model, {key: value[i : i + 1] for key, value in batch.items()})
        result = torch.autograd.grad(alone, trained, allow_unused=True)
        pairs = [
            (total, gradient.double())
            for total, gradient in zip(sums, result, strict=True)
            if gradient is not None
        ]
        norm = torch.stack([gradient.norm() for _, gradient in pairs]).norm()
        norms.append(norm)
        for total, gradient in pairs:
            total += gradient * min(1.0, clip / float(norm))
    return torch.stack(norms), sums


def ours(
    model: nn.Module, batch: Batch, loss: Loss, clip: float, clipping: Any
) -> tuple[Tensor, list[Tensor], dict[Tensor, list[Part]]]:
    model.zero_grad()
    samples = len(batch["input_ids"])
    recorder = Recorder(model)
    with recorder.step(samples):
        value = loss(model, batch)
    value.backward()
    parts = {p: to_form(local, p.shape, clipping) for p, local in recorder.parts.items()}
    recorder.remove()
    squares = torch.stack(squared_norms(parts.values())).double()
    norms = samples * squares.sum(0).sqrt()
    weights = samples * (clip / norms).clamp(max=1)
    sums = [
        weighted_sum(parts[p], weights, p.shape) if p in parts else torch.zeros_like(p)
        for p in model.parameters()
        if p.requires_grad
    ]
    return norms, sums, parts


def distance(result: list[Tensor], expected: list[Tensor]) -> float:
    difference = torch.cat([(a - b).flatten() for a, b in zip(result, expected, strict=True)])
    return float(difference.norm() / torch.cat([b.flatten() for b in expected]).norm())


def compare(
    model: nn.Module, batch: Batch, loss: Loss, forms: Any = CLIPPINGS, bound: float = 1e-6
) -> dict[Tensor, list[Part]]:
    """Norms, and sums that half of the samples are clipped in, with the brute force; the parts."""
    clip = float(one_by_one(model, batch, loss, 1.0)[0].median())
    norms, expected = one_by_one(model, batch, loss, clip)
    for form in forms:
        result, sums, parts = ours(model, batch, loss, clip, form)
        assert float(((result - norms) / norms).abs().max()) < bound, form
        assert distance(sums, expected) < bound, form
    return parts


@pytest.mark.parametrize("name", list(MODELS))
def test_clipped_sums_are_exact(name: str) -> None:
    kind, build = MODELS[name]
    model, batch, loss = build(), batch_of(kind), loss_of(kind)
    parts = compare(model.train(), batch, loss)
    for parameter in model.parameters():
        assert (parameter.grad is None) == (parameter not in parts)
        if parameter.grad is not None:
            total = weighted_sum(
                parts[parameter], torch.ones(len(batch["input_ids"])), parameter.shape
            )
            torch.testing.assert_close(total, parameter.grad, rtol=1e-4, atol=1e-6)


def mixed(loss: Loss) -> Loss:
    def under_autocast(model: nn.Module, batch: Batch) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return loss(model, batch)

    return under_autocast


@pytest.mark.parametrize("name", ["gpt2 tied", "llama", "bert mlm", "gpt2 lora"])
def test_clipped_sums_in_bf16(name: str) -> None:
    kind, build = MODELS[name]
    compare(build().train(), batch_of(kind), mixed(loss_of(kind)), bound=2e-2)


class Odd(nn.Module):
    """Positions of its own, a layer used twice, one flattened, padding, no known layer types."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 6, padding_idx=0)
        self.positions = nn.Embedding(8, 6)
        self.norm = nn.RMSNorm(6)
        self.twice = nn.Linear(6, 6)
        self.conv = nn.Conv1d(6, 6, 3, padding=1)
        self.group = nn.GroupNorm(2, 6)
        self.head = nn.Linear(6, 11, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        hidden = self.twice(torch.tanh(self.twice(self.norm(hidden))))
        hidden = self.group(self.conv(hidden.transpose(1, 2))).transpose(1, 2)
        return self.head(hidden.flatten(0, 1)).unflatten(0, ids.shape)


@pytest.mark.parametrize("samples", [1, 2, 3, 4])
def test_layers_of_other_kinds(samples: int) -> None:
    with own_rng(3):
        model = Odd()
    ids = torch.randint(0, 11, (samples, 8), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids}

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return mean_of_sample_means(model(batch["input_ids"]), batch["input_ids"], causal=True)

    assert len(compare(model, batch, loss)) == len(list(model.parameters()))


def squared_terms(part: Part) -> Tensor:
    """The squared norms of all positions' gradients, each multiplied out; of samples in full."""
    if isinstance(part, _Outer):
        return torch.einsum("btm,btn->btmn", part.left, part.right).square().sum()
    return part.values.square().sum()


@given(
    seed=st.integers(0, 10_000),
    samples=st.integers(1, 4),
    kinds=st.lists(st.sampled_from(["outer", "rows", "dense"]), min_size=1, max_size=4),
    lengths=st.lists(st.integers(1, 5), min_size=4, max_size=4),
)
def test_every_form_says_the_same(
    seed: int, samples: int, kinds: list[str], lengths: list[int]
) -> None:
    generator = torch.Generator().manual_seed(seed)
    shape = torch.Size([7, 3])

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64)

    parts: list[Part] = []
    for kind, length in zip(kinds, lengths, strict=False):
        if kind == "outer":
            parts.append(_Outer(normal(samples, length, 7), normal(samples, length, 3)))
        elif kind == "rows":
            ids = torch.randint(0, 7, (samples, length), generator=generator)
            parts.append(_EmbeddingRows(ids, normal(samples, length, 3)))
        else:
            parts.append(_Dense(normal(samples, *shape)))
    full = to_dense(parts, shape)
    weights, left, right = normal(samples), normal(7), normal(3)
    for clipping in ("auto", "per_sample", "ghost"):
        form = to_form(parts, shape, clipping)
        squares = full.flatten(1).square().sum(1)
        torch.testing.assert_close(squared_norms([form])[0], squares, rtol=1e-9, atol=1e-9)
        expected = torch.tensordot(weights, full, dims=1)
        total = weighted_sum(form, weights, shape)
        torch.testing.assert_close(total, expected)
        memory = torch.full(shape, math.nan, dtype=torch.float64)
        assert torch.equal(weighted_sum(form, weights, shape, memory=memory), total)
        value, terms = probe(form, left, right)
        torch.testing.assert_close(value, left @ full.sum(0) @ right)
        torch.testing.assert_close(terms, sum(map(squared_terms, form), start=left.new_zeros(())))
    ghost = to_form(parts, shape, "ghost")
    assert all(isinstance(p, _Dense) for p in ghost) == ("dense" in kinds)


def test_a_norm_that_rounding_could_hide_is_not_underestimated() -> None:
    output = torch.full((1, 2, 4), 1e4)
    inputs = torch.ones(1, 2, 3)
    inputs[:, 1] = -1 + 1e-7
    square = float(squared_norms([[_Outer(output, inputs)]])[0])
    true = float(to_dense([_Outer(output.double(), inputs.double())], torch.Size([4, 3])).norm())
    assert square**0.5 >= true


EXPERTS = 3


@pytest.mark.parametrize("kind", ["outer", "rows", "tied", "experts"])
@pytest.mark.parametrize(("size", "positions"), [(4, 2), (64, 2), (64, 8), (200, 4)])
def test_a_norm_of_positions_that_nearly_cancel_is_not_underestimated(
    kind: str, size: int, positions: int
) -> None:
    """Over how nearly: a norm too small by a part in a million lets a gradient exceed the clip."""
    generator = torch.Generator().manual_seed(1)

    def near(values: Tensor, by: float) -> Tensor:
        return values * (1 + by * torch.randn(values.shape, generator=generator))

    excess = []
    for by in (3e-3, 4e-3, 5e-3, 7e-3, 2e-2, 0.1):
        one, other = torch.randn(2, 50, positions // 2, size, generator=generator)
        ids = torch.randint(0, size, one.shape[:2], generator=generator)
        parts: list[Part]
        if kind == "outer":
            left, right = [one, -near(one, by)], [other, near(other, by)]
            parts = [_Outer(torch.cat(left, 1), torch.cat(right, 1))]
        elif kind == "rows":
            parts = [_EmbeddingRows(torch.cat([ids, ids], 1), torch.cat([one, -near(one, by)], 1))]
        elif kind == "experts":
            experts, left = torch.cat([ids, ids], 1) % EXPERTS, [one, -near(one, by)]
            right = torch.cat([other, near(other, by)], 1)
            parts = [_ExpertRows(experts, torch.cat(left, 1), right)]
        else:
            one_hot = nn.functional.one_hot(ids, size).float()
            parts = [_Outer(one_hot, one), _EmbeddingRows(ids, -near(one, by))]
        exact: list[Part] = [
            type(part)(
                **{k: v.double() if v.is_floating_point() else v for k, v in vars(part).items()}
            )
            for part in parts
        ]
        shape = torch.Size([EXPERTS, size, size] if kind == "experts" else [size, size])
        true = to_dense(exact, shape).flatten(1).norm(dim=1)
        excess.append(float((true / squared_norms([parts])[0].sqrt() - 1).max()))
    assert max(excess) < 1e-6


class Products(TorchDispatchMode):
    """In which precision matrices are multiplied."""

    def __init__(self) -> None:
        super().__init__()
        self.precisions: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.bmm, torch.ops.aten.addmm):
            self.precisions.append(torch.get_float32_matmul_precision())
        return func(*args, **kwargs or {})


@pytest.fixture
def reduced() -> Iterator[Callable[[], None]]:
    """TF32, as Lightning recommends on GPUs; gives a check that it is still set."""
    products = torch.backends.cuda.matmul
    backend = getattr(products, "fp32_precision", None)
    torch.set_float32_matmul_precision("high")

    def check() -> None:
        assert torch.get_float32_matmul_precision() == "high"
        assert products.allow_tf32
        if backend is not None:
            assert products.fp32_precision == "tf32"

    yield check
    torch.set_float32_matmul_precision("highest")
    if backend is not None:
        products.fp32_precision = backend


@pytest.mark.parametrize("clipping", CLIPPINGS)
@pytest.mark.parametrize("unit", ["example", "user"])
def test_norms_and_sums_are_not_computed_in_tf32(
    clipping: Any, unit: Any, reduced: Callable[[], None]
) -> None:
    group_by = {} if unit == "example" else {"unit": Users([i // 2 for i in range(40)])}
    run = Pieces(DPSGD(1.0, noise_multiplier=1.0, clip=ClipSettings(form=clipping), **group_by))
    sampler: Any = run.loader.batch_sampler
    rows = next(iter(sampler))
    batch = [value[rows] for value in data().tensors]
    run.defense._isolation._is_done = True  # its own steps are in float32
    with Products() as training:
        run.backward(batch)
    reduced()
    with Products() as release:
        run.release()
    reduced()
    assert set(training.precisions) == {"high"}
    assert set(release.precisions) == {"highest"}
    part = _Outer(torch.ones(1, 2, 3), torch.ones(1, 2, 3))
    with pytest.raises(RuntimeError), full_precision():
        weighted_sum([part], torch.ones(2), torch.Size([3, 3]))
    reduced()


@pytest.mark.skipif(
    not hasattr(torch.backends.cuda.matmul, "fp32_precision"), reason="torch before 2.9"
)
def test_precision_that_a_backend_alone_is_set_to_comes_back() -> None:
    products = torch.backends.cuda.matmul
    before = products.fp32_precision
    try:
        for precision in ("tf32", "ieee", before):
            products.fp32_precision = precision
            with full_precision():
                assert products.fp32_precision == "ieee"
            assert products.fp32_precision == precision
    finally:
        products.fp32_precision = before


def test_hooks_leave_model_and_training_as_they_are() -> None:
    model = tiny_gpt2().train()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    batch, loss = batch_of("causal"), loss_of("causal")

    def gradients() -> list[Tensor]:
        model.zero_grad()
        with own_rng(5):
            loss(model, batch).backward()
        return [p.grad.clone() for p in model.parameters()]

    plain = gradients()
    recorder = Recorder(model)
    with recorder.step(5):
        hooked = gradients()
    assert recorder.parts
    for name, a, b in zip(dict(model.named_parameters()), plain, hooked, strict=True):
        # Positions are added up over samples in another order.
        torch.testing.assert_close(a, b, rtol=0 if "wpe" not in name else 1e-5, atol=1e-8)
    recorder.remove()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert model.state_dict().keys() == before.keys()
    recorder.clear()
    gradients()
    assert not recorder.parts


def test_only_training_steps_with_autograd_are_recorded() -> None:
    model = tiny_llama().train()
    recorder, batch, loss = Recorder(model), batch_of("causal"), loss_of("causal")
    loss(model, batch).backward()
    with recorder.step(5):
        with torch.no_grad():
            loss(model, batch)
        value = loss(model, batch)
        with recorder.paused():
            value.backward(retain_graph=True)
        assert not recorder.parts
    loss(model, batch)
    value.backward()
    length = recorder.parts[model.lm_head.weight][0].right.shape[1]
    assert {len(local) for local in recorder.parts.values()} == {1}
    assert length == 12


def test_factors_of_a_tied_head_are_not_copied() -> None:
    """Their left side is the gradient of the logits, the largest tensor of a step."""
    head = _Outer(torch.randn(2, 3, 5), torch.randn(2, 3, 4))
    table = _EmbeddingRows(torch.zeros(2, 3, dtype=torch.long), torch.randn(2, 3, 4))
    parts = to_form([head, table], torch.Size([5, 4]), "ghost")
    assert parts[0] is head
    assert parts[1] is table
