"""Values of personal data that are planted in a user's own rows, by kind and place.

A value (a telephone number, a code, a name) is drawn uniformly from a finite set that the user
specifies, and is put into a sentence. The sentence overwrites tokens of one of the user's rows, in
the prompt or where the loss is computed. An independent random draw decides for each row whether it
is trained on. So every other value of the set was exactly as likely to be planted. These values are
the *candidates*, among which an attack ranks the planted value.
"""

from __future__ import annotations

import copy
import math
import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Subset

from lightning_fedleak.evaluation.canaries.dataset import (
    CanaryDataset,
    CanarySet,
    check_dataset,
    digest_of,
    token_ids_of,
)
from lightning_fedleak.evaluation.canaries.record import InclusionRecord, draw_or_load
from lightning_fedleak.model.batches import IGNORE_INDEX
from lightning_fedleak.validate import check_integer

Place = Literal["prompt", "label"]
"""The part of a row with the value: the prompt, or the tokens that the loss is computed on."""
PLACES: tuple[Place, ...] = ("prompt", "label")
_ALPHABETS = {"#": "0123456789", "?": "ABCDEFGHIJKLMNOPQRSTUVWXYZ"}
# At least so many values determine the length of a sentence, and as many more are candidates.
_MIN_VALUES = 100


@dataclass(frozen=True)
class _EntityKind:
    """A finite set of values, and the sentence that they stand in.

    Attributes:
        sentence: The sentence, with ``{}`` for the value.
        values: All values; or a pattern in which each ``#`` is a digit and each ``?`` a letter
            from A to Z.
        room: The maximum number of tokens of the sentence with a value.
        lengths: The numbers of the values that determined ``room``; they are no candidates.
    """

    sentence: str
    values: str | Sequence[str]
    room: int = 0
    lengths: frozenset[int] = frozenset()

    @property
    def parts(self) -> list[Sequence[str]]:
        """Return the possible contents of each part of a value; parts are independent."""
        if isinstance(self.values, str):
            return [_ALPHABETS.get(character, character) for character in self.values]
        return [self.values]

    @property
    def size(self) -> int:
        """Return the number of values."""
        return math.prod(map(len, self.parts))

    def value(self, number: int) -> str:
        """Return the value with a number from 0 to below :attr:`size`."""
        characters = []
        for part in self.parts:
            number, place = divmod(number, len(part))
            characters.append(part[place])
        return "".join(characters)

    def overlaps(self, other: _EntityKind) -> bool:
        """Return whether this kind and another one have a value in common."""
        if isinstance(self.values, str) is isinstance(other.values, str):
            pairs = zip(self.parts, other.parts, strict=False)
            return len(self.parts) == len(other.parts) and all({*a} & {*b} for a, b in pairs)
        texts, pattern = (other, self) if isinstance(self.values, str) else (self, other)
        form = "".join(f"[{re.escape(part)}]" for part in map("".join, pattern.parts))
        return any(re.fullmatch(form, value) for value in texts.values)

    def check(self, name: str, n: int) -> None:
        """Raise an error unless n values can be planted, and ranked among candidates.

        Raises:
            ValueError: The sentence, the name or the number of values does not fit.
        """
        is_sentence = self.sentence.count("{}") == 1 and not self.sentence.startswith("{}")
        if not is_sentence or not re.fullmatch(r"[A-Za-z0-9_.\-]+", name):
            raise ValueError(
                f"kinds[{name!r}] needs a sentence with one {{}} for the value, after some words, "
                "and a name of letters, digits, '_', '-' and '.'"
            )
        argument = f"number of values of kinds[{name!r}]"
        check_integer(argument, self.size, at_least=n + 2 * _MIN_VALUES)


@dataclass(frozen=True)
class _Entity:
    """A planted value.

    Attributes:
        kind: The name of its kind.
        place: ``"prompt"`` or ``"label"``.
        number: The number of the value in the set.
        start: The index of its first token in the row, without padding.
        ids: (k,) The tokens of the value.
    """

    kind: str
    place: Place
    number: int
    start: int
    ids: Tensor


