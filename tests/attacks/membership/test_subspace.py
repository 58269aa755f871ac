"""Membership by what is shared anyway: members, other texts, other orders, one word replaced."""

from __future__ import annotations

import pytest
import torch
from peft import AdaLoraConfig, get_peft_model
from torch import Tensor, nn

from lightning_fedleak.attacks.base import Query
from lightning_fedleak.attacks.membership.subspace import SubspaceMembership
from lightning_fedleak.model.anatomy import find_anatomy
from lightning_fedleak.model.snapshots import GradientSnapshot, Observation, Stage
from tests.attacks.membership.test_gradients import asked_of, seen, variants
from tests.attacks.row_space.models import backward, bert, gpt2, llama, ready, texts, with_lora

ROWS, LENGTH = 3, 8


def asked(model: nn.Module, inside: Tensor, query: Tensor):
    anatomy = find_anatomy(model)
    attack = SubspaceMembership(texts(16, LENGTH))
    attack.prepare(anatomy)
    return asked_of(anatomy, attack, inside, query)


@pytest.mark.parametrize("family", [llama, gpt2, bert])
def test_whole_gradients_tell_members_from_everything_else(family) -> None:
    model = ready(family())
    inside = texts(ROWS, LENGTH)
    guess = asked(model, inside, torch.cat([inside, *variants(inside).values()]))
    assert float(guess.scores[:ROWS].min()) > float(guess.scores[ROWS:].max())
    assert guess.members[:ROWS].all()


def test_lora_tells_members_by_their_words() -> None:
    model = with_lora(ready(llama()), 6, ["q_proj", "v_proj"])
    inside = texts(ROWS, LENGTH)
    other = variants(inside)
    guess = asked(model, inside, torch.cat([inside, other["other"], other["replaced"]]))
    assert float(guess.scores[:ROWS].min()) > float(guess.scores[ROWS:].max())
    assert not guess.members[ROWS:].any()


@pytest.mark.parametrize("lora", [True, False])
def test_a_member_with_a_token_that_leaves_no_trace_is_none_the_less_one(lora: bool) -> None:
    """Of each text the third token has no input: it must not count as absent."""
    model = ready(llama(pad_token_id=9))
    if lora:
        model = with_lora(model, 6, ["q_proj", "v_proj"])
    inside, outside = texts(ROWS, LENGTH), texts(ROWS, LENGTH)
    inside[:, 2] = 9
    scores = asked(model, inside, torch.cat([inside, outside])).scores
    assert float(scores[:ROWS].min()) > float(scores[ROWS:].max()) + 1


def test_words_that_are_not_shared_leave_the_states_of_later_blocks() -> None:
    """A LoRA on the second block alone: the first block's inputs are in no row."""
    model = with_lora(ready(llama()), 6, ["q_proj", "v_proj"], layers_to_transform=[1])
    right = 0
    for _ in range(6):
        inside = texts(2, LENGTH)
        scores = asked(model, inside, torch.cat([inside, texts(2, LENGTH)])).scores
        right += int((scores[:2, None] > scores[None, 2:]).sum())
    assert right >= 0.9 * 6 * 4


def test_adaloras_own_term_is_taken_off_the_rows_of_every_block() -> None:
    config = AdaLoraConfig(
        init_r=6, target_r=4, total_step=100, target_modules=["q_proj", "v_proj"]
    )
    model = get_peft_model(ready(llama()), config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_E" in name:
                parameter += 0.5
    anatomy = find_anatomy(model)
    attack = SubspaceMembership(texts(16, LENGTH))
    attack.prepare(anatomy)
    inside = texts(ROWS, LENGTH)
    query = Query(torch.cat([inside, texts(ROWS, LENGTH)]))
    scores = []
    for weight in (0.0, 100.0):
        backward(model, inside)
        tensors = {r: anatomy.parameter(r).grad for r in attack.needs(anatomy).gradients}
        for role, gradient in tensors.items():
            gradient += weight * anatomy.parameter(role).detach()
        view = Observation((GradientSnapshot(0, Stage.SHARED, tensors),))
        scores.append(attack.run(view, query).scores)
    gap = float(scores[1][:ROWS].min()) - float(scores[1][ROWS:].max())
    assert gap > 0
    assert float((scores[0] - scores[1]).abs().max()) < 0.5 * gap


def test_padding_on_the_left_uses_up_nothing_of_what_is_read() -> None:
    model = ready(llama())
    anatomy = find_anatomy(model)
    attack = SubspaceMembership(texts(16, LENGTH), tokens=4)
    attack.prepare(anatomy)
    inside = texts(ROWS, LENGTH)
    backward(model, inside)
    view = seen(anatomy, attack)
    ids = torch.cat([inside, texts(ROWS, LENGTH)])
    plain = attack.run(view, Query(ids)).scores
    padded = torch.cat([torch.zeros(len(ids), 6, dtype=torch.long), ids], 1)
    mask = (torch.arange(padded.shape[1]) >= 6).long().repeat(len(ids), 1)
    scores = attack.run(view, Query(padded, mask)).scores
    assert float(scores[:ROWS].min()) > float(scores[ROWS:].max())
    assert float((scores - plain).abs().max()) < 0.5 * float((plain[:ROWS] - plain[ROWS:]).min())
