"""Facts of a Lightning Trainer that the engine needs: its clients, loggers and settings.

:class:`TrainerRun` implements the engine's interface :class:`~lightning_fedleak.engine.Run` for one
fit of a Trainer. A *client* of a federation is one process (``"rank"``) or all processes together
(``"world"``). It shares gradients, which defences change before: a gradient has a *stage* local
(before the defences), shared (after them) and aggregate (after the reduction over clients).
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from operator import attrgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import DataLoader, SequentialSampler

from lightning_fedleak import engine
from lightning_fedleak.attacks import Capability
from lightning_fedleak.defenses import Defense
from lightning_fedleak.lightning_packages import EitherStrategy, both
from lightning_fedleak.model.anatomy import Anatomy
from lightning_fedleak.model.taps import real_optimizer
from lightning_fedleak.strategies import DefendedStrategy

if TYPE_CHECKING:
    import lightning.pytorch as L
    from lightning.pytorch.loggers import TensorBoardLogger


class TrainerRun(engine.Run):
    """One fit of a Trainer.

    Args:
        trainer: The Trainer, whose strategy is set up.
        anatomy: The parts of the model.
        client: ``"rank"`` if each process is a client, ``"world"`` if all are one.
        assumed: The capabilities of the assumed adversary.

    Attributes:
        trainer: The Trainer of this fit.

    Raises:
        ValueError: Both the strategy and an optimizer have defences.
    """

    uncounted_step = (
        "an optimizer stepped that Lightning does not wrap, so that no step was counted and "
        "LeakageMonitor does not know when the next look is due. In training_step use "
        "self.optimizers() without use_pl_optimizer=False."
    )
    rank = property(attrgetter("trainer.global_rank"))
    processes = property(attrgetter("trainer.world_size"))
    step = property(attrgetter("trainer.global_step"), doc="Optimizer steps, as it counts them.")
    training_loader = property(attrgetter("trainer.train_dataloader"), doc="As it is prepared.")
    utility = property(attrgetter("trainer.callback_metrics"))
    epochs = property(lambda run: n if (n := run.trainer.max_epochs or -1) >= 0 else None)
    optimizers = property(lambda run: [*map(real_optimizer, run.trainer.optimizers)])

    def __init__(
        self, trainer: L.Trainer, anatomy: Anatomy, client: str, assumed: frozenset[Capability]
    ) -> None:
        super().__init__(anatomy, client, assumed)
        self.trainer, strategy, callbacks = trainer, trainer.strategy, callbacks_of(trainer)
        self.under_ddp = isinstance(strategy, both("strategies.DDPStrategy"))
        in_optimizers = engine.declared(trainer.optimizers, under_ddp=self.under_ddp)
        if isinstance(strategy, DefendedStrategy):
            self.release = strategy
            if in_optimizers:
                raise ValueError(
                    f"{in_optimizers[0].name} computes its gradient from those of single examples, "
                    "so that the DefendedStrategy's defences have no effect: use one of the two"
                )
        self.defenses = (*defenses_of(trainer), *in_optimizers)
        self.separates_stages = bool(in_optimizers or getattr(strategy, "separates_stages", False))
        # DDP averages clients' gradients before Lightning clips them.
        if not self.under_ddp or client != "rank" or self.separates_stages:
            self.clip_value = _clip_value(trainer)
        self.precision = str(trainer.precision)
        self.scaler = getattr(trainer.precision_plugin, "scaler", None)
        holders = (*callbacks, trainer.lightning_module, getattr(trainer, "datamodule", None))
        self.tokenizers = [getattr(holder, "tokenizer", None) for holder in holders]
        # The metrics that EarlyStopping and ModelCheckpoint act on.
        watched = (getattr(callback, "monitor", None) for callback in callbacks)
        self.watched = tuple(name for name in watched if isinstance(name, str))
        self.shows_progress = trainer.is_global_zero and trainer.progress_bar_callback is not None

    def publish(self, values: Mapping[str, float]) -> None:
        """Add values to the Trainer's ``callback_metrics``."""
        # Like LearningRateMonitor, because self.log would take 0.25 ms for each name.
        tensor = torch.tensor(list(values.values()), device=self.device)
        self.trainer.callback_metrics.update(zip(values, tensor.unbind(), strict=True))

    def forward_context(self) -> AbstractContextManager[Any]:
        """Return the context of the Trainer's precision."""
        return self.trainer.precision_plugin.forward_context()

    @property
    def progress(self) -> tuple[int, float] | None:  # type: ignore[override]
        """Return the epoch and the processed share of its batches; None if not known."""
        batches = self.trainer.num_training_batches
        if math.isinf(batches):
            return None
        n_done = self.trainer.fit_loop.epoch_loop.batch_idx + 1
        return self.trainer.current_epoch, n_done / max(1, batches)

    @property
    def planned_steps(self) -> int | None:  # type: ignore[override]
        """Return the number of steps of the fit; None if it is unlimited or cannot be predicted.

        The latter holds for manual optimization, several optimizers and an accumulation schedule.
        """
        trainer = self.trainer
        schedulers = both("callbacks.GradientAccumulationScheduler")
        is_automatic = trainer.lightning_module.automatic_optimization
        if len(trainer.optimizers) != 1 or not is_automatic:
            return None
        if any(isinstance(callback, schedulers) for callback in callbacks_of(trainer)):
            return None
        steps = trainer.estimated_stepping_batches
        return int(steps) if 0 < steps < math.inf else None

    def fit_copy(self, model: nn.Module, rows: Any) -> None:
        """Train a copy of the module by a second Trainer; see :class:`Run`.

        The second Trainer has the same epochs, precision, accumulation and clipping, and no
        callbacks or loggers.

        Args:
            model: The copy, which is trained in place.
            rows: The data set to train on.

        Raises:
            ValueError: The Trainer has neither ``max_epochs`` nor ``max_steps``, or its loader has
                no fixed batch size.
        """
        trainer = self.trainer
        loader: Any = trainer.train_dataloader
        if max(trainer.max_epochs or 0, trainer.max_steps) <= 0 or loader.batch_size is None:
            raise ValueError(
                "Memorization(reference='auto') needs Trainer(max_epochs=) or max_steps=, and a "
                "DataLoader with batch_size=: give them, or a reference"
            )
        share = len(rows) / len(loader.dataset)
        row_loader = DataLoader(
            rows,
            loader.batch_size,
            shuffle=not isinstance(loader.sampler, SequentialSampler),
            collate_fn=loader.collate_fn,
            drop_last=loader.drop_last,
        )
        model.configure_callbacks = list  # type: ignore[assignment]  # returns []
        with TemporaryDirectory() as folder:
            second = type(trainer)(
                accelerator=self.device.type,
                devices=[self.device.index or 0] if self.device.type == "cuda" else 1,
                precision=trainer.precision,
                max_epochs=trainer.max_epochs,
                max_steps=math.ceil(trainer.max_steps * share) if trainer.max_steps > 0 else -1,
                limit_train_batches=trainer.limit_train_batches,
                limit_val_batches=0,
                accumulate_grad_batches=trainer.accumulate_grad_batches,
                gradient_clip_val=trainer.gradient_clip_val,
                gradient_clip_algorithm=trainer.gradient_clip_algorithm,
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                default_root_dir=folder,
            )
            second.fit(model, row_loader)  # type: ignore[arg-type]


