"""Record the arguments of the model's calls, and test whether packed documents interact.

Several texts that are packed into one row are its documents. Whether they attend to each other
depends on the model and on its arguments; :func:`crosses` tests it by two runs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from lightning_fedleak.model import model_runs
from lightning_fedleak.model.anatomy import Anatomy, has_cache, ids_argument, place_of, text_blocks
from lightning_fedleak.model.batches import TokenBatch
from lightning_fedleak.model.model_state import reset_compiled
from lightning_fedleak.model.snapshots import UnusableObservation
from lightning_fedleak.model.taps.activations import join_pieces
from lightning_fedleak.model.taps.graph import arguments_of
from lightning_fedleak.model.taps.hooks import Hook, raise_kept, raised_when_read

# The error for packed documents whose interaction is unknown, with the cause in place of ``{}``.
NOT_TESTED = (
    "several documents are packed into a row, and it could not be tested whether they attend to "
    "each other ({}): set crossing=False or True in a TokenBatch, by a batch_adapter= in settings="
)


MEDIA = ("pixel_values", "input_features", "input_values")
"""Prefixes of the arguments that hold images or sounds in transformers."""


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
        hook = Hook(torch.compiler.disable(self._store))  # type: ignore[no-untyped-call]
        self._handle = anatomy.model.register_forward_pre_hook(hook, with_kwargs=True)
        reset_compiled(anatomy.root)

    @raised_when_read
    def _store(self, model: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        """Store the arguments of a call by name; its ids get the name ``input_ids``."""
        if not self._armed or not torch.is_grad_enabled():
            return
        arguments = arguments_of(model, args, kwargs)
        if (name := ids_argument(model)) in arguments:
            arguments["input_ids"] = arguments.pop(name)
        self._calls.append(arguments)

    @property
    def calls(self) -> list[dict[str, object]]:
        """Return the arguments of each call, by name; raise an error that the hook has stored."""
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
        reset_compiled(self._root)


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
            "a defence replaces the batch, and the token ids that the model ran on are unknown"
        )
    return new_batches


@torch.no_grad()
def crosses(anatomy: Anatomy, batch: TokenBatch, call: Mapping[str, object]) -> bool:
    """Return whether documents in one row attend to each other, by two runs of a recorded call.

    The second run replaces the tokens of every second document, from the first on. Documents attend
    to each other if this changes a hidden state of a kept document after the last block.

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
        cause = "cannot be repeated" if is_batch else "was not on the batch's input_ids"
        raise UnusableObservation(NOT_TESTED.format(f"the model's call {cause}"))
    assert isinstance(ids, Tensor)
    assert documents is not None
    is_replaced = documents.to(ids.device) % 2 == 0
    new_ids = torch.where(is_replaced, (ids + 1) % anatomy.embedding_rows, ids)
    inputs = {name: value for name, value in call.items() if name != "labels"}
    place = place_of(anatomy, len(text_blocks(anatomy)))
    with model_runs.undisturbed(anatomy) as model, model_runs.only_needed_hooks(anatomy.root):
        run = model_runs.stop_at(model, place)
        states = [run(**{**inputs, "input_ids": x})[:, -ids.shape[1] :] for x in (ids, new_ids)]
    is_compared = ~is_replaced
    if batch.attention_mask is not None:
        is_compared &= (batch.attention_mask != 0).to(ids.device)
    return not torch.equal(states[0][is_compared], states[1][is_compared])
