import json
import stat

import pytest

from lightning_fedleak.callbacks import LeakageMonitor, RiskGate
from lightning_fedleak.cli import main
from lightning_fedleak.defenses import DPSGD, GradientNoise
from lightning_fedleak.engine import WatchSettings
from lightning_fedleak.strategies import DefendedStrategy
from tests.callbacks.runs import Probe, fit
from tests.helpers.notices import announced
from tests.report.lines import begin, decision, dpsgd, look, result, spent, written


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("run")
    gate = RiskGate("leakage/probe/f1", at_most=0.0, action="warn")
    strategy = DefendedStrategy("auto", [GradientNoise(clip=None, sigma=1e-9)])
    with announced("RiskGate"):
        fit([LeakageMonitor(Probe(), every_n_steps=3), gate], root, strategy=strategy)
    return root


def record_of(folder):
    [path] = folder.rglob("run.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_fit_records_itself(folder):
    record = record_of(folder)
    kinds = [line["kind"] for line in record]
    assert kinds[0] == "begin"
    assert kinds[-1] == "end"
    [results] = folder.rglob("leakage.jsonl")
    assert {line["run"] for line in record} == {
        json.loads(results.read_text().splitlines()[0])["run"]
    }
    begin = record[0]
    assert begin["model"]["class"] == "GPT2LMHeadModel"
    assert begin["attacks"][0]["family"] == "words"
    assert begin["gates"][0]["at_most"] == 0.0
    assert begin["defenses"][0]["settings"]["sigma"] == 1e-9
    assert begin["training"]["optimizers"][0]["class"] == "AdamW"
    looks = [line for line in record if line["kind"] == "look"]
    assert [line["step"] for line in looks] == [0, 3, 6]
    assert looks[0]["utility"]["train_loss"] > 0
    assert [line["did"] for line in record if line["kind"] == "gate"] == ["warn"] * 3
    assert record[-1]["how"] == "finished"


def test_an_error_is_recorded_as_the_end(tmp_path):
    class Broken(Exception):
        pass

    class Breaks(LeakageMonitor):
        def on_train_batch_end(self, *arguments, **more):
            super().on_train_batch_end(*arguments, **more)
            raise Broken("of private text")

    with pytest.raises(Broken):
        fit([Breaks(Probe(), settings=WatchSettings(report=True))], tmp_path)
    end = record_of(tmp_path)[-1]
    assert (end["kind"], end["how"]) == ("end", "Broken")
    assert "private" not in json.dumps(end)
    [page] = tmp_path.rglob("report.html")
    assert "by an error (Broken)" in page.read_text()
    assert "private text" not in page.read_text()


def test_equal_settings_have_equal_hashes_and_a_resumed_fit_names_its_first(tmp_path):
    def strategy():
        return DefendedStrategy("auto", [DPSGD(1.0, noise_multiplier=1.0, target_delta=1e-5)])

    first = fit([LeakageMonitor(Probe())], tmp_path / "a", strategy=strategy())
    checkpoint = tmp_path / "x.ckpt"
    first.save_checkpoint(checkpoint)
    steps = first.global_step
    again = {"ckpt_path": checkpoint, "strategy": strategy(), "max_epochs": 2}
    fit([LeakageMonitor(Probe())], tmp_path / "b", **again)
    fit([LeakageMonitor(Probe())], tmp_path / "c", strategy=strategy())
    one, other, third = (record_of(tmp_path / name) for name in "abc")
    assert one[0]["settings_hash"] == third[0]["settings_hash"] != other[0]["settings_hash"]
    assert one[0]["resumed"] is None
    resumed = other[0]["resumed"]
    assert resumed["run"] == one[0]["run"]
    assert sum(count for *_, count in resumed["privacy"][0]["history"]) == steps
    assert other[-1]["privacy"][0]["releases"] == 2 * steps


def test_the_command_writes_page_and_json(folder, tmp_path, capsys):
    assert main(["report", str(folder), "--out", str(tmp_path / "out")]) == 0
    html, found = (tmp_path / "out" / f"report.{end}" for end in ("html", "json"))
    assert capsys.readouterr().out.split() == [str(html), str(found)]
    [run] = json.loads(found.read_text())["runs"]
    assert run["ended"] == "finished"
    assert run["attacks"][0]["looks"] == 3
    assert "probe" in html.read_text()


def test_the_report_of_a_fit_is_of_that_fit_alone_and_never_ends_it(tmp_path):
    for seed in (1, 2):
        strategy = DefendedStrategy("auto", [GradientNoise(clip=1.0, sigma=0.1, seed=seed)])
        more = {"logger": False, "strategy": strategy}
        monitor = LeakageMonitor(Probe(), folder=tmp_path, settings=WatchSettings(report=True))
        fit([monitor], tmp_path, gradient_clip_val=float("inf"), **more)
    for line in (tmp_path / "run.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(name))
    [run] = json.loads((tmp_path / "report.json").read_text())["runs"]
    assert run["training"]["gradient_clip_val"] == "infinite"
    settings = run["defenses"][0]["settings"]
    assert settings["seeded"]
    assert "seed" not in settings
    assert str(tmp_path) not in (tmp_path / "report.html").read_text()


def test_a_link_in_the_way_is_replaced_and_not_followed(folder, tmp_path, capsys):
    (tmp_path / "victim").write_text("mine")
    (tmp_path / "report.html").symlink_to(tmp_path / "victim")
    assert main(["report", str(folder), "--out", str(tmp_path)]) == 0
    assert (tmp_path / "victim").read_text() == "mine"
    assert "<title>What training leaked" in (tmp_path / "report.html").read_text()
    capsys.readouterr()


def test_private_text_makes_a_private_page(folder, tmp_path, capsys):
    revealed = tmp_path / "revealed_words.rank0.txt"
    revealed.write_text("the <b>patient</b>\n")
    (tmp_path / "report.html").write_text("an earlier report")
    assert main(["report", str(folder), "--out", str(tmp_path), "--reveal", str(revealed)]) == 0
    page = tmp_path / "report.html"
    assert stat.S_IMODE(page.stat().st_mode) == 0o600
    assert "the &lt;b&gt;patient" in page.read_text()
    assert "patient" not in (tmp_path / "report.json").read_text()
    capsys.readouterr()


def test_mistakes_end_in_a_sentence(folder, tmp_path, capsys):
    about = tmp_path / "report.toml"
    about.write_text("[release]\nlicence = 'x'\n")
    cases = {
        ("report", str(tmp_path / "nowhere")): "does not exist",
        ("report", str(folder), "--out", str(tmp_path)): "has 'licence': it may have one table",
        ("report", str(folder), "--reveal", str(tmp_path / "no.txt")): "cannot be read",
        ("compare", str(folder), str(tmp_path / "nowhere")): "does not exist",
        ("compare", str(folder), str(folder)): "holds one run, and two are needed",
    }
    for arguments, said in cases.items():
        assert main(list(arguments)) == 1
        assert said in capsys.readouterr().err


def test_compare_says_how_many_updates_did_not_leave(tmp_path, capsys):
    for name, more in (("a", []), ("b", [decision("withheld", 0, 1, "b")])):
        lines = [result(0, f1=0.5, run=name) | {"client": c} for c in range(2)]
        begins = begin(name, training={"strategy": "federation"})
        written(tmp_path / name, lines, [begins, *more])
    assert main(["compare", str(tmp_path)]) == 0
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "b: Gates kept back 1 of 2 updates" in text
    assert "updates that left 2 1" in text


def test_compare_cuts_no_name_at_80_columns(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    name = "a_run_with_a_name_that_is_longer_than_the_terminal_is_wide_" + "x" * 40
    for run in ("a", "b"):
        lines = [result(0, "fc", auc=(0.9123, 0.812, 0.978), run=run)]
        spending = [spent(2.0, 3, rate=1.0)]
        record = [begin(run, defenses=[dpsgd()]), look(0, run, privacy=spending)]
        written(tmp_path / f"{name}{run}", lines, record)
    assert main(["compare", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "…" not in out
    table = [line for line in out.splitlines() if line[:1] in "│┃"]
    assert max(map(len, table)) <= 80
    assert "".join(line.split("┃")[2].strip() for line in table if "┃" in line) == f"{name}a"
    for part in ("0.91 (0.81–0.98)", "2 at 1e-05, only until the last measurement"):
        assert part in " ".join(out.replace("│", " ").split())
