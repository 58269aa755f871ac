"""The positive control of a measurement: an undefended gradient of known, shuffled tokens.

The step's forward is repeated with its tokens shuffled over their positions. It uses the current
weights, the train or eval mode of each module in the step, and the random state at the beginning of
the call. No defence acts on it. A row of dL/dlogits, the gradient of the V scores for one predicted
token, keeps its shape (the size of its label's gradient and of its other entries, see
:class:`~lightning_fedleak.model.taps.row_labels.RowLabels`), so that the control is as hard to
attack as the step. If an attack fails on the control, a low value on the real gradient says nothing
about a defence. The same functions repeat the step itself, on its original tokens.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import compress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_fedleak.model import model_runs
from lightning_fedleak.model.anatomy import Anatomy, Place, backbone_of, has_cache, last_states_in
from lightning_fedleak.model.batches import IGNORE_INDEX, TokenBatch
from lightning_fedleak.model.model_state import is_compiled, modules_of
from lightning_fedleak.model.snapshots import (
    GradientSnapshot,
    Stage,
    UnusableObservation,
    is_shard,
    whole_tensor,
)
from lightning_fedleak.model.taps.activations import ActivationTap
from lightning_fedleak.model.taps.hooks import set_random_states
from lightning_fedleak.model.taps.last_states import capped, logit_cap
from lightning_fedleak.model.taps.row_labels import make_rows
from lightning_fedleak.model.taps.split import Crossed, SplitTap
from lightning_fedleak.model.taps.step import ModelCall, PlacedRows, Step
from lightning_fedleak.model.whole_models import parameter_places, parameters_replaced, whole_model

# Coefficient of variation of the labels' gradients above which two controls are made.
#
# In one control the sizes of the gradients stay at their positions, in the other they move with the
# tokens, as class weights do. A loss without weights stays below this value until most labels are
# predicted; class weights of .1 and 1 are above it. If it were higher, class weights would be
# treated as weights of positions.
UNEVEN = 0.5


# A function that returns whether a call failed on any process, given whether it failed here.
#
# Processes of a sharded model gather layers together. If only one of them stopped, the other
# processes would wait for it forever.
Fails = Callable[[bool], bool]


def is_uneven(calls: Sequence[ModelCall]) -> bool:
    """Return whether the sizes of the labels' gradients differ, so that two controls are made."""
    sizes = torch.cat([call.known_rows.rows.sizes for call in calls]).abs()
    sizes = sizes[sizes > 0]
    return len(sizes) > 1 and float(sizes.std() / sizes.mean()) > UNEVEN


def shuffle_words(
    step: Step, special: frozenset[int], generator: torch.Generator, *, with_words: bool = False
) -> Step:
    """Return a control: a copy of a step with its tokens shuffled over their positions.

    Special tokens and padding do not move, and tokens of packed texts stay in their text. A causal
    model's labels move with their tokens. Other labels are shuffled separately, among the positions
    that have one; those of a classifier stay.

    Args:
        step: the step.
        special: The ids of tokens that are not moved.
        generator: The generator of the shuffling, on the CPU.
        with_words: whether the size of a label's gradient moves with its token, as class
            weights do, or stays at its position.

    Raises:
        UnusableObservation: the labels' gradients of a call are not known.
    """
    settings = special, generator, with_words
    calls = [_shuffle_call(call, *settings).with_live_labels() for call in step.calls]
    return Step(step.number, calls, round=step.round, n_ended=len(calls))


def _fixed_positions(batch: TokenBatch, special: frozenset[int]) -> Tensor:
    """Return (B, L) bool: the positions of special tokens and padding, which are not shuffled."""
    ids = batch.input_ids
    is_fixed = torch.isin(ids, torch.tensor(sorted(special), device=ids.device, dtype=ids.dtype))
    return (
        is_fixed if batch.attention_mask is None else is_fixed | (batch.attention_mask.to(ids) == 0)
    )


