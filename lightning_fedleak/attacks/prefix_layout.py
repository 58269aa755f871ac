"""Where the real tokens of padded texts are: from columns to places in the text, and back."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """Where the real tokens of a padded batch are, packed to the left.

    Attributes:
        counts: (B,) real tokens of each text.
        columns: (B, N) column of each text's i-th real token, N the longest text; beyond a text's
            count it repeats a padded column, or 0 where there is none.
        positions: (B, N) the position id that the model gives each of them.
        mask: (B, L), 0 where padded, or None, as it was sent.
        position_ids: (B, L) or None, as they were sent.
    """

    counts: Tensor
    columns: Tensor
    positions: Tensor
    mask: Tensor | None
    position_ids: Tensor | None

    @classmethod
    def of(cls, shape: tuple[int, int], mask: Tensor | None, position_ids: Tensor | None) -> Layout:
        """Of a batch of ``shape`` (B, L).

        Raises:
            ValueError: mask or positions are of another shape, or a text is empty.
        """
        for name, given in (("attention_mask", mask), ("position_ids", position_ids)):
            if given is not None and tuple(given.shape) != shape:
                raise ValueError(f"{name} is {tuple(given.shape)}, but the batch is {shape}")
        if mask is not None:
            real = mask != 0
        else:
            device = None if position_ids is None else position_ids.device
            real = torch.ones(shape, dtype=torch.bool, device=device)
        counts = real.sum(1)
        if not bool(counts.all()):
            empty = int((counts == 0).nonzero()[0])
            raise ValueError(f"text {empty} is empty: its attention_mask is 0 everywhere")
        columns = (~real).int().argsort(dim=1, stable=True)[:, : int(counts.max())]
        positions = columns
        if position_ids is not None:
            positions = position_ids.to(columns.device).gather(1, columns)
        return cls(counts, columns, positions, mask, position_ids)

    def to(self, device: torch.device) -> Layout:
        """On ``device``."""
        parts = (self.counts, self.columns, self.positions, self.mask, self.position_ids)
        return Layout(*(None if p is None else p.to(device) for p in parts))  # type: ignore[arg-type]

    def __getitem__(self, rows: Tensor) -> Layout:
        """Of the texts ``rows``."""
        parts = (self.counts, self.columns, self.positions, self.mask, self.position_ids)
        return Layout(*(None if p is None else p[rows] for p in parts))  # type: ignore[arg-type]

    def packed_anew(self, values: Tensor) -> Tensor:
        """(B, L, ...) by column to (B, N, ...) by real token."""
        rows = torch.arange(len(values), device=values.device)[:, None]
        return values[rows, self.columns]

    def spread(self, values: Tensor, fill: float) -> Tensor:
        """(B, N) by real token to (B, L) by column, ``fill`` at padded ones."""
        length = self.columns.shape[1] if self.mask is None else self.mask.shape[1]
        out = values.new_full((len(values), length), fill)
        real = torch.arange(values.shape[1], device=values.device) < self.counts[:, None]
        rows = torch.arange(len(values), device=values.device)[:, None].expand_as(real)
        out[rows[real], self.columns[real]] = values[real]
        return out


__all__ = ["Layout"]
