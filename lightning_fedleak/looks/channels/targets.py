"""What live membership games ask for: which texts, where they come from, and their settings."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional

from lightning_fedleak.attacks.base import Query
from lightning_fedleak.attacks.public_text import PublicText
from lightning_fedleak.batches import IGNORE_INDEX, TokenBatch, before_last
from lightning_fedleak.canaries import CanarySet
from lightning_fedleak.looks.look import NoTargets, Waiting

SPARE = 4
"""Texts drawn for each that is asked for, since some may be too short, or in the batch."""
EARLIER_BATCHES = 2
SCALE = 1e9
"""How strongly a dishonest server's layers feed the model, unless the user says otherwise.

Without clipping or noise it changes nothing. With them it is the worst case: a canary takes the
whole norm that it is clipped to. No server has to disturb the model for it: a trained factor that
is still zero has a gradient as large as one likes, and adds nothing.
"""


Reduction = Literal["max", "mean"]


@dataclass(frozen=True)
class Games:
    """How a :class:`LeakageMonitor` plays membership games: ``LeakageMonitor(games=Games(...))``.

    Examples:
        >>> from lightning_fedleak import FCMembership, Games, LeakageMonitor, PublicText
        >>> texts = PublicText([[5, 8, 2, 7], [7, 1, 3, 4]])  # ids; strings need a tokenizer
        >>> monitor = LeakageMonitor([FCMembership(1)], games=Games(targets=8, held_out=texts))
        >>> monitor.games.targets
        8

    Args:
        targets: sentences asked for at a look, at most so many that are in the batch and as many
            that are not.
        held_out: texts that are in no batch, a
            :class:`~lightning_fedleak.attacks.public_text.PublicText`, and not the one that an
            attack is calibrated on. Default: sentences of the batches read shortly before a look;
            the first look, before which there was none, then has no result of these games yet, and
            the next step is looked at too.
        window: looks over which the games of membership attacks are pooled. At 16 targets a rate
            at 1% false positives is known after 63 looks.
        scale: how strongly a dishonest server lets its own layers feed the model. It matters
            under clipping or noise only, where the default is the worst case: a canary takes the
            whole norm that it is clipped to. The Trainer's own ``gradient_clip_val`` does not act
            on it, only defences do: with noise and that clipping together leakage is overstated.
        canaries: texts of the user's own, in the training data by coin flips
            (:func:`~lightning_fedleak.canaries.with_canaries`). At a look at which some are in
            the batch, membership attacks are also asked for these and for as many that were left
            out of the data; logged as ``audit/<attack>``.
        score_canaries: ``"max"`` or ``"mean"``: at each look every canary is scored, included or
            not, and one score for each is kept over looks by this rule
            (:meth:`LeakageMonitor.canary_scores`). One process only; costs a forward of all
            canaries at each look.

    Raises:
        ValueError: a number out of range, or scores of no canaries.
    """

    targets: int = 16
    held_out: PublicText | None = None
    window: int = 100
    scale: float = SCALE
    canaries: CanarySet | None = None
    score_canaries: Reduction | None = None

    def __post_init__(self) -> None:
        for name in ("targets", "window"):
            number = getattr(self, name)
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                raise ValueError(f"{name} must be a positive integer, got {number!r}")
        if self.held_out is not None and not isinstance(self.held_out, PublicText):
            raise ValueError(
                "held_out must be a PublicText, as PublicText(texts, tokenizer) gives it; got a "
                f"{type(self.held_out).__name__}"
            )
        if not self.scale > 0 or math.isinf(self.scale):
            raise ValueError(f"scale must be a positive number, got {self.scale!r}")
        if self.score_canaries not in (None, *get_args(Reduction)):
            raise ValueError(
                f"score_canaries must be 'max', 'mean' or None, got {self.score_canaries!r}"
            )
        if self.score_canaries is not None and self.canaries is None:
            raise ValueError("score_canaries= scores the texts of canaries=: give these too")


@dataclass(frozen=True, repr=False)
class Rows:
    """Sentences of one or more batches, one under the other.

    Attributes:
        ids: (N, L) int64; where there is no token whatever the batch holds there.
        real: (N, L) bool.
        masked: the batches came with attention masks.
        labels: (N, L) bool, tokens that the loss of a causal model counts as labels; of other
            models all of a row that has a label.
    """

    ids: Tensor
    real: Tensor
    masked: bool
    labels: Tensor

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
        ids, real, labels = [], [], []
        for batch in batches:
            mask = batch.attention_mask
            more = (0, length - batch.input_ids.shape[1])
            ids.append(functional.pad(batch.input_ids.long(), more))
            kept = torch.ones_like(batch.input_ids) if mask is None else mask
            real.append(functional.pad(kept != 0, more))
            counted = torch.ones_like(batch.input_ids, dtype=torch.bool)
            if batch.labels is not None:
                asked = (batch.labels != IGNORE_INDEX).to(counted.device)
                some = asked.flatten(1).any(1) if asked.dim() > 1 else asked
                counted = asked if batch.kind == "causal" else some[:, None].expand_as(counted)
            labels.append(functional.pad(counted, more, value=True))
        masked = any(b.attention_mask is not None for b in batches)
        return cls(torch.cat(ids), torch.cat(real), masked, torch.cat(labels))

    @classmethod
    def of_texts(cls, texts: Sequence[Tensor], like: Rows) -> Rows:
        """Texts (1-D token ids), cut to the length of ``like``."""
        device, length = like.ids.device, like.ids.shape[1]
        cut = [t[:length].to(device)[None] for t in texts]
        rows = cls.of([TokenBatch(t, None, None, "causal") for t in cut])
        return cls(rows.ids, rows.real, like.masked, rows.labels)

    def joined(self, other: Rows) -> Rows:
        """These rows, then those of ``other``."""
        length = max(self.ids.shape[1], other.ids.shape[1])

        def join(name: str) -> Tensor:
            device = self.ids.device
            parts: list[Tensor] = [getattr(rows, name) for rows in (self, other)]
            wide = [functional.pad(p, (0, length - p.shape[1])).to(device) for p in parts]
            return torch.cat(wide)

        masked = self.masked or other.masked
        return Rows(join("ids"), join("real"), masked, join("labels"))

    def __getitem__(self, index: Tensor) -> Rows:
        index = index.to(self.ids.device)
        return Rows(self.ids[index], self.real[index], self.masked, self.labels[index])

    def trimmed(self) -> Rows:
        """Without the columns on the right in which no row has a token."""
        used = int(self.real.any(0).nonzero().max()) + 1
        return Rows(self.ids[:, :used], self.real[:, :used], self.masked, self.labels[:, :used])

    def texts(self) -> Tensor:
        """(N, L) the tokens of each row moved to the left, -1 behind them."""
        order = torch.argsort((~self.real).to(torch.int8), dim=1, stable=True)
        return self.ids.masked_fill(~self.real, -1).gather(1, order)

    def tuples(self) -> list[tuple[int, ...]]:
        """The tokens of each row, on the host."""
        rows = zip(self.ids.tolist(), self.real.tolist(), strict=True)
        return [tuple(i for i, r in zip(ids, real, strict=True) if r) for ids, real in rows]

    def askable(self, special: frozenset[int], *, causal: bool) -> Tensor:
        """(N, L) bool: tokens that may be asked for, see :class:`Deal`; none without a label."""
        marked = torch.tensor(sorted(special), dtype=torch.int64, device=self.ids.device)
        free = self.real & ~torch.isin(self.ids, marked)
        return free & (before_last(self.real & self.labels) if causal else self.labels)

    def query(self, positions: Tensor) -> Query:
        """As an attack gets them: where there is no token the id is 0, whoever padded."""
        ids = self.ids.masked_fill(~self.real, 0)
        labels = ids.masked_fill(~(self.real & self.labels), IGNORE_INDEX)
        return Query(ids, self.real.long(), positions, labels)


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

    The token asked for is, in a causal model, the last one that predicts a label (behind the last
    one the loss looks away, so that nothing of it would be in a gradient), in other models a
    random one. A row without a label has no gradient: it is neither asked for as a member, nor as
    one that is not in the batch. None that marks the beginning or the end of every text: early
    layers make much the same state of it in all of them.

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
            needed = "a token before a label" if self.causal else "a token, and a label,"
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


class Sources:
    """Draws the targets of each look.

    Args:
        games: the monitor's.
        client: number of this process's client.
        causal: of the model.
        special: ids of tokens that are not asked for.
    """

    def __init__(
        self,
        games: Games,
        client: int,
        *,
        causal: bool,
        special: frozenset[int] = frozenset(),
    ) -> None:
        self._deal = Deal(games.targets, causal=causal, special=special)
        self._held_out = None if games.held_out is None else games.held_out.sentences
        self._client = client
        self._earlier: deque[TokenBatch] = deque(maxlen=EARLIER_BATCHES)
        self._in: set[tuple[int, ...]] = set()
        if (canaries := games.canaries) is not None:
            marked = list(zip(canaries.token_ids, canaries.included.tolist(), strict=True))
            self._all, self._included = canaries.token_ids, canaries.included
            self._in = {tuple(text.tolist()) for text, included in marked if included}
            self._out = [text for text, included in marked if not included]

    def wants_batch(self, steps_to_look: int) -> bool:
        """Whether a batch that is not looked at may serve the next look."""
        return self._held_out is None and steps_to_look <= EARLIER_BATCHES

    def remember(self, batch: TokenBatch) -> None:
        """Keeps a batch, by reference, as text that a later batch does not hold."""
        if self._held_out is None and batch.input_ids.numel():
            self._earlier.append(batch)

    def population(self, step: int, batches: Sequence[TokenBatch]) -> Targets | Waiting:
        """Sentences of the batch, and others.

        Raises:
            NoTargets: the batch's sentences are too short.
        """
        inside, generator, outside = Rows.of(batches), self._generator(step), None
        if self._held_out is not None:
            outside = self._deal.some(self._held_out, generator, like=inside)
        elif self._earlier:
            outside = Rows.of(list(self._earlier))
        targets = None
        if outside is not None:
            targets = self._deal.targets(inside, outside, generator)
        return targets or Waiting(
            "membership needs texts outside this batch: later batches bring some, or pass "
            "games=Games(held_out=texts)",
            soon=outside is None,
        )

    def canaries(self, step: int, batches: Sequence[TokenBatch]) -> Targets | Waiting:
        """The user's own canaries that are in the batch, and others that are not in the data.

        Raises:
            NoTargets: the canaries are too short.
        """
        inside, generator = Rows.of(batches), self._generator(step)
        places = [i for i, text in enumerate(inside.tuples()) if text in self._in]
        if not places:
            return Waiting("no canary was in the batch", soon=False)
        if not self._out:
            return Waiting("every canary is in the data", soon=False)
        outside = self._deal.some(self._out, generator, like=inside)
        targets = self._deal.targets(inside, outside, generator, among=places)
        return targets or Waiting("every canary that was left out is in the batch", soon=False)

    def all_canaries(self, batches: Sequence[TokenBatch]) -> Targets:
        """Every canary of the user's, included or not, in their order; the token asked for stays.

        Raises:
            NoTargets: a canary holds no token that may be asked for.
        """
        device = batches[0].input_ids.device
        texts = [TokenBatch(t.to(device)[None], None, None, "causal") for t in self._all]
        ones = [replace(t, attention_mask=torch.ones_like(t.input_ids)) for t in texts]
        masked = any(b.attention_mask is not None for b in batches)
        rows = replace(Rows.of(ones), masked=masked)
        return self._deal.as_they_are(rows, self._included, torch.Generator().manual_seed(0))

    def _generator(self, step: int) -> torch.Generator:
        """Depends on the step and the client alone, so that a resumed run draws the same."""
        return torch.Generator().manual_seed(1_000_003 * step + self._client)


class CanaryScores:
    """The scores of all canaries, included or not, reduced over looks by one rule.

    A look counts for all canaries or for none, so that which are scored does not hang on the coins.

    Args:
        reduction: ``"max"`` or ``"mean"``; settled before the run.
        attacks: names of the attacks that score them.
    """

    def __init__(self, reduction: Reduction, attacks: Sequence[str]) -> None:
        self.reduction = reduction
        self._attacks = tuple(attacks)
        self.clear()

    def clear(self) -> None:
        """A new fit: earlier looks were at another run."""
        self._looks = dict.fromkeys(self._attacks, 0)
        self._kept: dict[str, Tensor] = {}

    def add(self, scores: Mapping[str, Tensor]) -> None:
        """Takes what attacks said at one look, (m,) each."""
        for name, new in scores.items():
            kept = self._kept.get(name)
            joined = torch.maximum if self.reduction == "max" else torch.add
            self._kept[name] = new.double() if kept is None else joined(kept, new.double())
            self._looks[name] += 1

    def of(self, attack: str | None) -> Tensor:
        """(m,) scores of one attack; without a name of the only one.

        Raises:
            ValueError: no such attack, several and no name, or no look has scored the canaries.
        """
        name = self._attacks[0] if attack is None and len(self._attacks) == 1 else attack
        if name not in self._looks:
            raise ValueError(f"canary_scores(attack) must name one of {list(self._attacks)}")
        if not self._looks[name]:
            raise ValueError(f"'{name}' has scored the canaries at no look so far")
        kept = self._kept[name]
        return kept.clone() if self.reduction == "max" else kept / self._looks[name]

    def state_dict(self) -> dict[str, object]:
        """What a resumed run goes on with."""
        return {"reduction": self.reduction, "looks": dict(self._looks), "kept": dict(self._kept)}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Takes back what :meth:`state_dict` gave.

        Raises:
            ValueError: it was reduced by another rule.
        """
        if state["reduction"] != self.reduction:
            raise ValueError(
                f"the checkpoint's canary scores were reduced by {state['reduction']!r}, and one "
                f"rule must hold for the whole run: resume with score_canaries="
                f"{state['reduction']!r}"
            )
        looks, kept = state["looks"], state["kept"]
        assert isinstance(looks, Mapping)
        assert isinstance(kept, Mapping)
        self._looks = {name: int(looks.get(name, 0)) for name in self._attacks}
        self._kept = {n: kept[n].cpu().double() for n in self._attacks if n in kept}


__all__ = [
    "SCALE",
    "CanaryScores",
    "Deal",
    "Games",
    "Rows",
    "Sources",
    "Targets",
    "special_ids",
]
