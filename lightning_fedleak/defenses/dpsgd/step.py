"""One training step of DP-SGD: its batch, its forward pass and loss, and its clipped sum."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch import config as functorch
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from lightning_fedleak.defenses.base import CanaryGradient, DefenseContext, DefenseError, refuse
from lightning_fedleak.defenses.dpsgd import loss_graph
from lightning_fedleak.defenses.dpsgd.clipped_sum import Clip, ClippedSum, EarlierPieces
from lightning_fedleak.defenses.dpsgd.logical import pieces_of, run_pieces
from lightning_fedleak.defenses.dpsgd.poisson import Sampling, count_samples, tensors_of
from lightning_fedleak.defenses.dpsgd.recorder import SMALL_BATCH, Call, Layout, Recorder
from lightning_fedleak.defenses.dpsgd.weights import Buffers, Weights
from lightning_fedleak.defenses.host import Piece
from lightning_fedleak.defenses.processes import Team, unshard, whole_layers
from lightning_fedleak.model.model_runs import is_compiled, reset_compiled

CHECK_EVERY = 100  # releases; costly checks are made in the first and then so often. Not tuned
USUAL_SAMPLES = 8  # expected samples of a batch; below, rows are compared in small ones. Not tuned

StepForm = tuple[frozenset[tuple[str, Layout]], frozenset[tuple[str, str]]]
"""How layers were used in a step, and the operations of its loss."""


class DrawnBatches:
    """A check that every batch is released once, and alone."""

    def __init__(self) -> None:
        self._current: Any = None
        self._released: Any = None
        self._waiting = False

    def begin(self, batch: Any, context: DefenseContext) -> None:
        """Begin a batch.

        Raises:
            DefenseError: it was released already, or the one before it was not.
        """
        loaders, number = len(tree_leaves(context.host.loader)), context.host.batch_number
        if loaders > 1:
            raise DefenseError(
                f"DPSGD: {loaders} training loaders at once; an example is sampled from one. "
                "Return one DataLoader (torch.utils.data.ConcatDataset joins datasets)."
            )
        self._current = batch if number is None else number
        if self._released is not None and self._is_released():
            raise DefenseError(
                "DPSGD: this batch was released already (a second optimizer step on it, in an "
                "overridden optimizer_step perhaps). Take one optimizer step on each batch."
            )
        if self._waiting:
            raise DefenseError(
                "DPSGD: a second batch came before the first was released. Let every batch have "
                "its own optimizer step: a larger batch_size, of which "
                "DPSGD(max_physical_batch_size=...) runs a few rows at a time."
            )
        self._waiting = True

    def released(self) -> None:
        """Note that the current batch was released."""
        self._released, self._waiting = self._current, False

    def _is_released(self) -> bool:
        numbers = self._current, self._released
        if all(isinstance(number, int) for number in numbers):
            return bool(numbers[0] == numbers[1])
        return self._current is self._released


class LossCheck:
    """Checks of the loss: its form in every step, the graph when something is new and at times.

    Args:
        trusted: whether the user has proved that the loss is a mean of per-sample means.

    Attributes:
        unchecked: whether something in the step since the last release was new.
        form: what the last loss is a mean of.
    """

    def __init__(self, trusted: bool) -> None:
        self.unchecked = False
        self.form = loss_graph.FormCheck()
        self._trusted = trusted
        self._top: list[Call] = []
        self._checked_forms: set[StepForm] = set()
        self._last_check = 0

    def is_due(self, releases: int) -> bool:
        """Return whether the next release is to be checked for what is checked now and then."""
        return self.unchecked or releases % CHECK_EVERY == 0

    def check_form(self, loss: Tensor, recorder: Recorder) -> None:
        """Follow the graph from the loss down to the layers.

        Args:
            loss: scalar with a graph.
            recorder: holds the calls of this step's layers.

        Raises:
            DefenseError: it is not known to be a mean of per-sample means.
        """
        if self._trusted:
            self._top = loss_graph.outputs_of(loss, recorder.calls)
            self.form.separate, self.form.terms = True, recorder.samples
        else:
            self._top = self.form(loss, recorder.calls, recorder.samples)

    def check_graph(
        self, loss: Tensor, recorder: Recorder, releases: int, team: Team, *, counts: bool = True
    ) -> None:
        """Check that neither network nor loss mixes samples, if it is time to.

        All processes of the client check where one of them has to, because backward may be a
        collective.

        Args:
            loss: as in :meth:`check_form`, which comes first.
            recorder: the same.
            releases: how many were made.
            team: the processes of this client.
            counts: whether the samples of this process count.

        Raises:
            DefenseError: samples are mixed.
        """
        layouts = frozenset((call.name, call.layout) for call in recorder.calls if call.trained)
        form = layouts, self.form.form
        new = counts and (
            form not in self._checked_forms or releases >= self._last_check + CHECK_EVERY
        )
        due = new and recorder.samples > 1
        new, due, joint = map(bool, team.largest([new, due, not self.form.separate]))
        self.unchecked = self.unchecked or new
        top, self._top = self._top, []
        if not due:
            return
        with team.together(), recorder.paused():
            conclusive = loss_graph.check_isolation(
                loss_graph.under_ddp(loss),
                top,
                recorder.calls,
                recorder.samples,
                separate=not joint,
                # FSDP2 shards them after any backward, and not all of them know of the next one.
                restore=functools.partial(unshard, whole_layers(recorder.root)),
            )
        if recorder.samples == 1 or conclusive:
            self._last_check = releases
        if recorder.samples > 1 and conclusive:
            self._checked_forms.add(form)


class WatchedStep:
    """The training steps of one fit, one after the other, recorded and checked.

    Args:
        root: the module that is trained; hooks are put on its layers.
        team: the processes of this client.
        clip: how samples are clipped.
        trusted: whether the user has proved that the loss is a mean of per-sample means.
        max_rows: rows that are run at once; None for all.

    Attributes:
        check: checks the loss.
        weights: checks that only the optimizer moves them.
        canaries: how many were released beside this step.
        clip: as passed.
        sampling: how batches are drawn; set before the first.
    """

    sampling: Sampling

    def __init__(
        self, root: nn.Module, team: Team, *, clip: Clip, trusted: bool, max_rows: int | None = None
    ) -> None:
        self.check, self.canaries = LossCheck(trusted), 0
        self.weights = Weights()
        self._team = team
        self.clip = clip
        self._batches = DrawnBatches()
        self._compilation = ExitStack()
        self._compilation.enter_context(_compiled_with_hooks(root))
        self._recorder = Recorder(root)
        self._clipped: ClippedSum | None = None
        self._earlier: EarlierPieces | None = None
        self._users: Sequence[int] | None = None
        self._max_rows = max_rows
        self._scaling = list[Any]()
        self._in_logical_batch = self._stands_in = False
        self._failure: Exception | None = None
        self._last_comparison: int | None = None

    def adopt(self) -> None:
        """Read which parameters belong to which layer; to be called before training."""
        self._recorder.read_parameters()
        self.weights.restart()

    def batch_to_run(self, batch: Any, context: DefenseContext) -> Any:
        """Return the batch, or one example that does not count in place of an empty one."""
        self._stands_in, self._failure = False, None
        try:
            if count_samples(batch) == 0:
                batch = context.host.to_device(self.sampling.placeholder())
                self._stands_in = True
        except Exception as error:  # raised with the other processes, in `_begin`
            self._failure = error
        return batch

    def run_whole(
        self, step: Callable[[Any], Any], batch: Any, releases: int, context: DefenseContext
    ) -> Any:
        """Run a logical batch, in pieces where it has more rows than are to be run at once.

        Args:
            step: passes a batch to ``training_step``, with :meth:`run` around it.
            batch: the logical one.
            releases: how many were made.
            context: where the step runs.

        Returns:
            What ``training_step`` returns for the whole batch.

        Raises:
            DefenseError: as :meth:`run`.
        """
        self._begin(batch, context)
        samples = 0 if self._stands_in else count_samples(batch)
        self._in_logical_batch = True
        try:
            if self._max_rows is None:
                return step(batch)
            pieces = pieces_of(batch, samples, self._max_rows, self._team, self._users)
            if len(pieces) == 1:
                return step(batch)
            parameters = _released_parameters(context)
            by_user = self._users is not None

            def begin(piece: Piece) -> None:
                self._stands_in, self._clipped = not piece.rows, None
                self._users = [] if by_user and not piece.rows else piece.users

            def end() -> None:
                if self._earlier is None:
                    due = self.check.is_due(releases)
                    self._earlier = EarlierPieces(samples, context.device, probed=due)
                with self._team.together():
                    clipped = self.clipped(parameters, context)
                self._earlier.add(clipped, parameters, self._team)
                self._clipped = None
                self._recorder.clear()

            return run_pieces(pieces, step, context, begin_piece=begin, end_piece=end)
        finally:
            self._in_logical_batch = self._stands_in = False

    def _begin(self, batch: Any, context: DefenseContext) -> None:
        with self._team.together():
            if self._failure is not None:
                raise self._failure
            self._batches.begin(batch, context)
            self.weights.begin(context.root)
            samples = 0 if self._stands_in else count_samples(batch)
            self._users = self.sampling.sampler.claim(samples)
        self._clipped = self._earlier = None

    def run(
        self, training_step: Callable[[], Any], batch: Any, releases: int, context: DefenseContext
    ) -> Any:
        """Record the forward pass and check the loss; an empty batch has a loss of zero.

        Args:
            training_step: of the module.
            batch: that it gets: a logical one, or a piece of it within :meth:`run_whole`.
            releases: how many were made.
            context: where the step runs.

        Returns:
            What ``training_step`` returned, with a loss of zero where the batch does not count.

        Raises:
            DefenseError: there is no loss with a graph, it is not a mean of per-sample means,
                samples are mixed, a buffer was changed, or weights are not finite; in this process
                or another.
        """
        recorder, team = self._recorder, self._team
        if not self._in_logical_batch:
            self._begin(batch, context)
        self._end_scaling()
        samples = count_samples(batch)
        if samples == 0:
            recorder.clear()
            return zero_on_the_graph(context.root)
        last = self._last_comparison
        contents = last is None or releases >= last + CHECK_EVERY
        self._last_comparison = releases if contents else last
        buffers = Buffers(context.root, contents=contents)
        synchronized = buffers.read_at_root_call() if context.host.reducer else nullcontext()
        # A batch of few samples, where most have more, may be joined as it is by chance.
        comparable = samples >= SMALL_BATCH or self.sampling.expected < USUAL_SAMPLES
        tensors = tensors_of(batch) if comparable else ()
        counts = not self._stands_in
        with recorder.step(samples, counts=counts, tensors=tensors), synchronized:
            output = training_step()
        with team.together():
            recorder.check()
            buffers.check_unchanged()
            loss = _loss_with_graph(output, samples)
            self.check.check_form(loss, recorder)
        self.check.check_graph(loss, recorder, releases, team, counts=not self._stands_in)
        recorder.calls = []
        if self._stands_in:
            recorder.clear()
            return times_zero(output)
        alone = context.clients == context.processes == 1
        if alone and not any(isinstance(p, DTensor) for p in _released_parameters(context)):
            self._begin_with_ones(loss, context.root)
        return output

    def _begin_with_ones(self, loss: Tensor, root: nn.Module) -> None:
        """Let backward begin with one for each term of the loss, however many there are.

        Half precision rounds a gradient otherwise where it is divided by another number: one sample
        more would change what all others add. Whether a layer computes in half is not asked:
        weights, an autocast of the user's own and layers of four bits do, whatever Lightning's
        precision is. ``p.grad`` becomes the mean's again. Gradients of another backward, of an
        attack say, are left as they are.
        """
        terms, engine = max(1, self.check.form.terms), torch.autograd.Variable._execution_engine
        trained: list[Any] = [p for p in root.parameters() if p.requires_grad]

        def begin(gradient: Tensor) -> Tensor:
            scale = gradient * (1.0 / terms)
            self._scaling += [p.register_hook(lambda g: g * scale.to(g)) for p in trained]
            engine.queue_callback(self._end_scaling)
            return torch.full_like(gradient, terms)

        loss.register_hook(begin)  # type: ignore[no-untyped-call]
        self._recorder.terms = terms

    def _end_scaling(self) -> None:
        while self._scaling:
            self._scaling.pop().remove()

    def clipped(self, parameters: Sequence[nn.Parameter], context: DefenseContext) -> ClippedSum:
        """Return this step's samples in this process with their clip factors; computed once.

        Raises:
            DefenseError: per-sample gradients could not be recorded.
        """
        if self._clipped is None:
            recorder, earlier = self._recorder, self._earlier
            recorder.check()
            if earlier is not None and earlier.parameters is not None:
                _check_same(earlier.parameters, parameters)
            self._clipped = ClippedSum(
                parameters,
                recorder,
                self.clip,
                context,
                weights=self.check.form.weights if recorder.samples else None,
                earlier=earlier,
                users=self._users,
            )
        return self._clipped

    def clipped_canary(
        self, canary: CanaryGradient, parameters: Sequence[nn.Parameter], context: DefenseContext
    ) -> CanaryGradient:
        """Return the canary clipped together with each sample's gradient, without noise.

        Raises:
            DefenseError: the canary is of other samples than the batch, or was noised before.
        """
        refusals = {
            "what the samples of the client's other processes add to a canary is not computed; use "
            "client='rank', or one process": self._team.size > 1,
            "noise on the sum of samples cannot be clipped sample by sample": (
                canary.noise is not None
            ),
        }
        refuse("DPSGD: ", refusals)
        clipped = self.clipped(parameters, context)
        return clipped.with_canary(canary.samples, self.sampling.expected)

    @property
    def can_compare(self) -> bool:
        """Return whether the gradients of all pieces can be compared with autograd's."""
        return self._earlier is None or self._earlier.probed

    def released(self, *, unchecked: bool = False) -> None:
        """Discard all that was recorded for a release that was made.

        Args:
            unchecked: whether a check that was due could not be made, and is due again.
        """
        self.weights.released()
        self._batches.released()
        self.canaries = 0
        self.check.unchecked = unchecked
        self._clipped = self._earlier = None
        self._recorder.clear()

    def remove(self) -> None:
        """Remove the hooks."""
        self._end_scaling()
        self._recorder.remove()
        self.weights.remove()
        self._compilation.close()


