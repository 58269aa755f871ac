"""PrefixInversion: the exact text of hidden states at the split, for causal models.

A token's state at the split is close to linear in its word embedding, the same at unit length (what
a norm makes of it) and its state behind the first block. The map is fitted on some tokens, run
through the whole bottom, and evaluated for all: of SmolLM2-135M at split 10 that is a twelfth of
the work of running all 49,152, and ranks better, since what one context does to one token is
averaged out.
"""

from __future__ import annotations

from itertools import cycle
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_fedleak.anatomy import Anatomy
from lightning_fedleak.attacks.public_text import Given, PublicText
from lightning_fedleak.attacks.texts.base import NOTHING, Deadline, InversionAttack, TextGuess
from lightning_fedleak.attacks.texts.bottom_model import BottomModel, NextTokens, predicts_next
from lightning_fedleak.attacks.texts.prefix.cache import Layout, Prefixes
from lightning_fedleak.attacks.texts.prefix.search import Recovered, search
from lightning_fedleak.attacks.texts.prefix.table import StateTable

BY_SIDE = 256
"""Candidates in one run."""
RIDGE = 1e-2
"""Of the mean squared feature."""

PUBLIC_TEXTS, PUBLIC_LENGTH = 64, 64
CONTEXT_LENGTH = 8
SKIPPED = 2
"""First positions of a public text, whose states are unlike all others."""
COMPARED = 4
"""Public texts whose states are computed in two ways, to learn how far these differ."""
LEAST_NOISE = 0.05
"""Of a dimension's variance in public text: noise is taken to add at least half of that."""
MARGIN = 1.5
LEAST = 1 / 16
"""Of the dtype's precision, that states computed in two ways are taken to differ by at least."""


def typical_states(
    bottom: BottomModel, contexts: Tensor, types: int | None, seed: int = 0
) -> Tensor:
    """Mean state of every token behind each of ``contexts``: (V, d) float32.

    Args:
        bottom: a causal model's bottom.
        contexts: (c, L) token ids.
        tokenizer: for strings.
        types: tokens that are run through the whole bottom; None for all. Half are the lowest ids,
            the commonest under byte-pair encoding, half drawn.
        seed: of the draw.
    """
    size = bottom.vocab_size
    if types is None or types >= size:
        return states_behind(bottom, contexts, torch.arange(size))
    low = types // 2
    generator = torch.Generator().manual_seed(seed)
    drawn = low + torch.randperm(size - low, generator=generator)[: types - low]
    sample = torch.cat([torch.arange(low), drawn]).to(bottom.device)
    states = states_behind(bottom, contexts, sample)
    words = bottom.word_embeddings().float()
    features = [words, F.normalize(words, dim=1)]
    if bottom.layer > 1:
        shallow = bottom.cut_at_layer(1)
        features.append(states_behind(shallow, contexts[:1], torch.arange(size)))
    return _regressed(torch.cat(features, 1), sample, states)


@torch.no_grad()
def states_behind(bottom: BottomModel, contexts: Tensor, tokens: Tensor) -> Tensor:
    """Mean state of each of ``tokens`` (n,) behind ``contexts`` (c, L): (n, d) float32."""
    total = torch.zeros(len(tokens), bottom.width, device=bottom.device)
    tokens = tokens.to(bottom.device)
    length = contexts.shape[1]
    layout = Layout.of((1, length + 1), None, None)
    with bottom.session():
        for context in contexts.to(bottom.device):
            prefix = Prefixes(bottom, layout)
            prefix.follow(context[None])
            prefix.keep(torch.tensor([length], device=bottom.device))
            for a in range(0, len(tokens), BY_SIDE):
                states = prefix.attempt(tokens[None, a : a + BY_SIDE])[0]
                total[a : a + BY_SIDE] += states.float()
    return total / len(contexts)


def _regressed(features: Tensor, sample: Tensor, states: Tensor) -> Tensor:
    """Ridge regression of ``states`` on the standardised ``features`` of ``sample``, for all."""
    some = features[sample].double()
    mean, spread = some.mean(0), some.std(0).clamp(min=1e-12)
    some = (some - mean) / spread
    gram = some.T @ some
    gram.diagonal().add_(RIDGE * float(gram.diagonal().mean()))
    centre = states.double().mean(0)
    weights = torch.linalg.solve(gram, some.T @ (states.double() - centre)) / spread[:, None]
    offset = centre - mean @ weights
    return torch.addmm(offset.float(), features, weights.float())


