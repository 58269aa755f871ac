"""One training step of DP-SGD: its batch, its forward pass and loss, and its clipped sum.

A *release* is the clipped sum of a batch's per-sample gradients, with noise, from which the
optimizer makes one update. A *logical batch* is a batch as the loader draws it; if it has too many
rows, it is run in *pieces* and released once. If the loader draws an empty batch, one example is
run instead of it, as a *placeholder* whose gradient does not count.

Noise covers only the optimizer's updates. Anything else that a training step writes to the model
would be shared without noise, and is refused (:mod:`~lightning_fedleak.defenses.dpsgd.writes`).
"""

import copy
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch import config as functorch
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from lightning_fedleak.defenses.base import DefenseContext, DefenseError
from lightning_fedleak.defenses.dpsgd import experts, loss_graph
from lightning_fedleak.defenses.dpsgd.clipped_sum import Clip, ClippedSum, EarlierPieces
from lightning_fedleak.defenses.dpsgd.logical import Step, pieces_of, rows_of, run_pieces, with_loss
from lightning_fedleak.defenses.dpsgd.poisson import Sampling, UserBatchSampler
from lightning_fedleak.defenses.dpsgd.recorder import Recorder, count_samples
from lightning_fedleak.defenses.dpsgd.writes import Buffers, Weights
from lightning_fedleak.defenses.host import Host, Piece
from lightning_fedleak.defenses.noise import noise_key
from lightning_fedleak.defenses.processes import SHARD_BITS, Team
from lightning_fedleak.defenses.randomness import check_step, secret_states
from lightning_fedleak.model.model_state import is_compiled, reset_compiled


