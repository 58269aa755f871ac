"""Calls functions right before an optimizer's update, when the gradient that it uses is final."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import LBFGS, Optimizer


class UpdateError(ValueError):
    """A weight change cannot be put in units of a gradient."""


# ---- the moment before an optimizer's step -----------------------------------------------

# ``Optimizer.register_step_pre_hook`` fires before the closure of Lightning's automatic
# optimization, that is, before backward; a post-hook may find gradients modified in place.
_CHAIN = "_fedleak_before_step"


_NO_ONE_GRADIENT = (
    "{} {} in one step, so that no one gradient leaves the client. Use another optimizer, such as "
    "AdamW or SGD."
)


def before_real_step(optimizer: Optimizer, fn: Callable[[], None]) -> Callable[[], None]:
    """Call ``fn`` in every step of ``optimizer`` right before the real update.

    In ``step(closure)``, as Lightning's automatic optimization calls it, ``fn`` runs after the
    closure: forward, backward, hooks and gradient clipping. In ``step()`` it runs at once. Under a
    ``GradScaler`` gradients are unscaled by then, and ``fn`` is not called in a step that the
    scaler skips. ``fn`` runs without autograd. Several functions on one optimizer run in the order
    in which they were added.

    Opacus' ``DPOptimizer`` makes its gradient inside its own step. ``fn`` then runs after that,
    before the update of the optimizer that it wraps, and not in steps that it skips.

    The optimizer's ``step`` does everything else as before, hooks and learning rate schedulers
    included.

    Args:
        optimizer: a torch optimizer or Lightning's wrapper of one.
        fn: called without arguments; what it raises stops the step before the update.

    Returns:
        A function that removes ``fn``; may be called twice.

    Raises:
        RuntimeError: LBFGS. And in a step: an optimizer that runs its closure twice
            (sharpness-aware ones) or not at all, or a fused one under a GradScaler, whose gradients
            are still scaled and which skips steps inside its kernel.
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
        problem = _NO_ONE_GRADIENT.format("LBFGS", "evaluates its closure several times")
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
        called = False

        def closure_then_run() -> Any:
            nonlocal called
            if called:
                raise RuntimeError(_NO_ONE_GRADIENT.format(name, "evaluates its closure twice"))
            result = closure()
            called = True
            self._run()
            return result

        if args:
            args = (closure_then_run, *args[1:])
        else:
            kwargs["closure"] = closure_then_run
        result = self._original(*args, **kwargs)
        if not called:
            raise RuntimeError(_NO_ONE_GRADIENT.format(name, "did not run its closure"))
        return result
