"""transformers' Trainer is watched as Lightning's is, and trains as it does without the watch."""

from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.data import DataLoader, SequentialSampler
from transformers import Trainer, TrainerCallback, TrainingArguments

from lightning_fedleak import BagOfWords, FCMembership, FlatChat, LeakageMonitor
from lightning_fedleak.attacks.memorization import Extraction, LossRatio
from lightning_fedleak.engine import Games, Memorization
from lightning_fedleak.evaluation.canaries import leave_out
from lightning_fedleak.report import findings, read
from lightning_fedleak.trainers import LeakageCallback, Threshold, Watch
from tests.callbacks.runs import Probe
from tests.helpers.loops import one_step
from tests.helpers.models import tiny_gpt2
from tests.helpers.settings import QUIET, grouped
from tests.trainers.test_watch import attacks, lines

WORDS = "leakage/worst/words"


def rows(count: int = 32, length: int = 9) -> list[dict[str, torch.Tensor]]:
    ids = torch.randint(3, 60, (count, length), generator=torch.Generator().manual_seed(2))
    return [{"input_ids": x, "labels": x} for x in ids]


class Sequential(Trainer):
    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return SequentialSampler(self.train_dataset)  # type: ignore[arg-type]


class Recorder(TrainerCallback):
    """Keeps the loss of each log, and the random state after each step."""

    def __init__(self) -> None:
        self.states: list[torch.Tensor] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.states.append(torch.get_rng_state())


class Evaluated(TrainerCallback):
    """Keeps a metric of each evaluation."""

    def __init__(self, name: str) -> None:
        self.name, self.values = name, list[float]()

    def on_evaluate(self, *_: Any, metrics: Any = None, **__: Any) -> None:
        self.values.append(metrics[self.name])


def trainer_of(folder, model=None, dropout=0.0, kind=Sequential, **more) -> Trainer:
    torch.manual_seed(7)
    model = tiny_gpt2(tied=False, dropout=dropout) if model is None else model
    settings = {
        "per_device_train_batch_size": 4,
        "num_train_epochs": 1,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "max_grad_norm": 0.0,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
    } | more
    data = settings.pop("train_dataset", None) or rows()
    evaluated = settings.pop("eval_dataset", None)
    optimizers = settings.pop("optimizers", (None, None))
    arguments = TrainingArguments(str(folder), **settings)
    return kind(model, arguments, train_dataset=data, eval_dataset=evaluated, optimizers=optimizers)


def watched(trainer: Trainer, *arguments: Any, **settings: Any) -> LeakageCallback:
    callback = LeakageCallback(trainer, *arguments, **grouped(settings, every_n_steps=1))
    trainer.add_callback(callback)
    return callback


def user_logs(trainer: Trainer) -> list[dict[str, float]]:
    """Return what the Trainer has logged of its own, but for its clock."""
    return [
        {name: value for name, value in log.items() if not name.endswith(("runtime", "per_second"))}
        for log in trainer.state.log_history
        if not any(name.startswith(("leakage", "monitor", "gate")) for name in log)
    ]


def constant(optimizer: torch.optim.Optimizer) -> Any:
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)


class Module(L.LightningModule):
    def __init__(self, model: Any, optimizer: Any) -> None:
        super().__init__()
        self.model, self.optimizer = model, optimizer

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.model(**batch).loss

    def configure_optimizers(self) -> Any:
        return self.optimizer


def three_faces(folder: Path, make: Any, data: Any, played: Any, **settings: Any) -> list[Any]:
    """Return the lines of Lightning, the Trainer and a loop that train the same, and the models."""
    runs = []
    for face in ("lightning", "trainer", "loop"):
        torch.manual_seed(7)
        model = make().train()
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, 1e-3)
        loader: Any = DataLoader(data, batch_size=4)
        place = folder / face
        if face == "lightning":
            monitor = LeakageMonitor(played(), folder=place, **grouped(settings))
            L.Trainer(max_epochs=1, callbacks=[monitor], **QUIET).fit(
                Module(model, optimizer), loader
            )
        elif face == "trainer":
            trainer = trainer_of(place, model, train_dataset=data, optimizers=constant(optimizer))
            watched(trainer, played(), **settings)
            trainer.train()
        else:
            with Watch(model, optimizer, played(), folder=place, **grouped(settings)) as watch:
                for batch in loader:
                    one_step(watch, model, optimizer, batch)
        runs.append((lines(place), [p.detach() for p in trained]))
    return runs


