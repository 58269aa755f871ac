"""What a client shares of a round, also under compression by NumPy, and what is refused."""

from __future__ import annotations

import copy
import json
import math

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model

from lightning_fedleak.attacks import AlignedFlatChat, BagOfWords, SubspaceWords
from lightning_fedleak.attacks.base import WordGuess
from lightning_fedleak.defenses import DefenseError, GradientCompression
from lightning_fedleak.federation import (
    SUM,
    ClientDP,
    ClientReleaseSettings,
    OutgoingUpdates,
    RoundGate,
    RoundObserver,
    UpdateError,
    difference,
    joint_norm,
    observe,
    parameter_names,
    trained_state,
)
from lightning_fedleak.federation.updates import read_state
from lightning_fedleak.model.snapshots import AVERAGED, Stage
from tests.callbacks.runs import Probe
from tests.defenses.test_gradient_compression import largest
from tests.federation.rounds import ADAMW, SGD, batches, model, round_settings, train
from tests.federation.test_observer import lines, observer, texts
from tests.helpers.models import tiny_gpt2
from tests.helpers.notices import announced


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


@pytest.mark.parametrize(
    "change",
    [
        torch.zeros(4_000_000, 1, 1),  # 16 MB, whose sum has 1 TB
        torch.tensor(0.1),
        torch.ones(1, 256),
        torch.ones(256, 256, dtype=torch.int64),
        torch.ones(256, 256, dtype=torch.bool),
        torch.ones(256, 256, dtype=torch.complex64),
    ],
    ids=lambda t: f"{t.dtype} {tuple(t.shape)}",
)
def test_a_change_of_another_form_is_refused_before_any_sum(change):
    sent = {"w": torch.zeros(256, 256)}
    with pytest.raises(UpdateError, match=r"the update has 'w' with shape .*, which was not sent"):
        read_state({"w": change}, sent)
    for dtype in (torch.float64, torch.bfloat16):  # as a mean of a server and a model in half have
        read = read_state({"w": torch.ones(256, 256, dtype=dtype)}, sent)
        assert torch.equal(read["w"], torch.ones(256, 256))


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


F1, SHARE, LR = "leakage/probe/f1", 0.1, 0.05
WORDS = ("subspace_words", "aligned_flatchat")


class Reading(Probe):
    """Names the batch's own words, or none that are there while ``wrong``."""

    reads_compressed = frozenset(("topk", "low_rank"))

    def __init__(self):
        super().__init__()
        self.told = []
        self.wrong = False

    def run(self, view, query=None):
        super().run(view, query)
        self.told.append((view.gradients[-1].compression, view.gradients[-1].noise_std))
        data = batches(1 + view.gradients[-1].step)
        words = torch.cat([b["labels"][:, 1:].flatten() for b in data])
        return WordGuess(torch.tensor([0]) if self.wrong else words.unique())


def topk(**settings):
    return GradientCompression("topk", share=SHARE, **settings)


def client(folder, compression, *gates, attack=None, dp=None, **settings):
    attacks = [Probe(k=14) if attack is None else attack]
    watched = observer(folder, attacks=attacks, defenses=[compression])
    return OutgoingUpdates(watched, gates, dp, **settings)


def rounds(out, n=1, begin=0):
    """Rounds of one client: what was sent, what it made of it, and what left."""
    net = model()
    sent = trained_state(net)
    for round_ in range(begin, begin + n):
        data = batches(1 + round_)
        returned = train(net, data)
        yield sent, returned, out.leaves(round_, sent, returned, data)


def change(sent, state):
    return {n: t.double().numpy() for n, t in difference(sent, state).items()}


def close(a, b):
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_allclose(a[name], b[name], atol=2e-7, err_msg=name)


# ---- what leaves --------------------------------------------------------------------------------


def test_without_error_feedback_each_round_leaves_its_own_largest_entries(tmp_path):
    out = client(tmp_path, topk(error_feedback=False))
    for sent, returned, leaving in rounds(out, 2):
        expected = {n: largest(t, SHARE) for n, t in change(sent, returned).items()}
        close(change(sent, leaving.state), expected)
    assert out.compression.memory == {}


@pytest.mark.parametrize("method", ["topk", "sign", "low_rank"])
def test_what_left_and_what_is_remembered_are_all_updates(tmp_path, method):
    out = client(tmp_path, GradientCompression(method, share=SHARE, rank=2))
    missing = {}
    for sent, returned, leaving in rounds(out, 3):
        update, left = change(sent, returned), change(sent, leaving.state)
        missing = {n: missing.get(n, 0.0) + update[n] - left[n] for n in update}
    residuals = {n: out.compression.memory[f"residual/{n}"].double().numpy() for n in missing}
    close(residuals, missing)
    assert max(np.abs(t).max() for t in residuals.values()) > 1e-4


def test_what_is_withheld_is_not_remembered(tmp_path):
    attack = Reading()
    out = client(tmp_path, topk(), RoundGate(F1, at_most=0.5), attack=attack)
    with announced("withheld"):
        [(_, _, first)] = rounds(out)
    assert first.withheld
    assert out.compression.memory == {}
    attack.wrong = True
    [(sent, returned, second)] = rounds(out, begin=1)
    assert not second.withheld
    update = change(sent, returned)
    left = {n: largest(t, SHARE) for n, t in update.items()}
    close(change(sent, second.state), left)
    attack.wrong = False
    remembered = {n: t.clone() for n, t in out.compression.memory.items()}
    with announced("withheld"):
        [(_, _, third)] = rounds(out, begin=2)
    assert third.withheld
    assert all(torch.equal(out.compression.memory[n], t) for n, t in remembered.items())
    close(
        {n: remembered[f"residual/{n}"].double().numpy() for n in update},
        {n: update[n] - left[n] for n in update},
    )


