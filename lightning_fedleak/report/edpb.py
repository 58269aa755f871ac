"""The attacks that EDPB Opinion 28/2024 names in paragraph 55, and how a run tested each of them.

The Opinion of the European Data Protection Board names attacks by which a model that is said to be
anonymous should be tested. For each of them a report lists the results on the trained model and on
shared updates, and the smallest rate that was detectable: an attack that found nothing excludes
only rates above it. A *look* is a measurement of leakage at one step of the training.
"""

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
"""Each attack has its name in the Opinion, the metric that tests it on the trained model, the
families that test it on shared updates, and the unit of the smallest detectable rate on the
trained model."""


@dataclass(frozen=True)
class NamedAttack:
    """An attack that the Opinion names, and the attacks of a run that tested it.

    Attributes:
        name: The name in the Opinion.
        tried: What it was tried on, or that it was not tried, or that its result is unknown.
        results: The result of each attack of the run.
        visible: The smallest rate that each of them could detect.
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
    """Return a row of the table; the last four arguments are a row of ``_ATTACKS``."""
    measured = [a for a in attacks if _is_on_texts(a) and a.rates.get(metric) is not None]
    of_updates = [
        a for a in attacks if a.stage != RELEASED and a.looks and a.family.name in families
    ]
    targets = ["the trained model"] * bool(measured) + ["what clients shared"] * bool(of_updates)
    silent = [a.name for a in attacks if _is_on_texts(a) and not a.looks]
    if silent and metric and not measured:
        targets.append(f"unknown for the trained model: no result of {', '.join(silent)}")
    return NamedAttack(
        name,
        "; ".join(targets) or NOT_TRIED,
        [_result(a, metric) for a in measured] + [_result(a, a.headline) for a in of_updates],
        [f"{a.name}: {_visible(a, unit)}" for a in measured]
        + [f"{a.name}: {_visible(a)}" for a in of_updates],
    )


def tiers(attacks: Sequence[AttackSummary]) -> list[AttackSummary]:
    """Return the attacks on canaries (planted texts), those on the least repeated ones first.

    A tier is the canaries that were planted equally often; each tier has its own attack.
    """
    canaries = [attack for attack in attacks if attack.family.name == CANARIES.name]
    return sorted(canaries, key=lambda attack: (len(attack.name), attack.name))  # as x4 before x16


def _is_on_texts(attack: AttackSummary) -> bool:
    """Return whether an attack tests the trained model on texts of the data, not planted ones."""
    return attack.stage == RELEASED and attack.family.name not in PLANTED


def _result(attack: AttackSummary, metric: str) -> str:
    """Return the latest value of a metric of an attack, with its interval and notes."""
    rate = attack.last if metric == attack.headline else attack.rates.get(metric)
    n = NOT_RECORDED if attack.last_n is None else attack.last_n
    late = f"; of earlier weights, later ones are unknown: {attack.stale}" if attack.stale else ""
    note = f"; {attack.control_note}" if attack.control_note and metric == attack.headline else ""
    return f"{attack.name} ({attack.stage}): {metric} {interval(rate)}, n {n}{late}{note}"


# Standard errors above chance that a two-sided 95% interval detects with 80% power.
SHOWN_IN_FOUR_OF_FIVE = 1.960 + 0.842


def smallest_rate(attack: AttackSummary) -> float | None:
    """Return the smallest rate that the latest look detects with 80% power.

    For an attack on the trained model, the rate was recorded. The AUC of n games, half of them with
    members, has a standard error of sqrt((n + 1) / 3) / n without leakage (Mann and Whitney 1947).
    If each of n words or tokens is recovered with probability p, at least one of them is recovered
    in 4 of 5 looks for p = 1 - 0.2^(1 / n). If the attack recovers only a share of its positive
    control, p is divided by this share.

    Returns:
        The rate. It is 1 or more if no rate is detectable, and None if it was not recorded.
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
    recall = 1.0 if not attack.has_control else control or 0.0
    return (1 - 0.2 ** (1 / n)) / recall if recall > 0 else math.inf


def _visible(attack: AttackSummary, unit: str = "") -> str:
    """Return the smallest rate that an attack could detect, in words."""
    rate = smallest_rate(attack)
    if rate is None:
        return NOT_RECORDED
    if rate >= 1:
        return "none: too few, or its control was not read"
    unit = unit or ("AUC" if attack.headline == "auc" else "share of words or tokens")
    return f"{unit} of {share(rate)}"
