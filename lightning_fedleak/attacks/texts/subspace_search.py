"""The search for a causal model's texts, token by token, in the shared rows of several blocks.

The *shared rows* of a block span the row space of the gradients of its projections: each row is a
combination of the hidden states that enter the block. :class:`SubspaceSearch` runs one or two
searches (:class:`_TextWalk`), and :class:`_Certificate` checks their texts. A search recovers one
text after the other. It starts from first tokens, or branches off from a text that was recovered
before. It appends the tokens whose states lie nearest to the rows, and projects each chosen state
out of them. What remains of the rows is a ``Remainder``.

The *bag* holds the distinct tokens of the batch, from an earlier attack on words. The *evidence*
for a token is minus the logarithm of the share of its state outside of the rows. A token is *exact*
if this share is only rounding. The *prior* is the model's log probability of the next token. A
*branch* is a prefix of a recovered text with another next token, where a later text may begin.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightning_fedleak.attacks.row_space import SharedRows
from lightning_fedleak.attacks.texts.base import WorkLimit
from lightning_fedleak.attacks.texts.bottom_model import predicts_next
from lightning_fedleak.attacks.texts.prefix.cache import Prefixes
from lightning_fedleak.attacks.texts.subspace_rows import (
    CERTIFICATE,
    FIT,
    SEARCH,
    BlockInputs,
    Candidates,
    Explained,
    Measure,
    RecoveredText,
    Remainder,
    measure_fits,
)


@dataclass(frozen=True, eq=False)
class _Branch:
    """A way to continue a prefix: its next token, and each block's state (d,) there."""

    prefix: tuple[int, ...]
    token: int
    states: tuple[Tensor, ...]

    @property
    def text(self) -> tuple[int, ...]:
        """Return the prefix with its next token."""
        return (*self.prefix, self.token)


@dataclass(frozen=True, eq=False)
class _PartialText:
    """A text that the search has recovered in part.

    If it branched off from an earlier text, it inherits the tokens before the branch.

    Attributes:
        tokens: The tokens from the first on.
        fits: The share of each token's state that the rows explained when it was chosen; 1 for
            inherited tokens.
        score: The sum of the evidence and the weighted prior of the tokens that are not inherited.
        remainders: The part of each block's rows that the text does not explain.
        rivals: Other first tokens, or other tokens at the branch.
        alternatives: Other continuations.
        states: Each block's state (d,), for each token that is neither inherited nor a repeat.
        n_repeats: The number of repetitions of its first token, whose states equal that token's.
    """

    tokens: tuple[int, ...]
    fits: tuple[float, ...]
    score: float
    remainders: tuple[Remainder, ...]
    rivals: tuple[_Branch, ...]
    alternatives: tuple[_Branch, ...]
    states: tuple[tuple[Tensor, ...], ...]
    n_repeats: int = 0

    @property
    def n_inherited(self) -> int:
        """Return how many tokens come from the text that it branched off from."""
        return len(self.tokens) - len(self.states) - self.n_repeats

    @property
    def exact(self) -> bool:
        """Return whether at least half of the tokens in ``states`` fit up to rounding."""
        fits = self.fits[-len(self.states) :]
        return 2 * sum(1 - fit <= FIT.exact for fit in fits) >= len(fits)


def _add_text(texts: Sequence[_PartialText], text: _PartialText) -> list[_PartialText]:
    """Return texts with one more, which replaces a text whose end it continues."""
    for i, prefix in enumerate(texts):
        length = len(prefix.tokens)
        if text.tokens[:length] == prefix.tokens and text.n_inherited == length:
            joined = replace(
                text,
                fits=(*prefix.fits, *text.fits[length:]),
                score=prefix.score + text.score,
                rivals=prefix.rivals + text.rivals,
                alternatives=prefix.alternatives + text.alternatives,
                states=prefix.states + text.states,
                n_repeats=prefix.n_repeats,
            )
            return [*texts[:i], joined, *texts[i + 1 :]]
    return [*texts, text]


