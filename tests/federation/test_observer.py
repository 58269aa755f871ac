"""The rounds of a federation are attacked as a monitor attacks those of a fit."""

import copy
import errno
import json
import logging
import math
import os
import random
import re
import signal
import threading
import time
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from lightning_utilities.core import rank_zero
from safetensors import SafetensorError
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import lightning_fedleak as fedleak
from lightning_fedleak import federation
from lightning_fedleak.defenses import Privacy
from lightning_fedleak.federation import SUM, HandOver, recording, report_batches, trained_on
from lightning_fedleak.federation import hand_over as reports
from tests.callbacks.runs import Probe, fit
from tests.engine.test_failures import QUARTERS, functions, nothing, profiled, raises
from tests.federation.rounds import ADAMW, SGD, batches, lora, model, round_settings, train
from tests.helpers.lightning_modules import CausalLMModule
from tests.helpers.models import tiny_llama

F1 = "leakage/bag_of_words/f1"


def texts(seed=9, n=24, length=8):
    generator = torch.Generator().manual_seed(seed)
    return fedleak.PublicText(
        [torch.randint(3, 97, (length,), generator=generator) for _ in range(n)]
    )


def observer(folder, net=None, attacks=None, steps=2, optimizer=SGD, **settings):
    net = model() if net is None else net
    attacks = [fedleak.BagOfWords()] if attacks is None else attacks
    arguments, rare = round_settings(settings)
    return federation.RoundObserver(
        copy.deepcopy(net), optimizer, steps, attacks=attacks, folder=folder, settings=rare,
        **arguments,
    )  # fmt: skip


class Accounted(fedleak.GradientNoise):
    """Says what it costs."""

    epsilon = 0.0

    @property
    def privacy(self):
        return Privacy(self.epsilon, 1e-5, 1.0, 1.0, self.releases)


def lines(folder, name="leakage.jsonl"):
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def loader(data):
    return torch.utils.data.DataLoader(data, batch_size=None)


# ---- what is read ------------------------------------------------------------------------------


SLOW = partial(torch.optim.SGD, lr=1e-3)


def test_an_attack_on_trained_weights_is_refused(tmp_path):
    with pytest.raises(ValueError, match="attacks on trained weights read no update of a round"):
        observer(tmp_path, attacks=[fedleak.Combined()])


def test_a_round_is_read_as_its_own_attacks_read_it(tmp_path):
    games = fedleak.Games(targets=3, held_out=texts(5))
    attacks = lambda: [  # noqa: E731
        fedleak.BagOfWords(),
        fedleak.SubspaceWords(capacity_seconds=0),
        fedleak.GradientMembership(texts(), public_rows=8, controls=4),
    ]
    net, data = model(), batches(4, 2, rows=1, length=5)
    rounds = observer(tmp_path / "b", net, attacks(), optimizer=SLOW, games=games)
    sent = federation.trained_state(net)
    rounds.begin(0, sent)
    look = rounds.look(train(net, data, SLOW), batches=data)
    assert look.values["leakage/gradient_membership/control"] > 0.9
    assert look.values[F1] > 0.9
    assert look.values["leakage/subspace_words/f1"] > 0.1


class Blind(fedleak.BagOfWords):
    """Names no word, as an attack does that is broken."""

    needs_control = True

    def run(self, view, query=None):
        guess = super().run(view, query)
        return replace(guess, types=guess.types[:0])


@pytest.mark.parametrize(("kind", "control"), [(fedleak.BagOfWords, 1.0), (Blind, 0.0)])
def test_a_client_and_a_sum_have_controls(tmp_path, kind, control):
    """A low number counts as far as the round made again on known words is read."""
    net, data = model(), batches(4, 2)
    attack = type(kind.__name__, (kind,), {"needs_control": True, "default_name": "words"})()
    rounds = observer(tmp_path, net, [attack])
    rounds.begin(0, federation.trained_state(net))
    returned = train(net, data)
    for client in (0, federation.SUM):
        name = "leakage_aggregate" if client == federation.SUM else "leakage"
        look = rounds.look(returned, client, batches=data)
        assert look.values[f"{name}/words/f1"] == control
        # Rounding of the round's own words is in the control too, as words that it does not have.
        assert look.values[f"{name}/words/control"] == pytest.approx(control, abs=0.1)


