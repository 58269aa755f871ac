"""A user's LightningModule and a loader of random tokens."""

from typing import Any, Literal

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset


class CausalLMModule(L.LightningModule):
    """Trains a Hugging Face model (``self.model``) on the loss it returns itself."""

    def __init__(
        self, model: nn.Module, lr: float = 1e-2, optimizer: Literal["sgd", "adamw"] = "sgd"
    ) -> None:
        super().__init__()
        self.model = model
        self.lr = lr
        self.optimizer_name = optimizer

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [p for p in self.parameters() if p.requires_grad]
        if self.optimizer_name == "sgd":
            return torch.optim.SGD(trained, lr=self.lr)
        return torch.optim.AdamW(trained, lr=self.lr)


def states_by_blocks(model: Any, ids: Tensor) -> Tensor:
    """Return the last hidden states of a GPT-2 of which neither model nor backbone is called."""
    backbone = model.transformer
    states = backbone.wte(ids) + backbone.wpe(torch.arange(ids.shape[1], device=ids.device))
    for block in backbone.h:
        states = block(backbone.drop(states))
        states = states[0] if isinstance(states, tuple) else states
    last: Tensor = backbone.ln_f(states)
    return last


def loss_by_blocks(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Return a loss of which no graph shows the labels, so that the batch is believed."""
    states = states_by_blocks(model, batch["input_ids"])
    logits = functional.linear(states, model.lm_head.weight)[:, :-1]
    return functional.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())


class BlocksModule(CausalLMModule):
    """Trains a GPT-2 whose blocks alone are called, so that no graph shows its labels."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = loss_by_blocks(self.model, batch)
        self.log("train_loss", loss)
        return loss


class _Rows(Dataset[dict[str, Tensor]]):
    def __init__(self, columns: dict[str, Tensor]) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(self.columns["input_ids"])

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {k: v[index] for k, v in self.columns.items()}


def random_token_loader(
    n: int = 32,
    batch_size: int = 4,
    length: int = 12,
    vocab: int = 97,
    seed: int = 0,
    padded: bool = False,
) -> DataLoader[Any]:
    """Batches of dicts with input_ids, attention_mask and labels, each (batch_size, length).

    Ids are drawn from 3 to vocab - 1. With ``padded`` rows end at random after half the length:
    id 0, mask 0 and label -100 from there. Neither building nor iterating uses the global RNG.
    """
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, vocab, (n, length), generator=generator)
    ends = torch.full((n, 1), length)
    if padded:
        ends = torch.randint((length + 1) // 2, length + 1, (n, 1), generator=generator)
    mask = torch.arange(length) < ends
    columns = {
        "input_ids": ids.masked_fill(~mask, 0),
        "attention_mask": mask.long(),
        "labels": ids.masked_fill(~mask, -100),
    }
    return DataLoader(_Rows(columns), batch_size=batch_size, generator=generator)
