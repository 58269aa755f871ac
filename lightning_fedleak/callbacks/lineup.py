"""The attacks of one run: which of them are played, what each reads, and their calibrations."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from types import MappingProxyType
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from lightning_fedleak.attacks.base import Attack
from lightning_fedleak.attacks.public_text import MissingText, sampled_once
from lightning_fedleak.callbacks.auto import Row, in_short, look_seconds, reads_of
from lightning_fedleak.callbacks.cache import CalibrationCache, hash_of_weights
from lightning_fedleak.callbacks.channels.base import Channel, Run, reason
from lightning_fedleak.callbacks.checks import Plan, unread_names, warn_of_untested
from lightning_fedleak.model_runs import whole_model
from lightning_fedleak.progress import bars, track

_NOT_SHARED = "what it reads is not trained, and so not shared"


class Lineup:
    """Which attacks are played in a run, by what plans, calibrated once.

    Args:
        run: the run; its channels are open.
        attacks: in the order of the logs.
        channels: those that have attacks.
        local_steps: of a round, where weight changes are shared; None for single gradients.
        begins_at: optimizer step that the run begins at.
        choosing: leave out attacks that cannot read this model or run, in place of refusing it.
        most_seconds: that a look of one of them may be estimated to take; others are left out too.
        refused: why attacks are left out already, by their names.
        cache: of calibrations; None makes all anew.

    Attributes:
        plans: of the attacks that give results, in the order of the logs.
        prepared: names of the attacks that are calibrated.
        rows: with ``choosing``, what became of each attack.

    Raises:
        ValueError: an attack does not fit the model or the run.
    """

    def __init__(
        self,
        run: Run,
        attacks: Sequence[Attack],
        channels: Sequence[Channel],
        *,
        local_steps: int | None,
        begins_at: int = 0,
        choosing: bool = False,
        most_seconds: float = math.inf,
        refused: Mapping[str, str] = MappingProxyType({}),
        cache: CalibrationCache | None = None,
    ) -> None:
        self._run = run
        self._attacks = tuple(attacks)
        self._channels = tuple(channels)
        self._local_steps = local_steps
        self._begins_at = begins_at
        self._choosing = choosing
        self._most_seconds = most_seconds
        self._refused = dict(refused)
        self._without_text: set[str] = set()
        self._ever_exposed: set[str] = set()
        self._cache = cache
        self._weights: str | None = None
        self.plans: list[Plan] = []
        self.prepared: set[str] = set()
        self.rows: list[Row] = []
        for channel in self._channels:
            channel.leave_out(self._refused.keys())
            for attack in channel.attacks:
                with self._left_out(attack):
                    attack.check_device(run.anatomy)
                    channel.plan(attack)
                    channel.admit(attack)
            channel.leave_out(self._refused.keys())

    @contextmanager
    def _left_out(self, attack: Attack) -> Iterator[None]:
        """Where attacks are chosen, a refusal leaves one out."""
        try:
            yield
        except ValueError as error:
            if not self._choosing:
                raise
            if isinstance(error, MissingText):
                self._without_text.add(attack.name)
            self._refused.setdefault(attack.name, in_short(attack.name, str(error)))

    @property
    def untested(self) -> dict[str, str]:
        """Families of which an attack that applies is not played for want of text, and why."""
        return {
            c.family: f"'{a.name}', which applies, is not played: {self._refused[a.name]}"
            for c in self._channels
            for a in c.given
            if a.name in self._without_text
        }

    @property
    def exposed(self) -> list[Plan]:
        """The attacks that have something to read."""
        return [p for p in self.plans if p.exposed]

    @property
    def playing(self) -> frozenset[str]:
        """Names of the attacks that give results, exposed or not."""
        return frozenset(plan.attack.name for plan in self.plans)

    @property
    def unread(self) -> tuple[str, ...]:
        """Names of the trained parameters whose gradient no attack reads."""
        return unread_names(self.plans, self._run.anatomy)

    @property
    def trained(self) -> tuple[str, ...]:
        """Names of the trained parameters."""
        return self._run.anatomy.trainable_names()

    def follow(self) -> bool:
        """Follows what is trained: layers may be frozen and unfrozen while a run goes on.

        Returns:
            Whether the plans are others than before.
        """
        by_name = {a.name: c.plan(a) for c in self._channels for a in c.attacks}
        self._ever_exposed |= {name for name, plan in by_name.items() if plan.exposed}
        if self._choosing:  # of what was never shared nothing is logged
            by_name = {n: plan for n, plan in by_name.items() if n in self._ever_exposed}
        plans = [by_name[a.name] for a in self._attacks if a.name in by_name]
        if plans == self.plans:
            return False
        self.plans = plans
        warn_of_untested(plans, self._run.anatomy, self._run.watcher)
        for channel in self._channels:
            channel.follow([by_name[a.name] for a in channel.attacks if a.name in by_name])
        self._tell()
        return True

    def begin(self, step: int) -> None:
        """Training starts at ``step``; a fit that is resumed does not know it before."""
        self._begins_at = step
        self._tell()

    def _tell(self) -> None:
        """Tells every attack about the run."""
        for plan in self.plans:
            facts = self._run.facts(plan, self._local_steps, self._begins_at)
            plan.attack.meet(facts)

    def calibrate(
        self, restored: Mapping[str, Any], follow: Callable[[], object] | None = None
    ) -> None:
        """Prepares every attack that has something to read, and tries what can be tried.

        Args:
            restored: of a checkpoint, by the attack's name: its settings then, and its calibration,
                which is used where the settings are the same.
            follow: in place of :meth:`follow`, where more must follow what is played.

        Raises:
            ValueError: an attack does not fit the model.
        """
        with whole_model(self._run.anatomy.root), sampled_once(), bars(self._run.shows_progress):
            for plan in track(self.exposed, f"{self._run.watcher} calibrates its attacks"):
                attack = plan.attack
                started = time.perf_counter()
                with self._left_out(attack):
                    kept = self._calibrated(attack, restored.get(attack.name))
                seconds = time.perf_counter() - started
                if seconds > 1:
                    how = " (kept from an earlier fit)" if kept else ""
                    rank_zero_info(
                        f"{self._run.watcher}: '{attack.name}' calibrated in {seconds:.1f} s{how}"
                    )
            costs = self._costs() if self._choosing else {}
        for channel in self._channels:
            channel.leave_out(self._refused.keys())
            for attack in channel.attacks:
                with self._left_out(attack):
                    channel.check(attack)
        if self._choosing:
            self._choose(costs, follow or self.follow)

    def _costs(self) -> dict[str, float]:
        """What a look of each attack takes, tried."""
        texts = next((2 * c.settings.games.targets for c in self._channels), 0)
        plans = [plan for plan in self.exposed if plan.attack.name in self.prepared]
        try:
            return look_seconds(
                self._run.anatomy,
                plans,
                texts,
                local_steps=self._local_steps,
                step=self._begins_at,
            )
        except Exception as error:
            rank_zero_warn(
                f"{self._run.watcher}: what a look costs could not be tried ({reason(error)}), so "
                "that no attack is left out for it"
            )
            return {}

    def _choose(self, costs: Mapping[str, float], follow: Callable[[], object]) -> None:
        """Leaves out what cannot be played or takes too long, as the first process finds it."""
        for name, seconds in costs.items():
            if seconds > self._most_seconds:
                self._refused.setdefault(
                    name,
                    f"a look takes about {seconds:.2g} s, and look_seconds={self._most_seconds:g}",
                )
        self._refused, costs = self._run.first_one_says((self._refused, dict(costs)))
        for channel in self._channels:
            channel.leave_out(self._refused.keys())
        follow()
        plans = {plan.attack.name: plan for plan in self.plans}
        anatomy = self._run.anatomy
        self.rows = [
            Row(
                attack.name,
                reads_of(plans.get(attack.name), anatomy),
                self._refused.get(attack.name, None if attack.name in plans else _NOT_SHARED),
                attack.name in self._ever_exposed,
                costs.get(attack.name),
            )
            for attack in self._attacks
        ]

    def _calibrated(self, attack: Attack, saved: Mapping[str, Any] | None) -> bool:
        """Calibrates an attack, by what a checkpoint or the cache holds where they do.

        Returns:
            Whether the cache did.
        """
        if saved is not None and saved["config"] == attack.fingerprint():
            attack.load_state_dict(saved["tensors"])
            if attack.restores_fully:
                self.prepared.add(attack.name)
            self._tell()
        if self._cache is None or attack.calibrated_with() is None or attack.name in self.prepared:
            self.prepare(attack)
            return False
        if self._weights is None:
            self._weights = hash_of_weights(self._run.anatomy.model, self._run.anatomy.head)
        kept = self._cache.load(attack, self._weights)
        if kept:
            self._tell()
        if kept and attack.restores_fully:
            self.prepared.add(attack.name)
            return True
        self.prepare(attack)
        if not kept:
            self._cache.save(attack, self._weights)
        return kept

    def prepare(self, attack: Attack) -> None:
        """Calibrates an attack, once in a run."""
        if attack.name not in self.prepared:
            attack.prepare(self._run.anatomy)
            self.prepared.add(attack.name)

    def refresh(self, step: int) -> dict[str, str]:
        """Lets every attack that has something to read follow the model as it is now.

        Args:
            step: optimizer step that is looked at.

        Returns:
            Why attacks could not, by their names.
        """
        failed: dict[str, str] = {}
        needed = any(_follows_model(plan.attack) for plan in self.exposed)
        with whole_model(self._run.anatomy.root) if needed else nullcontext():
            for plan in self.exposed:
                try:
                    self.prepare(plan.attack)
                    plan.attack.refresh(self._run.anatomy, step)
                except Exception as error:
                    failed[plan.attack.name] = reason(error)
        return failed


def _follows_model(attack: Attack) -> bool:
    """Whether the attack looks at the model at all."""
    kind = type(attack)
    return kind.prepare is not Attack.prepare or kind.refresh is not Attack.refresh


__all__ = ["Lineup"]
