"""Load saved models whole: each weight is in the files, or the model is refused.

If the names in a checkpoint are not those of the model, transformers draws the weights at random,
and PEFT leaves adapters at zero. A measurement of such a model looks like one without leakage.
"""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from lightning_fedleak.extras import require_package
from lightning_fedleak.messages import rank_zero_warn, without_messages
from lightning_fedleak.validate import WrongModel

Sums = Mapping[str, Sequence[tuple[bool, float, float]]]
"""Of each parameter in each dtype of :data:`STORED`: whether it is exact, its sum and its norm."""

STORED = torch.float32, torch.bfloat16, torch.float16  # dtypes in which weights are saved
_NAMED = 3  # names of tensors in a message; more: a longer line
_PEFT = "base_model.model."  # what PEFT writes before each name


def load_whole(
    kind: Any, source: str, *, may_lack_head: bool = False, **settings: Any
) -> tuple[Any, frozenset[str]]:
    """Return a model, and the names of the parameters of its head that its files lack.

    If the files have all missing names after one common prefix, as from Lightning or
    ``torch.compile``, the prefix is removed. Tensors that the model has no place for are named.

    Args:
        kind: A class with ``from_pretrained``.
        source: The folder of the model, or its name on the hub.
        may_lack_head: Whether the files may lack the layers above the model's backbone.
        settings: Further arguments of ``from_pretrained``.

    Raises:
        WrongModel: The files lack weights, or have them after several prefixes.
    """
    with without_messages():
        settings |= {"output_loading_info": True, "ignore_mismatched_sizes": True}
        model, loaded = kind.from_pretrained(source, **settings)
    mismatched = (name if isinstance(name, str) else name[0] for name in loaded["mismatched_keys"])
    missing = {*loaded["missing_keys"], *mismatched}
    is_part = getattr(model, "base_model", model) is not model
    backbone = f"{model.base_model_prefix}." if is_part else ""
    # A masked model that becomes a classifier also gets a new pooler.
    head = {n for n in missing if may_lack_head and (not n.startswith(backbone) or "pooler" in n)}
    if needed := missing - head:
        stored = saved_tensors(Path(source)) if Path(source).is_dir() else {}
        model.tie_weights()
        state = model.state_dict()
        ties: dict[int, list[str]] = {}
        for name, tensor in state.items():
            ties.setdefault(tensor.data_ptr(), []).append(name)
        names = {name: ties[state[name].data_ptr()] for name in needed}
        tails = {n: {*tied, *(t.removeprefix(backbone) for t in tied)} for n, tied in names.items()}
        prefixes = _copy(state, tails, stored, source)
        head -= _copy_head(state, head, stored, prefixes)
    elif loaded["unexpected_keys"] and not may_lack_head:
        further = _listed(loaded["unexpected_keys"])
        rank_zero_warn(f"'{source}' also holds {further}, which are no part of the model")
    return model, frozenset(head)


def load_adapters(model: nn.Module, folder: str) -> Any:
    """Return a model with the adapters of a folder, all of which are in its file.

    Raises:
        WrongModel: The file lacks adapters, has them after several prefixes, or holds further ones.
    """
    with require_package("peft", f"'{folder}' holds adapters of PEFT"):
        from peft import PeftModel
        from peft.utils import get_peft_model_state_dict, load_peft_weights
    with without_messages():
        adapted = PeftModel.from_pretrained(model, folder)
    state = get_peft_model_state_dict(adapted, save_embedding_layers=False)
    stored = load_peft_weights(folder, device="cpu")
    stored = {name.replace(".default.", "."): tensor for name, tensor in stored.items()}
    if missing := state.keys() - stored.keys():
        _copy(state, {name: {name.removeprefix(_PEFT)} for name in missing}, stored, folder)
    elif further := {name for name in stored.keys() - state.keys() if "lora_" in name}:
        raise WrongModel(
            f"'{folder}' also holds {_listed(further)}, for which its base has no layer: is this "
            "the base that it was trained on?"
        )
    return adapted


