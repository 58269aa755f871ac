from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_fedleak.callbacks import CanaryScorer
from lightning_fedleak.cli.finetuning.data import PadRight
from lightning_fedleak.evaluation.canaries import (
    CanarySet,
    InclusionMismatch,
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


@pytest.mark.parametrize("every", [None, 2])
def test_by_loss_it_is_how_far_each_text_fell(every: int | None, tmp_path: Path) -> None:
    model = tiny_llama()
    texts, weights = texts_of(model), Weights()
    scorer = CanaryScorer(canary_set(texts), every_n_steps=every)
    fit(model, texts, [scorer, weights], tmp_path)
    with torch.no_grad():
        fell = [mean_loss(weights.kept[0], t) - mean_loss(weights.kept[-1], t) for t in texts]
    torch.testing.assert_close(scorer.scores(), torch.stack(fell).double(), rtol=1e-4, atol=1e-6)
    assert float(scorer.scores().abs().min()) > 1e-4


def slopes_by_hand(model: nn.Module, texts: list[Tensor], names: list[str]) -> list[list[Tensor]]:
    """By text and matrix: the own row of the gradient of all texts' loss, summed over tokens."""
    model = copy.deepcopy(model)
    loss = sum((len(t) - 1) * mean_loss(model, t) for t in texts)
    gradients = torch.autograd.grad(loss, [model.get_parameter(name) for name in names])
    return [[gradient[text[0]] for gradient in gradients] for text in texts]


@pytest.mark.parametrize(
    ("tied", "frozen", "every"),
    [(True, None, 1), (False, None, 2), (False, "embed_tokens", None), (False, "lm_head", 1)],
)
def test_by_row_it_is_how_far_each_canarys_rows_went_down_their_slopes(
    tied: bool, frozen: str | None, every: int | None, tmp_path: Path
) -> None:
    model = tiny_llama(tied=tied)
    texts, weights = texts_of(model), Weights()
    names = ["model.embed_tokens.weight", *([] if tied else ["lm_head.weight"])]
    if frozen is not None:
        model.get_submodule(f"{'model.' * (frozen != 'lm_head')}{frozen}").requires_grad_(False)
        names = [name for name in names if frozen not in name]
    scorer = CanaryScorer(canary_set(texts), by="row", every_n_steps=every)
    fit(model, texts, [scorer, weights], tmp_path)
    expected = torch.zeros(len(texts), dtype=torch.float64)
    looks = {1: [0, 1, 2, 3], 2: [0, 2, 3], None: [0, 3]}[every]
    for start, end in itertools.pairwise(looks):
        before, after = weights.kept[start], weights.kept[end]
        slopes = slopes_by_hand(before, texts, names)
        for i, text in enumerate(texts):
            flat = torch.cat(slopes[i])
            rows = [
                before.get_parameter(n)[text[0]] - after.get_parameter(n)[text[0]] for n in names
            ]
            expected[i] += float(torch.cat(rows).detach() @ flat / flat.norm())
    torch.testing.assert_close(scorer.scores(), expected, rtol=1e-4, atol=1e-6)
    inside = torch.arange(len(texts)) % 2 == 0
    assert float(scorer.scores()[inside].min()) > float(scorer.scores()[~inside].max())


def test_training_is_not_disturbed(tmp_path: Path) -> None:
    runs = []
    for callbacks in (0, 1):
        model = tiny_gpt2(dropout=0.1).train()
        texts = texts_of(model)
        canaries = canary_set(texts)
        ways = ("loss", "row") * callbacks
        scorers = [CanaryScorer(canaries, by, every_n_steps=1) for by in ways]
        torch.manual_seed(3)
        trainer = fit(model, texts, [*scorers, Weights()], tmp_path)
        runs.append([*model.state_dict().values(), torch.rand(2)])
        assert trainer.state.finished
        assert model.training
    assert all(map(torch.equal, *runs))


def test_a_resumed_run_goes_on_with_its_scores(tmp_path: Path) -> None:
    by = "row"

    def run(steps: int, resume: str | None = None) -> tuple[CanaryScorer, L.Trainer]:
        model = tiny_llama()
        texts = texts_of(model)
        scorer = CanaryScorer(canary_set(texts), by, every_n_steps=1)
        return scorer, fit(model, texts, [scorer], tmp_path, steps, resume)

    first, trainer = run(3)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    again, _ = run(6, str(tmp_path / "a.ckpt"))
    content = torch.load(tmp_path / "a.ckpt", weights_only=True)
    del content["callbacks"]
    torch.save(content, tmp_path / "b.ckpt")
    rest, _ = run(6, str(tmp_path / "b.ckpt"))
    assert float(rest.scores().abs().max()) > 1e-4
    torch.testing.assert_close(again.scores(), first.scores() + rest.scores())
    state = again.state_dict()
    other_canaries = canary_set([torch.tensor([60 + i, 5]) for i in range(6)])
    with pytest.raises(InclusionMismatch):
        CanaryScorer(
            CanarySet(other_canaries.token_ids, InclusionRecord(seed_key(0), (b"x" * 32,) * 6)), by
        ).load_state_dict(state)
    other_way = CanaryScorer(again.canaries, "loss")
    with pytest.raises(ValueError, match="one way must hold"):
        other_way.load_state_dict(state)


def test_canaries_that_cannot_be_scored_so_are_refused(tmp_path: Path) -> None:
    model = tiny_llama()
    texts = texts_of(model)
    canaries = canary_set(texts)
    with pytest.raises(ValueError, match=r"by must be .loss. or .row."):
        CanaryScorer(canaries, by="logit")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="every_n_steps"):
        CanaryScorer(canaries, every_n_steps=0)
    with pytest.raises(ValueError, match="token 5 is in 2 canaries"):
        CanaryScorer(canary_set([torch.tensor([5, 6]), torch.tensor([7, 5])]), by="row")
    with pytest.raises(ValueError, match="has 97 rows: train the model that new_token_canaries"):
        fit(tiny_llama(), [], [CanaryScorer(canaries)], tmp_path)
    with pytest.raises(ValueError, match="not a masked"):
        fit(tiny_bert_mlm(), [], [CanaryScorer(canaries)], tmp_path)
