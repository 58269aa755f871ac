"""Attacks the updates of transformers' Trainer and its subclasses: :class:`LeakageCallback`.

The callback is what the user adds to a Trainer. It forwards the Trainer's events to a
:class:`_TransformersWatch`, which runs the engine: at some optimizer steps, called *looks*, the
attacks read the gradients right before the step. The results are logged, and *gates*, thresholds on
logged metrics, may stop the run. ``engine.fit`` is the engine's state of the current run.
"""

import math
from collections.abc import Mapping, Sequence
from copy import copy, deepcopy
from functools import partial
from numbers import Real
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, Literal

import torch
import transformers
from torch import Tensor, nn
from torch.amp.grad_scaler import OptState
from transformers import DefaultFlowCallback, TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_callback import CallbackHandler
from transformers.trainer_utils import IntervalStrategy, SaveStrategy

from lightning_fedleak import engine as core
from lightning_fedleak.attacks import Attack
from lightning_fedleak.attacks.memorization import MemorizationAttack, PromptAttack
from lightning_fedleak.defenses.host import override
from lightning_fedleak.engine.loggers import keep_highest, upload_to_wandb
from lightning_fedleak.messages import rank_zero_info
from lightning_fedleak.model.snapshots import Stage
from lightning_fedleak.model.taps import before_real_step
from lightning_fedleak.private_files import load_state, save_state
from lightning_fedleak.report.watched import Reported
from lightning_fedleak.trainers import loop
from lightning_fedleak.trainers.rollouts import Rollouts
from lightning_fedleak.trainers.watch import Watch
from lightning_fedleak.trainers.zero import ZeROStep
from lightning_fedleak.validate import explain_arguments

FILE = "fedleak.safetensors"
"""The file in a checkpoint with the state that a resumed run loads."""
_USAGE = "trainer.add_callback(LeakageCallback(trainer, ...))"
# TRL's trainers that PreferenceMargin can attack by the preference pairs of their data.
_PAIR_TRAINERS = {f"{name}Trainer" for name in ("DPO", "KTO", "ORPO", "CPO")}
# TRL's trainers that PolicyDrift and RewardGain can attack by the prompts of their data.
_PROMPT_TRAINERS = {"GRPOTrainer", "RLOOTrainer"}
# TRL's trainers that do not make the texts of their data more likely, each with what it does
# instead. Attacks that compare likelihoods of texts are refused there.
_NOT_LIKELIER = dict.fromkeys(_PAIR_TRAINERS, "makes rejected texts less likely")
_NOT_LIKELIER |= dict.fromkeys(_PROMPT_TRAINERS, "trains on texts that it writes")
_NOT_LIKELIER["RewardTrainer"] = "trains a score of texts and not their likelihood"


