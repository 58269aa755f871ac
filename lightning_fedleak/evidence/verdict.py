"""What a check of a run found, and the exit code that says it."""

from __future__ import annotations

from dataclasses import dataclass, field

HOLDS, OPEN, CONTRADICTED = 0, 2, 3
"""Exit codes of ``fedleak verify``: everything holds; something is open; a contradiction."""


@dataclass
class Verdict:
    """Collect the findings of a check, as sentences.

    Attributes:
        contradictions: The findings that are impossible in the logs of an honest run.
        open: The questions that cannot be decided.
        notes: The facts that a reader should know.
    """

    contradictions: list[str] = field(default_factory=list)
    open: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def contradict(self, text: str) -> None:
        """Add a finding that is impossible in an honest run."""
        self.contradictions.append(text)

    def leave_open(self, text: str) -> None:
        """Add a question that cannot be decided."""
        self.open.append(text)

    def note(self, text: str) -> None:
        """Add a fact that a reader should know."""
        self.notes.append(text)

    @property
    def status(self) -> int:
        """The exit code: 3 after a contradiction, else 2 if something is open, else 0."""
        return CONTRADICTED if self.contradictions else OPEN if self.open else HOLDS
