"""Snapshots of the tensors that an adversary observes in training, which attacks read.

A snapshot belongs to one of four stages: *local* (the gradient that a client computed, before any
defence), *shared* (the tensors that leave the client), *aggregate* (the gradient that the server
applies) and *released* (the trained weights that are published; the adversary also has the base
model). The *taps* of :mod:`lightning_fedleak.model.taps`, sets of hooks, take the snapshots. A
snapshot holds read-only views if the memory does not change while the attacks run, and else a
preallocated buffer. Nothing is cloned or moved to the host.

Methods of compression of shared tensors, and the error that each method adds to them.

Clients may compress a gradient before they share it: ``"topk"`` sends only the largest entries,
``"int8"`` and ``"int4"`` round the entries to few bits, ``"sign"`` sends their signs, and
``"low_rank"`` two factors (as PowerSGD does). The server sees the decompressed tensor, from which
:func:`compression_error` estimates the error that attacks must allow for. With *error feedback* a
client adds the error of one update to its next one before it compresses that.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.nn import functional

from lightning_fedleak.model.anatomy import where_whole

Method = Literal["topk", "int8", "int4", "sign", "low_rank"]
COMPRESSIONS: frozenset[str] = frozenset(get_args(Method))
"""The methods, which compress each tensor separately."""
LEVELS = {"int8": 127, "int4": 7}
"""Number of rounding steps between 0 and the largest entry of a tensor, by method."""
AVERAGED = "averaged"
"""The compression of a mean or sum of tensors that were compressed separately."""


def compression_error(tensor: Tensor, method: str) -> float:
    """Return the standard deviation of a compression's error in a tensor's entries.

    It is estimated from the decompressed tensor. Rounding has an error that is uniform over one
    rounding step. The zeros of ``"topk"`` have an error that is uniform between plus and minus the
    smallest entry that was sent. For ``"sign"`` the entries are taken as normal with mean 0 and the
    mean size that was sent. ``"low_rank"`` counts as exact, because
    its rows are combinations of the original rows.

    Args:
        tensor: the tensor that the server decompresses.
        method: as in :attr:`GradientSnapshot.compression`.
    """
    sizes = tensor.abs()
    if method == "low_rank" or not bool(tensor.any()):
        return 0.0
    if method == "topk":
        return float(sizes[sizes > 0].min()) / math.sqrt(3)
    if method == "sign":
        return float(sizes.max()) * math.sqrt(math.pi / 2 - 1)  # of |x|, for normal entries x
    return float(sizes.max()) / LEVELS[method] / math.sqrt(12)


@dataclass(frozen=True)
class Compression:
    """A method of compression and its setting.

    Attributes:
        method: one of :data:`COMPRESSIONS`.
        share: The share of a tensor's entries that ``"topk"`` keeps.
        rank: The rank of the factors of ``"low_rank"``.
    """

    method: Method
    share: float = 1.0
    rank: int = 1

    def __str__(self) -> str:
        setting = {"topk": f" {self.share:g}", "low_rank": f" {self.rank}"}
        return self.method + setting.get(self.method, "")

    def factors(self, values: Tensor) -> bool:
        """Return whether a tensor is sent as two factors; a narrower one is sent unchanged."""
        if self.method != "low_rank" or values.dim() < 2:
            return False
        return self.rank < min(len(values), values[0].numel())

    def reduce(self, values: Tensor, rows: int | None = None) -> Tensor:
        """Return a tensor after compression and decompression, without error feedback.

        Args:
            values: the tensor, or only those of its rows that are not nearly zero.
            rows: The number of rows of the whole tensor; None if ``values`` is the whole tensor.
        """
        if self.method == "topk":
            n_entries = self.share * values.numel() * (1 if rows is None else rows / len(values))
            index = values.abs().flatten().topk(min(values.numel(), max(1, int(n_entries)))).indices
            sparse = torch.zeros_like(values).flatten()
            sparse[index] = values.flatten()[index]
            return sparse.view_as(values)
        if self.method == "sign":
            return values.sign() * values.abs().mean()
        if self.method == "low_rank":
            return low_rank(values, self.rank)[0] if self.factors(values) else values
        if not bool(values.any()):
            return values
        step = values.abs().max() / LEVELS[self.method]
        return (values / step).round() * step


def low_rank(values: Tensor, rank: int, factor: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the product of two factors that approximates a tensor, and the right factor.

    Args:
        values: (n, ...), read as a matrix (n, m).
        rank: columns of the factors.
        factor: (m, rank) the right factor of the previous update; None for the first update, which
            begins with random numbers of a fixed seed, the same on every client.
    """
    matrix = values.flatten(1)
    if factor is None or not bool(factor.any()):
        generator = torch.Generator().manual_seed(matrix.shape[1])
        factor = torch.randn(matrix.shape[1], rank, generator=generator)
    left = torch.linalg.qr(matrix @ factor.to(matrix)).Q
    right = matrix.T @ left
    return (left @ right.T).view_as(values), right


