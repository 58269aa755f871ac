"""How DP-SGD draws batches: the loader that it trains with, and the sample rate to account."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Subset

from lightning_fedleak.defenses.base import DefenseContext, DefenseError
from lightning_fedleak.defenses.dpsgd.batch import overlap_warning, sizes_of, tensors_of
from lightning_fedleak.defenses.dpsgd.correlated_noise import (
    Places,
    places_of,
    values_in,
)
from lightning_fedleak.defenses.dpsgd.poisson import (
    Draws,
    EmptyCollate,
    PoissonBatchSampler,
    UserBatchSampler,
    check_torch_loader,
    checked_loader,
    is_sharded,
    poisson_loader,
)
from lightning_fedleak.defenses.dpsgd.settings import GroupBy, ReleaseSettings, Users
from lightning_fedleak.defenses.processes import Team
from lightning_fedleak.model_state import preserve_process

COMPARED = 5  # examples that show whether processes have the same dataset. Not tuned
ORDERED = 8  # examples that show whether the collate function keeps their order. Not tuned
CANDIDATES = 64  # examples these are chosen from, to differ in length where any do. Not tuned


@dataclass(frozen=True)
class Sampling:
    """A loader for DP-SGD.

    Attributes:
        loader: yields the batches.
        rate: chance of each example to be in a batch, as it is to be accounted.
        expected: number of examples by which a clipped sum is divided.
        examples: of all clients; where users are drawn, the number of users.
        users: the rows of each user; None where examples are drawn.
        groups: of examples or users, from which batches are drawn in turn.
        places: of examples, where noise is correlated over steps; else None.
    """

    loader: DataLoader[Any]
    rate: float
    expected: float
    examples: int
    users: Sequence[Sequence[int]] | None = None
    groups: int = 1
    places: Places | None = None

    @property
    def next_step(self) -> int:
        """Return the number of the next Poisson batch, where the next loader continues."""
        sampler = self.loader.batch_sampler
        return sampler.step if isinstance(sampler, PoissonBatchSampler) else 0

    def check_size(self, samples: int) -> None:
        """Raise an error unless a batch has as many samples as examples were drawn for it.

        Raises:
            DefenseError: something between the loader and the training step changed the batch.
        """
        sampler, size = self.loader.batch_sampler, self.loader.batch_size
        foreign = isinstance(sampler, PoissonBatchSampler) and not sampler.claim(samples)
        if foreign or (size is not None and samples > size):
            raise DefenseError(
                f"DPSGD: training_step gets a batch of {samples} samples, and the loader made none "
                "of that size. A hook (on_after_batch_transfer?) or callback that adds rows to a "
                "batch, repeats or cuts them, or another loader, makes an example count "
                "otherwise than is accounted. Let each batch keep one row for each example drawn."
            )

    def check_turn(self, row: int, samples: int) -> None:
        """Raise an error for a batch that was drawn for another step of its mechanism.

        Raises:
            DefenseError: a batch was left out, or came twice.
        """
        sampler = self.loader.batch_sampler
        if self.groups == 1 or not isinstance(sampler, PoissonBatchSampler):
            return
        if not sampler.claim_turn(row, samples):
            raise DefenseError(
                f"DPSGD: a batch of {samples} samples comes in step {row} that was not drawn for "
                "it: one was left out, or came twice. With correlated noise each example has its "
                "own steps. Let every batch have one release, in the order in which they are drawn."
            )

    def users_in(self, samples: int) -> list[int] | None:
        """Return how many rows each user has in the next batch; None where examples are drawn.

        Raises:
            DefenseError: the batch is not the one that was drawn.
        """
        sampler = self.loader.batch_sampler
        if not isinstance(sampler, UserBatchSampler):
            return None
        counts = sampler.claim_users(samples)
        if counts is None:
            raise DefenseError(
                f"DPSGD: training_step gets a batch of {samples} rows, and the next that was drawn "
                "has another number: whose rows they are is not known. Let batches come in the "
                "order in which the loader makes them (in_order=True), each once."
            )
        return counts

    def placeholder(self) -> Any:
        """Return a batch of one example that was not drawn and must not count."""
        assert isinstance(self.loader.collate_fn, EmptyCollate)
        return self.loader.collate_fn.placeholder()


def sampling_of(
    dataloader: Any,
    context: DefenseContext,
    draws: Draws,
    *,
    poisson: bool,
    release: ReleaseSettings,
    users: Users | None = None,
) -> Sampling:
    """Return the loader to train with instead of ``dataloader``.

    Args:
        dataloader: as Lightning has prepared it.
        context: client and process.
        draws: entropy and step; the groups follow from the mechanism.
        poisson: whether to draw Poisson samples. Otherwise the loader's batches are taken, and each
            example is accounted as if it were in all of them.
        release: ``"banded"`` noise draws from ``bands`` groups in turn, ``"banded_inverse"`` the
            same batches in every epoch.
        users: None to draw examples.

    Raises:
        DefenseError: a loader that cannot be sampled, or one that yields an example in several
            processes of one client, or in several clients in one step; where users are drawn, one
            that does not keep the order of their rows.
    """
    check_torch_loader(dataloader)
    examples, batch_size = sizes_of(dataloader)
    replicas = getattr(getattr(dataloader, "sampler", None), "num_replicas", 1)
    if context.clients > 1 and not is_sharded(dataloader):
        warnings.warn(overlap_warning(context.clients, release.trust), stacklevel=3)
    if context.processes > 1:
        _check_shares(dataloader, context)
    if not poisson:
        _check_repeats(dataloader, context)
        expected = float(batch_size * context.processes)
        return Sampling(checked_loader(dataloader), 1.0, expected, examples)
    mechanism = release.mechanism
    by_key = None if users is None else rows_by_user(dataloader.dataset, users.group_by)
    rows = None if by_key is None else [*by_key.values()]
    examples = examples if rows is None else len(rows)
    share = max(1, examples // replicas)
    steps = max(1, round(share / batch_size))
    groups = _count_groups(release, steps, share, batch_size)
    rate = 1.0 if mechanism == "banded_inverse" else min(1.0, groups * batch_size / share)
    loader = poisson_loader(
        dataloader,
        rate,
        replace(draws, groups=groups),
        clients=context.clients,
        steps=steps if groups > 1 else None,
        users=rows,
        rows_per_user=None if users is None else users.rows_per_user,
    )
    assert isinstance(loader.batch_sampler, PoissonBatchSampler)
    if rows is not None:
        _check_order(loader)
    shard = loader.batch_sampler.shard
    places = None
    if mechanism != "independent":
        places = places_of(loader.dataset, shard, by_key)
    expected = rate * (len(shard) if context.processes == 1 else examples) / groups
    if release.trust == "central" and context.clients > 1:
        # The same on all clients: shards differ in size, and with them rate * size.
        expected = float(batch_size)
    return Sampling(loader, rate, expected, examples, rows, groups, places)


def _count_groups(release: ReleaseSettings, steps: int, share: int, batch_size: int) -> int:
    """Return the number of groups that batches are drawn from in turn.

    Args:
        release: mechanism and bands.
        steps: batches in an epoch.
        share: examples or users of this process.
        batch_size: of them in a batch, on average.

    Raises:
        DefenseError: a group is smaller than a batch.
    """
    if release.mechanism != "banded":
        return steps if release.mechanism == "banded_inverse" else 1
    bands = release.bands or 1
    if bands * batch_size > share:
        raise DefenseError(
            f"DPSGD: {share} examples or users in {bands} groups are fewer than batch_size="
            f"{batch_size} in each, and batches are drawn from one group at a time. Use at most "
            f"bands={max(1, share // batch_size)}, or smaller batches."
        )
    return bands


def _check_shares(dataloader: Any, context: DefenseContext) -> None:
    """Raise an error where an example may be in the batches of two processes of one client.

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
    """Raise an error where two processes may get the same example in one step.

    A sampler that splits the data repeats the first examples at the end of an epoch, so that parts
    have equal sizes. Several clients with more than one step in an epoch are accounted for that.
    """
    if not is_sharded(dataloader) or (context.processes == 1 and len(dataloader) > 1):
        return
    sampler = dataloader.sampler
    if len(dataloader.dataset) % sampler.num_replicas and not sampler.drop_last:
        raise DefenseError(
            "DPSGD: poisson_sampling=False takes the batches of a sampler that repeats examples, "
            f"because {len(dataloader.dataset)} of them are not the same number for each of the "
            f"{sampler.num_replicas} processes. Use poisson_sampling=True, or leave examples out "
            "(DistributedSampler(drop_last=True), torch.utils.data.Subset)."
        )


