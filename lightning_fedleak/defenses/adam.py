"""Adam under DP-SGD: the noise's variance is subtracted from the second moment.

Adam divides its updates by the root of the second moment, a running mean of squared gradients.
Under DP-SGD the expected square of a gradient is the square of the gradient without noise *plus the
variance of the noise*, which is much larger. All updates are then divided by nearly the same
number, and DP-Adam is SGD with momentum (Tang, Shpilevskiy & Lecuyer 2023, "DP-AdamBC: Your DP-Adam
Is Actually DP-SGD (Unless You Apply Bias Correction)", arXiv 2312.14334). The variance is public,
and computing with released gradients costs no privacy.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_fedleak.defenses.base import DefenseError, check_number


class DPAdamBC(Optimizer):
    """AdamW whose second moment is that of the gradients without their noise.

    A weight is changed by ``-lr m / (sqrt(max(v - phi, floor phi)) + eps)``. m and v are Adam's
    bias-corrected moments, and phi is the bias-corrected running mean of the noise's variance.
    :class:`~.DPSGD` passes the variance with every release. Without noise this is AdamW. Return the
    optimizer from ``configure_optimizers``.

    Examples:
        >>> import torch
        >>> from lightning_fedleak import DPAdamBC
        >>> optimizer = DPAdamBC(torch.nn.Linear(4, 2).parameters(), lr=1e-3)

    Args:
        params: The parameters or parameter groups, as for every optimizer, in float32 or float64.
        lr: The learning rate.
        betas: The decay rates of the two moments.
        eps: The number that is added to the root.
        weight_decay: The decoupled weight decay, as in AdamW.
        floor: The smallest second moment without noise, divided by the noise's variance. Weights
            whose gradients are only noise take steps of ``1 / sqrt(floor)`` times Adam's.

    Raises:
        DefenseError: A value is out of range, or weights are in half precision. In a step: no
            ``DPSGD`` of this run has passed the variance of the gradients' noise.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        floor: float = 0.1,
    ) -> None:
        defaults: dict[str, Any] = {"lr": lr, "betas": betas, "eps": eps}
        defaults |= {"weight_decay": weight_decay, "floor": floor}
        for name in ("lr", "eps", "weight_decay"):
            check_number(f"DPAdamBC: {name}", defaults[name], at_least=0)
        for beta in betas:
            check_number("DPAdamBC: each of betas", beta, at_least=0, below=1)
        check_number("DPAdamBC: floor", floor, above=0, at_most=1)
        self._variances: Mapping[Tensor, float] | None = None
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters.

        Raises:
            DefenseError: A parameter is in half precision.
        """
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            if parameter.dtype not in (torch.float32, torch.float64):
                raise DefenseError(
                    f"DPAdamBC: {parameter.dtype} is too coarse: train in '32-true' or 'bf16-mixed'"
                )

    def set_noise(self, variances: Mapping[Tensor, float]) -> None:
        """Set the noise of the next step's gradients.

        Args:
            variances: The variance of the noise on each number of a parameter's gradient, by
                parameter. The gradient is ``p.grad`` when the optimizer steps.
        """
        self._variances = variances

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step.

        Args:
            closure: Is called first. Within it ``DPSGD`` releases the gradients and calls
                :meth:`set_noise`.

        Returns:
            The result of the closure; None without a closure.

        Raises:
            DefenseError: The variance of the noise on these gradients is unknown.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        variances, self._variances = self._variances, None
        if variances is None and any(group["lr"] != 0 for group in self.param_groups):
            raise DefenseError(
                "DPAdamBC: no DPSGD has passed the noise's variance: train under "
                "DefendedStrategy(..., [DPSGD(...)]), or use AdamW"
            )
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["step"] = torch.zeros(())
                    state["exp_avg"] = torch.zeros_like(parameter)
                    state["exp_avg_sq"] = torch.zeros_like(parameter)
                    state["noise"] = torch.zeros(())
                if variances is None:
                    continue  # a step at lr=0, by which torch creates the state before saving it
                if parameter not in variances:
                    shape = tuple(parameter.shape)
                    raise DefenseError(f"DPAdamBC: a {shape} gradient was not released by DPSGD")
                _update(parameter, state, group, variances[parameter])
        return loss


def _update(
    parameter: Tensor, state: dict[str, Tensor], group: dict[str, Any], variance: float
) -> None:
    """Update a parameter and its state in place.

    Args:
        parameter: The parameter, with its gradient.
        state: ``step``, the number of steps, ``exp_avg`` and ``exp_avg_sq``, the running means of
            the gradient and its square, and ``noise``, that of the noise's variance.
        group: The settings of the parameter's group.
        variance: The variance of the noise on each number of the gradient.
    """
    gradient, (beta1, beta2) = parameter.grad, group["betas"]
    assert gradient is not None
    state["step"] += 1
    step = float(state["step"])
    state["exp_avg"].lerp_(gradient, 1 - beta1)
    state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    state["noise"].mul_(beta2).add_((1 - beta2) * variance)
    bias1, bias2 = 1 - beta1**step, 1 - beta2**step
    noise = float(state["noise"]) / bias2
    signal = (state["exp_avg_sq"] / bias2).sub_(noise).clamp_(min=group["floor"] * noise)
    if group["weight_decay"]:
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
    parameter.addcdiv_(
        state["exp_avg"], signal.sqrt_().add_(group["eps"]), value=-group["lr"] / bias1
    )
