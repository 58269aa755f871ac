"""Record a training step: the calls of the model, their ids and labels, and the gradients.

A *tap* is a set of hooks that record tensors of the user's training and change nothing.
:class:`StepTap` records a :class:`~lightning_fedleak.model.taps.step.Step`, the value that attacks
run on and are scored with. Ids and labels are read from the step's own forward and backward (its
graph), so that the form of the user's batch does not matter. If that is impossible, they are read
from the batch. Gradients are read from ``p.grad``.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lightning_fedleak.model import model_runs, snapshots
from lightning_fedleak.model.anatomy import Anatomy, Kind, placeholder_ids, without_peft
from lightning_fedleak.model.batches import BatchAdapter, BatchError, TokenBatch, read_batch
from lightning_fedleak.model.snapshots import Stage
from lightning_fedleak.model.taps.calls import MEDIA, NOT_TESTED, ModelCalls, crosses
from lightning_fedleak.model.taps.graph import GraphTap, read_call, read_inputs
from lightning_fedleak.model.taps.hooks import raise_kept, raised_when_read, random_states
from lightning_fedleak.model.taps.rounds import plain_call
from lightning_fedleak.model.taps.step import ModelCall, Step


class _EncoderTap(GraphTap):
    """Hooks that record which calls of a model without a head (an encoder) got a gradient."""

    def take(self, user_batch: TokenBatch | None = None) -> list[ModelCall]:
        """Return the calls whose states got a gradient since the previous ``take``; discard them.

        Args:
            user_batch: Unused; part of the interface of :class:`GraphTap`.

        Raises:
            Exception: An exception that a hook raised during the user's forward or backward.
        """
        raise_kept(self)
        calls = [c for c in self._calls if c.is_trained or c.reached is not None]
        self._calls = [call for call in self._calls if call not in calls]
        return calls

    @raised_when_read
    def _model_ends(self, module: nn.Module, args: object, output: Any) -> None:
        """Register a hook on each state that the model returns, which notes its gradient."""
        if model_runs.is_observed() or not self._depth:
            return
        self._depth -= 1
        outputs = [*output.values()] if isinstance(output, Mapping) else output
        for states in outputs if isinstance(outputs, list | tuple) else [output]:
            if isinstance(states, Tensor) and states.requires_grad and self._calls:
                hook = partial(self._note_gradient, self._calls[-1])
                states.register_hook(hook)  # type: ignore[no-untyped-call]

    def _note_gradient(self, call: ModelCall, gradient: Tensor) -> None:
        """Note that the backward has reached a state that this call returned."""
        call.is_trained = True


def _read_encoder_call(
    call: ModelCall, kind: Kind, user_batch: TokenBatch | None = None
) -> ModelCall:
    """Return the call with its token batch: ids, mask, and labels if the user's batch matches.

    Args:
        call: A call whose hidden states got a gradient.
        kind: The kind of the model.
        user_batch: The user's batch, or None if it could not be read. Its labels are used if its
            ids have the call's shape.

    Raises:
        BatchError: No ids arrived at the model's input embedding.
    """
    batch = read_inputs(call, kind, user_batch)
    has_same_shape = user_batch is not None and user_batch.input_ids.shape == batch.input_ids.shape
    batch = replace(batch, labels=user_batch.labels if user_batch and has_same_shape else None)
    return replace(call, batch=batch)


# The reason why labels are read from the user's batch if the step's graph shows no labels.
_NO_GRADIENT = (
    "its graph shows none (a fused or chunked loss?). No action is needed: "
    "leakage/step/unexplained shows whether these labels fit the step"
)


class _GradientTap:
    """Reads the gradients of some parameters, including local gradients that DDP overwrites.

    If ``p.grad`` holds the gradient of a stage, :meth:`view` returns views of it without a copy. A
    DDP process's local gradient exists only until DDP reduces it inside backward: while the tap is
    armed, :meth:`keep_local` copies it into one buffer per parameter, which is allocated once.

    Args:
        parameters: the parameters by role, such as ``"head.weight"``. A tied matrix with two roles
            is read once.
        gradient_of: returns the gradient with which the optimizer steps a parameter.
        tied: whether head and embedding are one matrix, for the snapshots.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        gradient_of: Callable[[nn.Parameter], Tensor | None] = attrgetter("grad"),
        *,
        tied: bool = False,
    ) -> None:
        self._parameters = dict(parameters)
        self._gradient_of = gradient_of
        self._tied = tied
        self._buffers: dict[int, Tensor] = {}  # the copies, by the ``id`` of their parameter
        self._scales: dict[int, float] = {}  # the loss scale divided out of each copy so far
        self._handles: list[RemovableHandle] = []
        self.armed = False
        self.error: Exception | None = None

    def keep_local(self) -> None:
        """Copy each gradient as autograd accumulates it, before DDP's reduction, when armed.

        Under gradient accumulation the last copy is the sum over micro-batches, as it is shared.
        """
        for parameter in {id(p): p for p in self._parameters.values()}.values():
            handle = parameter.register_post_accumulate_grad_hook(self._copy_gradient)  # type: ignore[no-untyped-call]
            self._handles.append(handle)

    @raised_when_read
    def _copy_gradient(self, parameter: Tensor) -> None:
        """Copy the gradient of a parameter to its buffer, while the tap is armed."""
        if not self.armed or parameter.grad is None:
            return
        grad = snapshots.whole_tensor(parameter.grad).to_dense()  # sparse for some embeddings
        buffer = self._buffers.get(id(parameter))
        if buffer is None:
            buffer = self._buffers[id(parameter)] = torch.empty_like(grad)
        buffer.copy_(grad)
        self._scales[id(parameter)] = 1.0

    def arm(self) -> None:
        """Start a measurement step: drop earlier copies, and let the hooks copy."""
        self.error = None
        self._scales.clear()
        self.armed = True

    def disarm(self) -> None:
        """End a measurement step: the hooks return at once."""
        self.armed = False

    def view(
        self, step: int, stage: Stage, *, copies: bool = False, client: int = 0, scale: float = 1.0
    ) -> snapshots.GradientSnapshot:
        """Return views of the current gradients.

        Args:
            step: the optimizer step that they are for.
            stage: the stage of the gradients.
            copies: whether to read the copies of :meth:`keep_local` instead of ``p.grad``.
            client: rank of the client.
            scale: loss scale that the copies contain (GradScaler of float16); it is divided out.

        Returns:
            A snapshot without the roles that have no gradient.

        Raises:
            Exception: an exception that a hook has raised since :meth:`arm`.
        """
        raise_kept(self)
        gradients: dict[int, Tensor] = {}
        for key, parameter in {id(p): p for p in self._parameters.values()}.items():
            if copies and key in self._scales:
                gradients[key] = self._buffers[key]
                if self._scales[key] != scale:
                    gradients[key].div_(scale / self._scales[key])
                    self._scales[key] = scale
            elif not copies and (gradient := self._gradient_of(parameter)) is not None:
                gradients[key] = snapshots.whole_tensor(gradient).to_dense()
        keys = {role: id(p) for role, p in self._parameters.items()}
        tensors = {role: gradients[key] for role, key in keys.items() if key in gradients}
        return snapshots.GradientSnapshot(step, stage, tensors, self._tied, client)

    def close(self) -> None:
        """Remove every hook, and free the buffers."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._buffers.clear()
        self._scales.clear()


class _PackingTest:
    """Tests whether documents that are packed into one row attend to each other.

    Args:
        anatomy: The parts of the model.
        forward_context: A function that returns the context with the precision of a step.
    """

    def __init__(
        self, anatomy: Anatomy, forward_context: Callable[[], AbstractContextManager[object]]
    ) -> None:
        self._anatomy = anatomy
        self._forward_context = forward_context
        self._calls: ModelCalls | None = None
        self._crossing: dict[object, bool] = {}

    def watch(self, batch: TokenBatch) -> None:
        """Record the model's call in a step, if it is unknown whether documents are separate."""
        if batch.documents is not None and batch.crossing is None:
            self._calls = self._calls or ModelCalls(self._anatomy)
            self._calls.arm()

    def close(self) -> None:
        """Remove the hook."""
        if self._calls is not None:
            self._calls.close()
        self._calls = None

    def with_crossing(
        self, batch: TokenBatch, calls: Sequence[Mapping[str, object]] | None = None
    ) -> TokenBatch:
        """Return the batch with ``crossing`` set: whether documents of a row attend to each other.

        Calls of the same form (arguments of the same ranks and values) are tested only once.

        Args:
            batch: A batch of a step.
            calls: The arguments of the model's calls on it; None for the calls since :meth:`watch`.

        Raises:
            UnusableObservation: The test was not possible.
        """
        if calls is None:
            if self._calls is None or batch.documents is None or batch.crossing is not None:
                return batch
            calls = self._calls.calls
            self._calls.arm(False)
        if not batch.is_packed:
            return replace(batch, crossing=False)
        is_sharded = any(map(snapshots.is_shard, self._anatomy.root.parameters()))
        if is_sharded or len(calls) != 1:
            count = f"the model was called {len(calls)} times in one batch"
            cause = "the model's parameters are sharded" if is_sharded else count
            raise snapshots.UnusableObservation(NOT_TESTED.format(cause))
        [call] = calls
        # A single row can be packed by other arguments (cu_seq_lens) than several rows.
        form = len(batch.input_ids) == 1, *((n, _form(v)) for n, v in sorted(call.items()))
        if form not in self._crossing:
            with self._forward_context():
                self._crossing[form] = crosses(self._anatomy, batch, call)
        return replace(batch, crossing=self._crossing[form])


