"""Canaries that are drawn, planted in texts, left out, and asked for."""

import copy
import hashlib
import io
import json
import logging
import os
import pickle
import stat
from multiprocessing.context import set_spawning_popen
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_fedleak.defenses.dpsgd.poisson import Draws
from lightning_fedleak.defenses.dpsgd.sampling import sampling_of
from lightning_fedleak.evaluation.canaries import (
    InclusionRecord,
    leave_out,
    new_token_canaries,
    sampled_canaries,
    with_canaries,
    with_entities,
)
from lightning_fedleak.evaluation.canaries.dataset import digest_of, token_ids_of
from lightning_fedleak.evaluation.canaries.record import seed_key
from tests.canaries.test_with_entities import PHONE, TOKENIZER, chats
from tests.helpers.inputs import context
from tests.helpers.models import VOCAB, tiny_bert_mlm, tiny_llama

FIRST = 1000
"""Token ids of canaries begin here, those of the data are below."""


def row(start: int, length: int = 4) -> torch.Tensor:
    return torch.arange(start, start + length)


def data(n: int) -> list[torch.Tensor]:
    return [row(i) for i in range(n)]


def texts(m: int) -> list[torch.Tensor]:
    return [row(FIRST + 10 * i) for i in range(m)]


def flips(seed: int, m: int, probability: float = 0.5, **more: object) -> InclusionRecord:
    digests = [digest_of(t, "c") for t in texts(m)]
    return InclusionRecord(seed_key(seed), tuple(digests), probability, **more)


