"""Poisson sampling of batches, as the accounting of DP-SGD assumes it.

Every example of a client's shard is in a batch with chance ``rate``, independently of every other
example and of every other batch. Batches vary in size and may be empty; an empty one is a release
like every other and must not be skipped.

Where the loader's batches are taken, :func:`checked_loader` refuses one that may yield an example
twice.
"""

from __future__ import annotations

import copy
import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
)

from lightning_fedleak.defenses.accounting.ledger import check_count, check_sample_rate
from lightning_fedleak.defenses.base import DefenseError
from lightning_fedleak.defenses.dpsgd.batch import tensors_of
from lightning_fedleak.validate import check_integer

DOMAIN = b"lightning-fedleak poisson sampling 1\0"  # prefix of the hash; another gives other masks
LEAST_ENTROPY = 16  # bytes; 128 bits cannot be guessed
MOST_WAITING = 1 << 12  # batches whose sizes are stored; workers fetch far fewer ahead of training
_ALREADY = (
    "DP-SGD samples each example independently and replaces the sampler, or with "
    "poisson_sampling=False counts each example once in a batch: it must know the sampler's rule."
)


@dataclass(frozen=True)
class Draws:
    """What a client's Poisson samples follow from, beside its shard and rate.

    Attributes:
        entropy: secret bytes of the operating system, at least 16, new in every fit
            (``DefenseContext.entropy``).
        client: index of the client.
        first_step: number of the first batch, where a resumed run goes on.
        groups: into which the examples or users are split by their places, which is public. Batches
            are drawn from them in turn (cyclic Poisson sampling, Choquette-Choo et al. 2023, arXiv
            2306.08153, Sect. 4).
        turn: returns the number of the release for an epoch's first batch, which decides the group.
    """

    entropy: bytes = field(repr=False)
    client: int = 0
    first_step: int = 0
    groups: int = 1
    turn: Callable[[], int] = int


