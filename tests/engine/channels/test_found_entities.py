"""Values that are found in a run's texts: in gradients, and in the trained weights."""

import json
import random
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import ByT5Tokenizer, GPT2Config, GPT2LMHeadModel

from lightning_fedleak import BagOfWords, LeakageMonitor, RiskGate
from lightning_fedleak.attacks import Guess, WordGuess
from lightning_fedleak.attacks.memorization import Combined, PromptRatio
from lightning_fedleak.attacks.texts.base import TextGuess
from lightning_fedleak.callbacks import WatchSettings
from lightning_fedleak.engine import Memorization, Options
from lightning_fedleak.engine.channels.released import pool
from lightning_fedleak.engine.channels.released.audit import Comparison
from lightning_fedleak.engine.channels.words import WordsChannel, WordTruth, _texts_of
from lightning_fedleak.evaluation.canaries import leave_out
from lightning_fedleak.evaluation.entities import FoundEntities
from lightning_fedleak.model.batches import TokenBatch
from lightning_fedleak.model.snapshots import UnusableObservation
from lightning_fedleak.report import findings, page, read
from lightning_fedleak.trainers import Threshold
from tests.engine.channels.test_memorization import fit, lines, monitor
from tests.engine.test_inversion import Recording
from tests.helpers.loops import lines_of, train

TOKENIZER = ByT5Tokenizer()
MAILS = ["Write to jo@ex.de now!", "Call 555-0123, or ann@b.org", "Nothing in here to find.  "]


def model(**settings: Any) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    sizes = {"vocab_size": 140, "n_embd": 48, "n_head": 4, "n_layer": 2, "n_positions": 64}
    settings = {"bos_token_id": 0, "eos_token_id": 0, "tie_word_embeddings": False} | settings
    return GPT2LMHeadModel(GPT2Config(**sizes | settings, resid_pdrop=0.0, attn_pdrop=0.0))


def batch(texts: list[str]) -> dict[str, torch.Tensor]:
    encoded = TOKENIZER(texts, padding=True, return_tensors="pt")
    labels = encoded["input_ids"].masked_fill(encoded["attention_mask"] == 0, -100)
    return {**encoded, "labels": labels}


class Half(BagOfWords):
    """Name the types with an even id alone."""

    needs_control = True

    def run(self, *args: Any) -> Guess:
        guess: Any = super().run(*args)
        return WordGuess(guess.types[guess.types % 2 == 0], surface=guess.surface)


def watched(folder: Path, attack: Any, **more: Any) -> Any:
    settings = {"entities": ("phone", "email"), "tokenizer": TOKENIZER, "every_n_steps": 1} | more
    return train(folder, attack, model(), batches=[batch(MAILS)], lr=0.0, **settings).watch


def test_the_recall_of_words_is_of_the_types_with_letters_in_values(tmp_path: Path) -> None:
    events: list[Any] = []
    gate = Threshold("leakage/bag_of_words/entity/email/recall", at_most=0.1, action=events.append)
    watch = watched(tmp_path, Half(), gates=[gate])
    letters = {one for mail in ("jo@ex.de", "ann@b.org") for one in mail if one.isalpha()}
    ids = [ord(one) + 3 for one in letters]
    share = sum(one % 2 == 0 for one in ids) / len(ids)
    assert watch.latest["leakage/bag_of_words/entity/email/recall"] == pytest.approx(share)
    (line,) = lines_of(tmp_path, "bag_of_words/entity/email")
    assert line["n"] == len(ids)
    assert {*line["metrics"]} == {"recall", "recall_of_control", "unexplained"}
    assert line["metrics"]["recall_of_control"]["value"] is not None
    assert events
    # A number of digits has no word of its own: that is no 0.
    (number,) = lines_of(tmp_path, "bag_of_words/entity/phone")
    assert "only attacks on texts measure numbers" in number["unknown"]
    assert "leakage/worst/words" in watch.latest


