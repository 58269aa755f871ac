"""examples/defended_ddp.py on one of two processes, as torchrun would start it, on short texts."""

from __future__ import annotations

import contextlib
import io
import json
import os
import runpy
import sys
from functools import partialmethod
from pathlib import Path
from unittest.mock import patch

from lightning_fedleak.attacks.words import aligned_readout
from lightning_fedleak.cli.finetuning import TextDataModule

if __name__ == "__main__":
    folder, rank = Path(sys.argv[1]), sys.argv[2]
    example = Path("examples/defended_ddp.py").absolute()
    os.chdir(folder)
    shorter = partialmethod(TextDataModule.__init__, length=32)
    printed = io.StringIO()
    with (
        patch.object(TextDataModule, "__init__", shorter),
        patch.object(aligned_readout, "_REPEATS", 2),
        contextlib.redirect_stdout(printed),
    ):
        runpy.run_path(str(example), run_name="__main__")
    (folder / f"{rank}.json").write_text(json.dumps({"printed": printed.getvalue()}))
