"""The gradient of an example alone and in company: what is refused, and that nothing is changed."""

import copy
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import (
    BertTokenizerFast,
    DataCollatorForLanguageModeling,
    LlamaConfig,
    LlamaForCausalLM,
)

from benchmarks.defenses.isolation import (
    HOSTS,
    MODELS,
    UNSOUND,
    Rows,
    collate,
    moved,
    own_loss,
    train,
)
from lightning_fedleak.defenses import DPSGD, ClipSettings, DefenseError, mean_of_sample_means
from lightning_fedleak.defenses.dpsgd import isolation
from lightning_fedleak.trainers import DefendedLoop
from tests.helpers.models import tiny_bert_classifier, tiny_gpt2, tiny_llama

WARNING = "was not measured"


def first_step(
    model: nn.Module,
    loss: Callable[[Any], Tensor],
    rows: Any,
    collate_fn: Any = None,
    precision: str | None = None,
    **settings: Any,
) -> DPSGD:
    """Return the defence after one step of a loop."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    defense = DPSGD(1.0, noise_multiplier=1.0, target_delta=1e-3, **settings)
    loader = DataLoader(rows, len(rows) // 2, collate_fn=collate_fn)
    loop = DefendedLoop(model, optimizer, loader, [defense], steps=1, precision=precision)
    with loop as private:
        private.loss(loss, next(iter(private))).backward()
        optimizer.step()
        optimizer.zero_grad()
    return defense


@pytest.mark.parametrize("host", HOSTS)
def test_padding_on_the_left_is_refused_with_the_line_to_write_under_every_host(host: str) -> None:
    build, loss, collate_left = UNSOUND["padding on the left, Llama"]
    with pytest.raises(DefenseError, match=r'`tokenizer\.padding_side = "right"`'):
        train(host, build(), Rows(5, "longer", True), loss, collate_left)
    released, _ = train(host, build(), Rows(5, "longer", True), loss, collate)
    assert any(gradient.any() for gradient in released)


@pytest.mark.parametrize(
    ("name", "message"),
    {
        "padding on the left, GPT-2": "padding_side",
        "padding on the left, LoRA": "padding_side",
        "rows cut to the shortest": "cuts rows to the shortest",
        "a loss over the batch's labels": "division by all labels",
        "statistics of the batch, detached": "statistics of the batch",
        "dynamic RoPE": "let the collate function cut rows",
    }.items(),
)
def test_what_other_rows_change_is_refused_before_the_first_release(
    name: str, message: str
) -> None:
    """Rows are all of one length, so that no row of the data would show it."""
    build, loss, collate_fn = UNSOUND[name]
    rows = Rows(5, "longer", True)
    rows.rows = [rows.rows[0]] * 6
    with pytest.raises(DefenseError, match=message):
        train("loop", build(), rows, loss, collate_fn)


def test_dynamic_rope_is_taken_if_the_collate_function_cuts() -> None:
    build, loss, _ = UNSOUND["dynamic RoPE"]
    rows = Rows(5, "longer", True)
    train("loop", build(), rows, loss, lambda r: {k: v[:, :24] for k, v in collate(r).items()})


def test_the_measured_gradient_is_that_of_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding on the left moves it by as much as two backward passes of ours say."""
    model, seen = MODELS["Llama"](), list[Any]()

    def loss(batch: Any) -> Tensor:
        seen.append({k: v.clone() for k, v in batch.items()})
        return model(**batch).loss  # type: ignore[no-any-return]

    check = isolation.Isolation.measure
    moved: list[float] = []

    def measure(self: Any, *arguments: Any) -> str:
        try:
            return check(self, *arguments)
        finally:
            moved.append(self.moved)

    collate_left = UNSOUND["padding on the left, Llama"][2]
    reference = copy.deepcopy(model)
    monkeypatch.setattr(isolation.Isolation, "measure", measure)
    with pytest.raises(DefenseError):
        first_step(model, loss, Rows(5, "longer", True), collate_left)

    def gradients(row: dict[str, Tensor]) -> list[Tensor]:
        return list(torch.autograd.grad(reference(**row).loss, [*reference.parameters()]))

    alone, company = seen[:2]
    pairs = zip(gradients(alone), gradients({k: v[1:2] for k, v in company.items()}), strict=True)
    distances = [((a - b).norm(), a.norm()) for a, b in pairs]
    total = torch.stack([size for _, size in distances]).norm()
    expected = max(float(d / max(size, 1e-2 * total)) for d, size in distances)
    assert moved[0] == pytest.approx(expected, rel=1e-3)


