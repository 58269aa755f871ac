"""The security game Exp^AMI (Vu et al. 2024, Fig. 2), played many times on a real model and text.

All adversaries of one call play the same games: same data, same bits, same targets. Those that add
no layers guess from the gradient of the parameters that the model trains.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_fedleak.attacks import (
    MembershipAttack,
    PassiveMembership,
    Query,
    RunFacts,
    gradient_of,
)
from lightning_fedleak.evaluation.games.client import (
    PooledStates,
    client_batch,
    client_states,
    find_collisions,
    generic_upstream,
    reads_ahead,
    tells_positions_apart,
)
from lightning_fedleak.evaluation.games.config import GameConfig, GameError, GameResult
from lightning_fedleak.evaluation.games.pool import (
    AUTHORS_POSITION,
    Challenge,
    SentencePool,
    authors_challenges,
    game_challenges,
    pad,
)
from lightning_fedleak.model.anatomy import Anatomy
from lightning_fedleak.model.model_runs import context_length, hidden_states, undisturbed
from lightning_fedleak.model.snapshots import GradientSnapshot, Observation, Stage

Adversary = MembershipAttack | PassiveMembership

Defend = Callable[[Tensor, Tensor | None], Tensor]
"""Ids (B, L) that a client trains on instead of ids (B, L) with mask (B, L) or None."""


def play(
    anatomy: Anatomy,
    attacks: Sequence[Adversary],
    pool: SentencePool,
    config: GameConfig | None = None,
    *,
    planted: Tensor | None = None,
    progress: Callable[[int], object] | None = None,
    defend: Defend | None = None,
) -> list[GameResult]:
    """Play all games, and return what every adversary guessed in each.

    A_init is ``attack.meet`` and ``attack.prepare``, and runs once. In each game the client
    computes the hidden states of its whole batch. The server computes those of its target
    separately, crafts (A_attack), and guesses from the gradient of its
    crafted layers alone (A_guess). A
    :class:`~lightning_fedleak.attacks.membership.base.PassiveMembership` guesses from the gradient
    that the whole batch gives the model's own trained parameters.

    Args:
        anatomy: of the model, which is not changed.
        attacks: the adversaries.
        pool: the sentences that data and targets are drawn from.
        config: how the games are played; default :class:`GameConfig`.
        planted: ids of the sentence that the authors' protocol plants.
        progress: called with the number of games played since the last call.
        defend: a defence of the client's token ids, called for every batch; the adversary knows of
            it (:meth:`~lightning_fedleak.attacks.base.Attack.meet`). The server's own forwards and
            the collisions use the true text. Needs ``forwards="fresh"``.

    Returns:
        One result for each attack, in order.

    Raises:
        GameError: the settings, the text and the model do not go together, or an attack refuses
            the model (a layer out of range, say) or its public text.
        UnusableObservation: a gradient was not finite.
    """
    config = config or GameConfig()
    if planted is not None:
        planted = planted[: pool.tokens]
    run = _GameRun(anatomy, attacks, pool, config, planted, defend)
    spare = 1 if anatomy.kind == "causal" else 0
    for number, challenge in enumerate(_challenges(pool, config, planted, spare)):
        run.play(number, challenge)
        if progress is not None:
            progress(len(challenge.bits))
    return run.results()


def _challenges(
    pool: SentencePool, config: GameConfig, planted: Tensor | None, spare: int
) -> Iterator[Challenge]:
    if config.protocol == "authors":
        if planted is None:
            raise GameError("the authors' protocol needs planted=, the ids of its fixed sentence")
        return authors_challenges(pool.rows, planted, config.batch, config.games, AUTHORS_POSITION)
    return game_challenges(pool, config, spare)


def _prepare(attack: Adversary, anatomy: Anatomy) -> None:
    """Run A_init.

    Raises:
        ValueError: the attack refuses the model or its public text.
    """
    passive = isinstance(attack, PassiveMembership)
    if passive and anatomy.kind != "causal":
        raise ValueError(
            f"reads the gradient of a loss, whose labels this game does not have for a "
            f"{anatomy.kind} model: play FCMembership (fedleak game --attack fc)"
        )
    attack.check_device(anatomy)
    attack.prepare(anatomy)
    if passive:
        attack.refresh(anatomy, 0)


@dataclass(frozen=True)
class _Client:
    """One batch of the client: ids and mask (B, L), hidden states (B, L, d) by layer."""

    ids: Tensor
    mask: Tensor | None
    hidden: dict[int, Tensor]


class _GameRun:
    """One challenger, all adversaries, and their guesses so far."""

    def __init__(
        self,
        anatomy: Anatomy,
        attacks: Sequence[Adversary],
        pool: SentencePool,
        config: GameConfig,
        planted: Tensor | None,
        defend: Defend | None = None,
    ) -> None:
        if defend is not None and config.forwards == "pooled":
            raise GameError("defend= changes every batch and needs forwards='fresh'")
        context = context_length(anatomy)
        if context is not None and pool.tokens > context:
            raise GameError(
                f"targets of up to {pool.tokens} tokens do not fit into the model's context of "
                f"{context}: make the pool with tokens={context} or fewer"
            )
        facts = RunFacts() if defend is None else RunFacts(defended=frozenset({"batches"}))
        for attack in attacks:
            attack.meet(facts)
            try:
                _prepare(attack, anatomy)
            except ValueError as error:
                raise GameError(f"attack '{attack.name}': {error}") from error
        self.anatomy, self.attacks, self.pool = anatomy, attacks, pool
        self.config, self.defend = config, defend
        self.layers = sorted({a.layer for a in attacks if isinstance(a, MembershipAttack)})
        self.passive = [a for a in attacks if isinstance(a, PassiveMembership)]
        self.roles = tuple(
            dict.fromkeys(role for a in self.passive for role in a.needs(anatomy).gradients)
        )
        self.ahead = {k: k > 0 and reads_ahead(anatomy, k) for k in self.layers}
        self.positional = tells_positions_apart(anatomy)
        self.client_generator = torch.Generator().manual_seed(config.seed + 1)
        pooled = config.forwards == "pooled" and self.layers
        self.pooled = self._pool_states(planted) if pooled else None
        self.truth: dict[str, list[Tensor]] = {"bits": [], "batches": [], "positions": []}
        self.guesses: list[dict[str, list[Tensor]]] = [
            {"guesses": [], "scores": [], "collides": []} for _ in attacks
        ]
        self.seconds = [0.0] * len(attacks)
        self.dtype = ""

    def _pool_states(self, planted: Tensor | None) -> PooledStates:
        authors = self.config.protocol == "authors"
        rows = [*self.pool.rows, *([planted] if authors and planted is not None else [])]
        return PooledStates(
            self.anatomy,
            self.layers,
            rows,
            self.config.batch,
            self.pool.pad_id,
            self.client_generator,
            self.pool.tokens if authors else None,
        )

    def play(self, number: int, challenge: Challenge) -> None:
        """Play the games of one challenge."""
        client = self._client_batch(number, challenge)
        query, embedded = self._server_states(challenge)
        shared = self._shared(client) if self.passive else None
        upstreams: dict[tuple[int, str], Tensor] = {}
        for a, (attack, columns) in enumerate(zip(self.attacks, self.guesses, strict=True)):
            start = time.perf_counter()
            if isinstance(attack, PassiveMembership):
                assert shared is not None
                guess = attack.run(Observation((shared,)), query)
                collides = torch.zeros_like(challenge.bits)
            else:
                hidden, kind = client.hidden[attack.layer], (attack.layer, attack.granularity)
                if kind not in upstreams:
                    whole = attack.granularity == "full"
                    upstreams[kind] = generic_upstream(hidden, whole, self.client_generator)
                    start = time.perf_counter()
                targets = attack.embed(embedded[attack.layer], query)
                self.dtype = str(embedded[attack.layer].dtype).removeprefix("torch.")
                gradient = attack.gradient(targets, hidden, client.mask, upstreams[kind]).sum(0)
                guess = attack.guess(gradient)
                collides = find_collisions(
                    challenge,
                    layer=attack.layer,
                    reads=attack.reads,
                    ahead=self.ahead[attack.layer],
                    positional=self.positional,
                )
            self.seconds[a] += time.perf_counter() - start
            columns["guesses"].append(guess.members.detach().cpu())
            columns["scores"].append(guess.scores.detach().cpu().double())
            columns["collides"].append(collides)
        self.truth["bits"].append(challenge.bits)
        self.truth["positions"].append(challenge.positions)
        self.truth["batches"].append(torch.full_like(challenge.positions, number))

    def _shared(self, client: _Client) -> GradientSnapshot:
        """Return the gradient of the client's batch in the parameters that are read."""
        batch = client_batch(self.anatomy, client.ids, client.mask)
        gradients = gradient_of(self.anatomy, batch, self.roles)
        self.dtype = str(next(iter(gradients.values())).dtype).removeprefix("torch.")
        return GradientSnapshot(0, Stage.SHARED, gradients)

    def results(self) -> list[GameResult]:
        """Return what each attack guessed, in order."""
        truth = {name: torch.cat(values) for name, values in self.truth.items()}
        results = []
        for attack, columns, seconds in zip(self.attacks, self.guesses, self.seconds, strict=True):
            all_columns = {name: torch.cat(values) for name, values in columns.items()}
            if self.config.protocol == "authors":
                all_columns["guesses"] = all_columns["scores"] > all_columns["scores"].mean()
            results.append(
                GameResult(
                    attack=attack.name,
                    layer=attack.layer if isinstance(attack, MembershipAttack) else None,
                    granularity=(
                        attack.granularity if isinstance(attack, MembershipAttack) else "text"
                    ),
                    **truth,
                    **all_columns,
                    protocol=self.config.protocol,
                    relation=self.config.relation,
                    dtype=self.dtype,
                    seconds=seconds,
                )
            )
        return results

    def _client_batch(self, number: int, challenge: Challenge) -> _Client:
        ids, mask = self._pad(challenge.data)
        if self.defend is not None:
            ids = self.defend(ids, mask)
        if not self.layers:
            return _Client(ids, mask, {})
        if self.pooled is not None:
            return _Client(ids, mask, self.pooled.batch_states(challenge.data))
        return _Client(ids, mask, client_states(self.anatomy, self.layers, ids, mask))

    def _pad(self, rows: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
        """Return ids and mask on the model's device; the authors' model reads the padding."""
        authors = self.config.protocol == "authors"
        ids, mask = pad(rows, self.pool.pad_id, self.pool.tokens if authors else None)
        device = self.anatomy.device
        return ids.to(device), None if authors else mask.to(device)

    def _server_states(self, challenge: Challenge) -> tuple[Query, dict[int, Tensor]]:
        """Return the targets, and their states (G, L, d) by layer from the server's forwards."""
        ids, mask = self._pad(challenge.targets)
        query = Query(ids, mask, challenge.positions.to(self.anatomy.device))
        if self.config.protocol == "authors":
            return query, {k: hidden_states(self.anatomy, k, ids) for k in self.layers}
        with undisturbed(self.anatomy):
            states = {
                k: [hidden_states(self.anatomy, k, t[None])[0] for t in challenge.targets]
                for k in self.layers
            }
        return query, {
            k: nn.utils.rnn.pad_sequence(rows, batch_first=True) for k, rows in states.items()
        }
