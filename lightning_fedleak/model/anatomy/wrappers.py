"""Find the layers inside wrapped modules; read which arguments a forward takes and special ids.

A module can be wrapped by torch.compile, DDP, DataParallel or FSDP, and its layers by PEFT. The
wrappers of torch have one child and are transparent: their child computes the same. A layer of PEFT
has several children, of which one is active. Wrappers are recognised by the children that they
register, so neither PEFT nor any distributed backend is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import wraps
from inspect import Parameter, signature
from typing import Any

from torch import nn

# Names of the child inside torch.compile, and inside FSDP.
_TRANSPARENT = ("_orig_mod", "_fsdp_wrapped_module")
# The forward's argument for the keys and values of earlier tokens: before transformers 5.24, since.
_CACHES = ("past_key_values", "cache")


def transparent_child(module: nn.Module) -> str | None:
    """Return the name of the child inside a compile, DDP, DataParallel or FSDP wrapper, or None."""
    for name in _TRANSPARENT:
        if name in module._modules:
            return name
    if isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel):
        return "module"
    return None


def unwrap(module: nn.Module) -> nn.Module:
    """Return the module inside torch.compile, DDP, DataParallel and FSDP wrappers."""
    while (name := transparent_child(module)) is not None:
        module = getattr(module, name)
    return module


def active_child(module: nn.Module) -> str | None:
    """Return the path of the child whose parameters a PEFT layer uses; None for other modules.

    It is the active adapter's copy in a ``ModulesToSaveWrapper`` (the original if adapters are
    disabled), and the base layer in a LoRA, IA3 or trainable-tokens layer.
    """
    children = module._modules
    if "modules_to_save" in children and "original_module" in children:
        active = getattr(module, "active_adapter", None)
        names = [active] if isinstance(active, str) else list(active or [])
        if names and not getattr(module, "disable_adapters", False):
            return f"modules_to_save.{names[0]}"
        return "original_module"
    for name in ("token_adapter", "base_layer"):
        if name in children:
            return name
    return None


def leaf(module: nn.Module) -> nn.Module:
    """Return the plain layer under every compile, distributed and PEFT wrapper of ``module``."""
    while True:
        module = unwrap(module)
        path = active_child(module)
        if path is None:
            return module
        module = module.get_submodule(path)


def walk(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield ``(name, module)`` for the modules in use, outermost first, each once.

    Unlike ``named_modules`` it enters only the active child of a PEFT layer. So it yields no frozen
    original of a trained copy, no inactive adapter and no low-rank factor.
    """
    visited: set[int] = set()
    stack = [("", root)]
    while stack:
        name, module = stack.pop()
        if id(module) in visited:
            continue
        visited.add(id(module))
        yield name, module
        active = active_child(module)
        children = [(n, m) for n, m in module._modules.items() if m is not None]
        if active is not None:
            children = [(active, module.get_submodule(active))]
        stack.extend((f"{name}.{n}" if name else n, m) for n, m in reversed(children))


def mixed_precision(root: nn.Module) -> dict[int, Any]:
    """Return the ``MixedPrecisionPolicy`` of each parameter that FSDP2 shards, by its ``id``."""
    policies: dict[int, Any] = {}
    for module in root.modules():  # outermost first: the innermost policy of a parameter remains
        if hasattr(module, "_get_fsdp_state"):
            policy = module._get_fsdp_state()._mp_policy  # type: ignore[operator]
            policies |= {id(p): policy for p in module.parameters() if p.is_floating_point()}
    return policies


def find_path(root: nn.Module, module: nn.Module) -> str | None:
    """Return the first name of ``module`` in ``root.named_modules()``; None if it has none."""
    return next((n for n, m in root.named_modules() if m is module), None)


def matrix_shape(module: nn.Module) -> tuple[int, int] | None:
    """Return rows and columns of a layer's weight matrix; None if the layer has no matrix.

    The layer's attributes are preferred to the weight's shape, which differs in a quantised or
    sharded layer.
    """
    layer = leaf(module)
    for rows, columns in (("num_embeddings", "embedding_dim"), ("out_features", "in_features")):
        shape = (getattr(layer, rows, None), getattr(layer, columns, None))
        if isinstance(shape[0], int) and isinstance(shape[1], int):
            return shape[0], shape[1]
    weight = layer._parameters.get("weight")
    if weight is None or weight.dim() != 2:
        return None
    return int(weight.shape[0]), int(weight.shape[1])


