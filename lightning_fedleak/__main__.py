"""``python -m lightning_fedleak`` is ``fedleak``."""

import sys

from lightning_fedleak.cli import main

if __name__ == "__main__":
    sys.exit(main())
