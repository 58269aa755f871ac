"""Hooks on a step's own graph: the calls of the model, what they read, and where its loss begins.

Labels are read off dL/dlogits where the output head is called
(:mod:`~lightning_fedleak.model.taps.row_labels`), and off the last hidden states where a fused loss
never calls it (:mod:`~lightning_fedleak.model.taps.last_states`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.hooks import RemovableHandle

from lightning_fedleak.model import model_runs, model_state
from lightning_fedleak.model.anatomy import Anatomy, without_peft
from lightning_fedleak.model.batches import IGNORE_INDEX, TokenBatch
from lightning_fedleak.model.snapshots import is_shard
from lightning_fedleak.model.taps.calls import arguments_of
from lightning_fedleak.model.taps.hooks import raise_kept, raised_when_read
from lightning_fedleak.model.taps.last_states import (
    MAX_SOFT,
    HeadMap,
    backbone_of,
    fit_temperature,
    last_states_in,
    read_states,
)
from lightning_fedleak.model.taps.row_labels import RowLabels, read_rows


@dataclass(eq=False)
class _HeadCall:
    """The logits of one call, and what their gradient shows.

    Attributes:
        shape: of the logits but for their last dimension.
        n_entries: of a row.
        source: where rows were read: off the head's output, off logits that the model has scaled or
            capped behind it, or off the last hidden states.
        temperature: that the loss divides logits by; read off hidden states alone, else 1.
        rows: what the gradient's rows show; None until the backward.
    """

    shape: torch.Size
    n_entries: int
    source: Literal["head", "model", "states"] = "head"
    temperature: float = 1.0
    rows: RowLabels | None = None


@dataclass(eq=False)
class GraphCall:
    """One call of the model in a step, as the user made it.

    Attributes:
        module: what was called: the model, or the part of it that a step calls alone; None where
            the embedding was, outside of any of these.
        arguments: of the call, by name.
        ids: (B, L) ids that arrived at the input embedding first; None where none did.
        heads: the calls of the head within.
        training: the modules of the model that were in train mode.
        autocast: dtype that autocast computed in; None without.
        text_logits: the model's logits have a row for each text.
        reached: (B, L) bool, where the embedding, or a causal model's first block, got a gradient.
        states: (B, L, d) last hidden states; None where the head is called, or none have a graph.
        gradient: (B, L, d) of these; None before the backward.
        random: the states of torch's generators at its begin, on the CPU and the model's device.
    """

    module: nn.Module | None
    arguments: Mapping[str, object]
    ids: Tensor | None = None
    heads: list[_HeadCall] = field(default_factory=list)
    training: frozenset[int] = frozenset()
    autocast: torch.dtype | None = None
    text_logits: bool = False
    reached: Tensor | None = None
    states: Tensor | None = None
    gradient: Tensor | None = None
    random: tuple[Tensor, ...] = ()

    @property
    def read_heads(self) -> list[_HeadCall]:
        """Return the calls of the head that got a gradient."""
        return [head for head in self.heads if head.rows is not None]


class GraphTap:
    """Hooks on model, embedding and head that read the truth of the steps that are looked at.

    Args:
        anatomy: the parts of the model.
        temperature: that a fused loss is expected to divide logits by.

    Attributes:
        why_not: why the graph cannot be read here; None where it can.
        error: what a hook raised; :meth:`take` raises it.
    """

    def __init__(self, anatomy: Anatomy, temperature: float = 1.0) -> None:
        self._anatomy = anatomy
        self._temperature = temperature
        self._backbone = None if anatomy.kind in ("classifier", "seq2seq") else backbone_of(anatomy)
        self._handles: list[RemovableHandle] = []
        self._calls: list[GraphCall] = []
        self._depth = 0
        self._head_logits: Tensor | None = None
        self.error: Exception | None = None
        self.why_not = None
        if anatomy.head is None:
            self.why_not = "the model has no output head"
        elif model_runs.is_compiled(anatomy.root):
            self.why_not = "torch.compile runs the model, whose hooks do not fire"

    def arm(self) -> None:
        """Record the calls from now on."""
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

    def take(self, read: TokenBatch | None = None) -> list[GraphCall]:
        """Return the calls whose logits got a gradient since the last time, and forget them.

        Args:
            read: the user's batch as it could be read, whose labels are tried where the head was
                not called.

        Raises:
            Exception: what a hook raised in the user's forward or backward.
        """
        raise_kept(self)
        for call in self._calls:
            if call.gradient is not None and not call.read_heads:
                self._read_states(call, read)
        for before, call in zip(self._calls, self._calls[1:], strict=False):
            if call.ids is None and before.module is None and not before.heads:
                call.ids, call.reached = before.ids, before.reached  # an encoder's, called before
        calls = [call for call in self._calls if call.read_heads]
        self._calls = [call for call in self._calls if not call.read_heads]
        return calls

    @raised_when_read
    def _model_begins(
        self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> None:
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
        random = model_state.random_states(self._anatomy.device)
        call = GraphCall(module, arguments, training=training, autocast=dtype, random=random)
        self._calls.append(call)

    @raised_when_read
    def _model_ends(self, module: nn.Module, args: object, output: object) -> None:
        if model_runs.is_observed() or not self._depth:
            return
        self._depth -= 1
        if self._depth or not self._calls:
            return
        call = self._calls[-1]
        try:
            logits = model_runs.logits_in(output)
        except (ValueError, LookupError):  # its output holds none
            return
        call.text_logits = logits.dim() == 2
        if not logits.requires_grad or logits.shape[-1:] != (self._anatomy.vocab_size,):
            return
        if not call.heads:
            self._watch(logits, call)  # a product with the head's matrix, not its forward
        elif len(call.heads) == 1 and self._is_behind(logits):
            read = partial(self._read_logits, call.heads[0], "model", logits.detach())
            logits.register_hook(read)  # type: ignore[no-untyped-call]

    def _is_behind(self, logits: Tensor) -> bool:
        """Return whether a model's logits are others than its head's: scaled, or capped."""
        head, self._head_logits = self._head_logits, None
        if head is None or head.shape != logits.shape or not head.numel():
            return False
        return not torch.equal(head.flatten(0, -2)[0].float(), logits.flatten(0, -2)[0].float())

    @raised_when_read
    def _backbone_ends(self, module: nn.Module, args: object, output: object) -> None:
        if model_runs.is_observed() or not self._depth or not self._calls:
            return
        states, call = last_states_in(output), self._calls[-1]
        if isinstance(states, Tensor) and states.dim() == 3 and states.requires_grad:
            call.states = states.detach()
            states.register_hook(partial(self._keep_gradient, call))  # type: ignore[no-untyped-call]

    @raised_when_read
    def _embed(self, layer: nn.Module, args: tuple[object, ...], output: object) -> None:
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

    def _watch(self, logits: Tensor, call: GraphCall) -> None:
        head = _HeadCall(logits.shape[:-1], logits.shape[-1])
        call.heads.append(head)
        self._head_logits = logits.detach()
        read = partial(self._read_logits, head, "head", logits.detach())
        logits.register_hook(read)  # type: ignore[no-untyped-call]

    @raised_when_read
    def _read_logits(
        self, head: _HeadCall, source: Literal["head", "model"], logits: Tensor, gradient: Tensor
    ) -> None:
        if head.rows is None or head.source == source:  # those behind the head come first
            head.source = source
            head.rows = read_rows(gradient.flatten(0, -2), logits.flatten(0, -2))

    @raised_when_read
    def _keep_gradient(self, call: GraphCall, gradient: Tensor) -> None:
        if call.read_heads:  # they show it exactly
            call.states = None
        elif call.gradient is None:
            call.gradient = gradient.detach().clone()
        else:  # of a second backward
            call.gradient += gradient

    def _read_states(self, call: GraphCall, read: TokenBatch | None) -> None:
        """Read labels off the last hidden states of a call, and forget these."""
        states, gradient, call.states, call.gradient = call.states, call.gradient, None, None
        assert states is not None
        assert gradient is not None
        assert self._anatomy.head is not None
        if call.ids is None or any(is_shard(p) for p in self._anatomy.head.parameters()):
            return
        head = HeadMap.of(self._anatomy, self._temperature)
        flat = states.flatten(0, 1), gradient.flatten(0, 1)
        given = [_claims(call.ids, states.shape[1], 1)]
        if read is not None and read.labels is not None and read.labels.shape == call.ids.shape:
            shift = int(self._anatomy.kind == "causal")
            given.append(_claims(read.labels.to(call.ids.device), states.shape[1], shift))
        rows = read_states(*flat, head, given)
        many_are_soft = float(rows.soft.sum()) > MAX_SOFT * float(rows.live.sum())
        if many_are_soft and (fitted := fit_temperature(*flat, head)) is not head:
            head, self._temperature = fitted, fitted.temperature
            rows = read_states(*flat, head, given)
        shape, width = states.shape[:-1], len(head.weight)
        call.heads = [_HeadCall(shape, width, "states", head.temperature, rows)]

    @raised_when_read
    def _read_reach(self, call: GraphCall, gradient: Tensor) -> None:
        call.reached = (gradient != 0).any(-1) | (False if call.reached is None else call.reached)


def _claims(labels: Tensor, width: int, shift: int) -> Tensor:
    """Return (B width,) the labels (B, L) that rows of hidden states may have, -100 for none.

    Args:
        labels: by the place of their token; virtual tokens, which come first, have none.
        width: columns of the hidden states.
        shift: columns between a row and its label.
    """
    length = labels.shape[1]
    labels = functional.pad(labels.long(), (max(0, width - length), shift), value=IGNORE_INDEX)
    return labels[:, shift : shift + width].flatten()
