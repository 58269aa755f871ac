import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_fedleak.report import charts, entry, findings, page, read
from lightning_fedleak.report.records import as_json
from tests.report.lines import about, begin, decision, dpsgd, look, result, spent, written

HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=y>{{7*7}}"


def test_names_of_runs_attacks_and_settings_are_text(tmp_path):
    attacks = [about(HOSTILE, "words") | {"config": {HOSTILE: HOSTILE}, "adversary": HOSTILE}]
    gate = {"name": HOSTILE, "metric": HOSTILE, "at_most": 0.5, "action": HOSTILE, "bound": "value"}
    record = [
        begin(attacks=attacks, gates=[gate], unread=[HOSTILE], defenses=[dpsgd(x=HOSTILE)]),
        look(0, utility={HOSTILE: 1.0}, privacy=[spent(1.0, 1)]),
        {
            "schema": 1,
            "run": "a",
            "kind": "gate",
            "gate": HOSTILE,
            "did": HOSTILE,
            "step": 0,
            "why": HOSTILE,
            "hardened": [HOSTILE],
            "of": HOSTILE,
            "metric": HOSTILE,
        },
    ]
    lines = [result(0, HOSTILE, f1=(0.5, 0.4, 0.6)), result(1, HOSTILE)]
    lines[1]["unknown"] = HOSTILE
    found = findings(read([written(tmp_path / "run", lines, record)]), {"x": {"y": HOSTILE}})
    html = page(found, {HOSTILE: HOSTILE})
    assert "<script" not in html
    assert "<img" not in html
    assert "{{7*7}}" in html
    assert "&lt;script&gt;" in html


def test_names_of_clients_and_mechanisms_are_text(tmp_path):
    settings = {"mechanism": HOSTILE, "domain": HOSTILE, "labels": HOSTILE, "epsilon": 1.0}
    defense = {"name": HOSTILE, "class": "TokenLDP", "guarantee": HOSTILE, "settings": settings}
    told = {"defense": HOSTILE, "epsilon": 1.0, "delta": 0.0, "releases": 1, "history": []}
    record = [
        begin(attacks=[about(HOSTILE, "words")], defenses=[defense], fit=HOSTILE,
              training={"strategy": "federation"}),
        *(look(r, client=f"{HOSTILE}{r}", utility={"loss": 1.0}, privacy=[told]) for r in (0, 1)),
        decision("withheld", 1, f"{HOSTILE}1"),
        decision(HOSTILE, 0, f"{HOSTILE}0"),
    ]  # fmt: skip
    lines = [
        result(r, HOSTILE, f1=(0.5, 0.4, 0.6)) | {"client": f"{HOSTILE}{c}"}
        for r in (0, 1)
        for c in range(12)
    ]
    odd = look(0) | {"utility": {HOSTILE: HOSTILE}}
    html = page(findings(read([written(tmp_path / "run", lines, [*record, odd])])))
    assert "<script" not in html
    assert "<img" not in html
    assert "utility/&lt;script&gt;" in html


def test_many_clients_are_the_highest_of_them_and_the_mean_of_the_others():
    clients = {f"client {c}": [(0, c / 20), (1, None)] for c in range(20)} | {"sum": [(0, 0.5)]}
    drawn = charts.few(clients, last="sum")
    assert len(drawn) == charts.COLOURS
    assert list(drawn)[:2] == ["client 14", "client 15"]
    assert drawn["mean of the 14 others"] == [
        (0, pytest.approx(sum(range(14)) / 14 / 20)),
        (1, None),
    ]
    assert drawn["sum"] == [(0, 0.5)]
    assert charts.few({"a": [(0, 1.0)]}) == {"a": [(0, 1.0)]}


def test_the_page_asks_no_host_for_anything(tmp_path):
    html = page(findings(read([written(tmp_path, [result(0, f1=0.5)], [begin(), look(0)])])))
    assert not re.search(r"(https?:|//|src=|href=|@import|url\()", html.replace("</", ""))
    assert "default-src 'none'" in html


def test_unknown_rates_and_settings_that_are_none_were_recorded(tmp_path):
    record = begin(training={"gradient_clip_val": None})
    html = page(findings(read([written(tmp_path, [result(0, f1=0.0)], [record])])))
    assert "f1 0.000, recall unknown, precision unknown" in html
    assert "gradient_clip_val none" in html


def test_a_thousand_looks_stay_small(tmp_path):
    names = [f"attack_{n}" for n in range(8)]
    lines = [result(s, n, f1=(0.5, 0.4, 0.6)) for s in range(1000) for n in names]
    record = [begin(attacks=[about(n, "words") for n in names], defenses=[dpsgd()])]
    record += [
        look(s, utility={"loss": 1 / (s + 1)}, privacy=[spent(s / 9, s)]) for s in range(1000)
    ]
    html = page(findings(read([written(tmp_path, lines, record)])))
    assert len(html.encode()) < 500_000


@given(st.lists(st.none() | st.floats(0, 1), max_size=900))
def test_long_lines_keep_their_extremes(values):
    line = list(enumerate(values))
    kept = charts._thinned(line)
    known = [v for v in values if v is not None]
    assert len(kept) <= max(charts.MOST_POINTS + 2, 2)
    assert kept == sorted(kept, key=lambda point: point[0])
    if known:
        seen = [v for _, v in kept if v is not None]
        assert (min(seen), max(seen)) == (min(known), max(known))


@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6))
def test_ticks_are_few_and_inside(low, width):
    ticks = charts._ticks(low, low + width)
    assert len(ticks) <= 7
    slack = 1e-6 * (width + abs(low))
    assert all(low - slack <= tick <= low + width + slack for tick in ticks)


def test_gaps_are_drawn_as_gaps():
    drawn = charts.lines({"a": [(0, 1.0), (1, 2.0), (2, None), (3, 1.0), (4, 2.0)]}, label="x")
    assert drawn.count("<polyline") == 2
    assert "nothing is known" in charts.lines({"a": [(0, None)]}, label="x")


@pytest.mark.parametrize("value", [None, 0.5])
def test_unknown_attacks_are_drawn_as_unknown(tmp_path, value):
    rates = {} if value is None else {"auc": (value, 0.4, 0.6)}
    record = [begin(attacks=[about("flatchat", "membership")])]
    folder = written(tmp_path, [result(0, **rates)], record)
    drawn = charts.intervals(findings(read([folder])).runs[0].attacks, label="x")
    assert ("unknown" in drawn) == (value is None)
    assert ("<circle" in drawn) == (value is not None)


def test_every_value_survives_json(tmp_path):
    record = [begin(), look(0, utility={"loss": None})]
    found = findings(read([written(tmp_path, [result(0)], record)]))
    written_out = json.loads(json.dumps(as_json(found), allow_nan=False))
    assert written_out["runs"][0]["attacks"][0]["mean"] is None


@pytest.mark.parametrize("odd", ["\u202eevil", "\x1b[31mred", "half\ud800", "a\x00b"])
def test_what_nobody_sees_in_a_name_is_written_out(tmp_path, odd):
    """Direction marks turn sentences round, escapes act on terminals, surrogates are no UTF-8."""
    found = findings(read([written(tmp_path, [result(0, odd, f1=0.5)])]))
    for made in (page(found), json.dumps(as_json(found), ensure_ascii=False), entry(found)):
        made.encode("utf-8")
        assert not set(made) & set("\u202e\x1b\ud800\x00")
    assert "\\" in found.runs[0].attacks[0].name
