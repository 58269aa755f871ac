"""The model and messages of the package, and the check of names of models and files."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path

from lightning_fedleak.cli.finetuning import hub
from lightning_fedleak.validate import check_integer, explain_errors

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
            cached = hub.model_is_cached(str(name))
        if (why := hub.why_unreachable()) is None:
            return str(name), {}
        if cached:
            return str(name), {"local_files_only": True}
        problem = hub.unreachable(str(name), "folder that holds the model", why)
    raise SourceError(problem)


def loading(source: str, content: str) -> AbstractContextManager[None]:
    """Turn errors of the block into one that says what to give instead.

    Args:
        source: The folder or the name on the hub.
        content: The object to load, for the message, such as ``"tokenizer"``.

    Raises:
        SourceError: The object could not be loaded.
    """
    hint = "Give a folder that holds one, or a model of the hub (by a network the first time)"
    message = f"no {content} could be loaded from '{source}'"
    return refuse_errors(message, OSError, ValueError, hint=hint)


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
