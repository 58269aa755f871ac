"""What defences that account have spent in a fit, and what that promises."""

from __future__ import annotations

import glob
import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path

from lightning_fedleak.report import records, wording
from lightning_fedleak.report.attacks import Points
from lightning_fedleak.report.composition import composed_epsilon, curves_of, largest_rates
from lightning_fedleak.report.logs import FitLog, grouped
from lightning_fedleak.report.records.files import first_of

CLIENT, TOKENS = "ClientDP", "TokenLDP"
"""Classes of defences whose account is not one of examples."""
_UNITS = {"DPSGD": "example", CLIENT: "client", TOKENS: "row"}
WEAK_TPR = 0.5  # a limit that lets a test find more than every second member is called weak


@dataclass(frozen=True, kw_only=True)
class Account:
    """What one defence has spent in a fit, at its end and on the way.

    Where clients of a federation keep accounts of their own, it is that of the client that spent
    most, at the largest delta of any.

    Attributes:
        defense: its name.
        series: epsilon over the steps.
        delta, epsilon, noise_multiplier, sample_rate, releases, history: the latest.
        settings: The settings of the defence, without its ledger, which names a place.
        guarantee: what it promises, in its own words.
        accountant: which composed the releases.
        target_epsilon: what was asked for.
        trust, trusted: who must be trusted, as a setting and in a sentence.
        sampling: how what was released was drawn, as records name it; None where no accountant
            composes it.
        poisson: whether sampling by chance counts; None where that was not recorded.
        unit: whose data one unit of privacy is.
        clients: how many there are.
        class_name: The class name of the defence.
        holds: whether there is a guarantee: a finite epsilon at a known delta.
        ledger: SHA-256 of each ledger by its name; None where no settings were recorded.
        ledger_releases: releases that each ledger counts.
        last_step: The last step of what was recorded.
        whole: whether no release came after it.
        without_sampling: epsilon of the same releases if every unit were in all of them.
        largest_tpr, largest_auc: the most that it allows any test of one unit, by all pairs
            (epsilon, delta) that its releases have; None where none holds.
        limit: what that is, in a sentence.
        check: what planted gradients showed of the training; None where none were planted.
        statement: all of it, in sentences.
    """

    defense: str
    series: Points
    delta: float | None
    epsilon: float | None
    noise_multiplier: float | None
    sample_rate: float | None
    releases: int | None
    history: Sequence[records.Releases]
    settings: records.JsonObject
    guarantee: str
    accountant: str
    target_epsilon: object
    trust: str
    trusted: str
    sampling: str | None
    poisson: bool | None
    unit: str
    clients: int
    class_name: str = records.named("class")
    holds: bool
    ledger: Mapping[str, str] | None
    ledger_releases: Mapping[str, int]
    last_step: int = records.named("until")
    whole: bool
    without_sampling: float | str | None = None
    largest_tpr: float | None = records.named("largest_tpr_at_fpr_0.01", default=None)
    largest_auc: float | None = None
    limit: str | None = None
    check: str | None = None
    statement: str = ""

    @property
    def is_of_clients(self) -> bool:
        """Whether it protects whole clients of a federation."""
        return self.class_name == CLIENT

    @property
    def is_of_tokens(self) -> bool:
        """Whether it replaces tokens before training."""
        return self.class_name == TOKENS

    @property
    def bound(self) -> tuple[float, float]:
        """Epsilon and delta of an account that holds."""
        assert self.epsilon is not None
        assert self.delta is not None
        return self.epsilon, self.delta

    @property
    def epsilon_over_clients(self) -> float:
        """Epsilon against whoever sees all clients: each that a sampler moves a text to pays."""
        return wording.rounded_up(self.bound[0] * (self.clients if self.is_of_tokens else 1))

    @property
    def claim(self) -> str:
        """Epsilon at delta, and why it is none of the run where it is not."""
        bound = f"{wording.in_words(self.epsilon)} at {wording.in_words(self.delta)}"
        if not self.holds:
            bound = f"none holds (recorded: {bound})"
        elif not self.whole:
            bound = f"{bound}, until the last look alone"
        return f"{bound}; planted gradients: {self.check_result}" if self.check else bound

    @property
    def check_result(self) -> str:
        """The word for what planted gradients showed."""
        return (self.check or "none").partition(";")[0].partition(":")[0]

    @property
    def claim_in_short(self) -> str:
        """Epsilon at delta, and of how many releases."""
        if not self.holds:
            return "no epsilon holds"
        if self.check_result == "refuted":
            return "refuted by planted gradients"
        whole = "" if self.whole else ", until the last look alone"
        return (
            f"ε {wording.digits(self.epsilon)} at δ {wording.digits(self.delta)}"
            f"{wording.FOR_UNIT.get(self.unit, '')}, {self.releases} releases{whole}"
        )

    @property
    def unit_in_words(self) -> str:
        """Whose data one unit of privacy is."""
        return wording.UNIT_IN_WORDS.get(self.unit, f"one {self.unit}")

    @property
    def unsampled(self) -> object:
        """Epsilon without sampling, or why there is none of its own."""
        if self.without_sampling is not None:
            return self.without_sampling
        if not self.holds:
            return "none holds"
        if self.poisson is False:
            return "the same: sampling counts for nothing"
        return "not computed: the budget is a filter's" if self.accountant == "filter" else None

    @property
    def clip_norm(self) -> object:
        """The norm to which it clipped; None where no settings were recorded."""
        return clip_in_words(self.settings)

    @property
    def noise(self) -> str:
        """The noise multiplier, or the least and the last where it was turned up on the way."""
        min_noise = min((x.noise_multiplier for x in self.history), default=self.noise_multiplier)
        last = wording.digits(self.noise_multiplier)
        if wording.digits(min_noise) == last:
            return last
        return f"{wording.digits(min_noise)} at the least, {last} at the end"


