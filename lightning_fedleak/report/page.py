"""The report as one page of HTML that needs nothing from anywhere."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

import jinja2
from markupsafe import Markup

from lightning_fedleak.report import charts
from lightning_fedleak.report.findings import CLIENT, NOT_RECORDED, TOKENS, UNIT_IN_WORDS

_TEMPLATE = "page.html"


def page(found: Mapping[str, Any], revealed: Mapping[str, str] | None = None) -> str:
    """Renders what was found.

    Args:
        found: of :func:`~lightning_fedleak.report.findings.findings`.
        revealed: contents of local reveal files, by name: private text. The page must then be
            kept as they are.

    Returns:
        HTML; everything that runs have named themselves is escaped.
    """
    return _template().render(found=found, revealed=revealed or {})


@cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.filters |= {"known": known, "share": share, "interval": interval, "rates": rates}
    environment.filters["most"] = lambda rate: share(rate and math.ceil(1e3 * rate - 1e-9) / 1e3)
    environment.globals |= {"account": account, "pictures": pictures, "questions": questions}
    environment.globals["terms"] = terms
    source = files(__package__).joinpath(_TEMPLATE).read_text(encoding="utf-8")
    return environment.from_string(source)


# ---- how values are written -------------------------------------------------------------------


def known(value: object) -> str:
    """A value in words; what nobody recorded says so. A setting that is None was set to none."""
    if value is None or value == "":
        return NOT_RECORDED
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, Mapping):
        if {"value", "low", "high"} <= value.keys():
            return interval(value)
        said = (f"{name} {'none' if of is None else known(of)}" for name, of in value.items())
        return ", ".join(said) or "none"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(map(known, value)) or "none"
    return str(value)


def rates(of: Mapping[str, object]) -> dict[str, object]:
    """The rates of an attack; what it could not tell is unknown, though it was recorded."""
    return {name: "unknown" if value is None else value for name, value in of.items()}


def share(value: float | None) -> str:
    """A rate with three digits; unknown is said."""
    if value is None or math.isnan(value):
        return "unknown"
    return f"{value:.3f}"


def interval(rate: Mapping[str, float | None] | None) -> str:
    """A rate and its 95% interval."""
    if rate is None or rate["value"] is None:
        return "unknown"
    if rate["low"] is None or rate["high"] is None:
        return share(rate["value"])
    return f"{share(rate['value'])} ({share(rate['low'])} to {share(rate['high'])})"


# ---- what is shown of a fit -------------------------------------------------------------------


def pictures(fit: Mapping[str, Any]) -> dict[str, Markup]:
    """The pictures of a fit, by their titles."""
    acted: dict[str, list[float]] = {}
    for decision in fit["decisions"]:
        whose = "" if decision["client"] is None else f", client {decision['client']}"
        acted.setdefault(f"{decision['gate']} {decision['did']}{whose}", []).append(
            decision["step"]
        )
    unit = fit["unit"]
    shown = {
        "Each attack: latest result, 95% interval (dashed: guessing)": charts.intervals(
            fit["attacks"], label="attacks with intervals, unknown ones first"
        )
    }
    alone = {name: of[""] for name, of in fit["headlines"].items() if set(of) == {""}}
    if alone:
        shown[f"Leakage over {unit}s, of what was shared"] = charts.lines(
            alone,
            label=f"each attack's headline over {unit}s",
            span=(0.0, 1.0),
            marks=acted,
            unit=unit,
        )
    for name, of in fit["headlines"].items():
        if name not in alone:
            by_client = {c if c == "sum" else f"client {c}": line for c, line in of.items()}
            headline = next(a["headline"] for a in fit["attacks"] if a["name"] == name)
            shown[f"{name}, {headline}, by client"] = charts.lines(
                charts.few(by_client, last="sum"),
                label=f"{name} over {unit}s, one line for each client",
                span=(0.0, 1.0),
                marks=acted,
                unit=unit,
            )
    if fit["utility"]:
        shown[f"Utility over {unit}s"] = charts.lines(
            charts.few(fit["utility"]), label=f"utility over {unit}s", marks=acted, unit=unit
        )
    for spent in fit["privacy"]:
        target = spent["target_epsilon"]
        of_what = {"client": ", for a whole client", "row": ", for a text",
                   "user": ", for a user"}.get(spent["unit"], "")  # fmt: skip
        shown[f"Epsilon spent ({spent['defense']}{of_what})"] = charts.lines(
            {"epsilon": spent["series"]},
            label=f"epsilon over {unit}s",
            level=target if isinstance(target, int | float) else None,
            unit=unit,
        )
    return shown


def account(spent: Mapping[str, Any]) -> list[tuple[str, object]]:
    """What stands beside the statement of a defence that accounts."""
    facts: list[tuple[str, object]] = [
        ("Epsilon, delta", claimed(spent)),
        ("Unit of privacy", UNIT_IN_WORDS.get(spent["unit"], spent["unit"])),
    ]
    settings = spent["settings"]
    if spent["class"] == TOKENS:
        facts += [
            ("Who is trusted", spent["trusted"]),
            ("Mechanism", settings.get("mechanism")),
            ("Epsilon of one release", settings.get("epsilon")),
            ("For each", "token" if settings.get("per") == "token" else "text"),
            ("Tokens are replaced among", settings.get("domain", "a public set of ids")),
            ("Labels", settings.get("labels")),
            ("A text keeps its replacement for the fit", settings.get("memoize")),
            ("Special tokens stay", settings.get("keep_special")),
            ("Releases of the text that was released most often", spent["releases"]),
        ]
        return facts
    facts += [
        ("Without counting on sampling, epsilon", _without_sampling(spent)),
        ("Who is trusted", spent["trusted"]),
    ]
    if spent["class"] == CLIENT:
        facts += [
            ("Clients of the federation, in a round",
             f"{known(settings.get('clients'))}, {known(settings.get('per_round'))}"),
            ("Drawn", settings.get("sampling")),
        ]  # fmt: skip
    if spent["correlated"]:
        facts.append(("Noise correlated over steps", spent["correlated"]))
    noise, rate = known(spent["noise_multiplier"]), known(spent["sample_rate"])
    facts += [
        ("Clip norm", clip_norm(spent)),
        ("Target", spent["target_epsilon"]),
        (
            "Releases, noise multiplier, sample rate",
            f"{known(spent['releases'])}, {noise}, {rate}",
        ),
        ("Accountant", spent["accountant"]),
        ("Ledger", spent["ledger"]),
    ]
    if spent["ledger_releases"]:
        facts.append(("Releases in the ledger", spent["ledger_releases"]))
    return facts


def clip_norm(spent: Mapping[str, Any]) -> object:
    """Return the norm to which a defence that accounts clipped."""
    settings = spent["settings"]
    return settings.get("max_grad_norm", settings.get("clip", "none" if settings else None))


def claimed(spent: Mapping[str, Any]) -> str:
    """Epsilon at delta, and why it is none of the run where it is not."""
    said = f"{known(spent['epsilon'])} at {known(spent['delta'])}"
    if not spent["holds"]:
        return f"none holds (recorded: {said})"
    return said if spent["whole"] else f"{said}, until the last look alone"


def _without_sampling(spent: Mapping[str, Any]) -> object:
    """Return epsilon without sampling, or why there is none of its own."""
    if spent["without_sampling"] is not None:
        return spent["without_sampling"]
    if not spent["holds"]:
        return "none holds"
    if spent["poisson"] is False:
        return "the same: sampling counts for nothing"
    return "not computed: the budget is a filter's" if spent["accountant"] == "filter" else None


_TERMS = {
    "words": (
        ("Words", "Tokens, the pieces of text that a model reads: whole words or parts of words. "
         "Which distinct tokens are in a batch is tested. Neither their order nor a text is read."),
        ("F1", "0: no token right. 1: every distinct token of the batch named, and none besides. "
         "It is the harmonic mean of recall (the share of the batch's tokens that was named) and "
         "precision (the share of what was named that was right)."),
    ),
    "membership": (
        ("AUC", "How often the attack ranks a text of the batch above one that is not in it. "
         "0.5 is guessing, 1 is always."),
        ("TPR at 1% FPR", "The share of the batch's texts that is found while 1 in 100 other texts "
         "is taken for one of them."),
    ),
    "texts": (
        ("Token accuracy", "The share of tokens that was written down in the right place. 1 is "
         "every text word for word."),
    ),
}  # fmt: skip
"""What is measured of each family, for people who do not know the words."""


def terms(fit: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What the words and numbers of a run mean."""
    families = dict.fromkeys(a["family"] for a in fit["attacks"])
    explained = [term for family in families for term in _TERMS.get(family, ())]
    return [
        *explained,
        ("n", "How much a number rests on: distinct tokens, texts or tokens that were asked for. A "
         "small n makes a wide interval."),
        ("95% interval", "Where the true value lies, in 95 of 100 such measurements. An interval "
         "that includes guessing shows nothing either way."),
        ("Certified", "The share of measurements at which the attack's own check held: what it "
         "found explains all that was shared, so that the attacker too knows that it is right."),
        ("Unknown", "An attack that applies gave no result. That is not safe."),
        ("Not recorded", "Nobody wrote it down. It may have been there. Where a run recorded that "
         "there was nothing, the page says none."),
    ]  # fmt: skip


