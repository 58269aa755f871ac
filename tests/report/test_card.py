"""A model card's block says what was tried, what could have been seen, and what was not tried."""

import json
import math
import re
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import mannwhitneyu, norm

from lightning_fedleak.cli import main
from lightning_fedleak.report import findings, model_card, page, read
from lightning_fedleak.report.attacks import named_attacks, smallest_rate
from tests.report.lines import about, begin, result, written
from tests.report.test_trained_model import RUN

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
