"""A data set in which each canary is included at random, independently of the others.

A canary is a text that is planted in the training data to measure what training reveals of it. A
one-run audit (Steinke, Nasr and Jagielski, arXiv 2305.08846) trains once, on data that contain
each of G canaries independently with probability 1/2. An attack guesses which canaries are
included, and the number of correct guesses gives a lower bound on epsilon.
"""

from __future__ import annotations

import copy
import operator
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, SupportsIndex

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

from lightning_fedleak.attacks import Query
from lightning_fedleak.evaluation.canaries.items import digest_of, token_ids_of
from lightning_fedleak.evaluation.canaries.record import InclusionRecord, draw_or_load


class CanarySet:
    """Canaries with their tokens, and the secret of which are in the data.

    Args:
        token_ids: The token ids of each canary, (L_i,).
        record: The record of the inclusion bits.

    Attributes:
        token_ids: The token ids of each canary, included or not.
        record: The secret record of the inclusion bits.
    """

    def __init__(self, token_ids: Sequence[Tensor], record: InclusionRecord) -> None:
        self.token_ids = tuple(token_ids)
        self.record = record

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def included(self) -> Tensor:
        """Return (G,) bool, whether each canary is in the data: for metrics, never attacks."""
        return torch.tensor(self.record.included)

    @property
    def commitment(self) -> str:
        """Return a hash that fixes canaries and inclusion bits, and reveals none of them."""
        return self.record.commitment

    def queries(self) -> Query:
        """Return all canaries, included or not, as the targets of a membership game.

        Returns:
            ids (G, longest) padded with 0 on the right, and their mask; a new tensor each time.
        """
        ids = nn.utils.rnn.pad_sequence(list(self.token_ids), batch_first=True)
        lengths = torch.tensor([len(row) for row in self.token_ids])
        mask = torch.arange(ids.shape[1]) < lengths[:, None]
        return Query(input_ids=ids, attention_mask=mask.to(torch.int64))

    def state_dict(self) -> dict[str, str]:
        """Return the commitment, which reveals no inclusion bit, for a checkpoint."""
        return {"commitment": self.commitment}

    def load_state_dict(self, state: Mapping[str, str]) -> None:
        """Check that the canaries are those of the checkpoint that is resumed.

        Raises:
            ValueError: The checkpoint has other canaries, or another seed, probability or times.
        """
        if state.get("commitment") != self.commitment:
            raise ValueError(
                "the checkpoint is of other canaries or settings: resume with the same arguments "
                "of with_canaries(), and seed or record file"
            )


class CanaryDataset(Dataset[Any]):
    """A data set with canaries, as :func:`with_canaries` builds it.

    Attributes:
        dataset: The user's data, unchanged.
        canaries: The tokens of all canaries, and which are included.
    """

    def __init__(self, dataset: Any, examples: Sequence[Any], canaries: CanarySet) -> None:
        self.dataset = dataset
        self.canaries = canaries
        self._examples = examples
        # Pairs of a place in this data set, in ascending order, and the index of its canary.
        placed = canaries.record.places(len(dataset))
        self._places = [place for place, _ in placed]
        self._canary_indices = [i for _, i in placed]

    @property
    def public_length(self) -> int:
        """Return the expected length, from which DP-SGD computes its sampling rate.

        It depends on no inclusion bit.
        """
        record = self.canaries.record
        length: int = getattr(self.dataset, "public_length", len(self.dataset))
        return length + round(record.probability * sum(record.repeats))

    def __len__(self) -> int:
        return len(self.dataset) + len(self._places)

    def __getitem__(self, index: SupportsIndex) -> Any:
        place, length = operator.index(index), len(self)
        if not -length <= place < length:
            raise IndexError(f"index {place} is out of range for {length} items")
        place %= length
        rank = bisect_left(self._places, place)
        if rank < len(self._places) and self._places[rank] == place:
            # A copy, so that a collate function or a transform cannot change the canary.
            return copy.deepcopy(self._examples[self._canary_indices[rank]])
        return self.dataset[place - rank]


def with_canaries(
    dataset: Any,
    canaries: Sequence[Any],
    seed: int | None = None,
    *,
    probability: float = 0.5,
    times: Sequence[int] = (1,),
    record: str | Path | None = None,
) -> CanaryDataset:
    """Return a data set that includes each canary independently at random.

    An included canary is at random positions, which are the same in every epoch and process. Use
    the result in place of the data set (with any sampler, workers, Lightning)::

        train = with_canaries(train, canaries, record="secret/inclusion.json")
        loader = DataLoader(train, batch_size=8, shuffle=True)
        train.canaries.queries(), train.canaries.included  # for an audit

    The data must not contain the canaries already. The length of the data reveals the number of
    planted copies (with ``times=(1,)`` the number of included canaries), but not of which canaries.
    Nothing replaces a canary that is not included: this is the add/remove relation of DP-SGD's
    usual accountants.

    Examples:
        >>> import torch
        >>> from lightning_fedleak import with_canaries
        >>> texts = [torch.tensor([n, n + 1, n + 2]) for n in range(10)]
        >>> canaries = [torch.tensor([90, 91, 92]), torch.tensor([95, 96, 97])]
        >>> train = with_canaries(texts, canaries, seed=1)
        >>> len(train), train.canaries.included
        (11, tensor([False,  True]))

    Args:
        dataset: any data set with a length and items by index.
        canaries: examples of the same form as the data's items: token ids, masks, labels.
        seed: at least 0, for reproducible experiments. The same seed and canaries always give the
            same inclusion bits, so whoever guesses the seed knows them. None draws from the
            operating system; ``record`` is then needed to resume, and for several processes.
        probability: The probability of inclusion.
        times: The number of repetitions of an included canary. Of several numbers, as in
            ``times=(1, 4, 16)``, one is drawn for each canary, independently of its inclusion.
        record: file, of mode 0600, that stores which canaries are included. If it exists, its
            inclusion bits are used, and canaries and settings must be the same.
            All processes of a run must see the same file.

    Raises:
        ValueError: The data set has no length or index; there are no canaries, or two have the same
            tokens; an argument is out of range; several processes have neither seed nor record; or
            the record is of other canaries or settings.
        PermissionError: Other users may read the record.
    """
    check_dataset(dataset, "canaries need")
    examples = [] if isinstance(canaries, str | bytes | Mapping) else list(canaries)
    if not examples:
        raise ValueError("canaries must be a sequence of at least one example")
    names = [f"canaries[{i}]" for i in range(len(examples))]
    ids = [token_ids_of(example, name) for example, name in zip(examples, names, strict=True)]
    if len({tuple(row.tolist()) for row in ids}) < len(ids):
        raise ValueError("two of the canaries have the same tokens: give each once")
    digests = tuple(digest_of(e, n) for e, n in zip(examples, names, strict=True))

    def draw(key: bytes) -> InclusionRecord:
        return InclusionRecord(key, digests, probability, tuple(times))

    inclusion = draw_or_load(InclusionRecord, draw, seed, record, action="flip coins")
    return CanaryDataset(dataset, examples, CanarySet(ids, inclusion))


def check_dataset(dataset: Any, need: str) -> None:
    """Raise an error for data without a length and items by index.

    Args:
        dataset: The data.
        need: The start of the message: what needs such data.

    Raises:
        ValueError: The data are a stream.
    """
    sized = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    if isinstance(dataset, IterableDataset) or not sized:
        raise ValueError(f"{need} a data set with a length and items by index")
