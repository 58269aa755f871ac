"""The security game Exp^AMI (Vu et al. 2024, Fig. 2), repeated many times on a real model and text.

:func:`play` runs all adversaries of one call on the same games: same data, same bits, same targets.
Active adversaries add crafted layers to the model. Passive ones guess from the gradient of the
parameters that the model trains. In the paper an adversary has three parts: A_init prepares it
once, A_attack crafts the layers for a target sentence, and A_guess guesses the bit from their
gradient. In a *collision* the state that the attack reads is also in another sentence of the batch.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from lightning_fedleak import attacks as readers
from lightning_fedleak.evaluation.games import pool as pools
from lightning_fedleak.evaluation.games.pool import GameConfig, GameResult
from lightning_fedleak.model import model_runs
from lightning_fedleak.model.anatomy import EMBEDDING_WEIGHT, Anatomy, place_of
from lightning_fedleak.model.batches import IGNORE_INDEX, TokenBatch
from lightning_fedleak.model.snapshots import GradientSnapshot, Observation, Stage
from lightning_fedleak.validate import check_integer, explain_errors

PROBE_TOKENS = 4  # tokens of a prefix, and of the texts after it, that test for reading ahead


def client_states(
    anatomy: Anatomy, layers: Sequence[int], ids: Tensor, mask: Tensor
) -> dict[int, Tensor]:
    """Return hidden states at several layers, from one forward of the client's whole batch.

    The server embeds its targets with another function
    (:func:`lightning_fedleak.model.model_runs.hidden_states`), because both sides of a game compute
    separately.

    Args:
        anatomy: The anatomy of the model.
        layers: The layers: 0 is the blocks' input, k is the output of block k.
        ids: (B, L) token ids.
        mask: (B, L) the attention mask.

    Returns:
        (B, L, d) by layer, detached.
    """
    layers = sorted(set(layers))
    places = [place_of(anatomy, layer) for layer in layers]
    device = anatomy.device
    inputs = {"input_ids": ids.to(device), "attention_mask": mask.to(device)}
    with model_runs.undisturbed(anatomy) as model, torch.no_grad():
        states = model_runs.stop_behind(model, places)(**inputs)
    return {layer: x.detach() for layer, x in zip(layers, states, strict=True)}


def distinguishes_positions(anatomy: Anatomy) -> bool:
    """Return whether one word at two positions has two states at layer 0 (not so under rotary)."""
    states = model_runs.hidden_states(anatomy, 0, _distinct_ids(anatomy, 1).expand(1, 2))
    return _differ(states[0, 0], states[0, 1])


def reads_ahead(anatomy: Anatomy, layer: int) -> bool:
    """Return whether a token's hidden state at ``layer`` depends on the tokens after it."""
    prefix, end, other_end = _distinct_ids(anatomy, 3 * PROBE_TOKENS).reshape(3, PROBE_TOKENS)
    texts = torch.stack([torch.cat([prefix, end]), torch.cat([prefix, other_end])])
    states = model_runs.hidden_states(anatomy, layer, texts)
    return _differ(states[0, PROBE_TOKENS - 1], states[1, PROBE_TOKENS - 1])


def _differ(first: Tensor, second: Tensor) -> bool:
    """Return whether two states differ by more than rounding."""
    difference = (first.double() - second.double()).norm() / first.double().norm()
    # 1e-5: above the rounding of float32 through all blocks; bf16 has a larger unit.
    return float(difference) > max(2 * torch.finfo(first.dtype).eps, 1e-5)