@pytest.mark.parametrize("momentum", [pytest.param(0.0, marks=pytest.mark.slow), 0.9])
def test_whole_texts_are_read_off_rounds_of_sgd(tmp_path, momentum):
    make = partial(torch.optim.SGD, lr=0.05, momentum=momentum)
    net, each = tiny_llama(d=32).train(), [batches(seed, 1, length=6) for seed in (4, 5)]
    attack = fedleak.SubspaceTexts(budget_seconds=60)
    rounds = observer(tmp_path, net, [attack], steps=1, optimizer=make)
    sent = federation.trained_state(net)
    rounds.begin(0, sent)
    returned = [train(net, data, make) for data in each]
    one = rounds.look(returned[0], batches=each[0])
    assert one.values["leakage/subspace_texts/token_accuracy"] == 1.0
    assert one.values["leakage/subspace_texts/exact_sentences"] == 1.0
    mean = {n: torch.stack([r[n] for r in returned]).mean(0) for n in sent}
    both = rounds.look(mean, federation.SUM, batches=[*each[0], *each[1]])
    assert both.values["leakage_aggregate/subspace_texts/token_accuracy"] > 0.5


def test_what_a_look_finds_only_the_owner_of_the_files_may_read(tmp_path):
    net, data = model(), batches(4, 2)
    rounds = observer(tmp_path, net)
    files = [tmp_path / "leakage.jsonl", tmp_path / "run.jsonl"]
    before = os.umask(0)
    try:
        for round_ in range(2):
            rounds.begin(round_, federation.trained_state(net))
            rounds.look(train(net, data), client=round_, batches=data)
            assert {f.stat().st_mode & 0o777 for f in files} == {0o644 if round_ else 0o600}
            for file in files:  # whom the owner lets read may go on reading
                file.chmod(0o644)
    finally:
        os.umask(before)


# ---- rounds and clients -------------------------------------------------------------------------


def test_each_client_and_round_has_its_lines(tmp_path):
    net = model()
    probe = Probe()
    rounds = observer(tmp_path, net, [fedleak.BagOfWords(), probe])
    for round_ in range(2):
        sent = federation.trained_state(net)
        rounds.begin(round_, sent)
        data = [batches(10 * round_ + c, 2) for c in range(2)]
        returned = [train(net, of) for of in data]
        for client, state in enumerate(returned):
            rounds.look(state, client, batches=data[client], utility={"loss": 1.5})
        mean = {n: torch.stack([r[n] for r in returned]).mean(0) for n in sent}
        rounds.look(mean, federation.SUM, batches=[b for of in data for b in of])
        net.load_state_dict(mean, strict=False)
    rounds.end()
    assert probe.prepared == 1
    result = [
        (x["round"], x["step"], x["client"], x["stage"], x["attack"]) for x in lines(tmp_path)
    ]
    expected = []
    for round_ in range(2):
        for client, stage in ((0, "shared"), (1, "shared"), (federation.SUM, "aggregate")):
            for attack in ("bag_of_words", "probe"):
                expected.append((round_, round_, client, stage, attack))
    assert result == expected
    record = lines(tmp_path, "run.jsonl")
    assert [x["kind"] for x in record] == ["begin", *["look"] * 6, "end"]
    assert record[0]["training"]["local_steps"] == 2
    assert record[0]["training"]["optimizers"][0]["class"] == "SGD"
    assert record[1]["utility"] == {"loss": 1.5}
    assert [x["client"] for x in record[1:4]] == [0, 1, federation.SUM]
    assert (record[-1]["step"], record[-1]["how"]) == (2, "finished")


