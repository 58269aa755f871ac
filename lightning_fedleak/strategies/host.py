"""Lightning's Trainer as a host of defences."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_fedleak.defenses.host import Host, Piece

if TYPE_CHECKING:
    import lightning.pytorch as L

_COUNTERS = (None, "step", "epoch")
"""Values of a callback's ``monitor`` that do not depend on data."""
_CHOOSE = "leakage/choose"
"""The only metric of leakage that holds a validation loss."""


class LightningHost(Host):
    """A Lightning Trainer with a defended strategy; see :class:`Host`.

    Args:
        trainer: the Trainer of the fit.
    """

    name = "the Trainer"
    mend = (
        "Return the optimizer from `configure_optimizers` and step it through `self.optimizers()` "
        "(does an overridden `optimizer_step` leave it out?)."
    )
    steps_by = "max_epochs or max_steps"

    def __init__(self, trainer: L.Trainer) -> None:
        self._trainer: Any = trainer

    optimizers = property(attrgetter("_trainer.optimizers"))
    rank_and_world_size = property(attrgetter("_trainer.global_rank", "_trainer.world_size"))
    step = property(attrgetter("_trainer.global_step"), doc="Index of the next optimizer step.")
    loader = property(attrgetter("_trainer.train_dataloader"))
    batch_number = property(
        attrgetter("_trainer.fit_loop.epoch_loop.batch_progress.total.ready"),
        doc="Number of the batch in all fits.",
    )
    model = property(attrgetter("_trainer.strategy.model"))

    @property
    def finds_learning_rate(self) -> bool:  # type: ignore[override]
        """Return whether Lightning's learning rate finder is running."""
        return any(type(c).__name__ == "_LRCallback" for c in self._trainer.callbacks)

    def refusals(self) -> Mapping[str, object]:
        """Return the Trainer's settings that break the guarantee or have no effect."""
        trainer = self._trainer
        accumulated, repeated = trainer.accumulate_grad_batches, trainer.overfit_batches
        selections = list(self._selections())
        return {
            ": manual optimization hides the loss. Return the loss from training_step with "
            "automatic_optimization=True.": (not trainer.lightning_module.automatic_optimization),
            " clips each sample's gradient by max_grad_norm. Leave gradient_clip_val out.": (
                trainer.gradient_clip_val
            ),
            f": accumulate_grad_batches={accumulated} joins several batches into one release. Use "
            f"accumulate_grad_batches=1 and a batch_size {accumulated} times as big: "
            "DPSGD(max_physical_batch_size=...) runs it in pieces that fit into memory.": (
                accumulated != 1
            ),
            f" draws each batch from all of the data, so that overfit_batches={repeated} would not "
            "repeat the same. Give the loader a few rows alone (a Subset of torch).": repeated,
            f": {', '.join(selections)} decides by a metric, which epsilon does not cover on "
            "private data. Measure it on public data and pass "
            "DefendedStrategy(outside_epsilon=True), or leave it out.": (
                selections and not trainer.strategy.outside_epsilon
            ),
        }

    def _selections(self) -> Iterator[str]:
        """Yield each callback and scheduler that decides by a metric of data, as text."""
        for callback in self._trainer.callbacks:
            class_names = {cls.__name__ for cls in type(callback).__mro__}
            metric = getattr(callback, "monitor", None)
            # A metric of leakage is allowed as a gate is: the monitor refuses those on weights.
            is_leakage = str(metric).startswith("leakage/") and metric != _CHOOSE
            is_allowed = metric in _COUNTERS or is_leakage
            if class_names & {"EarlyStopping", "ModelCheckpoint"} and not is_allowed:
                yield f"{type(callback).__name__}(monitor={metric!r})"
        for config in self._trainer.lr_scheduler_configs:
            if config.reduce_on_plateau:
                yield f"the scheduler {type(config.scheduler).__name__}"

    def count_steps(self, per_epoch: int) -> int | None:
        """Return the smaller of the step counts that ``max_epochs`` and ``max_steps`` allow."""
        trainer, limit = self._trainer, self._trainer.limit_train_batches
        per_epoch = min(per_epoch, limit) if isinstance(limit, int) else int(per_epoch * limit)
        epochs, steps = trainer.max_epochs, trainer.max_steps
        counts = [] if epochs is None or epochs < 0 else [epochs * per_epoch]
        return min([*counts, *([steps] if steps >= 0 else [])], default=None)

    def stop(self) -> None:
        """End the fit after this step."""
        self._trainer.should_stop = True

    def to_device(self, batch: Any) -> Any:
        """Return a batch as the Trainer moves and converts it."""
        trainer = self._trainer
        batch = trainer.precision_plugin.convert_input(batch)
        batch = trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=0)
        return trainer.strategy.batch_to_device(batch, dataloader_idx=0)

    def backward(self, loss: Tensor) -> None:
        """Run backward in the Trainer's precision, without its hooks, which are for a batch."""
        trainer = self._trainer
        trainer.precision_plugin.backward(loss, trainer.lightning_module, trainer.optimizers[0])

    @contextmanager
    def without_logs(self) -> Iterator[None]:
        """Restore, at the end, what training steps have logged; metrics of a module's own stay."""
        results = self._trainer._results
        if results is None:
            yield
            return
        entries = dict(results)
        values = [(vars(m), {k: _cloned(v) for k, v in vars(m).items()}) for m in results.values()]
        batch, size = results.batch, results.batch_size
        try:
            yield
        finally:
            results.clear()
            results.update(entries)
            results.batch, results.batch_size = batch, size
            for current, earlier in values:
                current.update(earlier)

    def merged_logs(
        self, pieces: Sequence[Piece]
    ) -> AbstractContextManager[Callable[[Piece], AbstractContextManager[None]]]:
        """Return a context that merges the logged values of the pieces into those of the batch."""
        results = self._trainer._results
        return super().merged_logs(pieces) if results is None else _merged(results, pieces)


