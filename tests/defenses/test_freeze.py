"""Freeze: what is frozen, for how long, and what is refused."""

from __future__ import annotations

import lightning as L
import pytest
import torch
from torch import nn

from lightning_fedleak.defenses import DefenseError, Freeze
from lightning_fedleak.model.anatomy import AnatomyError
from lightning_fedleak.strategies import DefendedStrategy
from tests.helpers.inputs import context
from tests.helpers.lightning_modules import CausalLMModule, random_token_loader
from tests.helpers.models import tiny_bert_mlm, tiny_gpt2, tiny_llama, tiny_t5
from tests.strategies.toy import trainer


def frozen_by(part: str, root: nn.Module) -> tuple[Freeze, set[str]]:
    before = {name for name, p in root.named_parameters() if p.requires_grad}
    freeze = Freeze(part)
    freeze.before_setup(context(root))
    return freeze, before - {name for name, p in root.named_parameters() if p.requires_grad}


@pytest.mark.parametrize(
    ("part", "build", "expected"),
    [
        ("head", lambda: tiny_llama(tied=False), {"lm_head.weight"}),
        ("embeddings", lambda: tiny_llama(tied=False), {"model.embed_tokens.weight"}),
        (
            "head+embeddings",
            lambda: tiny_llama(tied=False),
            {"lm_head.weight", "model.embed_tokens.weight"},
        ),
        ("head", lambda: tiny_gpt2(tied=False), {"lm_head.weight"}),
        ("head+embeddings", lambda: tiny_gpt2(tied=True), {"transformer.wte.weight"}),
        (
            "head+embeddings",
            tiny_bert_mlm,
            {"bert.embeddings.word_embeddings.weight", "cls.predictions.bias"},
        ),
        ("head+embeddings", tiny_t5, {"shared.weight"}),
    ],
)
def test_what_is_frozen_and_given_back(part: str, build, expected: set[str]) -> None:
    root = CausalLMModule(build())
    freeze, names = frozen_by(part, root)
    assert names == {f"model.{name}" for name in expected}
    freeze.teardown()
    freeze.teardown()
    assert all(p.requires_grad for p in root.parameters())


@pytest.mark.parametrize("part", ["head", "embeddings"])
@pytest.mark.parametrize("build", [tiny_gpt2, tiny_bert_mlm, tiny_t5])
def test_a_tied_matrix_cannot_be_frozen_in_part(part: str, build) -> None:
    root = CausalLMModule(build())
    with pytest.raises(DefenseError, match=r"head\+embeddings.*tied.*tie_word_embeddings=False"):
        frozen_by(part, root)
    assert all(p.requires_grad for p in root.parameters())


def test_other_refusals() -> None:
    with pytest.raises(
        DefenseError, match=r"part must be 'head' or 'embeddings' or .* got 'heads'"
    ):
        Freeze("heads")
    with pytest.raises(AnatomyError, match="found no language model"):
        frozen_by("head", nn.Sequential(nn.Conv1d(2, 2, 1)))


def test_lora_inside_the_head_is_frozen_with_it() -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["lm_head", "q_proj"], r=2)
    root = CausalLMModule(peft.get_peft_model(tiny_llama(tied=False), config))
    _, names = frozen_by("head", root)
    assert {n.split(".")[-3] for n in names} == {"lora_A", "lora_B"}
    assert all("lm_head" in name for name in names)
    assert len(names) == 2


class Decaying(CausalLMModule):
    """Hands every parameter to an optimizer with weight decay, frozen or not."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.1, weight_decay=0.5)


def test_a_fit_leaves_the_frozen_weights_and_moves_the_others() -> None:
    L.seed_everything(0, verbose=False)
    model = Decaying(tiny_llama(tied=False))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    run = trainer(DefendedStrategy(defenses=[Freeze("head+embeddings")]), max_steps=2)
    for _ in range(2):
        run.fit(model, random_token_loader())
        run.fit_loop.epoch_loop.max_steps += 2
        run.fit_loop.max_epochs += 1
        unmoved = {n for n, p in model.named_parameters() if torch.equal(p, before[n])}
        assert unmoved == {"model.lm_head.weight", "model.model.embed_tokens.weight"}
        assert all(p.requires_grad for p in model.parameters())
    assert run.global_step == 4


class Unfreezing(L.Callback):
    """Makes everything trainable at the second step, as a gradual unfreezing schedule does."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        if batch_idx == 1:
            pl_module.requires_grad_(True)


def test_what_is_unfrozen_on_the_way_is_not_released() -> None:
    model = Decaying(tiny_llama(tied=False))
    head = model.model.lm_head.weight.detach().clone()
    strategy = DefendedStrategy(defenses=[Freeze("head")])
    run = trainer(strategy, max_steps=3, callbacks=[Unfreezing()])
    with pytest.raises(DefenseError, match=r"lm_head\.weight.*was not released"):
        run.fit(model, random_token_loader())
    assert run.global_step == 1
    assert torch.equal(model.model.lm_head.weight, head)
