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

from lightning_fedleak.attacks import Attack
from lightning_fedleak.engine import (
    CHOOSE,
    BoardLogger,
    Destination,
    Engine,
    Games,
    GateActions,
    Look,
    Threshold,
    WatchSettings,
    contained,
    names_there_are,
    optimizers_of,
    parts_of,
    to_dataframe,
)
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
        model: what the loop trains; the compiled one under ``torch.compile``.
        optimizer: the optimizer, or all of them; as Accelerate prepared them, too.
        attacks: the attacks, each with a name of its own; or ``"auto"``: all that can read it.
        gates: thresholds on what is logged.
        loader: the loader of the training data, whose length is an epoch. With it the trained
            weights are tested as well: before the first step, at shares of an epoch, at its end.
        folder: of ``leakage.jsonl``, ``run.jsonl`` and the report; ``version_<n>`` in it where it
            holds those of another run that this one does not resume.
        every_n_steps: look at optimizer steps 0, n, 2n, ...
        max_overhead: largest share of the training time that looks take; either this or
            ``every_n_steps``. Default: neither, but steps 1, 2, 4, 8, ... for 30 s of looks, and
            then .005.
        games: how membership games are played.
        settings: what is rarely changed: :class:`WatchSettings`.

    Attributes:
        should_stop: a gate has stopped the loop.

    Raises:
        ValueError: contradictory arguments, or a gate on what is not logged; also a model, a gate
            or an attack that does not fit, when the loop begins.
    """

    engine: Engine
    run: ClassVar[type[LoopRun]] = LoopRun
    utility_names: ClassVar[Sequence[str]] = ("train_loss", "val_loss")
    resume: ClassVar[str] = ""
    mend: ClassVar[str] = (
        "train it with a defence: DefendedLoop(model, optimizer, loader, [DPSGD(...)], epochs=...)"
    )

    @explain_arguments(settings=WatchSettings)
    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        attacks: Sequence[Attack] | Attack | Literal["auto"] = "auto",
        gates: Sequence[Threshold] = (),
        loader: Any = None,
        folder: str | Path = "fedleak_runs/watch",
        every_n_steps: int | None = None,
        max_overhead: float | None = None,
        games: Games | None = None,
        settings: WatchSettings | None = None,
    ) -> None:
        self.settings = one = settings or WatchSettings()
        parts = parts_of(
            attacks, one, games, every_n_steps, max_overhead, utility=self.utility_names
        )
        self.engine = Engine(*parts)
        self.gates = tuple(gates)
        self._check_gates()
        self.folder = Path(folder)
        self.should_stop = False
        zero = ZeROStep.of_engine(model, self.run.watcher)
        optimizers = torch_optimizers(optimizer) if zero is None else [zero]
        self.loop = Loop(
            model, optimizers, loader, one.precision, one.scaler, one.tokenizer, zero=zero
        )
        self._saved: Any = None
        self._removers: list[Callable[[], object]] = []

    def to_dataframe(self) -> pd.DataFrame:
        """Return what was measured so far; see :meth:`LeakageMonitor.to_dataframe`."""
        return to_dataframe(self.engine.jsonl)

    @property
    def utility(self) -> dict[str, float]:
        """The user's own numbers by name, such as ``"val_loss"``, to be set by the loop."""
        return self.loop.utility

    def state_dict(self) -> dict[str, object]:
        """Return what a loop that is resumed goes on with: plain numbers, strings and tensors."""
        gates = {gate.name: gate.state_dict() for gate in self.gates}
        state = {"engine": self.engine.state_dict(), "gates": gates}
        counts = {"steps": self.loop.steps, "batches": self.loop.batches}
        return {**state, **counts, "utility": dict(self.loop.utility)}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Go on from what :meth:`state_dict` returned; call it before ``with``."""
        self._saved = state

    def choose(self, loss: float) -> float:
        """Log and return ``leakage/choose``, by which to keep weights: the lower the better.

        It is the loss where every gate on the trained weights allows them, and infinity elsewhere.
        Call it on every process, once the step is over that the loss is of.

        Args:
            loss: the validation loss of the weights as they are.

        Raises:
            ValueError: no gate is on the trained weights.
        """
        if not self._on_weights:
            raise ValueError(
                f"{self.engine.run.watcher}.choose needs a gate on the trained weights, such as "
                "Threshold('leakage/combined/auc', ...)"
            )
        chosen = max(gate.choice(loss) for gate in self._on_weights)
        self._log({CHOOSE: chosen}, self.engine.run.step)
        return chosen

    @property
    def _on_weights(self) -> list[Threshold]:
        return [gate for gate in self.gates if gate.on_weights]

    def __enter__(self) -> Watch:
        """Begin the run: find the model's parts, calibrate the attacks, install the taps."""
        self.end(InterruptedError)  # a run that was left without an end
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
        client = "rank" if loop.release is None else loop.release.client
        client = settings.client or ("world" if shards else client)
        if shards and client == "rank":
            raise ValueError(
                f"{self.run.watcher}: {shards} reduces gradients over all processes before any can "
                "be read, so that no process's own leaves it: pass client='world'"
            )
        self._run = run = self.run.of_loop(loop, anatomy, client, engine.assume)
        engine.reset()
        self.should_stop = self._stepped = self._backward = self._open = self._inside = False
        for gate in self.gates:
            log, save, words = self._log, partial(self._save, gate), (self.resume, self.mend)
            defenses = run.defenses if loop.release and gate.action == "harden" else ()
            gate.watch(engine, GateActions(log, save, self._stop, run.processes, defenses, *words))
        if (saved := self._saved) is not None:
            loop.steps, loop.batches = saved["steps"], saved["batches"]
            loop.utility |= saved.get("utility", {})
            engine.load_state_dict(saved["engine"])
            for gate in (gate for gate in self.gates if gate.name in saved["gates"]):
                gate.load_state_dict(saved["gates"][gate.name])
        engine.open(run)
        self._hook_optimizers()
        self.folder = engine.own_folder(run, self.folder)
        self._loggers = self._log_to(run)
        boards = [one.writer for one in self._loggers if isinstance(one, BoardLogger)]
        training = {"optimizers": optimizers_of(loop.optimizers), **self._facts(run)}
        loggers = [one for one in self._loggers if not isinstance(one, BoardLogger)]
        place = Destination(self.folder, loggers, boards, training)
        engine.begin(run, place)
        self._report_begins()
        self._first_batch = loop.batches
        engine.training_begins()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """End the run, with its report where it is asked for; an exception inside goes on."""
        self.end(kind)

    def end(self, error: type[BaseException] | None = None) -> None:
        """End the run; ``error`` is the class of what ended the loop, None where it is finished."""
        if self.engine.fit is None:
            return
        ending = "finished" if error is None else error.__name__
        try:
            if error is None:
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
        """Refuse what the loop cannot be watched under."""
        check_whole(self.loop.inner_model, self.run.watcher, wrappers, takes_fsdp2=True)

    def _check_gates(self) -> None:
        """Refuse gates on what is not logged, and two of one name."""
        logged = self.engine.metric_names()
        for gate in self.gates:
            if gate.metric not in logged:
                watcher = self.run.watcher
                message = f"Threshold watches '{gate.metric}', which {watcher} does not log."
                raise ValueError(message + names_there_are(gate.metric, logged, watcher))
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
        """Let the look at work, or the next one, have no result, because of an error of ours."""
        self.engine.fail(error)

    def _save(self, gate: Threshold, name: str) -> Path | None:
        return None

    def _stop(self) -> None:
        self.should_stop = True

    def _log_to(self, run: LoopRun) -> list[Any]:
        if run.rank or not self.settings.tensorboard or find_spec("tensorboard") is None:
            return []
        board = BoardLogger(self.folder / "tensorboard")
        self._removers.append(board.writer.close)
        return [board]

    def _facts(self, run: LoopRun) -> dict[str, object]:
        """Return how the model is trained, for the record."""
        strategy = "DistributedDataParallel" if run.under_ddp else "loop"
        strategy = self.loop.sharded_by or strategy
        return {"strategy": strategy, "precision": run.precision, "processes": run.processes}

    @contextmanager
    def step(self, batch: Any) -> Iterator[Watch]:
        """Hold what the loop does with one batch.

        Args:
            batch: as the loop gives it to the model.

        Raises:
            BatchError: neither the graph of the first look nor its batch can be read; shows a
                ``batch_adapter`` to copy.
            LeakageLimitExceeded: a gate with ``action="raise"`` found too much.
            RuntimeError: the run has not begun; or an optimizer steps outside of this block.
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
        """Start a look where one is due."""
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
        self.engine.metrics_changed(epoch_ended=None)

    @property
    def _look(self) -> Look | None:
        """The look at work; None between looks."""
        return None if self.engine.fit is None else self.engine.fit.look

    def _backward_begins(self) -> None:
        if self._open and self._gradients_are_gone():
            # The step of the batches before was skipped: what is accumulated begins here.
            self._skip()
            self.loop.steps += 1
            self.engine.batch_ends(trained=False)
            self._open = self._stepped = False
        self._backward = True
        if self.loop.zero is not None:
            self.loop.zero.is_empty = False

    @contained
    def _gradients_are_gone(self) -> bool:
        """Return whether no gradient is there to be stepped with.

        Whether they are zeros is read where a look is at work alone: that waits for the device.
        """
        if self.loop.zero is not None:  # which keeps gradients out of sight
            return self.loop.zero.is_empty
        has_some = has_gradients(self.loop.optimizers, zeros=self._look is None)
        return not (has_some or holds_unreduced(self.loop.model))

    def _skip(self) -> None:
        for optimizer in self.loop.inner_optimizers:
            self.optimizer_steps(optimizer)

    def optimizer_steps(self, optimizer: Optimizer) -> None:
        """Note that an optimizer steps, or skips its step."""
        if not self._inside:
            raise RuntimeError(
                "an optimizer stepped outside of `with watch.step(batch):`, where Watch cannot see "
                "what it shares: put forward, backward and optimizer.step() into that block"
            )
        self._stepped = True
        self.engine.optimizer_steps(optimizer)

    def _hook_optimizers(self) -> None:
        self._follow_engine()
        for optimizer in self.loop.inner_optimizers:
            steps = partial(self.optimizer_steps, optimizer)
            self._removers.append(before_real_step(optimizer, steps))

    def _follow_engine(self) -> None:
        if self.loop.zero is not None:
            self._removers.append(self.loop.zero.follow_engine())
