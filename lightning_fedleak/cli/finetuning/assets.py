"""The model and messages of the package, and the checks of names of models, files and the hub.

Whether the Hugging Face hub can be reached is known within seconds; its client needs minutes.
"""

import difflib
import functools
import logging
import os
import queue
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from lightning_fedleak.validate import WrongModel, check_integer, explain_errors

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


FOLDER = Path(__file__).parent
EMBEDDED_MODEL = FOLDER / "model"
EMBEDDED_MESSAGES = FOLDER / "private_messages.jsonl"

# A folder with a model or a tokenizer has one of these files.
_MODEL_FILES = ("config.json", "adapter_config.json", "tokenizer_config.json", "tokenizer.json")


class SourceError(ValueError):
    """A model, text or folder cannot be used; the message says what to give instead."""


refuse_errors = partial(explain_errors, error=SourceError)
"""Raises :class:`SourceError` in place of errors of a block."""
check_option = partial(check_integer, error=SourceError)
"""Returns an integer within its bounds, or raises :class:`SourceError`."""


def is_path(name: str) -> bool:
    """Return whether a name cannot be one of the Hugging Face hub, ``name`` or ``owner/name``."""
    return (
        name.startswith((".", "~"))
        or Path(name).is_absolute()
        or "\\" in name
        or name.endswith("/")
        or name.count("/") > 1
    )


def as_path(name: str | Path) -> Path:
    """Return a name as a path, with ``~`` expanded.

    Raises:
        SourceError: No file or folder can have this name, or it cannot be looked up.
    """
    try:
        path = Path(name).expanduser()
        path.exists()
    except (RuntimeError, OSError) as error:
        reason = getattr(error, "strerror", None) or "no user has the name after ~"
        # A long name is often the text itself, which may be private.
        shown = f"'{name}'" if len(str(name)) < 200 else f"a name of {len(str(name))} characters"
        raise SourceError(f"{shown} is no file, folder or dataset ({reason})") from None
    return path


def model_source(name: str | Path | None) -> tuple[str, dict[str, object]]:
    """Return a model's source for ``from_pretrained``, and the settings that it needs.

    If the hub cannot be reached, only its cache is read, without retries.

    Args:
        name: The folder or the name on the hub; None for the embedded model.

    Raises:
        SourceError: There is no such folder, or no model in it; or the name is that of a model on
            the hub that is not in the cache, and the hub cannot be reached within 5 seconds.
    """
    path = EMBEDDED_MODEL if name is None else as_path(name)
    if path.is_dir() and any((path / file).exists() for file in _MODEL_FILES):
        return str(path), {}
    if path.exists():
        problem = (
            f"'{path}' is no folder of a model (no config.json). model.save_pretrained(folder) and "
            "tokenizer.save_pretrained(folder) write one."
        )
    elif is_path(str(name)):
        problem = f"there is no folder '{name}'{nearest(path)}"
    else:
        message = f"'{name}' is no folder{nearest(path)}, and no model of the hub"
        with refuse_errors(message, ValueError):
            cached = model_is_cached(str(name))
        if (why := why_unreachable()) is None:
            return str(name), {}
        if cached:
            return str(name), {"local_files_only": True}
        problem = unreachable(str(name), "folder that holds the model", why)
    raise SourceError(problem)


@contextmanager
def loading(source: str, content: str) -> Iterator[None]:
    """Turn errors of the block into one that says what to give instead.

    Args:
        source: The folder or the name on the hub.
        content: The object to load, for the message, such as ``"tokenizer"``.

    Raises:
        SourceError: The object could not be loaded.
        WrongModel: The files lack weights.
    """
    hint = "Give a folder that holds one, or a model of the hub (by a network the first time)"
    message, wrong = f"no {content} could be loaded from '{source}'", None
    with refuse_errors(message, Exception, hint=hint):  # of damaged files, whatever reads them
        try:
            yield
        except WrongModel as error:
            wrong = error
    if wrong is not None:
        raise wrong


def nearest(path: Path) -> str:
    """Return where a path was looked for, and a similar name that exists."""
    folder = path.expanduser().parent
    if not folder.is_dir():
        return f" (there is no folder '{path.parent}' either; looked from {Path.cwd()})"
    close = difflib.get_close_matches(path.name, [p.name for p in folder.iterdir()], n=1)
    meant = f"; did you mean '{close[0]}'?" if close else ""
    return f" (looked in {folder.resolve()}){meant}"


_LIGHTNING = ("lightning.pytorch", "lightning.fabric", "pytorch_lightning", "lightning_fabric")
TRAINING = dict.fromkeys((*_LIGHTNING, "transformers"), logging.ERROR)
"""Levels that silence the loggers of every fit, under each name of Lightning's packages."""


@contextmanager
def quiet_logs(levels: Mapping[str, int]) -> Iterator[None]:
    """Set the levels of loggers, by their names, inside the block."""
    with ExitStack() as stack:
        for name, level in levels.items():
            logger = logging.getLogger(name)
            stack.callback(logger.setLevel, logger.level)
            logger.setLevel(level)
        yield
