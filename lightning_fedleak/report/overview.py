"""The overview of a run: one sentence, one reading of each kind of leak, and six facts.

A *family* is all attacks on one kind of leak, and a *look* is a measurement of leakage at one step.
An attack's *quoted* look is the one whose value a report states. An attack is *blind* if its
positive control, the same attack on known data, recovers little too; *stale* if its last result is
of earlier weights; *certified* if it verified its own result.

:func:`overview` first makes a :class:`Reading` for each family: the value of the attack that
recovered most, and a verdict on it. The sentence and the facts follow from the readings. Every
format of the report has these words and numbers; ``charts`` draws them.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from lightning_fedleak.report.attacks import NEXT_TO_NONE, RELEASED, AttackSummary, QuotedLook
from lightning_fedleak.report.fits import FitSummary
from lightning_fedleak.report.privacy import OPEN_END
from lightning_fedleak.report.records import HIGH, PLANTED, STANDARD_FAMILIES, Family, MetricValue
from lightning_fedleak.report.records.lines import title_of
from lightning_fedleak.report.series import are_apart, before_and_after, is_leak, knee, utility
from lightning_fedleak.report.wording import brief, brief_interval, capitalized, measure, percent

# Words for how often an attack is right and for how much it names, by the least share of the way
# from guessing to certainty that the lower end of its interval has. Not tuned.
SCALE = (
    (0.9, {"surely": "almost every time", "amount": "almost all"}),
    (0.5, {"surely": "often", "amount": "most"}),
    (0.0, {"surely": "better than by guessing", "amount": "some"}),
)
ACTIONS = {  # what a gate did, by its name in run.jsonl, as a verb in the past tense
    "warn": "warned",
    "stopped": "stopped the run",
    "withheld": "kept updates back",
    "hardened": "turned the defence up",
    "raise": "raised an error",
}
_IN_BRACES = re.compile(r"\{([^}]+)\}")  # a metric or a phrase in a family's sentence
STAYS = "Stays here"  # the answer on updates that do not leave
_Verdict = Literal["read", "inconclusive", "little", "unknown", "untested"]


class Part(NamedTuple):
    """A part of a sentence, and the class of page.css that it has: bold, or red for a leak."""

    text: str
    tone: Literal["", "strong", "read"] = ""


Sentence = tuple[Part, ...]


def plain(sentence: Sentence) -> str:
    """Return a sentence as text."""
    return "".join(part.text for part in sentence)


@dataclass(frozen=True, kw_only=True)
class Reading:
    """The leakage of one kind, by the attack that recovered most.

    Attributes:
        family, title, question: The kind of leak.
        verdict: ``read`` if the interval excludes guessing and the value is well above it;
            ``little`` if the value is next to guessing; ``inconclusive`` if it is neither;
            ``unknown`` if there is no value, or the attack is blind or stale; ``untested`` if no
            attack read what left.
        answer: The value, or the reason why there is none, in words.
        measure: The common name of the metric; empty without a value.
        rate: The value with its interval.
        chance: The value that guessing would have.
        gate: The lowest ``at_most`` of the gates on the value; None without a gate.
        control: The value of the attack's positive control; None without a control.
        comparisons: The values before the defence and of the sum over clients, in words.
        note: The reasons for the verdict, and the looks and numbers behind the value.
        mend: What to do, if the verdict is ``read``; else empty.
        attack: The name of the attack.
        silent: The attacks of the family without a result, whose leakage is unknown.
    """

    family: str
    title: str
    question: str
    verdict: _Verdict = "untested"
    answer: str = "Not tested"
    measure: str = ""
    rate: MetricValue | None = None
    chance: float = 0.0
    gate: float | None = None
    control: float | None = None
    comparisons: Sequence[str] = ()
    note: str = "Not measured. This says nothing about safety."
    mend: str = ""
    attack: str = ""
    silent: Sequence[str] = ()

    @property
    def height(self) -> float:
        """Return how far the value is above guessing, at most 1; -1 without a value."""
        value = self.rate.value if self.rate else None
        return -1.0 if value is None else (value - self.chance) / (1 - self.chance)


class _Fact(NamedTuple):
    """A fact of a run, and whether the page highlights the first word of its value as an alarm."""

    name: str
    value: str
    detail: str = ""
    is_alarming: bool = False


@dataclass(frozen=True, kw_only=True)
class Overview:
    """The overview of a run.

    Attributes:
        run_line: The length of the run, how it ended, and the number of looks.
        sentence: What an adversary could do.
        warnings: Sentences about what the numbers do not cover.
        readings: One reading of each kind of leak, those that were tested first.
        facts: Six facts.
        knee: How stopping at the best utility would have changed the leakage; empty if unknown.
    """

    run_line: str
    sentence: Sentence = field(metadata={"write": plain})
    warnings: Sequence[str]
    readings: Sequence[Reading]
    facts: Sequence[_Fact]
    knee: str

    @property
    def sentences(self) -> list[str]:
        """Return the whole overview in sentences."""
        answers = [f"{r.title}: {r.answer}. {r.note}" for r in self.readings]
        facts = [f"{f.name}: {f.value}; {f.detail}".strip("; ") + "." for f in self.facts]
        details = [*answers, *facts, self.knee]
        return [plain(self.sentence), *self.warnings, *filter(None, details)]


def overview(fit: FitSummary) -> Overview:
    """Return the overview of a run."""
    families = {family.name: family for family in STANDARD_FAMILIES}
    for attack in fit.attacks:
        if attack.family.headline and attack.family.name not in PLANTED:
            families.setdefault(attack.family.name, attack.family)
    readings = [_reading(fit, family) for family in families.values()]
    run_line = f"until {fit.unit} {fit.steps or 0:,}, {fit.end}; {fit.looked_at:,} measurements"
    if fit.length is not None:
        steps = f"{fit.length:,} {fit.unit}{'s' * (fit.length != 1)}"
        run_line = f"{fit.end}; measured {fit.looked_at:,} of {steps}"
        times = max((a.looks for a in fit.attacks if a.stage == RELEASED), default=0)
        if times and all(attack.stage == RELEASED for attack in fit.attacks):
            run_line = f"{fit.end}; {steps}; measured the trained model {times:,} times"
    return Overview(
        run_line=f"{run_line}; {fit.start[:10]}",
        sentence=_sentence(fit, readings),
        warnings=[*_warnings(fit)],
        readings=sorted(readings, key=lambda reading: reading.verdict == "untested"),
        facts=_facts(fit, readings),
        knee=curve.sentence if (curve := knee(fit)) else "",
    )


def _warnings(fit: FitSummary) -> Iterator[str]:
    """Yield sentences about refuted accounts, withheld updates and other gaps of the numbers."""
    if any(a.refuted for a in fit.attacks):
        yield (
            "The trained model shows more than the account of differential privacy allows. Its "
            "epsilon does not hold."
        )
    elif compared := sorted({a.name for a in fit.attacks if a.refuted is False}):
        yield (
            f"The account of differential privacy was not refuted by {', '.join(compared)}. That "
            "does not confirm it."
        )
    if fit.rows is not None:
        yield fit.rows_in_words
    if fit.withheld:
        yield (
            f"Gates kept back {fit.withheld} of {fit.updates} updates: the large numbers "
            "are of those that left."
        )
    if any(account.holds and not account.whole for account in fit.privacy):
        yield OPEN_END


# ---- readings -----------------------------------------------------------------------------------


def of_what_left(fit: FitSummary, family: str = "") -> list[AttackSummary]:
    """Return the attacks on data that left a client: updates, and the trained model.

    In a family without an attack on updates, the attacks on the sum over clients take their place.

    Args:
        fit: The run.
        family: The name of the only family to return; empty for all families.
    """
    shared = {a.family.name for a in fit.attacks if a.stage == "shared"}
    return [
        a
        for a in fit.attacks
        if a.exposed
        and a.stage in (RELEASED, "shared" if a.family.name in shared else "aggregate")
        and (not family or a.family.name == family)
    ]


def _is_read(attack: AttackSummary) -> bool:
    """Return whether the quoted look shows a leak, and the test over all looks agrees."""
    conclusive = attack.conclusive is not False
    return attack.quoted is not None and conclusive and is_leak(attack.quoted.rate, attack.chance)


def _excess(attack: AttackSummary) -> float:
    """Return how far the result of an attack is above guessing; -1 without a result."""
    value = attack.quoted.rate.value if attack.quoted else None
    return -1.0 if value is None else value - attack.chance


def best_of_family(fit: FitSummary, family: str) -> AttackSummary | None:
    """Return the attack that recovered most: one with a leak comes first, a blind one last."""
    measured = [a for a in of_what_left(fit, family) if a.quoted is not None]
    return max(measured, key=lambda a: (_is_read(a), not a.is_blind, _excess(a)), default=None)


def _blind_attacks(attacks: Sequence[AttackSummary]) -> list[AttackSummary]:
    """Return the blind attacks: a low result shows nothing, since the control is low too.

    There are none if any attack is high. As in a gate, a blind attack is left out if another attack
    with a result at the same stage is not blind and reads some of the same parameters.
    """
    if any(a.above_chance > HIGH for a in attacks):
        return []
    # Parameters alone: hidden states, whose name has spaces, may be of different layers.
    reading = [(a, {n for n in a.reads if " " not in n}) for a in attacks]
    capable = [(a.stage, names) for a, names in reading if a.looks and not a.is_blind]
    blind = [a for a in attacks if a.is_blind]
    return [a for a in blind if not any(s == a.stage and r & {*a.reads} for s, r in capable)]


def _reading(fit: FitSummary, family: Family) -> Reading:
    """Return the reading of a family: the value of its best attack, and the verdict on it."""
    attacks, attack = of_what_left(fit, family.name), best_of_family(fit, family.name)
    reading = Reading(
        family=family.name, title=capitalized(family.short_title), question=family.tested
    )
    if attack is None or attack.quoted is None:
        return replace(reading, **(_without_value(attacks) if attacks else _unexposed(fit, family)))
    # A value that shows a leak counts whatever the controls are. Any other value is unknown if an
    # attack of the family is blind, or if it is of earlier weights. Otherwise it is "little" next
    # to chance, and inconclusive above.
    # ``corrected``: the value corrected by the control, for attacks that have no guessing.
    corrected = 0.0 if attack.chance else attack.above_chance
    is_little = max(_excess(attack), corrected) <= NEXT_TO_NONE
    verdict: _Verdict = "little" if is_little else "inconclusive"
    if _is_read(attack):
        verdict = "read"
    elif _blind_attacks(attacks) or attack.stale:
        verdict = "unknown"
    more = "with a smaller epsilon" if any(a.holds for a in fit.privacy) else "under DP-SGD"
    roots = (f"/worst/{family.name}", f"/{attack.name}/{attack.headline}")
    return replace(
        reading,
        verdict=verdict,
        answer="Unknown" if verdict == "unknown" else brief(attack.quoted.rate.value),
        measure=measure(attack.headline),
        rate=attack.quoted.rate,
        chance=attack.chance,
        gate=min(limits_of(fit, *roots), default=None),
        control=attack.quoted.control,
        comparisons=[*_comparisons(fit, attack)],
        note=" ".join(filter(None, _notes(fit, attack, attacks, verdict))),
        mend=family.mend.replace("under DP-SGD", more) if verdict == "read" else "",
        attack=attack.name,
        silent=[a.name for a in attacks if not a.quoted and a.unknown],
    )


def _unexposed(fit: FitSummary, family: Family) -> dict[str, Any]:
    """Return answer and note if all data that a family's attacks read stayed local; else {}."""
    names = [a.name for a in fit.attacks if a.family.name == family.name and not a.exposed]
    if fit.begin.keeps_updates and family.name != "memorization":
        note = "Only the trained model leaves: stated by the user, not checked."
        return {"answer": STAYS, "note": note}
    if not names:
        return {}
    note = f"What {', '.join(names)} reads is not shared. What is was not measured."
    return {"answer": "Not shared", "note": note}


