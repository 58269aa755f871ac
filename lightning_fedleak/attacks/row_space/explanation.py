"""Recover the word types of a batch from the gradients of weight matrices that read one input.

A linear map is a weight matrix W (or a LoRA's factor) that multiplies an input X. The rows of its
gradient are combinations of the batch's input vectors. An input is known if it depends only on the
token, or on the token and its position, as before the first attention. The adversary can then
compute the input vector of each token of the vocabulary, its atom, from the model.

:class:`ReadableInput` holds these atoms for one known input, and finds the types (distinct tokens)
whose atoms span the shared rows. This search is the pursuit of
:mod:`~lightning_fedleak.attacks.row_space.pursuit`. The shared gradients are seldom exact, and the
method depends on their errors: rounding, a declared noise, the client's dropout, top-k compression
(small entries are zero), or errors that differ between entries.

The last kind arises if the gradient is computed from a step of Adam
(:meth:`~lightning_fedleak.attacks.local_steps.LocalSteps.invert`): its small entries are exact, its
largest entries are uncertain. :func:`explain_uneven` alternates two steps, as in EM, until the
atoms stay the same. The atoms that explain the accurate entries predict the uncertain ones, and
with the predictions filled in, the next pursuit finds better atoms.

The rows are fully explained if only rounding remains of them. Then the *silent* tokens are known:
those which would have left no more than rounding, so that they may be in the batch unseen. A result
without silent tokens is *certified*: no type is missing.

The capacity is the number of types that the rows can distinguish. :func:`predict_capacity` computes
it by a formula. :func:`measure_capacity` measures it on planted sets: random sets of types, whose
gradients are simulated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from lightning_fedleak.attacks.row_space import linear_maps
from lightning_fedleak.attacks.row_space.atoms import Atoms, explain_sparse, select_densest
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

# Factor of dropout's standard deviation that the pursuit assumes if there are many types.
# F1 of the types under dropout .05, for batches of 4 texts x 32 tokens of stories15M and 4 x 64 of
# SmolLM2: .71 and .54 with a factor of 1, .77 and .72 with .7, .70 and .65 with .5 (November 2026).
_NOISE_SHARE = 0.7
# Ratio of types to shared rows up to which the pursuit assumes all of dropout's noise.
# With fewer types the smaller noise adds false types: for 1 text of 16 tokens of the package's
# embedded model, the factor .7 reduced F1 from .99 to .75 (November 2026).
_MAX_FULL_NOISE = 1.5
_MIN_SIZE = 1e-3  # smallest norm of a coordinate over the largest; bounds its weight; not tuned
_RECOVERED = 0.99  # F1 at which a planted set counts as recovered: 1 type in 100 may be missing
_DIRECTIONS = 8  # random directions in which planted tokens' atoms must differ; not tuned
_GRID = 200.0  # cells per unit length; atoms in one cell in all directions are equal; not tuned


def predict_capacity(width: int, tokens: int, rank: int) -> float:
    """Return how many types ``rank`` rows distinguish: ``width / (1 + ln(tokens) / (2.5 rank))``.

    The formula was fitted to planted sets of equally likely types. It is no theorem: a batch of
    more types may still be recovered.

    Args:
        width: dimensions of the input, without those that belong to no word.
        tokens: size of the vocabulary.
        rank: number of shared rows.
    """
    return width / (1 + math.log(max(2, tokens)) / (2.5 * max(1, rank)))


def measure_capacity(
    atoms: Atoms, rank: int, *, sets: int, seed: int = 0
) -> tuple[int, int | None, float]:
    """Measure the number of types that rows distinguish, by bisection over planted sets.

    A planted set is a random set of types. Its gradient is simulated, and the pursuit must recover
    the set from it. Tokens with (nearly) equal atoms, such as those that were never trained, are
    not planted, because no update distinguishes them.

    Args:
        atoms: The atoms of all tokens.
        rank: The number of shared rows.
        sets: The largest number of sets that are planted.
        seed: The seed of the planted sets.

    Returns:
        Three numbers of types: of the largest planted set that was recovered with an F1 of .99 (0
        if none was), of the smallest set that was not (None if no set failed), and that of
        :func:`predict_capacity`.
    """
    generator = torch.Generator().manual_seed(seed)
    plantable = _distinct_tokens(atoms, generator)
    dims = atoms.width - len(atoms.nuisance)
    predicted = predict_capacity(dims, len(plantable), rank)
    # Steps of an eighth of the dimensions until one set is recovered and one is lost, then
    # bisection, until the two differ by a sixteenth of the dimensions.
    low, high = 0, min(dims, len(plantable))
    types = max(1, min(int(predicted), high - 1))
    min_lost = None
    for _ in range(sets):
        if not low < types < high:
            break
        if _recovers_planted(atoms, rank, plantable, types, generator):
            low = types
        else:
            high = min_lost = types
        if high - low <= max(1, dims // 16):
            break
        wider = min(types + max(1, dims // 8), high - 1) if min_lost is None else (low + high) // 2
        narrower = max(1, types - max(1, dims // 8)) if low == 0 else (low + high) // 2
        types = wider if low == types else narrower
    return low, min_lost, predicted


def _distinct_tokens(atoms: Atoms, generator: torch.Generator) -> torch.Tensor:
    """Return the (n,) tokens whose atom differs from all other atoms in a random direction."""
    directions = torch.randn(atoms.width, _DIRECTIONS, generator=generator)
    cells = (atoms.products(directions.T.to(atoms.device)) * _GRID).round()
    _, group, size = torch.unique(cells, dim=0, return_inverse=True, return_counts=True)
    tokens: torch.Tensor = ((size[group] == 1) & atoms.usable).nonzero()[:, 0].cpu()
    return tokens


def _recovers_planted(
    atoms: Atoms, rank: int, plantable: torch.Tensor, types: int, generator: torch.Generator
) -> bool:
    """Return whether a random set of types is recovered from its simulated float32 gradient."""
    planted = plantable[torch.randperm(len(plantable), generator=generator)[:types]]
    rows = min(rank, 2 * atoms.width)  # rows beyond the width add no direction
    weights = torch.randn(rows, types, generator=generator, dtype=torch.float64)
    # Types have log-normal strengths, as frequent and rare words do.
    weights *= torch.randn(types, generator=generator, dtype=torch.float64).exp()
    gradient = (weights.to(atoms.device) @ atoms.rows(planted.to(atoms.device))).float()
    eps = torch.finfo(torch.float32).eps
    shared = SharedRows.stack([gradient], atoms.nuisance, rounding=eps, noise=[0.0])
    if len(shared.principal) >= atoms.width - len(atoms.nuisance) - 1:
        return False  # rows that fill all directions contain every atom
    odds = torch.full((len(atoms),), math.log(types / len(plantable)), device=atoms.device)
    recovered = set(explain(atoms, shared, odds).types.tolist())
    hits = len(recovered & set(planted.tolist()))
    return 2 * hits / (len(recovered) + types) >= _RECOVERED


_LENGTH = 32  # tokens of a text, whose positions the measured capacity excludes; not tuned
_ROUNDS = 10  # maximal number of pursuits in explain_uneven: limits its time, not tuned
_MAX_MAP_ROWS = 256  # rows of a map that explain_uneven uses, the most accurate; limits its time
_RIDGE = 1e-9  # share of a Gram matrix's mean diagonal, added to make it invertible; not tuned
_ACCURATE = 0.9  # share of a row's entries, the most accurate, that measure the misfit; not tuned

# A function of gradients and of the standard deviation of each gradient's noise.
#
# It returns the result of a pursuit, and (k, d) the atoms of its types and the directions of no
# type.
Finder = Callable[[Sequence[Tensor], Sequence[float]], tuple[PursuitResult, Tensor]]


@dataclass(eq=False)
class ReadableInput:
    """A known input that trained maps read, with the atom of every token.

    Attributes:
        known_input: the input.
        maps: the trained maps that read it, at least one.
        dictionary: the atom of every token at this input. If the input depends on positions, it
            also holds their directions. Those of the first positions, as many as seem to occur, are
            projected out of gradients and atoms. Some further ones are atoms themselves, after
            those of the tokens: the pursuit may choose them, and the result leaves them out.
        log_odds: (V,) prior log odds that each token is in the batch.
        factor: the A (r, d) of a LoRA whose B is read, while ``dictionary`` is that of A's input.
    """

    known_input: linear_maps.KnownInput
    maps: tuple[linear_maps.LinearMap, ...]
    dictionary: Dictionary
    log_odds: Tensor
    factor: Tensor | None = None
    # The rows of AdaLoRA's factors A by map; the cached atoms with the key of _project_atoms; and a
    # copy of this input with weighted coordinates, with the weights.
    _factors: dict[str, Tensor] = field(default_factory=dict, init=False)
    _atoms: tuple[tuple[int, frozenset[str]], Atoms] | None = field(default=None, init=False)
    _weighted: tuple[ReadableInput, Tensor] | None = field(default=None, init=False)

    @property
    def decoder(self) -> bool:
        """Return whether the input is in the decoder of an encoder-decoder."""
        return linear_maps.in_decoder(self.maps[0].name)

    @property
    def is_factor_b(self) -> bool:
        """Return whether only factors B of low-rank adapters read the input."""
        return all(m.factor == "B" for m in self.maps)

    @property
    def n_rows(self) -> int:
        """Return the number of shared rows that read the input."""
        return sum(m.rows for m in self.maps if self.is_factor_b or m.factor != "B")

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
            self._weighted = None
            if self._atoms is not None and not self._atoms[1].follow(changed):
                self._atoms = None

    def store_factors(self, anatomy: Anatomy) -> None:
        """Store AdaLoRA's current factors A.

        AdaLoRA's loss has a term of A itself, which adds combinations of A's rows to A's gradient.
        """
        self._factors = factor_rows(anatomy, self.maps)
        for readable in (self, *([] if self._weighted is None else self._weighted[:1])):
            if readable._atoms is not None and readable._atoms[0][1]:
                readable._atoms = None

    def capacity(self, seconds: float, seed: int) -> float | None:
        """Measure how many types the rows can distinguish; see :func:`measure_capacity`.

        If the input depends on positions, those of texts of 32 tokens are projected out. So many
        sets are planted as take about ``seconds``, by their sizes alone: all processes and runs
        plant the same. The result is 0 if none of them was recovered. It is None without a
        measurement if one set would take longer than ``seconds`` on a CPU.
        """
        positions = _LENGTH if self.dictionary.positions is not None else 0
        atoms = self._project_atoms(positions, self._factors)
        rows = self.n_rows
        tokens, width = self.dictionary.rows.shape
        # Roughly the seconds of the pursuit of a set of the predicted size at 10 GFLOP/s: 8 types
        # are chosen per scoring of the vocabulary, of 4 * width * tokens operations.
        set_seconds = predict_capacity(width, tokens, rows) / 8 * (4 * width * tokens / 1e10)
        if atoms.device.type == "cpu" and set_seconds > seconds:
            return None
        sets = max(1, int(seconds / set_seconds))
        return float(measure_capacity(atoms, rows, sets=sets, seed=seed)[0])

    def read(
        self,
        view: Observation,
        noise: Mapping[str, float],
        autocast: torch.dtype | None,
        errors: Mapping[str, Tensor] | None = None,
    ) -> PursuitResult:
        """Return the types whose atoms span the shared gradients of these maps.

        Args:
            view: the shared gradients.
            noise: standard deviation of the noise that was added to each entry, by parameter.
            autocast: dtype that the client's forward is cast to.
            errors: standard deviation of each entry's error, by parameter, if it differs between
                entries; None if rounding, noise and dropout are the only errors.

        Raises:
            UnusableObservation: the gradients are zero or not finite, or no type exceeds the noise.
            Inapplicable: the rows fill all directions, or no types explain the entries that top-k
                compression left.
        """
        by_map = linear_maps.nonzero_gradients(view, self.maps)
        if not by_map:
            linear_maps.refuse_zeros(self.maps, "the first projections")
        if self.factor is not None:
            self.dictionary, self.factor = self.dictionary.through(self.factor), None
        gradients = list(by_map.values())
        factors = {m.name: self._factors[m.name] for m in by_map if m.regularised}
        dtypes = [g.dtype for g in (*gradients, self.dictionary.rows)]
        rounding = max(_rounding(dtypes, autocast), view.gradients[-1].rounding)
        positions = self.dictionary.count_positions(gradients, tuple(factors.values()))
        if view.gradients[-1].compression == "topk":
            return self._explain_sparse(gradients, self._project_atoms(positions, factors).nuisance)

        def find(
            rows: Sequence[Tensor], levels: Sequence[float], positions: int = positions
        ) -> tuple[PursuitResult, Tensor]:
            result = self._explain(rows, positions, rounding, levels, factors)
            atoms = self._project_atoms(positions, factors)
            return result, torch.cat([atoms.rows(result.types), atoms.nuisance])

        if errors is not None:
            if self.is_factor_b:
                raise Inapplicable("in an update of Adam, LoRA's B alone distinguishes no words")
            map_errors = [errors[m.name] if m.axis == 1 else errors[m.name].T for m in by_map]
            result = self._words(explain_uneven(gradients, map_errors, find))
            cause = "what the optimizer's step left of the gradient"
        else:
            result, cause = self._explain_even(by_map, noise, rounding, factors, find)
            # Gradients of queries and keys alone miss tokens that attend only to themselves.
            covers_all = any(m.name in self.known_input.lone_token_maps for m in by_map)
            result = self._words(result)
            if not covers_all:
                result = replace(result, certified=False, silent=None)
        # Declared noise, or more types than the rows distinguish, may hide every word, so that an
        # empty result is valid. Otherwise at least one word must be above the errors.
        is_noisy = errors is None and bool(view.gradients[-1].noise_std)
        if not len(result.types) and cause and not is_noisy:
            raise UnusableObservation(f"no token stands out of {cause}")
        return result

    def _explain_sparse(self, gradients: Sequence[Tensor], nuisance: Tensor) -> PursuitResult:
        """Return the types that explain gradients after top-k compression."""
        rows, atoms = select_densest(torch.cat([*gradients])), self.dictionary.rows
        types = None if self.is_factor_b else explain_sparse(rows, atoms, nuisance, self.log_odds)
        if types is None:
            raise Inapplicable(
                "no words explain what top-k compression left (too many words, or noise)"
            )
        scores = self.log_odds.double().clone()  # the chosen types have the highest scores
        scores[types] = 1e6 + torch.arange(len(types), 0, -1, device=scores.device).double()
        # The residual counts as 0, and nothing is certified.
        return PursuitResult(types, scores, float(len(types)), 0.0, False, evident=len(types))

    def _explain_even(
        self,
        by_map: Mapping[linear_maps.LinearMap, Tensor],
        noise: Mapping[str, float],
        rounding: float,
        factors: Mapping[str, Tensor],
        find: Callable[..., tuple[PursuitResult, Tensor]],
    ) -> tuple[PursuitResult, str]:
        """Return the types that explain gradients whose entries have errors of one size.

        The second result names what may hide all types, for an error message; empty for nothing.
        """
        gradients = list(by_map.values())
        dropouts = [(*self.known_input.dropouts, *m.dropouts) for m in by_map]
        variances = [linear_maps.dropout_variance(modules) for modules in dropouts]
        noise_stds = [noise.get(m.name, 0.0) for m in by_map]
        if any(variances) and not any(noise_stds):
            result = self._explain_dropout(gradients, variances, rounding, factors)
            if len(result.types):
                return result, "what dropout adds"
        stds = [
            math.hypot(d, math.sqrt(v * float(g.double().square().mean())))
            for d, v, g in zip(noise_stds, variances, gradients, strict=True)
        ]
        result, _ = find(gradients, stds)
        positions = self.dictionary.count_positions(gradients, tuple(factors.values()))
        if positions and result.silent is None and not any(stds):
            # The count of positions is an estimate. If it is too low, the rows contain positions
            # that no type explains. So a second pursuit projects out 1.6 times as many positions,
            # and 8 more; both numbers are not tuned.
            retry, _ = find(gradients, stds, positions * 8 // 5 + 8)
            result = result if retry.silent is None else retry
        rounded = "the rounding of what was shared" if any(noise_stds) else ""
        return result, "what dropout adds" if any(variances) else rounded

    def _explain_dropout(
        self,
        gradients: Sequence[Tensor],
        variances: Sequence[float],
        rounding: float,
        factors: Mapping[str, Tensor],
    ) -> PursuitResult:
        """Return the types that explain gradients whose inputs dropout has changed.

        A row of a gradient is the sum of ``s_t x_t`` over tokens t, with the token's input x_t and
        a factor s_t. Dropout of probability p adds noise of variance ``p / (1 - p)`` times the sum
        of ``(s_t x_ti)^2`` to entry i of the row. Coordinates are therefore weighted to equal size,
        and each map's rows are replaced by their right singular vectors: then the noise is about
        the same share of every entry.
        """
        if self._weighted is None:
            sizes = torch.linalg.vector_norm(self.dictionary.rows, dim=0, dtype=torch.float32)
            weights = (sizes / sizes.amax()).clamp_min(_MIN_SIZE).reciprocal()
            weighted_input = replace(self, dictionary=self.dictionary.scale_columns(weights))
            self._weighted = weighted_input, weights.double()
        weighted_input, weights = self._weighted
        rows, rounding_stds, dropout_stds = [], [], []
        for gradient, variance in zip(gradients, variances, strict=True):
            _, sizes, basis = torch.linalg.svd(gradient.double() * weights, full_matrices=False)
            ratios = rounding * sizes.norm() / len(gradient) ** 0.5 / sizes.clamp_min(1e-300)
            is_precise = ratios < 1  # other singular vectors are rounding errors
            rows += list(basis[is_precise, None] * basis.shape[1] ** 0.5)
            rounding_stds += ratios[is_precise].tolist()
            dropout_stds += [math.sqrt(variance)] * int(is_precise.sum())
        factors = {name: row * weights for name, row in factors.items()}
        positions = weighted_input.dictionary.count_positions(rows, tuple(factors.values()))
        # Within the rank, with fewer inputs than rows, chance shows where evidence ends.
        is_within = len(rows) < sum(min(gradient.shape) for gradient in gradients)
        for share in (1.0, _NOISE_SHARE):  # less noise is assumed only if there are many types
            stds = [x + share * y for x, y in zip(rounding_stds, dropout_stds, strict=True)]
            settings = positions, 0.0, stds, factors
            result = weighted_input._explain(rows, *settings, estimated=is_within)
            if len(result.types) <= _MAX_FULL_NOISE * len(rows):
                break
        return result

    def _words(self, result: PursuitResult) -> PursuitResult:
        """Return a result without the positions that the pursuit chose as atoms."""
        tokens = len(self.dictionary.rows)
        is_word = result.types < tokens
        return replace(
            result,
            types=result.types[is_word],
            scores=result.scores[:tokens],
            expected=max(result.expected - int((~is_word).sum()), 0.0),  # max(nan, 0.0) is NaN
        )

    def _project_atoms(self, positions: int, factors: Mapping[str, Tensor]) -> Atoms:
        """Return the atoms without the first positions and the rows of AdaLoRA's factors.

        Both are projected out. The latest result is cached.
        """
        key = (positions, frozenset(factors))
        if self._atoms is None or self._atoms[0] != key:
            self._atoms = (key, Atoms(*self.dictionary.atoms(positions, tuple(factors.values()))))
        return self._atoms[1]

    def _explain(
        self,
        gradients: Sequence[Tensor],
        positions: int,
        rounding: float,
        noise: Sequence[float],
        factors: Mapping[str, Tensor],
        *,
        estimated: bool = False,
    ) -> PursuitResult:
        """Run the pursuit on gradients (n_i, d).

        Args:
            gradients: The gradients of the maps.
            positions: The number of positions that are projected out.
            rounding: The relative rounding error of the gradients.
            noise: The standard deviation of the noise of each gradient.
            factors: The rows of AdaLoRA's factors A by map, which are projected out too.
            estimated: Whether the size of the noise is only estimated, as that of dropout, and
                types end where chance gives as much evidence.
        """
        if self._atoms is not None and self._atoms[0] == (positions, frozenset(factors)):
            nuisance = self._atoms[1].nuisance
        else:
            nuisance = self.dictionary.atoms(positions, tuple(factors.values()))[1]
        shared = SharedRows.stack(gradients, nuisance, rounding=rounding, noise=noise)
        if factors and not any(noise) and shared.is_noise:
            raise NotYet(linear_maps.NO_GRADIENT_YET)
        dims = nuisance.shape[1] - len(nuisance)
        result: PursuitResult | None = None
        if estimated:
            shared = replace(shared, noise="estimated")
        for rows in (shared, shared.above_gap()):
            # Rows that fill all directions need no atoms, which take long.
            if rows is None or len(rows.principal) >= dims - 1:
                continue
            atoms = self._project_atoms(positions, factors)
            n_positions = len(atoms) - len(self.log_odds)
            odds = torch.cat([self.log_odds, self.log_odds.new_zeros(n_positions)])
            if not len(rows.principal):  # all of the rows is noise
                no_types = torch.empty(0, dtype=torch.long, device=odds.device)
                return PursuitResult(no_types, odds, 0.0, 1.0, False)
            latest = explain(atoms, rows, odds)
            # With fewer types than rows, a test of the rows' span finds them all.
            is_complete = 0 < len(latest.types) <= len(rows.principal)
            if result is None or is_complete or latest.evident > result.evident:
                result = latest
            if latest.silent is not None:
                break
        if result is None:
            raise Inapplicable(
                f"the shared rows fill {len(shared.principal)} of the input's {dims} directions: "
                "the batch has too many types or positions"
            )
        return result


def _rounding(dtypes: Sequence[torch.dtype], autocast: torch.dtype | None) -> float:
    """Return the relative rounding error of an entry of a gradient.

    In half precision the entry was rounded once: the error is uniform up to half an epsilon, with a
    standard deviation of ``eps / sqrt(12)``. In single precision it is a whole epsilon, because
    sums accumulate errors; with TF32 products it is 2**-11.
    """
    max_eps = max(torch.finfo(d).eps for d in (*dtypes, autocast) if d is not None)
    float32_eps = torch.finfo(torch.float32).eps
    if max_eps <= float32_eps:
        return 2.0**-11 if torch.cuda.is_available() and products_in_tf32() else float32_eps
    return max_eps / math.sqrt(12)


def explain_uneven(rows: Sequence[Tensor], errors: Sequence[Tensor], find: Finder) -> PursuitResult:
    """Return the types that explain gradients whose entries have errors of different sizes.

    Args:
        rows: The gradients of the maps, (n_i, d) each.
        errors: The standard deviation of each entry, of the same shapes. It is infinite if only the
            entry's sign and a lower bound of its size are known.
        find: The pursuit, for gradients whose entries have errors of one size.
    """
    data = [_most_accurate(y.double(), e.double()) for y, e in zip(rows, errors, strict=True)]
    # First estimates: entries shrink as their errors grow, to half if only the sign is known.
    estimates = [
        y * (y.square() / (y.square() + e.square())).where(e.isfinite(), 0.5) for y, e in data
    ]
    row_errors = [torch.minimum(e, y.abs()) for y, (_, e) in zip(estimates, data, strict=True)]
    history: list[set[int]] = []
    result: PursuitResult | None = None
    for _ in range(_ROUNDS):
        latest, atoms = find(estimates, [float(x.square().mean().sqrt()) for x in row_errors])
        types = set(latest.types.tolist())
        result = latest if types or result is None else result
        if not types or types in history or len(atoms) >= atoms.shape[1]:
            break
        history.append(types)
        pairs = [_complete(y, e, atoms) for y, e in data]
        estimates, row_errors = [y for y, _ in pairs], [e for _, e in pairs]
    assert result is not None  # there is at least one round
    return result


def _most_accurate(rows: Tensor, errors: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows with the smallest relative errors, and their errors.

    Errors below the median are raised to it, so that no entry has all of the weight.
    """
    if len(rows) > _MAX_MAP_ROWS:
        relative = (errors / rows.abs().clamp_min(1e-300)).clamp(max=1.0).mean(1)
        best = relative.argsort()[:_MAX_MAP_ROWS]
        rows, errors = rows[best], errors[best]
    finite = errors[errors.isfinite()]
    return rows, errors.clamp_min(float(finite.median()) if len(finite) else 0.0)


