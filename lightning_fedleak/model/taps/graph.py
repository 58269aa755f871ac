"""The ids and labels of a training step, recorded by hooks in its forward and backward.

They are the ground truth that attacks on the step's gradients are scored against. The user's batch
need not show them, because ``training_step`` may mask, shift or pack it first.

:class:`GraphTap` records each call of the model: the ids that arrive at its input embedding, and
the gradient of its logits. A row of logits holds the V scores for one predicted token, and the
gradient of the row shows its label (:mod:`~lightning_fedleak.model.taps.row_labels`). A fused loss
multiplies by the head's matrix without calling the head; the labels are then read from the gradient
of the last hidden states (:mod:`~lightning_fedleak.model.taps.last_states`).

:func:`read_call` then finds the position of each row in the texts, and returns the call with its
ids, labels and mask.
"""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional
from torch.utils.hooks import RemovableHandle

from lightning_fedleak.model import model_runs
from lightning_fedleak.model.anatomy import Anatomy, Kind, backbone_of, last_states_in, without_peft
from lightning_fedleak.model.batches import IGNORE_INDEX, BatchError, TokenBatch, read_batch
from lightning_fedleak.model.taps.hooks import Hook, raise_kept, raised_when_read, random_states
from lightning_fedleak.model.taps.last_states import head_map, read_last_states
from lightning_fedleak.model.taps.row_labels import (
    HeadCall,
    RowLabels,
    Source,
    claims_of,
    find_residual,
    read_rows,
)
from lightning_fedleak.model.taps.step import ModelCall, PlacedRows

# Minimum share of labels that are the next token, if the head gives fewer rows than positions.
#
# The rows belong to the first or the last positions of the texts, those at which the labels are the
# next tokens. In texts that repeat words, some labels also match at wrong positions; with a lower
# value such matches would decide.
MIN_MATCHES = 0.5

_SEVERAL_PASSES = (
    "{}, so that it is not known which labels the optimizer's gradient is of: call backward() on "
    "the sum of the losses, and make other gradients outside of the step"
)
_BESIDE = _SEVERAL_PASSES.format("a step has autograd.grad beside its backward")


