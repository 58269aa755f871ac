"""What can be done next about what runs leaked, and about what nobody knows yet."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lightning_fedleak.report.attacks import NEXT_TO_NONE, RELEASED, AttackSummary
from lightning_fedleak.report.fits import FitSummary
from lightning_fedleak.report.logs import grouped
from lightning_fedleak.report.records import STANDARD_FAMILIES

_DEFENSE = (
    "Trainer(strategy=DefendedStrategy('auto', defenses=[DPSGD(1.0, target_epsilon=8, "
    "target_delta=...)])) clips and noises each example's part"
)
ASSUMPTION = "assume=DISHONEST_SERVER"
"""The argument that has attacks of a server played that adds layers of its own."""
_CLIENT_DEFENSE = "ClientDP(..., trust='local') clips each client's update and adds noise to it"


def next_steps(fits: Sequence[FitSummary]) -> list[str]:
    """Return what can be done about what runs gave away, and about what nobody knows yet.

    Args:
        fits: the runs.

    Returns:
        One sentence or two for each step, the most urgent first; empty without runs.
    """
    steps = [
        step for topic in (_against_reading, _to_measure) for fit in fits for step in topic(fit)
    ]
    if fits and not all(any(a.stage == RELEASED and a.looks for a in f.attacks) for f in fits):
        steps.append(
            "Test the trained model before it is released: leave rows out of the training data "
            "(leave_out) and play LeakageMonitor([Combined(), Extraction()]), or run `fedleak "
            "memorization`."
        )
    return list(dict.fromkeys(steps))


def _against_reading(fit: FitSummary) -> Iterator[str]:
    """Yield what can be done against what was read."""
    titles = {
        a.family.name: a.family.short_title
        for a in fit.attacks
        if a.exposed and a.stage == "shared" and a.above_chance > NEXT_TO_NONE
    }
    if titles:
        yield (
            f"Against what was read ({' and '.join(titles.values())}): {_noise(fit)}. Larger "
            "batches give away less of each text. Then compare both runs: fedleak compare BEFORE "
            "AFTER."
        )
    model = [a.above_chance for a in fit.attacks if a.stage == RELEASED]
    if max(model, default=0.0) > NEXT_TO_NONE:
        yield (
            "Against what the trained model gives away: train for fewer epochs, or with DPSGD, and "
            "test it again."
        )
    elif fit.recorded and not titles and not _is_private(fit):
        yield f"Low numbers guarantee nothing. For a guarantee, {_defense(fit)}."
    gate = "RoundGate" if fit.unit == "round" else "RiskGate"
    unwatched = [family for family in titles if not _is_watched(fit, family)]
    if unwatched and fit.gates is not None:
        gates = (f"{gate}('leakage/worst/{family}', at_most=...)" for family in unwatched)
        yield f"Let a gate stop what is too much: {', '.join(gates)}."


def _is_private(fit: FitSummary) -> bool:
    return any(account.holds for account in fit.privacy)


def _defense(fit: FitSummary) -> str:
    return f"defend what leaves: {_CLIENT_DEFENSE if fit.unit == 'round' else _DEFENSE}"


def _noise(fit: FitSummary) -> str:
    """Return how to have less read of what clients share."""
    if _is_private(fit):
        return "add more noise: a smaller target_epsilon, or a larger noise_multiplier"
    if fit.defenses:
        return f"turn {', '.join(one.name for one in fit.defenses)} up, or {_defense(fit)}"
    return _defense(fit)


def _is_watched(fit: FitSummary, family: str) -> bool:
    """Return whether a gate watches a family or one of its attacks."""
    names = {family, *(a.name for a in fit.attacks if a.family.name == family)}
    return any(name in gate.metric for gate in fit.gates or () for name in names)


def _to_measure(fit: FitSummary) -> Iterator[str]:
    """Yield how to learn what is unknown, inconclusive or untested."""
    watcher = "RoundObserver" if fit.unit == "round" else "LeakageMonitor"
    without_result = [a for a in fit.attacks if a.why_unknown and not a.looks]
    for reason, attacks in grouped(without_result, lambda a: a.why_unknown).items():
        yield f"Get a result of {_names(attacks)}, which is unknown: {reason}."
    if blind := [a for a in fit.attacks if a.is_blind]:
        yield (
            f"Get a number that counts beside {_names(blind)}, which reads little here even of "
            f"what is known: attacks='auto' chooses by itself, and smaller batches show more."
        )
    for name, reason in fit.not_played.items():
        if "=" in reason:  # the reason names an argument
            yield f"Have {name} played: {reason}."
    unsure = [a for a in fit.attacks if a.conclusive is False and a.stage != RELEASED]
    if unsure:
        yield (
            f"Narrow the interval of {_names(unsure)}, which includes guessing: "
            f"measure more often, or ask about more texts with {watcher}(games=Games(targets=...))."
        )
    yield from _untested(fit, watcher)


def _untested(fit: FitSummary, watcher: str) -> Iterator[str]:
    """Yield how to have kinds of leak tested, and a dishonest server simulated."""
    tested = {a.family.name for a in fit.attacks}
    untested = [f.untested for f in reversed(STANDARD_FAMILIES) if f.name not in tested]
    yield from (advice.format(watcher=watcher) for advice in untested if advice)
    dishonest = any(a.dishonest for a in fit.attacks)
    if fit.recorded and not dishonest and not any(ASSUMPTION in advice for advice in untested):
        yield f"Test a server that adds layers of its own: {watcher}({ASSUMPTION})."


def _names(attacks: Sequence[AttackSummary]) -> str:
    return ", ".join(dict.fromkeys(attack.name for attack in attacks))
