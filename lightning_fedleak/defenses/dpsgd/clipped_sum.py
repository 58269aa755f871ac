"""One release of DP-SGD: clip factors, clipped sums, and what is measured about them.

How long a sample's gradient may be, all of it or layer by layer, and the noise that covers it:

- *Fixed*: ``min(1, C / |g|) g`` (Abadi et al. 2016).
- *Automatic*: ``g / (|g| + gamma)``, AUTO-S of Bu et al. 2023 (arXiv 2206.07136). No C to
  find: what is released of a sample has a norm below 1, whatever its gradient.
- *Per layer*: each group of parameters is clipped by itself to a C_l of its own. Noise of standard
  deviation s_l on group l is one Gaussian mechanism: scaled by 1 / s_l the noise of all numbers is
  alike, and one sample moves what it is added to by at most ``sqrt(sum (C_l / s_l)^2)``.

Bounds are for an example that is added or removed. One that is replaced by another moves the sum by
up to twice as much.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.conv import _ConvNd

from lightning_fedleak.defenses.accounting.accounting import joint_noise_multiplier
from lightning_fedleak.defenses.base import CanaryGradient, DefenseContext, DefenseError
from lightning_fedleak.defenses.dpsgd.logical import Piece
from lightning_fedleak.defenses.dpsgd.per_sample import (
    Clipping,
    Part,
    chosen,
    of_samples,
    probe,
    squared_norms,
    squared_norms_of_users,
    weighted_sum,
)
from lightning_fedleak.defenses.processes import (
    SHARD_BITS,
    Team,
    copies,
    local_part,
    own_part,
    own_parts_of_sums,
    shard_number,
    where_whole,
)

MaxGradNorm = float | Literal["auto"] | Mapping[str, float]
LayerNoise = Literal["equal", "by_clip"]

GAUGED = 1 << 16
"""Coordinates of each parameter whose noise is measured."""
FEWEST_GAUGED = 50
"""Coordinates below which chi-square's tail would often pass for wrong noise."""
LEAST_GAUGED = 1e-4
AT_ONCE = 1 << 20
"""Numbers of small parameters that are summed over processes at once."""
RELATIVE = 1e-2
"""A gradient of less than this share of the largest may be rounding alone (a bias of keys)."""
FINE, COARSE = 1e-3, 0.05
"""How far autograd's gradient may be from the sum of the samples' parts, over its size: in float32,
and where products are rounded to eight or eleven bits, which moves a gradient by up to .0039 of it.
Along a random direction a chance of more than twelve times that is left out of account."""
PATIENCE = 3


@dataclass(frozen=True)
class Clip:
    """Clip norms of groups of parameters, and how the noise is shared among them.

    Attributes:
        norms: C_l of each group.
        noise: standard deviation of each group's noise, over the noise multiplier.
        gamma: of automatic clipping; None where gradients are clipped at a fixed norm.
        groups: which group a parameter is in; None where there is one group.
    """

    norms: tuple[float, ...]
    noise: tuple[float, ...]
    gamma: float | None = None
    groups: Mapping[Tensor, int] | None = field(default=None, repr=False)

    @property
    def sensitivity(self) -> float:
        """Norm of what one sample can add, over all groups."""
        return math.hypot(*self.norms)

    def group_of(self, parameter: Tensor) -> int:
        """Which group a parameter is in.

        Raises:
            DefenseError: it was not trained when the fit began.
        """
        if self.groups is None:
            return 0
        if parameter not in self.groups:
            raise DefenseError(
                f"DPSGD: a parameter of shape {tuple(parameter.shape)} is trained that was frozen "
                "or not there when the fit began, so it has no clip norm of its own. Thaw it "
                "before the fit, or clip all layers together (a plain max_grad_norm)."
            )
        return self.groups[parameter]

    def factors(self, norms: Tensor) -> Tensor:
        """What gradients are multiplied by.

        Args:
            norms: (groups, B), or (..., B) of one group; of samples' gradients, infinite for none.
        """
        if len(self.norms) == 1:
            return _factors(norms, self.norms[0], self.gamma)
        each = [_factors(n, c, self.gamma) for n, c in zip(norms, self.norms, strict=True)]
        return torch.stack(each)

    def relative_noise(self, parameter: Tensor) -> float:
        """Standard deviation of its noise over ``noise multiplier * sensitivity``."""
        return self.noise[self.group_of(parameter)] / self.sensitivity


