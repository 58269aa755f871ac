"""One training step of DP-SGD, from its batch to its release: recorded, looked at, clipped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

from torch import nn

from lightning_fedleak.defenses.base import DefenseContext
from lightning_fedleak.defenses.buffers import Buffers, Weights, is_ddp
from lightning_fedleak.defenses.dpsgd_checks import (
    count_samples,
    loss_with_graph,
    on_device,
    tensors_of,
)
from lightning_fedleak.defenses.per_sample import Clipping
from lightning_fedleak.defenses.recorder import TELLING, Recorder
from lightning_fedleak.defenses.sampling import Sampling
from lightning_fedleak.defenses.step_checks import (
    CHECK_EVERY,
    DrawnBatches,
    LossCheck,
    times_zero,
    zero_on_the_graph,
)
from lightning_fedleak.defenses.team import Team
from lightning_fedleak.defenses.update import ClippedSum, Moves


class WatchedStep:
    """Stands around the training steps of one fit, one after the other.

    Args:
        root: the module that is trained; hooks are put on its layers.
        team: the processes of this client.
        clip: largest norm of a sample's gradient.
        clipping: in which form per-sample gradients are kept.
        poisson: batches are Poisson samples.
        trusted: the user has proved that the loss is a mean of per-sample means.

    Attributes:
        check: looks at the loss.
        moves: looks at whether the weights move by a release.
        weights: looks at whether they move otherwise.
        canaries: how many were released beside this step.
        clip: largest norm of a sample's gradient.
    """

    def __init__(
        self,
        root: nn.Module,
        team: Team,
        *,
        clip: float,
        clipping: Clipping,
        poisson: bool,
        trusted: bool,
    ) -> None:
        self.check = LossCheck(trusted)
        self.moves = Moves()
        self.weights = Weights(CHECK_EVERY)
        self.canaries = 0
        self._team = team
        self.clip: float = clip
        self._clipping: Clipping = clipping
        self._batches = DrawnBatches(poisson)
        self._recorder = Recorder(root)
        self._clipped: ClippedSum | None = None
        self._stands_in = False
        self._refused: Exception | None = None
        self._compared: int | None = None

    def adopt(self) -> None:
        """Learns anew which parameters hang on which layer; to be called before training."""
        self._recorder.adopt()
        self.weights.restart()

    def given(self, batch: Any, sampling: Sampling, context: DefenseContext) -> Any:
        """The batch to run: one example that does not count in the place of none."""
        self._stands_in, self._refused = False, None
        try:
            if count_samples(batch) == 0:
                batch = on_device(sampling.placeholder(), context)
                self._stands_in = True
        except Exception as error:  # raised with the other processes, in `run`
            self._refused = error
        return batch

    def run(
        self,
        training_step: Callable[[], Any],
        batch: Any,
        sampling: Sampling,
        releases: int,
        context: DefenseContext,
    ) -> Any:
        """Records the forward pass and looks at the loss; an empty batch gives a loss of zero.

        Args:
            training_step: of the module.
            batch: that it gets.
            sampling: how it was drawn.
            releases: how many were made.
            context: where.

        Returns:
            What ``training_step`` gave, with a loss of zero where the batch does not count.

        Raises:
            DefenseError: there is no loss with a graph, it is not a mean of per-sample means,
                samples are mixed, a buffer was changed, or weights are not finite; here or in
                another process.
        """
        recorder, team = self._recorder, self._team
        with team.together():
            if self._refused is not None:
                raise self._refused
            self._batches.begin(batch, context)
            self.weights.begin(context.root)
            samples = count_samples(batch)
            sampling.check_size(0 if self._stands_in else samples)
        self._clipped = None
        if samples == 0:
            recorder.clear()
            return zero_on_the_graph(context.root)
        contents = self._compared is None or releases >= self._compared + CHECK_EVERY
        self._compared = releases if contents else self._compared
        buffers = Buffers(context.root, contents=contents)
        sent = buffers.sent_first() if is_ddp(context) else nullcontext()
        # A batch of few samples, where most have more, may be joined as it is by chance.
        tells = samples >= TELLING or sampling.expected < 8
        given = tensors_of(batch) if tells else ()
        with recorder.step(samples, counts=not self._stands_in, given=given), sent:
            output = training_step()
        with team.together():
            recorder.check()
            buffers.check_unchanged()
            loss = loss_with_graph(output, samples)
            self.check.check_form(loss, recorder)
        self.check.look(loss, recorder, releases, team, counts=not self._stands_in)
        recorder.calls = []
        if self._stands_in:
            recorder.clear()
            return times_zero(output)
        return output

    def clipped(self, parameters: Sequence[nn.Parameter], context: DefenseContext) -> ClippedSum:
        """Norms and clip factors of this step's samples in this process; computed once.

        Raises:
            DefenseError: per-sample gradients could not be recorded.
        """
        if self._clipped is None:
            recorder = self._recorder
            recorder.check()
            self._clipped = ClippedSum(
                parameters,
                recorder.parts,
                recorder.samples,
                self.clip,
                self._clipping,
                context,
                half=recorder.half,
            )
        return self._clipped

    def released(self, releases: int, *, unchecked: bool = False) -> None:
        """It has left the client: lets go of all that was recorded.

        Args:
            releases: how many were made, with this one.
            unchecked: what is checked now and then could not be, and is to be in the next release.
        """
        self.weights.released(releases, self._recorder.positions, self._recorder.root)
        self._batches.released()
        self.canaries = 0
        self.check.unchecked = unchecked
        self._clipped = None
        self._recorder.clear()

    def remove(self) -> None:
        """Takes the hooks out."""
        self._recorder.remove()
        self.weights.remove()


__all__ = ["WatchedStep"]
