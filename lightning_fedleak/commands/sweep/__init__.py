"""A grid of defences, their strengths and attacks: what each costs and what it hides."""

from lightning_fedleak.commands.sweep.cell import Cell, CellResult, Leakage, Setting, run_cell
from lightning_fedleak.commands.sweep.grid import Grid
from lightning_fedleak.commands.sweep.specs import DefenseSpec, SpecError, parse_defenses

__all__ = [
    "Cell",
    "CellResult",
    "DefenseSpec",
    "Grid",
    "Leakage",
    "Setting",
    "SpecError",
    "parse_defenses",
    "run_cell",
]
