"""When a look has a control, and what the attacks read of it.

A low number says how little an attack read. The control says how much it could have read in this
very step: its words are the batch's own, shuffled (:mod:`lightning_fedleak.model.taps.control`).
Before it, the step is made again with its own words. What that does not explain of the gradient
that the optimizer gets is added to the control, so that the control went through what the gradient
went through. Where it is most of the gradient, the words may not be those of this step at all.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightning_fedleak.engine.channels.base import Channel, gives_control
from lightning_fedleak.engine.channels.plans import Plan
from lightning_fedleak.engine.outcomes import Control, Series, Unknown, Waiting
from lightning_fedleak.engine.record import accounting
from lightning_fedleak.engine.run import Look, Moment, Run, reason
from lightning_fedleak.messages import rank_zero_info
from lightning_fedleak.model.anatomy import special_ids, without_peft
from lightning_fedleak.model.snapshots import GradientSnapshot, Stage, UnusableObservation
from lightning_fedleak.model.taps import (
    Draw,
    control_gradient,
    control_update,
    draw_words,
    is_uneven,
)
from lightning_fedleak.report.records import default_limit

FALL = 0.9
"""Share of the last control below which a number is controlled again.

Higher: more looks have a control, which costs a training step. Lower: an attack that has lost some
of its sight since is found later.
"""
SMALLER = 4
"""Each part of a batch has this share of the labels of the part before; 2 tries twice as many."""
LEAST_LABELS = 4
"""Labels of the smallest part: an attack that names one word of any batch has at most .4 of these.

Fewer: such an attack counts as one that the batch is too large for; more: attacks that can hold but
a few types are unknown.
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
_LIKELY_TEXTS = "it prefers likely texts, and shuffled ones, which its control has, are not likely"


@dataclass
class _Newest:
    """The newest control of an attack, and the number that it had then or later."""

    control: float
    number: float


def _explain(
    gradients: Mapping[str, Tensor], again: Mapping[str, Tensor], rounding: float = EXACT
) -> tuple[float, dict[str, Tensor]]:
    """Return the share of gradients that others leave unexplained, and what they leave of each.

    One factor for all of them is free, as of clipping by norm and of a loss scale. Of what is left
    that part is returned which is above rounding, as independent errors add up, and all of it where
    the step made again is exactly 0.

    Args:
        gradients: of a step, in float32.
        again: of the step made again; those that are absent are 0.
        rounding: share that rounding leaves.
    """
    pairs = {r: (x, again[r].float() if r in again else x * 0) for r, x in gradients.items()}
    dot = sum(float((x * y).sum()) for x, y in pairs.values())
    norm = sum(float(y.square().sum()) for _, y in pairs.values())
    if not (dot > 0 and norm > 0 and math.isfinite(dot / norm)):
        return 1.0, {}
    remainder = {r: x * (norm / dot) - y for r, (x, y) in pairs.items()}
    whole = sum(float(x.square().sum()) for x in gradients.values()) * (norm / dot) ** 2
    rest = sum(float(one.square().sum()) for one in remainder.values())
    share = min(1.0, math.sqrt(rest / whole))
    above = math.sqrt(1 - (rounding / share) ** 2) if share > rounding else 0.0
    for role, one in remainder.items():  # rounding leaves an exact 0 as it is
        remainder[role] = torch.where(pairs[role][1] == 0, one, one * above)
    remainder = {role: one for role, one in remainder.items() if bool(one.any())}
    return share * (share > EXACT), remainder


