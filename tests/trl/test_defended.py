"""DP-SGD under TRL's SFTTrainer: what is released is the clipped sum over texts."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("trl")

from datasets import Dataset
from peft import LoraConfig
from trl import DPOTrainer, KTOConfig, KTOTrainer, SFTConfig, SFTTrainer

from lightning_fedleak.defenses import DPSGD, DefenseError
from lightning_fedleak.trainers import defended
from tests.docs.blocks import ROOT, blocks_of
from tests.trainers.hosts import traced
from tests.trl.test_trl import COMMON, ROWS, dpo, model_of, pairs, tokenizer

CLIP = 0.05


def trainer_of(folder: Path, kind: str, defense: DPSGD, **more: Any) -> Any:
    rows, settings = ROWS[kind]
    arguments = SFTConfig(str(folder), **(COMMON | settings | {"learning_rate": 0.0} | more))
    return defended(SFTTrainer)(
        model_of(),
        arguments,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer(),
        defenses=[defense],
    )


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


@pytest.mark.parametrize("mode", ["keep_start", "keep_end"])
@pytest.mark.parametrize("content", CONTENTS)
def test_no_text_decides_how_many_there_are(content: str, mode: str, tmp_path: Path) -> None:
    sound, settings = ROWS["completion only"]
    found = []
    for number, first in enumerate((sound[0], CONTENTS[content])):
        defense = DPSGD(CLIP, target_epsilon=4, target_delta=1e-2)
        rows = Dataset.from_list([first, *sound[1:]])
        arguments = {**COMMON, **settings, "max_length": 40, "truncation_mode": mode}
        trainer = defended(SFTTrainer)(
            model_of(),
            SFTConfig(str(tmp_path / str(number)), **arguments),
            train_dataset=rows,
            eval_dataset=rows,
            processing_class=tokenizer(),
            defenses=[defense],
        )
        trainer.train()
        privacy, steps = defense.privacy, trainer.state.global_step
        found.append((len(trainer.train_dataset), steps, defense.noise_multiplier, privacy))
        assert all(bool(p.isfinite().all()) for p in trainer.model.parameters())
    assert found[0] == found[1]
    assert found[0][0] == len(sound)
    if content == "cut off":  # other data are prepared as ever
        plain = SFTTrainer(
            model_of(),
            SFTConfig(str(tmp_path / "plain"), **arguments),
            train_dataset=rows,
            processing_class=tokenizer(),
        )
        assert len(trainer.eval_dataset) == len(plain.train_dataset)


def test_pairs_of_a_whole_model_are_refused(tmp_path: Path) -> None:
    kind = partial(defended(DPOTrainer), defenses=[DPSGD(CLIP, 1.0)])
    with pytest.raises(DefenseError, match="DPOTrainer: TRL reads the output head's weights"):
        dpo(tmp_path, kind=kind).train()


def test_rated_answers_are_refused(tmp_path: Path) -> None:
    trainer = defended(KTOTrainer)(
        model_of(),
        args=KTOConfig(str(tmp_path), **COMMON),
        train_dataset=Dataset.from_list([r | {"label": n % 2 == 0} for n, r in enumerate(pairs())]),
        processing_class=tokenizer(),
        peft_config=LoraConfig(r=2, target_modules=["q_proj"]),
        defenses=[DPSGD(CLIP, 1.0)],
    )
    with pytest.raises(DefenseError, match="KTOTrainer compares several texts in one example"):
        trainer.train()


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