def _without_value(attacks: Sequence[AttackSummary]) -> dict[str, Any]:
    """Return the verdict, answer and note for attacks without a value.

    They are those of an attack that certified its own result, or else of the first attack. If a
    gate withheld all of that attack's updates, the answer says so.
    """
    attack = next((a for a in attacks if a.certified), attacks[0])
    note = f"{attack.name}: {attack.why_unknown or 'it gave no result'}."
    if attack.certified:
        note = (
            f"Nobody could compare what {attack.name} read with the texts. Its own check held at "
            f"{percent(attack.certified)} of the measurements: what it found explains all "
            "that was shared."
        )
    if attack.withheld and not attack.unknown:
        note = f"A gate kept back all {attack.withheld} updates that could be read."
        return {"verdict": "unknown", "answer": "Withheld", "note": note}
    return {"verdict": "unknown", "answer": "Unknown", "note": note}


def limits_of(fit: FitSummary, *names: str) -> list[float]:
    """Return the gates' limits up to 1; with ``names``, of metrics that contain one of them."""
    gates = [g for g in fit.gates or () if not names or any(name in g.metric for name in names)]
    return sorted({g.at_most for g in gates if g.at_most is not None and g.at_most <= 1})


def _comparisons(fit: FitSummary, attack: AttackSummary) -> Iterator[str]:
    """Yield the attack's values before the defence and on the sum over clients, in words."""
    for change in before_and_after(fit) if attack.stage == "shared" else ():
        if change.attack == attack.name:
            spread = " on average" if change.is_mean else f" ({brief_interval(change.before)})"
            yield f"before the defence {brief(change.before.value)}{spread}"
    for summary in fit.attacks:
        if summary.name == attack.name and summary.stage == "aggregate" != attack.stage:
            value = summary.quoted.rate.value if summary.quoted else None
            yield f"in the sum of {fit.shared.clients} clients {brief(value)}"


