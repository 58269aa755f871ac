"""The results of a watched run, in sentences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lightning_fedleak.records import read_results


@dataclass(frozen=True)
class Reading:
    """One attack at one look, read back from ``leakage.jsonl``.

    Attributes:
        attack: its name in the logs.
        step: optimizer step.
        n: word types in the batch.
        recall, precision: shares, 0 to 1; None where the result is unknown.
        exposed: whether the surface that the attack reads was shared at all.
    """

    attack: str
    step: int
    n: int
    recall: float | None
    precision: float | None
    exposed: bool

    @property
    def f1(self) -> float:
        """Return the harmonic mean of recall and precision; 0 where either is unknown."""
        if not self.recall or not self.precision:
            return 0.0
        return 2 * self.recall * self.precision / (self.recall + self.precision)


def read_back(path: Path) -> list[Reading]:
    """Return the shared stage's results of a ``leakage.jsonl``; none where there is no file."""
    return [
        Reading(
            attack=line.attack,
            step=line.step,
            n=line.n or 0,
            recall=line.value("recall"),
            precision=line.value("precision"),
            exposed=line.was_shared,
        )
        for line in read_results(path)
        if line.stage == "shared"
    ]


def summary(readings: Sequence[Reading], batch_size: int) -> str:
    """Return sentences about the share of the words that one update gave away, by attack.

    Args:
        readings: of one run; several attacks and steps.
        batch_size: texts behind one update.
    """
    results = [r for r in readings if r.exposed and r.recall is not None]
    if not results:
        return "Nothing was measured: no attack gave a result. That is 'unknown', not 'safe'" + (
            "; the attacks of this demo read the gradient of the output head, and this run "
            "does not share it."
            if any(not r.exposed for r in readings)
            else "."
        )
    best = max(
        {r.attack for r in results}, key=lambda a: _mean([r.f1 for r in results if r.attack == a])
    )
    recall = _mean([r.recall for r in results if r.attack == best and r.recall is not None])
    lines = [
        f"From one shared update the server could have read {_percent(recall)} of the private "
        f"words ({best}).",
        "",
        f"Mean, lowest and highest of {len({r.step for r in results})} updates, each of "
        f"{batch_size} texts that held {_mean([r.n for r in results]):.0f} different words:",
    ]
    for attack in dict.fromkeys(r.attack for r in readings):
        lines.append(f"  {attack}: {_sentence([r for r in readings if r.attack == attack])}")
    lines += [
        "",
        "'Words' are the model's tokens: words and pieces of words. The server (its staff, its "
        "storage, whoever listens) learns which occur, not their order and not in which text.",
        "A low number would not mean 'safe': these attacks read one gradient of one step. Others "
        "may read more, and another model, text or batch size gives other numbers.",
    ]
    return "\n".join(lines)


def _sentence(readings: Sequence[Reading]) -> str:
    if not any(r.exposed for r in readings):
        return "nothing, because it reads a gradient that this run does not share"
    results = [r for r in readings if r.recall is not None and r.precision is not None]
    if not results:
        return "unknown, it gave no result"
    tail = (
        f"; no result at {len(readings) - len(results)} looks"
        if len(results) < len(readings)
        else ""
    )
    return (
        f"recall {_spread([r.recall for r in results])}, "
        f"precision {_spread([r.precision for r in results])}{tail}"
    )


def _spread(shares: Sequence[float | None]) -> str:
    present = [s for s in shares if s is not None]
    mean, low, high = map(_percent, (_mean(present), min(present), max(present)))
    return f"{mean} ({low} to {high})"


def _percent(share: float) -> str:
    """Return a share in percent; nothing but 0 and 1 is rounded to 0% or 100%."""
    for digits in (0, 1, 2):
        text = f"{share:.{digits}%}"
        if share in (0, 1) or float(text[:-1]) not in (0, 100):
            return text
    return "nearly all" if share > 0.5 else "nearly none"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
