"""One release of DP-SGD: clip norms, clip factors, clipped sums, and checks of the sums.

Every optimizer step releases the sum of the samples' clipped gradients with noise. The gradient g
of a sample's loss is clipped as a whole, over all trained parameters, to the clip norm C:

- *Fixed*: ``min(1, C / |g|) g`` (Abadi et al. 2016). The user chooses C.
- *Automatic*: ``g / (|g| + gamma)``, AUTO-S of Bu et al. 2023 (arXiv 2206.07136). Its norm is below
  1 for every g, so C is 1 and need not be chosen. gamma is a small positive constant.

Adding or removing one sample therefore changes the sum by at most C, to which the noise is scaled.
Replacing a sample by another changes it by at most 2 C.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_fedleak.defenses import base, processes
from lightning_fedleak.defenses.base import check_number
from lightning_fedleak.defenses.dpsgd import per_sample
from lightning_fedleak.defenses.dpsgd.recorder import Recorder
from lightning_fedleak.defenses.noise import NoiseGauge, standard_normal
from lightning_fedleak.defenses.processes import SHARD_BITS, Team
from lightning_fedleak.model.anatomy import where_whole

# The largest factor between a quantile's clip norm and its initial value, up or down: noise could
# move it without end. Squares of numbers in this range are far from the limits of float32.
MAX_CHANGE = 1e6

# Small parameters are summed over processes in groups of up to this many numbers. Not tuned; a
# larger value takes more memory.
AT_ONCE = 1 << 20
# Tolerances of `check_complete` are relative to the norm of a parameter's gradient, or to this
# share of the norm of the largest gradient if that is larger. Some gradients, such as that of the
# bias of attention keys, are zero except for rounding errors, so their norm would be no scale.
RELATIVE = 1e-2
# Largest relative distance between autograd's gradient and the sum of the per-sample gradients.
FINE = 1e-3  # in float32
# With products of 8 bits (bf16) or 11 bits (TF32): 12 times .0039, the largest relative change of a
# gradient that their rounding caused.
COARSE = 0.05


@dataclass(frozen=True)
class QuantileClip:
    """A clip norm that follows a quantile of gradients' norms (Andrew et al. 2021, Algorithm 1).

    Each release also counts, with noise, how many gradients were not clipped. Divided by the
    expected batch size, this count is b, and the clip norm C of the next release becomes
    ``C exp(-learning_rate (b - quantile))``. The accountant's noise multiplier z covers the
    gradients and the count together (their Theorem 1). The standard deviation of the count's noise
    is ``count_noise z``, and that of the gradients' noise is
    ``z / sqrt(1 - 1 / (2 count_noise)^2)`` times C.

    Examples:
        >>> from lightning_fedleak import DPSGD, QuantileClip
        >>> DPSGD(QuantileClip(initial=0.1), target_epsilon=8, target_delta=1e-5).clip_norm
        0.1

    Attributes:
        initial: The clip norm C of the first release.
        quantile: The share of gradients that should remain unclipped.
        learning_rate: The learning rate of the logarithm of C.
        count_noise: The standard deviation of the count's noise, divided by z; above 1/2. At 5 the
            gradients' noise is half a percent larger than without the count.

    Raises:
        DefenseError: A value is out of range.
    """

    initial: float
    quantile: float = 0.5
    learning_rate: float = 0.2
    count_noise: float = 5.0

    def __post_init__(self) -> None:
        check_number("QuantileClip: initial", self.initial, above=0)
        check_number("QuantileClip: quantile", self.quantile, above=0, below=1)
        check_number("QuantileClip: learning_rate", self.learning_rate, above=0)
        check_number("QuantileClip: count_noise", self.count_noise, above=0.5)

    @property
    def gradient_noise(self) -> float:
        """Return the noise multiplier of the gradients, divided by the accountant's z."""
        return 1 / math.sqrt(1 - (2 * self.count_noise) ** -2)

    def next_norm(
        self, norm: float, unclipped: float, expected: float, noise_multiplier: float, key: bytes
    ) -> float:
        """Return the clip norm of the next release.

        Args:
            norm: The clip norm C of this release.
            unclipped: The sum over this release's gradients of 1/2 for each unclipped gradient and
                -1/2 for each clipped one, so that one example changes it by 1/2. Divided by
                ``expected``, plus 1/2, it is the share b without noise.
            expected: The expected batch size.
            noise_multiplier: The accountant's noise multiplier z.
            key: The key from which the count's noise is drawn.
        """
        noise = standard_normal(key, torch.Size([1]), torch.device("cpu"), torch.float64)
        share = (unclipped + self.count_noise * noise_multiplier * float(noise)) / expected + 0.5
        limit = 2 * math.log(MAX_CHANGE)  # the width of the norm's range, so that exp stays finite
        change = -self.learning_rate * (share - self.quantile)
        norm *= math.exp(min(max(change, -limit), limit))
        return min(max(norm, self.initial / MAX_CHANGE), self.initial * MAX_CHANGE)


