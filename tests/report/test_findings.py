import json

import pytest

from lightning_fedleak.auditing import dp_tpr
from lightning_fedleak.defenses.accounting.accounting import epsilon_of
from lightning_fedleak.report import findings, read
from tests.report.lines import about, begin, dpsgd, look, result, spent, written


def found_in(folder, results, record=()):
    return findings(read([written(folder, results, record)]))


def test_unknown_attacks_come_first_and_are_no_zero(tmp_path):
    lines = [result(0, "a", f1=0.9), result(0, "b"), result(1, "a", f1=0.7)]
    [fit] = found_in(tmp_path, lines)["runs"]
    first, second = fit["attacks"]
    assert (first["name"], first["mean"], first["unknown"]) == ("b", None, 1)
    assert first["why_unknown"] == "it broke"
    assert second["mean"] == pytest.approx(0.8)
    assert second["highest"] == 0.9
    assert second["last"]["value"] == 0.7


def test_pooled_rates_have_a_mean_of_single_looks(tmp_path):
    lines = [
        result(s, "fc", auc=(pooled, 0.4, 1.0), auc_of_this_look=alone)
        for s, (pooled, alone) in enumerate([(0.9, 0.9), (0.7, 0.5)])
    ]
    [fit] = found_in(tmp_path, lines)["runs"]
    [attack] = fit["attacks"]
    assert attack["mean"] == pytest.approx(0.7)
    assert attack["last"] == {"value": 0.7, "low": 0.4, "high": 1.0}


def test_the_verdict_names_adversaries_and_what_nobody_tested(tmp_path):
    attacks = [about("flatchat", "words"), about("fc", "membership", "chooses the weights")]
    lines = [
        result(0, f1=0.99, recall=0.996, precision=0.5),
        result(0, "fc", auc=(0.75, 0.5, 0.9)),
    ]
    verdict = found_in(tmp_path, lines, [begin(attacks=attacks)])["verdict"]
    words, membership, untested, private = verdict["sentences"]
    assert words.startswith("Off one shared update, an honest but curious server could read 99.6%")
    assert "50% of what it named was right" in words
    assert "a dishonest server, which adds layers of its own, could tell" in membership
    assert "0.75" in membership
    assert untested == "Nobody tested whole texts."
    assert private == "No differential privacy was accounted."
    assert verdict["level"] == "high"


def test_what_was_tried_in_vain_is_unknown_and_not_untested(tmp_path):
    attacks = [about("flatchat", "words"), about("st", "texts")]
    lines = [result(0, f1=0.5, recall=0.5, precision=0.5), result(0, "st")]
    found = found_in(tmp_path, lines, [begin(attacks=attacks)])
    _, unknown, untested, _ = found["verdict"]["sentences"]
    assert unknown == "Attacks gave no result, so that it is unknown: whole texts."
    assert untested == "Nobody tested whether a given text is in a batch."
    assert "whole texts: no attack gave a result" in found["runs"][0]["not_tested"]


def test_nothing_known_is_not_safe(tmp_path):
    verdict = found_in(tmp_path, [result(0)], [begin()])["verdict"]
    assert verdict["sentence"].startswith("Nothing was measured")
    assert verdict["level"] == "unknown"


def test_what_is_not_shared_is_neither_read_nor_tested(tmp_path):
    lines = [result(0, f1=0.0) | {"exposed": False}]
    found = found_in(tmp_path, lines, [begin(unread=["a", "b"])])
    assert found["verdict"]["level"] == "unknown"
    said = found["runs"][0]["not_tested"]
    assert any(one.startswith("which words are in a batch") for one in said)
    assert any(one.startswith("2 shared parameters that no attack reads: a, b") for one in said)


def test_epsilon_with_and_without_sampling_and_what_it_implies(tmp_path):
    record = [begin(defenses=[dpsgd(target_epsilon=3.0)])]
    record += [look(s, privacy=[spent(0.5 * s, s)]) for s in (1, 2)]
    record += [
        {
            "schema": 1,
            "run": "a",
            "kind": "end",
            "step": 4,
            "how": "finished",
            "privacy": [spent(1.25, 4)],
        }
    ]
    [fit] = found_in(tmp_path, [result(1, f1=0.0)], record)["runs"]
    [cost] = fit["privacy"]
    assert (cost["epsilon"], cost["releases"], cost["target_epsilon"]) == (1.25, 4, 3.0)
    assert cost["series"] == [(1, 0.5), (2, 1.0), (4, 1.25)]
    assert cost["without_sampling"] == epsilon_of([(1.0, 1.0, 4)], 1e-5, "prv")
    assert "epsilon = 1.25 at delta = 1e-05" in cost["statement"]
    assert "not the leakage logs" in cost["statement"]
    assert fit["implied"]["largest_tpr_at_fpr_0.01"] == dp_tpr(0.01, 1.25, 1e-5)
    assert fit["implied"]["measured_auc"] is None
    assert fit["ended"] == "in order"


@pytest.mark.parametrize(
    ("epsilon", "said"),
    [(1.2501, "1.26"), (7.9996, "8"), (0.123, "0.123"), ("infinite", "infinite")],
)
def test_a_bound_is_never_rounded_down(tmp_path, epsilon, said):
    record = [begin(defenses=[dpsgd()]), look(1, privacy=[spent(epsilon, 1)])]
    verdict = found_in(tmp_path, [result(1, f1=0.0)], record)["verdict"]
    assert f"epsilon {said} at delta 1e-05" in verdict["sentence"]


def test_a_few_lucky_words_are_not_called_reading(tmp_path):
    lines = [result(0, f1=0.03, recall=0.4, precision=0.02), result(1)]
    sentence = found_in(tmp_path, lines, [begin()])["verdict"]["sentences"][0]
    assert "next to none of the words, with an F1 of 0.03 (one look, unknown at 1 more" in sentence


def test_infinite_epsilon_is_said_and_implies_nothing(tmp_path):
    record = [begin(defenses=[dpsgd()]), look(1, privacy=[spent("infinite", 1, sigma=0.0)])]
    found = found_in(tmp_path, [result(1, f1=0.0)], record)
    [fit] = found["runs"]
    assert fit["privacy"][0]["epsilon"] == "infinite"
    assert fit["implied"] is None
    assert "epsilon infinite" in found["verdict"]["sentence"]
    json.dumps(found, allow_nan=False)


def test_fits_compose_and_a_resumed_one_counts_once(tmp_path):
    def fit(run, count, step=0):
        cost = spent(1.0, count)
        return [begin(run, step=step, defenses=[dpsgd()]), look(count, run, privacy=[cost])]

    lines = [result(0, run=run, f1=0.0) for run in "abc"]
    record = [*fit("a", 10), *fit("b", 30, step=10), *fit("c", 5)]
    [together] = found_in(tmp_path, lines, record)["privacy_together"]
    assert together["fits"] == 2
    assert together["epsilon"] == epsilon_of([(1.0, 0.01, 30), (1.0, 0.01, 5)], 1e-5, "prv")
    assert together["sum_of_epsilons"] == 2.0
    alone = found_in(tmp_path / "one", lines[:2], [*fit("a", 10), *fit("b", 30, step=10)])
    assert alone["privacy_together"] == []


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ([], "not recorded"),
        ([begin()], "cut off"),
        (
            [begin(), {"schema": 1, "run": "a", "kind": "end", "step": 1, "how": "OSError"}],
            "OSError",
        ),
    ],
)
def test_how_a_run_ended(tmp_path, record, said):
    [fit] = found_in(tmp_path, [result(0, f1=0.1)], record)["runs"]
    assert said in fit["ended"]
