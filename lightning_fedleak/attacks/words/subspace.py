"""Word types from the row space of the gradients of the first block's projections.

The *types* of a batch are its distinct tokens. :class:`SubspaceWords` prepares the input vector of
every token of the vocabulary at these projections. From an observation it first computes gradients
(an update of SGD or of one step of Adam is undone). It then finds the tokens whose inputs span the
gradients' rows, with :class:`~lightning_fedleak.attacks.row_space.explanation.ReadableInput`. The
types of an encoder and of its decoder are recovered separately, and their results are merged.

A token is *silent* if it leaves no trace in the gradients, because its input is zero or equals that
of another type. A result is *certified* if no type of the batch can be missing: the rows are fully
explained, and no token is silent.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fedleak.attacks import base, row_space
from lightning_fedleak.attacks.local_steps import (
    LocalSteps,
    check_compressed,
    copy_weights,
    rounding_error,
)
from lightning_fedleak.attacks.public_text import PublicText, TextSource, do_once
from lightning_fedleak.model.anatomy import Anatomy, is_encoder_decoder, without_peft
from lightning_fedleak.model.snapshots import (
    Inapplicable,
    NotYet,
    Observation,
    UpdateSnapshot,
    whole_tensor,
)
from lightning_fedleak.validate import check_number

_PRIOR_TYPES = 256.0  # types that a batch is expected to have, for the prior odds; not tuned
_BATCH_TYPES = 300.0  # types of a batch of 8 x 64 tokens of natural text
_ROUNDED = 4.0  # mean square of entries over their errors up to which they are rounding; not tuned
_MAX_ENTRY_ERROR = 0.3  # relative error up to which an entry's size counts as known; not tuned
_ROWS_AT_ONCE = 1024  # rows compared at once, which bounds the memory


class SubspaceWords(base.Attack):
    """The tokens whose inputs span the gradients of the first block's projections.

    Every row of the gradient of a linear map is a combination of its inputs. The first block's
    queries, keys and values (whole, or a LoRA's A on them) read an input that the token determines,
    or the token and its position. An honest but curious server knows the weights and so these
    inputs, and finds which of them the rows are made of: at full rank by the span test of DAGER
    (Petrov et al. 2024, section 4.1), for the few rows of a LoRA by a pursuit
    (:mod:`~lightning_fedleak.attacks.row_space.pursuit`). It learns nothing from data. If a
    result is certified, no type is missing. It is not certified if some token would leave no trace,
    because its input is zero (a padding row) or equals that of a type. If source and target have
    separate vocabularies, the attack names the source's words.

    It reads single gradients, and weight changes of rounds of local steps: of SGD, or of one step
    of Adam or AdamW with a fresh optimizer. The first step of a LoRA has no result, because A has
    no gradient while B is zero; the second step has one. The last token of a causal text has no
    part in these gradients. Dropout and a defence's noise hide tokens: only those with the largest
    traces are named, and nothing is certified. Nor is anything certified if only queries and keys
    are trained (:func:`~lightning_fedleak.attacks.row_space.linear_maps.lone_token_maps`), or only
    one side of an encoder-decoder.

    Args:
        public_text: text like the clients', or ``"sampled"``, for the frequencies of tokens. It
            helps where noise hides rare tokens; without it all tokens are equally likely.
        tokenizer: The tokenizer of strings.
        capacity_seconds: time in which :meth:`prepare` measures how many types can be
            distinguished, on simulated gradients of random sets of types ("planted sets"). It is
            not measured if this is 0, or if one set takes longer on a CPU.
        seed: The seed of sampled text and of planted sets.
        name: The name in the logs.

    Raises:
        ValueError: ``capacity_seconds`` is negative, or the text cannot be read.

    Examples:
        >>> import torch
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> from lightning_fedleak import SubspaceWords
        >>> from lightning_fedleak.model.anatomy import find_anatomy
        >>> from lightning_fedleak.model.snapshots import GradientSnapshot, Observation, Stage
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

    threat_model = base.ThreatModel.create(
        "an honest but curious server that reads one update of the first block's projections, or "
        "of adapters on them",
        base.Capability.KNOWS_MODEL,
    )
    default_name = "subspace_words"
    config_names = ("public_text", "seed")
    needs_float64 = True
    reads_adaptive_updates = True  # of one step of Adam or AdamW, which is undone
    reads_compressed = frozenset(("topk", "int8", "low_rank"))
    restores_fully = False  # the inputs are prepared again after a resume
    gathers = True  # it reads single layers of a sharded model, which is never gathered as a whole

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
        self.capacity_seconds = check_number("capacity_seconds", capacity_seconds, at_least=0)
        self.seed = seed
        self._capacity: float | None = None
        self._before: dict[str, Tensor] = {}  # the weights that the current round began with
        self._inputs = row_space.PerMaps(self._find_inputs)
        self._sides: frozenset[bool] = frozenset()  # see _sides_with_words
        self._readable: list[row_space.ReadableInput] = []

    def needs(self, anatomy: Anatomy) -> base.Surfaces:
        """Return the trained maps that read a known input; if none is trained, those of one input.

        Raises:
            ValueError: the model has no known input.
        """
        inputs = self.inputs(anatomy)
        names = [m.name for known_input in inputs for m in known_input.trainable_maps(anatomy)]
        return base.Surfaces(gradients=tuple(names or [m.name for m in inputs[0].maps]))

    def inputs(self, anatomy: Anatomy) -> tuple[row_space.KnownInput, ...]:
        """Return the known inputs of a model, in the order in which they are read.

        A known input is a projection's input that the token (and its position) determines.

        Raises:
            ValueError: the model has none.
        """
        inputs = self._inputs.get(anatomy)
        if not inputs:
            raise ValueError(
                f"attack '{self.name}' finds no nn.Linear whose input a token determines and whose "
                "weight is a parameter (not pruned or parametrized): remove it"
            )
        return inputs

    def _find_inputs(
        self, anatomy: Anatomy, maps: Sequence[row_space.LinearMap]
    ) -> tuple[row_space.KnownInput, ...]:
        if anatomy.target_rows is not None:  # a decoder's words are of another vocabulary
            maps = [m for m in maps if not row_space.in_decoder(m.name)]

        def reading_order(known_input: row_space.KnownInput) -> tuple[bool, bool, bool, int]:
            """Return a sort key, by which inputs that show more come first."""
            return (
                all(m.factor == "B" for m in known_input.maps),  # last: they change at every step
                not known_input.lone_token_maps,  # first: they show every token
                known_input.width != anatomy.hidden_size,  # first: whole hidden states
                known_input.width,
            )

        self._sides = _sides_with_words(anatomy)
        key = ("known inputs", id(anatomy.root), tuple(m.name for m in maps))
        found = do_once(key, lambda: row_space.find_known_inputs(anatomy, maps), subject=anatomy)
        return tuple(sorted(found, key=reading_order))

    def estimate(self, anatomy: Anatomy, texts: int) -> float:
        """Return an estimate of the seconds of ``run`` on 8 x 64 tokens, whatever ``texts`` is."""
        known_input = self.inputs(anatomy)[0]
        maps = known_input.trainable_maps(anatomy) or known_input.maps
        rows = sum(m.rows for m in maps if m.factor != "B") or known_input.width  # B reads r
        tokens = row_space.vocabulary_size(anatomy)
        sizes = known_input.width, tokens, rows, min(_BATCH_TYPES, tokens / 2)
        return row_space.pursuit_seconds(anatomy.device, *sizes)

    def n_distinct(self, anatomy: Anatomy) -> float | None:
        """Return the measured or the predicted capacity, the larger one, of the inputs it reads."""
        predicted = [
            row_space.predict_capacity(r.dictionary.rows.shape[1], len(r.dictionary.rows), r.n_rows)
            for r in self._readable
        ]
        return max([*predicted, self._capacity or 0.0])

    def prepare(self, anatomy: Anatomy) -> None:
        """Compute the input of every token at the maps that are read, and measure the capacity.

        Raises:
            ValueError: the input of every map depends on positions in an unknown way.
        """
        self._readable = []
        self._prepare_inputs(anatomy, self._log_odds(anatomy))
        if self._readable and self._capacity is None and self.capacity_seconds:
            self._capacity = self._readable[0].capacity(self.capacity_seconds, self.seed)

    def _prepare_inputs(self, anatomy: Anatomy, odds: Tensor) -> None:
        """Prepare the inputs, or reuse those that another attack has prepared for this model."""
        label, trained = PublicText.label(self.public_text), tuple(anatomy.trainable_names())
        key = ("inputs", id(anatomy.root), trained, label, self.seed, self._facts.autocast)
        self._readable = do_once(key, lambda: self._updated_inputs(anatomy, odds), subject=anatomy)

    def _updated_inputs(self, anatomy: Anatomy, odds: Tensor) -> list[row_space.ReadableInput]:
        """Update the prepared inputs to the current model, prepare new ones, and return all.

        The input of a factor B changes with A at every step. It is computed from A's input, but
        only if it is read.
        """
        current = {readable.known_input.reader: readable for readable in self._readable}
        autocast = self._facts.autocast
        inputs: list[row_space.ReadableInput] = []
        refused: list[str] = []
        for known_input in self.inputs(anatomy):
            maps = known_input.trainable_maps(anatomy)
            if not maps:
                continue
            name = maps[0].name.replace("lora_B", "lora_A")  # the factor A before a factor B
            before = [r for r in inputs if name in (m.name for m in r.known_input.maps)]
            factor = anatomy.parameter(name) if before else None
            readable = current.pop(known_input.reader, None)
            try:
                if factor is not None:
                    copy, source = whole_tensor(factor).detach().clone(), before[0].dictionary
                    readable = row_space.ReadableInput(known_input, maps, source, odds, copy)
                elif readable is not None:
                    readable.follow(anatomy, known_input, maps, autocast)
                else:
                    dictionary = row_space.build_dictionary(anatomy, known_input, autocast=autocast)
                    readable = row_space.ReadableInput(known_input, maps, dictionary, odds)
                    readable.store_factors(anatomy)
            except row_space.NotAdditive as error:
                refused.append(f"{maps[0].name}: {error}")
                continue
            inputs.append(readable)
        if refused and not inputs:
            raise ValueError(f"attack '{self.name}' cannot read {'; '.join(refused)}: remove it")
        return inputs

    def _log_odds(self, anatomy: Anatomy) -> Tensor:
        """Return (V,) log odds that each token is in a batch of :data:`_PRIOR_TYPES` types."""
        size = row_space.vocabulary_size(anatomy)
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
        """Update the inputs to the current weights, and store the weights that start a round."""
        odds = self._readable[0].log_odds if self._readable else None
        if odds is None or len(odds) != row_space.vocabulary_size(anatomy):
            self.prepare(anatomy)
        else:
            self._prepare_inputs(anatomy, odds)
        if self._facts.local_steps is not None:
            names = [m.name for readable in self._readable for m in readable.maps]
            self._before = copy_weights(anatomy, names)

    @torch.no_grad()
    def run(self, view: Observation, query: base.Query | None = None) -> base.WordGuess:
        """Return the types whose inputs span the shared gradients.

        Returns:
            ``types`` in order of descending certainty. ``n_types`` is their number or, with noise,
            the expected number; it is NaN if there may be more types than the rows can distinguish.
            ``surface`` is ``"input"``.

        Raises:
            UnusableObservation: the gradient is non-finite or all zero, has more types than its
                rows can distinguish, or is an update that is no sum of gradients; or no map that
                reads a known input is trained.
        """
        if not self._readable:
            raise base.UnusableObservation("no map whose input a token determines is trained")
        snapshot = view.gradients[-1]
        if isinstance(snapshot, UpdateSnapshot):  # undone by this attack's own copy of the weights
            return self._read(view)
        label = PublicText.label(self.public_text)
        key = ("words", id(snapshot), label, self.seed, self._facts.autocast)
        guess = do_once(key, lambda: self._read(view), subject=snapshot)
        return replace(guess, capacity=self._capacity or None)

    def _read(self, view: Observation) -> base.WordGuess:
        snapshot = view.gradients[-1]
        if math.isnan(snapshot.noise_std):
            raise base.UnusableObservation("a defence does not say how much noise it adds")
        noise = {role: snapshot.noise_on(role) for role in snapshot.tensors}
        errors: Mapping[str, Tensor] | None = None
        if isinstance(snapshot, UpdateSnapshot):
            snapshot, errors = self._as_gradients(snapshot)
            view = Observation((snapshot,))
            if errors is None:
                stored = self._stored_errors(snapshot)
                noise |= {
                    name: math.hypot(noise.get(name, 0.0), error) for name, error in stored.items()
                }
        results = self._read_sides(view, noise, errors)
        # A side whose rows are not fully explained has ``silent=None``, and cannot be certified. A
        # guess is complete if each side with words has a result, and all of them are explained.
        parts = list(results.values())
        types = torch.cat([p.types for p in parts])
        sides = self._sides | {readable.decoder for readable in self._readable}
        silent = [p.silent for p in parts if p.silent is not None]
        complete = sides == results.keys() and len(silent) == len(parts)
        return base.WordGuess(
            types=types.new_tensor(list(dict.fromkeys(types.tolist()))),
            scores=torch.stack([p.scores for p in parts]).amax(0),
            n_types=sum(p.expected for p in parts),
            surface="input",
            certified=complete and not any(map(len, silent)),
            capacity=self._capacity or None,  # 0: no planted set was found in the time
            silent=torch.unique(torch.cat(silent)) if complete else None,
        )

    def _read_sides(
        self, view: Observation, noise: Mapping[str, float], errors: Mapping[str, Tensor] | None
    ) -> dict[bool, row_space.PursuitResult]:
        """Return a result for each side of an encoder-decoder (True: the decoder) that is read."""
        results: dict[bool, row_space.PursuitResult] = {}
        refusals: list[base.UnusableObservation] = []
        for readable in self._readable:
            best = results.get(readable.decoder)
            # A LoRA's B distinguishes fewer types than its width. It adds to A if that has noise.
            evident = -1 if best is None else best.evident
            is_narrow = readable.is_factor_b and evident >= readable.known_input.width
            if best is not None and (best.silent is not None or is_narrow):
                continue
            try:
                result = readable.read(view, noise, self._facts.autocast, errors)
            except base.UnusableObservation as error:
                refusals.append(error)
                continue
            if readable.is_factor_b and not any(noise.values()):
                # Nearly as many types as B's width, of which some fit by chance.
                by_chance = best is not None and math.isnan(result.expected)
                if by_chance or (refusals and not len(result.types)):  # A's rows will name some
                    continue
            if best is not None and readable.is_factor_b:  # A's rows hold more than B explains
                result = replace(result, certified=False, silent=None)
            if result.silent is not None or result.evident > evident:
                results[readable.decoder] = result
        if not results:
            raise _join_refusals(refusals)
        return results

    def similar_tokens(self, types: Tensor, share: float, silent: Tensor | None = None) -> Tensor:
        """Return tokens outside ``types`` whose input nearly equals that of one of ``types``.

        They may be in the batch with hardly a trace of their own, so that an attack on whole texts
        tries them too. Tokens whose input is equal to that of a type are not among them.

        Args:
            types: (k,) token ids.
            share: The maximal distance of the inputs, as a share of the norm of the type's input.
            silent: (m,) tokens that leave no trace. Those whose input equals that of no type are
                added to the result.
        """
        similar, alone = [], types[:0] if silent is None else silent.to(types)
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
                tokens = (start + i).to(types.device)
                alone = alone[~torch.isin(alone, tokens[(distance == 0).to(types.device)])]
                is_similar = (distance > 0) & (distance < share)
                similar.append(tokens[is_similar.to(types.device)])
        further = set(torch.cat([alone, *similar]).tolist()) - set(types.tolist())
        return torch.tensor(sorted(further), dtype=types.dtype, device=types.device)

    def check_updates(self, facts: base.RunFacts) -> None:
        """Raise an error for rounds whose updates cannot be converted to combinations of inputs.

        Raises:
            Inapplicable: several steps of an adaptive optimizer, or a compression after anything
                but plain SGD.
        """
        check_compressed(facts)
        steps = LocalSteps.from_facts(facts)
        if steps is not None and not steps.linear and not steps.invertible:
            raise Inapplicable(
                f"rounds of {steps.optimizer.__name__} are no combinations of inputs: omit "
                f"local_steps{', or use local_steps=1' * (steps.steps > 1)}"
            )

    def _as_gradients(
        self, update: UpdateSnapshot
    ) -> tuple[UpdateSnapshot, Mapping[str, Tensor] | None]:
        """Convert an update to gradients; return them and, for Adam, their entries' errors."""
        self.check_updates(self._facts)
        steps = LocalSteps.from_facts(self._facts)
        if steps is None:
            return update, None
        steps.check_fresh(update.fresh)
        check_compressed(self._facts, update.compression != "")
        if steps.linear and not steps.settings.get("weight_decay"):
            return update, None
        names = [m.name for readable in self._readable for m in readable.maps]
        shared = {n: update.tensors[n] for n in names if n in update.tensors}
        if not steps.linear:
            return self._invert(update, shared, steps)
        stored = self._stored_errors(update)
        gradients = {}
        for name, tensor in shared.items():
            plain = steps.without_decay(tensor, self._before[name], update.learning_rate)
            gradients[name] = _zero_if_rounding(plain, torch.tensor(stored[name]))
        return replace(update, tensors=gradients), None

    def _stored_errors(self, update: UpdateSnapshot) -> dict[str, float]:
        """Return the standard deviation that the rounding of stored weights adds to an entry.

        It is in units of a sum of gradients, by parameter. Weights are rounded in every step, and
        once more where a compressed update is added to them.
        """
        scale = (update.local_steps + bool(update.compression)) ** 0.5 / update.learning_rate
        return {name: rounding_error(weight) * scale for name, weight in self._before.items()}

    def _invert(
        self, update: UpdateSnapshot, shared: Mapping[str, Tensor], steps: LocalSteps
    ) -> tuple[UpdateSnapshot, Mapping[str, Tensor]]:
        """Return the gradients behind a first step of Adam, and the errors of their entries."""
        gradients, errors = {}, {}
        for name, tensor in shared.items():
            gradient, errors[name] = steps.invert(
                tensor, self._before[name], update.learning_rate, update.noise_std
            )
            gradients[name] = _zero_if_rounding(gradient, errors[name])
        factors = {m.name for r in self._readable for m in r.maps if m.factor == "A"}
        # An entry with an infinite error has a gradient too: only its sign is known.
        trained = [gradients[n].any() | errors[n].isinf().any() for n in factors & shared.keys()]
        if trained and not any(trained):
            row_space.refuse_zeros(m for r in self._readable for m in r.maps)
        sizes = (errors[n] < _MAX_ENTRY_ERROR * gradients[n].abs() for n in shared)
        if all(bool(size_known.double().mean() < 0.5) for size_known in sizes):
            raise base.UnusableObservation(
                "noise or rounding hides all but signs of the step: omit local_steps"
            )
        return replace(update, tensors=gradients), errors

    def state_dict(self) -> dict[str, Tensor]:
        """Return the measured capacity; all other state follows from the model."""
        if self._capacity is None:
            return {}
        return {"capacity": torch.tensor(self._capacity, dtype=torch.float64)}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what :meth:`state_dict` returned."""
        if "capacity" in state:
            self._capacity = float(state["capacity"])


def _zero_if_rounding(gradient: Tensor, error: Tensor) -> Tensor:
    """Return a gradient, or zeros if its entries are no larger than their errors explain.

    This is so for LoRA's A in a first step, which only decay and rounding have changed. Only
    entries with a finite error above 0 are compared; the result is zeros too if there are none.
    """
    if not bool(error.isfinite().any()):
        return torch.zeros_like(gradient)
    measured = error.isfinite() & (error > 0)
    ratio = (gradient / error.to(gradient)).where(measured.to(gradient.device), 0.0)
    mean_square = float(ratio.square().sum()) / max(1, int(measured.expand_as(gradient).sum()))
    return torch.zeros_like(gradient) if mean_square <= _ROUNDED else gradient


def _join_refusals(refusals: Sequence[base.UnusableObservation]) -> base.UnusableObservation:
    """Return one error for an observation from which no input can be read, with all reasons."""
    kinds = {type(error) for error in refusals}
    if NotYet in kinds:
        return next(error for error in refusals if isinstance(error, NotYet))
    kind = Inapplicable if kinds == {Inapplicable} else base.UnusableObservation
    return kind("; ".join(dict.fromkeys(map(str, refusals))))


def _sides_with_words(anatomy: Anatomy) -> frozenset[bool]:
    """Return the sides of an encoder-decoder (True: the decoder) whose words are to be recovered.

    The set is empty for other models. A classifier's decoder reads the encoder's words, and a
    decoder with a vocabulary of its own is not read.
    """
    if anatomy.kind == "seq2seq" and anatomy.target_rows is None:
        return frozenset((False, True))
    return frozenset((False,)) if is_encoder_decoder(without_peft(anatomy.model)) else frozenset()
