"""The gradient of a control against the gradient of the step it repeats, and its words."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import PromptTuningConfig, get_peft_model
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    LlamaConfig,
    LlamaForSequenceClassification,
)

from lightning_fedleak.model import taps
from lightning_fedleak.model.anatomy import find_anatomy
from lightning_fedleak.model.batches import TokenBatch
from lightning_fedleak.model.snapshots import Stage, UnusableObservation
from lightning_fedleak.model.taps.control import is_uneven
from lightning_fedleak.model.taps.graph import GraphTap, read_call
from lightning_fedleak.model.taps.rounds import plain_call
from tests.taps.test_graph import (
    ANSWER_LABELS,
    CAUSAL,
    HARD,
    HIDDEN,
    HIDDEN_LABELS,
    IDS,
    MASK,
    PADDED,
    SMALL,
    HeadOnPrefixes,
    bert,
    calls_of,
    llama,
    t5,
)

# Losses whose gradient by the logits is a p - b e_y - c 1 in each row.
SHAPED = [name for name in HARD if name != "entropy"]


def check_gradient(model: nn.Module, reads: list[taps.ModelCall], tolerance: float = 1e-4) -> None:
    anatomy = find_anatomy(model)
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    before = {name: p.grad.clone() for name, p in trained.items() if p.grad is not None}
    view = taps.control_gradient(anatomy, taps.Step(calls=reads), list(before))
    assert view.tensors.keys() == before.keys()
    largest = max(float(gradient.float().norm()) for gradient in before.values())
    for name, gradient in before.items():
        assert torch.equal(trained[name].grad, gradient), name
        error = float((view.tensors[name] - gradient).float().norm())
        assert error < tolerance * largest, (name, error, largest)


@pytest.mark.parametrize("loss", SHAPED)
@pytest.mark.parametrize("family", [name for name in CAUSAL if "bf16" not in name])
def test_the_gradient_of_the_same_words_is_that_of_the_step(family: str, loss: str) -> None:
    model = CAUSAL[family]().train()
    with torch.no_grad():  # LoRA's B, so that A has a gradient
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter += 0.1
    reads = calls_of(model, HARD[loss][0])
    # A focal loss has another multiple in each row, which the size at the label holds.
    check_gradient(model, reads)


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "AdamW": lambda p: torch.optim.AdamW(p, 1e-2, weight_decay=0.1),
    "Adafactor": lambda p: torch.optim.Adafactor(p, 1e-2),
}


def groups_of(model: nn.Module) -> list[dict[str, object]]:
    """Return two groups of the trained parameters, of which one has no decay."""
    trained = [p for p in model.parameters() if p.requires_grad]
    vectors = [p for p in trained if p.dim() < 2]
    return [{"params": [p for p in trained if p.dim() > 1]}, {"params": vectors, "weight_decay": 0}]


@pytest.mark.parametrize("cut", [None, 1e-3])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_update_of_the_same_words_is_that_of_the_round(kind: str, cut: float | None) -> None:
    """Of three steps of which one has two micro-batches, whose rates fall."""
    model = CAUSAL["llama"]().train()
    optimizer = OPTIMIZERS[kind](groups_of(model))
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    before = {name: p.detach().clone() for name, p in trained.items()}
    local, reads = taps.LocalRound({id(p): p.detach().clone() for p in trained.values()}), []
    tap = GraphTap(find_anatomy(model))
    for step, losses in enumerate((["plain"], ["answers", "token weights"], ["class weights"])):
        optimizer.param_groups[0]["lr"] *= 0.5**step
        optimizer.param_groups[1]["lr"] = optimizer.param_groups[0]["lr"]
        tap.arm()
        for loss in losses:
            HARD[loss][0](model).backward()
            reads += [read_call(call, "causal") for call in tap.take()]
        local.add_step(optimizer, len(reads))
        if cut is not None:
            nn.utils.clip_grad_value_(model.parameters(), cut)
        optimizer.step()
        optimizer.zero_grad()
    tap.close()
    rate = sum(rates[0] for rates in local.rates) / 3
    after = {name: p.detach().clone() for name, p in trained.items()}
    state = copy.deepcopy(optimizer.state_dict()["state"])
    view = taps.control_update(
        find_anatomy(model), taps.Step(calls=reads, round=local), list(before), clip_value=cut
    )
    assert (view.local_steps, view.learning_rate) == (3, pytest.approx(rate))
    for name, weight in before.items():
        change = (weight - after[name]) / rate
        # Adam divides entries that are 0 but for rounding by their own size.
        close = (view.tensors[name] - change).abs() <= 1e-3 * change.abs().max()
        assert close.float().mean() > 0.999, name
        assert torch.equal(trained[name], after[name]), name
        assert trained[name].grad is None
    torch.testing.assert_close(optimizer.state_dict()["state"], state, rtol=0, atol=0)


def test_a_mean_over_clients_begins_each_with_the_same_weights() -> None:
    model = CAUSAL["llama"]().train()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    reads = [calls_of(model, HARD[loss][0])[0] for loss in ("plain", "answers")]
    model.zero_grad()
    local = replace(taps.LocalRound.begin([*model.parameters()]), clients=2)
    for n_calls in (1, 2):
        local.add_step(optimizer, n_calls)
    anatomy, roles = find_anatomy(model), [n for n, p in model.named_parameters()]
    mean = taps.control_update(anatomy, taps.Step(calls=reads, round=local), roles)
    assert mean.local_steps == 1
    views = [taps.control_gradient(anatomy, taps.Step(calls=[read]), roles) for read in reads]
    for role, change in mean.tensors.items():
        both = (views[0].tensors[role] + views[1].tensors[role]) / 2
        assert torch.allclose(change, both, atol=1e-4), role


@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize("family", ["llama", "llama, LoRA", "gpt2, LoRA, checkpointing"])
def test_the_gradients_of_hidden_states_are_those_of_the_step(family: str, layer: int) -> None:
    model = CAUSAL[family]().train()
    model.zero_grad()
    anatomy = find_anatomy(model)
    tap, graph = taps.ActivationTap(anatomy, [layer], states=False, reach=True), GraphTap(anatomy)
    tap.arm()
    graph.arm()
    HARD["micro-batches"][0](model).backward()
    reads = [read_call(call, anatomy.kind) for call in graph.take()]
    expected = [gradient.clone() for gradient in tap.gradients(layer)]
    graph.close()
    tap.close()
    before = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    found = taps.control_states(anatomy, taps.Step(calls=reads), layer)
    assert len(found) == len(expected) == 2
    for mine, gradient in zip(found, expected, strict=True):
        assert (mine - gradient).norm() < 1e-4 * gradient.norm()
    after = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


class OfOneArgument(torch.optim.SGD):
    """Is no class of torch.optim."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), 0.1)


