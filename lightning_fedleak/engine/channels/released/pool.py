"""The pool: the texts with which attacks query the trained weights during a run.

It holds members, which are rows of the training data, and non-members to compare their scores with.
The non-members must be from the members' distribution, or an attack would measure the difference.
There are three sources of them (``Pool.way``):

- ``"not yet seen"``: Rows that a shuffled first epoch has not come to yet. Needs no setting.
- ``"left out"``: Rows that :func:`~lightning_fedleak.evaluation.canaries.leave_out` held out.
- ``"given"``: The user's own texts. They are refused if scores that do not use the trained weights
  distinguish them from the rows.

:func:`collect` draws the pool before the first step. During training :meth:`Pool.remember` records
which of its texts are in each batch. At a *look*, a measurement, :meth:`Pool.compared` returns the
texts that were trained on so far and the non-members.
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
    find_left_out,
    read_row,
    read_twice,
    why_not_shuffled,
)
from lightning_fedleak.engine.options import Memorization
from lightning_fedleak.evaluation.canaries import ReferenceRows, TrainingRows, draw_references
from lightning_fedleak.evaluation.canaries.repeats import Part, PoolRows, scored_texts
from lightning_fedleak.evaluation.entities import FoundEntities
from lightning_fedleak.messages import rank_zero_info
from lightning_fedleak.model.batches import TokenBatch
from lightning_fedleak.model.model_state import preserve_process
from lightning_fedleak.model.taps import Text, pool_digest, texts_in
from lightning_fedleak.progress import bars, track
from lightning_fedleak.report.records import PoolLine

_Way = Literal["not yet seen", "left out", "given"]
"""Where non-members come from, see the module."""

FORWARD_SHARE = 0.4
"""Cost of querying the model with a text, divided by that of training on it. On two models .28 and
.38 were measured, with reading the data and statistics. Larger: fewer texts are queried."""

MIN_TEXTS = 10  # members that a look needs, and non-members; 2 for each of 5 folds of blind scores
MIN_POOL = 200  # texts that a pool needs; 100 members show a TPR of .1
MISSED = 5.0  # standard deviations that recognised rows may lie below their expected number;
# beyond that rows are read differently in batches. Not tuned
# Why packed texts cannot be compared with a DP account.
PACKED = "several texts are packed into a row, and share its inclusion bit"
# Why rows "not yet seen" are no non-members once the first epoch has come to all rows.
NO_CONTROLS = "there are no controls after epoch 1: add leave_out"
MAX_ROWS = 10_000  # rows searched for repeats: 4 to 8 s on a core; more rows take longer


class NoRows(ValueError):
    """The data has no rows of the :data:`Part` (such as short texts) that an attack compares."""


@dataclass
class Pool:
    """Hold the texts that the model is queried with.

    They are of several *parts*, each compared by separate attacks: long texts (8 label tokens or
    more), short texts, and prompts of the texts; or pairs of answers only (:data:`Part`).

    Attributes:
        way: The source of the non-members.
        texts: N different texts. Texts with copies, one for each group, are at the end of the long
            ones; after them come the short ones.
        trains: (N,) bool, whether each is in the training data.
        seen: (N,) bool, whether each has been trained on so far.
        length: The number of texts in the training data; estimated if rows hold several.
        once: Whether an epoch is known to take each row exactly once. If not, rows are expected as
            if drawn with replacement, so that fewer different ones are.
        times: (N,) int64, the number of rows of the training data that hold each text. Only texts
            in one row are used in membership games, since each row has its own inclusion bit.
        no_game: Why the texts cannot be compared with a DP account; None if an independent fair
            random bit decided for each whether it is in the data.
        passed: The number of texts in the batches so far, on this process.
        unread: The number of batches that could not be read so far, on this process.
        rows: Which rows of the user's data the texts are, for the list of members; None for
            canaries.
        indices: The index of each text among those that the pool was chosen from.
        references: The rows that references are trained on; None if none is trained.
        owners: (N,) int64, the row that holds each text; None: each text is a row.
        is_short: (N,) bool, whether a text has 1 to 7 label tokens. Short ones are compared with
            each other only.
        has_prompt: (N,) bool, whether the prompt of a text is compared.
        repeated: The number of texts excluded because another row repeats at least a part of them.
        short: The number of texts excluded because they have fewer than 8 label tokens.
        searched: The share of the data's rows that was searched for repeats.
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
    indices: Sequence[int] = ()
    references: ReferenceRows | None = None
    owners: Tensor | None = None
    passed: int = 0
    unread: int = 0

    @classmethod
    def of(
        cls,
        texts: Sequence[Text],
        trains: Sequence[bool],
        numbers: Sequence[int],
        elsewhere: Iterable[tuple[Text, bool]] = (),
        *,
        short: bool = True,
        **facts: Any,
    ) -> Pool:
        """Return the pool of those texts that can be compared.

        Args:
            texts: The texts that may be in it.
            trains: Whether each of them is in the training data.
            numbers: The number of each text's row; -1 if it is not in the training data.
            elsewhere: All other rows of the data, and whether each was trained on.
            short: Whether texts with 1 to 7 label tokens are queried too.
            facts: Further attributes of the pool.
        """
        scored = scored_texts(texts, trains, elsewhere)
        indices = scored.rows + (scored.short_rows if short else [])
        rows = PoolRows.of(texts, scored, numbers, short=short)
        is_short = torch.arange(len(indices)) >= len(scored.rows)
        prompt_rows = {*scored.prompt_rows}
        has_prompt = torch.tensor([row in prompt_rows for row in indices], dtype=torch.bool)
        return cls(
            texts=[texts[row] for row in indices],
            trains=torch.tensor([trains[row] for row in indices], dtype=torch.bool),
            times=rows.times,
            is_short=is_short,
            has_prompt=has_prompt & (rows.times == 1),
            repeated=scored.repeated,
            short=scored.short - int(is_short.sum()),
            rows=rows,
            indices=indices,
            **facts,
        )

    @classmethod
    def of_sides(
        cls, members: Sequence[Text], others: Sequence[Text], numbers: Sequence[int] | None = None
    ) -> Pool:
        """Return the pool of a finished model, whose members have all been trained on.

        Args:
            members: The texts that were trained on.
            others: The texts that were not.
            numbers: The numbers of the members' rows; None: 0, 1, and so on.
        """
        sides = [True] * len(members) + [False] * len(others)
        rows = [*(range(len(members)) if numbers is None else numbers), *[-1] * len(others)]
        no_game = "an account is compared by the monitor of a run"
        return cls.of(
            [*members, *others], sides, rows, way="given", length=len(members), no_game=no_game
        )

    def __post_init__(self) -> None:
        self.seen = torch.zeros_like(self.trains)
        self._row_by_key: Mapping[bytes, int] = {
            self._key(text): row for row, text in enumerate(self.texts) if bool(self.trains[row])
        }

    def _key(self, text: Text) -> bytes:
        """Return the bytes by which a text is recognised in a batch."""
        return text.content

    @property
    def alone(self) -> Tensor:
        """Return (N,) bool, the long texts in a single row: those that membership attacks score."""
        return (self.times == 1) & ~self.is_short

    @property
    def n_short(self) -> int:
        """Return the number of texts with fewer than 8 label tokens, queried or excluded."""
        return self.short + int(self.is_short.sum())

    @property
    def has_pairs(self) -> bool:
        """Return whether the texts are preference pairs; either all are or none is."""
        return any(text.split is not None for text in self.texts)

    def _part_masks(self, part: Part) -> tuple[Tensor, Tensor]:
        """Return (N,) bool masks of a part: its texts for membership attacks, and all its texts.

        The others are texts in several rows, which only extraction attacks query.
        """
        if self.has_pairs != (part == "pairs"):
            return (torch.zeros_like(self.trains),) * 2
        part = "long" if part == "pairs" else part
        if part == "long":
            return self.alone, ~self.is_short
        return (self.is_short if part == "short" else self.has_prompt,) * 2

    def check_rows(self, part: Part) -> str:
        """Return why no look at a part can give a number; empty if one can, or for long rows.

        Whether there are enough long rows is checked at each look, by :meth:`compared`.

        Raises:
            NoRows: The data has no texts of the part.
            UnplayableGame: Prompts or pairs of the user's own non-members may be from a different
                distribution.
        """
        compared, texts = self._part_masks(part)
        if not bool(texts.any()):
            reasons = {
                "long": "no row has 8 label tokens and no repeat: ShortAnswers() compares shorter",
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
        """Return (N,) bool, the texts trained on so far, as a checkpoint stores them."""
        return self.seen

    def digest(self, rows: Tensor, members: Tensor) -> str:
        """Return a hash of some of the texts and of which of them are members."""
        return pool_digest([self.texts[row] for row in rows.tolist()], members)

    def remember(self, batch: TokenBatch) -> None:
        """Record which texts are in a batch that is trained on."""
        texts = texts_in(batch)
        self.passed += len(texts)
        for text in texts:
            row = self._row_by_key.get(self._key(text))
            if row is not None:
                self.seen[row] = True

    def compared(
        self, epoch: int, passed: int, *, everyone: bool = False, part: Part = "long"
    ) -> tuple[Tensor, Tensor]:
        """Return the texts to compare now, (n,) indices, and which of them are members, (n,) bool.

        The members include texts in several rows, which only extraction attacks query; the numbers
        of texts are checked without these.

        Args:
            epoch: The epoch, counted from 0.
            passed: The number of texts in the batches so far, on all processes.
            everyone: Whether all training rows are members, even before a batch holds them, as a
                DP account needs it.
            part: Which part of the texts to compare.

        Raises:
            UnplayableGame: There are too few members or non-members, or too few of the rows that
                were trained on were recognised in the batches.
        """
        comparable, in_part = self._part_masks(part)
        members = self.trains & self.seen & in_part
        non_members = self.trains & ~self.seen if self.way == "not yet seen" else ~self.trains
        non_members = non_members & comparable
        if self.way == "not yet seen" and (epoch > 0 or not bool(non_members.any())):
            raise UnplayableGame(NO_CONTROLS)
        n = int((members & comparable).sum())
        if not n:
            raise UnplayableGame("no row of the training data was recognised in its batches")
        rows, share = int((self.trains & comparable).sum()), passed / self.length
        # The expected share of the rows in the batches so far; draws with replacement repeat some.
        drawn = min(1.0, share) if self.once else -math.expm1(-share)
        if n < rows * drawn - MISSED * math.sqrt(rows * drawn * (1 - drawn)) - 1:
            raise UnplayableGame(
                f"only {n} of {rows} rows were recognised in the batches, after {passed} of "
                f"{self.length} were trained on: a row must read in a batch as it does alone "
                "(padded with an attention_mask, or cut to a fixed length), and a round of a "
                "federation must not begin with the same rows as the one before"
            )
        if everyone:
            return self.everyone(part)
        return _index_of(members, non_members, comparable)

    def everyone(self, part: Part) -> tuple[Tensor, Tensor]:
        """Return all texts of a part, (n,) indices, and which of them are members, (n,) bool.

        Raises:
            UnplayableGame: There are too few on a side.
        """
        comparable, in_part = self._part_masks(part)
        return _index_of(self.trains & in_part, ~self.trains & comparable, comparable)

    def line(self) -> PoolLine:
        """Return the record of the pool."""
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
        )

    @property
    def cost(self) -> str:
        """Return in words what is compared, for the message at the start of a run."""
        n, n_copied = int((self.trains & self.alone).sum()), int((self.times > 1).sum())
        n_non_members, n_short = int((~self.trains & self.alone).sum()), int(self.is_short.sum())
        controls = {
            "not yet seen": "those that the first epoch has not come to yet are the non-members",
            "left out": f"{n_non_members} that were held out are the non-members",
            "given": f"{n_non_members} of others= are the non-members",
        }[self.way]
        part = "" if self.searched == 1 else f" (in {self.searched:.0%} of the rows)"
        copied = f"; {n_copied} texts that are in several rows are only tested for extraction"
        return (
            f"{n} rows of the training data, {controls}; {self.repeated} that other rows "
            f"repeat{part} and {self.short} short ones were excluded"
            f"{copied * (n_copied > 0)}"
            f"{f'; {n_short} with 1 to 7 label tokens are a pool of their own' * (n_short > 0)}"
        )


