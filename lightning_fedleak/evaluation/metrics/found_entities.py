"""What the trained weights say of values in texts: those that are found, and planted ones.

Of a planted value the rank among others of its set is known. A value that is found in a user's
texts has none, since nobody knows from which set it is: those of texts that were trained on are
compared with those of the same kind in texts that were not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from scipy.stats import fisher_exact, rankdata
from torch import Tensor

from lightning_fedleak.attacks.memorization import gain_beyond
from lightning_fedleak.attacks.memorization.entities import EntityGuess
from lightning_fedleak.evaluation.entities import EntityFinder
from lightning_fedleak.evaluation.metrics.clustered import auc
from lightning_fedleak.evaluation.metrics.rates import Rate, flat, proportion
from lightning_fedleak.evaluation.metrics.released import PERMUTATIONS, RESAMPLES, permutation_test
from lightning_fedleak.evaluation.metrics.within import spent_at
from lightning_fedleak.model.batches import IGNORE_INDEX
from lightning_fedleak.model.snapshots import ReleasedModel, TokenSnapshot
from lightning_fedleak.model.taps import Text

LEAST_VALUES = 20  # on either side; fewer: an interval says next to nothing. Not tuned
LEAST_ENTITIES = 10  # trained on so often, and left out; fewer: bounds say next to nothing
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


def entity_values(
    guess: EntityGuess,
    members: Tensor,
    others: Tensor,
    repeats: Tensor,
    times: Sequence[int],
    *,
    look: int = 1,
    alpha: float = 0.05,
) -> dict[str, float] | str:
    """Return what the ranks of one kind of value in one place show, or why that is unknown.

    - ``first``, with ``_low`` and ``_high``: the share of the planted values that rank first among
      their candidates, minus that of the values that were left out. Of several ``times`` it is that
      of the one where it is highest. ``first_provable`` is its lower end where all rank first and
      none of the others.
    - ``greedy``: the same of values that greedy decoding writes.
    - ``first_others`` and ``greedy_others``: the shares of the values that were left out.
    - ``median_rank``: of the planted values; ``candidates``: of each value, at most.
    - ``p_value``: of "planted values rank no higher", by permuted inclusion bits; it counts all
      looks.

    An interval holds whatever the model does: both shares have exact ends (Clopper-Pearson), which
    err with half of the look's part of ``alpha`` each, and where the lower end of the excess is
    above 0 Fisher's exact test on the draw shows it too.

    Args:
        guess: about N values.
        members: (N,) bool, values that were trained on.
        others: (N,) bool, values that were left out.
        repeats: (N,) rows of the training data that hold each value that is included.
        times: numbers of rows that count; they share the probability of error.
        look: counted from 1.
        alpha: probability of error over all looks together.
    """
    tiers = [tier for n in times if int((tier := members & (repeats == n)).sum()) >= LEAST_ENTITIES]
    n_others = int(others.sum())
    if not tiers or n_others < LEAST_ENTITIES:
        counts = ", ".join(f"{int((members & (repeats == n)).sum())} x{n}" for n in times)
        return (
            f"{n_others} values were left out, and so many were trained on: {counts}. "
            f"{LEAST_ENTITIES} of each are needed: plant more (count=)"
        )
    spent = spent_at(look, alpha) / len(tiers)
    values: dict[str, float] = {}
    for name, hits in (("first", guess.ranks == 1), ("greedy", guess.greedy)):
        rates = [_excess(hits, tier, others, spent) for tier in tiers]
        ends = zip(*((rate.value, rate.low, rate.high) for rate in rates), strict=True)
        values |= flat({name: Rate(*map(max, ends))})
        values[f"{name}_others"] = float(hits[others].double().mean())
        values[f"{name}_provable"] = min(_excess(t, t, others, spent).low for t in tiers)
    counted = torch.stack(tiers).any(0)
    pool = counted | others
    error = permutation_test(-guess.ranks[pool].double(), counted[pool])
    return values | {
        "median_rank": float(guess.ranks[counted].double().median()),
        "candidates": float(guess.candidates[pool].max()),
        "p_value": min(1.0, error * alpha / spent_at(look, alpha)),
        "members": float(counted.sum()),
        "others": float(n_others),
        "alpha": spent_at(look, alpha),
    }


def _excess(hits: Tensor, members: Tensor, others: Tensor, alpha: float) -> Rate:
    """Return how much larger a share of members has a hit, with exact ends."""
    counts = [[int(hits[side].sum()), int((~hits[side]).sum())] for side in (members, others)]
    inside, outside = (proportion(yes, yes + no, 1 - alpha / 2) for yes, no in counts)
    low = inside.low - outside.high
    if fisher_exact(counts, alternative="greater").pvalue > alpha / 2:
        low = min(low, 0.0)
    return Rate(inside.value - outside.value, low, inside.high - outside.low)