def test_a_round_that_cannot_be_made_again_is_unusable() -> None:
    model = CAUSAL["llama"]().train()
    reads, anatomy = calls_of(model, HARD["plain"][0]), find_anatomy(model)

    def update(*optimizers: torch.optim.Optimizer, rate: float | None = None) -> None:
        local = taps.LocalRound.begin([*model.parameters()])
        for n_calls, optimizer in enumerate(optimizers, 1):
            local.add_step(optimizer, n_calls, rate)
        taps.control_update(anatomy, taps.Step(calls=reads, round=local), ["head.weight"])

    trained = [p for p in model.parameters() if p.requires_grad]
    first, second = (torch.optim.SGD(trained, 0.1) for _ in range(2))
    with pytest.raises(UnusableObservation, match="no step of the round"):
        update()
    with pytest.raises(UnusableObservation, match="several optimizers"):
        update(first, second)
    with pytest.raises(UnusableObservation, match="several learning rates, or only 0"):
        update(first, rate=0.0)
    with pytest.raises(UnusableObservation, match="OfOneArgument, no class"):
        update(OfOneArgument(model))


def test_in_half_precision() -> None:
    model = CAUSAL["llama, bf16, tied"]().train()
    check_gradient(model, calls_of(model, HARD["plain"][0]), tolerance=0.02)


def test_under_autocast() -> None:
    model = llama().train()

    def loss(model: nn.Module) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(input_ids=IDS, labels=IDS).loss

    check_gradient(model, calls_of(model, loss), tolerance=0.02)


def test_of_masked_tokens() -> None:
    model = bert().eval()  # without dropout, whose draws differ
    loss = lambda m: m(input_ids=HIDDEN, labels=HIDDEN_LABELS).loss  # noqa: E731
    check_gradient(model, calls_of(model, loss))


@pytest.mark.parametrize("given", ["labels", "decoder_input_ids"])
def test_of_an_encoder_and_decoder(given: str) -> None:
    model, labels = t5(dropout_rate=0.0).train(), IDS[:, :7].flip(0)

    def loss(model: nn.Module) -> Tensor:
        if given == "labels":
            return model(input_ids=PADDED, attention_mask=MASK, labels=labels).loss
        shifted = functional.pad(labels[:, :-1], (1, 0))
        logits = model(PADDED, attention_mask=MASK, decoder_input_ids=shifted).logits
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    check_gradient(model, calls_of(model, loss))


