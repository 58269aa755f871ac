"""Word types from the output head's gradient, projected along the hidden states of public text."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_fedleak.anatomy import HEAD_WEIGHT, Anatomy
from lightning_fedleak.attacks.base import (
    Attack,
    Query,
    RunFacts,
    Surfaces,
    UnusableObservation,
    WordGuess,
)
from lightning_fedleak.attacks.clipping import ROUNDED, cut_size
from lightning_fedleak.attacks.local_steps import LocalSteps
from lightning_fedleak.attacks.public_text import Given, PublicText
from lightning_fedleak.attacks.words.aligned_direction import turned, turned_on_long_rows
from lightning_fedleak.attacks.words.aligned_readout import Rehearsed, best_count, rehearse
from lightning_fedleak.attacks.words.aligned_rows import (
    ExpectedRows,
    RowSummary,
    Units,
    plausible,
    rounding_error,
    row_features,
    separating_direction,
    significant,
)
from lightning_fedleak.attacks.words.aligned_updates import (
    comparable,
    rehearse_updates,
    update_features,
)
from lightning_fedleak.attacks.words.public_gradients import (
    GradientParts,
    gradient_parts,
    head_of,
    head_surface,
    hidden_states_of,
)
from lightning_fedleak.batches import TokenBatch
from lightning_fedleak.progress import track
from lightning_fedleak.snapshots import (
    GradientSnapshot,
    Observation,
    UpdateSnapshot,
    whole_tensor,
)
from lightning_fedleak.threats import Capability, ThreatModel

LENGTHS = (8, 12, 16, 25, 50, 100)
_SIGN_TOKENS = 2048
_ONE_SIDED = 0.95
_LONGEST = 512
"""Rows that show whether entries were cut to one size: those of used types, the longest."""
_RULED_OUT = -30.0
_NOT_OF_LORA = (
    "updates of {} of a LoRA on the head are not rehearsed: measure the gradients of single steps "
    "(leave local_steps out)"
)
_TEXTS = (1, 2, 4, 8, 16, 32)
_TOKENS = 1600


class AlignedFlatChat(Attack):
    """Flattening along a direction on which every hidden state is positive.

    Row t of the head's gradient is ``sum_i (p_i(t) - [y_i = t]) h_i``. FLATCHAT sums its columns,
    which weighs token i by ``sum(h_i)``, of either sign. With a direction u on which the hidden
    states of public text are all positive, a row's projection is negative only if the type was
    used, and it is for every used type whose own predicted mass does not outweigh it. So
    ``readout="sign"`` names the rows with a negative projection (further from zero than noise on
    the update explains, where a defence added some): the number of types is not asked for. u comes
    from public text and is then turned until the small rows of the update itself are positive
    (:mod:`~lightning_fedleak.attacks.words.aligned_direction`), since the hidden states of other
    text, or of a model that training has moved, may lie elsewhere. No direction helps a model whose
    hidden states fill more than a half-space; ``prepare`` warns if fewer than 95% of the public
    ones are positive on u, and ``"learned"`` is the readout to use then.

    What the sign misses are common words, predicted more often than they occur. ``"learned"``
    compares each row with the one that public text leads to expect of an unused type (predicted
    mass by cluster of hidden states, refitted to the update on rows of rare types; its direction
    and its spread), and a small classifier, fitted on gradients of public text whose words are
    known, gives the probability that it was used. As many types are named as makes the expected
    F1 largest. All of it is free of the gradient's scale, so an update of several local steps
    can be read as well, and the classifier has seen noised gradients, since an adversary who
    knows of the defence would rehearse against it.

    Reads the gradient as shared: of a tied matrix the sum of head and embedding parts. Where a LoRA
    on the head is trained in its place, the B of that has a row for each type, too: its hidden
    states are those that A lets through. Derived for
    cross-entropy without label smoothing. Smoothing takes the same small row off every type's, used
    or not; where less than a twelfth of the types is used it is found on the rows of rare types and
    given back, after which the learned readout loses 1 (smoothing 0.1) to 2 percent of F1 (0.2).

    **Updates of an optimizer.** A server that prescribes the training knows which optimizer makes
    the update of a round (:meth:`meet`). Plain SGD's is a sum of gradients, and decay and momentum
    are undone. Of Adam's and its kin's the readout is fitted on public updates made by the same
    class (:mod:`~lightning_fedleak.attacks.words.aligned_updates`): a client's optimizer begins
    each round anew then; one that goes on with earlier steps' is *unknown*.

    Args:
        public_text: text like what the clients train on, or ``"sampled"``: text that a causal
            model writes itself, of other models random frequent tokens. Strings and token ids are
            taken too (strings with ``tokenizer``).
        tokenizer: for strings; its ``mask_token_id`` serves a masked language model.
        readout: ``"learned"`` or ``"sign"``.
        n_directions: clusters of hidden states that rows are projected on (learned).
        calibration_tokens: public tokens that a learned readout is calibrated on at most (on
            SmolLM2-135M 2,000 reached an F1 of .97, 6,000 .978, 12,000 .982). The time is about
            that of a forward and backward over them and as much again for the fit; it is reported
            in ``calibration_seconds``.
        lengths: tokens in the calibrating texts, cut to these lengths in equal numbers. How long a
            client's texts are is in no gradient; what is rehearsed has batches of like lengths and
            mixed ones.
        refresh_every: steps after which :meth:`refresh` aligns anew with a model that has moved;
            the classifier itself is kept.
        updates: public updates that a readout for Adam and its kin is fitted on, at least 2. Of
            rounds of several steps each is that many steps of training on a copy of the weights.
        batch_texts: texts in a batch of a local step, where the server prescribes it. Default: it
            does not, and public updates have 1 to 32.
        local_steps: the round, for a server of one's own; a monitor tells by :meth:`meet`.
        seed: of everything random in the calibration.
        name: as in the logs.

    Attributes:
        calibration_seconds: time the last ``prepare`` took.
    """

    threat_model = ThreatModel.create(
        "an honest but curious server that reads one update of the output head and has public text",
        Capability.SEES_HEAD_GRADIENT,
        Capability.KNOWS_MODEL,
        Capability.KNOWS_PUBLIC_TEXT,
    )
    default_name = "aligned_flatchat"
    needs_float64 = True
    reads_adaptive_updates = True
    reads_clipped = True

    def __init__(
        self,
        public_text: Given,
        *,
        tokenizer: Any = None,
        readout: Literal["sign", "learned"] = "learned",
        n_directions: int = 64,
        calibration_tokens: int = 12_000,
        lengths: Sequence[int] = LENGTHS,
        refresh_every: int = 500,
        updates: int = 80,
        batch_texts: int | None = None,
        local_steps: LocalSteps | None = None,
        seed: int = 0,
        name: str | None = None,
    ) -> None:
        super().__init__(name)
        if readout not in ("sign", "learned"):
            raise ValueError(f"readout must be 'sign' or 'learned', got {readout!r}")
        for argument, value in (
            ("n_directions", n_directions),
            ("calibration_tokens", calibration_tokens),
            ("refresh_every", refresh_every),
            ("batch_texts", 1 if batch_texts is None else batch_texts),
        ):
            if value < 1:
                raise ValueError(f"{argument} must be at least 1, got {value}")
        if updates < 2:
            raise ValueError(f"updates must be at least 2, got {updates}")
        if not lengths or min(lengths) < 2:
            raise ValueError(f"lengths must be at least 2 tokens each, got {tuple(lengths)}")
        text = PublicText.parse(public_text, tokenizer)
        if text is None:
            raise ValueError(
                "AlignedFlatChat needs public_text: texts like the clients', or 'sampled'"
            )
        self.public_text = text
        self.tokenizer = tokenizer
        self.readout = readout
        self.n_directions = n_directions
        self.calibration_tokens = calibration_tokens
        self.lengths = tuple(lengths)
        self.refresh_every = refresh_every
        self.updates = updates
        self.batch_texts = batch_texts
        self.steps = self._given_steps = local_steps
        self._role = HEAD_WEIGHT
        self._clip: dict[str, Any] = {}
        self._unread: str | None = None
        self._not_fitted: str | None = None
        self._before: Tensor | None = None
        self.seed = seed
        self.calibration_seconds = 0.0
        self._u: Tensor | None = None
        self._rounding = 0.0
        self._rehearsed: Rehearsed | None = None
        self._aligned_at = 0

    def meet(self, facts: RunFacts) -> None:
        """Learns to what size entries are cut, and what makes an update, where these are shared."""
        self._unread, self._clip = None, {}
        if facts.clip_value is not None:
            self._clip = {"clip_value": facts.clip_value, "steps": facts.local_steps or 1}
        try:
            self.steps = LocalSteps.from_facts(facts) or self._given_steps
        except UnusableObservation as error:
            self.steps, self._unread = None, str(error)

    @property
    def _fitted_on(self) -> LocalSteps | None:
        """The round whose updates a readout has to be fitted on; None where gradients do."""
        return None if self.steps is None or self.steps.linear else self.steps

    def needs(self, anatomy: Anatomy) -> Surfaces:
        """The output head's weight, or the B of a LoRA on it."""
        self._role = head_surface(anatomy).role
        return Surfaces(gradients=(self._role,))

    def prepare(self, anatomy: Anatomy) -> None:
        """Calibrates on public text; leaves no trace on the model.

        Raises:
            ValueError: the model has no output head, is no language model, or the text is too
                short for a learned readout.
        """
        began = time.perf_counter()
        self._role = head_surface(anatomy).role
        if self._role != HEAD_WEIGHT and self._fitted_on is not None:
            self._unread = _NOT_OF_LORA.format(self._fitted_on.optimizer.__name__)
            return
        if self.readout == "sign":
            positive = self._align(anatomy)
            if positive < _ONE_SIDED:
                warnings.warn(
                    f"attack '{self.name}': only {positive:.1%} of the hidden states of public "
                    "text lie on one side of a direction, so that types which were not used may "
                    "be named: use readout='learned' for this model",
                    stacklevel=2,
                )
        else:
            generator = torch.Generator().manual_seed(self.seed)
            try:
                self._rehearsed = self._rehearse(anatomy, generator)
            except UnusableObservation as error:
                self._not_fitted = str(error)
            self._keep_weights(anatomy)
        self.calibration_seconds = time.perf_counter() - began

    def _rehearse(self, anatomy: Anatomy, generator: torch.Generator) -> Rehearsed:
        parts = self._parts(anatomy)
        steps = self._fitted_on
        if steps is None:
            many = self.n_directions
            return rehearse(parts, *head_of(anatomy), generator, n_directions=many, **self._clip)
        texts = _TEXTS if self.batch_texts is None else (self.batch_texts,)
        return rehearse_updates(
            anatomy,
            parts,
            steps,
            self._public_batches(anatomy, generator),
            generator,
            updates=self.updates,
            texts=texts,
            n_directions=self.n_directions,
        )

    def _text(self, anatomy: Anatomy) -> PublicText:
        return PublicText.resolve(self.public_text, anatomy, self.seed, or_tokens=True)

    def _public_batches(
        self, anatomy: Anatomy, generator: torch.Generator
    ) -> Callable[[int], TokenBatch]:
        """Public batches of any of the lengths, within a bound on their tokens."""
        text = self._text(anatomy)
        lengths = self._lengths(anatomy)

        def batch(texts: int) -> TokenBatch:
            within = [n for n in lengths if n * texts <= _TOKENS] or lengths[:1]
            length = within[int(torch.randint(len(within), (), generator=generator))]
            return text.batch(
                texts,
                length,
                generator,
                kind=anatomy.kind,
                mask_token_id=getattr(self.tokenizer, "mask_token_id", None),
            )

        return batch

    def _keep_weights(self, anatomy: Anatomy) -> None:
        """What a client begins a round with, where that tells of its update."""
        if self.steps is None or self.steps.plain:
            return
        weight = anatomy.parameter(self._role)
        self._before = None if weight is None else whole_tensor(weight).clone()

    def refresh(self, anatomy: Anatomy, step: int) -> None:
        """Aligns with the model as it is now, each ``refresh_every`` steps and in another fit."""
        self._keep_weights(anatomy)
        if self._unread is not None or 0 <= step - self._aligned_at < self.refresh_every:
            return
        self._aligned_at = step
        if self.readout == "sign":
            self._align(anatomy)
            return
        if self._rehearsed is None:
            self.prepare(anatomy)
            return
        known = self._rehearsed.to(anatomy.device)
        parts = self._parts(anatomy, inputs=False)
        read = parts.read
        u = separating_direction(read)
        directions = replace(
            known.directions,
            u=u,
            scale=(read @ u).median(),
            norm=read.norm(dim=1).median(),
        )
        expected = ExpectedRows.of(
            parts, *head_of(anatomy), directions, known.clusters, known.expected.reference
        )
        self._rehearsed = replace(
            known,
            directions=directions,
            expected=replace(expected, opening=known.expected.opening),
        )

    @torch.no_grad()
    def run(self, view: Observation, query: Query | None = None) -> WordGuess:
        """Names the types used in one update.

        Returns:
            ``scores`` are log odds (learned; types that no feature speaks for get -30) or minus
            the projection (sign); ``n_types`` is the expected number of used types (learned) or
            the number named (sign).

        Raises:
            UnusableObservation: the gradient is non-finite or all zero; an update is of an
                optimizer that is not known, or that goes on with earlier steps'.
            RuntimeError: neither ``prepare`` nor ``load_state_dict`` was called.
        """
        gradient = whole_tensor(view.gradient(self._role))
        last = view.gradients[-1]
        if isinstance(last, UpdateSnapshot):
            gradient = self._readable(gradient, last)
        if self.readout == "sign":
            rounding = 0.0
            if isinstance(last, UpdateSnapshot):
                rounding = self._rounding * last.local_steps**0.5 / last.learning_rate
            return _known(self._by_sign(gradient, rounding), last)
        if isinstance(last, UpdateSnapshot) and self._fitted_on is not None:
            return self._by_update_readout(gradient)
        if self._fitted_on is not None:
            raise UnusableObservation(
                f"the readout is fitted on updates of {self._fitted_on.optimizer.__name__}, and "
                "this is a gradient: leave local_steps out to read gradients"
            )
        return _known(self._by_readout(gradient), last)

    def _readable(self, update: Tensor, snapshot: UpdateSnapshot) -> Tensor:
        """An update in the form that the readout was fitted on; of SGD's a sum of gradients."""
        if self._unread is not None:
            raise UnusableObservation(self._unread)
        steps = self.steps
        if steps is None or steps.plain:
            return update
        steps.check_fresh(snapshot.fresh)
        if self._fitted_on is not None and self.readout == "sign":
            raise UnusableObservation(
                f"readout='sign' reads sums of gradients, which updates of "
                f"{steps.optimizer.__name__} are not: use readout='learned'"
            )
        if not bool(update.isfinite().all()):
            raise UnusableObservation("the head's update has NaN or infinity")
        if not bool(update.any()):
            raise UnusableObservation("the head's update is all zero: nothing was trained")
        rate = snapshot.learning_rate
        if self._before is None:
            raise RuntimeError(self._unprepared())
        before = self._before = self._before.to(update.device)
        if self._fitted_on is None:
            return steps.without_decay(update.float(), before.float(), rate)
        return comparable(update, before, rate, steps)

    def _by_update_readout(self, update: Tensor) -> WordGuess:
        if self._rehearsed is None or self._before is None:
            raise RuntimeError(self._unprepared())
        known = self._rehearsed = self._rehearsed.to(update.device)
        features = update_features(update, self._before.float(), known.directions, known.expected)
        odds = known.readout.logits(features)
        used = odds.sigmoid()
        order = odds.argsort(descending=True)
        return WordGuess(
            types=order[: int(best_count(used))],
            scores=odds.clamp(min=_RULED_OUT),
            n_types=float(used.sum()),
        )

    def _by_sign(self, gradient: Tensor, rounding: float) -> WordGuess:
        if self._u is None:
            raise RuntimeError(self._unprepared())
        self._u = self._u.to(gradient.device)
        summary, u = turned_on_long_rows(gradient, self._u)
        self._check_clip(gradient, summary.norms)
        types = significant(summary.along, summary.doubt(u, rounding))
        return WordGuess(types=types, scores=-summary.along, n_types=float(len(types)))

    def _by_readout(self, gradient: Tensor) -> WordGuess:
        if self._rehearsed is None and self._not_fitted is not None:
            raise UnusableObservation(self._not_fitted)
        if self._rehearsed is None:
            raise RuntimeError(self._unprepared())
        known = self._rehearsed = self._rehearsed.to(gradient.device)
        directions, expected = known.directions, known.expected
        summary = RowSummary.of(gradient, directions.u)
        self._check_clip(gradient, summary.norms)
        summary, _ = turned(gradient, summary, directions.u, expected.reference)
        units = Units.of(summary, expected, expected.reference)
        scores = torch.full_like(summary.along, _RULED_OUT)
        if units is None:
            return WordGuess(types=scores.argsort()[:0], scores=scores, n_types=0.0)
        rows = plausible(summary, units).nonzero()[:, 0]
        features = row_features(
            gradient[rows], summary.at(rows), units, directions, expected.rows(rows)
        )
        odds = known.readout.logits(features)
        used = odds.sigmoid()
        scores[rows] = odds.clamp(min=_RULED_OUT)
        order = odds.argsort(descending=True)
        return WordGuess(
            types=rows[order[: int(best_count(used))]],
            scores=scores,
            n_types=float(used.sum()),
        )

    def _check_clip(self, gradient: Tensor, norms: Tensor) -> None:
        """Refuses entries that were cut to a size which no readout was fitted on."""
        sign = self.readout == "sign"
        if self._clip and not sign:
            return
        longest = gradient.index_select(0, norms.topk(min(_LONGEST, len(norms))).indices)
        if cut_size(longest, ROUNDED if self.steps is not None else 0.0) is not None:
            raise UnusableObservation(
                "clipping by value has cut entries of the head's gradient to one size, "
                + (
                    "which turns rows: use readout='learned'"
                    if sign
                    else "of which the run says nothing: clip with Trainer(gradient_clip_val=..., "
                    "gradient_clip_algorithm='value'), on whose value the readout is fitted then"
                )
            )

    def state_dict(self) -> dict[str, Tensor]:
        """The calibration."""
        state = {"aligned_at": torch.tensor(self._aligned_at)}
        if self._u is not None:
            state["u"] = self._u
            state["rounding"] = torch.tensor(self._rounding, dtype=torch.float64)
        if self._rehearsed is not None:
            state |= self._rehearsed.tensors()
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Takes back a calibration of the same readout.

        Raises:
            ValueError: it is of the other readout.
        """
        if not state:
            return
        if ("u" in state) != (self.readout == "sign"):
            raise ValueError(
                f"this state is not of an AlignedFlatChat with readout='{self.readout}': load it "
                "into one built as the one that was saved, or call prepare again"
            )
        self._aligned_at = int(state["aligned_at"])
        if self.readout == "sign":
            self._u = state["u"]
            self._rounding = float(state["rounding"])
        else:
            self._rehearsed = Rehearsed.from_tensors(state)

    def calibration_inputs(self) -> dict[str, object]:
        """The settings, and the public text."""
        mask = getattr(self.tokenizer, "mask_token_id", None)
        steps = self._fitted_on
        return (
            self.config()
            | self._clip
            | {
                "steps": None if steps is None else sorted(steps.describe().items()),
                "updates": self.updates,
                "batch_texts": self.batch_texts,
                "lengths": self.lengths,
                "public_text": PublicText.label(self.public_text),
                "mask": mask,
            }
        )

    def arguments(self) -> dict[str, object]:
        """The settings, and what makes the updates that the readout is fitted on."""
        steps = self._fitted_on
        return self.config() | self._clip | ({} if steps is None else steps.describe())

    def config(self) -> dict[str, object]:
        """Settings that name this attack in reports."""
        return {
            "readout": self.readout,
            "n_directions": self.n_directions,
            "calibration_tokens": self.calibration_tokens,
            "refresh_every": self.refresh_every,
            "seed": self.seed,
        }

    def _unprepared(self) -> str:
        return f"attack '{self.name}' has no calibration: call prepare(anatomy) first"

    def _align(self, anatomy: Anatomy) -> float:
        """Finds ``u``; returns the share of public hidden states that are positive on it."""
        batches = self._batches(anatomy, _SIGN_TOKENS)
        states = torch.cat([hidden_states_of(anatomy, b) for b in batches]).float()
        surface = head_surface(anatomy)
        if surface.into is not None:
            states = states @ surface.into.T
        self._u = separating_direction(states)
        weight = anatomy.parameter(surface.role)
        if weight is not None:
            self._rounding = rounding_error(weight.detach())
        return float((states @ self._u > 0).float().mean())

    def _parts(self, anatomy: Anatomy, inputs: bool = True) -> GradientParts:
        return GradientParts.joined(
            [
                gradient_parts(anatomy, batch, inputs=inputs)
                for batch in track(
                    self._batches(anatomy, self.calibration_tokens), "gradients of public text"
                )
            ]
        )

    def _lengths(self, anatomy: Anatomy) -> list[int]:
        """Those of public texts that the model can read."""
        longest = getattr(getattr(anatomy.model, "config", None), "max_position_embeddings", None)
        return sorted({min(n, longest or n) for n in self.lengths})

    def _batches(self, anatomy: Anatomy, tokens: int) -> list[TokenBatch]:
        """Public batches of each length, about ``tokens`` tokens in all, no text used twice."""
        generator = torch.Generator().manual_seed(self.seed)
        text = self._text(anatomy)
        if anatomy.kind == "causal":
            text = text.with_and_without_start()
        lengths = self._lengths(anatomy)
        order = text.draw(len(text), generator).tolist()
        each = min(max(2, tokens // sum(lengths)), max(1, len(order) // len(lengths)))
        return [
            text.rows(
                order[i * each : (i + 1) * each],
                length,
                generator,
                kind=anatomy.kind,
                mask_token_id=getattr(self.tokenizer, "mask_token_id", None),
            )
            for i, length in enumerate(lengths)
            if order[i * each : (i + 1) * each]
        ]


def _known(guess: WordGuess, snapshot: GradientSnapshot) -> WordGuess:
    """The guess, unless it names nothing of rows that noise does not account for.

    Raises:
        UnusableObservation: no type is named, and no defence says that it added noise.
    """
    if not len(guess.types) and not snapshot.noise_std > 0:
        raise UnusableObservation(
            "the rows of the head's gradient are not zero, and none can be told to be of a used "
            "type, though no defence says that it added noise: it is unknown what they give away"
        )
    return guess