class SubspaceSearch:
    """The search for texts whose states explain the shared rows of several blocks.

    If there are fewer rows than tokens in the bag, the first search compares only what a prefix
    adds to the state of its next token. If its texts are not certain, and the rows are exact but
    for rounding, a second search compares whole states.

    Args:
        bottom: A copy of the model whose :meth:`session` is open.
        whitenings: The whitening (d, d) of each block's states.
        shared: The rows of each block.
        bag: (n,) the distinct token ids of the texts.
        beam: The number of prefixes that are continued in parallel while none is exact.
        seed: The seed of random prefixes.
    """

    def __init__(
        self,
        bottom: BlockInputs,
        whitenings: Sequence[Tensor],
        shared: Sequence[SharedRows],
        bag: Tensor,
        beam: int,
        seed: int,
    ) -> None:
        self.candidates = Candidates(bottom, bag, seed)
        self.shared, self.beam = shared, beam
        none = [white[:0] for white in whitenings]
        contexts = self.candidates.random_prefixes(SEARCH.context_lengths)
        self.measure = Measure(whitenings, none, contexts)

    @property
    def n_tried(self) -> int:
        """Return how many candidates were compared with the rows."""
        return self.candidates.n_tried

    def run(self, limit: WorkLimit) -> tuple[list[RecoveredText], bool, bool]:
        """Recover the texts.

        Returns:
            The texts, whether the search ended before the limit, and whether the texts are
            certain.
        """
        precise = all(rows.exact for rows in self.shared)
        few_rows = len(self.shared[0].principal) < len(self.candidates.bag)
        measures = [self.measure]
        # Rows that only noise makes few are compared with whole states.
        if few_rows and (precise or len(self.shared[0].whole) < len(self.candidates.bag)):
            contextual = self.candidates.contextual_measure(
                self.shared[0], self.measure.whitening, limit
            )
            measures = measures if contextual is None else [contextual, *measures]
        result: list[_PartialText] = []
        # The texts of the second search replace those of the first only if they are certain.
        for number, measure in enumerate(measures if precise else measures[:1]):
            walk = _TextWalk(self.candidates, self.shared, measure, self.beam)
            texts, finished = walk.find(limit)
            certain = False
            if finished:
                texts, certain = _Certificate(self.candidates, self.shared, measure).longest(texts)
            if number == 0 or certain:
                result = texts
            if certain or not finished:
                break
        prefixes = {text.tokens[:n] for text in result for n in range(1, len(text.tokens))}
        full_texts = [text for text in result if text.tokens not in prefixes]
        return [text.tokens for text in full_texts], finished, certain


