"""A run of any training loop (:class:`Run`), and one look at it (:class:`Look`).

A *look* is one measurement at an optimizer step or of the trained weights. At a step the attacks
read gradients at *stages*: ``local`` before the client's defences, ``shared`` as it sends them,
``aggregate`` after the reduction over clients. A *series* is the results of one attack at one
stage.
"""

import math
import signal
import time
import traceback
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass, field
from functools import partial, wraps
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any, Concatenate, Literal, ParamSpec, Self, TypeVar

import torch
from torch import Tensor, distributed, nn
from torch.optim import Optimizer

from lightning_fedleak.attacks import Capability, UnusableObservation
from lightning_fedleak.defenses import Defense, DefenseContext, DefenseError
from lightning_fedleak.defenses.dp_optimizers import OptimizerDP
from lightning_fedleak.engine.outcomes import Control, Series
from lightning_fedleak.messages import rank_zero_info
from lightning_fedleak.model.anatomy import Anatomy, mixed_precision
from lightning_fedleak.model.batches import BatchError
from lightning_fedleak.model.model_state import WeightsWritten, calls_of, describe, is_within
from lightning_fedleak.model.snapshots import ON_THE_WAY, Stage, is_shard
from lightning_fedleak.model.taps import ChangedInPlace, Step, UpdateError, before_real_step
from lightning_fedleak.progress import Stopwatch

# The dtype of autocast, by the precision of a run.
AUTOCAST = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}

StageReached = Callable[[Stage, Optimizer], None]
"""A function of a stage and an optimizer, called when ``p.grad`` is the gradient at the stage."""
BeforeDefense = Callable[[Defense, Sequence[nn.Parameter], DefenseContext], None]
"""A function of a defence, the parameters that it acts on next, and its context."""

T = TypeVar("T")


