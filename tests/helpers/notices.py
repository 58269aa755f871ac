"""What gates say in the log, as ``pytest.warns`` has it for warnings."""

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def announced(match: str) -> Iterator[list[str]]:
    """Fails unless a gate says something that matches, by logging; yields all that is said."""
    messages: list[str] = []

    class Recorder(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    logger, recorder = logging.getLogger("lightning_fedleak"), Recorder(logging.WARNING)
    logger.addHandler(recorder)
    try:
        yield messages
    finally:
        logger.removeHandler(recorder)
    assert any(re.search(match, text) for text in messages), messages