def test_the_board_of_a_client_ends_at_what_its_rounds_have_spent(tmp_path):
    """The last rounds are not looked at."""
    net, data = model(), batches(1, 2)
    account = Accounted(1.0, sigma=1.0)
    rounds = observer(tmp_path, net, [fedleak.BagOfWords()], tensorboard=True)
    for round_ in range(3):
        rounds.begin(round_, federation.trained_state(net))
        account.epsilon = 1.0 + round_
        if round_ == 0:
            rounds.measure(train(net, data), 0, batches=data).log(defenses=[account])
    rounds.end()
    events = EventAccumulator(str(tmp_path / "tensorboard" / "client_0"))
    events.Reload()
    assert [(one.step, one.value) for one in events.Scalars("privacy/epsilon")] == [(0, 1), (3, 3)]
    [change] = [line for line in lines(tmp_path, "run.jsonl") if line["kind"] == "metrics"]
    assert (change["step"], change["client"], change["privacy"][0]["epsilon"]) == (3, 0, 3.0)


def test_attacks_choose_themselves(tmp_path):
    net = lora()
    rounds = observer(tmp_path, net, "auto", 1, ADAMW, public_text=texts(n=80))
    assert rounds.engine.selection.auto
    rounds.begin(0, federation.trained_state(net))
    data = batches(3, 1)
    look = rounds.look(train(net, data, ADAMW), batches=data)
    assert "until B" in look.not_yet["leakage/subspace_words"]
    [begin, *_] = lines(tmp_path, "run.jsonl")
    assert [a["name"] for a in begin["attacks"]] == ["subspace_words", "gradient_membership"]
    assert {n["name"] for n in begin["not_played"]} >= {"bag_of_words", "aligned_flatchat"}


@pytest.mark.parametrize("steps", [1, 2])
def test_what_no_round_can_be_read_by_is_said_before_the_first(tmp_path, caplog, steps):
    with caplog.at_level(logging.INFO, logger=rank_zero.log.name):
        rounds = observer(tmp_path, lora(), "auto", steps, ADAMW, public_text=texts(n=80))
        rounds.begin(0, federation.trained_state(rounds.model))
    said = "subspace_words       unknown in every round: rounds of AdamW are no"
    assert (said in caplog.text) is (steps == 2)
    assert "gradient_membership  reads" in caplog.text


def test_an_adapters_own_names_will_do(tmp_path):
    from peft import get_peft_model_state_dict

    net = lora()
    probe = Probe(role=next(n for n, p in net.named_parameters() if "lora_B" in n))
    rounds = observer(tmp_path, net, [probe], 2)
    rounds.begin(0, get_peft_model_state_dict(net))
    data = batches(3, 2)
    returned = train(net, data, state=get_peft_model_state_dict)
    rounds.look(returned, batches=data)
    name = probe.role.replace(".default", "")
    sent = get_peft_model_state_dict(net)[name]
    torch.testing.assert_close(probe.seen[0][2], (sent - returned[name]) / 0.05)


def test_training_is_not_disturbed(tmp_path):
    net, data = model(), batches(1)
    sent = federation.trained_state(net)
    plain = train(net, data)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    rounds = observer(
        tmp_path, net, [fedleak.BagOfWords(), fedleak.GradientMembership(texts(), public_rows=4)]
    )
    given = {n: t.clone() for n, t in sent.items()}
    rounds.begin(0, sent)
    rounds.look(plain, batches=data)
    assert torch.equal(before, torch.get_rng_state())
    again = train(net, data)
    assert all(torch.equal(plain[n], again[n]) and torch.equal(sent[n], given[n]) for n in sent)


# ---- without the truth --------------------------------------------------------------------------


