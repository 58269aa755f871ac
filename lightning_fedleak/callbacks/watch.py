"""The watch over one fit: takes snapshots at each stage and runs the attacks on them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial

import lightning.pytorch as L
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch.optim import Optimizer

from lightning_fedleak.anatomy import HEAD_WEIGHT, Anatomy
from lightning_fedleak.attacks.base import Attack, Guess
from lightning_fedleak.attacks.hidden import whole_model
from lightning_fedleak.batches import TokenBatch
from lightning_fedleak.callbacks.cadence import Cadence, StepClock
from lightning_fedleak.callbacks.checks import warn_of_adaptive_updates, warn_of_untested
from lightning_fedleak.callbacks.kinds import Kind
from lightning_fedleak.callbacks.ledger import AUDIT, HEAD_ONLY, PREFIX, Series, exists_at
from lightning_fedleak.callbacks.live_games import LiveGames
from lightning_fedleak.callbacks.live_inversion import LiveInversion
from lightning_fedleak.callbacks.look import Look, Plan, reason
from lightning_fedleak.callbacks.outcome import Outcome, Waiting
from lightning_fedleak.callbacks.pooling import Pool, Witness
from lightning_fedleak.snapshots import (
    GradientSnapshot,
    GradientTap,
    HeadOwnPart,
    Observation,
    Stage,
    UpdateError,
    UpdateTap,
)
from lightning_fedleak.strategies import DefendedStrategy, before_real_step


def _reads_head_only(plan: Plan) -> bool:
    return plan.roles == (HEAD_WEIGHT,)


def _follows_model(attack: Attack) -> bool:
    """Whether the attack looks at the model at all."""
    kind = type(attack)
    return kind.prepare is not Attack.prepare or kind.refresh is not Attack.refresh


def _guess(plan: Plan, view: GradientSnapshot | str) -> Guess | str:
    """What an attack says of a snapshot, or why it says nothing."""
    if isinstance(view, str):
        return view
    absent = [r for r in plan.roles if r not in view.tensors]
    if absent:
        return f"no gradient of {', '.join(absent)} in this step"
    try:
        with torch.no_grad():
            return plan.attack.run(Observation((view,)))
    except Exception as error:
        return reason(error)


class Watch:
    """Everything of a monitor that lives only as long as one fit.

    Args:
        trainer: of this fit; its strategy is set up.
        anatomy: the model's parts.
        plan: checks the attacks against what is trained now.
        stages: where to measure.
        client: ``"rank"`` or ``"world"``.
        cadence: when to look.
        local_steps: attack the weight change of so many steps; None for single gradients.
        own_part: the head's own part of a tied matrix, already installed; None without.
        games: the membership games of attacks on layers of the server's own.
        inversion: the attacks on hidden states at the split.
        kinds: what the results of each series are.
        witness: shown each guess beside the truth.
    """

    def __init__(
        self,
        trainer: L.Trainer,
        anatomy: Anatomy,
        plan: Callable[[], list[Plan]],
        *,
        stages: Sequence[Stage],
        client: str,
        cadence: Cadence,
        local_steps: int | None,
        own_part: HeadOwnPart | None,
        games: LiveGames,
        inversion: LiveInversion,
        kinds: Mapping[Series, Kind],
        witness: Witness,
    ) -> None:
        self._trainer = trainer
        self.anatomy = anatomy
        self._plan = plan
        self._stages = tuple(stages)
        self._client = client
        self._cadence = cadence
        self._local_steps = local_steps
        self._own_part = own_part
        self.games = games
        self._inversion = inversion
        self._audits = any(prefix == PREFIX[AUDIT] for prefix, _ in kinds)
        self._pool = Pool(trainer, anatomy, client, kinds, witness)
        self._device = trainer.strategy.root_device
        self._rank = trainer.global_rank if client == "rank" else 0
        self._removers: list[Callable[[], None]] = []
        self._keeps_local = False
        self._clock = StepClock()
        self._tried = self._midway = self._hurried = False
        self.look: Look | None = None
        self.processor_seconds = 0.0
        self.prepared: set[str] = set()
        self._told: set[str] = set()

        self._plans: list[Plan] = []
        self._tap = GradientTap({})
        self._update_tap: UpdateTap | None = None
        if local_steps is None:
            self._install(trainer)
        self.follow()
        self._inversion.install()

    def _install(self, trainer: L.Trainer) -> None:
        strategy = trainer.strategy
        separated = False
        if isinstance(strategy, DefendedStrategy):
            separated = strategy.separates_stages
            self._removers.append(strategy.add_tap(self._on_strategy_stage))
            self._removers.append(strategy.add_canaries(self.games.on_defense))
        else:
            for optimizer in trainer.optimizers:
                remove = before_real_step(optimizer, partial(self._on_real_step, optimizer))
                self._removers.append(remove)
        ddp = isinstance(strategy, DDPStrategy)
        self._keeps_local = ddp and self._client == "rank" and not separated

    def follow(self) -> None:
        """Follows what is trained: layers may be frozen and unfrozen while the fit goes on."""
        plans = self._plan()
        if plans == self._plans:
            return
        self._plans = plans
        roles = dict.fromkeys(r for plan in self.exposed for r in plan.roles)
        parameters = {r: p for r in roles if (p := self.anatomy.parameter(r)) is not None}
        self._watched = {id(p) for p in parameters.values()}
        self._tap.close()
        self._tap = GradientTap(parameters, tied=self.anatomy.tied)
        if self._keeps_local:
            self._tap.keep_local()
        if self._local_steps is not None:
            self._update_tap = UpdateTap(parameters, tied=self.anatomy.tied)
            warn_of_adaptive_updates(self.exposed)
        warn_of_untested(plans, self.anatomy)
        self.games.follow([a for p in self.exposed if (a := p.canary) is not None])

    @property
    def exposed(self) -> list[Plan]:
        """The attacks that have something to read."""
        return [p for p in self._plans if p.exposed]

    def prepare(self, attack: Attack) -> None:
        """Calibrates an attack, once in a fit."""
        if attack.name not in self._told:
            self._told.add(attack.name)
            if (set_precision := getattr(attack, "set_precision", None)) is not None:
                set_precision(str(self._trainer.precision))
        if attack.name not in self.prepared:
            attack.prepare(self.anatomy)
            self.prepared.add(attack.name)

    @contextmanager
    def _timed(self, look: Look) -> Iterator[None]:
        """Counts a block as time of the look."""
        began = time.process_time()
        try:
            with look.clock(self._device):
                yield
        finally:
            self.processor_seconds += time.process_time() - began

    def begin(self, step: int) -> None:
        """Training starts at ``step``."""
        self._inversion.begin(step)

    def close(self) -> None:
        """Removes every tap."""
        for remove in self._removers:
            remove()
        self._removers.clear()
        self._tap.close()
        self.games.close()
        self._inversion.close()
        self.look = None

    # ---- a step -----------------------------------------------------------------------------

    def step_starts(self, step: int) -> None:
        """Times the steps without a look, and starts a look where one is due.

        Never between two batches whose gradients add up: the truth would be half of it.
        """
        if self.look is not None:
            return
        self._clock.starts(step)
        if self._midway or not self._cadence.due(step):
            return
        self.look = look = Look(step)
        with self._timed(look):
            self.follow()
            needed = any(_follows_model(plan.attack) for plan in self.exposed)
            with whole_model(self.anatomy.root) if needed else nullcontext():
                for plan in self.exposed:
                    self._refresh(plan.attack, look)
            self._tap.arm()
            self.games.arm()
            self._inversion.arm()
            if self._own_part is not None:
                self._own_part.arm()
            if self._update_tap is not None:
                self._update_tap.begin()

    def _refresh(self, attack: Attack, look: Look) -> None:
        try:
            self.prepare(attack)
            attack.refresh(self.anatomy, look.step)
        except Exception as error:
            for stage in (*map(str, self._stages), HEAD_ONLY, AUDIT):
                look.guesses[(stage, attack.name)] = reason(error)

    def add_batch(self, step: int, read: Callable[[], TokenBatch]) -> None:
        """Takes the truth of one micro-batch, by reference.

        Shortly before a look also a batch that is not looked at is read: as text that the batch
        of the look will not hold.
        """
        if self.look is None:
            if self.games.wants_batch(self._cadence.next_step - step):
                with suppress(Exception):
                    self.games.remember(read())
            return
        try:
            self.look.batch = read()
        except Exception as error:
            self.look.truth_error = reason(error)

    def before_step(self, optimizer: Optimizer) -> None:
        """An optimizer is about to step, or to skip its step."""
        if not self._owns(optimizer):
            return
        self._tried = True
        if self.look is not None and self._local_steps is not None:
            groups = [
                g
                for g in optimizer.param_groups
                if any(id(p) in self._watched for p in g["params"])
            ]
            self.look.learning_rates.append({float(g["lr"]) for g in groups})

    def _owns(self, optimizer: Optimizer) -> bool:
        owners = [p.optimizer for p in self.exposed if p.optimizer is not None]
        return not owners or any(o is optimizer for o in owners)

    def _on_real_step(self, optimizer: Optimizer) -> None:
        """An optimizer is about to step; no gradient defence acted on what left the client."""
        if self._keeps_local:
            self._attack((Stage.LOCAL, Stage.SHARED), optimizer, kept=True)
            self._attack((Stage.AGGREGATE,), optimizer)
        else:
            self._attack(tuple(Stage), optimizer)

    def _on_strategy_stage(self, stage: Stage, optimizer: Optimizer) -> None:
        """A DefendedStrategy shows ``p.grad`` at a stage."""
        if not self._keeps_local:
            self._attack((stage,), optimizer)
        elif stage is Stage.AGGREGATE:
            self._on_real_step(optimizer)

    def _attack(
        self, stages: tuple[Stage, ...], optimizer: Optimizer, *, kept: bool = False
    ) -> None:
        """Attacks a gradient that is the same at all of ``stages``, once."""
        if not self._owns(optimizer):
            return
        self._tried = True
        look = self.look
        if look is None or id(optimizer) in look.stepped:
            return
        if look.step_seconds == 0:
            look.step_seconds = look.elapsed()
        mine = [p for p in self.exposed if p.on_gradients and p.optimizer in (None, optimizer)]
        wanted = [str(s) for s in stages if s in self._stages]
        with self._timed(look):
            self.games.play(look, stages, wanted, self._scale(True))
            if self._inversion.is_due:
                with whole_model(self.anatomy.root):
                    self._inversion.attack(look)
        if wanted:
            first = Stage(wanted[0])
            self._run(
                look,
                mine,
                str(first),
                lambda: self._tap.view(
                    look.step, first, kept=kept, client=self._rank, scale=self._scale(kept)
                ),
            )
            for plan in mine:
                guess = look.guesses[(wanted[0], plan.attack.name)]
                for stage in wanted[1:]:
                    look.guesses.setdefault((stage, plan.attack.name), guess)
        if Stage.AGGREGATE in stages:
            own = self._own_part
            if own is not None:
                self._run(
                    look,
                    [p for p in mine if _reads_head_only(p)],
                    HEAD_ONLY,
                    lambda: own.view(look.step, client=self._rank, scale=self._scale(True)),
                )
            look.stepped.add(id(optimizer))

    def _scale(self, scaled: bool) -> float:
        """The loss scale that is still in gradients which no GradScaler has unscaled."""
        scaler = getattr(self._trainer.precision_plugin, "scaler", None)
        return float(scaler.get_scale()) if scaled and scaler is not None else 1.0

    def _run(
        self, look: Look, plans: Sequence[Plan], stage: str, take: Callable[[], GradientSnapshot]
    ) -> None:
        """Runs attacks on what ``take`` gives; what fails is noted, and never raised."""
        with self._timed(look):
            view: GradientSnapshot | str
            try:
                view = take()
            except Exception as error:
                view = reason(error)
            for plan in plans:
                key = (stage, plan.attack.name)
                if key not in look.guesses:
                    look.guesses[key] = _guess(plan, view)

    def _attack_update(self, look: Look, local_steps: int, tap: UpdateTap) -> None:
        look.step_seconds = look.elapsed() / local_steps

        def take() -> GradientSnapshot:
            if any(len(rates) != 1 for rates in look.learning_rates):
                raise UpdateError("what the attacks read is trained at different learning rates")
            rate = sum(next(iter(rates)) for rates in look.learning_rates) / local_steps
            return tap.end(look.step, Stage.SHARED, learning_rate=rate, local_steps=local_steps)

        self._run(look, self.exposed, str(Stage.SHARED), take)
        look.stepped.add(0)

    # ---- results ----------------------------------------------------------------------------

    def step_ends(self, trained: bool) -> tuple[Look, dict[Series, Outcome] | None] | None:
        """Ends the look once its optimizer step is over.

        Args:
            trained: the batch gave a gradient (false: ``training_step`` returned None).

        Returns:
            None while there is no finished look; the look and its outcomes, or None in their
            place where nothing was shared.
        """
        tried, self._tried = self._tried, False
        self._midway = (self._midway or trained) and not tried
        look = self.look
        if look is None:
            return None
        held = look.batch if trained else None
        if held is not None:
            look.batches.append(held)
        look.batch = None
        self._inversion.batch_ends(held)
        if not tried:
            return None
        if self._update_tap is not None and self._local_steps is not None:
            if len(look.learning_rates) < self._local_steps:
                return None
            self._attack_update(look, self._local_steps, self._update_tap)
        outcomes = self._finish(look)
        self.look = None
        self._clock.interrupted()
        self._tap.disarm()
        self.games.disarm(look.batches)
        self._inversion.disarm()
        if self._own_part is not None:
            self._own_part.disarm()
        return look, outcomes

    def _finish(self, look: Look) -> dict[Series, Outcome] | None:
        """Scores every attack, pools over processes, and fixes the next look.

        That is the next step where, for the first time, a result is still waited for.
        """
        keys = [
            (str(s), plan)
            for s in self._stages
            for plan in self._plans
            if exists_at(plan.attack, str(s))
        ]
        if self._own_part is not None:
            keys += [(HEAD_ONLY, plan) for plan in self._plans if _reads_head_only(plan)]
        if self._audits:
            keys += [(AUDIT, plan) for plan in self._plans if plan.canary is not None]
        with self._timed(look):
            results = self._pool.score(look, keys)
        soon = not self._hurried and any(isinstance(r, Waiting) for r in results)
        self._hurried |= soon
        next_step = look.step + 1 if soon else self._next_step(look)
        outcomes, self._cadence.next_step = self._pool.outcomes(keys, results, next_step)
        return outcomes

    def _next_step(self, look: Look) -> int:
        step_seconds = self._clock.seconds or look.step_seconds
        proposed = self._cadence.after_look(look.step, look.seconds, step_seconds)
        return max(proposed, look.step + (self._local_steps or 1))
