"""Random numbers of a step and of a loader: secret, fresh, of one law, and not in the user's state.

With each common row given its own mask again, one row more moves the clipped sum by at most C. That
two fits share no mask makes a public seed visible, which an audit alone may miss.
"""

import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from transformers import BertTokenizerFast, DataCollatorForLanguageModeling
from transformers.integrations import activate_neftune

from lightning_fedleak.attacks import SubspaceWords
from lightning_fedleak.callbacks import LeakageMonitor
from lightning_fedleak.defenses import DPSGD, DefenseError, randomness
from lightning_fedleak.defenses.dpsgd import poisson, step
from lightning_fedleak.defenses.dpsgd.sampling import poisson_loader
from lightning_fedleak.defenses.randomness import secret_states
from lightning_fedleak.engine.results import UNEXPLAINED
from lightning_fedleak.strategies import DefendedStrategy
from lightning_fedleak.trainers import DefendedLoop
from tests.helpers.lightning_modules import CausalLMModule
from tests.helpers.models import tiny_gpt2, tiny_llama
from tests.helpers.settings import QUIET
from tests.trainers.hosts import BATCH, HOSTS, N, lora, rows, trainer_of

C, P = 0.02, 0.3
Make = Callable[[], nn.Module]


def gpt2() -> nn.Module:
    model = tiny_gpt2(dropout=P).train()
    model.set_attn_implementation("eager")  # whose masks can be noted
    return model


def lora_with_dropout() -> nn.Module:
    return lora(lora_dropout=P).train()


class First(Dataset[Any]):
    """The first rows of a dataset of ``N`` public ones."""

    public_length = N

    def __init__(self, kept: int) -> None:
        self.rows, self.kept = rows(), kept

    def __len__(self) -> int:
        return self.kept

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]


@contextmanager
def masks(change: Callable[[int, Tensor], Tensor] | None = None) -> Iterator[list[Tensor]]:
    """Note the masks (B, ...) that dropout layers draw in training steps, in their order.

    ``change`` gets the number of the call and its mask, and returns the mask to use.
    """
    noted: list[Tensor] = []
    real = F.dropout

    def dropout(values: Tensor, p: float = 0.5, training: bool = True, *_: Any) -> Tensor:
        if not (training and torch.is_grad_enabled() and p):
            return real(values, p, training)
        mask = real(torch.ones_like(values), p)
        mask = mask if change is None else change(len(noted), mask)
        noted.append(mask.detach().clone())
        return values * mask

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "dropout", dropout)
        yield noted


def sums(make: Make, kept: int, steps: int = 2, **settings: Any) -> list[Tensor]:
    """Return the clipped sums of the first ``kept`` rows, in units of C."""
    model, found = make(), list[Tensor]()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, 0.0)
    defense = DPSGD(C, 0.0, seed=7, **settings)
    with DefendedLoop(
        model, optimizer, DataLoader(First(kept), batch_size=N), [defense], steps=steps
    ) as loop:
        while len(found) < steps:
            for batch in loop:
                loop.loss(lambda given: model(**given).loss, batch).backward()
                optimizer.step()
                found.append(torch.cat([p.grad.double().flatten() for p in trained]) * N / C)
                optimizer.zero_grad()
    return found


