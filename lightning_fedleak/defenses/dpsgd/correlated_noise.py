"""Noise of a matrix mechanism, step by step, and what of it outlives a process.

A release gets ``sigma C (C^-1 Z)_t`` instead of ``sigma C Z_t`` (:mod:`~.factorization`).

- ``"banded"``: ``(C^-1 Z)_t = (Z_t - sum_j C[t, t - j] (C^-1 Z)_(t - j)) / C[t, t]``, j from 1 to
  ``bands - 1`` (arXiv 2306.08153, Algorithm 9): the noise of so many steps is kept, each as large
  as what is trained. The examples are split into ``bands`` groups once. Step t draws a Poisson
  sample from group t modulo ``bands``. So an example takes part at most every ``bands``-th step,
  where columns of C share no row, and n steps are ``ceil(n / bands)`` Poisson-sampled Gaussian
  mechanisms for it (Theorem 4 there).
- ``"banded_inverse"``: ``(C^-1 Z)_t = sum_j C^-1[t, t - j] Z_(t - j)``: the last draws are made
  again from their keys, nothing is kept. Batches are the same in every epoch, in one order. All
  steps are one Gaussian mechanism of the sensitivity of C, and sampling amplifies nothing.

Which group an example is in follows from its place in the dataset. So neighbours differ by an
example that is there or whose place is empty, as everywhere in this package. Places that change
within a fit are refused. A run that resumes with others begins a new mechanism.

**Which steps an example may be in follows from its place.** One that moves in the middle of a
mechanism takes part more often than is accounted, so where examples stand is watched.

**The noise of past steps is a secret.** Whoever has it can take it off. It is in no checkpoint, but
in a file of its own beside it, which this user alone may read. Two runs that go on from one noise
would both reveal what each of them hides. So there is one file at most. It is named by a digest of
the last release, which all checkpoints since then hold, and who makes the next release deletes it
first. Only one can: a run that finds it gone is refused, and one that resumes without it begins a
new mechanism, whose cost is added to that of the first.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import safetensors
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset

from lightning_fedleak.defenses.base import DefenseError, State
from lightning_fedleak.defenses.dpsgd.factorization import (
    Factorization,
    banded,
    banded_inverse,
)
from lightning_fedleak.defenses.dpsgd.poisson import origins
from lightning_fedleak.defenses.noise import add_standard_normal, noise_key, standard_normal
from lightning_fedleak.model_state import preserve_process
from lightning_fedleak.private_files import check_private, hash_tensors

Mechanism = Literal["independent", "banded", "banded_inverse"]
Key = Callable[[bytes, int, int], bytes]
"""The key of a draw, by secret base, release, and number of the parameter."""
READ = 16
"""Examples by whose contents it is seen whether a dataset is in the same order."""


# ---- where examples stand -------------------------------------------------------------------


@dataclass(frozen=True)
class Places:
    """Digests of what stands where. Of the data, so they are for this user's eyes only.

    Attributes:
        order: of this process's places, the users' keys and rows, and the indices of Subset and
            ConcatDataset.
        contents: of each field of a few examples that is alike in two readings. What is drawn anew
            (augmentation) tells no order.
    """

    order: str
    contents: dict[str, str]

    def differ(self, other: Places) -> bool:
        """Whether examples are seen to stand elsewhere."""
        both_tell = self.contents.keys() & other.contents.keys()
        return self.order != other.order or any(
            self.contents[field] != other.contents[field] for field in both_tell
        )


def places_of(
    dataset: Any, shard: range, users: Mapping[Any, Sequence[int]] | None = None
) -> Places:
    """What is seen of them. The global generators are left as they were.

    Args:
        dataset: map-style.
        shard: places of this process, or numbers of its users.
        users: the rows of each, by key.
    """
    order = hashlib.sha256(f"{shard!r} {len(dataset)}".encode())
    for key, rows in (users or {}).items():
        order.update(f"\0{[*plain(key)]!r} {[*rows]!r}".encode())
    if isinstance(dataset, Subset | ConcatDataset):
        sources, places = origins(dataset)
        _, first, number = np.unique(sources, return_index=True, return_inverse=True)
        # Identities are others in the next process: a source is numbered by where it is met first.
        order.update(np.stack((first[number], places)).astype("<i8").tobytes())
    last = len(dataset) - 1
    chosen = sorted({last * i // (READ - 1) for i in range(READ)})
    with preserve_process():
        once, again = (_contents(dataset, chosen) for _ in range(2))
    return Places(order.hexdigest(), {f: d for f, d in once.items() if again.get(f) == d})


def plain(value: Any) -> Iterator[str]:
    """The numbers and words in an example."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield repr(key)
            yield from plain(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from plain(item)
    elif hasattr(value, "tolist"):
        yield repr(value.tolist())
    elif hasattr(value, "tobytes"):  # an image
        yield repr(value.tobytes())
    elif isinstance(value, str | bytes | int | float):
        yield repr(value)


def _contents(dataset: Any, chosen: Sequence[int]) -> dict[str, str]:
    found: dict[str, Any] = {}
    for place in chosen:
        for field, text in _fields(dataset[place]):
            digest = found.setdefault(field, hashlib.sha256())
            digest.update(f"\0{place} {text}".encode())
    return {field: digest.hexdigest() for field, digest in found.items()}


def _fields(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    items: Any = ()
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, list | tuple) and not all(isinstance(v, int | float) for v in value):
        items = enumerate(value)
    else:
        yield name, "\0".join(plain(value))
    for key, item in items:
        yield from _fields(item, f"{name}/{key}")


# ---- the noise ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Plan:
    """What a matrix mechanism was made for; none of it may change.

    Attributes:
        mechanism: which.
        bands: of C, or of its inverse.
        steps: releases.
        groups: into which the examples are split; one of them is drawn from in a step.
        examples: of all clients.
    """

    mechanism: Mechanism
    bands: int
    steps: int
    groups: int
    examples: int

    @property
    def matrices(self) -> Factorization:
        """How noise is correlated."""
        if self.mechanism == "banded":
            return banded(self.steps, self.bands)
        return banded_inverse(self.steps, self.bands, self.groups)

    @property
    def period(self) -> int:
        """Releases that are accounted as one."""
        return self.bands if self.mechanism == "banded" else self.steps

    @property
    def rounds(self) -> int:
        """How often that is: mechanisms that are composed."""
        return -(-self.steps // self.period)

    def check_same(self, other: Plan) -> None:
        """Refuses another plan.

        Raises:
            DefenseError: says what differs.
        """
        for name, what in (
            ("mechanism", "mechanism"),
            ("bands", "bands"),
            ("steps", "number of steps"),
            ("groups", "number of groups of examples"),
            ("examples", "number of examples"),
        ):
            before, now = getattr(self, name), getattr(other, name)
            if before != now:
                raise DefenseError(
                    f"DPSGD: the {what} was {before} when the noise was planned, and is {now} now. "
                    "Correlated noise holds for the plan that it was made for: go on with the "
                    "Trainer's max_epochs or max_steps, loader, data and settings of then, or "
                    "begin a new run."
                )


class StepNoise:
    """The noise of a run's releases, one after the other.

    Args:
        mechanism: how they are correlated.
        bands: of it.

    Attributes:
        plan: of the fit; None where noise is independent, or before the training data are known.
        row: number of the next release in its mechanism.
        name: digest of the last release, alike on all processes of a client and in checkpoints;
            empty before the first.
    """

    def __init__(self, mechanism: Mechanism, bands: int | None) -> None:
        self.mechanism: Mechanism = mechanism
        self.bands = bands or 1
        self.plan: Plan | None = None
        self.row = 0
        self.name = ""
        self._kept: deque[dict[int, Tensor]] = deque(maxlen=max(1, self.bands - 1))
        self._current: dict[int, Tensor] = {}
        self._draws: deque[tuple[bytes, int]] = deque(maxlen=self.bands)
        self._whole = True
        self._loaded = False
        self._saved: Plan | None = None
        self._saved_row = 0
        self._device = ""
        self._file: Path | None = None
        self._places: Places | None = None
        self._saved_places: Places | None = None

    # ---- a fit ------------------------------------------------------------------------------

    def begin_fit(self) -> None:
        """A fit begins: with what was loaded for it, or anew."""
        self.plan = self._places = None
        if not self._loaded:
            self.forget()

    def end_fit(self) -> None:
        """A fit has ended. Its last noise stays in the file beside its last checkpoint alone."""
        self.forget()
        self.plan = self._saved = self._places = None

    def forget(self) -> None:
        """What follows is a new mechanism."""
        self.row, self._whole, self._loaded = 0, True, False
        self.name, self._file, self._saved_places = "", None, None
        self._kept.clear()
        self._draws.clear()

    def settle(self, plan: Plan, places: Places | None) -> None:
        """The training data are known.

        Raises:
            DefenseError: the mechanism that goes on was planned otherwise, or examples stand at
                other places than before in this fit.
        """
        for before in (self._saved, self.plan):
            if before is not None:
                before.check_same(plan)
        if not self.row or self._places is None or places is None:
            self._places = places
        elif self._places.differ(places):
            raise DefenseError(
                "DPSGD: the training data were made anew within the fit, and examples stand at "
                "other places. With correlated noise the steps that an example may be in follow "
                "from its place, so it would take part more often than is accounted. Nothing more "
                "was released. Split and shuffle the dataset once, before the fit or by a fixed "
                "seed, or leave reload_dataloaders_every_n_epochs out."
            )
        self.plan = plan

    @property
    def is_moved(self) -> bool:
        """Whether examples stand elsewhere than when the noise was written that was loaded."""
        before, now = self._saved_places, self._places
        return before is not None and now is not None and now.differ(before)

    # ---- a release --------------------------------------------------------------------------

    @property
    def scale(self) -> float:
        """Standard deviation of the next release's noise, over that of independent noise."""
        if self.mechanism == "independent":
            return 1.0
        matrices = self._planned.matrices
        row = min(self.row, self._planned.steps - 1)
        return float(matrices.noise_norms[row]) * matrices.sensitivity

    @property
    def is_accounted(self) -> bool:
        """Whether the next release is the first of those that are accounted together."""
        return self.mechanism == "independent" or self.row % self._planned.period == 0

    @property
    def is_lost(self) -> bool:
        """Whether the next release begins a mechanism anew, although one was not at its end."""
        ended = self._saved is not None and self._saved_row >= self._saved.steps
        return self.mechanism != "independent" and not self.row and not ended

    def check_planned(self) -> None:
        """Refuses a release beyond the plan.

        Raises:
            DefenseError: says how many there may be.
        """
        if self.mechanism != "independent" and self.row >= self._planned.steps:
            raise DefenseError(
                f"DPSGD: the noise was planned for {self._planned.steps} steps, and all were "
                "made. Nothing more was released: let max_epochs or max_steps of the Trainer be "
                "all steps that the run is going to take."
            )

    def begin(self, base: bytes, release: int) -> None:
        """A release is about to be made: what was written of the noise so far is deleted.

        Args:
            base: secret that this release's draw follows from.
            release: its number in the run.

        Raises:
            DefenseError: the file cannot be deleted, or is gone.
        """
        if self._file is not None and not self._delete():
            raise DefenseError(
                f"DPSGD: '{self._file}' is gone. Another run has gone on with the noise of the "
                "last release, which must not be used twice, or the file was moved or deleted. "
                "Nothing more was released. Resume from the last checkpoint: a new mechanism "
                "begins then, whose cost is added. Let one run go on from a checkpoint, after the "
                "one that wrote it has ended."
            )
        self._file = None
        if self.mechanism != "independent":
            self.name = noise_key(base, 0, release, 0, "correlated", "name")[:16].hex()
        self._draws.appendleft((base, release))
        self._current, self._whole = {}, False

    def add(self, number: int, onto: Tensor, scale: float, key: Key) -> None:
        """Adds ``scale`` times what :meth:`draw` gives, in place.

        Raises:
            DefenseError: as there.
        """
        if self.mechanism == "independent":
            base, release = self._draws[0]
            add_standard_normal(key(base, release, number), onto, scale)
        else:
            onto.add_(self.draw(number, onto, key), alpha=scale)

    def draw(self, number: int, like: Tensor, key: Key) -> Tensor:
        """The noise on one parameter, over the standard deviation of independent noise.

        Args:
            number: of the parameter, and of this process's shard of it.
            like: of what it is added to.
            key: of a draw.

        Returns:
            Of the form of ``like``; must not be written to.

        Raises:
            DefenseError: it was not trained in the steps before, or had another shape.
        """

        def drawn(back: int) -> Tensor:
            base, release = self._draws[back]
            own = key(base, release, number)
            return standard_normal(own, like.shape, like.device, like.dtype)

        self._device = like.device.type
        total = drawn(0)
        if self.mechanism == "independent":
            return total
        matrices = self._planned.matrices
        weights = matrices.rows[self.row].tolist()
        if self.mechanism == "banded_inverse":
            for back in range(1, len(self._draws)):
                total.add_(drawn(back), alpha=weights[back])
            return total.mul_(matrices.sensitivity)
        for back, kept in enumerate(self._kept, 1):
            before = kept.get(number)
            if before is None or before.shape != total.shape:
                raise DefenseError(
                    f"DPSGD: a parameter of shape {tuple(like.shape)} was not trained in the step "
                    "before, or had another shape. With mechanism='banded' the noise of a step "
                    "follows from that of those before: train the same parameters in all steps."
                )
            total.add_(before.to(total.device), alpha=-weights[back])
        total.div_(weights[0])
        if len(self._kept) == self.bands - 1 and self._kept:
            del self._kept[-1][number]  # its last use; so no more is kept than was
        self._current[number] = total
        return total

    def end(self) -> None:
        """The release was made."""
        if self.mechanism == "banded" and self.bands > 1:
            self._kept.appendleft(self._current)
        self.row, self._current, self._whole = self.row + 1, {}, True

    def _delete(self) -> bool:
        """Deletes the file; False where it is not there. Of several runs it is True in one."""
        assert self._file is not None
        try:
            self._file.unlink()
            _sync(self._file.parent)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise DefenseError(
                f"DPSGD: '{self._file}' cannot be deleted ({error}). It holds the noise of the "
                "last release, which must not be used twice: nothing more was released."
            ) from error
        return True

    @property
    def _planned(self) -> Plan:
        if self.plan is None:
            raise DefenseError("DPSGD: no training data yet, so no noise is planned")
        return self.plan

    # ---- between processes ------------------------------------------------------------------

    def state_dict(self) -> dict[str, Tensor | int | float | str]:
        """What may be seen by all: what the mechanism was planned for, and how far it has come."""
        if self.mechanism == "independent":
            return {}
        state: dict[str, Tensor | int | float | str] = {
            "mechanism": self.mechanism,
            "bands": self.bands,
            "row": self.row,
            "noise": self.name,
        }
        if self.plan is not None:
            state.update({f"planned_{name}": getattr(self.plan, name) for name in _PLANNED})
        return state

    def load_state_dict(self, state: State) -> None:
        """Begins anew, and remembers what was planned; :meth:`load` may then go on.

        Raises:
            DefenseError: the releases were made by another mechanism.
        """
        self.forget()
        before = str(state.get("mechanism", "independent")), int(state.get("bands", 1))
        if before != (self.mechanism, self.bands):
            raise DefenseError(
                f"DPSGD: the checkpoint's releases were made with mechanism={before[0]!r} and "
                f"bands={before[1]}, and this run has mechanism={self.mechanism!r} and "
                f"bands={self.bands}. Go on with those, or begin a new run."
            )
        self._saved, self._saved_row = None, int(state.get("row", 0))
        self.name = str(state.get("noise", ""))
        if "planned_steps" in state:
            numbers = {name: int(state[f"planned_{name}"]) for name in _PLANNED}
            self._saved = Plan(self.mechanism, self.bands, **numbers)
            if self.plan is not None:
                self._saved.check_same(self.plan)

    def save(self, path: Path, releases: int) -> None:
        """Writes what the next draws need, for this user's eyes only; nothing where none will come.

        Where it is written already it stays, or in another folder is deleted first.

        Args:
            path: of the file.
            releases: of the run.

        Raises:
            DefenseError: it cannot be written.
        """
        _delete_unfinished(path.parent)
        if self.plan is None or not 0 < self.row < self.plan.steps or not self._whole:
            return
        if self._file == path or (self._file is not None and not self._delete()):
            return  # where another run has it, the next release says so
        self._file = None
        tensors = {
            f"{back} {number}": tensor
            for back, kept in enumerate(self._kept)
            for number, tensor in kept.items()
        }
        if self.mechanism == "banded_inverse":
            tensors["bases"] = torch.tensor([[*base] for base, _ in self._draws], dtype=torch.uint8)
            tensors["releases"] = torch.tensor([release for _, release in self._draws])
        told = _told(self.plan, self.row, self.name, releases, self._device)
        told["sha256"] = hash_tensors(tensors)
        if self._places is not None:
            told["places"] = json.dumps(vars(self._places))
        draft = path.with_name(f"{path.name}.{os.getpid()}.unfinished")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            os.close(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
            save_file(tensors, draft, metadata=told)
            os.chmod(draft, 0o600)
            os.replace(draft, path)
            _sync(path.parent)
        except OSError as error:
            draft.unlink(missing_ok=True)
            raise DefenseError(
                f"DPSGD: the noise that the next steps need cannot be written to '{path}' "
                f"({error}). Save checkpoints in a folder that may be written and has room."
            ) from error
        self._file = path

    def load(self, path: Path, releases: int, device: str) -> bool:
        """Goes on with the noise of the last release, if the file holds it.

        Args:
            path: of the file.
            releases: that the checkpoint has counted.
            device: the kind on which noise is drawn now. Others draw otherwise.

        Returns:
            Whether it does: after a kill, without the file, or with one that is damaged or that
            somebody else could have written, a new mechanism begins.
        """
        try:
            check_private(path)
            with safetensors.safe_open(path, "pt") as file:
                told = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (OSError, ValueError, safetensors.SafetensorError):
            return False
        places, digest = told.pop("places", None), told.pop("sha256", None)
        if (
            digest != hash_tensors(tensors)
            or self._saved is None
            or told != _told(self._saved, self._saved_row, self.name, releases, device)
        ):
            return False
        self.row, self._loaded, self._file = self._saved_row, True, path
        self._saved_places = None if places is None else Places(**json.loads(places))
        if "bases" in tensors:
            bases, numbers = tensors["bases"].tolist(), tensors["releases"].tolist()
            self._draws.extend(zip(map(bytes, bases), numbers, strict=True))
            return True
        for name, tensor in tensors.items():
            back, number = map(int, name.split(" "))
            while len(self._kept) <= back:
                self._kept.append({})
            self._kept[back][number] = tensor
        return True


HOUR = 3600.0
_PLANNED = ("steps", "groups", "examples")


def _told(plan: Plan, row: int, name: str, releases: int, device: str) -> dict[str, str]:
    """What must be the same where noise goes on."""
    others = {"row": row, "noise": name, "releases": releases, "device": device}
    others["torch"] = torch.__version__
    return {name: str(value) for name, value in {**vars(plan), **others}.items()}


def _delete_unfinished(folder: Path) -> None:
    """What a kill has left of writing; a run beside this one may still write the newest."""
    for draft in folder.glob("secret*.unfinished"):
        try:
            if time.time() - draft.stat().st_mtime > HOUR:
                draft.unlink()
        except OSError:  # another run was faster, or the file is another user's
            continue


def _sync(folder: Path) -> None:
    """Makes a new or deleted name last; nothing where folders cannot be opened (Windows)."""
    if hasattr(os, "O_DIRECTORY"):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


__all__ = ["Mechanism", "Places", "Plan", "StepNoise", "places_of", "plain"]
