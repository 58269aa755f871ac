"""A run, whoever trains, and one look at a step of it."""

from __future__ import annotations

import math
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial, wraps
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar, Concatenate, Literal, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_fedleak.attacks import Capability, UnusableObservation
from lightning_fedleak.defenses import Defense, DefenseContext, DefenseError
from lightning_fedleak.defenses.dp_optimizers import OptimizerDP
from lightning_fedleak.engine.outcomes import Control, Series
from lightning_fedleak.model.anatomy import Anatomy, mixed_precision
from lightning_fedleak.model.batches import BatchError
from lightning_fedleak.model.model_state import WeightsWritten
from lightning_fedleak.model.snapshots import ON_THE_WAY, Stage, check_finite, is_shard
from lightning_fedleak.model.taps import ChangedInPlace, Step, UpdateError, before_real_step

AUTOCAST = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}

StageReached = Callable[[Stage, Optimizer], None]
"""Takes the stage at which ``p.grad`` is what the optimizer is about to step with."""
BeforeDefense = Callable[[Defense, Sequence[nn.Parameter], DefenseContext], None]
"""Takes what a defence is about to get."""

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Run(ABC):
    """One run, as channels and attacks know it. What never changes in it are fields.

    Attributes:
        anatomy: the model's parts.
        client: ``"rank"`` (each process is a client) or ``"world"`` (all are one).
        assumed: what the adversary has besides what it sees.
        device: of the model.
        precision: spelled as the Trainer spells it.
        rank: number of this process.
        processes: how many there are.
        tokenizers: that the run uses; some may be None.
        defenses: of the run, in their order.
        watched: names of values that something besides gates stops or chooses by.
        under_ddp: all trained parameters' gradients are shared, whatever optimizers own.
        separates_stages: a defended run shows local and shared gradients as ``p.grad``.
        clip_value: size that entries of gradients are cut to before they are shared; None: not
            known.
        shows_progress: bars are shown while attacks are calibrated.
        gradient_of: returns what a parameter's next step is taken with.
        casts: as :attr:`policies`, where it is not FSDP2 that casts.
        spent: seconds of each attack in looks that are not written yet.
        longest: seconds of the longest run of each attack in the newest look.
        watcher: the class that watches the run, for messages.
        unit: what :attr:`step` counts.
        uncounted_step: the message where an optimizer stepped and :attr:`step` did not change.
        rollouts: :class:`~lightning_fedleak.trainers.rollouts.Rollouts` of an RL; None elsewhere.
    """

    watcher: ClassVar[str] = "LeakageMonitor"
    unit: ClassVar[Literal["step", "round"]] = "step"
    uncounted_step: ClassVar[str] = "an optimizer stepped, and the run's step is what it was"
    rollouts: ClassVar[Any] = None

    anatomy: Anatomy
    client: str
    assumed: frozenset[Capability]
    device: torch.device
    precision: str
    rank: int = 0
    processes: int = 1
    tokenizers: Sequence[Any] = ()
    defenses: tuple[Defense, ...] = ()
    watched: tuple[str, ...] = ()
    under_ddp: bool = False
    separates_stages: bool = False
    clip_value: float | None = None
    shows_progress: bool = False
    gradient_of: Callable[[nn.Parameter], Tensor | None] = attrgetter("grad")
    casts: Mapping[int, Any] = field(default_factory=dict)
    spent: dict[str, float] = field(default_factory=dict)
    longest: dict[str, float] = field(default_factory=dict)

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

    @property
    @abstractmethod
    def optimizers(self) -> Sequence[Optimizer]:
        """Return the optimizers of the run that take the steps, see ``real_optimizer``."""

    def forward_context(self) -> AbstractContextManager[Any]:
        """Return the context in which the client runs its model: autocast if precision is mixed."""
        dtype = AUTOCAST.get(self.precision)
        return nullcontext() if dtype is None else torch.autocast(self.device.type, dtype)

    @property
    def step(self) -> int:
        """Return the number of optimizer steps, or of rounds, that are over."""
        return 0

    @property
    def optimizer_step(self) -> int:
        """Return the number of optimizer steps so far, as attacks count them."""
        return self.step

    @property
    def training_loader(self) -> object:
        """Return the loader of the training data, whose rows are read again; None: not known."""
        return None

    @property
    def progress(self) -> tuple[int, float] | None:
        """Return the epoch, counted from 0, and the share of its batches that is done, up to 1."""
        return None

    @property
    def epochs(self) -> int | None:
        """Return the number of epochs that the run is to have; None where it is not known."""
        return None

    @property
    def planned_steps(self) -> int | None:
        """Return the number of steps at whose end the run ends; None where it is not known."""
        return None

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
        """Return the relative error that such a policy leaves in an entry of a gradient.

        Each rounding is evenly up to half an epsilon. One is where the gradient is computed. Adding
        n terms one after the other rounds n - 1 partial sums, and that of k independent terms has
        the share k/n of the whole sum's variance. Each process adds what it accumulates, and the
        reduction adds the processes.

        Args:
            accumulated: micro-batches of the gradient.
        """
        policies = self.policies.values()
        computed = [torch.finfo(p.param_dtype).eps for p in policies if p.param_dtype]
        dtypes = [p.reduce_dtype or p.param_dtype for p in policies]
        reduced = [torch.finfo(dtype).eps for dtype in dtypes if dtype]
        once, each = max([*computed, *reduced], default=0.0), max(reduced, default=0.0)
        # The sum of k/n over k from 2 to n.
        partial_sums = sum((n + 1) / 2 - 1 / n for n in (max(1, accumulated), self.processes))
        return math.hypot(once, each * math.sqrt(partial_sums)) / math.sqrt(12)

    @property
    def number(self) -> int:
        """Return the number of this process's client."""
        return self.rank if self.client == "rank" else 0

    @property
    def temperature(self) -> float:
        """Return what the run's loss divides logits by, where it never calls the output head."""
        return 1.0

    @property
    def loss_scale(self) -> float:
        """Return the loss scale in gradients that no GradScaler has unscaled."""
        return 1.0

    def broadcast(self, value: T) -> T:
        """Return the first process's value on every process."""
        return value

    def summed(self, value: Tensor) -> Tensor:
        """Return the sum over processes."""
        return value

    def reduced(self, role: str, gradient: Tensor) -> Tensor:
        """Return the mean of a parameter's gradient over processes, in its policy's dtypes."""
        parameter = self.anatomy.parameter(role)
        assert parameter is not None
        if hasattr(parameter, "full_tensor"):  # FSDP2 has reduced it
            return gradient
        if (policy := self.policies.get(id(parameter))) is not None:
            gradient = gradient.to(policy.reduce_dtype or policy.param_dtype or parameter.dtype)
        return (self.summed(gradient) / self.processes).to(parameter.dtype)

    def on_any_process(self, value: bool) -> bool:
        """Return whether the value is true on at least one process."""
        return value

    def fit_copy(self, model: nn.Module, rows: Any) -> None:
        """Train a copy of the model in place on other rows, by the run's own recipe.

        It passes over the rows as often as the run does over its own, and leaves no file behind.

        Args:
            model: the copy of ``anatomy.root``.
            rows: the data set.

        Raises:
            ValueError: by default, since nobody but the user knows the recipe.
        """
        raise ValueError(
            "Memorization(reference='auto'): only your loop knows its recipe: give "
            "reference=lambda rows: train(make_model(), rows), a function that trains a new model "
            "on these rows as the loop does, and returns it"
        )

    def metrics(self, names: Sequence[str] | None) -> Mapping[str, Any]:
        """Return those of the user's own metrics that are known by now, by name; None: all.

        They are numbers, or tensors of one, which are the same objects until they change.
        """
        return {}

    def publish(self, values: Mapping[str, float]) -> None:  # noqa: B027
        """Put values of leakage beside the user's own metrics."""

    def watch_release(
        self, stage_reached: StageReached, before_defense: BeforeDefense
    ) -> list[Callable[[], None]]:
        """Call ``stage_reached`` while ``p.grad`` is what an optimizer is about to step with.

        Without defences on gradients that is all stages at once: ``Stage.AGGREGATE`` is reported.
        A run whose defences act between the stages overrides this, and calls
        ``before_defense(defense, parameters, context)`` right before each of them.

        Args:
            stage_reached: takes the stage and the optimizer.
            before_defense: takes what the defence is about to get.

        Returns:
            Functions that end it.
        """
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
        """Return what a DP optimizer of another library declares that steps by this one."""
        dps = (d for d in self.defenses if isinstance(d, OptimizerDP))
        return next((dp for dp in dps if dp.inner is optimizer), None)

    def _watch_dp(
        self, dp: OptimizerDP, stage_reached: StageReached, before_defense: BeforeDefense
    ) -> list[Callable[[], None]]:
        """Call the functions inside of a DP optimizer's step, see :meth:`watch_release`."""
        alone = self.client == "rank" or not dp.reduces  # a client shares what it has prepared
        parameters = [p for g in dp.inner.param_groups for p in g["params"] if p.requires_grad]

        def defended() -> None:
            ranks = self.processes if self.client == "rank" else 1
            context = DefenseContext(
                self.anatomy.root, self.number, ranks, self.device, self.precision, self.step, b""
            )
            before_defense(dp, parameters, context)

        def prepared() -> None:
            stage_reached(Stage.LOCAL, dp.inner)
            defended()
            if alone:
                stage_reached(Stage.SHARED, dp.inner)

        def reduced() -> None:
            if dp.reduces:
                defended()
            for stage in (Stage.AGGREGATE,) if alone else (Stage.SHARED, Stage.AGGREGATE):
                stage_reached(stage, dp.inner)

        return dp.watch(prepared, reduced)

    def why_hidden(self, stages: Iterable[Stage], optimizer: Optimizer | None) -> str | None:
        """Return why the gradient at one of these stages cannot be read; None where it can."""
        dp = self._dp_of(optimizer)
        whys = (None if dp is None else dp.why_hidden(stage) for stage in stages)
        return next((why for why in whys if why is not None), None)


