"""What a reader who reads one thing should read, and what can be done next."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from lightning_fedleak.report.attacks import (
    NEXT_TO_NONE,
    RELEASED,
    SHOWN,
    UNKNOWN_FAMILY,
    AttackSummary,
)
from lightning_fedleak.report.bounds import JointAccount
from lightning_fedleak.report.fits import FitSummary
from lightning_fedleak.report.logs import grouped
from lightning_fedleak.report.privacy import Account
from lightning_fedleak.report.records import HIGH, STANDARD_FAMILIES, Family
from lightning_fedleak.report.wording import FOR_UNIT, TRUST, digits, percent

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
        step
        for topic in (_against_reading, _to_measure, _about_epsilon)
        for fit in fits
        for step in topic(fit)
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
    private = any(account.holds for account in fit.privacy)
    defense = _CLIENT_DEFENSE if fit.unit == "round" else _DEFENSE
    if titles:
        noise = f"defend what leaves: {defense}"
        if private:
            noise = "add more noise: a smaller target_epsilon, or a larger noise_multiplier"
        elif fit.defenses:
            noise = f"turn {', '.join(d.name for d in fit.defenses)} up, or {noise}"
        yield (
            f"Against what was read ({' and '.join(titles.values())}): {noise}. Larger batches "
            "give away less of each text. Then compare both runs: fedleak compare BEFORE AFTER."
        )
    if any(a.stage == RELEASED and a.above_chance > NEXT_TO_NONE for a in fit.attacks):
        yield (
            "Against what the trained model gives away: train for fewer epochs, or with DPSGD, and "
            "test it again."
        )
    elif not titles and not private and fit.recorded:
        yield f"Low numbers guarantee nothing. For a guarantee, defend what leaves: {defense}."
    if fit.gates is not None and (unwatched := [f for f in titles if not _is_watched(fit, f)]):
        gate = "RoundGate" if fit.unit == "round" else "RiskGate"
        gates = (f"{gate}('leakage/worst/{family}', at_most=...)" for family in unwatched)
        yield f"Let a gate stop what is too much: {', '.join(gates)}."


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
    few_others = [
        a
        for a in fit.attacks
        if a.stage == RELEASED and a.looks and "shown" in a.rates and a.rates["shown"] is None
    ]
    if few_others:
        yield (
            f"Let {_names(few_others)} show what the trained model gives away: leave more texts "
            "out of the training (train, others = leave_out(dataset, n))."
        )
    if unsure:
        yield (
            f"Narrow the interval of {_names(unsure)}, which includes guessing: "
            f"measure more often, or ask about more texts with {watcher}(games=Games(targets=...))."
        )
    yield from _untested(fit, watcher)
    if any((a.config or {}).get("public_text") == "sampled" for a in fit.attacks):
        yield (
            "Pass public_text= with text like your clients' to simulate a better-informed attacker."
        )


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


def _about_epsilon(fit: FitSummary) -> Iterator[str]:
    """Yield what makes an epsilon hold, or worth more."""
    for account in fit.privacy:
        name = account.defense
        if not account.holds:
            yield f"Make {name}'s guarantee hold: {account.guarantee}"
        elif not account.whole:
            yield f"Keep a ledger, which knows every release of a killed run: ledger= of {name}."
        elif account.limits_little:
            yield (
                f"Lower {name}'s epsilon, which limits little: more noise, fewer steps, or more "
                "data to draw from."
            )
        if account.trusted == TRUST["sum"]:
            yield (
                "Check that secure aggregation really hides each client's update: epsilon depends "
                "on it."
            )


MUCH_HIGHER = 0.2
"""A highest look or worst client this much above the mean is named. Not tuned; lower names more."""
_METRIC = re.compile(r"\{([\w.]+)(%?)\}")


@dataclass(frozen=True)
class ReportVerdict:
    """The verdict on some runs.

    Attributes:
        sentence: all sentences as one text.
        sentences: the worst first.
        level: ``"high"``, ``"some"`` or ``"unknown"``.
        worst: the highest mean of each family; of the trained model the highest last value.
    """

    sentence: str
    sentences: Sequence[str]
    level: str
    worst: Mapping[str, float]


@dataclass(frozen=True)
class _Measured:
    """An attack at the stage of which the verdict speaks, and its run."""

    fit: FitSummary
    attack: AttackSummary

    @property
    def family(self) -> str:
        """Name of the attack's family; with the metric where that is not the family's headline."""
        family, headline = self.attack.family, self.attack.headline
        return family.name if headline == family.headline else f"{family.name} ({headline})"

    @property
    def value(self) -> float | None:
        """The mean over looks; of the trained model the last value, which is nearest to it."""
        attack = self.attack
        if attack.stage == RELEASED:
            return attack.last.value if attack.last else None
        return attack.mean


def verdict(fits: Sequence[FitSummary], joint: Sequence[JointAccount]) -> ReportVerdict:
    """Return what runs showed, the worst first and what reassures last."""
    measured = [
        _Measured(fit, a) for fit in fits for a in fit.attacks if a.stage in (_stage(fit), RELEASED)
    ]
    shared = [one for one in measured if one.attack.exposed]
    best = _best(shared)
    excess = _excess(best, shared)
    results = {name: _result(one, shared, fits) for name, one in best.items()}
    alarming, reassuring = _sorted(results, best, excess, shared)
    checks, withheld = _certificates(measured), _withheld(fits)
    sentences = ["Nothing was measured in these runs. That is 'unknown', not 'safe'."]
    if best or withheld or checks:
        families = _families(measured)
        unknown = _without_result(fits, shared, families, best.keys())
        gaps = _gaps(shared, families, best.keys())
        sentences = [*alarming, *checks, *unknown, *withheld, *gaps, *reassuring]
    refutations, others = _accounts(fits)
    sentences = [*refutations, *sentences, *_gates(fits), *_privacy(fits, joint), *others]
    counted = [name for name in excess if not _blind(name, shared)]
    is_high = any(
        one.attack.above_chance > HIGH
        and (one.attack.conclusive is not False or one.attack.p_value is None)
        for one in shared
        if one.family in counted
    )
    level = "high" if is_high else "some" if counted else "unknown"
    level = "high" if refutations else level
    worst = {name: one.value or 0.0 for name, one in best.items()}
    return ReportVerdict(" ".join(sentences), sentences, level, worst)


def _sorted(
    results: Mapping[str, str],
    best: Mapping[str, _Measured],
    excess: Mapping[str, float],
    shared: Sequence[_Measured],
) -> tuple[list[str], list[str]]:
    """Return what alarms, and what reassures: next to nothing, of the weights of the end."""
    calm = {
        n
        for n, one in best.items()
        if excess[n] <= NEXT_TO_NONE and not one.attack.stale and not _blind(n, shared)
    }
    alarming = [text for name, text in results.items() if name not in calm]
    return alarming, [text for name, text in results.items() if name in calm]


def _blind(family: str, shared: Sequence[_Measured]) -> list[AttackSummary]:
    """Return the attacks by which a family's low numbers say nothing: their controls are low too.

    As in a gate, an attack whose control is low does not count where another one that reads the
    same has a control that is not.
    """
    rivals = [one for one in shared if one.family == family]
    if any(one.attack.above_chance > HIGH for one in rivals):
        return []
    seeing = [one for one in rivals if one.attack.looks and not one.attack.is_blind]
    return [
        one.attack
        for one in rivals
        if one.attack.is_blind and not any(_reads_the_same(one, other) for other in seeing)
    ]


def _reads_the_same(one: _Measured, other: _Measured) -> bool:
    """Return whether two attacks of a run read something in common at one stage."""
    attacks = one.attack, other.attack
    same = one.fit is other.fit and attacks[0].stage == attacks[1].stage
    return same and not set(attacks[0].reads).isdisjoint(attacks[1].reads)


def _families(measured: Sequence[_Measured]) -> dict[str, Family]:
    """Return the families of this package and those of the attacks, by name."""
    families = (*STANDARD_FAMILIES, *(one.attack.family for one in measured))
    return {family.name: family for family in families if family != UNKNOWN_FAMILY}


def _withheld(fits: Sequence[FitSummary]) -> list[str]:
    """Return how many updates gates kept back, where they kept any."""
    withheld = sum(fit.withheld for fit in fits)
    updates = sum(fit.updates for fit in fits if fit.withheld)
    sentence = (
        f"Gates kept back {withheld} of {updates} updates: what those would have given away is in "
        "no number here."
    )
    return [sentence] if withheld else []


def _certificates(measured: Sequence[_Measured]) -> list[str]:
    """Return what attacks know to be right of themselves where nobody could score them."""
    return [
        f"Nobody could compare what {one.attack.name} read with the texts. Its own check held at "
        f"{percent(one.attack.certified)} of the measurements: what it found explains all that was "
        "shared."
        for one in measured
        if one.attack.mean is None and one.attack.certified
    ]


def _gaps(
    shared: Sequence[_Measured], families: Mapping[str, Family], with_result: Collection[str]
) -> list[str]:
    """Return which kinds of leak are unknown, and which nobody tested."""
    without_result = {one.family for one in shared if one.attack.unknown}.difference(with_result)
    withheld = {one.family for one in shared if one.attack.withheld}
    attempted = without_result | withheld | set(with_result)
    unknown = [one.tested for name, one in families.items() if name in without_result]
    untested = [one.tested for name, one in families.items() if name not in attempted]
    sentences = []
    if unknown:
        sentences.append(f"Attacks gave no result, so that it is unknown: {'; '.join(unknown)}.")
    if untested:
        sentences.append(f"Nobody tested {' or '.join(untested)}.")
    return sentences


def verdict_without_runs(commands: int) -> ReportVerdict:
    """Return the verdict on the results of commands alone."""
    sentence = (
        "No training run is in this report: it holds the results of "
        f"{commands} command{'s' * (commands > 1)}."
    )
    return ReportVerdict(sentence, [sentence], "unknown", {})


def _stage(fit: FitSummary) -> str:
    """Return what the verdict is about: what leaves a client, where anybody looked at it."""
    return "shared" if any(a.stage == "shared" for a in fit.attacks) else "aggregate"


def _best(shared: Sequence[_Measured]) -> dict[str, _Measured]:
    """Return the attack of the highest mean of each family.

    Families come in this order: what was read, then what is not conclusive, then what reassures.
    """
    best: dict[str, _Measured] = {}
    for one in shared:
        if one.value is None:
            continue
        other = best.get(one.family)
        if other is None or one.value > (other.value or 0.0):
            best[one.family] = one
    excess = _excess(best, shared)

    def rank(name: str) -> tuple[bool, bool, float]:
        little = excess[name] <= NEXT_TO_NONE and not _blind(name, shared)
        return little, little and best[name].attack.conclusive is not False, -excess[name]

    return {name: best[name] for name in sorted(best, key=rank)}


def _excess(families: Iterable[str], shared: Sequence[_Measured]) -> dict[str, float]:
    """Return how far above chance the attacks of each family read."""
    return {
        name: max(one.attack.above_chance for one in shared if one.family == name)
        for name in families
    }


def _without_result(
    fits: Sequence[FitSummary],
    shared: Sequence[_Measured],
    families: Mapping[str, Family],
    measured: Collection[str],
) -> list[str]:
    """Return what is unknown though another attack, or another run, has a result of the same kind.

    Args:
        fits: the runs.
        shared: every attack of the verdict's stage that had something to read.
        families: by name.
        measured: names of the families with a result.
    """
    sentences = []
    for fit in fits:
        attacks = [one.attack for one in shared if one.fit is fit]
        measured_families = {a.family.name for a in attacks if a.mean is not None}
        silent = [
            a.name
            for a in attacks
            if a.mean is None and a.unknown and a.family.name in measured_families
        ]
        run = f", run {_name(fit, fits)}" if len(fits) > 1 else ""
        if silent:
            sentences.append(
                f"No result, so that what they would have read is unknown{run}: "
                f"{', '.join(dict.fromkeys(silent))}."
            )
        withheld = {a.family.name for a in attacks if a.withheld}
        lacking = [
            family.tested
            for name, family in families.items()
            if name in measured and name not in measured_families | withheld
        ]
        if lacking:
            sentences.append(
                f"Run {_name(fit, fits)} has no result, so that it is unknown there: "
                f"{'; '.join(lacking)}."
            )
    return sentences


def _name(fit: FitSummary, fits: Sequence[FitSummary]) -> str:
    """Return the folder of a run; where it holds several runs, with the run's id."""
    namesakes = [one for one in fits if one.name == fit.name]
    return f"{fit.name} ({fit.run})" if len(namesakes) > 1 else fit.name


