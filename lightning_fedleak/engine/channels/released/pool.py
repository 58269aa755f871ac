"""Who is compared: rows of the training data that were trained on, and texts that were not.

A membership score means nothing without non-members from the members' distribution. There are
three ways to get them. Rows that a shuffled first epoch has not come to yet (nothing to give); rows
that :func:`~lightning_fedleak.evaluation.canaries.leave_out` left out; and a set of texts of one's
own, if nothing but the training tells it apart.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_fedleak.defenses.dpsgd.poisson import PoissonBatchSampler
from lightning_fedleak.engine.channels.released.training_rows import (
    UnplayableGame,
    check_loader,
    check_shuffle,
    find_left_out,
    read_row,
    read_twice,
)
from lightning_fedleak.engine.options import Memorization
from lightning_fedleak.evaluation.canaries import (
    CanarySet,
    ReferenceRows,
    TrainingRows,
    draw_references,
)
from lightning_fedleak.evaluation.canaries.repeats import MIN_LABELS, Part, PoolRows, scored_texts
from lightning_fedleak.evaluation.metrics.found_entities import FoundEntities
from lightning_fedleak.messages import rank_zero_info
from lightning_fedleak.model.batches import TokenBatch
from lightning_fedleak.model.model_state import preserve_process
from lightning_fedleak.model.taps import Text, pool_digest, texts_in
from lightning_fedleak.progress import bars, track
from lightning_fedleak.report.records import PoolLine

_Way = Literal["not yet seen", "left out", "given"]
"""Where non-members come from: rows that the first epoch has not come to, rows held out by a draw,
or texts of the user's own."""

FORWARD_SHARE = 0.4
"""Cost of asking the model about a text, over that of training on it: .28 and .38 were measured on
two models, with reading the data and statistics. Larger: fewer texts are asked about."""

MIN_TEXTS = 10  # on either side at a look, below which it waits; two for each fold of words
MIN_POOL = 200  # texts below which the default does not play; 100 members show a TPR of .1
MISSED = 5.0  # standard deviations by which recognised rows may fall short; not tuned
NO_CONTROLS = "there are no controls after epoch 1: add leave_out"
MAX_ROWS = 10_000  # searched for repeats: 4 to 8 s on a core; more rows take longer


class NoRows(ValueError):
    """The data has no rows of the kind that an attack compares."""


