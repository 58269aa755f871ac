"""What was recovered, in words: in local files of mode 0600, never in a logger."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from torch import Tensor

from lightning_fedleak.attacks.base import WordGuess
from lightning_fedleak.callbacks.kinds import Inverted

GAP = "[?]"
"""Stands for tokens that were not guessed."""


class RevealFiles:
    """One file for words and one for texts, opened afresh at each look, never uploaded.

    Args:
        folder: where they are.
        rank: of this process, a part of their names.
        tokenizer: decodes token ids; None writes the ids.
    """

    def __init__(self, folder: Path, rank: int, tokenizer: Any | None) -> None:
        self.words = folder / f"revealed_words.rank{rank}.txt"
        self.texts = folder / f"revealed_texts.rank{rank}.txt"
        self._tokenizer = tokenizer

    def add_words(self, step: int, series: str, guess: WordGuess, truth: Tensor) -> None:
        """Writes what was recovered at one look, right and wrong guesses apart."""
        true_ids = set(truth.tolist())
        guessed = guess.types.tolist()
        right = [t for t in guessed if t in true_ids]
        wrong = [t for t in guessed if t not in true_ids]
        missed = sorted(true_ids.difference(guessed))
        _append(
            self.words,
            [
                f"== step {step}, {series}",
                f"recovered ({len(right)}): {self._each(right)}",
                f"wrong ({len(wrong)}): {self._each(wrong)}",
                f"missed ({len(missed)}): {self._each(missed)}",
            ],
        )

    def add_texts(self, step: int, series: str, found: Inverted) -> None:
        """Writes each text of one look, what was sent above what was reconstructed."""
        lines = [f"== step {step}, {series}"]
        for sent, guessed, real in zip(
            found.input_ids, found.guess.tokens.to(found.input_ids.device), found.real, strict=True
        ):
            true, said = sent[real].tolist(), guessed[real].tolist()
            right = sum(a == b for a, b in zip(true, said, strict=True))
            lines.append(f"-- {right} of {len(true)} tokens right")
            lines.append(f"original:      {self._text(true)}")
            lines.append(f"reconstructed: {self._text(said)}")
        _append(self.texts, lines)

    def _each(self, ids: Sequence[int]) -> str:
        if self._tokenizer is None:
            return " ".join(str(i) for i in ids)
        return " ".join(repr(self._tokenizer.decode([i])) for i in ids)

    def _text(self, ids: Sequence[int]) -> str:
        if self._tokenizer is None:
            return " ".join(GAP if i < 0 else str(i) for i in ids)
        parts = (
            GAP * len(run) if gap else self._tokenizer.decode(run)
            for gap, run in ((gap, list(run)) for gap, run in groupby(ids, lambda i: i < 0))
        )
        return repr("".join(parts))


def _append(path: Path, lines: Iterable[str]) -> None:
    """Adds lines to a file that only its owner may read, whatever its mode was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    with os.fdopen(descriptor, "a", encoding="utf-8") as file:
        os.fchmod(file.fileno(), 0o600)
        file.writelines(f"{line}\n" for line in lines)


__all__ = ["GAP", "RevealFiles"]
