"""Whole texts off shared gradients: exact at full rank, with a certificate that does not lie."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from lightning_fedleak.attacks.base import RunFacts, UnusableObservation
from lightning_fedleak.attacks.texts import subspace_search
from lightning_fedleak.attacks.texts.base import TextGuess
from lightning_fedleak.attacks.texts.subspace import SubspaceTexts
from lightning_fedleak.attacks.texts.subspace_rows import Remainder, shared_rows
from lightning_fedleak.model.anatomy import Anatomy, find_anatomy
from lightning_fedleak.model.snapshots import GradientSnapshot, Observation, Stage, UpdateSnapshot
from tests.attacks.row_space.models import (
    backward,
    gemma,
    gpt2,
    llama,
    neox,
    ready,
    texts,
    with_lora,
)

QKV = ["q_proj", "k_proj", "v_proj"]


def deep_llama(blocks: int, seed: int) -> nn.Module:
    config = llama().config
    config.num_hidden_layers = blocks
    torch.manual_seed(seed)
    return LlamaForCausalLM(config)


def shared(anatomy, attack, noise=0.0, declared=True) -> Observation:
    tensors = {n: anatomy.parameter(n).grad.clone() for n in attack.needs(anatomy).gradients}
    for g in tensors.values():
        g += noise * torch.randn_like(g)
    std = noise if declared else 0.0
    return Observation((GradientSnapshot(0, Stage.SHARED, tensors, noise_std=std),))


def prepared(model: nn.Module, **settings: Any) -> tuple[SubspaceTexts, Anatomy]:
    attack, anatomy = SubspaceTexts(**settings), find_anatomy(model)
    attack.prepare(anatomy)
    return attack, anatomy


def read(model, ids, noise=0.0, *, declared=True, budget_seconds=None, **more) -> TextGuess:
    attack, anatomy = prepared(model, budget_seconds=budget_seconds)
    backward(model, ids, **more)
    return attack.run(shared(anatomy, attack, noise, declared))


def answer(guess: TextGuess) -> list[list[int]]:
    return sorted(row[row >= 0].tolist() for row in guess.tokens)


def visible(ids: Tensor, mask: Tensor | None = None) -> list[list[int]]:
    """What a causal model's gradients hold: no text's last token."""
    rows = ids if mask is None else [i[m > 0] for i, m in zip(ids, mask, strict=True)]
    return sorted(row[:-1].tolist() for row in rows)


def check_read(model: nn.Module, ids: Tensor, mask: Tensor | None = None, **more: Any) -> None:
    guess = read(model, ids, **more)
    assert answer(guess) == visible(ids, mask)
    assert guess.finished
    assert guess.certified


@pytest.mark.parametrize(
    ("family", "rows", "length"),
    [(llama, 1, 9), *((family, 8, 6) for family in (llama, gpt2, gemma, neox))],
)
def test_whole_projections_give_every_text_away(family: Any, rows: int, length: int) -> None:
    check_read(ready(family()), texts(rows, length))


@pytest.mark.parametrize("rank", [None, 12])
def test_a_token_without_an_input_is_read_from_the_blocks_behind(rank: int | None) -> None:
    """It leaves no trace in the first block's rows, so that its words are not certified."""
    model, ids = ready(llama(pad_token_id=9)), texts(2, 10)
    if rank:
        model = with_lora(model, rank, QKV)
    ids[0, 4] = ids[1, 7] = 9
    guess = read(model, ids)
    assert answer(guess) == visible(ids)
    assert not guess.certified


def test_a_token_that_equals_a_word_is_not_tried_in_its_place() -> None:
    model, ids = ready(llama(tie_word_embeddings=False)), texts(2, 9)
    with torch.no_grad():
        table = model.get_input_embeddings().weight
        table[0] = table[ids[0, 2]]
    guess = read(model, ids)
    assert answer(TextGuess(guess.tokens.masked_fill(guess.tokens == 0, int(ids[0, 2])))) == (
        visible(ids)
    )
    assert len(guess.tokens) == len(ids)
    assert not guess.certified


def test_texts_with_a_common_prefix_are_distinguished() -> None:
    model, ids = ready(llama()), texts(4, 9)
    ids[:, 0] = 7
    ids[1, :4] = ids[0, :4]
    ids[3, :7] = ids[2, :7]
    check_read(model, ids)