def _check_order(loader: DataLoader[Any]) -> None:
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
            if _equal(tensor, repeated):
                # Or it is the same whatever the examples are: their numbers in the batch, say.
                keeps_order = _equal(tensor[order], reordered) or any(
                    _equal(tensor, constant) for constant in _collated(loader, places[:1] * count)
                )
                conclusive = conclusive or not _equal(tensor, tensor[:1].expand_as(tensor))
            else:
                keeps_order = not _is_shuffled(tensor, repeated)
            if not keeps_order:
                raise DefenseError(
                    "DPSGD: with unit=Users() the user of a row follows from its place in the "
                    f"batch, and the collate function ({_collate_name(loader)}) or the dataset's "
                    "`__getitems__` sorts or shuffles rows, or makes a row of several examples: "
                    "one user's rows would be clipped as another's. Let row i of every tensor be "
                    "of example i (pack_padded_sequence takes enforce_sorted=False)."
                )
    if count > 1 and not conclusive:
        warnings.warn(
            "DPSGD: with unit=Users() the user of a row follows from its place in the batch. "
            f"Whether the collate function ({_collate_name(loader)}) keeps the order of examples "
            "could not be checked: its batches are random, or the same for all examples. It is "
            "trusted.",
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
    dataset: Any = loader.dataset
    fetch = getattr(dataset, "__getitems__", None)
    examples = fetch(places) if fetch else [dataset[place] for place in places]
    return [tensor for tensor in tensors_of(loader.collate_fn(examples)) if tensor.dim()]


def _equal(first: Tensor, second: Tensor) -> bool:
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


def check_same_data(loader: DataLoader[Any], team: Team, *, poisson: bool) -> None:
    """Raise an error for processes of one client whose parts may overlap; a collective.

    The parts are places in the dataset. Where processes have shuffled or split it differently, or
    where samplers that are not replaced have different seeds, an example may be in several parts:
    clipped in each, and more than once in the sum. A few examples are compared, if loading one
    twice gives the same.

    Args:
        loader: for training; its dataset is whole in each process.
        team: the processes of this client.
        poisson: whether the sampler was replaced.

    Raises:
        DefenseError: they differ, or an example cannot be loaded.
    """
    if team.size == 1:
        return
    if not poisson:
        sampler: Any = loader.sampler
        names = "seed", "shuffle", "drop_last"
        team.check_alike(**{f"the sampler's {n}": float(getattr(sampler, n)) for n in names})
    with team.together():
        digest, repeated = _digest(loader.dataset), _digest(loader.dataset)
    changes, high, low = team.largest([digest != repeated, digest, -digest])
    if high != -low and not changes:
        raise DefenseError(
            "DPSGD: the processes of the client hold other examples at the same places of their "
            "datasets, so an example may be in the parts of two of them, clipped in each and twice "
            "in the sum. Shuffle and split the data by the same seed in all processes."
        )


def _digest(dataset: Any) -> int:
    """Return a digest of a few examples, of 48 bits."""
    last = len(dataset) - 1
    examples = [dataset[last * i // (COMPARED - 1)] for i in range(COMPARED)]
    digest = hashlib.sha256("\0".join(values_in(examples)).encode()).digest()
    return int.from_bytes(digest[:6], "big")


# ---- users ----------------------------------------------------------------------------------


def users_of(dataset: Any, group_by: GroupBy) -> list[list[int]]:
    """Return the rows of every user, without the keys of :func:`rows_by_user`."""
    return [*rows_by_user(dataset, group_by).values()]


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
                f"DPSGD: row {row}'s {_name(group_by)} is a {type(key).__name__}, by which users "
                "cannot be compared; give a number or a string"
            ) from error
        if user is None:
            raise DefenseError(
                f"DPSGD: row {row} has no {_name(group_by)} (it is {key!r}), so its user is not "
                "known. Leave such rows out of the dataset, or give them a key."
            )
    return users


def digest_of(users: Sequence[Sequence[int]]) -> int:
    """Return a digest, of 48 bits, of the rows of every user."""
    text = ";".join(",".join(map(str, rows)) for rows in users)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big")


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


def _name(group_by: GroupBy) -> str:
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
                f"DPSGD: group_by is a {type(group_by).__name__}, whose keys have no order. "
                "Give the name of a column, a function of an example, or a list with one key for "
                "each row."
            )
        return group_by
    names = getattr(dataset, "column_names", None)
    if names is not None:
        if group_by not in names:
            raise _no_column(group_by, names)
        column: Sequence[Any] = dataset[group_by]
        return column
    keys = []
    for row in range(len(dataset)):
        example = dataset[row]
        if not isinstance(example, Mapping) or group_by not in example:
            names = [*example] if isinstance(example, Mapping) else []
            raise _no_column(group_by, names, row)
        keys.append(example[group_by])
    return keys


def _no_column(name: str, names: Sequence[Any], row: int | None = None) -> DefenseError:
    owner = "the dataset has" if row is None else f"row {row} has"
    columns = f"; {owner} {', '.join(map(repr, names))}" if names else ""
    return DefenseError(
        f"DPSGD: unit=Users() needs the user of each row, and {owner} no column '{name}'{columns}. "
        "Give group_by the name of one, a function of an example, or one key for each row."
    )