def _released_parameters(context: DefenseContext) -> list[nn.Parameter]:
    """Return what the optimizer step will release, in its order; without a Trainer all trained."""
    optimizers = context.host.optimizers
    groups = [g["params"] for o in optimizers for g in o.param_groups]
    parameters = [p for group in groups for p in group] if optimizers else context.root.parameters()
    return [p for p in parameters if p.requires_grad]


def _check_same(earlier: Sequence[nn.Parameter], parameters: Sequence[nn.Parameter]) -> None:
    trained = [p for p in parameters if p.requires_grad]
    if {id(p) for p in trained} != {id(p) for p in earlier}:
        raise DefenseError(
            "DPSGD: what is trained changed between the first piece of a batch and its release. "
            "Freeze or unfreeze between batches; nothing was released."
        )


def zero_on_the_graph(root: nn.Module) -> Tensor:
    """Return the loss of an empty batch: 0, with a graph."""
    parameter = next(p for p in root.parameters() if p.requires_grad)
    return parameter.flatten()[:1].sum() * 0.0


def times_zero(output: Any) -> Any:
    """Return the output of ``training_step`` with its loss times 0, on the same graph."""
    if isinstance(output, Mapping):
        return {**output, "loss": output["loss"] * 0.0}
    return output * 0.0


@contextmanager
def _compiled_with_hooks(root: nn.Module) -> Iterator[None]:
    """Let compiled code run the hooks within this context, and backward run more than once.

    The checks run backward before the user does. Code that was compiled with donated buffers frees
    its memory in the first backward.
    """
    if not is_compiled(root):
        yield
        return
    reset_compiled(root)
    with functorch.patch(donated_buffer=False):
        yield
    reset_compiled(root)


def _loss_with_graph(output: Any, samples: int) -> Tensor:
    """Return the loss in the output of ``training_step`` for a batch that is not empty.

    Raises:
        DefenseError: there is none, or it has no graph.
    """
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if isinstance(loss, Tensor) and loss.requires_grad:
        return loss
    returned = "a loss that needs no gradient" if isinstance(loss, Tensor) else "no loss"
    raise DefenseError(
        f"DPSGD: training_step returned {returned} for a batch of {samples} samples, and no clip "
        "bounds a sample that decides whether its batch counts. Return a loss for every batch; "
        "mean_of_sample_means counts a sample without labels as zero."
    )
