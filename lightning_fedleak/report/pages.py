"""The pages of a report: their content, their HTML, the block for a model card, and their files.

A *fit* is one training run. Its overview has a *reading* for each kind of leak: the value of the
attack that recovered most, and a verdict on it. :func:`findings` summarizes each fit, adds its
overview, compares several runs, and draws a verdict. Every value comes from the logs, or from
``report.toml``. Values in neither are ``NOT_RECORDED``.

:func:`page` renders ``page.html`` with the style and script in this folder, so that the page loads
nothing else. :func:`model_card` and :func:`leakage_file` give the block as Markdown and as JSON.
:func:`write` and its like read the logs and write each form whole or not at all: for ``fedleak
report``, during a fit, and at its end.
"""

import json
import math
import re
import time
import tomllib
from base64 import b64encode
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from hashlib import sha256
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path

import jinja2
from markupsafe import Markup

from lightning_fedleak.messages import rank_zero_info, rank_zero_warn
from lightning_fedleak.private_files import read_regular, write_whole
from lightning_fedleak.report import wording
from lightning_fedleak.report.attacks import (
    NOT_TRIED,
    RELEASED,
    AttackSummary,
    smallest_rate,
    tiers,
)
from lightning_fedleak.report.charts.figures import MAX_RUNS, compared_figures, figures
from lightning_fedleak.report.comparing import Comparison, comparison, names_of
from lightning_fedleak.report.fits import FitSummary, fit_summaries
from lightning_fedleak.report.logs import Logs, ReportError, read
from lightning_fedleak.report.overview import Overview, Reading, of_what_left, overview, plain
from lightning_fedleak.report.records import ENTITIES, HIGH, JsonObject, MetricValue, as_json, named
from lightning_fedleak.report.wording import interval
from lightning_fedleak.validate import explain_errors

SCHEMA = 4
"""Version of ``report.json``."""
TOGETHER = "Epsilons and deltas of several runs on the same examples add up."
"""A sentence on the composition of several accounts, by basic composition."""


@dataclass(frozen=True)
class _ReportVerdict:
    """The verdict on some runs.

    Attributes:
        sentence: The first sentence of the page.
        sentences: The comparison, the overviews and the privacy accounts, in sentences.
        level: ``"high"``, ``"some"`` or ``"unknown"``.
        worst: The highest value of each kind of leak.
    """

    sentence: str
    sentences: Sequence[str]
    level: str
    worst: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Findings:
    """The content of a report.

    Attributes:
        schema: Version of ``report.json``.
        date: Time of writing, in UTC.
        package: The name and version of this package.
        verdict: The verdict on all runs.
        overviews: The overview of each run.
        comparison: The comparison of the runs; None if there is one run.
        runs: The summary of each fit or federation.
        problems: The lines and files that could not be read, in sentences.
        people: The facts from ``report.toml``, which no log has.
    """

    schema: int = SCHEMA
    date: str = named("made")
    package: str = named("made_by")
    verdict: _ReportVerdict
    overviews: Sequence[Overview]
    comparison: Comparison | None
    runs: Sequence[FitSummary]
    problems: Sequence[str]
    people: JsonObject


def findings(logs: Logs, people: JsonObject | None = None) -> Findings:
    """Return the content of a report.

    Args:
        logs: The logs of the runs.
        people: The facts from ``report.toml``, which no log has.
    """
    problems = list(logs.problems)
    fits = fit_summaries(logs.fits, problems)
    overviews = [overview(fit) for fit in fits]
    compared = comparison(fits, overviews) if len(fits) > 1 else None
    content = Findings(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        package=f"lightning-fedleak {version('lightning-fedleak')}",
        verdict=_verdict(fits, overviews, compared),
        overviews=overviews,
        comparison=compared,
        runs=fits,
        problems=problems,
        people=dict(people or {}),
    )
    return wording.visible(content)


def _verdict(
    fits: Sequence[FitSummary], overviews: Sequence[Overview], compared: Comparison | None
) -> _ReportVerdict:
    """Return the verdict; the comparison of several runs comes before the overview of each."""
    sentences = overviews[0].sentences
    if compared is not None:
        parts = zip(names_of(fits), overviews, strict=True)
        sentences = [f"{name}: {' '.join(overview.sentences)}" for name, overview in parts]
        sentences = [plain(compared.sentence), *sentences]
    sentences += [account.statement for fit in fits for account in fit.privacy]
    if sum(bool(fit.privacy) for fit in fits) > 1:
        sentences.append(TOGETHER)
    readings = [reading for overview in overviews for reading in overview.readings if reading.rate]
    worst: dict[str, float] = {}
    for x in readings:
        value = x.rate.value if x.rate and x.rate.value is not None else x.chance
        worst[x.family] = max(value, worst.get(x.family, value))
    return _ReportVerdict(sentences[0], sentences, _level(fits, readings), worst)