class Run:
    """The facts of one run that channels and attacks use, for any training loop: one table.

    The values below are those of a run in one process that knows no more than its model. Each
    integration has a subclass: it sets the facts that do not change during the run, and reads the
    others from its training loop.

    Args:
        anatomy: The parts of the model.
        client: ``"rank"`` if each process is a client, ``"world"`` if all are one.
        assumed: The capabilities of the adversary besides what it sees.

    Attributes:
        anatomy, client, assumed: The arguments.
        device: The device of the model.
        watcher: The name of the class that watches the run, for messages.
        unit: The unit of ``step``.
        uncounted_step: The message if an optimizer stepped and ``step`` did not change.
        precision: The precision, in the spelling of Lightning's Trainer.
        rank: The number of this process.
        processes: The number of processes.
        optimizers: The optimizers whose ``step`` changes the weights, see ``real_optimizer``.
        step: The number of optimizer steps, or of rounds, that are over.
        local_steps: The number of optimizer steps in a round.
        training_loader: The loader of the training data, whose rows are read again; None: not
            known.
        progress: The epoch, counted from 0, and the share of its batches that is done, up to 1;
            None where it is not known.
        epochs: The number of epochs that the run is to have; None where it is not known.
        planned_steps: The number of steps at whose end the run ends; None where it is not known.
        tokenizers: The tokenizers that the run uses; some may be None.
        rollouts: The :class:`~lightning_fedleak.trainers.rollouts.Rollouts` of reinforcement
            learning; None for other training.
        temperature: The divisor of the logits in a loss that does not call the output head.
        utility: The user's metrics that are known by now, by name, and what was published: numbers
            or tensors of one, each the same object until it changes.
        watched: The names of values that something besides gates stops or chooses by.
        defenses: The defences, in the order in which they act.
        release: What calls functions where the defences act, by ``add_tap`` and ``add_canaries``;
            None without one.
        separates_stages: Whether a defended run shows first the local and then the shared gradient
            as ``p.grad``.
        under_ddp: Whether all trained parameters' gradients are shared, also those that no
            optimizer has.
        clip_value: The absolute value to which entries of gradients are clipped before they are
            shared; None if it is not known.
        scaler: The GradScaler whose scale gradients have before it unscales them; None without one.
        gradient_of: Returns the gradient of a parameter's next step.
        casts: The :attr:`policies` of a run in which something other than FSDP2 casts.
        shows_progress: Whether a progress bar is shown while attacks are calibrated.
        spent: The seconds of each attack in looks whose results are not written yet.
        longest: The seconds of the longest run of each attack in the newest look.
    """

    watcher: str = "LeakageMonitor"
    unit: Literal["step", "round"] = "step"
    uncounted_step: str = "an optimizer stepped, and the run's step is what it was"
    precision: str = "32-true"
    rank: int = 0
    processes: int = 1
    optimizers: Sequence[Optimizer] = ()
    step: int = 0
    local_steps: int = 1
    training_loader: Any = None
    progress: tuple[int, float] | None = None
    epochs: int | None = None
    planned_steps: int | None = None
    tokenizers: Sequence[Any] = ()
    rollouts: Any = None
    temperature: float = 1.0
    utility: Mapping[str, Any] = MappingProxyType({})
    watched: tuple[str, ...] = ()
    defenses: tuple[Defense, ...] = ()
    release: Any = None
    separates_stages: bool = False
    under_ddp: bool = False
    clip_value: float | None = None
    scaler: Any = None
    gradient_of: Callable[[nn.Parameter], Tensor | None] = attrgetter("grad")
    casts: Mapping[int, Any] = MappingProxyType({})
    shows_progress: bool = False

    def __init__(self, anatomy: Anatomy, client: str, assumed: frozenset[Capability]) -> None:
        self.anatomy, self.client, self.assumed = anatomy, client, assumed
        self.device = anatomy.device
        self.spent: dict[str, float] = {}
        self.longest: dict[str, float] = {}

    def altered(self, **facts: Any) -> Self:
        """Return a copy of this run in which some facts are others."""
        run = copy(self)
        vars(run).update(facts)
        return run

    @contextmanager
    def timed(self, attack: str) -> Iterator[None]:
        """Add the seconds of a block to those of an attack, by its name."""
        block = Look(self.step)
        try:
            with block.clock(self.device):
                yield
        finally:
            self.spent[attack] = self.spent.get(attack, 0.0) + block.seconds
            self.longest[attack] = max(self.longest.get(attack, 0.0), block.seconds)

    def forward_context(self) -> AbstractContextManager[Any]:
        """Return the context in which the client runs its model: autocast if precision is mixed."""
        dtype = AUTOCAST.get(self.precision)
        return nullcontext() if dtype is None else torch.autocast(self.device.type, dtype)

    @property
    def is_sharded(self) -> bool:
        """Return whether each process holds a part of every layer."""
        return any(map(is_shard, self.anatomy.root.parameters()))

    @property
    def policies(self) -> Mapping[int, Any]:
        """Return the MixedPrecisionPolicy of each parameter that has one, by the ``id`` of it."""
        return self.casts or mixed_precision(self.anatomy.root)

    @property
    def policy_text(self) -> str:
        """Return the policies that cast parameters and gradients; empty without one."""
        casts = {
            f"parameters in {policy.param_dtype}, gradients reduced in "
            f"{policy.reduce_dtype or policy.param_dtype}"
            for policy in self.policies.values()
            if policy.param_dtype or policy.reduce_dtype
        }
        return "; ".join(sorted(casts)).replace("torch.", "").replace("None", "their own dtype")

    def rounding(self, accumulated: int) -> float:
        """Return the standard deviation of the rounding error of a policy, relative to an entry.

        Each rounding error is uniform in plus or minus half an epsilon. The gradient is rounded
        once where it is computed. Adding n terms one after the other rounds n - 1 partial sums, and
        the partial sum of k independent terms has the share k/n of the variance of the sum. First
        each process adds the gradients of its micro-batches, then the reduction adds the processes.

        Args:
            accumulated: The number of micro-batches of the gradient.
        """
        policies = self.policies.values()
        computed = [torch.finfo(p.param_dtype).eps for p in policies if p.param_dtype]
        dtypes = [p.reduce_dtype or p.param_dtype for p in policies]
        reduced = [torch.finfo(dtype).eps for dtype in dtypes if dtype]
        first_eps, sum_eps = max([*computed, *reduced], default=0.0), max(reduced, default=0.0)
        # The sum of k/n over k from 2 to n.
        partial_sums = sum((n + 1) / 2 - 1 / n for n in (max(1, accumulated), self.processes))
        # 12: the variance of a uniform error in plus or minus half an epsilon is eps^2 / 12.
        return math.hypot(first_eps, sum_eps * math.sqrt(partial_sums)) / math.sqrt(12)

    def say(self, sentence: str) -> None:
        """Log a sentence on the first process, after the name of the class that watches."""
        rank_zero_info(f"{self.watcher}: {sentence}")

    @property
    def number(self) -> int:
        """Return the number of this process's client."""
        return self.rank if self.client == "rank" else 0

    @property
    def loss_scale(self) -> float:
        """Return the loss scale in gradients that no GradScaler has unscaled."""
        return 1.0 if self.scaler is None else float(self.scaler.get_scale())

    def broadcast(self, value: T) -> T:
        """Return the first process's value on every process."""
        values = [value]
        if self.processes > 1:
            distributed.broadcast_object_list(values, device=self.device)
        return values[0]

    def summed(self, value: Tensor) -> Tensor:
        """Return the sum of a tensor over processes."""
        if self.processes > 1:
            distributed.all_reduce(value := value.clone())
        return value

    def on_any_process(self, value: bool) -> bool:
        """Return whether the value is true on at least one process."""
        if self.processes == 1:
            return value
        return bool(self.summed(torch.tensor(int(value), device=self.device)))

    def reduced(self, role: str, gradient: Tensor) -> Tensor:
        """Return the mean of a parameter's gradient over processes, in its policy's dtypes."""
        parameter = self.anatomy.parameter(role)
        assert parameter is not None
        if hasattr(parameter, "full_tensor"):  # FSDP2 has reduced it
            return gradient
        if (policy := self.policies.get(id(parameter))) is not None:
            gradient = gradient.to(policy.reduce_dtype or policy.param_dtype or parameter.dtype)
        return (self.summed(gradient) / self.processes).to(parameter.dtype)

    def fit_copy(self, model: nn.Module, rows: Any) -> None:
        """Train a copy of the model in place on other rows, by the run's own recipe.

        The number of epochs is that of the run, and no file is left behind.

        Args:
            model: The copy of ``anatomy.root``.
            rows: The data set.

        Raises:
            ValueError: By default, because only the user knows the recipe.
        """
        raise ValueError(
            "Memorization(reference='auto'): only your loop knows its recipe: give "
            "reference=lambda rows: train(make_model(), rows), a function that trains a new model "
            "on these rows as the loop does, and returns it"
        )

    def publish(self, values: Mapping[str, float]) -> None:
        """Add values of leakage to the metrics of the training loop; by default nothing."""

    def watch_release(
        self, stage_reached: StageReached, before_defense: BeforeDefense
    ) -> list[Callable[[], None]]:
        """Call ``stage_reached`` while ``p.grad`` holds the gradient of a stage, until removed.

        The ``release`` calls both functions, ``before_defense(defense, parameters, context)`` right
        before each defence. Without one all stages see the same gradient, and only
        ``Stage.AGGREGATE`` is reported, right before the optimizer steps.

        Args:
            stage_reached: Takes the stage and the optimizer.
            before_defense: Takes the defence, the parameters and the context.

        Returns:
            Functions that remove the hooks.
        """
        if self.release is not None:
            return [self.release.add_tap(stage_reached), self.release.add_canaries(before_defense)]
        removers = []
        for optimizer in self.optimizers:
            dp = self._dp_of(optimizer)
            if dp is not None:
                removers += self._watch_dp(dp, stage_reached, before_defense)
                continue
            for stage in ON_THE_WAY if self.separates_stages else (Stage.AGGREGATE,):
                reached = partial(stage_reached, stage, optimizer)
                removers.append(before_real_step(optimizer, reached))
        return removers

    def _dp_of(self, optimizer: Optimizer | None) -> OptimizerDP | None:
        """Return the declaration of the DP optimizer that wraps this one; None if none does."""
        dps = (d for d in self.defenses if isinstance(d, OptimizerDP))
        return next((dp for dp in dps if dp.inner is optimizer), None)

    def _watch_dp(
        self, dp: OptimizerDP, stage_reached: StageReached, before_defense: BeforeDefense
    ) -> list[Callable[[], None]]:
        """Call the functions inside of a DP optimizer's step, see :meth:`watch_release`."""
        # Whether the shared gradient exists before the reduction over processes.
        is_local = self.client == "rank" or not dp.reduces
        parameters = [p for g in dp.inner.param_groups for p in g["params"] if p.requires_grad]

        def announce_defense() -> None:
            ranks = self.processes if self.client == "rank" else 1
            # b"": no entropy, because the optimizer draws the noise itself.
            context = DefenseContext(
                self.anatomy.root, self.number, ranks, self.device, self.precision, self.step, b""
            )
            before_defense(dp, parameters, context)

        def act_on_local_gradient() -> None:
            stage_reached(Stage.LOCAL, dp.inner)
            announce_defense()
            if is_local:
                stage_reached(Stage.SHARED, dp.inner)

        def act_on_reduced() -> None:
            if dp.reduces:
                announce_defense()
            for stage in (Stage.AGGREGATE,) if is_local else (Stage.SHARED, Stage.AGGREGATE):
                stage_reached(stage, dp.inner)

        return dp.watch(act_on_local_gradient, act_on_reduced)

    def why_hidden(self, stages: Iterable[Stage], optimizer: Optimizer | None) -> str | None:
        """Return why the gradient at one of these stages cannot be read; None if it can."""
        dp = self._dp_of(optimizer)
        whys = (None if dp is None else dp.why_hidden(stage) for stage in stages)
        return next((why for why in whys if why is not None), None)


