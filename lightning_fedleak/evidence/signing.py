"""A statement about the files of a run, signed with ed25519.

The statement is an in-toto Statement (version 1) in a DSSE envelope (version 1); any reader of
these formats can check it.
"""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_fedleak.evidence.chain import read_chain
from lightning_fedleak.evidence.verdict import Verdict
from lightning_fedleak.extras import require_package
from lightning_fedleak.report import ReportError
from lightning_fedleak.report.records import RECORD, RESULTS, JsonObject, split_lines
from lightning_fedleak.validate import explain_errors

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric import ed25519

STATEMENT = "fedleak.dsse.json"
"""The file of the envelope, beside the logs."""
PAYLOAD_TYPE = "application/vnd.in-toto+json"
PREDICATE_TYPE = "urn:lightning-fedleak:run:1"
OTHERS = ("report.json", "report.html")
"""Files that are signed where they are, beside the logs."""


def sign_run(run: Path, key: Path) -> Path:
    """Sign the logs and the report of a run, and return the file of the envelope.

    A run that goes on later may add lines: those that were signed stay signed.

    Args:
        run: folder that holds ``leakage.jsonl`` and ``run.jsonl``.
        key: private ed25519 key in PEM, without a password.

    Raises:
        ReportError: a file cannot be read or is no such key, or the logs contradict themselves.
        ImportError: the package ``cryptography`` is not installed.
    """
    private: ed25519.Ed25519PrivateKey = _load_key(key, private=True)
    verdict = Verdict()
    logs = [read_chain(run / name, verdict) for name in (RECORD, RESULTS)]
    files = {n: (run / n).read_bytes() for n in (RECORD, RESULTS, *OTHERS) if (run / n).exists()}
    if verdict.contradictions:
        raise ReportError(f"these logs are not signed: {verdict.contradictions[0]}")
    statement = {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [
            {"name": name, "digest": {"sha256": _digest(content)}}
            for name, content in files.items()
        ],
        "predicateType": PREDICATE_TYPE,
        "predicate": {
            "logs": {log.name: {"lines": len(log.hashes), "head": log.head} for log in logs}
        },
    }
    payload = json.dumps(statement, sort_keys=True).encode()
    envelope = {
        "payloadType": PAYLOAD_TYPE,
        "payload": base64.b64encode(payload).decode(),
        "signatures": [
            {
                "keyid": _digest(private.public_key().public_bytes_raw()),
                "sig": base64.b64encode(private.sign(_encoding(payload))).decode(),
            }
        ],
    }
    path = run / STATEMENT
    path.write_text(json.dumps(envelope, indent=1) + "\n", encoding="utf-8")
    return path


def check_signature(run: Path, key: Path, verdict: Verdict) -> None:
    """Check that the files of a run are those that were signed, and by whom.

    Args:
        run: folder of the logs and the envelope.
        key: public key in PEM.
        verdict: gets what is wrong.

    Raises:
        ReportError: the key cannot be read.
        ImportError: the package ``cryptography`` is not installed.
    """
    public: ed25519.Ed25519PublicKey = _load_key(key, private=False)
    if not (run / STATEMENT).exists():
        verdict.contradict(f"{run / STATEMENT} is missing: the run was not signed")
        return
    statement = _signed_statement(run / STATEMENT, public)
    if statement is None:
        verdict.contradict(f"{STATEMENT} is not signed by the key in '{key}'")
        return
    digests = {one["name"]: one["digest"]["sha256"] for one in statement["subject"]}
    grown = False
    for name, log_then in statement["predicate"]["logs"].items():
        count, digest = log_then["lines"], digests.pop(name)
        lines = split_lines((run / name).read_bytes()) if (run / name).exists() else []
        first = b"\n".join(lines[:count])
        if len(lines) < count:
            verdict.contradict(
                f"{name} has {len(lines)} lines, and {count} were signed: it was cut"
            )
        elif digest not in (_digest(first), _digest(first + b"\n" * (count > 0))):
            verdict.contradict(f"{name}: its first {count} lines are not those that were signed")
        elif len(lines) > count:
            grown = True
            verdict.note(f"{name}: {len(lines) - count} lines were added after it was signed")
    for name, digest in digests.items():
        if not (run / name).exists():
            verdict.leave_open(f"{name} was signed, and is not there")
        elif _digest((run / name).read_bytes()) == digest:
            continue
        elif grown:
            verdict.leave_open(f"{name} is not the file that was signed, and the run has gone on")
        else:
            verdict.contradict(f"{name} is not the file that was signed")


def _signed_statement(path: Path, key: ed25519.Ed25519PublicKey) -> JsonObject | None:
    """Return the statement in an envelope; None where the key did not sign it."""
    from cryptography.exceptions import InvalidSignature

    try:
        envelope = json.loads(path.read_text(encoding="utf-8"))
        payload = base64.b64decode(envelope["payload"])
        [signature] = envelope["signatures"]
        key.verify(base64.b64decode(signature["sig"]), _encoding(payload))
        statement = json.loads(payload)
    except (InvalidSignature, ValueError, KeyError, TypeError, RecursionError):
        return None
    is_ours = statement.get("predicateType") == PREDICATE_TYPE
    return statement if is_ours and envelope.get("payloadType") == PAYLOAD_TYPE else None


def _encoding(payload: bytes) -> bytes:
    """Return what is signed: the pre-authentication encoding of DSSE, protocol section."""
    kind = PAYLOAD_TYPE.encode()
    return b"DSSEv1 %d %s %d %s" % (len(kind), kind, len(payload), payload)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _load_key(path: Path, *, private: bool) -> Any:
    """Return an ed25519 key in a PEM file."""
    with require_package("sign", "signatures need the package cryptography"):
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    key_class = ed25519.Ed25519PrivateKey if private else ed25519.Ed25519PublicKey
    unread = f"'{path}' cannot be read as a {'private' if private else 'public'} ed25519 key in PEM"
    hint = (
        "It must have no password. Make one with: openssl genpkey -algorithm ed25519 -out "
        "private.pem; openssl pkey -in private.pem -pubout -out public.pem"
    )
    with explain_errors(unread, OSError, ValueError, TypeError, error=ReportError, hint=hint):
        content = path.read_bytes()
        key: object = (
            serialization.load_pem_private_key(content, None)
            if private
            else serialization.load_pem_public_key(content)
        )
        if not isinstance(key, key_class):
            raise TypeError("it is of another kind")
    return key
