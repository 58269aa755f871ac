"""When a verified candidate is believed, and what is done where none can be.

A candidate is believed as soon as no other token can be the right one: were it another, that
token's state would be as far from the candidate's as the observed one is. Where many rounds of
candidates have not come so far, all tokens that can still be right are verified. If of very many
none is, no token is what was sent; the same is assumed where half of the time that is left has not
sufficed to find one, so that the other half is left for a search that does not expect one. What is
found on that assumption is unfinished.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_fedleak.attacks.prefix_candidates import ROUNDS, Place, Task
from lightning_fedleak.attacks.prefix_rounding import AsSent

SWEEP = 512
"""Candidates verified at once when all that could be right are."""
SURELY_NOISED = 1000
"""Tokens that could be right, of which none is: then no token is what was sent."""
FAR = 20.0
"""A token's distance to a candidate may differ so many times from that in the typical context."""


class Settling:
    """Decides on tokens that were verified.

    Args:
        task: the search.
        as_sent: runs as the client runs them.
        noised: whether it is known that no token's state is the observed one; None to find out.

    Attributes:
        noised: whether it is known, has shown, or is assumed for want of time.
        cut: whether time ended a look at all that can be right.
    """

    def __init__(self, task: Task, as_sent: AsSent, noised: bool | None) -> None:
        self.task = task
        self.as_sent = as_sent
        self.noised = noised is True
        self.cut = False
        self._may_be_noised = noised is None

    def believed(self, tokens: Tensor, distances: Tensor, noise: Tensor) -> Tensor:
        """Whether no token other than each of ``tokens`` can be the right one (any shape)."""
        found: Tensor = self._radius(distances, noise) < self.task.table.alone(tokens)
        return found

    def look(self, i: int, place: Place) -> int | None:
        """The token of text ``i``'s open place, if what was verified there tells.

        Verifies all that can still be right where rounds of candidates have not sufficed.
        """
        at = int(self.task.known[i])
        token, distance = place.tokens[place.best], place.distances[place.best]
        noise = float(self.task.noise[i, at])
        radius = self._radius_of(distance, noise)
        alone = float(self.task.table.alone(self.task.known.new_tensor(token)))
        if not place.certain and radius < alone:
            return token
        same = self.as_sent.same(i, place)
        if same is not None:
            return same
        place.rivals = self._rivals(token, radius).tolist()
        unseen = any(r not in place.seen for r in place.rivals)
        hidden = distance <= 2.0 * noise and self.as_sent.repeatable is True
        if unseen and place.round < len(ROUNDS):
            return None
        if unseen or hidden:
            self._sweep(i, place, noise)
            return None
        if self._shows_noise(place, noise):
            return None
        return place.tokens[place.best]

    def _radius(self, distances: Tensor, noise: Tensor) -> Tensor:
        """How far from a candidate, in the typical context, the right token can still be."""
        excess = (distances.square() - 2.0 * noise.square()).clamp(min=0).sqrt()
        radius: Tensor = FAR * excess + 2.0 * noise
        return radius

    def _radius_of(self, distance: float, noise: float) -> float:
        return float(self._radius(torch.tensor(distance), torch.tensor(noise)))

    def _rivals(self, token: int, radius: float) -> Tensor:
        """Tokens that can be right with ``token`` verified, the commonest first."""
        rivals = self.task.table.within(token, radius)
        return rivals[self.task.table.rank[rivals].argsort()]

    def _sweep(self, i: int, place: Place, noise: float) -> None:
        """Verifies all tokens that can still be right, and settles on the nearest."""
        table, prefixes = self.task.table, self.task.prefixes
        target = self.task.observed[i, self.task.known[i]]
        row = torch.tensor([i], device=target.device)
        exact = place.distances[place.best] <= 2.0 * noise and self.as_sent.repeatable is True
        run = self.as_sent.begun(row) if exact else prefixes.of_rows(row)
        whole = self.task.deadline
        limit = whole.share(2) if self._may_be_noised and not exact else whole
        open_ = torch.ones(table.size, dtype=torch.bool, device=target.device)
        done = place.run_again if exact else place.seen
        open_[torch.tensor(sorted(done), dtype=torch.int64, device=target.device)] = False
        rivals = torch.tensor(place.rivals, dtype=torch.int64, device=target.device)
        while True:
            left = rivals[open_[rivals]][:SWEEP]
            if not len(left):
                break
            if limit.passed:
                self.cut = True
                break
            states = run.attempt(left[None])[0].float()
            open_[left] = False
            far = (states - target).norm(dim=1)
            nearest = int(far.argmin())
            before = place.distances[place.best]
            place.only_counted(left.tolist(), far[far > far[nearest]].tolist() or [float("inf")])
            token, distance = int(left[nearest]), float(far[nearest])
            place.keep(token, states[nearest], distance)
            if exact:
                new = left[far == 0].tolist()
                if new and not place.twins:
                    apart = (table.entries[rivals] - table.entries[new[0]]).norm(dim=1)
                    rivals = rivals[apart.argsort()]
                if place.twins and not new:
                    break
                place.twins += new
            elif distance < before:
                if self.as_sent.same(i, place) is not None:
                    break
                rivals = self._rivals(token, self._radius_of(distance, noise))
        self.task.beside.add(run)
        cut = bool(open_[rivals].any()) and place.distances[place.best] > 0
        if cut and whole.passed:
            return
        if place.twins:
            self.as_sent.choose_twin(i, place)
        place.rivals = rivals.tolist()
        if not self._shows_noise(place, noise, cut):
            place.settled = place.tokens[place.best]

    def _shows_noise(self, place: Place, noise: float, cut: bool = False) -> bool:
        """Whether of many tokens that could be right, all verified unless ``cut``, none is."""
        many = min(SURELY_NOISED, self.task.table.distinct // 2)
        off = place.distances[place.best] > 2.0 * noise
        self.noised = self._may_be_noised and off and (cut or len(place.rivals) > many)
        return self.noised


__all__ = ["Settling"]
