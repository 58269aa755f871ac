"""Scripts that print the figures the docs claim.

They import each other by their bare names, as they do where one is run by its path.
"""

import sys
from pathlib import Path

if (_here := str(Path(__file__).parent)) not in sys.path:
    sys.path.append(_here)