@dataclass
class Pool:
    """Hold the texts that the model is queried with.

    Attributes:
        way: where the non-members come from.
        texts: N texts, each once; of copies the first that was trained on, at the end.
        trains: (N,) bool, rows of the training data.
        seen: (N,) bool, rows that have been trained on so far.
        length: texts of the training data; of rows that hold several, as many as a row of those
            asked about holds on average.
        once: an epoch takes each row once.
        times: (N,) int64, rows of the training data that a text stands in. One that stands in
            several is no unit of a game of membership, since each row has an inclusion bit.
        no_game: why no account of examples that are added or removed is compared; None: each text
            was held out by a draw of its own.
        passed: texts that have been in batches so far, on this process.
        unread: batches that could not be read so far, on this process.
        rows: which rows of the user's data the texts are; None where nothing lists them.
        references: the rows that references are trained on; None where none is trained.
        is_short: (N,) bool, texts with 1 to 7 label tokens, which are compared apart.
        has_prompt: (N,) bool, texts of which the prompt is compared.
        repeated: texts of which another row repeats the whole or a part, so that they are not
            compared.
        short: texts that were excluded because they have fewer than 8 label tokens.
        searched: share of the data's rows that was searched for repeats.
    """

    way: _Way
    texts: Sequence[Text]
    trains: Tensor
    length: int
    times: Tensor
    is_short: Tensor
    has_prompt: Tensor
    no_game: str | None
    once: bool = False
    repeated: int = 0
    short: int = 0
    searched: float = 1.0
    rows: PoolRows | None = None
    references: ReferenceRows | None = None
    passed: int = 0
    unread: int = 0

    def __post_init__(self) -> None:
        self.seen = torch.zeros_like(self.trains)
        self._places: Mapping[bytes, int] = {
            self._key(text): row for row, text in enumerate(self.texts) if bool(self.trains[row])
        }

    def _key(self, text: Text) -> bytes:
        """Return what a text is recognised by in a batch."""
        return text.content

    @property
    def alone(self) -> Tensor:
        """Return (N,) bool, long texts that occur once; they alone are compared."""
        return (self.times == 1) & ~self.is_short

    @property
    def has_pairs(self) -> bool:
        """Return whether the rows are pairs, which the loss compares; all are or none is."""
        return any(text.split is not None for text in self.texts)

    def _sides(self, part: Part) -> tuple[Tensor, Tensor]:
        """Return (N,) bool, the texts of a part that are compared, and all that it has."""
        if self.has_pairs != (part == "pairs"):
            return (torch.zeros_like(self.trains),) * 2
        part = "long" if part == "pairs" else part
        if part == "long":
            return self.alone, ~self.is_short
        return (self.is_short if part == "short" else self.has_prompt,) * 2

    def check_rows(self, part: Part) -> str:
        """Return why no look at a part but the long rows can give a number; empty if one can.

        Raises:
            NoRows: the data has no texts of the part.
            UnplayableGame: prompts or pairs of other data may be from a different distribution.
        """
        compared, texts = self._sides(part)
        if not bool(texts.any()):
            reasons = {
                "long": "no row of 8 label tokens is left: ShortAnswers() compares shorter ones",
                "short": "no row has 1 to 7 label tokens",
                "prompts": "no row has a prompt of 8 tokens that have no loss and no repeats",
                "pairs": "no row is a pair of answers with 8 label tokens",
            }
            pairs = "the rows are pairs of answers: PreferenceMargin() compares them"
            raise NoRows(pairs if self.has_pairs and part != "pairs" else reasons[part])
        if part in ("prompts", "pairs") and self.way == "given":
            raise UnplayableGame(
                f"{part} of others= may be from another distribution: leave rows out (leave_out)"
            )
        sides = int((compared & self.trains).sum()), int((compared & ~self.trains).sum())
        if part == "long" or self.way == "not yet seen" or min(sides) >= MIN_TEXTS:
            return ""
        return f"{sides[0]} rows of the kind were trained on and {sides[1]} left out: too few"

    @property
    def seen_in_checkpoints(self) -> Tensor:
        """Return (N,) bool, the texts that a checkpoint says were trained on."""
        return self.seen

    def digest(self, rows: Tensor, members: Tensor) -> str:
        """Return a name of some of the texts, and of which of them are members."""
        return pool_digest([self.texts[row] for row in rows.tolist()], members)

    def remember(self, batch: TokenBatch) -> None:
        """Note which texts are in a batch that is trained on."""
        texts = texts_in(batch)
        self.passed += len(texts)
        for text in texts:
            row = self._places.get(self._key(text))
            if row is not None:
                self.seen[row] = True

    def compared(
        self, epoch: int, passed: int, *, everyone: bool = False, part: Part = "long"
    ) -> tuple[Tensor, Tensor]:
        """Return the texts to compare now, (n,) indices, and which of them are members, (n,) bool.

        Args:
            epoch: counted from 0.
            passed: texts that have been in batches so far, on all processes.
            everyone: all training rows are members, also those that no batch has held yet.
            part: which texts; of prompts and short ones those that occur once.

        Raises:
            UnplayableGame: too few of either side, or rows that were trained on and not recognised;
                what was known before says nothing of the weights now.
        """
        alone, inside = self._sides(part)
        members = self.trains & self.seen & inside
        non_members = self.trains & ~self.seen if self.way == "not yet seen" else ~self.trains
        non_members = non_members & alone
        if self.way == "not yet seen" and (epoch > 0 or not bool(non_members.any())):
            raise UnplayableGame(NO_CONTROLS)
        n = int((members & alone).sum())
        if not n:
            raise UnplayableGame("no row of the training data was recognised in its batches")
        rows, share = int((self.trains & alone).sum()), passed / self.length
        drawn = min(1.0, share) if self.once else -math.expm1(-share)
        if n < rows * drawn - MISSED * math.sqrt(rows * drawn * (1 - drawn)) - 1:
            raise UnplayableGame(
                f"only {n} of {rows} rows were recognised in the batches, after {passed} of "
                f"{self.length} were trained on: a row must read in a batch as it does alone "
                "(padded with an attention_mask, or cut to a fixed length), and a round of a "
                "federation must not begin with the same rows as the one before"
            )
        members = self.trains & inside if everyone else members
        n, n_non_members = int((members & alone).sum()), int(non_members.sum())
        if min(n, n_non_members) < MIN_TEXTS:
            raise UnplayableGame(
                f"{n} texts were trained on, {n_non_members} not: {MIN_TEXTS} of each are needed"
            )
        index = (members | non_members).nonzero()[:, 0]
        return index, members[index]

    def line(self, base: str | None) -> PoolLine | None:
        """Return the record of the texts, with the hash of what the base said, if that is known."""
        train = int(self.trains.sum())
        return PoolLine(
            run="",
            way=self.way,
            train=train,
            others=len(self.texts) - train,
            repeated=self.repeated,
            short=self.short,
            searched=self.searched,
            copied=int((self.times > 1).sum()),
            base=base,
        )

    @property
    def cost(self) -> str:
        """Return in words what is compared, for the line-up."""
        n, n_copied = int((self.trains & self.alone).sum()), int((self.times > 1).sum())
        n_non_members, n_short = int((~self.trains & self.alone).sum()), int(self.is_short.sum())
        controls = {
            "not yet seen": "those that the first epoch has not come to yet are the non-members",
            "left out": f"{n_non_members} that were held out are the non-members",
            "given": f"{n_non_members} of others= are the non-members",
        }[self.way]
        part = "" if self.searched == 1 else f" (in {self.searched:.0%} of the rows)"
        copied = f"; {n_copied} texts that stand in several rows are asked about alone"
        return (
            f"{n} rows of the training data, {controls}; {self.repeated} that other rows "
            f"repeat{part} and {self.short} short ones were excluded"
            f"{copied * (n_copied > 0)}"
            f"{f'; {n_short} with 1 to 7 label tokens are a pool of their own' * (n_short > 0)}"
        )


