from __future__ import annotations

from lightning_fedleak.cli.studies.federation import alike


def test_every_text_has_one_client() -> None:
    dealt = alike(50, 4, 0)
    assert sorted(i for client in dealt for i in client) == list(range(50))
    assert sorted(map(len, dealt)) == [12, 12, 13, 13]
    assert alike(50, 4, 0) == alike(50, 4, 0) != alike(50, 4, 1)
