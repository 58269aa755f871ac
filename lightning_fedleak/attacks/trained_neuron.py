"""A small network trained to fire on one vector and on nothing else (Nguyen et al. 2023).

One hidden layer of ReLUs and one output. Logistic loss with the target weighing as much as all
public samples together, Adam, the same as in the published attack; gradients written out, so that
no autograd graph, mode or random state of the caller takes part.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

_TWINS = 1e-2
_CHECKED_EVERY = 5


@dataclass(frozen=True)
class Scale:
    """Mean and spread of each coordinate of public samples, (D,) each."""

    mean: Tensor
    spread: Tensor

    @classmethod
    def of(cls, public: Tensor) -> Scale:
        """Of samples (N, D); coordinates that hardly vary count as varying a tenth of the usual."""
        spread = public.std(0, correction=0)
        floor = 0.1 * spread.mean()
        return cls(public.mean(0), spread.clamp(min=floor if float(floor) > 0 else 1.0))

    def __call__(self, rows: Tensor) -> Tensor:
        """Rows less the mean, in units of the spread."""
        return (rows - self.mean) / self.spread


@dataclass(frozen=True)
class Neuron:
    """A trained network, its scaling of the inputs folded in.

    Attributes:
        weight: (h, D) of the hidden layer.
        bias: (h,) of the hidden layer.
        second: (1, h) of the output.
        offset: () bias of the output: it fires above 0.
        on_target: () output on the target.
        on_public: () largest output on public samples.
        steps: of training.
    """

    weight: Tensor
    bias: Tensor
    second: Tensor
    offset: Tensor
    on_target: Tensor
    on_public: Tensor
    steps: int

    def __call__(self, rows: Tensor) -> Tensor:
        """(N,) outputs before the last bias is added, for rows (N, D)."""
        return outputs_of([self.weight, self.bias, self.second], rows)

    @property
    def nbytes(self) -> int:
        """Bytes of the weights."""
        return self.weight.nbytes + self.bias.nbytes + self.second.nbytes


@torch.no_grad()
def train_neuron(
    target: Tensor,
    public: Tensor,
    scale: Scale,
    generator: torch.Generator,
    *,
    hidden_units: int,
    steps: int,
    learning_rate: float,
    margin: float,
    batch: int,
) -> Neuron:
    """Trains until the target's output is above ``margin`` and all public ones below ``-margin``.

    Args:
        target: (D,), float32 or float64.
        public: (N, D). Those within 1% of the target (in L1) are left out: the same prefix in a
            causal model, say.
        scale: of the public samples.
        generator: on the CPU; of all that is random here.
        hidden_units: width of the hidden layer.
        steps: at most.
        learning_rate: Adam's.
        margin: see above; 0 stops as soon as they are separated.
        batch: public samples in a step; all of them where there are no more.
    """
    twins = (public - target).abs().sum(1) < _TWINS * target.abs().sum()
    samples, wanted = scale(public[~twins]), scale(target[None])
    parameters = _initial(samples.shape[1], hidden_units, generator, target)
    adam = Adam(parameters, learning_rate)
    done = 0
    for rows in _batches(samples, batch, steps, generator):
        x = torch.cat([wanted, rows])
        outputs, gradients = loss_gradients(parameters, x)
        if done % _CHECKED_EVERY == 0 and _separated(outputs, margin):
            every = outputs_of(parameters, torch.cat([wanted, samples]))
            if _separated(every, margin):
                break
        adam.step(gradients)
        done += 1
    weight, bias, second, offset = parameters
    folded = [weight / scale.spread, bias - weight @ (scale.mean / scale.spread), second, offset]
    others = public[~twins]
    on_target = outputs_of(folded, target[None])[0]
    return Neuron(
        weight=folded[0],
        bias=folded[1],
        second=second,
        offset=offset[0],
        on_target=on_target,
        on_public=outputs_of(folded, others).max() if len(others) else on_target - 1,
        steps=done,
    )


def outputs_of(parameters: list[Tensor], x: Tensor) -> Tensor:
    """(n,) outputs for inputs (n, D) of [W1 (h, D), b1 (h,), W2 (1, h)] and, if given, b2 (1,)."""
    weight, bias, second, *offset = parameters
    outputs = (F.relu(F.linear(x, weight, bias)) @ second.T)[:, 0]
    return outputs + offset[0] if offset else outputs


def loss_gradients(parameters: list[Tensor], x: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Outputs (n,), and the gradient of ``softplus(-z_0) + mean softplus(z_1...)``.

    The first row of ``x`` is the target, the others are public samples.
    """
    weight, bias, second, offset = parameters
    active = F.relu(F.linear(x, weight, bias))
    outputs = (active @ second.T)[:, 0] + offset
    slope = outputs.sigmoid()
    slope[0] -= 1.0
    slope[1:] /= max(1, len(x) - 1)
    back = slope[:, None] * second * (active > 0)
    return outputs, [back.T @ x, back.sum(0), (slope @ active)[None], slope.sum()[None]]


class Adam:
    """Adam with its usual constants, in place.

    Args:
        parameters: what is stepped.
        learning_rate: its rate.
    """

    def __init__(self, parameters: list[Tensor], learning_rate: float) -> None:
        self.parameters, self.learning_rate, self.t = parameters, learning_rate, 0
        self.first = [torch.zeros_like(p) for p in parameters]
        self.second = [torch.zeros_like(p) for p in parameters]

    def step(self, gradients: list[Tensor]) -> None:
        """One step along ``gradients``, one for each parameter."""
        self.t += 1
        rate = self.learning_rate / (1 - 0.9**self.t)
        unbias = (1 - 0.999**self.t) ** -0.5
        moments = zip(self.parameters, gradients, self.first, self.second, strict=True)
        for p, g, m, v in moments:
            m.lerp_(g, 0.1)
            v.mul_(0.999).addcmul_(g, g, value=0.001)
            p.addcdiv_(m, v.sqrt().mul_(unbias).add_(1e-8), value=-rate)


def _initial(d: int, h: int, generator: torch.Generator, like: Tensor) -> list[Tensor]:
    """As ``nn.Linear`` begins: uniform within one over the square root of the inputs."""

    def uniform(*shape: int, fan_in: int) -> Tensor:
        drawn = torch.empty(shape).uniform_(-1.0, 1.0, generator=generator)
        return drawn.mul_(fan_in**-0.5).to(like)

    return [
        uniform(h, d, fan_in=d),
        uniform(h, fan_in=d),
        uniform(1, h, fan_in=h),
        uniform(1, fan_in=h),
    ]


def _batches(
    samples: Tensor, batch: int, steps: int, generator: torch.Generator
) -> Iterator[Tensor]:
    for _ in range(steps):
        if batch >= len(samples):
            yield samples
        else:
            chosen = torch.randint(len(samples), (batch,), generator=generator)
            yield samples[chosen.to(samples.device)]


def _separated(outputs: Tensor, margin: float) -> bool:
    return bool((outputs[0] > margin) & (outputs[1:] < -margin).all())


__all__ = ["Adam", "Neuron", "Scale", "loss_gradients", "outputs_of", "train_neuron"]