def _factors(norms: Tensor, clip: float, gamma: float | None) -> Tensor:
    if gamma is None:
        return clip / norms.clamp(min=clip)
    return clip / (norms + gamma)


def clip_of(
    max_grad_norm: MaxGradNorm,
    root: nn.Module,
    *,
    gamma: float,
    per_layer: bool,
    layer_noise: LayerNoise,
) -> Clip:
    """The clip norms of a model's layers.

    Args:
        max_grad_norm: see :class:`~lightning_fedleak.defenses.dpsgd.dpsgd.DPSGD`.
        root: the module that is trained.
        gamma: of automatic clipping.
        per_layer: every layer that trains parameters is clipped by itself.
        layer_noise: how the noise is shared among groups.

    Raises:
        DefenseError: a name that is none of the model's, or a trained parameter without a norm.
    """
    trained = [(name, p) for name, p in root.named_parameters() if p.requires_grad]
    automatic = gamma if max_grad_norm == "auto" else None
    if isinstance(max_grad_norm, Mapping):
        names = _longest([name for name, _ in trained], max_grad_norm)
        norms = [float(max_grad_norm[name]) for name in dict.fromkeys(names)]
    else:
        total = 1.0 if max_grad_norm == "auto" else float(max_grad_norm)
        if not per_layer:
            return Clip((total,), (total,), automatic)
        names = [name.rpartition(".")[0] for name, _ in trained]
        count = len(set(names))
        norms = [total / math.sqrt(count)] * count
    index = {name: number for number, name in enumerate(dict.fromkeys(names))}
    groups: dict[Tensor, int] = {
        p: index[name] for name, (_, p) in zip(names, trained, strict=True)
    }
    joint = math.hypot(*norms)
    noise = [joint] * len(norms)
    if layer_noise == "by_clip":
        noise = [math.sqrt(len(norms)) * norm for norm in norms]
    assert math.isclose(joint_noise_multiplier(norms, noise), 1.0, rel_tol=1e-12)
    return Clip(tuple(norms), tuple(noise), automatic, groups)


def _longest(names: Sequence[str], norms: Mapping[str, float]) -> list[str]:
    """Of each parameter the longest of the keys that are its own name or a module's around it."""
    found = []
    for name in names:
        own = [k for k in norms if not k or name == k or name.startswith(f"{k}.")]
        if not own:
            raise DefenseError(
                f"DPSGD: max_grad_norm has no norm for '{name}'. Add it, a module around it, or "
                "'' for all the rest."
            )
        found.append(max(own, key=len))
    if unused := sorted(set(norms) - set(found) - {""}):
        raise DefenseError(
            f"DPSGD: max_grad_norm names '{unused[0]}', and the model trains nothing under that "
            f"name. The first that it trains is '{names[0] if names else ''}'."
        )
    return found


