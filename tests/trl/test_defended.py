"""DP-SGD under TRL's SFTTrainer: what is released is the clipped sum over texts."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel
from torch import Tensor
from torch.nn import functional

pytest.importorskip("trl")

from datasets import Dataset
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer
from trl.trainer import utils

from lightning_fedleak.attacks import SubspaceWords
from lightning_fedleak.attacks.memorization import Combined, CombinedReference
from lightning_fedleak.defenses import DPSGD, DefenseError
from lightning_fedleak.engine import Memorization, reference
from lightning_fedleak.engine.channels.control import Controls
from lightning_fedleak.evaluation.auditing import PlantedGradients
from lightning_fedleak.evaluation.canaries import leave_out
from lightning_fedleak.trainers import LeakageCallback, WatchSettings, defended
from tests.docs.blocks import ROOT, blocks_of
from tests.engine.channels.test_memorization import lines, of_kind
from tests.helpers.models import own_rng
from tests.helpers.processes import two_processes
from tests.trainers.hosts import traced
from tests.trainers.test_transformers import watched
from tests.trl.test_trl import ANSWERS, COMMON, ROWS, dpo, model_of, pairs, preferences, tokenizer

CLIP = 0.05


def trainer_of(folder: Path, kind: str, defense: DPSGD, **more: Any) -> Any:
    rows, settings = ROWS[kind]
    arguments = SFTConfig(str(folder), **(COMMON | settings | {"learning_rate": 0.0} | more))
    return defended(SFTTrainer)(
        model_of(), arguments, train_dataset=Dataset.from_list(rows), processing_class=tokenizer(),
        defenses=[defense],
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["padded", "completion only", "assistant only"])
def test_what_is_shared_is_the_clipped_sum(kind: str, tmp_path: Path) -> None:
    defense = DPSGD(CLIP, 0.0, seed=1)
    trainer = trainer_of(tmp_path, kind, defense, gradient_accumulation_steps=2)
    trace = traced(trainer)
    model, data = trainer.model, trainer.train_dataset
    trained = [p for p in model.parameters() if p.requires_grad]
    assert defense.releases == trace.steps == 3
    assert any(trace.drawn)
    for shared, drawn in zip(trace.shared, trace.drawn, strict=True):
        total = torch.zeros(shared.numel(), dtype=torch.float64)
        for place in drawn:
            batch = trainer.data_collator([data[place]])
            logits = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
            shifted = batch["labels"][:, 1:].flatten()
            loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), shifted)
            parts = torch.autograd.grad(loss, trained)
            flat = torch.cat([part.double().flatten() for part in parts])
            total += flat * min(1.0, CLIP / float(flat.norm()))
        assert float((shared * 8 - total).norm() / total.norm()) < 1e-5


CONTENTS = {
    "cut off": {"prompt": "a" * 400, "completion": " b"},
    "cut within": {"prompt": "a" * 29, "completion": " b" * 300},
    "no answer": {"prompt": "a", "completion": ""},
    "nothing": {"prompt": "", "completion": ""},
    "of the end alone": {"prompt": "a", "completion": tokenizer().eos_token * 3},
    "long": {"prompt": "a b" * 4000, "completion": "c" * 4000},
}


@pytest.mark.parametrize(
    ("content", "mode"), [*((name, "keep_start") for name in CONTENTS), ("cut within", "keep_end")]
)
def test_no_text_decides_how_many_there_are(content: str, mode: str, tmp_path: Path) -> None:
    sound, settings = ROWS["completion only"]
    found = []
    for number, first in enumerate((sound[0], CONTENTS[content])):
        defense = DPSGD(CLIP, target_epsilon=4, target_delta=1e-2)
        rows = Dataset.from_list([first, *sound[1:]])
        arguments = {**COMMON, **settings, "max_length": 40, "truncation_mode": mode}
        trainer = defended(SFTTrainer)(
            model_of(), SFTConfig(str(tmp_path / str(number)), **arguments), train_dataset=rows,
            eval_dataset=rows, processing_class=tokenizer(), defenses=[defense],
        )  # fmt: skip
        trainer.train()
        privacy, steps = defense.privacy, trainer.state.global_step
        found.append((len(trainer.train_dataset), steps, defense.noise_multiplier, privacy))
        assert all(bool(p.isfinite().all()) for p in trainer.model.parameters())
    assert found[0] == found[1]
    assert found[0][0] == len(sound)
    if content == "cut off":  # other data are prepared as ever
        plain = SFTTrainer(
            model_of(), SFTConfig(str(tmp_path / "plain"), **arguments), train_dataset=rows,
            processing_class=tokenizer(),
        )  # fmt: skip
        assert len(trainer.eval_dataset) == len(plain.train_dataset)


def test_pairs_of_a_whole_model_are_refused(tmp_path: Path) -> None:
    kind = partial(defended(DPOTrainer), defenses=[DPSGD(CLIP, 1.0)])
    with pytest.raises(DefenseError, match="DPOTrainer: TRL reads the output head's weights"):
        dpo(tmp_path, kind=kind).train()


@pytest.mark.parametrize("kind", ["packed", "padding-free"])
def test_joined_texts_are_refused(kind: str, tmp_path: Path) -> None:
    with pytest.raises(DefenseError, match="packing=False, padding_free=False"):
        trainer_of(tmp_path, kind, DPSGD(CLIP, 1.0)).train()


def test_the_script_of_the_docs_runs_as_it_is(tmp_path, monkeypatch, capsys) -> None:
    page = blocks_of(ROOT / "docs/dpsgd.md")
    [script] = [block.text for block in page if "defended(SFTTrainer)" in block.text]
    monkeypatch.chdir(tmp_path)
    exec(compile(script, "dpsgd.md", "exec"), {})
    assert "10 releases, epsilon 8.0" in capsys.readouterr().out


# DP-SGD under TRL's DPOTrainer: both rows of a pair share one clip.


BETA = 0.5
LORA = LoraConfig(r=2, target_modules=["q_proj", "v_proj", "down_proj"])
LOSSES = ("sigmoid", "hinge", "ipo", "apo_zero", "sigmoid_norm")


def rows() -> list[dict[str, str]]:
    texts = enumerate(pairs())
    return [
        {"prompt": r["prompt"], "chosen": r["completion"] * (1 + n % 3), "rejected": ANSWERS[n % 3]}
        for n, r in texts
    ]


class WideLogProbs:
    """TRL's function for the log probabilities, whose numbers are float32, in float64."""

    @staticmethod
    def apply(hidden: Tensor, weight: Tensor, bias: Any, targets: Tensor, *_: Any) -> Any:
        logits = functional.linear(hidden, weight, bias)
        logs = logits.log_softmax(-1)
        chosen = logs.gather(-1, targets[:, None])[:, 0]
        with torch.no_grad():
            entropy = -(logs.exp() * logs).sum(-1)
            return chosen, entropy, None, logits.mean(-1), logits.argmax(-1) == targets