def held(dataset: Dataset) -> list[int]:
    """Which canaries the data really hold, by looking."""
    starts = [int(dataset[i][0]) for i in range(len(dataset))]
    return sorted((s - FIRST) // 10 for s in starts if s >= FIRST)


# Coins and places


@pytest.mark.parametrize("probability", [0.25, 0.5])
def test_the_public_length_tells_of_no_coin(probability: float) -> None:
    """DP-SGD draws by it: an account that knew how many canaries are in would tell of them."""
    left, _ = leave_out(data(31), 1, seed=3)
    lengths, accounts = set(), set()
    for seed in range(12):
        for rows, n in ((data(30), 30), (left, 30)):
            train = with_canaries(rows, texts(8), seed=seed, probability=probability)
            assert train.public_length == n + 8 * probability
            lengths.add(len(train))
            loader = DataLoader(train, batch_size=4, shuffle=True)
            sampling = sampling_of(loader, context(), Draws(bytes(32)), trust="local")
            accounts.add((sampling.rate, sampling.examples, len(sampling.loader)))
    assert len(lengths) > 2
    assert len(accounts) == 1
    repeated = with_canaries(data(30), texts(8), seed=1, times=(1, 4))
    assert repeated.public_length == 30 + round(sum(repeated.canaries.record.repeats) / 2)


def test_without_a_seed_every_record_is_new() -> None:
    drawn = [with_canaries(data(1), texts(64)).canaries.record for _ in range(20)]
    assert len({r.included for r in drawn}) == 20
    assert len({r.commitment for r in drawn}) == 20


def test_places_are_uniform_and_do_not_tell_the_canary() -> None:
    n, found = 50, []
    by_canary: dict[int, list[float]] = {}
    for seed in range(400):
        record = flips(seed, 6)
        length = n + sum(record.included)
        for place, which in record.places(n):
            assert 0 <= place < length
            found.append((place + 0.5) / length)
            by_canary.setdefault(which, []).append(found[-1])
    assert stats.kstest(found, "uniform").pvalue > 1e-3
    first, last = by_canary[0], by_canary[5]
    assert stats.ks_2samp(first, last).pvalue > 1e-3


def test_where_a_canary_stands_does_not_depend_on_the_others_coins() -> None:
    """The item of the data behind it is the same, whichever other canaries are in."""
    n = 1000
    few, many = flips(1, 40, 0.2), flips(1, 40, 0.9)  # one key: few's canaries are in many too

    def behind(record: InclusionRecord) -> dict[int, int]:
        return {which: place - k for k, (place, which) in enumerate(record.places(n))}

    assert 0 < len(behind(few)) < len(behind(many))
    assert behind(few).items() <= behind(many).items()


# The data set


@given(
    n=st.integers(0, 30),
    m=st.integers(1, 12),
    seed=st.integers(0, 10**6),
    times=st.sampled_from([(1,), (1, 2, 7)]),
)
def test_every_item_once_and_each_included_canary_as_often_as_its_tier(n, m, seed, times) -> None:
    plain = data(n)
    dataset = with_canaries(plain, texts(m), seed, times=times)
    inside, repeats = dataset.canaries.included, dataset.canaries.record.repeats
    assert inside.dtype == torch.bool
    expected = [i for i in range(m) if inside[i] for _ in range(repeats[i])]
    assert held(dataset) == expected
    items = [tuple(dataset[i].tolist()) for i in range(len(dataset))]
    kept = [item for item in items if item[0] < FIRST]
    assert len(dataset) == n + len(expected)
    assert kept == [tuple(p.tolist()) for p in plain]  # in their order
    assert [tuple(x.tolist()) for x in dataset] == items  # by IndexError at the end
    if items:
        assert tuple(dataset[-1].tolist()) == items[-1]


def test_coins_by_their_definition() -> None:
    """HMAC-SHA256, done by hand: a record must outlive versions of Python and of this package."""
    key = hashlib.sha256(b"lightning-fedleak canaries 5").digest()
    record = flips(5, 16, 0.3)
    for i, digest in enumerate(record.digests):
        inner = hashlib.sha256(bytes(b ^ 0x36 for b in key.ljust(64, b"\0")))
        inner.update(b"coin\0" + i.to_bytes(8, "big") + digest)
        outer = hashlib.sha256(bytes(b ^ 0x5C for b in key.ljust(64, b"\0")) + inner.digest())
        uniform = int.from_bytes(outer.digest()[:8], "big") / 2**64
        assert record.included[i] == (uniform < 0.3)


def test_workers_that_are_spawned_get_the_record() -> None:
    """Pickling is open while multiprocessing starts a process of its own, and at no other time."""
    dataset = with_canaries(data(40), texts(20), 11)
    set_spawning_popen(object())
    try:
        sent = pickle.dumps(dataset)
    finally:
        set_spawning_popen(None)
    twin = pickle.loads(sent)
    assert twin.canaries.record == dataset.canaries.record
    assert torch.equal(torch.stack(list(twin)), torch.stack(list(dataset)))


def test_what_a_loader_does_to_an_item_does_not_reach_the_canary() -> None:
    plain = [{"input_ids": row(i), "id": i} for i in range(4)]
    dataset = with_canaries(plain, [{"input_ids": row(FIRST), "id": 7}], 0, probability=0.99)
    at = next(i for i in range(5) if dataset[i]["id"] == 7)
    taken = dataset[at]
    taken["input_ids"].zero_()
    taken.pop("id")
    assert dataset[at]["id"] == 7
    assert torch.equal(dataset[at]["input_ids"], row(FIRST))


# What a canary is


def test_queries_hold_every_canary_in_or_out() -> None:
    def item(ids: list[int], mask: list[int]) -> dict[str, list[int]]:
        return {"input_ids": ids, "attention_mask": mask, "labels": ids}

    canaries = [
        item([5, 6, 7, 0, 0], [1, 1, 1, 0, 0]),
        item([0, 0, 8, 9, 3], [0, 0, 1, 1, 1]),
        item([4, 4], [1, 1]),
    ]
    plain = [item([1, 2], [1, 1])] * 3
    dataset = with_canaries(plain, canaries, 0)
    query = dataset.canaries.queries()
    assert query.input_ids.tolist() == [[5, 6, 7], [8, 9, 3], [4, 4, 0]]
    assert query.attention_mask is not None
    assert query.attention_mask.tolist() == [[1, 1, 1], [1, 1, 1], [1, 1, 0]]
    assert query.positions is None
    query.input_ids.zero_()
    assert dataset.canaries.queries().input_ids.any()
    dataset.canaries.included.fill_(True)
    assert tuple(dataset.canaries.included.tolist()) == dataset.canaries.record.included


def test_token_ids_are_found_or_asked_for() -> None:
    ids = row(3)
    for item in (ids, ids.numpy(), ids.tolist(), ids[None], (ids, ids), {"input_ids": ids}):
        assert token_ids_of(item, "c").tolist() == [3, 4, 5, 6]
    plain = [{"text": torch.arange(i, i + 4)} for i in range(3)]
    canaries = [{"text": row(FIRST)}, {"text": row(FIRST + 1)}]
    with pytest.raises(ValueError, match=r"canaries\[0\] must be a row of token ids"):
        with_canaries(plain, canaries, 0)


@pytest.mark.parametrize(
    ("canaries", "message"),
    [
        ([], "at least one"),
        ("text", "at least one"),
        ([torch.ones(0).long()], "no token"),
        ([torch.ones(2, 3).long()], "must be a row of token ids"),
        ([torch.ones(3)], "must be a row of token ids"),
        ([row(1), row(9), row(1)], "two of the canaries have the same tokens"),
        ([object()], "must be a row of token ids"),
    ],
)
def test_canaries_that_are_none(canaries, message) -> None:
    with pytest.raises(ValueError, match=message):
        with_canaries([], canaries, 0)


def test_fingerprints_tell_values_apart_that_look_alike() -> None:
    scalars = [1, 1.0, True, "1", b"1", None]
    lists = [[1], [[1]], [1, 1], ["1", "1"], ["11"]]
    mappings = [{"a": 1}, {"a": "1"}, {"a": 1, "b": 1}, {"a": {"b": 1}}]
    tensors = [torch.tensor(1), torch.tensor([1]), torch.tensor([[1]])]
    tensors += [torch.tensor([1], dtype=torch.int32), torch.tensor([1.0], dtype=torch.bfloat16)]
    values = [*scalars, *lists, *mappings, *tensors, np.array([1]), np.array([1.0])]
    assert len({digest_of(v, "c") for v in values}) == len(values)
    assert digest_of({"a": 1, "b": 2}, "c") == digest_of({"b": 2, "a": 1}, "c")
    strided = torch.arange(8).reshape(4, 2)[:, 0]
    assert digest_of(strided, "c") == digest_of(strided.clone(), "c")
    with pytest.raises(ValueError, match=r"c\['x'\]\[0\] is a object"):
        digest_of({"x": [object()]}, "c")


# How often each is repeated


def test_a_tier_is_drawn_besides_the_coin_and_leaves_it_alone() -> None:
    tiers = (1, 4, 16)
    records = [flips(seed, 60, times=tiers) for seed in range(100)]
    assert [r.included for r in records] == [flips(seed, 60).included for seed in range(100)]
    repeats = np.array([r.repeats for r in records])
    included = np.array([r.included for r in records])
    counts = [(repeats == tier).sum() for tier in tiers]
    assert stats.chisquare(counts).pvalue > 1e-3
    table = [[((repeats == t) & (included == side)).sum() for t in tiers] for side in (0, 1)]
    assert stats.chi2_contingency(table).pvalue > 1e-3
    assert set(flips(0, 9, times=(3,)).repeats) == {3}


def test_the_record_keeps_and_commits_to_the_tiers(tmp_path: Path) -> None:
    file = tmp_path / "inclusion.json"
    first = with_canaries(data(30), texts(20), record=file, times=(1, 4)).canaries.record
    saved = InclusionRecord.load(file)
    assert (saved.times, saved.repeats) == ((1, 4), first.repeats)
    assert first.commitment != InclusionRecord(first.key, first.digests).commitment
    with pytest.raises(ValueError, match="another run"):
        with_canaries(data(30), texts(20), record=file)
    file.write_text(json.dumps({**json.loads(file.read_text()), "times": [1, 5]}))
    with pytest.raises(ValueError, match="was changed"):
        InclusionRecord.load(file)


# The record


def test_the_file_is_private_and_resumes(tmp_path: Path) -> None:
    file = tmp_path / "new folder" / "inclusion.json"
    before = os.umask(0o000)
    try:
        first = with_canaries(data(30), texts(20), record=file)
    finally:
        os.umask(before)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [p.name for p in file.parent.iterdir()] == ["inclusion.json"]
    again = with_canaries(data(30), texts(20), record=file)
    assert torch.equal(torch.stack(list(first)), torch.stack(list(again)))
    assert again.canaries.commitment == first.canaries.commitment
    content = json.loads(file.read_text())
    assert content["included"] == [int(b) for b in first.canaries.included]
    with pytest.raises(FileExistsError):
        first.canaries.record.save(file)
    assert len(list(file.parent.iterdir())) == 1


def test_a_record_of_other_canaries_or_settings_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "inclusion.json"
    with_canaries(data(30), texts(20), 7, record=file)
    with_canaries(data(99), texts(20), 7, record=file)  # more data: the coins are the same
    with_canaries(data(30), texts(20), record=file)  # the file knows the seed's key
    changed = texts(20)
    changed[4] = changed[4] + 1
    for canaries, arguments in (
        (changed, {"seed": 7}),
        (texts(19), {"seed": 7}),
        (texts(20)[::-1], {"seed": 7}),
        (texts(20), {"seed": 8}),
        (texts(20), {"seed": 7, "probability": 0.4}),
    ):
        with pytest.raises(ValueError, match="another run") as caught:
            with_canaries(data(30), canaries, record=file, **arguments)
        assert json.loads(file.read_text())["key"] not in str(caught.value)


def test_a_file_that_others_can_read_or_that_was_changed_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "inclusion.json"
    with_canaries(data(30), texts(20), 7, record=file)
    file.chmod(0o640)
    with pytest.raises(PermissionError, match=r"0640.*chmod 600"):
        with_canaries(data(30), texts(20), 7, record=file)
    file.chmod(0o600)
    content = json.loads(file.read_text())
    content["included"][3] ^= 1
    file.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="was changed"):
        InclusionRecord.load(file)
    for broken in ("", "{}", "[1]", json.dumps({**content, "schema": 2})):
        file.write_text(broken)
        with pytest.raises(ValueError, match="no inclusion record"):
            InclusionRecord.load(file)