def _cloned(value: object) -> object:
    return value.clone() if isinstance(value, Tensor) else value


@contextmanager
def _merged(
    results: Any, pieces: Sequence[Piece]
) -> Iterator[Callable[[Piece], AbstractContextManager[None]]]:
    """Merge the logged values of the pieces into values of the logical batch.

    It yields a context manager to run each piece in. Lightning keeps the last value of a step, and
    weights the values of an epoch by the batch size. While a piece runs, it is Lightning's batch.
    At the end the value of a step is the reduction of all pieces by its ``reduce_fx``. For a
    torchmetrics metric it is the value of the last piece.
    """
    sums: dict[str, tuple[Tensor, int]] = {}
    has_rows = any(piece.rows for piece in pieces)
    earlier_keys, batch = set(results), results.batch

    def step_metrics() -> dict[str, Any]:
        return {k: m for k, m in results.items() if m.is_tensor and m.meta.on_step}

    earlier = {key: metric._forward_cache for key, metric in step_metrics().items()}

    @contextmanager
    def logging(piece: Piece) -> Iterator[None]:
        for metric in step_metrics().values():
            metric._forward_cache = None
        results.batch, results.batch_size = piece.batch, None
        yield
        for key, metric in step_metrics().items():
            if metric._forward_cache is not None and (piece.rows or not has_rows):
                value, rows = metric._forward_cache.detach(), piece.rows or 1
                sums[key] = _reduced(metric.meta, sums.get(key), value, rows)

    try:
        yield logging
    finally:
        results.batch, results.batch_size = batch, None
        for key, metric in step_metrics().items():
            if key in sums:
                value, rows = sums[key]
                metric._forward_cache = value / rows if metric.meta.is_mean_reduction else value
                if not metric.meta.on_epoch:
                    metric.value = metric._forward_cache
            elif key in earlier_keys:
                metric._forward_cache = earlier.get(key)


def _reduced(
    meta: Any, earlier: tuple[Tensor, int] | None, value: Tensor, rows: int
) -> tuple[Tensor, int]:
    """Return the reduction of a value with those of earlier pieces, and the rows of all pieces.

    A mean is returned as a sum over the rows.
    """
    if earlier is None:
        return value * rows if meta.is_mean_reduction else value.clone(), rows
    total, earlier_rows = earlier
    if meta.is_mean_reduction:
        total.add_(value, alpha=rows)
    elif meta.is_sum_reduction:
        total.add_(value)
    elif meta.is_max_reduction:
        torch.maximum(total, value, out=total)
    elif meta.is_min_reduction:
        torch.minimum(total, value, out=total)
    else:
        total.copy_(value)
    return total, earlier_rows + rows