def test_the_recall_of_texts_is_of_the_tokens_in_values(tmp_path: Path) -> None:
    ids, mask = (batch(MAILS)[name] for name in ("input_ids", "attention_mask"))
    guessed = ids.where(ids % 2 == 0, 0)  # every even token, in its place
    attack = Recording(guess=lambda hidden: TextGuess(guessed[: len(hidden), : hidden.shape[1]]))
    watch = watched(tmp_path, attack, texts=3)
    for kind, values in (("phone", ["555-0123"]), ("email", ["jo@ex.de", "ann@b.org"])):
        tokens = [ord(one) + 3 for value in values for one in value]
        share = sum(one % 2 == 0 for one in tokens) / len(tokens)
        name = f"leakage/recording/entity/{kind}/recall"
        assert watch.latest[name] == pytest.approx(share), kind
    assert lines_of(tmp_path, "recording/entity/email")[0]["n"] == 2
    assert int(mask.sum()) > 0


def test_processes_of_one_client_unite_the_words_of_values() -> None:
    """Each process knows one half of the words."""
    entities: Any = {"entities": ("phone", "email"), "tokenizer": TOKENIZER}
    channel: Any = WordsChannel([Half()], Options(**entities))
    used = torch.zeros(4, 9, dtype=torch.bool)  # as labels, as input, in phone numbers, in e-mails
    used[0, [3, 8]] = used[1, [3, 5, 8]] = used[3, [5, 8]] = True
    here, elsewhere = used.clone(), used.clone()
    here[:, 6:], elsewhere[:, :6] = False, False
    other = torch.cat([elsewhere.flatten().long(), torch.tensor([3, 0])])
    channel.run = SimpleNamespace(
        client="world", processes=2, device="cpu", summed=lambda numbers: numbers + other
    )
    channel._size = 9
    truth = channel.joined(WordTruth(here, 2, True))
    assert torch.equal(truth.used, used)
    assert truth[1:] == (5, True)
    assert channel._types(truth, "input", "email").tolist() == [5, 8]
    assert channel._types(truth, "input", "phone").tolist() == []
    assert channel._types(truth, "input").tolist() == [3, 5, 8]
    with pytest.raises(UnusableObservation, match="no single labels"):
        channel._types(truth, "output")
    assert torch.equal(channel.joined(None).used, elsewhere)  # this process read no batch
    assert channel._types(channel.joined(None), "output", "email").tolist() == [8]


def test_masked_words_and_answers_are_read_as_they_were() -> None:
    ids = torch.tensor([[5, 9, 7, 0]])
    masked = TokenBatch(ids, torch.tensor([[-100, 6, -100, -100]]), (ids > 0).long(), "masked")
    assert [one.tolist() for one in _texts_of(masked, has_answers=True)] == [[5, 6, 7]]
    answer = TokenBatch(ids, torch.tensor([[4, 2, -100]]), (ids > 0).long(), "seq2seq")
    assert [one.tolist() for one in _texts_of(answer, has_answers=True)] == [[5, 9, 7], [4, 2]]
    assert [one.tolist() for one in _texts_of(answer, has_answers=False)] == [[5, 9, 7]]


def test_without_a_tokenizer_or_an_attack_values_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="decodes what it encoded"):
        watched(tmp_path / "a", "auto", tokenizer=None)
    with pytest.raises(ValueError, match="'fone': give"):
        WatchSettings(entities=("fone",))


# ---- the trained weights ------------------------------------------------------------------------


def rows(n: int = 200) -> tuple[list[dict[str, torch.Tensor]], list[str]]:
    """Return rows with a number in the prompt and one in the label, and all numbers."""
    draw = random.Random(0)
    numbers = [f"{draw.randrange(100, 1000)}-{draw.randrange(1000, 10000)}" for _ in range(2 * n)]
    data = []
    for asked, answered in zip(numbers[::2], numbers[1::2], strict=True):
        words = ["".join(draw.choices("abcdefgh", k=7)) for _ in range(4)]
        prompt = f"{words[0]}: {asked} {words[1]}. "
        text = f"{prompt}{words[2]}: {answered} {words[3]}."
        ids = torch.tensor(TOKENIZER(text, add_special_tokens=False)["input_ids"])
        labels = ids.masked_fill(torch.arange(len(ids)) < len(prompt), -100)
        data.append({"input_ids": ids, "labels": labels})
    return data, numbers


