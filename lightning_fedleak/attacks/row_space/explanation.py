"""Word types from the gradients of the maps that read one known input.

:class:`ReadableInput` holds the atom of every token, which is the token's vector at this input, and
finds the atoms whose combinations are the rows of the gradients. It chooses the method for the
error of the entries: none but rounding, noise, dropout, top-k compression, or an uneven one.

A gradient that is computed from a step of Adam has an uneven error
(:meth:`~lightning_fedleak.attacks.local_steps.LocalSteps.invert`): its small entries are exact, its
largest are uncertain. :func:`explain_uneven` alternates two steps, as in EM, until the atoms stay
the same. The atoms that explain the accurate entries predict the uncertain ones, and the completed
rows give better atoms.

The capacity is the number of word types that the rows can distinguish. :func:`predict_capacity`
computes it by a formula. :func:`measure_capacity` measures it on planted sets: gradients that are
simulated from random sets of types.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from lightning_fedleak.attacks.row_space import linear_maps, pursuit
from lightning_fedleak.attacks.row_space.atoms import Atoms, explain_kept, most_kept
from lightning_fedleak.attacks.row_space.dictionary import Dictionary, factor_rows
from lightning_fedleak.attacks.row_space.pursuit import PursuitResult, explain
from lightning_fedleak.attacks.row_space.shared_rows import SharedRows
from lightning_fedleak.model.anatomy import Anatomy
from lightning_fedleak.model.snapshots import (
    Inapplicable,
    NotYet,
    Observation,
    UnusableObservation,
    products_in_tf32,
)
from lightning_fedleak.progress import operations_per_second

_NOISE_SHARE = 0.7
"""Share of dropout's noise that the pursuit assumes if there are many types.

F1 under dropout .05 at 4 x 32 of stories15M and 4 x 64 of SmolLM2: .71 and .54 with 1, .77 and .72
with .7, .70 and .65 with .5 (November 2026).
"""
_MAX_FULL_NOISE = 1.5
"""Ratio of types to shared rows up to which the pursuit assumes all of dropout's noise.

At 1 x 16 of the embedded model a share of .7 took F1 from .99 to .75 (November 2026).
"""
_MIN_SIZE = 1e-3  # smallest size of a coordinate over the largest one, for its weight; not tuned
_RECOVERED = 0.99  # F1 from which a planted set counts as recovered: one in a hundred may be missed
_DIRECTIONS = 8  # random directions in which atoms are compared; not tuned
_GRID = 200.0  # cells per unit length; atoms in one cell in all directions are equal; not tuned
EFFICIENCY = 0.25
"""Rate of a pursuit over that of a large matrix product, in :func:`pursuit_seconds`.

