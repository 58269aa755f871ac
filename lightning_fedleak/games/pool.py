"""The data distribution of a game: distinct sentences of a real corpus, as token ids."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn


class GameError(ValueError):
    """Raised where a game cannot be played; the message names the argument and what to do."""


class SentencePool:
    """Distinct sentences that data sets and targets are drawn from.

    Sentences are cut to ``tokens`` ids; of those that are equal then only one stays (Fig. 2 draws
    a *set*), so two rows of a batch are never the same text.

    Args:
        rows: token ids of one sentence each, in the corpus's order.
        tokens: ids at most in a row; longer rows are cut.
        at_least: ids at least in a row, special ones not counted; shorter rows are dropped.
        pad_id: written after the end of a row.
        special_ids: ids that are no part of the text (start, separator, ...). They are never a
            target: at such a token early layers depend little on the sentence.

    Attributes:
        rows: (n,) of 1-D int64 tensors, all different.
        duplicates: number of rows dropped because an equal one came before.
        short: number of rows dropped because they had fewer than ``at_least`` ids.

    Raises:
        GameError: fewer than 2 distinct rows remain, or ``tokens < at_least``.

    Examples:
        >>> from lightning_fedleak.games import SentencePool
        >>> pool = SentencePool([[5, 6, 7], [5, 6, 7], [8, 9]], tokens=8)
        >>> len(pool), pool.duplicates
        (2, 1)
    """

    def __init__(
        self,
        rows: Sequence[Sequence[int]] | Sequence[Tensor],
        tokens: int = 32,
        *,
        at_least: int = 2,
        pad_id: int = 0,
        special_ids: Collection[int] = (),
    ) -> None:
        if tokens < max(1, at_least):
            raise GameError(f"tokens={tokens} is fewer than the {at_least} that a row must have")
        self.special_ids = frozenset(special_ids)
        distinct: dict[tuple[int, ...], None] = {}
        self.short = self.duplicates = 0
        for row in rows:
            ids = torch.as_tensor(row).reshape(-1)[:tokens].tolist()
            if sum(i not in self.special_ids for i in ids) < at_least:
                self.short += 1
            elif tuple(ids) in distinct:
                self.duplicates += 1
            else:
                distinct[tuple(ids)] = None
        if len(distinct) < 2:
            raise GameError(
                f"the text gives {len(distinct)} distinct sentences of {at_least} to {tokens} "
                f"tokens, and a game needs more ({self.short} were too short, {self.duplicates} "
                "were repeats): give more text"
            )
        self.rows = tuple(torch.tensor(ids) for ids in distinct)
        self.tokens = tokens
        self.pad_id = pad_id

    @classmethod
    def from_texts(
        cls,
        texts: Sequence[str],
        tokenizer: Any,
        tokens: int = 32,
        *,
        at_least: int = 2,
        start_token_id: int | None = None,
    ) -> SentencePool:
        """Return a pool of strings; the tokenizer cuts them, so they keep its special tokens.

        Args:
            texts: one sentence or document each; only the beginning of a long one is used.
            tokenizer: of Hugging Face.
            tokens: as in the class.
            at_least: as in the class.
            start_token_id: written before every text, for a model that expects a start token that
                its tokenizer does not write.
        """
        prefix = [] if start_token_id is None else [start_token_id]
        length = tokens - len(prefix)
        if length < 1:
            raise GameError(f"tokens={tokens} leaves no room for text after the start token")
        ids = tokenizer(list(texts), truncation=True, max_length=length)["input_ids"]
        pad = getattr(tokenizer, "pad_token_id", None)
        return cls(
            [prefix + row for row in ids],
            tokens,
            at_least=at_least,
            pad_id=0 if pad is None else int(pad),
            special_ids={*prefix, *getattr(tokenizer, "all_special_ids", ())},
        )

    def __len__(self) -> int:
        return len(self.rows)

    def words(self, row: Tensor) -> Tensor:
        """Return (k,) indices of a row's ids that are not special."""
        return torch.tensor([i not in self.special_ids for i in row.tolist()]).nonzero()[:, 0]

    def pad(self, indices: Sequence[int], length: int | None = None) -> tuple[Tensor, Tensor]:
        """Return rows as one batch, padded on the right.

        Args:
            indices: rows of the pool.
            length: columns; None for the longest row.

        Returns:
            ids and mask, each (len(indices), L) int64.
        """
        return pad([self.rows[i] for i in indices], self.pad_id, length)


def pad(rows: Sequence[Tensor], pad_id: int, length: int | None = None) -> tuple[Tensor, Tensor]:
    """Return rows as ids and mask, each (n, L), where L is the longest row or ``length``.

    Raises:
        GameError: a row is longer than ``length``.
    """
    ids = nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_value=pad_id)
    padding = 0 if length is None else length - ids.shape[1]
    if padding < 0:
        raise GameError(f"a row of {ids.shape[1]} tokens does not fit into {length}")
    ids = nn.functional.pad(ids, (0, padding), value=pad_id)
    lengths = torch.tensor([len(r) for r in rows])
    return ids, (torch.arange(ids.shape[1]) < lengths[:, None]).to(torch.int64)
