"""How DP-SGD draws batches: the loader that it trains with, and the sample rate to account."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch.utils import data

from lightning_fedleak.defenses.accounting.accounting import Trust
from lightning_fedleak.defenses.base import DefenseContext, DefenseError, refuse
from lightning_fedleak.defenses.dpsgd import poisson
from lightning_fedleak.defenses.dpsgd.settings import Users
from lightning_fedleak.defenses.dpsgd.users import check_documents, check_order, rows_by_user

LOADING = (
    *("num_workers", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context"),
    *("generator", "prefetch_factor", "persistent_workers"),
)
"""Settings of a DataLoader that the new one takes over."""


def sampling_of(
    dataloader: Any,
    context: DefenseContext,
    draws: poisson.Draws,
    *,
    trust: Trust,
    users: Users | None = None,
) -> poisson.Sampling:
    """Return the loader to train with instead of ``dataloader``.

    Examples or users are each in a batch with a chance of its mean size over their number.

    Args:
        dataloader: as Lightning has prepared it.
        context: client and process.
        draws: entropy and step. A dataset with a ``public_length`` is drawn from by that, not by
            its length.
        trust: in the server.
        users: None to draw examples.

    Raises:
        DefenseError: a loader that cannot be sampled, or one that yields an example in several
            processes of one client, or in several clients in one step; where users are drawn, one
            that does not keep the order of their rows.
    """
    check_torch_loader(dataloader)
    if context.clients > 1 and not is_sharded(dataloader):
        central = " trust='central' also needs the same batch_size and noise on all of them."
        warnings.warn(
            f"DPSGD: {context.clients} clients, and no DistributedSampler splits the training data "
            "among them: an example that several hold pays for each. Leave "
            "use_distributed_sampler=True, or let each process load data of its own."
            + (central if trust == "central" else ""),
            stacklevel=3,
        )
    if context.processes > 1:
        _check_shares(dataloader, context)
    dataset, batch_size = dataloader.dataset, dataloader.batch_size
    by_key = None if users is None else rows_by_user(dataset, users.group_by)
    population, absent = _population(dataset, by_key)
    replicas = getattr(getattr(dataloader, "sampler", None), "num_replicas", 1)
    share = max(1, population // replicas)
    rate = min(1.0, batch_size / share)
    loader = poisson_loader(
        dataloader,
        rate,
        draws,
        users=None if by_key is None else [*by_key.values()],
        rows_per_user=None if users is None else users.rows_per_user,
    )
    assert isinstance(loader.batch_sampler, poisson.PoissonBatchSampler)
    check_documents(loader, by_user=users is not None)
    if users is not None:
        check_order(loader)
    if trust == "central" and context.clients > 1:
        # The same on all clients: shards differ in size, and with them rate * size.
        expected = float(batch_size)
    elif context.processes == 1:
        expected = rate * (len(loader.batch_sampler.shard) + absent // replicas)
    else:
        expected = rate * population
    return poisson.Sampling(loader, rate, expected, population, by_key)


def _population(dataset: Any, by_key: Mapping[Any, Sequence[int]] | None) -> tuple[int, int]:
    """Return how many are drawn from, and how many of these the dataset lacks.

    Draws and counts follow from these numbers, which must not depend on an example. So a dataset
    that leaves some out has a ``public_length`` with them.
    """
    if by_key is not None:
        return len(by_key), 0
    size = len(dataset)
    population = getattr(dataset, "public_length", size)
    return population, population - size


def _check_shares(dataloader: Any, context: DefenseContext) -> None:
    """Raise an error where an example may be in the batches of two processes of one client.

    It would be clipped in each of them, and add more than the clip norm to their sum.
    """
    sampler = getattr(dataloader, "sampler", None)
    place = getattr(sampler, "num_replicas", 1), getattr(sampler, "rank", 0)
    if not is_sharded(dataloader) or place != (context.processes, context.process):
        raise DefenseError(
            f"DPSGD: with client='world' the {context.processes} processes are one client, and no "
            "DistributedSampler splits the training data among them, so that an example may be "
            "twice in the sum. Leave use_distributed_sampler=True."
        )


def poisson_loader(
    loader: data.DataLoader[Any],
    rate: float,
    draws: poisson.Draws,
    *,
    users: Sequence[Sequence[int]] | None = None,
    rows_per_user: int | None = None,
) -> data.DataLoader[Any]:
    """Return a loader's dataset, collate function and workers with Poisson sampling.

    An epoch has ``round(1 / rate)`` batches: each example is drawn once in it on average.

    Where a DistributedSampler splits the dataset (Lightning adds one under DDP) the shard is this
    process's part, without shuffling and without the examples that it repeats to make shards equal
    in size: each example belongs to exactly one process. Otherwise the shard is the whole dataset.
    Processes with different shards draw different masks, of one client or of several.

    Args:
        loader: with a map-style dataset and a sampler of torch's own.
        rate: chance of each example to be in a batch, in (0, 1]; mean batch size over size of the
            shard.
        draws: entropy and client.
        users: the rows of every user, where users are drawn; then the rate is that of a user, and
            processes share users.
        rows_per_user: of one user in a batch; None for all.

    Returns:
        A new DataLoader; its ``batch_sampler`` is a :class:`PoissonBatchSampler`.

    Raises:
        DefenseError: a loader whose sampling cannot be replaced without changing what it loads, or
            a value out of range; says what to change.
    """
    check_torch_loader(loader)
    dataset: Any = loader.dataset
    _check_fetches_none(loader)
    shard, steps = _shard(loader), max(1, round(1 / rate))
    if users is not None:
        shard = range(shard.start, len(users), shard.step)
    if not shard:
        count = len(dataset) if users is None else len(users)
        raise DefenseError(
            f"client {draws.client} has no {'examples' if users is None else 'users'}: there are "
            f"{count} for all clients. Use fewer clients or more data."
        )
    if users is None:
        sampler, first = poisson.PoissonBatchSampler(shard, rate, steps, draws), shard[0]
    else:
        sampler = poisson.UserBatchSampler(users, shard, rows_per_user, rate, steps, draws)
        first = users[shard[0]][0]
    loading = {name: getattr(loader, name) for name in LOADING}
    collate = poisson.EmptyCollate(loader.collate_fn, loader.dataset, first)
    return data.DataLoader(loader.dataset, batch_sampler=sampler, collate_fn=collate, **loading)


def is_sharded(loader: Any) -> bool:
    """Return whether a loader's sampler splits the dataset among processes."""
    return isinstance(getattr(loader, "sampler", None), data.DistributedSampler)


