"""Cells: what is measured, and that a failure costs its own cells alone."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lightning_fedleak.attacks.texts.base import InversionAttack, Sent, TextGuess
from lightning_fedleak.attacks.texts.embedding_descent import EmbeddingDescent
from lightning_fedleak.cli.studies.invert import ActivationCell, make_adversary, run_cells
from lightning_fedleak.cli.studies.invert.adversaries import ADVERSARIES
from lightning_fedleak.cli.studies.invert.cells import Noise, gaussian_noise
from lightning_fedleak.model.anatomy import find_anatomy
from lightning_fedleak.model.model_runs import hidden_states
from tests.helpers.models import VOCAB, tiny_gpt2


class Known(InversionAttack):
    """Says a text that it was told, and remembers what it saw."""

    default_name = "known"

    def __init__(self, layer: int, says: Tensor, fails_at: float | None = None) -> None:
        super().__init__(layer)
        self.says = says
        self.fails_at = fails_at
        self.seen: list[Tensor] = []

    def reconstruct(
        self, hidden: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None
    ) -> TextGuess:
        self.seen.append(hidden)
        if self.fails_at == len(self.seen):
            raise RuntimeError("no luck")
        return TextGuess(self.says[: len(hidden), : hidden.shape[1]], candidates=hidden.shape[1])


def ids(b: int = 4, length: int = 10) -> Tensor:
    return torch.randint(0, VOCAB, (b, length), generator=torch.Generator().manual_seed(1))


def test_rates_utility_and_what_is_sent() -> None:
    anatomy, tokens = find_anatomy(tiny_gpt2()), ids()
    says = tokens.clone()
    says[0, :5] = -1
    attack = Known(1, says)
    done = list(
        run_cells(
            anatomy, {10: tokens}, [("known", lambda _: attack)], [1],
            [Noise(0.0, True, 3), Noise(2.0, True, 3)], texts=2,
        )
    )  # fmt: skip
    assert [(c.attack, c.layer, c.length, c.sigma, c.texts) for c in done] == [
        ("known", 1, 10, 0.0, 2), ("known", 1, 10, 2.0, 2),
    ]  # fmt: skip
    for cell in done:
        assert cell.rates["token_accuracy"].value == 0.75
        assert cell.rates["exact_sentences"].value == 0.5
        assert cell.candidates == 0.5
        assert cell.problem is None
        assert cell.finished
        assert cell.utility is not None
        assert cell.utility.task == "next-token accuracy"
    assert done[0].utility != done[1].utility
    hidden = hidden_states(anatomy, 1, tokens)
    torch.testing.assert_close(attack.seen[0], hidden[:2])
    noise = gaussian_noise(hidden, Noise(2.0, True, 3))
    torch.testing.assert_close(attack.seen[1], (hidden + noise)[:2])


def test_a_failure_costs_its_own_cell_alone() -> None:
    tokens = ids()

    def broken(_: int) -> InversionAttack:
        raise ValueError("not for this model")

    makers: list[tuple[str, Callable[[int], InversionAttack]]] = [
        ("broken", broken), ("sometimes", lambda layer: Known(layer, tokens, fails_at=1)),
    ]  # fmt: skip
    done = list(
        run_cells(
            find_anatomy(tiny_gpt2()), {10: tokens}, makers, [0, 2],
            [Noise(0.0, False), Noise(1.0, False)], texts=4,
        )
    )  # fmt: skip
    assert [(c.attack, bool(c.rates)) for c in done] == [
        ("broken", False), ("broken", False), ("sometimes", False), ("sometimes", True),
    ] * 2  # fmt: skip
    assert done[0].problem == "ValueError: not for this model"
    assert done[2].problem == "RuntimeError: no luck"
    assert all(c.utility is not None for c in done)


def test_an_unknown_utility_does_not_stop_the_attack() -> None:
    one = ids(4, 1)
    cells = run_cells(
        find_anatomy(tiny_gpt2()), {1: one}, [("known", lambda k: Known(k, one))], [1],
        [Noise(0.0, True)], texts=4,
    )  # fmt: skip
    (cell,) = cells
    assert cell.utility is None
    assert "utility: " in (cell.problem or "")
    assert cell.rates["token_accuracy"].value == 1


def test_an_interrupt_leaves_what_was_done() -> None:
    tokens = ids()

    class Interrupted(Known):
        def reconstruct(self, hidden: Tensor, *others: Tensor | None) -> TextGuess:
            if self.seen:
                raise KeyboardInterrupt
            return super().reconstruct(hidden, *others)

    cells = run_cells(
        find_anatomy(tiny_gpt2()), {10: tokens}, [("i", lambda k: Interrupted(k, tokens))],
        [1], [Noise(0.0, True), Noise(1.0, True)], texts=1,
    )  # fmt: skip
    assert next(cells).rates["token_accuracy"].value == 1
    with pytest.raises(KeyboardInterrupt):
        next(cells)


def test_cells_survive_json() -> None:
    tokens = ids()
    (cell,) = run_cells(
        find_anatomy(tiny_gpt2()), {10: tokens}, [("known", lambda k: Known(k, tokens))], [1],
        [Noise(0.5, True)], texts=4,
    )  # fmt: skip
    text = json.dumps(cell.to_dict(), allow_nan=False)
    assert ActivationCell.from_dict(json.loads(text)) == cell
    failed = replace(cell, rates={}, utility=None, seconds=math.nan, problem="x")
    again = ActivationCell.from_dict(json.loads(json.dumps(failed.to_dict(), allow_nan=False)))
    assert math.isnan(again.seconds)
    assert replace(again, seconds=0.0) == replace(failed, seconds=0.0)


@pytest.mark.parametrize("name", ADVERSARIES)
def test_every_adversary_reads_a_text_at_the_embeddings(name: str) -> None:
    anatomy = find_anatomy(tiny_gpt2())
    attack = make_adversary(
        name, 0, steps=60, hello=7, special_ids=(0,), public_text=None, budget_seconds=600.0
    )
    assert attack.name == f"{name}@0"
    attack.prepare(anatomy)
    tokens = ids(2, 6)
    guess = attack.reconstruct(hidden_states(anatomy, 0, tokens), None, None)
    assert float((guess.tokens == tokens).float().mean()) >= 0.5


def test_the_papers_attack_without_hello_starts_at_the_mean() -> None:
    anatomy = find_anatomy(tiny_gpt2())
    attack = make_adversary("paper", 1, hello=None)
    assert isinstance(attack, EmbeddingDescent)
    attack.prepare(anatomy)
    tokens = ids(2, 6)
    start = attack.start(Sent.from_states(hidden_states(anatomy, 1, tokens)))
    mean = anatomy.embedding.weight.mean(0)
    torch.testing.assert_close(start, mean.expand_as(start))


def test_unknown_adversaries_are_refused() -> None:
    with pytest.raises(ValueError, match="prefix, sweeps"):
        make_adversary("magic", 1)
