"""Prefixes of texts, and the bottom model's states of tokens that may follow them.

A causal model's keys and values of a prefix are cached, so that a token costs one token's work.
Candidates for the next token stand side by side as if they were one text: each attends to the
prefix and to itself, and all have the same position, so that the prefix is neither computed
nor copied for each candidate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from lightning_fedleak.attacks.texts.bottom_model import BottomModel
from lightning_fedleak.model.anatomy import without_peft
from lightning_fedleak.model.model_runs import TOKENS_AT_ONCE, takes, virtual_tokens

# Positions that attention kernels process together. States of a text that ends within such a block
# differ by rounding, so that whole texts run up to the end of a block, or of the text.
BLOCK = {"cpu": 16}
BLOCK_OTHERWISE = 128  # of other devices
# Standard deviations of the hidden states by which a trial with and without cache may differ; more
# would accept a cache that changes states. Not tuned.
_AGREE = {torch.float64: 1e-6, torch.float32: 1e-3}
_AGREE_OTHERWISE = 0.1  # of half precision and other dtypes


@dataclass(frozen=True)
class Layout:
    """The places of the real tokens of a padded batch, packed to the left.

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
    def from_masks(
        cls, shape: Sequence[int], mask: Tensor | None, position_ids: Tensor | None
    ) -> Layout:
        """Return the layout of a batch of ``shape`` (B, L)."""
        if mask is not None:
            real = mask != 0
        else:
            device = None if position_ids is None else position_ids.device
            real = torch.ones(shape, dtype=torch.bool, device=device)
        counts = real.sum(1)
        columns = (~real).int().argsort(dim=1, stable=True)[:, : int(counts.max())]
        positions = columns
        if position_ids is not None:
            positions = position_ids.to(columns.device).gather(1, columns)
        return cls(counts, columns, positions, mask, position_ids)

    def to(self, device: torch.device) -> Layout:
        """Return the layout on ``device``."""
        return self._each(lambda part: part.to(device))

    def __getitem__(self, rows: Tensor) -> Layout:
        """Return the layout of the texts ``rows``."""
        return self._each(lambda part: part[rows])

    def _each(self, change: Callable[[Tensor], Tensor]) -> Layout:
        parts = {name: None if part is None else change(part) for name, part in vars(self).items()}
        return replace(self, **parts)  # type: ignore[arg-type]

    def pack(self, values: Tensor) -> Tensor:
        """Return values (B, L, ...) by column as (B, N, ...) by real token."""
        rows = torch.arange(len(values), device=values.device)[:, None]
        return values[rows, self.columns]

    def spread(self, values: Tensor, fill: float) -> Tensor:
        """Return values (B, N) by real token as (B, L) by column, ``fill`` where padded."""
        length = self.columns.shape[1] if self.mask is None else self.mask.shape[1]
        values_by_column = values.new_full((len(values), length), fill)
        real = torch.arange(values.shape[1], device=values.device) < self.counts[:, None]
        rows = torch.arange(len(values), device=values.device)[:, None].expand_as(real)
        values_by_column[rows[real], self.columns[real]] = values[real]
        return values_by_column


