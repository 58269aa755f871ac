"""Pairs of a chosen and a rejected answer, which the weights are asked about after DPO."""

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from sklearn.metrics import roc_auc_score
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from lightning_fedleak.attacks import UnusableObservation
from lightning_fedleak.attacks.memorization import Combined, PreferenceMargin
from lightning_fedleak.engine import Memorization
from lightning_fedleak.evaluation.canaries import leave_out
from lightning_fedleak.model.anatomy import find_anatomy
from lightning_fedleak.model.batches import BatchError, TokenBatch
from lightning_fedleak.model.pairs import PairBatch, RatedBatch, read_pairs
from lightning_fedleak.model.snapshots import Observation, ReleasedModel
from lightning_fedleak.model.taps.tokens import (
    Text,
    compressed_bytes,
    label_places,
    rejected_places,
    texts_in,
    token_log_probs,
)
from tests.engine.channels.test_memorization import fit, lines, monitor, of_kind, tiny

Row = dict[str, list[int]]
Answer = tuple[Tensor, int]  # ids of prompt and answer, and how many are of the prompt


def pairs(n: int = 240, seed: int = 0, answer: int = 9) -> list[Row]:
    """Return rows as TRL's DPOTrainer gives them to its collator, of random tokens."""
    generator = torch.Generator().manual_seed(seed)

    def draw(length: int) -> list[int]:
        return torch.randint(3, 2000, (length,), generator=generator).tolist()

    return [
        {
            "prompt_ids": draw(4 + row % 3),
            "chosen_ids": draw(answer + row % 4),
            "rejected_ids": draw(answer + row % 2),
        }
        for row in range(n)
    ]


def answers(rows: list[Row]) -> list[Answer]:
    """Return the chosen answers, then the rejected ones, behind their prompts."""
    return [
        (torch.tensor(row["prompt_ids"] + row[name]), len(row["prompt_ids"]))
        for name in ("chosen_ids", "rejected_ids")
        for row in rows
    ]


def collate(rows: list[Row]) -> dict[str, Tensor]:
    """Return a batch in the form of TRL's DPO."""
    ids = [ids for ids, _ in answers(rows)]
    marks = [torch.arange(len(ids)) >= start for ids, start in answers(rows)]
    return {
        "input_ids": pad_sequence(ids, batch_first=True),
        "attention_mask": pad_sequence([torch.ones_like(i) for i in ids], batch_first=True),
        "completion_mask": pad_sequence(marks, batch_first=True).long(),
    }


def collate_apart(rows: list[Row]) -> dict[str, Any]:
    """Return a batch in the form of TRL's ORPO and CPO, each half as wide as it is."""
    batch: dict[str, Any] = {"prompt": ["words"] * len(rows)}
    for half, name in enumerate(("chosen", "rejected")):
        part = answers(rows)[half * len(rows) : (half + 1) * len(rows)]
        labels = [torch.where(torch.arange(len(i)) < start, -100, i) for i, start in part]
        ids = [i for i, _ in part]
        batch[f"{name}_input_ids"] = pad_sequence(ids, batch_first=True)
        batch[f"{name}_labels"] = pad_sequence(labels, batch_first=True, padding_value=-100)
        masks = [torch.ones_like(i) for i in ids]
        batch[f"{name}_attention_mask"] = pad_sequence(masks, batch_first=True)
    return batch


def log_likelihoods(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Return (B,) the summed log-likelihoods of the answers."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    ids, marks = batch["input_ids"][:, 1:], batch["completion_mask"][:, 1:]
    return (logits[:, :-1].log_softmax(-1).gather(-1, ids[..., None])[..., 0] * marks).sum(1)


class Preferring(L.LightningModule):
    """DPO in a module of one's own, whose batches may have another form.

    Args:
        read: turns a batch into that of TRL's DPO.
        lr: learning rate; at 0 nothing is trained.
    """

    def __init__(self, read: Callable[[Any], dict[str, Tensor]] | None = None, lr: float = 3e-3):
        super().__init__()
        self.model, self.reference = tiny(), (tiny().eval(),)  # a tuple: no part of the module
        self.read, self.lr = read, lr

    def training_step(self, batch: Any) -> Tensor:
        batch = batch if self.read is None else self.read(batch)
        with torch.no_grad():
            base = log_likelihoods(self.reference[0], batch)
        chosen, rejected = (log_likelihoods(self.model, batch) - base).chunk(2)
        return -functional.logsigmoid(0.2 * (chosen - rejected)).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), self.lr)


