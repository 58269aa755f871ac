"""Positive controls: whether an attack that reports a low number works on this step at all.

A low number may mean that little leaks, or that the attack does not work here. A *control*
distinguishes the two: the same step on known text, which is the batch with its tokens shuffled
(:mod:`lightning_fedleak.model.taps.control`). An attack that recovers nothing of it is not working,
and its low number is reported as unknown. The *number* of an attack is its main rate, such as F1.

The order in a look (a measurement at one step), after the attacks have guessed:

1. The attacks whose number needs a control are selected.
2. The step is recomputed with its own tokens. If that fails, the control is unknown. The part of
   the optimizer's gradient that this does not give (weight decay in the loss, a hook of the user's,
   rounding) is the *remainder*. If it is more than half, the batch may be that of another step, and
   the control is unknown too.
3. The gradient of the shuffled step is computed, the remainder is added, and the attacks run on it.
4. An attack that recovers little, of more distinct inputs than it can distinguish, runs on a part
   of the control. If it works there, the batch is too large for it.
5. A low number is unknown if the attack reads more of the step without the remainder: what hides
   from it may not hide from others. Behind declared defences a low number needs a bound on all
   readers besides (:mod:`~lightning_fedleak.engine.channels.hidden`).
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fedleak.defenses.base import copied
from lightning_fedleak.engine.channels.base import Channel, gives_control
from lightning_fedleak.engine.channels.hidden import HiddenWords
from lightning_fedleak.engine.channels.plans import Plan
from lightning_fedleak.engine.channels.remainder import remainder_of
from lightning_fedleak.engine.channels.steps import StepChannel
from lightning_fedleak.engine.outcomes import Control, Series, Unknown, Waiting
from lightning_fedleak.engine.record import accounting
from lightning_fedleak.engine.run import Look, Run, reason
from lightning_fedleak.evaluation.metrics.rates import values_of
from lightning_fedleak.model.anatomy import special_ids, without_peft
from lightning_fedleak.model.model_state import preserve_process
from lightning_fedleak.model.snapshots import GradientSnapshot, Stage, UnusableObservation
from lightning_fedleak.model.taps import (
    Step,
    control_gradient,
    control_update,
    is_uneven,
    shuffle_words,
)
from lightning_fedleak.report.records import default_limit, judge_value

PART = 0.5
"""Share of the inputs that an attack can distinguish, of which a part of a control has as many.

Larger: an attack that works only on few inputs fails on the part, and is unknown. Smaller: an
attack that works on a few words passes for one that the batch is too large for.
"""
MIN_LABELS = 4
"""Labels of the smallest part. An attack that recovers only one of 4 words has an F1 of .4 there.

Fewer: such an attack passes as one that works on smaller batches. More: attacks that can recover
only a few word types are unknown.
"""
MAX_UNEXPLAINED = 0.5
"""Share of a gradient that may be unexplained; above it the batch may be that of another step.

A batch that was not trained on leaves .99 unexplained, an L2 penalty of common sizes .1 to .4.
Higher: numbers count although half of the gradient is of other text. Lower: steps with large
penalties are unknown, although their control contains the penalty and could decide.
"""
FEW_TYPES = 32
"""Distinct words of a batch; with fewer, the lowest of :data:`SHUFFLES` controls counts.