def explain_compression(method: str) -> str:
    """Return the reason why an attack has no result for a compressed gradient."""
    if method == AVERAGED:
        return "a sum of gradients that were compressed one by one has an unknown error"
    return (
        f"this attack reads no gradient compressed by '{method}': with stages=('local', 'shared') "
        "a monitor also attacks the gradient before compression"
    )


class Stage(StrEnum):
    """A place on the way of a tensor from the client to the server."""

    LOCAL = "local"
    SHARED = "shared"
    AGGREGATE = "aggregate"
    RELEASED = "released"


ON_THE_WAY = (Stage.LOCAL, Stage.SHARED, Stage.AGGREGATE)
"""The stages of a gradient on its way to the server, in order; RELEASED is a stage of weights."""


@dataclass(frozen=True)
class GradientSnapshot:
    """Gradients of one step at one stage.

    Attributes:
        step: index, from 0, of the optimizer step that applies these gradients.
        stage: where they were recorded.
        tensors: gradient by role (``"head.weight"`` (V, d), ``"head.bias"`` (V,),
            ``"embedding.weight"`` (V, d), or a parameter's name), detached. For a tied matrix both
            weight roles have the same tensor, the sum of its head and embedding parts. It is valid
            only until the step continues: an attack that stores one must copy it.
        tied: whether head and embedding are one matrix.
        client: rank of the client, 0 in a single process.
        noise_std: standard deviation of the noise that a defence declares on each number, or 0.
        rounding: relative error of each number due to mixed precision in FSDP2 or ZeRO; else 0.
        compression: method by which each tensor was compressed on its way, see
            :class:`~lightning_fedleak.GradientCompression`;
            :data:`~lightning_fedleak.model.snapshots.AVERAGED` if they are means or sums of
            tensors that were compressed one by one; empty without compression.
    """

    step: int
    stage: Stage
    tensors: Mapping[str, Tensor]
    tied: bool = False
    client: int = 0
    noise_std: float = 0.0
    rounding: float = 0.0
    compression: str = ""

    def noise_on(self, role: str) -> float:
        """Return the standard deviation of each entry's error: declared noise and compression."""
        error = compression_error(self.tensors[role], self.compression) if self.compression else 0.0
        return math.hypot(self.noise_std, error)


@dataclass(frozen=True)
class UpdateSnapshot(GradientSnapshot):
    """The weight change of several local steps (FedAvg), in units of a gradient.

    ``tensors`` holds ``(before - after) / learning_rate``: after one plain SGD step this *is* the
    gradient, after k steps the sum of k gradients taken at moving weights.

    Attributes:
        local_steps: optimizer steps between before and after.
        learning_rate: the divisor.
        fresh: whether the optimizer began the round without state of earlier steps.
    """

    local_steps: int = 1
    learning_rate: float = 1.0
    fresh: bool = True


