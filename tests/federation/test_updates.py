"""What a client shares of a round, also under compression by NumPy, and what is refused."""

import copy
import json
import math
import os
import signal
from dataclasses import fields

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model

from lightning_fedleak.attacks import AlignedFlatChat, BagOfWords, SubspaceWords
from lightning_fedleak.attacks.base import WordGuess
from lightning_fedleak.defenses import BudgetSpent, DefenseError, GradientCompression
from lightning_fedleak.defenses.accounting.accounting import ORDERS, epsilon_of, rdp_of
from lightning_fedleak.defenses.noise import gaussian_epsilon
from lightning_fedleak.federation import (
    SUM,
    ClientDP,
    ClientReleaseSettings,
    OutgoingUpdates,
    RoundGate,
    RoundObserver,
    UpdateError,
    clipped,
    difference,
    joint_norm,
    observe,
    parameter_names,
    trained_state,
)
from lightning_fedleak.federation.updates import read_state
from lightning_fedleak.model.snapshots import AVERAGED, Stage
from lightning_fedleak.strategies import DefendedStrategy
from tests.callbacks.runs import Probe
from tests.defenses.test_defenses import largest
from tests.federation.rounds import ADAMW, SGD, batches, model, round_settings, train
from tests.federation.test_observer import lines, observer, texts
from tests.helpers.models import tiny_gpt2
from tests.helpers.notices import announced

pytest.importorskip("opacus")


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


# Differential privacy of a whole client: what is clipped, noised, counted and refused.


DELTA = 1e-5
LIKE = {"a": torch.zeros(3, 2), "b": torch.zeros(4)}
ONCE = (Phase.explicit, Phase.generate)


def update(seed, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return {n: scale * torch.randn(t.shape, generator=generator) for n, t in LIKE.items()}


def client_dp_dp(noise=1.0, clip=1.0, clients=10, **more):
    rare = [f.name for f in fields(ClientReleaseSettings) if f.name in more]
    if rare:
        more["release"] = ClientReleaseSettings(**{name: more.pop(name) for name in rare})
    return ClientDP(clip, noise, clients=clients, **({"target_delta": DELTA} | more))


def long(tensors):
    return torch.cat([tensors[n].double().flatten() for n in LIKE])


# ---- clipping -----------------------------------------------------------------------------------


@given(seed=st.integers(0, 10**6), scale=st.floats(1e-6, 1e6), clip=st.floats(1e-3, 1e3))
@settings(phases=ONCE)
def test_the_joint_norm_is_clipped(seed, scale, clip):
    given = update(seed, scale)
    out = clipped(given, clip, LIKE)
    whole = long(given)
    expected = whole * min(1.0, clip / math.sqrt(math.fsum((whole**2).tolist())))
    torch.testing.assert_close(long(out), expected, rtol=1e-10, atol=0)
    assert math.sqrt(math.fsum((long(out) ** 2).tolist())) <= clip


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (update(0) | {"b": torch.full((4,), math.nan)}, "NaN or infinity"),
        (update(0) | {"b": torch.full((4,), -math.inf)}, "NaN or infinity"),
        ({n: torch.full(t.shape, 1e200, dtype=torch.float64) for n, t in LIKE.items()}, "overflow"),
        (update(0) | {"c": torch.zeros(1)}, "'c' has another name or shape"),
        (update(0) | {"b": torch.zeros(2)}, "'b' has another name or shape"),
    ],
)
def test_what_has_no_norm_or_another_form_is_no_update(given, message):
    with pytest.raises(UpdateError, match=message):
        clipped(given, 1.0, LIKE)


# ---- the mean of a trusted server ---------------------------------------------------------------


@given(
    seeds=st.lists(st.integers(0, 999), min_size=2, max_size=5, unique=True),
    scale=st.floats(0.1, 100),
    fixed=st.booleans(),
)
@settings(phases=ONCE)
def test_neighbours_are_no_further_apart_than_is_accounted(seeds, scale, fixed):
    clip, n = 0.7, 5
    more = {"sampling": "fixed", "per_round": n, "clients": 20} if fixed else {"clients": n}
    first, *rest = (update(s, scale) for s in seeds)
    here = dict(enumerate([first, *rest]))
    # Replaced by the worst there is, or taken away.
    there = here | {0: {n: -t for n, t in first.items()} if fixed else None}
    a, b = (client_dp_dp(1.0, clip, seed=3, **more).mean(x, LIKE).update for x in (here, there))
    apart = float((long(a) - long(b)).norm())
    assert apart <= (2 if fixed else 1) * clip / n * (1 + 1e-5)
    assert apart >= (2 if fixed else 1) * min(clip, joint_norm(first)) / n * (1 - 1e-3)


