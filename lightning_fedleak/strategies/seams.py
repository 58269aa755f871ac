"""Mix-ins ("seams") that insert the defences into the Lightning strategy that a user wraps.

``DefendedStrategy`` becomes an instance of a class with three bases: a seam from this file, the
class of the wrapped strategy, and ``DefendedStrategy``. The seam overrides methods of the wrapped
strategy (setup, training step, optimizer step, checkpoints) to call the ``UpdateRelease``, which
runs the defences before an optimizer uses the gradients, with a :class:`_LightningHost` for access
to the Trainer.
"""

from __future__ import annotations

import functools
from abc import ABC
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from lightning_fedleak.defenses import DefenseError, refuse
from lightning_fedleak.defenses.host import Host, Piece
from lightning_fedleak.defenses.processes import reshard
from lightning_fedleak.defenses.release import UpdateRelease
from lightning_fedleak.lightning_packages import both, mixed, twin
from lightning_fedleak.model.taps import check_optimizer

if TYPE_CHECKING:
    import lightning.pytorch as L
    from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, Strategy
else:  # at run time `combined` adds the class of one of the two packages as a second base
    DDPStrategy = ModelParallelStrategy = Strategy = ABC  # same memory layout as the real classes


_COUNTERS = (None, "step", "epoch")
"""Values of a callback's ``monitor`` that do not depend on data."""
# Callbacks that replace the weights by an average of earlier ones when training ends, by name.
_AVERAGING = {"StochasticWeightAveraging", "WeightAveraging"}
# The only ``leakage/`` metric that contains a validation loss, which epsilon does not cover.
_CHOOSE_METRIC = "leakage/choose"
# Hooks of modules and callbacks that may read a gradient before its release.
_GRADIENT_HOOKS = (
    *("on_before_backward", "backward", "on_after_backward", "on_before_optimizer_step"),
    *("configure_gradient_clipping", "optimizer_step"),
)
_PACKAGES = ("lightning.pytorch.", "pytorch_lightning.")  # Lightning's own hooks read no gradient


