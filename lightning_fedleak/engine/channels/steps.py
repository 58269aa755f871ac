"""Channels whose attacks read what a step shares: gradients, updates, hidden states.

In a look an attack guesses, and its guess is scored as *trials*: a table with a row for each thing
that could be recovered. Rates, intervals and p-values come from such tables alone.
"""

import math
from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from lightning_fedleak.attacks import Attack, Guess, Query, UnusableObservation
from lightning_fedleak.attacks.local_steps import LocalSteps, explain_stale_optimizer
from lightning_fedleak.defenses import Defense, DefenseContext
from lightning_fedleak.engine.channels.base import ENTITY, Channel, family_of, highest, kind_of
from lightning_fedleak.engine.channels.plans import Plan, gradient_plan, no_sum
from lightning_fedleak.engine.options import Options
from lightning_fedleak.engine.outcomes import (
    Found,
    NothingShared,
    Outcome,
    Result,
    Series,
    Unknown,
    Waiting,
    pending,
)
from lightning_fedleak.engine.run import Look, Run, reason
from lightning_fedleak.evaluation.metrics.clustered import lowest_p_value
from lightning_fedleak.evaluation.metrics.rates import Rate, values_of
from lightning_fedleak.model import snapshots
from lightning_fedleak.model.batches import TokenBatch
from lightning_fedleak.model.snapshots import Stage
from lightning_fedleak.model.taps import Step


