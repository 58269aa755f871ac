"""The summary of one fit for a report, from its log.

A *fit* is one training run or federation. Its *monitors* run the attacks, at *looks* (steps at
which leakage is measured); *gates* are rules that act if a metric exceeds a limit.
:func:`fit_summaries` merges the logs of the monitors of each fit and returns a :class:`FitSummary`:
which updates left the clients and who could see them, the result of each attack, what was not
tested, what each epsilon allows next to what was measured, and what the gates decided.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Literal, NamedTuple

from lightning_fedleak.report import records
from lightning_fedleak.report.attacks import (
    RELEASED,
    SUM,
    AttackSummary,
    NamedAttack,
    Points,
    named_attacks,
)
from lightning_fedleak.report.composition import FPR, MAX_SHOWN_EPSILON
from lightning_fedleak.report.logs import FitLog, grouped, merge_monitors
from lightning_fedleak.report.privacy import (
    CLIENT,
    TOKENS,
    Account,
    accounts,
    clip_in_words,
    trusted_party,
    without_ledger,
)
from lightning_fedleak.report.records import MetricValue, named
from lightning_fedleak.report.records.files import first_of
from lightning_fedleak.report.results import FitResults
from lightning_fedleak.report.wording import NOT_RECORDED, digits


@dataclass(frozen=True, kw_only=True)
class _Shared:
    """The update that left a client, the defences that changed it, and the parties that saw it.

    Attributes:
        update: The kind of update, in words.
        size: The number of its parameters, in words.
        effects: The effect of each defence on it, in words.
        clients: The number of clients; None if the run was not recorded.
        seen_by: The parties that could see it, in words.
        trained: The names of the trained parameters; None if they were not recorded.
        unread: The names of the trained parameters that no attack reads; None if not recorded.
    """

    update: str = NOT_RECORDED
    size: str = ""
    effects: Sequence[str] = ()
    clients: int | None = None
    seen_by: str = NOT_RECORDED
    trained: Sequence[str] | None = None
    unread: Sequence[str] | None = None

    @property
    def description(self) -> str:
        """The update, its size and the effects of the defences, as one sentence."""
        size = f", of {self.size}" if self.size else ""
        after = self.effects or ([] if self.clients is None else ["without a defence"])
        return "; ".join([f"{self.update}{size}, {after[0]}" if after else self.update, *after[1:]])


@dataclass(frozen=True, kw_only=True)
class _GateRule(records.GateFacts):
    """A gate as recorded, with its rule in words."""

    rule: str


REST = "capture, truth, control and scores of all"
"""The name of the cost that is the time of looks outside attacks.

It is that of recording the step, its ground truth, the positive controls and all scores.
"""


class _Cost(NamedTuple):
    """The time of one attack in all looks.

    Attributes:
        attack: The name of the attack, or :data:`REST`.
        looks: The number of looks that it ran in.
        seconds: The seconds that it took in them.
        share: Its share of the time of all looks.
    """

    attack: str
    looks: int
    seconds: float
    share: float


def _recorded(begin: records.BeginLine) -> records.JsonObject:
    """Return the parts of a log's first line that a report's JSON contains."""
    names = ("model", "training", "versions", "machine", "monitor")
    return {name: records.as_json(getattr(begin, name)) for name in names}


def _decisions(lines: Sequence[records.GateLine]) -> list[records.JsonObject]:
    """Return what a report's JSON contains of the decisions of gates."""
    shared = {attribute.name for attribute in fields(records.RunLine)}
    return [{n: v for n, v in records.as_json(line).items() if n not in shared} for line in lines]


