"""DP-SGD computes autograd's sums over a batch only where something reads them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

from lightning_fedleak.defenses import DPSGD, DefenseError, mean_of_sample_means
from lightning_fedleak.defenses.dpsgd.clipped_sum import ClippedSum
from lightning_fedleak.evaluation.auditing import PlantedGradients
from lightning_fedleak.strategies import DefendedStrategy
from tests.helpers.models import tiny_gpt2, tiny_mixtral
from tests.strategies.dpsgd_runs import CLIP, CLIPS, CausalLM, clipped_sum, loader, lora, trainer

EPOCHS = 2  # of 6 batches
Absent = list[set[str]]


def checkpointed() -> nn.Module:
    model = tiny_gpt2(dropout=0.1).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "tied": lambda: tiny_gpt2(dropout=0.1).train(),
    "checkpointed": checkpointed,
    "lora": lora,
    "experts": lambda: tiny_mixtral().train(),
}


class Tap(Callback):
    """Looks at every stage."""

    def on_train_start(self, run: Any, module: Any) -> None:
        run.strategy.add_tap(lambda stage, optimizer: None)


class Looks(Callback):
    """Has a hook that could read gradients."""

    def on_after_backward(self, run: Any, module: Any) -> None:
        assert any(p.grad is not None for p in module.parameters())


@pytest.fixture
def absent(monkeypatch: pytest.MonkeyPatch) -> Absent:
    """Names of the trained parameters without a gradient before each release."""
    found: Absent = []
    real = DPSGD.on_gradients

    def note(self: Any, parameters: Any, context: Any) -> None:
        names = {p: name for name, p in context.root.named_parameters()}
        found.append({names[p] for p in parameters if p.grad is None})
        real(self, parameters, context)

    monkeypatch.setattr(DPSGD, "on_gradients", note)
    return found


def run(module: CausalLM, *callbacks: Callback, **settings: Any) -> tuple[DPSGD, Tensor]:
    """Train, and return the defence with the weights."""
    precision, epochs = settings.pop("precision", "32-true"), settings.pop("epochs", EPOCHS)
    values = {"noise_multiplier": 0.7, "target_delta": 1e-3, "seed": 1, **settings}
    defense = DPSGD(values.pop("clip", CLIP), **values)
    strategy = DefendedStrategy("auto", [defense])
    torch.manual_seed(5)
    more: dict[str, Any] = {"max_epochs": epochs, "precision": precision}
    trainer(strategy, callbacks=[*callbacks], **more).fit(module, loader())
    return defense, torch.cat([p.detach().flatten() for p in module.parameters()])


@pytest.mark.parametrize(
    ("name", "rows"), [("tied", None), ("checkpointed", 2), ("lora", None), ("experts", None)]
)
def test_weights_and_account_are_the_same_to_the_bit(
    name: str, rows: int | None, absent: Absent
) -> None:
    given = {"max_physical_batch_size": rows, "clip": CLIPS.get(name, CLIP), "epochs": 1}
    first, expected = run(CausalLM(MODELS[name]()), Tap(), **given)
    assert not any(absent)
    absent.clear()
    second, weights = run(module := CausalLM(MODELS[name]()), **given)
    trained = {n for n, p in module.named_parameters() if p.requires_grad}
    assert not absent[0]
    assert sum(missing == trained for missing in absent) >= 3
    assert torch.equal(weights, expected)
    assert second.privacy == first.privacy
    assert second.releases == first.releases == len(absent) == 6


@pytest.mark.parametrize("name", ["checkpointed", "lora", "experts"])
def test_steps_are_those_of_one_backward_for_each_sample(name: str, absent: Absent) -> None:
    clip = CLIPS.get(name, CLIP)
    model = MODELS[name]()
    for inner in model.modules():
        if isinstance(inner, nn.Dropout):
            inner.p = 0.0
    distances: list[float] = []

    class Compare(Callback):
        def on_train_batch_start(self, run: Any, module: Any, batch: Any, index: int) -> None:
            self.before = self.weights(module)
            empty = len(batch["labels"]) == 0
            self.total = 0.0 if empty else clipped_sum(module, batch, "64-true", clip)[0]

        def on_train_batch_end(self, run: Any, module: Any, *_: Any) -> None:
            moved = (self.before - self.weights(module)) / module.lr * 4
            if isinstance(self.total, Tensor):
                distances.append(float((moved - self.total).norm() / self.total.norm()))

        def weights(self, module: Any) -> Tensor:
            return torch.cat([p.detach().flatten() for p in module.parameters() if p.requires_grad])

    settings = {"noise_multiplier": 0.0, "precision": "64-true", "epochs": 1}
    run(CausalLM(model), Compare(), clip=clip, **settings)
    assert sum(map(bool, absent)) >= 3
    assert len(distances) >= 5
    assert max(distances) < 1e-6


def test_whoever_could_read_them_has_them(absent: Absent) -> None:
    class Own(CausalLM):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            assert all(p.grad is not None for p in self.parameters())

    run(Own())
    run(CausalLM(), Looks())
    run(CausalLM(), check=PlantedGradients(9))
    assert not any(absent)


def test_a_parameter_with_a_hook_has_its_gradient(absent: Absent) -> None:
    module, seen = CausalLM(), list[Tensor]()
    weight = module.model.transformer.h[0].mlp.c_fc.weight
    weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    run(module)
    assert len(seen) >= 10
    assert sum(map(bool, absent)) >= 6
    assert not any("h.0.mlp.c_fc.weight" in missing for missing in absent)


class Turns(CausalLM):
    """From its ninth batch on has another loss, and uses a weight outside of its layer."""

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        if len(self.sizes) < 9:
            return super().loss(batch)
        weight = self.model.transformer.h[0].mlp.c_fc.weight
        handle = self.model.lm_head.register_forward_pre_hook(
            lambda _, given: (given[0] + 30 * given[0] @ weight @ weight.T,)
        )
        logits = self.model(**{k: v for k, v in batch.items() if k != "labels"}).logits.clone()
        handle.remove()
        return mean_of_sample_means(logits, batch["labels"], causal=True)


def test_a_new_form_is_compared_in_its_first_step(absent: Absent) -> None:
    module = Turns()
    with pytest.raises(DefenseError, match="is not the sum of its recorded per-sample gradients"):
        run(module)
    assert len(module.sizes) == 9
    assert any(absent[:-1])
    assert not absent[-1]


class Beside(CausalLM):
    """From its tenth batch on uses a weight also outside of its layer."""

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        layer = self.model.transformer.h[0].mlp.c_fc
        if len(self.sizes) < 10:
            return super().loss(batch)
        handle = layer.register_forward_hook(
            lambda _, given, output: (
                output + torch.mm(given[0].flatten(0, 1), layer.weight).view_as(output)
            )
        )
        loss = super().loss(batch)
        handle.remove()
        return loss


@pytest.mark.parametrize(
    ("callbacks", "settings"),
    [
        ((), {}),
        ((Tap(),), {}),
        ((), {"precision": "bf16-mixed"}),
        ((), {"max_physical_batch_size": 2}),
    ],
)
def test_a_use_beside_the_layer_is_refused_in_its_first_step(
    callbacks: Any, settings: dict[str, Any], absent: Absent
) -> None:
    module = Beside()
    with pytest.raises(DefenseError, match=r"'model.transformer.h.0.mlp.c_fc.weight' is not the"):
        run(module, *callbacks, **settings)
    pieces = settings.get("max_physical_batch_size")
    assert len(module.sizes) == 10
    assert pieces or len(absent) == 9


class Unused(CausalLM):
    """From its tenth batch on uses a weight outside of its layer, whose output is used no more."""

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        layer = self.model.transformer.h[0].mlp.c_fc
        if len(self.sizes) < 10:
            return super().loss(batch)

        def outside(_: nn.Module, given: tuple[Tensor], output: Tensor) -> Tensor:
            return given[0] @ layer.weight + layer.bias

        handle = layer.register_forward_hook(outside)
        loss = super().loss(batch)
        handle.remove()
        return loss


def test_a_weight_whose_layer_is_run_for_nothing_is_refused_at_once(absent: Absent) -> None:
    module = Unused()
    with pytest.raises(DefenseError, match=r"c_fc\.\w+' is not the sum of its recorded"):
        run(module)
    assert (len(module.sizes), len(absent)) == (10, 9)


def test_a_comparison_that_falls_due_after_backward_is_made_in_the_next_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compared: list[bool] = []
    real = ClippedSum.check_complete
    monkeypatch.setattr(
        ClippedSum, "check_complete", lambda *given: compared.append(real(*given)) or compared[-1]
    )

    class Late(Callback):
        def on_before_zero_grad(self, run: Any, module: Any, optimizer: Any) -> None:
            """Lightning calls it between training_step and backward."""
            [defense] = run.strategy.defenses
            if defense.releases == 10:
                defense._step.check.unchecked = True

    run(CausalLM(), Late())
    assert compared.count(False) == 1
    assert compared[compared.index(False) + 1]
