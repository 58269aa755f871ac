"""Labels, weights and inputs off the graph of a step, against truths written by hand."""

from collections.abc import Callable

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn import functional

from lightning_fedleak.model.anatomy import find_anatomy
from lightning_fedleak.model.batches import BatchError, TokenBatch
from lightning_fedleak.model.taps import ModelCall
from lightning_fedleak.model.taps.graph import GraphTap, read_call
from lightning_fedleak.model.taps.row_labels import find_residual, read_rows, rows_of_step

VOCABULARY, TEXTS, LENGTH = 128, 4, 12
IDS = torch.randint(3, VOCABULARY, (TEXTS, LENGTH), generator=torch.Generator().manual_seed(1))
MASK = torch.ones_like(IDS)
MASK[:2, 9:] = 0
PADDED = IDS.masked_fill(MASK == 0, 0)
ANSWERS = (torch.arange(LENGTH) >= LENGTH - 4).long().expand(TEXTS, -1)
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}


def llama(**more: object) -> nn.Module:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, **more))


def adapted(model: nn.Module) -> nn.Module:
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return get_peft_model(model, config)


def gpt2_lora_with_checkpointing() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=2, n_positions=32,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    lora = LoraConfig(r=4, target_modules=["c_attn"], task_type="CAUSAL_LM", fan_in_fan_out=True)
    model = get_peft_model(transformers.GPT2LMHeadModel(config), lora)
    model.enable_input_require_grads()
    model.base_model.model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def gemma2_with_soft_cap() -> nn.Module:
    torch.manual_seed(0)
    return transformers.Gemma2ForCausalLM(
        transformers.Gemma2Config(**SMALL, head_dim=16, final_logit_softcapping=0.05)
    )


def bf16_tied() -> nn.Module:
    return llama(tie_word_embeddings=True).to(torch.bfloat16)


CAUSAL = {
    "llama": llama,
    "llama, LoRA": lambda: adapted(llama()),
    "gpt2, LoRA, checkpointing": gpt2_lora_with_checkpointing,
    "gemma2, soft-capped": gemma2_with_soft_cap,
    "llama, bf16, tied": bf16_tied,
}


def each_loss(logits: Tensor) -> Tensor:
    """Return (B, L - 1) the loss of each next token."""
    return functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten(), reduction="none"
    ).view(TEXTS, LENGTH - 1)


def loss_by_class(logits: Tensor, **more: object) -> Tensor:
    return functional.cross_entropy(
        logits[:, :-1].float().flatten(0, 1), IDS[:, 1:].flatten(), **more
    )


