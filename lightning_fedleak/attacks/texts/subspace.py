"""Whole texts from the row spaces of gradients of LoRA or full matrices, with a certificate.

The gradient of a linear map is a sum of outer products over tokens, so its rows (*shared rows*) are
combinations of the hidden states that enter the map. The *certificate* is the adversary's own check
that its texts are right, which needs no more than what was shared.

The input of the second block's projections at a position depends on all tokens up to it. So a
prefix is correct if the state of its last token lies in the span of the shared rows (DAGER, Petrov
et al. 2024, section 4.2), and texts are recovered from left to right. This search adds to DAGER:

- States of tokens that were recovered are projected out of the rows, so that few rows distinguish
  many tokens, and all blocks count as evidence.
- The evidence of a token at other positions is subtracted: that it is in the batch says nothing
  about its position.
- A new text may share a prefix with an earlier one, wherever that one had another continuation.

If a LoRA has fewer rows than the batch has tokens, no state fits exactly, and most of the fit
depends on the token alone. So each token's mean state after random prefixes is projected out of
rows and states. The remaining part, which a prefix adds to the state of its next token, is whitened
before the comparison.

:class:`SubspaceTexts` gets the tokens from ``SubspaceWords`` and the rows from ``subspace_rows``.
``subspace_search`` then searches the texts of causal models, ``subspace_encoders`` those of
encoders.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lightning_fedleak.attacks import base, row_space
from lightning_fedleak.attacks.local_steps import LocalSteps
from lightning_fedleak.attacks.texts import subspace_rows
from lightning_fedleak.attacks.texts.base import NOTHING, TextAttack, TextGuess, WorkLimit
from lightning_fedleak.attacks.texts.subspace_encoders import EncoderSearch
from lightning_fedleak.attacks.texts.subspace_search import SubspaceSearch
from lightning_fedleak.attacks.words.subspace import SubspaceWords
from lightning_fedleak.model.anatomy import Anatomy, text_blocks
from lightning_fedleak.model.model_runs import sees_no_later
from lightning_fedleak.model.snapshots import Inapplicable, Observation, UpdateSnapshot

# None of these three values was tuned.
MAX_BLOCKS = 12  # blocks that are used if rows are few; more distinguish more, and cost time
ALIKE = 1e-4  # relative distance of two tokens' inputs below which both are candidates
MAX_ALIKE = 64  # max. number of such additional candidates; with more nothing is certified


class SubspaceTexts(TextAttack):
    """Recover texts whose hidden states span the shared rows of several blocks.

    An honest but curious server knows the weights. It recovers the tokens of the batch from the
    first block's rows (:class:`~lightning_fedleak.attacks.words.subspace.SubspaceWords`), and tries
    each as the next token after the prefixes that fit best. It reads gradients, and rounds of SGD,
    with momentum if a round begins with a fresh optimizer.

    A causal text's last token has no part in these gradients and is left open. Encoders are read
    only if positions are added to their embeddings. With relative positions, a text that repeats a
    single token looks like that token alone.

    Certified texts are correct, and no text whose part of the gradient exceeds rounding is missing,
    up to copies, prefixes of another text, and repetitions of a single token. Texts are never
    certified if their words are not, or if only queries and keys are updated, because not every
    token has an effect on these. ``docs/whole_texts.md`` has the measurements.

    Args:
        budget_seconds: about the time for one observation, counted as work; None for no bound.
            After it the best texts so far are returned, and the guess says that it is not finished.
        seed: The seed of the contexts in which tokens are tried, and of encoders' descents.
        name: The name in the logs.

    Raises:
        ValueError: a number out of range.

    Examples:
        >>> from lightning_fedleak import LeakageMonitor, SubspaceTexts
        >>> monitor = LeakageMonitor([SubspaceTexts(budget_seconds=30.0)], every_n_steps=100)
    """

    threat_model = base.ThreatModel.create(
        "an honest but curious server that reads one update of the blocks' projections, or of "
        "adapters on them",
        base.Capability.KNOWS_MODEL,
    )
    default_name = "subspace_texts"
    config_names = ("beam", "budget_seconds", "seed")
    needs_float64 = True  # for projections on the rows' span
    reads_adaptive_updates = True  # to refuse them with a reason, see run
    restores_fully = False  # nothing is saved: prepare copies the model again
    last_token_open = True  # of causal texts
    reads_compressed = frozenset(("topk", "int8", "low_rank"))  # their rows still have a span
    beam = 3  # prefixes that are continued in parallel while none is exact; more are slower
    _copy: subspace_rows.BlockInputs | None = None

    def __init__(
        self, *, budget_seconds: float | None = 120.0, seed: int = 0, name: str | None = None
    ) -> None:
        super().__init__(name, budget_seconds)
        self.seed = seed
        self._words = SubspaceWords(capacity_seconds=0)
        self._readable = row_space.PerMaps(self._find_blocks)
        # Maps of the first block that is used whose gradient depends on every token.
        self._complete_maps: frozenset[str] = frozenset()
        self._whitenings: list[Tensor] = []  # (d, d) of each block's states

    def meet(self, facts: base.RunFacts) -> None:
        """Store the run's precision and optimizer, also for the attack on words."""
        super().meet(facts)
        self._words.meet(facts)

    def needs(self, anatomy: Anatomy) -> base.Surfaces:
        """Return what SubspaceWords needs, and the trained projections of the blocks to read.

        Raises:
            ValueError: an encoder-decoder, an encoder whose positions are not added to its
                embeddings, or a model without a second block of linear maps.
        """
        if anatomy.kind == "seq2seq":
            raise ValueError(f"attack '{self.name}' reads no encoder-decoders: remove the attack")
        words = self._words.needs(anatomy).gradients
        blocks = self._trained(anatomy)
        projections = [m.name for block in blocks for m in block.trainable_maps(anatomy)]
        if not projections:  # untrained projections: the run then reports that nothing is exposed
            projections = [m.name for m in self._readable.get(anatomy)[1][-1].maps]
        return base.Surfaces(gradients=tuple(dict.fromkeys([*words, *projections])))

    def _find_blocks(
        self, anatomy: Anatomy, maps: Sequence[row_space.LinearMap]
    ) -> tuple[row_space.KnownInput | None, list[row_space.SharedInput]]:
        """Return the inputs of the blocks whose rows can be used.

        Returns:
            The input of an encoder's first block (None for a causal model), and the input of each
            block's projections: from the first block on for an encoder, from the second on for a
            causal model.
        """
        blocks = row_space.first_in_blocks(row_space.find_shared_inputs(anatomy, maps))
        names = {name for name, _ in text_blocks(anatomy)}
        inputs = [shared_input for block, shared_input in blocks.items() if block in names]
        if len(inputs) < 2:
            raise ValueError(f"attack '{self.name}' finds no maps of a second block: remove it")
        if sees_no_later(anatomy):
            return None, inputs[1:]
        first = next((k for k in self._words.inputs(anatomy) if k.positional), None)
        if first is None or first.reader is not inputs[0].reader:
            raise ValueError(f"attack '{self.name}' finds no added positions: remove it")
        return first, inputs

    def _trained(self, anatomy: Anatomy) -> list[row_space.SharedInput]:
        """Return the inputs of the trained blocks to use; none if too few are trained."""
        first, inputs = self._readable.get(anatomy)
        trained = [block for block in inputs if block.trainable_maps(anatomy)]
        if not trained or (first and (trained[0] is not inputs[0] or len(trained) < 2)):
            return []
        rows = sum(m.rows for m in trained[0].trainable_maps(anatomy))
        max_blocks = 1 if rows >= trained[0].width else MAX_BLOCKS
        return trained[: max_blocks + bool(first)]

    def prepare(self, anatomy: Anatomy) -> None:
        """Copy the model up to the blocks that are used, and run it on random tokens.

        Raises:
            ValueError: the model cannot be run as far as these blocks.
        """
        self._words.prepare(anatomy)
        inputs = self._trained(anatomy)
        self._copy = self._work = None
        if not inputs:
            return
        self._copy = subspace_rows.BlockInputs(anatomy, inputs, self._facts)
        self._complete_maps = row_space.lone_token_maps(anatomy, inputs[0].maps)
        self._whitenings = self._copy.whitenings(self.seed)

    def refresh(self, anatomy: Anatomy, step: int) -> None:
        """Copy the weights again, and prepare again if other blocks are trained."""
        self._words.refresh(anatomy, step)
        inputs = self._trained(anatomy)
        if self._copy is None or list(self._copy.inputs) != inputs:
            self.prepare(anatomy)
        if self._copy is not None:
            self._copy.refresh(anatomy, step)

    @torch.no_grad()
    def run(self, view: Observation, query: base.Query | None = None) -> TextGuess:
        """Reconstruct the texts of a batch.

        Returns:
            One row for each text, in any order, which may include false texts that the rows do not
            distinguish from true ones. ``finished`` is False if the limit was reached.

        Raises:
            UnusableObservation: non-finite or zero gradients, more words than the first block's
                rows distinguish, or an update that is no gradient.
        """
        assert self._copy is not None
        update = view.gradients[-1]
        if isinstance(update, UpdateSnapshot):
            steps = LocalSteps.from_facts(self._facts)
            if steps is None or not steps.sums(fresh=update.fresh):
                raise base.UnusableObservation(
                    "texts need gradients (omit local_steps), or SGD without weight decay and with "
                    "optimizer.state.clear() where a round begins"
                )
        bottom = self._copy
        maps = [m for block in bottom.inputs for m in block.trainable_maps(bottom.anatomy)]
        if any(m.regularised for m in maps):
            raise Inapplicable(
                "AdaLoRA's loss regularises A: use SubspaceWords, or LoRA instead of AdaLoRA"
            )
        words = self._words.run(view)
        autocast = self._facts.autocast
        bottom.row_places, whitenings = (), self._whitenings
        first = self._readable.get(bottom.anatomy)[0]
        if view.gradients[-1].compression == "topk":
            if first is not None:
                raise Inapplicable("an encoder's texts are recovered from whole rows, not top-k's")
            bottom.row_places, shared = subspace_rows.kept_rows(bottom, view)
            whitenings = bottom.whitenings(self.seed)
        else:
            shared = [
                subspace_rows.shared_rows(b, bottom.anatomy, view, autocast) for b in bottom.inputs
            ]
        # The bag: the distinct tokens of the batch, in no order.
        bag = words.types.sort().values.to(bottom.device)
        if not len(bag):
            raise base.UnusableObservation("no word stands out of the noise")
        # Tokens whose inputs are nearly equal to a recovered one's, and could be meant instead.
        includes_alike = True
        if words.silent is not None:
            alike = self._words.similar_tokens(bag, ALIKE, words.silent)
            includes_alike = len(alike) <= MAX_ALIKE
            bag = torch.cat([bag, alike]).sort().values if includes_alike else bag
        search: SubspaceSearch | EncoderSearch
        if first is None:
            search = SubspaceSearch(bottom, whitenings, shared, bag, self.beam, self.seed)
        else:
            search = EncoderSearch(bottom, first, whitenings, shared, bag, self.seed)
        with bottom.session():
            texts, finished, certain = search.run(WorkLimit(self))
        # Certified only if the texts are certain given the bag, no token is missing from the bag,
        # and every token would leave a trace in the rows.
        certain = certain and bool(words.certified) and includes_alike and self._shows_all(view)
        if not texts:
            raise base.UnusableObservation("no text explains what the second block's rows hold")
        tokens = pad_sequence([*map(torch.tensor, texts)], True, NOTHING)
        return TextGuess(tokens, finished, search.n_tried, certain)

    def _shows_all(self, view: Observation) -> bool:
        """Return whether every token has an effect on a map of the first block that is used."""
        assert self._copy is not None
        maps = self._copy.inputs[0].trainable_maps(self._copy.anatomy)
        names = {m.name for m in maps if bool(view.gradient(m.name).any())}
        return bool(names & self._complete_maps)
