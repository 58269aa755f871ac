"""Canaries, texts to plant in training data, and the data set in which each is included at random.

A canary measures what training reveals of it. A one-run audit (Steinke, Nasr and Jagielski, arXiv
2305.08846) trains once, on data that contain each of G canaries independently with probability 1/2.
An attack guesses which canaries are included, and the number of correct guesses gives a lower bound
on epsilon. docs/proof.md compares how much of epsilon different canaries show.

*New-token canaries* (Panda et al. 2025, arXiv 2503.06808, and its published code) each have a token
that no other text has, with a row of its own in the embedding matrix. In the paper the model has to
predict this token at the end of the text. Here the text also begins with it, and the token's row
may start with a small norm (not in the paper). The normalization layer in the first block makes the
gradient of a small row large. So if DP-SGD clips each text's gradient, nearly all of the clipped
gradient is in this row.

*Sampled canaries* are written by the model, as in arXiv 2606.10481. For a release of generated
texts, arXiv 2502.14921 uses texts with a likely prefix and an unlikely end.

A *reference model* is trained like the audited model, but on other rows (:class:`ReferenceRows`).
How likely it finds a text shows how likely the text is without having been trained on. A *member*
is a row that the audited model is trained on. A reference must not be trained on a row that it
scores, and its training rows must not depend on membership. A reference that was trained on exactly
the non-members would report members even for a model that was trained on no row.
"""

import copy
import hashlib
import numbers
import operator
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, SupportsIndex

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

from lightning_fedleak.attacks import Query
from lightning_fedleak.evaluation.canaries.record import InclusionRecord, draw_or_load
from lightning_fedleak.model.anatomy import (
    EMBEDDING_WEIGHT,
    HEAD_WEIGHT,
    Anatomy,
    find_anatomy,
    special_ids,
    without_peft,
)
from lightning_fedleak.model.model_runs import context_length, undisturbed
from lightning_fedleak.validate import check_integer, check_number


def token_ids_of(item: Any, name: str) -> Tensor:
    """Return the tokens of one item without padding, (L,) int64.

    They are the ``input_ids`` of a mapping (with its ``attention_mask``), the first element of a
    tuple, or the item itself if it is a row of integers.

    Args:
        item: The item.
        name: The name of the item in messages.

    Raises:
        ValueError: The item has no token ids, or only padding.
    """
    mask = None
    if isinstance(item, Mapping):
        ids, mask = item.get("input_ids"), item.get("attention_mask")
    else:
        ids = item[0] if isinstance(item, tuple) and item else item
    row = _token_row(ids, name)
    if mask is not None:
        row = row[_token_row(mask, f"{name}['attention_mask']") != 0]
    if not row.numel():
        raise ValueError(f"{name} holds no token")
    return row


def digest_of(item: Any, name: str) -> bytes:
    """Return the SHA-256 of an item, the same in every process and version: 32 bytes.

    Raises:
        ValueError: The item holds anything but tensors, arrays, numbers, strings, None, and
            mappings and sequences of them.
    """
    return hashlib.sha256(_encoded(item, name)).digest()


def _token_row(ids: Any, name: str) -> Tensor:
    """Return token ids as (L,) int64 on the CPU, or raise ``ValueError``."""
    try:
        row = torch.as_tensor(ids)
    except (TypeError, ValueError, RuntimeError):
        row = torch.empty(())
    row = row[0] if row.dim() == 2 and len(row) == 1 else row
    if row.dim() != 1 or row.is_floating_point() or row.is_complex():
        raise ValueError(f"{name} must be a row of token ids, or hold one as input_ids or first")
    return row.detach().cpu().to(torch.int64)


def _encoded(value: Any, name: str) -> bytes:
    """Return a value as bytes with its type and length, so that no two values have the same."""
    if isinstance(value, Tensor):
        raw = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return _tagged(f"tensor {value.dtype} {tuple(value.shape)}", raw)
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        return _tagged(f"array {value.dtype.str} {value.shape}", value.tobytes())
    if value is None or isinstance(value, bool):
        return _tagged("constant", repr(value).encode())
    if isinstance(value, str):
        return _tagged("str", value.encode())
    if isinstance(value, bytes):
        return _tagged("bytes", value)
    if isinstance(value, numbers.Integral):
        return _tagged("int", str(int(value)).encode())
    if isinstance(value, numbers.Real):
        return _tagged("float", repr(float(value)).encode())
    if isinstance(value, Mapping):
        parts = [
            _encoded(str(key), name) + _encoded(value[key], f"{name}[{key!r}]")
            for key in sorted(value, key=str)
        ]
        return _tagged(f"mapping {len(parts)}", b"".join(parts))
    if isinstance(value, Sequence):
        parts = [_encoded(part, f"{name}[{i}]") for i, part in enumerate(value)]
        return _tagged(f"sequence {len(parts)}", b"".join(parts))
    raise ValueError(
        f"{name} is a {type(value).__name__}: give tensors, arrays, numbers, strings, or mappings "
        "or sequences of them"
    )


