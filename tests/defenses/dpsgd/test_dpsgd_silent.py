"""Ways in which an example counts more than once or leaves without noise; broken examples."""

import math
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.data import ConcatDataset, DataLoader, Subset

from lightning_fedleak.defenses import (
    DPSGD,
    CanaryGradient,
    ClipSettings,
    DefenseError,
    mean_of_sample_means,
)
from lightning_fedleak.defenses.dpsgd import per_sample
from lightning_fedleak.defenses.dpsgd.writes import SMALL, Buffers, fingerprint
from tests.defenses.dpsgd.test_dpsgd import CLIP, N, Net, Run, clipped, data, first
from tests.defenses.dpsgd.test_dpsgd_per_sample import CLIPPINGS, MODELS, batch_of, loss_of
from tests.helpers.dpsgd_settings import grouped
from tests.helpers.models import own_rng, tiny_llama

IDS = torch.randint(3, 97, (5, 6), generator=torch.Generator().manual_seed(0))


def noisy(**settings: Any) -> DPSGD:
    return DPSGD(CLIP, noise_multiplier=1.0, **grouped(**settings))


# ---- rows of one example in several places -----------------------------------------------------


class Rows(Run):
    """Trains on several rows that ``join`` makes of each example."""

    def __init__(self, join: Any, model: nn.Module | None = None, **settings: Any) -> None:
        super().__init__(noisy(**settings), (model or tiny_llama()).train())
        self.join = join

    def loss(self, batch: Any) -> Tensor:
        ids = self.join(batch[0])
        return mean_of_sample_means(self.root(input_ids=ids).logits, ids, causal=True)


def side_by_side(ids: Tensor) -> Tensor:
    return torch.stack([ids, ids.flip(1)], 1).flatten(0, 1)


def test_rows_side_by_side_are_one_samples() -> None:
    run = Rows(side_by_side)
    batch = [IDS]
    run.backward(batch)
    clipped = run.defense._step.clipped(run.parameters, run.context)  # type: ignore[union-attr]
    expected = run.one_by_one(batch).norm(dim=1).double()
    torch.testing.assert_close(clipped.norms, expected, rtol=1e-5, atol=0)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with own_rng(0):
            self.words, self.head = nn.Embedding(97, 8), nn.Linear(8, 97)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.words(ids)))


def test_positions_in_the_batch_may_be_looked_up_once() -> None:
    class Placed(Words):
        def __init__(self) -> None:
            super().__init__()
            self.places = nn.Embedding(6, 8)

        def forward(self, ids: Tensor, places: Tensor) -> Tensor:
            return self.head(torch.tanh(self.words(ids) + self.places(places[:1])))

    run = Run(noisy(), Placed())
    run.loss = lambda b: mean_of_sample_means(run.root(*b), b[0], causal=True)  # type: ignore[method-assign]
    run.step([IDS, torch.arange(6).expand(5, 6)])
    assert run.defense.releases == 1


@pytest.mark.parametrize(
    "twice",
    [
        lambda d: Subset(d, [*range(N), 3]),
        lambda d: Subset(d, torch.tensor([0, -N])),
        lambda d: ConcatDataset([d, d]),
        lambda d: ConcatDataset([d, Subset(Subset(d, range(4)), [1])]),
    ],
    ids=["index", "index from behind", "joined", "nested"],
)
def test_an_example_in_two_places_of_the_dataset_is_refused(twice: Any) -> None:
    with pytest.raises(DefenseError, match="repeat an example"):
        Run(noisy(), loader=DataLoader(twice(data()), batch_size=2))


def test_parts_of_datasets_are_taken() -> None:
    whole, other = data(), data()
    joined = ConcatDataset([Subset(whole, range(0, 20)), Subset(whole, range(20, N)), other])
    run = Run(noisy(), loader=DataLoader(joined, batch_size=8))
    run.step(first(3))
    assert run.defense.releases == 1


