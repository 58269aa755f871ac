"""The watch over one fit: takes snapshots at each stage, runs the attacks, scores the guesses."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain

import lightning.pytorch as L
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.optim import Optimizer

from lightning_fedleak.anatomy import Anatomy
from lightning_fedleak.attacks.base import Guess
from lightning_fedleak.batches import TokenBatch
from lightning_fedleak.callbacks.cadence import Cadence
from lightning_fedleak.callbacks.look import (
    HEAD_ONLY,
    PREFIX,
    Look,
    Outcome,
    Plan,
    any_failed,
    combine,
    not_shared,
    reason,
    row,
)
from lightning_fedleak.callbacks.scoring import Tally, WordTruth, tally
from lightning_fedleak.snapshots import (
    GradientSnapshot,
    GradientTap,
    HeadOwnPart,
    Observation,
    Stage,
    UpdateTap,
)
from lightning_fedleak.strategies import DefendedStrategy, before_real_step

_log = logging.getLogger(__name__)

Series = tuple[str, str]
Witness = Callable[[Look, Series, Guess, Tensor], None]


def series_name(stage: str, attack: str) -> Series:
    """(prefix, attack) under which a result is logged."""
    if stage == HEAD_ONLY:
        return PREFIX["local"], f"{attack}_{HEAD_ONLY}"
    return PREFIX[stage], attack


class Watch:
    """Everything of a monitor that lives only as long as one fit.

    Args:
        trainer: of this fit; its strategy is set up.
        anatomy: the model's parts.
        plans: the checked attacks.
        stages: where to measure.
        client: ``"rank"`` or ``"world"``.
        cadence: when to look.
        local_steps: attack the weight change of so many steps; None for single gradients.
        own_part: the head's own part of a tied matrix, already installed; None without.
        witness: shown each guess with the true types of its surface.
    """

    def __init__(
        self,
        trainer: L.Trainer,
        anatomy: Anatomy,
        plans: Sequence[Plan],
        *,
        stages: Sequence[Stage],
        client: str,
        cadence: Cadence,
        local_steps: int | None,
        own_part: HeadOwnPart | None,
        witness: Witness,
    ) -> None:
        self._trainer = trainer
        self._anatomy = anatomy
        self._plans = list(plans)
        self._stages = tuple(stages)
        self._client = client
        self._cadence = cadence
        self._local_steps = local_steps
        self._own_part = own_part
        self._witness = witness
        self._device = trainer.strategy.root_device
        self._rank = trainer.global_rank if client == "rank" else 0
        self._removers: list[Callable[[], None]] = []
        self._keeps_local = False
        self._step_started: float | None = None
        self._step_seconds = 0.0
        self.look: Look | None = None

        roles = dict.fromkeys(r for plan in plans if plan.exposed for r in plan.roles)
        parameters = {r: p for r in roles if (p := anatomy.parameter(r)) is not None}
        self._tap = GradientTap(parameters, tied=anatomy.tied)
        self._update_tap: UpdateTap | None = None
        if local_steps is not None:
            self._update_tap = UpdateTap(parameters, tied=anatomy.tied)
        else:
            self._install(trainer)

    def _install(self, trainer: L.Trainer) -> None:
        strategy = trainer.strategy
        separated = False
        if isinstance(strategy, DefendedStrategy):
            separated = strategy.separates_stages
            self._removers.append(strategy.add_tap(self._on_strategy_stage))
        else:
            for optimizer in trainer.optimizers:
                remove = before_real_step(optimizer, partial(self._on_real_step, optimizer))
                self._removers.append(remove)
        ddp = isinstance(strategy, DDPStrategy)
        self._keeps_local = ddp and self._client == "rank" and not separated
        if self._keeps_local:
            self._tap.keep_local()

    def close(self) -> None:
        """Removes every tap."""
        for remove in self._removers:
            remove()
        self._removers.clear()
        self._tap.close()
        self.look = None

    # ---- a step -----------------------------------------------------------------------------

    def step_starts(self, step: int) -> None:
        """Times the steps without a look, and starts a look where one is due."""
        now = time.perf_counter()
        if self._step_started is not None and self.look is None:
            passed = now - self._step_started
            old = self._step_seconds
            self._step_seconds = passed if old == 0 else 0.8 * old + 0.2 * passed
        self._step_started = now
        if self.look is not None or not self._cadence.due(step):
            return
        self.look = look = Look(step)
        with look.clock(self._device):
            for plan in self._plans:
                if plan.exposed:
                    self._refresh(plan, look)
            self._tap.arm()
            if self._own_part is not None:
                self._own_part.arm()
            if self._update_tap is not None:
                self._update_tap.begin()

    def _refresh(self, plan: Plan, look: Look) -> None:
        try:
            plan.attack.refresh(self._anatomy, look.step)
        except Exception as error:
            for stage in (*map(str, self._stages), HEAD_ONLY):
                look.guesses[(stage, plan.attack.name)] = reason(error)

    def add_batch(self, read: Callable[[], TokenBatch]) -> None:
        """Takes the truth of one micro-batch, by reference."""
        if self.look is None:
            return
        try:
            self.look.batches.append(read())
        except Exception as error:
            self.look.truth_error = reason(error)

    def before_step(self, optimizer: Optimizer) -> None:
        """Notes the learning rate of a local step."""
        if self.look is not None and self._local_steps is not None:
            self.look.learning_rates.append(float(optimizer.param_groups[0]["lr"]))

    def _on_real_step(self, optimizer: Optimizer) -> None:
        """An optimizer is about to step; no gradient defence acted on what left the client."""
        if self.look is None or self.look.stepped:
            return
        if self._keeps_local:
            self._attack(self.look, (Stage.LOCAL, Stage.SHARED), optimizer, kept=True)
            self._attack(self.look, (Stage.AGGREGATE,), optimizer)
        else:
            self._attack(self.look, tuple(Stage), optimizer)

    def _on_strategy_stage(self, stage: Stage, optimizer: Optimizer) -> None:
        """A DefendedStrategy shows ``p.grad`` at a stage."""
        if self._keeps_local and stage is Stage.AGGREGATE:
            self._on_real_step(optimizer)
        elif self.look is not None and not self.look.stepped and not self._keeps_local:
            self._attack(self.look, (stage,), optimizer)

    def _attack(
        self,
        look: Look,
        stages: tuple[Stage, ...],
        optimizer: Optimizer,
        *,
        kept: bool = False,
    ) -> None:
        """Attacks a gradient that is the same at all of ``stages``, once."""
        if look.step_seconds == 0:
            look.step_seconds = time.perf_counter() - look.started - look.seconds
        mine = [
            p for p in self._plans if p.exposed and (p.optimizer is optimizer or not p.optimizer)
        ]
        wanted = [s for s in stages if s in self._stages]
        last = Stage.AGGREGATE in stages
        if mine and wanted:
            with look.clock(self._device):
                scale = self._loss_scale() if kept else 1.0
                first = wanted[0]
                view = self._tap.view(look.step, first, kept=kept, client=self._rank, scale=scale)
                self._run(look, mine, str(first), view)
                for plan in mine:
                    guess = look.guesses[(str(first), plan.attack.name)]
                    for stage in wanted[1:]:
                        look.guesses.setdefault((str(stage), plan.attack.name), guess)
        if mine and last and self._own_part is not None:
            with look.clock(self._device):
                scale = self._loss_scale()
                own = self._own_part.view(look.step, client=self._rank, scale=scale)
                self._run(look, mine, HEAD_ONLY, own)
        if last and mine:
            look.stepped = True

    def _loss_scale(self) -> float:
        scaler = getattr(self._trainer.precision_plugin, "scaler", None)
        return 1.0 if scaler is None else float(scaler.get_scale())

    def _run(self, look: Look, plans: Sequence[Plan], stage: str, view: GradientSnapshot) -> None:
        for plan in plans:
            key = (stage, plan.attack.name)
            if key in look.guesses:
                continue
            absent = [r for r in plan.roles if r not in view.tensors]
            if absent:
                look.guesses[key] = f"no gradient of {', '.join(absent)} in this step"
                continue
            try:
                with torch.no_grad():
                    look.guesses[key] = plan.attack.run(Observation((view,)))
            except Exception as error:
                look.guesses[key] = reason(error)
                _log.debug("attack '%s' failed", plan.attack.name, exc_info=True)

    def _attack_update(self, look: Look, local_steps: int, tap: UpdateTap) -> None:
        rates = look.learning_rates
        try:
            mean_rate = sum(rates) / len(rates) if rates else 0.0
            view = tap.end(
                look.step, Stage.SHARED, learning_rate=mean_rate, local_steps=local_steps
            )
        except ValueError as error:
            for plan in self._plans:
                look.guesses[(str(Stage.SHARED), plan.attack.name)] = reason(error)
        else:
            self._run(look, [p for p in self._plans if p.exposed], str(Stage.SHARED), view)
        look.stepped = True

    # ---- results ----------------------------------------------------------------------------

    def step_ends(self, step: int) -> tuple[Look, dict[Series, Outcome] | None] | None:
        """Ends the look once its optimizer step is over.

        Args:
            step: optimizer steps done so far.

        Returns:
            None while there is no finished look; the look and its outcomes, or None in their
            place where nothing was shared.
        """
        look = self.look
        if look is None or (step == look.step and not look.stepped):
            return None
        if self._update_tap is not None and self._local_steps is not None:
            if step < look.step + self._local_steps:
                return None
            with look.clock(self._device):
                self._attack_update(look, self._local_steps, self._update_tap)
        outcomes = self._finish(look)
        self.look = None
        self._step_started = None
        self._tap.disarm()
        if self._own_part is not None:
            self._own_part.disarm()
        return look, outcomes

    def _finish(self, look: Look) -> dict[Series, Outcome] | None:
        """Scores every attack and pools over processes.

        Every process takes part in the same exchanges, whatever failed on it.
        """
        keys = [(str(s), plan) for s in self._stages for plan in self._plans]
        if self._own_part is not None:
            keys += [(HEAD_ONLY, plan) for plan in self._plans]
        with look.clock(self._device):
            truth = self._truth(look)
            results = [self._score(look, stage, plan, truth) for stage, plan in keys]
        values = [*chain.from_iterable(row(r) for r in results), self._next_step(look)]
        gathered = self._gather(torch.tensor(values))
        self._cadence.next_step = int(gathered[0, -1])
        table = gathered[:, :-1].reshape(gathered.shape[0], len(keys), -1)
        if self._client == "world" and not any_failed(table):
            table = table[:1]
        outcomes: dict[Series, Outcome] = {}
        for i, (stage, plan) in enumerate(keys):
            outcome: Outcome | None = not_shared()
            if plan.exposed:
                mine = results[i]
                outcome = combine(table[:, i], mine if isinstance(mine, str) else None)
            if outcome is None:
                return None
            outcomes[series_name(stage, plan.attack.name)] = outcome
        return outcomes

    def _truth(self, look: Look) -> WordTruth | None:
        """The true words, of all processes together where they are one client."""
        truth = None
        try:
            if look.truth_error is None:
                truth = WordTruth.of(look.batches)
        except Exception as error:
            look.truth_error = reason(error)
        strategy, size = self._trainer.strategy, self._anatomy.vocab_size
        if self._client == "rank" or self._trainer.world_size == 1:
            return truth
        mask = torch.zeros(2, size, dtype=torch.int32, device=self._device)
        tokens = torch.zeros((), dtype=torch.int64, device=self._device)
        if truth is not None:
            mask += truth.mask(size).to(mask.device)
            tokens += truth.n_targets
        mask = strategy.reduce(mask, reduce_op="sum")
        tokens = strategy.reduce(tokens, reduce_op="sum")
        return None if truth is None else WordTruth.of_mask(mask > 0, int(tokens))

    def _score(
        self, look: Look, stage: str, plan: Plan, truth: WordTruth | None
    ) -> Tally | str | None:
        if look.truth_error is not None:
            return f"the batch could not be read: {look.truth_error}"
        if truth is None or truth.n_targets == 0 or not look.stepped or not plan.exposed:
            return None
        guess = look.guesses.get((stage, plan.attack.name), "the attack was not run")
        if isinstance(guess, str):
            return guess
        try:
            result = tally(guess, truth, self._anatomy.vocab_size)
            types = truth.types(getattr(guess, "surface", "output"))
            self._witness(look, series_name(stage, plan.attack.name), guess, types)
        except Exception as error:
            return reason(error)
        return result

    def _next_step(self, look: Look) -> int:
        step_seconds = self._step_seconds or look.step_seconds
        proposed = self._cadence.after_look(look.step, look.seconds, step_seconds)
        return max(proposed, look.step + (self._local_steps or 1))

    def _gather(self, values: Tensor) -> Tensor:
        """(processes, n) of every process's values."""
        if self._trainer.world_size == 1:
            return values.unsqueeze(0)
        return self._trainer.strategy.all_gather(values.to(self._device)).cpu()
