"""An entry for the registry of deployments of differential privacy (OpenDP).

The fields are those of its ``deployments-schema.yaml`` as of 2026-07-15; strings are Markdown
there. What the runs know is filled in, what only people know comes from ``report.toml``. The rest
says ``not recorded`` where the schema wants something, and is left out where it does not.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Collection, Mapping, Sequence

import yaml

from lightning_fedleak.report.bounds import JointAccount, common_unit
from lightning_fedleak.report.content import Findings
from lightning_fedleak.report.privacy import CLIENT, TOKENS, Account
from lightning_fedleak.report.records import as_json
from lightning_fedleak.report.wording import NOT_RECORDED, UNIT_IN_WORDS, capitalized

RELEASE = "release"
"""The table that no entry of the registry has: how the model is released."""
RELEASE_FIELDS: Mapping[str, str] = {
    "recipients": "Who gets the weights",
    "form": "How they are released",
    "access": "Access, and limits of queries",
    "license": "Licence",
    "privacy": "Differential privacy that is claimed at the release",
}
"""Its fields, with what they are called on the page."""

FIELDS: Mapping[str, Collection[str]] = {
    "basic": (
        *("name", "data_curators", "intended_use", "data_product_type", "data_product_region"),
        *("description", "publication_date", "data_product_sector"),
    ),
    "dp_variant": ("variant_name", "data_domain", "unprotected_quantities"),
    "privacy_loss": (
        *("privacy_unit", "privacy_unit_details"),
        *("privacy_parameters", "privacy_parameters_details"),
    ),
    "deployment_model": (
        *("model_name", "model_name_details", "actors"),
        *("release_type", "release_type_details", "data_source_type", "data_source_type_details"),
        *("access_type", "access_type_details"),
    ),
    "accounting": ("post_processing", "composition"),
    "implementation": ("preprocessing_and_hyperparameter_tuning", "mechanisms", "justification"),
    "administrative": ("sources", "notes", "registry_authors"),
}
"""Sections and fields of an entry of the registry, in their order."""

_PEOPLE = ("basic", "administrative")
_NUMBERS = {"privacy_parameters", "variant_name"}  # which come from the runs alone


def entry(findings: Findings) -> str:
    """Return the entry as YAML, a draft that people complete.

    Args:
        findings: what the report says; ``people`` may hold a table for each section of the
            schema.

    Raises:
        ValueError: ``people`` has an unknown name, or a field that comes from the runs alone.
    """
    check_people(findings.people)
    accounts = [account for fit in findings.runs for account in fit.privacy]
    is_private = _is_private(findings, accounts)
    sections: dict[str, dict[str, object]] = {"basic": _basic(findings)}
    if is_private:
        sections |= _privacy(findings, accounts)
    by_runs = {section: set(sections[section]) for section in sections if section not in _PEOPLE}
    sections["administrative"] = {
        "notes": " ".join(findings.verdict.sentences),
        "registry_authors": [NOT_RECORDED],
    }
    for section in [section for section in FIELDS if section in findings.people]:
        fields = findings.people[section]
        refused = (by_runs.get(section, set()) | _NUMBERS) & set(fields)
        if section not in _PEOPLE and refused:
            raise ValueError(
                f"report.toml: {section}.{', '.join(sorted(refused))} comes from the runs alone; "
                "leave it out"
            )
        sections.setdefault(section, {}).update(fields)
    deployment = {
        section: {name: sections[section][name] for name in fields if name in sections[section]}
        for section, fields in FIELDS.items()
        if section in sections
    }
    slug = re.sub(r"[^a-z0-9]+", "_", str(deployment["basic"]["name"]).lower()).strip("_")
    content = {
        "url_slug": slug or "model",
        "status": "Draft",
        "tier": 3 if is_private else 1,
        "deployment": deployment,
    }
    text: str = yaml.safe_dump(as_json(content), sort_keys=False, allow_unicode=True, width=100)
    return text


def check_people(people: Mapping[str, object]) -> None:
    """Raise ValueError unless all tables and fields of ``report.toml`` are known ones."""
    tables = {**FIELDS, RELEASE: RELEASE_FIELDS}
    for table, fields in people.items():
        if table not in tables:
            raise ValueError(
                f"report.toml has a table '{table}', which an entry does not; it has: "
                f"{_names(table, tables)}"
            )
        if not isinstance(fields, Mapping):
            raise ValueError(f"report.toml: '{table}' must be a table of fields, got {fields!r}")
        for name in fields:
            if name not in tables[table]:
                raise ValueError(
                    f"report.toml: '{table}' has no field '{name}'; it has: "
                    f"{_names(name, tables[table])}"
                )


def _names(name: str, known: Collection[str]) -> str:
    """Return the known names, and the one that was probably meant."""
    near = difflib.get_close_matches(name, [*known], 1)
    return ", ".join(known) + (f". Did you mean '{near[0]}'?" if near else "")


def _is_private(findings: Findings, accounts: Sequence[Account]) -> bool:
    """Return whether one finite epsilon holds for all runs together, each of them until its end."""
    kinds = {account.class_name for account in accounts}
    if len(kinds) != 1 or not kinds <= {"DPSGD", CLIENT, TOKENS}:
        return False
    joint = findings.privacy_together
    composed = len(findings.runs) == 1 or (
        len(joint) == 1
        and isinstance(joint[0].epsilon, int | float)
        and joint[0].epsilon < math.inf
    )
    every = all(fit.privacy for fit in findings.runs)
    return every and composed and all(account.holds and account.whole for account in accounts)


def _basic(findings: Findings) -> dict[str, object]:
    fits = findings.runs
    model = next((fit.begin.model.class_name for fit in fits if fit.begin.model), "language model")
    shared = "; ".join(dict.fromkeys(fit.shared.description for fit in fits))
    days = [day for fit in fits if re.fullmatch(r"\d{4}-\d\d-\d\d", day := fit.start[:10])]
    return {
        "name": f"{model} fine-tuned",
        "data_curators": [NOT_RECORDED],
        "intended_use": NOT_RECORDED,
        "data_product_type": "Machine learning model",
        "data_product_region": NOT_RECORDED,
        "description": f"A {model}." + f" In training was shared: {shared}." * bool(fits),
        "publication_date": max(days, default=findings.date[:10]),
    }


def _privacy(findings: Findings, accounts: Sequence[Account]) -> dict[str, dict[str, object]]:
    """Return the sections on privacy; all accounts are of one class of defence, and hold."""
    worst = max(accounts, key=lambda account: account.bound[0])
    joint = next(iter(findings.privacy_together), None)
    # A text that a sampler moves between clients is released by each of them.
    times = max(account.clients for account in accounts) if worst.is_of_tokens else 1
    total: Account | JointAccount = joint or worst
    numbers = {"epsilon": total.epsilon, "delta": total.delta}
    parameters = {name: one for name, one in numbers.items() if isinstance(one, int | float)}
    if "epsilon" in parameters:
        parameters["epsilon"] *= times
    versions = next((fit.begin.versions for fit in findings.runs if fit.begin.versions), {})
    packages = ", ".join(f"{name} {number}" for name, number in versions.items())
    guarantees = " ".join(dict.fromkeys(account.guarantee for account in accounts))
    uncovered = (
        "Leakage logs, validation metrics, the number of steps, the choice of settings, and what "
        "gates decided."
    )
    if worst.is_of_tokens:
        uncovered += " Lengths of texts, special tokens, labels of a classifier."
    if worst.is_of_clients:
        uncovered += " What clients send besides their updates."
    return {
        "dp_variant": {
            "variant_name": "Approximate DP" if total.delta else "Pure DP",
            "unprotected_quantities": uncovered,
        },
        "privacy_loss": {
            "privacy_unit": _unit(accounts),
            "privacy_unit_details": guarantees,
            "privacy_parameters": parameters,
            "privacy_parameters_details": worst.statement,
        },
        "deployment_model": {
            "model_name": _model_name(worst),
            "model_name_details": f"{worst.trusted} {guarantees}",
            "actors": f"Clients that train; {findings.runs[0].shared.seen_by}.",
            "release_type": "Many releases",
        },
        "accounting": {"composition": _composition(worst, joint, times)},
        "implementation": {"mechanisms": f"{_mechanism(worst)} Versions: {packages}."},
    }


def _composition(worst: Account, joint: JointAccount | None, times: int) -> str:
    """Return how epsilon was composed."""
    composition = f"{worst.releases} releases by {worst.accountant}. "
    if joint is None:
        composition += "One fit; other uses of the same data are not counted."
    else:
        composition += (
            f"{joint.fits} fits on the same examples together: epsilon {joint.epsilon} at delta "
            f"{joint.delta}."
        )
    if times > 1:
        composition += f" Times {times}, the clients that a sampler may move a text between."
    return composition


def _unit(accounts: Sequence[Account]) -> str:
    unit = common_unit({account.unit for account in accounts})
    return NOT_RECORDED if unit == NOT_RECORDED else capitalized(UNIT_IN_WORDS.get(unit, unit))


def _model_name(account: Account) -> str:
    """Return the registry's name for who is trusted."""
    if account.is_of_clients:
        return {"central": "Central", "local": "Local"}.get(account.trust, "Federated")
    return "Local" if account.is_of_tokens else "Federated"


def _mechanism(account: Account) -> str:
    if account.is_of_tokens:
        settings = account.settings
        domain = settings.get("domain", "a public set of ids")
        return (
            f"Token ids are replaced by {settings.get('mechanism', NOT_RECORDED)}, among "
            f"{'all words of the vocabulary' if domain == 'vocabulary' else domain}, with an "
            f"epsilon of {settings.get('epsilon', NOT_RECORDED)} for each "
            f"{'token' if settings.get('per') == 'token' else 'text'}, before training."
        )
    clipped = "updates of clients" if account.is_of_clients else "gradients"
    return (
        f"Gaussian noise on clipped {clipped} ({account.defense}); floating-point noise, not from "
        "a cryptographic generator."
    )