@pytest.mark.parametrize(
    ("build", "repeats"),
    [
        (lambda hf, d: d.select([0, 1, 1]), 1),
        (lambda hf, d: hf.concatenate_datasets([d, d]), N),
        (lambda hf, d: hf.concatenate_datasets([d.select([2, 0]), d.shuffle(seed=1)]), 2),
        (lambda hf, d: Subset(d.select([0, 1, 1, 2]), [1, 2]), 1),
        (lambda hf, d: ConcatDataset([d, d.select([3])]), 1),
        (lambda hf, d: d, 0),
        (lambda hf, d: d.shuffle(seed=1).select(range(2, 9)), 0),
        (lambda hf, d: hf.concatenate_datasets([d.select(range(20)), d.select(range(20, N))]), 0),
        (lambda hf, d: ConcatDataset([d, d.map(lambda row: row)]), 0),
    ],
)
def test_a_row_that_a_hugging_face_dataset_repeats_is_refused(build: Any, repeats: int) -> None:
    datasets = pytest.importorskip("datasets")
    x, y = data().tensors
    rows = datasets.Dataset.from_dict({"none": [None] * N, "x": x.tolist(), "y": y.tolist()})
    dataset = build(datasets, rows.with_format("torch"))
    stack = lambda batch: [torch.stack([torch.as_tensor(row["x"]) for row in batch])]  # noqa: E731
    loader = DataLoader(dataset, batch_size=2, collate_fn=stack)
    if not repeats:
        Run(noisy(), loader=loader)
        return
    with pytest.raises(DefenseError, match=f"{repeats} of the .* rows of the dataset repeat"):
        Run(noisy(), loader=loader)


# ---- what leaves without noise -----------------------------------------------------------------


class Writing(Net):
    """Writes what it saw into a buffer, a frozen parameter or a trained one."""

    def __init__(self, where: str, way: str) -> None:
        super().__init__()
        self.register_buffer("buffer", torch.zeros(6))
        self.register_buffer("unknown", torch.full((2,), torch.nan))
        self.frozen = nn.Parameter(torch.zeros(6), requires_grad=False)
        self.where, self.way = where, way

    def forward(self, x: Tensor) -> Tensor:
        observed = x.detach().mean(0)
        place = self.above.bias if self.where == "trained" else getattr(self, self.where, None)
        if place is not None and self.training:
            if self.way == "anew":
                self.buffer = 0.9 * self.buffer + 0.1 * observed
                return super().forward(x)
            with torch.no_grad():
                (place.data if self.way == "data" else place).lerp_(observed[: len(place)], 0.1)
        return super().forward(x)


WRITTEN = {
    "buffer": "changed the buffer 'buffer'",
    "frozen": "must not write to 'frozen'",
    "trained": "must not write to 'above.bias'",
}


@pytest.mark.parametrize(
    ("where", "way"), [("buffer", "anew"), *product(WRITTEN, ["plain", "data"])]
)
def test_what_training_writes_by_itself_is_refused(where: str, way: str) -> None:
    run = Run(noisy(), Writing(where, way))
    run.step(first(0))
    with pytest.raises(DefenseError, match=WRITTEN[where]):
        run.step(first(5))
    assert run.defense.releases == 1


