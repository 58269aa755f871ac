"""The truth of the steps that are looked at: off the graph of the step, or else off the batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lightning_fedleak.engine.run import AUTOCAST, Look, Refusal, Run, reason
from lightning_fedleak.messages import rank_zero_info
from lightning_fedleak.model.anatomy import matrix_shape
from lightning_fedleak.model.batches import (
    BatchAdapter,
    BatchError,
    TokenBatch,
    adapter_to_copy,
    read_batch,
)
from lightning_fedleak.model.taps import (
    EmbeddingNoise,
    GraphCall,
    GraphTap,
    PackedRows,
    ReadCall,
    plain_call,
    read_call,
)

_NO_GRADIENT = (
    "the forward of its output head was not called, or its logits got no gradient (a fused or "
    "chunked loss?)"
)


class StepTruth:
    """Read which ids and labels a step was computed on, and what the step did with them.

    They are read off the step's own forward and backward, so that the form of the user's batch
    does not matter. The batch is read where the head's forward is not called, and where a defence
    replaces its tokens on the way to the model.

    Args:
        run: the run.
        adapter: turns the user's batch into a :class:`TokenBatch`; None reads the known forms.
    """

    def __init__(self, run: Run, adapter: BatchAdapter | None) -> None:
        self._run = run
        self._adapter = adapter
        self._graph = GraphTap(run.anatomy)
        replacing = next((d.name for d in run.defenses if d.acts_on_batches), None)
        self._why_not = self._graph.why_not
        if replacing is not None:
            self._why_not = f"the defence '{replacing}' replaces tokens on their way to the model"
        self._embeddings = EmbeddingNoise(run.anatomy)
        self._rows: PackedRows | None = None
        self._is_first = True
        self._said: set[str] = set()
        self._unreadable: Exception | None = None

    def close(self) -> None:
        """Remove every hook."""
        self._graph.close()
        self._embeddings.close()
        if self._rows is not None:
            self._rows.close()
        self._rows = None

    def check_first(self, batch: Any) -> None:
        """Refuse a first batch that can be read nowhere, on all processes at once.

        Raises:
            BatchError: shows an adapter to copy.
        """
        if not self._is_first:
            return
        self._is_first = False
        error: Exception | None = None
        try:
            self.read(batch)
        except Exception as refusal:
            error = refusal
            if self._adapter is None and batch is not None:
                kind = self._run.anatomy.kind
                error = BatchError(f"{refusal}\n{adapter_to_copy(batch, kind)}")
        needed = self._why_not is not None or batch is None or self._adapter is not None
        if self._run.on_any_process(error is not None and needed):
            raise Refusal(error or BatchError("another process could not read its first batch"))
        self._unreadable = error

    def read(self, batch: Any) -> TokenBatch:
        """Return the ids, labels and mask of the user's batch.

        Raises:
            BatchError: its form is not known.
        """
        if batch is None:
            raise BatchError(
                "the batch is not known before training_step. A step that takes dataloader_iter "
                "cannot be watched: write training_step(self, batch, batch_idx)."
            )
        if self._adapter is not None:
            return self._adapter(batch)
        return read_batch(batch, self._run.anatomy.kind)

    # ---- a look -----------------------------------------------------------------------------

    def arm(self) -> None:
        """Record the calls of the model from now on, unless their graph cannot be read."""
        if self._why_not is None:
            self._graph.arm()

    def disarm(self) -> None:
        """Remove the hooks of a step, and forget its calls."""
        self._graph.close()
        self._embeddings.close()

    def batch_begins(self, look: Look, batch: Any) -> None:
        """Keep the batch of a look as it is before any defence acts."""
        self._embeddings.arm()
        look.current, look.batch, look.batch_error = [], None, None
        try:
            look.batch = tokens = self.read(batch)
            if tokens.documents is not None and self._why_not is not None:
                self._rows = self._rows or PackedRows(self._run.anatomy, self._run.forward_context)
                self._rows.watch(tokens)
        except Exception as error:
            look.batch_error = reason(error)

    def settle(self, look: Look) -> None:
        """Read what the step did with its batch, once its backward is over."""
        if look.truth_error is not None:
            return
        try:
            with look.clock(self._run.device):
                calls = [] if self._why_not is not None else self._graph.take()
                if calls:
                    look.current += self._of_calls(look, calls)
                elif not look.current and look.batch is not None:
                    look.current = [self._of_batch(look, look.batch)]
                elif not look.current and look.batch_error is not None:
                    look.truth_error = look.batch_error
                if look.current:
                    noise = self._embeddings.settled(look.current[0].batch)
                    look.input_noise = max(look.input_noise, noise)
        except Exception as error:
            look.truth_error = reason(error)

    def _of_calls(self, look: Look, calls: list[GraphCall]) -> list[ReadCall]:
        """Return the calls with the truth that their graph shows, or else the batch as read."""
        kind, read = self._run.anatomy.kind, look.batch
        try:
            reads = [read_call(call, kind, read) for call in calls]
        except BatchError as error:
            if read is None:
                raise
            self._say(f"the labels of a step are read off its batch: {error}")
            return [self._of_batch(look, read)]
        for i, one in enumerate(reads):
            if one.batch.crossing is None and one.batch.is_packed:
                self._rows = self._rows or PackedRows(self._run.anatomy, self._run.forward_context)
                batch = self._rows.with_crossing(one.batch, [one.call.arguments])
                reads[i] = replace(one, batch=batch)
        self._say("the labels and inputs of a step are read off its own graph")
        [*others, last] = reads
        ids = last.call.ids
        if not others and ids is not None and last.batch.input_ids.shape == ids.shape:
            look.batch = last.batch
        return reads

    def _of_batch(self, look: Look, batch: TokenBatch) -> ReadCall:
        """Return the batch as it was read."""
        self._say(f"the labels of a step are read off its batch: {self._why_not or _NO_GRADIENT}")
        if self._rows is not None:
            batch = self._rows.with_crossing(batch)
        look.batch = batch
        return plain_call(self._run.anatomy, batch, AUTOCAST.get(self._run.precision))

    def _say(self, sentence: str) -> None:
        """Log a sentence about where the truth comes from, once for each kind of it."""
        kind = sentence.partition(":")[0]
        if kind not in self._said:
            self._said.add(kind)
            rank_zero_info(f"{self._run.watcher}: {sentence}")

    def batch_ends(self, look: Look, *, trained: bool) -> TokenBatch | None:
        """Add the batch at work to those of the look; return it, None where it trained nothing."""
        if trained:
            self.settle(look)
        held = look.batch if trained and look.current else None
        if trained:
            for read in look.current:
                self.check(read.batch, look)
            look.calls += look.current
        look.current, look.batch, look.batch_error = [], None, None
        return held

    def check_unread(self, look: Look) -> None:
        """Refuse, at the end of the first look, a batch that neither its graph nor itself shows.

        Raises:
            BatchError: shows an adapter to copy.
        """
        error, self._unreadable = self._unreadable, None
        if self._run.on_any_process(error is not None and look.truth_error is not None):
            raise Refusal(error or BatchError("another process could not read its first batch"))

    def check(self, batch: TokenBatch, look: Look) -> None:
        """Add a batch to a look, unless its values contradict each other: then it is unknown."""
        rows = matrix_shape(self._run.anatomy.embedding)
        try:
            with look.clock(self._run.device):
                batch.check_values(None if rows is None else rows[0], self._run.anatomy.vocab_size)
            look.batches.append(batch)
        except Exception as error:
            look.truth_error = reason(error)
