"""The positive control of a look: the attack reads a gradient whose words are known.

The step's forward is repeated with its tokens shuffled over their positions, with the weights of
now, each module in the mode of the step, from the random state that the call began with, and before
any defence. The gradient of the logits keeps its shape in each row. Where an attack fails here, its
low number on the real gradient means nothing. With the step's own words it is the step made again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_fedleak.model import model_runs
from lightning_fedleak.model.anatomy import Anatomy, backbone_of, last_states_in
from lightning_fedleak.model.batches import IGNORE_INDEX, TokenBatch
from lightning_fedleak.model.snapshots import (
    GradientSnapshot,
    Stage,
    UnusableObservation,
    is_shard,
    whole_tensor,
)
from lightning_fedleak.model.taps.activations import ActivationTap
from lightning_fedleak.model.taps.graph import (
    GraphCall,
    PlacedRows,
    ReadCall,
)
from lightning_fedleak.model.taps.hooks import set_random_states
from lightning_fedleak.model.taps.last_states import capped, logit_cap
from lightning_fedleak.model.taps.row_labels import make_rows
from lightning_fedleak.model.taps.split import Crossed, SplitTap
from lightning_fedleak.model.whole_models import parameter_places, parameters_replaced, whole_model

UNEVEN = 0.5
"""Coefficient of variation of the labels' gradients above which two draws are made.

A loss without weights stays below it until most labels are predicted; class weights of .1 and 1 are
above. Were it higher, class weights would be shuffled as if they belonged to positions.
"""


Fails = Callable[[bool], bool]
"""Whether a call has failed here, as given, or on another process that makes it at the same time.

A process that left alone would keep the others waiting, which gather layers together.
"""


@dataclass(frozen=True)
class Draw:
    """The known words of a control.

    Attributes:
        reads: the calls of the step, with these words in their batches.
        shapes: for each, (3, N) the shapes of the rows of its logits' gradient, see
            ``RowLabels.shapes``; 0 where there is no label.
        is_part: whether they are a part of a step's.
        is_step: whether they are the step's own.
    """

    reads: Sequence[ReadCall]
    shapes: Sequence[Tensor]
    is_part: bool = False
    is_step: bool = False

    @classmethod
    def of_step(cls, reads: Sequence[ReadCall]) -> Draw:
        """Return the words of a step itself.

        Raises:
            UnusableObservation: the labels' gradients of a call are not known.
        """
        return cls(reads, [_rows(read).rows.shapes for read in reads], is_step=True)

    @property
    def batches(self) -> list[TokenBatch]:
        """Return the known texts."""
        return [read.batch for read in self.reads]

    def trains(self, shapes: Tensor) -> bool:
        """Return whether a call whose rows have these shapes may have a gradient."""
        return self.is_step or bool(shapes[0].any())

    def first(self, n_labels: int) -> Draw:
        """Return the draw with its first ``n_labels`` labels alone."""
        shapes = []
        for whole in self.shapes:
            rows = whole[0].nonzero()[:, 0][:n_labels]
            n_labels -= len(rows)
            shapes.append(torch.zeros_like(whole).index_copy(1, rows, whole[:, rows]))
        reads = [_labelled(*pair) for pair in zip(self.reads, shapes, strict=True)]
        return Draw(reads, shapes, is_part=True)


def is_uneven(reads: Sequence[ReadCall]) -> bool:
    """Return whether the sizes of the labels' gradients differ, so that two draws are made."""
    sizes = torch.cat([_rows(read).rows.sizes for read in reads]).abs()
    sizes = sizes[sizes > 0]
    return len(sizes) > 1 and float(sizes.std() / sizes.mean()) > UNEVEN


def draw_words(
    reads: Sequence[ReadCall],
    special: frozenset[int],
    generator: torch.Generator,
    *,
    sizes_go_with_words: bool = False,
) -> Draw:
    """Return the tokens of a step shuffled over its positions.

    Special tokens and padding do not move, and the tokens of packed texts stay in their text.
    Labels of models that are not causal are shuffled apart, among the positions that have one.

    Args:
        reads: the calls of the step.
        special: ids of tokens that stay.
        generator: of the shuffling, on the CPU.
        sizes_go_with_words: the size at a label moves with its word, as class weights do; else it
            stays at its position.

    Raises:
        UnusableObservation: the labels' gradients of a call are not known.
    """
    drawn, shapes = [], []
    for read in reads:
        words, shape = _draw_call(read, special, generator, sizes_go_with_words)
        drawn.append(_labelled(words, shape))
        shapes.append(shape)
    return Draw(drawn, shapes)


