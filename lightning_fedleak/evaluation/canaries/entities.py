"""Values of personal data that are planted in a user's own rows, by kind and place.

A value (a telephone number, a code, a name) is drawn uniformly from a finite set that the user
states, and stands in a sentence. The sentence takes the place of as many tokens of one of the
user's rows, in the prompt or where the loss is computed, and a draw of each row's own decides
whether it is trained on. So other values of the same set are exactly as likely to have been
planted as the value itself.
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

from lightning_fedleak.evaluation.canaries.dataset import CanaryDataset, CanarySet, check_dataset
from lightning_fedleak.evaluation.canaries.items import digest_of, token_ids_of
from lightning_fedleak.evaluation.canaries.record import InclusionRecord, draw_or_load
from lightning_fedleak.model.batches import IGNORE_INDEX
from lightning_fedleak.validate import check_integer

Place = Literal["prompt", "label"]
"""Where a value stands: among tokens that the loss is not computed on, or where it is."""
PLACES: tuple[Place, ...] = ("prompt", "label")
_ALPHABETS = {"#": "0123456789", "?": "ABCDEFGHIJKLMNOPQRSTUVWXYZ"}
_MIN_VALUES = 100  # values that size a sentence, and candidates; with fewer a rank says little


@dataclass(frozen=True)
class _EntityKind:
    """A finite set of values, and the sentence that they stand in.

    Attributes:
        sentence: with ``{}`` in the place of the value.
        values: all of them; or a pattern in which each ``#`` is a digit and each ``?`` a letter
            from A to Z.
        room: tokens of the sentence, at most, whichever value it holds.
        lengths: numbers of the values that the room is that of; they are no candidates.
    """

    sentence: str
    values: str | Sequence[str]
    room: int = 0
    lengths: frozenset[int] = frozenset()

    @property
    def parts(self) -> list[Sequence[str]]:
        """Return what each part of a value may be, independently of the others."""
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
        """Return whether a value of this kind is one of another kind too."""
        if isinstance(self.values, str) is isinstance(other.values, str):
            pairs = zip(self.parts, other.parts, strict=False)
            return len(self.parts) == len(other.parts) and all({*a} & {*b} for a, b in pairs)
        texts, pattern = (other, self) if isinstance(self.values, str) else (self, other)
        form = "".join(f"[{re.escape(part)}]" for part in map("".join, pattern.parts))
        return any(re.fullmatch(form, value) for value in texts.values)

    def check(self, name: str, n: int) -> None:
        """Raise an error unless n values can be planted, and ranked among others.

        Raises:
            ValueError: says what to change.
        """
        is_sentence = self.sentence.count("{}") == 1 and not self.sentence.startswith("{}")
        if not is_sentence or not re.fullmatch(r"[A-Za-z0-9_.\-]+", name):
            raise ValueError(
                f"kinds[{name!r}] needs a sentence with one {{}} for the value, behind some words, "
                "and a name of letters, digits, '_', '-' and '.', as part of a log name"
            )
        hint, min_size = f"of which {n} are planted", n + 2 * _MIN_VALUES
        argument = f"number of values of kinds[{name!r}]"
        check_integer(argument, self.size, at_least=min_size, hint=hint)


@dataclass(frozen=True)
class _Entity:
    """A planted value.

    Attributes:
        kind: name of its kind.
        place: ``"prompt"`` or ``"label"``.
        number: The number of the value in the set.
        start: its first token in the row, without padding.
        ids: (k,) its tokens.
    """

    kind: str
    place: Place
    number: int
    start: int
    ids: Tensor


class _PlantedRows(NamedTuple):
    """Rows with values: their numbers in the data, the rows, the values, and their kinds."""

    hosts: Sequence[int]
    items: Sequence[Any]
    entities: Sequence[_Entity]
    kinds: Mapping[str, _EntityKind]


class EntitySet(CanarySet):
    """Planted values, the rows that they stand in, and the secret of which are in the data.

    Args:
        planted: the rows.
        record: The record of which rows are in the data.
        tokenizer: The tokenizer of the rows.

    Attributes:
        entities: the value of each row.
        kinds: by name.
    """

    def __init__(self, planted: _PlantedRows, record: InclusionRecord, tokenizer: Any) -> None:
        super().__init__([token_ids_of(row, "a planted row") for row in planted.items], record)
        self.entities, self.kinds = planted.entities, planted.kinds
        self._tokenizer = tokenizer

    @property
    def groups(self) -> list[tuple[str, Place]]:
        """Return the kinds and places, each once."""
        return list(dict.fromkeys((entity.kind, entity.place) for entity in self.entities))

    def candidates(self, row: int, n: int) -> list[Tensor]:
        """Return the tokens of a value, and of n others of its set that were not planted.

        They are distinct, and drawn uniformly without the value; fewer where fewer remain.
        """
        entity = self.entities[row]
        kind = self.kinds[entity.kind]
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
        entities: the values and which are in the data.
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
    """Return the rows with values planted in some of them, in the data or not by a draw of each.

    Values are drawn uniformly from their set, each at most once, and must not occur in the rows
    anyway. The rows that values are planted in are drawn too, and are in the data with the value,
    once or several times, or not at all. A sentence takes the place of tokens of the row, so that
    its length, its padding and what the loss is computed on stay. ::

        train = with_entities(
            rows,
            {"phone": ("Please call me at {}.", "###-####")},
            tokenizer=tokenizer,
            record="secret/entities.json",
        )
        monitor = LeakageMonitor([Entities()], games=Games(entities=train.entities))

    Plant values before :func:`~lightning_fedleak.evaluation.canaries.with_canaries`. Where
    membership is measured in the same run, plant them with ``times=(1,)`` and before
    :func:`~lightning_fedleak.evaluation.canaries.leave_out`.

    Args:
        rows: training rows with ``input_ids``, and ``labels`` (-100 in the prompt),
            ``completion_mask`` or ``assistant_masks``; or rows of token ids, all of which are
            labels.
        kinds: by name a sentence with ``{}`` for the value, and all values, or a pattern in which
            each ``#`` is a digit and each ``?`` a letter from A to Z. No value's tokens begin
            another's, and no two kinds share one.
        places: where values stand.
        times: how often an included row stands in the data, drawn for each.
        tokenizer: The tokenizer of the rows.
        count: values of each kind and place, in the data or not.
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
    for one, two in combinations(by_name, 2):
        if by_name[one].overlaps(by_name[two]):
            raise ValueError(f"kinds {one!r} and {two!r} share a value: give each to one of them")
    planted = _PlantedRows([], [], [], by_name)

    def draw(key: bytes) -> InclusionRecord:
        nonlocal planted
        missing = {(kind, place): count for kind in by_name for place in places}
        planted = _plant(rows, by_name, missing, tokenizer, random.Random(key))
        digests = tuple(digest_of(item, "a planted row") for item in planted.items)
        return InclusionRecord(key, digests, probability, tuple(times))

    coins = draw_or_load(InclusionRecord, draw, seed, record, action="plant values")
    rest = Subset(rows, sorted({*range(len(rows))}.difference(planted.hosts)))
    return EntityDataset(rest, planted.items, EntitySet(planted, coins, tokenizer))


