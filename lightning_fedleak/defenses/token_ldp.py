"""Local differential privacy on token ids: the model trains on randomised text."""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_fedleak.anatomy import EMBEDDING_WEIGHT, Anatomy, AnatomyError, Kind, find_anatomy
from lightning_fedleak.batches import (
    BatchAdapter,
    BatchError,
    BatchWriter,
    TokenBatch,
    other_fields,
    read_batch,
    write_batch,
)
from lightning_fedleak.defenses.base import Defense, DefenseContext, DefenseError, State
from lightning_fedleak.defenses.ldp_mechanisms import Decode, Mechanism, Randomizer
from lightning_fedleak.defenses.ldp_reference import clients, reference_sample
from lightning_fedleak.defenses.noise import base_of
from lightning_fedleak.defenses.token_streams import batch_key, row_digests, row_keys, uniforms
from lightning_fedleak.defenses.token_text import (
    TextError,
    Words,
    public_set,
    special_of_config,
    special_of_tokenizer,
    text_of,
)

Per = Literal["token", "sequence"]
Implementation = Literal["torch", "multi-freq-ldpy"]

PUBLIC_FIELDS = frozenset(
    ("position_ids", "token_type_ids", "special_tokens_mask", "length", "lengths")
)
"""Fields of a batch that say where words stand, not which: they are handed on as they are."""


