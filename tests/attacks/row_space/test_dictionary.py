"""A dictionary of token inputs follows whatever an input is computed from."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from lightning_fedleak.attacks import SubspaceWords, row_space
from tests.attacks.row_space import models

PROJECTIONS = {"llama": ["q_proj", "v_proj"], "gpt2": ["c_attn"]}


class TrainedRows(nn.Module):
    """A frozen table, and trained rows for some of its tokens."""

    def __init__(self, table: nn.Embedding, tokens: list[int]) -> None:
        super().__init__()
        self.table = table.requires_grad_(False)
        self.embedding_dim, self.num_embeddings = table.embedding_dim, table.num_embeddings
        self.tokens = torch.tensor(tokens)
        self.rows = nn.Parameter(table.weight[self.tokens].clone())

    @property
    def weight(self) -> Tensor:
        return self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        weight = self.table.weight.index_copy(0, self.tokens, self.rows)
        return functional.embedding(ids, weight)


def with_rows(model: nn.Module) -> nn.Module:
    model.set_input_embeddings(TrainedRows(model.get_input_embeddings(), [250, 251]))
    return models.with_lora(model, 12, PROJECTIONS["llama"])


def table(model: nn.Module) -> Tensor:
    return model.get_input_embeddings().weight


def parameter(model: nn.Module, part: str) -> Tensor:
    return next(p for n, p in model.named_parameters() if part in n)


@torch.no_grad()
def write(weight: Tensor, rows: slice = slice(None)) -> None:
    weight[rows] += 0.5 * weight.std() * torch.randn_like(weight[rows])


def scale(model: nn.Module) -> None:
    """Scale inputs by factors that are in a closure, and in no module."""
    layer, factors = model.get_input_embeddings(), torch.linspace(0.5, 2.0, models.WIDTH)
    layer.forward = lambda ids: functional.embedding(ids, layer.weight) * factors


LLAMA: dict[str, Callable[[nn.Module], None]] = {
    "a few rows": lambda m: write(table(m), slice(250, 252)),
    "rows behind the version counter": lambda m: write(table(m).data, slice(250, 252)),
    "most rows": lambda m: write(table(m), slice(40, None)),
    "the norm's gain": lambda m: write(parameter(m, "layers.0.input_layernorm")),
    "a factor that no module holds": scale,
}
GPT2: dict[str, Callable[[nn.Module], None]] = {
    "a few words": lambda m: write(parameter(m, "wte"), slice(250, 252)),
    "later positions alone": lambda m: write(parameter(m, "wpe"), slice(3, None)),
    "the first position": lambda m: write(parameter(m, "wpe"), slice(1)),
    "the norm's bias": lambda m: write(parameter(m, "h.0.ln_1.bias")),
}
CASES = [(models.llama, how, LLAMA[how]) for how in LLAMA] + [
    (models.gpt2, how, GPT2[how]) for how in GPT2
]


def check_follows(model: nn.Module, change: Callable[[nn.Module], None]) -> None:
    attack, anatomy = models.prepared(model)
    change(model)
    attack.refresh(anatomy, 1)
    ids = torch.cat([models.texts(2, 8), torch.tensor([[250, 251, 250, 60, 61, 62, 63, 64]])])
    models.backward(model, ids)
    guess = attack.run(models.observed(attack, anatomy))
    assert set(guess.types.tolist()) == models.exposed_types(ids, causal=True)
    assert guess.certified


@pytest.mark.parametrize(("family", "how", "change"), CASES, ids=[how for _, how, _ in CASES])
def test_whatever_moved_is_followed(family, how, change) -> None:
    model = models.with_lora(models.ready(family()), 12, PROJECTIONS[family.__name__])
    check_follows(model, change)


def test_trained_tokens_of_peft_are_followed() -> None:
    more = {"trainable_token_indices": [250, 251]}
    model = models.with_lora(models.ready(models.llama()), 12, PROJECTIONS["llama"], **more)
    check_follows(model, lambda m: write(parameter(m, "trainable_tokens_delta")))


def test_rows_that_a_module_of_ones_own_trains_are_followed() -> None:
    check_follows(
        with_rows(models.ready(models.llama())), lambda m: write(parameter(m, "embed_tokens.rows"))
    )


def test_an_embedding_that_was_replaced_is_followed() -> None:
    def replace(model: nn.Module) -> None:
        old = model.get_input_embeddings()
        model.set_input_embeddings(nn.Embedding(old.num_embeddings, old.embedding_dim))

    check_follows(models.ready(models.llama()), replace)


@settings(max_examples=8)
@given(
    family=st.sampled_from([models.llama, models.gpt2]),
    tokens=st.sets(st.integers(0, models.VOCABULARY - 1), max_size=60),
    seed=st.integers(0, 9),
)
def test_a_dictionary_that_follows_is_one_that_is_built_again(family, tokens, seed) -> None:
    torch.manual_seed(seed)
    model = models.with_lora(models.ready(family()), 12, PROJECTIONS[family.__name__])
    attack, anatomy = models.prepared(model)
    (readable,) = (r for r in attack._readable if not r.is_factor_b)
    write(parameter(model, "wte" if family is models.gpt2 else "embed_tokens"), sorted(tokens))
    followed, moved = readable.dictionary.refresh(anatomy, readable.known_input)
    again = row_space.build_dictionary(anatomy, readable.known_input)
    torch.testing.assert_close(followed.rows, again.rows, rtol=0, atol=0)
    if again.positions is None:
        assert set(moved.nonzero()[:, 0].tolist()) == tokens
    else:
        torch.testing.assert_close(followed.positions, again.positions)
        assert bool(moved.all()) == bool(tokens)
    ids = models.texts(2, 8)
    models.backward(model, ids)
    attack.refresh(anatomy, 1)
    fresh = SubspaceWords(capacity_seconds=0)
    fresh.prepare(anatomy)
    one, other = (a.run(models.observed(a, anatomy)) for a in (attack, fresh))
    assert one.types.sort().values.equal(other.types.sort().values)
    assert one.certified == other.certified


def test_tokens_without_an_input_are_named_and_nothing_is_certified() -> None:
    model = models.with_lora(models.ready(models.llama(pad_token_id=9)), 12, PROJECTIONS["llama"])
    attack, anatomy = models.prepared(model)
    ids = models.texts(2, 8)
    ids[0, 3] = 9
    models.backward(model, ids)
    guess = attack.run(models.observed(attack, anatomy))
    assert set(guess.types.tolist()) == models.exposed_types(ids, causal=True) - {9}
    assert guess.silent.tolist() == [9]
    assert guess.certified is False