def _stays(batch: TokenBatch, special: frozenset[int]) -> Tensor:
    """Return (B, L) the places whose tokens stay: special ones and padding."""
    ids = batch.input_ids
    stay = torch.isin(ids, torch.tensor(sorted(special), device=ids.device, dtype=ids.dtype))
    return stay if batch.attention_mask is None else stay | (batch.attention_mask.to(ids) == 0)


def _rows(read: ReadCall) -> PlacedRows:
    if read.placed is None:
        raise UnusableObservation(
            "neither the step's graph nor its batch shows which labels have which gradient"
        )
    return read.placed


def _draw_call(
    read: ReadCall, special: frozenset[int], generator: torch.Generator, with_words: bool
) -> tuple[ReadCall, Tensor]:
    batch, placed = read.batch, _rows(read)
    ids, labels, shapes = batch.input_ids, model_runs.labels_of(batch), placed.rows.shapes
    stay = _stays(batch, special)
    counted = labels != IGNORE_INDEX
    if batch.kind == "masked":  # what is asked for stays a mask
        stay |= counted
    texts = batch.documents if batch.is_packed else None
    source = _permutation(~stay, texts, generator)
    moved = ids.flatten()[source].view_as(ids)
    if batch.kind == "causal":  # a label moves with its token
        words = torch.where(counted, labels.to(ids.dtype), ids)
        words = words.flatten()[source].view_as(ids)
    else:
        # A classifier's labels stay with the gradient of their logits.
        source = _permutation(counted & (batch.kind != "classifier"), None, generator)
        words = labels.flatten()[source].view_as(labels)
    if with_words and words.dim() == 2:
        shift = int(batch.kind == "causal")
        rows = torch.arange(1, shapes.shape[1] + 1, device=shapes.device)  # 0: no row
        grid = placed.grid(len(labels), rows, 0, shift)[:, : labels.shape[1]]
        grid = functional.pad(grid, (0, labels.shape[1] - grid.shape[1]))
        grid = grid.flatten()[source.to(grid.device)].view_as(labels)
        grid = functional.pad(grid, (0, shift))
        moved_rows = grid[placed.text, placed.place + shift]
        by_word = shapes[:, (moved_rows - 1).clamp(min=0)] * (moved_rows > 0)
        shapes = torch.where((shapes[0] != 0) & (by_word[0] != 0), by_word, shapes)
    words = words.masked_fill(~counted, IGNORE_INDEX)
    batch = replace(batch, input_ids=moved, labels=words, soft_labels=False, reached=None)
    return replace(read, batch=batch), shapes


def _permutation(moves: Tensor, texts: Tensor | None, generator: torch.Generator) -> Tensor:
    """Return (n,) where in the flattened grid each place takes its token from.

    Args:
        moves: the places whose tokens are shuffled.
        texts: (B, L) the number of each token's text in its row, within which it stays; None:
            tokens move over all texts.
        generator: of the shuffling.
    """
    source = torch.arange(moves.numel())
    places = moves.flatten().cpu().nonzero()[:, 0]
    order = torch.randperm(len(places), generator=generator)
    if texts is None:
        source[places] = places[order]
        return source.to(moves.device)
    rows = torch.arange(len(moves))[:, None] * (int(texts.max()) + 1)
    keys = (rows + texts.cpu()).flatten()
    shuffled = places[order]
    source[places] = shuffled[keys[shuffled].argsort(stable=True)]
    return source.to(moves.device)


def _labelled(read: ReadCall, shapes: Tensor) -> ReadCall:
    """Return a call with the labels alone whose gradient is not 0."""
    batch, placed = read.batch, _rows(read)
    labels, live = batch.labels, shapes[0] != 0
    assert labels is not None
    if labels.dim() == 1:  # classes of texts
        texts = torch.zeros_like(labels).index_add(0, placed.text, live.to(labels.dtype))
        batch = replace(batch, labels=labels.masked_fill(texts == 0, IGNORE_INDEX))
        return replace(read, batch=batch)
    shift = int(batch.kind == "causal")
    grid = placed.grid(len(labels), live, 0, shift)
    grid = functional.pad(grid, (0, labels.shape[1] - grid.shape[1] + shift))
    kept = grid[:, : labels.shape[1]]
    batch = replace(batch, labels=labels.masked_fill(~kept, IGNORE_INDEX))
    if batch.live is not None:
        batch = replace(batch, live=grid[:, shift:])
    return replace(read, batch=batch)


