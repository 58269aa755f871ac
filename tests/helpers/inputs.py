"""What a defence or a model is given in tests: the context of a run, and texts with padding."""

from typing import Any

import torch
from torch import Tensor, nn

from lightning_fedleak.defenses import DefenseContext
from tests.helpers.models import VOCAB


def context(root: nn.Module | None = None, **fields: Any) -> DefenseContext:
    """Return the context of a client that is alone on the CPU, unless ``fields`` say otherwise."""
    alone = {"client": 0, "clients": 1, "device": torch.device("cpu"), "precision": "32-true"}
    rest = {"step": 0, "entropy": b"e" * 32, "root": nn.Identity() if root is None else root}
    return DefenseContext(**alone | rest | fields)


def padded_text(
    b: int = 4, length: int = 8, side: str = "right", seed: int = 1
) -> tuple[Tensor, Tensor]:
    """Return random token ids (b, length) and their mask; padded rows hold at least 3 tokens."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCAB, (b, length), generator=generator)
    real = torch.arange(length) < torch.randint(3, length + 1, (b, 1), generator=generator)
    mask = real.long() if side == "right" else real.long().flip(1)
    return ids * mask, mask


def padded_batch(seed: int = 1, b: int = 4, length: int = 7) -> dict[str, Tensor]:
    """Return such a text as a batch, whose padding is no label."""
    ids, mask = padded_text(b, length, seed=seed)
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
