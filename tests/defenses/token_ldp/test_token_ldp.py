"""TokenLDP: the distribution of what the model sees, what stays, refusals, and a real fit."""

from __future__ import annotations

import copy
import math
from types import MappingProxyType, SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_fedleak.defenses import BatchForm, DefenseError, TokenLDP
from lightning_fedleak.defenses.token_ldp.mechanisms import Randomizer
from lightning_fedleak.defenses.token_ldp.words import special_of
from lightning_fedleak.strategies import DefendedStrategy
from tests.defenses.token_ldp.test_ldp_mechanisms import chi_square
from tests.helpers.inputs import context
from tests.helpers.ldp import transition_of
from tests.helpers.lightning_modules import CausalLMModule, random_token_loader
from tests.helpers.models import VOCAB, tiny_bert_classifier, tiny_bert_mlm, tiny_gpt2, tiny_t5
from tests.helpers.settings import QUIET

SPECIAL = {0, 1, 2}
"""Pad, start and end of tiny_gpt2."""
MASK_ID = 4


@pytest.fixture(scope="module")
def gpt2() -> nn.Module:
    return tiny_gpt2()


def rows(n: int, length: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (n, length), generator=generator)


def defended(defense: TokenLDP, root: nn.Module, batch: Any, **fields: Any) -> Any:
    where = context(root, **fields)
    defense.before_setup(where)
    return defense.on_batch(batch, where)


def test_short_rows_spend_more_on_each_token(gpt2: nn.Module) -> None:
    ids = rows(4000, 6)
    mask = torch.ones_like(ids)
    mask[::2, 2:] = 0
    ids[::2, 2:] = 0
    batch = {"input_ids": ids, "attention_mask": mask}
    drawn = defended(TokenLDP("grr", 12.0), gpt2, batch)["input_ids"]
    unchanged = (drawn == ids).double()
    k = VOCAB - len(SPECIAL)
    for start, n in ((0, 2), (1, 6)):
        expected = Randomizer.with_defaults("grr", k).keep(12.0 / n)
        sigma = math.sqrt(expected * (1 - expected) / (2000 * n))
        assert float(unchanged[start::2, :n].mean()) == pytest.approx(expected, abs=5 * sigma)
    assert torch.equal(drawn[::2, 2:], ids[::2, 2:])


def test_tokens_outside_of_a_public_set(gpt2: nn.Module) -> None:
    public = [10, 12, 14, 16]
    ids = rows(4000, 3)
    ids[:, 0], ids[:, 1], ids[:, 2] = 11, 14, 1
    defense = TokenLDP("grr", 2.0, "token", domain=public, memoize=False)
    drawn = defended(defense, gpt2, ids)
    assert set(drawn[:, :2].unique().tolist()) == set(public)
    assert (drawn[:, 2] == 1).all()
    expected = torch.zeros(VOCAB, dtype=torch.float64)
    expected[torch.tensor(public)] = 0.25
    assert chi_square(drawn[:, 0], expected) > 1e-4
    expected[torch.tensor(public)] = transition_of(Randomizer.with_defaults("grr", 4), 2.0)[2]
    assert chi_square(drawn[:, 1], expected) > 1e-4


def test_what_can_be_guessed_guarantees_nothing(gpt2: nn.Module) -> None:
    defense = TokenLDP("grr", 4.0, seed=0)
    defended(defense, gpt2, rows(2, 5))
    assert defense.guarantee.startswith("none")
    assert defense.epsilon_per_sequence == defense.epsilon_spent == math.inf


def test_special_tokens_stay_and_none_comes_in(gpt2: nn.Module) -> None:
    ids = rows(300, 8)
    ids[:, 0], ids[:, -1] = 1, 2
    tokenizer = SimpleNamespace(
        all_special_ids=[7, 8, 9], unk_token_id=9, pad_token_id=7, cls_token_id=8
    )
    drawn = defended(TokenLDP("grr", 30.0, special_ids=tokenizer), gpt2, ids)
    assert int(drawn.min()) < 3
    assert special_of(tokenizer, "causal", True, None).tolist() == [7, 8]
    gpt_like = SimpleNamespace(all_special_ids=[9], unk_token_id=9, eos_token_id=9)
    assert special_of(gpt_like, "causal", True, None).tolist() == [9]