def test_processes_that_begin_at_once_agree(tmp_path: Path, monkeypatch) -> None:
    """The one that comes second finds a whole file, and takes its coins."""
    file = tmp_path / "inclusion.json"
    save = InclusionRecord.save
    other = flips(99, 20)

    def late(self: InclusionRecord, path: Path) -> None:
        save(other, path)
        save(self, path)

    monkeypatch.setattr(InclusionRecord, "save", late)
    assert with_canaries(data(5), texts(20), record=file).canaries.record == other
    assert len(list(tmp_path.iterdir())) == 1


def test_several_processes_need_a_seed_or_a_record(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="each process would flip coins of its own"):
        with_canaries(data(5), texts(4))
    with_canaries(data(5), texts(4), 1)
    with_canaries(data(5), texts(4), record=tmp_path / "inclusion.json")
    monkeypatch.setenv("WORLD_SIZE", "1")
    with_canaries(data(5), texts(4))


def test_nothing_shows_the_secret(caplog, capsys, recwarn) -> None:
    with caplog.at_level(logging.DEBUG):
        dataset = with_canaries(data(9), texts(12), 4)
        record = dataset.canaries.record
        shown = (
            f"{dataset!r} {dataset.canaries!r} {record!r} {record} {dataset.canaries.state_dict()}"
        )
    assert record.key.hex() not in shown
    assert repr(record.key) not in shown
    assert "True" not in shown
    assert f"{int(dataset.canaries.included.sum())} " not in shown.replace("12 canaries", "")
    assert caplog.text == ""
    assert capsys.readouterr() == ("", "")
    assert not recwarn.list
    assert set(dataset.canaries.state_dict()) == {"commitment"}


