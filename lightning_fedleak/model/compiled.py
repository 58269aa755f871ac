"""Whether torch.compile runs a model, whose compiled code ignores hooks that are added later."""

from __future__ import annotations

import torch
from torch import nn

from lightning_fedleak.model.model_state import modules_of


def is_compiled(root: nn.Module) -> bool:
    """Return whether torch.compile runs a module, a part of it, or its ``training_step``."""
    return _is_compiled_function(getattr(root, "training_step", None)) or any(
        "_orig_mod" in module._modules
        or module._compiled_call_impl is not None
        or _is_compiled_function(module.forward)
        for module in modules_of(root)
    )


def _is_compiled_function(function: object) -> bool:
    """Return whether torch.compile runs a function, and has not been disabled for it."""
    return hasattr(function, "_torchdynamo_orig_callable") and not hasattr(
        function, "_torchdynamo_disable"
    )


def reset_compiled(root: nn.Module) -> None:
    """Discard compiled code, which would ignore hooks that were added or removed since."""
    if is_compiled(root):
        torch.compiler.reset()
