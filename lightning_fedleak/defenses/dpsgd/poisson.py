"""Poisson sampling of batches, as the accounting of DP-SGD assumes it.

Every example of a client's shard is in a batch with chance ``rate``, independently of every other
example and of every other batch. Batches vary in size and may be empty; an empty one is a release
like every other and must not be skipped.

Where batches are taken as a loader makes them, :func:`checked_loader` sees to it that no example is
in one of them twice.
"""

from __future__ import annotations

import copy
import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
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

DOMAIN = b"lightning-fedleak poisson sampling 1\0"
LEAST_ENTROPY = 16
MOST_WAITING = 1 << 12
"""Batches whose sizes are remembered; workers fetch far fewer ahead of training."""
_ALREADY = (
    "DP-SGD samples each example independently and replaces the sampler, or with poisson=False "
    "counts each example once in a batch: it must know what the sampler does."
)


class PoissonBatchSampler(Sampler[list[int]]):
    """Batches of indices; who is in one is a function of (entropy, client, shard, step).

    The masks come from SHAKE-256 keyed with the secret ``entropy``, a cryptographic generator:
    without the entropy nobody can tell them from true randomness. (The *noise* of these defences
    is not from a cryptographic generator.) An example is in where a uniform 64-bit number lies
    below ``rate * 2 ** 64``: the chance is exact to 6e-20, never above ``rate``.

    No sampler draws a step twice: the counter goes on over epochs, also over one that was left
    early. A resumed fit has new entropy and so new masks, whatever the counter is.

    Args:
        shard: the indices of this client's examples.
        rate: chance of each of them to be in a batch, in (0, 1].
        steps: batches in an epoch.
        entropy: secret bytes, at least 16, new in every fit.
        client: index of the client.
        first_step: number of the first batch.
        groups: into which the examples are split by their places, in a way that is public; a batch
            is drawn from one of them, one after the other (cyclic Poisson sampling, Choquette-Choo
            et al. 2023, arXiv 2306.08153, Sect. 4).
        turn: tells number of the release that the first batch of an epoch is for, which settles the
            group.

    Attributes:
        step: number of the next batch. Workers fetch ahead of training.
    """

    def __init__(
        self,
        shard: range,
        rate: float,
        steps: int,
        *,
        entropy: bytes,
        client: int,
        first_step: int = 0,
        groups: int = 1,
        turn: Callable[[], int] = int,
    ) -> None:
        self.shard = shard
        self.rate = rate
        self.steps = steps
        self.step = first_step
        self.groups = groups
        self._turn = turn
        self._ahead = 0
        self._turns: deque[tuple[int, int]] = deque(maxlen=MOST_WAITING)
        mixed = np.random.default_rng(groups).permutation(len(shard))
        self._group = mixed % groups
        self._sizes: deque[int] | None = None
        place = (client, shard.start, shard.step)
        fields = b"".join(value.to_bytes(8, "big") for value in place)
        self._key = hashlib.sha256(DOMAIN + fields + entropy).digest()

    def __len__(self) -> int:
        """Batches in an epoch."""
        return self.steps

    def __iter__(self) -> Iterator[list[int]]:
        """The next ``steps`` batches, empty ones among them."""
        self._turns.clear()  # those of an epoch that was left early never come
        self._ahead = self._turn() - self.step
        for _ in range(self.steps):
            step, self.step = self.step, self.step + 1
            drawn = self.rows(step)
            if self._sizes is None:
                self._sizes = deque(maxlen=MOST_WAITING)
            self._sizes.append(len(drawn))
            self._turns.append((step + self._ahead, len(drawn)))
            yield drawn

    def rows(self, step: int) -> list[int]:
        """The places in the dataset that batch number ``step`` is made of."""
        return self.draw(step)

    def claim(self, samples: int) -> bool:
        """Whether a batch of so many examples was drawn and not claimed yet; claims it.

        Also true where no batch was drawn at all, so that none can have come from here.
        """
        if self._sizes is None:
            return True
        if samples not in self._sizes:
            return False
        self._sizes.remove(samples)
        return True

    def claim_turn(self, row: int, samples: int) -> bool:
        """Whether the next batch was drawn for that release, and is of so many examples.

        Also true where no batch was drawn at all.
        """
        return not self._turns or self._turns.popleft() == (row, samples)

    def draw(self, step: int) -> list[int]:
        """The indices in batch number ``step``."""
        inside = self._group == (step + self._ahead) % self.groups
        if self.rate < 1:
            key = self._key + step.to_bytes(8, "big")
            stream = hashlib.shake_256(key).digest(8 * len(self.shard))
            inside &= np.frombuffer(stream, dtype="<u8") < np.uint64(int(self.rate * 2**64))
        return [self.shard[place] for place in np.flatnonzero(inside).tolist()]

    def set_epoch(self, epoch: int) -> None:
        """Nothing: every batch is drawn anew anyway."""