def _index_of(members: Tensor, non_members: Tensor, comparable: Tensor) -> tuple[Tensor, Tensor]:
    """Return the indices of members and non-members, and which are members, if they are enough."""
    n, n_non_members = int((members & comparable).sum()), int(non_members.sum())
    if min(n, n_non_members) < MIN_TEXTS:
        raise UnplayableGame(
            f"{n} texts were trained on, {n_non_members} not: {MIN_TEXTS} of each are needed"
        )
    index = (members | non_members).nonzero()[:, 0]
    return index, members[index]


def forwards_of(settings: Memorization, *, last_step: bool) -> int:
    """Return how often the model is queried with each text until the end of the first epoch.

    That is once before the first step, when it is the base, and then once at each look.

    Args:
        settings: The user's settings.
        last_step: Whether there is a look at the end of the epoch too.
    """
    return 1 + len(settings.looks) + int(last_step and 1.0 not in settings.looks)


def collect(
    loader: Any,
    settings: Memorization,
    read: Callable[[Any], TokenBatch],
    *,
    why_drawn: str = "",
    short: bool = False,
    entities: FoundEntities | None = None,
    forwards: float = 1,
    show: bool = False,
) -> Pool:
    """Return the pool of a run, drawn from the data that its loader trains on.

    1. The source of the non-members is chosen, and the budget gives the number of rows to query.
    2. These rows are drawn, the same on every process. Each is read twice by the loader's collate
       function, and refused if both readings differ. All random states are restored.
    3. More rows are searched for repeats of the texts, and for values in texts.
    4. Repeated and short texts are excluded, and the rows for references are drawn.

    Args:
        loader: The loader of the training data.
        settings: The user's settings.
        read: Returns the tokens of a batch.
        why_drawn: Why rows that the first epoch has not come to are no non-members; else empty.
        short: Whether texts with 1 to 7 label tokens are queried too.
        entities: Finds values in the texts of all rows; None if no values are named.
        forwards: The number of forward passes to query the model with a text.
        show: Whether to show a progress bar of the search for values.

    Raises:
        UnplayableGame: No texts can be compared; the message says all that has to be changed.
    """
    check_loader(loader)
    dataset = loader.dataset
    others = find_left_out(dataset) if settings.others is None else settings.others
    way: _Way = "left out" if settings.others is None else "given"
    if others is None:
        way = "not yet seen"
    no_game = _no_game(dataset, way)
    length = len(dataset)
    queries = forwards * forwards_of(settings, last_step=True)
    fewest = min(MIN_POOL, length + (0 if others is None else len(others)))
    if way != "not yet seen":
        # If an account is compared, the size must not depend on which rows were held out.
        size = affordable(length if no_game else dataset.public_length, settings, fewest, queries)
    elif why := why_drawn or why_not_shuffled(loader):
        raise UnplayableGame(f"{why}: {_mend(length, settings, fewest, queries, draws=True)}")
    else:
        first_epoch = forwards * forwards_of(settings, last_step=False)
        size = affordable(length, settings, fewest, first_epoch, drawn=queries)
    n_reference = (settings.reference_rows or length) if settings.trains_reference else 0
    trains_reference = settings.trains_reference and way == "left out"
    # One reference is trained on rows that are not queried.
    n_left = length + len(others or ()) - n_reference
    if trains_reference and settings.references == 1 and n_left >= MIN_POOL:
        size = min(size, n_left)
    generator = torch.Generator().manual_seed(settings.seed)
    sample, extra = _sample(dataset, others, size, generator, by_coins=no_game is None)
    n_extra = len(extra)
    extra, _ = _drawn(extra, max(MAX_ROWS, n_reference) if entities is None else n_extra, generator)
    with preserve_process(), bars(show):
        start = time.perf_counter()
        read_rows = [read_twice(loader, *source, read) for source in sample]
        packed = any(len(texts) > 1 for texts in read_rows)  # an empty row has none
        if packed + settings.records + (way == "not yet seen") > 1:
            raise UnplayableGame(
                "packed rows, Memorization(records=True) and data without leave_out do not go "
                "together: add leave_out, and do not pack where rows are listed"
            )
        texts = [*chain(*read_rows)]
        if (settings.records or entities is not None) and any(t.split is not None for t in texts):
            raise UnplayableGame(
                "Memorization(records=True) and WatchSettings(entities=) read single texts, and "
                "the rows are pairs of answers: leave them out"
            )
        row_of = [n for n, row_texts in enumerate(read_rows) for _ in row_texts]  # of each text
        in_data = [sample[n][0] is dataset for n in row_of]
        other_texts: Iterable[tuple[Text, bool]] = (
            (text, source[0] is dataset)
            for source in (extra if entities is None else track(extra, "searching rows for values"))
            for text in read_row(loader, *source, read)
        )
        if entities is not None:
            deque(entities.counting(zip(texts, in_data, strict=True)), 0)  # runs the generator
            other_texts = entities.counting(other_texts)
            if len(extra) > MAX_ROWS:
                seconds = (time.perf_counter() - start) / len(sample) * len(extra)
                rank_zero_info(f"entities: {len(extra):,} more rows are searched, ~{seconds:.0f} s")
        number_of = dataset.number_of if isinstance(dataset, TrainingRows) else int
        # The row number of each text in the user's data; -1: held out.
        numbers = [number_of(sample[n][1]) if sample[n][0] is dataset else -1 for n in row_of]
        pool = Pool.of(
            texts,
            in_data,
            numbers,
            other_texts,
            short=short,
            way=way,
            length=round(length * len(texts) / max(1, len(read_rows))),
            no_game=PACKED if packed else no_game,
            once=way == "not yet seen"
            and not isinstance(loader.batch_sampler, PoissonBatchSampler),
            searched=len(extra) / n_extra if n_extra else 1.0,
        )
    if entities is not None:
        entities.locate(pool.texts)
    pool.owners = torch.tensor(row_of, dtype=torch.long)[pool.indices]
    if trains_reference:
        counts = len(sample), len(extra), n_reference
        drawn = draw_references(*counts, settings.seed, settings.references)
        pool.references = ReferenceRows(sample + extra, drawn, pool.owners)
    return pool