class PrefixInversion(InversionAttack):
    """Left to right, each token verified behind the true ones before it.

    See :mod:`~lightning_fedleak.attacks.texts.prefix.search`. Without noise the result is exact,
    but for tokens whose states the model's precision does not tell apart (equal word embeddings,
    say); these have confidence 0.

    Args:
        layer: the split.
        public_text: text that the adversary owns, for the table of typical states; ``"sampled"``
            has the model write it, None takes random tokens. Strings and token ids are taken too.
        budget_seconds: wall time for one observation. Where it ends a text, the tokens that were
            not reached are those that the table ranks first, with confidence 0; a text that was
            not begun is left open. Renewing the table is not part of it.
        types: tokens that are run through the whole bottom in ``prepare``, from which the states of
            the others are predicted; None for all, which pays where many tokens are untrained.
        contexts: beginnings behind which they are run.
        language_model: let the server's top model say which token it expects next.
        noised: whether the client is known to add noise, so that no token's state is the one sent;
            None to find out, for the price of one verification of the whole vocabulary, or of half
            the time if that is less: noise is then assumed, and the guess unfinished. Set False,
            the nearest token is looked for in the whole vocabulary at every place.
        beam: beginnings kept side by side where states are noised.
        batch: texts searched at once; None for 1 on a CPU and 8 elsewhere.
        autocast: dtype of the autocast region that the client computes in (bf16-mixed), or None.
        refresh_every: optimizer steps after which the copy of the bottom model is renewed.
        renew_table_every: the same for the table, which only ranks.
        seed: of own draws.
        name: in the logs.

    Raises:
        ValueError: a setting out of range.
    """

    default_name: ClassVar[str] = "prefix_inversion"
    needs_float64 = True

    def __init__(
        self,
        layer: int,
        public_text: Given | None = "sampled",
        budget_seconds: float | None = None,
        *,
        tokenizer: Any = None,
        types: int | None = 4096,
        contexts: int = 1,
        language_model: bool = True,
        noised: bool | None = None,
        beam: int = 4,
        batch: int | None = None,
        autocast: torch.dtype | None = None,
        refresh_every: int = 1,
        renew_table_every: int = 1000,
        seed: int = 0,
        name: str | None = None,
    ) -> None:
        super().__init__(layer, budget_seconds, name)
        for setting, value, least in (
            ("types", types, 2),
            ("contexts", contexts, 1),
            ("beam", beam, 1),
            ("batch", batch, 1),
            ("refresh_every", refresh_every, 1),
            ("renew_table_every", renew_table_every, 1),
        ):
            if value is not None and value < least:
                raise ValueError(f"{setting} must be at least {least}, got {value}")
        self.public_text = PublicText.parse(public_text, tokenizer)
        self.types = types
        self.contexts = contexts
        self.language_model = language_model
        self.noised = noised
        self.beam = beam
        self.batch = batch
        self.autocast = autocast
        self.refresh_every = refresh_every
        self.renew_table_every = renew_table_every
        self.seed = seed
        self._table: StateTable | None = None
        self._table_step: int | None = None
        self._precision = 0.0
        self._variance: Tensor | None = None

    def prepare(self, anatomy: Anatomy) -> None:
        """Copies the bottom model and computes the table of typical states.

        Raises:
            ValueError: the model has no such layer, its bottom cannot be run alone, or it is not
                causal: then a token's state depends on what follows it.
        """
        super().prepare(anatomy)
        autocast = self.autocast or self._met.autocast
        bottom = BottomModel(anatomy, self.layer, autocast=autocast)
        if not bottom.causal:
            raise ValueError(
                f"{type(anatomy.model).__name__} is not causal: a hidden state at layer "
                f"{self.layer} depends on later tokens, so that a text cannot be recovered left to "
                "right; use EmbeddingDescent, with sweeps, for encoders"
            )
        self._bottom = bottom
        self._table_step = None
        self._learn()

    def refresh(self, anatomy: Anatomy, step: int) -> None:
        """Renews the copy, and the table, if they are old enough or of another fit."""
        if self._table_step is None:
            self._table_step = self.bottom.step
        if not 0 <= self.bottom.age(step) < self.refresh_every:
            self.bottom.refresh(anatomy, step)
        if not 0 <= step - self._table_step < self.renew_table_every:
            self._table_step = step
            self._learn()

    def _learn(self) -> None:
        bottom = self.bottom
        with torch.no_grad():
            ids, mask = self._public()
            ids, mask = ids[:, : int(mask.sum(1).max())], mask[:, : int(mask.sum(1).max())]
            states = bottom.hidden(ids, mask)
            real = mask.bool() & (mask.cumsum(1) > min(SKIPPED, ids.shape[1] - 1))
            long = mask.sum(1).argsort(descending=True)
            length = min(
                CONTEXT_LENGTH, int(mask[long[: self.contexts]].sum(1).min()), ids.shape[1] - 1
            )
            contexts = ids[long[: self.contexts], :length]
            typical = typical_states(bottom, contexts, self.types, self.seed)
            self._table = StateTable(
                typical, bottom.word_embeddings(), states[real], ids[real], self.seed
            )
            self._variance = states[real].float().var(0)
            some = long[:COMPARED]
            differ = two_ways(bottom, ids[some], mask[some], states[some])
            self._precision = max(MARGIN * differ, LEAST * torch.finfo(bottom.dtype).eps)

    def _public(self) -> tuple[Tensor, Tensor]:
        """Public token ids and their mask, both (n, L), padded on the right."""
        bottom, anatomy = self.bottom, self.bottom.anatomy
        generator = torch.Generator().manual_seed(self.seed)
        length = min(PUBLIC_LENGTH, bottom.context or PUBLIC_LENGTH)
        if self.public_text is None:
            shape = (PUBLIC_TEXTS, length)
            ids = torch.randint(bottom.vocab_size, shape, generator=generator).to(bottom.device)
            return ids, torch.ones_like(ids)
        with bottom.session():
            text = PublicText.resolve(self.public_text, anatomy, self.seed)
        order = text.draw(len(text), generator).tolist()
        long = sorted(order, key=lambda i: -min(length, len(text.sentences[i])))[:PUBLIC_TEXTS]
        batch = text.rows(long, max(2, length), generator)
        assert batch.attention_mask is not None
        return batch.input_ids.to(bottom.device), batch.attention_mask.to(bottom.device)

    def reconstruct(
        self, hidden: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None
    ) -> TextGuess:
        """See the base; the confidence is one minus the ratio of best and second distance.

        Raises:
            ValueError: the hidden states are not of the layer's width, or mask and positions of
                another shape.
        """
        bottom = self.bottom
        if hidden.dim() != 3 or hidden.shape[2] != bottom.width:
            raise ValueError(
                f"hidden states at layer {self.layer} are (B, L, {bottom.width}), got "
                f"{tuple(hidden.shape)}"
            )
        shape = (hidden.shape[0], hidden.shape[1])
        whole = Layout.of(shape, attention_mask, position_ids).to(bottom.device)
        deadline = Deadline(self.budget_seconds)
        size = self.batch or (1 if bottom.device.type == "cpu" else 8)
        tokens, sure, finished, candidates = [], [], True, 0
        noised, spread = self.noised, self._spread(hidden, attention_mask)
        with torch.no_grad(), bottom.session():
            for a in range(0, len(hidden), size):
                part = hidden[a : a + size].to(bottom.device)
                layout = whole[torch.arange(a, a + len(part), device=bottom.device)]
                if deadline.passed:
                    tokens.append(torch.full_like(part[..., 0], NOTHING, dtype=torch.int64))
                    sure.append(torch.zeros_like(part[..., 0], dtype=torch.float32))
                    finished = False
                    continue
                left = -(-(len(hidden) - a) // size)
                found = self._search(part, layout, deadline.share(left), spread, noised)
                noised = True if found.noised else noised
                told = found.tokens if found.candidates else found.tokens.fill_(NOTHING)
                tokens.append(layout.spread(told, NOTHING))
                sure.append(layout.spread(found.confidence, 0.0))
                finished &= found.finished
                candidates += found.candidates
        return TextGuess(
            tokens=torch.cat(tokens).to(hidden.device),
            confidence=torch.cat(sure).to(hidden.device),
            finished=finished,
            candidates=candidates,
        )

    def _spread(self, hidden: Tensor, mask: Tensor | None) -> Tensor:
        """(d,) what noise adds to the states, guessed from how they vary beyond public text."""
        assert self._variance is not None
        real = torch.ones(hidden.shape[:2], dtype=torch.bool) if mask is None else mask.cpu() != 0
        usual = real & (real.cumsum(1) > SKIPPED)
        states = hidden[(usual if int(usual.sum()) > SKIPPED else real).to(hidden.device)].float()
        own = self._variance.clamp(min=1e-12 * float(self._variance.max().clamp(min=1e-30)))
        if len(states) < 2:
            return own.sqrt()
        more = states.to(own.device).var(0) - own
        share = float((more / own).median().clamp(min=LEAST_NOISE))
        return torch.maximum(more, 0.5 * share * own).sqrt()

    def _search(
        self,
        hidden: Tensor,
        layout: Layout,
        deadline: Deadline,
        spread: Tensor,
        noised: bool | None,
    ) -> Recovered:
        assert self._table is not None
        expects = None
        if self.language_model and predicts_next(self.bottom):
            expects = NextTokens(self.bottom, hidden, layout.mask, layout.position_ids)
        return search(
            Prefixes(self.bottom, layout),
            self._table,
            layout.packed_anew(hidden).float(),
            _Expected(expects, layout),
            precision=self._precision,
            spread=spread,
            noised=noised,
            beam=self.beam,
            deadline=deadline,
        )

    def config(self) -> dict[str, object]:
        """Settings for reports."""
        public = self.public_text
        return {
            "layer": self.layer,
            "budget_seconds": self.budget_seconds,
            "public_text": public if public is None or isinstance(public, str) else "given",
            "types": self.types,
            "contexts": self.contexts,
            "language_model": self.language_model,
            "noised": self.noised,
            "beam": self.beam,
            "batch": self.batch,
            "autocast": None if self.autocast is None else str(self.autocast),
            "refresh_every": self.refresh_every,
            "renew_table_every": self.renew_table_every,
            "seed": self.seed,
        }


class _Expected:
    """What the top model expects, by real token; nothing at the first place of a text."""

    def __init__(self, model: NextTokens | None, layout: Layout) -> None:
        self._model = model
        self._columns = layout.columns
        self._last: tuple[int, int, Tensor] | None = None

    def of(self, rows: Tensor, places: Tensor, tokens: Tensor) -> Tensor:
        out = torch.zeros(tokens.shape, device=tokens.device)
        later = places > 0
        if self._model is not None and bool(later.any()):
            rows, places = rows[later], places[later]
            out[later] = self._model.of(rows, self._columns[rows, places - 1], tokens[later])
        return out

    def all(self, row: int, place: int) -> Tensor | None:
        if self._model is None or place == 0:
            return None
        if self._last is None or self._last[:2] != (row, place):
            column = self._columns[row : row + 1, place - 1]
            rows = torch.full_like(column, row)
            self._last = (row, place, self._model.after(rows, column)[0])
        return self._last[2]


def two_ways(bottom: BottomModel, ids: Tensor, mask: Tensor, states: Tensor) -> float:
    """Largest relative difference of states (n, L, d) from those that a cached run gives."""
    layout = Layout.of((ids.shape[0], ids.shape[1]), mask, None).to(bottom.device)
    prefixes = Prefixes(bottom, layout)
    worst = 0.0
    with torch.no_grad(), bottom.session():
        for at_once in cycle((1, 3, 8, 24)):
            a = int(prefixes.known.max())
            if a == ids.shape[1]:
                break
            part = ids[:, a : a + at_once]
            got = prefixes.follow(part, ids[:, : a // 2])[:, : part.shape[1]].float()
            prefixes.keep((layout.counts - prefixes.known).clamp(max=part.shape[1]))
            true = states[:, a : a + part.shape[1]].float()
            far = (got - true).norm(dim=2) / true.norm(dim=2).clamp(min=1e-30)
            worst = max(worst, float(far.masked_fill(mask[:, a : a + part.shape[1]] == 0, 0).max()))
    return worst


__all__ = ["BY_SIDE", "PrefixInversion", "states_behind", "two_ways", "typical_states"]
