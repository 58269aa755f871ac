"""What a check of a run found, and the exit code that says it."""

from __future__ import annotations

from dataclasses import dataclass, field

HOLDS, OPEN, CONTRADICTED = 0, 2, 3
"""Exit codes of ``fedleak verify``: all that was given holds; undecided; it does not hold."""


@dataclass
class Verdict:
    """Collect what a check finds.

    Attributes:
        contradictions: what cannot be so in the logs of an honest run.
        open: what cannot be decided.
        notes: what a reader should know.
    """

    contradictions: list[str] = field(default_factory=list)
    open: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def contradict(self, text: str) -> None:
        """Add what cannot be so."""
        self.contradictions.append(text)

    def leave_open(self, text: str) -> None:
        """Add what cannot be decided."""
        self.open.append(text)

    def note(self, text: str) -> None:
        """Add what a reader should know."""
        self.notes.append(text)

    @property
    def status(self) -> int:
        """The exit code: 3 after a contradiction, else 2 where something is open, else 0."""
        return CONTRADICTED if self.contradictions else OPEN if self.open else HOLDS
