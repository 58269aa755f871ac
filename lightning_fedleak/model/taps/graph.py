"""The ground truth of a training step, read from its autograd graph.

:class:`GraphTap` records each call of the model: its input ids in the forward, and the gradient of
its logits in the backward. :func:`read_call` then finds the label of each row of logits and places
the rows in the texts. Labels are read from dL/dlogits if the output head is called
(:mod:`~lightning_fedleak.model.taps.row_labels`), and from the gradient of the last hidden states
if a fused loss never calls it (:mod:`~lightning_fedleak.model.taps.last_states`).
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.hooks import RemovableHandle

from lightning_fedleak.model import model_runs
from lightning_fedleak.model.anatomy import Anatomy, Kind, backbone_of, last_states_in, without_peft
from lightning_fedleak.model.batches import IGNORE_INDEX, BatchError, TokenBatch, read_batch
from lightning_fedleak.model.taps.hooks import raise_kept, raised_when_read, random_states
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

MIN_MATCHES = 0.5
"""Minimum share of labels that are the next token, if the head is called on some positions only.

In texts that repeat words a few labels match at wrong positions. With a lower value such matches
would decide which positions the head was called on.
"""


def arguments_of(
    model: nn.Module, args: Sequence[object], kwargs: Mapping[str, object]
) -> dict[str, object]:
    """Return the arguments of a call by name, also those that were passed by position."""
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
        why_not: The reason why the graph cannot be read; None if it can.
        error: An exception that a hook raised; :meth:`take` raises it.
    """

    def __init__(self, anatomy: Anatomy, temperature: float = 1.0) -> None:
        self._anatomy = anatomy
        self._temperature = temperature
        self._backbone = None if anatomy.kind in ("classifier", "seq2seq") else backbone_of(anatomy)
        self._handles: list[RemovableHandle] = []
        self._calls: list[ModelCall] = []
        self._depth = 0
        self._head_logits: Tensor | None = None
        self.labels: Tensor | None = None
        self.error: Exception | None = None
        self.why_not = None
        if model_runs.is_compiled(anatomy.root):
            self.why_not = "torch.compile runs the model, whose hooks do not fire"
        elif anatomy.head is None:
            self.why_not = "the model has no output head"

    def arm(self) -> None:
        """Record calls of the model from now on."""
        self.close()
        if self.why_not is not None:
            return
        anatomy = self._anatomy
        for module in {id(m): m for m in (anatomy.model, without_peft(anatomy.model))}.values():
            before = module.register_forward_pre_hook(self._model_begins, with_kwargs=True)
            after = module.register_forward_hook(self._model_ends, always_call=True)
            self._handles += [before, after]
        if (backbone := self._backbone) is not None:
            before = backbone.register_forward_pre_hook(self._model_begins, with_kwargs=True)
            after = backbone.register_forward_hook(self._backbone_ends)
            ends = backbone.register_forward_hook(self._model_ends, always_call=True)
            self._handles += [before, after, ends]
        self._handles.append(anatomy.embedding.register_forward_hook(self._embed))
        if anatomy.head is not None:
            self._handles.append(anatomy.head.register_forward_hook(self._head))
        for block in anatomy.blocks[:1] if anatomy.kind == "causal" else ():
            self._handles.append(block.register_forward_hook(self._first_block))

    def close(self) -> None:
        """Remove the hooks, and forget the calls."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._calls.clear()
        self._depth, self.error, self._head_logits = 0, None, None

    def take(self, read: TokenBatch | None = None) -> list[ModelCall]:
        """Return and forget the calls whose logits got a gradient since the previous ``take``.

        Args:
            read: The user's batch, or None if it could not be read. Its labels are candidates for
                calls of the model that never called the head.

        Raises:
            Exception: An exception that a hook raised during the user's forward or backward.
        """
        raise_kept(self)
        for call in self._calls:
            if call.gradient is not None and not call.read_heads:
                self._read_below_head(call, read)
        for before, call in zip(self._calls, self._calls[1:], strict=False):
            if call.ids is None and before.module is None and not before.heads:
                # The step ran its encoder on its own before this call: these are its ids.
                call.ids, call.reached = before.ids, before.reached
        calls = [call for call in self._calls if call.read_heads]
        self._calls = [call for call in self._calls if not call.read_heads]
        return calls

    @raised_when_read
    def _model_begins(
        self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> None:
        """Record a call; nested forwards (PEFT wrapper, backbone) only change the depth."""
        if model_runs.is_observed() or not (self._depth or torch.is_grad_enabled()):
            return
        self._depth += 1
        if self._depth == 1:
            self._begin(module, arguments_of(module, args, kwargs))

    def _begin(self, module: nn.Module | None, arguments: Mapping[str, object]) -> None:
        device = self._anatomy.device.type
        casts = torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device) if casts else None
        training = frozenset(id(m) for m in self._anatomy.root.modules() if m.training)
        random = random_states(self._anatomy.device)
        call = ModelCall(module, arguments, training=training, autocast=dtype, random=random)
        self._calls.append(call)

    @raised_when_read
    def _model_ends(self, module: nn.Module, args: object, output: object) -> None:
        """Hook the logits of the outermost forward, unless the head's output shows them."""
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
            self._watch(logits, call)  # the model multiplies by the head's weight itself
        elif len(call.heads) == 1 and self._differ_from_head(logits):
            read = partial(self._read_logits, call, call.heads[0], "model", logits.detach())
            logits.register_hook(read)  # type: ignore[no-untyped-call]

    def _differ_from_head(self, logits: Tensor) -> bool:
        """Return whether the model scaled or capped the head's output to obtain its logits."""
        head, self._head_logits = self._head_logits, None
        if head is None or head.shape != logits.shape or not head.numel():
            return False
        return not torch.equal(head.flatten(0, -2)[0].float(), logits.flatten(0, -2)[0].float())

    @raised_when_read
    def _backbone_ends(self, module: nn.Module, args: object, output: object) -> None:
        """Keep the last hidden states, for a fused loss that never calls the head."""
        if model_runs.is_observed() or not self._depth or not self._calls:
            return
        states, call = last_states_in(output), self._calls[-1]
        if isinstance(states, Tensor) and states.dim() == 3 and states.requires_grad:
            call.states = states.detach()
            states.register_hook(partial(self._keep_gradient, call))  # type: ignore[no-untyped-call]

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
        if self._depth and self._calls and not model_runs.is_observed():
            self._watch_reach(output[0] if isinstance(output, tuple) else output)

    def _watch_reach(self, states: object) -> None:
        """Record at which positions the loss has a gradient in these hidden states."""
        call = self._calls[-1]
        if call.ids is None or not isinstance(states, Tensor):
            return
        if states.requires_grad and states.shape[:-1] == call.ids.shape:
            states.register_hook(partial(self._read_reach, call))  # type: ignore[no-untyped-call]

    @raised_when_read
    def _head(self, layer: nn.Module, args: object, output: object) -> None:
        if model_runs.is_observed() or not self._calls or not isinstance(output, Tensor):
            return
        if output.requires_grad and not hasattr(output, "full_tensor"):
            self._watch(output, self._calls[-1])

    def _watch(self, logits: Tensor, call: ModelCall) -> None:
        """Read the rows of these logits in the backward, as a call of the head."""
        head = HeadCall(logits.shape[:-1], logits.shape[-1])
        call.heads.append(head)
        self._head_logits = logits.detach()
        read = partial(self._read_logits, call, head, "head", logits.detach())
        logits.register_hook(read)  # type: ignore[no-untyped-call]

    @raised_when_read
    def _read_logits(
        self, call: ModelCall, head: HeadCall, source: Source, logits: Tensor, gradient: Tensor
    ) -> None:
        # The backward reaches the scaled or capped logits before the head's output: they are kept.
        if head.rows is not None and head.source != source:
            return
        head.source = source
        rows = gradient.flatten(0, -2), logits.flatten(0, -2)
        head.rows = read_rows(*rows, self._claims(call, head.shape, gradient.device))
        if self._anatomy.kind == "classifier":
            head.gradient = gradient.detach().clone()
        else:
            head.residual = find_residual(*rows, head.rows)

    def _claims(self, call: ModelCall, shape: torch.Size, device: torch.device) -> Tensor | None:
        """Return (n,) the likely label of each row of logits; None if no source suggests any."""
        if self._anatomy.kind == "causal":
            ids, shift = call.ids, 1
            is_known = ids is not None and shape[:-1] == ids.shape[:1]
        else:  # a label is at the position of its logits
            labels = call.arguments.get("labels")
            ids, shift = labels if isinstance(labels, Tensor) else self.labels, 0
            is_known = ids is not None and len(shape) == 2 and ids.shape == shape
        if ids is None or not is_known:
            return None
        return claims_of(ids.to(device), shape[-1], shift)

    @raised_when_read
    def _keep_gradient(self, call: ModelCall, gradient: Tensor) -> None:
        if call.read_heads:  # the logits show the labels exactly
            call.states = None
        elif call.gradient is None:
            call.gradient = gradient.detach().clone()
        else:  # a second backward
            call.gradient += gradient

    def _read_below_head(self, call: ModelCall, read: TokenBatch | None) -> None:
        """Read labels from the last hidden states of a call, and drop the states."""
        states, gradient, call.states = call.states, call.gradient, None
        assert states is not None
        assert gradient is not None
        head = head_map(self._anatomy, self._temperature)
        if call.ids is None or head is None:
            return
        sources = [(call.ids, 1)]
        if read is not None and read.labels is not None and read.labels.shape == call.ids.shape:
            labels, shift = read.labels.to(call.ids.device), int(self._anatomy.kind == "causal")
            sources.append((labels, shift))
        rows, head = read_last_states(states, gradient, head, sources)
        self._temperature, width = head.temperature, len(head.weight)
        call.heads = [HeadCall(states.shape[:-1], width, "states", head.temperature, rows)]

    @raised_when_read
    def _read_reach(self, call: ModelCall, gradient: Tensor) -> None:
        call.reached = (gradient != 0).any(-1) | (False if call.reached is None else call.reached)


