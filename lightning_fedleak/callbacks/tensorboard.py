"""What only TensorBoard shows: one page of charts, histograms, and a row in its table of runs."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_fedleak.attacks.base import WordGuess
from lightning_fedleak.callbacks.results import Series
from lightning_fedleak.lightning_packages import both

if TYPE_CHECKING:
    from lightning.pytorch.loggers import Logger, TensorBoardLogger

    from lightning_fedleak.callbacks.channels.base import Channel


def tensorboards(loggers: Sequence[Logger]) -> list[TensorBoardLogger]:
    """The TensorBoard loggers among ``loggers``."""
    return [one for one in loggers if isinstance(one, both("loggers.TensorBoardLogger"))]


def add_layout(
    loggers: Sequence[Logger],
    utility: Sequence[str],
    series: Mapping[Series, Channel],
    privacy: Sequence[str] = (),
    decisions: Sequence[str] = (),
    worst: Sequence[str] = (),
) -> None:
    """Puts utility, leakage, epsilon, gates and the monitor's cost on one page of TensorBoard.

    Args:
        loggers: the run's loggers; only TensorBoard's are used.
        utility: names of the user's metrics.
        series: the channel of each series, in the order of the logs.
        privacy: names of what defences account for.
        decisions: names of what gates log.
        worst: names of the highest headlines.
    """
    page: dict[str, list[Any]] = {
        "utility": _lines([f"utility/{name}" for name in utility]),
    }
    if privacy:
        page["privacy: epsilon"] = _lines(privacy)
    if worst:
        page["leakage: worst of each family"] = _lines(worst)
    for prefix in dict.fromkeys(one.prefix for one in series):
        seen = {one: channel for one, channel in series.items() if one.prefix == prefix}
        for headline in dict.fromkeys(channel.headline for channel in seen.values()):
            names = [one.log_name for one, channel in seen.items() if channel.headline == headline]
            page[f"{prefix}: {_title(headline)}"] = _lines([f"{n}/{headline}" for n in names])
        for one, channel in seen.items():
            root, headline = one.log_name, channel.headline
            for title, metrics in channel.charts.items():
                page[f"{root}: {title}"] = _lines([f"{root}/{metric}" for metric in metrics])
            page[f"{root}: {_title(headline)} and its 95% interval"] = [
                "Margin",
                [f"{root}/{headline}{end}" for end in ("", "_low", "_high")],
            ]
    if decisions:
        page["gates"] = _lines(decisions)
    page["cost of monitoring (seconds a look)"] = _lines(["monitor/seconds"])
    for logger in tensorboards(loggers):
        logger.experiment.add_custom_scalars({"leakage and utility": page})


def _title(metric: str) -> str:
    return metric.replace("_", " ").upper()


def _lines(tags: Sequence[str]) -> list[Any]:
    """A chart of lines, whose tags TensorBoard reads as regular expressions."""
    return ["Multiline", [f"^{re.escape(tag)}$" for tag in tags]]


def add_score_histograms(
    loggers: Sequence[Logger], name: str, guess: WordGuess, truth: Tensor, step: int
) -> None:
    """How far apart the scores of used and unused types lie, as two histograms."""
    boards = tensorboards(loggers)
    if not boards or guess.scores is None:
        return
    used = torch.zeros(guess.scores.shape[0], dtype=torch.bool, device=guess.scores.device)
    used[truth.to(used.device)] = True
    for logger in boards:
        for label, scores in (("used", guess.scores[used]), ("unused", guess.scores[~used])):
            finite = scores[scores.isfinite()]
            if finite.numel():
                logger.experiment.add_histogram(f"{name}/score_of_{label}_types", finite, step)


def add_place_histogram(
    loggers: Sequence[Logger], name: str, places: Mapping[str, tuple[int, int]], step: int
) -> None:
    """At which places of their texts tokens were recovered, as a histogram.

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
    for logger in tensorboards(loggers):
        logger.experiment.add_histogram_raw(
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


def add_hparams(
    loggers: Sequence[Logger], settings: Mapping[str, Any], results: Mapping[str, float]
) -> None:
    """One row in TensorBoard's HParams table: the monitor's settings and the last results."""
    known = {name: value for name, value in results.items() if math.isfinite(value)}
    for logger in tensorboards(loggers):
        logger.log_hyperparams(dict(settings), known)