# ---- a look ---------------------------------------------------------------------------------


@dataclass
class Look:
    """One look: the step that it is at, and the answers of its attacks so far.

    Attributes:
        step: The optimizer step of the look.
        training_step: The calls, labels and gradients of that step.
        stages: The stages at which the gradient is the same as now.
        wanted: The stages among them that are measured.
        optimizer: The optimizer that is about to step; None for a round's update, which is of all.
        answers: The guess of an attack in a series, or why there is none (yet).
        stepped: The ids of the optimizers that were about to step; empty if nothing was shared.
        seconds: The duration of the look so far.
        control_seconds: The part of these seconds that controls took.
        stopwatch: The time since the look began.
        step_seconds: The duration of the step without the look; 0 until it is known.
        followed: Whether the attacks have been adapted to the weights of this look.
        notes: Functions that write the recovered words or texts to local files, under a title.
        controls: The control of each attack that has one at this look, by name: its rates on the
            same step with known words.
        work: Intermediate results that attacks share until an optimizer steps.
        scope: The series that are retried, if the look is only for these; None for all.
        next_look: The step of the next look once it is planned; None for a look at the weights.
    """

    step: int
    training_step: Step = field(default_factory=Step)
    stages: tuple[Stage, ...] = ()
    wanted: tuple[Stage, ...] = ()
    optimizer: Optimizer | None = None
    answers: dict[Series, object] = field(default_factory=dict)
    stepped: set[int] = field(default_factory=set)
    seconds: float = 0.0
    control_seconds: float = 0.0
    stopwatch: Stopwatch = field(default_factory=Stopwatch)
    step_seconds: float = 0.0
    followed: bool = False
    notes: dict[Series, Callable[[Any, str], object]] = field(default_factory=dict)
    controls: dict[str, Control] = field(default_factory=dict)
    work: dict[Hashable, Any] = field(default_factory=dict)
    scope: frozenset[Series] | None = None
    next_look: int | None = None

    def steps_with(self, optimizer: Optimizer | None) -> bool:
        """Return whether the present gradients are those of an optimizer.

        Args:
            optimizer: The optimizer; None for layers that a server adds, which always count.
        """
        return self.optimizer is None or optimizer in (None, self.optimizer)

    @contextmanager
    def clock(self, device: torch.device, *, is_control: bool = False) -> Iterator[None]:
        """Add the duration of a block to the look's seconds; wait for a GPU before and after.

        Args:
            device: The device that the block uses.
            is_control: Whether to add to the seconds of controls (the same step on known words)
                instead. They run within another block, which adds the same duration to the look's
                seconds.
        """
        wait = torch.cuda.synchronize if device.type == "cuda" else lambda _: None
        wait(device)
        watch = Stopwatch()
        try:
            yield
        finally:
            seconds, start = watch.seconds, time.perf_counter()
            wait(device)
            seconds += time.perf_counter() - start  # here the device works, not the process
            if is_control:
                self.control_seconds += seconds
            else:
                self.seconds += seconds


