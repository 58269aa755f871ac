"""The report as a self-contained HTML page, and as a block for a model card.

:func:`page` renders ``page.html`` with the style and script in this folder, so that the page loads
nothing else. :func:`model_card` and :func:`leakage_file` give the block as Markdown and as JSON.
"""

from __future__ import annotations

import math
import re
from base64 import b64encode
from collections.abc import Mapping, Sequence
from functools import cache
from hashlib import sha256
from importlib.resources import files

import jinja2
from markupsafe import Markup

from lightning_fedleak.report.attacks import AttackSummary
from lightning_fedleak.report.charts.figures import MAX_RUNS, compared_figures, figures
from lightning_fedleak.report.comparing import names_of
from lightning_fedleak.report.content import TOGETHER, Findings, memorized_rows
from lightning_fedleak.report.edpb import NOT_TRIED, smallest_rate, tiers
from lightning_fedleak.report.fits import FitSummary
from lightning_fedleak.report.records import JsonObject, MetricValue, as_json
from lightning_fedleak.report.wording import brief, brief_interval, in_words, interval, share


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
    environment.filters |= {"in_words": in_words, "share": share, "interval": interval}
    environment.filters |= {"rates": _shown_rates, "most": _rounded_up, "brief": brief}
    environment.filters |= {"ends_in_words": brief_interval, "css": _css_width}
    functions = (compared_figures, figures, memorized_rows, glossary, release_rows, tiers)
    environment.globals |= {function.__name__: function for function in functions}
    script = _source("page.js")
    environment.globals |= {
        "names": names_of,
        "max_runs": MAX_RUNS,
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
    return share(rate and math.ceil(1e3 * rate - 1e-9) / 1e3)


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
        "tried. It does not say that the model is anonymous, nor that anybody complies. A rate "
        "below the smallest one that could have been seen may be there.",
    ]
    for fit in findings.runs:
        lines += ["", *([f"### {_plain(fit.name)}", ""] if len(findings.runs) > 1 else [])]
        lines += _fit_lines(fit)
    release = (f"- {name}: {_plain(value)}" for name, value in release_rows(findings))
    lines += ["", "Release:", "", *release]
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
    return re.sub(r"([\\`*_{}\[\]<>|#~!])", r"\\\1", " ".join(in_words(value).split()))
