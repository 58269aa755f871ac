"""One training step of DP-SGD: its batch, its forward pass and loss, and its clipped sum.

Noise covers the optimizer's updates and nothing else. What is written to a model in another way
leaves with it uncovered, so :class:`_Buffers` and :class:`_Weights` refuse such a write.
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
from lightning_fedleak.model.model_runs import is_compiled, reset_compiled

# Buffers of up to so many numbers are compared after every step, which is cheap; larger ones every
# ``loss_graph.CHECK_EVERY`` releases. Not tuned.
SMALL = 1 << 20
# If batches are expected to hold fewer samples, small batches are used for comparisons too: larger
# ones may never come. Not tuned.
USUAL_SAMPLES = 8

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class WatchedStep:
    """The training steps of one fit, one after the other, recorded and checked.

    Args:
        root: the module that is trained; hooks are put on its layers.
        team: the processes of this client.
        clip: how samples are clipped.
        trusted: whether the user has proved that the loss is a mean of per-sample means.

    Attributes:
        check: the checks of the loss.
        weights: the check that only the optimizer changes the weights.
        audited: whether an audit reads ``p.grad``.
        canaries: the number of canary gradients that were released at this step.
        clip: how samples are clipped.
        sampling: how batches are drawn; it is set before the first batch.
    """

    sampling: Sampling

    def __init__(self, root: nn.Module, team: Team, *, clip: Clip, trusted: bool) -> None:
        self.check, self.canaries = loss_graph.LossCheck(trusted=trusted), 0
        self.audited = False
        self.weights, self._buffers = _Weights(), _Buffers(root)
        self._team = team
        self.clip = clip
        self._batch: Any = None
        self._released_batch: Any = None
        self._waits = False
        self._compilation = ExitStack()
        self._compilation.enter_context(_compiled_with_hooks(root))
        self._recorder = Recorder(root)
        self._clipped: ClippedSum | None = None
        self._earlier: EarlierPieces | None = None
        self._users: Sequence[int] | None = None
        self._reduces, self._shards = False, list[nn.Parameter]()
        self._scaling = list[Any]()
        self._in_logical_batch = self._stands_in = False
        self._failure: Exception | None = None
        self._last_comparison: int | None = None

    def adopt(self, context: DefenseContext) -> None:
        """Record the layers' parameters, and whether DDP or FSDP2 acts on them; before training."""
        self._recorder.read_parameters()
        self._reduces = context.host.reducer is not None
        self._shards = [p for p in context.root.parameters() if isinstance(p, DTensor)]
        self.weights.restart()

    def batch_to_run(self, batch: Any, context: DefenseContext) -> Any:
        """Return the batch, or one example that does not count in place of an empty one."""
        self._stands_in, self._failure = False, None
        try:
            if count_samples(batch) == 0:
                collate: Any = self.sampling.loader.collate_fn
                batch = context.host.to_device(collate.placeholder())
                self._stands_in = True
        except Exception as error:  # raised with the other processes, in `_begin`
            self._failure = error
        return batch

    def run_in_pieces(
        self, step: Step, batch: Any, max_rows: int, releases: int, context: DefenseContext
    ) -> Any:
        """Run a logical batch, in pieces where it has more rows than are to be run at once.

        Args:
            step: passes a batch to ``training_step``, with :meth:`run` around it.
            batch: the logical one.
            max_rows: The largest number of rows of a piece.
            releases: the number of releases so far.
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
            pieces = pieces_of(batch, samples, max_rows, self._team, self._users)
            if len(pieces) == 1:
                return step(batch)
            groups = [g["params"] for o in context.host.optimizers for g in o.param_groups]
            all_parameters = [p for group in groups for p in group] or context.root.parameters()
            parameters = [p for p in all_parameters if p.requires_grad]
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
            self._check_new(batch, context.host)
            self.weights.begin(context.root)
            samples = 0 if self._stands_in else count_samples(batch)
            sampler: Any = self.sampling.loader.batch_sampler
            if sampler.drawn is not None:
                if samples not in sampler.drawn:
                    raise DefenseError(
                        f"DPSGD: training_step gets a batch of {samples} samples, and the loader "
                        "made none of that size. Let each batch keep one row for each example "
                        "drawn: no hook or callback may add, repeat or cut rows."
                    )
                sampler.drawn.remove(samples)
            by_user = isinstance(sampler, UserBatchSampler)
            self._users = sampler.claim(samples) if by_user else None
        self._clipped = self._earlier = None

    def _check_new(self, batch: Any, host: Host) -> None:
        """Raise an error for a batch that was released, or comes before the last was."""
        loaders, number = len(tree_leaves(host.loader)), host.batch_number
        if loaders > 1:
            raise DefenseError(
                f"DPSGD: {loaders} training loaders at once; an example is sampled from one. "
                "Return one DataLoader (torch.utils.data.ConcatDataset joins datasets)."
            )
        self._batch, earlier = batch if number is None else number, self._released_batch
        numbered = isinstance(self._batch, Integral) and isinstance(earlier, Integral)
        if earlier is not None and (self._batch == earlier if numbered else self._batch is earlier):
            raise DefenseError(
                "DPSGD: this batch was released already (a second optimizer step on it, in an "
                "overridden optimizer_step perhaps). Take one optimizer step on each batch."
            )
        if self._waits:
            raise DefenseError(
                "DPSGD: a second batch came before the first was released. Let each have its own "
                "optimizer step: a larger batch_size, run in pieces "
                "(DPSGD(max_physical_batch_size=...))."
            )
        self._waits = True

    def run(
        self, training_step: Callable[[], Any], batch: Any, releases: int, context: DefenseContext
    ) -> Any:
        """Record the forward pass and check the loss; an empty batch has a loss of zero.

        Args:
            training_step: of the module.
            batch: The batch that it gets: a logical one, or a piece of it within
                :meth:`run_in_pieces`.
            releases: the number of releases so far.
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
        if self._scaling:
            self.end_scaling()
        samples = count_samples(batch)
        if samples == 0:
            recorder.clear()
            parameter = next(p for p in context.root.parameters() if p.requires_grad)
            return parameter.flatten()[:1].sum() * 0.0
        last = self._last_comparison
        contents = last is None or releases >= last + loss_graph.CHECK_EVERY
        self._last_comparison = releases if contents else last
        buffers = self._buffers
        buffers.read(contents=contents)
        synchronized = buffers.read_at_root_call() if self._reduces else nullcontext()
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
            top = self.check.check_form(loss, recorder.calls, samples)
        self.check.check_graph(loss, top, recorder, releases, team)
        calls, recorder.calls = recorder.calls, []
        if self._stands_in:
            recorder.clear()
            return with_loss(output, loss * 0.0)
        sharded = any(p.requires_grad for p in self._shards)
        if context.clients == context.processes == 1 and not sharded:
            self._begin_with_ones(loss, context.root)
            read = self.audited or context.host.reads_gradients
            if not (read or self.check.is_due(releases)):
                return with_loss(output, recorder.without_sums(loss, calls))
        return output

    def _begin_with_ones(self, loss: Tensor, root: nn.Module) -> None:
        """Let backward begin with one for each term of the loss, however many there are.

        A backward of the mean would begin with 1 / n. Half precision rounds differently for each n,
        so that one more sample would change the contributions of all other samples. This is done in
        any precision: weights, a user's autocast and layers of four bits may compute in half
        whatever Lightning's precision is. ``p.grad`` is scaled back to the gradient of the mean.
        The gradients of other backward passes, such as those of an attack, are not changed.
        """
        terms, engine = max(1, self.check.terms), torch.autograd.Variable._execution_engine
        trained: list[Any] = [p for p in root.parameters() if p.requires_grad]

        def begin(gradient: Tensor) -> Tensor:
            scale = gradient * (1.0 / terms)
            self._scaling += [p.register_hook(lambda g: g * scale.to(g)) for p in trained]
            engine.queue_callback(self.end_scaling)
            return torch.full_like(gradient, terms)

        loss.register_hook(begin)  # type: ignore[no-untyped-call]
        self._recorder.terms = terms

    def end_scaling(self) -> None:
        """Remove the hooks that scale gradients in a backward pass."""
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
            trained = {p for p in parameters if p.requires_grad}
            known = None if earlier is None else earlier.parameters
            if known is not None and trained != set(known):
                raise DefenseError(
                    "DPSGD: what is trained changed between the first piece of a batch and its "
                    "release. Freeze or unfreeze between batches; nothing was released."
                )
            self._clipped = ClippedSum(
                parameters,
                recorder,
                self.clip,
                context,
                weights=self.check.weights if recorder.samples else None,
                earlier=earlier,
                users=self._users,
            )
        return self._clipped

    def released(self, *, unchecked: bool = False) -> None:
        """Discard all that was recorded for a release that was made.

        Args:
            unchecked: whether a check that was due could not be made, and is due again.
        """
        self.weights.released()
        self._released_batch, self._waits = self._batch, False
        self.canaries = 0
        self.check.unchecked = unchecked
        self._clipped = self._earlier = None
        self._recorder.clear()

    def remove(self) -> None:
        """Remove the hooks."""
        self.end_scaling()
        self._recorder.remove()
        self.weights.remove()
        self._compilation.close()


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
    with functorch.patch(donated_buffer=False), experts.routers_in_eager_mode(root):
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