def test_an_update_that_cannot_be_read_is_not_remembered(tmp_path):
    leaving = client(tmp_path, topk())
    start = trained_state(model())
    broken = {n: torch.full_like(t, math.nan) for n, t in start.items()}
    with announced("NaN"):
        assert leaving.leaves(0, start, broken, batches(1)).state is None
    assert leaving.compression.memory == {}


def test_each_client_has_a_memory_of_its_own(tmp_path):
    shared = topk()
    first, second = (client(tmp_path / str(i), shared) for i in range(2))
    [(_, _, a)] = rounds(first)
    [(_, _, b)] = rounds(second)
    assert all(torch.equal(a.state[n], b.state[n]) for n in a.state)
    assert shared.memory == {}
    assert first.compression.memory.keys() == second.compression.memory.keys() != set()


# ---- under noise of the client's own ------------------------------------------------------------


def dp(**settings):
    settings = {"target_delta": 1e-5, "trust": "local"} | settings
    return ClientDP(0.5, 2.0, clients=10, release=ClientReleaseSettings(seed=4), **settings)


@pytest.mark.parametrize("withheld", [False, True])
def test_noise_comes_first_and_all_that_is_remembered_is_noised(tmp_path, withheld):
    gates = [RoundGate(F1, at_most=-1.0)] if withheld else []
    out = client(tmp_path, topk(), *gates, attack=Reading(), dp=dp())
    [(sent, returned, leaving)] = rounds(out)
    assert leaving.withheld == withheld
    update = difference(sent, returned)
    twin = dp()
    twin.rehearsed(update, sent)
    noised = twin.privatized(None if withheld else update, sent)
    left = change(sent, leaving.state)
    for name, values in left.items():
        exact = noised[name].double().numpy()
        np.testing.assert_allclose(values, largest(exact, SHARE), atol=1e-6)
        residual = out.compression.memory[f"residual/{name}"].double().numpy()
        np.testing.assert_allclose(residual, exact - values, atol=1e-6)


@pytest.mark.parametrize("trust", ["central", "secure_aggregation"])
def test_noise_that_comes_later_or_is_of_a_sum_is_refused(tmp_path, trust):
    with pytest.raises(DefenseError, match=rf"ClientDP\(trust='{trust}'\).*trust='local'"):
        client(tmp_path, topk(), dp=dp(trust=trust))


# ---- what attacks see and are told --------------------------------------------------------------


@pytest.mark.parametrize("method", ["topk", "low_rank"])
def test_without_error_feedback_attacks_see_what_leaves(tmp_path, method):
    attack = Reading()
    compression = GradientCompression(method, share=SHARE, rank=2, error_feedback=False)
    out = client(tmp_path, compression, attack=attack)
    [*found] = rounds(out, 2)
    assert attack.told == [(method, 0.0)] * 2
    for (sent, _, leaving), (_, _, seen) in zip(found, attack.seen, strict=True):
        left = -change(sent, leaving.state)["lm_head.weight"] / LR
        np.testing.assert_allclose(seen.numpy(), left, atol=1e-5)


def test_with_error_feedback_attacks_see_what_goes_in(tmp_path):
    attack = Probe(k=14)
    out = client(tmp_path, topk(), attack=attack)
    [(sent, returned, leaving)] = rounds(out)
    [(_, _, seen)] = attack.seen
    np.testing.assert_allclose(
        seen.numpy(), -change(sent, returned)["lm_head.weight"] / LR, atol=1e-5
    )
    assert leaving.look.values[F1] > 0.5


def test_an_attack_that_does_not_read_the_compression_is_unknown(tmp_path):
    out = client(tmp_path, topk(error_feedback=False), attack=Probe(k=14))
    [(_, _, leaving)] = rounds(out)
    assert math.isnan(leaving.look.values[F1])
    [line] = lines(tmp_path)
    assert "compressed by 'topk'" in line["unknown"]


@pytest.mark.parametrize(
    ("optimizer", "method", "unread"),
    [
        (SGD, "topk", {}),
        (SGD, "int4", {"subspace_words": "compressed by 'int4'"}),
        (ADAMW, "topk", dict.fromkeys(WORDS, "compressed update")),
    ],
)
def test_what_a_compression_hides_in_every_round_is_said_before_the_first(
    tmp_path, optimizer, method, unread
):
    compression = GradientCompression(method, share=SHARE, error_feedback=False)
    words = [SubspaceWords(capacity_seconds=0), AlignedFlatChat(texts(n=8))]
    watched = observer(tmp_path, None, words, 1, optimizer, defenses=[compression])
    for attack in words:
        why = watched.never_judged(f"leakage/{attack.name}/f1") or ""
        assert bool(why) == (attack.name in unread)
        assert unread.get(attack.name, "") in why


@pytest.mark.parametrize(
    ("defers", "who", "expected"),
    [(False, 0, "topk"), (True, 0, AVERAGED), (False, SUM, AVERAGED), (True, SUM, AVERAGED)],
)
def test_a_server_sees_one_update_or_a_mean_of_several(tmp_path, defers, who, expected):
    defenses = [topk(error_feedback=defers)]
    watched = observer(tmp_path, attacks=[Reading()], defenses=defenses, side="server")
    net = model()
    watched.begin(0, trained_state(net))
    watched.look(train(net, batches(1)), who, batches=batches(1))
    [line] = lines(tmp_path)
    unknown = line.get("unknown") or ""
    assert ("were compressed one by one" in unknown) == bool(unknown) == (expected == AVERAGED)
