"""The privacy accounts of a fit: what each defence has spent, and which guarantee that gives.

A *release* is one update, or one round's mean, that a defence with differential privacy makes
public. A *spending* is the (epsilon, delta) of all releases until a look, a step at which leakage
is measured. :func:`accounts` collects the spendings of each defence and makes an :class:`Account`
of them: the largest epsilon over the clients, what it allows a membership test, and a statement.
The *ledger* of a defence, a file that lists all releases, shows whether any are missing. An audit
with *planted gradients* adds known gradients to the training, to refute epsilon by detecting them.
"""

import glob
import hashlib
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path

from lightning_fedleak.private_files import read_regular
from lightning_fedleak.report import records, wording
from lightning_fedleak.report.attacks import Points
from lightning_fedleak.report.composition import composed_epsilon, curves_of, largest_rates
from lightning_fedleak.report.logs import FitLog, grouped
from lightning_fedleak.report.records.files import first_of

CLIENT, TOKENS = "ClientDP", "TokenLDP"
"""Classes of defences whose unit of privacy is not an example."""
# The unit of privacy of each class, if its settings do not record one.
_UNITS = {"DPSGD": "example", CLIENT: "client", TOKENS: "row"}
OPEN_END = (
    "How the run ended is not recorded: releases after its last measurement are not counted, "
    "so that its epsilon is no bound for the whole run."
)
"""A sentence on an account without all releases of its run."""
NOT_BESIDE = "not beside the logs: copy it there"
"""What a report says of a ledger that it does not find, and so does not count."""
WEAK_TPR = 0.5  # a limit on the TPR at 1% FPR above which a statement calls the limit weak


