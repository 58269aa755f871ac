"""``fedleak sweep``: trains under a grid of defences, and attacks each run.

The table shows what each defence costs and what attacks still recover. An interrupted sweep
continues with the runs that are not finished.
"""

from __future__ import annotations

import time
from argparse import Namespace

from rich.console import Console

from lightning_fedleak.cli import printing
from lightning_fedleak.cli.finetuning import CausalLMFineTuning, TextDataModule
from lightning_fedleak.cli.studies import sweep
from lightning_fedleak.cli.studies.defense_specs import parse_defenses
from lightning_fedleak.model.anatomy import find_anatomy
from lightning_fedleak.report import findings, read, write


def run(options: Namespace, console: Console | None = None) -> int:
    """Train the runs that are not done yet, then print and report all finished runs.

    Args:
        options: The options of the command.
        console: The console to print on; stdout by default.

    Returns:
        0; 1 if a run failed; 130 after an interrupt.

    Raises:
        SourceError: Model, text, folder or defence cannot be used.
        AnatomyError: The model's parts could not be found.
    """
    console = console or Console(highlight=False)
    specs = [spec for text in options.defense for spec in parse_defenses(text)]
    # Errors that would make every run fail are raised here, before the first run.
    printing.make_folder(options.out, options.out)
    with sweep.quiet():
        sweep.read_layer(
            options, find_anatomy(CausalLMFineTuning(options.model, peft=options.peft))
        )
    sweep.data_of(options, TextDataModule).setup()
    runs = {options.out / "runs" / sweep.run_name(options, spec): spec for spec in specs}
    todo = {folder: spec for folder, spec in runs.items() if not sweep.is_done(folder)}
    console.print(
        f"{len(runs)} cells, {len(runs) - len(todo)} of them done before; results in "
        f"{options.out}. An interrupt loses nothing: the same command continues.",
        soft_wrap=True,
    )
    status = 0
    try:
        if todo:
            console.print(f"Validation loss before any training: {sweep.loss_before(options):.3f}")
        for i, (folder, spec) in enumerate(todo.items(), 1):
            start = time.perf_counter()
            try:
                with console.status(f"{i} of {len(todo)}: {spec}"):
                    warnings = sweep.train_and_attack(options, spec, folder)
            except Exception as error:  # the runs that remain must not be lost with a failed run
                status = 1
                line = f"{spec} failed: {type(error).__name__}: {error}"
                console.print(line, soft_wrap=True)
                continue
            lines = [f"{spec}: done in {time.perf_counter() - start:.0f} s"]
            lines += [f"{spec} warns: {warning}" for warning in warnings]
            console.print("\n".join(lines), soft_wrap=True)
    except KeyboardInterrupt:
        status = printing.INTERRUPTED
        console.print("\nInterrupted. This is what was measured until then.", style="bold")
    if done := [folder for folder in runs if sweep.is_done(folder)]:
        printing.print_comparison(console, findings(read(done)))
        paths = ", ".join(map(str, write(done, options.out)))
        console.print(f"\nWritten: {paths}", soft_wrap=True)
    return status
