"""A grid of defences, their strengths and attacks: what each costs and what it hides."""

from lightning_fedleak.studies.defense_specs import DefenseSpec, parse_defenses
from lightning_fedleak.studies.names import SpecError
from lightning_fedleak.studies.sweep.cell import CellResult, GridCell, Leakage, Setting, run_cell
from lightning_fedleak.studies.sweep.grid import Grid

__all__ = [
    "CellResult",
    "DefenseSpec",
    "Grid",
    "GridCell",
    "Leakage",
    "Setting",
    "SpecError",
    "parse_defenses",
    "run_cell",
]