# ---- the gradient ------------------------------------------------------------------------------


@contextmanager
def fresh_leaves(
    root: nn.Module, values: Mapping[int, Tensor] | None = None
) -> Iterator[dict[int, nn.Parameter]]:
    """Replace the trained parameters by leaves of their own that share their values.

    No hook of a gradient's accumulation is on them: neither DDP, nor an optimizer that steps within
    backward, nor a user's function sees their backward. Yields each by the ``id`` of the parameter
    that it represents.

    Args:
        root: of the parameters.
        values: of all trained parameters, by the ``id`` of each, that the leaves take copies of in
            place of their own.
    """
    owned = (p for m in root.modules() for p in m._parameters.values())
    trained = {id(p): p for p in owned if p is not None and p.requires_grad}
    leaves = {
        key: nn.Parameter(p.detach() if values is None else values[key].clone())
        for key, p in trained.items()
    }
    with parameters_replaced(parameter_places(root.modules(), leaves)):
        yield leaves


def control_gradient(
    anatomy: Anatomy,
    draw: Draw,
    roles: Sequence[str],
    *,
    step: int,
    scale: float = 1.0,
    fails: Fails = bool,
) -> GradientSnapshot:
    """Return the gradient of a control, in the modes and the precision of the step.

    Args:
        anatomy: of the model.
        draw: the known words.
        roles: whose gradients are returned.
        step: optimizer step of the look.
        scale: loss scale that is in the sizes; divided out.
        fails: see :data:`Fails`; where a model is sharded each process makes every call.

    Raises:
        UnusableObservation: the call cannot be made again, on this process or on another one.
    """
    tensors: dict[str, Tensor] = {}
    parameters = {role: anatomy.parameter(role) for role in roles}
    ids = {id(parameter) for parameter in parameters.values()}
    with _model_again(anatomy) as (model, leaves):
        for key, leaf in leaves.items():
            if key not in ids:  # their gradients are not kept
                leaf.register_post_accumulate_grad_hook(_forget_gradient)  # type: ignore[no-untyped-call]
        together = any(is_shard(p) for p in anatomy.root.parameters())
        for read, shapes in zip(draw.reads, draw.shapes, strict=True):
            if together or draw.trains(shapes):
                run_backward(anatomy, model, read, shapes, fails, is_step=draw.is_step)
        for role, parameter in parameters.items():
            gradient = leaves[id(parameter)].grad if id(parameter) in leaves else None
            if gradient is not None:
                gradient = whole_tensor(gradient)
                gradient = gradient.to_dense() if gradient.is_sparse else gradient
                tensors[role] = gradient if scale == 1 else gradient / scale
    return GradientSnapshot(step, Stage.LOCAL, tensors, anatomy.tied)


def control_states(
    anatomy: Anatomy, draw: Draw, layer: int, *, scale: float = 1.0
) -> tuple[Tensor, ...]:
    """Return the gradients of a control in the hidden states at a layer, (B, L, d) for each call.

    Calls without a label have none.

    Args:
        anatomy: of the model.
        draw: the known words.
        layer: 0 is the input of the first block, k the output of block k.
        scale: loss scale that is in the sizes; divided out.

    Raises:
        UnusableObservation: a call cannot be made again.
    """
    with _again_for_states(anatomy) as model:
        tap = ActivationTap(anatomy, [layer], states=False, reach=True)
        try:
            tap.arm()
            for read, shapes in zip(draw.reads, draw.shapes, strict=True):
                if bool(shapes[0].any()):
                    run_backward(anatomy, model, read, shapes, scale=scale)
            return tuple(gradient.clone() for gradient in tap.gradients(layer))
        finally:
            tap.close()


def control_crossing(
    anatomy: Anatomy, draw: Draw, layer: int, *, fails: Fails = bool
) -> list[Crossed]:
    """Return what crosses the split at a layer in each call of a control, before any defence.

    Args:
        anatomy: of the model.
        draw: the known words.
        layer: 0 is the input of the first block, k the output of block k.
        fails: see :data:`Fails`.

    Raises:
        UnusableObservation: a call cannot be made again, on this process or on another one.
    """
    crossed = []
    with _again_for_states(anatomy) as model:
        tap = SplitTap(anatomy, [layer], ())
        try:
            for read, shapes in zip(draw.reads, draw.shapes, strict=True):
                tap.arm()
                run_backward(anatomy, model, read, shapes, fails)
                crossed.append(tap.take(read.batch))
        finally:
            tap.close()
    return crossed


