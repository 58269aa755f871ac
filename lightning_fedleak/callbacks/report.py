"""Where results are written: ``leakage.jsonl``, TensorBoard's extras, the local reveal files.

Numbers only, with one exception: the reveal files, which hold recovered words and texts, are local
and have mode 0600.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import lightning.pytorch as L
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lightning_fedleak.attacks.base import Attack, Guess, WordGuess
from lightning_fedleak.callbacks.kinds import Inverted, headline_of
from lightning_fedleak.callbacks.ledger import HEAD_ONLY, STAGE_OF, Series
from lightning_fedleak.callbacks.look import Look
from lightning_fedleak.callbacks.outcome import Outcome
from lightning_fedleak.callbacks.reveal import RevealFiles
from lightning_fedleak.callbacks.tensorboard import (
    add_hparams,
    add_place_histogram,
    add_score_histograms,
)
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


class Report:
    """Writes what the looks of one fit found: to the loggers, ``leakage.jsonl``, the reveal files.

    Args:
        trainer: of this fit.
        attacks: for their settings.
        jsonl: one line for each look, stage and attack; written on rank 0.
        reveal: recovered words and texts; None writes none.
        pooled: a result holds several clients.
        local_steps: optimizer steps of a round; None without rounds.
    """

    def __init__(
        self,
        trainer: L.Trainer,
        attacks: Sequence[Attack],
        jsonl: JsonLines,
        reveal: RevealFiles | None,
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

    def show_words(self, look: Look, series: Series, guess: Guess, types: Tensor) -> None:
        """Writes what guessed words leave behind besides numbers."""
        if not isinstance(guess, WordGuess):
            return
        name = "/".join(series)
        if self._reveal is not None:
            self._reveal.add_words(look.step, name, guess, types)
        if self._trainer.is_global_zero and self._looks % HISTOGRAM_EVERY_LOOKS == 0:
            add_score_histograms(self._trainer.loggers, name, guess, types, look.step)

    def show_texts(self, look: Look, series: Series, found: Inverted) -> None:
        """Writes what reconstructed texts leave behind besides numbers."""
        if self._reveal is not None:
            self._reveal.add_texts(look.step, "/".join(series), found)

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
            if self._looks % HISTOGRAM_EVERY_LOOKS == 1:
                for series, outcome in outcomes.items():
                    name = "/".join(series)
                    add_place_histogram(self._trainer.loggers, name, outcome, look.step)
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
            extra |= {
                f"token_accuracy_at_{places}": right / n
                for places, (right, n) in outcome.by_position.items()
            }
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
