"""The atoms of a known input: what every token looks like there.

Without positions an atom is the input itself. With absolute positions an input is, up to its
length, ``gain * centred(word + position) + bias`` where a layer norm reads the sum of the
embeddings: once the span of the positions and of the bias is projected out, the word is left, so
that V atoms do in place of V x P.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_fedleak.attacks.row_space import linear_maps
from lightning_fedleak.model.anatomy import Anatomy, Place, walk
from lightning_fedleak.model.model_runs import (
    TOKENS_AT_ONCE,
    context_length,
    only_needed_hooks,
    stop_at,
    undisturbed,
)
from lightning_fedleak.model.snapshots import whole_tensor

_ADDITIVE = 1e-4  # relative error up to which word and position count as summands; not tuned


class NotAdditive(ValueError):
    """The input depends on positions, but is no scaled sum of word and position."""


@dataclass(frozen=True, eq=False)
class Dictionary:
    """The atoms of a known input.

    Attributes:
        rows: (V, d) the input of each token, at the first position.
        constants: (k, d) float64, what any input may hold besides its word: bias, token types.
        positions: (P, d) float64, what the first P positions add; None if they add nothing.
        mean: (e,) float64, the mean word that each of ``positions`` holds, before the norm.
    """

    rows: Tensor
    constants: Tensor
    positions: Tensor | None
    mean: Tensor | None = None

    def weighed(self, weights: Tensor) -> Dictionary:
        """Return the same with coordinates multiplied by (d,) weights."""
        positions = None if self.positions is None else self.positions * weights.double()
        rows = self.rows * weights.to(self.rows.dtype)
        return Dictionary(rows, self.constants * weights.double(), positions)

    def follow(
        self,
        anatomy: Anatomy,
        known_input: linear_maps.KnownInput,
        *,
        autocast: torch.dtype | None = None,
    ) -> tuple[Dictionary, Tensor]:
        """Return the atoms as the model is now, and (V,) bool which tokens' rows are others.

        Every input is computed again and compared, and those that changed are replaced in place,
        so that nothing an input is computed from can change unnoticed. All rows count as others
        where positions or the form of the inputs have changed.

        Raises:
            NotAdditive: see :func:`build_dictionary`.
        """
        every = torch.arange(linear_maps.vocabulary_size(anatomy), device=anatomy.device)[:, None]
        moved = torch.zeros(len(every), dtype=torch.bool, device=anatomy.device)
        blocks = linear_maps.input_blocks(anatomy, known_input, every, autocast=autocast)
        with closing(blocks):
            for part, x in blocks:
                form = (x.dtype, x.device, len(every), x.shape[-1])
                if form != (self.rows.dtype, self.rows.device, *self.rows.shape):
                    again = build_dictionary(anatomy, known_input, autocast=autocast)
                    return again, torch.ones_like(moved)
                moved[part] = (x[:, 0] != self.rows[part]).any(1)
                self.rows[part] = x[:, 0]
        if not known_input.positional:
            constants = self.constants[:0]
            return Dictionary(self.rows, constants, None), moved | (self.positions is not None)
        mean = None if bool(moved.any()) else self.mean
        positions, constants, mean = _positions(anatomy, known_input, mean)
        same = self.positions is not None and torch.equal(positions, self.positions)
        if same and torch.equal(constants, self.constants) and not bool(moved.any()):
            return self, moved
        return Dictionary(self.rows, constants, positions, mean), torch.ones_like(moved)

    def count_positions(self, rows: Sequence[Tensor], beside: Sequence[Tensor] = ()) -> int:
        """Return how many of the first positions gradients hold, at least 1; 0 without positions.

        A position that texts have takes more of the rows' energy than a direction does by chance.
        The count is where the sum of the logarithms of these ratios, less that of 2, is highest.

        Args:
            rows: each (n_i, d), gradients of maps that read this input, none all zero.
            beside: each (k_i, d) float64, directions that the gradients hold besides inputs.
        """
        if self.positions is None:
            return 0
        basis = orthonormal(torch.cat([self.constants, *beside]))
        g = torch.cat([r.double() / r.double().norm() for r in rows])
        g = g - (g @ basis.T) @ basis
        max_count = min(len(self.positions), (self.rows.shape[1] - len(basis)) // 2)
        positions = self.positions[:max_count]
        positions = positions - (positions @ basis.T) @ basis
        gain = (g @ torch.linalg.qr(positions.T).Q).square().sum(0)
        remaining = g.square().sum() - gain.cumsum(0) + gain
        dims = g.shape[1] - len(basis) - torch.arange(max_count, device=g.device)
        ratio = (gain * dims / remaining.clamp_min(1e-300)).clamp_min(1e-12)
        return int((ratio / 2).log().cumsum(0).argmax()) + 1

    def atoms(
        self, positions: int, beside: Sequence[Tensor] = ()
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the rows of tokens, an orthonormal basis (k, d) of the rest, and further atoms.

        Args:
            positions: number of positions that texts surely have; they are projected out. The next
                positions are the further atoms.
            beside: each (k_i, d) float64, directions that the gradients hold besides inputs.
        """
        directions = [self.constants, *beside]
        if self.positions is None:
            return self.rows, orthonormal(torch.cat(directions)), None
        directions.append(self.positions[:positions])
        further = self.positions[positions : 2 * positions + 16]
        return self.rows, orthonormal(torch.cat(directions)), further.to(self.rows.dtype)