@given(
    data=st.data(),
    shape=st.tuples(st.integers(0, 4), st.integers(1, 9)),
    mechanism=st.sampled_from(["grr", "rappor", "the", "dbitflip"]),
    per=st.sampled_from(["token", "sequence"]),
    memoize=st.booleans(),
    dtype=st.sampled_from([torch.int64, torch.int32]),
)
def test_whatever_the_batch_holds(
    data: st.DataObject, shape: tuple, mechanism: str, per: str, memoize: bool, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    ids, mask, ignored = (torch.randint(high, shape, generator=generator) for high in (12, 2, 2))
    ids = ids.to(dtype)
    labels = ids.masked_fill(ignored == 1, -100)
    batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    before = copy.deepcopy(batch)
    defense = TokenLDP(
        mechanism,
        data.draw(st.floats(0.01, 50)),
        per,
        domain=range(3, 90),
        special_ids=SPECIAL,
        form=BatchForm(kind="causal"),
        memoize=memoize,
    )
    new = defended(defense, nn.Identity(), batch)
    torch.testing.assert_close(batch, before, rtol=0, atol=0)
    special = ids < 3
    read = (mask == 1) | (labels != -100)
    assert torch.equal(new["input_ids"][special], ids[special])
    assert (new["input_ids"][~special & ~read] == 0).all()
    drawn = new["input_ids"][~special & read]
    assert ((drawn >= 3) & (drawn < 90)).all()
    assert torch.equal(new["labels"], new["input_ids"].masked_fill(labels == -100, -100))
    assert new["input_ids"].dtype == new["labels"].dtype == dtype


def test_masked_words_have_one_replacement() -> None:
    ids = rows(400, 8, seed=2).clamp(min=5)
    chosen = torch.rand(ids.shape, generator=torch.Generator().manual_seed(0)) < 0.4
    how = torch.rand(ids.shape, generator=torch.Generator().manual_seed(1))
    inputs = torch.where(chosen & (how < 0.8), MASK_ID, ids)
    inputs = torch.where(chosen & (how > 0.9), rows(400, 8, seed=3).clamp(min=5), inputs)
    labels = ids.masked_fill(~chosen, -100)
    batch = {"input_ids": inputs, "labels": labels}
    model = tiny_bert_mlm()
    new = defended(TokenLDP("grr", 4.0, "token", special_ids=[0, MASK_ID]), model, batch)
    masked = inputs == MASK_ID
    assert torch.equal(new["input_ids"] == MASK_ID, masked)
    assert torch.equal(new["labels"] == -100, ~chosen)
    both = chosen & ~masked
    assert torch.equal(new["input_ids"][both], new["labels"][both])
    # A position that masking has filled with a random word keeps the word like any other.
    expected = Randomizer.with_defaults("grr", VOCAB - 2).keep(4.0)
    for place in (chosen & masked, chosen & (how > 0.9), chosen & (how > 0.8) & (how < 0.9)):
        unchanged = float((new["labels"] == ids)[place].double().mean())
        assert unchanged == pytest.approx(expected, abs=5 * math.sqrt(0.25 / int(place.sum())))
    # Masked anew, the words of a row are the same, and so are their replacements.
    defense = TokenLDP("grr", 4.0, "token", special_ids=[0, MASK_ID])
    first = defended(defense, model, {"input_ids": ids, "labels": torch.full_like(ids, -100)})
    second = defense.on_batch(batch, context(model))
    assert torch.equal(second["labels"][chosen], first["input_ids"][chosen])
    assert torch.equal(second["input_ids"][~chosen], first["input_ids"][~chosen])


def test_both_texts_of_an_encoder_decoder() -> None:
    source, target = rows(300, 5), rows(300, 4, seed=1)
    target[:, -1] = -100
    batch = {"input_ids": source, "labels": target}
    defense = TokenLDP("grr", 8 * 3.0)
    new = defended(defense, tiny_t5(), batch)
    assert defense.longest == 8
    expected = Randomizer.with_defaults("grr", VOCAB - len(defense._words.special)).keep(3.0)
    for key, text in (("input_ids", source), ("labels", target[:, :3])):
        unchanged = float((new[key][:, : text.shape[1]] == text).double().mean())
        assert unchanged == pytest.approx(expected, abs=5 * math.sqrt(0.25 / text.numel()))
    assert (new["labels"][:, -1] == -100).all()
    with pytest.raises(DefenseError, match="would get decoder_input_ids unchanged"):
        defense.on_batch({**batch, "decoder_input_ids": target}, context(tiny_t5()))


def test_classes_are_not_covered_as_the_guarantee_says() -> None:
    ids, classes = rows(5, 6), torch.tensor([0, 1, 2, 0, 1])
    model = tiny_bert_classifier()
    with pytest.raises(DefenseError, match="special_ids must be given for a classifier"):
        defended(TokenLDP("grr", 1.0), model, {"input_ids": ids, "labels": classes})
    defense = TokenLDP("grr", 1.0, special_ids=[])
    new = defended(defense, model, {"input_ids": ids, "labels": classes})
    assert new["labels"] is classes
    assert not torch.equal(new["input_ids"], ids)
    assert "Not covered: labels of a classifier" in defense.guarantee


def test_memoised_rows_keep_their_replacement(gpt2: nn.Module) -> None:
    ids = rows(6, 8)
    where = context(gpt2)
    defense = TokenLDP("rappor", 40.0)
    first = defended(defense, gpt2, ids)
    order = torch.tensor([4, 0, 2])
    padded = torch.cat([torch.zeros(3, 2, dtype=torch.int64), ids[order]], dim=1)
    again = defense.on_batch(padded, where)
    assert torch.equal(again[:, 2:], first[order])
    assert torch.equal(again[:, :2], padded[:, :2])
    changed = ids.clone()
    changed[:, 7] = (changed[:, 7] - 3 + 1) % (VOCAB - 3) + 3
    other = defense.on_batch(changed, where)
    assert float((other == first).double().mean()) < 0.9
    for fields in ({"client": 1}, {"entropy": b"f" * 32}):
        assert not torch.equal(defense.on_batch(ids, context(gpt2, **fields)), first)
    assert defense.releases_per_example == 1
    assert defense.epsilon_spent == defense.epsilon_per_sequence == 40.0
    state = defense.state_dict()
    defense.teardown()
    defense.load_state_dict(state)  # another fit in one process: its own past counts once
    assert not torch.equal(defended(defense, gpt2, ids, entropy=b"h" * 32), first)
    assert (defense.releases_per_example, defense.epsilon_spent) == (2, 80.0)


def test_equal_rows_get_one_replacement_only_with_memoisation(gpt2: nn.Module) -> None:
    ids = rows(1, 40).expand(2, 40)
    assert torch.equal(*defended(TokenLDP("grr", 40.0), gpt2, ids))
    assert not torch.equal(*defended(TokenLDP("grr", 40.0, memoize=False), gpt2, ids))


def test_the_published_protocol_is_available_and_warned_about(gpt2: nn.Module) -> None:
    ids = rows(6, 8)
    ids[:, 0], ids[:, -2:] = 1, 0
    mask = (ids != 0).long()
    for mechanism in ("grr", "rappor", "the", "dbitflip"):
        with pytest.warns(UserWarning, match="which words occur in the batch is visible"):
            defense = TokenLDP.as_published(mechanism, 1.0)
        new = defended(defense, gpt2, {"input_ids": ids, "attention_mask": mask})["input_ids"]
        assert set(new.unique().tolist()) <= set(ids.unique().tolist())
        assert not torch.equal(new[:, -2:], ids[:, -2:])
        assert defense.guarantee.startswith("none")
        assert defense.epsilon_per_sequence == math.inf
        assert not defense.memoize
    with pytest.warns(UserWarning, match="holds no guarantee"):
        defense = TokenLDP.as_published("grr", 1.0)
    assert defense.epsilon == 1.0
    one = torch.full((3, 3), 9)
    assert torch.equal(defended(defense, gpt2, one), one)


def test_labels_that_are_shifted_are_refused(gpt2: nn.Module) -> None:
    text = rows(4, 9)
    with pytest.raises(DefenseError, match="its inputs, not shifted"):
        defended(TokenLDP("grr", 1.0), gpt2, (text[:, :-1], text[:, 1:]))


def test_a_batch_of_unknown_form_is_refused_with_what_to_do(gpt2: nn.Module) -> None:
    ids = rows(2, 4)
    for batch, message in (
        ({"ids": ids}, "no 'input_ids'"),
        (MappingProxyType({"input_ids": ids}), "cannot be copied with other ids"),
    ):
        with pytest.raises(DefenseError, match=f"{message}.*Let the collate function") as refused:
            defended(TokenLDP("grr", 1.0), gpt2, batch)
        assert "batch_adapter" not in str(refused.value)


def test_fields_that_may_be_text_stop_training(gpt2: nn.Module) -> None:
    batch = {"input_ids": rows(2, 4), "text": ["a b", "c d"], "position_ids": rows(2, 4)}
    with pytest.raises(DefenseError, match=r"would get text unchanged.*public_fields=\['text'\]"):
        defended(TokenLDP("grr", 1.0), gpt2, batch)
    new = defended(TokenLDP("grr", 1.0, form=BatchForm(public_fields=["text"])), gpt2, batch)
    assert new["text"] is batch["text"]


class Recording(CausalLMModule):
    def __init__(self) -> None:
        super().__init__(tiny_gpt2())
        self.seen: list[dict[str, Tensor]] = []
        self.validated: list[Tensor] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.seen.append({k: v.clone() for k, v in batch.items()})
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        self.validated.append(batch["input_ids"].clone())


class Truth(pl.Callback):
    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def on_train_batch_end(self, _t: Any, _m: Any, _o: Any, batch: Any, _i: int) -> None:
        self.seen.append(batch["input_ids"].clone())


def ordered(loader: DataLoader[Any]) -> DataLoader[Any]:
    return DataLoader(loader.dataset, batch_size=loader.batch_size)


def fit(defense: TokenLDP | None, epochs: int = 2) -> tuple[Recording, Truth, Tensor]:
    module, truth = Recording(), Truth()
    trainer = pl.Trainer(
        strategy=DefendedStrategy("auto", [] if defense is None else [defense]),
        max_epochs=epochs,
        callbacks=[truth],
        **QUIET,
    )
    torch.manual_seed(5)
    loader = ordered(random_token_loader(n=8, padded=True))
    trainer.fit(module, loader, ordered(random_token_loader(n=4, seed=9)))
    return module, truth, torch.rand(3)


def test_in_a_fit_the_module_sees_other_words_and_callbacks_the_truth() -> None:
    plain, truth, after = fit(None)
    defense = TokenLDP("rappor", 60.0, seed=7)
    module, same_truth, same_after = fit(defense)
    assert torch.equal(torch.stack(truth.seen), torch.stack(same_truth.seen))
    assert torch.equal(torch.stack(plain.validated), torch.stack(module.validated))
    for batch, true in zip(module.seen, truth.seen, strict=True):
        words = batch["attention_mask"] == 1
        assert not torch.equal(batch["input_ids"][words], true[words])
        assert torch.equal(batch["input_ids"][~words], true[~words])
        assert torch.equal(batch["labels"], batch["input_ids"].masked_fill(~words, -100))
    for first, second in zip(module.seen[:2], module.seen[2:], strict=True):
        assert torch.equal(first["input_ids"], second["input_ids"])
    assert defense.releases_per_example == 1
    assert torch.equal(after, same_after)  # no global generator was drawn from

    again, _, _ = fit(TokenLDP("rappor", 60.0, seed=7))
    for one, other in zip(module.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)
    other, _, _ = fit(TokenLDP("rappor", 60.0, seed=8))
    assert not torch.equal(module.seen[0]["input_ids"], other.seen[0]["input_ids"])


def test_a_checkpoint_carries_the_counts_and_no_secret(tmp_path: Any) -> None:
    loader = ordered(random_token_loader(n=8))
    options = {**QUIET}
    first = TokenLDP("grr", 20.0, memoize=False)
    trainer = pl.Trainer(strategy=DefendedStrategy("auto", [first]), max_epochs=2, **options)
    before = Recording()
    trainer.fit(before, loader)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    state = torch.load(tmp_path / "a.ckpt", weights_only=True)["lightning_fedleak_defenses"]
    assert state == {"token_ldp": {"batches": 4, "releases": 2, "longest": 12, "epsilon": 20.0}}
    second = TokenLDP("grr", 20.0, memoize=False)
    trainer = pl.Trainer(strategy=DefendedStrategy("auto", [second]), max_epochs=3, **options)
    after = Recording()
    trainer.fit(after, loader, ckpt_path=tmp_path / "a.ckpt")
    assert len(after.seen) == 2
    assert second.releases_per_example == 3
    assert second.epsilon_spent == 60.0
    for observed in before.seen:
        assert not torch.equal(observed["input_ids"], after.seen[0]["input_ids"])