@contextmanager
def _again_for_states(anatomy: Anatomy) -> Iterator[nn.Module]:
    """Yield the model as it can be called again for its hidden states, without a trace."""
    if model_runs.is_compiled(anatomy.root):
        raise UnusableObservation("a control of hidden states would compile the model again")
    with _model_again(anatomy) as (model, _):
        yield model


@contextmanager
def _model_again(anatomy: Anatomy) -> Iterator[tuple[nn.Module, dict[int, nn.Parameter]]]:
    """Yield the model for a call without a trace, and what gathers the gradients of parameters.

    Under FSDP2 and ZeRO-3 their own hooks gather the weights layer by layer, so that all processes
    make the same calls. FSDP2's reduce the gradients too.
    """
    root = anatomy.root
    sharded: list[Any] = [p for p in root.parameters() if is_shard(p) and p.requires_grad]
    hooks = [p._post_accumulate_grad_hooks for p in sharded]
    with model_runs.undisturbed(anatomy) as model, torch.enable_grad(), ExitStack() as stack:
        if not sharded:
            stack.enter_context(whole_model(root))
            leaves = stack.enter_context(fresh_leaves(root))
        else:
            leaves = {id(p): p for p in sharded}
        stack.enter_context(model_runs.only_needed_hooks(root, model_runs.TRAINING_PACKAGES))
        try:
            for p in sharded:
                p.grad = None
                p._post_accumulate_grad_hooks = None
            yield model, leaves
        finally:
            for p, hook in zip(sharded, hooks, strict=True):
                p._post_accumulate_grad_hooks = hook


def _forget_gradient(parameter: Tensor) -> None:
    parameter.grad = None


def run_backward(
    anatomy: Anatomy,
    model: nn.Module,
    read: ReadCall,
    shapes: Tensor,
    fails: Fails = bool,
    *,
    scale: float = 1.0,
    is_step: bool = False,
) -> None:
    """Run one call on the control's words, and its backward from the logits.

    Args:
        anatomy: of the model.
        model: to be called.
        read: the call.
        shapes: (3, N) of the rows of its logits' gradient.
        fails: see :data:`Fails`.
        scale: loss scale that is in the sizes; divided out.
        is_step: the words are the step's own, so that gradients are exactly those that it had.

    Raises:
        UnusableObservation: it cannot be made again, on this process or on another one.
    """
    call = read.call
    for module in anatomy.root.modules():
        module.training = id(module) in call.training
    has_cache = any(v is not None for n, v in call.arguments.items() if "past_key_values" in n)
    if fails(has_cache):
        raise UnusableObservation("the model's call has a cache, which a second call would change")
    device, dtype = anatomy.device, call.autocast
    set_random_states(call.random, device)
    with torch.autocast(device.type, dtype=dtype, enabled=dtype is not None):
        states, logits = _logits_again(anatomy, model, read, is_step=is_step)
    heads = call.read_heads
    unlike = [head.shape for head in heads] != [one.shape[:-1] for one in logits]
    if is_step and not fails(unlike):
        rows = [head.gradient_of(one) for head, one in zip(heads, logits, strict=True)]
    else:
        rows = _control_rows(read, shapes, logits, fails)
    if is_step and states is not None:
        assert call.gradient is not None
        is_trained = [one.requires_grad for one in logits]  # where the head is trained
        logits = [states, *compress(logits, is_trained)]
        rows = [call.gradient, *compress(rows, is_trained)]
    torch.autograd.backward(logits, [row / scale for row in rows])


