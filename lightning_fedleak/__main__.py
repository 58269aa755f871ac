"""Run the command ``fedleak`` as ``python -m lightning_fedleak``."""

import sys

from lightning_fedleak.cli import main

if __name__ == "__main__":
    sys.exit(main())