@dataclass(frozen=True, kw_only=True)
class FitSummary:
    """The content of a report on one fit, or on one federation.

    Attributes:
        name: The name of its logs' folder.
        run: The id of its run, or the ids of its monitors.
        monitors: The number of monitors that wrote its log.
        unit: The unit of its step numbers.
        recorded: Whether the log has its first line.
        start, end: The time at which it began, and the way it ended, in words.
        steps: The step or round of the last look; None without a look.
        length: The number of steps or rounds; None if no end was recorded.
        looked_at: The number of steps or rounds at which an attack was tried.
        costs: The time of looks, by attack; the remaining time last.
        begin: The log's first line. A report's JSON has its model, training, versions, machine and
            monitor.
        settings_hash: The hash of the settings, as recorded.
        shared: The update that left a client.
        attacks: The results of each attack.
        updates, withheld: The number of updates, and of those that were withheld.
        utility: The user's own metrics over the steps.
        privacy: The privacy accounts of the defences.
        implied: The bounds on membership tests that follow from these accounts.
        defenses: The defences; None if they were not recorded. Their settings are without the
            ledger, which is a path of the machine.
        gates: The gates; None if they were not recorded.
        decisions: The decisions of gates.
        not_played: The reasons for which attacks were not run, by attack.
        not_tested: The parts of the privacy risk that were not tested, in sentences.
        named_attacks: The attacks that EDPB Opinion 28/2024 names in paragraph 55.
        rows: The counts of training rows that the trained model reveals; empty if they are
            unknown, None if they were not requested.
        values: The newest results on values that were found in the texts, in words.
        reference: The model that the trained model was compared with, in words; "" without one.
    """

    name: str
    run: str
    monitors: int
    unit: Literal["step", "round"]
    recorded: bool
    start: str = records.named("began")
    end: str = records.named("ended")
    steps: int | None
    length: int | None
    looked_at: int
    costs: Sequence[_Cost]
    begin: records.BeginLine = field(metadata={"others": True, "write": _recorded})
    settings_hash: str
    shared: _Shared
    attacks: Sequence[AttackSummary]
    updates: int
    withheld: int
    utility: Mapping[str, Points]
    privacy: Sequence[Account]
    implied: Sequence[_Allowance]
    defenses: Sequence[records.DefenseFacts] | None
    gates: Sequence[_GateRule] | None
    decisions: Sequence[records.GateLine] = field(metadata={"write": _decisions})
    not_played: Mapping[str, str]
    not_tested: Sequence[str]
    named_attacks: Sequence[NamedAttack] = records.named("edpb_28_2024_par_55")
    rows: Mapping[str, float] | None = None
    values: Mapping[str, str] = field(default_factory=dict)
    reference: str = ""

    @property
    def rows_in_words(self) -> str:
        """The counts of training rows that the trained model reveals, as sentences."""
        rows = self.rows or {}
        if "at_least" not in rows:
            return "Which training rows the trained model reveals is unknown."
        chosen = f"{rows['listed']:.0f} are listed" if "listed" in rows else "too few to list any"
        return (
            f"The trained model reveals at least {rows['at_least']:.0f} of "
            f"{rows['members']:.0f} training rows, with confidence {1 - rows['alpha']:.3g}; "
            f"{chosen} in records.jsonl. {rows['repeated']:.0f} further rows have copies."
        )


def fit_summaries(logs: Sequence[FitLog], problems: list[str]) -> list[FitSummary]:
    """Return a summary of each fit.

    The logs of several monitors of a fit, or of several processes of a federation, are merged.

    Args:
        logs: The logs of all fits.
        problems: The list of a report's problems; those of the ledgers are added to it.
    """
    fits = grouped(logs, lambda log: log.fit_name).values()
    return [_fit_summary(merge_monitors(monitors), problems) for monitors in fits]


def _fit_summary(log: FitLog, problems: list[str]) -> FitSummary:
    """Return the summary of a fit, and add the problems with the ledgers of its defences."""
    begin = log.begin or records.BeginLine(run=log.run)
    results = FitResults(log)
    attacks = results.attacks()
    spendings = accounts(log, problems)
    not_played = _not_played(log)
    shared = _shared(log.begin, len(results.clients), spendings)
    # Flower counts rounds from 1. Elsewhere steps and rounds are counted from 0: a look with the
    # number of the end is on the trained model, after the last step, and is no step of its own.
    from_one = log.is_federation and min(log.looks_at, default=0) == 1
    return FitSummary(
        name=log.folder.resolve().name,
        run=log.run or NOT_RECORDED,
        monitors=log.monitors,
        unit="round" if log.is_federation else "step",
        recorded=log.begin is not None,
        start=begin.time or NOT_RECORDED,
        end=_end_in_words(log),
        steps=log.last_step,
        length=None if log.end is None else log.end.step - from_one,
        looked_at=sum(log.end is None or from_one or s < log.end.step for s in log.looks_at),
        costs=_costs(log.looks),
        begin=begin,
        settings_hash=begin.settings_hash or NOT_RECORDED,
        shared=shared,
        attacks=attacks,
        updates=len({(line.client, line.step) for line in results.client_lines}),
        withheld=len(results.withheld),
        utility=_utility(log),
        privacy=spendings,
        implied=allowances(spendings, attacks, shared.clients or 1),
        defenses=_defenses(begin.defenses) if log.begin else None,
        gates=None if begin.gates is None else [_rule(g) for g in begin.gates],
        decisions=log.decisions,
        not_played=not_played,
        not_tested=_not_tested(log, attacks, not_played),
        named_attacks=named_attacks(attacks),
        rows=results.rows,
        values=results.values,
        reference=_reference_in_words(log),
    )


