"""The fine-tuning module and its data."""

import csv
import gzip
import importlib
import json
import logging
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_fedleak.cli.finetuning import assets as real_hub
from lightning_fedleak.cli.finetuning.assets import TRAINING, SourceError, quiet_logs
from lightning_fedleak.cli.finetuning.module import CausalLMFineTuning, TextDataModule
from lightning_fedleak.cli.finetuning.texts import read_texts
from lightning_fedleak.lightning_packages import PACKAGES
from tests.helpers.folders import TEXTS, save_tiny_causal_lm, tiny_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_tiny_causal_lm(tmp_path_factory.mktemp("model")))


def trained(module: CausalLMFineTuning) -> set[str]:
    return {name for name, p in module.named_parameters() if p.requires_grad}


def test_trains_everything_in_train_mode(folder: str) -> None:
    module = CausalLMFineTuning(folder)
    assert all(m.training for m in module.modules())
    assert trained(module) == {name for name, _ in module.named_parameters()}
    assert next(module.parameters()).dtype == torch.float32


def test_loss_is_the_mean_next_token_cross_entropy(folder: str) -> None:
    module = CausalLMFineTuning(folder).eval()
    ids = torch.tensor([[5, 9, 3, 7], [8, 2, 0, 0]])
    labels = ids.masked_fill(torch.tensor([[False] * 4, [False, False, True, True]]), -100)
    mask = (labels != -100).long()
    loss = module(input_ids=ids, attention_mask=mask, labels=labels)
    logits = module.model(input_ids=ids, attention_mask=mask).logits.double().log_softmax(-1)
    pairs = [(0, 0, 9), (0, 1, 3), (0, 2, 7), (1, 0, 2)]
    expected = -sum(logits[r, c, t] for r, c, t in pairs) / len(pairs)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-6)


def test_lora_trains_adapters_only(folder: str) -> None:
    names = trained(CausalLMFineTuning(folder, peft="lora"))
    assert names
    assert all("lora_" in name for name in names)


def test_bitfit_trains_biases_only(folder: str) -> None:
    module = CausalLMFineTuning(folder, peft="bitfit")
    names = trained(module)
    assert names == {name for name, _ in module.named_parameters() if name.endswith(".bias")}
    assert names


def test_a_model_that_peft_has_wrapped_is_trained_as_it_is(folder: str) -> None:
    wrapped = CausalLMFineTuning(folder, peft="lora").model
    module = CausalLMFineTuning(wrapped)
    assert module.model is wrapped
    assert all("lora_" in name for name in trained(module))


def test_an_unknown_peft_is_refused(folder: str) -> None:
    with pytest.raises(ValueError, match="peft must be 'lora' or 'bitfit'"):
        CausalLMFineTuning(folder, peft="LoRA")


def test_bitfit_refuses_a_model_without_biases() -> None:
    config = LlamaConfig(
        vocab_size=32, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=1,
    )  # fmt: skip
    with pytest.raises(SourceError, match="LlamaForCausalLM has none; use peft='lora'"):
        CausalLMFineTuning(LlamaForCausalLM(config), peft="bitfit")