class LeakageCallback(TrainerCallback, Reported):
    """Attack the updates of a run of transformers' Trainer, log the results, and gate the run.

    Pass the Trainer, because the Trainer gives its callbacks neither the batch nor itself. The
    callback wraps ``training_step`` during training to get the batch, and ``train`` permanently to
    close its files after any exception. Results go to ``trainer.log``, and to the same files as
    those of :class:`~lightning_fedleak.LeakageMonitor`. Losses, weights and random numbers are
    bit-identical to the run without it.

    It works with gradient accumulation and checkpointing, bf16, fp16, ``torch.compile``, DDP,
    accelerate's FSDP2, and DeepSpeed's ZeRO without offload. FSDP1 and optimizers that step inside
    backward are refused. Under a Trainer in which defences act, see
    :func:`~lightning_fedleak.trainers.defended`, attacks read the defended updates.

    A gate that is exceeded saves a checkpoint and then stops the run, by default. A gate on the
    trained weights adds ``eval_leakage/choose`` to the metrics of each evaluation: the loss if the
    gate accepts the weights, and infinity otherwise. ``metric_for_best_model="leakage/choose"``
    with ``greater_is_better=False`` keeps the best accepted model.

    Examples:
        >>> import torch
        >>> from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
        >>> from lightning_fedleak.attacks import BagOfWords
        >>> from lightning_fedleak import LeakageCallback, Threshold
        >>> config = GPT2Config(vocab_size=64, n_embd=8, n_head=1, tie_word_embeddings=False)
        >>> rows = [{"input_ids": ids, "labels": ids} for ids in torch.arange(64).view(8, 8)]
        >>> arguments = TrainingArguments("out", max_steps=4, report_to=[], use_cpu=True)
        >>> trainer = Trainer(GPT2LMHeadModel(config), arguments, train_dataset=rows)
        >>> gate = Threshold("leakage/worst/words", at_most=0.5)
        >>> trainer.add_callback(LeakageCallback(trainer, [BagOfWords()], [gate], every_n_steps=1))
        >>> _ = trainer.train()
        >>> trainer.state.global_step
        1

    Args:
        trainer: The Trainer to which the callback is added.
        attacks: The attacks, each with a unique name; or ``"auto"``: all that apply.
        gates: The thresholds on logged metrics.
        folder: The folder of the files; by default the Trainer's ``output_dir``.
        every_n_steps: The same as in :class:`~lightning_fedleak.trainers.Watch`.
        max_overhead: The same as in ``Watch``.
        games: The same as in ``Watch``.
        settings: The rarely changed settings: :class:`~lightning_fedleak.trainers.WatchSettings`.
            Precision and scaler are the Trainer's.

    Raises:
        TypeError: No Trainer was passed. The message shows the correct call.
        ValueError: Arguments contradict each other, or attacks on the trained weights are listed
            under TRL's trainers of preferences, rewards or reinforcement learning. Attacks on
            preference pairs are allowed under DPO, KTO, ORPO and CPO, and on prompts under GRPO and
            RLOO. When training begins also: the Trainer, a gate or an attack is not supported in
            this run.
    """

    engine: core.Engine

    @explain_arguments(
        settings=core.WatchSettings,
        elsewhere={"defenses": "defended(Trainer)(..., defenses=[...])"},
    )
    def __init__(
        self,
        trainer: transformers.Trainer | None = None,
        attacks: Sequence[Attack] | Attack | Literal["auto"] = "auto",
        gates: Sequence[core.Threshold] = (),
        folder: str | Path | None = None,
        every_n_steps: int | None = None,
        max_overhead: float | None = None,
        games: core.Games | None = None,
        settings: core.WatchSettings | None = None,
    ) -> None:
        if not isinstance(trainer, transformers.Trainer):
            raise TypeError(f"LeakageCallback needs the Trainer: make it first, then {_USAGE}")
        self.trainer = trainer
        (settings or core.WatchSettings()).refuse(type(self).__name__, "precision", "scaler")
        folder = folder or str(trainer.args.output_dir)
        self.watch = _TransformersWatch(
            trainer, attacks, gates, None, folder, every_n_steps, max_overhead, games, settings
        )
        self.engine = self.watch.engine
        bases = _NOT_LIKELIER.keys() & {base.__name__ for base in type(trainer).__mro__}
        chosen = self.engine.selection.attacks
        weight_attacks = [attack for attack in chosen if isinstance(attack, MemorizationAttack)]
        refused_names = [attack.name for attack in weight_attacks]
        if bases <= _PAIR_TRAINERS:
            refused_names = [a.name for a in weight_attacks if getattr(a, "part", None) != "pairs"]
        elif bases <= _PROMPT_TRAINERS:
            refused_names = [a.name for a in weight_attacks if not isinstance(a, PromptAttack)]
        if bases and refused_names and attacks != "auto":
            base = bases.pop()
            raise ValueError(
                f"{base} {_NOT_LIKELIER[base]}, so likelihoods do not show what the weights were "
                f"trained on: remove {', '.join(refused_names)} from attacks=; PreferenceMargin() "
                "reads preference pairs, PolicyDrift() and RewardGain() prompts"
            )
        train = trainer.train

        def train_and_close(*args: Any, **kwargs: Any) -> Any:
            checkpoint = kwargs.get("resume_from_checkpoint", next(iter(args), None))
            self.watch.resumed_from = None if isinstance(checkpoint, bool) else checkpoint
            self.watch.has_optimizer = trainer.optimizer is not None
            try:
                return train(*args, **kwargs)
            except BaseException as error:  # an evaluation or another callback may raise it too
                self.watch.end(type(error))
                raise

        trainer.train = train_and_close  # type: ignore[method-assign]

    def on_init_end(self, *_: Any, **__: Any) -> None:
        """Raise an error: it was passed in ``callbacks=`` to a Trainer that is being made.

        Raises:
            ValueError: Always. That Trainer is not the one that this callback was created with.
        """
        raise ValueError(f"LeakageCallback is for the Trainer it was created with: {_USAGE}")

    @property
    def state_key(self) -> str:
        """Raise an error: Lightning's Trainer asks for this key before it calls ``setup``."""
        raise TypeError(
            "LeakageCallback is for transformers' Trainer: in Lightning's write "
            "callbacks=[LeakageMonitor()]"
        )

    setup, on_exception = on_init_end, None  # what Lightning looks for before and after that

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Begin the run: find the model's parts, calibrate the attacks, wrap ``training_step``."""
        self.watch.__enter__()

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        """Let the attacks read the gradients, after clipping."""
        self.watch.before_step()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """End a batch. After an optimizer step, log the results and evaluate the gates."""
        self.watch.batch_ends()

    on_substep_end = on_step_end  # a batch whose gradient is accumulated, without a step

    def on_log(self, *_: Any, logs: Mapping[str, object] | None = None, **__: Any) -> None:
        """Record the Trainer's metrics that the logs show next to leakage."""
        values = {n: v for n, v in (logs or {}).items() if isinstance(v, Real | torch.Tensor)}
        self.watch.note(core.chosen_metrics(values, self.watch.engine.options.utility))

    def on_evaluate(self, *_: Any, metrics: dict[str, float] | None = None, **__: Any) -> None:
        """Add the values by which a checkpoint is selected; an unknown value is infinity."""
        if metrics is not None and self.watch.engine.fit is not None:
            metrics.update(self.watch.choices(metrics))

    def on_save(self, *_: Any, **__: Any) -> None:
        """Write the state that a resumed run loads into the checkpoint."""
        self.watch.save_state()

    def on_epoch_end(self, *_: Any, **__: Any) -> None:
        """Log the spent privacy budget. If the training stops, also attack the trained weights.

        After this event the Trainer may replace them by the weights of its best checkpoint.
        """
        self.watch.engine.metrics_changed(epoch_ended=True)
        if self.trainer.control.should_training_stop:
            self.watch.engine.look_at_end()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """End the run, and restore ``training_step``."""
        weights = self.watch.engine.weights
        if weights is not None and self.trainer.args.load_best_model_at_end:
            weights.skip_present_weights()
        self.watch.end()


