"""Positive controls: whether an attack that reports a low number works on this step at all.

A low number may mean that little leaks, or that the attack does not work here. A *control*
distinguishes the two: the same step on known text, which is the batch with its tokens shuffled
(:mod:`lightning_fedleak.model.taps.control`). An attack that recovers nothing of it is not working,
and its low number is reported as unknown. The *number* of an attack is its main rate, such as F1.

The order in a look (a measurement at one step), after the attacks have guessed:

1. The attacks whose number needs a control are selected.
2. The step is recomputed with its own tokens. The part of the optimizer's gradient that this does
   not give (weight decay in the loss, a hook of the user's) is the *remainder*. If it is more than
   half, the batch may be that of another step: the control is unknown.
3. The gradient of the shuffled step is computed, the remainder is added, and the attacks run on it.
4. An attack that recovers little runs on smaller and smaller parts of the control. If it works on
   one of them, the batch is too large for the attack.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, replace

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
"""An attack gets a new control if its number is below this share of its last control.

Higher: more looks have a control, which costs a training step. Lower: an attack that has become
weaker since its last control is noticed later.
"""
SMALLER = 4
"""Each part of a control has 1/4 of the labels of the part before; 2 tries twice as many parts."""
MIN_LABELS = 4
"""Labels of the smallest part. An attack that recovers only one of 4 words has an F1 of .4 there.

Fewer: such an attack passes as one that works on smaller batches. More: attacks that can recover
only a few word types are unknown.
"""
MAX_MOVE = 0.1
"""Up to this change of its control, an attack that worked on no part is not run on parts again.

Larger: fewer gradients are computed. Smaller: a failing attack runs on all sizes more often.
"""
MAX_UNEXPLAINED = 0.5
"""Share of a gradient that may be unexplained; above it the batch may be that of another step.

A batch that was not trained on leaves .99 unexplained, an L2 penalty of common sizes .1 to .4.
Higher: numbers count although half of the gradient is of other text. Lower: steps with large
penalties are unknown, although their control contains the penalty and could decide.
"""
ROUNDING = {torch.float16: 2e-3, torch.bfloat16: 1e-2}
EXACT = 1e-6
"""Share of a gradient that rounding leaves unexplained: ``ROUNDING`` by the coarsest dtype of a
step, and ``EXACT`` in float32 and where recorded logits are reused.