@dataclass(frozen=True)
class ActivationSnapshot:
    """Hidden states sent across a split.

    Attributes:
        step: optimizer step, counted from 0, in which they were sent.
        stage: where they were recorded.
        tensors: by layer name, each (B, L, d), detached.
        client: rank of the client.
        attention_mask: (B, L), 0 where padded, or None; sent too, because the top model needs it.
        position_ids: (B, L), or None for the model's default.
    """

    step: int
    stage: Stage
    tensors: Mapping[str, Tensor]
    client: int = 0
    attention_mask: Tensor | None = None
    position_ids: Tensor | None = None


class TokenSnapshot(NamedTuple):
    """A model's outputs for each label token of N texts: all that a released model is queried for.

    Column ``j`` belongs to the token at place ``j + 1`` of a text, which the model predicts from
    the ``j + 1`` tokens before it. Entries outside of ``labels`` are 0.

    Attributes:
        log_probs: (N, L) log probability of the token, in nats.
        means: (N, L) mean of the log probability over the vocabulary, under the model.
        deviations: (N, L) its standard deviation.
        greedy: (N, L) bool, whether the token is the most likely one.
        labels: (N, L) bool, whether the loss is computed on the token.
    """

    log_probs: Tensor
    means: Tensor
    deviations: Tensor
    greedy: Tensor
    labels: Tensor

    def rows(self, index: Tensor) -> TokenSnapshot:
        """Return the snapshot of some of the texts, given as (n,) indices or (N,) bool."""
        return TokenSnapshot(*(value[index] for value in self))

    def within(self, places: Tensor) -> TokenSnapshot:
        """Return the snapshot with zeros outside of some positions, (N, L) bool."""
        return TokenSnapshot(*(value.masked_fill(~places, 0) for value in self))

    def padded(self, width: int) -> TokenSnapshot:
        """Return the snapshot with zeros at the end, (N, width)."""
        more = 0, width - self.labels.shape[1]
        return TokenSnapshot(*(functional.pad(value, more) for value in self))

    def mean_log_probs(self) -> Tensor:
        """Return (N,) minus the loss of each text; NaN for a text without label tokens."""
        return (self.log_probs * self.labels).double().sum(1) / self.labels.sum(1)


@dataclass(frozen=True)
class References:
    """The outputs of K models for N texts, and which of them each was trained on.

    Attributes:
        answers: K outputs.
        inside: (K, N) bool, the texts that each model was trained on.
    """

    answers: Sequence[TokenSnapshot]
    inside: Tensor

    @classmethod
    def unseen(cls, answer: TokenSnapshot) -> References:
        """Return one model that was trained on none of the texts."""
        return cls((answer,), torch.zeros(1, len(answer.labels), dtype=torch.bool))

    def beside(self, others: References | None) -> References:
        """Return these models and, if there are any, others that answered the same texts."""
        if others is None:
            return self
        inside = torch.cat([self.inside, others.inside])
        return References([*self.answers, *others.answers], inside)

    def rows(self, index: Tensor) -> References:
        """Return the answers about some of the texts, given as (n,) indices or (N,) bool."""
        return References([a.rows(index) for a in self.answers], self.inside[:, index])

    def within(self, places: Tensor) -> References:
        """Return the answers with zeros outside of some positions, (N, L) bool."""
        return References([a.within(places) for a in self.answers], self.inside)

    @cached_property
    def log_probs(self) -> Tensor:
        """Return (N, L) the mean log probabilities by the models that were not trained on a text.

        If all were, it is their mean less the mean gain of tokens by being trained on.
        """
        stacked = torch.stack([answer.log_probs for answer in self.answers])
        labels, means, counts = self.answers[0].labels, [], []
        for side in (~self.inside, self.inside):
            counts.append(side.sum(0))
            mean = (stacked * side[..., None]).sum(0) / counts[-1].clamp_min(1)[:, None]
            means.append(mean)
        unseen, seen = (labels & (count > 0)[:, None] for count in counts)
        both = unseen & seen
        places = (both, both) if bool(both.any()) else (unseen, seen)
        outside, inside = (mean[place].mean() for mean, place in zip(means, places, strict=True))
        gain = (inside - outside).nan_to_num()  # unknown if all texts are on one side
        return torch.where(unseen, means[0], (means[1] - gain) * labels)


