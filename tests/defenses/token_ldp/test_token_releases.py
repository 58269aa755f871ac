"""The counter of releases against a plain count of all releases of all fits."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from lightning_fedleak.defenses.token_ldp.token_ldp import _ReleaseCounter

ROWS = [bytes([i]) for i in range(4)]
FITS = st.lists(
    st.lists(st.lists(st.sampled_from(ROWS), max_size=5), max_size=5), min_size=1, max_size=4
)


@given(fits=FITS, interruption=st.sampled_from(["none", "same process", "new process"]))
def test_no_release_is_forgotten(fits: list[list[list[bytes]]], interruption: str) -> None:
    """Exact within a fit; over several at least the truth, whatever carries the counts over."""
    counter, truth, bound, longest = _ReleaseCounter(), Counter[bytes](), 0, 0
    for fit in fits:
        in_fit = Counter[bytes]()
        for batch in fit:
            counter.count(batch, len(batch), memoized=False)
            in_fit.update(batch)
            longest = max(longest, len(batch))
            assert counter.max_releases == bound + max(in_fit.values(), default=0)
        truth += in_fit
        bound = counter.max_releases
        assert bound >= max(truth.values(), default=0)
        state = counter.state_dict()
        if interruption == "new process":
            counter = _ReleaseCounter()
        if interruption != "none":
            counter.load(**state)
        counter.next_fit()
        assert (counter.max_releases, counter.longest) == (bound, longest)
    assert counter.batches == sum(map(len, fits))


def test_an_older_checkpoint_takes_no_release_back() -> None:
    counter = _ReleaseCounter()
    for _ in range(3):
        counter.count(ROWS, 7, memoized=False)
    counter.load(batches=1, releases=1, longest=2)
    assert counter.state_dict() == {"batches": 3, "releases": 3, "longest": 7}


def test_memoised_rows_are_released_once_in_a_fit() -> None:
    counter = _ReleaseCounter()
    for fit in range(1, 4):
        for _ in range(5):
            counter.count(ROWS * 2, 3, memoized=True)
        assert counter.max_releases == fit
        counter.next_fit()


@given(
    by_process=st.lists(st.lists(st.sampled_from(ROWS), max_size=8), min_size=2, max_size=4),
    add=st.booleans(),
)
def test_what_all_processes_count_bounds_each(by_process: list[list[bytes]], add: bool) -> None:
    counters = [_ReleaseCounter() for _ in by_process]
    for counter, rows in zip(counters, by_process, strict=True):
        counter.load(batches=0, releases=2, longest=3)
        counter.count(rows, len(rows), memoized=False)
    local = [counter.counts for counter in counters]
    each = [Counter(rows) for rows in by_process]
    truth = (
        sum(each, Counter()) if add else Counter({row: max(c[row] for c in each) for row in ROWS})
    )
    for counter in counters:
        counter.merge(local, add)
        assert counter.max_releases >= 2 + max(truth.values(), default=0)
        assert counter.longest == max(3, *map(len, by_process))
    assert len({str(counter.state_dict()) for counter in counters}) == 1
    after = _ReleaseCounter()
    after.load(**counters[0].state_dict())
    after.count(ROWS, 1, memoized=False)
    assert after.max_releases == counters[0].max_releases + 1
    if not add:
        assert counters[0].max_releases == 2 + max(truth.values(), default=0)
