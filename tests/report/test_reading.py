import json

import pytest

from lightning_fedleak.cli import main
from lightning_fedleak.report import ReportError, findings, page, read
from tests.report.lines import begin, end, result, written


def test_a_line_that_cannot_be_read_is_named_and_costs_no_other(tmp_path):
    folder = written(tmp_path, [result(0, f1=0.5), result(1, f1=0.7)])
    with (folder / "leakage.jsonl").open("a") as file:
        file.write('{"half": \n[1, 2]\n')
        file.write(json.dumps({"schema": 4, "step": 2}) + "\n")
        file.write(json.dumps(result(3, f1=0.1) | {"schema": 99}) + "\n")
        file.write(json.dumps(result(4, f1=0.9)) + "\n")
    reading = read([folder])
    assert [line.step for line in reading.fits[0].results] == [0, 1, 4]
    broken, other, odd = reading.problems
    assert broken.startswith("2 of the lines of")
    assert broken.endswith("cannot be read: 3, 4")
    assert other.endswith("are of another version: 6")
    assert str(tmp_path) not in " ".join(reading.problems)
    assert odd.endswith("are not as a run writes them: 5 (stage is missing)")


@pytest.mark.parametrize("huge", [1e308, -1e308, 1e200])
def test_a_rate_that_no_run_gets_to_ends_neither_report_nor_comparison(tmp_path, capsys, huge):
    """The sum of three of them is no float64."""
    lines = [result(step, f1=(huge, -huge, huge)) for step in range(3)]
    before = written(tmp_path / "a", [*lines, result(3, f1=0.5)], [begin(), end(9)])
    after = written(tmp_path / "b", [result(0, run="b", f1=0.25)], [begin("b"), end(9, "b")])
    found = findings(read([before]))
    [attack] = found.runs[0].attacks
    assert (attack.mean, attack.looks) == (0.5, 1)
    assert "1 (metrics/f1/value), 2 (metrics/f1/value)" in " ".join(found.problems)
    assert page(found)
    for places in ((before, after), (after, before)):
        assert main(["compare", *map(str, places)]) == 0
    assert "0.50" in capsys.readouterr().out


def test_results_of_the_first_version_are_one_fit(tmp_path):
    folder = written(tmp_path, [result(s, run=None, f1=0.25) for s in range(3)])
    found = findings(read([folder]))
    [fit] = found.runs
    assert not fit.recorded
    assert fit.shared.description == "not recorded"
    [attack] = fit.attacks
    assert (attack.family.name, attack.mean, attack.looks) == ("words", 0.25, 3)
    assert "which shared parameters no attack tests: not recorded" in fit.not_tested
    assert found.overviews[0].readings[0].answer == "0.25"


def test_fits_stand_in_the_order_in_which_they_began(tmp_path):
    for name, time in (
        ("a_late", "2026-02-02T00:00:00+00:00"),
        ("b_early", "2026-01-01T00:00:00+00:00"),
    ):
        written(tmp_path / name, [result(0, run=name, f1=0.1)], [begin(name, time=time)])
    assert [fit.folder.name for fit in read([tmp_path]).fits] == ["b_early", "a_late"]


def test_a_copy_of_a_run_is_not_counted_again(tmp_path):
    early, whole = [result(0, f1=0.1)], [result(0, f1=0.1), result(5, f1=0.9)]
    written(tmp_path / "logs/a_backup", early, [begin()])
    written(tmp_path / "logs/version_0", whole, [begin(), end(6)])
    written(tmp_path / "logs/version_0_copy", whole, [begin(), end(6)])
    reading = read([tmp_path])
    [fit] = reading.fits
    assert (fit.folder.name, len(fit.results), fit.end.step) == ("version_0", 2, 6)
    said = "run a is in logs/version_0 and in logs/{}: only the first is counted"
    assert reading.problems == (said.format("version_0_copy"), said.format("a_backup"))
    for client in (0, 1):  # of two processes that began as one
        lines = [result(0, f1=0.1) | {"client": client}]
        written(tmp_path / "clients" / str(client), lines)
    assert len(read([tmp_path / "clients"]).fits) == 2
    for name in ("a", "b"):  # of the first versions, which had no ids
        written(tmp_path / "old" / name, [result(0, run=None, f1=0.1)])
    assert len(read([tmp_path / "old"]).fits) == 2


@pytest.mark.parametrize("place", ["nowhere", "empty"])
def test_nothing_to_report_is_said(tmp_path, place):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ReportError, match=place):
        read([tmp_path / place])