@dataclass(frozen=True)
class ReleasedModel:
    """The released model and its base, queried with the same N texts.

    Attributes:
        now: the outputs of the released model.
        base: the outputs of the model before the first step of the fine-tuning.
        compressed: (N,) the number of bytes of each text, compressed by zlib.
        answers: (N,) int64, the same number for texts with the same label tokens; None if unknown.
        references: the outputs of models that were trained like this one on other texts; None
            without such models.
        rejected: (N, L) bool, the tokens of the rejected text of each pair; None for single texts.
        rewards: (2, N) float64, for each prompt the mean reward of the base's completions and of
            the model's completions; None if unknown.
    """

    now: TokenSnapshot
    base: TokenSnapshot
    compressed: Tensor
    answers: Tensor | None = None
    references: References | None = None
    rejected: Tensor | None = None
    rewards: Tensor | None = None

    def rows(self, index: Tensor) -> ReleasedModel:
        """Return the answers about some of the texts, given as (n,) indices or (N,) bool."""
        fields: dict[str, Any] = {n: value for n, value in vars(self).items() if value is not None}
        rewards = fields.pop("rewards", None)  # by prompts in the second dimension
        for name, value in fields.items():
            fields[name] = value[index] if isinstance(value, Tensor) else value.rows(index)
        return ReleasedModel(**fields, rewards=None if rewards is None else rewards[:, index])


@dataclass(frozen=True)
class CandidateSnapshot:
    """A released model's outputs for N values and for the candidates that could replace them.

    Attributes:
        log_probs: (N, C + 1) log probability of the value, in column 0, and of each candidate, all
            in the value's context, in nats.
        sizes: (N,) int64, the number of candidates of each value. Later columns have no meaning.
        greedy: (N,) bool, whether greedy decoding writes the value.
    """

    log_probs: Tensor
    sizes: Tensor
    greedy: Tensor


@dataclass(frozen=True)
class Observation:
    """All that one run of an attack may read. It never contains the ground truth.

    Attributes:
        gradients: snapshots, oldest first; most attacks read only the last one.
        activations: the hidden states that the client sent in the same step (split learning).
        released: outputs of the released model; None if no model is released.
        candidates: its outputs for planted values; None if it was not queried for them.
    """

    gradients: tuple[GradientSnapshot, ...] = ()
    activations: tuple[ActivationSnapshot, ...] = field(default=())
    released: ReleasedModel | None = None
    candidates: CandidateSnapshot | None = None

    def gradient(self, role: str) -> Tensor:
        """Return the newest gradient of ``role``.

        Raises:
            UnusableObservation: no snapshot has that role.
        """
        for snapshot in reversed(self.gradients):
            if role in snapshot.tensors:
                return snapshot.tensors[role]
        raise UnusableObservation(f"no gradient of '{role}': was it pruned or parametrized?")


def is_shard(tensor: Tensor) -> bool:
    """Return whether a tensor is split over processes: a DTensor, or a parameter under ZeRO-3."""
    return hasattr(tensor, "full_tensor") or hasattr(tensor, "ds_id")


@contextmanager
def gathered(parameters: Iterable[Any]) -> Iterator[None]:
    """Gather in place the parameters that ZeRO-3 has sharded; every process must enter it."""
    absent = [p for p in parameters if hasattr(p, "ds_status") and is_absent(p)]
    if not absent:
        yield
        return
    from deepspeed.runtime.zero import GatheredParameters

    old_data = [p.data for p in absent]
    try:
        with GatheredParameters(absent):
            yield
    finally:
        for p, data in zip(absent, old_data, strict=True):
            p.data = data