def test_a_server_is_told_what_it_can_know(tmp_path):
    net, data = lora(r=8), batches(3, 1, rows=1, length=6)
    with torch.no_grad():
        for name, p in net.named_parameters():
            if "lora_B" in name:
                p.normal_(generator=torch.Generator().manual_seed(1)).mul_(0.1)

    def attacks():
        return [fedleak.SubspaceWords(capacity_seconds=0), fedleak.GradientMembership(texts())]

    sent, returned = federation.trained_state(net), train(net, data)
    blind = observer(tmp_path / "a", net, attacks(), 1, side="server")
    blind.begin(0, sent)
    look = blind.look(returned, 7)
    assert "leakage/subspace_words/f1" not in look.values
    assert "hold the client's texts" in look.unknown["leakage/gradient_membership"]
    seeing = observer(tmp_path / "b", net, attacks(), 1)
    seeing.begin(0, sent)
    scored = seeing.look(returned, 7, batches=data)
    certified = scored.values["leakage/subspace_words/certified"]
    assert look.values["leakage/subspace_words/certified"] == certified
    for line in lines(tmp_path / "a"):
        assert line["unknown"]
        assert all(rate.get("value") is None for n, rate in line["metrics"].items() if n == "f1")
    assert lines(tmp_path / "a", "run.jsonl")[0]["monitor"]["side"] == "server"


# ---- what fails ---------------------------------------------------------------------------------


def test_a_batch_that_cannot_be_read_is_unknown(tmp_path):
    net, data = model(), batches(1)
    rounds = observer(tmp_path, net)
    rounds.begin(0, federation.trained_state(net))
    wrong = [{"input_ids": torch.full((1, 4), 1000), "labels": torch.full((1, 4), 1000)}]
    with pytest.warns(UserWarning, match="batch could not be read"):
        look = rounds.look(train(net, data), batches=wrong)
    assert math.isnan(look.values[F1])
    with pytest.warns(UserWarning, match="no batch of the round"):
        look = rounds.look(train(net, data), batches=[])
    assert math.isnan(look.values[F1])


def test_what_is_sent_must_be_the_models(tmp_path):
    net = model()
    sent = federation.trained_state(net)
    name = "transformer.h.0.mlp.c_fc.weight"
    for state, said in (
        (sent | {"other": torch.zeros(1)}, "'other' is sent"),
        ({n: t for n, t in sent.items() if n != name}, "is trained and not sent"),
        (sent | {name: torch.zeros(2, 2)}, r"shape \(2, 2\)"),
        (sent | {name: torch.full_like(sent[name], math.nan)}, "calibrated on the sent model: NaN"),
    ):
        with pytest.raises(federation.UpdateError, match=said):
            observer(tmp_path, net).begin(0, state)


def test_settings_that_cannot_be_meant_are_refused(tmp_path):
    for settings, said in (
        ({"steps": 0}, "local_steps"),
        ({"attacks": [fedleak.FCMembership(layer=1)]}, "a round sends a weight change"),
        ({"public_text": texts()}, "attacks='auto'"),
        ({"side": "both"}, "side must be"),
    ):
        with pytest.raises(ValueError, match=said):
            observer(tmp_path, **settings)
    frozen = model().requires_grad_(False)
    with pytest.raises(ValueError, match="empty parameter list"):
        observer(tmp_path, frozen)
    with pytest.raises(TypeError, match="write settings=RoundSettings"):
        federation.RoundObserver(model(), ADAMW, 1, settings=fedleak.WatchSettings())


NAMES = ["../../../../escape", "/etc/x", "a/b/c", "x\0y", "é中文", "n" * 300, "", ".", "..", "a\nb",
         "<script>alert(1)</script>", "a b", "a%20b", True, -1]  # fmt: skip


def test_a_client_s_name_leads_to_no_other_folder(tmp_path):
    net, folder = model(), tmp_path / "deep" / "er" / "logs"
    rounds = observer(folder, net, tensorboard=True)
    rounds.begin(0, federation.trained_state(net))
    threads = threading.active_count()
    for client, name in enumerate(NAMES):
        data = batches(client)
        assert rounds.look(train(net, data), name, batches=data).values[F1] == 1.0
    assert threading.active_count() == threads  # TensorBoard has none for each client
    rounds.end()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {path.relative_to(folder).parts[0] for path in files} == {
        "leakage.jsonl", "run.jsonl", "tensorboard",
    }  # fmt: skip
    boards = list((folder / "tensorboard").iterdir())
    assert len(boards) == len(NAMES)
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}
    for board in boards:
        assert F1 in read_board(board).scalars.Keys()


def read_board(folder):
    board = EventAccumulator(str(folder))
    board.Reload()
    return board


