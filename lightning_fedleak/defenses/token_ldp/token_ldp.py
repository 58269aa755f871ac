"""Local differential privacy on token ids: the model trains on randomised text."""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_fedleak.defenses.base import Defense, DefenseContext, Privacy, State
from lightning_fedleak.defenses.checks import check_choice, check_number
from lightning_fedleak.defenses.noise import base_of, noise_key
from lightning_fedleak.defenses.token_ldp import words
from lightning_fedleak.defenses.token_ldp.mechanisms import Decode, Mechanism, Randomizer
from lightning_fedleak.defenses.token_ldp.words import BatchForm
from lightning_fedleak.model.batches import BatchError, write_batch

Per = Literal["token", "sequence"]


class _ReleaseCounter:
    """A count of the releases of the row that was released most often, over all fits so far.

    Rows are distinguished by digests of their words, which are kept for one fit only.

    Attributes:
        batches: The number of batches.
        longest: The number of words of the longest row.
    """

    def __init__(self) -> None:
        self.batches = 0
        self.longest = 0
        self._earlier = 0
        self._in_fit: dict[bytes, int] = {}
        self._most = 0
        self._by_all = 0

    @property
    def max_releases(self) -> int:
        """Return the releases of the row that was released most often, earlier fits included.

        The rows of one fit are not known in the next: the counts of both are added as if the
        same row had been released most often in each.
        """
        return self._earlier + max(self._most, self._by_all)

    @property
    def counts(self) -> tuple[int, int]:
        """Return what this process counted: releases in this fit, and words of the longest row."""
        return self._most, self.longest

    def count(self, digests: Iterable[bytes], longest: int, memoized: bool) -> None:
        """Count one more batch: its rows, and the words of the longest of them."""
        self.batches += 1
        self.longest = max(self.longest, longest)
        if memoized:
            self._most = 1
            return
        for digest in digests:
            self._in_fit[digest] = count = self._in_fit.get(digest, 0) + 1
            self._most = max(self._most, count)

    def merge(self, counts: Sequence[Sequence[int]], add: bool) -> None:
        """Raise the counts to bounds that hold for all processes together.

        Args:
            counts: The :attr:`counts` of every process, this one included.
            add: Whether a row that two processes release is released twice. Then the processes'
                counts are added, a sum that no row exceeds. Otherwise the largest count holds.
        """
        releases, lengths = zip(*counts, strict=True)
        self._by_all = sum(releases) if add else max(releases)
        self.longest = max(lengths)

    def next_fit(self) -> None:
        """Begin a fit, in which the same rows are new releases."""
        self._earlier, self._most, self._by_all = self.max_releases, 0, 0
        self._in_fit.clear()

    def state_dict(self) -> dict[str, int]:
        """Return the counts."""
        return {"batches": self.batches, "releases": self.max_releases, "longest": self.longest}

    def load(self, batches: int, releases: int, longest: int) -> None:
        """Continue a checkpoint's counts; none runs backwards, not even in one process."""
        self._earlier, self._most, self._by_all = max(self.max_releases, releases), 0, 0
        self._in_fit.clear()
        self.batches = max(self.batches, batches)
        self.longest = max(self.longest, longest)