def _notes(
    fit: FitSummary, attack: AttackSummary, attacks: Sequence[AttackSummary], verdict: _Verdict
) -> Iterator[str]:
    """Yield the reasons for the verdict, and the looks and numbers behind the value."""
    quoted = attack.quoted
    assert quoted is not None
    yield _verdict_reason(attack, quoted, verdict)
    if attack.stale:
        yield f"Of earlier weights. Those at the end are unknown: {attack.stale}."
    yield from (f"{a.name}: {a.control_note}." for a in _blind_attacks(attacks))
    if attack.control_note and not attack.blind:
        yield f"{capitalized(attack.control_note)}."
    recall, precision = quoted.rates.get("recall"), quoted.rates.get("precision")
    if recall and precision and attack.headline == "f1":
        recovered = capitalized(percent(recall))
        yield f"{recovered} found, {percent(precision)} of what was named was there."
    interval = brief_interval(quoted.rate)
    n = "" if quoted.n is None else f"n {quoted.n:,}; "
    unknown = f"; unknown at {attack.unknown} more" if attack.unknown else ""
    higher = max(attacks, key=_excess)
    if higher.quoted and _excess(higher) > _excess(attack):
        unknown += f"; {higher.name} reads {brief(higher.quoted.rate.value)}, not conclusive"
    yield f"{interval and f'95% {interval}, '}{n}{_source(fit, attack)}{unknown}."
    if silent := [a.name for a in attacks if not a.quoted and a.unknown]:
        yield f"No result of {', '.join(silent)}: what it would have read is unknown."
    yield f"{attack.name}."