@pytest.mark.parametrize("classes", [1, 2, 3])
def test_of_a_classifier(classes: int) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(**SMALL, num_labels=classes, pad_token_id=0)
    model = LlamaForSequenceClassification(config).train()
    targets = torch.tensor([0, 1, 1, 0]) % classes

    def loss(model: nn.Module) -> Tensor:
        labels = targets if classes > 1 else targets + 0.5
        return model(input_ids=PADDED, attention_mask=MASK, labels=labels).loss

    check_gradient(model, calls_of(model, loss))


def test_behind_virtual_tokens() -> None:
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model = get_peft_model(llama(), config).train()
    labels = PADDED.masked_fill(MASK == 0, -100)
    loss = lambda m: m(input_ids=PADDED, attention_mask=MASK, labels=labels).loss  # noqa: E731
    reads = calls_of(model, loss)
    # The last virtual token predicts a text's first.
    truth = sorted(labels[labels >= 0].tolist())
    assert sorted(reads[0].batch.target_ids().tolist()) == truth
    check_gradient(model, reads)


def test_of_a_head_that_is_called_in_chunks() -> None:
    model = HeadOnPrefixes(3)
    check_gradient(model, calls_of(model, lambda m: m(IDS)))


def test_a_plain_call_is_that_of_the_model_s_own_loss() -> None:
    model = llama().train()
    model(input_ids=IDS, labels=ANSWER_LABELS).loss.backward()
    batch = TokenBatch(IDS, ANSWER_LABELS, None, "causal")
    # Its sizes are those before a label is predicted at all: p is some 1 / 128 here.
    check_gradient(model, [plain_call(find_anatomy(model), batch, None)], tolerance=0.02)


def test_hooks_on_parameters_and_the_users_own_do_not_run() -> None:
    model = llama().train()
    reads = calls_of(model, HARD["plain"][0])
    calls: list[str] = []
    model.lm_head.weight.register_post_accumulate_grad_hook(lambda p: calls.append("accumulated"))
    model.lm_head.register_forward_hook(lambda *_: calls.append("forward"))
    state, weight = torch.get_rng_state(), model.lm_head.weight
    taps.control_gradient(find_anatomy(model), taps.Step(calls=reads), ["head.weight"])
    assert calls == []
    assert torch.equal(state, torch.get_rng_state())
    assert model.lm_head.weight is weight
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("loss", ["plain", "padded", "micro-batches"])
@pytest.mark.parametrize("family", [name for name in CAUSAL if "bf16" not in name])
def test_what_crosses_the_split_is_that_of_the_step(family: str, loss: str, layer: int) -> None:
    model = CAUSAL[family]().train()
    anatomy = find_anatomy(model)
    tap = taps.ActivationTap(anatomy, [layer], gradients=False)
    tap.arm()
    reads = calls_of(model, HARD[loss][0])
    states = [each.clone() for each in tap.states(layer)]
    tap.close()
    calls: list[str] = []
    model.register_forward_hook(lambda *_: calls.append("the user's own"))
    crossed = taps.control_crossing(anatomy, taps.Step(calls=reads), layer)
    assert len(crossed) == len(states)
    for sent, read, expected in zip(crossed, reads, states, strict=True):
        assert torch.allclose(sent.states(Stage.SHARED, layer), expected, atol=1e-6)
        assert torch.equal(sent.batch.input_ids, read.batch.input_ids)
    assert calls == []


# ---- words -------------------------------------------------------------------------------------


def causal_call(labels: Tensor, sizes: Tensor, **fields: Tensor) -> taps.ModelCall:
    """Return a call on IDS whose rows have these sizes at their labels, (B, L - 1)."""
    batch = TokenBatch(IDS, labels, fields.get("mask"), "causal", fields.get("positions"))
    read = plain_call(find_anatomy(llama()), batch, None)
    padded = functional.pad(sizes, (0, 1)).flatten() * (read.placed.rows.labels != -100)
    rows = read.placed.rows._replace(sizes=padded, other_sums=padded)
    return replace(read, placed=replace(read.placed, rows=rows))


@given(st.integers(0, 10**6), st.booleans())
def test_tokens_move_and_stay_in_number(seed: int, with_words: bool) -> None:
    special = frozenset(IDS[0, :2].tolist())
    sizes = torch.rand(IDS.shape[0], IDS.shape[1] - 1) + 0.5
    read = causal_call(IDS, sizes, mask=MASK)
    generator = torch.Generator().manual_seed(seed)
    draw = taps.shuffle_words(taps.Step(calls=[read]), special, generator, with_words=with_words)
    [batch], (new_sizes, *_) = draw.batches, draw.calls[0].shapes
    stays = (MASK == 0) | torch.isin(IDS, torch.tensor(sorted(special)))
    assert torch.equal(batch.input_ids[stays], IDS[stays])
    assert sorted(batch.input_ids.flatten().tolist()) == sorted(IDS.flatten().tolist())
    assert not torch.equal(batch.input_ids, IDS)
    assert torch.equal(batch.labels[:, 1:], batch.input_ids[:, 1:])
    grid = new_sizes.view(IDS.shape)[:, :-1]
    if not with_words:
        assert torch.equal(grid, sizes)
    else:  # each word that had a size has it where it is now, but for the words of first columns
        pairs = set(zip(IDS[:, 1:].flatten().tolist(), sizes.flatten().tolist(), strict=True))
        firsts = set(IDS[:, 0].tolist())
        now = zip(batch.input_ids[:, 1:].flatten().tolist(), grid.flatten().tolist(), strict=True)
        assert all(pair in pairs for pair in now if pair[0] not in firsts)


