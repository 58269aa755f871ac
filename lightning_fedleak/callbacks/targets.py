"""Which texts a live membership game asks for: some of the step's batch, as many that are not."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from lightning_fedleak.attacks.base import Query
from lightning_fedleak.batches import TokenBatch

SPARE = 4
"""Texts drawn for each that is asked for, since some may be too short, or in the batch."""


class NoTargets(ValueError):
    """The batch holds no sentence that could be asked for."""


@dataclass(frozen=True, repr=False)
class Rows:
    """Sentences of one or more batches, one under the other.

    Attributes:
        ids: (N, L) int64; where there is no token whatever the batch holds there.
        real: (N, L) bool.
        masked: the batches came with attention masks.
    """

    ids: Tensor
    real: Tensor
    masked: bool

    def __len__(self) -> int:
        return len(self.ids)

    @classmethod
    def of(cls, batches: Sequence[TokenBatch]) -> Rows:
        """The rows of ``batches`` as they stand there, filled up on the right to one length.

        A row that is padded on the left keeps that padding. Where a model counts learned positions
        from the first column (GPT-2, BERT, unless the batch gives position ids) the padding shifts
        what it reads, by an offset that a server cannot see. Asking with the right one is the worst
        case: a server that crafts a neuron for each offset up to the length finds it too.
        """
        length = max(b.input_ids.shape[1] for b in batches)
        ids, real = [], []
        for batch in batches:
            mask = batch.attention_mask
            more = (0, length - batch.input_ids.shape[1])
            ids.append(functional.pad(batch.input_ids.long(), more))
            kept = torch.ones_like(batch.input_ids) if mask is None else mask
            real.append(functional.pad(kept != 0, more))
        masked = any(b.attention_mask is not None for b in batches)
        return cls(torch.cat(ids), torch.cat(real), masked)

    @classmethod
    def of_texts(cls, texts: Sequence[Tensor], like: Rows) -> Rows:
        """Texts (1-D token ids), cut to the length of ``like``."""
        device, length = like.ids.device, like.ids.shape[1]
        cut = [t[:length].to(device)[None] for t in texts]
        rows = cls.of([TokenBatch(t, None, None, "causal") for t in cut])
        return cls(rows.ids, rows.real, like.masked)

    def joined(self, other: Rows) -> Rows:
        """These rows, then those of ``other``."""
        length = max(self.ids.shape[1], other.ids.shape[1])

        def join(*parts: Tensor) -> Tensor:
            device = self.ids.device
            wide = [functional.pad(p, (0, length - p.shape[1])).to(device) for p in parts]
            return torch.cat(wide)

        masked = self.masked or other.masked
        return Rows(join(self.ids, other.ids), join(self.real, other.real), masked)

    def __getitem__(self, index: Tensor) -> Rows:
        index = index.to(self.ids.device)
        return Rows(self.ids[index], self.real[index], self.masked)

    def trimmed(self) -> Rows:
        """Without the columns on the right in which no row has a token."""
        used = int(self.real.any(0).nonzero().max()) + 1
        return Rows(self.ids[:, :used], self.real[:, :used], self.masked)

    def texts(self) -> Tensor:
        """(N, L) the tokens of each row moved to the left, -1 behind them."""
        order = torch.argsort((~self.real).to(torch.int8), dim=1, stable=True)
        return self.ids.masked_fill(~self.real, -1).gather(1, order)

    def tuples(self) -> list[tuple[int, ...]]:
        """The tokens of each row, on the host."""
        rows = zip(self.ids.tolist(), self.real.tolist(), strict=True)
        return [tuple(i for i, r in zip(ids, real, strict=True) if r) for ids, real in rows]

    def askable(self, special: frozenset[int], *, causal: bool) -> Tensor:
        """(N, L) bool: tokens that may be asked for, see :class:`Deal`."""
        marked = torch.tensor(sorted(special), dtype=torch.int64, device=self.ids.device)
        free = self.real & ~torch.isin(self.ids, marked)
        if causal:
            behind = self.real.flip(1).cumsum(1).flip(1) - self.real.long()
            free &= behind > 0
        return free

    def query(self, positions: Tensor) -> Query:
        """As an attack gets them: where there is no token the id is 0, whoever padded."""
        return Query(self.ids.masked_fill(~self.real, 0), self.real.long(), positions)


@dataclass(frozen=True, repr=False)
class Targets:
    """What the games of one look ask for.

    Attributes:
        rows: (G, L) the target sentences.
        positions: (G,) the token of each that is asked for.
        members: (G,) bool on the CPU, the secret bits, in a random order.
        places: (G,) which row of the batch each member is, -1 for the others.
    """

    rows: Rows
    positions: Tensor
    members: Tensor
    places: Tensor

    def query(self) -> Query:
        """What the attack gets."""
        return self.rows.query(self.positions)

    def reached(self, marked: Tensor) -> Targets:
        """The members that are marked, (G / 2,) bool in their order, and as many others."""
        kept = torch.zeros_like(self.members)
        kept[self.members.nonzero()[:, 0][marked.cpu()]] = True
        kept[(~self.members).nonzero()[: int(marked.sum()), 0]] = True
        return self.at(kept.nonzero()[:, 0])

    def at(self, index: Tensor) -> Targets:
        """The targets at these places."""
        positions = self.positions[index.to(self.positions.device)]
        return Targets(self.rows[index], positions, self.members[index], self.places[index])


@dataclass(frozen=True)
class Deal:
    """How targets are drawn.

    The token asked for is, in a causal model, the last one that predicts another (behind the last
    one the loss looks away, so that nothing of it would be in a gradient), in other models a
    random one. None that marks the beginning or the end of every text: early layers make much the
    same state of it in all of them.

    Attributes:
        most: sentences of the batch, at most, and as many others.
        causal: tokens see what comes before them only.
        special: ids that are not asked for.
    """

    most: int
    causal: bool
    special: frozenset[int] = frozenset()

    def targets(
        self,
        inside: Rows,
        outside: Rows,
        generator: torch.Generator,
        *,
        among: Sequence[int] | None = None,
    ) -> Targets | None:
        """Sentences of the batch, and as many that are not in it, each distinct one once.

        Args:
            inside: the step's batch.
            outside: other sentences; those that the batch holds too are left out.
            generator: on the CPU; the draw depends on nothing else.
            among: rows of ``inside`` that may be asked for; default all.

        Returns:
            None where ``outside`` holds nothing to ask for.

        Raises:
            NoTargets: no sentence of the batch is long enough to be asked for.
        """
        both = inside.joined(outside)
        _, of = torch.unique(both.texts(), dim=0, return_inverse=True)
        text = of.tolist()
        askable = both.askable(self.special, causal=self.causal)
        long_enough = askable.any(1).tolist()
        n = len(inside)
        held = set(text[:n])
        asked = range(n) if among is None else among
        members = {text[i]: i for i in asked if long_enough[i]}
        others = {text[i]: i for i in range(n, len(both)) if long_enough[i] and text[i] not in held}
        if not members:
            needed = "two tokens" if self.causal else "a token"
            aside = " besides special ones" if self.special else ""
            raise NoTargets(
                f"no sentence of the batch has {needed}{aside}, so that none can be asked for"
            )
        count = min(self.most, len(members), len(others))
        if count == 0:
            return None
        places = _some(list(members.values()), count, generator)
        chosen = torch.cat([places, _some(list(others.values()), count, generator)])
        rows = both[chosen].trimmed()
        positions = _token(askable[chosen.to(askable.device)], generator, causal=self.causal)
        places = torch.cat([places, torch.full((count,), -1)])
        targets = Targets(rows, positions, places >= 0, places)
        # An order that says nothing of the bits, since an attack sees it.
        return targets.at(torch.randperm(2 * count, generator=generator))

    def as_they_are(self, rows: Rows, members: Tensor, generator: torch.Generator) -> Targets:
        """All rows in their order; in a causal model the tokens asked for draw nothing.

        Raises:
            NoTargets: a row holds no token that may be asked for.
        """
        askable = rows.askable(self.special, causal=self.causal)
        short = int((~askable.any(1)).sum())
        if short:
            raise NoTargets(f"{short} of {len(rows)} texts hold no token that may be asked for")
        positions = _token(askable, generator, causal=self.causal)
        return Targets(rows, positions, members, torch.full((len(rows),), -1))

    def some(self, texts: Sequence[Tensor], generator: torch.Generator, *, like: Rows) -> Rows:
        """A random choice of texts, more than are asked for, cut to the length of ``like``."""
        drawn = torch.randperm(len(texts), generator=generator)[: SPARE * self.most]
        return Rows.of_texts([texts[i] for i in drawn.tolist()], like)


def _some(values: list[int], count: int, generator: torch.Generator) -> Tensor:
    return torch.tensor(values)[torch.randperm(len(values), generator=generator)[:count]]


def _token(askable: Tensor, generator: torch.Generator, *, causal: bool) -> Tensor:
    """(G,) a column of each row that may be asked for: the last, or a random one."""
    order = torch.argsort((~askable).to(torch.int8), dim=1, stable=True)
    n = askable.sum(1)
    if causal:
        nth = n - 1
    else:
        share = torch.rand(len(askable), generator=generator, dtype=torch.float64)
        nth = (share.to(n.device) * n).long()
    return order.gather(1, nth[:, None])[:, 0]


_MARKS = ("bos", "eos", "cls", "sep", "pad")


def special_ids(config: Any, tokenizers: Iterable[Any]) -> frozenset[int]:
    """Ids of tokens that every text holds, such as [CLS] and [SEP].

    Args:
        config: of the model; a BERT's does not say them.
        tokenizers: of Hugging Face, or None. Their other special ids count too, but for those that
            stand for words: of the mask, at which alone the last layers of a masked language model
            have a gradient, and of what is unknown.
    """
    found: set[int] = set()
    for told in (config, *tokenizers):
        for mark in _MARKS:
            found |= _ids(getattr(told, f"{mark}_token_id", None))
        words = [_ids(getattr(told, f"{name}_token_id", None)) for name in ("mask", "unk")]
        found |= _ids(getattr(told, "all_special_ids", None)).difference(*words)
    return frozenset(found)


def _ids(given: Any) -> set[int]:
    """One id or several, of what may hold anything."""
    several = given if isinstance(given, (list, tuple)) else [given]
    return {i for i in several if isinstance(i, int) and not isinstance(i, bool) and i >= 0}


__all__ = ["Deal", "NoTargets", "Rows", "Targets", "special_ids"]
