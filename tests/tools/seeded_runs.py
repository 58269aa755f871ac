"""Short seeded fits of tiny models."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import BertForMaskedLM, GPT2Config, GPT2LMHeadModel

import lightning_fedleak as fedleak
from lightning_fedleak import callbacks
from lightning_fedleak.attacks import Attack
from lightning_fedleak.defenses import mean_of_sample_means

VOCAB, WIDTH, LENGTH, MASK = 97, 16, 10, 96
PUBLIC = [[(i * i + 7 * i * j + 3 * j * j) % 90 + 3 for j in range(12)] for i in range(120)]
HELD_OUT = [[(5 * i + 11 * j) % 90 + 3 for j in range(LENGTH)] for i in range(40)]


# ---- the user's side ----------------------------------------------------------------------------


@contextmanager
def own_rng(seed: int) -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


def gpt2(tied: bool = True, dropout: float = 0.0) -> nn.Module:
    config = GPT2Config(
        vocab_size=VOCAB,
        n_embd=WIDTH,
        n_layer=2,
        n_head=2,
        n_positions=32,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        tie_word_embeddings=tied,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    with own_rng(0):
        model = GPT2LMHeadModel(config)
    # At its initial gain of one the last LayerNorm makes every hidden state sum to zero.
    model.transformer.ln_f.weight.data.copy_(torch.linspace(0.5, 1.5, WIDTH))
    return model.train()


class Module(L.LightningModule):
    """A mean of per-sample means, as DPSGD asks for."""

    def __init__(self, model: nn.Module, lr: float = 0.05) -> None:
        super().__init__()
        self.model = model
        self.lr = lr

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        inputs = {key: value for key, value in batch.items() if key != "labels"}
        logits = self.model(**inputs).logits
        causal = not isinstance(self.model, BertForMaskedLM)
        loss = mean_of_sample_means(logits, batch["labels"], causal=causal)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def rows(n: int, length: int = LENGTH, masked: bool = False) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, MASK, (n, length), generator=generator)
    labels = ids.clone()
    if masked:
        hidden = torch.rand(ids.shape, generator=generator) < 0.3
        hidden[:, 0] = True
        labels, ids = labels.masked_fill(~hidden, -100), ids.masked_fill(hidden, MASK)
    ones = torch.ones_like(ids)
    columns = zip(ids, ones, labels, strict=True)
    return [{"input_ids": i, "attention_mask": m, "labels": y} for i, m, y in columns]


def public() -> Any:
    return fedleak.PublicText(PUBLIC)


def with_own_canaries() -> Any:
    """40 texts and 6 canaries, of which a seeded coin includes some."""
    from lightning_fedleak.evaluation.canaries import with_canaries

    canaries = [
        {
            "input_ids": (torch.arange(LENGTH) * (i + 2)) % 90 + 3,
            "attention_mask": torch.ones(LENGTH, dtype=torch.long),
            "labels": (torch.arange(LENGTH) * (i + 2)) % 90 + 3,
        }
        for i in range(6)
    ]
    return with_canaries(rows(40), canaries, seed=0)


def monitor(attacks: Any, **settings: Any) -> Any:
    """A LeakageMonitor, with settings of membership games and rare ones in their groups."""
    names = ("targets", "held_out", "window", "scale", "canaries")
    games = {name: settings.pop(name) for name in names if name in settings}
    kind = callbacks.WatchSettings
    names = {one.name for one in fields(kind)} & settings.keys()
    rare = {name: settings.pop(name) for name in names}
    return fedleak.LeakageMonitor(
        attacks, games=fedleak.Games(**games) if games else None, settings=kind(**rare), **settings
    )


# ---- a run --------------------------------------------------------------------------------------


@dataclass
class Run:
    """One seeded fit: monitors and gates are built anew each time."""

    callbacks: Callable[[], list[L.Callback]]
    defenses: Callable[[], list[Any]] = list
    model: Callable[[], nn.Module] = gpt2
    data: Callable[[], Any] = lambda: rows(40)
    module: Callable[[nn.Module], L.LightningModule] = Module
    batch_size: int = 4
    settings: dict[str, Any] = field(default_factory=lambda: {"max_steps": 10})
    private: bool = False
    """Noise of the operating system: only what it cost is looked at."""
    tensorboard: bool = False


def fit(
    run: Run,
    folder: Path,
    *,
    ckpt_path: Path | None = None,
    callbacks: list[L.Callback] | None = None,
    **settings: Any,
) -> L.Trainer:
    torch.set_num_threads(1)
    L.seed_everything(7, verbose=False)
    defenses = run.defenses()
    loggers: list[Logger] = [CSVLogger(folder, name="csv", version=0, flush_logs_every_n_steps=1)]
    if run.tensorboard:
        loggers.append(TensorBoardLogger(folder, name="tensorboard", version=0))
    more: dict[str, Any] = (
        {"strategy": fedleak.DefendedStrategy(defenses=defenses)} if defenses else {}
    )
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        callbacks=run.callbacks() if callbacks is None else callbacks,
        logger=loggers,
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=any(isinstance(c, ModelCheckpoint) for c in callbacks or ()),
        default_root_dir=folder,
        **more,
        **(run.settings | settings),
    )
    loader = DataLoader(run.data(), batch_size=run.batch_size)
    named = inspect.signature(trainer.fit).parameters  # Lightning 2.5 has no such argument
    strictly = {"weights_only": True} if "weights_only" in named else {}
    trainer.fit(run.module(run.model()), loader, ckpt_path=ckpt_path, **strictly)
    return trainer


# ---- which runs ---------------------------------------------------------------------------------


def flatchat() -> Attack:
    return fedleak.FlatChat(n_types=20)


def dpsgd(**settings: Any) -> list[Any]:
    values = {"noise_multiplier": 0.5, "seed": 1} | settings
    return [fedleak.DPSGD(0.9, **values)]


def untied() -> nn.Module:
    return gpt2(tied=False)


# ---- a checkpoint -------------------------------------------------------------------------------

SAVED_AT, RESUMED_UNTIL = 6, 12


def checkpointed() -> list[Any]:
    """Words, membership games, texts, and gates that have counted something."""
    words = [
        fedleak.FlatChat(public()),
        fedleak.AlignedFlatChat(public(), readout="sign", calibration_tokens=400),
    ]
    players = [fedleak.FCMembership(1), fedleak.AttentionMembership(1, public())]
    games = {"targets": 4, "window": 3}
    return [
        monitor(words, every_n_steps=2, stages=("local", "shared")),
        monitor(players, every_n_steps=1, held_out=fedleak.PublicText(HELD_OUT), **games),
        monitor(fedleak.PrefixInversion(1, None, language_model=False), every_n_steps=3, texts=1),
        fedleak.RiskGate("leakage/flatchat/f1", at_most=0.05, patience=50, action="warn"),
        fedleak.RiskGate("leakage/flatchat/precision", at_most=0.2, action="warn", name="low"),
    ]


CHECKPOINTED = Run(checkpointed, dpsgd, data=with_own_canaries)


def make_checkpoint(run: Run, path: Path, folder: Path) -> None:
    """Trains ``SAVED_AT`` of ``RESUMED_UNTIL`` steps and writes a checkpoint in mid-run.

    A ModelCheckpoint writes it, as a user's would be; what a run cannot need is left out.
    """
    saver = ModelCheckpoint(
        folder / "saved", every_n_train_steps=SAVED_AT, save_top_k=-1, filename="{step}"
    )
    fit(run, folder, callbacks=[*run.callbacks(), saver], max_steps=SAVED_AT + 1)
    saved = torch.load(folder / "saved" / f"step={SAVED_AT}.ckpt", weights_only=True)
    saved["callbacks"] = {
        name: state for name, state in saved["callbacks"].items() if "ModelCheckpoint" not in name
    }
    torch.save(saved, path)
