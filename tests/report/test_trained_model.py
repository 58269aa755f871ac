"""What the report says of the trained model, from the lines of a short run."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_fedleak.report import page
from lightning_fedleak.report.records import MetricValue, as_json
from lightning_fedleak.report.wording import interval
from tests.report.lines import about, begin, found_in, result, sentences_of

RUN = json.loads(Path(__file__).with_name("memorization_run.json").read_text())
UNTRIED = {"reconstruction", "attribute inference", "model inversion"}


def rows_of(fit):
    return {row.name: row for row in fit.named_attacks}


def test_a_stored_run_says_what_was_measured_of_the_trained_model(tmp_path):
    found = found_in(tmp_path, RUN["leakage"], RUN["run"])
    [fit] = found.runs
    assert found.verdict.level == "high"
    assert found.verdict.sentence == "The trained model tells who was in its training data."
    by_name = {attack.name: attack for attack in fit.attacks}
    assert (by_name["extraction"].headline, by_name["extraction"].chance) == ("extracted", 0.0)
    assert (by_name["extraction"].looks, by_name["extraction"].unknown) == (4, 0)
    assert by_name["combined"].n == 252  # the same texts at every look
    assert by_name["combined"].rates["shown"] is None
    assert not any("trained model itself" in sentence for sentence in fit.not_tested)
    html = page(found)
    assert "paragraph 55" in html
    assert "shown unknown" in html


def test_each_attack_that_the_opinion_names_has_a_row(tmp_path):
    [fit] = found_in(tmp_path, RUN["leakage"], RUN["run"]).runs
    rows = rows_of(fit)
    assert {name for name, row in rows.items() if row.tried == "not tried"} == UNTRIED
    assert rows["membership inference"].visible[0] == "combined: TPR at 1% FPR of 0.124"
    assert rows["regurgitation"].visible == ["extraction: share of the training texts of 0.107"]
    content = json.loads(json.dumps(as_json(fit), allow_nan=False))
    assert [row["name"] for row in content["edpb_28_2024_par_55"]] == list(rows)


def test_attacks_on_updates_are_tried_on_what_clients_shared(tmp_path):
    record = [begin(attacks=[about("flatchat", "words"), about("fc", "membership")])]
    lines = [result(0, f1=0.9), result(0, "fc", auc=(0.75, 0.5, 0.9))]
    found = found_in(tmp_path, lines, record)
    rows = rows_of(found.runs[0])
    assert rows["reconstruction"].tried == "what clients shared"
    assert rows["membership inference"].tried == "what clients shared"
    assert rows["regurgitation"].tried == "not tried"


def test_attacks_on_the_weights_that_are_refused_later_are_not_played(tmp_path):
    attacks = [about("flatchat", "words"), about("combined", "memorization")]
    refused = result(0, "combined", "released") | {"unknown": "not played: no texts to compare"}
    [fit] = found_in(tmp_path, [refused, result(1, f1=0.5)], [begin(attacks=attacks)]).runs
    assert fit.not_played == {"combined": "no texts to compare"}
    assert "combined: no texts to compare" in fit.not_tested
    assert rows_of(fit)["membership inference"].tried == "not tried"


@pytest.mark.parametrize("recorded", [True, False])
def test_what_gave_no_result_is_unknown(tmp_path, recorded):
    record = [begin(attacks=[about("combined", "memorization")])] if recorded else []
    found = found_in(tmp_path, [result(5, "combined", "released")], record)
    [fit] = found.runs
    assert found.verdict.level == "unknown"
    assert fit.attacks[0].unknown == 1
    assert "unknown for the trained model" in rows_of(fit)["membership inference"].tried


def test_what_is_extracted_is_shown_by_how_often_texts_repeat(tmp_path):
    rates = {"extracted": (0.4, 0.2, 0.6), "greedy": (0.7, 0.5, 0.8), "greedy_x1": (0.0, -0.1, 0.1)}
    rates |= {"greedy_x5": (0.7, 0.5, 0.8), "extracted_x5": (0.4, 0.2, 0.6)}
    lines = [result(5, "extraction", "released", **rates)]
    record = [begin(attacks=[about("extraction", "memorization")])]
    found = found_in(tmp_path, lines, record)
    [attack] = found.runs[0].attacks
    assert set(attack.rates) == set(rates)
    assert attack.rates["greedy_x5"].value == 0.7
    html = page(found)
    assert "greedy_x5" in html
    assert "greedy_x17" not in html.partition("Extracted")[0]
    assert found.verdict.sentence == "The trained model writes passages of its training texts."


RATES = st.none() | st.floats(-1, 1)


@given(auc=st.none() | st.floats(0, 1), extracted=RATES, greedy=RATES, visible=RATES)
def test_no_value_crashes_the_report_and_nothing_unknown_is_a_number(
    tmp_path_factory, auc, extracted, greedy, visible
):
    attacks = [about(name, "memorization") for name in ("combined", "extraction")]
    lines = [
        result(step, name, "released", visible=visible, **rates)
        for step in (1, 2)
        for name, rates in (
            ("combined", {"auc": (auc, auc, auc), "shown": (None, None, 0.5)}),
            ("extraction", {"extracted": (extracted, -1.0, 1.0), "greedy": (greedy, -1.0, 1.0)}),
        )
    ]
    found = found_in(tmp_path_factory.mktemp("run"), lines, [begin(attacks=attacks)])
    assert page(found)
    json.dumps(as_json(found), allow_nan=False)
    [fit] = found.runs
    by_name = {attack.name: attack for attack in fit.attacks}
    for name, value in (("combined", auc), ("extraction", extracted)):
        assert by_name[name].unknown == (2 if value is None else 0)
        assert (by_name[name].last is None) == (value is None)
    rows = rows_of(fit)
    assert (rows["membership inference"].tried == "the trained model") == (auc is not None)
    if extracted is None:
        assert rows["exfiltration"].tried.startswith("unknown for the trained model: no result of")
        assert "writes" not in found.verdict.sentence
    if auc is None:
        assert "tells" not in found.verdict.sentence


def test_weights_that_nobody_read_are_not_taken_for_the_earlier_ones(tmp_path):
    """A low rate at half an epoch says nothing of the weights that training ended with."""
    early = result(5, "combined", "released", auc=(0.5, 0.4, 0.6))
    late = result(9, "combined", "released") | {"unknown": "there are no controls after epoch 1"}
    record = [begin(attacks=[about("combined", "memorization")])]
    found = found_in(tmp_path / "late", [early, late], record)
    [attack] = found.runs[0].attacks
    assert attack.stale == "there are no controls after epoch 1"
    assert "Those at the end are unknown" in sentences_of(found)
    whole = found_in(tmp_path / "whole", [early], record)
    assert whole.runs[0].attacks[0].stale is None


def test_a_value_without_an_upper_end_is_at_least_so_much():
    assert interval(MetricValue(5.4, 3.9, None)) == "at least 5.400 (3.900 or more)"
    assert interval(MetricValue(5.4, None, None)) == "5.400"


def test_games_with_canaries_are_apart_from_the_attacks_own(tmp_path):
    both = [result(0, name, auc=value) for name, value in (("fc", 0.5), ("audit/fc", 0.9))]
    record = [begin(attacks=[about("fc", "membership")])]
    [fit] = found_in(tmp_path, both, record).runs
    assert {a.name: (a.family.name, a.mean) for a in fit.attacks} == {
        "fc": ("membership", 0.5),
        "audit/fc": ("membership", 0.9),
    }