class CanaryPool(Pool):
    """Hold the canaries that the model is queried with, in the data or held out."""

    @classmethod
    def of_canaries(
        cls, canaries: CanarySet, loader: Any, settings: Memorization | None = None
    ) -> CanaryPool:
        """Return all canaries; the budget pays for all, or the attack is not played.

        Raises:
            UnplayableGame: the budget of the settings, if there are any, does not pay for them.
        """
        check_loader(loader)
        length = len(loader.dataset)
        if settings is not None:
            affordable(length, settings, len(canaries), forwards_of(settings, last_step=True))
        texts, included = [Text(row, row) for row in canaries.token_ids], canaries.included
        times, none = torch.ones(len(included), dtype=torch.long), torch.zeros_like(included)
        no_game = "canaries are compared with it by audit_canaries"
        return cls("left out", texts, included, length, times, none, none, no_game)

    def _key(self, text: Text) -> bytes:
        return text.ids.numpy().tobytes()

    @property
    def seen_in_checkpoints(self) -> Tensor:
        """Return (N,) False: a checkpoint does not show which canaries are in the data."""
        return torch.zeros_like(self.seen)

    def compared(
        self, epoch: int, passed: int, *, everyone: bool = False, part: Part = "long"
    ) -> tuple[Tensor, Tensor]:
        """Return all canaries, (n,) indices, and which were trained on so far, (n,) bool."""
        return torch.arange(len(self.texts)), self.trains & self.seen

    def line(self, base: str | None) -> None:
        """Return nothing: each line of results has the numbers of canaries."""


def forwards_of(settings: Memorization, *, last_step: bool) -> int:
    """Return how often each text is asked about in the first epoch, the base included."""
    return 1 + len(settings.looks) + int(last_step and settings.looks[-1:] != (1.0,))


