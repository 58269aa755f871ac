"""A grid of defences, their strengths and attacks: what each costs and what it hides."""

from lightning_fedleak.cli.studies.defense_specs import DefenseSpec as DefenseSpec
from lightning_fedleak.cli.studies.defense_specs import parse_defenses as parse_defenses
from lightning_fedleak.cli.studies.sweep.cell import data_of as data_of
from lightning_fedleak.cli.studies.sweep.cell import loss_before as loss_before
from lightning_fedleak.cli.studies.sweep.cell import quiet as quiet
from lightning_fedleak.cli.studies.sweep.cell import read_layer as read_layer
from lightning_fedleak.cli.studies.sweep.cell import run_cell as run_cell
from lightning_fedleak.cli.studies.sweep.grid import CellResult as CellResult
from lightning_fedleak.cli.studies.sweep.grid import Grid as Grid
from lightning_fedleak.cli.studies.sweep.grid import GridCell as GridCell
from lightning_fedleak.cli.studies.sweep.grid import Leakage as Leakage
from lightning_fedleak.cli.studies.sweep.grid import Setting as Setting