def test_the_record_is_not_pickled(tmp_path: Path) -> None:
    dataset = with_canaries(data(9), texts(5), 4)
    for thing in (dataset, dataset.canaries, dataset.canaries.record):
        with pytest.raises(TypeError, match="is secret"):
            pickle.dumps(thing)
        with pytest.raises(TypeError, match="is secret"):
            torch.save(thing, io.BytesIO())
    twin = copy.deepcopy(dataset)
    assert torch.equal(torch.stack(list(twin)), torch.stack(list(dataset)))
    assert copy.copy(dataset.canaries.record) is dataset.canaries.record


def test_a_commitment_binds_to_every_coin_and_setting() -> None:
    made = [
        flips(1, 10),
        flips(2, 10),
        flips(1, 11),
        flips(1, 10, 0.4),
        InclusionRecord(flips(1, 10).key, flips(1, 10).digests[::-1]),
    ]
    assert len({r.commitment for r in made}) == len(made)
    assert flips(1, 10, np.float64(0.5)).commitment == flips(1, 10).commitment
    assert all(len(bytes.fromhex(r.commitment)) == 32 for r in made)


# Rows left out of training by a secret draw.


def some_rows(n: int = 40) -> list[dict[str, torch.Tensor]]:
    return [{"input_ids": torch.tensor([row, row + 1])} for row in range(n)]