def test_texts_in_a_row_are_shuffled_within_themselves() -> None:
    positions = torch.cat([torch.arange(5), torch.arange(7)]).expand(IDS.shape)
    read = causal_call(IDS, torch.ones(IDS.shape[0], IDS.shape[1] - 1), positions=positions)
    draw = taps.shuffle_words(
        taps.Step(calls=[read]), frozenset(), torch.Generator().manual_seed(0)
    )
    [batch] = draw.batches
    assert not torch.equal(batch.input_ids, IDS)
    for part in (slice(0, 5), slice(5, 12)):
        for row in range(len(IDS)):
            new, old = batch.input_ids[row, part], IDS[row, part]
            assert sorted(new.tolist()) == sorted(old.tolist())


def test_a_part_has_the_first_labels_alone() -> None:
    read = causal_call(IDS, torch.ones(IDS.shape[0], IDS.shape[1] - 1))
    draw = taps.shuffle_words(
        taps.Step(calls=[read]), frozenset(), torch.Generator().manual_seed(0)
    )
    part = draw.part(14)
    [batch] = part.batches
    assert int((part.calls[0].shapes[0] != 0).sum()) == 14
    assert sorted(batch.target_ids().tolist()) == sorted(draw.batches[0].target_ids()[:14].tolist())
    kept = batch.context_mask()
    assert kept[0].tolist() == [True] * 11 + [False]
    assert kept[1].tolist() == [True] * 3 + [False] * 9
    assert len(kept) == 2


FAMILIES = [(name, HARD["answers"][0]) for name in CAUSAL if "bf16" not in name]


@pytest.mark.parametrize(("family", "loss"), [*FAMILIES, ("llama", HARD["logits_to_keep"][0])])
def test_a_part_runs_only_the_texts_of_its_labels(family: str, loss, monkeypatch) -> None:
    model = CAUSAL[family]().train()
    generator = torch.Generator().manual_seed(0)
    draw = taps.shuffle_words(taps.Step(calls=calls_of(model, loss)), frozenset(), generator)
    part = draw.part(5)
    monkeypatch.setattr(taps.ModelCall, "without_dead_texts", lambda call: call)
    whole = draw.part(5)
    n_texts = [len(step.batches[0].input_ids) for step in (part, whole)]
    assert n_texts[0] < n_texts[1] == len(IDS)
    targets = [sorted(step.batches[0].target_ids().tolist()) for step in (part, whole)]
    assert targets[0] == targets[1]
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    cut, full = (
        taps.control_gradient(find_anatomy(model), x, names).tensors for x in (part, whole)
    )
    assert cut.keys() == full.keys()
    largest = max(float(gradient.norm()) for gradient in full.values())
    assert largest > 0
    for name, gradient in full.items():
        assert float((cut[name] - gradient).norm()) < 1e-5 * largest, name


def test_a_part_stays_whole_where_an_argument_is_not_that_of_each_token() -> None:
    call = causal_call(IDS, torch.ones(IDS.shape[0], IDS.shape[1] - 1))
    axes = torch.zeros(len(IDS), 3, IDS.shape[1])  # of as many axes as there are texts
    for argument, n_texts in (torch.zeros(IDS.shape), 2), (IDS[:1], 2), (axes, len(IDS)):
        arguments = {"input_ids": call.ids, "position_ids": argument, "use_cache": False}
        step = taps.Step(calls=[replace(call, arguments=arguments)])
        draw = taps.shuffle_words(step, frozenset(), torch.Generator().manual_seed(0))
        [part] = draw.part(14).calls
        assert len(part.texts.input_ids) == len(part.arguments["input_ids"]) == n_texts
        assert len(part.arguments["position_ids"]) == (n_texts if len(argument) > 1 else 1)
        assert part.arguments["input_ids"] is part.ids


def test_sizes_of_classes_are_uneven_and_those_of_a_first_step_are_not() -> None:
    assert not is_uneven(calls_of(llama().train(), HARD["plain"][0]))
    assert is_uneven(calls_of(llama().train(), HARD["class weights"][0]))
