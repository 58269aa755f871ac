"""The gradient of a control against the gradient of the step it repeats, and its words."""

import copy
import io
import pickle
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import PromptTuningConfig, get_peft_model
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForSequenceClassification

from lightning_fedleak import DPSGD, ActivationNoise, BagOfWords, DefendedStrategy
from lightning_fedleak.model import taps
from lightning_fedleak.model.anatomy import backbone_of, find_anatomy
from lightning_fedleak.model.batches import TokenBatch
from lightning_fedleak.model.model_state import HOOKS, Hook
from lightning_fedleak.model.snapshots import Stage, UnusableObservation
from lightning_fedleak.model.taps.control import is_uneven
from lightning_fedleak.model.taps.graph import GraphTap, read_call
from lightning_fedleak.model.taps.last_states import (
    _HeadMap,
    capped,
    fit_temperature,
    logit_cap,
    read_states,
)
from lightning_fedleak.model.taps.rounds import plain_call
from lightning_fedleak.model.taps.step import ModelCall
from lightning_fedleak.model.taps.tokens import Text, compressed_bytes, token_log_probs
from lightning_fedleak.trainers import Watch
from tests.callbacks.runs import Probe, fit, monitor_with
from tests.helpers.lightning_modules import CausalLMModule
from tests.helpers.models import tiny_gpt2
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
    TEXTS,
    HeadOnPrefixes,
    bert,
    calls_of,
    ids_of,
    llama,
    soft_loss,
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


@pytest.mark.parametrize(
    ("family", "loss"),
    [
        *(("llama", loss) for loss in SHAPED),
        *((name, "micro-batches") for name in CAUSAL if "bf16" not in name and name != "llama"),
    ],
)
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
@pytest.mark.parametrize("loss", ["padded", "micro-batches"])
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


# Labels of losses that never call the output head, against truths written by hand.


class Fused:
    """A model's forward that multiplies by the head's matrix, as fused losses do in chunks."""

    def __init__(self, model: nn.Module, temperature: float = 1.0) -> None:
        self.anatomy, self.temperature = find_anatomy(model), temperature

    def __call__(
        self, input_ids: Tensor, labels: Tensor | None = None, logits_to_keep: int = 0, **call: Any
    ) -> SimpleNamespace:
        backbone, head = backbone_of(self.anatomy), self.anatomy.head
        assert backbone is not None
        states = backbone(input_ids=input_ids, **call).last_hidden_state
        cap = logit_cap(self.anatomy)
        logits = capped(functional.linear(states[:, -logits_to_keep:], head.weight), cap)
        logits, loss = logits / self.temperature, None
        if labels is not None:
            loss = functional.cross_entropy(
                logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten()
            )
        return SimpleNamespace(logits=logits, loss=loss)


def read_fused(model, loss, temperature=1.0) -> list[ModelCall]:
    """Return the calls of a step with a fused loss, whose gradients stay in the parameters."""
    fused = Fused(model.train(), temperature)
    return calls_of(model, lambda _: loss(fused), temperature)


@pytest.mark.parametrize("family", CAUSAL)
def test_a_fused_loss_shows_the_same_labels(family: str) -> None:
    model = CAUSAL[family]()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter += 0.1
    for name, (loss, labels) in HARD.items():
        reads = read_fused(model, loss)
        batches = [read.batch for read in reads]
        truth = labels[:, 1:][labels[:, 1:] != -100]
        assert ids_of(batches) == sorted(truth.tolist()), name
        assert not any(b.preferences or b.soft_labels for b in batches), name
        if name != "entropy" and "bf16" not in family:
            check_gradient(model, reads, 1e-3)


