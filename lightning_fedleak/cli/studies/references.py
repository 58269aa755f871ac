"""Reference models: trained like a released model, on halves of the texts that are scored.

Each reference is trained on a random half of the pool, drawn independently of membership; every two
references have complementary halves. So members and non-members stay exchangeable. The score beside
them is :class:`~lightning_fedleak.attacks.memorization.CombinedReference`.
"""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DataCollatorForLanguageModeling

from lightning_fedleak.cli.finetuning import SourceError, load_tokenizer
from lightning_fedleak.cli.studies.models import (
    Head,
    load_released,
    mask_of,
    query_texts,
    released_config,
)
from lightning_fedleak.evaluation.canaries import halves
from lightning_fedleak.evaluation.metrics.record_list import used_up_mark
from lightning_fedleak.model.anatomy import Anatomy, find_anatomy
from lightning_fedleak.model.batches import IGNORE_INDEX
from lightning_fedleak.model.snapshots import References, TokenSnapshot
from lightning_fedleak.model.taps import Text
from lightning_fedleak.private_files import hash_tensors, load_private, save_private
from lightning_fedleak.progress import bars, track
from lightning_fedleak.report import records

OPTIMIZERS = "AdamW", "Adam", "SGD"
_COPIED_SETTINGS = "betas", "eps", "momentum", "nesterov", "weight_decay"


@dataclass(frozen=True)
class Recipe:
    """How a model was trained.

    Attributes:
        epochs: The number of passes over the rows.
        batch_size: The number of rows of an optimizer step.
        lr: The learning rate, which is constant, because schedules are not recorded.
        optimizer: The name of the optimizer's class in ``torch.optim``.
        settings: The arguments of the optimizer.
        bf16: Whether the forward is run under autocast to bfloat16.
        clip: The norm that the gradient is clipped to; None for no clipping.
        adapters: The settings of PEFT's adapters; None if all parameters are trained.
    """

    epochs: int
    batch_size: int
    lr: float
    optimizer: str = "AdamW"
    settings: Mapping[str, Any] | None = None
    bf16: bool = False
    clip: float | None = None
    adapters: Mapping[str, Any] | None = None

    @classmethod
    def of(cls, options: Namespace) -> Recipe | None:
        """Return the recipe from the options and a run's record; None without ``--references``.

        Options take precedence over the record.

        Raises:
            SourceError: A setting is in neither; the run had differential privacy, or nothing says
                that it had none; members were not drawn at random; or options have no effect.
        """
        if not options.references:
            names = ("epochs", "batch_size", "lr")
            if useless := [name for name in names if getattr(options, name) is not None]:
                raise SourceError(f"--{useless[0].replace('_', '-')} needs --references")
            return None
        is_drawn = options.drawn and not used_up_mark(options.members).exists()
        if options.references == 1 or not is_drawn:
            raise SourceError(
                "--references needs members and non-members that were drawn at random, and two "
                "models or more: give --drawn, others of a new draw, and --references 2 or more"
            )
        settings: dict[str, Any] = {}
        if options.run is not None:
            settings = _settings_of_runs(options.run)
        elif not options.no_account:
            raise SourceError(
                "references train again on private rows, which no epsilon covers: give the run's "
                "folder (--run), which says whether it had differential privacy, or give "
                "--no-account if it had none"
            )
        for name in ("epochs", "batch_size", "lr"):
            settings[name] = getattr(options, name) or settings.get(name)
            if settings[name] is None:
                raise SourceError(
                    f"{name} of the training is not recorded: give --{name.replace('_', '-')}"
                )
        adapters = Path(options.model) / "adapter_config.json"
        if adapters.is_file():
            settings["adapters"] = json.loads(adapters.read_text())
        return cls(**settings)


def _settings_of_runs(folder: Path) -> dict[str, Any]:
    """Return the training settings from the records of all runs in a folder and below it."""
    paths = sorted(folder.rglob(records.RECORD))
    logs = {path: records.read_lines(path) for path in paths}
    guaranteed = [path for path, log in logs.items() if any(map(_gives_guarantee, log.lines))]
    if guaranteed:
        raise SourceError(
            f"a run in '{guaranteed[0]}' had differential privacy or another guarantee: references "
            "would train again on its rows, which no epsilon covers"
        )
    problems = [problem for log in logs.values() for problem in log.problems]
    settings = [] if problems else [_training_of(log.lines) for log in logs.values()]
    if not settings or None in settings or any(setting != settings[0] for setting in settings):
        raise SourceError(
            f"'{folder}' has no whole {records.RECORD}, or runs with different settings: give "
            f"--run with the logs of one run. {' '.join(problems[:1])}"
        )
    return settings[0] or {}