def test_a_missing_model_is_said_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"no folder of a model \(no config.json\)"):
        CausalLMFineTuning(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(SourceError, match="no causal language model could be loaded from"):
        CausalLMFineTuning(str(tmp_path))


def test_lora_without_peft_says_what_to_install(folder, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ImportError, match=r"pip install .*\[peft\]"):
        CausalLMFineTuning(folder, peft="lora")


def test_the_mean_of_sample_means_weighs_texts_alike(folder: str) -> None:
    batch = {
        "input_ids": torch.tensor([[5, 6, 7, 8], [9, 10, 3, 3]]),
        "attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]]),
        "labels": torch.tensor([[5, 6, 7, 8], [9, 10, -100, -100]]),
    }
    module = CausalLMFineTuning(folder, loss="sample_mean").eval()
    rows = [{name: tensor[i : i + 1] for name, tensor in batch.items()} for i in (0, 1)]
    each = [module.model(**row).loss for row in rows]
    assert torch.allclose(module(**batch), (each[0] + each[1]) / 2)
    plain = CausalLMFineTuning(module.model).eval()
    assert torch.allclose(plain(**batch), (3 * each[0] + each[1]) / 4)
    with pytest.raises(ValueError, match="'token_mean' or 'sample_mean', got 'mean'"):
        CausalLMFineTuning(folder, loss="mean")  # type: ignore[arg-type]


@pytest.mark.parametrize("package", [*PACKAGES, "lightning.fabric", "lightning_fabric"])
def test_whatever_lightning_says_in_a_fit_can_be_silenced(package: str) -> None:
    importlib.import_module(package)  # the newest import decides which logger all of them use
    log = logging.getLogger(f"{package}.utilities.rank_zero")
    before = log.getEffectiveLevel()
    assert before <= logging.INFO
    with quiet_logs(TRAINING):
        assert not log.isEnabledFor(logging.WARNING)
    assert log.getEffectiveLevel() == before


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "private.txt"
    path.write_text("\n".join(TEXTS))
    return str(path)


def rows(loader) -> list[list[int]]:
    return [
        ids[mask.bool()].tolist()
        for batch in loader
        for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
    ]


def test_rows_hold_the_texts_and_nothing_else(text: str) -> None:
    tokenizer = tiny_tokenizer()
    data = TextDataModule(text, tokenizer, batch_size=1, length=64, val_fraction=0.25)
    data.setup()
    observed = sorted(tokenizer.decode(r) for r in rows(data.train_dataloader()))
    held_out = sorted(tokenizer.decode(r) for r in rows(data.val_dataloader()))
    assert len(held_out) == 3
    assert sorted(observed + held_out) == sorted(TEXTS)


def test_long_texts_go_on_in_the_next_row(text: str) -> None:
    tokenizer = tiny_tokenizer()
    data = TextDataModule(text, tokenizer, batch_size=1, length=5, val_fraction=0.1)
    data.setup()
    val = rows(data.val_dataloader())
    whole = [i for row in val for i in row]
    assert max(map(len, val)) == 5
    expected = [tokenizer(t)["input_ids"] for t in TEXTS]
    retained = [ids[: len(ids) - (len(ids) % 5 == 1)] for ids in expected]
    assert whole in retained


def test_padding_is_masked_and_never_a_label(text: str) -> None:
    data = TextDataModule(text, tiny_tokenizer(), batch_size=4)
    data.setup()
    for batch in data.train_dataloader():
        real = batch["attention_mask"].bool()
        assert not real.all()
        assert torch.equal(batch["labels"][real], batch["input_ids"][real])
        assert (batch["labels"][~real] == -100).all()
        assert (real.int().diff(dim=1) <= 0).all()


def test_order_and_split_follow_from_the_seed_alone(text: str) -> None:
    def epochs(seed: int) -> list[list[list[int]]]:
        data = TextDataModule(text, tiny_tokenizer(), batch_size=2, seed=seed)
        data.setup()
        loader = data.train_dataloader()
        return [rows(loader), rows(loader), rows(data.val_dataloader())]

    before = torch.get_rng_state()
    first = epochs(0)
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(3)
    assert epochs(0) == first
    assert epochs(1) != first
    assert first[0] != first[1]


def test_refuses_what_cannot_work(text: str, tmp_path: Path) -> None:
    for wrong in ({"batch_size": 0}, {"length": 1}, {"val_fraction": 1.0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            TextDataModule(text, tiny_tokenizer(), **wrong)
    with pytest.raises(SourceError, match=r"length must be .* to 64, got 65: tokens"):
        TextDataModule(text, tiny_tokenizer(), length=65).setup()
    with pytest.raises(SourceError, match=r"fewer than batch_size=50"):
        TextDataModule(text, tiny_tokenizer(), batch_size=50).setup()
    single = tmp_path / "one.txt"
    single.write_text("hi\n")
    with pytest.raises(SourceError, match="in a plain file one a line"):
        TextDataModule(str(single), None, batch_size=1).setup()
    with pytest.raises(SourceError, match=r"no folder './nowhere'"):
        TextDataModule(text, "./nowhere").setup()
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(SourceError, match="no tokenizer could be loaded from"):
        TextDataModule(text, str(tmp_path)).setup()


WORDS = ["one, two", 'a "quoted" word', "zwölf Äpfel"]


@given(st.lists(st.text(min_size=1).filter(str.strip), min_size=1, max_size=8))
def test_json_lines_keep_any_text(tmp_path_factory, texts) -> None:
    path = tmp_path_factory.getbasetemp() / "any.jsonl"
    path.write_text("\n".join(json.dumps({"text": t}) for t in texts), encoding="utf-8")
    assert read_texts(path) == [t.strip() for t in texts]


@pytest.mark.parametrize("packed", [False, True])
def test_plain_text_is_one_text_per_line(tmp_path: Path, packed: bool) -> None:
    data = ("\n\n".join(WORDS) + "\n").encode()
    path = tmp_path / ("a.txt.gz" if packed else "a.txt")
    path.write_bytes(gzip.compress(data) if packed else data)
    assert read_texts(path) == WORDS


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.tsv", "id\ttext\n1\tone, two\n2\tthree; four\n"),
        ("a.csv", 'id;text\r\n1;one, two\r\n2;"three; four"\r\n'),
        ("a.csv", '\ufeffid,text\n1,"one, two"\n2,three; four\n'),
        ("a.CSV", 'id, text\n1,"one, two"\n\n2,three; four\n3\n'),
        ("a.json", '[{"id": 1, "text": "one, two"},\n {"id": 2, "text": "three; four"}]'),
        ("a.json", '{"text": "one, two"}\n{"text": "three; four"}\n'),
        ("a.ndjson", '"one, two"\n\n"three; four"\n'),
    ],
)
def test_tables(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content, encoding="utf-8", newline="")
    assert read_texts(tmp_path / name) == ["one, two", "three; four"]


def test_parquet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.parquet"
    path.write_bytes(b"PAR1 and no more")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "pyarrow", None)
        with pytest.raises(SourceError, match=r"is a parquet file; .*pip install .*\[datasets\]"):
            read_texts(path)
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    with pytest.raises(SourceError, match=r"not a readable \.parquet file"):
        read_texts(path)
    parquet.write_table(arrow.table({"id": [1, 2], "text": ["one", "two"]}), path)
    assert read_texts(path) == ["one", "two"]


