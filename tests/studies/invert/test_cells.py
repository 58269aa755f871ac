"""Rows, cells whose failure costs themselves alone, and utility against plain runs."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import BertTokenizer

from lightning_fedleak.attacks.texts.base import InversionAttack, TextGuess
from lightning_fedleak.cli.commands import invert
from lightning_fedleak.cli.commands.options import INVERT_ATTACKS
from lightning_fedleak.cli.finetuning import SourceError
from lightning_fedleak.model.anatomy import find_anatomy, place_of
from lightning_fedleak.model.model_runs import hidden_states
from tests.helpers.folders import TEXTS, tiny_tokenizer
from tests.helpers.models import VOCAB, tiny_gpt2


class Known(InversionAttack):
    """Returns a given text, and keeps what it observed."""

    default_name = "known"

    def __init__(self, layer: int, guess: Tensor, fails_at: float | None = None) -> None:
        super().__init__(layer)
        self.guess = guess
        self.fails_at = fails_at
        self.observed: list[Tensor] = []

    def reconstruct(
        self, hidden: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None
    ) -> TextGuess:
        self.observed.append(hidden)
        if self.fails_at == len(self.observed):
            raise RuntimeError("no luck")
        return TextGuess(self.guess[: len(hidden), : hidden.shape[1]], candidates=hidden.shape[1])


def ids(b: int = 4, length: int = 10) -> Tensor:
    return torch.randint(0, VOCAB, (b, length), generator=torch.Generator().manual_seed(1))


def test_rates_utility_and_what_is_sent() -> None:
    anatomy, tokens = find_anatomy(tiny_gpt2()), ids()
    guess = tokens.clone()
    guess[0, :5] = -1
    attack = Known(1, guess)
    cells = list(
        invert.run_cells(
            anatomy, {10: tokens}, [("known", lambda _: attack)], [1],
            [invert.Noise(0.0, True, 3), invert.Noise(2.0, True, 3)], texts=2,
        )
    )  # fmt: skip
    assert [(c.attack, c.layer, c.length, c.sigma, c.texts) for c in cells] == [
        ("known", 1, 10, 0.0, 2), ("known", 1, 10, 2.0, 2),
    ]  # fmt: skip
    for cell in cells:
        assert cell.rates["token_accuracy"].value == 0.75
        assert cell.rates["exact_sentences"].value == 0.5
        assert cell.problem is None
        assert cell.finished
        assert cell.utility is not None
    assert cells[0].utility != cells[1].utility
    hidden = hidden_states(anatomy, 1, tokens)
    torch.testing.assert_close(attack.observed[0], hidden[:2])
    noise = invert.gaussian_noise(hidden, invert.Noise(2.0, True, 3))
    torch.testing.assert_close(attack.observed[1], (hidden + noise)[:2])


def test_a_failure_costs_its_own_cell_alone() -> None:
    tokens = ids()

    def broken(_: int) -> InversionAttack:
        raise ValueError("not for this model")

    makers: list[tuple[str, Callable[[int], InversionAttack]]] = [
        ("broken", broken), ("sometimes", lambda layer: Known(layer, tokens, fails_at=1)),
    ]  # fmt: skip
    cells = list(
        invert.run_cells(
            find_anatomy(tiny_gpt2()), {10: tokens}, makers, [0, 2],
            [invert.Noise(0.0, False), invert.Noise(1.0, False)], texts=4,
        )
    )  # fmt: skip
    assert [(c.attack, bool(c.rates)) for c in cells] == [
        ("broken", False), ("broken", False), ("sometimes", False), ("sometimes", True),
    ] * 2  # fmt: skip
    assert cells[0].problem == "ValueError: not for this model"
    assert cells[2].problem == "RuntimeError: no luck"
    assert all(c.utility is not None for c in cells)


def test_an_unknown_utility_does_not_stop_the_attack() -> None:
    one = ids(4, 1)
    cells = invert.run_cells(
        find_anatomy(tiny_gpt2()), {1: one}, [("known", lambda k: Known(k, one))], [1],
        [invert.Noise(0.0, True)], texts=4,
    )  # fmt: skip
    (cell,) = cells
    assert cell.utility is None
    assert "utility: " in (cell.problem or "")
    assert cell.rates["token_accuracy"].value == 1


@pytest.mark.parametrize("name", INVERT_ATTACKS)
def test_every_adversary_reads_a_text_at_the_embeddings(name: str) -> None:
    anatomy = find_anatomy(tiny_gpt2())
    attack = invert.make_adversary(
        name, 0, steps=60, hello=7, special_ids=(0,), public_text=None, budget_seconds=600.0
    )
    assert attack.name == f"{name}@0"
    attack.prepare(anatomy)
    tokens = ids(2, 6)
    guess = attack.reconstruct(hidden_states(anatomy, 0, tokens), None, None)
    assert float((guess.tokens == tokens).float().mean()) >= 0.5


def test_rows_are_texts_cut_or_joined() -> None:
    tokenizer = tiny_tokenizer()
    whole = [tokenizer(t)["input_ids"] for t in TEXTS]
    rows = invert.rows_of_length(TEXTS, tokenizer, 5, 12, seed=1)
    assert rows.shape == (12, 5)
    assert {tuple(r) for r in rows.tolist()} == {tuple(w[:5]) for w in whole}
    long = invert.rows_of_length(TEXTS, tokenizer, 60, 12, seed=1)
    assert 1 < len(long) < 12
    order = torch.randperm(12, generator=torch.Generator().manual_seed(1)).tolist()
    decoded = tokenizer.decode(long[0].tolist())
    assert " ".join(TEXTS[i] for i in order).startswith(decoded)
    with_start = invert.rows_of_length(TEXTS, tokenizer, 5, 12, seed=1, start_token_id=0)
    assert torch.equal(with_start[:, 1:], rows[:, :4])
    assert with_start[:, 0].tolist() == [0] * 12
    assert len(invert.rows_of_length(TEXTS, tokenizer, 5, 3)) == 3
    with pytest.raises(SourceError, match=r"make only \d+ of 60 tokens"):
        invert.rows_of_length(TEXTS, tokenizer, 60, 12, min_rows=12)


def test_special_tokens_stay_at_the_ends(tmp_path: Path) -> None:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b", "c"]
    file = tmp_path / "vocab.txt"
    file.write_text("\n".join(words))
    tokenizer = BertTokenizer(str(file))
    assert invert.special_ends(tokenizer) == ([2], [3])
    rows = invert.rows_of_length(["a b c a b c a b c"], tokenizer, 6, 1)
    assert rows.tolist() == [[2, 5, 6, 7, 5, 3]]
    with pytest.raises(SourceError, match="special tokens"):
        invert.rows_of_length(["a b"], tokenizer, 2, 1)


def ids_of_texts(b: int = 3, length: int = 20) -> Tensor:
    return torch.randint(5, VOCAB, (b, length), generator=torch.Generator().manual_seed(1))


def gpt2_logits(model: torch.nn.Module, tokens: Tensor, layer: int, noise: Tensor) -> Tensor:
    """GPT-2 by hand, the noise put in between two of its blocks."""
    core = model.transformer
    states = core.wte(tokens) + core.wpe(torch.arange(tokens.shape[1]))
    for number, block in enumerate(core.h):
        states = states + noise if number == layer else states
        output = block(states)
        states = output if isinstance(output, Tensor) else output[0]
    states = states + noise if layer == len(core.h) else states
    return model.lm_head(core.ln_f(states))


def test_gaussian_noise_has_the_relative_or_absolute_deviation() -> None:
    scales = torch.tensor([0.0, 1.0, 10.0])
    hidden = torch.randn(40, 500, 3, generator=torch.Generator().manual_seed(0)) * scales + 7
    relative = invert.gaussian_noise(hidden, invert.Noise(0.5, True)).flatten(0, 1)
    torch.testing.assert_close(relative.std(0), 0.5 * scales, rtol=0.03, atol=1e-6)
    absolute = invert.gaussian_noise(hidden, invert.Noise(0.5, False)).flatten(0, 1)
    torch.testing.assert_close(absolute.std(0), torch.full((3,), 0.5), rtol=0.03, atol=0)
    assert not bool(invert.gaussian_noise(hidden, invert.Noise(0.0, True)).any())
    again = invert.gaussian_noise(hidden, invert.Noise(1.0, False)).flatten(0, 1)
    torch.testing.assert_close(again, 2 * absolute)


@pytest.mark.parametrize("layer", [0, 1, 2, 3])
def test_noise_on_states_is_added_at_the_split(layer: int) -> None:
    model = tiny_gpt2(layers=3).double().eval()
    anatomy = find_anatomy(model)
    noise = torch.randn(3, 20, 16, generator=torch.Generator().manual_seed(2)).double()
    with torch.no_grad():
        clean = model(input_ids=ids_of_texts()).logits
        with place_of(anatomy, layer).on_states(noise.add):
            noised = model(input_ids=ids_of_texts()).logits
        expected = gpt2_logits(model, ids_of_texts(), layer, noise)
        torch.testing.assert_close(noised, expected)
        assert float((noised - clean).abs().max()) > 0.1
        assert torch.equal(model(input_ids=ids_of_texts()).logits, clean)


@pytest.mark.parametrize("at_once", [1, 1 << 25])
def test_utility_equals_the_next_token_predictions_of_the_plain_model(at_once, monkeypatch) -> None:
    monkeypatch.setattr("lightning_fedleak.cli.commands.invert.LOGITS_AT_ONCE", at_once)
    model = tiny_gpt2(layers=3).double()
    anatomy = find_anatomy(model)
    model.train()
    tokens, state = ids_of_texts(), torch.random.get_rng_state()
    measured = invert.utility(anatomy, 2, tokens, invert.Noise(0.7, True, 3))
    assert model.training
    assert torch.equal(torch.random.get_rng_state(), state)
    model.eval()
    noise = invert.gaussian_noise(hidden_states(anatomy, 2, tokens), invert.Noise(0.7, True, 3))
    correct, nats = [], []
    with torch.no_grad():
        logits = gpt2_logits(model, tokens, 2, noise)
    for row in range(len(tokens)):
        for position in range(tokens.shape[1] - 1):
            probabilities = logits[row, position].softmax(0)
            correct.append(float(probabilities.argmax() == tokens[row, position + 1]))
            nats.append(-math.log(float(probabilities[tokens[row, position + 1]])))
    assert measured.accuracy == pytest.approx(sum(correct) / len(correct))
    assert measured.perplexity == pytest.approx(math.exp(sum(nats) / len(nats)), rel=1e-5)
    clean = invert.utility(anatomy, 2, tokens, invert.Noise(0.0, True))
    assert clean.perplexity != measured.perplexity