def _verdict_reason(attack: AttackSummary, quoted: QuotedLook, verdict: _Verdict) -> str:
    """Return the reason for a verdict; empty if the verdict is ``read``."""
    if verdict == "little":
        if quoted.rates.get("recall", 0.0) > NEXT_TO_NONE:  # so many names, for a low F1
            return "Hardly any name is right."
        return "Next to guessing." if attack.chance else "Next to none."
    if verdict == "unknown":
        return f"It reads {brief(quoted.rate.value)}."
    if verdict == "read":
        return ""
    reason = "the interval still includes guessing"
    if quoted.rate.low is None:
        reason = "no interval was recorded"
    elif is_leak(quoted.rate, attack.chance):
        reason = "over all measurements guessing does so well too"
    return f"Not conclusive: {reason}."


def _source(fit: FitSummary, attack: AttackSummary) -> str:
    """Return the look that a value comes from, and the number of looks, in words."""
    assert attack.quoted is not None
    which = "last" if attack.quoted.is_latest else "highest"
    if len(attack.clients) > 1:
        return f"{which} of {attack.looks} results at {len(attack.clients)} clients"
    if attack.looks == 1:
        return f"one measurement, {fit.unit} {attack.quoted.step}"
    mean = "" if attack.quoted.is_latest else f"; mean {brief(attack.mean)}"
    return f"{which} of {attack.looks} measurements, {fit.unit} {attack.quoted.step}{mean}"


# ---- the sentence -------------------------------------------------------------------------------


def _sentence(fit: FitSummary, readings: Sequence[Reading]) -> Sentence:
    """Return the page's first sentences: what an adversary could do, and the defence's effect.

    A refuted privacy account is named before them, and a high but inconclusive value between them.
    """
    parts: list[Part] = []
    if refuting := sorted({a.name for a in fit.attacks if a.refuted}):
        by = f" by {', '.join(refuting)}."
        parts = [Part("The account of differential privacy is "), Part("REFUTED", "read"), Part(by)]
    for attacks, subject in _by_subject(fit, readings):
        for i, attack in enumerate(attacks):
            parts += [Part(" and " if i else f" {subject}"), *_capability(fit, attack)]
        parts += [Part(".")] * bool(attacks)
    if high := [r for r in readings if r.verdict == "inconclusive" and r.height > HIGH]:
        names = _titles(high, "inconclusive", " and ")
        parts.append(Part(f" High, but in too few measurements to be sure: {names}."))
    effect = _defense_effect(fit, readings)
    if not parts:
        return (*effect, *_without_result(readings))
    parts += [Part(" "), *effect]
    return (Part(parts[0].text.lstrip()), *parts[1:-1], Part(parts[-1].text.rstrip()))


