"""The parts of a language model: embeddings, blocks and output head, and their parameters.

:class:`Anatomy` holds the modules, :func:`~lightning_fedleak.model.anatomy.find_anatomy` finds
them. A parameter that attacks read has a *role*, a name that is the same in every model:
``"head.weight"``, ``"head.bias"`` or ``"embedding.weight"``. The *surface* of the head is the
trained matrix whose gradient shows tokens: the head's weight, or the factor B of a LoRA on it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_fedleak.model.anatomy.wrappers import leaf

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