class _TextWalk:
    """One search with one measure, which recovers one text after the other from left to right.

    Args:
        candidates: The tokens to try.
        shared: The rows of each block.
        measure: How states are compared with the rows.
        beam: The number of prefixes that are continued in parallel while none is exact.
    """

    def __init__(
        self, candidates: Candidates, shared: Sequence[SharedRows], measure: Measure, beam: int
    ) -> None:
        self.candidates, self.bag = candidates, candidates.bag
        self.shared, self.measure, self.beam = shared, measure, beam
        self.precise = all(rows.exact for rows in shared)
        self.few_rows = len(shared[0].principal) < len(self.bag)  # then no state fits exactly
        self.has_prior = predicts_next(candidates.bottom)
        self._context_states: list[Tensor] | None = None

    def find(self, limit: WorkLimit) -> tuple[list[_PartialText], bool]:
        """Recover texts until the rows are explained or too many texts do not fit.

        Returns:
            The texts, and whether the search ended before the limit.
        """
        blocks = zip(self.shared, self.measure.whitening, self.measure.means, strict=True)
        remainders = tuple(
            Remainder.from_rows(shared.principal, white, means) for shared, white, means in blocks
        )
        [states] = self._states(self.candidates.begin([()]))
        branches = [
            _Branch((), int(token), tuple(x[i] for x in states)) for i, token in enumerate(self.bag)
        ]
        texts: list[_PartialText] = []
        failures: list[_PartialText] = []
        while any(len(r.directions) for r in remainders) and len(failures) < SEARCH.max_failures:
            text, finished = self._next(branches, remainders, limit)
            if text is None:
                return texts or failures[:1], finished
            # With precise rows that can show it, a text that does not fit holds a wrong token.
            if self.precise and not (text.exact or self.few_rows):
                failures.append(text)
                prefix = text.tokens[: text.n_inherited + 1]
                branches = [branch for branch in branches if branch.text != prefix]
            else:
                texts = _add_text(texts, text)
                remainders = text.remainders
                prefixes = {text.tokens[:n] for n in range(1, len(text.tokens) + 1)}
                branches = [b for b in [*branches, *text.alternatives] if b.text not in prefixes]
            if not finished:
                return texts or failures[:1], False
        return texts or failures[:1], True

    def _next(
        self, branches: Sequence[_Branch], remainders: tuple[Remainder, ...], limit: WorkLimit
    ) -> tuple[_PartialText | None, bool]:
        """Return the next text; if it does not fit exactly, search again with the prior."""
        prior = 0.0 if self.precise or not self.has_prior else SEARCH.prior
        text, finished = self._grow(branches, remainders, limit, prior)
        if finished and text is not None and self.precise and self.has_prior and not text.exact:
            with_prior, finished = self._grow(branches, remainders, limit, SEARCH.prior)
            text = with_prior if with_prior is not None and with_prior.exact else text
        return text, finished

    def _grow(
        self,
        branches: Sequence[_Branch],
        remainders: tuple[Remainder, ...],
        limit: WorkLimit,
        prior: float,
    ) -> tuple[_PartialText | None, bool]:
        """Return the text with the highest score, by a beam search.

        Args:
            branches: The beginnings that the text may have.
            remainders: The rows of each block that no earlier text explains.
            limit: After it, the best text so far is returned.
            prior: The weight of the model's log probabilities of next tokens, in the ranking of
                inexact candidates.

        Returns:
            The text, or None if no beginning explains anything, and whether the search ended
            before the limit.
        """
        beams = self._starts(branches, remainders, limit)
        if not beams:
            return None, True
        ended: list[_PartialText] = []
        prefixes = self.candidates.begin([text.tokens for text in beams])
        while beams:
            short = [i for i, text in enumerate(beams) if len(text.tokens) < self._max_length(text)]
            ended += [beams[i] for i in range(len(beams)) if i not in short]
            if limit.reached or not short:
                break
            if len(short) < len(beams):
                prefixes = prefixes.select(torch.tensor(short, device=self.bag.device))
                beams = [beams[i] for i in short]
            children = self._continue(beams, prefixes, prior)
            ended += [text for text, row in children if row is None]
            grown = [(text, row) for text, row in children if row is not None]
            beams, prefixes = self._best(grown, prefixes)
        ended += [text for text in beams if text not in ended]
        return max(ended, key=lambda text: text.score), not limit.reached

    def _best(
        self, grown: list[tuple[_PartialText, int]], prefixes: Prefixes
    ) -> tuple[list[_PartialText], Prefixes]:
        """Return the best of the longer texts with their prefixes; an exact best text alone."""
        grown = sorted(grown, key=lambda pair: -pair[0].score)
        grown = grown[:1] if grown and grown[0][0].exact else grown[: self.beam]
        beams = [text for text, _ in grown]
        if beams:
            device = self.bag.device
            prefixes = prefixes.select(torch.tensor([row for _, row in grown], device=device))
            prefixes.follow(torch.tensor([[text.tokens[-1]] for text in beams], device=device))
            prefixes.keep(torch.ones(len(beams), dtype=torch.int64, device=device))
        return beams, prefixes

    def _continue(
        self, beams: Sequence[_PartialText], prefixes: Prefixes, prior: float
    ) -> list[tuple[_PartialText, int | None]]:
        """Return texts with one more token and their row in ``beams``, None for those that end."""
        log_priors = torch.zeros(len(beams), 1)
        if prior:
            texts = [text.tokens for text in beams]
            log_priors = prior * self.candidates.bottom.next_tokens(texts, self.bag)
        expansions = [
            self._children(text, states, log_priors[row])
            for row, (text, states) in enumerate(zip(beams, self._states(prefixes), strict=True))
        ]
        shortened = [self.candidates.drop_repeats(text.tokens) for text in beams]
        by_prefix: dict[tuple[int, ...], tuple[_Branch, ...]] = {}
        for prefix, (_, branches) in zip(shortened, expansions, strict=True):
            by_prefix[prefix] = by_prefix.get(prefix, ()) + branches
        continued: list[tuple[_PartialText, int | None]] = []
        for row, (text, (children, _)) in enumerate(zip(beams, expansions, strict=True)):
            branches = by_prefix[shortened[row]]
            if not children:
                ended = replace(text, alternatives=text.alternatives + branches)
                continued.append((ended, None))
            for child in children:
                grown = replace(child, alternatives=child.alternatives + branches)
                continued.append((grown, row))
        return continued

    def _states(self, prefixes: Prefixes) -> list[list[Tensor]]:
        """Return, for each prefix and block, the whitened states (n, d) of the bag's tokens."""
        parts = self.measure.whiten(self.candidates.states(prefixes))
        return [[x[row] for x in parts] for row in range(len(prefixes.lengths))]

    def _context_evidence(self, remainders: Sequence[Remainder]) -> tuple[Tensor, float]:
        """Return the evidence for tokens after random prefixes, where no token is correct.

        Returns:
            The mean evidence (n,) of each token over the prefixes. And how far the most favoured
            token of a prefix exceeds its own mean, on average over the prefixes.
        """
        contexts = self.measure.contexts
        if self._context_states is None:
            rows = [self._states(self.candidates.begin([context]))[0] for context in contexts]
            self._context_states = [torch.cat(parts) for parts in zip(*rows, strict=True)]
        values = [r.nearness(x) for r, x in zip(remainders, self._context_states, strict=True)]
        evidence = torch.stack(values).sum(0).view(len(contexts), -1)
        mean = evidence.mean(0)
        return mean, float((evidence - mean).max(1).values.mean())

    def _max_length(self, text: _PartialText) -> int:
        """Return the length at which the search of a text ends."""
        longest = self.candidates.max_length
        if text.exact or not self.precise:
            return longest
        return min(longest, 2 * len(self.bag) + SEARCH.slack)

    def _starts(
        self, branches: Sequence[_Branch], remainders: tuple[Remainder, ...], limit: WorkLimit
    ) -> list[_PartialText]:
        """Return the likeliest beginnings of the next text: first tokens or branches."""
        if not branches:
            return []
        states = [torch.stack(parts) for parts in zip(*(b.states for b in branches), strict=True)]
        fits = measure_fits(remainders, states)
        evidence, min_evidence = fits.evidence, -math.inf
        if not fits.exact and not limit.reached:
            min_evidence = float(self._context_evidence(remainders)[0].max())
        texts = []
        best = fits.best(evidence, max(SEARCH.alternatives, self.beam))
        for i in best[: self.beam]:
            branch, value = branches[i], float(evidence[i])
            if math.isfinite(value) and value >= min_evidence:
                shares = (*[1.0] * len(branch.prefix), float(fits.worst[i]))
                residue = fits.explain(remainders, i)
                siblings = [b for b in map(branches.__getitem__, best) if b.prefix == branch.prefix]
                rivals = tuple(b for b in siblings if b is not branch)
                texts.append(
                    _PartialText(branch.text, shares, value, residue, rivals, (), (branch.states,))
                )
        if not fits.exact:
            return texts
        exact = [text for text in texts if text.exact][:1]
        single_tokens = [text for text in exact if len(text.tokens) == 1]
        return exact + [
            replace(text, tokens=(n + 1) * text.tokens, fits=(n + 1) * text.fits, n_repeats=n)
            for text in single_tokens
            for n in range(1, self.candidates.n_repeats + 1)
        ]

    def _children(
        self, text: _PartialText, states: Sequence[Tensor], log_priors: Tensor
    ) -> tuple[list[_PartialText], tuple[_Branch, ...]]:
        """Return the text with one more token, likeliest first, and branches for later texts.

        An exact text ends if no further token nearly fits. An inexact text ends if no token has
        more evidence than it has on average after random prefixes. For a measure with mean states
        the evidence must exceed that of the most favoured token after random prefixes.
        """
        fits = measure_fits(text.remainders, states)
        evidence = ranked = fits.evidence
        if not fits.exact:
            mean, best_elsewhere = self._context_evidence(text.remainders)
            evidence = evidence - mean
            if len(self.measure.means[0]):
                evidence = evidence - best_elsewhere
            ranked = evidence + log_priors.to(evidence)
        branches = tuple(
            _Branch(text.tokens, int(self.bag[i]), tuple(x[i] for x in states))
            for i in fits.best(evidence, SEARCH.alternatives)
        )
        children = []
        for i in ranked.topk(min(self.beam, len(ranked))).indices.tolist():
            value = float(evidence[i])
            if not math.isfinite(value):
                continue
            nearly = 1 - float(fits.worst[i]) <= FIT.nearly
            if not (nearly if text.exact else value > 0):
                continue
            child = replace(
                text,
                tokens=(*text.tokens, int(self.bag[i])),
                fits=(*text.fits, float(fits.worst[i])),
                score=text.score + float(ranked[i]),
                remainders=fits.explain(text.remainders, i),
                states=(*text.states, tuple(x[i] for x in states)),
            )
            children.append(child)
        return children, branches


