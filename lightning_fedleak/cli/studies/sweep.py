"""A grid of defences: a model is trained under each, and attacked as it trains."""

from __future__ import annotations

import ast
import hashlib
import inspect
import itertools
import json
import re
import shutil
import warnings
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, is_dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

import lightning.pytorch as L
import transformers

from lightning_fedleak import attacks
from lightning_fedleak import defenses as package_defenses
from lightning_fedleak.callbacks import Games, LeakageMonitor
from lightning_fedleak.cli import finetuning
from lightning_fedleak.cli.finetuning import SourceError, refuse_errors
from lightning_fedleak.cli.studies.names import did_you_mean
from lightning_fedleak.defenses import Defense, TokenLDP
from lightning_fedleak.defenses.token_ldp.mechanisms import Mechanism
from lightning_fedleak.model.anatomy import Anatomy, find_anatomy
from lightning_fedleak.report.records import RECORD, EndLine, read_lines
from lightning_fedleak.strategies import DefendedStrategy

NONE = "none"
MECHANISMS = get_args(Mechanism)
"""Mechanisms of TokenLDP; the name of each is short for TokenLDP with this mechanism."""


@dataclass(frozen=True)
class _DefenseSpec:
    """One defence with its settings; ``none`` for no defence.

    Attributes:
        kind: ``Defense.name``.
        settings: arguments of its class.
    """

    kind: str
    settings: Mapping[str, Any]

    def __str__(self) -> str:
        """Return the defence as a user writes it."""
        settings = ",".join(f"{name}={_format(value)}" for name, value in self.settings.items())
        return f"{self.kind}:{settings}" if settings else self.kind

    @property
    def arguments(self) -> dict[str, Any]:
        """Return the arguments of the class, with grouped settings as objects of their groups."""
        groups = _groups(defense_classes()[self.kind])
        arguments: dict[str, Any] = {}
        grouped = defaultdict[tuple[str, type], dict[str, Any]](dict)
        for name, value in self.settings.items():
            values = grouped[groups[name]] if name in groups else arguments
            values[name] = value
        return arguments | {name: group(**values) for (name, group), values in grouped.items()}

    def build(self) -> list[Defense]:
        """Return a new defence, for one run; an empty list for ``none``.

        Raises:
            SourceError: a setting is out of its range.
        """
        if self.kind == NONE:
            return []
        defense = defense_classes()[self.kind]
        hint = f"'{self.kind}' takes {', '.join(inspect.signature(defense).parameters)}"
        with refuse_errors(f"'{self}' cannot be built", ValueError, TypeError, hint=hint):
            return [defense(**self.arguments)]


def defense_classes() -> dict[str, type[Defense]]:
    """Return the classes of the package's defences by their names."""
    return {
        cls.name: cls
        for cls in vars(package_defenses).values()
        if isinstance(cls, type) and issubclass(cls, Defense) and cls is not Defense
    }


def parse_defenses(text: str) -> list[_DefenseSpec]:
    """Return every combination of the settings in ``name:setting=value/value,setting=value``.

    Values are numbers, ``true``, ``false``, ``none`` or words; several of one setting are separated
    by ``/`` and make a grid: ``gradient_noise:clip=1,sigma=0/1e-4/1e-3``. A mechanism of
    TokenLDP may replace the defence's name: ``grr:epsilon=5`` is
    ``token_ldp:mechanism=grr,epsilon=5``.

    Args:
        text: one defence, or ``none``.

    Raises:
        SourceError: the defence or a setting is unknown, or a value is not allowed.
    """
    kind, _, text_of_settings = text.strip().partition(":")
    if kind == NONE:
        if text_of_settings:
            raise SourceError(f"'{NONE}' is no defence and takes no settings")
        return [_DefenseSpec(NONE, {})]
    names = [NONE, *defense_classes(), *MECHANISMS]
    if kind not in names:
        raise SourceError(
            f"there is no defence '{kind}'{did_you_mean(kind, names)}. These exist: "
            f"{', '.join(names)}"
        )
    if kind in MECHANISMS:
        kind, text_of_settings = (
            TokenLDP.name,
            ",".join([f"mechanism={kind}", *filter(None, [text_of_settings])]),
        )
    settings = _parse_settings(kind, text_of_settings)
    specs = [
        _DefenseSpec(kind, dict(zip(settings, values, strict=True)))
        for values in itertools.product(*settings.values())
    ]
    for spec in specs:
        spec.build()
    return specs


def _parse_settings(kind: str, text: str) -> dict[str, list[Any]]:
    """Return the values of each setting in ``setting=a/b,setting=c``."""
    defense = defense_classes()[kind]
    parameters = inspect.signature(defense).parameters.values()
    allowed = [p.name for p in parameters if p.kind is not p.VAR_KEYWORD] + [*_groups(defense)]
    settings: dict[str, list[Any]] = {}
    for part in text.split(",") if text else []:
        name, equals, values = part.strip().partition("=")
        if not equals or not values:
            raise SourceError(f"'{part}' of '{kind}:{text}' must be setting=value or setting=a/b/c")
        if name not in allowed:
            raise SourceError(
                f"'{kind}' has no setting '{name}'{did_you_mean(name, allowed)}. It has: "
                f"{', '.join(allowed)}"
            )
        settings[name] = [_parse_value(value) for value in values.split("/")]
    return settings


def _groups(defense: type[Defense]) -> dict[str, tuple[str, type]]:
    """Return the argument and the dataclass of each setting that a defence takes in a group."""
    return {
        field.name: (argument, group)
        for argument, hint in get_type_hints(defense.__init__).items()
        for group in get_args(hint)
        if isinstance(group, type) and is_dataclass(group)
        for field in fields(group)
    }


def _parse_value(text: str) -> Any:
    text = text.strip()
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        value = None
    return value if isinstance(value, int | float) else text


def _format(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


DataModule = TypeVar("DataModule", bound=finetuning.TextDataModule)
_PUBLIC_TEXTS = 256  # texts that the attacks calibrate on; not tuned, more take longer


def run_name(options: Namespace, defense: _DefenseSpec) -> str:
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
    return f"{re.sub(r'[^A-Za-z0-9_.=,+-]+', '-', str(defense))[:80]}-{key}"


def is_done(folder: Path) -> bool:
    """Return whether the run in a folder came to its end."""
    lines = read_lines(folder / RECORD).lines
    return any(isinstance(line, EndLine) and line.outcome == "finished" for line in lines)


def train_and_attack(options: Namespace, defense: _DefenseSpec, folder: Path) -> list[str]:
    """Fine-tune a model under a defence, attack it as it trains, and return the warnings.

    The loss is a mean over texts of each text's mean, as DP-SGD needs it, in every run.

    Args:
        options: The options of the command.
        defense: The defence of the run.
        folder: The folder of the run's logs. Its content is removed first.

    Raises:
        Exception: whatever stops the run: a defence that refuses, a model that cannot be loaded.
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
        strategy: With the defences.
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
        SourceError: the model has no such block.
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
    """Return text by the model as it was before training, sampled once for all runs."""
    anatomy = find_anatomy(finetuning.CausalLMFineTuning(model))
    return attacks.PublicText.sampled_from(anatomy, n=_PUBLIC_TEXTS, length=length, seed=seed)


def data_of(options: Namespace, kind: type[DataModule]) -> DataModule:
    """Return the texts of a command in batches, as a kind of data module."""
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
    """Keep notices out of the table; yield a list that holds this package's warnings at the end."""
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
