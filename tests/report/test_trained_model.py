"""What a report and a model's card say of the trained model, and of what was not tried."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import mannwhitneyu, norm

from lightning_fedleak.cli import main
from lightning_fedleak.report import findings, model_card, page, read
from lightning_fedleak.report.attacks import named_attacks, smallest_rate
from lightning_fedleak.report.records import MetricValue, as_json
from lightning_fedleak.report.wording import interval
from tests.report.lines import about, begin, found_in, result, sentences_of, written

RUN = json.loads(Path(__file__).with_name("memorization_run.json").read_text())
UNTRIED = {"reconstruction", "attribute inference", "model inversion"}


def rows_of(fit):
    return {row.name: row for row in fit.named_attacks}


def test_a_stored_run_says_what_was_measured_of_the_trained_model(tmp_path):
    found = found_in(tmp_path, RUN["leakage"], RUN["run"])
    [fit] = found.runs
    assert found.verdict.level == "high"
    assert found.verdict.sentence == ("The trained model tells often who was in its training data.")
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


ABOUT = '[release]\nrecipients = "anybody | on the hub"\nlicense = "MIT"\n'


@pytest.fixture
def run(tmp_path):
    return written(tmp_path / "run", RUN["leakage"], RUN["run"])


def test_the_block_has_the_rows_of_the_report(run):
    found = findings(read([run]))
    block = model_card(found)
    rows = [line for line in block.splitlines() if line.startswith("| ")][1:]
    tried = [one for one in found.runs[0].named_attacks if one.tried != "not tried"]
    assert len(rows) == len(tried) > 0
    for row, one in zip(rows, tried, strict=True):
        cells = row.strip("| ").split(" | ")
        assert cells[:2] == [one.name, one.tried]
        assert cells[2].replace("\\", "") == "; ".join(one.results)
        assert cells[3].replace("\\", "") == "; ".join(one.visible)
    assert "Not tried: attribute inference, model inversion" in block
    assert "nor that anybody complies" in block
    assert "(epsilon, delta): none" in block
    assert "- Who gets the weights: not recorded" in block


def test_names_of_a_run_are_no_markup(tmp_path):
    folder = written(tmp_path / "run", [result(1, "<b>|[x](y)", auc=(0.5, 0.4, 0.6))], [begin()])
    block = model_card(findings(read([folder]), {"release": {"license": "MIT|<i>"}}))
    assert "- Licence: MIT\\|\\<i\\>" in block
    assert "<b>" not in block


def test_the_command_prints_the_block_and_writes_nothing(run, capsys):
    (run / "report.toml").write_text(ABOUT)
    before = sorted(run.iterdir())
    assert main(["report", str(run), "--model-card"]) == 0
    out = capsys.readouterr().out
    assert out == model_card(
        findings(read([run]), {"release": {"recipients": "anybody | on the hub", "license": "MIT"}})
    )
    assert "anybody \\| on the hub" in out
    assert sorted(run.iterdir()) == before


def test_a_file_beside_the_weights_says_the_same(run, tmp_path, capsys):
    weights = tmp_path / "weights"
    weights.mkdir()
    assert main(["report", str(run), "--model-card", "--out", str(weights)]) == 0
    content = json.loads((weights / "leakage.json").read_text())
    assert list(weights.iterdir()) == [weights / "leakage.json"]
    [row] = content["runs"]
    found = findings(read([run])).runs[0]
    for one, attack in zip(row["attacks"], found.attacks, strict=True):
        assert (one["name"], one["stage"]) == (attack.name, attack.stage)
        assert one["value"] == (attack.last.value if attack.last else None)
        smallest = smallest_rate(attack)
        assert one["smallest_rate_detected"] == (smallest if (smallest or 1) < 1 else None)
    capsys.readouterr()
    assert main(["report", str(run), "--model-card", "--out", str(tmp_path / "none")]) == 1
    assert "Name the folder of the weights" in capsys.readouterr().err


def summary_of(tmp_path, about, **line):
    folder = written(tmp_path, [result(1, about["name"], **line)], [begin(attacks=[about])])
    [attack] = findings(read([folder])).runs[0].attacks
    return attack


@pytest.mark.parametrize("n", [40, 200, 1000])
def test_the_smallest_auc_is_detected_in_four_of_five_looks(tmp_path, n):
    """Games are drawn here, and judged by the rank test of scipy."""
    attack = summary_of(tmp_path, about("fc_membership", "membership"), auc=(0.5, 0.4, 0.6))
    rate = smallest_rate(replace(attack, last_n=n))
    draw, shift = np.random.default_rng(0), math.sqrt(2) * norm.ppf(rate)
    trials = [
        mannwhitneyu(draw.normal(shift, 1, n // 2), draw.normal(0, 1, n // 2)).pvalue < 0.05
        for _ in range(1000)
    ]
    assert 0.74 < np.mean(trials) < 0.90


@pytest.mark.parametrize(("n", "control"), [(10, None), (100, 1.0), (100, 0.5)])
def test_the_smallest_share_of_words_is_detected_in_four_of_five_looks(tmp_path, n, control):
    attack = summary_of(tmp_path, about("flatchat", "words"), f1=0.0)
    rate = smallest_rate(replace(attack, last_n=n, control=control))
    assert 1 - (1 - rate * (control or 1.0)) ** n == pytest.approx(0.8)


def test_nothing_is_detected_with_no_control_or_no_count(tmp_path):
    attack = summary_of(tmp_path, about("flatchat", "words"), f1=0.0)
    assert smallest_rate(replace(attack, last_n=None)) is None
    assert smallest_rate(replace(attack, control=None, control_note="unread")) == math.inf
    [row] = [one for one in named_attacks([attack]) if one.name == "reconstruction"]
    assert row.visible == ["flatchat: share of words or tokens of 0.149"]
    [row] = [
        one
        for one in named_attacks([replace(attack, control=0.0, control_note="low")])
        if one.name == "reconstruction"
    ]
    assert row.visible == ["flatchat: none: too few, or its control was not read"]


@pytest.mark.parametrize("log", ["", "leakage.jsonl", "run.jsonl"])
def test_report_toml_is_read_in_the_folder_of_a_log_file_too(run, capsys, log):
    (run / "report.toml").write_text(ABOUT)
    assert main(["report", str(run / log), "--model-card"]) == 0
    assert "anybody \\| on the hub" in capsys.readouterr().out


def test_the_page_says_how_the_model_is_released(run):
    html = page(findings(read([run]), {"release": {"form": "adapters alone"}}))
    assert "adapters alone" in html
    assert "paragraph 46" in html


@pytest.mark.parametrize(
    ("about", "said"),
    [
        ('[release]\nrecipient = "x"\n', "has 'recipient': it may have one table"),
        ('[relase]\nform = "x"\n', "has 'relase'"),
        ("release = 3\n", "has 'release'"),
    ],
)
@pytest.mark.parametrize("card", [True, False])
def test_an_unknown_name_is_refused_with_the_known_ones(run, capsys, about, said, card):
    (run / "report.toml").write_text(about)
    assert main(["report", str(run), *(["--model-card"] if card else [])]) == 1
    error = capsys.readouterr().err
    assert re.search(said, error)
    assert not (run / "report.html").exists()
