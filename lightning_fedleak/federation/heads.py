"""How far a client's logs went in each round, as the server notes it and cannot read it."""

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
"""Name of the code beside what a client returns."""


def head_of(observer: RoundObserver, client: str | int) -> str | None:
    """Return a code of all lines that a client has written so far, for the server.

    It is an HMAC of a last line that is written to ``run.jsonl``, which also holds how far
    ``leakage.jsonl`` goes. The key stays in ``chain.key`` beside them, of mode 0600.

    Args:
        observer: of the client; a round has begun.
        client: its name in the logs.

    Returns:
        None where a file cannot be written, which is announced.
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
    number, head = record.results_end()
    line = records.SentLine(
        run="", step=observer.round_, client=client, results=number, results_head=head
    )
    written = record.append(line)
    return None if written is None else records.code_of(key, written)


def note_head(record: RunRecord | None, round_: int, client: str | int, code: object) -> None:
    """Write to the server's log which code a client has sent; nothing where that is none.

    Args:
        record: of the server.
        round_: in which it arrived.
        client: whose.
        code: what came beside the model: anything, as a client may send what it likes.
    """
    if record is not None and re.fullmatch("[0-9a-f]{16}-[0-9a-f]{64}", str(code)):
        record.append(records.ClientLine(run="", step=round_, client=client, code=str(code)))


class HeadRecord:
    """The log of a server that watches nothing itself: ``run.jsonl`` with its clients' codes.

    Args:
        folder: where it is written.
    """

    def __init__(self, folder: str | Path) -> None:
        path = Path(folder) / records.RECORD
        self._record = RunRecord(path, uuid.uuid4().hex[:12], announce, ())
        self._record.append(records.BeginLine(run="", training={"strategy": "federation"}))
        self._rounds = 0

    def note(self, round_: int, client: str | int, code: object) -> None:
        """Write which code a client has sent in a round; nothing where that is none."""
        self._rounds = max(self._rounds, round_)
        note_head(self._record, round_, client, code)

    def end(self, outcome: str = "finished") -> None:
        """Close the log; the outcome is ``"finished"``, or the class of what was raised."""
        number, head = self._record.results_end()
        self._record.append(
            records.EndLine(
                run="", step=self._rounds, outcome=outcome, results=number, results_head=head
            )
        )