def _tagged(tag: str, content: bytes) -> bytes:
    """Return the content after a tag and the content's length."""
    return f"{tag} {len(content)}:".encode() + content


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


def new_token_canaries(
    model: nn.Module, count: int, *, length: int = 3, row_norm: float = 1.0, seed: int = 0
) -> list[Tensor]:
    """Return texts that begin and end with a token that no other text has.

    ::

        texts = new_token_canaries(model, 200)          # adds 200 rows to the vocabulary
        train = with_canaries(train, texts, record="secret/inclusion.json")
        scorer = CanaryScorer(train.canaries)

    The model is changed: it has ``count`` more tokens. Use it for an audit only. Between the two
    occurrences of its new token, a text has random ordinary tokens. An audit scores the loss of the
    texts.

    Examples:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> from lightning_fedleak import new_token_canaries
        >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=8, n_head=1, n_layer=1))
        >>> texts = new_token_canaries(model, 4, length=5)
        >>> len(texts), texts[0].shape, model.config.vocab_size
        (4, torch.Size([5]), 68)

    Args:
        model: A causal Hugging Face model, or a module that holds one, before PEFT wraps it.
        count: The number of texts, m.
        length: The number of tokens of a text, with both new ones; at least 3. Longer texts have
            more tokens in common, and show less.
        row_norm: The initial norm of the new rows, over the mean norm of the other rows.
        seed: The seed of rows and texts; global random numbers are not used.

    Returns:
        m rows of token ids, (length,) int64.

    Raises:
        ValueError: A number is out of range, or the model is not causal, or PEFT already wraps it.
    """
    anatomy: Any = find_anatomy(model)
    if anatomy.kind != "causal" or anatomy.peft is not None:
        raise ValueError("new_token_canaries is for causal models, before get_peft_model")
    check_integer("count", count)
    check_integer("length", length, at_least=3, at_most=context_length(anatomy))
    check_number("row_norm", row_norm, above=0)
    special = special_ids(getattr(without_peft(anatomy.model), "config", None), ())
    generator = torch.Generator().manual_seed(seed)
    size = anatomy.vocab_size
    with torch.random.fork_rng([anatomy.device] if anatomy.device.type == "cuda" else []):
        anatomy.model.resize_token_embeddings(size + count, mean_resizing=False)
    new_ids = torch.arange(size, size + count)
    ordinary = torch.tensor([i for i in range(size) if i not in special])
    _start_rows(find_anatomy(model), new_ids, ordinary, row_norm, generator)
    indices = torch.randint(len(ordinary), (count, length - 2), generator=generator)
    ends = new_ids[:, None]
    return [*torch.cat([ends, ordinary[indices], ends], 1)]


def sampled_canaries(
    model: nn.Module,
    count: int,
    *,
    prompts: Sequence[Tensor] = (),
    length: int = 32,
    temperature: float = 1.0,
    unlikely_end: int = 0,
    seed: int = 0,
) -> list[Tensor]:
    """Return texts that the model writes as continuations of prompts, in the domain of the prompts.

    ::

        texts = sampled_canaries(model, 200, prompts=[ids[:8] for ids in public_rows])
        train = with_canaries(train, texts, record="secret/inclusion.json")

    Examples:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> from lightning_fedleak import sampled_canaries
        >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=8, n_head=1, n_layer=1))
        >>> texts = sampled_canaries(model, 4, length=12, unlikely_end=3)
        >>> len(texts), texts[0].shape
        (4, torch.Size([12]))

    Args:
        model: A causal Hugging Face model with ``generate``, or a module that holds one.
        count: The number of texts, m.
        prompts: (P,) token ids of each prefix of a public text; canaries begin with them in turn.
            By default each begins with a random token.
        length: The number of tokens of a text, with its prompt.
        temperature: The temperature of the draw; at least 0.8, as in arXiv 2606.10481.
        unlikely_end: The number of tokens at the end that are drawn uniformly from the vocabulary.
        seed: The seed of the texts; global random numbers are not used.

    Returns:
        m rows of token ids, (length,) int64, all different.

    Raises:
        ValueError: A number is out of range, the model is not causal, or two texts are equal.
    """
    anatomy: Any = find_anatomy(model)
    if anatomy.kind != "causal":
        raise ValueError(f"sampled_canaries is for causal models, not for a {anatomy.kind} model")
    check_integer("count", count)
    check_number("temperature", temperature, at_least=0.8)
    max_prompt = max((len(prompt) for prompt in prompts), default=1)
    check_integer("length", length, at_least=max_prompt + 1, at_most=context_length(anatomy))
    check_integer("unlikely_end", unlikely_end, at_least=0, at_most=length - max_prompt)
    generator = torch.Generator().manual_seed(seed)
    special = special_ids(getattr(without_peft(anatomy.model), "config", None), ())
    ordinary = torch.tensor([i for i in range(anatomy.vocab_size) if i not in special])

    def draw(*shape: int) -> Tensor:
        return ordinary[torch.randint(len(ordinary), shape, generator=generator)]

    starts = [prompts[n % len(prompts)] for n in range(count)] if prompts else [*draw(count, 1)]
    # Random texts; the model's tokens replace all but the unlikely ends.
    device, texts = anatomy.device, [draw(length) for _ in starts]
    lengths = torch.tensor([len(start) for start in starts])
    writer: Any
    with (
        undisturbed(anatomy) as writer,
        torch.random.fork_rng([device] if device.type == "cuda" else []),
        torch.no_grad(),
    ):
        torch.manual_seed(seed)
        for size in sorted({len(start) for start in starts}):
            rows, n_new = (lengths == size).nonzero()[:, 0].tolist(), length - unlikely_end - size
            ids = torch.stack([starts[row] for row in rows]).to(device)
            if n_new:
                ids = writer.generate(
                    ids, attention_mask=torch.ones_like(ids), do_sample=True, num_beams=1,
                    top_k=0, top_p=1.0, temperature=temperature,
                    min_new_tokens=n_new, max_new_tokens=n_new,
                    suppress_tokens=sorted(special) or None, pad_token_id=int(ordinary[0]),
                )  # fmt: skip
            for row, tokens in zip(rows, ids.cpu(), strict=True):
                texts[row][: len(tokens)] = tokens
    if len({tuple(text.tolist()) for text in texts}) < count:
        raise ValueError("two texts are equal: raise length= or temperature=, or pass prompts=")
    return texts


