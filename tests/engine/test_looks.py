"""What a measurement of a plain loop reads, logs, and does where it fails."""

import json
import math
import re
import stat
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lightning_fedleak import progress
from lightning_fedleak.attacks import BagOfWords, BiasSign, FlatChat
from lightning_fedleak.attacks.base import Surfaces, UnusableObservation, WordGuess
from lightning_fedleak.callbacks import LeakageMonitor, WatchSettings
from lightning_fedleak.engine.scheduler import Cadence
from lightning_fedleak.federation import RoundObserver, RoundSettings
from lightning_fedleak.model.anatomy import HEAD_BIAS, HEAD_WEIGHT
from lightning_fedleak.model.batches import BatchError, TokenBatch
from lightning_fedleak.model.snapshots import Inapplicable, NotYet
from lightning_fedleak.report import findings, read
from lightning_fedleak.trainers import Threshold, Watch
from tests.callbacks.runs import Probe
from tests.helpers.lightning_modules import loss_by_blocks, random_token_loader, states_by_blocks
from tests.helpers.loops import lines_of, model_loss, still_gpt2, train, watched, work_for
from tests.helpers.models import tiny_bert_mlm, tiny_gpt2
from tests.helpers.settings import grouped

F1 = "leakage/probe/f1"
SECRET = "Mrs Fernsby's loan"


class Crashing(Probe):
    default_name = "crashing"

    def run(self, view: Any, query: Any = None) -> Any:
        raise IndexError(SECRET)


class Rejecting(Probe):
    default_name = "rejecting"

    def run(self, view: Any, query: Any = None) -> Any:
        if not view.gradient(self.role).isfinite().all():
            raise UnusableObservation("non-finite gradient")
        return super().run(view, query)


class Outside(Probe):
    """Names a type that the vocabulary does not have."""

    default_name = "outside"

    def run(self, view: Any, query: Any = None) -> Any:
        return WordGuess(torch.tensor([424_243]))


class Listing(Probe):
    """Returns ids alone."""

    def run(self, view: Any, query: Any = None) -> Any:
        return super().run(view, query).types.tolist()


class Lost(Probe):
    """Cannot follow the model, for which there is no memory."""

    default_name = "lost"

    def refresh(self, anatomy: Any, step: int) -> None:
        raise MemoryError


# ---- values -------------------------------------------------------------------------------------


def test_metrics_are_those_of_the_guess_against_the_labels(tmp_path: Path) -> None:
    probe = Probe(k=7)
    watch = watched(tmp_path, probe, n=4)
    labels = set(next(iter(random_token_loader(4)))["labels"][:, 1:].flatten().tolist())
    guess = set(probe.at("shared")[0].norm(dim=1).topk(7).indices.tolist())
    hits = len(labels & guess)
    f1 = 2 * hits / (7 + len(labels))
    expected = {"precision": hits / 7, "recall": hits / len(labels), "f1": f1}
    for name, value in expected.items():
        assert watch.latest[f"leakage/probe/{name}"] == pytest.approx(value)
    assert 0 <= watch.latest[f"{F1}_low"] < f1 < watch.latest[f"{F1}_high"] <= 1


def test_every_look_appends_a_line_for_each_attack_and_stage(tmp_path: Path) -> None:
    attacks, stages = [Probe(), Probe(name="b")], ("local", "shared")
    watch = watched(tmp_path, attacks, every_n_steps=4, stages=stages)
    lines = watch.lines()
    assert [(line["step"], line["stage"], line["attack"]) for line in lines] == [
        (step, stage, attack) for step in (0, 4) for stage in stages for attack in ("probe", "b")
    ]
    assert (lines[0]["schema"], lines[0]["config"], lines[0]["unknown"]) == (4, {"k": 10}, None)
    f1 = lines[0]["metrics"]["f1"]
    assert f1["low"] < f1["value"] < f1["high"]
    names = set(watch.engine.metric_names())
    logged = {name for name in watch.latest if not name.startswith("utility/")}
    # Of one client, without a control.
    absent = ("worst_client", "control", "control_of_a_part", "unexplained")
    assert logged == {name for name in names if not name.endswith(absent)}


