"""What every part of the job makes alike: the model, its data, and who looks at updates."""

import os
from functools import partial
from pathlib import Path

import lightning as L
import torch
from torch.utils.data import DataLoader

from lightning_fedleak.attacks import SubspaceWords
from lightning_fedleak.cli.finetuning import module
from lightning_fedleak.cli.finetuning.assets import EMBEDDED_MESSAGES
from lightning_fedleak.cli.finetuning.texts import read_texts
from lightning_fedleak.federation import RoundObserver, RoundSettings

RATE, STEPS, ROWS = 0.05, 2, 4
SITES = ("site-1", "site-2")


class Module(L.LightningModule):
    """The model on board in Lightning's form, by whose names the server sends it."""

    def __init__(self) -> None:
        super().__init__()
        self.model = module.load_model(None)

    def forward(self, **batch: torch.Tensor) -> object:
        """Return what the model makes of a batch."""
        return self.model(**batch)

    def training_step(self, batch: dict[str, torch.Tensor], number: int) -> torch.Tensor:
        """Return the loss of a batch."""
        return self.model(**batch).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer that the server prescribed."""
        return torch.optim.SGD(self.parameters(), lr=RATE)


def rows_of(site: str) -> list[torch.Tensor]:
    """Return the token ids of a site's messages, at most 32 a row."""
    texts = read_texts(EMBEDDED_MESSAGES)[SITES.index(site) :: len(SITES)]
    return module.tokenize_rows(texts, module.load_tokenizer(None), 32)


def loader(site: str) -> DataLoader:
    """Return a site's batches."""
    return DataLoader(rows_of(site), batch_size=ROWS, shuffle=True, collate_fn=module.PadRight(0))


def make_observer(site: str) -> RoundObserver:
    """Attack the updates of a site."""
    return RoundObserver(
        Module(),
        partial(torch.optim.SGD, lr=RATE),
        local_steps=STEPS,
        attacks=[SubspaceWords(capacity_seconds=0)],
        folder=Path(os.environ.get("FEDLEAK_OUT", "fedleak_runs/nvflare")).resolve() / site,
        settings=RoundSettings(fresh=False),  # flare.patch keeps the optimizer from round to round
    )
