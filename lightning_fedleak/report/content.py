"""Everything that a report says: the source of each of its forms.

Every value comes from the run's logs. What the logs lack is ``NOT_RECORDED``, or comes from
``report.toml``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version

from lightning_fedleak.report.attacks import NEXT_TO_NONE, RELEASED, AttackSummary
from lightning_fedleak.report.bounds import JointAccount, joint_accounts
from lightning_fedleak.report.comparing import Comparison, comparison, names_of
from lightning_fedleak.report.fits import FitSummary, fit_summaries
from lightning_fedleak.report.logs import Logs, grouped
from lightning_fedleak.report.overview import Overview, Reading, of_what_left, overview, plain
from lightning_fedleak.report.records import (
    ENTITIES,
    HIGH,
    STANDARD_FAMILIES,
    WEAK_REFERENCE,
    JsonObject,
    named,
)
from lightning_fedleak.report.wording import interval, visible

SCHEMA = 3
"""Version of ``report.json``."""


@dataclass(frozen=True)
class _ReportVerdict:
    """The verdict on some runs.

    Attributes:
        sentence: the first sentence of the page.
        sentences: all that the page says first, in sentences.
        level: ``"high"``, ``"some"`` or ``"unknown"``.
        worst: the highest value of each kind of leak.
    """

    sentence: str
    sentences: Sequence[str]
    level: str
    worst: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Findings:
    """Everything that a report says.

    Attributes:
        schema: version of ``report.json``.
        date: when it was made, in UTC.
        package: this package, with its version.
        verdict: what a reader who reads one thing should read.
        overviews: what the page says first of each run.
        comparison: several runs side by side; None of one.
        next_steps: what people can do, the most urgent first.
        runs: one for each fit or federation.
        privacy_together: what several fits have spent together.
        problems: what could not be read, each in a sentence.
        people: what only people know, by the names of ``report.toml``.
    """

    schema: int = SCHEMA
    date: str = named("made")
    package: str = named("made_by")
    verdict: _ReportVerdict
    overviews: Sequence[Overview]
    comparison: Comparison | None
    next_steps: Sequence[str]
    runs: Sequence[FitSummary]
    privacy_together: Sequence[JointAccount]
    problems: Sequence[str]
    people: JsonObject


def findings(logs: Logs, people: JsonObject | None = None) -> Findings:
    """Return everything that a report says.

    Args:
        logs: of the runs.
        people: what only people know, by the names of ``report.toml``.
    """
    problems = list(logs.problems)
    fits, accounts_by_log = fit_summaries(logs.fits, problems)
    joint = joint_accounts(accounts_by_log)
    overviews = [overview(fit) for fit in fits]
    compared = comparison(fits, overviews) if len(fits) > 1 else None
    content = Findings(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        package=f"lightning-fedleak {version('lightning-fedleak')}",
        verdict=_verdict(fits, overviews, compared, joint),
        overviews=overviews,
        comparison=compared,
        next_steps=next_steps(fits),
        runs=fits,
        privacy_together=joint,
        problems=problems,
        people=dict(people or {}),
    )
    return visible(content)


def _verdict(
    fits: Sequence[FitSummary],
    overviews: Sequence[Overview],
    compared: Comparison | None,
    joint: Sequence[JointAccount],
) -> _ReportVerdict:
    sentences = overviews[0].sentences
    if compared is not None:
        parts = zip(names_of(fits), overviews, strict=True)
        sentences = [f"{name}: {' '.join(one.sentences)}" for name, one in parts]
        sentences = [plain(compared.sentence), *sentences]
    sentences += [account.statement for fit in fits for account in fit.privacy]
    sentences += [account.statement for account in joint]
    readings = [reading for one in overviews for reading in one.readings if reading.rate]
    worst: dict[str, float] = {}
    for one in readings:
        value = one.rate.value if one.rate and one.rate.value is not None else one.chance
        worst[one.family] = max(value, worst.get(one.family, value))
    return _ReportVerdict(sentences[0], sentences, _level(fits, readings), worst)


def _level(fits: Sequence[FitSummary], readings: Sequence[Reading]) -> str:
    """Return the level: ``"high"`` if a value is above ``HIGH`` or a claim is refuted."""
    above_chance = [one.height for one in readings if one.verdict == "read"]
    # Where guessing has no level of its own, a number counts by its distance above its control.
    above_chance += [
        attack.above_chance
        for fit in fits
        for attack in of_what_left(fit)
        if not attack.chance and attack.conclusive is not False
    ]
    if (
        any(attack.refuted for fit in fits for attack in fit.attacks)
        or max(above_chance, default=0.0) > HIGH
    ):
        return "high"
    return "some" if any(one.verdict != "unknown" for one in readings) else "unknown"


_DEFENSE = (
    "Trainer(strategy=DefendedStrategy('auto', defenses=[DPSGD(1.0, target_epsilon=8, "
    "target_delta=...)])) clips and noises each example's part"
)
_TPRS = {"tpr_at_fpr_0.01": "TPR at 1% FPR", "tpr_at_fpr_0.001": "TPR at 0.1% FPR"}
_COPIES = {"x1": "one row", "x2": "2 to 4 rows", "x5": "5 to 16 rows", "x17": "more rows"}
ASSUMPTION = "settings=WatchSettings(assume=DISHONEST_SERVER)"
"""The argument that runs attacks of a server that adds its own layers."""
_CLIENT_DEFENSE = "ClientDP(..., trust='local') clips each client's update and adds noise to it"


def next_steps(fits: Sequence[FitSummary]) -> list[str]:
    """Return what can be done about what runs leaked, and about what nobody knows yet.

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
            "(leave_out) and run LeakageMonitor([Combined(), Extraction()]), or run `fedleak "
            "memorization`."
        )
    return list(dict.fromkeys(steps))


