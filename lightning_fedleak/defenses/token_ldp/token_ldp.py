"""The defence :class:`TokenLDP`: local differential privacy on token ids.

The client replaces each word of a batch by a random one, and the model trains on the new text. A
word is a token id that is not special. Anything that is computed from the new text (gradients, the
trained weights) is as private as the replacements themselves, and a *release* of a text is one new
draw of its replacements. The distributions are in
:mod:`~lightning_fedleak.defenses.token_ldp.mechanisms`, and the choice of what is a word in
:mod:`~lightning_fedleak.defenses.token_ldp.words`.
"""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_fedleak.defenses.base import (
    Defense,
    DefenseContext,
    Privacy,
    State,
    check_choice,
    check_number,
)
from lightning_fedleak.defenses.noise import base_of, noise_key
from lightning_fedleak.defenses.token_ldp import words
from lightning_fedleak.defenses.token_ldp.mechanisms import Decode, Mechanism, Randomizer
from lightning_fedleak.defenses.token_ldp.words import BatchForm
from lightning_fedleak.model.batches import BatchError, write_batch

Per = Literal["token", "sequence"]


class _ReleaseCounter:
    """Counts the releases of the row that was released most often, over all fits so far.

    A row is one text of a batch. Rows are distinguished by digests of their words, which are stored
    for one fit only.

    Attributes:
        batches: The number of batches.
        longest: The number of words of the longest row.
    """

    def __init__(self) -> None:
        self.batches = 0
        self.longest = 0
        self._past_max = 0  # the sum of the maxima of earlier fits
        self._row_counts: dict[bytes, int] = {}  # the releases of each row in this fit, by digest
        self._local_max = 0  # the largest of them
        self._global_max = 0  # a bound that holds for all processes together, see `merge`

    @property
    def max_releases(self) -> int:
        """Return the releases of the row that was released most often, earlier fits included.

        Rows of different fits cannot be compared. So the maxima of the fits are added, as if the
        same row had been released most often in each.
        """
        return self._past_max + max(self._local_max, self._global_max)

    @property
    def counts(self) -> tuple[int, int]:
        """Return the maximum of releases in this fit and the longest row, of this process only."""
        return self._local_max, self.longest

    def count(self, digests: Iterable[bytes], longest: int, memoized: bool) -> None:
        """Count one more batch.

        Args:
            digests: The digest of each row of the batch.
            longest: The number of words of the longest row of the batch.
            memoized: Whether a row has the same replacement in the whole fit, so that it is
                released only once.
        """
        self.batches += 1
        self.longest = max(self.longest, longest)
        if memoized:
            self._local_max = 1
            return
        for digest in digests:
            self._row_counts[digest] = count = self._row_counts.get(digest, 0) + 1
            self._local_max = max(self._local_max, count)

    def merge(self, counts: Sequence[Sequence[int]], add: bool) -> None:
        """Raise the counts to bounds that hold for all processes together.

        Args:
            counts: The :attr:`counts` of every process, this one included.
            add: Whether a row that two processes release is released twice. If so, the bound is the
                sum of the processes' maxima, otherwise the largest of them.
        """
        releases, lengths = zip(*counts, strict=True)
        self._global_max = sum(releases) if add else max(releases)
        self.longest = max(lengths)

    def next_fit(self) -> None:
        """Begin a new fit, in which each row is released again."""
        self._past_max, self._local_max, self._global_max = self.max_releases, 0, 0
        self._row_counts.clear()

    def state_dict(self) -> dict[str, int]:
        """Return the counts for a checkpoint, by the arguments of :meth:`load`."""
        return {"batches": self.batches, "releases": self.max_releases, "longest": self.longest}

    def load(self, batches: int, releases: int, longest: int) -> None:
        """Continue the counts of a checkpoint; a count that is larger here stays."""
        self._past_max, self._local_max, self._global_max = max(self.max_releases, releases), 0, 0
        self._row_counts.clear()
        self.batches = max(self.batches, batches)
        self.longest = max(self.longest, longest)