# ---- what was read ------------------------------------------------------------------------------


def _result(best: _Measured, shared: Sequence[_Measured], fits: Sequence[FitSummary]) -> str:
    """Return what the attack that read most of its family did, and how sure that is."""
    attack = best.attack
    source = "sum over clients" if attack.stage == "aggregate" else "shared update"
    source = "the trained model" if attack.stage == RELEASED else f"one {source}"
    server = (
        "whoever gets it"
        if attack.stage == RELEASED
        else {
            None: "a server",
            True: "a dishonest server, which adds layers of its own,",
            False: "an honest but curious server",
        }[attack.dishonest]
    )
    run = f", run {_name(best.fit, fits)}" if len(fits) > 1 else ""
    blind = _blind(best.family, shared)
    notes = " ".join(
        f"{one.name}: {one.control_note}"
        + (f", at {one.blind} of {one.looks} measurements." if one.looks > 1 else ".")
        for one in blind
    )
    if attack in blind:
        unknown = f"How far {source} gives away {attack.family.tested} is unknown{run}."
        return f"{unknown} {notes}"
    first = "The last" if attack.stage == RELEASED else "Mean"
    sure = f"{first} of {attack.looks} measurements" if attack.looks > 1 else "One measurement"
    if len(attack.clients) > 1:
        sure += f" at {len(attack.clients)} clients"
    if attack.unknown:
        sure += f", unknown at {attack.unknown} more"
    if attack.stale:
        sure += ". The weights that training ended with are unknown, and may give away more"
    rivals = [one.attack for one in shared if one.family == best.family]
    sure += _much_higher(best, "at the worst one", [(a.highest, a) for a in rivals])
    sure += _much_higher(best, "of the worst client", [(a.worst_client, a) for a in rivals])
    if attack.visible is not None and attack.headline != attack.family.headline:
        sure += f". A share below {attack.visible:.2f} could not have been seen"
    sure += _against_guessing(attack) + _beside_control(attack)
    result = f"From {source}, {server} could {_deed(attack)} ({attack.name}{run}). {sure}."
    return f"{result} More is unknown. {notes}" if blind else result