# ---- a look ---------------------------------------------------------------------------------


@dataclass
class Look:
    """One look: the step that it is of, and what its attacks have answered so far.

    Attributes:
        step: optimizer step looked at.
        training_step: that step's calls, labels and gradients.
        stages: at all of which the gradient is what it is now.
        wanted: those of them that are measured.
        optimizer: that is about to step; None: all that the round's update is of.
        controls: the control of each attack, by name, as far as this look has one.
        answers: what an attack answered in a series, or why it has no answer (yet).
        stepped: ids of the optimizers that were really about to step (none: nothing was shared).
        seconds: time spent so far.
        control_seconds: of that, for controls.
        step_seconds: time that the step itself took so far; 0 until it is known.
        followed: the attacks have followed the model at this look.
        notes: functions that write what was recovered to local files, under a title.
        work: what attacks share with each other until an optimizer steps.
        scope: the series that are tried again, where the look is of these alone; None: all.
        next_look: step of the next look, once it is planned; None for a look at the weights.
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
    started: float = field(default_factory=lambda: time.perf_counter())
    step_seconds: float = 0.0
    followed: bool = False
    notes: dict[Series, Callable[[Any, str], object]] = field(default_factory=dict)
    controls: dict[str, Control] = field(default_factory=dict)
    work: dict[Hashable, Any] = field(default_factory=dict)
    scope: frozenset[Series] | None = None
    next_look: int | None = None

    def steps_with(self, optimizer: Optimizer | None) -> bool:
        """Return whether what an optimizer steps is read now; None: what the server adds itself."""
        return self.optimizer is None or optimizer in (None, self.optimizer)

    @contextmanager
    def clock(self, device: torch.device, *, is_control: bool = False) -> Iterator[None]:
        """Add the time of a block; wait for a GPU before and after, as looks may.

        That of a control is a part of a block around it, which adds it to the look's seconds.
        """
        wait = torch.cuda.synchronize if device.type == "cuda" else lambda _: None
        wait(device)
        start = time.perf_counter()
        try:
            yield
        finally:
            wait(device)
            seconds = time.perf_counter() - start
            if is_control:
                self.control_seconds += seconds
            else:
                self.seconds += seconds


# ---- why there is no result ------------------------------------------------------------------


class NoTargets(ValueError):
    """The batch holds no sentence that could be asked for."""


class Refusal(Exception):
    """Holds an error that ends the run all the same: of the set-up, or of the user's own code.

    Args:
        error: the error that the user sees.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


_P = ParamSpec("_P")
_R = TypeVar("_R")


def contained(
    method: Callable[Concatenate[Any, _P], _R],
) -> Callable[Concatenate[Any, _P], _R | None]:
    """Return a method that ends no training: what it raises its object's ``fail`` gets.

    It returns None then. A :class:`Refusal` is raised as the error that it holds.
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


def reason(error: Exception) -> str:
    """Return why there is no result, for logs: the error's kind, and its message or its place.

    Only words written here are repeated: another error's may quote the private batch. So may a
    ``DefenseError`` of a defence of the user's own, or one that repeats another error.
    """
    kind = type(error).__name__
    if isinstance(error, _OWN_ERRORS):
        return f"{kind}: {error}"
    frames = traceback.extract_tb(error.__traceback__)
    callers = [one for one in frames if Path(one.filename).name != "validate.py"]
    place = [one for one in callers if one.name != check_finite.__name__][-1]
    path = Path(place.filename)
    internal = path.is_relative_to(_PACKAGE) and error.__cause__ is None
    if isinstance(error, DefenseError) and internal:
        return f"{kind}: {error}"
    return f"{kind} at {path.name}:{place.lineno}"
