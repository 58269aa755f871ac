"""Folders of runs that somebody else packed: no file outside of them is read."""

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from lightning_fedleak import private_files
from lightning_fedleak.evidence import verify_run
from lightning_fedleak.evidence.chain import Verdict
from lightning_fedleak.evidence.verification import _check_report
from lightning_fedleak.report import ReportError, read, write
from lightning_fedleak.report.records import RECORD, RESULTS, as_json
from tests.report.lines import begin, dpsgd, end, look, result, spent, written

PIN = "4711\n"
HASH = hashlib.sha256(PIN.encode()).hexdigest()


def packed(folder: Path, **settings: Any) -> Path:
    """Write a run with an account, whose log holds these settings."""
    record = [begin(defenses=[dpsgd(**settings)]), look(3, privacy=[spent(2.0, 3)]), end(4)]
    written(folder, [result(0, f1=0.1)], record)
    return folder


def report_of(folder: Path) -> Mapping[str, Any]:
    """Return the report that the reader makes of a folder."""
    page, content = write([folder])
    assert HASH not in page.read_text() + content.read_text()
    report: Mapping[str, Any] = json.loads(content.read_text())
    return report


@pytest.mark.parametrize(
    "path", ["{secret}", "../secret", "../run/../secret", "link", "/", "..", "."]
)
def test_a_log_names_no_file_of_its_reader(tmp_path: Path, path: str) -> None:
    secret = tmp_path / "secret"
    secret.write_text(PIN)
    folder = packed(tmp_path / "run", ledger=path.format(secret=secret))
    (folder / "link").symlink_to(secret)
    [account] = report_of(folder)["runs"][0]["privacy"]
    assert account["ledger_releases"] == {}
    assert set(account["ledger"].values()) <= {
        "not beside the logs: copy it there",
        "cannot be read: OSError",
    }


@pytest.mark.parametrize("content", [PIN, "the private text that an attack recovered\n"])
def test_what_is_no_ledger_has_no_hash(tmp_path: Path, content: str) -> None:
    """A private file in the run's own folder, such as recovered texts."""
    folder = packed(tmp_path / "run", ledger="revealed_words.rank0.txt")
    (folder / "revealed_words.rank0.txt").write_text(content)
    write([folder])
    report = (folder / "report.json").read_text()
    assert hashlib.sha256(content.encode()).hexdigest() not in report
    assert "no hash: not all lines are releases" in report


def test_a_ledger_elsewhere_is_counted_once_it_is_copied_beside_the_logs(tmp_path: Path) -> None:
    folder = packed(tmp_path / "run", ledger=str(tmp_path / "ledger"))
    [account] = report_of(folder)["runs"][0]["privacy"]
    assert "Its ledger is not beside the logs" in account["statement"]
    (folder / "ledger").write_text("1.0 0.01 40\n")
    verdict = Verdict()
    _check_report(folder / "report.json", folder, read([folder]).fits, as_json, verdict)
    [question] = verdict.open
    assert "older than the logs or the ledger beside them" in question
    [account] = report_of(folder)["runs"][0]["privacy"]
    assert account["ledger_releases"] == {"ledger": 40}
    assert "The ledger counts more releases" in account["statement"]


@pytest.mark.parametrize("name", [RECORD, RESULTS, "report.toml", "report.json", "report.html"])
def test_links_in_an_archive_are_not_followed(tmp_path: Path, name: str) -> None:
    folder = packed(tmp_path / "run")
    secret = tmp_path / "secret"
    secret.write_text(PIN)
    write([folder])
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(secret)
    with suppress(ReportError):
        assert verify_run(folder).status != 0
    if name == "report.toml":
        with pytest.raises(ReportError, match=r"report\.toml' cannot be read"):
            write([folder])
    elif name in (RECORD, RESULTS):
        [*_, problem] = report_of(folder)["problems"]
        assert problem.startswith(f"run/{name} cannot be read")


def test_a_file_without_an_end_is_read_to_a_limit(tmp_path, monkeypatch) -> None:
    folder = packed(tmp_path / "run", ledger="ledger")
    (folder / "ledger").write_text("1.0 0.01 3\n" * 1000)
    monkeypatch.setattr(private_files, "MAX_BYTES", 5000)
    [account] = report_of(folder)["runs"][0]["privacy"]
    assert account["ledger"] == {"ledger": "cannot be read: OSError"}
    monkeypatch.setattr(private_files, "MAX_BYTES", 20)
    with pytest.raises(ReportError, match="of at most 20 bytes"):
        verify_run(folder)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", [RESULTS, "ledger", "report.toml"])
def test_a_pipe_does_not_block(tmp_path: Path, name: str) -> None:
    folder = packed(tmp_path / "run", ledger="ledger")
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    assert report_of(folder)["runs"]
