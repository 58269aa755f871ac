"""What the two-process test runs: models and splits, alike on both sides; and the server's side.

Started by test_two_processes.py: ``python -m tests.split_learning.cases DIR``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from split import PeerError, SplitModel, SplitServer, connect, split_model
from torch import nn

from tests.helpers.models import tiny_bert_classifier, tiny_gpt2, tiny_llama

TIMEOUT = 600.0
SGD = partial(torch.optim.SGD, lr=0.02)


@dataclass(frozen=True)
class Case:
    build: Callable[[], nn.Module]
    layer: int
    head: Literal["server", "client"]
    dtype: torch.dtype = torch.float32
    untie: bool = False

    def model(self) -> nn.Module:
        model = self.build().to(self.dtype)
        with torch.no_grad():  # at their initial size every text is continued by one token
            for parameter in model.parameters():
                parameter.mul_(4.0 if parameter.dim() > 1 else 1.0)
        return model

    def split(self, model: nn.Module | None = None) -> SplitModel:
        model = self.model() if model is None else model
        return split_model(model, self.layer, head=self.head, untie=self.untie)


gpt2 = partial(tiny_gpt2, dropout=0.0, layers=3)
llama = partial(tiny_llama, layers=3)
CASES = {
    "gpt2": Case(partial(gpt2, tied=False), 1, "server"),
    "gpt2 tied, U": Case(gpt2, 2, "client"),
    "llama": Case(llama, 2, "server"),
    "llama, U": Case(llama, 1, "client"),
    "llama, embeddings only": Case(llama, 0, "server"),
    "llama, head only": Case(llama, 3, "server"),
    "llama bf16": Case(llama, 1, "server", torch.bfloat16),
    "gpt2 bf16, U": Case(gpt2, 0, "client", torch.bfloat16),
    "bert": Case(partial(tiny_bert_classifier, dropout=0.0), 1, "server"),
    "bert, U": Case(partial(tiny_bert_classifier, dropout=0.0), 1, "client"),
}


def main(folder: Path) -> None:
    for name, case in CASES.items():
        channel = connect(f"file://{folder / name.replace(' ', '_')}", "server", timeout=TIMEOUT)
        split = case.split()
        server = SplitServer(split, channel, optimizer=SGD, keep=3)
        server.serve()
        torch.save(
            {
                "weights": [p.detach() for p in split.top.parameters()],
                "gradients": [p.grad for p in split.top.parameters()],
                "received": list(server.received),
                "returned": list(server.returned),
                "steps": server.steps,
            },
            folder / f"{name}.pt",
        )
    split = CASES["llama"].split()
    channel = connect(f"file://{folder / 'leaves'}", "server", timeout=TIMEOUT)
    try:
        SplitServer(split, channel, keep=1).serve()
    except PeerError as error:
        (folder / "leaves.txt").write_text(str(error))
    channel = connect(f"file://{folder / 'dies'}", "server", timeout=TIMEOUT)
    split.top.model.register_forward_pre_hook(lambda *_: os._exit(3))
    SplitServer(split, channel).serve()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