class PoissonBatchSampler(Sampler[list[int]]):
    """Batches of indices, each a function of (entropy, client, shard, step).

    The masks come from SHAKE-256 keyed with the secret ``entropy``, a cryptographic generator.
    (The *noise* of these defences is not from one.) An example is in a batch where a uniform 64-bit
    number is below ``rate * 2 ** 64``: the chance is exact to 6e-20, never above ``rate``.

    No sampler draws a step twice: the counter goes on over epochs, also over one that ended early.
    A resumed fit has new entropy and so new masks, whatever the counter is.

    Args:
        shard: the indices of this client's examples.
        rate: chance of each of them to be in a batch, in (0, 1].
        steps: batches in an epoch.
        draws: entropy, client and groups.

    Attributes:
        step: number of the next batch. Workers fetch ahead of training.
    """

    def __init__(
        self,
        shard: range,
        rate: float,
        steps: int,
        draws: Draws,
    ) -> None:
        self.shard = shard
        self.rate = rate
        self.steps = steps
        self.step = draws.first_step
        self.groups = draws.groups
        self._turn = draws.turn
        self._ahead = 0
        self._turns: deque[tuple[int, int]] = deque(maxlen=MOST_WAITING)
        permutation = np.random.default_rng(draws.groups).permutation(len(shard))
        self._group = permutation % draws.groups
        self._sizes: deque[int] | None = None
        place = (draws.client, shard.start, shard.step)
        fields = b"".join(value.to_bytes(8, "big") for value in place)
        self._key = hashlib.sha256(DOMAIN + fields + draws.entropy).digest()

    def __len__(self) -> int:
        """Return the number of batches in an epoch."""
        return self.steps

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the next ``steps`` batches, with empty ones."""
        self._turns.clear()  # those of an epoch that ended early never come
        self._ahead = self._turn() - self.step
        for _ in range(self.steps):
            step, self.step = self.step, self.step + 1
            batch = self.rows(step)
            if self._sizes is None:
                self._sizes = deque(maxlen=MOST_WAITING)
            self._sizes.append(len(batch))
            self._turns.append((step + self._ahead, len(batch)))
            yield batch

    def rows(self, step: int) -> list[int]:
        """Return the places in the dataset of batch number ``step``."""
        return self.draw(step)

    def claim(self, samples: int) -> bool:
        """Claim a batch of so many examples, and return whether one was drawn and not claimed.

        It is also true where no batch was drawn at all.
        """
        if self._sizes is None:
            return True
        if samples not in self._sizes:
            return False
        self._sizes.remove(samples)
        return True

    def claim_turn(self, row: int, samples: int) -> bool:
        """Return whether the next batch was drawn for that release and has so many examples.

        It is also true where no batch was drawn at all.
        """
        return not self._turns or self._turns.popleft() == (row, samples)

    def draw(self, step: int) -> list[int]:
        """Return the indices in batch number ``step``."""
        inside = self._group == (step + self._ahead) % self.groups
        if self.rate < 1:
            key = self._key + step.to_bytes(8, "big")
            stream = hashlib.shake_256(key).digest(8 * len(self.shard))
            inside &= np.frombuffer(stream, dtype="<u8") < np.uint64(int(self.rate * 2**64))
        return [self.shard[place] for place in np.flatnonzero(inside).tolist()]

    def set_epoch(self, epoch: int) -> None:
        """Do nothing: masks do not depend on the epoch."""


class UserBatchSampler(PoissonBatchSampler):
    """Poisson samples of users, with the rows of each user.

    Args:
        users: the rows of every user.
        shard: numbers of this process's users.
        rows_per_user: most rows of one user in a batch, drawn at random among theirs; None for all.
        rate: chance of each user to be in a batch.
        steps: batches in an epoch.
        draws: entropy, client and groups.
    """

    def __init__(
        self,
        users: Sequence[Sequence[int]],
        shard: range,
        rows_per_user: int | None,
        rate: float,
        steps: int,
        draws: Draws,
    ) -> None:
        super().__init__(shard, rate, steps, draws)
        self.users = users
        self.rows_per_user = rows_per_user
        self._counts: deque[list[int]] = deque(maxlen=MOST_WAITING)

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the rows of the next ``steps`` batches, user by user."""
        self._counts.clear()  # those of an epoch that ended early never come
        yield from super().__iter__()

    def rows(self, step: int) -> list[int]:
        """Return the rows of the users in batch number ``step``, one user after the other.

        Users with most rows come first, because those with more than are run at once have pieces of
        their own.
        """
        users = [self.user_rows(user, step) for user in self.draw(step)]
        users.sort(key=len, reverse=True)
        self._counts.append([len(rows) for rows in users])
        return [row for rows in users for row in rows]

    def claim_users(self, samples: int) -> list[int] | None:
        """Return how many rows each user of the next batch has; None if they are not so many."""
        if not self._counts or sum(self._counts[0]) != samples:
            return None
        return self._counts.popleft()

    def user_rows(self, user: int, step: int) -> list[int]:
        """Return the rows of one user in batch number ``step``, if the user is in it."""
        rows, limit = self.users[user], self.rows_per_user
        if limit is None or len(rows) <= limit:
            return [*rows]
        place = b"".join(value.to_bytes(8, "big") for value in (step, user))
        seed = hashlib.shake_256(b"rows" + self._key + place).digest(32)
        sample = np.random.default_rng(list(seed)).choice(len(rows), limit, replace=False)
        return [rows[i] for i in sorted(sample.tolist())]


class RowCollate:
    """A collate function that refuses another number of rows than of examples.

    It refuses a batch whose tensors all have the same first dimension, but not one row for each
    example, because rows are clipped and privacy is accounted for examples.

    Args:
        collate: of the loader.

    Raises:
        DefenseError: in a call, another number of rows than of examples.
    """

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self.collate = collate

    def __call__(self, examples: list[Any]) -> Any:
        """Return the batch of these examples."""
        batch = self.collate(examples)
        sizes = {tensor.shape[0] for tensor in tensors_of(batch) if tensor.dim()}
        if len(sizes) == 1 and sizes != {len(examples)}:
            raise DefenseError(
                f"the collate function made {sizes.pop()} rows of {len(examples)} examples. "
                "Each row would be clipped by itself, while privacy is accounted for an "
                "example: let it give one row for each, and split or pack texts in the dataset."
            )
        return batch