def _copy(
    state: Mapping[str, Tensor],
    tails: Mapping[str, Collection[str]],
    stored: Mapping[str, Tensor],
    source: str,
) -> list[str]:
    """Copy stored tensors to the missing ones of a model, where one common prefix fits them all.

    Return that prefix, more than one if they lead to the same stored tensors.

    Args:
        state: The tensors of the model by name.
        tails: For each missing name, the names that it may have in the files after the prefix.
        stored: The tensors of the files by name.
        source: The name of the model, for the message.
    """
    first = next(iter(tails.values()))
    ends = [(name, t) for name in stored for t in first if f".{name}".endswith(f".{t}")]
    found = {
        prefix: {n: prefix + t for n, ends in tails.items() for t in ends if prefix + t in stored}
        for prefix in sorted({name.removesuffix(t) for name, t in ends})
    }
    found = {prefix: places for prefix, places in found.items() if len(places) == len(tails)}
    fits = [*found.values()]
    if not fits or any(places != fits[0] for places in fits):
        why = "has them after several prefixes" * bool(fits)
        why = why or f"holds {_listed(stored)}" * bool(stored) or "holds nothing instead"
        raise WrongModel(
            f"'{source}' is not the whole model: it lacks {_listed(tails)}, and {why}. Save it by "
            "save_pretrained of the model itself, not of a wrapper around it"
        )
    for name, place in fits[0].items():
        if state[name].shape != stored[place].shape:
            raise WrongModel(
                f"'{source}': {place} has the shape {tuple(stored[place].shape)}, and the model "
                f"needs {tuple(state[name].shape)}"
            )
        state[name].copy_(stored[place])
    return [*found]


def _copy_head(
    state: Mapping[str, Tensor],
    head: Collection[str],
    stored: Mapping[str, Tensor],
    prefixes: Collection[str],
) -> set[str]:
    """Copy the tensors of a head that are stored after a prefix, and return their names."""
    places = {n: p + n for n in head for p in prefixes if p + n in stored}
    found = {n for n, place in places.items() if stored[place].shape == state[n].shape}
    for name in found:
        state[name].copy_(stored[places[name]])
    return found


def _listed(names: Collection[str]) -> str:
    """Return the first names and the number of all, for a message."""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{', '.join(sorted(names)[:_NAMED])}{more}"


def saved_tensors(source: Path) -> dict[str, Tensor]:
    """Return all tensors in a file, or in the files of a folder; also of a Lightning checkpoint.

    Raises:
        WrongModel: There are none, or a file cannot be read.
    """
    # Files of the first pattern that matches are read.
    patterns = ("*.safetensors", "*model*.bin", "*.ckpt")
    matches = [sorted(source.glob(pattern)) for pattern in patterns] if source.is_dir() else []
    files = [source] if source.is_file() else next(filter(None, matches), [])
    tensors: dict[str, Tensor] = {}
    for path in files:
        try:
            if path.suffix == ".safetensors":
                tensors |= load_file(path)
            else:
                content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
                content = content.get("state_dict", content)
                tensors |= {n: t for n, t in content.items() if isinstance(t, Tensor)}
        except Exception as error:
            raise WrongModel(f"'{path}' cannot be read as weights: {error}") from None
    if not tensors:
        raise WrongModel(f"no weights are in '{source}': name a folder of .safetensors files")
    return tensors


def weight_sums(model: nn.Module) -> Sums:
    """Return numbers by which the parameters of a model are recognised in another one."""
    sums = {}
    for name, parameter in model.named_parameters():
        values = parameter.detach()
        rounded = [values.to(dtype) for dtype in STORED]
        sums[name] = [
            (
                torch.equal(part.to(values.dtype), values),
                float(part.sum(dtype=torch.float64)),
                float(torch.linalg.vector_norm(part.float(), dtype=torch.float64)),
            )
            for part in rounded
        ]
    return sums


def are_equal(first: Sums, second: Sums) -> bool:
    """Return whether two models have the same parameters, up to the rounding of a stored dtype.

    A parameter is the same if it is in one of the dtypes of :data:`STORED`, and that dtype is exact
    for one of the two models.
    """
    return first.keys() == second.keys() and all(
        any(a[1:] == b[1:] and (a[0] or b[0]) for a, b in zip(sums, second[name], strict=True))
        for name, sums in first.items()
    )
