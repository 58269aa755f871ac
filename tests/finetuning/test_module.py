"""The fine-tuning module and its data."""

from __future__ import annotations

import importlib
import logging
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_fedleak.cli.finetuning.assets import TRAINING, SourceError, quiet_logs
from lightning_fedleak.cli.finetuning.module import CausalLMFineTuning, TextDataModule
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
