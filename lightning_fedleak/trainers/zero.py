"""DeepSpeed's ZeRO: the moment before its engine steps, and the gradients that it steps with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.optim import Optimizer

_ONE_OR_TWO = "DeepSpeedZeroOptimizer"
_CLASSES = {1: _ONE_OR_TWO, 2: _ONE_OR_TWO, 3: "DeepSpeedZeroOptimizer_Stage3"}


class ZeROStep(Optimizer):
    """The step of a DeepSpeed engine, as an optimizer of the model's own parameters.

    ZeRO's own optimizer has shards in place of them. ``step`` changes nothing: it is called right
    before the engine's, while the gradients can be asked for; after it ZeRO-1 aborts the process.
    """

    engine: Any
    _clip: Tensor | float | None = None

    @classmethod
    def of(cls, engine: Any, watcher: str) -> ZeROStep:
        """Return the step of an engine, named and set as the optimizer inside is.

        Raises:
            ValueError: the engine's settings are not supported; says which, and what to do.
        """
        check_engine(engine, watcher)
        sharded, inner = engine.optimizer, engine.optimizer.optimizer
        groups: list[dict[str, Any]] = [{**group, "params": []} for group in inner.param_groups]
        of_stage_3 = engine.zero_optimization_stage() == 3
        for n, parameters in enumerate(sharded.fp16_groups if of_stage_3 else sharded.bit16_groups):
            number = sharded.sub_group_to_group_id[n] if of_stage_3 else n
            groups[number]["params"] += parameters
        step = type(type(inner).__name__, (cls,), {})(groups, inner.defaults)
        step.engine = engine
        return step

    @property
    def stage(self) -> int:
        """Return which ZeRO it is: 1, 2 or 3."""
        return int(self.engine.zero_optimization_stage())

    @property
    def clip_norm(self) -> float:
        """Return the norm that the whole gradient is clipped to; 0 for none."""
        return float(self.engine.gradient_clipping() or 0)

    @property
    def policies(self) -> dict[int, MixedPrecisionPolicy]:
        """Return the dtypes of each parameter's gradient, by its ``id``; none where all is float32."""
        reduced = self.engine.communication_data_type
        return {
            id(p): MixedPrecisionPolicy(p.dtype, reduced)
            for group in self.param_groups
            for p in group["params"]
            if {p.dtype, reduced} != {torch.float32}
        }

    def step(self, closure: Any = None) -> None:
        """Let what runs before a real step run."""

    def follow_engine(self) -> Callable[[], None]:
        """Step before each step of the engine that ends an accumulation, and return the end of it."""
        engine, original = self.engine, self.engine.step
        own = "step" in vars(engine)

        def step(*args: Any, **kwargs: Any) -> Any:
            if engine.is_gradient_accumulation_boundary():
                self._clip = None
                self.step()
            return original(*args, **kwargs)

        def put_back() -> None:
            if vars(engine).get("step") is step:
                if own:
                    engine.step = original
                else:
                    del engine.step

        engine.step = step
        return put_back

    def gradient_of(self, parameter: nn.Parameter) -> Tensor | None:
        """Return the mean over processes, clipped, of a parameter's gradient; None: there is none.

        Every process must ask for the same parameters in one order.
        """
        from deepspeed.utils import safe_get_full_grad

        if (gradient := safe_get_full_grad(parameter)) is None:
            return None
        if self._clip is None:
            self._clip = self._clip_factor()
        return gradient.float() * self._clip

    def _clip_factor(self) -> Tensor | float:
        if not self.clip_norm:
            return 1.0
        sharded = self.engine.optimizer
        norms = sharded._get_norm_groups() if self.stage == 3 else [sharded.scaled_global_norm()]
        norm = torch.stack([*norms]).norm()
        return 1 / ((norm + 1e-6) / self.clip_norm).clamp(min=1)


def engine_of(model: nn.Module) -> Any:
    """Return the model if it is a DeepSpeed engine, else None."""
    kinds = {kind.__name__ for kind in type(model).__mro__}
    return model if "DeepSpeedEngine" in kinds else None


def check_engine(engine: Any, watcher: str) -> None:
    """Refuse settings of DeepSpeed under which gradients cannot be read, or are not tested.

    Raises:
        ValueError: names the setting.
    """
    zero, stage = engine._config.zero_config, engine.zero_optimization_stage()
    optimizer = type(engine.optimizer).__name__
    offloads = (zero.offload_optimizer, zero.offload_param)
    reasons = {
        "pipelines show no process the whole batch: use ZeRO without a PipelineModule": (
            "PipelineEngine" in {kind.__name__ for kind in type(engine).__mro__}
        ),
        "ZeRO-0 and optimizers that communicate are not tested: set zero_optimization's 'stage' to "
        "1, 2 or 3": stage not in _CLASSES,
        "float16 scales gradients, which is not tested: use 'bf16'": engine.fp16_enabled(),
        "'torch_autocast', DeepCompile and gradients that are accumulated unmanaged are not tested: "
        "leave 'torch_autocast', 'compile' and 'managed_gradient_accumulation' out": (
            engine.torch_autocast_enabled()
            or engine.is_deepcompile_enabled()
            or not engine.managed_gradient_accumulation()
        ),
        "offloaded gradients are not tested: remove 'offload_optimizer' and 'offload_param'": any(
            one is not None and str(getattr(one.device, "value", one.device)) != "none"
            for one in offloads
        ),
        "ZeRO++ changes weights and gradients on their way, which is not tested: remove "
        "'zero_quantized_weights', 'zero_quantized_gradients' and 'zero_hpz_partition_size'": (
            zero.zero_quantized_weights
            or zero.zero_quantized_nontrainable_weights
            or zero.zero_quantized_gradients
            or zero.zero_hpz_partition_size > 1
        ),
        "tensor, sequence and expert parallelism are not tested: let each process train the whole "
        "model on rows of its own": (
            engine.dp_world_size != torch.distributed.get_world_size()
            or engine.autotp_size() > 1
            or bool(engine.has_moe_layers)
        ),
        f"{optimizer} keeps gradients in a form that is not tested: use AdamW or SGD, and no "
        "'grad_accum_dtype', Muon or ZenFlow": (
            optimizer != _CLASSES.get(stage)
            or getattr(engine.optimizer, "use_muon", False)
            or bool(engine.zenflow)
        ),
    }
    for reason, applies in reasons.items():
        if applies:
            raise ValueError(f"{watcher} cannot take this DeepSpeed engine: {reason}")