def orthonormal(rows: Tensor, tolerance: float = 1e-9) -> Tensor:
    """Return a (k, d) orthonormal basis of the span of (n, d) rows, k <= n."""
    if len(rows) == 0:
        return rows
    _, s, basis = torch.linalg.svd(rows, full_matrices=False)
    return basis[s > tolerance * s[0]] if float(s[0]) > 0 else rows[:0]


def build_dictionary(
    anatomy: Anatomy, known_input: linear_maps.KnownInput, *, autocast: torch.dtype | None = None
) -> Dictionary:
    """Return the atoms of an input, from a run of the model on every token.

    Args:
        anatomy: the model.
        known_input: the input.
        autocast: dtype that the client's forward is cast to.

    Raises:
        NotAdditive: positions are no summand, or more than one norm follows the sum.
    """
    every = torch.arange(linear_maps.vocabulary_size(anatomy), device=anatomy.device)[:, None]
    rows = linear_maps.input_rows(anatomy, known_input, every, autocast=autocast)[:, 0]
    if not known_input.positional:
        return Dictionary(rows, rows.new_zeros(0, known_input.width, dtype=torch.float64), None)
    positions, constants, mean = _positions(anatomy, known_input)
    return Dictionary(rows, constants, positions, mean)


def factor_rows(anatomy: Anatomy, maps: Sequence[linear_maps.LinearMap]) -> dict[str, Tensor]:
    """Return the rows of AdaLoRA's factors A among maps, by name, each (r, d) float64.

    The loss term of its orthogonality adds combinations of these rows to the gradient of A.
    Projecting these rows off removes the term whatever its weight is.
    """
    weights = {m.name: anatomy.parameter(m.name) for m in maps if m.regularised}
    return {n: whole_tensor(w).double().clone() for n, w in weights.items() if w is not None}


