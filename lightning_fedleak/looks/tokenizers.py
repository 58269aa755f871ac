"""Whose tokens: public text and tokenizers beside the model that is watched."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_fedleak.anatomy import Anatomy
from lightning_fedleak.anatomy.wrappers import matrix_shape, without_peft
from lightning_fedleak.attacks.base import Attack
from lightning_fedleak.attacks.public_text import PublicText
from lightning_fedleak.looks.channels.base import HEAD_CAPABILITIES

_SMALLEST_SHARE = 0.8  # tokens over rows of the embedding; lower: fewer warnings; not tuned
_LARGEST_SHARE = 1.05  # the same ratio from above; higher: fewer warnings; not tuned
_DIFFERING_MARKS = 2  # special ids that differ before a warning; higher: fewer warnings; not tuned


def check_tokens(
    attacks: Sequence[Attack], held_out: PublicText | None, tokenizer: Any, anatomy: Anatomy
) -> None:
    """Refuse public text of another vocabulary, and warn of another model's tokenizer.

    Args:
        attacks: their public text is checked.
        held_out: texts of games.
        tokenizer: decodes what is revealed.
        anatomy: the model.

    Raises:
        ValueError: see :func:`check_texts`.
    """
    check_texts(attacks, {"games=Games(held_out=)": held_out}, anatomy)
    texts = [held_out, *(getattr(attack, "public_text", None) for attack in attacks)]
    tokenizers = [text.tokenizer for text in texts if isinstance(text, PublicText)]
    warn_of_other_tokenizers([tokenizer, *tokenizers], anatomy)


def check_texts(
    attacks: Sequence[Attack], others: Mapping[str, PublicText | None], anatomy: Anatomy
) -> None:
    """Refuse public text that the model cannot read.

    Args:
        attacks: the attacks whose ``public_text`` is checked.
        others: further texts, by the name that a message uses.
        anatomy: the model.

    Raises:
        ValueError: names the tokenizer, the largest id and the embedding's rows; or says that an
            attack on the head needs texts of the target's vocabulary.
    """
    named = {name: text for name, text in others.items() if text is not None}
    for attack in attacks:
        text = getattr(attack, "public_text", None)
        if isinstance(text, PublicText):
            named[f"the public text of attack '{attack.name}'"] = text
            pairs = anatomy.target_rows is None or text.targets is not None
            if not pairs and HEAD_CAPABILITIES & attack.threat_model.needs:
                raise ValueError(
                    f"attack '{attack.name}' is calibrated on texts and what they map to, and in "
                    "this model source and target have vocabularies of their own: give "
                    "PublicText(texts, targets=...), token ids of each"
                )
    rows = matrix_shape(anatomy.embedding)
    for name, text in named.items():
        if rows is not None:
            _check_ids(name, text, text.sentences, f"'{anatomy.embedding_name}'", rows[0])
        if text.targets is not None and anatomy.kind == "seq2seq":
            _check_ids(name, text, text.targets, f"'{anatomy.head_name}'", anatomy.vocab_size)


def _check_ids(name: str, text: PublicText, ids: Sequence[Tensor], matrix: str, rows: int) -> None:
    largest = max((int(row.max()) for row in ids if len(row)), default=0)
    if largest < rows:
        return
    origin = "" if text.tokenizer is None else f" (by {_describe(text.tokenizer)})"
    raise ValueError(
        f"{name} holds token id {largest}{origin}, and the model's {matrix} has {rows} rows, for "
        f"ids 0 to {rows - 1}: another model's tokenizer made it. Give the tokenizer that "
        "this model was trained with; if tokens were added to it, call "
        "model.resize_token_embeddings(len(tokenizer)) first."
    )


def _describe(tokenizer: Any) -> str:
    """Return the name and size of a tokenizer."""
    name = str(getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__)
    size = _size_of(tokenizer)
    return f"'{name}'" if size is None else f"'{name}', of {size} tokens"


def _size_of(tokenizer: Any) -> int | None:
    try:
        return len(tokenizer)
    except TypeError:
        return None


def warn_of_other_tokenizers(tokenizers: Collection[Any], anatomy: Anatomy) -> None:
    """Warn of tokenizers that are hardly the model's own, though their ids fit.

    Such a tokenizer has a twentieth more tokens than the embedding has rows, or a fifth fewer:
    embeddings are padded, and a few tokens added, by less. Another sign is a different size
    together with two special ids that differ and none that agrees. A tokenizer of the same size is
    not recognised.
    """
    rows = matrix_shape(anatomy.embedding)
    if rows is None:
        return
    config = getattr(without_peft(anatomy.model), "config", None)
    for tokenizer in {id(t): t for t in tokenizers if t is not None}.values():
        size = _size_of(tokenizer)
        if size is None or size == rows[0]:
            continue
        why = f"the embedding '{anatomy.embedding_name}' has {rows[0]} rows"
        if _SMALLEST_SHARE * rows[0] <= size <= _LARGEST_SHARE * rows[0]:
            other = _other_marks(tokenizer, config, rows[0])
            if len(other) < _DIFFERING_MARKS:
                continue
            why += f" and the model's config has other ids for {' and '.join(other)}"
        rank_zero_warn(
            f"lightning-fedleak: the tokenizer {_describe(tokenizer)}, is hardly this model's: "
            f"{why}. Its ids fit, but stand for other words. Give the tokenizer that the "
            "model was trained with."
        )


def _other_marks(tokenizer: Any, config: Any, rows: int) -> list[str]:
    """Return the special tokens whose ids differ; none where one is the same."""
    marks = []
    for mark in ("bos", "eos", "pad"):
        token_id = getattr(tokenizer, f"{mark}_token_id", None)
        config_id = getattr(config, f"{mark}_token_id", None)
        ids = [
            i
            for i in (config_id if isinstance(config_id, list) else [config_id])
            if isinstance(i, int)
        ]
        if not isinstance(token_id, int) or not ids or max(ids) >= rows:
            continue
        if token_id in ids:
            return []
        marks.append(mark)
    return marks
