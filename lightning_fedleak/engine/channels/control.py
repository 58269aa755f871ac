"""Controls: when a look has one, and what the attacks read of it.

A low number may mean that little leaks, or that the attack does not work here. The control tells
the two apart: it is the same step with known words, which are the batch's own, shuffled
(:mod:`lightning_fedleak.model.taps.control`). An attack that reads nothing there is not working.

Before the control, the step is made again with its own words. The part of the optimizer's gradient
that this does not explain (weight decay in the loss, a hook of the user's) is added to the control,
so that the control went through what the gradient went through. If that part is most of the
gradient, the words that the attacks are scored by may be those of another step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_fedleak.engine.channels.base import Channel, gives_control
from lightning_fedleak.engine.channels.plans import Plan
from lightning_fedleak.engine.outcomes import Control, Series, Unknown, Waiting
from lightning_fedleak.engine.record import accounting
from lightning_fedleak.engine.run import Look, Run, reason
from lightning_fedleak.messages import rank_zero_info
from lightning_fedleak.model.anatomy import special_ids, without_peft
from lightning_fedleak.model.snapshots import GradientSnapshot, Stage, UnusableObservation
from lightning_fedleak.model.taps import (
    Step,
    control_gradient,
    control_update,
    is_uneven,
    shuffle_words,
)
from lightning_fedleak.report.records import default_limit

FALL = 0.9
"""Share of the last control below which a number is controlled again.

Higher: more looks have a control, which costs a training step. Lower: an attack that has lost some
of its sight since is found later.
"""
SMALLER = 4
"""Each part of a batch has this share of the labels of the part before; 2 tries twice as many."""
MIN_LABELS = 4
"""Labels of the smallest part: an attack that names one word of any batch has at most .4 of these.

Fewer: such an attack counts as one that the batch is too large for; more: attacks that can hold but
a few types are unknown.
"""
MAX_MOVE = 0.1
"""Difference of a control from the last one up to which no parts of other sizes are asked.

Larger: fewer gradients are made; smaller: an attack that reads no part is asked about all sizes.
"""
MAX_UNEXPLAINED = 0.5
"""Share of a gradient, left by the step made again, above which its truth may be of another step.

A batch that is not what was trained leaves .99, an L2 penalty of common sizes .1 to .4. Higher:
numbers scored against a half of other words count; lower: steps with large penalties are unknown
where the control alone, which has the penalty in it, would decide.
"""
ROUNDING = {torch.float16: 2e-3, torch.bfloat16: 1e-2}
EXACT = 1e-6
"""Share of a gradient that rounding leaves, by the coarsest dtype of a step; in float32.