def clip_in_words(settings: records.JsonObject) -> object:
    """Return the norm to which a defence clips, and how it changes; None without settings."""
    norm = settings.get("max_grad_norm", settings.get("clip", "none" if settings else None))
    if schedule := settings.get("clip_schedule"):
        return f"{norm} times {schedule} in equal parts of the run"
    quantile = settings.get("clip_quantile")
    return f"{norm} at first, then by the {quantile} quantile" if quantile else norm


def accounts(log: FitLog) -> tuple[list[Account], list[str]]:
    """Return what each defence of a fit has spent, and what is wrong with their ledgers."""
    facts = grouped(log.begin.defenses if log.begin else (), lambda defense: defense.name)
    between: list[records.LookLine | records.MetricsLine] = [*log.looks, *log.metrics]
    lines = [*sorted(between, key=attrgetter("step")), *([log.end] if log.end else [])]
    spent_at = [(line.step, spending) for line in lines for spending in line.privacy or ()]
    spendings = grouped(spent_at, lambda pair: pair[1].defense)
    problems: list[str] = []
    every = [
        _account(log, steps, facts.get(name, [records.DefenseFacts(name=name)]), problems)
        for name, steps in spendings.items()
    ]
    return every, problems


def _account(
    log: FitLog,
    spendings: Sequence[tuple[int, records.Spending]],
    defenses: Sequence[records.DefenseFacts],
    problems: list[str],
) -> Account:
    """Return the account of one defence, of which each client may have its own."""
    defense = defenses[0]
    settings = defense.settings or {}
    kind = defense.class_name or wording.NOT_RECORDED
    guarantee = defense.guarantee or wording.NOT_RECORDED
    series, delta, largest = _largest(spendings)
    ledgers = [(facts.settings or {}).get("ledger") for facts in defenses] if settings else []
    hashes, counts = _read_ledgers(ledgers, problems)
    clients = log.begin.monitor.clients if log.begin and log.begin.monitor else 1
    epsilon = _bound(largest.epsilon)
    is_finite = epsilon is not None and epsilon < math.inf and delta is not None
    account = Account(
        defense=largest.defense,
        series=list(series.items()),
        delta=delta,
        epsilon=epsilon,
        noise_multiplier=None if largest.noise_multiplier == math.inf else largest.noise_multiplier,
        sample_rate=largest.sample_rate,
        releases=largest.releases,
        history=list(largest.history or ()),
        settings=without_ledger(settings),
        guarantee=guarantee,
        accountant=settings.get(
            "accountant", "basic composition" if kind == TOKENS else wording.NOT_RECORDED
        ),
        target_epsilon=settings.get("target_epsilon", "none" if settings else None),
        trust=settings.get("trust", "local" if kind == TOKENS else wording.NOT_RECORDED),
        trusted=wording.TRUST[trusted_party(defense)],
        sampling=largest.sampling,
        poisson=_poisson(kind, settings),
        unit=settings.get("unit", _UNITS.get(kind, wording.NOT_RECORDED)),
        clients=settings.get("clients", clients) if kind == CLIENT else clients,
        class_name=kind,
        holds=is_finite and guarantee != wording.NOT_RECORDED and not guarantee.startswith("none"),
        ledger=hashes if settings else None,
        ledger_releases=counts,
        last_step=max(series),
        whole=False,
        check=_verdict_of(log, largest.defense, settings),
    )
    account = replace(account, whole=_is_whole(account, log.end))
    account = replace(account, without_sampling=_without_sampling(account))
    if account.holds:
        histories = [x.history or () for _, x in spendings if not account.is_of_tokens]
        curves = curves_of(histories, account.accountant, account.sampling)
        tpr, auc = largest_rates(account.epsilon_over_clients, account.bound[1], curves)
        account = replace(account, largest_tpr=tpr, largest_auc=auc)
    account = replace(account, limit=_limit(account))
    return replace(account, statement=_statement(account))