def _shuffle_call(
    call: ModelCall, special: frozenset[int], generator: torch.Generator, with_words: bool
) -> ModelCall:
    """Return a call of a control, with shuffled tokens and labels, and the shapes of its rows.

    ``with_words`` says whether the size of a label's gradient moves with its token.
    """
    batch, placed = call.texts, call.known_rows
    ids, labels, shapes = batch.input_ids, model_runs.labels_of(batch), placed.rows.shapes
    is_fixed = _fixed_positions(batch, special)
    has_label = labels != IGNORE_INDEX
    if batch.kind == "masked":  # positions to predict keep their mask tokens
        is_fixed |= has_label
    texts = batch.documents if batch.is_packed else None
    source = _permutation(~is_fixed, texts, generator)
    shuffled_ids = ids.flatten()[source].view_as(ids)
    if batch.kind == "causal":  # a label moves with its token
        targets = torch.where(has_label, labels.to(ids.dtype), ids)
        targets = targets.flatten()[source].view_as(ids)
    else:
        # A classifier's labels stay with the gradient of their logits.
        source = _permutation(has_label & (batch.kind != "classifier"), None, generator)
        targets = labels.flatten()[source].view_as(labels)
    if with_words and targets.dim() == 2:
        shift = int(batch.kind == "causal")
        # The grid holds the number of the row whose label is at each position; it is shuffled as
        # the tokens are, and each row takes the shape of the row whose number it finds.
        rows = torch.arange(1, shapes.shape[1] + 1, device=shapes.device)  # 0: no row
        grid = placed.grid(len(labels), rows, 0, shift)[:, : labels.shape[1]]
        grid = functional.pad(grid, (0, labels.shape[1] - grid.shape[1]))
        grid = grid.flatten()[source.to(grid.device)].view_as(labels)
        grid = functional.pad(grid, (0, shift))
        shuffled_rows = grid[placed.text, placed.place + shift]
        by_word = shapes[:, (shuffled_rows - 1).clamp(min=0)] * (shuffled_rows > 0)
        shapes = torch.where((shapes[0] != 0) & (by_word[0] != 0), by_word, shapes)
    targets = targets.masked_fill(~has_label, IGNORE_INDEX)
    batch = replace(batch, input_ids=shuffled_ids, labels=targets, soft_labels=False, reached=None)
    return replace(call, batch=batch, shapes=shapes)


def replace_word(step: Step, old: int, new: int) -> Step:
    """Return a copy of a step in which one token is replaced by another, as input and as label.

    The gradient of the logits keeps the shapes of the step's rows, as in a control. With ``new``
    equal to ``old`` it is the step itself, in this form.

    Raises:
        UnusableObservation: the labels' gradients of a call are not known.
    """
    calls = []
    for call in step.calls:
        batch, shapes = call.texts, call.known_rows.rows.shapes
        ids, labels = batch.input_ids, model_runs.labels_of(batch)
        if batch.kind != "classifier":
            labels = labels.masked_fill(labels == old, new)
        batch = replace(batch, input_ids=ids.masked_fill(ids == old, new), labels=labels)
        calls.append(replace(call, batch=batch, shapes=shapes))
    return Step(step.number, calls, round=step.round, n_ended=len(calls))


def one_text(step: Step, number: int, text: int) -> Step:
    """Return a copy of a control with one text of one call, and no other one's labels."""
    call = step.calls[number]
    assert call.shapes is not None
    shapes = call.shapes * (call.known_rows.text == text)
    call = replace(call, shapes=shapes).with_live_labels().without_dead_texts()
    return Step(step.number, [call], n_ended=1)


