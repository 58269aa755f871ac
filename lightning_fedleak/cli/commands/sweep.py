"""``fedleak sweep``: a grid of defences, what each costs and what each attack still reads."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import fields

from rich.console import Console
from rich.table import Table

from lightning_fedleak.cli.commands import printing
from lightning_fedleak.cli.finetuning import CausalLMFineTuning
from lightning_fedleak.cli.studies.defense_specs import parse_defenses
from lightning_fedleak.cli.studies.sweep.cell import (
    data_of,
    loss_before,
    quiet,
    read_layer,
    run_cell,
)
from lightning_fedleak.cli.studies.sweep.grid import CellResult, Grid, GridCell, Leakage, Setting
from lightning_fedleak.model.anatomy import find_anatomy
from lightning_fedleak.report import write


def run(options: Namespace, console: Console | None = None) -> int:
    """Run what is not done yet, and print and write everything that is.

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
    setting = Setting(**{f.name: values[f.name] for f in fields(Setting)})
    specs = [spec for text in options.defense for spec in parse_defenses(text)]
    # What would make every cell fail is raised here, before the first of them runs.
    printing.make_folder(options.out, options.out)
    with quiet():
        read_layer(setting, find_anatomy(CausalLMFineTuning(setting.model, peft=setting.peft)))
    data_of(setting).setup()
    grid = Grid([GridCell(setting, spec) for spec in specs], options.out)
    todo = grid.todo()
    console.print(
        f"{len(grid.cells)} cells, {len(grid.cells) - len(todo)} of them done before; results "
        f"in {options.out}. An interrupt loses nothing: the same command continues.",
        soft_wrap=True,
    )
    interrupted, before = False, None
    try:
        before = loss_before(setting)
        with console.status("") as status:
            grid.run(
                run_cell,
                lambda cell: status.update(
                    f"{todo.index(cell) + 1} of {len(todo)}: {cell.defense}"
                ),
                lambda cell, result: console.print(_line(cell, result), soft_wrap=True),
            )
    except KeyboardInterrupt:
        interrupted = True
        console.print("\nInterrupted. This is what was measured until then.", style="bold")
    results = grid.results()
    grid.write(options.out / "results.json")
    paths = [str(options.out / "results.json")]
    if results:
        printing.print_table(console, defense_table(results, before))
        console.print(explain_defenses(results))
    runs = [grid.logs(cell) for cell, result in results if result.error is None]
    if runs := [folder for folder in runs if folder.is_dir()]:
        paths += map(str, write(runs, options.out))
    console.print(f"\nWritten: {', '.join(paths)}", soft_wrap=True)
    if interrupted:
        return printing.INTERRUPTED
    return 1 if any(r.error is not None for _, r in results) else 0


def defense_table(results: Sequence[tuple[GridCell, CellResult]], before: float | None) -> Table:
    """Return a row for each defence: loss, epsilon, each attack's headline and interval."""
    title = "utility and leakage" + ("" if before is None else f" (loss before: {before:.3f})")
    rows = Table(title=title)
    rows.add_column("defence", overflow="fold")
    rows.add_column("val loss", justify="right")
    with_epsilon = any("epsilon" in r.privacy for _, r in results)
    if with_epsilon:
        rows.add_column("epsilon", justify="right")
    attacks = {name: r.leakage[name].metric for _, r in results for name in r.leakage}
    for name, metric in attacks.items():
        rows.add_column(f"{name}\n{metric}")
    for cell, result in results:
        row = [str(cell.defense), "failed" if result.val_loss is None else f"{result.val_loss:.3f}"]
        if with_epsilon:
            row.append(_epsilon(result))
        row += [_leakage(result.leakage.get(name)) for name in attacks]
        rows.add_row(*row)
    return rows


def explain_defenses(results: Sequence[tuple[GridCell, CellResult]]) -> str:
    """Return what the table's words mean, and what failed and why."""
    lines = [
        "",
        "In brackets: 95% intervals, Student's t over looks (of membership: over the games of the "
        "run). An AUC of .5 is guessing. A low number says that these attacks fail, not that none "
        "succeeds.",
    ]
    if len({cell.defense.kind for cell, r in results if "epsilon" in r.privacy}) > 1:
        lines.append(
            "Epsilons of different defences are for different neighbours and adversaries, which "
            "each defence's `guarantee` names. Do not compare them."
        )
    unknown = {
        f"{cell.defense}, {name}: unknown at {leakage.unknown} of "
        f"{leakage.looks + leakage.unknown} looks: {leakage.why}"
        for cell, result in results
        for name, leakage in result.leakage.items()
        if leakage.unknown
    }
    lines += sorted(unknown)
    lines += [f"{cell.defense} warns: {text}" for cell, r in results for text in r.warnings]
    lines += [f"{cell.defense} failed: {r.error}" for cell, r in results if r.error is not None]
    return "\n".join(lines)


def _line(cell: GridCell, result: CellResult) -> str:
    if result.error is not None:
        return f"{cell.defense}: failed, {result.error}"
    loss = "unknown" if result.val_loss is None else f"{result.val_loss:.3f}"
    return f"{cell.defense}: val loss {loss} in {result.seconds:.0f} s"


def _epsilon(result: CellResult) -> str:
    if "epsilon" not in result.privacy:
        return ""
    epsilon = result.privacy["epsilon"]
    return "inf" if epsilon is None else f"{epsilon:.3g}"


def _leakage(leakage: Leakage | None) -> str:
    if leakage is None:
        return ""
    if not leakage.exposed:
        return "not shared"
    if leakage.value is None:
        return "unknown"
    interval = "" if leakage.low is None else f" [{leakage.low:.3f}, {leakage.high:.3f}]"
    return f"{leakage.value:.3f}{interval}" + (" *" if leakage.unknown else "")
