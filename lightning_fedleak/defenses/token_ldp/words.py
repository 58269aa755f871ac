"""What counts as a word, which ids of a batch are words, and how others take their place."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sized
from dataclasses import dataclass, replace
from typing import Any, get_args

import torch
from torch import Tensor, nn

from lightning_fedleak.defenses.base import DefenseError
from lightning_fedleak.defenses.checks import check_choice
from lightning_fedleak.model import batches
from lightning_fedleak.model.anatomy import (
    EMBEDDING_WEIGHT,
    Anatomy,
    AnatomyError,
    Kind,
    find_anatomy,
)
from lightning_fedleak.model.batches import TokenBatch

_SPECIAL = ("bos", "eos", "pad", "cls", "sep", "mask", "decoder_start")

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_HIDDEN = 0  # id written over those that neither the model's attention nor the loss reads

PUBLIC_FIELDS = frozenset(
    ("position_ids", "token_type_ids", "special_tokens_mask", "length", "lengths")
)
"""Fields of a batch that hold the positions of words, not the words: they pass unchanged."""


def refused(reason: str) -> DefenseError:
    """Return the error of a text that cannot be randomised; it never holds contents."""
    return DefenseError(f"TokenLDP: {reason}")


def unreadable(error: batches.BatchError) -> DefenseError:
    """Return the error of a batch that cannot be read or copied."""
    return refused(
        f"the batch cannot be read ({str(error).removesuffix(batches.ADAPTER)}) Let the collate "
        "function return a dict with input_ids and labels"
    )


@dataclass(frozen=True)
class Words:
    """What counts as a word.

    Attributes:
        kind: what the labels mean.
        special: (s,) int64 ids that are no words.
        domain: (k,) int64 ascending ids that words are replaced by; None where each batch has its
            own.
    """

    kind: Kind
    special: Tensor
    domain: Tensor | None

    def index_of(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the index of each id in the domain, and whether it is in there; (n,) each.

        The index of an id that is not, one that no model has perhaps, is that of any other.
        """
        assert self.domain is not None
        index = torch.searchsorted(self.domain, ids).clamp_(max=len(self.domain) - 1)
        return index, self.domain[index] == ids


def words_of(
    root: nn.Module,
    *,
    kind: Kind | None,
    special_ids: Collection[int] | Any,
    keep_special: bool,
    domain: Tensor | None,
    per_batch: bool,
) -> Words:
    """Return the words of a model, from the arguments or else from the model itself.

    Args:
        root: the model.
        kind: what the labels mean; None: as the model says.
        special_ids: ids that are no words, or a tokenizer; None: those in the model's config.
        keep_special: False where special tokens are randomised like words.
        domain: (k,) ids of a public set; None for the vocabulary.
        per_batch: whether each batch's own ids are the domain.

    Raises:
        DefenseError: something is neither an argument nor known from the model, the domain is too
            small, or the tokenizer has ids that the model has not.
    """
    anatomy = None
    if kind is None or special_ids is None or domain is None:
        try:
            anatomy = find_anatomy(root, kind=kind)
        except AnatomyError as error:
            raise refused(
                f"the model could not be read ({error}). Give form=BatchForm(kind=...), "
                "special_ids= and domain= (the ids of a public set)"
            ) from error
    kind = kind or (anatomy.kind if anatomy else "causal")
    special = special_of(special_ids, kind, keep_special, anatomy)
    if not keep_special and kind not in ("causal", "classifier"):
        raise refused(
            f"keep_special=False would randomise tokens that a {kind} model needs: leave it out"
        )
    if per_batch:
        return Words(kind, special, None)
    weight = anatomy.parameter(EMBEDDING_WEIGHT) if anatomy else None
    size = None if weight is None else weight.shape[0]
    _check_tokenizer(special_ids, size)
    ids = torch.arange(size or 0) if domain is None else domain
    if keep_special:
        ids = ids[~torch.isin(ids, special)]
    if len(ids) < 2 or int(ids.max()) >= (size or math.inf):
        raise refused(
            f"domain has {len(ids)} ids that are not special, and the model {size or 'unknown'} "
            "words: give at least two of the model's"
        )
    return Words(kind, special, ids)


def _check_tokenizer(source: Any, size: int | None) -> None:
    known = len(source) if isinstance(source, Sized) and hasattr(source, "all_special_ids") else 0
    if size is not None and known > size:
        raise refused(
            f"the tokenizer has {known} ids and the model {size}: pass the model's own tokenizer "
            "as special_ids=, or resize the model's embedding"
        )


def special_of(
    source: Collection[int] | Any, kind: Kind, keep_special: bool, anatomy: Anatomy | None
) -> Tensor:
    """Return (s,) int64 ascending ids that are no words; ``source`` may be a tokenizer.

    Raises:
        DefenseError: there is no source, and the model's config does not name them.
    """
    if source is None:
        if kind in ("masked", "classifier") and keep_special:
            raise refused(
                f"special_ids must be given for a {kind} model: the tokenizer, or [] for none"
            )
        config = getattr(anatomy.model, "config", None) if anatomy else None
        values = [getattr(config, f"{name}_token_id", None) for name in _SPECIAL]
        lists = [value if isinstance(value, list | tuple) else [value] for value in values]
        ids = {int(i) for ids in lists for i in ids if i is not None and int(i) >= 0}
    elif hasattr(source, "all_special_ids"):
        # The unknown token stands for words, unless it is another special token too.
        unknown = getattr(source, "unk_token_id", None)
        named_ids = {getattr(source, f"{name}_token_id", None) for name in _SPECIAL}
        ids = {int(i) for i in source.all_special_ids if i != unknown or i in named_ids}
    else:
        ids = {int(i) for i in source}
    return torch.tensor(sorted(ids), dtype=torch.int64)


