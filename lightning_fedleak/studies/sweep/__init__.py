"""A grid of defences, their strengths and attacks: what each costs and what it hides."""

from lightning_fedleak.studies.defense_specs import DefenseSpec, parse_defenses
from lightning_fedleak.studies.names import SpecError
from lightning_fedleak.studies.sweep.cell import (
    CellResult,
    Grid,
    GridCell,
    Leakage,
    Setting,
    data_of,
    loss_before,
    quiet,
    run_cell,
)

__all__ = [
    "CellResult",
    "DefenseSpec",
    "Grid",
    "GridCell",
    "Leakage",
    "Setting",
    "SpecError",
    "data_of",
    "loss_before",
    "parse_defenses",
    "quiet",
    "run_cell",
]