# ---- why there is no result ------------------------------------------------------------------


class NoTargets(ValueError):
    """No sentence of the batch can be used in a membership game."""


class Refusal(Exception):
    """An error that has to end the run: of the set-up, or of the user's own code.

    Args:
        error: The error that the user sees.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


_P = ParamSpec("_P")
_R = TypeVar("_R")


def contained(
    method: Callable[Concatenate[Any, _P], _R],
) -> Callable[Concatenate[Any, _P], _R | None]:
    """Decorate a method so that its errors end no training.

    An error is passed to ``fail`` of the method's object, and the method returns None. Only a
    :class:`Refusal` is raised, as the error that it holds.
    """

    @wraps(method)
    def run(self: Any, /, *args: _P.args, **kwargs: _P.kwargs) -> _R | None:
        try:
            return method(self, *args, **kwargs)
        except Refusal as refusal:
            raise refusal.error from refusal.error.__cause__
        except Exception as error:
            self.fail(error)
            return None

    return run


# Errors of this package, whose messages hold no private text.
_OWN_ERRORS = (
    UnusableObservation,
    BatchError,
    ChangedInPlace,
    NoTargets,
    UpdateError,
    WeightsWritten,
    torch.OutOfMemoryError,
)
_PACKAGE = Path(__file__).parents[1]


def is_of_signal(error: Exception) -> bool:
    """Return whether an error passed through a function that is registered with ``signal``.

    The user wants it to end the training, or a part of it: a queue's time limit or a pre-emption.
    """
    codes = set()
    for handler in filter(callable, map(signal.getsignal, signal.valid_signals())):
        function = getattr(handler, "func", handler)  # of a partial
        codes.add(getattr(function, "__code__", getattr(type(function).__call__, "__code__", None)))
    return any(frame.f_code in codes for frame, _ in traceback.walk_tb(error.__traceback__))


def reason(error: Exception, *, leaves: bool = True) -> str:
    """Return why there is no result, for logs: a message, or the class of an error and its line.

    Only messages of this package and of torch's own code are repeated, because those of other
    errors may quote the private batch. The same goes for a ``DefenseError`` from a user's defence,
    or with another error as its cause.

    Args:
        error: The error that was caught.
        leaves: Whether an error of a signal's handler is raised again.

    Raises:
        Exception: The error itself, if it is one of a signal's handler.
    """
    if leaves and is_of_signal(error):
        raise error
    if isinstance(error, _OWN_ERRORS):
        return str(error)
    internal = is_within(calls_of(error)[-1], _PACKAGE) and error.__cause__ is None
    return str(error) if isinstance(error, DefenseError) and internal else describe(error)
