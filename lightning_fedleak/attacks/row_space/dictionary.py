"""The dictionary of a known input: the input vector (atom) of every token of the vocabulary.

An input of a weight matrix is known if the adversary can compute it from the token alone, or from
the token and its position, as before the first attention. If it does not depend on the position, an
atom is the input vector itself. With absolute position embeddings and a layer norm of the sum, an
input is ``gain * centred(word + position) + bias`` up to a scalar factor. After the span of the
positions and of the bias is projected out of it, only the word remains. So V atoms suffice for a
vocabulary of V tokens and P positions, instead of V x P.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_fedleak.attacks.row_space import linear_maps
from lightning_fedleak.model.anatomy import Anatomy, Place, walk
from lightning_fedleak.model.model_runs import TOKENS_AT_ONCE, context_length, stop_at
from lightning_fedleak.model.snapshots import whole_tensor

_ADDITIVE = 1e-4  # relative error up to which an input is a sum of word and position; not tuned


class NotAdditive(ValueError):
    """The input depends on positions, but is not a scaled sum of a word and a position vector."""


@dataclass(frozen=True, eq=False)
class Dictionary:
    """The atoms of a known input, and the directions that do not depend on the word.

    Attributes:
        rows: (V, d), the input vector of each token at the first position.
        constants: (k, d) float64, the directions that any input may contain besides its word: the
            norm's bias and the embeddings of token types (BERT's segments).
        positions: (P, d) float64, the directions of the first P positions: the mean word plus the
            position's difference to the first one, after the norm's centring and gain. None if the
            input does not depend on positions.
        mean: (e,) float64, the mean word vector in each of ``positions``, before the norm; e is the
            width there.
    """

    rows: Tensor
    constants: Tensor
    positions: Tensor | None
    mean: Tensor | None = None

    def scale_columns(self, weights: Tensor) -> Dictionary:
        """Return a dictionary, without ``mean``, whose columns are multiplied by (d,) weights."""
        positions = None if self.positions is None else self.positions * weights.double()
        rows = self.rows * weights.to(self.rows.dtype)
        return Dictionary(rows, self.constants * weights.double(), positions)

    def through(self, factor: Tensor) -> Dictionary:
        """Return the dictionary of the output of a LoRA's factor A (r, d) that reads this input."""
        positions = None if self.positions is None else self.positions @ factor.double().T
        rows = self.rows @ factor.to(self.rows.dtype).T
        return Dictionary(rows, self.constants @ factor.double().T, positions)

    def refresh(
        self,
        anatomy: Anatomy,
        known_input: linear_maps.KnownInput,
        *,
        autocast: torch.dtype | None = None,
    ) -> tuple[Dictionary, Tensor]:
        """Return the dictionary of the current model, and a (V,) mask of the rows that changed.

        Every input is computed again and compared, and those that changed are replaced in place,
        so that no change of any module before the input is missed. All rows count as changed if
        positions, constants, or the shape, dtype or device of the inputs have changed.

        Raises:
            NotAdditive: See :func:`build_dictionary`.
        """
        all_ids = torch.arange(linear_maps.vocabulary_size(anatomy), device=anatomy.device)[:, None]
        changed = torch.zeros(len(all_ids), dtype=torch.bool, device=anatomy.device)
        blocks = linear_maps.input_blocks(anatomy, known_input, all_ids, autocast=autocast)
        with closing(blocks):
            for part, x in blocks:
                form = (x.dtype, x.device, len(all_ids), x.shape[-1])
                if form != (self.rows.dtype, self.rows.device, *self.rows.shape):
                    rebuilt = build_dictionary(anatomy, known_input, autocast=autocast)
                    return rebuilt, torch.ones_like(changed)
                changed[part] = (x[:, 0] != self.rows[part]).any(1)
                self.rows[part] = x[:, 0]
        if not known_input.positional:
            constants = self.constants[:0]
            return Dictionary(self.rows, constants, None), changed | (self.positions is not None)
        mean = None if bool(changed.any()) else self.mean
        positions, constants, mean = _position_directions(anatomy, known_input, mean)
        same = self.positions is not None and torch.equal(positions, self.positions)
        if same and torch.equal(constants, self.constants) and not bool(changed.any()):
            return self, changed
        return Dictionary(self.rows, constants, positions, mean), torch.ones_like(changed)

    def count_positions(self, gradients: Sequence[Tensor], others: Sequence[Tensor] = ()) -> int:
        """Return how many leading positions occur in the texts, estimated from gradients.

        A position that occurs explains more of the gradients' energy than a random direction would.
        The count maximizes the cumulative sum of ``log(ratio / 2)``, where ``ratio`` is the energy
        that a position explains over that of a random direction.

        Args:
            gradients: Gradients (n_i, d) of the maps that read this input; none may be all zero.
            others: Further directions (k_i, d) float64 that the gradients may contain.

        Returns:
            At least 1; 0 if the input does not depend on positions.
        """
        if self.positions is None:
            return 0
        basis = orthonormal(torch.cat([self.constants, *others]))
        g = torch.cat([x.double() / x.double().norm() for x in gradients])
        g = g - (g @ basis.T) @ basis
        max_count = min(len(self.positions), (self.rows.shape[1] - len(basis)) // 2)
        positions = self.positions[:max_count]
        positions = positions - (positions @ basis.T) @ basis
        # The energy that each position explains beyond the positions before it, and the energy
        # outside of those positions, of which a random direction would explain remaining / dims.
        explained = (g @ torch.linalg.qr(positions.T).Q).square().sum(0)
        remaining = g.square().sum() - explained.cumsum(0) + explained
        dims = g.shape[1] - len(basis) - torch.arange(max_count, device=g.device)
        ratio = (explained * dims / remaining.clamp_min(1e-300)).clamp_min(1e-12)
        return int((ratio / 2).log().cumsum(0).argmax()) + 1

    def atoms(
        self, positions: int, others: Sequence[Tensor] = ()
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the arguments of ``Atoms``: rows, a basis (k, d) to project out, further atoms.

        Args:
            positions: The number of positions that occur in the texts; they are projected out.
                Since this is an estimate that may be too low, the next ``positions + 16`` positions
                are the further atoms. (16 is not tuned.)
            others: Further directions (k_i, d) float64 that the gradients may contain. They are
                projected out too.
        """
        directions = [self.constants, *others]
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
    """Compute the dictionary of an input by running the model on every token.

    Args:
        anatomy: The model.
        known_input: The input.
        autocast: The autocast dtype of the client's forward; None without autocast.

    Raises:
        NotAdditive: The position is not an additive term, or more than one norm follows the sum.
    """
    all_ids = torch.arange(linear_maps.vocabulary_size(anatomy), device=anatomy.device)[:, None]
    rows = linear_maps.input_rows(anatomy, known_input, all_ids, autocast=autocast)[:, 0]
    if not known_input.positional:
        return Dictionary(rows, rows.new_zeros(0, known_input.width, dtype=torch.float64), None)
    positions, constants, mean = _position_directions(anatomy, known_input)
    return Dictionary(rows, constants, positions, mean)


def factor_rows(anatomy: Anatomy, maps: Sequence[linear_maps.LinearMap]) -> dict[str, Tensor]:
    """Return the rows of AdaLoRA's factors A among maps, by name, each (r, d) float64.

    The loss term of its orthogonality adds combinations of these rows to the gradient of A.
    Projecting onto their complement removes the term, whatever its weight is.
    """
    weights = {m.name: anatomy.parameter(m.name) for m in maps if m.regularised}
    return {n: whole_tensor(w).double().clone() for n, w in weights.items() if w is not None}


def _position_directions(
    anatomy: Anatomy, known_input: linear_maps.KnownInput, mean: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the fields ``positions``, ``constants`` and ``mean`` of a :class:`Dictionary`.

    Any word could replace the mean word, so a ``mean`` from before a weight update can be reused.
    """
    size = linear_maps.vocabulary_size(anatomy)
    length = context_length(anatomy) or 512  # positions of a model without a limit
    device = anatomy.device
    # Four tokens spread over the vocabulary, without its first ids, which are often special. The
    # second text has the same tokens in reverse order.
    words = torch.arange(4, device=device) * max(1, size // 7) + min(5, size - 1)
    probe = torch.stack([words % size, words.flip(0) % size])
    norm = norm_before(anatomy, known_input, probe)

    def states(ids: Tensor) -> Tensor:
        if norm is None:
            return linear_maps.input_rows(anatomy, known_input, ids).double()
        run = stop_at(anatomy.model, Place("", norm, "input"))
        with linear_maps.untraced(anatomy):
            x: Tensor = run(**linear_maps.text_for(anatomy, ids))
        return x.reshape(*ids.shape, -1).double()

    sums, position_inputs = states(probe), states(words[:1].expand(1, length))
    if mean is None:
        all_ids = torch.arange(size, device=device)[:, None]
        parts = torch.split(all_ids, TOKENS_AT_ONCE)
        mean = torch.stack([states(ids).sum((0, 1)) for ids in parts]).sum(0) / size
    linear, bias, tolerance = _Linear(), None, _ADDITIVE
    if norm is not None:
        outputs = linear_maps.input_rows(anatomy, known_input, probe)
        tolerance = max(_ADDITIVE, 4 * torch.finfo(outputs.dtype).eps)
        linear = _Linear.fit(norm, sums, outputs.double(), tolerance)
        bias = getattr(norm, "bias", None)
    offset = mean.new_zeros(0, known_input.width) if bias is None else bias.detach().double()[None]
    # If an input is a sum of word and position, the positions cancel in the difference of the two
    # texts, and the words cancel if the reversed difference is added.
    difference = sums[0] - sums[1]
    if float((difference + difference.flip(0)).abs().max()) > tolerance * float(sums.abs().max()):
        raise NotAdditive("the input is no sum of a part of the word and a part of the position")
    token_types = [
        m.weight.detach().double()
        for n, m in walk(anatomy.model)
        if isinstance(m, nn.Embedding)
        and n.endswith("token_type_embeddings")
        and m.embedding_dim == known_input.width
    ]
    # One word at every position: the differences to the first position depend on no word.
    positions = linear(mean + position_inputs[0] - position_inputs[0, :1])
    return positions, torch.cat([offset, *(linear((t - t[:1])[1:]) for t in token_types)]), mean


@dataclass(frozen=True)
class _Linear:
    """The linear part of a norm: centring (LayerNorm only) and gain, without division and bias."""

    gain: Tensor | None = None
    centred: bool = False

    def __call__(self, x: Tensor) -> Tensor:
        if self.centred:
            x = x - x.mean(-1, keepdim=True)
        return x if self.gain is None else x * self.gain

    @classmethod
    def fit(cls, norm: nn.Module, inputs: Tensor, outputs: Tensor, tolerance: float) -> _Linear:
        """Return the linear part of a norm, centred (LayerNorm) or not (RMSNorm)."""
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
        raise NotAdditive(f"the input's norm ({type(norm).__name__}) is no LayerNorm or RMSNorm")


def norm_before(
    anatomy: Anatomy, known_input: linear_maps.SharedInput, ids: Tensor
) -> nn.Module | None:
    """Return the norm whose output equals the input on (B, L) ids; None if there is none."""
    x = linear_maps.input_rows(anatomy, known_input, ids)
    outputs: dict[nn.Module, list[Tensor]] = {}

    def keep(norm: nn.Module, _: object, output: Tensor) -> None:
        outputs.setdefault(norm, []).append(output)

    with linear_maps.untraced(anatomy) as model, ExitStack() as stack:
        for _, module in walk(model):
            if "norm" in type(module).__name__.lower():
                stack.enter_context(module.register_forward_hook(keep))
        reader = Place("", known_input.reader, "input")
        stop_at(model, reader)(**linear_maps.text_for(anatomy, ids))
    for norm, calls in outputs.items():
        if [y.numel() for y in calls] == [x.numel()] and torch.equal(calls[0].view_as(x), x):
            return norm
    return None
