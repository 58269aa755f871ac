"""Codes of a client's logs, which the server records in each round and cannot read."""

from __future__ import annotations

import re
import secrets
import uuid
from contextlib import suppress
from pathlib import Path

from lightning_fedleak.engine import RunRecord, announce
from lightning_fedleak.federation.observer import RoundObserver
from lightning_fedleak.private_files import read_secret, write_secret
from lightning_fedleak.report import records

HEAD = "fedleak-head"
"""Name of the code in the message that a client returns."""


def head_of(observer: RoundObserver, client: str | int) -> str | None:
    """Return a code of all lines that a client has logged so far, for the server.

    It is an HMAC of a last line that is written to ``run.jsonl``. That line also holds the length
    of ``leakage.jsonl``. The key stays in ``chain.key`` in the same folder, of mode 0600.

    Args:
        observer: the client's observer, whose round has begun.
        client: the client's name in the logs.

    Returns:
        None if a file cannot be written, which is announced.
    """
    path = observer.folder / records.CHAIN_KEY
    try:
        with suppress(FileExistsError):
            if not path.exists():
                write_secret(path, {"key": secrets.token_hex(32)})
        key = str(read_secret(path, "the key")["key"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        announce(f"RoundObserver: the server gets no code of these logs: {error}")
        return None
    record = observer.engine.record
    assert record is not None, "a round has begun"
    n_results, head = record.results_end()
    line = records.SentLine(
        run="", step=observer.round_, client=client, results=n_results, results_head=head
    )
    written = record.append(line)
    return None if written is None else records.code_of(key, written)


def note_head(record: RunRecord | None, round_: int, client: str | int, code: object) -> None:
    """Write a client's code to the server's log, unless it is no code of :func:`head_of`.

    Args:
        record: the log of the server.
        round_: the round in which the code arrived.
        client: the client that sent it.
        code: the value that came with the model. A client may send anything.
    """
    if record is not None and re.fullmatch("[0-9a-f]{16}-[0-9a-f]{64}", str(code)):
        record.append(records.ClientLine(run="", step=round_, client=client, code=str(code)))


class HeadRecord:
    """The log of a server without an observer: ``run.jsonl`` with the codes of its clients.

    Args:
        folder: the folder of the log.
    """

    def __init__(self, folder: str | Path) -> None:
        path = Path(folder) / records.RECORD
        self._record = RunRecord(path, uuid.uuid4().hex[:12], announce, ())
        self._record.append(records.BeginLine(run="", training={"strategy": "federation"}))
        self._rounds = 0

    def note(self, round_: int, client: str | int, code: object) -> None:
        """Write a client's code in a round to the log, see :func:`note_head`."""
        self._rounds = max(self._rounds, round_)
        note_head(self._record, round_, client, code)

    def end(self, outcome: str = "finished") -> None:
        """Close the log; the outcome is ``"finished"`` or the class of an exception."""
        n_results, head = self._record.results_end()
        self._record.append(
            records.EndLine(
                run="", step=self._rounds, outcome=outcome, results=n_results, results_head=head
            )
        )
