"""A model card's block says what was tried, what could have been seen, and what was not tried."""

import re

import pytest

from lightning_fedleak.cli import main
from lightning_fedleak.report import findings, model_card, page, read
from tests.report.lines import begin, result, written
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
        ('[release]\nrecipient = "x"\n', "no field 'recipient'.*Did you mean 'recipients'"),
        ('[relase]\nform = "x"\n', "a table 'relase'.*Did you mean 'release'"),
        ("release = 3\n", "'release' must be a table"),
        ('[basic]\nnaem = "x"\n', "no field 'naem'.*Did you mean 'name'"),
    ],
)
@pytest.mark.parametrize("card", [True, False])
def test_an_unknown_name_is_refused_with_the_nearest(run, capsys, about, said, card):
    file = run / "about.toml"
    file.write_text(about)
    options = ["report", str(run), "--about", str(file), *(["--model-card"] if card else [])]
    assert main(options) == 1
    error = capsys.readouterr().err
    assert re.search(said, error)
    assert not (run / "report.html").exists()