def test_rows_are_made_and_hold_nothing_of_the_data() -> None:
    seen: list[Any] = []
    model, rows = tiny_llama(vocab=120).train(), Rows(5, "longer", True)

    def loss(batch: Any) -> Tensor:
        seen.append(batch["input_ids"].clone())
        return own_loss(model, batch)

    first_step(model, loss, rows, collate, seed=5)  # a drawn batch may be empty
    alone, company, *_, first = seen[:8]  # later ones are of the rehearsal of the step
    assert alone.shape == (1, isolation.TOKENS)
    assert torch.equal(company[1, : isolation.TOKENS], alone[0])
    assert [int((row != 0).sum()) for row in company] == [isolation.LONG, isolation.TOKENS, 1, 0]
    drawn = {tuple(row["input_ids"].tolist()) for row in rows.rows}
    assert all(tuple(row[row != 0].tolist()) in drawn for row in first)
    assert not any(tuple(row[row != 0].tolist()) in drawn for row in [*alone, *company])


def weights_after(is_measured: bool, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """Return the weights of a training with dropout and buffers, and torch's state after it."""
    if not is_measured:
        monkeypatch.setattr(isolation.Isolation, "measure", lambda *_: "")
    torch.manual_seed(3)
    model = tiny_gpt2(dropout=0.1, vocab=120).train()
    model.register_buffer("counter", torch.zeros(1))
    first_step(model, lambda batch: model(**batch).loss, Rows(7, "longer", True), collate, seed=5)
    monkeypatch.undo()
    return model.state_dict(), torch.get_rng_state()


def test_training_is_the_same_bit_for_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    (first, state), (second, other_state) = (
        weights_after(measures, monkeypatch) for measures in (True, False)
    )
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert torch.equal(state, other_state)


@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed"])
def test_half_precision_is_compared_in_float32(precision: str) -> None:
    model = MODELS["Llama"]()
    if precision == "bf16-true":
        model = model.to(torch.bfloat16)
    dtypes: list[torch.dtype] = []

    def loss(batch: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed"):
            output = model(**batch)
        dtypes.append(output.logits.dtype)
        return output.loss  # type: ignore[no-any-return]

    mixed = precision if precision == "bf16-mixed" else None
    defense = first_step(
        model, loss, Rows(5, "longer", True), collate, mixed, seed=0
    )  # not an empty batch
    assert dtypes[:9] == [torch.float32] * 7 + [torch.bfloat16] * 2  # then the step's
    assert defense._isolation.moved < 1e-5
    assert {p.dtype for p in model.parameters()} == {
        torch.bfloat16 if precision == "bf16-true" else torch.float32
    }


def test_what_half_precision_moves_is_covered_by_more_noise() -> None:
    number = 40
    model, rows = MODELS["Llama"](), Rows(number - 1, "longer", True)
    _, defense = train("lightning", model, rows, own_loss, collate, "bf16-mixed")
    share = defense._isolation.rounding * number**0.5
    context: Any = SimpleNamespace(clients=1)
    assert 1e-3 < share < 0.4
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DPSGD, "_fit_step", SimpleNamespace(sampling=defense._sampling))
        assert defense._sigma(1.5, context) == pytest.approx(1.5 * (1 + share))
    added = moved("lightning", "Llama", "longer", number - 1, precision="bf16-mixed")
    assert added <= 1 + share
    unlabelled = moved("lightning", "Llama", "no label", number - 1, precision="bf16-mixed")
    assert unlabelled <= share


def test_images_numbers_and_padded_rows_are_measured_too() -> None:
    convolution = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2))
    images = [(torch.rand(3, 8, 8), index % 2) for index in range(8)]
    defense = first_step(
        convolution, lambda b: nn.functional.cross_entropy(convolution(b[0]), b[1]), images
    )
    assert defense._isolation.moved < 1e-5
    model = tiny_bert_classifier(dropout=0.0).train()
    mask = torch.tensor([1, 1, 1, 1, 0, 0])
    rows = [
        {"input_ids": mask * (index + 5), "attention_mask": mask, "labels": index % 2}
        for index in range(8)
    ]
    defense = first_step(model, lambda batch: model(**batch).loss, rows)
    assert defense._isolation.moved < 1e-5