def _complete(rows: Tensor, errors: Tensor, atoms: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean of measured and fitted rows, weighted by accuracy, and its standard errors.

    Each row is fitted by a combination of the ``atoms`` (k, d), with its entries weighted by
    ``1 / errors**2``. The fit's variance is that of its residual in the accurate entries.
    """
    weights = errors.square().reciprocal()
    k = len(atoms)
    means, row_errors = torch.empty_like(rows), torch.empty_like(rows)
    for i, (row, error, weight) in enumerate(zip(rows, errors, weights, strict=True)):
        if int((weight > 0).sum()) <= k:  # so many atoms fit any such row exactly
            means[i], row_errors[i] = row, row.abs()
            continue
        weighted_atoms = atoms * weight
        gram = weighted_atoms @ atoms.T
        gram.diagonal().add_(_RIDGE * gram.diagonal().mean())
        fit = torch.linalg.solve(gram, weighted_atoms @ row) @ atoms
        is_finite = error.isfinite()
        is_accurate = error <= error[is_finite].quantile(_ACCURATE)
        free_share = max(0.1, 1 - k / int(is_finite.sum()))
        variance = (row - fit)[is_accurate].square().mean() / free_share
        data_weight = variance / (variance + error.square())
        means[i] = torch.where(is_finite, data_weight * row + (1 - data_weight) * fit, fit)
        row_errors[i] = torch.where(is_finite, data_weight.sqrt() * error, variance.sqrt())
    return means, row_errors
