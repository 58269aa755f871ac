"""Read single rows of the training data, and check that a DataLoader allows it.

Attacks on the trained weights compare texts that were trained on with texts that were not. These
texts, the *pool* (:mod:`lightning_fedleak.engine.channels.released.pool`), are drawn from the rows
of the training data before the first step. To *read* a row means to pass it alone through the
loader's collate function. Its texts must be recognised later in the batches of training, so each
row is read twice, and must give the same tokens both times.
"""

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
from lightning_fedleak.model.model_state import preserve_process
from lightning_fedleak.model.pairs import PairBatch, RatedBatch, read_pairs
from lightning_fedleak.model.taps import Text, texts_in


class UnplayableGame(ValueError):
    """A test of the trained weights cannot run here; the message says what to change."""


def check_loader(loader: Any) -> None:
    """Check that single rows of the training data can be read.

    Raises:
        UnplayableGame: The loader is missing, is no DataLoader, or reads a stream.
    """
    dataset = loader.dataset if isinstance(loader, DataLoader) else None
    has_rows = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    if isinstance(dataset, IterableDataset) or not has_rows:
        raise UnplayableGame(
            "rows of the training data are drawn and read again: give one torch DataLoader "
            "(loader=) of a map-style data set, not a stream, and leave_out some rows"
        )


def why_not_shuffled(loader: DataLoader[Any]) -> str:
    """Return why rows that the first epoch has not reached are no random choice; empty if they are.

    They are if it takes every row once in random order, or draws batches by Poisson sampling.
    """
    batches = loader.batch_sampler
    if isinstance(batches, PoissonBatchSampler):
        return ""
    if _is_accelerate(batches, "BatchSamplerShard"):  # it gives a process every n-th batch
        batches = batches.batch_sampler  # type: ignore[union-attr]
    # Accelerate makes loaders from a batch sampler: loader.sampler is then a default.
    sampler = getattr(batches, "sampler", loader.sampler)
    is_plain = type(batches) is torch.utils.data.BatchSampler  # others may choose rows by content
    length = len(loader.dataset)  # type: ignore[arg-type]
    shuffled = (
        isinstance(sampler, RandomSampler)
        and (type(sampler) is RandomSampler or _is_accelerate(sampler, "SeedableRandomSampler"))
        and not sampler.replacement
        and sampler.num_samples == length
    ) or (isinstance(sampler, DistributedSampler) and sampler.shuffle)
    if is_plain and shuffled:
        return ""
    name = type(sampler if is_plain else batches).__name__
    return f"a {name} does not take the rows in an order known to be random, and none is held out"


def _is_accelerate(thing: object, name: str) -> bool:
    """Return whether an object is of this class of Accelerate, which need not be installed."""
    return (type(thing).__module__, type(thing).__name__) == ("accelerate.data_loader", name)


def find_left_out(dataset: Any) -> Any:
    """Return the rows that ``leave_out`` held out of a data set, or of one that it wraps, or None.

    Raises:
        UnplayableGame: ``with_entities`` planted values after rows were held out, so that only rows
            that are trained on may have them.
    """
    while dataset is not None:
        if isinstance(dataset, TrainingRows):
            return dataset.others
        if isinstance(dataset, EntityDataset) and find_left_out(dataset.dataset) is not None:
            raise UnplayableGame(
                "with_entities changed no row that is left out: plant before leave_out, times=(1,)"
            )
        dataset = getattr(dataset, "dataset", None)
    return None


def find_mask(loader: Any, tokenizers: Sequence[Any]) -> tuple[int, frozenset[int]]:
    """Return the mask token's id, and the ids of tokens that are never masked.

    Args:
        loader: The loader of the training data, whose collator may have the tokenizer.
        tokenizers: The tokenizers of the run; some may be None.

    Raises:
        UnplayableGame: No tokenizer has a mask token.
    """
    collate: Any = getattr(loader, "collate_fn", None)
    while hasattr(collate, "data_collator"):  # transformers wraps the user's collator
        collate = collate.data_collator
    candidates = [*tokenizers, getattr(collate, "tokenizer", None)]
    masks = (getattr(tokenizer, "mask_token_id", None) for tokenizer in candidates)
    mask = next((token for token in masks if token is not None), None)
    if mask is None:
        raise UnplayableGame(
            "no tokenizer with a mask token is known: pass "
            "settings=WatchSettings(tokenizer=tokenizer)"
        )
    special = (getattr(tokenizer, "all_special_ids", ()) for tokenizer in candidates)
    return mask, frozenset().union(*special)


def read_tokens(batch: Any, kind: Kind) -> TokenBatch:
    """Return the tokens of a batch; a :class:`PairBatch` if it has pairs of answers (as for DPO).

    Raises:
        BatchError: The form of the batch is unknown.
    """
    return read_pairs(batch, kind) or read_batch(batch, kind)


def read_twice(
    loader: DataLoader[Any], dataset: Any, row: int, read: Callable[[Any], TokenBatch]
) -> list[Text]:
    """Return the texts of a row, read twice.

    Raises:
        UnplayableGame: The two readings differ, or the row cannot be read.
    """
    first, second = (read_row(loader, dataset, row, read) for _ in range(2))
    if [text.content for text in first] != [text.content for text in second]:
        raise UnplayableGame(
            "rows do not read the same twice (augmentation, random cuts, masks without labels), so "
            "that none is recognised when it is trained on: fix each row's form beforehand"
        )
    return first


def read_row(
    loader: DataLoader[Any], dataset: Any, row: int, read: Callable[[Any], TokenBatch]
) -> list[Text]:
    """Return the texts of a batch that holds only this row.

    Raises:
        UnplayableGame: The row cannot be read, or its likelihood does not show membership.
    """
    item = _copy_item(dataset[row])  # collate functions may change their arguments
    try:
        batch = loader.collate_fn([item])
        segments = batch.get("token_type_ids") if isinstance(batch, Mapping) else None
        tokens = read(batch)
        texts = texts_in(tokens)
    except (BatchError, ValueError) as error:
        raise UnplayableGame(f"a row of the training data cannot be read alone: {error}") from error
    if isinstance(segments, Tensor) and bool(segments.any()):
        raise UnplayableGame(
            "rows have token_type_ids that are not zero (pairs of texts), and the model is queried "
            "without them: join the pair into one text, with token_type_ids of zeros"
        )
    if tokens.preferences and not isinstance(tokens, PairBatch | RatedBatch):
        raise UnplayableGame(
            "the loss prefers chosen texts to rejected ones, which the weights learn to find "
            "unlikely, so that likelihoods do not show what was trained on: let batch_adapter= "
            "return pairs as a PairBatch, and single answers as a RatedBatch"
        )
    return texts


def read_contents(
    loader: DataLoader[Any], dataset: Any, read: Callable[[Any], TokenBatch]
) -> set[bytes]:
    """Return the contents of the texts of a data set, read as the training data is."""
    with preserve_process():
        rows = [read_row(loader, dataset, row, read) for row in range(len(dataset))]
    return {text.content for texts in rows for text in texts}


def _copy_item(item: Any) -> Any:
    """Return a deep copy; a tensor's copy has only its own entries, not all of its storage."""
    if isinstance(item, Tensor):
        return item.clone()
    if isinstance(item, dict):
        return {name: _copy_item(value) for name, value in item.items()}
    if type(item) in (list, tuple):
        return type(item)(_copy_item(value) for value in item)
    return copy.deepcopy(item)
