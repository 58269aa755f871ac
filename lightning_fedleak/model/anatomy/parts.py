"""The parts of a language model: embeddings, blocks and output head, and their parameters.

:class:`Anatomy` holds the modules, :func:`~lightning_fedleak.model.anatomy.find_anatomy` finds
them. A parameter that attacks read has a *role*, a name that is the same in every model:
``"head.weight"``, ``"head.bias"`` or ``"embedding.weight"``. The *surface* of the head is the
trained matrix whose gradient shows tokens: the head's weight, or the factor B of a LoRA on it.

A module can be wrapped by torch.compile, DDP, DataParallel or FSDP, and its layers by PEFT. The
wrappers of torch have one child and are transparent: their child computes the same. A layer of PEFT
has several children, of which one is active. Wrappers are recognised by the children that they
register, so neither PEFT nor any distributed backend is imported.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import wraps
from inspect import Parameter, signature
from typing import Any, Literal

import torch
from torch import Tensor, nn

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


HEAD_WEIGHT = "head.weight"
HEAD_BIAS = "head.bias"
EMBEDDING_WEIGHT = "embedding.weight"

# The meaning of a model's labels, see ``Anatomy.kind``.
Kind = Literal["causal", "masked", "seq2seq", "classifier"]


class AnatomyError(ValueError):
    """A part of the model was not found; the message says how to name it."""


def where_whole(tensor: Tensor) -> torch.device:
    """Return the device on which layers compute with the whole of ``tensor``.

    It differs from the tensor's device if FSDP offloads a shard of it to the CPU.
    """
    mesh = getattr(tensor, "device_mesh", None)
    if mesh is None or mesh.device_type == tensor.device.type:
        return tensor.device
    device_type = mesh.device_type
    return torch.device(device_type, torch.get_device_module(device_type).current_device())


@dataclass(frozen=True, repr=False)
class Anatomy:
    """The parts of one model. The modules are those that the run trains, never copies.

    Attributes:
        root: the module that was searched, usually the LightningModule.
        model: the language model inside it, callable with ``input_ids``, unwrapped from
            torch.compile and DDP.
        kind: meaning of the labels: next tokens (``"causal"``), masked tokens, a decoder's tokens
            (``"seq2seq"``), or classes. The rows of a classifier's head are classes, so that the
            gradient of its head shows no words. A model without a head is a classifier too: its
            labels are no words.
        embedding: input embeddings (of the encoder, in an encoder-decoder), with their PEFT layer.
        embedding_name: path of ``embedding`` in ``root``.
        head: the last linear layer, from hidden states to logits, with its PEFT layer; None for a
            model without one.
        head_name: path of ``head`` in ``root``, or None.
        blocks: transformer blocks in order, those of the decoder for an encoder-decoder; empty if
            the model has no list of whole blocks.
        block_names: paths of ``blocks`` in ``root``.
        tied: whether the head's weight is also a matrix of input embeddings: the gradient is then
            the sum of both uses. In an encoder-decoder with two embeddings, the tied one may be the
            decoder's and not ``embedding``.
        vocab_size: rows of the head's weight, or of the embedding without a head; the number of
            classes of a classifier.
        embedding_rows: rows of the input embeddings: the number of ids that the model reads. It
            may differ from ``vocab_size``.
        hidden_size: columns of the embedding.
        peft: kind of PEFT wrapping (``"LORA"``, ``"PROMPT_TUNING"``, ...), or None.
        target_rows: size of the decoder's vocabulary if it differs from the encoder's (Marian with
            separate vocabularies), so that an id stands for different words in them. None if there
            is one vocabulary.
    """

    root: nn.Module
    model: nn.Module
    kind: Kind
    embedding: nn.Module
    embedding_name: str
    head: nn.Module | None
    head_name: str | None
    blocks: tuple[nn.Module, ...]
    block_names: tuple[str, ...]
    tied: bool
    vocab_size: int
    embedding_rows: int
    hidden_size: int
    peft: str | None = None
    target_rows: int | None = None

    def _role(self, role: str) -> tuple[nn.Module | None, str | None, str] | None:
        """Return module, path and parameter name of a role; None for other names."""
        return {
            HEAD_WEIGHT: (self.head, self.head_name, "weight"),
            HEAD_BIAS: (self.head, self.head_name, "bias"),
            EMBEDDING_WEIGHT: (self.embedding, self.embedding_name, "weight"),
        }.get(role)

    def parameter(self, role: str) -> nn.Parameter | None:
        """Return the current parameter of a role, or with this name in ``root``.

        For a layer under PEFT it is the active trainable copy (``modules_to_save``) or else the
        base weight, which LoRA and IA3 freeze.

        Args:
            role: ``"head.weight"``, ``"head.bias"``, ``"embedding.weight"`` (a role precedes a
                parameter of the same name), or a name in ``root.named_parameters()``.

        Returns:
            None if the model has no such part (a head without bias).

        Raises:
            AnatomyError: ``role`` is neither a role nor a parameter's name.
        """
        entry = self._role(role)
        if entry is None:
            return self._get_parameter(role)
        module, _, name = entry
        return None if module is None else leaf(module)._parameters.get(name)

    def _get_parameter(self, name: str) -> nn.Parameter:
        """Return the parameter with this name in ``root``, or raise ``AnatomyError``."""
        *path, parameter_name = name.split(".")
        module: nn.Module | None = self.root
        for child_name in path:  # three times as fast as get_submodule
            module = None if module is None else module._modules.get(child_name)
        # get_parameter would gather a sharded parameter within whole_model(as_read=True).
        parameter = None if module is None else module._parameters.get(parameter_name)
        if parameter is not None:
            return parameter
        raise AnatomyError(f"'{name}' is no role or parameter of {type(self.root).__name__}")

    def parameter_name(self, role: str) -> str | None:
        """Return the parameter's name in ``root.named_parameters(remove_duplicate=False)``.

        A tied matrix has several names; each role gets the one under its module.

        Raises:
            AnatomyError: ``role`` is neither a role nor a parameter's name.
        """
        parameter, entry = self.parameter(role), self._role(role)
        if entry is None or parameter is None:
            return role if entry is None else None
        parameters = self.root.named_parameters(remove_duplicate=False)
        names = [n for n, p in parameters if p is parameter]
        prefix = f"{entry[1]}." if entry[1] else ""
        return next((n for n in names if n.startswith(prefix)), names[0])

    def trainable(self, role: str) -> bool:
        """Return whether the role has a parameter and that parameter is trained.

        Raises:
            AnatomyError: ``role`` is neither a role nor a parameter's name.
        """
        parameter = self.parameter(role)
        return parameter is not None and parameter.requires_grad

    def trainable_names(self) -> tuple[str, ...]:
        """Return the names of the trained parameters of ``root``, each parameter once."""
        return tuple(n for n, p in self.root.named_parameters() if p.requires_grad)

    @property
    def device(self) -> torch.device:
        """Return the device of the input embeddings, where ``input_ids`` must be."""
        parameter = self.parameter(EMBEDDING_WEIGHT)
        if parameter is None:
            parameter = next(self.model.parameters())
        return where_whole(parameter)

    def __repr__(self) -> str:
        return (
            f"Anatomy({type(self.model).__name__}, kind={self.kind!r}, "
            f"embedding={self.embedding_name!r}, head={self.head_name!r}, "
            f"blocks={len(self.blocks)}, tied={self.tied}, peft={self.peft!r})"
        )


@dataclass(frozen=True)
class _HeadSurface:
    """The trained matrix of the head, which has a row for each of the V tokens.

    Attributes:
        role: The role of the parameter, or its name in ``anatomy.root``.
        projection: (r, d) LoRA's A times its scale, which multiplies hidden states before B; None
            if the matrix is the head's weight.
    """

    role: str
    projection: Tensor | None = None


def head_surface(anatomy: Anatomy) -> _HeadSurface:
    """Return the trained matrix of the head: its weight, or the B of a LoRA on it."""
    adapter = head_adapter(anatomy)
    if adapter is None or anatomy.trainable(HEAD_WEIGHT) or not adapter[0].requires_grad:
        return _HeadSurface(HEAD_WEIGHT)
    b, projection = adapter
    name = next(n for n, p in anatomy.root.named_parameters() if p is b)
    return _HeadSurface(name, projection)


def head_adapter(anatomy: Anatomy) -> tuple[nn.Parameter, Tensor] | None:
    """Return B (V, r) of a LoRA on the head, and its A (r, d) times LoRA's scale; or None."""
    head: Any = anatomy.head  # a PEFT layer has attributes that nn.Module lacks
    if not isinstance(getattr(head, "lora_B", None), nn.ModuleDict):
        return None
    for name in head.active_adapters:
        if name in head.lora_B:
            b, a = (f[name]._parameters.get("weight") for f in (head.lora_B, head.lora_A))
            return b, head.scaling[name] * a.detach().float()
    return None
