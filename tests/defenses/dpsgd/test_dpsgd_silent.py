"""Ways in which an example could count more than once, or leave without noise, unnoticed."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, DataLoader, Subset

from lightning_fedleak.defenses import DPSGD, DefenseError, mean_of_sample_means
from lightning_fedleak.defenses.dpsgd.writes import SMALL
from tests.defenses.dpsgd.test_dpsgd import CLIP, N, Net, Run, data, first
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


def test_a_buffer_that_is_written_to_later_is_noticed() -> None:
    root = Writing("nowhere", "data")
    run = Run(noisy(), root)
    for _ in range(3):
        run.step(first(5))
    root.where = "buffer"
    with pytest.raises(DefenseError, match="changed the buffer 'buffer'"):
        run.step(first(5))


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