def _permutation(moves: Tensor, texts: Tensor | None, generator: torch.Generator) -> Tensor:
    """Return (n,) the flattened index from which each position takes its token.

    Args:
        moves: (B, L) bool, the positions whose tokens are shuffled.
        texts: (B, L) the number of each token's text in its row, in which it stays. None: tokens
            move over all texts.
        generator: The generator of the shuffling.
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


# ---- the gradient ------------------------------------------------------------------------------


@contextmanager
def fresh_leaves(
    root: nn.Module, values: Mapping[int, Tensor] | None = None
) -> Iterator[dict[int, nn.Parameter]]:
    """Replace the trained parameters by new leaf tensors of the same values, inside the block.

    The leaves have no hooks on gradient accumulation. So neither DDP, nor an optimizer that steps
    within backward, nor a user's hook sees their backward. Yields the leaves by the ``id`` of the
    parameters that they replace.

    Args:
        root: The module that holds the parameters.
        values: Other values for the leaves, which are copied, by the ``id`` of every trained
            parameter. None: the leaves share the memory of the parameters.
    """
    modules = modules_of(root)
    owned = (p for m in modules for p in m._parameters.values())
    trained = {id(p): p for p in owned if p is not None and p.requires_grad}
    leaves = {
        key: nn.Parameter(p.detach() if values is None else values[key].clone())
        for key, p in trained.items()
    }
    with parameters_replaced(parameter_places(modules, leaves)):
        yield leaves


def control_gradient(
    anatomy: Anatomy, step: Step, roles: Sequence[str], *, scale: float = 1.0, fails: Fails = bool
) -> GradientSnapshot:
    """Repeat a step in its modes and precision, and return its gradient.

    Args:
        anatomy: The parts of the model.
        step: The step itself, or a control.
        roles: The roles of the parameters whose gradients are returned.
        scale: The loss scale that the recorded gradients contain; it is divided out.
        fails: See :data:`Fails`. If the model is sharded, each process makes every call.

    Raises:
        UnusableObservation: a call cannot be repeated, on this process or on another one.
    """
    tensors: dict[str, Tensor] = {}
    parameters = {role: anatomy.parameter(role) for role in roles}
    ids = {id(parameter) for parameter in parameters.values()}
    with _repeatable_model(anatomy) as (model, leaves):
        for key, leaf in leaves.items():
            if key not in ids:
                leaf.register_post_accumulate_grad_hook(_drop_gradient)  # type: ignore[no-untyped-call]
        is_sharded = any(is_shard(p) for p in anatomy.root.parameters())
        for call in step.calls:
            if is_sharded or call.has_gradient:
                run_backward(anatomy, model, call, fails)
        for role, parameter in parameters.items():
            gradient = leaves[id(parameter)].grad if id(parameter) in leaves else None
            if gradient is not None:
                gradient = whole_tensor(gradient).to_dense()
                tensors[role] = gradient if scale == 1 else gradient / scale
    return GradientSnapshot(step.number, Stage.LOCAL, tensors, anatomy.tied)


def control_states(
    anatomy: Anatomy, step: Step, layer: int, *, scale: float = 1.0
) -> tuple[Tensor, ...]:
    """Repeat a step, and return the gradients of its hidden states at a layer.

    Args:
        anatomy: The parts of the model.
        step: The step itself, or a control. Calls of a control without a label are skipped.
        layer: 0 is the input of the first block, k the output of block k.
        scale: The loss scale that the recorded gradients contain; it is divided out.

    Returns:
        (B, L, d) for each call.

    Raises:
        UnusableObservation: a call cannot be repeated.
    """
    with _model_for_states(anatomy) as model:
        tap = ActivationTap(anatomy, [layer], states=False, reach=True)
        try:
            tap.arm()
            for call in step.calls:
                if call.has_gradient:
                    run_backward(anatomy, model, call, scale=scale)
            return tuple(gradient.clone() for gradient in tap.gradients(layer))
        finally:
            tap.close()


def control_crossing(
    anatomy: Anatomy, step: Step, layer: int, *, fails: Fails = bool
) -> list[Crossed]:
    """Repeat a step, and return what crosses the split at a layer, before any defence.

    Args:
        anatomy: The parts of the model.
        step: The step itself, or a control.
        layer: 0 is the input of the first block, k the output of block k.
        fails: See :data:`Fails`.

    Returns:
        The tensors of each call.

    Raises:
        UnusableObservation: a call cannot be repeated, on this process or on another one.
    """
    crossings = []
    with _model_for_states(anatomy) as model:
        tap = SplitTap(anatomy, [layer], ())
        try:
            for call in step.calls:
                tap.arm()
                run_backward(anatomy, model, call, fails)
                crossings.append(tap.take(call.texts))
        finally:
            tap.close()
    return crossings


@contextmanager
def _model_for_states(anatomy: Anatomy) -> Iterator[nn.Module]:
    """Yield the model for repeated calls that record hidden states; its state is restored after."""
    if is_compiled(anatomy.root):
        raise UnusableObservation("a check of hidden states would compile the model again")
    with _repeatable_model(anatomy) as (model, _):
        yield model


@contextmanager
def _repeatable_model(anatomy: Anatomy) -> Iterator[tuple[nn.Module, dict[int, nn.Parameter]]]:
    """Yield the model for repeated calls, and the leaves that get gradients, by parameter ``id``.

    The model's state is restored after the block. Under FSDP2 and ZeRO-3 the leaves are the
    parameters themselves. The hooks of these packages run: they gather weights layer by layer, so
    that all processes must make the same calls, and those of FSDP2 reduce gradients.
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


def _drop_gradient(parameter: Tensor) -> None:
    """Free the gradient of a parameter whose gradient is not needed."""
    parameter.grad = None


def run_backward(
    anatomy: Anatomy, model: nn.Module, call: ModelCall, fails: Fails = bool, *, scale: float = 1.0
) -> None:
    """Run one call again, and its backward from the logits.

    A call of the step itself gets exactly the gradient of the logits that it had. A call of a
    control gets rows with its labels and shapes.

    Args:
        anatomy: The parts of the model.
        model: The model to be called.
        call: The call of the step, or of a control.
        fails: See :data:`Fails`.
        scale: The loss scale that the recorded gradients contain; it is divided out.

    Raises:
        UnusableObservation: The call cannot be repeated, on this process or on another one.
    """
    for module in modules_of(anatomy.root):
        is_training = id(module) in call.training
        if module.training is not is_training:  # setting an attribute of a module is slow
            module.training = is_training
    if fails(has_cache(call.arguments)):
        raise UnusableObservation("the model's call has a cache, which a second call would change")
    device, dtype = anatomy.device, call.autocast
    set_random_states(call.random, device)
    with torch.autocast(device.type, dtype=dtype, enabled=dtype is not None):
        states, logits = _repeat_forward(anatomy, model, call)
    heads = call.read_heads
    shapes_differ = [head.shape for head in heads] != [values.shape[:-1] for values in logits]
    if call.shapes is None and not fails(shapes_differ):
        rows = [head.gradient_of(values) for head, values in zip(heads, logits, strict=True)]
    else:
        rows = _control_rows(call, logits, fails)
    if states is not None:
        assert call.gradient is not None
        is_trained = [values.requires_grad for values in logits]  # False if the head is frozen
        logits = [states, *compress(logits, is_trained)]
        rows = [call.gradient, *compress(rows, is_trained)]
    torch.autograd.backward(logits, [row / scale for row in rows])


