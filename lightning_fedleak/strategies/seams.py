"""The methods that a defended strategy overrides in the strategy that it wraps."""

from __future__ import annotations

import functools
import io
from abc import ABC
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_fedleak.defenses import DefenseError, refuse
from lightning_fedleak.defenses.release import UpdateRelease
from lightning_fedleak.lightning_packages import both, mixed, twin
from lightning_fedleak.model.taps import check_optimizer
from lightning_fedleak.strategies.host import LightningHost

if TYPE_CHECKING:
    import lightning.pytorch as L
    from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, Strategy
    from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
else:  # at run time `combined` adds the class of one of the two packages as a second base
    DDPStrategy = ModelParallelStrategy = Strategy = ABC  # its memory layout is that of strategies
    _MultiProcessingLauncher = object

CHECKPOINT_KEY = "lightning_fedleak_defenses"
"""Key in a checkpoint of the states of the defences, by defence name."""
_FITTING = "fit"

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


@functools.cache
def combined(name: str, *bases: type) -> type:
    """Return a class of several bases, whose instances can be pickled (for DDP's spawn).

    Args:
        name: the name of the class.
        bases: the bases, in the method resolution order.
    """
    return type(name, bases, {"__module__": __name__, "__reduce_ex__": _reduce})


def _reduce(strategy: Any, _protocol: Any) -> tuple[Any, ...]:
    cls = type(strategy)
    return _rebuild, (cls.__name__, *cls.__bases__), strategy.__getstate__()


def _rebuild(name: str, *bases: type) -> Any:
    cls: Any = combined(name, *bases)
    return cls.__new__(cls)


class _StateReturningLauncher(_MultiProcessingLauncher):
    """Extends Lightning's launcher for ``ddp_spawn``, ``ddp_fork`` and ``ddp_notebook``.

    Lightning's launcher returns the trained weights to the main process, but not the releases that
    the defences counted: the count would begin again at zero in the next fit.
    """

    def get_extra_results(self, trainer: L.Trainer) -> dict[str, object]:
        """Return also the states of the defences, in the first process after a fit."""
        extra = super().get_extra_results(trainer)
        if trainer.state.fn == _FITTING:
            buffer = io.BytesIO()
            torch.save(trainer.strategy._fedleak.state_dict(), buffer)  # type: ignore[attr-defined]
            extra[CHECKPOINT_KEY] = buffer.getvalue()
        return extra

    def update_main_process_results(self, trainer: L.Trainer, extra: dict[str, Any]) -> None:
        """Load the states of the defences in the main process."""
        super().update_main_process_results(trainer, extra)
        if CHECKPOINT_KEY in extra:
            states = torch.load(io.BytesIO(extra[CHECKPOINT_KEY]), weights_only=True)
            for defense in trainer.strategy._fedleak.defenses:  # type: ignore[attr-defined]
                defense.load_state_dict(states[defense.name])


class Seam(Strategy):
    """The base of a defended strategy before the wrapped one in the method resolution order."""

    _fedleak: UpdateRelease

    def _check_combination(self) -> None:
        """Raise an error for defences that cannot hold their guarantee with this strategy."""

    def _configure_launcher(self) -> None:
        """Check that the accelerator is of the same package as this strategy."""
        problem = mixed(f"DefendedStrategy({inner_of(self).__name__})", self, self.accelerator)
        if problem is not None:
            raise DefenseError(problem)
        super()._configure_launcher()

    def setup(self, trainer: L.Trainer) -> None:
        """Let the defences prepare the model before it is wrapped and optimizers exist."""
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
        """Open the release once in a fit: at setup, or earlier if a module uses its loader."""
        if self._fedleak.is_open:
            return
        assert self.lightning_module is not None
        root, precision = self.lightning_module, str(self.precision_plugin.precision)
        host, share = LightningHost(trainer), self._data_share()
        self._fedleak.open(host, root, self.root_device, precision, share)

    def _data_share(self) -> int | None:
        """Return the index of this process's share of the data; None if that is its rank."""
        return None

    def _check_model(self, model: nn.Module) -> None:
        """Raise an error that depends on the model and the precision."""

    def _guard(self, optimizer: Optimizer) -> None:
        if isinstance(optimizer, both("core.optimizer.LightningOptimizer")):
            optimizer = optimizer.optimizer
        check_optimizer(optimizer, getattr(self.precision_plugin, "scaler", None))
        self._fedleak.guard(optimizer)

    def on_train_start(self) -> None:
        """Call the defences when the optimizers exist."""
        super().on_train_start()
        self._fedleak.train_starts()

    def process_dataloader(self, dataloader: object) -> object:
        """Return the loader that the defences make from the training loader; others unchanged."""
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
        """Guard an optimizer that was set after setup, and step it."""
        if id(optimizer) not in self._fedleak.guarded:
            self._guard(optimizer)
        return super().optimizer_step(optimizer, *args, **kwargs)

    def save_checkpoint(
        self, checkpoint: dict[str, object], filepath: Any, storage_options: Any = None
    ) -> None:
        """Add the defences' states."""
        if self._fedleak.defenses:
            checkpoint[CHECKPOINT_KEY] = self._fedleak.state_dict()
        super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Restore the defences' states when a fit resumes."""
        with self._fedleak.paused():
            checkpoint = super().load_checkpoint(checkpoint_path, *args, **kwargs)
        module = self.lightning_module
        if module is not None and module.trainer.state.fn == _FITTING:
            self._fedleak.load_state_dict(checkpoint.get(CHECKPOINT_KEY, {}))
        return checkpoint

    def teardown(self) -> None:
        """Undo what the defences changed."""
        self._fedleak.end()
        super().teardown()


