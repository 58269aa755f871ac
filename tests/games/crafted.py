"""Gradients of crafted layers that are really inserted."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.defenses.crafted import craft
from benchmarks.defenses.planted import inserted
from lightning_fedleak.attacks.membership.base import (
    MembershipAttack,
)
from lightning_fedleak.model.anatomy import Anatomy
from lightning_fedleak.model.model_runs import undisturbed


def autograd_gradient(
    anatomy: Anatomy, attack: MembershipAttack, target: Tensor, ids: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Gradients of the biases (K,) and of the outputs (B, R) of really inserted crafted layers."""
    crafted, outputs = craft(attack, target), []
    bias = crafted.get_parameter("bias")
    inputs = {"input_ids": ids} | ({} if mask is None else {"attention_mask": mask})
    with (
        crafted.register_forward_hook(lambda _, args, output: outputs.append(output)),
        inserted(anatomy, attack.layer, crafted, mask=mask),
        undisturbed(anatomy) as model,
        torch.enable_grad(),
    ):
        output = model(**inputs)
        chances = getattr(output, "logits", output).log_softmax(-1)[..., 5]
        loss = chances.mean() if mask is None else (chances * mask).sum() / mask.sum()
        gradient, upstream = torch.autograd.grad(loss, [bias, outputs[-1]])
    return gradient, upstream[..., 0]
