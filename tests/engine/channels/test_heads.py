"""Token classifiers and masked models, asked by their trained weights in each kind of loop."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_fedleak.attacks.memorization import Combined, Extraction, LossRatio, PromptRatio
from lightning_fedleak.callbacks import WatchSettings
from lightning_fedleak.engine import Memorization
from lightning_fedleak.evaluation.canaries import leave_out
from lightning_fedleak.evaluation.canaries.repeats import scored_texts
from lightning_fedleak.evaluation.metrics.record_list import RecordList
from lightning_fedleak.model.anatomy import find_anatomy
from lightning_fedleak.model.batches import TokenBatch, read_batch
from lightning_fedleak.model.taps import texts_in, token_log_probs, unmasked
from lightning_fedleak.trainers import LeakageCallback, Watch
from tests.engine.channels.test_memorization import fit, lines
from tests.engine.channels.test_short_rows import Classifying, watching

WORDS, LENGTH, MASK = 64, 16, 4
MARKS = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "[MASK]": MASK}


def words() -> transformers.PreTrainedTokenizerFast:
    vocabulary = MARKS | {f"w{n}": n for n in range(5, WORDS)}
    marks = {f"{name.strip('[]').lower()}_token": name for name in MARKS}
    model = Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    model.pre_tokenizer = WhitespaceSplit()
    model.post_processor = TemplateProcessing("[CLS] $A", special_tokens=[("[CLS]", 2)])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=model, **marks)


def encoder(head: str) -> torch.nn.Module:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=WORDS, hidden_size=48, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=96, max_position_embeddings=32, num_labels=5,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    heads = (
        transformers.BertForSequenceClassification,
        transformers.BertForTokenClassification,
        transformers.BertForMaskedLM,
    )
    return dict(zip(("row", "token", "masked"), heads, strict=True))[head](config)


def data(head: str, n: int = 240) -> list[dict[str, Tensor]]:
    """Return rows that begin with [CLS], of which the last two tokens of some have no class."""
    generator = torch.Generator().manual_seed(5)
    rows = []
    for row in range(n):
        ids = torch.randint(5, WORDS, (LENGTH - row % 3,), generator=generator)
        ids[0] = MARKS["[CLS]"]
        labels = torch.randint(0, 5, ids.shape, generator=generator)
        labels[0] = -100
        labels[LENGTH - 2 :] = -100
        kept = {} if head == "masked" else {"labels": labels[3] if head == "row" else labels}
        rows.append({"input_ids": ids, "attention_mask": torch.ones_like(ids)} | kept)
    return rows


def collate(head: str, probability: float = 0.3) -> Any:
    if head == "row":
        return transformers.DataCollatorWithPadding(words())
    if head == "masked":
        return transformers.DataCollatorForLanguageModeling(words(), mlm_probability=probability)
    pad = torch.nn.utils.rnn.pad_sequence

    def padded(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        fills = {"input_ids": 0, "attention_mask": 0, "labels": -100}
        return {
            name: pad([row[name] for row in rows], batch_first=True, padding_value=fill)
            for name, fill in fills.items()
        }

    return padded


def values(folder: Path, attack: str = "combined") -> dict[str, Any]:
    return lines(folder, attack)[-1]["metrics"]


def loader_of(train: Any, head: str, **more: Any) -> DataLoader[Any]:
    return DataLoader(train, 8, shuffle=True, collate_fn=collate(head, **more))


def settings(records: bool = False) -> WatchSettings:
    memorization = Memorization(max_overhead=100, looks=(), records=records)
    return WatchSettings(memorization=memorization, tokenizer=words())


@pytest.mark.slow
def test_a_masked_model_that_memorizes_in_the_trainer_of_transformers_shows_it(tmp_path) -> None:
    train = leave_out(data("masked", 100), 50, seed=1)[0]
    arguments = transformers.TrainingArguments(
        str(tmp_path), num_train_epochs=30, per_device_train_batch_size=5, learning_rate=8e-3,
        use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True, logging_steps=1000,
    )  # fmt: skip
    trainer = transformers.Trainer(
        encoder("masked"), arguments, data_collator=collate("masked", 0.4), train_dataset=train
    )
    folder = tmp_path / "leakage"
    attacks = [Combined(), LossRatio()]
    trainer.add_callback(LeakageCallback(trainer, attacks, folder=folder, settings=settings(True)))
    trainer.train()
    assert values(folder)["auc"]["low"] > 0.7
    assert values(folder)["members"]["value"] == len(train)
    assert RecordList.load(folder / "records.jsonl").head["at_least"] > 10


def test_a_row_that_holds_the_mask_token_is_left_out_alone(tmp_path: Path) -> None:
    rows = data("masked", 240)
    rows[3]["input_ids"][5] = rows[50]["input_ids"][5] = MASK
    train = leave_out(rows, 100, seed=1)[0]
    watch, module = watching(tmp_path, [Combined()]), Classifying(encoder("masked"))
    fit([watch], module, train, max_epochs=1, collate_fn=collate("masked"))
    n = [values(tmp_path)[side]["value"] for side in ("members", "others")]
    assert sum(n) == 238


def test_a_model_that_trained_on_other_rows_shows_nothing(tmp_path: Path) -> None:
    """The rows that are watched are not those that the loss is computed on."""
    head = "masked"
    model = encoder(head)
    optimizer = torch.optim.AdamW(model.parameters(), 5e-3)
    rows, fresh = data(head, 480)[:240], data(head, 480)[240:]
    loader = loader_of(leave_out(rows, 100, seed=1)[0], head)
    others = loader_of(fresh, head)
    watch = Watch(
        model, optimizer, [Combined()], loader=loader, folder=tmp_path,
        settings=WatchSettings(memorization=settings().memorization),  # the collator has the mask
    )  # fmt: skip
    torch.manual_seed(0)
    with watch:
        for _ in range(4):
            for seen, trained in zip(loader, others, strict=False):
                with watch.step(seen):
                    model(**trained).loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
    last = values(tmp_path)
    assert last["auc"]["low"] < 0.5 < last["auc"]["high"]
    assert last["p_value"]["value"] > 0.05


@pytest.mark.parametrize("head", ["token", "masked"])
def test_each_row_is_scored_as_a_loop_over_its_tokens_scores_it(head: str) -> None:
    """Whatever the collator masked, each token is asked once, beside a seventh that is masked."""
    model = encoder(head).eval()
    rows, mask_id = data(head, 12), MASK if head == "masked" else None
    seen: list[Tensor] = []
    model.register_forward_pre_hook(
        lambda _, __, inputs: seen.append(inputs["input_ids"]), with_kwargs=True
    )
    snapshots = []
    for _ in range(2):  # masked by two draws
        batch = read_batch(collate(head)(rows), find_anatomy(model).kind)
        batch = batch if mask_id is None else unmasked(batch, mask_id, [*MARKS.values()])
        texts = texts_in(batch)
        assert [text.ids.tolist() for text in texts] == [row["input_ids"].tolist() for row in rows]
        snapshots.append(token_log_probs(find_anatomy(model), texts, mask_id))
    assert torch.equal(snapshots[0].log_probs, snapshots[1].log_probs)
    said = {tuple(ids[ids != 0].tolist()) for part in seen for ids in part}
    for row, text in enumerate(texts):
        ids, losses, n_asked = text.ids, [], 0
        if head == "token":
            logits = model(input_ids=ids[None]).logits[0].log_softmax(1)
            losses = [logits[j, c] for j, c in enumerate(rows[row]["labels"]) if c >= 0]
        for masked in said if head == "masked" else ():
            places = [j for j, word in enumerate(masked) if word == MASK]
            known = [int(a) for a, b in zip(ids, masked, strict=False) if b != MASK]
            if len(masked) != len(ids) or known != [w for w in masked if w != MASK]:
                continue
            n_asked += len(places)
            assert (len(ids) - 1) // 7 <= len(places) <= (len(ids) - 1) // 7 + 1
            logits = model(input_ids=torch.tensor([masked])).logits[0].log_softmax(1)
            losses += [logits[j, ids[j]] for j in places]
        assert n_asked == (len(ids) - 1) * (head == "masked")
        mean = float(torch.stack(losses).mean())
        assert float(snapshots[0].mean_log_probs()[row]) == pytest.approx(mean, abs=1e-5)


def test_repeats_are_searched_in_what_is_read_and_not_in_classes() -> None:
    same = torch.full((16,), -100).index_fill(0, torch.arange(1, 16), 1)
    batch = torch.randint(5, WORDS, (4, 16), generator=torch.Generator().manual_seed(0))
    batch[3] = batch[2]
    texts = texts_in(TokenBatch(batch, same.expand(4, -1), None, "classifier"))
    scored = scored_texts(texts, [True] * 4)
    assert (scored.rows, scored.times.tolist()) == ([0, 1, 2], [1, 1, 2])


@pytest.mark.parametrize(
    ("attack", "form", "words"),
    [
        (Extraction(), "masked", "a masked model writes no text"),
        (PromptRatio(), "masked", "no row has a prompt"),
        (Combined(), "unlabelled", "masks without labels"),
        (Combined(), "unnamed", "no tokenizer with a mask token is known"),
    ],
)
def test_what_cannot_be_asked_of_a_masked_model_is_refused(tmp_path, attack, form, words) -> None:
    train = leave_out(data("masked"), 100, seed=1)[0]
    collator = collate("masked")

    def collated(rows: Any) -> Any:
        batch = collator(rows)
        batch["input_ids"][:, 3] = MASK  # the label is of another draw, or of none
        return batch

    loader = DataLoader(train, 8, collate_fn=collator if form == "masked" else collated)
    model = encoder("masked")
    named = settings() if form != "unnamed" else WatchSettings(memorization=Memorization(10))
    watch = Watch(model, torch.optim.SGD(model.parameters(), 1), [attack], loader=loader,
        folder=tmp_path, settings=named)  # fmt: skip
    with pytest.raises(ValueError, match=words), watch:
        pass