def _gives_guarantee(line: records.RunLine | records.ResultLine) -> bool:
    """Return whether a line of a record says that a defence of the run gives a guarantee."""
    facts = [line] if isinstance(line, records.DefenseLine) else getattr(line, "defenses", ())
    promises = [fact.guarantee or "" for fact in facts if fact.class_name != "Freeze"]
    resumed = getattr(line, "resumed", None) or {}
    spent = getattr(line, "privacy", None) or resumed.get("privacy")
    return bool(spent) or not all(promise.startswith("none") for promise in promises)


def _training_of(lines: Sequence[records.RunLine | records.ResultLine]) -> dict[str, Any] | None:
    """Return the training settings of a record's newest run; None if it records no run.

    Epochs are known only if the run finished all steps that were planned for them. Lightning plans
    no steps.
    """
    begins = [line for line in lines if isinstance(line, records.BeginLine)]
    if not begins:
        return None
    training = begins[-1].training or {}
    optimizers = training.get("optimizers") or []
    group = optimizers[0]["groups"][0] if len(optimizers) == 1 else {}
    if not group or optimizers[0]["class"] not in OPTIMIZERS:
        raise SourceError(f"the recorded optimizer is not one of {OPTIMIZERS}: leave out --run")
    steps, epochs = training.get("max_steps") or 0, training.get("max_epochs") or 0
    # A Trainer of Lightning has a strategy; it plans no steps, so its epochs are not known.
    is_known = not str(training.get("strategy")).endswith("Strategy") and any(
        isinstance(line, records.EndLine)
        and (line.run, line.outcome) == (begins[-1].run, "finished")
        and 0 < steps <= line.step
        for line in lines
    )
    return {
        "epochs": int(epochs) if epochs > 0 and is_known else None,
        "lr": group.get("initial_lr", group.get("lr")),
        "optimizer": optimizers[0]["class"],
        "settings": {name: group[name] for name in _COPIED_SETTINGS if name in group},
        "bf16": "bf16" in str(training.get("precision")),
        "clip": training.get("gradient_clip_val"),
    }