def test_text_column_is_given_or_the_only_string_column(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"body": "hello", "n": 1}\n{"body": "there", "n": 2}\n')
    assert read_texts(path) == ["hello", "there"]
    path.write_text('{"body": "hello", "tweet.text": "x"}\n')
    assert read_texts(path, column="tweet.text") == ["x"]
    with pytest.raises(SourceError, match=r"\['body', 'tweet\.text'\]; name one with column="):
        read_texts(path)
    with pytest.raises(SourceError, match="no column 'test' with text"):
        read_texts(path, column="test")


CHAT = [
    {"role": "user", "content": "Where is my card?"},
    {"role": "assistant", "content": None, "tool_calls": []},
    {"role": "assistant", "content": [{"type": "text", "text": "On its way."}, {"type": "image"}]},
]
SHAREGPT_CHAT = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]


@pytest.mark.parametrize(
    "content",
    [
        [{"id": "x", "messages": CHAT}, {"id": "y", "messages": SHAREGPT_CHAT}],
        [{"conversations": CHAT}, {"conversations": SHAREGPT_CHAT}],
        [CHAT, SHAREGPT_CHAT],
    ],
)
def test_a_chat_is_one_text(tmp_path: Path, content: list[object]) -> None:
    (tmp_path / "a.json").write_text(json.dumps(content))
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, content)))
    for name in ("a.json", "a.jsonl"):
        assert read_texts(tmp_path / name) == ["Where is my card?\nOn its way.", "Hi\nHello"]


def test_a_folder_has_a_text_in_each_file(tmp_path: Path) -> None:
    (tmp_path / "pos").mkdir()
    (tmp_path / "pos" / "1.txt").write_text("one\ntwo\n")
    (tmp_path / "0.txt").write_text("zero")
    (tmp_path / "notes.csv").write_text("not,read")
    assert read_texts(tmp_path) == ["zero", "one\ntwo"]
    with pytest.raises(SourceError, match=r"no column 'body' with text; it has \['text'\]"):
        read_texts(tmp_path, "body")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"text": "Smith"}\n{oops', "line 2 is not JSON"),
        ("a.jsonl", "[1, 2]", "line 1 is a list"),
        ("a.jsonl", "", "holds no text"),
        ("a.csv", "text\n", "holds no text"),
        ("a.json", "5", "element 1 is a int; it must be an object"),
        ("a.csv", 'id,text\n1,one\n2,"Smith\n3,four\n', "not a readable .csv file"),
        ("a.csv", "text\none\nSmith, three\n", "line 3 has more fields than the first line"),
        ("a.csv", "id;text\n1;Smith;b\n", "a field that holds ';' in quotes"),
        ("a.csv", "Dear Dr Smith my test,Anna\nsecond,row\n", "first line"),
        ("a.txt.gz", "Smith", "not a readable .gz file"),
    ],
)
def test_file_errors_give_the_line_but_no_content(tmp_path, name, content, message) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(SourceError, match=message) as error:
        read_texts(tmp_path / name)
    assert "Smith" not in str(error.value)


