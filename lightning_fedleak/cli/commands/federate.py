"""``fedleak federate``: trains a federation, attacks every update, and prints what it leaked.

A *gate* may withhold updates for which a rate of the attacks exceeds a limit, and client-level
differential privacy may clip them and add noise. The table has a line for each round and family of
attacks (words, membership).
"""

from __future__ import annotations

import logging
import math
import os
import statistics
import warnings
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from datetime import datetime
from pathlib import Path

from lightning_utilities.core import rank_zero
from rich.console import Console
from safetensors.torch import save_file

from lightning_fedleak.cli import printing
from lightning_fedleak.cli.finetuning import SourceError, quiet_logs, refuse_errors
from lightning_fedleak.cli.studies.federation import Federation, Round, Values, train_in_process
from lightning_fedleak.engine import gates
from lightning_fedleak.engine.channels.played import MIN_MEMBERS
from lightning_fedleak.federation import SUM, trained_state
from lightning_fedleak.report import ReportError, write

_MAX_COLUMNS = 8  # clients with a column each; with more, the table has lowest, median and highest


def run(options: Namespace, console: Console | None = None) -> int:
    """Run the federation and print what it leaked.

    Args:
        options: The options of the command.
        console: The console to print to; stdout by default.

    Returns:
        0.

    Raises:
        SourceError: Options contradict each other, or model, text or folder cannot be used.
        DefenseError: No noise gives this differential privacy.
        AnatomyError: The model's parts could not be found.
    """
    console = console or Console(highlight=False)
    _check_options(options)
    federation = Federation(**{f.name: getattr(options, f.name) for f in fields(Federation)})
    # These three calls refuse wrong options before anything is written.
    federation.account(None)
    federation.make_model()
    _check_gates(federation)
    introduction = _introduction(federation)
    folder = options.out / datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    printing.make_folder(folder, options.out)
    console.print(f"{introduction}\n")
    rounds: list[Round] = []
    table = _RoundsTable(console, options.clients, private=federation.epsilon is not None)
    with _quiet():
        table.print_headers()

        def show_round(round_: Round) -> None:
            rounds.extend([round_] if round_.number else [])
            table.add_round(round_)

        try:
            server = train_in_process(federation, folder, show_round)
        except KeyboardInterrupt:
            console.print(
                f"\nInterrupted after {len(rounds)} of {options.rounds} rounds, whose logs are in "
                f"{os.path.relpath(folder)}. It cannot be continued: begin a new run.",
                soft_wrap=True,
            )
            raise
    console.print(f"\n{explain_rounds(rounds, options.clients)}")
    save_file(server.state, folder / "model.safetensors")
    trained = f"what was trained (model.safetensors): {os.path.relpath(folder)}"
    console.print(f"\nLogs, and {trained}", soft_wrap=True)
    try:
        console.print(printing.explain_run(folder), markup=False)
        console.print(f"The report: {os.path.relpath(write([folder])[0])}", soft_wrap=True)
    except ReportError as error:
        console.print(f"No report: {error}", soft_wrap=True)
    return 0


def _check_options(options: Namespace) -> None:
    """Raise ``SourceError`` for an option that has no effect without another one."""
    rules = (
        (options.gate, ("watch",), "--gate, such as 0.5"),
        (options.epsilon, ("clip", "delta", "trust"), "--epsilon"),
    )
    useless = [
        (f"--{name.replace('_', '-')}", needed)
        for setting, names, needed in rules
        for name in names
        if setting is None and getattr(options, name) != getattr(Federation, name)
    ]
    if useless:
        option, needed = useless[0]
        raise SourceError(f"{option} has no effect by itself: give {needed} too.")


def _check_gates(federation: Federation) -> None:
    """Raise ``SourceError`` for a gate whose metric would be unknown for every update."""
    if not (round_gates := federation.gates()):
        return
    observer = federation.observer(Path())
    min_rows = min(map(len, federation.rows))
    texts = min(federation.local_steps * federation.batch_size, min_rows)
    for gate in round_gates:
        with refuse_errors(f"--watch {gate.metric}", ValueError):
            gate.watch_rounds(observer)
        if "membership" in gate.metric and texts < MIN_MEMBERS:
            raise SourceError(
                f"--watch {gate.metric}: a client trains on {texts} texts in a round, and a gate "
                f"needs {MIN_MEMBERS}: give more --local-steps or a larger --batch-size (and "
                "texts), or --watch leakage/worst/words"
            )


