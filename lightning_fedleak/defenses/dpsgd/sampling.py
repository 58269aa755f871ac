"""How the batches of DP-SGD are drawn: a loader, and what it means for the account."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_fedleak.defenses.accounting.accounting import Trust
from lightning_fedleak.defenses.base import DefenseContext, DefenseError
from lightning_fedleak.defenses.dpsgd.batch import sizes_of, tensors_of, unsharded
from lightning_fedleak.defenses.dpsgd.correlated_noise import (
    Mechanism,
    Places,
    places_of,
    plain,
)
from lightning_fedleak.defenses.dpsgd.poisson import (
    EmptyCollate,
    PoissonBatchSampler,
    UserBatchSampler,
    check_torch_loader,
    checked_loader,
    is_sharded,
    poisson_loader,
)
from lightning_fedleak.defenses.processes import Team
from lightning_fedleak.model_state import preserve_process

COMPARED = 5
"""Examples by which it is seen whether the processes of a client hold the same dataset."""
ORDERED = 8
"""Examples by which it is seen whether the collate function keeps their order."""
AMONG = 64
"""Examples that those are chosen from, so that they differ in length where any do."""


@dataclass(frozen=True)
class Sampling:
    """A loader for DP-SGD.

    Attributes:
        loader: gives the batches.
        rate: chance of each example to be in a batch, as it is to be accounted.
        expected: number of examples by which a clipped sum is divided.
        examples: of all clients; users where they are drawn.
        users: the rows of each; None where examples are drawn.
        groups: of examples or users, that batches are drawn from in turn.
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
    def drawn(self) -> int:
        """How many Poisson batches were drawn; a loader that follows goes on from there."""
        sampler = self.loader.batch_sampler
        return sampler.step if isinstance(sampler, PoissonBatchSampler) else 0

    def check_size(self, samples: int) -> None:
        """Refuses a batch that does not hold as many samples as examples were drawn for it.

        Raises:
            DefenseError: something came between the loader and the training step.
        """
        sampler, size = self.loader.batch_sampler, self.loader.batch_size
        drawn = isinstance(sampler, PoissonBatchSampler) and not sampler.claim(samples)
        if drawn or (size is not None and samples > size):
            raise DefenseError(
                f"DPSGD: training_step gets a batch of {samples} samples, and the loader made none "
                "of that size. A hook (on_after_batch_transfer?) or callback that adds rows to a "
                "batch, repeats or cuts them, or another loader, makes an example count "
                "otherwise than is accounted. Let each batch keep one row for each example drawn."
            )

    def check_turn(self, row: int, samples: int) -> None:
        """Refuses a batch that was drawn for another step of its mechanism.

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
        """How many rows each user has in the batch that comes, user by user; None of examples.

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
                "has another number: whose rows they are cannot be told. Let batches come in the "
                "order in which the loader makes them (in_order=True), each once."
            )
        return counts

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
    users: Callable[[Any], Mapping[Any, Sequence[int]]] | None = None,
    rows_per_user: int | None = None,
    mechanism: Mechanism = "independent",
    bands: int = 1,
    turn: Callable[[], int] = int,
) -> Sampling:
    """The loader to train with instead of ``dataloader``.

    Args:
        dataloader: as Lightning has prepared it.
        context: where.
        poisson: sample batches by chance; otherwise the loader's own are taken, and each example is
            accounted as if it were in all of them.
        trust: see :class:`~lightning_fedleak.defenses.dpsgd.dpsgd.DPSGD`.
        entropy: secret bytes that the samples follow from.
        first_step: number of the first batch.
        users: gives the rows of every user of a dataset by key, where users are drawn.
        rows_per_user: of one user in a batch, at most.
        mechanism: ``"banded"`` draws from ``bands`` groups in turn, ``"banded_inverse"`` gives the
            same batches in every epoch.
        bands: of the mechanism.
        turn: tells the number of the next release in its mechanism.

    Raises:
        DefenseError: a loader that cannot be sampled, or one that gives an example to several
            processes of one client, or to several clients in one step; where users are drawn, one
            that does not keep the order of their rows.
    """
    check_torch_loader(dataloader)
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
    by_key = None if users is None else users(dataloader.dataset)
    rows = None if by_key is None else [*by_key.values()]
    examples = examples if rows is None else len(rows)
    share = max(1, examples // replicas)
    steps = max(1, round(share / batch_size))
    groups = {"independent": 1, "banded": bands, "banded_inverse": steps}[mechanism]
    if mechanism == "banded" and groups * batch_size > share:
        raise DefenseError(
            f"DPSGD: {share} {'examples' if rows is None else 'users'} in {bands} groups are fewer "
            f"than batch_size={batch_size} in each, and batches are drawn from one group at a "
            f"time. Use at most bands={max(1, share // batch_size)}, or smaller batches."
        )
    rate = 1.0 if mechanism == "banded_inverse" else min(1.0, groups * batch_size / share)
    loader = poisson_loader(
        dataloader,
        rate,
        client=context.client,
        clients=context.clients,
        entropy=entropy,
        first_step=first_step,
        users=rows,
        rows_per_user=rows_per_user,
        steps=steps if groups > 1 else None,
        groups=groups,
        turn=turn,
    )
    assert isinstance(loader.batch_sampler, PoissonBatchSampler)
    if rows is not None:
        _check_order(loader)
    own = loader.batch_sampler.shard
    places = None
    if mechanism != "independent":
        places = places_of(loader.dataset, own, by_key)
    expected = rate * (len(own) if context.processes == 1 else examples) / groups
    if trust == "central" and context.clients > 1:
        # The same on all clients: shards differ in size, and with them rate * size.
        expected = float(batch_size)
    return Sampling(loader, rate, expected, examples, rows, groups, places)


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
            "DPSGD: poisson=False takes the batches of a sampler that repeats examples, because "
            f"{len(dataloader.dataset)} of them are not the same number for each of the "
            f"{sampler.num_replicas} processes. Use poisson=True, or leave examples out "
            "(DistributedSampler(drop_last=True), torch.utils.data.Subset)."
        )