class TokenLDP(Defense):
    """Replaces every token id of a training batch by a randomised one, before the model sees it.

    The replaced token is a draw from the mechanism's distribution given the true one, independent
    for every token. Whatever is computed of the new batch (activations, gradients, the trained
    weights) is post-processing. Mechanisms, decoding rules and their distributions:
    :mod:`lightning_fedleak.defenses.token_ldp.mechanisms`.

    **What is guaranteed.** ``per="sequence"``: two rows of n words that differ in any of them give
    any output with probabilities at most e^epsilon apart; each token gets epsilon / n. With
    ``per="token"`` that holds for rows that differ in one token; for whole rows it is n epsilon.
    See :attr:`epsilon_per_sequence` and :attr:`epsilon_spent`. The unit is a row of the batch, not
    a person: what occurs in several examples is released with each.

    **What is public**: the number of rows and of words in each, the mask, where the loss looks
    away, and which positions hold which special token. Which positions a masked language model is
    trained on must have been chosen without regard to the words. Ids that the mask hides from the
    model and the loss are set to 0, except special ones. Fields of the batch that this class does
    not know stop training, since they may hold the text; name those that may pass in
    ``public_fields``. Labels of a classifier are **not covered**. Validation is left alone, and
    hooks of callbacks and of the module other than ``training_step`` see the true batch.

    An id that the model has not counts as one of its words: a text with such an id stops nothing.

    **Labels.** Causal: the labels are the replaced inputs, whatever id stood there. Masked: at a
    position that is predicted the label is the word, so that the word's one replacement becomes the
    label, and the input too unless a special token (the mask) stands there. An input that masking
    had swapped for a random word gets the replacement as well: beside the label it would show what
    the word is not. Encoder-decoder: the target text is randomised as the source is, and counts in
    n.

    **Repeated epochs.** Each new draw for the same example is one more release, and epsilons add
    up. With memoisation (the default, as RAPPOR and dBitFlipPM define it) a row's replacement is a
    function of the fit's secret and the row's words, so that every epoch sees the same one and
    epsilon is spent once in a fit by each client that has the row. Two rows of equal words then get
    equal replacements, which shows that they are equal: ``memoize=False`` draws them apart. A
    resumed fit has a new secret and is a new release, and so is the same example on another client.

    **Randomness** comes from the fit's secret entropy, never from a global generator, and is not
    replayed after a resume. It is drawn on the CPU (SHAKE-128 with a secret 256-bit key) on every
    device, so that a batch on another device waits for it once.

    Examples:
        >>> from lightning_fedleak import DefendedStrategy, TokenLDP
        >>> defense = TokenLDP("grr", epsilon=8.0, per="token")
        >>> strategy = DefendedStrategy("auto", defenses=[defense])
        >>> defense.epsilon_spent
        0.0

    Args:
        mechanism: ``"grr"``, ``"rappor"``, ``"the"`` or ``"dbitflip"``.
        epsilon: the budget, for one release of one token or of one row, see ``per``.
        per: ``"sequence"`` splits epsilon over a row's words; ``"token"`` spends it on each.
        domain: what tokens are replaced by. ``"vocabulary"``: every id that is not special. Ids of
            a public set: chosen without regard to the private text; a token outside of it is
            replaced by a uniform one of the set before the mechanism acts. ``"batch"``: the ids
            that occur in the batch, as in the published code of Vu et al. 2024: **no guarantee**,
            since which words occur is visible.
        special_ids: ids that are no words: a collection, or a tokenizer (whose unknown token is
            taken for a word, unless it is another special token too). None: those in the model's
            config, which names them for causal and encoder-decoder models alone.
        bits: d of dBitFlipPM; None for all.
        memoize: whether a row keeps its replacement for the fit; None: yes, except with
            ``domain="batch"``, where it is impossible.
        decode: how a vector becomes a token: ``"uniform"``, ``"first"`` or ``"argmax"``; None for
            ``"argmax"`` with ``the``, else ``"uniform"``.
        keep_special: False randomises special tokens and padding like words, as published code
            does.
        form: The form of the batches, if it cannot be found automatically.
        seed: for tests only: whoever knows it can take the replacement back, so nothing is
            guaranteed.

    Raises:
        DefenseError: a setting out of range.
    """

    name = "token_ldp"

    def __init__(
        self,
        mechanism: Mechanism,
        epsilon: float,
        per: Per = "sequence",
        domain: Literal["vocabulary", "batch"] | Sequence[int] | Tensor = "vocabulary",
        *,
        special_ids: Collection[int] | Any = None,
        bits: int | None = None,
        memoize: bool | None = None,
        decode: Decode | None = None,
        keep_special: bool = True,
        form: BatchForm | None = None,
        seed: int | None = None,
    ) -> None:
        form = form or BatchForm()
        check_number("TokenLDP: epsilon", epsilon, above=0)
        check_choice("TokenLDP: per", per, get_args(Per))
        if isinstance(domain, str) and domain not in ("vocabulary", "batch"):
            raise words.refused(
                f"domain={domain!r} must be 'vocabulary', 'batch' or the ids of a public set"
            )
        if isinstance(domain, str) and domain == "batch" and (memoize or bits):
            raise words.refused("domain='batch' takes neither memoize=True nor bits")
        self.mechanism: Mechanism = mechanism
        self.epsilon = float(epsilon)
        self.per: Per = per
        self.domain = domain
        self.special_ids = special_ids
        self.keep_special = keep_special
        self.memoize = domain != "batch" if memoize is None else memoize
        self.kind = form.kind
        self.seed = seed
        self._settings = (decode, bits)
        self._form = form
        self._set = None if isinstance(domain, str) else words.public_set(domain)
        self._randomizer(max(2, bits or 2))  # checks the settings
        self._releases = _ReleaseCounter()
        self._earlier = 0.0
        self._ready: words.Words | None = None
        self.guarantee = self._guarantee()
        if self._in_batch:
            warnings.warn(
                "TokenLDP: domain='batch' holds no guarantee: which words occur in the batch is "
                "visible. For comparison with published figures only; use domain='vocabulary'.",
                stacklevel=2,
            )

    @classmethod
    def as_published(cls, mechanism: Mechanism, epsilon: float, **settings: Any) -> TokenLDP:
        """Return the protocol of the published code of Vu et al. 2024, which holds no guarantee.

        The full epsilon on every position, special tokens and padding included; the ids of the
        batch as the domain; the first set bit; nothing memoised. The paper says instead that the
        budget is applied once to the whole data set.
        """
        rules: dict[Mechanism, Decode] = {"the": "argmax", "rappor": "first", "dbitflip": "first"}
        published = {"per": "token", "domain": "batch", "decode": rules.get(mechanism)}
        return cls(mechanism, epsilon, **{**published, "keep_special": False, **settings})

    @property
    def batches(self) -> int:
        """Return how many batches were randomised so far on this process, earlier fits included."""
        return self._releases.batches

    @property
    def longest(self) -> int:
        """Return the words of the longest row so far; with ``per="token"`` on any process."""
        return self._releases.longest

    @property
    def epsilon_per_sequence(self) -> float:
        """Return epsilon of one release of one row; inf where nothing is guaranteed.

        With ``per="token"``: epsilon times the most words that a row has had so far.
        """
        if self.guarantee.startswith("none"):
            return math.inf
        return self.epsilon if self.per == "sequence" else self.epsilon * self.longest

    @property
    def releases_per_example(self) -> int:
        """Return how often at most one example has been released so far, earlier fits included.

        By one client: with ``client="rank"`` the one that released an example most often, with
        ``client="world"`` by all processes together (a bound: the sum of what each released most
        often). An example that a sampler moves between clients, as Lightning's own does in every
        DDP fit, is released by each of them: against whoever sees all clients this number times
        that of the clients is a bound. Examples are distinguished by their words: a random crop of
        a text counts as another example, and two examples of equal words as one. What was released
        after the last checkpoint before a crash is not in the resumed count.
        """
        return self._releases.max_releases

    @property
    def epsilon_spent(self) -> float:
        """Return epsilon of a row over all its releases so far, by basic composition.

        Where settings changed, on the way or when a run was resumed, each release counts as
        the most expensive of them.
        """
        releases = self.releases_per_example
        return max(self.epsilon_per_sequence, self._earlier) * releases if releases else 0.0

    @property
    def privacy(self) -> Privacy:
        """Return epsilon of a row over all its releases by one client so far, with a delta of 0.

        See :attr:`releases_per_example` for rows that move between clients.
        """
        return Privacy(self.epsilon_spent, 0.0, None, 1.0, self.releases_per_example)

    def before_setup(self, context: DefenseContext) -> None:
        """Find vocabulary, special tokens and the kind of labels; make the domain.

        Raises:
            DefenseError: one of them is neither an argument nor known from the model, or the domain
                is empty.
        """
        self._releases.next_fit()
        self._ready = self._prepare(context.root)

    def on_batch(self, batch: Any, context: DefenseContext) -> Any:
        """Return a copy of the batch with randomised ids and labels.

        Raises:
            DefenseError: the batch cannot be read or copied, or it holds fields that may be text.
        """
        ready = self._ready or self._prepare(context.root)
        self._ready = ready
        tokens = self._form.read(batch, ready.kind)
        text = words.text_of(tokens, ready, self.keep_special)
        ids, n_words = text.ids[text.words], text.words.sum(1)
        rows = torch.split(ids, n_words.tolist())
        digests = [hashlib.blake2b(row.numpy().tobytes(), digest_size=16).digest() for row in rows]
        replacements = self._replacements(ids, n_words, ready, digests, context)
        self._releases.count(digests, max(n_words.tolist(), default=0), self.memoize)
        self._agree(context)
        self._earlier = max(self._earlier, self.epsilon_per_sequence)
        randomised = text.written(tokens, replacements)
        try:
            return write_batch(batch, randomised)
        except BatchError as error:
            raise words.unreadable(error) from error

    def state_dict(self) -> dict[str, Tensor | int | float | str]:
        """Return counts that hold for every process: batches, releases of an example, longest row.

        They include the largest cost of a release of a row, once there was one.
        """
        counts = self._releases.state_dict()
        if not counts["releases"]:
            return {**counts}
        return {**counts, "epsilon": max(self.epsilon_per_sequence, self._earlier)}

    def load_state_dict(self, state: State) -> None:
        """Continue the counters; none runs backwards, not even in one process."""
        if int(state.get("releases", 0)):
            self._earlier = max(self._earlier, float(state.get("epsilon", math.inf)))
        names = ("batches", "releases", "longest")
        self._releases.load(*(int(state.get(name, 0)) for name in names))

    def teardown(self) -> None:
        """Forget the model, and the digests of examples."""
        self._ready = None
        self._releases.next_fit()

    def _agree(self, context: DefenseContext) -> None:
        """Make the counts hold for every process: a checkpoint keeps those of process 0.

        It is a collective where counts depend on the data. A memoised row of ``per="sequence"``
        costs the same everywhere.
        """
        single = context.clients * context.processes == 1 or not dist.is_initialized()
        if single or (self.memoize and self.per == "sequence"):
            return
        local_counts = torch.tensor(self._releases.counts, device=context.device)
        counts = [torch.empty_like(local_counts) for _ in range(dist.get_world_size())]
        dist.all_gather(counts, local_counts)
        # One client's processes draw apart, except for a row that is memoised.
        together = context.processes > 1 and not self.memoize
        self._releases.merge(torch.stack(counts).tolist(), add=together)

    @property
    def _in_batch(self) -> bool:
        return isinstance(self.domain, str) and self.domain == "batch"

    def _guarantee(self) -> str:
        """Return one sentence; it begins with "none" where nothing is guaranteed."""
        if self._in_batch:
            return "none: tokens are randomised among those of their own batch, which it shows"
        if self.seed is not None:
            return "none: whoever knows or guesses `seed` can take the replacement back (for tests)"
        unit, releases = "row of a batch", "again in every epoch: epsilons add up"
        if self.per == "token":
            unit = "token, that is, words x epsilon for a row"
        if self.memoize:
            releases = (
                "once in a fit by each client that has the row, which keeps its replacement (rows "
                "of equal words show as equal)"
            )
        return (
            f"against whoever sees anything computed of the batch, {self.epsilon:g}-local "
            f"differential privacy for each {unit}; spent {releases}. Public: lengths and "
            "special tokens. Not covered: labels of a classifier"
        )

    def _randomizer(self, k: int) -> Randomizer:
        try:
            return Randomizer.with_defaults(self.mechanism, k, *self._settings)
        except ValueError as error:
            raise words.refused(str(error)) from error

    def _prepare(self, root: nn.Module) -> words.Words:
        ready = words.words_of(
            root,
            kind=self.kind,
            special_ids=self.special_ids,
            keep_special=self.keep_special,
            domain=self._set,
            per_batch=self._in_batch,
        )
        if ready.domain is not None:
            self._randomizer(len(ready.domain))
        return ready

    def _replacements(
        self,
        ids: Tensor,
        n_words: Tensor,
        ready: words.Words,
        digests: list[bytes],
        context: DefenseContext,
    ) -> Tensor:
        """Return (n,) replacements of the words ``ids``, (n,), row after row."""
        if ready.domain is None:
            domain, index = torch.unique(ids, return_inverse=True)
            if len(domain) < 2:
                return ids
            outside = None
        else:
            domain = ready.domain
            index, inside = ready.index_of(ids)
            outside = None if self._set is None else ~inside
        keys, counts = self._streams(n_words, digests, context)
        epsilon: float | Tensor = self.epsilon
        if self.per == "sequence":
            epsilon = (self.epsilon / n_words.double()).repeat_interleave(n_words)
        randomizer = self._randomizer(len(domain))
        indices = randomizer.draw(index, outside, epsilon, keys, counts)
        return torch.index_select(domain, 0, indices)

    def _streams(
        self, n_words: Tensor, digests: list[bytes], context: DefenseContext
    ) -> tuple[list[bytes], list[int]]:
        """Return the keys of the secret random numbers, and how many words in turn use each."""
        base, client = base_of(context.entropy, self.seed), context.client
        if self.memoize:
            return row_keys(base, client, digests, self.name), n_words.tolist()
        place = base, self.batches, context.process
        key = noise_key(*place, client=client, name=self.name, stream="token")
        return [key], [int(n_words.sum())]


def row_keys(base: bytes, client: int, digests: Sequence[bytes], name: str) -> list[bytes]:
    """Return 32 bytes for each row: the same wherever this client has the row in this fit."""
    key = noise_key(base, 0, 0, client=client, name=name, stream="row")
    return [hashlib.blake2b(digest, key=key, digest_size=32).digest() for digest in digests]