def test_three_faces_write_the_same_lines(tmp_path: Path) -> None:
    def make() -> Any:
        return tiny_gpt2(tied=False, dropout=0.0)

    settings = {"every_n_steps": 2, "games": Games(targets=4)}
    (first, weights), *rest = three_faces(tmp_path, make, rows(), attacks, **settings)
    for lines_of_face, weights_of_face in rest:
        assert lines_of_face == first
        for weight, other in zip(weights, weights_of_face, strict=True):
            # The Trainer divides by the number of labels, also of those that nothing predicts:
            # Adam's epsilon is all that feels it.
            torch.testing.assert_close(other, weight, rtol=1e-2, atol=1e-4)
    assert {line["attack"] for line in first} == {attack.name for attack in attacks()}
    assert all(line["unknown"] is None for line in first[3:])


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"gradient_accumulation_steps": 3, "max_grad_norm": 0.5, "bf16": True},
        pytest.param(
            {"torch_compile": True, "torch_compile_backend": "aot_eager"}, marks=pytest.mark.slow
        ),
    ],
    ids=str,
)
def test_training_is_not_disturbed(tmp_path: Path, settings: dict[str, Any]) -> None:
    runs = []
    for on in (False, True):
        torch.compiler.reset()
        trainer, recorder = trainer_of(tmp_path / str(on), dropout=0.2, **settings), Recorder()
        played = [FlatChat(n_types=12), BagOfWords()]
        if not settings.get("torch_compile"):
            played.append(FCMembership(1))  # type: ignore[arg-type]
        callback = watched(trainer, played, games=Games(targets=4)) if on else None
        trainer.add_callback(recorder)
        trainer.train()
        runs.append((user_logs(trainer), recorder.states, [*trainer.model.parameters()]))
    (logs, states, weights), (logs_on, states_on, weights_on) = runs
    assert logs == logs_on
    assert all(map(torch.equal, states, states_on))
    assert all(map(torch.equal, weights, weights_on))
    assert callback is not None
    assert callback.latest["leakage/bag_of_words/f1"] == 1.0
    assert "training_step" not in vars(trainer)
    shown = [log for log in trainer.state.log_history if "leakage/bag_of_words/f1" in log]
    assert len(shown) == callback.watch.engine.results.looks == len(states)


def test_what_is_read_is_the_clipped_gradient_of_all_tokens(tmp_path: Path) -> None:
    data = rows()
    for row in data[:4]:  # batches of different sizes: the Trainer divides by all tokens
        row["labels"] = row["labels"].clone()
        row["labels"][:6] = -100
    probe = Probe()
    trainer = trainer_of(
        tmp_path, gradient_accumulation_steps=2, max_grad_norm=0.5, train_dataset=data
    )
    watched(trainer, [probe])
    trainer.train()
    torch.manual_seed(7)
    model = tiny_gpt2(tied=False, dropout=0.0)
    ids = torch.stack([row["input_ids"] for row in data[:8]])
    labels = torch.stack([row["labels"] for row in data[:8]])
    logits = model(input_ids=ids).logits[:, :-1]
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten()).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    step, _, gradient = probe.seen[0]
    assert step == 0
    torch.testing.assert_close(gradient, model.lm_head.weight.grad, rtol=1e-4, atol=1e-7)
    targets = labels[:, 1:]
    assert lines(tmp_path)[0]["n"] == len(targets[targets != -100].unique())


def test_a_gate_stops_after_a_checkpoint_and_the_run_goes_on_from_it(tmp_path: Path) -> None:
    gate = Threshold(WORDS, at_most=0.5, patience=2)
    trainer = trainer_of(tmp_path)
    watched(trainer, [BagOfWords()], [gate])
    trainer.train()
    assert trainer.state.global_step == 3
    assert gate.fired is not None
    assert gate.fired.checkpoint == tmp_path / "checkpoint-3"
    assert (tmp_path / "checkpoint-3" / "model.safetensors").exists()
    assert "resume_from_checkpoint=" in str(gate.fired)
    assert "defended(Trainer)" in str(gate.fired)
    saved = tmp_path / "checkpoint-3" / "fedleak.safetensors"
    assert saved.stat().st_mode & 0o777 == 0o600
    again, gate = trainer_of(tmp_path), Threshold(WORDS, at_most=0.5, patience=4)
    callback = watched(again, [BagOfWords()], [gate])
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert gate.fired is not None  # the breaches before it count
    assert gate.fired.step == 4
    assert callback.watch.engine.results.looks == 5
    assert [line["step"] for line in lines(tmp_path)] == [0, 1, 2, 3, 4]


