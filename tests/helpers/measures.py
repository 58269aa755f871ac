"""What cells measure in tests; imported by their processes, so it imports nothing large."""

import math
import os
from collections.abc import Mapping
from typing import Any


def squared(*, value: int, models: Mapping[str, str]) -> list[dict[str, Any]]:
    """One row; 3 raises, 4 ends its process."""
    if value == 3:
        raise ArithmeticError("three")
    if value == 4:
        os._exit(7)
    return [{"square": value * value, "none": math.nan}]