def margin(row: Row, model: Any, base: Any) -> float:
    """Return the margin of a pair by one forward for each answer alone, without padding."""
    values = []
    for ids, start in answers([row]):
        with torch.no_grad():
            now, before = (
                m(input_ids=ids[None]).logits[0, start - 1 : -1].log_softmax(-1).double()
                for m in (model, base)
            )
        values.append(float((now - before).gather(1, ids[start:, None]).sum()))
    return values[0] - values[1]


def watching(folder: Path, attacks: Any = None, **settings: Any) -> Any:
    attacks = [PreferenceMargin()] if attacks is None else attacks
    return monitor(folder, attacks, Memorization(max_overhead=10, looks=(), **settings))


def test_trained_pairs_are_told_from_those_left_out_by_their_margin_alone(tmp_path: Path) -> None:
    data, others = leave_out(pairs(), 120, seed=1)
    module, asked = Preferring(), Memorization(max_overhead=10, looks=())
    auto = monitor(tmp_path, "auto", asked, shares="model")
    fit([auto], module, data, collate_fn=collate, max_epochs=4)
    log = (tmp_path / "leakage.jsonl").read_text()
    assert '"combined"' not in log
    assert '"extraction"' not in log
    assert auto.latest["leakage/worst/memorization"] == auto.latest["leakage/preference_margin/auc"]
    looks = lines(tmp_path, "preference_margin")
    assert len(looks) == 4
    last = looks[-1]["metrics"]
    model, base = module.model.eval(), module.reference[0]
    rows = [data[n] for n in range(len(data))] + [others[n] for n in range(len(others))]
    scores = [margin(row, model, base) for row in rows]
    sides = [True] * len(data) + [False] * len(others)
    assert (last["members"]["value"], last["others"]["value"]) == (120, 120)
    assert last["auc"]["value"] == pytest.approx(roc_auc_score(sides, scores), abs=1e-6)
    assert last["auc"]["value"] > 0.8
    assert last["auc"]["low"] > 0.6
    [pool] = of_kind(tmp_path, "pool")
    assert (pool["train"], pool["others"], pool["way"]) == (120, 120, "left out")
    for file in filter(Path.is_file, tmp_path.rglob("*")):  # none holds a token of a pair
        content = file.read_bytes()
        for ids in data[0].values():
            assert json.dumps(ids)[1:-1].encode() not in content
            assert torch.tensor(ids).numpy().tobytes() not in content


def test_nothing_is_found_where_nothing_was_trained(tmp_path: Path) -> None:
    """Weights that move by other pairs alone do not tell the pairs that are asked about."""
    data, _ = leave_out(pairs(), 120, seed=0)
    other = collate(pairs(8, seed=100))
    module = Preferring(read=lambda batch: other)
    fit([watching(tmp_path)], module, data, collate_fn=collate, max_epochs=2)
    last = lines(tmp_path, "preference_margin")[-1]["metrics"]
    assert last["auc"]["low"] < 0.5 < last["auc"]["high"]
    assert last["p_value"]["value"] > 0.05


def test_pairs_of_another_form_are_the_same_pairs() -> None:
    """ORPO's form, each half as wide as it is."""
    contents = []
    for batch in (collate(pairs(7)), collate_apart(pairs(7))):
        read = read_pairs(batch, "causal")
        assert read is not None
        contents.append([text.content for text in texts_in(read)])
    assert contents[0] == contents[1]


def test_a_form_that_an_adapter_reads_has_the_same_numbers(tmp_path: Path) -> None:
    data, _ = leave_out(pairs(), 120, seed=1)

    def tokens(batch: Any) -> PairBatch:
        ids, mask, marks = batch["both"]
        return PairBatch(ids, ids.masked_fill(marks == 0, -100), mask, "causal")

    def joined(batch: Any) -> dict[str, Tensor]:
        return dict(zip(collate(pairs(1)), batch["both"], strict=True))

    def both(rows: list[Row]) -> dict[str, Any]:
        return {"both": [*collate(rows).values()]}

    found = []
    for name, read, gather in (("plain", None, collate), ("adapter", joined, both)):
        adapter = tokens if name == "adapter" else None
        memorization = Memorization(max_overhead=10, looks=())
        watch = monitor(tmp_path / name, [PreferenceMargin()], memorization, batch_adapter=adapter)
        fit([watch], Preferring(read), data, collate_fn=gather, max_epochs=1)
        found.append(lines(tmp_path / name, "preference_margin")[-1])
    first, second = found
    assert first["pool"] == second["pool"]
    assert second["metrics"]["auc"]["value"] == pytest.approx(
        first["metrics"]["auc"]["value"], abs=1e-3
    )


