"""How a batch of the user's is read, and how a copy with other words is made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_fedleak.anatomy import Kind
from lightning_fedleak.batches import (
    BatchAdapter,
    BatchError,
    BatchWriter,
    TokenBatch,
    other_fields,
    read_batch,
    write_batch,
)
from lightning_fedleak.defenses.token_words import TextError

PUBLIC_FIELDS = frozenset(
    ("position_ids", "token_type_ids", "special_tokens_mask", "length", "lengths")
)
"""Fields of a batch that say where words stand, not which: they are handed on as they are."""


@dataclass(frozen=True)
class BatchForm:
    """The form of the user's batches.

    Attributes:
        public_fields: fields besides ids, mask and labels that may pass as they are.
        example_ids: name of a field with one integer for each row; None where there is none.
        adapter: reads a batch of the user's own form; None for the forms that are known.
        writer: gives a copy of such a batch with the ids and labels of a TokenBatch; None
            together with ``adapter``.
    """

    public_fields: frozenset[str]
    example_ids: str | None
    adapter: BatchAdapter | None
    writer: BatchWriter | None

    def read(self, batch: Any, kind: Kind) -> TokenBatch:
        """Ids, mask and labels of a batch.

        Raises:
            TextError: it cannot be read, or it holds fields that may be text.
        """
        try:
            if self.adapter is not None:
                return self.adapter(batch)
            tokens = read_batch(batch, kind)
            allowed = self.public_fields | ({self.example_ids} if self.example_ids else set())
            unknown = [name for name in other_fields(batch) if name not in allowed]
        except BatchError as error:
            raise TextError(
                f"the batch cannot be read ({error}). Give batch_adapter= and batch_writer="
            ) from error
        if unknown:
            raise TextError(
                f"the batch holds the fields {', '.join(unknown)}, which would reach the model as "
                "they are. Take them out of the batch, or, if they say nothing about the text, "
                f"name them in public_fields={unknown}"
            )
        return tokens

    def write(self, batch: Any, tokens: TokenBatch) -> Any:
        """A copy of ``batch`` with the ids and labels of ``tokens``.

        Raises:
            TextError: it cannot be copied, or the user's writer does not put them in.
        """
        try:
            if self.writer is None or self.adapter is None:
                return write_batch(batch, tokens)
            written = self.writer(batch, tokens)
            read = self.adapter(written)
        except BatchError as error:
            raise TextError(
                f"the batch cannot be copied ({error}). Give batch_adapter= and batch_writer="
            ) from error
        pairs = [(read.input_ids, tokens.input_ids), (read.labels, tokens.labels)]
        for got, wanted in pairs:
            if wanted is not None and (got is None or not torch.equal(got, wanted)):
                raise TextError(
                    "batch_writer gave a batch that batch_adapter reads other ids or labels from "
                    "than it was given: it must put both in"
                )
        return written

    def ids_of_examples(self, batch: Any, rows: int) -> list[int] | None:
        """One integer for each row; None where no field is named.

        Raises:
            TextError: the field does not hold them.
        """
        if self.example_ids is None:
            return None
        get = batch.get if hasattr(batch, "get") else lambda name: getattr(batch, name, None)
        found = get(self.example_ids)
        if not isinstance(found, Tensor) or found.shape != (rows,) or found.is_floating_point():
            raise TextError(
                f"example_ids='{self.example_ids}' must name a field with one integer for each of "
                f"the batch's {rows} rows"
            )
        return [int(i) for i in found.tolist()]


__all__ = ["PUBLIC_FIELDS", "BatchForm"]
