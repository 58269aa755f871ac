"""Watch: the engine in a training loop of one's own."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_fedleak.anatomy import Anatomy, find_anatomy
from lightning_fedleak.attacks import Attack
from lightning_fedleak.looks import (
    CHOOSE,
    BoardLogger,
    Controls,
    Destination,
    Engine,
    Processes,
    Threshold,
    names_there_are,
    optimizers_of,
    to_dataframe,
)
from lightning_fedleak.report import write_at_end
from lightning_fedleak.taps.gradients import before_real_step
from lightning_fedleak.trainers.loop import Loop, LoopRun, WatchSettings
from lightning_fedleak.validate import check_names

if TYPE_CHECKING:
    import pandas as pd


class Watch:
    """Attack what a training loop would share, log how much it gives away, and gate it.

    ``step(batch)`` holds what the loop does with one batch: forward, backward, and the optimizer's
    step where one is due. Gradients may be accumulated over several of them, clipped, scaled by a
    GradScaler, and split over several optimizers. A step that is skipped is noticed by its
    gradients, which are gone without a step; it is not looked at. Training is not disturbed:
    weights, losses and random numbers are bit-identical to the loop without this.

    Under DistributedDataParallel each process is a client. A model that FSDP shards is refused,
    and no defence acts here: both need Lightning's Trainer
    (:class:`~lightning_fedleak.DefendedStrategy`).

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
        folder: of ``leakage.jsonl``, ``run.jsonl`` and the report.
        settings: those of :class:`WatchSettings`, by name.

    Attributes:
        should_stop: a gate has stopped the loop.

    Raises:
        ValueError: contradictory arguments; when the loop begins also a model, a gate or an
            attack that does not fit.
        TypeError: an argument that is not known.
    """

    resume: ClassVar[str] = ""
    mend: ClassVar[str] = (
        "train the same model and data in Lightning with a defence: finetuning.CausalLMFineTuning("
        "model) and Trainer(strategy=DefendedStrategy('auto', defenses=[...]))"
    )

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        attacks: Sequence[Attack] | Attack | Literal["auto"] = "auto",
        gates: Sequence[Threshold] = (),
        loader: Any = None,
        folder: str | Path = "fedleak_runs/watch",
        **settings: Any,
    ) -> None:
        check_names(type(self).__name__, settings, [one.name for one in fields(WatchSettings)])
        self.settings = one = WatchSettings(**settings)
        self.engine = Engine(*one.chosen(attacks))
        self.gates = tuple(gates)
        self.folder = Path(folder)
        self.should_stop = False
        listed = [optimizer] if isinstance(optimizer, Optimizer) else [*optimizer]
        if any(getattr(each, "scaler", None) is not None for each in listed):
            raise ValueError(
                "Accelerate's fp16 steps by a function of its own, at which Watch cannot look: use "
                "mixed_precision='bf16', or transformers' Trainer with LeakageCallback"
            )
        self.loop = Loop(
            model,
            [unwrapped(each) for each in listed],
            loader,
            one.precision,
            one.scaler,
            one.tokenizer,
            watched=(CHOOSE,) if one.chooses else (),
        )
        self._saved: Any = None
        self._removers: list[Callable[[], None]] = []
        self._stepped = self._backward = self._open = self._inside = False

    # ---- what was measured ------------------------------------------------------------------

    @property
    def latest(self) -> dict[str, float]:
        """The newest value by log name; NaN is unknown. Empty before the first look."""
        return self.engine.results.latest

    def to_dataframe(self) -> pd.DataFrame:
        """Return what was measured so far; see :meth:`LeakageMonitor.to_dataframe`."""
        return to_dataframe(self.engine.jsonl)

    @property
    def utility(self) -> dict[str, float]:
        """The user's own numbers by name, such as ``"val_loss"``, to be set by the loop."""
        return self.loop.utility

    def state_dict(self) -> dict[str, object]:
        """Return what a loop that is resumed goes on with: plain numbers, strings and tensors."""
        return {
            "engine": self.engine.state_dict(),
            "gates": {gate.name: gate.state_dict() for gate in self.gates},
            "steps": self.loop.steps,
            "batches": self.loop.batches,
        }

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Go on from what :meth:`state_dict` returned; call it before ``with``."""
        self._saved = state

    def choose(self, loss: float) -> float:
        """Log and return ``leakage/choose``, by which to keep weights: the lower the better.

        On every process, once the step is over that the loss is of. When the loop ends, texts that
        chose nothing show what the weights give away where it was lowest.

        Args:
            loss: the validation loss of the weights as they are.

        Returns:
            The loss where every gate on the trained weights allows them, and infinity elsewhere.

        Raises:
            ValueError: no gate is on the trained weights, or no texts were put aside.
        """
        if not self._on_weights or CHOOSE not in self.engine.run.watched:
            raise ValueError(
                f"{self.engine.run.watcher}.choose needs a gate on the trained weights, such as "
                "Threshold('leakage/combined/auc', ...), and texts put aside: chooses=True"
            )
        chosen = max(gate.choice(loss) for gate in self._on_weights)
        self._log({CHOOSE: chosen}, self.engine.run.step)
        return chosen

    @property
    def _on_weights(self) -> list[Threshold]:
        return [gate for gate in self.gates if gate.on_weights]

    # ---- a run ------------------------------------------------------------------------------

    def __enter__(self) -> Watch:
        """Begin the run: find the model's parts, calibrate the attacks, install the taps."""
        self.close()
        try:
            self._begin()
        except BaseException:
            self.close()
            raise
        return self

    def _begin(self) -> None:
        engine, loop, settings = self.engine, self.loop, self.settings
        anatomy = find_anatomy(_without_ddp(loop.model), **dict(settings.anatomy or {}))
        self._run = run = self._new_run(anatomy)
        self._check(run)
        engine.reset()
        engine.check(Processes(run.processes, run.client, None), lambda: anatomy)
        self.should_stop = self._stepped = self._backward = self._open = self._inside = False
        for gate in self.gates:
            if gate.metric not in engine.metric_names():
                raise ValueError(
                    f"Threshold watches '{gate.metric}', which {run.watcher} does not log."
                    + names_there_are(gate.metric, engine.metric_names())
                )
            gate.watch(engine, self._controls(gate, run))
        if self._saved is not None:
            loop.steps, loop.batches = self._saved["steps"], self._saved["batches"]
            engine.load_state_dict(self._saved["engine"])
            for gate in self.gates:
                if gate.name in self._saved["gates"]:
                    gate.load_state_dict(self._saved["gates"][gate.name])
        engine.open(run)
        self._hook_optimizers()
        self._loggers = self._log_to(run)
        boards = [one.writer for one in self._loggers if isinstance(one, BoardLogger)]
        engine.begin(
            run,
            Destination(
                self.folder,
                self._loggers,
                boards,
                self._facts(run)
                | {f"fedleak/{a.name}": repr(a.config()) for a in engine.selection.attacks},
                training={"optimizers": optimizers_of(loop.optimizers), **self._facts(run)},
            ),
        )
        self._first_batch = loop.batches
        engine.training_begins()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """End the run, with its report where it is asked for; an exception inside goes on."""
        self.end(kind)

    def end(self, error: type[BaseException] | None = None) -> None:
        """End the run.

        Args:
            error: the class of what ended the loop; None: it is finished.
        """
        if self.engine.fit is None:
            return
        how = "finished" if error is None else error.__name__
        try:
            if error is None:
                self.engine.training_ends()
        except BaseException as raised:
            how = type(raised).__name__
            raise
        finally:
            try:
                record = self.engine.end(how)
                if record is not None and self.settings.report:
                    write_at_end(record.path, record.run, self.engine.run.watcher)
            finally:
                self.close()

    def close(self) -> None:
        """Remove every tap; may be called twice."""
        for remove in self._removers:
            remove()
        self._removers.clear()
        self.engine.close()

    def _new_run(self, anatomy: Anatomy) -> LoopRun:
        return LoopRun(anatomy, self.settings.client, self.engine.assume, self.loop)

    def _check(self, run: LoopRun) -> None:
        """Refuse what the loop cannot be watched under.

        Raises:
            ValueError: says why, and what to do.
        """
        if any(isinstance(p, DTensor) for p in self.loop.model.parameters()):
            raise ValueError(
                f"{run.watcher} reads whole gradients, and FSDP2 keeps a part of each in every "
                "process: use DDP, or LeakageMonitor with Lightning's ModelParallelStrategy"
            )
        names = [gate.name for gate in self.gates]
        if double := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"two gates are named '{double.pop()}': give one of them name=...")

    def _controls(self, gate: Threshold, run: LoopRun) -> Controls:
        return Controls(
            self._log,
            partial(self._save, gate),
            self._stop,
            run.processes,
            resume=self.resume,
            mend=self.mend,
        )

    def _log(self, values: dict[str, float], step: int) -> None:
        for logger in self._loggers:
            logger.log_metrics(values, step=step)

    def _save(self, gate: Threshold, name: str) -> Path | None:
        return None

    def _stop(self) -> None:
        self.should_stop = True

    def _log_to(self, run: LoopRun) -> list[Any]:
        installed = importlib.util.find_spec("tensorboard") is not None
        if run.rank or not (self.settings.tensorboard and installed):
            return []
        return [BoardLogger(self.folder / "tensorboard")]

    def _facts(self, run: LoopRun) -> dict[str, object]:
        """Return how the model is trained, for the record."""
        strategy = "DistributedDataParallel" if run.under_ddp else "loop"
        return {"strategy": strategy, "precision": run.precision, "processes": run.processes}

    # ---- a step -----------------------------------------------------------------------------

    @contextmanager
    def step(self, batch: Any) -> Iterator[Watch]:
        """Hold what the loop does with one batch.

        Args:
            batch: as the loop gives it to the model.

        Raises:
            BatchError: the first batch cannot be read; shows a ``batch_adapter`` to copy.
            LeakageLimitExceeded: a gate with ``action="raise"`` found too much.
            RuntimeError: the run has not begun; or an optimizer steps outside of this block.
        """
        if self.engine.fit is None:
            raise RuntimeError("no run has begun: put the loop into `with Watch(...) as watch:`")
        self.batch_begins(batch)
        self._inside = True
        try:
            with self.watch_backward():
                yield self
        except BaseException as error:
            self._inside = False
            if self.engine.fit is not None and self.engine.fit.look is not None:
                self.engine.fit.look.truth_error = f"{type(error).__name__} ended a batch of it"
            raise
        self.batch_ends()
        self._inside = False

    def batch_begins(self, batch: Any) -> None:
        """Start a look where one is due."""
        self.engine.batch_begins(batch)
        if self.loop.batches == self._first_batch and not self._run.is_compiled:
            hooks: list[RemovableHandle] = []
            check = partial(self._check_autocast, hooks)
            hooks.append(self._run.anatomy.embedding.register_forward_pre_hook(check))
            self._removers.append(hooks[0].remove)
        self.loop.batches += 1
        self._stepped = self._backward = False

    def _check_autocast(self, hooks: Sequence[RemovableHandle], *_: object) -> None:
        for hook in hooks:
            hook.remove()
        self._run.check_autocast()

    def batch_ends(self) -> None:
        """Log a look once its optimizer step is over."""
        if not self._stepped and self._backward and self._gradients_are_gone():
            self._skip()
        self._open = not self._stepped and (self._open or self._backward)
        self.loop.steps += self._stepped
        self.engine.batch_ends(trained=self._backward or self._stepped)

    @contextmanager
    def watch_backward(self) -> Iterator[None]:
        """Note the losses whose backward is run inside, by torch's own function."""
        original = torch.autograd.backward

        def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
            torch.autograd.backward = original  # a checkpoint's backward calls it again
            try:
                self._backward_begins(tensors)
                original(tensors, *args, **kwargs)
            finally:
                torch.autograd.backward = backward

        torch.autograd.backward = backward
        try:
            yield
        finally:
            torch.autograd.backward = original

    def _backward_begins(self, losses: Tensor | Sequence[Tensor]) -> None:
        if self._open and self._gradients_are_gone():
            # The step of the batches before was skipped: what is accumulated begins here.
            self._skip()
            self.loop.steps += 1
            self.engine.batch_ends(trained=False)
            self._open = self._stepped = False
        self._backward = True
        for loss in [losses] if isinstance(losses, Tensor) else losses:
            self.engine.loss_computed(loss)

    def _gradients_are_gone(self) -> bool:
        """Return whether no gradient is there to be stepped with."""
        groups = (group for optimizer in self.loop.optimizers for group in optimizer.param_groups)
        gradients = [p.grad for group in groups for p in group["params"] if p.grad is not None]
        return not any(bool(g.any()) for g in sorted(gradients, key=Tensor.numel))

    def _skip(self) -> None:
        for optimizer in self.loop.optimizers:
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
        for optimizer in self.loop.optimizers:
            steps = partial(self.optimizer_steps, optimizer)
            self._removers.append(before_real_step(optimizer, steps))


def unwrapped(optimizer: Any) -> Optimizer:
    """Return the optimizer inside what Accelerate prepared.

    Raises:
        TypeError: no optimizer.
    """
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = inner
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer must be a torch optimizer, got {type(optimizer).__name__}")
    return optimizer


def _without_ddp(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, DistributedDataParallel) else model
