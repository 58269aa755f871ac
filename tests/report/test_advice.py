"""What people can do next follows from the run."""

import pytest

from lightning_fedleak.report import findings, page, read
from tests.report.lines import about, begin, dpsgd, end, look, result, spent, written

READ = {"f1": 0.9, "recall": 0.9, "precision": 0.9}


def steps(folder, results, *record):
    found = findings(read([written(folder, results, record)]))
    assert page(found).rstrip().endswith("</ul>\n</main>\n</body>\n</html>")
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


def test_low_numbers_lead_to_a_guarantee(tmp_path):
    little = dict.fromkeys(READ, 0.0)
    assert "Low numbers guarantee nothing." in steps(tmp_path, [result(0, **little)], begin())


def test_what_is_unknown_untested_or_not_played_names_the_argument(tmp_path):
    not_played = [
        {"name": "aligned", "why": "no text to calibrate on: pass public_text=..."},
        {"name": "bias_sign", "why": "this model's head has no bias"},
    ]
    attacks = [about("flatchat", "words"), about("silent", "words")]
    attacks[0]["config"] = {"public_text": "sampled"}
    lines = [result(0, **READ), result(0, "silent") | {"unknown": "pass local_steps="}]
    told = steps(tmp_path, lines, begin(attacks=attacks, not_played=not_played))
    assert "Get a result of silent, which is unknown: pass local_steps=." in told
    assert "Have aligned played: no text to calibrate on" in told
    assert "bias_sign" not in told
    assert "LeakageMonitor(attacks=[SubspaceTexts()])" in told
    assert "LeakageMonitor(assume=DISHONEST_SERVER)" in told
    assert "Pass public_text= with text like your clients'" in told


def test_an_interval_that_includes_guessing_is_narrowed(tmp_path):
    record = begin(attacks=[about("fc", "membership", "chooses the weights")])
    told = steps(tmp_path, [result(0, "fc", auc=(0.6, 0.3, 0.9))], record)
    assert "Narrow the interval of fc, which includes guessing" in told
    assert "DISHONEST_SERVER" not in told


@pytest.mark.parametrize(
    ("settings", "epsilon", "last", "said"),
    [
        ({}, 8.0, (end(3),), "Lower dpsgd's epsilon"),
        ({}, 1.0, (), "Keep a ledger"),
        ({}, "infinite", (end(3),), "Make dpsgd's guarantee hold: one example is hidden"),
        ({"trust": "central"}, 1.0, (end(3),), "Check that secure aggregation really hides"),
    ],
)
def test_what_makes_epsilon_worth_more(tmp_path, settings, epsilon, last, said):
    record = [begin(defenses=[dpsgd(**settings)]), look(2, privacy=[spent(epsilon, 3)]), *last]
    assert said in steps(tmp_path, [result(0, **READ)], *record)
