"""Personal data by kind: values in texts that match patterns or word lists, and their tokens."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

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