def callbacks_of(trainer: L.Trainer) -> list[L.Callback]:
    """Return the callbacks of a Trainer, which Lightning does not declare."""
    return list(trainer.callbacks)  # type: ignore[attr-defined]


def defenses_of(trainer: L.Trainer) -> tuple[Defense, ...]:
    """Return the defences of a Trainer's strategy, in their order."""
    strategy = trainer.strategy
    return tuple(strategy.defenses) if isinstance(strategy, DefendedStrategy) else ()


def _clip_value(trainer: L.Trainer) -> float | None:
    """Return the limit to which a Trainer clips gradient entries; None if there is none known."""
    value = float(trainer.gradient_clip_val or math.inf)
    defaults = [cls.configure_gradient_clipping for cls in both("core.LightningModule")]
    by_value = trainer.gradient_clip_algorithm == "value" and value < math.inf
    is_overridden = type(trainer.lightning_module).configure_gradient_clipping not in defaults
    return value if by_value and not is_overridden else None


def resolve_client(client: str | None, strategy: EitherStrategy) -> str:
    """Return ``"rank"`` if each process is a client, and ``"world"`` if all of them are one.

    The user or a DefendedStrategy decides. By default it is ``"world"`` under FSDP2, and ``"rank"``
    otherwise.

    Args:
        client: The user's choice; None without one.
        strategy: The Trainer's strategy.

    Raises:
        ValueError: The choice contradicts the strategy, or it is not known what the strategy
            shares.
    """
    default = strategy.client if isinstance(strategy, DefendedStrategy) else None
    if default and client and default != client:
        raise ValueError(
            f"LeakageMonitor(client={client!r}) contradicts the strategy's client={default!r}: "
            "do not set the monitor's"
        )
    sharded = isinstance(strategy, both("strategies.ModelParallelStrategy"))
    client = client or default or ("world" if sharded else "rank")
    plain = both("strategies.SingleDeviceStrategy", "strategies.DDPStrategy")
    if isinstance(strategy, plain) or (sharded and client == "world"):
        return client
    raise ValueError(
        f"LeakageMonitor does not know what {type(strategy).__name__} shares. It works with a "
        "single device, DDP, and ModelParallelStrategy under client='world'."
    )


def boards_of(trainer: L.Trainer) -> list[TensorBoardLogger]:
    """Return the TensorBoard loggers of a Trainer."""
    tensorboard = both("loggers.TensorBoardLogger")
    return [logger for logger in trainer.loggers if isinstance(logger, tensorboard)]


def folder_of(trainer: L.Trainer) -> Path:
    """Return the logger's folder of this run, or the Trainer's folder if there is no logger.

    W&B and MLflow have one folder for all runs of a project. For them the run's folder is the one
    in it that has the run's id.
    """
    folder, logger = Path(trainer.log_dir or trainer.default_root_dir), trainer.logger
    if logger is None or logger.log_dir is not None or logger.version is None:
        return folder
    return folder / str(logger.name) / str(logger.version)


def settings_of(trainer: L.Trainer) -> dict[str, object]:
    """Return the settings of a Trainer's module and data, as Lightning logs them."""
    settings: dict[str, object] = {}
    for holder in (trainer.lightning_module, trainer.datamodule):  # type: ignore[attr-defined]
        if holder is not None and holder._log_hyperparams:
            settings |= holder.hparams_initial
    settings.pop("_class_path", None)  # added by LightningCLI
    return settings


def training_of(trainer: L.Trainer) -> dict[str, object]:
    """Return a Trainer's settings that determine the training, for the run's record."""
    return {
        "optimizers": engine.optimizers_of(trainer.optimizers),
        "strategy": type(trainer.strategy).__name__,
        "precision": str(trainer.precision),
        "processes": trainer.world_size,
        "max_steps": trainer.max_steps,
        "max_epochs": trainer.max_epochs,
        "accumulate_grad_batches": trainer.accumulate_grad_batches,
        "gradient_clip_val": trainer.gradient_clip_val,
        "seed": os.environ.get("PL_GLOBAL_SEED"),
    }
