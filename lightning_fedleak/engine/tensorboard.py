"""What only TensorBoard shows: a page of charts."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from lightning_fedleak.engine.channels.base import Channel
from lightning_fedleak.engine.outcomes import Series
from lightning_fedleak.messages import rank_zero_info

if TYPE_CHECKING:
    from tensorboard.plugins.custom_scalar import layout_pb2
    from torch.utils.tensorboard import SummaryWriter

FRAME: Mapping[str, float] = {"axis/0": 0.0, "axis/1": 1.0}
"""Lines that are logged for TensorBoard alone: its charts have no setting for their axes."""
_PAGE = "leakage and utility (axis/0 and axis/1 are no attacks: they keep the axis from 0 to 1)"


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


def add_pages(
    boards: Sequence[SummaryWriter],
    utility: Sequence[str],
    decisions: Sequence[str],
    series: Mapping[Series, Channel],
    privacy: Sequence[str],
    worst: Sequence[str],
) -> None:
    """Lay out Custom Scalars.

    One line a chart, named in its title, since TensorBoard draws all lines of a run in one colour;
    rates run from 0 to 1. Rates and gates are charts with a margin, which TensorBoard does not
    smooth: a gate that fired reads 1.

    Args:
        boards: TensorBoard's writers.
        utility: names of the user's metrics.
        decisions: names of what gates log.
        series: the channel of each series that is shown, in the order of the logs.
        privacy: names of what defences account for.
        worst: names of the highest headlines.
    """
    if not boards:
        return
    if importlib.util.find_spec("tensorboard") is None:
        rank_zero_info(
            "lightning-fedleak: 'tensorboard' is not installed, so that its page of charts "
            "is not written; every number is. pip install tensorboard"
        )
        return
    from tensorboard.plugins.custom_scalar import layout_pb2
    from torch.utils.tensorboard.summary import custom_scalars

    def line(tag: str) -> layout_pb2.Chart:
        tags = [f"^{re.escape(tag)}$"]  # read as a regular expression
        return layout_pb2.Chart(title=tag, multiline=layout_pb2.MultilineChartContent(tag=tags))

    def rate(title: str, tag: str, low: str, high: str, *lines: str) -> layout_pb2.Chart:
        single = [(one, one, one) for one in (*lines, *FRAME)]
        shown = [
            layout_pb2.MarginChartContent.Series(value=value, lower=lower, upper=upper)
            for value, lower, upper in [(tag, low, high), *single]
        ]
        return layout_pb2.Chart(title=title, margin=layout_pb2.MarginChartContent(series=shown))

    def interval(one: Series, metric: str) -> layout_pb2.Chart:
        tag, channel = f"{one.log_name}/{metric}", series[one]
        if channel.ranges.get(metric, (0.0, 1.0))[1] > 1:
            return line(tag)  # of what has no upper end, none may be logged
        title = f"{one.log_name}: {metric.replace('_', ' ').upper()}, 95% interval (0 to 1)"
        limits = [channel.limits[metric]] if metric in channel.limits else []
        return rate(title, tag, f"{tag}_low", f"{tag}_high", *limits)

    charted = {one: channel.charted(one) for one, channel in series.items()}
    page = [line(f"utility/{name}") for name in utility]
    page += [line(name) for name in privacy]
    page += [rate(name, name, name, name) for name in worst]
    page += [interval(one, headline) for one, (headline, *_) in charted.items()]
    page += [rate(name, name, name, name) for name in decisions]
    page += [line("monitor/seconds")]
    controlled = (one for one, channel in series.items() if channel.gives_control(one.attack))
    controls = (f"{one.log_name}/control" for one in controlled)
    more = [rate(name, name, name, name) for name in controls]
    more += [interval(one, metric) for one, (_, *rest) in charted.items() for metric in rest]
    named = [(_PAGE, page), ("more of each attack", more)]
    layout = layout_pb2.Layout(
        category=[layout_pb2.Category(title=title, chart=charts) for title, charts in named]
    )
    pages = custom_scalars({})  # type: ignore[no-untyped-call]  # its own charts have no frames
    pages.value[0].tensor.string_val[0] = layout.SerializeToString()
    for board in boards:
        board._get_file_writer().add_summary(pages)  # type: ignore[no-untyped-call]


def add_frame(boards: Sequence[SummaryWriter], step: int) -> None:
    """Log the two lines that keep the axis of every rate at 0 to 1."""
    for board in boards:
        for name, value in FRAME.items():
            board.add_scalar(name, value, step)