@contextmanager
def shaped(parameters: Iterable[Any]) -> Iterator[None]:
    """Give ZeRO-3's shards their whole shape inside the block, filled with NaN; gather nothing."""
    absent = [p for p in parameters if hasattr(p, "ds_status") and not p.numel()]
    try:
        for p in absent:
            p.data = p.new_full((1,), torch.nan if p.is_floating_point() else 0).expand(p.ds_shape)
        yield
    finally:
        for p in filter(is_absent, absent):
            p.data = p.new_empty(0)


def is_absent(parameter: Any) -> bool:
    """Return whether a parameter is sharded by ZeRO-3 and not gathered now."""
    return hasattr(parameter, "ds_status") and parameter.ds_status.name != "AVAILABLE"


def whole_tensor(tensor: Tensor) -> Tensor:
    """Return a detached tensor; a shard is gathered by a collective of all processes."""
    if hasattr(tensor, "full_tensor"):
        tensor = tensor.to(where_whole(tensor))
        tensor = tensor.full_tensor()  # type: ignore[attr-defined]
    with gathered([tensor]):
        return tensor.detach()


def whole_rows(matrix: Tensor, rows: Tensor) -> Tensor:
    """Return some rows (k, d), detached; of a shard only these are gathered, by a collective."""
    if is_absent(matrix):
        return _rows_under_zero(matrix, rows)
    matrix = matrix.detach().to(where_whole(matrix))
    rows = rows.to(matrix.device)
    if not hasattr(matrix, "device_mesh"):
        return matrix[rows]
    from torch.distributed.tensor import DTensor, Replicate

    everywhere = [Replicate()] * matrix.device_mesh.ndim
    shared = DTensor.from_local(rows, matrix.device_mesh, everywhere)
    return whole_tensor(functional.embedding(shared, matrix))


def _rows_under_zero(matrix: Any, rows: Tensor) -> Tensor:
    """Return rows (k, d) of a flat matrix that is split evenly over processes, in order."""
    shard, width = matrix.ds_tensor.data, matrix.ds_shape[1]
    group = matrix.ds_process_group
    # The index of each entry in the flat matrix, then in the shard of this process.
    offsets = rows.to(shard.device)[:, None] * width + torch.arange(width, device=shard.device)
    offsets -= torch.distributed.get_rank(group) * len(shard)
    is_local = (offsets >= 0) & (offsets < len(shard))
    entries = torch.where(is_local, shard[offsets.clamp(0, len(shard) - 1)], 0)
    torch.distributed.all_reduce(entries, group=group)  # one process has each entry, the rest 0
    return entries


def check_finite(values: Tensor, name: str, error: type[Exception] | None = None) -> None:
    """Raise an error (by default :class:`UnusableObservation`) if a number is NaN or infinite.

    Args:
        values: any shape.
        name: what they are, which ends the message.
        error: class of the error.
    """
    if not bool(values.isfinite().all()):
        raise (error or UnusableObservation)(f"not finite (NaN or infinity): {name}")


class UnusableObservation(RuntimeError):
    """An attack cannot use the snapshot (not finite, all zero): the result is unknown, not safe."""


class Inapplicable(UnusableObservation):
    """The attack does not apply to the shared tensors: the result is unknown, not safe.

    ``leakage/worst/<family>``, the highest value of all attacks on one kind of leak (a family), is
    then computed from the other attacks, if there are any.
    """


class NotYet(UnusableObservation):
    """The attack has no result at this step, but can have one at a later step.

    The next step is attacked too. If the fit ends without a result, it is unknown, not safe.
    """


def products_in_tf32() -> bool:
    """Return whether a GPU rounds the factors of float32 products to 11 bits."""
    products = torch.backends.cuda.matmul
    # Since torch 2.9; once it is set, older settings raise an error when they are read.
    precision: str | None = getattr(products, "fp32_precision", None)
    return products.allow_tf32 if precision is None else precision == "tf32"