class _Certificate:
    """The check that texts are those of the batch. It needs only what the adversary has.

    Args:
        candidates: The tokens that a text may hold.
        shared: The rows of each block.
        measure: The measure that whitened the texts' states.
    """

    def __init__(
        self, candidates: Candidates, shared: Sequence[SharedRows], measure: Measure
    ) -> None:
        self.candidates, self.shared, self.measure = candidates, shared, measure

    def longest(self, texts: Sequence[_PartialText]) -> tuple[list[_PartialText], bool]:
        """Check all texts; if they are not certain, return as many first texts as are certain."""
        checked = self.check(texts)
        if checked[1]:
            return checked
        shorter_lists = (self.check(texts[:n]) for n in range(len(texts) - 1, 0, -1))
        return next((result for result in shorter_lists if result[1]), checked)

    def check(self, texts: Sequence[_PartialText]) -> tuple[list[_PartialText], bool]:
        """Remove final tokens that explain nothing, and return whether the texts are certain.

        They are certain if they explain all rows of every block up to rounding, if in the first
        block no token can be omitted or exchanged for another likely one at its position, and if
        no text could continue without a trace in the rows.
        """
        if not all(rows.exact for rows in self.shared):
            return list(texts), False
        first_rows = self.shared[0]
        texts = [text for text in texts if text.states]
        certain = False
        while texts and sum(len(text.states) for text in texts) < first_rows.whole.shape[1]:
            explained = Explained.from_states(first_rows, self._states(texts, 0))
            # A large residual hides which final tokens explain nothing.
            if explained.residual > CERTIFICATE.residual:
                break
            losses = torch.split(explained.losses, [len(text.states) for text in texts])
            is_redundant = [not float(part[-1]) >= CERTIFICATE.residual for part in losses]
            if not any(is_redundant):
                certain = self._unique(texts, explained) and self._ended(texts, explained)
                break
            ends = zip(texts, is_redundant, strict=True)
            texts = [_shortened(text) if redundant else text for text, redundant in ends]
            texts = [text for text in texts if text.states]
        for block, shared in enumerate(self.shared[1:], 1):
            if not certain:
                break
            explained = Explained.from_states(shared, self._states(texts, block))
            certain = explained.residual <= CERTIFICATE.residual
        return texts, certain

    def _states(self, texts: Sequence[_PartialText], block: int) -> Tensor:
        """Return a block's states (n, d) of all tokens of texts, as they were before whitening."""
        states = torch.stack([parts[block] for text in texts for parts in text.states])
        return self.measure.restore(states, block)

    def _ended(self, texts: Sequence[_PartialText], explained: Explained) -> bool:
        """Return whether a further token of each text would be visible in the rows.

        It could hide if its state nearly lies in the span of the texts' states and explains some
        of the residual, or if its state equals one of theirs, such as that of a repeated token.
        """
        for text in texts:
            states = self.measure.whiten(
                self.candidates.states(self.candidates.begin([text.tokens]))
            )[0][0]
            prefixes = {other.tokens[: len(text.tokens) + 1] for other in texts}
            is_new = [(*text.tokens, int(token)) not in prefixes for token in self.candidates.bag]
            x = self.measure.restore(states, 0)[torch.tensor(is_new, device=states.device)]
            outside, gain = explained.further(self.shared[0], x)
            hidden = (outside < CERTIFICATE.outside) & (gain > CERTIFICATE.gain)
            if bool((hidden | (outside < CERTIFICATE.same)).any()):
                return False
        return True

    def _unique(self, texts: Sequence[_PartialText], explained: Explained) -> bool:
        """Return whether no token could be omitted or replaced."""
        share = len(explained.losses) / explained.basis.shape[1]
        necessary = float(explained.losses.min()) >= CERTIFICATE.necessary
        if not necessary or share > CERTIFICATE.largest_share:
            return False
        drop_repeats = self.candidates.drop_repeats
        prefixes = {text.tokens[:n] for text in texts for n in range(1, len(text.tokens) + 1)}
        number = 0
        for text in texts:
            places = range(text.n_inherited, len(text.tokens))
            for place in (*places[:1], *places[1 + text.n_repeats :]):
                prefix = drop_repeats(text.tokens[:place])
                replacements = [
                    branch.states[0]
                    for branch in text.rivals + text.alternatives
                    if drop_repeats(branch.prefix) == prefix and branch.text not in prefixes
                ]
                if replacements:
                    x = self.measure.restore(torch.stack(replacements), 0)
                    if not float(explained.exchanged(number, x).min()) >= explained.exchange_limit:
                        return False
                number += 1
        return True


def _shortened(text: _PartialText) -> _PartialText:
    """Return a text without its last token."""
    return replace(text, tokens=text.tokens[:-1], fits=text.fits[:-1], states=text.states[:-1])
