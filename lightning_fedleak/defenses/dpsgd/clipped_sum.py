"""One release of DP-SGD: clip norms, clip factors, clipped sums, and checks of the sums.

A sample's gradient g is clipped as a whole:

- *Fixed*: ``min(1, C / |g|) g`` (Abadi et al. 2016).
- *Automatic*: ``g / (|g| + gamma)``, AUTO-S of Bu et al. 2023 (arXiv 2206.07136). Its norm is below
  1 for every g, so there is no C to choose.

Bounds are for an example that is added or removed. Replacing one by another moves the sum by up to
twice as much.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_fedleak.defenses import base, processes
from lightning_fedleak.defenses.checks import check_number
from lightning_fedleak.defenses.dpsgd import per_sample
from lightning_fedleak.defenses.dpsgd.recorder import Recorder
from lightning_fedleak.defenses.noise import NoiseGauge, standard_normal
from lightning_fedleak.defenses.processes import SHARD_BITS, Team
from lightning_fedleak.model.anatomy import where_whole

MAX_CHANGE = 1e6  # factor by which noise may change a clip norm, up or down: float32 squares it

# Numbers of small parameters that are summed over processes at once. Not tuned; larger: more memory
AT_ONCE = 1 << 20
RELATIVE = 1e-2  # share of the largest gradient; smaller ones may be rounding (a bias of keys)
# Distance of autograd's gradient from the sum of the samples' parts, over its size.
FINE = 1e-3  # in float32
COARSE = 0.05  # with products of 8 or 11 bits: 12 times .0039, by which these move a gradient


@dataclass(frozen=True)
class QuantileClip:
    """A clip norm that follows a quantile of gradients' norms (Andrew et al. 2021, Algorithm 1).

    Each release also counts, with noise, how many gradients were not clipped, and the norm becomes
    ``C exp(-learning_rate (b - quantile))``: b is that count over the expected batch size. The
    account's noise multiplier z is of both queries together (their Theorem 1): the count's noise is
    ``count_noise z``, so that the gradients' is ``z / sqrt(1 - 1 / (2 count_noise)^2)`` times C.

    Examples:
        >>> from lightning_fedleak import DPSGD, QuantileClip
        >>> DPSGD(QuantileClip(initial=0.1), target_epsilon=8, target_delta=1e-5).clip_norm
        0.1

    Attributes:
        initial: C of the first release.
        quantile: share of the gradients that are not to be clipped.
        learning_rate: The learning rate of the norm's logarithm.
        count_noise: standard deviation of the count's noise over z; above 1/2. At 5 the gradients'
            noise is half a percent larger.

    Raises:
        DefenseError: a value out of range.
    """

    initial: float
    quantile: float = 0.5
    learning_rate: float = 0.2
    count_noise: float = 5.0

    def __post_init__(self) -> None:
        check_number("QuantileClip: initial", self.initial, above=0)
        check_number("QuantileClip: quantile", self.quantile, above=0, below=1)
        check_number("QuantileClip: learning_rate", self.learning_rate, above=0)
        hint = "the count of gradients that are not clipped moves by 1/2"
        check_number("QuantileClip: count_noise", self.count_noise, above=0.5, hint=hint)

    @property
    def gradient_noise(self) -> float:
        """Return the noise multiplier of the gradients over that of both queries together."""
        return 1 / math.sqrt(1 - (2 * self.count_noise) ** -2)

    def next_norm(
        self, norm: float, unclipped: float, expected: float, noise_multiplier: float, key: bytes
    ) -> float:
        """Return the norm of the next release.

        Args:
            norm: of this one.
            unclipped: sum over its gradients of 1/2 for each that is not clipped, else -1/2: one
                example moves it by 1/2.
            expected: batch size.
            noise_multiplier: z.
            key: The key of the count's noise.
        """
        drawn = standard_normal(key, torch.Size([1]), torch.device("cpu"), torch.float64)
        share = (unclipped + self.count_noise * noise_multiplier * float(drawn)) / expected + 0.5
        most = 2 * math.log(MAX_CHANGE)  # from one end of the range to the other; exp stays finite
        change = -self.learning_rate * (share - self.quantile)
        norm *= math.exp(min(max(change, -most), most))
        return min(max(norm, self.initial / MAX_CHANGE), self.initial * MAX_CHANGE)

    def check_clients(self, clients: int) -> None:
        """Raise an error for several clients, as each would clip at a norm of its own.

        Raises:
            DefenseError: says what to use.
        """
        if clients > 1:
            raise base.DefenseError(
                f"QuantileClip: each of {clients} clients would clip at a norm of its own, and the "
                "noise of all is for one. Use client='world', or a clip norm that stays."
            )


MaxGradNorm = float | Literal["auto"] | QuantileClip


@dataclass(frozen=True)
class Clip:
    """How each sample's gradient is clipped.

    Attributes:
        norm: C, the largest norm of one sample's addend.
        gamma: The gamma of automatic clipping; None where gradients are clipped at a fixed norm.
        form: The form of per-sample gradients in memory.
    """

    norm: float
    gamma: float | None = None
    form: per_sample.Clipping = "auto"

    def factors(self, norms: Tensor) -> Tensor:
        """Return the factors that clip gradients, of the shape of their norms.

        Args:
            norms: The norms of samples' gradients; infinite for a sample that is not to count.
        """
        if self.gamma is None:
            return self.norm / norms.clamp(min=self.norm)
        return self.norm / (norms + self.gamma)


class EarlierPieces:
    """Clipped sums and norms of a logical batch's pieces before the last, until its release.

    Args:
        samples: The samples of the logical batch in this process that count.
        device: The device of norms and weights.
        probed: whether their per-sample gradients are compared with autograd's in the release.

    Attributes:
        sums: clipped sums, by parameter: of this process's samples in the whole shape; of a
            parameter that is sharded (FSDP2) this process's part of the sum over all processes.
        used: parameters that a recorded layer uses.
        probes: for each parameter the component of its gradient along a random direction, and the
            sum of its terms' squared norms.
        half: whether gradients came in half precision.
    """

    def __init__(self, samples: int, device: torch.device, *, probed: bool) -> None:
        self.samples = samples
        self.probed = probed
        self.sums: dict[Tensor, Tensor] = {}
        # Allocated once: a small tensor from each piece would fragment the memory of all.
        self._norms_and_weights = torch.zeros(2, samples, dtype=torch.float64, device=device)
        self._count = 0
        self.used: set[Tensor] = set()
        self.probes: dict[Tensor, tuple[float, float]] = {}
        self.half = False
        self.parameters: list[nn.Parameter] | None = None

    @property
    def rows(self) -> Tensor:
        """Return norms and weights of the pieces' n samples, (2, n)."""
        return self._norms_and_weights[:, : self._count]

    def add(self, clipped: ClippedSum, parameters: Sequence[nn.Parameter], team: Team) -> None:
        """Add a piece; a collective where parameters are sharded.

        Args:
            clipped: the piece's samples.
            parameters: The parameters that are released, the same in all pieces.
            team: the processes of this client.
        """
        self.parameters = [*parameters]
        self.used.update(clipped.parts)
        end = self._count + clipped.samples
        self._norms_and_weights[0, self._count : end] = clipped.norms
        self._norms_and_weights[1, self._count : end] = clipped.mean_weights[: clipped.samples]
        self._count = end
        self.half = self.half or clipped.half
        if self.probed:
            for index, parameter in enumerate(parameters):
                if parameter in clipped.parts:
                    left, right = per_sample.random_direction(index, parameter)
                    value, squares = per_sample.probe(clipped.parts[parameter], left, right)
                    earlier = self.probes.get(parameter, (0.0, 0.0))
                    terms = clipped.unit * float(value), clipped.unit**2 * float(squares)
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
    """The clipped per-sample gradients of this process.

    Where users are clipped, "sample" below means a user: the mean of the gradients of its rows.

    Args:
        parameters: The parameters that are released.
        recorder: The recorder, which holds the samples' gradients of the mean loss.
        clip: how they are clipped.
        context: where the step runs.
        weights: (B,) by which each gradient becomes that of its sample's mean; None for ones.
        earlier: the pieces before, where these are samples of a logical batch in pieces.
        users: how many adjacent rows each user has, where users are clipped.

    Attributes:
        samples: B.
        factors: (B,) by which a sample's part of the mean loss's gradient becomes its clipped
            gradient; one for each row.
        weights: (B,) by which a part of the mean loss's gradient becomes that of a sample's loss.
        half: whether gradients came in half precision.
        unit, mean_weights: by which parts become the mean's, and (B,) these a sample's.
        clip: how they are clipped.
        norms: (B,) norms of the gradients of each sample's loss, before clipping; infinite for one
            that holds NaN or infinity, or whose norm overflows. Such a sample counts as zero,
            because whether a run goes on must not depend on one example.
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
        weights = torch.ones(samples, dtype=torch.float64) if weights is None else weights.double()
        self.mean_weights, self.unit = in_batch * weights.to(device), 1.0
        if recorder.terms is not None:
            self.unit = samples / recorder.terms / max(1, in_batch)
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
        broken = [-1, *(~finite).nonzero().flatten().tolist(), len(finite)]
        self._spans = [(i + 1, end) for i, end in itertools.pairwise(broken) if i + 1 < end]
        self.clip = clip
        self._lacks_sums = recorder.lacks_sums
        self.half = recorder.half or (earlier is not None and earlier.half)

    def sum_of(
        self, parameter: Tensor, target: Tensor | None = None, memory: Tensor | None = None
    ) -> Tensor:
        """Return the clipped sum of these samples' gradients, float32 or float64, in whole shape.

        Args:
            parameter: The parameter of the gradients.
            target: a sum to which it is added in place; None for zeros.
            memory: may be overwritten with the sum, see :func:`per_sample.weighted_sum`.
        """
        if parameter not in self.parts:
            return per_sample.zeros_of(parameter) if target is None else target
        for start, end in self._spans:  # between samples that are not finite: zero times NaN is NaN
            parts, factors = self.parts[parameter], self.factors[start:end]
            parts = per_sample.between(parts, start, end)
            target = per_sample.weighted_sum(parts, factors, parameter.shape, target, memory)
        return per_sample.zeros_of(parameter) if target is None else target

    def unclipped(self, team: Team) -> float:
        """Return the sum over all samples of 1/2 for each that is not clipped, else -1/2."""
        norms = self.norms
        if self._earlier is not None:
            norms = torch.cat([self._earlier.rows[0], norms])
        return float(team.summed(((norms <= self.clip.norm).double() - 0.5).sum()))

    def with_canary(self, samples: Tensor, divisor: float) -> base.CanaryGradient:
        """Return what is released of crafted layers, clipped together with the real ones.

        Args:
            samples: (B, G, K) gradients of the crafted layers, each sample's part of the mean loss.
            divisor: The divisor of the update.

        Raises:
            DefenseError: they are of other samples than the batch, or users are clipped.
        """
        if self._users is not None:
            raise base.DefenseError(
                "DPSGD: a canary is one row, and unit=Users() clips a user's together"
            )
        rows = torch.stack([self.norms, self.mean_weights])
        norms, weights = rows if self._earlier is None else torch.cat([self._earlier.rows, rows], 1)
        if len(samples) != len(norms):  # one would be broadcast to all
            raise base.DefenseError(
                f"DPSGD: a canary of {len(samples)} samples in a batch of {len(norms)}"
            )
        samples = samples * weights.to(samples)[:, None, None]
        joint = torch.hypot(samples.norm(dim=2), norms.to(samples)[:, None])
        factors = self.clip.factors(joint) / divisor
        finite = torch.isfinite(joint)[..., None]
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

        Replicas get the same noise, shards independent noise.

        Args:
            parameters: The parameters in the same order in all processes.
            team: the processes of this client.
            std: standard deviation of the noise on each number; 0: none.
            divisor: The divisor of sum and noise.
            add: called with the number of a draw, a tensor, and a standard deviation: adds that
                noise to the tensor in place.
            gauge: measures the noise.
        """
        earlier = {} if self._earlier is None else self._earlier.sums
        # One process needs autograd's gradients no more: sums are written over them.
        sums = self.sums(parameters, team, earlier, over_gradients=team.size == 1)
        for index, parameter, total in sums:
            if isinstance(parameter, DTensor) and parameter in earlier:
                total.add_(earlier.pop(parameter))
            exact = None if gauge is None else gauge.before(total)
            if parameter.grad is None:
                alike = (total.dtype, total.stride()) == (parameter.dtype, parameter.stride())
                usable = alike and team.size == 1 and not isinstance(parameter, DTensor)
                parameter.grad = total if usable else torch.zeros_like(parameter)
            number, released = index, parameter.grad
            if isinstance(parameter, DTensor):
                number += processes.shard_number(parameter) << SHARD_BITS
                released = processes.local_part(released)
            if std:
                add(number, total, std)
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
        """Yield the index of each parameter, the parameter, and this process's part of its sum.

        Small parameters are summed in groups: a collective for each of 200 is many times slower.

        Args:
            parameters: The parameters in the same order in all processes.
            team: the processes of this client; a collective of them.
            earlier: this process's sums, in whole shape, of parameters that are not sharded; they
                are removed, and these samples added to them.
            over_gradients: whether a sum may be written over ``p.grad``, which saves new memory.
        """
        at_once, start = AT_ONCE if team.size > 1 else 0, 0
        while start < len(parameters):
            end, numbers = start + 1, parameters[start].numel()
            while end < len(parameters) and numbers + parameters[end].numel() <= at_once:
                numbers, end = numbers + parameters[end].numel(), end + 1
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

    def check_explained(
        self, parameters: Sequence[nn.Parameter], context: base.DefenseContext, team: Team
    ) -> None:
        """Raise an error for a gradient of a parameter that no recorded layer uses.

        Raises:
            DefenseError: names the parameter.
        """
        earlier = set() if self._earlier is None else self._earlier.used
        used = team.largest([p in self.parts or p in earlier for p in parameters])
        unused = [p for p, is_used in zip(parameters, used, strict=True) if not is_used]
        if not unused:
            return
        nonzero = [p.grad is not None and bool(processes.local_part(p.grad).any()) for p in unused]
        for parameter, is_nonzero in zip(unused, team.largest(nonzero), strict=True):
            if is_nonzero:
                name = base.parameter_name(parameter, context.root)
                raise base.DefenseError(
                    f"DPSGD: the gradient of '{name}' came from no layer that DPSGD saw in "
                    "training_step: its layer was added after setup, its output was changed in "
                    "place (write y = y + x), or the parameter is used outside of its module's "
                    "forward. Nothing was released."
                )

    def check_complete(
        self, parameters: Sequence[nn.Parameter], context: base.DefenseContext, team: Team
    ) -> bool:
        """Raise an error unless the parts add up to the gradient that autograd has computed.

        They are compared along one random direction for each parameter. The gradient is the mean
        over the client's processes, whole in each (DDP) or a shard (FSDP2). One that holds NaN or
        infinity is not compared.

        Returns:
            Whether they were compared: autograd computed it, and earlier pieces were probed.

        Raises:
            DefenseError: names the parameter.
        """
        if self._lacks_sums or (self._earlier is not None and not self._earlier.probed):
            return False
        with team.together():
            rows = [self._components(i, p, team) for i, p in enumerate(parameters)]
        numbers = torch.tensor(rows, dtype=torch.float64).reshape(-1, 3).to(context.device)
        sums = team.summed(numbers).tolist()
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
                    f"DPSGD: the gradient of '{name}' is not the sum of what its layer was seen to "
                    "add: it is also used outside of its module's forward, or a hook changes "
                    "gradients. Nothing was released."
                )
        return True

    def _components(
        self, index: int, parameter: nn.Parameter, team: Team
    ) -> tuple[float, float, float]:
        """Return components of autograd's gradient and of the parts, and the scale of rounding.

        The components are along one random direction, the scale is the squared norm of the gradient
        and of its terms. All three are this process's addends.
        """
        gradient = parameter.grad
        parts = self.parts.get(parameter, [])
        probes = {} if self._earlier is None else self._earlier.probes
        if gradient is None or (team.size == 1 and not parts and parameter not in probes):
            return 0.0, 0.0, 0.0
        shard = processes.local_part(gradient).to(where_whole(gradient))
        left, right = per_sample.random_direction(index, parameter)
        shape, wide = (len(left), len(right)), left.dtype
        if shard.shape == gradient.shape:
            expected = left @ (shard.reshape(shape).to(wide) @ right)
        else:
            direction = processes.own_part(torch.outer(left, right).view(gradient.shape), gradient)
            expected = (shard.to(wide) * direction).sum()
        value, squares = map(float, per_sample.probe(parts, left, right))
        earlier = probes.get(parameter, (0.0, 0.0))
        share = processes.copies(gradient) if team.size > 1 else 1.0
        norm = float(torch.linalg.vector_norm(shard, dtype=torch.float64))
        return (
            float(expected) / share,
            (value * self.unit + earlier[0]) / team.size,
            norm**2 / share + (squares * self.unit**2 + earlier[1]) / team.size**2,
        )