CLASS_WEIGHTS = torch.ones(VOCABULARY)
CLASS_WEIGHTS[: VOCABULARY // 2] = 0.1
TOKEN_WEIGHTS = torch.rand(TEXTS, LENGTH - 1, generator=torch.Generator().manual_seed(2)) + 0.01
FULL = IDS
PADDED_LABELS = PADDED.masked_fill(MASK == 0, -100)
ANSWER_LABELS = IDS.masked_fill(ANSWERS == 0, -100)

Loss = Callable[[nn.Module], Tensor]


def masked_loss(model: nn.Module) -> Tensor:
    losses, mask = each_loss(model(input_ids=IDS).logits.float()), ANSWERS[:, 1:]
    return (losses * mask).sum() / mask.sum()


def focal_loss(model: nn.Module) -> Tensor:
    losses = each_loss(model(input_ids=IDS).logits.float())
    return ((1 - (-losses).exp()) ** 2 * losses).mean()


def z_loss(model: nn.Module) -> Tensor:
    logits = model(input_ids=IDS).logits.float()
    return loss_by_class(logits) + 1e-3 * (logits.logsumexp(-1) ** 2).mean()


def entropy_bonus(model: nn.Module) -> Tensor:
    logits = model(input_ids=IDS).logits.float()
    entropy = (logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)
    return loss_by_class(logits) + 0.01 * entropy[:, :-1].mean()


def two_batches(model: nn.Module) -> Tensor:
    return sum(model(input_ids=part, labels=part).loss for part in IDS.split(2)) / 2


def prefixes_alone(model: nn.Module) -> Tensor:
    logits = model(input_ids=IDS, logits_to_keep=5).logits[:, :-1].float()
    return functional.cross_entropy(logits.flatten(0, 1), IDS[:, -4:].flatten())


HARD: dict[str, tuple[Loss, Tensor]] = {
    "plain": (lambda m: m(input_ids=IDS, labels=IDS).loss, FULL),
    "padded": (
        lambda m: m(input_ids=PADDED, attention_mask=MASK, labels=PADDED_LABELS).loss,
        PADDED_LABELS,
    ),
    "loss mask": (masked_loss, ANSWER_LABELS),
    "class weights": (lambda m: loss_by_class(m(input_ids=IDS).logits, weight=CLASS_WEIGHTS), FULL),
    "token weights": (
        lambda m: (each_loss(m(input_ids=IDS).logits.float()) * TOKEN_WEIGHTS).mean(),
        FULL,
    ),
    "label smoothing": (
        lambda m: loss_by_class(m(input_ids=IDS).logits, label_smoothing=0.1),
        FULL,
    ),
    "focal": (focal_loss, FULL),
    "answers": (lambda m: m(input_ids=IDS, labels=ANSWER_LABELS).loss, ANSWER_LABELS),
    "micro-batches": (two_batches, FULL),
    "logits_to_keep": (prefixes_alone, ANSWER_LABELS),
    "z-loss": (z_loss, FULL),
    "entropy": (entropy_bonus, FULL),
}


def calls_of(model: nn.Module, loss: Loss, temperature: float = 1.0) -> list[ModelCall]:
    """Return the calls that the graph of one step shows; gradients stay in the parameters."""
    model.zero_grad()
    anatomy = find_anatomy(model)
    tap = GraphTap(anatomy, temperature)
    assert tap.why_not is None
    tap.arm()
    loss(model).backward()
    calls = [read_call(call, anatomy.kind) for call in tap.take()]
    tap.close()
    return calls


def read_step(model: nn.Module, loss: Loss) -> list[TokenBatch]:
    return [call.batch for call in calls_of(model.train(), loss)]


def ids_of(batches: list[TokenBatch]) -> list[int]:
    return sorted(torch.cat([batch.target_ids() for batch in batches]).tolist())


@pytest.mark.parametrize("family", CAUSAL)
def test_hard_labels_are_exact(family: str) -> None:
    model = CAUSAL[family]()
    for name, (loss, labels) in HARD.items():
        batches = read_step(model, loss)
        truth = labels[:, 1:][labels[:, 1:] != -100]
        assert ids_of(batches) == sorted(truth.tolist()), name
        assert not any(b.preferences or b.soft_labels for b in batches), name
        expected = TokenBatch(
            PADDED if name == "padded" else IDS,
            labels,
            MASK if name == "padded" else None,
            "causal",
        )
        read = sorted(torch.cat([b.context_ids() for b in batches]).tolist())
        with_last = sorted(IDS.flatten().tolist())  # a z-loss is of the last token's logits too
        truth_read = sorted(expected.context_ids().tolist())
        assert read == (with_last if name == "z-loss" else truth_read), name


def mixtral(coefficient: float = 0.01) -> nn.Module:
    torch.manual_seed(0)
    more = {"num_local_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": coefficient}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**SMALL, **more))


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("coefficient", [0.01, 0.0])
def test_words_that_a_routers_loss_reaches_are_read(coefficient, padded) -> None:
    """Behind the last label too, and padding where the router's loss does not leave it out."""
    labels = IDS.masked_fill(torch.arange(LENGTH) > 3, -100)
    ids, mask = (PADDED, MASK) if padded else (IDS, None)

    def loss(model: nn.Module, **inputs: Tensor) -> Tensor:
        found = model(**inputs, attention_mask=mask, labels=labels, output_router_logits=True)
        routers = sum(logits.square().mean() for logits in found.router_logits)
        return found.loss + coefficient * routers if padded else found.loss

    model = adapted(mixtral(coefficient)) if padded else mixtral(coefficient)
    embedded = model.get_input_embeddings()(ids).detach().requires_grad_()
    loss(model, inputs_embeds=embedded).backward()
    reached = embedded.grad.any(-1)
    assert bool(reached[:, 3:].any()) == bool(coefficient)
    model.zero_grad()
    [batch] = read_step(model, lambda model: loss(model, input_ids=ids))
    assert sorted(batch.context_ids().tolist()) == sorted(ids[reached].tolist())
    assert torch.equal(batch.context_mask(), reached if mask is None else reached & (mask != 0))
    assert ids_of([batch]) == sorted(labels[:, 1:4].flatten().tolist())


