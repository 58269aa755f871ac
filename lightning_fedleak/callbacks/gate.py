"""RiskGate: act when measured leakage exceeds a threshold.

The gate stops the run, strengthens its defences, raises an error, or warns. This file connects the
gate of any loop (``Threshold``) to the hooks of a Lightning Trainer.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from lightning_fedleak import engine as core
from lightning_fedleak.callbacks.monitor import LeakageMonitor
from lightning_fedleak.callbacks.trainer_facts import callbacks_of, defenses_of
from lightning_fedleak.lightning_packages import EitherCallback
from lightning_fedleak.report.records.lines import is_lower_better, is_validation

if TYPE_CHECKING:
    import lightning.pytorch as L


class RiskGate(core.Threshold, EitherCallback):
    """Act when a metric of a :class:`LeakageMonitor` exceeds a threshold.

    A look is a step at which the monitor measures leakage. The gate checks the metric after every
    look. With several processes the first one decides, and the others get the value only if the
    gate acts. Before it stops the run or raises, it saves a checkpoint (not under
    ``fast_dev_run``). Other metrics and attacks do not affect it.

    The gate uses the newest logged value, which may be pooled over looks. A noisy metric exceeds
    any threshold sooner or later: set ``patience``. The lower end of an interval cannot be watched,
    because it is also low if few texts were queried.

    **Attacks on the trained weights**, such as ``leakage/combined/auc``, query the same texts at
    every look. The gate acts if the lower end of the interval, which holds for all looks together,
    is above ``at_most``. Their metric ``shown``, a lower bound of the share of recognised texts, is
    unknown with few held-out texts, and a gate on it waits.

    **The worst of a family**, such as ``"leakage/worst/words"``, is the highest value of a family
    of attacks, and can be watched like any other. If an attack is unknown, the highest value of the
    remaining ones counts only if it is a breach. If no attack of the family can ever run, the error
    is raised before training.

    **Parameters that are not shared**: an attack on them has the value 0, which says nothing about
    the shared ones. If no attack of the family uses a shared parameter, the value is unknown until
    one does, because layers may be frozen and unfrozen during the run.

    An *unknown* value counts as a breach, unless ``strict=False``. If a strict gate had no result
    in the whole fit, it acts at the end, regardless of ``patience``.

    Examples:
        >>> import lightning as L
        >>> import torch
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> from lightning_fedleak import BagOfWords, LeakageMonitor, RiskGate
        >>> from lightning_fedleak.cli.finetuning import CausalLMFineTuning
        >>> config = GPT2Config(vocab_size=64, n_embd=8, n_head=1, tie_word_embeddings=False)
        >>> module = CausalLMFineTuning(GPT2LMHeadModel(config))  # stands for your own
        >>> monitor = LeakageMonitor([BagOfWords()], every_n_steps=1)
        >>> gate = RiskGate("leakage/bag_of_words/f1", at_most=0.5)
        >>> trainer = L.Trainer(max_steps=9, callbacks=[monitor, gate])
        >>> rows = [{"input_ids": ids, "labels": ids} for ids in torch.arange(64).view(8, 8)]
        >>> trainer.fit(module, torch.utils.data.DataLoader(rows, batch_size=4))
        >>> trainer.global_step
        1

    Args:
        metric: A name in the logs, ``"leakage/<attack>/<metric>"``.
        at_most: The largest value that is allowed. Rates are shares, at most 1.
        action: ``"stop"`` ends training after the step, ``"raise"`` raises
            :class:`LeakageLimitExceeded`, and ``"warn"`` warns once and continues. A callable is
            called with the :class:`GateEvent` each time the gate fires, on every process, and
            training continues. ``"harden"`` strengthens every defence of the run's DefendedStrategy
            by one notch, if it supports that
            (:meth:`~lightning_fedleak.defenses.Defense.harden`). Training continues, and the gate
            judges again from the next look. If no defence can be strengthened further, it stops the
            run like ``"stop"``. The decision depends on private data: an accounted epsilon covers
            neither it nor the leakage logs. A resumed run has the notches of its checkpoint, and
            looks again at its first step.
        patience: The number of breaches in a row that are ignored before the gate fires.
        strict: Whether an unknown value counts as a breach. Otherwise it is ignored.
        name: The name in the logs, ``gate/<name>``; by default the metric without ``leakage/``.

    Attributes:
        fired: The event of the first time that the gate fired in the newest fit; None if it has
            not.
        notches: The number of times that it has strengthened the defences.

    Raises:
        ValueError: An argument is out of range, or two arguments contradict each other.
    """

    @property
    def state_key(self) -> str:
        """The key of this gate's state in a checkpoint, which may hold several gates."""
        return f"RiskGate[{self.name}]"

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Start to watch the metric in a fit.

        Raises:
            ValueError: No monitor logs the metric, or Lightning would ignore the stop. The message
                names the metrics that exist, or the argument to change.
        """
        if stage != "fit":
            return
        engine = self._find_engine(trainer)
        if self.action in ("stop", "harden") and (trainer.min_epochs or trainer.min_steps):
            raise ValueError(
                f"RiskGate(action='{self.action}') could not stop this run, because of the "
                "Trainer's min_epochs or min_steps. Drop them, or use action='raise'."
            )
        self.watch(
            engine,
            core.GateActions(
                partial(_log, trainer),
                partial(_save, trainer),
                partial(setattr, trainer, "should_stop", True),
                trainer.world_size,
                defenses_of(trainer) if self.action == "harden" else (),
            ),
        )

    def _find_engine(self, trainer: L.Trainer) -> core.Engine:
        """Return the engine of the monitor that logs the metric.

        Raises:
            ValueError: No monitor logs it, or several do.
        """
        monitors = [c for c in callbacks_of(trainer) if isinstance(c, LeakageMonitor)]
        logged_by = [m for m in monitors if self.metric in m.metric_names()]
        if len(logged_by) != 1:
            names = [n for m in monitors for n in m.metric_names()]
            hint = core.names_there_are(self.metric, names, "LeakageMonitor")
            raise ValueError(
                f"RiskGate watches '{self.metric}', which one LeakageMonitor with all attacks has "
                f"to log: "
                f"Trainer(callbacks=[LeakageMonitor(), gate]).{hint * (not logged_by)}"
            )
        return logged_by[0].engine

    def fit_results(self) -> tuple[core.GateEvent | None, int]:
        """Return what the gate did in a fit in other processes, for the main process."""
        return self.fired, self.notches

    def load_fit_results(self, results: tuple[core.GateEvent | None, int]) -> None:
        """Load what :meth:`fit_results` returned."""
        self.fired, self.notches = results

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Log ``leakage/choose`` for ModelCheckpoint to monitor, if the gate is on trained weights.

        It is the validation loss if the upper end of the interval at these weights is at most
        ``at_most``, and infinite otherwise, so that its minimum is the best allowed checkpoint.
        """
        if not self.on_weights or trainer.sanity_checking:
            return
        metrics = trainer.callback_metrics
        names = core.chosen_metrics(metrics, self._engine.options.utility)
        losses = [name for name in names if is_validation(name) and is_lower_better(name)]
        if not losses:
            return
        chosen = self.choice(float(metrics[losses[0]]))
        metrics[core.CHOOSE] = torch.tensor(chosen)
        _log(trainer, {core.CHOOSE: chosen}, trainer.global_step)


def _log(trainer: L.Trainer, values: dict[str, float], step: int) -> None:
    """Log values at a step to all loggers of a Trainer."""
    for logger in trainer.loggers:
        logger.log_metrics(values, step=step)


def _save(trainer: L.Trainer, name: str) -> Path | None:
    """Save a checkpoint in the folder of the logs, and return its path; None in a fast dev run."""
    if trainer.fast_dev_run:  # type: ignore[attr-defined]
        return None
    path = Path(trainer.log_dir or trainer.default_root_dir) / "checkpoints" / f"{name}.ckpt"
    trainer.save_checkpoint(path)
    return path
