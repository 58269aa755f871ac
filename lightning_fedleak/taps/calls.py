"""The calls of the model in a training step, and whether packed documents attend to each other."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

import torch
from torch import Tensor, nn

from lightning_fedleak.anatomy import Anatomy, matrix_shape, place_of, text_blocks, without_peft
from lightning_fedleak.batches import TokenBatch
from lightning_fedleak.model_runs import only_needed_hooks, reset_compiled, stop_at, undisturbed
from lightning_fedleak.snapshots import UnusableObservation
from lightning_fedleak.taps.activations import join_pieces

NOT_TRIED = (
    "several documents are packed into a row, and whether they attend to each other could not be "
    "tried ({}): say it, with batch_adapter= and TokenBatch(..., crossing=False) or True"
)


class ModelCalls:
    """A hook that records the arguments of each forward with gradient since :meth:`arm`.

    Args:
        anatomy: of the model.

    Attributes:
        calls: the arguments by name, of each call.
    """

    def __init__(self, anatomy: Anatomy) -> None:
        self.calls: list[dict[str, object]] = []
        self._armed = False
        self._root = anatomy.root

        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def called(model: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
            if self._armed and torch.is_grad_enabled():
                self.calls.append(arguments_of(model, args, kwargs))

        self._handle = anatomy.model.register_forward_pre_hook(called, with_kwargs=True)
        reset_compiled(anatomy.root)

    def arm(self, active: bool = True) -> None:
        """Drop the records, and record from here on, or (False) no longer."""
        self.calls = []
        self._armed = active

    def close(self) -> None:
        """Remove the hook."""
        self.arm(False)
        self._handle.remove()
        reset_compiled(self._root)


def arguments_of(
    model: nn.Module, args: Sequence[object], kwargs: Mapping[str, object]
) -> dict[str, object]:
    """Return the arguments of a call by name, those too that were passed by position."""
    names: list[str] = []
    for module in (model, without_peft(model)):
        parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
        names = names or [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def with_ids(
    calls: Sequence[Mapping[str, object]], batches: Sequence[TokenBatch]
) -> list[TokenBatch]:
    """Return the batches with the ids that the model was called on.

    Args:
        calls: the model's arguments by name, of each call.
        batches: that the calls were made for.

    Raises:
        UnusableObservation: the model was not called once for each batch, or on other shapes.
    """
    each = [call.get("input_ids") for call in calls]
    pieces = [ids for ids in each if isinstance(ids, Tensor) and ids.dim()]
    whole = join_pieces(pieces, [len(batch.input_ids) for batch in batches])
    ids_of_batches = whole if len(pieces) == len(each) else each
    written = [
        replace(batch, input_ids=ids)
        for batch, ids in zip(batches, ids_of_batches, strict=False)
        if isinstance(ids, Tensor) and ids.shape == batch.input_ids.shape
    ]
    if len(ids_of_batches) != len(batches) or len(written) != len(batches):
        raise UnusableObservation(
            "a defence replaces the batch, and which token ids the model was run on is not "
            f"visible: it was called {len(each)} times in {len(batches)} batches, and on "
            f"ids of the batch's shape in {len(written)} of them"
        )
    return written


@torch.no_grad()
def crosses(anatomy: Anatomy, batch: TokenBatch, call: Mapping[str, object]) -> bool:
    """Return whether documents attend to others of their row, from two runs of a recorded call.

    The tokens of each row's first document, third and so on are replaced. Where the last block's
    hidden states of the others do not stay the same to the last bit, documents see each other.

    Args:
        anatomy: of the model.
        batch: that the call was made with; several documents are in a row.
        call: the arguments of the call, by name.

    Raises:
        UnusableObservation: the call was not made on the tokens of the batch, or cannot be tried.
    """
    ids, documents = call.get("input_ids"), batch.documents
    if documents is None or not isinstance(ids, Tensor) or ids.shape != documents.shape:
        raise UnusableObservation(
            NOT_TRIED.format("the model was not called on the batch's input_ids")
        )
    if call.get("past_key_values") is not None or not text_blocks(anatomy):
        raise UnusableObservation(NOT_TRIED.format("the call cannot be repeated"))
    rows = matrix_shape(anatomy.embedding)
    changed = documents.to(ids.device) % 2 == 0
    tokens = torch.where(
        changed, (ids + 1) % (anatomy.vocab_size if rows is None else rows[0]), ids
    )
    inputs = {name: value for name, value in call.items() if name != "labels"}
    place = place_of(anatomy, len(text_blocks(anatomy)))
    with undisturbed(anatomy) as model, only_needed_hooks(anatomy.root):
        run = stop_at(model, place)
        states = [
            run(**{**inputs, "input_ids": each})[:, -ids.shape[1] :] for each in (ids, tokens)
        ]
    asked = ~changed
    if batch.attention_mask is not None:
        asked &= (batch.attention_mask != 0).to(ids.device)
    return not torch.equal(states[0][asked], states[1][asked])


class PackedRows:
    """Finds out of each batch of a look whether the documents in its rows attend to each other.

    Args:
        anatomy: of the model.
        forward_context: the precision that a step runs in.
    """

    def __init__(
        self, anatomy: Anatomy, forward_context: Callable[[], AbstractContextManager[object]]
    ) -> None:
        self._anatomy = anatomy
        self._forward_context = forward_context
        self._calls: ModelCalls | None = None
        self._crossing: dict[object, bool] = {}

    def watch(self, batch: TokenBatch) -> None:
        """Record the call that a step makes on a batch, where its documents may attend."""
        if batch.documents is not None and batch.crossing is None:
            self._calls = self._calls or ModelCalls(self._anatomy)
            self._calls.arm()

    def close(self) -> None:
        """Remove the hook."""
        if self._calls is not None:
            self._calls.close()
        self._calls = None

    def settled(self, batch: TokenBatch) -> TokenBatch:
        """Return the batch with :attr:`TokenBatch.crossing`, tried once for each form of a call.

        Raises:
            UnusableObservation: it could not be tried.
        """
        if self._calls is None or batch.documents is None or batch.crossing is not None:
            return batch
        calls = self._calls.calls
        self._calls.arm(False)
        if not batch.is_packed:
            return replace(batch, crossing=False)
        sharded = any(hasattr(p, "full_tensor") for p in self._anatomy.root.parameters())
        if sharded or len(calls) != 1:
            called = f"the model was called {len(calls)} times in one batch"
            why = "the model's parameters are sharded" if sharded else called
            raise UnusableObservation(NOT_TRIED.format(why))
        [call] = calls
        form = len(batch.input_ids) == 1, *((n, _form(v)) for n, v in sorted(call.items()))
        if form not in self._crossing:
            with self._forward_context():
                self._crossing[form] = crosses(self._anatomy, batch, call)
        return replace(batch, crossing=self._crossing[form])


def _form(argument: object) -> object:
    """Return what an argument of a call is, for all batches of a fit: its dimensions, or itself."""
    if isinstance(argument, Tensor):
        return argument.dim()
    return argument if isinstance(argument, bool | str) else type(argument).__name__
