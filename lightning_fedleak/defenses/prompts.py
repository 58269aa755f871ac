"""PEFT's prompt tuning and p-tuning with a prompt of its own for every sample."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn


@contextmanager
def prompts_of_samples(root: nn.Module, samples: int) -> Iterator[None]:
    """Within it a prompt that was looked up for each sample is not repeated for all once more.

    PEFT looks its virtual tokens up once and repeats what it gets for every row of the batch, where
    only the sum of the samples' gradients comes back. The recorder of DPSGD has them looked up for
    each sample; of the ``samples ** 2`` rows that PEFT makes of these the first ``samples`` are
    right.

    Args:
        root: with PEFT's models inside it, if there are any.
        samples: of the batch.
    """
    with ExitStack() as stack:
        for module in root.modules():
            if hasattr(type(module), "get_prompt") and "prompt_encoder" in module._modules:
                plain: Any = module.get_prompt
                module.__dict__["get_prompt"] = functools.partial(_once, plain, samples)
                stack.callback(module.__dict__.pop, "get_prompt")
        yield


def _once(plain: Callable[..., Any], samples: int, batch_size: int, *args: Any, **more: Any) -> Any:
    prompts = plain(batch_size, *args, **more)
    if batch_size == samples and isinstance(prompts, Tensor) and len(prompts) == samples**2:
        return prompts[:samples]
    return prompts


__all__ = ["prompts_of_samples"]
