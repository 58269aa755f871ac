"""A model that was trained on a made-up language, and readouts of AlignedFlatChat for it."""

import pytest
import torch

from lightning_fedleak.attacks.public_text import PublicText, gradient_of
from lightning_fedleak.attacks.words.aligned import AlignedFlatChat
from lightning_fedleak.model.anatomy import find_anatomy
from tests.attacks.words.language import VOCAB, WIDTH, Language, generator, observation
from tests.helpers import models


@pytest.fixture(scope="session")
def language():
    return Language()


@pytest.fixture(scope="session")
def trained(language):
    """Return a tied GPT-2 after a few seconds of training; no test may change it."""
    model = models.tiny_gpt2(vocab=VOCAB, d=WIDTH, layers=1, dropout=0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    texts = language.texts(4000, 24, seed=1)
    for rows in texts.split(40):
        loss = model(input_ids=rows, labels=rows).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.zero_grad()
    return find_anatomy(model)


@pytest.fixture(scope="session")
def public(language):
    return PublicText(language.texts(400, 24, seed=2))


@pytest.fixture(scope="session")
def private(trained, language):
    """Return (observation, types) of a few private batches of unequal size."""
    cases = []
    for i, rows in enumerate(language.texts(60, 24, seed=3).split([4, 8, 16, 32])):
        batch = PublicText(rows).rows(range(len(rows)), 24, generator())
        gradient = gradient_of(trained, batch, ["head.weight"])["head.weight"]
        cases.append((observation(gradient, i), batch.target_ids().unique()))
    return cases


@pytest.fixture(scope="session")
def learned(trained, public):
    attack = AlignedFlatChat(public, lengths=(12, 24), calibration_tokens=4000)
    attack.prepare(trained)
    return attack
