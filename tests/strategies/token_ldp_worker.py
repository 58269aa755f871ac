"""What two gloo processes run under TokenLDP, each with what it saw; see test_ddp.py."""

import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader

from lightning_fedleak.defenses import TokenLDP
from lightning_fedleak.strategies import DefendedStrategy
from tests.helpers.cases import Cases, gathered
from tests.helpers.lightning_modules import CausalLMModule, random_token_loader
from tests.helpers.models import VOCAB, tiny_gpt2
from tests.helpers.settings import QUIET

ROWS, LENGTH, BATCH, LR = 64, 12, 16, 0.5
EPSILON = 4.5
"""Half of the words survive GRR over 94 of them."""
Rows = list[list[int]]


class Recording(CausalLMModule):
    """Keeps what ``training_step`` was given."""

    def __init__(self) -> None:
        super().__init__(tiny_gpt2(dropout=0.0), lr=LR)
        self.batches: list[dict[str, Tensor]] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.batches.append({name: column.clone() for name, column in batch.items()})
        return super().training_step(batch, batch_idx)


class Truth(Callback):
    """Keeps the true batches."""

    def __init__(self) -> None:
        self.rows: Rows = []

    def on_train_batch_end(self, _t: Any, _m: Any, _o: Any, batch: Any, _i: int) -> None:
        self.rows += batch["input_ids"].tolist()


def loader(shuffle: bool) -> DataLoader[Any]:
    """The rows in order; with ``shuffle`` twice over, so that a rank's half holds ROWS of them."""
    rows = random_token_loader(n=ROWS, length=LENGTH, vocab=VOCAB).dataset
    if shuffle:
        rows = ConcatDataset([rows, rows])
    return DataLoader(rows, batch_size=BATCH)


def repeated(length: int) -> DataLoader[Any]:
    """One batch of one row, BATCH times."""
    ids = random_token_loader(n=1, length=length, vocab=VOCAB).dataset[0]
    return DataLoader([ids] * BATCH, batch_size=BATCH)


def run(defense, client="rank", *, shuffle=False, data=None, path=None, callbacks=None, **settings):
    """A fit of two epochs, and what this rank saw of it."""
    module, truth = Recording(), Truth()
    torch.manual_seed(1)
    trainer = pl.Trainer(
        strategy=DefendedStrategy("ddp", [defense], client),
        devices=2,
        # Lightning's own sampler shuffles, whatever the loader does; without it both ranks get all.
        use_distributed_sampler=shuffle,
        callbacks=[truth, *(callbacks or [])],
        **QUIET | {"max_epochs": 2, "enable_checkpointing": callbacks is not None} | settings,
    )
    data = loader(shuffle) if data is None else data
    trainer.fit(module, data, ckpt_path=None if path is None else str(path))
    first, second = gathered([p.detach().clone() for p in module.parameters()])
    return {
        "true": truth.rows,
        "rows": [row for batch in module.batches for row in batch["input_ids"].tolist()],
        "labels are inputs": all(torch.equal(b["labels"], b["input_ids"]) for b in module.batches),
        "ranks agree": all(torch.equal(a, b) for a, b in zip(first, second, strict=True)),
        "moved": not torch.equal(first[0], next(iter(tiny_gpt2(dropout=0.0).parameters()))),
        "releases": defense.releases_per_example,
        "epsilon": defense.epsilon_spent,
    }


def ldp(memoize: bool = True) -> TokenLDP:
    return TokenLDP("grr", EPSILON, "token", memoize=memoize)


def resumed(folder: Path, memoize: bool) -> dict[str, Any]:
    folder = Path(gathered(str(folder))[0]) / f"resume {memoize}"
    keep = ModelCheckpoint(dirpath=folder, save_last=True)
    before = run(ldp(memoize), max_epochs=1, callbacks=[keep])
    state = torch.load(folder / "last.ckpt", weights_only=True)["lightning_fedleak_defenses"]
    after = run(ldp(memoize), max_epochs=2, path=folder / "last.ckpt")
    return {"before": before, "after": after, "state": state["token_ldp"]}


def uneven(folder: Path) -> dict[str, Any]:
    """In the first fit process 1 has longer rows, which are all the same one."""
    folder = Path(gathered(str(folder))[0]) / "uneven"
    keep = ModelCheckpoint(dirpath=folder, save_last=True)
    rows = random_token_loader(n=BATCH, length=LENGTH, batch_size=BATCH, vocab=VOCAB)
    first = repeated(LENGTH + 4) if os.environ["LOCAL_RANK"] == "1" else rows
    run(ldp(False), data=first, max_epochs=1, callbacks=[keep])
    return run(ldp(False), data=rows, max_epochs=2, path=folder / "last.ckpt")


CASES = Cases(
    {
        "rank memoised": lambda _: run(ldp()),
        "rank fresh": lambda _: run(ldp(memoize=False)),
        "rank shuffled": lambda _: run(ldp(), shuffle=True),
        "world memoised": lambda _: run(ldp(), "world"),
        "world fresh": lambda _: run(ldp(memoize=False), "world"),
        "world shuffled": lambda _: run(ldp(), "world", shuffle=True),
        "resume memoised": lambda folder: resumed(folder, True),
        "resume fresh": lambda folder: resumed(folder, False),
        "resume uneven": uneven,
    }
)