def test_recovered_words_appear_only_in_a_private_file(tmp_path: Path) -> None:
    class Words:
        def decode(self, ids: Any) -> str:
            return f"secret{ids[0]}"

    settings = {"n": 8, "tokenizer": Words(), "tensorboard": True}
    watched(tmp_path / "shown", Probe(), reveal=True, **settings)
    watched(tmp_path / "hidden", Probe(), **settings)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    [path] = [path for path in files if b"secret" in path.read_bytes()]
    assert path.name == "revealed_words.rank0.txt"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.read_text().count("== step") == 2


# ---- failures -----------------------------------------------------------------------------------


def test_a_failing_attack_is_unknown_is_counted_and_harms_no_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    attacks = [Crashing(), Outside(), Listing(name="listing"), Lost(), Probe()]
    with warnings.catch_warnings(record=True) as caught, caplog.at_level("DEBUG"):
        warnings.simplefilter("always")
        watch = watched(tmp_path, attacks, n=8)
    assert (watch.looks, watch.failures) == (2, 8)
    for name in ("crashing", "outside", "listing", "lost"):
        assert math.isnan(watch.latest[f"leakage/{name}/f1"])
    assert watch.latest[F1] > 0
    for line in watch.lines("crashing"):
        assert "IndexError at test_looks.py" in line["unknown"]
        assert line["metrics"]["f1"]["value"] is None
    assert "must return a WordGuess" in watch.lines("listing")[0]["unknown"]
    files = [path.read_text() for path in tmp_path.rglob("*") if path.is_file()]
    texts = [*(str(warning.message) for warning in caught), caplog.text, *files]
    assert not [text for text in texts if SECRET in text or "424243" in text]


def test_a_method_that_is_not_made_for_a_batch_is_unknown_and_no_failure(tmp_path: Path) -> None:
    class Full(Probe):
        default_name = "full"

        def run(self, view: Any, query: Any = None) -> Any:
            raise Inapplicable("too many types")

    with pytest.warns(UserWarning, match="too many types") as caught:
        watch = watched(tmp_path, [Full(), Probe()], n=8)
    assert (watch.looks, watch.failures) == (2, 0)
    assert math.isnan(watch.latest["leakage/full/f1"])
    assert watch.latest["monitor/failures"] == 0
    assert not [one for one in caught if "monitor/failures" in str(one.message)]


def test_what_never_came_is_no_look_at_a_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Late(Probe):
        def run(self, view: Any, query: Any = None) -> Any:
            raise NotYet("it waits")

    with caplog.at_level("INFO"), pytest.warns(UserWarning, match="training ended before"):
        watch = watched(tmp_path, Late(), n=4)
    assert watch.looks == 2  # the second one is unknown, behind the only step
    assert "; attacks that wait are tried in between" in caplog.text
    assert "measured 0 of 1 steps" in caplog.text
    [fit] = findings(read([watch.folder])).runs
    assert (fit.looked_at, fit.length) == (1, 1)


def test_non_finite_gradients_are_unknown(tmp_path: Path) -> None:
    batches = list(random_token_loader(8))

    def loss(model: Any, batch: Any) -> torch.Tensor:
        return model_loss(model, batch) * (math.nan if batch is batches[1] else 1.0)

    attacks = [Rejecting(), FlatChat(n_types=20)]
    with pytest.warns(UserWarning, match="non-finite"):
        watch = watched(tmp_path, attacks, batches=batches, loss=loss)
    assert math.isnan(watch.latest["leakage/rejecting/f1"])
    assert math.isnan(watch.latest["leakage/flatchat/f1"])
    assert watch.failures == 2


def test_steps_that_share_nothing_are_passed_over_and_then_unknown(tmp_path: Path) -> None:
    ids = torch.arange(3, 9).repeat(4, 1)
    batches = [{"input_ids": ids, "labels": torch.full_like(ids, -100)}] * 30

    def loss(model: Any, batch: Any) -> torch.Tensor:
        return states_by_blocks(model, batch["input_ids"]).square().mean()

    with pytest.warns(UserWarning, match="nothing was shared in 21 steps"):
        watch = watched(tmp_path, Probe(), batches=batches, loss=loss)
    assert (watch.looks, watch.failures) == (1, 1)
    assert math.isnan(watch.latest[F1])


