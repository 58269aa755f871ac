"""Which texts and tokens a live game queries."""

from types import SimpleNamespace

import pytest
import torch

from lightning_fedleak.attacks.membership.fc import FCMembership
from lightning_fedleak.engine.channels.targets import Rows, Sources
from lightning_fedleak.engine.options import Games
from lightning_fedleak.engine.run import NoTargets
from lightning_fedleak.model.anatomy import special_ids
from lightning_fedleak.model.batches import TokenBatch
from tests.helpers.lightning_modules import random_token_loader
from tests.helpers.loops import watched
from tests.helpers.models import tiny_bert_mlm, tiny_gpt2

A, B, C, D, E = [1, 2, 3], [4, 5, 6, 7], [1, 2], [8, 1], [5, 5, 5, 5, 5]
CLS, SEP = 96, 95


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def batch(*texts, left=False, mask=True, pad=9, labels=None, kind="causal"):
    length = max(map(len, texts))
    rows, masks = [], []
    for text in texts:
        padding = [pad] * (length - len(text))
        ones, zeros = [1] * len(text), [0] * len(padding)
        rows.append([*padding, *text] if left else [*text, *padding])
        masks.append([*zeros, *ones] if left else [*ones, *zeros])
    labels = None if labels is None else torch.tensor(labels)
    return TokenBatch(torch.tensor(rows), labels, torch.tensor(masks) if mask else None, kind)


def rows_of(*batches):
    return Rows.from_batches(list(batches))


def rule(members, *, causal, special=frozenset()):
    return Sources(Games(targets=members), 0, causal=causal, special=special)


def words(rows):
    return [row[real].tolist() for row, real in zip(rows.ids, rows.real, strict=True)]


def test_members_are_of_the_batch_and_as_many_others_are_not():
    inside = rows_of(batch(A, B), batch(C, E))
    outside = rows_of(batch(D, A, [3, 3], left=True, pad=3), batch(B, [6, 1, 6]))
    state = torch.get_rng_state()
    for seed in range(20):
        targets = rule(16, causal=True).draw(inside, outside, generator(seed))
        queried = list(zip(words(targets.rows), targets.members.tolist(), strict=True))
        assert sorted(t for t, is_in in queried if not is_in) == sorted([D, [3, 3], [6, 1, 6]])
        assert len({tuple(text) for text, _ in queried}) == 6
        for (text, is_in), place in zip(queried, targets.places.tolist(), strict=True):
            assert (words(inside)[place] == text) if is_in else place == -1
    assert torch.equal(state, torch.get_rng_state())


def test_no_more_than_requested_each_sentence_once_and_all_in_their_turn():
    inside, outside = rows_of(batch(A, A, B, C, D)), rows_of(batch(E, E, [7, 7], [6, 6, 6]))
    texts = set()
    for seed in range(40):
        targets = rule(2, causal=False).draw(inside, outside, generator(seed))
        drawn = [tuple(text) for text in words(targets.rows)]
        assert len(set(drawn)) == 4
        texts.update(drawn)
    assert texts == {tuple(text) for text in (A, B, C, D, E, [7, 7], [6, 6, 6])}


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_targets_are_words_and_of_a_causal_model_the_last_that_predicts_another(causal, left):
    inside = rows_of(batch([CLS, 5, 6, SEP], [CLS, 7, SEP], [CLS, SEP], left=left, pad=0))
    outside = rows_of(batch([CLS, 8, SEP, SEP], [CLS, 9, 10, 11], left=left, pad=0))
    deal = rule(4, causal=causal, special=frozenset({CLS, SEP, 0}))
    tokens = set()
    for seed in range(60):
        targets = deal.draw(inside, outside, generator(seed))
        assert len(targets.members) == 4
        tokens.update(targets.rows.ids.gather(1, targets.positions[:, None])[:, 0].tolist())
    assert tokens == ({6, 7, 8, 10} if causal else {5, 6, 7, 8, 9, 10, 11})


def test_nothing_held_out_is_none_and_nothing_to_query_is_an_error():
    inside, short = rows_of(batch(A, B)), rows_of(batch([3], [4]))
    causal = rule(4, causal=True)
    assert causal.draw(inside, rows_of(batch(B, A)), generator()) is None
    assert causal.draw(inside, short, generator()) is None
    with pytest.raises(NoTargets, match="no sentence of the batch has a label"):
        causal.draw(short, inside, generator())
    assert rule(4, causal=False).draw(short, inside, generator()) is not None
    special = rule(4, causal=False, special=frozenset({CLS, SEP}))
    with pytest.raises(NoTargets, match="no sentence of the batch has a label"):
        special.draw(rows_of(batch([CLS, SEP])), inside, generator())
    unlabelled = rows_of(batch(A, B, labels=[[-100] * 4] * 2))
    with pytest.raises(NoTargets, match="no sentence of the batch has a label"):
        causal.draw(unlabelled, rows_of(batch(D)), generator())