class _PlantedRows(NamedTuple):
    """Rows with planted values: their indices in the data, the rows, the values and the kinds."""

    hosts: Sequence[int]
    items: Sequence[Any]
    entities: Sequence[_Entity]
    kinds: Mapping[str, _EntityKind]


class EntitySet(CanarySet):
    """Planted values, their rows, and the secret record of which rows are in the data.

    Args:
        planted: The rows with their values.
        record: The record of which rows are in the data.
        tokenizer: The tokenizer of the rows.

    Attributes:
        entities: The value of each row.
        kinds: The kinds of values by name.
    """

    def __init__(self, planted: _PlantedRows, record: InclusionRecord, tokenizer: Any) -> None:
        super().__init__([token_ids_of(row, "a planted row") for row in planted.items], record)
        self.entities, self.kinds = planted.entities, planted.kinds
        self._tokenizer = tokenizer

    @property
    def groups(self) -> list[tuple[str, Place]]:
        """Return each combination of kind and place once."""
        return list(dict.fromkeys((entity.kind, entity.place) for entity in self.entities))

    def candidates(self, row: int, n: int) -> list[Tensor]:
        """Return the tokens of a planted value, and of n other values of its set.

        The others were not planted. They are distinct and drawn uniformly; fewer if fewer remain.
        """
        entity = self.entities[row]
        kind = self.kinds[entity.kind]
        # Values that are no candidates: those that set the length, and all planted ones.
        absent = kind.lengths | {x.number for x in self.entities if x.kind == entity.kind}
        generator = random.Random(self.record.key + row.to_bytes(8, "big"))
        numbers = _numbers(kind.size, n + len(absent), generator)
        others = [number for number in numbers if number not in absent][:n]
        tokens = _tokens_of(kind, map(kind.value, others), self._tokenizer)
        fitting = (ids for ids in tokens if ids and len(ids[0]) <= kind.room)
        return [entity.ids, *(ids[start:end] for ids, start, end in fitting)]


class EntityDataset(CanaryDataset):
    """A data set with planted values, as :func:`with_entities` builds it.

    Attributes:
        entities: The planted values, and the record of which are in the data.
    """

    def __init__(self, dataset: Any, examples: Sequence[Any], entities: EntitySet) -> None:
        super().__init__(dataset, examples, entities)
        self.entities = entities


