"""A published name of a pool of texts lets nobody test a guess of the texts or of the members."""

from __future__ import annotations

import hashlib
import importlib.util

import torch

from lightning_fedleak import private_files
from lightning_fedleak.model.taps import Text, pool_digest


def pool(*pins: int) -> list[Text]:
    return [Text(torch.tensor([5, 6, pin]), torch.tensor([5, 6, pin])) for pin in pins]


def test_a_pool_has_one_name_in_any_order_and_another_pool_has_another() -> None:
    members = torch.tensor([True, False, True])
    name = pool_digest(pool(1, 2, 3), members)
    order = torch.tensor([2, 0, 1])
    assert pool_digest([pool(1, 2, 3)[n] for n in order.tolist()], members[order]) == name
    assert pool_digest(pool(1, 2, 4), members) != name
    assert pool_digest(pool(1, 2, 3), ~members) != name


def test_the_name_is_no_hash_that_others_can_compute() -> None:
    """Neither by the formula without a key, nor by this package in another process."""
    texts, members = pool(4711), torch.tensor([True])
    row = hashlib.sha256(texts[0].content + b"\1").digest()
    name = pool_digest(texts, members)
    assert name == private_files.name_content(row)
    for content in (row, texts[0].content):
        assert name != hashlib.sha256(content).hexdigest()[:16]
    spec = importlib.util.find_spec(private_files.__name__)
    assert spec is not None
    assert spec.loader is not None
    again = importlib.util.module_from_spec(spec)  # what a second process has
    spec.loader.exec_module(again)
    assert again.name_content(row) != name