def _verdict_of(log: FitLog, defense: str, settings: records.JsonObject) -> str | None:
    """Return what planted gradients showed, the worst of several clients; None without any."""
    end = log.end.privacy or () if log.end else ()
    found = {x.check for x in end if x.defense == defense and x.check}
    if found:
        order = ("refuted", "unknown", "not refuted")
        return min(found, key=lambda x: next(i for i, w in enumerate(order) if x.startswith(w)))
    return "unknown: no verdict was recorded" if settings.get("check") else None


def without_ledger(settings: records.JsonObject | None) -> records.JsonObject:
    """Return the settings of a defence without its ledger, which names a place."""
    return {name: value for name, value in (settings or {}).items() if name != "ledger"}


def _largest(
    spendings: Sequence[tuple[int, records.Spending]],
) -> tuple[dict[int, float | None], float | None, records.Spending]:
    """Return the largest epsilon at each step, the largest delta, and the last of the largest.

    Delta is None where one of them is unknown.
    """
    series: dict[int, float | None] = {}
    largest = spendings[0][1]
    deltas = [spending.delta for _, spending in spendings if spending.delta is not None]
    for step, spending in spendings:
        epsilon = _bound(spending.epsilon)
        if step not in series or _order(series[step]) <= _order(epsilon):
            series[step] = None if epsilon == math.inf else epsilon
        if _order(_bound(largest.epsilon)) <= _order(epsilon):
            largest = spending
    delta = wording.rounded_up(max(deltas)) if len(deltas) == len(spendings) else None
    return series, delta, largest


def _poisson(kind: str, settings: records.JsonObject) -> bool | None:
    """Return whether sampling by chance counts."""
    if kind == CLIENT:
        by_chance = settings.get("sampling") == "poisson"
        return by_chance and settings.get("trust", wording.NOT_RECORDED) == "central"
    return settings.get("poisson")


def trusted_party(defense: records.DefenseFacts) -> str:
    """Return who must be trusted for a defence's guarantee to hold, as ``TRUST`` names it."""
    default = "local" if defense.class_name == TOKENS else None
    trust = (defense.settings or {}).get("trust", default)
    if trust == "central" and defense.class_name == CLIENT:
        return "server"
    parties = {"central": "sum", "secure_aggregation": "sum", "local": "client"}
    return parties.get(str(trust), wording.NOT_RECORDED)


def _is_whole(account: Account, end: records.EndLine | None) -> bool:
    """Return whether no release came after the last that was recorded.

    A fit that was killed went on after its last look; its ledger knows what it released until then.
    """
    counts = account.ledger_releases.values()
    if counts and max(counts) <= (account.releases or 0):
        return True
    if end is None:
        return False
    recorded = any(spending.defense == account.defense for spending in end.privacy or ())
    return recorded or account.last_step + 1 >= end.step


def _bound(value: float | None) -> float | None:
    return None if value is None else wording.rounded_up(value)


def _order(epsilon: float | None) -> float:
    """Return epsilon for comparisons: unknown is above every number, as infinity is."""
    return math.inf if epsilon is None else epsilon


def _without_sampling(account: Account) -> float | str | None:
    """Return epsilon of the same releases if every example were in every batch."""
    if account.accountant == "filter" or not account.poisson or not account.holds:
        return None
    history = [releases._replace(sample_rate=1.0) for releases in account.history]
    return composed_epsilon(history, account.delta, account.accountant, account.sampling)


def _limit(account: Account) -> str | None:
    """Return what an account that holds for the whole run limits."""
    if not (account.holds and account.whole) or account.largest_tpr is None:
        return None
    tpr = account.largest_tpr
    percent = math.ceil(1e3 * tpr - 1e-9) / 10
    share = f"at most {percent:g} in 100" if percent < 100 else "up to all"
    if account.is_of_tokens:
        text = (
            "a test of which of two texts of one length was trained on. If it is wrong about the "
            f"second 1 time in 100, it is right about the first at most {percent:g} times in 100 "
            "(guessing: 1)."
        )
    else:
        text = (
            f"a test of whether {account.unit_in_words} was in the training "
            f"data. If it wrongly names 1 in 100 that were not, it finds {share} that were "
            "(guessing: 1)."
        )
    weak = " That is a weak limit." if tpr > WEAK_TPR else ""
    return f"What this epsilon limits: {text}{weak}"