class TokenLDP(Defense):
    """Replaces every token id of a training batch by a randomised one, before the model sees it.

    The replaced token is a draw from the mechanism's law given the true one, independent for every
    token. Whatever is computed of the new batch (activations, gradients, the trained weights) is
    post-processing. Mechanisms, decoding rules and their laws:
    :mod:`lightning_fedleak.defenses.ldp_mechanisms`.

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

    **Labels.** Causal: the labels are the replaced inputs. Masked: at a position that is predicted
    the label is the word, so that the word's one replacement becomes the label, and the input too
    unless a special token (the mask) stands there. An input that masking had swapped for a random
    word gets the replacement as well: next to the label it would tell what the word is not.
    Encoder-decoder: the target text is randomised as the source is, and counts in n.

    **Repeated epochs.** Each new draw for the same example is one more release, and epsilons add
    up. With memoisation (the default, as RAPPOR and dBitFlipPM define it) a row's replacement is a
    function of the fit's secret and the row's words, so that every epoch sees the same one and
    epsilon is spent once in a fit by each client that has the row. Two rows of equal words then get
    equal replacements, which shows that they are equal: give ``example_ids`` where texts repeat. A
    resumed fit has a new secret and is a new release, and so is the same example on another client.

    **Randomness** comes from the fit's secret entropy, never from a global generator, and is not
    replayed after a resume. It is drawn on the CPU (SHAKE-128 with a secret 256-bit key) on every
    device, so that a batch on another device waits for it once.

    Args:
        mechanism: ``"grr"``, ``"rappor"``, ``"the"`` or ``"dbitflip"``.
        epsilon: the budget, for one release of one token or of one row, see ``per``.
        per: ``"sequence"`` splits epsilon over a row's words; ``"token"`` spends it on each.
        domain: what tokens are replaced by. ``"vocabulary"``: every id that is not special. Ids of
            a public set: chosen without regard to the private text; a token outside of it is
            replaced by a uniform one of the set before the mechanism acts. ``"batch"``: the ids
            that occur in the batch, as in the published code of Vu et al. 2024: **no guarantee**,
            since which words occur is visible.
        labels: ``"original"`` leaves labels as they are: **no guarantee**, since a language model's
            labels are the text.
        special_ids: ids that are no words: a collection, or a tokenizer (whose unknown token is
            taken for a word, unless it is another special token too). None: those in the model's
            config, which tells them for causal and encoder-decoder models alone.
        keep_special: False randomises special tokens and padding like words (the published code).
        decode: how a vector becomes a token: ``"uniform"``, ``"first"``, ``"argmax"``; None for
            ``"argmax"`` with ``the``, else ``"uniform"``.
        buckets: b of dBitFlipPM; None for one per token.
        bits: d of dBitFlipPM; None for all.
        memoize: whether a row keeps its replacement for the fit; None: yes, except with
            ``domain="batch"``, where it is impossible.
        example_ids: name of a field of the batch with one public integer for each row, that tells
            apart rows of equal words.
        kind: what the labels mean, see :data:`~lightning_fedleak.anatomy.Kind`; None: as the model
            says.
        public_fields: further fields of the batch that hold nothing private.
        batch_adapter: reads a batch of the user's own form; with ``batch_writer``.
        batch_writer: gives a copy of such a batch with the ids and labels of a TokenBatch. The
            copy is read again and must hold them.
        implementation: ``"multi-freq-ldpy"`` draws by that package's clients: for comparison only,
            slow, and from a generator with a seed of 32 bits.
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
        labels: Literal["replaced", "original"] = "replaced",
        *,
        special_ids: Collection[int] | Any = None,
        keep_special: bool = True,
        decode: Decode | None = None,
        buckets: int | None = None,
        bits: int | None = None,
        memoize: bool | None = None,
        example_ids: str | None = None,
        kind: Kind | None = None,
        public_fields: Collection[str] = (),
        batch_adapter: BatchAdapter | None = None,
        batch_writer: BatchWriter | None = None,
        implementation: Implementation = "torch",
        seed: int | None = None,
    ) -> None:
        if not (math.isfinite(epsilon) and epsilon > 0):
            raise _refused(f"epsilon={epsilon!r} must be a positive number")
        _check_choice("per", per, get_args(Per))
        _check_choice("labels", labels, ("replaced", "original"))
        _check_choice("implementation", implementation, get_args(Implementation))
        if kind is not None:
            _check_choice("kind", kind, get_args(Kind))
        if isinstance(domain, str):
            _check_choice("domain", domain, ("vocabulary", "batch", "ids of a public set"))
        if domain == "batch" and memoize:
            raise _refused(
                "memoize=True cannot hold with domain='batch', which changes with the batch: use "
                "domain='vocabulary', or leave `memoize` out"
            )
        if domain == "batch" and (buckets is not None or bits is not None):
            raise _refused("buckets and bits need a fixed domain: domain='vocabulary'")
        if (batch_adapter is None) != (batch_writer is None):
            raise _refused(
                "batch_adapter and batch_writer belong together: one reads your batch, the other "
                "makes a copy with other ids"
            )
        if implementation == "multi-freq-ldpy":
            try:
                clients()
            except ImportError as error:
                raise _refused(str(error)) from error
        self.mechanism: Mechanism = mechanism
        self.epsilon = float(epsilon)
        self.per: Per = per
        self.domain = domain
        self.labels = labels
        self.special_ids = special_ids
        self.keep_special = keep_special
        self.memoize = domain != "batch" if memoize is None else memoize
        self.example_ids = example_ids
        self.kind = kind
        self.public_fields = frozenset(public_fields) | PUBLIC_FIELDS
        self.implementation = implementation
        self.seed = seed
        self._settings = (decode, buckets, bits)
        self._adapter, self._writer = batch_adapter, batch_writer
        self._set = None if isinstance(domain, str) else _checked_set(domain)
        self._randomizer(max(2, buckets or bits or 2))  # checks the settings
        self.batches = 0
        self.longest = 0
        self._earlier = 0
        self._counts: dict[bytes, int] = {}
        self._most = 0
        self._ready: Words | None = None
        self.guarantee = self._guarantee()
        self._warn()

    @classmethod
    def as_published(cls, mechanism: Mechanism, epsilon: float, **settings: Any) -> TokenLDP:
        """The protocol of the published code of Vu et al. 2024, which holds no guarantee.

        The full epsilon on every position, special tokens and padding included; the ids of the
        batch as the domain; the first set bit; nothing memoised. The paper says instead that the
        budget is applied once to the whole data set.
        """
        rule = None if mechanism == "grr" else "argmax" if mechanism == "the" else "first"
        published = {"per": "token", "domain": "batch", "keep_special": False, "decode": rule}
        return cls(mechanism, epsilon, **{**published, **settings})

    @property
    def epsilon_per_sequence(self) -> float:
        """Epsilon of one release of one row; inf where nothing is guaranteed.

        With ``per="token"``: epsilon times the most words that a row has had so far on this
        process.
        """
        if self.guarantee.startswith("none"):
            return math.inf
        return self.epsilon if self.per == "sequence" else self.epsilon * self.longest

    @property
    def releases_per_example(self) -> int:
        """How often at most one example has been released so far, earlier fits included.

        Examples are told apart by their words (and ``example_ids``): a random crop of a text
        counts as another example. Counted on this process alone: where a sampler moves examples
        between processes, as Lightning's does under DDP with ``shuffle=True``, others release them
        too, and this number times that of the processes bounds all their releases where rows are
        memoised.
        """
        return self._earlier + self._most

    @property
    def epsilon_spent(self) -> float:
        """Epsilon of a row over all its releases so far, by basic composition."""
        releases = self.releases_per_example
        return self.epsilon_per_sequence * releases if releases else 0.0

    def before_setup(self, context: DefenseContext) -> None:
        """Finds vocabulary, special tokens and the kind of labels; makes the domain.

        Raises:
            DefenseError: one of them cannot be told and is not given, or the domain is empty.
        """
        self._earlier, self._most = self.releases_per_example, 0
        self._counts.clear()
        self._ready = self._prepare(context.root)

    def on_batch(self, batch: Any, context: DefenseContext) -> Any:
        """A copy of the batch with randomised ids and labels.

        Raises:
            DefenseError: the batch cannot be read or copied, or it holds fields that may be text.
        """
        try:
            return self._on_batch(batch, context)
        except TextError as error:
            raise _refused(str(error)) from error

    def _on_batch(self, batch: Any, context: DefenseContext) -> Any:
        ready = self._ready or self._prepare(context.root)
        self._ready = ready
        tokens = self._read(batch, ready.kind)
        text = text_of(tokens, ready, self.keep_special)
        ids, n_words = text.ids[text.words], text.words.sum(1)
        rows = torch.split(ids, n_words.tolist())
        digests = row_digests(rows, self._ids_of_examples(batch, len(n_words)))
        if ready.domain is None:
            drawn = self._draw_in_batch(ids, n_words, digests, context)
        else:
            index, inside = ready.index_of(ids)
            everywhere = inside if self._set is not None else None
            drawn = self._draw(index, everywhere, len(ready.domain), n_words, digests, context)
            drawn = ready.domain[drawn]
        self.batches += 1
        self._count(digests, n_words)
        written = text.written(tokens, drawn, self.labels == "replaced")
        return self._write(batch, written)

    def state_dict(self) -> dict[str, Tensor | int | float | str]:
        """Counts: batches, releases of an example, words of the longest row."""
        return {
            "batches": self.batches,
            "releases": self.releases_per_example,
            "longest": self.longest,
        }

    def load_state_dict(self, state: State) -> None:
        """Goes on counting; no counter runs backwards, not even in one process."""
        self._earlier = max(self.releases_per_example, int(state.get("releases", 0)))
        self._most = 0
        self._counts.clear()
        self.batches = max(self.batches, int(state.get("batches", 0)))
        self.longest = max(self.longest, int(state.get("longest", 0)))

    def teardown(self) -> None:
        """Forgets the model, and by what examples were told apart."""
        self._ready = None
        self._earlier, self._most = self.releases_per_example, 0
        self._counts.clear()

    def _guarantee(self) -> str:
        if self.domain == "batch":
            return (
                f"none: every token is randomised with epsilon={self.epsilon:g}, but among the ids "
                "of its own batch, so that whoever sees the batch knows which words occur in it"
            )
        if self.labels == "original":
            return "none: the inputs are randomised, but the labels hold the original words"
        if self.seed is not None:
            return "none: whoever knows or guesses `seed` can take the replacement back (for tests)"
        if self.implementation == "multi-freq-ldpy":
            return "none: the generator has a seed of 32 bits, which can be tried out"
        unit, total = (
            ("row of a batch", "")
            if self.per == "sequence"
            else ("token", ", that is, words x epsilon for a row")
        )
        releases = (
            "once in a fit by each client that has the row, which keeps its replacement (rows of "
            "equal words show as equal"
            + (" unless their example ids differ)" if self.example_ids else ")")
            if self.memoize
            else "in every epoch anew: epsilons add up"
        )
        return (
            f"against whoever sees anything computed of the batch, {self.epsilon:g}-local "
            f"differential privacy for each {unit}{total}; spent {releases}. Public: lengths and "
            "special tokens. Not covered: labels of a classifier"
        )

    def _warn(self) -> None:
        if self.domain == "batch":
            _tell(
                "domain='batch' holds no guarantee: which words occur in the batch is visible, and "
                f"with per='token' a row of 32 would cost 32 x {self.epsilon:g} in any case. For "
                "comparison with published figures only; use domain='vocabulary'."
            )
        if self.labels == "original":
            _tell(
                "labels='original' voids the guarantee: a language model's labels are the text. "
                "Leave `labels` out."
            )
        if self.implementation == "multi-freq-ldpy":
            _tell(
                "implementation='multi-freq-ldpy' draws from a generator with a seed of 32 bits, "
                "which can be tried out. For comparison only; leave `implementation` out."
            )

    def _randomizer(self, k: int) -> Randomizer:
        decode, buckets, bits = self._settings
        try:
            return Randomizer.of(self.mechanism, k, decode, buckets, bits)
        except ValueError as error:
            raise _refused(str(error)) from error

    def _prepare(self, root: nn.Module) -> Words:
        anatomy = None
        if self.kind is None or self.special_ids is None or self._set is None:
            try:
                anatomy = find_anatomy(root, kind=self.kind)
            except AnatomyError as error:
                raise _refused(
                    f"the model could not be read ({error}). Give kind=, special_ids= and domain= "
                    "(the ids of a public set, range(vocabulary size) say)"
                ) from error
        kind = self.kind or (anatomy.kind if anatomy else "causal")
        special = self._special(kind, anatomy)
        if not self.keep_special and kind not in ("causal", "classifier"):
            raise _refused(
                f"keep_special=False would randomise mask or start tokens that a {kind} model "
                "needs: leave it out"
            )
        if self.domain == "batch":
            return Words(kind, special, None, None)
        weight = anatomy.parameter(EMBEDDING_WEIGHT) if anatomy else None
        if self._set is None and weight is None:
            raise _refused(
                "the size of the vocabulary cannot be read off the model: give domain=range(size)"
            )
        size = None if weight is None else weight.shape[0]
        ids = torch.arange(size) if self._set is None else self._set  # type: ignore[arg-type]
        if size is not None and int(ids.max()) >= size:
            raise _refused(
                f"domain holds the id {int(ids.max())}, but the model has {size} words: give ids "
                f"from 0 to {size - 1}"
            )
        if self.keep_special:
            ids = ids[~torch.isin(ids, special)]
        if len(ids) < 2:
            raise _refused(
                f"domain holds {len(ids)} ids that are not special and needs at least 2: give more"
            )
        self._randomizer(len(ids))
        return Words(kind, special, ids, size)

    def _special(self, kind: Kind, anatomy: Anatomy | None) -> Tensor:
        given = self.special_ids
        if given is None:
            if kind in ("masked", "classifier") and self.keep_special:
                raise _refused(
                    f"special_ids must be given for a {kind} model, whose config does not tell "
                    "them: pass the tokenizer, or [] where there are none"
                )
            found = special_of_config(anatomy)
        elif hasattr(given, "all_special_ids"):
            found = special_of_tokenizer(given)
        else:
            found = {int(i) for i in given}
        return torch.tensor(sorted(found), dtype=torch.int64)

    def _read(self, batch: Any, kind: Kind) -> TokenBatch:
        try:
            if self._adapter is not None:
                return self._adapter(batch)
            tokens = read_batch(batch, kind)
            allowed = self.public_fields | ({self.example_ids} if self.example_ids else set())
            unknown = [name for name in other_fields(batch) if name not in allowed]
        except BatchError as error:
            raise _refused(
                f"the batch cannot be read ({error}). Give batch_adapter= and batch_writer="
            ) from error
        if unknown:
            raise _refused(
                f"the batch holds the fields {', '.join(unknown)}, which would reach the model as "
                "they are. Take them out of the batch, or, if they say nothing about the text, "
                f"name them in public_fields={unknown}"
            )
        return tokens

    def _write(self, batch: Any, tokens: TokenBatch) -> Any:
        try:
            if self._writer is None or self._adapter is None:
                return write_batch(batch, tokens)
            written = self._writer(batch, tokens)
            read = self._adapter(written)
        except BatchError as error:
            raise _refused(
                f"the batch cannot be copied ({error}). Give batch_adapter= and batch_writer="
            ) from error
        pairs = [(read.input_ids, tokens.input_ids), (read.labels, tokens.labels)]
        for got, wanted in pairs:
            if wanted is not None and (got is None or not torch.equal(got, wanted)):
                raise _refused(
                    "batch_writer gave a batch that batch_adapter reads other ids or labels from "
                    "than it was given: it must put both in"
                )
        return written

    def _ids_of_examples(self, batch: Any, rows: int) -> list[int] | None:
        if self.example_ids is None:
            return None
        get = batch.get if hasattr(batch, "get") else lambda name: getattr(batch, name, None)
        found = get(self.example_ids)
        if not isinstance(found, Tensor) or found.shape != (rows,) or found.is_floating_point():
            raise _refused(
                f"example_ids='{self.example_ids}' must name a field with one integer for each of "
                f"the batch's {rows} rows"
            )
        return [int(i) for i in found.tolist()]

    def _count(self, digests: Iterable[bytes], n_words: Tensor) -> None:
        self.longest = max(self.longest, int(n_words.max()) if len(n_words) else 0)
        if self.memoize:
            self._most = 1
            return
        for digest in digests:
            self._counts[digest] = count = self._counts.get(digest, 0) + 1
            self._most = max(self._most, count)

    def _draw_in_batch(
        self, ids: Tensor, n_words: Tensor, digests: list[bytes], context: DefenseContext
    ) -> Tensor:
        domain, index = torch.unique(ids, return_inverse=True)
        if len(domain) < 2:
            return ids
        drawn = self._draw(index, None, len(domain), n_words, digests, context)
        return torch.gather(domain, 0, drawn)

    def _draw(
        self,
        index: Tensor,
        inside: Tensor | None,
        k: int,
        n_words: Tensor,
        digests: list[bytes],
        context: DefenseContext,
    ) -> Tensor:
        """(n,) indices of the domain, for (n,) indices row after row; ``inside`` None: all are."""
        randomizer = self._randomizer(k)
        base, client = base_of(context.entropy, self.seed), context.client
        if self.memoize:
            keys, counts = row_keys(base, client, digests, self.name), n_words.tolist()
        else:
            rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
            keys = [batch_key(base, client, self.batches, rank, self.name)]
            counts = [len(index)]
        columns = randomizer.n_uniforms + (inside is not None)
        drawn = uniforms(keys, counts, columns)
        if inside is not None:
            index = torch.where(inside, index, (drawn[:, -1] * k).long().clamp_(max=k - 1))
        epsilon = self.epsilon / n_words.double()
        if self.per == "token":
            epsilon = torch.full_like(epsilon, self.epsilon)
        epsilon = epsilon.repeat_interleave(n_words)
        if self.implementation == "torch":
            return randomizer.sample(index, self.epsilon if self.per == "token" else epsilon, drawn)
        parts = zip(keys, torch.split(index, counts), torch.split(epsilon, counts), strict=True)
        return torch.cat(
            [reference_sample(randomizer, i, e, int.from_bytes(key, "big")) for key, i, e in parts]
        )


def _checked_set(domain: Iterable[int] | Tensor) -> Tensor:
    try:
        return public_set(domain)
    except TextError as error:
        raise _refused(str(error)) from error


def _check_choice(name: str, value: object, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise _refused(f"{name}={value!r} must be one of {', '.join(allowed)}")


def _refused(why: str) -> DefenseError:
    return DefenseError(f"TokenLDP: {why}")


def _tell(what: str) -> None:
    warnings.warn(f"TokenLDP: {what}", UserWarning, stacklevel=4)


__all__ = ["PUBLIC_FIELDS", "TokenLDP"]
