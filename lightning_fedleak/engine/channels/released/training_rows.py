"""Rows of the training data, read again one by one, and whether that is possible."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, RandomSampler
from torch.utils.data.distributed import DistributedSampler

from lightning_fedleak.defenses.dpsgd.poisson import PoissonBatchSampler
from lightning_fedleak.evaluation.canaries import EntityDataset, TrainingRows
from lightning_fedleak.model.anatomy import Kind
from lightning_fedleak.model.batches import BatchError, TokenBatch, read_batch
from lightning_fedleak.model.pairs import PairBatch, RatedBatch, read_pairs
from lightning_fedleak.model.taps import Text, texts_in


class NoNonMembers(ValueError):
    """Nobody can be compared; the message says which argument would change that."""


def check_loader(loader: Any) -> None:
    """Raise an error unless rows of the training data can be read one by one.

    Raises:
        NoNonMembers: says what the data are.
    """
    if loader is None:
        raise NoNonMembers("no training data are named to read rows of again: pass loader=")
    if not isinstance(loader, DataLoader):
        raise NoNonMembers(
            f"the training data come from a {type(loader).__name__}, and one torch DataLoader is "
            "needed to read rows again"
        )
    dataset = loader.dataset
    sized = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    if isinstance(dataset, IterableDataset) or not sized:
        raise NoNonMembers(
            "the training data are read as a stream, whose rows cannot be drawn ahead: load them "
            "into a map-style data set, and leave_out some"
        )


def check_shuffle(loader: DataLoader[Any]) -> None:
    """Raise an error unless the first epoch takes every row once, in random order.

    Raises:
        NoNonMembers: names the sampler.
    """
    batches = loader.batch_sampler
    if isinstance(batches, PoissonBatchSampler):
        return
    if _is_accelerate(batches, "BatchSamplerShard"):  # of which a process takes each n-th batch
        batches = batches.batch_sampler  # type: ignore[union-attr]
    # A loader that was made of a batch sampler, as Accelerate makes it, has no such sampler itself.
    sampler = getattr(batches, "sampler", loader.sampler)
    plain = type(batches) is torch.utils.data.BatchSampler
    length = len(loader.dataset)  # type: ignore[arg-type]
    shuffled = (
        isinstance(sampler, RandomSampler)
        and (type(sampler) is RandomSampler or _is_accelerate(sampler, "SeedableRandomSampler"))
        and not sampler.replacement
        and sampler.num_samples == length
    ) or (isinstance(sampler, DistributedSampler) and sampler.shuffle)
    if not (plain and shuffled):
        name = type(sampler if plain else batches).__name__
        raise NoNonMembers(
            f"a {name} does not take the rows in an order that chance alone chose, so that rows "
            "not yet seen may differ from the rest: use DataLoader(shuffle=True), or add leave_out"
        )


def _is_accelerate(thing: object, name: str) -> bool:
    """Return whether an object is of a class of Accelerate, which is not imported for that."""
    return (type(thing).__module__, type(thing).__name__) == ("accelerate.data_loader", name)


def find_left_out(dataset: Any) -> Any:
    """Return the rows that were held out of a data set, or of one that it wraps; None for none.

    Raises:
        NoNonMembers: values were planted in the others of these rows alone.
    """
    while dataset is not None:
        if isinstance(dataset, TrainingRows):
            return dataset.others
        if isinstance(dataset, EntityDataset) and find_left_out(dataset.dataset) is not None:
            raise NoNonMembers(
                "with_entities changed no row that is left out: plant before leave_out, times=(1,)"
            )
        dataset = getattr(dataset, "dataset", None)
    return None


def find_mask(loader: Any, tokenizers: Sequence[Any]) -> tuple[int, frozenset[int]]:
    """Return the token that a masked model reads for others, and those that are never masked.

    Args:
        loader: of the training data, whose collator may have the tokenizer.
        tokenizers: of the run; some may be None.

    Raises:
        NoNonMembers: no tokenizer says it.
    """
    collate: Any = getattr(loader, "collate_fn", None)
    while hasattr(collate, "data_collator"):  # of transformers, around the user's own
        collate = collate.data_collator
    candidates = [*tokenizers, getattr(collate, "tokenizer", None)]
    masks = (getattr(tokenizer, "mask_token_id", None) for tokenizer in candidates)
    mask = next((token for token in masks if token is not None), None)
    if mask is None:
        raise NoNonMembers(
            "which token masks the others is not known: pass the tokenizer, by "
            "settings=WatchSettings(tokenizer=tokenizer)"
        )
    special = (getattr(tokenizer, "all_special_ids", ()) for tokenizer in candidates)
    return mask, frozenset().union(*special)


def read_tokens(batch: Any, kind: Kind) -> TokenBatch:
    """Return a batch's tokens: pairs where it has their form, else what all channels read.

    Raises:
        BatchError: the form is not known.
    """
    return read_pairs(batch, kind) or read_batch(batch, kind)


def read_twice(
    loader: DataLoader[Any], dataset: Any, row: int, read: Callable[[Any], TokenBatch]
) -> list[Text]:
    """Return the texts of a row, read twice.

    Raises:
        NoNonMembers: it does not read the same twice, or cannot be read.
    """
    first, second = (read_row(loader, dataset, row, read) for _ in range(2))
    if [text.content for text in first] != [text.content for text in second]:
        raise NoNonMembers(
            "rows do not read the same twice (augmentation, random cuts, masks without labels), so "
            "that none is recognised when it is trained on: fix each row's form beforehand"
        )
    return first


def read_row(
    loader: DataLoader[Any], dataset: Any, row: int, read: Callable[[Any], TokenBatch]
) -> list[Text]:
    """Return the texts of a row, as the collate function makes it alone.

    Raises:
        NoNonMembers: it cannot be read, or has a form that the model is not asked about.
    """
    item = _copied(dataset[row])  # collate functions may change what they get
    try:
        batch = loader.collate_fn([item])
        segments = batch.get("token_type_ids") if isinstance(batch, Mapping) else None
        tokens = read(batch)
        texts = texts_in(tokens)
    except (BatchError, ValueError) as error:
        raise NoNonMembers(f"a row of the training data cannot be read alone: {error}") from error
    if isinstance(segments, Tensor) and bool(segments.any()):
        raise NoNonMembers(
            "rows have token_type_ids that are not zero (pairs of texts), and the model is asked "
            "about texts without them: join the pair into one text, with token_type_ids of zeros"
        )
    if tokens.preferences and not isinstance(tokens, PairBatch | RatedBatch):
        raise NoNonMembers(
            "the loss prefers chosen texts to rejected ones, which the weights learn to find "
            "unlikely, so that likelihoods do not show what was trained on; pairs are asked about "
            "where a batch_adapter= returns them as a PairBatch, and single answers as a RatedBatch"
        )
    return texts


def _copied(item: Any) -> Any:
    """Return a copy of an item; of a tensor its own entries, and not all that it is a view of."""
    if isinstance(item, Tensor):
        return item.clone()
    if isinstance(item, dict):
        return {name: _copied(value) for name, value in item.items()}
    if type(item) in (list, tuple):
        return type(item)(_copied(value) for value in item)
    return copy.deepcopy(item)
