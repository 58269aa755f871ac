"""Which maps read an input that is known, and what every token looks like there."""

from __future__ import annotations

import pytest
import torch
import transformers
from peft import AdaLoraConfig, IA3Config, LoraConfig, PromptTuningConfig, get_peft_model
from torch import nn

from lightning_fedleak.attacks.row_space.dictionary import (
    NotAdditive,
    build_dictionary,
    factor_rows,
)
from lightning_fedleak.attacks.row_space.linear_maps import (
    find_known_inputs,
    find_linear_maps,
    input_rows,
)
from lightning_fedleak.model.anatomy import find_anatomy
from tests.attacks.row_space.models import FAMILIES, LENGTH, llama, ready, t5, texts

FIRST = {
    "llama": {"q_proj", "k_proj", "v_proj"},
    "gpt2": {"c_attn"},
    "bert": {"query", "key", "value"},
    "roberta": {"query", "key", "value"},
    "opt": {"q_proj", "k_proj", "v_proj"},
    "gemma": {"q_proj", "k_proj", "v_proj"},
    "neox": {"query_key_value"},
    "albert": {"embedding_hidden_mapping_in"},
}


def known_of(model: nn.Module):
    anatomy = find_anatomy(model)
    return anatomy, find_known_inputs(anatomy, find_linear_maps(anatomy))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_first_projections_are_found_in_every_family(family: str) -> None:
    anatomy, result = known_of(ready(FAMILIES[family]()))
    maps = next(k for k in result if k.width == anatomy.hidden_size or family == "albert").maps
    assert {m.name.split(".")[-2] for m in maps} == FIRST[family]
    assert all(".1." not in m.name for m in maps)
    assert {m.axis for m in maps} == ({0} if family == "gpt2" else {1})


@pytest.mark.parametrize("family", FAMILIES)
def test_an_input_is_its_word_once_what_is_beside_is_projected_out(family: str) -> None:
    anatomy, result = known_of(ready(FAMILIES[family]()).double())
    ids = texts(3, 9)
    for known in result:
        dictionary = build_dictionary(anatomy, known)
        rows, beside, _ = dictionary.atoms(9)
        assert known.positional == (len(beside) > 0)
        x = input_rows(anatomy, known, ids)
        word = rows[ids]
        x, word = (y - (y @ beside.T) @ beside for y in (x, word))
        cosine = torch.cosine_similarity(x, word, dim=-1)
        assert float(cosine.abs().min()) > 1 - 1e-9


@pytest.mark.parametrize("family", [*FAMILIES, "t5"])
def test_queries_and_keys_do_not_show_a_token_that_stands_alone(family: str) -> None:
    build = FAMILIES.get(family, t5)
    _, result = known_of(ready(build()))
    for known in result:
        blind = {m.name.split(".")[-2] for m in known.maps if m.name not in known.lone_token_maps}
        assert blind in ({"q_proj", "k_proj"}, {"query", "key"}, {"q", "k"}, set())
        assert bool(blind) == (family not in ("gpt2", "neox", "albert"))
        assert known.lone_token_maps


def test_encoder_and_decoder_are_distinguished() -> None:
    _, result = known_of(t5().eval())
    assert [len(k.maps) for k in result] == [3, 3]
    assert {m.name.split(".")[0] for m in result[0].maps} == {result[0].maps[0].name.split(".")[0]}


def test_adapters_are_found_by_their_factors_and_show_what_their_layers_do() -> None:
    model = get_peft_model(llama(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    _, result = known_of(model.eval())
    wide, *narrow = result
    assert sum(m.factor == "A" for m in wide.maps) == 2
    assert all(m.factor == "B" and k.width == 4 for k in narrow for m in k.maps)
    shown = {m.name for known in result for m in known.maps if m.name in known.lone_token_maps}
    assert shown == {m.name for known in result for m in known.maps if ".v_proj." in m.name}


def test_adalora_regularises_its_factors() -> None:
    config = AdaLoraConfig(init_r=4, target_r=2, total_step=10, target_modules=["q_proj"])
    anatomy, result = known_of(get_peft_model(llama(), config).eval())
    (mine,) = (m for m in result[0].maps if m.factor == "A")
    assert mine.regularised
    rows = factor_rows(anatomy, result[0].maps)[mine.name]
    assert torch.equal(rows, anatomy.parameter(mine.name).detach().double())


@pytest.mark.parametrize(
    "config",
    [
        LoraConfig(r=4, target_modules=["q_proj"], layers_to_transform=[1]),
        IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
        PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
    ],
    ids=["deeper", "ia3", "prompt"],
)
def test_what_reads_nothing_known_trains_nothing_that_is_read(config: object) -> None:
    anatomy, result = known_of(get_peft_model(llama(), config).eval())
    assert result
    assert not any(k.trainable_maps(anatomy) for k in result)


def test_virtual_tokens_are_excluded() -> None:
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    model = llama()
    anatomy, result = known_of(get_peft_model(model, config).eval())
    bare, without = known_of(model)
    ids = texts(2, 5)
    torch.testing.assert_close(
        input_rows(anatomy, result[0], ids), input_rows(bare, without[0], ids)
    )


def test_a_map_that_is_called_again_is_not_read() -> None:
    class Twice(nn.Module):
        """One map for two layers: its gradient holds inputs that are not known."""

        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(50, 16)
            self.inner = nn.Linear(16, 16)
            self.head = nn.Linear(16, 50)

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            x = self.inner(self.embedding(input_ids))
            x = self.inner(x + x.cumsum(1))
            return self.head(x)

    _anatomy, result = known_of(Twice().eval())
    assert result == []


def test_a_matrix_of_two_maps_is_not_read() -> None:
    model = llama()
    first = model.model.layers[0].self_attn
    first.q_proj.weight = model.model.layers[1].self_attn.q_proj.weight
    _, result = known_of(model.eval())
    assert {m.name.split(".")[-2] for m in result[0].maps} == {"k_proj", "v_proj"}


def test_positions_that_multiply_are_refused() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(50, 16)
            self.scale = nn.Parameter(torch.rand(LENGTH, 16) + 0.5)
            self.first = nn.Linear(16, 16)
            self.head = nn.Linear(16, 50)

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            x = self.embedding(input_ids) * self.scale[: input_ids.shape[1]]
            return self.head(self.first(x).cumsum(1))

    anatomy, result = known_of(Scaled().eval())
    anatomy.model.config = transformers.PretrainedConfig(max_position_embeddings=LENGTH)
    with pytest.raises(NotAdditive, match="no sum of a part of the word"):
        build_dictionary(anatomy, result[0])