class EmptyCollate(RowCollate):
    """A collate function that also returns an empty batch, of the same form, for no examples.

    For no examples it collates one example once and twice. What grew with the number of examples is
    cut to length 0: tensors in the dimension that grew, and sequences. What did not grow belongs to
    the batch and stays.

    Args:
        collate: of the loader.
        dataset: of the example.
        index: of the example; no number of it is in an empty batch.

    Raises:
        DefenseError: in a call, another number of rows than of examples.
    """

    def __init__(self, collate: Callable[[list[Any]], Any], dataset: Any, index: int) -> None:
        super().__init__(collate)
        self.dataset = dataset
        self.index = index

    def placeholder(self) -> Any:
        """Return the batch of one example, for a process that must run the model and drew none."""
        return super().__call__([self.dataset[self.index]])

    def __call__(self, examples: list[Any]) -> Any:
        """Return the batch of these examples."""
        if examples:
            return super().__call__(examples)
        once = self.collate([self.dataset[self.index]])
        twice = self.collate([self.dataset[self.index], self.dataset[self.index]])
        return _emptied(once, twice)


def poisson_loader(
    loader: DataLoader[Any],
    rate: float,
    draws: Draws,
    *,
    clients: int,
    steps: int | None = None,
    users: Sequence[Sequence[int]] | None = None,
    rows_per_user: int | None = None,
) -> DataLoader[Any]:
    """Return a loader's dataset, collate function and workers with Poisson sampling.

    Where a DistributedSampler splits the dataset (Lightning adds one under DDP) the shard is this
    process's part, without shuffling and without the examples that it repeats to make shards equal
    in size: each example belongs to exactly one process. Otherwise the shard is the whole dataset.
    Processes with different shards draw different masks, of one client or of several.

    Args:
        loader: with a map-style dataset and a sampler of torch's own.
        rate: chance of each example to be in a batch, in (0, 1]; mean batch size over size of the
            shard.
        draws: entropy, client and groups.
        clients: number of clients.
        steps: batches in an epoch; default ``round(1 / rate)``, so that each example is drawn once
            an epoch on average.
        users: the rows of every user, where users are drawn; then the rate is that of a user, and
            processes share users.
        rows_per_user: of one user in a batch; None for all.

    Returns:
        A new DataLoader; its ``batch_sampler`` is a :class:`PoissonBatchSampler`.

    Raises:
        DefenseError: a loader whose sampling cannot be replaced without changing what it loads, or
            a value out of range; says what to change.
    """
    check_sample_rate(rate)
    check_integer("client", draws.client, at_least=0, at_most=clients - 1, error=DefenseError)
    if len(draws.entropy) < LEAST_ENTROPY:
        raise DefenseError(
            f"entropy of {len(draws.entropy)} bytes can be guessed: give at least {LEAST_ENTROPY} "
            "of os.urandom"
        )
    if steps is None:
        steps = max(1, round(1 / rate))
    check_count(steps, "steps")
    check_torch_loader(loader)
    _check_fetches_none(loader)
    shard = _shard(loader)
    if users is not None:
        shard = range(shard.start, len(users), shard.step)
    if not shard:
        raise DefenseError(
            f"client {draws.client} has no {'examples' if users is None else 'users'}: the dataset "
            f"holds {len(_sized(loader.dataset) if users is None else users)} for all clients. Use "
            "fewer clients or more data."
        )
    if users is None:
        sampler, first = PoissonBatchSampler(shard, rate, steps, draws), shard[0]
    else:
        sampler = UserBatchSampler(users, shard, rows_per_user, rate, steps, draws)
        first = users[shard[0]][0]
    loading: dict[str, Any] = {
        "num_workers": loader.num_workers,
        "pin_memory": loader.pin_memory,
        "timeout": loader.timeout,
        "worker_init_fn": loader.worker_init_fn,
        "multiprocessing_context": loader.multiprocessing_context,
        "generator": loader.generator,
        "prefetch_factor": loader.prefetch_factor,
        "persistent_workers": loader.persistent_workers,
    }
    collate = EmptyCollate(loader.collate_fn, loader.dataset, first)
    return DataLoader(loader.dataset, batch_sampler=sampler, collate_fn=collate, **loading)