def _check_order(loader: DataLoader[Any]) -> None:
    """Refuses a dataset or collate function whose rows are not in the order of the examples.

    Whose a row is, is known by its place. Some examples are collated, twice as they are and once
    in another order. What is alike in the first two must follow in the third: that hangs on the
    collate function, and not on what the examples hold. Random numbers are left as they were.

    Raises:
        DefenseError: it sorts or shuffles, or makes a row of several examples.
    """
    with preserve_process():
        places = _unlike(loader)
        count = len(places)
        # Of usual orders (sorted, backwards, turned) none but the examples' own goes along.
        order = [*range(1, count - 1), 0, count - 1] if count > 2 else [*range(count)][::-1]
        first, again, moved = (
            _collated(loader, some) for some in (places, places, [places[i] for i in order])
        )
        told = False
        for one, two, three in zip(first, again, moved, strict=False):
            if len(one) != count:
                continue
            if _alike(one, two):
                # Or it is the same whatever the examples are: their numbers in the batch, say.
                kept = _alike(one[order], three) or any(
                    _alike(one, other) for other in _collated(loader, places[:1] * count)
                )
                told = told or not _alike(one, one[:1].expand_as(one))
            else:
                kept = not _is_shuffled(one, two)
            if not kept:
                raise DefenseError(
                    "DPSGD: with unit='user' whose a row is, is known by its place in the batch, "
                    f"and the collate function ({_called(loader)}) or the dataset's "
                    "`__getitems__` sorts or shuffles rows, or makes a row of several examples: "
                    "one user's rows would be clipped as another's. Let row i of every tensor be "
                    "of example i (pack_padded_sequence takes enforce_sorted=False)."
                )
    if count > 1 and not told:
        warnings.warn(
            "DPSGD: with unit='user' whose a row is, is known by its place in the batch. Whether "
            f"the collate function ({_called(loader)}) keeps the order of the examples could not "
            "be seen: what it makes is random, or alike for all. It is trusted to.",
            stacklevel=4,
        )


def _unlike(loader: DataLoader[Any]) -> list[int]:
    """Places of a few examples from the shortest to the longest, of some all over the dataset."""
    dataset: Any = loader.dataset
    last = len(dataset) - 1
    some = sorted({last * i // (AMONG - 1) for i in range(AMONG)})
    some.sort(key=lambda place: _length(dataset[place]))
    chosen = sorted({(len(some) - 1) * i // (ORDERED - 1) for i in range(ORDERED)})
    return [some[i] for i in chosen]


def _length(value: Any) -> int:
    """Letters, and numbers that are not zero (as padding often is), in an example."""
    if isinstance(value, Mapping):
        return sum(map(_length, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(_length, value))
    if isinstance(value, Tensor | np.ndarray):
        return int((value != 0).sum())
    return len(value) if isinstance(value, str | bytes) else bool(value)


def _collated(loader: DataLoader[Any], places: list[int]) -> list[Tensor]:
    """Tensors of a batch of these examples, fetched as a DataLoader does."""
    dataset: Any = loader.dataset
    several = getattr(dataset, "__getitems__", None)
    examples = several(places) if several else [dataset[place] for place in places]
    return [tensor for tensor in tensors_of(loader.collate_fn(examples)) if tensor.dim()]


def _alike(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if one.is_floating_point() or one.is_complex():
        return torch.allclose(one, other, equal_nan=True)
    return torch.equal(one, other)


def _is_shuffled(one: Tensor, other: Tensor) -> bool:
    """Whether they hold the same rows, each once, in another order."""
    if one.shape != other.shape:
        return False
    rows = [sorted(repr(row) for row in tensor.tolist()) for tensor in (one, other)]
    return rows[0] == rows[1] and len(set(rows[0])) == len(one)


def _called(loader: DataLoader[Any]) -> str:
    collate = loader.collate_fn
    own = collate.collate if isinstance(collate, EmptyCollate) else collate
    return str(getattr(own, "__name__", type(own).__name__))


def check_same_data(loader: DataLoader[Any], team: Team, *, poisson: bool) -> None:
    """Refuses processes of one client whose parts may overlap; a collective.

    The parts are places in the dataset. Where a process has shuffled or split it in its own way, an
    example may be in several parts, clipped in each and more than once in the sum; so too where
    samplers shuffle by different seeds and their batches are taken as they are. A few examples are
    compared, if loading one twice gives the same.

    Args:
        loader: as it trains; its dataset is whole in each process.
        team: the processes of this client.
        poisson: the sampler was replaced.

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
        digest, again = _digest(loader.dataset), _digest(loader.dataset)
    changes, high, low = team.largest([digest != again, digest, -digest])
    if high != -low and not changes:
        raise DefenseError(
            "DPSGD: the processes of the client hold other examples at the same places of their "
            "datasets, so an example may be in the parts of two of them, clipped in each and twice "
            "in the sum. Shuffle and split the data by the same seed in all processes."
        )


def _digest(dataset: Any) -> int:
    """48 bits of a few examples."""
    last = len(dataset) - 1
    examples = [dataset[last * i // (COMPARED - 1)] for i in range(COMPARED)]
    found = hashlib.sha256("\0".join(plain(examples)).encode())
    return int.from_bytes(found.digest()[:6], "big")


__all__ = ["Sampling", "check_same_data", "sampling_of"]