With recorded logits, steps without a remainder leave 0 to 5e-7 in any dtype. If the logits are
computed again, they leave .004 in bfloat16. This share is not added to the control, which would be
rounded twice. Higher: an L2 penalty of 1e-7, which hides most words of a LoRA from SubspaceWords,
passes for rounding.
"""

_ELSEWHERE = "the control could not be made on another process"
_DOUBT = (
    "the step made again leaves {:.0%} of the gradient unexplained, so that the words may not be "
    "those of this step: a batch that is not what was trained on (pass "
    "settings=WatchSettings(batch_adapter=...)), or a gradient that was changed after the backward"
)
_UNEVEN = (
    "labels weigh unevenly in the loss: it misses light ones, and they are so few that linear "
    "programs (RLG, Dang et al. 2021) may separate them all"
)
_LIKELY_TEXTS = "it prefers likely texts, and shuffled ones, which its control has, are not likely"


@dataclass
class _Newest:
    """What is known of an attack from its newest control and look.

    Attributes:
        control: Its headline metric on its newest whole control; NaN if unknown.
        number: Its number at its newest look; infinite before its first control.
        part: The labels of the part of a control on which it last worked; 0 if it worked on none,
            None if it ran on none.
        control_then: ``control`` when it last ran on parts.
    """

    control: float = math.nan
    number: float = math.inf
    part: int | None = None
    control_then: float = math.nan

    def may_read_a_part(self) -> bool:
        """Return whether the attack may now work on a part of a control."""
        then, now = self.control_then, self.control
        has_moved = math.isnan(then) != math.isnan(now) or abs(now - then) > MAX_MOVE
        return self.part != 0 or has_moved


def _explain(
    gradients: Mapping[str, Tensor], again: Mapping[str, Tensor], rounding: float = EXACT
) -> tuple[float, dict[str, Tensor]]:
    """Return the share of the gradients that recomputing does not explain, and each remainder.

    The remainders are in the scale of the recomputed step; roles without one are absent.

    One factor is fitted for all gradients, because clipping by norm and a loss scale multiply all
    of them. Rounding accounts for a part of the remainder. That part is taken out as the root of a
    difference of squares, since independent errors add up by their squares. Entries whose
    recomputed gradient is exactly 0 have no rounding error: their remainder stays as it is.

    Args:
        gradients: The gradients of a step, by role.
        again: The gradients of the recomputed step, by role; absent ones are 0.
        rounding: The share that rounding leaves.
    """
    floats = {role: gradient.float() for role, gradient in gradients.items()}
    pairs = {r: (x, again[r].float() if r in again else x * 0) for r, x in floats.items()}
    dot = sum(float((x * y).sum()) for x, y in pairs.values())
    square_again = sum(float(y.square().sum()) for _, y in pairs.values())
    if not (dot > 0 and square_again > 0 and math.isfinite(dot / square_again)):
        return 1.0, {}
    factor = square_again / dot  # brings the step's gradients nearest to the recomputed ones
    remainder = {role: torch.sub(x, y, alpha=1 / factor) for role, (x, y) in pairs.items()}
    squares = (float(residual.norm(dim=-1).square().sum()) for residual in remainder.values())
    square = sum(float(x.norm(dim=-1).square().sum()) for x in floats.values())
    share = min(1.0, math.sqrt(sum(squares) / square))
    above = math.sqrt(1 - (rounding / share) ** 2) if share > rounding else 0.0
    for role, (x, y) in pairs.items():
        exact = y == 0  # rounding leaves these entries as they are
        if bool((exact & (x != 0)).any()) or (above and bool(remainder[role].any())):
            residual = remainder[role].mul_(factor)
            remainder[role] = torch.where(exact, residual, residual * above)
        else:
            del remainder[role]
    return share * (share > EXACT), remainder


class Controls:
    """Run the attacks of a fit on positive controls, at the looks that need one.

    Args:
        run: The run.
        series: The channel of each series (the results of one attack at one stage).

    Attributes:
        needs: The value that a control must exceed, by family of attacks (such as words): the
            highest threshold of the family's gates, which stop a run. Families that are absent need
            :func:`default_limit`.
    """

    def __init__(self, run: Run, series: Mapping[Series, Channel]) -> None:
        self._run = run
        self._series = series
        self._channels = {key.attack: channel for key, channel in series.items()}
        config = getattr(without_peft(run.anatomy.model), "config", None)
        self._special = special_ids(config, run.tokenizers)
        self._newest = defaultdict[str, _Newest](_Newest)  # by name of the attack
        self._has_warned = False
        # Whether the device may compute different gradients for one step. Once it was found to be
        # deterministic, this is not measured again.
        self._is_noisy = True
        # A defence that rewrites batches or hidden states leaves no undefended gradient to explain.
        self._is_rewritten = any(d.acts_on_batches or d.activation_layers for d in run.defenses)
        self.needs: dict[str, float] = {}
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

        It does if it is the first of the run, lower than the one before, or lower than
        :data:`FALL` times the last control, or if that control is unknown. After the first, an
        attack without a result needs none. Under DP every look but a retry needs a control.
        """
        name, answers = plan.attack.name, self._answers(look, plan)
        if self._ignores_data:
            return name not in self._newest or look.scope is None
        if name not in self._newest:  # its control may show that an unknown attack still waits
            return not all(isinstance(answer, Waiting) for answer in answers)
        if all(isinstance(answer, Unknown | Waiting | None) for answer in answers):
            self._newest[name].control = math.nan  # the next result needs one of its own step
            return False
        newest, number = self._newest[name], self._number(look, plan)
        last, newest.number = newest.number, number
        return math.isnan(newest.control) or number < last or number < FALL * newest.control

    def _answers(self, look: Look, plan: Plan) -> list[object]:
        """Return the answers of an attack at the stages of this look; None where it has none."""
        return [look.answers.get(s) for s in self._series if s.attack == plan.attack.name]

    def _number(self, look: Look, plan: Plan) -> float:
        """Return the lowest headline of an attack at the stages of this look; 0 if it has none."""
        channel, missing = self._channels[plan.attack.name], Unknown | Waiting | None
        guesses = [a for a in self._answers(look, plan) if not isinstance(a, missing)]
        try:
            rates = [channel.rates(look.training_step, plan, guess) for guess in guesses]
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
        share, remainder = self._remainder(look, plans)
        residuals = [head.residual for call in step.calls for head in call.read_heads]
        share = max([share, *(residual.share for residual in residuals if residual is not None)])
        if self._anywhere(share > MAX_UNEXPLAINED):  # of the gradient, or of a call's logits
            step.unexplained = share
            self._fail(look, scored, _DOUBT.format(share))
            return
        likely = [p for p in plans if getattr(p.attack, "prefers_likely_texts", False)]
        uneven = list[Plan]()
        if len(controls) > 1:  # labels weigh unevenly
            # Without noise, fewer labels than dimensions: a vector separates each from all others.
            few = self._count_labels(controls[0]) < self._run.anatomy.hidden_size
            if self._anywhere(few and not step.view(look.stages[-1]).noise_std > 0):
                uneven = [plan for plan in plans if plan.attack.for_even_losses]
        if rest := [plan for plan in plans if plan not in [*likely, *uneven]]:
            self._run_attacks(look, rest, controls, remainder)
        self._fail(look, likely, _LIKELY_TEXTS)
        self._fail(look, uneven, _UNEVEN)

    def _fail(self, look: Look, plans: Sequence[Plan], why: str) -> None:
        """Store an unknown control for attacks, so that their low numbers do not count."""
        for plan in plans:
            self._store(look, plan, Control(self._unknown_rates(plan), why=why))

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
        if self._are_joint and int(self._run.summed(n_calls)) != n * self._run.processes:
            failure = failure or "processes made different numbers of calls"
        if self._anywhere(failure is not None):
            raise UnusableObservation(failure or _ELSEWHERE)
        if self._anywhere(uneven):
            with_words = shuffle_words(step, self._special, generator, sizes_go_with_words=True)
            controls.append(with_words)
        return controls

    def _remainder(self, look: Look, plans: Sequence[Plan]) -> tuple[float, dict[str, Tensor]]:
        """Return the unexplained share of the gradients, and the remainder of each by role.

        The remainders are in the scale of the recomputed step. The share is 0 if there is no
        undefended gradient to compare, or if the step cannot be recomputed.
        """
        step, view = look.training_step, self._before_defenses(look)
        roles = tuple(dict.fromkeys(role for plan in plans for role in plan.roles))
        if self._anywhere(view is None or self._is_rewritten) or view is None or not roles:
            return 0.0, {}
        try:
            again = self._recompute(step, roles)
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
        """Return the gradient of a step or round before any defence; None if not observed."""
        step = look.training_step
        is_round = step.round is not None and not (self._run.defenses or step.compression)
        if step.undefended is None and (Stage.LOCAL in look.stages or is_round):
            with suppress(Exception):  # its attacks say why
                return step.view(look.stages[0])
        return step.undefended

    def _rounding(self, view: GradientSnapshot, step: Step, roles: Sequence[str]) -> float:
        """Return the share of a gradient that rounding leaves when its step is recomputed.

        On one process with recorded logits, exactly the same numbers are computed again. Sums over
        processes are rounded differently. So are logits that were not recorded, because the whole
        model is compiled or the head is not called.
        """
        anatomy, heads = self._run.anatomy, [call.read_heads for call in step.calls]
        of_head = set(map(id, () if anatomy.head is None else anatomy.head.parameters()))
        reads_head = any(id(anatomy.parameter(role)) in of_head for role in roles)
        reads_states = any(head.source == "states" for calls in heads for head in calls)
        if all(heads) and not self._are_joint and not (reads_head and reads_states):
            return EXACT
        policies = self._run.policies.values()
        dtypes = {tensor.dtype for tensor in view.tensors.values()}
        dtypes |= {call.autocast for call in step.calls if call.autocast is not None}
        dtypes |= {p.param_dtype for p in policies} | {p.reduce_dtype for p in policies}
        return max((ROUNDING.get(dtype, EXACT) for dtype in dtypes), default=EXACT)

    def _recompute(self, step: Step, roles: Sequence[str]) -> Mapping[str, Tensor]:
        """Return the gradients of the recomputed step, by role.

        If the random state of a call was not recorded, the step is computed twice with different
        random numbers, to find out whether they change the gradients.

        Raises:
            UnusableObservation: It cannot be recomputed, or not with the same random numbers.
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

    def _run_attacks(
        self,
        look: Look,
        plans: Sequence[Plan],
        controls: Sequence[Step],
        remainder: Mapping[str, Tensor],
    ) -> None:
        """Run attacks on whole controls, and then those that recover little on parts of one."""
        answers = [self._rates(control, plans, remainder) for control in controls]
        low = []  # plans of the attacks that recover too little
        for plan in plans:
            rates, is_low = [rates[plan.attack.name] for rates in answers], False
            control = self._lowest_control(look, plan, rates)
            if control is not None:
                self._store(look, plan, control)
                channel = self._channels[plan.attack.name]
                is_low = not control.rates.get(channel.headline, math.nan) > self._limit(channel)
            if self._anywhere(is_low):
                low.append(plan)
            elif control is not None and self._newest[plan.attack.name].part == 0:
                self._newest[plan.attack.name].part = None
        if low:
            self._run_on_parts(look, low, controls[-1], remainder)

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

    def _run_on_parts(
        self, look: Look, plans: Sequence[Plan], whole: Step, remainder: Mapping[str, Tensor]
    ) -> None:
        """Run attacks that recover little of a whole control on smaller and smaller parts of it.

        If an attack works on a part, the whole holds more text than it can recover. The part on
        which one worked last comes first.
        """
        n_labels = self._count_labels(whole)
        if n_labels <= MIN_LABELS:
            return
        newest = [(plan, self._newest[plan.attack.name]) for plan in plans]
        low = [plan for plan, then in newest if self._anywhere(then.may_read_a_part())]
        sizes = [then.part for _, then in newest if then.part and then.part < n_labels]
        first_size = min(sizes, default=0)  # of all attacks, so that one gradient is computed
        if sizes:
            unread = self._ask_part(look, plans, whole.part(first_size), first_size, remainder)
            low = [plan for plan in low if plan in unread]
        while low and n_labels > MIN_LABELS:
            n_labels = max(n_labels // SMALLER, MIN_LABELS)
            if n_labels != first_size:
                low = self._ask_part(look, low, whole.part(n_labels), n_labels, remainder)
        for plan in low:
            self._remember(plan, 0)

    def _count_labels(self, whole: Step) -> int:
        """Return the number of labels of a control; over joint processes, their mean number."""
        shapes = [call.shapes for call in whole.calls if call.shapes is not None]
        counts = torch.stack([(rows[0] != 0).sum() for rows in shapes]).sum()
        return int(self._run.summed(counts) / self._run.processes if self._are_joint else counts)

    def _ask_part(
        self,
        look: Look,
        plans: Sequence[Plan],
        part: Step,
        n_labels: int,
        remainder: Mapping[str, Tensor],
    ) -> list[Plan]:
        """Run attacks on a part of a control, and return the plans of those that fail on it.

        The rates on the part are stored with the control of each attack that works on it.

        Args:
            look: The look.
            plans: The plans of the attacks.
            part: The part.
            n_labels: The number of its labels.
            remainder: The remainder of each gradient, by role.
        """
        answers, unread = self._rates(part, plans, remainder), []
        for plan in plans:
            name, channel = plan.attack.name, self._channels[plan.attack.name]
            # A part must exceed the default limit even if a gate has a lower threshold.
            need = max(self._limit(channel), default_limit(channel.leak.chance))
            rates = answers[name]
            scored = rates if isinstance(rates, Mapping) else {}
            is_read = scored.get(channel.headline, math.nan) > need
            if is_read and name in look.controls:
                self._store(look, plan, replace(look.controls[name], part=scored))
            if self._anywhere(not is_read):
                unread.append(plan)
            else:
                self._remember(plan, n_labels)
        return unread

    def _remember(self, plan: Plan, labels: int) -> None:
        """Remember the labels of the part on which an attack worked; 0 if it worked on none."""
        newest = self._newest[plan.attack.name]
        newest.part, newest.control_then = labels, newest.control

    def _store(self, look: Look, plan: Plan, control: Control) -> None:
        """Store the control of an attack in the look, and as its newest one."""
        unexplained = look.training_step.unexplained
        look.controls[plan.attack.name] = replace(control, unexplained=unexplained)
        newest = self._newest[plan.attack.name]
        newest.control = control.rates.get(self._channels[plan.attack.name].headline, math.nan)
        if math.isinf(newest.number):
            newest.number = self._number(look, plan)

    def state(self) -> dict[str, _Newest]:
        """Return what is known of each attack, by name."""
        return deepcopy(self._newest)

    def restore(self, state: dict[str, _Newest]) -> None:
        """Restore what :meth:`state` returned."""
        self._newest = defaultdict(_Newest, deepcopy(state))

    def _limit(self, channel: Channel) -> float:
        """Return the value that a control must exceed for a low number to count."""
        return self.needs.get(channel.family, default_limit(channel.leak.chance))

    def _unknown_rates(self, plan: Plan) -> dict[str, float]:
        """Return NaN for each metric of an attack."""
        return dict.fromkeys(self._channels[plan.attack.name].metrics, math.nan)
