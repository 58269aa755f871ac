"""What a monitor has found, over all its fits, and what a checkpoint keeps of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_fedleak.callbacks.canary_scores import CanaryScores
from lightning_fedleak.callbacks.ledger import MAX_WAITS, Ledger, Series, values_of
from lightning_fedleak.callbacks.look import Look
from lightning_fedleak.callbacks.outcome import Outcome


class Results:
    """Counts looks and failures, and keeps the newest values.

    Args:
        ledger: the monitor's series.
        scores: of the user's canaries over looks; None where they are not scored.

    Attributes:
        latest: the newest value by log name; NaN is unknown. Empty before the first look.
        look_values: the values of the newest look alone, by log name.
        pending: log names that have no value at the newest look, and will have one later.
        looks: looks finished.
        failures: results that are unknown.
        last_step: optimizer step of the newest values.
        deferrals: steps in a row that were to be looked at and shared nothing.
    """

    def __init__(self, ledger: Ledger, scores: CanaryScores | None) -> None:
        self._ledger = ledger
        self._scores = scores
        self.latest: dict[str, float] = {}
        self.look_values: dict[str, float] = {}
        self.pending: frozenset[str] = frozenset()
        self.looks = 0
        self.failures = 0
        self.last_step = -1
        self.deferrals = 0
        self._looks_before = 0

    def clear(self) -> None:
        """A new fit: earlier looks were at another run."""
        self.deferrals = 0
        self._ledger.clear()
        if self._scores is not None:
            self._scores.clear()

    def begin(self, *, first: bool) -> None:
        """Training begins: remembers how many looks came before.

        Args:
            first: this is process 0.
        """
        self._looks_before = self.looks
        self._ledger.begin(first=first)

    def settled(self, outcomes: dict[Series, Outcome] | None) -> dict[Series, Outcome] | None:
        """The outcomes of a look; None where the next step is to be looked at instead.

        Args:
            outcomes: None where nothing was shared, which is *unknown* after too many such steps.
        """
        if outcomes is None:
            self.deferrals += 1
            if self.deferrals <= MAX_WAITS:
                return None
            why = f"nothing was shared in {self.deferrals} steps in a row"
            outcomes = self._ledger.all_unknown(why)
        self.deferrals = 0
        return outcomes

    def missing(self, *, due: bool) -> dict[Series, Outcome]:
        """What a fit that ends leaves *unknown*.

        Args:
            due: its last step was to be looked at.
        """
        looks = self.looks - self._looks_before
        if looks > 0:
            return self._ledger.never()
        if due or self.deferrals > 0:
            why = "training ended before anything that was shared could be looked at"
            return self._ledger.all_unknown(why)
        return {}

    def add(
        self, look: Look, outcomes: Mapping[Series, Outcome], beside: Mapping[str, float]
    ) -> dict[Series, Outcome]:
        """Takes a finished look.

        Args:
            look: the look.
            outcomes: by series.
            beside: other values of that step, by log name.

        Returns:
            The outcomes, *unknown* where one has been pending for too long.
        """
        known = self._ledger.wait(outcomes)
        self.pending = self._ledger.pending()
        values, now = values_of(known)
        self.failures += sum(outcome.unknown is not None for outcome in known.values())
        values |= beside
        values["monitor/failures"] = float(self.failures)
        values["monitor/seconds"] = look.seconds
        self.looks += 1
        self.last_step = look.step
        others = tuple(f"{'/'.join(s)}/" for s in self._ledger.kinds.keys() - outcomes.keys())
        self.latest = {n: v for n, v in self.latest.items() if n.startswith(others)} | values
        self.look_values = values | now
        if self._scores is not None:
            self._scores.add(look.canary_scores)
        return known

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, strings and tensors."""
        return {
            "looks": self.looks,
            "failures": self.failures,
            "deferrals": self.deferrals,
            "last_step": self.last_step,
            "latest": dict(self.latest),
            "ledger": self._ledger.state_dict(),
            "canary_scores": None if self._scores is None else self._scores.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes back what :meth:`state_dict` gave."""
        self.looks = state["looks"]
        self.failures = state["failures"]
        self.deferrals = state["deferrals"]
        self.last_step = state["last_step"]
        self.latest = dict(state["latest"])
        self._ledger.load_state_dict(state.get("ledger", {}))
        scores = state.get("canary_scores")
        if self._scores is not None and scores is not None:
            self._scores.load_state_dict(scores)


__all__ = ["Results"]
