"""Texts of one length, as token ids."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

PROBE = "a"


class TooLittleText(ValueError):
    """There is not enough text for the texts that are asked for."""


def special_ends(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """Return the ids that the tokenizer puts before and after a text, such as [CLS] and [SEP]."""
    ids = list(tokenizer(PROBE, add_special_tokens=False)["input_ids"])
    with_special = list(tokenizer(PROBE)["input_ids"])
    for start in range(len(with_special) - len(ids) + 1):
        if with_special[start : start + len(ids)] == ids:
            return with_special[:start], with_special[start + len(ids) :]
    return [], []


def rows_of_length(
    texts: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    most: int,
    *,
    least: int = 1,
    seed: int = 0,
    start_token_id: int | None = None,
) -> Tensor:
    """Return texts of exactly ``length`` tokens, with the tokenizer's special ones.

    Drawn from ``texts`` in random order; one that is too short is joined with the next, one that is
    too long is cut.

    Args:
        texts: the source.
        tokenizer: of the model.
        length: of every row.
        most: rows wanted.
        least: rows that there must be.
        seed: of the order.
        start_token_id: id put before every row where the tokenizer puts none, or None.

    Returns:
        (n, length) token ids, n from ``least`` to ``most``.

    Raises:
        TooLittleText: fewer than ``least`` rows, or no room beside the special tokens.
    """
    front, end = special_ends(tokenizer)
    if start_token_id is not None:
        front = [start_token_id, *front]
    room = length - len(front) - len(end)
    if room < 1:
        raise TooLittleText(
            f"a length of {length} leaves no room beside {len(front) + len(end)} special tokens: "
            "give a larger length"
        )
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(seed)).tolist()
    rows: list[Tensor] = []
    collected: list[int] = []
    for i in order:
        text = texts[i] if not collected else " " + texts[i]
        collected += tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        if len(collected) >= room:
            rows.append(torch.tensor([*front, *collected[:room], *end]))
            collected = []
        if len(rows) == most:
            break
    if len(rows) < least:
        raise TooLittleText(
            f"{len(texts)} texts make only {len(rows)} of {length} tokens, and {least} are asked "
            "for: give more text, fewer texts or a smaller length"
        )
    return torch.stack(rows)
