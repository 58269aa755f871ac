"""Texts of encoders from the row spaces of gradients: pairs of token and position, then texts.

The first block of an encoder with absolute positions reads what a token and its position determine.
So its rows name pairs of both, by the pursuit that names words: the pairs of one text are the text.
Several texts share positions, and then their pairs span each other's. Which pairs belong together
shows in the second block, where a state depends on the whole text: a text is right where all its
states lie in the span of the shared rows. TIGER (arXiv 2606.18312) descends on the distance to that
span. The descent is done here over the pairs that the first block allows, from several starts, and
each text is then corrected token by token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from lightning_fedleak.attacks.base import UnusableObservation
from lightning_fedleak.attacks.row_space import Atoms, KnownInput, SharedRows, explain, input_rows
from lightning_fedleak.attacks.texts.base import Deadline
from lightning_fedleak.attacks.texts.descent import RowAdam
from lightning_fedleak.attacks.texts.subspace_rows import (
    CERTIFICATE,
    FIT,
    BlockInputs,
    Explained,
    RecoveredText,
)


@dataclass(frozen=True)
class _SearchLimits:
    """Settings of the search. None of the values was tuned."""

    min_length: int = 16  # positions that are tried first
    max_length: int = 512  # positions at most
    growth: float = 1.6  # factor between numbers of positions that are tried one after the other
    max_pairs: int = 1 << 16  # pairs of token and position at most; bounds the memory
    spanned: float = 1e-4  # norm of a unit state outside of the rows, up to which it is in them
    same: float = 1e-8  # singular value of unit states below which they share a direction
    starts: int = 4  # descents from random weights; more find a text more often
    steps: int = 50  # steps of a descent
    rate: float = 0.3  # Adam's learning rate of the weights, which start with deviation 1/2
    penalty: float = 3.0  # subtracted at the start from weights of pairs that a text has already
    rounds: int = 8  # times that all lengths are tried
    sweeps: int = 8  # corrections of a whole text
    max_exchanges: int = 8  # positions at which two tokens change at once; the cost is quadratic
    tokens_at_once: int = 1 << 12  # in one run of the model; bounds the memory


SEARCH = _SearchLimits()


class EncoderSearch:
    """The search for an encoder's texts, whose pairs and states explain the shared rows.

    Args:
        bottom: a copy of the model, within a session. Its first input is block 1's.
        first_input: block 1's input.
        whitening: (d, d) of each block's states.
        shared: the rows of each block.
        bag: (n,) token ids that the texts are made of.
        seed: The seed of the starts.

    Raises:
        UnusableObservation: the rows fill the space of the hidden states.
    """

    def __init__(
        self,
        bottom: BlockInputs,
        first_input: KnownInput,
        whitening: Sequence[Tensor],
        shared: Sequence[SharedRows],
        bag: Tensor,
        seed: int,
    ) -> None:
        largest = CERTIFICATE.largest_share
        if any(len(rows.principal) >= largest * rows.whole.shape[1] for rows in shared):
            raise UnusableObservation(
                "what was shared fills the space of hidden states: too many tokens"
            )
        self.bottom, self.first_input = bottom, first_input
        self.shared, self.bag = shared, bag
        self.whitening = whitening
        self.precise = all(rows.exact for rows in shared)
        self.max_length = min(bottom.context or SEARCH.max_length, SEARCH.max_length)
        self.generator = torch.Generator().manual_seed(seed)
        self.n_tried = 0
        self._words = bottom.word_embeddings(bag)
        self._explained = [white[:0] for white in whitening[1:]]
        self._directions = [
            torch.linalg.qr((rows.principal @ white).T).Q.T
            for rows, white in zip(shared[1:], whitening[1:], strict=True)
        ]

    def run(self, deadline: Deadline) -> tuple[list[RecoveredText], bool, bool]:
        """Return the texts, whether the search has ended, and whether the texts are certain."""
        pairs = self._pairs(deadline).trimmed()
        likely = self._single(pairs)
        if not likely:
            return [], True, False
        several = pairs.allowed.sum(1) > 1
        lengths = self._lengths(pairs)
        if not (self.precise and pairs.complete and bool(several.any()) and lengths):
            texts = [tuple(likely)]
            return texts, True, self._certain(texts, pairs)
        texts, finished = self._separate(pairs, lengths, deadline)
        return texts, finished, finished and self._certain(texts, pairs)

    # ---- pairs of token and position --------------------------------------------------------

    def _pairs(self, deadline: Deadline) -> _Pairs:
        """Return the pairs that explain block 1's rows, with as many positions as that takes."""
        length = min(SEARCH.min_length, self.max_length)
        pairs = self._pairs_up_to(length)
        while not pairs.complete and length < self.max_length and self.shared[0].exact:
            length = min(self.max_length, int(length * SEARCH.growth))
            if deadline.passed or length * len(self.bag) > SEARCH.max_pairs:
                break
            more = self._pairs_up_to(length)
            pairs = more if more.residual < pairs.residual else pairs
        return pairs

    def _pairs_up_to(self, length: int) -> _Pairs:
        """Return the pairs that the rows span, if these explain all rows; else a few that do."""
        shared, ids = self.shared[0], self.bag[:, None].expand(-1, length)
        states = input_rows(
            self.bottom.anatomy, self.first_input, ids, autocast=self.bottom.autocast
        ).float()
        unit = nn.functional.normalize(states.double(), dim=2).transpose(0, 1)
        rows = torch.linalg.qr(shared.principal.T).Q
        inside = (unit - (unit @ rows) @ rows.T).norm(dim=2) <= SEARCH.spanned
        if shared.exact and bool(inside.any()):
            basis = _basis(unit[inside], SEARCH.same)
            rest = shared.whole - (shared.whole @ basis.T) @ basis
            residual = float(rest.norm()) / shared.noise_norm
            if residual <= CERTIFICATE.residual:
                return _Pairs(unit, inside, inside.float(), residual, True)
        flat = states.flatten(0, 1)
        beside = flat.new_zeros(0, flat.shape[1], dtype=torch.float64)
        result = explain(Atoms(flat, beside), shared, flat.new_zeros(len(flat)))
        chosen = torch.zeros_like(result.scores, dtype=torch.bool).index_fill(0, result.types, True)
        scores = result.scores.view(len(ids), length).T
        return _Pairs(
            unit, chosen.view(len(ids), length).T, scores, result.residual, result.certified
        )

    def _single(self, pairs: _Pairs) -> list[int]:
        """Return the likeliest token of each position; -1 where there is none."""
        scores = pairs.scores.masked_fill(~pairs.allowed, -torch.inf)
        tokens = self.bag[scores.argmax(1)].masked_fill(~pairs.allowed.any(1), -1)
        return [int(token) for token in tokens]

    # ---- texts that share positions ---------------------------------------------------------

    def _separate(
        self, pairs: _Pairs, lengths: Sequence[int], deadline: Deadline
    ) -> tuple[list[RecoveredText], bool]:
        """Return one text after the other, and whether the time sufficed."""
        texts: list[RecoveredText] = []
        earlier: list[Tensor] = []
        while len(self._directions[0]):
            loss, tokens = self._next(pairs, lengths, earlier, deadline)
            texts.append(tuple(tokens.tolist()))
            if loss > FIT.exact:
                break
            self._project_out(tokens)
            earlier.append(tokens)
        return texts, not deadline.passed

    def _next(
        self, pairs: _Pairs, lengths: Sequence[int], earlier: Sequence[Tensor], deadline: Deadline
    ) -> tuple[float, Tensor]:
        """Return the distance of the first exact text, else of the nearest, and that text."""
        best: tuple[float, Tensor] | None = None
        for length in lengths:
            allowed = pairs.allowed[:length]
            for text in self._descend(allowed, earlier, deadline):
                corrected = self._correct(text, allowed, deadline)
                if best is None or corrected[0] < best[0]:
                    best = corrected
                if best[0] <= FIT.exact:
                    return best
            if deadline.passed:
                break
        assert best is not None
        return best

    def _lengths(self, pairs: _Pairs) -> list[int]:
        """Return the lengths of texts in the order in which they are tried.

        Lengths of texts that end as the longest one does come first, then those after which there
        are fewer pairs.
        """
        counts = [*pairs.allowed.sum(1).tolist(), 0]
        last = pairs.allowed[-1].nonzero()[:, 0]
        fewer = [p + 1 for p in range(len(pairs.allowed)) if counts[p] > counts[p + 1]]
        alike = (pairs.allowed[:, last[:1]].any(1).nonzero()[:, 0] + 1).tolist()
        first = [n for n in reversed(alike) if len(last) == 1]
        others = [n for n in reversed(fewer) if n not in first]
        whole = int(pairs.allowed.any(1).long().cumprod(0).sum())
        return [n for n in (first + first + others) * SEARCH.rounds if n <= whole]

    def _distances(self, states: Tensor) -> Tensor:
        """Return the share (...) of what is new in states that the rows do not explain.

        It is the mean over the blocks.
        """
        total = torch.zeros((), device=states.device)
        for explained, white, directions, x in zip(
            self._explained,
            self.whitening[1:],
            self._directions,
            self.bottom.parts(states)[1:],
            strict=True,
        ):
            x = nn.functional.normalize(x @ white, dim=-1)
            new = x - (x @ explained.T) @ explained
            size = new.square().sum(-1).clamp_min(SEARCH.spanned**2)
            total = total + 1 - (new @ directions.T).square().sum(-1) / size
        return total / len(self._directions)

    def _losses(self, texts: Tensor) -> Tensor:
        """Return the distances (n, L) of texts (n, L)."""
        self.n_tried += len(texts)
        parts = torch.split(texts, _texts_at_once(texts.shape[1]))
        return torch.cat([self._distances(self.bottom.hidden(part)) for part in parts])

    def _descend(self, allowed: Tensor, earlier: Sequence[Tensor], deadline: Deadline) -> Tensor:
        """Return the texts (s, L) at which descents over weights of the allowed pairs end.

        They start from random weights, smaller where earlier texts have their tokens.
        """
        start = torch.randn(SEARCH.starts, *allowed.shape, generator=self.generator) / 2
        start = start.to(self.bag.device, self._words.dtype)
        for text in earlier:
            places, tokens = (self.bag == text[: len(allowed), None]).nonzero().T
            start[:, places, tokens] -= SEARCH.penalty
        adam = RowAdam(start, SEARCH.rate)
        with torch.inference_mode(False), torch.enable_grad():
            for _ in range(SEARCH.steps):
                if deadline.passed:
                    break
                leaf = adam.values.detach().requires_grad_()
                weights = leaf.masked_fill(~allowed, -torch.inf).softmax(-1)
                states = self.bottom.hidden_from(weights @ self._words)
                loss = self._distances(states).mean(1).sum()
                (gradient,) = torch.autograd.grad(loss, leaf)
                adam.step(gradient)
        self.n_tried += SEARCH.starts * SEARCH.steps
        return self.bag[adam.values.masked_fill(~allowed, -torch.inf).argmax(-1)]

    def _correct(self, text: Tensor, allowed: Tensor, deadline: Deadline) -> tuple[float, Tensor]:
        """Return a text's distance, and the text, after exchanges of tokens that bring it nearer.

        One token is exchanged at a time, or two at the places that are farthest off.
        """
        best = float(self._losses(text[None]).mean())
        for _ in range(SEARCH.sweeps):
            before = best
            for place in torch.randperm(len(text), generator=self.generator).tolist():
                texts = self._with_others(text[None], place, allowed)
                if best > FIT.exact:
                    best, text = self._nearest(best, text, texts, deadline)
            if best >= before:
                losses, count = self._losses(text[None])[0], min(SEARCH.max_exchanges, len(text))
                far = losses.topk(count).indices.tolist()
                for i, place in enumerate(far):
                    texts = self._with_others(text[None], place, allowed)
                    two = [self._with_others(texts, other, allowed) for other in far[:i]]
                    if two and best > FIT.exact:
                        best, text = self._nearest(best, text, torch.cat(two), deadline)
            if best >= before:
                break
        return best, text

    def _nearest(
        self, best: float, text: Tensor, others: Tensor, deadline: Deadline
    ) -> tuple[float, Tensor]:
        """Return the nearest of ``text``, whose distance is ``best``, and others (n, L)."""
        for part in torch.split(others, _texts_at_once(others.shape[1])):
            if len(part) and not deadline.passed:
                losses = self._losses(part).mean(1)
                i = int(losses.argmin())
                if float(losses[i]) < best:
                    best, text = float(losses[i]), part[i]
        return best, text

    def _with_others(self, texts: Tensor, place: int, allowed: Tensor) -> Tensor:
        """Return texts (n, L), each with every other token that a place may hold: (m, L)."""
        tokens = self.bag[allowed[place]]
        changed = texts.repeat_interleave(len(tokens), 0)
        changed[:, place] = tokens.repeat(len(texts))
        other = changed[:, place] != texts[:, place].repeat_interleave(len(tokens), 0)
        return changed[other]

    def _project_out(self, text: Tensor) -> None:
        """Project the states of a text out of the directions that are left to explain."""
        for i, x in enumerate(self._states(text)[1:]):
            x = nn.functional.normalize(x @ self.whitening[i + 1], dim=-1)
            explained = torch.cat([self._explained[i].to(x), x])
            self._explained[i] = _basis(explained, SEARCH.spanned)
            rest = self._directions[i]
            rest = rest - (rest @ self._explained[i].T) @ self._explained[i]
            self._directions[i] = _basis(rest, 0.5)

    def _states(self, text: Tensor) -> list[Tensor]:
        """Return for each block what it reads of a text (L,): (L, d)."""
        return [x[0] for x in self.bottom.parts(self.bottom.hidden(text[None]))]

    def _certain(self, texts: Sequence[RecoveredText], pairs: _Pairs) -> bool:
        """Return whether nothing is missing, and nothing could replace another.

        All rows of every block are explained up to rounding. No pair can be excluded, nor its token
        exchanged for another of the bag: in the first block where that distinguishes them, else in
        the second.
        """
        if not self.precise or not pairs.complete or not texts:
            return False
        if any(token < 0 for tokens in texts for token in tokens):
            return False
        if not self._certain_pairs(texts, pairs):
            return False
        rows = [torch.tensor(tokens, device=self.bag.device) for tokens in texts]
        states = [torch.cat(parts) for parts in zip(*map(self._states, rows), strict=True)]
        if len(states[0]) > CERTIFICATE.largest_share * states[0].shape[1]:
            return False
        explained = [
            Explained.from_states(shared, x)
            for shared, x in zip(self.shared[1:], states[1:], strict=True)
        ]
        if not all(block.residual <= CERTIFICATE.residual for block in explained):
            return False
        return self._unique(rows, pairs, explained[0])

    def _certain_pairs(self, texts: Sequence[RecoveredText], pairs: _Pairs) -> bool:
        """Return whether block 1 needs every pair, and no pair that is not allowed replaces one."""
        used = sorted({(p, t) for tokens in texts for p, t in enumerate(tokens)})
        if len(used) > CERTIFICATE.largest_share * self.shared[0].whole.shape[1]:
            return False
        index = {int(token): i for i, token in enumerate(self.bag)}
        states = torch.stack([pairs.states[p, index[t]] for p, t in used])
        first = Explained.from_states(self.shared[0], states)
        necessary = float(first.losses.min()) >= CERTIFICATE.necessary
        if not (necessary and first.residual <= CERTIFICATE.residual):
            return False
        for number, (place, token) in enumerate(used):
            others = ~pairs.allowed[place]
            others[index[token]] = False
            rivals = pairs.states[place][others]
            exchanged = first.exchanged(number, rivals)
            if len(rivals) and not float(exchanged.min()) >= first.exchange_limit:
                return False
        return True

    def _unique(self, rows: Sequence[Tensor], pairs: _Pairs, second: Explained) -> bool:
        """Return whether no other pair that block 1 allows could be in a text."""
        if not float(second.losses.min()) >= CERTIFICATE.necessary:
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
                    exchanged = second.exchanged(number, states)
                    if not float(exchanged.min()) >= second.exchange_limit:
                        return False
                number += 1
        return True


@dataclass(frozen=True, eq=False)
class _Pairs:
    """Pairs of token and position.

    Attributes:
        states: (P, n, d) float64 unit, what block 1 reads of each token at each position.
        allowed: (P, n) bool, the pairs that texts may hold.
        scores: (P, n) higher for surer pairs.
        residual: what they leave of the rows, in units of the noise.
        complete: whether that is no more than rounding.
    """

    states: Tensor
    allowed: Tensor
    scores: Tensor
    residual: float
    complete: bool

    def trimmed(self) -> _Pairs:
        """Return the pairs up to the last position where one is allowed."""
        places = self.allowed.any(1).nonzero()[:, 0]
        end = int(places.max()) + 1 if len(places) else 0
        return replace(
            self, states=self.states[:end], allowed=self.allowed[:end], scores=self.scores[:end]
        )


def _texts_at_once(length: int) -> int:
    return max(1, SEARCH.tokens_at_once // length)


def _basis(rows: Tensor, min_singular: float) -> Tensor:
    """Return a basis (k, d) of rows (n, d), with singular values above ``min_singular``."""
    _, s, basis = torch.linalg.svd(rows, full_matrices=False)
    directions: Tensor = basis[s > min_singular]
    return directions
