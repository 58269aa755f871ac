"""PrefixInversion: the exact text of hidden states at the split, for causal models.

In split learning the client runs the *bottom* of the model and sends the hidden states at the
*split*. A causal state depends only on the token and those before it. So the server, which owns the
bottom too, finds one token after the other: the right one has exactly the state that was sent.

The attack ranks candidates by a table of every token's state at the split in a typical context
(:func:`typical_states`). Such a state is nearly linear in the token's word embedding, in that
embedding at unit length (as a norm layer outputs it) and in its state after the first block. The
linear map is fitted on some tokens, which run through the whole bottom, and predicts the states of
all others. For SmolLM2-135M at split 10 this costs about a fifth of running all 49,152 tokens. It
also ranks better, because the fit averages over the effects of one context on single tokens.
:mod:`~lightning_fedleak.attacks.texts.prefix.search` then recovers the texts with this table.
"""

from dataclasses import replace
from itertools import cycle
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_fedleak.attacks.public_text import PublicText, TextSource
from lightning_fedleak.attacks.texts import base
from lightning_fedleak.attacks.texts.bottom_model import BottomModel, NextTokens, predicts_next
from lightning_fedleak.attacks.texts.prefix.cache import Layout, Prefixes
from lightning_fedleak.attacks.texts.prefix.search import PrefixSearch
from lightning_fedleak.attacks.texts.prefix.table import StateTable
from lightning_fedleak.model.anatomy import Anatomy
from lightning_fedleak.validate import check_integer, explain_arguments

# None of the values was tuned.
CANDIDATES_AT_ONCE = 256  # candidates in one run; bounds the memory
RIDGE = 1e-2  # share of the mean squared feature; more shrinks predicted states to their mean
PUBLIC_TEXTS, PUBLIC_LENGTH = 64, 64  # public texts for the table, and tokens of each
CONTEXT_LENGTH = 8  # tokens of the prefix after which typical states are computed
RENEW_TABLE_EVERY = 1000  # optimizer steps after which the table is computed again
TEXTS_AT_ONCE = {"cpu": 1}  # texts of one search, by device: on a CPU more are no faster
DEFAULT_TEXTS_AT_ONCE = 8  # texts of one search on other devices
SKIPPED = 2  # first positions of a text, whose states are unlike all others
ROUNDING_TEXTS = 4  # public texts on which the cache's rounding is measured
MIN_NOISE = 0.05  # min. assumed median excess variance, as a share of public text's variance
ROUNDING_MARGIN = 1.5  # factor on the rounding of those texts; other texts may have more
MIN_ROUNDING = 1 / 16  # min. rounding that is assumed, in units of the dtype's precision


def typical_states(
    bottom: BottomModel, context: Tensor, types: int | None, seed: int = 0
) -> Tensor:
    """Return the state of every token after ``context``: (V, d) float32.

    Args:
        bottom: a causal model's bottom.
        context: (L,) token ids.
        types: The number of tokens that run through the whole bottom; None for all. Half have the
            lowest ids, the commonest ones under byte-pair encoding; the other half is drawn.
        seed: The seed of the draw.
    """
    size = bottom.vocab_size
    if types is None or types >= size:
        return states_after(bottom, context, torch.arange(size))
    n_lowest = types // 2
    generator = torch.Generator().manual_seed(seed)
    draw = n_lowest + torch.randperm(size - n_lowest, generator=generator)[: types - n_lowest]
    sample = torch.cat([torch.arange(n_lowest), draw]).to(bottom.device)
    states = states_after(bottom, context, sample)
    words = bottom.word_embeddings().float()
    features = [words, F.normalize(words, dim=1)]
    if bottom.layer > 1:
        features.append(states_after(bottom.cut_at_layer(1), context, torch.arange(size)))
    return _predict_states(torch.cat(features, 1), sample, states)


