"""TRL's trainers: what is read is of the rows that they make, each number recomputed."""

import copy
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from sklearn.metrics import roc_auc_score
from torch.nn import functional
from transformers import LlamaConfig, LlamaForSequenceClassification

pytest.importorskip("trl")

import trl
from datasets import Dataset
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

from lightning_fedleak import BagOfWords, FCMembership, FlatChat, SubspaceWords
from lightning_fedleak.attacks import GradientMembership, PublicText, SubspaceMembership
from lightning_fedleak.attacks.memorization import PolicyDrift, PreferenceMargin, RewardGain
from lightning_fedleak.engine import Games, Memorization
from lightning_fedleak.engine.channels.control import Controls
from lightning_fedleak.evaluation.canaries import leave_out
from lightning_fedleak.trainers import LeakageCallback, Threshold, WatchSettings
from lightning_fedleak.trainers.rollouts import Rollouts
from tests.callbacks.runs import Probe
from tests.helpers.folders import TEXTS, tiny_tokenizer
from tests.helpers.models import tiny_llama
from tests.trainers.test_transformers import watched
from tests.trainers.test_watch import lines

VOCABULARY = 384
ANSWERS = ["no card is at number nine", "the bakery has a piano", "send the code to Odile"]
CHAT = (
    "{% for message in messages %}{% if message.role == 'assistant' %}{% generation %}"
    "{{ message.content + eos_token }}{% endgeneration %}{% else %}{{ message.content + ': ' }}"
    "{% endif %}{% endfor %}"
)


def model_of(tied: bool = False) -> Any:
    return tiny_llama(tied=tied, vocab=VOCABULARY, d=160)


def tokenizer() -> Any:
    tokenizer_ = tiny_tokenizer()
    tokenizer_.pad_token = tokenizer_.eos_token
    tokenizer_.chat_template = CHAT
    return tokenizer_


def pairs() -> list[dict[str, str]]:
    return [
        {"prompt": text[:18], "completion": f"{text[18:40]} {number}"}
        for number, text in enumerate(TEXTS * 3)
    ]


def conversations() -> list[dict[str, Any]]:
    return [
        {
            "messages": [
                {"role": "user", "content": row["prompt"]},
                {"role": "assistant", "content": row["completion"]},
            ]
        }
        for row in pairs()
    ]


ROWS: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "padded": ([{"text": r["prompt"] + r["completion"]} for r in pairs()], {}),
    "packed": (
        [{"text": r["prompt"] + r["completion"]} for r in pairs()],
        {"packing": True, "max_length": 60},
    ),
    "padding-free": (
        [{"text": r["prompt"] + r["completion"]} for r in pairs()],
        {"padding_free": True, "max_length": None, "pad_to_multiple_of": 64},
    ),
    "completion only": (pairs(), {}),
    "assistant only": (conversations(), {"assistant_only_loss": True}),
}

COMMON: dict[str, Any] = {
    "max_steps": 3, "per_device_train_batch_size": 4, "learning_rate": 1e-2, "max_grad_norm": 0.0,
    "report_to": [], "use_cpu": True, "save_strategy": "no", "disable_tqdm": True,
    "logging_steps": 1, "bf16": False, "gradient_checkpointing": False,
    "dataloader_pin_memory": False,
}  # fmt: skip


def sft(folder: Path, rows: str, model: Any = None, **more: Any) -> SFTTrainer:
    data, settings = ROWS[rows]
    arguments = SFTConfig(str(folder), **({"max_length": 48} | COMMON | settings | more))
    torch.manual_seed(3)
    return SFTTrainer(
        model_of() if model is None else model, args=arguments,
        train_dataset=Dataset.from_list(data), processing_class=tokenizer(),
    )  # fmt: skip


def dpo(folder: Path, kind: Any = DPOTrainer, **more: Any) -> DPOTrainer:
    rows = [
        {"prompt": r["prompt"], "chosen": r["completion"], "rejected": ANSWERS[number % 3]}
        for number, r in enumerate(pairs())
    ]
    torch.manual_seed(3)
    return kind(
        model_of(), ref_model=model_of(),
        args=DPOConfig(str(folder), **({"max_length": 48} | COMMON | more)),
        train_dataset=Dataset.from_list(rows), processing_class=tokenizer(),
    )  # fmt: skip


