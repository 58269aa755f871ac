"""Which texts a live game asks for."""

import pytest
import torch

from lightning_fedleak.engine.channels.targets import Deal, Rows
from lightning_fedleak.engine.run import NoTargets
from lightning_fedleak.model.batches import TokenBatch


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def batch(*texts, left=False, mask=True, pad=9):
    length = max(map(len, texts))
    rows, masks = [], []
    for text in texts:
        padding = [pad] * (length - len(text))
        ones, zeros = [1] * len(text), [0] * len(padding)
        rows.append([*padding, *text] if left else [*text, *padding])
        masks.append([*zeros, *ones] if left else [*ones, *zeros])
    kept = torch.tensor(masks) if mask else None
    return TokenBatch(torch.tensor(rows), None, kept, "causal")


def words(rows):
    return [row[real].tolist() for row, real in zip(rows.ids, rows.real, strict=True)]


A, B, C, D, E = [1, 2, 3], [4, 5, 6, 7], [1, 2], [8, 1], [5, 5, 5, 5, 5]


def test_members_are_of_the_batch_and_as_many_others_are_not():
    inside = Rows.from_batches([batch(A, B), batch(C, E)])
    outside = Rows.from_batches([batch(D, A, [3, 3]), batch(B, [6, 1, 6])])
    for seed in range(20):
        targets = Deal(16, causal=True).targets(inside, outside, generator(seed))
        asked = words(targets.rows)
        members = targets.members.tolist()
        others = [text for text, is_in in zip(asked, members, strict=True) if not is_in]
        assert sorted(others) == sorted([D, [3, 3], [6, 1, 6]])
        assert len({tuple(t) for t in asked}) == 6
        for text, is_in, place in zip(asked, members, targets.places.tolist(), strict=True):
            assert (words(inside)[place] == text) if is_in else place == -1


def test_equal_sentences_are_equal_whichever_side_is_padded():
    inside = Rows.from_batches([batch(A, B)])
    outside = Rows.from_batches([batch(A, D, E, left=True, pad=3)])
    targets = Deal(16, causal=True).targets(inside, outside, generator())
    assert sorted(words(targets.rows)[2:]) == sorted([D, E])


def test_no_more_than_asked_for_each_sentence_once_and_all_in_their_turn():
    inside = Rows.from_batches([batch(A, A, B, C, D)])
    outside = Rows.from_batches([batch(E, E, [7, 7], [6, 6, 6])])
    seen = set()
    for seed in range(40):
        targets = Deal(2, causal=False).targets(inside, outside, generator(seed))
        asked = [tuple(t) for t in words(targets.rows)]
        assert len(set(asked)) == 4
        seen.update(asked)
    assert seen == {tuple(t) for t in (A, B, C, D, E, [7, 7], [6, 6, 6])}


@pytest.mark.parametrize("left", [False, True])
def test_a_causal_target_is_the_last_token_that_predicts_another(left):
    inside = Rows.from_batches([batch(A, B, left=left)])
    outside = Rows.from_batches([batch(C, E, left=left)])
    targets = Deal(16, causal=True).targets(inside, outside, generator())
    for row, real, at in zip(targets.rows.ids, targets.rows.real, targets.positions, strict=True):
        assert row[at] == row[real][-2]
        assert real[at]


def test_other_targets_are_random_real_tokens():
    inside, outside = Rows.from_batches([batch(B, A, left=True)]), Rows.from_batches([batch(C, E)])
    seen = {tuple(t): set() for t in (A, B, C, E)}
    for seed in range(200):
        targets = Deal(16, causal=False).targets(inside, outside, generator(seed))
        for row, real, at in zip(
            targets.rows.ids, targets.rows.real, targets.positions, strict=True
        ):
            assert real[at]
            seen[tuple(row[real].tolist())].add(int(real[:at].sum()))
    assert all(places == set(range(len(text))) for text, places in seen.items())


def test_nothing_held_out_is_none_and_nothing_to_ask_for_is_an_error():
    inside = Rows.from_batches([batch(A, B)])
    assert (
        Deal(4, causal=True).targets(inside, Rows.from_batches([batch(B, A)]), generator()) is None
    )
    short = Rows.from_batches([batch([3], [4])])
    assert Deal(4, causal=True).targets(inside, short, generator()) is None
    with pytest.raises(NoTargets, match="no sentence of the batch has a token before a label"):
        Deal(4, causal=True).targets(short, inside, generator())
    assert Deal(4, causal=False).targets(short, inside, generator()) is not None


def labelled(kind, texts, labels):
    rows = batch(*texts)
    return TokenBatch(rows.input_ids, torch.tensor(labels), rows.attention_mask, kind)


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
def test_a_row_without_a_label_is_no_member_and_no_other(kind, labels):
    """A first label of a causal row counts for nothing, nor does what padding predicts."""
    inside = Rows.from_batches([labelled(kind, (A, B, C), labels)])
    outside = Rows.from_batches([batch(B, D, E, [7, 7])])
    targets = Deal(16, causal=kind == "causal").targets(inside, outside, generator())
    members = [text for text, m in zip(words(targets.rows), targets.members, strict=True) if m]
    assert sorted(members) == sorted([A, C])
    assert B not in words(targets.rows)
    if kind == "causal":  # the token before the last label, which is before the last token in A
        assert targets.positions[targets.members].tolist() == [0, 0]


@pytest.mark.parametrize("kind", ["causal", "masked", "classifier"])
def test_an_empty_micro_batch_adds_no_row(kind):
    labels = torch.empty(0, dtype=torch.long) if kind == "classifier" else torch.empty(0, 4).long()
    empty = TokenBatch(torch.empty(0, 4, dtype=torch.long), labels, None, kind)
    assert words(Rows.from_batches([empty, batch(A)])) == [A]


def test_a_batch_without_any_label_is_unknown():
    inside = Rows.from_batches([labelled("causal", (A, B), [[-100] * 4] * 2)])
    with pytest.raises(NoTargets, match="no sentence of the batch has a token before a label"):
        Deal(16, causal=True).targets(inside, Rows.from_batches([batch(D)]), generator())


def test_a_row_stays_as_it_stands_in_its_batch():
    left, right = batch(A, E, left=True, pad=7), batch(C, [2, 2, 2])
    rows = Rows.from_batches([left, right])
    assert torch.equal(rows.ids[:2], left.input_ids)
    assert words(rows) == [A, E, C, [2, 2, 2]]
    assert rows[torch.tensor([2, 3])].trimmed().ids.shape == (2, 3)
    assert rows.masked
    assert not Rows.from_batches([batch(A, mask=False)]).masked


def test_texts_are_cut_to_the_batch():
    inside = Rows.from_batches([batch(A, C)])
    rows = Rows.from_texts([torch.tensor(E), torch.tensor([4])], inside)
    assert words(rows) == [E[:3], [4]]
    assert rows.masked


def test_the_draw_leaves_the_global_generator_alone():
    before = torch.get_rng_state()
    inside, outside = Rows.from_batches([batch(A, B)]), Rows.from_batches([batch(C, D)])
    Deal(2, causal=False).targets(inside, outside, generator())
    assert torch.equal(before, torch.get_rng_state())