def peft_kind(model: nn.Module) -> str | None:
    """Return the kinds of the active PEFT adapters (``"LORA"``, ``"IA3+LORA"``), or None."""
    configs = getattr(model, "peft_config", None)
    if not isinstance(configs, dict) or not configs:
        return None
    active = getattr(model, "active_adapter", None)
    names = [active] if isinstance(active, str) else list(configs)
    kinds = {getattr(configs[n], "peft_type", None) for n in names if n in configs}
    return "+".join(sorted(str(getattr(k, "value", k)) for k in kinds if k is not None)) or None


def without_peft(model: nn.Module) -> nn.Module:
    """Return the model inside a ``PeftModel``, or any other module itself."""
    if "base_model" in model._modules and hasattr(model, "peft_config"):
        return unwrap(model.get_base_model())  # type: ignore[operator]
    return model


def accepts(model: nn.Module, argument: str) -> bool:
    """Return whether the model's ``forward`` can be called with an argument of that name."""
    forward = without_peft(model).forward
    parameters = signature(forward).parameters
    # The base class's forward takes any argument, but computes nothing.
    if getattr(forward, "__qualname__", "") == "LightningModule.forward":
        return False
    return argument in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def cache_argument(model: nn.Module) -> str | None:
    """Return the name of the forward's argument for the cache of keys and values, or None."""
    parameters = signature(without_peft(model).forward).parameters
    return next((name for name in _CACHES if name in parameters), None)


def has_cache(arguments: Mapping[str, object]) -> bool:
    """Return whether a call's arguments contain a cache, which a second call would change."""
    return any(arguments.get(name) is not None for name in _CACHES)


def reads_media(model: nn.Module) -> bool:
    """Return whether the encoder of an encoder-decoder reads sound or images instead of ids."""
    core = without_peft(model)
    is_media = getattr(core, "main_input_name", "input_ids") != "input_ids"
    return is_media and "encoder_outputs" in signature(core.forward).parameters


def ids_argument(model: nn.Module) -> str | None:
    """Return the name of the forward's argument that takes the ids; None if it is unknown.

    It is ``input_ids``, or else the only argument without a default, such as ``idx`` in litgpt. If
    an encoder reads sound or images, as in Whisper, the argument is ``decoder_input_ids``.
    """
    if reads_media(model):
        return "decoder_input_ids"
    if accepts(model, "input_ids"):
        return "input_ids"
    parameters = signature(without_peft(model).forward).parameters.values()
    starred = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    names = [p.name for p in parameters if p.default is p.empty and p.kind not in starred]
    return names[0] if len(names) == 1 else None


def taking_ids(model: nn.Module) -> Callable[..., Any]:
    """Return a function that calls the model's forward and takes its ids as ``input_ids``.

    If the model's encoder reads sound or images, the decoder gets a state of zeros from it.
    """
    forward, name = model.forward, ids_argument(model) or "input_ids"
    width, has_media = getattr(getattr(model, "config", None), "hidden_size", 1), reads_media(model)

    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        ids = kwargs.pop("input_ids", None)
        if ids is None:
            return forward(*args, **kwargs)
        if has_media:
            states = next(model.parameters()).new_zeros(len(ids), 1, width)
            kwargs = {"encoder_outputs": (states,), **kwargs}
        return forward(*args, **{**kwargs, name: ids})

    return run


_MARKS = ("bos", "eos", "cls", "sep", "pad")  # special tokens whose ids a config may have
_MEDIA = ("image", "video", "audio")


def placeholder_ids(config: Any) -> frozenset[int]:
    """Return the ids that a model's config has as placeholders of images, videos or sounds."""
    names = (f"{medium}_token_{suffix}" for medium in _MEDIA for suffix in ("id", "index"))
    return frozenset().union(*(_ids(getattr(config, name, None)) for name in names))


def special_ids(config: Any, tokenizers: Iterable[Any]) -> frozenset[int]:
    """Return the ids of tokens that are no words, such as [CLS], [SEP] and placeholders of images.

    The ids of the unknown token and of the mask are not included, because they stand for words:
    in a masked language model, the last layers have a gradient only at masks.

    Args:
        config: the model's config. The config of a BERT does not list special tokens.
        tokenizers: Hugging Face tokenizers, or None. All of their special ids count.
    """
    ids = {*placeholder_ids(config)}
    for source in (config, *tokenizers):
        for mark in _MARKS:
            ids |= _ids(getattr(source, f"{mark}_token_id", None))
        word_ids = [_ids(getattr(source, f"{name}_token_id", None)) for name in ("mask", "unk")]
        ids |= _ids(getattr(source, "all_special_ids", None)).difference(*word_ids)
    return frozenset(ids)


def _ids(value: Any) -> set[int]:
    """Return the non-negative integers that a config's value is or lists."""
    values = value if isinstance(value, (list, tuple)) else [value]
    return {i for i in values if isinstance(i, int) and not isinstance(i, bool) and i >= 0}
