"""``fedleak federate``: a federation that is watched, gated and defended, and what it leaked."""

from __future__ import annotations

import logging
import math
import os
import statistics
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import transformers
from lightning_utilities.core import rank_zero
from rich.console import Console
from safetensors import SafetensorError
from safetensors.torch import save_file

from lightning_fedleak.anatomy import AnatomyError
from lightning_fedleak.commands.federate import local
from lightning_fedleak.commands.federate.server import Server
from lightning_fedleak.commands.federate.setting import Setting
from lightning_fedleak.commands.federate.table import HEADLINES, Round, RoundsTable, read_back
from lightning_fedleak.defenses import DefenseError
from lightning_fedleak.federation import SUM, UpdateError
from lightning_fedleak.finetuning.assets import SourceError
from lightning_fedleak.looks import gates
from lightning_fedleak.looks.channels.membership import LEAST_MEMBERS
from lightning_fedleak.report import ReportError, write
from lightning_fedleak.threats import ThreatModelError

UserError = (SourceError, AnatomyError, ThreatModelError, DefenseError, UpdateError)

Run = Callable[[Setting, Path, local.Closed], Server]


@dataclass(frozen=True)
class FederateCommand(Setting):
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
        console = console or Console()
        self.check()
        engine = self._engine()
        transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        self.account(None)  # raises an error before anything is written
        self._check_gate()
        sizes = [len(rows) for rows in self.rows]
        folder = self.out / datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
        try:
            folder.mkdir(parents=True)
        except OSError as error:
            raise SourceError(
                f"'{self.out}' cannot be written to ({error.strerror}): name another folder with "
                "--out."
            ) from error
        self._introduce(console, sizes)
        rounds: list[Round] = []
        private = self.epsilon is not None or self.noise_multiplier is not None
        with _quiet(), RoundsTable(console, self.clients, private=private) as table:

            def closed(number: int, server: Server, silent: dict[int, str]) -> None:
                if number == 0:
                    table.add(Round(0, server.loss, {}, frozenset(), {}, None))
                    return
                epsilon = self._epsilon(folder, server) if private else None
                rounds.append(read_back(folder, number, server.loss, silent, epsilon, server.noise))
                table.add(rounds[-1])

            try:
                server = engine(self, folder, closed)
            except ValueError as error:
                if isinstance(error, UserError):
                    raise
                raise SourceError(str(error)) from error
        console.print(f"\n{summary(rounds, self.clients)}", highlight=False)
        try:
            save_file(server.state, folder / "model.safetensors")
        except (OSError, SafetensorError) as error:
            raise SourceError(
                f"what was trained cannot be written to {os.path.relpath(folder)} ({error}): name "
                "a folder with room by --out. The logs so far are there."
            ) from error
        console.print(
            f"\nLogs, and what was trained (model.safetensors): {os.path.relpath(folder)}",
            highlight=False,
            soft_wrap=True,
        )
        if self.attack != "none":
            try:
                page = os.path.relpath(write([folder])[0])
                console.print(f"The report: {page}", highlight=False, soft_wrap=True)
            except ReportError as error:
                console.print(f"No report: {error}", highlight=False, soft_wrap=True)
        return 0

    def _engine(self) -> Run:
        if self.engine == "local":
            return local.run
        import lightning_fedleak.commands.federate.on_flower as on_flower

        engine: Run = on_flower.run
        return engine

    def _epsilon(self, folder: Path, server: Server) -> float:
        """Return epsilon so far; where clients add the noise, of the one that has released most."""
        if server.dp is not None:
            return server.dp.privacy.epsilon
        ledgers = {p.read_bytes(): p for p in folder.glob("client_*.ledger")}
        accounts = [self.account(path) for path in ledgers.values()]
        return max((a.privacy.epsilon for a in accounts if a is not None), default=0.0)

    def _check_gate(self) -> None:
        if not (gates := self.gates()):
            return
        observer = self.observer(self.out)
        texts = min(self.local_steps * self.batch_size, *(len(rows) for rows in self.rows))
        for gate in gates:
            try:
                gate.check(observer)
            except ValueError as error:
                raise SourceError(f"--watch {gate.metric}: {error}") from error
            if "membership" in gate.metric and texts < LEAST_MEMBERS:
                raise SourceError(
                    f"--watch {gate.metric}: a round has {texts} texts of a client, and no update "
                    f"is judged with fewer than {LEAST_MEMBERS}: give more --local-steps or a "
                    "larger --batch-size (and clients with so many texts), or watch words alone "
                    "(--watch leakage/worst/words)"
                )

    def _introduce(self, console: Console, sizes: Sequence[int]) -> None:
        model = "the embedded model" if self.model is None else self.model
        text = "the embedded messages of a bank's customers" if self.text is None else self.text
        trained = model if self.peft is None else f"low-rank adapters on {model}"
        lr = self.make_optimizer.keywords["lr"]
        lines = [
            f"{self.clients} clients with {min(sizes)} to {max(sizes)} rows each of {text} train "
            f"{trained}: {self.rounds} rounds of {self.local_steps} steps of {self.optimizer} (lr "
            f"{lr:g}), {self.batch_size} texts of at most {self.length} tokens a step."
        ]
        if self.attack != "none":
            lines.append(
                "Each update is attacked before it leaves, and so is their sum, which is all that "
                "a server sees behind a secure aggregation. The attacks are calibrated first."
            )
        if self.gate is not None:
            lines.append(
                f"The gate watches {' and '.join(self.watched)}, at most {self.gate:g}; what is "
                "unknown does not pass. In brackets: what did not leave."
            )
            if self.watch is None and self.words_hidden:
                lines.append(
                    f"It does not watch words, which are never known here: {self.words_hidden}."
                )
        dp = self.account(None)
        if dp is not None:
            lines.append(
                f"Differential privacy of a client: noise multiplier {dp.noise_multiplier:.3g}, "
                f"clip {dp.clip:g}. Guarantee: {dp.guarantee}"
            )
        console.print("\n".join(lines), highlight=False)
        console.print()


