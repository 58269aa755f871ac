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
    """Ids that the tokenizer puts before and behind a text, such as BERT's [CLS] and [SEP]."""
    plain = list(tokenizer(PROBE, add_special_tokens=False)["input_ids"])
    whole = list(tokenizer(PROBE)["input_ids"])
    for start in range(len(whole) - len(plain) + 1):
        if whole[start : start + len(plain)] == plain:
            return whole[:start], whole[start + len(plain) :]
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
    """Texts of exactly ``length`` tokens, the tokenizer's special ones among them.

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
    held: list[int] = []
    for i in order:
        text = texts[i] if not held else " " + texts[i]
        held += tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        if len(held) >= room:
            rows.append(torch.tensor([*front, *held[:room], *end]))
            held = []
        if len(rows) == most:
            break
    if len(rows) < least:
        raise TooLittleText(
            f"{len(texts)} texts make only {len(rows)} of {length} tokens, and {least} are asked "
            "for: give more text, fewer texts or a smaller length"
        )
    return torch.stack(rows)


__all__ = ["TooLittleText", "rows_of_length", "special_ends"]