@pytest.mark.parametrize(
    "data", ["Müller".encode("cp1252"), "Müller".encode("utf-16"), b"\x00\x01\x02", b"%PDF\xff"]
)
def test_non_utf8_files_are_refused_without_quoting_them(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "letters.txt"
    path.write_bytes(data)
    with pytest.raises(
        SourceError, match=r"letters\.txt' is (not UTF-8|in UTF-16|a document)"
    ) as error:
        read_texts(path)
    assert "ller" not in str(error.value)
    assert error.value.__cause__ is None  # a decoder's error holds the text
    assert error.value.__context__ is None


def test_a_field_may_be_long(tmp_path: Path) -> None:
    long = "word " * 40_000
    limit = csv.field_size_limit()
    (tmp_path / "a.csv").write_text(f"text,n\n{long},1\n")
    assert read_texts(tmp_path / "a.csv") == [long.strip()]
    assert csv.field_size_limit() == limit


class Hub:
    def __init__(self) -> None:
        self.requests: list[tuple[str, str | None, str]] = []

    def load_dataset(self, name: str, config: str | None, *, split: str) -> list[dict[str, str]]:
        self.requests.append((name, config, split))
        return [{"text": "hello", "summary": "hi"}]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    created = Hub()
    monkeypatch.setitem(sys.modules, "datasets", created)
    monkeypatch.setattr(real_hub, "why_unreachable", lambda: None)
    return created


@pytest.mark.parametrize(
    "source",
    [
        *("./letters", "../letters", "~/no/such", "/no/such", "letters.csv", "letters.csv:body"),
        *("org/letters.jsonl", "a/b/c", "letters/", "here/letters", "C:\\letters"),
        "https://host/letters.csv",
    ],
)
def test_a_name_like_a_path_is_not_looked_for_on_the_hub(source, tmp_path, monkeypatch, hub):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    with pytest.raises(SourceError, match="there is no file"):
        read_texts(source)
    assert hub.requests == []


def test_names_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hub: Hub) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org").mkdir()
    with pytest.raises(SourceError, match="of that name write 'org/name:'"):
        read_texts("org/name")
    assert read_texts("imdb") == ["hello"]
    assert read_texts("imdb::test") == ["hello"]
    assert read_texts("org/name:small:validation:summary") == ["hi"]
    assert read_texts("imdb", column="summary") == ["hi"]
    assert hub.requests == [
        ("imdb", None, "train"),
        ("imdb", None, "test"),
        ("org/name", "small", "validation"),
        ("imdb", None, "train"),
    ]
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(SourceError, match=r"pip install .*\[datasets\]"):
        read_texts("imdb")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("", "the name of the text is empty"),
        ("/no/such", r"\(there is no folder '/no' either"),
        ("leters.csv", r"did you mean 'letters\.csv'\?"),
        ("My dear Anna, " * 30, "a name of 420 characters is no file, folder or dataset"),
        ("~nobody-of-this-name/letters", "no user has the name after ~"),
    ],
)
def test_errors_of_names(source, message, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "letters.csv").touch()
    with pytest.raises(SourceError, match=message) as error:
        read_texts(source)
    assert "Anna" not in str(error.value)


def test_a_document_that_is_no_text_is_named_with_what_to_do(tmp_path) -> None:
    path = tmp_path / "letters.docx"
    path.write_bytes(b"PK\3\4" + bytes(30))
    with pytest.raises(
        SourceError, match=r"letters\.docx' is a document .*, not text: export it as"
    ):
        read_texts(path)


def test_unreadable_files_raise_source_error(tmp_path, monkeypatch) -> None:
    def refuses(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(Path, "read_bytes", refuses)
    (tmp_path / "a.txt").touch()
    with pytest.raises(SourceError, match=r"a\.txt' cannot be read: Permission denied"):
        read_texts(tmp_path / "a.txt")