def _reference_in_words(log: FitLog) -> str:
    """Return the reference that the trained model was compared with, in words, or ""."""
    if log.reference is None:
        return ""
    last = next((x.values for x in reversed(log.results) if records.WEAK in x.metrics), {})
    weak = bool(last.get(records.WEAK))
    return log.reference.in_words(last.get(records.STRENGTH), weak=weak)


def _costs(looks: Sequence[records.LookLine]) -> list[_Cost]:
    """Return the time of each attack, longest first, then :data:`REST`, over all timed looks."""
    timed = [(line.seconds, line.seconds_of) for line in looks if line.seconds_of is not None]
    total = sum(seconds or 0.0 for seconds, _ in timed)
    by_attack: dict[str, list[float]] = {}
    for name, seconds in (item for _, seconds_of in timed for item in seconds_of.items()):
        by_attack.setdefault(name, []).append(seconds)
    attacks = sorted(by_attack.items(), key=lambda item: -sum(item[1]))
    other = total - sum(map(sum, by_attack.values()))
    rows = [*((n, len(seconds), sum(seconds)) for n, seconds in attacks), (REST, len(timed), other)]
    return [_Cost(*row, row[-1] / total) for row in rows] if total else []


def _end_in_words(log: FitLog) -> str:
    """Return how the fit ended: by itself, by a gate, a signal or an error, or not recorded."""
    if log.begin is None or log.end is None:
        return "running, cut off, or its end was not recorded"
    stopping = [line for line in log.decisions if line.did == "stopped"]
    if log.end.outcome == "finished" and stopping:
        return f"stopped by its gate at step {stopping[-1].step}"
    reasons = {
        "finished": "finished",
        "KeyboardInterrupt": "interrupted by hand",
        "SIGTERMException": "stopped from outside (SIGTERM)",
    }
    return reasons.get(log.end.outcome, f"ended by an error ({log.end.outcome})")


def _utility(log: FitLog) -> dict[str, Points]:
    """Return the user's metrics by name, and by client if the lines name one."""
    series: dict[str, dict[int, float | None]] = {}
    lines: list[records.MetricsLine | records.LookLine] = [*log.metrics, *log.looks]
    for line in sorted(lines, key=attrgetter("step")):
        client = SUM if line.client == SUM else f"client {line.client}"
        suffix = "" if line.client is None else f", {client}"
        for name, value in (line.utility or {}).items():
            finite = None if value is None or math.isinf(value) else value
            series.setdefault(f"{name}{suffix}", {}).setdefault(line.step, finite)
    return {name: list(points.items()) for name, points in series.items()}


# ---- the shared update, and who could see it ----------------------------------------------------


def _shared(begin: records.BeginLine | None, clients: int, spendings: Sequence[Account]) -> _Shared:
    """Return the update that left a client, in words.

    Args:
        begin: The log's first line; None if it is missing.
        clients: The number of clients in the results of the fit.
        spendings: The privacy accounts of the defences.
    """
    if begin is None:
        return _Shared()
    monitor, model = begin.monitor or records.MonitorFacts(), begin.model
    update = "The gradient of every step"
    if monitor.local_steps:
        count = "step" if monitor.local_steps == 1 else f"{monitor.local_steps} steps"
        update = f"The weights' change after every {count}"
    size = ""
    if model is not None and model.trained_parameters and model.parameters:
        trained, total = model.trained_parameters, model.parameters
        size = f"{'all' if trained == total else f'{trained:,} of'} {total:,} parameters"
    if model is not None and model.peft:
        size = f"{size} ({', '.join(model.peft)})".strip()
    seen_by = "The server: whoever receives an update"
    for defense in begin.defenses:
        party = trusted_party(defense)
        if party == "server":
            seen_by = "A server that is trusted with each client's update"
        elif party == "sum":
            seen_by = "The sum over clients only, if secure aggregation hides the parts"
    if begin.keeps_updates:
        update, seen_by = "Only the trained model, as the user states", "Whoever gets the model"
    by_name = {account.defense: account for account in spendings}
    effects = dict.fromkeys(_effect(d, by_name.get(d.name)) for d in begin.defenses)
    return _Shared(
        update=update,
        size=size,
        effects=list(effects),
        clients=max(monitor.clients, clients),
        seen_by=seen_by,
        trained=None if model is None else model.trained,
        unread=begin.unread,
    )


