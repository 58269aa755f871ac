"""Find the words of a batch: which token ids may be replaced, and by which ids.

A word is a token id that is not special (such as padding or a separator). :func:`words_of` finds
the words of a model, :func:`text_of` the words of a batch, and ``replace_words`` of the result
returns the batch with the replacements. The draws themselves are in
:mod:`~lightning_fedleak.defenses.token_ldp.mechanisms`.
"""

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any, get_args

import torch
from torch import Tensor, nn

from lightning_fedleak.defenses.base import DefenseError, check_choice
from lightning_fedleak.model import batches
from lightning_fedleak.model.anatomy import (
    EMBEDDING_WEIGHT,
    Anatomy,
    AnatomyError,
    Kind,
    find_anatomy,
)
from lightning_fedleak.model.batches import TokenBatch

_SPECIAL = ("bos", "eos", "pad", "cls", "sep", "mask", "decoder_start")  # as in `pad_token_id`

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_HIDDEN_ID = 0  # replaces ids that both the attention mask and the loss ignore

PUBLIC_FIELDS = frozenset(
    ("position_ids", "token_type_ids", "special_tokens_mask", "length", "lengths")
)
"""Fields of a batch that hold positions or lengths, and no words: they stay unchanged."""


def refused(reason: str) -> DefenseError:
    """Return the error for a text that cannot be randomised. The message holds no text."""
    return DefenseError(f"TokenLDP: {reason}")


def unreadable(error: batches.BatchError) -> DefenseError:
    """Return the error for a batch that cannot be read or copied."""
    return refused(
        f"the batch cannot be read ({str(error).removesuffix(batches.ADAPTER)}) Let the collate "
        "function return a dict with input_ids and labels"
    )