# ---- token batches -----------------------------------------------------------------------------


def read_call(call: ModelCall, kind: Kind, read: TokenBatch | None = None) -> ModelCall:
    """Return the call with its ids, labels and mask, as its graph shows them.

    Args:
        call: A call with at least one call of the head that got a gradient.
        kind: The kind of the model.
        read: The user's batch, or None if it could not be read. If its labels agree with all
            certain rows, they decide the rows that two labels could have produced.

    Raises:
        BatchError: No ids arrived at the input embedding, or the positions of the labels are
            unknown.
    """
    batch = read_inputs(call, "causal" if kind == "classifier" else kind, read)
    ids, labels = batch.input_ids, call.arguments.get("labels")
    if not isinstance(labels, Tensor):
        labels = None if read is None else read.labels
    if kind == "classifier":
        placed, batch = _classified(call, batch, labels)
        return replace(call, placed=placed, batch=batch)
    if labels is None and read is not None and kind == "causal":
        labels = read.input_ids
    shift = int(kind == "causal")
    placed = _placed(call, kind, labels)
    placed = replace(placed, rows=_resolved(placed, _labels_of_rows(labels, placed, shift)))
    rows = placed.rows
    soft = rows.soft | rows.ambiguous
    if kind == "causal":  # the last logits have no label, but may be in an entropy or a z-loss
        soft &= placed.place < placed.width - 1
    batch = replace(batch, preferences=bool(rows.pushed.any()), soft_labels=bool(soft.any()))
    if kind == "seq2seq":
        if batch.soft_labels:
            raise BatchError("the targets of the decoder are no single labels, as in distillation")
        batch = replace(batch, labels=placed.grid(len(ids), rows.labels, IGNORE_INDEX))
        return replace(call, placed=placed, batch=batch)
    targets = placed.grid(len(ids), rows.labels, IGNORE_INDEX, shift)
    live = placed.grid(len(ids), rows.live, 0, shift)
    if shift:  # the last position predicts no token, unless the user shifted the labels
        live = functional.pad(live[:, 1:], (0, 1))
        if bool((targets[:, -1] != IGNORE_INDEX).any()):
            batch = _with_last_labels(batch, targets[:, -1])
        else:
            targets, live = targets[:, :-1], live[:, :-1]
    batch = replace(batch, labels=targets, live=live)
    return replace(call, placed=placed, batch=batch)


