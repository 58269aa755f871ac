"""Rows as training reads them, and models without the record, which a score is beyond."""

import json
import math
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import BertTokenizer, GPT2LMHeadModel

from lightning_fedleak.attacks.texts.base import InversionAttack, TextGuess
from lightning_fedleak.cli.commands import invert
from lightning_fedleak.cli.commands.options import INVERT_ATTACKS
from lightning_fedleak.cli.finetuning import SourceError, load_tokenizer
from lightning_fedleak.cli.studies.references import Recipe, TrainedReferences, fit_texts, halves
from lightning_fedleak.cli.studies.training_rows import RowReader, UnknownLabels
from lightning_fedleak.evaluation.metrics.record_list import RecordList
from lightning_fedleak.model.anatomy import find_anatomy, place_of
from lightning_fedleak.model.model_runs import hidden_states
from lightning_fedleak.model.taps import Text
from lightning_fedleak.report import records
from tests.engine.channels.test_heads import WORDS, words
from tests.helpers.commands import options_of, run_command
from tests.helpers.folders import TEXTS, model_of_words, tiny_tokenizer, train
from tests.helpers.models import VOCAB, tiny_gpt2

SIZE, LENGTH = 60, 12  # rows of either side, and their tokens
STATED = {"epochs": 6, "batch_size": 6, "lr": 5e-3, "no_account": True, "drawn": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a base, a model that was trained on the members, and one on neither."""
    folder = tmp_path_factory.mktemp("references")
    torch.manual_seed(0)
    base = model_of_words(WORDS, 0, 0)
    rows = torch.randint(5, WORDS, (3 * SIZE, LENGTH))
    base.save_pretrained(folder / "base")
    words().save_pretrained(folder / "base")
    for n, name in enumerate(("members", "others")):
        part = rows[n * SIZE : (n + 1) * SIZE].tolist()
        lines = (json.dumps({"input_ids": row, "labels": row}) + "\n" for row in part)
        (folder / f"{name}.jsonl").write_text("".join(lines))
    for name, part in (("model", rows[:SIZE]), ("null", rows[-SIZE:])):
        model = GPT2LMHeadModel.from_pretrained(folder / "base")
        train(model, part)
        model.save_pretrained(folder / name)
    return folder


def command(folder: Path, model: str = "model", **more: Any) -> tuple[int, str]:
    sides = {name: str(folder / f"{name}.jsonl") for name in ("members", "others")}
    places = {"model": str(folder / model), "base": str(folder / "base")}
    status, text = run_command("memorization", **sides | places | STATED | more)
    return status, " ".join(text.split())


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_every_text_is_out_of_a_reference_and_halves_are_complements(count: int) -> None:
    inside = halves(101, count)
    assert inside.shape == (count, 101)
    assert set(inside.sum(1).tolist()) <= {50, 51}
    for k in range(0, count - 1, 2):
        assert torch.equal(inside[k], ~inside[k + 1])
    assert count == 1 or bool((~inside).any(0).all())


def test_the_score_is_the_one_of_a_list_of_references(folder: Path, tmp_path: Path) -> None:
    """Two models of halves, made here by the recipe, give the numbers of ``--references 2``."""
    rows = [
        json.loads(line)["input_ids"]
        for name in ("members", "others")
        for line in (folder / f"{name}.jsonl").read_text().splitlines()
    ]
    texts = [Text(ids, ids) for ids in map(torch.tensor, rows)]
    recipe = Recipe(6, 6, 5e-3)
    for number, inside in enumerate(halves(len(texts), 2)):
        torch.manual_seed(number)
        model = GPT2LMHeadModel.from_pretrained(folder / "base")
        own = [text for text, is_inside in zip(texts, inside.tolist(), strict=True) if is_inside]
        fit_texts(model, own, recipe, "causal", None).model.save_pretrained(tmp_path / str(number))
        lines = [
            json.dumps({n: text.ids.tolist() for n in ("input_ids", "labels")}) for text in own
        ]
        (tmp_path / f"{number}.jsonl").write_text("\n".join(lines))
    sources = [[str(tmp_path / f"{n}{end}") for n in range(2)] for end in ("", ".jsonl")]
    given = dict(zip(("reference", "reference_rows"), sources, strict=True))
    found = []
    for options in ({"references": 2}, given | dict.fromkeys(("epochs", "batch_size", "lr"))):
        command(folder, out=tmp_path / "out.json", **options)
        attacks = json.loads((tmp_path / "out.json").read_text())["attacks"]
        found.append(attacks["combined_reference"])
    assert found[0] == found[1]
    assert found[0]["auc"] > 0.95


def test_references_show_what_was_trained_on_and_nothing_else(folder, tmp_path, monkeypatch):
    settings = {"references": 2, "out": tmp_path / "out.json", "records": tmp_path / "list.jsonl"}
    for place in ("attacks.memorization.references", "engine.reference"):
        monkeypatch.setattr(f"lightning_fedleak.{place}.MIN_WEIGHT", -1.0)  # here it is near 0
    status, text = command(folder, at_most=[(None, 0.8)], **settings)
    assert status == 3
    assert "combined_reference/auc is shown to be at least" in text
    assert "2 references are trained on 60 rows each, 120 steps" in text
    attacks = json.loads((tmp_path / "out.json").read_text())["attacks"]
    assert attacks["combined_reference"]["auc"] > 0.95
    records = RecordList.load(tmp_path / "list.jsonl")
    assert records.head["references"] == 2
    assert records.head["at_least"] > 20
    kept = sorted(tmp_path.glob("reference_*"))
    assert [stat.S_IMODE(path.stat().st_mode) for path in kept] == [0o600] * 2
    monkeypatch.setattr(TrainedReferences, "_train", lambda *_: pytest.fail("they are kept"))
    assert command(folder, **settings)[0] == 0
    again = json.loads((tmp_path / "out.json").read_text())["attacks"]
    assert again["combined_reference"] == attacks["combined_reference"]
    monkeypatch.undo()
    _, text = command(folder, **settings)
    assert "it is not used, because its weight" in text
    assert "references" not in RecordList.load(tmp_path / "list.jsonl").head
    command(folder, "null", **settings)
    null = json.loads((tmp_path / "out.json").read_text())["attacks"]["combined_reference"]
    assert null["auc_low"] < 0.5 < null["auc_high"]


def test_adapters_are_trained_where_the_model_is_adapters(folder: Path, tmp_path: Path) -> None:
    lines = (folder / "members.jsonl").read_text().splitlines()
    config = LoraConfig(r=8, lora_alpha=64, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True)
    model = get_peft_model(GPT2LMHeadModel.from_pretrained(folder / "base"), config)
    train(model, torch.tensor([json.loads(line)["input_ids"] for line in lines]), 20)
    model.save_pretrained(tmp_path / "adapters")
    trained: list[int] = []

    class Counting(torch.optim.AdamW):
        def __init__(self, parameters: Any, **settings: Any) -> None:
            parameters = [*parameters]
            trained.append(sum(p.numel() for p in parameters))
            super().__init__(parameters, **settings)

    with mock.patch("torch.optim.AdamW", Counting):
        settings = {"model": str(tmp_path / "adapters"), "out": tmp_path / "out.json"}
        assert command(folder, references=2, **settings | {"epochs": 20})[0] == 0
    assert trained == [sum(p.numel() for p in model.parameters() if p.requires_grad)] * 2
    attacks = json.loads((tmp_path / "out.json").read_text())["attacks"]
    assert attacks["combined_reference"]["auc_low"] > 0.6


def record(folder: Path, steps: int = 40, **facts: Any) -> Path:
    group = {"lr": 0.1, "momentum": 0.9, "maximize": False}
    training = {
        "optimizers": [{"class": "SGD", "groups": [group]}], "max_steps": 40,
        "max_epochs": 4, "precision": "bf16-mixed", "gradient_clip_val": 1.0,
    }  # fmt: skip
    folder.mkdir(exist_ok=True)
    line = records.BeginLine(run="a", training=training, **facts)
    records.append_line(folder / "run.jsonl", line)
    ending = records.EndLine(run="a", step=steps, outcome="finished")
    records.append_line(folder / "run.jsonl", ending)
    return folder


def test_settings_are_read_from_the_record_and_options_come_first(folder, tmp_path) -> None:
    said = {
        "references": 2,
        "members": "m",
        "drawn": True,
        "run": record(tmp_path),
        "batch_size": 8,
        "lr": 0.2,
    }
    recipe = Recipe.of(options_of("memorization", model=str(folder / "model"), **said))
    assert recipe == Recipe(4, 8, 0.2, "SGD", {"momentum": 0.9}, True, 1.0)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"no_account": False}, "give --no-account"),
        ({"batch_size": None}, "--batch-size"),
        ({"drawn": False}, "give --drawn"),
        ({"references": 1}, "two models or more"),
        ({"references": 0}, "needs --references"),
        ({"run": "private"}, "had differential privacy"),
        ({"run": "resumed"}, "had differential privacy"),
        ({"run": "stopped", "epochs": None}, "--epochs"),
        ({"run": "absent"}, "no whole run.jsonl"),
    ],
)
def test_what_must_not_or_cannot_be_trained_is_refused(folder, tmp_path, more, words) -> None:
    if more.get("run") == "private":
        fact = records.DefenseFacts(name="dpsgd", class_name="DPSGD", guarantee="(8, 1e-5)-DP")
        record(tmp_path / "version_1", defenses=(fact,))  # a later run of the same folder
        more = {"run": record(tmp_path)}
    elif more.get("run") == "resumed":  # from a checkpoint of one with differential privacy
        releases = {"defense": "dpsgd", "history": [[1.0, 0.1, 40]]}
        more = {"run": record(tmp_path, resumed={"run": "0", "privacy": [releases]})}
    elif more.get("run") == "stopped":  # early, after fewer steps than 4 epochs take
        more = more | {"run": record(tmp_path, steps=30)}
    elif "run" in more:
        more = {"run": tmp_path}
    with pytest.raises(SourceError, match=words):
        command(folder, **{"references": 2} | more)


START = "{% for m in messages %}{{ '<' + m['role'] + '>' }}"
MARKED = START + (
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] + '|' }}{% endgeneration %}"
    "{% else %}{{ m['content'] + '|' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
PLAIN = START + (
    "{{ m['content'] + '|' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
LAST_ONLY = START + "{{ m['content'] }}{% if loop.last %}{{ '#' }}{% endif %}{% endfor %}"
CHAT = [
    {"role": "user", "content": "When is the review?"},
    {"role": "assistant", "content": "On Monday at ten."},
    {"role": "user", "content": "And where?"},
    {"role": "assistant", "content": "In room four."},
]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(None)


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def labelled(tokenizer: Any, text: Any) -> str:
    """Return the words of a text's labels."""
    return str(tokenizer.decode(text.labels[text.labels != -100].tolist()))


@settings(max_examples=20, deadline=None)
@given(st.lists(st.sampled_from(["the", "review", "is", "on", "Monday", "7"]), min_size=1))
def test_the_labels_of_an_answer_are_the_tokens_that_begin_behind_the_prompt(words) -> None:
    tokenizer = load_tokenizer(None)
    prompt, answer = "Question: " + " ".join(words) + "\nAnswer:", " " + " ".join(words[::-1])
    reader = RowReader(tokenizer, 512, prompt_column="q")
    ids, labels = reader._answered(prompt, answer, {})
    whole = prompt + answer + tokenizer.eos_token
    encoded = tokenizer(whole, return_offsets_mapping=True)
    places = [start >= len(prompt) for start, _ in encoded["offset_mapping"]]
    assert ids == encoded["input_ids"]
    assert [label != -100 for label in labels] == places
    assert ids[-1] == labels[-1] == tokenizer.eos_token_id


def test_rows_keep_their_numbers_and_are_cut(tokenizer: Any, tmp_path: Path) -> None:
    rows = [{"q": "One two", "a": " three four"}, {"q": "One", "a": ""}, {"q": "Five", "a": " six"}]
    source = write(tmp_path / "rows.jsonl", rows)
    reader = RowReader(tokenizer, 4, column="a", prompt_column="q")
    texts = reader.read(source)
    assert list(texts) == [0, 2]
    assert max(len(text.ids) for text in texts.values()) == 4
    every = RowReader(tokenizer, 40, column="a", prompt_column="q", loss="all").read(source)
    assert all(torch.equal(text.ids, text.labels) for text in every.values())


def test_plain_text_is_read_as_before(tokenizer: Any, tmp_path: Path) -> None:
    rows = [{"text": " one text of several words "}, {"text": ""}, {"text": "another one"}]
    texts = RowReader(tokenizer, 5).read(write(tmp_path / "rows.jsonl", rows))
    assert list(texts) == [0, 2]
    words = ["one text of several words", "another one"]
    expected = tokenizer(words, truncation=True, max_length=5)["input_ids"]
    assert [t.ids.tolist() for t in texts.values()] == expected
    lines = tmp_path / "lines.txt"
    lines.write_text("one text of several words\n\nanother one")
    assert list(RowReader(tokenizer, 5).read(lines)) == [0, 2]


@pytest.mark.parametrize("template", [MARKED, PLAIN])
def test_chats_have_the_turns_of_the_assistant_as_labels(tokenizer, tmp_path, template) -> None:
    hello = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Good day."}]
    source = write(tmp_path / "chats.jsonl", [{"messages": CHAT}, {"messages": hello}])
    reader = RowReader(tokenizer, 512, loss="answers", template=template)
    long, short = reader.read(source).values()
    assert labelled(tokenizer, long) == "On Monday at ten.|In room four.|"
    assert labelled(tokenizer, short) == "Good day.|"
    rendered = "<user>When is the review?|<assistant>On Monday at ten.|<user>And where?|"
    assert tokenizer.decode(long.ids.tolist()).startswith(rendered)
    every = RowReader(tokenizer, 512, loss="all", template=template).read(source)[0]
    assert torch.equal(every.labels, long.ids)


def test_a_chat_as_a_prompt_and_its_answer(tokenizer: Any, tmp_path: Path) -> None:
    row = {"prompt": CHAT[:3], "completion": CHAT[3:]}
    reader = RowReader(tokenizer, 512, prompt_column="prompt", template=PLAIN)
    [text] = reader.read(write(tmp_path / "chats.jsonl", [row])).values()
    assert labelled(tokenizer, text) == "In room four.|"


def test_labels_are_taken_as_they_are(tokenizer: Any, tmp_path: Path) -> None:
    row = {"input_ids": [5, 6, 7, 8], "labels": [-100, -100, 7, 8]}
    [text] = RowReader(tokenizer, 3).read(write(tmp_path / "ids.jsonl", [row])).values()
    assert (text.ids.tolist(), text.labels.tolist()) == ([5, 6, 7], [-100, -100, 7])


@pytest.mark.parametrize(
    ("row", "options", "error", "words"),
    [
        ({"prompt": "a", "completion": "b"}, {}, UnknownLabels, "--prompt-column"),
        ({"text": "a b", "question": "a", "answer": "b"}, {}, UnknownLabels, "--loss all"),
        ({"messages": CHAT}, {}, UnknownLabels, "--loss answers"),
        ({"messages": CHAT}, {"loss": "answers", "template": LAST_ONLY}, UnknownLabels, "labels"),
        ({"messages": CHAT}, {"loss": "all"}, SourceError, "chat template"),
        ({"input_ids": [1, 2]}, {}, UnknownLabels, "write the labels"),
        ({"input_ids": [1, 2], "labels": [1]}, {}, SourceError, "row 0"),
        ({"input_ids": [1], "labels": [1]}, {"loss": "all"}, UnknownLabels, "leave out --loss"),
        ({"text": "secret words"}, {"loss": "answers"}, SourceError, "needs --prompt-column"),
        ({"prompt": "secret", "text": "b"}, {"prompt_column": "prompt"}, SourceError, "--column"),
        ({"prompt": 4, "answer": "secret"}, {"prompt_column": "prompt"}, SourceError, "row 0"),
    ],
)
def test_what_cannot_be_known_is_refused(tokenizer, tmp_path, row, options, error, words) -> None:
    source = write(tmp_path / "rows.jsonl", [row])
    with pytest.raises(error, match=words) as refusal:
        RowReader(tokenizer, 64, **options).read(source)
    assert "secret" not in str(refusal.value)


def test_classes_of_a_csv_are_numbers_and_each_word_has_one(tokenizer: Any, tmp_path: Path) -> None:
    classes = {"LABEL_0": 0, "LABEL_1": 1}
    source = tmp_path / "rows.csv"
    source.write_text("text,label\nGood morning,1\nGood night,0\n")
    texts = RowReader(tokenizer, 9, head="row", classes=classes).read(source)
    assert [int(text.labels[-1]) for text in texts.values()] == [1, 0]
    source.write_text("text,label\nGood morning,2\n")
    with pytest.raises(UnknownLabels, match="class that is not in the model's config"):
        RowReader(tokenizer, 9, head="row", classes=classes).read(source)
    row = {"tokens": ["secret", "words"], "labels": [0, 1]}
    rows = write(tmp_path / "rows.jsonl", [row, row | {"labels": [0]}])
    with pytest.raises(SourceError, match=r"row 1 of .* as many labels as words"):
        RowReader(tokenizer, 9, head="token", classes=classes).read(rows)


@pytest.mark.parametrize("settings", [{}, {"prompt_column": "prompt"}, {"loss": "all"}])
@pytest.mark.parametrize("end", ["", "_input_ids"])
def test_preferences_are_unknown(tokenizer, tmp_path, settings, end) -> None:
    row = {"prompt": "When?", "chosen": " At ten.", f"rejected{end}": " Never."}
    reader = RowReader(tokenizer, 40, **settings)
    with pytest.raises(UnknownLabels, match="holds preferences"):
        reader.read(write(tmp_path / "rows.jsonl", [row]))
    del row[f"rejected{end}"]
    alone = RowReader(tokenizer, 40, prompt_column="prompt")
    assert labelled(tokenizer, alone.read(write(tmp_path / "rows.jsonl", [row]))[0]) == (
        " At ten." + tokenizer.eos_token
    )


# Rows, cells whose failure costs themselves alone, and utility against plain runs.


class Known(InversionAttack):
    """Returns a given text, and keeps what it observed."""

    default_name = "known"

    def __init__(self, layer: int, guess: Tensor, fails_at: float | None = None) -> None:
        super().__init__(layer)
        self.guess = guess
        self.fails_at = fails_at
        self.observed: list[Tensor] = []

    def reconstruct(
        self, hidden: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None
    ) -> TextGuess:
        self.observed.append(hidden)
        if self.fails_at == len(self.observed):
            raise RuntimeError("no luck")
        return TextGuess(self.guess[: len(hidden), : hidden.shape[1]], candidates=hidden.shape[1])


def ids(b: int = 4, length: int = 10) -> Tensor:
    return torch.randint(0, VOCAB, (b, length), generator=torch.Generator().manual_seed(1))


def test_rates_utility_and_what_is_sent() -> None:
    anatomy, tokens = find_anatomy(tiny_gpt2()), ids()
    guess = tokens.clone()
    guess[0, :5] = -1
    attack = Known(1, guess)
    cells = list(
        invert.run_cells(
            anatomy, {10: tokens}, [("known", lambda _: attack)], [1],
            [invert.Noise(0.0, True, 3), invert.Noise(2.0, True, 3)], texts=2,
        )
    )  # fmt: skip
    assert [(c.attack, c.layer, c.length, c.sigma, c.texts) for c in cells] == [
        ("known", 1, 10, 0.0, 2), ("known", 1, 10, 2.0, 2),
    ]  # fmt: skip
    for cell in cells:
        assert cell.rates["token_accuracy"].value == 0.75
        assert cell.rates["exact_sentences"].value == 0.5
        assert cell.problem is None
        assert cell.finished
        assert cell.utility is not None
    assert cells[0].utility != cells[1].utility
    hidden = hidden_states(anatomy, 1, tokens)
    torch.testing.assert_close(attack.observed[0], hidden[:2])
    noise = invert.gaussian_noise(hidden, invert.Noise(2.0, True, 3))
    torch.testing.assert_close(attack.observed[1], (hidden + noise)[:2])


def test_a_failure_costs_its_own_cell_alone() -> None:
    tokens = ids()

    def broken(_: int) -> InversionAttack:
        raise ValueError("not for this model")

    makers: list[tuple[str, Callable[[int], InversionAttack]]] = [
        ("broken", broken), ("sometimes", lambda layer: Known(layer, tokens, fails_at=1)),
    ]  # fmt: skip
    cells = list(
        invert.run_cells(
            find_anatomy(tiny_gpt2()), {10: tokens}, makers, [0, 2],
            [invert.Noise(0.0, False), invert.Noise(1.0, False)], texts=4,
        )
    )  # fmt: skip
    assert [(c.attack, bool(c.rates)) for c in cells] == [
        ("broken", False), ("broken", False), ("sometimes", False), ("sometimes", True),
    ] * 2  # fmt: skip
    assert cells[0].problem == "ValueError: not for this model"
    assert cells[2].problem == "RuntimeError: no luck"
    assert all(c.utility is not None for c in cells)


def test_an_unknown_utility_does_not_stop_the_attack() -> None:
    one = ids(4, 1)
    cells = invert.run_cells(
        find_anatomy(tiny_gpt2()), {1: one}, [("known", lambda k: Known(k, one))], [1],
        [invert.Noise(0.0, True)], texts=4,
    )  # fmt: skip
    (cell,) = cells
    assert cell.utility is None
    assert "utility: " in (cell.problem or "")
    assert cell.rates["token_accuracy"].value == 1


@pytest.mark.parametrize("name", INVERT_ATTACKS)
def test_every_adversary_reads_a_text_at_the_embeddings(name: str) -> None:
    anatomy = find_anatomy(tiny_gpt2())
    attack = invert.make_adversary(
        name, 0, steps=60, hello=7, special_ids=(0,), public_text=None, budget_seconds=600.0
    )
    assert attack.name == f"{name}@0"
    attack.prepare(anatomy)
    tokens = ids(2, 6)
    guess = attack.reconstruct(hidden_states(anatomy, 0, tokens), None, None)
    assert float((guess.tokens == tokens).float().mean()) >= 0.5


def test_rows_are_texts_cut_or_joined() -> None:
    tokenizer = tiny_tokenizer()
    whole = [tokenizer(t)["input_ids"] for t in TEXTS]
    rows = invert.rows_of_length(TEXTS, tokenizer, 5, 12, seed=1)
    assert rows.shape == (12, 5)
    assert {tuple(r) for r in rows.tolist()} == {tuple(w[:5]) for w in whole}
    long = invert.rows_of_length(TEXTS, tokenizer, 60, 12, seed=1)
    assert 1 < len(long) < 12
    order = torch.randperm(12, generator=torch.Generator().manual_seed(1)).tolist()
    decoded = tokenizer.decode(long[0].tolist())
    assert " ".join(TEXTS[i] for i in order).startswith(decoded)
    with_start = invert.rows_of_length(TEXTS, tokenizer, 5, 12, seed=1, start_token_id=0)
    assert torch.equal(with_start[:, 1:], rows[:, :4])
    assert with_start[:, 0].tolist() == [0] * 12
    assert len(invert.rows_of_length(TEXTS, tokenizer, 5, 3)) == 3
    with pytest.raises(SourceError, match=r"make only \d+ of 60 tokens"):
        invert.rows_of_length(TEXTS, tokenizer, 60, 12, min_rows=12)


def test_special_tokens_stay_at_the_ends(tmp_path: Path) -> None:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b", "c"]
    file = tmp_path / "vocab.txt"
    file.write_text("\n".join(words))
    tokenizer = BertTokenizer(str(file))
    assert invert.special_ends(tokenizer) == ([2], [3])
    rows = invert.rows_of_length(["a b c a b c a b c"], tokenizer, 6, 1)
    assert rows.tolist() == [[2, 5, 6, 7, 5, 3]]
    with pytest.raises(SourceError, match="special tokens"):
        invert.rows_of_length(["a b"], tokenizer, 2, 1)


def ids_of_texts(b: int = 3, length: int = 20) -> Tensor:
    return torch.randint(5, VOCAB, (b, length), generator=torch.Generator().manual_seed(1))


def gpt2_logits(model: torch.nn.Module, tokens: Tensor, layer: int, noise: Tensor) -> Tensor:
    """GPT-2 by hand, the noise put in between two of its blocks."""
    core = model.transformer
    states = core.wte(tokens) + core.wpe(torch.arange(tokens.shape[1]))
    for number, block in enumerate(core.h):
        states = states + noise if number == layer else states
        output = block(states)
        states = output if isinstance(output, Tensor) else output[0]
    states = states + noise if layer == len(core.h) else states
    return model.lm_head(core.ln_f(states))


def test_gaussian_noise_has_the_relative_or_absolute_deviation() -> None:
    scales = torch.tensor([0.0, 1.0, 10.0])
    hidden = torch.randn(40, 500, 3, generator=torch.Generator().manual_seed(0)) * scales + 7
    relative = invert.gaussian_noise(hidden, invert.Noise(0.5, True)).flatten(0, 1)
    torch.testing.assert_close(relative.std(0), 0.5 * scales, rtol=0.03, atol=1e-6)
    absolute = invert.gaussian_noise(hidden, invert.Noise(0.5, False)).flatten(0, 1)
    torch.testing.assert_close(absolute.std(0), torch.full((3,), 0.5), rtol=0.03, atol=0)
    assert not bool(invert.gaussian_noise(hidden, invert.Noise(0.0, True)).any())
    again = invert.gaussian_noise(hidden, invert.Noise(1.0, False)).flatten(0, 1)
    torch.testing.assert_close(again, 2 * absolute)


@pytest.mark.parametrize("layer", [0, 2, 3])
def test_noise_on_states_is_added_at_the_split(layer: int) -> None:
    model = tiny_gpt2(layers=3).double().eval()
    anatomy = find_anatomy(model)
    noise = torch.randn(3, 20, 16, generator=torch.Generator().manual_seed(2)).double()
    with torch.no_grad():
        clean = model(input_ids=ids_of_texts()).logits
        with place_of(anatomy, layer).on_states(noise.add):
            noised = model(input_ids=ids_of_texts()).logits
        expected = gpt2_logits(model, ids_of_texts(), layer, noise)
        torch.testing.assert_close(noised, expected)
        assert float((noised - clean).abs().max()) > 0.1
        assert torch.equal(model(input_ids=ids_of_texts()).logits, clean)


@pytest.mark.parametrize("at_once", [1, 1 << 25])
def test_utility_equals_the_next_token_predictions_of_the_plain_model(at_once, monkeypatch) -> None:
    monkeypatch.setattr("lightning_fedleak.cli.commands.invert.LOGITS_AT_ONCE", at_once)
    model = tiny_gpt2(layers=3).double()
    anatomy = find_anatomy(model)
    model.train()
    tokens, state = ids_of_texts(), torch.random.get_rng_state()
    measured = invert.utility(anatomy, 2, tokens, invert.Noise(0.7, True, 3))
    assert model.training
    assert torch.equal(torch.random.get_rng_state(), state)
    model.eval()
    noise = invert.gaussian_noise(hidden_states(anatomy, 2, tokens), invert.Noise(0.7, True, 3))
    correct, nats = [], []
    with torch.no_grad():
        logits = gpt2_logits(model, tokens, 2, noise)
    for row in range(len(tokens)):
        for position in range(tokens.shape[1] - 1):
            probabilities = logits[row, position].softmax(0)
            correct.append(float(probabilities.argmax() == tokens[row, position + 1]))
            nats.append(-math.log(float(probabilities[tokens[row, position + 1]])))
    assert measured.accuracy == pytest.approx(sum(correct) / len(correct))
    assert measured.perplexity == pytest.approx(math.exp(sum(nats) / len(nats)), rel=1e-5)
    clean = invert.utility(anatomy, 2, tokens, invert.Noise(0.0, True))
    assert clean.perplexity != measured.perplexity