def test_the_sum_is_divided_by_the_number_expected():
    """Whoever is there: with noise that is next to nothing."""
    parts = {c: update(c, 0.01) for c in range(3)}
    want = sum(long(u) for u in parts.values())
    for more, expected in (
        ({"clients": 10}, 10),
        ({"clients": 10, "sampling": "poisson", "per_round": 2.5}, 2.5),
        ({"clients": 10, "sampling": "fixed", "per_round": 4}, 4),
    ):
        result = client_dp_dp(1e-9, 1.0, **more).mean(parts | {9: None}, LIKE)
        torch.testing.assert_close(long(result.update), want / expected, rtol=1e-4, atol=1e-7)
        assert result.zeros == {9: "failed or withheld"}


def test_updates_that_arrive_one_by_one_are_released_as_a_mean_of_all():
    """With a seed to the bit: what cannot be read and a client that is silent are zeros."""
    unread = {2: update(2, math.nan), 4: update(4) | {"b": torch.zeros(7)}, 5: {"a": LIKE["a"]}}
    updates = {0: update(0), 1: None, 3: update(3, 5.0)} | unread
    one, other = (client_dp_dp(0.3, 0.5, clients=6, seed=7) for _ in range(2))
    expected = one.mean(updates, LIKE)
    sums = other.begin(updates, LIKE)
    for client in (0, 2, 3, 4, 5):
        sums.add(client, updates[client])
    assert other.accountant.steps == 0
    release = sums.end()
    assert other.accountant.steps == 1
    assert all(torch.equal(release.update[n], t) for n, t in expected.update.items())
    assert release.zeros == expected.zeros
    assert release.zeros.keys() == {1, *unread}


def test_a_second_update_of_a_client_and_one_that_was_not_drawn_are_refused():
    sums = client_dp_dp(seed=0).begin([0, 1], LIKE)
    sums.add(0, update(0))
    total = {n: t.clone() for n, t in sums.total.items()}
    for client in (0, 2):
        with pytest.raises(UpdateError, match=f"client {client}, which was not sampled or sent"):
            sums.add(client, update(1))
        with pytest.raises(UpdateError, match=f"client {client}, which was not sampled or sent"):
            sums.add_returned(client, LIKE, {})
    assert all(torch.equal(sums.total[n], t) for n, t in total.items())
    assert sums.zeros.keys() == {1}
    sums.add_returned(1, LIKE, {})  # cannot be read, and takes the turn of its client
    with pytest.raises(UpdateError, match="client 1, which was not sampled or sent"):
        sums.add(1, update(1))


# ---- noise --------------------------------------------------------------------------------------

WIDE = {"w": torch.zeros(200, 200)}


def spread(tensors):
    return float(tensors["w"].double().std())


def test_noise_is_as_large_as_it_is_said_to_be():
    central = client_dp_dp(0.8, 2.0, clients=5)
    assert spread(central.mean({}, WIDE).update) == pytest.approx(0.8 * 2.0 / 5, rel=0.02)
    assert central.mean_noise_std == pytest.approx(0.32)
    fixed = client_dp_dp(0.8, 2.0, clients=5, sampling="fixed", per_round=2)
    assert spread(fixed.mean({}, WIDE).update) == pytest.approx(0.8 * 2.0 / 2, rel=0.02)
    local = client_dp_dp(0.8, 2.0, clients=5, trust="local")
    assert spread(local.privatized(None, WIDE)) == pytest.approx(1.6, rel=0.02)
    assert local.own_noise_std == pytest.approx(1.6)


def test_shares_add_up_to_the_whole_noise_without_the_dropouts():
    each = [
        client_dp_dp(0.8, 2.0, clients=9, trust="secure_aggregation", dropouts=5) for _ in range(4)
    ]
    total = sum(one.privatized(None, WIDE)["w"] for one in each)
    assert float(total.std()) == pytest.approx(1.6, rel=0.02)


def test_no_noise_is_used_twice_and_no_global_generator_is_touched():
    torch.manual_seed(1)
    np.random.seed(1)
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    defense, twin = client_dp_dp(trust="local"), client_dp_dp(trust="local")
    drawn = [defense.rehearsed(None, LIKE), *(defense.privatized(None, LIKE) for _ in range(2))]
    drawn.append(twin.privatized(None, LIKE))
    flat = [long(d) for d in drawn]
    assert all(not torch.equal(a, b) for i, a in enumerate(flat) for b in flat[:i])
    for column in torch.stack(flat).T:  # not one number is repeated
        assert len(column.unique()) == len(flat)
    assert torch.equal(before[0], torch.get_rng_state())
    assert np.array_equal(before[1], np.random.get_state()[1])