def collect(
    loader: Any,
    settings: Memorization,
    read: Callable[[Any], TokenBatch],
    *,
    resumed: bool = False,
    short: bool = False,
    entities: FoundEntities | None = None,
    forwards: float = 1,
    show: bool = False,
) -> Pool:
    """Return the pool of a run, drawn from the data that its loader trains on.

    Rows are read as training's collate function makes them, twice, with all random states put
    back; those that do not read the same twice are refused. Every process draws the same rows.

    Args:
        loader: the training data's loader.
        settings: the user's settings.
        read: reads a batch.
        resumed: the run goes on with an earlier one, so that rows may have been trained on before.
        short: texts with 1 to 7 label tokens are asked about too.
        entities: finds the values of all rows, and of the texts that are asked about.
        forwards: The forwards that asking the model about a text takes.
        show: a bar shows how many rows are searched for values.

    Raises:
        UnplayableGame: No texts can be compared; the message names the argument to change.
    """
    check_loader(loader)
    dataset = loader.dataset
    others = find_left_out(dataset) if settings.others is None else settings.others
    way: _Way = "left out" if settings.others is None else "given"
    if others is None:
        way = "not yet seen"
        check_shuffle(loader)
        if resumed:
            raise UnplayableGame(
                "a resumed fit may have trained on any row before: add leave_out(...) to the data"
            )
    no_game = _no_game(dataset, way)
    length = len(dataset)
    size = affordable(
        length if no_game else dataset.public_length,
        settings,
        MIN_POOL,
        forwards * forwards_of(settings, last_step=way != "not yet seen"),
    )
    n_reference = (settings.reference_rows or length) * settings.trains_reference
    is_auto = settings.trains_reference and way == "left out"
    if is_auto and (n_others := length + len(others) - n_reference) >= MIN_POOL:
        size = min(size, n_others)
    generator = torch.Generator().manual_seed(settings.seed)
    sample, rest = _sample(dataset, others, size, generator, by_coins=no_game is None)
    unread = len(rest)
    rest, _ = _drawn(rest, max(MAX_ROWS, n_reference) if entities is None else unread, generator)
    with preserve_process(), bars(show):
        start = time.perf_counter()
        read_rows = [read_twice(loader, *source, read) for source in sample]
        packed = any(len(texts) != 1 for texts in read_rows)
        if packed and way == "not yet seen":
            raise UnplayableGame(
                "several texts are packed into a row, so that none is seen alone: add leave_out"
            )
        if settings.records and (packed or way == "not yet seen"):
            raise UnplayableGame(
                "Memorization(records=True) lists rows of one text each by a draw of rows: add "
                "leave_out, do not pack"
            )
        texts = [*chain(*read_rows)]
        if (settings.records or entities is not None) and any(t.split is not None for t in texts):
            raise UnplayableGame(
                "Memorization(records=True) and WatchSettings(entities=) read single texts, and "
                "the rows are pairs of answers: leave them out"
            )
        sides = [source is dataset for source, _ in sample]
        trained = [side for side, row in zip(sides, read_rows, strict=True) for _ in row]
        searched: Iterable[tuple[Text, bool]] = (
            (text, source[0] is dataset)
            for source in (rest if entities is None else track(rest, "searching rows for values"))
            for text in read_row(loader, *source, read)
        )
        if entities is not None:
            deque(entities.counting(zip(texts, trained, strict=True)), 0)
            searched = entities.counting(searched)
            if len(rest) > MAX_ROWS:
                seconds = (time.perf_counter() - start) / len(sample) * len(rest)
                rank_zero_info(f"entities: {len(rest):,} more rows are searched, ~{seconds:.0f} s")
        scored = scored_texts(texts, trained, searched)
    places = scored.rows + (scored.short_rows if short else [])
    if not places:
        n_short = 0 if short else len(scored.short_rows)
        mend = f": ShortAnswers() compares the {n_short} with 1 to 7" * (n_short > 0)
        raise UnplayableGame(
            f"of {len(texts)} texts, {scored.short} have fewer than {MIN_LABELS} label tokens "
            f"and {scored.repeated} are repeated by other rows, so that none is left to compare"
            f"{mend}"
        )
    if entities is not None:
        entities.locate([texts[row] for row in places])
    trains = torch.tensor([trained[row] for row in places], dtype=torch.bool)
    prompt_rows = {*scored.prompt_rows}
    has_prompt = torch.tensor([row in prompt_rows for row in places], dtype=torch.bool)
    has_prompt[: len(scored.rows)] &= scored.times == 1
    is_short = torch.arange(len(places)) >= len(scored.rows)
    number_of = dataset.number_of if isinstance(dataset, TrainingRows) else int
    numbers = [
        number_of(row) if source is dataset else -1  # of the user's data; -1: held out
        for (source, row), row_texts in zip(sample, read_rows, strict=True)
        for _ in row_texts
    ]
    references = None
    if is_auto:
        row_of = torch.tensor([n for n, row_texts in enumerate(read_rows) for _ in row_texts])
        inside = draw_references(len(sample), len(rest), n_reference, settings.seed)
        references = ReferenceRows(sample + rest, inside, row_of[places])
    return Pool(
        way,
        [texts[row] for row in places],
        trains,
        round(length * len(texts) / max(1, len(read_rows))),
        torch.cat([scored.times, torch.ones(int(is_short.sum()), dtype=torch.long)]),
        is_short,
        has_prompt,
        "several texts are packed into a row, and share its inclusion bit" if packed else no_game,
        way == "not yet seen" and not isinstance(loader.batch_sampler, PoissonBatchSampler),
        scored.repeated,
        scored.short - int(is_short.sum()),
        len(rest) / unread if unread else 1.0,
        PoolRows.of(texts, scored, numbers, short=short),
        references,
    )


