"""What a client reports of its round: its batches, how many steps they made, and at which rate."""

from __future__ import annotations

import copy
import math
import os
import random
import signal
import time
from functools import partial

import pytest
import torch
from safetensors import SafetensorError

from lightning_fedleak.federation import (
    SUM,
    HandOver,
    TrainedOn,
    recording,
    report_batches,
    trained_on,
    trained_state,
)
from lightning_fedleak.federation import hand_over as reports
from tests.callbacks.runs import Probe, fit
from tests.federation.rounds import SGD, batches, model, train
from tests.federation.test_observer import F1, loader, observer
from tests.helpers.lightning_modules import CausalLMModule


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
        fit([TrainedOn()], tmp_path, module=module, loader=loader(batches(4, 4)), **trainer)
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
        rounds.begin(0, trained_state(net))
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
    sent = trained_state(net)
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
    rounds.begin(0, trained_state(net))
    local = copy.deepcopy(net)
    stepping = SGD(local.parameters())
    with recording() as result:
        for number, batch in enumerate(data):
            trained_on(batch, step=number % 2 == 1)
            (local(**batch).loss / 2).backward()
            if number % 2:
                stepping.step()
                stepping.zero_grad()
    assert rounds.look(trained_state(local), batches=result).values[F1] > 0.8


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


def test_a_broken_report_fails_once(hand_over):
    (hand_over.folder / "0.safetensors").touch(mode=0o600)
    with pytest.raises(SafetensorError):
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


def test_a_file_that_others_may_read_fails_once(hand_over):
    path = hand_over.folder / "0.safetensors"
    path.touch(mode=0o644)
    with pytest.raises(ValueError, match="other users may access it"):
        hand_over.take()
    assert not hand_over.take()


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
