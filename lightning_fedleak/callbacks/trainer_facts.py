"""Facts of a Lightning Trainer: who is a client, where it logs, how it trains."""

from __future__ import annotations

import os
from collections.abc import Sequence
from inspect import signature
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

from lightning_fedleak.anatomy import Kind
from lightning_fedleak.attacks import Attack
from lightning_fedleak.batches import BatchError, adapter_to_copy
from lightning_fedleak.lightning_packages import EitherStrategy, both
from lightning_fedleak.looks import Processes, optimizers_of
from lightning_fedleak.strategies import DefendedStrategy

if TYPE_CHECKING:
    import lightning.pytorch as L
    from lightning.pytorch.loggers import TensorBoardLogger

T = TypeVar("T")


def check_batch_type(module: Any, kind: Kind) -> None:
    """Refuse a ``training_step`` that is annotated with a batch of one's own form.

    A batch whose type is not told is read when the first one comes.

    Args:
        module: the LightningModule.
        kind: of the model.

    Raises:
        BatchError: shows a ``batch_adapter`` to copy.
    """
    try:
        hints = get_type_hints(module.training_step)
        batch = hints.get(next(iter(signature(module.training_step).parameters)))
    except (AttributeError, NameError, StopIteration, TypeError, ValueError):
        return  # a type that is imported for checkers only, or none
    fields = getattr(batch, "__dataclass_fields__", getattr(batch, "_fields", None))
    has_ids = "input_ids" in (fields or ()) or hasattr(batch, "input_ids")
    if isinstance(batch, type) and fields is not None and not has_ids:
        raise BatchError(
            f"training_step takes a {batch.__name__}, which has no 'input_ids', so that it is not "
            f"known what its fields mean. Say it:\n{adapter_to_copy(batch, kind)}"
        )


def resolve_client(client: str | None, strategy: EitherStrategy) -> str:
    """Return who is a client: as the user says, else as the strategy says, else each rank.

    Args:
        client: the user's choice.
        strategy: the Trainer's.

    Raises:
        ValueError: the two contradict each other, or it is unknown what the strategy shares when.
    """
    declared = strategy.client if isinstance(strategy, DefendedStrategy) else None
    if declared and client and declared != client:
        raise ValueError(
            f"LeakageMonitor(client={client!r}) contradicts the strategy's client={declared!r}: "
            "leave the monitor's out"
        )
    client = client or declared or "rank"
    if isinstance(strategy, both("strategies.SingleDeviceStrategy", "strategies.DDPStrategy")):
        return client
    if isinstance(strategy, both("strategies.ModelParallelStrategy")) and client == "world":
        return client
    raise ValueError(
        f"LeakageMonitor does not know what {type(strategy).__name__} shares when. It works with a "
        "single device, with DDP, and with ModelParallelStrategy under client='world'."
    )


def boards_of(trainer: L.Trainer) -> list[TensorBoardLogger]:
    """Return the TensorBoard loggers of a Trainer."""
    return [one for one in trainer.loggers if isinstance(one, both("loggers.TensorBoardLogger"))]


def processes_of(trainer: L.Trainer, client: str) -> Processes:
    """Return how a Trainer's fit is spread."""
    strategy = trainer.strategy
    shards = isinstance(strategy, both("strategies.ModelParallelStrategy"))
    return Processes(trainer.world_size, client, type(strategy).__name__ if shards else None)


def training_of(trainer: L.Trainer) -> dict[str, object]:
    """Return how a Trainer trains, for the record."""
    return {
        "optimizers": optimizers_of(trainer.optimizers),
        "strategy": type(trainer.strategy).__name__,
        "precision": str(trainer.precision),
        "processes": trainer.world_size,
        "max_steps": trainer.max_steps,
        "max_epochs": trainer.max_epochs,
        "accumulate_grad_batches": trainer.accumulate_grad_batches,
        "gradient_clip_val": trainer.gradient_clip_val,
        "seed": os.environ.get("PL_GLOBAL_SEED"),
    }


def settings_of(trainer: L.Trainer, attacks: Sequence[Attack]) -> dict[str, object]:
    """Return the user's settings as Lightning logs them, and a fit's attacks and defences."""
    settings: dict[str, object] = {}
    for holder in (trainer.lightning_module, trainer.datamodule):  # type: ignore[attr-defined]
        if holder is not None and holder._log_hyperparams:
            settings |= holder.hparams_initial
    settings.pop("_class_path", None)  # LightningCLI's own
    defenses = getattr(trainer.strategy, "defenses", ())
    settings |= {f"fedleak/{a.name}": repr(a.config()) for a in attacks}
    settings["fedleak/strategy"] = type(trainer.strategy).__name__
    settings["fedleak/defenses"] = ", ".join(d.name for d in defenses) or "none"
    return settings