Higher: more steps pay for three controls. Lower: one shuffle, in which an attack may happen to
recover its few words, decides. A rate over 32 words has a standard error of up to .09.
"""
SHUFFLES = 3
MAX_PERIOD = 64
"""Looks with a low number of which one has a control, of an attack that fails on all controls."""
_ELSEWHERE = "the check on known words could not be made on another process"
_NOT_AGAIN = "the step could not be made again: {}"
_DOUBT = (
    "the step made again leaves {:.0%} of the gradient unexplained, so that the words may not be "
    "those of this step: a batch that is not what was trained on (pass "
    "settings=WatchSettings(batch_adapter=...)), or a gradient that was changed after the backward"
)
_UNEVEN = (
    "labels weigh unevenly in the loss: it misses light ones, and they are so few that linear "
    "programs (RLG, Dang et al. 2021) may separate them all"
)
_CHANGED = (
    "it reads more of the same step before its gradient was changed, by {:.1%} and by no declared "
    "defence: what hides from this attack may not hide from others"
)


def _score(channel: StepChannel, plan: Plan, answer: Any, truth: Any) -> dict[str, float]:
    """Return the rates of a guess against the truth, without their intervals."""
    return values_of(channel.rates(channel.trials(plan, answer, truth)))


class Controls:
    """Run the attacks of a fit on positive controls, at the looks that need one.

    Args:
        run: The run.
        series: The channel of each series (the results of one attack at one stage).

    Attributes:
        needs: The value that a control must exceed, by family of attacks (such as words): the
            highest threshold of the family's gates, which stop a run. Families that are absent need
            :func:`default_limit`.
        controlled: The names of the attacks that had a control.
    """

    def __init__(self, run: Run, series: Mapping[Series, StepChannel]) -> None:
        self._run = run
        self._series = series
        self._channels = {key.attack: channel for key, channel in series.items()}
        config = getattr(without_peft(run.anatomy.model), "config", None)
        self._special = special_ids(config, run.tokenizers)
        self.controlled: set[str] = set()
        # Low numbers since an attack's newest control, and after how many it gets the next one.
        self._uncontrolled, self._period = Counter[str](), dict[str, int]()
        self.needs: dict[str, float] = {}
        self._hidden = HiddenWords(
            run, lambda s, roles: self._gradient(s, roles, {}).tensors, self._special
        )
        self._are_joint = run.processes > 1 and (run.client == "world" or run.is_sharded)
        # Under DP the choice of the looks with a control must not depend on the data.
        self._ignores_data = bool(accounting(run.defenses))

    def play(self, look: Look, plans: Sequence[Plan]) -> None:
        """Run the attacks for which a control is due on the control of this step.

        Args:
            look: The look, right before the optimizer steps; the attacks have guessed.
            plans: The plans of the attacks whose gradients are shared.
        """
        names = {series.attack for series in look.scope or self._series}
        # An attack without an optimizer reads no parameter of the model, and always counts.
        stepped = [p for p in plans if p.attack.name in names and look.steps_with(p.optimizer)]
        scored = [plan for plan in stepped if self._is_scored(plan)]
        due = [p for p in scored if self._anywhere(self.may_play(p) and self._is_due(look, p))]
        if not due:
            return
        try:
            self._play(look, due, scored)
        except Exception as error:
            self._fail(look, due, reason(error))

    def _anywhere(self, condition: bool) -> bool:
        """Return whether a condition holds on this process, or on one that computes with it.

        If the processes are one client, or share a sharded model, they compute each gradient
        together, so that all must take the same branch. Otherwise each process decides alone.
        """
        return self._run.on_any_process(condition) if self._are_joint else condition

    def may_play(self, plan: Plan) -> bool:
        """Return whether an attack is given controls."""
        name = plan.attack.name
        return self._is_scored(plan) and gives_control(self._channels[name], name)

    def _is_scored(self, plan: Plan) -> bool:
        """Return whether the words of a step score an attack, and its gradients are shared."""
        channel = self._channels.get(plan.attack.name)
        return channel is not None and plan.exposed and channel.controlled

    def _is_due(self, look: Look, plan: Plan) -> bool:
        """Return whether an attack's number at this look needs a control at this look.

        It does if it is the first of the run, and if it is at most the highest limit of a gate.
        After the first, an attack without a result needs none. One that failed on its last control
        is unknown, and gets the next ones after 2, 4, 8 and more such looks. Under DP every look
        but a retry needs one.
        """
        name, answers = plan.attack.name, self._answers(look, plan)
        if self._ignores_data:
            return name not in self.controlled or look.scope is None
        if name not in self.controlled:  # its control may show that an unknown attack still waits
            return not all(isinstance(answer, Waiting) for answer in answers)
        if all(isinstance(answer, Unknown | Waiting | None) for answer in answers):
            return False
        if self._number(look, plan) > self._limit_of(plan):
            return False
        self._uncontrolled[name] += 1
        return self._uncontrolled[name] >= self._period.get(name, 1)

    def _answers(self, look: Look, plan: Plan) -> list[object]:
        """Return the answers of an attack at the stages of this look; None where it has none."""
        return [look.answers.get(s) for s in self._series if s.attack == plan.attack.name]

    def _number(self, look: Look, plan: Plan) -> float:
        """Return the lowest headline of an attack at the stages of this look; 0 if it has none."""
        channel, missing = self._channels[plan.attack.name], Unknown | Waiting | None
        guesses = [a for a in self._answers(look, plan) if not isinstance(a, missing)]
        try:
            truth = channel.truth(look.training_step)
            rates = [_score(channel, plan, guess, truth) for guess in guesses]
        except Exception:  # the result of the attack states the reason
            return 0.0
        numbers = (values.get(channel.headline, math.nan) for values in rates)
        return min((number for number in numbers if not math.isnan(number)), default=0.0)

    def _play(self, look: Look, plans: Sequence[Plan], scored: Sequence[Plan]) -> None:
        """Recompute the step, and then run the attacks of ``plans`` on its control.

        If too much of the gradient is unexplained, the controls of all ``scored`` attacks, which
        are compared with the text of this step, are unknown.
        """
        step = look.training_step
        controls = self._controls(step)
        roles = tuple(dict.fromkeys(role for plan in plans for role in plan.roles))
        try:
            share, remainder = self._remainder(look, roles)
        except Exception as error:
            share, remainder = 0.0, {}
            self._fail(look, [p for p in scored if p.roles], _NOT_AGAIN.format(reason(error)))
            plans = [plan for plan in plans if not plan.roles]
        if self._anywhere(share > MAX_UNEXPLAINED):
            step.unexplained = share
            self._fail(look, scored, _DOUBT.format(share))
            return
        few = self._has_few_uneven_labels(look, controls[0])
        uneven = [plan for plan in plans if few and plan.attack.for_even_losses]
        if rest := [plan for plan in plans if plan not in uneven]:
            self._run_attacks(look, rest, controls, remainder)
        if self._anywhere(bool(remainder)):
            self._fail(look, self._read_before_change(look, rest), _CHANGED.format(share))
        self._fail(look, uneven, _UNEVEN)

    def _read_before_change(self, look: Look, plans: Sequence[Plan]) -> list[Plan]:
        """Return the attacks whose low number counts, and that read more without the remainder.

        Behind declared noise and replaced tokens a bound decides instead.
        """
        step, controls = look.training_step, look.controls

        def counts(plan: Plan) -> bool:
            control = controls.get(plan.attack.name)
            if control is None or not plan.roles or not math.isnan(control.bound):
                return False
            rings = self._rings(plan, control.part or control.rates)
            now = {self._channels[plan.attack.name].headline: self._number(look, plan)}
            return rings and not self._rings(plan, now, control)

        if self._anywhere(bool(step.written)):
            return []
        low = [plan for plan in plans if self._anywhere(counts(plan))]
        rates = self._rates(look, replace(step, gradients={}), low, {}) if low else {}
        found = ((p, rates[p.attack.name], controls.get(p.attack.name)) for p in low)
        return [
            p for p, before, control in found if self._anywhere(self._rings(p, before, control))
        ]

    def _rings(
        self,
        plan: Plan,
        rates: Mapping[str, float] | Unknown | Waiting,
        control: Control | None = None,
    ) -> bool:
        """Return whether the headline of an attack's rates exceeds its limit, as a gate counts."""
        channel, limit = self._channels[plan.attack.name], self._limit_of(plan)
        rate = rates.get(channel.headline, math.nan) if isinstance(rates, Mapping) else math.nan
        known = None if control is None else control.rates.get(channel.headline)
        return judge_value(rate, known, at_most=limit, chance=channel.leak.chance).value > limit

    def _has_few_uneven_labels(self, look: Look, control: Step) -> bool:
        """Return whether labels weigh unevenly, and are so few that a vector separates each."""
        if not self._anywhere(is_uneven(look.training_step.calls)):
            return False
        few = self._count_labels(control) < self._run.anatomy.hidden_size
        # Noise keeps a vector from separating them.
        return self._anywhere(few and not look.training_step.view(look.stages[-1]).noise_std > 0)

    def _fail(self, look: Look, plans: Sequence[Plan], why: str) -> None:
        """Store an unknown control for attacks, so that their low numbers do not count."""
        for plan in plans:
            self._store(look, plan, Control(self._unknown_rates(plan), why=why))

    def _controls(self, step: Step) -> list[Step]:
        """Return the controls of a step, which have its words in shuffled order.

        If labels weigh unevenly in the loss there are two: in the first the weights stay at their
        positions, in the second they move with the words. If words are few, each is made with
        :data:`SHUFFLES` orders.

        Raises:
            UnusableObservation: The calls of the step are not known, here or on another process.
        """
        failure, uneven, few, controls = step.error, False, False, list[Step]()
        generator = torch.Generator().manual_seed(1_000_003 * step.number + self._run.rank)
        try:
            if not step.calls:
                raise UnusableObservation("the step's calls were not read")
            controls.append(shuffle_words(step, self._special, generator))
            uneven = is_uneven(step.calls)
            types = torch.unique(torch.cat([batch.context_ids() for batch in step.batches]))
            few = len(types) < FEW_TYPES
        except Exception as error:
            failure = failure or reason(error)
        n = len(step.calls)
        n_calls = torch.tensor(n, device=self._run.device)
        if self._are_joint and int(self._run.summed(n_calls)) != n * self._run.processes:
            failure = failure or "processes made different numbers of calls"
        if self._anywhere(failure is not None):
            raise UnusableObservation(failure or _ELSEWHERE)
        moves = [False, True] if self._anywhere(uneven) else [False]
        for with_words in (moves * (SHUFFLES if self._anywhere(few) else 1))[1:]:
            controls.append(shuffle_words(step, self._special, generator, with_words=with_words))
        return controls

    def _remainder(self, look: Look, roles: Sequence[str]) -> tuple[float, dict[str, Tensor]]:
        """Return the unexplained share of gradients or logits, and remainders by role.

        Raises:
            UnusableObservation: The step cannot be recomputed, or its gradient before any defence
                was not recorded.
        """
        step, view = look.training_step, self._before_defenses(look)
        heads = (head for call in step.calls for head in call.read_heads)
        of_logits = max((head.residual.share for head in heads if head.residual), default=0.0)
        if not roles:  # of attacks on hidden states
            return of_logits, {}
        if self._anywhere(view is None) or view is None:
            raise UnusableObservation("its gradient before defences was not recorded")
        if any(defense.activation_layers for defense in self._run.defenses):
            raise UnusableObservation("a defence rewrites hidden states at random")
        if any(defense.acts_on_batches for defense in self._run.defenses):
            if self._anywhere(not step.written):
                raise UnusableObservation("the tokens that a defence wrote were not recorded")
            step = replace(step, calls=step.written)
        again = self._gradient(step, roles, {}).tensors
        gradients = {role: view.tensors[role] for role in roles if role in view.tensors}
        if not any(bool(gradient.any()) for gradient in gradients.values()):
            return of_logits, {}
        share, remainder = remainder_of(gradients, again)
        so_far = look.training_step.unexplained
        look.training_step.unexplained = max(share, 0.0 if math.isnan(so_far) else so_far)
        return max(share, of_logits), remainder

    def _before_defenses(self, look: Look) -> GradientSnapshot | None:
        """Return the gradient of a step or round before any defence; None if not observed."""
        step = look.training_step
        if step.undefended is None and (Stage.LOCAL in look.stages or step.round is not None):
            with suppress(Exception):  # its attacks say why
                view = step.view(look.stages[0])
                return None if step.round and (view.noise_std or view.compression) else view
        return step.undefended

    def _run_attacks(
        self,
        look: Look,
        plans: Sequence[Plan],
        controls: Sequence[Step],
        remainder: Mapping[str, Tensor],
    ) -> None:
        """Run attacks on whole controls, and then those that recover little on a part of one."""
        answers = [self._rates(look, control, plans, remainder) for control in controls]
        for plan in plans:
            control = self._lowest_control(
                look, plan, [rates[plan.attack.name] for rates in answers]
            )
            is_low = False
            if control is not None:
                self._store(look, plan, control)
                is_low = not self._rings(plan, control.rates)
            if self._anywhere(is_low):
                self._run_on_part(look, plan, controls[-1], remainder)

    def _rates(
        self, look: Look, control: Step, plans: Sequence[Plan], remainder: Mapping[str, Tensor]
    ) -> dict[str, Mapping[str, float] | Unknown | Waiting]:
        """Return the rates of attacks on a control, by their names."""
        roles = tuple(dict.fromkeys(role for plan in plans for role in plan.roles))
        control.gradients[Stage.LOCAL] = self._released(
            look.training_step, control, roles, remainder
        )
        rates: dict[str, Mapping[str, float] | Unknown | Waiting] = {}
        for plan in plans:
            name, channel = plan.attack.name, self._channels[plan.attack.name]
            try:
                truth = channel.joined(channel.truth(control))
                answer = channel.control_answer(plan, control)
                is_none = isinstance(answer, Unknown | Waiting)
                rates[name] = answer if is_none else _score(channel, plan, answer, truth)
            except Exception as error:
                rates[name] = Unknown(reason(error))
        return rates

    def _gradient(
        self, step: Step, roles: Sequence[str], remainder: Mapping[str, Tensor]
    ) -> GradientSnapshot:
        """Return the gradient of a recomputed step; the mean over processes if they are one client.

        Args:
            step: The step itself, or a control.
            roles: The roles of the gradients; empty if all attacks read only hidden states.
            remainder: The remainder of each gradient by role, which is added.

        Raises:
            UnusableObservation: The gradient cannot be computed, here or on another process.
        """
        run, why = self._run, _ELSEWHERE
        if not roles:
            return GradientSnapshot(step.number, Stage.LOCAL, {}, client=run.number)
        view: GradientSnapshot | None = None
        again, scale = (run.anatomy, step, roles), run.loss_scale
        try:
            if step.round is None:
                fails = run.on_any_process if run.is_sharded else bool
                view = control_gradient(*again, scale=scale, fails=fails)
            else:
                view = control_update(*again, scale=scale, clip_value=run.clip_value)
        except Exception as error:
            why = reason(error)
        if self._anywhere(view is None) or view is None:
            raise UnusableObservation(why)
        tensors = dict(view.tensors)
        if run.client == "world" and run.processes > 1:
            shared = [role for role in roles if self._anywhere(role in tensors)]
            tensors = {r: run.reduced(r, tensors.get(r, self._zeros(r))) for r in shared}
        for role, residual in remainder.items():
            gradient = tensors.get(role)
            tensors[role] = residual if gradient is None else (gradient + residual).to(gradient)
        rounding = run.rounding(len(step.calls))
        return replace(view, tensors=tensors, client=run.number, rounding=rounding)

    def _released(
        self, step: Step, control: Step, roles: Sequence[str], remainder: Mapping[str, Tensor]
    ) -> GradientSnapshot:
        """Return the gradient of a control after copies of the defences that add no noise.

        Args:
            step: The step, which holds the defences as they were before they acted.
            control: The control.
            roles: The roles of the gradients.
            remainder: The remainder of each gradient by role.
        """
        if not step.acted or not roles:
            return self._gradient(control, roles, remainder)
        anatomy = self._run.anatomy
        names = (*roles, *anatomy.trainable_names())
        view = self._gradient(control, tuple(dict.fromkeys(names)), remainder)
        owners = {id(anatomy.parameter(name)): name for name in reversed(names)}
        parameters = [p for _, acted, _ in step.acted for p in acted]
        before = [p.grad for p in parameters]
        try:
            for p in parameters:
                p.grad = view.tensors.get(owners.get(id(p), ""))
            with preserve_process(), torch.no_grad():  # a defence may draw random numbers
                for defense, acted, context in step.acted:
                    copied(defense).on_gradients(acted, context)
            released = {role: getattr(anatomy.parameter(role), "grad", None) for role in roles}
        finally:
            for p, gradient in zip(parameters, before, strict=True):
                p.grad = gradient
        tensors = {role: gradient for role, gradient in released.items() if gradient is not None}
        return replace(view, tensors=tensors, compression=step.compression)

    def _bound(self, look: Look, plan: Plan) -> float:
        """Return the headline that any reader can have behind the defences of a run.

        It is 1 if nothing bounds it, and NaN if no defence has to be bounded: because there is
        none, because the control went through it, or because it replaces tokens and the attack
        recovers those that it wrote. It is also NaN, of words and whole texts, if this look did
        not make the step again: the words may be those of another one.
        """
        step, channel = look.training_step, self._channels[plan.attack.name]
        if not (plan.roles or channel.plays_games):  # it reads hidden states
            return math.nan
        if any(defense.activation_layers for defense in self._run.defenses):
            return 1.0
        if not (channel.plays_games or step.unexplained <= MAX_UNEXPLAINED):
            return math.nan
        is_written = any(defense.acts_on_batches for defense in self._run.defenses)
        if is_written and step.written:
            written = replace(look, training_step=replace(step, calls=step.written))
            if self._number(written, plan) > self._limit_of(plan):
                return math.nan
        key = "bound", channel.plays_games
        if key not in look.work:
            try:
                look.work[key] = self._bound_of_noise(look, games=channel.plays_games)
            except UnusableObservation:  # the step cannot be made again
                look.work[key] = 1.0
        bound = float(look.work[key])
        return 1.0 if is_written and math.isnan(bound) else bound

    def _bound_of_noise(self, look: Look, *, games: bool) -> float:
        """Return the same for the declared noise on gradients alone; NaN without such noise."""
        step, std = look.training_step, look.training_step.noise_std
        if step.round is not None:
            std = math.inf  # if it cannot be read, or if it is compressed, which no control is
            with suppress(Exception):  # its attacks say why
                view = step.view(look.stages[-1])
                std = view.noise_std if not view.compression else std
        if std == 0 and math.isnan(step.example_norm):
            return math.nan
        return self._hidden.bound(step, std, games=games)

    def _zeros(self, role: str) -> Tensor:
        """Return a gradient of zeros, for a process whose part of a batch has no label."""
        parameter = self._run.anatomy.parameter(role)
        assert parameter is not None
        shape = getattr(parameter, "ds_shape", parameter.shape)  # ZeRO-3: the unsharded shape
        return torch.zeros(shape, dtype=parameter.dtype, device=self._run.device)

    def _lowest_control(
        self, look: Look, plan: Plan, answers: Sequence[Mapping[str, float] | Unknown | Waiting]
    ) -> Control | None:
        """Return the lowest rates over controls; None if the attack still waits for more steps.

        In that case the attack waits in all its series too.
        """
        if waits := next((rates for rates in answers if isinstance(rates, Waiting)), None):
            # An attack that cannot guess yet without defences would guess from noise with them.
            names = [s for s in self._series if s.attack == plan.attack.name]
            look.answers |= dict.fromkeys(names, waits)
            return None
        if failed := next((rates for rates in answers if isinstance(rates, Unknown)), None):
            return Control(self._unknown_rates(plan), why=failed.why)
        scored = [rates for rates in answers if isinstance(rates, Mapping)]
        return Control({name: min(rates[name] for rates in scored) for name in scored[0]})

    def _run_on_part(
        self, look: Look, plan: Plan, whole: Step, remainder: Mapping[str, Tensor]
    ) -> None:
        """Run an attack that recovers little of a whole control on a part of it.

        It does so if the whole has more distinct inputs than the attack can distinguish. Equal
        tokens are one input, unless dropout changes each of them. If the attack works on a part of
        :data:`PART` times as many as it can distinguish, the rates there are stored with its
        control.
        """
        name, channel = plan.attack.name, self._channels[plan.attack.name]
        most = plan.attack.n_distinct(self._run.anatomy)
        inputs = torch.cat([batch.context_ids() for batch in whole.batches])
        training = {key for call in whole.calls for key in call.training}
        dropouts = (m for m in self._run.anatomy.root.modules() if isinstance(m, nn.Dropout))
        if not any(dropout.p > 0 and id(dropout) in training for dropout in dropouts):
            inputs = torch.unique(inputs)
        if not self._anywhere(most is not None and len(inputs) > most):
            return
        share = PART * (most or 0.0) / max(1, len(inputs))
        part = whole.part(max(MIN_LABELS, int(share * self._count_labels(whole))))
        rates = self._rates(look, part, [plan], remainder)[name]
        # A part must exceed the default limit even if a gate has a lower threshold.
        need = max(self.limit(channel), default_limit(channel.leak.chance))
        if isinstance(rates, Mapping) and rates.get(channel.headline, math.nan) > need:
            self._store(look, plan, replace(look.controls[name], part=rates))

    def _count_labels(self, whole: Step) -> int:
        """Return the number of labels of a control; over joint processes, their mean number."""
        shapes = [call.shapes for call in whole.calls if call.shapes is not None]
        counts = torch.stack([(rows[0] != 0).sum() for rows in shapes]).sum()
        return int(self._run.summed(counts) / self._run.processes if self._are_joint else counts)

    def _store(self, look: Look, plan: Plan, control: Control) -> None:
        """Store the control of an attack in the look, and as its newest one."""
        name, channel = plan.attack.name, self._channels[plan.attack.name]
        look.controls[name] = control = replace(
            control, unexplained=look.training_step.unexplained, bound=self._bound(look, plan)
        )
        self.controlled.add(name)
        rate = control.part.get(channel.headline, control.rates.get(channel.headline, math.nan))
        answers, limit = self._answers(look, plan), self._limit_of(plan)
        has_number = any(not isinstance(a, Unknown | Waiting | None) for a in answers)
        fails = has_number and not (rate > limit or control.bound <= limit)
        self._uncontrolled[name] = 0
        self._period[name] = min(2 * self._period.get(name, 1), MAX_PERIOD) if fails else 1

    def _limit_of(self, plan: Plan) -> float:
        """Return the value that a control of an attack must exceed."""
        return self.limit(self._channels[plan.attack.name])

    def limit(self, channel: Channel) -> float:
        """Return the value that a control must exceed for a low number to count."""
        return self.needs.get(channel.family, default_limit(channel.leak.chance))

    def _unknown_rates(self, plan: Plan) -> dict[str, float]:
        """Return NaN for each metric of an attack."""
        return dict.fromkeys(self._channels[plan.attack.name].metrics, math.nan)
