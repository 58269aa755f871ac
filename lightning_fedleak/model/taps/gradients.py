"""Call functions right before an optimizer's update, when the gradient that it uses is final.

:func:`before_real_step` replaces the optimizer's ``step`` by a patch, because torch's own hooks run
at other times: a step pre-hook runs before the closure of Lightning's automatic optimization, so
before backward, and in a post-hook the gradients may have been changed in place.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import LBFGS, Optimizer


class UpdateError(ValueError):
    """A weight change cannot be put in units of a gradient."""


_CHAIN = "_fedleak_before_step"  # attribute of a patched ``step`` that holds its chain


_SEVERAL_GRADIENTS = (
    "{} {} in one step, so that the client has no single gradient to share. Use another optimizer, "
    "such as AdamW or SGD."
)


def before_real_step(optimizer: Optimizer, fn: Callable[[], None]) -> Callable[[], None]:
    """Call ``fn`` in every step of ``optimizer`` right before the real update.

    In ``step(closure)``, as Lightning's automatic optimization calls it, ``fn`` runs after the
    closure, which does forward, backward, hooks and gradient clipping. In ``step()`` it runs first.
    Under a ``GradScaler`` gradients are unscaled by then, and ``fn`` is not called in a step that
    the scaler skips. ``fn`` runs without autograd. Several functions on one optimizer run in the
    order in which they were added.

    Opacus' ``DPOptimizer`` computes its gradient inside its step. ``fn`` runs after that, before
    the update of the optimizer that it wraps, and not in steps that ``DPOptimizer`` skips.

    Otherwise ``step`` works as before, with its hooks and learning rate schedulers.

    Args:
        optimizer: a torch optimizer or Lightning's wrapper of one.
        fn: called without arguments. An exception that it raises ends the step before the update.

    Returns:
        A function that removes ``fn``. It may be called twice.

    Raises:
        RuntimeError: The optimizer is LBFGS. In a step: the optimizer runs its closure twice
            (sharpness-aware optimizers) or not at all, or it is fused and under a GradScaler, so
            that gradients are still scaled and steps are skipped inside its kernel.
    """
    inner = getattr(optimizer, "optimizer", None)
    if isinstance(inner, Optimizer) and isinstance(optimizer, type(inner)):
        optimizer = (
            inner  # Lightning's wrapper is a subclass of its content; other wrappers have own steps
        )
    optimizer = real_optimizer(optimizer)
    check_optimizer(optimizer)
    chain: _Chain = getattr(optimizer.step, _CHAIN, None) or _Chain(optimizer)
    entry = functools.partial(fn)
    chain.functions.append(entry)
    return functools.partial(chain.remove, entry)


def real_optimizer(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer that updates the weights, inside Opacus' wrappers if there are any."""
    while isinstance(inner := getattr(optimizer, "original_optimizer", None), Optimizer):
        optimizer = inner
    return optimizer


def check_optimizer(optimizer: Optimizer, scaler: object | None = None) -> None:
    """Raise an error at setup for an optimizer that ``before_real_step`` does not support.

    Args:
        optimizer: the torch optimizer.
        scaler: the GradScaler of the precision plugin; None without one.

    Raises:
        RuntimeError: LBFGS, or a fused optimizer under a GradScaler.
    """
    problem = None
    if isinstance(optimizer, LBFGS):
        problem = _SEVERAL_GRADIENTS.format("LBFGS", "evaluates its closure several times")
    elif scaler is not None and getattr(optimizer, "_step_supports_amp_scaling", False):
        problem = _FUSED.format(type(optimizer).__name__)
    if problem:
        raise RuntimeError(problem)


_FUSED = (
    "a fused {0} under a GradScaler gets gradients that are still scaled and skips steps inside "
    "its kernel. Use {0}(..., fused=False), or bf16-mixed instead of 16-mixed."
)


class _Chain:
    """The functions that run before one optimizer's update, and the patch that runs them."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.functions: list[Callable[[], None]] = []
        self._optimizer = optimizer
        self._original = optimizer.step
        self._was_patched = "step" in vars(optimizer)

        # A bound method, with the original's attributes: a learning rate scheduler that is
        # created later unwraps `step.__func__`, and looks for its own mark on `step`.
        @functools.wraps(self._original)
        def step(_: Optimizer, *args: Any, **kwargs: Any) -> Any:
            return self._step(*args, **kwargs)

        setattr(step, _CHAIN, self)
        self._patch = types.MethodType(step, optimizer)
        optimizer.step = self._patch  # type: ignore[method-assign]

    def remove(self, entry: Callable[[], None]) -> None:
        """Remove a function, and restore the original ``step`` after the last one."""
        if entry in self.functions:
            self.functions.remove(entry)
        # If other code has patched ``step`` since, this patch stays and passes calls through.
        if not self.functions and vars(self._optimizer).get("step") is self._patch:
            if self._was_patched:
                self._optimizer.step = self._original  # type: ignore[method-assign]
            else:
                del self._optimizer.step

    def _run(self) -> None:
        """Run all functions without autograd, in the order in which they were added."""
        with torch.no_grad():
            for fn in tuple(self.functions):
                fn()

    def _step(self, *args: Any, **kwargs: Any) -> Any:
        """Take the original step, and run the functions after its closure, before its update."""
        if not self.functions:
            return self._original(*args, **kwargs)
        name = type(self._optimizer).__name__
        if getattr(self._optimizer, "found_inf", None) is not None:
            raise RuntimeError(_FUSED.format(name))
        closure = args[0] if args else kwargs.get("closure")
        if closure is None:
            self._run()
            return self._original(*args, **kwargs)
        has_run = False

        def closure_then_run() -> Any:
            nonlocal has_run
            if has_run:
                raise RuntimeError(_SEVERAL_GRADIENTS.format(name, "evaluates its closure twice"))
            result = closure()
            has_run = True
            self._run()
            return result

        if args:
            args = (closure_then_run, *args[1:])
        else:
            kwargs["closure"] = closure_then_run
        result = self._original(*args, **kwargs)
        if not has_run:
            raise RuntimeError(_SEVERAL_GRADIENTS.format(name, "did not run its closure"))
        return result