def _introduction(federation: Federation) -> str:
    """Return sentences about the training, the attacks, the gate and the defence."""
    sizes = [len(rows) for rows in federation.rows]
    model = printing.model_name(federation.model)
    trained = f"a LoRA of rank {federation.lora_r} on {model}" if federation.lora_r else model
    lines = [
        f"{federation.clients} clients with {min(sizes)} to {max(sizes)} rows each of "
        f"{printing.text_name(federation.text)} train {trained}: {federation.rounds} rounds of "
        f"{federation.local_steps} steps of {federation.optimizer} (lr "
        f"{federation.make_optimizer.keywords['lr']:g}), {federation.batch_size} texts of at most "
        f"{federation.length} tokens a step.",
        "Each update is attacked before it leaves, and so is their sum, which is all that a "
        "server sees with secure aggregation. The attacks are calibrated first.",
    ]
    if federation.gate is not None:
        is_wide = federation.clients > _MAX_COLUMNS
        withheld = "Shown are also values of" if is_wide else "In brackets: values of"
        lines.append(
            f"The gate watches {' and '.join(federation.watched)}, at most {federation.gate:g}; "
            f"an unknown value does not pass. {withheld} updates that were withheld."
        )
        if federation.watch is None and federation.words_hidden:
            lines.append(
                "It does not watch words, whose leakage is always unknown here: "
                f"{federation.words_hidden}."
            )
    if (dp := federation.account(None)) is not None:
        lines.append(
            f"Differential privacy of a client: noise multiplier {dp.noise_multiplier:.3g}, clip "
            f"{dp.clip:g}. Guarantee: {dp.guarantee}"
        )
        trained_tensors = trained_state(federation.make_model()).values()
        noise = dp.relative_noise(sum(tensor.numel() for tensor in trained_tensors))
        if noise > 1:
            lines.append(
                f"Noise will drown the updates: its norm is {noise:.3g} times the largest norm "
                "that the mean of the clipped updates can have, so that low numbers and a loss "
                "that rises may come from it. More clients in a round, fewer trained numbers "
                "(--lora-r 8) or a larger epsilon reduce it: "
                f"{math.ceil(noise * dp.per_round)} clients a round would bring it to 1."
            )
    return "\n".join(lines)


def explain_rounds(rounds: Sequence[Round], clients: int) -> str:
    """Return sentences about the updates that were not averaged, and about privacy.

    Args:
        rounds: The finished rounds.
        clients: The number of clients.
    """
    lines = []
    withheld = sum(len(r.withheld) for r in rounds)
    if withheld:
        lines.append(f"{withheld} of {clients * len(rounds)} updates were withheld.")
    lines += [
        f"Client {client} did not count in round {r.number}: {reason}."
        for r in rounds
        for client, reason in r.absent.items()
        if client not in r.withheld
    ]
    if rounds and rounds[-1].epsilon is not None:
        lines.append(f"Epsilon of all rounds: {rounds[-1].epsilon:.2f}.")
    lines.append(
        "'Unknown' is not 'safe', and a low number says that these attacks fail here, not that "
        "none succeeds."
    )
    return "\n".join(lines)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence warnings that the table and the files repeat."""
    levels = {rank_zero.log.name: logging.WARNING, gates.log.name: logging.ERROR}
    with quiet_logs(levels), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="RoundObserver: .* gave no result")
        warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
        yield


class _RoundsTable(printing.LinesTable):
    """The table of rounds, of which each is printed when it ends.

    Args:
        console: The console to print to.
        clients: The number of clients.
        private: Whether to show an epsilon.
    """

    def __init__(self, console: Console, clients: int, *, private: bool) -> None:
        self._clients, self._private = clients, private
        columns = ["lowest", "median", "highest"]
        if clients <= _MAX_COLUMNS:
            columns = [f"client {client}" for client in range(clients)]
        columns += ["sum", *["noise", "epsilon"] * private]
        # In characters: round, loss, leaks, and all other columns.
        widths = [6, 8, 17, *[10] * len(columns)]
        super().__init__(console, ["round", "loss", "leaks", *columns], widths)

    def add_round(self, round_: Round) -> None:
        """Add a round, with a line for each family of attacks."""
        first = [str(round_.number), printing.share(round_.loss)]
        last: list[str] = []
        if self._private:
            last = ["-" if round_.noise is None else f"{round_.noise:.3g}x"]
            last += ["-" if round_.epsilon is None else f"{round_.epsilon:.2f}"]
        for title, values in round_.leakage.items():
            self.add([*first, title, *self._cells(values, round_), *last])
            first, last = ["", ""], [""] * len(last)
        if not round_.leakage:  # before the first round
            columns = self._clients if self._clients <= _MAX_COLUMNS else 3
            self.add([*first, "", *["-"] * (columns + 1), *last])

    def _cells(self, values: Values, round_: Round) -> list[str]:
        """Return the cells of the clients, in brackets if an update was withheld, and of the sum.

        With many clients, these are the lowest, the median and the highest value instead.
        """
        total = printing.share(values[SUM]) if SUM in values else "-"
        if self._clients > _MAX_COLUMNS:
            rates = [v for c, v in values.items() if c != SUM and not math.isnan(v)] or [math.nan]
            shown = min(rates), statistics.median(rates), max(rates)
            return [*map(printing.share, shown), total]
        cells = [printing.share(values[c]) if c in values else "-" for c in range(self._clients)]
        return [*(f"({x})" if c in round_.withheld else x for c, x in enumerate(cells)), total]
