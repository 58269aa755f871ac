"""Which of several runs a released model has to be of."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_fedleak.cli.commands import verdicts
from lightning_fedleak.evidence.chain import Verdict
from lightning_fedleak.report import ReportError
from lightning_fedleak.validate import WrongModel

ANSWERS = {
    "of it": Verdict(),
    "of another": Verdict(contradictions=["other weights"]),
    "open": Verdict(open=["no hashes"]),
}


@pytest.mark.parametrize(
    ("runs", "is_refused"),
    [
        (["of it"], False),
        (["of another"], True),
        (["open"], False),
        (["of another", "of it"], False),
        (["cut off", "of another"], True),
        (["of another", "open"], True),
        (["cut off", "open"], False),
    ],
)
def test_a_model_is_refused_if_a_run_has_other_weights_and_no_run_has_its(
    runs: list[str], is_refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def match(run: Path, model: Path) -> Verdict:
        if run.name == "cut off":
            raise ReportError("no weights")
        return ANSWERS[run.name]

    monkeypatch.setattr(verdicts, "match_weights", match)
    for run in runs:
        (tmp_path / run).mkdir()
        (tmp_path / run / "run.jsonl").touch()
    if not is_refused:
        verdicts.check_run(tmp_path, tmp_path)
        return
    with pytest.raises(WrongModel, match="is not of --model: other weights"):
        verdicts.check_run(tmp_path, tmp_path)
