"""The page of a run: what it shows, what it loads, and what it says of files it cannot read."""

import base64
import hashlib
import json
import math
import re

import pytest

from lightning_fedleak.cli import main
from lightning_fedleak.report import ReportError, findings, page, read
from lightning_fedleak.report.records import as_json
from tests.report.lines import (
    about,
    begin,
    decision,
    dpsgd,
    end,
    entry,
    found_in,
    look,
    result,
    spent,
    written,
)

HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=y>{{7*7}}"


def hostile_run():
    """Return lines and a record whose attacks, gates and settings have markup as names."""
    attacks = [about(HOSTILE, "words") | {"config": {HOSTILE: HOSTILE}, "adversary": HOSTILE}]
    gate = {"name": HOSTILE, "metric": HOSTILE, "at_most": 0.5, "action": HOSTILE, "bound": "value"}
    record = [
        begin(attacks=attacks, gates=[gate], unread=[HOSTILE], defenses=[dpsgd(x=HOSTILE)]),
        look(0, utility={HOSTILE: 1.0}, privacy=[spent(1.0, 1)]),
        entry("gate", "a", step=0, hardened=[HOSTILE])
        | dict.fromkeys(("gate", "did", "why", "of", "metric"), HOSTILE),
    ]
    lines = [result(0, HOSTILE, f1=(0.5, 0.4, 0.6)), result(1, HOSTILE)]
    lines[1]["unknown"] = HOSTILE
    return lines, record


def hostile_federation():
    """Return lines and a record whose clients and mechanisms have markup as names."""
    settings = {"mechanism": HOSTILE, "domain": HOSTILE, "labels": HOSTILE, "epsilon": 1.0}
    defense = {"name": HOSTILE, "class": "TokenLDP", "guarantee": HOSTILE, "settings": settings}
    cost = {"defense": HOSTILE, "epsilon": 1.0, "delta": 0.0, "releases": 1, "history": []}
    record = [
        begin(attacks=[about(HOSTILE, "words")], defenses=[defense], fit=HOSTILE,
              training={"strategy": "federation"}),
        *(look(r, client=f"{HOSTILE}{r}", utility={"loss": 1.0}, privacy=[cost]) for r in (0, 1)),
        decision("withheld", 1, f"{HOSTILE}1"),
        decision(HOSTILE, 0, f"{HOSTILE}0"),
    ]  # fmt: skip
    lines = [
        result(r, HOSTILE, f1=(0.5, 0.4, 0.6)) | {"client": f"{HOSTILE}{c}"}
        for r in (0, 1)
        for c in range(12)
    ]
    odd = look(0) | {"utility": {HOSTILE: HOSTILE}}
    return lines, [*record, odd]


@pytest.mark.parametrize("of_a_run", [True, False])
def test_names_are_text(tmp_path, of_a_run):
    lines, record = hostile_run() if of_a_run else hostile_federation()
    found = findings(read([written(tmp_path / "run", lines, record)]), {"x": {"y": HOSTILE}})
    html = page(found, {HOSTILE: HOSTILE})
    assert html.count("<script") == 1
    assert "<img" not in html
    assert "{{7*7}}" in html
    assert "&lt;script&gt;" in html
    assert of_a_run or "utility/&lt;script&gt;" in html


def test_the_page_asks_no_host_for_anything(tmp_path):
    html = page(found_in(tmp_path, [result(0, f1=0.5)], [begin(), look(0)]))
    assert not re.search(r"https?:|src=|href=\"[^#]|@import|url\(", html)
    script = re.search(r"<script>(.*)</script>", html, re.S)[1]
    allowed = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{allowed}'" in html.replace("&#39;", "'")
    assert "default-src 'none'" in html


def test_unknown_rates_and_settings_that_are_none_were_recorded(tmp_path):
    record = begin(training={"gradient_clip_val": None})
    html = page(found_in(tmp_path, [result(0, f1=0.0)], [record]))
    assert "f1 0.000, recall unknown, precision unknown" in html
    assert "gradient_clip_val none" in html


@pytest.mark.parametrize("looks", [1, 40, 700])
def test_a_line_has_a_point_for_each_look_or_for_the_highest_of_a_bin(tmp_path, looks):
    values = [(37 * step % 100) / 100 for step in range(looks)]
    lines = [result(s, f1=(v, max(0.0, v - 0.05), v)) for s, v in enumerate(values)]
    html = page(found_in(tmp_path, lines, [begin(), end(looks)]))
    table = html.partition("As a table")[2].partition("</table>")[0]
    shown = re.findall(r"<td[^>]*>(>?0\.\d\d|1\.00)", table)
    assert (f"the highest of {math.ceil(looks / 120)} measurements" in html) == (looks > 120)
    assert len(shown) == table.count("data-place") == math.ceil(looks / math.ceil(looks / 120))
    assert max(shown) == f"{max(values):.2f}"