def with_entities(
    rows: Any,
    kinds: Mapping[str, tuple[str, str | Sequence[str]]],
    places: Sequence[Place] = PLACES,
    times: Sequence[int] = (1, 4),
    *,
    tokenizer: Any,
    count: int = 80,
    seed: int | None = None,
    probability: float = 0.5,
    record: str | Path | None = None,
) -> EntityDataset:
    """Plant values in some rows, and include each of these rows in the data at random.

    Values are drawn uniformly from their set, each at most once, and must not already occur in the
    rows. The rows that values are planted in are drawn at random. Such a row is in the data with
    the value, once or several times, or not at all. The sentence overwrites tokens of the row, so
    that its length, its padding and its labels' positions stay the same. ::

        train = with_entities(
            rows,
            {"phone": ("Please call me at {}.", "###-####")},
            tokenizer=tokenizer,
            record="secret/entities.json",
        )
        monitor = LeakageMonitor([Entities()], games=Games(entities=train.entities))

    Plant values before :func:`~lightning_fedleak.evaluation.canaries.with_canaries`. If
    membership is measured in the same run, plant them with ``times=(1,)`` and before
    :func:`~lightning_fedleak.evaluation.canaries.leave_out`.

    Args:
        rows: training rows with ``input_ids``, and ``labels`` (-100 in the prompt),
            ``completion_mask`` or ``assistant_masks``; or rows of token ids, all of which are
            labels.
        kinds: For each name a sentence with ``{}`` for the value, and either all values or a
            pattern in which each ``#`` is a digit and each ``?`` a letter from A to Z. No value's
            tokens may be a prefix of another's, and two kinds may not share a value.
        places: The parts of the rows in which values are planted.
        times: The possible numbers of repetitions of an included row, drawn for each row.
        tokenizer: The tokenizer of the rows.
        count: The number of values of each kind and place, in the data or not.
        seed: at least 0, for reproducible experiments; None draws from the operating system, and
            ``record`` is then needed to resume, and wherever several processes train.
        probability: The probability of inclusion.
        record: file, of mode 0600, that keeps the draw. It holds no value.

    Raises:
        ValueError: rows without length or index, or of another form; too few rows with room; a
            kind that cannot be ranked; an argument out of its range; a record of other rows or
            settings.
        PermissionError: others may read the record.

    Examples:
        >>> import torch
        >>> from transformers import ByT5Tokenizer
        >>> from lightning_fedleak.evaluation.canaries import with_entities
        >>> rows = [torch.randint(40, 90, (80,)) for _ in range(200)]
        >>> kinds = {"phone": ("Call me at {}.", "###-####")}
        >>> train = with_entities(rows, kinds, ["label"], tokenizer=ByT5Tokenizer(), seed=1)
        >>> len(train.entities), train.entities.groups
        (80, [('phone', 'label')])
    """
    check_dataset(rows, "values need")
    check_integer("count", count)
    if not kinds or not places or not {*places} <= {*PLACES}:
        raise ValueError(f"give kinds=, and places= of {list(PLACES)}")
    by_name = {name: _EntityKind(*settings) for name, settings in kinds.items()}
    for name, kind in by_name.items():
        kind.check(name, count * len(places))
    for a, b in combinations(by_name, 2):
        if by_name[a].overlaps(by_name[b]):
            raise ValueError(f"kinds {a!r} and {b!r} share a value: give each to one of them")
    planted = _PlantedRows([], [], [], by_name)

    def draw(key: bytes) -> InclusionRecord:
        nonlocal planted
        missing = {(kind, place): count for kind in by_name for place in places}
        planted = _plant(rows, by_name, missing, tokenizer, random.Random(key))
        digests = tuple(digest_of(item, "a planted row") for item in planted.items)
        return InclusionRecord(key, digests, probability, tuple(times))

    inclusion = draw_or_load(InclusionRecord, draw, seed, record, action="plant values")
    unchanged = Subset(rows, sorted({*range(len(rows))}.difference(planted.hosts)))
    return EntityDataset(unchanged, planted.items, EntitySet(planted, inclusion, tokenizer))


def _plant(
    rows: Any,
    kinds: Mapping[str, _EntityKind],
    missing: dict[tuple[str, Place], int],
    tokenizer: Any,
    generator: random.Random,
) -> _PlantedRows:
    """Plant the missing number of values of each kind and place in random rows.

    Raises:
        ValueError: Too few rows have room for the sentences.
    """
    fitted, values = {}, {}
    for name, kind in kinds.items():
        n = sum(count for (key, _), count in missing.items() if key == name)
        fitted[name], values[name] = _values(name, kind, n, tokenizer, generator)
    special = {*getattr(tokenizer, "all_special_ids", ())}
    hosts, items, entities = [], [], []
    order = generator.sample(range(len(rows)), len(rows))
    while order and any(missing.values()):
        row = order.pop()
        item = rows[row]
        ids = token_ids_of(item, f"rows[{row}]").tolist()
        is_label = _label_places(item, f"rows[{row}]")
        groups = sorted(missing, key=missing.__getitem__, reverse=True)
        for name, place in (group for group in groups if missing[group]):
            free = [
                token not in special and labelled is (place == "label")
                for token, labelled in zip(ids, is_label, strict=True)
            ]
            starts = [*_free_starts(free, fitted[name].room)]
            if starts:
                number, (tokens, first, last) = values[name].pop()
                start = generator.choice(starts)
                hosts.append(row)
                items.append(_overwrite(item, start, tokens))
                entities.append(_Entity(name, place, number, start + first, tokens[first:last]))
                missing[name, place] -= 1
                break
    if lacking := [f"{n} of '{name}' in a {place}" for (name, place), n in missing.items() if n]:
        raise ValueError(
            f"too few of {len(rows)} rows have room for {', '.join(lacking)}: give more or longer "
            "rows, a smaller count=, or places=('label',) if no token is masked"
        )
    return _PlantedRows(hosts, items, entities, fitted)