def summary(rounds: Sequence[Round], clients: int) -> str:
    """Return sentences about what was read from an update and from the sum.

    Args:
        rounds: that were closed.
        clients: of the federation.
    """
    lines = _leakage_lines(rounds)
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
            f"Noise drowned the updates: its norm is {noise:.3g} times the largest norm that the "
            "mean of the clipped updates can have. Low numbers and a loss that rises may come from "
            "the noise. More clients in a round, fewer trained numbers (--peft lora) or a larger "
            "epsilon reduce it."
        )
    if any("auc" in r.leakage for r in rounds):
        lines.append("Guessing gives an AUC of .5; 1 is certainty.")
    lines.append(
        "'Unknown' is not 'safe', and a low number says that these attacks fail here, not that "
        "none succeeds."
        if lines
        else "Nothing was measured: no attack was played."
    )
    return "\n".join(lines)


def _leakage_lines(rounds: Sequence[Round]) -> list[str]:
    lines = []
    for metric, name in HEADLINES.items():
        values = [r.leakage[metric] for r in rounds if metric in r.leakage]
        updates = [v for by_client in values for c, v in by_client.items() if c != SUM]
        sums = [by_client[SUM] for by_client in values if SUM in by_client]
        if updates or sums:
            lines.append(f"{name}: {_spread(updates, 'an update')}; {_spread(sums, 'the sum')}.")
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
    quiet = {rank_zero.log: logging.WARNING, gates.log: logging.ERROR}
    levels = {log: log.level for log in quiet}
    for log, level in quiet.items():
        log.setLevel(level)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="RoundObserver: .* gave no result")
        warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
        try:
            yield
        finally:
            for log, level in levels.items():
                log.setLevel(level)