class TrainedReferences:
    """The reference models of a released model. Call :meth:`ask`.

    Args:
        texts: N texts of the pool, members and non-members.
        index: (n,) the texts that references are trained on; all are queried.
        options: The options of the command.
        recipe: The recipe of their training.

    Attributes:
        inside: (K, N) bool, the texts of the pool that each reference is trained on.
    """

    def __init__(
        self, texts: Sequence[Text], index: Tensor, options: Namespace, recipe: Recipe
    ) -> None:
        self.options, self.recipe = options, recipe
        self.texts = [text.whole for text in texts]
        self.inside = torch.zeros(options.references, len(texts), dtype=torch.bool)
        self.inside[:, index] = halves(len(index), options.references)
        self.rows = [[texts[n] for n in row.nonzero()[:, 0].tolist()] for row in self.inside]
        self._folder = options.records and options.records.parent

    def describe(self, seconds: float) -> str:
        """Return a sentence about the number of references, their steps and their time.

        Args:
            seconds: The seconds of one forward of all texts.
        """
        steps = sum(-(-len(rows) // self.recipe.batch_size) for rows in self.rows)
        unless = f", unless their outputs are in '{self._folder}'" if self._folder else ""
        # In forwards of all texts: a training step takes about 3, and then all texts are queried.
        cost = sum(map(len, self.rows)) / len(self.texts) * self.recipe.epochs * 3 + len(self.rows)
        return (
            f"{len(self.rows)} references are trained on {len(self.rows[0])} rows each, "
            f"{steps * self.recipe.epochs} steps in all at a constant rate of {self.recipe.lr:g}: "
            f"about {cost * seconds / 60:.2g} min{unless}."
        )

    def ask(self, base: TokenSnapshot) -> References:
        """Train each reference and query it with all texts, unless its answers are in a file.

        Args:
            base: The answers of the base; the name of the file depends on them.

        Raises:
            SourceError: A training diverged.
        """
        options, answers = self.options, list[TokenSnapshot]()
        config, head = released_config(options.model, options.base)
        tokenizer, mask = load_tokenizer(options.base), mask_of(options.base, head)
        with bars(sys.stderr.isatty()):
            for number in track(range(len(self.rows)), "references"):
                rows = self.rows[number]
                words = json.dumps([asdict(self.recipe), number], sort_keys=True, default=str)
                parts = {"recipe": torch.tensor(list(words.encode())), "base": base.log_probs}
                for side, texts in (("asked", self.texts), ("trained", rows)):
                    parts |= {f"{side} {n}": text.ids for n, text in enumerate(texts)}
                    parts |= {f"{side} {n} labels": text.labels for n, text in enumerate(texts)}
                digest = hash_tensors(parts)
                path = self._folder and self._folder / f"reference_{digest[:16]}.safetensors"
                answer = None
                if path is not None and path.is_file():
                    with suppress(OSError, ValueError, TypeError):  # else it is computed again
                        answer = TokenSnapshot(**load_private(path))
                if answer is None:
                    torch.manual_seed(number)  # for a new head, adapters, order and dropout
                    anatomy = load_released(str(options.base), config, head, "--references")
                    trained = self._train(anatomy.model, rows, head, tokenizer)
                    query = self.texts, mask, "--references", options.dtype
                    answer = query_texts(trained, *query)
                    if path is not None:
                        path.parent.mkdir(parents=True, exist_ok=True)
                        save_private(path, answer._asdict())
                if not bool(answer.log_probs.isfinite().all()):
                    raise SourceError(f"reference {number + 1} diverged: give a lower --lr")
                answers.append(answer.padded(base.labels.shape[1]))
        return References(answers, self.inside)

    def _train(self, model: nn.Module, rows: Sequence[Text], head: Head, tokenizer: Any) -> Anatomy:
        """Return a reference that is trained on the texts."""
        if self.recipe.adapters is not None:
            from peft import PeftConfig, get_peft_model

            config = PeftConfig.from_pretrained(str(self.options.model))
            config.inference_mode = False
            model = get_peft_model(model, config)
        return fit_texts(model, rows, self.recipe, head, tokenizer)


def fit_texts(
    model: nn.Module, texts: Sequence[Text], recipe: Recipe, head: Head, tokenizer: Any
) -> Anatomy:
    """Train a model in place by a recipe, and return it in eval mode.

    Order and dropout use the global generator of torch. It trains on a GPU if there is one.

    Args:
        model: The model, whose parameters with ``requires_grad`` are trained.
        texts: The texts to train on, at least one.
        recipe: The recipe; its adapters are already on the model.
        head: The kind of prediction of the model.
        tokenizer: The tokenizer of the model, which masks the tokens of a masked one.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model.to(device).train()
    trained = [p for p in model.parameters() if p.requires_grad]
    cls = getattr(torch.optim, recipe.optimizer)
    optimizer = cls(trained, lr=recipe.lr, **(recipe.settings or {}))
    masks = DataCollatorForLanguageModeling(tokenizer) if head == "masked" else None
    for _ in range(recipe.epochs):
        order = torch.randperm(len(texts)).tolist()
        for start in track(range(0, len(order), recipe.batch_size), "training"):
            indices = order[start : start + recipe.batch_size]
            batch = _batch([texts[i] for i in indices], head, masks)
            with torch.autocast(device, torch.bfloat16) if recipe.bf16 else nullcontext():
                loss = model(**{name: value.to(device) for name, value in batch.items()}).loss
            loss.backward()
            if recipe.clip:
                nn.utils.clip_grad_norm_(trained, recipe.clip)
            optimizer.step()
            optimizer.zero_grad()
    return find_anatomy(model.eval())


def _batch(texts: Sequence[Text], head: Head, masks: Any) -> dict[str, Tensor]:
    """Return texts as a batch of the model; for a masked model, with a random mask."""
    pad = nn.utils.rnn.pad_sequence
    ids = pad([text.ids for text in texts], batch_first=True)
    labels = [text.labels[1:] if text.is_aligned else text.labels for text in texts]
    targets = pad(labels, batch_first=True, padding_value=IGNORE_INDEX)
    mask = pad([torch.ones_like(text.ids) for text in texts], batch_first=True)
    if head == "masked":
        ids, targets = masks.torch_mask_tokens(ids, special_tokens_mask=targets == IGNORE_INDEX)
    if head == "row":
        targets = torch.stack([row_labels[-1] for row_labels in labels])
    return {"input_ids": ids, "attention_mask": mask, "labels": targets}
