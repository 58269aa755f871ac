"""What only people know of a run: the tables of ``report.toml``, and which names they may have."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping

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
