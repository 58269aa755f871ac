"""The Poisson-sampled loader that DP-SGD trains with, and the sample rate for the accounting.

If the unit of privacy is a user, this module also groups rows by user, and checks that a batch
keeps the order of its rows. A *shard* is the part of the data that one process draws from. A
dataset that leaves examples out by a secret random choice has a ``public_length``: its length with
them, which leaks nothing about the choice.
"""

import sys
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import data
from torch.utils.data import DataLoader, Subset

from lightning_fedleak.defenses import randomness
from lightning_fedleak.defenses.base import DefenseContext, DefenseError, refuse
from lightning_fedleak.defenses.dpsgd import poisson
from lightning_fedleak.defenses.dpsgd.poisson import EmptyCollate
from lightning_fedleak.defenses.dpsgd.recorder import tensors_of
from lightning_fedleak.defenses.dpsgd.settings import GroupBy, Trust, Users
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
        DefenseError: There is no key for each row in order, or a key does not identify a user.
    """
    keys = _keys(dataset, group_by)
    is_ordered = hasattr(keys, "__getitem__") and not isinstance(keys, Mapping)
    if not is_ordered or len(keys) != len(dataset):
        raise DefenseError(
            "DPSGD: group_by must be the name of a column, a function of an example, or a list "
            f"with a key for each of the {len(dataset)} rows"
        )
    users: dict[Any, list[int]] = {}
    for row, key in enumerate(keys):
        try:
            users.setdefault(_user_key(key), []).append(row)
        except (TypeError, ValueError, RuntimeError) as error:  # also arrays, and pandas' NA
            raise DefenseError(
                f"DPSGD: row {row}'s key by group_by, a {type(key).__name__}, is missing or cannot "
                "be compared: give a number or a string, or leave such rows out"
            ) from error
    return users


def _user_key(key: Any) -> Any:
    """Return the key as a plain value that identifies a user.

    Raises:
        TypeError: The key is missing (None, NaN or ""), or is compared by identity, so that two
            rows never have the same one; or so is an element of a tuple or frozenset.
    """
    if isinstance(key, tuple | frozenset):
        return (tuple if isinstance(key, tuple) else frozenset)(map(_user_key, key))
    key = key.item() if getattr(key, "shape", None) in ((), (1,)) else key
    identity_hash: Any = object.__hash__
    if key is None or type(key).__hash__ is identity_hash or bool(key != key) or bool(key == ""):
        raise TypeError
    return key


def _keys(dataset: Any, group_by: GroupBy) -> Sequence[Any]:
    """Return the users' keys in the order of the rows."""
    if isinstance(dataset, Subset) and (isinstance(group_by, str) or callable(group_by)):
        inner = _keys(dataset.dataset, group_by)
        return [inner[i] for i in dataset.indices]
    if callable(group_by):
        return [group_by(dataset[row]) for row in range(len(dataset))]
    if not isinstance(group_by, str):
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
        has_evidence = _check_order_of(loader, indices)
        if len(indices) == 2:  # of two, what reverses or sorts looks like what keeps an order
            _check_order_of(loader, indices * (PROBES // 2))
    if len(indices) > 1 and not has_evidence:
        warnings.warn(
            f"DPSGD: unit=Users(): whether the collate function ({_collate_name(loader)}) keeps "
            "the order of examples could not be checked. It is trusted; make sure that it does.",
            stacklevel=4,
        )


def _check_order_of(loader: DataLoader[Any], indices: list[int]) -> bool:
    """Return whether the order of a batch of these examples can be seen; see :func:`check_order`.

    Raises:
        DefenseError: The order changes, or a row is made of several examples.
    """
    count, has_evidence = len(indices), False
    # Sorting, reversing and rotating do not undo this order.
    order = [*range(1, count - 1), 0, count - 1] if count > 2 else [*range(count)][::-1]
    tensors, repeats, permutations = (
        _collated_tensors(loader, batch_indices)
        for batch_indices in (indices, indices, [indices[i] for i in order])
    )
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
                "dataset's `__getitems__` changes the order of rows: let row i be of example i "
                "(pack_padded_sequence takes enforce_sorted=False)"
            )
    return has_evidence


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
        raise DefenseError("DPSGD: unit=Users(): give each of several documents a row of its own")
    if packed:
        warnings.warn(
            "DPSGD: rows of the data hold several documents, and epsilon is for a packed row, not "
            "for a document. For a guarantee for documents, give each document a row.",
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
    collate: Any = loader.collate_fn  # as it draws by itself: two calls show that it does
    batch = getattr(collate, "batch_of", collate)(_examples(loader.dataset, indices))
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
            "DPSGD: the number of rows of the Subset reveals which examples its dataset leaves "
            "out. Take the Subset first, then leave examples out."
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
        raise DefenseError("DPSGD: client='world' needs use_distributed_sampler=True")


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
            that it loads, the shard is empty, or the dataset or the collate function has random
            numbers of its own. The message says what to change.
    """
    _check_empty_fetch(loader)
    shard, steps = _shard(loader), max(1, round(1 / rate))
    if users is not None:
        shard = range(shard.start, len(users), shard.step)
    if not shard:
        unit = "examples" if users is None else "users"
        raise DefenseError(f"client {draws.client} has no {unit}: use fewer clients or more data")
    if users is None:
        sampler, first = poisson.PoissonBatchSampler(shard, rate, steps, draws), shard[0]
    else:
        sampler = poisson.UserBatchSampler(users, shard, rows_per_user, rate, steps, draws)
        first = users[shard[0]][0]
    randomness.check_loading(loader.dataset, loader.collate_fn)
    collate = EmptyCollate(loader.collate_fn, loader.dataset, first)
    collate.key = sampler.loading_key
    begin = loader.worker_init_fn, loader.collate_fn, sampler.loading_key()
    loading = {name: getattr(loader, name) for name in LOADER_SETTINGS}
    loading |= {"worker_init_fn": partial(randomness.begin_worker, *begin), "generator": None}
    settings = {"batch_sampler": sampler, "collate_fn": collate, **loading}
    return randomness.SecretLoader(loader.dataset, **settings)


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
        f"return a plain torch DataLoader, not a {type(loader).__name__}": (
            getattr(type(loader), "__iter__", None) is not data.DataLoader.__iter__
        ),
        f"load {type(dataset).__name__} into a map-style dataset": (
            isinstance(dataset, data.IterableDataset)
            or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__"))
        ),
        f"give batch_size to the DataLoader, not a {type(batches).__name__}": (
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
            f"`{type(loader.dataset).__name__}.__getitems__([])` gives {count!r}: let it return an "
            "empty list, as a Poisson batch may be empty"
        )


def _shard(loader: data.DataLoader[Any]) -> range:
    """Return the indices of this process's examples.

    Raises:
        DefenseError: An example is in the dataset twice, or the sampler chooses examples.
    """
    dataset: Any = loader.dataset
    check_distinct(dataset)
    size, sampler = len(dataset), loader.sampler
    # The types must be exact: a subclass of a sampler may choose or repeat any examples.
    if type(sampler) is data.DistributedSampler and sampler.dataset is dataset:
        return range(sampler.rank, size, sampler.num_replicas)
    shuffles = type(sampler) is data.RandomSampler and not sampler.replacement
    plain = shuffles and sampler.num_samples == size  # type: ignore[attr-defined]
    if not plain and type(sampler) is not data.SequentialSampler:
        inner = getattr(getattr(sampler, "dataset", None), "_sampler", sampler)
        raise DefenseError(
            f"DP-SGD draws examples itself, in place of {type(inner).__name__}: use shuffle=True, "
            "or for a part of the data torch.utils.data.Subset"
        )
    return range(size)


def check_distinct(dataset: Any) -> None:
    """Raise an error if a Subset, ConcatDataset or Hugging Face dataset has an example twice."""
    if not (isinstance(dataset, data.Subset | data.ConcatDataset) or _is_arrow(dataset)):
        return
    sources, indices = _origins(dataset)
    order = np.lexsort((indices, sources))
    repeated = (np.diff(sources[order]) == 0) & (np.diff(indices[order]) == 0)
    if repeated.any():
        raise DefenseError(
            f"{int(repeated.sum())} of the {len(indices)} rows of the dataset repeat an example: "
            "let each occur once, and train for more epochs"
        )


def _origins(dataset: Any) -> tuple[Any, Any]:
    """Return the ids of the innermost datasets (n,) and the indices (n,) there, for each row.

    Subset and ConcatDataset are resolved. A row of a Hugging Face dataset is identified by a hash
    of the places in memory that its columns have, which ``concatenate_datasets`` keeps.
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
    if _is_arrow(dataset):
        places = np.zeros(dataset.data.num_rows, dtype=np.uint64)
        for column in dataset.data.columns:
            places = places * _MULTIPLIER + np.concatenate(
                [places[:0], *map(_places, column.chunks)]
            )
        if dataset._indices is not None:  # of `select` and `shuffle`
            places = places[dataset._indices.column(0).to_numpy()]
        return np.zeros(len(places), dtype=np.int64), places.view(np.int64)
    size = len(dataset)
    return np.full(size, id(dataset), dtype=np.int64), np.arange(size)


_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # 2^64 over the golden ratio, as in Fibonacci hashing


def _is_arrow(dataset: Any) -> bool:
    """Return whether a dataset is one of Hugging Face's ``datasets``, in Arrow tables."""
    return isinstance(dataset, getattr(sys.modules.get("datasets"), "Dataset", ()))


def _places(chunk: Any) -> Any:
    """Return (n,) a hash of the place in memory of each element of an Arrow array."""
    address = next((buffer.address for buffer in chunk.buffers() if buffer is not None), 0)
    rows = np.arange(chunk.offset, chunk.offset + len(chunk), dtype=np.uint64)
    return np.full(len(chunk), address, dtype=np.uint64) * _MULTIPLIER + rows