def _placed(call: ModelCall, kind: Kind, labels: Tensor | None) -> PlacedRows:
    """Return the rows of all calls of the head in a call of the model, with their positions.

    ``labels`` are those of the call or of the user's batch. The head of a masked model was called
    on the labelled positions only if there are as many rows as labels.
    """
    heads, ids = call.read_heads, call.ids
    assert ids is not None
    parts = [head.rows for head in heads if head.rows is not None]
    rows = RowLabels(*map(torch.cat, zip(*parts, strict=True)))
    (b, length), n = ids.shape, len(rows.labels)
    shapes = {len(head.shape) for head in heads}
    if kind == "masked" and shapes == {1} and n != b * length and labels is not None:
        text, place = (labels.to(rows.labels.device) != IGNORE_INDEX).nonzero(as_tuple=True)
        if len(text) == n:
            return PlacedRows(rows, text, place, length, torch.arange(n, device=text.device), n)
    by_text = n % b == 0 and all(head.shape[0] == b or head.shape.numel() == n for head in heads)
    if not by_text or (len(heads) > 1 and shapes != {2}):
        raise BatchError(
            f"the head gave {n} rows of logits in {len(heads)} calls for ids of shape "
            f"{(b, length)}: at which places of the texts is not known"
        )
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
    kept = call.arguments.get("logits_to_keep")
    if isinstance(kept, Tensor) and kept.numel() == width:
        places = kept.to(device).flatten() % length
        return replace(placed, place=places[place], width=length)
    if width > length:  # the last virtual token of prompt tuning predicts a text's first
        is_text = place >= width - length - int(kind == "causal")
        text_place = place[is_text] - (width - length)
        rows = RowLabels(*(column[is_text] for column in rows))
        return PlacedRows(rows, text[is_text], text_place, length, index[is_text], n)
    at_start = replace(placed, width=length)  # the first positions, as in hidden[:, :-1]
    at_end = replace(at_start, place=place + (length - width))  # or the last positions
    if width == length or kept:
        return at_end
    matches = [_share_of_next(rows, ids) for rows in (at_start, at_end)]
    if kind != "causal" or max(matches) < MIN_MATCHES or matches[0] == matches[1]:
        raise BatchError(
            f"the head gave {width} logits for texts of {length} tokens: for which is not known"
        )
    return at_start if matches[0] > matches[1] else at_end