def test_a_batch_that_contradicts_itself_is_unknown(tmp_path: Path) -> None:
    """It cannot be the one that the model was trained on."""

    def adapter(batch: Any) -> TokenBatch:
        return TokenBatch(batch["input_ids"] + 87654321, None, batch["attention_mask"], "causal")

    batches = random_token_loader(8, padded=True)
    with pytest.warns(UserWarning, match=r"the batch could not be read: .*adapter"):
        watch = watched(
            tmp_path, Probe(), batches=batches, loss=loss_by_blocks, batch_adapter=adapter
        )
    assert (watch.looks, watch.failures) == (2, 2)
    assert math.isnan(watch.latest[F1])
    assert "87654321" not in (tmp_path / "leakage.jsonl").read_text()


def test_a_later_batch_that_cannot_be_read_is_unknown_and_the_first_is_refused(
    tmp_path: Path,
) -> None:
    def adapter(batch: Any) -> TokenBatch:
        if int(batch["input_ids"][0, 0]) % 2 == 0:
            raise BatchError("odd")
        return TokenBatch(batch["input_ids"], batch["labels"], None, "causal")

    even = [int(batch["input_ids"][0, 0]) % 2 == 0 for batch in random_token_loader(32)]
    assert not even[0]
    with pytest.warns(UserWarning, match="could not be read: odd"):
        training = train(tmp_path, Probe(), loss=loss_by_blocks, batch_adapter=adapter)
    assert training.steps == 8
    assert training.watch.failures == sum(even) > 0
    batches = [{"tokens": ids} for ids in torch.randint(3, 97, (2, 1, 8))]

    def odd_loss(model: Any, batch: Any) -> torch.Tensor:
        return loss_by_blocks(model, {"input_ids": batch["tokens"], "labels": batch["tokens"]})

    with pytest.raises(BatchError, match=r"batch_adapter=batch_adapter\)  # for Watch\("):
        watched(tmp_path / "first", Probe(), batches=batches, loss=odd_loss)


# ---- what is refused ----------------------------------------------------------------------------


class HeadAndBias(Probe):
    def needs(self, anatomy: Any) -> Surfaces:
        return Surfaces(gradients=(HEAD_WEIGHT, HEAD_BIAS))


