"""Checkpoints of one mechanism, and data that are made anew: what goes on with past noise."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch.nn import functional as F
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset

from lightning_fedleak.defenses import DPSGD, DefenseError
from lightning_fedleak.defenses.dpsgd.users import rows_by_user
from lightning_fedleak.labs.correlated_noise import Places, places_of
from lightning_fedleak.strategies import DefendedStrategy
from tests.helpers.dpsgd_settings import grouped

pytestmark = pytest.mark.slow

N, BATCH = 24, 4
DATA = TensorDataset(torch.randn(N, 6), torch.arange(N) % 2)


class Module(L.LightningModule):
    def __init__(self, made: Callable[[], Dataset[Any]] = lambda: DATA) -> None:
        super().__init__()
        self.net = torch.nn.Linear(6, 2)
        self.made = made

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.made(), batch_size=BATCH)

    def training_step(self, batch: Any, _: int) -> Any:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Stop(Callback):
    def __init__(self, after: int) -> None:
        self.after = after

    def on_train_batch_end(self, run: Any, *_: Any) -> None:
        run.should_stop = run.should_stop or run.global_step >= self.after


def defense(**settings: Any) -> DPSGD:
    given = {"noise_multiplier": 1.0, "target_delta": 1e-3, "accountant": "rdp", "bands": 3}
    return DPSGD(1.0, **grouped(mechanism="banded", **{**given, **settings}))


def fit(own: DPSGD, module: Module, *callbacks: Any, **settings: Any) -> L.Trainer:
    path = settings.pop("ckpt_path", None)
    run = L.Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        max_epochs=4,
        strategy=DefendedStrategy("auto", [own]),
        callbacks=[*callbacks],
        **{"enable_checkpointing": any(isinstance(c, ModelCheckpoint) for c in callbacks)}
        | settings,
    )
    run.fit(module, ckpt_path=path)
    return run


def began_anew(own: DPSGD, module: Module, *callbacks: Any, **settings: Any) -> bool:
    with warnings.catch_warnings(record=True) as guess:
        warnings.simplefilter("always")
        fit(own, module, *callbacks, **settings)
    return any("A new mechanism begins" in str(warning.message) for warning in guess)


def test_of_all_checkpoints_one_goes_on_with_past_noise(tmp_path: Path) -> None:
    folder, ledger = tmp_path / "saved", tmp_path / "ledger"
    saver = ModelCheckpoint(folder, every_n_train_steps=4, save_last=True, save_top_k=-1)
    fit(defense(ledger=ledger), Module(), saver, Stop(8))
    assert len(list(folder.glob("secret-*"))) == 1
    step8 = next(folder.glob("epoch*step=8.ckpt"))
    own = defense(ledger=ledger)
    assert not began_anew(own, Module(), Stop(8 + 1), ckpt_path=saver.last_model_path)
    paid = own.accountant.steps
    assert paid == 3
    for again in (step8, Path(saver.last_model_path), next(folder.glob("epoch*step=4.ckpt"))):
        own = defense(ledger=ledger)
        assert began_anew(own, Module(), Stop(9), ckpt_path=again)
        paid += 2 if again.name.endswith("=4.ckpt") else 1
        assert own.accountant.steps == paid


class Keyed(Dataset[Any]):
    """In an order; with ``noise`` the inputs are others in every reading."""

    def __init__(self, order: list[int], noise: bool = False) -> None:
        self.order, self.noise = order, noise

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, place: int) -> Any:
        x, y = DATA[self.order[place]]
        return x + torch.randn(6) * self.noise, y


IN_ORDER, MOVED = list(range(N)), [*range(N // 2, N), *range(N // 2)]
SAME = TensorDataset(torch.ones(N, 6), torch.zeros(N, dtype=torch.long))  # contents tell nothing


@pytest.mark.parametrize(
    ("before", "after", "moved"),
    [
        (lambda: Subset(DATA, IN_ORDER), lambda: Subset(DATA, IN_ORDER), False),
        (lambda: Subset(SAME, IN_ORDER), lambda: Subset(SAME, MOVED), True),
        (lambda: Keyed(IN_ORDER), lambda: Keyed(IN_ORDER), False),
        (lambda: Keyed(IN_ORDER), lambda: Keyed(MOVED), True),
        (lambda: Keyed(IN_ORDER, True), lambda: Keyed(IN_ORDER, True), False),
        (lambda: Keyed(IN_ORDER, True), lambda: Keyed(IN_ORDER[::-1], True), True),
    ],
)
def test_examples_that_move_in_mid_mechanism_stop_the_fit_or_begin_a_new_one(
    before: Any, after: Any, moved: bool, tmp_path: Path
) -> None:
    made = iter([before, *[after] * 3])
    module = Module(lambda: next(made)())
    own = defense()
    saver = ModelCheckpoint(tmp_path, every_n_train_steps=4)
    with pytest.raises(DefenseError, match="are at other places") if moved else nullcontext():
        fit(own, module, saver, reload_dataloaders_every_n_epochs=1)
    assert own.releases == (6 if moved else 24)

    own, saver = defense(), ModelCheckpoint(tmp_path / "b", every_n_train_steps=4)
    fit(own, Module(before), saver, Stop(8))
    (reserved,) = (tmp_path / "b").glob("secret-*")
    assert b"places" in reserved.read_bytes()
    state = torch.load(saver.best_model_path, weights_only=True)["lightning_fedleak_defenses"]
    assert "places" not in str(state)
    own = defense()
    assert began_anew(own, Module(after), Stop(9), ckpt_path=saver.best_model_path) == moved
    assert own.accountant.steps == 3 + moved


def test_places_of_users_and_of_parts() -> None:
    def observed(dataset: Any, keys: Any = None, shard: range = range(N)) -> Places:
        users = None if keys is None else rows_by_user(dataset, keys)
        return places_of(dataset, shard, users)

    keys = [str(place // 2) for place in range(N)]
    assert not observed(DATA, keys).differ(observed(DATA, keys))
    assert observed(DATA, keys).differ(observed(DATA, [f"other {key}" for key in keys]))
    assert observed(DATA, shard=range(0, N, 2)).differ(observed(DATA, shard=range(1, N, 2)))
    one, two = Subset(SAME, range(4)), Subset(SAME, range(4, N))
    assert observed(ConcatDataset([one, two])).differ(observed(ConcatDataset([two, one])))
    again = TensorDataset(*SAME.tensors)
    parts = [Subset(again, range(4)), Subset(again, range(4, N))]
    assert not observed(ConcatDataset([one, two])).differ(observed(ConcatDataset(parts)))
    state = torch.get_rng_state()
    assert observed(Keyed(IN_ORDER, True)).contents.keys() == {"/1"}
    assert torch.equal(torch.get_rng_state(), state)