def _form(argument: object) -> object:
    """Return the part of an argument that defines a call's form: its rank, value or type."""
    if isinstance(argument, Tensor):
        return argument.dim()
    return argument if isinstance(argument, bool | str) else type(argument).__name__


class StepTap:
    """Record a :class:`Step` while the user's forward and backward run.

    ::

        tap = StepTap(anatomy, model_context)
        tap.read_gradients({"head.weight": head.weight}, attrgetter("grad"))
        step = tap.begin(number)
        tap.batch_begins(step, batch)          # then the user's forward and backward
        tap.settle(step)                       # reads the labels and inputs
        step.gradients[Stage.SHARED] = tap.gradients.view(number, Stage.SHARED)
        tap.batch_ends(step, trained=True)
        tap.end()

    Args:
        anatomy: The parts of the model.
        forward_context: A function that returns the context in which the client runs its model.
        temperature: The expected divisor of the logits in a fused loss.
        adapter: A function from the user's batch to a :class:`TokenBatch`; None for known forms.
        autocast: The dtype that the step computes in; None without autocast.
        why_not: A reason why the step's graph shows other ids and labels than the batch's, because
            a defence writes them; None if it shows the batch's.
        say: A function that gets messages about the source of the ground truth, each only once.
        reason: A function from an error to a message without words of the private batch.

    Attributes:
        why_not: The reason why the graph of a step cannot be read; None if it can.
        gradients: The tap whose ``view`` returns the current gradients, see :meth:`read_gradients`.
    """

    def __init__(
        self,
        anatomy: Anatomy,
        forward_context: Callable[[], AbstractContextManager[Any]],
        *,
        temperature: float = 1.0,
        adapter: BatchAdapter | None = None,
        autocast: torch.dtype | None = None,
        why_not: str | None = None,
        say: Callable[[str], object] = lambda sentence: None,
        reason: Callable[[Exception], str] = str,
    ) -> None:
        self._anatomy = anatomy
        self._adapter = adapter
        self._autocast = autocast
        self._write = say
        self._reason = reason
        # A sentence encoder has no logits that show labels: calls whose states get a gradient.
        embeds = anatomy.head is None and anatomy.kind == "classifier"
        self._graph = _EncoderTap(anatomy) if embeds else GraphTap(anatomy, temperature)
        self._read_call = _read_encoder_call if embeds else read_call
        config = getattr(without_peft(anatomy.model), "config", None)
        self._placeholders = placeholder_ids(config)
        self.why_not = why_not or self._graph.why_not
        self._is_written = why_not is not None and self._graph.why_not is None
        self._packing = _PackingTest(anatomy, forward_context)
        self._random: tuple[Tensor, ...] = ()
        self._message_kinds: set[str] = set()
        self.gradients = _GradientTap({})

    def close(self) -> None:
        """Remove every hook."""
        self.gradients.close()
        self._graph.close()
        self._packing.close()

    def read_gradients(
        self,
        parameters: Mapping[str, nn.Parameter],
        gradient_of: Callable[[nn.Parameter], Tensor | None],
        *,
        keeps_local: bool = False,
    ) -> None:
        """Read the gradients of these parameters from now on.

        Args:
            parameters: The parameters by role.
            gradient_of: A function that returns the gradient with which the optimizer steps.
            keeps_local: Whether to copy each gradient before DDP reduces it.
        """
        self.gradients.close()
        self.gradients = _GradientTap(parameters, gradient_of, tied=self._anatomy.tied)
        if keeps_local:
            self.gradients.keep_local()

    # ---- a step -----------------------------------------------------------------------------

    def begin(self, number: int) -> Step:
        """Return a step whose calls and gradients are recorded from now on."""
        self.gradients.arm()
        if self.why_not is None or self._is_written:
            self._graph.arm()
        return Step(number, placeholders=self._placeholders)

    def end(self) -> None:
        """Deactivate the hooks until the next step, and drop the recorded calls."""
        self.gradients.disarm()
        self._graph.close()

    def read(self, batch: Any) -> TokenBatch:
        """Return the ids, labels and mask of the user's batch.

        Raises:
            BatchError: The form of the batch is unknown.
        """
        if batch is None:
            raise BatchError("batch is None: write step(batch); in Lightning no dataloader_iter")
        if self._adapter is not None:
            return self._adapter(batch)
        return read_batch(batch, self._anatomy.kind)

    def batch_begins(self, step: Step, batch: Any) -> None:
        """Record a micro-batch before any defence changes it."""
        # Compiled dropout draws other random numbers than a repeated step, which runs eagerly.
        self._random = () if self._graph.why_not else random_states(self._anatomy.device)
        step.batch, step.batch_error = None, None
        self._graph.labels = None
        try:
            step.batch = tokens = self.read(batch)
            self._graph.labels = None if self._is_written else tokens.labels
            if tokens.documents is not None and self.why_not is not None:
                self._packing.watch(tokens)
        except Exception as error:
            step.batch_error = self._reason(error)

    def settle(self, step: Step) -> None:
        """Add the calls on the current micro-batch to the step, after its backward.

        Calls are read from the step's graph. If it shows none, a plain call on the user's batch is
        added instead. If neither can be read, the step's ``error`` is set.
        """
        if step.error is not None:
            return
        is_read = len(step.calls) > step.n_ended
        if self._is_written:
            with suppress(Exception):  # the step is then not made again
                kind = self._anatomy.kind
                step.written += [
                    self._read_call(call, kind, None) for call in self._graph.take(None)
                ]
        try:
            calls = [] if self.why_not is not None else self._graph.take(step.batch)
            if calls:
                step.calls += self._read_calls(step, calls)
            elif not is_read and step.batch is not None:
                step.calls.append(self._call_on_batch(step, step.batch))
            elif not is_read and step.batch_error is not None:
                step.error = step.batch_error
        except Exception as error:
            step.error = self._reason(error)

    def batch_ends(self, step: Step, *, trained: bool) -> TokenBatch | None:
        """Add the current micro-batch to the step; return it, or None if it was not trained on."""
        batch = None
        if trained:
            self.settle(step)
            calls = step.calls[step.n_ended :]
            batch = step.batch if calls else None
            for call in calls:
                self.check(step, call.texts)
            step.n_ended = len(step.calls)
        del step.calls[step.n_ended :]
        step.batch, step.batch_error = None, None
        return batch

    def check(self, step: Step, batch: TokenBatch) -> None:
        """Set the step's ``error`` if the values of a batch contradict each other."""
        try:
            batch.check_values(self._anatomy.embedding_rows, self._anatomy.vocab_size)
        except Exception as error:
            step.error = self._reason(error)

    def local_copy(self, number: int, *, from_copies: bool) -> snapshots.GradientSnapshot | None:
        """Return a copy of the local gradient, before a defence or a reduction changes it.

        Args:
            number: The index of the step.
            from_copies: Whether to return the copy that was made before DDP's reduction, see
                :meth:`read_gradients`.
        """
        try:
            view = self.gradients.view(number, Stage.LOCAL, copies=from_copies)
        except Exception as error:
            self.gradients.error = error  # for the attacks, which read it next
            return None
        if from_copies:
            return view
        return replace(view, tensors={role: x.clone() for role, x in view.tensors.items()})

    # ---- the ground truth -------------------------------------------------------------------

    def _read_calls(self, step: Step, calls: list[ModelCall]) -> list[ModelCall]:
        """Return the calls with their ids and labels, or a plain call on the batch without them."""
        kind, batch = self._anatomy.kind, step.batch
        try:
            calls_with_texts = [self._read_call(call, kind, batch) for call in calls]
        except BatchError as error:
            if batch is None:
                raise
            self._say(f"the labels of a step are read from its batch: {error}")
            return [self._call_on_batch(step, batch)]
        for i, call in enumerate(calls_with_texts):
            texts = call.texts
            if texts.crossing is None and texts.is_packed:
                texts = self._packing.with_crossing(texts, [call.arguments])
                calls_with_texts[i] = replace(call, batch=texts)
        for name in (name for call in calls for name in call.arguments if name.startswith(MEDIA)):
            media = f"the images or sounds that the model reads: {name}"
            self._say(f"attacks recover the text of a step, but no attack recovers {media}")
        call, *further = calls_with_texts
        if not further and call.ids is not None and call.texts.input_ids.shape == call.ids.shape:
            step.batch = call.batch
        return calls_with_texts

    def _call_on_batch(self, step: Step, batch: TokenBatch) -> ModelCall:
        """Return the call that a plain cross-entropy makes on the user's batch."""
        self._say(f"the labels of a step are read from its batch: {self.why_not or _NO_GRADIENT}")
        step.batch = batch = self._packing.with_crossing(batch)
        return plain_call(self._anatomy, batch, self._autocast, self._random)

    def _say(self, sentence: str) -> None:
        """Pass on a message, once for each text before its colon."""
        kind = sentence.partition(":")[0]
        if kind not in self._message_kinds:
            self._message_kinds.add(kind)
            self._write(sentence)