def _level(fits: Sequence[FitSummary], readings: Sequence[Reading]) -> str:
    """Return the level of the verdict.

    It is ``"high"`` if a value is above ``HIGH`` or a privacy account is refuted, ``"unknown"`` if
    no value counts, and otherwise ``"some"``.
    """
    above_chance = [reading.height for reading in readings if reading.verdict == "read"]
    # Metrics without guessing (chance 0) count by their value corrected by the control.
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
    return "some" if any(reading.verdict != "unknown" for reading in readings) else "unknown"


# Metrics and suffixes of metrics, with their titles. A suffix is the smallest number of copies.
_TPRS = {"tpr_at_fpr_0.01": "TPR at 1% FPR", "tpr_at_fpr_0.001": "TPR at 0.1% FPR"}
_COPIES = {"x1": "one row", "x2": "2 to 4 rows", "x5": "5 to 16 rows", "x17": "more rows"}


def memorized_rows(fit: FitSummary) -> list[tuple[str, str]]:
    """Return what the trained model memorized, as rows of a title and a result without any text.

    There are rows for the counts of training rows, found and planted values, prompts, TPRs at low
    FPRs, passages by their number of copies, and the reference model, as far as each was measured.
    """
    rows = [] if fit.rows is None else [("Rows of the training data", fit.rows_in_words)]
    rows += fit.values.items()
    for attack in fit.attacks:
        answer = interval(attack.last) if attack.looks else f"unknown: {attack.why_unknown}"
        if attack.family.name == ENTITIES.name:
            # The name is entity/KIND/PLACE, with the suffix _xN for values planted N times.
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


def page(findings: Findings, revealed: Mapping[str, str] | None = None, *, live: float = 0) -> str:
    """Return the report as HTML. All names and texts from the logs are escaped.

    Args:
        findings: the content of the report.
        revealed: contents of local reveal files by name. They are private text: the page must then
            be kept as secret as these files.
        live: time of writing in seconds since 1970, for a run that is not over. The page then
            reloads itself, until a day has passed without a look. 0: it does not reload.
    """
    return _template().render(findings=findings, revealed=revealed or {}, live=live)


@cache
def _template() -> jinja2.Template:
    """Return ``page.html`` as a template, with the functions and filters that it uses."""
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters |= {"in_words": wording.in_words, "share": wording.share}
    environment.filters |= {"interval": interval, "ends_in_words": wording.brief_interval}
    environment.filters |= {"rates": _shown_rates, "most": _rounded_up, "brief": wording.brief}
    environment.filters |= {"css": _css_width}
    functions = (compared_figures, figures, memorized_rows, glossary, release_rows, tiers)
    environment.globals |= {function.__name__: function for function in functions}
    script = _source("page.js")
    environment.globals |= {
        "names": names_of,
        "max_runs": MAX_RUNS,
        "measures": wording.MEASURES,
        "shown_measures": lambda overviews: {r.measure for o in overviews for r in o.readings},
        "together": TOGETHER,
        "ends": _gauge_ends,
        "style": Markup(_source("page.css")),
        "script": Markup(script),
        "script_hash": f"sha256-{b64encode(sha256(script.encode()).digest()).decode()}",
    }
    return environment.from_string(_source("page.html"))


def _source(name: str) -> str:
    """Return the text of a file in this folder."""
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _css_width(share: float) -> str:
    """Return a rate as a CSS width in percent of a gauge from 0 to 1."""
    return f"{100 * min(1.0, max(0.0, share)):.1f}%"


def _gauge_ends(rate: MetricValue) -> tuple[float, float]:
    """Return the ends of a rate's interval on a gauge from 0 to 1.

    Without an interval both are the value. An interval without an upper end ends at 1.
    """
    value = rate.value or 0.0
    low = value if rate.low is None else max(0.0, rate.low)
    high = rate.high if rate.high is not None else value if rate.low is None else 1.0
    return low, high


def _shown_rates(rates: Mapping[str, MetricValue | None]) -> dict[str, object]:
    """Return the rates of an attack, with ``"unknown"`` for those that have no value."""
    return {name: "unknown" if rate is None else rate for name, rate in rates.items()}


def _rounded_up(rate: float | None) -> str:
    """Return an upper bound of a rate, rounded up to three decimals."""
    return wording.share(rate and math.ceil(1e3 * rate - 1e-9) / 1e3)


def glossary(runs: Sequence[FitSummary]) -> list[tuple[str, str]]:
    """Return the terms of the runs' kinds of leak, with their explanations."""
    families = {a.family.name: a.family for fit in runs for a in fit.attacks}
    return [term for family in families.values() for term in family.terms.items()]