def checked_loader(loader: DataLoader[Any]) -> DataLoader[Any]:
    """Return the same loader, which yields an example once in an epoch at most, as one row.

    Under a DistributedSampler another process may repeat an example, in one batch of an epoch.

    Args:
        loader: with a map-style dataset and a sampler of torch's own.

    Raises:
        DefenseError: a loader that may yield an example twice, or with an unknown sampler.
    """
    check_torch_loader(loader)
    _shard(loader)
    checked = copy.copy(loader)
    checked._iterator = None
    checked.collate_fn = RowCollate(loader.collate_fn)
    return checked


def is_sharded(loader: Any) -> bool:
    """Return whether a loader's sampler splits the dataset among processes."""
    return isinstance(getattr(loader, "sampler", None), DistributedSampler)


def check_torch_loader(loader: DataLoader[Any]) -> None:
    """Raise an error for a loader whose examples cannot be drawn one by one.

    Raises:
        DefenseError: says what to change.
    """
    if not isinstance(loader, DataLoader):
        raise DefenseError(
            f"DP-SGD needs a torch DataLoader, got {type(loader).__name__}. Return one "
            "DataLoader from `train_dataloader`."
        )
    if type(loader).__iter__ is not DataLoader.__iter__:
        raise DefenseError(
            f"{type(loader).__name__} makes batches in an `__iter__` of its own. {_ALREADY} Use a "
            "plain DataLoader."
        )
    if isinstance(loader.dataset, IterableDataset):
        raise DefenseError(
            "an iterable dataset cannot be sampled by chance: it has no length and no index. Load "
            "it into a map-style dataset (with `__len__` and `__getitem__`)."
        )
    if isinstance(loader.batch_sampler, PoissonBatchSampler):
        raise DefenseError("this loader already samples by Poisson: give each loader once")
    if loader.batch_sampler is None:
        raise DefenseError(
            "batch_size=None turns batching off, and Poisson sampling makes batches: give the "
            "DataLoader a batch_size and single examples."
        )
    if type(loader.batch_sampler) is not BatchSampler:
        raise DefenseError(
            f"the batch sampler {type(loader.batch_sampler).__name__} is one of your own. "
            f"{_ALREADY} Pass batch_size=... instead of batch_sampler=..."
        )
    _sized(loader.dataset)


def _check_fetches_none(loader: DataLoader[Any]) -> None:
    """Raise an error unless a dataset that fetches several examples at once can fetch none."""
    fetch = getattr(loader.dataset, "__getitems__", None)
    if fetch is not None:
        try:
            count = len(fetch([]))
        except Exception as error:
            raise DefenseError(
                f"`{type(loader.dataset).__name__}.__getitems__([])` fails ({error!r}), but a "
                "Poisson batch may be empty: let it return an empty list."
            ) from error
        if count:
            raise DefenseError(
                f"`{type(loader.dataset).__name__}.__getitems__([])` gives {count} examples "
                "instead of none: a Poisson batch may be empty."
            )