@pytest.mark.parametrize("second", [["q_proj", "k_proj"], ["k_proj"]])
def test_no_certificate_of_the_second_block_s_queries_and_keys(second: list[str]) -> None:
    """They do not show a text of which one token counts, even if the first block does."""
    model = ready(llama())
    for name, parameter in model.named_parameters():
        of_second = any(f"layers.1.self_attn.{target}" in name for target in second)
        parameter.requires_grad_("layers.0.self_attn" in name or of_second)
    ids = torch.tensor([[30, 31, 32, 33, 34, 35, 36], [33, 41, 0, 0, 0, 0, 0]])
    mask = torch.ones_like(ids)
    mask[1, 2:] = 0
    guess = read(model, ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100))
    assert [33] not in answer(guess)
    assert not guess.certified


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_texts_of_several_lengths(side: str) -> None:
    model, ids = ready(llama()), texts(3, 10)
    mask = torch.ones_like(ids)
    for row, n in enumerate((0, 3, 5)):
        if n:
            mask[row, slice(0, n) if side == "left" else slice(-n, None)] = 0
    labels = ids.masked_fill(mask == 0, -100)
    places = (mask.cumsum(1) - 1).clamp_min(0)
    check_read(model, ids, mask, attention_mask=mask, labels=labels, position_ids=places)


def test_prompts_that_the_loss_looks_away_from_are_read() -> None:
    model, ids = ready(llama()), texts(2, 10)
    labels = ids.clone()
    labels[:, :6] = -100
    assert answer(read(model, ids, labels=labels)) == visible(ids)


@pytest.mark.parametrize("family", [llama, gemma, gpt2])
def test_texts_that_begin_with_one_token_several_times(family: Any) -> None:
    """Where positions are relative, each copy of the first token reads as the first does."""
    model, ids = ready(family()), texts(4, 9)
    ids[0, :2] = 7
    ids[1, :4] = 7
    ids[2, 0] = 7
    ids[3, :3] = 8
    check_read(model, ids)


def test_a_lora_with_as_many_rows_as_tokens() -> None:
    check_read(with_lora(ready(llama()), 8, QKV), texts(2, 9))


@pytest.mark.slow
def test_below_the_rank_more_blocks_tell_the_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two directions a block, 11 tokens: block 2 alone does not do."""
    model, ids = deep_llama(6, seed=3), texts(1, 12)
    model = with_lora(ready(model), 1, ["q_proj", "v_proj"])
    guesses = []
    for blocks, seconds in ((1, 3.0), (3, None)):
        monkeypatch.setattr("lightning_fedleak.attacks.texts.subspace.MAX_BLOCKS", blocks)
        guesses.append(read(model, ids, budget_seconds=seconds))
    alone, together = guesses
    assert answer(together) == visible(ids)
    assert together.certified
    assert answer(alone) != visible(ids)
    assert not alone.certified


def test_prefixes_of_which_a_block_makes_nothing_are_no_measure() -> None:
    """With few rows, and a first block whose attention writes nothing."""
    model = deep_llama(4, seed=1)
    with torch.no_grad():
        model.model.layers[0].self_attn.o_proj.weight.zero_()
    model = with_lora(ready(model), 1, ["q_proj", "v_proj", "gate_proj"])
    assert not read(model, texts(1, 12), budget_seconds=2.0).certified


def certified(say: Callable[[], TextGuess]) -> bool:
    """What cannot be read is not certain either."""
    try:
        return bool(say().certified)
    except UnusableObservation:
        return False


@pytest.mark.parametrize(("noise", "declared"), [(1e-4, False), (1e-2, True)])
def test_noise_takes_the_certificate(noise: float, declared: bool) -> None:
    model, ids = ready(llama()), texts(2, 9)
    assert not certified(lambda: read(model, ids, noise, declared=declared))


@pytest.mark.parametrize("declared", [True, False])
def test_half_precision_takes_the_certificate(declared: bool) -> None:
    model, ids = ready(llama()), texts(2, 9)
    attack, anatomy = prepared(model, budget_seconds=2)
    backward(model, ids)
    [snapshot] = shared(anatomy, attack).gradients
    rounded = {n: g.bfloat16() for n, g in snapshot.tensors.items()}
    if not declared:
        rounded = {n: g.float() for n, g in rounded.items()}
    rough = Observation((replace(snapshot, tensors=rounded),))
    assert not certified(lambda: attack.run(rough))


@pytest.mark.parametrize("adapters", [True, False])
def test_dropout_takes_the_certificate(adapters: bool) -> None:
    model = with_lora(ready(llama()), 8, QKV, lora_dropout=0.2) if adapters else ready(gpt2())
    attack, anatomy = prepared(model, budget_seconds=1)
    model.train()
    backward(model, texts(2, 7))
    assert not certified(lambda: attack.run(shared(anatomy, attack)))


def test_other_weights_than_the_clients_are_no_certificate() -> None:
    """Dropout, or a stale copy: the states are not those that the client had."""
    model, ids = ready(llama()), texts(2, 7)
    attack, anatomy = prepared(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 1e-3 * torch.randn_like(parameter)
    backward(model, ids)
    attack._words.refresh(anatomy, 1)
    assert not certified(lambda: attack.run(shared(anatomy, attack)))


@cache
def searched() -> tuple[subspace_search.SubspaceSearch, list[int], list[tuple[int, ...]]]:
    """Return the search of a batch of three texts, the batch's tokens, and the texts."""
    torch.manual_seed(0)
    model, ids = ready(llama()), texts(3, 10)
    attack, anatomy = prepared(model)
    backward(model, ids)
    bottom, view = attack._copy, shared(anatomy, attack)
    assert bottom is not None
    rows = [shared_rows(known, anatomy, view, None) for known in bottom.inputs]
    bag = ids[:, :-1].unique()
    search = subspace_search.SubspaceSearch(bottom, attack._whitenings, rows, bag, 3, 0)
    return search, bag.tolist(), [tuple(row[:-1].tolist()) for row in ids]


