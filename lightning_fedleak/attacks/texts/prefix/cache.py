"""Prefixes of texts, and the bottom model's hidden states of candidates for their next tokens.

The keys and values of a prefix are cached, so that one more token costs one token's forward pass.
All candidates for the next token run in one sequence: each attends only to the prefix and to
itself, and all have the same position id. The prefix is then neither computed nor copied for each
candidate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from lightning_fedleak.attacks.texts.bottom_model import BottomModel, NextTokens
from lightning_fedleak.model.anatomy import cache_argument, without_peft
from lightning_fedleak.model.model_runs import TOKENS_AT_ONCE, takes, virtual_tokens

# Positions that an attention kernel processes together, by device. The states of a text that ends
# within such a block differ by rounding. Uncached texts therefore run up to the end of a block, or
# to their own end.
BLOCK_SIZES = {"cpu": 16}
DEFAULT_BLOCK_SIZE = 128  # positions, on every other device
# The largest difference between states with and without the cache, in standard deviations of the
# states. A larger value would accept a cache that changes the states; a smaller one would reject
# a correct cache for its rounding. Not tuned.
_TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-3}
_DEFAULT_TOLERANCE = 0.1  # standard deviations, for half precision and other dtypes


@dataclass(frozen=True)
class Layout:
    """The columns and position ids of the real tokens of a padded batch, packed to the left.

    Attributes:
        counts: (B,) the numbers of real tokens of the texts.
        columns: (B, N) the column of each text's i-th real token, where N is the largest count.
            Entries after a text's last real token are columns of padding, and must not be used.
        positions: (B, N) the position ids of the tokens in ``columns``.
        mask: (B, L) the attention mask that the client sent, 0 at padding; None without one.
        position_ids: (B, L) the position ids that the client sent; None without them.
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
        return self._map(lambda tensor: tensor.to(device))

    def __getitem__(self, rows: Tensor) -> Layout:
        """Return the layout of the texts ``rows``."""
        return self._map(lambda tensor: tensor[rows])

    def _map(self, function: Callable[[Tensor], Tensor]) -> Layout:
        """Return the layout with ``function`` applied to each of its tensors."""
        tensors = {k: None if v is None else function(v) for k, v in vars(self).items()}
        return replace(self, **tensors)  # type: ignore[arg-type]

    def pack(self, values: Tensor) -> Tensor:
        """Return the values (B, L, ...) of all columns as (B, N, ...), of the real tokens only."""
        rows = torch.arange(len(values), device=values.device)[:, None]
        return values[rows, self.columns]

    def spread(self, values: Tensor, fill: float) -> Tensor:
        """Return the values (B, N) of the real tokens as (B, L), with ``fill`` at padding."""
        length = self.columns.shape[1] if self.mask is None else self.mask.shape[1]
        values_by_column = values.new_full((len(values), length), fill)
        real = torch.arange(values.shape[1], device=values.device) < self.counts[:, None]
        rows = torch.arange(len(values), device=values.device)[:, None].expand_as(real)
        values_by_column[rows[real], self.columns[real]] = values[real]
        return values_by_column