def questions(found: Mapping[str, Any]) -> list[tuple[str, list[tuple[str, object]]]]:
    """What reviewers ask, answered from the runs.

    The groups are those of NIST SP 800-226 (its layers from the claim to the data) and of EDPB
    Opinion 28/2024 (what a controller documents of attacks and of residual risk).
    """
    fits, people = found["runs"], found["people"]
    spent = [p for fit in fits for p in fit["privacy"]]
    attacks = [a for fit in fits for a in fit["attacks"]]
    recorded = all(fit["recorded"] for fit in fits)
    versions: Mapping[str, str] = next((f["versions"] for f in fits if f["versions"]), {})

    def of(section: str, name: str) -> object:
        return (people.get(section) or {}).get(name)

    def each(values: Iterable[object]) -> list[object] | None:
        """Return each value once; None where there is none and a run was not recorded."""
        return list(dict.fromkeys(values)) or ([] if recorded else None)

    claim: list[tuple[str, object]] = [
        ("Epsilon and delta", each(claimed(p) for p in spent)),
        ("What it limits", each(p["limit"] or "no epsilon holds for the run" for p in spent)),
        ("Unit of privacy and neighbours", each(p["guarantee"] for p in spent)),
        ("Accountant, releases", each(f"{p['accountant']}, {known(p['releases'])}" for p in spent)),
    ]
    noised = [p for p in spent if p["noise_multiplier"] is not None]
    mechanism: list[tuple[str, object]] = [
        (
            "Clip norm and noise multiplier",
            each(f"{known(clip_norm(p))}, {known(p['noise_multiplier'])}" for p in noised),
        ),
        ("Library and versions", ", ".join(f"{n} {v}" for n, v in versions.items())),
        (
            "Utility at the last look",
            {name: line[-1][1] for fit in fits for name, line in fit["utility"].items() if line},
        ),
        ("Bias between groups", of("implementation", "justification")),
    ]
    rules = [
        g["rule"] if fit["gates"] else "none"
        for fit in fits
        if fit["gates"] is not None
        for g in fit["gates"] or [{}]
    ]
    trust: list[tuple[str, object]] = [
        ("What leaves a client", each(fit["shared"]["what"] for fit in fits)),
        ("Who sees it", each(fit["shared"]["seen_by"] for fit in fits)),
        ("Who is trusted", each(p["trusted"] for p in spent)),
        ("Gates", each(rules)),
    ]
    data: list[tuple[str, object]] = [
        ("Whose data, collected how", of("dp_variant", "data_domain")),
        (
            "Use of the data before and beside this",
            of("implementation", "preprocessing_and_hyperparameter_tuning"),
        ),
    ]
    tried: list[tuple[str, object]] = [
        ("Attacks tried", each(a["name"] for a in attacks)),
        ("Adversaries", each(a["adversary"] for a in attacks)),
        ("Their strength", "each attack's settings stand in the table of attacks"),
        (
            "Results",
            each(
                f"{a['name']} ({a['stage']}): {interval(a['last'])}" for a in attacks if a["last"]
            ),
        ),
        ("Unknown results", sum(a["unknown"] for a in attacks)),
        ("Not tested", each(one for fit in fits for one in fit["not_tested"])),
        ("Direct extraction from the trained model", "not tested here"),
        ("Personal data by queries to the model", "not tested here"),
        ("Date of the tests", each(fit["began"][:10] for fit in fits)),
    ]
    return [
        ("The claim (NIST SP 800-226)", claim),
        ("Mechanism, utility, bias", mechanism),
        ("Trust and side channels", trust),
        ("Data collection", data),
        ("Attacks and residual risk (EDPB Opinion 28/2024)", tried),
    ]


__all__ = ["account", "claimed", "interval", "known", "page", "pictures", "questions", "share"]
