"""Membership games on a live training step: canaries that are computed beside it.

A dishonest server's layers are not put into the model. Their gradient follows from the hidden
states of the step's own batch and from the gradient of the user's own loss there
(:meth:`~lightning_fedleak.attacks.membership.MembershipAttack.gradient`), and then goes the way of
every gradient, through the defences. The hidden states are those of an eval-mode forward without
gradient, since a dishonest server sets dropout to 0. Training sees nothing of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import lightning.pytorch as L
import torch
from torch import Tensor, nn

from lightning_fedleak.activations import ActivationTap
from lightning_fedleak.anatomy import Anatomy
from lightning_fedleak.anatomy.wrappers import without_peft
from lightning_fedleak.attacks.base import UnusableObservation
from lightning_fedleak.attacks.hidden import hidden_states
from lightning_fedleak.attacks.insertion import direction_of, upstream_of
from lightning_fedleak.attacks.membership import CRAFTED, MembershipAttack
from lightning_fedleak.batches import TokenBatch
from lightning_fedleak.callbacks.kinds import Played
from lightning_fedleak.callbacks.ledger import AUDIT
from lightning_fedleak.callbacks.look import Look, reason
from lightning_fedleak.callbacks.model_ids import ModelIds
from lightning_fedleak.callbacks.outcome import Waiting
from lightning_fedleak.callbacks.sources import GameSettings, Sources
from lightning_fedleak.callbacks.targets import Rows, Targets, special_ids
from lightning_fedleak.defenses import CanaryGradient, Defense, DefenseContext
from lightning_fedleak.snapshots import GradientSnapshot, Observation, Stage
from lightning_fedleak.strategies import DefendedStrategy

_EVERY = "every canary"
_AT_ONCE = 64


@dataclass(frozen=True)
class _Games:
    """The games of one attack at one look.

    Attributes:
        asked: the targets.
        canary: the gradient of their crafted layers, on its way out.
    """

    asked: Targets
    canary: CanaryGradient


@dataclass
class _Table:
    """The games of one look that are about one kind of texts.

    Attributes:
        asked: the targets, or why there are none (yet).
        games: by the attack's name; or why there are none.
        whole: all of them are asked for, also where the loss looks away.
    """

    asked: Targets | Waiting | str
    games: dict[str, _Games | str] = field(default_factory=dict)
    whole: bool = False


@dataclass(frozen=True)
class _Layer:
    """One layer at one look.

    Attributes:
        client: (B, L, d) hidden states of each micro-batch.
        gradients: (B, L, d) of the loss in them.
    """

    client: Sequence[Tensor]
    gradients: Sequence[Tensor]


class LiveGames:
    """The membership games of one fit: at each look the bits are drawn, the attacks guess.

    The server's copy of the model is the model as it is at the look: its age is 0.

    Args:
        trainer: of this fit.
        anatomy: the model's parts.
        settings: the monitor's.
        client: number of this process's client.
    """

    def __init__(
        self, trainer: L.Trainer, anatomy: Anatomy, settings: GameSettings, client: int
    ) -> None:
        self._precision = trainer.precision_plugin
        self._anatomy = anatomy
        self._sources = Sources(
            settings, client, causal=anatomy.kind == "causal", special=_special(trainer, anatomy)
        )
        self._audits = settings.canaries is not None
        self._scores = settings.score_canaries is not None
        self._scale = settings.scale
        self._client = client
        self._attacks: tuple[MembershipAttack, ...] = ()
        self._tap: ActivationTap | None = None
        self._ids: ModelIds | None = None
        strategy = trainer.strategy
        defenses = strategy.defenses if isinstance(strategy, DefendedStrategy) else ()
        self._defended = any(d.acts_on_gradients for d in defenses)
        self._replaced = any(d.acts_on_batches for d in defenses)
        self._rewritten = {layer: d.name for d in defenses for layer in d.activation_layers}
        self._tables: dict[str, _Table] = {}
        self._leaving = False

    # ---- between looks ----------------------------------------------------------------------

    def follow(self, attacks: Sequence[MembershipAttack]) -> None:
        """Plays for these attacks from now on, which learn what is defended."""
        for attack in attacks:
            attack.expect(defended=self._defended, replaced=self._replaced)
        layers = {a.layer for a in attacks}
        if layers != {a.layer for a in self._attacks}:
            self.close()
            if layers:
                self._tap = self._tap_at(sorted(layers))
                self._ids = ModelIds(self._anatomy) if self._replaced else None
        self._attacks = tuple(attacks)

    def _tap_at(self, layers: Sequence[int]) -> ActivationTap:
        # A server that adds trainable layers gets a gradient there, whatever is frozen below. In a
        # reentrant checkpoint that cannot be had without changing what is trained.
        checkpointed = any(
            getattr(m, "gradient_checkpointing", False) for m in self._anatomy.model.modules()
        )
        return ActivationTap(self._anatomy, layers, states=False, reach=not checkpointed)

    def check(self) -> None:
        """Tries every attack on two short texts, so that what cannot work shows before training.

        Raises:
            ValueError: an attack does not fit the model, or the model does not run on token ids.
        """
        for attack in self._attacks:
            rows = Rows(torch.full((2, 2), 1), torch.ones(2, 2, dtype=torch.bool), False)
            try:
                with self._precision.forward_context():
                    hidden = hidden_states(self._anatomy, attack.layer, rows.ids)
                embedded = attack.embed(hidden, rows.query(torch.tensor([0, 1])))
                upstream = hidden.new_zeros(2, 2 if attack.granularity == "token" else 1).float()
                shape = tuple(attack.gradient(embedded, hidden, None, upstream).shape)
                if shape != (2, 2, attack.rungs):
                    raise ValueError(
                        f"its gradient should be (2, 2, {attack.rungs}), and is {shape}"
                    )
            except Exception as error:
                raise ValueError(
                    f"LeakageMonitor: '{attack.name}' cannot be played on this model: {error}"
                ) from error

    def wants_batch(self, steps_to_look: int) -> bool:
        """Whether a batch that is not looked at may serve the next look."""
        return bool(self._attacks) and self._sources.wants_batch(steps_to_look)

    def remember(self, batch: TokenBatch) -> None:
        """Keeps a batch, by reference, as text that a later batch does not hold."""
        if self._attacks:
            self._sources.remember(batch)

    def close(self) -> None:
        """Removes the hooks."""
        if self._tap is not None:
            self._tap.close()
        if self._ids is not None:
            self._ids.close()
        self._tap = self._ids = None

    # ---- a look -----------------------------------------------------------------------------

    def arm(self) -> None:
        """Starts a look."""
        if self._tap is not None:
            self._tap.arm()
        if self._ids is not None:
            self._ids.arm()

    def disarm(self, batches: Sequence[TokenBatch]) -> None:
        """Ends a look, lets go of what it held, and remembers its batches."""
        if self._tap is not None:
            self._tap.disarm()
        if self._ids is not None:
            self._ids.arm(False)
        self._leaving = False
        self._tables.clear()
        for batch in batches:
            self.remember(batch)

    @torch.no_grad()
    def _begin(self, step: int, batches: Sequence[TokenBatch], scale: float) -> None:
        """Draws the targets, and computes each attack's canary as it is before any defence.

        Once in a look: where several optimizers step, the server's layers are stepped with the
        first of them.

        Args:
            step: optimizer step.
            batches: the micro-batches that the step's gradient is of.
            scale: loss scale that is still in the gradients of the hidden states.
        """
        if not self._attacks or self._tables:
            return
        self._leaving = True
        self._tables[str(Stage.SHARED)] = _Table(_drawn(self._sources.population, step, batches))
        if self._audits:
            self._tables[AUDIT] = _Table(_drawn(self._sources.canaries, step, batches))
        if self._scores:
            every = _drawn(lambda _, b: self._sources.all_canaries(b), step, batches)
            self._tables[_EVERY] = _Table(every, whole=True)
        dealt = [t for t in self._tables.values() if isinstance(t.asked, Targets)]
        layers: dict[int, _Layer | str] = {}
        for attack in self._attacks if dealt else ():
            if attack.layer not in layers:
                layers[attack.layer] = self._layer(attack.layer, batches, scale)
            layer = layers[attack.layer]
            for table in dealt:
                try:
                    table.games[attack.name] = (
                        layer
                        if isinstance(layer, str)
                        else self._games(attack, batches, layer, table.asked, table.whole)
                    )
                except Exception as error:
                    table.games[attack.name] = reason(error)

    def _layer(self, layer: int, batches: Sequence[TokenBatch], scale: float) -> _Layer | str:
        """The client's hidden states and the gradient of its loss in them."""
        assert self._tap is not None
        try:
            for rewritten, name in self._rewritten.items():
                if rewritten <= layer:
                    raise UnusableObservation(
                        f"the defence '{name}' rewrites the hidden states at layer {rewritten}, "
                        f"and what layers of the server's own read at layer {layer} then is not "
                        "computed: ask below it"
                    )
            gradients = self._tap.gradients(layer, scale=scale)
            if len(gradients) != len(batches):
                raise UnusableObservation(
                    f"the loss's gradient at layer {layer} was seen in {len(gradients)} of "
                    f"{len(batches)} batches (torch.compile, or a loss that does not use it?)"
                )
            for batch, gradient in zip(batches, gradients, strict=True):
                if gradient.shape[:2] != batch.input_ids.shape:
                    raise UnusableObservation(
                        f"the model was run on {tuple(gradient.shape[:2])} tokens at layer "
                        f"{layer}, the batch holds {tuple(batch.input_ids.shape)}"
                    )
            read = batches if self._ids is None else self._ids.written(batches)
            with self._precision.forward_context():
                client = [
                    hidden_states(self._anatomy, layer, b.input_ids, b.attention_mask) for b in read
                ]
        except Exception as error:
            return reason(error)
        return _Layer(client, gradients)

    def _embedded(self, layer: int, rows: Rows) -> Tensor:
        """The server's hidden states (G, L, d) of texts; zero where they were never padded to."""
        with self._precision.forward_context():
            if rows.masked:
                return hidden_states(self._anatomy, layer, rows.ids, rows.real.long())
            out: Tensor | None = None
            lengths = rows.real.sum(1)
            for length in sorted(set(lengths.tolist())):
                which = lengths == length
                states = hidden_states(self._anatomy, layer, rows.ids[which, :length])
                if out is None:
                    out = states.new_zeros(*rows.ids.shape, states.shape[-1])
                out[which.to(out.device), :length] = states
        assert out is not None
        return out

    def _games(
        self,
        attack: MembershipAttack,
        batches: Sequence[TokenBatch],
        layer: _Layer,
        asked: Targets | Waiting | str,
        whole: bool,
    ) -> _Games:
        assert isinstance(asked, Targets)
        upstream = [
            upstream_of(
                gradient.to(hidden.device),
                direction_of(hidden.shape[-1]),
                self._scale,
                whole_sentence=attack.granularity == "full",
                mask=batch.attention_mask,
            )
            for batch, hidden, gradient in zip(batches, layer.client, layer.gradients, strict=True)
        ]
        asked = asked if whole else _reached(attack, asked, upstream)
        parts = [asked.at(i) for i in torch.split(torch.arange(len(asked.members)), _AT_ONCE)]
        embedded = torch.cat(
            [attack.embed(self._embedded(attack.layer, p.rows), p.query()) for p in parts]
        )
        samples = [
            attack.gradient(embedded, hidden, batch.attention_mask, arrived)
            for batch, hidden, arrived in zip(batches, layer.client, upstream, strict=True)
        ]
        return _Games(asked, CanaryGradient(torch.cat(samples)))

    def on_defense(
        self, defense: Defense, parameters: Sequence[nn.Parameter], context: DefenseContext
    ) -> None:
        """A defence is about to act: every canary goes through it too."""
        for table in self._tables.values() if self._leaving else ():
            for name, games in table.games.items():
                if isinstance(games, str):
                    continue
                if not defense.acts_on_canaries:
                    table.games[name] = (
                        f"the defence '{defense.name}' does not say what it does to a canary "
                        "(Defense.on_canary)"
                    )
                    continue
                try:
                    canary = defense.on_canary(games.canary, parameters, context)
                    table.games[name] = replace(games, canary=canary)
                except Exception as error:
                    table.games[name] = reason(error)

    def play(
        self, look: Look, stages: Sequence[Stage], wanted: Sequence[str], scale: float
    ) -> None:
        """Lets every attack guess from its canary as it is at these stages.

        Args:
            look: takes what they say, or why they say nothing.
            stages: at all of which the canaries are now.
            wanted: those of them that are measured.
            scale: loss scale that is still in the gradients of the hidden states.
        """
        if not self._attacks or look.truth_error is not None:
            return
        if Stage.LOCAL in stages:
            now = [] if look.batch is None else [look.batch]
            self._begin(look.step, [*look.batches, *now], scale)
        for attack in self._attacks if wanted else ():
            said = self._guess(attack, str(Stage.SHARED), look.step, Stage(wanted[0]))
            for stage in wanted:
                look.guesses.setdefault((stage, attack.name), said)
            if self._audits and str(Stage.SHARED) in wanted:
                said = self._guess(attack, AUDIT, look.step, Stage.SHARED)
                look.guesses.setdefault((AUDIT, attack.name), said)
            if self._scores and str(Stage.SHARED) in wanted:
                said = self._guess(attack, _EVERY, look.step, Stage.SHARED)
                if isinstance(said, Played):
                    look.canary_scores.setdefault(attack.name, said.scores)
        if Stage.SHARED in stages:
            self._leaving = False

    @torch.no_grad()
    def _guess(
        self, attack: MembershipAttack, table_name: str, step: int, stage: Stage
    ) -> Played | str | Waiting:
        table = self._tables.get(table_name)
        if table is None:
            return "the games were not begun"
        if not isinstance(table.asked, Targets):
            return table.asked
        games = table.games.get(attack.name, "the games were not begun")
        if isinstance(games, str):
            return games
        snapshot = GradientSnapshot(
            step,
            stage,
            {CRAFTED: games.canary.released},
            client=self._client,
            noise_std=games.canary.noise_std,
        )
        members = games.asked.members
        try:
            guess = attack.run(Observation((snapshot,)), games.asked.query())
            scores = guess.scores.detach().double().cpu()
            if scores.shape != members.shape or bool(scores.isnan().any()):
                raise UnusableObservation("the attack gave no score for some of its targets")
            decisions = guess.members.detach().bool().cpu()
            if decisions.shape != members.shape:
                raise UnusableObservation("the attack decided about other targets than asked")
        except Exception as error:
            return reason(error)
        return Played(scores, members, decisions)


