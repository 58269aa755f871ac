"""Poisson sampling of batches, as the accounting of DP-SGD assumes it.

Every example of a client's shard is in a batch with probability ``rate``, independently of every
other example and of every other batch. Batches vary in size and may be empty. An empty batch also
has a release (of noise only) and must not be skipped.
"""

import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Sampler, get_worker_info

from lightning_fedleak.defenses.base import DefenseError
from lightning_fedleak.defenses.dpsgd.recorder import tensors_of
from lightning_fedleak.defenses.randomness import secret_states

# Prefix of the hash that gives the sampling key. Another prefix would draw other examples.
DOMAIN = b"lightning-fedleak poisson sampling 1\0"
# The number of drawn batches whose sizes are stored until they are trained on. Workers of a loader
# fetch far fewer batches ahead of training.
MAX_WAITING = 1 << 12


@dataclass(frozen=True)
class Draws:
    """What determines a client's Poisson samples, besides its shard and rate.

    Attributes:
        entropy: Secret random bytes of the operating system, at least 16, new in every fit
            (``DefenseContext.entropy``).
        client: The index of the client.
        first_step: The index of the first batch; above 0 if sampling continues.
    """

    entropy: bytes = field(repr=False)
    client: int = 0
    first_step: int = 0


class PoissonBatchSampler(Sampler[list[int]]):
    """Batches of indices, each of which is a function of (entropy, client, shard, step).

    The masks (which examples are in a batch) come from SHAKE-256, a cryptographic generator, keyed
    with the secret ``entropy``. (The *noise* of these defences does not come from a cryptographic
    generator.) An example is in a batch if a uniform 64-bit number is below ``rate * 2 ** 64``: the
    probability is exact to 6e-20, and never above ``rate``.

    No sampler draws a step twice: the counter continues over epochs, also after an epoch that ended
    early. A resumed fit has new entropy and so new masks, whatever the counter is.

    Args:
        shard: The indices of this client's examples.
        rate: The probability of each of them to be in a batch, in (0, 1].
        steps: The number of batches in an epoch.
        draws: The secret entropy, the client and the index of the first batch.

    Attributes:
        step: The index of the next batch to draw. Workers fetch batches ahead of training.
        drawn: The sizes of the drawn batches that have not been trained on; None before the first.
        passed_over: The number of batches to skip at the start of the next epoch, if training
            resumes in the middle of it. The trainer discards as many; they are empty and not drawn.
    """

    passed_over = 0  # batches

    def __init__(self, shard: range, rate: float, steps: int, draws: Draws) -> None:
        self.shard = shard
        self.rate = rate
        self.steps = steps
        self.step = draws.first_step
        self.drawn: deque[int] | None = None
        ids = (draws.client, shard.start, shard.step)
        fields = b"".join(value.to_bytes(8, "big") for value in ids)
        self._key = hashlib.sha256(DOMAIN + fields + draws.entropy).digest()

    def __len__(self) -> int:
        """Return the number of batches in an epoch."""
        return self.steps

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the indices of the next ``steps`` batches, some of which may be empty."""
        passed_over, self.passed_over = self.passed_over, 0
        yield from ([] for _ in range(passed_over))
        for _ in range(self.steps - passed_over):
            step, self.step = self.step, self.step + 1
            batch = self.rows(step)
            if self.drawn is None:
                self.drawn = deque(maxlen=MAX_WAITING)
            self.drawn.append(len(batch))
            yield batch

    def loading_key(self) -> bytes:
        """Return the key of the random states from which the next batch is loaded."""
        return hashlib.sha256(b"loading" + self._key + self.step.to_bytes(8, "big")).digest()

    def rows(self, step: int) -> list[int]:
        """Return the indices in the dataset of the rows in batch ``step``."""
        return self.draw(step)

    def draw(self, step: int) -> list[int]:
        """Return the members of the shard (examples or users) that are in batch ``step``."""
        if self.rate == 1:
            return [*self.shard]
        key = self._key + step.to_bytes(8, "big")
        numbers = np.frombuffer(hashlib.shake_256(key).digest(8 * len(self.shard)), dtype="<u8")
        mask = numbers < np.uint64(int(self.rate * 2**64))
        return [self.shard[i] for i in np.flatnonzero(mask).tolist()]


class UserBatchSampler(PoissonBatchSampler):
    """Poisson samples of users: a batch holds the rows of the users that were drawn.

    Args:
        users: The row indices of every user.
        shard: The indices of this process's users.
        rows_per_user: The largest number of rows of one user in a batch, drawn at random among the
            user's rows; None for all rows.
        rate: The probability of each user to be in a batch.
        steps: The number of batches in an epoch.
        draws: The secret entropy, the client and the index of the first batch.
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
        self._counts.clear()  # batches that were drawn for an epoch that ended early never come
        yield from super().__iter__()

    def rows(self, step: int) -> list[int]:
        """Return the rows of the users in batch ``step``, one user after the other.

        Users with the most rows come first: a batch is run in pieces of whole users, and small
        users then fill the pieces.
        """
        users = [self.user_rows(user, step) for user in self.draw(step)]
        users.sort(key=len, reverse=True)
        self._counts.append([len(rows) for rows in users])
        return [row for rows in users for row in rows]

    def claim(self, samples: int) -> list[int]:
        """Return the number of rows of each user in the next drawn batch, and forget that batch.

        Args:
            samples: The number of rows of the batch that is about to be run.

        Raises:
            DefenseError: The next drawn batch has another number of rows.
        """
        if not self._counts or sum(self._counts[0]) != samples:
            raise DefenseError(
                f"DPSGD: training_step got {samples} rows, and the next drawn batch has others: "
                "train on every batch once, in order (in_order=True)"
            )
        return self._counts.popleft()

    def user_rows(self, user: int, step: int) -> list[int]:
        """Return the rows that ``user`` has in batch ``step`` if the user is drawn."""
        rows, limit = self.users[user], self.rows_per_user
        if limit is None or len(rows) <= limit:
            return [*rows]
        ids = b"".join(value.to_bytes(8, "big") for value in (step, user))
        seed = hashlib.shake_256(b"rows" + self._key + ids).digest(32)
        sample = np.random.default_rng(list(seed)).choice(len(rows), limit, replace=False)
        return [rows[i] for i in sorted(sample.tolist())]