def test_a_rehearsal_is_no_release():
    defense = client_dp_dp(trust="local")
    defense.rehearsed(update(0), LIKE)
    assert defense.accountant.steps == 0
    defense.privatized(update(0), LIKE)
    assert defense.accountant.steps == 1


def test_who_withholds_sends_what_nan_sends():
    defenses = [client_dp_dp(trust="local", seed=5) for _ in range(2)]
    nan = update(0) | {"b": torch.full((4,), math.nan)}
    with pytest.warns(UserWarning, match="Zero leaves in its place"):
        a = defenses[0].privatized(nan, LIKE)
    b = defenses[1].privatized(None, LIKE)
    assert torch.equal(long(a), long(b))


# ---- the account --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["prv", "rdp"])
@pytest.mark.parametrize(("sigma", "rate", "rounds"), [(0.8, 0.1, 20), (3, 1, 40)])
def test_poisson_rounds_are_accounted(kind, sigma, rate, rounds):
    more = {"sampling": "poisson", "per_round": 1000 * rate} if rate < 1 else {}
    defense = client_dp_dp(sigma, clients=1000, accountant=kind, **more)
    for _ in range(rounds):
        defense._record_release()
    assert defense.privacy.epsilon == epsilon_of([(sigma, rate, rounds)], DELTA, kind)
    assert defense.privacy.releases == rounds


@pytest.mark.slow
@given(sigma=st.floats(0.3, 60), rate=st.floats(1e-4, 0.999))
@settings(phases=ONCE)
def test_drawing_a_fixed_number_never_costs_more_than_taking_all(sigma, rate):
    ours = rdp_of(sigma, rate, "without_replacement")
    assert (ours >= 0).all()
    assert (ours <= np.asarray(ORDERS) / 2 / sigma**2 * (1 + 1e-12)).all()
    assert (np.diff(ours) >= -1e-12 * ours[1:]).all()


@pytest.mark.parametrize("trust", ["local", "secure_aggregation"])
def test_sampling_does_not_help_against_a_server_that_knows_who_takes_part(trust):
    defense = client_dp_dp(2.0, clients=100, sampling="fixed", per_round=10, trust=trust)
    for _ in range(7):
        defense.privatized(update(1), LIKE)

    exact = gaussian_epsilon(sigma=1 / math.sqrt(7), delta=DELTA)
    assert exact <= defense.privacy.epsilon <= 1.01 * exact


def test_a_fixed_number_is_accounted_by_the_tightest():
    defense = client_dp_dp(clients=200, sampling="fixed", per_round=2)
    defense._record_release()
    assert defense.settings()["accountant"] == "prv"
    expected = epsilon_of([(0.5, 0.01, 1)], DELTA, "prv", "without_replacement")
    assert defense.privacy.epsilon == expected


@pytest.mark.slow
def test_noise_is_found_from_a_target():
    for more in (
        {},
        {"sampling": "poisson", "per_round": 2},
        {"sampling": "fixed", "per_round": 2},
    ):
        defense = client_dp_dp(None, target_epsilon=3.0, rounds=5, **more)
        for _ in range(5):
            defense.mean({0: update(0)}, LIKE)
        assert 2.8 < defense.privacy.epsilon <= 3.0
        with pytest.raises(BudgetSpent, match="ClientDP: after 5 releases"):
            defense.mean({0: update(0)}, LIKE)
        assert defense.accountant.steps == 5


def test_noise_may_be_turned_up_within_a_filters_budget():
    defense = client_dp_dp(4.0, target_epsilon=4.0, accountant="filter", trust="local")
    assert defense.can_harden
    defense.privatized(update(0), LIKE)
    assert defense.harden() == "clientdp: noise multiplier 2 -> 4"  # over the sensitivity
    assert defense.noise_multiplier == 8.0
    spent = []
    while defense._budget.affords_another():
        defense.privatized(None, LIKE)
        spent.append(defense.accountant._share(defense.accountant.history))
    with pytest.raises(BudgetSpent):
        defense.privatized(None, LIKE)
    assert spent == sorted(spent)
    assert spent[-1] <= 1 < 2 * spent[-1]
    assert {row[0] for row in defense.accountant.history} == {2.0, 4.0}
    assert client_dp_dp().harden() is None