@cache
def recovered(row: tuple[int, ...]) -> subspace_search._PartialText:
    """Return a text as the search would return it, with the states that its tokens have."""
    search, _, _ = searched()
    bottom = search.candidates.bottom
    with torch.no_grad(), bottom.session():
        parts = search.measure.whiten(bottom.parts(bottom.hidden(torch.tensor([row]))))
    states = tuple(tuple(x[0, i] for x in parts) for i in range(len(row)))
    remainders = tuple(
        Remainder.from_rows(r.principal[:0], w)
        for r, w in zip(search.shared, search.measure.whitening, strict=True)
    )
    return subspace_search._PartialText(row, (1.0,) * len(row), 0.0, remainders, (), (), states)


def checked(rows: list[tuple[int, ...]]) -> tuple[list[tuple[int, ...]], bool]:
    """Return the texts that the certificate's check leaves of these, and whether it is given."""
    search, _, _ = searched()
    certificate = subspace_search._Certificate(search.candidates, search.shared, search.measure)
    result, certain = certificate.check([recovered(row) for row in rows])
    return [text.tokens for text in result], certain


def test_the_true_texts_are_certified() -> None:
    true = searched()[2]
    assert checked(true) == (true, True)


@given(data=st.data())
@settings(max_examples=40)
def test_no_other_texts_are(data: st.DataObject) -> None:
    _, bag, true = searched()
    rows = [list(row) for row in true]
    which = data.draw(st.integers(0, len(rows) - 1))
    place = data.draw(st.integers(0, len(rows[which]) - 1))
    kind = data.draw(st.sampled_from(["exchanged", "removed", "doubled", "swapped", "text"]))
    if kind == "exchanged":
        rows[which][place] = data.draw(st.sampled_from(bag))
    elif kind == "removed":
        del rows[which][place]
    elif kind == "doubled":
        rows[which].insert(place, rows[which][place])
    elif kind == "swapped":
        other = data.draw(st.integers(0, len(rows[which]) - 1))
        rows[which][place], rows[which][other] = rows[which][other], rows[which][place]
    else:
        del rows[which]
    result, certain = checked([tuple(row) for row in rows])
    assert not certain or result == true


def test_a_first_token_that_another_could_stand_for_is_not_certain() -> None:
    """Their inputs differ, but by less than the residual tells."""
    torch.manual_seed(0)
    model = ready(llama())
    with torch.no_grad():
        weight = model.get_input_embeddings().weight
        weight[6] = weight[200] + 3e-6 * torch.randn(64)
    ids = texts(2, 6)
    ids[0, 0], ids[1, 0] = 200, 6
    guess = read(model, ids)
    assert not guess.certified or answer(guess) == visible(ids)


def test_states_that_hang_on_each_other_are_not_certain() -> None:
    true = searched()[2]
    assert not checked([true[0], *true])[1]


def test_ends_that_explain_nothing_are_cut_off() -> None:
    _, bag, true = searched()
    longer = [(*row, bag[i], bag[i + 1]) for i, row in enumerate(true)]
    assert checked(longer) == (true, True)