def public_set(domain: Iterable[int] | Tensor) -> Tensor:
    """Return the ids of a public set, (k,) int64 ascending.

    Raises:
        DefenseError: these are no distinct token ids.
    """
    ids = torch.as_tensor(domain if isinstance(domain, Tensor) else list(domain)).cpu()
    integers = ids.dim() == 1 and len(ids) and ids.dtype not in (torch.bool, *FLOATS)
    if not integers or int(ids.min()) < 0 or len(torch.unique(ids)) < len(ids):
        raise refused("domain must be 'vocabulary', 'batch' or a list of token ids, each once")
    return torch.sort(ids.long()).values


@dataclass(frozen=True, repr=False)
class _TrueText:
    """The true text of a batch, on the CPU.

    Attributes:
        ids: (B, T) int64; of an encoder-decoder both texts side by side.
        words: (B, T) bool, what is randomised.
        hidden: (B, T) bool, what is no word and overwritten.
        kind: what the labels mean.
        special: (s,) ids.
    """

    ids: Tensor
    words: Tensor
    hidden: Tensor
    kind: Kind
    special: Tensor

    def written(self, tokens: TokenBatch, replacements: Tensor) -> TokenBatch:
        """Return ``tokens`` with other words, and with their labels.

        Args:
            tokens: what the text was read from.
            replacements: (n,) the words in reading order.
        """
        new = self.ids.masked_fill(self.hidden, _HIDDEN)
        new[self.words] = replacements
        width = tokens.input_ids.shape[1]
        inputs, labels = new[:, :width], tokens.labels
        if self.kind == "masked":
            old = tokens.input_ids.to("cpu", torch.int64)
            inputs = torch.where(torch.isin(old, self.special), old, inputs)
        if self.kind == "classifier":
            labels = None
        if labels is not None:
            text = new[:, width:] if self.kind == "seq2seq" else new
            looked_at = labels.cpu() != batches.IGNORE_INDEX
            labels = torch.where(looked_at, text, batches.IGNORE_INDEX).to(labels)
        return replace(tokens, input_ids=inputs.to(tokens.input_ids), labels=labels)


def text_of(tokens: TokenBatch, words: Words, keep_special: bool) -> _TrueText:
    """Return the true text of a batch.

    Raises:
        DefenseError: labels of a causal model that are not its inputs, in two rows and in all.
    """
    ids = tokens.input_ids.to("cpu", torch.int64)
    visible = torch.ones_like(ids, dtype=torch.bool)
    if tokens.attention_mask is not None:
        visible = tokens.attention_mask.cpu() != 0
    if tokens.labels is not None and words.kind != "classifier":
        labels = tokens.labels.to("cpu", torch.int64)
        looked_at = labels != batches.IGNORE_INDEX
        if words.kind == "seq2seq":
            ids, visible = torch.cat([ids, labels], dim=1), torch.cat([visible, looked_at], dim=1)
        elif words.kind == "masked":
            ids, visible = torch.where(looked_at, labels, ids), visible | looked_at
        elif looked_at.any(1).sum() > 1 and bool(
            # In all rows with labels, two or more: one text beside sound ones stops nothing.
            ((looked_at & (labels != ids)).any(1) | ~looked_at.any(1)).all()
        ):
            raise refused(
                "the labels of a causal model must be its inputs, or -100. Return labels that are "
                "not shifted, and shift them in the loss"
            )
        else:
            visible = visible | looked_at
    special = words.special if keep_special else words.special[:0]
    if not keep_special:
        visible = torch.ones_like(visible)
    word = ~torch.isin(ids, special)
    return _TrueText(ids, word & visible, word & ~visible, words.kind, special)


@dataclass(frozen=True)
class BatchForm:
    """The form of the user's batches, for :class:`~lightning_fedleak.TokenLDP`.

    Attributes:
        kind: what the labels mean, see :data:`~lightning_fedleak.model.anatomy.Kind`; None: as the
            model says.
        public_fields: further fields that hold nothing private.

    Raises:
        DefenseError: an unknown kind.
    """

    kind: Kind | None = None
    public_fields: Collection[str] = ()

    def __post_init__(self) -> None:
        kinds = get_args(Kind)
        check_choice("TokenLDP: kind", self.kind, kinds, optional=True)

    def read(self, batch: Any, kind: Kind) -> TokenBatch:
        """Return ids, mask and labels of a batch.

        Raises:
            DefenseError: it cannot be read, or it holds fields that may be text.
        """
        try:
            tokens = batches.read_batch(batch, kind)
            allowed = {*PUBLIC_FIELDS, *self.public_fields}
            unknown = [name for name in batches.other_fields(batch) if name not in allowed]
        except batches.BatchError as error:
            raise unreadable(error) from error
        if unknown:
            raise refused(
                f"the batch holds the fields {', '.join(unknown)}, which would reach the model as "
                "they are. Take them out, or, if no text is in them, pass "
                f"form=BatchForm(public_fields={unknown})"
            )
        return tokens
