"""The Poisson-sampled loader that DP-SGD trains with, and the sample rate for the accounting.

If the unit of privacy is a user, this module also groups rows by user, and checks that a batch
keeps the order of its rows. A *shard* is the part of the data that one process draws from. A
dataset that leaves examples out by a secret random choice has a ``public_length``: its length with
them, which leaks nothing about the choice.
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

# The number of examples that are collated to test their order. A smaller number would miss collate
# functions that reorder few examples; a larger one costs time at setup.
PROBES = 8
# The number of examples from which the probes are chosen, so that their lengths differ if any do.
CANDIDATES = 64


def rows_by_user(dataset: Any, group_by: GroupBy) -> dict[Any, list[int]]:
    """Return the rows of every user by key, in the order of each user's first row.

    Args:
        dataset: The map-style dataset.
        group_by: The name of a column, a function of an example, or a sequence with a key for each
            row.

    Raises:
        DefenseError: A row has no key, or the number of keys is not the number of rows. The message
            names the column.
    """
    keys = _keys(dataset, group_by)
    if len(keys) != len(dataset):
        raise DefenseError(
            f"DPSGD: group_by gives {len(keys)} keys for {len(dataset)} rows; give one for each row"
        )
    users: dict[Any, list[int]] = {}
    for row, key in enumerate(keys):
        try:
            user = _user_key(key)
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
                "unknown. Leave such rows out of the dataset, or give them a key."
            )
    return users


def _user_key(key: Any) -> Any:
    """Return the key as a plain value that identifies a user, or None if it is missing.

    None, NaN and "" are missing keys, and so is a tuple or frozenset that contains one of them.

    Raises:
        TypeError: The key is compared by identity, so that two rows never have the same one.
    """
    if isinstance(key, tuple | frozenset):
        elements = [_user_key(element) for element in key]
        cls = tuple if isinstance(key, tuple) else frozenset
        return None if any(element is None for element in elements) else cls(elements)
    key = key.item() if getattr(key, "shape", None) in ((), (1,)) else key
    identity_hash: Any = object.__hash__
    if key is not None and type(key).__hash__ is identity_hash:
        raise TypeError("compared by identity")
    missing = key is None or bool(key != key) or bool(key == "")
    return None if missing else key


def _key_name(group_by: GroupBy) -> str:
    """Return the name of a user's key for messages."""
    return f"'{group_by}'" if isinstance(group_by, str) else "key (group_by)"


def _keys(dataset: Any, group_by: GroupBy) -> Sequence[Any]:
    """Return the users' keys in the order of the rows.

    Raises:
        DefenseError: ``group_by`` is a collection without an order.
    """
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
                "the name of a column, a function of an example, or a list with a key for each row."
            )
        return group_by
    if hasattr(dataset, "column_names"):
        column: Sequence[Any] = dataset[group_by]
        return column
    return [dataset[row][group_by] for row in range(len(dataset))]


def check_order(loader: DataLoader[Any]) -> None:
    """Raise an error for a dataset or collate function that changes the order of examples.

    The position of a row in the batch determines its user. A few examples are collated twice in one
    order and once in another. A tensor that is equal in the first two batches must be reordered in
    the third. So the outcome depends on the collate function, and not on the examples. Global
    random states do not change.

    Raises:
        DefenseError: The order changes, or a row is made of several examples.
    """
    with preserve_process():
        indices = _probe_indices(loader)
        count = len(indices)
        # Sorting, reversing and rotating do not undo this order.
        order = [*range(1, count - 1), 0, count - 1] if count > 2 else [*range(count)][::-1]
        tensors, repeats, permutations = (
            _collated_tensors(loader, batch_indices)
            for batch_indices in (indices, indices, [indices[i] for i in order])
        )
        has_evidence = False
        for tensor, repeat, permutation in zip(tensors, repeats, permutations, strict=False):
            if len(tensor) != count:
                continue
            if _are_equal(tensor, repeat):
                # A tensor that does not depend on the examples, such as row numbers, is accepted.
                keeps_order = _are_equal(tensor[order], permutation) or any(
                    _are_equal(tensor, constant)
                    for constant in _collated_tensors(loader, indices[:1] * count)
                )
                # Equal rows do not show their order.
                has_evidence = has_evidence or not _are_equal(tensor, tensor[:1].expand_as(tensor))
            else:
                keeps_order = not _is_shuffled(tensor, repeat)
            if not keeps_order:
                raise DefenseError(
                    f"DPSGD: unit=Users(): the collate function ({_collate_name(loader)}) or the "
                    "dataset's `__getitems__` sorts or shuffles rows, or makes a row of several "
                    "examples: rows of one user would be clipped as another's. Let row i of every "
                    "tensor be of example i (pack_padded_sequence takes enforce_sorted=False)."
                )
    if count > 1 and not has_evidence:
        warnings.warn(
            "DPSGD: with unit=Users() the position of a row in the batch determines its user. "
            f"Whether the collate function ({_collate_name(loader)}) keeps the order of examples "
            "could not be checked: its batches are random, or the same for all examples. It is "
            "trusted; make sure that it keeps the order.",
            stacklevel=4,
        )


