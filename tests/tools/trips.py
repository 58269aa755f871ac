"""How long three ways through this package are: files, functions, moves between files, depth.

::

    python -m tests.tools.trips            # all three
    python -m tests.tools.trips look --functions

- ``look``: one look of FLATCHAT in a plain loop, written to TensorBoard, ``leakage.jsonl`` and
  ``run.jsonl``: from the batch's begin to its end, without the model's own forward and backward.
  It is the third look, so that what only a first one does (a control, say) lies outside.
- ``dpsgd``: one step of DP-SGD without a ledger, a schedule or users.
- ``round``: one round of a federation of one client: its begin, and the look at its update.

A function counts once, where a frame of it starts to run (``sys.setprofile``); only files of the
package do, without ``model/anatomy/`` and ``attacks/``, which any reading of a model and any attack
need. Comprehensions and lambdas are functions of their own in Python 3.11 and part of the function
around them later, so that they do not count. Depth is the largest number of the counted frames on
the stack at once.
"""

import argparse
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import lightning.pytorch as L
import torch
from torch import nn

import lightning_fedleak as fedleak
from lightning_fedleak.federation import RoundObserver
from lightning_fedleak.trainers import Watch
from tests.helpers.lightning_modules import random_token_loader
from tests.helpers.models import tiny_gpt2
from tests.strategies.dpsgd_runs import CausalLM, fit

ROOT = str(Path(fedleak.__file__).parent)
PASSED_OVER = ("model/anatomy/", "attacks/")
STEP = 2
PUBLIC = fedleak.PublicText(
    [[(i * i + 7 * i * j + 3 * j * j) % 90 + 3 for j in range(12)] for i in range(120)]
)
CEILINGS = {"look": (28, 208, 18), "dpsgd": (16, 103, 15), "round": (33, 165, 14)}
"""Most files, functions and depth of each trip."""
_INNER = ("<lambda>", "<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>", "<module>")


@dataclass
class Trip:
    """The functions of the package that run while it is on.

    Attributes:
        functions: by file and qualified name, how often each was called.
        moves: calls from one file of the package into another one, and returns from it.
        depth: largest number of frames of the package on the stack.
    """

    functions: dict[tuple[str, str], int] = field(default_factory=dict)
    moves: int = 0
    depth: int = 0
    _stack: list[str] = field(default_factory=list)

    @property
    def files(self) -> list[str]:
        return sorted({file for file, _ in self.functions})

    def on(self) -> None:
        self._stack = []
        sys.setprofile(self._profile)

    def off(self) -> None:
        sys.setprofile(None)

    def _profile(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if not code.co_filename.startswith(ROOT) or code.co_name in _INNER:
            return
        file = code.co_filename[len(ROOT) + 1 :]
        if file.startswith(PASSED_OVER):
            return
        if event == "call":
            key = (file, code.co_qualname)
            self.functions[key] = self.functions.get(key, 0) + 1
            self.moves += bool(self._stack) and self._stack[-1] != file
            self._stack.append(file)
            self.depth = max(self.depth, len(self._stack))
        elif event == "return" and self._stack:
            self._stack.pop()
            self.moves += bool(self._stack) and self._stack[-1] != file


def untied() -> nn.Module:
    return tiny_gpt2(tied=False, dropout=0.0, seed=3).train()


def trip_of_look(folder: Path) -> Trip:
    """Return the trip of one look of FLATCHAT."""
    torch.manual_seed(0)
    model, trip = untied(), Trip()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    attack = fedleak.FlatChat(PUBLIC, n_types="predicted")
    batches = [*random_token_loader(16, length=10, vocab=96, seed=3)]
    with Watch(model, optimizer, [attack], folder=folder, every_n_steps=1) as watch:
        for number, batch in enumerate(batches):
            context = watch.step(batch)
            measured = number == STEP
            if measured:
                trip.on()
            context.__enter__()
            trip.off()
            loss = model(**batch).loss
            loss.backward()
            if measured:
                trip.on()
            optimizer.step()
            trip.off()
            optimizer.zero_grad()
            if measured:
                trip.on()
            context.__exit__(None, None, None)
            trip.off()
    assert watch.engine.results.looks == len(batches)
    return trip


class _Between(L.Callback):
    """Measure one step of a Trainer."""

    def __init__(self, trip: Trip) -> None:
        self.trip = trip

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == STEP:
            self.trip.on()

    def on_train_batch_end(self, *_: Any) -> None:
        self.trip.off()


def trip_of_dpsgd(folder: Path) -> Trip:
    """Return the trip of one step of DP-SGD, without a monitor."""
    trip = Trip()
    defense = fedleak.DPSGD(0.9, noise_multiplier=0.5, seed=1)
    data, callbacks = random_token_loader(40, length=10), [_Between(trip)]
    fit(defense, CausalLM(untied()), data=data, callbacks=callbacks, max_steps=STEP + 2)
    trip.off()
    return trip


def trip_of_round(folder: Path) -> Trip:
    """Return the trip of one round of a federation of one client."""
    torch.manual_seed(0)
    model, trip = untied(), Trip()
    attack = fedleak.FlatChat(PUBLIC, n_types="predicted")
    optimizer = partial(torch.optim.SGD, lr=0.05)
    observer = RoundObserver(untied(), optimizer, 1, attacks=[attack], folder=folder)
    for number, batch in enumerate(random_token_loader(16, length=10, vocab=96, seed=3)):
        sent = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        if number == STEP:
            trip.on()
        observer.begin(number, sent)
        trip.off()
        stepped = optimizer(model.parameters())
        stepped.zero_grad()
        model(**batch).loss.backward()
        stepped.step()
        returned = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        if number == STEP:
            trip.on()
        observer.look(returned, 0, batches=[batch])
        trip.off()
    observer.end()
    return trip


TRIPS: dict[str, Callable[[Path], Trip]] = {
    "look": trip_of_look,
    "dpsgd": trip_of_dpsgd,
    "round": trip_of_round,
}


def main() -> None:
    """Print the trips."""
    parse = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parse.add_argument("trips", nargs="*", metavar="TRIP", help=", ".join(TRIPS))
    parse.add_argument("--functions", action="store_true", help="list each function")
    options = parse.parse_args()
    for name in options.trips or TRIPS:
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trip = TRIPS[name](Path(folder))
        print(
            f"{name}: {len(trip.files)} files, {len(trip.functions)} functions, "
            f"{trip.moves} moves, depth {trip.depth}"
        )
        if options.functions:
            for (file, function), calls in sorted(trip.functions.items()):
                print(f"  {calls:4d} {file} {function}")


if __name__ == "__main__":
    main()
