"""A client in a game: its loss, its hidden states, its gradients in crafted layers of its model."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from lightning_fedleak.evaluation.games.pool import Challenge, pad
from lightning_fedleak.model.anatomy import EMBEDDING_WEIGHT, Anatomy, place_of
from lightning_fedleak.model.batches import IGNORE_INDEX, TokenBatch
from lightning_fedleak.model.model_runs import hidden_states, stop_behind, undisturbed

PROBE_TOKENS = 4  # before and after the token that tests whether a model reads ahead; not tuned


def client_states(
    anatomy: Anatomy, layers: Sequence[int], ids: Tensor, mask: Tensor | None
) -> dict[int, Tensor]:
    """Return hidden states at several layers, from one forward of the client's whole batch.

    The server embeds its targets with another function
    (:func:`lightning_fedleak.model.model_runs.hidden_states`), because both sides of a game compute
    separately.

    Args:
        anatomy: of the model.
        layers: 0 for the blocks' input, k for the output of block k.
        ids: (B, L).
        mask: (B, L), or None where the client has none.

    Returns:
        (B, L, d) by layer, detached.
    """
    layers = sorted(set(layers))
    places = [place_of(anatomy, layer) for layer in layers]
    device = anatomy.device
    inputs = {"input_ids": ids.to(device)}
    if mask is not None:
        inputs["attention_mask"] = mask.to(device)
    with undisturbed(anatomy) as model, torch.no_grad():
        states = stop_behind(model, places)(**inputs)
    return {layer: x.detach() for layer, x in zip(layers, states, strict=True)}


class PooledStates:
    """Hidden states of sentences, each computed once, in a batch with others of the pool.

    Sentences of a batch do not attend to each other, so a batch that is assembled from these
    differs from a separate forward by rounding alone. Sentences are computed ``batch`` at a time,
    in random groups that are independent of the games, each padded to its longest sentence. A group
    is computed when the first of its sentences is needed.

    Args:
        anatomy: of the model.
        layers: as in :func:`client_states`.
        rows: ids of all sentences that will be needed, all different.
        batch: sentences in a group.
        pad_id: written after the end of a row.
        generator: of the grouping.
        length: None to pad a group to its longest sentence and mask the rest; a number of columns
            to pad to without a mask, so that the model reads padding (as the authors' code does).
    """

    def __init__(
        self,
        anatomy: Anatomy,
        layers: Sequence[int],
        rows: Sequence[Tensor],
        batch: int,
        pad_id: int,
        generator: torch.Generator,
        length: int | None = None,
    ) -> None:
        self.anatomy, self.layers = anatomy, list(layers)
        self.pad_id, self.length = pad_id, length
        order = torch.randperm(len(rows), generator=generator).tolist()
        self.groups = [[rows[i] for i in order[a : a + batch]] for a in range(0, len(order), batch)]
        self.group_of = {_key(row): g for g, group in enumerate(self.groups) for row in group}
        self.states: dict[tuple[int, ...], dict[int, Tensor]] = {}

    def batch_states(self, data: Sequence[Tensor]) -> dict[int, Tensor]:
        """Return (B, L, d) by layer for the batch ``data``, zero after the end of a row."""
        rows = [self._row(row) for row in data]
        return {
            layer: nn.utils.rnn.pad_sequence([states[layer] for states in rows], batch_first=True)
            for layer in self.layers
        }

    def _row(self, row: Tensor) -> dict[int, Tensor]:
        key = _key(row)
        if key not in self.states:
            group = self.groups[self.group_of[key]]
            ids, mask = pad(group, self.pad_id, self.length)
            states = client_states(
                self.anatomy, self.layers, ids, mask if self.length is None else None
            )
            for i, member in enumerate(group):
                length = self.length or len(member)
                self.states[_key(member)] = {k: v[i, :length].clone() for k, v in states.items()}
        return self.states[key]


def _key(row: Tensor) -> tuple[int, ...]:
    return tuple(row.tolist())


def tells_positions_apart(anatomy: Anatomy) -> bool:
    """Return whether one word at two positions has two states at layer 0 (not so under rotary)."""
    states = hidden_states(anatomy, 0, _some_ids(anatomy, 1).expand(1, 2))
    return _differ(states[0, 0], states[0, 1])


def reads_ahead(anatomy: Anatomy, layer: int) -> bool:
    """Return whether a token's hidden state at ``layer`` depends on the tokens after it."""
    prefix, one, other = _some_ids(anatomy, 3 * PROBE_TOKENS).reshape(3, PROBE_TOKENS)
    texts = torch.stack([torch.cat([prefix, one]), torch.cat([prefix, other])])
    states = hidden_states(anatomy, layer, texts)
    return _differ(states[0, PROBE_TOKENS - 1], states[1, PROBE_TOKENS - 1])


def _differ(first: Tensor, second: Tensor) -> bool:
    """Return whether two states differ by more than rounding."""
    difference = (first.double() - second.double()).norm() / first.double().norm()
    return float(difference) > max(2 * torch.finfo(first.dtype).eps, 1e-5)


def _some_ids(anatomy: Anatomy, n: int) -> Tensor:
    """Return (n,) different ids from the middle of the vocabulary on, to skip special tokens."""
    weight = anatomy.parameter(EMBEDDING_WEIGHT)
    size = 2 * n if weight is None else len(weight)
    return (size // 2 + torch.arange(n)) % size


def find_collisions(
    challenge: Challenge,
    *,
    layer: int,
    reads: Callable[[int], slice | None],
    ahead: bool,
    positional: bool,
) -> Tensor:
    """Return where a state that is read from the target occurs elsewhere in the batch D.

    There the assumption of Lemma 1 of Vu et al. 2024 fails.

    At layer 0 a hidden state depends on its word (and position) alone. At a deeper layer of a
    causal model it depends on the words up to its own (under rotary positions not on how often a
    sentence's first word is repeated, because attention over equal values returns that value). In
    other models it depends on the entire text, which is in D once. Several states together depend
    at least on their words, in order (but not on the order for an attack that attends over them at
    layer 0 under rotary positions).

    Args:
        challenge: the batch D, and G targets.
        layer: at which the attack reads.
        reads: the tokens that it reads, from the target's position, see
            :meth:`~lightning_fedleak.attacks.membership.base.MembershipAttack.reads`.
        ahead: see :func:`reads_ahead`.
        positional: see :func:`tells_positions_apart`.

    Returns:
        (G,) bool.
    """
    data, targets, places = challenge.data, challenge.targets, challenge.places.tolist()
    collisions = torch.zeros(len(targets), dtype=torch.bool)
    if layer > 0 and ahead:
        return collisions
    ids = nn.utils.rnn.pad_sequence(list(data), batch_first=True, padding_value=-1)
    longest = max(ids.shape[1], *(len(t) for t in targets))
    ids = nn.functional.pad(ids, (0, longest - ids.shape[1]), value=-1)
    for g, (target, position, place) in enumerate(
        zip(targets, challenge.positions.tolist(), places, strict=True)
    ):
        span = reads(position)
        if span is not None:
            read = nn.functional.pad(target, (0, longest - len(target)), value=-1)[span]
            equal = (ids[:, span] == read).all(1)
        elif layer > 0:
            read = target[: position + 1]
            if not positional and bool((read == read[0]).all()):
                read = read[:1]
            equal = (ids[:, : len(read)] == read).all(1)
        elif positional:
            equal = ids[:, position] == target[position]
        else:
            equal = (ids == target[position]).any(1)
        if place >= 0:
            equal[place] = False
        collisions[g] = bool(equal.any())
    return collisions


def client_batch(anatomy: Anatomy, ids: Tensor, mask: Tensor | None) -> TokenBatch:
    """Return the batch of ids (B, L) whose labels are the ids themselves, except where masked."""
    labels = ids if mask is None else ids.masked_fill(mask == 0, IGNORE_INDEX)
    return TokenBatch(ids, labels, mask, anatomy.kind)


def generic_upstream(hidden: Tensor, whole_sentence: bool, generator: torch.Generator) -> Tensor:
    """Return random numbers of the size of a mean loss's gradients, none of them zero.

    Args:
        hidden: (B, L, d) of the batch.
        whole_sentence: one number for each sentence, (B, 1), in place of (B, L).
        generator: on the CPU.
    """
    shape = (hidden.shape[0], 1 if whole_sentence else hidden.shape[1])
    numbers = torch.randn(shape, generator=generator, dtype=torch.float64)
    smallest = torch.finfo(torch.float32).tiny ** 0.5
    numbers = torch.where(numbers.abs() < smallest, smallest, numbers) / numbers.numel()
    return numbers.to(torch.promote_types(hidden.dtype, torch.float32)).to(hidden.device)
