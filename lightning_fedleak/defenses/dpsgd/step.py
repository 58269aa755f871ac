"""One training step of DP-SGD: its batch, its forward pass and loss, and its clipped sum.

A *release* is the clipped sum of a batch's per-sample gradients, with noise, from which the
optimizer makes one update. A *logical batch* is a batch as the loader draws it; if it has too many
rows, it is run in *pieces* and released once. If the loader draws an empty batch, one example is
run instead of it, as a *placeholder* whose gradient does not count.

Noise covers only the optimizer's updates. Anything else that a training step writes to the model
would be shared without noise, so :class:`_Buffers` and :class:`_Weights` refuse such a write.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch import config as functorch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._pytree import tree_leaves

from lightning_fedleak.defenses.base import DefenseContext, DefenseError, parameter_name
from lightning_fedleak.defenses.dpsgd import experts, loss_graph
from lightning_fedleak.defenses.dpsgd.clipped_sum import Clip, ClippedSum, EarlierPieces
from lightning_fedleak.defenses.dpsgd.logical import Step, pieces_of, run_pieces, with_loss
from lightning_fedleak.defenses.dpsgd.poisson import Sampling, UserBatchSampler
from lightning_fedleak.defenses.dpsgd.recorder import (
    SMALL_BATCH,
    Recorder,
    count_samples,
    tensors_of,
)
from lightning_fedleak.defenses.host import Host, Piece
from lightning_fedleak.defenses.processes import Team
from lightning_fedleak.model.compiled import is_compiled, reset_compiled

# The largest number of elements of a buffer whose content is compared after every step. Larger ones
# are compared every ``loss_graph.CHECK_EVERY`` releases, because it takes longer. Not tuned.
SMALL = 1 << 20
# If the expected batch size is below this number of samples, rows are also compared in batches of
# fewer than ``SMALL_BATCH`` samples, because larger ones may never come. Not tuned.
USUAL_SAMPLES = 8

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by size in bytes


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
        canaries: The number of canary gradients that were released at this step.
        clip: The clip norm and the form of clipping.
        sampling: The Poisson-sampled loader and its rate; it is set before the first batch.
    """

    sampling: Sampling

    def __init__(self, root: nn.Module, team: Team, *, clip: Clip, trusted: bool) -> None:
        self.check, self.canaries = loss_graph.LossCheck(trusted=trusted), 0
        self.audited = False
        self.trained_weights, self._buffers = _Weights(), _Buffers(root)
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
            self.trained_weights.begin(context.root)
            samples = 0 if self._is_placeholder else count_samples(batch)
            sampler: Any = self.sampling.loader.batch_sampler
            if sampler.drawn is not None:
                if samples not in sampler.drawn:
                    raise DefenseError(
                        f"DPSGD: training_step got a batch of {samples} samples, but the loader "
                        "made no batch of that size. Let each batch keep one row for each drawn "
                        "example: no hook or callback may add, repeat or remove rows."
                    )
                sampler.drawn.remove(samples)
            by_user = isinstance(sampler, UserBatchSampler)
            self._user_sizes = sampler.claim(samples) if by_user else None
        self._clipped = self._earlier_pieces = None

    def _check_new(self, batch: Any, host: Host) -> None:
        """Raise an error if this batch was released, or the previous one was not."""
        n_loaders, index = len(tree_leaves(host.loader)), host.batch_number
        if n_loaders > 1:
            raise DefenseError(
                f"DPSGD: {n_loaders} training loaders at once, but examples are sampled from one. "
                "Return one DataLoader (torch.utils.data.ConcatDataset joins datasets)."
            )
        self._batch, last_id = batch if index is None else index, self._last_released_batch
        by_index = isinstance(self._batch, Integral) and isinstance(last_id, Integral)
        if last_id is not None and (self._batch == last_id if by_index else self._batch is last_id):
            raise DefenseError(
                "DPSGD: this batch was released already (a second optimizer step on it, in an "
                "overridden optimizer_step perhaps). Take one optimizer step on each batch."
            )
        if self._has_unreleased_batch:
            raise DefenseError(
                "DPSGD: a second batch came before the first was released. Let each batch have its "
                "own optimizer step. Instead of accumulating gradients, raise batch_size and set "
                "DPSGD(max_physical_batch_size=...), which runs a batch in pieces."
            )
        self._has_unreleased_batch = True

    def run(
        self, training_step: Callable[[], Any], batch: Any, releases: int, context: DefenseContext
    ) -> Any:
        """Record the forward pass and check the loss; an empty batch has a loss of zero.

        Args:
            training_step: The module's ``training_step``, with its batch.
            batch: That batch: a logical one, or a piece of it within :meth:`run_in_pieces`.
            releases: The number of releases so far.
            context: The client and the process.

        Returns:
            The output of ``training_step``, with a loss of zero if the batch does not count.

        Raises:
            DefenseError: In this process or another, there is no loss with a graph, the loss is not
                a mean of per-sample means, samples are mixed, a buffer was changed, or weights are
                not finite.
        """
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
        # In a small batch rows may match other samples' rows by chance: do not compare them, unless
        # most batches are that small.
        is_comparable = samples >= SMALL_BATCH or self.sampling.expected < USUAL_SAMPLES
        tensors = tensors_of(batch) if is_comparable else ()
        counts = not self._is_placeholder
        with recorder.step(samples, counts=counts, tensors=tensors), synchronized:
            output = training_step()
        with team.together():
            recorder.check()
            buffers.check_unchanged()
            loss = _loss_with_graph(output, samples)
            top_calls = self.check.check_form(loss, recorder.calls, samples)
        self.check.check_graph(loss, top_calls, recorder, releases, team)
        calls, recorder.calls = recorder.calls, []
        if self._is_placeholder:
            recorder.clear()
            return with_loss(output, loss * 0.0)
        is_sharded = any(p.requires_grad for p in self._shards)
        if context.clients == context.processes == 1 and not is_sharded:
            self._begin_with_ones(loss, context.root)
            needs_gradients = self.audited or context.host.reads_gradients
            if not (needs_gradients or self.check.is_due(releases)):
                return with_loss(output, recorder.without_sums(loss, calls))
        return output

    def _begin_with_ones(self, loss: Tensor, root: nn.Module) -> None:
        """Let backward begin with the gradient 1 for each of the n terms of the loss.

        The backward pass of a mean would begin with 1 / n. Half precision rounds differently for
        each n, so that one more sample would change the contributions of all other samples. This is
        done in any precision: weights, a user's autocast and layers of four bits may compute in
        half precision regardless of Lightning's setting. ``p.grad`` is scaled back to the gradient
        of the mean. Gradients of other backward passes, such as an attack's, are not changed.
        """
        terms, engine = max(1, self.check.terms), torch.autograd.Variable._execution_engine
        trained: list[Any] = [p for p in root.parameters() if p.requires_grad]

        def begin(gradient: Tensor) -> Tensor:
            scale = gradient * (1.0 / terms)
            self._scaling_hooks += [p.register_hook(lambda g: g * scale.to(g)) for p in trained]
            engine.queue_callback(self.end_scaling)
            return torch.full_like(gradient, terms)

        loss.register_hook(begin)  # type: ignore[no-untyped-call]
        self._recorder.terms = terms

    def end_scaling(self) -> None:
        """Remove the hooks that scale gradients in a backward pass."""
        while self._scaling_hooks:
            self._scaling_hooks.pop().remove()

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
                raise DefenseError(
                    "DPSGD: parameters were frozen or unfrozen between the first piece of a batch "
                    "and its release; nothing was released. Freeze or unfreeze between batches."
                )
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
    returned = "a loss that needs no gradient" if isinstance(loss, Tensor) else "no loss"
    raise DefenseError(
        f"DPSGD: training_step returned {returned} for a batch of {samples} samples. Clipping does "
        "not bound the effect of a sample that decides whether its batch counts. Return a loss for "
        "every batch; mean_of_sample_means counts a sample without labels as zero."
    )


