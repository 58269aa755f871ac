from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_fedleak.callbacks import CanaryScorer
from lightning_fedleak.cli.finetuning.module import PadRight
from lightning_fedleak.evaluation.canaries import (
    CanarySet,
    InclusionRecord,
    new_token_canaries,
)
from lightning_fedleak.evaluation.canaries.record import seed_key
from tests.helpers.models import tiny_bert_mlm, tiny_gpt2, tiny_llama
from tests.helpers.settings import QUIET
from tests.strategies.dpsgd_runs import CausalLM

PAD = PadRight(0)


def canary_set(texts: list[Tensor]) -> CanarySet:
    digests = [bytes([i]) * 32 for i in range(len(texts))]
    return CanarySet(texts, InclusionRecord(seed_key(0), tuple(digests)))


class Weights(L.Callback):
    """Copies of the model before training and after every step."""

    def __init__(self) -> None:
        self.kept: list[nn.Module] = []

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.kept.append(copy.deepcopy(module.model))

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        self.kept.append(copy.deepcopy(module.model))


def fit(
    model: nn.Module,
    texts: list[Tensor],
    callbacks: list[L.Callback],
    folder: Path,
    steps: int = 3,
    resume: str | None = None,
    **settings: Any,
) -> L.Trainer:
    trainer = L.Trainer(max_steps=steps, callbacks=callbacks, default_root_dir=folder, **QUIET)
    data = [torch.arange(3, 9) + i for i in range(10)] + texts[::2]
    loader = DataLoader(data, batch_size=5, collate_fn=PAD)
    trainer.fit(CausalLM(model, lr=0.3, **settings), loader, ckpt_path=resume)
    return trainer


def mean_loss(model: nn.Module, text: Tensor) -> Tensor:
    logits = model.eval()(input_ids=text[None]).logits[0, :-1]
    return F.cross_entropy(logits, text[1:])


def texts_of(model: nn.Module) -> list[Tensor]:
    """Of two lengths, so that some are padded."""
    texts = new_token_canaries(model, 6, length=4, row_norm=0.5)
    return [text if i % 2 else torch.cat([text, text[1:3]]) for i, text in enumerate(texts)]


def test_a_score_is_how_far_the_texts_loss_fell(tmp_path: Path) -> None:
    model = tiny_llama()
    texts, weights = texts_of(model), Weights()
    scorer = CanaryScorer(canary_set(texts))
    fit(model, texts, [scorer, weights], tmp_path)
    with torch.no_grad():
        fell = [mean_loss(weights.kept[0], t) - mean_loss(weights.kept[-1], t) for t in texts]
    torch.testing.assert_close(scorer.scores(), torch.stack(fell).double(), rtol=1e-4, atol=1e-6)
    assert float(scorer.scores().abs().min()) > 1e-4


def test_training_is_not_disturbed(tmp_path: Path) -> None:
    runs = []
    for callbacks in (0, 1):
        model = tiny_gpt2(dropout=0.1).train()
        texts = texts_of(model)
        scorers = [CanaryScorer(canary_set(texts)) for _ in range(callbacks)]
        torch.manual_seed(3)
        trainer = fit(model, texts, [*scorers, Weights()], tmp_path)
        runs.append([*model.state_dict().values(), torch.rand(2)])
        assert trainer.state.finished
        assert model.training
    assert all(map(torch.equal, *runs))


def test_a_resumed_run_goes_on_with_its_scores(tmp_path: Path) -> None:
    def run(steps: int, resume: str | None = None) -> tuple[CanaryScorer, L.Trainer]:
        model = tiny_llama()
        texts = texts_of(model)
        scorer = CanaryScorer(canary_set(texts))
        return scorer, fit(model, texts, [scorer], tmp_path, steps, resume)

    class Saver(L.Callback):  # within an epoch, before the scores are added up
        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            trainer.save_checkpoint(tmp_path / "within.ckpt")

    model = tiny_llama()
    texts = texts_of(model)
    fit(model, texts, [CanaryScorer(canary_set(texts)), Saver()], tmp_path, 2)
    trainer = run(3)[1]
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    for path, steps in ((tmp_path / "end.ckpt", 3), (tmp_path / "within.ckpt", 2)):
        whole = run(steps)[0].scores()
        torch.testing.assert_close(run(steps, str(path))[0].scores(), whole)  # no step is left
        again, _ = run(6, str(path))
        content = torch.load(path, weights_only=True)
        del content["callbacks"]
        torch.save(content, path)
        rest, _ = run(6, str(path))
        assert float(rest.scores().abs().max()) > 1e-4
        torch.testing.assert_close(again.scores(), whole + rest.scores())
    other_canaries = canary_set([torch.tensor([60 + i, 5]) for i in range(6)])
    with pytest.raises(ValueError, match="is of other canaries"):
        CanaryScorer(
            CanarySet(other_canaries.token_ids, InclusionRecord(seed_key(0), (b"x" * 32,) * 6))
        ).load_state_dict(again.state_dict())


def test_canaries_that_cannot_be_scored_so_are_refused(tmp_path: Path) -> None:
    canaries = canary_set(texts_of(tiny_llama()))
    with pytest.raises(ValueError, match="has 97 rows: train the model of new_token_canaries"):
        fit(tiny_llama(), [], [CanaryScorer(canaries)], tmp_path)
    with pytest.raises(ValueError, match="not a masked"):
        fit(tiny_bert_mlm(), [], [CanaryScorer(canaries)], tmp_path)
