"""A model that is split between a client and a server gives what the whole model gives."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import pytest
import torch
from split import SplitClient, SplitModel, SplitServer, connect, split_model
from split.client import trainable_parameters
from torch import nn

from tests.helpers.models import VOCAB, tiny_bert_classifier, tiny_gpt2, tiny_llama

NEW, TIMEOUT = 6, 600.0
SGD = partial(torch.optim.SGD, lr=0.02)


@dataclass(frozen=True)
class Case:
    build: Callable[[], nn.Module]
    layer: int
    head: Literal["server", "client"]
    dtype: torch.dtype = torch.float32
    untie: bool = False

    def model(self) -> nn.Module:
        model = self.build().to(self.dtype)
        with torch.no_grad():  # at their initial size every text is continued by one token
            for parameter in model.parameters():
                parameter.mul_(4.0 if parameter.dim() > 1 else 1.0)
        return model

    def split(self, model: nn.Module | None = None) -> SplitModel:
        model = self.model() if model is None else model
        return split_model(model, self.layer, head=self.head, untie=self.untie)


gpt2 = partial(tiny_gpt2, dropout=0.0, layers=3)
llama = partial(tiny_llama, layers=3)
CASES = {
    "gpt2": Case(partial(gpt2, tied=False), 1, "server"),
    "gpt2 tied, U": Case(gpt2, 2, "client"),
    "llama": Case(llama, 2, "server"),
    "llama, U": Case(llama, 1, "client"),
    "llama, embeddings only": Case(llama, 0, "server"),
    "llama, head only": Case(llama, 3, "server"),
    "llama bf16": Case(llama, 1, "server", torch.bfloat16),
    "gpt2 bf16, U": Case(gpt2, 0, "client", torch.bfloat16),
    "bert": Case(partial(tiny_bert_classifier, dropout=0.0), 1, "server"),
    "bert, U": Case(partial(tiny_bert_classifier, dropout=0.0), 1, "client"),
}


def prompt(rows: int = 3, length: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    """Texts padded on the left."""
    ids = torch.randint(3, VOCAB, (rows, length), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :3], ids[0, :3] = 0, 0
    mask[2, :1], ids[2, :1] = 0, 0
    return ids, mask


def batches(case):
    ids, mask = prompt()
    labels = ids.masked_fill(mask == 0, -100)
    if "bert" in case:
        labels = torch.tensor([0, 2, 1])
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    settings = {"attention_mask": mask}
    return [(ids, labels, {}), (ids.flip(0), labels.flip(0), {"attention_mask": mask.flip(0)})] + (
        [] if "bert" in case else [(ids, labels, settings | {"position_ids": positions})]
    )


def served(case: Case, url: str, answers: dict) -> None:
    """Serve one case, and keep what the server has in the end."""
    split = case.split()
    server = SplitServer(split, connect(url, "server", timeout=TIMEOUT), optimizer=SGD, keep=3)
    server.serve()
    answers |= {
        "weights": [p.detach() for p in split.top.parameters()],
        "gradients": [p.grad for p in split.top.parameters()],
        "received": list(server.received),
        "returned": list(server.returned),
        "steps": server.steps,
    }


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """What the client saw in each case, and what the server left, which is another thread."""
    folder, results = tmp_path_factory.mktemp("split"), {}
    for name, case in CASES.items():
        url, split = f"file://{folder / name.replace(' ', '_')}", case.split()
        results[name] = output = {"split": split}
        server = threading.Thread(target=served, args=(case, url, output), daemon=True)
        server.start()
        ids, mask = prompt()
        channel = connect(url, "client", timeout=TIMEOUT)
        with SplitClient(split, channel, optimizer=SGD) as client:
            output["losses"] = [client.train_step(x, y, **z) for x, y, z in batches(name)]
            output["logits"] = client.logits(ids, mask)
            if "bert" not in name:
                output["tokens"] = client.generate(ids, NEW, mask)
        server.join(TIMEOUT)
    return results


@pytest.fixture(scope="module")
def unsplit():
    """The same steps on the whole model: itself, its states in the last logits, what they were."""

    def run(name):
        case = CASES[name]
        model = case.model().train()
        optimizer = SGD(model.parameters())
        losses = []
        for ids, labels, settings in batches(name):
            optimizer.zero_grad()
            output = model(input_ids=ids, labels=labels, **settings)
            output.loss.backward()
            optimizer.step()
            losses.append(output.loss.detach())
        model.eval()
        ids, mask = prompt()
        with torch.no_grad():
            output = model(input_ids=ids, attention_mask=mask, output_hidden_states=True)
            tokens = None
            if "bert" not in name:
                tokens = model.generate(
                    ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False, eos_token_id=None
                )
        return model, losses, output, tokens

    return {name: run(name) for name in CASES}


def near(a, b) -> bool:
    return a.dtype == b.dtype and torch.allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_training_is_that_of_the_whole_model(runs, unsplit, name):
    run, (model, losses, _, _) = runs[name], unsplit[name]
    assert run["steps"] == len(losses)
    assert all(near(a, b) for a, b in zip(run["losses"], losses, strict=True))
    assert float(losses[-1]) != float(losses[0])
    whole = CASES[name].split(model)
    for local, gradients, part in (
        (
            trainable_parameters((run["split"].bottom, run["split"].tail)),
            None,
            (whole.bottom, whole.tail),
        ),
        (run["weights"], run["gradients"], (whole.top,)),
    ):
        peer = trainable_parameters(part)
        gradients = [p.grad for p in local] if gradients is None else gradients
        assert len(local) == len(peer) > 0
        assert all(near(a, b) for a, b in zip(local, peer, strict=True))
        for a, b in zip(gradients, peer, strict=True):
            assert (a is None) == (b.grad is None)
            assert a is None or near(a, b.grad)


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_the_whole_model(runs, unsplit, name):
    _, mask = prompt()
    local, peer = runs[name]["logits"], unsplit[name][2].logits
    if local.dim() == 3:
        local, peer = local[mask == 1], peer[mask == 1]
    assert near(local, peer)


@pytest.mark.parametrize("name", [n for n in CASES if "bert" not in n])
def test_generation_is_that_of_the_whole_model(runs, unsplit, name):
    local, peer = runs[name]["tokens"], unsplit[name][3]
    assert local.shape == (3, 7 + NEW)
    assert torch.equal(local, peer)
    assert len(set(local[:, 7:].flatten().tolist())) > 2


@pytest.mark.parametrize("name", [n for n in CASES if "bert" not in n])
def test_what_is_kept_is_what_was_sent(runs, unsplit, name):
    run, (model, _, output, _) = runs[name], unsplit[name]
    case = CASES[name]
    _, mask = prompt()
    assert len(run["received"]) == 3, "five were sent, three are kept"
    read, generated = run["received"][-2:]
    assert [s.step for s in run["received"]] == [2, 3, 3]
    assert read.stage == generated.stage == "shared"
    [(place, states)] = read.tensors.items()
    assert place == run["split"].layer_name
    position = case.layer
    if position < len(output.hidden_states) - 1:
        assert near(states[mask == 1], output.hidden_states[position][mask == 1])
    assert torch.equal(read.attention_mask, mask)
    assert read.position_ids is None
    # All of the generation, one position at a time behind the prompt, is one text's states.
    whole = run["tokens"][:, :-1]
    observed = torch.cat([mask, mask.new_ones(3, NEW - 1)], 1)
    positions = (observed.cumsum(1) - 1).clamp(min=0)
    assert torch.equal(generated.attention_mask, observed)
    assert torch.equal(generated.position_ids[observed == 1], positions[observed == 1])
    [states] = generated.tensors.values()
    with torch.no_grad():
        bottom = copy.deepcopy(case.split(model).bottom)
        expected = bottom.states(whole, observed, positions)
    tolerance = 1e-5 if case.dtype is torch.float32 else 5e-2
    assert (states - expected)[observed == 1].abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize("name", [n for n in CASES if "U" in n])
def test_with_the_head_on_the_client_its_gradient_crosses(runs, name):
    returned = runs[name]["returned"]
    assert len(returned) == min(3, runs[name]["steps"])
    [(place, gradient)] = returned[-1].tensors.items()
    assert place == runs[name]["split"].last_name
    assert gradient.shape == (3, 7, 16)
    assert bool(gradient.any())
