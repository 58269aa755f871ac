"""Write the settings of a run, its highest leakage, and the report to loggers.

Loggers are recognised by the names of their classes, so that none has to be installed. For
TensorBoard this file also lays out the first *cards* (charts of one tag), a page of charts, and the
newest *look* (measurement) as text. A *series* is the results of one attack at one stage of the
gradient's way. The main metric of a *family* of attacks, such as words, is its *headline*; the
highest one is the *worst*. A *gate* is the user's threshold on a logged value.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_fedleak.engine.channels.base import Channel, gives_control
from lightning_fedleak.engine.outcomes import Outcome, Series
from lightning_fedleak.report.records.lines import is_lower_better, is_validation

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

FRONT = "1_leakage"
"""The group of cards that TensorBoard shows first, since it sorts groups by name."""
CARDS: Mapping[str, str] = {
    "words": "words_f1",
    "membership": "membership_auc",
    "texts": "texts_accuracy",
    "memorization": "trained_auc",
}
"""The names of the cards in :data:`FRONT`, by family."""
GATE_RUN = "limit"
"""Subfolder that TensorBoard shows as a separate run; its line in a card is a gate's threshold."""
# The tag of a value; ends of intervals have a separate group, sorted after the values.
_tag = partial(re.compile(r"^(leakage[^/]*)/(.+_(?:low|high))$").sub, r"\1_interval/\2")
KEY = "fedleak"
"""The key of this package's settings among the hyperparameters of a logger."""


class BoardLogger:
    """A logger that writes to a TensorBoard run of its own, to a file of mode 0600.

    It starts no thread, because a federation has a run for each client.

    Args:
        folder: The folder of the run.

    Attributes:
        writer: The ``SummaryWriter`` of torch.
    """

    def __init__(self, folder: Path) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter
        from torch.utils.tensorboard import SummaryWriter

        writer: Any = SummaryWriter(str(folder))
        self.writer: SummaryWriter = writer
        events = writer.file_writer.event_writer
        events._async_writer.close()
        os.chmod(events._file_name, 0o600)
        events._async_writer = RecordWriter(open(events._file_name, "ab", buffering=0))  # noqa: SIM115

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Write each number as a scalar."""
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)


class Cards:
    """Write the cards that TensorBoard shows first: leakage by family, utility, epsilon, limits.

    Args:
        series: The channel of each shown series, in the order of the logs.
        privacy: The log names of the epsilons.
        worst: The log names of the highest headlines.
        utility: The user's metrics that may have a card; empty for all losses. The first one of a
            validation has a card, and the first other one.
        limits: The thresholds of gates, by the log name of the watched value.
    """

    def __init__(
        self,
        series: Mapping[Series, Channel],
        privacy: Sequence[str],
        worst: Sequence[str],
        utility: Sequence[str],
        limits: Mapping[str, float],
    ) -> None:
        self._series, self._privacy = series, privacy
        self._tags: dict[str, str] = {}  # the tag of a card by the log name of its value
        self._limits: dict[str, float] = {}  # the lowest threshold of a gate by tag
        self._gates: dict[SummaryWriter, SummaryWriter] = {}  # the writer of limits of each board
        for name in worst:
            if (card := CARDS.get(family := name.rpartition("/")[2])) is None:
                continue
            tag = self._tags[name] = f"{FRONT}/{card}"
            family_series = (s for s, channel in series.items() if channel.family == family)
            names = {name, *(f"{s.log_name}/{series[s].headline}" for s in family_series)}
            if allowed := [limits[headline] for headline in names & limits.keys()]:
                self._limits[tag] = min(allowed)
        # The user's metric that has a card: of a validation (True), and another one (False).
        self._utility, self._metrics = utility, dict[bool, str]()
        if len(privacy) == 1:  # several epsilons do not fit on one card
            self._tags[privacy[0]] = f"{FRONT}/epsilon"

    def add(self, board: SummaryWriter, values: Mapping[str, float], step: int) -> None:
        """Write each value, also to its card if it has one, with the limit of the card's gate."""
        for name, value in values.items():
            board.add_scalar(_tag(name), value, step)
            card, is_of_user = self._tags.get(name), name.startswith("utility/")
            if card is None and (not is_of_user or (card := self._card_of_metric(name)) is None):
                continue
            board.add_scalar(card, value, step)
            folder = getattr(board, "log_dir", None)  # tensorboardX has another name for it
            if card in self._limits and folder is not None:
                if board not in self._gates:
                    self._gates[board] = BoardLogger(Path(folder) / GATE_RUN).writer
                self._gates[board].add_scalar(card, self._limits[card], step)
                self._gates[board].flush()

    def _card_of_metric(self, name: str) -> str | None:
        """Return the card of a user's metric; None if it has none."""
        metric = name.removeprefix("utility/")
        if not (metric in self._utility if self._utility else is_lower_better(metric)):
            return None
        first = self._metrics.setdefault(is_validation(metric), metric)
        return f"{FRONT}/{metric}" if metric == first else None

    def close(self) -> None:
        """Close the runs of limits; the writers that were passed are the user's."""
        for writer in self._gates.values():
            writer.close()
        self._gates.clear()

    def add_page(self, boards: Sequence[SummaryWriter]) -> None:
        """Lay out Custom Scalars: the cards, each attack with its interval, controls and gates.

        A chart names its lines by regular expressions, for which TensorBoard does not complain
        about tags that a run lacks.

        Args:
            boards: The writers of TensorBoard.
        """
        families = "|".join(CARDS.values())
        lines = {"leakage: the worst attack of each kind": [f"{FRONT}/({families})"]}
        lines["utility: a validation and a training loss"] = [f"{FRONT}/(?!{families}|epsilon).+"]
        lines |= {name: [re.escape(name)] for name in self._privacy}
        for series, channel in self._series.items():
            tag = f"{series.log_name}/{channel.headline_of(series)}"
            ends = [re.escape(_tag(f"{tag}_{end}")) for end in ("low", "high")]
            lines[f"{tag} and its 95% interval"] = [re.escape(tag), *ends]
        lines["gates: 1 where one acted"] = ["gate/.*"]
        if any(gives_control(channel, s.attack) for s, channel in self._series.items()):
            lines["controls: what each attack reads of known words"] = ["leakage.*/control"]
        page = {t: ["Multiline", [f"^{tag}$" for tag in tags]] for t, tags in lines.items()}
        for board in boards:
            board.add_custom_scalars({"leakage and utility": page})

    def add_summary(
        self, boards: Sequence[SummaryWriter], outcomes: Mapping[Series, Outcome], step: int
    ) -> None:
        """Write the values of the newest look as a table of text, and the untested families."""
        rows = []
        for series, outcome in outcomes.items():
            if (channel := self._series.get(series)) is None or outcome.pending is not None:
                continue
            headline = channel.headline_of(series)
            rate = outcome.rates.get(headline) if outcome.unknown is None else None
            value = f"{rate.value:.3f} | {rate.low:.3f} to {rate.high:.3f}" if rate else "unknown |"
            value = value if outcome.exposed else "not shared |"
            rows.append(f"| {series.log_name} | {headline} | {value} | {outcome.n} |")
        unread = {series for series, outcome in outcomes.items() if not outcome.exposed}
        families = {c.family for series, c in self._series.items() if series not in unread}
        untested = ", ".join(family for family in CARDS if family not in families) or "none"
        head = "| attack | metric | value | 95% interval | n |\n|-|-|-|-|-|"
        text = "\n".join([head, *rows, "", f"Kinds of leakage that nobody tested: {untested}."])
        for board in boards:
            board.add_text("leakage/summary", text, step)