def _beside_control(attack: AttackSummary) -> str:
    """Return what the control of a low number says, after it."""
    if attack.control_note and not attack.blind:
        return f". {attack.control_note[0].upper()}{attack.control_note[1:]}"
    if attack.control is None or attack.above_chance > HIGH:
        return ""
    return f". Of known {attack.family.known} in the same step it reads {attack.control:.2f}"


def _against_guessing(attack: AttackSummary) -> str:
    """Return whether guessing does so well too; nothing where that is no question."""
    p_value, tested = attack.p_value, attack.p_value is not None
    if attack.conclusive and attack.chance and p_value is not None and p_value <= SHOWN:
        return f". Guessing does so well at any measurement with probability {p_value:.1g}"
    if attack.conclusive is not False:
        return ""
    alone = ". No measurement by itself excludes guessing" if tested else ""
    rate = attack.over_steps if tested else attack.last
    if not attack.chance or rate is None:
        return f"{alone}: not conclusive"
    start, place = (", and the", " over steps") if tested else (". The last", "")
    return (
        f"{alone}{start} 95% interval{place} ({rate.low:.2f} to {rate.high:.2f}) includes "
        f"{attack.chance:.2f}, guessing: not conclusive"
    )


def _much_higher(
    best: _Measured, place: str, rivals: Sequence[tuple[float | None, AttackSummary]]
) -> str:
    """Return the highest value of an attack and its rivals, where that is much higher."""
    attack = best.attack
    numbers = [(value, rival) for value, rival in rivals if value is not None]
    value, rival = max(numbers, key=lambda one: one[0], default=(0.0, attack))
    if value <= (best.value or 0.0) + MUCH_HIGHER:
        return ""
    name = "" if rival is attack else f" ({rival.name})"
    return f"; {attack.headline} {value:.2f} {place}{name}"