def _plant(
    rows: Any,
    kinds: Mapping[str, _EntityKind],
    missing: dict[tuple[str, Place], int],
    tokenizer: Any,
    generator: random.Random,
) -> _PlantedRows:
    """Return the rows that values are planted in, as many as are missing of a kind in a place."""
    fitted, values = {}, {}
    for name, kind in kinds.items():
        n = sum(count for (one, _), count in missing.items() if one == name)
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
            starts = [*_starts(free, fitted[name].room)]
            if starts:
                number, (tokens, first, last) = values[name].pop()
                start = generator.choice(starts)
                hosts.append(row)
                items.append(_overwritten(item, start, tokens))
                entities.append(_Entity(name, place, number, start + first, tokens[first:last]))
                missing[name, place] -= 1
                break
    if lacking := [f"{n} of '{name}' in a {place}" for (name, place), n in missing.items() if n]:
        raise ValueError(
            f"too few of {len(rows)} rows have room: {', '.join(lacking)} cannot be planted. Give "
            "more or longer rows, a shorter sentence, a smaller count=, or places=('label',) if no "
            "token is masked"
        )
    return _PlantedRows(hosts, items, entities, fitted)


def _values(
    name: str, kind: _EntityKind, n: int, tokenizer: Any, generator: random.Random
) -> tuple[_EntityKind, list[tuple[int, tuple[Tensor, int, int]]]]:
    """Return the kind with its room, and n values that have tokens of their own, by their numbers.

    The room is that of other values than these, so that it says nothing of them.
    """
    numbers = _numbers(kind.size, 2 * n + _MIN_VALUES, generator)
    others = _tokens_of(kind, map(kind.value, numbers[:_MIN_VALUES]), tokenizer)
    room = max((len(ids[0]) for ids in others if ids), default=0)
    fitted = replace(kind, room=room, lengths=frozenset(numbers[:_MIN_VALUES]))
    tokens = _tokens_of(fitted, map(kind.value, numbers[_MIN_VALUES:]), tokenizer)
    pairs = zip(numbers[_MIN_VALUES:], tokens, strict=True)
    apart = [(number, one) for number, one in pairs if one and len(one[0]) <= fitted.room]
    if len(apart) < n:
        raise ValueError(
            f"of {len(tokens)} values of kinds[{name!r}] only {len(apart)} have tokens of their "
            "own, which the tokenizer does not merge with the words around them: put a space or a "
            "mark beside {}"
        )
    # The values of a pattern have one length, so that those that are drawn stand for the others.
    values = map(kind.value, numbers) if isinstance(kind.values, str) else kind.values
    pieces = filter(None, _tokens_of(kind, values, tokenizer))
    spans = sorted(ids[start:end].tolist() for ids, start, end in pieces)
    if any(longer[: len(span)] == span for span, longer in pairwise(spans)):
        raise ValueError(
            f"kinds[{name!r}] has a value twice, or one whose tokens begin another's and are never "
            "less likely: give values of one length, or end each in the mark that follows it"
        )
    return fitted, apart[:n]