def _control_rows(
    read: ReadCall, shapes: Tensor, logits: Sequence[Tensor], fails: Fails
) -> list[Tensor]:
    """Return the gradients of logits, each (..., V), whose rows have given shapes (3, N)."""
    call, placed = read.call, _rows(read)
    counts = [part.shape[:-1].numel() for part in logits]
    index, n_rows = placed.index, sum(counts)
    width = n_rows // max(1, len(read.batch.input_ids))
    if n_rows != placed.n_rows and len(logits) == 1 and width >= placed.width:
        # The step called the head on a part of the places, and all are there now.
        index = placed.text * width + placed.place + width - placed.width
    elif fails(n_rows != placed.n_rows):
        raise UnusableObservation(
            f"the model's call could not be made again: it gave {n_rows} rows of logits, and "
            f"{placed.n_rows} in the step"
        )
    gradient = call.read_heads[0].gradient if call.read_heads else None
    if gradient is not None:  # of a classifier, whatever its labels are
        shares = shapes[0] / placed.rows.sizes  # 0 where a part leaves a row out
        return [gradient * shares.nan_to_num(0.0).view(*gradient.shape[:-1], 1).to(gradient)]
    targets = _targets(placed, read.batch)
    all_targets = torch.split(targets.new_zeros(n_rows).index_copy(0, index, targets), counts)
    all_shapes = torch.split(shapes.new_zeros(3, n_rows).index_copy(1, index, shapes), counts, 1)
    temperature = call.read_heads[0].temperature if call.read_heads else None
    parts = zip(logits, all_targets, all_shapes, strict=True)
    return [make_rows(*part, temperature) for part in parts]


def _logits_again(
    anatomy: Anatomy, model: nn.Module, read: ReadCall, *, is_step: bool
) -> tuple[Tensor | None, list[Tensor]]:
    """Return the logits of a call that is made again, where the step's rows were read.

    Where the last hidden states were read, they come first, and in the step itself, where their
    gradient is known, the logits hang on the head alone.
    """
    call, heads, backbone = read.call, list[Tensor](), backbone_of(anatomy)
    source = call.read_heads[0].source if call.read_heads else "model"
    target: Any = call.module if call.module is not None else model
    head: Any = anatomy.head
    arguments = _arguments(call, read.batch, model)
    if backbone is not None and (source == "states" or target is backbone):
        if "labels" in call.arguments:  # which a fused loss computes with behind the hidden states
            arguments["labels"] = call.arguments["labels"]
        states = _last_states(target, backbone, arguments)
        reads_states = is_step and source == "states"
        logits = capped(head(states.detach() if reads_states else states), logit_cap(anatomy))
        return states if reads_states else None, [logits]
    handle = head.register_forward_hook(lambda _m, _a, output: heads.append(output))
    try:
        logits = model_runs.logits_in(target(**arguments))
    finally:
        handle.remove()
    return None, [logits] if source == "model" or not heads else heads


class _Reached(Exception):
    """A signal, not an error, that ends a forward behind the last hidden states."""


def _last_states(target: Any, backbone: nn.Module, arguments: Mapping[str, object]) -> Tensor:
    """Return the output of the backbone in a call of a module, of which no more is run."""
    outputs = []

    def end(module: nn.Module, args: object, output: Any) -> None:
        outputs.append(output)
        raise _Reached

    with backbone.register_forward_hook(end), suppress(_Reached):
        target(**arguments)
    states: Tensor = last_states_in(outputs[0])
    return states


def _arguments(call: GraphCall, batch: TokenBatch, model: nn.Module) -> dict[str, object]:
    """Return the arguments of the call with the control's words in place of the step's."""
    assert call.ids is not None
    ids, labels = batch.input_ids[:, : call.ids.shape[1]], batch.labels
    if call.module is None:  # the step called the model's parts
        arguments: dict[str, object] = {"input_ids": ids}
        if batch.attention_mask is not None and model_runs.accepts(model, "attention_mask"):
            arguments["attention_mask"] = batch.attention_mask[:, : ids.shape[1]]
        return arguments
    arguments = {name: value for name, value in call.arguments.items() if name != "labels"}
    name = next((n for n, value in arguments.items() if value is call.ids), "input_ids")
    arguments[name] = ids
    if batch.kind == "seq2seq":
        previous = arguments.get("decoder_input_ids")
        if not isinstance(previous, Tensor):
            return arguments | {"labels": labels}
        assert labels is not None
        later = torch.cat([previous[:, :1], labels[:, :-1].to(previous)], 1)
        arguments["decoder_input_ids"] = torch.where(later == IGNORE_INDEX, previous, later)
    return arguments


def _targets(placed: PlacedRows, batch: TokenBatch) -> Tensor:
    """Return (N,) the label of each row of the logits, 0 where it has none."""
    labels = batch.labels
    assert labels is not None
    if labels.dim() == 1:
        return labels[placed.text].clamp(min=0)
    shift = int(batch.kind == "causal")
    padded = functional.pad(labels, (0, shift), value=IGNORE_INDEX)
    return padded[placed.text, placed.place + shift].clamp(min=0).to(placed.text.device)
