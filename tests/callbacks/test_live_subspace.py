"""Words read off LoRA and whole models while they are trained."""

from __future__ import annotations

import csv
import json
import math
import warnings
from pathlib import Path

import lightning.pytorch as L
import pytest
import torch
from peft import AdaLoraConfig, IA3Config, LoraConfig, get_peft_model
from torch import nn

from lightning_fedleak import DPSGD, DefendedStrategy, GradientNoise, with_canaries
from lightning_fedleak.attacks import (
    BagOfWords,
    RevealLabels,
    SubspaceMembership,
    SubspaceTexts,
    SubspaceWords,
)
from lightning_fedleak.callbacks import LeakageMonitor, MonitorSettings, RiskGate
from lightning_fedleak.engine.channels import Games
from lightning_fedleak.engine.channels.texts import Inverted
from tests.attacks.row_space.models import VOCABULARY, bert, gpt2, llama
from tests.callbacks.runs import assert_same, fit
from tests.helpers.lightning_modules import CausalLMModule, random_token_loader

NAME = "leakage/subspace_words"
LORA = {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]}


def module(
    family=llama, optimizer: str = "adamw", lora: dict[str, object] | None = None
) -> CausalLMModule:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model: nn.Module = family()
        if lora is not None:
            model = get_peft_model(model, LoraConfig(**lora))
        return CausalLMModule(model.train(), optimizer=optimizer)


def loader():
    return random_token_loader(n=8, batch_size=2, length=10, vocab=VOCABULARY)


