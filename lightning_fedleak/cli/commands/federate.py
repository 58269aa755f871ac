"""``fedleak federate``: a federation that is watched, gated and defended, and what it leaked."""

from __future__ import annotations

import logging
import math
import os
import statistics
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from datetime import datetime
from pathlib import Path

import transformers
from lightning_utilities.core import rank_zero
from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table
from safetensors import SafetensorError
from safetensors.torch import save_file

from lightning_fedleak.cli.commands.options import LEAST_TEXTS, FederateOptions
from lightning_fedleak.cli.commands.printing import (
    USER_ERRORS,
    make_folder,
    model_name,
    text_name,
    three_digits,
)
from lightning_fedleak.cli.finetuning import SourceError, quiet_logs
from lightning_fedleak.cli.studies.federation import (
    Closed,
    FamilyLeakage,
    Federation,
    Round,
    Server,
    read_round,
    train_in_process,
)
from lightning_fedleak.engine import gates
from lightning_fedleak.report import ReportError, write

_MOST_COLUMNS = 8  # clients with a column each; a table of more shows lowest, median and highest
_DROWNED = (
    "its norm is {noise:.3g} times the largest norm that the mean of the clipped updates can have. "
    "More clients in a round, fewer trained numbers (--peft lora) or a larger epsilon reduce it."
)


@dataclass(frozen=True)
class FederateCommand(FederateOptions):
    """The command ``fedleak federate``; its settings are its options."""

    def run(self, console: Console | None = None) -> int:
        """Run the federation and print what it leaked.

        Args:
            console: where to print; stdout by default.

        Returns:
            0.

        Raises:
            SourceError: options that contradict each other, or model, text or folder that cannot
                be used.
            DefenseError: differential privacy that cannot be had like this.
            AnatomyError: the model's parts could not be found.
        """
        console = console or Console(highlight=False)
        self.check()
        federation = self.federation()
        train = self._engine()
        transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        # Both raise errors, of --targets say, before anything is written.
        federation.account(None)
        federation.make_model()
        _check_gates(federation)
        introduction = _introduction(federation)
        folder = self.out / datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
        make_folder(folder, self.out)
        console.print(f"{introduction}\n")
        rounds: list[Round] = []
        private = federation.is_private
        with _quiet(), RoundsTable(console, self.clients, private=private) as table:

            def closed(number: int, server: Server, absent: dict[int, str]) -> None:
                if number == 0:
                    table.add(Round(0, server.loss))
                    return
                rounds.append(read_round(folder, number, server, absent))
                table.add(rounds[-1])

            try:
                server = train(federation, folder, closed)
            except KeyboardInterrupt:
                console.print(
                    f"\nInterrupted after {len(rounds)} of {self.rounds} rounds, whose logs are in "
                    f"{os.path.relpath(folder)}. No run goes on from them: begin a new one.",
                    soft_wrap=True,
                )
                raise
            except ValueError as error:
                if isinstance(error, USER_ERRORS):
                    raise
                raise SourceError(str(error)) from error
        console.print(f"\n{explain_rounds(rounds, self.clients)}")
        try:
            save_file(server.state, folder / "model.safetensors")
        except (OSError, SafetensorError) as error:
            raise SourceError(
                f"what was trained cannot be written to {os.path.relpath(folder)} ({error}): name "
                "a folder with room by --out. The logs so far are there."
            ) from error
        trained = f"what was trained (model.safetensors): {os.path.relpath(folder)}"
        console.print(f"\nLogs, and {trained}", soft_wrap=True)
        if self.attack != "none":
            try:
                console.print(f"The report: {os.path.relpath(write([folder])[0])}", soft_wrap=True)
            except ReportError as error:
                console.print(f"No report: {error}", soft_wrap=True)
        return 0

    def federation(self) -> Federation:
        """Return what is trained: the options of the same names."""
        return Federation(**{one.name: getattr(self, one.name) for one in fields(Federation)})

    def _engine(self) -> Callable[[Federation, Path, Closed], Server]:
        if self.engine == "local":
            return train_in_process
        from lightning_fedleak.cli.studies.federation.simulation import simulate

        return simulate