def first_ids(rows: object) -> list[int]:
    return [int(rows[i]["input_ids"][0]) for i in range(len(rows))]  # type: ignore[index, arg-type]


def test_training_rows_and_others_are_the_data() -> None:
    train, others = leave_out(some_rows(), 7, seed=0)
    assert sorted(first_ids(train) + first_ids(others)) == list(range(40))
    assert len(others) == 7
    assert train.others is others


def test_every_row_is_left_out_equally_often() -> None:
    counts = np.zeros(10)
    rows = some_rows(10)
    draws = 1000
    for seed in range(draws):
        counts[first_ids(leave_out(rows, 3, seed=seed)[1])] += 1
    expected = 0.3 * draws
    assert (np.abs(counts - expected) < 5 * np.sqrt(draws * 0.3 * 0.7)).all()


@pytest.mark.parametrize("change", ["rows", "n", "seed", "text"])
def test_a_record_of_another_run_is_refused(tmp_path: Path, change: str) -> None:
    file = tmp_path / "left_out.json"
    leave_out(some_rows(), 39, seed=1, record=file)
    rows = some_rows(41 if change == "rows" else 40)
    if change == "text":
        for row in rows:
            row["input_ids"] = row["input_ids"] + 100
    with pytest.raises(ValueError, match="another run"):
        leave_out(
            rows, 38 if change == "n" else 39, seed=2 if change == "seed" else None, record=file
        )


def test_with_coins_each_of_twice_as_many_rows_is_left_out_by_its_own(tmp_path: Path) -> None:
    data = some_rows(60)
    draws = [leave_out(data, 20, seed=seed, coins=True)[0] for seed in range(400)]
    out = np.zeros((400, 60), dtype=bool)
    for draw, train in enumerate(draws):
        out[draw, train.record.out] = True
        assert len(train.record.candidates) == 40
        assert set(train.record.out) <= set(train.record.candidates)
        assert train.public_length == 40
        assert len(train) == 60 - len(train.others)
    assert np.abs(out.mean(0) - 1 / 3).max() < 5 * np.sqrt(2 / 9 / 400)
    counts = out.sum(1)  # of 40 fair coins
    assert counts.mean() == pytest.approx(20, abs=5 * np.sqrt(10 / 400))
    assert counts.var() == pytest.approx(10, rel=0.4)


class Stream(IterableDataset[int]):
    def __iter__(self) -> object:
        return iter(range(3))


def test_what_cannot_be_drawn_from_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="items by index"):
        leave_out(Stream(), 1)
    for n in (0, 40, True):
        with pytest.raises(ValueError, match="n must be an integer from 1 to 39"):
            leave_out(some_rows(), n)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="rows of its own"):
        leave_out(some_rows(), 7)


def test_rows_that_repeat_a_planted_value_are_not_left_out() -> None:
    settings = {"tokenizer": TOKENIZER, "count": 5, "seed": 1}
    with pytest.raises(ValueError, match=r"times .* must be \(1,\)"):
        leave_out(with_entities(chats(), PHONE, times=(1, 4), **settings), 20, seed=1)
    once = with_entities(chats(), PHONE, times=(1,), **settings)
    train, others = leave_out(once, 20, seed=1)
    assert len(train) + len(others) == len(once)