def _by_subject(
    fit: FitSummary, readings: Sequence[Reading]
) -> Iterator[tuple[list[AttackSummary], str]]:
    """Yield the attacks that read updates, hidden states or the model, and their subject."""
    best = [best_of_family(fit, r.family) for r in readings if r.verdict == "read"]
    models = [a for a in best if a and a.stage == RELEASED]
    updates = [a for a in best if a and a.stage != RELEASED]
    states = [a for a in updates if any("activations" in name for name in a.reads)]
    updates = [a for a in updates if a not in states]
    yield updates, _update(fit, updates)
    yield states, "Hidden states let the server "
    yield models, "The trained model "


def _defense_effect(fit: FitSummary, readings: Sequence[Reading]) -> Sentence:
    """Return how far the defence lowered leakage; empty without a look before and after it."""
    lowered: list[Part] = []
    unchanged: list[str] = []
    pairs = before_and_after(fit) if fit.defenses else []
    family_of = {attack.name: attack.family.name for attack in fit.attacks}
    for reading in sorted(readings, key=lambda x: x.verdict != "little"):
        of_family = [pair for pair in pairs if family_of[pair.attack] == reading.family]
        if not of_family or reading.verdict == "unknown":
            continue
        pair, kind = max(of_family, key=lambda p: p.before.value or 0.0), reading.title.lower()
        if reading.silent or not all(are_apart(pair.before, x) for x in (pair.after, reading.rate)):
            unchanged.append(kind)
            continue
        start = " and" if lowered else "The defence brought"
        words = f"{start} {kind} from {reading.measure} {brief(pair.before.value)} down to "
        lowered += [Part(words), Part(reading.answer, "strong")]
    if unchanged:
        start = ". It" if lowered else "The defence"
        lowered.append(Part(f"{start} shows no difference for {' and '.join(unchanged)}"))
    return (*lowered, Part(". ")) if lowered else ()


def _update(fit: FitSummary, attacks: Sequence[AttackSummary]) -> str:
    """Return the beginning of the sentence about updates, such as "One update lets the server".

    A training of one client may keep its gradients, unless its user states that they leave.
    """
    update = "One client's update" if fit.unit == "round" else "One update"
    if _may_be_kept(fit):
        update = "If gradients are shared, one update"
    if any(attack.stage == "aggregate" for attack in attacks):
        update = "The sum over clients"
    is_dishonest = all(attack.dishonest for attack in attacks)
    server = "a server that may add layers to the model" if is_dishonest else "the server"
    return f"{update} lets {server} "


def _may_be_kept(fit: FitSummary) -> bool:
    """Return whether gradients may not leave: one client takes steps, and its user says nothing."""
    return fit.unit == "step" and not fit.begin.stated and (fit.shared.clients or 1) == 1


def _titles(readings: Sequence[Reading], verdict: str, separator: str = ", ") -> str:
    """Return the titles of the readings with a verdict, joined."""
    return separator.join(r.title.lower() for r in readings if r.verdict == verdict)


def _without_result(readings: Sequence[Reading]) -> Sentence:
    """Return the sentence of a run without a conclusive result."""
    if unsure := _titles(readings, "inconclusive", " and "):
        text = f"{unsure}. More measurements or texts would show it."
        return (Part("Not conclusive: ", "strong"), Part(text))
    if not any(reading.verdict == "little" for reading in readings):
        return (Part("Nothing was measured. That is unknown, not safe."),)
    unknown = _titles(readings, "unknown")
    limit = f"Unknown: {unknown}." if unknown else "Others may read more."
    return (Part("These attacks read "), Part("little or nothing", "strong"), Part(f". {limit}"))