class TokenLDP(Defense):
    """Replaces every token id of a training batch by a randomised one, before the model sees it.

    Each replacement is an independent draw from the mechanism's distribution given the true token.
    Everything that is computed from the new batch (activations, gradients, the trained weights) is
    post-processing. For the mechanisms and decoding rules see
    :mod:`lightning_fedleak.defenses.token_ldp.mechanisms`.

    **Guarantee.** A row is one text of the batch, with n words. With ``per="sequence"`` each word
    gets epsilon / n, so for any two rows of n words the probabilities of any output differ by a
    factor of at most e^epsilon. With ``per="token"`` each word gets epsilon, so this holds for rows
    that differ in one word, and for whole rows it holds with n epsilon. See
    :attr:`epsilon_per_sequence` and :attr:`epsilon_spent`. The unit is a row of the batch, not a
    person: text that occurs in several rows is released with each.

    **Public facts.** Not protected are the number of rows and of words in each, the attention mask,
    the positions that the loss ignores, and the positions of each special token. The positions on
    which a masked language model is trained must be chosen independently of the words. Ids that
    both the attention mask and the loss ignore are set to 0, unless they are special. Unknown
    fields of the batch stop training, because they may hold the text; list those that may stay in
    ``form=BatchForm(public_fields=...)``. Labels of a classifier are **not covered**. Batches of
    validation do not change, and hooks of callbacks and of the module other than ``training_step``
    get the true batch.

    An id that the model does not have is replaced like a word, so such a text cannot stop training.

    **Labels.** In a causal model the labels are the replaced inputs. In a masked model the label at
    a predicted position is the word. Its replacement becomes the label, and also the input unless
    a special token (the mask) is there. This includes inputs that masking had swapped for a random
    word: such an input next to the label would reveal what the word is not. In an encoder-decoder
    the target text is randomised like the source text, and its words count in n.

    **Repeated epochs.** Each new draw for the same row is one more release, and epsilons add up.
    With memoisation (the default, as RAPPOR and dBitFlipPM define it) the replacement of a row is a
    function of the fit's secret and the row's words. Then every epoch uses the same replacement,
    and epsilon is spent once in a fit by each client that has the row. But rows of equal words get
    equal replacements, which reveals that they are equal; ``memoize=False`` draws independent ones.
    A resumed fit has a new secret and is a new release, and so is the same row on another client.

    **Randomness** comes from the fit's secret entropy, never from a global generator, and is not
    repeated after a resume. It is drawn on the CPU (SHAKE-128 with a secret 256-bit key), so a
    batch on another device waits for it once.

    Examples:
        >>> from lightning_fedleak import DefendedStrategy, TokenLDP
        >>> defense = TokenLDP("grr", epsilon=8.0, per="token")
        >>> strategy = DefendedStrategy("auto", defenses=[defense])
        >>> defense.epsilon_spent
        0.0

    Args:
        mechanism: ``"grr"``, ``"rappor"``, ``"the"`` or ``"dbitflip"``.
        epsilon: The budget for one release of one token or of one row, see ``per``.
        per: ``"sequence"`` divides epsilon among a row's words; ``"token"`` spends it on each.
        domain: The ids that may replace a token. ``"vocabulary"`` means every id that is not
            special. A list of ids is a public set, which must be chosen independently of the
            private text; for a token that is not in the set, the mechanism gets one that is drawn
            uniformly from the set. ``"batch"`` means the ids in the batch, as in the published code
            of Vu et al. 2024, with **no guarantee**, because it reveals which words occur.
        special_ids: The ids that are not words, or a tokenizer that has them. Its unknown token
            counts as a word, unless it is also another special token. None for the ids in the
            config of a causal or encoder-decoder model; other models need this argument.
        bits: d of ``dbitflip``, the number of reported bits; None for all.
        memoize: Whether a row has the same replacement in the whole fit. None means True, except
            with ``domain="batch"``, which does not support it.
        decode: The rule by which a reported vector becomes a token: ``"uniform"``, ``"first"`` or
            ``"argmax"``; None for ``"argmax"`` with ``the``, and ``"uniform"`` otherwise.
        keep_special: Whether special tokens and padding stay. False randomises them like words, as
            the published code does.
        form: The form of the batches, if it cannot be found automatically.
        seed: For tests only. Whoever knows the seed can undo the replacement, so nothing is
            guaranteed.

    Attributes:
        kind: The meaning of the labels in ``form``; None if it is found in the model.

    Raises:
        DefenseError: A setting is out of range.
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
        if isinstance(domain, str):
            check_choice("TokenLDP: domain", domain, ("vocabulary", "batch"))
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
        self._decode_and_bits = (decode, bits)
        self._form = form
        self._public_set = None if isinstance(domain, str) else words.public_set(domain)
        self._randomizer(max(2, bits or 2))  # checks the settings
        self._releases = _ReleaseCounter()
        self._max_cost = 0.0  # the largest epsilon of a release of a row so far
        self._words: words.Words | None = None
        self.guarantee = self._guarantee()
        if self._in_batch:
            warnings.warn(
                "TokenLDP: domain='batch' holds no guarantee: which words occur in the batch is "
                "visible. Use domain='vocabulary', except to compare with published figures.",
                stacklevel=2,
            )

    @classmethod
    def as_published(cls, mechanism: Mechanism, epsilon: float, **settings: Any) -> TokenLDP:
        """Return the protocol of the published code of Vu et al. 2024, which has no guarantee.

        It spends the full epsilon on every position, special tokens and padding included. The
        domain is the ids of the batch, bits are decoded by the first set one, and nothing is
        memoised. The paper describes another protocol, in which the budget is applied once to the
        whole data set.

        Args:
            mechanism: The name of the mechanism.
            epsilon: The budget for each position.
            settings: Further arguments of the class, which take precedence.
        """
        rules: dict[Mechanism, Decode] = {"the": "argmax", "rappor": "first", "dbitflip": "first"}
        published = {"per": "token", "domain": "batch", "decode": rules.get(mechanism)}
        return cls(mechanism, epsilon, **{**published, "keep_special": False, **settings})

    @property
    def batches(self) -> int:
        """Return the number of batches that this process has randomised, earlier fits included."""
        return self._releases.batches

    @property
    def longest(self) -> int:
        """Return the words of the longest row so far; with ``per="token"`` over all processes."""
        return self._releases.longest

    @property
    def epsilon_per_sequence(self) -> float:
        """Return the epsilon of one release of one row; infinite if nothing is guaranteed.

        With ``per="token"`` it is epsilon times the number of words of the longest row so far.
        """
        if self.guarantee.startswith("none"):
            return math.inf
        return self.epsilon if self.per == "sequence" else self.epsilon * self.longest

    @property
    def releases_per_example(self) -> int:
        """Return the maximum number of releases of one row by one client, earlier fits included.

        With ``client="rank"`` the maximum is also taken over the clients. With ``client="world"``
        it is a bound: the sum of the maxima of all processes. If a sampler moves a row between
        clients, as Lightning's does in every DDP fit, each of them releases it. Against an
        adversary who sees all clients, the bound is this number times the number of clients. Rows
        are distinguished by their words: a random crop of a text counts as another row, and two
        rows of equal words count as one. Releases after the last checkpoint before a crash are not
        in the count of the resumed run.
        """
        return self._releases.max_releases

    @property
    def epsilon_spent(self) -> float:
        """Return the epsilon of a row over all its releases so far, by basic composition.

        If settings or lengths changed during the run or at a resume, each release counts as the
        most expensive one.
        """
        releases = self.releases_per_example
        return max(self.epsilon_per_sequence, self._max_cost) * releases if releases else 0.0

    @property
    def privacy(self) -> Privacy:
        """Return the epsilon of a row over all its releases by one client so far; delta is 0.

        See :attr:`releases_per_example` for rows that move between clients.
        """
        return Privacy(self.epsilon_spent, 0.0, None, 1.0, self.releases_per_example)

    def before_setup(self, context: DefenseContext) -> None:
        """Find the vocabulary, the special tokens and the meaning of labels, and build the domain.

        Raises:
            DefenseError: One of them is neither an argument nor found in the model, or the domain
                has fewer than two ids.
        """
        self._releases.next_fit()
        self._words = self._words_of(context.root)

    def on_batch(self, batch: Any, context: DefenseContext) -> Any:
        """Return a copy of the batch with randomised ids and labels.

        Raises:
            DefenseError: The batch cannot be read or copied, or it holds fields that may be text.
        """
        model_words = self._words or self._words_of(context.root)
        self._words = model_words
        tokens = self._form.read(batch, model_words.kind)
        text = words.text_of(tokens, model_words, self.keep_special)
        ids, n_words = text.ids[text.words], text.words.sum(1)
        rows = torch.split(ids, n_words.tolist())
        digests = [hashlib.blake2b(row.numpy().tobytes(), digest_size=16).digest() for row in rows]
        replacements = self._replacements(ids, n_words, model_words, digests, context)
        self._releases.count(digests, max(n_words.tolist(), default=0), self.memoize)
        self._merge_counts(context)
        self._max_cost = max(self._max_cost, self.epsilon_per_sequence)
        randomised = text.replace_words(tokens, replacements)
        try:
            return write_batch(batch, randomised)
        except BatchError as error:
            raise words.unreadable(error) from error

    def state_dict(self) -> dict[str, Tensor | int | float | str]:
        """Return the number of batches, and bounds of releases and lengths over all processes.

        After the first release, the state also holds the largest epsilon of a release of a row.
        """
        counts = self._releases.state_dict()
        if not counts["releases"]:
            return {**counts}
        return {**counts, "epsilon": max(self.epsilon_per_sequence, self._max_cost)}

    def load_state_dict(self, state: State) -> None:
        """Continue the counts of a checkpoint; a count that is larger here stays."""
        if int(state.get("releases", 0)):
            self._max_cost = max(self._max_cost, float(state.get("epsilon", math.inf)))
        names = ("batches", "releases", "longest")
        self._releases.load(*(int(state.get(name, 0)) for name in names))

    def teardown(self) -> None:
        """Forget the words of the model and the digests of rows."""
        self._words = None
        self._releases.next_fit()

    def _merge_counts(self, context: DefenseContext) -> None:
        """Merge the counts of all processes, because a checkpoint holds only those of process 0.

        Every process must call it. With memoisation and ``per="sequence"`` the cost does not depend
        on the data, so it is the same on every process, and nothing is sent.
        """
        is_single = context.clients * context.processes == 1 or not dist.is_initialized()
        if is_single or (self.memoize and self.per == "sequence"):
            return
        local_counts = torch.tensor(self._releases.counts, device=context.device)
        counts = [torch.empty_like(local_counts) for _ in range(dist.get_world_size())]
        dist.all_gather(counts, local_counts)
        # Processes of one client draw independently, unless rows are memoised.
        is_sum = context.processes > 1 and not self.memoize
        self._releases.merge(torch.stack(counts).tolist(), add=is_sum)

    @property
    def _in_batch(self) -> bool:
        """Return whether the domain of each batch consists of its own ids."""
        return isinstance(self.domain, str) and self.domain == "batch"

    def _guarantee(self) -> str:
        """Return the text of ``guarantee``; it begins with "none" if nothing is guaranteed."""
        if self._in_batch:
            return "none: tokens are replaced by tokens of the same batch, which reveals its words"
        if self.seed is not None:
            return "none: whoever knows or guesses `seed` can undo the replacement (for tests)"
        unit, releases = "row of a batch", "again in every epoch: epsilons add up"
        if self.per == "token":
            unit = "token, that is, words x epsilon for a row"
        if self.memoize:
            releases = (
                "once in a fit by each client that has the row, which keeps its replacement (it is "
                "visible which rows are equal)"
            )
        return (
            f"against whoever sees anything computed from the batch, {self.epsilon:g}-local "
            f"differential privacy for each {unit}; spent {releases}. Public: lengths and "
            "special tokens. Not covered: labels of a classifier"
        )

    def _randomizer(self, k: int) -> Randomizer:
        """Return the mechanism and rule on a domain of k ids.

        Raises:
            DefenseError: A setting is out of range, or settings contradict each other.
        """
        try:
            return Randomizer.with_defaults(self.mechanism, k, *self._decode_and_bits)
        except ValueError as error:
            raise words.refused(str(error)) from error

    def _words_of(self, root: nn.Module) -> words.Words:
        """Return the words of a model, and check the settings on its domain."""
        model_words = words.words_of(
            root,
            kind=self.kind,
            special_ids=self.special_ids,
            keep_special=self.keep_special,
            domain=self._public_set,
            per_batch=self._in_batch,
        )
        if model_words.domain is not None:
            self._randomizer(len(model_words.domain))
        return model_words

    def _replacements(
        self,
        ids: Tensor,
        n_words: Tensor,
        model_words: words.Words,
        digests: list[bytes],
        context: DefenseContext,
    ) -> Tensor:
        """Return (n,), the replacement of each of the n words ``ids``, row after row."""
        if model_words.domain is None:
            domain, index = torch.unique(ids, return_inverse=True)
            if len(domain) < 2:
                return ids
            outside = None
        else:
            domain = model_words.domain
            index, inside = model_words.index_of(ids)
            outside = None if self._public_set is None else ~inside
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
        """Return the keys of the random streams, and the number of words that use each.

        With memoisation each row has a key, the same for equal rows of one client in one fit.
        """
        base, client = base_of(context.entropy, self.seed), context.client
        if self.memoize:
            key = noise_key(base, 0, 0, client=client, name=self.name, stream="row")
            row_keys = [hashlib.blake2b(d, key=key, digest_size=32).digest() for d in digests]
            return row_keys, n_words.tolist()
        ids = base, self.batches, context.process
        key = noise_key(*ids, client=client, name=self.name, stream="token")
        return [key], [int(n_words.sum())]