def matrices(model: nn.Module) -> list[torch.Tensor]:
    found = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    return [*{id(m): m.detach() for m in found}.values()]


# A token of their own


@pytest.mark.parametrize("tied", [True, False])
def test_each_text_begins_and_ends_with_a_row_that_nothing_else_uses(tied: bool) -> None:
    model = tiny_llama(tied=tied)
    before = [m.clone() for m in matrices(model)]
    state = torch.get_rng_state()
    texts = new_token_canaries(model, 6, length=5, row_norm=0.02, seed=3)
    assert torch.equal(state, torch.get_rng_state())
    assert [len(text) for text in texts] == [5] * 6
    own = [int(text[0]) for text in texts]
    assert own == [int(text[-1]) for text in texts] == [*range(VOCAB, VOCAB + 6)]
    assert all(2 < int(token) < VOCAB for text in texts for token in text[1:-1])  # special below
    assert model.config.vocab_size == VOCAB + 6
    assert len(matrices(model)) == 2 - tied
    for old, new in zip(before, matrices(model), strict=True):
        assert torch.equal(new[:VOCAB], old)
        usual = old[3:].norm(dim=1).mean()
        torch.testing.assert_close(new[VOCAB:].norm(dim=1), (0.02 * usual).expand(6))
        assert float(torch.corrcoef(new[VOCAB:]).fill_diagonal_(0).abs().max()) < 0.95
    logits = model(input_ids=torch.stack(texts)).logits
    assert logits.shape[-1] == VOCAB + 6


def test_what_cannot_get_rows_is_told_what_to_do() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"])
    for model in (peft.get_peft_model(tiny_llama(), config), tiny_bert_mlm()):
        with pytest.raises(ValueError, match="causal models, before get_peft_model"):
            new_token_canaries(model, 2)


# Written by the model


@pytest.mark.parametrize("unlikely_end", [0, 4])
def test_the_model_writes_texts_behind_the_prompts(unlikely_end: int) -> None:
    model = tiny_llama()
    state = torch.get_rng_state()
    prompts = [torch.tensor([5, 6, 7]), torch.tensor([8, 9])]
    settings = {"prompts": prompts, "length": 24, "unlikely_end": unlikely_end}
    texts = sampled_canaries(model, 40, seed=3, **settings)
    assert torch.equal(state, torch.get_rng_state())
    assert model.training == tiny_llama().training
    assert {tuple(text.shape) for text in texts} == {(24,)}
    assert len({tuple(text.tolist()) for text in texts}) == 40
    for number, text in enumerate(texts):
        prompt = prompts[number % 2]
        assert torch.equal(text[: len(prompt)], prompt)
        assert int(text.min()) > 2  # special below
    again = sampled_canaries(model, 40, seed=3, **settings)
    assert all(torch.equal(a, b) for a, b in zip(texts, again, strict=True))


def test_the_end_is_unlikely_and_the_rest_is_not() -> None:
    model = tiny_llama().eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(40)  # a model that is sure of what it writes
    texts = torch.stack(sampled_canaries(model, 60, length=20, unlikely_end=5))
    with torch.no_grad():
        log_probs = model(input_ids=texts).logits[:, :-1].log_softmax(-1)
    likely = log_probs.gather(-1, texts[:, 1:, None])[..., 0].mean(0)
    assert float(likely[:14].mean()) > float(likely[14:].mean()) + 1.0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": 0.7}, "temperature must be .*0.8"),
        ({"prompts": [torch.arange(9)], "length": 9}, "length must be"),
        ({"length": 8, "unlikely_end": 8}, "unlikely_end"),
        ({"prompts": [torch.tensor([5])], "length": 2}, "two texts are equal"),
    ],
)
def test_texts_that_cannot_be_written_are_refused(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sampled_canaries(tiny_llama(), 200, **settings)


def test_only_causal_models_write() -> None:
    with pytest.raises(ValueError, match="masked model"):
        sampled_canaries(tiny_bert_mlm(), 2)
