"""How the batches of DP-SGD are drawn: a loader, and what it means for the account."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader

from lightning_fedleak.defenses.accounting import Trust
from lightning_fedleak.defenses.base import DefenseContext, DefenseError
from lightning_fedleak.defenses.dpsgd_checks import sizes_of, unsharded
from lightning_fedleak.defenses.poisson import (
    EmptyCollate,
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

    @property
    def drawn(self) -> int:
        """How many Poisson batches were drawn; a loader that follows goes on from there."""
        sampler = self.loader.batch_sampler
        return sampler.step if isinstance(sampler, PoissonBatchSampler) else 0

    def placeholder(self) -> Any:
        """A batch of one example that was not drawn and must not count."""
        assert isinstance(self.loader.collate_fn, EmptyCollate)
        return self.loader.collate_fn.placeholder()


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
        DefenseError: a loader that cannot be sampled, or one that gives an example to several
            processes of one client, or to several clients in one step.
    """
    examples, batch_size = sizes_of(dataloader)
    replicas = getattr(getattr(dataloader, "sampler", None), "num_replicas", 1)
    if context.clients > 1 and not is_sharded(dataloader):
        warnings.warn(unsharded(context.clients, trust), stacklevel=3)
    if context.processes > 1:
        _check_shares(dataloader, context)
    if not poisson:
        _check_repeats(dataloader, context)
        expected = float(batch_size * context.processes)
        return Sampling(checked_loader(dataloader), 1.0, expected, examples)
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
    shard = len(loader.batch_sampler.shard) if context.processes == 1 else examples
    expected = rate * shard
    if trust == "central" and context.clients > 1:
        # The same on all clients: shards differ in size, and with them rate * size.
        expected = float(batch_size)
    return Sampling(loader, rate, expected, examples)


def _check_shares(dataloader: Any, context: DefenseContext) -> None:
    """Refuses where an example may be in the batches of two processes of one client.

    It would be clipped in each of them, and add more than the clip norm to their sum.
    """
    sampler = getattr(dataloader, "sampler", None)
    place = getattr(sampler, "num_replicas", 1), getattr(sampler, "rank", 0)
    if not is_sharded(dataloader) or place != (context.processes, context.process):
        raise DefenseError(
            f"DPSGD: with client='world' the {context.processes} processes are one client, and no "
            "DistributedSampler splits the training data among them: an example that two of them "
            "hold would be clipped in each, and twice in the sum. Leave "
            "use_distributed_sampler=True."
        )


def _check_repeats(dataloader: Any, context: DefenseContext) -> None:
    """Refuses where a sampler that splits the data may give two processes an example in one step.

    It repeats the first at the end of an epoch, so that parts are alike in size. Two steps are both
    accounted, so for several clients an epoch of more than one does no harm.
    """
    if not is_sharded(dataloader) or (context.processes == 1 and len(dataloader) > 1):
        return
    sampler = dataloader.sampler
    if len(dataloader.dataset) % sampler.num_replicas and not sampler.drop_last:
        raise DefenseError(
            f"DPSGD: poisson=False takes the sampler's batches, which repeats examples because "
            f"{len(dataloader.dataset)} of them are not the same number for each of the "
            f"{sampler.num_replicas} processes. Use poisson=True, or leave examples out "
            "(DistributedSampler(drop_last=True), torch.utils.data.Subset)."
        )


__all__ = ["Sampling", "sampling_of"]