class Controls:
    """Give the attacks of a run the controls of its looks.

    Args:
        run: the run.
        series: the channel of each series.

    Attributes:
        needs: by the name of a family, what a control must exceed: the highest threshold of its
            gates.
    """

    def __init__(self, run: Run, series: Mapping[Series, Channel]) -> None:
        self._run = run
        self._series = series
        self._channels = {one.attack: channel for one, channel in series.items()}
        config = getattr(without_peft(run.anatomy.model), "config", None)
        self._special = special_ids(config, run.tokenizers)
        self._newest: dict[str, _Newest] = {}
        self._has_warned = False
        # There is no gradient before what a defence does to a batch or to hidden states.
        self._replaced = any(d.acts_on_batches or d.activation_layers for d in run.defenses)
        self.needs: dict[str, float] = {}
        self._together = run.processes > 1 and (run.client == "world" or run.is_sharded)
        # Under DP the moments of controls must not depend on the data.
        self._by_cadence = bool(accounting(run.defenses))

    def play(self, moment: Moment, plans: Sequence[Plan]) -> None:
        """Give attacks that have read a step its control, where one is due.

        Args:
            moment: after which the optimizer steps; the attacks have answered.
            plans: of the attacks that read gradients.
        """
        look = moment.look
        optimizers = (None, moment.optimizer)  # None: the attack reads no parameter of the model
        stepped = [p for p in plans if moment.optimizer is None or p.optimizer in optimizers]
        scored = [plan for plan in stepped if self._is_scored(plan)]
        due = [p for p in scored if self._anywhere(self.may_play(p) and self._is_due(look, p))]
        if not due:
            return
        try:
            self._play(moment, due, scored)
        except Exception as error:
            why = reason(error)
            for plan in due:
                self._keep(look, plan, Control(self._nothing(plan), why=why))

    def _anywhere(self, here: bool) -> bool:
        """Return whether something is true here, or on another process that makes this control too.

        Where the processes are one client, or share a sharded model, all make each of its gradients
        or none does.
        """
        return self._run.on_any_process(here) if self._together else here

    def may_play(self, plan: Plan) -> bool:
        """Return whether an attack is given controls."""
        name = plan.attack.name
        return self._is_scored(plan) and gives_control(self._channels[name], name)

    def _is_scored(self, plan: Plan) -> bool:
        """Return whether an attack reads what a step is made again for, and is scored by it."""
        channel = self._channels.get(plan.attack.name)
        if channel is None or not plan.exposed or not channel.controlled:
            return False
        return bool(plan.roles) or channel.controls_states

    def _is_due(self, look: Look, plan: Plan) -> bool:
        """Return whether an attack's number of this look needs a control of this look.

        The first one does, and one that is lower than it last was, or below :data:`FALL` of the
        last control. Where there is no number yet, none is needed.
        """
        newest = self._newest.get(plan.attack.name)
        if self._by_cadence:
            return newest is None or look.scope is None
        if newest is None:
            answers = [look.answers.get(s) for s in self._series if s.attack == plan.attack.name]
            return not all(isinstance(answer, Waiting) for answer in answers)
        number = self._number(look, plan)
        last, newest.number = newest.number, number
        return math.isnan(newest.control) or number < last or number < FALL * newest.control

    def _number(self, look: Look, plan: Plan) -> float:
        """Return the lowest number of an attack at the stages of this look; 0 without one."""
        channel = self._channels[plan.attack.name]
        answers = (look.answers.get(s) for s in self._series if s.attack == plan.attack.name)
        known = [a for a in answers if a is not None and not isinstance(a, Unknown | Waiting)]
        try:
            rates = [channel.rates_now(look, plan, answer) for answer in known]
        except Exception:  # the attack's own failure, as its result says
            return 0.0
        numbers = (each.get(channel.headline, math.nan) for each in rates)
        return min((number for number in numbers if not math.isnan(number)), default=0.0)

    def _play(self, moment: Moment, plans: Sequence[Plan], scored: Sequence[Plan]) -> None:
        """Make the step again, and ask attacks about known words.

        Args:
            moment: after which the optimizer steps.
            plans: of the attacks whose control is due.
            scored: of all attacks that are scored by the words of this step.
        """
        look = moment.look
        step, shuffled = self._draws(look)
        share, remainder = self._remainder(moment, plans, step)
        rests = [head.rest for read in step.reads for head in read.call.read_heads]
        share = max([share, *(rest.share for rest in rests if rest is not None)])
        if self._anywhere(share > MAX_UNEXPLAINED):  # of the gradient, or of a call's labels
            look.unexplained = share
            self._doubt(look, scored)
            return
        likely = [p for p in plans if getattr(p.attack, "prefers_likely_texts", False)]
        if others := [plan for plan in plans if plan not in likely]:
            self._ask(look, others, shuffled, remainder)
        for plan in likely:
            self._keep(look, plan, Control(self._nothing(plan), why=_LIKELY_TEXTS))

    def _draws(self, look: Look) -> tuple[Draw, list[Draw]]:
        """Return the step's own words, and those of its controls.

        Raises:
            UnusableObservation: its calls are not known, on this process or on another one.
        """
        reads, failure = [*look.calls, *look.current], look.truth_error
        generator = torch.Generator().manual_seed(1_000_003 * look.step + self._run.rank)
        step, shuffled, uneven = Draw([], []), list[Draw](), False
        try:
            if not reads:
                raise UnusableObservation("the step's calls were not read")
            step = Draw.of_step(reads)
            shuffled = [draw_words(reads, self._special, generator, sizes_go_with_words=False)]
            uneven = is_uneven(reads)
        except Exception as error:
            failure = failure or reason(error)
        n_calls = torch.tensor(len(reads), device=self._run.device)
        if self._together and int(self._run.summed(n_calls)) != len(reads) * self._run.processes:
            failure = failure or "processes made different numbers of calls"
        if self._anywhere(failure is not None):
            raise UnusableObservation(failure or _ELSEWHERE)
        if self._anywhere(uneven):
            shuffled += [draw_words(reads, self._special, generator, sizes_go_with_words=True)]
        return step, shuffled

    def _remainder(
        self, moment: Moment, plans: Sequence[Plan], step: Draw
    ) -> tuple[float, dict[str, Tensor]]:
        """Return which share of gradients the step made again leaves, and what of each of them.

        What is left is in units of the step made again. The share is 0 where there is nothing to
        compare, or the step cannot be made again.
        """
        look, view = moment.look, self._before_defenses(moment)
        roles = dict.fromkeys(role for plan in plans for role in plan.roles)
        if self._anywhere(view is None or self._replaced) or view is None or not roles:
            return 0.0, {}
        try:
            again = self._again(look, plans, step)
        except Exception as error:
            if not self._has_warned:
                self._has_warned = True
                rank_zero_info(
                    f"{self._run.watcher}: a step is not made again ({reason(error)}), so that "
                    "controls do not show what happened to its gradient after the backward"
                )
            return 0.0, {}
        gradients = {role: view.tensors[role].float() for role in roles if role in view.tensors}
        rounding = self._rounding(view, step, roles)
        share, remainder = _explain(gradients, again, rounding)
        if self._anywhere(share > rounding):  # a device may not compute the same twice
            floats = {role: one.float() for role, one in again.items()}
            noise = _explain(floats, self._gradient(look, plans, step, {}).tensors)[0]
            share, remainder = _explain(gradients, again, max(rounding, 2 * noise))
        if any(bool(gradient.any()) for gradient in gradients.values()):
            look.unexplained = max(share, 0.0 if math.isnan(look.unexplained) else look.unexplained)
            return share, remainder
        return 0.0, {}

    def _before_defenses(self, moment: Moment) -> GradientSnapshot | None:
        """Return what a step, or a round, left before any defence; None where it was not seen."""
        look, view = moment.look, moment.look.undefended
        is_round = look.local is not None and not (self._run.defenses or look.compression)
        if view is None and (Stage.LOCAL in moment.stages or is_round):
            newest = moment.gradients()
            view = newest if isinstance(newest, GradientSnapshot) else None
        return view

    def _rounding(self, view: GradientSnapshot, step: Draw, roles: Iterable[str]) -> float:
        """Return the share of a gradient that rounding leaves where its step is made again.

        Here the same numbers come out again. Rounded are sums over processes, and rows of logits
        that were not seen: of a whole model that is compiled, and of a head that is not called.
        """
        anatomy, heads = self._run.anatomy, [read.call.read_heads for read in step.reads]
        of_head = set(map(id, () if anatomy.head is None else anatomy.head.parameters()))
        reads_head = any(id(anatomy.parameter(role)) in of_head for role in roles)
        reads_states = any(head.source == "states" for calls in heads for head in calls)
        if all(heads) and not self._together and not (reads_head and reads_states):
            return EXACT
        policies = self._run.policies.values()
        dtypes = {tensor.dtype for tensor in view.tensors.values()}
        dtypes |= {read.call.autocast for read in step.reads if read.call.autocast is not None}
        dtypes |= {p.param_dtype for p in policies} | {p.reduce_dtype for p in policies}
        return max((ROUNDING.get(dtype, EXACT) for dtype in dtypes), default=EXACT)

    def _again(self, look: Look, plans: Sequence[Plan], step: Draw) -> Mapping[str, Tensor]:
        """Return the gradients of the step made again, by role.

        Raises:
            UnusableObservation: it cannot be made again, or not with the same random numbers.
        """
        again = self._gradient(look, plans, step, {}).tensors
        if all(read.call.random for read in step.reads):
            return again
        devices = [self._run.device] if self._run.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(look.step + 1)
            other = self._gradient(look, plans, step, {}).tensors
        if _explain({role: one.float() for role, one in again.items()}, other)[0] > 0:
            raise UnusableObservation("the random numbers of its dropout are not known")
        return again

    def _doubt(self, look: Look, plans: Sequence[Plan]) -> None:
        """Let no low number of a look count, since its words may be those of another step."""
        why = (
            f"the step made again leaves {look.unexplained:.0%} of the gradient unexplained, so "
            "that the words may not be those of this step: a batch that is not what was trained on "
            "(pass settings=WatchSettings(batch_adapter=...)), or a gradient that was changed "
            "after the backward"
        )
        for plan in plans:
            self._keep(look, plan, Control(self._nothing(plan), why=why))

    def _ask(
        self,
        look: Look,
        plans: Sequence[Plan],
        draws: Sequence[Draw],
        remainder: Mapping[str, Tensor],
    ) -> None:
        """Ask attacks about the known words of some draws, and about parts where they read few."""
        found: dict[str, list[Mapping[str, float] | Unknown | Waiting]] = {}
        for draw in draws:
            view = self._gradient(look, plans, draw, remainder)
            for plan in plans:
                found.setdefault(plan.attack.name, []).append(self._rates(plan, view, draw, look))
        low = []
        for plan in plans:
            control, is_low = self._lowest(look, plan, found[plan.attack.name]), False
            if control is not None:
                self._keep(look, plan, control)
                channel = self._channels[plan.attack.name]
                is_low = not control.rates.get(channel.headline, math.nan) > self._need(channel)
            if self._anywhere(is_low):
                low.append(plan)
        if low:
            self._play_parts(look, low, draws[-1], remainder)

    def _rates(
        self, plan: Plan, view: GradientSnapshot, draw: Draw, look: Look
    ) -> Mapping[str, float] | Unknown | Waiting:
        try:
            return self._channels[plan.attack.name].control_rates(plan, view, draw, look.step)
        except Exception as error:
            return Unknown(reason(error))

    def _gradient(
        self, look: Look, plans: Sequence[Plan], draw: Draw, remainder: Mapping[str, Tensor]
    ) -> GradientSnapshot:
        """Return the gradient of a control; the mean over processes if they are one client.

        It is empty where all attacks read hidden states alone.

        Args:
            look: the look.
            plans: of the attacks that read it.
            draw: the known words.
            remainder: by role, what the step made again leaves of the gradient, which is added.

        Raises:
            UnusableObservation: it cannot be made, on this process or on another one.
        """
        run, why, step = self._run, _ELSEWHERE, look.step
        roles = tuple(dict.fromkeys(role for plan in plans for role in plan.roles))
        if not roles:
            return GradientSnapshot(step, Stage.LOCAL, {}, client=run.number)
        view: GradientSnapshot | None = None
        call = run.anatomy, draw, roles
        try:
            if look.local is None:
                fails = run.on_any_process if run.is_sharded else bool
                view = control_gradient(*call, step=step, scale=run.loss_scale, fails=fails)
            else:
                cut = run.clip_value
                view = control_update(
                    *call, look.local, step=step, scale=run.loss_scale, clip_value=cut
                )
        except Exception as error:
            why = reason(error)
        if self._anywhere(view is None) or view is None:
            raise UnusableObservation(why)
        if run.client == "world" and run.processes > 1:
            tensors = {}
            for role in roles:
                if self._anywhere(role in view.tensors):
                    gradient = view.tensors.get(role, self._zeros(role))
                    tensors[role] = run.reduced(role, gradient)
            view = replace(view, tensors=tensors)
        added = {
            role: (view.tensors[role] + x).to(view.tensors[role]) if role in view.tensors else x
            for role, x in remainder.items()
        }
        view = replace(view, tensors={**view.tensors, **added})
        rounding = run.rounding(len(draw.reads))
        return replace(view, client=run.number, rounding=rounding)

    def _zeros(self, role: str) -> Tensor:
        """Return the gradient of a parameter on a process whose part of a batch has no label."""
        parameter = self._run.anatomy.parameter(role)
        assert parameter is not None
        shape = getattr(parameter, "ds_shape", parameter.shape)  # of a shard of ZeRO-3 the whole
        return torch.zeros(shape, dtype=parameter.dtype, device=self._run.device)

    def _lowest(
        self, look: Look, plan: Plan, found: Sequence[Mapping[str, float] | Unknown | Waiting]
    ) -> Control | None:
        """Return the lowest control of the draws; None where the undefended step has no result."""
        names = [s for s in self._series if s.attack == plan.attack.name]
        if waits := next((one for one in found if isinstance(one, Waiting)), None):
            # What noise is on the stages behind it says nothing of the words.
            look.answers |= dict.fromkeys(names, waits)
            return None
        if failed := next((one for one in found if isinstance(one, Unknown)), None):
            return Control(self._nothing(plan), why=failed.why)
        rates = [one for one in found if isinstance(one, Mapping)]
        return Control({name: min(one[name] for one in rates) for name in rates[0]})

    def _play_parts(
        self, look: Look, plans: Sequence[Plan], whole: Draw, remainder: Mapping[str, Tensor]
    ) -> None:
        """Ask attacks whose control is low about parts of it, until one is read or none is left.

        Where an attack reads a part, the whole holds more than it can distinguish.
        """
        counts = torch.stack([(shapes[0] != 0).sum() for shapes in whole.shapes]).sum()
        n_labels = int(self._run.summed(counts) / self._run.processes if self._together else counts)
        low = list(plans)
        while low and n_labels > LEAST_LABELS:
            n_labels = max(n_labels // SMALLER, LEAST_LABELS)
            part = whole.first(n_labels)
            view = self._gradient(look, plans, part, remainder)
            still = []
            for plan in low:
                channel = self._channels[plan.attack.name]
                rates = self._rates(plan, view, part, look)
                need = max(self._need(channel), default_limit(channel.leak.chance))
                known = rates if isinstance(rates, Mapping) else {}
                is_read = known.get(channel.headline, math.nan) > need
                if is_read and plan.attack.name in look.controls:
                    control = look.controls[plan.attack.name]
                    self._keep(look, plan, replace(control, part=known))
                if self._anywhere(not is_read):
                    still.append(plan)
            low = still

    def _keep(self, look: Look, plan: Plan, control: Control) -> None:
        look.controls[plan.attack.name] = replace(control, unexplained=look.unexplained)
        number = self._number(look, plan)
        value = control.rates.get(self._channels[plan.attack.name].headline, math.nan)
        self._newest[plan.attack.name] = _Newest(value, number)

    def state(self) -> dict[str, list[float]]:
        """Return each attack's newest control, and the number that it had then or later."""
        return {name: [one.control, one.number] for name, one in self._newest.items()}

    def restore(self, state: Mapping[str, Sequence[float]]) -> None:
        """Go back to what :meth:`state` returned."""
        self._newest = {name: _Newest(*values) for name, values in state.items()}

    def _need(self, channel: Channel) -> float:
        """Return what a control must exceed for a low number to count."""
        return self.needs.get(channel.family, default_limit(channel.leak.chance))

    def _nothing(self, plan: Plan) -> dict[str, float]:
        return dict.fromkeys(self._channels[plan.attack.name].metrics, math.nan)