@given(seed=st.integers(0, 10_000), k=st.integers(1, 9), inside=st.booleans())
def test_what_is_left_is_the_span_of_the_projected_rows(seed: int, k: int, inside: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(k, 12, dtype=torch.float64, generator=generator)
    state = torch.randn(12, dtype=torch.float64, generator=generator)
    if inside:
        state = rows.T @ torch.randn(k, dtype=torch.float64, generator=generator)
    state = state / state.norm()
    rows, plain = 1e6 * rows, torch.eye(12, dtype=torch.float64)
    share, _, new = Remainder.from_rows(rows, plain).fits(state[None])
    basis = torch.linalg.svd(rows, full_matrices=False)[2]
    assert float(share) == pytest.approx(float((basis @ state).square().sum()), abs=1e-9)
    remaining = Remainder.from_rows(rows, plain).explain(new[0])
    projected = rows - torch.outer(rows @ state, state)
    _, sizes, expected = torch.linalg.svd(projected, full_matrices=False)
    expected = expected[sizes > 1e-6 * sizes[0].clamp_min(1e-9)] if not (inside and k == 1) else []
    assert len(remaining.directions) == len(expected)
    if len(expected):
        torch.testing.assert_close(
            remaining.directions.T @ remaining.directions, expected.T @ expected, atol=1e-6, rtol=0
        )


@pytest.mark.parametrize(
    ("optimizer", "own", "steps", "fresh", "known"),
    [
        ("SGD", {}, 1, True, True),
        ("SGD", {}, 4, False, True),
        ("SGD", {"momentum": 0.9}, 1, True, True),
        ("SGD", {"momentum": 0.9}, 1, False, False),
        ("SGD", {"weight_decay": 0.1}, 1, True, False),
        ("AdamW", {}, 1, True, False),
    ],
)
def test_rounds_of_steps_of_sgd_are_read(optimizer, own, steps, fresh, known) -> None:
    model, ids = ready(llama()), texts(2, 9)
    attack = SubspaceTexts()
    settings = {"lr": 0.1, **own}
    attack.meet(RunFacts(optimizer=optimizer, optimizer_settings=settings, local_steps=steps))
    anatomy = find_anatomy(model)
    attack.prepare(anatomy)
    attack.refresh(anatomy, 0)
    backward(model, ids)
    tensors = shared(anatomy, attack).gradients[0].tensors
    update = UpdateSnapshot(
        0, Stage.SHARED, tensors, local_steps=steps, learning_rate=0.1, fresh=fresh
    )
    if known:
        assert answer(attack.run(Observation((update,)))) == visible(ids)
    else:
        with pytest.raises(UnusableObservation, match="SGD without weight decay"):
            attack.run(Observation((update,)))


@pytest.mark.parametrize("momentum", [pytest.param(0.0, marks=pytest.mark.slow), 0.9])
def test_a_round_of_several_steps_on_batches_of_their_own(momentum: float) -> None:
    torch.manual_seed(0)
    rate, model = 1e-3, ready(llama())
    ids = [texts(1, 9) for _ in range(2)]
    attack, anatomy = SubspaceTexts(), find_anatomy(model)
    settings = {"lr": rate, "momentum": momentum}
    attack.meet(RunFacts(optimizer="SGD", optimizer_settings=settings, local_steps=2))
    attack.prepare(anatomy)
    attack.refresh(anatomy, 0)
    roles = attack.needs(anatomy).gradients
    before = {role: anatomy.parameter(role).detach().clone() for role in roles}
    optimizer = torch.optim.SGD(model.parameters(), **settings)
    for batch in ids:
        backward(model, batch)
        optimizer.step()
    moved = {role: (before[role] - anatomy.parameter(role).detach()) / rate for role in roles}
    update = UpdateSnapshot(0, Stage.SHARED, moved, local_steps=2, learning_rate=rate)
    guess = attack.run(Observation((update,)))
    assert all(text in answer(guess) for text in visible(torch.cat(ids)))
    assert not guess.certified


def test_time_ends_it_and_it_says_so() -> None:
    model, ids = ready(llama()), texts(4, 9)
    guess = read(model, ids, budget_seconds=1e-9)
    assert not guess.finished
    assert not guess.certified
    assert len(guess.tokens) == 1


@pytest.mark.slow
def test_no_certificate_where_a_text_may_go_on_with_its_last_token() -> None:
    """A model that was trained on rows of end tokens: each reads nearly as the one before it."""
    torch.manual_seed(0)
    model = llama()

    def batch(rows: int) -> Tensor:
        ids = texts(rows, 14)
        for row in ids:
            row[int(torch.randint(5, 9, ())) :] = 2
        return ids

    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(120):
        ids = batch(16)
        backward(model, ids)
        optimizer.step()
    model.eval()
    for _ in range(6):
        ids = batch(1)
        guess = read(model, ids)
        assert not guess.certified or answer(guess) == visible(ids)
