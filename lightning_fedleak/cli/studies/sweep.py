"""A grid of defences: a model is trained under each, and attacked as it trains."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Literal

import lightning.pytorch as L
import transformers

from lightning_fedleak import attacks
from lightning_fedleak.callbacks import Games, LeakageMonitor
from lightning_fedleak.cli import finetuning
from lightning_fedleak.cli.studies.defense_specs import DefenseSpec
from lightning_fedleak.model.anatomy import Anatomy, find_anatomy
from lightning_fedleak.report.records import RECORD, EndLine, read_lines
from lightning_fedleak.strategies import DefendedStrategy

_PUBLIC_TEXTS = 256  # texts that the attacks calibrate on; not tuned, more take longer


@dataclass(frozen=True)
class Setting:
    """What all cells of a grid have in common.

    Attributes:
        model: causal language model, a folder or a name on the hub; None for the embedded one.
        text: private text as :func:`~lightning_fedleak.cli.finetuning.texts.read_texts` takes it;
            None for the embedded messages.
        column: the field that holds it; None as there.
        attacks: names out of ``SWEEP_ATTACKS``; all look at the same steps of the same run.
        layer: where ``fc``, ``attention``, ``prefix`` and ``descent`` read; None for the middle.
        steps: optimizer steps.
        batch_size: texts a batch.
        length: tokens a text, at most.
        every_n_steps: steps between two looks.
        lr: learning rate of AdamW.
        peft: as in :class:`~lightning_fedleak.cli.finetuning.CausalLMFineTuning`.
        budget_seconds: for one run of ``prefix`` or ``descent``.
        seed: of split, order, dropout, public text and calibration.
    """

    model: str | None = None
    text: str | None = None
    column: str | None = None
    attacks: tuple[str, ...] = ("flatchat", "aligned_flatchat", "fc")
    layer: int | None = None
    steps: int = 60
    batch_size: int = 8
    length: int = 64
    every_n_steps: int = 5
    lr: float = 1e-4
    peft: Literal["lora", "bitfit"] | None = None
    budget_seconds: float = 10.0
    seed: int = 0


@dataclass(frozen=True)
class Cell:
    """A setting and a defence."""

    setting: Setting
    defense: DefenseSpec

    @property
    def name(self) -> str:
        """Return the name of the folder of its run: the defence, and a hash of all settings."""
        text = json.dumps(asdict(self), sort_keys=True)
        key = hashlib.sha256(text.encode()).hexdigest()[:12]
        return f"{re.sub(r'[^A-Za-z0-9_.=,+-]+', '-', str(self.defense))[:80]}-{key}"


def is_done(folder: Path) -> bool:
    """Return whether the run in a folder came to its end."""
    lines = read_lines(folder / RECORD).lines
    return any(isinstance(line, EndLine) and line.outcome == "finished" for line in lines)


def run_cell(cell: Cell, folder: Path) -> list[str]:
    """Fine-tune a model under a defence, attack it as it trains, and return what it warned of.

    The loss is a mean over texts of each text's mean, as DP-SGD needs it, in every cell.

    Args:
        cell: what to run.
        folder: of the run's logs; what is in it is removed first.

    Raises:
        Exception: whatever stops the run: a defence that refuses, a model that cannot be loaded.
    """
    shutil.rmtree(folder, ignore_errors=True)
    setting = cell.setting
    with quiet() as messages:
        L.seed_everything(setting.seed, verbose=False)
        module = finetuning.CausalLMFineTuning(
            setting.model, lr=setting.lr, peft=setting.peft, loss="sample_mean"
        )
        monitor = LeakageMonitor(
            make_attacks(setting, find_anatomy(module)),
            every_n_steps=setting.every_n_steps,
            games=Games(window=setting.steps),
            folder=folder,
        )
        trainer = L.Trainer(
            strategy=DefendedStrategy("auto", cell.defense.build()),
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
        try:
            trainer.fit(module, datamodule=data_of(setting))
        except SystemExit as end:  # Lightning tidies up after an interrupt, then exits
            raise KeyboardInterrupt from end
        if trainer.interrupted:
            raise KeyboardInterrupt
    return list(dict.fromkeys(messages))


def loss_before(setting: Setting) -> float:
    """Return the validation loss of the model before any training."""
    with quiet():
        module = finetuning.CausalLMFineTuning(setting.model, loss="sample_mean")
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
    if setting.layer is None:
        return max(1, blocks // 2)
    hint = f"the model has {blocks} blocks"
    return finetuning.check_option("--layer", setting.layer, at_least=0, at_most=blocks, hint=hint)


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
    anatomy = find_anatomy(finetuning.CausalLMFineTuning(model))
    return attacks.PublicText.sampled_from(anatomy, n=_PUBLIC_TEXTS, length=length, seed=seed)


def data_of(setting: Setting | Namespace) -> finetuning.TextDataModule:
    """Return the texts of a setting, or of a command's options, in batches."""
    return finetuning.TextDataModule(
        text=setting.text,
        column=setting.column,
        tokenizer=setting.model,
        batch_size=setting.batch_size,
        length=setting.length,
        seed=setting.seed,
    )


@contextmanager
def quiet() -> Iterator[list[str]]:
    """Keep notices out of the table; yield a list that holds this package's warnings in the end."""
    messages: list[str] = []
    with (
        finetuning.quiet_logs(finetuning.TRAINING),
        warnings.catch_warnings(record=True) as records,
    ):
        warnings.simplefilter("always")
        transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        try:
            yield messages
        finally:
            texts = (str(w.message) for w in records if "lightning_fedleak" in w.filename)
            messages += [text for text in texts if "gave no result" not in text]