@pytest.mark.parametrize("family", CAUSAL)
def test_rejected_texts_of_one_fused_call_have_the_other_sign(family: str) -> None:
    def loss(model: Any) -> Tensor:
        logits = model(input_ids=IDS).logits[:, :-1].float().log_softmax(-1)
        each = logits.gather(2, IDS[:, 1:, None])[..., 0].sum(1)
        return -functional.logsigmoid(0.1 * (each[:2] - each[2:])).mean()

    [read] = read_fused(CAUSAL[family](), loss)
    assert read.batch.preferences
    signs = read.placed.rows.sizes.view(TEXTS, -1).sign()
    assert bool((signs[:2, :-1] == 1).all())
    assert bool((signs[2:, :-1] == -1).all())
    assert ids_of([read.batch]) == sorted(IDS[:, 1:].flatten().tolist())


def test_soft_targets_of_a_fused_loss_are_unknown() -> None:
    [read] = read_fused(llama(), soft_loss)
    assert read.batch.soft_labels


def trained_gpt2() -> nn.Module:
    """Return a model whose predictions are far from uniform, so that a temperature matters."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=200, n_embd=32, n_layer=1, n_head=2))
    with torch.no_grad():
        model.transformer.ln_f.weight.mul_(30)
    return model


@pytest.mark.parametrize("temperature", [0.7, 1.5])
def test_a_temperature_is_given_or_fitted(temperature: float) -> None:
    ids = torch.randint(0, 200, (4, 16), generator=torch.Generator().manual_seed(2))
    model, found = trained_gpt2().eval(), []
    for expected in (temperature, 1.0):
        anatomy = find_anatomy(model)
        tap = GraphTap(anatomy, expected)
        model.zero_grad()
        tap.arm()
        Fused(model, temperature)(input_ids=ids, labels=ids).loss.backward()
        [call] = tap.take()
        tap.close()
        read = read_call(call, "causal")
        found.append(call.heads[0].temperature)
        assert ids_of([read.batch]) == sorted(ids[:, 1:].flatten().tolist())
    assert found == [temperature, pytest.approx(temperature, rel=2e-3)]


# ---- rows, drawn -------------------------------------------------------------------------------


@st.composite
def rows(draw: st.DrawFn) -> tuple[Tensor, Tensor, _HeadMap, Tensor, Tensor]:
    """Draw hidden states, their gradient, a head, labels and weights, in float64."""
    n, d, v = draw(st.integers(1, 8)), draw(st.integers(24, 40)), draw(st.integers(50, 90))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    states = torch.randn(n, d, generator=generator).double().requires_grad_()
    weight = torch.randn(v, d, generator=generator) * draw(st.sampled_from([0.05, 0.2]))
    bias = torch.randn(v, generator=generator) if draw(st.booleans()) else None
    cap = draw(st.sampled_from([None, 2.0]))
    head = _HeadMap(weight, bias, cap, draw(st.sampled_from([1.0, 0.7])))
    labels = torch.randint(0, v, (n,), generator=generator)
    weights = torch.rand(n, generator=generator) + 0.05
    weights *= torch.where(torch.rand(n, generator=generator) < 0.4, -1, 1)
    logits = functional.linear(states, weight.double(), None if bias is None else bias.double())
    logits = capped(logits, head.cap) / head.temperature
    smoothing = draw(st.sampled_from([0.0, 0.1]))
    each = functional.cross_entropy(logits, labels, reduction="none", label_smoothing=smoothing)
    (gradient,) = torch.autograd.grad((each * weights).sum(), states)
    return states.detach().float(), gradient.float(), head, labels, weights


@given(rows(), st.booleans())
@settings(max_examples=50)
def test_rows_of_any_loss(case, are_given) -> None:
    states, gradient, head, labels, weights = case
    read = read_states(states, gradient, head, [labels] if are_given else [])
    assert torch.equal(read.labels, labels)
    assert torch.equal(read.is_rejected, weights < 0)
    assert not bool(read.is_soft.any())
    # The gradient is made again from what was read, by autograd.
    leaf = states.clone().requires_grad_()
    logits = capped(functional.linear(leaf, head.weight, head.bias), head.cap)
    q = (logits.detach() / head.temperature).scatter(1, labels[:, None], -torch.inf).softmax(1)
    entries = q * read.other_sums[:, None] - read.shifts[:, None]
    logits.backward(entries.scatter(1, labels[:, None], -read.sizes[:, None]))
    torch.testing.assert_close(
        leaf.grad, gradient, rtol=2e-3, atol=2e-3 * float(gradient.abs().max())
    )


@pytest.mark.parametrize("cap", [None, 2.0])
def test_a_label_whose_row_of_the_head_is_zero(cap: float | None) -> None:
    """The token that pads has such a row where the head is tied, and a trainer may write it."""
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(4, 24, generator=generator).requires_grad_()
    weight = (0.2 * torch.randn(50, 24, generator=generator)).index_fill(0, torch.tensor(0), 0.0)
    labels, weights = torch.tensor([0, 3, 0, 7]), torch.tensor([0.5, 0.5, -0.5, 0.5])
    logits = capped(functional.linear(states, weight), cap)
    each = functional.cross_entropy(logits, labels, reduction="none")
    (gradient,) = torch.autograd.grad((each * weights).sum(), states)
    read = read_states(states.detach(), gradient, _HeadMap(weight, None, cap), [labels])
    assert torch.equal(read.labels, labels)
    assert torch.equal(read.is_rejected, weights < 0)
    expected = weights * (1 - (-each.detach()).exp())
    torch.testing.assert_close(read.sizes, expected, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(read.other_sums, expected, rtol=1e-3, atol=1e-5)
    read = read_states(states.detach(), gradient, _HeadMap(weight, None, cap), [labels * 0])
    assert torch.equal(read.labels, labels)
    assert read_states(states.detach(), gradient, _HeadMap(weight, None, cap)).is_soft.sum() == 2


@given(rows(), st.integers(0, 2**20))
@settings(max_examples=50)
def test_a_false_label_is_not_believed(case, seed) -> None:
    states, gradient, head, labels, _ = case
    generator = torch.Generator().manual_seed(seed)
    false = torch.randint(0, len(head.weight), labels.shape, generator=generator)
    assert torch.equal(read_states(states, gradient, head, [false]).labels, labels)


def test_no_temperature_is_taken_that_explains_no_labels() -> None:
    generator = torch.Generator().manual_seed(0)
    states, gradient = torch.randn(2, 8, 32, generator=generator)
    head = _HeadMap(torch.randn(100, 32, generator=generator))
    assert fit_temperature(states, gradient, head) is head
    assert bool(read_states(states, gradient, head).is_soft.all())


# A copy of the model that is made within a step holds nothing of the step, and records nothing.


def loaded(model: nn.Module) -> Any:
    """Return the model that a file of it gives."""
    file = io.BytesIO()
    torch.save(model, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


def averaged(model: nn.Module) -> Any:
    return torch.optim.swa_utils.AveragedModel(model).module


COPIES: list[Callable[[nn.Module], Any]] = [copy.deepcopy, loaded, averaged]


def hooks_of(model: nn.Module) -> list[Any]:
    return [h for m in model.modules() for name in HOOKS for h in getattr(m, name).values()]


def train_copy(model, copied, ids, other_ids) -> None:
    """Train a copy of the model in the middle of a step on other texts."""
    assert any(isinstance(hook, Hook) for hook in hooks_of(model))
    stored = pickle.dumps(model)
    assert ids[0].numpy().tobytes() not in stored
    assert b"lightning_fedleak" not in stored
    other = copied(model)
    assert not any(isinstance(hook, Hook) for hook in hooks_of(other))
    other(input_ids=other_ids, labels=other_ids).loss.backward()


def measured(folder: Path, copied: Callable[[nn.Module], Any] | None) -> dict[str, float]:
    """Return what two looks measure, with copies that train in the middle of their steps."""
    torch.manual_seed(7)
    model = tiny_gpt2(tied=False, dropout=0.0).train()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    generator = torch.Generator().manual_seed(2)
    with Watch(model, optimizer, BagOfWords(), folder=folder, every_n_steps=1) as watch:
        for _ in range(2):
            ids, other_ids = torch.randint(3, 60, (2, 4, 9), generator=generator)
            with watch.step({"input_ids": ids, "labels": ids}):
                loss = model(input_ids=ids, labels=ids).loss
                if copied is not None:
                    train_copy(model, copied, ids, other_ids)
                loss.backward()
                if copied is not None:
                    train_copy(model, copied, ids, other_ids)
                optimizer.step()
                optimizer.zero_grad()
    return {n: v for n, v in watch.latest.items() if "seconds" not in n}


@pytest.mark.parametrize("copied", COPIES)
def test_a_copy_within_a_step_holds_no_ids_and_records_nothing(tmp_path, copied) -> None:
    assert measured(tmp_path / "a", copied) == measured(tmp_path / "b", None)


def test_a_copy_of_a_defended_model_holds_no_defence(tmp_path: Path) -> None:
    found = []

    class Copies(L.Callback):
        def on_after_backward(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            model = pl_module.model
            found.append((len(hooks_of(model)), pickle.dumps(model), copy.deepcopy(model)))

    defenses = [DPSGD(1.0, noise_multiplier=1.0, target_delta=1e-3), ActivationNoise(1, sigma=1.0)]
    strategy = DefendedStrategy("auto", defenses=defenses)
    fit([monitor_with([Probe()]), Copies()], tmp_path, strategy=strategy, max_steps=1)
    assert len(found) == 1
    n_hooks, stored, model = found[0]
    assert n_hooks > 10
    assert b"lightning_fedleak" not in stored
    assert not any(isinstance(hook, Hook) for hook in hooks_of(model))


class SavesWithinSteps(L.Callback):
    """Averages the module within each step, and saves the average, the module and a checkpoint."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.average: Any = None

    def on_before_optimizer_step(self, trainer, pl_module, optimizer) -> None:
        if self.average is None:
            mean = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
            self.average = torch.optim.swa_utils.AveragedModel(pl_module, multi_avg_fn=mean)
        assert any(isinstance(hook, Hook) for hook in hooks_of(pl_module))
        self.average.update_parameters(pl_module)
        for name, module in {"average": self.average.module, "module": pl_module}.items():
            torch.save(module, self.folder / f"{trainer.global_step}-{name}.pt")
        trainer.save_checkpoint(self.folder / f"{trainer.global_step}-within.ckpt")


