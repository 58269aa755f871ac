"""Attacks the updates of the user's own training loop: :class:`Watch`.

The engine runs the attacks at some optimizer steps, called *looks*. *Gates* are thresholds on the
logged results. ``engine.fit`` is the engine's state of the current run, None outside of a run. The
order of a run:

1. ``with Watch(...)`` finds the parts of the model, restores a saved state, opens the engine, and
   hooks the optimizers.
2. ``with watch.step(batch)`` contains all that the loop does with one batch. It starts a look if
   one is due. Right before an optimizer steps in this block, :meth:`Watch.optimizer_steps` lets the
   attacks read its gradients.
3. At the end of the block the results of the look are logged, and gates may stop the loop.
4. At the end of ``with Watch(...)`` the trained weights are attacked, if there is a ``loader`` and
   no error has ended the loop. Then the report is written, and every hook is removed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from torch import nn
from torch.optim import Optimizer

from lightning_fedleak import engine as core
from lightning_fedleak.attacks import Attack
from lightning_fedleak.model.anatomy import find_anatomy
from lightning_fedleak.model.model_state import is_compiled
from lightning_fedleak.model.snapshots import shaped
from lightning_fedleak.model.taps import before_real_step
from lightning_fedleak.report.watched import Reported
from lightning_fedleak.trainers.loop import (
    Loop,
    LoopRun,
    before_backward,
    check_whole,
    has_gradients,
    holds_unreduced,
    show_messages,
    torch_optimizers,
)
from lightning_fedleak.trainers.zero import ZeROStep
from lightning_fedleak.validate import explain_arguments

if TYPE_CHECKING:
    import pandas as pd


class Watch(Reported):
    """Attack the gradients that a training loop would share, log what they leak, and apply gates.

    ``step(batch)`` contains all that the loop does with one batch: forward, backward, and the
    optimizer's step if one is due. Gradients may be accumulated over several batches, clipped,
    scaled by a GradScaler, and split over several optimizers. If gradients disappear although no
    optimizer stepped, the loop has skipped the step, which is not measured. Training is not
    disturbed: weights, losses and random numbers are bit-identical to the loop without ``Watch``.

    Under DistributedDataParallel each process is a client. Under FSDP2 (``fully_shard``) and
    DeepSpeed's engine all processes are one client, since gradients are reduced before any can be
    read. In a :class:`~lightning_fedleak.trainers.DefendedLoop` the attacks read the defended
    gradients. The gradients of Opacus' DP optimizer are read inside its step, once it has clipped
    them and added noise; a step that it skips is not counted. Gradients cannot be read inside the
    DP optimizers of other libraries, so the leakage of their shared gradients is *unknown*.

    Examples:
        >>> import torch
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> from lightning_fedleak.attacks import BagOfWords
        >>> from lightning_fedleak.trainers import Threshold, Watch
        >>> config = GPT2Config(vocab_size=64, n_embd=8, n_head=1, tie_word_embeddings=False)
        >>> model = GPT2LMHeadModel(config)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> gate = Threshold("leakage/worst/words", at_most=0.5)
        >>> batches = [{"input_ids": ids, "labels": ids} for ids in torch.arange(64).view(4, 2, 8)]
        >>> with Watch(model, optimizer, [BagOfWords()], gates=[gate], every_n_steps=1) as watch:
        ...     for batch in batches:
        ...         with watch.step(batch):
        ...             model(**batch).loss.backward()
        ...             optimizer.step()
        ...             optimizer.zero_grad()
        ...         if watch.should_stop:
        ...             break
        >>> watch.latest["leakage/bag_of_words/f1"], gate.fired.step
        (1.0, 0)

    Args:
        model: The model that the loop trains; under ``torch.compile`` the compiled model.
        optimizer: The optimizer or the optimizers. Accelerate may have prepared them.
        attacks: The attacks, with different names; or ``"auto"``: all that can read this model.
        gates: Thresholds on logged metrics.
        loader: The loader of the training data, whose length is an epoch. With it the trained
            weights are attacked too: before the first step, at fractions of an epoch, at its end.
        folder: The folder of ``leakage.jsonl``, ``run.jsonl`` and the report. If it holds the files
            of another run, which this one does not resume, a new folder ``version_<n>`` in it is
            used.
        every_n_steps: Look at optimizer steps 0, n, 2n, ...
        max_overhead: The largest fraction of the training time that looks take, the first one
            aside, in place of ``every_n_steps``. If both are None, there are looks at steps 1, 2,
            4, 8, ... or later, which take at most 30 s, 0.5%, and a quarter of the training time.
        games: The settings of membership games.
        settings: The rarely changed settings: :class:`WatchSettings`.

    Attributes:
        should_stop: Whether a gate has stopped the loop.

    Raises:
        ValueError: Arguments contradict each other, or the metric of a gate is not logged. When
            ``with`` begins also: the model, a gate or an attack is not supported in this loop.
    """

    engine: core.Engine
    _earlier_utility: dict[str, float]  # the user's metrics when they were logged last
    run: LoopRun  # the newest run, from `__enter__` on
    watcher: ClassVar[str] = "Watch"  # the class of the user, for messages
    # Parts of a gate's message when it stops the run: the call that resumes from a checkpoint (the
    # package has none for a loop), and what to change so that less leaks.
    resume: ClassVar[str] = ""
    mend: ClassVar[str] = (
        "train it with a defence: DefendedLoop(model, optimizer, loader, [DPSGD(...)], epochs=...)"
    )

    @explain_arguments(settings=core.WatchSettings)
    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        attacks: Sequence[Attack] | Attack | Literal["auto"] = "auto",
        gates: Sequence[core.Threshold] = (),
        loader: Any = None,
        folder: str | Path = "fedleak_runs/watch",
        every_n_steps: int | None = None,
        max_overhead: float | None = None,
        games: core.Games | None = None,
        settings: core.WatchSettings | None = None,
    ) -> None:
        self.settings = settings = settings or core.WatchSettings()
        self.engine = core.Engine(
            *core.parts_of(attacks, settings, games, every_n_steps, max_overhead)
        )
        self.gates = tuple(gates)
        names = [gate.name for gate in self.gates]
        for gate in self.gates:
            gate.check_logged(self.engine.metric_names(), self.watcher)
            if names.count(gate.name) > 1:
                raise ValueError(f"two gates have the name '{gate.name}': pass name= to one")
        self.folder = Path(folder)
        self.should_stop = False
        zero = ZeROStep.of_engine(model, self.watcher)
        optimizers = torch_optimizers(optimizer) if zero is None else [zero]
        facts: dict[str, object] = {"scaler": settings.scaler, "tokenizers": [settings.tokenizer]}
        facts |= {"precision": settings.precision} if settings.precision else {}
        self.loop = Loop(model, optimizers, loader, facts, zero=zero)
        self._saved: Any = None
        self._removers: list[Callable[[], object]] = []

    def to_dataframe(self) -> pd.DataFrame:
        """Return the results so far as a table; see :meth:`LeakageMonitor.to_dataframe`."""
        return core.to_dataframe(self.engine.jsonl)

    @property
    def utility(self) -> dict[str, float]:
        """The user's metrics by name, such as ``"val_loss"``.

        The loop sets each metric when it is measured, and the logs give the step at that time:
        inside ``step`` the current optimizer step, after it the number of completed steps.
        """
        return self.loop.utility

    @core.contained
    def _log_utility(self, *, epoch_ended: bool | None = False) -> None:
        """Log the metrics that the loop has set since the last call.

        A metric counts as set if its value is another object, even if the values are equal.

        Args:
            epoch_ended: Whether an epoch has ended; None if the engine is to find out, even if no
                metric was set.
        """
        utility = dict(self.loop.utility)
        names = [name for name in utility if utility[name] is not self._earlier_utility.get(name)]
        self._earlier_utility = utility
        if names or epoch_ended is None:
            self.engine.metrics_changed(measured=names, epoch_ended=epoch_ended)

    def state_dict(self) -> dict[str, object]:
        """Return the state that a resumed loop loads: plain numbers, strings and tensors."""
        gates = {gate.name: gate.state_dict() for gate in self.gates}
        state = {"engine": self.engine.state_dict(), "gates": gates}
        counts = {"steps": self.loop.steps, "batches": self.loop.batches}
        return {**state, **counts, "utility": dict(self.loop.utility)}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Load a state that :meth:`state_dict` returned. Call it before ``with``."""
        self._saved = state

    def choose(self, loss: float) -> float:
        """Log and return ``leakage/choose``, a value to select a checkpoint by: lower is better.

        It is the loss if every gate on the trained weights accepts them, and infinity otherwise.
        Call it on every process, after the optimizer step that made these weights.

        Args:
            loss: The validation loss of the current weights.

        Raises:
            ValueError: No gate watches the trained weights.
        """
        if not self._on_weights:
            raise ValueError(
                f"{self.watcher}.choose needs a gate on the trained weights, such as "
                "Threshold('leakage/combined/auc', ...)"
            )
        chosen = max(gate.choice(loss) for gate in self._on_weights)
        self._log({core.CHOOSE: chosen}, self.engine.run.step)
        return chosen

    @property
    def _on_weights(self) -> list[core.Threshold]:
        """The gates on the trained weights."""
        return [gate for gate in self.gates if gate.on_weights]

    def __enter__(self) -> Watch:
        """Begin the run: find the model's parts, calibrate the attacks, add hooks."""
        self.end(InterruptedError)  # ends an earlier run that was not ended
        try:
            with shaped(self.loop.model.parameters()):
                self._begin()
        except BaseException:
            self.close()
            raise
        return self

    def _begin(self) -> None:
        """Begin the run: see item 1 of the module's docstring.

        Raises:
            ValueError: The model, a gate or an attack is not supported in this loop.
        """
        engine, loop, settings = self.engine, self.loop, self.settings
        show_messages()
        self._check()
        anatomy = find_anatomy(loop.inner_model, **dict(settings.anatomy or {}))
        shards = loop.sharded_by
        default = "rank" if loop.release is None else loop.release.client
        client = settings.client or ("world" if shards else default)
        if shards and client == "rank":
            raise ValueError(
                f"{self.watcher}: {shards} reduces gradients over all processes before any can "
                "be read, so a single process is not a client: pass client='world'"
            )
        self.run = run = LoopRun(loop, self.watcher, anatomy, client, engine.assume)
        engine.reset()
        # `_stepped`: an optimizer has stepped in the current batch. `_backward`: a backward pass
        # has run in it. `_pending`: gradients of earlier batches wait for an optimizer step.
        # `_in_step`: the loop is inside the block of `step`.
        self.should_stop = self._stepped = self._backward = self._pending = self._in_step = False
        for gate in self.gates:
            defenses = run.defenses if loop.release and gate.action == "harden" else ()
            save = partial(self._save, gate)
            actions = core.GateActions(
                self._log, save, self._stop, run.processes, defenses, self.resume, self.mend
            )
            gate.watch(engine, actions)
        if (saved := self._saved) is not None:
            loop.steps, loop.batches = saved["steps"], saved["batches"]
            loop.utility |= saved.get("utility", {})
            engine.load_state_dict(saved["engine"])
            for gate in (gate for gate in self.gates if gate.name in saved["gates"]):
                gate.load_state_dict(saved["gates"][gate.name])
        self._earlier_utility = dict(loop.utility)
        engine.open(run)
        if loop.zero is not None:
            self._removers += loop.zero.follow_engine()
        self._hook_optimizers()
        self.folder = engine.own_folder(run, self.folder)
        self._loggers = self._log_to(run)
        boards = [logger.writer for logger in self._loggers if isinstance(logger, core.BoardLogger)]
        loggers = [logger for logger in self._loggers if not isinstance(logger, core.BoardLogger)]
        training = {"optimizers": core.optimizers_of(loop.optimizers), **self._training_facts(run)}
        engine.begin(run, core.Destination(self.folder, loggers, boards, training))
        self._report_begins()
        self._n_earlier_batches = loop.batches
        engine.training_begins()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """End the run, and write its report if the settings say so. No exception is suppressed."""
        self.end(kind)

    def end(self, error: type[BaseException] | None = None) -> None:
        """End the run.

        Args:
            error: The class of the exception that ended the loop; None if the loop is finished.
        """
        if self.engine.fit is None:
            return
        ending = "finished" if error is None else error.__name__
        try:
            if error is None:
                self._log_utility()
                self.engine.training_ends()
        except BaseException as raised:
            ending = type(raised).__name__
            raise
        finally:
            try:
                record = self.engine.end(ending)
                if record is not None and self.settings.report:
                    self._write_report(record)
            finally:
                self.close()

    def close(self) -> None:
        """Remove every hook. It may be called twice."""
        removers, self._removers = self._removers, []
        for remove in removers:
            try:
                remove()
            except Exception as error:
                self.engine.fail(error)
        self.engine.close()

    def _check(self, *wrappers: str) -> None:
        """Raise an error for a model that cannot be watched.

        Args:
            wrappers: The names of classes that will wrap the model.

        Raises:
            ValueError: The model cannot be watched.
        """
        check_whole(self.loop.inner_model, self.watcher, wrappers, takes_fsdp2=True)

    def _log(self, values: dict[str, float], step: int) -> None:
        """Give values to all loggers, and remove a logger that fails."""
        for logger in [*self._loggers]:
            try:
                logger.log_metrics(values, step=step)
            except Exception as error:
                self._loggers.remove(logger)
                if self.engine.report is not None:
                    self.engine.report.leave_boards(error)

    def fail(self, error: Exception) -> None:
        """Make the current look, or the next one, unknown after an error of this package."""
        self.engine.fail(error)

    def _save(self, gate: core.Threshold, name: str) -> Path | None:
        """Save a checkpoint for a gate and return its path; None here, as a loop saves its own."""
        return None

    def _stop(self) -> None:
        """Set the attribute by which the loop learns that a gate stops it."""
        self.should_stop = True

    def _log_to(self, run: LoopRun) -> list[Any]:
        """Return the loggers of the run: TensorBoard on the first process, if it is installed."""
        if run.rank or not self.settings.tensorboard or find_spec("tensorboard") is None:
            return []
        board = core.BoardLogger(self.folder / "tensorboard")
        self._removers.append(board.writer.close)
        return [board]

    def _training_facts(self, run: LoopRun) -> dict[str, object]:
        """Return how the model is trained, for the record of the run."""
        strategy = self.loop.sharded_by or ("DistributedDataParallel" if run.under_ddp else "loop")
        return {"strategy": strategy, "precision": run.precision, "processes": run.processes}

    @contextmanager
    def step(self, batch: Any) -> Iterator[Watch]:
        """Return a context for everything that the loop does with one batch.

        Args:
            batch: The batch that the loop gives to the model.

        Raises:
            BatchError: At the first look, neither the autograd graph nor the batch can be read. The
                message shows a ``batch_adapter`` to copy.
            LeakageLimitExceeded: A metric is above the limit of a gate with ``action="raise"``.
            RuntimeError: The run has not begun, or an optimizer steps outside of this block.
        """
        if self.engine.fit is None:
            raise RuntimeError("no run has begun: put the loop into `with Watch(...) as watch:`")
        self.batch_begins(batch)
        self._in_step = True
        try:
            with before_backward(self._backward_begins):
                yield self
        except BaseException as error:
            self._in_step = False
            self.loop.steps += self._stepped
            if (look := self._look) is not None:
                look.training_step.error = f"{type(error).__name__} ended a batch of this step"
            raise
        self.batch_ends()
        self._in_step = False

    def batch_begins(self, batch: Any) -> None:
        """Log new metrics, and start a look if one is due."""
        self._log_utility()
        self.engine.batch_begins(batch)
        if self.loop.batches == self._n_earlier_batches and not is_compiled(self.loop.model):
            self._removers.append(self.run.check_first_forward())
        self.loop.batches += 1
        self._stepped = self._backward = False

    def batch_ends(self) -> None:
        """Count the optimizer step if there was one, and log its look."""
        if not self._stepped and self._backward and self._gradients_are_gone():
            self._skip()
        self._pending = not self._stepped and (self._pending or self._backward)
        self.loop.steps += self._stepped
        self.engine.batch_ends(trained=self._backward or self._stepped)
        self._log_utility(epoch_ended=None)

    @property
    def _look(self) -> core.Look | None:
        """The current look; None between looks."""
        return None if self.engine.fit is None else self.engine.fit.look

    def _backward_begins(self) -> None:
        """Record that a backward pass begins, and whether it starts a new accumulation."""
        if self._pending and self._gradients_are_gone():
            # The last optimizer step was skipped: a new accumulation begins with this batch.
            self._skip()
            self.loop.steps += 1
            self.engine.batch_ends(trained=False)
            self._pending = self._stepped = False
        self._backward = True
        if self.loop.zero is not None:
            self.loop.zero.is_empty = False

    @core.contained
    def _gradients_are_gone(self) -> bool:
        """Return whether the optimizers have no gradient to step with.

        During a look, gradients that are all 0 count as none. Otherwise they are not read, because
        that waits for the device.
        """
        if self.loop.zero is not None:  # ZeRO keeps gradients in internal buffers
            return self.loop.zero.is_empty
        has_any = has_gradients(self.loop.optimizers, zeros=self._look is None)
        return not (has_any or holds_unreduced(self.loop.model))

    def _skip(self) -> None:
        """Treat a skipped step as a step of all optimizers, which have nothing to share."""
        for optimizer in self.loop.inner_optimizers:
            self.optimizer_steps(optimizer)

    def optimizer_steps(self, optimizer: Optimizer) -> None:
        """Let the engine read the gradients of an optimizer that is about to step, or skips it.

        Args:
            optimizer: The optimizer, unwrapped.

        Raises:
            RuntimeError: The optimizer steps outside of ``step``.
        """
        if not self._in_step:
            raise RuntimeError(
                "an optimizer stepped outside of `with watch.step(batch):`, where Watch cannot "
                "read its gradients: put forward, backward and optimizer.step() into that block"
            )
        self._stepped = True
        self.engine.optimizer_steps(optimizer)

    def _hook_optimizers(self) -> None:
        """Call :meth:`optimizer_steps` right before each optimizer steps."""
        for optimizer in self.loop.inner_optimizers:
            before_step = partial(self.optimizer_steps, optimizer)
            self._removers.append(before_real_step(optimizer, before_step))