def _deed(attack: AttackSummary) -> str:
    """Return what an attack could do, in its family's words."""
    family = attack.family
    values: dict[str, float | None] = {**attack.means, "chance": family.chance}
    if attack.stage == RELEASED:
        values |= {name: rate.value for name, rate in attack.rates.items() if rate is not None}
    sentences = family.all_sentences
    if family.little and (attack.mean or 0.0) < NEXT_TO_NONE:
        few = "next to none" if attack.above_chance <= NEXT_TO_NONE else "few"
        sentences = (family.little.replace("{few}", few),)
    complete = (
        sentence
        for sentence in sentences
        if all(values.get(name) is not None for name, _ in _METRIC.findall(sentence))
    )
    return _METRIC.sub(
        lambda place: _metric(values.get(place[1]), place[2]), next(complete, sentences[-1])
    )


def _metric(value: float | None, unit: str) -> str:
    if unit:
        return percent(value)
    return "unknown" if value is None else f"{value:.2f}"


# ---- gates and privacy --------------------------------------------------------------------------


def _gates(fits: Sequence[FitSummary]) -> list[str]:
    """Return which gates watched the runs, and how often they acted."""
    sentences = []
    for fit in fits:
        run = f" in run {_name(fit, fits)}" if len(fits) > 1 else ""
        if fit.gates:
            times = len([one for one in fit.decisions if one.gate])
            rules = "; ".join(gate.rule for gate in fit.gates)
            acted = f"Acted {times} time{'s' * (times != 1)}" if times else "Never acted"
            sentences.append(f"Gates{run}: {rules}. {acted}.")
        elif fit.gates is not None and not fit.decisions:
            sentences.append(f"No gate watched{run or ' this run'}.")
    return sentences