class EmptyCollate:
    """A collate function that also makes an empty batch, of the same form, from no examples.

    Rows are clipped, but privacy is accounted for examples. So it refuses a batch whose number of
    rows does not fit the number of examples. Rows are counted in ``input_ids``, or without these in
    all tensors, if they agree.

    For an empty batch it collates one example once and twice. What is longer for two examples is
    cut to length 0: tensors in the first such dimension, and sequences. Everything else is kept.

    Args:
        collate: The collate function of the loader. It may have an attribute ``rows_per_example``,
            which a trainer sets if an example is a pair of texts. Default: 1.
        dataset: The dataset of the example.
        index: The index of the example. An empty batch contains none of its numbers.

    Raises:
        DefenseError: In a call: the number of rows does not fit the number of examples.
    """

    def __init__(self, collate: Callable[[list[Any]], Any], dataset: Any, index: int) -> None:
        self.collate = collate
        self.key: Callable[[], bytes] | None = None  # of the random states, by `poisson_loader`
        self.rows = int(getattr(collate, "rows_per_example", 1))
        self.dataset = dataset
        self.index = index

    def placeholder(self) -> Any:
        """Return a batch of one example, for a process that drew none but must run the model."""
        return self([self.dataset[self.index]])

    def __call__(self, examples: list[Any]) -> Any:
        """Return the batch of these examples.

        Outside of workers it draws from a secret state, also if a trainer makes the loader anew to
        skip batches, as transformers does in a resumed epoch.
        """
        if self.key is None or get_worker_info() is not None:
            return self.batch_of(examples)
        with secret_states(b"collate" + self.key()):
            return self.batch_of(examples)

    def batch_of(self, examples: list[Any]) -> Any:
        """Return the batch, from the present random states."""
        if not examples:
            once = self.collate([self.dataset[self.index]])
            twice = self.collate([self.dataset[self.index], self.dataset[self.index]])
            return _emptied(once, twice)
        batch = self.collate(examples)
        ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
        # With packed texts other tensors hold lengths of documents, so only input_ids count.
        has_ids = isinstance(ids, Tensor) and ids.dim() > 1
        sizes = {t.shape[0] for t in tensors_of(ids if has_ids else batch) if t.dim()}
        if len(sizes) == 1 and sizes != {self.rows * len(examples)}:
            raise DefenseError(
                f"the collate function made {sizes.pop()} rows of {len(examples)} examples: let it "
                f"make {self.rows} for each"
            )
        return batch


def _emptied(once: Any, twice: Any) -> Any:
    """Return the batch ``once``, with everything that is longer in ``twice`` cut to length 0."""
    if isinstance(once, Tensor):
        sizes = zip(once.shape, twice.shape, strict=True)
        dims = [dim for dim, (size, doubled_size) in enumerate(sizes) if size != doubled_size]
        if not dims:
            return once
        shape = list(once.shape)
        shape[dims[0]] = 0
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
    """Return fields as the type of ``like``: a mapping (e.g. HF's BatchEncoding), list or tuple."""
    if type(like) is dict:
        return fields
    if hasattr(like, "_fields"):
        return type(like)(*fields)
    return type(like)(fields)


@dataclass(frozen=True)
class Sampling:
    """A loader for DP-SGD, with the numbers that accounting and the update need.

    Attributes:
        loader: The loader of Poisson-sampled batches.
        rate: The probability of each example (user) to be in a batch, for accounting.
        expected: The expected batch size, by which a clipped sum is divided.
        examples: The number of examples of all clients; if users are drawn, the number of users.
        users: The rows of each user by key; None if examples are drawn.
    """

    loader: DataLoader[Any]
    rate: float
    expected: float
    examples: int
    users: Mapping[Any, Sequence[int]] | None = None

    @property
    def users_digest(self) -> int:
        """Return a digest, of 48 bits, of the rows of every user; 0 if examples are drawn."""
        if self.users is None:
            return 0
        text = ";".join(",".join(map(str, rows)) for rows in self.users.values())
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big")
