"""Lets defences act in transformers' Trainer, and in trainers that derive from it.

:func:`defended` makes a class from :class:`DefendedMixin` and a Trainer. In a run of this class
``train`` refuses settings under which defences cannot act, ``get_train_dataloader`` returns the
loader of the defences, ``create_optimizer`` makes them act before each update, ``compute_loss``
computes each loss within them, and ``on_save`` writes their states into each checkpoint.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import data
from transformers.trainer_utils import get_last_checkpoint

from lightning_fedleak.defenses import DPSGD, Defense, DefenseError, mean_of_sample_means, refuse
from lightning_fedleak.defenses.dpsgd.sampling import LOADER_SETTINGS, check_distinct
from lightning_fedleak.defenses.host import Host
from lightning_fedleak.defenses.release import Client, UpdateRelease
from lightning_fedleak.messages import rank_zero_info
from lightning_fedleak.trainers import loop
from lightning_fedleak.trainers.defended_loop import load_defenses, save_defenses

if TYPE_CHECKING:
    from transformers import Trainer
else:
    Trainer = object

# The packages of trainers whose ``training_step`` adds no term to the loss of ``compute_loss``.
_TRUSTED_PACKAGES = ("transformers.", "trl.")
# Schedulers that depend on a metric, by name: not every version of transformers has GreedyLR.
_METRIC_SCHEDULERS = {"ReduceLROnPlateau", "GreedyLR"}
# TRL's trainers, other than DPOTrainer, whose examples hold several texts.
_PAIRWISE = {"KTOTrainer", "CPOTrainer", "ORPOTrainer", "BCOTrainer", "RewardTrainer"}
# The losses of DPOTrainer that are means over pairs. Its other losses sort the pairs of a batch, or
# divide by the tokens of all pairs.
_PAIR_LOSSES = {"sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "nca_pair", "robust"} | {
    *("sppo_hard", "apo_zero", "apo_down", "discopop")
}


class _TrainerHost(Host):
    """transformers' Trainer as a :class:`Host` of defences.

    Args:
        trainer: The Trainer in which the defences act.
    """

    name = "the Trainer"  # this and the next two are for messages, see `Host`
    mend = "Pass it as Trainer(optimizers=(optimizer, scheduler)), and let the Trainer step it."
    steps_by = "num_train_epochs or max_steps"

    def __init__(self, trainer: DefendedMixin) -> None:
        self._trainer = trainer

    @property
    def optimizers(self) -> Sequence[Optimizer]:  # type: ignore[override]
        """Return the Trainer's optimizer, unwrapped from Accelerate."""
        optimizer = self._trainer.optimizer
        return [] if optimizer is None else [loop.unwrapped(optimizer)]

    @property
    def batch_number(self) -> int:  # type: ignore[override]
        """Return the number of the batch, counted over all calls of ``train``."""
        return self._trainer._n_batches

    @property
    def step(self) -> int:  # type: ignore[override]
        """Return the index of the next optimizer step."""
        return int(self._trainer.state.global_step)

    @property
    def model(self) -> object:  # type: ignore[override]
        """Return the model as Accelerate has wrapped it."""
        return self._trainer.model_wrapped

    def refusals(self) -> Mapping[str, object]:
        """Return the Trainer's settings that break the guarantee; see :meth:`Host.refusals`."""
        trainer, args = self._trainer, self._trainer.args
        callbacks = trainer.callback_handler.callbacks
        scheduler = type(trainer.lr_scheduler)
        selections = {
            "load_best_model_at_end": args.load_best_model_at_end,
            "save_strategy='best'": args.save_strategy == "best",
            "EarlyStoppingCallback": any(
                isinstance(c, transformers.EarlyStoppingCallback) for c in callbacks
            ),
            "metric_for_best_model with save_total_limit": (
                args.metric_for_best_model and args.save_total_limit
            ),
            f"the scheduler {scheduler.__name__}": (
                _METRIC_SCHEDULERS.intersection(cls.__name__ for cls in scheduler.__mro__)
            ),
        }
        selectors = [name for name, is_used in selections.items() if is_used]
        groups = getattr(args, "train_sampling_strategy", "random") not in ("random", "sequential")
        return {
            ": auto_find_batch_size=True repeats steps when memory runs out, which depends on the "
            "sampled examples. Pass max_physical_batch_size to DPSGD, small enough to fit.": (
                args.auto_find_batch_size
            ),
            f": label_smoothing_factor={args.label_smoothing_factor} divides the loss by the "
            "tokens of all examples. Pass Trainer(compute_loss_func=...) instead, a function that "
            "returns the mean over examples of each one's own smoothed mean.": (
                args.label_smoothing_factor
            ),
            " samples each example independently, and group_by_length groups examples by their "
            "lengths. Leave train_sampling_strategy out; max_physical_batch_size limits the "
            "memory.": groups or getattr(args, "group_by_length", False),
            ": torch_compile=True hides the layers' gradients in compiled code. Leave it out.": (
                args.torch_compile
            ),
            f": {', '.join(selectors)} decides by evaluations. Epsilon does not cover them on "
            "private data: use public data and pass outside_epsilon=True, or leave it out.": (
                selectors and not trainer.outside_epsilon
            ),
            ": a packed or padding-free batch joins examples in one row, so that DPSGD cannot clip "
            "each example's gradient. Use SFTConfig(packing=False, padding_free=False).": (
                getattr(args, "packing", False) or getattr(args, "padding_free", False)
            ),
            ": the Trainer changed the number of rows of train_dataset, which depends on what the "
            "examples hold. Pass rows that it does not change: tokenized and truncated.": (
                trainer._row_count_leaks
            ),
        }

    def count_steps(self, per_epoch: int) -> int | None:
        """Return the Trainer's number of steps; a fraction of an epoch is rounded up."""
        args = self._trainer.args
        return (
            args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * per_epoch)
        )

    def stop(self) -> None:
        """End the training after this step."""
        self._trainer.control.should_training_stop = True

    def to_device(self, batch: Any) -> Any:
        """Return a batch on the Trainer's device; B pairs as (B, 2, ...), as defences expect."""
        batch = self._trainer._prepare_inputs(batch)
        return _map_rows(_to_pairs, batch) if self._trainer._has_pairs else batch

    @contextmanager
    def without_logs(self) -> Iterator[None]:
        """Return a context that restores, at its end, the averages that TRL's trainers log."""
        names = ("_metrics", "_total_train_tokens")
        values = {n: copy.deepcopy(v) for n, v in vars(self._trainer).items() if n in names}
        try:
            yield
        finally:
            vars(self._trainer).update(values)


