"""Words from the first projections' gradients, as models and PEFT really give them."""

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from peft import AdaLoraConfig, LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.attacks.setups import embedding_adapters
from lightning_fedleak.attacks.base import RunFacts, UnusableObservation, WordGuess
from lightning_fedleak.attacks.membership import fc
from lightning_fedleak.attacks.row_space import Atoms, SharedRows, explain, explanation, linear_maps
from lightning_fedleak.attacks.words import subspace
from lightning_fedleak.attacks.words.aligned_readout import refit_direction
from lightning_fedleak.attacks.words.aligned_rows import RowSummary
from lightning_fedleak.attacks.words.head_gradients import head_gradient
from lightning_fedleak.attacks.words.subspace import SubspaceWords
from lightning_fedleak.defenses.dpsgd.per_sample import full_precision
from lightning_fedleak.evaluation.metrics import WordRecovery
from lightning_fedleak.model.anatomy import Anatomy, find_anatomy
from lightning_fedleak.model.snapshots import (
    GradientSnapshot,
    Inapplicable,
    NotYet,
    Observation,
    Stage,
    UpdateSnapshot,
)
from tests.attacks.row_space.models import (
    FAMILIES,
    VOCABULARY,
    backward,
    bert,
    classifier,
    exposed_types,
    gpt2,
    llama,
    observed,
    prepared,
    ready,
    t5,
    texts,
    with_lora,
)
from tests.attacks.words.language import generator


def is_causal(model: nn.Module) -> bool:
    return not any("MaskedLM" in type(m).__name__ for m in model.modules())


def guess_of(model, ids, attack=None, **more) -> WordGuess:
    """Return what is said of the gradients of one backward pass."""
    attack, anatomy = prepared(model, attack)
    backward(model, ids, **more)
    return attack.run(observed(attack, anatomy))


def test_a_batch_that_fills_all_directions_is_refused_before_the_atoms_are_made(monkeypatch):
    def made(*_: object) -> None:
        raise AssertionError("atoms were made")

    monkeypatch.setattr(explanation, "Atoms", made)
    with pytest.raises(Inapplicable, match=r"fill \d+ of the input's \d+ directions"):
        guess_of(ready(llama()), texts(8, 16))


def fresh_lora(rank: int = 4, targets: Sequence[str] = ("q_proj", "v_proj")) -> nn.Module:
    """Return a model whose B is zero still."""
    return get_peft_model(ready(llama()), LoraConfig(r=rank, target_modules=[*targets])).eval()


def check_exact(model: nn.Module, ids: Tensor, *, certified: bool = True, **more: Tensor) -> None:
    guess = guess_of(model, ids, **more)
    truth = exposed_types(ids, causal=is_causal(model))
    assert set(guess.types.tolist()) == truth
    assert guess.certified or not certified
    assert guess.surface == "input"
    assert guess.n_types == len(truth)
    assert guess.scores.shape == (VOCABULARY,)
    assert set(guess.scores.topk(len(truth)).indices.tolist()) == truth


