"""What only TensorBoard shows: cards that come first, and the limits of gates in them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from lightning_fedleak.engine.channels.base import Channel
from lightning_fedleak.engine.outcomes import Series
from lightning_fedleak.report.records.utility import is_validation

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

FRONT = "1_leakage"
"""Group of the cards that TensorBoard shows first: it sorts groups by name."""
CARDS: Mapping[str, str] = {
    "words": "words_f1",
    "membership": "membership_auc",
    "texts": "texts_accuracy",
    "memorization": "trained_auc",
}
"""Names of the cards in :data:`FRONT`, by family."""
GATE_RUN = "gate"
"""Folder below a run's, whose line in a card is the limit of a gate: a run of TensorBoard's own."""
_END = re.compile(r"^(leakage[^/]*)/(.+_(?:low|high))$")


class Logger(Protocol):
    """Takes numbers by name, as the loggers of a Trainer do."""

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Write each number under its name."""


class BoardLogger:
    """A logger that writes to a TensorBoard run of its own.

    Args:
        folder: of the run.

    Attributes:
        writer: torch's.
    """

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer: SummaryWriter = SummaryWriter(str(folder))

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Write each number as a scalar."""
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)


class Cards:
    """The cards that TensorBoard shows first: leakage by family, utility, epsilon, limits of gates.

    Args:
        series: the channel of each series that is shown, in the order of the logs.
        privacy: names of what defences account for.
        worst: names of the highest headlines.
        utility: names of the user's metrics; the first one of a validation has a card.
        limits: what gates allow, by the name of the value that they watch.
    """

    def __init__(
        self,
        series: Mapping[Series, Channel],
        privacy: Sequence[str],
        worst: Sequence[str],
        utility: Sequence[str],
        limits: Mapping[str, float],
    ) -> None:
        self._tags: dict[str, str] = {}
        self._limits: dict[str, float] = {}
        self._gates: dict[SummaryWriter, SummaryWriter] = {}
        families = {name.rpartition("/")[2]: name for name in worst}
        for family, card in CARDS.items():
            if family not in families:
                continue
            tag = self._tags[families[family]] = f"{FRONT}/{card}"
            headlines = {
                f"{one.log_name}/{channel.headline}"
                for one, channel in series.items()
                if channel.family == family
            }
            allowed = [limits[name] for name in {families[family], *headlines} & limits.keys()]
            if allowed:
                self._limits[tag] = min(allowed)
        metrics = sorted(utility, key=lambda name: not is_validation(name))[:1]
        self._tags |= {f"utility/{name}": f"{FRONT}/{name}" for name in metrics}
        if len(privacy) == 1:
            self._tags[privacy[0]] = f"{FRONT}/epsilon"

    def add(self, board: SummaryWriter, values: Mapping[str, float], step: int) -> None:
        """Write each value, its card if it has one, and the limit of the card's gate beside it."""
        for name, value in values.items():
            board.add_scalar(_tag(name), value, step)
            if (card := self._tags.get(name)) is None:
                continue
            board.add_scalar(card, value, step)
            if card in self._limits:
                if board not in self._gates:
                    self._gates[board] = type(board)(str(Path(board.log_dir) / GATE_RUN))
                self._gates[board].add_scalar(card, self._limits[card], step)
                self._gates[board].flush()


def _tag(name: str) -> str:
    """Return the tag of a value: ends of intervals stand in a group behind all leakage."""
    return _END.sub(r"\1_interval/\2", name)