class _TransformersWatch(Watch):
    """Watches a Trainer's run. :class:`LeakageCallback` calls its methods.

    Args:
        trainer: The Trainer.
        arguments: The arguments of :class:`Watch` after the model and the optimizer.

    Attributes:
        trainer: The Trainer.
        resumed_from: The checkpoint folder that ``train`` was called with; None without one.
        has_optimizer: Whether the Trainer had an optimizer before ``train`` was called.
    """

    watcher: ClassVar[str] = "LeakageCallback"
    # Parts of a gate's message when it stops the run: the call that resumes from the checkpoint at
    # {}, and what to change so that less leaks.
    resume: ClassVar[str] = "trainer.train(resume_from_checkpoint='{}')"
    mend: ClassVar[str] = "train it by defended(Trainer)(..., defenses=[DPSGD(...)])"

    def __init__(self, trainer: transformers.Trainer, *arguments: Any) -> None:
        # The Trainer makes its optimizer in `train`, so the list of optimizers is empty here.
        super().__init__(trainer.model, [], *arguments)  # type: ignore[arg-type]
        self.trainer = trainer
        self.resumed_from: str | PathLike[str] | None = None
        self.has_optimizer = False
        self._unlogged: dict[str, float] = {}  # collected for the next call of `_flush`
        self._is_ending = False

    def _begin(self) -> None:
        """Make the loop from the Trainer, load the state of a resumed run, and begin the run.

        Raises:
            ValueError: The Trainer or an attack is not supported, or ``metric_for_best_model`` is a
                leakage metric that cannot select a model.
        """
        trainer, args, accelerator = self.trainer, self.trainer.args, self.trainer.accelerator
        self._unlogged, self._is_ending, steps = {}, False, int(trainer.state.global_step)
        loader = trainer.callback_handler.train_dataloader
        model = trainer.model_wrapped
        zero = ZeROStep.of_engine(model, self.watcher)
        # FSDP2 and ZeRO cast by their own policies, not by autocast.
        casts_itself = getattr(accelerator, "is_fsdp2", False) or zero is not None
        mixed = None if casts_itself else accelerator.mixed_precision
        self.loop = loop.Loop(
            model,
            [loop.unwrapped(trainer.optimizer) if zero is None else zero],
            loader,
            {
                "precision": loop.precision_of(mixed, model),
                "scaler": getattr(accelerator, "scaler", None),
                "tokenizers": [self.settings.tokenizer or trainer.processing_class],
                "epochs": int(trainer.state.num_train_epochs),
                "planned_steps": trainer.state.max_steps if trainer.state.max_steps > 0 else None,
                "watched": tuple(filter(None, [self._best_metric()])),
                "temperature": float(getattr(args, "temperature", None) or 1.0),  # GRPO and RLOO
                "rollouts": Rollouts(trainer) if hasattr(args, "steps_per_generation") else None,
                "fit_copy": self._fit_copy,
            },
            steps=steps,
            announces_gradients=True,
            zero=zero,
        )
        if steps and loader is not None and hasattr(loader, "__len__"):
            # Count the batches that the resumed run has processed already.
            steps_per_epoch = math.ceil(len(loader) / args.gradient_accumulation_steps)
            epochs, remaining = divmod(steps, steps_per_epoch)
            self.loop.batches = epochs * len(loader) + remaining * args.gradient_accumulation_steps
        self._saved = None
        if steps:
            path = Path(self.resumed_from or self._checkpoint()) / FILE
            if path.exists():
                self._saved = load_state(path)
            else:
                rank_zero_info(
                    f"LeakageCallback: {path} does not exist, so looks and gates start from zero"
                )
        super()._begin()
        if (best := self._best_metric()) is None:
            return
        available = [*self.engine.metric_names(), *([core.CHOOSE] if self._on_weights else [])]
        if args.greater_is_better is not False or best not in available:
            raise ValueError(
                f"metric_for_best_model='{best}' needs greater_is_better=False, and a metric that "
                f"is logged ({core.CHOOSE}: with gates=[Threshold('leakage/combined/auc', ...)])."
                f"{core.names_there_are(best, available, self.watcher)}"
            )

    def _fit_copy(self, model: nn.Module, rows: Any) -> None:
        """Train a copy of the model with a second Trainer of the same class; see :class:`Run`.

        The second Trainer is a shallow copy of the first, with another model, optimizer and data,
        because its ``__init__`` would prepare model and data again. It saves, evaluates and reports
        nothing, and has none of the user's callbacks.

        Args:
            model: The copy of the model.
            rows: The rows to train it on.

        Raises:
            ValueError: The user made the optimizer, so that none can be made for the copy.
        """
        trainer = self.trainer
        if self.has_optimizer:
            raise ValueError(
                "Memorization(reference='auto'): the optimizer was made before train(), and only "
                "for this model: make a new Trainer with TrainingArguments(optim=...) or "
                "optimizer_cls_and_kwargs=, or pass reference= to Memorization"
            )
        model = trainer.accelerator.unwrap_model(model, False, False)  # from autocast and compile
        trainer_copy, args = copy(trainer), copy(trainer.args)
        for name in ("train", "training_step"):  # the wrappers that this callback has set
            vars(trainer_copy).pop(name, None)
        # TRL's trainers collect their metrics in private containers, which must not be shared.
        internals = {n: v for n, v in vars(trainer).items() if n.startswith("_")}
        for name in (n for n, value in internals.items() if isinstance(value, dict | list | set)):
            setattr(trainer_copy, name, deepcopy(internals[name]))
        if args.max_steps > 0:
            args.max_steps = math.ceil(args.max_steps * len(rows) / len(self.loop.loader.dataset))
        args.logging_strategy = args.eval_strategy = IntervalStrategy.NO
        args.save_strategy, args.report_to = SaveStrategy.NO, []
        args.load_best_model_at_end = args.push_to_hub = args.eval_on_start = False
        trainer_copy.args, trainer_copy.train_dataset, trainer_copy.eval_dataset = args, rows, None
        trainer_copy.model = trainer_copy.model_wrapped = model
        vars(trainer_copy).update(dict.fromkeys(("model_init", "optimizer", "lr_scheduler")))
        trainer_copy.neftune_noise_alpha = None  # its hook was copied with the model
        # With skip_memory_metrics=True the tracker measures nothing.
        trainer_copy._memory_tracker = type(trainer._memory_tracker)(True)
        trainer_copy.state, trainer_copy.control = TrainerState(), TrainerControl()
        handler_args = [DefaultFlowCallback()], model, trainer_copy.processing_class, None, None
        trainer_copy.callback_handler = CallbackHandler(*handler_args)  # type: ignore[no-untyped-call]
        with TemporaryDirectory() as folder:
            args.output_dir = folder
            trainer_copy.create_accelerator_and_postprocess()
            trainer_copy.train()

    def _best_metric(self) -> str | None:
        """Return the leakage metric by which the Trainer selects its best model; None if none."""
        name = (self.trainer.args.metric_for_best_model or "").removeprefix("eval_")
        return name if name.startswith(("leakage", "monitor/", "gate/")) else None

    def _check(self, *_: str) -> None:
        """Raise an error for a Trainer whose updates cannot be attacked.

        Raises:
            ValueError: The Trainer cannot be watched. The message says why.
        """
        trainer, optim = self.trainer, self.trainer.args.optim
        super()._check(*loop.wrappers_of(trainer, takes_fsdp2=True))
        if loop.steps_in_backward(optim):
            raise ValueError(
                f"LeakageCallback cannot read gradients with optim={optim}, which updates weights "
                "during backward: use another optimizer"
            )
        if sum(isinstance(c, LeakageCallback) for c in trainer.callback_handler.callbacks) > 1:
            raise ValueError(
                "the Trainer has two LeakageCallbacks: use one LeakageCallback with all attacks"
            )

    def _hook_optimizers(self) -> None:
        """Wrap ``training_step``, and hook the optimizers that make the shared gradient inside."""
        trainer = self.trainer
        original = trainer.training_step

        def training_step(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
            self.batch_begins(inputs)
            with loop.before_backward(self._backward_begins):
                return original(model, inputs, *args, **kwargs)

        self._removers.append(override(trainer, "training_step", training_step))
        for optimizer in self.loop.inner_optimizers if self._shares_in_step else ():
            before_step = partial(self.engine.optimizer_steps, optimizer)
            self._removers.append(before_real_step(optimizer, before_step))

    def before_step(self) -> None:
        """Run the attacks on the unscaled gradients, unless the scaler will skip the step."""
        if not self._shares_in_step:
            self.engine.optimizer_steps(self.loop.optimizers[0])
            self._show_gradients()

    @property
    def _shares_in_step(self) -> bool:
        """Whether the shared gradient is made inside the step (DP optimizers, DeepSpeed ZeRO)."""
        return bool(self.run.defenses or self.loop.zero) and self.loop.release is None

    @core.contained
    @torch.no_grad()
    def _show_gradients(self) -> None:
        """Unscale the gradients, and tell the engine that they are ready, if a look is due."""
        scaler, (optimizer,) = self.run.scaler, self.loop.optimizers
        if self._look is None:
            return  # checked first, because reading found_inf waits for the device
        if scaler is not None and scaler.is_enabled():
            state = scaler._per_optimizer_states[id(optimizer)]
            if state["stage"] is OptState.READY:  # the Trainer unscales only to clip
                scaler.unscale_(optimizer)
            if any(map(bool, state["found_inf_per_device"].values())):
                return
        if self.loop.stage_reached is not None:
            self.loop.stage_reached(Stage.AGGREGATE, optimizer)

    def batch_ends(self) -> None:
        """End a batch, and log a look whose optimizer step is over."""
        self.loop.steps = int(self.trainer.state.global_step)
        self.engine.batch_ends(trained=True)
        self._flush()

    def end(self, error: type[BaseException] | None = None) -> None:
        """End the run, and log its last values; see :meth:`Watch.end`."""
        self._is_ending = True
        super().end(error)
        self._flush()

    @core.contained
    def note(self, metrics: Mapping[str, float]) -> None:
        """Log the Trainer's metrics next to the leakage metrics."""
        self.utility.update(metrics)
        self._log_utility()

    @core.contained
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Collect values until :meth:`_flush`, except metrics that the Trainer logs itself."""
        if not all(name.startswith("utility/") for name in metrics):
            self._unlogged.update(metrics)

    def log_hyperparams(self, settings: Mapping[str, Any]) -> None:
        """Send the settings to W&B if the Trainer reports to it.

        In the summary of its run W&B then keeps the highest value of each family of attacks.
        """
        worst = [f"train/{core.WORST}/{family}" for family in self.engine.results.families]
        for run in self._callback_attributes("_wandb", "run"):
            run.config.update(dict(settings), allow_val_change=True)
            keep_highest(run, worst, step="train/global_step")

    def upload_report(self, page: Path) -> None:
        """Upload the report to the runs of W&B and MLflow that the Trainer reports to."""
        for run in self._callback_attributes("_wandb", "run"):
            upload_to_wandb(run, page)
        for mlflow in self._callback_attributes("_ml_flow"):  # MLflow's run may have ended already
            run = mlflow.last_active_run()
            mlflow.MlflowClient().log_artifact(run.info.run_id, str(page))

    def _callback_attributes(self, *names: str) -> list[Any]:
        """Follow a chain of attribute names from each callback; return the values that exist."""
        values: list[Any] = list(self.trainer.callback_handler.callbacks)
        for name in names:
            values = [getattr(value, name, None) for value in values]
        return [value for value in values if value is not None]

    def _flush(self) -> None:
        """Log the collected values, and leave ``control.should_log`` as it was."""
        values, self._unlogged = self._unlogged, {}
        if values:
            should_log = self.trainer.control.should_log
            # Not the `log` of a subclass, which may also log and reset its own running means.
            transformers.Trainer.log(self.trainer, values)
            self.trainer.control.should_log = should_log

    def _log_to(self, run: loop.LoopRun) -> list[Any]:
        """Return the loggers of :class:`Watch`, and on the first process also this object."""
        return [*super()._log_to(run), *([self] if run.rank == 0 else [])]

    def _save(self, gate: core.Threshold, name: str) -> Path | None:
        """Make the Trainer save a checkpoint after this step, and return its path.

        None is returned if the run is ending, or the gate raises an error: nothing is saved then.
        """
        if self._is_ending or gate.action == "raise":
            return None
        self.trainer.control.should_save = True
        return self._checkpoint()

    def _checkpoint(self) -> Path:
        """Return the folder of the checkpoint of the current step."""
        step = self.trainer.state.global_step
        return Path(str(self.trainer.args.output_dir)) / f"checkpoint-{step}"

    def _stop(self) -> None:
        """Stop the Trainer after this step, because a gate stops the run."""
        super()._stop()
        self.trainer.control.should_training_stop = True

    def _training_facts(self, run: loop.LoopRun) -> dict[str, object]:
        """Return how the model is trained, for the record of the run."""
        args, zero = self.trainer.args, self.loop.zero
        suffix = " under DDP" if run.under_ddp else ""
        suffix = f" under {self.loop.sharded_by}" if run.is_sharded else suffix
        return super()._training_facts(run) | {
            "strategy": f"{type(self.trainer).__name__}{suffix}",
            "max_steps": self.trainer.state.max_steps,
            "max_epochs": self.trainer.state.num_train_epochs,
            "accumulate_grad_batches": args.gradient_accumulation_steps,
            "gradient_clip_val": args.max_grad_norm if zero is None else zero.clip_norm,
            "seed": str(args.seed),
        }

    def choices(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return the values that select a checkpoint, to be added to an evaluation's metrics.

        A leakage metric is infinity if it is unknown, or measured on weights that have changed
        since.

        Args:
            metrics: The metrics of the evaluation.
        """
        values: dict[str, float] = {}
        loss, best = metrics.get("eval_loss"), self._best_metric()
        if loss is not None and self._on_weights:
            values[core.CHOOSE] = max(gate.choice(loss) for gate in self._on_weights)
        if best is not None and best != core.CHOOSE:
            weights, step = self.engine.weights, self.engine.run.step
            is_stale = (
                self.engine.results.repeats_texts(best) and weights and weights.looked_at != step
            )
            value = math.nan if is_stale else self.latest.get(best, math.nan)
            values[best] = self.engine.run.broadcast(math.inf if math.isnan(value) else value)
        return {f"eval_{name}": value for name, value in values.items()}

    def save_state(self) -> None:
        """Write the state that a resumed run loads into the newest checkpoint."""
        folder = self._checkpoint()
        if self.engine.fit is not None and self.engine.run.rank == 0 and folder.is_dir():
            save_state(folder / FILE, self.state_dict())