@pytest.mark.parametrize("averages", ["StochasticWeightAveraging", "EMAWeightAveraging"])
def test_files_that_lightning_saves_in_looks_hold_no_ids_and_no_hooks(tmp_path, averages) -> None:
    if not hasattr(L.callbacks, averages):
        pytest.skip(f"this Lightning has no {averages}")
    settings = {"swa_lrs": 1e-3, "swa_epoch_start": 1} if averages.startswith("S") else {}
    texts = torch.randint(0, 60, (8, 16), generator=torch.Generator().manual_seed(3))
    loader = DataLoader([{"input_ids": text, "labels": text} for text in texts], batch_size=2)
    saved = tmp_path / "saved"
    saved.mkdir()
    keep = L.callbacks.ModelCheckpoint(saved, every_n_train_steps=1, save_top_k=-1, save_last=True)
    monitor = monitor_with(BagOfWords(), every_n_steps=1)
    averaging = getattr(L.callbacks, averages)(**settings)
    module = CausalLMModule(tiny_gpt2(tied=False).train(), optimizer="adamw")
    callbacks = [monitor, SavesWithinSteps(saved), averaging, keep]
    run = {"module": module, "loader": loader, "max_epochs": 3, "enable_checkpointing": True}
    fit(callbacks, tmp_path, **run)
    assert monitor.engine.results.looks >= 8
    files = [*saved.iterdir()]
    assert len(files) > 40
    for path in files:
        stored = path.read_bytes()
        for kind in (torch.int64, torch.int32):
            assert not any(text[2:8].to(kind).numpy().tobytes() in stored for text in texts)
        if path.suffix == ".pt":
            assert b"lightning_fedleak" not in stored
            assert not any(
                isinstance(h, Hook) for h in hooks_of(torch.load(path, weights_only=False))
            )
    final = copy.deepcopy(getattr(averaging, "_average_model", None))
    assert final is None or not any(isinstance(hook, Hook) for hook in hooks_of(final))