def _mend(
    length: int, settings: Memorization, min_texts: int, forwards: float, *, draws: bool
) -> str:
    """Return what to write so that enough rows are queried, and held out first if ``draws``.

    The other arguments are those of :func:`affordable`.
    """
    n = min_texts // 2 if draws else 0
    if draws and n < MIN_TEXTS:
        return f"{2 * MIN_TEXTS} rows are the fewest that can be tested"
    needed = math.ceil(100 * min_texts * FORWARD_SHARE * forwards / (length - n)) / 100
    few = settings.most_texts < min_texts
    asked = {"max_overhead": max(needed, settings.max_overhead)}
    asked = asked if few or needed > settings.max_overhead else {}
    asked |= {"most_texts": min_texts} if few else {}
    values = ", ".join(f"{name}={value:g}" for name, value in asked.items())
    steps = [f"`train` of train, others = leave_out(rows, {n}, seed=1)"] * draws
    steps += [f"settings=WatchSettings(memorization=Memorization({values}))"] * bool(asked)
    return f"{'train on' if draws else 'give'} {' with '.join(steps)}"


def _no_game(dataset: Any, way: _Way) -> str | None:
    """Return why the texts cannot be compared with a DP account; None if they can.

    An account bounds what one example changes that is added or removed. So an independent random
    bit, drawn before the run, must have decided for each text whether it is included.
    """
    mend = "leave_out(..., coins=True)"
    if way == "not yet seen":
        return f"rows are compared by whether they were drawn, which the account hides: {mend}"
    if way == "given":
        return f"no draw decided which texts are in the data: {mend}"
    if not isinstance(dataset, TrainingRows):
        return "another data set wraps the rows of leave_out: leave rows out of that one"
    if not dataset.record.coins:
        return f"a fixed number of rows was held out, so their draws are not independent: {mend}"
    return None


