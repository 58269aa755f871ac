"""What the names of a user's metrics say: what they are of, and which way is better."""

from __future__ import annotations

import re
from collections.abc import Iterable

_HELD_OUT = re.compile(r"(^|[_/.\- ])(val|valid|validation|eval|test|dev)([_/.\- ]|$)", re.I)
_TRAINING = re.compile(r"^(train|training)([_/.\- ]|$)|^loss$", re.I)
_LOWER_IS_BETTER = re.compile(r"loss|perplexity|ppl|error|nll|wer", re.I)


def is_lower_better(metric: str) -> bool:
    """Return whether lower values of a metric are better, by its name."""
    return bool(_LOWER_IS_BETTER.search(metric))


def is_validation(metric: str) -> bool:
    """Return whether a metric is of data that are not trained on, by its name."""
    return bool(_HELD_OUT.search(metric))


def is_training(metric: str) -> bool:
    """Return whether a metric is of the batches that are trained on, by its name."""
    return bool(_TRAINING.search(metric)) and not is_validation(metric)


def title_of(metric: str) -> str:
    """Return a metric's name, and what it is of where that is a single batch or a few.

    ``loss`` is transformers' name, ``train_loss_epoch`` Lightning's: both are means of batches.
    """
    if not is_training(metric):
        return metric
    name, comma, client = metric.partition(", ")  # the records of a federation name the client
    mean = name.lower() == "loss" or name.endswith("_epoch")
    what = "loss" if "loss" in name.lower() else "metric"
    of = f"mean training {what}" if mean else f"training {what} of one batch"
    return f"{name} ({of}){comma}{client}"


def best_of(metric: str, values: Iterable[float]) -> float:
    """Return the lowest of a loss, an error or a perplexity, and the highest of what else.

    Args:
        metric: its name.
        values: at least one.
    """
    return (min if is_lower_better(metric) else max)(values)
