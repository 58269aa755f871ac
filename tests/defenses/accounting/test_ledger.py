"""A ledger never touches a file that is not its own, and says what it does not take and why."""

from __future__ import annotations

import errno
import math
import os
import re
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_fedleak.defenses import DefenseError
from lightning_fedleak.defenses.accounting.accounting import Accountant
from lightning_fedleak.defenses.accounting.ledger import MOST_RELEASES, Ledger, client_path
from lightning_fedleak.defenses.accounting.renyi_filter import RenyiFilter

OWN = b"1.0 0.01 5\n0.5 1e-05 3\n"
TOO_MANY = str(MOST_RELEASES + 1).encode()


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
    ledger = Ledger(path)
    assert (len(ledger), path.read_bytes()) == (8, OWN + tail)
    ledger.record(1.0, 0.01, 2)
    assert path.read_bytes() == OWN + b"1.0 0.01 2\n"
    assert len(ledger) == len(Ledger(path)) == 10


@pytest.mark.parametrize(
    "text",
    [
        b"Dear diary",
        b"Dear diary\ntoday 1.0 0.01 5",
        b"3.14",
        b" ",
        b"\n",
        OWN + b"and a word",
        OWN + b"2.0 x",
        OWN + b"2.0 2.0 ",
        OWN + b"1_0",
        OWN + b"1 2 3 4",
        OWN + b"7" * 200,
        OWN + b"\xff\xfe",
        OWN + b"\n",
        OWN + b"hello\n" + OWN,
        OWN + b"1.0 0.01 1_0\n",
        OWN + b"1.0 0.01 +1\n",
        OWN + b"1.0 0.01 01\n",
        OWN + b"1.0 0.01 5.0\n",
        OWN + b"1_0.0 0.01 1\n",
        OWN + b"+1.0 0.01 1\n",
        OWN + b" 1.0 0.01 1\n",
        OWN + b"1.0  0.01 1\n",
        OWN + b"1.0 0.01 1 \n",
        OWN + b"1.0\t0.01\t1\n",
        OWN + b"1 0.01 1\n",
        OWN + "1.0 0.01 \u0665\n".encode(),
        OWN + "\uff11.0 0.01 1\n".encode(),
        OWN + b"nan 0.01 1\n",
        OWN + b"inf 0.01 1\n",
        OWN + b"1.0 0.01 0\n",
        OWN + b"1.0 0.01 -1\n",
        OWN + b"1.0 0.01 " + TOO_MANY + b"\n",
        OWN + b"1.0 0.01 " + str(MOST_RELEASES).encode() + b"\n",
        OWN + b"1.0 0.01 1" + b"0" * 400 + b"\n",
        OWN + b"1.0 0.01 1" + b"0" * 5000 + b"\n",
    ],
    ids=lambda text: ascii(text[-24:]),
)
def test_a_file_of_someone_else_stays_as_it_was(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "ledger"
    path.write_bytes(text)
    with pytest.raises(DefenseError, match=names(path)) as refused:
        Ledger(path)
    assert path.read_bytes() == text
    assert "diary" not in str(refused.value)


def test_a_file_of_gigabytes_is_not_read_to_its_end(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "weights.bin"
    with path.open("wb") as file:
        file.truncate(1 << 42)  # holds no block of the disk

    def refuse(*_: object) -> bytes:
        raise AssertionError("all of it was read")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(DefenseError, match="line 1"):
        Ledger(path)
    assert path.stat().st_size == 1 << 42


def test_a_ledger_of_another_system_is_gone_on_with(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    path.write_bytes(b"1.0 0.01 5\r\n0.5 0.1 3\r\n")
    ledger = Ledger(path)
    ledger.record(1.0, 0.01)
    assert len(ledger) == len(Ledger(path)) == 9


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
@pytest.mark.parametrize(
    ("make", "what"),
    [
        (folder, "is a folder"),
        (link, "is a link"),
        (link_to_nowhere, "is a link"),
        (pipe, "is no file"),
        (local_socket, "is no file"),
    ],
)
def test_what_is_no_file_is_neither_opened_nor_written(
    tmp_path: Path, monkeypatch, make: Callable[[Path], None], what: str
) -> None:
    monkeypatch.chdir(tmp_path)  # a socket's name may not be long
    path = Path("ledger")
    make(path)
    before = sorted(p.name for p in Path().iterdir())

    def opened(*_: object) -> int:
        raise AssertionError("a pipe would wait here for ever")

    with monkeypatch.context() as closed:
        closed.setattr(os, "open", opened)
        with pytest.raises(DefenseError, match=names(path) + what):
            Ledger(path)
    assert sorted(p.name for p in Path().iterdir()) == before


def test_a_device_is_refused() -> None:
    with pytest.raises(DefenseError, match=names(Path(os.devnull)) + "is no file"):
        Ledger(os.devnull)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="makes pipes")
@pytest.mark.parametrize("make", [folder, link, pipe])
def test_what_took_the_place_of_the_file_is_not_written(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    path = tmp_path / "ledger"
    path.write_bytes(OWN)
    ledger = Ledger(path)
    path.unlink()
    make(path)
    with pytest.raises(DefenseError, match=names(path)):
        ledger.record(1.0, 0.01)
    assert len(ledger) == 8
    if path.is_symlink():
        assert path.read_bytes() == OWN


@pytest.mark.parametrize("where", ["file/ledger", "n" * 300, "a\0b"])
def test_a_path_that_cannot_be_is_refused(tmp_path: Path, where: str) -> None:
    (tmp_path / "file").write_bytes(OWN)
    with pytest.raises(DefenseError, match=r"^ledger=.* cannot be read"):
        Ledger(tmp_path / where)
    assert (tmp_path / "file").read_bytes() == OWN


def test_a_file_that_may_not_be_read_is_refused(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "ledger"
    path.write_bytes(OWN)

    def denied(*_: object) -> int:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "open", denied)
    with pytest.raises(DefenseError, match=names(path) + "cannot be read.*Permission denied"):
        Ledger(path)
    assert path.read_bytes() == OWN


def test_what_another_wrote_behind_a_torn_line_is_not_cut(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "ledger"
    path.write_bytes(OWN)
    ledger, write = Ledger(path), os.write

    def beside(descriptor: int, data: bytes) -> int:
        written = write(descriptor, data[:3])
        write(descriptor, b"someone else's")
        return written

    monkeypatch.setattr(os, "write", beside)
    with pytest.raises(DefenseError, match=names(path)):
        ledger.record(1.0, 0.01)
    assert path.read_bytes().endswith(b"someone else's")
    assert len(ledger) == 8


def test_a_full_disk_behind_half_a_line_counts_nothing(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "ledger"
    path.write_bytes(OWN + b"1.0 0")
    ledger, write = Ledger(path), os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:7]))
    with pytest.raises(DefenseError, match="fit on the disk"):
        ledger.record(1.0, 0.01)
    monkeypatch.undo()
    assert path.read_bytes() == OWN
    ledger.record(1.0, 0.01, 2)
    assert len(ledger) == len(Ledger(path)) == 10


@pytest.mark.parametrize(
    "count",
    [0, -1, 1.5, True, "1_0", "1", math.inf, math.nan, None, MOST_RELEASES + 1, 10**400, 10**5000],
    ids=lambda count: (
        str(count)[:8] if not isinstance(count, int) else f"{float(min(count, 1e99))}"
    ),
)
def test_a_count_that_is_none_is_refused_by_name(tmp_path: Path, count: object) -> None:
    path = tmp_path / "ledger"
    ledger = Ledger(path)
    with pytest.raises(DefenseError, match=r"^count"):
        ledger.record(1.0, 0.01, count)  # type: ignore[arg-type]
    assert len(ledger) == 0
    assert not path.exists()


def test_no_kind_of_release_is_counted_beyond_the_bound(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    ledger = Ledger(path)
    ledger.record(1.0, 0.01, MOST_RELEASES)
    ledger.record(2.0, 0.01)
    with pytest.raises(DefenseError, match=r"^count"):
        ledger.record(1.0, 0.01)
    assert Ledger(path).rows == ledger.rows == ((1.0, 0.01, MOST_RELEASES), (2.0, 0.01, 1))
    pytest.importorskip("opacus")
    accountant = Accountant("rdp", ledger=path)
    assert accountant.history == ledger.rows
    assert accountant.epsilon(1e-5) == math.inf
    resumed = RenyiFilter(6.0, 1e-5)
    resumed.load_state_dict(accountant.state_dict())
    assert resumed.history == ledger.rows


@pytest.mark.parametrize("count", [5, 5.0])
def test_whatever_is_recorded_can_be_read_again(tmp_path: Path, count: float) -> None:
    path = tmp_path / "ledger"
    ledger = Ledger(path)
    for sigma, rate in ((-0.0, 1), (1, 5e-324), (1.7976931348623157e308, 0.1), (1e16, 1e-5)):
        ledger.record(sigma, rate, count)  # type: ignore[arg-type]
    assert Ledger(path).rows == ledger.rows
    assert all(isinstance(row[2], int) for row in ledger.rows)


@pytest.mark.parametrize("bad", [math.nan, math.inf, 0.0, 1.5, MOST_RELEASES + 1.0])
def test_of_a_checkpoint_that_holds_no_counts_nothing_is_taken(tmp_path: Path, bad: float) -> None:
    other = Ledger()
    other.record(1.0, 0.01, 3)
    other.record(2.0, 0.01, 3)
    state = other.state_dict()
    state["releases"][1, 2] = bad
    path = tmp_path / "ledger"
    ledger = Ledger(path)
    with pytest.raises(DefenseError, match="count"):
        ledger.load_state_dict(state)
    assert len(ledger) == 0
    assert not path.exists()


def test_a_folder_is_no_ledger_of_another_number_of_clients(tmp_path: Path) -> None:
    with pytest.raises(DefenseError, match=names(tmp_path) + "is a folder"):
        client_path(tmp_path, 0, 2)
