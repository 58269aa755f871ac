"""A grid of cells, each one defence at one strength, and their results, which are kept."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from scipy import stats

from lightning_fedleak.attacks import Attack
from lightning_fedleak.cli.studies.defense_specs import DefenseSpec
from lightning_fedleak.engine import family_of
from lightning_fedleak.report.records import ResultLine, read_results

SCHEMA = 1  # version of the files of results


@dataclass(frozen=True)
class Setting:
    """What all cells of a grid have in common.

    Attributes:
        model: causal language model, a folder or a name on the hub; None for the embedded one.
        text: private text as :func:`~lightning_fedleak.cli.finetuning.texts.read_texts` takes it;
            None for the embedded messages.
        column: the field that holds it; None as there.
        attacks: names out of ``SWEEP_ATTACKS``; all look at the same steps of the same run.
        layer: where ``fc``, ``attention``, ``prefix`` and ``descent`` read; None for the middle.
        steps: optimizer steps.
        batch_size: texts a batch.
        length: tokens a text, at most.
        every_n_steps: steps between two looks.
        lr: learning rate of AdamW.
        peft: as in :class:`~lightning_fedleak.cli.finetuning.CausalLMFineTuning`.
        budget_seconds: for one run of ``prefix`` or ``descent``.
        seed: of split, order, dropout, public text and calibration.
    """

    model: str | None = None
    text: str | None = None
    column: str | None = None
    attacks: tuple[str, ...] = ("flatchat", "aligned_flatchat", "fc")
    layer: int | None = None
    steps: int = 60
    batch_size: int = 8
    length: int = 64
    every_n_steps: int = 5
    lr: float = 1e-4
    peft: Literal["lora", "bitfit"] | None = None
    budget_seconds: float = 10.0
    seed: int = 0


@dataclass(frozen=True)
class GridCell:
    """A setting and a defence."""

    setting: Setting
    defense: DefenseSpec

    @property
    def key(self) -> str:
        """Return the name of the cell's files: a hash of all its settings."""
        text = json.dumps(self.to_dict(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def name(self) -> str:
        """Return the name of the folder of its run: the defence, and the beginning of the key."""
        return f"{re.sub(r'[^A-Za-z0-9_.=,+-]+', '-', str(self.defense))[:80]}-{self.key[:6]}"

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        defense = {"kind": self.defense.kind, "settings": dict(self.defense.settings)}
        return {"setting": asdict(self.setting), "defense": defense}


@dataclass(frozen=True)
class Leakage:
    """What one attack got in one run.

    Attributes:
        metric: the attack's headline: ``f1``, ``auc`` or ``token_accuracy``.
        value: mean over looks; of membership games over all games of the run. None where unknown.
        low, high: its 95% interval: Student's t over looks, or that of the pooled games.
        looks: of which there is a value.
        unknown: looks without one; they are in no mean.
        exposed: False where the surface was not shared at all.
        why: why the last unknown look is unknown; None where none is.
    """

    metric: str
    value: float | None
    low: float | None
    high: float | None
    looks: int
    unknown: int
    exposed: bool
    why: str | None = None


@dataclass(frozen=True)
class CellResult:
    """What one run showed.

    Attributes:
        val_loss: on the validation texts after the last step, the defence still in place.
        privacy: the fields of :class:`~lightning_fedleak.defenses.Privacy`, by a defence that
            accounts for them; None for an infinite epsilon.
        leakage: by attack.
        seconds: wall time of the run.
        warnings: what this package warned of, but for reasons that stand in ``leakage``.
        error: why there is no result; None where there is one.
    """

    val_loss: float | None = None
    privacy: Mapping[str, float | None] = field(default_factory=dict)
    leakage: Mapping[str, Leakage] = field(default_factory=dict)
    seconds: float = 0.0
    warnings: tuple[str, ...] = ()
    error: str | None = None

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> CellResult:
        """Return the result of plain values, as ``asdict`` returns them."""
        leakage = {name: Leakage(**entry) for name, entry in values["leakage"].items()}
        return cls(**{**values, "leakage": leakage, "warnings": tuple(values["warnings"])})


def leakage_of(path: Path, attacks: Sequence[Attack]) -> dict[str, Leakage]:
    """Return what a run's ``leakage.jsonl`` says of each attack, at the shared stage."""
    lines = [line for line in read_results(path) if line.stage == "shared"]
    return {
        attack.name: _leakage(
            family_of(attack).headline, [line for line in lines if line.attack == attack.name]
        )
        for attack in attacks
    }


def _leakage(metric: str, lines: Sequence[ResultLine]) -> Leakage:
    measured = [rate for line in lines if (rate := line.metric(metric)) is not None]
    reasons = [line.unknown for line in lines if line.unknown]
    nothing = Leakage(
        metric,
        value=None,
        low=None,
        high=None,
        looks=len(measured),
        unknown=len(lines) - len(measured),
        exposed=all(line.was_shared for line in lines),
        why=reasons[-1] if reasons else None,
    )
    if not measured:
        return nothing
    if any(line.is_pooled(metric) for line in lines):
        last = measured[-1]  # pooled over the looks of the run
        return replace(nothing, value=last.value, low=last.low, high=last.high)
    values = [rate.value for rate in measured if rate.value is not None]
    mean, low, high = _student(values)
    return replace(nothing, value=mean, low=low, high=high)


def _student(values: Sequence[float]) -> tuple[float, float | None, float | None]:
    n = len(values)
    mean = math.fsum(values) / n
    if n < 2:
        return mean, None, None
    spread = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (n - 1) / n)
    half = float(stats.t.ppf(0.975, n - 1)) * spread
    return mean, max(0.0, mean - half), min(1.0, mean + half)


class Grid:
    """Cells in a folder, one file each; a cell that is done is not run again.

    A file is named by what its cell's settings are, so that a grid with other settings in the same
    folder never takes a result that is not its own. A failed cell is written down with its error,
    tried again the next time, and loses nothing of the others.

    Args:
        cells: to run, in this order; alike ones once.
        folder: of the results; is made.
    """

    def __init__(self, cells: Iterable[GridCell], folder: Path) -> None:
        self.cells = list({cell.key: cell for cell in cells}.values())
        self.folder = folder

    def path(self, cell: GridCell) -> Path:
        """Return the path of a cell's result."""
        return self.folder / "cells" / f"{cell.key}.json"

    def logs(self, cell: GridCell) -> Path:
        """Return the folder of a cell's run."""
        return self.folder / "runs" / cell.name

    def result(self, cell: GridCell) -> CellResult | None:
        """Return the result of a cell, None before it was run."""
        path = self.path(cell)
        if not path.exists():
            return None
        return CellResult.from_dict(json.loads(path.read_text(encoding="utf-8"))["result"])

    def todo(self) -> list[GridCell]:
        """Return the cells that were not run, or failed."""
        return [c for c in self.cells if (r := self.result(c)) is None or r.error is not None]

    def run(
        self,
        run: Callable[[GridCell, Path], CellResult],
        on_start: Callable[[GridCell], None] = lambda cell: None,
        on_result: Callable[[GridCell, CellResult], None] = lambda cell, result: None,
    ) -> None:
        """Run the cells that are left.

        An interrupt ends it; what is done by then is kept.

        Args:
            run: of one cell, given a folder for its logs.
            on_start: called before each.
            on_result: called after each.
        """
        for cell in self.todo():
            on_start(cell)
            try:
                result = run(cell, self.logs(cell))
            except Exception as error:  # one failed cell must not lose the rest
                result = CellResult(error=f"{type(error).__name__}: {error}")
            self._keep(cell, result)
            on_result(cell, result)

    def results(self) -> list[tuple[GridCell, CellResult]]:
        """Return every cell that has a result, in the order of the grid."""
        pairs = ((cell, self.result(cell)) for cell in self.cells)
        return [(cell, result) for cell, result in pairs if result is not None]

    def write(self, path: Path) -> None:
        """Write all results to one file of JSON."""
        rows = [{**cell.to_dict(), "result": asdict(r)} for cell, r in self.results()]
        _replace_file(path, json.dumps({"schema": SCHEMA, "cells": rows}, indent=1) + "\n")

    def _keep(self, cell: GridCell, result: CellResult) -> None:
        content = {"schema": SCHEMA, **cell.to_dict(), "result": asdict(result)}
        _replace_file(self.path(cell), json.dumps(content, indent=1) + "\n")


def _replace_file(path: Path, text: str) -> None:
    """Write a file, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(path.name + ".part")
    draft.write_text(text, encoding="utf-8")
    os.replace(draft, path)