def test_a_model_with_nan_makes_its_round_unknown_and_no_other(tmp_path):
    """A hostile client's NaN reaches the next model through a server that takes the mean."""
    net, looks = model(), []
    sent = federation.trained_state(net)
    broken = {n: t * math.nan for n, t in sent.items()}
    rounds = observer(tmp_path, net)
    for round_, state in enumerate((sent, broken, broken, sent)):
        rounds.begin(round_, state)
        rounds.begin(round_, dict(state))  # for another client
        data = batches(round_)
        returned = train(net, data) if round_ in (0, 3) else broken
        looks.append(rounds.look(returned, batches=data))
    rounds.end()
    assert [look.values[F1] for look in (looks[0], looks[3])] == [1.0, 1.0]
    for look in looks[1:3]:
        assert math.isnan(look.values[F1])
    [why] = looks[1].unknown.values()
    assert "the sent state holds NaN" in why


# ---- what people look at ------------------------------------------------------------------------


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_full_disk_ends_no_round_and_is_said(tmp_path, monkeypatch):
    """Of the logs, and of TensorBoard's files, which break later."""
    from tensorboard.summary.writer.record_writer import RecordWriter

    net = model()
    for name in ("leakage.jsonl", "run.jsonl"):
        (tmp_path / name).symlink_to("/dev/full")
    rounds = observer(tmp_path, net, tensorboard=True)
    written = RecordWriter.write

    def full(self, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with warnings.catch_warnings(record=True) as report:
        warnings.simplefilter("always")
        for round_ in range(3):
            monkeypatch.setattr(RecordWriter, "write", written if round_ == 0 else full)
            rounds.begin(round_, federation.trained_state(net))
            for client in range(min(round_, 1) + 1):  # the second comes when all is full
                data = batches(client + round_)
                look = rounds.look(train(net, data), client, batches=data)
                assert look.values[F1] > 0.9
        rounds.end()
    said = [str(w.message) for w in report]
    for what in (r"leakage.jsonl cannot be written: No space", "run.jsonl cannot be written",
                 "TensorBoard cannot be written any more \\(No space"):  # fmt: skip
        assert any(re.search(what, one) for one in said), what


@pytest.mark.parametrize("part", QUARTERS)
def test_what_a_look_raises_ends_no_round_and_is_unknown(tmp_path, caplog, part):
    """Every function of the package that a later look enters raises in a round of its own."""
    sent = model()

    def observed(folder, callbacks):
        watch = observer(tmp_path / folder, attacks=[fedleak.BagOfWords()])
        looks = []
        for round_, callback in enumerate(callbacks):
            rows = batches(round_)
            watch.begin(round_, federation.trained_state(sent))
            returned = train(sent, rows)
            with profiled(callback):
                looks.append(watch.look(returned, batches=rows))
        return looks

    thin = {f"RoundObserver.{name}" for name in ("look", "measure", "_engine_of", "ask")}
    thin.add("Stopwatch.__init__")  # it reads two clocks
    targets = [
        code
        for code in functions(lambda note: observed("plain", [nothing, note]))
        if code.co_qualname not in thin
    ]
    assert len(targets) > 80
    targets = targets[part::4]
    looks = observed("failing", [nothing, *map(raises, targets), nothing])
    name = "leakage/bag_of_words/f1"
    assert looks[0].values[name] == looks[-1].values[name] == 1.0
    said = [record.getMessage() for record in caplog.records]
    for code, look in zip(targets, looks[1:], strict=False):
        written = any("were written" in text or "was not noted" in text for text in said)
        assert look.unknown or written, f"nobody learns that {code.co_qualname} failed"


# What a client reports of its round: its batches, how many steps they made, and at which rate.


class Annealing(CausalLMModule):
    """SGD whose rate falls with each step, as FlowerTune's does with each round."""

    several = False

    def configure_optimizers(self):
        first, *rest = self.parameters()
        groups = [{"params": [first], "lr": 0.02}, {"params": rest}]
        optimizer = torch.optim.SGD(groups if self.several else [first, *rest], lr=0.04)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def reported(tmp_path, module, **trainer):
    with recording() as result:
        fit([fedleak.TrainedOn()], tmp_path, module=module, loader=loader(batches(4, 4)), **trainer)
    return result


def test_a_trainer_reports_each_batch_and_each_step_with_its_rate(tmp_path):
    result = reported(tmp_path / "a", Annealing(model()))
    assert [len(result), *result.rates] == [4, 0.04, 0.02, pytest.approx(0.04 / 3), 0.01]
    assert result.learning_rate == pytest.approx(0.04 * (1 + 1 / 2 + 1 / 3 + 1 / 4) / 4)
    result = reported(tmp_path / "b", Annealing(model()), accumulate_grad_batches=2)
    assert [len(result), *result.rates] == [4, 0.04, 0.02]
    several = Annealing(model())
    several.several = True
    assert math.isnan(reported(tmp_path / "c", several).learning_rate)


def test_a_loop_reports_a_rate_for_each_step_or_for_none():
    with recording() as result:
        trained_on("one", step=False)
        trained_on("two", learning_rate=0.2)
        assert (list(result), result.rates, result.learning_rate) == (["one", "two"], [0.2], 0.2)
        trained_on("three")
        assert math.isnan(result.learning_rate)
    with recording() as result:
        trained_on("one")
    assert result.learning_rate is None
    trained_on("where nobody looks")


def test_the_rate_that_a_client_reports_scales_its_update(tmp_path):
    """The observer's optimizer knows the first round's rate alone."""
    net, data = model(), batches(4, 2)
    slow = partial(torch.optim.SGD, lr=0.01)
    observed = []
    for optimizer, rate in ((slow, None), (SGD, 0.01)):
        probe = Probe()
        rounds = observer(tmp_path / str(rate), net, [probe], optimizer=optimizer)
        rounds.begin(0, fedleak.trained_state(net))
        with recording() as result:
            for batch in data:
                trained_on(batch, learning_rate=rate)
        rounds.look(train(net, data, slow), batches=result)
        observed.append(probe.seen[0][2])
    torch.testing.assert_close(*observed)


@pytest.mark.parametrize("taken", [1, 3])
def test_a_round_of_another_length_is_unknown_with_both_numbers(tmp_path, taken):
    net, data = model(), batches(4, taken)
    rounds = observer(tmp_path, net, steps=2)
    sent = fedleak.trained_state(net)
    rounds.begin(0, sent)
    returned = train(net, data)
    look = rounds.look(returned, batches=data)
    assert math.isnan(look.values[F1])
    why = look.unknown["leakage/bag_of_words"]
    assert f"took {taken} steps" in why
    assert "local_steps=2" in why
    assert not math.isnan(
        rounds.look(returned, SUM, batches=data).now[f"leakage_aggregate{F1[7:]}"]
    )


def test_accumulated_batches_are_one_step(tmp_path):
    net, data = model(), batches(4, 4)
    rounds = observer(tmp_path, net, steps=2)
    rounds.begin(0, fedleak.trained_state(net))
    local = copy.deepcopy(net)
    stepping = SGD(local.parameters())
    with recording() as result:
        for number, batch in enumerate(data):
            trained_on(batch, step=number % 2 == 1)
            (local(**batch).loss / 2).backward()
            if number % 2:
                stepping.step()
                stepping.zero_grad()
    assert rounds.look(fedleak.trained_state(local), batches=result).values[F1] > 0.8


# ---- training in other threads and processes ----------------------------------------------------


@pytest.fixture
def hand_over(tmp_path):
    listening = HandOver(tmp_path / "steps")
    listening.open()
    yield listening
    listening.close()


def test_a_process_s_batches_are_handed_over_in_private_files(hand_over, monkeypatch):
    """Two processes of one client, of which this one is neither."""
    folder, ids = hand_over.folder, torch.arange(6).view(2, 3)
    monkeypatch.setattr(hand_over, "process", -1)
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setattr(reports, "_SENDER", reports._Sender())
        trained_on({"input_ids": ids, "labels": ids, "names": ["a", "b"]}, step=False)
        trained_on([ids.bfloat16().T, (1, None)], learning_rate=0.5)
        with pytest.raises(TypeError, match="not JSON serializable"):
            trained_on({"what": object()})
    files = sorted(folder.iterdir())
    assert {file.stat().st_mode & 0o777 for file in files} == {0o600}
    result = hand_over.take()
    first, second = result[:2], result[2:]
    for named in first:  # of both processes, in the order of their steps
        assert torch.equal(named["input_ids"], ids)
        assert named["names"] == ["a", "b"]
    for listed in second:
        assert torch.equal(listed[0], ids.bfloat16().T)
        assert tuple(listed[1]) == (1, None)
    assert result.rates == [0.5]  # one optimizer step of two processes
    assert not list(folder.iterdir())


@pytest.mark.parametrize(
    ("mode", "error", "words"),
    [(0o600, SafetensorError, ""), (0o644, ValueError, "other users may access it")],
)
def test_a_file_that_is_broken_or_that_others_may_read_fails_once(hand_over, mode, error, words):
    (hand_over.folder / "0.safetensors").touch(mode=mode)
    with pytest.raises(error, match=words):
        hand_over.take()
    assert not hand_over.take()


def test_closing_removes_what_a_killed_process_left_and_cannot_fail(tmp_path, recwarn):
    listening = HandOver(tmp_path / "steps")
    listening.open()
    half = "000000000.0.7.safetensors"
    for name in (f".{half}.deadbeef", f"{half}", "000000001.1.8.safetensors"):
        (listening.folder / name).write_bytes(b"a piece of a private batch")
    os.chmod(listening.folder / half, 0o644)
    listening.close()
    assert not listening.folder.exists()
    assert not recwarn.list
    HandOver(tmp_path / "steps").close()  # which was never opened

    listening.open()
    (listening.folder / "notes.txt").write_text("of somebody else")
    (listening.folder / half).mkdir()
    with pytest.warns(UserWarning, match=f"stays, with '{half}, notes.txt'"):
        listening.close()
    assert reports.FOLDER not in os.environ
    (listening.folder / "notes.txt").unlink()
    (listening.folder / half).rmdir()
    listening.open()
    listening.folder.rmdir()
    listening.close()


def test_a_process_that_trains_on_writes_nothing_where_nobody_receives(tmp_path, monkeypatch):
    monkeypatch.setenv(reports.FOLDER, str(tmp_path / "steps"))
    trained_on({"input_ids": torch.arange(6).view(2, 3)})
    assert not (tmp_path / "steps").exists()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="it needs fork")
