"""Values that are found in a user's texts: what the trained weights say of them.

Nobody knows from which set such a value is, so that it has no rank. Those of texts that were
trained on are compared with those of the same kind in texts that were not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from scipy.stats import rankdata
from torch import Tensor

from lightning_fedleak.attacks.memorization import gain_beyond
from lightning_fedleak.evaluation.entities import EntityFinder
from lightning_fedleak.evaluation.metrics.clustered import auc
from lightning_fedleak.evaluation.metrics.rates import flat
from lightning_fedleak.evaluation.metrics.released import (
    PERMUTATIONS,
    RESAMPLES,
    permutation_test,
    spent_at,
)
from lightning_fedleak.model.batches import IGNORE_INDEX
from lightning_fedleak.model.snapshots import ReleasedModel, TokenSnapshot
from lightning_fedleak.model.taps import Text

LEAST_VALUES = 20  # on either side; fewer: an interval says next to nothing. Not tuned
ENTITY = "entity"
"""Begins the names of series, ``entity/<kind>/<place>``; those of repeated values end in _x2."""


def clustered_auc(
    scores: Tensor, members: Tensor, rows: Tensor, look: int = 1, alpha: float = 0.05
) -> dict[str, float]:
    """Return the AUC of values of which a row may hold several, by the names of the logs.

    - ``auc``, with ``_low`` and ``_high``: ties count half; the interval takes rows as independent.
      ``auc_provable`` is the lower end where so many rows are all ranked right.
    - ``p_value``: of "values of members rank no higher", by permuted memberships of rows. It is
      exact, and ``auc_low`` is above .5 only where it shows that too.

    Args:
        scores: (N,) higher is more likely trained on.
        members: (N,) bool, alike in a row.
        rows: (N,) int64, the row of each value.
        look: counted from 1; the interval holds at all looks together.
        alpha: probability of error over all looks together.
    """
    spent = spent_at(look, alpha)
    score, member, code = scores.double().numpy(), members.numpy(), np.unique(rows, False, True)[1]
    area = auc(score, member, code, spent, RESAMPLES, np.random.default_rng(0))
    means = np.bincount(code, rankdata(score)) / np.bincount(code)
    inside = np.bincount(code, member) > 0
    error = permutation_test(torch.from_numpy(means), torch.from_numpy(inside))
    if error > spent / 2:
        area = replace(area, low=min(area.low, 0.5))
    fewest = min(int(inside.sum()), int((~inside).sum()))
    provable = (spent / 2) ** (1 / fewest)
    return {
        **flat({"auc": area}),
        "auc_provable": min(provable, 0.5) if spent / 2 < 1 / (1 + PERMUTATIONS) else provable,
        "p_value": min(1.0, error * alpha / spent),
        "alpha": spent,
    }


class _Found(NamedTuple):
    """A value at one place: in the prompt or the label of a row, from one token to before one."""

    place: str
    value: tuple[str, str]
    row: int
    start: int
    end: int


class FoundEntities:
    """Values in texts of which some were trained on.

    A value that occurs in one row of the data was trained on or not by the draw of its row. One
    that occurs in several rows, one of which was trained on, was trained on, wherever else it
    stands; those of two such rows or more are compared apart.

    Args:
        finder: of the values.
        are_predicted: the model predicts next tokens; of others every series is unknown.
    """

    def __init__(self, finder: EntityFinder, are_predicted: bool = True) -> None:
        self._finder = finder
        self.are_predicted = are_predicted
        self._rows: Counter[tuple[str, str]] = Counter()
        self._trained: Counter[tuple[str, str]] = Counter()
        self._found: Sequence[_Found] = ()

    def counting(self, rows: Iterable[tuple[Text, bool]]) -> Iterator[tuple[Text, bool]]:
        """Yield rows, and whether each is trained on, after their values were counted."""
        for text, trains in rows:
            keys = {(value.kind, value.key) for value in self._finder.find(text.ids.tolist())}
            self._rows.update(keys)
            self._trained.update(keys if trains else ())
            yield text, trains

    def locate(self, texts: Sequence[Text]) -> None:
        """Find the values of the texts that the model is queried with.

        One that begins in a prompt and ends in a label is in neither, and the first token of a text
        is never predicted.
        """
        self._found = []
        for row, text in enumerate(texts):
            labels = (text.labels != IGNORE_INDEX).tolist()
            for value in self._finder.find(text.ids.tolist()):
                start = max(1, value.start)
                sides = {*labels[start : value.end]}
                if len(sides) == 1:
                    place, key = "label" if sides.pop() else "prompt", (value.kind, value.key)
                    self._found.append(_Found(place, key, row, start, value.end))

    def compare(
        self,
        now: TokenSnapshot,
        base: TokenSnapshot,
        rows: Tensor,
        members: Tensor,
        look: int = 1,
        alpha: float = 0.05,
    ) -> dict[str, dict[str, float] | str]:
        """Return what the values of each kind and place show, or why that is unknown.

        A value's score is the gain of its tokens over the base, beyond that of values like it
        (:func:`~lightning_fedleak.attacks.memorization.gain_beyond`): all learn their form. See
        :func:`clustered_auc`; ``members`` and ``others`` count values.

        Args:
            now: what the trained model says of all tokens of the texts.
            base: what the base said of them.
            rows: (n,) the texts that are compared.
            members: (n,) bool, which of them were trained on.
            look: counted from 1.
            alpha: probability of error over all looks together.
        """
        sides = dict(zip(rows.tolist(), members.tolist(), strict=True))
        results: dict[str, dict[str, float] | str] = {}
        for name in entity_names(self._finder.kinds):
            if not self.are_predicted:
                results[name] = "the model predicts no next token, so that it rates no value"
                continue
            values = self._chosen(name, sides)
            places = torch.tensor([one.row for one in values], dtype=torch.long)
            inside = torch.tensor([sides[one.row] for one in values], dtype=torch.bool)
            n, n_others = int(inside.sum()), int((~inside).sum())
            if min(n, n_others) < LEAST_VALUES:
                results[name] = (
                    f"{n} values were trained on and {n_others} were not: {LEAST_VALUES} of each "
                    "are needed. Leave out more rows, or plant values (with_entities)"
                )
                continue
            columns = torch.zeros(len(values), now.labels.shape[1], dtype=torch.bool)
            for row, one in enumerate(values):
                columns[row, one.start - 1 : one.end - 1] = True
            answers = [each.rows(places).within(columns) for each in (now, base)]
            results[name] = "the model or its base did not say how likely they are"
            if all(bool(each.mean_log_probs().isfinite().all()) for each in answers):
                released = ReleasedModel(answers[0], answers[1], places)
                scores = gain_beyond(released, torch.ones_like(inside))
                counts = {"members": float(n), "others": float(n_others)}
                results[name] = clustered_auc(scores, inside, places, look, alpha) | counts
        return results

    def _chosen(self, name: str, sides: Mapping[int, bool]) -> list[_Found]:
        """Return the values of a series, each once, in some texts."""
        _, kind, place = name.split("/")
        place, repeats, _ = place.partition("_x2")
        chosen: dict[tuple[str, str], _Found] = {}
        for one in self._found:
            side, times = sides.get(one.row), self._trained[one.value]
            counts = times > 1 if side and repeats else self._rows[one.value] == 1
            if (one.value[0], one.place) == (kind, place) and side is not None and counts:
                chosen.setdefault(one.value, one)
        return [*chosen.values()]


def entity_names(kinds: Iterable[str]) -> list[str]:
    """Return the names of the series of some kinds."""
    groups = [f"{ENTITY}/{kind}/{place}" for kind in kinds for place in ("prompt", "label")]
    return [f"{group}{end}" for group in groups for end in ("", "_x2")]