def memorized_rows(fit: FitSummary) -> list[tuple[str, str]]:
    """Return what the trained model memorized, as rows of a title and a result, in counts alone.

    The rows are of the list of records, of values by kind and place, of the passages of texts by
    their copies, of prompts, of each attack's TPRs at small FPRs, and of the reference model that
    some compare with; empty where nothing of it was asked.
    """
    rows = [] if fit.rows is None else [("Rows of the training data", fit.rows_in_words)]
    rows += fit.values.items()
    for attack in fit.attacks:
        answer = interval(attack.last) if attack.looks else f"unknown: {attack.why_unknown}"
        if attack.family.name == ENTITIES.name:
            _, kind, place = attack.name.split("/")
            place, _, times = place.partition("_x")
            words = f"Planted values, {kind} in the {place}" + f", {times} times" * bool(times)
            greedy = f"written greedily: {interval(attack.rates.get('greedy'))}; n {attack.last_n}"
            rank_1 = f"rate of rank 1, above that of values left out: {answer}"
            rows.append((words, f"{rank_1}; {greedy}"))
        elif attack.name.startswith("prompt_ratio"):
            rows.append(("Prompts, which have no loss", f"AUC {answer}"))
        for name, words in _TPRS.items():
            if name in attack.rates and attack.stage == RELEASED:
                rows.append((f"{words}, {attack.name}", interval(attack.rates[name])))
        for name, copies in _COPIES.items():
            if (rate := attack.rates.get(f"extracted_{name}")) is not None:
                words = f"rate of extraction, above that of texts left out: {interval(rate)}"
                rows.append((f"Passages of texts in {copies}", words))
    rows += [("Reference of combined_reference", fit.reference)] * bool(fit.reference)
    return rows


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
            "batches leak less of each text. Then compare both runs: fedleak compare BEFORE "
            "AFTER."
        )
    model = [a.above_chance for a in fit.attacks if a.stage == RELEASED]
    if max(model, default=0.0) > NEXT_TO_NONE:
        yield (
            "Against what the trained model leaks: train for fewer epochs, or with DPSGD, and "
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
    if any(a.control_note == WEAK_REFERENCE for a in fit.attacks):
        yield "Give a reference that was trained as this model was, on as many rows."
    if weak := [a for a in fit.attacks if a.is_blind and a.control_note != WEAK_REFERENCE]:
        yield (
            f"{_names(weak)} reads little here even where the words are known: set attacks='auto', "
            "which chooses by itself, or use smaller batches."
        )
    for reason in dict.fromkeys(fit.not_played.values()):
        if "=" in reason:  # the reason names an argument
            yield f"Run {', '.join(n for n, w in fit.not_played.items() if w == reason)}: {reason}."
    unsure = [a for a in fit.attacks if a.conclusive is False and a.stage != RELEASED]
    if unsure:
        yield (
            f"Narrow the interval of {_names(unsure)}, which includes guessing: "
            f"measure more often, or query more texts with {watcher}(games=Games(targets=...))."
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