def add_settings(
    boards: Sequence[SummaryWriter], settings: Mapping[str, object], names: Sequence[str]
) -> None:
    """Write the settings for TensorBoard's HPARAMS table, next to columns of leakage.

    TensorBoard keeps only the first table of a run, so that the user's settings must be in it too.

    Args:
        boards: The writers of TensorBoard.
        settings: The settings of the run by name.
        names: The log names of the columns of leakage.
    """
    if not boards or importlib.util.find_spec("tensorboard") is None:
        return
    from torch.utils.tensorboard.summary import hparams

    table = hparams(_flat(settings), dict.fromkeys(names, 0.0))  # type: ignore[no-untyped-call]
    for board in boards:
        for summary in table:
            board._get_file_writer().add_summary(summary)  # type: ignore[no-untyped-call]


def _flat(settings: Mapping[str, object], root: str = "") -> dict[str, bool | int | float | str]:
    """Return settings as TensorBoard takes them: one level, numbers and strings."""
    flat: dict[str, bool | int | float | str] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{root}{name}/")
        else:
            flat[f"{root}{name}"] = value if isinstance(value, bool | int | float) else str(value)
    return flat


def log_settings(loggers: Sequence[Any], settings: Mapping[str, Any], worst: Sequence[str]) -> None:
    """Give each logger the settings of a run; W&B also keeps the highest value of some numbers.

    Args:
        loggers: Loggers of Lightning, or any with a method ``log_hyperparams``.
        settings: Numbers, strings and lists of them, by name.
        worst: The log names of numbers that are high if much leaks.
    """
    for logger in loggers:
        if (log := getattr(logger, "log_hyperparams", None)) is not None:
            log({KEY: dict(settings)})
        if type(logger).__name__ == "WandbLogger":
            keep_highest(logger.experiment, worst, step="trainer/global_step")


def keep_highest(run: Any, names: Sequence[str], *, step: str) -> None:
    """Let the summary of a run of W&B hold the highest and the last value of some numbers.

    Args:
        run: The run of W&B.
        names: The log names of the numbers.
        step: The log name of the number that counts steps.
    """
    for name in names:
        run.define_metric(name, step_metric=step, summary="max,last")


def upload_report(loggers: Sequence[Any], page: Path) -> None:
    """Attach a report's page to the runs of W&B and MLflow among some loggers.

    Args:
        loggers: Loggers of Lightning, or any with a method ``upload_report``.
        page: The path of ``report.html``.
    """
    for logger in loggers:
        kind = type(logger).__name__
        if kind == "WandbLogger":
            upload_to_wandb(logger.experiment, page)
        elif kind == "MLFlowLogger":
            logger.experiment.log_artifact(logger.run_id, str(page))
        elif (upload := getattr(logger, "upload_report", None)) is not None:
            upload(page)


def upload_to_wandb(run: Any, page: Path) -> None:
    """Show a report's page as a panel of a run of W&B."""
    import wandb

    html = wandb.Html(page.read_text(encoding="utf-8"), inject=False)
    run.log({"leakage/report": html})