def _values(
    name: str, kind: _EntityKind, n: int, tokenizer: Any, generator: random.Random
) -> tuple[_EntityKind, list[tuple[int, tuple[Tensor, int, int]]]]:
    """Return the kind with its room, and the numbers and tokens of n values to plant.

    The tokenizer does not merge these values with the words around them. The room is computed from
    other values, so that it reveals nothing about the planted ones.
    """
    numbers = _numbers(kind.size, 2 * n + _MIN_VALUES, generator)
    others = _tokens_of(kind, map(kind.value, numbers[:_MIN_VALUES]), tokenizer)
    room = max((len(ids[0]) for ids in others if ids), default=0)
    fitted = replace(kind, room=room, lengths=frozenset(numbers[:_MIN_VALUES]))
    tokens = _tokens_of(fitted, map(kind.value, numbers[_MIN_VALUES:]), tokenizer)
    pairs = zip(numbers[_MIN_VALUES:], tokens, strict=True)
    usable = [(number, row) for number, row in pairs if row and len(row[0]) <= fitted.room]
    if len(usable) < n:
        raise ValueError(
            f"only {len(usable)} values of kinds[{name!r}] have tokens of their own: put a space "
            "or a mark beside {} in the sentence"
        )
    # All values of a pattern have one length, so the drawn ones represent the others.
    values = map(kind.value, numbers) if isinstance(kind.values, str) else kind.values
    pieces = filter(None, _tokens_of(kind, values, tokenizer))
    spans = sorted(ids[start:end].tolist() for ids, start, end in pieces)
    if any(longer[: len(span)] == span for span, longer in pairwise(spans)):
        raise ValueError(
            f"kinds[{name!r}] has a value twice, or one whose tokens begin another's: give values "
            "of one length, or end each in the mark that follows it"
        )
    return fitted, usable[:n]


def _numbers(size: int, n: int, generator: random.Random) -> list[int]:
    """Return n distinct random numbers below ``size``, which may be huge; at most ``size``."""
    numbers: dict[int, None] = {}
    while len(numbers) < min(n, size):
        numbers[generator.randrange(size)] = None
    return [*numbers]


def _tokens_of(
    kind: _EntityKind, values: Iterable[str], tokenizer: Any
) -> list[tuple[Tensor, int, int] | None]:
    """Return the tokens of the sentence with each value, and the value's start and end in them.

    The result is None for a value that the tokenizer merges with the words around it.
    """
    before, after = kind.sentence.split("{}")
    starts = [before + value for value in values]
    texts = [before.rstrip(), *starts, *(start + after for start in starts)]
    cue, *encoded = tokenizer(texts, add_special_tokens=False)["input_ids"]
    ends, wholes = encoded[: len(starts)], encoded[len(starts) :]
    return [
        (torch.tensor(whole), len(cue), len(end))
        if end[: len(cue)] == cue and whole[: len(end)] == end and len(cue) < len(end)
        else None
        for end, whole in zip(ends, wholes, strict=True)
    ]


def _label_places(item: Any, name: str) -> list[bool]:
    """Return for each token of a row, without padding, whether the loss is computed on it."""
    for field, masked in (("labels", IGNORE_INDEX), ("completion_mask", 0), ("assistant_masks", 0)):
        if isinstance(item, Mapping) and field in item:
            places = {**item, "input_ids": item[field]}
            return [value != masked for value in token_ids_of(places, name).tolist()]
    return [True] * len(token_ids_of(item, name))


def _free_starts(free: Sequence[bool], room: int) -> Iterator[int]:
    """Yield the indices from 1 on at which ``room`` consecutive tokens are free, from the end."""
    length = 0
    for place in range(len(free) - 1, 0, -1):
        length = length + 1 if free[place] else 0
        if length >= room:
            yield place


def _overwrite(item: Any, start: int, tokens: Tensor) -> Any:
    """Return a copy of a row with ``tokens`` from ``start`` on, counted without padding."""
    changed = copy.deepcopy(item)
    fields, real = [changed], [*range(start + len(tokens))]
    if isinstance(item, Mapping):
        fields = [changed[name] for name in ("input_ids", "labels") if name in item]
        if (mask := item.get("attention_mask")) is not None:
            real = [place for place, inside in enumerate(mask) if inside]
    for place, token in zip(real[start:], tokens.tolist(), strict=False):
        for field in fields:
            if int(field[place]) != IGNORE_INDEX:
                field[place] = token
    return changed