def _numbers(size: int, n: int, generator: random.Random) -> list[int]:
    """Return n distinct numbers below a size of any magnitude, drawn uniformly; all of fewer."""
    numbers: dict[int, None] = {}
    while len(numbers) < min(n, size):
        numbers[generator.randrange(size)] = None
    return [*numbers]


def _tokens_of(
    kind: _EntityKind, values: Iterable[str], tokenizer: Any
) -> list[tuple[Tensor, int, int] | None]:
    """Return of each value the sentence's tokens, and where those of the value begin and end.

    None stands for a value that the tokenizer merges with the words around it.
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
    """Return of each token of a row, without padding, whether the loss is computed on it."""
    for field, masked in (("labels", IGNORE_INDEX), ("completion_mask", 0), ("assistant_masks", 0)):
        if isinstance(item, Mapping) and field in item:
            places = {**item, "input_ids": item[field]}
            return [value != masked for value in token_ids_of(places, name).tolist()]
    return [True] * len(token_ids_of(item, name))


def _starts(free: Sequence[bool], room: int) -> Iterator[int]:
    """Return the places, but the first, from which so many in a row are free."""
    length = 0
    for place in range(len(free) - 1, 0, -1):
        length = length + 1 if free[place] else 0
        if length >= room:
            yield place


def _overwritten(item: Any, start: int, tokens: Tensor) -> Any:
    """Return a copy of a row with other tokens from ``start`` on, counted without padding."""
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
