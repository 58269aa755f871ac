"""The calls of the model in a training step, and whether packed documents attend to each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

import torch
from torch import Tensor, nn

from lightning_fedleak.model import model_runs
from lightning_fedleak.model.anatomy import (
    Anatomy,
    has_cache,
    ids_argument,
    matrix_shape,
    place_of,
    text_blocks,
)
from lightning_fedleak.model.batches import TokenBatch
from lightning_fedleak.model.snapshots import UnusableObservation, is_shard
from lightning_fedleak.model.taps.activations import join_pieces
from lightning_fedleak.model.taps.graph import arguments_of
from lightning_fedleak.model.taps.hooks import raise_kept, raised_when_read

NOT_TESTED = (
    "several documents are packed into a row, and it could not be tested whether they attend to "
    "each other ({}): set crossing=False or True in a TokenBatch, by a batch_adapter= in settings="
)


MEDIA = ("pixel_values", "input_features", "input_values")
"""Prefixes of the names that transformers has for arguments with images or sounds."""


class ModelCalls:
    """A hook that records the arguments of each forward with gradients after :meth:`arm`.

    Args:
        anatomy: The parts of the model.
    """

    def __init__(self, anatomy: Anatomy) -> None:
        self._calls: list[dict[str, object]] = []
        self.error: Exception | None = None
        self._armed = False
        self._root = anatomy.root

        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def record(model: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
            if self._armed and torch.is_grad_enabled():
                self._note(model, args, kwargs)

        self._handle = anatomy.model.register_forward_pre_hook(record, with_kwargs=True)
        model_runs.reset_compiled(anatomy.root)

    @raised_when_read
    def _note(self, model: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        arguments = arguments_of(model, args, kwargs)
        if (name := ids_argument(model)) in arguments:
            arguments["input_ids"] = arguments.pop(name)
        self._calls.append(arguments)

    @property
    def calls(self) -> list[dict[str, object]]:
        """Return the arguments of each call, by name; raise an error of the hook."""
        raise_kept(self)
        return self._calls

    def arm(self, active: bool = True) -> None:
        """Drop the records, and record from now on; if not ``active``, stop recording."""
        self._calls, self.error = [], None
        self._armed = active

    def close(self) -> None:
        """Remove the hook."""
        self.arm(False)
        self._handle.remove()
        model_runs.reset_compiled(self._root)


def with_ids(
    calls: Sequence[Mapping[str, object]], batches: Sequence[TokenBatch]
) -> list[TokenBatch]:
    """Return the batches with the ids that the model was called on.

    Args:
        calls: The arguments of each call of the model, by name.
        batches: The batches of these calls.

    Raises:
        UnusableObservation: The model was not called once for each batch, or on other shapes.
    """
    ids_of_calls = [call.get("input_ids") for call in calls]
    pieces = [ids for ids in ids_of_calls if isinstance(ids, Tensor) and ids.dim()]
    joined = join_pieces(pieces, [len(batch.input_ids) for batch in batches])
    ids_of_batches = joined if len(pieces) == len(calls) else ids_of_calls
    new_batches = [
        replace(batch, input_ids=ids)
        for batch, ids in zip(batches, ids_of_batches, strict=False)
        if isinstance(ids, Tensor) and ids.shape == batch.input_ids.shape
    ]
    if len(ids_of_batches) != len(batches) or len(new_batches) != len(batches):
        raise UnusableObservation(
            "a defence replaces the batch, and which token ids the model ran on is not known: "
            f"{len(calls)} calls in {len(batches)} batches, {len(new_batches)} of their shape"
        )
    return new_batches


@torch.no_grad()
def crosses(anatomy: Anatomy, batch: TokenBatch, call: Mapping[str, object]) -> bool:
    """Return whether documents in one row attend to each other, by two runs of a recorded call.

    The second run replaces the tokens of every other document, from the first on. Documents attend
    to each other if this changes a hidden state of the remaining documents after the last block.

    Args:
        anatomy: The parts of the model.
        batch: The batch of the call, with several documents in a row.
        call: The arguments of the call, by name.

    Raises:
        UnusableObservation: The call was not made on the tokens of the batch, or cannot be
            repeated.
    """
    ids, documents = call.get("input_ids"), batch.documents
    is_batch = documents is not None and isinstance(ids, Tensor) and ids.shape == documents.shape
    if not is_batch or has_cache(call) or not text_blocks(anatomy):
        why = "cannot be repeated" if is_batch else "was not on the batch's input_ids"
        raise UnusableObservation(NOT_TESTED.format(f"the model's call {why}"))
    assert isinstance(ids, Tensor)
    assert documents is not None
    shape = matrix_shape(anatomy.embedding)
    vocab_size = anatomy.vocab_size if shape is None else shape[0]
    replaced = documents.to(ids.device) % 2 == 0
    new_ids = torch.where(replaced, (ids + 1) % vocab_size, ids)
    inputs = {name: value for name, value in call.items() if name != "labels"}
    place = place_of(anatomy, len(text_blocks(anatomy)))
    with model_runs.undisturbed(anatomy) as model, model_runs.only_needed_hooks(anatomy.root):
        run = model_runs.stop_at(model, place)
        states = [
            run(**{**inputs, "input_ids": each})[:, -ids.shape[1] :] for each in (ids, new_ids)
        ]
    compared = ~replaced
    if batch.attention_mask is not None:
        compared &= (batch.attention_mask != 0).to(ids.device)
    return not torch.equal(states[0][compared], states[1][compared])


class PackedRows:
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
        """Return the batch with ``crossing`` set; each form of a call is tested only once.

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
        sharded = any(map(is_shard, self._anatomy.root.parameters()))
        if sharded or len(calls) != 1:
            called = f"the model was called {len(calls)} times in one batch"
            why = "the model's parameters are sharded" if sharded else called
            raise UnusableObservation(NOT_TESTED.format(why))
        [call] = calls
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
