"""What the package brings along: a small pretrained language model and private messages."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent
EMBEDDED_MODEL = FOLDER / "model"
EMBEDDED_MESSAGES = FOLDER / "private_messages.jsonl"


class SourceError(ValueError):
    """A model, text or folder cannot be used; says what was looked for and what to give."""
