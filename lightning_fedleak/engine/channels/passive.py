"""Membership of a server that adds nothing to the model and reads what is shared anyway."""

from __future__ import annotations

from typing import ClassVar

import torch

from lightning_fedleak.attacks import HONEST_BUT_CURIOUS, Attack, Capability, PassiveMembership
from lightning_fedleak.engine.channels.base import guess
from lightning_fedleak.engine.channels.membership import GameTable, MembershipChannel
from lightning_fedleak.engine.channels.plans import Plan
from lightning_fedleak.engine.channels.played import Played, played_games
from lightning_fedleak.engine.channels.targets import Targets, draw_targets
from lightning_fedleak.engine.outcomes import Unknown, Waiting
from lightning_fedleak.engine.run import Moment
from lightning_fedleak.model.snapshots import GradientSnapshot
from lightning_fedleak.model.taps import Draw


class PassiveMembershipChannel(MembershipChannel):
    """Play the same games for a server that adds no layers and reads what is shared anyway."""

    reads = PassiveMembership
    reads_updates: ClassVar[bool] = True
    reads_states: ClassVar[bool] = False
    adversary = HONEST_BUT_CURIOUS | {Capability.KNOWS_TARGET_TEXT}

    def check(self, attack: Attack) -> None:
        """Do nothing, because no attack can be tried without a gradient."""

    @torch.no_grad()
    def at_moment(self, moment: Moment) -> None:
        """Ask every attack about texts, from what is shared at this moment."""
        look = moment.look
        if not self.attacks or not moment.wanted or look.truth_error is not None:
            return
        if self._table is None:
            draw = self._sources.population
            self._table = GameTable(draw_targets(draw, look.step, look.all_batches))
        for plan in self.plans:
            stepped = moment.optimizer is None or plan.optimizer in (None, moment.optimizer)
            expected = self.series(plan.attack, self.settings.stages)
            silent = any(series not in look.answers for series in expected)
            if not plan.exposed or not stepped or not silent:
                continue
            answer = self._answer(plan, self._table.targets, moment)
            for series in self.series(plan.attack, moment.wanted):
                look.answers.setdefault(series, answer)

    def _answer(
        self, plan: Plan, targets: Targets | Waiting | Unknown, moment: Moment
    ) -> Played | Unknown | Waiting:
        if not isinstance(targets, Targets):
            return targets
        answer = guess(plan, moment.gradients(), self.run, targets.query())
        if isinstance(answer, Unknown | Waiting):
            return answer
        return played_games(answer, targets.members)

    def _control_games(
        self, plan: Plan, view: GradientSnapshot, draw: Draw, targets: Targets, step: int
    ) -> Played | Unknown | Waiting:
        answer = guess(plan, view, self.run, targets.query())
        if isinstance(answer, Unknown | Waiting):
            return answer
        return played_games(answer, targets.members)