def test_pairs_of_which_an_answer_stands_in_another_row_are_left_out(tmp_path: Path) -> None:
    rows = pairs(answer=16)
    for row in range(0, 20, 2):
        rows[row]["rejected_ids"] = rows[row + 1]["chosen_ids"]  # 16 tokens or more in a row
    data, _ = leave_out(rows, 120, seed=1)
    fit([watching(tmp_path)], Preferring(), data, collate_fn=collate, max_epochs=1)
    last = lines(tmp_path, "preference_margin")[-1]["metrics"]
    assert last["members"]["value"] + last["others"]["value"] == 220
    [pool] = of_kind(tmp_path, "pool")
    assert pool["repeated"] == 20


@pytest.mark.parametrize(
    ("attack", "more", "words"),
    [
        (Combined(), {}, "the rows are pairs of answers: PreferenceMargin"),
        (
            PreferenceMargin(),
            {"others": pairs(200, seed=5)},
            "pairs of others= may be from another",
        ),
        (PreferenceMargin(), {"records": True}, "the rows are pairs of answers: leave them out"),
    ],
)
def test_what_pairs_cannot_be_asked_is_refused(attack, more, words, tmp_path) -> None:
    data = pairs() if "others" in more else leave_out(pairs(), 120, seed=1)[0]
    with pytest.raises(ValueError, match=re.escape(words)):
        fit([watching(tmp_path, [attack], **more)], Preferring(), data, collate_fn=collate)