@torch.no_grad()
def states_after(bottom: BottomModel, context: Tensor, tokens: Tensor) -> Tensor:
    """Return the state of each of ``tokens`` (n,) after ``context`` (L,): (n, d)."""
    # The context becomes a cached prefix; each attempt runs tokens after it, apart from each other.
    layout = Layout.from_masks((1, len(context) + 1), None, None)
    with bottom.session():
        prefix = Prefixes(bottom, layout)
        prefix.follow(context[None].to(bottom.device))
        prefix.keep(torch.tensor([len(context)], device=bottom.device))
        parts = torch.split(tokens.to(bottom.device), CANDIDATES_AT_ONCE)
        return torch.cat([prefix.attempt(part[None])[0].float() for part in parts])


def _predict_states(features: Tensor, sample: Tensor, states: Tensor) -> Tensor:
    """Return the states of all tokens by ridge regression on the standardised ``features``."""
    x = features[sample].double()
    mean, spread = x.mean(0), x.std(0).clamp(min=1e-12)
    x = (x - mean) / spread
    gram = x.T @ x
    gram.diagonal().add_(RIDGE * float(gram.diagonal().mean()))
    centre = states.double().mean(0)
    weights = torch.linalg.solve(gram, x.T @ (states.double() - centre)) / spread[:, None]
    offset = centre - mean @ weights
    return torch.addmm(offset.float(), features, weights.float())


