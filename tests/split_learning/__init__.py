"""Tests of the example of split learning, whose package lies beside its script."""

import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "split_learning"
sys.path.insert(0, str(EXAMPLE))