def _capability(fit: FitSummary, attack: AttackSummary) -> Iterator[Part]:
    """Yield what an adversary could do with an attack, as the parts of a sentence of its family.

    The first sentence of the family is used; the last one if the headline is an excess over a
    baseline.
    """
    assert attack.quoted is not None
    values = attack.quoted.rates
    low = ((attack.quoted.rate.low or 0.0) - attack.chance) / (1 - attack.chance)
    words = next(words for least, words in SCALE if low >= least)
    text = attack.family.all_sentences[-(attack.headline in attack.family.excesses)]
    pieces = _IN_BRACES.split(text.replace("batch", fit.unit) if fit.unit == "round" else text)
    for i, piece in enumerate(pieces):
        name = brief(values[piece]) if piece in values else words.get(piece, piece)
        yield Part(name, "read") if i % 2 else Part(piece)


# ---- facts --------------------------------------------------------------------------------------


def _facts(fit: FitSummary, readings: Sequence[Reading]) -> list[_Fact]:
    """Return six facts: what left, who could read it, defence, utility, gate, not tested."""
    tested = {reading.family for reading in readings if reading.verdict != "untested"}
    shared = fit.shared
    details = f"; {shared.clients} clients" if (shared.clients or 1) > 1 else ""
    details += "; stated by the user, not checked" * bool(fit.begin.stated)
    left = shared.update + ", if shared" * _may_be_kept(fit)
    gaps = {"attacks not run": fit.not_played, "parameters that none reads": shared.unread}
    is_dishonest = any(a.dishonest for a in fit.attacks)
    ability = "may add layers to the model" if is_dishonest else "only listens; knows the weights"
    exposure = [
        _Fact("What left", left, shared.size + details),
        _Fact("Who could read it", shared.seen_by, ability),
    ]
    if tested == {"memorization"}:
        exposure = [
            _Fact("What left", "The trained model, in the end", f"{shared.size} trained"),
            _Fact("Who could read it", "Whoever gets the trained model", "holds candidate texts"),
        ]
    return [
        *exposure,
        _defense(fit),
        _utility_fact(fit),
        _gate_fact(fit),
        _Fact(
            "Not tested",
            capitalized(_titles([r for r in readings if r.answer != STAYS], "untested"))
            or ("Nothing that leaves" if fit.begin.keeps_updates else "None of these kinds"),
            ", ".join(f"{len(names)} {title}" for title, names in gaps.items() if names),
        ),
    ]


def _defense(fit: FitSummary) -> _Fact:
    """Return the fact on the defences, their effect and their epsilon."""
    are_named = len(fit.privacy) > 1
    claims = [f"{a.claim_in_short}{f' ({a.defense})' * are_named}" for a in fit.privacy]
    if fit.defenses is None:
        return _Fact("Defence", "Not recorded", "; ".join(claims))
    if not fit.defenses:
        return _Fact("Defence", "None")
    detail = "; ".join(claims) or "no differential privacy was accounted"
    refuted = any(a.refuted for a in fit.attacks)
    value = "; ".join(fit.shared.effects)
    return _Fact("Defence", f"REFUTED: {value}" if refuted else capitalized(value), detail, refuted)


def _utility_fact(fit: FitSummary) -> _Fact:
    """Return the fact on the first utility metric: its last value, and its first one."""
    for name, points in utility(fit).items():
        description = title_of(name).removeprefix(name).strip(" ()")
        begin = f"from {points[0][1]:.3f}" if len(points) > 1 else "one value"
        step, last = points[-1]
        detail = f"{description}{'; ' * bool(description)}{begin}, {fit.unit} {step}"
        return _Fact("Utility", f"{name} {last:.3f}", detail)
    return _Fact("Utility", "Not recorded")


def _gate_fact(fit: FitSummary) -> _Fact:
    """Return the fact on the gates: their limits, and when they acted first."""
    gates = [
        f"{gate.metric.removeprefix('leakage/')} at most {brief(gate.at_most)}"
        for gate in fit.gates or ()
    ]
    decisions = [d for d in fit.decisions if d.did != "not yet"]  # nothing could be read yet
    if not decisions:
        if fit.gates:
            return _Fact("Gate", "Never acted", "; ".join(gates))
        return _Fact("Gate", "Not recorded" if fit.gates is None else "No limit was set")
    first, n_further = decisions[0], len(decisions) - 1
    only_warned = all(decision.did == "warn" for decision in decisions)
    further = f" and {n_further} time{'s' * (n_further > 1)} more" if n_further else ""
    verb, adverb = ("Exceeded", "only ") if only_warned else ("Acted", "")
    action = ACTIONS.get(first.did, first.did)
    value = f"{verb} at {fit.unit} {first.step}{further}: it {adverb}{action}"
    return _Fact("Gate", value, "; ".join(gates), only_warned)