@dataclass(frozen=True, kw_only=True)
class Account:
    """The privacy account of one defence in a fit, at its end and over the steps.

    If each client of a federation has its own account, this is the account of the client that spent
    most, at the largest delta of all clients.

    Attributes:
        defense: The name of the defence.
        series: The epsilon spent until each recorded step.
        delta, epsilon, noise_multiplier, sample_rate, releases, history: The latest values.
        settings: The settings of the defence without the path of its ledger.
        guarantee: The guarantee, as the defence words it.
        accountant: The accountant that composed the releases.
        target_epsilon: The epsilon that the user asked for.
        trust, trusted: The party that must be trusted, as a setting and as a sentence.
        sampling: The sampling scheme of the releases, as in the records; None if no accountant
            composes them.
        poisson: Whether epsilon counts on Poisson sampling; None if that was not recorded.
        unit: The unit of privacy, such as an example or a client.
        clients: The number of clients.
        class_name: The class name of the defence.
        holds: Whether there is a guarantee: a finite epsilon at a known delta.
        ledger: The SHA-256 of each ledger file by its name; None if no settings were recorded.
        ledger_releases: The number of releases in each ledger file.
        last_step: The last step with a recorded spending.
        whole: Whether the account has all releases of the fit, also those after ``last_step``.
        without_sampling: The epsilon of the same releases if every unit were in all of them.
        largest_tpr, largest_auc: The largest TPR at 1% FPR and AUC that the account allows a test
            of one unit's membership, by all pairs (epsilon, delta) of its releases; None if it
            does not hold.
        limit: That limit, in a sentence.
        check: The result of the audit with planted gradients; None without one.
        statement: The whole account, in sentences.
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
        """Whether the unit of privacy is a client of a federation."""
        return self.class_name == CLIENT

    @property
    def is_of_tokens(self) -> bool:
        """Whether the defence replaces tokens before training."""
        return self.class_name == TOKENS

    @property
    def bound(self) -> tuple[float, float]:
        """Epsilon and delta of an account that holds."""
        assert self.epsilon is not None
        assert self.delta is not None
        return self.epsilon, self.delta

    @property
    def epsilon_over_clients(self) -> float:
        """Epsilon against an adversary who sees all clients.

        With ``TokenLDP`` it is multiplied by the number of clients: a sampler may move a text from
        client to client, and each of them releases it.
        """
        return wording.rounded_up(self.bound[0] * (self.clients if self.is_of_tokens else 1))

    @property
    def claim(self) -> str:
        """Epsilon at delta, or that none holds, with the result of planted gradients."""
        bound = f"{wording.in_words(self.epsilon)} at {wording.in_words(self.delta)}"
        if not self.holds:
            bound = f"none holds (recorded: {bound})"
        elif not self.whole:
            bound = f"{bound}, only until the last measurement"
        return f"{bound}; planted gradients: {self.check_result}" if self.check else bound

    @property
    def check_result(self) -> str:
        """The result of the audit with planted gradients, in a word or two."""
        return (self.check or "none").partition(";")[0].partition(":")[0]

    @property
    def claim_in_short(self) -> str:
        """Epsilon at delta with the number of releases, or why there is none."""
        if not self.holds:
            return "no epsilon holds"
        if self.check_result == "refuted":
            return "refuted by planted gradients"
        extent = "" if self.whole else ", only until the last measurement"
        return (
            f"ε {wording.digits(self.epsilon)} at δ {wording.digits(self.delta)}"
            f"{wording.FOR_UNIT.get(self.unit, '')}, {self.releases} releases{extent}"
        )

    @property
    def unit_in_words(self) -> str:
        """The unit of privacy, in words."""
        return wording.UNIT_IN_WORDS.get(self.unit, f"one {self.unit}")

    @property
    def unsampled(self) -> object:
        """Epsilon without amplification by sampling, or why it was not computed."""
        if self.without_sampling is not None:
            return self.without_sampling
        if not self.holds:
            return "none holds"
        if self.poisson is False:
            return "the same: epsilon does not count on sampling"
        return "not computed: the budget is a filter's" if self.accountant == "filter" else None

    @property
    def clip_norm(self) -> object:
        """The norm to which the defence clips; None if no settings were recorded."""
        return clip_in_words(self.settings)

    @property
    def noise(self) -> str:
        """The noise multiplier; if it changed, the smallest and the last one."""
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


def accounts(log: FitLog, problems: list[str]) -> list[Account]:
    """Return the account of each defence of a fit, and add the problems with their ledgers."""
    facts = grouped(log.begin.defenses if log.begin else (), lambda defense: defense.name)
    steps: list[records.LookLine | records.MetricsLine] = [*log.looks, *log.metrics]
    lines = [*sorted(steps, key=attrgetter("step")), *([log.end] if log.end else [])]
    spent_at = [(line.step, spending) for line in lines for spending in line.privacy or ()]
    spendings = grouped(spent_at, lambda pair: pair[1].defense)
    return [
        _account(log, pairs, facts.get(name, [records.DefenseFacts(name=name)]), problems)
        for name, pairs in spendings.items()
    ]


def _account(
    log: FitLog,
    spendings: Sequence[tuple[int, records.Spending]],
    defenses: Sequence[records.DefenseFacts],
    problems: list[str],
) -> Account:
    """Return the account of one defence.

    Args:
        log: The log of the fit.
        spendings: The recorded spendings with their steps, of all clients.
        defenses: The recorded facts of the defence, once for each client that has an account.
        problems: The list of a report's problems; those of the ledgers are added to it.
    """
    defense = defenses[0]
    settings = defense.settings or {}
    class_name = defense.class_name or wording.NOT_RECORDED
    guarantee = defense.guarantee or wording.NOT_RECORDED
    series, delta, largest = _merge_spendings(spendings)
    ledgers = [(facts.settings or {}).get("ledger") for facts in defenses] if settings else []
    hashes, counts = _read_ledgers(ledgers, log.folders or (log.folder,), problems)
    clients = log.begin.monitor.clients if log.begin and log.begin.monitor else 1
    epsilon = _rounded_bound(largest.epsilon)
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
            "accountant", "basic composition" if class_name == TOKENS else wording.NOT_RECORDED
        ),
        target_epsilon=settings.get("target_epsilon", "none" if settings else None),
        trust=settings.get("trust", "local" if class_name == TOKENS else wording.NOT_RECORDED),
        trusted=wording.TRUST[trusted_party(defense)],
        sampling=largest.sampling,
        poisson=_poisson(class_name, settings),
        unit=settings.get("unit", _UNITS.get(class_name, wording.NOT_RECORDED)),
        clients=settings.get("clients", clients) if class_name == CLIENT else clients,
        class_name=class_name,
        holds=is_finite and guarantee != wording.NOT_RECORDED and not guarantee.startswith("none"),
        ledger=hashes if settings else None,
        ledger_releases=counts,
        last_step=max(series),
        whole=False,
        check=_check_result_of(log, largest.defense, settings),
    )
    account = replace(account, whole=_has_all_releases(account, log.end))
    account = replace(account, without_sampling=_without_sampling(account))
    if account.holds:
        histories = [x.history or () for _, x in spendings if not account.is_of_tokens]
        curves = curves_of(histories, account.accountant, account.sampling)
        tpr, auc = largest_rates(account.epsilon_over_clients, account.bound[1], curves)
        account = replace(account, largest_tpr=tpr, largest_auc=auc)
    account = replace(account, limit=_limit(account))
    return replace(account, statement=_statement(account))


def _check_result_of(log: FitLog, defense: str, settings: records.JsonObject) -> str | None:
    """Return the result of the audit with planted gradients; of several clients, the worst.

    None means that the defence planted no gradients.
    """
    end = log.end.privacy or () if log.end else ()
    checks = {x.check for x in end if x.defense == defense and x.check}
    if checks:
        order = ("refuted", "unknown", "not refuted")
        return min(checks, key=lambda x: next(i for i, w in enumerate(order) if x.startswith(w)))
    return "unknown: no verdict was recorded" if settings.get("check") else None


def without_ledger(settings: records.JsonObject | None) -> records.JsonObject:
    """Return the settings of a defence without its ledger, which is a path of the machine."""
    return {name: value for name, value in (settings or {}).items() if name != "ledger"}


def _merge_spendings(
    spendings: Sequence[tuple[int, records.Spending]],
) -> tuple[dict[int, float | None], float | None, records.Spending]:
    """Merge the spendings of all clients.

    Returns:
        The largest epsilon at each step; the largest delta, or None if a delta is unknown; and the
        spending with the largest epsilon, the latest one of equal ones.
    """
    series: dict[int, float | None] = {}
    largest = spendings[0][1]
    deltas = [spending.delta for _, spending in spendings if spending.delta is not None]
    for step, spending in spendings:
        epsilon = _rounded_bound(spending.epsilon)
        if step not in series or _sort_key(series[step]) <= _sort_key(epsilon):
            series[step] = None if epsilon == math.inf else epsilon
        if _sort_key(_rounded_bound(largest.epsilon)) <= _sort_key(epsilon):
            largest = spending
    delta = wording.rounded_up(max(deltas)) if len(deltas) == len(spendings) else None
    return series, delta, largest


def _poisson(class_name: str, settings: records.JsonObject) -> bool | None:
    """Return whether epsilon counts on Poisson sampling; None if that was not recorded."""
    if class_name == CLIENT:
        is_poisson = settings.get("sampling") == "poisson"
        return is_poisson and settings.get("trust", wording.NOT_RECORDED) == "central"
    return settings.get("poisson")


def trusted_party(defense: records.DefenseFacts) -> str:
    """Return who must be trusted for a defence's guarantee to hold, as ``TRUST`` names it."""
    default = "local" if defense.class_name == TOKENS else None
    trust = (defense.settings or {}).get("trust", default)
    if trust == "central" and defense.class_name == CLIENT:
        return "server"
    parties = {"central": "sum", "secure_aggregation": "sum", "local": "client"}
    return parties.get(str(trust), wording.NOT_RECORDED)


