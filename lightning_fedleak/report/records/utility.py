"""Guesses from the name of a user's metric on which data it is, and whether lower is better."""

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
    """Return whether a metric is of held-out data, by its name."""
    return bool(_HELD_OUT.search(metric))


def is_training(metric: str) -> bool:
    """Return whether a metric is of training batches, by its name."""
    return bool(_TRAINING.search(metric)) and not is_validation(metric)


def title_of(metric: str) -> str:
    """Return a metric's name; for a training metric, with the number of batches it is of.

    ``loss`` in transformers and ``train_loss_epoch`` in Lightning are means of several batches.
    """
    if not is_training(metric):
        return metric
    name, comma, client = metric.partition(", ")  # the records of a federation name the client
    mean = name.lower() == "loss" or name.endswith("_epoch")
    what = "loss" if "loss" in name.lower() else "metric"
    description = f"mean training {what}" if mean else f"training {what} of one batch"
    return f"{name} ({description}){comma}{client}"


def best_of(metric: str, values: Iterable[float]) -> float:
    """Return the best value: the lowest if lower is better for the metric, else the highest.

    Args:
        metric: The name of the metric.
        values: Its values, at least one.
    """
    return (min if is_lower_better(metric) else max)(values)
