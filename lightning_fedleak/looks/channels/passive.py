"""Membership of a server that adds nothing to the model and reads what is shared anyway."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import ClassVar

import torch
from scipy.stats import mannwhitneyu

from lightning_fedleak.attacks import HONEST_BUT_CURIOUS, Attack, Capability, PassiveMembership
from lightning_fedleak.batches import IGNORE_INDEX, TokenBatch
from lightning_fedleak.looks.channels.base import Plan, gradient_plan, guess
from lightning_fedleak.looks.channels.membership import GameTable, MembershipChannel
from lightning_fedleak.looks.channels.played import Played, played_games, rates_of
from lightning_fedleak.looks.channels.targets import Targets, draw_targets
from lightning_fedleak.looks.run import AUDIT, Look, Moment, Unknown, Waiting
from lightning_fedleak.snapshots import GradientSnapshot, Stage
from lightning_fedleak.taps import Draw

BY_CHANCE = 0.05
PART_BY_CHANCE = 0.01
"""Chance of scores that know nothing above which a control, or one of a part, counts as not read.

Of a part it is smaller since some three are tried. Higher: an attack that knows nothing passes as
one that would have been seen; lower: batches of a few texts have no control. Of two texts no game
is certain: their control counts as it is.
"""


class PassiveMembershipChannel(MembershipChannel):
    """Play the same games for a server that adds no layers and reads what is shared anyway."""

    reads = PassiveMembership
    reads_updates: ClassVar[bool] = True
    controlled: ClassVar[bool] = True
    adversary = HONEST_BUT_CURIOUS | {Capability.KNOWS_TARGET_TEXT}

    def check_settings(self) -> None:
        """Refuse scores of canaries, which layers of a dishonest server give.

        Raises:
            ValueError: they are asked for.
        """
        super().check_settings()
        if self.settings.games.score_canaries is not None:
            raise ValueError(
                f"score_canaries= scores canaries by layers of a dishonest server, and "
                f"'{self.attacks[0].name}' adds none: give it a monitor of its own"
            )

    def plan(self, attack: Attack) -> Plan:
        """Return a plan that reads gradients of the client's own parameters.

        Raises:
            ValueError: it cannot read this model.
        """
        return gradient_plan(attack, self.run)

    def follow(self, plans: Sequence[Plan]) -> None:
        """Use these plans from now on; no layer is tapped."""
        self.plans = tuple(plans)

    def check(self, attack: Attack) -> None:
        """Do nothing, because no attack can be tried without a gradient."""

    @torch.no_grad()
    def at_moment(self, moment: Moment) -> None:
        """Ask every attack about texts, from what is shared at this moment."""
        look = moment.look
        if not self.attacks or not moment.wanted or look.truth_error is not None:
            return
        draws: dict[str, Callable[..., Targets | Waiting]]
        draws = {str(Stage.SHARED): self._sources.population}
        if self._audits and Stage.SHARED in moment.wanted:
            draws[AUDIT] = self._sources.canaries
        for name, draw in draws.items():
            if name not in self._tables:
                self._tables[name] = GameTable(draw_targets(draw, look.step, look.all_batches))
        for plan in self.plans:
            stepped = moment.optimizer is None or plan.optimizer in (None, moment.optimizer)
            silent = any(s not in look.answers for s in self.series_of(plan))
            if not plan.exposed or not stepped or not silent:
                continue
            answer = self._answer(plan, self._tables[str(Stage.SHARED)].targets, moment)
            for series in self.series_at(plan.attack, moment.wanted):
                look.answers.setdefault(series, answer)
            if AUDIT in self._tables and Stage.SHARED in moment.wanted:
                answer = self._answer(plan, self._tables[AUDIT].targets, moment)
                look.answers.setdefault(self._audits[plan.attack.name], answer)

    def _answer(
        self, plan: Plan, targets: Targets | Waiting | Unknown, moment: Moment
    ) -> Played | Unknown | Waiting:
        if not isinstance(targets, Targets):
            return targets
        answer = guess(plan, moment.gradients(), self.run, targets.query())
        if isinstance(answer, Unknown | Waiting):
            return answer
        return played_games(answer, targets.members)

    def rates_now(self, look: Look, plan: Plan, answer: object) -> Mapping[str, float]:
        """Return the rates of the games of this look."""
        return rates_of(answer) if isinstance(answer, Played) else {}

    def control_rates(
        self, plan: Plan, view: GradientSnapshot, draw: Draw, step: int
    ) -> Mapping[str, float] | Unknown | Waiting:
        """Return the rates of games about the texts of a control, and others shuffled alike."""
        batches = [one for batch in draw.batches if (one := _with_labels(batch)) is not None]
        targets = draw_targets(partial(self._sources.population, shuffled=True), step, batches)
        if not isinstance(targets, Targets):
            return targets
        answer = guess(plan, view, self.run, targets.query())
        if isinstance(answer, Unknown | Waiting):
            return answer
        games = played_games(answer, targets.members)
        if isinstance(games, Unknown):
            return games
        chance, least = chances_of(games)
        most = PART_BY_CHANCE if draw.is_part else BY_CHANCE
        if chance > most and (draw.is_part or least <= most):
            return Unknown(f"scores that know nothing do as well with a chance of {chance:.2f}")
        return rates_of(games)

    def state_dict(self) -> dict[str, object]:
        """Return nothing: the games of crafted layers hold the user's canaries."""
        return {}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Do nothing, because nothing was saved."""


def chances_of(games: Played) -> tuple[float, float]:
    """Return the chance that scores which know nothing do as well (exact), and its least value."""
    members, others = games.scores[games.members], games.scores[~games.members]
    if not len(members) or not len(others):
        return 1.0, 1.0
    chance = float(mannwhitneyu(members, others, alternative="greater").pvalue)
    return chance, 1 / math.comb(len(games.scores), len(members))


def _with_labels(batch: TokenBatch) -> TokenBatch | None:
    """Return the texts of a batch that have a label; None where none has."""
    labels = batch.labels
    if labels is None:
        return batch
    kept = (labels != IGNORE_INDEX).flatten(1).any(1) if labels.dim() > 1 else labels >= 0
    if not bool(kept.any()):
        return None
    fields = ("input_ids", "labels", "attention_mask", "position_ids", "documents", "live")
    rows = {
        name: value[kept.to(value.device)]
        for name in fields
        if (value := getattr(batch, name)) is not None and len(value) == len(kept)
    }
    return replace(batch, **rows)
