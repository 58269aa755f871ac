"""One run of an engine: its taps, the truth of its steps, and the look at work."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_fedleak.defenses import Defense, DefenseContext
from lightning_fedleak.defenses.dp_optimizers import OptimizerDP
from lightning_fedleak.defenses.processes import reshard
from lightning_fedleak.engine.channels.base import Channel
from lightning_fedleak.engine.channels.control import Controls
from lightning_fedleak.engine.channels.exchange import Exchange
from lightning_fedleak.engine.lineup import Lineup
from lightning_fedleak.engine.options import Options
from lightning_fedleak.engine.outcomes import Series, Unknown
from lightning_fedleak.engine.record import accounting
from lightning_fedleak.engine.run import (
    AUTOCAST,
    BeforeDefense,
    Look,
    Moment,
    Refusal,
    Run,
    StageReached,
    reason,
)
from lightning_fedleak.engine.scheduler import Phase, Scheduler
from lightning_fedleak.messages import rank_zero_info
from lightning_fedleak.model.anatomy import matrix_shape, placeholder_ids, without_peft
from lightning_fedleak.model.batches import (
    BatchAdapter,
    BatchError,
    TokenBatch,
    adapter_to_copy,
    read_batch,
)
from lightning_fedleak.model.compression import AVERAGED
from lightning_fedleak.model.snapshots import GradientSnapshot, Stage, UnusableObservation, shaped
from lightning_fedleak.model.taps import (
    MEDIA,
    EncoderTap,
    GradientTap,
    GraphCall,
    GraphTap,
    PackedRows,
    ReadCall,
    is_uneven,
    plain_call,
    random_states,
    read_call,
    read_encoder_call,
    without_placeholders,
)

_NO_GRADIENT = (
    "the forward of its output head was not called, or its logits got no gradient (a fused or "
    "chunked loss?)"
)


class _StepTruth:
    """Read which ids and labels a step was computed on, and what the step did with them.

    They are read off the step's own forward and backward, so that the form of the user's batch
    does not matter. The batch is read where the head's forward is not called, and where a defence
    replaces its tokens on the way to the model.

    Args:
        run: the run.
        adapter: turns the user's batch into a :class:`TokenBatch`; None reads the known forms.
    """

    def __init__(self, run: Run, adapter: BatchAdapter | None) -> None:
        self._run = run
        self._adapter = adapter
        embeds = run.anatomy.head is None and run.anatomy.kind == "classifier"
        self._graph = EncoderTap(run.anatomy) if embeds else GraphTap(run.anatomy, run.temperature)
        config = getattr(without_peft(run.anatomy.model), "config", None)
        self._placeholders = placeholder_ids(config)
        self._read_call = read_encoder_call if embeds else read_call
        replacing = next((d.name for d in run.defenses if d.acts_on_batches), None)
        self._why_not = self._graph.why_not
        if replacing is not None:
            self._why_not = f"the defence '{replacing}' replaces tokens on their way to the model"
        self._rows: PackedRows | None = None
        self.is_first = self.is_unchecked = True
        self._said: set[str] = set()
        self._random: tuple[Tensor, ...] = ()
        self._unreadable: Exception | None = None

    def close(self) -> None:
        """Remove every hook."""
        self._graph.close()
        if self._rows is not None:
            self._rows.close()
        self._rows = None

    def check_first(self, batch: Any) -> None:
        """Refuse a first batch that can be read nowhere, on all processes at once.

        Raises:
            BatchError: shows an adapter to copy.
        """
        self.is_first = False
        try:
            self.read(batch)
        except Exception as error:
            self._unreadable = error
            if self._adapter is None and batch is not None:
                code = adapter_to_copy(batch, self._run.anatomy.kind, self._run.watcher)
                self._unreadable = BatchError(f"{error}\n{code}")
        self._refuse_anywhere(
            needed=self._why_not is not None or batch is None or self._adapter is not None
        )

    def _refuse_anywhere(self, *, needed: bool) -> None:
        """End the run where a process needs its first batch, and could not read it."""
        if self._run.on_any_process(needed and self._unreadable is not None):
            other = BatchError("another process could not read its first batch")
            raise Refusal(self._unreadable or other)

    def read(self, batch: Any) -> TokenBatch:
        """Return the ids, labels and mask of the user's batch.

        Raises:
            BatchError: its form is not known.
        """
        if batch is None:
            raise BatchError(
                "the batch is not known before training_step. A step that takes dataloader_iter "
                "cannot be watched: write training_step(self, batch, batch_idx)."
            )
        if self._adapter is not None:
            return self._adapter(batch)
        return read_batch(batch, self._run.anatomy.kind)

    # ---- a look -----------------------------------------------------------------------------

    def arm(self) -> None:
        """Record the calls of the model from now on, unless their graph cannot be read."""
        if self._why_not is None:
            self._graph.arm()

    def disarm(self) -> None:
        """Remove the hooks of a step, and forget its calls."""
        self._graph.close()

    def batch_begins(self, look: Look, batch: Any) -> None:
        """Keep the batch of a look as it is before any defence acts."""
        # Compiled dropout draws other numbers than a step that is made again.
        self._random = () if self._graph.why_not else random_states(self._run.anatomy.device)
        look.current, look.batch, look.batch_error = [], None, None
        self._graph.labels = None
        try:
            look.batch = tokens = self.read(batch)
            self._graph.labels = tokens.labels
            if tokens.documents is not None and self._why_not is not None:
                self._rows = self._rows or PackedRows(self._run.anatomy, self._run.forward_context)
                self._rows.watch(tokens)
        except Exception as error:
            look.batch_error = reason(error)

    def settle(self, look: Look) -> None:
        """Read what the step did with its batch, once its backward is over."""
        if look.truth_error is not None:
            return
        try:
            with look.clock(self._run.device):
                calls = [] if self._why_not is not None else self._graph.take(look.batch)
                if calls:
                    look.current += self._of_calls(look, calls)
                elif not look.current and look.batch is not None:
                    look.current = [self._of_batch(look, look.batch)]
                elif not look.current and look.batch_error is not None:
                    look.truth_error = look.batch_error
        except Exception as error:
            look.truth_error = reason(error)

    def _of_calls(self, look: Look, calls: list[GraphCall]) -> list[ReadCall]:
        """Return the calls with the truth that their graph shows, or else the batch as read."""
        kind, read = self._run.anatomy.kind, look.batch
        try:
            reads = [self._read_call(call, kind, read) for call in calls]
        except BatchError as error:
            if read is None:
                raise
            self._say(f"the labels of a step are read off its batch: {error}")
            return [self._of_batch(look, read)]
        for i, one in enumerate(reads):
            if one.batch.crossing is None and one.batch.is_packed:
                self._rows = self._rows or PackedRows(self._run.anatomy, self._run.forward_context)
                batch = self._rows.with_crossing(one.batch, [one.call.arguments])
                reads[i] = replace(one, batch=batch)
        self._say("the labels and inputs of a step are read off its own graph")
        for name in (name for call in calls for name in call.arguments if name.startswith(MEDIA)):
            beside = f"the images or sounds that the model reads: {name}"
            self._say(f"the text of a step is looked for, and nobody asks about {beside}")
        [*others, last] = reads
        ids = last.call.ids
        if not others and ids is not None and last.batch.input_ids.shape == ids.shape:
            look.batch = last.batch
        return reads

    def _of_batch(self, look: Look, batch: TokenBatch) -> ReadCall:
        """Return the batch as it was read."""
        self._say(f"the labels of a step are read off its batch: {self._why_not or _NO_GRADIENT}")
        if self._rows is not None:
            batch = self._rows.with_crossing(batch)
        look.batch = batch
        dtype = AUTOCAST.get(self._run.precision)
        return plain_call(self._run.anatomy, batch, dtype, self._random)

    def _say(self, sentence: str) -> None:
        """Log a sentence about where the truth comes from, once for each kind of it."""
        kind = sentence.partition(":")[0]
        if kind not in self._said:
            self._said.add(kind)
            rank_zero_info(f"{self._run.watcher}: {sentence}")

    def batch_ends(self, look: Look, *, trained: bool) -> TokenBatch | None:
        """Add the batch at work to those of the look; return it, None where it trained nothing."""
        held = None
        if trained:
            self.settle(look)
            held = look.batch if look.current else None
            for read in look.current:
                self.check(read.batch, look)
            look.calls += look.current
        look.current, look.batch, look.batch_error = [], None, None
        return held

    def check_unread(self, look: Look) -> None:
        """Refuse, at the end of the first look, a batch that neither its graph nor itself shows.

        Raises:
            BatchError: shows an adapter to copy.
        """
        self.is_unchecked = False
        self._refuse_anywhere(needed=look.truth_error is not None)

    def check(self, batch: TokenBatch, look: Look) -> None:
        """Add a batch to a look, unless its values contradict each other: then it is unknown."""
        rows = matrix_shape(self._run.anatomy.embedding)
        try:
            with look.clock(self._run.device):
                batch.check_values(None if rows is None else rows[0], self._run.anatomy.vocab_size)
            held = self._placeholders
            look.batches.append(without_placeholders(batch, held) if held else batch)
        except Exception as error:
            look.truth_error = reason(error)


class Fit:
    """Hold everything of an engine that lives only as long as one run, and capture its gradients.

    Args:
        run: the run; its strategy is set up, and its channels are open.
        lineup: the attacks that are played.
        options: how the run is watched.
        series: the channel of each series, in the order of the logs.
        channels: those that have attacks.

    Attributes:
        run, lineup, series, channels: as above.
        scheduler: decides which steps are looked at.
        controls: gives attacks the control of a look.
        truth: reads what steps were computed on.
        exchange: pools the results of all processes.
        accounting: the defences that account for what they release.
        look: the one at work; None between looks.
        trained: names of the parameters that were trained when the plans were made.
        failure: why the look at work, or the next one, has no result; None where nothing failed.
    """

    def __init__(
        self,
        run: Run,
        lineup: Lineup,
        options: Options,
        series: Mapping[Series, Channel],
        channels: Sequence[Channel],
    ) -> None:
        self.run = run
        self.lineup = lineup
        self.series = series
        self.channels = tuple(channels)
        self.scheduler = Scheduler(run, options.cadence, series)
        self.controls = Controls(run, series)
        self.truth = _StepTruth(run, options.batch_adapter)
        self.exchange = Exchange(run, series)
        self.accounting = accounting(run.defenses)
        self.look: Look | None = None
        self.failure: str | None = None
        self._stages = options.stages
        self._watches_steps = False
        self._removers: list[Callable[[], None]] = []
        self._tapped: set[int] = set()
        self.trained: tuple[str, ...] = ()
        self._tap = GradientTap({})

    def calibrate(
        self,
        restored: Mapping[str, object],
        stage_reached: StageReached,
        before_defense: BeforeDefense,
    ) -> None:
        """Install the taps and calibrate the attacks, see :meth:`Lineup.calibrate`.

        Args:
            restored: of a checkpoint, by the attack's name.
            stage_reached: is called where ``p.grad`` is what an optimizer is about to step with.
            before_defense: is called with what a defence is about to get.

        Raises:
            ValueError: an attack does not fit the model.
        """
        try:
            if self.run.unit == "step":
                self._removers += self.run.watch_release(stage_reached, before_defense)
                self._watches_steps = True
            self.follow()
        except Exception:
            self.close()
            raise
        self.lineup.calibrate(restored, self.follow)

    @property
    def keeps_local(self) -> bool:
        """Return whether a tap keeps gradients, since DDP reduces them before they can be read."""
        per_rank = self.run.under_ddp and self.run.client == "rank"
        return self._watches_steps and per_rank and not self.run.separates_stages

    def follow(self) -> bool:
        """Follow what is trained now, and return whether something else is read than before."""
        self.trained = self.lineup.trained
        anatomy = self.run.anatomy
        with shaped(anatomy.root.parameters()):
            changed = self.lineup.follow()
        roles = dict.fromkeys(r for plan in self.lineup.exposed for r in plan.roles)
        parameters = {r: p for r in roles if (p := anatomy.parameter(r)) is not None}
        tapped = {id(p) for p in parameters.values()}
        if tapped == self._tapped and (not changed or self.look is not None):
            return changed  # what is recorded, and the copies of a look, stay
        self._tapped = tapped
        self._tap.close()
        self._tap = GradientTap(parameters, self.run.gradient_of, tied=anatomy.tied)
        if self.keeps_local:
            self._tap.keep_local()
        return True

    def close(self) -> None:
        """Remove every tap but those of the channels, which their engine closes."""
        removers, self._removers = self._removers, []
        self.each(*removers, self._tap.close, self.truth.close)
        self.look = None

    def fail(self, error: Exception) -> None:
        """Let the look at work, or the next one, have no result, because of an error of ours."""
        self.failure = self.failure or reason(error)

    def each(self, *functions: Callable[[], object]) -> None:
        """Call all of the functions, whatever one of them raises."""
        for function in functions:
            try:
                function()
            except Exception as error:
                self.fail(error)

    # ---- a look begins and ends -------------------------------------------------------------

    def begin_look(self, step: int) -> None:
        """Start a look where one is due: arm the taps, and let its attacks follow the model."""
        if self.look is not None:
            return
        exposed = {plan.attack.name for plan in self.lineup.exposed}
        look = self.scheduler.due_look(step, exposed)
        if look is None:
            return
        self.look = look
        self.run.spent.clear()  # of a look that was not written
        with look.clock(self.run.device):
            if look.scope is None:
                if self.lineup.is_sharded:  # an evaluation leaves layers of FSDP2 whole
                    reshard(self.run.anatomy.root)
                with shaped(self.run.anatomy.root.parameters()):
                    self.follow()
                    self.refresh(look)
            self._tap.arm()
            self.truth.arm()
            for channel in self.channels_in(look):
                channel.arm()

    def end_look(self, look: Look) -> None:
        """End a look: the taps rest until the next one."""
        self.look = None
        self.each(self._tap.disarm, self.truth.disarm)
        self.disarm(look)

    def disarm(self, look: Look) -> None:
        """Let the channels free what a look used."""
        self.each(*(partial(channel.disarm, look) for channel in self.channels))

    def drop_look(self) -> None:
        """Forget a look that failed, with its hooks in the user's forward."""
        self.look = None
        self.each(self.truth.disarm)

    def channels_in(self, look: Look) -> list[Channel]:
        """Return the channels that a look is of."""
        if look.scope is None:
            return [*self.channels]
        return [c for c in self.channels if any(self.series[s] is c for s in look.scope)]

    def refresh(self, look: Look) -> None:
        """Let the attacks that a look is of follow the model, once in a look."""
        if look.followed:
            return
        look.followed = True
        scope = self.series if look.scope is None else look.scope
        look.seconds += self.lineup.calibrating_seconds  # which are no look's
        failed = self.lineup.refresh(look.step, {series.attack for series in scope})
        look.seconds -= self.lineup.calibrating_seconds
        for series in scope:
            if series.attack in failed:
                look.answers[series] = Unknown(failed[series.attack])

    def admit_held(self, look: Look) -> None:
        """Let attacks that are held choose themselves where labels weigh unevenly in the loss.

        Under DP none does, since the moment would depend on the data.
        """
        waiting = self.lineup.held
        if look.scope is not None or self.accounting:
            return
        reads = [read for read in (*look.calls, *look.current) if read.placed is not None]
        if self.run.on_any_process(bool(reads) and is_uneven(reads)):
            self.lineup.held = set()
            self.follow()
            self.lineup.refresh(look.step, waiting)

    # ---- what is captured -------------------------------------------------------------------

    def note_defense(self, defense: Defense, context: DefenseContext) -> None:
        """Note what noise a defence adds to the look at work."""
        if self.look is None:
            return
        try:
            std = defense.noise_std(context)
            all_of_it = isinstance(defense, OptimizerDP)  # whatever was there before it
            self.look.noise_std = std if all_of_it else math.hypot(self.look.noise_std, std)
        except Exception:
            self.look.noise_std = math.nan

    def owns(self, optimizer: Optimizer) -> bool:
        """Return whether an optimizer takes the steps of what the attacks read."""
        owners = [p.optimizer for p in self.lineup.exposed if p.optimizer is not None]
        return not owners or any(o is optimizer for o in owners)

    def moment(
        self, stages: tuple[Stage, ...], optimizer: Optimizer, *, kept: bool = False
    ) -> Moment | None:
        """Return a gradient that is the same at all of ``stages``; None where no look reads it.

        Args:
            stages: at all of which the gradient is now.
            optimizer: that is about to step.
            kept: the gradient is what the tap has kept before DDP reduced it.
        """
        if not self.owns(optimizer):
            return None
        self.scheduler.phase = Phase.STEPPED
        look = self.look
        if look is None or id(optimizer) in look.stepped:
            return None
        if look.step_seconds == 0:
            look.step_seconds = time.perf_counter() - look.started - look.seconds
        scale = self.run.loss_scale
        alone = self.run.client == "world" or Stage.SHARED in stages
        clients = 1 if alone else self.run.processes  # whose noise is independent, and averaged
        wanted = tuple(s for s in stages if s in self._stages)
        if Stage.LOCAL in stages and Stage.AGGREGATE not in stages:
            look.undefended = self._undefended(look, optimizer, kept=kept)

        def take() -> GradientSnapshot:
            if (why := self.run.why_hidden(wanted, optimizer)) is not None:
                raise UnusableObservation(why)
            view = self._tap.view(
                look.step,
                wanted[0],
                copies=kept,
                client=self.run.number,
                scale=scale if kept else 1.0,
            )
            return replace(
                view,
                noise_std=0.0 if Stage.LOCAL in stages else look.noise_std / clients**0.5,
                compression=AVERAGED if look.compression and clients > 1 else look.compression,
                rounding=self.run.rounding(len(look.all_batches)),
            )

        return Moment(look, stages, wanted, optimizer, scale, take)

    def _undefended(
        self, look: Look, optimizer: Optimizer, *, kept: bool
    ) -> GradientSnapshot | None:
        """Return the local gradient of a look, which defences or a reduction are about to change.

        Args:
            look: the look.
            optimizer: that is about to step.
            kept: the gradient is what the tap has kept, which stays.
        """
        controlled = any(map(self.controls.may_play, self.lineup.exposed))
        if not controlled or self.run.why_hidden((Stage.LOCAL,), optimizer) is not None:
            return None
        try:
            view = self._tap.view(look.step, Stage.LOCAL, copies=kept)
        except Exception as error:
            self._tap.error = error  # for the attacks, which read it next
            return None
        copies = {name: one if kept else one.clone() for name, one in view.tensors.items()}
        return replace(view, tensors=copies)