class WatchedStep:
    """The training steps of one fit, which it records and checks one after the other.

    Args:
        root: The module that is trained; hooks are put on its layers.
        team: The processes of this client.
        clip: The clip norm and the form of clipping.
        trusted: Whether the user has proved that the loss is a mean of per-sample means.

    Attributes:
        check: The checks of the loss.
        trained_weights: The check that only the optimizer changes the weights.
        audited: Whether an audit reads ``p.grad``.
        is_rehearsed: Whether random numbers were checked, or are not to be.
        canaries: The number of canary gradients that were released at this step.
        clip: The clip norm and the form of clipping.
        sampling: The Poisson-sampled loader and its rate; it is set before the first batch.
    """

    sampling: Sampling

    def __init__(self, root: nn.Module, team: Team, *, clip: Clip, trusted: bool) -> None:
        self.check, self.canaries = loss_graph.LossCheck(trusted=trusted), 0
        self.audited = False
        self.trained_weights, self._buffers = Weights(), Buffers(root)
        self._team = team
        self.clip = clip
        self._batch: Any = None  # the index of the present batch, or without an index the batch
        self._last_released_batch: Any = None  # likewise
        self._has_unreleased_batch = False
        self._compilation = ExitStack()
        self._compilation.enter_context(_compiled_with_hooks(root))
        self._recorder = Recorder(root)
        self._clipped: ClippedSum | None = None
        self._earlier_pieces: EarlierPieces | None = None
        self._user_sizes: Sequence[int] | None = None  # rows of each user; None without users
        self._uses_ddp, self._shards = False, list[nn.Parameter]()
        self._scaling_hooks = list[Any]()
        self._in_logical_batch = self._is_placeholder = False
        # `_rehearses`: `check_step` runs. `_pieces`: the number of pieces of the batch so far.
        self._rehearses, self.is_rehearsed, self._pieces = False, False, 0
        self._failure: Exception | None = None  # of `batch_to_run`
        self._last_comparison: int | None = None  # releases before the last one of all contents

    def adopt(self, context: DefenseContext) -> None:
        """Before training, record the layers' parameters, and whether DDP or FSDP2 is used."""
        self._recorder.read_parameters()
        self._uses_ddp = context.host.reducer is not None
        self._shards = [p for p in context.root.parameters() if isinstance(p, DTensor)]
        self.trained_weights.restart()

    def batch_to_run(self, batch: Any, context: DefenseContext) -> Any:
        """Return the batch, or instead of an empty batch a placeholder that does not count."""
        self._is_placeholder, self._failure = False, None
        try:
            if count_samples(batch) == 0:
                collate: Any = self.sampling.loader.collate_fn
                batch = context.host.to_device(collate.placeholder())
                self._is_placeholder = True
        except Exception as error:  # raised with the other processes, in `_begin`
            self._failure = error
        return batch

    def run_batch(
        self, step: Step, batch: Any, max_rows: int | None, releases: int, context: DefenseContext
    ) -> Any:
        """Run a logical batch, and once in a fit check where its random numbers come from.

        For the check the step is run again, without gradient, on a copy of the batch, or of its
        first ``max_rows`` rows. Steps under FSDP2 are not checked.

        Args:
            step: A function that passes a batch to ``training_step`` through :meth:`run`.
            batch: The logical batch.
            max_rows: The largest number of rows of a piece; None to run the batch at once.
            releases: The number of releases so far.
            context: The client and the process.

        Returns:
            The output of ``training_step`` for the whole batch.

        Raises:
            DefenseError: As for :meth:`run_in_pieces`, or random numbers do not follow the global
                generators.
        """
        samples, rows = count_samples(batch), None
        if samples and not (self.is_rehearsed or self._shards):
            part = batch if max_rows is None else rows_of(batch, slice(0, max_rows), samples)
            rows = copy.deepcopy(part)  # now, because a step may change its batch
        if max_rows is None:
            output = step(batch)
        else:
            output = self.run_in_pieces(step, batch, max_rows, releases, context)
        if rows is not None:
            self.is_rehearsed = self._rehearses = True
            try:
                with context.host.without_logs(), torch.no_grad(), self._team.together():
                    check_step(step, rows, context.root)
            finally:
                self._rehearses = False
        return output

    def run_in_pieces(
        self, step: Step, batch: Any, max_rows: int, releases: int, context: DefenseContext
    ) -> Any:
        """Run a logical batch, in pieces if it has more than ``max_rows`` rows.

        Args:
            step: A function that passes a batch to ``training_step`` through :meth:`run`.
            batch: The logical batch.
            max_rows: The largest number of rows of a piece.
            releases: The number of releases so far.
            context: The client and the process.

        Returns:
            The output of ``training_step`` for the whole batch.

        Raises:
            DefenseError: As for :meth:`run`, or this is not the batch that was drawn.
        """
        self._begin(batch, context)
        samples = 0 if self._is_placeholder else count_samples(batch)
        self._in_logical_batch = True
        try:
            pieces = pieces_of(batch, samples, max_rows, self._team, self._user_sizes)
            if len(pieces) == 1:
                return step(batch)
            groups = [g["params"] for o in context.host.optimizers for g in o.param_groups]
            all_parameters = [p for group in groups for p in group] or context.root.parameters()
            parameters = [p for p in all_parameters if p.requires_grad]
            by_user = self._user_sizes is not None

            def begin(piece: Piece) -> None:
                self._is_placeholder, self._clipped = not piece.rows, None
                self._user_sizes = [] if by_user and not piece.rows else piece.users

            def end() -> None:
                if self._earlier_pieces is None:
                    probes = self.check.is_due(releases)
                    self._earlier_pieces = EarlierPieces(samples, context.device, probed=probes)
                with self._team.together():
                    clipped = self.clipped(parameters, context)
                self._earlier_pieces.add(clipped, parameters, self._team)
                self._clipped = None
                self._recorder.clear()

            return run_pieces(pieces, step, context, begin_piece=begin, end_piece=end)
        finally:
            self._in_logical_batch = self._is_placeholder = False

    def _begin(self, batch: Any, context: DefenseContext) -> None:
        """Check a logical batch against the loader's record, and forget the previous one."""
        with self._team.together():
            if self._failure is not None:
                raise self._failure
            self._check_new(batch, context.host)
            self._buffers.comparisons.clear()
            self.trained_weights.begin(context.root)
            samples = 0 if self._is_placeholder else count_samples(batch)
            sampler: Any = self.sampling.loader.batch_sampler
            if sampler.drawn is not None:
                if samples not in sampler.drawn:
                    raise DefenseError(
                        f"DPSGD: the loader drew no batch of {samples}: let no hook or callback "
                        "add, repeat or remove rows"
                    )
                sampler.drawn.remove(samples)
            by_user = isinstance(sampler, UserBatchSampler)
            self._user_sizes = sampler.claim(samples) if by_user else None
        self._clipped = self._earlier_pieces = None
        self._pieces = 0

    def _check_new(self, batch: Any, host: Host) -> None:
        """Raise an error if this batch was released, or the previous one was not."""
        n_loaders, index = len(tree_leaves(host.loader)), host.batch_number
        if n_loaders > 1:
            raise DefenseError(f"DPSGD: return one DataLoader (ConcatDataset), not {n_loaders}")
        self._batch, last_id = batch if index is None else index, self._last_released_batch
        by_index = isinstance(self._batch, Integral) and isinstance(last_id, Integral)
        if last_id is not None and (self._batch == last_id if by_index else self._batch is last_id):
            raise DefenseError(
                "DPSGD: this batch was released already: take one optimizer step on each batch"
            )
        if self._has_unreleased_batch:
            raise DefenseError(
                "DPSGD: a second batch came before the first was released: let each have its own "
                "optimizer step (DPSGD(max_physical_batch_size=...) runs a large batch in pieces)"
            )
        self._has_unreleased_batch = True

    def run(
        self,
        training_step: Callable[[], Any],
        batch: Any,
        releases: int,
        context: DefenseContext,
        base: bytes,
    ) -> Any:
        """Record the forward pass and check the loss; an empty batch has a loss of zero.

        Args:
            training_step: The module's ``training_step``, with its batch.
            batch: That batch: a logical one, or a piece of it within :meth:`run_in_pieces`.
            releases: The number of releases so far.
            context: The client and the process.
            base: The secret bytes from which the random states of the step follow.

        Returns:
            The output of ``training_step``, with a loss of zero if the batch does not count.

        Raises:
            DefenseError: In this process or another, there is no loss with a graph, the loss is not
                a mean of per-sample means, samples are mixed, something wrote to a buffer or a
                parameter, or weights are not finite. :meth:`checked_sum` tells a write through
                ``.data`` to a buffer.
        """
        if self._rehearses:
            return training_step()
        recorder, team = self._recorder, self._team
        if not self._in_logical_batch:
            self._begin(batch, context)
        if self._scaling_hooks:
            self.end_scaling()
        samples = count_samples(batch)
        if samples == 0:
            recorder.clear()
            parameter = next(p for p in context.root.parameters() if p.requires_grad)
            return parameter.flatten()[:1].sum() * 0.0
        previous = self._last_comparison
        compares_all = previous is None or releases >= previous + loss_graph.CHECK_EVERY
        self._last_comparison = releases if compares_all else previous
        buffers = self._buffers
        buffers.read(all_contents=compares_all)
        synchronized = buffers.read_at_root_call() if self._uses_ddp else nullcontext()
        counts = not self._is_placeholder
        # Rows of two processes, or of two pieces, must not get the same masks.
        index, self._pieces = self._pieces + (context.process << SHARD_BITS), self._pieces + 1
        key = noise_key(base, releases, index, client=context.client, name="", stream="step")
        with recorder.step(samples, counts=counts), synchronized, secret_states(key):
            output = training_step()
        with team.together():
            recorder.check()
            buffers.check_unchanged()
            loss = _loss_with_graph(output, samples)
            top_calls = self.check.check_form(loss, recorder.calls, samples)
            reached = recorder.check_uses(loss)
        self.check.check_graph(loss, top_calls, recorder, releases, team)
        recorder.calls = []
        if self._is_placeholder:
            recorder.clear()
            return with_loss(output, loss * 0.0)
        is_sharded = any(p.requires_grad for p in self._shards)
        if context.clients == context.processes == 1 and not is_sharded:
            self._begin_with_ones(loss, context.root)
            needs_gradients = self.audited or context.host.reads_gradients
            if not (needs_gradients or self.check.is_due(releases)):
                return with_loss(output, recorder.without_sums(loss, *reached))
        return output

    def _begin_with_ones(self, loss: Tensor, root: nn.Module) -> None:
        """Let backward begin with the gradient 1 for each of the n terms of the loss.

        The backward pass of a mean would begin with 1 / n. Half precision rounds differently for
        each n, so that one more sample would change the contributions of all other samples. This is
        done in any precision: weights, a user's autocast and layers of four bits may compute in
        half precision regardless of Lightning's setting. ``p.grad`` is scaled back to the gradient
        of the mean. Gradients of other backward passes, such as an attack's, are not changed.
        """
        terms, engine = self.check.terms, torch.autograd.Variable._execution_engine
        trained: list[Any] = [p for p in root.parameters() if p.requires_grad]

        def begin(gradient: Tensor) -> Tensor:
            scale = gradient / terms
            self._scaling_hooks += [p.register_hook(lambda g: g * scale.to(g)) for p in trained]
            engine.queue_callback(self.end_scaling)
            return terms.to(gradient, copy=True).expand_as(gradient)

        loss.register_hook(begin)  # type: ignore[no-untyped-call]
        self._recorder.terms = terms

    def end_scaling(self) -> None:
        """Remove the hooks that scale gradients in a backward pass."""
        while self._scaling_hooks:
            self._scaling_hooks.pop().remove()

    def save(self, *owners: object) -> Callable[[], None]:
        """Return a function that restores the attributes of some objects and of this step."""
        parts = self, self.check, self.trained_weights, self.sampling.loader.batch_sampler
        states = [
            (vars(owner), {name: _copied(value) for name, value in vars(owner).items()})
            for owner in (*owners, *parts)
        ]

        def restore() -> None:
            self.end_scaling()  # needed if backward raised an error
            for current, earlier in states:
                current.clear()
                current.update(earlier)

        return restore

    def clipped(self, parameters: Sequence[nn.Parameter], context: DefenseContext) -> ClippedSum:
        """Return the clipped per-sample gradients of this step in this process; computed once.

        Raises:
            DefenseError: Per-sample gradients could not be recorded, or parameters were frozen or
                unfrozen between the pieces of a batch.
        """
        if self._clipped is None:
            recorder, earlier = self._recorder, self._earlier_pieces
            recorder.check()
            trained = {p for p in parameters if p.requires_grad}
            piece_parameters = None if earlier is None else earlier.parameters
            if piece_parameters is not None and trained != set(piece_parameters):
                why = "parameters were frozen or unfrozen within a batch; do so between batches"
                raise DefenseError(f"DPSGD: {why}. Nothing was released.")
            self._clipped = ClippedSum(
                parameters,
                recorder,
                self.clip,
                context,
                weights=self.check.weights if recorder.samples else None,
                earlier=earlier,
                users=self._user_sizes,
            )
        return self._clipped

    def checked_sum(
        self, parameters: Sequence[nn.Parameter], context: DefenseContext
    ) -> ClippedSum:
        """Return :meth:`clipped` if nothing wrote to buffers or weights.

        The host waits for the device: in one copy it reads what was compared, and which samples
        have a finite gradient.

        Raises:
            DefenseError: Names the buffer or the weights; or no batch has run since a release.
        """
        if not self._has_unreleased_batch:
            raise DefenseError("DPSGD: take one optimizer step on each batch; nothing was released")
        clipped, weights = self.clipped(parameters, context), self.trained_weights
        buffers = self._buffers.comparisons.values()
        flags = (clipped.finite, *buffers, *weights.compare(parameters))
        samples = len(clipped.finite)
        read = torch.hstack([flag.to(context.device) for flag in flags]).cpu()
        clipped.finite, unwritten = read[:samples], read[samples:].tolist()
        if not all(unwritten):  # one of these raises
            self._buffers.check(unwritten[: len(buffers)])
            weights.check(parameters, unwritten[len(buffers) :], context.root)
        return clipped

    def released(self, *, unchecked: bool = False) -> None:
        """Discard the records of a batch after its release.

        Args:
            unchecked: Whether a check that was due could not be made, so that it is due again.
        """
        self.trained_weights.released()
        self._last_released_batch, self._has_unreleased_batch = self._batch, False
        self.canaries = 0
        self.check.unchecked = unchecked
        self._clipped = self._earlier_pieces = None
        self._recorder.clear()

    def remove(self) -> None:
        """Remove the hooks."""
        self.end_scaling()
        self._recorder.remove()
        self.trained_weights.remove()
        self._compilation.close()


@contextmanager
def _compiled_with_hooks(root: nn.Module) -> Iterator[None]:
    """Let compiled code run the hooks within this context, and allow more than one backward.

    The checks run backward before the user's backward. Code that was compiled with donated buffers
    frees its memory in the first one.
    """
    if not is_compiled(root):
        yield
        return
    reset_compiled(root)
    with functorch.patch(donated_buffer=False), experts.routers_in_eager_mode(root):
        yield
    reset_compiled(root)


def _loss_with_graph(output: Any, samples: int) -> Tensor:
    """Return the loss in the output of ``training_step`` for a batch that is not empty.

    Raises:
        DefenseError: There is no loss, or it has no graph.
    """
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if isinstance(loss, Tensor) and loss.requires_grad:
        return loss
    raise DefenseError(
        f"DPSGD: training_step returned no loss with a gradient for a batch of {samples} samples. "
        "Return one for every batch (mean_of_sample_means counts a sample without labels as zero)."
    )


def _copied(value: Any) -> Any:
    """Return a copy of a container, and any other value itself."""
    return copy.copy(value) if isinstance(value, dict | set | list | deque) else value