class _LightningHost(Host):
    """A Lightning Trainer with a defended strategy; see :class:`Host`.

    Args:
        trainer: The Trainer of the fit.
    """

    name = "the Trainer"  # this and the next two are for messages, see `Host`
    mend = (
        "Return the optimizer from `configure_optimizers` and step it through `self.optimizers()` "
        "(does an overridden `optimizer_step` skip it?)."
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

    @property
    def reads_gradients(self) -> bool:  # type: ignore[override]
        """Return whether a monitor, the module or a callback may read ``p.grad``."""
        trainer = self._trainer
        owners = trainer.lightning_module, *trainer.callbacks
        hooks = [getattr(o, name) for o in owners for name in _GRADIENT_HOOKS if hasattr(o, name)]
        users = [h for h in hooks if not str(getattr(h, "__module__", "")).startswith(_PACKAGES)]
        return bool(users) or trainer.strategy._fedleak.is_watched

    def refusals(self) -> Mapping[str, object]:
        """Return the Trainer's settings that break the guarantee or have no effect."""
        trainer, overfit = self._trainer, self._trainer.overfit_batches
        schedulers = both("callbacks.GradientAccumulationScheduler")
        schedules = [c.scheduling for c in trainer.callbacks if isinstance(c, schedulers)]
        n_joined = max([trainer.accumulate_grad_batches, *(max(s.values()) for s in schedules)])
        joins = "GradientAccumulationScheduler" if schedules else "accumulate_grad_batches"
        selections = list(self._selections())
        return {
            ": manual optimization hides the loss. Return the loss from training_step with "
            "automatic_optimization=True.": (not trainer.lightning_module.automatic_optimization),
            " clips each sample's gradient by max_grad_norm. Leave gradient_clip_val out.": (
                trainer.gradient_clip_val
            ),
            f": {joins} joins {n_joined} batches into one release. Use accumulate_grad_batches=1 "
            f"and a batch_size {n_joined} times as big: DPSGD(max_physical_batch_size=...) runs it "
            "in pieces that fit into memory.": (n_joined != 1),
            ": BatchSizeFinder repeats steps until memory runs out, which depends on the sampled "
            "examples. Pass max_physical_batch_size to DPSGD, small enough to fit.": any(
                isinstance(c, both("callbacks.BatchSizeFinder")) for c in trainer.callbacks
            ),
            f" draws each batch from all of the data, so that overfit_batches={overfit} would not "
            "repeat the same batches. Give the loader only a few rows (torch's Subset).": overfit,
            f": {', '.join(selections)} decides by a metric, which epsilon does not cover on "
            "private data. Measure it on public data and pass "
            "DefendedStrategy(outside_epsilon=True), or remove it.": (
                selections and not trainer.strategy.outside_epsilon
            ),
        }

    def _selections(self) -> Iterator[str]:
        """Yield each callback and scheduler that decides by a metric of data, as text."""
        for callback in self._trainer.callbacks:
            class_names = {cls.__name__ for cls in type(callback).__mro__}
            if class_names & {"LearningRateFinder", "_LRCallback"}:
                yield "the learning rate finder"
            metric = getattr(callback, "monitor", None)
            # Leakage metrics are allowed like gates; the monitor refuses those of trained weights.
            is_leakage = str(metric).startswith("leakage/") and metric != _CHOOSE_METRIC
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
        """Run backward in the Trainer's precision, without Lightning's hooks for each batch."""
        trainer = self._trainer
        trainer.precision_plugin.backward(loss, trainer.lightning_module, trainer.optimizers[0])

    @contextmanager
    def without_logs(self) -> Iterator[None]:
        """Restore the logged values at the end of the block, except torchmetrics of the module."""
        results = self._trainer._results
        if results is None:
            yield
            return
        entries = dict(results)
        values = [
            (vars(m), tree_map_only(Tensor, torch.clone, {**vars(m)})) for m in results.values()
        ]
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


@contextmanager
def _merged(
    results: Any, pieces: Sequence[Piece]
) -> Iterator[Callable[[Piece], AbstractContextManager[None]]]:
    """Merge the logged values of the pieces into values of the logical batch.

    A piece is a part of the logical batch that fits into memory. The function yields a function
    that returns, for a piece, the context in which it runs. There Lightning treats the piece as its
    batch, so that values of an epoch are weighted by the size of the piece. For values of a step,
    Lightning would keep that of the last piece. Here they are reduced over all pieces by the
    metric's ``reduce_fx``, except those of a torchmetrics metric.
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
    """Return a value reduced with those of earlier pieces, and the number of rows of all of them.

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


CHECKPOINT_KEY = "lightning_fedleak_defenses"
"""The key in a checkpoint of the defences' states, a mapping by defence name."""
_FITTING = "fit"  # the value of Lightning's `trainer.state.fn` in `trainer.fit`

# Settings of DistributedDataParallel that do not change the result of its reducer.
_REDUCER_SETTINGS = {
    "batched_grad_copy",
    "broadcast_buffers",
    "bucket_cap_mb",
    "bucket_cap_mb_list",
    "check_reduction",
    "find_unused_parameters",
    "forward_sync_buffers",
    "gradient_as_bucket_view",
    "skip_all_reduce_unused_params",
    "static_graph",
}
# Settings of Lightning's DDPStrategy that replace the reducer.
_OWN_SETTINGS = ("ddp_comm_hook", "ddp_comm_state", "ddp_comm_wrapper", "model_averaging_period")


@functools.cache
def combined(name: str, *bases: type) -> type:
    """Return a new class with the given bases, whose instances can be pickled (for DDP's spawn).

    Args:
        name: The name of the class.
        bases: The bases, in the method resolution order.
    """
    return type(name, bases, {"__module__": __name__, "__reduce_ex__": _reduce})


def _reduce(strategy: Any, _protocol: Any) -> tuple[Any, ...]:
    """Be ``__reduce_ex__``: return how to pickle an instance of a combined class."""
    cls = type(strategy)
    return _rebuild, (cls.__name__, *cls.__bases__), strategy.__getstate__()


def _rebuild(name: str, *bases: type) -> Any:
    """Return an empty instance of a combined class, when one is unpickled."""
    cls: Any = combined(name, *bases)
    return cls.__new__(cls)


class _Seam(Strategy):
    """Calls the defences in any supported strategy; see the module's docstring.

    It is the first base, so that its methods run before those of the wrapped strategy.
    """

    _fedleak: UpdateRelease  # it runs the defences, and is set by `DefendedStrategy`

    def _check_combination(self) -> None:
        """Raise an error for defences that cannot hold their guarantee with this strategy."""

    def _configure_launcher(self) -> None:
        """Check that the accelerator is of the same package as this strategy."""
        problem = mixed(f"DefendedStrategy({inner_of(self).__name__})", self, self.accelerator)
        if problem is not None:
            raise DefenseError(problem)
        super()._configure_launcher()

    def setup(self, trainer: L.Trainer) -> None:
        """Let the defences prepare the model, before it is wrapped and its optimizers exist."""
        fitting = trainer.state.fn == _FITTING
        if fitting or any(defense.acts_in_inference for defense in self._fedleak.defenses):
            assert self.lightning_module is not None
            if fitting:
                self._check_model(self.lightning_module)
            self._open(trainer)
            self._fedleak.begin(fitting=fitting)
        super().setup(trainer)
        if fitting:
            for optimizer in self.optimizers:
                self._guard(optimizer)

    def _open(self, trainer: L.Trainer) -> None:
        """Open the release once in a fit: at setup, or earlier if the module's loader is used."""
        if self._fedleak.is_open:
            return
        assert self.lightning_module is not None
        root, precision = self.lightning_module, str(self.precision_plugin.precision)
        host, share = _LightningHost(trainer), self._data_share()
        self._fedleak.open(host, root, self.root_device, precision, share)

    def _data_share(self) -> int | None:
        """Return the index of this process's share of the data; None if that is its rank."""
        return None

    def _check_model(self, model: nn.Module) -> None:
        """Raise an error if the model or the precision breaks a guarantee."""

    def _guard(self, optimizer: Optimizer) -> None:
        """Put the release before each step of an optimizer; raise an error if it cannot be."""
        if isinstance(optimizer, both("core.optimizer.LightningOptimizer")):
            optimizer = optimizer.optimizer
        check_optimizer(optimizer, getattr(self.precision_plugin, "scaler", None))
        self._fedleak.guard(optimizer)

    def on_train_start(self) -> None:
        """Call the defences when the optimizers exist."""
        super().on_train_start()
        self._fedleak.train_starts()

    def on_train_end(self) -> None:
        """Call the defences once more, unless a callback has put averaged weights in place."""
        super().on_train_end()
        assert self.lightning_module is not None
        callbacks = self.lightning_module.trainer.callbacks  # type: ignore[attr-defined]
        if not _AVERAGING.intersection(cls.__name__ for c in callbacks for cls in type(c).__mro__):
            self._fedleak.train_ends()

    def process_dataloader(self, dataloader: object) -> object:
        """Return the training loader as the defences change it; other loaders unchanged."""
        dataloader = super().process_dataloader(dataloader)
        module = self.lightning_module
        if module is not None and module.trainer.training:
            self._open(module.trainer)
            return self._fedleak.dataloader(dataloader)
        return dataloader

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's ``training_step`` within the defences."""
        run = functools.partial(super().training_step, **kwargs)
        return self._fedleak.training_step(run, *args)

    def optimizer_step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Guard the optimizer if it was created after setup, and step it."""
        if id(optimizer) not in self._fedleak.guarded:
            self._guard(optimizer)
        return super().optimizer_step(optimizer, *args, **kwargs)

    def save_checkpoint(
        self, checkpoint: dict[str, object], filepath: Any, storage_options: Any = None
    ) -> None:
        """Save a checkpoint that also holds the states of the defences."""
        if self._fedleak.defenses:
            checkpoint[CHECKPOINT_KEY] = self._fedleak.state_dict()
        super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load a checkpoint, and restore the defences' states when a fit resumes."""
        with self._fedleak.paused():
            checkpoint = super().load_checkpoint(checkpoint_path, *args, **kwargs)
        module = self.lightning_module
        if module is not None and module.trainer.state.fn == _FITTING:
            self._fedleak.load_state_dict(checkpoint.get(CHECKPOINT_KEY, {}))
        return checkpoint

    def fit_results(self) -> Mapping[str, object]:
        """Return the states of the defences, for the main process of a fit in other processes."""
        return self._fedleak.state_dict()

    def load_fit_results(self, states: Any) -> None:
        """Load the states; without their releases the next fit would count from zero."""
        for defense in self._fedleak.defenses:
            defense.load_state_dict(states[defense.name])

    def teardown(self) -> None:
        """Undo what the defences changed."""
        self._fedleak.end()
        super().teardown()


class _DDPSeam(_Seam, DDPStrategy):
    """The seam of a DDPStrategy.

    If each rank is a client and a defence acts on gradients, the model is not wrapped in
    DistributedDataParallel, whose reducer would send undefended gradients. The release then
    reduces the defended gradients, and this class broadcasts buffers as DDP would.
    """

    _fedleak_buffers_differ = False  # whether a step may have made the ranks' buffers differ

    def _check_combination(self) -> None:
        release = self._fedleak
        release.reduces = release.client == "rank" and bool(release.gradient_defenses)
        release.separates_stages = release.client == "world" or release.reduces
        if not release.reduces:
            return
        unsupported = sorted(set(self._ddp_kwargs) - _REDUCER_SETTINGS)
        unsupported += [name for name in _OWN_SETTINGS if getattr(self, f"_{name}")]
        inner, original = inner_of(self), twin("strategies.DDPStrategy", self)
        for method in ("configure_ddp", "_setup_model"):
            if getattr(inner, method) is not getattr(original, method):
                unsupported.append(f"{inner.__name__}.{method}")
        if unsupported:
            raise DefenseError(
                f"DefendedStrategy: {', '.join(f'`{name}`' for name in unsupported)} cannot be "
                "used when each rank is a client and defences act on gradients: undefended ones "
                "could be sent. Pass a plain DDPStrategy without it, or use client='world'."
            )

    def _check_model(self, model: nn.Module) -> None:
        if not self._fedleak.reduces:
            return
        has_sync_norm = any(isinstance(module, nn.SyncBatchNorm) for module in model.modules())
        refusals = {
            "precision='16-mixed' cannot be used when each rank is a client and defences act on "
            "gradients: ranks could disagree about a skipped step. Use bf16-mixed or 32-true, or "
            "client='world'.": (getattr(self.precision_plugin, "scaler", None) is not None),
            "synchronised batch norm sends statistics of raw activations to other clients. Use "
            "Trainer(sync_batchnorm=False), or client='world'.": (
                self._layer_sync is not None or has_sync_norm
            ),
        }
        refuse("DefendedStrategy: ", refusals)

    def configure_ddp(self) -> None:
        """Wrap the model in DDP if its reducer may run; else send the initial weights of rank 0."""
        if self._fedleak.reduces:
            assert self.lightning_module is not None
            twin("overrides.distributed._sync_module_states", self)(self.lightning_module)
        else:
            super().configure_ddp()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Broadcast the buffers, as DistributedDataParallel would, and run the step."""
        self._send_buffers()
        return super().training_step(*args, **kwargs)

    def on_validation_start(self) -> None:
        """Broadcast the buffers, so that all ranks validate with the same ones."""
        self._send_buffers()
        super().on_validation_start()

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        """Step the optimizer, and note that the buffers of the ranks may differ from now on."""
        result = super().optimizer_step(*args, **kwargs)
        self._fedleak_buffers_differ = True
        return result

    def _send_buffers(self) -> None:
        """Broadcast the buffers of rank 0 after an optimizer step, if DDP would do so."""
        if not (self._fedleak.reduces and self._fedleak_buffers_differ):
            return
        self._fedleak_buffers_differ = False
        settings = self._ddp_kwargs
        default = settings.get("broadcast_buffers", True)
        assert self.lightning_module is not None
        if settings.get("forward_sync_buffers", default):
            for buffer in self.lightning_module.buffers():
                dist.broadcast(buffer.detach(), src=0)


class _ModelParallelSeam(_Seam, ModelParallelStrategy):
    """The seam of FSDP2, where all processes are one client and gradients are DTensors."""

    def _check_combination(self) -> None:
        whole = [d.name for d in self._fedleak.gradient_defenses if not d.takes_shards]
        refusals = {
            "under ModelParallelStrategy (FSDP2) gradients are reduced inside backward, so no "
            "process is a client. Pass client='world'.": self._fedleak.client != "world",
            f"{whole} do not declare that they take sharded gradients (FSDP2). Set `takes_shards "
            "= True` if `on_gradients` supports DTensors, or use DDPStrategy.": whole,
        }
        refuse("DefendedStrategy: ", refusals)

    def _check_model(self, model: nn.Module) -> None:
        mesh, release = self.device_mesh, self._fedleak
        acting = release.gradient_defenses
        if acting:  # the root is unsharded after a forward pass before this fit
            reshard(model)
        unsharded = [
            name
            for name, p in model.named_parameters()
            if p.requires_grad and not isinstance(p, DTensor)
        ]
        on_layers = [d.name for d in release.defenses if d.activation_layers or d.per_sample]
        refusals = {
            f"{on_layers} cannot act under tensor parallelism. Use ModelParallelStrategy("
            "tensor_parallel_size=1, data_parallel_size=...).": (
                on_layers and mesh["tensor_parallel"].size() > 1
            ),
            "precision='16-mixed' cannot be used with FSDP2 and defences that act on gradients. "
            "Use 'bf16-mixed', 'bf16-true' or '32-true'.": (
                acting and getattr(self.precision_plugin, "scaler", None) is not None
            ),
            f"{', '.join(unsharded[:5])} is not sharded, so nothing reduces its gradient. Call "
            "fully_shard on the whole model, or freeze these parameters.": (
                acting and unsharded and mesh["data_parallel"].size() > 1
            ),
        }
        refuse("DefendedStrategy: ", refusals)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state of an optimizer, without a release.

        If the state is missing, torch creates it by a step with a learning rate of 0.
        """
        with self._fedleak.paused():
            return super().optimizer_state(optimizer)

    def _data_share(self) -> int | None:
        """Return the index of this process in the data-parallel dimension of the mesh."""
        return int(self.device_mesh["data_parallel"].get_local_rank())


def seam_of(inner: type) -> type:
    """Return the seam class for a strategy class."""
    if issubclass(inner, both("strategies.DDPStrategy")):
        return _DDPSeam
    sharded = issubclass(inner, both("strategies.ModelParallelStrategy"))
    return _ModelParallelSeam if sharded else _Seam


def inner_of(strategy: _Seam) -> type:
    """Return the class of the strategy that a seam wraps."""
    return type(strategy).__bases__[1]