def check_torch_loader(loader: data.DataLoader[Any]) -> None:
    """Raise an error for a loader whose examples cannot be drawn one by one.

    Raises:
        DefenseError: says what to change.
    """
    dataset = getattr(loader, "dataset", None)
    batches = getattr(loader, "batch_sampler", None)
    refusals = {
        f"a {type(loader).__name__} is no torch DataLoader: return one from `train_dataloader`": (
            not isinstance(loader, data.DataLoader)
        ),
        f"{type(loader).__name__} makes batches in an `__iter__` of its own: use a plain "
        "DataLoader": getattr(type(loader), "__iter__", None) is not data.DataLoader.__iter__,
        f"{type(dataset).__name__} is no map-style dataset: load it into one, with `__len__` and "
        "`__getitem__`": isinstance(dataset, data.IterableDataset)
        or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")),
        f"the batch sampler {type(batches).__name__} is not torch's own: give the DataLoader a "
        "batch_size and single examples": (
            type(batches) is not data.BatchSampler or loader.batch_size is None
        ),
    }
    refuse("DP-SGD draws each example independently, for which it must know the loader; ", refusals)


def _check_fetches_none(loader: data.DataLoader[Any]) -> None:
    """Raise an error unless a dataset that fetches several examples at once can fetch none."""
    fetch = getattr(loader.dataset, "__getitems__", list)
    try:
        count: object = len(fetch([]))
    except Exception as error:
        count = error
    if count:
        raise DefenseError(
            f"`{type(loader.dataset).__name__}.__getitems__([])` gives {count!r}: a Poisson batch "
            "may be empty, so let it return an empty list."
        )


def _shard(loader: data.DataLoader[Any]) -> range:
    """Return the indices of this process's examples, each of which is in the dataset once."""
    dataset: Any = loader.dataset
    if isinstance(dataset, data.Subset | data.ConcatDataset):
        _check_once(dataset)
    size, sampler = len(dataset), loader.sampler
    # Of these classes exactly: one derived from them may choose or repeat any examples.
    if type(sampler) is data.DistributedSampler and sampler.dataset is dataset:
        return range(sampler.rank, size, sampler.num_replicas)
    shuffles = type(sampler) is data.RandomSampler and not sampler.replacement
    plain = shuffles and sampler.num_samples == size  # type: ignore[attr-defined]
    if not plain and type(sampler) is not data.SequentialSampler:
        inner = getattr(getattr(sampler, "dataset", None), "_sampler", sampler)
        raise DefenseError(
            f"the sampler {type(inner).__name__} chooses examples in its own way, and DP-SGD draws "
            "each independently. Use shuffle=True; for a part of the data torch.utils.data.Subset."
        )
    return range(size)


def _check_once(dataset: data.Dataset[Any]) -> None:
    """Raise an error where a Subset or ConcatDataset has an example at two places."""
    sources, places = _origins(dataset)
    order = np.lexsort((places, sources))
    repeated = (np.diff(sources[order]) == 0) & (np.diff(places[order]) == 0)
    if repeated.any():
        raise DefenseError(
            f"{int(repeated.sum())} of the {len(places)} places in the dataset hold an example "
            "that is at another place too, and would pay several times. Let each occur once, and "
            "train for more epochs."
        )


def _origins(dataset: Any) -> tuple[Any, Any]:
    """Return for each place the identity of the example's dataset, and its place there.

    Subset and ConcatDataset are resolved.
    """
    if isinstance(dataset, data.ConcatDataset):
        parts = [_origins(part) for part in dataset.datasets]
        return np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts])
    if isinstance(dataset, data.Subset):
        indices = np.asarray(dataset.indices)
        if indices.dtype.kind not in "iu":  # keys, or an empty list
            _, places = np.unique(indices, return_inverse=True)
            return np.full(len(indices), id(dataset.dataset), dtype=np.int64), places
        sources, places = _origins(dataset.dataset)
        return sources[indices], places[indices]
    size = len(dataset)
    return np.full(size, id(dataset), dtype=np.int64), np.arange(size)
