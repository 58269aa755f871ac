"""Keeps the output head or the input embeddings out of training, and so out of the update."""

from __future__ import annotations

from typing import Literal

from torch import nn

from lightning_fedleak.anatomy import Anatomy, AnatomyError, find_anatomy
from lightning_fedleak.anatomy.wrappers import matrix_shape
from lightning_fedleak.defenses.base import Defense, DefenseContext, DefenseError

Part = Literal["head", "embeddings", "head+embeddings"]
_PARTS: tuple[Part, ...] = ("head", "embeddings", "head+embeddings")


class Freeze(Defense):
    """Freezes the output head (with its bias), the input word embeddings, or both.

    Word recovery from the head's or the embeddings' gradient then has nothing to read. The
    gradients of all other parameters leave the client as before. Adapters that sit inside a
    frozen part (LoRA on the head, say) are frozen with it. Parameters that are trainable when
    the fit ends get back what they were when it began.

    Args:
        part: what to freeze.

    Raises:
        DefenseError: an unknown part; at setup, a model without that part, a tied matrix of
            which one role alone was named, or a model with nothing left to train; in a step, a
            part that something else has unfrozen meanwhile.
    """

    name = "freeze"
    guarantee = (
        "against whoever sees shared updates: the frozen parameters have no gradient and are not "
        "in the update. None for what the other parameters' gradients reveal."
    )

    def __init__(self, part: Part) -> None:
        if part not in _PARTS:
            listed = ", ".join(repr(name) for name in _PARTS)
            raise DefenseError(f"Freeze: part={part!r} is unknown; it must be one of {listed}")
        self.part = part
        self._frozen: list[nn.Parameter] = []
        self._kept_frozen: dict[str, nn.Parameter] = {}

    def before_setup(self, context: DefenseContext) -> None:
        """Freezes before optimizer and DDP see the parameters."""
        try:
            anatomy = find_anatomy(context.root)
        except AnatomyError as error:
            raise DefenseError(f"Freeze({self.part!r}): {error}") from error
        frozen = self._choose(anatomy)
        if not any(p.requires_grad and id(p) not in frozen for p in context.root.parameters()):
            raise DefenseError(
                f"Freeze({self.part!r}) leaves nothing to train: no trainable parameter of this "
                "model lies outside the frozen part. Train more of the model, or drop the defence."
            )
        for parameter in frozen.values():
            if parameter.requires_grad:
                parameter.requires_grad_(False)
                self._frozen.append(parameter)
        self._kept_frozen = {n: p for n, p in context.root.named_parameters() if id(p) in frozen}

    def before_release(self) -> None:
        """Refuses a step in which something has unfrozen the part: a schedule, say."""
        unfrozen = [name for name, p in self._kept_frozen.items() if p.requires_grad]
        if unfrozen:
            raise DefenseError(
                f"Freeze({self.part!r}): something has unfrozen {', '.join(unfrozen)} since "
                "training began, so the update was not released. Drop the defence, or whatever "
                "unfreezes layers (a callback like BackboneFinetuning?)."
            )

    def teardown(self) -> None:
        """Makes trainable again what it froze."""
        for parameter in self._frozen:
            parameter.requires_grad_(True)
        self._frozen = []
        self._kept_frozen = {}

    def _choose(self, anatomy: Anatomy) -> dict[int, nn.Parameter]:
        """Parameters of the part, by identity."""
        head = _parameters([] if anatomy.head is None else [anatomy.head])
        embeddings = _parameters(_word_embeddings(anatomy))
        if self.part != "embeddings" and not head:
            raise DefenseError(
                f"Freeze({self.part!r}): this model has no output head with parameters; it could "
                "be frozen only with Freeze('embeddings')."
            )
        if self.part != "head" and not embeddings:
            raise DefenseError(
                f"Freeze({self.part!r}): the input embeddings of this model have no parameters."
            )
        if self.part != "head+embeddings" and (anatomy.tied or head.keys() & embeddings.keys()):
            other = "embeddings" if self.part == "head" else "head"
            raise DefenseError(
                f"Freeze({self.part!r}): head and input embeddings of this model are one tied "
                f"matrix, so the {other} would be frozen too. Use Freeze('head+embeddings'), or "
                "untie them where the model can be: tie_word_embeddings=False in its config."
            )
        if self.part == "head":
            return head
        return embeddings if self.part == "embeddings" else head | embeddings


def _word_embeddings(anatomy: Anatomy) -> list[nn.Module]:
    """The input embeddings; of an encoder-decoder also the decoder's."""
    if anatomy.kind != "seq2seq":
        return [anatomy.embedding]
    shape = matrix_shape(anatomy.embedding)
    sizes = {anatomy.vocab_size, shape[0] if shape else 0}
    tables = (m for m in anatomy.model.modules() if isinstance(m, nn.Embedding))
    return [anatomy.embedding, *(m for m in tables if m.num_embeddings in sizes)]


def _parameters(modules: list[nn.Module]) -> dict[int, nn.Parameter]:
    return {id(p): p for module in modules for p in module.parameters()}
