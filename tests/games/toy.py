"""The simplest attack that a game can be played with, and tiny languages to play it in."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.defenses.planted import inserted
from lightning_fedleak.attacks.base import UnusableObservation
from lightning_fedleak.attacks.membership.base import (
    MembershipAttack,
    MembershipGuess,
    sentence_rows,
)
from lightning_fedleak.model.anatomy import Anatomy
from lightning_fedleak.model.model_runs import undisturbed


def autograd_gradient(
    anatomy: Anatomy, attack: MembershipAttack, target: Tensor, ids: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Gradients of the biases (K,) and of the outputs (B, R) of really inserted crafted layers."""
    crafted, outputs = attack.craft(target), []
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


class Near(nn.Module):
    """relu(bias - L1 distance to the target), for each token or the whole sentence."""

    def __init__(self, target: Tensor, bias: Tensor, tokens: int | None) -> None:
        super().__init__()
        self.register_buffer("target", target)
        self.bias = nn.Parameter(bias)
        self.tokens = tokens

    def forward(self, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
        rows = hidden if self.tokens is None else sentence_rows(hidden, mask, self.tokens)[:, None]
        distance = (rows - self.target).abs().sum(-1, keepdim=True)
        return (self.bias - distance).relu()


class ToyMembership(MembershipAttack):
    """Two rungs by L1 distance; says yes where the narrow one has a gradient."""

    default_name = "toy"

    def __init__(self, layer: int, granularity="token", tokens: int = 8, tau=(1e-6, 3.0), **kw):
        super().__init__(layer, granularity, tokens, **kw)
        self.tau = torch.tensor(tau, dtype=torch.float64)
        self.prepared = 0

    def prepare(self, anatomy) -> None:
        super().prepare(anatomy)
        self.prepared += 1

    @property
    def rungs(self) -> int:
        return len(self.tau)

    def craft(self, target: Tensor) -> nn.Module:
        whole = self.tokens if self.granularity == "full" else None
        return Near(target, self.tau.to(target), whole)

    def gradient(self, targets, hidden, mask, upstream):
        if self.granularity == "full":
            rows = sentence_rows(hidden, mask, self.tokens)[:, None]
        else:
            rows = hidden
            if mask is not None:
                upstream = upstream * mask
        distance = (rows[:, None] - targets[None, :, None]).abs().sum(-1)
        fires = distance[..., None] < self.tau.to(hidden)
        return (fires * upstream[:, None, :, None]).sum(2)

    def guess(self, gradient: Tensor, noise_std: float = 0.0) -> MembershipGuess:
        if not bool(gradient.isfinite().all()):
            raise UnusableObservation("not finite")
        return MembershipGuess(
            scores=(gradient != 0).sum(-1).double(), members=gradient[..., 0] != 0
        )