# What a model says of each token, against a slow loop in float64.


@pytest.fixture(scope="module")
def model() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=50, n_embd=16, n_head=2, n_layer=2, n_positions=64)
    return GPT2LMHeadModel(config).train()


def some_texts(*lengths: int) -> list[Text]:
    generator = torch.Generator().manual_seed(1)
    texts = []
    for length in lengths:
        ids = torch.randint(50, (length,), generator=generator)
        labels = ids.clone()
        labels[: length // 3] = -100
        texts.append(Text(ids, labels))
    return texts


def test_every_number_is_that_of_a_slow_loop(model: GPT2LMHeadModel) -> None:
    texts = some_texts(30, 7, 12, 30, 3)
    snapshot = token_log_probs(find_anatomy(model), texts)
    exact = GPT2LMHeadModel(model.config).double().eval()
    exact.load_state_dict(model.double().state_dict())
    model.float()
    for row, text in enumerate(texts):
        logits = exact(text.ids[None]).logits[0]
        for place in range(1, len(text.ids)):
            column = place - 1
            counted = int(text.labels[place]) != -100
            assert bool(snapshot.labels[row, column]) == counted
            if not counted:
                assert float(snapshot.log_probs[row, column]) == 0
                continue
            log_p = logits[place - 1].log_softmax(0)
            p = log_p.exp()
            mean = (p * log_p).sum()
            deviation = (p * (log_p - mean) ** 2).sum().sqrt()
            target = text.ids[place]
            numbers = (snapshot.log_probs, snapshot.means, snapshot.deviations)
            for actual, expected in zip(numbers, (log_p[target], mean, deviation), strict=True):
                torch.testing.assert_close(
                    actual[row, column].double(), expected.detach(), atol=2e-5, rtol=1e-4
                )
            assert bool(snapshot.greedy[row, column]) == bool(log_p.argmax() == target)
        assert not snapshot.labels[row, len(text.ids) - 1 :].any()


def test_virtual_tokens_before_a_text_are_not_asked_about(model: GPT2LMHeadModel) -> None:
    """Prompt tuning puts them there: the logits have more places than the text."""
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5)
    tuned = get_peft_model(copy.deepcopy(model), config).eval()
    texts = some_texts(30, 7, 12)
    snapshot = token_log_probs(find_anatomy(tuned), texts)
    for row, text in enumerate(texts):
        with torch.no_grad():
            logits = tuned(input_ids=text.ids[None]).logits[0]
        assert len(logits) == 5 + len(text.ids)
        for place in (text.labels[1:] != -100).nonzero()[:, 0].tolist():
            log_p = logits[5 + place].double().log_softmax(0)
            expected = float(log_p[text.ids[place + 1]])
            assert float(snapshot.log_probs[row, place]) == pytest.approx(expected, abs=2e-5)


def test_compressed_bytes_are_of_the_words() -> None:
    texts = some_texts(20, 8)
    decoded = compressed_bytes(texts, lambda ids: " ".join(map(str, ids)))
    expected = [len(zlib.compress(" ".join(map(str, t.ids.tolist())).encode())) for t in texts]
    assert decoded.tolist() == expected
    assert compressed_bytes(texts)[0] > compressed_bytes(texts)[1] > 0