@dataclass(frozen=True)
class Words:
    """The ids of a model that are words, and the ids that may replace them.

    Attributes:
        kind: The meaning of the labels, such as ``"causal"`` or ``"masked"``.
        special: (s,) int64, the special ids, which are not words.
        domain: (k,) int64 ascending, the ids that may replace a word; None if each batch has a
            different domain.
    """

    kind: Kind
    special: Tensor
    domain: Tensor | None

    def index_of(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the index of each id in the domain, and whether it is in the domain; (n,) each.

        The index of an id that is not in the domain is that of some other id.
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
    """Return the words of a model. What is not an argument is read from the model.

    Args:
        root: The model.
        kind: The meaning of the labels; None to find it in the model.
        special_ids: The ids that are not words, or a tokenizer; None for those in the model's
            config.
        keep_special: Whether special tokens stay. If not, they are randomised like words.
        domain: (k,) the ids of a public set; None for the vocabulary.
        per_batch: Whether the domain of each batch consists of its own ids.

    Raises:
        DefenseError: A fact is neither an argument nor found in the model, the domain has fewer
            than two ids or an id that the model does not have, the tokenizer has more ids than the
            model, or special tokens of a model that needs them would be randomised.
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
        raise refused(f"a {kind} model needs keep_special=True")
    if per_batch:
        return Words(kind, special, None)
    weight = anatomy.parameter(EMBEDDING_WEIGHT) if anatomy else None
    n_rows = None if weight is None else weight.shape[0]
    is_tokenizer = hasattr(special_ids, "all_special_ids") and hasattr(special_ids, "__len__")
    if is_tokenizer and len(special_ids) > (n_rows or math.inf):
        raise refused(f"the tokenizer has more ids than the model ({n_rows}): pass the model's own")
    ids = torch.arange(n_rows or 0) if domain is None else domain
    if keep_special:
        ids = ids[~torch.isin(ids, special)]
    if len(ids) < 2 or int(ids.max()) >= (n_rows or math.inf):
        raise refused("domain needs at least two ids of the model that are not special")
    return Words(kind, special, ids)


def special_of(
    source: Collection[int] | Any, kind: Kind, keep_special: bool, anatomy: Anatomy | None
) -> Tensor:
    """Return (s,) int64 ascending, the ids that are not words.

    Args:
        source: The ids, or a tokenizer that has them; None for those in the model's config.
        kind: The meaning of the labels.
        keep_special: Whether special tokens stay. If not, they are randomised like words.
        anatomy: The parts of the model; None if they were not found.

    Raises:
        DefenseError: There is no source, but this kind of model needs one: its config does not name
            all special ids.
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
        # The unknown token replaces words, unless it is also another special token.
        unknown = getattr(source, "unk_token_id", None)
        named_ids = {getattr(source, f"{name}_token_id", None) for name in _SPECIAL}
        ids = {int(i) for i in source.all_special_ids if i != unknown or i in named_ids}
    else:
        ids = {int(i) for i in source}
    return torch.tensor(sorted(ids), dtype=torch.int64)


def public_set(domain: Iterable[int] | Tensor) -> Tensor:
    """Return the ids of a public set, (k,) int64 ascending.

    Raises:
        DefenseError: The values are not token ids, or an id occurs twice.
    """
    ids = torch.as_tensor(domain if isinstance(domain, Tensor) else list(domain)).cpu()
    is_integer_list = ids.dim() == 1 and len(ids) and ids.dtype not in (torch.bool, *FLOATS)
    if not is_integer_list or int(ids.min()) < 0 or len(torch.unique(ids)) < len(ids):
        raise refused("domain must be 'vocabulary', 'batch' or a list of token ids, each once")
    return torch.sort(ids.long()).values


@dataclass(frozen=True, repr=False)
class _TrueText:
    """The true text of a batch of B rows, on the CPU.

    Attributes:
        ids: (B, T) int64, the token ids. In an encoder-decoder the T columns are those of the
            source text, followed by those of the target text.
        words: (B, T) bool, whether the id is a word, which is randomised.
        hidden: (B, T) bool, whether the id is not special, but masked: it is overwritten.
        kind: The meaning of the labels.
        special: (s,) int64, the special ids.
    """

    ids: Tensor
    words: Tensor
    hidden: Tensor
    kind: Kind
    special: Tensor

    def replace_words(self, tokens: TokenBatch, replacements: Tensor) -> TokenBatch:
        """Return the batch with the replacements of its words, in the inputs and the labels.

        Args:
            tokens: The batch from which the text was read.
            replacements: (n,) the replacement of each word, row after row.
        """
        new_ids = self.ids.masked_fill(self.hidden, _HIDDEN_ID)
        new_ids[self.words] = replacements
        width = tokens.input_ids.shape[1]
        inputs, labels = new_ids[:, :width], tokens.labels
        if self.kind == "masked":
            true_inputs = tokens.input_ids.to("cpu", torch.int64)
            inputs = torch.where(torch.isin(true_inputs, self.special), true_inputs, inputs)
        if self.kind == "classifier":
            labels = None
        if labels is not None:
            text = new_ids[:, width:] if self.kind == "seq2seq" else new_ids
            has_label = labels.cpu() != batches.IGNORE_INDEX
            labels = torch.where(has_label, text, batches.IGNORE_INDEX).to(labels)
        return replace(tokens, input_ids=inputs.to(tokens.input_ids), labels=labels)


def text_of(tokens: TokenBatch, words: Words, keep_special: bool) -> _TrueText:
    """Return the true text of a batch.

    Raises:
        DefenseError: The model is causal, at least two rows have labels, and the labels differ from
            the inputs in every row that has labels.
    """
    ids = tokens.input_ids.to("cpu", torch.int64)
    visible = torch.ones_like(ids, dtype=torch.bool)
    if tokens.attention_mask is not None:
        visible = tokens.attention_mask.cpu() != 0
    if tokens.labels is not None and words.kind != "classifier":
        labels = tokens.labels.to("cpu", torch.int64)
        has_label = labels != batches.IGNORE_INDEX
        if words.kind == "seq2seq":
            ids, visible = torch.cat([ids, labels], dim=1), torch.cat([visible, has_label], dim=1)
        elif words.kind == "masked":
            ids, visible = torch.where(has_label, labels, ids), visible | has_label
        elif has_label.any(1).sum() > 1 and bool(
            # Only if all of them differ, so that the content of one text cannot stop the run.
            ((has_label & (labels != ids)).any(1) | ~has_label.any(1)).all()
        ):
            raise refused("the labels of a causal model must be its inputs, not shifted, or -100")
        else:
            visible = visible | has_label
    special = words.special if keep_special else words.special[:0]
    if not keep_special:
        visible = torch.ones_like(visible)
    is_word = ~torch.isin(ids, special)
    return _TrueText(ids, is_word & visible, is_word & ~visible, words.kind, special)


@dataclass(frozen=True)
class BatchForm:
    """The form of the user's batches, for :class:`~lightning_fedleak.TokenLDP`.

    Attributes:
        kind: The meaning of the labels, see :data:`~lightning_fedleak.model.anatomy.Kind`; None to
            find it in the model.
        public_fields: The names of further fields that hold nothing private.

    Raises:
        DefenseError: The kind is unknown.
    """

    kind: Kind | None = None
    public_fields: Collection[str] = ()

    def __post_init__(self) -> None:
        check_choice("TokenLDP: kind", self.kind, get_args(Kind), optional=True)

    def read(self, batch: Any, kind: Kind) -> TokenBatch:
        """Return the ids, mask and labels of a batch.

        Raises:
            DefenseError: The batch cannot be read, or it holds fields that may be text.
        """
        try:
            tokens = batches.read_batch(batch, kind)
            allowed = {*PUBLIC_FIELDS, *self.public_fields}
            unknown = [name for name in batches.other_fields(batch) if name not in allowed]
        except batches.BatchError as error:
            raise unreadable(error) from error
        if unknown:
            raise refused(
                f"the model would get {', '.join(unknown)} unchanged: remove them from the batch, "
                f"or, if they hold no text, pass form=BatchForm(public_fields={unknown})"
            )
        return tokens