def test_unknown_looks_are_gaps(tmp_path):
    lines = [result(s, f1=(0.5, 0.4, 0.6)) if s != 2 else result(s) for s in range(5)]
    html = page(found_in(tmp_path, lines, [begin()]))
    assert re.search(r'class="line read" d="M[^M"]*L[^M"]*M[^M"]*L[^M"]*"', html)
    assert len(re.findall("[ML]", re.search(r'class="line read" d="([^"]*)"', html)[1])) == 4
    assert ">unknown</td>" in html


def heat_map(found):
    """The rows of a page's map of clients: names, and cells."""
    table = page(found).partition('class="heat"')[2].partition("</table>")[0]
    return re.findall(r'<th scope="row">([^<]*)</th>(.*?)</tr>', table)


def test_a_heat_map_has_a_row_for_each_client_and_their_sum(tmp_path):
    lines = [
        result(r, f1=(v, v - 0.1, v)) | {"client": c}
        for r in (1, 2)
        for c, v in enumerate((0.3, 0.4, 0.9))
    ]
    lines += [result(1, stage="aggregate", f1=(0.2, 0.1, 0.3)) | {"client": "sum"}]
    record = [begin(training={"strategy": "federation"}), decision("withheld", 2, 2)]
    rows = heat_map(found_in(tmp_path, lines, record))
    assert [name for name, _ in rows] == ["client 2", "client 1", "client 0", "sum of all clients"]
    assert re.findall(r">([^<>]+)", rows[0][1]) == ["0.90", "(0.90)", "0.90"]
    assert "h9" in rows[0][1]
    assert re.findall(r">([^<>]+)", rows[3][1]) == ["0.20", "0.20"]


def test_a_client_without_any_known_value_has_no_mean_in_the_heat_map(tmp_path):
    lines = [result(1, f1=(0.3, 0.2, 0.4)), result(1) | {"client": 1}]
    rows = heat_map(found_in(tmp_path, lines, [begin(training={"strategy": "federation"})]))
    assert [name for name, _ in rows] == ["client 0", "client 1"]
    assert re.findall(r">([^<>]+)", rows[1][1]) == ["?", "?"]


SIZE = 150_000
"""Most bytes of a page."""


def test_five_hundred_looks_are_a_small_page(tmp_path):
    names = [f"attack_{n}" for n in range(8)]
    lines = [
        result(s, n, stage=stage, f1=(0.5, 0.4, 0.6), f1_of_control=0.9)
        for s in range(500)
        for n in names
        for stage in (("local", "shared") if n == names[0] else ("shared",))
    ]
    record = [begin(attacks=[about(n, "words") for n in names], defenses=[dpsgd(accountant="rdp")])]
    record += [
        look(s, utility={"train_loss": 1 / (s + 1), "val_loss": 2.0 - s / 500},
             privacy=[spent(1 + s / 9, s)] if s % 249 == 1 else [])
        for s in range(500)
    ]  # fmt: skip
    assert len(page(found_in(tmp_path, lines, record)).encode()) < SIZE


def test_a_hundred_clients_and_fifty_rounds_are_a_small_page(tmp_path):
    lines = [result(r, f1=(0.9, 0.8, 1.0)) | {"client": c} for r in range(50) for c in range(100)]
    record = [begin(training={"strategy": "federation"})]
    html = page(found_in(tmp_path, lines, record))
    assert len(html.encode()) < SIZE
    assert "highest of 81 more" in html
    assert "A square is the highest of 3 rounds." in html


@pytest.mark.parametrize("runs", [2, 3, 8])
def test_several_runs_are_a_small_page(tmp_path, runs):
    for run in (f"r{n}" for n in range(runs)):
        record = [begin(run, attacks=[about("flatchat", "words"), about("game", "membership")])]
        record += [look(s, run, utility={"val_loss": 2 - s / 99, "loss": 1.0}) for s in range(100)]
        lines = [result(s, run=run, f1=(0.5 + s / 999, 0.4, 0.6)) for s in range(100)]
        lines += [result(s, "game", run=run, auc=(0.7, 0.6, 0.7 + s / 999)) for s in range(100)]
        written(tmp_path / run, lines, record)
    html = page(findings(read([tmp_path])))
    assert len(html.encode()) < SIZE
    assert html.count("What the words and numbers mean") == 1
    assert html.count('<h3 class="t">Leakage and utility') == (runs if runs <= 3 else 0)
    assert ("on a page of that run alone" in html) == (runs > 3)


@pytest.mark.parametrize("odd", ["\u202eevil", "\x1b[31mred", "half\ud800", "a\x00b"])
def test_what_nobody_sees_in_a_name_is_written_out(tmp_path, odd):
    """Direction marks turn sentences round, escapes act on terminals, surrogates are no UTF-8."""
    found = found_in(tmp_path, [result(0, odd, f1=0.5)])
    for made in (page(found), json.dumps(as_json(found), ensure_ascii=False)):
        made.encode("utf-8")
        assert not set(made) & set("\u202e\x1b\ud800\x00")
    assert "\\" in found.runs[0].attacks[0].name


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
