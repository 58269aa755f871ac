"""Messages that only the first process shows, in the log of Lightning's messages.

Lightning stores the rank of a process when it is imported. Without Lightning the rank is read here
from the environment at each message, so that no global state is changed.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from lightning_utilities.core import rank_zero

_RANKS = ("RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK")
"""Environment variables of a process's rank, in the order in which Lightning reads them."""


def is_first_process() -> bool:
    """Return whether this process shows messages."""
    rank = getattr(rank_zero.rank_zero_only, "rank", None)
    if rank is None:
        rank = next((int(os.environ[name]) for name in _RANKS if name in os.environ), 0)
    return bool(rank == 0)


@contextmanager
def without_messages() -> Iterator[None]:
    """Show no warning, and log nothing below an error, in the block."""
    earlier = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(earlier)


def rank_zero_info(text: str) -> None:
    """Log a text for information."""
    if is_first_process():
        rank_zero.log.info(text, stacklevel=2)


def rank_zero_warn(text: str) -> None:
    """Show a warning at the line that calls this."""
    if is_first_process():
        warnings.warn(text, stacklevel=2)