Where the step's own numbers are used again, untouched steps leave 0 to 5e-7 in any dtype; where
they are computed anew, .004 in bfloat16. So much is not added to the control, which would be
rounded twice. Higher: an L2 penalty of 1e-7, which takes most words of a LoRA from SubspaceWords,
passes for rounding.
"""

_ELSEWHERE = "the control could not be made on another process"
_DOUBT = (
    "the step made again leaves {:.0%} of the gradient unexplained, so that the words may not be "
    "those of this step: a batch that is not what was trained on (pass "
    "settings=WatchSettings(batch_adapter=...)), or a gradient that was changed after the backward"
)
_LIKELY_TEXTS = "it prefers likely texts, and shuffled ones, which its control has, are not likely"


@dataclass
class _Newest:
    """The newest control of an attack, and the number that it had then or later."""

    control: float
    number: float


class _Part(NamedTuple):
    """The newest part of a control that an attack read, or the smallest one if it read none.

    Attributes:
        labels: the number of its labels.
        is_read: whether the attack read enough of it.
        control: what the attack read of the whole batch then; NaN where nothing.
    """

    labels: int
    is_read: bool
    control: float

    def is_outdated(self, control: float) -> bool:
        """Return whether a part of another size may be read, if one of this size is not.

        Args:
            control: what the attack reads of the whole batch now; NaN where nothing.
        """
        if self.is_read or math.isnan(control) != math.isnan(self.control):
            return True
        return abs(control - self.control) > MAX_MOVE


def _explain(
    gradients: Mapping[str, Tensor], again: Mapping[str, Tensor], rounding: float = EXACT
) -> tuple[float, dict[str, Tensor]]:
    """Return which share of gradients the step made again leaves, and what it leaves of each.

    One factor for all gradients is fitted, because clipping by norm and a loss scale multiply all
    of them. Of what is left, rounding accounts for a part, which is taken out as the square root of
    a difference of squares, since independent errors add up by their squares. Where the step made
    again is exactly 0 rounding changes nothing, and all that is left is returned.

    Args:
        gradients: The gradients of a step, by role.
        again: The gradients of the step made again; those that are absent are 0.
        rounding: The share that rounding leaves.
    """
    floats = {role: gradient.float() for role, gradient in gradients.items()}
    pairs = {r: (x, again[r].float() if r in again else x * 0) for r, x in floats.items()}
    dot = sum(float((x * y).sum()) for x, y in pairs.values())
    square_again = sum(float(y.square().sum()) for _, y in pairs.values())
    if not (dot > 0 and square_again > 0 and math.isfinite(dot / square_again)):
        return 1.0, {}
    factor = square_again / dot  # which brings the step's gradients nearest to those made again
    remainder = {role: x * factor - y for role, (x, y) in pairs.items()}
    square = sum(float(x.square().sum()) for x in floats.values()) * factor**2
    square_left = sum(float(left.square().sum()) for left in remainder.values())
    share = min(1.0, math.sqrt(square_left / square))
    above = math.sqrt(1 - (rounding / share) ** 2) if share > rounding else 0.0
    for role, left in remainder.items():  # rounding leaves an exact 0 as it is
        remainder[role] = torch.where(pairs[role][1] == 0, left, left * above)
    remainder = {role: left for role, left in remainder.items() if bool(left.any())}
    return share * (share > EXACT), remainder


class Controls:
    """Give the attacks of a run the controls of its looks.

    Args:
        run: The run.
        series: The channel of each series.

    Attributes:
        needs: The value that a control must exceed, by family: the highest threshold of its gates.
    """

    def __init__(self, run: Run, series: Mapping[Series, Channel]) -> None:
        self._run = run
        self._series = series
        self._channels = {key.attack: channel for key, channel in series.items()}
        config = getattr(without_peft(run.anatomy.model), "config", None)
        self._special = special_ids(config, run.tokenizers)
        self._newest: dict[str, _Newest] = {}
        self._parts: dict[str, _Part] = {}
        self._has_warned = False
        self._is_noisy = True  # a device may not compute the same twice; one that did stays so
        # There is no gradient before what a defence does to a batch or to hidden states.
        self._replaced = any(d.acts_on_batches or d.activation_layers for d in run.defenses)
        self.needs: dict[str, float] = {}
        self._together = run.processes > 1 and (run.client == "world" or run.is_sharded)
        # Under DP the moments of controls must not depend on the data.
        self._by_cadence = bool(accounting(run.defenses))

    def play(self, look: Look, plans: Sequence[Plan]) -> None:
        """Give attacks that have read a step its control, if one is due.

        Args:
            look: The look, right before the optimizer steps; the attacks have answered.
            plans: The plans of the attacks whose gradients are shared.
        """
        names = {series.attack for series in look.scope or self._series}
        # Without an optimizer the attack reads no parameter of the model.
        stepped = [p for p in plans if p.attack.name in names and look.steps_with(p.optimizer)]
        scored = [plan for plan in stepped if self._is_scored(plan)]
        due = [p for p in scored if self._anywhere(self.may_play(p) and self._is_due(look, p))]
        if not due:
            return
        try:
            self._play(look, due, scored)
        except Exception as error:
            self._fail(look, due, reason(error))

    def _anywhere(self, here: bool) -> bool:
        """Return whether a condition holds on any process that has to make the same gradients.

        If the processes are one client, or share a sharded model, all of them make a gradient
        together. Otherwise each process decides by itself.
        """
        return self._run.on_any_process(here) if self._together else here

    def may_play(self, plan: Plan) -> bool:
        """Return whether an attack is given controls."""
        name = plan.attack.name
        return self._is_scored(plan) and gives_control(self._channels[name], name)

    def _is_scored(self, plan: Plan) -> bool:
        """Return whether the words of a step score an attack, and its gradients are shared."""
        channel = self._channels.get(plan.attack.name)
        return channel is not None and plan.exposed and channel.controlled

    def _is_due(self, look: Look, plan: Plan) -> bool:
        """Return whether an attack's number of this look needs a control of this look.

        The first number of a run does, and each that is lower than the last one, or lower than
        :data:`FALL` times the last control. An attack that still waits needs no control.
        """
        newest = self._newest.get(plan.attack.name)
        if self._by_cadence:
            return newest is None or look.scope is None
        if newest is None:
            return not all(isinstance(answer, Waiting) for answer in self._answers(look, plan))
        number = self._number(look, plan)
        last, newest.number = newest.number, number
        return math.isnan(newest.control) or number < last or number < FALL * newest.control

    def _answers(self, look: Look, plan: Plan) -> list[object]:
        return [look.answers.get(s) for s in self._series if s.attack == plan.attack.name]

    def _number(self, look: Look, plan: Plan) -> float:
        """Return the lowest headline of an attack at the stages of this look; 0 if it has none."""
        channel, missing = self._channels[plan.attack.name], Unknown | Waiting | None
        known = [a for a in self._answers(look, plan) if not isinstance(a, missing)]
        try:
            rates = [channel.rates(look.training_step, plan, answer) for answer in known]
        except Exception:  # the result of the attack states the reason
            return 0.0
        numbers = (values.get(channel.headline, math.nan) for values in rates)
        return min((number for number in numbers if not math.isnan(number)), default=0.0)

    def _play(self, look: Look, plans: Sequence[Plan], scored: Sequence[Plan]) -> None:
        """Make the step again, and then play its control.

        Args:
            look: The look.
            plans: The plans of the attacks whose control is due.
            scored: The plans of all attacks that the words of this step score.
        """
        step = look.training_step
        controls = self._controls(step)
        share, remainder = self._remainder(look, plans)
        residuals = [head.residual for call in step.calls for head in call.read_heads]
        share = max([share, *(residual.share for residual in residuals if residual is not None)])
        if self._anywhere(share > MAX_UNEXPLAINED):  # of the gradient, or of a call's logits
            step.unexplained = share
            self._fail(look, scored, _DOUBT.format(share))
            return
        likely = [p for p in plans if getattr(p.attack, "prefers_likely_texts", False)]
        if others := [plan for plan in plans if plan not in likely]:
            self._ask(look, others, controls, remainder)
        self._fail(look, likely, _LIKELY_TEXTS)

    def _fail(self, look: Look, plans: Sequence[Plan], why: str) -> None:
        """Keep an unknown control for attacks, so that no low number of theirs counts."""
        for plan in plans:
            self._keep(look, plan, Control(self._nothing(plan), why=why))

    def _controls(self, step: Step) -> list[Step]:
        """Return the controls of a step, which have its words in shuffled order.

        If labels weigh unevenly in the loss there are two: in the first the weights stay at their
        positions, in the second they move with the words.

        Raises:
            UnusableObservation: The calls of the step are not known, here or on another process.
        """
        failure, uneven, controls = step.error, False, list[Step]()
        generator = torch.Generator().manual_seed(1_000_003 * step.number + self._run.rank)
        try:
            if not step.calls:
                raise UnusableObservation("the step's calls were not read")
            controls.append(shuffle_words(step, self._special, generator))
            uneven = is_uneven(step.calls)
        except Exception as error:
            failure = failure or reason(error)
        n = len(step.calls)
        n_calls = torch.tensor(n, device=self._run.device)
        if self._together and int(self._run.summed(n_calls)) != n * self._run.processes:
            failure = failure or "processes made different numbers of calls"
        if self._anywhere(failure is not None):
            raise UnusableObservation(failure or _ELSEWHERE)
        if self._anywhere(uneven):
            with_words = shuffle_words(step, self._special, generator, sizes_go_with_words=True)
            controls.append(with_words)
        return controls

    def _remainder(self, look: Look, plans: Sequence[Plan]) -> tuple[float, dict[str, Tensor]]:
        """Return the share of the gradients that the step made again leaves, and what it leaves.

        The remainder of each gradient is in the scale of the step made again. The share is 0 if
        there is nothing to compare, or the step cannot be made again.
        """
        step, view = look.training_step, self._before_defenses(look)
        roles = tuple(dict.fromkeys(role for plan in plans for role in plan.roles))
        if self._anywhere(view is None or self._replaced) or view is None or not roles:
            return 0.0, {}
        try:
            again = self._again(step, roles)
        except Exception as error:
            if not self._has_warned:
                self._has_warned = True
                rank_zero_info(
                    f"{self._run.watcher}: a step is not made again ({reason(error)}), so that "
                    "controls do not show what happened to its gradient after the backward"
                )
            return 0.0, {}
        gradients = {role: view.tensors[role] for role in roles if role in view.tensors}
        rounding = self._rounding(view, step, roles)
        share, remainder = _explain(gradients, again, rounding)
        if self._is_noisy and self._anywhere(share > rounding):
            noise = _explain(again, self._gradient(step, roles, {}).tensors)[0]
            self._is_noisy = self._anywhere(noise > 0)
            share, remainder = _explain(gradients, again, max(rounding, 2 * noise))
        if any(bool(gradient.any()) for gradient in gradients.values()):
            so_far = 0.0 if math.isnan(step.unexplained) else step.unexplained
            step.unexplained = max(share, so_far)
            return share, remainder
        return 0.0, {}

    def _before_defenses(self, look: Look) -> GradientSnapshot | None:
        """Return the gradient of a step or round before any defence; None if it was not seen."""
        step = look.training_step
        is_round = step.round is not None and not (self._run.defenses or step.compression)
        if step.undefended is None and (Stage.LOCAL in look.stages or is_round):
            with suppress(Exception):  # its attacks say why
                return step.view(look.stages[0])
        return step.undefended

    def _rounding(self, view: GradientSnapshot, step: Step, roles: Sequence[str]) -> float:
        """Return the share of a gradient that rounding leaves when its step is made again.

        On one process with recorded logits exactly the same numbers come out again. Sums over
        processes are rounded differently, and so are logits that were not recorded, because the
        whole model is compiled or the head is not called.
        """
        anatomy, heads = self._run.anatomy, [call.read_heads for call in step.calls]
        of_head = set(map(id, () if anatomy.head is None else anatomy.head.parameters()))
        reads_head = any(id(anatomy.parameter(role)) in of_head for role in roles)
        reads_states = any(head.source == "states" for calls in heads for head in calls)
        if all(heads) and not self._together and not (reads_head and reads_states):
            return EXACT
        policies = self._run.policies.values()
        dtypes = {tensor.dtype for tensor in view.tensors.values()}
        dtypes |= {call.autocast for call in step.calls if call.autocast is not None}
        dtypes |= {p.param_dtype for p in policies} | {p.reduce_dtype for p in policies}
        return max((ROUNDING.get(dtype, EXACT) for dtype in dtypes), default=EXACT)

    def _again(self, step: Step, roles: Sequence[str]) -> Mapping[str, Tensor]:
        """Return the gradients of the step made again, by role.

        Raises:
            UnusableObservation: It cannot be made again, or not with the same random numbers.
        """
        again = self._gradient(step, roles, {}).tensors
        if all(call.random for call in step.calls):
            return again
        devices = [self._run.device] if self._run.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(step.number + 1)
            other = self._gradient(step, roles, {}).tensors
        if _explain(again, other)[0] > 0:
            raise UnusableObservation("the random numbers of its dropout are not known")
        return again

    def _ask(
        self,
        look: Look,
        plans: Sequence[Plan],
        controls: Sequence[Step],
        remainder: Mapping[str, Tensor],
    ) -> None:
        """Play controls, and parts of a control for attacks that read little of the whole."""
        answers = [self._rates(control, plans, remainder) for control in controls]
        low = []
        for plan in plans:
            rates, is_low = [rates[plan.attack.name] for rates in answers], False
            control = self._lowest(look, plan, rates)
            if control is not None:
                self._keep(look, plan, control)
                channel = self._channels[plan.attack.name]
                is_low = not control.rates.get(channel.headline, math.nan) > self._need(channel)
            if self._anywhere(is_low):
                low.append(plan)
        if low:
            self._ask_parts(look, low, controls[-1], remainder)

    def _rates(
        self, control: Step, plans: Sequence[Plan], remainder: Mapping[str, Tensor]
    ) -> dict[str, Mapping[str, float] | Unknown | Waiting]:
        """Return the rates of attacks on a control, by their names."""
        roles = tuple(dict.fromkeys(role for plan in plans for role in plan.roles))
        control.gradients[Stage.LOCAL] = self._gradient(control, roles, remainder)
        rates: dict[str, Mapping[str, float] | Unknown | Waiting] = {}
        for plan in plans:
            name = plan.attack.name
            try:
                rates[name] = self._channels[name].control_rates(plan, control)
            except Exception as error:
                rates[name] = Unknown(reason(error))
        return rates

    def _gradient(
        self, step: Step, roles: Sequence[str], remainder: Mapping[str, Tensor]
    ) -> GradientSnapshot:
        """Return the gradient of a step made again; the mean over processes if they are one client.

        Args:
            step: The step itself, or a control.
            roles: The roles of the gradients; empty if all attacks read only hidden states.
            remainder: What the step made again leaves of each gradient, by role, which is added.

        Raises:
            UnusableObservation: The gradient cannot be made, here or on another process.
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
        for role, rest in remainder.items():
            gradient = tensors.get(role)
            tensors[role] = rest if gradient is None else (gradient + rest).to(gradient)
        rounding = run.rounding(len(step.calls))
        return replace(view, tensors=tensors, client=run.number, rounding=rounding)

    def _zeros(self, role: str) -> Tensor:
        """Return the gradient of a parameter on a process whose part of a batch has no label."""
        parameter = self._run.anatomy.parameter(role)
        assert parameter is not None
        shape = getattr(parameter, "ds_shape", parameter.shape)  # of a shard of ZeRO-3 the whole
        return torch.zeros(shape, dtype=parameter.dtype, device=self._run.device)

    def _lowest(
        self, look: Look, plan: Plan, answers: Sequence[Mapping[str, float] | Unknown | Waiting]
    ) -> Control | None:
        """Return the lowest rates of controls; None if the attack waits on one of them."""
        if waits := next((rates for rates in answers if isinstance(rates, Waiting)), None):
            # Without a result before the defences, one after them would be made of noise.
            names = [s for s in self._series if s.attack == plan.attack.name]
            look.answers |= dict.fromkeys(names, waits)
            return None
        if failed := next((rates for rates in answers if isinstance(rates, Unknown)), None):
            return Control(self._nothing(plan), why=failed.why)
        known = [rates for rates in answers if isinstance(rates, Mapping)]
        return Control({name: min(rates[name] for rates in known) for name in known[0]})

    def _ask_parts(
        self, look: Look, plans: Sequence[Plan], whole: Step, remainder: Mapping[str, Tensor]
    ) -> None:
        """Play ever smaller parts of a control for attacks that read little of the whole.

        If an attack reads a part, the whole holds more than the attack can tell apart.
        """
        n_labels = self._count_labels(whole)
        names = {plan.attack.name for plan in plans}
        last = {n: part for n, part in self._parts.items() if n in names and part.labels < n_labels}
        low, first = list(plans), 0
        if last:  # one part for all: the smallest that one of them has read
            read = [part.labels for part in last.values() if part.is_read]
            first = min(read or [part.labels for part in last.values()])
            unread = self._ask_part(look, plans, whole.part(first), first, remainder)
            low = [plan for plan in unread if self._may_read_another(plan, last)]
        while low and n_labels > MIN_LABELS:
            n_labels = max(n_labels // SMALLER, MIN_LABELS)
            if n_labels != first:
                low = self._ask_part(look, low, whole.part(n_labels), n_labels, remainder)
        for plan in low:  # which read no part: the smallest one is asked next
            self._parts[plan.attack.name] = _Part(MIN_LABELS, False, self._control_of(plan))

    def _count_labels(self, whole: Step) -> int:
        shapes = [call.shapes for call in whole.calls if call.shapes is not None]
        counts = torch.stack([(rows[0] != 0).sum() for rows in shapes]).sum()
        return int(self._run.summed(counts) / self._run.processes if self._together else counts)

    def _ask_part(
        self,
        look: Look,
        plans: Sequence[Plan],
        part: Step,
        n_labels: int,
        remainder: Mapping[str, Tensor],
    ) -> list[Plan]:
        """Play a part of a control, and return the plans of the attacks that cannot read it.

        Args:
            look: the look.
            plans: the plans of the attacks.
            part: the part.
            n_labels: the number of its labels.
            remainder: by role, what the step made again leaves of the gradient.
        """
        answers, unread = self._rates(part, plans, remainder), []
        for plan in plans:
            name, channel = plan.attack.name, self._channels[plan.attack.name]
            need = max(self._need(channel), default_limit(channel.leak.chance))
            rates = answers[name]
            known = rates if isinstance(rates, Mapping) else {}
            is_read = known.get(channel.headline, math.nan) > need
            if is_read and name in look.controls:
                self._keep(look, plan, replace(look.controls[name], part=known))
            if self._anywhere(not is_read):
                unread.append(plan)
            else:
                self._parts[name] = _Part(n_labels, True, self._control_of(plan))
        return unread

    def _may_read_another(self, plan: Plan, last: Mapping[str, _Part]) -> bool:
        part = last.get(plan.attack.name)
        return part is None or self._anywhere(part.is_outdated(self._control_of(plan)))

    def _control_of(self, plan: Plan) -> float:
        newest = self._newest.get(plan.attack.name)
        return math.nan if newest is None else newest.control

    def _keep(self, look: Look, plan: Plan, control: Control) -> None:
        unexplained = look.training_step.unexplained
        look.controls[plan.attack.name] = replace(control, unexplained=unexplained)
        number = self._number(look, plan)
        value = control.rates.get(self._channels[plan.attack.name].headline, math.nan)
        self._newest[plan.attack.name] = _Newest(value, number)

    def state(self) -> tuple[dict[str, _Newest], dict[str, _Part]]:
        """Return each attack's newest control and newest part."""
        return deepcopy((self._newest, self._parts))

    def restore(self, state: tuple[dict[str, _Newest], dict[str, _Part]]) -> None:
        """Go back to what :meth:`state` returned."""
        self._newest, self._parts = deepcopy(state)

    def _need(self, channel: Channel) -> float:
        """Return the value that a control must exceed for a low number to count."""
        return self.needs.get(channel.family, default_limit(channel.leak.chance))

    def _nothing(self, plan: Plan) -> dict[str, float]:
        return dict.fromkeys(self._channels[plan.attack.name].metrics, math.nan)
