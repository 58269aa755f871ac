"""Personal data by kind: values in texts, their tokens, and how well the weights memorized them.

Values match patterns or word lists. A planted value was drawn from a known set of candidates, so
that the model's rank of it among them is its score. A value that occurs in a user's text was drawn
from no known set and has no rank. Instead, values of training texts are compared with values of the
same kind in held-out texts.

A *look* is one measurement of the model. A *series* holds the rates of one group of values over all
looks, and has a name in the logs. The *base* is the model before training.
"""

import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from scipy.stats import fisher_exact, rankdata
from torch import Tensor

from lightning_fedleak.attacks.memorization import EntityGuess, gain_beyond
from lightning_fedleak.evaluation.metrics.clustered import auc, spent_at
from lightning_fedleak.evaluation.metrics.rates import Rate, flat, proportion
from lightning_fedleak.evaluation.metrics.released import PERMUTATIONS, RESAMPLES, permutation_test
from lightning_fedleak.model.batches import IGNORE_INDEX
from lightning_fedleak.model.snapshots import ReleasedModel, TokenSnapshot
from lightning_fedleak.model.taps import Text

_Finder = Callable[[str], Iterator[tuple[int, int]]]
"""Yields the start and the end of each value in a text."""

_MONTH = r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*\.?"
_DATE = (  # 2024-5-17; 17.5.2024; 17. May, 2024; May 17, 2024
    r"\d{4}-\d{1,2}-\d{1,2}",
    r"\d{1,2}([./-])\d{1,2}\1(?:\d{4}|\d\d)",
    rf"\d{{1,2}}\.? {_MONTH},? \d{{4}}",
    rf"{_MONTH} \d{{1,2}},? \d{{4}}",
)
_MAX_GROUPS = 9  # groups of characters in the longest IBAN, which has 34 of them
_PROBE = "Mail jo@ex-1.de, +49 30 12/34, (AB1234): DE89."  # a tokenizer must decode it unchanged
_MAX_CHARACTER_TOKENS = 4  # tokens of one character: the bytes of UTF-8


def is_card_number(value: str) -> bool:
    """Return whether the digits of a value are 13 to 19 with a right check digit (Luhn).

    Examples:
        >>> from lightning_fedleak.evaluation.entities import is_card_number
        >>> is_card_number("4111 1111 1111 1111"), is_card_number("4111 1111 1111 1112")
        (True, False)
    """
    digits = [int(character) for character in reversed(value) if character.isdigit()]
    doubled = [sum(divmod(2 * digit, 10)) for digit in digits[1::2]]
    return 13 <= len(digits) <= 19 and (sum(digits[::2]) + sum(doubled)) % 10 == 0


def is_iban(value: str) -> bool:
    """Return whether a value is an account number with right check digits (ISO 13616, mod 97).

    Examples:
        >>> from lightning_fedleak.evaluation.entities import is_iban
        >>> is_iban("DE89 3704 0044 0532 0130 00"), is_iban("DE88 3704 0044 0532 0130 00")
        (True, False)
    """
    plain = value.replace(" ", "")
    if not re.fullmatch(r"[A-Z]{2}\d\d[A-Z0-9]{11,30}", plain):
        return False
    return int("".join(str(int(x, 36)) for x in plain[4:] + plain[:4])) % 97 == 1


def _pattern_finder(pattern: str, is_valid: Callable[[str], bool] = bool) -> _Finder:
    """Return a finder of whole words that match a pattern and are valid; by default, all are."""
    compiled = re.compile(rf"(?<!\w)(?:{pattern})(?!\w)")

    def find(text: str) -> Iterator[tuple[int, int]]:
        return (match.span() for match in compiled.finditer(text) if is_valid(match[0]))

    return find


