"""LeakageMonitor: attacks during training, whose results are logged with the user's metrics."""

from __future__ import annotations

import os
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
"""The id of each Trainer's current fit, the same for all of its monitors."""


class LeakageMonitor(EitherCallback, Reported):
    """Attacks what a client would share, during training, and logs how much it leaks.

    Training is not disturbed: parameters, optimizer state, logged losses and random numbers are
    bit-identical to the run without the monitor. An attack that fails is counted in
    ``monitor/failures`` and its metrics read NaN (*unknown*), never 0. One whose method is not made
    for what was shared, or for as many words, is unknown too, and no failure.

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

    A step that shares nothing (an AMP step that was skipped, a batch without a single target) is
    not looked at; the look moves to the next step, at most 20 times in a row, after which it
    counts as a failure. So does a fit that ends before a look that was due could end.

    An attack that can read nothing *yet* (LoRA's A has no gradient before B has moved, at rate 0
    say) is tried again in the next steps, by itself and whatever ``every_n_steps`` or
    ``max_overhead``, until it has a result: 1000 steps at most. Then, and where the fit ends
    before, it is *unknown*. A try costs a glance at its gradients.

    The first step of each fit is looked at, also where it resumes another, but with
    ``max_overhead``, where the first look waits until the run pays for it. Layers that are frozen
    or unfrozen on the way are followed at the next look.

    Under FSDP2 (``ModelParallelStrategy``) attacks get whole gradients, and for as long as they
    calibrate, refresh or invert texts the whole model, gathered on every process. Membership games
    are refused there.

    What membership games ask, and which texts count:
    :class:`~lightning_fedleak.engine.channels.MembershipChannel` and
    :class:`~lightning_fedleak.engine.channels.TextsChannel`.

    **Attacks that choose themselves.** With ``attacks="auto"``, the default, every attack of the
    assumed adversary is played that can read what this run shares. What is played, what is not and
    why, and what is shared and not tested is printed before the first step. Attacks that are not
    played are *not tested*: they log nothing. One whose layer is unfrozen later is played from then
    on.

    ``leakage/worst/<family>`` is the highest headline of a family's attacks at a look (F1 of words,
    AUC of membership, token accuracy of texts), and unknown where one that applies is unknown.

    Args:
        attacks: the attacks, each with a name of its own; or ``"auto"``. One monitor plays all
            attacks of a run, at all stages. A second one with the same is refused.
        every_n_steps: look at optimizer steps 0, n, 2n, ...
        max_overhead: look so seldom that looks cost at most this share of the training time.
            Either this or ``every_n_steps``. Default: neither, but ten looks if they cost little,
            see :class:`~lightning_fedleak.engine.scheduler.Cadence`.
        folder: where ``leakage.jsonl`` goes; default the logger's folder.
        games: how membership games are played: how many texts are asked for, which are not in the
            batch, over how many looks rates are pooled, canaries of the user's own; see
            :class:`~lightning_fedleak.callbacks.Games`.
        settings: what is rarely changed: :class:`WatchSettings`.

    Raises:
        ValueError: contradictory or unknown arguments.
    """

    engine: core.Engine

    @explain_arguments(settings=core.WatchSettings)
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
        """Distinguishes several monitors of one run in a checkpoint."""
        stages = ",".join(self.engine.options.stages)
        return f"LeakageMonitor[{stages}: {','.join(a.name for a in self.attacks)}]"

    @property
    def attacks(self) -> list[Attack]:
        """The attacks; with ``"auto"`` all that an adversary may have."""
        return list(self.engine.selection.attacks)

    def metric_names(self) -> list[str]:
        """Return the names of the values that this monitor logs at each look."""
        return self.engine.metric_names()

    @property
    def looks(self) -> int:
        """Looks finished."""
        return self.engine.results.looks

    @property
    def failures(self) -> int:
        """Results that are unknown, but for those of methods that are not made for them."""
        return self.engine.results.failures

    @property
    def last_step(self) -> int:
        """Optimizer step of the newest values."""
        return self.engine.results.last_step

    def to_dataframe(self) -> pd.DataFrame:
        """What the newest fit has measured so far, one row for each look, attack and metric.

        It is read from ``leakage.jsonl``, which the first process writes: on others it is empty.

        Returns:
            A table of pandas with the columns ``step``, ``stage``, ``client``, ``attack``, ``n``,
            ``exposed``, ``metric``, ``value``, ``low``, ``high`` (NaN: unknown) and ``unknown``.

        Raises:
            ImportError: pandas is not installed.
            RuntimeError: no fit has begun.
            OSError: its ``leakage.jsonl`` is gone.
        """
        return core.to_dataframe(self.engine.jsonl)

    def subscribe(self, listener: Callable[[L.Trainer], None]) -> None:
        """Call ``listener(trainer)`` on every process after each look, until the fit ends."""

        def call() -> None:
            assert self.engine.fit is not None
            assert isinstance(self.engine.fit.run, trainer_facts.TrainerRun)
            listener(self.engine.fit.run.trainer)

        self.engine.subscribe(call)

    # ---- set-up -----------------------------------------------------------------------------

    def setup(
        self, trainer: L.Trainer, pl_module: L.LightningModule | None = None, stage: str = "fit"
    ) -> None:
        """Checks what can be checked before the model is on its device.

        Raises:
            TypeError: the class was given in place of an object.
            ValueError: another monitor logs the same, or it is not known what is shared.
        """
        if pl_module is None:  # Lightning has called it on the class: self is the Trainer
            raise TypeError("LeakageMonitor is a class: write callbacks=[LeakageMonitor()]")
        if stage != "fit":
            return
        self.engine.reset()
        self._check_names(trainer)
        self.client = trainer_facts.resolve_client(self._settings.client, trainer.strategy)

    def _check_names(self, trainer: L.Trainer) -> None:
        """Refuses two monitors of one run that log under the same names."""
        callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        for monitor in callbacks:
            if isinstance(monitor, LeakageMonitor) and monitor is not self:
                # Neither monitor knows the worst of a family whose attacks they share.
                for channel in monitor.engine.series.values():
                    self.engine.results.families.pop(channel.family, None)
                both = {s.log_name for s in self.engine.series}
                both &= {s.log_name for s in monitor.engine.series}
                if both:
                    raise ValueError(
                        f"another LeakageMonitor of this run logs {first_of(sorted(both), 1)} too: "
                        "use one for all attacks of a run, or other names: BagOfWords(name='other')"
                    )

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Finds the model's parts, checks and calibrates the attacks, installs the taps."""
        anatomy = find_anatomy(pl_module, **dict(self._settings.anatomy or {}))
        run = trainer_facts.TrainerRun.of_trainer(trainer, anatomy, self.client, self.engine.assume)
        if why := explain_shards(anatomy.root, run.processes):
            raise ValueError(f"{run.watcher} cannot take this model. {why}")
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
        """Remembers how many looks came before this fit, and where it starts."""
        self.engine.training_begins()
        for optimizer in map(real_optimizer, trainer.optimizers):
            if optimizer not in trainer.optimizers:  # a DP optimizer wraps it, and decides on steps
                steps = partial(self.engine.optimizer_steps, optimizer)
                self._removers.append(before_real_step(optimizer, steps))

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
        """Starts a look where one is due, and takes the truth before any defence does."""
        self.engine.batch_begins(batch)

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer
    ) -> None:
        """Distinguishes a step from a batch that only adds to it."""
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
        """Logs a look once its optimizer step is over."""
        manual = not pl_module.automatic_optimization
        self.engine.batch_ends(trained=batch is not None and (manual or bool(outputs)))
        if (every := trainer.log_every_n_steps) and trainer.global_step % every == 0:  # type: ignore[attr-defined]
            self.engine.metrics_changed()

    # ---- between looks ----------------------------------------------------------------------

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Keeps the metrics that were computed before the validation."""
        self._earlier_metrics = dict(trainer.callback_metrics)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Logs the metrics that a validation has computed, also where they are what they were."""
        earlier, metrics = self._earlier_metrics, trainer.callback_metrics
        if not trainer.sanity_checking:
            measured = [name for name in metrics if metrics[name] is not earlier.get(name)]
            self.engine.metrics_changed(measured=measured)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Logs the metrics of an epoch, and what defences have spent until its end."""
        self.engine.metrics_changed(epoch_ended=True)

    # ---- ends and checkpoints ---------------------------------------------------------------

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """A fit in which looks were due and none could end is unknown, not safe."""
        self.engine.training_ends()

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Looks at weights that another callback has put in place, and ends the run's record."""
        self.engine.look_at_end()
        self._end("finished")

    def on_exception(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        exception: BaseException | None = None,
    ) -> None:
        """Ends the run's record and removes every tap: Lightning calls no teardown after this.

        Raises:
            ValueError: the Trainer's folder cannot be written to.
        """
        if exception is None:  # called on the class, which setup refuses
            return
        has_begun = self.engine.fit is not None
        try:
            self._end(type(exception).__name__)
        finally:  # also where a second Ctrl-C ends the report
            _FITS.pop(trainer, None)
            self._close()
        folders = [trainer.default_root_dir, *(logger.save_dir for logger in trainer.loggers)]
        if isinstance(exception, OSError) and not has_begun and any(map(_is_closed, folders)):
            raise ValueError(
                f"the run's folder cannot be written ({exception}): name another one, "
                "Trainer(default_root_dir='runs')"
            ) from exception

    def _end(self, ending: str) -> None:
        record = self.engine.end(ending)
        if record is not None and self._settings.report:
            self._write_report(record)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Removes every tap."""
        _FITS.pop(trainer, None)
        self._close()

    # Not state_dict: Lightning refuses two callbacks that have it and share a state_key, with an
    # error of its own before `setup` can raise one.
    def on_save_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Saves what a resumed run goes on with: plain numbers, strings and tensors."""
        checkpoint["callbacks"][self.state_key] = self.engine.state_dict()

    def on_load_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Takes back what :meth:`on_save_checkpoint` saved."""
        self.engine.load_state_dict(deepcopy(checkpoint["callbacks"].get(self.state_key, {})))


def _is_closed(folder: str | Path | None) -> bool:
    """Return whether nothing can be written to a folder, or where it would be made."""
    place = Path(folder or ".").absolute()
    while not place.exists():
        place = place.parent
    return not (place.is_dir() and os.access(place, os.W_OK))