class UserBatchSampler(PoissonBatchSampler):
    """The same of users: who is drawn is in the batch with all rows, or with as many as may be.

    Args:
        users: the rows of every user.
        shard: numbers of this process's users.
        most: rows of one user in a batch, drawn at random among theirs; None for all.
        rate: chance of each user to be in a batch.
        steps: batches in an epoch.
        entropy: as above.
        client: as above.
        first_step: as above.
        groups: as above, of users.
        turn: as above.
    """

    def __init__(
        self,
        users: Sequence[Sequence[int]],
        shard: range,
        most: int | None,
        rate: float,
        steps: int,
        *,
        entropy: bytes,
        client: int,
        first_step: int = 0,
        groups: int = 1,
        turn: Callable[[], int] = int,
    ) -> None:
        super().__init__(
            shard,
            rate,
            steps,
            entropy=entropy,
            client=client,
            first_step=first_step,
            groups=groups,
            turn=turn,
        )
        self.users = users
        self.most = most
        self._counts: deque[list[int]] = deque(maxlen=MOST_WAITING)

    def __iter__(self) -> Iterator[list[int]]:
        """The rows of the next ``steps`` batches, user by user."""
        self._counts.clear()  # those of an epoch that was left early never come
        yield from super().__iter__()

    def rows(self, step: int) -> list[int]:
        """The rows of those who are in batch number ``step``, one user after the other.

        Who has most comes first: who has more than are run at once is clipped by themselves.
        """
        drawn = [self._rows_of(user, step) for user in self.draw(step)]
        drawn.sort(key=len, reverse=True)
        self._counts.append([len(rows) for rows in drawn])
        return [row for rows in drawn for row in rows]

    def claim_users(self, samples: int) -> list[int] | None:
        """How many rows each user of the next batch has; None where it has not so many rows."""
        if not self._counts or sum(self._counts[0]) != samples:
            return None
        return self._counts.popleft()

    def _rows_of(self, user: int, step: int) -> list[int]:
        rows = self.users[user]
        if self.most is None or len(rows) <= self.most:
            return [*rows]
        place = b"".join(value.to_bytes(8, "big") for value in (step, user))
        seed = hashlib.shake_256(b"rows" + self._key + place).digest(32)
        chosen = np.random.default_rng(list(seed)).choice(len(rows), self.most, replace=False)
        return [rows[i] for i in sorted(chosen.tolist())]