def _control_rows(call: ModelCall, logits: Sequence[Tensor], fails: Fails) -> list[Tensor]:
    """Return the gradient of each of the logits (..., V), with the labels and shapes of a call."""
    placed = call.known_rows
    shapes = placed.rows.shapes if call.shapes is None else call.shapes
    counts = [part.shape[:-1].numel() for part in logits]
    index, n_rows = placed.index, sum(counts)
    width = n_rows // max(1, len(call.texts.input_ids))
    if n_rows != placed.n_rows and len(logits) == 1 and width >= placed.width:
        # The step called the head on some positions only, and the repeated call on all of them.
        index = placed.text * width + placed.place + width - placed.width
    elif fails(n_rows != placed.n_rows):
        raise UnusableObservation("a repeated call of the model gave other rows of logits")
    gradient = call.read_heads[0].gradient if call.read_heads else None
    if gradient is not None:  # a classifier's gradient is scaled as a whole, whatever its labels
        # 0 for rows that a part of the control, its first labels (Step.part), excludes.
        shares = shapes[0] / placed.rows.sizes
        return [gradient * shares.nan_to_num(0.0).view(*gradient.shape[:-1], 1).to(gradient)]
    targets = _targets(placed, call.texts)
    all_targets = torch.split(targets.new_zeros(n_rows).index_copy(0, index, targets), counts)
    all_shapes = torch.split(shapes.new_zeros(3, n_rows).index_copy(1, index, shapes), counts, 1)
    temperature = call.read_heads[0].temperature if call.read_heads else None
    parts = zip(logits, all_targets, all_shapes, strict=True)
    return [make_rows(*part, temperature) for part in parts]


def _repeat_forward(
    anatomy: Anatomy, model: nn.Module, call: ModelCall
) -> tuple[Tensor | None, list[Tensor]]:
    """Repeat a forward, and return its logits at the place where the step's rows were read.

    If the rows were read at the last hidden states, and the call is one of the step itself, these
    states are returned first. Their gradient is known, so that the logits are computed from
    detached states and depend on the head alone.
    """
    heads, backbone = list[Tensor](), backbone_of(anatomy)
    source = call.read_heads[0].source if call.read_heads else "model"
    target: Any = call.module if call.module is not None else model
    head: Any = anatomy.head
    arguments = _arguments(call, model)
    if backbone is not None and (source == "states" or target is backbone):
        if "labels" in call.arguments:  # some backbones compute a fused loss from the labels
            arguments["labels"] = call.arguments["labels"]
        run_to_end = model_runs.stop_at(target, Place("", backbone, "output"))
        states: Tensor = last_states_in(run_to_end(**arguments))
        reads_states = call.shapes is None and source == "states"
        inputs = states.detach() if reads_states else states
        if not torch.is_autocast_enabled(inputs.device.type):  # a loss of its own casts the states
            inputs = inputs.to(next(head.parameters()).dtype)
        logits = capped(head(inputs), logit_cap(anatomy))
        return states if reads_states else None, [logits]
    handle = head.register_forward_hook(lambda _m, _a, output: heads.append(output))
    try:
        output = target(**arguments)
    finally:
        handle.remove()
    return None, [model_runs.logits_in(output)] if source == "model" or not heads else heads


def _arguments(call: ModelCall, model: nn.Module) -> dict[str, object]:
    """Return the arguments of the call, with the ids and labels of its token batch."""
    assert call.ids is not None
    batch = call.texts
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
        shifted = torch.cat([previous[:, :1], labels[:, :-1].to(previous)], 1)
        arguments["decoder_input_ids"] = torch.where(shifted == IGNORE_INDEX, previous, shifted)
    return arguments


def _targets(placed: PlacedRows, batch: TokenBatch) -> Tensor:
    """Return (N,) the label of each row of the logits, 0 for a row without one."""
    labels = batch.labels
    assert labels is not None
    if labels.dim() == 1:
        return labels[placed.text].clamp(min=0)
    shift = int(batch.kind == "causal")
    padded = functional.pad(labels, (0, shift), value=IGNORE_INDEX)
    return padded[placed.text, placed.place + shift].clamp(min=0).to(placed.text.device)
