"""``fedleak sweep``: a grid of defences, what each costs and what attacks still recover."""

from __future__ import annotations

import time
from argparse import Namespace
from dataclasses import fields

from rich.console import Console

from lightning_fedleak.cli import printing
from lightning_fedleak.cli.finetuning import CausalLMFineTuning
from lightning_fedleak.cli.studies import sweep
from lightning_fedleak.cli.studies.defense_specs import parse_defenses
from lightning_fedleak.model.anatomy import find_anatomy
from lightning_fedleak.report import findings, read, write


def run(options: Namespace, console: Console | None = None) -> int:
    """Train what is not done yet, and print and report all runs that are.

    Args:
        options: of the command.
        console: where to print; stdout by default.

    Returns:
        0; 1 where a cell failed; 130 after an interrupt.

    Raises:
        SourceError: model, text, folder or defence cannot be used.
        AnatomyError: the model's parts could not be found.
    """
    console = console or Console(highlight=False)
    values = {**vars(options), "attacks": tuple(dict.fromkeys(options.attack))}
    setting = sweep.Setting(**{f.name: values[f.name] for f in fields(sweep.Setting)})
    specs = [spec for text in options.defense for spec in parse_defenses(text)]
    # What would make every cell fail is raised here, before the first of them runs.
    printing.make_folder(options.out, options.out)
    with sweep.quiet():
        sweep.read_layer(
            setting, find_anatomy(CausalLMFineTuning(setting.model, peft=setting.peft))
        )
    sweep.data_of(setting).setup()
    cells = {
        options.out / "runs" / one.name: one for one in (sweep.Cell(setting, s) for s in specs)
    }
    todo = {folder: cell for folder, cell in cells.items() if not sweep.is_done(folder)}
    console.print(
        f"{len(cells)} cells, {len(cells) - len(todo)} of them done before; results in "
        f"{options.out}. An interrupt loses nothing: the same command continues.",
        soft_wrap=True,
    )
    status = 0
    try:
        if todo:
            console.print(f"Validation loss before any training: {sweep.loss_before(setting):.3f}")
        for number, (folder, cell) in enumerate(todo.items(), 1):
            start = time.perf_counter()
            try:
                with console.status(f"{number} of {len(todo)}: {cell.defense}"):
                    warnings = sweep.run_cell(cell, folder)
            except Exception as error:  # one failed cell must not lose the rest
                status = 1
                line = f"{cell.defense} failed: {type(error).__name__}: {error}"
                console.print(line, soft_wrap=True)
                continue
            lines = [f"{cell.defense}: done in {time.perf_counter() - start:.0f} s"]
            lines += [f"{cell.defense} warns: {warning}" for warning in warnings]
            console.print("\n".join(lines), soft_wrap=True)
    except KeyboardInterrupt:
        status = printing.INTERRUPTED
        console.print("\nInterrupted. This is what was measured until then.", style="bold")
    if done := [folder for folder in cells if sweep.is_done(folder)]:
        printing.print_comparison(console, findings(read(done)))
        paths = ", ".join(map(str, write(done, options.out)))
        console.print(f"\nWritten: {paths}", soft_wrap=True)
    return status
