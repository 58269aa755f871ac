"""Where results are written: ``leakage.jsonl``, TensorBoard's extras, the local reveal file.

Numbers only, with one exception: the reveal file, which holds recovered words, is local and has
mode 0600.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from torch import Tensor

from lightning_fedleak.attacks.base import WordGuess
from lightning_fedleak.metrics import Rate

SCHEMA_VERSION = 1


class JsonLines:
    """Appends one line per look, stage, client and attack to ``leakage.jsonl``.

    Args:
        path: the file; its folder is made when the first line is written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(
        self,
        *,
        step: int,
        stage: str,
        client: str | int,
        round_: int | None,
        attack: str,
        config: Mapping[str, object],
        n: int,
        exposed: bool,
        rates: Mapping[str, Rate],
        extra: Mapping[str, float],
        unknown: str | None,
    ) -> None:
        """Writes one result, or why it is unknown."""
        line = {
            "schema": SCHEMA_VERSION,
            "step": step,
            "stage": stage,
            "client": client,
            "round": round_,
            "attack": attack,
            "config": dict(config),
            "n": n,
            "exposed": exposed,
            "metrics": {
                name: {"value": _finite(r.value), "low": _finite(r.low), "high": _finite(r.high)}
                for name, r in rates.items()
            }
            | {name: {"value": _finite(value)} for name, value in extra.items()},
            "unknown": unknown,
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


class RevealFile:
    """Recovered words in a local file of mode 0600: opened afresh per look, never uploaded.

    Args:
        path: the file; its mode is set to 0600 at every look.
        tokenizer: decodes token ids; None writes the ids.
    """

    def __init__(self, path: Path, tokenizer: Any | None) -> None:
        self.path = path
        self._tokenizer = tokenizer

    def append(self, step: int, series: str, guess: WordGuess, truth: Tensor) -> None:
        """Writes what was recovered at one look, right and wrong guesses apart."""
        true_ids = set(truth.tolist())
        guessed = guess.types.tolist()
        right = [t for t in guessed if t in true_ids]
        wrong = [t for t in guessed if t not in true_ids]
        missed = sorted(true_ids.difference(guessed))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        with os.fdopen(descriptor, "a", encoding="utf-8") as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(f"== step {step}, {series}\n")
            file.write(f"recovered ({len(right)}): {self._words(right)}\n")
            file.write(f"wrong ({len(wrong)}): {self._words(wrong)}\n")
            file.write(f"missed ({len(missed)}): {self._words(missed)}\n")

    def _words(self, ids: Sequence[int]) -> str:
        if self._tokenizer is None:
            return " ".join(str(i) for i in ids)
        return " ".join(repr(self._tokenizer.decode([i])) for i in ids)


def tensorboards(loggers: Sequence[Logger]) -> list[TensorBoardLogger]:
    """The TensorBoard loggers among ``loggers``."""
    return [logger for logger in loggers if isinstance(logger, TensorBoardLogger)]


def add_layout(
    loggers: Sequence[Logger],
    utility: Sequence[str],
    attacks: Sequence[str],
    prefixes: Sequence[str],
) -> None:
    """Puts utility, leakage and the monitor's own cost on one page of TensorBoard.

    Args:
        loggers: the run's loggers; only TensorBoard's are used.
        utility: names of the user's metrics.
        attacks: names of the attacks.
        prefixes: ``"leakage"``, ``"leakage_local"``, ``"leakage_aggregate"`` as measured.
    """
    page: dict[str, list[Any]] = {
        "utility": ["Multiline", [_exactly(f"utility/{name}") for name in utility]],
    }
    for prefix in prefixes:
        page[f"{prefix}: F1"] = ["Multiline", [_exactly(f"{prefix}/{a}/f1") for a in attacks]]
        for attack in attacks:
            root = f"{prefix}/{attack}"
            page[f"{root}: precision and recall"] = [
                "Multiline",
                [_exactly(f"{root}/precision"), _exactly(f"{root}/recall")],
            ]
            page[f"{root}: F1 and its 95% interval"] = [
                "Margin",
                [f"{root}/f1", f"{root}/f1_low", f"{root}/f1_high"],
            ]
    page["cost of monitoring (seconds a look)"] = ["Multiline", [_exactly("monitor/seconds")]]
    for logger in tensorboards(loggers):
        logger.experiment.add_custom_scalars({"leakage and utility": page})


def _exactly(tag: str) -> str:
    """TensorBoard reads the tags of a chart of lines as regular expressions."""
    return f"^{re.escape(tag)}$"


def add_score_histograms(
    loggers: Sequence[Logger], name: str, guess: WordGuess, truth: Tensor, step: int
) -> None:
    """How far apart the scores of used and unused types lie, as two histograms."""
    boards = tensorboards(loggers)
    if not boards or guess.scores is None:
        return
    used = torch.zeros(guess.scores.shape[0], dtype=torch.bool, device=guess.scores.device)
    used[truth.to(used.device)] = True
    for logger in boards:
        for label, scores in (("used", guess.scores[used]), ("unused", guess.scores[~used])):
            finite = scores[scores.isfinite()]
            if finite.numel():
                logger.experiment.add_histogram(f"{name}/score_of_{label}_types", finite, step)


def add_hparams(
    loggers: Sequence[Logger], settings: Mapping[str, Any], results: Mapping[str, float]
) -> None:
    """One row in TensorBoard's HParams table: the monitor's settings and the last results."""
    known = {name: value for name, value in results.items() if math.isfinite(value)}
    for logger in tensorboards(loggers):
        logger.log_hyperparams(dict(settings), known)
