"""Whole texts from the row spaces of gradients, LoRA or whole: token by token, with a certificate.

What the second block's projections read at a place depends on all tokens up to it. So a prefix
is right where the state of its last token lies in the span of the shared rows (DAGER, Petrov et al.
2024, section 4.2), and texts are read from left to right. Three things are added. Rows that earlier
tokens explain are projected out, so that few rows distinguish many tokens, and all blocks count as
evidence. What a token would explain at any other place is subtracted, because its presence in the
batch says nothing about its place. And a next text may branch off from an earlier one wherever that
one could have gone on differently, so that texts with a common prefix are distinguished.

Where a LoRA has fewer rows than the batch has words, no state fits exactly, and most of what fits
depends on the token alone. So each token's mean state after random others is projected out of rows
and states, and the rest is whitened: it is what a prefix adds to its next token's state.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lightning_fedleak.attacks import row_space
from lightning_fedleak.attacks.base import Query, RunFacts, Surfaces, UnusableObservation
from lightning_fedleak.attacks.local_steps import LocalSteps
from lightning_fedleak.attacks.texts import subspace_rows
from lightning_fedleak.attacks.texts.base import NOTHING, Deadline, TextAttack, TextGuess
from lightning_fedleak.attacks.texts.subspace_encoders import EncoderSearch
from lightning_fedleak.attacks.texts.subspace_search import SubspaceSearch
from lightning_fedleak.attacks.words.subspace import SubspaceWords
from lightning_fedleak.model.anatomy import Anatomy, text_blocks
from lightning_fedleak.model.model_runs import sees_no_later
from lightning_fedleak.model.snapshots import Inapplicable, Observation, UpdateSnapshot
from lightning_fedleak.threats import Capability, ThreatModel

# None of the values was tuned.
BLOCKS = 12  # read at most where rows are few; each costs time, and distinguishes more
ALIKE = 1e-4  # difference of inputs over their norm below which both tokens are tried
MAX_ALIKE = 64  # such tokens; with more of them nothing is certified


class SubspaceTexts(TextAttack):
    """The texts whose hidden states the shared rows of several blocks are combinations of.

    An honest but curious server knows the weights. It takes the tokens of the batch from the first
    block's rows (:class:`~lightning_fedleak.attacks.words.subspace.SubspaceWords`) and tries each
    as the next one of a text, after the prefixes that fit best. It reads gradients, and rounds
    of SGD, with momentum where a round begins with a fresh optimizer.

    A causal text's last token has no part in these gradients and is left open. An encoder is read
    where positions are added to its embeddings. A text that is one token several times looks like
    that token alone where positions are relative.

    Certified means that no text is missing whose part lies above rounding, and that none is wrong,
    up to copies, texts that another begins with, and repetitions of a single token. Updates of
    queries and keys alone are never certified, because these do not show every token, and nor are
    texts where the words are not. ``docs/whole_texts.md`` has the measurements.

    Args:
        budget_seconds: wall time for one observation; None for no bound. After it the best texts
            so far are returned, and the guess says that it is not finished.
        seed: The seed of the contexts in which tokens are tried, and of encoders' descents.
        name: The name in the logs.

    Raises:
        ValueError: a number out of range.

    Examples:
        >>> from lightning_fedleak import LeakageMonitor, SubspaceTexts
        >>> monitor = LeakageMonitor([SubspaceTexts(budget_seconds=30.0)], every_n_steps=100)
    """

    threat_model = ThreatModel.create(
        "an honest but curious server that reads one update of the blocks' projections, or of "
        "adapters on them",
        Capability.KNOWS_MODEL,
    )
    default_name = "subspace_texts"
    config_names = ("beam", "budget_seconds", "seed")
    needs_float64 = True
    reads_adaptive_updates = True
    restores_fully = False
    last_token_open = True
    reads_compressed = frozenset(("topk", "int8", "low_rank"))
    beam = 3  # prefixes that are continued side by side where none is exact; more: slower
    _copy: subspace_rows.BlockInputs | None = None

    def __init__(
        self, *, budget_seconds: float | None = 120.0, seed: int = 0, name: str | None = None
    ) -> None:
        super().__init__(name, budget_seconds)
        self.seed = seed
        self._words = SubspaceWords(capacity_seconds=0)
        self._readable = row_space.PerMaps(self._find_blocks)
        self._complete_maps: frozenset[str] = frozenset()
        self._whitenings: list[Tensor] = []

    def meet(self, facts: RunFacts) -> None:
        """Take the precision, and what made an update, from the run."""
        super().meet(facts)
        self._words.meet(facts)

    def needs(self, anatomy: Anatomy) -> Surfaces:
        """Return what names the words, and the trained projections of some blocks after the first.

        Raises:
            ValueError: an encoder-decoder, an encoder whose positions are not added to its
                embeddings, or a model without a second block of linear maps.
        """
        if anatomy.kind == "seq2seq":
            raise ValueError(f"attack '{self.name}' reads no encoder-decoders: remove the attack")
        words = self._words.needs(anatomy).gradients
        blocks = self._trained(anatomy)
        deeper = [m.name for block in blocks for m in block.trained_readers(anatomy)]
        if not deeper:  # a surface that could be shared, so that it reads as not exposed
            second = self._readable.get(anatomy)[1][-1]
            deeper = [m.name for m in second.maps if m.factor != "B"]
        return Surfaces(gradients=tuple(dict.fromkeys([*words, *deeper])))

    def _find_blocks(
        self, anatomy: Anatomy, maps: Sequence[row_space.LinearMap]
    ) -> tuple[row_space.KnownInput | None, list[row_space.SharedInput]]:
        """Return the inputs that can be read.

        Returns:
            The input of an encoder's first block (None for a causal model), and the input of each
            block's projections: from the first block on for an encoder, from the second on for a
            causal model.
        """
        maps = [m for m in maps if m.factor != "B"]
        blocks: dict[str, row_space.SharedInput] = {}
        for shared_input in row_space.find_shared_inputs(anatomy, maps):
            if shared_input.width == anatomy.hidden_size:
                blocks.setdefault(row_space.block_name(shared_input.maps[0].name), shared_input)
        names = {name for name, _ in text_blocks(anatomy)}
        inputs = [shared_input for block, shared_input in blocks.items() if block in names]
        if len(inputs) < 2:
            raise ValueError(
                f"attack '{self.name}' orders words by the second block's projections, and this "
                "model has no second block with linear maps that are called once: remove the attack"
            )
        if sees_no_later(anatomy):
            return None, inputs[1:]
        first = next((k for k in self._words.inputs(anatomy) if k.positional), None)
        if first is None or first.reader is not inputs[0].reader:
            raise ValueError(
                f"attack '{self.name}' reads an encoder's texts where positions are added to the "
                "first block's embeddings, which they are not in this model: remove it"
            )
        return first, inputs

    def _trained(self, anatomy: Anatomy) -> list[row_space.SharedInput]:
        """Return the inputs of the blocks that are trained and read; none where too few are."""
        first, inputs = self._readable.get(anatomy)
        trained = [block for block in inputs if block.trained_readers(anatomy)]
        if not trained or (first and (trained[0] is not inputs[0] or len(trained) < 2)):
            return []
        rows = sum(m.rows for m in trained[0].trained_readers(anatomy))
        max_blocks = 1 if rows >= trained[0].width else BLOCKS
        return trained[: max_blocks + bool(first)]

    def prepare(self, anatomy: Anatomy) -> None:
        """Copy the model up to the blocks that are read, and run it on random tokens.

        Raises:
            ValueError: the model cannot be run as far as these blocks.
        """
        self._words.prepare(anatomy)
        inputs = self._trained(anatomy)
        self._copy = None
        if not inputs:
            return
        self._copy = subspace_rows.BlockInputs(anatomy, inputs, self._facts)
        self._complete_maps = row_space.lone_token_maps(anatomy, inputs[0].maps)
        self._whitenings = self._copy.whitenings(self.seed)

    def refresh(self, anatomy: Anatomy, step: int) -> None:
        """Copy the weights again, and prepare again where something else is trained."""
        self._words.refresh(anatomy, step)
        inputs = self._trained(anatomy)
        if self._copy is None or list(self._copy.inputs) != inputs:
            self.prepare(anatomy)
        if self._copy is not None:
            self._copy.refresh(anatomy, step)

    @torch.no_grad()
    def run(self, view: Observation, query: Query | None = None) -> TextGuess:
        """Reconstruct the texts of a batch.

        Returns:
            A row for each text, in any order, and texts that were never there where the rows do not
            distinguish them; ``finished`` says that no time was lacking.

        Raises:
            UnusableObservation: non-finite or zero gradients, more words than the first block's
                rows distinguish, or an update that is no gradient.
        """
        assert self._copy is not None
        deadline, update = Deadline(self.budget_seconds), view.gradients[-1]
        if isinstance(update, UpdateSnapshot):
            steps = LocalSteps.from_facts(self._facts)
            if steps is None or not steps.sums(fresh=update.fresh):
                raise UnusableObservation(
                    "whole texts are read off gradients and rounds of steps of SGD without weight "
                    "decay, with momentum where it begins afresh (optimizer.state.clear()): "
                    "measure the gradients of single steps (omit local_steps)"
                )
        bottom = self._copy
        maps = [m for block in bottom.inputs for m in block.trained_readers(bottom.anatomy)]
        if any(m.regularised for m in maps):
            raise Inapplicable(
                "the loss has a term of AdaLoRA's A alone, which is not taken off the rows of "
                "blocks behind the first; SubspaceWords reads the words, and of LoRA texts are read"
            )
        words = self._words.run(view)
        autocast = self._facts.autocast
        bottom.row_places, whitenings = (), self._whitenings
        first = self._readable.get(bottom.anatomy)[0]
        if view.gradients[-1].compression == "topk":
            if first is not None:
                raise Inapplicable("an encoder's texts are read off whole rows, not parts of them")
            bottom.row_places, shared = subspace_rows.kept_rows(bottom, view)
            whitenings = bottom.whitenings(self.seed)
        else:
            shared = [
                subspace_rows.shared_rows(b, bottom.anatomy, view, autocast) for b in bottom.inputs
            ]
        bag = words.types.sort().values.to(bottom.device)
        if not len(bag):
            raise UnusableObservation("no word stands out of the noise")
        distinguished = True
        if words.silent is not None:
            alike = self._words.similar_tokens(bag, ALIKE, words.silent)
            distinguished = len(alike) <= MAX_ALIKE
            bag = torch.cat([bag, alike]).sort().values if distinguished else bag
        search: SubspaceSearch | EncoderSearch
        if first is None:
            search = SubspaceSearch(bottom, whitenings, shared, bag, self.beam, self.seed)
        else:
            search = EncoderSearch(bottom, first, whitenings, shared, bag, self.seed)
        with bottom.session():
            texts, finished, certain = search.run(deadline)
        certain = certain and bool(words.certified) and distinguished and self._shows_all(view)
        if not texts:
            raise UnusableObservation("no text explains what the second block's rows hold")
        tokens = pad_sequence([*map(torch.tensor, texts)], True, NOTHING)
        return TextGuess(tokens, finished, search.n_tried, certain)

    def _shows_all(self, view: Observation) -> bool:
        """Return whether the block that names texts has maps that show every token."""
        assert self._copy is not None
        maps = self._copy.inputs[0].trained_readers(self._copy.anatomy)
        names = {m.name for m in maps if bool(view.gradient(m.name).any())}
        return bool(names & self._complete_maps)
