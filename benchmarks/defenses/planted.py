"""DP-SGD on a model in which a crafted neuron is really inserted: the game of ``dp_sgd``.

Outside of Lightning, by the hooks that a strategy calls, in its order. The neuron fires on one
token's hidden state alone, its bias is all that is trained, and the clip norm lies below its
gradient: so the target takes the whole of it, and nothing else takes a share.
"""

import hashlib
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.defenses.crafted import CraftedFC, TwoIdentities
from lightning_fedleak.attacks.membership.base import direction_of
from lightning_fedleak.defenses import DPSGD, DefenseContext
from lightning_fedleak.defenses.dpsgd.poisson import PoissonBatchSampler
from lightning_fedleak.model.anatomy import Anatomy, find_anatomy, place_of
from lightning_fedleak.model.model_runs import hidden_states


@contextmanager
def inserted(
    anatomy: Anatomy, layer: int, crafted: nn.Module, *, scale: float = 1e-3,
    mask: Tensor | None = None,
) -> Iterator[None]:  # fmt: skip
    """Let a model add crafted layers' output to its hidden states at a layer, within the context.

    Args:
        anatomy: of the model, whose child the layers become.
        layer: block whose output they read and change, 0 for the embeddings.
        crafted: as ``craft`` returns them.
        scale: factor of what is added.
        mask: (B, L) of all batches, 0 where padded.
    """

    def add(states: Tensor) -> Tensor:
        z = crafted(states, mask)
        added = z.sum(-1, keepdim=True).expand(-1, states.shape[1], -1)
        if mask is not None:
            added = added * (mask != 0)[..., None].to(added.dtype)
        direction = direction_of(states.shape[-1]).to(added)
        return states + (scale * added * direction).to(states.dtype)

    anatomy.model.add_module("crafted", crafted)
    handle = place_of(anatomy, layer).on_states(add)
    try:
        yield
    finally:
        handle.remove()
        del anatomy.model._modules["crafted"]


class PlantedNeuron:
    """Releases of DP-SGD with and without the target, along the neuron's bias.

    The target is the last example. Every release runs the model forward and backward on a batch
    that DP-SGD's own sampler drew, and clips, noises and accounts it as in training.

    Args:
        model: a language model in train mode without dropout; crafted layers are inserted, the rest
            is frozen.
        ids: (N, L) token ids of the examples, without padding, N at least 2. The last token of the
            last one is told from all others by its hidden state.
        defense: makes a new DPSGD; called twice, for the run with the target and the one without.
        sample_rate: chance of an example to be in a batch, a whole number of N-ths, as a loader
            has it; 1: inclusion is given.
        layer: of the hidden states that the neuron reads.
        seed: of the entropy that the defences get as from a fit, for releases that can be repeated
            although their epsilon is finite. None: the operating system's.

    Attributes:
        gradient: the neuron's gradient of the target's own loss, before clipping.
        defenses: of the runs without and with the target.

    Raises:
        ValueError: the target is not alone in its neuron, or its gradient is below the clip norm.
    """

    def __init__(
        self, model: nn.Module, ids: Tensor, defense: Callable[[], DPSGD], *,
        sample_rate: float = 1.0, layer: int = 1, seed: int | None = None,
    ) -> None:  # fmt: skip
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        anatomy = find_anatomy(model)
        hidden = hidden_states(anatomy, layer, ids).double()
        target = hidden[-1, -1]
        distances = (hidden.flatten(0, 1) - target).abs().sum(1)[:-1]
        tau = float(distances.min()) / 2
        first = TwoIdentities(target.float(), torch.tensor(0.0))
        second = torch.full((1, 2 * len(target)), -1.0)
        crafted = CraftedFC(first, second, torch.tensor([tau]), None)
        self._insertion = inserted(anatomy, layer, crafted, scale=1.0)
        self._insertion.__enter__()
        self._bias = crafted.bias
        self._root = model
        self._label = torch.tensor([int(ids[0, 0])])
        self.gradient = float(torch.autograd.grad(self._loss(ids[-1:]), self._bias)[0])
        other_gradient = float(torch.autograd.grad(self._loss(ids[:-1]), self._bias)[0])
        if other_gradient or not tau:
            raise ValueError("another token's hidden state is too near to the target's")
        self.defenses = (defense(), defense())
        clip = self.defenses[0].max_grad_norm
        if abs(self.gradient) < clip:
            below = f"the target's gradient {self.gradient:.3g} is below max_grad_norm={clip:g}"
            raise ValueError(f"{below}: lower the latter")
        self._scale = math.copysign(clip, self.gradient)
        self._data = (ids[:-1], ids)
        batch = [max(1, round(sample_rate * len(data))) for data in self._data]
        # Each run has entropy of its own: with one they would draw the same noise.
        self._contexts = [
            DefenseContext(model, 0, 1, ids.device, "32-true", 0, _entropy(seed, world))
            for world in range(2)
        ]
        self._samplers: list[PoissonBatchSampler] = []
        for world, data in enumerate(self._data):
            loader = DataLoader(TensorDataset(data), batch_size=batch[world])
            self.defenses[world].before_setup(self._contexts[world])
            sampled = self.defenses[world].on_dataloader(loader, self._contexts[world])
            self.defenses[world].teardown()
            assert isinstance(sampled.batch_sampler, PoissonBatchSampler)
            self._samplers.append(sampled.batch_sampler)
        self._hooked: int | None = None

    def release(self, member: bool) -> float:
        """One release along the target's direction, over the clip norm."""
        world = int(member)
        defense, sampler = self.defenses[world], self._samplers[world]
        context = self._contexts[world]
        if self._hooked != world:
            self.close()
            defense.before_setup(context)
            self._hooked = world
        sample = sampler.draw(sampler.step)
        sampler.step += 1
        batch = self._data[world][sample]
        self._root.zero_grad()
        loss = defense.on_training_step(lambda: self._loss(batch), {"input_ids": batch}, context)
        loss.backward()
        defense.before_release()
        with torch.no_grad():
            defense.on_gradients([self._bias], context)
        assert self._bias.grad is not None
        released = float(self._bias.grad)
        expected = sampler.rate * len(sampler.shard)
        return released * expected / self._scale

    def close(self) -> None:
        """Takes the hooks of the current run out; the next release puts them in again."""
        if self._hooked is not None:
            self.defenses[self._hooked].teardown()
            self._hooked = None

    def _loss(self, ids: Tensor) -> Tensor:
        logits = self._root(input_ids=ids).logits[:, -1]
        return F.cross_entropy(logits, self._label.expand(len(ids)))


def _entropy(seed: int | None, world: int) -> bytes:
    if seed is None:
        return os.urandom(32)
    return hashlib.sha256(f"planted neuron {seed} {world}".encode()).digest()
