"""Poisson sampling of batches, as the accounting of DP-SGD assumes it.

Every example of a client's shard is in a batch with chance ``rate``, independently of every other
example and of every other batch. Batches vary in size and may be empty; an empty one is a release
like every other and must not be skipped.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Sampler

from lightning_fedleak.defenses.base import DefenseError
from lightning_fedleak.defenses.dpsgd.recorder import tensors_of

DOMAIN = b"lightning-fedleak poisson sampling 1\0"  # prefix of the hash; another gives other masks
MAX_WAITING = 1 << 12  # batches whose sizes are stored; workers fetch far fewer ahead of training


@dataclass(frozen=True)
class Draws:
    """What a client's Poisson samples follow from, beside its shard and rate.

    Attributes:
        entropy: secret bytes of the operating system, at least 16, new in every fit
            (``DefenseContext.entropy``).
        client: index of the client.
        first_step: number of the first batch, where a resumed run goes on.
    """

    entropy: bytes = field(repr=False)
    client: int = 0
    first_step: int = 0


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
        draws: entropy and client.

    Attributes:
        step: number of the next batch. Workers fetch ahead of training.
        drawn: sizes of the batches that no release has claimed; None before the first is drawn.
        passed_over: how many batches the next epoch begins with that its reader discards, because
            it goes on in the middle of one: they are empty, and none of them is drawn.
    """

    passed_over = 0

    def __init__(self, shard: range, rate: float, steps: int, draws: Draws) -> None:
        self.shard = shard
        self.rate = rate
        self.steps = steps
        self.step = draws.first_step
        self.drawn: deque[int] | None = None
        place = (draws.client, shard.start, shard.step)
        fields = b"".join(value.to_bytes(8, "big") for value in place)
        self._key = hashlib.sha256(DOMAIN + fields + draws.entropy).digest()

    def __len__(self) -> int:
        """Return the number of batches in an epoch."""
        return self.steps

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the next ``steps`` batches, with empty ones."""
        passed_over, self.passed_over = self.passed_over, 0
        yield from ([] for _ in range(passed_over))
        for _ in range(self.steps - passed_over):
            step, self.step = self.step, self.step + 1
            batch = self.rows(step)
            if self.drawn is None:
                self.drawn = deque(maxlen=MAX_WAITING)
            self.drawn.append(len(batch))
            yield batch

    def rows(self, step: int) -> list[int]:
        """Return the places in the dataset of batch number ``step``."""
        return self.draw(step)

    def draw(self, step: int) -> list[int]:
        """Return the indices in batch number ``step``."""
        if self.rate == 1:
            return [*self.shard]
        key = self._key + step.to_bytes(8, "big")
        numbers = np.frombuffer(hashlib.shake_256(key).digest(8 * len(self.shard)), dtype="<u8")
        inside = numbers < np.uint64(int(self.rate * 2**64))
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
        draws: entropy and client.
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
        self._counts: deque[list[int]] = deque(maxlen=MAX_WAITING)

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

    def claim(self, samples: int) -> list[int]:
        """Claim the next batch, and return how many rows each of its users has.

        Args:
            samples: of the batch that is about to be run.

        Raises:
            DefenseError: it is not the next.
        """
        if not self._counts or sum(self._counts[0]) != samples:
            raise DefenseError(
                f"DPSGD: training_step gets {samples} rows, and the next batch that was drawn has "
                "another number. Let batches come in the order in which the loader makes them "
                "(in_order=True), each once."
            )
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


class EmptyCollate:
    """A collate function that also returns an empty batch, of the same form, for no examples.

    It refuses a batch whose ``input_ids``, or where there are none all tensors, have not one row
    for each example, because rows are clipped and privacy is accounted for examples.

    For no examples it collates one example once and twice. What grew with the number of examples is
    cut to length 0: tensors in the dimension that grew, and sequences. What did not grow belongs to
    the batch and stays.

    Args:
        collate: The collate function of the loader. It may have an attribute ``rows_per_example``,
            of a trainer whose examples are pairs; 1 without.
        dataset: The dataset of the example.
        index: The index of the example; no number of it is in an empty batch.

    Raises:
        DefenseError: in a call, another number of rows than of examples.
    """

    def __init__(self, collate: Callable[[list[Any]], Any], dataset: Any, index: int) -> None:
        self.collate = collate
        self.rows = int(getattr(collate, "rows_per_example", 1))
        self.dataset = dataset
        self.index = index

    def placeholder(self) -> Any:
        """Return the batch of one example, for a process that must run the model and drew none."""
        return self([self.dataset[self.index]])

    def __call__(self, examples: list[Any]) -> Any:
        """Return the batch of these examples."""
        if not examples:
            once = self.collate([self.dataset[self.index]])
            twice = self.collate([self.dataset[self.index], self.dataset[self.index]])
            return _emptied(once, twice)
        batch = self.collate(examples)
        ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
        # Beside packed ids are documents' lengths.
        alone = isinstance(ids, Tensor) and ids.dim() > 1
        sizes = {t.shape[0] for t in tensors_of(ids if alone else batch) if t.dim()}
        if len(sizes) == 1 and sizes != {self.rows * len(examples)}:
            raise DefenseError(
                f"the collate function made {sizes.pop()} rows of {len(examples)} examples: let it "
                f"give {self.rows} for each, and split or pack texts in the dataset."
            )
        return batch


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
        return rebuilt(once, {key: _emptied(value, twice[key]) for key, value in once.items()})
    if isinstance(once, str | bytes):
        return once
    if isinstance(once, list | tuple):
        if len(once) != len(twice):
            return type(once)()
        return rebuilt(once, [_emptied(a, b) for a, b in zip(once, twice, strict=True)])
    return once


def rebuilt(like: Any, fields: dict[Any, Any] | list[Any]) -> Any:
    """Return fields in the same type of mapping (HF's BatchEncoding, say), list or tuple."""
    if type(like) is dict:
        return fields
    if hasattr(like, "_fields"):
        return type(like)(*fields)
    return type(like)(fields)


@dataclass(frozen=True)
class Sampling:
    """A loader for DP-SGD.

    Attributes:
        loader: yields the batches.
        rate: chance of each example to be in a batch, as it is to be accounted.
        expected: number of examples by which a clipped sum is divided.
        examples: The number of examples of all clients; where users are drawn, the number of users.
        users: the rows of each user by key; None where examples are drawn.
    """

    loader: DataLoader[Any]
    rate: float
    expected: float
    examples: int
    users: Mapping[Any, Sequence[int]] | None = None

    @property
    def users_digest(self) -> int:
        """Return a digest, of 48 bits, of the rows of every user; 0 where examples are drawn."""
        if self.users is None:
            return 0
        text = ";".join(",".join(map(str, rows)) for rows in self.users.values())
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big")
