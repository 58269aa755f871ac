"""Gives access to the gradients of DeepSpeed's ZeRO right before its engine steps with them.

ZeRO shards the optimizer states (stage 1), the gradients too (stage 2), or the weights too (stage
3) over processes. :class:`ZeROStep` stands for the engine's optimizer, and gathers gradients.
:func:`check_engine` refuses settings under which they cannot be gathered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.optim import Optimizer

from lightning_fedleak.defenses.host import override

# The class of ZeRO's optimizer by stage.
_OPTIMIZERS = {
    1: "DeepSpeedZeroOptimizer",
    2: "DeepSpeedZeroOptimizer",
    3: "DeepSpeedZeroOptimizer_Stage3",
}
# The settings of ZeRO++ that send weights or gradients quantized.
_QUANTIZED = [f"zero_quantized_{n}" for n in ("weights", "nontrainable_weights", "gradients")]


class ZeROStep(Optimizer):
    """An optimizer of the model's parameters that marks the steps of a DeepSpeed engine.

    The optimizer of ZeRO holds shards in place of the parameters. This one has the parameters, and
    the settings and the class name of the inner optimizer. Its :meth:`step` changes nothing, but
    the hooks on it run. It is called right before the engine's step, the last moment at which
    gradients can be gathered: after that step ZeRO-1 aborts a process that gathers them.

    Attributes:
        engine: The DeepSpeedEngine.
        is_empty: Whether gradients were zeroed since the newest backward pass.
    """

    engine: Any
    is_empty: bool = False
    # The factor by which the engine clips the gradient of this step; None until it is computed.
    _scale: Tensor | None = None

    @classmethod
    def of_engine(cls, engine: nn.Module, watcher: str) -> ZeROStep | None:
        """Return the step of an engine, with the class name and settings of its inner optimizer.

        Args:
            engine: the model that the loop trains.
            watcher: the name of the class that watches it, for messages.

        Returns:
            The step; None if the model is not a DeepSpeedEngine.

        Raises:
            ValueError: gradients cannot be read under its settings. The message names the setting.
        """
        if "DeepSpeedEngine" not in _class_names(engine):
            if any(hasattr(p, "_hp_mapping") or hasattr(p, "ds_id") for p in engine.parameters()):
                raise ValueError(
                    f"{watcher}: DeepSpeed shards this model: pass the engine that "
                    "deepspeed.initialize or accelerator.prepare has returned"
                )
            return None
        check_engine(engine, watcher)
        sharded: Any = engine.optimizer
        inner = sharded.optimizer
        has_sub_groups = hasattr(sharded, "sub_group_to_group_id")  # in ZeRO-3
        sub_groups = sharded.fp16_groups if has_sub_groups else sharded.bit16_groups
        groups: list[dict[str, Any]] = [{**group, "params": []} for group in inner.param_groups]
        for n, parameters in enumerate(sub_groups):
            group = sharded.sub_group_to_group_id[n] if has_sub_groups else n
            groups[group]["params"] += parameters
        step: ZeROStep = type(type(inner).__name__, (cls,), {})(groups, inner.defaults)
        step.engine = engine
        return step

    @property
    def stage(self) -> int:
        """Return the stage of ZeRO: 1, 2 or 3."""
        return int(self.engine.zero_optimization_stage())

    @property
    def clip_norm(self) -> float:
        """Return the norm to which the gradient of all parameters is clipped; 0 for no clipping."""
        return float(self.engine.gradient_clipping() or 0)

    @property
    def policies(self) -> dict[int, MixedPrecisionPolicy]:
        """Return the dtypes in which the gradient of each parameter is computed and reduced.

        They are by the parameter's ``id``; parameters whose two dtypes are float32 are left out.
        """
        reduce_dtype = self.engine.communication_data_type
        return {
            id(p): MixedPrecisionPolicy(p.dtype, reduce_dtype)
            for group in self.param_groups
            for p in group["params"]
            if {p.dtype, reduce_dtype} != {torch.float32}
        }

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Do nothing: only the hooks of a step run."""

    def follow_engine(self) -> list[Callable[[], None]]:
        """Call :meth:`step` before each step of the engine that ends an accumulation.

        Returns:
            Functions that restore the engine and its optimizer.
        """
        engine = self.engine
        engine_step, engine_zero_grad = engine.step, engine.optimizer.zero_grad

        def step(*args: Any, **kwargs: Any) -> Any:
            if engine.is_gradient_accumulation_boundary():
                self._scale = None
                self.step()
            return engine_step(*args, **kwargs)

        def zero_grad(*args: Any, **kwargs: Any) -> Any:
            self.is_empty = True
            return engine_zero_grad(*args, **kwargs)

        return [override(engine, "step", step), override(engine.optimizer, "zero_grad", zero_grad)]

    def gradient_of(self, parameter: nn.Parameter) -> Tensor | None:
        """Return the mean over processes of a parameter's gradient, clipped, in float32.

        This is a collective operation: every process must call it for the same parameters in the
        same order. None is returned if there is no gradient.
        """
        from deepspeed.utils import safe_get_full_grad

        gradient: Tensor | None = safe_get_full_grad(parameter)
        if gradient is None or not self.clip_norm:
            return None if gradient is None else gradient.float()
        if self._scale is None:
            zero = self.engine.optimizer
            norms = zero._get_norm_groups() if self.stage == 3 else [zero.scaled_global_norm()]
            # DeepSpeed adds 1e-6 too, so that the norm is not 0.
            self._scale = (self.clip_norm / (torch.stack([*norms]).norm() + 1e-6)).clamp(max=1)
        return gradient.float() * self._scale