def _shard(loader: DataLoader[Any]) -> range:
    """Return the indices of this process's examples, each of which is in the dataset once."""
    if isinstance(loader.dataset, Subset | ConcatDataset):
        _check_once(loader.dataset)
    size, sampler = len(_sized(loader.dataset)), loader.sampler
    # Of these classes exactly: one derived from them may choose or repeat any examples.
    if type(sampler) is RandomSampler and not sampler.replacement:
        plain = sampler.num_samples == size
    elif type(sampler) is DistributedSampler and sampler.dataset is loader.dataset:
        return range(sampler.rank, size, sampler.num_replicas)
    else:
        plain = type(sampler) is SequentialSampler
    if not plain:
        inner = getattr(getattr(sampler, "dataset", None), "_sampler", sampler)
        raise DefenseError(
            f"the sampler {type(inner).__name__} chooses examples in its own way. {_ALREADY} Use "
            "shuffle=True; to train on a part of the data pass torch.utils.data.Subset."
        )
    return range(size)


def _check_once(dataset: Dataset[Any]) -> None:
    """Raise an error where a Subset or ConcatDataset has an example at two places."""
    sources, places = origins(dataset)
    order = np.lexsort((places, sources))
    repeated = (np.diff(sources[order]) == 0) & (np.diff(places[order]) == 0)
    if repeated.any():
        raise DefenseError(
            f"{int(repeated.sum())} of the {len(places)} places in the dataset hold an example "
            "that is at another place too (a Subset with an index twice, or a ConcatDataset of a "
            "dataset with itself), and privacy is accounted for each place: such an example pays "
            "several times. Let each occur once, and train for more epochs."
        )


def origins(dataset: Any) -> tuple[Any, Any]:
    """Return for each place the identity of the example's dataset, and its place there.

    Subset and ConcatDataset are resolved.
    """
    if isinstance(dataset, ConcatDataset):
        parts = [origins(part) for part in dataset.datasets]
        return np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts])
    if isinstance(dataset, Subset):
        indices = np.asarray(dataset.indices)
        if indices.dtype.kind not in "iu":  # keys, or an empty list
            _, places = np.unique(indices, return_inverse=True)
            return np.full(len(indices), id(dataset.dataset), dtype=np.int64), places
        sources, places = origins(dataset.dataset)
        return sources[indices], places[indices]
    size = len(_sized(dataset))
    return np.full(size, id(dataset), dtype=np.int64), np.arange(size)


def _sized(dataset: Dataset[Any]) -> Any:
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise DefenseError(
            f"the dataset {type(dataset).__name__} has no `__len__` or no `__getitem__`: Poisson "
            "sampling needs a map-style dataset."
        )
    return dataset


def _emptied(once: Any, twice: Any) -> Any:
    """Return ``once`` with what is longer in ``twice`` cut to length 0."""
    if isinstance(once, Tensor):
        sizes = zip(once.shape, twice.shape, strict=True)
        longer = [dim for dim, (one_size, two_size) in enumerate(sizes) if one_size != two_size]
        if not longer:
            return once
        shape = list(once.shape)
        shape[longer[0]] = 0
        return once.new_empty(shape)
    if isinstance(once, np.ndarray):
        return _emptied(torch.from_numpy(once), torch.from_numpy(twice)).numpy()
    if isinstance(once, Mapping):
        fields = {key: _emptied(value, twice[key]) for key, value in once.items()}
        return rebuilt(once, fields)
    if isinstance(once, str | bytes):
        return once
    if isinstance(once, list | tuple):
        if len(once) != len(twice):
            return type(once)()
        parts = [_emptied(a, b) for a, b in zip(once, twice, strict=True)]
        if hasattr(once, "_fields"):
            return type(once)(*parts)
        return type(once)(parts)
    return once


def rebuilt(like: Mapping[Any, Any], fields: dict[Any, Any]) -> Any:
    """Return fields in the same type of mapping (HF's BatchEncoding, say).

    Raises:
        DefenseError: the type cannot be made from a dict.
    """
    if type(like) is dict:
        return fields
    try:
        return type(like)(fields)  # type: ignore[call-arg]
    except TypeError as error:
        raise DefenseError(
            f"the collate function returns a {type(like).__name__}, which cannot be made from a "
            "dict with other rows: let it return a dict, a list or a tuple"
        ) from error
