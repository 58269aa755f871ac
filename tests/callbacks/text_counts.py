"""A family of leak of its own, in one file: how many texts were in the batch?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_fedleak.attacks.base import Attack, Capability, Guess, Query, Surfaces, ThreatModel
from lightning_fedleak.engine.channels import Channel
from lightning_fedleak.engine.channels.base import worst_of
from lightning_fedleak.engine.outcomes import Outcome, Series
from lightning_fedleak.engine.run import Look
from lightning_fedleak.evaluation.metrics import Counts, Rate, proportion
from lightning_fedleak.model.anatomy import HEAD_WEIGHT, Anatomy
from lightning_fedleak.model.snapshots import ON_THE_WAY, Observation
from lightning_fedleak.report.records import Family


@dataclass(frozen=True)
class CountGuess(Guess):
    """How many texts an attack says were in the batch."""

    texts: int


class TextCount(Attack):
    """Takes every so many rows of the head's gradient with a negative sum for one text."""

    threat_model = ThreatModel.create("a test", Capability.SEES_HEAD_GRADIENT)
    default_name = "text_count"

    def __init__(self, types_a_text: float, name: str | None = None) -> None:
        super().__init__(name)
        self.types_a_text = types_a_text

    def needs(self, anatomy: Anatomy) -> Surfaces:
        return Surfaces(gradients=(HEAD_WEIGHT,))

    def run(self, view: Observation, query: Query | None = None) -> CountGuess:
        norms = view.gradient(HEAD_WEIGHT).norm(dim=1)
        return CountGuess(round(int((norms > norms.mean()).sum()) / self.types_a_text))


class CountsChannel(Channel):
    """Right and wrong counts; of all looks together."""

    reads = TextCount
    leak = Family(
        name="counts",
        headline="right",
        metrics=("right", "wrong"),
        question="how many texts are in a batch",
        title="counts of texts",
        sentences=("count the texts of a batch, right {right%} of the time",),
        terms={"Right": "The share of looks at which the count was right. 1 is always."},
    )
    metrics = ("right", "wrong")
    width = 2
    extras = ("off",)

    def __init__(self, attacks: Sequence[TextCount], settings: Any) -> None:
        super().__init__(attacks, settings)
        self.counts: dict[Series, Counts] = {}
        self.revealed: list[tuple[int, str]] = []

    def score(self, look: Look, series: Series, answer: Any) -> list[float]:
        assert isinstance(answer, CountGuess)
        look.notes[series] = lambda files, title: self.revealed.append((look.step, title))
        texts = sum(len(batch.input_ids) for batch in look.training_step.batches)
        return [float(answer.texts == texts), float(answer.texts - texts)]

    def pooled(self, series: Series, rows: Mapping[int, Sequence[float]]) -> Outcome:
        right = sum(int(row[0]) for row in rows.values())
        counts = self.counts.get(series, Counts()) + Counts(right, len(rows) - right)
        self.counts[series] = counts
        return Outcome(
            {"right": _share(counts.tp, counts), "wrong": _share(counts.fp, counts)},
            len(rows),
            worst=worst_of([{"right": r[0], "wrong": 1 - r[0]} for r in rows.values()]),
            extra={"off": max(abs(row[1]) for row in rows.values())},
            now={"right": right / len(rows), "wrong": 1 - right / len(rows)},
        )

    def state_dict(self) -> dict[str, object]:
        return {f"counts of {s.log_name}": [c.tp, c.fp] for s, c in self.counts.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.counts.clear()
        for attack in self.listed_attacks:
            for series in self.series(attack, ON_THE_WAY):
                if saved := state.get(f"counts of {series.log_name}"):
                    self.counts[series] = Counts(*saved)


def _share(hits: int, counts: Counts) -> Rate:
    return proportion(hits, counts.tp + counts.fp)
