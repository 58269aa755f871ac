"""What only TensorBoard shows: a page of charts, histograms, leakage in its table of settings."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from lightning_fedleak.attacks import WordGuess
from lightning_fedleak.engine.channels.base import Channel
from lightning_fedleak.engine.outcomes import Outcome, Series
from lightning_fedleak.messages import rank_zero_info
from lightning_fedleak.report.records.utility import is_validation

if TYPE_CHECKING:
    from tensorboard.plugins.custom_scalar import layout_pb2
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


class Content(NamedTuple):
    """What is shown of a run.

    Attributes:
        series: the channel of each series, in the order of the logs.
        privacy: names of what defences account for.
        worst: names of the highest headlines.
    """

    series: Mapping[Series, Channel]
    privacy: Sequence[str]
    worst: Sequence[str]


def _is_there(boards: Sequence[SummaryWriter]) -> bool:
    """Return whether there is something to write to, and what writes it."""
    installed = importlib.util.find_spec("tensorboard") is not None
    if boards and not installed:
        rank_zero_info(
            "lightning-fedleak: 'tensorboard' is not installed, so that its page of charts and its "
            "table of settings are not written; every number is. pip install tensorboard"
        )
    return bool(boards) and installed


def add_table(
    boards: Sequence[SummaryWriter],
    names: Sequence[str],
    settings: Mapping[str, object],
    content: Content,
) -> None:
    """Put leakage beside the settings in HPARAMS.

    TensorBoard keeps the first table of settings that a run writes, and Lightning writes its own
    after this: the user's settings are in this one.

    Args:
        boards: TensorBoard's writers.
        names: of the user's metrics, and of others that somebody logs beside the same settings.
        settings: of the run, by name.
        content: what is shown of the run.
    """
    if not _is_there(boards):
        return
    from torch.utils.tensorboard.summary import hparams

    headlines = (
        f"{one.log_name}/{channel.charted(one)[0]}" for one, channel in content.series.items()
    )
    metrics = dict.fromkeys([*content.worst, *headlines, *names, *content.privacy], 0.0)
    for board in boards:
        table = hparams(_flat(settings), metrics)  # type: ignore[no-untyped-call]
        for part in table:
            board._get_file_writer().add_summary(part)  # type: ignore[no-untyped-call]


class Cards:
    """The cards that TensorBoard shows first: leakage by family, utility, epsilon, limits of gates.

    Args:
        content: what is shown of the run.
        utility: names of the user's metrics; the first one of a validation has a card.
        limits: what gates allow, by the name of the value that they watch.
    """

    def __init__(
        self, content: Content, utility: Sequence[str], limits: Mapping[str, float]
    ) -> None:
        self.tags: dict[str, str] = {}
        self._limits: dict[str, float] = {}
        self._gates: dict[SummaryWriter, SummaryWriter] = {}
        families = {name.rpartition("/")[2]: name for name in content.worst}
        for family, card in CARDS.items():
            if family not in families:
                continue
            tag = self.tags[families[family]] = f"{FRONT}/{card}"
            headlines = {
                f"{one.log_name}/{channel.headline}"
                for one, channel in content.series.items()
                if channel.family == family
            }
            allowed = [limits[name] for name in {families[family], *headlines} & limits.keys()]
            if allowed:
                self._limits[tag] = min(allowed)
        for name in sorted(utility, key=lambda name: not is_validation(name))[:1]:
            self.tags[f"utility/{name}"] = f"{FRONT}/{name}"
        if len(content.privacy) == 1:
            self.tags[content.privacy[0]] = f"{FRONT}/epsilon"

    def add(self, board: SummaryWriter, values: Mapping[str, float], step: int) -> None:
        """Write each value, its card if it has one, and the limit of the card's gate beside it."""
        for name, value in values.items():
            board.add_scalar(_tag(name), value, step)
            if (card := self.tags.get(name)) is None:
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


