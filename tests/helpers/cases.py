"""Cases that each of two processes runs, and what each process found."""

import json
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.helpers.processes import Found

Case = Callable[[Path], dict[str, Any]]


class Cases(dict[str, Case]):
    """The cases of a module by name, in the order in which they run."""

    def named(self, name: str) -> Callable[[Case], Case]:
        """Return a decorator of a case."""
        return lambda function: self.setdefault(name, function)

    def run(self) -> None:
        """Write what each finds to ``<folder>/<rank>.json``, and end the process.

        Each gets a folder of its own in that one, the same on both ranks. ``FEDLEAK_CASES`` names
        the only case that runs.
        """
        folder, rank = Path(sys.argv[1]), sys.argv[2]
        torch.set_num_threads(1)
        warnings.simplefilter("ignore")
        logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
        results: Found = {}
        only = os.environ.get("FEDLEAK_CASES")
        for name, case in self.items() if only is None else [(only, self[only])]:
            place = folder / name.replace(" ", "-")
            place.mkdir(exist_ok=True)
            try:
                results[name] = case(place)
            except Exception:
                # Go no further: the other rank may be waiting in the middle of this case.
                results[name] = {"error": traceback.format_exc()}
                break
        (folder / f"{rank}.json").write_text(json.dumps(results))
        sys.stdout.flush()
        os._exit(0)


def gathered(value: Any) -> list[Any]:
    """Return the values of both ranks."""
    found: list[Any] = [None, None]
    dist.all_gather_object(found, value)
    return found


def of(ranks: list[Found], name: str) -> list[dict[str, Any]]:
    """Return one case on both ranks; fails with the traceback of the case that stopped a worker."""
    for found in ranks:
        if name not in found or "error" in found[name]:
            errors = [one["error"] for one in found.values() if "error" in one]
            pytest.fail("\n".join(errors) or f"{name} did not run")
    return [found[name] for found in ranks]
