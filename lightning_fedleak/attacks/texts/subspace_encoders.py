"""Texts of encoders off the row spaces of gradients: pairs of token and position, then texts.

The first block of an encoder with absolute positions reads what a token and its position determine.
So its rows name pairs of both, by the pursuit that names words: the pairs of one text are the text.
Several texts share positions, and then their pairs span each other's. Which go together shows in
the second block, where a state hangs on the whole text: a text is right where all its states lie in
the span of the shared rows. TIGER (arXiv 2606.18312) takes the distance to that span for a loss and
descends. That is done here over the pairs that the first block leaves, from several starts, each
text put right token by token behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from lightning_fedleak.attacks.base import UnusableObservation
from lightning_fedleak.attacks.row_space.linear_maps import KnownInput, input_rows
from lightning_fedleak.attacks.row_space.pursuit import Atoms, SharedRows, explain
from lightning_fedleak.attacks.texts.base import Deadline
from lightning_fedleak.attacks.texts.descent import RowAdam
from lightning_fedleak.attacks.texts.subspace_rows import (
    CERTAIN,
    LARGEST_SHARE,
    RESIDUAL,
    BlockInputs,
    Explained,
    FoundText,
)

_SHORTEST, _LONGEST, _GROWTH = 16, 512, 1.6
_PAIRS = 1 << 16
_SPANNED, _SAME = 1e-4, 1e-8
_EXACT = 1e-6
_STARTS, _STEPS, _RATE = 4, 50, 0.3
_SWEEPS, _FAR = 8, 8
_USED = 3.0
_ROUNDS = 8
_AT_ONCE = 1 << 12


class EncoderSearch:
    """Finds the texts whose pairs explain the first block's rows, and their states the others'.

    Args:
        bottom: a copy of the model; within a session. Its first input is block 1's.
        known: block 1's input.
        whitening: (d, d) of each block's states.
        shared: the rows of each block.
        bag: (n,) token ids that the texts are made of.
        seed: of the starts.

    Raises:
        UnusableObservation: the rows fill the space of the hidden states.
    """

    def __init__(
        self,
        bottom: BlockInputs,
        known: KnownInput,
        whitening: Sequence[Tensor],
        shared: Sequence[SharedRows],
        bag: Tensor,
        seed: int,
    ) -> None:
        if any(len(rows.principal) >= LARGEST_SHARE * rows.whole.shape[1] for rows in shared):
            raise UnusableObservation(
                "what was shared fills the space of the hidden states: more tokens than its "
                "directions tell apart"
            )
        self.bottom, self.known, self.shared, self.bag = bottom, known, shared, bag
        self.whitening = whitening
        self.precise = all(rows.exact for rows in shared)
        self.longest = min(bottom.context or _LONGEST, _LONGEST)
        self.generator = torch.Generator().manual_seed(seed)
        self.tried = 0
        self._words = bottom.word_embeddings(bag)
        self._explained = [white[:0] for white in whitening[1:]]
        self._directions = [
            torch.linalg.qr((rows.principal @ white).T).Q.T
            for rows, white in zip(shared[1:], whitening[1:], strict=True)
        ]

    def run(self, deadline: Deadline) -> tuple[list[FoundText], bool, bool]:
        """The texts, whether it came to an end by itself, and whether they are certain."""
        pairs = self._pairs(deadline).cut()
        likely = self._single(pairs)
        if not likely:
            return [], True, False
        alone = torch.tensor([likely], device=self.bag.device)
        several = pairs.allowed.sum(1) > 1
        lengths = self._lengths(pairs)
        if not (self.precise and pairs.complete and bool(several.any()) and lengths):
            texts = [FoundText(tuple(likely), tuple(self._fits(alone)[0].tolist()))]
            return texts, True, self._certain(texts, pairs)
        texts, finished = self._told_apart(pairs, lengths, deadline)
        return texts, finished, finished and self._certain(texts, pairs)

    # ---- pairs of token and position --------------------------------------------------------

    def _pairs(self, deadline: Deadline) -> _Pairs:
        """The pairs that explain block 1's rows, with as many positions as that takes."""
        length, tried = min(_SHORTEST, self.longest), None
        while tried is None or not tried.complete:
            if tried is not None and (deadline.passed or length * len(self.bag) > _PAIRS):
                break
            more = self._pairs_of(length)
            if tried is None or more.residual < tried.residual:
                tried = more
            if length == self.longest or not self.shared[0].exact:
                break
            length = min(self.longest, int(length * _GROWTH))
        return tried

    def _pairs_of(self, length: int) -> _Pairs:
        """Those that the rows span, if they explain all rows; else a few that do."""
        shared, ids = self.shared[0], self.bag[:, None].expand(-1, length)
        states = input_rows(
            self.bottom.anatomy, self.known, ids, autocast=self.bottom.autocast
        ).float()
        unit = nn.functional.normalize(states.double(), dim=2).transpose(0, 1)
        rows = torch.linalg.qr(shared.principal.T).Q
        inside = (unit - (unit @ rows) @ rows.T).norm(dim=2) <= _SPANNED
        left = shared.whole
        if shared.exact and bool(inside.any()):
            basis = _basis(unit[inside], _SAME)
            left = left - (left @ basis.T) @ basis
            residual = float(left.norm()) / shared.floor
            if residual <= RESIDUAL:
                return _Pairs(unit, inside, inside.float(), residual, True)
        flat = states.flatten(0, 1)
        beside = flat.new_zeros(0, flat.shape[1], dtype=torch.float64)
        found = explain(Atoms(flat, beside), shared, flat.new_zeros(len(flat)))
        chosen = torch.zeros_like(found.scores, dtype=torch.bool).index_fill(0, found.types, True)
        scores = found.scores.view(len(ids), length).T
        return _Pairs(
            unit, chosen.view(len(ids), length).T, scores, found.residual, found.certified
        )

    def _single(self, pairs: _Pairs) -> list[int]:
        """The likeliest pair of each position; -1 where none was found."""
        scores = pairs.scores.masked_fill(~pairs.allowed, -torch.inf)
        tokens = self.bag[scores.argmax(1)].masked_fill(~pairs.allowed.any(1), -1)
        return [int(token) for token in tokens]

    # ---- texts that share positions ---------------------------------------------------------

    def _told_apart(
        self, pairs: _Pairs, lengths: Sequence[int], deadline: Deadline
    ) -> tuple[list[FoundText], bool]:
        """Texts one after the other, each from several starts."""
        texts: list[FoundText] = []
        taken: list[Tensor] = []
        while len(self._directions[0]):
            loss, tokens = self._next(pairs, lengths, taken, deadline)
            fits = self._fits(tokens[None])[0]
            texts.append(FoundText(tuple(tokens.tolist()), tuple(fits.tolist())))
            if loss > _EXACT:
                break
            self._take(tokens)
            taken.append(tokens)
        return texts, not deadline.passed

    def _next(
        self, pairs: _Pairs, lengths: Sequence[int], taken: Sequence[Tensor], deadline: Deadline
    ) -> tuple[float, Tensor]:
        """The nearest text, and how near: the first that is exact."""
        best: tuple[float, Tensor] | None = None
        for length in lengths:
            allowed = pairs.allowed[:length]
            for text in self._descended(allowed, taken, deadline):
                swept = self._swept(text, allowed, deadline)
                if best is None or swept[0] < best[0]:
                    best = swept
                if best[0] <= _EXACT:
                    return best
            if deadline.passed:
                break
        assert best is not None
        return best

    def _lengths(self, pairs: _Pairs) -> list[int]:
        """Lengths of texts, in the order in which they are tried.

        First those of texts that end as the longest one does, then those behind which there are
        fewer pairs.
        """
        counts = [*pairs.allowed.sum(1).tolist(), 0]
        last = pairs.allowed[-1].nonzero()[:, 0]
        fewer = [p + 1 for p in range(len(pairs.allowed)) if counts[p] > counts[p + 1]]
        alike = (pairs.allowed[:, last[:1]].any(1).nonzero()[:, 0] + 1).tolist()
        first = [n for n in reversed(alike) if len(last) == 1]
        others = [n for n in reversed(fewer) if n not in first]
        whole = int(pairs.allowed.any(1).long().cumprod(0).sum())
        return [n for n in (first + first + others) * _ROUNDS if n <= whole]

    def _distances(self, states: Tensor) -> Tensor:
        """(...) share of what is new in states that the rows do not explain, mean of the blocks."""
        total = torch.zeros((), device=states.device)
        for known, white, directions, x in zip(
            self._explained,
            self.whitening[1:],
            self._directions,
            self.bottom.parts(states)[1:],
            strict=True,
        ):
            x = nn.functional.normalize(x @ white, dim=-1)
            new = x - (x @ known.T) @ known
            size = new.square().sum(-1).clamp_min(_SPANNED**2)
            total = total + 1 - (new @ directions.T).square().sum(-1) / size
        return total / len(self._directions)

    def _losses(self, texts: Tensor) -> Tensor:
        """(n, L) distances of texts (n, L)."""
        self.tried += len(texts)
        parts = torch.split(texts, _at_once(texts.shape[1]))
        return torch.cat([self._distances(self.bottom.hidden(part)) for part in parts])

    def _descended(self, allowed: Tensor, taken: Sequence[Tensor], deadline: Deadline) -> Tensor:
        """(s, L) texts that descents over weights of the allowed pairs end at.

        They start from random weights, smaller where texts that were taken have their tokens.
        """
        begun = torch.randn(_STARTS, *allowed.shape, generator=self.generator) / 2
        begun = begun.to(self.bag.device, self._words.dtype)
        for text in taken:
            held = (self.bag == text[: len(allowed), None]).nonzero().T
            begun[:, held[0], held[1]] -= _USED
        adam = RowAdam(begun, _RATE)
        with torch.inference_mode(False), torch.enable_grad():
            for _ in range(_STEPS):
                if deadline.passed:
                    break
                leaf = adam.values.detach().requires_grad_()
                weights = leaf.masked_fill(~allowed, -torch.inf).softmax(-1)
                states = self.bottom.hidden_from(weights @ self._words)
                loss = self._distances(states).mean(1).sum()
                (gradient,) = torch.autograd.grad(loss, leaf)
                adam.step(gradient)
        self.tried += _STARTS * _STEPS
        return self.bag[adam.values.masked_fill(~allowed, -torch.inf).argmax(-1)]

    def _swept(self, text: Tensor, allowed: Tensor, deadline: Deadline) -> tuple[float, Tensor]:
        """A text with tokens exchanged, one or two at once, where that brings it nearer; how near.

        Two at once are tried at the places that are furthest off.
        """
        best = float(self._losses(text[None]).mean())
        for _ in range(_SWEEPS):
            before = best
            for place in torch.randperm(len(text), generator=self.generator).tolist():
                texts = self._with_others(text[None], place, allowed)
                if best > _EXACT:
                    best, text = self._nearest(best, text, texts, deadline)
            if best >= before:
                far = self._losses(text[None])[0].topk(min(_FAR, len(text))).indices.tolist()
                for i, place in enumerate(far):
                    texts = self._with_others(text[None], place, allowed)
                    two = [self._with_others(texts, other, allowed) for other in far[:i]]
                    if two and best > _EXACT:
                        best, text = self._nearest(best, text, torch.cat(two), deadline)
            if best >= before:
                break
        return best, text

    def _nearest(
        self, best: float, text: Tensor, others: Tensor, deadline: Deadline
    ) -> tuple[float, Tensor]:
        """The nearest of texts (n, L) if it is nearer than ``best``, which ``text`` is."""
        for part in torch.split(others, _at_once(others.shape[1])):
            if len(part) and not deadline.passed:
                losses = self._losses(part).mean(1)
                least = int(losses.argmin())
                if float(losses[least]) < best:
                    best, text = float(losses[least]), part[least]
        return best, text

    def _with_others(self, texts: Tensor, place: int, allowed: Tensor) -> Tensor:
        """(m, L) texts (n, L), each with every other token that a place may hold."""
        tokens = self.bag[allowed[place]]
        changed = texts.repeat_interleave(len(tokens), 0)
        changed[:, place] = tokens.repeat(len(texts))
        other = changed[:, place] != texts[:, place].repeat_interleave(len(tokens), 0)
        return changed[other]

    def _take(self, text: Tensor) -> None:
        """Takes the states of a text out of what is to be explained."""
        for i, x in enumerate(self._states(text)[1:]):
            x = nn.functional.normalize(x @ self.whitening[i + 1], dim=-1)
            known = torch.cat([self._explained[i].to(x), x])
            self._explained[i] = _basis(known, _SPANNED)
            left = self._directions[i]
            left = left - (left @ self._explained[i].T) @ self._explained[i]
            self._directions[i] = _basis(left, 0.5)

    def _states(self, text: Tensor) -> list[Tensor]:
        """What each block reads of a text (L,): (L, d)."""
        return [x[0] for x in self.bottom.parts(self.bottom.hidden(text[None]))]

    def _fits(self, texts: Tensor) -> Tensor:
        """(n, L) share of states that the rows explain; of gaps 0."""
        filled = texts.where(texts >= 0, self.bag[0])
        return (1 - self._losses(filled)).clamp(0, 1).masked_fill(texts < 0, 0.0)

    # ---- the certificate --------------------------------------------------------------------

    def _certain(self, texts: Sequence[FoundText], pairs: _Pairs) -> bool:
        """Whether nothing is missing, and nothing could stand in another's place.

        All rows of every block are explained up to rounding. No pair can be left out, nor its token
        exchanged for another of the bag: in the first block where that tells them apart, else in
        the second.
        """
        if not self.precise or not pairs.complete or not texts:
            return False
        if any(token < 0 for text in texts for token in text.tokens):
            return False
        rows = [torch.tensor(text.tokens, device=self.bag.device) for text in texts]
        every = sorted({(p, t) for text in texts for p, t in enumerate(text.tokens)})
        if len(every) > LARGEST_SHARE * self.shared[0].whole.shape[1]:
            return False
        index = {int(token): i for i, token in enumerate(self.bag)}
        first = Explained.of(
            self.shared[0], torch.stack([pairs.states[p, index[t]] for p, t in every])
        )
        if not (first.residual <= RESIDUAL and float(first.own.min()) >= CERTAIN):
            return False
        for number, (place, token) in enumerate(every):
            rest = ~pairs.allowed[place]
            rest[index[token]] = False
            others = pairs.states[place][rest]
            if len(others) and not float(first.exchanged(number, others).min()) >= first.needed:
                return False
        states = [torch.cat(parts) for parts in zip(*map(self._states, rows), strict=True)]
        if len(states[0]) > LARGEST_SHARE * states[0].shape[1]:
            return False
        explained = [
            Explained.of(shared, x) for shared, x in zip(self.shared[1:], states[1:], strict=True)
        ]
        if not all(block.residual <= RESIDUAL for block in explained):
            return False
        return self._unique(rows, pairs, explained[0])

    def _unique(self, rows: Sequence[Tensor], pairs: _Pairs, second: Explained) -> bool:
        """Whether no other pair that block 1 allows could stand in a text."""
        if not float(second.own.min()) >= CERTAIN:
            return False
        number = 0
        for text in rows:
            for place, token in enumerate(text.tolist()):
                others = self.bag[pairs.allowed[place]]
                others = others[others != token]
                if len(others):
                    texts = text.repeat(len(others), 1)
                    texts[:, place] = others
                    states = self.bottom.parts(self.bottom.hidden(texts))[1][:, place]
                    if not float(second.exchanged(number, states).min()) >= second.needed:
                        return False
                number += 1
        return True


@dataclass(frozen=True, eq=False)
class _Pairs:
    """Pairs of token and position.

    Attributes:
        states: (P, n, d) float64 unit, what block 1 reads of each token at each position.
        allowed: (P, n) bool, the pairs that texts may hold.
        scores: (P, n) the higher the surer.
        residual: what they leave of the rows, in units of the noise.
        complete: whether that is rounding.
    """

    states: Tensor
    allowed: Tensor
    scores: Tensor
    residual: float
    complete: bool

    def cut(self) -> _Pairs:
        """Up to the last position that has one."""
        held = self.allowed.any(1).nonzero()[:, 0]
        ends = int(held.max()) + 1 if len(held) else 0
        return replace(
            self,
            states=self.states[:ends],
            allowed=self.allowed[:ends],
            scores=self.scores[:ends],
        )


def _at_once(length: int) -> int:
    """Texts of so many tokens that go through the model together."""
    return max(1, _AT_ONCE // length)


def _basis(rows: Tensor, least: float) -> Tensor:
    """(k, d) orthonormal basis of rows (n, d), without directions of singular values <= least."""
    _, s, basis = torch.linalg.svd(rows, full_matrices=False)
    kept: Tensor = basis[s > least]
    return kept


__all__ = ["EncoderSearch"]