class _Buffers:
    """The buffers and parameters of a model, to see whether a training step writes to one.

    Averages of activations, codebooks, or embedding rows that ``max_norm`` shortens are computed
    from training data without noise. Only the write is seen, not its content, so a step counter is
    refused too. A tensor's version counts every write but one by ``.data``, so contents are
    compared as well: those of small buffers in every step, of large ones and of parameters where
    ``contents`` is set, of sparse ones never. FSDP2 writes to parameters itself, and there they
    are not compared.

    Args:
        root: the module that is trained.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root

    def read(self, *, contents: bool) -> None:
        """Read what a training step that begins must leave as it is.

        Args:
            contents: whether to compare the contents of large buffers and of parameters too.
        """
        self._contents = contents
        self._buffers: dict[str, tuple[Tensor, int, Tensor | None]] = {}
        parameters: dict[nn.Parameter, str] = {}
        sharded = False
        for name, module in self._root.named_modules():  # one pass: a large model has many
            prefix = f"{name}." if name else ""
            sharded = sharded or isinstance(module, FSDPModule)
            for key, buffer in module._buffers.items():
                if buffer is not None:
                    dense = buffer.layout == torch.strided and not buffer.is_meta
                    compared = dense and (contents or buffer.numel() <= SMALL)
                    copy = buffer.detach().clone() if compared else None
                    self._buffers[prefix + key] = buffer, _version(buffer), copy
            for key, parameter in module._parameters.items():
                if parameter is not None:
                    parameters.setdefault(parameter, prefix + key)
        self._parameters = [
            (name, p, _version(p), fingerprint(p) if contents else None)
            for p, name in ({} if sharded else parameters).items()
        ]

    @contextmanager
    def read_at_root_call(self) -> Iterator[None]:
        """Read everything again when the root is called within this context.

        DistributedDataParallel runs ``training_step`` as the root's call, and before it the
        processes of the client send each other buffers.
        """

        def read_once(*_: Any) -> None:
            self.read(contents=self._contents)
            handle.remove()

        handle = self._root.register_forward_pre_hook(read_once)
        try:
            yield
        finally:
            handle.remove()

    def check_unchanged(self) -> None:
        """Raise an error where a buffer or parameter was written to, replaced or added.

        Raises:
            DefenseError: names it.
        """
        for name, buffer in self._root.named_buffers():
            original, version, copy = self._buffers.get(name, (None, 0, None))
            same = buffer is original and _version(buffer) == version
            if not same or (copy is not None and not _same_content(buffer, copy)):
                raise DefenseError(
                    f"DPSGD: training_step changed the buffer '{name}', which leaves with the "
                    "model and which no noise covers. Put its layer into eval mode, or keep what "
                    "training data do not decide in a plain attribute or outside of training_step."
                )
        for name, parameter, version, content in self._parameters:
            changed = content is not None and not torch.equal(fingerprint(parameter), content)
            if changed or _version(parameter) != version:
                raise DefenseError(
                    f"DPSGD: training_step wrote to the parameter '{name}' itself, while noise "
                    "covers the optimizer's updates alone. Let a gradient train it, or move what "
                    "follows from the weights alone to on_train_batch_end."
                )
        self._buffers, self._parameters = {}, []  # the memory of the copies


class _Weights:
    """The trained weights as the optimizer's last step left them, to see another write to them.

    An average that is swapped in for validation, and out again before the next batch, is no such
    write. All numbers are compared in every step.
    """

    def __init__(self) -> None:
        self._states: dict[nn.Parameter, Tensor] = {}
        self._trained: list[nn.Parameter] | None = None
        self._released = False
        self._not_finite: list[nn.Parameter] = []
        self._handle = register_optimizer_step_post_hook(self._after_step)

    def restart(self) -> None:
        """Begin again from the weights as they are, of a checkpoint perhaps.

        The hook keeps its place before those that were registered since.
        """
        self._states, self._trained, self._not_finite = {}, None, []

    def remove(self) -> None:
        """Remove the hook on optimizers."""
        self._handle.remove()

    def begin(self, root: nn.Module) -> None:
        """Begin a batch.

        Raises:
            DefenseError: the optimizer's last step made weights that are not finite. This follows
                from releases alone, so it may end the run.
        """
        self._released = False
        if self._trained is None:
            self._trained = [p for p in root.parameters() if p.requires_grad]
            self._read(self._trained)
        if self._not_finite:
            raise DefenseError(
                "DPSGD: weights are not finite after the last release "
                f"({_listed(self._not_finite, root)}): lower the learning rate: it is too high for "
                "the noise or the weights' precision."
            )

    def check(self, parameters: Sequence[nn.Parameter], root: nn.Module) -> None:
        """Raise an error unless the weights are as the optimizer's last step left them.

        Raises:
            DefenseError: names those that are not.
        """
        parameters = [p for p in parameters if p in self._states]
        if not parameters:
            return
        contents = _stacked([fingerprint(p) for p in parameters])
        expected = torch.stack([self._states[p] for p in parameters])
        changed = (contents != expected).nonzero().flatten().tolist()
        if changed:
            raise DefenseError(
                "DPSGD: weights were written to since the optimizer's last step "
                f"({_listed([parameters[i] for i in changed], root)}), and no noise covers that. "
                "Nothing was released. Write to a copy of the weights."
            )

    def released(self) -> None:
        """Prepare for the optimizer step that follows a release."""
        self._states, self._released = {}, True

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        if self._released and self._trained is not None:
            stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
            self._read([p for p in self._trained if id(p) in stepped])

    @torch.no_grad()
    def _read(self, parameters: Sequence[nn.Parameter]) -> None:
        if not parameters:
            return
        contents = _stacked([fingerprint(p) for p in parameters])
        self._states.update(zip(parameters, contents, strict=True))
        floating = [p for p in parameters if p.is_floating_point() and p.element_size() > 1]
        local = [p.to_local() if isinstance(p, DTensor) else p.detach() for p in floating]
        sums = [part.sum(dtype=torch.float32) for part in local]
        self._not_finite = []
        if sums and not bool(_stacked(sums).isfinite().all()):
            pairs = zip(floating, local, strict=True)
            self._not_finite = [p for p, part in pairs if not bool(part.isfinite().all())]


@torch.no_grad()
def fingerprint(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor's bits, 64 at a time: an integer that differs with the content.

    It is the same wherever the content lies, and 0 for a tensor without bits to read. A quantized
    weight of torchao counts by the tensors that it consists of.

    Args:
        tensor: A tensor of any type; of a DTensor, this process's part.
    """
    part = tensor.detach()
    if isinstance(part, DTensor):
        part = part.to_local()
    flatten = getattr(part, "__tensor_flatten__", None)
    if flatten is not None:
        inner = (getattr(part, name) for name in flatten()[0])
        return torch.stack([fingerprint(part) for part in inner]).sum()
    if part.is_meta or part.layout != torch.strided:
        return torch.zeros((), dtype=torch.int64)
    if part.is_complex():
        part = torch.view_as_real(part)
    bits = part.view(_INTEGERS[part.element_size()]).flatten()
    per_word = 8 // bits.element_size()
    end = len(bits) // per_word * per_word
    aligned = bits if bits.storage_offset() % per_word == 0 else bits.clone()
    return aligned[:end].view(torch.int64).sum() + bits[end:].sum()


def _stacked(scalars: Sequence[Tensor]) -> Tensor:
    return torch.stack([scalar.to(scalars[0].device) for scalar in scalars])


def _listed(parameters: Sequence[nn.Parameter], root: nn.Module) -> str:
    texts = [f"'{parameter_name(p, root)}'" for p in parameters[:5]]
    return ", ".join(texts) + (" and others" if len(parameters) > 5 else "")


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _same_content(first: Tensor, second: Tensor) -> bool:
    """Return whether two tensors are equal number for number, with NaN equal to NaN."""
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    if torch.equal(first, second):
        return True
    floats = first.is_floating_point() or first.is_complex()
    return floats and torch.allclose(first, second, rtol=0, atol=0, equal_nan=True)
