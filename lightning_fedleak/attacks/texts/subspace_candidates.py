"""Candidates for the next token of texts, and how their states are compared with the rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
        context_lengths: tokens of the random prefixes after which candidates are tried, to see
            what each explains whatever comes before it; more prefixes make the comparison surer
            and slower.
        mean_lengths: tokens of the random prefixes over which each token's mean state is taken.
        prior: weight of the model's log probability beside the evidence; larger prefers likely
            texts to those that the rows show.
        failures: the search ends after so many texts of which less than half fits exactly.
        slack: such a text is given up at so many tokens more than twice the bag's.
        alternatives: ways to continue that are stored at each place.
        copies: repetitions of a text's first token that are tried; longer ones are not found.
        longest: tokens of a text, at most.
    """

    context_lengths: tuple[int, ...] = (8,) * 4
    mean_lengths: tuple[int, ...] = (1, 2, 4, 8) * 8
    prior: float = 0.5
    failures: int = 2
    slack: int = 8
    alternatives: int = 8
    copies: int = 4
    longest: int = 512


SEARCH = _SearchLimits()


@dataclass(frozen=True, eq=False)
class Measure:
    """How states are compared with what is left of the rows.

    Attributes:
        whitening: (d, d) for each block.
        means: (n, d) for each block, an orthonormal basis of the tokens' mean states after
            whitening, which count as explained; n is 0 where tokens alone distinguish states.
        contexts: prefixes after which candidates are tried, to see what they explain anywhere.
    """

    whitening: Sequence[Tensor]
    means: Sequence[Tensor]
    contexts: tuple[tuple[int, ...], ...]

    def whiten(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Return each block's states (..., d) whitened, of unit length."""
        return [
            nn.functional.normalize(x @ white, dim=-1)
            for x, white in zip(parts, self.whitening, strict=True)
        ]

    def restore(self, states: Tensor, block: int) -> Tensor:
        """Return a block's states (n, d) as they were before whitening, of unit length."""
        plain: Tensor = torch.linalg.solve(self.whitening[block].T, states.T).T
        return nn.functional.normalize(plain, dim=1)


class Candidates:
    """The tokens of a bag, each tried as the next one of prefixes.

    Args:
        bottom: a copy of the model, while its :meth:`session` is open.
        bag: (n,) the distinct token ids of the batch.
        seed: of the random prefixes.

    Attributes:
        tried: candidates so far.
        longest: tokens of a text, at most.
    """

    def __init__(self, bottom: BlockInputs, bag: Tensor, seed: int) -> None:
        self.bottom, self.bag, self.seed = bottom, bag, seed
        self.longest = min(bottom.context or SEARCH.longest, SEARCH.longest)
        self.tried = 0
        self._copies: int | None = None

    def random_prefixes(self, lengths: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Return prefixes of tokens drawn from the bag, cut to the longest text."""
        generator = torch.Generator().manual_seed(self.seed)
        bag = self.bag.cpu()
        counts = [min(n, self.longest - 1) for n in lengths]
        draws = (torch.randint(len(bag), (n,), generator=generator) for n in counts)
        return tuple(tuple(bag[draw].tolist()) for draw in draws)

    def begin(self, prefixes: Sequence[tuple[int, ...]]) -> Prefixes:
        """Return the model's keys and values of prefixes."""
        device = self.bottom.device
        layout = Layout.from_masks((len(prefixes), self.longest), None, None)
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
        self.tried += count * len(self.bag)
        return self.bottom.parts(prefixes.attempt(self.bag.expand(count, -1)))

    @property
    def copies(self) -> int:
        """Return how many repetitions of a first token are tried: 0 where they read otherwise."""
        if self.longest <= SEARCH.copies:
            return 0
        if self._copies is None:
            ids = self.bag[:1].expand(1, SEARCH.copies + 1)
            states = self.bottom.parts(self.bottom.hidden(ids))
            distance = max(float((x[0] - x[0, :1]).norm(dim=-1).max()) for x in states)
            self._copies = SEARCH.copies if distance < FIT.explained else 0
        return self._copies

    def canonical(self, prefix: tuple[int, ...]) -> tuple[int, ...]:
        """Return a prefix without repetitions of its first token where these read as it does."""
        if not self.copies:
            return prefix
        changes = (n for n, token in enumerate(prefix) if token != prefix[0])
        return prefix[:1] + prefix[next(changes, len(prefix)) :]

    def contextual_measure(
        self, shared: SharedRows, whitenings: Sequence[Tensor], deadline: Deadline
    ) -> Measure | None:
        """Return a measure of what a prefix adds to its next token's state.

        Each token's mean state after random prefixes counts as explained, and the rest is
        whitened.

        Args:
            shared: the first block's rows.
            whitenings: (d, d) for each block.
            deadline: after which the result is None.

        Returns:
            The measure, or None where the bag's states fill their space or prefixes add nothing.
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
