"""What a trained model gives away of canaries that were planted in its training texts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch

from lightning_fedleak.attacks.memorization import Canaries, ExtractionGuess
from lightning_fedleak.cli.finetuning import SourceError
from lightning_fedleak.evaluation.canaries import InclusionRecord
from lightning_fedleak.evaluation.canaries.items import digest_of
from lightning_fedleak.evaluation.metrics.released import canary_tiers
from lightning_fedleak.model.snapshots import Observation, ReleasedModel, TokenSnapshot
from lightning_fedleak.model.taps import Text

Tiers = Mapping[int, dict[str, float] | str]
"""The values of canaries by how often each was repeated, or why they are unknown."""


class PlantedCanaries:
    """Canaries that were planted or left out, which a model and its base are asked about.

    Args:
        file: the canaries as JSON lines, in their order: ``input_ids``, and what else they hold.
        record: that :func:`~lightning_fedleak.evaluation.canaries.with_canaries` wrote.

    Attributes:
        texts: of the canaries.
        record: which of them were planted, and how often.

    Raises:
        SourceError: a file cannot be read, or the canaries are not those of the record.
    """

    def __init__(self, file: Path, record: Path) -> None:
        try:
            self.record = InclusionRecord.load(record)
            rows = [json.loads(line) for line in file.read_text("utf-8").splitlines() if line]
            ids = [torch.tensor(row["input_ids"]) for row in rows]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise SourceError(f"--canaries '{file}' and --record '{record}': {error}") from error
        digests = {digest: n for n, digest in enumerate(self.record.digests)}
        matches = [
            {digests.get(digest_of(form, "a canary")) for form in _forms(row)} for row in rows
        ]
        if len(rows) != len(digests) or any(n not in places for n, places in enumerate(matches)):
            raise SourceError(
                f"--canaries '{file}' does not hold the canaries of --record '{record}' in their "
                "order: give each line the fields that the planted examples have"
            )
        self.texts = [Text(row, row) for row in ids]

    def compare(self, base: TokenSnapshot, now: TokenSnapshot, suffix: int | None) -> Tiers:
        """Return what each tier shows, or why it is unknown, as the monitor does at one look.

        Args:
            base: what the base said of the texts.
            now: what the trained model says of them.
            suffix: tokens at the end that count; None: all that are predicted.

        Raises:
            SourceError: a canary has no token before those that count.
        """
        shortest = min(len(text.ids) for text in self.texts)
        if shortest <= (suffix or 1):
            raise SourceError(
                f"a canary has {shortest} tokens: --suffix counts {shortest - 1} at most"
            )
        attack = Canaries(suffix)
        model = ReleasedModel(now, base, torch.ones(len(self.texts)))
        guess = attack.run(Observation(released=model))
        assert isinstance(guess, ExtractionGuess)
        members = torch.tensor(self.record.included)
        repeats = torch.tensor(self.record.repeats)
        return canary_tiers(guess, attack, self.record.times, repeats, members, ~members)


def _forms(row: Mapping[str, object]) -> list[object]:
    """Return the examples that a line of JSON may stand for."""
    lists = [row, {**row, "labels": row["input_ids"]}, row["input_ids"]]
    tensors = [
        {name: torch.tensor(value) for name, value in one.items()}
        if isinstance(one, dict)
        else torch.tensor(one)
        for one in lists
    ]
    return [*lists, *tensors]