RELEASE = {
    "recipients": "Who gets the weights",
    "form": "How they are released",
    "access": "Access, and limits of queries",
    "license": "Licence",
    "privacy": "Differential privacy that is claimed at the release",
}
"""Fields of the table ``release`` in ``report.toml``, with their titles on the page."""


def release_rows(findings: Findings) -> list[tuple[str, object]]:
    """Return the titles and values of the model's release; None is a value that nobody stated."""
    release = findings.people.get("release", {})
    return [(words, release.get(name)) for name, words in RELEASE.items()]


# ---- a block for a model card -------------------------------------------------------------------


def model_card(findings: Findings) -> str:
    """Return the results as a Markdown block for a model card of the Hugging Face hub."""
    lines = [
        "## Tests of what the training leaks",
        "",
        f"Made by `fedleak report` ({findings.package}) on {findings.date[:10]}. It lists what was "
        "tried. It does not say that the model is anonymous, nor that anybody complies. A leak "
        "below the smallest one that could be seen would not have been noticed.",
    ]
    for fit in findings.runs:
        lines += ["", *([f"### {_plain(fit.name)}", ""] if len(findings.runs) > 1 else [])]
        lines += _fit_lines(fit)
    release = (f"- {name}: {_plain(value)}" for name, value in release_rows(findings))
    lines += ["", f"Release, from `{REPORT_TOML}`:", "", *release]
    return "\n".join(lines) + "\n"


def leakage_file(findings: Findings) -> JsonObject:
    """Return the content of ``leakage.json``: the block of the model card, for programs."""
    runs = []
    for fit, row in zip(findings.runs, as_json(findings)["runs"], strict=True):
        attacks = [_attack_facts(*pair) for pair in zip(fit.attacks, row["attacks"], strict=True)]
        privacy = {account.defense: account.claim for account in fit.privacy}
        results = {"attacks": attacks, "privacy": privacy}
        runs.append({name: row[name] for name in _RUN_KEYS} | results)
    facts = {"schema": 1, "kind": "leakage", "made": findings.date, "made_by": findings.package}
    return {**facts, "runs": runs, "release": findings.people.get("release", {})}


_RUN_KEYS = ("run", "name", "ended", "steps", "unit", "length", "looked_at", "not_tested")
_ATTACK_KEYS = ("name", "stage", "family", "headline", "chance", "looks", "control", "why_unknown")


def _attack_facts(attack: AttackSummary, row: JsonObject) -> JsonObject:
    """Return an attack for ``leakage.json``: fields of its row in the report, and its last rate."""
    rate, smallest = as_json(attack.last or MetricValue()), smallest_rate(attack)
    smallest = None if smallest is None or smallest >= 1 else smallest
    facts = {name: row[name] for name in _ATTACK_KEYS} | {"n": attack.last_n, **rate}
    return {**facts, "stale": attack.stale, "smallest_rate_detected": smallest}


def _fit_lines(fit: FitSummary) -> list[str]:
    """Return the Markdown lines of a run: attacks tried, memorized rows, what was not tested."""
    rows = [
        (attack.name, attack.tried, "; ".join(attack.results), "; ".join(attack.visible))
        for attack in fit.named_attacks
        if attack.tried != NOT_TRIED
    ]
    lines = [
        "| attack (EDPB Opinion 28/2024, paragraph 55) | tried on | latest results, 95% interval | "
        "smallest rate that could have been seen |",
        "|---|---|---|---|",
        *("| " + " | ".join(map(_plain, row)) + " |" for row in rows),
    ]
    if counted := memorized_rows(fit):
        lines += ["", "| which records, what in them | latest counts |", "|---|---|"]
        lines += [f"| {_plain(what)} | {_plain(counts)} |" for what, counts in counted]
    missing = [attack.name for attack in fit.named_attacks if attack.tried == NOT_TRIED]
    lines += ["", f"Not tried: {', '.join(missing) or 'none of the six'}.", ""]
    if fit.not_tested:
        lines += ["Not tested:", "", *(f"- {_plain(sentence)}" for sentence in fit.not_tested), ""]
    claims = [f"{account.defense}: {account.claim}" for account in fit.privacy]
    steps = "an unrecorded number of" if fit.length is None else f"{fit.length:,}"
    lines += [f"Looked at {fit.looked_at:,} of {steps} {fit.unit}s.", ""]
    lines.append(f"Differential privacy (epsilon, delta): {_plain('; '.join(claims) or 'none')}")
    return lines


def _plain(value: object) -> str:
    """Return a value in words on one line, with characters of Markdown and HTML escaped."""
    return re.sub(r"([\\`*_{}\[\]<>|#~!])", r"\\\1", " ".join(wording.in_words(value).split()))