def add_pages(boards: Sequence[SummaryWriter], cards: Cards, content: Content) -> None:
    """Lay out Custom Scalars: the cards, each attack with its interval, controls and gates.

    A chart that several attacks or runs share names its lines by a regular expression: TensorBoard
    says nothing of tags that a run lacks then.

    Args:
        boards: TensorBoard's writers.
        cards: the cards of the run.
        content: what is shown of the run.
    """
    if not _is_there(boards):
        return
    from tensorboard.plugins.custom_scalar import layout_pb2
    from torch.utils.tensorboard.summary import custom_scalars

    def lines(title: str, *patterns: str) -> layout_pb2.Chart:
        content = layout_pb2.MultilineChartContent(tag=[f"^{one}$" for one in patterns])
        return layout_pb2.Chart(title=title, multiline=content)

    def interval(one: Series, metric: str) -> layout_pb2.Chart:
        tag, channel = f"{one.log_name}/{metric}", content.series[one]
        patterns = [re.escape(tag), *(re.escape(_tag(f"{tag}_{end}")) for end in ("low", "high"))]
        if channel.ranges.get(metric, (0.0, 1.0))[1] > 1:
            return lines(tag, *patterns[:1])  # of what has no upper end, none may be logged
        if metric in channel.limits:
            patterns.append(re.escape(channel.limits[metric]))
        return lines(f"{tag} and its 95% interval", *patterns)

    families = "|".join(CARDS.values())
    metrics = [name.partition("/")[2] for name in cards.tags if name.startswith("utility/")]
    charted = {one: channel.charted(one) for one, channel in content.series.items()}
    page = [lines("leakage: the worst attack of each kind", f"{FRONT}/({families})")]
    page += [lines(f"utility: {name}", re.escape(f"{FRONT}/{name}")) for name in metrics]
    page += [lines(name, re.escape(name)) for name in content.privacy]
    page += [interval(one, headline) for one, (headline, *_) in charted.items()]
    page += [lines("gates: 1 where one acted", "gate/.*")]
    controlled = any(c.gives_control(one.attack) for one, c in content.series.items())
    title = "controls: what each attack reads of known words"
    more = [lines(title, "leakage.*/control")] if controlled else []
    more += [interval(one, metric) for one, (_, *rest) in charted.items() for metric in rest]
    named = [("leakage and utility", page), ("more of each attack", more)]
    layout = layout_pb2.Layout(
        category=[layout_pb2.Category(title=title, chart=charts) for title, charts in named]
    )
    pages = custom_scalars({})  # type: ignore[no-untyped-call]  # its own charts have no intervals
    pages.value[0].tensor.string_val[0] = layout.SerializeToString()
    for board in boards:
        board._get_file_writer().add_summary(pages)  # type: ignore[no-untyped-call]


def add_summary(
    boards: Sequence[SummaryWriter],
    content: Content,
    outcomes: Mapping[Series, Outcome],
    step: int,
) -> None:
    """Write what the newest look read as a table of text, and what nobody tested."""
    if not boards:
        return
    rows = []
    for one, outcome in outcomes.items():
        if (channel := content.series.get(one)) is None or outcome.pending is not None:
            continue
        rate = outcome.rates.get(channel.headline)
        known = rate is not None and outcome.unknown is None
        value = f"{rate.value:.3f} | {rate.low:.3f} to {rate.high:.3f}" if known else "unknown |"
        rows.append(f"| {one.log_name} | {channel.headline} | {value} | {outcome.n} |")
    families = {channel.family for channel in content.series.values()}
    untested = ", ".join(family for family in CARDS if family not in families) or "none"
    head = "| attack | metric | value | 95% interval | n |\n|-|-|-|-|-|"
    text = "\n".join([head, *rows, "", f"Kinds of leakage that nobody tested: {untested}."])
    for board in boards:
        board.add_text("leakage/summary", text, step)


def _flat(settings: Mapping[str, Any], root: str = "") -> dict[str, bool | int | float | str]:
    """Settings as TensorBoard takes them: one level, numbers and strings."""
    flat: dict[str, bool | int | float | str] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{root}{name}/")
        else:
            plain = isinstance(value, bool | int | float | str)
            flat[f"{root}{name}"] = value if plain else str(value)
    return flat


def add_scores(
    boards: Sequence[Any], name: str, guess: WordGuess, truth: Tensor, step: int
) -> None:
    """Draw a histogram of the scores of used types, and one of unused types."""
    if not boards or guess.scores is None:
        return
    used = torch.zeros(guess.scores.shape[0], dtype=torch.bool, device=guess.scores.device)
    used[truth.to(used.device)] = True
    for board in boards:
        for label, scores in (("used", guess.scores[used]), ("unused", guess.scores[~used])):
            finite = scores[scores.isfinite()]
            if finite.numel():
                board.add_histogram(f"{name}/score_of_{label}_types", finite, step)


def add_places(
    boards: Sequence[Any], name: str, places: Mapping[str, tuple[int, int]], step: int
) -> None:
    """Show at which places of their texts tokens were recovered, as a histogram.

    The height over a range of places is the share of its tokens that were right.
    """
    ranges = [key.partition("-") for key in places]
    if not ranges:
        return
    limits = [
        float(int(low) + 1 if not dash else int(high or 2 * int(low) - 1) + 1)
        for low, dash, high in ranges
    ]
    starts = [float(low) for low, _, _ in ranges]
    shares = [right / n for right, n in places.values()]
    counts = [s * (b - a) for s, a, b in zip(shares, starts, limits, strict=True)]
    middles = [(a + b) / 2 for a, b in zip(starts, limits, strict=True)]
    for board in boards:
        board.add_histogram_raw(
            f"{name}/share_recovered_by_place",
            min=starts[0],
            max=limits[-1],
            num=sum(counts),
            sum=sum(c * m for c, m in zip(counts, middles, strict=True)),
            sum_squares=sum(c * m * m for c, m in zip(counts, middles, strict=True)),
            bucket_limits=limits,
            bucket_counts=counts,
            global_step=step,
        )
