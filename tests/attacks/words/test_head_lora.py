"""Words off the head: rows of a LoRA's B are words, and the sign rule on its bias."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from lightning_fedleak.attacks.base import RunFacts, UnusableObservation
from lightning_fedleak.attacks.words import aligned_readout
from lightning_fedleak.attacks.words.aligned import AlignedFlatChat
from lightning_fedleak.attacks.words.direct import BiasSign, bias_sign
from lightning_fedleak.attacks.words.flatchat import FlatChat
from lightning_fedleak.attacks.words.head_gradients import gradient_parts, head_parameters
from lightning_fedleak.cli.finetuning import EMBEDDED_MESSAGES, EMBEDDED_MODEL, read_texts
from lightning_fedleak.cli.finetuning.module import load_tokenizer
from lightning_fedleak.model.anatomy import HEAD_WEIGHT, find_anatomy, head_surface
from lightning_fedleak.model.batches import TokenBatch
from lightning_fedleak.model.snapshots import GradientSnapshot, Observation, Stage, UpdateSnapshot
from tests.attacks.row_space.models import backward, llama, ready, texts, with_lora
from tests.helpers.models import tiny_gpt2

NAME = "base_model.model.lm_head.lora_B.default.weight"
TARGETS = ["q_proj", "lm_head"]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("scaled", [False, True])
def test_the_parts_of_public_text_add_up_to_bs_gradient(*, tied: bool, scaled: bool) -> None:
    model = with_lora(
        ready(llama(tie_word_embeddings=tied)), 4, TARGETS, use_rslora=scaled, lora_dropout=0.1
    )
    anatomy = find_anatomy(model)
    surface = head_surface(anatomy)
    assert surface.role == NAME
    ids = texts(3, 8)
    backward(model, ids)
    parts = gradient_parts(anatomy, TokenBatch(ids, ids, None, "causal"))
    result = parts.gradient(*head_parameters(anatomy))
    torch.testing.assert_close(result, anatomy.parameter(NAME).grad, rtol=1e-4, atol=1e-7)
    some = torch.tensor([7, 5, 100])
    torch.testing.assert_close(parts.gradient(*head_parameters(anatomy), some), result[some])
    logits = model(input_ids=ids).logits
    mine = F.linear(parts.hidden.view(3, 7, -1), *head_parameters(anatomy))
    torch.testing.assert_close(mine, logits[:, :-1], rtol=1e-4, atol=1e-5)


def test_a_head_that_is_trained_itself_is_read_itself() -> None:
    model = with_lora(ready(llama()), 4, TARGETS)
    anatomy = find_anatomy(model)
    anatomy.parameter(HEAD_WEIGHT).requires_grad_(True)
    assert head_surface(anatomy).role == HEAD_WEIGHT
    copied = get_peft_model(
        ready(llama()), LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"])
    )
    anatomy = find_anatomy(copied)
    assert head_surface(anatomy).role == HEAD_WEIGHT
    assert anatomy.trainable(HEAD_WEIGHT)
    elsewhere = find_anatomy(with_lora(ready(llama()), 4, ["q_proj"]))
    assert AlignedFlatChat(texts(4, 8)).needs(elsewhere).gradients == (HEAD_WEIGHT,)
    assert not elsewhere.trainable(HEAD_WEIGHT)


@pytest.fixture(scope="module")
def embedded() -> tuple[nn.Module, list[Tensor], list[Tensor]]:
    """The embedded model with a LoRA on its head, and texts of two kinds."""
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_pretrained(EMBEDDED_MODEL, dtype=torch.float32)
    config = LoraConfig(r=8, lora_alpha=16, target_modules=["lm_head"])
    tokenizer = load_tokenizer(None)
    ids = [torch.tensor(tokenizer(t)["input_ids"]) for t in read_texts(EMBEDDED_MESSAGES)]
    return get_peft_model(plain, config).eval(), ids[:150], ids[150:]


def shared(model: nn.Module, rows: list[Tensor]) -> tuple[Any, Observation, set[int]]:
    anatomy = find_anatomy(model)
    ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = torch.arange(ids.shape[1])[None] < torch.tensor([[len(r)] for r in rows])
    labels = ids.masked_fill(~mask, -100)
    backward(model, ids, labels=labels, attention_mask=mask.long())
    view = Observation((GradientSnapshot(0, Stage.SHARED, {NAME: anatomy.parameter(NAME).grad}),))
    truth = labels[:, 1:]
    return anatomy, view, set(truth[truth >= 0].tolist())


def f1(result: Tensor, truth: set[int]) -> float:
    guess = set(result.tolist())
    return 2 * len(guess & truth) / (len(guess) + len(truth))


@pytest.fixture(scope="module")
def learned(embedded: Any) -> AlignedFlatChat:
    model, public, _ = embedded
    attack = AlignedFlatChat(public, calibration_tokens=1_500)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(aligned_readout, "_REPEATS", 2)
        attack.prepare(find_anatomy(model))
    return attack


def test_its_words_are_read(embedded: Any, learned: AlignedFlatChat) -> None:
    model, _, private = embedded
    anatomy, view, truth = shared(model, private[:8])
    assert learned.needs(anatomy).gradients == (NAME,)
    learned.refresh(anatomy, 0)
    assert f1(learned.run(view).types, truth) > 0.85


def test_flatchat_sums_its_columns(embedded: Any) -> None:
    model, _, private = embedded
    anatomy, view, truth = shared(model, private[:8])
    attack = FlatChat(n_types=len(truth))
    assert attack.needs(anatomy).gradients == (NAME,)
    attack.prepare(anatomy)
    assert f1(attack.run(view).types, truth) > 0.5


def test_updates_of_adam_are_unknown_and_of_sgd_are_read(embedded, learned) -> None:
    model, public, private = embedded
    anatomy, view, truth = shared(model, private[:8])
    gradient = view.gradient(NAME)
    update = UpdateSnapshot(0, Stage.SHARED, {NAME: gradient}, local_steps=1, learning_rate=0.1)
    attack = AlignedFlatChat(public, calibration_tokens=1_500)
    for optimizer in ("AdamW", "SGD"):
        attack.meet(RunFacts(optimizer=optimizer, optimizer_settings={"lr": 0.1}, local_steps=1))
        if optimizer == "SGD":  # as fitted on gradients
            attack.load_state_dict(learned.state_dict())
            attack.refresh(anatomy, 0)
            assert f1(attack.run(Observation((update,))).types, truth) > 0.85
            continue
        attack.calibration_seconds = 60.0  # of an earlier run
        attack.prepare(anatomy)
        assert attack.calibration_seconds < 60.0
        attack.refresh(anatomy, 0)
        with pytest.raises(
            UnusableObservation, match="LoRA head's updates by AdamW are not supported"
        ):
            attack.run(Observation((update,)))


def bias_gradient(seed: int, tokens: int, spread: float) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(tokens, 50, generator=generator, dtype=torch.float64) * spread
    labels = torch.randint(50, (tokens,), generator=generator)
    bias = torch.zeros(50, dtype=torch.float64, requires_grad=True)
    loss = torch.nn.functional.cross_entropy(logits + bias, labels)
    return torch.autograd.grad(loss, bias)[0], labels


@given(seed=st.integers(0, 10**6), tokens=st.integers(1, 60), spread=st.floats(0.01, 4))
def test_names_used_types_only_and_all_that_outweigh_their_probability(seed, tokens, spread):
    gradient, labels = bias_gradient(seed, tokens, spread)
    guess = bias_sign(gradient)
    assert set(guess.types.tolist()) <= set(labels.tolist())
    assert set(guess.types.tolist()) == {t for t in range(50) if gradient[t] < 0}
    assert guess.n_types == len(guess.types)
    values = gradient[guess.types]
    assert bool((values[:-1] <= values[1:]).all())


def test_a_head_without_bias_is_refused_at_setup() -> None:
    with pytest.raises(ValueError, match="this head has none"):
        BiasSign().needs(find_anatomy(tiny_gpt2()))
