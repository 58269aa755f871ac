"""Which files of this package one training step enters, in the order in which it first does.

::

    python -m tests.tools.files_entered                      # a look of words, no defence
    python -m tests.tools.files_entered --look membership
    python -m tests.tools.files_entered --dpsgd              # a step under DP-SGD, no monitor
    python -m tests.tools.files_entered --dpsgd --look words

A file is entered where a function, method, property, generator, lambda or comprehension that is
written in it starts to run (``sys.setprofile``, in this thread and in those that start meanwhile).
What runs when a module is imported, what a decorator or a dataclass writes by itself, and calls
into C do not count.

The step begins before the first callback's ``on_train_batch_start`` and ends after the last
callback's ``on_train_batch_end``: drawing the batch, moving it to its device, and what happens
once in a fit lie outside. It is the third step of a fit, so that what only a first step does lies
outside too; with ``--look`` it is one that is looked at, without it there is no monitor. The
user's module takes the loss that the model gives; under DP-SGD it takes ``mean_of_sample_means``,
as DP-SGD asks for, whose file counts.

Not listed: ``model/anatomy/`` and ``attacks/`` (what any reading of a model and any attack needs),
and ``cli/finetuning/``, the user's side.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import lightning.pytorch as L
from torch import Tensor

import lightning_fedleak as fedleak
from tests.tools import seeded_runs as runs

ROOT = Path(fedleak.__file__).parent
LEFT_OUT = ("model/anatomy/", "attacks/", "cli/finetuning/")
STEP = 2
LOOKS = {
    "words": lambda: [
        fedleak.AlignedFlatChat(runs.public(), calibration_tokens=400, lengths=(8,)),
        fedleak.FlatChat(runs.public()),
    ],
    "membership": lambda: [fedleak.FCMembership(1)],
    "texts": lambda: [fedleak.PrefixInversion(1, None, language_model=False)],
}


class _Files:
    """The files of the package that are entered while it is on."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._seen: set[str] = set()

    def on(self) -> None:
        threading.setprofile(self._entered)
        sys.setprofile(self._entered)

    def off(self) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    def _entered(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or code.co_name == "<module>" or code.co_filename in self._seen:
            return
        self._seen.add(code.co_filename)
        path = Path(code.co_filename)
        if path.is_relative_to(ROOT):
            name = path.relative_to(ROOT).as_posix()
            if not name.startswith(LEFT_OUT):
                self.names.append(name)


class _Plain(runs.Module):
    """Trains on the loss that the model gives."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        self.log("train_loss", loss)
        return loss


class _Begins(L.Callback):
    def __init__(self, files: _Files) -> None:
        self.files = files

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == STEP:
            self.files.on()


class _Ends(L.Callback):
    def __init__(self, files: _Files) -> None:
        self.files = files

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == STEP + 1:
            self.files.off()


def files_of_step(look: str | None, *, dpsgd: bool = False) -> list[str]:
    """Paths below the package, in the order of first entry.

    Args:
        look: which family of attacks looks at the step: a key of ``LOOKS``; None for no monitor.
        dpsgd: whether the run is under DPSGD.
    """
    files = _Files()
    watch = [] if look is None else [runs.monitor(LOOKS[look](), every_n_steps=1)]
    defenses, module = (runs.dpsgd, runs.Module) if dpsgd else (list, _Plain)
    run = runs.Run(list, defenses, runs.untied, module=module)
    with tempfile.TemporaryDirectory() as folder:
        try:
            runs.fit(
                run,
                Path(folder),
                callbacks=[_Begins(files), *watch, _Ends(files)],
                max_steps=STEP + 2,
            )
        finally:
            files.off()
    return files.names


def files_of_look(look: str = "words", *, dpsgd: bool = False) -> list[str]:
    """Of a step that is looked at; of words by AlignedFlatChat and FlatChat, without a defence."""
    return files_of_step(look, dpsgd=dpsgd)


def files_of_dpsgd_step() -> list[str]:
    """Of a step under DPSGD that is not looked at."""
    return files_of_step(None, dpsgd=True)


def main() -> None:
    """Prints the files and how many they are."""
    parse = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parse.add_argument("--look", choices=sorted(LOOKS))
    parse.add_argument("--dpsgd", action="store_true")
    options = parse.parse_args()
    look = options.look or (None if options.dpsgd else "words")
    names = files_of_step(look, dpsgd=options.dpsgd)
    print("\n".join(names))
    print(f"{len(names)} files")


if __name__ == "__main__":
    main()
