"""Client here, server in another process: what comes out is what the unsplit model gives."""

from __future__ import annotations

import copy
import time

import pytest
import torch
from split import PeerError, SplitClient, connect
from split.client import trainable_parameters

from tests.helpers.models import VOCAB
from tests.helpers.processes import process
from tests.split_learning.cases import CASES, SGD, TIMEOUT

pytestmark = pytest.mark.ddp

NEW = 6


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


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """What the client saw in each case, what the server left, and the unsplit model's run."""
    folder = tmp_path_factory.mktemp("split")
    log = folder / "log"
    server = process("tests.split_learning.cases", [folder], log, CUDA_VISIBLE_DEVICES="")
    server.start()
    results = {}
    try:
        for name, case in CASES.items():
            url = f"file://{folder / name.replace(' ', '_')}"
            channel = connect(url, "client", timeout=TIMEOUT)
            split = case.split()
            ids, mask = prompt()
            output = {"split": split}
            with SplitClient(split, channel, optimizer=SGD) as client:
                output["losses"] = [client.train_step(x, y, **z) for x, y, z in batches(name)]
                output["logits"] = client.logits(ids, mask)
                if "bert" not in name:
                    output["tokens"] = client.generate(ids, NEW, mask)
            results[name] = output
        channel = connect(f"file://{folder / 'leaves'}", "client", timeout=TIMEOUT)
        SplitClient(CASES["llama"].split(), channel).logits(*prompt())
        channel.drop()
        channel = connect(f"file://{folder / 'dies'}", "client", timeout=TIMEOUT)
        client = SplitClient(CASES["llama"].split(), channel)
        start_time = time.monotonic()
        with pytest.raises(PeerError) as raised:
            client.logits(*prompt())
        results["dies"] = str(raised.value), time.monotonic() - start_time
        client.close()
        server.join(TIMEOUT)
        assert server.exitcode == 3
    except BaseException:
        print(log.read_text())
        raise
    finally:
        server.kill()
        server.join()
    results["leaves"] = (folder / "leaves.txt").read_text()
    for name in CASES:
        results[name] |= torch.load(folder / f"{name}.pt", weights_only=False)
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


def test_a_server_that_dies_is_noticed_at_once(runs):
    message, elapsed = runs["dies"]
    assert "the server of the split model is gone" in message
    assert elapsed < TIMEOUT / 4


def test_a_client_that_goes_without_a_word_is_noticed(runs):
    assert "the client of the split model is gone" in runs["leaves"]
