"""DeepSpeed's ZeRO: the moment before its engine steps, and the gradients that it steps with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.optim import Optimizer

from lightning_fedleak.defenses.host import override

_OPTIMIZERS = {
    1: "DeepSpeedZeroOptimizer",
    2: "DeepSpeedZeroOptimizer",
    3: "DeepSpeedZeroOptimizer_Stage3",
}
"""The class of ZeRO's optimizer by stage."""
_QUANTIZED = [f"zero_quantized_{n}" for n in ("weights", "nontrainable_weights", "gradients")]


class ZeROStep(Optimizer):
    """The step of a DeepSpeed engine, as an optimizer of the model's own parameters.

    ZeRO's own optimizer has shards in their place. :meth:`step` changes nothing: it is called right
    before the engine's step, the last moment at which gradients can be gathered. After that step
    ZeRO-1 aborts a process that gathers them.
    """

    engine: Any
    is_empty: bool = False
    """Whether gradients were zeroed since the newest backward."""
    _clip: Tensor | None = None

    @classmethod
    def of_engine(cls, engine: nn.Module, watcher: str) -> ZeROStep | None:
        """Return the step of an engine, with the class name and settings of its inner optimizer.

        Args:
            engine: the model that the loop trains.
            watcher: the name of the class that watches it, for messages.

        Returns:
            None if the model is no DeepSpeedEngine.

        Raises:
            ValueError: gradients cannot be read under its settings. The message names the setting.
        """
        if "DeepSpeedEngine" not in _class_names(engine):
            if any(hasattr(p, "_hp_mapping") or hasattr(p, "ds_id") for p in engine.parameters()):
                raise ValueError(
                    f"{watcher}: DeepSpeed shards this model: give the engine that "
                    "deepspeed.initialize, or accelerator.prepare, returned"
                )
            return None
        check_engine(engine, watcher)
        sharded: Any = engine.optimizer
        inner = sharded.optimizer
        has_sub_groups = hasattr(sharded, "sub_group_to_group_id")  # of ZeRO-3
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
        """Return the norm to which the gradient of all parameters is clipped; 0 for none."""
        return float(self.engine.gradient_clipping() or 0)

    @property
    def policies(self) -> dict[int, MixedPrecisionPolicy]:
        """Return the dtypes of each parameter's gradient, by its ``id``; none if all is float32."""
        reduced = self.engine.communication_data_type
        return {
            id(p): MixedPrecisionPolicy(p.dtype, reduced)
            for group in self.param_groups
            for p in group["params"]
            if {p.dtype, reduced} != {torch.float32}
        }

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Do nothing: only the hooks of a step run."""

    def follow_engine(self) -> list[Callable[[], None]]:
        """Call :meth:`step` before each step of the engine that ends an accumulation.

        Returns:
            Functions that end this.
        """
        engine = self.engine
        take_step, zero_gradients = engine.step, engine.optimizer.zero_grad

        def step(*args: Any, **kwargs: Any) -> Any:
            if engine.is_gradient_accumulation_boundary():
                self._clip = None
                self.step()
            return take_step(*args, **kwargs)

        def zero_grad(*args: Any, **kwargs: Any) -> Any:
            self.is_empty = True
            return zero_gradients(*args, **kwargs)

        return [override(engine, "step", step), override(engine.optimizer, "zero_grad", zero_grad)]

    def gradient_of(self, parameter: nn.Parameter) -> Tensor | None:
        """Return the mean over processes of a parameter's gradient, clipped, in float32.

        It is a collective: every process must call it for the same parameters in the same order.
        None is returned if there is no gradient.
        """
        from deepspeed.utils import safe_get_full_grad

        gradient: Tensor | None = safe_get_full_grad(parameter)
        if gradient is None or not self.clip_norm:
            return None if gradient is None else gradient.float()
        if self._clip is None:
            zero = self.engine.optimizer
            norms = zero._get_norm_groups() if self.stage == 3 else [zero.scaled_global_norm()]
            self._clip = (self.clip_norm / (torch.stack([*norms]).norm() + 1e-6)).clamp(max=1)
        return gradient.float() * self._clip


def _class_names(engine: object) -> set[str]:
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
        raise ValueError(f"{watcher} takes DeepSpeed 0.19.8 or newer: older ones are not tested")
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
            f"{watcher} reads the gradients that ZeRO-1, 2 and 3 are about to step with. {name} "
            "moves, scales or changes them, or reduces them later, which is not tested: change it, "
            "or use DDP"
        )
