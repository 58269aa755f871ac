"""Prints pip's constraints that hold what the extras named need to its lower bound.

    python tests/tools/lowest_versions.py test datasets

    python tests/tools/lowest_versions.py --names test datasets    # without any bound

``make test-lowest`` installs with them, ``make test-newest`` by the names. What those packages need
in turn is left to pip. Only torch stays as constraints.txt has it: its builds for CPUs are not on
every package index. So the oldest torch that is allowed is not tested.
"""

import re
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
_NEEDS = re.compile(r"([A-Za-z0-9._-]+)(?:\[[^]]*\])?>=([0-9.]+)")


def lowest(pyproject: Mapping[str, Any], extras: Sequence[str], tested: str) -> list[str]:
    """Constraints for pip, by name.

    Args:
        pyproject: the contents of a pyproject.toml.
        extras: those to install; what the package always needs is in any case.
        tested: the contents of a constraints.txt, for torch.

    Raises:
        ValueError: a requirement has no lower bound, or two of one package differ.
    """
    bounds: dict[str, str] = {}
    for need in _needs(pyproject["project"], extras):
        found = _NEEDS.fullmatch(need)
        if found is None:
            raise ValueError(f"'{need}' in pyproject.toml must be spelled name>=version.")
        name, bound = found.groups()
        if bounds.setdefault(name, bound) != bound:
            raise ValueError(f"'{name}' has two lower bounds, {bounds[name]} and {bound}.")
    [torch] = [line for line in tested.splitlines() if line.startswith("torch==")]
    del bounds["torch"]
    return sorted([torch, *(f"{name}=={bound}" for name, bound in bounds.items())])


def names(pyproject: Mapping[str, Any], extras: Sequence[str]) -> list[str]:
    """What the extras named need, without any bound."""
    return sorted({re.split("[<>=!~ ]", need)[0] for need in _needs(pyproject["project"], extras)})


def _needs(project: Mapping[str, Any], extras: Sequence[str]) -> Iterator[str]:
    yield from project["dependencies"]
    for extra in extras:
        for need in project["optional-dependencies"][extra]:
            own = re.fullmatch(rf"{project['name']}\[(.*)\]", need)
            yield from _needs(project, own[1].split(",")) if own else [need]


def main(extras: Sequence[str]) -> None:
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    if extras[:1] == ["--names"]:
        sys.stdout.write("\n".join(names(pyproject, extras[1:])) + "\n")
        return
    pins = lowest(pyproject, extras, (ROOT / "constraints.txt").read_text())
    sys.stdout.write("\n".join(pins) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