def _no_game(dataset: Any, way: _Way) -> str | None:
    """Return why texts tell nothing of examples that are added or removed; None: they do."""
    mend = "leave_out(..., coins=True)"
    if way == "not yet seen":
        return f"rows are compared by whether they were drawn, which the account hides: {mend}"
    if way == "given":
        return f"no draw decided which texts are in the data: {mend}"
    if not isinstance(dataset, TrainingRows):
        return "another data set wraps the rows of leave_out: leave rows out of that one"
    if not dataset.record.coins:
        return f"the number of rows held out was fixed, so that inclusion bits depend: {mend}"
    return None


_Source = tuple[Any, int]


def _sample(
    dataset: Any, others: Any, size: int, generator: torch.Generator, *, by_coins: bool
) -> tuple[list[_Source], list[_Source]]:
    """Return the rows that are asked about, of both sides, and the rest.

    Args:
        dataset: the training data.
        others: what was held out; None where nothing was.
        size: rows that are asked about.
        generator: draws them.
        by_coins: a fair coin held each row out. Then which rows are asked about, in which order,
            depends on no inclusion bit.
    """
    if by_coins:
        everyone = dataset.sources()
        sample, _ = _drawn([everyone[row] for row in dataset.record.candidates], size, generator)
        absent = {*everyone} - {*sample}
        return sample, [source for source in everyone if source in absent]
    sources = [(dataset, row) for row in range(len(dataset))]
    held_out = [] if others is None else [(others, row) for row in range(len(others))]
    n_non_members = min(max(size // 2, size - len(sources)), len(held_out))
    inside, rest = _drawn(sources, size - n_non_members, generator)
    outside, rest_held_out = _drawn(held_out, n_non_members, generator)
    return inside + outside, rest + rest_held_out


def _drawn(
    sources: list[_Source], size: int, generator: torch.Generator
) -> tuple[list[_Source], list[_Source]]:
    """Return so many rows at random, and the rest."""
    order = torch.randperm(len(sources), generator=generator).tolist()
    return [sources[i] for i in order[:size]], [sources[i] for i in order[size:]]


def affordable(length: int, settings: Memorization, min_texts: int, forwards: float) -> int:
    """Return how many texts the budget pays for.

    Args:
        length: The rows of the training data.
        settings: The user's settings.
        min_texts: The number of texts that are needed.
        forwards: How often the model is queried with each text in an epoch.

    Raises:
        UnplayableGame: it pays for fewer, or ``most_texts`` is fewer; names what would be enough.
    """
    count = int(settings.max_overhead * length / (FORWARD_SHARE * forwards) + 1e-9)  # rounding
    size = min(settings.most_texts, count)
    if size >= min_texts:
        return size
    if count >= min_texts:
        raise UnplayableGame(
            f"most_texts={settings.most_texts} is below the {min_texts} texts that are needed: "
            f"settings=WatchSettings(memorization=Memorization(most_texts={min_texts}))"
        )
    needed = math.ceil(100 * min_texts * FORWARD_SHARE * forwards / length) / 100
    raise UnplayableGame(
        f"{length} rows pay for {count} of {min_texts} texts within "
        f"max_overhead={settings.max_overhead:g}: "
        f"settings=WatchSettings(memorization=Memorization(max_overhead={needed:g}))"
    )
