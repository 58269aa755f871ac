from __future__ import annotations

from collections import Counter

import pytest

from lightning_fedleak.cli.studies.federation.federation import alike, by_dirichlet, by_speaker


def test_every_text_has_one_client() -> None:
    speakers = [f"s{i % 7}" for i in range(50)]
    for dealt in (alike(50, 4, 0), by_speaker(speakers, 4, 0), by_dirichlet(speakers, 4, 1.0, 0)):
        assert sorted(i for client in dealt for i in client) == list(range(50))
    assert sorted(map(len, alike(50, 4, 0))) == [12, 12, 13, 13]
    assert alike(50, 4, 0) == alike(50, 4, 0) != alike(50, 4, 1)


def test_a_speakers_texts_stay_together_and_clients_have_as_much() -> None:
    speakers = ["much"] * 20 + [f"s{i % 10}" for i in range(40)]
    dealt = by_speaker(speakers, 3, 0)
    owners = [{speakers[i] for i in client} for client in dealt]
    assert sum(map(len, owners)) == 11
    assert [len(client) for client in dealt] == [20, 20, 20]


def test_a_small_alpha_tells_clients_apart() -> None:
    kinds = [f"k{i % 5}" for i in range(2000)]

    def largest_share(alpha: float) -> float:
        dealt = by_dirichlet(kinds, 4, alpha, 3)
        counted = [Counter(kinds[i] for i in client) for client in dealt]
        return max(c[k] / 400 for c in counted for k in c)

    assert largest_share(1e4) == pytest.approx(0.25, abs=0.02)
    assert largest_share(0.1) > 0.8
    sizes = [len(client) for client in by_dirichlet([""] * 2000, 4, 0.3, 1)]
    assert max(sizes) > 2 * min(sizes)
