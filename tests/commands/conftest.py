"""The model of the commands; calibrations repeat small batches seldom, which changes no output."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from lightning_fedleak.attacks.words import aligned_readout
from lightning_fedleak.cli.studies import models
from lightning_fedleak.model.taps import Text
from tests.helpers.folders import save_tiny_causal_lm


@pytest.fixture(autouse=True)
def _few_rehearsals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aligned_readout, "_REPEATS", 2)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_causal_lm(tmp_path_factory.mktemp("model")))


@pytest.fixture(autouse=True, scope="module")
def _models_are_asked_once() -> Iterator[None]:
    """Options change what is made of the answers to a pool of texts, and not the answers."""
    answers: dict[object, object] = {}
    ask = models.log_probs_before_and_after

    def asked(texts: list[Text], model: str, base: str, dtype: str | None = None) -> object:
        rows = ((*text.ids.tolist(), *text.labels.tolist()) for text in texts)
        key = Path(model).resolve(), base, tuple(rows), dtype
        if key not in answers:
            answers[key] = ask(texts, model, base, dtype)
        return answers[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models, "log_probs_before_and_after", asked)
        yield