With the two numbers below it was fitted to runs with 74 to 512 types, r 8 and 64 and a whole model,
vocabularies of 1,000 to 50,000, widths of 256 to 1,024, on one core of x86-64: .18 to .4 (November
2026).
"""
_FREE_ROWS, _COLUMNS_PER_ROW = 60, 0.33  # a product with few columns is bound by memory


def predict_capacity(width: int, tokens: int, rank: int) -> float:
    """Return how many types ``rank`` rows distinguish: ``width / (1 + ln(tokens) / (2.5 rank))``.

    The formula was fitted to planted sets of equally likely types. It is not a theorem, and more
    types than that are not guaranteed to be safe.

    Args:
        width: dimensions of the input, without those that belong to no word.
        tokens: size of the vocabulary.
        rank: number of shared rows, at most ``width``.
    """
    return width / (1 + math.log(max(2, tokens)) / (2.5 * max(1, rank)))


def pursuit_seconds(
    device: torch.device, width: int, tokens: int, rows: int, types: float
) -> float:
    """Return an estimate of the seconds of a pursuit that chooses ``types`` types.

    It counts the operations of the scorings of the vocabulary, of the choices between scorings, and
    of the exact products in float64, and divides by :data:`EFFICIENCY` times the device's rate.

    Args:
        device: the device of the arithmetic.
        width: dimensions of the input.
        tokens: size of the vocabulary.
        rows: number of shared rows.
        types: number of types in the batch; counted up to the share
            :data:`~lightning_fedleak.attacks.row_space.pursuit.GIVE_UP` of the width.
    """
    if rows >= width:  # every token is compared with the span of the rows, once
        operations = 2.0 * tokens * width**2
    else:
        types = min(types, pursuit.GIVE_UP * width)
        columns = (min(rows, types) + _FREE_ROWS) * _COLUMNS_PER_ROW
        pool, scorings = min(tokens, pursuit.POOL), pursuit.POOL_SCORINGS
        whole = tokens + (scorings - 1) * pool
        compared = whole / scorings / pursuit.CHOSEN_AT_ONCE + min(tokens, pursuit.SCREENED)
        operations = 2 * types * width * columns * compared
        operations += 4 * types * pursuit.RESCORED * width * (width + types)
        operations += 40 * width * types**2
    return operations / (EFFICIENCY * operations_per_second(device))


def measure_capacity(
    atoms: Atoms, rank: int, *, seconds: float, seed: int = 0
) -> tuple[int, int | None, float]:
    """Measure the number of types that rows distinguish, by bisection over planted sets.

    A planted set is a random set of types whose simulated gradient is explained. Tokens with
    (nearly) equal atoms, such as those that were never trained, are not planted, because no update
    distinguishes them.

    Args:
        atoms: The atoms of all tokens.
        rank: The number of shared rows.
        seconds: The time after which no further set is planted; the first one always is.
        seed: The seed of the planted sets.

    Returns:
        The largest number of types of a planted set that was recovered up to one type in a hundred
        (0 if no set was), the smallest number of a set that was not (None if no set failed), and
        the number by :func:`predict_capacity`.
    """
    generator = torch.Generator().manual_seed(seed)
    usable = _unlike_tokens(atoms, generator)
    dims = atoms.width - len(atoms.nuisance)
    predicted = predict_capacity(dims, len(usable), rank)
    low, high = 0, min(dims, len(usable))
    types = max(1, min(int(predicted), high - 1))
    deadline = time.monotonic() + seconds
    failed = None
    while low < types < high:
        if _recovers_planted(atoms, rank, usable, types, generator):
            low = types
        else:
            high = failed = types
        if time.monotonic() > deadline or high - low <= max(1, dims // 16):
            break
        wider = min(types + max(1, dims // 8), high - 1) if failed is None else (low + high) // 2
        narrower = max(1, types - max(1, dims // 8)) if low == 0 else (low + high) // 2
        types = wider if low == types else narrower
    return low, failed, predicted


def _unlike_tokens(atoms: Atoms, generator: torch.Generator) -> torch.Tensor:
    """Return the (n,) tokens whose atom differs from all others in some random direction."""
    directions = torch.randn(atoms.width, _DIRECTIONS, generator=generator)
    cells = (atoms.products(directions.T.to(atoms.device)) * _GRID).round()
    _, group, size = torch.unique(cells, dim=0, return_inverse=True, return_counts=True)
    tokens: torch.Tensor = ((size[group] == 1) & atoms.usable).nonzero()[:, 0].cpu()
    return tokens


def _recovers_planted(
    atoms: Atoms, rank: int, usable: torch.Tensor, types: int, generator: torch.Generator
) -> bool:
    """Return whether a random set of types is recovered from its simulated float32 gradient."""
    truth = usable[torch.randperm(len(usable), generator=generator)[:types]]
    rows = min(rank, 2 * atoms.width)
    weights = torch.randn(rows, types, generator=generator, dtype=torch.float64)
    weights *= torch.randn(types, generator=generator, dtype=torch.float64).exp()
    gradient = (weights.to(atoms.device) @ atoms.rows(truth.to(atoms.device))).float()
    single = torch.finfo(torch.float32).eps
    shared = SharedRows.stack([gradient], atoms.nuisance, rounding=single, noise=[0.0])
    if len(shared.principal) >= atoms.width - len(atoms.nuisance) - 1:
        return False
    odds = torch.full((len(atoms),), math.log(types / len(usable)), device=atoms.device)
    recovered = set(explain(atoms, shared, odds).types.tolist())
    hits = len(recovered & set(truth.tolist()))
    return 2 * hits / (len(recovered) + types) >= _RECOVERED


_LENGTH = 32  # positions that are projected out when the capacity is measured; not tuned
_ROUNDS = 10  # maximal number of alternations of explain_uneven: a limit of time, not tuned
_MAX_MAP_ROWS = 256  # most accurate rows per map that are explained: a limit of time, not tuned
_RIDGE = 1e-9  # share of a Gram matrix's mean diagonal that makes it invertible; not tuned
_ACCURATE = 0.9  # quantile of errors up to which entries measure the misfit; not tuned

Finder = Callable[[Sequence[Tensor], Sequence[float]], tuple[PursuitResult, Tensor]]
"""Explains rows with noise of these standard deviations: the result, and its atoms (k, d)."""


@dataclass(eq=False)
class ReadableInput:
    """A known input whose maps are trained, with the atom of every token.

    Attributes:
        known_input: the input.
        maps: the maps that read it and are trained, at least one.
        dictionary: the atom of every token at this input.
        log_odds: (V,) prior log odds that each token is in the batch.
    """

    known_input: linear_maps.KnownInput
    maps: tuple[linear_maps.LinearMap, ...]
    dictionary: Dictionary
    log_odds: Tensor
    _factors: dict[str, Tensor] = field(default_factory=dict, init=False)
    _atoms: tuple[tuple[int, frozenset[str]], Atoms] | None = field(default=None, init=False)
    _weighed: tuple[ReadableInput, Tensor] | None = field(default=None, init=False)

    @property
    def decoder(self) -> bool:
        """Return whether the input is of an encoder-decoder's decoder."""
        return linear_maps.in_decoder(self.maps[0].name)

    @property
    def is_factor_b(self) -> bool:
        """Return whether only factors B of low-rank adapters read the input."""
        return all(m.factor == "B" for m in self.maps)

    def follow(
        self,
        anatomy: Anatomy,
        known_input: linear_maps.KnownInput,
        maps: tuple[linear_maps.LinearMap, ...],
        autocast: torch.dtype | None,
    ) -> None:
        """Update the maps, the dictionary and the atoms to the current model.

        Raises:
            NotAdditive: the input depends on positions in an unknown way.
        """
        self.known_input, self.maps = known_input, maps
        self.dictionary, changed = self.dictionary.refresh(anatomy, known_input, autocast=autocast)
        self.store_factors(anatomy)
        if bool(changed.any()):
            self._weighed = None
            if self._atoms is not None and not self._atoms[1].follow(changed):
                self._atoms = None

    def store_factors(self, anatomy: Anatomy) -> None:
        """Store the current factors A whose rows AdaLoRA's loss term adds to their gradients."""
        self._factors = factor_rows(anatomy, self.maps)
        for readable in (self, *([] if self._weighed is None else self._weighed[:1])):
            if readable._atoms is not None and readable._atoms[0][1]:
                readable._atoms = None

    def prepare_atoms(self) -> None:
        """Prepare the atoms, unless the input is positional: they depend on the gradients then."""
        if self.dictionary.positions is None:
            self._atoms_beside(0, self._factors)

    def capacity(self, seconds: float, seed: int) -> float | None:
        """Measure how many types the rows can distinguish; see :func:`measure_capacity`.

        Positions of texts of 32 tokens are projected out. The result is 0 if no planted set was
        recovered in the time, and None if one set would take longer than ``seconds`` on a CPU.
        """
        positions = _LENGTH if self.dictionary.positions is not None else 0
        atoms = self._atoms_beside(positions, self._factors)
        rows = sum(m.rows for m in self.maps if self.is_factor_b or m.factor != "B")
        tokens, width = self.dictionary.rows.shape
        # Roughly the seconds that a planted set of the predicted size takes at 10 GFLOP/s.
        planted_set = predict_capacity(width, tokens, rows) / 8 * (4 * width * tokens / 1e10)
        if atoms.device.type == "cpu" and planted_set > seconds:
            return None
        return float(measure_capacity(atoms, rows, seconds=seconds, seed=seed)[0])

    def read(
        self,
        view: Observation,
        noise: Mapping[str, float],
        autocast: torch.dtype | None,
        errors: Mapping[str, Tensor] | None = None,
    ) -> PursuitResult:
        """Return the types that explain the gradients of these maps.

        Args:
            view: the shared gradients.
            noise: standard deviation of the noise that was added to each entry, by parameter.
            autocast: dtype that the client's forward is cast to.
            errors: standard deviation of each entry's error, by parameter, if entries differ.

        Raises:
            UnusableObservation: the gradients cannot be read, see
                :meth:`~lightning_fedleak.attacks.words.subspace.SubspaceWords.run`.
        """
        by_map = linear_maps.nonzero_gradients(view, self.maps)
        if not by_map:
            linear_maps.refuse_zeros(self.maps, "the first projections")
        gradients = list(by_map.values())
        beside = {m.name: self._factors[m.name] for m in by_map if m.regularised}
        dtypes = [g.dtype for g in (*gradients, self.dictionary.rows)]
        rounding = max(_rounding(dtypes, autocast), view.gradients[-1].rounding)
        positions = self.dictionary.count_positions(gradients, tuple(beside.values()))
        if view.gradients[-1].compression == "topk":
            return self._explain_kept(gradients, self._atoms_beside(positions, beside).nuisance)

        def find(
            rows: Sequence[Tensor], levels: Sequence[float], positions: int = positions
        ) -> tuple[PursuitResult, Tensor]:
            result = self._explain(rows, positions, rounding, levels, beside)
            atoms = self._atoms_beside(positions, beside)
            return result, torch.cat([atoms.rows(result.types), atoms.nuisance])

        if errors is not None:
            if self.is_factor_b:
                raise Inapplicable("in an update of Adam, LoRA's B alone distinguishes no words")
            map_errors = [errors[m.name] if m.axis == 1 else errors[m.name].T for m in by_map]
            result = self._words(explain_uneven(gradients, map_errors, find))
            cause = "what the optimizer's step left of the gradient"
        else:
            result, cause = self._explain_even(by_map, noise, rounding, beside, find)
            every_token = any(m.name in self.known_input.lone_token_maps for m in by_map)
            result = self._words(result)
            if not every_token:
                result = replace(result, certified=False, silent=None)
        # With declared noise an empty result is valid. Rounding of stored weights is not declared.
        if not len(result.types) and (errors is not None or not view.gradients[-1].noise_std):
            raise UnusableObservation(f"no token stands out of {cause}")
        return result

    def _explain_kept(self, gradients: Sequence[Tensor], beside: Tensor) -> PursuitResult:
        """Return the types that explain gradients of which only the largest entries were sent."""
        rows, atoms = most_kept(torch.cat([*gradients])), self.dictionary.rows
        types = None if self.is_factor_b else explain_kept(rows, atoms, beside, self.log_odds)
        if types is None:
            raise Inapplicable(
                "no words explain the entries that top-k compression kept: there are more words "
                "than a row keeps entries, or noise on them"
            )
        scores = self.log_odds.double().clone()
        scores[types] = 1e6 + torch.arange(len(types), 0, -1, device=scores.device).double()
        return PursuitResult(types, scores, float(len(types)), 0.0, False)

    def _explain_even(
        self,
        by_map: Mapping[linear_maps.LinearMap, Tensor],
        noise: Mapping[str, float],
        rounding: float,
        beside: Mapping[str, Tensor],
        find: Callable[..., tuple[PursuitResult, Tensor]],
    ) -> tuple[PursuitResult, str]:
        """Return the types that explain evenly accurate gradients, and what may hide others."""
        gradients = list(by_map.values())
        dropouts = [(*self.known_input.dropouts, *m.dropouts) for m in by_map]
        variances = [linear_maps.dropout_variance(modules) for modules in dropouts]
        declared = [noise.get(m.name, 0.0) for m in by_map]
        if any(variances) and not any(declared):
            result = self._explain_weighed(gradients, variances, rounding, beside)
            if len(result.types):
                return result, "what dropout adds"
        levels = [
            math.hypot(d, math.sqrt(v * float(g.double().square().mean())))
            for d, v, g in zip(declared, variances, gradients, strict=True)
        ]
        result, _ = find(gradients, levels)
        positions = self.dictionary.count_positions(gradients, tuple(beside.values()))
        if positions and result.silent is None and not any(levels):
            second, _ = find(gradients, levels, positions * 8 // 5 + 8)
            result = result if second.silent is None else second
        cause = "what dropout adds" if any(variances) else "the rounding of what was shared"
        return result, cause

    def _explain_weighed(
        self,
        gradients: Sequence[Tensor],
        variances: Sequence[float],
        rounding: float,
        beside: Mapping[str, Tensor],
    ) -> PursuitResult:
        """Return the types that explain gradients whose inputs dropout has changed.

        A dropout of probability p adds noise of variance ``p / (1 - p)`` times the sum of
        ``(s_t x_ti)^2`` over tokens t to entry i of a row, with the token's factor s_t in that row.
        Coordinates are therefore weighted to equal size, and each map's rows are replaced by their
        right singular vectors: then the noise is about the same share of every entry.
        """
        if self._weighed is None:
            sizes = torch.linalg.vector_norm(self.dictionary.rows, dim=0, dtype=torch.float32)
            weights = (sizes / sizes.amax()).clamp_min(_MIN_SIZE).reciprocal()
            twin = replace(self, dictionary=self.dictionary.scale_columns(weights))
            self._weighed = twin, weights.double()
        twin, weights = self._weighed
        rows, levels, shares = [], [], []
        for gradient, variance in zip(gradients, variances, strict=True):
            _, sizes, basis = torch.linalg.svd(gradient.double() * weights, full_matrices=False)
            rounded = rounding * sizes.norm() / len(gradient) ** 0.5 / sizes.clamp_min(1e-300)
            clear = rounded < 1  # the remaining singular vectors are rounding errors
            rows += list(basis[clear, None] * basis.shape[1] ** 0.5)
            levels += rounded[clear].tolist()
            shares += [math.sqrt(variance)] * int(clear.sum())
        beside = {name: row * weights for name, row in beside.items()}
        positions = twin.dictionary.count_positions(rows, tuple(beside.values()))
        for share in (1.0, _NOISE_SHARE):
            noise = [x + share * y for x, y in zip(levels, shares, strict=True)]
            result = twin._explain(rows, positions, 0.0, noise, beside)
            if len(result.types) <= _MAX_FULL_NOISE * len(rows):
                break
        return result

    def _words(self, result: PursuitResult) -> PursuitResult:
        """Return a result without the atoms that are positions instead of tokens."""
        tokens = len(self.dictionary.rows)
        words = result.types < tokens
        return replace(
            result,
            types=result.types[words],
            scores=result.scores[:tokens],
            expected=max(result.expected - int((~words).sum()), 0.0),  # in this order NaN stays
        )

    def _atoms_beside(self, positions: int, beside: Mapping[str, Tensor]) -> Atoms:
        """Return the atoms with the first positions and the rows ``beside`` projected out.

        The latest atoms are cached.
        """
        key = (positions, frozenset(beside))
        if self._atoms is None or self._atoms[0] != key:
            self._atoms = (key, Atoms(*self.dictionary.atoms(positions, tuple(beside.values()))))
        return self._atoms[1]

    def _explain(
        self,
        gradients: Sequence[Tensor],
        positions: int,
        rounding: float,
        noise: Sequence[float],
        beside: Mapping[str, Tensor],
    ) -> PursuitResult:
        """Run the pursuit on gradients with a relative rounding error and noise per gradient."""
        atoms = self._atoms_beside(positions, beside)
        shared = SharedRows.stack(gradients, atoms.nuisance, rounding=rounding, noise=noise)
        if beside and not any(noise) and shared.is_noise:
            raise NotYet(linear_maps.NO_GRADIENT_YET)
        dims = atoms.width - len(atoms.nuisance)
        extra = len(atoms) - len(self.log_odds)
        odds = torch.cat([self.log_odds, self.log_odds.new_zeros(extra)])
        if dims > 1 and not len(shared.principal):
            none = torch.empty(0, dtype=torch.long, device=odds.device)
            return PursuitResult(none, odds, 0.0, 1.0, False)
        result = explain(atoms, shared, odds) if len(shared.principal) < dims - 1 else None
        if result is None or (math.isnan(result.expected) and not len(result.types)):
            raise Inapplicable(
                f"what was shared fills {len(shared.principal)} of the {dims} directions of the "
                "input, and no type stands out: too many types (and positions)"
            )
        return result


def _rounding(dtypes: Sequence[torch.dtype], autocast: torch.dtype | None) -> float:
    """Return the relative error of an entry of a gradient.

    In half precision the entry was rounded once: the error is uniform up to half an epsilon, with a
    standard deviation of ``eps / sqrt(12)``. In single precision it is a whole epsilon, because
    sums accumulate errors; with TF32 products it is 2**-11.
    """
    largest = max(torch.finfo(d).eps for d in (*dtypes, autocast) if d is not None)
    single = torch.finfo(torch.float32).eps
    if largest <= single:
        return 2.0**-11 if torch.cuda.is_available() and products_in_tf32() else single
    return largest / math.sqrt(12)


def explain_uneven(rows: Sequence[Tensor], errors: Sequence[Tensor], find: Finder) -> PursuitResult:
    """Return the types that explain rows (n_i, d) with entries of uneven accuracy.

    ``errors`` are the entries' standard deviations; an error is infinite if only the entry's sign
    and a lower bound of its size are known. ``find`` explains rows that are evenly accurate.
    """
    measured = [_most_accurate(y.double(), e.double()) for y, e in zip(rows, errors, strict=True)]
    current = [
        y * (y.square() / (y.square() + e.square())).where(e.isfinite(), 0.5) for y, e in measured
    ]
    row_errors = [torch.minimum(e, y.abs()) for y, (_, e) in zip(current, measured, strict=True)]
    history: list[set[int]] = []
    result: PursuitResult | None = None
    for _ in range(_ROUNDS):
        latest, atoms = find(current, [float(x.square().mean().sqrt()) for x in row_errors])
        types = set(latest.types.tolist())
        result = latest if types or result is None else result
        if not types or types in history or len(atoms) >= atoms.shape[1]:
            break
        history.append(types)
        completed = [_complete(y, e, atoms) for y, e in measured]
        current, row_errors = [y for y, _ in completed], [e for _, e in completed]
    assert result is not None  # there is at least one round
    return result


def _most_accurate(rows: Tensor, errors: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows with the smallest relative errors, and their errors, at least the median."""
    if len(rows) > _MAX_MAP_ROWS:
        relative = (errors / rows.abs().clamp_min(1e-300)).clamp(max=1.0).mean(1)
        best = relative.argsort()[:_MAX_MAP_ROWS]
        rows, errors = rows[best], errors[best]
    finite = errors[errors.isfinite()]
    return rows, errors.clamp_min(float(finite.median()) if len(finite) else 0.0)


def _complete(rows: Tensor, errors: Tensor, atoms: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean of measured and fitted rows, weighted by accuracy, and its errors.

    Rows are fitted by combinations of ``atoms``, with entries weighted by ``1 / errors**2``.
    """
    weights = errors.square().reciprocal()
    k = len(atoms)
    means, row_errors = torch.empty_like(rows), torch.empty_like(rows)
    for i, (row, error, weight) in enumerate(zip(rows, errors, weights, strict=True)):
        if int((weight > 0).sum()) <= k:  # as many atoms as known entries fit any row exactly
            means[i], row_errors[i] = row, row.abs()
            continue
        weighed = atoms * weight
        gram = weighed @ atoms.T
        gram.diagonal().add_(_RIDGE * gram.diagonal().mean())
        fit = torch.linalg.solve(gram, weighed @ row) @ atoms
        finite = error.isfinite()
        accurate = error <= error[finite].quantile(_ACCURATE)
        spare = max(0.1, 1 - k / int(finite.sum()))
        variance = (row - fit)[accurate].square().mean() / spare
        trust = variance / (variance + error.square())
        means[i] = torch.where(finite, trust * row + (1 - trust) * fit, fit)
        row_errors[i] = torch.where(finite, trust.sqrt() * error, variance.sqrt())
    return means, row_errors
