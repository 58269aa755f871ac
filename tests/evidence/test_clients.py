"""A server's log holds codes of its clients' logs, which one who rewrites them does not meet."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_fedleak.attacks import BagOfWords
from lightning_fedleak.evidence import CONTRADICTED, HOLDS, verify_run
from lightning_fedleak.federation import OutgoingUpdates, RoundObserver, trained_state
from lightning_fedleak.federation.heads import HeadRecord, head_of
from lightning_fedleak.report.records import CHAIN_KEY, RECORD, RESULTS, hash_line
from tests.evidence.test_verification import chained_again, fedleak, lines_of, lower
from tests.federation.rounds import SGD, batches, model, round_settings, train


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two clients, of which the second ends without a last line, and a server; three rounds."""
    folder = tmp_path_factory.mktemp("federation")
    server, sent = HeadRecord(folder / "server"), trained_state(model())
    ways = []
    for client in (0, 1):
        arguments, rare = round_settings({"attacks": [BagOfWords()]})
        where = folder / f"site{client}"
        observer = RoundObserver(model(), SGD, 2, folder=where, settings=rare, **arguments)
        ways.append(OutgoingUpdates(observer, client=client))
    for round_ in range(3):
        for client, way in enumerate(ways):
            data = batches(10 * round_ + client)
            way.leaves(round_, sent, train(model(), data), data)
            server.note(round_, f"site-{client}", head_of(way.observer, client))
    server.note(2, "site-9", "a client may send what it likes")
    ways[0].observer.end()
    server.end()
    return folder


@pytest.fixture
def federation(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "copy"))


def test_honest_clients_hold_wherever_they_are(federation: Path, tmp_path: Path) -> None:
    check = verify_run(federation / "server")
    assert check.verdict.status == HOLDS, check.verdict
    assert [text for text in check.checked if "site" in text] == [
        f"logs of client site-{n}: '{federation}/site{n}'" for n in (0, 1)
    ]
    assert check.lines[RECORD] == 1 + 6 + 1
    moved = Path(shutil.move(federation / "site1", tmp_path / "elsewhere"))
    check = verify_run(federation / "server")
    assert check.verdict.status == HOLDS
    assert "logs of client site-1: --client DIR" in check.not_checked
    given = ["--client", str(moved), "--client", str(federation / "site0")]
    assert fedleak("verify", str(federation / "server"), *given) == HOLDS


def rewrite(folder: Path, line: int = 1) -> None:
    """Halve a number of a look, and compute all hashes of both logs again."""
    lines = lines_of(folder / RESULTS)
    lower(lines, line)
    lines = chained_again(lines)
    (folder / RESULTS).write_bytes(b"\n".join(lines) + b"\n")
    record = [json.loads(line) for line in lines_of(folder / RECORD)]
    for one in record:
        if "results_head" in one:
            one["results_head"] = hash_line(lines[one["results"] - 1])
    again = chained_again([json.dumps(line).encode() for line in record])
    (folder / RECORD).write_bytes(b"\n".join(again) + b"\n")


def change_plainly(folder: Path) -> None:
    lines = lines_of(folder / RESULTS)
    lower(lines, 0)
    (folder / RESULTS).write_bytes(b"\n".join(lines) + b"\n")


def cut(folder: Path) -> None:
    """Forget the last round, as if the client had been killed before it."""
    (folder / RESULTS).write_bytes(b"\n".join(lines_of(folder / RESULTS)[:2]) + b"\n")
    lines = lines_of(folder / RECORD)
    sent = [n for n, line in enumerate(lines) if b'"kind": "sent"' in line]
    (folder / RECORD).write_bytes(b"\n".join(lines[: sent[1] + 1]) + b"\n")


@pytest.mark.parametrize("edit", [rewrite, change_plainly, cut], ids=lambda edit: edit.__name__)
@pytest.mark.parametrize("site", ["site0", "site1"])
def test_a_client_that_is_rewritten_is_named(
    federation: Path, edit: Callable[[Path], None], site: str
) -> None:
    edit(federation / site)
    if edit is not change_plainly:  # its own hashes fit
        assert verify_run(federation / site).verdict.status != CONTRADICTED
    verdict = verify_run(federation / "server").verdict
    assert verdict.status == CONTRADICTED
    assert all(f"/{site}'" in text for text in verdict.contradictions), verdict.contradictions
    if edit is rewrite:
        [text] = verdict.contradictions
        assert "the code of round 1 is of no line" in text


@pytest.mark.parametrize("edit", ["replayed", "misplaced", "missing"])
def test_codes_are_each_of_their_round(federation: Path, edit: str) -> None:
    place = federation / "server" / RECORD
    lines = [json.loads(line) for line in lines_of(place)]
    codes = [n for n, one in enumerate(lines) if one.get("client") == "site-1"]
    if edit == "replayed":
        lines[codes[2]]["code"] = lines[codes[1]]["code"]
    elif edit == "misplaced":  # the code of round 1, as one of round 2
        lines[codes[2]]["code"] = lines[codes[1]]["code"]
        del lines[codes[1]]
    else:
        del lines[codes[1]]
    again = chained_again([json.dumps(line).encode() for line in lines])
    place.write_bytes(b"\n".join(again) + b"\n")
    check = verify_run(federation / "server")
    if edit == "missing":
        assert check.verdict.status == HOLDS
        assert "client site-1, rounds 1 to 1: they carry no code" in check.not_checked
    else:
        [text] = check.verdict.contradictions
        assert "of another round" in text


def test_logs_of_another_federation_are_no_client(federation: Path) -> None:
    (federation / "site1" / CHAIN_KEY).chmod(0o600)
    key = json.loads((federation / "site1" / CHAIN_KEY).read_text())["key"]
    (federation / "site1" / CHAIN_KEY).write_text(json.dumps({"key": key[::-1]}))
    assert verify_run(federation / "server").verdict.status == HOLDS  # it is beside, not given
    [text] = verify_run(
        federation / "server", clients=[federation / "site1"]
    ).verdict.contradictions
    assert "the server noted no code of these logs" in text


def test_the_server_gets_nothing_that_it_could_guess(federation: Path) -> None:
    """Codes are no hashes of the lines, the key is the client's, and others cannot read it."""
    codes = [json.loads(line).get("code") for line in lines_of(federation / "server" / RECORD)]
    hashes = [
        hash_line(line)
        for site in ("site0", "site1")
        for line in lines_of(federation / site / RECORD)
    ]
    assert not {code.partition("-")[2] for code in codes if code}.intersection(hashes)
    assert len({code for code in codes if code}) == 6
    assert (federation / "site0" / CHAIN_KEY).stat().st_mode & 0o777 == 0o600


def test_a_key_that_cannot_be_read_ends_no_round(federation: Path, caplog: Any) -> None:
    arguments, rare = round_settings({"attacks": [BagOfWords()]})
    observer = RoundObserver(
        model(), SGD, 2, folder=federation / "site0", settings=rare, **arguments
    )
    observer.begin(0, trained_state(model()))
    (federation / "site0" / CHAIN_KEY).write_text("nonsense")
    assert head_of(observer, 0) is None
