"""The line's manners and the helper's refusals, on two threads; and the example as it is run."""

import doctest
import runpy
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import pytest
import split.cut
import torch
from split import PeerError, SplitClient, SplitError, SplitModel, SplitServer, connect, split_model
from split.client import trainable_parameters
from torch import nn

from tests.helpers.models import VOCAB, own_rng, tiny_bert_classifier, tiny_gpt2, tiny_llama
from tests.helpers.processes import free_port, spawn_imported

IDS = torch.arange(3, 15).view(2, 6)
TIMEOUT = 300.0
"""What nothing here needs, however slow or loaded the machine."""


@pytest.fixture
def line(tmp_path):
    """Makes both ends of a line."""
    count = iter(range(100))

    def make():
        url, ends = f"file://{tmp_path / str(next(count))}", {}
        other = threading.Thread(
            target=lambda: ends.update(server=connect(url, "server", timeout=TIMEOUT))
        )
        other.start()
        ends["client"] = connect(url, "client", timeout=TIMEOUT)
        other.join()
        return ends["client"], ends["server"]

    return make


class Serving(threading.Thread):
    def __init__(self, server):
        super().__init__(daemon=True)
        self.server, self.error = server, None
        self.start()

    def run(self):
        try:
            self.server.serve()
        except Exception as error:
            self.error = error

    def ended(self):
        self.join(TIMEOUT)
        assert not self.is_alive()
        return self.error


def test_nobody_comes(tmp_path):
    for role, missing in (("client", "server"), ("server", "client")):
        with pytest.raises(PeerError, match=f"the {missing} of the split model did not come"):
            connect(f"file://{tmp_path / role}", role, timeout=0.5)
    with pytest.raises(ValueError, match="role must be"):
        connect("file:///x", "both")
    with pytest.raises(ValueError, match="timeout must be"):
        connect("file:///x", "client", timeout=0)


def test_an_error_of_the_client_is_not_hidden_by_the_lines(line, monkeypatch):
    client, server = line()
    split = split_model(tiny_llama(), 1)
    serving = Serving(SplitServer(split, server))

    def gone(*_):
        raise PeerError("gone")

    def fails(_):
        monkeypatch.setattr(client, "send", gone)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), SplitClient(split, client, on_send=fails) as local:
        local.logits(IDS)
    client.drop()
    assert "client of the split model is gone" in str(serving.ended())


def test_a_server_that_goes_without_a_word_is_noticed(line):
    client, server = line()
    split = split_model(tiny_llama(), 1)
    serving = Serving(SplitServer(split, server))
    local = SplitClient(split, client)
    split.top.model.register_forward_pre_hook(lambda *_: server.drop())
    with pytest.raises(PeerError, match="the server of the split model is gone"):
        local.logits(IDS)
    assert serving.ended() is not None


def test_over_tcp():
    url = f"tcp://127.0.0.1:{free_port()}"
    ends = {}
    other = threading.Thread(
        target=lambda: ends.update(server=connect(url, "server", timeout=TIMEOUT))
    )
    other.start()
    client = connect(url, "client", timeout=TIMEOUT)
    other.join()
    split = split_model(tiny_llama(), 1)
    serving = Serving(SplitServer(split, ends["server"], keep=1))
    with SplitClient(split, client) as local:
        local.logits(IDS)
    assert serving.ended() is None
    assert len(serving.server.received) == 1


def test_what_leaves_can_be_changed(line):
    client, server = line()
    split = split_model(tiny_llama(), 1)
    serving = Serving(SplitServer(split, server, keep=3))
    noise = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        clean = split.bottom.eval().states(IDS)
        expected = split.top.eval().output(clean + noise).logits
    with SplitClient(split, client, on_send=lambda h: h + noise) as local:
        torch.testing.assert_close(local.logits(IDS), expected)
        local.train_step(IDS, IDS)
    assert serving.ended() is None
    first, trained = (next(iter(s.tensors.values())) for s in serving.server.received)
    torch.testing.assert_close(first, clean + noise)
    torch.testing.assert_close(trained, clean + noise)
    assert all(p.grad is not None for p in split.bottom.parameters())


def test_another_model_on_the_other_side_is_refused(line):
    client, server = line()
    serving = Serving(SplitServer(split_model(tiny_llama(layers=3), 2), server))
    with pytest.raises(PeerError, match="have split another model"):
        SplitClient(split_model(tiny_llama(layers=3), 1), client)
    assert isinstance(serving.ended(), SplitError)


def test_a_tied_matrix_is_trained_only_where_one_side_has_it(line):
    client, server = line()
    model = tiny_gpt2(dropout=0.0)
    split = split_model(model, 1)
    serving = Serving(SplitServer(split, server))
    with SplitClient(split, client) as local:
        local.logits(IDS)
        with pytest.raises(SplitError, match="one matrix"):
            local.train_step(IDS, IDS)
    assert serving.ended() is None
    assert split_model(model, 1, head="client").drifts is None

    client, server = line()
    split = split_model(model, 1, untie=True)
    serving = Serving(SplitServer(split, server))
    with SplitClient(split, client) as local:
        local.train_step(IDS, IDS)
    assert serving.ended() is None
    head, embedding = split.top.model.lm_head.weight, split.bottom.model.transformer.wte.weight
    assert head is not embedding
    torch.testing.assert_close(head, embedding)
    whole = tiny_gpt2(dropout=0.0)
    whole(input_ids=IDS, labels=IDS).loss.backward()
    torch.testing.assert_close(head.grad + embedding.grad, whole.lm_head.weight.grad)

    model.transformer.wte.weight.requires_grad_(False)
    assert split_model(model, 1).drifts is None