@pytest.mark.parametrize("make", [gpt2, lora_with_dropout])
@pytest.mark.parametrize("piece", [None, 7])
def test_with_its_own_masks_again_a_row_more_moves_the_sum_by_at_most_c(
    make: Make, piece: int | None
) -> None:
    with masks() as drawn:
        first = sums(make, N, max_physical_batch_size=piece)
    pieces = 1 if piece is None else -(-N // piece)
    calls = len(drawn) // (2 * pieces)  # of a piece, in each of two steps

    def replay(number: int, mask: Tensor) -> Tensor:
        return drawn[number][: len(mask)]

    with masks(replay) as replayed:
        second = sums(make, N - 1, max_physical_batch_size=piece)
    assert calls > 0
    assert len(replayed) == len(drawn)
    moved = [float((a - b).norm()) for a, b in zip(first, second, strict=True)]
    assert all(0.5 < distance <= 1.0000 + 1e-4 for distance in moved), moved


def drawn_by(host: str, folder: Path, make: Make = gpt2) -> list[Tensor]:
    """Return the masks of a fit in which the user has seeded every generator."""
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(42)
    with masks() as noted:
        HOSTS[host](folder, make(), [DPSGD(C, 1.0, target_delta=1e-2)], 0.0, max_steps=3)
    return noted


def shared(first: list[Tensor], second: list[Tensor]) -> int:
    """Return the number of rows' masks in the first fit that the second one has too."""
    sets = [{row.numpy().tobytes() for mask in fit for row in mask} for fit in (first, second)]
    assert all(len(rows_masks) > 20 for rows_masks in sets)
    return len(sets[0] & sets[1])


@pytest.mark.parametrize("host", HOSTS)
def test_two_fits_with_equal_seeds_share_no_mask_and_leave_equal_states(
    host: str, tmp_path: Path
) -> None:
    (first, state), (second, other) = ((drawn_by(host, tmp_path), states()) for _ in range(2))
    assert shared(first, second) == 0
    assert state == other


def test_steps_pieces_and_processes_have_masks_of_their_own() -> None:
    with masks() as drawn:
        sums(gpt2, N, max_physical_batch_size=7)
    assert len({mask.numpy().tobytes() for mask in drawn}) == len(drawn) > 16
    keys: set[bytes] = set()
    for process, release_index in itertools.product(range(3), range(3)):
        index = process << step.SHARD_BITS
        keys.add(step.noise_key(b"base", release_index, index, client=0, name="", stream="step"))
    assert len(keys) == 9


# ---- the user's state -----------------------------------------------------------------------


def states() -> list[Any]:
    return [torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()]


def test_a_loop_leaves_the_users_state_as_it_was() -> None:
    before = states()
    sums(gpt2, N)
    assert states() == before


def test_the_saved_state_is_that_of_a_run_with_other_entropy(tmp_path: Path) -> None:
    saved = []
    for name in "ab":
        trainer = trainer_of(
            tmp_path / name, gpt2(), [DPSGD(C, 1.0, target_delta=1e-2)],
            save_strategy="steps", save_steps=2, max_steps=2,
        )  # fmt: skip
        trainer.train()
        found = torch.load(tmp_path / name / "checkpoint-2" / "rng_state.pth", weights_only=False)
        saved.append([found["python"], found["numpy"][1].tolist(), found["cpu"].tolist()])
    assert saved[0] == saved[1]


def test_a_state_sets_all_words_of_the_generator() -> None:
    """The words are read again by numpy's Mersenne twister; a seed would give 32 bits of them."""
    before = states()
    with secret_states(b"key"):
        state, seed = torch.get_rng_state(), torch.initial_seed()
        drawn = torch.empty(350, dtype=torch.int64).random_(0, 2**32)  # two words for each number
    words = state[24 : 24 + 8 * randomness.WORDS].view(torch.int64)
    seeded = torch.Generator().manual_seed(seed).get_state()  # as the seed alone would set it
    assert not torch.equal(state, seeded)
    twister = np.random.RandomState()
    twister.set_state(("MT19937", words.numpy().astype("u4"), randomness.WORDS))
    expected = twister.randint(0, 2**32, 700, dtype=np.uint32)[1::2]
    assert drawn.tolist() == expected.tolist()
    assert states() == before
    with secret_states(b"another key"):
        other = torch.get_rng_state()[24 : 24 + 8 * randomness.WORDS].view(torch.int64)
        assert torch.initial_seed() != seed
    assert int((other == words).sum()) <= 1
    ones = sum(bin(word).count("1") for word in words.tolist())
    assert abs(ones / randomness.WORDS / 32 - 0.5) < 5 * 0.5 / (32 * randomness.WORDS) ** 0.5


def test_recomputed_layers_get_the_masks_of_their_first_run() -> None:
    def checkpointed() -> nn.Module:
        model: Any = gpt2()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        return model

    for a, b in zip(sums(gpt2, N), sums(checkpointed, N), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


# ---- loaders --------------------------------------------------------------------------------

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(300))]