@torch.no_grad()
def _start_rows(
    anatomy: Anatomy, new_ids: Tensor, ordinary: Tensor, norm: float, generator: torch.Generator
) -> None:
    """Set the new rows of embedding and head to random directions with ``norm`` usual norms."""
    matrices = [anatomy.parameter(role) for role in (EMBEDDING_WEIGHT, HEAD_WEIGHT)]
    for matrix in {id(m): m for m in matrices if m is not None}.values():
        usual = matrix[ordinary.to(matrix.device)].float().norm(dim=1).mean().cpu()
        rows = torch.randn(len(new_ids), matrix.shape[1], generator=generator)
        rows *= norm * usual / rows.norm(dim=1, keepdim=True)
        matrix[new_ids.to(matrix.device)] = rows.to(matrix)


def halves(n: int, count: int, seed: int = 0) -> Tensor:
    """Return (count, n) bool, the random half of the rows that each reference is trained on.

    References 2 k and 2 k + 1 have complementary halves.
    """
    generator, rows = torch.Generator().manual_seed(seed), []
    for _ in range(0, count, 2):
        inside = torch.randperm(n, generator=generator) < n // 2
        rows += [inside, ~inside]
    return torch.stack(rows[:count])


def draw_references(n_queried: int, rest: int, rows: int, seed: int, count: int = 1) -> Tensor:
    """Return (K, n_queried + rest) bool, the rows that each of K references is trained on.

    If there are enough further rows, one reference is trained on ``rows`` of them. Else, or if more
    are asked for, there are two or more references, on random halves of all rows, complementary by
    twos. Neither choice depends on membership, so members and non-members stay exchangeable.

    Args:
        n_queried: The number of queried rows, which come first.
        rest: The number of further rows, which are in random order.
        rows: The number of rows that one reference needs.
        seed: The seed of the halves.
        count: The number of references.
    """
    if rows > rest or count > 1:
        return halves(n_queried + rest, max(2, count), seed)
    places = torch.arange(n_queried + rest)[None]
    return (places >= n_queried) & (places < n_queried + rows)


@dataclass(frozen=True)
class _ReferenceData(Dataset[Any]):
    """Some rows of the user's data, as a data set.

    Attributes:
        sources: The data set and the index of each row.
    """

    sources: Sequence[tuple[Any, int]]

    def __len__(self) -> int:
        return len(self.sources)

    def __getitem__(self, index: int) -> Any:
        dataset, row = self.sources[index]
        return dataset[row]


@dataclass(frozen=True)
class ReferenceRows:
    """The rows that references are trained on.

    Attributes:
        sources: The data set and the index of each of n rows, members and non-members.
        inside: (K, n) bool, the rows that each of K references is trained on.
        row_of: (N,) int64, the row of each of the N queried texts.
    """

    sources: Sequence[tuple[Any, int]]
    inside: Tensor
    row_of: Tensor

    @property
    def data(self) -> list[_ReferenceData]:
        """Return the training data of each reference."""
        indices = (is_inside.nonzero()[:, 0].tolist() for is_inside in self.inside)
        return [_ReferenceData([self.sources[i] for i in rows]) for rows in indices]

    @property
    def seen(self) -> Tensor:
        """Return (K, N) bool, the texts that each reference is trained on."""
        return self.inside[:, self.row_of]