class _Buffers:
    """The buffers and parameters of a model, to detect whether a training step writes to one.

    Averages of activations, codebooks, or embedding rows that ``max_norm`` shortens are computed
    from training data without noise. Any write is refused, also that of a step counter. A tensor's
    version counts every write except one through ``.data``. So contents are compared too: of small
    buffers in every step, of large buffers and of parameters if ``all_contents`` is set, of sparse
    buffers never. Parameters are not compared under FSDP2, which writes to them itself.

    Args:
        root: The module that is trained.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root

    def read(self, *, all_contents: bool) -> None:
        """Read the buffers and parameters before a training step, which must not change them.

        Args:
            all_contents: Whether to compare the contents of large buffers and of parameters too.
        """
        self._all_contents = all_contents
        self._buffers: dict[str, tuple[Tensor, int, Tensor | None]] = {}
        parameters: dict[nn.Parameter, str] = {}
        is_sharded = False
        # One pass for both, because a large model has many modules.
        for name, module in self._root.named_modules():
            prefix = f"{name}." if name else ""
            is_sharded = is_sharded or isinstance(module, FSDPModule)
            for key, buffer in module._buffers.items():
                if buffer is not None:
                    is_dense = buffer.layout == torch.strided and not buffer.is_meta
                    is_compared = is_dense and (all_contents or buffer.numel() <= SMALL)
                    copy = buffer.detach().clone() if is_compared else None
                    self._buffers[prefix + key] = buffer, _version(buffer), copy
            for key, parameter in module._parameters.items():
                if parameter is not None:
                    parameters.setdefault(parameter, prefix + key)
        self._parameters = [
            (name, p, _version(p), fingerprint(p) if all_contents else None)
            for p, name in ({} if is_sharded else parameters).items()
        ]

    @contextmanager
    def read_at_root_call(self) -> Iterator[None]:
        """Read everything again when the root is called within this context.

        DistributedDataParallel runs ``training_step`` as the root's call. Before that it copies
        the buffers of one process to the other processes, which is no write of the step.
        """

        def read_once(*_: Any) -> None:
            self.read(all_contents=self._all_contents)
            handle.remove()

        handle = self._root.register_forward_pre_hook(read_once)
        try:
            yield
        finally:
            handle.remove()

    def check_unchanged(self) -> None:
        """Raise an error if a buffer or parameter was written to, or a buffer replaced or added.

        Raises:
            DefenseError: Names the buffer or parameter.
        """
        for name, buffer in self._root.named_buffers():
            original, version, copy = self._buffers.get(name, (None, 0, None))
            unwritten = buffer is original and _version(buffer) == version
            if not unwritten or (copy is not None and not _are_equal(buffer, copy)):
                raise DefenseError(
                    f"DPSGD: training_step changed the buffer '{name}', and no noise covers "
                    "that. Put its layer into eval mode. A value that does not depend on training "
                    "data may be a plain attribute, or be changed outside of training_step."
                )
        for name, parameter, version, content in self._parameters:
            is_changed = content is not None and not torch.equal(fingerprint(parameter), content)
            if is_changed or _version(parameter) != version:
                raise DefenseError(
                    f"DPSGD: training_step wrote to the parameter '{name}' itself, but noise "
                    "covers only the optimizer's updates. Let a gradient train it. A write that "
                    "depends only on the weights may be moved to on_train_batch_end."
                )
        self._buffers, self._parameters = {}, []  # frees the memory of the copies


class _Weights:
    """The trained weights after the optimizer's last step, to detect any other write to them.

    All numbers are compared in every step. Averaged weights may replace them during validation, if
    the trained weights are back before the next release.
    """

    def __init__(self) -> None:
        self._states: dict[nn.Parameter, Tensor] = {}
        self._trained: list[nn.Parameter] | None = None
        self._released = False
        self._not_finite: list[nn.Parameter] = []
        self._handle = register_optimizer_step_post_hook(self._after_step)

    def restart(self) -> None:
        """Begin again with the present weights, which may be of a checkpoint.

        The hook keeps its place before the hooks that were registered later.
        """
        self._states, self._trained, self._not_finite = {}, None, []

    def remove(self) -> None:
        """Remove the hook on optimizers."""
        self._handle.remove()

    def begin(self, root: nn.Module) -> None:
        """Begin a batch, and read the weights before the first one.

        Raises:
            DefenseError: The optimizer's last step made weights that are not finite. That depends
                only on releases, so that the error leaks nothing else.
        """
        self._released = False
        if self._trained is None:
            self._trained = [p for p in root.parameters() if p.requires_grad]
            self._read(self._trained)
        if self._not_finite:
            raise DefenseError(
                "DPSGD: weights are not finite after the last release "
                f"({_names_of(self._not_finite, root)}). The learning rate is too high for the "
                "noise or the weights' precision: lower it."
            )

    def check(self, parameters: Sequence[nn.Parameter], root: nn.Module) -> None:
        """Raise an error if weights were written to since the optimizer's last step.

        Raises:
            DefenseError: Names these weights.
        """
        parameters = [p for p in parameters if p in self._states]
        if not parameters:
            return
        contents = _stack([fingerprint(p) for p in parameters])
        expected = torch.stack([self._states[p] for p in parameters])
        changed = (contents != expected).nonzero().flatten().tolist()
        if changed:
            raise DefenseError(
                "DPSGD: weights were written to since the optimizer's last step "
                f"({_names_of([parameters[i] for i in changed], root)}), and no noise covers that. "
                "Nothing was released. Write to a copy of the weights."
            )

    def released(self) -> None:
        """Prepare for the optimizer step that follows a release."""
        self._states, self._released = {}, True

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Read an optimizer's weights after its step, if the step follows a release."""
        if self._released and self._trained is not None:
            ids = {id(p) for group in optimizer.param_groups for p in group["params"]}
            self._read([p for p in self._trained if id(p) in ids])

    @torch.no_grad()
    def _read(self, parameters: Sequence[nn.Parameter]) -> None:
        """Store the fingerprints of these weights, and find which of them are not finite."""
        if not parameters:
            return
        contents = _stack([fingerprint(p) for p in parameters])
        self._states.update(zip(parameters, contents, strict=True))
        floating = [p for p in parameters if p.is_floating_point() and p.element_size() > 1]
        shards = [p.to_local() if isinstance(p, DTensor) else p.detach() for p in floating]
        sums = [shard.sum(dtype=torch.float32) for shard in shards]
        self._not_finite = []
        if sums and not bool(_stack(sums).isfinite().all()):
            pairs = zip(floating, shards, strict=True)
            self._not_finite = [p for p, shard in pairs if not bool(shard.isfinite().all())]