def _has_all_releases(account: Account, end: records.EndLine | None) -> bool:
    """Return whether the account has all releases of the fit.

    It has them if the ledger lists no further ones. Otherwise the fit must have recorded its end,
    and the account there or in the last step: a killed fit may have released after its last look.
    """
    counts = account.ledger_releases.values()
    if counts and max(counts) <= (account.releases or 0):
        return True
    if end is None:
        return False
    recorded = any(spending.defense == account.defense for spending in end.privacy or ())
    return recorded or account.last_step + 1 >= end.step


def _rounded_bound(value: float | None) -> float | None:
    """Return an upper bound rounded up to three digits; None if it is unknown."""
    return None if value is None else wording.rounded_up(value)


def _sort_key(epsilon: float | None) -> float:
    """Return epsilon as a key for comparisons, in which unknown counts as infinite."""
    return math.inf if epsilon is None else epsilon


def _without_sampling(account: Account) -> float | str | None:
    """Return the epsilon of the same releases without sampling: every unit is in all of them."""
    if account.accountant == "filter" or not account.poisson or not account.holds:
        return None
    history = [releases._replace(sample_rate=1.0) for releases in account.history]
    return composed_epsilon(history, account.delta, account.accountant, account.sampling)


def _limit(account: Account) -> str | None:
    """Return what epsilon limits, in a sentence; None unless it holds for the whole run."""
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
    """Return in words how batches, or the clients of a round, are sampled."""
    rate = wording.digits(account.sample_rate)
    if account.sampling == "without_replacement":
        return f"a fixed share of {rate}, drawn again each time"
    return f"Poisson samples at rate {rate}" if account.poisson else "not sampled by chance"


