"""Counting: how often a row of words has been released, and how long the longest was."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class ReleaseCounter:
    """How often at most one row has been released, over all fits so far.

    Rows are told apart by digests, see
    :func:`~lightning_fedleak.defenses.token_streams.row_digests`, which are kept for one fit only.

    Attributes:
        batches: how many there were.
        longest: words of the longest row.
    """

    def __init__(self) -> None:
        self.batches = 0
        self.longest = 0
        self._earlier = 0
        self._in_fit: dict[bytes, int] = {}
        self._most = 0
        self._by_all = 0

    @property
    def most(self) -> int:
        """Releases of the row that was released most often, earlier fits included.

        The rows of one fit are not known in the next: the counts of both are added as if the
        same row had been released most often in each.
        """
        return self._earlier + max(self._most, self._by_all)

    @property
    def own(self) -> tuple[int, int]:
        """What this process counted: releases in this fit, and words of the longest row."""
        return self._most, self.longest

    def count(self, digests: Iterable[bytes], longest: int, memoized: bool) -> None:
        """One batch more: its rows, and the words of the longest of them."""
        self.batches += 1
        self.longest = max(self.longest, longest)
        if memoized:
            self._most = 1
            return
        for digest in digests:
            self._in_fit[digest] = count = self._in_fit.get(digest, 0) + 1
            self._most = max(self._most, count)

    def hear(self, counts: Sequence[Sequence[int]], add: bool) -> None:
        """Raises the counts to what holds for all processes.

        Args:
            counts: :attr:`own` of every process, this one too.
            add: whether the same row, released by two of them, was released twice: then the sum of
                what each released most often, which no row exceeds; else the largest.
        """
        releases, lengths = zip(*counts, strict=True)
        self._by_all = sum(releases) if add else max(releases)
        self.longest = max(lengths)

    def next_fit(self) -> None:
        """The same rows are new releases from here on."""
        self._earlier, self._most, self._by_all = self.most, 0, 0
        self._in_fit.clear()

    def state_dict(self) -> dict[str, int]:
        """Counts alone."""
        return {"batches": self.batches, "releases": self.most, "longest": self.longest}

    def load(self, batches: int, releases: int, longest: int) -> None:
        """Goes on from a checkpoint's counts; none runs backwards, not even in one process."""
        self._earlier, self._most, self._by_all = max(self.most, releases), 0, 0
        self._in_fit.clear()
        self.batches = max(self.batches, batches)
        self.longest = max(self.longest, longest)


__all__ = ["ReleaseCounter"]
