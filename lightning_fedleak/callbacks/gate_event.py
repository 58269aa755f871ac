"""What a gate says when it fires."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from lightning_fedleak.callbacks.evidence import Verdict


class LeakageLimitExceeded(RuntimeError):
    """A RiskGate with ``action="raise"`` found more leakage than it allows."""


@dataclass(frozen=True)
class GateEvent:
    """What a gate found when it fired.

    Attributes:
        metric: the watched name.
        step: optimizer step that was looked at.
        value: what was measured; NaN where it is unknown.
        low, high: 95% interval of the value where there is one, else NaN; with ``bound="value"``.
        at_most: the threshold.
        checkpoint: where the run was saved; None where it was not.
        verdict: what all looks together show; None with ``bound="value"``.
        hardened: what was turned up instead of stopping.
        exhausted: the defences that are as strong as they get, so that there was nothing to turn
            up; empty where the gate would not have.
    """

    metric: str
    step: int
    value: float
    low: float
    high: float
    at_most: float
    checkpoint: Path | None
    verdict: Verdict | None = None
    hardened: tuple[str, ...] = ()
    exhausted: tuple[str, ...] = ()

    def __str__(self) -> str:
        """What happened, in the words that users see."""
        if math.isnan(self.value):
            found = (
                f"{self.metric} is unknown (the attack gave no result; see monitor/failures and "
                "the monitor's warning). A strict gate treats unknown as a breach"
            )
        else:
            interval = "" if math.isnan(self.low) else f" (95% {self.low:.3f} to {self.high:.3f})"
            # 0.3003 is not at most 0.3, and should not read like it.
            digits = 3
            if self.value != self.at_most:
                digits = next((n for n in (3, 6, 9) if round(self.value, n) != self.at_most), 17)
            found = f"{self.metric} = {self.value:.{digits}f}{interval}"
        if self.verdict is not None:
            found += " at this look"
        saved, go_on, shown = "", "", ""
        if self.verdict is not None and self.verdict.fires:
            shown = f"\n  evidence: {self.verdict.explain(self.at_most)}"
        if self.checkpoint is not None:
            saved = f"\n  saved:    {self.checkpoint}"
            go_on = " To go on from here: trainer.fit(..., ckpt_path='<the file saved>')."
        start = (
            f"at step {self.step}\n  measured: {found}\n  allowed:  at most {self.at_most:g}{shown}"
        )
        if self.hardened:
            return f"{start}\n  hardened: {'; '.join(self.hardened)}"
        mend = (
            "add a defence, or a stronger one, with "
            "Trainer(strategy=DefendedStrategy('auto', defenses=[...]))"
        )
        if self.exhausted:
            start = f"{start}\n  defences: {', '.join(self.exhausted)}, turned up as far as it goes"
            mend = "let the defences start stronger or be turned up further (most_notches)"
        if math.isnan(self.value) and (self.verdict is None or not self.verdict.fires):
            what_now = (
                "what was shared was not measured, so nothing is known of it. leakage.jsonl holds "
                "the reason. Mend that, or let unknown looks pass with patience= or strict=False"
            )
        else:
            what_now = f"{self._finding()}. Use larger batches, {mend}, or raise at_most"
        return f"{start}{saved}\n  what now: {what_now}.{go_on}"

    def _finding(self) -> str:
        if self.verdict is None or not self.verdict.fires:
            return "the update of this step gives away more than you allow"
        if self.verdict.above:
            return "the updates of this run give away more than you allow"
        return "the updates of this run may give away more than you allow"


__all__ = ["GateEvent", "LeakageLimitExceeded"]
