"""LeakageMonitor: attacks as in-training canaries, logged beside the user's own metrics."""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as L
import torch
from lightning.pytorch.strategies import (
    DDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
)
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from lightning_fedleak.anatomy import EMBEDDING_WEIGHT, HEAD_WEIGHT, Anatomy, find_anatomy
from lightning_fedleak.attacks.base import Attack, Observation, WordGuess
from lightning_fedleak.batches import BatchAdapter, TokenBatch, read_batch
from lightning_fedleak.callbacks.cadence import Cadence, EveryNSteps, MaxOverhead
from lightning_fedleak.callbacks.look import (
    PREFIX,
    Look,
    Outcome,
    Plan,
    combine,
    not_shared,
    plan_attack,
    row,
    unknown,
)
from lightning_fedleak.callbacks.report import (
    JsonLines,
    RevealFile,
    add_hparams,
    add_layout,
    add_score_histograms,
)
from lightning_fedleak.callbacks.scoring import WORD_METRICS, Tally, WordTruth, tally
from lightning_fedleak.snapshots import (
    GradientSnapshot,
    GradientTap,
    HeadOwnPart,
    Stage,
    UpdateTap,
)
from lightning_fedleak.strategies import DefendedStrategy, before_real_step
from lightning_fedleak.threats import Capability

_log = logging.getLogger(__name__)

MAX_DEFERRALS = 20
HISTOGRAM_EVERY_LOOKS = 10


