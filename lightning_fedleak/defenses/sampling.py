"""How the batches of DP-SGD are drawn: a loader, and what it means for the account."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader

from lightning_fedleak.defenses.accounting import Trust
from lightning_fedleak.defenses.base import DefenseContext
from lightning_fedleak.defenses.dpsgd_checks import sizes_of, unsharded
from lightning_fedleak.defenses.poisson import (
    PoissonBatchSampler,
    checked_loader,
    is_sharded,
    poisson_loader,
)


@dataclass(frozen=True)
class Sampling:
    """A loader for DP-SGD.

    Attributes:
        loader: gives the batches.
        rate: chance of each example to be in a batch, as it is to be accounted.
        expected: number of examples by which a clipped sum is divided.
        examples: of all clients.
    """

    loader: DataLoader[Any]
    rate: float
    expected: float
    examples: int


def sampling_of(
    dataloader: Any,
    context: DefenseContext,
    *,
    poisson: bool,
    trust: Trust,
    entropy: bytes,
    first_step: int,
) -> Sampling:
    """The loader to train with instead of ``dataloader``.

    Args:
        dataloader: as Lightning has prepared it.
        context: where.
        poisson: sample batches by chance; otherwise the loader's own are taken, and each example is
            accounted as if it were in all of them.
        trust: see :class:`~lightning_fedleak.defenses.dpsgd.DPSGD`.
        entropy: secret bytes that the samples follow from.
        first_step: number of the first batch.

    Raises:
        DefenseError: a loader that cannot be sampled.
    """
    examples, batch_size = sizes_of(dataloader)
    replicas = getattr(getattr(dataloader, "sampler", None), "num_replicas", 1)
    if context.clients > 1 and not is_sharded(dataloader):
        warnings.warn(unsharded(context.clients, trust), stacklevel=3)
    if not poisson:
        return Sampling(checked_loader(dataloader), 1.0, float(batch_size), examples)
    rate = min(1.0, batch_size / max(1, examples // replicas))
    loader = poisson_loader(
        dataloader,
        rate,
        client=context.client,
        clients=context.clients,
        entropy=entropy,
        first_step=first_step,
    )
    assert isinstance(loader.batch_sampler, PoissonBatchSampler)
    expected = rate * len(loader.batch_sampler.shard)
    if trust == "central" and context.clients > 1:
        # The same on all clients: shards differ in size, and with them rate * size.
        expected = float(batch_size)
    return Sampling(loader, rate, expected, examples)


__all__ = ["Sampling", "sampling_of"]
