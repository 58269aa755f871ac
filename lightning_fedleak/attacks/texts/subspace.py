"""Whole texts from the row spaces of gradients, LoRA or whole: token by token, with a certificate.

What the second block's projections read at a place hangs on all tokens up to it. So a beginning is
right where what its last token makes of it lies in the span of the shared rows (DAGER, Petrov et
al. 2024, section 4.2), and texts are found from left to right. Three things are added. Rows that
earlier tokens explain are projected out, so that few rows tell many tokens apart, and all blocks
count as evidence. What a token would explain at any other place is taken off: that it is in the
batch says nothing of where it stands. And a next text branches off wherever a found one could have
gone on another way, so that texts with a common beginning are told apart.

Where a LoRA has fewer rows than the batch has words, none fits exactly, and most of what fits says
which token a state is of. So each token's mean state behind random others is taken off rows and
states, and the rest is whitened: what is left is what a beginning makes of its next token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lightning_fedleak.anatomy import Anatomy
from lightning_fedleak.anatomy.text_layers import text_blocks
from lightning_fedleak.attacks.base import Query, RunFacts, Surfaces, UnusableObservation
from lightning_fedleak.attacks.local_steps import LocalSteps
from lightning_fedleak.attacks.membership.gradients import whitening
from lightning_fedleak.attacks.row_space.linear_maps import (
    KnownInput,
    SharedInput,
    block_name,
    find_linear_maps,
    find_shared_inputs,
    input_states,
    lone_token_maps,
    vocabulary_size,
)
from lightning_fedleak.attacks.row_space.pursuit import SharedRows
from lightning_fedleak.attacks.texts.base import NOTHING, Deadline, TextAttack, TextGuess
from lightning_fedleak.attacks.texts.bottom_model import predicts_next
from lightning_fedleak.attacks.texts.prefix.cache import Layout, Prefixes
from lightning_fedleak.attacks.texts.subspace_encoders import EncoderSearch
from lightning_fedleak.attacks.texts.subspace_rows import (
    CERTAIN,
    LARGEST_SHARE,
    NEEDED,
    RESIDUAL,
    BlockInputs,
    Explained,
    FoundText,
    readers,
)
from lightning_fedleak.attacks.words.aligned_rows import rounding_error
from lightning_fedleak.attacks.words.subspace import NO_GRADIENT_YET, SubspaceWords
from lightning_fedleak.snapshots import (
    Inapplicable,
    NotYet,
    Observation,
    UpdateSnapshot,
    whole_tensor,
)
from lightning_fedleak.threats import Capability, ThreatModel, ThreatModelError

_BLOCKS = 12
_CONTEXTS, _CONTEXT = 4, 8
_BEHIND = (1, 2, 4, 8) * 8
_PRIOR = 0.5
_LOST = 2
_NEAR, _SAME, _GAIN = 0.02, 1e-3, 3.0
_TRIED = 16, 64
_EXACT, _NEARLY = 1e-6, 1e-4
_PRECISE = 1e-10
_EXPLAINED = 1e-4
_ASIDE = 8
_COPIES = 4
_LONGEST = 512
_ALIKE, _MOST_ALIKE = 1e-4, 64


class SubspaceTexts(TextAttack):
    """The texts whose hidden states the shared rows of several blocks are combinations of.

    An honest but curious server knows the weights. It takes the tokens of the batch from the first
    block's rows (:class:`~lightning_fedleak.attacks.words.subspace.SubspaceWords`) and tries each
    as the next one of a text, behind the beginnings that fit best.

    The rows of whole projections name nearly every token exactly, as long as a batch has clearly
    fewer places than the hidden states have numbers. Of a LoRA more blocks are read, whose few rows
    each are evidence on the same text. A causal text's last token has no part in these gradients:
    it is left open. Reads gradients, and rounds of SGD, with momentum where a round begins with a
    fresh optimizer; what the weights move in a round blurs what is read.

    Of an encoder, whose positions have to be added to its embeddings, the first block's rows name
    pairs of token and position. Those of one text are the text, also behind a LoRA of few rows. Of
    several texts the whole projections' rows tell pairs, and a descent which of them go together.

    Where positions are relative, a text that is one token several times looks like that token
    alone, up to what follows. It is found where up to five such tokens are followed by others, and
    the rows name tokens exactly.

    Certified means that no text is missing whose part lies above rounding, and that none of those
    said is wrong, up to copies, texts that another begins with, the number of tokens of a text that
    is one token alone, and tokens whose inputs are equal up to rounding. Where queries and keys
    alone are trained it is not said: they do not show every token.

    Args:
        blocks: behind the first that are read at most; by default one where its rows could fill the
            width of the hidden states, 12 where they are fewer.
        beam: beginnings that are kept side by side where none is exact.
        budget_seconds: wall time that one observation may take; None for no bound. What is found
            by then is returned, and the guess says that it is not finished.
        seed: of the contexts in which tokens are tried beforehand, and of encoders' descents.
        name: as in the logs.

    Raises:
        ValueError: a number out of range.
    """

    threat_model = ThreatModel.create(
        "an honest but curious server that reads one update of the blocks' projections, or of "
        "adapters on them",
        Capability.KNOWS_MODEL,
    )
    default_name = "subspace_texts"
    needs_float64 = True
    reads_adaptive_updates = True
    restores_fully = False
    last_token_open = True

    def __init__(
        self,
        *,
        blocks: int | None = None,
        beam: int = 3,
        budget_seconds: float | None = 120.0,
        seed: int = 0,
        name: str | None = None,
    ) -> None:
        super().__init__(name)
        for argument, value in (("blocks", blocks), ("beam", beam)):
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(f"{argument} must be a positive integer, got {value!r}")
        if budget_seconds is not None and (budget_seconds is True or not budget_seconds > 0):
            raise ValueError(f"budget_seconds must be positive or None, got {budget_seconds!r}")
        self.blocks = blocks
        self.beam = beam
        self.budget_seconds = budget_seconds
        self.seed = seed
        self._words = SubspaceWords(capacity_seconds=0)
        self._facts = RunFacts()
        self._found: tuple[Anatomy, _Blocks] | None = None
        self._bottom: BlockInputs | None = None
        self._alone: frozenset[str] = frozenset()
        self._whitening: list[Tensor] = []

    def meet(self, facts: RunFacts) -> None:
        """Learns the precision, and what made an update."""
        self._facts = facts
        self._words.meet(facts)

    def age(self, step: int) -> float:
        """Optimizer steps that the copy of the model is behind; NaN before there is one."""
        return math.nan if self._bottom is None else float(self._bottom.age(step))

    def needs(self, anatomy: Anatomy) -> Surfaces:
        """What names the words, and the trained projections of some blocks behind the first.

        Raises:
            ThreatModelError: an encoder-decoder, an encoder whose positions are not added to its
                embeddings, or a model without a second block of linear maps.
        """
        if anatomy.kind == "seq2seq":
            raise ThreatModelError(
                f"attack '{self.name}' reads causal models and encoders, not encoder-decoders: "
                "remove the attack"
            )
        words = self._words.needs(anatomy).gradients
        deeper = [m.name for known in self._read(anatomy) for m in readers(known, anatomy)]
        if not deeper:  # a surface that could be shared, so that it reads as not exposed
            second = self._blocks(anatomy).inputs[-1]
            deeper = [m.name for m in second.maps if m.factor != "B"]
        return Surfaces(gradients=tuple(dict.fromkeys([*words, *deeper])))

    def _blocks(self, anatomy: Anatomy) -> _Blocks:
        if self._found is None or self._found[0] is not anatomy:
            maps = [m for m in find_linear_maps(anatomy) if m.factor != "B"]
            blocks: dict[str, SharedInput] = {}
            for known in find_shared_inputs(anatomy, maps):
                if known.width == anatomy.hidden_size:
                    blocks.setdefault(block_name(known.maps[0].name), known)
            own = {name for name, _ in text_blocks(anatomy)}
            inputs = [known for block, known in blocks.items() if block in own]
            if len(inputs) < 2:
                raise ThreatModelError(
                    f"attack '{self.name}' orders words by the second block's projections, and "
                    "this model has no second block with linear maps that are called once: remove "
                    "the attack"
                )
            first = None
            if not _causal(anatomy, inputs[:2]):
                first = next((k for k in self._words.inputs(anatomy) if k.positional), None)
                if first is None or first.reader is not inputs[0].reader:
                    raise ThreatModelError(
                        f"attack '{self.name}' reads an encoder's texts where positions are added "
                        "to the embeddings that the first block's projections read, which they are "
                        "not in this model: remove the attack"
                    )
            self._found = (anatomy, _Blocks(first, tuple(inputs if first else inputs[1:])))
        return self._found[1]

    def _read(self, anatomy: Anatomy) -> list[SharedInput]:
        first, inputs = self._blocks(anatomy)
        trained = [known for known in inputs if readers(known, anatomy)]
        if not trained or (first and (trained[0] is not inputs[0] or len(trained) < 2)):
            return []
        rows = sum(m.rows for m in readers(trained[0], anatomy))
        most = self.blocks or (1 if rows >= trained[0].width else _BLOCKS)
        return trained[: most + bool(first)]

    def prepare(self, anatomy: Anatomy) -> None:
        """Copies the model up to the blocks that are read, and runs it on random tokens.

        Raises:
            ValueError: the model cannot be run as far as these blocks.
        """
        self._words.prepare(anatomy)
        inputs = self._read(anatomy)
        self._bottom = None
        if not inputs:
            return
        bottom = BlockInputs(anatomy, inputs, self._facts)
        self._bottom = bottom
        self._alone = lone_token_maps(anatomy, inputs[0].maps)
        self._learn()

    def _learn(self) -> None:
        bottom = self._bottom
        assert bottom is not None
        generator = torch.Generator().manual_seed(self.seed)
        length = min(_TRIED[1], bottom.context or _TRIED[1])
        ids = torch.randint(bottom.vocab_size, (_TRIED[0], length), generator=generator)
        states = bottom.parts(bottom.hidden(ids.to(bottom.device)))
        self._whitening = [whitening(x.flatten(0, 1).mT @ x.flatten(0, 1)).double() for x in states]

    def refresh(self, anatomy: Anatomy, step: int) -> None:
        """Renews the copy; anew where something else is trained."""
        self._words.refresh(anatomy, step)
        inputs = self._read(anatomy)
        if self._bottom is None or list(self._bottom.inputs) != inputs:
            self.prepare(anatomy)
        if self._bottom is not None:
            self._bottom.refresh(anatomy, step)

    @torch.no_grad()
    def run(self, view: Observation, query: Query | None = None) -> TextGuess:
        """Reconstructs the texts of a batch.

        Returns:
            A row for each text found, in any order, and where the rows do not tell them apart
            texts that were never there; ``finished`` says that no time was lacking. ``confidence``
            is the share of a token's state that the rows explained when it was chosen, in the
            block that explains least.

        Raises:
            UnusableObservation: non-finite or zero gradients, more words than the first block's
                rows tell apart, or an update that is no gradient.
            RuntimeError: ``prepare`` was not called.
        """
        if self._bottom is None:
            raise RuntimeError(f"attack '{self.name}' has no copy of the model: call prepare")
        deadline = Deadline(self.budget_seconds)
        self._check_update(view)
        bottom = self._bottom
        if any(m.regularised for known in bottom.inputs for m in readers(known, bottom.anatomy)):
            raise Inapplicable(
                "the loss has a term of AdaLoRA's A alone, which is not taken off the rows of "
                "blocks behind the first; SubspaceWords reads the words, and of LoRA texts are read"
            )
        words = self._words.run(view)
        shared = [self._rows(known, bottom.anatomy, view) for known in bottom.inputs]
        bag = words.types.sort().values.to(bottom.device)
        if not len(bag):
            raise UnusableObservation("no word stands out of the noise")
        told_apart = True
        if words.certified:
            alike = self._words.alike(bag, _ALIKE)
            told_apart = len(alike) <= _MOST_ALIKE
            bag = torch.cat([bag, alike]).sort().values if told_apart else bag
        first = self._blocks(bottom.anatomy).first
        search: _Search | EncoderSearch
        if first is None:
            search = _Search(bottom, self._whitening, shared, bag, self.beam, self.seed)
        else:
            search = EncoderSearch(bottom, first, self._whitening, shared, bag, self.seed)
        with bottom.session():
            texts, finished, certain = search.run(deadline)
        certain = certain and bool(words.certified) and told_apart and self._shows_all(view)
        if not texts:
            raise UnusableObservation("no text explains what the second block's rows hold")
        length = max(len(t.tokens) for t in texts)
        tokens = torch.full((len(texts), length), NOTHING, dtype=torch.int64)
        sure = torch.zeros(len(texts), length)
        for row, text in enumerate(texts):
            tokens[row, : len(text.tokens)] = torch.tensor(text.tokens)
            sure[row, : len(text.tokens)] = torch.tensor(text.fits)
        return TextGuess(tokens, sure, finished, search.tried, certain)

    def _shows_all(self, view: Observation) -> bool:
        """Whether the block that names texts has maps that show every token."""
        assert self._bottom is not None
        known, anatomy = self._bottom.inputs[0], self._bottom.anatomy
        shown = {m.name for m in readers(known, anatomy) if bool(view.gradient(m.name).any())}
        return bool(shown & self._alone)

    def _check_update(self, view: Observation) -> None:
        update = view.gradients[-1]
        if not isinstance(update, UpdateSnapshot):
            return
        steps = LocalSteps.from_facts(self._facts)
        if steps is None or not steps.sums(fresh=update.fresh):
            raise UnusableObservation(
                "whole texts are read off gradients and off rounds of steps of SGD without weight "
                "decay, with momentum where it begins afresh (optimizer.state.clear()): leave "
                "local_steps out to see what the gradients of the client's data would give away"
            )

    def _rows(self, known: SharedInput, anatomy: Anatomy, view: Observation) -> SharedRows:
        snapshot = view.gradients[-1]
        gradients, noise = [], []
        for linear in readers(known, anatomy):
            g = whole_tensor(view.gradient(linear.name)).to(anatomy.device)
            if not bool(g.isfinite().all()):
                raise UnusableObservation(f"the gradient of {linear.name} has NaN or infinity")
            if bool(g.any()):
                gradients.append(g if linear.axis == 1 else g.T)
                stored = 0.0
                weight = anatomy.parameter(linear.name)
                if isinstance(snapshot, UpdateSnapshot) and weight is not None:
                    stored = rounding_error(whole_tensor(weight)) * snapshot.local_steps**0.5
                    stored /= snapshot.learning_rate
                noise.append(math.hypot(snapshot.noise_std, stored))
        if not gradients:
            if any(m.factor == "A" for m in readers(known, anatomy)):
                raise NotYet(NO_GRADIENT_YET)
            raise UnusableObservation("the gradients of the second block's projections are zero")
        dtypes = [*(g.dtype for g in gradients), self._facts.autocast or torch.float32]
        nothing = torch.zeros(0, known.width, dtype=torch.float64, device=gradients[0].device)
        return SharedRows.stack(
            gradients,
            nothing,
            rounding=max(torch.finfo(d).eps for d in dtypes),
            noise=noise,
        )

    def config(self) -> dict[str, object]:
        """Settings that name this attack in reports."""
        return {
            "blocks": self.blocks,
            "beam": self.beam,
            "budget_seconds": self.budget_seconds,
            "seed": self.seed,
        }


class _Blocks(NamedTuple):
    """What is read of a model.

    Attributes:
        first: what an encoder's first block reads; None of a causal model.
        inputs: what the projections of each block read: of an encoder from the first block on, of
            a causal model from the second.
    """

    first: KnownInput | None
    inputs: tuple[SharedInput, ...]


def _causal(anatomy: Anatomy, inputs: Sequence[SharedInput]) -> bool:
    """Whether what the second block reads at a place hangs on no later one."""
    ids = torch.arange(4, device=anatomy.device)[None] % vocabulary_size(anatomy)
    one = input_states(anatomy, inputs, ids)[-1]
    other = input_states(anatomy, inputs, torch.cat([ids[:, :-1], ids[:, :1]], 1))[-1]
    return bool(torch.equal(one[:, 0], other[:, 0]))


# ---- one block's rows -----------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Left:
    """What is left of a block's rows when some tokens are explained.

    Attributes:
        rows: (m, d) what is left.
        directions: (k, d) orthonormal, that what is left spans.
        known: (n, d) orthonormal, that the explained tokens span.
        whitening: (d, d) that rows, in units of their noise, were multiplied by.
    """

    rows: Tensor
    directions: Tensor
    known: Tensor
    whitening: Tensor

    @classmethod
    def of(cls, rows: Tensor, whitening: Tensor, known: Tensor | None = None) -> _Left:
        """Of rows (m, d) in units of their noise; of whitened states (n, d) may be ``known``."""
        rows = rows @ whitening
        known = rows[:0] if known is None else known
        rows = rows - (rows @ known.T) @ known
        directions = torch.linalg.qr(rows.T).Q.T.contiguous() if len(rows) else rows
        return cls(rows, directions, known, whitening)

    def fits(self, states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """How much of what is new in states (n, d) the directions hold.

        Returns:
            The share (n,), the norm of what is new (n,), and that itself at unit length (n, d).
        """
        new = states - (states @ self.known.T) @ self.known
        new = new - (new @ self.known.T) @ self.known
        norms = new.norm(dim=1)
        new = new / norms.clamp_min(1e-300)[:, None]
        return (new @ self.directions.T).square().sum(1).clamp(0, 1), norms, new

    def nearness(self, states: Tensor) -> Tensor:
        """(n,) how near what is new in states (n, d) is to the directions; 0 where nothing is."""
        new = 1 - (states @ self.known.T).square().sum(1)
        held = (states @ self.directions.T).square().sum(1) / new.clamp_min(_EXPLAINED**2)
        near = -(1 - held.clamp(0, 1)).clamp_min(_PRECISE).log()
        return near.masked_fill(new < _EXPLAINED**2, 0.0)

    def without(self, new: Tensor) -> _Left:
        """What is left when a state, whose new part is (d,) of unit length, is explained too.

        Of the directions the one that holds most of it goes, and what of that is not explained
        comes back as long as it is more than what :meth:`_Search.checked` takes for rounding: the
        states' own errors lie in few directions.
        """
        known = torch.cat([self.known, new[None]])
        rows = self.rows - torch.outer(self.rows @ new, new)
        along = self.directions @ new
        size = float(along.norm())
        if size < 1e-6:
            return _Left(rows, self.directions, known, self.whitening)
        held = along / size
        mirror = held.clone()
        mirror[0] += 1.0 if float(held[0]) >= 0 else -1.0
        mirror = mirror / mirror.norm()
        turned = self.directions - 2 * torch.outer(mirror, mirror @ self.directions)
        over = held @ self.directions - size * new
        rest = float(over.norm())
        kept = [turned[1:]]
        if rest > _EXACT:
            over = over / rest
            noise = float((self.whitening @ over).norm()) * rows.numel() ** 0.5
            if float((rows @ over).norm()) > NEEDED * noise:
                kept.append(over[None])
        return _Left(rows, torch.cat(kept), known, self.whitening)


@dataclass(frozen=True, eq=False)
class _Fits:
    """How candidates fit what is left of all blocks.

    Attributes:
        evidence: (n,) the nearer to what is left, the more; summed over blocks.
        worst: (n,) share of a state that is explained, in the block that explains least.
        new: by block (n, d), what is new in states, of unit length.
    """

    evidence: Tensor
    worst: Tensor
    new: tuple[Tensor, ...]

    @classmethod
    def of(cls, left: Sequence[_Left], states: Sequence[Tensor]) -> _Fits:
        """Of states (n, d) by block; one that is explained already is none."""
        evidence, worst, news = torch.zeros(()), torch.ones(()), []
        for remaining, x in zip(left, states, strict=True):
            share, norms, new = remaining.fits(x)
            nearness = -(1 - share).clamp_min(_PRECISE).log()
            evidence = evidence.to(share) + nearness.masked_fill(norms < _EXPLAINED, -math.inf)
            worst = torch.minimum(worst.to(share), share)
            news.append(new)
        return cls(evidence, worst, tuple(news))

    @property
    def exact(self) -> bool:
        """Whether one fits up to rounding."""
        return bool((self.evidence.isfinite() & (1 - self.worst <= _EXACT)).any())

    def best(self, evidence: Tensor, least: int) -> list[int]:
        """So many of which there is most evidence (n,), and all that fit nearly up to rounding."""
        nearly = int((evidence.isfinite() & (1 - self.worst <= _NEARLY)).sum())
        best = evidence.topk(min(max(least, nearly), len(evidence))).indices.tolist()
        return [i for i in best if math.isfinite(float(evidence[i]))]

    def without(self, left: Sequence[_Left], i: int) -> tuple[_Left, ...]:
        """What is left when one is explained too."""
        return tuple(b.without(new[i]) for b, new in zip(left, self.new, strict=True))


# ---- texts ----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Branch:
    """A way in which a known beginning could go on: its next token, and what blocks read there."""

    prefix: tuple[int, ...]
    token: int
    states: tuple[Tensor, ...]


@dataclass(frozen=True, eq=False)
class _Text:
    """A text as far as it is known.

    Attributes:
        tokens: from the first on.
        fits: share of each token's state that was explained when it was chosen; 1 for those of an
            earlier text that it branched off from.
        score: sum of the evidence of its own tokens, and of what made them likely besides.
        left: of the rows of each block.
        rivals: other ways in which it could have begun, or branched off.
        aside: other ways in which it could have gone on.
        states: (n, d) by block, of its own tokens.
        copies: of its first token that follow it, where they read as it does: they have no states.
    """

    tokens: tuple[int, ...]
    fits: tuple[float, ...]
    score: float
    left: tuple[_Left, ...]
    rivals: tuple[_Branch, ...]
    aside: tuple[_Branch, ...]
    states: tuple[tuple[Tensor, ...], ...]
    copies: int = 0

    @property
    def begins(self) -> int:
        """Tokens before its own: those of the text that it branched off from."""
        return len(self.tokens) - len(self.states) - self.copies

    @property
    def exact(self) -> bool:
        """Whether half of its own tokens fit exactly."""
        own = self.fits[-len(self.states) :]
        return 2 * sum(1 - fit <= _EXACT for fit in own) >= len(own)


@dataclass(frozen=True, eq=False)
class _Measure:
    """By what states are compared with what is left of the rows.

    Attributes:
        whitening: (d, d) of each block.
        means: (n, d) orthonormal after whitening, of each block: what tokens are taken for wherever
            they stand. None of them where tokens alone tell nearly all.
        behind: what the tokens of the bag are tried behind, to see what they explain anywhere.
    """

    whitening: Sequence[Tensor]
    means: Sequence[Tensor]
    behind: tuple[tuple[int, ...], ...]


class _Search:
    def __init__(
        self,
        bottom: BlockInputs,
        whitening: Sequence[Tensor],
        shared: Sequence[SharedRows],
        bag: Tensor,
        beam: int,
        seed: int,
    ) -> None:
        self.bottom, self.shared = bottom, shared
        self.bag, self.beam, self.seed = bag, beam, seed
        self.longest = min(bottom.context or _LONGEST, _LONGEST)
        self.precise = all(rows.exact for rows in shared)
        self.speaks = predicts_next(bottom)
        self.tried = 0
        self._copies: int | None = None
        length = min(_CONTEXT, self.longest - 1)
        behind = self._random([length] * _CONTEXTS)
        none = [white[:0] for white in whitening]
        self._compare(_Measure(whitening, none, behind))

    @property
    def whitening(self) -> Sequence[Tensor]:
        """(d, d) that states of each block are multiplied by."""
        return self._measure.whitening

    def _compare(self, measure: _Measure) -> None:
        self._measure = measure
        self._elsewhere: list[Tensor] | None = None

    @property
    def _few(self) -> bool:
        """Whether the rows are too few to tell each word."""
        return len(self.shared[0].principal) < len(self.bag)

    def _random(self, lengths: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Beginnings of tokens that are drawn from the bag."""
        generator = torch.Generator().manual_seed(self.seed)
        bag = self.bag.cpu()
        drawn = (torch.randint(len(bag), (n,), generator=generator) for n in lengths)
        return tuple(tuple(bag[places].tolist()) for places in drawn)

    def _in_context(self, deadline: Deadline) -> _Measure | None:
        """By what a beginning makes of its next token.

        None where the bag fills the states, where beginnings make nothing of it, and where there is
        no time to see.
        """
        kept, width = self.shared[0].principal.shape
        if width < 2 * len(self.bag) + kept:
            return None
        behind = self._random([min(n, self.longest - 1) for n in _BEHIND])
        sums = [white.new_zeros(len(self.bag), width) for white in self.whitening]
        moments = [torch.zeros_like(white) for white in self.whitening]
        for beginning in behind:
            if deadline.passed:
                return None
            states = self.bottom.parts(self._begun([beginning]).attempt(self.bag[None]))
            for total, moment, (x,) in zip(sums, moments, states, strict=True):
                total += x
                moment += x.mT @ x
        self.tried += len(behind) * len(self.bag)
        whitenings, means = [], []
        for total, moment in zip(sums, moments, strict=True):
            basis = torch.linalg.qr(total.mT).Q
            moment = moment - total.mT @ total / len(behind)
            if not float(moment.trace()) > _EXPLAINED**2 * len(behind) * len(self.bag):
                return None
            moment = moment - basis @ (basis.mT @ moment)
            white = whitening(moment - (moment @ basis) @ basis.mT).double()
            whitenings.append(white)
            means.append(torch.linalg.qr((total @ white).mT).Q.mT.contiguous())
        return _Measure(whitenings, means, behind[: len(behind) // 2])

    def run(self, deadline: Deadline) -> tuple[list[FoundText], bool, bool]:
        """The texts, whether it came to an end by itself, and whether they are certain.

        Where there are few rows a search that ends in nothing certain is made anew by the other
        measure. Rows that are few because noise hides them are none to whiten states for.
        """
        measures = [self._measure]
        if self._few and (self.precise or len(self.shared[0].whole) < len(self.bag)):
            in_context = self._in_context(deadline)
            measures = measures if in_context is None else [in_context, *measures]
        kept: list[_Text] = []
        for number, measure in enumerate(measures if self.precise else measures[:1]):
            self._compare(measure)
            texts, finished = self.found(deadline)
            texts, certain = self._certified(texts) if finished else (texts, False)
            if number == 0 or certain:
                kept = texts
            if certain or not finished:
                break
        whole = [t for t in kept if not any(_begins(t, other) for other in kept)]
        return [FoundText(t.tokens, t.fits) for t in whole], finished, certain

    def found(self, deadline: Deadline) -> tuple[list[_Text], bool]:
        """Finds one text after the other; whether it came to an end by itself."""
        blocks = zip(self.shared, self.whitening, self._measure.means, strict=True)
        left = tuple(_Left.of(shared.principal, white, known) for shared, white, known in blocks)
        states = self._tried(self._begun([()]))[0]
        opened = [
            _Branch((), int(token), tuple(x[i] for x in states)) for i, token in enumerate(self.bag)
        ]
        found: list[_Text] = []
        lost: list[_Text] = []
        while any(len(block.directions) for block in left) and len(lost) < _LOST:
            prior = 0.0 if self.precise or not self.speaks else _PRIOR
            text, finished = self._next(opened, left, deadline, prior)
            if text is None:
                return found or lost[:1], finished
            if self.precise and not text.exact and finished and self.speaks:
                again, finished = self._next(opened, left, deadline, _PRIOR)
                text = again if again is not None and again.exact else text
            if self.precise and not (text.exact or self._few):  # behind a wrong token
                lost.append(text)
                begun = text.tokens[: text.begins + 1]
                opened = [b for b in opened if (*b.prefix, b.token) != begun]
            else:
                found = _with(found, text)
                left = text.left
                taken = {text.tokens[:n] for n in range(1, len(text.tokens) + 1)}
                opened = [b for b in [*opened, *text.aside] if (*b.prefix, b.token) not in taken]
            if not finished:
                return found or lost[:1], False
        return found or lost[:1], True

    def _certified(self, found: Sequence[_Text]) -> tuple[list[_Text], bool]:
        """As :meth:`checked`; where the first texts alone are certain, the others are none."""
        whole = self.checked(found)
        if whole[1]:
            return whole
        first = (self.checked(found[:n]) for n in range(len(found) - 1, 0, -1))
        return next((one for one in first if one[1]), whole)

    def _begun(self, prefixes: Sequence[tuple[int, ...]]) -> Prefixes:
        """Beginnings that are known."""
        device = self.bottom.device
        layout = Layout.of((len(prefixes), self.longest), None, None)
        known = Prefixes(self.bottom, layout)
        counts = torch.tensor([len(p) for p in prefixes], device=device)
        if int(counts.max()):
            ids = torch.zeros(len(prefixes), int(counts.max()), dtype=torch.int64, device=device)
            for row, prefix in enumerate(prefixes):
                ids[row, : len(prefix)] = torch.tensor(prefix, device=device)
            known.follow(ids)
            known.keep(counts)
        return known

    def _tried(self, known: Prefixes) -> list[list[Tensor]]:
        """What blocks read where each token of the bag is next: by beginning, by block, (n, d)."""
        n = len(known.known)
        self.tried += n * len(self.bag)
        parts = self._whitened(known.attempt(self.bag.expand(n, -1)))
        return [[x[row] for x in parts] for row in range(n)]

    def _whitened(self, states: Tensor) -> list[Tensor]:
        return [
            nn.functional.normalize(x @ w, dim=-1)
            for x, w in zip(self.bottom.parts(states), self.whitening, strict=True)
        ]

    def _anywhere(self, left: Sequence[_Left]) -> tuple[Tensor, float]:
        """Evidence of tokens behind random others, at places that are not their own.

        Returns:
            Each token's mean (n,), and how far above it the best of all tokens comes in the mean.
        """
        behind = self._measure.behind
        if self._elsewhere is None:
            rows = [self._tried(self._begun([beginning]))[0] for beginning in behind]
            self._elsewhere = [torch.cat(parts) for parts in zip(*rows, strict=True)]
        each = [one.nearness(x) for one, x in zip(left, self._elsewhere, strict=True)]
        evidence = torch.stack(each).sum(0).view(len(behind), -1)
        mean = evidence.mean(0)
        return mean, float((evidence - mean).max(1).values.mean())

    def _next(
        self,
        opened: Sequence[_Branch],
        left: tuple[_Left, ...],
        deadline: Deadline,
        prior: float = 0.0,
    ) -> tuple[_Text | None, bool]:
        """The text that explains most of what is left; None where none explains anything.

        Args:
            opened: ways in which it may begin.
            left: of the rows of each block.
            deadline: to end by.
            prior: weight of the model's own log probabilities of next tokens, where none is exact.

        Returns:
            The text, and whether it came to an end by itself.
        """
        beams = self._starts(opened, left, deadline)
        if not beams:
            return None, True
        ended: list[_Text] = []
        known = self._begun([text.tokens for text in beams])
        while beams:
            short = [i for i, text in enumerate(beams) if len(text.tokens) < self._most(text)]
            ended += [beams[i] for i in range(len(beams)) if i not in short]
            if deadline.passed or not short:
                break
            if len(short) < len(beams):
                known = known.of_rows(torch.tensor(short, device=self.bag.device))
                beams = [beams[i] for i in short]
            likely = torch.zeros(len(beams), 1)
            if prior:
                told = self.bottom.next_tokens([text.tokens for text in beams], self.bag)
                likely = prior * told
            further = [
                self._children(text, states, likely[row])
                for row, (text, states) in enumerate(zip(beams, self._tried(known), strict=True))
            ]
            ways: dict[tuple[int, ...], tuple[_Branch, ...]] = {}
            for text, (_, aside) in zip(beams, further, strict=True):
                ways[self._read_as(text.tokens)] = ways.get(self._read_as(text.tokens), ()) + aside
            grown: list[tuple[_Text, int]] = []
            for row, (text, (children, _)) in enumerate(zip(beams, further, strict=True)):
                aside = ways[self._read_as(text.tokens)]
                if not children:
                    ended.append(_aside(text, aside))
                grown += [(_aside(child, aside), row) for child in children]
            grown.sort(key=lambda pair: -pair[0].score)
            grown = grown[:1] if grown and grown[0][0].exact else grown[: self.beam]
            beams = [text for text, _ in grown]
            if beams:
                known = known.of_rows(
                    torch.tensor([row for _, row in grown], device=self.bag.device)
                )
                last = torch.tensor([[text.tokens[-1]] for text in beams], device=self.bag.device)
                known.follow(last)
                known.keep(torch.ones(len(beams), dtype=torch.int64, device=self.bag.device))
        ended += [text for text in beams if text not in ended]
        return max(ended, key=lambda text: text.score), not deadline.passed

    def _most(self, text: _Text) -> int:
        """Tokens at which a text is given up, or is as long as it can be."""
        lost = self.precise and not text.exact
        return min(self.longest, 2 * len(self.bag) + _CONTEXT) if lost else self.longest

    def _starts(
        self, opened: Sequence[_Branch], left: tuple[_Left, ...], deadline: Deadline
    ) -> list[_Text]:
        """The likeliest ways in which a text not found yet begins, or branches off from one."""
        if not opened:
            return []
        states = [torch.stack(parts) for parts in zip(*(b.states for b in opened), strict=True)]
        fits = _Fits.of(left, states)
        evidence, least = fits.evidence, -math.inf
        if not fits.exact and not deadline.passed:
            least = float(self._anywhere(left)[0].max())
        texts = []
        best = fits.best(evidence, max(_ASIDE, self.beam))
        for i in best[: self.beam]:
            branch, value = opened[i], float(evidence[i])
            if math.isfinite(value) and value >= least:
                seen = (*[1.0] * len(branch.prefix), float(fits.worst[i]))
                tokens = (*branch.prefix, branch.token)
                rest = fits.without(left, i)
                alike = [b for b in map(opened.__getitem__, best) if b.prefix == branch.prefix]
                rivals = tuple(b for b in alike if b is not branch)
                texts.append(_Text(tokens, seen, value, rest, rivals, (), (branch.states,)))
        if not fits.exact:
            return texts
        exact = [text for text in texts if text.exact][:1]
        first = [text for text in exact if len(text.tokens) == 1]
        return exact + [
            replace(text, tokens=(n + 1) * text.tokens, fits=(n + 1) * text.fits, copies=n)
            for text in first
            for n in range(1, self.copies + 1)
        ]

    @property
    def copies(self) -> int:
        """Of a text's first token that may follow it: none where they read otherwise."""
        if self.longest <= _COPIES:
            return 0
        if self._copies is None:
            ids = self.bag[:1].expand(1, _COPIES + 1)
            states = self.bottom.parts(self.bottom.hidden(ids))
            apart = max(float((x[0] - x[0, :1]).norm(dim=-1).max()) for x in states)
            self._copies = _COPIES if apart < _EXPLAINED else 0
        return self._copies

    def _read_as(self, beginning: tuple[int, ...]) -> tuple[int, ...]:
        """A beginning without copies of its first token, if these read as it does."""
        if not self.copies:
            return beginning
        first = (n for n, token in enumerate(beginning) if token != beginning[0])
        return beginning[:1] + beginning[next(first, len(beginning)) :]

    def _children(
        self, text: _Text, states: Sequence[Tensor], likely: Tensor
    ) -> tuple[list[_Text], tuple[_Branch, ...]]:
        """Texts with one more token, the likeliest first, and other ways to go on.

        A text ends where no token fits exactly, if those before did; else where none fits better
        than at places that are not its own, however likely it is: of few rows than the best of all
        tokens does there.
        """
        fits = _Fits.of(text.left, states)
        evidence = ranked = fits.evidence
        if not fits.exact:
            mean, best_elsewhere = self._anywhere(text.left)
            evidence = evidence - mean
            if len(self._measure.means[0]):
                evidence = evidence - best_elsewhere
            ranked = evidence + likely.to(evidence)
        aside = tuple(
            _Branch(text.tokens, int(self.bag[i]), tuple(x[i] for x in states))
            for i in fits.best(evidence, _ASIDE)
        )
        children = []
        for i in ranked.topk(min(self.beam, len(ranked))).indices.tolist():
            value = float(evidence[i])
            if not math.isfinite(value):
                continue
            nearly = 1 - float(fits.worst[i]) <= _NEARLY
            if not (nearly if text.exact else value > 0):
                continue
            children.append(
                _Text(
                    (*text.tokens, int(self.bag[i])),
                    (*text.fits, float(fits.worst[i])),
                    text.score + float(ranked[i]),
                    fits.without(text.left, i),
                    text.rivals,
                    text.aside,
                    (*text.states, tuple(x[i] for x in states)),
                    text.copies,
                )
            )
        return children, aside

    def checked(self, texts: Sequence[_Text]) -> tuple[list[_Text], bool]:
        """Texts without ends that explain nothing, and whether they are certain.

        They are where all rows of every block are explained up to rounding, and in the first of
        them no token can be left out, nor exchanged for another that was likely at its place.
        """
        if not self.precise:
            return list(texts), False
        texts = [text for text in texts if text.states]
        certain = False
        while texts and sum(len(text.states) for text in texts) < self.shared[0].whole.shape[1]:
            first = Explained.of(self.shared[0], self._states(texts, 0))
            if first.residual > RESIDUAL:  # what explains nothing cannot be told
                break
            own = torch.split(first.own, [len(text.states) for text in texts])
            idle = [not float(part[-1]) >= RESIDUAL for part in own]
            if not any(idle):
                certain = self._unique(texts, first) and self._ended(texts, first)
                break
            texts = [_cut(t) if out else t for t, out in zip(texts, idle, strict=True)]
            texts = [text for text in texts if text.states]
        for block, shared in enumerate(self.shared[1:], 1):
            if not certain:
                break
            explained = Explained.of(shared, self._states(texts, block))
            certain = explained.residual <= RESIDUAL
        return texts, certain

    def _ended(self, texts: Sequence[_Text], first: Explained) -> bool:
        """Whether each text would show it if it went on.

        It does not where what would come next reads nearly as tokens do that are there, as of a
        model that has learned to repeat a text's last token, and explains some of what is left.
        """
        for text in texts:
            states = self._tried(self._begun([text.tokens]))[0][0]
            ways = {other.tokens[: len(text.tokens) + 1] for other in texts}
            free = [(*text.tokens, int(token)) not in ways for token in self.bag]
            x = self._plain(states, 0)[torch.tensor(free, device=states.device)]
            outside, gain = first.further(self.shared[0], x)
            if bool(((outside < _NEAR) & (gain > _GAIN) | (outside < _SAME)).any()):
                return False
        return True

    def _states(self, texts: Sequence[_Text], block: int) -> Tensor:
        """(n, d) of all tokens of texts, as they were before whitening."""
        states = torch.stack([states[block] for text in texts for states in text.states])
        return self._plain(states, block)

    def _plain(self, states: Tensor, block: int) -> Tensor:
        plain: Tensor = torch.linalg.solve(self.whitening[block].T, states.T).T
        return nn.functional.normalize(plain, dim=1)

    def _unique(self, texts: Sequence[_Text], first: Explained) -> bool:
        """Whether no token could be left out, or another stand in its place."""
        share = len(first.own) / first.width
        if not (float(first.own.min()) >= CERTAIN and share <= LARGEST_SHARE):
            return False
        ways = {text.tokens[:n] for text in texts for n in range(1, len(text.tokens) + 1)}
        number = 0
        for text in texts:
            places = range(text.begins, len(text.tokens))
            for place in (*places[:1], *places[1 + text.copies :]):
                before = self._read_as(text.tokens[:place])
                others = [
                    branch.states[0]
                    for branch in text.rivals + text.aside
                    if self._read_as(branch.prefix) == before
                    and (*branch.prefix, branch.token) not in ways
                ]
                if others:
                    moved = first.exchanged(number, self._plain(torch.stack(others), 0))
                    if not float(moved.min()) >= first.needed:
                        return False
                number += 1
        return True


def _with(found: Sequence[_Text], text: _Text) -> list[_Text]:
    """Texts and one more; one that it goes on from is a part of it, and no text of its own."""
    for i, begun in enumerate(found):
        known = len(begun.tokens)
        if text.tokens[:known] == begun.tokens and text.begins == known:
            whole = _Text(
                text.tokens,
                (*begun.fits, *text.fits[known:]),
                begun.score + text.score,
                text.left,
                begun.rivals + text.rivals,
                begun.aside + text.aside,
                begun.states + text.states,
                begun.copies,
            )
            return [*found[:i], whole, *found[i + 1 :]]
    return [*found, text]


def _begins(text: _Text, other: _Text) -> bool:
    """Whether a text is a beginning of another: what it went on with was cut off."""
    known = len(text.tokens)
    return len(other.tokens) > known and other.tokens[:known] == text.tokens


def _cut(text: _Text) -> _Text:
    """Without its last token."""
    return replace(text, tokens=text.tokens[:-1], fits=text.fits[:-1], states=text.states[:-1])


def _aside(text: _Text, more: tuple[_Branch, ...]) -> _Text:
    return replace(text, aside=text.aside + more)


__all__ = ["SubspaceTexts"]
