"""A ledger never touches a file that is not its own, and says what it does not take and why."""

from __future__ import annotations

import math
import os
import re
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_fedleak.defenses import DefenseError
from lightning_fedleak.defenses.accounting.account import Accountant
from lightning_fedleak.defenses.accounting.ledger import client_path

OWN = b"1.0 0.01 5\n0.5 1e-05 3\n"


def names(path: Path) -> str:
    """What begins the error of a ledger at ``path``: the argument."""
    return rf"^ledger={re.escape(repr(str(path)))} "


@pytest.mark.parametrize(
    "tail", [b"", b"7", b"2.0 0.", b"2.0 0.01 ", b"2.0 0.01 4", b"1e-", b"1\r"]
)
def test_reading_writes_nothing_and_half_a_line_goes_with_the_next_release(
    tmp_path: Path, tail: bytes
) -> None:
    path = tmp_path / "ledger"
    path.write_bytes(OWN + tail)
    ledger = Accountant(ledger=path)
    assert (ledger.steps, path.read_bytes()) == (8, OWN + tail)
    ledger.record(1.0, 0.01, 2)
    assert path.read_bytes() == OWN + b"1.0 0.01 2\n"
    assert ledger.steps == Accountant(ledger=path).steps == 10


@pytest.mark.parametrize(
    "text",
    [
        b"Dear diary",
        b"Dear diary\ntoday 1.0 0.01 5",
        b" ",
        b"\n",
        OWN + b"2.0 2.0 ",
        OWN + b"1_0",
        OWN + b"1 2 3 4",
        OWN + b"7" * 200,
        OWN + b"\xff\xfe",
        OWN + b"\n",
        OWN + b" 1.0 0.01 1\n",
        OWN + b"1.0 0.01 1 \n",
        OWN + "\uff11.0 0.01 1\n".encode(),
        OWN + b"nan 0.01 1\n",
        OWN + b"1.0 0.01 0\n",
        OWN + b"1.0 0.01 1" + b"0" * 5000 + b"\n",
    ],
    ids=lambda text: ascii(text[-24:]),
)
def test_a_file_of_someone_else_stays_as_it_was(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "ledger"
    path.write_bytes(text)
    with pytest.raises(DefenseError, match=names(path)) as refused:
        Accountant(ledger=path)
    assert path.read_bytes() == text
    assert "diary" not in str(refused.value)


@pytest.mark.parametrize("name", ["ledger.at-most-9-of-25", "ledger.at-most-9-of-25.0-of-2"])
@pytest.mark.parametrize("unit", ["example", "user"])
@pytest.mark.parametrize("clients", [1, 2])
def test_a_ledger_of_truncated_batches_is_not_gone_on_from(
    tmp_path: Path, name: str, unit: str, clients: int
) -> None:
    (tmp_path / name).touch()
    with pytest.raises(DefenseError, match=f"{names(tmp_path / name)}.*another unit of privacy"):
        client_path(tmp_path / "ledger", 0, clients, unit)


def folder(path: Path) -> None:
    path.mkdir()


def link(path: Path) -> None:
    path.with_name("target").write_bytes(OWN)
    path.symlink_to(path.with_name("target"))


def link_to_nowhere(path: Path) -> None:
    path.symlink_to(path.with_name("target"))


def pipe(path: Path) -> None:
    os.mkfifo(path)


def local_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as end:
        end.bind(str(path))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="makes pipes and sockets")
@pytest.mark.parametrize("make", [folder, link, link_to_nowhere, pipe, local_socket])
def test_what_is_no_file_is_neither_opened_nor_written(
    tmp_path: Path, monkeypatch, make: Callable[[Path], None]
) -> None:
    monkeypatch.chdir(tmp_path)  # a socket's name may not be long
    path = Path("ledger")
    make(path)
    before = sorted(p.name for p in Path().iterdir())

    def opened(*_: object) -> int:
        raise AssertionError("a pipe would wait here for ever")

    with monkeypatch.context() as closed:
        closed.setattr(os, "open", opened)
        with pytest.raises(DefenseError, match=names(path) + "is no regular file"):
            Accountant(ledger=path)
    assert sorted(p.name for p in Path().iterdir()) == before


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="makes pipes")
@pytest.mark.parametrize("make", [folder, link, pipe])
def test_what_took_the_place_of_the_file_is_not_written(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    path = tmp_path / "ledger"
    path.write_bytes(OWN)
    ledger = Accountant(ledger=path)
    path.unlink()
    make(path)
    with pytest.raises(DefenseError, match=names(path)):
        ledger.record(1.0, 0.01)
    assert ledger.steps == 8
    if path.is_symlink():
        assert path.read_bytes() == OWN


def test_what_another_wrote_behind_a_torn_line_is_not_cut(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "ledger"
    path.write_bytes(OWN)
    ledger, write = Accountant(ledger=path), os.write

    def beside(descriptor: int, data: bytes) -> int:
        written = write(descriptor, data[:3])
        write(descriptor, b"someone else's")
        return written

    monkeypatch.setattr(os, "write", beside)
    with pytest.raises(DefenseError, match=names(path)):
        ledger.record(1.0, 0.01)
    assert path.read_bytes().endswith(b"someone else's")
    assert ledger.steps == 8


def test_a_full_disk_behind_half_a_line_counts_nothing(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "ledger"
    path.write_bytes(OWN + b"1.0 0")
    ledger, write = Accountant(ledger=path), os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:7]))
    with pytest.raises(DefenseError, match="fit on the disk"):
        ledger.record(1.0, 0.01)
    monkeypatch.undo()
    assert path.read_bytes() == OWN
    ledger.record(1.0, 0.01, 2)
    assert ledger.steps == Accountant(ledger=path).steps == 10


@pytest.mark.parametrize("count", [5, 5.0])
def test_whatever_is_recorded_can_be_read_again(tmp_path: Path, count: float) -> None:
    path = tmp_path / "ledger"
    ledger = Accountant(ledger=path)
    for sigma, rate in ((-0.0, 1), (1, 5e-324), (1.7976931348623157e308, 0.1), (1e16, 1e-5)):
        ledger.record(sigma, rate, count)  # type: ignore[arg-type]
    assert Accountant(ledger=path).history == ledger.history
    assert all(isinstance(row[2], int) for row in ledger.history)


@pytest.mark.parametrize("bad", [math.nan, math.inf, 0.0, 1.5])
def test_of_a_checkpoint_that_holds_no_counts_nothing_is_taken(tmp_path: Path, bad: float) -> None:
    other = Accountant()
    other.record(1.0, 0.01, 3)
    other.record(2.0, 0.01, 3)
    state = other.state_dict()
    state["releases"][1, 2] = bad
    path = tmp_path / "ledger"
    ledger = Accountant(ledger=path)
    with pytest.raises(DefenseError, match="count"):
        ledger.load_state_dict(state)
    assert ledger.steps == 0
    assert not path.exists()