def test_single_texts_are_no_pairs(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no row is a pair of answers"):
        fit([watching(tmp_path)])


def test_the_margin_is_that_of_answers_alone() -> None:
    rows = pairs(7)
    model, base = tiny().eval(), tiny().eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.05 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
    read = read_pairs(collate(rows), "causal")
    assert read is not None
    texts = texts_in(read)
    assert len(texts) == 7
    now, before = (token_log_probs(find_anatomy(m), texts) for m in (model, base))
    released = ReleasedModel(
        now, before, compressed_bytes(texts), rejected=rejected_places(texts, now.labels.shape[1])
    )
    scores = PreferenceMargin().run(Observation(released=released)).scores
    assert torch.equal(now.labels, label_places(texts, now.labels.shape[1]))
    expected = [margin(row, model, base) for row in rows]
    assert scores.tolist() == pytest.approx(expected, abs=1e-4)
    assert len({*map(math.copysign, [1.0] * 7, expected)}) == 2  # both signs
    assert [text.n_labels for text in texts] == [
        len(row["chosen_ids"]) + len(row["rejected_ids"]) for row in rows
    ]
    swapped = [
        {**row, "chosen_ids": row["rejected_ids"], "rejected_ids": row["chosen_ids"]}
        for row in rows
    ]
    other = read_pairs(collate(swapped), "causal")
    assert other is not None
    contents = [{text.content for text in texts_in(b)} for b in (read, other)]
    assert contents[0].isdisjoint(contents[1])
    part = released.rows(torch.tensor([2, 5]))
    assert PreferenceMargin().score(part).tolist() == scores[[2, 5]].tolist()
    with pytest.raises(UnusableObservation, match="no answers that were chosen"):
        PreferenceMargin().score(ReleasedModel(now, before, released.compressed))


class Rating(Preferring):
    """KTO in a module of one's own, without its term of divergence."""

    def training_step(self, batch: Any) -> Tensor:
        with torch.no_grad():
            base = log_likelihoods(self.reference[0], batch)
        gains = log_likelihoods(self.model, batch) - base
        return -functional.logsigmoid(0.2 * torch.where(batch["label"], gains, -gains)).mean()


def collate_rated(rows: list[Any]) -> dict[str, Tensor]:
    """Return a batch in the form of TRL's KTO: of each row its chosen answer, rated."""
    batch = {name: value[: len(rows)] for name, value in collate(rows).items()}
    return batch | {"label": torch.tensor([row["label"] for row in rows])}


def test_rated_answers_count_with_their_sign(tmp_path: Path) -> None:
    rows: list[Any] = [row | {"label": n % 3 > 0} for n, row in enumerate(pairs())]
    data, others = leave_out(rows, 120, seed=1)
    module = Rating()
    fit([watching(tmp_path)], module, data, collate_fn=collate_rated, max_epochs=4)
    last = lines(tmp_path, "preference_margin")[-1]["metrics"]
    model, base = module.model.eval(), module.reference[0]
    asked = [data[n] for n in range(len(data))] + [others[n] for n in range(len(others))]
    scores = []
    for row in asked:
        batch = collate_rated([row])
        with torch.no_grad():
            gain = float(log_likelihoods(model, batch) - log_likelihoods(base, batch))
        scores.append(gain if row["label"] else -gain)
    sides = [True] * len(data) + [False] * len(others)
    assert (last["members"]["value"], last["others"]["value"]) == (120, 120)
    assert last["auc"]["value"] == pytest.approx(roc_auc_score(sides, scores), abs=1e-3)
    assert last["auc"]["low"] > 0.6
    rated = read_pairs(collate_rated(asked[:2]), "causal")
    assert isinstance(rated, RatedBatch)
    contents = [text.content for text in texts_in(rated)]
    other = replace(rated, desirable=~rated.desirable)
    assert not {*contents} & {text.content for text in texts_in(other)}
    with pytest.raises(BatchError, match=r"one bool per row in desirable="):
        replace(rated, desirable=torch.tensor([True]))


def test_the_first_token_of_an_answer_without_a_prompt_is_no_label() -> None:
    ids = torch.arange(10)
    one, other = (
        Text.of_pair(Text(ids[:n], ids[:n]), Text(ids[n:], ids[n:])) for n in (4, 6)
    )  # fmt: skip
    assert one.labels.tolist() == [0, 1, 2, 3, -100, 5, 6, 7, 8, 9]
    assert one.n_labels == other.n_labels == 8
    assert [text.ids.tolist() for text in one.alone] == [[*range(4)], [*range(4, 10)]]
    same = Text(one.ids, one.labels, split=5)
    assert len({text.content for text in (one, other, same, Text(one.ids, one.labels))}) == 4
    assert not one.prompt.n_labels
    assert one.whole is one


def test_one_forward_is_made_for_each_answer() -> None:
    read = read_pairs(collate(pairs(5)), "causal")
    assert read is not None
    model, seen = tiny().eval(), []
    model.register_forward_pre_hook(
        lambda _, args, kwargs: seen.extend(kwargs["input_ids"]), with_kwargs=True
    )
    token_log_probs(find_anatomy(model), texts_in(read))
    assert len(seen) == 10


@pytest.mark.parametrize("change", ["labels", "one row", "no mask"])
def test_other_batches_are_no_pairs(change: str) -> None:
    batch = collate(pairs(3))
    if change == "labels":
        batch[change] = batch["input_ids"]
    elif change == "one row":
        batch = {name: value[:1] for name, value in batch.items()}
    else:
        del batch["completion_mask"]
    assert read_pairs(batch, "causal") is None


@pytest.mark.parametrize(
    ("rows", "labels", "kind"), [(3, True, "causal"), (2, False, "causal"), (2, True, "masked")]
)
def test_a_batch_of_pairs_has_two_halves_with_labels(rows: int, labels: bool, kind: Any) -> None:
    ids = torch.ones(rows, 4, dtype=torch.long)
    with pytest.raises(BatchError, match="even number of rows"):
        PairBatch(ids, ids if labels else None, None, kind)


def test_answers_that_are_packed_into_a_row_are_refused() -> None:
    ids = torch.randint(3, 100, (2, 6))
    packed = PairBatch(
        ids, ids, None, "causal", position_ids=torch.tensor([[0, 1, 2, 0, 1, 2]]), crossing=False
    )
    rated = RatedBatch(**vars(packed), desirable=torch.tensor([True, False]))
    for batch in (packed, rated):
        with pytest.raises(ValueError, match="packed into a row"):
            texts_in(batch)
    assert len(texts_in(TokenBatch(ids, ids, None, "causal"))) == 2
