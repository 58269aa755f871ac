"""The line's manners and the helper's refusals, on two threads; and the example as it is run."""

from __future__ import annotations

import doctest
import runpy
import threading
from pathlib import Path

import pytest
import split.cut
import torch
from split import PeerError, SplitClient, SplitError, SplitServer, connect, split_model

from tests.helpers.models import own_rng, tiny_gpt2, tiny_llama
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
    with SplitClient(split, client, on_send=lambda h: h + noise[:, : h.shape[1]]) as local:
        torch.testing.assert_close(local.logits(IDS), expected)
        local.generate(IDS, 3)
        local.train_step(IDS, IDS)
    assert serving.ended() is None
    first, generated, trained = (next(iter(s.tensors.values())) for s in serving.server.received)
    torch.testing.assert_close(first, clean + noise)
    torch.testing.assert_close(trained, clean + noise)
    assert generated.shape == (2, 8, 16)
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


@pytest.mark.ddp
def test_the_server_reads_the_message(tmp_path, monkeypatch, capsys) -> None:
    spawn_imported(monkeypatch)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", [str(EXAMPLE)])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    printed = capsys.readouterr().out
    message, reply = printed.splitlines()
    assert message.startswith("message: 29 tokens")
    assert float(message.split()[-1]) > 0.8
    assert float(reply.split()[-1]) > 0.5
    assert "chainsaw" not in printed, "the text is shown with --reveal only"