def _share_of_next(placed: PlacedRows, ids: Tensor) -> float:
    """Return the share of the labels that are the next token of their text."""
    following = functional.pad(ids.to(placed.text.device), (0, 1), value=IGNORE_INDEX)
    labels = placed.rows.labels
    has_label = labels != IGNORE_INDEX
    equal = following[placed.text, placed.place + 1] == labels
    return float(equal[has_label].double().mean()) if bool(has_label.any()) else 0.0


def _labels_of_rows(labels: Tensor | None, placed: PlacedRows, shift: int) -> Tensor | None:
    """Return (N,) each row's entry of labels (B, L); None if the shapes do not match."""
    if labels is None or labels.dim() != 2 or not len(placed.text):
        return None
    padded = functional.pad(labels.long(), (0, shift), value=IGNORE_INDEX).to(placed.text.device)
    if int(placed.text.max()) >= len(padded) or placed.width + shift > padded.shape[1]:
        return None
    return padded[placed.text, placed.place + shift]


def read_inputs(call: ModelCall, kind: Kind, read: TokenBatch | None) -> TokenBatch:
    """Return the ids of a call, their padding, the documents in a row, and what the loss reaches.

    If the step called parts of the model instead of its forward, padding and documents are those of
    the user's batch. If nothing shows the padding and the model is not causal, ids that the loss
    does not depend on count as padding. (The last id of a causal text is not padding, though the
    loss does not depend on it.)

    Raises:
        BatchError: No ids arrived at the model's input embedding.
    """
    ids = call.ids
    if ids is None:
        raise BatchError("no ids arrived at the model's input embedding (inputs_embeds?)")
    names = ("attention_mask", "position_ids", "seq_idx", "cu_seq_lens_q", "cu_seq_lens")
    arguments = {name: call.arguments.get(name) for name in names}
    if call.module is None and read is not None and read.input_ids.shape == ids.shape:
        marks = read.attention_mask, read.position_ids, read.documents
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
    """Append each text's last token, which only the labels of shifted ``x, y`` contain."""
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