def reentrant() -> nn.Module:
    """Return a model whose blocks run twice, the first time without a graph."""
    model = llama()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()
    return model


def in_float16(model: nn.Module) -> Tensor:
    with torch.autocast("cpu", torch.float16):
        return model(input_ids=IDS, labels=ANSWER_LABELS).loss


STEPS: dict[str, tuple[Callable[[], nn.Module], Loss]] = {
    "reentrant checkpointing": (reentrant, HARD["answers"][0]),
    "the scale of fp16": (llama, lambda m: 2.0**16 * in_float16(m)),
    "a small scale": (llama, lambda m: 2.0**-16 * HARD["answers"][0](m)),
}


@pytest.mark.parametrize("kind", STEPS)
def test_labels_are_read_however_the_step_is_computed(kind: str) -> None:
    model, loss = STEPS[kind]
    assert ids_of(read_step(model(), loss)) == sorted(ANSWER_LABELS[ANSWER_LABELS > 0].tolist())


@pytest.mark.parametrize("family", CAUSAL)
def test_a_rejected_text_has_the_other_sign(family: str) -> None:
    model = CAUSAL[family]()

    def loss(model: nn.Module) -> Tensor:
        chosen = -model(input_ids=IDS[:2], labels=IDS[:2]).loss
        rejected = -model(input_ids=IDS[2:], labels=IDS[2:]).loss
        return -functional.logsigmoid(0.5 * (chosen - rejected))

    chosen, rejected = read_step(model, loss)
    assert ids_of([chosen]) == sorted(IDS[:2, 1:].flatten().tolist())
    assert not chosen.preferences
    assert ids_of([rejected]) == sorted(IDS[2:, 1:].flatten().tolist())
    assert rejected.preferences


SOFT_TARGETS = torch.randn(
    TEXTS, LENGTH, VOCABULARY, generator=torch.Generator().manual_seed(5)
).softmax(-1)


def soft_loss(model: nn.Module) -> Tensor:
    logits = model(input_ids=IDS).logits.float()
    return functional.kl_div(logits.log_softmax(-1), SOFT_TARGETS, reduction="sum")


@pytest.mark.parametrize("family", CAUSAL)
def test_soft_targets_are_unknown(family: str) -> None:
    [batch] = read_step(CAUSAL[family](), soft_loss)
    assert batch.soft_labels
    assert sorted(batch.context_ids().tolist()) == sorted(IDS.flatten().tolist())


def test_texts_that_are_shifted_by_hand() -> None:
    x, y = IDS[:, :-1], IDS[:, 1:]

    def loss(model: nn.Module) -> Tensor:
        return functional.cross_entropy(model(input_ids=x).logits.flatten(0, 1), y.flatten())

    [batch] = read_step(llama(), loss)
    assert torch.equal(batch.input_ids, IDS)
    assert ids_of([batch]) == sorted(y.flatten().tolist())
    assert sorted(batch.context_ids().tolist()) == sorted(x.flatten().tolist())