def watch(folder: Path, attacks: Any = (), **more: Any) -> LeakageMonitor:
    settings = {"memorization": Memorization(max_overhead=20, looks=()), "tokenizer": TOKENIZER}
    settings |= {"entities": ("phone", "email")} | more
    return monitor(folder, attacks or [Combined()], **settings)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    folder = tmp_path_factory.mktemp("found")
    data, numbers = rows()
    train, _ = leave_out(data, 100, seed=1)
    watching = watch(folder, report=True)
    gates = [
        RiskGate(f"leakage/entity/phone/{place}/auc", at_most=0.6, action="warn")
        for place in ("label", "prompt")
    ]
    fit([watching, *gates], model(), train, lr=5e-3, max_epochs=10)
    return SimpleNamespace(folder=folder, numbers=numbers, latest=watching.latest, gates=gates)


def test_values_in_labels_are_shown_and_those_in_prompts_are_not(run: SimpleNamespace) -> None:
    label = lines(run.folder, "entity/phone/label")[-1]
    assert label["metrics"]["auc"]["low"] > 0.6
    assert label["metrics"]["members"]["value"] == 100
    assert label["metrics"]["others"]["value"] == 100
    prompt = lines(run.folder, "entity/phone/prompt")[-1]["metrics"]
    assert prompt["auc"]["low"] <= 0.5
    assert run.gates[0].fired is not None
    assert run.gates[1].fired is None
    assert "0 values were trained on" in lines(run.folder, "entity/email/label")[-1]["unknown"]
    assert run.latest["leakage/worst/memorization"] == run.latest["leakage/combined/auc"]
    assert not any("entity/phone" in name and "shown" in name for name in run.latest)
    assert "Values, phone in the label" in page(findings(read([run.folder])))


def test_values_in_prompts_that_refute_the_draw_are_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find(compared: Comparison, *, drawn: bool) -> str | None:
        return "of different kinds" if compared.part == "prompts" and drawn else None

    monkeypatch.setattr(Comparison, "why_unknown", find)
    fit([watch(tmp_path)], model(), leave_out(rows()[0], 100, seed=1)[0], max_epochs=1)
    prompt, label = (lines(tmp_path, f"entity/phone/{side}")[-1] for side in ("prompt", "label"))
    assert "the rows left out are of different kinds" in prompt["unknown"]
    assert label["metrics"]["auc"]["value"] is not None


def test_no_value_is_in_a_file_of_the_run(run: SimpleNamespace) -> None:
    # Seven digits in a row stand by chance in a fraction, and in a hash in one of ten runs.
    chance = re.compile(rb"\d+\.\d+(e-?\d+)?|\b([0-9a-f]{12}|[0-9a-f]{32}|[0-9a-f]{64})\b")
    files = [path for path in run.folder.rglob("*") if path.is_file()]
    assert {"leakage.jsonl", "run.jsonl", "report.html"} <= {path.name for path in files}
    for path in files:
        content = chance.sub(b"", path.read_bytes())
        for number in run.numbers:
            ids = TOKENIZER(number, add_special_tokens=False)["input_ids"]
            assert number.encode() not in content, path
            assert number.replace("-", "").encode() not in content, path
            assert json.dumps(ids)[1:-1].encode() not in content, path


def test_all_rows_are_searched_as_is_said_and_compared_once(tmp_path, monkeypatch) -> None:
    said: list[str] = []
    compare = FoundEntities.compare
    monkeypatch.setattr(pool, "affordable", lambda *_: 60)
    monkeypatch.setattr(pool, "MAX_ROWS", 5)
    monkeypatch.setattr(pool, "rank_zero_info", said.append)
    monkeypatch.setattr(
        FoundEntities, "compare", lambda *args: said.append("compared") or compare(*args)
    )
    train, _ = leave_out(rows(70)[0], 70 // 2, seed=1)
    fit(
        [watch(tmp_path, attacks=[Combined(), PromptRatio()])], model(), train, lr=5e-3,
        max_epochs=1,
    )  # fmt: skip
    text, *compared = said
    assert "10 more rows are searched" in text
    assert len(compared) == len(lines(tmp_path, "combined"))
