"""What EDPB Opinion 28/2024 asks: the release (paragraph 46), and attacks tried (paragraph 55)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_fedleak.report.attacks import RELEASED, AttackSummary
from lightning_fedleak.report.records import CANARIES, PLANTED
from lightning_fedleak.report.wording import NOT_RECORDED, interval, share

NOT_TRIED = "not tried"
_ATTACKS = (
    ("membership inference", "auc", ("membership",), "TPR at 1% FPR"),
    ("regurgitation", "greedy", (), "share of the training texts"),
    ("exfiltration", "extracted", (), "share of the training texts"),
    ("attribute inference", "", (), ""),
    ("model inversion", "", (), ""),
    ("reconstruction", "", ("words", "texts"), ""),
)
"""Name in the Opinion; metric of the trained model that tests it; families that test it on what
clients shared; what the smallest visible rate is a rate of."""


@dataclass(frozen=True)
class NamedAttack:
    """An attack that the Opinion names, and what a run tried of it.

    Attributes:
        name: as in the Opinion.
        tried: what it was tried on; or that it was not, or is unknown.
        results: The results of each attack of the run.
        visible: the smallest rate that each could have seen.
    """

    name: str
    tried: str
    results: Sequence[str]
    visible: Sequence[str]


def named_attacks(attacks: Sequence[AttackSummary]) -> list[NamedAttack]:
    """Return a row for each attack that the Opinion names."""
    return [_named_attack(attacks, *row) for row in _ATTACKS]


def _named_attack(
    attacks: Sequence[AttackSummary], name: str, metric: str, families: Sequence[str], unit: str
) -> NamedAttack:
    measured = [a for a in attacks if _is_on_texts(a) and a.rates.get(metric) is not None]
    of_updates = [
        a for a in attacks if a.stage != RELEASED and a.looks and a.family.name in families
    ]
    places = ["the trained model"] * bool(measured) + ["what clients shared"] * bool(of_updates)
    silent = [a.name for a in attacks if _is_on_texts(a) and not a.looks]
    if silent and metric and not measured:
        places.append(f"unknown for the trained model: no result of {', '.join(silent)}")
    return NamedAttack(
        name,
        "; ".join(places) or NOT_TRIED,
        [_result(a, metric) for a in measured] + [_result(a, a.headline) for a in of_updates],
        [f"{a.name}: {_visible(a, unit)}" for a in measured]
        + [f"{a.name}: {_visible(a)}" for a in of_updates],
    )


def tiers(attacks: Sequence[AttackSummary]) -> list[AttackSummary]:
    """Return the attacks on canaries, the least repeated first."""
    canaries = [attack for attack in attacks if attack.family.name == CANARIES.name]
    return sorted(canaries, key=lambda attack: (len(attack.name), attack.name))  # as x4 before x16


def _is_on_texts(attack: AttackSummary) -> bool:
    """Return whether an attack asks the trained model about the data's own texts."""
    return attack.stage == RELEASED and attack.family.name not in PLANTED


def _result(attack: AttackSummary, metric: str) -> str:
    rate = attack.last if metric == attack.headline else attack.rates.get(metric)
    n = NOT_RECORDED if attack.last_n is None else attack.last_n
    late = f"; of earlier weights, later ones are unknown: {attack.stale}" if attack.stale else ""
    note = f"; {attack.control_note}" if attack.control_note and metric == attack.headline else ""
    return f"{attack.name} ({attack.stage}): {metric} {interval(rate)}, n {n}{late}{note}"


SHOWN_IN_FOUR_OF_FIVE = 1.960 + 0.842  # standard errors: 95% on both sides, and power 0.8


def smallest_rate(attack: AttackSummary) -> float | None:
    """Return the smallest rate that the latest look would show in 4 of 5 cases.

    Of an attack on the trained model it is as recorded. An AUC of n games, of which half are of
    members, has a standard error of sqrt((n + 1) / 3) / n where nothing leaks (Mann and Whitney
    1947). Of n words or tokens, of which each is read with the same probability, one is
    read in 4 of 5 looks where that is 1 - 0.2^(1 / n); an attack that reads a share of known words
    only sees as much less.

    Returns:
        The rate, above 1 where no rate would show; None where the look recorded too little.
    """
    n, control = attack.last_n, attack.control
    if attack.stage == RELEASED:
        return attack.visible
    if not n or attack.last is None:
        return None
    if attack.headline == "auc":
        return attack.chance + SHOWN_IN_FOUR_OF_FIVE * math.sqrt((n + 1) / 3) / n
    if attack.chance:
        return None
    seen = 1.0 if not attack.has_control else control or 0.0
    return (1 - 0.2 ** (1 / n)) / seen if seen > 0 else math.inf


def _visible(attack: AttackSummary, unit: str = "") -> str:
    """Return the smallest rate that an attack could have seen, in words."""
    rate = smallest_rate(attack)
    if rate is None:
        return NOT_RECORDED
    if rate >= 1:
        return "none: too few, or its control was not read"
    unit = unit or ("AUC" if attack.headline == "auc" else "share of words or tokens")
    return f"{unit} of {share(rate)}"