_Source = tuple[Any, int]  # a data set, and the index of a row in it


def _sample(
    dataset: Any, others: Any, size: int, generator: torch.Generator, *, by_coins: bool
) -> tuple[list[_Source], list[_Source]]:
    """Return the rows to query, trained and held out, and all remaining rows.

    Args:
        dataset: The training data.
        others: The rows that were held out; None if there are none.
        size: The number of rows to query.
        generator: The source of randomness.
        by_coins: Whether a random inclusion bit (a coin) held each row out. Then the choice and the
            order of the rows to query do not depend on these bits.
    """
    if by_coins:
        sources = dataset.sources()  # of all rows of the user's data, held out or not
        sample, _ = _drawn([sources[row] for row in dataset.record.candidates], size, generator)
        remaining = {*sources} - {*sample}
        return sample, [source for source in sources if source in remaining]
    sources = [(dataset, row) for row in range(len(dataset))]
    held_out = [] if others is None else [(others, row) for row in range(len(others))]
    # Half of each side, or more of one if the other side has too few rows.
    n_non_members = min(max(size // 2, size - len(sources)), len(held_out))
    inside, other_rows = _drawn(sources, size - n_non_members, generator)
    outside, other_held_out = _drawn(held_out, n_non_members, generator)
    return inside + outside, other_rows + other_held_out


def _drawn(
    sources: list[_Source], size: int, generator: torch.Generator
) -> tuple[list[_Source], list[_Source]]:
    """Return ``size`` rows, or all, at random, and the remaining ones."""
    order = torch.randperm(len(sources), generator=generator).tolist()
    return [sources[i] for i in order[:size]], [sources[i] for i in order[size:]]


def affordable(
    length: int, settings: Memorization, min_texts: int, forwards: float, *, drawn: float = 0
) -> int:
    """Return the number of texts that can be queried within ``max_overhead``.

    ``max_overhead`` is a share of the time of an epoch, in which each row is trained on once. A
    forward pass costs :data:`FORWARD_SHARE` of that.

    Args:
        length: The number of rows of the training data.
        settings: The user's settings.
        min_texts: The number of texts that are needed.
        forwards: The number of forward passes for each text in an epoch.
        drawn: The same if rows are held out, which the message then advises; 0: it does not.

    Raises:
        UnplayableGame: ``max_overhead`` or ``most_texts`` is too small; the message says which
            value is enough.
    """
    count = int(settings.max_overhead * length / (FORWARD_SHARE * forwards) + 1e-9)  # rounding
    size = min(settings.most_texts, count)
    if size >= min_texts:
        return size
    mend = _mend(length, settings, min_texts, drawn or forwards, draws=drawn > 0)
    raise UnplayableGame(f"{length} rows allow {size} of {min_texts} texts: {mend}")
