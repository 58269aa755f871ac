"""Rounds of a client that a dishonest server sent crafted values, played on copies.

The client trains with the values of
:class:`~lightning_fedleak.labs.crafted_words.CraftedAdapterWords`, and once more with those of the
model, from the same texts. The model itself stays as it is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from lightning_fedleak.attacks import RunFacts, WordGuess
from lightning_fedleak.attacks.words.public_gradients import train_copies
from lightning_fedleak.evaluation.games import GameError
from lightning_fedleak.evaluation.metrics import Counts, word_counts
from lightning_fedleak.labs.crafted_words import CraftedAdapterWords
from lightning_fedleak.model.anatomy import Anatomy
from lightning_fedleak.model.batches import TokenBatch
from lightning_fedleak.model.model_runs import micro_batches, token_logits, undisturbed
from lightning_fedleak.model.snapshots import Observation, UpdateSnapshot

Round = Sequence[Sequence[TokenBatch]]
"""It holds, for each client, the batch of each of its local steps."""


@dataclass(frozen=True)
class CraftedRound:
    """What one round showed to a server that had crafted an adapter's values.

    Attributes:
        words: counts of all types that were named.
        rare: the same of types that are in a round with a chance of at most one half.
        usual: of a guess of the other types without any update.
        blind: of a guess of the most frequent types, given the number of types.
        losses: on held-out text, in nats: ``"before"`` the round and ``"honest"`` after it with
            the model's own values, ``"crafted"`` and ``"trapped"`` the same with crafted values;
            NaN without such text.
    """

    words: Counts
    rare: Counts
    usual: Counts
    blind: Counts
    losses: Mapping[str, float]


def play_crafted_rounds(
    anatomy: Anatomy,
    attack: CraftedAdapterWords,
    rounds: Sequence[Round],
    facts: RunFacts,
    *,
    held_out: TokenBatch | None = None,
) -> list[CraftedRound]:
    """Calibrate the attack once, play rounds with the values that it crafts, and score each.

    Args:
        anatomy: of the model, which is not changed.
        attack: the server.
        rounds: of ``attack.shape.clients`` clients each, whose texts the attack has never seen.
        facts: with the optimizer that the server prescribes, and the number of local steps.
        held_out: text on which the losses with and without crafted values are compared.

    Raises:
        GameError: a round has another number of clients or steps than the attack assumes.
        ThreatModelError: the attack refuses the adapter.
        UnusableObservation: a round cannot be played, or nothing was trained on.
    """
    for clients in rounds:
        n = attack.shape.clients
        if len(clients) != n or {len(c) for c in clients} != {facts.local_steps}:
            raise GameError(
                f"a round needs {n} clients (RoundShape.clients) with {facts.local_steps} batches "
                f"each (RunFacts.local_steps); one has {[len(c) for c in clients]} by client"
            )
    attack.needs(anatomy)
    attack.meet(facts)
    attack.prepare(anatomy)
    return [_score(anatomy, attack, clients, held_out) for clients in rounds]


def _score(
    anatomy: Anatomy, attack: CraftedAdapterWords, clients: Round, held_out: TokenBatch | None
) -> CraftedRound:
    update = attack.mean_update(anatomy, clients)
    guess = attack.run(Observation((update,)))
    presence = attack.crafted.rows.presence.cpu()
    truth = torch.unique(torch.cat([b.context_ids() for batches in clients for b in batches]))
    rare = ~attack.usual

    def counts(guessed: Tensor, used: Tensor = truth) -> Counts:
        return word_counts(WordGuess(guessed), used, len(presence))

    return CraftedRound(
        words=counts(guess.types),
        rare=counts(guess.read[rare[guess.read]], truth[rare[truth]]),
        usual=counts((~rare).nonzero()[:, 0]),
        blind=counts(presence.topk(len(truth)).indices),
        losses=_losses(anatomy, attack, clients, update, held_out),
    )


def _losses(
    anatomy: Anatomy,
    attack: CraftedAdapterWords,
    clients: Round,
    update: UpdateSnapshot,
    held_out: TokenBatch | None,
) -> dict[str, float]:
    if held_out is None or len(clients) > 1:
        return dict.fromkeys(("before", "honest", "crafted", "trapped"), math.nan)
    steps = attack._steps(attack._facts)
    trapped = {
        name: attack.values.get(name, anatomy.root.get_parameter(name))
        - update.learning_rate * change
        for name, change in update.tensors.items()
    }
    return {
        "before": _loss(anatomy, held_out, {}),
        "honest": _loss(anatomy, held_out, train_copies(anatomy, clients[0], steps)),
        "crafted": _loss(anatomy, held_out, attack.values),
        "trapped": _loss(anatomy, held_out, trapped),
    }


def _loss(anatomy: Anatomy, batch: TokenBatch, values: Mapping[str, Tensor]) -> float:
    """Return the mean cross-entropy of a batch with other values in the model, by root name."""
    names = {id(p): name for name, p in anatomy.root.named_parameters()}
    model_parameters = anatomy.model.named_parameters()
    views = {n: values[names[id(p)]] for n, p in model_parameters if names[id(p)] in values}
    total, tokens = 0.0, 0
    with undisturbed(anatomy) as model, torch.no_grad():
        for part in micro_batches(anatomy, batch):
            logits, labels = token_logits(model, part, views)
            total += float(functional.cross_entropy(logits.float(), labels, reduction="sum"))
            tokens += len(labels)
    return total / tokens