def test_a_seed_costs_the_guarantee():
    defense = client_dp_dp(seed=1)
    defense.mean({}, LIKE)
    assert defense.privacy.epsilon == math.inf
    assert defense.guarantee.startswith("none")


# ---- the ledger ---------------------------------------------------------------------------------


def test_a_killed_server_forgets_no_release(tmp_path):
    path = tmp_path / "ledger"
    child = os.fork()
    if child == 0:  # is killed between the account and the release
        defense = client_dp_dp(clients=7, ledger=path)
        defense.mean({0: update(0)}, LIKE)
        defense._add_noise = lambda *a, **k: os.kill(os.getpid(), signal.SIGKILL)
        defense.mean({0: update(0)}, LIKE)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    again = client_dp_dp(clients=7, ledger=path)
    assert again.privacy.releases == 2
    again.mean({}, LIKE)
    assert client_dp_dp(clients=7, ledger=path).accountant.steps == 3


def test_a_spent_budget_stays_spent(tmp_path):
    def make():
        return client_dp_dp(None, target_epsilon=1.0, rounds=2, ledger=tmp_path / "ledger")

    first = make()
    for _ in range(2):
        first.mean({}, LIKE)
    with pytest.raises(BudgetSpent):
        make().mean({}, LIKE)


def test_a_ledger_of_other_terms_is_refused(tmp_path):
    path = tmp_path / "ledger"
    client_dp_dp(clients=7, ledger=path).mean({}, LIKE)
    for more in (
        {"clients": 8},
        {"clients": 7, "sampling": "poisson", "per_round": 7},
        {"clients": 7, "trust": "local"},
    ):
        with pytest.raises(DefenseError, match="other terms"):
            client_dp_dp(ledger=path, **more)
    (tmp_path / "ledger.terms").unlink()
    with pytest.raises(DefenseError, match="written under other terms"):
        client_dp_dp(clients=7, ledger=path)


def test_a_ledger_that_cannot_be_written_lets_nothing_out(tmp_path):
    with pytest.raises(DefenseError, match="cannot be used"):
        client_dp_dp(ledger=tmp_path / "missing" / "ledger")
    defense = client_dp_dp(ledger=tmp_path / "ledger")
    defense.mean({}, LIKE)
    (tmp_path / "ledger").write_text("")
    with pytest.raises(DefenseError, match="changed by something else"):
        defense.mean({}, LIKE)
    assert defense.accountant.steps == 1


def test_terms_of_which_a_full_disk_took_half_are_written_anew(tmp_path):
    path, terms = tmp_path / "ledger", tmp_path / "ledger.terms"
    client_dp_dp(clients=7, ledger=path)
    whole = terms.read_bytes()
    for half in (b"", whole[:20]):
        terms.write_bytes(half)
        client_dp_dp(clients=7, ledger=path)
        assert terms.read_bytes() == whole
    client_dp_dp(clients=7, ledger=path).mean({}, LIKE)
    terms.write_bytes(whole[:20])
    with pytest.raises(DefenseError, match="other terms"):  # there are releases already
        client_dp_dp(clients=7, ledger=path)


@pytest.mark.parametrize(("before", "after"), [("fixed", "poisson"), ("poisson", "fixed")])
def test_a_checkpoint_of_other_draws_is_refused(before, after):
    """Fixed draws counted as Poisson would show too small an epsilon."""
    first, same, other = (
        client_dp_dp(clients=20, sampling=sampling, per_round=5)
        for sampling in (before, before, after)
    )
    first.mean({}, LIKE)
    same.load_state_dict(first.state_dict())
    assert same.privacy == first.privacy
    with pytest.raises(DefenseError, match="another accountant, sampling or noise"):
        other.load_state_dict(first.state_dict())


# ---- who is drawn -------------------------------------------------------------------------------


def test_clients_are_drawn_as_is_accounted():
    everyone = list(range(20))
    assert client_dp_dp(clients=20).drawn(everyone) == everyone
    fixed = client_dp_dp(clients=20, sampling="fixed", per_round=5)
    assert all(len(set(fixed.drawn(everyone))) == 5 for _ in range(20))
    poisson = client_dp_dp(clients=20, sampling="poisson", per_round=5)
    drawn = [poisson.drawn(everyone) for _ in range(2000)]
    sizes = torch.tensor([float(len(d)) for d in drawn])
    assert float(sizes.mean()) == pytest.approx(5, abs=5 * math.sqrt(3.75 / 2000))
    assert float(sizes.var()) == pytest.approx(3.75, rel=0.2)
    observed = torch.bincount(torch.tensor([c for d in drawn for c in d]), minlength=20) / 2000
    assert float((observed - 0.25).abs().max()) < 5 * math.sqrt(0.25 * 0.75 / 2000)
    with pytest.raises(DefenseError, match="19 are there"):
        poisson.drawn(everyone[1:])


