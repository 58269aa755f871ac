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
from dataclasses import asdict
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar

import lightning.pytorch as L
import transformers

from lightning_fedleak import attacks
from lightning_fedleak.callbacks import Games, LeakageMonitor
from lightning_fedleak.cli import finetuning
from lightning_fedleak.cli.studies.defense_specs import DefenseSpec
from lightning_fedleak.model.anatomy import Anatomy, find_anatomy
from lightning_fedleak.report.records import RECORD, EndLine, read_lines
from lightning_fedleak.strategies import DefendedStrategy

DataModule = TypeVar("DataModule", bound=finetuning.TextDataModule)
_PUBLIC_TEXTS = 256  # texts that the attacks calibrate on; not tuned, more take longer


def run_name(options: Namespace, defense: DefenseSpec) -> str:
    """Return the name of the folder of a run: the defence, and a hash of all settings.

    Args:
        options: The options of the command.
        defense: The defence of the run.
    """
    shared = vars(options).keys() - {"command", "defense", "attack", "out"}
    setting = {name: getattr(options, name) for name in shared}
    setting["attacks"] = list(dict.fromkeys(options.attack))
    text = json.dumps({"setting": setting, "defense": asdict(defense)}, sort_keys=True)
    key = hashlib.sha256(text.encode()).hexdigest()[:12]
    # 80 and 12 characters keep paths short; the hash distinguishes the runs.
    return f"{re.sub(r'[^A-Za-z0-9_.=,+-]+', '-', str(defense))[:80]}-{key}"


def is_done(folder: Path) -> bool:
    """Return whether the run in a folder is finished, by its record."""
    lines = read_lines(folder / RECORD).lines
    return any(isinstance(line, EndLine) and line.outcome == "finished" for line in lines)


def train_and_attack(options: Namespace, defense: DefenseSpec, folder: Path) -> list[str]:
    """Fine-tune a model under a defence, attack it as it trains, and return the warnings.

    The loss is a mean over texts of each text's mean, as DP-SGD needs it, in every run.

    Args:
        options: The options of the command.
        defense: The defence of the run.
        folder: The folder of the run's logs. Its content is removed first.

    Raises:
        Exception: Any error of the run, such as a defence that refuses or a missing model.
    """
    shutil.rmtree(folder, ignore_errors=True)
    with quiet() as messages:
        L.seed_everything(options.seed, verbose=False)
        module = finetuning.CausalLMFineTuning(
            options.model, lr=options.lr, peft=options.peft, loss="sample_mean"
        )
        monitor = LeakageMonitor(
            make_attacks(options, find_anatomy(module)),
            every_n_steps=options.every_n_steps,
            games=Games(window=options.steps),
            folder=folder,
        )
        strategy = DefendedStrategy("auto", defense.build())
        trainer = trainer_of(options.steps, strategy, callbacks=[monitor], logger=False)
        try:
            trainer.fit(module, datamodule=data_of(options, finetuning.TextDataModule))
        except SystemExit as end:  # Lightning tidies up after an interrupt, then exits
            raise KeyboardInterrupt from end
        if trainer.interrupted:
            raise KeyboardInterrupt
    return list(dict.fromkeys(messages))


def trainer_of(steps: int, strategy: DefendedStrategy, **settings: Any) -> L.Trainer:
    """Return a Trainer that prints nothing and validates at its end.

    Args:
        steps: The optimizer steps.
        strategy: The strategy with the defences.
        settings: Further arguments of the Trainer.
    """
    return L.Trainer(
        strategy=strategy,
        max_steps=steps,
        devices=1,
        check_val_every_n_epoch=None,
        val_check_interval=steps,
        log_every_n_steps=1,
        num_sanity_val_steps=0,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **settings,
    )


def loss_before(options: Namespace) -> float:
    """Return the validation loss of the model before any training."""
    with quiet():
        module = finetuning.CausalLMFineTuning(options.model, loss="sample_mean")
        trainer = trainer_of(1, DefendedStrategy("auto", ()), logger=False)
        metrics = trainer.validate(
            module, datamodule=data_of(options, finetuning.TextDataModule), verbose=False
        )
    return float(metrics[0]["val_loss"])


def read_layer(options: Namespace, anatomy: Anatomy) -> int:
    """Return the block whose output attacks read: the middle one unless ``--layer`` names one.

    Raises:
        SourceError: The model has no such block.
    """
    blocks = len(anatomy.blocks)
    if options.layer is None:
        return max(1, blocks // 2)
    layer: int = options.layer
    hint = f"the model has {blocks} blocks"
    return finetuning.check_option("--layer", layer, at_least=0, at_most=blocks, hint=hint)


def make_attacks(options: Namespace, anatomy: Anatomy) -> list[attacks.Attack]:
    """Return the attacks that ``--attack`` names."""
    layer = read_layer(options, anatomy)
    public = public_text(options.model, options.length, options.seed)
    tokens, seed, budget = options.length, options.seed, options.budget_seconds
    makers: Mapping[str, Callable[..., attacks.Attack]] = {
        "flatchat": partial(attacks.FlatChat, public, seed=seed),
        "aligned_flatchat": partial(attacks.AlignedFlatChat, public, seed=seed),
        "fc": partial(attacks.FCMembership, layer, tokens=tokens),
        "attention": partial(
            attacks.AttentionMembership,
            layer,
            public,
            tokens=tokens,
            batch=options.batch_size,
            seed=seed,
        ),
        "prefix": partial(attacks.PrefixInversion, layer, public, budget, seed=seed),
        "descent": partial(attacks.EmbeddingDescent, layer, budget_seconds=budget),
    }
    return [makers[name](name=name) for name in dict.fromkeys(options.attack)]


@lru_cache(maxsize=1)
def public_text(model: str | None, length: int, seed: int) -> attacks.PublicText:
    """Return text that is sampled from the model before training, once for all runs."""
    anatomy = find_anatomy(finetuning.CausalLMFineTuning(model))
    return attacks.PublicText.sampled_from(anatomy, n=_PUBLIC_TEXTS, length=length, seed=seed)


def data_of(options: Namespace, kind: type[DataModule]) -> DataModule:
    """Return a data module of the class ``kind`` with the texts of a command."""
    return kind(
        text=options.text,
        column=options.column,
        tokenizer=options.model,
        batch_size=options.batch_size,
        length=options.length,
        seed=options.seed,
    )


@contextmanager
def quiet() -> Iterator[list[str]]:
    """Silence logs and warnings in the block; fill the yielded list with this package's warnings.

    The list is filled when the block ends.
    """
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
            # Warnings about attacks that gave no result are not passed on.
            texts = (str(w.message) for w in records if "lightning_fedleak" in w.filename)
            messages += [text for text in texts if "gave no result" not in text]