def watched(
    root: Path, made: CausalLMModule, **settings: object
) -> tuple[L.Trainer, LeakageMonitor]:
    options = {k: settings.pop(k) for k in ("stages", "local_steps") if k in settings}
    monitor = LeakageMonitor([SubspaceWords(capacity_seconds=1.0)], every_n_steps=1, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = fit([monitor], root, module=made, loader=loader(), **settings)
    return trainer, monitor


class Penalised(CausalLMModule):
    """Adds an L2 penalty of its own to the loss."""

    def training_step(self, batch, batch_idx):
        trained = [p for p in self.model.parameters() if p.requires_grad]
        return super().training_step(batch, batch_idx) + 1e-3 * sum(
            p.square().sum() for p in trained
        )


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_penalty_in_the_loss_is_unknown_to_what_cannot_take_it_off(
    accumulate: int, tmp_path: Path
) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        made = Penalised(llama(tie_word_embeddings=False).train())
    attacks = [SubspaceWords(capacity_seconds=0), BagOfWords(), RevealLabels()]
    monitor = LeakageMonitor(attacks, every_n_steps=1)
    fit([monitor], tmp_path, module=made, loader=loader(), accumulate_grad_batches=accumulate)
    assert monitor.looks
    for name, value in monitor.latest.items():
        if name.startswith("leakage/") and name.endswith(("f1", "recall", "precision")):
            assert math.isnan(value), name
    lines = [json.loads(line) for line in next(tmp_path.rglob("leakage.jsonl")).open()]
    assert all("has a term of" in line["unknown"] for line in lines)


def test_adalora_is_read_and_a_gate_fires(tmp_path: Path) -> None:
    config = AdaLoraConfig(
        init_r=8,
        target_r=4,
        total_step=100,
        target_modules=["q_proj", "v_proj"],
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng():
        torch.manual_seed(1)
        made = CausalLMModule(get_peft_model(llama(), config).train(), optimizer="adamw")
    monitor = LeakageMonitor([SubspaceWords(capacity_seconds=0)], every_n_steps=1)
    gate = RiskGate(f"{NAME}/f1", at_most=0.5)
    trainer = fit([monitor, gate], tmp_path, module=made, loader=loader())
    assert monitor.latest[f"{NAME}/f1"] == 1.0
    assert trainer.global_step < len(loader())


CASES = {
    "whole": (dict, None),
    "lora": (dict, LORA),
    "lora with dropout": (dict, {**LORA, "lora_dropout": 0.1}),
    "bf16-mixed": (lambda: {"precision": "bf16-mixed"}, LORA),
    "accumulation": (lambda: {"accumulate_grad_batches": 2}, LORA),
    "noise": (
        lambda: {"strategy": DefendedStrategy("auto", [GradientNoise(None, 1e-4, seed=3)])},
        LORA,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_training_is_bit_identical(case: str, tmp_path: Path) -> None:
    settings, lora = CASES[case]
    plain = fit([], tmp_path / "plain", module=module(lora=lora), loader=loader(), **settings())
    seen, monitor = watched(tmp_path / "seen", module(lora=lora), **settings())
    assert_same(plain, seen)
    assert monitor.looks == seen.global_step


def test_the_first_look_has_no_result_yet_and_the_next_ones_are_exact(tmp_path: Path) -> None:
    trainer, monitor = watched(tmp_path, module(lora=LORA))
    with (Path(trainer.logger.log_dir) / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row.get("monitor/failures")]
    assert [row["monitor/failures"] for row in rows] == ["0.0"] * 4
    assert [row[f"{NAME}/f1"] or "unknown" for row in rows] == ["unknown", "1.0", "1.0", "1.0"]
    assert monitor.latest[f"{NAME}/certified"] == 1
    assert monitor.latest[f"{NAME}/capacity"] > 1
    assert monitor.latest[f"{NAME}/exposed"] == 1


@pytest.mark.parametrize("family", [llama, gpt2, bert])
def test_whole_models_are_read_at_every_look(family, tmp_path: Path) -> None:
    made = module(family)
    for part in made.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    _, monitor = watched(tmp_path, made)
    assert monitor.failures == 0
    assert monitor.latest[f"{NAME}/f1"] == 1
    assert monitor.latest[f"{NAME}/certified"] == 1


def test_accumulated_batches_are_read_together(tmp_path: Path) -> None:
    _, monitor = watched(tmp_path, module(lora=LORA), accumulate_grad_batches=2)
    assert monitor.latest[f"{NAME}/f1"] > 0.9


def test_what_is_not_shared_is_said_not_to_be_exposed(tmp_path: Path) -> None:
    config = IA3Config(target_modules=["k_proj"], feedforward_modules=[])
    made = CausalLMModule(get_peft_model(llama(), config), optimizer="adamw")
    _, monitor = watched(tmp_path, made)
    assert monitor.latest[f"{NAME}/exposed"] == 0
    assert monitor.failures == 0


def test_rounds_of_sgd_are_read(tmp_path: Path) -> None:
    _, monitor = watched(
        tmp_path / "sgd", module(optimizer="sgd", lora=LORA), local_steps=2, stages=("shared",)
    )
    assert monitor.latest[f"{NAME}/f1"] > 0.8


def test_decay_is_that_of_the_group_that_is_read(tmp_path: Path) -> None:
    """Another group comes first, with another decay."""
    made = module(lora=LORA)
    ours, others = [], []
    for name, parameter in made.named_parameters():
        if parameter.requires_grad:
            (ours if "layers.0." in name else others).append(parameter)
    groups = [{"params": others, "weight_decay": 0.0}, {"params": ours, "weight_decay": 0.5}]
    made.configure_optimizers = lambda: torch.optim.SGD(groups, lr=0.5)  # type: ignore[method-assign]
    _, monitor = watched(tmp_path, made, local_steps=2, stages=("shared",))
    assert monitor.latest[f"{NAME}/f1"] > 0.9


class FreshOptimizers(L.Callback):
    """Every round begins without what earlier ones left, as federated clients do."""

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: object, batch_idx: int
    ) -> None:
        for optimizer in trainer.optimizers:
            optimizer.state.clear()


@pytest.mark.parametrize("fresh", ["before", "behind", None])
def test_a_step_of_adamw_is_read_where_rounds_begin_anew(fresh: str | None, tmp_path: Path) -> None:
    monitor = LeakageMonitor(
        [SubspaceWords(capacity_seconds=0)], every_n_steps=1, local_steps=1, stages=("shared",)
    )
    callbacks: list[L.Callback] = [monitor]
    if fresh:
        callbacks.insert(fresh == "behind", FreshOptimizers())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit(callbacks, tmp_path, module=module(lora=LORA), loader=loader())
    if fresh:
        assert monitor.latest[f"{NAME}/f1"] > 0.9
        assert monitor.failures == 0
    else:
        assert math.isnan(monitor.latest[f"{NAME}/f1"])
        assert monitor.failures == 3, "the first look waits: B is zero"


def test_dpsgd_leaves_no_certificate(tmp_path: Path) -> None:
    strategy = DefendedStrategy("auto", [DPSGD(1.0, noise_multiplier=0.5)])
    _, monitor = watched(tmp_path, module(lora=LORA), strategy=strategy)
    f1 = monitor.latest[f"{NAME}/f1"]
    assert math.isnan(f1) or f1 < 0.3
    assert monitor.latest.get(f"{NAME}/certified", 0.0) == 0


class Levels(SubspaceWords):
    """Keeps the noise that it was told of."""

    needs_control = False  # it counts what it was shown

    def __init__(self) -> None:
        super().__init__(capacity_seconds=0)
        self.levels: list[float] = []

    def run(self, view, query=None):
        self.levels.append(view.gradients[-1].noise_std)
        return super().run(view, query)


class Mute(GradientNoise):
    name = "mute"

    def noise_std(self, context):
        raise RuntimeError("private")


class Other(GradientNoise):
    name = "other"


def test_attacks_are_told_the_noise_of_the_defences(tmp_path: Path) -> None:
    attack = Levels()
    monitor = LeakageMonitor([attack], every_n_steps=1, stages=("local", "shared", "aggregate"))
    strategy = DefendedStrategy(
        "auto",
        [GradientNoise(None, 3e-3), type("Other", (GradientNoise,), {"name": "b"})(1.0, 4e-3)],
    )
    fit([monitor], tmp_path, module=module(lora=LORA), loader=loader(), strategy=strategy)
    assert attack.levels == pytest.approx([0.0, 5e-3, 5e-3] * 4)


def test_a_defence_that_does_not_say_leaves_the_words_unknown(tmp_path: Path) -> None:
    monitor = LeakageMonitor([SubspaceWords(capacity_seconds=0)], every_n_steps=1)
    strategy = DefendedStrategy("auto", [Mute(None, 1e-3)])
    fit([monitor], tmp_path, module=module(lora=LORA), loader=loader(), strategy=strategy)
    assert (monitor.looks, monitor.failures) == (4, 3)  # a LoRA's first step has no result yet


def asking(**settings: object) -> LeakageMonitor:
    public = [[5 + (7 * i + 3 * j) % 290 for j in range(10)] for i in range(12)]
    attacks = [SubspaceMembership(public, blocks=4), SubspaceWords(capacity_seconds=0)]
    return LeakageMonitor(attacks, every_n_steps=1, games=Games(targets=2), **settings)


@pytest.mark.parametrize("case", CASES)
def test_asking_about_texts_does_not_disturb(case: str, tmp_path: Path) -> None:
    settings, lora = CASES[case]
    plain = fit([], tmp_path / "plain", module=module(lora=lora), loader=loader(), **settings())
    seen = fit([asking()], tmp_path / "s", module=module(lora=lora), loader=loader(), **settings())
    assert_same(plain, seen)


def test_membership_is_known_from_the_second_look_on(tmp_path: Path) -> None:
    monitor = asking(stages=("local", "shared"))
    fit([monitor], tmp_path, module=module(lora=LORA), loader=loader())
    assert monitor.latest["leakage/subspace_membership/auc"] == 1
    assert monitor.latest["leakage_local/subspace_membership/auc"] == 1
    assert monitor.latest["leakage/subspace_membership/accuracy"] > 0.5


def test_canaries_are_asked_for_too(tmp_path: Path) -> None:
    rows = loader().dataset.columns["input_ids"]
    ids = [row.tolist() for row in rows]
    items = [{"input_ids": i, "labels": i} for i in ids]
    train = with_canaries(items[:4], items[4:], seed=2)
    assert 0 < int(train.canaries.included.sum()) < 4
    monitor = LeakageMonitor(
        [SubspaceMembership(ids)], every_n_steps=1, games=Games(2, canaries=train.canaries)
    )
    made = module(optimizer="sgd")
    batches = torch.utils.data.DataLoader(train, batch_size=2, collate_fn=_stacked)
    trainer = fit([monitor], tmp_path, module=made, loader=batches)
    with (Path(trainer.logger.log_dir) / "metrics.csv").open() as file:
        seen = [row.get("audit/subspace_membership/accuracy") for row in csv.DictReader(file)]
    assert any(seen)


def _stacked(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    return {k: torch.tensor([row[k] for row in rows]) for k in rows[0]}


@pytest.mark.parametrize("side", ["whole", "lora"])
def test_whole_texts_are_read_while_training(tmp_path: Path, side: str) -> None:
    lora = {**LORA, "target_modules": ["q_proj", "k_proj", "v_proj"]} if side == "lora" else None
    monitor = LeakageMonitor(SubspaceTexts(), every_n_steps=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain = fit([], tmp_path / "a", module=module(lora=lora), loader=loader())
        seen = fit([monitor], tmp_path / "b", module=module(lora=lora), loader=loader())
    assert_same(plain, seen)
    of = "leakage/subspace_texts"
    assert monitor.latest[f"{of}/token_accuracy"] == 1, "the last token does not count"
    assert monitor.latest[f"{of}/exact_sentences"] == 1
    assert monitor.latest[f"{of}/certified"] == 1
    assert monitor.latest[f"{of}/finished"] == 1
    assert monitor.latest[f"{of}/exposed"] == 1


def test_an_encoders_text_is_read_while_training(tmp_path: Path) -> None:
    def plain_bert() -> nn.Module:
        return bert(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)

    one = random_token_loader(n=4, batch_size=1, length=10, vocab=VOCABULARY)
    monitor = LeakageMonitor(SubspaceTexts(), every_n_steps=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain = fit([], tmp_path / "a", module=module(plain_bert), loader=one)
        seen = fit([monitor], tmp_path / "b", module=module(plain_bert), loader=one)
    assert_same(plain, seen)
    of = "leakage/subspace_texts"
    assert monitor.latest[f"{of}/token_accuracy"] == 1, "the last token counts"
    assert monitor.latest[f"{of}/exact_sentences"] == 1
    assert monitor.latest[f"{of}/certified"] == 1


class Ends(L.LightningModule):
    """Texts that go on behind their last label, ends of text within the mask, and one unlabelled.

    Row 0 has all its labels, row 1 none on its last three tokens, row 2 ends of text from its
    sixth token on, which are not padded out but have no labels, row 3 no label at all.
    """

    def __init__(self) -> None:
        super().__init__()
        self.model = module().model
        ids = torch.randint(5, VOCABULARY, (4, 9), generator=torch.Generator().manual_seed(3))
        labels = ids.clone()
        labels[1, -3:] = -100
        ids[2, 5:], labels[2, 5:], labels[3] = 2, -100, -100
        self.batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self.model(**batch).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)

    def train_dataloader(self):
        return torch.utils.data.DataLoader([self.batch] * 2, batch_size=None)


def watched_ends(root: Path, texts: int) -> tuple[list[dict[str, object]], LeakageMonitor]:
    monitor = LeakageMonitor(
        SubspaceTexts(), every_n_steps=1, log_dir=root, settings=MonitorSettings(texts=texts)
    )
    trainer = L.Trainer(
        accelerator="cpu", max_epochs=1, callbacks=[monitor], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=root,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(Ends())
    lines = (root / "leakage.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines], monitor


@pytest.mark.parametrize(("texts", "counted"), [(8, 3), (1, 1)])
def test_what_no_label_hangs_on_is_neither_found_nor_missed(
    tmp_path: Path, texts: int, counted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[int]] = []
    pack = Inverted.pack

    def counting(self: Inverted, texts: int) -> list[float]:
        seen.append(self.real.sum(1).tolist())
        return pack(self, texts)

    monkeypatch.setattr(Inverted, "pack", counting)
    lines, monitor = watched_ends(tmp_path, texts)
    assert len(seen) >= 2  # controls are scored by texts of the same lengths
    assert all(row == [8, 5, 4] if texts == 8 else row[0] in (8, 5, 4) for row in seen)
    assert monitor.failures == 0
    assert [line["n"] for line in lines] == [counted] * 2
    for line in lines:
        assert line["metrics"]["token_accuracy"]["value"] == 1
        assert line["metrics"]["exact_sentences"]["value"] == 1


def test_frozen_blocks_give_no_texts_away(tmp_path: Path) -> None:
    made = module()
    for name, parameter in made.named_parameters():
        parameter.requires_grad_("layers" not in name)
    monitor = LeakageMonitor(SubspaceTexts(), every_n_steps=1)
    with pytest.warns(UserWarning, match="not shared in this run"):
        fit([monitor], tmp_path, module=made, loader=loader())
    assert monitor.latest["leakage/subspace_texts/exposed"] == 0


@pytest.mark.parametrize("private", [False, True])
def test_noise_hides_the_order_and_is_no_certificate(tmp_path: Path, private: bool) -> None:
    monitor = LeakageMonitor(SubspaceTexts(budget_seconds=5), every_n_steps=1)
    defense = DPSGD(1.0, noise_multiplier=0.5) if private else GradientNoise(clip=1.0, sigma=0.5)
    strategy = DefendedStrategy("auto", defenses=[defense])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit([monitor], tmp_path, module=module(), loader=loader(), strategy=strategy, devices=1)
    assert not monitor.latest["leakage/subspace_texts/token_accuracy"] > 0.5
    assert monitor.latest.get("leakage/subspace_texts/certified", math.nan) != 1