class Gathered:
    """What the pieces of a logical batch before the last have left for its release.

    Args:
        samples: of the logical batch in this process.
        device: of norms and weights.
        probed: their per-sample gradients are compared with autograd's in the release.

    Attributes:
        sums: clipped sums, by parameter: of this process's samples in the whole shape; of a
            parameter that is sharded (FSDP2) this process's part of the sum over all processes.
        seen: parameters that a layer was seen to use.
        along: of each parameter what of its gradient lies along a random direction, and the sum of
            its terms' squared norms.
        half: gradients came in half precision.
        positions: of all samples, in the layer that has most.
    """

    def __init__(self, samples: int, device: torch.device, *, probed: bool) -> None:
        self.samples = samples
        self.probed = probed
        self.sums: dict[Tensor, Tensor] = {}
        # Whole from the start: what stays of each piece would part the memory that it took.
        self._numbers = torch.zeros(2, samples, dtype=torch.float64, device=device)
        self._known = 0
        self.seen: set[Tensor] = set()
        self.along: dict[Tensor, tuple[float, float]] = {}
        self._open: dict[nn.Parameter, Tensor] = {}
        self.half = False
        self.positions = 0
        self.parameters: list[nn.Parameter] | None = None

    @property
    def norms(self) -> Tensor:
        """(n,) of the pieces' samples."""
        return self._numbers[0, : self._known]

    @property
    def weights(self) -> Tensor:
        """(n,) of the same."""
        return self._numbers[1, : self._known]

    def add(
        self,
        clipped: ClippedSum,
        parameters: Sequence[nn.Parameter],
        piece: Piece,
        team: Team,
    ) -> None:
        """Adds one piece's; a collective where parameters are sharded.

        Args:
            clipped: of the piece.
            parameters: that are released, the same in all pieces.
            piece: which.
            team: the processes of this client.
        """
        self.parameters = [*parameters]
        self.seen.update(clipped.parts)
        if not piece.of:
            end = self._known + clipped.samples
            self._numbers[0, self._known : end] = clipped.norms
            self._numbers[1, self._known : end] = clipped.weights
            self._known = end
        self.half = self.half or clipped.half
        if self.probed:
            for index, parameter in enumerate(parameters):
                if parameter in clipped.parts:
                    left, right = random_direction(index, parameter)
                    value, squares = probe(clipped.parts[parameter], left, right)
                    before = self.along.get(parameter, (0.0, 0.0))
                    self.along[parameter] = before[0] + float(value), before[1] + float(squares)
        sharded = [p for p in parameters if isinstance(p, DTensor)]
        ended = self._of_one_user(clipped, piece) if piece.of else {}

        def own(parameter: nn.Parameter) -> Tensor:
            if not piece.of:
                return clipped.sum_of(parameter)
            return ended[parameter] if parameter in ended else zeros_of(parameter)

        for parameter in parameters:
            known = self.sums.get(parameter)
            if isinstance(parameter, DTensor):
                continue
            if parameter in ended:
                total = ended[parameter]
                self.sums[parameter] = total if known is None else known.add_(total)
            elif parameter in clipped.parts and not piece.of:
                self.sums[parameter] = clipped.sum_of(parameter, known)
        for _, parameter, total in clipped.sums(sharded, team, own):
            known = self.sums.get(parameter)
            self.sums[parameter] = total if known is None else known.add_(total)

    def _of_one_user(self, clipped: ClippedSum, piece: Piece) -> dict[nn.Parameter, Tensor]:
        """Adds to the gradient of a user whose rows are in several pieces.

        Returns:
            It, clipped, by parameter, with the last of them; nothing before, nor where it is not
            finite.
        """
        weights, clip = clipped.weights / piece.of, clipped.clip
        for parameter, parts in clipped.parts.items():
            own = weights.to(where_whole(parameter))
            before = self._open.get(parameter)
            self._open[parameter] = weighted_sum(parts, own, parameter.shape, before)
        if not piece.ends:
            return {}
        whole, self._open = self._open, {}
        squares = torch.zeros(len(clip.norms), 1, dtype=torch.float64, device=weights.device)
        for parameter, gradient in whole.items():
            square = torch.linalg.vector_norm(gradient, dtype=torch.float64).square()
            squares[clip.group_of(parameter)] += square.to(weights.device)
        if not bool(torch.isfinite(squares).all()):
            return {}
        factors = clip.factors(squares.sqrt()).flatten().tolist()
        return {p: gradient.mul_(factors[clip.group_of(p)]) for p, gradient in whole.items()}