REPORT_TOML = "report.toml"
LEAKAGE = "leakage.json"
"""Name of the file next to the weights with the results of the model card."""


def write(
    runs: Sequence[Path],
    out: Path | None = None,
    reveal: Sequence[Path] = (),
    *,
    run: str | None = None,
) -> list[Path]:
    """Write ``report.html`` and ``report.json``.

    Args:
        runs: log folders, or log files in them.
        out: folder to write to, created if it is missing. Default: the first run's folder. A
            ``report.toml`` in it adds facts that no log has.
        reveal: local reveal files, whose private text is added to the page.
        run: id of the only fit to report; default all.

    Returns:
        The paths of the two files.

    Raises:
        ReportError: there is no log, a file cannot be read or written, or ``report.toml`` has an
            unknown table or name.
    """
    folder = out or _folder_of(runs[0])
    content = findings(read(runs, run=run), _facts(folder))
    texts = {str(path): _text(path.resolve()) for path in reveal}
    files = {
        folder / "report.html": page(content, texts),
        folder / "report.json": json.dumps(as_json(content), indent=1, allow_nan=False) + "\n",
    }
    with _writing_to(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in files.items():
            write_whole(path, text.encode())
    return list(files)


def write_live(record: Path, run: str) -> None:
    """Write the report of a running fit next to its ``run.jsonl``; the page reloads itself.

    Args:
        record: the fit's ``run.jsonl``.
        run: the fit's id.

    Raises:
        ReportError: ``record`` cannot be read.
        OSError: the page cannot be written.
    """
    content = findings(read([record], run=run), _facts(record.parent))
    write_whole(record.parent / "report.html", page(content, live=time.time()).encode())


def write_at_end(record: Path, run: str, watcher: str) -> Path | None:
    """Write the report of a run next to its ``run.jsonl``, and return the page's path.

    If the report cannot be written, the process warns and None is returned.

    Args:
        record: the run's ``run.jsonl``.
        run: the run's id.
        watcher: the class that watched the run, for the message.
    """
    try:
        path, *_ = write([record], run=run)
        rank_zero_info(f"{watcher}: {path}")
    except Exception as error:  # a report is no reason to lose a run
        rank_zero_warn(f"{watcher}: no report: {error}")
        return None
    return path


def print_card(runs: Sequence[Path], weights: Path | None = None) -> None:
    """Print a block for a model card, and write ``leakage.json`` next to the weights.

    Args:
        runs: log folders, or log files in them. A ``report.toml`` in the first one's folder is
            read as by :func:`write`.
        weights: folder of the weights, to which ``leakage.json`` is written; None writes no file.

    Raises:
        ReportError: as :func:`write`.
    """
    content = findings(read(runs), _facts(_folder_of(runs[0])))
    print(model_card(content), end="")
    if weights is None:
        return
    text = json.dumps(as_json(leakage_file(content)), indent=1, allow_nan=False) + "\n"
    with _writing_to(weights, "Name the folder of the weights with --out"):
        if not weights.is_dir():  # it would be made
            raise OSError("it is no folder")
        write_whole(weights / LEAKAGE, text.encode())
        (weights / LEAKAGE).chmod(0o644)  # it is released with the weights


def _folder_of(run: Path) -> Path:
    """Return the folder of a run's logs; ``run`` may also be one of these logs."""
    return run if run.is_dir() else run.parent


def _facts(folder: Path) -> Mapping[str, object]:
    """Return the table of ``report.toml`` in a folder; an empty mapping without such a file."""
    path = folder / REPORT_TOML
    if not path.is_file():
        return {}
    text = _text(path)
    with explain_errors(f"'{path}' is no TOML", tomllib.TOMLDecodeError, error=ReportError):
        tables = tomllib.loads(text)
    fields = tables.get("release", {})
    names = {*tables} - {"release"} or (isinstance(fields, dict) and {*fields} - {*RELEASE})
    if names or not isinstance(fields, dict):
        raise ReportError(
            f"'{path}' has '{min(names or {'release'})}': it may have one table, [release], with "
            f"{', '.join(RELEASE)}"
        )
    return tables


def _text(path: Path) -> str:
    """Return the text of a file.

    Raises:
        ReportError: it cannot be read.
    """
    with explain_errors(f"'{path}' cannot be read", OSError, UnicodeDecodeError, error=ReportError):
        return read_regular(path).decode()


def _writing_to(
    folder: Path, hint: str = "Name another folder with --out"
) -> AbstractContextManager[None]:
    """Raise a ``ReportError`` with a hint if files of a folder cannot be written in the block."""
    return explain_errors(f"'{folder}' cannot be written to", OSError, error=ReportError, hint=hint)