class HeadOnPrefixes(nn.Module):
    """Call the head on all hidden states but the last, in chunks where asked."""

    def __init__(self, chunks: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.mixing = nn.Linear(16, 16)
        self.head = nn.Linear(16, VOCABULARY, bias=False)
        self.chunks = chunks

    def forward(self, input_ids: Tensor) -> Tensor:
        states = torch.tanh(self.mixing(self.embedding(input_ids))).cumsum(1)[:, :-1]
        logits = torch.cat([self.head(part) for part in states.chunk(self.chunks, 1)], 1)
        return functional.cross_entropy(logits.flatten(0, 1), input_ids[:, 1:].flatten())


def bert() -> nn.Module:
    torch.manual_seed(0)
    sizes = {k: v for k, v in SMALL.items() if k != "num_key_value_heads"}
    return transformers.BertForMaskedLM(transformers.BertConfig(**sizes))


CHOSEN = torch.zeros_like(IDS, dtype=torch.bool).index_fill(1, torch.tensor([2, 5]), True)
HIDDEN, HIDDEN_LABELS = IDS.masked_fill(CHOSEN, 1), IDS.masked_fill(~CHOSEN, -100)


def t5(**more: object) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2}
    config = transformers.T5Config(vocab_size=VOCABULARY, decoder_start_token_id=0, **sizes, **more)
    return transformers.T5ForConditionalGeneration(config)