def pairs_trainer_of(folder, defense, kind=DPOTrainer, data=None, peft=LORA, **more) -> Any:
    arguments = {**COMMON, "max_length": 48, "learning_rate": 0.0, "beta": BETA, **more}
    torch.manual_seed(3)
    model = model_of().double()
    given = {} if defense is None else {"defenses": [defense]}
    trainer = (kind if defense is None else defended(kind))(
        model, args=DPOConfig(str(folder), **arguments),
        train_dataset=Dataset.from_list(rows() if data is None else data),
        processing_class=tokenizer(), peft_config=peft, **given,
    )  # fmt: skip
    with own_rng(5), torch.no_grad():  # else the policy is the reference
        for parameter in trainer.model.parameters():
            if parameter.requires_grad and peft is not None:
                parameter.normal_(std=0.2)
    return trainer


def log_probability(model: Any, batch: Any, row: int) -> Tensor:
    ids, mask = batch["input_ids"][row : row + 1], batch["completion_mask"][row, 1:].bool()
    model_mask = batch["attention_mask"][row : row + 1]
    logs = model(input_ids=ids, attention_mask=model_mask).logits[0, :-1].log_softmax(-1)
    total: Tensor = logs.gather(-1, ids[0, 1:, None])[:, 0][mask].sum()
    return total


