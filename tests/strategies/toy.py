"""A toy language model with dropout, and the runs that the strategy tests compare."""

import logging
import warnings
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

VOCABULARY, WIDTH = 11, 6


class ToyLM(L.LightningModule):
    """Next-token prediction through an embedding, a dropout, a hidden layer and a head."""

    def __init__(self, optimizer: str = "adamw", norm: bool = False, **settings: Any) -> None:
        super().__init__()
        self.optimizer_name, self.settings = optimizer, settings
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.dropout = nn.Dropout(0.2 if optimizer == "adamw" else 0.0)
        self.norm = nn.BatchNorm1d(WIDTH) if norm else None
        self.hidden = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.losses: list[float] = []

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.dropout(self.embedding(ids))
        if self.norm is not None:
            hidden = self.norm(hidden.flatten(0, 1)).view_as(hidden)
        logits: Tensor = self.head(torch.tanh(self.hidden(hidden)))
        return logits

    def loss(self, batch: list[Tensor]) -> Tensor:
        ids = batch[0]
        logits = self(ids[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.losses.append(float(loss.detach()))
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        if self.optimizer_name == "sgd":
            return torch.optim.SGD(self.parameters(), **{"lr": 0.1, **self.settings})
        optimizer = torch.optim.AdamW(self.parameters(), **{"lr": 1e-2, **self.settings})
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class ManualLM(ToyLM):
    """Two optimizers, each over its own half, stepped by hand with and without a closure."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        below = [*self.embedding.parameters(), *self.hidden.parameters()]
        above = self.head.parameters()
        return [torch.optim.SGD(below, 0.1, momentum=0.9), torch.optim.AdamW(above, lr=1e-2)]

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        below, above = self.optimizers()
        loss = self.loss(batch)
        below.zero_grad()
        above.zero_grad()
        self.manual_backward(loss)
        below.step()
        above.step(closure=lambda: None)
        self.losses.append(float(loss.detach()))


class Bursting(ToyLM):
    """Has a loss that is infinite at its third batch."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * float("inf") if batch_idx == 2 else loss


def scaled() -> list[MixedPrecision]:
    """Return the plugin of 16-mixed, on a CPU."""
    return [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1024.0))]


def loader(n: int = 24, batch_size: int = 4, shuffle: bool = False) -> DataLoader[Any]:
    ids = torch.randint(0, VOCABULARY, (n, 7), generator=torch.Generator().manual_seed(3))
    return DataLoader(TensorDataset(ids), batch_size=batch_size, shuffle=shuffle)


def trainer(strategy: str | Strategy, **settings: Any) -> L.Trainer:
    defaults: dict[str, Any] = {
        "accelerator": "cpu", "devices": 1, "max_epochs": 1, "logger": DummyLogger(),
        "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False,
    }  # fmt: skip
    return L.Trainer(strategy=strategy, **{**defaults, **settings})


def fit(strategy, build=ToyLM, *, shuffle=True, ckpt_path=None, n=24, **settings):
    """Seeds, builds the module, and fits it."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        L.seed_everything(0, verbose=False)
        model = build()
        run = trainer(strategy, **settings)
        run.fit(model, loader(n, shuffle=shuffle), loader(8), ckpt_path=ckpt_path)
    return model, run


def state_of(model: ToyLM, run: L.Trainer) -> dict[str, Any]:
    """Everything that must be the same in two runs that are the same."""
    return {
        "weights": {name: tensor.clone() for name, tensor in model.state_dict().items()},
        "optimizers": [optimizer.state_dict() for optimizer in run.optimizers],
        "losses": model.losses,
        "logged": {name: float(value) for name, value in run.callback_metrics.items()},
        "rng": torch.get_rng_state(),
    }


def same(a: Any, b: Any) -> bool:
    """Bit for bit."""
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def grads(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Copies of the optimizer's gradients, None as zeros."""
    return [
        torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for group in optimizer.param_groups
        for p in group["params"]
    ]