class PrefixInversion(base.InversionAttack):
    """The exact text of hidden states at the split, from left to right, for causal models.

    The server of a split model owns the bottom model. It runs candidates for each token after the
    tokens before it and compares their states with those that the client sent
    (:mod:`~lightning_fedleak.attacks.texts.prefix.search`). Without noise the text is exact, except
    for tokens that the model's precision does not distinguish (such as those with equal word
    embeddings): of these the nearest is taken, also in a text that is marked as finished.

    Args:
        layer: The split: the client sends the output of this block, counted from 1.
        public_text: A text that the adversary owns, for the table of typical states: a
            :class:`~lightning_fedleak.attacks.public_text.PublicText`, texts or token ids.
            ``"sampled"`` lets the model write it; None uses random tokens.
        budget_seconds: About the time for one observation, counted as runs of the bottom model.
            A text whose search the budget ends gets the tokens that the table ranks first; texts
            not begun get none.
        tokenizer: The tokenizer of ``public_text``, if that holds strings.
        types: The number of tokens that run through the whole bottom in ``prepare``; the states of
            the others are predicted from theirs. None for all, which helps where many tokens are
            untrained.
        language_model: Whether the server's top model ranks the next token.
        noised: Whether the client adds noise, so that no token's state equals the one sent. True
            seeks no equal state, but ranks whole texts by their distances and by what the top model
            expects after their own tokens. None tests it on the whole vocabulary at one position;
            if that takes over half of the time left, noise is assumed and the guess is unfinished.
            False never assumes noise: where no candidate
            matches, the nearest token of the whole vocabulary is taken.
        seed: The seed of the attack's random draws.
        name: The name in the logs.

    Raises:
        ValueError: A setting is out of range.

    Examples:
        >>> from lightning_fedleak import LeakageMonitor, PrefixInversion
        >>> attack = PrefixInversion(layer=3, public_text=None, budget_seconds=10.0)
        >>> monitor = LeakageMonitor([attack], every_n_steps=100)
    """

    default_name = "prefix_inversion"
    config_names = (
        *("layer", "budget_seconds", "public_text", "types", "language_model", "noised"),
        *("refresh_every", "seed"),
    )
    needs_float64 = True  # for the table and its regression

    @explain_arguments("PrefixInversion(layer=2)")
    def __init__(
        self,
        layer: int,
        public_text: TextSource | None = "sampled",
        budget_seconds: float | None = None,
        *,
        tokenizer: Any = None,
        types: int | None = 4096,
        language_model: bool = True,
        noised: bool | None = None,
        seed: int = 0,
        name: str | None = None,
    ) -> None:
        super().__init__(layer, budget_seconds, name)
        self.types = check_integer("types", types, at_least=2, optional=True)
        self.public_text = PublicText.parse(public_text, tokenizer)
        self.language_model = language_model
        self.noised = noised
        self.seed = seed
        self._table: StateTable | None = None
        self._table_step: int | None = None
        self._precision = 0.0  # relative difference of equal states that rounding may cause
        self._variance: Tensor | None = None  # (d,) of states in public text, without noise

    def prepare(self, anatomy: Anatomy) -> None:
        """Copy the bottom model and compute the table of typical states.

        Raises:
            ValueError: The model has no such layer, or it is not causal: then a token's state
                depends on later tokens.
        """
        super().prepare(anatomy)
        self._copy_bottom(anatomy)
        if not self.bottom.causal:
            raise ValueError(
                f"{type(anatomy.model).__name__} is not causal: a hidden state at layer "
                f"{self.layer} depends on later tokens, so that no text is recovered left to "
                "right; use EmbeddingDescent, with sweeps"
            )
        self._table_step = None
        self._compute_table()

    def refresh(self, anatomy: Anatomy, step: int) -> None:
        """Copy the weights again if they are too old, and likewise compute the table again."""
        if self._table_step is None:
            self._table_step = self.bottom.step
        super().refresh(anatomy, step)
        if not 0 <= step - self._table_step < RENEW_TABLE_EVERY:
            self._table_step = step
            self._compute_table()

    def _compute_table(self) -> None:
        """Run public text; store the table, the states' variance and the rounding of a cache."""
        bottom = self.bottom
        with torch.no_grad():
            ids, mask = self._public_batch()
            lengths = mask.sum(1)
            ids, mask = ids[:, : int(lengths.max())], mask[:, : int(lengths.max())]
            states = bottom.hidden(ids, mask)
            real = mask.bool() & (mask.cumsum(1) > min(SKIPPED, ids.shape[1] - 1))
            longest_first = lengths.argsort(descending=True)
            first = longest_first[0]
            length = min(CONTEXT_LENGTH, int(lengths[first]), ids.shape[1] - 1)
            typical = typical_states(bottom, ids[first, :length], self.types, self.seed)
            self._table = StateTable(
                typical, bottom.word_embeddings(), states[real], ids[real], self.seed
            )
            self._variance = states[real].float().var(0)
            texts = longest_first[:ROUNDING_TEXTS]
            rounding = _cache_rounding(bottom, ids[texts], mask[texts], states[texts])
            eps = torch.finfo(bottom.dtype).eps
            self._precision = max(ROUNDING_MARGIN * rounding, MIN_ROUNDING * eps)

    def _public_batch(self) -> tuple[Tensor, Tensor]:
        """Return public token ids and their mask, both (n, L), padded on the right."""
        bottom, anatomy = self.bottom, self.bottom.anatomy
        generator = torch.Generator().manual_seed(self.seed)
        length = min(PUBLIC_LENGTH, bottom.context or PUBLIC_LENGTH)
        if self.public_text is None:
            shape = (PUBLIC_TEXTS, length)
            ids = torch.randint(bottom.vocab_size, shape, generator=generator).to(bottom.device)
            return ids, torch.ones_like(ids)
        with bottom.session():
            text = PublicText.resolve(self.public_text, anatomy, self.seed)
        order = text.draw(len(text), generator).tolist()  # so that ties in length are random
        order.sort(key=lambda i: -min(length, len(text.sentences[i])))
        batch = text.rows(order[:PUBLIC_TEXTS], max(2, length), generator)
        assert batch.attention_mask is not None
        return batch.input_ids.to(bottom.device), batch.attention_mask.to(bottom.device)

    def reconstruct(
        self, hidden: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None
    ) -> base.TextGuess:
        """Return the texts of hidden states (B, L, d)."""
        bottom = self.bottom
        whole = Layout.from_masks(hidden.shape[:2], attention_mask, position_ids).to(bottom.device)
        limit = base.WorkLimit(self)
        size = TEXTS_AT_ONCE.get(bottom.device.type, DEFAULT_TEXTS_AT_ONCE)
        guesses: list[base.TextGuess] = []
        noised, deviation = self.noised, self._noise_deviation(hidden, attention_mask)
        with torch.no_grad(), bottom.session():
            for start in range(0, len(hidden), size):
                part = hidden[start : start + size].to(bottom.device)
                layout = whole[torch.arange(start, start + len(part), device=bottom.device)]
                if limit.reached:
                    tokens = torch.full_like(part[..., 0], base.NOTHING, dtype=torch.int64)
                    guesses.append(base.TextGuess(tokens, finished=False))
                    continue
                batches = -(-(len(hidden) - start) // size)
                search = self._search(part, layout, limit.share(batches), noised)
                guess = search.run(deviation)
                # Noise found in one group of texts is assumed in all later ones.
                noised = True if search.decision.noised else noised
                tokens = guess.tokens if guess.candidates else guess.tokens.fill_(base.NOTHING)
                guesses.append(replace(guess, tokens=layout.spread(tokens, base.NOTHING)))
        return base.join_guesses(guesses, hidden.device)

    def _noise_deviation(self, hidden: Tensor, mask: Tensor | None) -> Tensor:
        """Return the noise's standard deviations (d,), from the excess over public variance.

        With fewer than two states, it is the standard deviation of states in public text.
        """
        assert self._variance is not None
        real = torch.ones(hidden.shape[:2], dtype=torch.bool) if mask is None else mask.cpu() != 0
        # First positions are skipped, unless hardly any state is left.
        later = real & (real.cumsum(1) > SKIPPED)
        states = hidden[(later if int(later.sum()) > SKIPPED else real).to(hidden.device)].float()
        variance = self._variance.clamp(min=1e-12 * float(self._variance.max().clamp(min=1e-30)))
        if len(states) < 2:
            return variance.sqrt()
        excess = states.to(variance.device).var(0) - variance
        share = float((excess / variance).median().clamp(min=MIN_NOISE))
        # The excess of one coordinate is a noisy estimate: half of the median share is its minimum.
        return torch.maximum(excess, 0.5 * share * variance).sqrt()

    def _search(
        self, hidden: Tensor, layout: Layout, limit: base.WorkLimit, noised: bool | None
    ) -> PrefixSearch:
        """Return the search of a group's texts, with the top's predictions if it can predict."""
        assert self._table is not None
        top = None
        if self.language_model and predicts_next(self.bottom):
            top = NextTokens(self.bottom, hidden, layout.mask, layout.position_ids)
        prefixes, observed = Prefixes(self.bottom, layout), layout.pack(hidden).float()
        return PrefixSearch(prefixes, self._table, observed, top, self._precision, noised, limit)

    def config(self) -> dict[str, object]:
        """Return the settings that name this attack in reports."""
        public = self.public_text
        return super().config() | {
            "public_text": "given" if isinstance(public, PublicText) else public
        }


def _cache_rounding(bottom: BottomModel, ids: Tensor, mask: Tensor, states: Tensor) -> float:
    """Return the largest relative difference of states (n, L, d) from those of a cached run.

    The run reads 1, 3, 8 and 24 tokens at a time, because rounding depends on their number.
    """
    layout = Layout.from_masks((ids.shape[0], ids.shape[1]), mask, None).to(bottom.device)
    prefixes = Prefixes(bottom, layout)
    worst = 0.0
    with torch.no_grad(), bottom.session():
        for n in cycle((1, 3, 8, 24)):
            start = int(prefixes.lengths.max())
            if start == ids.shape[1]:
                break
            part = ids[:, start : start + n]
            # The second argument: any tokens as candidates, which lengthen the run as in a search.
            cached_states = prefixes.follow(part, ids[:, : start // 2])[:, : part.shape[1]].float()
            prefixes.keep((layout.counts - prefixes.lengths).clamp(max=part.shape[1]))
            positions = slice(start, start + part.shape[1])
            plain_states = states[:, positions].float()
            size = plain_states.norm(dim=2).clamp(min=1e-30)
            differences = (cached_states - plain_states).norm(dim=2) / size
            worst = max(worst, float(differences.masked_fill(mask[:, positions] == 0, 0).max()))
    return worst