class _Slots(Cache):
    """Keys and values by layer, in buffers with spare capacity at their end."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.buffers: dict[int, tuple[Tensor, Tensor]] = {}
        self.used = 0
        self.capacity = 0

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        new = (key_states, value_states)
        end = self.used + key_states.shape[2]
        buffers = self.buffers.get(layer_idx)
        if buffers is None or buffers[0].shape[2] < end:
            buffers = self.buffers[layer_idx] = self._grown(buffers, new, end)
        for buffer, states in zip(buffers, new, strict=True):
            buffer[:, :, self.used : end] = states
        return buffers[0][:, :, :end], buffers[1][:, :, :end]

    def _grown(
        self, old_buffers: tuple[Tensor, Tensor] | None, new: tuple[Tensor, Tensor], end: int
    ) -> tuple[Tensor, Tensor]:
        size = max(end, self.capacity)
        buffers = [n.new_zeros(*n.shape[:2], size, n.shape[3]) for n in new]
        if old_buffers is not None:
            for buffer, old in zip(buffers, old_buffers, strict=True):
                buffer[:, :, : self.used] = old[:, :, : self.used]
        return buffers[0], buffers[1]

    def move(self, rows: Tensor, source: Tensor, target: Tensor) -> None:
        """Copy slots ``source`` to ``target`` in ``rows``, all (k,)."""
        for layer in self.buffers.values():
            for buffer in layer:
                buffer[rows, :, target] = buffer[rows, :, source]

    def select(self, rows: Tensor) -> _Slots:
        """Return a copy for the texts ``rows``."""
        copy = _Slots()
        copy.used, copy.capacity = self.used, self.capacity
        copy.buffers = {i: (k[rows], v[rows]) for i, (k, v) in self.buffers.items()}
        return copy

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.used


class Prefixes:
    """Prefixes of several texts, and the hidden states of tokens that may follow.

    Tokens are counted without padding: token i of a text is its i-th real one. Prefixes may
    differ in length.

    Args:
        bottom: a causal model's bottom.
        layout: of the texts.
        cached: cache keys and values; by default where a trial agrees, see :func:`can_cache`.

    Attributes:
        lengths: (B,) tokens of each prefix.
        tokens: (B, N) token ids, valid up to ``lengths``.
        computed: number of tokens that went through the bottom so far.
    """

    def __init__(self, bottom: BottomModel, layout: Layout, *, cached: bool | None = None) -> None:
        self.bottom = bottom
        self.layout = layout.to(bottom.device)
        self.cached = can_cache(bottom, layout) if cached is None else cached
        self.lengths = torch.zeros_like(self.layout.counts)
        self.tokens = torch.zeros_like(self.layout.columns)
        self.computed = 0
        self._slots = _Slots()
        self._slots.capacity = self.layout.columns.shape[1]
        self._new: Tensor | None = None

    def follow(
        self, tokens: Tensor, others: Tensor | None = None, depths: Tensor | None = None
    ) -> Tensor:
        """Return hidden states of ``tokens`` (B, n) as the next n tokens, and of ``others``.

        Beyond a text's end they mean nothing. The prefixes stay as they are until :meth:`keep`.

        Args:
            tokens: (B, n) in sequence.
            others: (B, k) more candidates, each alone.
            depths: (k,) how many of ``tokens`` precede each of the others; by default none.

        Returns:
            (B, n + k, d).
        """
        n, device = tokens.shape[1], tokens.device
        if others is None:
            others = tokens[:, :0]
        if depths is None:
            depths = torch.zeros(others.shape[1], dtype=torch.int64, device=device)
        new = torch.cat([tokens, others], 1)
        depth = torch.cat([torch.arange(n, device=device), depths])
        self._new = new
        places = (self.lengths[:, None] + depth).clamp(max=self.layout.columns.shape[1] - 1)
        if not self.cached:
            parts = [self._whole(tokens, places[:, :n])] if n else []
            if others.shape[1]:
                parts.append(self._whole_each(tokens, others, depths))
            return torch.cat(parts, 1)
        index = torch.arange(len(depth), device=device)
        sees = (index < n) & (index < depth[:, None]) | (index == index[:, None])
        return self._run(new, places, sees)

    def keep(self, counts: Tensor, other: Tensor | None = None) -> None:
        """Append the first ``counts`` (B,) tokens of the last :meth:`follow`, and ``other``.

        Args:
            counts: of each text; 0 for none.
            other: (B,) index of one more token that follows, among the tokens and then the others
                of that call; -1 for none.
        """
        assert self._new is not None
        tokens, self._new = self._new, None
        if other is None:
            other = torch.full_like(counts, -1)
        total = counts + (other >= 0)
        ahead = torch.arange(max(1, int(total.max())), device=counts.device)
        rows, steps = (ahead < total[:, None]).nonzero(as_tuple=True)
        offsets = torch.where(steps < counts[rows], steps, other[rows])
        places = self.lengths[rows] + steps
        self.tokens[rows, places] = tokens[rows, offsets]
        if self.cached:
            source = self._slots.used + offsets
            displaced = source != places
            if bool(displaced.any()):
                self._slots.move(rows[displaced], source[displaced], places[displaced])
        self.lengths = self.lengths + total

    def attempt(self, candidates: Tensor) -> Tensor:
        """Return the states (B, n, d) of ``candidates`` (B, n), each alone as the next token."""
        return self.follow(candidates[:, :0], candidates)

    def select(self, rows: Tensor) -> Prefixes:
        """Return a copy of the texts ``rows``, which may repeat (beams)."""
        copy = Prefixes(self.bottom, self.layout[rows], cached=self.cached)
        copy.lengths, copy.tokens = self.lengths[rows], self.tokens[rows]
        copy._slots = self._slots.select(rows)
        return copy

    def _run(self, new: Tensor, places: Tensor, sees: Tensor) -> Tensor:
        """Return the states of ``new`` tokens that attend to the prefix and to each other."""
        slots = self._slots
        slots.used = int(self.lengths.max())
        rows, n = new.shape[:2]
        past = torch.arange(slots.used, device=sees.device) < self.lengths[:, None]
        attends = [past[:, None].expand(-1, n, -1), sees.expand(rows, -1, -1)]
        visible = torch.cat(attends, 2)[:, None]
        self.computed += rows * n
        return self.bottom.continued(new, visible, self.layout.positions.gather(1, places), slots)

    def _whole(self, tokens: Tensor, places: Tensor) -> Tensor:
        """Return what :meth:`follow` does, by running the texts from their first token."""
        rows = torch.arange(len(tokens), device=tokens.device)[:, None]
        text = self.tokens.clone()
        inside = self.lengths[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
        fits = inside < self.layout.columns.shape[1]
        text[rows.expand_as(fits)[fits], inside[fits]] = tokens[fits]
        return self._states(text, rows.squeeze(1), int(places.max()) + 1)[rows, places]

    def _whole_each(self, tokens: Tensor, others: Tensor, depths: Tensor) -> Tensor:
        """Return the states of others of :meth:`follow`, each in a separate text."""
        b, k = others.shape
        rows = torch.arange(b, device=others.device).repeat_interleave(k)
        depth = depths.repeat(b)
        text = self.tokens[rows]
        last = text.shape[1] - 1
        each = torch.arange(b * k, device=others.device)
        for step in range(int(depth.max())):
            deep = (depth > step) & (self.lengths[rows] + step <= last)
            text[each[deep], self.lengths[rows[deep]] + step] = tokens[rows[deep], step]
        places = (self.lengths[rows] + depth).clamp(max=last)
        text[each, places] = others.flatten()
        return self._states(text, rows, int(places.max()) + 1)[each, places].view(b, k, -1)

    def _states(self, text: Tensor, rows: Tensor, length: int) -> Tensor:
        """Return hidden states (k, ``length``, d) by real token of ``text`` (k, N)."""
        layout = self.layout[rows]
        sent = layout.spread(text, 0)
        block = BLOCK.get(text.device.type, BLOCK_OTHERWISE)
        end = -(-int(layout.columns[:, :length].max() + 1) // block) * block
        end = min(end, sent.shape[1])
        mask = None if layout.mask is None else layout.mask[:, :end]
        ids = None if layout.position_ids is None else layout.position_ids[:, :end]
        step = max(1, TOKENS_AT_ONCE // end)
        parts = [
            self.bottom.hidden(
                sent[a : a + step, :end],
                None if mask is None else mask[a : a + step],
                None if ids is None else ids[a : a + step],
            )
            for a in range(0, len(sent), step)
        ]
        self.computed += len(sent) * end
        states = torch.cat(parts)
        texts = torch.arange(len(states), device=states.device)[:, None]
        return states[texts, layout.columns[:, :length].clamp(max=end - 1)]


def can_cache(bottom: BottomModel, layout: Layout) -> bool:
    """Return whether cached keys and values give the states that whole texts have.

    They do not where the model takes no cache, no positions or no mask of its own shape (flash
    attention), where attention has a window shorter than the texts, where positions are scaled by
    the text's length, where PEFT puts virtual tokens in front, or where positions without a mask
    start again (the model then reads several texts in one row). A trial decides all other cases.
    """
    length = layout.columns.shape[1]
    packed = layout.position_ids is not None and layout.mask is None
    if packed and bool((layout.positions.diff(dim=1) != 1).any()):
        return False
    window = _window(bottom)
    if window is not None and length > window:
        return False
    if bottom.cache_agrees is None:
        bottom.cache_agrees = _agrees(bottom)
    return bottom.cache_agrees


def _window(bottom: BottomModel) -> int | None:
    config = getattr(without_peft(bottom.anatomy.model), "config", None)
    if config is not None and hasattr(config, "get_text_config"):
        config = config.get_text_config()
    sizes = [getattr(config, n, None) for n in ("sliding_window", "attention_chunk_size")]
    scaling = getattr(config, "rope_scaling", None) or {}
    if scaling.get("rope_type", scaling.get("type")) in ("dynamic", "longrope"):
        sizes.append(scaling.get("original_max_position_embeddings"))
    return min((s for s in sizes if isinstance(s, int) and s > 0), default=None)


def _agrees(bottom: BottomModel) -> bool:
    """Compare one short text, padded on the left, with and without cache."""
    model = bottom.anatomy.model
    if not all(takes(model, a) for a in ("past_key_values", "position_ids", "attention_mask")):
        return False
    if virtual_tokens(bottom.anatomy) or (bottom.context or 8) < 8:
        return False
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(bottom.vocab_size, (2, 5), generator=generator).to(bottom.device)
    mask = torch.ones(2, 8, dtype=torch.int64)
    mask[0, :3], mask[1, 5:] = 0, 0
    layout = Layout.from_masks((2, 8), mask, None)
    runs = [Prefixes(bottom, layout, cached=cached) for cached in (True, False)]
    states: list[list[Tensor]] = [[], []]
    for run, run_states in zip(runs, states, strict=True):
        try:
            run_states.append(run.follow(text[:, :3])[:, :2])
            run.keep(torch.tensor([2, 1], device=bottom.device))
            run_states.append(run.attempt(text[:, 1:4]))
            none = torch.zeros(2, dtype=torch.int64, device=bottom.device)
            run.keep(none, torch.tensor([1, 0], device=bottom.device))
            run_states.append(
                run.follow(text[:, 3:4], text[:, :2], torch.arange(2, device=bottom.device))
            )
        except Exception:
            if run.cached:
                return False
            raise
    tolerance = _AGREE.get(bottom.dtype, _AGREE_OTHERWISE)
    cached, whole = (torch.cat([s.flatten(0, 1) for s in parts]).float() for parts in states)
    return bool((cached - whole).abs().max() <= tolerance * whole.std())