@pytest.mark.parametrize(
    ("attacks", "settings", "words"),
    [
        ([], {}, "at least one"),
        ([Probe(), Probe()], {}, "'probe' is that of two attacks"),
        (Probe(name="a/b"), {}, "has more than letters"),
        (Probe(), {"max_overhead": 0.1, "every_n_steps": 5}, "not both"),
        (Probe(), {"client": "node"}, "client must be"),
        (Probe(), {"look_seconds": 0}, "look_seconds must be"),
        (Probe(name="worst"), {}, "the name 'worst' is"),
        (Probe(), {"public_text": ["a"]}, "give it to the attacks"),
        ("auto", {"public_text": ["a"]}, "pass the model's tokenizer="),
        (BiasSign(), {}, "bias_sign.*head's bias"),
        (BagOfWords(), {}, "ties head and embedding"),
        (Probe(), {"gates": [Threshold(F1, 0.5, action="harden")]}, "nothing to turn"),
        (Probe(), {"gates": [Threshold("leakage/no/f1", 0.5)]}, "Watch does not log"),
        (Probe(), {"gates": [Threshold(F1, 0.5)] * 2}, "two gates have the name"),
        (Probe(), {"precision": "bf16"}, "precision must be"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(tmp_path, attacks, settings, words):
    model = tiny_gpt2()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(ValueError, match=words):
        Watch(model, optimizer, attacks, folder=tmp_path, **grouped(settings)).__enter__()
    assert "step" not in vars(optimizer)


def test_settings_that_a_face_takes_from_elsewhere_are_refused() -> None:
    with pytest.raises(ValueError, match=r"LeakageMonitor takes no .*\(precision="):
        LeakageMonitor(settings=WatchSettings(precision="bf16-mixed"))
    with pytest.raises(TypeError, match="write settings=WatchSettings"):
        LeakageMonitor(settings=RoundSettings())  # whose fields of a round it would not read
    with pytest.raises(ValueError, match=r"RoundObserver takes no .*\(reveal="):
        RoundObserver(tiny_gpt2(), torch.optim.SGD, 1, settings=RoundSettings(reveal=True))


def two_optimizers(model: nn.Module, part: nn.Parameter) -> list[torch.optim.Optimizer]:
    rest = [p for p in model.parameters() if p is not part]
    return [torch.optim.SGD(rest, 0.01), torch.optim.SGD([part], 0.01)]


def test_an_attack_on_parameters_of_two_optimizers_is_refused(tmp_path: Path) -> None:
    model = tiny_bert_mlm()
    pair = two_optimizers(model, model.cls.predictions.bias)
    with pytest.raises(ValueError, match="different optimizers"):
        watched(tmp_path, HeadAndBias(), model, optimizers=pair)


# ---- surfaces that are not shared ---------------------------------------------------------------


def test_a_frozen_head_is_not_exposed_and_not_called_safe(tmp_path: Path) -> None:
    model = tiny_gpt2(tied=False)
    model.lm_head.weight.requires_grad_(False)
    probe = Probe()
    with pytest.warns(UserWarning, match="not 'safe'.*trained parameters") as caught:
        watch = watched(tmp_path, probe, model, n=8)
    [message] = [str(w.message) for w in caught if "not 'safe'" in str(w.message)]
    trained = sum(p.requires_grad for p in model.parameters())
    assert f"{trained} of {trained} trained parameters are tested by none" in message
    assert watch.latest["leakage/probe/exposed"] == watch.latest[F1] == 0
    assert (probe.seen, probe.prepared, watch.failures) == ([], 0, 0)
    assert watch.lines()[0]["exposed"] is False


# ---- which batches and steps a look covers ------------------------------------------------------


def n_types(*batches: Any) -> int:
    return torch.cat([b["labels"][:, 1:].flatten() for b in batches]).unique().numel()


def test_of_several_steps_on_one_batch_the_first_is_looked_at(tmp_path: Path) -> None:
    model = still_gpt2().train()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    probe = Probe()
    with Watch(model, optimizer, probe, folder=tmp_path, every_n_steps=1) as watch:
        for batch in random_token_loader(8):
            with watch.step(batch):
                model_loss(model, batch).backward()
                for _ in range(3):
                    optimizer.step()
                optimizer.zero_grad()
    assert [line["unknown"] for line in lines_of(tmp_path)] == [None] * 2
    assert len(probe.seen) == 2


def test_an_optimizer_that_steps_seldom_is_looked_at_over_its_own_window(tmp_path: Path) -> None:
    model = still_gpt2(tied=False).train()
    often, seldom = two_optimizers(model, model.lm_head.weight)
    batches = list(random_token_loader(32))
    with Watch(model, [often, seldom], Probe(), folder=tmp_path, every_n_steps=1) as watch:
        for number, batch in enumerate(batches, 1):
            with watch.step(batch):
                model_loss(model, batch).backward()
                for optimizer, every in ((often, 1), (seldom, 4)):
                    if number % every == 0:
                        optimizer.step()
                        optimizer.zero_grad()
    lines = lines_of(tmp_path)
    assert [line["n"] for line in lines] == [n_types(*batches[:4]), n_types(*batches[4:])]
    assert all(line["unknown"] is None for line in lines)


def test_batches_that_train_nothing_are_no_part_of_the_truth(tmp_path: Path) -> None:
    batches = list(random_token_loader(32))

    def loss(model: Any, batch: Any) -> torch.Tensor | None:
        return None if batch is batches[0] else model_loss(model, batch)

    watch = watched(tmp_path, Probe(), batches=batches, loss=loss, accumulate=2)
    windows = [batches[1:2], *(batches[n : n + 2] for n in (2, 4, 6))]
    assert [line["n"] for line in watch.lines()] == [n_types(*window) for window in windows]
    assert watch.failures == 0


# ---- when a look is due -------------------------------------------------------------------------


@given(
    share=st.sampled_from([0.005, 0.05, 1.0]),
    look=st.floats(0.01, 10),
    set_up=st.floats(0, 20),
    first=st.integers(0, 3),
)
def test_max_overhead_keeps_looks_within_their_share_of_the_time_so_far(
    share: float, look: float, set_up: float, first: int
) -> None:
    """Where the length of the run is not known; the first look is always made."""
    cadence = Cadence(max_overhead=share)
    cadence.begin(first, None, set_up)
    generator = torch.Generator().manual_seed(0)
    costs = [look * (1 + torch.rand((), generator=generator).item()) for _ in range(2000)]
    spent, dearest, steps = set_up, 0.0, list[int]()
    for step in range(first, 2000):
        if cadence.due(step):
            spent, dearest = spent + costs[step], max(dearest, costs[step])
            steps.append(step)
            cadence.next_step = cadence.after_look(step, costs[step], 0.5)
            paid = share * (step - first) * 0.5
            assert len(steps) == 1 or spent <= paid * (1 + 1e-9) + look  # a look may cost more
    assert steps[0] == first
    paying = first + math.ceil((spent + dearest) / (share * 0.5))  # it is not later than needed
    assert cadence.next_step <= max(steps[-1] + 1, paying)
    owed = cadence.after_retry(100.0, 0.5)  # later looks pay for it
    assert owed >= first + (spent + 100.0) / (share * 0.5)


def looks_of(cadence: Cadence, steps: int, look: float, step_seconds: float) -> list[int]:
    """The steps that a run of so many steps is looked at in."""
    looks = []
    for step in range(steps):
        if cadence.due(step):
            looks.append(step)
            cadence.next_step = cadence.after_look(step, look, step_seconds)
    return looks


@given(
    steps=st.integers(2, 3000),
    look=st.floats(1e-4, 100),
    step_seconds=st.floats(1e-3, 10),
    first=st.integers(0, 1),
    set_up=st.floats(0, 40),
    share=st.none() | st.sampled_from([0.005, 0.05, 0.5]),
)
def test_a_curve_ends_at_the_last_step_where_it_can_and_stays_within_its_price(
    steps: int, look: float, step_seconds: float, first: int, set_up: float, share: float | None
) -> None:
    cadence = Cadence(max_overhead=share)
    cadence.begin(first, steps, set_up)
    looks = looks_of(cadence, steps, look, step_seconds)
    assert looks[0] == first
    training = (steps - first) * step_seconds
    allowed = min(max(0.05 * training, 30.0), training / 4) if share is None else share * training
    further = set_up + len(looks) * look
    assert len(looks) == 1 or further <= allowed * (1 + 1e-9)  # the first one is always made
    if set_up + 2 * look <= allowed:
        assert looks[-1] == steps - 1
    if set_up + 10 * look <= allowed and steps >= 10:
        assert len(looks) >= min(10, steps) - first
        gaps = [b - a for a, b in pairwise(looks)]
        assert max(gaps) <= math.ceil((steps - 1) / 9)


@given(
    steps=st.integers(2, 3000),
    share=st.floats(0, 1),
    n=st.none() | st.integers(1, 100),
    known=st.booleans(),
)
def test_as_many_looks_are_announced_as_are_made_if_they_are_paid_for(
    steps: int, share: float, n: int | None, known: bool
) -> None:
    cadence = Cadence(n)
    first = int(share * (steps - 1))
    cadence.begin(first, steps)
    sentence = cadence.describe(1.0 if known else 0.0)
    made = len(looks_of(cadence, steps, 1.0, 60.0))
    some = f"{made:,}" if n else f"up to {made:,}"
    assert sentence.startswith(f"measures {some} of {steps - first:,} steps")  # of this run


def test_one_sentence_says_how_often_a_run_is_measured_and_what_it_may_take() -> None:
    def sentence(cadence: Cadence, first: int, steps: int | None, look_seconds: float) -> str:
        cadence.begin(first, steps)
        return cadence.describe(look_seconds)

    longer = "; with more than one, the run takes at most {} times as long"
    assert sentence(Cadence(50), 0, None, 0.0) == "measures one step in 50"
    assert sentence(Cadence(50), 0, 200, 3.0) == "measures 4 of 200 steps, about 3 s each"
    curve, share = Cadence(), Cadence(max_overhead=0.1)
    assert sentence(share, 0, 1200, 0.0) == f"measures up to 10 of 1,200 steps{longer.format(1.1)}"
    unknown = f"measures steps 4, 8, 16 or later{longer.format(1.25)}"
    assert sentence(curve, 3, None, 0.0) == unknown
    known = f"measures up to 10 of 1,000 steps, about 0.1 s each{longer.format(1.25)}"
    assert sentence(curve, 0, 1000, 0.1) == known
    assert len(looks_of(curve, 1000, 0.1, 1.0)) == 10
    assert sentence(curve, 0, 1000, 10.0).startswith("measures up to 3 of 1,000 steps")


def test_listed_attacks_are_looked_at_as_a_curve_unless_the_user_rules() -> None:
    def cadence_of(**asked: Any) -> Cadence:
        return LeakageMonitor([Probe()], **asked).engine.options.cadence

    assert cadence_of() == LeakageMonitor().engine.options.cadence
    assert cadence_of(every_n_steps=7) == Cadence(7)
    assert cadence_of(max_overhead=0.1) == Cadence(max_overhead=0.1)


LAST_LINE = (
    r"measured 2 of 8 steps in [\d.]+ s \(probe \d+%, quick \d+%\), of it 0.0 s for checks on "
    r"known words; with [\d.]+ s of set-up \d+% of the run"
)


def test_what_each_attack_took_of_the_looks_is_written_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Slow(Probe):
        def run(self, view: Any, query: Any = None) -> Any:
            work_for(0.11)
            return super().run(view, query)

    with caplog.at_level("INFO"):
        watch = watched(tmp_path, [Slow(), Probe(name="quick")], every_n_steps=4)
    folder = watch.folder
    lines = map(json.loads, (folder / "run.jsonl").read_text().splitlines())
    looks = [line for line in lines if line["kind"] == "look"]
    assert all(line["seconds"] > sum(line["seconds_of"].values()) for line in looks)
    assert all(line["seconds_of"]["probe"] > 0.1 > line["seconds_of"]["quick"] for line in looks)
    [fit] = findings(read([folder])).runs
    assert [(one.attack, one.looks) for one in fit.costs[:2]] == [("probe", 2), ("quick", 2)]
    assert sum(one.seconds for one in fit.costs) == pytest.approx(sum(o["seconds"] for o in looks))
    assert sum(one.share for one in fit.costs) == pytest.approx(1)
    assert re.search(LAST_LINE, caplog.text)


def test_the_last_line_says_the_known_part_of_what_is_unknown(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        watch = watched(tmp_path, [Probe(), Crashing()], every_n_steps=4)
    known = f"{watch.latest['leakage/worst/words_at_least']:.2f}"
    last = r"last measured: words unknown \(step 4\), words at least {} \(step 4\)$"
    assert re.search(last.format(known), caplog.text, re.MULTILINE)


def test_looks_are_at_multiples_of_n_or_twice_as_far_each_time_once_they_are_paid_for() -> None:
    """The latter where the number of steps is unknown."""
    assert looks_of(Cadence(50), 120, 1.0, 1.0) == [0, 50, 100]
    cadence = Cadence()
    cadence.begin(0, None)
    assert looks_of(cadence, 1500, 1.0, 1.0) == [0, 8, 17, 35, 71, 143, 287, 575, 1151]
    cadence.begin(0, None)
    assert looks_of(cadence, 1500, 4.0, 1.0) == [0, 32, 65, 131, 263, 527, 1055]


def test_a_run_that_goes_on_beyond_its_plan_is_looked_at_further() -> None:
    cadence = Cadence()
    cadence.begin(0, 10)
    assert looks_of(cadence, 100, 0.1, 1.0) == [*range(10), 19, 39, 79]


def test_a_retry_moves_the_looks_of_a_curve_where_it_leaves_too_little_for_ten() -> None:
    cadence = Cadence()
    cadence.begin(0, 100)
    cadence.next_step = cadence.after_look(0, 1.0, 1.0)
    assert cadence.after_retry(3.0, 1.0) == 11
    assert cadence.spent == 4.0
    assert cadence.after_retry(15.0, 1.0) == math.ceil(99 / 6)  # 6 of 25 s are left
    assert cadence.after_retry(15.0, 1.0) == 100  # none


@pytest.mark.parametrize("accumulate", [1, 4])
def test_max_overhead_counts_whole_optimizer_steps(
    tmp_path: Path, accumulate: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, seconds = [0.0], []
    plain = Cadence.after_look

    def recorded(self: Cadence, step: int, look: float, each: float) -> int:
        seconds.append(each)
        return plain(self, step, 1e-9, each)

    def loss(model: Any, batch: Any) -> torch.Tensor:
        clock[0] += 1000.0
        return model_loss(model, batch)

    monkeypatch.setattr(Cadence, "after_look", recorded)
    monkeypatch.setattr(progress.time, "perf_counter", lambda: 3 * clock[0])  # others compute too
    monkeypatch.setattr(progress.time, "process_time", lambda: clock[0])
    watched(tmp_path, Probe(), max_overhead=0.5, loss=loss, accumulate=accumulate, n=80)
    assert seconds
    assert seconds == pytest.approx([1000 * accumulate] * len(seconds), rel=0.01)