def test_a_resumed_run_trains_as_one_that_was_not_watched(tmp_path: Path) -> None:
    weights = []
    for on in (False, True):
        place = tmp_path / str(on)
        for checkpoint in (None, str(place / "checkpoint-4")):
            trainer = trainer_of(
                place, dropout=0.2, kind=Trainer, save_strategy="steps", save_steps=4
            )
            if on:
                watched(trainer, [BagOfWords()])
            trainer.train(resume_from_checkpoint=checkpoint)
        weights.append([*trainer.model.parameters()])  # type: ignore[union-attr]
    assert all(map(torch.equal, *weights))


def test_fp16_is_unscaled_first(tmp_path: Path) -> None:
    probe = Probe()
    trainer = trainer_of(tmp_path)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30)  # type: ignore[attr-defined]
    trainer.accelerator.scaler = scaler  # as for mixed_precision="fp16", which needs a card
    watched(trainer, [probe])

    class Overflows(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            if scaler._scale is not None:  # which it has after the first step
                scaler._scale.fill_(float("inf") if state.global_step == 1 else 2.0**30)

    trainer.add_callback(Overflows())
    trainer.train()
    torch.manual_seed(7)
    model = tiny_gpt2(tied=False, dropout=0.0)
    ids = torch.stack([row["input_ids"] for row in rows()[:4]])
    # The Trainer divides by the number of labels, also of those that nothing predicts.
    (model(input_ids=ids, labels=ids).loss * 8 / 9).backward()
    torch.testing.assert_close(probe.seen[0][2], model.lm_head.weight.grad)
    assert [step for step, *_ in probe.seen] == [0, 2, 3, 4, 5, 6, 7]


def test_it_is_given_the_trainer(tmp_path: Path) -> None:
    line = r"trainer\.add_callback\(LeakageCallback\(trainer, \.\.\.\)\)"
    with pytest.raises(TypeError, match=line):
        LeakageCallback()
    trainer = trainer_of(tmp_path)
    with pytest.raises(ValueError, match=line):
        Trainer(trainer.model, trainer.args, callbacks=[LeakageCallback(trainer, [BagOfWords()])])


@pytest.mark.parametrize(
    ("settings", "gates", "words"),
    [
        ({"metric_for_best_model": WORDS}, [], "greater_is_better=False"),
        ({"metric_for_best_model": "leakage/choose", "greater_is_better": False}, [], "gates="),
        (
            {"metric_for_best_model": "leakage/no/f1", "greater_is_better": False},
            [],
            "that is logged",
        ),
        ({"optim": "adalomo"}, [], "during backward"),
    ],
)
def test_what_cannot_be_watched_is_refused(tmp_path, settings, gates, words) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    trainer = trainer_of(tmp_path, optimizers=constant(optimizer), **settings)
    watched(trainer, [BagOfWords()], gates)
    with pytest.raises(ValueError, match=words):
        trainer.train()
    assert "training_step" not in vars(trainer)


def test_weights_trained_on_preferences_are_not_asked(tmp_path: Path) -> None:
    """A trainer of preferences is recognised by its class, and its steps are watched."""
    kind = type("CustomDPOTrainer", (type("DPOTrainer", (Sequential,), {}),), {})
    trainer = trainer_of(tmp_path, kind=kind)
    with pytest.raises(ValueError, match=r"DPOTrainer .* remove loss_ratio from attacks="):
        LeakageCallback(trainer, [BagOfWords(), LossRatio()])
    callback = watched(trainer, [BagOfWords()])
    trainer.train()
    assert callback.latest["leakage/bag_of_words/f1"] == 1.0


class Raises(TrainerCallback):
    """Raises at one moment after the first step."""

    def __init__(self, moment: str) -> None:
        def raises(args: Any, state: Any, control: Any, **more: Any) -> None:
            if state.global_step >= 1:
                raise KeyboardInterrupt

        setattr(self, moment, raises)


@pytest.mark.parametrize("moment", ["on_pre_optimizer_step", "on_evaluate", "on_train_end"])
def test_whatever_raises_the_trainer_is_put_back(tmp_path: Path, moment: str) -> None:
    trainer = trainer_of(tmp_path, eval_strategy="steps", eval_steps=2, eval_dataset=rows(4))
    callback = watched(trainer, [BagOfWords(), FCMembership(1)], games=Games(targets=4))
    backward = torch.autograd.backward
    trainer.callback_handler.callbacks.insert(0, Raises(moment))
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert "training_step" not in vars(trainer)
    assert torch.autograd.backward is backward
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in trainer.model.modules())
    assert callback.watch.engine.fit is None
    assert lines(tmp_path, "run")[-1]["how"] == "KeyboardInterrupt"
    trainer.callback_handler.callbacks.pop(0)
    trainer.train()  # again, from its beginning
    assert lines(tmp_path, "run")[-1]["how"] == "finished"
    assert callback.latest["leakage/bag_of_words/f1"] == 1.0


