"""What people can do next follows from the run."""

import pytest

from lightning_fedleak.report import findings, page, read
from tests.report.lines import about, begin, dpsgd, end, look, result, spent, written

READ = {"f1": 0.9, "recall": 0.9, "precision": 0.9}


def steps(folder, results, *record):
    found = findings(read([written(folder, results, record)]))
    assert "What you can do next" in page(found)
    return " ".join(found.next_steps)


@pytest.mark.parametrize(
    ("defenses", "unit", "said"),
    [
        ([], {}, "DPSGD(1.0, target_epsilon=8"),
        ([], {"training": {"strategy": "federation"}}, "ClientDP(..., trust='local')"),
        ([dpsgd()], {}, "add more noise: a smaller target_epsilon"),
        ([dpsgd() | {"class": "Freeze", "name": "freeze"}], {}, "turn freeze up"),
    ],
)
def test_what_was_read_is_defended_against(tmp_path, defenses, unit, said):
    record = [begin(defenses=defenses, **unit)]
    if defenses and defenses[0]["class"] == "DPSGD":
        record += [look(2, privacy=[spent(2.0, 3)]), end(3)]
    told = steps(tmp_path, [result(0, **READ)], *record)
    assert told.startswith("Against what was read (words): ")
    assert said in told
    assert "Larger batches" in told
    assert "fedleak compare" in told


def test_a_gate_is_named_where_none_watches_what_was_read(tmp_path):
    gate = {"name": "g", "metric": "leakage/worst/words", "at_most": 0.3}
    of_attack = gate | {"metric": "leakage/flatchat/f1"}
    for n, (gates, wanted) in enumerate([([], True), ([gate], False), ([of_attack], False)]):
        told = steps(tmp_path / str(n), [result(0, **READ)], begin(gates=gates))
        assert ("RiskGate('leakage/worst/words', at_most=...)" in told) is wanted


def test_what_is_unknown_untested_or_not_played_names_the_argument(tmp_path):
    not_played = [
        {"name": "aligned", "why": "no text to calibrate on: pass public_text=..."},
        {"name": "bias_sign", "why": "this model's head has no bias"},
    ]
    attacks = [about("flatchat", "words"), about("silent", "words")]
    lines = [result(0, **READ), result(0, "silent") | {"unknown": "pass local_steps="}]
    told = steps(tmp_path, lines, begin(attacks=attacks, not_played=not_played))
    assert "Get a result of silent, which is unknown: pass local_steps=." in told
    assert "Run aligned: no text to calibrate on" in told
    assert "bias_sign" not in told
    assert "LeakageMonitor(attacks=[SubspaceTexts()])" in told
    assert "LeakageMonitor(settings=WatchSettings(assume=DISHONEST_SERVER))" in told