class StepChannel(Channel):
    """Let the attacks of a family guess from what a step shares, and score the guesses.

    In a look the engine calls :meth:`arm`, :meth:`batch_ends` for each micro-batch but the last,
    then :meth:`at_stages` and :meth:`before_defense` as the gradient passes the defences,
    :meth:`batch_ends` for the last micro-batch, :func:`results_of` and :meth:`disarm`. A subclass
    must define how a guess is scored (:meth:`trials`), and the rates of the trials (:meth:`rates`).

    Attributes:
        plans: The plans of the attacks that give results, in the order of ``attacks``.
        columns: The names of the numbers of a trial.
        width: The largest number of numbers in a table of trials of one look.
        parted: Whether each process holds a part of the result even if all are one client. If not,
            the result of the first process is that of the client.
        plays_games: Whether its attacks on gradients score candidate texts, some of the user's.
        reads_updates: Whether its attacks can read the weight change of several steps.
        reads_states: Whether an attack may read hidden states, or layers that a server adds, and no
            gradients of the client's own parameters.
        no_value: Why such a series has no result yet, with a place for the kind of values.
    """

    columns: ClassVar[tuple[str, ...]]
    width: int
    parted: ClassVar[bool] = False
    plays_games: ClassVar[bool] = False
    reads_updates: ClassVar[bool] = False
    reads_states: ClassVar[bool] = False
    no_value: ClassVar[str] = "no text has a value of kind '{}'"

    def __init__(self, attacks: Sequence[Any], settings: Options) -> None:
        super().__init__(attacks, settings)
        self.plans: tuple[Plan, ...] = ()

    def _check_settings(self) -> None:
        """Refuse settings that do not fit the attacks.

        Raises:
            ValueError: The message says which setting to change.
        """
        sends_updates = self.settings.local_steps is not None
        for attack in self.attacks if sends_updates else ():
            if not self._reads_updates(attack):
                raise ValueError(
                    f"a round sends a weight change, and '{attack.name}' reads what one step sends"
                )

    def _reads_updates(self, attack: Attack) -> bool:
        """Return whether an attack can read the weight change of several steps."""
        return self.reads_updates

    def series(self, attack: Attack, stages: Collection[Stage]) -> list[Series]:
        """Return the series of an attack's results at those of the stages where it has one.

        Each is followed by its series of each kind of values in texts.
        """
        kinds = ("", *(f"{ENTITY}{kind}" for kind in self.entity_kinds))
        return [
            replace(Series.at(stage, attack.name), name=f"{attack.name}{kind}")
            for stage in stages
            if stage != Stage.RELEASED
            for kind in kinds
        ]

    def check(self, attack: Attack) -> None:
        """Try an attack on the model, as far as that is possible before the first step.

        Raises:
            ValueError: The attack does not work on this model.
        """

    # ---- a look -----------------------------------------------------------------------------

    def arm(self) -> None:
        """Start a look."""

    def batch_ends(self, batch: TokenBatch | None) -> None:
        """Take a micro-batch of the look that has ended; None if it trained nothing."""

    def at_stages(self, look: Look) -> None:
        """Let each attack guess at the look's stages. By default attacks read gradients.

        An attack guesses once for all stages at which the gradient is the same now.
        """
        for plan in self.plans if look.wanted else ():
            if not (plan.exposed and plan.roles and look.steps_with(plan.optimizer)):
                continue
            series = [s for s in self.all_series if s.attack == plan.attack.name]
            unanswered = [s for s in series if s.stage in look.wanted and s not in look.answers]
            if unanswered:
                answer = self._guess_from_gradients(plan, look.training_step, look.wanted[0])
                look.answers |= dict.fromkeys(unanswered, answer)

    def _guess_from_gradients(self, plan: Plan, step: Step, stage: Stage) -> object:
        """Return the guess of an attack from a step's gradients, or why it has none (yet)."""
        return guess(plan, step, stage, self.run)

    def before_defense(
        self, defense: Defense, parameters: Sequence[nn.Parameter], context: DefenseContext
    ) -> None:
        """Prepare for a defence that acts on the gradients next."""

    def control_answer(self, plan: Plan, control: Step) -> Any:
        """Return the guess of an attack on a control, or why there is none (yet).

        Args:
            plan: The plan of the attack.
            control: A step of known words, with its gradient at stage ``local``.
        """
        return guess(plan, control, Stage.LOCAL, self.run)

    def disarm(self, look: Look) -> None:
        """End a look, also one that failed, and free its tensors."""

    # ---- trials and their rates -------------------------------------------------------------

    def truth(self, step: Step) -> Any:
        """Return what only this process knows of a step so far. By default it is the step."""
        return step

    def joined(self, truth: Any) -> Any:
        """Return the truth of all processes of a client; None stands for one that is not known.

        Every process must call it. By default the truth of a process counts alone.
        """
        return truth

    def holds_nothing(self, truth: Any) -> bool:
        """Return whether a step with this truth has nothing to leak."""
        return not any(batch.input_ids.numel() for batch in truth.batches)

    @abstractmethod
    def trials(self, plan: Plan, answer: Any, truth: Any, kind: str | None = None) -> Tensor:
        """Return the trials of a guess, (n, columns) float64.

        Args:
            plan: The plan of the attack.
            answer: The guess, from :meth:`at_stages` or :meth:`control_answer`.
            truth: The truth of the step.
            kind: A kind of values in texts, to count only these; None counts all.

        Raises:
            Exception: The guess cannot be scored, and the result is unknown.
        """

    @abstractmethod
    def rates(self, trials: Tensor) -> Mapping[str, Rate]:
        """Return the rates of trials, by name."""

    def accept(self, look: Look, plan: Plan, series: Series, answer: Any, truth: Any) -> None:
        """Take note of a guess of a look before it is scored.

        The method may add to ``look.notes`` a function that writes the recovered words or texts.

        Raises:
            Exception: The guess does not count, and the result is unknown.
        """

    def count(self, trials: Tensor) -> int:
        """Return the number of counted items in trials; by default each trial is one."""
        return len(trials)

    def p_value(self, trials: Tensor) -> float:
        """Return how probably guessing does as well as a client's trials; NaN without a test."""
        return math.nan

    def means(self, tables: Sequence[Tensor]) -> Mapping[str, float]:
        """Return the values of :attr:`extras` from the tables of trials of all clients."""
        return {}

    def pooled(self, series: Series, rows: Mapping[int, Any]) -> Outcome:
        """Return the outcome of the trials of all clients.

        Args:
            series: The series of the results.
            rows: The numbers of the table of trials of each client, by its number; at least one.
        """
        tables, kind = self._tables(rows), kind_of(series)
        trials, names = torch.cat(tables), self.metrics_of(series)
        all_rates, n = self.rates(trials), self.count(trials)
        rates = {name: all_rates[name] for name in names}
        if kind is not None:
            return Outcome(rates, n) if n else pending(self.no_value.format(kind))
        clients = [values_of(self.rates(table)) for table in tables] if len(tables) > 1 else []
        return Outcome(
            rates,
            n,
            worst={
                name: highest([client[name] for client in clients]) for name in names if clients
            },
            extra=self.means(tables),
            p_value=lowest_p_value([self.p_value(table) for table in tables]),
        )

    def _tables(self, rows: Mapping[int, Sequence[float]]) -> list[Tensor]:
        """Return the numbers of clients as tables of trials, (n, columns) each."""
        numbers = (torch.tensor(row, dtype=torch.float64) for row in rows.values())
        return [row.view(-1, len(self.columns)) for row in numbers]


def results_of(channel: StepChannel, look: Look) -> dict[Series, Result]:
    """Return this process's result of each series. Every process must call it at every look."""
    step, truth = look.training_step, None
    try:
        truth = channel.truth(step) if step.error is None else None
    except Exception as error:
        step.error = reason(error)
    truth = channel.joined(truth)
    return {
        series: _result(channel, look, plan, series, truth)
        for plan in channel.plans
        for series in channel.all_series
        if series.attack == plan.attack.name
    }