def test_the_last_group_of_batches_is_short(tmp_path: Path) -> None:
    probe = Probe()
    trainer = trainer_of(tmp_path, gradient_accumulation_steps=3, train_dataset=rows(20))
    watched(trainer, [probe, BagOfWords()])
    trainer.train()
    assert [step for step, *_ in probe.seen] == [0, 1]
    torch.manual_seed(7)
    model = tiny_gpt2(tied=False, dropout=0.0)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.0)
    groups = torch.stack([row["input_ids"] for row in rows(20)]).split(12)
    words = [line for line in lines(tmp_path) if line["attack"] == "bag_of_words"]
    for ids, (_, _, gradient), line in zip(groups, probe.seen, words, strict=True):
        (model(input_ids=ids, labels=ids).loss * 8 / 9).backward()
        torch.testing.assert_close(gradient, model.lm_head.weight.grad, rtol=1e-3, atol=1e-6)
        optimizer.step()
        optimizer.zero_grad()
        assert line["n"] == len(ids[:, :-1].unique())  # a text's last token predicts nothing
        assert line["metrics"]["f1"]["value"] == 1.0


def test_the_last_look_is_at_the_last_weights(tmp_path: Path) -> None:
    """Not at the best ones, which the Trainer loads before it says that training ended."""
    train, _ = leave_out(rows(384), 192, seed=1)
    looks = {}
    for best in (False, True):
        trainer = trainer_of(
            tmp_path / str(best), kind=Trainer, train_dataset=train, eval_dataset=rows(8),
            max_steps=12, eval_strategy="steps", eval_steps=4, save_strategy="steps", save_steps=4,
            load_best_model_at_end=best, metric_for_best_model="loss", greater_is_better=True,
            accelerator_config={"use_seedable_sampler": False},
        )  # fmt: skip
        memorization = Memorization(max_overhead=4 / 3, looks=(0.5,))
        watched(trainer, [LossRatio()], memorization=memorization)
        trainer.train()
        looks[best] = lines(tmp_path / str(best))[-1]
    assert looks[True]["step"] == 12
    assert trainer.state.best_global_step != 12
    assert looks[True]["metrics"] == looks[False]["metrics"]


@pytest.mark.parametrize("metric", ["leakage/loss_ratio/auc", "leakage/choose"])
def test_leakage_of_older_weights_chooses_no_checkpoint(tmp_path: Path, metric: str) -> None:
    train, _ = leave_out(rows(384), 192, seed=1)
    trainer = trainer_of(
        tmp_path, kind=Trainer, train_dataset=train, eval_dataset=rows(8),
        eval_strategy="steps", eval_steps=12, save_strategy="steps", save_steps=12,
        metric_for_best_model=metric, greater_is_better=False,
        accelerator_config={"use_seedable_sampler": False},
    )  # fmt: skip
    gates = [Threshold(METRIC, **limits(1.0))]
    watched(trainer, [LossRatio()], gates, memorization=SETTINGS)
    notes, losses = Evaluated(f"eval_{metric}"), Evaluated("eval_loss")
    trainer.add_callback(notes)
    trainer.add_callback(losses)
    trainer.train()
    assert [value < float("inf") for value in notes.values] == [False, True, False, True]
    if metric == "leakage/choose":
        assert notes.values[1::2] == losses.values[1::2]