def _statement(account: Account) -> str:
    """Return the account in sentences: epsilon, guarantee, sampling, trust and limits."""
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
        text += f"{OPEN_END} "
    if any(count > (account.releases or 0) for count in account.ledger_releases.values()):
        text += (
            "The ledger counts more releases than the run recorded. What the others cost is not in "
            "this epsilon. "
        )
    if NOT_BESIDE in (account.ledger or {}).values():
        text += "Its ledger is not beside the logs: releases of other runs are not counted. "
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
    """Return the result of the audit with planted gradients as a sentence; "" without one."""
    sentence = f"Gradients planted in the training, to refute this: {account.check_result}. "
    return sentence if account.check else ""


# ---- ledgers: files that list every release, also those of a killed fit -------------------------


def _read_ledgers(
    paths: Sequence[str | None], folders: Sequence[Path], problems: list[str]
) -> tuple[dict[str, str], dict[str, int]]:
    """Return the SHA-256 and the number of releases of each ledger file, by its name.

    A ledger is one file, or a file for each client, whose name then ends with
    ``.<client>-of-<clients>``. It is looked for beside the logs, under the name that they state:
    whoever wrote them could name any file of the reader.

    Args:
        paths: The ledgers of one defence, one for each client; None for a client without one.
        folders: The folders of the logs.
        problems: The list of problems. A sentence is added for each file with invalid lines, which
            may be no ledger, and has no hash.
    """
    hashes: dict[str, str] = {}
    counts: dict[str, int] = {}
    for name in dict.fromkeys(Path(path).name for path in paths if path and isinstance(path, str)):
        files = list[Path]()
        with suppress(OSError, ValueError):  # no file can have such a name
            files = [folder / name for folder in folders if (folder / name).is_file()]
            parts = (folder.glob(f"{glob.escape(name)}.*-of-*") for folder in folders)
            files = files or sorted(part for folder_parts in parts for part in folder_parts)
        hashes |= {} if files else {name: NOT_BESIDE}
        for file in files:
            try:
                content = read_regular(file)
            except OSError as error:
                hashes[file.name] = f"cannot be read: {type(error).__name__}"
                continue
            count, invalid = _count_releases(content)
            counts[file.name] = max(count, counts.get(file.name, 0))
            hashes[file.name] = hashlib.sha256(content).hexdigest()
            if invalid:  # it may be another private file, whose content a hash lets anyone guess
                hashes[file.name] = "no hash: not all lines are releases"
                problems.append(
                    f"{len(invalid)} of the lines of the ledger {file.name} are no releases: "
                    f"{first_of(invalid)}"
                )
    return hashes, counts


def _count_releases(ledger: bytes) -> tuple[int, list[int]]:
    """Return the number of releases in lines of (noise, rate, count), and the invalid lines."""
    releases, invalid = 0, []
    for number, line in enumerate(ledger.splitlines(), 1):
        try:
            _, _, count = map(float, line.split())
            releases += int(count)
        except (ValueError, OverflowError):
            invalid.append(number)
    return releases, invalid