def _effect(defense: records.DefenseFacts, account: Account | None) -> str:
    """Return the effect of a defence on an update in words, with its most important settings."""
    settings = defense.settings or {}
    name, class_name = defense.name, defense.class_name or NOT_RECORDED
    clip = settings.get("max_grad_norm", settings.get("clip"))
    clipped = "not clipped" if clip is None else f"clipped at {digits(clip_in_words(settings))}"
    if clip == "auto":
        clipped = "clipped to a norm below 1"
    noise = digits(settings.get("noise_multiplier", settings.get("sigma")))
    if account is not None and account.noise_multiplier is not None:
        noise = account.noise
    if class_name == TOKENS:
        unit = "token" if settings.get("per") == "token" else "text"
        return (
            f"of texts whose tokens {name} replaced before training "
            f"({digits(settings.get('mechanism'))}, epsilon {digits(settings.get('epsilon'))} for "
            f"each {unit})"
        )
    if class_name == CLIENT and settings.get("trust") == "central":
        return (
            f"as it is; then the server clips it at {digits(clip)} and adds noise {noise} ({name})"
        )
    if class_name == "DPSGD":
        return f"each {settings.get('unit', 'example')}'s part {clipped}, noise {noise} ({name})"
    if class_name in (CLIENT, "GradientNoise"):
        share = "a share of " if settings.get("trust") == "secure_aggregation" else ""
        return f"{clipped}, {share}noise {noise} ({name})"
    return f"after the defence {name} ({class_name})"


def _defenses(defenses: Sequence[records.DefenseFacts]) -> list[records.DefenseFacts]:
    """Return each defence once, even if several clients have it."""
    facts: list[records.DefenseFacts] = []
    for recorded in defenses:
        defense = records.DefenseFacts(
            name=recorded.name,
            class_name=recorded.class_name or NOT_RECORDED,
            guarantee=recorded.guarantee or NOT_RECORDED,
            settings=without_ledger(recorded.settings),
        )
        if defense not in facts:
            facts.append(defense)
    return facts


# ---- gates, and what was not tested -------------------------------------------------------------


def _rule(gate: records.GateFacts) -> _GateRule:
    """Return a gate with its rule in words: metric, limit, action, and what it judges."""
    judged = "each measurement by its value"
    if gate.bound not in (None, "value"):
        judged = f"all measurements, {gate.bound} bound, alpha {digits(gate.alpha)}"
    limit = f"{gate.metric} at most {digits(gate.at_most)}, else {digits(gate.action)}"
    rule = f"{limit}; judges {judged}"
    return _GateRule(**vars(gate), rule=rule)


def _not_played(log: FitLog) -> dict[str, str]:
    """Return why attacks were not run, by name, from the first line and from the results.

    Attacks on the trained weights are refused after the first line was written, so that only their
    results record it.
    """
    recorded = (log.begin.not_played if log.begin is not None else None) or ()
    played = {line.attack for line in log.results if line.reason_not_played is None}
    late = {
        line.attack: line.reason_not_played
        for line in log.results
        if line.reason_not_played is not None and line.attack not in played
    }
    return late | {attack.name: attack.reason for attack in recorded}


def _untested(family: records.Family, was_tried: bool) -> str:
    """Return a sentence that a family of attacks has no result, and which attack would test it."""
    hint = f"Not tried. {family.untested}".rstrip()
    return f"{family.tested} {'No attack gave a result.' if was_tried else hint}"


def _not_tested(
    log: FitLog, attacks: Sequence[AttackSummary], not_played: Mapping[str, str]
) -> list[str]:
    """Return the parts of the privacy risk that were not tested, in sentences."""
    begin = log.begin or records.BeginLine(run=log.run)
    tested = {a.family.name for a in attacks if (a.looks or a.withheld) and a.exposed}
    families = {f.name: f for f in (*begin.families, *records.STANDARD_FAMILIES)}
    tried = {a.family.name for a in attacks}
    if begin.keeps_updates:  # the others are on what does not leave
        families = {records.MEMORIZATION.name: records.MEMORIZATION}
    sentences = [begin.stated] * bool(begin.stated)
    sentences += [_untested(f, n in tried) for n, f in families.items() if n not in tested]
    sentences += [f"{names}: {reason}" for reason, names in records.by_reason(not_played).items()]
    if unread := begin.unread:
        sentences.append(
            f"{len(unread)} shared parameter{'s' * (len(unread) > 1)}, tested by no attack: "
            f"{first_of(unread, 4)}"
        )
    sentences += ["which shared parameters no attack tests: not recorded"] * (log.begin is None)
    measured = {m for a in attacks if a.stage == RELEASED and a.looks for m in a.rates}
    tests = {"extracted": "extraction", "auc": "membership by its outputs"}
    if missing := [test for metric, test in tests.items() if metric not in measured]:
        sentences.append(f"the trained model itself: {' and '.join(missing)}")
    return sentences


