"""What a client shares of a round and what is refused; a report of a whole federation."""

from __future__ import annotations

import copy
import json
import math

import pytest
import torch
from peft import LoraConfig, get_peft_model

from lightning_fedleak.attacks import BagOfWords
from lightning_fedleak.federation import (
    ClientDP,
    RoundObserver,
    UpdateError,
    difference,
    joint_norm,
    observe,
    parameter_names,
    trained_state,
)
from lightning_fedleak.model.snapshots import Stage
from tests.federation.rounds import SGD, batches, model, round_settings, train
from tests.helpers.models import tiny_gpt2


def some() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {"w": torch.randn(3, 2, generator=generator), "b": torch.randn(4, generator=generator)}


def moved(state, by=0.5):
    return {n: t + by if t.is_floating_point() else t.clone() for n, t in state.items()}


def sgd(lr=0.1):
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)


def test_of_several_steps_it_is_the_sum_of_their_gradients():
    net, data = model(), batches(1, 3)
    sent = trained_state(net)
    observed = observe(sent, train(net, data), SGD(list(net.parameters())), 3, round_=3)
    assert (observed.step, observed.stage, observed.local_steps) == (3, Stage.SHARED, 3)
    total = {n: torch.zeros_like(p) for n, p in net.named_parameters()}
    stepping = SGD(list(net.parameters()))
    for batch in data:
        stepping.zero_grad()
        net(**batch).loss.backward()
        for name, p in net.named_parameters():
            total[name] += p.grad
        stepping.step()
    assert observed.tensors.keys() == total.keys()
    for name, update in observed.tensors.items():
        torch.testing.assert_close(update, total[name], rtol=1e-2, atol=2e-5)


def without(state, name):
    return {n: t for n, t in state.items() if n != name}


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (lambda s: without(moved(s), "b"), "only one of both has 'b'"),
        (lambda s: moved(s) | {"c": torch.zeros(1)}, "only one of both has 'c'"),
        (lambda s: moved(s) | {"w": torch.zeros(2, 3)}, r"shape \(3, 2\) in float32 and came"),
        (lambda s: {n: t.bfloat16() for n, t in moved(s).items()}, "came back with .* in bfloat16"),
        (lambda s: moved(s) | {"b": torch.tensor([1.0, math.nan, 1, 1])}, "NaN or infinity in 'b'"),
        (lambda s: moved(s) | {"b": torch.full((4,), math.inf)}, "NaN or infinity in 'b'"),
        (lambda s: {n: t.clone() for n, t in s.items()}, "exactly what it was sent"),
    ],
)
def test_what_cannot_be_read_is_refused_in_words(broken, message):
    sent = some()
    with pytest.raises(UpdateError, match=message):
        observe(sent, broken(sent), sgd(), 1)


@pytest.mark.parametrize("rate", [0.0, -0.1, math.nan, math.inf])
def test_an_update_without_a_scale_is_refused(rate):
    with pytest.raises(UpdateError, match="learning rate"):
        observe(some(), moved(some()), sgd(), 1, learning_rate=rate)


def test_several_learning_rates_are_refused():
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    groups = [{"params": [p], "lr": lr} for p, lr in zip(parameters, (0.1, 0.2), strict=True)]
    with pytest.raises(UpdateError, match="2 learning rates"):
        observe(some(), moved(some()), torch.optim.SGD(groups), 1)


def test_what_is_not_trained_must_come_back_as_it_was():
    sent = some() | {"frozen": torch.ones(2), "count": torch.tensor(3)}
    returned = moved(some()) | {"frozen": torch.ones(2), "count": torch.tensor(3)}
    observed = observe(sent, returned, sgd(), 1, trained=["w", "b"])
    assert observed.tensors.keys() == {"w", "b"}
    for name in ("frozen", "count"):
        changed = returned | {name: returned[name] + 1}
        with pytest.raises(UpdateError, match=f"'{name}' is not trained"):
            observe(sent, changed, sgd(), 1, trained=["w", "b"])


def test_half_precision_is_subtracted_in_single():
    sent = {"w": torch.full((3,), 1.0, dtype=torch.bfloat16)}
    observed = difference(sent, {"w": sent["w"] + torch.tensor(2**-7, dtype=torch.bfloat16)})
    assert observed["w"].dtype == torch.float32
    assert observed["w"].tolist() == [2**-7] * 3


def test_the_joint_norm_is_that_of_one_long_vector():
    state = some() | {"large": torch.full((10_000,), 1e18)}
    long = torch.cat([t.double().flatten() for t in state.values()])
    assert joint_norm(state) == pytest.approx(float(long.norm()), rel=1e-12)
    assert joint_norm({}) == 0.0


# ---- names --------------------------------------------------------------------------------------


def test_tied_parameters_are_known_by_both_names():
    names = parameter_names(tiny_gpt2())
    assert names["lm_head.weight"] == names["transformer.wte.weight"]


def test_the_name_of_an_adapter_leaves_no_other_name_shorter():
    model = get_peft_model(tiny_gpt2(), LoraConfig(target_modules=["c_attn"]), adapter_name="c")
    names = parameter_names(model)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    inner = "transformer.h.0.attn.c_attn.lora_A.weight"
    assert names[inner] == f"base_model.model.{inner.removesuffix('weight')}c.weight"
    assert names[inner] in trained


CLIENTS, ROUNDS = 3, 2


def watched(folder, **settings):
    arguments, rare = round_settings({"attacks": [BagOfWords()]} | settings)
    return RoundObserver(copy.deepcopy(model()), SGD, 2, folder=folder, settings=rare, **arguments)


def test_a_report_says_what_clients_have_spent_and_for_whom_it_holds(tmp_path):
    """Two fits on the same clients, drawn without replacement, composed as such."""
    from lightning_fedleak.report import write

    net = model()
    for fit in range(2):
        dp = ClientDP(
            0.5, 4.0, clients=30, sampling="fixed", per_round=3, target_delta=1e-5,
            ledger=tmp_path / f"ledger{fit}",
        )  # fmt: skip
        server = watched(tmp_path / f"{fit}", defenses=[dp])
        for round_ in range(2):
            server.begin(round_, trained_state(net))
            data = batches(round_)
            server.look(train(net, data), batches=data)
            dp.mean(dict.fromkeys(range(3)), trained_state(net))
        server.end()
    page, result, *_ = write([tmp_path])
    report = json.loads(result.read_text())
    [spent] = report["runs"][1]["privacy"]
    assert spent["epsilon"] == math.ceil(dp.privacy.epsilon * 1e3) / 1e3  # three digits, up
    assert "one client, all of its data, replaced" in spent["statement"]
    assert "rounds are a fixed share of 0.1, drawn again each time" in spent["statement"]
    assert "client_dp" in page.read_text()