def _privacy(fits: Sequence[FitSummary], joint: Sequence[JointAccount]) -> list[str]:
    """Return what the runs spent of differential privacy."""
    holding = [(fit, account) for fit in fits for account in fit.privacy if account.holds]
    by_defense: dict[tuple[str, str], list[Account]] = {}
    for _, account in holding:
        by_defense.setdefault((account.defense, account.unit), []).append(account)
    sentences = [
        sentence for accounts in by_defense.values() for sentence in _accounted(accounts, len(fits))
    ]
    if any(not account.whole for _, account in holding):
        sentences.append(
            "How a run with an epsilon ended is not recorded: what it released after its last look "
            "is not counted, so that its epsilon is no bound for the whole run."
        )
    for together in joint:
        so_far = "" if together.whole else ", as far as was recorded"
        sentences.append(
            f"{together.fits} fits by {together.defense}, if on the same examples, cost epsilon "
            f"{digits(together.epsilon)} at delta {digits(together.delta)} together"
            f"{FOR_UNIT.get(together.unit, '')}{so_far}."
        )
    private_runs = {id(fit) for fit, _ in holding}
    if len(private_runs) > 1 and len({defense for defense, _ in by_defense}) > 1:
        sentences.append("What fits by different defences cost together is not added up.")
    failing = {account.defense for fit in fits for account in fit.privacy if not account.holds}
    if failing:
        sentences.append(f"No guarantee holds for {', '.join(sorted(failing))}.")
    return sentences or ["No differential privacy was accounted."]


def _accounts(fits: Sequence[FitSummary]) -> tuple[list[str], list[str]]:
    """Return which accounts the trained model's attacks refute, and that others are not."""
    compared = [(fit, a) for fit in fits for a in fit.attacks if a.refuted is not None]
    runs = {_name(fit, fits): [a for other, a in compared if other is fit] for fit, _ in compared}
    refutations, rest = [], []
    for name, attacks in runs.items():
        names = ", ".join(a.name for a in attacks if a.refuted)
        where = f" of run {name}" if len(fits) > 1 else ""
        if names:
            refutations.append(
                f"The account of differential privacy{where} is REFUTED by {names}: the trained "
                "model shows more than the account allows. Its epsilon does not hold."
            )
        else:
            tried = ", ".join(a.name for a in attacks)
            rest.append(
                f"The account of differential privacy{where} was not refuted by {tried}. That "
                "does not confirm it."
            )
    return refutations, rest


def _accounted(accounts: Sequence[Account], fits: int) -> list[str]:
    """Return what the accounts of one defence say together; ``fits`` is how many runs there are."""
    worst = max(accounts, key=lambda account: account.epsilon_over_clients)
    runs = "" if len(accounts) == fits else f" in {len(accounts)} of {fits} runs"
    delta = max(account.bound[1] for account in accounts)
    sentence = (
        f"Differential privacy was accounted{runs}: epsilon {digits(worst.epsilon_over_clients)} "
        f"at delta {digits(delta)} by {worst.defense}{FOR_UNIT.get(worst.unit, '')}. "
        f"{' '.join(dict.fromkeys(account.trusted for account in accounts))}"
    )
    return [sentence, worst.limit] if worst.limit else [sentence]