class _Slots(Cache):
    """A key-value cache in buffers that hold ``capacity`` slots from the start.

    Only the first ``used`` slots are part of the cache. A forward writes its keys and values into
    the slots after them, so that a candidate costs no copy of the prefix.

    Attributes:
        buffers: The keys and values (B, heads, slots, d) by layer.
        used: The number of slots that hold prefixes.
        capacity: The number of slots that a new buffer has at least.
    """

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.buffers: dict[int, tuple[Tensor, Tensor]] = {}
        self.used = 0
        self.capacity = 0

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Write a layer's new keys and values, and return those of the prefix and the new ones.

        The base class prescribes this method, which transformers calls in each attention layer.
        """
        states = (key_states, value_states)
        end = self.used + key_states.shape[2]
        buffers = self.buffers.get(layer_idx)
        if buffers is None or buffers[0].shape[2] < end:
            buffers = self.buffers[layer_idx] = self._enlarge(buffers, states, end)
        for buffer, values in zip(buffers, states, strict=True):
            buffer[:, :, self.used : end] = values
        return buffers[0][:, :, :end], buffers[1][:, :, :end]

    def _enlarge(
        self, old_buffers: tuple[Tensor, Tensor] | None, states: tuple[Tensor, Tensor], end: int
    ) -> tuple[Tensor, Tensor]:
        """Return a layer's buffers with at least ``end`` slots, and the used slots copied."""
        size = max(end, self.capacity)
        buffers = [v.new_zeros(*v.shape[:2], size, v.shape[3]) for v in states]
        if old_buffers is not None:
            for buffer, old in zip(buffers, old_buffers, strict=True):
                buffer[:, :, : self.used] = old[:, :, : self.used]
        return buffers[0], buffers[1]

    def move(self, rows: Tensor, source: Tensor, target: Tensor) -> None:
        """Copy the slots ``source`` of the texts ``rows`` to the slots ``target``; all (k,)."""
        for layer in self.buffers.values():
            for buffer in layer:
                buffer[rows, :, target] = buffer[rows, :, source]

    def select(self, rows: Tensor) -> _Slots:
        """Return a copy that holds the texts ``rows``."""
        copy = _Slots()
        copy.used, copy.capacity = self.used, self.capacity
        copy.buffers = {i: (k[rows], v[rows]) for i, (k, v) in self.buffers.items()}
        return copy

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of used slots, from which transformers computes mask sizes."""
        return self.used


class Prefixes:
    """Prefixes of several texts, and the hidden states of candidates for their next tokens.

    :meth:`follow` computes states without changing the prefixes; :meth:`keep` then appends some of
    its tokens. Tokens are counted without padding: token i of a text is its i-th real token.
    Prefixes may differ in length.

    Args:
        bottom: The bottom of a causal model.
        layout: The layout of the texts.
        cached: Whether keys and values are cached; by default as :func:`can_cache` returns.

    Attributes:
        lengths: (B,) the numbers of tokens of the prefixes.
        tokens: (B, N) token ids, valid up to ``lengths``.
        computed: The number of tokens that the bottom has computed so far.
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
        self._pending: Tensor | None = None  # tokens and candidates of the last follow

    def follow(
        self, tokens: Tensor, candidates: Tensor | None = None, depths: Tensor | None = None
    ) -> Tensor:
        """Return the hidden states of ``tokens`` as the next n tokens, and of ``candidates``.

        States after the end of a text are undefined. The prefixes do not change until :meth:`keep`.

        Args:
            tokens: (B, n) the tokens of one sequence, which follow the prefix.
            candidates: (B, k) alternative tokens, of which none attends to another.
            depths: (k,) the number of ``tokens`` that precede each candidate; by default 0.

        Returns:
            The states (B, n + k, d) of the tokens, then of the candidates.
        """
        n, device = tokens.shape[1], tokens.device
        if candidates is None:
            candidates = tokens[:, :0]
        if depths is None:
            depths = torch.zeros(candidates.shape[1], dtype=torch.int64, device=device)
        self._pending = torch.cat([tokens, candidates], 1)
        depth = torch.cat([torch.arange(n, device=device), depths])
        indices = (self.lengths[:, None] + depth).clamp(max=self.layout.columns.shape[1] - 1)
        if not self.cached:
            states = [self._run_uncached(tokens, indices[:, :n])] if n else []
            if candidates.shape[1]:
                states.append(self._run_separately(tokens, candidates, depths))
            return torch.cat(states, 1)
        # A token attends to itself and to the chain's tokens before its depth, never to candidates.
        order = torch.arange(len(depth), device=device)
        attends = (order < n) & (order < depth[:, None]) | (order == order[:, None])
        return self._run(self._pending, indices, attends)

    def keep(self, counts: Tensor, candidate: Tensor | None = None) -> None:
        """Append tokens of the last :meth:`follow` to the prefixes.

        Args:
            counts: (B,) the number of its ``tokens`` that are appended to each prefix.
            candidate: (B,) the index of one more token to append after them, counted over the
                tokens and then the candidates of that call; -1 for none.
        """
        assert self._pending is not None
        tokens, self._pending = self._pending, None
        if candidate is None:
            candidate = torch.full_like(counts, -1)
        total = counts + (candidate >= 0)
        ahead = torch.arange(max(1, int(total.max())), device=counts.device)
        rows, steps = (ahead < total[:, None]).nonzero(as_tuple=True)
        offsets = torch.where(steps < counts[rows], steps, candidate[rows])
        target = self.lengths[rows] + steps
        self.tokens[rows, target] = tokens[rows, offsets]
        if self.cached:
            # The forward wrote behind the longest prefix: tokens of shorter texts move to the left.
            source = self._slots.used + offsets
            displaced = source != target
            if bool(displaced.any()):
                self._slots.move(rows[displaced], source[displaced], target[displaced])
        self.lengths = self.lengths + total

    def attempt(self, candidates: Tensor) -> Tensor:
        """Return the states (B, n, d) of ``candidates`` (B, n) for the next token."""
        return self.follow(candidates[:, :0], candidates)

    def predicted(self, top: NextTokens) -> Tensor:
        """Return log-probabilities (B, V) of the next token; the prefixes are beams of one text."""
        layout, length = self.layout, int(self.lengths[0])
        end = int(layout.columns[0, length - 1]) + 1
        self.computed += len(self.tokens) * end
        mask, position_ids = layout.mask, layout.position_ids
        return top.log_probabilities(
            layout.spread(self.tokens, 0)[:, :end],
            None if mask is None else mask[:, :end],
            None if position_ids is None else position_ids[:, :end],
        )

    def select(self, rows: Tensor) -> Prefixes:
        """Return a copy of the texts ``rows``, which may repeat (beams)."""
        copy = Prefixes(self.bottom, self.layout[rows], cached=self.cached)
        copy.lengths, copy.tokens = self.lengths[rows], self.tokens[rows]
        copy._slots = self._slots.select(rows)
        return copy

    def _run(self, tokens: Tensor, indices: Tensor, attends: Tensor) -> Tensor:
        """Return the states of ``tokens``, which attend to the prefix and to some of each other.

        Args:
            tokens: (B, n) token ids.
            indices: (B, n) the index in the text that each token has.
            attends: (n, n) bool, whether the row's token attends to the column's token.
        """
        slots = self._slots
        slots.used = int(self.lengths.max())
        rows, n = tokens.shape
        past = torch.arange(slots.used, device=attends.device) < self.lengths[:, None]
        masks = [past[:, None].expand(-1, n, -1), attends.expand(rows, -1, -1)]
        mask = torch.cat(masks, 2)[:, None]
        self.computed += rows * n
        return self.bottom.continued(tokens, mask, self.layout.positions.gather(1, indices), slots)

    def _run_uncached(self, tokens: Tensor, indices: Tensor) -> Tensor:
        """Return the states of ``tokens``, running each text from its first token."""
        rows = torch.arange(len(tokens), device=tokens.device)[:, None]
        text = self.tokens.clone()
        unclamped = self.lengths[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
        fits = unclamped < self.layout.columns.shape[1]
        text[rows.expand_as(fits)[fits], unclamped[fits]] = tokens[fits]
        return self._states(text, rows.squeeze(1), int(indices.max()) + 1)[rows, indices]

    def _run_separately(self, tokens: Tensor, candidates: Tensor, depths: Tensor) -> Tensor:
        """Return the states of the candidates of :meth:`follow`, each from a separate text."""
        b, k = candidates.shape
        rows = torch.arange(b, device=candidates.device).repeat_interleave(k)
        depth = depths.repeat(b)
        text = self.tokens[rows]
        last = text.shape[1] - 1
        copies = torch.arange(b * k, device=candidates.device)
        for step in range(int(depth.max())):
            fits = (depth > step) & (self.lengths[rows] + step <= last)
            text[copies[fits], self.lengths[rows[fits]] + step] = tokens[rows[fits], step]
        indices = (self.lengths[rows] + depth).clamp(max=last)
        text[copies, indices] = candidates.flatten()
        return self._states(text, rows, int(indices.max()) + 1)[copies, indices].view(b, k, -1)

    def _states(self, tokens: Tensor, rows: Tensor, length: int) -> Tensor:
        """Return the hidden states (k, ``length``, d) of the first tokens of some texts.

        Args:
            tokens: (k, N) the real tokens of each text.
            rows: (k,) the index of the layout that each text has.
            length: The number of tokens whose states are returned.
        """
        layout = self.layout[rows]
        input_ids = layout.spread(tokens, 0)
        block = BLOCK_SIZES.get(tokens.device.type, DEFAULT_BLOCK_SIZE)
        end = -(-int(layout.columns[:, :length].max() + 1) // block) * block
        end = min(end, input_ids.shape[1])
        mask, position_ids = layout.mask, layout.position_ids
        step = max(1, TOKENS_AT_ONCE // end)
        chunks = [
            self.bottom.hidden(
                input_ids[a : a + step, :end],
                None if mask is None else mask[a : a + step, :end],
                None if position_ids is None else position_ids[a : a + step, :end],
            )
            for a in range(0, len(input_ids), step)
        ]
        self.computed += len(input_ids) * end
        states = torch.cat(chunks)
        texts = torch.arange(len(states), device=states.device)[:, None]
        return states[texts, layout.columns[:, :length].clamp(max=end - 1)]


def can_cache(bottom: BottomModel, layout: Layout) -> bool:
    """Return whether cached keys and values give the same states as uncached texts.

    They do not in these cases: the model takes no cache, no position ids or no four-dimensional
    mask (flash attention); its attention window is shorter than the texts; it scales positions by
    the length of the text; PEFT prepends virtual tokens; or position ids without a mask restart
    within a row, since the model then treats the row as several packed texts. All other cases are
    decided by a trial on random tokens.
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
    """Return the longest text for which a cache may be exact; None if the config names no limit.

    It is the attention window, or the length above which RoPE scaling changes all frequencies.
    """
    config = getattr(without_peft(bottom.anatomy.model), "config", None)
    if config is not None and hasattr(config, "get_text_config"):
        config = config.get_text_config()
    sizes = [getattr(config, n, None) for n in ("sliding_window", "attention_chunk_size")]
    scaling = getattr(config, "rope_scaling", None) or {}
    if scaling.get("rope_type", scaling.get("type")) in ("dynamic", "longrope"):
        sizes.append(scaling.get("original_max_position_embeddings"))
    return min((s for s in sizes if isinstance(s, int) and s > 0), default=None)


def _agrees(bottom: BottomModel) -> bool:
    """Return whether random texts, padded left and right, have the same states with a cache."""
    model = bottom.anatomy.model
    places = all(takes(model, argument) for argument in ("position_ids", "attention_mask"))
    if not places or cache_argument(model) is None:
        return False
    if virtual_tokens(bottom.anatomy) or (bottom.context or 8) < 8:
        return False
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(bottom.vocab_size, (2, 5), generator=generator).to(bottom.device)
    mask = torch.ones(2, 8, dtype=torch.int64)
    mask[0, :3], mask[1, 5:] = 0, 0
    layout = Layout.from_masks((2, 8), mask, None)
    runs = [Prefixes(bottom, layout, cached=cached) for cached in (True, False)]
    states: list[list[Tensor]] = [[], []]
    for run, run_states in zip(runs, states, strict=True):
        try:
            run_states.append(run.follow(tokens[:, :3])[:, :2])
            run.keep(torch.tensor([2, 1], device=bottom.device))
            run_states.append(run.attempt(tokens[:, 1:4]))
            zeros = torch.zeros(2, dtype=torch.int64, device=bottom.device)
            run.keep(zeros, torch.tensor([1, 0], device=bottom.device))
            run_states.append(
                run.follow(tokens[:, 3:4], tokens[:, :2], torch.arange(2, device=bottom.device))
            )
        except Exception:  # models fail in many ways with a cache that they do not support
            if run.cached:
                return False
            raise
    tolerance = _TOLERANCES.get(bottom.dtype, _DEFAULT_TOLERANCE)
    cached, uncached = (torch.cat([s.flatten(0, 1) for s in calls]).float() for calls in states)
    return bool((cached - uncached).abs().max() <= tolerance * uncached.std())
