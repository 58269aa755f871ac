"""The client's loss in a game, and its gradients in crafted layers inside the client's model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_fedleak.anatomy import Anatomy
from lightning_fedleak.attacks.membership.base import MembershipAttack
from lightning_fedleak.attacks.membership.insertion import Placement, insert
from lightning_fedleak.batches import IGNORE_INDEX, TokenBatch
from lightning_fedleak.games.pool import GameError
from lightning_fedleak.model_runs import predicting, undisturbed

Loss = Callable[[nn.Module, Tensor, Tensor | None], Tensor]
"""(model, ids (B, L), mask (B, L) or None) to a scalar; the mean over what it is computed on."""

RANDOM_HEAD_CLASSES = 8  # of the loss for a model without a head; not tuned


def default_loss(anatomy: Anatomy) -> Loss:
    """Return the loss that fine-tuning a model of this kind minimises.

    - Causal: cross-entropy of the next tokens.
    - Masked: cross-entropy of the batch's own tokens. None is masked, because the masks are the
      client's own random numbers, with which the server could not embed its target.
    - Classifier: cross-entropy of class i mod the number of classes for sentence i.
    - A model without a head, as encoders are published: the same with a fixed random linear head of
      8 classes over the mean of its last hidden states.

    Raises:
        GameError: when called, for an encoder-decoder or a model that returns neither logits nor
            hidden states.
    """

    def loss(model: nn.Module, ids: Tensor, mask: Tensor | None) -> Tensor:
        inputs = {"input_ids": ids} if mask is None else {"input_ids": ids, "attention_mask": mask}
        output = model(**inputs)
        logits, last = _output_tensor(output, "logits"), _output_tensor(output, "last_hidden_state")
        if logits is not None and logits.dim() == 3 and anatomy.kind in ("causal", "masked"):
            labels = ids if mask is None else ids.masked_fill(mask == 0, IGNORE_INDEX)
            values, targets = predicting(logits, TokenBatch(ids, labels, mask, anatomy.kind))
            return functional.cross_entropy(values, targets)
        if logits is None and last is not None:
            logits = _pooled(last, mask) @ _random_head(last)
        if logits is None or logits.dim() != 2:
            raise GameError(
                f"{type(model).__name__} has no loss that a game could use: pass loss=, a function "
                "of (model, ids, mask)"
            )
        labels = torch.arange(len(ids), device=logits.device) % logits.shape[1]
        return functional.cross_entropy(logits, labels)

    return loss


def _output_tensor(output: Any, name: str) -> Tensor | None:
    value = getattr(output, name, None)
    return value if isinstance(value, Tensor) else None


def _pooled(states: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        return states.mean(1)
    weight = mask.to(states)[..., None]
    pooled: Tensor = (states * weight).sum(1) / weight.sum(1)
    return pooled


def _random_head(states: Tensor) -> Tensor:
    d, generator = states.shape[-1], torch.Generator().manual_seed(0)
    head = torch.randn(d, RANDOM_HEAD_CLASSES, generator=generator, dtype=torch.float64)
    scaled: Tensor = head / d**0.5
    return scaled.to(states)


class _Blank(nn.Module):
    """Crafted layers that add nothing; they show the gradient that arrives at their output."""

    def __init__(self, whole_sentence: bool) -> None:
        super().__init__()
        self.whole_sentence = whole_sentence

    def forward(self, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return zeros, (B, L, 1), or (B, 1, 1) for whole sentences."""
        inputs = 1 if self.whole_sentence else hidden.shape[1]
        return hidden.new_zeros((len(hidden), inputs, 1), requires_grad=True)


def autograd_gradient(
    anatomy: Anatomy,
    attack: MembershipAttack,
    target: Tensor,
    ids: Tensor,
    mask: Tensor | None,
    placement: Placement,
    loss: Loss,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of ``attack.craft(target)`` inside the model, in eval mode.

    Args:
        anatomy: of the model, which is not changed.
        attack: the adversary.
        target: (D,).
        ids: (B, L).
        mask: (B, L) or None.
        placement: see :func:`~lightning_fedleak.attacks.membership.insertion.insert`.
        loss: the client's.

    Returns:
        The gradient of the rungs, (K,), and that of the crafted layers' output, the same for all
        rungs, (B, L), or (B, 1) for whole sentences.
    """
    crafted = attack.craft(target)
    bias = crafted.get_parameter("bias")
    with _output_of(crafted) as outputs, insert(anatomy, attack.layer, crafted, placement):
        gradient, upstream = _gradients(anatomy, ids, mask, loss, lambda: [bias, outputs[-1]])
    return gradient, upstream[..., 0]


def loss_upstream(
    anatomy: Anatomy,
    attack: MembershipAttack,
    ids: Tensor,
    mask: Tensor | None,
    placement: Placement,
    loss: Loss,
) -> Tensor:
    """Return the loss's gradient at the crafted output, (B, L), or (B, 1) for whole sentences.

    The layers inserted here add nothing, so the result is exact to first order in what crafted
    layers add.
    """
    blank = _Blank(attack.granularity == "full")
    with _output_of(blank) as outputs, insert(anatomy, attack.layer, blank, placement):
        (upstream,) = _gradients(anatomy, ids, mask, loss, lambda: [outputs[-1]])
    return upstream[..., 0]


@contextmanager
def _output_of(module: nn.Module) -> Iterator[list[Tensor]]:
    """Yield a list that collects what a module returns."""
    outputs: list[Tensor] = []
    handle = module.register_forward_hook(lambda _, args, output: outputs.append(output))
    try:
        yield outputs
    finally:
        handle.remove()


def _gradients(
    anatomy: Anatomy,
    ids: Tensor,
    mask: Tensor | None,
    loss: Loss,
    quantities: Callable[[], Sequence[Tensor]],
) -> tuple[Tensor, ...]:
    """Return gradients of the loss in what ``quantities`` returns once the model has run."""
    device = anatomy.device
    with undisturbed(anatomy) as model, torch.enable_grad():
        value = loss(model, ids.to(device), None if mask is None else mask.to(device))
        return torch.autograd.grad(value, quantities())


def generic_upstream(hidden: Tensor, whole_sentence: bool, generator: torch.Generator) -> Tensor:
    """Return random numbers of the size of a mean loss's gradients, none of them zero.

    Args:
        hidden: (B, L, d) of the batch.
        whole_sentence: one number for each sentence, (B, 1), in place of (B, L).
        generator: on the CPU.
    """
    shape = (hidden.shape[0], 1 if whole_sentence else hidden.shape[1])
    numbers = torch.randn(shape, generator=generator, dtype=torch.float64)
    smallest = torch.finfo(torch.float32).tiny ** 0.5
    numbers = torch.where(numbers.abs() < smallest, smallest, numbers) / numbers.numel()
    return numbers.to(torch.promote_types(hidden.dtype, torch.float32)).to(hidden.device)