def _drawing(account: Account) -> str:
    """Return in words how batches or the clients of a round are drawn."""
    rate = wording.digits(account.sample_rate)
    if account.sampling == "without_replacement":
        return f"a fixed share of {rate}, drawn again each time"
    return f"Poisson samples at rate {rate}" if account.poisson else "not sampled by chance"


def _statement(account: Account) -> str:
    """Return what was promised, in sentences."""
    guarantee = f"The guarantee: {account.guarantee.strip().rstrip('.')}. "
    if not account.holds:
        return f"No epsilon holds for these releases. {guarantee}{_checked(account)}"
    release = "round" if account.is_of_clients else "release"
    releases = release + "s" * (account.releases != 1)
    accountant = f"the accountant {account.accountant}"
    if account.is_of_tokens:
        releases += " of the text that was released most often"
        accountant = account.accountant
    text = (
        f"After {account.releases} {releases} the privacy loss of {account.unit_in_words} is at "
        f"most epsilon = {wording.digits(account.epsilon)} at delta = "
        f"{wording.digits(account.delta)}, by {accountant}. {guarantee}"
    )
    if not account.whole:
        text += (
            "How the run ended is not recorded. What was released after the last look is not in "
            "this epsilon, which is therefore no bound for the whole run. "
        )
    if any(count > (account.releases or 0) for count in account.ledger_releases.values()):
        text += (
            "The ledger counts more releases than the run recorded. What the others cost is not in "
            "this epsilon. "
        )
    if account.noise_multiplier is not None and account.poisson is not None:
        batches = "rounds" if account.is_of_clients else "batches"
        scale = " over the sensitivity" if account.is_of_clients else ""
        text += f"Noise multiplier{scale} {account.noise}; {batches} are {_drawing(account)}. "
    if account.without_sampling is not None:
        text += (
            "Without counting on the sampling, epsilon of the same releases would be "
            f"{wording.digits(account.without_sampling)}. "
        )
    if account.is_of_tokens and account.clients > 1:
        text += (
            f"A text that a sampler moves between the {account.clients} clients is released by "
            "each that gets it: against whoever sees all of them epsilon is at most "
            f"{wording.digits(account.epsilon_over_clients)}. "
        )
    limit = f"{account.limit} " if account.limit else ""
    text += _checked(account)
    return (
        f"{text}{account.trusted} {limit}It does not cover the leakage logs, validation metrics, "
        "the choice of settings, or decisions that people or gates took in sight of private data."
    )


def _checked(account: Account) -> str:
    """Return in a sentence what planted gradients showed of the account."""
    sentence = f"Gradients planted in the training, to refute this: {account.check_result}. "
    return sentence if account.check else ""


# ---- ledgers: files that know every release, also of a fit that was killed ----------------------


def _read_ledgers(
    paths: Sequence[str | None], problems: list[str]
) -> tuple[dict[str, str], dict[str, int]]:
    """Return SHA-256 and releases of ledgers, by their names.

    Args:
        paths: The paths of one defence, of which each client may have a ledger of its own; None has
            none.
        problems: gets a sentence for each ledger with lines that are no releases.
    """
    hashes: dict[str, str] = {}
    counts: dict[str, int] = {}
    for place in (Path(path) for path in dict.fromkeys(paths) if path):
        try:
            parts = place.parent.glob(f"{glob.escape(place.name)}.*-of-*")
            files = [place] if place.is_file() else sorted(parts)
            for file in files:
                content = file.read_bytes()
                hashes[file.name] = hashlib.sha256(content).hexdigest()
                counts[file.name], odd = _count_releases(content)
                if odd:
                    problems.append(
                        f"{len(odd)} of the lines of the ledger {file.name} are no releases: "
                        f"{first_of(odd)}"
                    )
            if not files:
                hashes[place.name] = "the file is not there"
        except (OSError, ValueError) as error:
            hashes[place.name] = f"cannot be read: {type(error).__name__}"
    return hashes, counts


def _count_releases(ledger: bytes) -> tuple[int, list[int]]:
    """Return how many releases the lines count (noise, rate, count), and numbers of odd lines."""
    releases, odd = 0, []
    for number, line in enumerate(ledger.splitlines(), 1):
        try:
            _, _, count = map(float, line.split())
            releases += int(count)
        except (ValueError, OverflowError):
            odd.append(number)
    return releases, odd