class DefendedMixin(Trainer):
    """Lets defences act in a Trainer of transformers, before an update leaves the client.

    It is a base class before the Trainer: ``class T(DefendedMixin, SFTTrainer)``. :func:`defended`
    makes such a class. In each step the defences act at the same stages as in
    :class:`~lightning_fedleak.DefendedStrategy`. Several processes, started by torchrun, are one
    client (``client="world"`` of that strategy).

    Under :class:`~lightning_fedleak.DPSGD` the Trainer's loader draws Poisson samples. The
    ``gradient_accumulation_steps`` batches of a step become one batch, which is run in pieces.
    ``max_grad_norm`` is set to 0, because each example is clipped instead. Each checkpoint holds
    the privacy account in ``defenses.safetensors``. A resumed run continues this account, and draws
    new samples.

    Args:
        args: The Trainer's positional arguments.
        defenses: The defences, in the order in which they act.
        outside_epsilon: Whether an account allows settings that select or stop by evaluations:
            ``load_best_model_at_end``, early stopping, a scheduler on a metric. Epsilon does not
            cover them, unless the evaluation data are public.
        kwargs: The Trainer's keyword arguments.

    Raises:
        DefenseError: The defences do not fit each other. When training begins, also: they do not
            fit this class of Trainer, or a setting breaks their guarantee. The message says what to
            change.
    """

    # `_n_batches`: the batches of all calls of `train`. `_is_setting_up`: `train` makes its loader.
    # `_is_in_step`: a training step runs. `_row_count_leaks`: the number of rows depends on data.
    _n_batches = 0
    _is_setting_up = _is_in_step = _row_count_leaks = False

    def __init__(
        self, *args: Any, defenses: Sequence[Defense], outside_epsilon: bool = False, **kwargs: Any
    ) -> None:
        # UpdateRelease refuses anything else than a list, with a message.
        defense_list = defenses if isinstance(defenses, Sequence) else ()
        self._per_sample = any(getattr(defense, "per_sample", False) for defense in defense_list)
        arguments = inspect.signature(super().__init__).bind_partial(*args, **kwargs).arguments
        dataset: Any = arguments.get("train_dataset", kwargs.get("train_dataset"))
        super().__init__(*args, **kwargs)
        names = {cls.__name__ for cls in type(self).__mro__}
        # Examples of DPOTrainer are pairs: a chosen and a rejected text.
        self._has_pairs = self._per_sample and "DPOTrainer" in names
        self.outside_epsilon = outside_epsilon
        client: Client = "rank" if self.args.world_size == 1 else "world"
        # It runs the defences at each update; the name must not be one that a Trainer uses.
        self._fedleak = UpdateRelease(defenses, client, type(self).__name__)
        if self._per_sample:
            self._join_batches()
            self._count_examples(dataset)
        self.add_callback(_DefenseEvents(self))

    @property
    def defenses(self) -> tuple[Defense, ...]:
        """Return the defences, in the order in which they act."""
        return self._fedleak.defenses

    def _prepare_dataset(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the rows that TRL makes from a dataset, without dropping any training row.

        TRL drops texts whose whole answer was truncated. Here they stay as rows without a label,
        because the number of rows would depend on what the examples hold.
        """
        cls, name = type(dataset), kwargs.get("dataset_name", args[-1] if args else None)
        original_filter: Any = getattr(cls, "filter", None)
        keeps_all = self._per_sample and name == "train" and original_filter is not None
        try:
            if keeps_all:
                cls.filter = lambda rows, *_, **__: rows
            return super()._prepare_dataset(dataset, *args, **kwargs)  # type: ignore[misc]
        finally:
            if keeps_all:
                cls.filter = original_filter

    def _count_examples(self, dataset: Any) -> None:
        """Make the account use the number of examples in the dataset that the user passed.

        The Trainer may have dropped some of them.
        """
        rows: Any = self.train_dataset
        check_distinct(dataset)  # before the Trainer has copied its rows
        if not (hasattr(dataset, "__len__") and hasattr(rows, "__len__")):
            return
        n_public = getattr(dataset, "public_length", len(dataset))
        has_users = any(getattr(defense, "users", None) for defense in self.defenses)
        leaks = self._row_count_leaks = len(rows) != getattr(rows, "public_length", n_public)
        if leaks and len(rows) < n_public and hasattr(rows, "__dict__") and not has_users:
            rows.public_length, self._row_count_leaks = n_public, False

    def _join_batches(self) -> None:
        """Join accumulated batches, and switch off the Trainer's clipping of a batch's gradient."""
        self.args = args = copy.copy(self.args)  # the user may pass the original to other runs
        n_joined = args.gradient_accumulation_steps
        is_nll = getattr(args, "loss_type", "") == "nll" and not getattr(
            self, "aux_loss_enabled", 0
        )
        if is_nll and self.compute_loss_func is None:  # SFTTrainer's mean over a batch's tokens
            self.compute_loss_func = _mean_over_texts
            rank_zero_info(f"{self._fedleak.owner}: the loss is the mean over texts of their means")
        if args.max_grad_norm:
            rank_zero_info(
                f"{self._fedleak.owner}: max_grad_norm={args.max_grad_norm} of the Trainer is set "
                "to 0, because each example's gradient is clipped"
            )
            args.max_grad_norm = 0.0
        if n_joined == 1:
            return
        size = args.per_device_train_batch_size
        for defense in self.defenses:
            if isinstance(defense, DPSGD) and defense.users is None:
                defense.max_physical_batch_size = min(defense.max_physical_batch_size or size, size)
        args.gradient_accumulation_steps, args.per_device_train_batch_size = 1, size * n_joined
        self._train_batch_size = args.train_batch_size
        rank_zero_info(
            f"{self._fedleak.owner}: {n_joined} accumulated batches of {size} examples become one "
            f"batch of {size * n_joined}, of which {size} at a time are run"
        )

    def train(
        self, resume_from_checkpoint: Any = None, trial: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Train with the defences. The arguments are the Trainer's.

        Raises:
            DefenseError: A setting breaks the guarantee of a defence, or the checkpoint to resume
                from holds no states of the defences.
        """
        if resume_from_checkpoint is True:
            checkpoint: str | None = get_last_checkpoint(str(self.args.output_dir))  # type: ignore[no-untyped-call]
            resume_from_checkpoint = checkpoint or True
        self._check(trial)
        if resume_from_checkpoint and resume_from_checkpoint is not True and self.defenses:
            load_defenses(self._fedleak, Path(resume_from_checkpoint))
        self._is_setting_up = True
        try:
            output = super().train(resume_from_checkpoint, trial, *args, **kwargs)
            if not self.args.load_best_model_at_end:  # weights of an earlier step
                self._fedleak.train_ends()
            return output
        finally:
            self._is_setting_up = False
            self._fedleak.end()

    def _check(self, trial: Any) -> None:
        """Refuse settings under which defences cannot act, and any trial of a search."""
        args, classes = self.args, type(self).__mro__
        root: nn.Module = self.model  # type: ignore[assignment]
        position = classes.index(DefendedMixin)
        overriders = _overriding_classes(classes[:position], "training_step", "compute_loss")
        bases = _overriding_classes(classes[position + 1 :], "training_step")
        hidden_names = [d.name for d in self.defenses if d.activation_layers or d.acts_in_inference]
        pair_trainers = _PAIRWISE.intersection(cls.__name__ for cls in classes)
        loop.check_whole(root, self._fedleak.owner, loop.wrappers_of(self), error=DefenseError)
        refusals = {
            f"{', '.join(hidden_names)} acts on hidden states, which needs Lightning's Trainer and "
            "DefendedStrategy": hidden_names,
            "fp16 lets Accelerate take the step, which it skips depending on the gradients: use "
            "bf16=True": self.accelerator.mixed_precision == "fp16",
            f"optim={args.optim} steps while backward runs, before a defence could act: use "
            "another optimizer": loop.steps_in_backward(args.optim),
            "each trial of hyperparameter_search is a separate run, and no account covers the "
            "choice among them: choose on public data, then call train()": (trial is not None),
            f"{', '.join(overriders)} changes the loss outside of the defences: write a Trainer "
            "with that method, and pass it to defended(...)": overriders
            or "compute_loss" in vars(self),
            f"{', '.join(bases)}.training_step is not known: change compute_loss instead": bases,
            f"{', '.join(pair_trainers)} compares several texts in one example, and DPSGD would "
            "clip each of them separately: train on single texts": pair_trainers
            and self._per_sample,
            "push_to_hub would upload losses from before the defence (README.md, runs, "
            "trainer_state.json): leave it out, and call trainer.model.push_to_hub(...) "
            "after training, which uploads only the weights": args.push_to_hub and self._per_sample,
        }
        refuse(f"{self._fedleak.owner}: ", refusals)
        if self._has_pairs:
            self._check_pairs(root)

    def _check_pairs(self, root: nn.Module) -> None:
        """Refuse settings of DPOTrainer under which the loss is not a mean over pairs.

        DPSGD has to trust that all other settings give a mean over pairs. Its own check of the loss
        needs a second derivative, which TRL's function for the log probabilities does not have.
        """
        losses = getattr(self, "loss_types", None) or [self.args.loss_type]  # type: ignore[attr-defined]
        batch_losses = [name for name in losses if name not in _PAIR_LOSSES]
        methods, subclasses = {"compute_loss", "_compute_loss", "compute_ref_log_probs"}, []
        for cls in type(self).__mro__:
            if cls.__name__ == "DPOTrainer" and cls.__module__.startswith("trl."):
                break
            if cls is not DefendedMixin and methods & vars(cls).keys():
                subclasses.append(cls.__name__)
        head: Any = getattr(root, "get_output_embeddings", lambda: None)()
        heads = () if head is None else head.parameters()
        refusals = {
            f"loss_type={batch_losses} is not known to be a mean over pairs (it may sort the pairs "
            f"of a batch, or divide by all tokens): use {sorted(_PAIR_LOSSES)}": batch_losses,
            "router_aux_loss_coef adds a loss over all tokens of the batch: set it to 0": (
                getattr(self, "aux_loss_enabled", False)
            ),
            "the patches of an image are not rows of one pair: train on texts without images": (
                getattr(self, "_is_vision_dataset", False)
            ),
            "TRL reads the output head's weights outside of their layer, so that a pair has no "
            "gradient: pass peft_config=LoraConfig(...), or freeze the head": any(
                p.requires_grad for p in heads
            ),
            f"{', '.join(subclasses)} changes the loss, which is known to be a mean over pairs "
            "only as TRL computes it: use DPOTrainer itself": subclasses,
        }
        refuse(f"{self._fedleak.owner}: ", refusals)
        for defense in self.defenses:
            if isinstance(defense, DPSGD):
                defense.clip = dataclasses.replace(defense.clip, loss="trusted")

    def get_train_dataloader(self) -> data.DataLoader[Any]:
        """Return the Trainer's loader, or the defences' loader while training is being set up."""
        if not self._is_setting_up:
            return super().get_train_dataloader()
        accelerator: Any = self.accelerator
        # Accelerate must not prepare the loader yet: its samplers would replace Poisson sampling.
        accelerator.prepare = lambda loader: loader
        try:
            plain = super().get_train_dataloader()
        finally:
            del accelerator.prepare
        self._open()
        self._is_setting_up = False
        if self._has_pairs:
            plain.collate_fn = functools.partial(plain.collate_fn)
            plain.collate_fn.rows_per_example = 2  # type: ignore[attr-defined]
        is_splittable = type(plain.sampler) in (data.RandomSampler, data.SequentialSampler)
        if self._per_sample and self.args.world_size > 1 and is_splittable:
            plain = _split(plain, self.args.world_size, self.args.process_index)
        loader: data.DataLoader[Any] = self._fedleak.dataloader(plain)
        if loader is plain:
            loader = accelerator.prepare(plain)
        return loader

    def _open(self) -> None:
        """Let the defences prepare the model, before the optimizer and DDP are made for it."""
        self._fedleak.end()
        root: nn.Module = self.model  # type: ignore[assignment]
        root.train()
        precision = loop.precision_of(self.accelerator.mixed_precision, root)
        self._fedleak.open(_TrainerHost(self), root, self.args.device, precision, None)
        self._fedleak.begin()

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Return the Trainer's optimizer, and make the defences act before each of its updates."""
        optimizer = super().create_optimizer(*args, **kwargs)
        if self._fedleak.is_open:
            self._fedleak.guard(loop.unwrapped(self.optimizer))
        return optimizer

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """Return the next batches; an empty list once the privacy budget is spent."""
        if self._fedleak.is_open and self.control.should_training_stop:
            return [], None
        return super().get_batch_samples(*args, **kwargs)

    def training_step(
        self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None, **kwargs: Any
    ) -> Tensor:
        """Run the Trainer's step; its loss is computed within the defences."""
        self._n_batches += 1
        if self._per_sample:
            num_items_in_batch = None  # dividing by it would couple the examples of a batch
        self._is_in_step = True
        # TRL gathers the rewards of pairs for its logs; the number of pairs differs by process.
        if self._has_pairs and self.args.world_size > 1:
            self.accelerator.gather = _gather_rows
        try:
            return super().training_step(model, inputs, num_items_in_batch, **kwargs)
        finally:
            self._is_in_step = False
            if self.accelerator.gather is _gather_rows:
                del self.accelerator.gather

    def compute_loss_context_manager(self) -> Any:
        """Return the Trainer's context of a loss; an empty context in a training step.

        There ``compute_loss`` enters the Trainer's context for each piece of the batch.
        """
        return ExitStack() if self._is_in_step else super().compute_loss_context_manager()

    def compute_loss(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the Trainer's loss, in a training step within the defences."""
        if not self._is_in_step:
            return super().compute_loss(model, inputs, *args, **kwargs)

        def run(rows: Any) -> Any:
            forward: Any = model
            if self._has_pairs:
                rows, forward = _map_rows(_to_sides, rows), functools.partial(_run_pairs, model)
            with super(DefendedMixin, self).compute_loss_context_manager():
                return super(DefendedMixin, self).compute_loss(forward, rows, *args, **kwargs)

        return self._fedleak.training_step(
            run, _map_rows(_to_pairs, inputs) if self._has_pairs else inputs
        )

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log without ``grad_norm``, which is the norm of the gradient before the defences."""
        super().log({k: v for k, v in logs.items() if k != "grad_norm"}, *args, **kwargs)

    def _begin(self) -> None:
        """Start the defences once optimizers exist; skip the past batches of a resumed epoch."""
        if self._per_sample:  # checked again: the Trainer has made its scheduler since
            refuse(self._fedleak.owner, _TrainerHost(self).refusals())
        self._fedleak.train_starts()
        sampler: Any = getattr(self.callback_handler.train_dataloader, "batch_sampler", None)
        if hasattr(sampler, "passed_over") and not self.args.ignore_data_skip:
            sampler.passed_over = self.state.global_step % len(sampler)


def _gather_rows(values: Tensor) -> Tensor:
    """Return the rows of all processes, of which each may have a different number."""
    tensors: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(tensors, values.detach().cpu())
    return torch.cat([rows if rows.dim() else rows[None] for rows in tensors]).to(values.device)


def _mean_over_texts(outputs: Any, labels: Tensor, num_items_in_batch: object = None) -> Tensor:
    """Return the mean over texts of each text's mean loss per token, as a ``compute_loss_func``.

    ``num_items_in_batch``, the number of tokens, is ignored: it would couple the texts of a batch.
    """
    return mean_of_sample_means(outputs.logits, labels, causal=True)


def _to_pairs(rows: Tensor) -> Tensor:
    """Return the rows (2 B, ...) of B pairs, all chosen texts first, as pairs (B, 2, ...)."""
    return rows.reshape(2, len(rows) // 2, *rows.shape[1:]).transpose(0, 1)


def _to_sides(pairs: Tensor) -> Tensor:
    """Return B pairs (B, 2, ...) as rows (2 B, ...), all chosen texts first."""
    return pairs.transpose(0, 1).flatten(0, 1)


def _run_pairs(model: nn.Module, **batch: Any) -> Any:
    """Run a model on pairs, and return its output with all chosen texts first, like the batch.

    The model gets the two rows of each pair next to each other, as DPSGD expects them.
    """
    rows = len(batch["input_ids"])
    output = model(**_map_rows(lambda sides: _to_pairs(sides).flatten(0, 1), batch))
    values = _map_rows(lambda r: _to_sides(r.reshape(rows // 2, 2, *r.shape[1:])), output, rows)
    for name, value in values.items():
        output[name] = value
    return output


def _map_rows(change: Callable[[Tensor], Tensor], batch: Any, rows: int | None = None) -> Any:
    """Return a batch, or a model's outputs, with a function applied to each tensor of rows.

    Tensors of one dimension, or of another length than the rows of ``input_ids`` (or than ``rows``
    if that is not None), and all other values stay as they are.
    """
    rows = len(batch["input_ids"]) if rows is None else rows
    return {
        name: change(v) if isinstance(v, Tensor) and v.dim() > 1 and len(v) == rows else v
        for name, v in batch.items()
    }


def _overriding_classes(classes: Sequence[type], *methods: str) -> list[str]:
    """Return the names of the classes outside of trusted packages that define such a method."""
    untrusted = [cls for cls in classes if not cls.__module__.startswith(_TRUSTED_PACKAGES)]
    return [cls.__name__ for cls in untrusted if any(name in vars(cls) for name in methods)]


class _DefenseEvents(transformers.TrainerCallback):
    """Receives the events that the Trainer reports only to callbacks."""

    def __init__(self, trainer: DefendedMixin) -> None:
        self._trainer = trainer

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Call the defences before the first step."""
        self._trainer._begin()

    def on_save(self, *_: Any, **__: Any) -> None:
        """Write the states of the defences into the checkpoint."""
        args, step = self._trainer.args, self._trainer.state.global_step
        folder = Path(str(args.output_dir)) / f"checkpoint-{step}"
        save_defenses(self._trainer._fedleak, folder, args.process_index)


@functools.cache
def defended(kind: type[transformers.Trainer]) -> Any:
    """Return a subclass of a Trainer in which defences act: :class:`DefendedMixin` before ``kind``.

    Examples:
        >>> import torch
        >>> from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
        >>> from lightning_fedleak import DPSGD
        >>> from lightning_fedleak.trainers import defended
        >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=8, n_head=1))
        >>> rows = [{"input_ids": ids, "labels": ids} for ids in torch.arange(64).view(8, 8)]
        >>> arguments = TrainingArguments("out", num_train_epochs=2, report_to=[], use_cpu=True)
        >>> dp = DPSGD(max_grad_norm=1.0, target_epsilon=8, target_delta=1e-2)
        >>> trainer = defended(Trainer)(model, arguments, train_dataset=rows, defenses=[dp])
        >>> _ = trainer.train()
        >>> dp.releases == trainer.state.global_step, dp.privacy.epsilon <= 8
        (True, True)

    Args:
        kind: The class: transformers' Trainer, or a subclass such as TRL's SFTTrainer.
    """
    if issubclass(kind, DefendedMixin):
        return kind
    name = f"Defended{kind.__name__}"
    # `datasets` pickles the functions that it maps over rows. They refer to the Trainer's class by
    # its name in this module.
    defended_class = type(name, (DefendedMixin, kind), {"__module__": __name__})
    globals().setdefault(name, defended_class)
    return defended_class


def _split(loader: data.DataLoader[Any], processes: int, rank: int) -> data.DataLoader[Any]:
    """Return a loader with the same settings for this process's share of the examples."""
    names = ("collate_fn", *LOADER_SETTINGS)
    settings: dict[str, Any] = {name: getattr(loader, name) for name in names}
    sampler: data.Sampler[int] = data.DistributedSampler(loader.dataset, processes, rank)
    return data.DataLoader(loader.dataset, loader.batch_size, sampler=sampler, **settings)
