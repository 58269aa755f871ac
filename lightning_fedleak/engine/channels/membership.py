"""The channel of membership games: is this text in the batch?

A *channel* plays the attacks of one family in a run, and turns their answers into rates. In a
*game* a secret bit decides whether a text is one of the batch; the attack guesses the bit. A
dishonest server adds layers to the model, whose gradient it reads. The channel does not put them
into the model: it computes their gradient, here called the *canary*, from the hidden states of the
step's batch and the gradient of the user's loss in them
(:meth:`~lightning_fedleak.attacks.membership.base.MembershipAttack.gradient`). The hidden states
come from another forward pass in eval mode without gradient, because a dishonest server sets
dropout to 0. Training does not change.

A *look* is a measurement at one step. A *stage* is a point on the gradient's way: ``local`` before
the client's defences, ``shared`` after them. The order of a look:

1. :meth:`~MembershipChannel.arm` lets the step's backward pass record gradients of hidden states.
2. At stage local, the targets are drawn and each attack's canary is computed.
3. Every defence of the step also acts on the canaries; if it does not say how, the games are
   unknown (:meth:`~MembershipChannel.before_defense`).
4. At each stage of the look, every attack guesses from its canary
   (:meth:`~MembershipChannel.at_stages`).
5. :meth:`~MembershipChannel.disarm` frees the tensors and keeps the batches: later non-members.

Each game is one trial. The trials of all clients and of the last looks are a *window*, whose rates
are logged; intervals describe only these looks. An exact test within one look shows whether it
leaked at all (:mod:`lightning_fedleak.evaluation.metrics.clustered`).
"""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from lightning_fedleak.attacks import (
    CRAFTED,
    DISHONEST_SERVER,
    HONEST_BUT_CURIOUS,
    Attack,
    Capability,
    MembershipAttack,
    MembershipGuess,
    PassiveMembership,
    UnusableObservation,
    direction_of,
    upstream_of,
)
from lightning_fedleak.defenses import CanaryGradient, Defense, DefenseContext
from lightning_fedleak.engine.channels.base import Requirement
from lightning_fedleak.engine.channels.plans import Plan
from lightning_fedleak.engine.channels.steps import StepChannel, check_guess, guess
from lightning_fedleak.engine.channels.targets import (
    Rows,
    Sources,
    Targets,
    check_held_out,
    with_gradient,
)
from lightning_fedleak.engine.options import Options
from lightning_fedleak.engine.outcomes import Outcome, Series, Unknown, Waiting
from lightning_fedleak.engine.run import Look, Run, reason
from lightning_fedleak.evaluation.metrics import membership
from lightning_fedleak.evaluation.metrics.clustered import rank_p_value
from lightning_fedleak.evaluation.metrics.rates import Rate, values_of
from lightning_fedleak.model import taps
from lightning_fedleak.model.anatomy import special_ids, without_peft
from lightning_fedleak.model.batches import TokenBatch
from lightning_fedleak.model.model_runs import hidden_states
from lightning_fedleak.model.snapshots import ON_THE_WAY, GradientSnapshot, Observation, Stage
from lightning_fedleak.report.records import MEMBERSHIP

_TEXTS_PER_FORWARD = 64  # limits the memory of one forward pass; not tuned

MIN_MEMBERS = 16
"""The number of members, and of non-members, that one look needs to judge an update.

The standard error of an AUC is at most ``sqrt(.25 / members)`` for any distribution of the scores
(Van Dantzig 1951), here 1/8. With a smaller value a leaking update may pass by chance; with a
larger one, rounds of few texts can never be judged.
"""
MAX_CONTROL_P_VALUE = 0.05
"""The largest p-value of a control's games at which the attack counts as working.

With a larger value an attack that guesses passes as one that would have found a leak; with a
smaller one, batches of a few texts have no control.
"""


@dataclass(frozen=True)
class _Games:
    """The membership games of one attack at one look.

    Attributes:
        targets: The candidate texts, with the truth.
        canary: The gradient of the server's layers, after the defences that acted so far.
    """

    targets: Targets
    canary: CanaryGradient