def test_a_leakage_chooses_the_checkpoint_and_unknown_is_worst(tmp_path: Path) -> None:
    trainer = trainer_of(
        tmp_path, metric_for_best_model="leakage/flatchat/f1", greater_is_better=False,
        save_strategy="steps", save_steps=4, eval_strategy="steps", eval_steps=4,
        eval_on_start=True, eval_dataset=rows(4),
    )  # fmt: skip
    callback = watched(trainer, [FlatChat(n_types=12)])
    notes = Evaluated("eval_leakage/flatchat/f1")
    trainer.add_callback(notes)
    trainer.train()
    assert notes.values[0] == float("inf")
    assert trainer.state.best_metric == min(notes.values) < 1
    assert callback.watch.utility.keys() == {"loss", "eval_loss", "train_loss"}


def test_losses_are_of_the_steps_of_their_evaluations_and_have_cards(tmp_path: Path) -> None:
    trainer = trainer_of(
        tmp_path, eval_strategy="steps", eval_steps=3, eval_dataset=rows(4), logging_steps=2
    )
    callback = watched(trainer, [BagOfWords()], tensorboard=True)
    trainer.train()
    expected = {
        name: [(log["step"], log[name]) for log in trainer.state.log_history if name in log]
        for name in ("eval_loss", "loss")
    }
    assert [step for step, _ in expected["eval_loss"]] == [3, 6, 8]
    found = findings(read([callback.watch.folder])).runs[0].utility
    assert found["eval_loss"] == expected["eval_loss"]
    assert set(found["loss"]) <= {*expected["loss"]}
    events = EventAccumulator(str(callback.watch.folder / "tensorboard")).Reload()
    cards = [(one.step, one.value) for one in events.Scalars("1_leakage/eval_loss")]
    assert cards == [(step, pytest.approx(value)) for step, value in expected["eval_loss"]]
    assert "1_leakage/loss" in events.Tags()["scalars"]


METRIC = "leakage/loss_ratio/auc"
SETTINGS = Memorization(max_overhead=4 / 3, looks=(0.5,))
TRAIN, EVALUATED = leave_out(rows(440), 220, seed=1)[0], rows(8)


def start() -> tuple[Any, torch.optim.Optimizer, Any]:
    torch.manual_seed(7)
    model = tiny_gpt2(tied=False, dropout=0.0).train()
    return (
        model,
        torch.optim.AdamW(model.parameters(), 1e-2, eps=1e-12),
        DataLoader(TRAIN, batch_size=4),
    )  # type: ignore[arg-type]


def played() -> list[Any]:
    return [LossRatio(), Extraction(tokens=3)]


def limits(at_most: float) -> dict[str, Any]:
    return {"at_most": at_most, "action": "warn", "strict": False}


def in_a_loop(place: Path, at_most: float) -> float:
    model, optimizer, loader = start()
    gate, best = Threshold(METRIC, **limits(at_most)), float("inf")
    settings: dict[str, Any] = {"folder": place, "memorization": SETTINGS}
    with Watch(model, optimizer, played(), [gate], loader, **grouped(settings)) as watch:
        for _ in range(2):
            for batch in loader:
                one_step(watch, model, optimizer, batch)
            with torch.no_grad():
                batch = next(iter(DataLoader(EVALUATED, batch_size=8)))  # type: ignore[arg-type]
                loss = float(model.eval()(**batch).loss)
            best = min(best, watch.choose(loss))
            model.train()
    return best


def test_weights_that_give_away_too_much_are_not_chosen(tmp_path: Path) -> None:
    assert in_a_loop(tmp_path, 0.5) == float("inf")


def test_a_loop_without_a_gate_on_the_weights_cannot_choose(tmp_path: Path) -> None:
    model, optimizer, loader = start()
    settings: dict[str, Any] = {"folder": tmp_path, "memorization": SETTINGS}
    with (
        Watch(model, optimizer, played(), [], loader, **grouped(settings)) as watch,
        pytest.raises(ValueError, match="needs a gate on the trained weights"),
    ):
        watch.choose(1.0)