@pytest.mark.parametrize(
    ("shape", "in_place"), [((6,), False), ((6,), True), ((SMALL + 1,), False)]
)
def test_equal_numbers_may_be_written_to_a_buffer(shape: tuple[int, ...], in_place: bool) -> None:
    """Transformers' rotary embeddings of Phi-3 do it in each step."""

    class Writes(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("buffer", torch.ones(shape))
            self.shift = 0.0

        def forward(self, x: Tensor) -> Tensor:
            written = self.buffer + self.shift
            if in_place:
                self.buffer.copy_(written)
            else:
                self.register_buffer("buffer", written)
            return super().forward(x)

    run = Run(noisy(), root := Writes())
    for _ in range(4):
        run.step(first(5))
    root.shift = 1e-6
    with pytest.raises(DefenseError, match="changed the buffer 'buffer'"):
        run.step(first(5))
    assert run.defense.releases == 4


# ---- refusals that say what to do ----------------------------------------------------------------


@pytest.mark.parametrize("normed", [nn.utils.weight_norm, nn.utils.spectral_norm])
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_weight_that_is_computed_is_refused_at_setup(normed: Any) -> None:
    root = Net()
    root.above = normed(root.above)
    with pytest.raises(DefenseError, match=r"'above' \(Linear\).*remove_weight_norm"):
        Run(noisy(), root)
    root.above.requires_grad_(False)
    Run(noisy(), root)


def test_a_layer_that_cannot_run_sample_by_sample_says_so() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale * float(x.detach().sum())

    class Rescaled(Net):
        def __init__(self) -> None:
            super().__init__()
            self.scaled = Scaled()

        def forward(self, x: Tensor) -> Tensor:
            return self.scaled(super().forward(x))

    run = Run(noisy(), Rescaled())
    with pytest.raises(DefenseError, match=r"a Scaled cannot be run again.*\.item\(\)"):
        run.step(first(5))


# A sample whose gradient holds NaN or infinity counts as zero, and nothing else changes.


BROKEN = 2


def spoilt(value: float, samples: int = 5) -> list[Tensor]:
    """A batch in which one sample holds ``value``."""
    x, y = first(samples)
    x = x.clone()
    x[BROKEN, 1] = value
    return [x, y]


def without(batch: list[Tensor]) -> list[Tensor]:
    keep = torch.arange(len(batch[0])) != BROKEN
    return [value[keep] for value in batch]


class Deep(Net):
    """Something of a sample's own value that NaN and overflow pass on their way back."""

    def forward(self, x: Tensor) -> Tensor:
        return self.above(self.below(x).square())


@pytest.mark.parametrize("clipping", CLIPPINGS)
@pytest.mark.parametrize(
    ("model", "value"), [(Net, math.nan), (Net, math.inf), (Deep, math.nan), (Deep, 1e22)], ids=str
)
def test_a_broken_sample_counts_as_zero(model: Any, value: float, clipping: Any) -> None:
    batch = spoilt(value)
    root = model()
    run = Run(DPSGD(CLIP, noise_multiplier=0.0, clip=ClipSettings(form=clipping)), root)
    run.loss = lambda b: run.root(b[0]).square().mean(1).mean()  # type: ignore[method-assign]
    expected = clipped(run.one_by_one(without(batch))).sum(0) / 8
    for _ in range(2):
        run.backward([*batch])
        torch.testing.assert_close(run.release(), expected, rtol=1e-5, atol=1e-8)
    assert run.defense.releases == run.defense.accountant.steps == 2


def test_a_batch_of_broken_samples_releases_noise_alone() -> None:
    run = Run(DPSGD(CLIP, noise_multiplier=0.0))
    x, y = first(3)
    assert not bool(run.step([x * math.nan, y]).any())
    run = Run(DPSGD(CLIP, noise_multiplier=1.0))
    assert bool(run.step([x * math.nan, y]).isfinite().all())


def spoils(model: nn.Module, sample: int) -> Any:
    """Lets one sample's numbers be NaN behind the first layer of words."""

    def hook(_: nn.Module, args: Any, output: Tensor) -> Tensor:
        scale = torch.ones(len(output), *[1] * (output.dim() - 1))
        scale[sample] = math.nan
        return output * scale

    words = next(m for m in model.modules() if isinstance(m, nn.Embedding))
    return words.register_forward_hook(hook)


@pytest.mark.parametrize(
    ("name", "clipping"),
    [
        *(("gpt2 tied", clipping) for clipping in CLIPPINGS),
        *(("gpt2 lora", clipping) for clipping in CLIPPINGS[1:]),
        ("gpt2 checkpointed", "auto"),
        ("llama", "ghost"),
        ("bert mlm", "auto"),
        ("gpt2 prompt tuning", "ghost"),
    ],
)
def test_nan_in_one_sample_reaches_no_other(name: str, clipping: Any) -> None:
    """Against one backward pass for each of the others, in float64 (Llama's norms are float32)."""
    kind, build = MODELS[name]
    model = build().double().train()
    run = Run(
        DPSGD(CLIP, noise_multiplier=0.0, clip=ClipSettings(form=clipping)),
        model,
        precision="64-true",
    )
    batch, loss = batch_of(kind), loss_of(kind)
    rows = []
    for i in [i for i in range(5) if i != BROKEN]:
        alone = loss(model, {key: value[i : i + 1] for key, value in batch.items()})
        rows.append(torch.cat([g.flatten() for g in torch.autograd.grad(alone, run.parameters)]))
    expected = clipped(torch.stack(rows)).sum(0) / 8
    handle = spoils(model, BROKEN)
    run.loss = lambda b: loss(model, b)  # type: ignore[method-assign]
    run.backward(batch)
    handle.remove()
    assert any(bool(p.grad.isnan().any()) for p in run.parameters)
    torch.testing.assert_close(run.release(), expected, rtol=1e-6, atol=1e-8)


def test_a_broken_sample_adds_nothing_to_a_canary() -> None:
    run = Run(DPSGD(CLIP, noise_multiplier=0.0))
    local = torch.randn(5, 2, 3, generator=torch.Generator().manual_seed(3))
    local[BROKEN, 0] = math.inf
    run.backward(spoilt(math.nan))
    with_it = run.defense.on_canary(CanaryGradient(local), run.parameters, run.context)
    assert not bool(with_it.samples[BROKEN].any())
    run.release()
    run.backward(without(first(5)))
    keep = torch.arange(5) != BROKEN
    alone = run.defense.on_canary(CanaryGradient(local[keep] * 5 / 4), run.parameters, run.context)
    torch.testing.assert_close(with_it.released, alone.released)


class Uneven(Net):
    """Its slope is infinite where a sample's first number is 0, and meets others' zeros."""

    def forward(self, x: Tensor) -> Tensor:
        return self.above((self.below(x) * x[:, :1]).abs().sqrt())


def test_a_look_at_the_graph_does_not_stop_at_one_samples_infinite_slope() -> None:
    run = Run(DPSGD(CLIP, noise_multiplier=0.0), Uneven())
    batch = first(5)
    batch[0][0, 0] = 0.0
    run.step(batch)
    assert run.defense.releases == 1


@pytest.mark.parametrize("clipping", CLIPPINGS)
def test_a_broken_sample_makes_no_copy_of_the_others(
    clipping: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy took a third of the step, so that its time told which batch held the sample."""
    summed, views = per_sample.weighted_sum, []

    def looked_at(parts: Any, *args: Any) -> Tensor:
        views.extend(value for part in parts for value in vars(part).values())
        return summed(parts, *args)

    monkeypatch.setattr(per_sample, "weighted_sum", looked_at)
    run = Run(DPSGD(CLIP, noise_multiplier=0.0, clip=ClipSettings(form=clipping)))
    for batch, rows in ((first(5), [5]), (spoilt(math.nan), [2, 2])):
        views.clear()
        run.backward(batch)
        kept = run.defense._fit_step.clipped(run.parameters, run.context).parts.values()
        values = [value for parts in kept for part in parts for value in vars(part).values()]
        storages = {value.untyped_storage().data_ptr() for value in values}
        run.release()
        assert {len(view) for view in views} == {*rows}
        assert len(views) == len(values) * len(rows)
        assert {view.untyped_storage().data_ptr() for view in views} <= storages


def test_a_look_that_a_broken_sample_hides_is_taken_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient that layers do not explain is looked for again soon, whatever a look showed."""

    class Again(nn.Linear):
        """It is run again for its gradients, so that its uses are not counted."""

    class Twice(Net):
        def __init__(self) -> None:
            super().__init__()
            self.below, self.above = Again(6, 8), Again(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + nn.functional.linear(
                nn.functional.linear(x, self.below.weight), self.above.weight
            )

    run = Run(noisy(loss="trusted"), Twice())
    run.step(spoilt(math.nan))
    with pytest.raises(Exception, match="is not the sum of its recorded per-sample gradients"):
        run.step(first(5))
    assert run.defense.releases == 1


# ---- refusals that one example's content could provoke -------------------------------------------


def test_an_example_that_looks_like_positions_stops_nothing() -> None:
    class Placed(Words):
        def __init__(self) -> None:
            super().__init__()
            self.places = nn.Embedding(6, 8)

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(torch.tanh(self.words(ids) + self.places(torch.arange(6)[None])))

    run = Run(noisy(), Placed())
    run.loss = lambda b: mean_of_sample_means(run.root(b[0]), b[0], causal=True)  # type: ignore[method-assign]
    ids = IDS.clone()
    ids[1] = torch.arange(6)
    run.step([ids])
    assert run.defense.releases == 1


@pytest.mark.parametrize("like", [0, 3])
@pytest.mark.parametrize("samples", [2, 5])
def test_an_example_that_reads_like_anothers_second_row_stops_nothing(
    like: int, samples: int
) -> None:
    run = Rows(side_by_side)
    ids = IDS[:samples].clone()
    ids[1] = ids[like % samples].flip(0)
    run.step([ids])
    assert run.defense.releases == 1


# Weights that something else than the optimizer's step writes, and weights that are not finite.


Write = Callable[[nn.Module], None]


class Optimized(Run):
    """Steps a real optimizer, as training does."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.optimizer = torch.optim.SGD(self.parameters, lr=0.1)

    def step(self, batch: Any, lr: float = 0.1, between: Write | None = None) -> Tensor:
        self.backward(batch)
        if between is not None:
            between(self.root)
        update = self.release()
        self.optimizer.step()
        return update


@pytest.fixture
def runs() -> Iterator[Callable[[], Optimized]]:
    made: list[Optimized] = []

    def make() -> Optimized:
        made.append(Optimized(noisy()))
        return made[-1]

    yield make
    for run in made:
        run.defense.teardown()


def by_data(root: nn.Module) -> None:
    root.above.bias.data[1] += 1e-6  # type: ignore[index, operator, union-attr]


def in_place(root: nn.Module) -> None:
    with torch.no_grad():
        root.above.bias[1] += 1e-6  # type: ignore[index, operator]


def replaced(root: nn.Module) -> None:
    root.above.bias.data = root.above.bias.data + 1e-6  # type: ignore[union-attr, operator]


WRITES = [by_data, in_place, replaced]


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("after_backward", [True, False])
def test_weights_written_outside_of_the_optimizers_step_are_refused(
    write: Write, after_backward: bool, runs: Any
) -> None:
    run = runs()
    for _ in range(3):
        run.step(first(5))
    if not after_backward:
        write(run.root)
    with pytest.raises(DefenseError, match=r"'above.bias' was written to since"):
        run.step(first(5), between=write if after_backward else None)
    assert run.defense.releases == 3


def average(root: nn.Module) -> list[Tensor]:
    return [p.detach().clone() * 0.5 for p in root.parameters()]


def swapped_by_copy(root: nn.Module) -> None:
    copies = [p.detach().clone() for p in root.parameters()]
    with torch.no_grad():
        for p, mean in zip(root.parameters(), average(root), strict=True):
            p.copy_(mean)
        for p, old in zip(root.parameters(), copies, strict=True):
            p.copy_(old)


def swapped_by_pointer(root: nn.Module) -> None:
    copies = [p.data for p in root.parameters()]
    for p, mean in zip(root.parameters(), average(root), strict=True):
        p.data = mean
    for p, old in zip(root.parameters(), copies, strict=True):
        p.data = old.clone()


@pytest.mark.parametrize("swap", [swapped_by_copy, swapped_by_pointer])
def test_averages_may_be_swapped_in_and_back(swap: Write, runs: Any) -> None:
    run = runs()
    for _ in range(4):
        run.step(first(5))
        swap(run.root)
    assert run.defense.releases == 4


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_are_not_finite_after_a_release_stop_the_run(value: float, runs: Any) -> None:
    run = runs()
    run.step(first(5))
    run.optimizer.param_groups[0]["lr"] = value
    run.step(first(5))
    with pytest.raises(DefenseError, match=r"'below.weight' is not finite.*learning rate"):
        run.backward(first(5))
    assert run.defense.releases == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.int64])
@pytest.mark.parametrize("written", [None, 0, 1])
def test_a_write_in_one_piece_of_a_batch_is_not_forgotten_in_the_next(
    written: int | None, dtype: torch.dtype
) -> None:
    root = nn.Module()
    first_number = math.nan if dtype.is_floating_point else 1
    root.register_buffer("kept", torch.tensor([first_number, 2, 3], dtype=dtype))
    buffers = Buffers(root)
    for piece in (0, 1):
        buffers.read(all_contents=False)
        if piece == written:
            root.kept.data[2] = 4  # type: ignore[union-attr, operator]
        buffers.check_unchanged()
    equal = [bool(is_equal) for is_equal in buffers.comparisons.values()]
    if written is None:
        buffers.check(equal)
    else:
        with pytest.raises(DefenseError, match="changed the buffer 'kept'"):
            buffers.check(equal)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("shape", [(), (0,), (7,), (3, 5), (16, 8)])
def test_a_print_tells_any_number_that_changes(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.arange(1, math.prod(shape) + 1).reshape(shape).to(dtype)
    before = fingerprint(tensor)
    for i in range(tensor.numel()):
        other = tensor.clone()
        other.view(-1)[i] += 1
        assert not torch.equal(fingerprint(other), before)
    if len(shape) == 2:
        across = torch.empty(shape[::-1], dtype=dtype).t().copy_(tensor)
        assert torch.equal(fingerprint(across), before)
        assert torch.equal(fingerprint(torch.cat([tensor, tensor])[shape[0] :]), before)


def test_a_print_tells_a_change_of_any_tensor_that_a_quantized_weight_consists_of() -> None:
    values = torch.arange(6.0).view(2, 3)
    before = fingerprint(TwoTensor(values, values))
    assert torch.equal(fingerprint(TwoTensor(values.clone(), values.clone())), before)
    for pair in ((values + 1, values), (values, values + 1)):
        assert not torch.equal(fingerprint(TwoTensor(*pair)), before)