def gradient_of(trainer: Any, example: Any) -> Tensor:
    """The gradient of one pair's loss, written down and computed alone."""
    model, batch = trainer.model, trainer.data_collator([example])
    chosen, rejected = (log_probability(model, batch, row) for row in (0, 1))
    if "ref_chosen_logps" in batch:
        references = [batch["ref_chosen_logps"][0], batch["ref_rejected_logps"][0]]
    else:
        with torch.no_grad(), model.disable_adapter():
            references = [log_probability(model, batch, row) for row in (0, 1)]
    margin = BETA * ((chosen - references[0]) - (rejected - references[1]))
    trained = [p for p in model.parameters() if p.requires_grad]
    parts = torch.autograd.grad(-functional.logsigmoid(margin), trained)
    return torch.cat([part.flatten() for part in parts])


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("reference", ["adapter disabled", "precomputed"])
def test_what_is_shared_is_the_clipped_sum_over_pairs(reference, steps, tmp_path, monkeypatch):
    monkeypatch.setattr(utils, "_ChunkedLogProbFunction", WideLogProbs)
    more = {"precompute_ref_log_probs": reference == "precomputed"}
    batch = {"gradient_accumulation_steps": steps, "per_device_train_batch_size": 8 // steps}
    defense = DPSGD(clip := 2.0, 0.0, seed=1)
    trainer = pairs_trainer_of(tmp_path, defense, **more, **batch)
    data = trainer.train_dataset
    gradients = [gradient_of(trainer, example) for example in data]
    trace = traced(trainer)
    assert defense.releases == trace.steps == 3
    assert defense.privacy.sample_rate == 8 / len(rows()) == 8 / len(data)
    norms = []
    for shared, drawn in zip(trace.shared, trace.drawn, strict=False):
        total = torch.zeros_like(shared)
        for place in drawn:
            norms.append(float(gradients[place].norm()))
            total += gradients[place] * min(1.0, clip / norms[-1])
        assert shared.dtype == torch.float64
        assert float((shared * 8 - total).norm() / total.norm()) < 1e-6
    assert min(norms) < clip < max(norms)


@pytest.mark.slow
@pytest.mark.ddp
def test_two_processes_share_one_clipped_sum_over_the_pairs_of_both(tmp_path: Path) -> None:
    """Poisson draws differ in size, and TRL gathers the rewards of all pairs in every step."""
    for found in two_processes("tests.trl.pairs_worker", tmp_path):
        assert found["sizes differ"]
        assert max(found["distances"]) < 1e-6
        assert found["rate"] == 8 / len(rows())
        assert found["restored"]


@pytest.mark.parametrize("loss", LOSSES)
def test_losses_of_one_pair_train_and_each_pair_moves_a_release_by_one_norm(loss, tmp_path) -> None:
    shared = []
    for number, prompt in enumerate(("a", "b c d e f")):
        data = rows()[:6]
        data[2] = {"prompt": prompt, "chosen": " yes" * 20 * number, "rejected": " no"}
        defense = DPSGD(0.05, 0.0, seed=1)
        settings = {"loss_type": [loss], "per_device_train_batch_size": 6, "max_steps": 1}
        folder = tmp_path / str(number)
        trace = traced(pairs_trainer_of(folder, defense, data=data, **settings))
        shared.append(6 * trace.shared[0])
    assert 0 < float((shared[0] - shared[1]).norm()) <= 2 * 0.05 * (1 + 1e-4)


def test_a_pair_without_a_word_alone_in_its_batch_moves_nothing(tmp_path: Path) -> None:
    data = [{"prompt": "", "chosen": "", "rejected": ""}]
    settings = {"per_device_train_batch_size": 1, "max_steps": 2}
    trace = traced(pairs_trainer_of(tmp_path, DPSGD(0.05, 0.0, seed=1), data=data, **settings))
    assert trace.drawn == [[0], [0]]
    assert not any(shared.any() for shared in trace.shared)


def test_a_sampled_run_holds_its_target_and_its_check_refutes_nothing(tmp_path: Path) -> None:
    defense = DPSGD(
        0.5, target_epsilon=8.0, target_delta=1e-3, accountant="rdp", check=PlantedGradients(2)
    )
    settings = {"max_steps": 8, "per_device_train_batch_size": 18, "learning_rate": 1e-3}
    trainer = pairs_trainer_of(tmp_path, defense, **settings)
    before = [p.detach().clone() for p in trainer.model.parameters()]
    trainer.train()
    assert trainer.evaluate(trainer.train_dataset)["eval_loss"] > 0
    assert defense.releases == 8
    assert 7.9 < defense.privacy.epsilon <= 8.0
    assert not all(map(torch.equal, before, trainer.model.parameters()))
    assert all(bool(p.isfinite().all()) for p in trainer.model.parameters())
    assert defense.verdict.result != "refuted", str(defense.verdict)


@pytest.mark.parametrize("steps", [1, 2])
def test_a_watched_step_made_again_explains_its_gradient(steps, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(Controls, "_is_due", lambda *_: True)
    values = []
    for defense in (None, DPSGD(2.0, 0.0, seed=1)):
        folder = tmp_path / type(defense).__name__
        trainer = pairs_trainer_of(folder, defense, gradient_accumulation_steps=steps)
        trainer.model.float()
        watched(trainer, [SubspaceWords(capacity_seconds=0)])
        trainer.train()
        names = ("leakage/step/unexplained", "leakage/subspace_words/control")
        logs = [log for log in trainer.state.log_history if names[0] in log]
        values.append([[log[name] for log in logs] for name in names])
    (plain, control), (private, private_control) = values
    assert len(plain) == len(private) == 3
    assert max(*plain, *private) < 1e-5
    assert min(control) > 0.99
    assert private_control == pytest.approx(control, abs=1e-3)


class Scaled(DPOTrainer):
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return 2 * super().compute_loss(*args, **kwargs)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"loss_type": ["aot"]}, r"loss_type=\['aot'\] is not known to be a mean over pairs"),
        ({"loss_type": ["sigmoid", "sft"]}, r"loss_type=\['sft'\] is not known"),
        ({"peft": None, "precompute_ref_log_probs": True}, r"pass peft_config=LoraConfig"),
        ({"kind": Scaled}, "Scaled changes the loss"),
    ],
)
def test_what_couples_pairs_is_refused(settings, reason, tmp_path) -> None:
    with pytest.raises(DefenseError, match=reason):
        pairs_trainer_of(tmp_path, DPSGD(0.5, 1.0), **settings).train()