class LeakageMonitor(L.Callback):
    """Attacks what a client would share, during training, and logs how much it gives away.

    Training is not disturbed: parameters, optimizer state, logged losses and random numbers are
    bit-identical to the run without the monitor. An attack that fails is counted in
    ``monitor/failures`` and its metrics read NaN (*unknown*), never 0.

    A step that shares nothing (an AMP step that was skipped, a batch without a single target) is
    not looked at; the look moves to the next step, at most 20 times in a row, after which it
    counts as a failure.

    Args:
        attacks: the attacks, each with a name of its own.
        every_n_steps: look at optimizer steps 0, n, 2n, ... Default 50.
        max_overhead: look so seldom that looks cost at most this share of the training time.
            Either this or ``every_n_steps``.
        stages: where to measure: ``"shared"`` (what leaves the client; the default), ``"local"``
            (before the client's clipping and defences), ``"aggregate"`` (after the reduction over
            clients).
        batch_adapter: turns a batch of your own into a :class:`TokenBatch`; needed only where
            :func:`read_batch` does not know its form.
        reveal: write recovered words to a local file of mode 0600, never to a logger.
        utility: names among ``trainer.callback_metrics`` to repeat as ``utility/<name>``.
        client: who is a client: ``"rank"`` (each process) or ``"world"`` (all processes are one
            company's; shared is then the reduced gradient). Default: as the strategy says,
            else ``"rank"``.
        local_steps: attack the weight change of so many optimizer steps in place of one gradient
            (FedAvg). One client only.
        head_own_part: attack the head's own part of a tied matrix as well, logged as
            ``leakage_local/<attack>_head_only``: the worst case, which no adversary sees.
        assume: capabilities of the adversary besides seeing what is shared. Default: it knows
            the model and has public text.
        tokenizer: decodes what ``reveal`` writes; without one it writes token ids.
        log_dir: where ``leakage.jsonl`` goes; default the logger's folder.
        anatomy: overrides for :func:`find_anatomy` (``model``, ``embedding``, ``head``, ...).

    Attributes:
        latest: the newest value by log name; NaN is unknown. Empty before the first look.
        looks: looks finished.
        failures: results that are unknown.
        last_step: optimizer step of the newest values.

    Raises:
        ValueError: contradictory or unknown arguments.
    """

    def __init__(
        self,
        attacks: Sequence[Attack] | Attack,
        every_n_steps: int | None = None,
        max_overhead: float | None = None,
        stages: Sequence[str] = ("shared",),
        batch_adapter: BatchAdapter | None = None,
        reveal: bool = False,
        utility: Sequence[str] = ("train_loss", "val_loss"),
        client: Literal["rank", "world"] | None = None,
        local_steps: int | None = None,
        head_own_part: bool = False,
        assume: Collection[Capability] = (Capability.KNOWS_MODEL, Capability.KNOWS_PUBLIC_TEXT),
        tokenizer: Any | None = None,
        log_dir: str | Path | None = None,
        anatomy: Mapping[str, Any] | None = None,
    ) -> None:
        self.attacks = [attacks] if isinstance(attacks, Attack) else list(attacks)
        _check_attacks(self.attacks)
        if every_n_steps is not None and max_overhead is not None:
            raise ValueError(
                "give every_n_steps or max_overhead, not both: one fixes how often to look, the "
                "other lets the cost decide"
            )
        self.cadence: Cadence = (
            MaxOverhead(max_overhead)
            if max_overhead is not None
            else EveryNSteps(50 if every_n_steps is None else every_n_steps)
        )
        self.stages = tuple(Stage(s) for s in _known_stages(stages))
        self.batch_adapter = batch_adapter
        self.reveal = reveal
        self.utility = (utility,) if isinstance(utility, str) else tuple(utility)
        if client not in (None, "rank", "world"):
            raise ValueError(f"client must be 'rank' or 'world', got {client!r}")
        self._client_given = client
        if local_steps is not None and (local_steps < 1 or self.stages != (Stage.SHARED,)):
            raise ValueError(
                f"local_steps must be a positive number with stages=('shared',); got "
                f"local_steps={local_steps}, stages={tuple(str(s) for s in self.stages)}"
            )
        self.local_steps = local_steps
        self.head_own_part = head_own_part
        self.assume = frozenset(assume)
        self.tokenizer = tokenizer
        self.log_dir = None if log_dir is None else Path(log_dir)
        self._anatomy_overrides = dict(anatomy or {})

        self.latest: dict[str, float] = {}
        self.looks = 0
        self.failures = 0
        self.last_step = -1
        self._deferrals = 0
        self._restored: dict[str, Any] = {}
        self._listeners: list[Callable[[L.Trainer], None]] = []
        self._reset()

    def _reset(self) -> None:
        self._plans: list[Plan] = []
        self._look: Look | None = None
        self._removers: list[Callable[[], None]] = []
        self._tap: GradientTap | None = None
        self._update_tap: UpdateTap | None = None
        self._own_part: HeadOwnPart | None = None
        self._keeps_local = False
        self._step_started: float | None = None
        self._step_seconds = 0.0
        self._batch_checked = False
        self._warned: set[str] = set()

    # ---- names ------------------------------------------------------------------------------

    @property
    def state_key(self) -> str:
        """Distinguishes several monitors of one run in a checkpoint."""
        return f"LeakageMonitor[{','.join(a.name for a in self.attacks)}]"

    def metric_names(self) -> list[str]:
        """Names of the values that this monitor logs at each look."""
        names = ["monitor/failures", "monitor/seconds"]
        for prefix, attack in self._series():
            names.append(f"{prefix}/{attack}/exposed")
            for metric in WORD_METRICS:
                root = f"{prefix}/{attack}/{metric}"
                names += [root, f"{root}_low", f"{root}_high", f"{root}_worst_client"]
        return names

    def _series(self) -> list[tuple[str, str]]:
        series = [(PREFIX[str(s)], a.name) for s in self.stages for a in self.attacks]
        if self.head_own_part:
            series += [(PREFIX["local"], f"{a.name}_head_only") for a in self.attacks]
        return series

    def subscribe(self, listener: Callable[[L.Trainer], None]) -> None:
        """Calls ``listener(trainer)`` on every process after each look, until the fit ends."""
        self._listeners.append(listener)

    # ---- set-up -----------------------------------------------------------------------------

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Checks what can be checked before the model is on its device."""
        if stage != "fit":
            return
        others = [c for c in _monitors(trainer) if c is not self and c.state_key == self.state_key]
        if others:
            raise ValueError(
                f"two LeakageMonitors run the same attacks ({self.state_key}); give the attacks "
                "of one of them other names"
            )
        self.client = self._resolve_client(trainer)
        if self.local_steps is not None and trainer.world_size > 1 and self.client == "rank":
            raise ValueError(
                "local_steps describes one client that trains on its own; DDP averages at every "
                "step. Use client='world', or run one process."
            )
        if self.head_own_part:
            anatomy = self._find_anatomy(pl_module)
            if anatomy.head is None or not anatomy.tied:
                raise ValueError(
                    "head_own_part=True is for a tied head only; here the head's gradient is its "
                    "own and is attacked as it is shared"
                )
            self._own_part = HeadOwnPart(anatomy.head)

    def _resolve_client(self, trainer: L.Trainer) -> str:
        strategy = trainer.strategy
        of_strategy = strategy.client if isinstance(strategy, DefendedStrategy) else None
        if of_strategy and self._client_given and of_strategy != self._client_given:
            raise ValueError(
                f"LeakageMonitor(client={self._client_given!r}) contradicts the strategy's "
                f"client={of_strategy!r}: leave the monitor's out"
            )
        client = self._client_given or of_strategy or "rank"
        if isinstance(strategy, (SingleDeviceStrategy, DDPStrategy)):
            return client
        if isinstance(strategy, ModelParallelStrategy) and client == "world":
            return client
        raise ValueError(
            f"LeakageMonitor does not know what {type(strategy).__name__} shares when. It works "
            "with a single device, with DDP, and with ModelParallelStrategy under client='world'."
        )

    def _find_anatomy(self, pl_module: L.LightningModule) -> Anatomy:
        return find_anatomy(pl_module, **self._anatomy_overrides)

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Finds the model's parts, checks and calibrates the attacks, installs the taps."""
        anatomy = self._find_anatomy(pl_module)
        self._anatomy = anatomy
        self._device = pl_module.device
        self._trainer = trainer
        ddp_rank = isinstance(trainer.strategy, DDPStrategy) and self.client == "rank"
        self._plans = [
            plan_attack(a, anatomy, trainer.optimizers, self.assume, reduces_all=ddp_rank)
            for a in self.attacks
        ]
        folder = trainer.log_dir or trainer.default_root_dir
        folder = Path(folder) if self.log_dir is None else self.log_dir
        self._jsonl = JsonLines(folder / "leakage.jsonl")
        self._reveal_file = (
            RevealFile(folder / f"revealed_words.rank{trainer.global_rank}.txt", self.tokenizer)
            if self.reveal
            else None
        )
        self._prepare_attacks(anatomy)
        self._install_taps(trainer, anatomy, ddp_rank)
        self._say_what_is_not_tested(anatomy)
        if trainer.is_global_zero:
            prefixes = list(dict.fromkeys(p for p, _ in self._series()))
            names = [a.name for a in self.attacks]
            add_layout(trainer.loggers, self.utility, names, prefixes)

    def _prepare_attacks(self, anatomy: Anatomy) -> None:
        restored = self._restored.pop("attacks", {})
        for plan in self._plans:
            attack, saved = plan.attack, restored.get(plan.attack.name)
            if saved is not None and saved["config"] == repr(sorted(attack.config().items())):
                attack.load_state_dict(saved["tensors"])
            elif plan.exposed:
                started = time.perf_counter()
                attack.prepare(anatomy)
                seconds = time.perf_counter() - started
                if seconds > 1:
                    rank_zero_info(f"LeakageMonitor: '{attack.name}' calibrated in {seconds:.1f} s")

    def _install_taps(self, trainer: L.Trainer, anatomy: Anatomy, ddp_rank: bool) -> None:
        roles = dict.fromkeys(r for plan in self._plans if plan.exposed for r in plan.roles)
        parameters = {r: p for r in roles if (p := anatomy.parameter(r)) is not None}
        if self.local_steps is not None:
            self._update_tap = UpdateTap(parameters, tied=anatomy.tied)
            return
        self._tap = GradientTap(parameters, tied=anatomy.tied)
        strategy = trainer.strategy
        separated = isinstance(strategy, DefendedStrategy) and strategy.separates_stages
        if isinstance(strategy, DefendedStrategy):
            self._removers.append(strategy.add_tap(self._on_strategy_stage))
        else:
            for optimizer in trainer.optimizers:
                self._removers.append(
                    before_real_step(optimizer, lambda o=optimizer: self._on_real_step(o))
                )
        self._keeps_local = ddp_rank and not separated
        if self._keeps_local:
            self._tap.keep_local()

    def _say_what_is_not_tested(self, anatomy: Anatomy) -> None:
        hidden = [plan for plan in self._plans if not plan.exposed]
        if not hidden:
            return
        tested = {r for plan in self._plans if plan.exposed for r in plan.roles}
        trained = [n for n in anatomy.trainable_names() if n not in _names(anatomy, tested)]
        shown = ", ".join(trained[:3]) + (f" and {len(trained) - 3} more" if trained[3:] else "")
        for plan in hidden:
            rank_zero_warn(
                f"LeakageMonitor: '{plan.attack.name}' reads the gradient of "
                f"{', '.join(plan.roles)}, which is not shared in this run (not trained). It is "
                f"logged as 0 with leakage/{plan.attack.name}/exposed = 0. That is not 'safe': "
                f"the gradients of {len(trained)} other parameters ({shown or 'none'}) do leave "
                "the client, and no attack of this monitor reads them."
            )

    # ---- a step -----------------------------------------------------------------------------

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Starts a look where one is due, and takes the truth before any defence does."""
        now = time.perf_counter()
        if self._step_started is not None and self._look is None:
            passed = now - self._step_started
            self._step_seconds = (
                passed if self._step_seconds == 0 else 0.8 * self._step_seconds + 0.2 * passed
            )
        self._step_started = now
        if not self._batch_checked:
            self._read(batch)
            self._batch_checked = True
        if self._look is None and self.cadence.due(trainer.global_step):
            self._look = Look(trainer.global_step)
            with self._look.clock(self._device):
                self._begin(self._look)
        if self._look is not None:
            try:
                self._look.batches.append(self._read(batch))
            except Exception as error:
                self._look.truth_error = _reason(error)

    def _read(self, batch: Any) -> TokenBatch:
        if self.batch_adapter is not None:
            return self.batch_adapter(batch)
        return read_batch(batch, self._anatomy.kind)

    def _begin(self, look: Look) -> None:
        for plan in self._plans:
            if plan.exposed:
                try:
                    plan.attack.refresh(self._anatomy, look.step)
                except Exception as error:
                    for stage in self.stages:
                        look.guesses[(str(stage), plan.attack.name)] = _reason(error)
        if self._tap is not None:
            self._tap.arm()
        if self._own_part is not None:
            self._own_part.arm()
        if self._update_tap is not None:
            self._update_tap.begin()

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer
    ) -> None:
        """The local stage on a plain single device: before Lightning's clipping."""
        if self._look is None:
            return
        if self.local_steps is not None:
            self._look.learning_rates.append(float(optimizer.param_groups[0]["lr"]))
            return
        plain = not isinstance(trainer.strategy, DefendedStrategy)
        if plain and not self._keeps_local:
            self._attack(Stage.LOCAL, optimizer)

    def _on_real_step(self, optimizer: Optimizer) -> None:
        """A plain strategy's optimizer is about to step."""
        if self._look is None or self._look.stepped:
            return
        if self._keeps_local:
            self._attack(Stage.LOCAL, optimizer, kept=True)
        self._attack(Stage.SHARED, optimizer, kept=self._keeps_local)
        self._attack(Stage.AGGREGATE, optimizer)

    def _on_strategy_stage(self, stage: Stage, optimizer: Optimizer) -> None:
        """A DefendedStrategy shows ``p.grad`` at a stage."""
        if self._look is None or self._look.stepped:
            return
        kept = self._keeps_local and stage is not Stage.AGGREGATE
        self._attack(stage, optimizer, kept=kept)

    def _attack(self, stage: Stage, optimizer: Optimizer, *, kept: bool = False) -> None:
        look, tap = self._look, self._tap
        assert look is not None
        assert tap is not None
        if look.step_seconds == 0:
            look.step_seconds = time.perf_counter() - look.started - look.seconds
        mine = [p for p in self._plans if p.exposed and p.optimizer in (optimizer, None)]
        last = stage is Stage.AGGREGATE
        if stage in self.stages or (last and self._own_part is not None):
            with look.clock(self._device):
                scale = self._loss_scale() if kept else 1.0
                if stage in self.stages:
                    view = tap.view(look.step, stage, kept=kept, client=self._rank, scale=scale)
                    self._run(mine, str(stage), view)
                if last and self._own_part is not None:
                    own = self._own_part.view(
                        look.step, client=self._rank, scale=self._loss_scale()
                    )
                    self._run(mine, "head_only", own)
        if last and (mine or not any(p.exposed for p in self._plans)):
            look.stepped = True

    @property
    def _rank(self) -> int:
        return int(self._trainer.global_rank) if self.client == "rank" else 0

    def _loss_scale(self) -> float:
        scaler = getattr(self._trainer.precision_plugin, "scaler", None)
        return 1.0 if scaler is None else float(scaler.get_scale())

    def _run(self, plans: Sequence[Plan], stage: str, view: GradientSnapshot) -> None:
        look = self._look
        assert look is not None
        for plan in plans:
            key = (stage, plan.attack.name)
            if key in look.guesses:
                continue
            try:
                absent = [r for r in plan.roles if r not in view.tensors]
                if absent:
                    look.guesses[key] = f"no gradient of {', '.join(absent)} in this step"
                    continue
                with torch.no_grad():
                    look.guesses[key] = plan.attack.run(Observation((view,)))
            except Exception as error:
                look.guesses[key] = _reason(error)
                _log.debug("attack '%s' failed", plan.attack.name, exc_info=True)

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Ends a look once its optimizer step is over: scores, pools over clients, logs."""
        look = self._look
        if look is None or (trainer.global_step == look.step and not look.stepped):
            return
        if self._update_tap is not None:
            if trainer.global_step < look.step + (self.local_steps or 1):
                return
            with look.clock(self._device):
                self._attack_update(look)
        with look.clock(self._device):
            outcomes = self._finish(trainer, look)
        self._end_look()
        if outcomes is None:
            self._deferrals += 1
            if self._deferrals <= MAX_DEFERRALS:
                self.cadence.next_step = trainer.global_step
                return
            why = f"nothing was shared in {self._deferrals} steps in a row"
            outcomes = {series: unknown(why) for series in self._series()}
        self._deferrals = 0
        self._publish(trainer, look, outcomes)

    def _attack_update(self, look: Look) -> None:
        tap, steps = self._update_tap, self.local_steps
        assert tap is not None
        assert steps is not None
        rates = look.learning_rates
        try:
            view = tap.end(
                look.step,
                Stage.SHARED,
                learning_rate=sum(rates) / len(rates),
                local_steps=steps,
            )
        except (ValueError, ZeroDivisionError) as error:
            for plan in self._plans:
                look.guesses[(str(Stage.SHARED), plan.attack.name)] = _reason(error)
        else:
            self._run([p for p in self._plans if p.exposed], str(Stage.SHARED), view)
        look.stepped = True

    def _end_look(self) -> None:
        self._look = None
        self._step_started = None
        if self._tap is not None:
            self._tap.disarm()
        if self._own_part is not None:
            self._own_part.disarm()

    # ---- results ----------------------------------------------------------------------------

    def _finish(self, trainer: L.Trainer, look: Look) -> dict[tuple[str, str], Outcome] | None:
        """Scores every attack and pools over processes; None where nothing was shared.

        Every process takes part in the same exchanges whatever failed on it.
        """
        truth = self._truth(trainer, look)
        results: dict[tuple[str, str], Tally | str | None] = {}
        keys = [(str(s), p) for s in self.stages for p in self._plans]
        if self._own_part is not None:
            keys += [("head_only", p) for p in self._plans]
        rows = []
        for stage, plan in keys:
            key = (stage, plan.attack.name)
            results[key] = self._score(look, key, plan, truth, trainer)
            rows.append(row(results[key]))
        rank_zero = [self._next_step(look), look.seconds]
        gathered = self._gather(trainer, torch.tensor([*chain.from_iterable(rows), *rank_zero]))
        self.cadence.next_step = int(gathered[0, -2])
        table = gathered[:, :-2].reshape(gathered.shape[0], len(keys), -1)
        if self.client == "world":
            table = table[:1] if not _any_failed(table) else table
        outcomes: dict[tuple[str, str], Outcome] = {}
        for i, (stage, plan) in enumerate(keys):
            name = plan.attack.name + ("_head_only" if stage == "head_only" else "")
            prefix = PREFIX.get(stage, PREFIX["local"])
            if not plan.exposed:
                outcomes[(prefix, name)] = not_shared()
                continue
            mine = results[(stage, plan.attack.name)]
            outcome = combine(table[:, i], mine if isinstance(mine, str) else None)
            if outcome is None:
                return None
            outcomes[(prefix, name)] = outcome
        return outcomes

    def _truth(self, trainer: L.Trainer, look: Look) -> WordTruth | None:
        truth = None
        try:
            if look.truth_error is None:
                truth = WordTruth.of(look.batches)
        except Exception as error:
            look.truth_error = _reason(error)
        if self.client == "rank" or trainer.world_size == 1:
            return truth
        size = self._anatomy.vocab_size
        mask = torch.zeros(2, size, dtype=torch.bool, device=self._device)
        if truth is not None:
            mask |= truth.mask(size).to(mask.device)
        n_targets = truth.n_targets if truth is not None else 0
        joined = trainer.strategy.reduce(mask.to(torch.int32), reduce_op="sum")
        total = trainer.strategy.reduce(
            torch.tensor(n_targets, device=self._device), reduce_op="sum"
        )
        assert isinstance(joined, Tensor)
        return None if truth is None else WordTruth.of_mask(joined > 0, int(total))

    def _score(
        self,
        look: Look,
        key: tuple[str, str],
        plan: Plan,
        truth: WordTruth | None,
        trainer: L.Trainer,
    ) -> Tally | str | None:
        if look.truth_error is not None:
            return f"the batch could not be read: {look.truth_error}"
        if truth is None or truth.n_targets == 0 or not look.stepped or not plan.exposed:
            return None
        guess = look.guesses.get(key, "the attack was not run")
        if isinstance(guess, str):
            return guess
        try:
            result = tally(guess, truth, self._anatomy.vocab_size)
            if isinstance(guess, WordGuess):
                types = truth.types(guess.surface)
                if self._reveal_file is not None:
                    self._reveal_file.append(look.step, key[0], key[1], guess, types)
                if trainer.is_global_zero and self.looks % HISTOGRAM_EVERY_LOOKS == 0:
                    name = f"{PREFIX.get(key[0], PREFIX['local'])}/{key[1]}"
                    add_score_histograms(trainer.loggers, name, guess, types, look.step)
        except Exception as error:
            return _reason(error)
        return result

    def _next_step(self, look: Look) -> int:
        step_seconds = self._step_seconds or look.step_seconds
        proposed = self.cadence.after_look(look.step, look.seconds, step_seconds)
        return max(proposed, look.step + (self.local_steps or 1))

    def _gather(self, trainer: L.Trainer, values: Tensor) -> Tensor:
        """(processes, n) of every process's values."""
        if trainer.world_size == 1:
            return values.unsqueeze(0)
        gathered = trainer.strategy.all_gather(values.to(self._device))
        return gathered.cpu()

    def _publish(
        self, trainer: L.Trainer, look: Look, outcomes: Mapping[tuple[str, str], Outcome]
    ) -> None:
        values: dict[str, float] = {}
        for (prefix, name), outcome in outcomes.items():
            values.update(outcome.values(prefix, name))
            if outcome.unknown is not None:
                self.failures += 1
                self._warn_of_failure(name, look.step, outcome.unknown)
        for name in self.utility:
            value = trainer.callback_metrics.get(name)
            if value is not None:
                values[f"utility/{name}"] = float(value)
        values["monitor/failures"] = float(self.failures)
        values["monitor/seconds"] = look.seconds
        self.looks += 1
        self.last_step = look.step
        self.latest = values
        for name, number in values.items():
            self.log(name, number, on_step=True, on_epoch=False, logger=False, batch_size=1)
        finite = {n: v for n, v in values.items() if math.isfinite(v)}
        for logger in trainer.loggers:
            logger.log_metrics(finite, step=look.step)
        if trainer.is_global_zero:
            self._write_lines(look, outcomes, trainer.world_size)
        for listener in self._listeners:
            listener(trainer)

    def _warn_of_failure(self, attack: str, step: int, why: str) -> None:
        if (attack + why) in self._warned:
            return
        self._warned.add(attack + why)
        rank_zero_warn(
            f"LeakageMonitor: '{attack}' gave no result at step {step}: {why}. Its leakage there "
            "is unknown, not 0; training goes on. (Said once for each reason; monitor/failures "
            "counts them.)"
        )

    def _write_lines(
        self, look: Look, outcomes: Mapping[tuple[str, str], Outcome], world_size: int
    ) -> None:
        configs = {a.name: a.config() for a in self.attacks}
        stages = {prefix: stage for stage, prefix in PREFIX.items()}
        pooled = world_size > 1 and self.client == "rank"
        for (prefix, name), outcome in outcomes.items():
            extra = {f"{k}_worst_client": v for k, v in outcome.worst.items()}
            extra["type_count_error"] = outcome.type_count_error
            self._jsonl.append(
                step=look.step,
                stage=stages[prefix],
                client="pooled" if pooled else 0,
                round_=None if self.local_steps is None else look.step // self.local_steps,
                attack=name,
                config=configs.get(name, configs.get(name.removesuffix("_head_only"), {})),
                n=outcome.n,
                exposed=outcome.exposed,
                rates=outcome.rates,
                extra=extra,
                unknown=outcome.unknown,
            )

    # ---- ends and checkpoints ---------------------------------------------------------------

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Leaves a row in TensorBoard's table of runs."""
        if trainer.is_global_zero and self.latest:
            settings = {f"fedleak/{a.name}": repr(a.config()) for a in self.attacks}
            settings["fedleak/strategy"] = type(trainer.strategy).__name__
            defenses = getattr(trainer.strategy, "defenses", ())
            settings["fedleak/defenses"] = ", ".join(d.name for d in defenses) or "none"
            results = {
                f"hp/{n}": v
                for n, v in self.latest.items()
                if n.startswith("utility/") or n.endswith("/f1")
            }
            add_hparams(trainer.loggers, settings, results)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Removes every tap, also after an exception."""
        for remove in self._removers:
            remove()
        if self._tap is not None:
            self._tap.close()
        if self._own_part is not None:
            self._own_part.close()
        self._listeners.clear()
        self._reset()

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run goes on with: plain numbers, strings and tensors."""
        return {
            "looks": self.looks,
            "failures": self.failures,
            "deferrals": self._deferrals,
            "next_step": self.cadence.next_step,
            "last_step": self.last_step,
            "latest": dict(self.latest),
            "attacks": {
                a.name: {
                    "config": repr(sorted(a.config().items())),
                    "tensors": {k: v.detach().cpu() for k, v in a.state_dict().items()},
                }
                for a in self.attacks
            },
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes back what :meth:`state_dict` gave."""
        self.looks = state_dict["looks"]
        self.failures = state_dict["failures"]
        self._deferrals = state_dict["deferrals"]
        self.cadence.next_step = state_dict["next_step"]
        self.last_step = state_dict["last_step"]
        self.latest = dict(state_dict["latest"])
        self._restored = {
            "attacks": {
                name: saved for name, saved in state_dict["attacks"].items() if saved["tensors"]
            }
        }


def _check_attacks(attacks: Sequence[Attack]) -> None:
    if not attacks:
        raise ValueError("LeakageMonitor needs at least one attack; got an empty list")
    for attack in attacks:
        if not isinstance(attack, Attack):
            raise TypeError(
                f"attacks must be instances of Attack, such as FlatChat(); got {attack!r}"
            )
        if not re.fullmatch(r"[A-Za-z0-9_.\-]+", attack.name):
            raise ValueError(
                f"the name {attack.name!r} cannot be part of a log name: use letters, digits, "
                "'_', '-' and '.'"
            )
    names = [a.name for a in attacks]
    double = sorted({n for n in names if names.count(n) > 1})
    if double:
        raise ValueError(
            f"several attacks are named {', '.join(double)}: their results would overwrite each "
            "other in the logs. Give each a name: FlatChat(name='flatchat_abs')."
        )


def _known_stages(stages: Sequence[str]) -> list[str]:
    given = [stages] if isinstance(stages, str) else list(stages)
    known = [str(s) for s in Stage]
    wrong = [s for s in given if s not in known]
    if wrong or not given:
        raise ValueError(f"stages must be some of {known}, got {given}")
    return [s for s in known if s in given]


def _monitors(trainer: L.Trainer) -> list[LeakageMonitor]:
    return [c for c in trainer.callbacks if isinstance(c, LeakageMonitor)]  # type: ignore[attr-defined]


def _names(anatomy: Anatomy, roles: Collection[str]) -> set[str]:
    names = {anatomy.parameter_name(r) for r in roles}
    if anatomy.tied and {HEAD_WEIGHT, EMBEDDING_WEIGHT} & set(roles):
        names |= {anatomy.parameter_name(HEAD_WEIGHT), anatomy.parameter_name(EMBEDDING_WEIGHT)}
    return {n for n in names if n is not None}


def _any_failed(table: Tensor) -> bool:
    return bool((table[:, :, 0] == 1.0).any())


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