MaxGradNorm = float | Literal["auto"] | QuantileClip


@dataclass(frozen=True)
class Clip:
    """How each sample's gradient is clipped.

    Attributes:
        norm: The clip norm C, the largest norm of a clipped gradient; 1 for automatic clipping.
        gamma: The gamma of automatic clipping; None for a fixed norm or a :class:`QuantileClip`.
        form: How per-sample gradients are stored: as factors or multiplied (see
            :func:`per_sample.to_form`).
    """

    norm: float
    gamma: float | None = None
    form: per_sample.Clipping = "auto"

    def factors(self, norms: Tensor) -> Tensor:
        """Return the factors by which gradients are multiplied, in the shape of their norms.

        Args:
            norms: The norms of gradients. An infinite norm has the factor 0.
        """
        if self.gamma is None:
            return self.norm / norms.clamp(min=self.norm)
        return self.norm / (norms + self.gamma)


class EarlierPieces:
    """What is kept of the earlier pieces of a logical batch until the batch is released.

    A logical batch with too many rows for the memory is run in pieces, one after the other. The
    clipped sums and the norms of all pieces but the last are added up here.

    Args:
        samples: The number of samples of the logical batch in this process, without placeholders.
        device: The device of norms and weights.
        probed: Whether the per-sample gradients will be compared with autograd's in the release.

    Attributes:
        sums: The clipped sums by parameter. For a sharded parameter (FSDP2) it is this process's
            shard of the sum over all processes, for others the sum over this process's samples, in
            the parameter's shape.
        probes: For each parameter the bilinear form of its gradient with two random vectors, and
            the sum of its terms' squared norms, from :func:`per_sample.probe`.
        half: Whether the gradient of an output came in half precision.
        parameters: The parameters that are released; None before the first piece.
    """

    def __init__(self, samples: int, device: torch.device, *, probed: bool) -> None:
        self.samples = samples
        self.probed = probed
        self.sums: dict[Tensor, Tensor] = {}
        # Allocated once: small tensors between the pieces' large ones would fragment the memory.
        self._norms_and_weights = torch.zeros(2, samples, dtype=torch.float64, device=device)
        self._count = 0
        self.probes: dict[Tensor, tuple[float, float]] = {}
        self.half = False
        self.parameters: list[nn.Parameter] | None = None

    @property
    def rows(self) -> Tensor:
        """Return (2, n), the norms and ``mean_weights`` of the n samples of the pieces so far."""
        return self._norms_and_weights[:, : self._count]

    def add(self, clipped: ClippedSum, parameters: Sequence[nn.Parameter], team: Team) -> None:
        """Add a piece. It is a collective call if parameters are sharded.

        Args:
            clipped: The clipped gradients of the piece.
            parameters: The parameters that are released, the same in all pieces.
            team: The processes of this client.
        """
        self.parameters = [*parameters]
        end = self._count + clipped.samples
        self._norms_and_weights[0, self._count : end] = clipped.norms
        # Only `with_canary` needs the weights. It refuses users, who are fewer than the weights.
        self._norms_and_weights[1, self._count : end] = clipped.mean_weights[: clipped.samples]
        self._count = end
        self.half = self.half or clipped.half
        if self.probed:
            for index, parameter in enumerate(parameters):
                if parameter in clipped.parts:
                    left, right = per_sample.random_directions(index, parameter)
                    value, squares = per_sample.probe(clipped.parts[parameter], left, right)
                    earlier = self.probes.get(parameter, (0.0, 0.0))
                    unit = float(clipped.unit)
                    terms = unit * float(value), unit**2 * float(squares)
                    self.probes[parameter] = earlier[0] + terms[0], earlier[1] + terms[1]

        sharded = [p for p in parameters if isinstance(p, DTensor)]
        with per_sample.full_precision():
            for used in clipped.parts:
                if not isinstance(used, DTensor):
                    self.sums[used] = clipped.sum_of(used, self.sums.get(used))
            for _, parameter, piece_sum in clipped.sums(sharded, team, {}):
                total = self.sums.get(parameter)
                self.sums[parameter] = piece_sum if total is None else total.add_(piece_sum)


