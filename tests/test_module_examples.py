"""The examples in docstrings behind the root: settings of attacks, fine-tuning."""

from __future__ import annotations

import doctest
import importlib

import pytest

MODULES = [
    "attacks.texts.embedding_descent",
    "labs.token_relaxation",
    "evaluation.auditing.private_training",
    "cli.finetuning.data",
    "cli.finetuning.module",
]


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_run(name: str) -> None:
    result = doctest.testmod(importlib.import_module(f"lightning_fedleak.{name}"))
    assert result.attempted > 0
    assert result.failed == 0
