"""The models in NVFlare's messages.

They are in numpy or torch, whole or as the difference of two models.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lightning_fedleak.extras import require_package
from lightning_fedleak.federation.updates import State, moved

with require_package("nvflare", "lightning_fedleak.federation.nvflare needs NVFlare"):
    from nvflare.apis.dxo import DXO, DataKind, from_shareable
    from nvflare.apis.shareable import Shareable


def dxo_of(shareable: Shareable | None) -> DXO | None:
    """Return the content of a message; None if it has none that can be read."""
    try:
        return None if shareable is None else from_shareable(shareable)
    except ValueError:
        return None


def model_of(shareable: Shareable | None) -> DXO | None:
    """Return the model in a message, or the difference of two models; None if it has neither."""
    kinds = (DataKind.WEIGHTS, DataKind.WEIGHT_DIFF)
    content = dxo_of(shareable)
    return content if content is not None and content.data_kind in kinds else None


def tensors_of(data: Mapping[str, object]) -> dict[str, Tensor]:
    """Return the arrays of a model as tensors."""
    return {name: torch.as_tensor(value) for name, value in data.items()}


def state_of(result: DXO, sent: State) -> dict[str, Tensor]:
    """Return the model in a result, also where that is the difference of two models."""
    tensors = tensors_of(result.data)
    return moved(sent, tensors) if result.data_kind == DataKind.WEIGHT_DIFF else tensors


def array_in(meta: Mapping[str, object]) -> str | None:
    """Return the name of the first value beside a model that holds an array, or None."""
    names = (n for n, v in meta.items() if any(getattr(x, "ndim", 0) for x in tree_leaves(v)))
    return next(names, None)


def convert_like(state: Mapping[str, Tensor], arrays: Mapping[str, object]) -> dict[str, object]:
    """Return a model in torch if some of ``arrays`` are tensors, and in numpy otherwise."""
    if any(isinstance(value, Tensor) for value in arrays.values()):
        return dict(state)
    return {name: tensor.numpy() for name, tensor in state.items()}