def arguments_of(
    model: nn.Module, args: Sequence[object], kwargs: Mapping[str, object]
) -> dict[str, object]:
    """Return the arguments of a call by name, with those that were passed by position."""
    names: list[str] = []
    for module in (model, without_peft(model)):
        parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
        names = names or [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    return {**dict(zip(names, args, strict=False)), **kwargs}


class GraphTap:
    """Hooks on model, embedding and head that record the ground truth of measured steps.

    Args:
        anatomy: The parts of the model.
        temperature: The expected divisor of the logits in a fused loss.

    Attributes:
        labels: The labels of the user's batch, or None if unknown. They are candidates for rows of
            dL/dlogits whose own entries do not determine the label.
        why_not: The reason why hooks cannot record the step; None if they can.
        error: The first exception that a hook raised, which :meth:`take` raises; or None.
    """

    def __init__(self, anatomy: Anatomy, temperature: float = 1.0) -> None:
        self._anatomy = anatomy
        self._temperature = temperature
        self._backbone = None if anatomy.kind in ("classifier", "seq2seq") else backbone_of(anatomy)
        self._handles: list[RemovableHandle] = []
        self._calls: list[ModelCall] = []
        self._depth = 0  # of nested forwards; 0 outside of the model
        self._head_logits: Tensor | None = None
        self.labels: Tensor | None = None
        self.error: Exception | None = None
        self.why_not = None
        if model_runs.is_compiled(anatomy.root):
            self.why_not = "torch.compile runs the model, whose hooks do not fire"
        elif anatomy.head is None and anatomy.kind != "classifier":  # those are encoders
            self.why_not = "the model has no output head"

    def arm(self) -> None:
        """Register the hooks, which record the calls of the model from now on."""
        self.close()
        if self.why_not is not None:
            return
        anatomy = self._anatomy
        begins, ends = Hook(self._model_begins), Hook(self._model_ends)
        outer = anatomy.model, without_peft(anatomy.model), self._backbone
        for module in {id(m): m for m in outer if m is not None}.values():
            self._handles.append(module.register_forward_pre_hook(begins, with_kwargs=True))
            if module is self._backbone:
                self._handles.append(module.register_forward_hook(Hook(self._backbone_ends)))
            self._handles.append(module.register_forward_hook(ends, always_call=True))
        self._handles.append(anatomy.embedding.register_forward_hook(Hook(self._embed)))
        if anatomy.head is not None:
            self._handles.append(anatomy.head.register_forward_hook(Hook(self._head)))
        for block in anatomy.blocks[:1] if anatomy.kind == "causal" else ():
            self._handles.append(block.register_forward_hook(Hook(self._first_block)))

    def close(self) -> None:
        """Remove the hooks and discard the calls."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._calls.clear()
        self._depth, self.error, self._head_logits = 0, None, None

    def take(self, user_batch: TokenBatch | None = None) -> list[ModelCall]:
        """Return the calls whose logits got a gradient since the previous ``take``; discard them.

        Args:
            user_batch: The user's batch, or None if it could not be read. Its labels are candidates
                for calls of the model that never called the head.

        Raises:
            Exception: An exception that a hook raised during the user's forward or backward.
        """
        raise_kept(self)
        for call in self._calls:
            if call.gradient is not None and not call.read_heads:
                self._read_below_head(call, user_batch)
        for before, call in zip(self._calls, self._calls[1:], strict=False):
            if call.ids is None and before.module is None and not before.heads:
                # The step ran the encoder separately, before this call of the decoder: the ids of
                # the encoder are the ids of this call.
                call.ids, call.reached = before.ids, before.reached
        calls = [call for call in self._calls if call.read_heads]
        if len({call.accumulates for call in calls}) > 1:
            raise BatchError(_BESIDE)
        self._calls = [call for call in self._calls if not call.read_heads]
        return calls

    @raised_when_read
    def _model_begins(
        self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> None:
        """Record the call of an outermost forward; a nested one (of a backbone) only adds depth."""
        if model_runs.is_observed() or not (self._depth or torch.is_grad_enabled()):
            return
        self._depth += 1
        if self._depth == 1:
            self._begin(module, arguments_of(module, args, kwargs))

    def _begin(self, module: nn.Module | None, arguments: Mapping[str, object]) -> None:
        """Record a call with its arguments, and with what a repetition needs to be equal."""
        device = self._anatomy.device.type
        is_cast = torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device) if is_cast else None
        training = frozenset(id(m) for m in self._anatomy.root.modules() if m.training)
        random = random_states(self._anatomy.device)
        call = ModelCall(module, arguments, training=training, autocast=dtype, random=random)
        self._calls.append(call)

    @raised_when_read
    def _model_ends(self, module: nn.Module, args: object, output: object) -> None:
        """Register a hook on the outermost forward's logits if the head did not return them."""
        if model_runs.is_observed() or not self._depth:
            return
        self._depth -= 1
        if self._depth or not self._calls:
            return
        call = self._calls[-1]
        try:
            logits = model_runs.logits_in(output)
        except (ValueError, LookupError):  # the output has no logits
            return
        call.text_logits = logits.dim() == 2
        if not logits.requires_grad or logits.shape[-1:] != (self._anatomy.vocab_size,):
            return
        if not call.heads:
            self._watch(logits, call)  # the model multiplied by the head's weight itself
        elif len(call.heads) == 1 and self._differ_from_head(logits):
            hook = partial(self._read_logits, call, call.heads[0], "model", logits.detach())
            logits.register_hook(hook)  # type: ignore[no-untyped-call]

    def _differ_from_head(self, logits: Tensor) -> bool:
        """Return whether the model scaled or capped the head's output, judging by its first row."""
        head, self._head_logits = self._head_logits, None
        if head is None or head.shape != logits.shape or not head.numel():
            return False
        return not torch.equal(head.flatten(0, -2)[0].float(), logits.flatten(0, -2)[0].float())

    @raised_when_read
    def _backbone_ends(self, module: nn.Module, args: object, output: object) -> None:
        """Store the last hidden states, for a fused loss that never calls the head."""
        if model_runs.is_observed() or not self._depth or not self._calls:
            return
        states, call = last_states_in(output), self._calls[-1]
        if isinstance(states, Tensor) and states.dim() == 3 and states.requires_grad:
            call.states = states.detach()
            states.register_hook(partial(self._store_gradient, call))  # type: ignore[no-untyped-call]

    @raised_when_read
    def _embed(self, layer: nn.Module, args: tuple[object, ...], output: object) -> None:
        """Record the first ids that arrive at the input embedding in a call."""
        ids = args[0] if args else None
        if model_runs.is_observed() or not torch.is_grad_enabled() or not isinstance(ids, Tensor):
            return
        if ids.dim() != 2 or ids.is_floating_point():
            return
        if not self._depth:
            self._begin(None, {"input_ids": ids})
        if self._calls and self._calls[-1].ids is None:
            self._calls[-1].ids = ids
            self._watch_reach(output)

    @raised_when_read
    def _first_block(self, layer: nn.Module, args: object, output: object) -> None:
        """Watch the output of the first block of a causal model, as well as the embedding's."""
        if self._depth and self._calls and not model_runs.is_observed():
            self._watch_reach(output[0] if isinstance(output, tuple) else output)

    def _watch_reach(self, states: object) -> None:
        """Register a hook that records the positions of these states that get a gradient."""
        call = self._calls[-1]
        if call.ids is None or not isinstance(states, Tensor):
            return
        if states.requires_grad and states.shape[:-1] == call.ids.shape:
            states.register_hook(partial(self._read_reach, call))  # type: ignore[no-untyped-call]

    @raised_when_read
    def _head(self, layer: nn.Module, args: object, output: object) -> None:
        """Watch the logits that the head returns, unless they are sharded."""
        if model_runs.is_observed() or not self._calls or not isinstance(output, Tensor):
            return
        if output.requires_grad and not hasattr(output, "full_tensor"):
            self._watch(output, self._calls[-1])

    def _watch(self, logits: Tensor, call: ModelCall) -> None:
        """Add a call of the head, whose rows the backward reads from these logits' gradient."""
        head = HeadCall(logits.shape[:-1], logits.shape[-1])
        call.heads.append(head)
        self._head_logits = logits.detach()
        hook = partial(self._read_logits, call, head, "head", logits.detach())
        logits.register_hook(hook)  # type: ignore[no-untyped-call]

    @raised_when_read
    def _read_logits(
        self, call: ModelCall, head: HeadCall, source: Source, logits: Tensor, gradient: Tensor
    ) -> None:
        """Read the labels of a call of the head from the gradient of its logits.

        The backward reaches the model's scaled or capped logits before the head's output. Labels
        that were read from them are not replaced.
        """
        backward = torch._C._current_graph_task_id()
        if head.rows is not None and head.backward != backward:
            raise BatchError(_SEVERAL_PASSES.format("two backward passes reach the same logits"))
        if head.rows is not None and head.source != source:
            return
        head.source, head.backward = source, backward
        call.accumulates = _accumulates(self._anatomy.root)
        rows = gradient.flatten(0, -2), logits.flatten(0, -2)
        head.rows = read_rows(*rows, self._suggest(call, head.shape, gradient.device))
        if self._anatomy.kind == "classifier":
            head.gradient = gradient.detach().clone()
        else:
            head.residual = find_residual(*rows, head.rows)

    def _suggest(self, call: ModelCall, shape: torch.Size, device: torch.device) -> Tensor | None:
        """Return (n,) a candidate label of each row of logits, -100 for none; None if unknown.

        It is the next token in a causal model, else the label of the call or of the user's batch.
        """
        if self._anatomy.kind == "causal":
            ids, shift = call.ids, 1
            fits = ids is not None and shape[:-1] == ids.shape[:1]
        else:  # a label is at the position of its logits
            labels = call.arguments.get("labels")
            ids, shift = labels if isinstance(labels, Tensor) else self.labels, 0
            fits = ids is not None and len(shape) == 2 and ids.shape == shape
        if ids is None or not fits:
            return None
        return claims_of(ids.to(device), shape[-1], shift)

    @raised_when_read
    def _store_gradient(self, call: ModelCall, gradient: Tensor) -> None:
        """Store the gradient of the last hidden states, unless logits show the labels."""
        if call.read_heads:  # the logits show the labels exactly
            call.states = None
        elif call.gradient is None:
            call.gradient = gradient.detach().clone()
            call.accumulates = _accumulates(self._anatomy.root)
        elif call.accumulates != _accumulates(self._anatomy.root):
            raise BatchError(_BESIDE)
        else:  # a further backward
            call.gradient += gradient

    def _read_below_head(self, call: ModelCall, batch: TokenBatch | None) -> None:
        """Read labels from the last hidden states of a call, and drop the states."""
        states, gradient, call.states = call.states, call.gradient, None
        assert states is not None
        assert gradient is not None
        head = head_map(self._anatomy, self._temperature)
        if call.ids is None or head is None:
            return
        sources = [(call.ids, 1)]
        if batch is not None and batch.labels is not None and batch.labels.shape == call.ids.shape:
            labels, shift = batch.labels.to(call.ids.device), int(self._anatomy.kind == "causal")
            sources.append((labels, shift))
        rows, head = read_last_states(states, gradient, head, sources)
        self._temperature, width = head.temperature, len(head.weight)
        call.heads = [HeadCall(states.shape[:-1], width, "states", head.temperature, rows)]

    @raised_when_read
    def _read_reach(self, call: ModelCall, gradient: Tensor) -> None:
        """Record the positions where this gradient, or an earlier one, is not 0."""
        call.reached = (gradient != 0).any(-1) | (False if call.reached is None else call.reached)


def _accumulates(model: nn.Module) -> bool:
    """Return whether the backward pass that runs now adds to the gradient of a parameter.

    ``autograd.grad`` does not.
    """
    nodes = (get_gradient_edge(p).node for p in model.parameters() if p.requires_grad)
    try:
        return any(map(torch._C._will_engine_execute_node, nodes))
    except RuntimeError:  # a parameter is an input of autograd.grad
        return False


# ---- token batches -----------------------------------------------------------------------------


def read_call(call: ModelCall, kind: Kind, user_batch: TokenBatch | None = None) -> ModelCall:
    """Return a recorded call with its ids, labels and mask, and the positions of its rows.

    Args:
        call: A call with at least one call of the head that got a gradient.
        kind: The kind of the model.
        user_batch: The user's batch, or None if it could not be read. If its labels agree with
            all rows whose gradient determines the label, they also decide the rows whose gradient
            two labels could have produced.

    Raises:
        BatchError: No ids arrived at the input embedding, or the positions of the labels are
            unknown.
    """
    batch = read_inputs(call, "causal" if kind == "classifier" else kind, user_batch)
    ids, labels = batch.input_ids, call.arguments.get("labels")
    if not isinstance(labels, Tensor):
        labels = None if user_batch is None else user_batch.labels
    if kind == "classifier":
        placed, batch = _read_classifier(call, batch, labels)
        return replace(call, placed=placed, batch=batch)
    if labels is None and user_batch is not None and kind == "causal":
        labels = user_batch.input_ids
    shift = int(kind == "causal")
    placed = _place_rows(call, kind, labels)
    placed = replace(placed, rows=_decide_ambiguous(placed, _labels_of_rows(labels, placed, shift)))
    rows = placed.rows
    is_soft = rows.is_soft | rows.is_ambiguous
    if kind == "causal":  # the last logits have no label, but may be in an entropy or a z-loss
        is_soft &= placed.place < placed.width - 1
    batch = replace(
        batch, preferences=bool(rows.is_rejected.any()), soft_labels=bool(is_soft.any())
    )
    if kind == "seq2seq":
        if batch.soft_labels:
            raise BatchError("the decoder's targets are soft labels, as in distillation")
        batch = replace(batch, labels=placed.grid(len(ids), rows.labels, IGNORE_INDEX))
        return replace(call, placed=placed, batch=batch)
    targets = placed.grid(len(ids), rows.labels, IGNORE_INDEX, shift)
    has_gradient = placed.grid(len(ids), rows.has_gradient, 0, shift)
    if shift:  # the last position predicts no token, unless the user shifted the labels
        has_gradient = functional.pad(has_gradient[:, 1:], (0, 1))
        if bool((targets[:, -1] != IGNORE_INDEX).any()):
            batch = _with_last_labels(batch, targets[:, -1])
        else:
            targets, has_gradient = targets[:, :-1], has_gradient[:, :-1]
    batch = replace(batch, labels=targets, live=has_gradient)
    return replace(call, placed=placed, batch=batch)


def _place_rows(call: ModelCall, kind: Kind, labels: Tensor | None) -> PlacedRows:
    """Return the rows of all calls of the head in a call of the model, with their positions.

    Args:
        call: The call.
        kind: The kind of the model.
        labels: The labels of the call or of the user's batch, or None. If the head of a masked
            model gave as many rows as there are labels, its rows are at the labelled positions.

    Raises:
        BatchError: The positions of the rows cannot be inferred.
    """
    heads, ids = call.read_heads, call.ids
    assert ids is not None
    row_groups = [head.rows for head in heads if head.rows is not None]
    rows = RowLabels(*map(torch.cat, zip(*row_groups, strict=True)))
    (b, length), n = ids.shape, len(rows.labels)
    shapes = {len(head.shape) for head in heads}
    if kind == "masked" and shapes == {1} and n != b * length and labels is not None:
        text, place = (labels.to(rows.labels.device) != IGNORE_INDEX).nonzero(as_tuple=True)
        if len(text) == n:
            return PlacedRows(rows, text, place, length, torch.arange(n, device=text.device), n)
    by_text = n % b == 0 and all(head.shape[0] == b or head.shape.numel() == n for head in heads)
    if not by_text or (len(heads) > 1 and shapes != {2}):
        raise BatchError(f"the positions of {n} rows of logits in texts {(b, length)} are unknown")
    device, width = rows.labels.device, n // b
    # Rows are ordered (calls, texts, columns): several calls take successive chunks of columns.
    columns = [torch.arange(head.shape.numel() // b, device=device) for head in heads]
    starts = accumulate(map(len, columns[:-1]), initial=0)
    place = torch.cat([(c + s).repeat(b) for c, s in zip(columns, starts, strict=True)])
    text = torch.cat([torch.arange(b, device=device).repeat_interleave(len(c)) for c in columns])
    index = torch.arange(n, device=device)
    placed = PlacedRows(rows, text, place, width, index, n)
    if kind == "seq2seq":
        return placed
    logits_to_keep = call.arguments.get("logits_to_keep")
    if isinstance(logits_to_keep, Tensor) and logits_to_keep.numel() == width:
        columns_to_keep = logits_to_keep.to(device).flatten() % length
        return replace(placed, place=columns_to_keep[place], width=length)
    if width > length:  # prompt tuning: the last virtual token predicts a text's first token
        is_text = place >= width - length - int(kind == "causal")
        text_place = place[is_text] - (width - length)
        rows = RowLabels(*(column[is_text] for column in rows))
        return PlacedRows(rows, text[is_text], text_place, length, index[is_text], n)
    at_start = replace(placed, width=length)  # the first positions, as in hidden[:, :-1]
    at_end = replace(at_start, place=place + (length - width))  # or the last positions
    if width == length or logits_to_keep:
        return at_end
    matches = [_share_of_next(rows, ids) for rows in (at_start, at_end)]
    if kind != "causal" or max(matches) < MIN_MATCHES or matches[0] == matches[1]:
        raise BatchError(f"the positions of {width} rows of logits in {length} tokens are unknown")
    return at_start if matches[0] > matches[1] else at_end


def _share_of_next(placed: PlacedRows, ids: Tensor) -> float:
    """Return the share of labels that equal the next token of their text at these positions."""
    following = functional.pad(ids.to(placed.text.device), (0, 1), value=IGNORE_INDEX)
    labels = placed.rows.labels
    has_label = labels != IGNORE_INDEX
    is_next = following[placed.text, placed.place + 1] == labels
    return float(is_next[has_label].double().mean()) if bool(has_label.any()) else 0.0


def _labels_of_rows(labels: Tensor | None, placed: PlacedRows, shift: int) -> Tensor | None:
    """Return (N,) the label in (B, L) that each row predicts; None if the shapes do not match."""
    if labels is None or labels.dim() != 2 or not len(placed.text):
        return None
    padded = functional.pad(labels.long(), (0, shift), value=IGNORE_INDEX).to(placed.text.device)
    if int(placed.text.max()) >= len(padded) or placed.width + shift > padded.shape[1]:
        return None
    return padded[placed.text, placed.place + shift]


def read_inputs(call: ModelCall, kind: Kind, user_batch: TokenBatch | None) -> TokenBatch:
    """Return the ids of a call, with their padding, packed documents, and the loss's dependence.

    If the step called parts of the model instead of its forward, the padding and the documents are
    those of the user's batch. If nothing shows the padding and the model is not causal, ids that
    the loss does not depend on count as padding. (In a causal text that would be wrong: the loss
    does not depend on the last id, which is no padding.)

    Raises:
        BatchError: No ids arrived at the model's input embedding.
    """
    ids = call.ids
    if ids is None:
        raise BatchError("no ids arrived at the model's input embedding (inputs_embeds?)")
    names = ("attention_mask", "position_ids", "seq_idx", "cu_seq_lens_q", "cu_seq_lens")
    arguments = {name: call.arguments.get(name) for name in names}
    if call.module is None and user_batch is not None and user_batch.input_ids.shape == ids.shape:
        marks = user_batch.attention_mask, user_batch.position_ids, user_batch.documents
        arguments |= dict(zip(names, marks, strict=False))
    positions, mask = arguments["position_ids"], arguments["attention_mask"]
    if not isinstance(positions, Tensor) or positions.dim() != 2:  # (3, B, L) of M-RoPE
        arguments["position_ids"] = None
    if not isinstance(mask, Tensor) or (
        mask.shape != ids.shape and mask.shape[-2:] != 2 * ids.shape[1:]
    ):
        arguments["attention_mask"] = None if kind == "causal" else call.reached
    labels = None if kind == "causal" else torch.full_like(ids, IGNORE_INDEX)
    batch = read_batch({**arguments, "input_ids": ids, "labels": labels}, kind)
    return replace(batch, reached=call.reached)


def _with_last_labels(batch: TokenBatch, last_labels: Tensor) -> TokenBatch:
    """Return a batch with the last label of each text appended to its ids.

    With shifted labels (``x = ids[:, :-1]``, ``y = ids[:, 1:]``) only they have the last token.
    """
    ids, mask, positions = batch.input_ids, batch.attention_mask, batch.position_ids
    is_label = (last_labels != IGNORE_INDEX)[:, None]
    new_ids = last_labels.clamp(min=0)[:, None].to(ids.dtype)
    mask = torch.ones_like(ids) if mask is None else mask
    if positions is not None:
        positions = torch.cat([positions, positions[:, -1:] + 1], 1)
    documents = batch.documents
    return replace(
        batch,
        input_ids=torch.cat([ids, new_ids], 1),
        labels=None,
        attention_mask=torch.cat([mask, is_label.to(mask.dtype)], 1),
        position_ids=positions,
        documents=None if documents is None else torch.cat([documents, documents[:, -1:]], 1),
        reached=None if batch.reached is None else functional.pad(batch.reached, (0, 1)),
    )


def _decide_ambiguous(placed: PlacedRows, labels: Tensor | None) -> RowLabels:
    """Return the rows, with labels for those that two labels could have produced, if possible.

    The user's labels (``labels``, (N,)) decide if they agree with all rows whose label is
    known. Without them, in a row with one negative and one positive entry, the label is the
    negative entry if all known labels are negative entries, and the positive one if all known
    labels belong to rejected texts.
    """
    rows = placed.rows
    has_label = rows.labels != IGNORE_INDEX
    if not bool(rows.is_ambiguous.any()):
        return rows
    if labels is not None and bool((labels[has_label] == rows.labels[has_label]).all()):
        is_match = rows.is_ambiguous & ((labels == rows.lowest) | (labels == rows.highest))
        rows = _with_labels(rows, is_match, labels)
    for is_high, entry in ((False, rows.lowest), (True, rows.highest)):
        same_sign = bool(has_label.any()) and bool((rows.is_rejected[has_label] == is_high).all())
        if labels is None and same_sign:
            rows = _with_labels(rows, rows.is_ambiguous & rows.has_two_entries, entry)
            is_rejected = rows.is_rejected | ((rows.labels == entry) & ~has_label & is_high)
            rows = rows._replace(is_rejected=is_rejected)
    return rows


def _with_labels(rows: RowLabels, is_decided: Tensor, labels: Tensor) -> RowLabels:
    """Return the rows with labels (N,) where ``is_decided`` (N,): at the lowest or highest entry.

    The shape that was stored for a row without a label excludes the highest entry. If the label is
    the lowest entry, the other entries are taken as a multiple of the softmax, without a shift.
    """
    is_lowest = is_decided & (labels == rows.lowest)
    sizes = torch.where(is_lowest, -rows.values[:, 0], -rows.values[:, 1])
    return rows._replace(
        labels=torch.where(is_decided, labels, rows.labels),
        sizes=torch.where(is_decided, sizes, rows.sizes),
        other_sums=torch.where(is_lowest, sizes, rows.other_sums),
        shifts=torch.where(is_lowest, 0.0, rows.shifts),
        is_ambiguous=rows.is_ambiguous & ~is_decided,
    )


def _read_classifier(
    call: ModelCall, batch: TokenBatch, labels: Tensor | None
) -> tuple[PlacedRows, TokenBatch]:
    """Return the rows and the batch of a classifier, with a class for each row with a gradient.

    The classes are the labels if these have the right shape, else the lowest entries.

    Raises:
        BatchError: The head was not called once, with a row for each text or each token.
    """
    [head, *further_heads], (b, length) = call.read_heads, batch.input_ids.shape
    rows = head.rows
    assert rows is not None
    if further_heads or head.shape not in ((b,), (b, length)):
        raise BatchError("the classifier's head was not called once with a row per text or token")
    n = len(rows.has_gradient)
    index = torch.arange(n, device=rows.has_gradient.device)
    text, place = index // (n // b), index % (n // b)
    per_text = len(head.shape) == 1 or call.text_logits
    # With two classes either entry could be the label's; a single output has no class.
    sizes = rows.values.abs().amax(1) if head.n_entries > 1 else -rows.values[:, 0]
    rows = rows._replace(sizes=sizes, other_sums=sizes, shifts=torch.zeros_like(sizes))
    placed = PlacedRows(rows, text, place, n // b, index, n)
    mask, lowest = rows.has_gradient.view(b, -1), rows.lowest.view(b, -1)
    if per_text:  # the model picks one row per text after the head
        mask, lowest = mask.any(1), lowest.gather(1, mask.int().argmax(1)[:, None])[:, 0]
    if labels is not None and labels.shape == mask.shape and not labels.is_floating_point():
        lowest = labels.to(lowest.device).long().clamp(min=0)
    classes = lowest.masked_fill(~mask, IGNORE_INDEX)
    return placed, replace(batch, labels=classes, kind="classifier")
