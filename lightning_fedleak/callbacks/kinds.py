"""The kinds of results that attacks give, and how each becomes numbers that are logged.

A kind knows its metrics' names, how one client's result travels between processes (a row of
numbers of fixed width), and what the rows of all clients make together.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from lightning_fedleak.attacks.base import Attack
from lightning_fedleak.attacks.inversion import InversionAttack, TextGuess
from lightning_fedleak.attacks.membership import MembershipAttack
from lightning_fedleak.callbacks.outcome import Outcome
from lightning_fedleak.callbacks.scoring import WORD_METRICS, Tally
from lightning_fedleak.metrics import Rate
from lightning_fedleak.metrics.membership import RATES, membership_rates
from lightning_fedleak.metrics.text_reconstruction import (
    SentenceScores,
    reconstruction_rates,
    sentence_scores,
    token_hits,
)

RESAMPLES = 200


class Kind(ABC):
    """Results of one attack at one stage.

    Attributes:
        metrics: names of its rates, each logged with ``_low`` and ``_high``.
        headline: the one that stands for the others on a page or in a table.
        charts: titles of further charts, and the metrics in each.
        width: numbers in a packed result.
        extras: names of its values that have no interval.
        parted: each process holds a part of the result, also where all are one client.
    """

    metrics: tuple[str, ...]
    headline: str
    charts: Mapping[str, tuple[str, ...]]
    width: int
    extras: tuple[str, ...] = ()
    parted: bool = False

    @abstractmethod
    def outcome(self, rows: Mapping[int, Sequence[float]]) -> Outcome:
        """What the clients' packed results make together.

        Args:
            rows: by number of the client; at least one.
        """

    def state_dict(self) -> dict[str, Tensor]:
        """What must survive a checkpoint. Default: nothing."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:  # noqa: B027
        """Takes back what ``state_dict`` gave."""

    def clear(self) -> None:  # noqa: B027
        """Forgets earlier looks."""


class Words(Kind):
    """Recovered word types; a packed result is a packed :class:`Tally`."""

    metrics = WORD_METRICS
    headline = "f1"
    charts = MappingProxyType({"precision and recall": ("precision", "recall")})
    width = Tally.WIDTH
    extras = ("type_count_error",)

    def outcome(self, rows: Mapping[int, Sequence[float]]) -> Outcome:
        """Counts are added over clients, and the rates computed from the sums."""
        pooled = Tally.pooled(list(rows.values()))
        each = [Tally.pooled([r]).rates() for r in rows.values()]
        return Outcome(
            pooled.rates(),
            int(pooled.tp + pooled.fn),
            worst=_worst([{n: r.value for n, r in rates.items()} for rates in each]),
            extra={"type_count_error": pooled.type_count_error},
        )


@dataclass(frozen=True)
class Played:
    """The games of one client at one look.

    Attributes:
        scores: (n,) the adversary's.
        members: (n,) bool, the secret bits b.
        decisions: (n,) bool, the adversary's b'.
    """

    scores: Tensor
    members: Tensor
    decisions: Tensor

    def pack(self, width: int) -> list[float]:
        """Numbers in a fixed order: n, scores, bits, decisions, filled up with zeros."""
        numbers = [float(len(self.scores))]
        for column in (self.scores, self.members, self.decisions):
            numbers += column.double().tolist()
        return numbers + [0.0] * (width - len(numbers))


