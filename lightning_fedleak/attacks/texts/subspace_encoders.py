"""Texts of encoders from the row spaces of gradients: pairs of token and position, then texts.

In an encoder with absolute positions, the input of the first block depends only on a token and its
position. So the first block's rows identify pairs of token and position, by the same pursuit that
recovers words. If there is one text, its pairs are the text.

If there are several texts, a position has several pairs, and the second block shows which of them
belong together: its input depends on the whole text, and a text is correct if all its states lie in
the span of the shared rows. TIGER (arXiv 2606.18312) minimises the distance to that span by
gradient descent. Here the descent is restricted to the pairs that the first block allows. It runs
from several random starts, and each text is then corrected token by token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from lightning_fedleak.attacks.base import UnusableObservation
from lightning_fedleak.attacks.row_space import Atoms, KnownInput, SharedRows, explain, input_rows
from lightning_fedleak.attacks.texts import subspace_rows
from lightning_fedleak.attacks.texts.base import WorkLimit
from lightning_fedleak.attacks.texts.descent import RowAdam

# Settings of the search. None of the values was tuned.
MIN_LENGTH = 16  # number of positions that is tried first
MAX_LENGTH = 512  # positions at most
GROWTH = 1.6  # factor by which the number of positions grows from trial to trial
MAX_PAIRS = 1 << 16  # pairs of token and position at most; bounds the memory
SPANNED = 1e-4  # max. norm of a unit state's part outside of the rows' span
SAME = 1e-8  # singular value of unit states below which they share a direction
STARTS = 4  # descents from random weights; more find a text more often
STEPS = 50  # steps of a descent
RATE = 0.3  # Adam's learning rate of the weights, which start with deviation 1/2
PENALTY = 3.0  # subtracted from the initial weights of pairs in earlier texts
ROUNDS = 8  # passes over all lengths
SWEEPS = 8  # passes of corrections over a whole text
MAX_EXCHANGES = 8  # positions at which two tokens change at once; the cost is quadratic
TOKENS_AT_ONCE = 1 << 12  # in a run on whole texts; bounds the memory


class EncoderSearch:
    """The search for an encoder's texts, whose pairs and states explain the shared rows.

    Args:
        bottom: A copy of the model whose :meth:`session` is open. Its first input is block 1's.
        first_input: The input of block 1, as a function of token and position.
        whitening: The whitening (d, d) of each block's states.
        shared: The rows of each block.
        bag: (n,) the distinct token ids of the texts.
        seed: The seed of the random starts.

    Raises:
        UnusableObservation: the rows fill the space of the hidden states.
    """

    def __init__(
        self,
        bottom: subspace_rows.BlockInputs,
        first_input: KnownInput,
        whitening: Sequence[Tensor],
        shared: Sequence[SharedRows],
        bag: Tensor,
        seed: int,
    ) -> None:
        largest = subspace_rows.CERTIFICATE.largest_share
        if any(len(rows.principal) >= largest * rows.whole.shape[1] for rows in shared):
            raise UnusableObservation("too many tokens: they fill the space of hidden states")
        self.bottom, self.first_input = bottom, first_input
        self.shared, self.bag = shared, bag
        self.whitening = whitening
        self.precise = all(rows.exact for rows in shared)
        self.max_length = min(bottom.context or MAX_LENGTH, MAX_LENGTH)
        self.generator = torch.Generator().manual_seed(seed)
        self.n_tried = 0
        self._words = bottom.word_embeddings(bag)
        # For each block from the second on: the states of recovered texts, and the rows' span.
        self._explained = [white[:0] for white in whitening[1:]]
        self._directions = [
            torch.linalg.qr((rows.principal @ white).T).Q.T
            for rows, white in zip(shared[1:], whitening[1:], strict=True)
        ]

    def run(self, limit: WorkLimit) -> tuple[list[subspace_rows.RecoveredText], bool, bool]:
        """Recover the texts.

        Returns:
            The texts, whether the search ended before the limit, and whether the texts are
            certain.
        """
        pairs = self._pairs(limit).trimmed()
        # The likeliest token at each position as one text; -1 at positions without a pair.
        scores = pairs.scores.masked_fill(~pairs.allowed, -torch.inf)
        likely = self.bag[scores.argmax(1)].masked_fill(~pairs.allowed.any(1), -1).tolist()
        if not likely:
            return [], True, False
        # Several texts are sought only if precise rows allow several tokens at a position.
        several = pairs.allowed.sum(1) > 1
        lengths = self._lengths(pairs)
        if not (self.precise and pairs.complete and bool(several.any()) and lengths):
            texts = [tuple(likely)]
            return texts, True, self._certain(texts, pairs)
        texts, finished = self._separate(pairs, lengths, limit)
        return texts, finished, finished and self._certain(texts, pairs)

    # ---- pairs of token and position --------------------------------------------------------

    def _pairs(self, limit: WorkLimit) -> _Pairs:
        """Return the pairs that explain block 1's rows, with more positions until they do."""
        length = min(MIN_LENGTH, self.max_length)
        pairs = self._pairs_up_to(length)
        while not pairs.complete and length < self.max_length and self.shared[0].exact:
            length = min(self.max_length, int(length * GROWTH))
            if limit.reached or length * len(self.bag) > MAX_PAIRS:
                break
            more = self._pairs_up_to(length)
            pairs = more if more.residual < pairs.residual else pairs
        return pairs

    def _pairs_up_to(self, length: int) -> _Pairs:
        """Return all pairs in the rows' span if they explain the rows; else a sparse selection."""
        shared, ids = self.shared[0], self.bag[:, None].expand(-1, length)
        states = input_rows(
            self.bottom.anatomy, self.first_input, ids, autocast=self.bottom.autocast
        ).float()
        unit = nn.functional.normalize(states.double(), dim=2).transpose(0, 1)
        rows = torch.linalg.qr(shared.principal.T).Q
        inside = (unit - (unit @ rows) @ rows.T).norm(dim=2) <= SPANNED
        if shared.exact and bool(inside.any()):
            basis = _basis(unit[inside], SAME)
            outside = shared.whole - (shared.whole @ basis.T) @ basis
            residual = float(outside.norm()) / shared.noise_norm
            if residual <= subspace_rows.CERTIFICATE.residual:
                return _Pairs(unit, inside, inside.float(), residual, True)
        flat = states.flatten(0, 1)
        no_basis = flat.new_zeros(0, flat.shape[1], dtype=torch.float64)
        result = explain(Atoms(flat, no_basis), shared, flat.new_zeros(len(flat)))
        chosen = torch.zeros_like(result.scores, dtype=torch.bool).index_fill(0, result.types, True)
        scores = result.scores.view(len(ids), length).T
        return _Pairs(
            unit, chosen.view(len(ids), length).T, scores, result.residual, result.certified
        )

    # ---- texts that share positions ---------------------------------------------------------

    def _separate(
        self, pairs: _Pairs, lengths: Sequence[int], limit: WorkLimit
    ) -> tuple[list[subspace_rows.RecoveredText], bool]:
        """Recover one text after the other; return whether that ended before the limit."""
        texts: list[subspace_rows.RecoveredText] = []
        earlier: list[Tensor] = []
        while len(self._directions[0]):
            loss, tokens = self._next(pairs, lengths, earlier, limit)
            texts.append(tuple(tokens.tolist()))
            if loss > subspace_rows.FIT.exact:
                break
            self._project_out(tokens)
            earlier.append(tokens)
        return texts, not limit.reached

    def _next(
        self, pairs: _Pairs, lengths: Sequence[int], earlier: Sequence[Tensor], limit: WorkLimit
    ) -> tuple[float, Tensor]:
        """Return the distance and the tokens of the first exact text, or else of the nearest."""
        best: tuple[float, Tensor] | None = None
        for length in lengths:
            allowed = pairs.allowed[:length]
            for text in self._descend(allowed, earlier, limit):
                corrected = self._correct(text, allowed, limit)
                if best is None or corrected[0] < best[0]:
                    best = corrected
                if best[0] <= subspace_rows.FIT.exact:
                    return best
            if limit.reached:
                break
        assert best is not None
        return best

    def _lengths(self, pairs: _Pairs) -> list[int]:
        """Return the candidate lengths of texts in the order in which they are tried.

        The longest text may end with a special token. If one token alone is possible at the last
        position, all positions that allow it come first. Then follow positions after which fewer
        pairs are allowed, since a text may end there.
        """
        counts = [*pairs.allowed.sum(1).tolist(), 0]
        last_tokens = pairs.allowed[-1].nonzero()[:, 0]
        fewer = [p + 1 for p in range(len(pairs.allowed)) if counts[p] > counts[p + 1]]
        same_end = (pairs.allowed[:, last_tokens[:1]].any(1).nonzero()[:, 0] + 1).tolist()
        preferred = [n for n in reversed(same_end) if len(last_tokens) == 1]
        further = [n for n in reversed(fewer) if n not in preferred]
        longest = int(pairs.allowed.any(1).long().cumprod(0).sum())
        return [n for n in (preferred + preferred + further) * ROUNDS if n <= longest]

    def _distances(self, states: Tensor) -> Tensor:
        """Return the distance (...) of states from the rows, as the mean over the blocks.

        It is the squared share of a state's new part that lies outside of the rows' span. The new
        part is the part outside of the states of earlier texts.
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
            size = new.square().sum(-1).clamp_min(SPANNED**2)
            total = total + 1 - (new @ directions.T).square().sum(-1) / size
        return total / len(self._directions)

    def _losses(self, texts: Tensor) -> Tensor:
        """Return the distances (n, L) of texts (n, L)."""
        self.n_tried += len(texts)
        return self._distances(self.bottom.hidden(texts))

    def _descend(self, allowed: Tensor, earlier: Sequence[Tensor], limit: WorkLimit) -> Tensor:
        """Return the texts (s, L) at which gradient descents from random starts end.

        The variables are the softmax weights of the allowed tokens at each position. The initial
        weights of tokens that earlier texts have there are reduced by a penalty.
        """
        start = torch.randn(STARTS, *allowed.shape, generator=self.generator) / 2
        start = start.to(self.bag.device, self._words.dtype)
        for text in earlier:
            places, tokens = (self.bag == text[: len(allowed), None]).nonzero().T
            start[:, places, tokens] -= PENALTY
        adam = RowAdam(start, RATE)
        with torch.inference_mode(False), torch.enable_grad():
            for _ in range(STEPS):
                if limit.reached:
                    break
                leaf = adam.values.detach().requires_grad_()
                weights = leaf.masked_fill(~allowed, -torch.inf).softmax(-1)
                states = self.bottom.hidden_from(weights @ self._words)
                loss = self._distances(states).mean(1).sum()
                (gradient,) = torch.autograd.grad(loss, leaf)
                adam.step(gradient)
        self.n_tried += STARTS * STEPS
        return self.bag[adam.values.masked_fill(~allowed, -torch.inf).argmax(-1)]

    def _correct(self, text: Tensor, allowed: Tensor, limit: WorkLimit) -> tuple[float, Tensor]:
        """Correct a text by exchanges of tokens that reduce its distance.

        Each pass exchanges one token at a time. If no single exchange helps, it exchanges two at
        the positions with the largest distances.

        Returns:
            The distance of the corrected text, and the text.
        """
        best = float(self._losses(text[None]).mean())
        for _ in range(SWEEPS):
            previous = best
            for place in torch.randperm(len(text), generator=self.generator).tolist():
                texts = self._replace_token(text[None], place, allowed)
                if best > subspace_rows.FIT.exact:
                    best, text = self._nearest(best, text, texts, limit)
            if best >= previous:
                losses, count = self._losses(text[None])[0], min(MAX_EXCHANGES, len(text))
                worst = losses.topk(count).indices.tolist()
                for i, place in enumerate(worst):
                    texts = self._replace_token(text[None], place, allowed)
                    two = [self._replace_token(texts, other, allowed) for other in worst[:i]]
                    if two and best > subspace_rows.FIT.exact:
                        best, text = self._nearest(best, text, torch.cat(two), limit)
            if best >= previous:
                break
        return best, text

    def _nearest(
        self, best: float, text: Tensor, candidates: Tensor, limit: WorkLimit
    ) -> tuple[float, Tensor]:
        """Return the nearest of ``text``, whose distance is ``best``, and ``candidates`` (n, L)."""
        texts_at_once = max(1, TOKENS_AT_ONCE // candidates.shape[1])
        for part in torch.split(candidates, texts_at_once):
            if len(part) and not limit.reached:
                losses = self._losses(part).mean(1)
                i = int(losses.argmin())
                if float(losses[i]) < best:
                    best, text = float(losses[i]), part[i]
        return best, text

    def _replace_token(self, texts: Tensor, place: int, allowed: Tensor) -> Tensor:
        """Return the texts (n, L) with each other token that is allowed at a position: (m, L)."""
        tokens = self.bag[allowed[place]]
        changed = texts.repeat_interleave(len(tokens), 0)
        changed[:, place] = tokens.repeat(len(texts))
        is_other = changed[:, place] != texts[:, place].repeat_interleave(len(tokens), 0)
        return changed[is_other]

    def _project_out(self, text: Tensor) -> None:
        """Project the states of a text out of the directions of each block's rows."""
        for i, x in enumerate(self._states(text)[1:]):
            x = nn.functional.normalize(x @ self.whitening[i + 1], dim=-1)
            explained = torch.cat([self._explained[i].to(x), x])
            self._explained[i] = _basis(explained, SPANNED)
            directions = self._directions[i]
            directions = directions - (directions @ self._explained[i].T) @ self._explained[i]
            # Singular values are near 1 for directions that remain, and near 0 for explained ones.
            self._directions[i] = _basis(directions, 0.5)

    def _states(self, text: Tensor) -> list[Tensor]:
        """Return the input (L, d) of each block for a text (L,)."""
        return [x[0] for x in self.bottom.parts(self.bottom.hidden(text[None]))]

    def _certain(self, texts: Sequence[subspace_rows.RecoveredText], pairs: _Pairs) -> bool:
        """Return whether the texts are certain.

        They are certain if they explain all rows of every block up to rounding, and if no pair can
        be omitted or its token exchanged for another of the bag. The first block excludes the pairs
        outside of its rows' span, and the second block the pairs that the first one allows.
        """
        if not self.precise or not pairs.complete or not texts:
            return False
        if any(token < 0 for tokens in texts for token in tokens):
            return False
        if not self._certain_pairs(texts, pairs):
            return False
        rows = [torch.tensor(tokens, device=self.bag.device) for tokens in texts]
        states = [torch.cat(parts) for parts in zip(*map(self._states, rows), strict=True)]
        if len(states[0]) > subspace_rows.CERTIFICATE.largest_share * states[0].shape[1]:
            return False
        explained = [
            subspace_rows.Explained.from_states(shared, x)
            for shared, x in zip(self.shared[1:], states[1:], strict=True)
        ]
        if not all(block.residual <= subspace_rows.CERTIFICATE.residual for block in explained):
            return False
        return self._unique(rows, pairs, explained[0])

    def _certain_pairs(self, texts: Sequence[subspace_rows.RecoveredText], pairs: _Pairs) -> bool:
        """Return whether block 1 needs every pair and no pair outside of the allowed ones fits."""
        used = sorted({(p, t) for tokens in texts for p, t in enumerate(tokens)})
        if len(used) > subspace_rows.CERTIFICATE.largest_share * self.shared[0].whole.shape[1]:
            return False
        index = {int(token): i for i, token in enumerate(self.bag)}
        states = torch.stack([pairs.states[p, index[t]] for p, t in used])
        fit = subspace_rows.Explained.from_states(self.shared[0], states)
        necessary = float(fit.losses.min()) >= subspace_rows.CERTIFICATE.necessary
        if not (necessary and fit.residual <= subspace_rows.CERTIFICATE.residual):
            return False
        for number, (place, token) in enumerate(used):
            excluded = ~pairs.allowed[place]
            excluded[index[token]] = False
            rivals = pairs.states[place][excluded]
            exchanged = fit.exchanged(number, rivals)
            if len(rivals) and not float(exchanged.min()) >= fit.exchange_limit:
                return False
        return True

    def _unique(
        self, rows: Sequence[Tensor], pairs: _Pairs, second: subspace_rows.Explained
    ) -> bool:
        """Return whether block 2 excludes all other pairs that block 1 allows."""
        if not float(second.losses.min()) >= subspace_rows.CERTIFICATE.necessary:
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
    """Pairs of token and position, for P positions and the n tokens of the bag.

    Attributes:
        states: (P, n, d) float64, block 1's input for each pair, at unit length.
        allowed: (P, n) bool, the pairs that texts may hold.
        scores: (P, n) higher for more certain pairs.
        residual: The residual of the rows after the allowed pairs, in units of the noise.
        complete: Whether the pairs explain the rows up to rounding, by the residual or by the
            certificate of the sparse selection.
    """

    states: Tensor
    allowed: Tensor
    scores: Tensor
    residual: float
    complete: bool

    def trimmed(self) -> _Pairs:
        """Return the pairs up to the last position that allows one."""
        places = self.allowed.any(1).nonzero()[:, 0]
        end = int(places.max()) + 1 if len(places) else 0
        return replace(
            self, states=self.states[:end], allowed=self.allowed[:end], scores=self.scores[:end]
        )


def _basis(rows: Tensor, min_singular: float) -> Tensor:
    """Return the right singular vectors (k, d) of rows whose values exceed ``min_singular``."""
    _, s, basis = torch.linalg.svd(rows, full_matrices=False)
    directions: Tensor = basis[s > min_singular]
    return directions