def _positions(
    anatomy: Anatomy, known_input: linear_maps.KnownInput, mean: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return directions (P, d) of positions, constants (k, d), and the mean word in each direction.

    Any word serves as the mean, and so one of other weights does.
    """
    rows = linear_maps.vocabulary_size(anatomy)
    length = context_length(anatomy) or 512
    device = anatomy.device
    words = torch.arange(4, device=device) * max(1, rows // 7) + min(5, rows - 1)
    probe = torch.stack([words % rows, words.flip(0) % rows])
    norm = norm_before(anatomy, known_input, probe)

    def states(ids: Tensor) -> Tensor:
        if norm is None:
            return linear_maps.input_rows(anatomy, known_input, ids).double()
        return _states(anatomy, Place("", norm, "input"), ids)

    sums, position_inputs = states(probe), states(words[:1].expand(1, length))
    if mean is None:
        every = torch.arange(rows, device=device)[:, None]
        parts = (every[start : start + TOKENS_AT_ONCE] for start in range(0, rows, TOKENS_AT_ONCE))
        mean = torch.stack([states(ids).sum((0, 1)) for ids in parts]).sum(0) / rows
    linear, bias, tolerance = _Linear(), None, _ADDITIVE
    if norm is not None:
        outputs = linear_maps.input_rows(anatomy, known_input, probe)
        tolerance = max(_ADDITIVE, 4 * torch.finfo(outputs.dtype).eps)
        linear = _Linear.fit(norm, sums, outputs.double(), tolerance)
        bias = getattr(norm, "bias", None)
    more = mean.new_zeros(0, known_input.width) if bias is None else bias.detach().double()[None]
    other = (sums[0] - sums[1]).flip(0)
    if float((sums[0] - sums[1] + other).abs().max()) > tolerance * float(sums.abs().max()):
        raise NotAdditive("the input is no sum of a part of the word and a part of the position")
    types = [
        m.weight.detach().double()
        for n, m in walk(anatomy.model)
        if isinstance(m, nn.Embedding)
        and n.endswith("token_type_embeddings")
        and m.embedding_dim == known_input.width
    ]
    positions = linear(mean + position_inputs[0] - position_inputs[0, :1])
    return positions, torch.cat([more, *(linear((t - t[:1])[1:]) for t in types)]), mean


@dataclass(frozen=True)
class _Linear:
    """The linear part of a norm without its scale and bias: centring and gain."""

    gain: Tensor | None = None
    centred: bool = False

    def __call__(self, x: Tensor) -> Tensor:
        if self.centred:
            x = x - x.mean(-1, keepdim=True)
        return x if self.gain is None else x * self.gain

    @classmethod
    def fit(cls, norm: nn.Module, inputs: Tensor, outputs: Tensor, tolerance: float) -> _Linear:
        """Return the linear part that explains a norm's outputs."""
        weight, bias = getattr(norm, "weight", None), getattr(norm, "bias", None)
        gain = None if weight is None else weight.detach().double()
        shift = 0.0 if bias is None else bias.detach().double()
        errors = []
        for centred in (True, False):
            x, y = cls(gain, centred)(inputs), outputs - shift
            scale = (x * y).sum(-1, keepdim=True) / x.square().sum(-1, keepdim=True)
            errors.append(float((x * scale - y).abs().max() / y.abs().max()))
        if min(errors) <= tolerance:
            return cls(gain, errors[0] <= errors[1])
        raise NotAdditive(f"the norm before the input ({type(norm).__name__}) is of no known kind")


def _states(anatomy: Anatomy, place: Place, ids: Tensor) -> Tensor:
    """Return the states at a place for short texts, (B, L, d) float64."""
    run = stop_at(anatomy.model, place)
    with undisturbed(anatomy), torch.no_grad(), only_needed_hooks(anatomy.root):
        x: Tensor = run(**linear_maps.text_for(anatomy, ids))
    return x.reshape(*ids.shape, -1).double()


def norm_before(
    anatomy: Anatomy, known_input: linear_maps.SharedInput, ids: Tensor
) -> nn.Module | None:
    """Return the norm whose output an input is for (B, L) texts; None if it has none."""
    x = linear_maps.input_rows(anatomy, known_input, ids)
    outputs: dict[nn.Module, list[Tensor]] = {}
    handles = [
        m.register_forward_hook(lambda m, _, output: outputs.setdefault(m, []).append(output))
        for _, m in walk(anatomy.model)
        if "norm" in type(m).__name__.lower()
    ]
    try:
        with undisturbed(anatomy) as model, torch.no_grad():
            reader = Place("", known_input.reader, "input")
            stop_at(model, reader)(**linear_maps.text_for(anatomy, ids))
    finally:
        for handle in handles:
            handle.remove()
    for norm, calls in outputs.items():
        if [y.numel() for y in calls] == [x.numel()] and torch.equal(calls[0].view_as(x), x):
            return norm
    return None