def _result(channel: StepChannel, look: Look, plan: Plan, series: Series, truth: Any) -> Result:
    """Return this process's result of a series.

    Args:
        channel: The channel of the series.
        look: The look.
        plan: The plan of its attack.
        series: The series.
        truth: The truth of the look's step, of all processes of the client.
    """
    if (failure := look.training_step.error) is not None:
        return Unknown(f"the batch could not be read: {failure}")
    if channel.holds_nothing(truth) or not look.stepped or not plan.exposed:
        return NothingShared()
    answer = look.answers.get(series, Unknown("the attack was not run"))
    if isinstance(answer, Unknown | Waiting):
        return answer
    try:
        channel.accept(look, plan, series, answer, truth)
        trials = channel.trials(plan, answer, truth, kind_of(series))
    except Exception as error:
        return Unknown(reason(error))
    return Found(trials, look.controls.get(plan.attack.name))


def plan_of(channel: StepChannel, attack: Attack) -> Plan:
    """Check an attack against the model and the run as they are now, and return its plan.

    Raises:
        ValueError: The attack cannot read this model.
    """
    if channel.reads_states and not attack.needs(channel.run.anatomy).gradients:
        return Plan(attack, (), True, None)  # no parameters: what it reads is always exposed
    return gradient_plan(attack, channel.run)


def never_read(channel: StepChannel, name: str, *, fresh: bool) -> Unknown | NothingShared | None:
    """Return the answer of an attack that can read no update of a federation; None if it can.

    Args:
        channel: The channel of the attack.
        name: The name of the attack.
        fresh: Whether clients begin each round with a fresh optimizer.
    """
    attack = next(a for a in channel.listed_attacks if a.name == name)
    plan = None
    with suppress(ValueError):
        plan = plan_of(channel, attack)
    if plan is None or not plan.exposed:
        return NothingShared()
    if (why := no_sum(plan)) is not None:
        return Unknown(why, applies=False)
    facts, steps = plan.facts(channel.run, channel.settings.local_steps, 0), None
    if (kind := facts.compression) and kind.method not in attack.reads_compressed:
        return Unknown(snapshots.explain_compression(kind.method), applies=False)
    with suppress(UnusableObservation):  # an unknown optimizer: some attacks read its updates too
        steps = LocalSteps.from_facts(facts)
    try:
        attack.check_updates(facts)
        if steps is not None:
            steps.check_fresh(fresh)
    except UnusableObservation as error:
        return Unknown(str(error), applies=not isinstance(error, snapshots.Inapplicable))
    return None


def guess(
    plan: Plan, step: Step, stage: Stage, run: Run, query: Query | None = None
) -> Guess | Unknown | Waiting:
    """Return the guess of an attack from the gradients of a step, or why it has none (yet)."""
    try:
        view = step.view(stage)
    except snapshots.NotYet as error:
        return Waiting(str(error))
    except Exception as error:
        return Unknown(reason(error))
    if (unreadable := find_unreadable(plan, view)) is not None:
        return unreadable
    try:
        with run.timed(plan.attack.name), torch.no_grad():
            answer = plan.attack.run(snapshots.Observation((view,)), query)
        check_guess(plan.attack, answer, family_of(plan.attack).guesses)
        return answer
    except snapshots.NotYet as error:
        zeros = tuple(role for role in plan.roles if not bool(view.tensors[role].any()))
        return Waiting(str(error), zeros=zeros)
    except Exception as error:
        return Unknown(reason(error), applies=not isinstance(error, snapshots.Inapplicable))


def find_unreadable(plan: Plan, view: snapshots.GradientSnapshot) -> Unknown | None:
    """Return why an attack's method cannot read a view of a step; None if it can."""
    if isinstance(view, snapshots.UpdateSnapshot):
        if (why := no_sum(plan)) is not None:
            return Unknown(why, applies=False)
        groups = plan.optimizer.param_groups if plan.optimizer is not None else ()
        momentum = not plan.attack.reads_adaptive_updates and any(g.get("momentum") for g in groups)
        if momentum and not view.fresh:  # the update has momentum of steps before the round
            return Unknown(explain_stale_optimizer("SGD"))
    if view.compression not in ("", *plan.attack.reads_compressed):
        return Unknown(snapshots.explain_compression(view.compression), applies=False)
    absent = [role for role in plan.roles if role not in view.tensors]
    return Unknown(f"no gradient of {', '.join(absent)} in this step") if absent else None


def check_guess(attack: Attack, answer: object, expected: type[Guess]) -> None:
    """Refuse a return value of an attack's ``run`` that is no guess of its family.

    Raises:
        UnusableObservation: It is none; the message names both classes.
    """
    if not isinstance(answer, expected):
        raise UnusableObservation(
            f"run of attack '{attack.name}' returned a {type(answer).__name__}, and must return a "
            f"{expected.__name__} ({expected.__module__})"
        )