def _special(trainer: L.Trainer, anatomy: Anatomy) -> frozenset[int]:
    """By the model's config, and the ``tokenizer`` of a callback, the module or the data."""
    callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    holders = (*callbacks, trainer.lightning_module, getattr(trainer, "datamodule", None))
    tokenizers = [getattr(holder, "tokenizer", None) for holder in holders]
    return special_ids(getattr(without_peft(anatomy.model), "config", None), tokenizers)


def _drawn(
    draw: Callable[[int, Sequence[TokenBatch]], Targets | Waiting],
    step: int,
    batches: Sequence[TokenBatch],
) -> Targets | Waiting | str:
    try:
        return draw(step, batches)
    except Exception as error:
        return reason(error)


def _reached(attack: MembershipAttack, asked: Targets, upstream: Sequence[Tensor]) -> Targets:
    """The targets without tokens of the batch that the loss looks away from.

    Their gradient is exactly zero whatever is asked. A server that chooses its layers would not let
    that happen, so that such a token must not count as one that is kept secret.
    """
    rows = [row for batch in upstream for row in batch]
    where = zip(asked.places.tolist(), asked.positions.tolist(), strict=True)
    token = attack.granularity == "token"
    there = torch.stack([rows[row][column if token else 0] for row, column in where if row >= 0])
    if not bool((there != 0).any()):
        raise UnusableObservation(
            f"the loss does not depend on the hidden states at layer {attack.layer} of any of the "
            f"{len(there)} tokens asked for; a lower layer would be reached"
        )
    return asked.reached(there != 0)


__all__ = ["LiveGames"]
