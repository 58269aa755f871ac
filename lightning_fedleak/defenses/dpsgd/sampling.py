"""How DP-SGD draws batches: the loader that it trains with, and the sample rate to account.

Users as the unit of privacy: the rows of each, and whether a batch keeps their order.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import data
from torch.utils.data import DataLoader, Subset

from lightning_fedleak.defenses.accounting.accounting import Trust
from lightning_fedleak.defenses.base import DefenseContext, DefenseError, refuse
from lightning_fedleak.defenses.dpsgd import poisson
from lightning_fedleak.defenses.dpsgd.poisson import EmptyCollate
from lightning_fedleak.defenses.dpsgd.recorder import tensors_of
from lightning_fedleak.defenses.dpsgd.settings import GroupBy, Users
from lightning_fedleak.model.batches import BatchError, read_batch
from lightning_fedleak.model.model_state import preserve_process

ORDERED = 8  # examples that show whether the collate function keeps their order. Not tuned
CANDIDATES = 64  # examples these are chosen from, to differ in length where any do. Not tuned


def rows_by_user(dataset: Any, group_by: GroupBy) -> dict[Any, list[int]]:
    """Return the rows of every user by key, in the order of each user's first row.

    Args:
        dataset: map-style.
        group_by: the name of a column, a function of an example, or one key for each row.

    Raises:
        DefenseError: a row without a key, or not one key for each row; names the column.
    """
    keys = _keys(dataset, group_by)
    if len(keys) != len(dataset):
        raise DefenseError(
            f"DPSGD: group_by gives {len(keys)} keys for {len(dataset)} rows; give one for each"
        )
    users: dict[Any, list[int]] = {}
    for row, key in enumerate(keys):
        try:
            user = _comparable(key)
            if user is not None:
                users.setdefault(user, []).append(row)
        except (TypeError, ValueError, RuntimeError) as error:  # also arrays, and pandas' NA
            raise DefenseError(
                f"DPSGD: row {row}'s {_key_name(group_by)} is a {type(key).__name__}, by which "
                "users cannot be compared; give a number or a string"
            ) from error
        if user is None:
            raise DefenseError(
                f"DPSGD: row {row} has no {_key_name(group_by)} (it is {key!r}), so its user is "
                "not known. Leave such rows out of the dataset, or give them a key."
            )
    return users


def _comparable(key: Any) -> Any:
    """Return a key by which users are compared; None for None, NaN, "" and what holds one of them.

    Raises:
        TypeError: it is equal to itself alone, or has no hash.
    """
    if isinstance(key, tuple | frozenset):
        parts = [_comparable(part) for part in key]
        kind = tuple if isinstance(key, tuple) else frozenset
        return None if any(part is None for part in parts) else kind(parts)
    key = key.item() if getattr(key, "shape", None) in ((), (1,)) else key
    by_identity: Any = object.__hash__
    if key is not None and type(key).__hash__ is by_identity:
        raise TypeError("equal to itself alone")
    missing = key is None or bool(key != key) or bool(key == "")
    return None if missing else key


def _key_name(group_by: GroupBy) -> str:
    return f"'{group_by}'" if isinstance(group_by, str) else "key (group_by)"


def _keys(dataset: Any, group_by: GroupBy) -> Sequence[Any]:
    if isinstance(dataset, Subset) and (isinstance(group_by, str) or callable(group_by)):
        inner = _keys(dataset.dataset, group_by)
        return [inner[i] for i in dataset.indices]
    if callable(group_by):
        return [group_by(dataset[row]) for row in range(len(dataset))]
    if not isinstance(group_by, str):
        ordered = hasattr(group_by, "__len__") and hasattr(group_by, "__getitem__")
        if not ordered or isinstance(group_by, Mapping):
            raise DefenseError(
                f"DPSGD: group_by is a {type(group_by).__name__}, whose keys have no order. Give "
                "the name of a column, a function of an example, or a list, a key a row."
            )
        return group_by
    if hasattr(dataset, "column_names"):
        column: Sequence[Any] = dataset[group_by]
        return column
    return [dataset[row][group_by] for row in range(len(dataset))]


def check_order(loader: DataLoader[Any]) -> None:
    """Raise an error for a dataset or collate function that changes the order of examples.

    The user of a row follows from its place. A few examples are collated twice in one order and
    once in another. Tensors that are equal in the first two must be reordered in the third, which
    depends on the collate function and not on the examples. Global random states do not change.

    Raises:
        DefenseError: it sorts or shuffles, or makes a row of several examples.
    """
    with preserve_process():
        places = _unlike(loader)
        count = len(places)
        # Sorting, reversing and rotating do not undo this order.
        order = [*range(1, count - 1), 0, count - 1] if count > 2 else [*range(count)][::-1]
        first, second, permuted = (
            _collated(loader, chosen) for chosen in (places, places, [places[i] for i in order])
        )
        conclusive = False
        for tensor, repeated, reordered in zip(first, second, permuted, strict=False):
            if len(tensor) != count:
                continue
            if _agree(tensor, repeated):
                # Or it is the same whatever the examples are: their numbers in the batch, say.
                keeps_order = _agree(tensor[order], reordered) or any(
                    _agree(tensor, constant) for constant in _collated(loader, places[:1] * count)
                )
                conclusive = conclusive or not _agree(tensor, tensor[:1].expand_as(tensor))
            else:
                keeps_order = not _is_shuffled(tensor, repeated)
            if not keeps_order:
                raise DefenseError(
                    f"DPSGD: unit=Users(): the collate function ({_collate_name(loader)}) or the "
                    "dataset's `__getitems__` sorts or shuffles rows, or makes a row of several "
                    "examples: one user's would be clipped as another's. Let row i of every tensor "
                    "be of example i (pack_padded_sequence takes enforce_sorted=False)."
                )
    if count > 1 and not conclusive:
        warnings.warn(
            "DPSGD: with unit=Users() the user of a row follows from its place in the batch. "
            f"Whether the collate function ({_collate_name(loader)}) keeps the order of examples "
            "could not be checked: its batches are random, or the same for all examples. It is "
            "trusted.",
            stacklevel=4,
        )


def check_documents(loader: DataLoader[Any], *, by_user: bool) -> None:
    """Say that a row of several documents is one example; raise an error where it is a user's.

    Rows of a few examples are read, as far as they mark documents.

    Raises:
        DefenseError: users are the unit, or the collate function makes a row of several examples.
    """
    dataset: Any = loader.dataset
    last, packed = len(dataset) - 1, False
    places = sorted({last * i // (ORDERED - 1) for i in range(ORDERED)}) if last >= 0 else []
    with preserve_process(), suppress(BatchError):
        packed = read_batch(loader.collate_fn(_fetched(dataset, places)), "causal").is_packed
    if packed and by_user:
        raise DefenseError(
            "DPSGD: rows of the data hold several documents, which may be of several users, and "
            "with unit=Users() a row is of one. Give each document a row of its own."
        )
    if packed:
        warnings.warn(
            "DPSGD: rows of the data hold several documents, and a row is one example: it is "
            "clipped as a whole, and epsilon is of a row as it is packed, not of a document. "
            "Without one document the others would be packed otherwise. For a guarantee of "
            "documents give each a row of its own.",
            stacklevel=4,
        )


def _unlike(loader: DataLoader[Any]) -> list[int]:
    """Return places of a few examples, from the shortest to the longest of many."""
    dataset: Any = loader.dataset
    last = len(dataset) - 1
    places = sorted({last * i // (CANDIDATES - 1) for i in range(CANDIDATES)})
    places.sort(key=lambda place: _length(dataset[place]))
    ranks = sorted({(len(places) - 1) * i // (ORDERED - 1) for i in range(ORDERED)})
    return [places[rank] for rank in ranks]


def _length(value: Any) -> int:
    """Return how many letters and nonzero numbers an example has; padding is often zero."""
    if isinstance(value, Mapping):
        return sum(map(_length, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(_length, value))
    if isinstance(value, Tensor | np.ndarray):
        return int((value != 0).sum())
    return len(value) if isinstance(value, str | bytes) else bool(value)


def _collated(loader: DataLoader[Any], places: list[int]) -> list[Tensor]:
    """Return the tensors of a batch of these examples, fetched as a DataLoader does."""
    batch = loader.collate_fn(_fetched(loader.dataset, places))
    return [tensor for tensor in tensors_of(batch) if tensor.dim()]


def _fetched(dataset: Any, places: list[int]) -> list[Any]:
    fetch = getattr(dataset, "__getitems__", None)
    return list(fetch(places)) if fetch else [dataset[place] for place in places]


def _agree(first: Tensor, second: Tensor) -> bool:
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    if first.is_floating_point() or first.is_complex():
        return torch.allclose(first, second, equal_nan=True)
    return torch.equal(first, second)


def _is_shuffled(first: Tensor, second: Tensor) -> bool:
    """Return whether they hold the same rows, each once, in another order."""
    if first.shape != second.shape:
        return False
    rows = [sorted(repr(row) for row in tensor.tolist()) for tensor in (first, second)]
    return rows[0] == rows[1] and len(set(rows[0])) == len(first)


def _collate_name(loader: DataLoader[Any]) -> str:
    collate: Any = loader.collate_fn
    if isinstance(collate, EmptyCollate):
        collate = collate.collate
    return str(getattr(collate, "__name__", type(collate).__name__))


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

    Raises:
        DefenseError: a Subset of a dataset that leaves some out: how many of these are its own is
            not known.
    """
    if by_key is not None:
        return len(by_key), 0
    population = public_length(dataset)
    return population, population - len(dataset)