# ---- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"noise": 0.0}, "noise_multiplier must be .* got 0.0"),
        ({"noise": None}, "noise_multiplier, or target_epsilon and rounds"),
        ({"noise": None, "target_epsilon": 1.0}, "rounds"),
        ({"target_epsilon": 0.0}, "target_epsilon must be .* got 0.0"),
        ({"target_delta": 0.0}, "target_delta must be .* got 0.0"),
        ({"target_delta": 0.2}, "target_delta must be .* below 0.1"),
        ({"clip": 0.0}, "clip must be .* got 0.0"),
        ({"clip": math.nan}, "clip must be .* got nan"),
        ({"clients": 2.5}, "clients must be .* got 2.5"),
        ({"per_round": 3}, "sampling='all'"),
        ({"sampling": "poisson"}, "needs per_round="),
        ({"sampling": "poisson", "per_round": 11}, "of at most 10"),
        ({"sampling": "fixed", "per_round": 2.5}, "must be whole"),
        ({"sampling": "some"}, "sampling must be .* got 'some'"),
        ({"trust": "me"}, "trust must be .* got 'me'"),
        ({"trust": "secure_aggregation", "sampling": "poisson", "per_round": 2}, "shares of noise"),
        ({"trust": "secure_aggregation", "dropouts": 10}, "dropouts must be .* got 10"),
        ({"dropouts": 1}, "for shares of noise"),
        ({"accountant": "filter"}, "keeps a budget"),
        ({"accountant": "pld"}, "'prv' or 'rdp' or 'filter'"),
        ({"noise": None, "target_epsilon": 1.0, "rounds": 0}, "rounds must be .* got 0"),
    ],
)
def test_settings_that_hold_no_guarantee_are_refused(more, text):
    with pytest.raises(DefenseError, match=text):
        client_dp_dp(**more)


def test_who_adds_the_noise_is_held_to_it():
    with pytest.raises(DefenseError, match="the server adds the noise"):
        client_dp_dp().privatized(update(0), LIKE)
    with pytest.raises(DefenseError, match="the clients add the noise"):
        client_dp_dp(trust="local").mean({0: update(0)}, LIKE)


@pytest.mark.slow
def test_it_is_no_defence_of_a_trainers_steps(tmp_path):
    from tests.callbacks.runs import fit

    with pytest.raises(DefenseError, match="acts on the update of a federation's round"):
        fit([], tmp_path, strategy=DefendedStrategy("auto", defenses=[client_dp_dp()]))


def test_the_record_of_a_run_says_who_is_trusted():
    report = client_dp_dp(trust="local").settings()
    assert (report["trust"], report["accountant"], report["clip"]) == ("local", "prv", 1.0)
    assert "server" in client_dp_dp(trust="local").guarantee
    assert "added or removed" in client_dp_dp().guarantee
    assert "must stay secret" in client_dp_dp(sampling="poisson", per_round=2).guarantee


def test_a_client_whose_process_may_end_needs_a_ledger_and_a_mask(tmp_path):
    def client(trust, ledger):
        path = tmp_path / trust if ledger else None
        defense = client_dp_dp(clients=7, trust=trust, ledger=path)
        return lambda masked: defense.check_client(masked=masked, mend="mask it")

    with pytest.raises(DefenseError, match=r"ClientDP\(ledger=...\), a path for each client"):
        client("local", ledger=False)(masked=True)
    client("local", ledger=True)(masked=False)
    share = client("secure_aggregation", ledger=True)
    share(masked=True)
    with pytest.raises(DefenseError, match=r"nothing here masks this client's update.*: mask it"):
        share(masked=False)


def test_a_server_that_adds_the_noise_needs_a_ledger(tmp_path):
    words = "PrivateMean adds the noise on the server"
    for defense in (
        client_dp_dp(clients=7),
        client_dp_dp(clients=7, trust="local", ledger=tmp_path / "own"),
    ):
        with pytest.raises(DefenseError, match=words):
            defense.check_server("PrivateMean")
    client_dp_dp(clients=7, ledger=tmp_path / "server").check_server("PrivateMean")