class Membership(Kind):
    """Guessed membership, over the games of the last looks.

    Accuracy, F1 and advantage are of the adversary's own decisions, so that one look alone has
    them. The threshold of a TPR is fitted on other games than those scored. The games of one client
    at one look are one cluster (:func:`~lightning_fedleak.metrics.membership.membership_rates`);
    looks are taken as independent, also where an epoch brings back the texts of an earlier one.

    Args:
        targets: texts asked for at a look, at most, members and others together.
        window: looks that are pooled.
    """

    metrics = RATES
    headline = "auc"
    charts = MappingProxyType(
        {
            "accuracy and advantage": ("accuracy", "advantage"),
            "TPR at a small FPR": tuple(name for name in RATES if name.startswith("tpr")),
        }
    )

    def __init__(self, targets: int, window: int) -> None:
        self.width = 1 + 3 * targets
        self._looks: deque[Tensor] = deque(maxlen=window)
        self._next = 0

    def outcome(self, rows: Mapping[int, Sequence[float]]) -> Outcome:
        """Adds this look's games to the window, and computes the rates over all of it."""
        games = []
        for client, numbers in rows.items():
            n = int(numbers[0])
            columns = [[float(self._next)] * n, [float(client)] * n]
            columns += [list(numbers[1 + i * n : 1 + (i + 1) * n]) for i in range(3)]
            games.append(torch.tensor(columns, dtype=torch.float64).T)
        self._next += 1
        self._looks.append(torch.cat(games))
        pooled = torch.cat(list(self._looks))
        now = {name: rate.value for name, rate in _rates(self._looks[-1]).items()}
        clients = games if len(games) > 1 else []
        each = [{name: r.value for name, r in _rates(g).items()} for g in clients]
        return Outcome(_rates(pooled, RESAMPLES), len(pooled), worst=_worst(each), now=now)

    def state_dict(self) -> dict[str, Tensor]:
        """(n, 5): look, client, score, bit, decision of every game in the window."""
        return {"games": torch.cat(list(self._looks))} if self._looks else {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Goes on with the window."""
        self.clear()
        if "games" in state:
            games = state["games"].double().cpu()
            looks = sorted(set(games[:, 0].tolist()))
            self._looks.extend(games[games[:, 0] == look] for look in looks)
            self._next = int(games[-1, 0]) + 1

    def clear(self) -> None:
        """Forgets the window."""
        self._looks.clear()
        self._next = 0


PLACES = 12
"""Ranges of places in a text: the first, the second, then each twice as long as the one before."""


def place_names() -> list[str]:
    """``["0", "1", "2-3", "4-7", ..., "512-1023", "1024-"]``."""
    middle = [f"{2**k}-{2 ** (k + 1) - 1}" for k in range(1, PLACES - 2)]
    return ["0", "1", *middle, f"{2 ** (PLACES - 2)}-"]


@dataclass(frozen=True)
class Inverted:
    """What an attack made of n texts that were sent, and what they were.

    Attributes:
        guess: tokens (n, L).
        input_ids: (n, L) the tokens sent.
        real: (n, L) bool, False where padded.
        age: optimizer steps that the adversary's bottom model was behind; NaN where the attack
            does not say.
    """

    guess: TextGuess
    input_ids: Tensor
    real: Tensor
    age: float

    @property
    def begun(self) -> Tensor:
        """(n,) bool, False for texts that the time budget left untouched."""
        some = ((self.guess.tokens >= 0).to(self.real.device) & self.real).any(1)
        return torch.ones_like(some) if self.guess.finished else some

    def pack(self, texts: int) -> list[float]:
        """Scores of the texts that were begun, as numbers in a fixed order.

        n; age; whether the attack finished; right tokens, tokens and ROUGE-L of each text, filled
        up to ``texts``; right tokens and tokens by range of places.
        """
        begun = self.begun
        guessed, truth, real = self.guess.tokens[begun], self.input_ids[begun], self.real[begun]
        scores = sentence_scores(guessed, truth, real)
        numbers = [float(len(scores.hits)), self.age, float(self.guess.finished)]
        for column in (scores.hits, scores.lengths, scores.rouge_l):
            numbers += column.double().tolist() + [0.0] * (texts - len(column))
        hits, there = token_hits(guessed, truth, real)
        place = (there.cumsum(1) - 1)[there]
        which = torch.frexp(place.double()).exponent.clamp(max=PLACES - 1)
        for seen in (hits[there], torch.ones_like(hits[there])):
            numbers += torch.zeros(PLACES).index_add_(0, which, seen.float()).tolist()
        return numbers


class Texts(Kind):
    """Reconstructed texts of one look; those that the time budget left untouched do not count.

    Intervals take texts as independent, not their tokens
    (:func:`~lightning_fedleak.metrics.text_reconstruction.reconstruction_rates`).

    Args:
        texts: of one client at a look, at most.
    """

    metrics = ("token_accuracy", "exact_sentences", "rouge_l")
    headline = "token_accuracy"
    charts = MappingProxyType({"whole texts": ("exact_sentences", "rouge_l")})
    extras = ("age", "finished")
    parted = True

    def __init__(self, texts: int) -> None:
        self.texts = texts
        self.width = 3 + 3 * texts + 2 * PLACES

    def outcome(self, rows: Mapping[int, Sequence[float]]) -> Outcome:
        """All clients' texts together."""
        each = [self._scores(row) for row in rows.values()]
        pooled = SentenceScores(
            *(
                torch.cat([getattr(s, part) for s in each])
                for part in ("hits", "lengths", "rouge_l")
            )
        )
        places = torch.tensor([list(row)[-2 * PLACES :] for row in rows.values()]).sum(0).long()
        pairs = zip(places[:PLACES].tolist(), places[PLACES:].tolist(), strict=True)
        return Outcome(
            self._rates(pooled),
            len(pooled.hits),
            worst=_worst([{n: r.value for n, r in self._rates(s).items()} for s in each]),
            extra={
                "age": max(row[1] for row in rows.values()),
                "finished": sum(row[2] for row in rows.values()) / len(rows),
            },
            by_position={
                name: (right, n) for name, (right, n) in zip(place_names(), pairs, strict=True) if n
            },
        )

    def _scores(self, row: Sequence[float]) -> SentenceScores:
        n = int(row[0])
        columns = torch.tensor(list(row)[3 : 3 + 3 * self.texts], dtype=torch.float64)
        hits, lengths, rouge = columns.reshape(3, self.texts)[:, :n]
        return SentenceScores(hits, lengths, rouge)

    def _rates(self, scores: SentenceScores) -> dict[str, Rate]:
        rates = reconstruction_rates(scores, resamples=RESAMPLES)
        return {name: rates[name] for name in self.metrics}


def kind_of(attack: Attack, *, targets: int, window: int, texts: int = 1) -> Kind:
    """The kind of results that an attack gives."""
    kind = _class_of(attack)
    if kind is Membership:
        return Membership(2 * targets, window)
    return Texts(texts) if kind is Texts else Words()


def headline_of(attack: Attack) -> str:
    """Name of the rate that stands for an attack's others."""
    return _class_of(attack).headline


def charts_of(attack: Attack) -> Mapping[str, tuple[str, ...]]:
    """Titles and metrics of an attack's further charts."""
    return _class_of(attack).charts


def _class_of(attack: Attack) -> type[Membership] | type[Texts] | type[Words]:
    if isinstance(attack, InversionAttack):
        return Texts
    return Membership if isinstance(attack, MembershipAttack) else Words


def _rates(games: Tensor, resamples: int = 100) -> dict[str, Rate]:
    width = int(games[:, 1].max()) + 1
    cluster = (games[:, 0] * width + games[:, 1]).long()
    score, bit, decision = games[:, 2], games[:, 3] == 1, games[:, 4] == 1
    return membership_rates(score, bit, cluster, decision, resamples=resamples)


def _worst(each: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Each metric at the client where it is highest; empty for one client."""
    worst: dict[str, float] = {}
    if len(each) > 1:
        for name in each[0]:
            known = [values[name] for values in each if not math.isnan(values[name])]
            worst[name] = max(known) if known else math.nan
    return worst