@torch.no_grad()
def fingerprint(tensor: Tensor) -> Tensor:
    """Return a checksum of a tensor's content: the sum of its bits as integers of 64 bits.

    Equal contents have equal checksums, regardless of the memory address. The checksum is 0 for a
    meta or sparse tensor. For a quantized weight of torchao it is the sum over its inner tensors.

    Args:
        tensor: A tensor of any type; of a DTensor, only this process's shard counts.
    """
    data = tensor.detach()
    if isinstance(data, DTensor):
        data = data.to_local()
    flatten = getattr(data, "__tensor_flatten__", None)
    if flatten is not None:
        inner_tensors = (getattr(data, name) for name in flatten()[0])
        return torch.stack([fingerprint(inner) for inner in inner_tensors]).sum()
    if data.is_meta or data.layout != torch.strided:
        return torch.zeros((), dtype=torch.int64)
    if data.is_complex():
        data = torch.view_as_real(data)
    numbers = data.view(_INTEGERS[data.element_size()]).flatten()
    per_word = 8 // numbers.element_size()
    end = len(numbers) // per_word * per_word
    aligned = numbers if numbers.storage_offset() % per_word == 0 else numbers.clone()
    return aligned[:end].view(torch.int64).sum() + numbers[end:].sum()


def _stack(scalars: Sequence[Tensor]) -> Tensor:
    """Return n scalars as a tensor (n,) on the device of the first."""
    return torch.stack([scalar.to(scalars[0].device) for scalar in scalars])


def _names_of(parameters: Sequence[nn.Parameter], root: nn.Module) -> str:
    """Return the names of up to 5 parameters, for messages."""
    names = [f"'{parameter_name(p, root)}'" for p in parameters[:5]]
    return ", ".join(names) + (" and others" if len(parameters) > 5 else "")


def _version(tensor: Tensor) -> int:
    """Return autograd's count of writes to a tensor; inference tensors have none."""
    return -1 if tensor.is_inference() else tensor._version


def _are_equal(first: Tensor, second: Tensor) -> bool:
    """Return whether two tensors have the same type, shape and values; NaN equals NaN."""
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    if torch.equal(first, second):
        return True
    may_have_nan = first.is_floating_point() or first.is_complex()
    return may_have_nan and torch.allclose(first, second, rtol=0, atol=0, equal_nan=True)
