"""Prints pip's constraints that hold every package pyproject.toml names to its lower bound.

``make test-lowest`` installs with them. What those packages need in turn is left to pip. Only torch
stays as constraints.txt has it: its builds for CPUs are not on every package index. So the oldest
torch that is allowed is not tested.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
_NEEDS = re.compile(r"([A-Za-z0-9._-]+)(?:\[[^]]*\])?>=([0-9.]+)")


def lowest(pyproject: Mapping[str, Any], tested: str) -> list[str]:
    """Constraints for pip, by name.

    Args:
        pyproject: the contents of a pyproject.toml.
        tested: the contents of a constraints.txt, for torch.

    Raises:
        ValueError: a requirement has no lower bound, or two of one package differ.
    """
    project = pyproject["project"]
    bounds: dict[str, str] = {}
    for need in [*project["dependencies"], *chain(*project["optional-dependencies"].values())]:
        if need.startswith(f"{project['name']}["):
            continue
        found = _NEEDS.fullmatch(need)
        if found is None:
            raise ValueError(f"'{need}' in pyproject.toml must be spelled name>=version.")
        name, bound = found.groups()
        if bounds.setdefault(name, bound) != bound:
            raise ValueError(f"'{name}' has two lower bounds, {bounds[name]} and {bound}.")
    [torch] = [line for line in tested.splitlines() if line.startswith("torch==")]
    del bounds["torch"]
    return sorted([torch, *(f"{name}=={bound}" for name, bound in bounds.items())])


if __name__ == "__main__":
    pins = lowest(
        tomllib.loads((ROOT / "pyproject.toml").read_text()), (ROOT / "constraints.txt").read_text()
    )
    sys.stdout.write("\n".join(pins) + "\n")