class RowCollate:
    """Collates as ``collate`` does, and refuses another number of rows than of examples.

    That is, a batch in which all tensors have the same first dimension, but not one row for each
    example: what is clipped row by row would then not be what one example adds.

    Args:
        collate: the loader's own.

    Raises:
        DefenseError: in a call, another number of rows than of examples.
    """

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self.collate = collate

    def __call__(self, examples: list[Any]) -> Any:
        """The batch of these examples."""
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
    """The same, and gives a batch of the same form for no examples at all.

    For no examples it collates one example once and twice. Whatever grew with the number of
    examples is per example and is cut to nothing: tensors in the dimension that grew (dimension 0
    of most), and sequences of other things to empty ones. What did not grow belongs to the batch
    and stays.

    Args:
        collate: the loader's own.
        dataset: where the example comes from.
        index: of the example; no number of it is left in an empty batch.

    Raises:
        DefenseError: in a call, another number of rows than of examples.
    """

    def __init__(self, collate: Callable[[list[Any]], Any], dataset: Any, index: int) -> None:
        super().__init__(collate)
        self.dataset = dataset
        self.index = index

    def placeholder(self) -> Any:
        """The batch of one example, for a process that must run the model and has drawn none."""
        return super().__call__([self.dataset[self.index]])

    def __call__(self, examples: list[Any]) -> Any:
        """The batch of these examples."""
        if examples:
            return super().__call__(examples)
        once = self.collate([self.dataset[self.index]])
        twice = self.collate([self.dataset[self.index], self.dataset[self.index]])
        return _emptied(once, twice)


