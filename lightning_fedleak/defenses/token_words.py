"""What counts as a word: a model's special tokens, and the domain that words are replaced by."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fedleak.anatomy import EMBEDDING_WEIGHT, Anatomy, AnatomyError, Kind, find_anatomy

_SPECIAL = ("bos", "eos", "pad", "cls", "sep", "mask", "decoder_start")


class TextError(ValueError):
    """The text cannot be randomised as it is; says what to change, never contents."""


@dataclass(frozen=True)
class Words:
    """What counts as a word.

    Attributes:
        kind: what the labels mean.
        special: (s,) int64 ids that are no words.
        domain: (k,) int64 ascending ids that words are replaced by; None where each batch has its
            own.
        size: of the vocabulary, None where it is unknown.
    """

    kind: Kind
    special: Tensor
    domain: Tensor | None
    size: int | None
    _table: Tensor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        table = torch.full((0,), -1)
        if self.domain is not None:
            table = torch.full((int(self.domain.max()) + 1,), -1)
            table[self.domain] = torch.arange(len(self.domain))
        object.__setattr__(self, "_table", table)

    def index_of(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Index of each id in the domain, and whether it is in there; (n,) each.

        Raises:
            TextError: an id that the model does not have.
        """
        low, high = (int(ids.min()), int(ids.max())) if len(ids) else (0, -1)
        if self.size is not None and not 0 <= low <= high + 1 <= self.size:
            raise TextError(
                f"the batch holds ids outside of the model's {self.size} words: it was made with "
                "another model's tokenizer"
            )
        if low >= 0 and high < len(self._table):
            index = self._table[ids]
        else:
            near = (ids >= 0) & (ids < len(self._table))
            index = torch.where(near, self._table[torch.where(near, ids, 0)], -1)
        return index, index >= 0


def words_of(
    root: nn.Module,
    *,
    kind: Kind | None,
    special_ids: Collection[int] | Any,
    keep_special: bool,
    domain: Tensor | None,
    per_batch: bool,
) -> Words:
    """Words of a model, from what is given and, where it is not, from the model itself.

    Args:
        root: the model.
        kind: what the labels mean; None: as the model says.
        special_ids: ids that are no words, or a tokenizer; None: those in the model's config.
        keep_special: False where special tokens are randomised like words.
        domain: (k,) ids of a public set; None for the vocabulary.
        per_batch: whether each batch's own ids are the domain.

    Raises:
        TextError: something cannot be told and is not given, or the domain is too small.
    """
    anatomy = None
    if kind is None or special_ids is None or domain is None:
        try:
            anatomy = find_anatomy(root, kind=kind)
        except AnatomyError as error:
            raise TextError(
                f"the model could not be read ({error}). Give kind=, special_ids= and domain= "
                "(the ids of a public set, range(vocabulary size) say)"
            ) from error
    kind = kind or (anatomy.kind if anatomy else "causal")
    special = special_of(special_ids, kind, keep_special, anatomy)
    if not keep_special and kind not in ("causal", "classifier"):
        raise TextError(
            f"keep_special=False would randomise mask or start tokens that a {kind} model "
            "needs: leave it out"
        )
    if per_batch:
        return Words(kind, special, None, None)
    weight = anatomy.parameter(EMBEDDING_WEIGHT) if anatomy else None
    size = None if weight is None else weight.shape[0]
    if domain is not None:
        ids = domain
    elif size is not None:
        ids = torch.arange(size)
    else:
        raise TextError(
            "the size of the vocabulary cannot be read off the model: give domain=range(size)"
        )
    if size is not None and int(ids.max()) >= size:
        raise TextError(
            f"domain holds the id {int(ids.max())}, but the model has {size} words: give ids "
            f"from 0 to {size - 1}"
        )
    if keep_special:
        ids = ids[~torch.isin(ids, special)]
    if len(ids) < 2:
        raise TextError(
            f"domain holds {len(ids)} ids that are not special and needs at least 2: give more"
        )
    return Words(kind, special, ids, size)


def special_of(
    given: Collection[int] | Any, kind: Kind, keep_special: bool, anatomy: Anatomy | None
) -> Tensor:
    """(s,) int64 ascending ids that are no words; ``given`` may be a tokenizer.

    Raises:
        TextError: none are given, and the model's config does not tell them.
    """
    if given is None:
        if kind in ("masked", "classifier") and keep_special:
            raise TextError(
                f"special_ids must be given for a {kind} model, whose config does not tell "
                "them: pass the tokenizer, or [] where there are none"
            )
        found = special_of_config(anatomy)
    elif hasattr(given, "all_special_ids"):
        found = special_of_tokenizer(given)
    else:
        found = {int(i) for i in given}
    return torch.tensor(sorted(found), dtype=torch.int64)


def public_set(domain: Iterable[int] | Tensor) -> Tensor:
    """(k,) int64 ascending.

    Raises:
        TextError: these are no distinct token ids.
    """
    ids = torch.as_tensor(domain if isinstance(domain, Tensor) else list(domain)).cpu()
    if ids.dim() != 1 or not len(ids) or ids.is_floating_point() or ids.dtype == torch.bool:
        raise TextError("domain must be 'vocabulary', 'batch' or a list of token ids")
    if int(ids.min()) < 0 or len(torch.unique(ids)) < len(ids):
        raise TextError("domain must hold token ids of at least 0, each once")
    return torch.sort(ids.long()).values


def special_of_config(anatomy: Anatomy | None) -> set[int]:
    """Ids that a Hugging Face config names."""
    config = getattr(anatomy.model, "config", None) if anatomy else None
    found: set[int] = set()
    for name in _SPECIAL:
        value = getattr(config, f"{name}_token_id", None)
        found.update(value if isinstance(value, list | tuple) else [] if value is None else [value])
    return {int(i) for i in found if int(i) >= 0}


def special_of_tokenizer(tokenizer: Any) -> set[int]:
    """A tokenizer's special ids without the unknown one, which stands for words."""
    unknown = getattr(tokenizer, "unk_token_id", None)
    others = {getattr(tokenizer, f"{name}_token_id", None) for name in _SPECIAL}
    return {int(i) for i in tokenizer.all_special_ids if i != unknown or i in others}


__all__ = [
    "TextError",
    "Words",
    "public_set",
    "special_of",
    "special_of_config",
    "special_of_tokenizer",
    "words_of",
]