def _distinct_ids(anatomy: Anatomy, n: int) -> Tensor:
    """Return (n,) different ids from the middle of the vocabulary on, to skip special tokens."""
    weight = anatomy.parameter(EMBEDDING_WEIGHT)
    size = 2 * n if weight is None else len(weight)
    return (size // 2 + torch.arange(n)) % size


def find_collisions(
    challenge: pools.Challenge,
    *,
    layer: int,
    reads: Callable[[int], slice | None],
    ahead: bool,
    positional: bool,
) -> Tensor:
    """Return the targets whose attacked state also occurs elsewhere in the batch D.

    For them, the assumption of Lemma 1 of Vu et al. 2024 fails.

    At layer 0 a hidden state depends on its word (and position) alone. At a deeper layer of a
    causal model it depends on the words up to its own (under rotary positions not on how often a
    sentence's first word is repeated, because attention over equal values returns that value). In
    other models it depends on the entire text, which is in D once. Several states together depend
    at least on their words, in order (but not on the order for an attack that attends over them at
    layer 0 under rotary positions).

    Args:
        challenge: The batch D, and G targets.
        layer: The layer at which the attack reads.
        reads: A function from the target's position to the tokens that the attack reads, see
            :meth:`~lightning_fedleak.attacks.membership.base.MembershipAttack.reads`.
        ahead: Whether states depend on later tokens, see :func:`reads_ahead`.
        positional: Whether layer 0 distinguishes positions, see :func:`distinguishes_positions`.

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


def generic_upstream(hidden: Tensor, whole_sentence: bool, generator: torch.Generator) -> Tensor:
    """Return random numbers of the size of a mean loss's gradients, none of them zero.

    Args:
        hidden: (B, L, d) hidden states of the batch.
        whole_sentence: Whether to return a number for each sentence, (B, 1), not (B, L).
        generator: A generator on the CPU.
    """
    shape = (hidden.shape[0], 1 if whole_sentence else hidden.shape[1])
    numbers = torch.randn(shape, generator=generator, dtype=torch.float64)
    smallest = torch.finfo(torch.float32).tiny ** 0.5
    numbers = torch.where(numbers.abs() < smallest, smallest, numbers) / numbers.numel()
    return numbers.to(torch.promote_types(hidden.dtype, torch.float32)).to(hidden.device)


Adversary = readers.MembershipAttack | readers.PassiveMembership

Defend = Callable[[Tensor, Tensor], Tensor]
"""A defence: from ids (B, L) and mask (B, L) to the ids (B, L) that are trained on."""


def play(
    anatomy: Anatomy,
    attacks: Sequence[Adversary],
    pool: pools.SentencePool,
    config: GameConfig | None = None,
    *,
    challenges: Iterable[pools.Challenge] | None = None,
    defend: Defend | None = None,
) -> list[GameResult]:
    """Play all games, and return the guesses of every adversary.

    A_init is ``attack.meet`` and ``attack.prepare``, and runs once. In each game the client
    computes the hidden states of its whole batch. The server computes those of its target
    separately, crafts layers (A_attack), and guesses from their gradient only (A_guess). A
    :class:`~lightning_fedleak.attacks.membership.base.PassiveMembership` guesses from the gradient
    that the whole batch gives the model's own trained parameters.

    Args:
        anatomy: The anatomy of the model, which is not changed.
        attacks: The adversaries.
        pool: The sentences from which data and targets are drawn.
        config: The settings of the games; by default ``GameConfig()``.
        challenges: The batches and targets, for another protocol; None for those of Fig. 2.
        defend: A defence of the client's token ids, called for every batch; the adversary knows of
            it (:meth:`~lightning_fedleak.attacks.base.Attack.meet`). The server's own forwards and
            the collisions use the true text.

    Returns:
        One result for each attack, in order.

    Raises:
        ValueError: The settings, the text and the model do not fit each other, or an attack refuses
            the model (for example a layer out of range) or its public text.
        UnusableObservation: A gradient was not finite.
    """
    config = config or GameConfig()
    run = _GameRun(anatomy, attacks, pool, config, defend)
    if challenges is None:
        # The last token of a text predicts nothing: a causal model's loss has no gradient there.
        challenges = pools.game_challenges(pool, config, 1 if anatomy.kind == "causal" else 0)
    for number, challenge in enumerate(challenges):
        run.play(number, challenge)
    return run.results()


def _prepare(attack: Adversary, anatomy: Anatomy) -> None:
    """Run A_init: check the model and the device, and prepare the attack."""
    passive = isinstance(attack, readers.PassiveMembership)
    if passive and anatomy.kind != "causal":
        raise ValueError(f"knows no labels of a {anatomy.kind} model: play FCMembership")
    attack.check_device(anatomy)
    attack.prepare(anatomy)
    if passive:
        attack.refresh(anatomy, 0)


class _GameRun:
    """The challenger, the adversaries, and the guesses in the games so far."""

    def __init__(
        self,
        anatomy: Anatomy,
        attacks: Sequence[Adversary],
        pool: pools.SentencePool,
        config: GameConfig,
        defend: Defend | None,
    ) -> None:
        check_integer("tokens", pool.tokens, at_most=model_runs.context_length(anatomy))
        facts = readers.RunFacts(defended=frozenset({"batches"} if defend else ()))
        for attack in attacks:
            attack.meet(facts)
            with explain_errors(f"attack '{attack.name}'", ValueError, error=ValueError):
                _prepare(attack, anatomy)
        self.anatomy, self.attacks, self.pool = anatomy, attacks, pool
        self.config, self.defend = config, defend
        self.layers = sorted({a.layer for a in attacks if isinstance(a, readers.MembershipAttack)})
        self.passive = [a for a in attacks if isinstance(a, readers.PassiveMembership)]
        self.roles = tuple(
            dict.fromkeys(role for a in self.passive for role in a.needs(anatomy).gradients)
        )
        self.ahead = {k: k > 0 and reads_ahead(anatomy, k) for k in self.layers}
        self.positional = distinguishes_positions(anatomy)
        # Not the seed of the challenges: the client's draws must be independent of them.
        self.client_generator = torch.Generator().manual_seed(config.seed + 1)
        self.truth: dict[str, list[Tensor]] = {"bits": [], "batches": [], "positions": []}
        self.guesses: list[dict[str, list[Tensor]]] = [
            {"guesses": [], "scores": [], "collides": []} for _ in attacks
        ]

    def play(self, number: int, challenge: pools.Challenge) -> None:
        """Play the games of one challenge."""
        ids, mask, states = self._client_batch(challenge)
        query, embedded = self._server_states(challenge)
        shared = self._shared_gradient(ids, mask) if self.passive else None
        upstreams: dict[tuple[int, str], Tensor] = {}
        for attack, columns in zip(self.attacks, self.guesses, strict=True):
            if isinstance(attack, readers.PassiveMembership):
                assert shared is not None
                guess = attack.run(Observation((shared,)), query)
                collides = torch.zeros_like(challenge.bits)
            else:
                hidden, key = states[attack.layer], (attack.layer, attack.granularity)
                if key not in upstreams:
                    whole = attack.granularity == "full"
                    upstreams[key] = generic_upstream(hidden, whole, self.client_generator)
                targets = attack.embed(embedded[attack.layer], query)
                gradient = attack.gradient(targets, hidden, mask, upstreams[key]).sum(0)
                guess = attack.guess(gradient)
                collides = find_collisions(
                    challenge,
                    layer=attack.layer,
                    reads=attack.reads,
                    ahead=self.ahead[attack.layer],
                    positional=self.positional,
                )
            columns["guesses"].append(guess.members.detach().cpu())
            columns["scores"].append(guess.scores.detach().cpu().double())
            columns["collides"].append(collides)
        self.truth["bits"].append(challenge.bits)
        self.truth["positions"].append(challenge.positions)
        self.truth["batches"].append(torch.full_like(challenge.positions, number))

    def _shared_gradient(self, ids: Tensor, mask: Tensor) -> GradientSnapshot:
        """Return the gradient of the client's batch in the parameters that passive attacks need."""
        labels = ids.masked_fill(mask == 0, IGNORE_INDEX)
        batch = TokenBatch(ids, labels, mask, self.anatomy.kind)
        gradients = readers.gradient_of(self.anatomy, batch, self.roles)
        return GradientSnapshot(0, Stage.SHARED, gradients)

    def results(self) -> list[GameResult]:
        """Return the result of each attack, in order."""
        truth = {name: torch.cat(values) for name, values in self.truth.items()}
        results = []
        for attack, columns in zip(self.attacks, self.guesses, strict=True):
            crafted = attack if isinstance(attack, readers.MembershipAttack) else None
            all_columns = {name: torch.cat(values) for name, values in columns.items()}
            results.append(
                GameResult(
                    attack=attack.name,
                    layer=crafted.layer if crafted else None,
                    granularity=crafted.granularity if crafted else "text",
                    **truth,
                    **all_columns,
                    relation=self.config.relation,
                )
            )
        return results

    def _client_batch(self, challenge: pools.Challenge) -> tuple[Tensor, Tensor, dict[int, Tensor]]:
        """Return ids and mask (B, L) of the client's batch, and its states by layer."""
        ids, mask = self._pad(challenge.data)
        if self.defend is not None:
            ids = self.defend(ids, mask)
        if not self.layers:
            return ids, mask, {}
        return ids, mask, client_states(self.anatomy, self.layers, ids, mask)

    def _pad(self, rows: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return ids and mask on the model's device."""
        ids, mask = pools.pad(rows, self.pool.pad_id)
        return ids.to(self.anatomy.device), mask.to(self.anatomy.device)

    def _server_states(self, challenge: pools.Challenge) -> tuple[readers.Query, dict[int, Tensor]]:
        """Return the targets, and their states (G, L, d) by layer from the server's forwards."""
        ids, mask = self._pad(challenge.targets)
        query = readers.Query(ids, mask, challenge.positions.to(self.anatomy.device))
        with model_runs.undisturbed(self.anatomy):
            states = {
                k: [
                    model_runs.hidden_states(self.anatomy, k, t[None])[0] for t in challenge.targets
                ]
                for k in self.layers
            }
        return query, {
            k: nn.utils.rnn.pad_sequence(rows, batch_first=True) for k, rows in states.items()
        }
