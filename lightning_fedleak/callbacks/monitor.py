"""LeakageMonitor: run attacks during training, and log their results with the user's metrics.

The callback only connects Lightning's hooks to an :class:`~lightning_fedleak.engine.Engine`, which
plans, runs and logs the attacks. A *tap* is a hook that records the calls and gradients of a step.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.optim import Optimizer

from lightning_fedleak import engine as core
from lightning_fedleak.attacks import Attack
from lightning_fedleak.callbacks import trainer_facts
from lightning_fedleak.lightning_packages import EitherCallback
from lightning_fedleak.model.anatomy import find_anatomy
from lightning_fedleak.model.taps import before_real_step, real_optimizer
from lightning_fedleak.model.whole_models import explain_shards
from lightning_fedleak.report.records.files import first_of
from lightning_fedleak.report.watched import Reported
from lightning_fedleak.validate import explain_arguments

if TYPE_CHECKING:
    import lightning.pytorch as L
    import pandas as pd

_FITS: WeakKeyDictionary[L.Trainer, str] = WeakKeyDictionary()
"""The id of each Trainer's current fit, which all its monitors log."""


class LeakageMonitor(EitherCallback, Reported):
    """Attacks what a client would share, during training, and logs how much it leaks.

    A *look* is a step at which the attacks run. Training does not change: parameters, optimizer
    state, logged losses and random numbers are bit-identical to the run without the monitor. If an
    attack fails, it is counted in ``monitor/failures`` and its metrics are NaN (*unknown*), never
    0. If an attack does not apply to the shared parameters, or to so many words, its metrics are
    unknown too, but it is not counted as a failure.

    Examples:
        >>> import lightning as L
        >>> import torch
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> from lightning_fedleak import BagOfWords, LeakageMonitor
        >>> from lightning_fedleak.cli.finetuning import CausalLMFineTuning
        >>> config = GPT2Config(vocab_size=64, n_embd=8, n_head=1, tie_word_embeddings=False)
        >>> module = CausalLMFineTuning(GPT2LMHeadModel(config))
        >>> monitor = LeakageMonitor([BagOfWords()], every_n_steps=1)
        >>> trainer = L.Trainer(max_steps=2, callbacks=monitor)
        >>> rows = [{"input_ids": ids, "labels": ids} for ids in torch.arange(64).view(8, 8)]
        >>> trainer.fit(module, torch.utils.data.DataLoader(rows, batch_size=4))
        >>> trainer.callback_metrics["leakage/bag_of_words/f1"]
        tensor(1.)

    If a step shares nothing (an AMP step that was skipped, a batch without targets), the look moves
    to the next step. After 20 such steps in a row it counts as a failure. So does a look that is
    due but not finished when the fit ends.

    Some attacks have no input *yet*: the matrix A of a LoRA has no gradient before B has changed,
    for example during a warm-up that starts at a learning rate of 0. Such attacks are retried at
    each of the next 1000 steps until they have a result, even if no look is due. If they get none,
    or the fit ends before, they are *unknown*. Until their gradients are non-zero, a retry costs
    only the check for that.

    The first step of each fit is a look, also in a resumed fit. If layers are frozen or unfrozen
    during training, the next look takes that into account.

    Under FSDP2 (``ModelParallelStrategy``) attacks get full gradients, gathered on every process.
    While they calibrate, refresh or invert texts, the full model is gathered too. Membership games
    raise an error there.

    A membership game asks an attack whether a text is in the batch. For its candidate texts see
    :class:`~lightning_fedleak.engine.channels.MembershipChannel`, and for the texts that attacks
    recover :class:`~lightning_fedleak.engine.channels.TextsChannel`.

    **Automatic attacks.** With ``attacks="auto"``, the default, every attack runs that the assumed
    adversary can run on the parameters that this run shares. The plan is printed before the first
    step: the attacks that run, those that do not and the reason, and the shared parameters that no
    attack tests. Attacks that do not run log nothing. If an attack's layer is unfrozen later, it
    runs from then on.

    ``leakage/worst/<family>`` is the highest value of a family's attacks at a look: the F1 of
    recovered words, the AUC of membership, or the token accuracy of recovered texts. It is unknown
    if an attack of the family that applies is unknown.

    Args:
        attacks: The attacks, with different names; or ``"auto"``. One monitor runs all attacks of
            a run, at all stages. A second one that logs the same names is refused.
        every_n_steps: The interval n: looks are at optimizer steps 0, n, 2n, ...
        max_overhead: The maximum share of the training time that set-up and up to ten looks may
            cost, the first one aside; not together with ``every_n_steps``. By default they may take
            5% or 30 s, see :class:`~lightning_fedleak.engine.scheduler.Cadence`.
        folder: The folder for ``leakage.jsonl``; by default the logger's folder.
        games: The settings of membership games: the number of candidate texts, the source of
            non-members, the looks over which rates are pooled, and the user's canaries; see
            :class:`~lightning_fedleak.callbacks.Games`.
        settings: Settings that are rarely changed, see :class:`WatchSettings`.

    Raises:
        ValueError: The arguments are contradictory or unknown.
    """

    engine: core.Engine

    @explain_arguments(
        settings=core.WatchSettings,
        elsewhere={"defenses": "L.Trainer(strategy=DefendedStrategy('auto', defenses=[...]))"},
    )
    def __init__(
        self,
        attacks: Sequence[Attack] | Attack | Literal["auto"] = "auto",
        every_n_steps: int | None = None,
        max_overhead: float | None = None,
        folder: str | Path | None = None,
        games: core.Games | None = None,
        settings: core.WatchSettings | None = None,
    ) -> None:
        self._settings = settings = settings or core.WatchSettings()
        settings.refuse(type(self).__name__, "precision", "scaler", "tensorboard")
        self.engine = core.Engine(
            *core.parts_of(attacks, settings, games, every_n_steps, max_overhead)
        )
        self._removers: list[Callable[[], None]] = []
        self._earlier_metrics: dict[str, Tensor] = {}
        self.folder = None if folder is None else Path(folder)

    # ---- names ------------------------------------------------------------------------------

    @property
    def state_key(self) -> str:
        """The key of this monitor's state in a checkpoint, which may hold several monitors."""
        stages = ",".join(self.engine.options.stages)
        return f"LeakageMonitor[{stages}: {','.join(a.name for a in self.attacks)}]"

    @property
    def attacks(self) -> list[Attack]:
        """The attacks; with ``"auto"`` all of the assumed adversary."""
        return list(self.engine.selection.attacks)

    def metric_names(self) -> list[str]:
        """Return the names of the values that this monitor logs at each look."""
        return self.engine.metric_names()

    @property
    def looks(self) -> int:
        """The number of finished looks."""
        return self.engine.results.looks

    @property
    def failures(self) -> int:
        """The number of unknown results, not counting attacks that do not apply."""
        return self.engine.results.failures

    @property
    def last_step(self) -> int:
        """The optimizer step of the newest values."""
        return self.engine.results.last_step

    def to_dataframe(self) -> pd.DataFrame:
        """Return the results of the newest fit, one row for each look, attack and metric.

        They are read from ``leakage.jsonl``, which the first process writes: on others the table is
        empty.

        Returns:
            A table of pandas with the columns ``step``, ``stage``, ``client``, ``attack``, ``n``,
            ``exposed``, ``metric``, ``value``, ``low``, ``high`` (NaN: unknown) and ``unknown``.

        Raises:
            ImportError: pandas is not installed.
            RuntimeError: No fit has begun.
            OSError: The fit's ``leakage.jsonl`` does not exist any more.
        """
        return core.to_dataframe(self.engine.jsonl)

    def subscribe(self, listener: Callable[[L.Trainer], None]) -> None:
        """Call ``listener(trainer)`` on every process after each look, until the fit ends."""

        def call() -> None:
            assert isinstance(self.engine.run, trainer_facts.TrainerRun)
            listener(self.engine.run.trainer)

        self.engine.subscribe(call)

    # ---- set-up -----------------------------------------------------------------------------

    def setup(
        self, trainer: L.Trainer, pl_module: L.LightningModule | None = None, stage: str = "fit"
    ) -> None:
        """Check what can be checked before the model is on its device.

        Raises:
            TypeError: The class was passed instead of an object.
            ValueError: Another monitor logs the same names, or it is not known which gradients the
                strategy shares.
        """
        if pl_module is None:  # Lightning called setup on the class, so that self is the Trainer
            raise TypeError("LeakageMonitor is a class: write callbacks=[LeakageMonitor()]")
        if stage != "fit":
            return
        self.engine.reset()
        self._check_names(trainer)
        self.client = trainer_facts.resolve_client(self._settings.client, trainer.strategy)

    def _check_names(self, trainer: L.Trainer) -> None:
        """Raise an error if two monitors of the run log under the same names."""
        for monitor in trainer_facts.callbacks_of(trainer):
            if isinstance(monitor, LeakageMonitor) and monitor is not self:
                # If both monitors have attacks of a family, neither has all values for its worst.
                for channel in monitor.engine.series.values():
                    self.engine.results.families.pop(channel.family, None)
                names = {series.log_name for series in self.engine.series}
                names &= {series.log_name for series in monitor.engine.series}
                if names:
                    raise ValueError(
                        f"another LeakageMonitor of this run logs {first_of(sorted(names), 1)} "
                        "too: use one for all attacks, or other names: BagOfWords(name='other')"
                    )

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Find the model's parts, check and calibrate the attacks, and install the taps."""
        anatomy = find_anatomy(pl_module, **dict(self._settings.anatomy or {}))
        run = trainer_facts.TrainerRun(trainer, anatomy, self.client, self.engine.assume)
        if reason := explain_shards(anatomy.root, run.processes):
            raise ValueError(f"{run.watcher} cannot take this model. {reason}")
        boards = trainer_facts.boards_of(trainer)
        fit = _FITS.setdefault(trainer, uuid.uuid4().hex)
        folder = self.folder or trainer_facts.folder_of(trainer)
        destination = core.Destination(
            self.engine.own_folder(run, folder, fit),
            [logger for logger in trainer.loggers if logger not in boards],
            [board.experiment for board in boards] if trainer.is_global_zero else [],
            trainer_facts.training_of(trainer),
            trainer_facts.settings_of(trainer),
            fit,
        )
        self.engine.open(run)
        self.engine.begin(run, destination)
        self._report_begins()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Begin the looks of this fit, now that a checkpoint is loaded."""
        self.engine.training_begins()
        for optimizer in map(real_optimizer, trainer.optimizers):
            if optimizer not in trainer.optimizers:  # a DP optimizer wraps it, and may skip steps
                before_step = partial(self.engine.optimizer_steps, optimizer)
                self._removers.append(before_real_step(optimizer, before_step))

    def _close(self) -> None:
        """Remove every tap."""
        removers, self._removers = self._removers, []
        for remove in removers:
            remove()
        self.engine.close()

    # ---- a step -----------------------------------------------------------------------------

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Start a look if one is due, and store the batch before a defence changes it."""
        self.engine.batch_begins(batch)

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer
    ) -> None:
        """Let the engine read the gradients of a step. Batches that only accumulate have none."""
        if real_optimizer(optimizer) is optimizer:
            self.engine.optimizer_steps(optimizer)

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Log a look after its optimizer step."""
        manual = not pl_module.automatic_optimization
        self.engine.batch_ends(trained=batch is not None and (manual or bool(outputs)))
        if (every := trainer.log_every_n_steps) and trainer.global_step % every == 0:  # type: ignore[attr-defined]
            self.engine.metrics_changed()

    # ---- between looks ----------------------------------------------------------------------

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Store the metrics from before the validation."""
        self._earlier_metrics = dict(trainer.callback_metrics)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Log the metrics that the validation computed, even if their values did not change."""
        earlier, metrics = self._earlier_metrics, trainer.callback_metrics
        if not trainer.sanity_checking:
            measured = [name for name in metrics if metrics[name] is not earlier.get(name)]
            self.engine.metrics_changed(measured=measured)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Log the metrics of an epoch, and the privacy budget that defences have spent."""
        self.engine.metrics_changed(epoch_ended=True)

    # ---- ends and checkpoints ---------------------------------------------------------------

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Look at the final weights, and log results that never came as *unknown*."""
        self.engine.training_ends()

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Look at weights that another callback may have replaced, and end the record."""
        self.engine.look_at_end()
        self._end("finished")

    def on_exception(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        exception: BaseException | None = None,
    ) -> None:
        """End the run's record and remove every tap: Lightning calls no teardown after this."""
        if exception is None:  # called on the class, which `setup` refuses
            return
        try:
            self._end(type(exception).__name__)
        finally:  # a second Ctrl-C may interrupt the report
            _FITS.pop(trainer, None)
            self._close()

    def _end(self, ending: str) -> None:
        """End the run's record, and write the report if the settings ask for it."""
        record = self.engine.end(ending)
        if record is not None and self._settings.report:
            self._write_report(record)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Remove every tap."""
        _FITS.pop(trainer, None)
        self._close()

    def fit_results(self) -> tuple[Any, ...]:
        """Return the results of a fit in other processes, for the main process."""
        return self.engine.results.state_dict(), self.engine.jsonl

    def load_fit_results(self, results: tuple[Any, ...]) -> None:
        """Load what :meth:`fit_results` returned."""
        state, self.engine.jsonl = results
        self.engine.results.load_state_dict(state)

    # Not state_dict: with it, Lightning would raise an error for two monitors with one state_key
    # before `setup` can raise a clearer one.
    def on_save_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Save the state for a resumed run: plain numbers, strings and tensors."""
        checkpoint["callbacks"][self.state_key] = self.engine.state_dict()

    def on_load_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Restore the state that :meth:`on_save_checkpoint` saved."""
        self.engine.load_state_dict(deepcopy(checkpoint["callbacks"].get(self.state_key, {})))