class ClippedSum:
    """The clip factors and the clipped sum of the samples in this process.

    The batch, or the piece of it that was run last, has B rows. The unit of privacy is an example,
    which is one row, or a user with several rows. The gradient g that is clipped is that of the
    row's loss, or the mean of these gradients over a user's rows. U is the number of clipped
    gradients: B, or the number of users.

    For each row b the recorder holds a recorded gradient r, the row's addend to the gradient with
    which backward was run. Three factors act on it:

    - ``unit * r`` is the row's addend to the gradient of the mean loss over this process's whole
      batch. ``unit`` is 1, unless backward began with a gradient of one for each term of the loss.
    - ``mean_weights[b] * unit * r`` is the gradient of the row's loss. The weight is the number of
      rows in the whole batch, times a correction if rows have unequal shares of the mean.
    - ``factors[b] * r`` is the row's addend to the clipped sum.

    Args:
        parameters: The parameters that are released.
        recorder: The recorder, which holds the recorded gradients.
        clip: How gradients are clipped.
        context: The context in which the step runs.
        weights: (B,) the corrections for unequal shares of the mean; None for ones.
        earlier: The earlier pieces if the batch is run in pieces; None otherwise.
        users: (U,) the numbers of adjacent rows of the users; None if the unit is an example.

    Attributes:
        samples: The number U of clipped gradients.
        parts: The recorded gradients of all rows, by parameter, in the form of
            :mod:`~lightning_fedleak.defenses.dpsgd.per_sample`.
        unit: () The factor from a recorded gradient to an addend to the mean loss's gradient.
        mean_weights: (B,) the factors from such an addend to the gradient of a row's loss.
        weights: (U,) the factors from the norms that are computed first to ``norms``: the product
            of ``unit`` and ``mean_weights``, or ones for users, whose norms include the product.
        norms: (U,) the norms of the gradients before clipping. Infinite for a gradient that holds
            NaN or infinity, or whose norm overflows. Such a gradient counts as zero, because one
            example must not decide whether a run goes on.
        factors: (B,) the factors from a recorded gradient to the row's addend to the clipped sum.
            All rows of a user have the same clip factor, so it has B numbers and ``norms`` has U.
        finite: (B,) whether the gradient that a row belongs to has a finite norm.
        clip: How gradients are clipped.
        half: Whether the gradient of an output came in half precision.
    """

    @per_sample.full_precision()
    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        recorder: Recorder,
        clip: Clip,
        context: base.DefenseContext,
        *,
        weights: Tensor | None = None,
        earlier: EarlierPieces | None = None,
        users: Sequence[int] | None = None,
    ) -> None:
        samples, parts, device = recorder.samples, recorder.parts, context.device
        self.samples = samples if users is None else len(users)
        self._earlier, in_batch = earlier, samples if earlier is None else earlier.samples
        if weights is None:
            weights = torch.ones(samples, dtype=torch.float64, device=device)
        self.mean_weights = in_batch * weights.to(device, torch.float64)
        self.unit = torch.ones((), dtype=torch.float64)
        if recorder.terms is not None:
            terms = recorder.terms.to(device)
            self.unit = torch.full_like(terms, samples) / terms / max(1, in_batch)
        self.weights = self.mean_weights * self.unit
        used: Iterator[Tensor] = (p for p in parameters if p in parts)
        self.parts = {p: per_sample.to_form(parts[p], p.shape, clip.form) for p in used}
        self._users, row_weights = users, self.weights
        owners: Tensor | None = None
        if users is not None:
            counts = torch.tensor(users, dtype=torch.int64)
            owners = torch.arange(len(users)).repeat_interleave(counts).to(device)
            row_weights = self.weights / counts.to(device)[owners]
            self.weights = torch.ones(len(users), dtype=torch.float64, device=device)
            by_layer = per_sample.squared_norms_of_users(self.parts, row_weights, users, clip.form)
        else:
            by_layer = per_sample.squared_norms(self.parts.values())
        squares = torch.zeros(self.samples, dtype=torch.float64, device=device)
        for layer in by_layer:
            squares += layer.to(device)
        self.norms = squares.sqrt() * self.weights
        finite = torch.isfinite(self.norms)
        self.norms = self.norms.masked_fill(~finite, math.inf)
        factors = clip.factors(self.norms)
        if owners is not None:
            factors, finite = factors[owners], finite[owners]
        self.factors = row_weights * factors
        self.finite = finite
        self.clip = clip
        self._lacks_sums = recorder.lacks_sums
        self.half = recorder.half or (earlier is not None and earlier.half)

    @cached_property
    def _spans(self) -> list[tuple[int, int]]:
        """Return the ranges of rows between those that are not finite: 0 times NaN is NaN."""
        not_finite = [i for i, is_finite in enumerate(self.finite.tolist()) if not is_finite]
        bounds = [-1, *not_finite, len(self.finite)]
        return [(i + 1, end) for i, end in itertools.pairwise(bounds) if i + 1 < end]

    def sum_of(
        self, parameter: Tensor, target: Tensor | None = None, memory: Tensor | None = None
    ) -> Tensor:
        """Return the clipped sum of the gradients of a parameter, in float32 or float64.

        Args:
            parameter: The parameter. The sum has its shape, also if it is sharded.
            target: A sum to which this one is added in place; None for zeros.
            memory: A tensor that may be overwritten with the sum (:func:`per_sample.weighted_sum`).
        """
        for start, end in self._spans if parameter in self.parts else ():
            parts, factors = self.parts[parameter], self.factors[start:end]
            parts = per_sample.slice_samples(parts, start, end)
            target = per_sample.weighted_sum(parts, factors, parameter.shape, target, memory)
        return per_sample.zeros_of(parameter) if target is None else target

    def unclipped(self, team: Team) -> float:
        """Return the sum over the client's samples of 1/2 if unclipped and -1/2 if clipped.

        It is a collective call. The samples of earlier pieces are included.
        """
        norms = self.norms
        if self._earlier is not None:
            norms = torch.cat([self._earlier.rows[0], norms])
        return float(team.summed(((norms <= self.clip.norm).double() - 0.5).sum()))

    def with_canary(self, samples: Tensor, divisor: float) -> base.CanaryGradient:
        """Return the gradient of crafted layers, clipped together with the real gradients.

        Crafted layers are simulated by a privacy audit: a sample's gradient g consists of its real
        gradient and that of the crafted layers, and both have the same clip factor.

        Args:
            samples: (N, G, K) each sample's addend to the mean loss's gradient of the K crafted
                parameters, in each of G games. N counts the samples of all pieces of the batch.
            divisor: The number by which the clipped sum is divided.

        Returns:
            The samples' addends to the released gradient of the crafted layers, without noise.

        Raises:
            DefenseError: The number of samples is not that of the batch, or the unit is a user.
        """
        earlier = self._earlier
        count = len(self.norms) + (0 if earlier is None else earlier.rows.shape[1])
        if self._users is not None or len(samples) != count:  # one sample would be broadcast
            raise base.DefenseError(
                f"DPSGD: the canary has {len(samples)} samples, and the batch {count} of one row"
            )
        rows = torch.stack([self.norms, self.mean_weights])
        norms, weights = rows if earlier is None else torch.cat([earlier.rows, rows], 1)
        samples = samples * weights.to(samples)[:, None, None]
        total_norms = torch.hypot(samples.norm(dim=2), norms.to(samples)[:, None])
        factors = self.clip.factors(total_norms) / divisor
        finite = torch.isfinite(total_norms)[..., None]
        return base.CanaryGradient((samples * factors[..., None]).masked_fill(~finite, 0.0))

    @per_sample.full_precision()
    def release(
        self,
        parameters: Sequence[nn.Parameter],
        team: Team,
        std: float,
        divisor: float,
        add: Callable[[int, Tensor, float], None],
        gauge: NoiseGauge | None = None,
    ) -> None:
        """Write the sum over all processes' samples, with noise, into ``p.grad``.

        All replicas of a parameter get the same noise. Different shards get independent noise.

        Args:
            parameters: The parameters, in the same order in all processes.
            team: The processes of this client.
            std: The standard deviation of the noise on each number; 0 for no noise.
            divisor: The number by which the sum with its noise is divided.
            add: Adds noise to a tensor in place. Its arguments are an index, the tensor, and the
                standard deviation. The noise is drawn anew for each index.
            gauge: Measures the noise that was added; None to measure nothing.
        """
        earlier = {} if self._earlier is None else self._earlier.sums
        # A single process no longer needs autograd's gradients, so sums are written over them.
        sums = self.sums(parameters, team, earlier, over_gradients=team.size == 1)
        for index, parameter, total in sums:
            if isinstance(parameter, DTensor) and parameter in earlier:
                total.add_(earlier.pop(parameter))
            exact = None if gauge is None else gauge.before(total)
            if parameter.grad is None:
                is_equal = (total.dtype, total.stride()) == (parameter.dtype, parameter.stride())
                usable = is_equal and team.size == 1 and not isinstance(parameter, DTensor)
                parameter.grad = total if usable else torch.zeros_like(parameter)
            noise_index, released = index, parameter.grad
            if isinstance(parameter, DTensor):
                noise_index += processes.shard_number(parameter) << SHARD_BITS
                released = processes.local_part(released)
            if std:
                add(noise_index, total, std)
            torch.div(total, divisor, out=released)
            if gauge is not None and exact is not None:
                gauge.after(exact, released)

    def sums(
        self,
        parameters: Sequence[nn.Parameter],
        team: Team,
        earlier: dict[Tensor, Tensor],
        *,
        over_gradients: bool = False,
    ) -> Iterator[tuple[int, nn.Parameter, Tensor]]:
        """Yield the index of each parameter, the parameter, and its sum over all processes.

        Of a sharded parameter's sum it yields the shard of this process. It is a collective call.
        Small parameters are summed in groups, because a collective for each of 200 parameters is
        many times slower.

        Args:
            parameters: The parameters, in the same order in all processes.
            team: The processes of this client.
            earlier: The sums of earlier pieces in this process, by parameter. Those of parameters
                that are not sharded are removed from the mapping and added to.
            over_gradients: Whether a sum may be written over ``p.grad``, which saves memory.
        """
        at_once, start = AT_ONCE if team.size > 1 else 0, 0
        while start < len(parameters):
            end, size = start + 1, parameters[start].numel()
            while end < len(parameters) and size + parameters[end].numel() <= at_once:
                size, end = size + parameters[end].numel(), end + 1
            group = parameters[start:end]
            totals = [
                self.sum_of(p)
                if isinstance(p, DTensor)
                else self.sum_of(p, earlier.pop(p, None), p.grad if over_gradients else None)
                for p in group
            ]
            if team.size > 1:
                totals = processes.own_parts_of_sums(totals, group)
            for index, (parameter, total) in enumerate(zip(group, totals, strict=True), start):
                yield index, parameter, total
            start = end

    def check_complete(
        self, parameters: Sequence[nn.Parameter], context: base.DefenseContext, team: Team
    ) -> bool:
        """Raise an error unless the per-sample gradients add up to autograd's gradients.

        Both are projected onto one random direction for each parameter, and the two numbers are
        compared. Autograd's gradient is the mean over the client's processes, whole in each process
        (DDP) or a shard (FSDP2). A gradient that holds NaN or infinity is not compared. It is a
        collective call.

        Returns:
            Whether gradients were compared. They are not if backward has skipped ``p.grad``, or if
            earlier pieces were not probed.

        Raises:
            DefenseError: A gradient is another sum; the message names the parameter.
        """
        if self._lacks_sums or (self._earlier is not None and not self._earlier.probed):
            return False
        with team.together(), per_sample.full_precision():
            components = [self._components(i, p, team) for i, p in enumerate(parameters)]
        addends = torch.tensor(components, dtype=torch.float64).reshape(-1, 3).to(context.device)
        sums = team.summed(addends).tolist()
        half = self.half or context.precision.startswith("bf16")
        coarse = half or per_sample.rounds_products(context)
        tolerance = COARSE if team.largest([coarse])[0] else FINE
        pairs = zip(parameters, sums, strict=True)
        finite = [(p, row) for p, row in pairs if all(map(math.isfinite, row))]
        sizes = [math.sqrt(squares) for _, (_, _, squares) in finite]
        largest = max(sizes, default=0.0)
        for (parameter, (expected, value, _)), size in zip(finite, sizes, strict=True):
            if not abs(expected - value) <= tolerance * max(size, RELATIVE * largest) + 1e-30:
                name = base.parameter_name(parameter, context.root)
                raise base.DefenseError(
                    f"DPSGD: the gradient of '{name}' is not the sum of its recorded per-sample "
                    "gradients: use it only in its module's forward, and do not change its output "
                    "in place (write y = y + x), or freeze it. Nothing was released."
                )
        return True

    def _components(
        self, index: int, parameter: nn.Parameter, team: Team
    ) -> tuple[float, float, float]:
        """Return this process's addends to three sums over processes, for one parameter.

        Returns:
            The component of autograd's gradient along a random direction, the component of the sum
            of the per-sample gradients along it, and a scale for their rounding errors: the squared
            norm of the gradient plus the squared norms of its terms.
        """
        gradient = parameter.grad
        parts = self.parts.get(parameter, [])
        probes = {} if self._earlier is None else self._earlier.probes
        if gradient is None:
            return 0.0, 0.0, 0.0
        shard = processes.local_part(gradient).to(where_whole(gradient))
        left, right = per_sample.random_directions(index, parameter)
        shape, wide = (len(left), len(right)), left.dtype
        if shard.shape == gradient.shape:
            expected = left.T @ (shard.reshape(shape).to(wide) @ right)
        else:
            direction = processes.own_part((left @ right.T).view(gradient.shape), gradient)
            expected = (shard.to(wide) * direction).sum()
        value, squares = map(float, per_sample.probe(parts, left, right))
        earlier = probes.get(parameter, (0.0, 0.0))
        # The processes that hold the same part of autograd's gradient add equal shares of it. That
        # gradient is a mean over processes, so the sums of samples are divided by their number.
        share = processes.copies(gradient) if team.size > 1 else 1.0
        norm, unit = float(torch.linalg.vector_norm(shard, dtype=torch.float64)), float(self.unit)
        return (
            float(expected) / share,
            (value * unit + earlier[0]) / team.size,
            norm**2 / share + (squares * unit**2 + earlier[1]) / team.size**2,
        )
