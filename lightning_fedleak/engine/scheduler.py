"""Decide when to look: the steps of looks, their cost, and the attacks to retry.

A *look* is a measurement at one optimizer step, in which the attacks run. A *series* is the results
of one attack at one stage of the gradient's way. :class:`Cadence` is the rule for the steps of
looks. :class:`Scheduler` applies it in a run, and lets series without a result *yet* retry in the
steps between looks.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum

from lightning_fedleak.engine.outcomes import Series, Waiting
from lightning_fedleak.engine.run import Look, Run
from lightning_fedleak.progress import Stopwatch

CURVE_LOOKS = 10
"""Number of looks of a run by default, evenly spread: enough for a curve; more take longer."""
CURVE_SHARE = 0.05
"""Share of the training time that these looks may take, unless :data:`CURVE_SECONDS` is more."""
CURVE_SECONDS = 30.0
"""Seconds that these looks may take in a short run: a wait that people accept."""
MAX_CURVE_SHARE = 0.25
"""Largest share of the training time for these looks, except for the first look; not tuned."""
OPEN_SHARE = 0.005
"""Share of the training time for looks beyond 30 s, if the length of the run is not known."""


@dataclass
class Cadence:
    """Decide at which optimizer steps the engine looks.

    There are two rules:

    - ``every_n_steps=n``: steps 0, n, 2n, ...
    - A curve (the default): ten looks, evenly spread, the last step among them. They and the set-up
      have to fit into the share ``max_overhead`` of the training time; by default into the larger
      of 5% of that time and 30 s, and into a quarter of it. Otherwise as many looks are made as
      fit, but always the first.

    If the number of steps is not known, looks are made once the steps so far pay for all of them
    with the share ``max_overhead`` of their time. By default there are looks at steps 0, 1, 3, 7,
    ..., or later, so that they take at most 30 s and 0.5% of that time, and a quarter of it.

    The next look is decided at the look before. Under DDP the decision of rank 0 is sent with the
    results of that look, so that no step needs a message of its own.

    Attributes:
        every_n_steps: The interval n; None for a curve.
        max_overhead: The largest cost of a curve, as a share of the training time; None by default.
        next_step: The next step to look at.
        steps: The planned number of steps; None if it is not known.
        first_step: The step at which the run began.
        spent: The seconds that the set-up and the looks have taken.
        last_look: The step and the seconds of the last look.
    """

    every_n_steps: int | None = None
    max_overhead: float | None = None
    next_step: int = 0
    steps: int | None = None
    first_step: int = 0
    spent: float = 0.0
    last_look: tuple[int, float] = (0, 0.0)

    def begin(self, step: int, steps: int | None, set_up_seconds: float = 0.0) -> None:
        """Begin a run.

        Args:
            step: The first step of the run.
            steps: The step at which the run is planned to end; None if it is not known.
            set_up_seconds: The duration of the set-up.
        """
        self.first_step, self.steps, self.spent = step, steps, set_up_seconds
        self.next_step = step

    def due(self, step: int) -> bool:
        """Return whether a look is due at optimizer step ``step``, counted from 0."""
        return step >= self.next_step

    def after_look(self, step: int, look_seconds: float, step_seconds: float) -> int:
        """Return a proposal for the step of the next look.

        Args:
            step: The step of the look that has ended.
            look_seconds: The duration of that look.
            step_seconds: The duration of a step without a look.
        """
        if self.every_n_steps is not None:
            return (step // self.every_n_steps + 1) * self.every_n_steps
        self.spent += look_seconds
        self.last_look = step, look_seconds
        if step_seconds <= 0:
            return step + 1
        if self.steps is not None and step >= self.steps - 1:
            self.steps = None  # a run that goes on beyond its plan has no known end
        affordable = self._affordable_step(step_seconds)
        if self.steps is None:
            return max(affordable, 2 * step + 1 if self.max_overhead is None else step + 1)
        if affordable >= self.steps - 1:  # the remaining seconds are for a look at the last step
            return affordable
        return max(affordable, self._even_step(step))

    def _affordable_step(self, step_seconds: float) -> int:
        """Return the step of the next look for which there are seconds.

        If the length of the run is known, the remaining seconds are spread evenly, and the step is
        beyond the last one if they are too few for a look.
        """
        step, look_seconds = self.last_look
        if self.steps is None:
            needed = self.spent + look_seconds
            if self.max_overhead is None:
                seconds = max((needed - CURVE_SECONDS) / OPEN_SHARE, needed / MAX_CURVE_SHARE)
            else:
                seconds = needed / self.max_overhead
            return self.first_step + math.ceil(seconds / max(step_seconds, 1e-9))
        training = (self.steps - self.first_step) * step_seconds
        seconds = min(max(CURVE_SHARE * training, CURVE_SECONDS), MAX_CURVE_SHARE * training)
        if self.max_overhead is not None:
            seconds = self.max_overhead * training
        looks = (seconds - self.spent) // max(look_seconds, 1e-9)
        return self.steps if looks < 1 else step + math.ceil((self.steps - 1 - step) / looks)

    def _even_step(self, step: int) -> int:
        """Return the first step after ``step`` of the ten evenly spread ones."""
        assert self.steps is not None
        gaps, last = CURVE_LOOKS - 1, self.steps - 1
        return -(-(step * gaps // last + 1) * last // gaps)  # -(-a // b) rounds a / b up

    def after_retry(self, retry_seconds: float, step_seconds: float) -> int:
        """Return a proposal for the step of the next look after attacks were retried.

        Args:
            retry_seconds: The duration of the retry.
            step_seconds: The duration of a step without a look.
        """
        if self.every_n_steps is not None:
            return self.next_step
        self.spent += retry_seconds
        return max(self.next_step, self._affordable_step(step_seconds))

    @property
    def argument(self) -> str:
        """Return the argument that sets this cadence, such as ``every_n_steps=50``."""
        if self.every_n_steps is not None:
            return f"every_n_steps={self.every_n_steps}"
        if self.max_overhead is None:
            return f"{CURVE_LOOKS} looks"
        return f"max_overhead={self.max_overhead:g}"

    def describe(self, look_seconds: float) -> str:
        """Return in a sentence how often the run is measured, as known at its begin.

        Args:
            look_seconds: The estimated duration of a look; 0 if it is not known.
        """
        n, steps, first = self.every_n_steps, self.steps, self.next_step + 1
        if steps is None:
            at = f"one step in {n}" if n else f"steps {first}, {2 * first}, {4 * first} or later"
        else:
            looks, step = 1, self.next_step
            while n is None and step < steps - 1:
                looks, step = looks + 1, self._even_step(step)
            if n is not None:
                looks += max(0, (steps - 1) // n - self.next_step // n)
            elif self.max_overhead is None:
                paid = max(0.0, CURVE_SECONDS - self.spent) // max(look_seconds, 1e-9)
                looks = min(looks, max(2, int(paid)))
            at = f"{'up to ' * (n is None)}{looks:,} of {steps - self.first_step:,} steps"
        cost = f", about {look_seconds:.2g} s each" * bool(look_seconds)
        most = MAX_CURVE_SHARE if self.max_overhead is None else self.max_overhead
        limit = f"; with more than one, the run takes at most {1 + most:.3g} times as long"
        return f"measures {at}{cost}{limit if n is None else ''}"


class Phase(Enum):
    """Where a run is between two optimizer steps."""

    CLEAR = "no gradient has been computed since the last step"
    ACCUMULATING = "gradients of batches add up until the next step"
    STEPPED = "an optimizer stepped, or skipped its step, in the current batch"


class Scheduler:
    """Decide at which steps there is a look and for which series, and measure the cost.

    Args:
        run: The run.
        cadence: The rule for the steps of looks.
        series: The series, in the order of the logs.

    Attributes:
        cadence: The argument.
        phase: The phase of the run between two optimizer steps.
        waiting: The series that are retried in the next step; the engine sets it.
        waits: Why a series had no result when it was last tried.
    """

    def __init__(self, run: Run, cadence: Cadence, series: Collection[Series]) -> None:
        self._run = run
        self.cadence = cadence
        self._series = tuple(series)
        self.phase = Phase.CLEAR
        self.waiting: frozenset[Series] = frozenset()
        self.waits: dict[Series, Waiting] = {}
        self._step_seconds = 0.0  # running mean of steps without a look; 0 if not known
        self._since: tuple[int, Stopwatch] | None = None  # the last step without a look
        self._uncounted_seconds = 0.0  # seconds of looks that the cadence does not know yet

    def due_look(self, step: int, exposed: Collection[str]) -> Look | None:
        """Return the look that begins with a batch of this step; None if none is due.

        No look begins between batches that accumulate into one step, because its ground truth would
        miss the earlier batches.

        Args:
            step: The number of optimizer steps so far.
            exposed: The names of the attacks whose gradients are shared.
        """
        if not self._series:
            return None
        self._step_begins(step)
        if self.phase is Phase.ACCUMULATING:
            return None
        scope: frozenset[Series] | None = None
        if not self.cadence.due(step):
            scope = frozenset(s for s in self.waiting if s.attack in exposed)
            if not scope:
                return None
        look = Look(step, scope=scope)
        if scope is not None:
            skipped = set(self._series) - scope
            look.answers |= dict.fromkeys(skipped, Waiting("not measured in this step"))
        return look

    def _step_begins(self, step: int) -> None:
        """Update the mean step time when a batch begins."""
        if self._since is not None and step > self._since[0]:
            (since, watch), mean = self._since, self._step_seconds
            passed = watch.seconds / (step - since)
            self._step_seconds = passed if mean == 0 else 0.8 * mean + 0.2 * passed
            self._since = None
        self._since = self._since or (step, Stopwatch(self._run.device))

    def still_waits(self, look: Look) -> bool:
        """Return whether the gradients that a retry waits for are still zero, on all processes."""
        # Without a scope it is no retry; without an optimizer the look reads a round.
        if look.scope is None or look.optimizer is None:
            return False
        zeros = [self.waits[s].zeros if s in self.waits else () for s in look.scope]
        # The stage may be none that is measured, and follow one where the attacks have guessed.
        answers = ((look.answers.get(s), self.waits.get(s)) for s in look.scope)
        still = all(zeros) and all(answer in (None, wait) for answer, wait in answers)
        if still and look.wanted:
            still = _are_zero(look, {role for roles in zeros for role in roles})
        still = not self._run.on_any_process(not still)
        for series in look.scope if still else ():
            if series.stage in look.wanted:
                look.answers.setdefault(series, self.waits[series])
        return still

    def optimizer_steps(self) -> None:
        """Note that an optimizer steps, or skips its step, in the current batch."""
        self.phase = Phase.STEPPED

    def batch_ends(self, trained: bool) -> bool:
        """End a batch, and return whether an optimizer stepped, or skipped its step, in it."""
        stepped = self.phase is Phase.STEPPED
        if stepped:
            self.phase = Phase.CLEAR
        elif trained:
            self.phase = Phase.ACCUMULATING
        return stepped

    def next_step(self, look: Look, *, no_result: bool) -> int:
        """Return the proposal of this process for the step of the next look.

        Args:
            look: The finished look.
            no_result: Whether the look gave no result.
        """
        self._since = None  # steps with a look do not count for the mean duration of a step
        step_seconds = self._step_seconds or look.step_seconds
        self._uncounted_seconds += look.seconds
        if look.scope is not None and no_result:
            return self.cadence.next_step
        cost, self._uncounted_seconds = self._uncounted_seconds, 0.0
        if look.scope is None:
            proposed = self.cadence.after_look(look.step, cost, step_seconds)
            return max(proposed, look.step + 1)
        return self.cadence.after_retry(cost, step_seconds)


def _are_zero(look: Look, roles: Collection[str]) -> bool:
    """Return whether the gradients of these roles are available, and are all zero."""
    try:
        tensors = look.training_step.view(look.wanted[0]).tensors
    except Exception:  # the attack that reads them reports the reason
        return False
    return all(role in tensors and not bool(tensors[role].any()) for role in roles)