class ClippedSum:
    """This process's per-sample gradients, clipped: each as a whole, or its groups by themselves.

    Args:
        parameters: that are released.
        parts: per-sample gradients of the mean loss.
        samples: B of this process; 0 for an empty batch.
        clip: how long a sample's gradient may be.
        clipping: in which form to keep them.
        context: where.
        half: gradients came in half precision.
        weights: (B,) that make each sample's gradient that of its own mean; None where it is.
        gathered: of the pieces before, where these are samples of a logical batch in pieces.
        users: how many samples each user has, who stand side by side, where users are clipped:
            the mean of one's samples' gradients is then what is said of a sample's below.

    Attributes:
        samples: B; users where they are clipped.
        factors: (B,), or (groups, B), that make of a sample's part in the mean loss's gradient what
            is added up; of users their samples' ones.
        weights: (B,) that make of a part of the mean loss's gradient that of a sample's own.
        half: gradients came in half precision.
        clip: how long a sample's gradient may be.
        norms: (B,) norms of the gradients of each sample's own loss, before clipping; infinite for
            a sample whose gradient holds NaN or infinity, or whose norm overflows. It counts as
            zero: whether a run goes on must not tell of one example.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        parts: Mapping[Tensor, list[Part]],
        samples: int,
        clip: Clip,
        clipping: Clipping,
        context: DefenseContext,
        *,
        half: bool = False,
        weights: Tensor | None = None,
        gathered: Gathered | None = None,
        users: Sequence[int] | None = None,
    ) -> None:
        self.samples = samples if users is None else len(users)
        whole = samples if gathered is None else gathered.samples
        own = torch.ones(samples, dtype=torch.float64) if weights is None else weights.double()
        self.weights = whole * own.to(context.device)
        self.parts = {p: chosen(parts[p], p.shape, clipping) for p in parameters if p in parts}
        self._users, self._rows = users, self.weights
        device, groups = context.device, len(clip.norms)
        owners: Tensor | None = None
        if users is not None:
            counts = torch.tensor(users, dtype=torch.int64)
            owners = torch.arange(len(users)).repeat_interleave(counts).to(device)
            self._rows = self.weights / counts.to(device)[owners]
            self.weights = torch.ones(len(users), dtype=torch.float64, device=device)
        squares = torch.zeros(groups, self.samples, dtype=torch.float64, device=device)
        for p, own_parts in self.parts.items():
            if users is None:
                found = squared_norms(own_parts)
            else:
                found = squared_norms_of_users(own_parts, self._rows, users, p.shape, clipping)
            squares[clip.group_of(p)] += found.to(device)
        norms = squares.sqrt() * self.weights
        self.norms = squares.sum(0).sqrt() * self.weights
        self._whole = torch.isfinite(self.norms)
        self._broken = not bool(self._whole.all())
        self.norms = self.norms.masked_fill(~self._whole, math.inf)
        factors = clip.factors(norms if groups > 1 else self.norms)
        if owners is not None:
            factors, self._whole = factors[..., owners], self._whole[owners]
        self.factors = self._rows * factors
        self.clip, self.half = clip, half
        self._gathered = gathered

    def sum_of(self, parameter: nn.Parameter, onto: Tensor | None = None) -> Tensor:
        """Clipped sum of these samples' own gradients, float32 or float64, of the whole shape.

        Args:
            parameter: whose.
            onto: a sum to which it is added, in place.
        """
        if parameter not in self.parts:
            if onto is not None:
                return onto
            return zeros_of(parameter)
        own, factors = self.parts[parameter], self.factors
        if factors.dim() == 2:
            factors = factors[self.clip.group_of(parameter)]
        if self._broken:  # zero times NaN is NaN
            own, factors = of_samples(own, self._whole), factors[self._whole]
        return weighted_sum(own, factors.to(where_whole(parameter)), parameter.shape, onto)

    def with_canary(self, samples: Tensor, divisor: float) -> CanaryGradient:
        """What is released of crafted layers whose gradients join those of the samples.

        Args:
            samples: (B, G, K) what each sample adds to the gradient of the mean loss.
            divisor: of the update.

        Raises:
            DefenseError: they are of other samples than the batch, or layers have clip norms of
                their own.
        """
        if self._users is not None:
            raise DefenseError(
                "DPSGD: a canary is one row, and with unit='user' all rows of a user are clipped "
                "together; what would leave of it is not computed"
            )
        if len(self.clip.norms) > 1:
            raise DefenseError(
                "DPSGD: with clip norms for each layer it is not settled what those of crafted "
                "layers would be; clip all layers together (a plain max_grad_norm) to play canaries"
            )
        before = self._gathered
        norms, weights = self.norms, self.weights
        if before is not None:
            norms = torch.cat([before.norms, norms])
            weights = torch.cat([before.weights, weights])
        if len(samples) != len(norms):
            raise DefenseError(
                f"DPSGD: a canary of {len(samples)} samples in a batch of {len(norms)}"
            )
        samples = samples * weights.to(samples)[:, None, None]
        own = norms.to(samples)[:, None]
        joint = torch.hypot(samples.norm(dim=2), own)
        factors = self.clip.factors(joint) / divisor
        whole = torch.isfinite(joint)[..., None]
        return CanaryGradient((samples * factors[..., None]).masked_fill(~whole, 0.0))

    def release(
        self,
        parameters: Sequence[nn.Parameter],
        team: Team,
        std: float,
        divisor: float,
        add: Callable[[int, Tensor, float], None],
        gauge: NoiseGauge | None = None,
    ) -> None:
        """Puts the sum over all processes' samples, with noise, into ``p.grad``.

        Replicas get the same noise, shards independent noise.

        Args:
            parameters: in the same order in all processes.
            team: the processes of this client.
            std: standard deviation of the noise, over all groups of parameters together; 0 for
                none.
            divisor: of sum and noise.
            add: adds the noise of a number, of a standard deviation, to a tensor in place.
            gauge: measures the noise.
        """
        for index, parameter, total in self._all_sums(parameters, team):
            relative = self.clip.relative_noise(parameter)
            before = None if gauge is None else gauge.before(total, relative)
            if std:
                add(index + (shard_number(parameter) << SHARD_BITS), total, std * relative)
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            released = local_part(parameter.grad)
            torch.div(total, divisor, out=released)
            if gauge is not None and before is not None:
                gauge.after(before, released, relative)

    def _all_sums(
        self, parameters: Sequence[nn.Parameter], team: Team
    ) -> Iterator[tuple[int, nn.Parameter, Tensor]]:
        """As :meth:`sums`, with those of the pieces before."""
        before = {} if self._gathered is None else self._gathered.sums

        def own(parameter: nn.Parameter) -> Tensor:
            known = None if isinstance(parameter, DTensor) else before.pop(parameter, None)
            return self.sum_of(parameter, known)

        for index, parameter, total in self.sums(parameters, team, own):
            if isinstance(parameter, DTensor) and parameter in before:
                total.add_(before.pop(parameter))
            yield index, parameter, total

    def sums(
        self,
        parameters: Sequence[nn.Parameter],
        team: Team,
        own: Callable[[nn.Parameter], Tensor],
    ) -> Iterator[tuple[int, nn.Parameter, Tensor]]:
        """Each parameter with its place, and this process's part of its sum; small ones at once.

        Args:
            parameters: in the same order in all processes.
            team: the processes of this client; a collective of them.
            own: gives this process's addend, of the whole shape; may be overwritten.
        """
        if team.size == 1:
            for index, parameter in enumerate(parameters):
                yield index, parameter, own(parameter)
            return
        start = 0
        while start < len(parameters):
            end, numbers = start + 1, parameters[start].numel()
            while end < len(parameters) and numbers + parameters[end].numel() <= AT_ONCE:
                numbers, end = numbers + parameters[end].numel(), end + 1
            some = parameters[start:end]
            totals = own_parts_of_sums([own(parameter) for parameter in some], some)
            for index, (parameter, total) in enumerate(zip(some, totals, strict=True), start):
                yield index, parameter, total
            start = end

    def check_explained(
        self, parameters: Sequence[nn.Parameter], context: DefenseContext, team: Team
    ) -> None:
        """Refuses a gradient of a parameter that no layer was seen to use, in no process.

        Raises:
            DefenseError: says whose.
        """
        before = set() if self._gathered is None else self._gathered.seen
        seen = team.largest([p in self.parts or p in before for p in parameters])
        unseen = [p for p, known in zip(parameters, seen, strict=True) if not known]
        if not unseen:
            return
        loose = [p.grad is not None and bool(local_part(p.grad).any()) for p in unseen]
        for parameter, found in zip(unseen, team.largest(loose), strict=True):
            if found:
                raise DefenseError(
                    f"DPSGD: the gradient of '{name_of(parameter, context.root)}' came from no "
                    "layer that DPSGD saw in training_step: its layer was added after setup, or "
                    "the parameter is used outside of its module's forward. Nothing was released."
                )

    def check_complete(
        self, parameters: Sequence[nn.Parameter], context: DefenseContext, team: Team
    ) -> bool:
        """Refuses where the parts do not add up to the gradient that autograd has computed.

        Along one random direction for each parameter. The gradient is the mean over the client's
        processes, all of it in each (DDP) or a shard (FSDP2).

        Returns:
            Whether all could be compared: none of them holds NaN or infinity.

        Raises:
            DefenseError: says which parameter.
        """
        with team.together():
            rows = [self._along_a_direction(i, p, team) for i, p in enumerate(parameters)]
        numbers = torch.tensor(rows, dtype=torch.float64).reshape(-1, 3).to(context.device)
        sums = team.summed(numbers).tolist()
        before = self._gathered
        half = self.half or (before is not None and before.half)
        coarse = half or context.precision.startswith("bf16") or _rounds_products(context)
        tolerance = COARSE if team.largest([coarse])[0] else FINE
        known = [(p, row) for p, row in zip(parameters, sums, strict=True) if _finite(row)]
        sizes = [math.sqrt(squares) for _, (_, _, squares) in known]
        largest = max(sizes, default=0.0)
        for (parameter, (found, value, _)), size in zip(known, sizes, strict=True):
            if not abs(found - value) <= tolerance * max(size, RELATIVE * largest) + 1e-30:
                name = name_of(parameter, context.root)
                raise DefenseError(
                    f"DPSGD: the gradient of '{name}' is not the sum of what its layer was seen "
                    "to add. Either the parameter is also used outside of its module's forward, "
                    "or a hook changes gradients, which would be lost. Nothing was released."
                )
        return len(known) == len(sums)

    def _along_a_direction(
        self, index: int, parameter: nn.Parameter, team: Team
    ) -> tuple[float, float, float]:
        """This process's addends of the gradient's component, of the parts', and of what rounding
        is measured by: the squared norms of the gradient and of its terms.
        """
        gradient = parameter.grad
        parts = self.parts.get(parameter, [])
        known = {} if self._gathered is None else self._gathered.along
        if gradient is None or (team.size == 1 and not parts and parameter not in known):
            return 0.0, 0.0, 0.0
        mine = local_part(gradient).to(where_whole(gradient))
        left, right = random_direction(index, parameter)
        shape, wide = (len(left), len(right)), left.dtype
        if mine.shape == gradient.shape:
            found = left @ (mine.reshape(shape).to(wide) @ right)
        else:
            direction = own_part(torch.outer(left, right).view(gradient.shape), gradient)
            found = (mine.to(wide) * direction).sum()
        value, squares = map(float, probe(parts, left, right))
        earlier = known.get(parameter, (0.0, 0.0))
        share = copies(gradient) if team.size > 1 else 1.0
        norm = float(torch.linalg.vector_norm(mine, dtype=torch.float64))
        return (
            float(found) / share,
            (value + earlier[0]) / team.size,
            norm**2 / share + (squares + earlier[1]) / team.size**2,
        )


class NoiseGauge:
    """Measures the standard deviation of the noise in what is about to leave.

    Args:
        std: what it must be, before the division.
        divisor: by which clipped sum and noise are divided.
    """

    def __init__(self, std: float, divisor: float) -> None:
        self.std = std
        self.divisor = divisor
        self._square = 0.0
        self._count = 0

    def before(self, total: Tensor, relative: float) -> Tensor | None:
        """Some coordinates of the clipped sum, None where rounding would hide the noise.

        Args:
            total: of one parameter.
            relative: how much noise it gets, over ``std``.
        """
        if not self.std:
            return None
        some = total.flatten()[:GAUGED].clone()
        largest = float(some.abs().max()) if some.numel() else 0.0
        return some if self.std * relative > LEAST_GAUGED * largest else None

    def after(self, before: Tensor, released: Tensor, relative: float) -> None:
        """The same coordinates of the gradient that leaves."""
        if released.dtype not in (torch.float32, torch.float64):
            return
        noise = released.flatten()[:GAUGED].double() * self.divisor - before.double()
        self._square += float(noise.square().sum()) / relative**2
        self._count += noise.numel()

    def measured(self) -> float | None:
        """Standard deviation, None where too little could be measured.

        Raises:
            DefenseError: it is not what it must be, by more than six standard errors and 1%.
        """
        if self._count < FEWEST_GAUGED:
            return None
        ratio = self._square / self._count / self.std**2
        if abs(ratio - 1) > 6 * math.sqrt(2 / self._count) + 0.02:
            raise DefenseError(
                f"DPSGD: the noise measured has a standard deviation of {math.sqrt(ratio):.4g} "
                "times what is accounted; nothing was released."
            )
        return self.std * math.sqrt(ratio)


class Moves:
    """Whether the weights move from release to release."""

    def __init__(self) -> None:
        self._before: Tensor | None = None
        self._still = 0

    def remember(self, parameters: Sequence[nn.Parameter]) -> None:
        """Keeps a few coordinates of each parameter, as they are before the update."""
        self._before = _some(parameters)

    def check(
        self, parameters: Sequence[nn.Parameter], optimizers: Sequence[Any], team: Team
    ) -> None:
        """Refuses to go on where noise was released and no weight of the client has moved by it.

        Raises:
            DefenseError: three times in a row, at a learning rate above zero.
        """
        if self._before is None:
            return
        now, before = _some(parameters), self._before
        rates = [group.get("lr", 0.0) for o in optimizers for group in o.param_groups]
        differs = now.shape != before.shape or not torch.equal(now, before)
        (moved,) = team.largest([differs])
        self._still = 0 if moved or not any(rate > 0 for rate in rates) else self._still + 1
        if self._still >= PATIENCE:
            raise DefenseError(
                f"DPSGD: the weights did not move in {PATIENCE} steps although noise was released "
                "to the optimizer: what it applies is not what is accounted, or the learning rate "
                "is too small for the weights' precision."
            )


def zeros_of(parameter: Tensor) -> Tensor:
    """As wide as clipped sums are, of the whole shape."""
    dtype = torch.float64 if parameter.dtype == torch.float64 else torch.float32
    return torch.zeros(parameter.shape, dtype=dtype, device=where_whole(parameter))


def random_direction(index: int, parameter: Tensor) -> tuple[Tensor, Tensor]:
    """Two random vectors for a parameter's first and its other dimensions, always the same."""
    device = where_whole(parameter)
    generator = torch.Generator(device).manual_seed(index)
    wide = torch.float64 if parameter.dtype == torch.float64 else torch.float32
    left, right = (
        torch.randn(n, generator=generator, device=device, dtype=wide)
        for n in (parameter.shape[0], parameter.shape[1:].numel())
    )
    return left, right