def _check_gates(federation: Federation) -> None:
    """Raise an error for a gate that would never judge an update, before anybody trains."""
    if not (round_gates := federation.gates()):
        return
    observer = federation.observer(Path())
    fewest = min(map(len, federation.rows))
    texts = min(federation.local_steps * federation.batch_size, fewest)
    for gate in round_gates:
        try:
            gate.watch_rounds(observer)
        except ValueError as error:
            raise SourceError(f"--watch {gate.metric}: {error}") from error
        if "membership" in gate.metric and texts < LEAST_TEXTS:
            raise SourceError(
                f"--watch {gate.metric}: a round has {texts} texts of a client, and no update is "
                f"judged with fewer than {LEAST_TEXTS}: give more --local-steps or a larger "
                "--batch-size (and clients with so many texts), or watch words alone (--watch "
                "leakage/worst/words)"
            )


def _introduction(federation: Federation) -> str:
    """Return who trains what, and what looks at it."""
    sizes = [len(rows) for rows in federation.rows]
    model = model_name(federation.model)
    trained = model if federation.peft is None else f"low-rank adapters on {model}"
    lines = [
        f"{federation.clients} clients with {min(sizes)} to {max(sizes)} rows each of "
        f"{text_name(federation.text)} train {trained}: {federation.rounds} rounds of "
        f"{federation.local_steps} steps of {federation.optimizer} (lr "
        f"{federation.make_optimizer.keywords['lr']:g}), {federation.batch_size} texts of at most "
        f"{federation.length} tokens a step."
    ]
    if federation.attack != "none":
        lines.append(
            "Each update is attacked before it leaves, and so is their sum, which is all that a "
            "server sees behind a secure aggregation. The attacks are calibrated first."
        )
    if federation.gate is not None:
        lines.append(
            f"The gate watches {' and '.join(federation.watched)}, at most {federation.gate:g}; "
            "what is unknown does not pass. In brackets: what did not leave."
        )
        if federation.watch is None and federation.words_hidden:
            lines.append(
                f"It does not watch words, which are never known here: {federation.words_hidden}."
            )
    if (dp := federation.account(None)) is not None:
        lines.append(
            f"Differential privacy of a client: noise multiplier {dp.noise_multiplier:.3g}, clip "
            f"{dp.clip:g}. Guarantee: {dp.guarantee}"
        )
        noise = dp.relative_noise(federation.trained_numbers)
        if noise > 1:
            lines.append(
                f"Noise will drown the updates: {_DROWNED.format(noise=noise)} With as much noise, "
                f"{math.ceil(noise * dp.per_round)} clients a round would bring it to 1."
            )
    return "\n".join(lines)


def explain_rounds(rounds: Sequence[Round], clients: int) -> str:
    """Return sentences about what was read from an update and from the sum.

    Args:
        rounds: that were closed.
        clients: of the federation.
    """
    lines = _explain_leakage(rounds)
    withheld = sum(len(r.withheld) for r in rounds)
    if withheld:
        lines.append(f"{withheld} of {clients * len(rounds)} updates did not leave.")
    lines += [
        f"Client {client} counted for nothing in round {r.number}: {reason}."
        for r in rounds
        for client, reason in r.absent.items()
        if client not in r.withheld
    ]
    if rounds and rounds[-1].epsilon is not None:
        lines.append(f"Epsilon of all rounds: {rounds[-1].epsilon:.2f}.")
    if rounds and (noise := rounds[-1].noise or 0.0) > 1:
        lines.append(
            f"Noise drowned the updates: {_DROWNED.format(noise=noise)} Low numbers and a loss "
            "that rises may come from the noise."
        )
    lines.append(
        "'Unknown' is not 'safe', and a low number says that these attacks fail here, not that "
        "none succeeds."
        if lines
        else "Nothing was measured: no attack was played."
    )
    return "\n".join(lines)


def _explain_leakage(rounds: Sequence[Round]) -> list[str]:
    """Return a sentence for each family, and the chance level of those that have one."""
    leakages: dict[str, list[FamilyLeakage]] = {}
    for leakage in (one for round_ in rounds for one in round_.leakage):
        leakages.setdefault(leakage.family.name, []).append(leakage)
    lines = []
    for family_leakages in leakages.values():
        updates = [value for one in family_leakages for value in one.updates.values()]
        sums = [one.total for one in family_leakages if one.total is not None]
        lines.append(
            f"{family_leakages[0].title}: {_spread(updates, 'an update')}; "
            f"{_spread(sums, 'the sum')}."
        )
    for leakage in (one[0] for one in leakages.values() if one[0].family.chance):
        chance = f"{leakage.family.chance:g}".removeprefix("0")
        lines.append(f"Guessing gives an {leakage.headline} of {chance}; 1 is certainty.")
    return lines