def _class_names(engine: object) -> set[str]:
    """Return the names of an object's class and its base classes."""
    return {cls.__name__ for cls in type(engine).__mro__}


def check_engine(engine: Any, watcher: str) -> None:
    """Refuse settings of DeepSpeed under which gradients cannot be read, or are not tested.

    Args:
        engine: the DeepSpeedEngine.
        watcher: the name of the class that watches it, for the message.

    Raises:
        ValueError: there is such a setting. The message names it.
    """
    if not hasattr(engine, "managed_gradient_accumulation"):
        raise ValueError(f"{watcher} needs DeepSpeed 0.19.8 or newer: older ones are not tested")
    config, stage = engine._config.zero_config, engine.zero_optimization_stage()
    offloads = {n: getattr(config, n) for n in ("offload_optimizer", "offload_param")}
    optimizer = engine.optimizer
    outer_name = type(optimizer).__name__
    inner_name = type(getattr(optimizer, "optimizer", None)).__name__
    is_data_parallel = engine.dp_world_size == distributed.get_world_size()
    settings = {
        "a PipelineModule": "PipelineEngine" in _class_names(engine),
        f"'stage': {stage}": stage not in _OPTIMIZERS,
        **{
            f"'{name}'": offload is not None
            and getattr(offload.device, "value", offload.device) != "none"
            for name, offload in offloads.items()
        },
        **{f"'{name}'": getattr(config, name) for name in _QUANTIZED},
        "'zero_hpz_partition_size'": config.zero_hpz_partition_size > 1,
        "'gradient_allreduce_op': 'sum'": not getattr(engine, "gradient_average", True),
        "'fp16'": engine.fp16_enabled() or engine.communication_data_type == torch.float16,
        "'torch_autocast'": engine.torch_autocast_enabled(),
        "'compile'": engine.is_deepcompile_enabled(),
        "'zenflow'": bool(engine.zenflow),
        "'managed_gradient_accumulation': false": not engine.managed_gradient_accumulation(),
        "tensor, sequence or expert parallelism": (
            not is_data_parallel or engine.autotp_size() > 1 or engine.has_moe_layers
        ),
        f"{outer_name} of {inner_name}": (
            outer_name != _OPTIMIZERS.get(stage) or "muon" in inner_name.lower()
        ),
    }
    if name := next((name for name, applies in settings.items() if applies), None):
        raise ValueError(
            f"{watcher} reads the gradients right before ZeRO-1, 2 or 3 steps with them. With "
            f"{name} they are moved, scaled, changed or reduced later, which is not tested: change "
            "this setting, or use DDP"
        )
