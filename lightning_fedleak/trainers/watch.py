"""Watch: the engine in a training loop of one's own."""

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
    """Attack what a training loop would share, log how much it gives away, and gate it.

    ``step(batch)`` holds what the loop does with one batch: forward, backward, and the optimizer's
    step where one is due. Gradients may be accumulated over several of them, clipped, scaled by a
    GradScaler, and split over several optimizers. A step that is skipped is noticed by its
    gradients, which are gone without a step; it is not looked at. Training is not disturbed:
    weights, losses and random numbers are bit-identical to the loop without this.

    Under DistributedDataParallel each process is a client. Under FSDP2 (``fully_shard``) and an
    engine of DeepSpeed all are one, since gradients are reduced before any can be read. Where a
    :class:`~lightning_fedleak.trainers.DefendedLoop` acts, what it shares is read. A DP optimizer
    of Opacus is read inside its step, once it has clipped and noised; a step that it skips is none.
    Another library's, which cannot be read there, makes what is shared *unknown*.

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
        model: the model that the loop trains; under ``torch.compile`` the compiled model.
        optimizer: the optimizer or the optimizers, also as Accelerate has prepared them.
        attacks: the attacks, each with a name of its own; or ``"auto"``: all that can read it.
        gates: thresholds on what is logged.
        loader: the loader of the training data, whose length is an epoch. With it the trained
            weights are tested as well: before the first step, at shares of an epoch, at its end.
        folder: the folder of ``leakage.jsonl``, ``run.jsonl`` and the report. If it holds those of
            another run, which this one does not resume, a new ``version_<n>`` in it is used.
        every_n_steps: look at optimizer steps 0, n, 2n, ...
        max_overhead: the largest share of the training time that looks take, in place of
            ``every_n_steps``. With neither there are looks at steps 1, 2, 4, 8, ... until they have
            taken 30 s, and then this share is .005.
        games: how membership games are played.
        settings: the rarely changed settings: :class:`WatchSettings`.

    Attributes:
        should_stop: whether a gate has stopped the loop.

    Raises:
        ValueError: arguments contradict each other, or the metric of a gate is not logged. When the
            loop begins also: the model, a gate or an attack does not fit.
    """

    engine: core.Engine
    _earlier_utility: dict[str, float]
    run: ClassVar[type[LoopRun]] = LoopRun
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
        self._check_gates()
        self.folder = Path(folder)
        self.should_stop = False
        zero = ZeROStep.of_engine(model, self.run.watcher)
        optimizers = torch_optimizers(optimizer) if zero is None else [zero]
        self.loop = Loop(model, optimizers, loader, settings.precision, zero=zero)
        self.loop.scaler, self.loop.tokenizer = settings.scaler, settings.tokenizer
        self._saved: Any = None
        self._removers: list[Callable[[], object]] = []

    def to_dataframe(self) -> pd.DataFrame:
        """Return the results so far as a table; see :meth:`LeakageMonitor.to_dataframe`."""
        return core.to_dataframe(self.engine.jsonl)

    @property
    def utility(self) -> dict[str, float]:
        """The user's metrics by name, such as ``"val_loss"``.

        The loop sets each where it was measured, which is the step that the logs name: in the
        block of a batch its optimizer step counts, after the block as many steps as were over.
        """
        return self.loop.utility

    @core.contained
    def _log_utility(self, *, epoch_ended: bool | None = False) -> None:
        """Log the metrics that the loop has set since; another object was measured again."""
        now = dict(self.loop.utility)
        measured = [name for name in now if now[name] is not self._earlier_utility.get(name)]
        self._earlier_utility = now
        if measured or epoch_ended is None:
            self.engine.metrics_changed(measured=measured, epoch_ended=epoch_ended)

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

        It is the loss if every gate on the trained weights allows them, and infinity otherwise.
        Call it on every process, after the optimizer step that made these weights.

        Args:
            loss: the validation loss of the current weights.

        Raises:
            ValueError: no gate watches the trained weights.
        """
        if not self._on_weights:
            raise ValueError(
                f"{self.engine.run.watcher}.choose needs a gate on the trained weights, such as "
                "Threshold('leakage/combined/auc', ...)"
            )
        chosen = max(gate.choice(loss) for gate in self._on_weights)
        self._log({core.CHOOSE: chosen}, self.engine.run.step)
        return chosen

    @property
    def _on_weights(self) -> list[core.Threshold]:
        return [gate for gate in self.gates if gate.on_weights]

    def __enter__(self) -> Watch:
        """Begin the run: find the model's parts, calibrate the attacks, install the taps."""
        self.end(InterruptedError)  # if the run before was left without an end
        try:
            with shaped(self.loop.model.parameters()):
                self._begin()
        except BaseException:
            self.close()
            raise
        return self

    def _begin(self) -> None:
        engine, loop, settings = self.engine, self.loop, self.settings
        show_messages()
        self._check()
        anatomy = find_anatomy(loop.inner_model, **dict(settings.anatomy or {}))
        shards = loop.sharded_by
        default = "rank" if loop.release is None else loop.release.client
        client = settings.client or ("world" if shards else default)
        if shards and client == "rank":
            raise ValueError(
                f"{self.run.watcher}: {shards} reduces gradients over all processes before any can "
                "be read, so that no process's own leaves it: pass client='world'"
            )
        self._run = run = self.run.of_loop(loop, anatomy, client, engine.assume)
        engine.reset()
        self.should_stop = self._stepped = self._backward = self._open = self._inside = False
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
            self._removers.append(loop.zero.follow_engine())
        self._hook_optimizers()
        self.folder = engine.own_folder(run, self.folder)
        self._loggers = self._log_to(run)
        boards = [logger.writer for logger in self._loggers if isinstance(logger, core.BoardLogger)]
        loggers = [logger for logger in self._loggers if not isinstance(logger, core.BoardLogger)]
        training = {"optimizers": core.optimizers_of(loop.optimizers), **self._training_facts(run)}
        engine.begin(run, core.Destination(self.folder, loggers, boards, training))
        self._report_begins()
        self._first_batch = loop.batches
        engine.training_begins()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """End the run, and write its report if it is asked for. Exceptions are not suppressed."""
        self.end(kind)

    def end(self, error: type[BaseException] | None = None) -> None:
        """End the run.

        Args:
            error: the class of the exception that ended the loop; None if the loop is finished.
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
        """Remove every tap; may be called twice."""
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
            wrappers: the names of classes that will wrap the model.
        """
        check_whole(self.loop.inner_model, self.run.watcher, wrappers, takes_fsdp2=True)

    def _check_gates(self) -> None:
        """Raise an error for a gate whose metric is not logged, and for two gates of one name."""
        logged = self.engine.metric_names()
        for gate in self.gates:
            if gate.metric not in logged:
                watcher = self.run.watcher
                message = f"Threshold watches '{gate.metric}', which {watcher} does not log."
                raise ValueError(message + core.names_there_are(gate.metric, logged, watcher))
        names = [gate.name for gate in self.gates]
        for name in {name for name in names if names.count(name) > 1}:
            raise ValueError(f"two gates are named '{name}': give one of them name=...")

    def _log(self, values: dict[str, float], step: int) -> None:
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
        return None

    def _stop(self) -> None:
        self.should_stop = True

    def _log_to(self, run: LoopRun) -> list[Any]:
        if run.rank or not self.settings.tensorboard or find_spec("tensorboard") is None:
            return []
        board = core.BoardLogger(self.folder / "tensorboard")
        self._removers.append(board.writer.close)
        return [board]

    def _training_facts(self, run: LoopRun) -> dict[str, object]:
        """Return how the model is trained, for the record."""
        strategy = self.loop.sharded_by or ("DistributedDataParallel" if run.under_ddp else "loop")
        return {"strategy": strategy, "precision": run.precision, "processes": run.processes}

    @contextmanager
    def step(self, batch: Any) -> Iterator[Watch]:
        """Return a context for everything that the loop does with one batch.

        Args:
            batch: the batch that the loop gives to the model.

        Raises:
            BatchError: neither the graph of the first look nor its batch can be read. The message
                shows a ``batch_adapter`` to copy.
            LeakageLimitExceeded: a metric is above the limit of a gate with ``action="raise"``.
            RuntimeError: the run has not begun, or an optimizer steps outside of this block.
        """
        if self.engine.fit is None:
            raise RuntimeError("no run has begun: put the loop into `with Watch(...) as watch:`")
        self.batch_begins(batch)
        self._inside = True
        try:
            with before_backward(self._backward_begins):
                yield self
        except BaseException as error:
            self._inside = False
            self.loop.steps += self._stepped
            if (look := self._look) is not None:
                look.training_step.error = f"{type(error).__name__} ended a batch of it"
            raise
        self.batch_ends()
        self._inside = False

    def batch_begins(self, batch: Any) -> None:
        """Start a look if one is due."""
        self._log_utility()
        self.engine.batch_begins(batch)
        if self.loop.batches == self._first_batch and not self._run.is_compiled:
            self._removers.append(self._run.check_first_forward())
        self.loop.batches += 1
        self._stepped = self._backward = False

    def batch_ends(self) -> None:
        """Log a look once its optimizer step is over."""
        if not self._stepped and self._backward and self._gradients_are_gone():
            self._skip()
        self._open = not self._stepped and (self._open or self._backward)
        self.loop.steps += self._stepped
        self.engine.batch_ends(trained=self._backward or self._stepped)
        self._log_utility(epoch_ended=None)

    @property
    def _look(self) -> core.Look | None:
        """The current look; None between looks."""
        return None if self.engine.fit is None else self.engine.fit.look

    def _backward_begins(self) -> None:
        if self._open and self._gradients_are_gone():
            # The last optimizer step was skipped: a new accumulation begins with this batch.
            self._skip()
            self.loop.steps += 1
            self.engine.batch_ends(trained=False)
            self._open = self._stepped = False
        self._backward = True
        if self.loop.zero is not None:
            self.loop.zero.is_empty = False

    @core.contained
    def _gradients_are_gone(self) -> bool:
        """Return whether there is no gradient for a step.

        Gradients of zeros count as none only during a look: reading them waits for the device.
        """
        if self.loop.zero is not None:  # ZeRO keeps gradients in internal buffers
            return self.loop.zero.is_empty
        has_some = has_gradients(self.loop.optimizers, zeros=self._look is None)
        return not (has_some or holds_unreduced(self.loop.model))

    def _skip(self) -> None:
        for optimizer in self.loop.inner_optimizers:
            self.optimizer_steps(optimizer)

    def optimizer_steps(self, optimizer: Optimizer) -> None:
        """Record that an optimizer steps, or skips its step."""
        if not self._inside:
            raise RuntimeError(
                "an optimizer stepped outside of `with watch.step(batch):`, where Watch cannot see "
                "what it shares: put forward, backward and optimizer.step() into that block"
            )
        self._stepped = True
        self.engine.optimizer_steps(optimizer)

    def _hook_optimizers(self) -> None:
        for optimizer in self.loop.inner_optimizers:
            steps = partial(self.optimizer_steps, optimizer)
            self._removers.append(before_real_step(optimizer, steps))