def _resolved(placed: PlacedRows, given: Tensor | None) -> RowLabels:
    """Return the rows with labels for ambiguous ones, as far as they can be determined.

    The user's labels (``given``) decide if they agree with all certain rows. Without them, a row
    with one negative and one positive entry gets the sign that all certain rows have.
    """
    rows = placed.rows
    certain = rows.labels != IGNORE_INDEX
    if not bool(rows.ambiguous.any()):
        return rows
    if given is not None and bool((given[certain] == rows.labels[certain]).all()):
        is_match = rows.ambiguous & ((given == rows.lowest) | (given == rows.highest))
        rows = _with_labels(rows, is_match, given)
    for pushed, entry in ((False, rows.lowest), (True, rows.highest)):
        same_sign = bool(certain.any()) and bool((rows.pushed[certain] == pushed).all())
        if given is None and same_sign:
            rows = _with_labels(rows, rows.ambiguous & rows.one_each, entry)
            rows = rows._replace(pushed=rows.pushed | ((rows.labels == entry) & ~certain & pushed))
    return rows


def _with_labels(rows: RowLabels, places: Tensor, labels: Tensor) -> RowLabels:
    """Return the rows with labels for some of them: the index of the lowest or highest entry.

    The fitted shape of a row assumes that its label is the highest entry. For a label at the lowest
    entry the other entries are taken to be a multiple of the softmax, without a shift.
    """
    is_lowest = places & (labels == rows.lowest)
    sizes = torch.where(is_lowest, -rows.values[:, 0], -rows.values[:, 1])
    return rows._replace(
        labels=torch.where(places, labels, rows.labels),
        sizes=torch.where(places, sizes, rows.sizes),
        others=torch.where(is_lowest, sizes, rows.others),
        shifts=torch.where(is_lowest, 0.0, rows.shifts),
        ambiguous=rows.ambiguous & ~places,
    )


def _classified(
    call: ModelCall, batch: TokenBatch, labels: Tensor | None
) -> tuple[PlacedRows, TokenBatch]:
    """Return the rows and the batch of a classifier, with labels where there is a gradient."""
    [head, *others], (b, length) = call.read_heads, batch.input_ids.shape
    rows = head.rows
    assert rows is not None
    if others or head.shape not in ((b,), (b, length)):
        raise BatchError("the head of the classifier was called on rows of unknown texts")
    n = len(rows.live)
    index = torch.arange(n, device=rows.live.device)
    text, place = index // (n // b), index % (n // b)
    per_text = len(head.shape) == 1 or call.text_logits
    # With two classes either entry could be the label's; a single output has no class.
    sizes = rows.values.abs().amax(1) if head.n_entries > 1 else -rows.values[:, 0]
    rows = rows._replace(sizes=sizes, others=sizes, shifts=torch.zeros_like(sizes))
    placed = PlacedRows(rows, text, place, n // b, index, n)
    live, lowest = rows.live.view(b, -1), rows.lowest.view(b, -1)
    if per_text:  # pooled after the head
        live, lowest = live.any(1), lowest.gather(1, live.int().argmax(1)[:, None])[:, 0]
    if labels is not None and labels.shape == live.shape and not labels.is_floating_point():
        lowest = labels.to(lowest.device).long().clamp(min=0)
    classes = lowest.masked_fill(~live, IGNORE_INDEX)
    return placed, replace(batch, labels=classes, kind="classifier")