def _check_digit_finder(pattern: str, is_valid: Callable[[str], bool]) -> _Finder:
    """Return a finder of valid values in matches, whose groups may belong to different values.

    From each group on, the longest valid run of groups is a value.
    """
    runs = _pattern_finder(pattern)

    def find(text: str) -> Iterator[tuple[int, int]]:
        for begin, end in runs(text):
            groups = [match.span() for match in re.compile(r"\w+").finditer(text, begin, end)]
            while groups:
                start, ends = groups[0][0], [end for _, end in groups[:_MAX_GROUPS]]
                valid = (n for n, end in enumerate(ends, 1) if is_valid(text[start:end]))
                if n := max(valid, default=0):
                    yield start, ends[n - 1]
                groups = groups[max(n, 1) :]

    return find


def _is_phone_number(value: str) -> bool:
    """Return whether a value has 7 to 15 digits, and begins with 0 or has another character."""
    n = sum(map(str.isdigit, value))
    return 7 <= n <= 15 and (n < len(value) or value[0] == "0")


def _is_code(value: str) -> bool:
    """Return whether a value has at least three digits and a letter."""
    return sum(map(str.isdigit, value)) >= 3 and any(map(str.isalpha, value))


KINDS: Mapping[str, _Finder] = {
    "email": _pattern_finder(r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+"),
    "iban": _check_digit_finder(r"[A-Z]{2}\d\d[A-Z0-9]*(?: [A-Z0-9]{1,4})*", is_iban),
    "card": _check_digit_finder(r"\d{4,19}(?:[ -]\d{2,7})*", is_card_number),
    "date": _pattern_finder("|".join(_DATE)),
    "phone": _pattern_finder(
        r"(?:\+?\d{1,3}[ .-]?)?(?:\(\d{1,5}\)[ .-]?)?\d{2,8}(?:[ ./-]\d{2,8}){0,5}",
        _is_phone_number,
    ),
    "code": _pattern_finder(r"[A-Za-z0-9][A-Za-z0-9_-]{4,}[A-Za-z0-9]", _is_code),
}
"""The kinds with a pattern; where values overlap, the earlier kind has precedence."""


def finders_of(kinds: Sequence[str | Path]) -> dict[str, _Finder]:
    """Return the finder of each kind, by the kind's name.

    Args:
        kinds: Names in :data:`KINDS`, or files with one value a line; the name of such a file
            without its ending is the name of its kind. Earlier files have precedence over later.

    Raises:
        ValueError: There is no kind or file of this name, a kind is named twice, or a file has no
            values.
    """
    finders: dict[str, _Finder] = {}
    for kind in [kinds] if isinstance(kinds, str) else kinds:
        is_pattern, name = str(kind) in KINDS, Path(kind).stem
        is_new = name not in finders and (is_pattern or name not in KINDS)
        if (
            not is_new
            or not re.fullmatch(r"[\w.-]+", name)
            or not (is_pattern or Path(kind).is_file())
        ):
            raise ValueError(
                f"entities holds '{kind}': give {', '.join(KINDS)}, or a file with a new name of "
                "letters, digits, '_', '-' and '.'"
            )
        finders[name] = KINDS[name] if is_pattern else _list_finder(Path(kind))
    return finders


def _list_finder(path: Path) -> _Finder:
    """Return a finder of the values in a file; any characters may separate the words of a value.

    Raises:
        ValueError: The file has no values, or a line without a letter or a digit.
    """
    word = re.compile(r"\w+")
    lines = path.read_text(encoding="utf-8").splitlines()
    values = {tuple(word.findall(line)) for line in lines if line.strip()}
    if () in values or not values:
        raise ValueError(f"'{path}' in entities has a line without a letter or a digit, or none")
    lengths = sorted({len(value) for value in values}, reverse=True)

    def find(text: str) -> Iterator[tuple[int, int]]:
        words = [*word.finditer(text)]
        for n in lengths:
            for first in range(len(words) - n + 1):
                part = words[first : first + n]
                if tuple(match[0] for match in part) in values:
                    yield part[0].start(), part[-1].end()

    return find


def spans_of(text: str, finders: Mapping[str, _Finder]) -> list[tuple[str, int, int]]:
    """Return the kind, the start and the end of each value in a text; none overlap.

    Files have precedence over patterns. The patterns of all kinds are searched, so that an account
    number does not count as a telephone number if only those are wanted.

    Examples:
        >>> from lightning_fedleak.evaluation.entities import KINDS, spans_of
        >>> spans_of("Call 555-0123, or write to jo@example.com.", KINDS)
        [('phone', 5, 13), ('email', 27, 41)]
    """
    taken: list[tuple[str, int, int]] = []
    for kind in [*(name for name in finders if name not in KINDS), *KINDS]:
        for start, end in {**KINDS, **finders}[kind](text):
            if all(end <= first or last <= start for _, first, last in taken):
                taken.append((kind, start, end))
    return sorted((span for span in taken if span[0] in finders), key=lambda span: span[1])


class _Value(NamedTuple):
    """A value in a text.

    Attributes:
        kind: The kind.
        key: The letters and digits, equal for all ways to write the value; it is private.
        start: The index of the first token.
        end: The index after the last token.
    """

    kind: str
    key: str
    start: int
    end: int


class EntityFinder:
    """Find values in rows of token ids.

    Args:
        kinds: The kinds, see :func:`finders_of`.
        tokenizers: The first that decodes is used; some may be None.

    Raises:
        ValueError: A kind is unknown, there is no tokenizer, or it does not decode a text to what
            it encoded.

    Examples:
        >>> from transformers import ByT5Tokenizer
        >>> from lightning_fedleak.evaluation.entities import EntityFinder
        >>> tokenizer = ByT5Tokenizer()
        >>> finder = EntityFinder(["phone"], [tokenizer])
        >>> [(x.start, x.end) for x in finder.find(tokenizer("Call 555-0123.").input_ids)]
        [(5, 13)]
    """

    def __init__(self, kinds: Sequence[str | Path], tokenizers: Iterable[Any]) -> None:
        self._finders = finders_of(kinds)
        self.kinds = tuple(self._finders)
        self._pieces: dict[tuple[int, ...], str] = {}
        self._tokenizer = cast("Any", next((x for x in tokenizers if hasattr(x, "decode")), None))
        self._preceding: list[int] = []  # the ids of a letter, after which pieces are decoded
        decoded = None
        with suppress(Exception):  # whatever a user's tokenizer raises
            assert self._tokenizer is not None
            ids, self._preceding = (
                self._tokenizer(text, add_special_tokens=False)["input_ids"]
                for text in (_PROBE, "a")
            )
            decoded = "".join(text for text, _ in self._parts(ids)).strip()
        if self.kinds and decoded != _PROBE:
            raise ValueError(
                "entities= needs settings=WatchSettings(tokenizer=...) that decodes what it encoded"
            )

    def _piece(self, ids: tuple[int, ...]) -> str:
        """Return the text of tokens that follow a letter, so that a space before them is kept."""
        if ids not in self._pieces:
            before, after = (
                self._tokenizer.decode(part, clean_up_tokenization_spaces=False)
                for part in (self._preceding, [*self._preceding, *ids])
            )
            self._pieces[ids] = after[len(before) :]
        return self._pieces[ids]

    def _parts(self, ids: Sequence[int]) -> Iterator[tuple[str, int]]:
        """Yield the text of each token, or of those that share a character, and their number."""
        group: tuple[int, ...] = ()
        for token in ids:
            group = (*group, token)
            piece = self._piece(group)
            if len(group) == _MAX_CHARACTER_TOKENS or (piece and not piece.endswith("\ufffd")):
                yield piece, len(group)
                group = ()
        if group:
            yield self._piece(group), len(group)

    def find(self, ids: Sequence[int]) -> list[_Value]:
        """Return the values in a text without padding, in the order of the text."""
        if not self.kinds:
            return []
        text, starts, ends = "", list[int](), list[int]()
        for piece, n in self._parts(ids):
            starts += [len(text)] * n
            text += piece
            ends += [len(text)] * n
        return [
            _Value(
                kind,
                # 1-11-2020 is not 11-1-2020
                ("-" * (kind == "date")).join(re.findall(r"[^\W_]+", text[start:end])).casefold(),
                bisect_right(ends, start),
                bisect_left(starts, end),
            )
            for kind, start, end in spans_of(text, self._finders)
        ]

    def marks(self, ids: Tensor) -> dict[str, Tensor]:
        """Return for each kind (L,) bool, whether a token of a text (L,) is part of a value."""
        marks = {kind: torch.zeros(len(ids), dtype=torch.bool) for kind in self.kinds}
        for value in self.find(ids.tolist()):
            marks[value.kind][value.start : value.end] = True
        return marks

    def has_letter(self, token: int) -> bool:
        """Return whether a token has a letter; digits and punctuation are in every text."""
        return any(map(str.isalpha, self._piece((token,))))


# The number of values in users' texts that members and non-members each need. With fewer, the
# intervals are too wide to be of use. Not tuned.
MIN_VALUES = 20
MIN_ENTITIES = 10  # the same for planted values that are repeated equally often, and held-out ones
# The first part of the names of series, ``entity/<kind>/<prompt or label>``. The name of a series
# of values that occur in several training rows ends in ``_x2``.
ENTITY = "entity"


def clustered_auc(
    scores: Tensor, members: Tensor, rows: Tensor, look: int = 1, alpha: float = 0.05
) -> dict[str, float]:
    """Return the AUC of values that are clustered in rows, by the names of the logs.

    - ``auc``, with ``_low`` and ``_high``: Ties count half. The interval takes only rows to be
      independent. ``auc_provable`` is the lower end that a perfect ranking of the rows would have.
    - ``p_value``: The exact p-value of "values of members rank no higher", by permutation of the
      memberships of rows. ``auc_low`` is above .5 only if this test rejects too.

    Args:
        scores: (N,) the scores of the values; a higher one is evidence of membership.
        members: (N,) bool, whether each value is a member; the same for all values of a row.
        rows: (N,) int64, the row of each value.
        look: The number of the look, from 1; the interval holds at all looks together.
        alpha: The probability of an error over all looks together.
    """
    spent = spent_at(look, alpha)
    score, member, code = scores.double().numpy(), members.numpy(), np.unique(rows, False, True)[1]
    area = auc(score, member, code, spent, RESAMPLES, np.random.default_rng(0))
    means = np.bincount(code, rankdata(score)) / np.bincount(code)
    member_rows = np.bincount(code, member) > 0
    error = permutation_test(torch.from_numpy(means), torch.from_numpy(member_rows))
    if error > spent / 2:
        area = replace(area, low=min(area.low, 0.5))
    min_rows = min(int(member_rows.sum()), int((~member_rows).sum()))
    provable = (spent / 2) ** (1 / min_rows)
    return {
        **flat({"auc": area}),
        "auc_provable": min(provable, 0.5) if spent / 2 < 1 / (1 + PERMUTATIONS) else provable,
        "p_value": min(1.0, error * alpha / spent),
        "alpha": spent,
    }


class _Occurrence(NamedTuple):
    """An occurrence of a value in a row, from token ``start`` up to but without token ``end``.

    Attributes:
        side: ``prompt`` or ``label``, the part of the row that the value is in.
        value: The kind of the value and its key, the same for all spellings of the value.
        row: The row.
        start: The first token.
        end: The token after the last one.
    """

    side: str
    value: tuple[str, str]
    row: int
    start: int
    end: int


class FoundEntities:
    """Values in a user's texts, of which some are training texts.

    A value that occurs in only one row is a member if its row was drawn into the training data. A
    value in several rows is a member if at least one of them is a training row, wherever else it
    occurs. Members in two training rows or more have a series of their own.

    Args:
        finder: The finder of the values.
        are_predicted: Whether the model predicts next tokens; else every series is unknown.
    """

    def __init__(self, finder: EntityFinder, are_predicted: bool = True) -> None:
        self._finder = finder
        self.are_predicted = are_predicted
        # The number of rows, and of training rows, with each value (kind and key).
        self._rows: Counter[tuple[str, str]] = Counter()
        self._trained: Counter[tuple[str, str]] = Counter()
        self._occurrences: Sequence[_Occurrence] = ()

    def counting(self, rows: Iterable[tuple[Text, bool]]) -> Iterator[tuple[Text, bool]]:
        """Yield rows of a text and its membership, after counting the values of each."""
        for text, member in rows:
            keys = {(value.kind, value.key) for value in self._finder.find(text.ids.tolist())}
            self._rows.update(keys)
            self._trained.update(keys if member else ())
            yield text, member

    def locate(self, texts: Sequence[Text]) -> None:
        """Find the values of the texts that the model is queried with.

        A value that begins in a prompt and ends in a label has no series. The first token of a text
        is never predicted, and is no part of a value.
        """
        self._occurrences = []
        for row, text in enumerate(texts):
            labels = (text.labels != IGNORE_INDEX).tolist()
            for value in self._finder.find(text.ids.tolist()):
                start = max(1, value.start)
                in_label = {*labels[start : value.end]}
                if len(in_label) == 1:
                    side, key = "label" if in_label.pop() else "prompt", (value.kind, value.key)
                    self._occurrences.append(_Occurrence(side, key, row, start, value.end))

    def compare(
        self,
        now: TokenSnapshot,
        base: TokenSnapshot,
        rows: Tensor,
        members: Tensor,
        look: int = 1,
        alpha: float = 0.05,
    ) -> dict[str, dict[str, float] | str]:
        """Return the metrics of each series, or the reason why they are unknown.

        The score of a value is the gain of its tokens over the base, minus the gain of similar
        values (:func:`~lightning_fedleak.attacks.memorization.gain_beyond`), since training
        improves the format of all values. The metrics are those of :func:`clustered_auc`, and the
        numbers of values, ``members`` and ``others``.

        Args:
            now: The trained model's log probabilities of all tokens of the texts.
            base: The base's log probabilities of the same tokens.
            rows: (n,) the texts that are compared.
            members: (n,) bool, whether each of them is a training text.
            look: The number of the look, from 1.
            alpha: The probability of an error over all looks together.
        """
        memberships = dict(zip(rows.tolist(), members.tolist(), strict=True))
        results: dict[str, dict[str, float] | str] = {}
        for name in entity_names(self._finder.kinds):
            if not self.are_predicted:
                results[name] = "the model predicts no next tokens, so that values have no score"
                continue
            values = self._select(name, memberships)
            value_rows = torch.tensor([value.row for value in values], dtype=torch.long)
            is_member = torch.tensor([memberships[v.row] for v in values], dtype=torch.bool)
            n, n_held_out = int(is_member.sum()), int((~is_member).sum())
            if min(n, n_held_out) < MIN_VALUES:
                results[name] = (
                    f"{n} values were trained on and {n_held_out} were not: {MIN_VALUES} of each "
                    "are needed. Hold out more rows, or plant values (with_entities)"
                )
                continue
            # The places of each value's tokens among the predictions of its text.
            columns = torch.zeros(len(values), now.labels.shape[1], dtype=torch.bool)
            for i, value in enumerate(values):
                columns[i, value.start - 1 : value.end - 1] = True  # logits predict the next token
            answers = [model.rows(value_rows).within(columns) for model in (now, base)]
            results[name] = "a log probability of the model or its base is not finite"
            if all(bool(answer.mean_log_probs().isfinite().all()) for answer in answers):
                released = ReleasedModel(answers[0], answers[1], value_rows)
                scores = gain_beyond(released, torch.ones_like(is_member))
                counts = {"members": float(n), "others": float(n_held_out)}
                results[name] = clustered_auc(scores, is_member, value_rows, look, alpha) | counts
        return results

    def _select(self, name: str, memberships: Mapping[int, bool]) -> list[_Occurrence]:
        """Return the first occurrence of each value of a series in the compared texts."""
        _, kind, side = name.split("/")
        side, repeats, _ = side.partition("_x2")
        firsts: dict[tuple[str, str], _Occurrence] = {}
        for match in self._occurrences:
            member, n_trained = memberships.get(match.row), self._trained[match.value]
            counts = n_trained > 1 if member and repeats else self._rows[match.value] == 1
            if (match.value[0], match.side) == (kind, side) and member is not None and counts:
                firsts.setdefault(match.value, match)
        return [*firsts.values()]


def entity_names(kinds: Iterable[str]) -> list[str]:
    """Return the names of the series of some kinds of values."""
    groups = [f"{ENTITY}/{kind}/{side}" for kind in kinds for side in ("prompt", "label")]
    return [f"{group}{end}" for group in groups for end in ("", "_x2")]


def entity_values(
    guess: EntityGuess,
    members: Tensor,
    non_members: Tensor,
    repeats: Tensor,
    times: Sequence[int],
    *,
    look: int = 1,
    alpha: float = 0.05,
) -> dict[str, float] | str:
    """Return the metrics of one kind of planted value, or the reason why they are unknown.

    Planted values that occur in the same number of training rows are a tier.

    - ``first``, with ``_low`` and ``_high``: The share of members that rank first among their
      candidates, minus the share of non-members that do; the largest over the tiers.
      ``first_provable`` is its lower end if all members and no non-members rank first.
    - ``greedy``: The same difference for values that greedy decoding writes.
    - ``first_others`` and ``greedy_others``: The shares of non-members.
    - ``median_rank``: The median rank of the members.
    - ``candidates``: The largest number of candidates of a value.
    - ``p_value``: The p-value of "members rank no higher", by permuted inclusion bits, corrected
      for all looks.

    An interval holds whatever the model does: both shares have exact intervals (Clopper-Pearson),
    each at half of this look's share of ``alpha``. The lower end of a difference is above 0 only
    if Fisher's exact test of the random inclusion rejects too.

    Args:
        guess: The attack's ranks of N values.
        members: (N,) bool, whether each value was trained on.
        non_members: (N,) bool, whether each value was held out.
        repeats: (N,) the number of training rows that a value occurs in if it is included.
        times: The numbers of rows that define the tiers, which share the probability of an error.
        look: The number of the look, from 1.
        alpha: The probability of an error over all looks together.
    """
    tiers = [tier for n in times if int((tier := members & (repeats == n)).sum()) >= MIN_ENTITIES]
    n_held_out = int(non_members.sum())
    if not tiers or n_held_out < MIN_ENTITIES:
        counts = ", ".join(f"{int((members & (repeats == n)).sum())} x{n}" for n in times)
        return (
            f"{n_held_out} values were held out; trained on, by number of rows: {counts}. "
            f"{MIN_ENTITIES} of each are needed: plant more (count=)"
        )
    spent = spent_at(look, alpha) / len(tiers)
    values: dict[str, float] = {}
    for name, hits in (("first", guess.ranks == 1), ("greedy", guess.greedy)):  # rank 1: likeliest
        rates = [_excess(hits, tier, non_members, spent) for tier in tiers]
        ends = zip(*((rate.value, rate.low, rate.high) for rate in rates), strict=True)
        values |= flat({name: Rate(*map(max, ends))})
        values[f"{name}_others"] = float(hits[non_members].double().mean())
        values[f"{name}_provable"] = min(_excess(t, t, non_members, spent).low for t in tiers)
    in_tiers = torch.stack(tiers).any(0)
    pool = in_tiers | non_members
    error = permutation_test(-guess.ranks[pool].double(), in_tiers[pool])
    return values | {
        "median_rank": float(guess.ranks[in_tiers].double().median()),
        "candidates": float(guess.candidates[pool].max()),
        "p_value": min(1.0, error * alpha / spent_at(look, alpha)),
        "members": float(in_tiers.sum()),
        "others": float(n_held_out),
        "alpha": spent_at(look, alpha),
    }


def _excess(hits: Tensor, members: Tensor, non_members: Tensor, alpha: float) -> Rate:
    """Return the share of hits of members minus that of non-members, with exact ends."""
    counts = [[int(hits[s].sum()), int((~hits[s]).sum())] for s in (members, non_members)]
    tpr, fpr = (proportion(n_hits, n_hits + n, 1 - alpha / 2) for n_hits, n in counts)
    low = tpr.low - fpr.high
    if fisher_exact(counts, alternative="greater").pvalue > alpha / 2:
        low = min(low, 0.0)
    return Rate(tpr.value - fpr.value, low, tpr.high - fpr.low)
