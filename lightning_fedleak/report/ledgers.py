"""What the ledgers of a fit hold: files that know every release, also of a fit that was killed."""

from __future__ import annotations

import glob
import hashlib
from collections.abc import Sequence
from pathlib import Path

from lightning_fedleak.records.files import first_of


def read_ledgers(
    paths: Sequence[str | None], problems: list[str]
) -> tuple[dict[str, str], dict[str, int]]:
    """Return SHA-256 and releases of ledgers, by their names.

    Args:
        paths: of one defence, of which each client may have a ledger of its own; None has none.
        problems: gets a sentence for each ledger with lines that are no releases.
    """
    hashes: dict[str, str] = {}
    counts: dict[str, int] = {}
    for place in (Path(path) for path in dict.fromkeys(paths) if path):
        try:
            parts = place.parent.glob(f"{glob.escape(place.name)}.*-of-*")
            files = [place] if place.is_file() else sorted(parts)
            for file in files:
                content = file.read_bytes()
                hashes[file.name] = hashlib.sha256(content).hexdigest()
                counts[file.name], odd = _count_releases(content)
                if odd:
                    problems.append(
                        f"{len(odd)} of the lines of the ledger {file.name} are no releases: "
                        f"{first_of(odd)}"
                    )
            if not files:
                hashes[place.name] = "the file is not there"
        except (OSError, ValueError) as error:
            hashes[place.name] = f"cannot be read: {type(error).__name__}"
    return hashes, counts


def _count_releases(ledger: bytes) -> tuple[int, list[int]]:
    """Return how many releases the lines count (noise, rate, count), and numbers of odd lines."""
    releases, odd = 0, []
    for number, line in enumerate(ledger.splitlines(), 1):
        try:
            _, _, count = map(float, line.split())
            releases += int(count)
        except (ValueError, OverflowError):
            odd.append(number)
    return releases, odd
