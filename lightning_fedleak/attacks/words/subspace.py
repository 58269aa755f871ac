"""Word types from the row space of the first projections' gradients, whole or of a LoRA."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fedleak.anatomy import EMBEDDING_WEIGHT, Anatomy
from lightning_fedleak.anatomy.blocks import is_encoder_decoder
from lightning_fedleak.anatomy.wrappers import without_peft
from lightning_fedleak.attacks.base import (
    Attack,
    Query,
    RunFacts,
    Surfaces,
    UnusableObservation,
    WordGuess,
)
from lightning_fedleak.attacks.clipping import WHY_CUT, check_uncut, entry_errors
from lightning_fedleak.attacks.local_steps import LocalSteps
from lightning_fedleak.attacks.public_text import PublicText, TextSource
from lightning_fedleak.attacks.row_space.capacity import measure_capacity, planted_set_seconds
from lightning_fedleak.attacks.row_space.dictionary import (
    Dictionary,
    NotAdditive,
    build_dictionary,
    factor_rows,
)
from lightning_fedleak.attacks.row_space.linear_maps import (
    KnownInput,
    LinearMap,
    dropout_variance,
    find_known_inputs,
    find_linear_maps,
    input_rows,
    vocabulary_size,
)
from lightning_fedleak.attacks.row_space.pursuit import Atoms, PursuitResult, SharedRows, explain
from lightning_fedleak.attacks.row_space.uneven import Find, explain_uneven, unexplained_share
from lightning_fedleak.attacks.words.aligned_rows import rounding_error
from lightning_fedleak.snapshots import (
    Inapplicable,
    NotYet,
    Observation,
    UpdateSnapshot,
    explain_weight_term,
    whole_tensor,
)
from lightning_fedleak.threats import Capability, ThreatModel, ThreatModelError
from lightning_fedleak.validate import check_number

_PRIOR_TYPES = 256.0  # types that a batch is expected to have, for the prior odds; not tuned
_PROBED = 32  # tokens whose inputs are compared to see whether the model has changed; not tuned
_LENGTH = 32  # positions that count as known when the capacity is measured; not tuned
_UNCHANGED = 5e-7  # relative change of inputs that float32 explains (it rounds to 1e-7)
_ROUNDED = 4.0  # mean square in units of the error, up to which a gradient is rounding; not tuned
_HALF_KNOWN = 0.3  # relative error up to which an entry's size counts as known; not tuned
_UNEXPLAINED = 1e-3  # share of the norm of uncut entries: rounding leaves less, a missed type more
_ROWS_AT_ONCE = 1024  # rows compared at once, which bounds the memory

NO_GRADIENT_YET = (
    "LoRA's A has no gradient until B (of AdaLoRA: E) has moved; with warm-up from 0 that is step 2"
)


class SubspaceWords(Attack):
    """The tokens whose inputs span the gradients of the first block's projections.

    Every row of the gradient of a linear map is a combination of its inputs. The first block's
    queries, keys and values (whole, or a LoRA's A on them) read an input that the token determines,
    or the token and its position. An honest but curious server knows the weights and so these
    inputs, and finds which of them the rows are made of: at full rank by the span test of DAGER
    (Petrov et al. 2024, section 4.1), for the few rows of a LoRA by a pursuit
    (:mod:`~lightning_fedleak.attacks.row_space.pursuit`). It learns nothing from data. Where it
    certifies a result, no type is missing, except types with equal inputs. If source and target
    have separate vocabularies, it names the source's words.

    It reads single gradients, rounds of SGD, and rounds of one step of Adam or AdamW that begin
    with a fresh optimizer. The first step of a LoRA has no result, because A has no gradient while
    B is zero: the second step is read then. The last token of a causal text has no part in these
    gradients. Dropout and a defence's noise hide tokens: the loudest ones are named, and nothing is
    certified. Nothing is certified either if queries and keys alone are trained
    (:func:`~lightning_fedleak.attacks.row_space.linear_maps.lone_token_maps`), or only one side of
    an encoder-decoder.

    Args:
        public_text: text like the clients', or ``"sampled"``, for the frequencies of tokens. It
            helps where noise hides rare tokens; without it all tokens are equally likely.
        tokenizer: for strings.
        capacity_seconds: time in which :meth:`prepare` measures how many types can be told apart,
            on planted sets. It is not measured if this is 0, or if one set takes longer on a CPU.
        seed: of sampled text, and of planted sets.
        name: as in the logs.

    Raises:
        ValueError: ``capacity_seconds`` is negative, or the text cannot be read.

    Example:
        >>> import torch
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> from lightning_fedleak import SubspaceWords
        >>> from lightning_fedleak.anatomy import find_anatomy
        >>> from lightning_fedleak.snapshots import GradientSnapshot, Observation, Stage
        >>> size = dict(vocab_size=64, n_positions=16, n_embd=48, n_layer=1, n_head=2)
        >>> model = GPT2LMHeadModel(GPT2Config(**size)).eval()
        >>> ids = torch.tensor([[7, 8, 9, 10]])  # the client's text
        >>> model(input_ids=ids, labels=ids).loss.backward()
        >>> attack, anatomy = SubspaceWords(capacity_seconds=0), find_anatomy(model)
        >>> attack.prepare(anatomy)
        >>> names = attack.needs(anatomy).gradients
        >>> gradients = {name: anatomy.parameter(name).grad for name in names}
        >>> guess = attack.run(Observation((GradientSnapshot(0, Stage.SHARED, gradients),)))
        >>> sorted(guess.types.tolist())
        [7, 8, 9]
    """

    threat_model = ThreatModel.create(
        "an honest but curious server that reads one update of the first block's projections, or "
        "of adapters on them",
        Capability.KNOWS_MODEL,
    )
    default_name = "subspace_words"
    needs_float64 = True
    reads_adaptive_updates = True
    removes_loss_terms = True
    reads_clipped = True
    restores_fully = False

    def __init__(
        self,
        public_text: TextSource | None = None,
        *,
        tokenizer: Any = None,
        capacity_seconds: float = 10.0,
        seed: int = 0,
        name: str | None = None,
    ) -> None:
        super().__init__(name)
        self.public_text = PublicText.parse(public_text, tokenizer)
        check_number("capacity_seconds", capacity_seconds, at_least=0)
        self.capacity_seconds = capacity_seconds
        self.seed = seed
        self._capacity: float | None = None
        self._stored: dict[str, float] = {}
        self._before: dict[str, Tensor] = {}
        self._facts = RunFacts()
        self._inputs: tuple[Anatomy, tuple[KnownInput, ...]] | None = None
        self._sides: frozenset[bool] = frozenset()
        self._roles: tuple[str, ...] = ()
        self._readable: list[_Readable] = []

    def meet(self, facts: RunFacts) -> None:
        """Store the precision, and what makes an update."""
        self._facts = facts

    def needs(self, anatomy: Anatomy) -> Surfaces:
        """Return the trained maps that read a known input, or those of the widest input.

        Raises:
            ThreatModelError: no map reads one.
        """
        inputs = self.inputs(anatomy)
        names = [m.name for known_input in inputs for m in known_input.trainable_maps(anatomy)]
        if names:
            return Surfaces(gradients=tuple(names))
        return Surfaces(gradients=tuple(m.name for m in inputs[0].maps))

    def inputs(self, anatomy: Anatomy) -> tuple[KnownInput, ...]:
        """Return the known inputs of a model, in the order in which they are read.

        Raises:
            ThreatModelError: it has none.
        """
        if self._inputs is None or self._inputs[0] is not anatomy:
            maps = find_linear_maps(anatomy)
            if anatomy.target_rows is not None:  # a decoder's words are of another vocabulary
                maps = [m for m in maps if not _in_decoder(m.name)]
            known_inputs = find_known_inputs(anatomy, maps)
            self._inputs = (anatomy, tuple(sorted(known_inputs, key=_reading_order(anatomy))))
            self._sides = _sides_with_words(anatomy)
        inputs = self._inputs[1]
        if not inputs:
            raise ThreatModelError(
                f"attack '{self.name}' reads linear maps whose input a token determines, and this "
                "model has none (are its first projections something else than nn.Linear?): "
                "remove the attack"
            )
        return inputs

    def prepare(self, anatomy: Anatomy) -> None:
        """Run the model on every token, up to the maps that are read.

        Raises:
            ValueError: the input of every map depends on positions in an unknown way.
        """
        odds = self._log_odds(anatomy)
        self._roles = self.needs(anatomy).gradients
        self._readable = []
        refused: list[str] = []
        for known_input in self.inputs(anatomy):
            maps = known_input.trainable_maps(anatomy)
            if not maps:
                continue
            try:
                dictionary = build_dictionary(anatomy, known_input, autocast=self._facts.autocast)
            except NotAdditive as error:
                refused.append(f"{maps[0].name}: {error}")
                continue
            readable = _Readable(known_input, maps, dictionary, odds)
            readable.follow(anatomy)
            self._readable.append(readable)
        if self._readable and self._capacity is None and self.capacity_seconds:
            first = self._readable[0]
            self._capacity = first.capacity(self.capacity_seconds, self.seed)
        if refused and not self._readable:
            raise ValueError(f"attack '{self.name}' cannot read {'; '.join(refused)}: remove it")

    def _log_odds(self, anatomy: Anatomy) -> Tensor:
        """Return (V,) log odds of a token being in a batch of some hundred types."""
        size = vocabulary_size(anatomy)
        if self.public_text is None:
            counts = torch.ones(size)
        else:
            text = PublicText.resolve(self.public_text, anatomy, self.seed)
            ids = torch.cat(list(text.sentences))
            counts = torch.bincount(ids, minlength=size)[:size].float()
            counts += counts.sum().clamp_min(1) / size / 10
        expected = counts / counts.sum() * _PRIOR_TYPES
        return expected.log().clamp(-12.0, 2.0).to(anatomy.device)

    def refresh(self, anatomy: Anatomy, step: int) -> None:
        """Follow embeddings and norms that have changed."""
        if self._facts.local_steps is not None:
            self._before = {
                m.name: whole_tensor(p).clone()
                for readable in self._readable
                for m in readable.maps
                if (p := anatomy.parameter(m.name)) is not None
            }
            self._stored = {name: rounding_error(p) for name, p in self._before.items()}
        if (
            anatomy.trainable(EMBEDDING_WEIGHT)
            or self._roles != self.needs(anatomy).gradients
            or any(not r.is_current(anatomy, self._facts.autocast) for r in self._readable)
        ):
            self.prepare(anatomy)
            return
        for readable in self._readable:
            readable.follow(anatomy)

    @torch.no_grad()
    def run(self, view: Observation, query: Query | None = None) -> WordGuess:
        """Return the types whose inputs span the shared gradients.

        Returns:
            ``types`` with the surest first, ``n_types`` their number or, with noise, the expected
            number; ``surface`` is ``"input"``.

        Raises:
            UnusableObservation: the gradient is non-finite or all zero, has more types than
                directions tell apart, or is an update that is no sum of gradients.
            RuntimeError: ``prepare`` was not called.
        """
        if not self._readable:
            raise RuntimeError(f"attack '{self.name}' has no dictionary: call prepare(anatomy)")
        snapshot = view.gradients[-1]
        if math.isnan(snapshot.noise_std):
            raise UnusableObservation("a defence does not say how much noise it adds")
        noise = dict.fromkeys(snapshot.tensors, snapshot.noise_std)
        errors: Mapping[str, Tensor] | None = None
        if isinstance(snapshot, UpdateSnapshot):
            snapshot, errors = self._as_gradients(snapshot)
            view = Observation((snapshot,))
            if errors is None:
                scale = snapshot.local_steps**0.5 / snapshot.learning_rate
                noise |= {name: stored * scale for name, stored in self._stored.items()}
        maps_on_words = [r for r in self._readable if not r.is_factor_b] or self._readable
        roles = [m.name for readable in maps_on_words for m in readable.maps]
        uneven, errors = errors, entry_errors(snapshot, roles, self._facts, noise, errors)
        clipped = errors is not uneven
        results: dict[bool, PursuitResult] = {}
        refusals: list[UnusableObservation] = []
        for readable in self._readable:
            side = readable.decoder
            if side in results and (results[side].certified or readable.is_factor_b):
                continue
            try:
                if readable.is_factor_b:
                    check_uncut(snapshot, [m.name for m in readable.maps], self._facts)
                result = readable.read(view, noise, self._facts, errors, clipped=clipped)
            except UnusableObservation as error:
                refusals.append(error)
                continue
            if side not in results or result.certified:
                results[side] = result
        if not results:
            kinds = {type(error) for error in refusals}
            why = "; ".join(dict.fromkeys(map(str, refusals)))
            if NotYet in kinds:
                raise next(error for error in refusals if isinstance(error, NotYet))
            raise Inapplicable(why) if kinds == {Inapplicable} else UnusableObservation(why)
        parts = list(results.values())
        sides = self._sides | {readable.decoder for readable in self._readable}
        return WordGuess(
            types=parts[0].types if len(parts) == 1 else _distinct_types(parts),
            scores=torch.stack([p.scores for p in parts]).amax(0),
            n_types=sum(p.expected for p in parts),
            surface="input",
            certified=sides == results.keys() and all(p.certified for p in parts),
            capacity=self._capacity,
        )

    def similar_tokens(self, types: Tensor, share: float) -> Tensor:
        """Return other tokens whose inputs differ from one of ``types`` by less than a share.

        Tokens whose inputs are equal are not among them.

        Args:
            types: (k,) token ids.
            share: of the norm of an input.
        """
        similar = []
        for readable in self._readable:
            if readable.is_factor_b:
                continue
            rows = readable.dictionary.rows
            targets = rows[types.to(rows.device)].double()
            unit = nn.functional.normalize(targets.float(), dim=1)
            for start in range(0, len(rows), _ROWS_AT_ONCE):
                part = rows[start : start + _ROWS_AT_ONCE]
                near = nn.functional.normalize(part.float(), dim=1) @ unit.T > 1 - share**2 - 1e-6
                i, j = near.nonzero(as_tuple=True)
                distance = (part[i].double() - targets[j]).norm(dim=1) / targets[j].norm(dim=1)
                similar.append(start + i[(distance > 0) & (distance < share)].to(types.device))
        others = set(torch.cat([types[:0], *similar]).tolist()) - set(types.tolist())
        return torch.tensor(sorted(others), dtype=types.dtype, device=types.device)

    def check_updates(self, facts: RunFacts) -> None:
        """Raise an error for rounds whose rows are no combinations of inputs, nor can become so.

        Raises:
            Inapplicable: several steps of an adaptive optimizer.
        """
        steps = LocalSteps.from_facts(facts)
        if steps is not None and not steps.linear and not steps.invertible:
            raise Inapplicable(
                f"a round of {steps.steps} step{'s' * (steps.steps > 1)} of "
                f"{steps.optimizer.__name__} divides gradients entry by entry, so that its rows "
                "are no combinations of inputs any more; measure rounds of one step "
                "(local_steps=1) or the gradients of single steps (leave local_steps out) to see "
                "what the client's data would give away"
            )

    def _as_gradients(
        self, update: UpdateSnapshot
    ) -> tuple[UpdateSnapshot, Mapping[str, Tensor] | None]:
        """Return an update as gradients, and the errors of their entries if these are uneven.

        Raises:
            UnusableObservation: its rows are no combinations of inputs.
        """
        self.check_updates(self._facts)
        steps = LocalSteps.from_facts(self._facts)
        if steps is None:
            return update, None
        name = steps.optimizer.__name__
        steps.check_fresh(update.fresh)
        rate = update.learning_rate
        if steps.linear and not steps.settings.get("weight_decay"):
            return update, None
        names = [m.name for readable in self._readable for m in readable.maps]
        if any(n not in self._before for n in names):
            raise RuntimeError(f"attack '{self.name}' has not seen the weights: call refresh")
        shared = {n: update.tensors[n] for n in names if n in update.tensors}
        if steps.linear:
            plain = {n: steps.without_decay(t, self._before[n], rate) for n, t in shared.items()}
            scale = update.local_steps**0.5 / rate
            gradients = {
                n: _zero_if_rounding(t, torch.tensor(self._stored[n] * scale))
                for n, t in plain.items()
            }
            return replace(update, tensors=gradients), None
        noise = update.noise_std
        inverted = {n: steps.invert(t, self._before[n], rate, noise) for n, t in shared.items()}
        gradients = {
            n: _zero_if_rounding(gradient, error) for n, (gradient, error) in inverted.items()
        }
        errors = {n: error for n, (_, error) in inverted.items()}
        factors = {
            m.name for known_input in self._readable for m in known_input.maps if m.factor == "A"
        }
        # An entry with an infinite error has a gradient too, of which the sign alone is known.
        trained = [gradients[n].any() | errors[n].isinf().any() for n in factors & shared.keys()]
        if trained and not any(trained):
            raise NotYet(NO_GRADIENT_YET)
        if all(_shows_signs_only(gradients[n], errors[n]) for n in errors):
            raise UnusableObservation(
                f"the step of {name} shows the signs of a gradient alone here: a defence's noise "
                "hides its sizes, or the rounding of the stored weights (half precision, or a "
                "small learning rate); measure the gradients of single steps (leave local_steps "
                "out)"
            )
        return replace(update, tensors=gradients), errors

    def state_dict(self) -> dict[str, Tensor]:
        """Return how many types can be told apart; all else follows from the model."""
        if self._capacity is None:
            return {}
        return {"capacity": torch.tensor(self._capacity, dtype=torch.float64)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what :meth:`state_dict` returned."""
        if "capacity" in state:
            self._capacity = float(state["capacity"])

    def calibration_inputs(self) -> dict[str, object]:
        """Return the settings that planted sets depend on."""
        return {"seed": self.seed, "capacity_seconds": self.capacity_seconds}

    def config(self) -> dict[str, object]:
        """Return the settings that name this attack in reports."""
        return {"public_text": PublicText.label(self.public_text), "seed": self.seed}


def _zero_if_rounding(gradient: Tensor, error: Tensor) -> Tensor:
    """Return a gradient, or zeros if decay and rounding explain all of it.

    LoRA's A in a first step is such a case.
    """
    if not bool(error.isfinite().any()):
        return torch.zeros_like(gradient)
    known_input = error.isfinite() & (error > 0)
    ratio = (gradient / error.to(gradient)).where(known_input.to(gradient.device), 0.0)
    size = float(ratio.square().sum()) / max(1, int(known_input.expand_as(gradient).sum()))
    return torch.zeros_like(gradient) if size <= _ROUNDED else gradient


def _shows_signs_only(gradient: Tensor, error: Tensor) -> bool:
    """Return whether the size of more than half of the entries is unknown."""
    return bool((error < _HALF_KNOWN * gradient.abs()).double().mean() < 0.5)


def _distinct_types(parts: Sequence[PursuitResult]) -> Tensor:
    """Return the types of several sides, each once."""
    types = torch.cat([p.types for p in parts])
    return torch.tensor(list(dict.fromkeys(types.tolist())), device=types.device)


def _sides_with_words(anatomy: Anatomy) -> frozenset[bool]:
    """Return the sides of an encoder-decoder (True: the decoder) that read words of their own.

    A classifier's decoder reads the encoder's words.
    """
    if anatomy.kind == "seq2seq" and anatomy.target_rows is None:
        return frozenset((False, True))
    return frozenset((False,)) if is_encoder_decoder(without_peft(anatomy.model)) else frozenset()


def _in_decoder(name: str) -> bool:
    return ".decoder." in f".{name}"


def _reading_order(anatomy: Anatomy) -> Callable[[KnownInput], tuple[bool, bool, bool, int]]:
    """Return the sort key of inputs.

    Inputs of factors B come last, inputs that show every token first, then inputs as wide as the
    model, then narrow ones.
    """

    def key(known_input: KnownInput) -> tuple[bool, bool, bool, int]:
        factor_b = all(m.factor == "B" for m in known_input.maps)
        return (
            factor_b,
            not known_input.lone_token_maps,
            known_input.width != anatomy.hidden_size,
            known_input.width,
        )

    return key


class _Readable:
    """A known input whose maps are trained, with the atom of every token."""

    def __init__(
        self,
        known_input: KnownInput,
        maps: Sequence[LinearMap],
        dictionary: Dictionary,
        log_odds: Tensor,
    ) -> None:
        self.known = known_input
        self.maps = tuple(maps)
        self.dictionary = dictionary
        self.decoder = _in_decoder(maps[0].name)
        self.is_factor_b = all(m.factor == "B" for m in maps)
        self._log_odds = log_odds
        self._factors: dict[str, Tensor] = {}
        self._atoms: tuple[tuple[int, frozenset[str]], Atoms] | None = None

    def follow(self, anatomy: Anatomy) -> None:
        """Store the current factors A, whose rows a loss term may add to gradients."""
        self._factors = factor_rows(anatomy, self.maps)
        if self._atoms is not None and self._atoms[0][1]:
            self._atoms = None

    def is_current(self, anatomy: Anatomy, autocast: torch.dtype | None) -> bool:
        """Return whether the inputs of some tokens are unchanged."""
        step = max(1, len(self.dictionary.rows) // _PROBED)
        ids = torch.arange(0, len(self.dictionary.rows), step, device=anatomy.device)
        rows = input_rows(anatomy, self.known, ids[:, None], autocast=autocast)[:, 0]
        change = (rows - self.dictionary.rows[ids]).abs().max()
        return float(change) <= _UNCHANGED * float(rows.abs().max())

    def capacity(self, seconds: float, seed: int) -> float | None:
        """Return how many types its rows can tell apart; None if one set takes longer on a CPU.

        The positions of texts of 32 tokens count as known.
        """
        beside = {m.name: self._factors[m.name] for m in self.maps if m.regularised}
        atoms = self._atoms_beside(_LENGTH if self.dictionary.positions is not None else 0, beside)
        rows = sum(m.rows for m in self.maps if self.is_factor_b or m.factor != "B")
        tokens, width = self.dictionary.rows.shape
        if atoms.screen.device.type == "cpu" and planted_set_seconds(width, tokens, rows) > seconds:
            return None
        return float(measure_capacity(atoms, rows, seconds=seconds, seed=seed).types)

    def read(
        self,
        view: Observation,
        noise: Mapping[str, float],
        facts: RunFacts,
        errors: Mapping[str, Tensor] | None = None,
        *,
        clipped: bool = False,
    ) -> PursuitResult:
        """Return the types that explain the gradients of these maps.

        Args:
            view: the shared gradients.
            noise: standard deviation of what was added to each entry, by parameter.
            facts: of the run.
            errors: standard deviation of each entry's error, by parameter, if they differ.
            clipped: whether clipping by value has cut entries; all others must be explained then.

        Raises:
            UnusableObservation: the gradients cannot be read, see :meth:`SubspaceWords.run`.
        """
        gradients, levels, uneven = [], [], []
        every_token = False
        terms = view.gradients[-1].loss_terms
        beside: dict[str, Tensor] = {}
        declared = view.gradients[-1].noise_std  # without the rounding of stored weights
        dropout_noise = 0.0
        for linear in self.maps:
            g = whole_tensor(view.gradient(linear.name))
            g = g if linear.axis == 1 else g.T
            if not bool(g.isfinite().all()):
                raise UnusableObservation(f"the gradient of {linear.name} has NaN or infinity")
            if bool(g.any()):
                if linear.regularised or linear.name in terms:
                    if linear.name not in self._factors:
                        raise UnusableObservation(explain_weight_term(linear.name))
                    beside[linear.name] = self._factors[linear.name]
                gradients.append(g)
                every_token |= linear.name in self.known.lone_token_maps
                if errors is not None:
                    e = errors[linear.name]
                    uneven.append(e if linear.axis == 1 else e.T)
                variance = dropout_variance((*self.known.dropouts, *linear.dropouts))
                dropout_noise = math.sqrt(variance * float(g.double().square().mean()))
                levels.append(math.hypot(noise.get(linear.name, 0.0), dropout_noise))
        if not gradients:
            if any(m.factor == "A" for m in self.maps):
                raise NotYet(NO_GRADIENT_YET)
            raise UnusableObservation("the gradients of the first projections are all zero")
        rounding = _rounding([*(g.dtype for g in gradients), self.dictionary.rows.dtype], facts)
        positions = self.dictionary.count_positions(gradients, tuple(beside.values()))
        if uneven and self.is_factor_b:
            raise Inapplicable(
                "in an update of Adam, LoRA's B alone has too few directions to tell words apart"
            )
        find = self._finder(positions, rounding, beside)
        cause = "the rounding of what was shared"
        if clipped:
            cause = "what clipping by value left of the gradient"
            result = self._words(self._explain_clipped(gradients, uneven, find))
        elif uneven:
            cause = "what the optimizer's step left of the gradient"
            result = self._words(explain_uneven(gradients, uneven, find))
        else:
            cause = "what dropout adds" if dropout_noise else cause
            result = self._explain(gradients, positions, rounding, levels, beside)
            if positions and not result.certified and not any(levels):
                longer = positions * 8 // 5 + 8
                second = self._explain(gradients, longer, rounding, levels, beside)
                result = second if second.certified else result
            result = replace(self._words(result), certified=result.certified and every_token)
        if not len(result.types) and (uneven or not declared):
            raise UnusableObservation(f"no token stands out of {cause}")
        return result

    def _explain_clipped(
        self, gradients: Sequence[Tensor], errors: Sequence[Tensor], find: Find
    ) -> PursuitResult:
        """Return the types of rows with clipped entries: from unclipped rows, or from all rows.

        Raises:
            Inapplicable: neither explains all entries that were not clipped.
        """
        whole = [g[e.isfinite().all(1)] for g, e in zip(gradients, errors, strict=True)]
        uncut = [rows for rows in whole if bool(rows.any())]
        latest: list[Tensor] = []

        def keep(rows: Sequence[Tensor], noise: Sequence[float]) -> tuple[PursuitResult, Tensor]:
            result, atoms = find(rows, noise)
            latest[:] = [atoms]
            return result, atoms

        ways: list[Callable[[], PursuitResult]] = [lambda: explain_uneven(gradients, errors, keep)]
        if uncut:
            ways.insert(0, lambda: keep(uncut, [0.0] * len(uncut))[0])
        for way in ways:
            result = way()
            if unexplained_share(gradients, errors, latest[0]) <= _UNEXPLAINED:
                return replace(result, certified=False)
        raise Inapplicable(WHY_CUT)

    def _finder(self, positions: int, rounding: float, beside: Mapping[str, Tensor]) -> Find:
        """Return a function that explains rows, with the atoms used and those that are no words."""

        def find(rows: Sequence[Tensor], noise: Sequence[float]) -> tuple[PursuitResult, Tensor]:
            result = self._explain(rows, positions, rounding, noise, beside)
            atoms = self._atoms_beside(positions, beside)
            return result, torch.cat([atoms.rows(result.types), atoms.beside])

        return find

    def _words(self, result: PursuitResult) -> PursuitResult:
        """Return a result without the atoms that are no words."""
        tokens = len(self.dictionary.rows)
        words = result.types < tokens
        return PursuitResult(
            result.types[words],
            result.scores[:tokens],
            max(0.0, result.expected - int((~words).sum())),
            result.residual,
            result.certified,
        )

    def _atoms_beside(self, positions: int, beside: Mapping[str, Tensor]) -> Atoms:
        """Return the atoms with these first positions and rows projected off; the last are kept."""
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
        atoms = self._atoms_beside(positions, beside)
        shared = SharedRows.stack(gradients, atoms.beside, rounding=rounding, noise=noise)
        if beside and not any(noise) and shared.silent:
            raise NotYet(NO_GRADIENT_YET)
        room = atoms.width - len(atoms.beside)
        if len(shared.principal) >= room - 1:
            raise Inapplicable(
                f"what was shared fills all {room} directions of the input: more types (and "
                "positions) than can be told apart"
            )
        extra = atoms.screen.shape[0] - len(self._log_odds)
        odds = torch.cat([self._log_odds, self._log_odds.new_zeros(extra)])
        if not len(shared.principal):
            none = torch.empty(0, dtype=torch.long, device=odds.device)
            return PursuitResult(none, odds, 0.0, 1.0, False)
        return explain(atoms, shared, odds)


def _rounding(dtypes: Sequence[torch.dtype], facts: RunFacts) -> float:
    """Return the relative error of an entry.

    It is about a quarter of an epsilon for a gradient that was rounded once, and a whole one for
    the sums of single precision.
    """
    types = [*dtypes, *([facts.autocast] if facts.autocast is not None else [])]
    largest = max(torch.finfo(d).eps for d in types)
    single = torch.finfo(torch.float32).eps
    if largest <= single:
        reduced = torch.cuda.is_available() and torch.backends.cuda.matmul.allow_tf32
        return 2.0**-11 if reduced else single
    return largest / 4
