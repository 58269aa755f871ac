"""An entry for the registry of deployments of differential privacy (OpenDP).

The fields are those of its ``deployments-schema.yaml`` as of 2026-07-15; strings are Markdown
there. What the runs know is filled in, what only people know comes from ``report.toml``. The rest
says ``not recorded`` where the schema wants something, and is left out where it does not.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import date
from typing import Any

import yaml

from lightning_fedleak.report.findings import CLIENT, NOT_RECORDED, TOKENS

_TEXT: Mapping[str, Any] = {"type": "string"}
_TEXTS: Mapping[str, Any] = {"type": "array"}


def _one_of(*words: str) -> Mapping[str, Any]:
    return {"type": "string", "enum": words}


_SECTORS = ("Technology", "Healthcare", "Education", "Government", "Energy", "Finance")
FIELDS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "basic": {
        "name": _TEXT,
        "data_curators": _TEXTS,
        "intended_use": _TEXT,
        "data_product_type": _one_of(
            "Summary statistics",
            "Machine learning model",
            "Dataset",
            "Synthetic data",
            "Interactive API",
            "SQL queries",
        ),
        "data_product_region": _TEXT,
        "description": _TEXT,
        "publication_date": {"type": "string", "format": "date"},
        "data_product_sector": _one_of(*_SECTORS),
    },
    "dp_variant": {
        "variant_name": _one_of(
            "Pure DP", "Approximate DP", "Zero-concentrated DP", "Renyi DP", "Custom"
        ),
        "data_domain": _TEXT,
        "unprotected_quantities": _TEXT,
    },
    "privacy_loss": {
        "privacy_unit": _TEXT,
        "privacy_unit_details": _TEXT,
        "privacy_parameters": {"type": "object"},
        "privacy_parameters_details": _TEXT,
    },
    "deployment_model": {
        "model_name": _one_of("Local", "Central", "Shuffle", "Federated", "Varies"),
        "model_name_details": _TEXT,
        "actors": _TEXT,
        "release_type": _one_of("One release", "Many releases"),
        "release_type_details": _TEXT,
        "data_source_type": _one_of("Static", "Dynamic"),
        "data_source_type_details": _TEXT,
        "access_type": _one_of("Interactive", "Non-interactive"),
        "access_type_details": _TEXT,
    },
    "accounting": {"post_processing": _TEXT, "composition": _TEXT},
    "implementation": {
        "preprocessing_and_hyperparameter_tuning": _TEXT,
        "mechanisms": _TEXT,
        "justification": _TEXT,
    },
    "administrative": {"sources": _TEXT, "notes": _TEXT, "registry_authors": _TEXTS},
}
"""Sections of an entry, their fields, and what a field holds."""

REQUIRED = (
    *("name", "data_curators", "description", "intended_use"),
    *("data_product_type", "data_product_region", "publication_date"),
)
"""Of the section ``basic``."""

PARAMETERS = ("epsilon", "delta", "rho")
_PEOPLE = ("basic", "administrative")
_NUMBERS = {"privacy_parameters", "variant_name"}


def entry(found: Mapping[str, Any]) -> str:
    """The entry as YAML, a draft that people complete.

    Args:
        found: of :func:`~lightning_fedleak.report.findings.findings`; ``people`` may hold a table
            for each section, by the names of the schema.

    Raises:
        ValueError: ``people`` names a section or a field that the schema does not have, or a
            value that it does not take.
    """
    spent = [p for fit in found["runs"] for p in fit["privacy"]]
    accounted = _is_accounted(found, spent)
    known: dict[str, dict[str, Any]] = {"basic": _basic(found)}
    if accounted:
        known |= _private(found, spent)
    measured = {section: set(known[section]) for section in known if section not in _PEOPLE}
    known["administrative"] = {
        "notes": found["verdict"]["sentence"],
        "registry_authors": [NOT_RECORDED],
    }
    for section, told in found["people"].items():
        if section not in FIELDS:
            raise ValueError(
                f"report.toml has a table '{section}', which an entry does not; it has: "
                f"{', '.join(FIELDS)}"
            )
        _check(section, told)
        taken = measured.get(section, set()) | (_NUMBERS & set(told))
        if section not in _PEOPLE and taken & set(told):
            raise ValueError(
                f"report.toml: {section}.{', '.join(sorted(taken & set(told)))} comes from the "
                "runs alone; leave it out"
            )
        known.setdefault(section, {}).update(told)
    deployment = {
        section: {name: known[section][name] for name in fields if name in known[section]}
        for section, fields in FIELDS.items()
        if section in known
    }
    slug = re.sub(r"[^a-z0-9]+", "_", str(deployment["basic"]["name"]).lower()).strip("_")
    content = {
        "url_slug": slug or "model",
        "status": "Draft",
        "tier": 3 if accounted else 1,
        "deployment": deployment,
    }
    written: str = yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=100)
    return written


def _is_accounted(found: Mapping[str, Any], spent: Sequence[Mapping[str, Any]]) -> bool:
    """Whether one finite epsilon holds for all runs together, each of them until its end."""
    kinds = {p["class"] for p in spent}
    if len(kinds) != 1 or not kinds <= {"DPSGD", CLIENT, TOKENS}:
        return False
    together = found["privacy_together"]
    composed = len(found["runs"]) == 1 or (
        len(together) == 1 and isinstance(together[0]["epsilon"], int | float)
    )
    every = all(fit["privacy"] for fit in found["runs"])
    return every and composed and all(p["holds"] and p["whole"] for p in spent)


def _check(section: str, told: object) -> None:
    if not isinstance(told, Mapping):
        raise ValueError(f"report.toml: '{section}' must be a table of fields, got {told!r}")
    for name, value in told.items():
        kind = FIELDS[section].get(name)
        if kind is None:
            raise ValueError(
                f"report.toml: '{section}' has no field '{name}'; it has: "
                f"{', '.join(FIELDS[section])}"
            )
        fits = {
            "array": isinstance(value, list) and bool(value) and all(map(_is_text, value)),
            "object": isinstance(value, Mapping) and set(value) <= set(PARAMETERS),
        }.get(kind["type"], _is_text(value))
        if "format" in kind:
            fits = _is_date(value)
        if not fits or ("enum" in kind and value not in kind["enum"]):
            wanted = ", ".join(kind.get("enum", ())) or {
                "array": "a list of strings",
                "object": f"a table of {', '.join(PARAMETERS)}",
            }.get(kind["type"], "a date as 2026-01-31" if "format" in kind else "a string")
            raise ValueError(f"report.toml: {section}.{name} is {value!r}; it takes: {wanted}")


def _is_date(value: object) -> bool:
    try:
        date.fromisoformat(str(value))
    except ValueError:
        return False
    return True


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _basic(found: Mapping[str, Any]) -> dict[str, Any]:
    fits = found["runs"]
    model = next((fit["model"]["class"] for fit in fits if fit["model"]), "language model")
    trained = [fit["shared"]["what"] for fit in fits]
    began = [day for fit in fits if _is_date(day := fit["began"][:10])]
    return {
        "name": f"{model} fine-tuned",
        "data_curators": [NOT_RECORDED],
        "intended_use": NOT_RECORDED,
        "data_product_type": "Machine learning model",
        "data_product_region": NOT_RECORDED,
        "description": f"A {model}. In training was shared: {'; '.join(dict.fromkeys(trained))}."
        if trained
        else f"A {model}.",
        "publication_date": max(began, default=found["made"][:10]),
    }


def _private(
    found: Mapping[str, Any], spent: Sequence[Mapping[str, Any]]
) -> dict[str, dict[str, Any]]:
    """The sections on privacy; all accounts are of one class of defence, and hold."""
    worst = max(spent, key=lambda p: float(p["epsilon"]))
    kind = worst["class"]
    together = next(iter(found["privacy_together"]), None)
    total = together or worst
    # A text that a sampler moves between clients is released by each of them.
    times = max(p["clients"] for p in spent) if kind == TOKENS else 1
    parameters = {
        name: total[name] * (times if name == "epsilon" else 1)
        for name in ("epsilon", "delta")
        if isinstance(total[name], int | float)
    }
    by = "basic composition" if kind == TOKENS else worst["accountant"]
    composed = f"{worst['releases']} releases by {by}. " + (
        f"{together['fits']} fits on the same examples together: epsilon "
        f"{together['epsilon']} at delta {together['delta']}."
        if together
        else "One fit; other uses of the same data are not counted."
    )
    if times > 1:
        composed += f" Times {times}, the clients that a sampler may move a text between."
    versions: Mapping[str, str] = next(
        (fit["versions"] for fit in found["runs"] if fit["versions"]), {}
    )
    named = ", ".join(f"{name} {number}" for name, number in versions.items())
    uncovered = "Leakage logs, validation metrics, the number of steps, the choice of settings, "
    uncovered += "and what gates decided."
    if kind == TOKENS:
        uncovered += " Lengths of texts, special tokens, labels of a classifier."
    if kind == CLIENT:
        uncovered += " What clients send besides their updates."
    guarantees = " ".join(dict.fromkeys(p["guarantee"] for p in spent))
    releases = f"{worst['releases']} releases in training, {_RELEASED.get(kind, 'one each step.')}"
    if worst["correlated"]:
        releases = (
            f"{worst['releases']} accounted mechanisms in training. Noise is correlated over steps "
            f"({worst['correlated']}), and one mechanism covers several."
        )
    return {
        "dp_variant": {
            "variant_name": "Approximate DP" if total["delta"] else "Pure DP",
            "unprotected_quantities": uncovered,
        },
        "privacy_loss": {
            "privacy_unit": _unit(spent),
            "privacy_unit_details": guarantees,
            "privacy_parameters": parameters,
            "privacy_parameters_details": worst["statement"],
        },
        "deployment_model": {
            "model_name": _model_name(worst),
            "model_name_details": f"{worst['trusted']} {guarantees}",
            "actors": f"Clients that train; {found['runs'][0]['shared']['seen_by']}.",
            "release_type": "Many releases",
            "release_type_details": releases,
        },
        "accounting": {"composition": composed},
        "implementation": {"mechanisms": f"{_mechanism(worst)} Versions: {named}."},
    }


_RELEASED = {
    CLIENT: "one each round.",
    TOKENS: "counted for the text that was released most often.",
}


def _unit(spent: Sequence[Mapping[str, Any]]) -> str:
    units = {p["unit"] for p in spent}
    if units == {"client"}:
        return "One client of the federation with all of its data"
    if units == {"user"}:
        return "One user with all of their rows of the training data"
    if units == {"row"}:
        return "One text (a row of a batch) of one client"
    if units <= {"example", "user"}:
        return "One example (a row) of the training data"
    return NOT_RECORDED


def _model_name(spent: Mapping[str, Any]) -> str:
    """Return the registry's name for who is trusted."""
    if spent["class"] == CLIENT:
        return {"central": "Central", "local": "Local"}.get(spent["trust"], "Federated")
    return "Local" if spent["class"] == TOKENS else "Federated"


def _mechanism(spent: Mapping[str, Any]) -> str:
    gaussian = "floating-point noise, not from a cryptographic generator."
    if spent["class"] == TOKENS:
        settings = spent["settings"]
        domain = settings.get("domain", "a public set of ids")
        return (
            f"Token ids are replaced by {settings.get('mechanism', NOT_RECORDED)}, among "
            f"{'all words of the vocabulary' if domain == 'vocabulary' else domain}, with an "
            f"epsilon of {settings.get('epsilon', NOT_RECORDED)} for each "
            f"{'token' if settings.get('per') == 'token' else 'text'}, before training."
        )
    if spent["class"] == CLIENT:
        return f"Gaussian noise on clipped updates of clients ({spent['defense']}); {gaussian}"
    return f"Gaussian noise on clipped gradients ({spent['defense']}); {gaussian}"


__all__ = ["FIELDS", "PARAMETERS", "REQUIRED", "entry"]
