"""Whether the Hugging Face hub can be reached, asked in seconds; its client retries for minutes."""

from __future__ import annotations

import functools
import http.client
import os
import queue
import ssl
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

SECONDS = 5.0
_ANSWER_HOLDS_SECONDS = 60.0


def why_unreachable() -> str | None:
    """Why the hub cannot be reached; None where it answers. Takes 5 seconds at most.

    An answer is kept for a minute. Where only the hub's own client can tell (a proxy of a kind that
    Python does not speak, a certificate that Python does not know), that is left to it: None.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    return _asked(constants.ENDPOINT, int(time.monotonic() // _ANSWER_HOLDS_SECONDS))


def model_is_kept(name: str) -> bool:
    """Whether the hub's cache on this machine has the model, its configuration at least.

    Raises:
        ValueError: no model of the hub can have this name.
    """
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(name, "config.json"), str)


def dataset_is_kept(name: str) -> bool:
    """Whether a cache on this machine has something of the dataset."""
    from huggingface_hub import constants

    prepared = os.environ.get("HF_DATASETS_CACHE", Path(constants.HF_HOME) / "datasets")
    downloaded = Path(constants.HF_HUB_CACHE) / f"datasets--{name.replace('/', '--')}"
    return (Path(prepared) / name.replace("/", "___")).is_dir() or downloaded.is_dir()


def unreachable(name: str, what: str, why: str) -> str:
    """The message for a model or dataset that is neither here nor to be had.

    Args:
        name: as the user gave it.
        what: ``"folder that holds the model"`` or the like: what to give instead.
        why: from :func:`why_unreachable`.
    """
    from huggingface_hub import constants

    return (
        f"'{name}' is not on this machine ({Path.cwd()}), nor in the cache of the Hugging Face hub "
        f"({constants.HF_HOME}), and the hub could not be reached ({why}): give a {what}, set "
        "HF_HOME to a cache that has it, or connect to the network."
    )


@functools.lru_cache(maxsize=4)
def _asked(endpoint: str, minute: int) -> str | None:
    """In a thread of its own: looking a host's name up knows no time limit."""
    answers: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    threading.Thread(target=lambda: answers.put(_ask(endpoint)), daemon=True).start()
    try:
        return answers.get(timeout=SECONDS)
    except queue.Empty:
        return f"no answer in {SECONDS:g} seconds"


def _ask(endpoint: str) -> str | None:
    proxies = urllib.request.getproxies()
    own = proxies.get(urlsplit(endpoint).scheme)
    if not (own or "http").startswith("http") or (own is None and "all" in proxies):
        return None
    try:
        request = urllib.request.Request(endpoint, method="HEAD")
        with urllib.request.urlopen(request, timeout=SECONDS):
            return None
    except urllib.error.HTTPError:  # something is there, and answers
        return None
    except urllib.error.URLError as error:
        if isinstance(error.reason, ssl.SSLError):
            return None
        return getattr(error.reason, "strerror", None) or str(error.reason)
    except (OSError, http.client.HTTPException, ValueError) as error:
        return str(error) or type(error).__name__