@pytest.mark.parametrize(
    ("kind", "labels"),
    [
        ("causal", [[-100, 2, -100, -100], [4, -100, -100, -100], [-100, 2, -100, 9]]),
        ("masked", [[-100, 2, -100, -100], [-100] * 4, [1, -100, -100, -100]]),
        ("seq2seq", [[7, -100], [-100, -100], [7, 7]]),
        ("classifier", [1, -100, 0]),
        ("classifier", [[1, 0, 1, -100], [-100] * 4, [-100, 0, -100, -100]]),
    ],
)
def test_a_row_without_a_label_is_neither_a_member_nor_held_out(kind, labels):
    """A first label of a causal row counts for nothing, nor does what padding predicts."""
    inside = rows_of(batch(A, B, C, labels=labels, kind=kind))
    outside = rows_of(batch(B, D, E, [7, 7]))
    targets = rule(16, causal=kind == "causal").draw(inside, outside, generator())
    members = [text for text, m in zip(words(targets.rows), targets.members, strict=True) if m]
    assert sorted(members) == sorted([A, C])
    assert B not in words(targets.rows)
    if kind == "causal":  # the token before the last label, which is before the last token in A
        assert targets.positions[targets.members].tolist() == [0, 0]


def test_a_row_stays_as_it_is_in_its_batch_and_texts_are_cut_to_it():
    left, right = batch(A, E, left=True, pad=7), batch(C, [2, 2, 2])
    empty = TokenBatch(torch.empty(0, 4).long(), torch.empty(0, 4).long(), None, "causal")
    rows = rows_of(empty, left, right)
    assert torch.equal(rows.ids[:2], left.input_ids)
    assert words(rows) == [A, E, C, [2, 2, 2]]
    assert rows[torch.tensor([2, 3])].trimmed().ids.shape == (2, 3)
    assert rows.masked
    assert not rows_of(batch(A, mask=False)).masked
    cut = Rows.from_texts([torch.tensor(E), torch.tensor([4])], rows_of(batch(A, C)))
    assert words(cut) == [E[:3], [4]]


# ---- special tokens -----------------------------------------------------------------------------


def test_special_ids_are_those_of_config_and_tokenizer_but_for_mask_and_unknown():
    config = SimpleNamespace(bos_token_id=1, eos_token_id=[2, 3], pad_token_id=None)
    marks = {"cls_token_id": 4, "sep_token_id": 5, "mask_token_id": 6, "unk_token_id": 7}
    tokenizer = SimpleNamespace(**marks, all_special_ids=[4, 5, 6, 7, 8])
    assert special_ids(config, [None, tokenizer]) == {1, 2, 3, 4, 5, 8}
    # One token for everything, as GPT-2 has it.
    one = SimpleNamespace(bos_token_id=9, eos_token_id=9, unk_token_id=9, all_special_ids=[9])
    assert special_ids(None, [one]) == {9}


class Queried(FCMembership):
    """Keeps which ids of the steps themselves it is queried about."""

    needs_control = False

    def __init__(self):
        super().__init__(1)
        self.ids = []

    def run(self, view, query=None):
        self.ids += query.input_ids.gather(1, query.positions[:, None])[:, 0].tolist()
        return super().run(view, query)


@pytest.mark.parametrize("holder", ["tokenizer", "config", None])
def test_no_live_game_queries_a_token_that_is_in_every_text(tmp_path, holder):
    model = (tiny_gpt2 if holder == "config" else tiny_bert_mlm)()
    batches = [{k: v.clone() for k, v in b.items()} for b in random_token_loader(16)]
    for rows in batches:
        for name in ("input_ids", "labels"):
            rows[name][:, 0], rows[name][:, -2:] = CLS, SEP
    tokenizer = SimpleNamespace(cls_token_id=CLS, sep_token_id=SEP)
    if holder == "config":
        model.config.bos_token_id, model.config.eos_token_id = CLS, [SEP]
    attack = Queried()
    given = {"tokenizer": tokenizer} if holder == "tokenizer" else {}
    watched(tmp_path, attack, model, batches=batches, lr=0.0, **given)
    assert len(attack.ids) == 3 * 8
    assert bool({CLS, SEP} & set(attack.ids)) is (holder is None)