class DDPSeam(Seam, DDPStrategy):
    """The seam of a DDPStrategy, whose stages depend on who is a client."""

    _fedleak_buffers_differ = False

    def _check_combination(self) -> None:
        release = self._fedleak
        release.reduces = release.client == "rank" and bool(release.gradient_defenses)
        release.separates_stages = release.client == "world" or release.reduces
        if not release.reduces:
            return
        if self._ddp_comm_hook or self._ddp_comm_wrapper or self._ddp_comm_state:
            _refuse("`ddp_comm_hook`, `ddp_comm_state` and `ddp_comm_wrapper`", "leave them out")
        if self._model_averaging_period is not None:
            _refuse("`model_averaging_period`", "leave it out")
        unsupported = sorted(set(self._ddp_kwargs) - _REDUCER_SETTINGS)
        if unsupported:
            _refuse(", ".join(f"`{name}`" for name in unsupported), "leave it out")
        inner, original = inner_of(self), twin("strategies.DDPStrategy", self)
        for method in ("configure_ddp", "_setup_model"):
            if getattr(inner, method) is not getattr(original, method):
                _refuse(f"{inner.__name__}.{method}", "pass a plain DDPStrategy")

    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        launcher = twin("strategies.launchers._MultiProcessingLauncher", self)
        name = _StateReturningLauncher.__name__
        returning: Any = combined(name, _StateReturningLauncher, launcher)
        if self._fedleak.defenses and type(self._launcher) is launcher:
            self._launcher = returning(self, start_method=self._start_method)

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
        """Wrap the model in DistributedDataParallel only if its reducer may run."""
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
        """Step. The buffers then differ, and are broadcast once before the next batch."""
        result = super().optimizer_step(*args, **kwargs)
        self._fedleak_buffers_differ = True
        return result

    def _send_buffers(self) -> None:
        if not (self._fedleak.reduces and self._fedleak_buffers_differ):
            return
        self._fedleak_buffers_differ = False
        settings = self._ddp_kwargs
        default = settings.get("broadcast_buffers", True)
        assert self.lightning_module is not None
        if settings.get("forward_sync_buffers", default):
            for buffer in self.lightning_module.buffers():
                dist.broadcast(buffer.detach(), src=0)


class ModelParallelSeam(Seam, ModelParallelStrategy):
    """The seam of FSDP2: all processes are one client, and gradients are sharded."""

    def _check_combination(self) -> None:
        release = self._fedleak
        if release.client != "world":
            raise DefenseError(
                "DefendedStrategy: under ModelParallelStrategy (FSDP2) gradients are reduced "
                "inside backward, so no process ever has its own. Pass client='world'."
            )
        for defense in release.gradient_defenses:
            if not defense.takes_shards:
                raise DefenseError(
                    f"DefendedStrategy: '{defense.name}' ({type(defense).__name__}) does not say "
                    "that it takes sharded gradients (FSDP2). Set `takes_shards = True` if "
                    "`on_gradients` is right for DTensors, or use DDPStrategy."
                )

    def _check_model(self, model: nn.Module) -> None:
        mesh = self.device_mesh
        release = self._fedleak
        for defense in release.defenses:
            if mesh["tensor_parallel"].size() > 1 and (
                defense.activation_layers or defense.per_sample
            ):
                raise DefenseError(
                    f"DefendedStrategy: {defense.name} cannot act under tensor parallelism. Use "
                    "ModelParallelStrategy(tensor_parallel_size=1, data_parallel_size=...)."
                )
        if not release.gradient_defenses:
            return
        if getattr(self.precision_plugin, "scaler", None) is not None:
            raise DefenseError(
                "DefendedStrategy: precision='16-mixed' cannot be used with FSDP2 and defences "
                "that act on gradients. Use 'bf16-mixed', 'bf16-true' or '32-true'."
            )
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # a forward pass before this fit leaves the root unsharded
        unsharded = [
            name
            for name, p in model.named_parameters()
            if p.requires_grad and not isinstance(p, DTensor)
        ]
        if unsharded and mesh["data_parallel"].size() > 1:
            raise DefenseError(
                f"DefendedStrategy: {', '.join(unsharded[:5])} is not sharded, so nothing reduces "
                "its gradient. Call fully_shard on the whole model, or freeze what is outside."
            )

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state. Torch creates a missing state by a step at a learning rate of 0."""
        with self._fedleak.paused():
            return super().optimizer_state(optimizer)

    def _data_share(self) -> int | None:
        return int(self.device_mesh["data_parallel"].get_local_rank())


def inner_of(strategy: Seam) -> type:
    """Return the class of the strategy that a seam wraps."""
    return type(strategy).__bases__[1]


def _refuse(setting: str, mend: str) -> None:
    raise DefenseError(
        f"DefendedStrategy: {setting} cannot be used when each rank is a client and defences act "
        f"on gradients. Please {mend}, or use client='world'."
    )
