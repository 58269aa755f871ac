"""A block for a model card: what was tried on the model, what it showed, and what was not tried."""

from __future__ import annotations

import re
from collections.abc import Sequence

from lightning_fedleak.report.edpb import NOT_TRIED, release_context
from lightning_fedleak.report.findings import Findings
from lightning_fedleak.report.fits import FitSummary
from lightning_fedleak.report.wording import in_words


def model_card(findings: Findings) -> str:
    """Return the block as Markdown, for a model card of the Hugging Face hub.

    Raises:
        ValueError: ``report.toml`` has a release context that is not one.
    """
    lines = [
        "## Tests of what the training gives away",
        "",
        f"Made by `fedleak report` ({findings.package}) on {findings.date[:10]}. It lists what was "
        "tried. It does not say that the model is anonymous, nor that anybody complies. A rate "
        "below the smallest one that could have been seen may be there.",
    ]
    for fit in findings.runs:
        lines += ["", *([f"### {_plain(fit.name)}", ""] if len(findings.runs) > 1 else [])]
        lines += _fit_lines(fit)
    context = release_context(findings.people)
    lines += ["", "Release:", "", *(f"- {name}: {_plain(value)}" for name, value in context)]
    return "\n".join(lines) + "\n"


def _fit_lines(fit: FitSummary) -> list[str]:
    rows = [
        (one.name, one.tried, _joined(one.results), _joined(one.visible))
        for one in fit.named_attacks
        if one.tried != NOT_TRIED
    ]
    lines = [
        "| attack (EDPB Opinion 28/2024, paragraph 55) | tried on | latest results, 95% interval | "
        "smallest rate that could have been seen |",
        "|---|---|---|---|",
        *("| " + " | ".join(map(_plain, row)) + " |" for row in rows),
    ]
    missing = [one.name for one in fit.named_attacks if one.tried == NOT_TRIED]
    lines += ["", f"Not tried: {', '.join(missing) or 'none of the six'}.", ""]
    if fit.not_tested:
        lines += ["Not tested:", "", *(f"- {_plain(sentence)}" for sentence in fit.not_tested), ""]
    claims = [f"{account.defense}: {account.claim}" for account in fit.privacy]
    lines.append(f"Differential privacy (epsilon, delta): {_plain(_joined(claims) or 'none')}")
    return lines


def _joined(parts: Sequence[str]) -> str:
    return "; ".join(parts)


def _plain(value: object) -> str:
    """Return a value in words on one line, in which nothing is Markdown or HTML."""
    return re.sub(r"([\\`*_{}\[\]<>|#~!])", r"\\\1", " ".join(in_words(value).split()))