def test_no_piece_of_a_batch_stays_after_kills_at_drawn_moments(tmp_path):
    draws = random.Random(1)
    for number in range(5):
        listening = HandOver(tmp_path / str(number))
        listening.open()
        child = os.fork()
        if child == 0:
            while True:
                trained_on({"pixel_values": torch.zeros(8, 3, 224, 224)})
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline and not list(listening.folder.glob("*.safetensors")):
            time.sleep(0.002)
        time.sleep(draws.uniform(0, 0.05))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        listening.close()
        assert not listening.folder.exists()


def test_two_clients_in_one_process_are_refused(hand_over, tmp_path):
    with pytest.raises(RuntimeError, match="run each in a separate process"):
        HandOver(tmp_path / "another").open()


def test_a_trainer_of_transformers_reports_its_batches_and_rates(tmp_path):
    from transformers import Trainer, TrainingArguments

    rows = [{"input_ids": b["input_ids"][0], "labels": b["labels"][0]} for b in batches(5, 8)]
    arguments = TrainingArguments(
        str(tmp_path), max_steps=2, report_to=[], use_cpu=True, learning_rate=0.1,
        per_device_train_batch_size=2, gradient_accumulation_steps=2, disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(model(), arguments, train_dataset=rows)
    report_batches(trainer)
    with recording() as result:
        trainer.train()
    assert [len(result), *result.rates] == [4, 0.1, pytest.approx(0.05)]
    assert sorted(row.tolist() for batch in result for row in batch["input_ids"]) == sorted(
        row["input_ids"].tolist() for row in rows
    )