def check_documents(loader: DataLoader[Any], *, by_user: bool) -> None:
    """Warn if rows of the data contain several documents.

    A few examples are collated. Documents are found only if the batch marks them, for example by
    position ids.

    Args:
        loader: The Poisson-sampled loader.
        by_user: Whether users are the unit of privacy.

    Raises:
        DefenseError: Rows contain several documents, and users are the unit of privacy.
    """
    dataset: Any = loader.dataset
    last, packed = len(dataset) - 1, False
    indices = sorted({last * i // (PROBES - 1) for i in range(PROBES)}) if last >= 0 else []
    with preserve_process(), suppress(BatchError):
        packed = read_batch(loader.collate_fn(_examples(dataset, indices)), "causal").is_packed
    if packed and by_user:
        raise DefenseError(
            "DPSGD: rows of the data hold several documents, which may be of several users, and "
            "with unit=Users() a row has one user. Give each document a row of its own."
        )
    if packed:
        warnings.warn(
            "DPSGD: rows of the data hold several documents, and a row is one example: it is "
            "clipped as a whole, and epsilon is for a packed row, not for a document. Removing one "
            "document would also change how the others are packed. For a guarantee for documents, "
            "give each document a row of its own.",
            stacklevel=4,
        )


def _probe_indices(loader: DataLoader[Any]) -> list[int]:
    """Return the indices of a few examples, from the shortest to the longest candidate."""
    dataset: Any = loader.dataset
    last = len(dataset) - 1
    indices = sorted({last * i // (CANDIDATES - 1) for i in range(CANDIDATES)})
    indices.sort(key=lambda index: _length(dataset[index]))
    ranks = sorted({(len(indices) - 1) * i // (PROBES - 1) for i in range(PROBES)})
    return [indices[rank] for rank in ranks]


def _length(value: Any) -> int:
    """Return the number of characters and nonzero values of an example; padding is often zero."""
    if isinstance(value, Mapping):
        return sum(map(_length, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(_length, value))
    if isinstance(value, Tensor | np.ndarray):
        return int((value != 0).sum())
    return len(value) if isinstance(value, str | bytes) else bool(value)


def _collated_tensors(loader: DataLoader[Any], indices: list[int]) -> list[Tensor]:
    """Return the tensors of the batch that the loader makes of the examples at ``indices``."""
    batch = loader.collate_fn(_examples(loader.dataset, indices))
    return [tensor for tensor in tensors_of(batch) if tensor.dim()]


def _examples(dataset: Any, indices: list[int]) -> list[Any]:
    """Return the examples at ``indices``, fetched as a DataLoader fetches them."""
    fetch = getattr(dataset, "__getitems__", None)
    return list(fetch(indices)) if fetch else [dataset[index] for index in indices]


def _are_equal(first: Tensor, second: Tensor) -> bool:
    """Return whether two tensors are equal, floating-point ones up to rounding."""
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    if first.is_floating_point() or first.is_complex():
        return torch.allclose(first, second, equal_nan=True)
    return torch.equal(first, second)


def _is_shuffled(first: Tensor, second: Tensor) -> bool:
    """Return whether two tensors have the same distinct rows, in any order."""
    if first.shape != second.shape:
        return False
    rows = [sorted(repr(row) for row in tensor.tolist()) for tensor in (first, second)]
    return rows[0] == rows[1] and len(set(rows[0])) == len(first)


def _collate_name(loader: DataLoader[Any]) -> str:
    """Return the name of the user's collate function for messages."""
    collate: Any = loader.collate_fn
    if isinstance(collate, EmptyCollate):
        collate = collate.collate
    return str(getattr(collate, "__name__", type(collate).__name__))


LOADER_SETTINGS = (
    *("num_workers", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context"),
    *("generator", "prefetch_factor", "persistent_workers"),
)
"""The settings that the Poisson-sampled DataLoader takes from the user's DataLoader."""


def sampling_of(
    dataloader: Any,
    context: DefenseContext,
    draws: poisson.Draws,
    *,
    trust: Trust,
    users: Users | None = None,
) -> poisson.Sampling:
    """Return the loader to train with instead of ``dataloader``, with its sample rate.

    Each example, or each user, is in a batch with the same probability: the loader's batch size
    over the number of examples (users). If a dataset has a ``public_length``, the length is not
    used.

    Args:
        dataloader: The training loader, as Lightning has prepared it.
        context: The client and the process.
        draws: The secret entropy, the client and the index of the first batch.
        trust: The trust in the server.
        users: The setting of users as the unit of privacy; None to draw examples.

    Raises:
        DefenseError: The loader cannot be sampled; an example may be in the batches of several
            processes of one client; or users are drawn, and the order of rows changes.
    """
    check_torch_loader(dataloader)
    if context.clients > 1 and not is_sharded(dataloader):
        central = " trust='central' also needs the same batch_size and noise for all clients."
        warnings.warn(
            f"DPSGD: {context.clients} clients, and no DistributedSampler splits the training data "
            "among them: an example that several clients hold spends epsilon at each of them. Keep "
            "use_distributed_sampler=True, or let each process load different data."
            + (central if trust == "central" else ""),
            stacklevel=3,
        )
    if context.processes > 1:
        _check_shares(dataloader, context)
    dataset, batch_size = dataloader.dataset, dataloader.batch_size
    by_key = None if users is None else rows_by_user(dataset, users.group_by)
    # The rate depends on the population, which must not depend on the content of the data.
    population = public_length(dataset) if by_key is None else len(by_key)
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
        # All clients must divide by the same size; their shards, and so rate * size, may differ.
        expected = float(batch_size)
    elif context.processes == 1:
        # Examples that the dataset leaves out are shared out evenly, as the sampler would do.
        n_absent = population - len(dataset) if by_key is None else 0
        expected = rate * (len(loader.batch_sampler.shard) + n_absent // replicas)
    else:
        expected = rate * population
    return poisson.Sampling(loader, rate, expected, population, by_key)


def public_length(dataset: Any) -> int:
    """Return the ``public_length`` of a dataset, or its length if it has none.

    The lengths of the datasets in a ConcatDataset are added.

    Raises:
        DefenseError: The dataset, or one that it concatenates, is a Subset of data with a
            ``public_length``.
    """
    if isinstance(dataset, data.ConcatDataset):
        return sum(map(public_length, dataset.datasets))
    if isinstance(dataset, data.Subset) and _has_public_length(dataset.dataset):
        raise DefenseError(
            "DPSGD: the training data are a Subset of a dataset that leaves examples out, so that "
            "the number of its rows reveals them. Take the Subset first, then leave examples out."
        )
    return int(getattr(dataset, "public_length", len(dataset)))


def _has_public_length(dataset: Any) -> bool:
    """Return whether a dataset, or one that it wraps, has a ``public_length``."""
    if isinstance(dataset, data.ConcatDataset):
        return any(map(_has_public_length, dataset.datasets))
    wraps = isinstance(dataset, data.Subset) and _has_public_length(dataset.dataset)
    return wraps or hasattr(dataset, "public_length")


def _check_shares(dataloader: Any, context: DefenseContext) -> None:
    """Raise an error if an example may be in the batches of two processes of one client.

    It would be clipped in each of them, and add more than the clip norm to their sum.

    Raises:
        DefenseError: No DistributedSampler splits the data among exactly these processes.
    """
    sampler = getattr(dataloader, "sampler", None)
    shard = getattr(sampler, "num_replicas", 1), getattr(sampler, "rank", 0)
    if not is_sharded(dataloader) or shard != (context.processes, context.process):
        raise DefenseError(
            "DPSGD: with client='world' no DistributedSampler splits the data among the "
            f"{context.processes} processes, so that an example may be twice in the sum. Keep "
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
    """Return a loader with the same dataset, collate function and workers, but Poisson sampling.

    An epoch has ``round(1 / rate)`` batches, so that each example is drawn once on average.

    If a DistributedSampler splits the dataset (Lightning adds one under DDP), the shard is this
    process's part, without shuffling and without the examples that the sampler repeats to make
    shards equal in size: each example belongs to exactly one process. Otherwise the shard is the
    whole dataset. Processes with different shards draw different masks.

    Args:
        loader: A loader with a map-style dataset and one of torch's own samplers.
        rate: The probability of each example to be in a batch, in (0, 1]: the mean batch size over
            the size of the shard.
        draws: The secret entropy, the client and the index of the first batch.
        users: The rows of every user, to draw users; the rate is then a user's, and users are split
            among processes. None to draw examples.
        rows_per_user: The largest number of rows of one user in a batch; None for all rows.

    Returns:
        A new DataLoader, whose ``batch_sampler`` is a :class:`PoissonBatchSampler`.

    Raises:
        DefenseError: The sampling of the loader cannot be replaced without changing the examples
            that it loads, or the shard is empty. The message says what to change.
    """
    check_torch_loader(loader)
    dataset: Any = loader.dataset
    _check_empty_fetch(loader)
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
    loading = {name: getattr(loader, name) for name in LOADER_SETTINGS}
    collate = poisson.EmptyCollate(loader.collate_fn, loader.dataset, first)
    return data.DataLoader(loader.dataset, batch_sampler=sampler, collate_fn=collate, **loading)


def is_sharded(loader: Any) -> bool:
    """Return whether a loader's sampler splits the dataset among processes."""
    return isinstance(getattr(loader, "sampler", None), data.DistributedSampler)


def check_torch_loader(loader: data.DataLoader[Any]) -> None:
    """Raise an error for a loader whose examples cannot be drawn one by one.

    Raises:
        DefenseError: The loader is not a plain DataLoader of a map-style dataset with torch's own
            batch sampler. The message says what to change.
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
    refuse("DP-SGD must replace the loader's sampling to draw examples independently; ", refusals)


def _check_empty_fetch(loader: data.DataLoader[Any]) -> None:
    """Raise an error if a dataset with ``__getitems__`` cannot fetch an empty batch."""
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
    """Return the indices of this process's examples.

    Raises:
        DefenseError: An example is in the dataset twice, or the sampler chooses examples.
    """
    dataset: Any = loader.dataset
    if isinstance(dataset, data.Subset | data.ConcatDataset):
        _check_distinct(dataset)
    size, sampler = len(dataset), loader.sampler
    # The types must be exact: a subclass of a sampler may choose or repeat any examples.
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


def _check_distinct(dataset: data.Dataset[Any]) -> None:
    """Raise an error if a Subset or ConcatDataset contains an example twice."""
    sources, indices = _origins(dataset)
    order = np.lexsort((indices, sources))
    repeated = (np.diff(sources[order]) == 0) & (np.diff(indices[order]) == 0)
    if repeated.any():
        raise DefenseError(
            f"{int(repeated.sum())} of the {len(indices)} rows of the dataset repeat an example, "
            "which would spend epsilon several times. Let each example occur once, and train for "
            "more epochs."
        )


def _origins(dataset: Any) -> tuple[Any, Any]:
    """Return the ids of the innermost datasets (n,) and the indices (n,) there, for each row.

    Subset and ConcatDataset are resolved.
    """
    if isinstance(dataset, data.ConcatDataset):
        origins = [_origins(inner) for inner in dataset.datasets]
        return np.concatenate([o[0] for o in origins]), np.concatenate([o[1] for o in origins])
    if isinstance(dataset, data.Subset):
        indices = np.asarray(dataset.indices)
        if indices.dtype.kind not in "iu":  # the dataset is indexed by keys, or the Subset is empty
            _, codes = np.unique(indices, return_inverse=True)
            return np.full(len(indices), id(dataset.dataset), dtype=np.int64), codes
        sources, inner_indices = _origins(dataset.dataset)
        return sources[indices], inner_indices[indices]
    size = len(dataset)
    return np.full(size, id(dataset), dtype=np.int64), np.arange(size)
