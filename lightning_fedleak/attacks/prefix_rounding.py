"""Tokens that only a run as the client's own tells apart, in low precision.

Runs with and without cache differ by rounding, which in bf16 hides the difference between near
tokens. Where it might, the text is run once more as the client ran it, without cache: the right
token's state is then equal bit for bit, on the same kind of machine; whether it is shows on tokens
that are known already. Where several tokens have the observed state even so, the states that follow
decide between them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_fedleak.attacks.prefix_cache import Prefixes
from lightning_fedleak.attacks.prefix_candidates import Place, Task

SAME_AT_ONCE = 8
"""Candidates that are run without cache at one place."""
WITHIN_ROUNDING = 0.5
"""Of the rounding between runs with and without cache: nearer tokens may have equal states."""
MOST_TWINS = 64
"""Tokens with equal states among which the states that follow decide."""


class AsSent:
    """Runs of texts as the client runs them.

    Args:
        task: the search.
        low_precision: whether rounding may hide what tells tokens apart.

    Attributes:
        repeatable: whether such a run gives what was sent, bit for bit; None until it is known.
        twins: by text and place, tokens among which what follows is to decide.
        cut: whether time ended a run that was still to decide.
    """

    def __init__(self, task: Task, low_precision: bool) -> None:
        self.task = task
        self.low_precision = low_precision
        self.repeatable: bool | None = None
        self.twins: list[dict[int, list[int]]] = [{} for _ in task.observed]
        self.cut = False

    def begun(self, rows: Tensor) -> Prefixes:
        """The texts ``rows`` without cache, known as far as they are."""
        prefixes = self.task.prefixes
        again = Prefixes(prefixes.bottom, prefixes.layout[rows], cached=False)
        again.known, again.tokens = prefixes.known[rows], prefixes.tokens[rows]
        return again

    def equal(self, rows: Tensor, tokens: Tensor) -> Tensor:
        """(n,) first tokens of texts (n, N) that have the observed states of ``rows`` (n,)."""
        run = self.begun(rows)
        run.known = torch.zeros_like(run.known)
        states = run.follow(tokens).float()
        self.task.beside.add(run)
        ahead = torch.arange(states.shape[1], device=states.device)
        same = (states == self.task.observed[rows]).all(2)
        same &= ahead < self.task.counts[rows][:, None]
        return same.int().cumprod(1).sum(1)

    def may_match(self, i: int) -> bool:
        """Whether such a run gives what was sent, as far as the known tokens of text ``i`` tell."""
        if self.repeatable is None and int(self.task.known[i]):
            row = torch.tensor([i], device=self.task.known.device)
            again = self.begun(row)
            again.known = torch.zeros_like(again.known)
            state = again.follow(again.tokens[:, :1]).float()[0, 0]
            self.task.beside.add(again)
            self.repeatable = torch.equal(state, self.task.observed[i, 0])
        return self.repeatable is not False

    def equal_ahead(self, rows: Tensor, chain: Tensor) -> Tensor:
        """(n,) first tokens of ``chain`` (n, k) that continue the texts ``rows`` as observed."""
        again = self.begun(rows)
        states = again.follow(chain).float()
        self.task.beside.add(again)
        ahead = torch.arange(chain.shape[1], device=rows.device)
        places = self.task.known[rows][:, None] + ahead
        inside = places < self.task.counts[rows][:, None]
        target = self.task.observed[
            rows[:, None], places.clamp(max=self.task.observed.shape[1] - 1)
        ]
        same = (states == target).all(2) & inside
        found = same.int().cumprod(1).sum(1)
        if bool(found.any()):
            self.repeatable = True
        return found

    def same(self, i: int, place: Place) -> int | None:
        """A verified candidate of text ``i``'s open place that has the observed state."""
        if not self.may_match(i):
            return None
        at = int(self.task.known[i])
        noise = float(self.task.noise[i, at])
        near = [place.tokens[o] for o in place.order if place.distances[o] <= 2.0 * noise]
        near = [t for t in near if t not in place.run_again][:SAME_AT_ONCE]
        if not near:
            return None
        device = self.task.known.device
        again = self.begun(torch.tensor([i], device=device))
        states = again.attempt(torch.tensor([near], device=device))[0].float()
        self.task.beside.add(again)
        place.run_again.update(near)
        hits = (states == self.task.observed[i, at]).all(1).nonzero()
        if not len(hits):
            return None
        self.repeatable = True
        found = near[int(hits[0])]
        place.distances[place.tokens.index(found)] = 0.0
        return found

    def choose_twin(self, i: int, place: Place) -> None:
        """Of the place's twins, the one expected most is taken for now."""
        at = int(self.task.known[i])
        expected = self.task.prior.all(i, at)
        if expected is not None:
            order = expected[place.twins].argsort(descending=True).tolist()
            place.twins = [place.twins[o] for o in order]
        if len(place.twins) > 1:
            self.twins[i][at] = place.twins[:MOST_TWINS]
        place.keep(place.twins[0], self.task.observed[i, at], 0.0)
        place.chosen = len(place.tokens) - 1

    def may_have_twins(self, i: int, at: int, token: int) -> bool:
        """Whether rounding may hide other tokens; what follows is to decide then."""
        table = self.task.table
        reach = WITHIN_ROUNDING * float(self.task.noise[i, at])
        if not self.low_precision or float(table.alone(self.task.known.new_tensor(token))) >= reach:
            return False
        near = table.within(token, reach)
        apart = (table.entries[near] - table.entries[token]).norm(dim=1)
        nearest = near[apart.argsort()[:MOST_TWINS]].tolist()
        self.twins[i].setdefault(at, [token, *(t for t in nearest if t != token)])
        return True

    def decide_twins(self, i: int) -> list[int]:
        """Has what follows decide between the twins of text ``i``; the places that are sure now."""
        sure: list[int] = []
        tokens = self.task.prefixes.tokens
        for at, twins in self.twins[i].items():
            if self.task.deadline.passed:
                self.cut = True
                return sure
            texts = tokens[i].repeat(len(twins), 1)
            texts[:, at] = texts.new_tensor(twins)
            equal = self.equal(torch.full_like(texts[:, 0], i), texts)
            best = int(equal.argmax())
            tokens[i, at] = twins[best]
            alone = int((equal == equal[best]).sum()) == 1 and int(equal[best]) > at
            if alone and not bool(self.task.table.doubtful[twins[best]]):
                sure.append(at)
        self.twins[i] = {}
        return sure


__all__ = ["AsSent"]