def _spread(values: Sequence[float], source: str) -> str:
    finite = [v for v in values if not math.isnan(v)]
    if not finite:
        return f"unknown from {source}"
    unknown = len(values) - len(finite)
    tail = f" (unknown in {unknown} of {len(values)})" if unknown else ""
    median = statistics.median(finite)
    return f"from {source} {median:.2f} in the median, {max(finite):.2f} at most{tail}"


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence warnings whose content is in the table and in the files."""
    levels = {rank_zero.log.name: logging.WARNING, gates.log.name: logging.ERROR}
    with quiet_logs(levels), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="RoundObserver: .* gave no result")
        warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
        yield


class RoundsTable:
    """Shows each round as it closes: a live table on a terminal, lines elsewhere.

    Args:
        console: where to print.
        clients: of the federation.
        private: there is an epsilon to show.
    """

    def __init__(self, console: Console, clients: int, *, private: bool) -> None:
        self._console = console
        self._clients = clients
        self._private = private
        self._rows: list[list[str]] = []
        self._live: Live | None = None

    def __enter__(self) -> RoundsTable:
        """Open the table."""
        if self._console.is_terminal:
            self._live = Live(self._table(), console=self._console, refresh_per_second=4)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Close the table, so that what is printed next stands below it."""
        if self._live is not None:
            self._live.stop()

    def add(self, round_: Round) -> None:
        """Add a round, with a line for each family of attacks."""
        if self._live is None and not self._rows:
            self._line(self._headers())
        first = [str(round_.number), three_digits(round_.loss)]
        times = "-" if round_.noise is None else f"{round_.noise:.3g}x"
        spent = "-" if round_.epsilon is None else f"{round_.epsilon:.2f}"
        epsilon = [times, spent] if self._private else []
        families = [(one.title, self._values(one, round_)) for one in round_.leakage]
        for family, values in families or [("", ["-"] * len(self._columns()))]:
            row = [*first, family, *values, *epsilon]
            self._rows.append(row)
            if self._live is None:
                self._line(row)
            first, epsilon = ["", ""], [""] * len(epsilon)
        if self._live is not None:
            self._live.update(self._table(), refresh=True)

    def _columns(self) -> list[str]:
        if self._clients > _MOST_COLUMNS:
            return ["lowest", "median", "highest", "sum"]
        return [*(f"client {c}" for c in range(self._clients)), "sum"]

    def _values(self, leakage: FamilyLeakage, round_: Round) -> list[str]:
        total = "-" if leakage.total is None else three_digits(leakage.total)
        if self._clients <= _MOST_COLUMNS:
            cells = (_client_value(c, leakage.updates, round_) for c in range(self._clients))
            return [*cells, total]
        values = [v for v in leakage.updates.values() if not math.isnan(v)]
        if not values:
            return ["unknown"] * 3 + [total]
        return [*map(three_digits, (min(values), statistics.median(values), max(values))), total]

    def _headers(self) -> list[str]:
        return ["round", "loss", "leaks", *self._columns(), *["noise", "epsilon"] * self._private]

    def _line(self, cells: Sequence[str]) -> None:
        widths = [6, 8, 17, *[10] * (len(cells) - 3)]
        line = "".join(f"{c:>{w}}" for c, w in zip(cells, widths, strict=True))
        self._console.print(line.rstrip(), soft_wrap=True)

    def _table(self) -> Table:
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for name in self._headers():
            table.add_column(name, justify="right")
        for row in self._rows:
            table.add_row(*row)
        return table


def _client_value(client: int, by_client: Mapping[str | int, float], round_: Round) -> str:
    """Return a client's value; in brackets where its update did not leave."""
    if client in round_.withheld:
        return f"({three_digits(by_client.get(client, math.nan))})"
    return three_digits(by_client[client]) if client in by_client else "-"