def poisson_loader(
    loader: DataLoader[Any],
    rate: float,
    *,
    client: int,
    clients: int,
    entropy: bytes,
    first_step: int = 0,
    steps: int | None = None,
    users: Sequence[Sequence[int]] | None = None,
    rows_per_user: int | None = None,
    groups: int = 1,
    turn: Callable[[], int] = int,
) -> DataLoader[Any]:
    """The same loader with Poisson sampling: dataset, collate function and workers stay.

    Where a DistributedSampler splits the dataset (Lightning puts one in under DDP) the shard is
    what it gives this process, without shuffling and without the examples it repeats to make shards
    alike in size: each example belongs to exactly one process. Otherwise the shard is the whole
    dataset. Processes with different shards draw different masks, of one client or of several.

    Args:
        loader: with a map-style dataset and a sampler of torch's own.
        rate: chance of each example to be in a batch, in (0, 1]; mean batch size over size of the
            shard.
        client: index of this client.
        clients: number of clients.
        entropy: 32 secret bytes of the operating system, drawn anew for every fit
            (``DefenseContext.entropy``).
        first_step: number of the first batch, where a resumed run goes on.
        steps: batches in an epoch; default ``round(1 / rate)``, so that each example is drawn once
            an epoch on average.
        users: the rows of every user, where users are drawn and not examples; then the rate is
            that of a user, and processes share users.
        rows_per_user: of one user in a batch; None for all.
        groups: as of :class:`PoissonBatchSampler`.
        turn: likewise.

    Returns:
        A new DataLoader; its ``batch_sampler`` is a :class:`PoissonBatchSampler`.

    Raises:
        DefenseError: a loader whose sampling cannot be replaced without changing what it loads, or
            a value out of range; says what to change.
    """
    check_sample_rate(rate)
    if not 0 <= client < clients:
        raise DefenseError(f"client={client} must be from 0 to {clients - 1}")
    if len(entropy) < LEAST_ENTROPY:
        raise DefenseError(
            f"entropy of {len(entropy)} bytes can be guessed: give at least {LEAST_ENTROPY} of "
            "os.urandom"
        )
    if steps is None:
        steps = max(1, round(1 / rate))
    check_count(steps, "steps")
    check_torch_loader(loader)
    _check_none_of_several(loader)
    shard = _shard(loader)
    if users is not None:
        shard = range(shard.start, len(users), shard.step)
    if not shard:
        raise DefenseError(
            f"client {client} has no {'examples' if users is None else 'users'}: the dataset holds "
            f"{len(_sized(loader.dataset) if users is None else users)} for all clients. Use fewer "
            "clients or more data."
        )
    drawn: dict[str, Any] = {
        "entropy": entropy,
        "client": client,
        "first_step": first_step,
        "groups": groups,
        "turn": turn,
    }
    if users is None:
        sampler, first = PoissonBatchSampler(shard, rate, steps, **drawn), shard[0]
    else:
        sampler = UserBatchSampler(users, shard, rows_per_user, rate, steps, **drawn)
        first = users[shard[0]][0]
    keep: dict[str, Any] = {
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
    return DataLoader(loader.dataset, batch_sampler=sampler, collate_fn=collate, **keep)


def checked_loader(loader: DataLoader[Any]) -> DataLoader[Any]:
    """The same loader where it gives an example once in a batch and an epoch at most, as one row.

    Under a DistributedSampler an example may be repeated on another process, in one batch of an
    epoch.

    Args:
        loader: with a map-style dataset and a sampler of torch's own.

    Raises:
        DefenseError: a loader that may give an example twice, or whose sampler is not known.
    """
    check_torch_loader(loader)
    _shard(loader)
    checked = copy.copy(loader)
    checked._iterator = None
    checked.collate_fn = RowCollate(loader.collate_fn)
    return checked


def is_sharded(loader: Any) -> bool:
    """Whether its sampler splits the dataset among processes."""
    return isinstance(getattr(loader, "sampler", None), DistributedSampler)


def check_torch_loader(loader: DataLoader[Any]) -> None:
    """Refuses a loader whose examples cannot be told apart and drawn one by one.

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


def _check_none_of_several(loader: DataLoader[Any]) -> None:
    several = getattr(loader.dataset, "__getitems__", None)
    if several is not None:
        try:
            none = len(several([]))
        except Exception as error:
            raise DefenseError(
                f"`{type(loader.dataset).__name__}.__getitems__([])` fails ({error!r}), but a "
                "Poisson batch may be empty: let it return an empty list."
            ) from error
        if none:
            raise DefenseError(
                f"`{type(loader.dataset).__name__}.__getitems__([])` gives {none} examples instead "
                "of none: a Poisson batch may be empty."
            )


def _shard(loader: DataLoader[Any]) -> range:
    """Indices of this process's examples, each of which stands once in the dataset."""
    if isinstance(loader.dataset, Subset | ConcatDataset):
        _check_once(loader.dataset)
    size, sampler = len(_sized(loader.dataset)), loader.sampler
    # Of these classes exactly: one derived from them may choose, or repeat, what it likes.
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
    """Refuses a dataset that torch's own classes make of others with an example in two places."""
    sources, places = origins(dataset)
    order = np.lexsort((places, sources))
    again = (np.diff(sources[order]) == 0) & (np.diff(places[order]) == 0)
    if again.any():
        raise DefenseError(
            f"{int(again.sum())} of the {len(places)} places in the dataset hold an example that "
            "stands at another place too (a Subset with an index twice, or a ConcatDataset of a "
            "dataset with itself), and privacy is accounted for each place: such an example pays "
            "several times. Let each stand once, and train for more epochs."
        )


def origins(dataset: Any) -> tuple[Any, Any]:
    """For each place the dataset that its example comes from, by identity, and where it is there.

    Subset and ConcatDataset are looked through.
    """
    if isinstance(dataset, ConcatDataset):
        parts = [origins(part) for part in dataset.datasets]
        return np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts])
    if isinstance(dataset, Subset):
        indices = np.asarray(dataset.indices)
        if indices.dtype.kind not in "iu":  # keys, or none at all
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
    """What is left of ``once`` without what grew from it to ``twice``."""
    if isinstance(once, Tensor):
        grew = [d for d, (a, b) in enumerate(zip(once.shape, twice.shape, strict=True)) if a != b]
        if not grew:
            return once
        shape = list(once.shape)
        shape[grew[0]] = 0
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
    """The same kind of mapping (HF's BatchEncoding, say).

    Raises:
        DefenseError: it cannot be made of a dict.
    """
    if type(like) is dict:
        return fields
    try:
        return type(like)(fields)  # type: ignore[call-arg]
    except TypeError as error:
        raise DefenseError(
            f"the collate function returns a {type(like).__name__}, of which none with other rows "
            "can be made: let it return a dict, a list or a tuple"
        ) from error


__all__ = [
    "EmptyCollate",
    "PoissonBatchSampler",
    "RowCollate",
    "UserBatchSampler",
    "check_torch_loader",
    "checked_loader",
    "is_sharded",
    "origins",
    "poisson_loader",
    "rebuilt",
]
