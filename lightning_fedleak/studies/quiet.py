"""Silence of libraries whose notices would stand between a study's own lines."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

TRAINING = dict.fromkeys(("lightning.pytorch", "lightning.fabric", "transformers"), logging.ERROR)
"""Levels of the loggers that speak in every fit."""


@contextmanager
def quiet_logs(levels: Mapping[str, int]) -> Iterator[None]:
    """Set the levels of loggers, by their names, inside the block."""
    loggers = {logging.getLogger(name): level for name, level in levels.items()}
    before = {logger: logger.level for logger in loggers}
    for logger, level in loggers.items():
        logger.setLevel(level)
    try:
        yield
    finally:
        for logger, level in before.items():
            logger.setLevel(level)
