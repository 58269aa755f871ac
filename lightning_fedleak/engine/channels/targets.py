"""The target texts of membership games: members from the batch, and non-members.

In a *game* a secret bit decides whether a text is one of the batch, and the attack guesses the bit.
A *look* is a measurement at one step. :class:`Sources` draws the texts at each look. Members are
texts of the step's batch. Non-members are the user's held-out texts or, without any, texts of the
batches of earlier looks. Both sides are cut to one length, mixed in random order, and given to the
attack as a query.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch
from torch import Tensor
from torch.nn import functional

from lightning_fedleak import attacks
from lightning_fedleak.engine.options import Games
from lightning_fedleak.engine.outcomes import Waiting
from lightning_fedleak.engine.run import NoTargets
from lightning_fedleak.model.anatomy import Anatomy
from lightning_fedleak.model.batches import IGNORE_INDEX, TokenBatch, before_last
from lightning_fedleak.model.model_runs import hidden_states

SPARE = 4
"""Held-out texts drawn for each member, since some may be too short or in the batch; not tuned."""
EARLIER_LOOKS = 2  # looks at other batches whose texts serve as non-members; not tuned
EARLIER_BATCHES = 2  # micro-batches that are kept of each of these looks; not tuned


@dataclass(frozen=True, repr=False)
class Rows:
    """Hold the sentences of one or more batches, one in each row.

    Attributes:
        ids: The token ids, (N, L) int64; any id at padding.
        real: True at tokens and False at padding, (N, L) bool.
        masked: Whether the batches came with attention masks.
        labels: The tokens that the loss of a causal model counts as labels, (N, L) bool; in other
            models all tokens of a row that has a label.
    """

    ids: Tensor
    real: Tensor
    masked: bool
    labels: Tensor

    def __len__(self) -> int:
        return len(self.ids)

    @classmethod
    def from_batches(cls, batches: Sequence[TokenBatch]) -> Rows:
        """Return the documents of ``batches``, each in a row, padded on the right to one length.

        A row that is padded on the left keeps that padding. In a model that counts learned
        positions from the first column (GPT-2, BERT, unless the batch has position ids) the padding
        shifts the positions by an offset that a server cannot see. To use the right offset is the
        worst case: a server with a neuron for each offset up to the length finds it too.

        Raises:
            BatchError: Documents in a row are not read as they would be alone.
        """
        batches = [batch.by_document() for batch in batches]
        length = max(b.input_ids.shape[1] for b in batches)
        ids, real, labels = [], [], []
        for batch in batches:
            mask = batch.attention_mask
            padding = (0, length - batch.input_ids.shape[1])
            ids.append(functional.pad(batch.input_ids.long(), padding))
            attended = torch.ones_like(batch.input_ids) if mask is None else mask
            real.append(functional.pad(attended != 0, padding))
            counted = torch.ones_like(batch.input_ids, dtype=torch.bool)
            if batch.labels is not None:
                labelled = (batch.labels != IGNORE_INDEX).to(counted.device)
                has_label = labelled.flatten(1).any(1) if labelled.dim() > 1 else labelled
                counted = (
                    labelled if batch.kind == "causal" else has_label[:, None].expand_as(counted)
                )
            labels.append(functional.pad(counted, padding, value=True))
        masked = any(b.attention_mask is not None for b in batches)
        return cls(torch.cat(ids), torch.cat(real), masked, torch.cat(labels))

    def shuffled(self, generator: torch.Generator, special: frozenset[int]) -> Rows:
        """Return the rows with all tokens but the special ones shuffled over rows and positions."""
        fixed = torch.tensor(sorted(special), device=self.ids.device, dtype=self.ids.dtype)
        places = (self.real & ~torch.isin(self.ids, fixed)).flatten().nonzero()[:, 0]
        order = torch.randperm(len(places), generator=generator).to(places.device)
        ids = self.ids.flatten().clone()
        ids[places] = ids[places[order]]
        return replace(self, ids=ids.view_as(self.ids))

    @classmethod
    def from_texts(cls, texts: Sequence[Tensor], like: Rows) -> Rows:
        """Return rows of texts (1-D token ids), cut to the length of ``like``."""
        device, length = like.ids.device, like.ids.shape[1]
        cut = [t[:length].to(device)[None] for t in texts]
        rows = cls.from_batches([TokenBatch(t, None, None, "causal") for t in cut])
        return cls(rows.ids, rows.real, like.masked, rows.labels)

    def joined(self, other: Rows) -> Rows:
        """Return these rows, followed by those of ``other``."""
        length = max(self.ids.shape[1], other.ids.shape[1])

        def join(name: str) -> Tensor:
            device = self.ids.device
            columns: list[Tensor] = [getattr(rows, name) for rows in (self, other)]
            padded = [functional.pad(c, (0, length - c.shape[1])).to(device) for c in columns]
            return torch.cat(padded)

        masked = self.masked or other.masked
        return Rows(join("ids"), join("real"), masked, join("labels"))

    def __getitem__(self, index: Tensor) -> Rows:
        index = index.to(self.ids.device)
        return Rows(self.ids[index], self.real[index], self.masked, self.labels[index])

    def trimmed(self) -> Rows:
        """Return the rows without the columns on the right that are only padding."""
        end = int(self.real.any(0).nonzero().max()) + 1
        return Rows(self.ids[:, :end], self.real[:, :end], self.masked, self.labels[:, :end])

    def texts(self) -> Tensor:
        """Return the tokens of each row, moved to the left and followed by -1, (N, L)."""
        order = torch.argsort((~self.real).to(torch.int8), dim=1, stable=True)
        return self.ids.masked_fill(~self.real, -1).gather(1, order)

    def askable(self, special: frozenset[int], *, causal: bool) -> Tensor:
        """Return which tokens an attack may be asked about, see :class:`Sources`, (N, L) bool.

        Args:
            special: The ids that are no targets.
            causal: Whether tokens see only the tokens before them.
        """
        marked = torch.tensor(sorted(special), dtype=torch.int64, device=self.ids.device)
        words = self.real & ~torch.isin(self.ids, marked)
        return words & (before_last(self.real & self.labels) if causal else self.labels)

    def hidden_states(self, anatomy: Anatomy, layer: int) -> Tensor:
        """Return the hidden states of the rows, (N, L, d).

        If the batches had no mask, the model runs on each length of text separately and without
        padding, as it did on the batch; the states are then zero at padding.
        """
        if self.masked:
            return hidden_states(anatomy, layer, self.ids, self.real.long())
        states: Tensor | None = None
        lengths = self.real.sum(1)
        for length in sorted(set(lengths.tolist())):
            same_length = lengths == length
            part = hidden_states(anatomy, layer, self.ids[same_length, :length])
            if states is None:
                states = part.new_zeros(*self.ids.shape, part.shape[-1])
            states[same_length.to(states.device), :length] = part
        assert states is not None
        return states

    def query(self, positions: Tensor) -> attacks.Query:
        """Return the query for an attack, with id 0 at padding, so that it reveals no source."""
        ids = self.ids.masked_fill(~self.real, 0)
        labels = ids.masked_fill(~(self.real & self.labels), IGNORE_INDEX)
        return attacks.Query(ids, self.real.long(), positions, labels)


@dataclass(frozen=True, repr=False)
class Targets:
    """Hold the targets of the G games of one look.

    An attack on single tokens is asked about the target token of each sentence, other attacks about
    the whole sentence.

    Attributes:
        rows: The target sentences, (G, L).
        positions: The position of the target token of each, (G,).
        members: Whether each is in the batch, which the attack guesses; in random order, (G,) bool
            on the CPU.
        places: The row of each member in the batch, (G,); -1 for non-members.
    """

    rows: Rows
    positions: Tensor
    members: Tensor
    places: Tensor

    def query(self) -> attacks.Query:
        """Return the query that the attack gets."""
        return self.rows.query(self.positions)

    def reached(self, marked: Tensor) -> Targets:
        """Return the members that the loss depends on, and as many non-members.

        Args:
            marked: Whether the loss depends on each member, in their order, (G / 2,) bool.
        """
        selected = torch.zeros_like(self.members)
        selected[self.members.nonzero()[:, 0][marked.cpu()]] = True
        selected[(~self.members).nonzero()[: int(marked.sum()), 0]] = True
        return self.select(selected.nonzero()[:, 0])

    def select(self, index: Tensor) -> Targets:
        """Return the targets with these indices."""
        positions = self.positions[index.to(self.positions.device)]
        return Targets(self.rows[index], positions, self.members[index], self.places[index])


class Sources:
    """Draw the targets of each look, and keep the batches that later looks need.

    In a causal model the target token is the last one that predicts a label, because the loss
    ignores the tokens after it, which have no gradient. In other models it is a random one. A row
    without a label has no gradient, and is neither a member nor a non-member. Tokens that mark the
    beginning or the end of every text are no targets, because early layers compute nearly the same
    state for them in all texts.

    Args:
        games: The settings of games.
        client: The number of this process's client.
        causal: Whether the tokens of the model see only the tokens before them.
        special: The ids of tokens that are no targets.
    """

    def __init__(
        self, games: Games, client: int, *, causal: bool, special: frozenset[int] = frozenset()
    ) -> None:
        self._max_members, self._causal, self._special = games.targets, causal, special
        self._held_out = None if games.held_out is None else games.held_out.sentences
        self._client = client
        self._earlier: list[list[TokenBatch]] = []

    def remember(self, batches: Sequence[TokenBatch]) -> None:
        """Keep references to a look's batches, whose texts are non-members at a later look.

        An earlier look at the same batches is replaced: a loader without shuffling repeats them in
        every epoch.
        """
        recent = [batch for batch in batches if batch.input_ids.numel()][-EARLIER_BATCHES:]
        if self._held_out is None and recent:
            ids = recent[-1].input_ids
            earlier = [look for look in self._earlier if not torch.equal(look[-1].input_ids, ids)]
            self._earlier = [*earlier, recent][-EARLIER_LOOKS:]

    def population(
        self, step: int, batches: Sequence[TokenBatch], *, shuffled: bool = False
    ) -> Targets | Waiting:
        """Return members and non-members, or why there are none yet.

        Args:
            step: The optimizer step.
            batches: The micro-batches of the step.
            shuffled: Whether to shuffle the tokens of non-members. Those of a *control*, the same
                step on known words, are shuffled too.

        Raises:
            BatchError: Documents in a row are not read as they would be alone.
            NoTargets: No sentence of the batch can be a target.
        """
        # The seed depends only on the step and the client, so that a resumed run draws the same.
        generator = torch.Generator().manual_seed(1_000_003 * step + self._client)
        inside, outside = Rows.from_batches(batches), None
        if self._held_out is not None:
            # More than are needed, since some may be too short or in the batch.
            order = torch.randperm(len(self._held_out), generator=generator)
            drawn = order[: SPARE * self._max_members].tolist()
            outside = Rows.from_texts([self._held_out[i] for i in drawn], like=inside)
        elif self._earlier:
            outside = Rows.from_batches([*chain.from_iterable(self._earlier)])
        targets = None
        if outside is not None:
            outside = outside.shuffled(generator, self._special) if shuffled else outside
            targets = self.draw(inside, outside, generator)
        return targets or Waiting(
            "membership needs texts outside this batch: later batches bring some, or pass "
            "games=Games(held_out=texts)",
            soon=outside is None,
        )

    def draw(self, inside: Rows, outside: Rows, generator: torch.Generator) -> Targets | None:
        """Draw sentences of the batch, and as many that are not in it, without duplicates.

        Args:
            inside: The batch of the step.
            outside: Other sentences. Those that are also in the batch are excluded.
            generator: The source of randomness, on the CPU.

        Returns:
            The targets; None if ``outside`` holds no possible target.

        Raises:
            NoTargets: No sentence of the batch can be a target.
        """
        both = inside.joined(outside)
        _, inverse = torch.unique(both.texts(), dim=0, return_inverse=True)
        text_ids = inverse.tolist()
        askable = both.askable(self._special, causal=self._causal)
        long_enough = askable.any(1).tolist()
        n = len(inside)
        batch_texts = set(text_ids[:n])
        members = {text_ids[i]: i for i in range(n) if long_enough[i]}
        non_members = {
            text_ids[i]: i
            for i in range(n, len(both))
            if long_enough[i] and text_ids[i] not in batch_texts
        }
        if not members:
            raise NoTargets("no sentence of the batch has a label and a token that is not special")
        count = min(self._max_members, len(members), len(non_members))
        if count == 0:
            return None
        places = _choose(list(members.values()), count, generator)
        chosen = torch.cat([places, _choose(list(non_members.values()), count, generator)])
        rows, askable = both[chosen].trimmed(), askable[chosen.to(askable.device)]
        positions = _choose_token(askable, generator, causal=self._causal)
        places = torch.cat([places, torch.full((count,), -1)])
        targets = Targets(rows, positions, places >= 0, places)
        # The attack sees the order, which must not reveal the bits.
        return targets.select(torch.randperm(2 * count, generator=generator))


def _choose(values: list[int], count: int, generator: torch.Generator) -> Tensor:
    """Return ``count`` of the values in random order, (count,)."""
    return torch.tensor(values)[torch.randperm(len(values), generator=generator)[:count]]


def _choose_token(askable: Tensor, generator: torch.Generator, *, causal: bool) -> Tensor:
    """Return the column of a possible target in each row, the last or a random one, (G,)."""
    order = torch.argsort((~askable).to(torch.int8), dim=1, stable=True)
    n = askable.sum(1)
    if causal:
        nth = n - 1
    else:
        share = torch.rand(len(askable), generator=generator, dtype=torch.float64)
        nth = (share.to(n.device) * n).long()
    return order.gather(1, nth[:, None])[:, 0]


def check_held_out(attack: attacks.Attack, held_out: attacks.PublicText | None) -> None:
    """Refuse held-out texts on which a membership attack was calibrated.

    Raises:
        ValueError: The attack's public text is the held-out text.
    """
    public = getattr(attack, "public_text", None)
    if held_out is None or not isinstance(public, attacks.PublicText):
        return
    both = zip(public.sentences, held_out.sentences, strict=False)
    if len(public) == len(held_out) and all(torch.equal(a, b) for a, b in both):
        raise ValueError(
            f"held_out= is the public text that '{attack.name}' is calibrated on, so that it would "
            "know the games' non-members: split the text, a part for each"
        )


def with_gradient(
    attack: attacks.MembershipAttack, targets: Targets, upstream: Sequence[Tensor]
) -> Targets:
    """Return the targets without the tokens of the batch that the loss ignores.

    Their gradient is always exactly zero. A server that chooses its layers would avoid such tokens,
    so that they must not count as kept secret.

    Args:
        attack: The attack, on single tokens or on whole sentences.
        targets: The targets.
        upstream: The gradient that reaches the server's layers from each micro-batch, (B, L) for
            each token or (B, 1) for each sentence.

    Raises:
        UnusableObservation: The loss depends on no target.
    """
    rows = [row for batch in upstream for row in batch]
    targeted = zip(targets.places.tolist(), targets.positions.tolist(), strict=True)
    token = attack.granularity == "token"
    gradients = torch.stack(
        [rows[row][column if token else 0] for row, column in targeted if row >= 0]
    )
    if not bool((gradients != 0).any()):
        raise attacks.UnusableObservation(
            f"the loss does not depend on the hidden states at layer {attack.layer} of any of the "
            f"{len(gradients)} tokens asked for: choose a lower layer"
        )
    return targets.reached(gradients != 0)
