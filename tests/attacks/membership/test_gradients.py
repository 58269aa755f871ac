"""Membership by a text's own gradient: token by token, and of other parameters as a whole."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import AdaLoraConfig, LoraConfig, PromptEncoderConfig, PromptTuningConfig, get_peft_model
from torch import Tensor, nn

from lightning_fedleak.attacks.base import Query, RunFacts, UnusableObservation
from lightning_fedleak.attacks.membership import gradients, token_parts
from lightning_fedleak.attacks.membership.gradients import GradientMembership
from lightning_fedleak.attacks.membership.subspace import SubspaceMembership
from lightning_fedleak.attacks.row_space.linear_maps import find_linear_maps
from lightning_fedleak.model.anatomy import Anatomy, find_anatomy
from lightning_fedleak.model.batches import TokenBatch
from lightning_fedleak.model.snapshots import GradientSnapshot, Observation, Stage, UpdateSnapshot
from tests.attacks.row_space.models import backward, bert, gpt2, llama, ready, texts, with_lora

ROWS, LENGTH = 3, 8


def lora() -> nn.Module:
    return with_lora(ready(llama()), 4, ["q_proj", "v_proj"])


def untouched() -> nn.Module:
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"])
    return get_peft_model(ready(llama()), config)


def prompted() -> nn.Module:
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=8)
    return get_peft_model(ready(llama()), config)


def encoded() -> nn.Module:
    config = PromptEncoderConfig(
        task_type="CAUSAL_LM", num_virtual_tokens=8, encoder_hidden_size=16
    )
    return get_peft_model(ready(llama()), config)


def norms() -> nn.Module:
    model = ready(llama())
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" in name)
    return model


def prepared(model: nn.Module, facts: RunFacts | None = None) -> tuple[Anatomy, GradientMembership]:
    anatomy = find_anatomy(model)
    attack = GradientMembership(texts(24, LENGTH))
    if facts is not None:
        attack.meet(facts)
    attack.prepare(anatomy)
    attack.refresh(anatomy, 0)
    return anatomy, attack


def by_subspace(model: nn.Module, **more: Any) -> tuple[Anatomy, SubspaceMembership]:
    anatomy = find_anatomy(model)
    attack = SubspaceMembership(texts(16, LENGTH), **more)
    attack.prepare(anatomy)
    return anatomy, attack


def asked(model, inside, query, **more) -> Any:
    return asked_of(*prepared(model), inside, query, **more)


def asked_of(anatomy, attack, inside, query, **more) -> Any:
    backward(anatomy.model, inside, **more)
    labels = more.get("labels")
    labels = None if labels is None else torch.where(labels < 0, labels, inside).repeat(2, 1)
    if labels is not None:
        labels = torch.where(labels < 0, labels, query)
    return attack.run(seen(anatomy, attack), Query(query, None, None, labels))


def seen(anatomy: Anatomy, attack: GradientMembership) -> Observation:
    """Return what the attack reads of the gradients as they are."""
    tensors = {r: anatomy.parameter(r).grad for r in attack.needs(anatomy).gradients}
    return Observation((GradientSnapshot(0, Stage.SHARED, tensors),))


def variants(ids: Tensor) -> dict[str, Tensor]:
    replaced = ids.clone()
    replaced[:, 3] = texts(len(ids), 1)[:, 0]
    return {"other": texts(*ids.shape), "order": ids.flip(1).roll(-1, 1), "replaced": replaced}


@pytest.mark.parametrize("family", [llama, gpt2, lora])
def test_parts_add_up_to_the_gradient_that_backward_gives(family: Any) -> None:
    model = family() if family is lora else ready(family())
    anatomy = find_anatomy(model)
    maps = [m for m in find_linear_maps(anatomy) if anatomy.trainable(m.name)]
    ids = texts(ROWS, LENGTH)
    mask = torch.ones_like(ids)
    mask[0, -3:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[1, :4] = -100
    backward(model, ids, attention_mask=mask, labels=labels)
    (parts,) = token_parts.map_token_parts(
        anatomy, maps, TokenBatch(ids, labels, mask, "causal"), dict
    )
    assert parts.keys() == {m.name for m in maps}
    n = int((labels[:, 1:] != -100).sum())
    for linear in maps:
        x, slope = parts[linear.name]
        result = torch.einsum("blo,bld->od", slope, x) / n
        expected = anatomy.parameter(linear.name).grad
        expected = expected if linear.axis == 1 else expected.T
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("family", [llama, gpt2])
def test_padding_adds_nothing_to_the_moments_of_the_whitening(family: Any) -> None:
    anatomy, ids = find_anatomy(ready(family())), texts(2, LENGTH)
    maps = [m for m in find_linear_maps(anatomy) if anatomy.trainable(m.name)]
    mask = torch.ones_like(ids)
    mask[0, -3:] = 0
    padded = TokenBatch(ids, ids.masked_fill(mask == 0, -100), mask, "causal")
    rows = [TokenBatch(row[None], row[None], None, "causal") for row in (ids[0, :-3], ids[1])]
    together, separate = token_parts.Moments(), token_parts.Moments()
    token_parts.map_token_parts(anatomy, maps, padded, together.add)
    for row in rows:
        token_parts.map_token_parts(anatomy, maps, row, separate.add)
    for side in ("_inputs", "_slopes"):
        for name, (moment, size) in getattr(separate, side).items():
            padded_moment, padded_size = getattr(together, side)[name]
            torch.testing.assert_close(
                padded_moment * padded_size**2, moment * size**2, rtol=1e-4, atol=1e-6
            )


@given(seed=st.integers(0, 10_000), noise=st.floats(0.0, 3.0))
def test_the_least_coefficient_is_that_of_least_squares(seed: int, noise: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    parts = torch.randn(2, 5, 40, dtype=torch.float64, generator=generator)
    parts[1, -1] = 0  # a causal text's last token has none
    shared = parts[0].sum(0) + torch.randn(40, dtype=torch.float64, generator=generator)
    fit = token_parts.PartFit(parts @ shared, parts @ parts.mT)
    result = token_parts.min_coefficient(fit, torch.tensor(noise, dtype=torch.float64))
    for row, tokens in zip(result, parts, strict=True):
        whole = torch.linalg.lstsq(tokens.sum(0)[:, None], shared[:, None]).solution.item()
        rest = shared - whole * tokens.sum(0)
        short = [0.0]
        for both in (tokens[i] + tokens[i + 1] for i in range(4)):
            beyond = torch.linalg.lstsq(both[:, None], rest[:, None]).solution.item()
            short.append(beyond + 2 * noise / float(both.norm()))
        expected = whole + max(min(short), -0.5 * abs(whole))
        assert float(row) == pytest.approx(expected, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(
    ("family", "prepare"),
    [*product([llama, gpt2], [prepared, by_subspace]), (lora, prepared), (bert, by_subspace)],
)
def test_members_are_told_from_everything_else(family: Any, prepare: Any) -> None:
    model = family() if family is lora else ready(family())
    inside = texts(ROWS, LENGTH)
    guess = asked_of(*prepare(model), inside, torch.cat([inside, *variants(inside).values()]))
    assert float(guess.scores[:ROWS].min()) > float(guess.scores[ROWS:].max())
    assert guess.members[:ROWS].all()


@pytest.mark.parametrize("family", [prompted, encoded, norms])
def test_what_is_no_linear_map_is_compared_as_a_whole(family: Any) -> None:
    both, right = prepared(family()), 0
    for _ in range(4):
        inside = texts(ROWS, LENGTH)
        guess = asked_of(*both, inside, torch.cat([inside, texts(ROWS, LENGTH)]))
        right += int((guess.scores[:ROWS, None] > guess.scores[None, ROWS:]).sum())
    assert right / (4 * ROWS * ROWS) > 0.8


@pytest.mark.parametrize("family", [lora, norms])
def test_what_the_loss_is_scaled_by_changes_nothing(family: Any) -> None:
    model = family()
    anatomy, attack = prepared(model)
    inside = texts(ROWS, LENGTH)
    backward(model, inside)
    query = Query(torch.cat([inside, texts(ROWS, LENGTH)]))

    def guess(scale: float) -> Any:
        names = attack.needs(anatomy).gradients
        tensors = {name: scale * anatomy.parameter(name).grad for name in names}
        return attack.run(Observation((GradientSnapshot(0, Stage.SHARED, tensors),)), query)

    plain = guess(1.0)
    for scale in (1e-27, 1e-16, 1e16):
        scaled = guess(scale)
        torch.testing.assert_close(scaled.scores / scale, plain.scores, rtol=1e-3, atol=1e-5)
        assert torch.equal(scaled.members, plain.members)
    with pytest.raises(UnusableObservation, match="scale the loss up"):
        guess(1e-33)


def test_tokens_that_the_loss_looks_away_from_are_no_lack() -> None:
    model = lora()
    inside = texts(ROWS, LENGTH)
    labels = inside.clone()
    labels[:, :5] = -100
    query = torch.cat([inside, texts(ROWS, LENGTH)])
    guess = asked(model, inside, query, labels=labels)
    assert float(guess.scores[:ROWS].min()) > float(guess.scores[ROWS:].max())
    coefficients = guess.scores[:ROWS] * ROWS * (LENGTH - 5)
    assert float(coefficients.min()) > 0.6


@pytest.mark.parametrize(
    ("family", "optimizer", "more"),
    [
        *((family, "SGD", {"weight_decay": 5.0}) for family in (lora, prompted)),
        *((family, "AdamW", {"weight_decay": 0.01}) for family in (lora, untouched)),
        (lora, "Adagrad", {}),
    ],
)
def test_updates_are_read(family: Any, optimizer: str, more: dict[str, float]) -> None:
    model = family()
    rate = 1e-3
    anatomy, attack = prepared(
        model, RunFacts(optimizer=optimizer, optimizer_settings={"lr": rate, **more}, local_steps=1)
    )
    names = attack.needs(anatomy).gradients
    weights = {name: anatomy.parameter(name) for name in names}
    before = {name: p.detach().clone() for name, p in weights.items()}
    right = 0
    for _ in range(4):
        inside = texts(ROWS, LENGTH)
        backward(model, inside)
        getattr(torch.optim, optimizer)(list(weights.values()), lr=rate, **more).step()
        tensors = {name: (before[name] - p.detach()) / rate for name, p in weights.items()}
        update = UpdateSnapshot(0, Stage.SHARED, tensors, local_steps=1, learning_rate=rate)
        query = Query(torch.cat([inside, texts(ROWS, LENGTH)]))
        guess = attack.run(Observation((update,)), query)
        right += int((guess.scores[:ROWS, None] > guess.scores[None, ROWS:]).sum())
        with torch.no_grad():
            for name, p in weights.items():
                p.copy_(before[name])
    assert right / (4 * ROWS * ROWS) > 0.8


def test_a_round_is_asked_about_with_the_weights_that_it_began_with() -> None:
    """Whatever the step has made of them; and the model is left as it was."""
    model, rate = lora(), 1e-1
    settings = {"lr": rate}
    facts = RunFacts(optimizer="AdamW", optimizer_settings=settings, local_steps=1)
    anatomy, attack = prepared(model, facts)
    trained = {n: p for n, p in anatomy.root.named_parameters() if p.requires_grad}
    before = {n: p.detach().clone() for n, p in trained.items()}
    inside = texts(ROWS, LENGTH)
    query = Query(torch.cat([inside, texts(ROWS, LENGTH)]))
    backward(model, inside)
    torch.optim.AdamW(list(trained.values()), **settings).step()
    names = attack.needs(anatomy).gradients
    tensors = {n: (before[n] - trained[n].detach()) / rate for n in names}
    view = Observation((UpdateSnapshot(0, Stage.SHARED, tensors, learning_rate=rate),))
    after = {n: p.detach().clone() for n, p in trained.items()}
    asked_after = attack.run(view, query).scores
    assert all(torch.equal(p, after[n]) for n, p in trained.items())
    for name, parameter in trained.items():
        parameter.data.copy_(before[name])
    torch.testing.assert_close(asked_after, attack.run(view, query).scores)


def test_of_adalora_what_has_no_term_in_the_loss_is_read() -> None:
    config = AdaLoraConfig(init_r=4, target_r=2, total_step=10, target_modules=["q_proj"])
    anatomy, attack = prepared(get_peft_model(ready(llama()), config))
    names = attack.needs(anatomy).gradients
    assert names
    assert all("lora_E" in name for name in names)


@pytest.mark.parametrize(
    ("prepare", "build", "share"),
    [(prepared, lora, 1e-3), (by_subspace, lambda: ready(llama()), 0.5)],
)
def test_padding_on_the_left_uses_up_nothing_of_what_is_read(prepare, build, share) -> None:
    anatomy, attack = prepare(model := build())
    attack.tokens = 4
    inside = texts(ROWS, LENGTH)
    backward(model, inside)
    view = seen(anatomy, attack)
    ids = torch.cat([inside, texts(ROWS, LENGTH)])
    plain = attack.run(view, Query(ids)).scores
    padded = torch.cat([torch.zeros(len(ids), 6, dtype=torch.long), ids], 1)
    mask = (torch.arange(padded.shape[1]) >= 6).long().repeat(len(ids), 1)
    scores = attack.run(view, Query(padded, mask)).scores
    assert float(scores[:ROWS].min()) > float(scores[ROWS:].max())
    least = float((plain[:ROWS] - plain[ROWS:]).min())
    assert float((scores - plain).abs().max()) < share * least


def test_a_prompt_longer_than_what_is_read_uses_up_nothing() -> None:
    model = lora()
    anatomy, attack = prepared(model)
    attack.tokens = 3
    inside = texts(ROWS, LENGTH)
    labels = inside.clone()
    labels[:, :5] = -100
    backward(model, inside, labels=labels)
    view = seen(anatomy, attack)
    query = torch.cat([inside, texts(ROWS, LENGTH)])
    answers = query.masked_fill(labels.repeat(2, 1) < 0, -100)
    scores = attack.run(view, Query(query, None, None, answers)).scores
    assert float(scores[:ROWS].min()) > float(scores[ROWS:].max())


@pytest.mark.parametrize("family", [lora, norms])
def test_of_a_text_without_labels_nothing_is_said(family: Any) -> None:
    model = family()
    anatomy, attack = prepared(model)
    inside = texts(ROWS, LENGTH)
    backward(model, inside)
    view = seen(anatomy, attack)
    labels = inside.clone()
    labels[0] = -100
    guess = attack.run(view, Query(inside, None, None, labels))
    alone = attack.run(view, Query(inside[1:])).scores
    assert not guess.members[0]
    assert float(guess.scores[0]) < float(alone.min())
    torch.testing.assert_close(guess.scores[1:], alone, rtol=1e-4, atol=1e-6)


def test_wide_maps_are_whitened_number_by_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_fedleak.attacks.membership.token_parts.MAX_FULL_WIDTH", 5)
    inside = texts(ROWS, LENGTH)
    guess = asked(ready(llama()), inside, torch.cat([inside, *variants(inside).values()]))
    assert float(guess.scores[:ROWS].min()) > float(guess.scores[ROWS:].max())


def test_blocks_are_spread_where_there_is_no_memory_for_all(monkeypatch) -> None:
    model = lora()
    anatomy = find_anatomy(model)
    attack = GradientMembership(texts(4, LENGTH))
    every = attack.needs(anatomy).gradients
    module = "lightning_fedleak.attacks.membership.gradients.MAX_NUMBERS"
    monkeypatch.setattr(module, 1)
    some = attack.needs(anatomy).gradients
    assert 0 < len(some) < len(every)
    assert set(some) < set(every)


def test_what_the_model_wrote_is_kept_and_not_written_again(monkeypatch) -> None:
    model = lora()
    anatomy = find_anatomy(model)
    first, second = GradientMembership("sampled"), GradientMembership("sampled")
    first.prepare(anatomy)
    second.load_state_dict(first.state_dict())

    def written(*_: Any, **__: Any) -> None:
        raise AssertionError("the text is kept")

    monkeypatch.setattr("lightning_fedleak.attacks.public_text._sample", written)
    second.prepare(anatomy)
    inside = texts(ROWS, LENGTH)
    backward(model, inside)
    view = seen(anatomy, first)
    scores = [attack.run(view, Query(inside)).scores for attack in (first, second)]
    torch.testing.assert_close(*scores)
    given = GradientMembership(texts(24, LENGTH))
    given.prepare(anatomy)
    assert given.state_dict() == {}


def test_masked_models_are_refused() -> None:
    with pytest.raises(ValueError, match="knows no masked labels: remove it"):
        GradientMembership(texts(4, LENGTH)).needs(find_anatomy(bert()))


@pytest.mark.parametrize("make", [lora, norms], ids=["maps", "other parameters"])
def test_a_look_is_estimated_before_anything_is_calibrated(make, monkeypatch) -> None:
    ran: list[object] = []

    def timed(work: Callable[[], object], device: torch.device) -> float:
        ran.append(work())
        return 3.0

    monkeypatch.setattr(gradients, "measure_seconds", timed)
    attack = GradientMembership(texts(40, LENGTH), controls=6)
    assert attack.estimate(find_anatomy(make()), 16) == 3.0 / 2 * (16 + 6)
    assert len(ran) == 1
    assert not attack.state_dict()


# Membership by what is shared anyway: members, other texts, other orders, one word replaced.


def test_lora_tells_members_by_their_words() -> None:
    model = with_lora(ready(llama()), 6, ["q_proj", "v_proj"])
    inside = texts(ROWS, LENGTH)
    other = variants(inside)
    query = torch.cat([inside, other["other"], other["replaced"]])
    guess = asked_of(*by_subspace(model), inside, query)
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
    scores = asked_of(*by_subspace(model), inside, torch.cat([inside, outside])).scores
    assert float(scores[:ROWS].min()) > float(scores[ROWS:].max()) + 1


def test_words_that_are_not_shared_leave_the_states_of_later_blocks() -> None:
    """A LoRA on the second block alone: the first block's inputs are in no row."""
    model = with_lora(ready(llama()), 6, ["q_proj", "v_proj"], layers_to_transform=[1])
    both, right = by_subspace(model), 0
    for _ in range(6):
        inside = texts(2, LENGTH)
        scores = asked_of(*both, inside, torch.cat([inside, texts(2, LENGTH)])).scores
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
    anatomy, attack = by_subspace(model)
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