class _Played(NamedTuple):
    """An adversary's guess in games, and the secret bits, (n,) bool."""

    guess: Any
    members: Tensor


_LayerData = Sequence[tuple[TokenBatch, Tensor, Tensor]]
"""Each micro-batch with one document per row, its hidden states (B, L, d), and the gradient of
the loss in them, (B, L, d).
"""


class MembershipChannel(StepChannel):
    """Run membership games: at each look the secret bits are drawn, and the attacks guess them.

    The server adds its own layers, so that none of the client's need be trained. Its copy of the
    model is the model at the look.
    """

    # The constants are explained in Channel and StepChannel.
    guesses = MembershipGuess
    reads: ClassVar[Any] = MembershipAttack
    plays_games = True
    reads_states: ClassVar[bool] = True  # canaries are computed from hidden states
    tests_looks: ClassVar[bool] = True  # each look has a p-value
    controlled: ClassVar[bool] = True  # attacks also run on the same step with known words
    leak = MEMBERSHIP
    metrics = membership.RATES
    columns = ("score", "member", "decision")  # a trial is a game; bits and decisions are 0 or 1
    # The last value is that of an attack without information (F1, TPR: that names no member).
    ranges: ClassVar[Any] = {
        **dict.fromkeys(("accuracy", "auc"), (0.0, 1.0, 0.5)),
        **dict.fromkeys(("f1", "tpr_at_fpr_"), (0.0, 1.0, 0.0)),
        "advantage": (-1.0, 1.0, 0.0),
    }
    own_threshold = ("accuracy", "f1", "advantage")  # they use the attack's decisions, not scores
    adversary = DISHONEST_SERVER

    def __init__(self, attacks: Sequence[Any], settings: Options) -> None:
        super().__init__(attacks, settings)
        self.games = games = settings.games
        self.width = len(self.columns) * 2 * games.targets  # members, and as many non-members
        self._windows: dict[str, deque[Tensor]] = {}  # by series, the trials of each look
        self._tap: taps.ActivationTap | None = None  # records gradients of hidden states
        self._calls: taps.ModelCalls | None = None  # records token ids, if a defence changes them
        self._layers: set[int] = set()  # the layers at which the tap records
        # The targets of this look; None until they are drawn.
        self._targets: Targets | Waiting | None = None
        self._games: dict[str, _Games | Unknown | Waiting] = {}  # by attack
        self._canaries_in_transit = False  # True between stage local and stage shared of a look

    def _check_settings(self) -> None:
        """Refuse held-out texts that an attack was calibrated on, because it would know them.

        Raises:
            ValueError: An attack was; the message says which setting to change.
        """
        super()._check_settings()
        for attack in self.attacks:
            check_held_out(attack, self.settings.games.held_out)

    def requirement(self, metric: str, clients: int = 1) -> Requirement:
        """Return the looks that a TPR needs, and why a rate cannot judge one update alone."""
        rate = metric.removesuffix("_worst_client").removesuffix("_low").removesuffix("_high")
        looks, why = 1, ""  # only a TPR may need more than one look
        if rate.startswith("tpr_at_fpr_"):
            fpr, n = float(rate.removeprefix("tpr_at_fpr_")), self.games.targets * clients
            # The tolerance keeps rounding from adding a look, as in 10 / 0.01 / n.
            needed = membership.NEGATIVES_PER_FPR / fpr
            looks = math.ceil(needed / n - 1e-9)
            why = f"a TPR at an FPR of {fpr:g} needs {needed:.0f} non-members, and a look has {n}"
        never_alone = why if looks > 1 else _too_few(self.games.targets)
        if metric.endswith(("_low", "_high")):
            never_alone = "intervals use the games of all rounds, and a gate judges one round"
        elif metric in self.own_threshold:
            never_alone = (
                "it uses the attack's own threshold, so that it may be 0 even if the scores "
                "separate members from non-members without an error"
            )
        return Requirement(looks, why, never_alone=never_alone)

    # ---- a fit ------------------------------------------------------------------------------

    def open(self, run: Run) -> None:
        """Begin a fit.

        Raises:
            ValueError: A process does not have the whole batch or the whole layers of one client;
                the message says which setting to change.
        """
        super().open(run)
        self.removers = [self._remove_taps]
        config = getattr(without_peft(run.anatomy.model), "config", None)
        self._sources = Sources(
            self.games,
            run.number,
            causal=run.anatomy.kind == "causal",
            special=special_ids(config, run.tokenizers),
        )
        self._has_new_ids = any(d.acts_on_batches for d in run.defenses)
        self._rewriters = {layer: d.name for d in run.defenses for layer in d.activation_layers}
        joins = run.client == "world" or Stage.AGGREGATE in self.settings.stages
        if run.is_sharded or (run.processes > 1 and joins):
            raise ValueError(
                f"'{self.attacks[0].name}' plays membership games, which need whole layers and one "
                "client's batch on a process: use DDP with client='rank' and leave 'aggregate' out "
                "of stages=, or give these attacks a monitor of their own on one device"
            )

    def check(self, attack: Attack) -> None:
        """Try an attack on two short texts, so that one that does not fit fails before training.

        Raises:
            ValueError: The attack does not fit the model, or the model does not run on token ids.
        """
        assert isinstance(attack, MembershipAttack)
        # Two texts of two tokens with id 1, without padding, and an upstream gradient of zeros.
        is_real = torch.ones(2, 2, dtype=torch.bool)
        rows = Rows(torch.full((2, 2), 1), is_real, False, is_real)
        try:
            with self.run.forward_context():
                hidden = hidden_states(self.run.anatomy, attack.layer, rows.ids)
            embedded = attack.embed(hidden, rows.query(torch.tensor([0, 1])))
            upstream = hidden.new_zeros(2, 2 if attack.granularity == "token" else 1).float()
            shape = tuple(attack.gradient(embedded, hidden, None, upstream).shape)
            if shape != (2, 2, attack.rungs):
                raise ValueError(f"gradient() should be (2, 2, {attack.rungs}), not {shape}")
        except Exception as error:
            raise ValueError(
                f"{self.run.watcher}: '{attack.name}' cannot run on this model: {error}"
            ) from error

    # ---- a look -----------------------------------------------------------------------------

    def arm(self) -> None:
        """Start a look: record the gradients at the layers that attacks read."""
        layers = {attack.layer for attack in self.attacks} if self.reads_states else set()
        if layers != self._layers:
            self._remove_taps()
            self._layers = layers
        if layers and self._tap is None:
            anatomy = self.run.anatomy
            # A server that adds trainable layers gets a gradient there even if all layers below are
            # frozen. A reentrant checkpoint has no graph unless its input needs a gradient.
            modules = anatomy.model.modules()
            checkpointed = any(getattr(m, "gradient_checkpointing", False) for m in modules)
            self._tap = taps.ActivationTap(
                anatomy, sorted(layers), states=False, reach=not checkpointed
            )
            self._calls = taps.ModelCalls(anatomy) if self._has_new_ids else None
        if self._tap is not None:
            self._tap.arm()
        if self._calls is not None:
            self._calls.arm()

    def _remove_taps(self) -> None:
        for tap in (self._tap, self._calls):
            if tap is not None:
                tap.close()
        self._tap = self._calls = None
        self._layers = set()

    def disarm(self, look: Look) -> None:
        """End a look, free its tensors, and remember its batches."""
        if self._tap is not None:
            self._tap.disarm()
        if self._calls is not None:
            self._calls.arm(False)
        self._canaries_in_transit = False
        self._targets, self._games = None, {}
        if self.attacks:
            self._sources.remember(look.training_step.batches)

    @torch.no_grad()
    def _draw_games(self, step: taps.Step) -> None:
        """Draw the targets, and compute each attack's canary before any defence acts.

        It happens once in a look: with several optimizers, the first to step also steps the
        server's layers.
        """
        if not self.attacks or self._targets is not None:
            return
        batches, scale = step.batches, self.run.loss_scale
        self._canaries_in_transit = True
        self._targets = self._sources.population(step.number, batches)
        if not isinstance(targets := self._targets, Targets):
            self._games = {attack.name: targets for attack in self.attacks}
            return
        layers: dict[int, _LayerData] = {}
        for attack in self.attacks:
            try:
                if attack.layer not in layers:
                    layers[attack.layer] = self._read_layer(attack.layer, batches, scale)
                self._games[attack.name] = self._make_games(attack, layers[attack.layer], targets)
            except Exception as error:
                self._games[attack.name] = Unknown(reason(error))

    def _read_layer(self, layer: int, batches: Sequence[TokenBatch], scale: float) -> _LayerData:
        """Return the client's hidden states at a layer and the gradient of its loss in them.

        Raises:
            UnusableObservation: The input of a server's layers is not computed there, because of a
                preference loss or of a defence that rewrites hidden states.
        """
        assert self._tap is not None
        if any(batch.preferences for batch in batches):
            raise UnusableObservation(
                "the loss prefers chosen texts to rejected ones, which enter its gradient with "
                "the other sign, and no control shows whether attacks by added layers work then; "
                "SubspaceMembership reads such steps"
            )
        for rewritten, name in self._rewriters.items():
            if rewritten <= layer:
                raise UnusableObservation(
                    f"the defence '{name}' rewrites the hidden states at layer {rewritten}, "
                    f"and the input of the server's own layers at layer {layer} is then not "
                    f"computed: give the attack a layer= below {rewritten}, or leave '{name}' out"
                )
        inputs = batches if self._calls is None else taps.with_ids(self._calls.calls, batches)
        return self._join_layer(layer, batches, inputs, self._tap.gradients(layer, scale=scale))

    def _join_layer(
        self,
        layer: int,
        batches: Sequence[TokenBatch],
        inputs: Sequence[TokenBatch],
        pieces: Sequence[Tensor],
    ) -> _LayerData:
        """Return the hidden states of texts at a layer, with the gradients that were recorded.

        Args:
            layer: The index of the layer.
            batches: The micro-batches that the user's step got.
            inputs: The same micro-batches with the token ids that the model got.
            pieces: The gradients of the model's calls, in order.

        Raises:
            UnusableObservation: The gradients are not of these batches.
        """
        gradients = taps.join_gradients(pieces, batches, layer)
        documents = [batch.by_document() for batch in inputs]
        with self.run.forward_context():
            client = [
                hidden_states(self.run.anatomy, layer, b.input_ids, b.attention_mask)
                for b in documents
            ]
        parts = [batch.per_document(g) for batch, g in zip(batches, gradients, strict=True)]
        return [*zip(documents, client, parts, strict=True)]

    def _make_games(self, attack: MembershipAttack, layer: _LayerData, targets: Targets) -> _Games:
        """Return an attack's games: the targets that the loss reaches, and its canary for them.

        The added layers write their output into the hidden states, along a fixed direction and
        times ``games.scale``. So the gradient of the loss that arrives at this output, the
        *upstream* gradient, is that of the hidden states along the direction.
        """
        upstream = [
            upstream_of(
                gradient.to(hidden.device),
                direction_of(hidden.shape[-1]),
                self.games.scale,
                whole_sentence=attack.granularity == "full",
                mask=batch.attention_mask,
            )
            for batch, hidden, gradient in layer
        ]
        targets = with_gradient(attack, targets, upstream)
        parts = [
            targets.select(i)
            for i in torch.split(torch.arange(len(targets.members)), _TEXTS_PER_FORWARD)
        ]

        def embed(part: Targets) -> Tensor:
            with self.run.forward_context():
                hidden = part.rows.hidden_states(self.run.anatomy, attack.layer)
            return attack.embed(hidden, part.query())

        embedded = torch.cat([*map(embed, parts)])
        samples = [
            attack.gradient(embedded, hidden, batch.attention_mask, gradient)
            for (batch, hidden, _), gradient in zip(layer, upstream, strict=True)
        ]
        return _Games(targets, CanaryGradient(torch.cat(samples)))

    def before_defense(
        self, defense: Defense, parameters: Sequence[nn.Parameter], context: DefenseContext
    ) -> None:
        """Apply a defence to every canary too, as to the gradients that the step shares."""
        in_transit = self._games if self._canaries_in_transit else {}
        for name, games in in_transit.items():
            if not isinstance(games, _Games):
                continue
            if not defense.acts_on_canaries:
                in_transit[name] = Unknown(
                    f"the defence '{defense.name}' does not say what it does to a canary "
                    "(Defense.on_canary)"
                )
                continue
            try:
                canary = defense.on_canary(games.canary, parameters, context)
                in_transit[name] = replace(games, canary=canary)
            except Exception as error:
                in_transit[name] = Unknown(reason(error))

    def at_stages(self, look: Look) -> None:
        """Let every attack guess from its canary, once for all stages that are reached here.

        No defence acts between these stages, so that they have the same canary.
        """
        if not self.attacks or look.training_step.error is not None:
            return
        if Stage.LOCAL in look.stages:
            self._draw_games(look.training_step)
        for attack in self.attacks if look.wanted else ():
            answer = self._guess(attack, look.step, look.wanted[0])
            for series in self.series(attack, look.wanted):
                look.answers.setdefault(series, answer)
        if Stage.SHARED in look.stages:
            self._canaries_in_transit = False

    @torch.no_grad()
    def _guess(
        self, attack: MembershipAttack, step: int, stage: Stage
    ) -> _Played | Unknown | Waiting:
        """Return an attack's guesses at a stage with the truth, or why there are none (yet)."""
        games = self._games.get(attack.name, Unknown("no canary was computed at stage local"))
        if not isinstance(games, _Games):
            return games
        try:
            with self.run.timed(attack.name):
                return self._run_attack(attack, games, step, stage)
        except Exception as error:
            return Unknown(reason(error))

    def _run_attack(
        self, attack: MembershipAttack, games: _Games, step: int, stage: Stage
    ) -> _Played:
        """Return an attack's guesses from its canary in its present state, with the truth."""
        canary = games.canary
        shared = {CRAFTED: canary.released}
        client, std = self.run.number, canary.noise_std
        snapshot = GradientSnapshot(step, stage, shared, client=client, noise_std=std)
        answer = attack.run(Observation((snapshot,)), games.targets.query())
        check_guess(attack, answer, self.guesses)
        return _Played(answer, games.targets.members)

    def control_answer(self, plan: Plan, control: taps.Step) -> Any:
        """Return the guesses on a control, whose non-members are shuffled like its members.

        They are unknown if random scores may do as well, unless the texts are so few that not even
        perfect scores would be significant.
        """
        calls = zip(control.batches, control.calls, strict=True)
        batches = [batch for batch, call in calls if call.has_gradient]
        targets = self._sources.population(control.number, batches, shuffled=True)
        if not isinstance(targets, Targets):
            return targets
        answer = self._control_games(plan, control, targets)
        if isinstance(answer, _Played):
            p_value = self.p_value(self.trials(plan, answer, control))
            n, n_members = len(answer.members), int(answer.members.sum())
            if p_value > MAX_CONTROL_P_VALUE >= 1 / math.comb(n, n_members):
                return Unknown(f"random scores do as well with a probability of {p_value:.2f}")
        return answer

    @torch.no_grad()
    def _control_games(self, plan: Plan, control: taps.Step, targets: Targets) -> Any:
        """Return the games of an attack on a control's texts, before any defence."""
        attack: Any = plan.attack
        scale, layer = self.run.loss_scale, attack.layer
        pieces = taps.control_states(self.run.anatomy, control, layer, scale=scale)
        batches = [call.texts for call in control.calls if call.has_gradient]
        states = self._join_layer(layer, batches, batches, pieces)
        games = self._make_games(attack, states, targets)
        return self._run_attack(attack, games, control.number, Stage.LOCAL)

    # ---- trials and their rates -------------------------------------------------------------

    def trials(self, plan: Plan, answer: Any, truth: Any, kind: str | None = None) -> Tensor:
        """Return a trial for each game.

        Raises:
            UnusableObservation: The guess has another shape than the bits, or a score is NaN.
        """
        columns = answer.guess.scores, answer.members, answer.guess.members.bool()
        games = [column.detach().cpu().double() for column in columns]
        if len({column.shape for column in games}) > 1 or bool(games[0].isnan().any()):
            raise UnusableObservation("the attack gave no score and decision for each target")
        return torch.stack(games, 1)

    def rates(self, trials: Tensor) -> dict[str, Rate]:
        """Return the rates of games, with intervals that take each game as a trial."""
        scores, members, decisions = trials.unbind(1)
        # None: each game is a cluster of its own. 100 resamples, because this runs at every look.
        return membership.membership_rates(
            scores, members == 1, None, decisions == 1, resamples=100
        )

    def p_value(self, trials: Tensor) -> float:
        """Return the exact p-value of "members rank no higher than non-members"."""
        scores, members, _ = trials.unbind(1)
        return rank_p_value(scores.numpy(), members.numpy() == 1)

    def pooled(self, series: Series, rows: Mapping[int, Any]) -> Outcome:
        """Return the outcome of the games of this look and the last ones, over all clients."""
        look, trials = super().pooled(series, rows), torch.cat(self._tables(rows))
        window = self._window(series)
        window.append(trials)
        games = torch.cat([*window])
        return replace(
            look,
            rates=look.rates if len(window) == 1 else self.rates(games),
            n=len(games),
            now=values_of(look.rates),
            too_few=_too_few(int(trials[:, self.columns.index("member")].sum())),
        )

    def _window(self, series: Series) -> deque[Tensor]:
        return self._windows.setdefault(series.log_name, deque(maxlen=self.games.window))

    def state_dict(self) -> dict[str, object]:
        """Return the trials of each look in each series' window."""
        return {f"games of {name}": [*window] for name, window in self._windows.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the windows. Version 0.3 saved one table of (look, client, *trial)."""
        self._windows.clear()
        for attack in self.listed_attacks:
            for series in self.series(attack, ON_THE_WAY):
                if looks := state.get(f"games of {series.log_name}"):
                    if isinstance(looks, Mapping):
                        games = looks["games"]
                        looks = [games[games[:, 0] == look, 2:] for look in games[:, 0].unique()]
                    self._window(series).extend(look.cpu().double() for look in looks)


class PassiveMembershipChannel(MembershipChannel):
    """Run the same games for a server that adds no layers: it reads the shared gradients."""

    reads = PassiveMembership
    reads_updates: ClassVar[bool] = True  # also weight changes of several steps
    reads_states: ClassVar[bool] = False
    adversary = HONEST_BUT_CURIOUS | {Capability.KNOWS_TARGET_TEXT}

    def check(self, attack: Attack) -> None:
        """Do nothing, because no attack can be tried without a gradient."""

    @torch.no_grad()
    def at_stages(self, look: Look) -> None:
        """Let every attack score candidate texts from the gradients shared at the look's stages."""
        step = look.training_step
        if not self.attacks or not look.wanted or step.error is not None:
            return
        if self._targets is None:
            self._targets = self._sources.population(step.number, step.batches)
        StepChannel.at_stages(self, look)

    def _guess_from_gradients(self, plan: Plan, step: taps.Step, stage: Stage) -> object:
        targets = self._targets
        return self._play(plan, step, stage, targets) if isinstance(targets, Targets) else targets

    def _play(
        self, plan: Plan, step: taps.Step, stage: Stage, targets: Targets
    ) -> _Played | Unknown | Waiting:
        """Return an attack's guesses from the gradients of a step, with the truth."""
        answer = guess(plan, step, stage, self.run, targets.query())
        return answer if isinstance(answer, Unknown | Waiting) else _Played(answer, targets.members)

    def _control_games(self, plan: Plan, control: taps.Step, targets: Targets) -> Any:
        return self._play(plan, control, Stage.LOCAL, targets)


def _too_few(members: int) -> str | None:
    """Return why one look has too few members to judge an update; None if it has enough."""
    if members >= MIN_MEMBERS:
        return None
    return (
        f"{members} texts of the update were queried, and as many non-members: with fewer than "
        f"{MIN_MEMBERS} a rate may be low by chance (raise games=Games(targets=...), and use more "
        "texts per round)"
    )
