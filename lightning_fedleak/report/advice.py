"""What people can do next, from what their runs showed and did not show."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

NEXT_TO_NONE = 0.1
"""An attack so little above chance read next to nothing: of all that it asked, one part in ten."""

_DEFENSE = (
    "Trainer(strategy=DefendedStrategy('auto', defenses=[DPSGD(1.0, target_epsilon=8, "
    "target_delta=...)])) clips and noises each example's part"
)
_CLIENT_DEFENSE = "ClientDP(..., trust='local') clips each client's update and adds noise to it"
_NAMES = {"words": "words", "membership": "membership", "texts": "whole texts"}


def next_steps(fits: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return what can be done about what the runs gave away, and about what nobody knows yet.

    Args:
        fits: runs, as :func:`~lightning_fedleak.report.findings.findings` describes them.

    Returns:
        One sentence or two for each step, the most urgent first; empty without runs.
    """
    steps = [
        step for part in (_against, _to_measure, _of_epsilon) for fit in fits for step in part(fit)
    ]
    if fits:
        steps.append(
            "Test the trained model before it is released: put canary texts into the training data "
            "(with_canaries) and score them (CanaryScorer)."
        )
    return list(dict.fromkeys(steps))


def _against(fit: Mapping[str, Any]) -> Iterator[str]:
    """Yield what can be done against what was read."""
    rounds = fit["unit"] == "round"
    shared = [a for a in fit["attacks"] if a["exposed"] and a["stage"] == "shared"]
    read = list(dict.fromkeys(a["family"] for a in shared if a["above_chance"] > NEXT_TO_NONE))
    read = [family for family in read if family in _NAMES]
    private = [p for p in fit["privacy"] if p["holds"]]
    defense = _CLIENT_DEFENSE if rounds else _DEFENSE
    if read:
        what = " and ".join(_NAMES[family] for family in read)
        noise = f"defend what leaves: {defense}"
        if private:
            noise = "add more noise: a smaller target_epsilon, or a larger noise_multiplier"
        elif fit["defenses"]:
            noise = f"turn {', '.join(d['name'] for d in fit['defenses'])} up, or {noise}"
        yield (
            f"Against what was read ({what}): {noise}. Larger batches give away less of each text. "
            "Then compare both runs: fedleak compare BEFORE AFTER."
        )
    elif not private and fit["recorded"]:
        yield f"Low numbers guarantee nothing. For a guarantee, defend what leaves: {defense}."
    watched = " ".join(gate["metric"] for gate in fit["gates"] or ())
    open_ones = [f for f in read if not any(name in watched for name in (f, *_played(fit, f)))]
    if open_ones and fit["gates"] is not None:
        gate = "RoundGate" if rounds else "RiskGate"
        yield (
            "Let a gate stop what is too much: "
            + ", ".join(f"{gate}('leakage/worst/{family}', at_most=...)" for family in open_ones)
            + "."
        )


def _played(fit: Mapping[str, Any], family: str) -> list[str]:
    return [a["name"] for a in fit["attacks"] if a["family"] == family]


def _to_measure(fit: Mapping[str, Any]) -> Iterator[str]:
    """Yield how to learn what is unknown, inconclusive or untested."""
    watcher = "RoundObserver" if fit["unit"] == "round" else "LeakageMonitor"
    reasons: dict[str, list[str]] = {}
    for attack in fit["attacks"]:
        if attack["unknown"] and not attack["looks"]:
            reasons.setdefault(attack["why_unknown"], []).append(attack["name"])
    for why, names in reasons.items():
        yield f"Get a result of {', '.join(dict.fromkeys(names))}, which is unknown: {why}."
    for name, why in fit["not_played"].items():
        if "=" in why:  # the reason names an argument
            yield f"Have {name} played: {why}."
    unsure = [a["name"] for a in fit["attacks"] if a["conclusive"] is False]
    if unsure:
        yield (
            f"Narrow the interval of {', '.join(dict.fromkeys(unsure))}, which includes guessing: "
            f"measure more often, or ask about more texts with {watcher}(games=Games(targets=...))."
        )
    families = {a["family"] for a in fit["attacks"]}
    if "texts" not in families:
        yield f"Test whole texts, which no attack read: {watcher}(attacks=[SubspaceTexts()])."
    if "membership" not in families:
        yield (
            "Test whether a given text is in a batch, which no attack asked: "
            f"{watcher}(assume=DISHONEST_SERVER)."
        )
    elif not any(a["dishonest"] for a in fit["attacks"]) and fit["recorded"]:
        yield f"Test a server that adds layers of its own: {watcher}(assume=DISHONEST_SERVER)."
    if any((a["config"] or {}).get("public_text") == "sampled" for a in fit["attacks"]):
        yield (
            "Pass public_text= with text like your clients' to simulate a better-informed attacker."
        )


def _of_epsilon(fit: Mapping[str, Any]) -> Iterator[str]:
    """Yield what makes an epsilon hold, or worth more."""
    for spent in fit["privacy"]:
        name = spent["defense"]
        if not spent["holds"]:
            yield f"Make {name}'s guarantee hold: {spent['guarantee']}"
        elif not spent["whole"]:
            yield f"Keep a ledger, which knows every release of a killed run: ledger= of {name}."
        elif spent["limits_little"]:
            yield (
                f"Lower {name}'s epsilon, which limits little: more noise, fewer steps, or more "
                "data to draw from."
            )
        if spent["trusted"].startswith("Epsilon holds only if"):
            yield (
                "Check that secure aggregation really hides each client's update: epsilon depends "
                "on it."
            )


__all__ = ["NEXT_TO_NONE", "next_steps"]
