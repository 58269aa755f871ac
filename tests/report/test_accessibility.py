"""axe-core finds nothing serious on a report, on a phone and on a desktop, light and dark."""

import pytest

from lightning_fedleak.report import findings, page, read
from tests import browser
from tests.report.lines import about, begin, decision, dpsgd, end, look, result, spent, written

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def everything(tmp_path_factory):
    """A page with every kind of part: clients, unknown results, an account, gates, private text."""
    folder = tmp_path_factory.mktemp("report")
    gate = {"name": "g", "metric": "leakage/worst/words", "at_most": 0.5, "action": "withhold"}
    attacks = [about("flatchat", "words"), about("fc", "membership")]
    record = [
        begin(
            attacks=attacks,
            gates=[gate],
            defenses=[dpsgd()],
            unread=["a.bias"],
            training={"strategy": "federation"},
        ),
        *(look(r, utility={"loss": 3.0 - r}, privacy=[spent(1.0 + r, 3)]) for r in range(3)),
        decision("withheld", 1, 1),
        end(3, privacy=[spent(3.0, 3)]),
    ]
    lines = [
        result(r, name, **metrics) | {"client": c}
        for r in range(3)
        for c in range(12)
        for name, metrics in (
            ("flatchat", {"f1": (0.5, 0.4, 0.6)} if c else {}),
            ("fc", {"auc": (0.6, 0.3, 0.9)}),
        )
    ]
    found = findings(read([written(folder, lines, record)]))
    found.problems.append("a line")
    report = folder / "report.html"
    report.write_text(page(found, {"words": "private"}), encoding="utf-8")
    return report


def test_axe_finds_nothing_on_a_report(everything, tmp_path):
    text = everything.read_text(encoding="utf-8").replace("<details>", "<details open>")
    everything.write_text(text, encoding="utf-8")
    assert not any(browser.violations([everything], tmp_path).values())


def test_axe_finds_what_is_wrong(tmp_path):
    """Else the other tests could not fail."""
    wrong = tmp_path / "wrong.html"
    wrong.write_text(
        "<html><style>@media (prefers-color-scheme: dark) { p { color: #ccc } }</style>"
        "<body><main><img src='x.png'><p>pale</p></main></body>"
    )
    found = browser.violations([wrong], tmp_path / "chromium")
    for name, ones in found.items():
        pale = {"color-contrast"} if name.endswith("dark") else set()
        ids = {one["id"] for one in ones} & {"image-alt", "color-contrast", "html-has-lang"}
        assert ids == {"image-alt", "html-has-lang"} | pale
