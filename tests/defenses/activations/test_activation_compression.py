"""ActivationCompression: the projection, dropped positions, their gradients, state and refusals."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from sklearn.decomposition import PCA
from torch import Tensor

from lightning_fedleak.defenses import DefenseError
from lightning_fedleak.defenses.activations.compression import ActivationCompression
from lightning_fedleak.defenses.activations.noise import ActivationNoise
from lightning_fedleak.model.anatomy import find_anatomy
from lightning_fedleak.model.model_runs import hidden_states
from lightning_fedleak.strategies import DefendedStrategy
from lightning_fedleak.strategies.release import CHECKPOINT_KEY
from tests.defenses.activations.activation_runs import (
    Passing,
    batch,
    context,
    distance,
    rewriting,
    step,
)
from tests.helpers.lightning_modules import CausalLMModule, random_token_loader
from tests.helpers.models import DIM, VOCAB, tiny_gpt2, tiny_llama, tiny_t5
from tests.strategies.toy import trainer
from tests.taps.test_activation_tap import checkpointed

K = 5


def public(n: int = 12, length: int = 9) -> Tensor:
    return torch.randint(3, VOCAB, (n, length), generator=torch.Generator().manual_seed(9))


def compressed(model, defense: ActivationCompression) -> tuple[Passing, Passing]:
    local = Passing(model, defense.layer)
    defense.before_setup(context(CausalLMModule(model)))
    local.seen.clear()  # of public text
    return local, Passing(model, defense.layer)


@pytest.mark.parametrize("build", [tiny_gpt2, tiny_llama, tiny_t5])
@pytest.mark.parametrize("layer", [0, 2])
def test_k_numbers_of_each_state_leave_and_nothing_of_early_positions(build, layer: int) -> None:
    model = build(layers=3).train()
    local, shared = compressed(model, ActivationCompression(layer, keep_dims=K, drop_early=2))
    for seed in range(3):
        step(model, batch(seed), defense=None)
    before = torch.cat([s[:, 2:].flatten(0, 1) for s in local.seen]).double()
    after = torch.cat([s[:, 2:].flatten(0, 1) for s in shared.seen]).double()
    assert all(bool((s[:, :2] == 0).all()) for s in shared.seen)
    values = torch.linalg.svdvals(after)
    assert float(values[K - 1]) > 1e-3 * float(values[0]) > 1e3 * float(values[K])
    # An orthogonal projection: the closest point in the span of what leaves.
    span = torch.linalg.svd(after, full_matrices=False)[2][:K]
    torch.testing.assert_close(before @ span.T @ span, after, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize(
    "setting",
    [{"keep_dims": K}, {"drop_early": 3}, {"keep_dims": K, "drop_early": 1}],
    ids=str,
)
@pytest.mark.parametrize("reentrant", [None, False, True])
def test_the_gradient_is_that_of_the_linear_map(layer, setting, reentrant) -> None:
    model = tiny_gpt2(layers=2, dropout=0.0).train()
    if reentrant is not None:
        model = checkpointed(model, reentrant)
    defense = ActivationCompression(layer, **setting)
    local, shared = compressed(model, defense)
    got = step(model, batch(), defense=defense)
    kept = slice(setting.get("drop_early", 0), None)
    # The projection, from what came and what left, by least squares.
    tokens = torch.cat([s[:, kept].flatten(0, 1) for s in local.seen[:1]]).double()
    sent = torch.cat([s[:, kept].flatten(0, 1) for s in shared.seen[:1]]).double()
    matrix = torch.eye(DIM)
    if "keep_dims" in setting:
        matrix = torch.linalg.lstsq(tokens, sent).solution
    reference = tiny_gpt2(layers=2, dropout=0.0).train()

    def linear(states: Tensor) -> Tensor:
        rest = states[:, kept] @ matrix.float()
        return torch.cat([torch.zeros_like(states[:, : states.shape[1] - rest.shape[1]]), rest], 1)

    rewriting(reference, layer, linear)
    expected = step(reference, batch())
    assert distance(got, expected) < 1e-3
    assert distance(step(tiny_gpt2(layers=2, dropout=0.0).train(), batch()), got) > 0.02


@pytest.mark.parametrize("layer", [0, 2])
def test_principal_components_are_those_of_scikit_learn(layer: int) -> None:
    model = tiny_llama(layers=2)
    states = hidden_states(find_anatomy(model), layer, public()).flatten(0, 1).double()
    fitted = PCA(n_components=K).fit(states.numpy())
    defense = ActivationCompression(layer, K, basis="principal", public_ids=public())
    local, shared = compressed(model, defense)
    step(model, batch(), defense=defense)
    tokens = local.seen[0].flatten(0, 1).double().numpy()
    expected = fitted.inverse_transform(fitted.transform(tokens))
    got = shared.seen[0].flatten(0, 1).double()
    torch.testing.assert_close(got, torch.from_numpy(expected), atol=1e-5, rtol=1e-4)


def test_a_trainer_validates_first_trains_and_resumes_with_the_same_components(tmp_path) -> None:
    def strategy(seed: int) -> DefendedStrategy:
        ids = torch.randint(3, VOCAB, (6, 8), generator=torch.Generator().manual_seed(seed))
        return DefendedStrategy(
            defenses=[ActivationCompression(1, K, basis="principal", public_ids=ids)]
        )

    class Validated(CausalLMModule):
        def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
            self.model(**batch)

    loader = random_token_loader(n=8)
    keep = ModelCheckpoint(dirpath=tmp_path, save_last=True)
    first = strategy(1)
    run = trainer(first, callbacks=[keep], enable_checkpointing=True, num_sanity_val_steps=1)
    run.fit(Validated(tiny_llama()), loader, loader)
    path = str(tmp_path / "last.ckpt")
    saved = torch.load(path, weights_only=True)[CHECKPOINT_KEY]["activation_compression"]
    assert saved["span"].shape == (DIM, K)
    again = strategy(2)
    trainer(again, max_epochs=2).fit(Validated(tiny_llama()), loader, loader, ckpt_path=path)
    restored = again.defenses[0].state_dict()
    assert torch.equal(restored["span"], saved["span"])
    assert torch.equal(restored["mean"], saved["mean"])
    other = ActivationCompression(1, K + 1, basis="principal", public_ids=public())
    with pytest.raises(DefenseError, match=r"other components than keep_dims=6"):
        other.load_state_dict(saved)


def test_noise_belongs_in_front() -> None:
    noise, smaller = ActivationNoise(2, 1.0), ActivationCompression(2, K)
    with pytest.raises(
        DefenseError, match="Put 'activation_noise' before 'activation_compression'"
    ):
        DefendedStrategy("auto", [smaller, noise])
    DefendedStrategy("auto", [noise, smaller])
    DefendedStrategy("auto", [smaller, ActivationNoise(3, 1.0)])