class Batches:
    """Keeps the batches that a trainer gets, and the weights it begins each of them with."""

    def __init__(self, trainer: Any) -> None:
        self.kept: list[dict[str, Any]] = []
        self.models: list[Any] = []
        step = trainer.training_step

        def noted(model: Any, inputs: Any, *more: Any, **settings: Any) -> Any:
            self.kept.append(copy.deepcopy(dict(inputs)))
            self.models.append(copy.deepcopy({n: p.detach() for n, p in model.named_parameters()}))
            return step(model, inputs, *more, **settings)

        trainer.training_step = noted

    def model(self, number: int) -> Any:
        """Return a fresh model with the weights that a batch began with."""
        model = model_of()
        model.load_state_dict(self.models[number], strict=False)
        return model.train()


def documents(batch: dict[str, Any]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return ids and labels of each document of a batch, by loops over tokens."""
    texts: list[tuple[list[int], list[int]]] = []
    for row, (ids, labels) in enumerate(zip(batch["input_ids"], batch["labels"], strict=True)):
        for column in range(len(ids)):
            if "attention_mask" in batch and not batch["attention_mask"][row, column]:
                continue
            places = batch.get("position_ids")
            if column == 0 if places is None else places[row, column] == 0:
                texts.append(([], []))
            texts[-1][0].append(int(ids[column]))
            texts[-1][1].append(int(labels[column]))
    return [(torch.tensor(ids), torch.tensor(labels)) for ids, labels in texts]


def log_likelihood(model: Any, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the summed log-likelihood of a text's labels, computed alone."""
    if len(ids) < 2:
        return torch.zeros(())
    logits = model(input_ids=ids[None]).logits[0, :-1]
    return -functional.cross_entropy(logits, labels[1:], ignore_index=-100, reduction="sum")


def true_types(texts: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[set[int], set[int]]:
    """Return the types that are read before a label, and those that are labels."""
    read, predicted = set(), set()
    for ids, labels in texts:
        counted = [n for n in range(1, len(ids)) if labels[n] != -100]
        predicted |= {int(labels[n]) for n in counted}
        read |= {int(i) for i in ids[: max(counted, default=0)]}
    return read, predicted


def test_gates_on_what_pairs_hide_are_breached(tmp_path: Path) -> None:
    trainer = dpo(tmp_path)
    gate = Threshold("leakage/flatchat/f1", at_most=0.99)
    watched(trainer, [FlatChat(n_types=20)], [gate])
    trainer.train()
    assert trainer.state.global_step == 1
    assert gate.fired is not None


@pytest.mark.parametrize("rows", ROWS)
def test_sft_reads_the_rows_that_the_trainer_made(tmp_path: Path, rows: str) -> None:
    trainer, probe = sft(tmp_path, rows), Probe()
    batches = Batches(trainer)
    gate = Threshold("leakage/worst/words", at_most=0.99, action="warn")
    watched(trainer, [probe, BagOfWords(), FlatChat(n_types=20)], [gate])
    trainer.train()
    assert gate.fired is not None
    logged = {(line["attack"], line["step"]): line for line in lines(tmp_path)}
    for number, batch in enumerate(batches.kept):
        texts = documents(batch)
        if rows in ("packed", "padding-free"):
            assert len(batch["input_ids"]) == 1
            assert len(texts) >= 4
        read, predicted = true_types(texts)
        assert logged["bag_of_words", number]["n"] == len(read)
        assert logged["flatchat", number]["n"] == len(predicted)
        model = batches.model(number)
        labels = sum(int((labels[1:] != -100).sum()) for _, labels in texts)
        loss = -sum(log_likelihood(model, *text) for text in texts)
        loss.backward()
        gradient = probe.seen[number][2]
        expected = model.lm_head.weight.grad
        assert (
            functional.cosine_similarity(gradient.flatten(), expected.flatten(), dim=0) > 1 - 1e-5
        )
        divisor = float(expected.norm() / gradient.norm())
        total = sum(int((labels != -100).sum()) for _, labels in texts)
        assert labels - 1e-2 < divisor < total + 1e-2
        rows_read = model.get_input_embeddings().weight.grad.any(1).nonzero().flatten().tolist()
        assert set(rows_read) == read
        assert logged["bag_of_words", number]["metrics"]["f1"]["value"] == 1.0
    if rows in ("completion only", "assistant only"):
        assert all(bool((labels == -100).any()) for _, labels in texts)


def test_a_base_in_float16_under_bfloat16_is_made_again(tmp_path: Path) -> None:
    """TRL computes its loss outside of the autocast that Accelerate wraps around the forward."""
    model = get_peft_model(model_of(), LoraConfig(r=16, target_modules=["q_proj", "v_proj"]))
    for name, parameter in model.named_parameters():
        if "lora" not in name:
            parameter.data = parameter.data.half()
    trainer = sft(tmp_path, "padded", model, bf16=True, per_device_train_batch_size=1)
    callback = watched(trainer, [SubspaceWords(capacity_seconds=0)])
    trainer.train()
    assert callback.latest["leakage/step/unexplained"] < 1e-6


def test_training_is_not_disturbed(tmp_path: Path) -> None:
    weights, losses = [], []
    for on in (False, True):
        trainer = sft(tmp_path / str(on), "packed", neftune_noise_alpha=5.0)
        if on:
            watched(trainer, [BagOfWords(), FlatChat(n_types=20)])
        trainer.train()
        weights.append([*trainer.model.parameters()])
        kept = ("loss", "entropy", "num_tokens", "mean_token_accuracy")
        logs = [{n: log[n] for n in kept if n in log} for log in trainer.state.log_history]
        losses.append([log for log in logs if "entropy" in log])
    assert losses[0] == losses[1]
    assert len(losses[0]) == 3
    assert all(map(torch.equal, *weights))


def test_dpo_reads_pairs_or_says_why_not(tmp_path: Path) -> None:
    trainer, probe = dpo(tmp_path), Probe()
    batches = Batches(trainer)
    public = PublicText([torch.tensor(tokenizer()(text)["input_ids"]) for text in TEXTS])
    played = [
        *(probe, BagOfWords(), FlatChat(n_types=20), FCMembership(1), SubspaceMembership()),
        GradientMembership(public_text=public),
    ]
    callback = watched(trainer, played, games=Games(targets=4))
    trainer.train()
    logged = {(line["attack"], line["step"]): line for line in lines(tmp_path)}
    reference = model_of()
    for number, batch in enumerate(batches.kept):
        labels = batch["input_ids"].masked_fill(batch["completion_mask"] == 0, -100)
        texts = documents({**batch, "labels": labels})
        assert len(texts) == 8
        read, _ = true_types(texts)
        assert logged["bag_of_words", number]["n"] == len(read)
        assert logged["bag_of_words", number]["metrics"]["f1"]["value"] == 1.0
        model = batches.model(number)
        ratios = [log_likelihood(model, *t) - log_likelihood(reference, *t).detach() for t in texts]
        margins = torch.stack(ratios[:4]) - torch.stack(ratios[4:])
        (-functional.logsigmoid(trainer.beta * margins).mean()).backward()
        torch.testing.assert_close(
            probe.seen[number][2], model.lm_head.weight.grad, rtol=1e-3, atol=1e-6
        )
        if number:  # games wait for texts of another batch
            assert "rejected" in logged["fc_membership", number]["unknown"]
    assert callback.latest["leakage/subspace_membership/auc"] == 1.0
    assert callback.latest["leakage/worst/words"] == 1.0
    assert all(logged["flatchat", n]["unknown"] is None for n in range(len(batches.kept)))
    assert "leakage/flatchat/control" in callback.latest
    assert math.isnan(callback.latest["leakage/fc_membership/auc"])


# Each of TRL's trainers, whose losses never call the output head: words, signs, and controls.
#
# Words are told by rows of the embedding's gradient that are not zero. Signs are told by what the
# trainer gives its loss: chosen or rejected, a desirable label, an advantage.


PROMPTS = [text[:18] for text in TEXTS * 4]
TRAINERS_ROWS: dict[str, Callable[[], dict[str, list[Any]]]] = {
    "SFT": lambda: {"text": [*TEXTS * 4]},
    "KTO": lambda: {
        "prompt": PROMPTS,
        "completion": [ANSWERS[n % 3] + f" {n}" for n in range(len(PROMPTS))],
        "label": [n % 2 == 0 for n in range(len(PROMPTS))],
    },
    "GRPO": lambda: {"prompt": PROMPTS},
    "RLOO": lambda: {"prompt": PROMPTS},
}
PAIRS = {
    "prompt": PROMPTS,
    "chosen": [text[18:40] for text in TEXTS * 4],
    "rejected": [ANSWERS[n % 3] for n in range(len(PROMPTS))],
}
KINDS: dict[str, tuple[Any, Any]] = {
    "SFT": (trl.SFTTrainer, trl.SFTConfig), "DPO": (trl.DPOTrainer, trl.DPOConfig),
    "KTO": (trl.KTOTrainer, trl.KTOConfig), "GRPO": (trl.GRPOTrainer, trl.GRPOConfig),
    "RLOO": (trl.RLOOTrainer, trl.RLOOConfig), "ORPO": (ORPOTrainer, ORPOConfig),
    "CPO": (CPOTrainer, CPOConfig), "Reward": (trl.RewardTrainer, trl.RewardConfig),
}  # fmt: skip

PADDING = {0}


def reward(completions: list[str], **_: Any) -> list[float]:
    return [float(len({*text})) for text in completions]


def trainer_of(name: str, folder: Path, **more: Any) -> Any:
    """Return a trainer of a tiny model, two steps long."""
    kind, config = KINDS[name]
    lora = more.pop("lora", False)
    rows = more.pop("rows", None) or Dataset.from_dict(TRAINERS_ROWS.get(name, lambda: PAIRS)())
    settings = COMMON | {"max_steps": 2, "per_device_train_batch_size": 4} | more
    given: dict[str, Any] = {}
    if name in ("GRPO", "RLOO"):
        settings |= {"per_device_train_batch_size": 8, "num_generations": 4}
        settings |= {"max_completion_length": 10}
        given["reward_funcs"] = reward
    if name in ("ORPO", "CPO"):
        settings |= {"max_length": 64}
    if lora:
        given["peft_config"] = LoraConfig(r=8, target_modules=["q_proj", "v_proj"])
    torch.manual_seed(3)
    model = model_of()
    if name == "Reward":
        model = LlamaForSequenceClassification(
            LlamaConfig(**{**model.config.to_dict(), "num_labels": 1, "pad_token_id": 0})
        )
    model.save_pretrained(folder / "model")  # some load it again, as what they compare with
    return kind(
        str(folder / "model"), args=config(str(folder), **settings), train_dataset=rows,
        processing_class=tokenizer(), **given,
    )  # fmt: skip


@dataclass
class Truth:
    """What a trainer computes its loss on, beside the callback."""

    words: list[set[int]] = field(default_factory=list)
    inputs: list[dict[str, Any]] = field(default_factory=list)
    reads: list[Any] = field(default_factory=list)

    @classmethod
    def of(cls, trainer: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
        truth, step, loss, play = cls(), trainer.training_step, trainer.compute_loss, Controls._play

        def stepped(model: Any, *more: Any, **settings: Any) -> Any:
            result = step(model, *more, **settings)
            rows = trainer.model.get_input_embeddings().weight.grad
            truth.words.append(set() if rows is None else {*rows.any(1).nonzero()[:, 0].tolist()})
            return result

        def noted(model: Any, inputs: Any, *more: Any, **settings: Any) -> Any:
            truth.inputs.append(dict(inputs))
            return loss(model, inputs, *more, **settings)

        def played(controls: Controls, look: Any, *plans: Any) -> None:
            truth.reads.append([*look.training_step.calls])
            play(controls, look, *plans)

        trainer.training_step, trainer.compute_loss = stepped, noted
        monkeypatch.setattr(Controls, "_play", played)
        monkeypatch.setattr(Controls, "_is_due", lambda *_: True)
        return truth

    def pushed(self, name: str, step: int) -> torch.Tensor | None:
        """Return (B,) whether the loss makes each text less likely; None where signs vary."""
        inputs = self.inputs[step]
        if name == "SFT":
            return torch.zeros(4, dtype=torch.bool)
        if name in ("DPO", "ORPO", "CPO"):
            return torch.arange(8) >= 4
        if name == "KTO":
            return ~torch.tensor(inputs["label"])
        return inputs["advantages"].flatten() < 0


@pytest.mark.parametrize("name", [*KINDS])
def test_words_signs_and_controls(name, tmp_path, monkeypatch) -> None:
    trainer = trainer_of(name, tmp_path)
    attacks = [BagOfWords()] if name == "Reward" else [BagOfWords(), FlatChat(n_types=20)]
    truth = Truth.of(trainer, monkeypatch)
    callback = watched(
        trainer, [*attacks, GradientMembership("sampled")] if name != "Reward" else attacks
    )
    trainer.train()
    assert trainer.state.global_step == 2
    values = callback.watch.engine.results.look_values
    # ORPO and CPO begin a text with the token that pads, whose embedding has no gradient.
    assert values["leakage/worst/words"] >= values["leakage/bag_of_words/f1"] > 0.99
    if name == "Reward":
        return
    assert values["leakage/step/unexplained"] < 1e-5
    assert values["leakage/flatchat/control"] > 0
    for step, reads in enumerate(truth.reads):
        [read] = reads
        batch, rows = read.batch, read.placed.rows
        assert {*batch.context_ids().tolist()} - PADDING == truth.words[step]
        assert not batch.soft_labels
        expected = truth.pushed(name, step)
        assert expected is not None
        signs = torch.zeros(len(expected), dtype=torch.long)
        counted = rows.labels != -100
        signs.index_add_(0, read.placed.text[counted], 1 - 2 * rows.is_rejected[counted].long())
        live = signs != 0
        assert bool(live.any())
        assert torch.equal((signs < 0)[live], expected[live])
        assert bool((rows.is_rejected == expected[read.placed.text])[counted].all())


@pytest.mark.parametrize("name", ["DPO", "GRPO"])
def test_words_of_a_lora_with_a_temperature(name, tmp_path, monkeypatch) -> None:
    more = {"temperature": 0.7} if name == "GRPO" else {"gradient_accumulation_steps": 2}
    trainer = trainer_of(name, tmp_path, lora=True, gradient_checkpointing=True, **more)
    Truth.of(trainer, monkeypatch)
    callback = watched(trainer, [SubspaceWords(capacity_seconds=0)])
    trainer.train()
    assert trainer.state.global_step == 2
    values = callback.watch.engine.results.look_values
    assert values["leakage/step/unexplained"] < 1e-5
    assert values["leakage/subspace_words/control"] > 0.9
    assert values["leakage/worst/words"] > 0.9


def preferences(n: int = 400) -> Dataset:
    """Return pairs of sentences of random words, each with a prompt of its own."""
    generator = random.Random(3)
    words = sorted({word for text in TEXTS for word in text.split()})

    def sentence(length: int) -> str:
        return " ".join(generator.choices(words, k=length))

    return Dataset.from_list(
        [
            {"prompt": sentence(2), "chosen": f" {sentence(4)}", "rejected": f" {sentence(4)}"}
            for _ in range(n)
        ]
    )


@pytest.mark.parametrize("name", ["DPO", "KTO", "ORPO", "CPO"])
def test_the_weights_are_asked_about_preferences(name: str, tmp_path: Path) -> None:
    more = {"max_steps": -1, "num_train_epochs": 6, "per_device_train_batch_size": 8, "beta": 1.0}
    rows = preferences()
    if name == "KTO":
        rows = rows.rename_column("chosen", "completion").remove_columns("rejected")
        rows = rows.add_column("label", [n % 2 == 0 for n in range(len(rows))])
    rate = 2e-3 if name == "KTO" else 5e-3  # at which KTO's loss ends in its flat part on some CPUs
    trainer = trainer_of(name, tmp_path, rows=rows, learning_rate=rate, **more)
    trainer.train_dataset, _ = leave_out(trainer.train_dataset, 140, seed=1)
    settings = WatchSettings(memorization=Memorization(max_overhead=10, looks=()))
    trainer.add_callback(LeakageCallback(trainer, [PreferenceMargin()], settings=settings))
    trainer.train()
    looks = [line for line in lines(tmp_path) if line["attack"] == "preference_margin"]
    assert len(looks) == 6
    last = looks[-1]["metrics"]
    assert last["members"]["value"] + last["others"]["value"] > 380
    assert last["auc"]["low"] > 0.5


def half_reward(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """Reward letters of the half of the alphabet that a prompt's length names."""
    return [
        sum((letter < "m") == len(p) % 2 for letter in c) / max(1, len(c))
        for p, c in zip(prompts, completions, strict=True)
    ]


def prompts_of(n: int = 60) -> Dataset:
    rows = preferences(n)
    return Dataset.from_list([{"prompt": row["prompt"] + row["chosen"]} for row in rows])


def asks(trainer: Any, *attacks: Any) -> LeakageCallback:
    settings = WatchSettings(memorization=Memorization(max_overhead=20, looks=()))
    callback = LeakageCallback(trainer, [*attacks], settings=settings)
    trainer.add_callback(callback)
    return callback


@pytest.mark.parametrize("name", ["GRPO", "RLOO"])
def test_the_weights_are_asked_about_prompts(name, tmp_path, monkeypatch) -> None:
    trainings = []
    for folder, watches in (("with", True), ("without", False)):
        more = {"max_steps": -1, "num_train_epochs": 2, "learning_rate": 1e-3}
        more |= {"steps_per_generation": 2, "num_iterations": 2}  # batches of prompts repeat
        (tmp_path / folder).mkdir()
        trainer = trainer_of(name, tmp_path / folder, rows=prompts_of(), **more)
        trainer.reward_funcs = [half_reward]
        trainer.train_dataset, _ = leave_out(trainer.train_dataset, 30, seed=1)
        if watches:
            asks(trainer, PolicyDrift(), RewardGain())
            members = [trainer.train_dataset[n]["prompt"] for n in range(30)]
            written = written_by(monkeypatch)
        trainer.train()
        state = {n: v.clone() for n, v in trainer.model.state_dict().items()}
        trainings.append(
            (state, torch.get_rng_state(), random.getstate(), trainer.state.log_history)
        )
        if watches:
            model = trainer.model.eval()
    (with_it, *states, logs), (without, *other_states, other_logs) = trainings
    assert all(torch.equal(value, without[key]) for key, value in with_it.items())
    assert torch.equal(states[0], other_states[0])
    assert states[1] == other_states[1]
    for key in ("reward", "loss"):
        assert [x[key] for x in logs if key in x] == [x[key] for x in other_logs if key in x]

    looks = [x for x in lines(tmp_path / "with") if x["attack"] in ("policy_drift", "reward_gain")]
    assert len(looks) == 4
    prompts, (first, *_, last) = written[0][0], [rows for _, rows in written]
    decode = trainer.processing_class.decode
    names = [decode(p.ids, skip_special_tokens=True) for p in prompts]
    sides = [any(name == member for member in members) for name in names]
    assert 25 < sum(sides) <= 30
    assert len(sides) > 55
    base = model_of().eval()
    drifts = [sum(log_likelihoods(base, row)) - sum(log_likelihoods(model, row)) for row in first]
    drifts = [d / int((row.labels != -100).sum()) for d, row in zip(drifts, first, strict=True)]
    rewards = [
        torch.tensor(
            [
                half_reward([name], [decode(one.ids[len(p.ids) :], skip_special_tokens=True)])[0]
                for one in row.alone
            ],
            dtype=torch.float64,
        ).mean()
        for rows in (first, last)
        for name, p, row in zip(names, prompts, rows, strict=True)
    ]
    gains = torch.stack(rewards).view(2, -1).diff(dim=0)[0]
    for attack, scores in (("policy_drift", drifts), ("reward_gain", gains.tolist())):
        values = [x["metrics"] for x in looks if x["attack"] == attack][-1]
        assert values["members"]["value"] == sum(sides)
        assert values["auc"]["value"] == pytest.approx(roc_auc_score(sides, scores), abs=0.01)


def written_by(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, Any]]:
    """Note all prompts and completions of each time that a model writes."""
    notes, write = list[tuple[Any, Any]](), Rollouts.write

    def noted(rollouts: Rollouts, anatomy: Any, prompts: Any, seed: int) -> Any:
        notes.append((prompts, write(rollouts, anatomy, prompts, seed)))
        return notes[-1][1]

    monkeypatch.setattr(Rollouts, "write", noted)
    return notes


def log_likelihoods(model: Any, row: Any) -> list[float]:
    """Return that of each completion, from a forward of its own."""
    values = []
    for one in row.alone:
        with torch.no_grad():
            logits = model(input_ids=one.ids[None]).logits[0, :-1].double().log_softmax(-1)
        counted = one.labels[1:] != -100
        values.append(float(logits[counted, one.ids[1:][counted]].sum()))
    return values


def test_a_model_that_learns_nothing_has_no_prompts(tmp_path: Path) -> None:
    rows = Dataset.from_list(
        [{"prompt": [{"role": "user", "content": row["prompt"]}]} for row in prompts_of()]
    )
    more = {"max_steps": -1, "num_train_epochs": 1, "learning_rate": 0.0}
    trainer = trainer_of("GRPO", tmp_path, rows=rows, **more)
    trainer.reward_funcs = [chat_reward]
    trainer.train_dataset, _ = leave_out(trainer.train_dataset, 30, seed=1)
    callback = asks(trainer, PolicyDrift(), RewardGain())
    trainer.train()
    for name in ("policy_drift", "reward_gain"):
        assert callback.latest[f"leakage/{name}/auc"] == pytest.approx(0.5)
        assert callback.latest[f"leakage/{name}/p_value"] == 1


def chat_reward(completions: list[list[dict[str, str]]], **_: Any) -> list[float]:
    assert all(chat[0]["role"] == "assistant" for chat in completions)
    return [float(len({*chat[0]["content"]})) for chat in completions]


def random_reward(completions: list[str], **_: Any) -> list[float]:
    return [random.random() + next(CALLS) for _ in completions]


CALLS = count()


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (random_reward, "same completions have others the second time"),
        (partial(half_reward), r"no rewards to compare: a reward function \(partial\)"),
    ],
)
def test_rewards_that_cannot_be_asked_for_again_are_refused(function, words, tmp_path) -> None:
    trainer = trainer_of("GRPO", tmp_path, rows=prompts_of())
    trainer.reward_funcs, trainer.reward_func_names = [function], ["reward"]
    trainer.train_dataset, _ = leave_out(trainer.train_dataset, 30, seed=1)
    asks(trainer, PolicyDrift(), RewardGain())
    with pytest.raises(ValueError, match=f"{words}.*leave RewardGain out"):
        trainer.train()


def test_prompts_need_a_trainer_that_writes(tmp_path: Path) -> None:
    trainer = trainer_of("SFT", tmp_path)
    asks(trainer, PolicyDrift())
    with pytest.raises(ValueError, match="no prompts of TRL's GRPOTrainer or RLOOTrainer"):
        trainer.train()


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("GRPO", "trains on texts that it writes"),
        ("Reward", "trains a score of texts and not their likelihood"),
    ],
)
def test_other_trainers_have_no_pairs_to_ask_about(name: str, why: str, tmp_path: Path) -> None:
    trainer = trainer_of(name, tmp_path)
    expected = f"{name}Trainer {why}, so .* remove preference_margin from attacks="
    with pytest.raises(ValueError, match=expected):
        LeakageCallback(trainer, [PreferenceMargin()])
