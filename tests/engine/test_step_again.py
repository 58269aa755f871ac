"""What was done to a gradient shows in the step made again, and is done to the control too."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaForSequenceClassification
from transformers.integrations import activate_neftune

from lightning_fedleak.attacks import BagOfWords, SubspaceWords, WordGuess
from lightning_fedleak.engine import GateEvent
from lightning_fedleak.engine.results import UNEXPLAINED
from lightning_fedleak.model.snapshots import Stage
from lightning_fedleak.trainers import Threshold
from tests.helpers.loops import model_loss, watched
from tests.helpers.models import own_rng, tiny_llama

STEPS, VOCAB = 2, 60
HIGHEST = 0.5
F1, CONTROL = "leakage/subspace_words/f1", "leakage/subspace_words/control"
PENALTY = 5e-3

Change = Callable[[Tensor, Tensor], Tensor]
"""Of a parameter and its gradient, the gradient that the optimizer gets."""


def adapted(dropout: float = 0.0) -> Any:
    with own_rng(1):
        model = tiny_llama(vocab=VOCAB, d=40)
        config = LoraConfig(r=16, target_modules=["q_proj", "v_proj"], lora_dropout=dropout)
        return get_peft_model(model, config)


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def look_at_each(folder: Path, model: Any, **settings: Any) -> list[tuple[float, float, float]]:
    """Return the F1, the control and what is unexplained of each step that has an F1.

    A low number that a strict gate lets pass ends the test.
    """
    looks: list[tuple[float, float, float]] = []
    events: list[GateEvent] = []
    watches: list[Any] = []
    generator = torch.Generator().manual_seed(4)
    rows = torch.randint(3, VOCAB, (STEPS, 2, 8), generator=generator)

    def batches() -> Iterator[dict[str, Tensor]]:
        for ids in rows.repeat_interleave(settings.get("accumulate", 1), 0):
            events.clear()
            yield {"input_ids": ids, "labels": ids}
            values = watches[0].engine.results.look_values
            number = values.get(F1, math.nan)
            if number <= HIGHEST:
                assert events, number
            if not math.isnan(number):
                control = watches[0].latest.get(CONTROL, math.nan)
                looks.append((number, control, values.get(UNEXPLAINED, math.nan)))

    gate = Threshold("leakage/worst/words", at_most=HIGHEST, action=events.append)
    settings |= {"batches": batches(), "gates": [gate], "configure": watches.append}
    watched(folder, SubspaceWords(capacity_seconds=0), model, lr=5e-2, **settings)
    return looks


def to_int8(gradient: Tensor) -> Tensor:
    size = gradient.abs().max() / 127
    return (gradient / size).round() * size if size > 0 else gradient


def clip(gradient: Tensor) -> Tensor:
    size = float(gradient.abs().flatten().quantile(0.7))
    return gradient.clamp(-size, size)


CHANGES: dict[str, Change] = {
    "L2": lambda p, g: g + 1e-2 * p, "tiny L2": lambda p, g: g + 2e-7 * p,
    "int8": lambda p, g: to_int8(g), "clipped by value": lambda p, g: clip(g),
}  # fmt: skip


@pytest.mark.parametrize(
    ("way", "change"), [*(("by hand", change) for change in CHANGES), ("in a hook", "L2")]
)
def test_a_changed_gradient_hides_no_words_unseen(tmp_path: Path, way: str, change: str) -> None:
    model, act = adapted(), CHANGES[change]

    def by_hand(model: nn.Module) -> None:
        for parameter in trained(model):
            if parameter.grad is not None:
                parameter.grad.copy_(act(parameter.detach(), parameter.grad))

    settings: dict[str, Any] = {"before_step": by_hand}
    if way == "in a hook":
        settings = {}
        for parameter in trained(model):
            parameter.register_hook(lambda g, p=parameter: act(p.detach(), g))
    looks = look_at_each(tmp_path, model, **settings)
    assert looks[0][2] > 1e-6


class Unlucky(SubspaceWords):
    """Reads little of the step itself, and all of controls."""

    def run(self, view: Any, query: Any = None) -> WordGuess:
        guess = super().run(view, query)
        n = len(guess.types) if view.gradients[-1].stage is Stage.LOCAL else 3
        return replace(guess, types=guess.types[:n], certified=False)


@pytest.mark.parametrize("size", [0.0, 1e-7])
def test_a_low_number_of_a_changed_gradient_alone_is_unknown(tmp_path: Path, size: float) -> None:
    """The control rings, and what was changed may hide the words from this attack alone."""

    def by_hand(model: nn.Module) -> None:
        for parameter in trained(model):
            parameter.grad = parameter.grad + size * parameter.detach()  # type: ignore[operator]

    fired: list[GateEvent] = []
    gate = Threshold("leakage/worst/words", at_most=HIGHEST, action=fired.append)
    rows = torch.randint(3, VOCAB, (STEPS, 2, 8), generator=torch.Generator().manual_seed(4))
    settings = {"batches": [{"input_ids": x, "labels": x} for x in rows], "gates": [gate]}
    attack = Unlucky(capacity_seconds=0)
    watch = watched(tmp_path, attack, adapted(), before_step=by_hand, lr=5e-2, **settings)
    assert watch.latest[F1] < HIGHEST
    if not size:
        assert not fired
        assert watch.latest[CONTROL] == 1
    else:
        assert math.isnan(fired[-1].value)
        assert "before its gradient was changed" in fired[-1].why


@pytest.mark.parametrize("weight", [1.0, 0.2])
@pytest.mark.parametrize("at_most", [0.5, 0.9])
def test_a_gradient_that_code_drops_leaves_a_number_below_its_limit_unknown(
    tmp_path: Path, weight: float, at_most: float
) -> None:
    """Its words count as those of the step, so that the number is too low; a high one stands."""
    kept: list[Tensor | None] = []

    def loss(model: nn.Module, batch: Any) -> Tensor:
        kept[:] = [None if p.grad is None else p.grad.clone() for p in trained(model)]
        return (weight if kept[0] is not None else 1.0) * model_loss(model, batch)

    def drop_last(model: nn.Module) -> None:
        for parameter, gradient in zip(trained(model), kept, strict=True):
            parameter.grad = gradient

    events: list[GateEvent] = []
    gate = Threshold("leakage/worst/words", at_most=at_most, action=events.append)
    rows = torch.randint(3, VOCAB, (4, 2, 8), generator=torch.Generator().manual_seed(4))
    settings = {"batches": [{"input_ids": x, "labels": x} for x in rows], "gates": [gate]}
    settings |= {"accumulate": 2, "loss": loss, "before_step": drop_last, "lr": 5e-2}
    watch = watched(tmp_path, SubspaceWords(capacity_seconds=0), adapted(), **settings)
    assert 0.5 < watch.latest[F1] < 0.9
    assert (watch.latest[UNEXPLAINED] > 0.5) == (weight == 1)
    event = events[-1]
    if at_most < 0.9:
        assert event.value == watch.latest[F1]
    else:
        assert math.isnan(event.value)
        assert "changed" in event.why


@pytest.mark.parametrize("form", ["sum", "factor", "autograd.grad"])
def test_a_penalty_hides_no_words_unseen(tmp_path: Path, form: str) -> None:
    gradients: list[Tensor] = []

    def loss(model: nn.Module, batch: Any) -> Tensor:
        own, squares = model_loss(model, batch), sum(p.square().sum() for p in trained(model))
        relative = own / own.detach() if form == "factor" else 1.0
        whole = own + relative * PENALTY * squares
        if form != "autograd.grad":
            return whole
        gradients[:] = torch.autograd.grad(whole, trained(model))
        return trained(model)[0].sum() * 0

    def take(model: nn.Module) -> None:
        for parameter, gradient in zip(trained(model), gradients, strict=False):
            parameter.grad = gradient

    looks = look_at_each(tmp_path, adapted(), loss=loss, before_step=take)
    assert looks[0][2] > 0.1


@pytest.mark.parametrize(("size", "own"), [(0.02, False), (0.3, True)])
def test_noise_on_embeddings_hides_no_words_unseen(tmp_path: Path, size: float, own: bool) -> None:
    model = adapted()
    generator = torch.Generator().manual_seed(3) if own else None

    def noise(layer: nn.Module, _: Any, output: Tensor) -> Tensor:
        normal = torch.randn(output.shape, generator=generator)
        return output + size * output.square().mean().sqrt() * normal

    model.get_input_embeddings().register_forward_hook(noise)
    looks = look_at_each(tmp_path, model)
    assert looks[0][2] > 0.3 * size


def attention_dropout() -> Any:
    model = adapted()
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.1
    return model


def noisy_embeddings() -> Any:
    model = adapted()
    activate_neftune(model, 5.0)
    return model


def clip_by_norm(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


UNTOUCHED: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "nothing": (adapted, {}), "dropout": (attention_dropout, {}),
    "accumulation": (adapted, {"accumulate": 2}),
    "clipping by norm": (adapted, {"before_step": clip_by_norm}), "NEFTune": (noisy_embeddings, {}),
    "dropout of LoRA": (partial(adapted, dropout=0.1), {}),
}  # fmt: skip


@pytest.mark.parametrize("case", UNTOUCHED)
def test_of_an_untouched_step_nothing_is_unexplained(tmp_path: Path, case: str) -> None:
    make, settings = UNTOUCHED[case]
    looks = look_at_each(tmp_path, make(), **settings)
    assert looks[0][2] <= 1e-5
    if case not in ("NEFTune", "dropout of LoRA"):  # which hide words from any attack
        assert looks[0][:2] == (1.0, 1.0)


@pytest.mark.parametrize(
    ("dtype", "kind", "penalty"),
    [
        (torch.float32, "words", 1e-8),
        (torch.float32, "classes", 1e-3),
        (torch.bfloat16, "words", 1e-3),
        (torch.bfloat16, "classes", 1e-8),
    ],
)
def test_what_fills_the_rows_of_other_words_is_no_rounding(tmp_path, dtype, kind, penalty) -> None:
    model: Any = tiny_llama(vocab=VOCAB, d=32, layers=1, seed=1)
    if kind == "classes":
        with own_rng(1):
            model = LlamaForSequenceClassification(model.config)
    ids = torch.randint(3, VOCAB, (2, 8), generator=torch.Generator().manual_seed(4))
    labels = ids if kind == "words" else torch.tensor([0, 1])
    events: list[GateEvent] = []

    def shrink(model: nn.Module) -> None:
        for parameter in trained(model):
            if parameter.grad is not None:
                parameter.grad.add_(penalty * parameter.detach())

    gate = Threshold("leakage/worst/words", at_most=HIGHEST, action=events.append)
    batches = [{"input_ids": ids, "labels": labels}]
    settings: dict[str, Any] = {"batches": batches, "gates": [gate], "before_step": shrink}
    watch = watched(tmp_path, BagOfWords(), model.to(dtype), **settings)
    assert watch.latest["leakage/bag_of_words/control"] <= HIGHEST
    [event] = events
    assert math.isnan(event.value)
    if watch.latest[UNEXPLAINED] > 0:
        assert "between backward and optimizer.step()" in event.why


def shaped(kind: str) -> Callable[[nn.Module, Any], Tensor]:
    """Return a loss whose rows of logits are those of no plain cross-entropy."""

    def loss(model: Any, batch: Any) -> Tensor:
        ids = batch["input_ids"]
        if kind == "fused":
            core = model.get_base_model()
            states = core.model(input_ids=ids).last_hidden_state[:, :-1]
            logits = functional.linear(states, core.lm_head.weight).float()
        else:
            logits = model(input_ids=ids).logits[:, :-1].float()
        rows, labels = logits.flatten(0, 1), ids[:, 1:].flatten()
        if kind == "temperature":
            rows = rows / 0.7
        smoothing = 0.1 if kind == "smoothed" else 0.0
        value = functional.cross_entropy(rows, labels, label_smoothing=smoothing)
        if kind == "z-loss":
            value = value + 1e-3 * rows.logsumexp(1).square().mean()
        if kind == "entropy":
            value = value + 1e-2 * (rows.softmax(1) * rows.log_softmax(1)).sum(1).mean()
        return value

    return loss


@pytest.mark.parametrize(
    ("precision", "kind"),
    [
        *(("32-true", kind) for kind in ("smoothed", "z-loss", "temperature", "fused")),
        *(("bf16-true", kind) for kind in ("plain", "entropy")),
        *(("bf16-mixed", kind) for kind in ("plain", "fused")),
    ],
)
def test_a_step_comes_out_again_bit_by_bit(tmp_path, monkeypatch, precision, kind) -> None:
    """A change that is as small as bfloat16's rounding shows in a step of that precision too."""
    monkeypatch.setattr("tests.engine.test_step_again.HIGHEST", 0.0)  # the gate has its own tests
    model = adapted().to(torch.bfloat16 if precision == "bf16-true" else torch.float32)
    settings = {"loss": shaped(kind), "precision": precision}

    def touch(model: nn.Module) -> None:
        for parameter in trained(model):
            if parameter.grad is not None:
                parameter.grad.copy_(to_int8(parameter.grad))

    looks = look_at_each(tmp_path / "untouched", model, **settings)
    assert looks[0][2] <= 1e-6
    looks = look_at_each(tmp_path / "touched", model, before_step=touch, **settings)
    assert looks[0][1] < 0.9
    assert looks[0][2] > 1e-4