def test_whole_numbers_that_become_floats_keep_their_length() -> None:
    """Lists of labels, several of which are 1, have no width in a batch of floats."""
    model = nn.Sequential(nn.Linear(16, 20))
    rows = [{"x": torch.randn(16), "labels": [n % 2] * 20} for n in range(40)]

    def collated(rows: Any) -> dict[str, Tensor]:
        labels = torch.tensor([row["labels"] for row in rows], dtype=torch.float)
        return {"x": torch.stack([row["x"] for row in rows]), "labels": labels}

    def loss(batch: Any) -> Tensor:
        scores = model(batch["x"])
        return nn.functional.binary_cross_entropy_with_logits(scores, batch["labels"])

    defense = first_step(model, loss, rows, collated)
    assert not defense._isolation.reason


def mix(values: Tensor) -> Tensor:
    return 0.7 * values + 0.3 * values[torch.randperm(len(values))]


@pytest.mark.parametrize("change", [mix, lambda values: values / values.detach().abs().max()])
def test_rows_that_are_mixed_or_scaled_before_the_model_are_refused(change: Any) -> None:
    """No layer's graph shows it, as no gradient reaches the rows."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    rows = [(torch.rand(4), index % 2) for index in range(8)]
    with pytest.raises(DefenseError, match="other rows of a batch change an example's gradient"):
        first_step(model, lambda b: nn.functional.cross_entropy(model(change(b[0])), b[1]), rows)


def without_large(losses: Tensor, ids: Tensor) -> Tensor:
    return losses * (losses.detach() <= losses.detach().median())


def without_repeats(losses: Tensor, ids: Tensor) -> Tensor:
    equal = (ids[:, None] == ids).all(2).tril(-1).any(1)
    return losses * ~equal


def doubled_above_four(losses: Tensor, ids: Tensor) -> Tensor:
    return losses * torch.full((len(ids),), 2.0 if len(ids) > 4 else 1.0)


def without_large_above_forty(losses: Tensor, ids: Tensor) -> Tensor:
    return without_large(losses, ids) if len(ids) > 40 else losses


@pytest.mark.parametrize(
    ("change", "count"),
    [
        (without_large, 8),
        (without_repeats, 8),
        (doubled_above_four, 8),
        (without_large_above_forty, 64),
    ],
)
def test_losses_that_follow_a_batch_of_equal_or_many_rows_are_refused(
    change: Any, count: int
) -> None:
    """They treat four different rows as they treat one, the last also forty."""
    model = nn.Sequential(nn.Embedding(40, 8), nn.Linear(8, 40))

    def loss(ids: Tensor) -> Tensor:
        logits = model(ids)[:, :-1].transpose(1, 2)
        losses = nn.functional.cross_entropy(logits, ids[:, 1:], reduction="none")
        return change(losses.mean(1), ids).mean()

    with pytest.raises(DefenseError, match="other rows of a batch change an example's gradient"):
        first_step(model, loss, [*torch.randint(40, (count, 6))])


def test_weights_of_rows_and_two_numbers_of_an_example_are_measured() -> None:
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 3))
    losses = nn.CrossEntropyLoss(reduction="none")
    rows: Any = [(index, index % 3, 0.5 + index) for index in range(8)]
    defense = first_step(model, lambda b: (losses(model(b[0]), b[1]) * b[2]).mean(), rows)
    assert (defense._isolation.reason, defense._isolation.moved < 1e-5) == ("", True)


def test_a_regression_of_transformers_takes_a_batch_of_one_row() -> None:
    """Its loss then has no dimensions; the row's gradient is that of autograd."""
    model = tiny_bert_classifier(dropout=0.0, labels=1).train()
    rows = [{"input_ids": torch.arange(i, i + 4), "labels": torch.tensor(i / 9)} for i in (3, 5)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    defense = DPSGD(1e3, noise_multiplier=0.0, seed=1)
    loader = DataLoader(rows, 1)
    with DefendedLoop(model, optimizer, loader, [defense], steps=8) as private:
        for batch in private:
            private.loss(lambda drawn: model(**drawn).loss, batch).backward()
            optimizer.step()
            if len(batch["input_ids"]) == 1:
                break
            optimizer.zero_grad()
    released = [p.grad for p in model.parameters()]
    expected = torch.autograd.grad(model(**batch).loss, [*model.parameters()])
    assert len(batch["labels"]) == 1
    assert defense._isolation.moved < 1e-5
    torch.testing.assert_close(released, [*expected], rtol=1e-4, atol=1e-6)


def test_a_norm_over_the_batch_of_numbers_is_refused() -> None:
    class Whitening(nn.Module):
        def forward(self, values: Tensor) -> Tensor:
            return values - values.detach().mean(0)

    model = nn.Sequential(nn.Linear(4, 4), Whitening(), nn.Linear(4, 2))
    rows = [(torch.rand(4), index % 2) for index in range(8)]
    with pytest.raises(DefenseError, match=r"'[02]\.weight' by .* statistics of the batch"):
        first_step(model, lambda b: nn.functional.cross_entropy(model(b[0]), b[1]), rows)


def test_what_cannot_be_measured_is_said() -> None:
    class Text(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(40, 4), nn.Linear(4, 40)

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.embedding(ids))  # type: ignore[no-any-return]

    model = Text()

    def loss(batch: Any) -> Tensor:
        logits = model(batch)
        scale = torch.empty(len(batch), 1, 1).exponential_()  # which is not planted
        return mean_of_sample_means(logits * scale, batch, causal=True)

    with pytest.warns(
        UserWarning, match=f"{WARNING}: training_step draws random numbers other than"
    ):
        defense = first_step(model, loss, [*torch.randint(40, (8, 6))])
    assert "Not measured: that an example's gradient depends" in defense.guarantee
    rows = [{"name": f"{index}", "number": index} for index in range(8)]
    numbers = {row["name"]: torch.full((4,), row["number"]) for row in rows}
    with pytest.warns(UserWarning, match=f"{WARNING}.*KeyError"):
        first_step(
            model,
            lambda ids: mean_of_sample_means(model(ids), ids, causal=True),
            rows,
            lambda chosen: torch.stack([numbers[row["name"]] for row in chosen]),
        )


@pytest.mark.parametrize("side", ["right", "left"])
def test_random_masks_of_a_collate_function_are_planted(side: str) -> None:
    """A row has the same masks alone and in company, unless padding moves them."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(100))]
    tokenizer = BertTokenizerFast(
        vocab={word: i for i, word in enumerate(words)}, padding_side=side
    )
    ids = [[2, *torch.randint(5, 100, (8 + i % 3,)).tolist(), 3] for i in range(8)]
    rows = [{"input_ids": row, "attention_mask": [1] * len(row)} for row in ids]
    model = MODELS["BERT, masked"]()
    mask = DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.15)

    def step() -> DPSGD:
        return first_step(model, lambda batch: model(**batch).loss, rows, mask)

    if side == "left":
        with pytest.raises(DefenseError, match="padding_side"):
            step()
        return
    isolated = step()._isolation
    assert (isolated.reason, isolated.moved < 1e-6) == ("", True)


SCALED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "whole": lambda loss, count: loss / count,
    "Python": lambda loss, count: loss * (12 / count.item()),
}


@pytest.mark.parametrize("name", SCALED)
def test_a_factor_that_counts_the_batch_is_refused(name: str) -> None:
    model = MODELS["Llama"]()

    def loss(batch: Any) -> Tensor:
        return SCALED[name](model(**batch).loss, (batch["labels"] != -100).sum())

    with pytest.raises(DefenseError, match=r"scaled by a (tensor|number that changes)"):
        first_step(model, loss, Rows(5, "longer", True), collate)


CAPPED: dict[str, Callable[[Tensor], Tensor]] = {
    "capped": lambda loss: loss * min(1.0, 50 / loss.item()),
    "another form": lambda loss: loss * 0.1 if loss.item() > 50 else loss,
}


@pytest.mark.parametrize("name", CAPPED)
@pytest.mark.parametrize("batched", [True, False])
def test_a_loss_that_its_own_size_scales_is_refused(name: str, batched: bool) -> None:
    """No batch has so large a loss, neither of the data nor of made rows."""
    model: Any = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    for parameter in model[2].parameters():  # so that scores are near zero, as of a new head
        parameter.data *= 1e-3
    values, labels = torch.rand(8, 4), torch.tensor([0, 0, 0, 1, 2, 1, 0, 2])
    seen: list[float] = []

    def loss(batch: Any) -> Tensor:
        value = nn.functional.cross_entropy(model(batch[0]), batch[1])
        seen.append(value.item())
        return CAPPED[name](value) if batched else value

    rows = [*zip(values, labels.tolist(), strict=True)]
    if not batched:
        assert first_step(model, loss, rows)._isolation.moved < 1e-5
        return
    with pytest.raises(DefenseError, match=r"number that changes|the size of a batch's loss"):
        first_step(model, loss, rows)
    assert max(seen[:2]) < 5 < 50 < max(seen[2:])


@pytest.mark.parametrize("weigh", [lambda share: float(share), lambda share: share])
def test_a_factor_that_counts_labels_of_the_batch_is_refused(weigh: Any) -> None:
    """The example whose form made rows have has the label zero, and so has every second row."""
    model = nn.Sequential(nn.Linear(4, 2))
    rows = [(torch.rand(4), index % 2) for index in range(8)]

    def loss(batch: Any) -> Tensor:
        share = (batch[1] == 1).double().mean() + 0.1
        return nn.functional.cross_entropy(model(batch[0]), batch[1]) / weigh(share)

    with pytest.raises(DefenseError, match="scaled by a number that changes"):
        first_step(model, loss, rows)


def masked_by(draw: Callable[[torch.Size], Tensor]) -> Callable[[Any], Any]:
    """Return a collate function that hides the tokens that ``draw`` says, also as labels."""

    def masked(rows: Any) -> Any:
        batch = collate(rows, is_causal=False)
        hidden = draw(batch["labels"].shape) & (batch["labels"] != -100)
        return batch | {
            "labels": batch["labels"].masked_fill(~hidden, -100),
            "input_ids": batch["input_ids"].masked_fill(hidden, 3),
        }

    return masked


def fixed_number(shape: torch.Size) -> Tensor:
    """Return masks of four tokens of a whole batch, however many rows it has."""
    order = torch.rand(shape).flatten().argsort()
    return (order.argsort() < 4).view(shape)


def by_row(shape: torch.Size) -> Tensor:
    return torch.stack([torch.rand(shape[1]) < 0.4 for _ in range(shape[0])])


def by_numpy(shape: torch.Size) -> Tensor:
    return torch.from_numpy(np.random.random(shape) < 0.4)


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (by_row, ""),
        (fixed_number, "other rows of a batch change .* Compute each row from that row"),
        (by_numpy, r"at once, by torch\.rand or torch\.bernoulli"),
    ],
)
def test_masks_of_a_collate_function(draw: Any, message: str) -> None:
    model = MODELS["BERT, masked"]()

    def step() -> DPSGD:
        return first_step(
            model, lambda batch: own_loss(model, batch), Rows(7, "longer", True), masked_by(draw)
        )

    if not message:
        isolated = step()._isolation
        assert (isolated.reason, isolated.moved < 1e-6) == ("", True)
        return
    # Masks of one row that NumPy draws are equal by chance in 2 of 100 runs.
    attempts = (step() for _ in range(5 if draw is by_numpy else 1))
    with pytest.raises(DefenseError, match=message):
        list(attempts)


def test_memory_that_runs_out_is_said_and_no_smaller_row_takes_its_place() -> None:
    model = tiny_llama(vocab=120).train()

    def loss(batch: Any) -> Tensor:
        if batch["input_ids"].numel() > 4 * 64:
            raise torch.OutOfMemoryError("out of memory")
        return own_loss(model, batch)

    with pytest.warns(UserWarning, match=rf"{WARNING}: .*out of memory \(rows of .*{128}"):
        defense = first_step(model, loss, Rows(5, "longer", True), collate)
    assert "Not measured: that an example's gradient depends" in defense.guarantee


def test_sound_rows_give_no_warning() -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", f".*{WARNING}.*")
        model = tiny_llama(vocab=120).train()
        defense = first_step(model, lambda b: own_loss(model, b), Rows(5, "packed", True), collate)
    assert 0 <= defense._isolation.moved < 1e-5
    assert "Not measured" not in defense.guarantee


def test_longrope_is_taken_up_to_the_length_at_which_it_changes() -> None:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "long_factor": [4.0] * 4,
        "short_factor": [1.0] * 4,
        "original_max_position_embeddings": 16,
    }
    config = LlamaConfig(
        vocab_size=120,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=64,
        rope_parameters=rope,
    )
    model = LlamaForCausalLM(config).train()
    lengths = [n for n, _ in isolation._row_lengths(model, _Collate(), {"input_ids": [1, 2, 3]})]
    assert max(map(max, lengths)) == 16


class _Collate:
    def __call__(self, rows: list[Any]) -> Any:
        return {"input_ids": torch.tensor([row["input_ids"] for row in rows])}


@pytest.mark.parametrize("trust", ["checked", "trusted"])
@pytest.mark.parametrize(
    "join",
    [
        lambda ids: torch.cat([ids, ids.flip(1)]),
        lambda ids: torch.cat([ids, ids.new_zeros(len(ids), 2)], 1).repeat(3, 1),
    ],
    ids=["changed", "padded"],
)
def test_rows_that_would_be_taken_for_another_examples_are_refused(join: Any, trust: Any) -> None:
    model = tiny_llama(vocab=120).train()

    def loss(batch: Any) -> Tensor:
        ids = join(batch["input_ids"])
        return mean_of_sample_means(model(input_ids=ids).logits, ids, causal=True)

    with pytest.raises(DefenseError, match=r"side by side: torch\.stack"):
        first_step(model, loss, Rows(5, "longer", True), collate, clip=ClipSettings(loss=trust))


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("frozen", [True, False])
def test_examples_that_are_run_one_by_one_are_refused(batched: bool, frozen: bool) -> None:
    words = nn.Embedding(120, 8).requires_grad_(not frozen)
    model = nn.Sequential(words, nn.Tanh(), nn.Linear(8, 97))

    def loss(batch: Any) -> Tensor:
        rows = [ids[None] if batched else ids[:-1] for ids in batch["input_ids"]]
        return torch.stack([model(row).square().mean() for row in rows]).mean()

    with pytest.raises(DefenseError, match=r"DPSGD: (other rows of a batch|in a batch of)"):
        first_step(model, loss, Rows(5, "longer", True), collate)


@pytest.mark.parametrize("example", [(5, 6, 7, 8), ((5, 6, 7, 8), 1), ([5, 6, 7, 8], 1)])
def test_made_rows_of_tuples_of_tokens_have_other_lengths(example: Any) -> None:
    made = isolation._made(example, 1, 9, False)
    assert len(made if isinstance(example[0], int) else made[0]) == 9
