"""Candidates for the next token of texts, and how their states are compared with shared rows.

An attack recovers texts token by token. The rows of the shared gradients are combinations of the
hidden states (d,) of the true texts, and the distinct tokens of the batch, the bag, are known from
an earlier attack. :class:`Candidates` computes the states of all tokens of the bag after some
prefixes. A :class:`Measure` whitens these states before the search compares them with the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from lightning_fedleak.attacks.row_space import SharedRows, whitening_matrix
from lightning_fedleak.attacks.texts.base import Deadline
from lightning_fedleak.attacks.texts.prefix.cache import Layout, Prefixes
from lightning_fedleak.attacks.texts.subspace_rows import FIT, BlockInputs


@dataclass(frozen=True)
class _SearchLimits:
    """Settings of the search. None of the values was tuned.

    Attributes:
        context_lengths: The lengths of the random prefixes that show what a candidate explains
            after any text; more prefixes estimate it better and cost time.
        mean_lengths: The lengths of the random prefixes for each token's mean state.
        prior: The weight of the model's log probability against the evidence of the rows.
        max_failures: The number of inexact texts after which the search ends.
        slack: An inexact text ends this many tokens after twice the size of the bag.
        alternatives: The number of other continuations that are stored at each position.
        max_repeats: The number of repetitions of a text's first token that are tried.
        max_length: The largest number of tokens of a text.
    """

    context_lengths: tuple[int, ...] = (8,) * 4
    mean_lengths: tuple[int, ...] = (1, 2, 4, 8) * 8
    prior: float = 0.5
    max_failures: int = 2
    slack: int = 8
    alternatives: int = 8
    max_repeats: int = 4
    max_length: int = 512


SEARCH = _SearchLimits()


@dataclass(frozen=True, eq=False)
class Measure:
    """How states are compared with the remainder of the rows.

    Attributes:
        whitening: (d, d) for each block, by which states and rows are multiplied from the right.
        means: (n, d) for each block, an orthonormal basis of the tokens' whitened mean states,
            which count as explained; n is 0 for a measure of whole states.
        contexts: Random prefixes that show what a candidate explains after any text.
    """

    whitening: Sequence[Tensor]
    means: Sequence[Tensor]
    contexts: tuple[tuple[int, ...], ...]

    def whiten(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Return each block's whitened states (..., d), at unit length."""
        return [
            nn.functional.normalize(x @ white, dim=-1)
            for x, white in zip(parts, self.whitening, strict=True)
        ]

    def restore(self, states: Tensor, block: int) -> Tensor:
        """Return a block's whitened states (n, d) before whitening, at unit length."""
        plain: Tensor = torch.linalg.solve(self.whitening[block].T, states.T).T
        return nn.functional.normalize(plain, dim=1)


class Candidates:
    """The tokens of a bag, each tried as the next token of prefixes.

    Args:
        bottom: A copy of the model whose :meth:`session` is open.
        bag: (n,) the distinct token ids of the batch.
        seed: The seed of the random prefixes.

    Attributes:
        n_tried: The number of candidates tried so far.
        max_length: The largest number of tokens of a text.
    """

    def __init__(self, bottom: BlockInputs, bag: Tensor, seed: int) -> None:
        self.bottom, self.bag, self.seed = bottom, bag, seed
        self.max_length = min(bottom.context or SEARCH.max_length, SEARCH.max_length)
        self.n_tried = 0

    def random_prefixes(self, lengths: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Return prefixes of tokens drawn from the bag, shorter than the longest text."""
        generator = torch.Generator().manual_seed(self.seed)
        bag = self.bag.cpu()
        counts = [min(n, self.max_length - 1) for n in lengths]
        draws = (torch.randint(len(bag), (n,), generator=generator) for n in counts)
        return tuple(tuple(bag[draw].tolist()) for draw in draws)

    def begin(self, prefixes: Sequence[tuple[int, ...]]) -> Prefixes:
        """Run the model on prefixes, whose keys and values it caches."""
        device = self.bottom.device
        layout = Layout.from_masks((len(prefixes), self.max_length), None, None)
        cached = Prefixes(self.bottom, layout)
        counts = torch.tensor([len(p) for p in prefixes], device=device)
        if int(counts.max()):
            ids = [torch.tensor(prefix, dtype=torch.int64, device=device) for prefix in prefixes]
            cached.follow(nn.utils.rnn.pad_sequence(ids, batch_first=True))
            cached.keep(counts)
        return cached

    def states(self, prefixes: Prefixes) -> list[Tensor]:
        """Return for each block the states (B, n, d) of each token after each prefix."""
        count = len(prefixes.lengths)
        self.n_tried += count * len(self.bag)
        return self.bottom.parts(prefixes.attempt(self.bag.expand(count, -1)))

    @cached_property
    def n_repeats(self) -> int:
        """The number of repetitions of a first token to try; 0 if their states differ from its."""
        if self.max_length <= SEARCH.max_repeats:
            return 0
        ids = self.bag[:1].expand(1, SEARCH.max_repeats + 1)
        states = self.bottom.parts(self.bottom.hidden(ids))
        distance = max(float((x[0] - x[0, :1]).norm(dim=-1).max()) for x in states)
        return SEARCH.max_repeats if distance < FIT.explained else 0

    def drop_repeats(self, prefix: tuple[int, ...]) -> tuple[int, ...]:
        """Return a prefix without repetitions of its first token, if their states equal its own."""
        if not self.n_repeats:
            return prefix
        changes = (n for n, token in enumerate(prefix) if token != prefix[0])
        return prefix[:1] + prefix[next(changes, len(prefix)) :]

    def contextual_measure(
        self, shared: SharedRows, whitenings: Sequence[Tensor], deadline: Deadline
    ) -> Measure | None:
        """Return a measure of what a prefix adds to the state of its next token.

        Each token's mean state over random prefixes counts as explained; the difference from it
        is whitened.

        Args:
            shared: The first block's rows.
            whitenings: (d, d) for each block.
            deadline: The deadline after which the result is None.

        Returns:
            The measure; None if the bag's states fill their space, or prefixes add nothing.
        """
        rows, width = len(shared.principal), min(map(len, whitenings))
        if width < 2 * len(self.bag) + rows:
            return None
        prefixes = self.random_prefixes(SEARCH.mean_lengths)
        sums = [white.new_zeros(len(self.bag), len(white)) for white in whitenings]
        moments = [torch.zeros_like(white) for white in whitenings]
        for prefix in prefixes:
            if deadline.passed:
                return None
            states = self.states(self.begin([prefix]))
            for total, moment, (x,) in zip(sums, moments, states, strict=True):
                total += x
                moment += x.mT @ x
        fitted, means = [], []
        for total, moment in zip(sums, moments, strict=True):
            basis = torch.linalg.qr(total.mT).Q
            moment = moment - total.mT @ total / len(prefixes)
            if not float(moment.trace()) > FIT.explained**2 * len(prefixes) * len(self.bag):
                return None
            moment = moment - basis @ (basis.mT @ moment)
            white = whitening_matrix(moment - (moment @ basis) @ basis.mT).double()
            fitted.append(white)
            means.append(torch.linalg.qr((total @ white).mT).Q.mT.contiguous())
        return Measure(fitted, means, prefixes[: len(prefixes) // 2])