def masked(**settings: Any) -> DataCollatorForLanguageModeling:
    tokenizer = BertTokenizerFast(vocab={word: i for i, word in enumerate(WORDS)})
    return DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.15, **settings)


class Texts(Dataset[Any]):
    """Texts of 30 tokens; ``draw`` returns a number that each of them also holds."""

    def __init__(self, draw: Callable[[], float] | None = None) -> None:
        self.ids = torch.arange(5, 305).view(10, 30)
        self.draw = draw

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> Any:
        example = {"input_ids": self.ids[index].tolist()}
        return example if self.draw is None else {**example, "draw": self.draw()}


def plain(examples: list[Any]) -> Any:
    return {key: torch.tensor([e[key] for e in examples]) for key in examples[0]}


def seed_worker(worker: int) -> None:
    torch.manual_seed(42 + worker)


def batches(entropy: bytes, epochs: int = 2, **settings: Any) -> list[list[int]]:
    """Return the labels of each batch of a loader, where the user has seeded torch's generator."""
    torch.manual_seed(42)
    loader = DataLoader(Texts(), batch_size=10, collate_fn=masked(), **settings)
    private = poisson_loader(loader, 1.0, poisson.Draws(entropy))
    return [batch["labels"].flatten().tolist() for _ in range(epochs) for batch in private]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"num_workers": 2, "worker_init_fn": seed_worker},
        {"num_workers": 1, "persistent_workers": True},
        {"generator": torch.Generator().manual_seed(1)},
    ],
    ids=["this process", "workers that seed", "persistent", "a generator"],
)
def test_masks_of_a_loader_are_secret_and_fresh(settings: Any) -> None:
    drawn = [labels for entropy in (b"a", b"b") for labels in batches(entropy, **settings)]
    assert len(drawn) == 4
    assert len({tuple(labels) for labels in drawn}) == 4
    assert all(15 < sum(label >= 0 for label in labels) < 75 for labels in drawn)


def test_a_loader_leaves_the_users_state_as_it_was() -> None:
    torch.manual_seed(42)
    before = states()
    batches(b"a")
    assert states() == before


class Counted:
    """Draws from a seed that it counts up."""

    count = 0

    def __call__(self) -> float:
        self.count += 1
        return float(torch.rand((), generator=torch.Generator().manual_seed(self.count)))


def reseeded(examples: list[Any]) -> Any:
    torch.manual_seed(42)
    return plain(examples)


GENERATOR, NUMPYS, PYTHONS = torch.Generator(), np.random.default_rng(), random.Random(1)


@pytest.mark.parametrize(
    ("draw", "collate", "names"),
    [
        (None, masked(seed=1), "collate function \\(DataCollatorForLanguageModeling\\) gives two"),
        (lambda: float(torch.rand((), generator=GENERATOR)), plain, "dataset \\(Texts\\) gives"),
        (NUMPYS.random, plain, "dataset \\(Texts\\) gives two results"),
        (PYTHONS.random, plain, "dataset \\(Texts\\) gives two results"),
        (Counted(), plain, "dataset \\(Texts\\) gives two results"),
        (None, reseeded, "seeds a global generator"),
    ],
)
def test_a_loader_with_a_generator_of_its_own_is_refused(
    draw: Any, collate: Any, names: str
) -> None:
    model = tiny_llama().train()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = DataLoader(Texts(draw), batch_size=2, collate_fn=collate)
    loop = DefendedLoop(model, optimizer, loader, [DPSGD(C, 1.0, target_delta=1e-2)], steps=1)
    with pytest.raises(DefenseError, match=names), loop:
        pass


@pytest.mark.parametrize("draw", [lambda: float(torch.rand(())), np.random.random, random.random])
def test_a_dataset_may_draw_from_any_global_generator(draw: Any) -> None:
    randomness.check_loading(Texts(draw), plain)


def own_generator(_: int) -> None:
    torch.utils.data.get_worker_info().dataset.draw = np.random.default_rng(1).random


