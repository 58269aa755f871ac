"""A logical batch in pieces, without Lightning: rows, releases, canaries, looks, memory."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import BatchEncoding

from lightning_fedleak.defenses import DPSGD, CanaryGradient, DefenseError
from lightning_fedleak.defenses.dpsgd.logical import _combine, pieces_of
from lightning_fedleak.defenses.dpsgd.recorder import count_samples
from lightning_fedleak.defenses.processes import Team
from tests.defenses.dpsgd.test_dpsgd import CLIP, Net, Run, clipped, first
from tests.helpers.dpsgd_settings import grouped


class Pieces(Run):
    """Runs every batch as a logical one."""

    def __init__(self, defense: DPSGD, **settings: Any) -> None:
        super().__init__(defense, **settings)
        self.sizes: list[int] = []

    def piece(self, batch: Any) -> Tensor:
        def training_step() -> Tensor:
            # Neither in the rehearsal of the step, nor in that of its isolation.
            if torch.is_grad_enabled() and not self.defense._isolation.is_running:
                self.sizes.append(count_samples(batch))
            return self.loss(batch)

        return self.defense.on_training_step(training_step, batch, self.context)

    def backward(self, batch: Any) -> Tensor:
        loss = self.defense.on_logical_batch(self.piece, batch, self.context)
        self.root.zero_grad()
        loss.backward()
        return loss


def quiet(most: int | None = 5, **settings: Any) -> DPSGD:
    settings = {"noise_multiplier": 0.0, "max_physical_batch_size": most, **settings}
    return DPSGD(CLIP, **grouped(**settings))


class Fields(NamedTuple):
    ids: Tensor
    names: list[str]


def test_rows_of_a_batch_are_those_of_everything_that_has_one_for_each_sample() -> None:
    ids = torch.arange(14).view(7, 2)
    batch = {
        "encoded": BatchEncoding({"input_ids": ids}),
        "fields": Fields(ids + 1, [*"abcdefg"]),
        "pair": (ids, [ids]),
        "array": np.arange(7),
        "scale": torch.tensor(2.0),
        "task": "sst2xyz",
        "classes": ["no", "yes"],
    }
    pieces = pieces_of(batch, 7, 3, Team())
    assert [piece.rows for piece in pieces] == [3, 3, 1]
    second = pieces[1].batch
    assert type(second["encoded"]) is BatchEncoding
    assert torch.equal(second["encoded"]["input_ids"], ids[3:6])
    assert type(second["fields"]) is Fields
    assert torch.equal(second["fields"].ids, ids[3:6] + 1)
    assert second["fields"].names == ["d", "e", "f"]
    assert torch.equal(second["pair"][1][0], ids[3:6])
    assert second["array"].tolist() == [3, 4, 5]
    assert float(second["scale"]) == 2.0
    assert second["task"] == "sst2xyz"
    assert second["classes"] == ["no", "yes"]
    assert [piece.batch is batch for piece in pieces_of(batch, 7, 7, Team())] == [True]
    assert [piece.rows for piece in pieces_of(batch, 0, 3, Team())] == [0]


@pytest.mark.parametrize("samples", [0, 2])
def test_spare_pieces_are_objects_of_their_own(samples: int) -> None:
    batch = {"ids": torch.arange(max(1, samples)), "labels": [torch.ones(max(1, samples))]}
    team = Team()
    team.largest = lambda values: [4.0 for _ in values]  # its peers need 4 pieces
    pieces = pieces_of(batch, samples, 1, team)
    assert [piece.rows for piece in pieces] == [1] * samples + [0] * (4 - samples)
    for piece in pieces:
        assert piece.batch.pop("labels")[0].shape == piece.batch["ids"].shape == (1,)
    assert "labels" in batch


def test_what_training_step_gives_is_put_together_by_rows() -> None:
    given = [
        {"loss": torch.tensor(1.0), "rows": torch.ones(3, 2), "odd": torch.ones(2), "n": 3},
        {"loss": torch.tensor(5.0), "rows": torch.zeros(1, 2), "odd": torch.zeros(2), "n": 1},
    ]
    result = _combine(None, given[0], 0, 3, 4)
    result = _combine(result, given[1], 3, 1, 4)
    assert float(result["loss"]) == 2.0
    assert result["rows"].tolist() == [[1.0, 1.0]] * 3 + [[0.0, 0.0]]
    assert result["odd"].tolist() == [0.0, 0.0]
    assert result["n"] == 1


@pytest.mark.parametrize("form", ["auto", "per_sample", "ghost"])
def test_a_release_in_pieces_is_the_clipped_sum(form: Any) -> None:
    run, batch = Pieces(quiet(5, form=form)), first(12)
    expected = clipped(run.one_by_one(batch).double()).sum(0) / 8
    run.backward(batch)
    result = run.release().double()
    assert float((result - expected).norm() / expected.norm()) < 1e-6
    assert (len(run.sizes), run.defense.releases) == (3, 1)


def test_many_pieces_in_half_precision_add_up() -> None:
    """In bfloat16 what comes after the 256th piece would be lost in the local gradient."""

    class Half(Pieces):
        def loss(self, batch: Any) -> Tensor:
            return F.cross_entropy(self.root(batch[0]).float(), batch[1])

    n = 300
    batch = [torch.ones(n, 6).bfloat16(), torch.zeros(n, dtype=torch.long)]
    run = Half(quiet(1), root=Net().bfloat16(), precision="bf16-true")
    expected = run.one_by_one([value[:1] for value in batch])[0].float()
    run.backward(batch)
    local = run.update().float()
    assert float((local - expected).norm() / expected.norm()) < 0.01
    run.release()
    assert run.defense.releases == 1


def test_a_canary_joins_the_norms_of_all_pieces() -> None:
    batch = first(12)
    generator = torch.Generator().manual_seed(2)
    canary = CanaryGradient(torch.randn(12, 3, 40, generator=generator) * 0.01)
    result = []
    for most in (5, None):
        run = Pieces(quiet(most))
        run.backward(batch)
        result.append(run.defense.on_canary(canary, run.parameters, run.context).samples)
        single = run.one_by_one(batch)
    torch.testing.assert_close(*result, rtol=1e-5, atol=1e-9)
    joint = torch.cat([single, 12 * canary.samples[:, 0]], dim=1)
    expected = clipped(joint)[:, single.shape[1] :] / 8
    torch.testing.assert_close(result[0][:, 0], expected, rtol=1e-4, atol=1e-8)
    with pytest.raises(DefenseError, match="canary has 5 samples, and the batch 12"):
        run.defense.on_canary(CanaryGradient(torch.ones(5, 1, 2)), run.parameters, run.context)


def test_what_the_layers_do_not_explain_is_seen_in_any_piece() -> None:
    class Beside(Pieces):
        def loss(self, batch: Any) -> Tensor:
            hidden = self.root(batch[0])
            if self.sizes and len(self.sizes) == 2:
                hidden = hidden + torch.tanh(batch[0]) @ self.root.below.weight.T[:, :3]
            return F.cross_entropy(hidden, batch[1])

    run = Beside(quiet(4, loss="trusted"))
    with pytest.raises(DefenseError, match="not the sum of its recorded per-sample gradients"):
        run.step(first(12))
    assert run.defense.releases == 0


def test_a_batch_is_drawn_and_released_once_also_in_pieces() -> None:
    run = Pieces(quiet(4, noise_multiplier=1.0))
    batch = first(12)
    run.step(batch)
    with pytest.raises(DefenseError, match="released already"):
        run.step(batch)
    run = Pieces(quiet(4, noise_multiplier=1.0))
    run.backward(first(12))
    with pytest.raises(DefenseError, match="max_physical_batch_size"):
        run.backward(first(12))