def public_length(dataset: Any) -> int:
    """Return the ``public_length`` of a dataset or of a ConcatDataset's parts, else its length.

    Raises:
        DefenseError: a Subset of a dataset with a ``public_length``.
    """
    if isinstance(dataset, data.ConcatDataset):
        return sum(map(public_length, dataset.datasets))
    inner = dataset
    while isinstance(inner, data.Subset):
        inner = inner.dataset
    parts = inner.datasets if isinstance(inner, data.ConcatDataset) else [inner]
    if inner is not dataset and any(hasattr(part, "public_length") for part in parts):
        raise DefenseError(
            "DPSGD: the training data are a Subset of a dataset that leaves examples out, so that "
            "the number of its rows tells of those. Take the Subset first, and leave out of it."
        )
    return int(getattr(dataset, "public_length", len(dataset)))


def _check_shares(dataloader: Any, context: DefenseContext) -> None:
    """Raise an error where an example may be in the batches of two processes of one client.

    It would be clipped in each of them, and add more than the clip norm to their sum.
    """
    sampler = getattr(dataloader, "sampler", None)
    place = getattr(sampler, "num_replicas", 1), getattr(sampler, "rank", 0)
    if not is_sharded(dataloader) or place != (context.processes, context.process):
        raise DefenseError(
            "DPSGD: with client='world' no DistributedSampler splits the data among the "
            f"{context.processes} processes, so that an example may be twice in the sum. Leave "
            "use_distributed_sampler=True."
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