@pytest.mark.parametrize(("family", "rows"), [("llama", 1), *((name, 4) for name in FAMILIES)])
def test_whole_models_of_every_family(family: str, rows: int) -> None:
    check_exact(ready(FAMILIES[family]()), texts(rows, 16 // rows + 2))


@pytest.mark.parametrize(
    "more",
    [{"use_dora": True}, {"use_rslora": True}, {"init_lora_weights": "pissa"}],
    ids=["dora", "rslora", "pissa"],
)
def test_variants_of_lora(more: dict[str, object]) -> None:
    check_exact(with_lora(ready(llama()), 6, ["q_proj", "v_proj"], **more), texts(4, 7))


@pytest.mark.parametrize(
    ("family", "task", "targets"),
    [
        (llama, "CAUSAL_LM", ["q_proj", "v_proj"]),
        (gpt2, "CAUSAL_LM", ["c_attn"]),
        # The row of a token of padding would be zero, and leave hardly a trace.
        (lambda: classifier(pad_token_id=None), "SEQ_CLS", ["query", "value"]),
    ],
)
def test_adalora_as_peft_trains_it(family, task: str, targets: list[str]) -> None:
    """With its own term in the loss, and A moving from step to step."""
    config = AdaLoraConfig(
        init_r=8, target_r=4, total_step=100, target_modules=targets, task_type=task
    )
    model = get_peft_model(ready(family()), config).eval()
    attack, anatomy = prepared(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for step in range(4):
        ids = texts(3, 6)
        attack.refresh(anatomy, step)
        labels = torch.tensor([0, 1, 0]) if task == "SEQ_CLS" else ids
        backward(model, ids, labels=labels)
        if step:
            guess = attack.run(observed(attack, anatomy))
            assert set(guess.types.tolist()) == exposed_types(ids, causal=task == "CAUSAL_LM")
            assert guess.certified
        else:  # nothing but AdaLoRA's own term is there
            with pytest.raises(NotYet, match="no gradient until B"):
                attack.run(observed(attack, anatomy))
        optimizer.step()


def test_dropout_that_hides_every_word_is_unknown() -> None:
    model = with_lora(ready(llama()), 4, ["q_proj", "v_proj"], lora_dropout=0.9).train()
    attack, anatomy = prepared(model)
    refused = 0
    for _ in range(10):
        backward(model, texts(4, 8))
        try:
            assert len(attack.run(observed(attack, anatomy)).types)
        except UnusableObservation as error:
            refused += "what dropout adds" in str(error)
    assert refused


def test_an_update_below_the_rounding_of_stored_weights_is_unknown(monkeypatch) -> None:
    model = with_lora(ready(llama()), 8, ["q_proj", "v_proj"])
    attack, anatomy = prepared(model)
    view = step_of(torch.optim.SGD, model, attack, anatomy, texts(2, 7), weight_decay=0.0)
    monkeypatch.setattr(subspace, "rounding_error", lambda weight: 1.0)
    with pytest.raises(UnusableObservation, match="no token stands out of the rounding"):
        attack.run(view)


def test_declared_noise_that_hides_every_word_is_a_known_zero() -> None:
    model = with_lora(ready(llama()), 8, ["q_proj", "v_proj"])
    attack, anatomy = prepared(model)
    backward(model, texts(2, 7))
    (clean,) = observed(attack, anatomy).gradients
    noisy = {r: torch.randn_like(g) for r, g in clean.tensors.items()}
    hidden = GradientSnapshot(0, Stage.SHARED, noisy, noise_std=1.0)
    assert not len(attack.run(Observation((hidden,))).types)


def test_rows_of_b_that_name_no_word_are_no_result_while_a_waits() -> None:
    """Real text has a few large directions: there is a gap, and all below it counts as noise."""
    model = fresh_lora(16)
    attack, anatomy = prepared(model)
    backward(model, texts(8, 16))
    for name, parameter in model.named_parameters():
        if "lora_B" in name and parameter.grad is not None:
            u, sizes, v = torch.linalg.svd(parameter.grad, full_matrices=False)
            sizes[2:] *= 0.1
            parameter.grad = (u * sizes) @ v
    with pytest.raises(NotYet):
        attack.run(observed(attack, anatomy))


@pytest.mark.parametrize("targets", [["v_proj"], ["q_proj", "v_proj"]])
def test_a_few_types_show_in_b_alone(targets: list[str]) -> None:
    """LoRA-FA trains B only; r directions tell fewer than r types apart."""
    model = fresh_lora(24, targets)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_B" in name)
    check_exact(model, texts(1, 9))
    with pytest.raises(UnusableObservation, match="too many types"):
        guess_of(model, texts(8, 9))


@pytest.mark.parametrize("left", [True, False])
@pytest.mark.parametrize("family", [llama, gpt2])
def test_padding_on_either_side(family, left: bool) -> None:
    ids, mask = texts(4, 8), torch.ones(4, 8, dtype=torch.long)
    for row in range(4):
        place = slice(0, row) if left else slice(8 - row, 8)
        mask[row, place] = 0
        ids[row, place] = 0
    labels = ids.masked_fill(mask == 0, -100)
    model = ready(family())
    guess = guess_of(model, ids, attention_mask=mask, labels=labels)
    ends = ids.clone()
    for row in range(4):
        ends[row, int(mask[row].nonzero().max())] = 0
    assert set(guess.types.tolist()) - {0} == set(ends[mask == 1].tolist()) - {0}


def test_prompts_without_labels_are_read() -> None:
    ids = texts(3, 10)
    labels = ids.clone()
    labels[:, :6] = -100
    check_exact(ready(llama()), ids, labels=labels)


def test_tokens_that_nearly_equal_those_named() -> None:
    model = ready(llama())
    with torch.no_grad():
        weight = model.get_input_embeddings().weight
        weight[6] = weight[200] + 1e-4 * weight[200].abs().mean() * torch.randn(weight.shape[1])
        weight[8] = weight[200] + 1e-1 * weight[200].abs().mean() * torch.randn(weight.shape[1])
        weight[9] = weight[200]
    attack, _ = prepared(model)
    norm = model.model.layers[0].input_layernorm
    inputs = norm(model.get_input_embeddings().weight).detach().double()
    apart = (inputs - inputs[200]).norm(dim=1) / inputs[200].norm()
    expected = ((apart > 0) & (apart < 1e-3)).nonzero()[:, 0]
    assert expected.tolist() == [6]
    assert attack.similar_tokens(torch.tensor([200, 5]), 1e-3).tolist() == [6]
    assert attack.similar_tokens(torch.tensor([6, 200]), 1e-3).tolist() == [9]


def test_half_precision_gradients_are_ranked_and_not_certified() -> None:
    model = with_lora(ready(llama()), 8, ["q_proj", "v_proj"])
    attack, anatomy = prepared(model)
    ids = texts(2, 7)
    backward(model, ids)
    truth = exposed_types(ids, causal=True)
    for dtype in (torch.bfloat16, torch.float16):
        guess = attack.run(observed(attack, anatomy, lambda g, dtype=dtype: g.to(dtype)))
        assert len(set(guess.types.tolist()) & truth) >= 0.8 * len(truth)
        assert not guess.certified


def test_a_client_under_autocast_is_followed() -> None:
    model = with_lora(ready(llama()), 8, ["q_proj", "v_proj"])
    attack = SubspaceWords(capacity_seconds=0)
    attack.meet(RunFacts(autocast=torch.bfloat16))
    _, anatomy = prepared(model, attack)
    ids = texts(2, 7)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    guess = attack.run(observed(attack, anatomy))
    truth = exposed_types(ids, causal=True)
    assert len(set(guess.types.tolist()) & truth) >= 0.8 * len(truth)
    assert not guess.certified


@pytest.mark.parametrize("family", [gpt2, bert])
def test_dropout_of_the_embeddings_is_known(family) -> None:
    model = ready(family())
    attack, anatomy = prepared(model)
    (known,) = (r.known_input for r in attack._readable if r.known_input.width == 64)
    names = {m: n for n, m in model.named_modules()}
    assert all("embeddings" in names[m] or names[m].endswith(".drop") for m in known.dropouts)
    assert known.dropouts
    ids = texts(2, 7)
    backward(model, ids)
    assert attack.run(observed(attack, anatomy)).certified
    model.train()
    backward(model, ids)
    assert not attack.run(observed(attack, anatomy)).certified


@pytest.mark.parametrize("silent", ["decoder", "v_proj"])
def test_a_side_or_values_that_are_silent_certify_nothing(silent: str) -> None:
    both = silent == "decoder"
    model = ready(t5()) if both else with_lora(ready(llama()), 16, ["q_proj", "v_proj"])
    attack, anatomy = prepared(model)
    backward(model, texts(2, 8), **({"labels": texts(2, 7)} if both else {}))
    view = observed(attack, anatomy).gradients[0]
    silent = {r: g * (silent not in r) for r, g in view.tensors.items()}
    guess = attack.run(Observation((GradientSnapshot(0, Stage.SHARED, silent),)))
    assert len(guess.types) > 5
    assert not guess.certified


QUERIES_AND_KEYS = {
    "llama": (["q_proj"], ["k_proj"], ["q_proj", "k_proj"]),
    "opt": (["q_proj"], ["k_proj"], ["q_proj", "k_proj"]),
    "bert": (["query"], ["key"], ["query", "key"]),
}
VALUES = {"llama": "v_proj", "opt": "v_proj", "bert": "value"}


def of_a_text_and_a_lone_token(family, targets, *, lora) -> tuple[WordGuess, set[int]]:
    """What is said of a text and of one with a single token that counts, and what was there."""
    model = ready(FAMILIES[family]())
    if lora:
        model = with_lora(model, 16, targets)
    else:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(any(target in name for target in targets))
    ids = torch.tensor([[30, 31, 32, 33, 34, 35, 36], [40, 41, 0, 0, 0, 0, 0]])
    mask = torch.ones_like(ids)
    mask[1, 2 if is_causal(model) else 1 :] = 0
    labels = ids.masked_fill(mask == 0, -100)
    truth = {*range(30, 36 if is_causal(model) else 37), 40}
    return guess_of(model, ids, attention_mask=mask, labels=labels), truth


@pytest.mark.parametrize(
    ("family", "targets", "lora"),
    [
        *((f, t, True) for f, kinds in QUERIES_AND_KEYS.items() for t in kinds),
        *((f, kinds[-1], False) for f, kinds in QUERIES_AND_KEYS.items()),
    ],
)
def test_queries_and_keys_alone_are_no_certificate(family, targets, lora) -> None:
    """A softmax over one key has no gradient, so that they miss words without a trace."""
    guess, truth = of_a_text_and_a_lone_token(family, targets, lora=lora)
    first = {30} if family != "bert" and len(targets) == 1 and targets[0] == "q_proj" else set()
    assert set(guess.types.tolist()) == truth - {40} - first
    assert not guess.certified


@pytest.mark.parametrize(
    ("family", "beside"),
    [*((name, []) for name in QUERIES_AND_KEYS), ("opt", ["q_proj"]), ("bert", ["k_proj"])],
)
def test_values_show_every_token(family: str, beside: list[str]) -> None:
    named = {"q_proj": "query", "k_proj": "key"} if family == "bert" else {}
    targets = [VALUES[family], *(named.get(b, b) for b in beside)]
    guess, truth = of_a_text_and_a_lone_token(family, targets, lora=True)
    assert set(guess.types.tolist()) == truth
    assert guess.certified


@pytest.mark.parametrize("side", ["encoder", "decoder"])
def test_a_side_that_is_not_trained_is_no_certificate_either(side: str) -> None:
    model = ready(t5())
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(f"{side}." in name)
    guess = guess_of(model, texts(2, 8), labels=texts(2, 7))
    assert len(guess.types) > 5
    assert not guess.certified


def test_more_types_than_rows_of_a_lora_tell_apart_are_not_counted() -> None:
    model = with_lora(ready(llama()), 8, ["q_proj", "v_proj"])
    attack, anatomy = prepared(model)
    torch.manual_seed(0)
    ids = texts(8, 14)
    backward(model, ids)
    view = observed(attack, anatomy)
    guess, metric = attack.run(view), WordRecovery(anatomy.vocab_size)
    assert len(guess.types)
    assert math.isnan(guess.n_types)
    metric.update(guess, ids[:, :-1].flatten())
    assert math.isnan(metric.values()["type_count_error"])
    few = WordGuess(types=guess.types[:2], n_types=2.0)  # of another batch, which counts alone
    metric.update(few, guess.types[:4])
    assert metric.values()["type_count_error"] == 0.5


@pytest.mark.parametrize(
    ("facts", "word"),
    [
        (
            RunFacts(optimizer="AdamW", local_steps=2),
            "rounds of AdamW are no .*, or use local_steps=1",
        ),
        (
            RunFacts(optimizer="RMSprop", local_steps=1),
            "rounds of RMSprop are no .*: omit local_steps$",
        ),
        (RunFacts(optimizer="Sophia", local_steps=1), "Sophia makes of gradients is not known"),
    ],
)
def test_an_update_that_is_no_sum_of_gradients_is_unknown(facts: RunFacts, word: str) -> None:
    model = ready(llama())
    attack, anatomy = prepared(model)
    backward(model, texts(2, 6))
    attack.meet(facts)
    tensors = observed(attack, anatomy).gradients[0].tensors
    update = UpdateSnapshot(0, Stage.SHARED, tensors, learning_rate=0.1, fresh=False)
    with pytest.raises(UnusableObservation, match=word):
        attack.run(Observation((update,)))


def step_of(kind: type, model, attack, anatomy, *batches: Tensor, **made) -> Observation:
    """The update of a step on each of these texts with a fresh optimizer."""
    settings, steps = {"lr": 1e-3, "weight_decay": 0.01} | made, len(batches)
    facts = {"optimizer": kind.__name__, "optimizer_settings": settings, "local_steps": steps}
    attack.meet(RunFacts(**facts))
    attack.refresh(anatomy, 0)
    roles = attack.needs(anatomy).gradients
    before = {r: anatomy.parameter(r).detach().clone() for r in roles}
    optimizer = kind([p for p in model.parameters() if p.requires_grad], **settings)
    for ids in batches:
        backward(model, ids)
        optimizer.step()
    rate = settings["lr"]
    tensors = {r: (before[r] - anatomy.parameter(r).detach()) / rate for r in roles}
    update = UpdateSnapshot(0, Stage.SHARED, tensors, local_steps=steps, learning_rate=rate)
    return Observation((update,))


@pytest.mark.parametrize(
    ("kind", "lora"),
    [(torch.optim.AdamW, True), (torch.optim.Adam, True), (torch.optim.Adam, False)],
)
def test_one_step_of_adam_hides_nothing(kind: type, lora: bool) -> None:
    model = ready(llama())
    model = with_lora(model, 8, ["q_proj", "v_proj"]) if lora else model
    attack, anatomy = prepared(model)
    ids = texts(2, 10)
    # Gradients of a model this small are a hundred times a real one's, and so is eps.
    answer = attack.run(step_of(kind, model, attack, anatomy, ids, eps=1e-6))
    truth = set(ids[:, :-1].flatten().tolist())
    right = len(truth & set(answer.types.tolist()))
    assert 2 * right / (len(truth) + len(answer.types)) > 0.95
    assert not answer.certified


@pytest.mark.parametrize(
    ("kind", "decay"), [(torch.optim.Adam, 0.01), (torch.optim.AdamW, 0.01), (torch.optim.SGD, 0.0)]
)
def test_the_first_round_of_lora_is_unknown_and_never_nothing(kind: type, decay: float) -> None:
    """Decay alone moves A then."""
    model = fresh_lora()
    attack, anatomy = prepared(model)
    view = step_of(kind, model, attack, anatomy, texts(4, 6), weight_decay=decay)
    with pytest.raises(UnusableObservation, match="no gradient until B"):
        attack.run(view)


def test_rounding_of_half_precision_leaves_signs_alone() -> None:
    model = ready(llama())
    attack, anatomy = prepared(model)
    (snapshot,) = step_of(torch.optim.AdamW, model, attack, anatomy, texts(2, 10)).gradients
    attack._before = {n: t.bfloat16() for n, t in attack._before.items()}
    with pytest.raises(UnusableObservation, match="hides all but signs"):
        attack.run(Observation((snapshot,)))


@pytest.mark.parametrize("setting", ["common", "of the backend"])
def test_products_in_tf32_leave_11_bits(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the setting of torch 2.9 is used, after which the older one raises an error."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    products = torch.backends.cuda.matmul
    single = torch.finfo(torch.float32).eps
    assert explanation._rounding([torch.float32], None) == single
    with full_precision():  # puts the settings back
        if setting == "common":
            torch.set_float32_matmul_precision("high")
        elif hasattr(products, "fp32_precision"):
            products.fp32_precision = "tf32"
        else:
            pytest.skip("torch before 2.9")
        assert explanation._rounding([torch.float32], None) == 2.0**-11
        assert explanation._rounding([torch.bfloat16], None) > 2.0**-11
        assert fc._dtype_precision(torch.float32, torch.device("cuda")) == "tf32"
    assert explanation._rounding([torch.float32], None) == single


def test_rounds_of_sgd_with_momentum_and_decay_add_up() -> None:
    """The embeddings are frozen: the words of all local steps lie in the update."""
    model = with_lora(ready(llama()), 8, ["q_proj", "v_proj"])
    attack, anatomy = prepared(model)
    made = {"lr": 0.5, "momentum": 0.9, "weight_decay": 0.1}
    batches = [texts(1, 8) for _ in range(3)]
    guess = attack.run(step_of(torch.optim.SGD, model, attack, anatomy, *batches, **made))
    assert set(guess.types.tolist()) == exposed_types(torch.cat(batches), causal=True)
    assert not guess.certified


@pytest.mark.parametrize(("moved", "by"), [("", 0.02), ("input_layernorm", 0.3)])
def test_a_model_and_a_norm_alone_that_move_are_followed(moved: str, by: float) -> None:
    model = with_lora(ready(llama()), 8, ["q_proj", "v_proj"]) if moved else ready(gpt2())
    attack, anatomy = prepared(model)
    ids = texts(2, 7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if moved in name:
                parameter += by * torch.randn_like(parameter)
    backward(model, ids)
    attack.refresh(anatomy, 5)
    guess = attack.run(observed(attack, anatomy))
    assert set(guess.types.tolist()) == exposed_types(ids, causal=True)


def test_a_model_without_such_maps_is_refused() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(50, 16)
            self.inner = nn.GRU(16, 16, batch_first=True)
            self.head = nn.Linear(16, 50)

        def forward(self, input_ids: Tensor) -> Tensor:
            return self.head(self.inner(self.embedding(input_ids))[0])

    with pytest.raises(ValueError, match="remove it"):
        SubspaceWords().needs(find_anatomy(Recurrent()))


@pytest.mark.parametrize(("seconds", "known"), [(10.0, True), (1e-9, False), (0.0, False)])
def test_capacity_is_measured_where_there_is_time(seconds: float, known: bool) -> None:
    model = with_lora(ready(llama()), 6, ["q_proj", "v_proj"])
    capacity = guess_of(model, texts(2, 6), SubspaceWords(capacity_seconds=seconds)).capacity
    assert (capacity is not None) == known
    assert not known or 10 < capacity < 64


def test_a_capacity_of_no_planted_set_is_unknown_and_not_zero(monkeypatch) -> None:
    monkeypatch.setattr(explanation, "measure_capacity", lambda *_, **__: (0, 4, 20.0))
    model = with_lora(ready(llama()), 6, ["q_proj", "v_proj"])
    guess, metric = guess_of(model, texts(2, 6), SubspaceWords()), WordRecovery(VOCABULARY)
    metric.update(guess, torch.arange(4))
    assert guess.capacity is None
    assert math.isnan(metric.values()["capacity"])


def test_public_text_makes_frequent_tokens_likelier() -> None:
    model = with_lora(ready(llama()), 4, ["q_proj", "v_proj"])
    attack, _ = prepared(model, SubspaceWords([[7, 8, 7, 9] * 20], capacity_seconds=0))
    odds = attack._readable[0].log_odds
    assert float(odds[7]) >= float(odds[9]) > float(odds[100])
    assert attack.config()["public_text"] != SubspaceWords().config()["public_text"]


def test_the_mask_of_a_masked_model_is_a_type_too() -> None:
    model = with_lora(ready(bert()), 6, ["query", "value"])
    ids = texts(2, 8)
    labels = torch.full_like(ids, -100)
    labels[:, 2] = ids[:, 2]
    ids[:, 2] = 4
    guess = guess_of(model, ids, labels=labels)
    assert set(guess.types.tolist()) == set(ids.flatten().tolist())


def test_words_behind_an_adapter_at_the_embeddings_are_read() -> None:
    """As UTR has it (arXiv 2601.17533): adapters of half the width with biases, one right there."""
    model = embedding_adapters(llama())
    for name, p in model.named_parameters():
        if ".up." in name:  # after some steps
            nn.init.normal_(p, std=0.02)
    attack, anatomy = prepared(model)
    for seed in range(3):
        torch.manual_seed(seed)
        ids = texts(2, 16)
        backward(model, ids)
        guess = attack.run(observed(attack, anatomy))
        truth, result = set(ids[:, :-1].flatten().tolist()), set(guess.types.tolist())
        assert 2 * len(truth & result) / (len(truth) + len(result)) >= 0.95


# Words from gradients that are no exact combinations of inputs: noise, dropout, small changes.


MAPS = ["q_proj", "v_proj"]


def f1(guess: WordGuess, ids: Tensor) -> float:
    truth = exposed_types(ids, causal=True)
    named = set(guess.types.tolist())
    return 2 * len(named & truth) / (len(named) + len(truth))


def with_noise(attack: SubspaceWords, anatomy: Anatomy, std: float) -> Observation:
    (view,) = observed(attack, anatomy).gradients
    noisy = {r: g + std * torch.randn_like(g) for r, g in view.tensors.items()}
    return Observation((GradientSnapshot(0, Stage.SHARED, noisy, noise_std=std),))


@pytest.mark.parametrize(
    ("family", "targets", "rank", "std"),
    [
        *((llama, MAPS, 24, std) for std in (1e-12, 1e-8, 1e-6, 1e-5)),
        *((gpt2, ["c_attn"], 48, std) for std in (1e-8, 1e-6, 1e-5)),
    ],
)
def test_b_is_read_where_the_gradient_of_a_is_noise(family, targets, rank, std) -> None:
    torch.manual_seed(1)
    config = LoraConfig(r=rank, target_modules=targets)
    model = get_peft_model(ready(family()), config).eval()
    attack, anatomy = prepared(model)
    ids = texts(1, 9)
    backward(model, ids)
    guess = attack.run(with_noise(attack, anatomy, std))
    assert f1(guess, ids) == 1
    assert guess.n_types == pytest.approx(len(guess.types), abs=0.5)
    assert not guess.certified


def test_b_is_followed_while_a_moves_and_adds_to_it() -> None:
    torch.manual_seed(2)
    model = get_peft_model(ready(llama()), LoraConfig(r=24, target_modules=MAPS)).eval()
    attack, anatomy = prepared(model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    for step in range(4):  # B is small, so that the gradient of A is far below the noise
        ids = texts(1, 9)
        attack.refresh(anatomy, step)
        backward(model, ids)
        assert f1(attack.run(with_noise(attack, anatomy, 1e-5)), ids) == 1
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_A" in name:
                    parameter += 0.01 * torch.randn_like(parameter)
        optimizer.step()


@pytest.mark.parametrize(("family", "targets"), [(llama, MAPS), (gpt2, ["c_attn"])])
def test_the_dictionary_of_b_is_the_input_that_the_model_gives_b(family, targets) -> None:
    model = with_lora(ready(family()), 6, targets)
    attack, anatomy = prepared(model)
    every = torch.arange(anatomy.vocab_size)[:, None]
    factors = [r for r in attack._readable if r.factor is not None]
    assert len(factors) == len(targets)
    for readable in factors:
        dictionary = readable.dictionary.through(readable.factor)
        states = linear_maps.input_rows(anatomy, readable.known_input, every)[:, 0]
        torch.testing.assert_close(dictionary.rows, states, rtol=1e-4, atol=1e-6)
        if dictionary.positions is not None:  # the positions' part in the inputs, after the norm
            spans = [dictionary.constants, dictionary.positions]
            text = torch.full((1, 9), 7)
            moved = linear_maps.input_rows(anatomy, readable.known_input, text)[0].double()
            basis = torch.linalg.qr(torch.cat([*spans, moved[:1]])[:, :].T).Q
            assert float((moved - (moved @ basis) @ basis.T).norm()) < 1e-4 * float(moved.norm())


@pytest.mark.parametrize("p", [0.05, 0.1])
def test_dropout_hides_no_words_within_the_rank(p: float) -> None:
    scores = []
    for seed in range(3):
        torch.manual_seed(seed)
        model = with_lora(ready(llama()), 16, MAPS, lora_dropout=p).train()
        attack, anatomy = prepared(model)
        ids = texts(2, 8)
        backward(model, ids)
        guess = attack.run(observed(attack, anatomy))
        assert not guess.certified
        scores.append(f1(guess, ids))
    assert min(scores) >= 0.9
    assert sum(scores) / len(scores) >= 0.95


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "rows centralized": lambda g: g - g.mean(1, keepdim=True),
    "columns centralized": lambda g: g - g.mean(0, keepdim=True),
    "a column masked": lambda g: g * (torch.arange(g.shape[1]) != 3),
    "rounded to half precision": lambda g: (g * 1024).half().float() / 1024,
}


@pytest.mark.parametrize("rank", [0, 8])
@pytest.mark.parametrize("change", CHANGES)
def test_small_changes_hide_no_words(change: str, rank: int) -> None:
    torch.manual_seed(1)
    model = with_lora(ready(llama()), rank, MAPS) if rank else ready(llama())
    attack, anatomy = prepared(model)
    ids = texts(2, 8)
    backward(model, ids)
    guess = attack.run(observed(attack, anatomy, CHANGES[change]))
    assert f1(guess, ids) >= 0.9
    if "columns" not in change:  # whose rows still are combinations of the inputs
        assert not guess.certified


@pytest.mark.parametrize("rank", [0, 8])
def test_rows_of_no_words_name_none(rank: int) -> None:
    torch.manual_seed(3)
    model = with_lora(ready(llama()), rank, MAPS) if rank else ready(llama())
    attack, anatomy = prepared(model)
    backward(model, texts(2, 8))
    named = 0
    for _ in range(5):
        try:
            named += len(attack.run(observed(attack, anatomy, torch.randn_like)).types)
        except UnusableObservation:
            continue
    assert named <= 5


def planted(types: int, rows: int, changed: bool) -> tuple[Atoms, Tensor, Tensor]:
    """Return atoms, types and rows that they span, without one coordinate if ``changed``."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(4000, 64, generator=generator)
    truth = torch.randperm(4000, generator=generator)[:types]
    gradient = torch.randn(rows, types, generator=generator) @ inputs[truth]
    gradient[:, 0] *= not changed
    return Atoms(inputs, torch.zeros(0, 64, dtype=torch.float64)), truth, gradient


@pytest.mark.parametrize("changed", [False, True])
def test_a_change_is_not_certified_as_words(changed: bool) -> None:
    """What a missing coordinate leaves is one direction, which many other atoms fit."""
    atoms, truth, gradient = planted(8, 12, changed)
    shared = SharedRows.stack([gradient], atoms.nuisance, rounding=1e-7, noise=[0.0])
    result = explain(atoms, shared, torch.full((4000,), -3.0))
    assert set(result.types.tolist()) == set(truth.tolist())
    assert result.evident == len(truth)
    assert result.certified is not changed


def test_the_rows_above_a_gap() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(12, 5, generator=generator) @ torch.randn(5, 40, generator=generator)
    none = torch.zeros(0, 40, dtype=torch.float64)

    def stacked(size: float) -> SharedRows:
        noise = size * torch.randn(12, 40, generator=generator)
        return SharedRows.stack([rows + noise], none, rounding=1e-7, noise=[0.0])

    assert stacked(0.0).above_gap() is None
    assert stacked(10.0).above_gap() is None
    above = stacked(1e-3).above_gap()
    assert above is not None
    assert not above.exact
    assert len(above.principal) == 5
    values = torch.linalg.svdvals(rows.double())
    sizes = above.principal.norm(dim=1)
    torch.testing.assert_close(sizes / sizes[0], values[:5] / values[0], rtol=1e-2, atol=1e-4)
    # The unit is the noise: in (12, 40) standard noise, singular values are at most about 9.8.
    assert 0.5 < float(above.singular[5].norm()) / 9.8 < 1.5


# Turning towards a gradient's own hidden states: closed forms, and a model that was moved.


VOCAB, WIDTH, TOKENS = 1500, 24, 120


@pytest.fixture
def away():
    """(gradient, hidden, labels, u): hidden states on both sides of u, all on one of another."""
    g = generator(1)
    u, other = F.normalize(torch.randn(2, WIDTH, generator=g), dim=1)
    hidden = torch.randn(TOKENS, WIDTH, generator=g) + 5 * other - 1.5 * u
    weight = 0.6 * torch.randn(VOCAB, WIDTH, generator=g)
    labels = torch.randint(VOCAB, (TOKENS,), generator=g)
    assert (hidden @ u < 0).float().mean() > 0.8
    return head_gradient(hidden, labels, weight), hidden, labels, u


def test_unused_rows_are_positive_afterwards(away):
    gradient, hidden, labels, u = away
    summary, turned = refit_direction(gradient, RowSummary.read(gradient, u), u)
    assert (hidden @ turned > 0).all()
    torch.testing.assert_close(summary.projection, gradient @ turned)
    unused = torch.ones(VOCAB, dtype=torch.bool)
    unused[labels] = False
    assert (summary.projection[unused] > 0).all()
    assert turned.norm() == pytest.approx(1.0)


def test_noise_that_hides_the_unused_rows_leaves_u_alone(away):
    gradient, _, _, u = away
    noised = gradient + 0.03 * gradient.norm(dim=1).max() * torch.randn(
        gradient.shape, generator=generator(2)
    )
    summary = RowSummary.read(noised, u)
    after, turned = refit_direction(noised, summary, u)
    assert turned is u
    assert after is summary


def test_rows_of_used_types_are_not_turned_to_the_positive_side(away):
    """Small rows of the opposite sign, as label smoothing that was not found leaves them."""
    gradient, hidden, labels, _ = away
    u = F.normalize(F.normalize(hidden, dim=1).mean(0), dim=0)
    unused = ~torch.isin(torch.arange(VOCAB), labels)
    gradient[unused] = -1e-3 * torch.rand(int(unused.sum()), 1, generator=generator(4)) * u
    none = torch.zeros(WIDTH)
    summary = RowSummary(gradient @ u, gradient.norm(dim=1), none)
    assert refit_direction(gradient, summary, u)[1] is u
