"""A check within seconds whether the Hugging Face hub can be reached; its client needs minutes."""

from __future__ import annotations

import functools
import os
import queue
import threading
import time
from pathlib import Path

SECONDS = 5.0  # wait for the hub; slower networks count as unreachable
_ANSWER_SECONDS = 60.0  # time for which a result is used again; more may miss a restored network


def why_unreachable() -> str | None:
    """Return why the hub cannot be reached, or None where it answers within 5 seconds.

    An answer is used again for a minute.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    return _ask_in_thread(constants.ENDPOINT, int(time.monotonic() // _ANSWER_SECONDS))


def model_is_cached(name: str) -> bool:
    """Return whether the hub's cache has the model, its configuration at least.

    Raises:
        ValueError: no model of the hub can have this name.
    """
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(name, "config.json"), str)


def dataset_is_cached(name: str) -> bool:
    """Return whether a cache on this machine has a part of the dataset."""
    from huggingface_hub import constants

    prepared = os.environ.get("HF_DATASETS_CACHE", Path(constants.HF_HOME) / "datasets")
    downloaded = Path(constants.HF_HUB_CACHE) / f"datasets--{name.replace('/', '--')}"
    return (Path(prepared) / name.replace("/", "___")).is_dir() or downloaded.is_dir()


def unreachable(name: str, instead: str, why: str) -> str:
    """Return the message for a model or dataset that is on no disk and cannot be loaded.

    Args:
        name: The name as the user wrote it.
        instead: What to give instead, such as ``"folder that holds the model"``.
        why: The reason, from :func:`why_unreachable`.
    """
    from huggingface_hub import constants

    return (
        f"'{name}' is not on this machine ({Path.cwd()}), nor in the cache of the Hugging Face hub "
        f"({constants.HF_HOME}), and the hub could not be reached ({why}): give a {instead}, set "
        "HF_HOME to a cache that has it, or connect to the network."
    )


@functools.lru_cache(maxsize=4)
def _ask_in_thread(endpoint: str, minute: int) -> str | None:
    """Return :func:`_ask`, called in a thread because looking up a host's name has no time limit.

    ``minute`` is part of the cache's key, so that a result is used again only for a while.
    """
    answers: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    threading.Thread(target=lambda: answers.put(_ask(endpoint)), daemon=True).start()
    try:
        return answers.get(timeout=SECONDS)
    except queue.Empty:
        return f"no answer in {SECONDS:g} seconds"


def _ask(endpoint: str) -> str | None:
    """Send one request by the hub's client, and return why it failed; None if a server answered."""
    from huggingface_hub import get_session

    try:
        get_session().head(endpoint, timeout=SECONDS)
    except Exception as error:  # its class depends on the version of the client
        cause: BaseException = error
        while cause.__context__ is not None:  # the first error, of the system, has no address in it
            cause = cause.__context__
        return getattr(cause, "strerror", None) or str(cause) or type(cause).__name__
    return None
