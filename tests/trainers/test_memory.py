"""Memory that really runs out in a look: the attack is unknown, and training is as without us."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_fedleak.attacks import BagOfWords
from tests.helpers import loops
from tests.helpers.models import tiny_gpt2

LIMIT = 100 << 20  # bytes that the process may still take


class Greedy(BagOfWords):
    """Takes four times what there is, of torch or of Python."""

    def __init__(self, name: str) -> None:
        super().__init__(name=name)

    def run(self, view: Any, query: Any = None) -> Any:
        if self.name == "torch":
            torch.ones(4 * LIMIT, dtype=torch.uint8)
        else:
            bytearray(4 * LIMIT)
        return super().run(view, query)


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_AS and /proc")
def test_an_attack_without_memory_is_unknown(tmp_path: Path) -> None:
    import resource

    plain = loops.train(None, [], tiny_gpt2(tied=False), n=16).state
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        answer: dict[str, Any] = {}
        try:
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            limit = pages * resource.getpagesize() + LIMIT
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
            attacks = [Greedy("torch"), Greedy("python"), BagOfWords()]
            state = loops.train(tmp_path, attacks, tiny_gpt2(tied=False), n=16).state
            answer["same"] = all(torch.equal(a, b) for a, b in zip(state, plain, strict=True))
            answer["unknown"] = [line["unknown"] for line in loops.lines_of(tmp_path)]
        except BaseException as error:
            answer["raised"] = repr(error)
        os.write(writer, json.dumps(answer).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        answer = json.loads(pipe.read())
    os.waitpid(child, 0)
    assert answer.get("same"), answer
    for torch_, python, known in zip(*[iter(answer["unknown"])] * 3, strict=True):
        assert "RuntimeError at test_memory.py" in torch_
        assert "MemoryError at test_memory.py" in python
        assert known is None