# ``Memorization(reference="auto")`` under SFTTrainer: the reference has a LoRA as the run has.


N = 120
"""Rows that are trained on; as many are left out."""


def run(folder: Path, memorization: Memorization) -> SFTTrainer:
    settings = COMMON | {"max_steps": -1, "num_train_epochs": 2, "per_device_train_batch_size": 8}
    texts = [row["prompt"] + row["chosen"] for row in preferences(2 * N)]
    torch.manual_seed(3)
    trainer = SFTTrainer(
        model_of(), args=SFTConfig(str(folder), **settings | {"max_length": 64, "packing": False}),
        train_dataset=Dataset.from_dict({"text": texts}), processing_class=tokenizer(),
        peft_config=LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj"]),
    )  # fmt: skip
    trainer.train_dataset, _ = leave_out(trainer.train_dataset, N, seed=1)
    attacks = [Combined(), CombinedReference()]
    watching = WatchSettings(memorization=memorization)
    trainer.add_callback(LeakageCallback(trainer, attacks, settings=watching))
    trainer.train()
    return trainer


def test_a_lora_has_a_lora_for_its_reference(tmp_path, monkeypatch) -> None:
    references: list[tuple[list[str], int, dict[str, torch.Tensor]]] = []
    describe = reference.describe_reference

    def noted(model: Any, rows: int, anatomy: Any) -> Any:
        assert isinstance(model, PeftModel)
        weights = {name: p.detach().clone() for name, p in model.named_parameters()}
        references.append(([*model.peft_config], rows, weights))
        return describe(model, rows, anatomy)

    monkeypatch.setattr(reference, "describe_reference", noted)
    watched = run(tmp_path / "watched", Memorization(max_overhead=10, reference="auto", looks=()))
    assert [*watched.model.peft_config] == watched.model.active_adapters == ["default"]
    weights = dict(watched.model.named_parameters())

    [pool] = of_kind(tmp_path / "watched", "pool")
    assert pool["reference"]["kind"] == "auto"
    assert pool["reference"]["models"] == len(references)
    for adapters, rows, of_reference in references:
        assert adapters == ["default"]
        assert rows == pool["reference"]["rows"] == N
        assert {*of_reference} == {*weights}
        for name, weight in of_reference.items():
            assert torch.equal(weight, weights[name]) is ("lora" not in name), name
        assert any(bool(w.any()) for name, w in of_reference.items() if "lora_B" in name)
    last = lines(tmp_path / "watched", "combined_reference")[-1]["metrics"]
    assert last["auc"]["value"] is not None
