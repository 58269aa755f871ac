"""Where a model keeps its embeddings, blocks, output head and trainable parameters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

HEAD_WEIGHT = "head.weight"
HEAD_BIAS = "head.bias"
EMBEDDING_WEIGHT = "embedding.weight"

Kind = Literal["causal", "masked", "seq2seq", "classifier"]


class AnatomyError(ValueError):
    """A part of the model could not be found; says what was looked for and how to name it."""


@dataclass(frozen=True)
class Anatomy:
    """The parts of one model. Modules are the live ones of the run, never copies.

    Attributes:
        root: the module that was searched, usually the LightningModule.
        model: the language model inside it, callable with ``input_ids``, unwrapped from
            torch.compile and DDP.
        kind: what the labels mean: next tokens, masked tokens, a decoder's tokens, classes.
        embedding: input embeddings; ``embedding_name`` is its path in ``root``.
        head: the last linear layer, hidden states to logits; None for a model without one.
        blocks: transformer blocks in order, decoder's for an encoder-decoder.
        tied: whether head and embedding share one weight.
        vocab_size: rows of the head's weight, or of the embedding without a head.
        hidden_size: columns of the embedding.
        peft: kind of PEFT wrapping (``"LORA"``, ``"PROMPT_TUNING"``, ...), None without.
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
    hidden_size: int
    peft: str | None = None

    def parameter(self, role: str) -> nn.Parameter | None:
        """The live parameter of a role, or by its name in ``root``; None where it has none."""
        raise NotImplementedError

    def parameter_name(self, role: str) -> str | None:
        """The parameter's name in ``root.named_parameters()``."""
        raise NotImplementedError

    def trainable(self, role: str) -> bool:
        """Whether the role has a parameter and that parameter is trained."""
        raise NotImplementedError

    @contextmanager
    def undisturbed(self) -> Iterator[nn.Module]:
        """Yields ``model`` in eval mode; restores every module's mode and the global RNG after."""
        raise NotImplementedError
        yield self.model


def find_anatomy(
    root: nn.Module,
    *,
    model: str | nn.Module | None = None,
    embedding: str | nn.Module | None = None,
    head: str | nn.Module | None = None,
    blocks: str | None = None,
    kind: Kind | None = None,
) -> Anatomy:
    """Finds the parts of the language model inside ``root``. Every part can be given instead."""
    raise NotImplementedError


_ = Tensor