def test_lora_and_checkpointing(line):
    peft = pytest.importorskip("peft")

    def model():
        with own_rng(0):
            config = peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False)
            lora = peft.get_peft_model(tiny_llama(layers=3), config)
        lora.enable_input_require_grads()
        lora.base_model.model.gradient_checkpointing_enable({"use_reentrant": False})
        return lora.train()

    whole = model()
    loss = whole(input_ids=IDS, labels=IDS).loss
    loss.backward()
    client, server = line()
    split = split_model(model(), 2)
    serving = Serving(SplitServer(split, server))
    with SplitClient(split, client) as local:
        torch.testing.assert_close(local.train_step(IDS, IDS), loss.detach())
        torch.testing.assert_close(local.logits(IDS), whole.eval()(input_ids=IDS).logits)
    assert serving.ended() is None
    expected = split_model(whole, 2)
    for part, peer in ((split.bottom, expected.bottom), (split.top, expected.top)):
        pairs = list(zip(part.parameters(), peer.parameters(), strict=True))
        assert sum(a.grad is not None for a, _ in pairs) > 0
        for a, b in pairs:
            assert (a.grad is None) == (b.grad is None)
            assert a.grad is None or torch.allclose(a.grad, b.grad, rtol=1e-5, atol=1e-7)


def test_parts_hold_what_they_need_and_no_copy():
    model = tiny_llama(layers=4)
    split = split_model(model, 1, head="client")
    whole = {id(p): n for n, p in model.named_parameters()}
    parts = [{whole[id(p)] for p in part.parameters()} for part in (split.bottom, split.top)]
    tail = {whole[id(p)] for p in split.tail.parameters()}
    assert parts[0] == {n for n in whole.values() if "embed" in n or "layers.0" in n}
    assert parts[1] == {n for n in whole.values() if ".layers." in n} - parts[0]
    assert tail == {"model.norm.weight", "lm_head.weight"}
    assert model.config.num_hidden_layers == len(model.model.layers) == 4


def test_the_model_is_left_as_it_was():
    model = tiny_gpt2().train()
    state, before = torch.get_rng_state(), {n: p.clone() for n, p in model.named_parameters()}
    observed = []
    handle = model.register_forward_hook(lambda *_: observed.append(1))
    split = split_model(model, 1)
    assert not observed
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    assert not split.bottom.model._forward_hooks
    handle.remove()


def test_the_example_of_its_docstring_runs():
    results = doctest.testmod(split.cut)
    assert results.attempted > 0
    assert results.failed == 0


EXAMPLE = Path(__file__).parents[2] / "examples" / "split_learning" / "run.py"


@pytest.mark.slow
@pytest.mark.ddp
def test_the_server_reads_the_message(tmp_path, monkeypatch, capsys) -> None:
    spawn_imported(monkeypatch)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", [str(EXAMPLE)])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    printed = capsys.readouterr().out
    assert printed.startswith("message: 29 tokens")
    assert float(printed.split()[-1]) > 0.8
    assert "chainsaw" not in printed, "the text is shown with --reveal only"


# A model that is split between a client and a server gives what the whole model gives.


WHOLE_MODEL_TIMEOUT = 600.0
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
    "llama, embeddings only": Case(llama, 0, "server"),
    "llama, head only": Case(llama, 3, "server"),
    "llama bf16": Case(llama, 1, "server", torch.bfloat16),
    "bert": Case(partial(tiny_bert_classifier, dropout=0.0), 1, "server"),
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
    server = SplitServer(
        split, connect(url, "server", timeout=WHOLE_MODEL_TIMEOUT), optimizer=SGD, keep=3
    )
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
        channel = connect(url, "client", timeout=WHOLE_MODEL_TIMEOUT)
        with SplitClient(split, channel, optimizer=SGD) as client:
            output["losses"] = [client.train_step(x, y, **z) for x, y, z in batches(name)]
            output["logits"] = client.logits(ids, mask)
        server.join(WHOLE_MODEL_TIMEOUT)
    return results


@pytest.fixture(scope="module")
def unsplit():
    """The same steps on the whole model: itself, its losses, its last logits and states."""

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
        return model, losses, output

    return {name: run(name) for name in CASES}


def near(a, b) -> bool:
    return a.dtype == b.dtype and torch.allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_training_is_that_of_the_whole_model(runs, unsplit, name):
    run, (model, losses, _) = runs[name], unsplit[name]
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
def test_what_is_kept_is_what_was_sent(runs, unsplit, name):
    run, (_, _, output) = runs[name], unsplit[name]
    case = CASES[name]
    _, mask = prompt()
    assert len(run["received"]) == 3, "four were sent, three are kept"
    read = run["received"][-1]
    assert [s.step for s in run["received"]] == [1, 2, 3]
    assert read.stage == "shared"
    [(place, states)] = read.tensors.items()
    assert place == run["split"].layer_name
    position = case.layer
    if position < len(output.hidden_states) - 1:
        assert near(states[mask == 1], output.hidden_states[position][mask == 1])
    assert torch.equal(read.attention_mask, mask)
    assert read.position_ids is None


@pytest.mark.parametrize("name", [n for n in CASES if "U" in n])
def test_with_the_head_on_the_client_its_gradient_crosses(runs, name):
    returned = runs[name]["returned"]
    assert len(returned) == min(3, runs[name]["steps"])
    [(place, gradient)] = returned[-1].tensors.items()
    assert place == runs[name]["split"].last_name
    assert gradient.shape == (3, 7, 16)
    assert bool(gradient.any())