def whole(model: nn.Module, ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
    return model(ids, attention_mask=mask[:, None, None, :].bool(), labels=labels).loss


def encoder_first(model: nn.Module, ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
    states = model.encoder(ids, attention_mask=mask)
    return model(encoder_outputs=states, attention_mask=mask, labels=labels).loss


def in_parts(model: nn.Module, ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
    states = model.encoder(ids, attention_mask=mask)[0]
    read = model._shift_right(labels)
    states = model.decoder(read, encoder_hidden_states=states, encoder_attention_mask=mask)[0]
    return functional.cross_entropy(model.lm_head(states).flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("call", [whole, encoder_first, in_parts])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_what_no_label_depends_on(call, side: str) -> None:
    """The batch and the call of the model's forward do not say what is padded."""
    model = t5()
    mask = MASK if side == "right" else MASK.flip(1)
    labels = IDS[:, :7].flip(0).masked_fill(torch.arange(7) > 4, -100)
    [batch] = read_step(model, lambda model: call(model, IDS, mask, labels))
    expected = TokenBatch(IDS, labels, mask, "seq2seq")
    assert torch.equal(batch.context_ids(), expected.context_ids())
    assert torch.equal(batch.labels, labels)


@pytest.mark.parametrize("classes", [2, 3])
def test_a_classifier_of_texts(classes: int) -> None:
    torch.manual_seed(0)
    model = transformers.LlamaForSequenceClassification(
        transformers.LlamaConfig(**SMALL, num_labels=classes, pad_token_id=0)
    )
    labels = torch.tensor([0, 1, 1, 0])
    weights = torch.tensor([1.0, 1.0, 0.0, 1.0])

    def loss(model: nn.Module) -> Tensor:
        logits = model(input_ids=PADDED, attention_mask=MASK).logits
        return (functional.cross_entropy(logits, labels, reduction="none") * weights).mean()

    [batch] = read_step(model, loss)
    assert batch.kind == "classifier"
    assert batch.context_mask().any(1).tolist() == [True, True, False, True]


def test_nothing_is_recorded_without_a_backward() -> None:
    model = llama()
    tap = GraphTap(find_anatomy(model))
    tap.arm()
    with torch.no_grad():
        model(input_ids=IDS)
    model(input_ids=IDS)
    assert tap.take() == []


# ---- rows of a gradient, drawn -----------------------------------------------------------------


@st.composite
def losses(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Draw logits, labels, weights by row, and dL/dlogits of a loss on them, in float64."""
    classes, rows = draw(st.integers(3, 60)), draw(st.integers(1, 12))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    scale = draw(st.sampled_from([0.1, 1.0, 3.0]))
    logits = torch.randn(rows, classes, generator=generator) * scale
    labels = torch.randint(0, classes, (rows,), generator=generator)
    weights = torch.rand(rows, generator=generator) + 0.01
    if draw(st.booleans()):
        weights = weights * (torch.rand(rows, generator=generator) < 0.7)
    if draw(st.booleans()):
        weights = weights * (torch.rand(classes, generator=generator) + 0.01)[labels]
    kind = draw(st.sampled_from(["plain", "focal", "z-loss", "pushed"]))
    inputs = logits.double().requires_grad_()
    each = functional.cross_entropy(inputs, labels, reduction="none")
    if kind == "focal":
        each = (1 - (-each).exp()) ** 2 * each
    loss = (each * weights).sum() * (-1 if kind == "pushed" else 1)
    if kind == "z-loss":
        loss = loss + 1e-4 * (weights * inputs.logsumexp(1) ** 2).sum()
    (gradient,) = torch.autograd.grad(loss, inputs)
    return logits, labels, weights * (-1 if kind == "pushed" else 1), gradient.float()


@given(losses())
@settings(max_examples=60)
def test_rows_of_any_loss(case: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    logits, labels, weights, gradient = case
    rows = read_rows(gradient, logits)
    counted = weights != 0
    assert torch.equal(rows.has_gradient, counted)
    assert not bool(rows.is_soft.any())
    sure = counted & ~rows.is_ambiguous
    assert torch.equal(rows.labels[sure], labels[sure])
    assert bool((rows.labels[~counted] == -100).all())
    assert torch.equal(rows.is_rejected[sure], weights[sure] < 0)
    size = gradient.gather(1, labels[:, None])[:, 0].abs()
    assert torch.equal(rows.sizes[sure].abs(), size[sure])


def test_blocks_of_rows_are_read_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(9, 20, generator=generator)
    gradient = logits.softmax(1) - functional.one_hot(torch.arange(9), 20)
    whole = read_rows(gradient, logits)
    monkeypatch.setattr("lightning_fedleak.model.taps.row_labels.ENTRIES_AT_ONCE", 45)
    parts = read_rows(gradient, logits)
    assert torch.equal(whole.labels, parts.labels)
    assert torch.equal(whole.labels, torch.arange(9))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [0.3, 3.0])
def test_smoothed_labels_of_any_probability(dtype: torch.dtype, scale: float) -> None:
    generator = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(200, 80, generator=generator), torch.randint(0, 80, (200,))
    logits = logits * scale
    logits[torch.arange(200), labels] += torch.linspace(0, 20, 200)
    logits = logits.to(dtype).requires_grad_()
    loss = functional.cross_entropy(logits.float(), labels, label_smoothing=0.1)
    (gradient,) = torch.autograd.grad(loss, logits)
    alone, claimed = (read_rows(gradient, logits.detach(), c) for c in (None, labels))
    assert torch.equal(claimed.labels, labels)
    assert not bool((claimed.is_soft | claimed.is_ambiguous | claimed.is_rejected).any())
    known = alone.labels != -100
    assert torch.equal(alone.labels[known], labels[known])
    assert float(known.float().mean()) > 0.6  # below that a certain label is lost in rounding
    others = read_rows(gradient, logits.detach(), (labels + 1) % 80)
    assert torch.equal(others.labels, alone.labels)


@pytest.mark.parametrize("entries", [(-0.3, 0.3), (0.3, -0.3)])
def test_two_classes_need_labels(entries: tuple[float, float]) -> None:
    rows = read_rows(torch.tensor([entries]), torch.zeros(1, 2))
    assert bool(rows.is_ambiguous.all())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_what_labels_and_shapes_leave_of_rows_is_kept(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(12, 40, generator=generator).to(dtype).requires_grad_()
    labels = torch.arange(12)
    loss = functional.cross_entropy(logits.float()[:8], labels[:8])
    loss = loss + 1e-2 * (logits.float() / 0.7).softmax(1).square().sum()
    (gradient,) = torch.autograd.grad(loss, logits)
    rows = read_rows(gradient, logits.detach(), labels)
    residual = find_residual(gradient, logits.detach(), rows)
    assert residual.indices is not None
    again = rows_of_step(rows, logits.detach(), residual)
    assert torch.equal(again, gradient)
    without = rows_of_step(rows, logits.detach())
    left = float((without - gradient).float().norm() / gradient.float().norm())
    assert residual.share == pytest.approx(left, rel=1e-3)
    wrong = rows._replace(labels=(labels + 1) % 40)
    assert find_residual(gradient, logits.detach(), wrong).share > 0.5


@given(st.integers(0, 1000), st.floats(0.1, 8.0))
@settings(max_examples=20, deadline=None)
def test_rows_of_a_plain_loss_are_made_again_bit_by_bit(seed: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = (scale * torch.randn(24, 4000, generator=generator)).requires_grad_()
    labels = torch.randint(4000, (24,), generator=generator)
    (gradient,) = torch.autograd.grad(functional.cross_entropy(logits, labels), logits)
    rows = read_rows(gradient, logits.detach())
    residual = find_residual(gradient, logits.detach(), rows)
    assert torch.equal(rows_of_step(rows, logits.detach(), residual), gradient)
    assert residual.indices is not None
    assert len(residual.indices) < 100


def two_losses(model: nn.Module, ids: Tensor) -> list[Tensor]:
    logits = model(input_ids=ids).logits[:, :-1]
    return [functional.cross_entropy(logits[i], ids[i, 1:]) for i in range(2)]


def backward_twice(model: nn.Module, ids: Tensor) -> None:
    for loss in two_losses(model, ids):
        loss.backward(retain_graph=True)


def backward_of_a_penalty(model: nn.Module, ids: Tensor) -> None:
    loss = sum(two_losses(model, ids))
    (gradient,) = torch.autograd.grad(loss, model.lm_head.weight, create_graph=True)
    (loss + gradient.square().sum()).backward()


def gradient_of_other_texts(model: nn.Module, ids: Tensor) -> None:
    sum(two_losses(model, ids)).backward()
    torch.autograd.grad(sum(two_losses(model, ids - 1)), [*model.parameters()])


def gradient_of_states(model: nn.Module, ids: Tensor) -> None:
    sum(two_losses(model, ids)).backward()
    output = model(input_ids=ids - 1, labels=ids - 1, output_hidden_states=True)
    torch.autograd.grad(output.loss, output.hidden_states[1])


def gradient_below_the_head(model: nn.Module, ids: Tensor) -> None:
    """Of a fused loss, which never calls the head."""
    states = model.model(input_ids=ids).last_hidden_state[:, :-1]
    logits = functional.linear(states, model.lm_head.weight).flatten(0, 1)
    other = functional.cross_entropy(logits, ids[:, :-1].flatten())
    torch.autograd.grad(other, [*model.parameters()], retain_graph=True)
    functional.cross_entropy(logits, ids[:, 1:].flatten()).backward()


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        (backward_twice, "two backward passes reach the same logits"),
        (backward_of_a_penalty, "two backward passes reach the same logits"),
        (gradient_of_other_texts, "autograd.grad beside its backward"),
        (gradient_of_states, "autograd.grad beside its backward"),
        (gradient_below_the_head, "autograd.grad beside its backward"),
    ],
)
def test_labels_are_unknown_if_several_passes_read_them(step, reason) -> None:
    model = llama()
    tap = GraphTap(find_anatomy(model))
    tap.arm()
    step(model, IDS[:2])
    with pytest.raises(BatchError, match=reason):
        tap.take()


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_gradients_of_autograd_grad_alone_are_read(reentrant: bool | None) -> None:
    """And several calls with one backward each, however the model is checkpointed."""
    model = llama().train()
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
    tap = GraphTap(find_anatomy(model))
    tap.arm()
    for texts in IDS.split(2):
        loss = sum(two_losses(model, texts))
        if reentrant is None:
            torch.autograd.grad(loss, [*model.parameters()])
        else:
            loss.backward()
    labels = [read_call(call, "causal").texts.labels for call in tap.take()]
    assert torch.equal(torch.cat(labels)[:, 1:], IDS[:, 1:])