def name_of(parameter: nn.Parameter, root: nn.Module) -> str:
    """As in ``root.named_parameters()``."""
    for name, candidate in root.named_parameters():
        if candidate is parameter:
            return name
    return f"a parameter of shape {tuple(parameter.shape)}"


def _rounds_products(context: DefenseContext) -> bool:
    """Whether products of float32 may be rounded (TF32; cuDNN does so unless it is forbidden)."""
    try:
        rounded = torch.get_float32_matmul_precision() != "highest"
    except RuntimeError:  # torch cannot tell where a backend's own contradicts it
        rounded = True
    on_card = context.device.type == "cuda"
    return rounded or (on_card and any(isinstance(m, _ConvNd) for m in context.root.modules()))


def _finite(numbers: Sequence[float]) -> bool:
    return all(map(math.isfinite, numbers))


def _some(parameters: Sequence[nn.Parameter]) -> Tensor:
    device = parameters[0].device if parameters else torch.device("cpu")
    few = [local_part(p.detach()).flatten()[:4].to(device, torch.float32) for p in parameters]
    return torch.cat(few) if few else torch.zeros(0)


__all__ = [
    "Clip",
    "ClippedSum",
    "Gathered",
    "LayerNoise",
    "MaxGradNorm",
    "Moves",
    "NoiseGauge",
    "clip_of",
    "name_of",
]
