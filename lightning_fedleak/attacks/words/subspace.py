"""Word types from the row space of the first projections' gradients: LoRA, or whole."""

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
from lightning_fedleak.attacks.public_text import Given, PublicText
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

_TYPES_EXPECTED = 256.0
_PROBED = 32
_LENGTH = 32
_SAME = 5e-7
_ROUNDED = 4.0
_OPEN = 1e-3  # share of entries' norm, where others were cut: rounding leaves less, a type more
_AT_ONCE = 1024

NO_GRADIENT_YET = (
    "LoRA's A has no gradient until B (of AdaLoRA: E) has moved; with warm-up from 0 that is step 2"
)


class SubspaceWords(Attack):
    """The tokens whose inputs span the gradients of the first block's projections.

    Every row of the gradient of a linear map is a combination of the inputs that the map was given.
    The first block's queries, keys and values (whole, or a LoRA's A on them) read an input that the
    token alone determines, or the token and its position. So an honest but curious server, who
    knows the weights, asks which tokens' inputs the rows are made of. At full rank that is the span
    test of DAGER (Petrov et al. 2024, section 4.1); the few rows of a LoRA need a pursuit
    (:mod:`~lightning_fedleak.attacks.row_space.pursuit`). Nothing is learned and nothing but the
    model has to be known: the number of types comes out too.

    Which maps those are is found by running the model, so that parallel blocks, fused projections,
    factorised embeddings, encoders and encoder-decoders are read as well, and classifiers on them.
    Where source and target have vocabularies of their own, the source's words are named. Where
    texts share positions, block 1 tells types and not pairs of type and position.

    It reads single gradients, updates of SGD (with momentum and decay), and of one step of Adam or
    AdamW, where a round begins with a fresh optimizer. Of the first step of a LoRA, where B is
    zero, there is no result: A has no gradient then, and the r directions of B's tell next to
    nothing apart; the second step is looked at too. The last token of a causal text has no part in
    these gradients. Dropout before what is read is noise to it, as what a defence adds: the loudest
    tokens are named, and nothing is certified. Nor is it where queries and keys alone are trained,
    which do not show every token (:func:`~lightning_fedleak.attacks.row_space.linear_maps.\
lone_token_maps`), or one side alone of an encoder-decoder.

    Args:
        public_text: text like the clients', or ``"sampled"``, for how frequent tokens are. Helps
            where noise hides the rarer directions; without it all tokens are alike.
        tokenizer: for strings.
        capacity_seconds: that :meth:`prepare` may take to measure how many types can be told apart,
            on planted sets; 0 leaves it out. So does a large model on a CPU, where one set alone
            would take longer.
        seed: of sampled text, and of planted sets.
        name: as in the logs.
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
        public_text: Given | None = None,
        *,
        tokenizer: Any = None,
        capacity_seconds: float = 10.0,
        seed: int = 0,
        name: str | None = None,
    ) -> None:
        super().__init__(name)
        self.public_text = PublicText.parse(public_text, tokenizer)
        if capacity_seconds < 0:
            raise ValueError(f"capacity_seconds must not be negative, got {capacity_seconds}")
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
        """Learns the precision, and what made an update."""
        self._facts = facts

    def needs(self, anatomy: Anatomy) -> Surfaces:
        """The maps that read a known input: those that are trained, or else the widest's.

        Raises:
            ThreatModelError: no map of the model does.
        """
        inputs = self.inputs(anatomy)
        trained = [m.name for known in inputs for m in known.trainable_maps(anatomy)]
        if trained:
            return Surfaces(gradients=tuple(trained))
        return Surfaces(gradients=tuple(m.name for m in inputs[0].maps))

    def inputs(self, anatomy: Anatomy) -> tuple[KnownInput, ...]:
        """The known inputs of a model, the first to be read first.

        Raises:
            ThreatModelError: it has none.
        """
        if self._inputs is None or self._inputs[0] is not anatomy:
            maps = find_linear_maps(anatomy)
            if anatomy.target_rows is not None:  # a decoder's words are of another vocabulary
                maps = [m for m in maps if not _of_decoder(m.name)]
            found = find_known_inputs(anatomy, maps)
            self._inputs = (anatomy, tuple(sorted(found, key=_preferred(anatomy))))
            self._sides = _sides_read(anatomy)
        inputs = self._inputs[1]
        if not inputs:
            raise ThreatModelError(
                f"attack '{self.name}' reads linear maps whose input a token determines, and this "
                "model has none (are its first projections something else than nn.Linear?): "
                "remove the attack"
            )
        return inputs

    def prepare(self, anatomy: Anatomy) -> None:
        """Runs the model on every token, up to the maps that it reads.

        Raises:
            ValueError: the input of a map hangs on positions in a way that is not known.
        """
        odds = self._log_odds(anatomy)
        self._roles = self.needs(anatomy).gradients
        self._readable = []
        refused: list[str] = []
        for known in self.inputs(anatomy):
            maps = known.trainable_maps(anatomy)
            if not maps:
                continue
            try:
                dictionary = build_dictionary(anatomy, known, autocast=self._facts.autocast)
            except NotAdditive as error:
                refused.append(f"{maps[0].name}: {error}")
                continue
            readable = _Readable(known, maps, dictionary, odds)
            readable.follow(anatomy)
            self._readable.append(readable)
        if self._readable and self._capacity is None and self.capacity_seconds:
            first = self._readable[0]
            self._capacity = first.capacity(self.capacity_seconds, self.seed)
        if refused and not self._readable:
            raise ValueError(f"attack '{self.name}' cannot read {'; '.join(refused)}: remove it")

    def _log_odds(self, anatomy: Anatomy) -> Tensor:
        """(V,) of a token being in a batch of some hundred types."""
        size = vocabulary_size(anatomy)
        if self.public_text is None:
            counts = torch.ones(size)
        else:
            text = PublicText.resolve(self.public_text, anatomy, self.seed)
            ids = torch.cat(list(text.sentences))
            counts = torch.bincount(ids, minlength=size)[:size].float()
            counts += counts.sum().clamp_min(1) / size / 10
        expected = counts / counts.sum() * _TYPES_EXPECTED
        return expected.log().clamp(-12.0, 2.0).to(anatomy.device)

    def refresh(self, anatomy: Anatomy, step: int) -> None:
        """Follows embeddings and norms that have moved."""
        if self._facts.local_steps is not None:
            self._before = {
                m.name: whole_tensor(p).clone()
                for readable in self._readable
                for m in readable.maps
                if (p := anatomy.parameter(m.name)) is not None
            }
            self._stored = {name: rounding_error(p) for name, p in self._before.items()}
        trains_words = anatomy.trainable(EMBEDDING_WEIGHT)
        if trains_words or self._roles != self.needs(anatomy).gradients:
            self.prepare(anatomy)
            return
        if any(not readable.current(anatomy, self._facts.autocast) for readable in self._readable):
            self.prepare(anatomy)
            return
        for readable in self._readable:
            readable.follow(anatomy)

    @torch.no_grad()
    def run(self, view: Observation, query: Query | None = None) -> WordGuess:
        """Names the types whose inputs span what was shared.

        Returns:
            ``types`` the surest first, ``n_types`` as many as they are or, where noise leaves it
            open, as are expected; ``surface`` is ``"input"``.

        Raises:
            UnusableObservation: non-finite, all zero, more types than directions tell apart, or an
                update that is no sum of gradients.
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
        of_words = [r for r in self._readable if not r.of_b] or self._readable
        roles = [m.name for readable in of_words for m in readable.maps]
        uneven, errors = errors, entry_errors(snapshot, roles, self._facts, noise, errors)
        cut = errors is not uneven
        found: dict[bool, PursuitResult] = {}
        refusals: list[UnusableObservation] = []
        for readable in self._readable:
            side = readable.decoder
            if side in found and found[side].certified:
                continue
            if readable.of_b and side in found:
                continue
            try:
                if readable.of_b:
                    check_uncut(snapshot, [m.name for m in readable.maps], self._facts)
                said = readable.read(view, noise, self._facts, errors, cut=cut)
            except UnusableObservation as error:
                refusals.append(error)
                continue
            if side not in found or said.certified:
                found[side] = said
        if not found:
            kinds = {type(error) for error in refusals}
            why = "; ".join(dict.fromkeys(map(str, refusals)))
            if NotYet in kinds:
                raise next(error for error in refusals if isinstance(error, NotYet))
            raise Inapplicable(why) if kinds == {Inapplicable} else UnusableObservation(why)
        parts = list(found.values())
        sides = self._sides | {readable.decoder for readable in self._readable}
        return WordGuess(
            types=parts[0].types if len(parts) == 1 else _joined(parts),
            scores=torch.stack([p.scores for p in parts]).amax(0),
            n_types=sum(p.expected for p in parts),
            surface="input",
            certified=sides == found.keys() and all(p.certified for p in parts),
            capacity=self._capacity,
        )

    def alike(self, types: Tensor, share: float) -> Tensor:
        """Other tokens whose inputs differ from one of these, but by less than a share of its norm.

        Tokens whose inputs are equal are not among them.
        """
        found = []
        for readable in self._readable:
            if readable.of_b:
                continue
            rows = readable.dictionary.rows
            own = rows[types.to(rows.device)].double()
            unit = nn.functional.normalize(own.float(), dim=1)
            for start in range(0, len(rows), _AT_ONCE):
                part = rows[start : start + _AT_ONCE]
                near = nn.functional.normalize(part.float(), dim=1) @ unit.T > 1 - share**2 - 1e-6
                which, of = near.nonzero(as_tuple=True)
                apart = (part[which].double() - own[of]).norm(dim=1) / own[of].norm(dim=1)
                found.append(start + which[(apart > 0) & (apart < share)].to(types.device))
        others = set(torch.cat([types[:0], *found]).tolist()) - set(types.tolist())
        return torch.tensor(sorted(others), dtype=types.dtype, device=types.device)

    def check_updates(self, facts: RunFacts) -> None:
        """Refuses rounds whose rows are no combinations of inputs, nor can be made so.

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
        """An update as gradients, and the errors of their entries where they are uneven.

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
        held = {n: update.tensors[n] for n in names if n in update.tensors}
        if steps.linear:
            plain = {n: steps.without_decay(t, self._before[n], rate) for n, t in held.items()}
            scale = update.local_steps**0.5 / rate
            moved = {n: _moved(t, torch.tensor(self._stored[n] * scale)) for n, t in plain.items()}
            return replace(update, tensors=moved), None
        added = update.noise_std
        both = {n: steps.inverted(t, self._before[n], rate, added) for n, t in held.items()}
        gradients = {n: _moved(gradient, error) for n, (gradient, error) in both.items()}
        errors = {n: error for n, (_, error) in both.items()}
        of_a = {m.name for known in self._readable for m in known.maps if m.factor == "A"}
        # Zeros of infinite errors are of a gradient, of which signs alone are seen.
        seen = [gradients[n].any() | errors[n].isinf().any() for n in of_a & held.keys()]
        if seen and not any(seen):
            raise NotYet(NO_GRADIENT_YET)
        if all(_hidden(gradients[n], errors[n]) for n in errors):
            raise UnusableObservation(
                f"the step of {name} shows the signs of a gradient alone here: a defence's noise "
                "hides its sizes, or the rounding of the stored weights (half precision, or a "
                "small learning rate); measure the gradients of single steps (leave local_steps "
                "out)"
            )
        return replace(update, tensors=gradients), errors

    def state_dict(self) -> dict[str, Tensor]:
        """How many types can be told apart; what tokens look like follows from the model."""
        if self._capacity is None:
            return {}
        return {"capacity": torch.tensor(self._capacity, dtype=torch.float64)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Takes back what :meth:`state_dict` gave."""
        if "capacity" in state:
            self._capacity = float(state["capacity"])

    def calibration_inputs(self) -> dict[str, object]:
        """What planted sets hang on."""
        return {"seed": self.seed, "capacity_seconds": self.capacity_seconds}

    def config(self) -> dict[str, object]:
        """Settings that name this attack in reports."""
        text = self.public_text
        return {
            "public_text": text.digest if isinstance(text, PublicText) else text,
            "seed": self.seed,
        }


def _moved(gradient: Tensor, error: Tensor) -> Tensor:
    """A gradient; zeros where decay may have moved the weights alone, and the rest is rounding.

    So it is with LoRA's A in a first step. Of Adam's own decay no entry shows its size.
    """
    if not bool(error.isfinite().any()):
        return torch.zeros_like(gradient)
    known = error.isfinite() & (error > 0)
    ratio = (gradient / error.to(gradient)).where(known.to(gradient.device), 0.0)
    size = float(ratio.square().sum()) / max(1, int(known.expand_as(gradient).sum()))
    return torch.zeros_like(gradient) if size <= _ROUNDED else gradient


def _hidden(gradient: Tensor, error: Tensor) -> bool:
    """Whether hardly an entry is known to its size."""
    return bool((error < 0.3 * gradient.abs()).double().mean() < 0.5)


def _joined(parts: Sequence[PursuitResult]) -> Tensor:
    """Types of several sides, each once."""
    both = torch.cat([p.types for p in parts])
    return torch.tensor(list(dict.fromkeys(both.tolist())), device=both.device)


def _sides_read(anatomy: Anatomy) -> frozenset[bool]:
    """Sides of an encoder-decoder (True: the decoder) that read words which the other does not.

    A classifier's decoder reads the encoder's words.
    """
    if anatomy.kind == "seq2seq" and anatomy.target_rows is None:
        return frozenset((False, True))
    return frozenset((False,)) if is_encoder_decoder(without_peft(anatomy.model)) else frozenset()


def _of_decoder(name: str) -> bool:
    return ".decoder." in f".{name}"


def _preferred(anatomy: Anatomy) -> Any:
    """Order in which inputs are read.

    B's last, those that show every token first, as wide as the model first, then the narrower.
    """

    def key(known: KnownInput) -> tuple[bool, bool, bool, int]:
        of_b = all(m.factor == "B" for m in known.maps)
        return of_b, not known.lone_token_maps, known.width != anatomy.hidden_size, known.width

    return key


class _Readable:
    """A known input whose maps are trained, with what every token looks like there."""

    def __init__(
        self,
        known: KnownInput,
        maps: Sequence[LinearMap],
        dictionary: Dictionary,
        log_odds: Tensor,
    ) -> None:
        self.known = known
        self.maps = tuple(maps)
        self.dictionary = dictionary
        self.decoder = _of_decoder(maps[0].name)
        self.of_b = all(m.factor == "B" for m in maps)
        self._log_odds = log_odds
        self._factors: dict[str, Tensor] = {}
        self._atoms: tuple[tuple[int, frozenset[str]], Atoms] | None = None

    def follow(self, anatomy: Anatomy) -> None:
        """Keeps a copy of the factors A as they are now, which a term of the loss may share."""
        self._factors = factor_rows(anatomy, self.maps)
        if self._atoms is not None and self._atoms[0][1]:
            self._atoms = None

    def current(self, anatomy: Anatomy, autocast: torch.dtype | None) -> bool:
        """Whether some tokens look as they did."""
        step = max(1, len(self.dictionary.rows) // _PROBED)
        ids = torch.arange(0, len(self.dictionary.rows), step, device=anatomy.device)
        now = input_rows(anatomy, self.known, ids[:, None], autocast=autocast)[:, 0]
        moved = (now - self.dictionary.rows[ids]).abs().max()
        return float(moved) <= _SAME * float(now.abs().max())

    def capacity(self, seconds: float, seed: int) -> float | None:
        """How many types its rows can tell apart; None where one set alone would take longer.

        Positions, where there are any, count as known: those of texts of 32 tokens.
        """
        beside = {m.name: self._factors[m.name] for m in self.maps if m.regularised}
        atoms = self._atoms_beside(_LENGTH if self.dictionary.positions is not None else 0, beside)
        rows = sum(m.rows for m in self.maps if self.of_b or m.factor != "B")
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
        cut: bool = False,
    ) -> PursuitResult:
        """Explains what these maps shared.

        Args:
            view: what was shared.
            noise: standard deviation of what was added to each entry, by parameter.
            facts: of the run.
            errors: standard deviation of each entry's error, by parameter, where they differ.
            cut: clipping by value has cut entries to one size; the others must all be explained.

        Raises:
            UnusableObservation: as :meth:`SubspaceWords.run`.
        """
        gradients, levels, uneven = [], [], []
        every_token = False
        terms = view.gradients[-1].loss_terms
        beside: dict[str, Tensor] = {}
        declared = view.gradients[-1].noise_std  # not what rounding of stored weights adds
        dropped = 0.0
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
                dropped = math.sqrt(variance * float(g.double().square().mean()))
                levels.append(math.hypot(noise.get(linear.name, 0.0), dropped))
        if not gradients:
            if any(m.factor == "A" for m in self.maps):
                raise NotYet(NO_GRADIENT_YET)
            raise UnusableObservation("the gradients of the first projections are all zero")
        rounding = _rounding([*(g.dtype for g in gradients), self.dictionary.rows.dtype], facts)
        seen = self.dictionary.count_positions(gradients, tuple(beside.values()))
        if uneven and self.of_b:
            raise Inapplicable(
                "of an update of Adam's, LoRA's B alone has too few directions to tell words apart"
            )
        find = self._finder(seen, rounding, beside)
        hidden_by = "the rounding of what was shared"
        if cut:
            hidden_by = "what clipping by value left of the gradient"
            found = self._words(self._past_cuts(gradients, uneven, find))
        elif uneven:
            hidden_by = "what the optimizer's step left of the gradient"
            found = self._words(explain_uneven(gradients, uneven, find))
        else:
            hidden_by = "what dropout adds" if dropped else hidden_by
            found = self._explained(gradients, seen, rounding, levels, beside)
            if seen and not found.certified and not any(levels):
                longer = seen * 8 // 5 + 8
                further = self._explained(gradients, longer, rounding, levels, beside)
                found = further if further.certified else found
            found = replace(self._words(found), certified=found.certified and every_token)
        if not len(found.types) and (uneven or not declared):
            raise UnusableObservation(f"no token stands out of {hidden_by}")
        return found

    def _past_cuts(
        self, gradients: Sequence[Tensor], errors: Sequence[Tensor], find: Find
    ) -> PursuitResult:
        """Explains rows with entries that were cut: by rows that have none, or else by turns.

        Raises:
            Inapplicable: neither explains all entries that were not cut.
        """
        kept = [g[e.isfinite().all(1)] for g, e in zip(gradients, errors, strict=True)]
        uncut = [rows for rows in kept if bool(rows.any())]
        atoms: list[Tensor] = []

        def keep(rows: Sequence[Tensor], noise: Sequence[float]) -> tuple[PursuitResult, Tensor]:
            found, named = find(rows, noise)
            atoms[:] = [named]
            return found, named

        ways: list[Callable[[], PursuitResult]] = [lambda: explain_uneven(gradients, errors, keep)]
        if uncut:
            ways.insert(0, lambda: keep(uncut, [0.0] * len(uncut))[0])
        for way in ways:
            found = way()
            if unexplained_share(gradients, errors, atoms[0]) <= _OPEN:
                return replace(found, certified=False)
        raise Inapplicable(WHY_CUT)

    def _finder(self, positions: int, rounding: float, beside: Mapping[str, Tensor]) -> Find:
        """Explains rows, and gives the atoms that do, those that are no words among them."""

        def find(rows: Sequence[Tensor], noise: Sequence[float]) -> tuple[PursuitResult, Tensor]:
            found = self._explained(rows, positions, rounding, noise, beside)
            atoms = self._atoms_beside(positions, beside)
            return found, torch.cat([atoms.rows(found.types), atoms.beside])

        return find

    def _words(self, found: PursuitResult) -> PursuitResult:
        """What was found, without what is no word."""
        tokens = len(self.dictionary.rows)
        words = found.types < tokens
        return PursuitResult(
            found.types[words],
            found.scores[:tokens],
            max(0.0, found.expected - int((~words).sum())),
            found.residual,
            found.certified,
        )

    def _atoms_beside(self, positions: int, beside: Mapping[str, Tensor]) -> Atoms:
        """The atoms with these first positions and these rows projected off; the last are kept."""
        key = (positions, frozenset(beside))
        if self._atoms is None or self._atoms[0] != key:
            self._atoms = (key, Atoms(*self.dictionary.atoms(positions, tuple(beside.values()))))
        return self._atoms[1]

    def _explained(
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
    """Relative error of an entry: of a gradient rounded once it is about a quarter of an epsilon.

    Single precision's own sums make it a whole one.
    """
    known = [*dtypes, *([facts.autocast] if facts.autocast is not None else [])]
    largest = max(torch.finfo(d).eps for d in known)
    single = torch.finfo(torch.float32).eps
    if largest <= single:
        reduced = torch.cuda.is_available() and torch.backends.cuda.matmul.allow_tf32
        return 2.0**-11 if reduced else single
    return largest / 4
