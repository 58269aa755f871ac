"""LeakageMonitor: attacks as in-training canaries, logged beside the user's own metrics."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as L
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities import rank_zero_info
from torch.optim import Optimizer

from lightning_fedleak.anatomy import Anatomy, find_anatomy
from lightning_fedleak.attacks.base import Attack
from lightning_fedleak.batches import BatchAdapter, BatchError, TokenBatch, read_batch
from lightning_fedleak.callbacks.cadence import Cadence, EveryNSteps, MaxOverhead
from lightning_fedleak.callbacks.checks import (
    check_attacks,
    known_stages,
    plan_attack,
    resolve_client,
)
from lightning_fedleak.callbacks.look import HEAD_ONLY, Look, Outcome, Plan, unknown
from lightning_fedleak.callbacks.pooling import Series, series_name
from lightning_fedleak.callbacks.report import JsonLines, Report, RevealFile, add_layout
from lightning_fedleak.callbacks.scoring import WORD_METRICS
from lightning_fedleak.callbacks.watch import Watch
from lightning_fedleak.snapshots import HeadOwnPart, Stage
from lightning_fedleak.threats import Capability

MAX_DEFERRALS = 20


class LeakageMonitor(L.Callback):
    """Attacks what a client would share, during training, and logs how much it gives away.

    Training is not disturbed: parameters, optimizer state, logged losses and random numbers are
    bit-identical to the run without the monitor. An attack that fails is counted in
    ``monitor/failures`` and its metrics read NaN (*unknown*), never 0.

    A step that shares nothing (an AMP step that was skipped, a batch without a single target) is
    not looked at; the look moves to the next step, at most 20 times in a row, after which it
    counts as a failure. So does a fit that ends before a look that was due could end.

    The first step of each fit is looked at. Layers that are frozen or unfrozen on the way are
    followed at the next look.

    Args:
        attacks: the attacks, each with a name of its own.
        every_n_steps: look at optimizer steps 0, n, 2n, ... Default 50.
        max_overhead: look so seldom that looks cost at most this share of the training time.
            Either this or ``every_n_steps``.
        stages: where to measure: ``"shared"`` (what leaves the client; the default), ``"local"``
            (before the defences), ``"aggregate"`` (after the reduction over clients).
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
        check_attacks(self.attacks)
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
        self.stages = known_stages(stages)
        self.batch_adapter = batch_adapter
        self.reveal = reveal
        self.utility = (utility,) if isinstance(utility, str) else tuple(utility)
        if client not in (None, "rank", "world"):
            raise ValueError(f"client must be 'rank' or 'world', got {client!r}")
        self._client_given = client
        plain = self.stages == (Stage.SHARED,) and not head_own_part
        if local_steps is not None and (local_steps < 1 or not plain):
            raise ValueError(
                "local_steps must be a positive number with stages=('shared',) and without "
                f"head_own_part; got local_steps={local_steps}, "
                f"stages={tuple(str(s) for s in self.stages)}, head_own_part={head_own_part}"
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
        self._prepared: set[str] = set()
        self._looks_before = 0
        self._listeners: list[Callable[[L.Trainer], None]] = []
        self._reset()

    def _reset(self) -> None:
        self._watch: Watch | None = None
        self._own_part: HeadOwnPart | None = None
        self._report: Report | None = None
        self._batch_checked = False

    # ---- names ------------------------------------------------------------------------------

    @property
    def state_key(self) -> str:
        """Distinguishes several monitors of one run in a checkpoint."""
        stages, attacks = ",".join(self.stages), ",".join(a.name for a in self.attacks)
        return f"LeakageMonitor[{stages}: {attacks}]"

    def metric_names(self) -> list[str]:
        """Names of the values that this monitor logs at each look."""
        names = ["monitor/failures", "monitor/seconds"]
        for prefix, attack in self._series():
            names.append(f"{prefix}/{attack}/exposed")
            for metric in WORD_METRICS:
                root = f"{prefix}/{attack}/{metric}"
                names += [root, f"{root}_low", f"{root}_high", f"{root}_worst_client"]
        return names

    def _series(self) -> list[Series]:
        stages = [*map(str, self.stages), *([HEAD_ONLY] if self.head_own_part else [])]
        return [series_name(stage, attack.name) for stage in stages for attack in self.attacks]

    def subscribe(self, listener: Callable[[L.Trainer], None]) -> None:
        """Calls ``listener(trainer)`` on every process after each look, until the fit ends."""
        self._listeners.append(listener)

    # ---- set-up -----------------------------------------------------------------------------

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Checks what can be checked before the model is on its device."""
        if stage != "fit":
            return
        self.cadence.next_step = self._deferrals = 0
        for other in _monitors(trainer):
            both = {"/".join(n) for n in self._series()} & {"/".join(n) for n in other._series()}
            if other is not self and both:
                raise ValueError(
                    f"another LeakageMonitor of this run logs {', '.join(sorted(both))} too; give "
                    "the attacks of one of them other names"
                )
        self.client = resolve_client(self._client_given, trainer.strategy)
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

    def _find_anatomy(self, pl_module: L.LightningModule) -> Anatomy:
        return find_anatomy(pl_module, **self._anatomy_overrides)

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Finds the model's parts, checks and calibrates the attacks, installs the taps."""
        anatomy = self._find_anatomy(pl_module)
        self._kind = anatomy.kind
        ddp_rank = isinstance(trainer.strategy, DDPStrategy) and self.client == "rank"

        def plan() -> list[Plan]:
            return [
                plan_attack(a, anatomy, trainer.optimizers, self.assume, reduces_all=ddp_rank)
                for a in self.attacks
            ]

        folder = Path(trainer.log_dir or trainer.default_root_dir)
        folder = folder if self.log_dir is None else self.log_dir
        self._jsonl = JsonLines(folder / "leakage.jsonl")
        revealed = folder / f"revealed_words.rank{trainer.global_rank}.txt"
        self._report = Report(
            trainer,
            self.attacks,
            self._jsonl,
            RevealFile(revealed, self.tokenizer) if self.reveal else None,
            pooled=trainer.world_size > 1 and self.client == "rank",
            local_steps=self.local_steps,
        )
        self._watch = Watch(
            trainer,
            anatomy,
            plan,
            stages=self.stages,
            client=self.client,
            cadence=self.cadence,
            local_steps=self.local_steps,
            own_part=self._own_part,
            witness=self._report.show,
        )
        self._prepare_attacks(self._watch)
        if trainer.is_global_zero:
            prefixes = list(dict.fromkeys(p for p, _ in self._series()))
            names = [a.name for a in self.attacks]
            add_layout(trainer.loggers, self.utility, names, prefixes)

    def _prepare_attacks(self, watch: Watch) -> None:
        self._prepared = watch.prepared
        restored, self._restored = self._restored, {}
        for attack in (plan.attack for plan in watch.exposed):
            saved = restored.get(attack.name)
            if saved is not None and saved["config"] == repr(sorted(attack.config().items())):
                attack.load_state_dict(saved["tensors"])
                self._prepared.add(attack.name)
            started = time.perf_counter()
            watch.prepare(attack)
            seconds = time.perf_counter() - started
            if seconds > 1:
                rank_zero_info(f"LeakageMonitor: '{attack.name}' calibrated in {seconds:.1f} s")

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Remembers how many looks came before this fit."""
        self._looks_before = self.looks

    # ---- a step -----------------------------------------------------------------------------

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Starts a look where one is due, and takes the truth before any defence does."""
        assert self._watch is not None
        if not self._batch_checked:
            self._check_first(trainer, batch)
        self._watch.step_starts(trainer.global_step)
        self._watch.add_batch(lambda: self._read(batch))

    def _check_first(self, trainer: L.Trainer, batch: Any) -> None:
        """Refuses a batch that cannot be read, on all processes at once."""
        error: Exception | None = None
        try:
            self._read(batch)
        except Exception as refusal:
            error = refusal
        if trainer.strategy.reduce_boolean_decision(error is not None, all=False):
            raise error or BatchError("another process could not read its first batch")
        self._batch_checked = True

    def _read(self, batch: Any) -> TokenBatch:
        if batch is None:
            raise BatchError(
                "the batch is not known before training_step. A step that takes dataloader_iter "
                "cannot be watched: write training_step(self, batch, batch_idx)."
            )
        if self.batch_adapter is not None:
            return self.batch_adapter(batch)
        return read_batch(batch, self._kind)

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer
    ) -> None:
        """Tells a step from a batch that only adds to it."""
        assert self._watch is not None
        self._watch.before_step(optimizer)

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Logs a look once its optimizer step is over."""
        assert self._watch is not None
        manual = not pl_module.automatic_optimization
        ended = self._watch.step_ends(batch is not None and (manual or bool(outputs)))
        if ended is None:
            return
        look, outcomes = ended
        if trainer.global_step == look.step:
            raise RuntimeError(
                "an optimizer stepped without Lightning, which counts no step then, so that "
                "LeakageMonitor cannot tell when to look again. In training_step use "
                "self.optimizers() without use_pl_optimizer=False."
            )
        if outcomes is None:
            self._deferrals += 1
            if self._deferrals <= MAX_DEFERRALS:
                self.cadence.next_step = trainer.global_step
                return
            why = f"nothing was shared in {self._deferrals} steps in a row"
            outcomes = {series: unknown(why) for series in self._series()}
        self._deferrals = 0
        self._publish(trainer, look, outcomes)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """A fit in which looks were due and none could end is unknown, not safe."""
        due = self._deferrals > 0 or self.cadence.due(trainer.global_step - 1)
        if due and self.looks == self._looks_before:
            why = "training ended before anything that was shared could be looked at"
            outcomes = dict.fromkeys(self._series(), unknown(why))
            self._publish(trainer, Look(trainer.global_step), outcomes, in_step=False)

    # ---- results ----------------------------------------------------------------------------

    def _publish(
        self,
        trainer: L.Trainer,
        look: Look,
        outcomes: Mapping[Series, Outcome],
        *,
        in_step: bool = True,
    ) -> None:
        values: dict[str, float] = {}
        for (prefix, name), outcome in outcomes.items():
            values.update(outcome.values(prefix, name))
            self.failures += outcome.unknown is not None
        for name in self.utility:
            value = trainer.callback_metrics.get(name)
            if value is not None:
                values[f"utility/{name}"] = float(value)
        values["monitor/failures"] = float(self.failures)
        values["monitor/seconds"] = look.seconds
        self.looks += 1
        self.last_step = look.step
        self.latest = values
        for name, number in values.items() if in_step else ():
            trainer.lightning_module.log(
                name, number, on_step=True, on_epoch=False, logger=False, batch_size=1
            )
        assert self._report is not None
        self._report.write(look, outcomes, values)
        for listener in self._listeners:
            listener(trainer)

    # ---- ends and checkpoints ---------------------------------------------------------------

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Leaves a row in TensorBoard's table of runs."""
        if self._report is not None:
            self._report.write_summary(self.latest)

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        """Removes every tap; Lightning calls no teardown after an exception."""
        self._close()

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Removes every tap."""
        self._close()

    def _close(self) -> None:
        if self._watch is not None:
            self._watch.close()
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
                if a.name in self._prepared
            },
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes back what :meth:`state_dict` gave."""
        self.looks = state_dict["looks"]
        self.failures = state_dict["failures"]
        self._deferrals = state_dict["deferrals"]
        self.last_step = state_dict["last_step"]
        soon = self.cadence.after_look(self.last_step, 0.0, 0.0)
        self.cadence.next_step = min(state_dict["next_step"], soon)
        self.latest = dict(state_dict["latest"])
        self._restored = {
            name: saved for name, saved in state_dict["attacks"].items() if saved["tensors"]
        }


def _monitors(trainer: L.Trainer) -> list[LeakageMonitor]:
    return [c for c in trainer.callbacks if isinstance(c, LeakageMonitor)]  # type: ignore[attr-defined]
