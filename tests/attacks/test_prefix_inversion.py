"""PrefixInversion on small random models, against the texts that were really sent."""

from __future__ import annotations

import pytest
import torch

from lightning_fedleak.anatomy import find_anatomy
from lightning_fedleak.attacks import PublicText
from lightning_fedleak.attacks.hidden import hidden_states
from lightning_fedleak.attacks.prefix_inversion import PrefixInversion
from lightning_fedleak.snapshots import ActivationSnapshot, Observation, Stage
from tests.helpers import models


@pytest.mark.parametrize("make", [models.tiny_gpt2, models.tiny_llama])
@pytest.mark.parametrize("layer", [1, 2])
def test_without_noise_the_text_is_exact(make, layer):
    model = make().eval()
    anatomy = find_anatomy(model)
    generator = torch.Generator().manual_seed(0)
    size = anatomy.vocab_size
    public = PublicText(torch.randint(size, (40, 16), generator=generator))
    sent = torch.randint(size, (3, 12), generator=generator)
    attack = PrefixInversion(layer, public)
    before = torch.random.get_rng_state()
    attack.prepare(anatomy)
    hidden = hidden_states(anatomy, layer, sent)
    view = Observation(activations=(ActivationSnapshot(0, Stage.SHARED, {"layer": hidden}),))
    guess = attack.run(view)
    assert torch.equal(guess.tokens.cpu(), sent)
    assert guess.finished
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(p.grad is None for p in model.parameters())
