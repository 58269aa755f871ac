"""DP-SGD under TRL's DPOTrainer: both rows of a pair share one clip."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

pytest.importorskip("trl")

from datasets import Dataset
from peft import LoraConfig
from trl import DPOConfig, DPOTrainer
from trl.trainer import utils

from lightning_fedleak.attacks import SubspaceWords
from lightning_fedleak.defenses import DPSGD, DefenseError
from lightning_fedleak.engine.channels.control import Controls
from lightning_fedleak.evaluation.auditing import PlantedGradients
from lightning_fedleak.trainers import defended
from tests.helpers.models import own_rng
from tests.helpers.processes import two_processes
from tests.trainers.hosts import traced
from tests.trainers.test_transformers import watched
from tests.trl.test_trl import ANSWERS, COMMON, model_of, pairs, tokenizer

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


def trainer_of(folder, defense, kind=DPOTrainer, data=None, peft=LORA, **more) -> Any:
    arguments = {**COMMON, "max_length": 48, "learning_rate": 0.0, "beta": BETA, **more}
    torch.manual_seed(3)
    model = model_of().double()
    given = {} if defense is None else {"defenses": [defense]}
    trainer = (kind if defense is None else defended(kind))(
        model,
        args=DPOConfig(str(folder), **arguments),
        train_dataset=Dataset.from_list(rows() if data is None else data),
        processing_class=tokenizer(),
        peft_config=peft,
        **given,
    )
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
    trainer = trainer_of(tmp_path, defense, **more, **batch)
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
        trace = traced(trainer_of(folder, defense, data=data, **settings))
        shared.append(6 * trace.shared[0])
    assert 0 < float((shared[0] - shared[1]).norm()) <= 2 * 0.05 * (1 + 1e-4)


def test_a_pair_without_a_word_alone_in_its_batch_moves_nothing(tmp_path: Path) -> None:
    data = [{"prompt": "", "chosen": "", "rejected": ""}]
    settings = {"per_device_train_batch_size": 1, "max_steps": 2}
    trace = traced(trainer_of(tmp_path, DPSGD(0.05, 0.0, seed=1), data=data, **settings))
    assert trace.drawn == [[0], [0]]
    assert not any(shared.any() for shared in trace.shared)


def test_a_sampled_run_holds_its_target_and_its_check_refutes_nothing(tmp_path: Path) -> None:
    defense = DPSGD(
        0.5, target_epsilon=8.0, target_delta=1e-3, accountant="rdp", check=PlantedGradients(2)
    )
    settings = {"max_steps": 8, "per_device_train_batch_size": 18, "learning_rate": 1e-3}
    trainer = trainer_of(tmp_path, defense, **settings)
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
        trainer = trainer_of(folder, defense, gradient_accumulation_steps=steps)
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
        trainer_of(tmp_path, DPSGD(0.5, 1.0), **settings).train()
