"""A cell of a grid: a model that is trained under a defence, and attacked as it trains."""

from __future__ import annotations

import math
import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from functools import lru_cache, partial
from pathlib import Path

import lightning.pytorch as L
import transformers

from lightning_fedleak import attacks
from lightning_fedleak.callbacks import Games, LeakageMonitor
from lightning_fedleak.cli.finetuning import (
    TRAINING,
    CausalLMFineTuning,
    SourceError,
    TextDataModule,
    quiet_logs,
)
from lightning_fedleak.cli.studies.sweep.grid import CellResult, GridCell, Setting, leakage_of
from lightning_fedleak.model.anatomy import Anatomy, find_anatomy
from lightning_fedleak.strategies import DefendedStrategy

_PUBLIC_TEXTS = 256  # texts that the attacks calibrate on; not tuned, more take longer


def run_cell(cell: GridCell, folder: Path) -> CellResult:
    """Fine-tune a model under a defence, attack it as it trains, and return what was measured.

    The loss is a mean over texts of each text's mean, as DP-SGD needs it, in every cell.

    Args:
        cell: what to run.
        folder: of the run's ``leakage.jsonl``; what is in it is removed first.

    Raises:
        Exception: whatever stops the run: a defence that refuses, a model that cannot be loaded.
    """
    start = time.perf_counter()
    shutil.rmtree(folder, ignore_errors=True)
    setting, defenses = cell.setting, cell.defense.build()
    with quiet() as messages:
        L.seed_everything(setting.seed, verbose=False)
        module = CausalLMFineTuning(
            setting.model, lr=setting.lr, peft=setting.peft, loss="sample_mean"
        )
        adversaries = make_attacks(setting, find_anatomy(module))
        monitor = LeakageMonitor(
            adversaries,
            every_n_steps=setting.every_n_steps,
            games=Games(window=setting.steps),
            folder=folder,
        )
        trainer = L.Trainer(
            strategy=DefendedStrategy("auto", defenses),
            max_steps=setting.steps,
            devices=1,
            check_val_every_n_epoch=None,
            val_check_interval=setting.steps,
            callbacks=[monitor],
            logger=False,
            num_sanity_val_steps=0,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        _fit(trainer, module, setting)
    loss = trainer.callback_metrics.get("val_loss")
    privacy: dict[str, float | None] = {}
    for defense in defenses:
        if (cost := defense.privacy) is not None:
            fields = {k: v for k, v in asdict(cost).items() if v is not None}
            privacy |= {k: v if math.isfinite(v) else None for k, v in fields.items()}
    return CellResult(
        val_loss=None if loss is None else float(loss),
        privacy=privacy,
        leakage=leakage_of(folder / "leakage.jsonl", adversaries),
        seconds=time.perf_counter() - start,
        warnings=tuple(dict.fromkeys(messages)),
    )


def loss_before(setting: Setting) -> float:
    """Return the validation loss of the model before any training."""
    with quiet():
        module = CausalLMFineTuning(setting.model, loss="sample_mean")
        trainer = L.Trainer(
            devices=1, logger=False, enable_progress_bar=False, enable_model_summary=False
        )
        metrics = trainer.validate(module, datamodule=data_of(setting), verbose=False)
    return float(metrics[0]["val_loss"])


def read_layer(setting: Setting, anatomy: Anatomy) -> int:
    """Return the block whose output attacks read: the middle one unless the setting names one.

    Raises:
        SourceError: the model has no such block.
    """
    blocks = len(anatomy.blocks)
    if setting.layer is not None and setting.layer > blocks:
        raise SourceError(
            f"--layer {setting.layer}: the model has {blocks} blocks; give 0 to {blocks}"
        )
    return max(1, blocks // 2) if setting.layer is None else setting.layer


def make_attacks(setting: Setting, anatomy: Anatomy) -> list[attacks.Attack]:
    """Return the attacks of a setting, by their names there."""
    layer = read_layer(setting, anatomy)
    public = _public_text(setting.model, setting.length, setting.seed)
    tokens, seed, budget = setting.length, setting.seed, setting.budget_seconds
    makers: Mapping[str, Callable[..., attacks.Attack]] = {
        "flatchat": partial(attacks.FlatChat, public, seed=seed),
        "aligned_flatchat": partial(attacks.AlignedFlatChat, public, seed=seed),
        "fc": partial(attacks.FCMembership, layer, tokens=tokens),
        "attention": partial(
            attacks.AttentionMembership,
            layer,
            public,
            tokens=tokens,
            batch=setting.batch_size,
            seed=seed,
        ),
        "prefix": partial(attacks.PrefixInversion, layer, public, budget, seed=seed),
        "descent": partial(attacks.EmbeddingDescent, layer, budget_seconds=budget),
    }
    return [makers[name](name=name) for name in setting.attacks]


@lru_cache(maxsize=1)
def _public_text(model: str | None, length: int, seed: int) -> attacks.PublicText:
    """Return text by the model as it was before training, sampled once for all cells."""
    anatomy = find_anatomy(CausalLMFineTuning(model))
    return attacks.PublicText.sampled_from(anatomy, n=_PUBLIC_TEXTS, length=length, seed=seed)


def data_of(setting: Setting) -> TextDataModule:
    """Return the texts of a setting in batches."""
    return TextDataModule(
        text=setting.text,
        column=setting.column,
        tokenizer=setting.model,
        batch_size=setting.batch_size,
        length=setting.length,
        seed=setting.seed,
    )


def _fit(trainer: L.Trainer, module: L.LightningModule, setting: Setting) -> None:
    try:
        trainer.fit(module, datamodule=data_of(setting))
    except SystemExit as end:  # Lightning tidies up after an interrupt, then exits
        raise KeyboardInterrupt from end
    if trainer.interrupted:
        raise KeyboardInterrupt


@contextmanager
def quiet() -> Iterator[list[str]]:
    """Keep notices out of the table; yield a list that holds this package's warnings in the end."""
    messages: list[str] = []
    with quiet_logs(TRAINING), warnings.catch_warnings(record=True) as records:
        warnings.simplefilter("always")
        transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        try:
            yield messages
        finally:
            texts = (str(w.message) for w in records if "lightning_fedleak" in w.filename)
            messages += [text for text in texts if "gave no result" not in text]