def test_a_workers_own_generator_is_refused_in_the_worker() -> None:
    loader = DataLoader(
        Texts(np.random.random), 10, collate_fn=plain, num_workers=1, worker_init_fn=own_generator
    )
    private = poisson_loader(loader, 1.0, poisson.Draws(b"a"))
    with pytest.raises(DefenseError, match=r"dataset \(Texts\) gives two results"):
        next(iter(private))


# ---- modules --------------------------------------------------------------------------------


class Drop(nn.Module):
    """Dropout that draws in a way of its own."""

    def __init__(self, draw: Callable[[torch.Size], Tensor]) -> None:
        super().__init__()
        self.draw = draw

    def forward(self, values: Tensor) -> Tensor:
        return values * (self.draw(values.shape) > P)


def counted() -> Callable[[torch.Size], Tensor]:
    seeds = itertools.count()
    return lambda shape: torch.rand(shape, generator=torch.Generator().manual_seed(next(seeds)))


def seeding(shape: torch.Size) -> Tensor:
    torch.manual_seed(3)
    return torch.rand(shape)


def with_drop(draw: Callable[[torch.Size], Tensor]) -> nn.Module:
    model = tiny_llama()
    block: Any = model.model.layers[0]
    block.mlp.down_proj = nn.Sequential(block.mlp.down_proj, Drop(draw))
    return model.train()


OWN = "layers.0.mlp.down_proj.1' \\(Drop\\) gives two results from one random state"


@pytest.mark.parametrize(
    ("host", "draw", "names"),
    [
        *((host, lambda shape: torch.rand(shape, generator=GENERATOR), OWN) for host in HOSTS),
        ("loop", lambda shape: torch.from_numpy(NUMPYS.random(shape)), OWN),
        ("loop", counted(), OWN),
        # Each call draws by the shape of its batch, which isolation finds first.
        ("loop", seeding, "training_step seeds a global generator|other rows of a batch change"),
    ],
)
def test_a_module_with_a_generator_of_its_own_is_refused_before_the_first_release(
    host: str, draw: Any, names: str, tmp_path: Path
) -> None:
    defense = DPSGD(C, 1.0, target_delta=1e-2)
    with pytest.raises(DefenseError, match=names):
        HOSTS[host](
            tmp_path, with_drop(draw), [defense], 0.1, per_device_train_batch_size=N
        )  # no batch is empty
    assert defense.releases == 0


@pytest.mark.parametrize("host", HOSTS)
def test_a_module_may_draw_from_any_global_generator(host: str, tmp_path: Path) -> None:
    model = with_drop(lambda shape: torch.from_numpy(np.random.random(shape)))
    trace = HOSTS[host](tmp_path, model, [DPSGD(C, 1.0, target_delta=1e-2)], 0.1)
    assert trace.steps == N // BATCH


@pytest.mark.parametrize("host", HOSTS)
def test_noise_whose_size_depends_on_the_longest_text_is_refused(host: str, tmp_path: Path) -> None:
    model = tiny_llama().train()
    activate_neftune(model, 5.0)
    with pytest.raises(DefenseError, match="has NEFTune's noise, whose size depends on the length"):
        HOSTS[host](tmp_path, model, [DPSGD(C, 1.0, target_delta=1e-2)], 0.1)


def test_a_watched_step_is_made_again_with_its_own_masks(tmp_path: Path) -> None:
    """Without clipping and noise the gradient of the step made again is the released one."""
    module = CausalLMModule(lora_with_dropout(), lr=0.0)
    monitor = LeakageMonitor(SubspaceWords(capacity_seconds=0), every_n_steps=1)
    trainer = pl.Trainer(
        max_steps=1, devices=1, callbacks=[monitor], default_root_dir=tmp_path, **QUIET,
        strategy=DefendedStrategy("auto", [DPSGD(1e6, 0.0, seed=0)]),
    )  # fmt: skip
    trainer.fit(module, DataLoader(rows(), batch_size=N))
    assert monitor.latest[UNEXPLAINED] < 1e-4
