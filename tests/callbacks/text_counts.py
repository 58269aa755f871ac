"""A family of leak of its own, in one file: how many texts were in the batch?"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lightning_fedleak.attacks.base import Attack, Capability, Guess, Query, Surfaces, ThreatModel
from lightning_fedleak.engine.channels import StepChannel
from lightning_fedleak.engine.channels.plans import Plan
from lightning_fedleak.engine.outcomes import Outcome, Series
from lightning_fedleak.engine.run import Look
from lightning_fedleak.evaluation.metrics import Rate, proportion
from lightning_fedleak.evaluation.metrics.rates import values_of
from lightning_fedleak.model.anatomy import HEAD_WEIGHT, Anatomy
from lightning_fedleak.model.snapshots import ON_THE_WAY, Observation
from lightning_fedleak.model.taps import Step
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


class CountsChannel(StepChannel):
    """Right and wrong counts; of all looks together."""

    reads = TextCount
    leak = Family(
        name="counts", headline="right", metrics=("right", "wrong"),
        question="How many texts are in a batch?", title="counts of texts",
        sentences=("count the texts of a batch {surely}",),
        terms={"Right": "The share of looks at which the count was right. 1 is always."},
    )  # fmt: skip
    metrics = ("right", "wrong")
    columns = ("right", "off")
    width = len(columns)
    extras = ("off",)

    def __init__(self, attacks: Sequence[TextCount], settings: Any) -> None:
        super().__init__(attacks, settings)
        self.looks: dict[str, Tensor] = {}
        self.revealed: list[tuple[int, str]] = []

    def accept(self, look: Look, plan: Plan, series: Series, answer: Any, truth: Step) -> None:
        look.notes[series] = lambda files, title: self.revealed.append((look.step, title))

    def trials(self, plan: Plan, answer: Any, truth: Step, kind: str | None = None) -> Tensor:
        assert isinstance(answer, CountGuess)
        texts = sum(len(batch.input_ids) for batch in truth.batches)
        return torch.tensor([[answer.texts == texts, answer.texts - texts]], dtype=torch.float64)

    def rates(self, trials: Tensor) -> dict[str, Rate]:
        n, right = len(trials), int(trials[:, 0].sum())
        return {"right": proportion(right, n), "wrong": proportion(n - right, n)}

    def means(self, tables: Sequence[Tensor]) -> dict[str, float]:
        return {"off": float(torch.cat([*tables])[:, 1].abs().max())}

    def pooled(self, series: Series, rows: Mapping[int, Any]) -> Outcome:
        look, before = super().pooled(series, rows), self.looks.get(series.log_name)
        tables = [*(() if before is None else (before,)), *self._tables(rows)]
        self.looks[series.log_name] = torch.cat(tables)
        rates = self.rates(self.looks[series.log_name])
        return replace(look, rates=rates, now=values_of(look.rates))

    def state_dict(self) -> dict[str, object]:
        return {f"counts of {name}": trials for name, trials in self.looks.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.looks.clear()
        for attack in self.listed_attacks:
            for series in self.series(attack, ON_THE_WAY):
                if (saved := state.get(f"counts of {series.log_name}")) is not None:
                    self.looks[series.log_name] = saved
