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

import lightning.pytorch as L
import torch
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lightning_fedleak.attacks.base import Attack, Guess, WordGuess
from lightning_fedleak.callbacks.kinds import charts_of, headline_of
from lightning_fedleak.callbacks.ledger import HEAD_ONLY, STAGE_OF, Series
from lightning_fedleak.callbacks.look import Look
from lightning_fedleak.callbacks.outcome import Outcome
from lightning_fedleak.metrics import Rate

SCHEMA_VERSION = 1
HISTOGRAM_EVERY_LOOKS = 10


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


class Report:
    """Writes what the looks of one fit found: to the loggers, ``leakage.jsonl``, the reveal file.

    Args:
        trainer: of this fit.
        attacks: for their settings.
        jsonl: one line for each look, stage and attack; written on rank 0.
        reveal: recovered words; None writes none.
        pooled: a result holds several clients.
        local_steps: optimizer steps of a round; None without rounds.
    """

    def __init__(
        self,
        trainer: L.Trainer,
        attacks: Sequence[Attack],
        jsonl: JsonLines,
        reveal: RevealFile | None,
        *,
        pooled: bool,
        local_steps: int | None,
    ) -> None:
        self._trainer = trainer
        self._attacks = attacks
        self._jsonl = jsonl
        self._reveal = reveal
        self._pooled = pooled
        self._local_steps = local_steps
        self._looks = 0
        self._warned: set[str] = set()

    def show(self, look: Look, series: Series, guess: Guess, types: Tensor) -> None:
        """Writes what a single guess leaves behind besides numbers."""
        if not isinstance(guess, WordGuess):
            return
        name = "/".join(series)
        if self._reveal is not None:
            self._reveal.append(look.step, name, guess, types)
        if self._trainer.is_global_zero and self._looks % HISTOGRAM_EVERY_LOOKS == 0:
            add_score_histograms(self._trainer.loggers, name, guess, types, look.step)

    def write(
        self, look: Look, outcomes: Mapping[Series, Outcome], values: Mapping[str, float]
    ) -> None:
        """Writes one look; says once for each reason why a result is unknown."""
        self._looks += 1
        for (_, name), outcome in outcomes.items():
            if outcome.unknown is not None:
                self._warn_once(
                    name + outcome.unknown,
                    f"'{name}' gave no result at step {look.step}: {outcome.unknown}. Its leakage "
                    "there is unknown, not 0; training goes on. (Said once for each reason; "
                    "monitor/failures counts them.)",
                )
        finite = {n: v for n, v in values.items() if math.isfinite(v)}
        for logger in self._trainer.loggers:
            logger.log_metrics(finite, step=look.step)
        if self._trainer.is_global_zero:
            try:
                self._write_lines(look, outcomes)
            except OSError as error:
                path = self._jsonl.path
                self._warn_once(str(path), f"{path} cannot be written: {error.strerror}")

    def _warn_once(self, key: str, text: str) -> None:
        if key not in self._warned:
            self._warned.add(key)
            rank_zero_warn(f"LeakageMonitor: {text}")

    def _write_lines(self, look: Look, outcomes: Mapping[Series, Outcome]) -> None:
        configs = {a.name: a.config() for a in self._attacks}
        for (prefix, name), outcome in outcomes.items():
            if outcome.pending is not None:
                continue
            extra = {f"{k}_worst_client": v for k, v in outcome.worst.items()}
            extra |= {f"{k}_of_this_look": v for k, v in (outcome.now or {}).items()}
            extra |= outcome.extra
            self._jsonl.append(
                step=look.step,
                stage=STAGE_OF[prefix],
                client="pooled" if self._pooled else 0,
                round_=None if self._local_steps is None else look.step // self._local_steps,
                attack=name,
                config=configs.get(name, configs.get(name.removesuffix(f"_{HEAD_ONLY}"), {})),
                n=outcome.n,
                exposed=outcome.exposed,
                rates=outcome.rates,
                extra=extra,
                unknown=outcome.unknown,
            )

    def write_summary(self, latest: Mapping[str, float]) -> None:
        """Leaves a row in TensorBoard's table of runs."""
        if not self._trainer.is_global_zero or not latest:
            return
        strategy = self._trainer.strategy
        settings = {f"fedleak/{a.name}": repr(a.config()) for a in self._attacks}
        settings["fedleak/strategy"] = type(strategy).__name__
        defenses = getattr(strategy, "defenses", ())
        settings["fedleak/defenses"] = ", ".join(d.name for d in defenses) or "none"
        ends = tuple(f"/{headline_of(a)}" for a in self._attacks)
        chosen = (n for n in latest if n.startswith("utility/") or n.endswith(ends))
        add_hparams(self._trainer.loggers, settings, {f"hp/{n}": latest[n] for n in chosen})


def tensorboards(loggers: Sequence[Logger]) -> list[TensorBoardLogger]:
    """The TensorBoard loggers among ``loggers``."""
    return [logger for logger in loggers if isinstance(logger, TensorBoardLogger)]


def add_layout(
    loggers: Sequence[Logger],
    utility: Sequence[str],
    attacks: Sequence[Attack],
    prefixes: Sequence[str],
) -> None:
    """Puts utility, leakage and the monitor's own cost on one page of TensorBoard.

    Args:
        loggers: the run's loggers; only TensorBoard's are used.
        utility: names of the user's metrics.
        attacks: the monitor's.
        prefixes: ``"leakage"``, ``"leakage_local"``, ``"leakage_aggregate"`` as measured.
    """
    page: dict[str, list[Any]] = {
        "utility": _lines([f"utility/{name}" for name in utility]),
    }
    for prefix in prefixes:
        for headline in dict.fromkeys(headline_of(a) for a in attacks):
            names = [f"{prefix}/{a.name}" for a in attacks if headline_of(a) == headline]
            page[f"{prefix}: {headline.upper()}"] = _lines([f"{n}/{headline}" for n in names])
        for attack in attacks:
            root, headline = f"{prefix}/{attack.name}", headline_of(attack)
            for title, metrics in charts_of(attack).items():
                page[f"{root}: {title}"] = _lines([f"{root}/{metric}" for metric in metrics])
            page[f"{root}: {headline.upper()} and its 95% interval"] = [
                "Margin",
                [f"{root}/{headline}{end}" for end in ("", "_low", "_high")],
            ]
    page["cost of monitoring (seconds a look)"] = _lines(["monitor/seconds"])
    for logger in tensorboards(loggers):
        logger.experiment.add_custom_scalars({"leakage and utility": page})


def _lines(tags: Sequence[str]) -> list[Any]:
    """A chart of lines, whose tags TensorBoard reads as regular expressions."""
    return ["Multiline", [f"^{re.escape(tag)}$" for tag in tags]]


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