# ---- the bounds of epsilons, and the measured rates ----------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Allowance:
    """The largest rates that an epsilon allows a membership test, and the rates measured.

    Attributes:
        defense: The name of the defence with this epsilon.
        stage: The stage of the attacks whose rates are compared with the bounds.
        epsilon, delta: The bound.
        largest_tpr, largest_auc: The bounds for tests of membership in the training data.
        largest_tpr_in_a_batch, largest_auc_in_a_batch: The bounds for tests of membership in one
            batch.
        measured_tpr, measured_auc: The highest rates of attacks; None if none measured them.
    """

    defense: str
    stage: str
    epsilon: float
    delta: float
    largest_tpr: float = named("largest_tpr_at_fpr_0.01")
    largest_auc: float
    largest_tpr_in_a_batch: float | None = named("largest_tpr_at_fpr_0.01_in_a_batch")
    largest_auc_in_a_batch: float | None
    measured_tpr: float | None = named("measured_tpr_at_fpr_0.01")
    measured_auc: float | None


def allowances(
    accounts: Sequence[Account], attacks: Sequence[AttackSummary], clients: int
) -> list[_Allowance]:
    """Return the largest rates that each valid epsilon allows a membership test.

    Epsilon bounds tests of whether an example was in the training data. The attacks test whether it
    is in one batch: this is bounded by the noise of one release, without amplification by sampling.
    If epsilon covers only the sum over several clients, attacks at stage aggregate are compared.
    """
    limits = []
    for account in (account for account in accounts if account.holds):
        assert account.largest_tpr is not None
        assert account.largest_auc is not None
        summed = account.trust in ("secure_aggregation", "central")
        stage = "aggregate" if summed and clients > 1 else "shared"
        if account.is_of_clients and account.trust == "central":
            stage = "the noised mean, which is not attacked"
        games = [a for a in attacks if a.headline == "auc" and a.stage == stage]
        tprs = [a.rates.get("tpr_at_fpr_0.01") for a in games]
        epsilon, delta = account.bound
        tpr_in_a_batch, auc_in_a_batch = _in_a_batch(account)
        limits.append(
            _Allowance(
                defense=account.defense,
                stage=stage,
                epsilon=epsilon,
                delta=delta,
                largest_tpr=account.largest_tpr,
                largest_auc=account.largest_auc,
                largest_tpr_in_a_batch=tpr_in_a_batch,
                largest_auc_in_a_batch=auc_in_a_batch,
                measured_tpr=_highest(tprs),
                measured_auc=_highest([a.last for a in games]),
            )
        )
    return limits


def _in_a_batch(account: Account) -> tuple[float, float] | tuple[None, None]:
    """Return the largest TPR at 1% FPR and AUC of a test of membership in one batch.

    For independent Gaussian noise it is exact, from the smallest noise multiplier. Otherwise it
    follows from the epsilon of all releases without sampling.
    """
    from lightning_fedleak.evaluation.auditing import dp_auc, dp_tpr, gaussian_auc, gaussian_tpr

    noise = min((x.noise_multiplier for x in account.history), default=0.0)
    if noise > 0:
        return gaussian_tpr(FPR, noise), gaussian_auc(noise)
    sampled = not account.is_of_tokens and account.poisson is not False
    epsilon, delta = account.bound
    unsampled = account.without_sampling if sampled else epsilon
    if not isinstance(unsampled, int | float):
        return None, None
    largest = min(unsampled, MAX_SHOWN_EPSILON)
    return dp_tpr(FPR, largest, delta), dp_auc(largest, delta)


def _highest(rates: Sequence[MetricValue | None]) -> float | None:
    """Return the highest value; None without one."""
    values = [rate.value for rate in rates if rate is not None and rate.value is not None]
    return max(values, default=None)
