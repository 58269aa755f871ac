"""Messages that only the first process (rank 0) shows, as Lightning's log messages and warnings.

Lightning stores the rank of the process when it is imported. Without Lightning, the rank is read
from the environment at each message; no global state is changed.
"""

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from lightning_utilities.core import rank_zero

_RANKS = ("RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK")
"""Environment variables with the rank of a process, in the order in which Lightning reads them."""


def is_first_process() -> bool:
    """Return whether this process has rank 0, so that it shows messages."""
    rank = getattr(rank_zero.rank_zero_only, "rank", None)
    if rank is None:
        rank = next((int(os.environ[name]) for name in _RANKS if name in os.environ), 0)
    return bool(rank == 0)


@contextmanager
def without_messages() -> Iterator[None]:
    """Suppress warnings, and log messages below the level of an error, in the block."""
    disabled_level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(disabled_level)


def rank_zero_info(text: str) -> None:
    """Log a text at level INFO with Lightning's logger, in the first process."""
    if is_first_process():
        rank_zero.log.info(text, stacklevel=2)


def rank_zero_warn(text: str) -> None:
    """Show a warning in the first process, as a warning of the calling line."""
    if is_first_process():
        warnings.warn(text, stacklevel=2)
