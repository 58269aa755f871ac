"""Noise that is correlated over steps or rounds (matrix mechanisms), and its file.

With gradients G, one row for each step, DP-SGD applies the running sums ``A G``, A
lower-triangular of ones. A matrix mechanism releases ``G + C^-1 Z``, Z independent noise. That is
``C G + Z`` after post-processing, so it is as private as Gaussian noise on C G (Denisov et al.
2022). The noise in the running sums is ``A C^-1 Z``: its variances, for Z of variance 1, are the
squared norms of the rows of ``A C^-1``.

This is BandMF (Choquette-Choo et al. 2023, arXiv 2306.08153). C is banded, with columns of norm 1,
and a Toeplitz matrix before they are normalised, of the least mean error: at 1,000 steps and up to
32 bands within .5% of the best of all (McKenna 2025, arXiv 2405.15913), for some tens of steps
within 1.5%. ``(C^-1 Z)_t = (Z_t - sum_j C[t, t - j] (C^-1 Z)_(t - j)) / C[t, t]``, j from 1 to
``bands - 1`` (Algorithm 9): the noise of so many steps stays in memory, each as large as what is
trained. The examples are split into ``bands`` groups once. Step t draws a Poisson sample from group
t modulo ``bands``. So an example takes part at most every ``bands``-th step, where columns of C
share no row, and n steps are ``ceil(n / bands)`` Poisson-sampled Gaussian mechanisms for it
(Theorem 4 there).

**The steps of an example follow from its place in the dataset.** Neighbouring datasets differ by an
example whose place is empty in one of them. An example that changes its place within a mechanism
takes part more often than is accounted, so places are compared. Places that change within a fit are
refused, and a run that resumes with other places begins a new mechanism.

**The noise of past steps is a secret**, because it can be subtracted from a release. It is in no
checkpoint, but in a separate file beside it, which this user alone may read. If two runs continued
from one noise, each would reveal what the other hides. So there is at most one file. Its name is a
digest of the last release, which all checkpoints since then hold, and a run deletes it before the
next release. Only one run can: one that does not find it is refused, and one that resumes without
it begins a new mechanism, whose cost is added to that of the first.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.signal import lfilter, unit_impulse
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset

from lightning_fedleak.defenses import DefenseError
from lightning_fedleak.defenses.accounting.ledger import sync_folder
from lightning_fedleak.defenses.base import State
from lightning_fedleak.defenses.dpsgd.sampling import origins
from lightning_fedleak.defenses.dpsgd.setup_checks import values_in
from lightning_fedleak.defenses.noise import Key, ReleaseNoise, noise_key, standard_normal
from lightning_fedleak.model.model_state import preserve_process
from lightning_fedleak.private_files import check_private, hash_tensors, save_private
from lightning_fedleak.validate import check_integer

Floats = NDArray[np.float64]
MECHANISM = "banded"  # name in records and checkpoints
OPTIONS = {"maxiter": 2000, "maxfun": 4000, "ftol": 1e-13, "gtol": 1e-9}
"""Of L-BFGS, which usually converges earlier; not tuned."""
READ = 16  # examples whose contents show the order of a dataset; more take longer. Not tuned
HOUR = 3600.0  # seconds after which an unfinished file is no other run's. Not tuned
PLAN_NUMBERS = ("steps", "groups", "examples")  # fields of a NoisePlan in checkpoints


@dataclass(frozen=True)
class CorrelatedNoise:
    """Noise that is correlated over steps, for ``ReleaseSettings(mechanism=...)``.

    Examples:
        >>> from lightning_fedleak import DPSGD
        >>> from lightning_fedleak.defenses import ReleaseSettings
        >>> from lightning_fedleak.labs.correlated_noise import CorrelatedNoise
        >>> release = ReleaseSettings(mechanism=CorrelatedNoise(bands=8))
        >>> defense = DPSGD(1.0, target_epsilon=8, target_delta=1e-5, release=release)

    Attributes:
        bands: of the matrix that correlates noise; 4 to 16 are usual.

    Raises:
        DefenseError: a value out of range.
    """

    bands: int

    def __post_init__(self) -> None:
        check_integer("CorrelatedNoise: bands", self.bands, error=DefenseError)

    def noise(self) -> ReleaseNoise:
        """Return the noise of a run."""
        return MatrixNoise(self.bands)


# ---- the matrix, in float64 ------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Factorization:
    """The banded matrix C by which noise is correlated over n steps.

    Its columns have norm 1, so one example moves ``C G`` in one step by at most the clip norm. No
    two columns share a row where an example takes part at most every b-th step.

    Attributes:
        rows: (n, b) of row t of C the entries at columns t, t - 1, ..., t - b + 1; 0 where there is
            no such column.
        noise_norms: (n,) norms of the rows of C^-1: standard deviations of the noise that is added,
            for independent noise of 1.
    """

    rows: Floats
    noise_norms: Floats


@functools.lru_cache(maxsize=16)
def banded(steps: int, bands: int) -> Factorization:
    """Return the Toeplitz C of least mean error for the running sums, its columns normalised.

    Args:
        steps: n.
        bands: b; 1 for independent noise.
    """
    bands = min(bands, steps)
    column = _best_column(steps, bands)
    columns = np.tile(column[:, None], (1, steps))
    for place in range(1, bands):
        columns[place, steps - place :] = 0.0
    columns /= np.linalg.norm(columns, axis=0)
    rows = np.zeros((steps, bands))
    for place in range(bands):
        rows[place:, place] = columns[place, : steps - place]
    # C = K N^-1 with a Toeplitz K and a diagonal N, so that C^-1 = N K^-1.
    inverse = lfilter([1.0], column, unit_impulse(steps))
    return Factorization(rows, column[0] / columns[0] * np.sqrt(np.cumsum(inverse**2)))


def _best_column(steps: int, bands: int) -> Floats:
    """Return (b,) the first column of the best Toeplitz C, of norm 1.

    It is optimized for few steps first and then for more, because for many steps the inverse of a
    column near the best may grow without bound.
    """
    places = np.arange(1, bands)
    free = np.cumprod((2 * places - 1) / (2 * places))
    lengths = [steps]
    while lengths[0] > 8 * max(bands, 8):
        lengths.insert(0, lengths[0] // 4)
    for length in lengths if bands > 1 else ():
        loss = functools.partial(_column_loss, steps=length)
        options = {**OPTIONS, "maxcor": min(50, bands)}
        free = minimize(loss, free, jac=True, method="L-BFGS-B", options=options).x
    column: Floats = np.concatenate([[1.0], free])
    return column / np.linalg.norm(column)


def _column_loss(free: Floats, steps: int) -> tuple[float, Floats]:
    """Return the log of the error of (1, free) over its norm, and its slope; 10^10 if infinite."""
    share = 1 - np.arange(steps) / steps
    coefficients = np.concatenate([[1.0], free])
    with np.errstate(all="ignore"):
        sums = np.cumsum(lfilter([1.0], coefficients, unit_impulse(steps)))
        turned = lfilter([1.0], coefficients, sums)
        error = share @ sums**2
        weighted = -2 * share * sums
        slope = np.array([weighted[k:] @ turned[: steps - k] for k in range(1, len(free) + 1)])
        square = coefficients @ coefficients
        value = math.log(square) + math.log(error) if 0 < error < math.inf else math.inf
        slope = slope / error + 2 * free / square
    if not (math.isfinite(value) and np.isfinite(slope).all()):
        return 1e10, np.zeros_like(free)
    return value, slope


# ---- places of examples ---------------------------------------------------------------------


@dataclass(frozen=True)
class Places:
    """Digests that change when examples change places; secret, because they depend on the data.

    Attributes:
        order: of this process's places, the users' keys and rows, and the indices of Subset and
            ConcatDataset.
        contents: of each field of a few examples that is the same in two readings, which a field
            with random augmentation is not.
    """

    order: str
    contents: dict[str, str]

    def differ(self, other: Places) -> bool:
        """Return whether examples are at other places."""
        changes = (other.contents.get(name, text) != text for name, text in self.contents.items())
        return self.order != other.order or any(changes)


def places_of(
    dataset: Any, shard: range, users: Mapping[Any, Sequence[int]] | None = None
) -> Places:
    """Return digests of the places; the global random states do not change.

    Args:
        dataset: map-style.
        shard: places of this process, or numbers of its users.
        users: the rows of each, by key.
    """
    order = hashlib.sha256(f"{shard!r} {len(dataset)}".encode())
    for key, rows in (users or {}).items():
        order.update(f"\0{[*values_in(key)]!r} {[*rows]!r}".encode())
    if isinstance(dataset, Subset | ConcatDataset):
        sources, places = origins(dataset)
        _, first, number = np.unique(sources, return_index=True, return_inverse=True)
        # Identities differ in the next process: a source is numbered by its first place.
        order.update(np.stack((first[number], places)).astype("<i8").tobytes())
    last = len(dataset) - 1
    places_read = sorted({last * i // (READ - 1) for i in range(READ)})
    with preserve_process():
        contents, repeated = (_contents(dataset, places_read) for _ in range(2))
    return Places(order.hexdigest(), {f: d for f, d in contents.items() if repeated.get(f) == d})


def _contents(dataset: Any, places: Sequence[int]) -> dict[str, str]:
    digests: dict[str, Any] = {}
    for place in places:
        for field, text in _fields(dataset[place]):
            digest = digests.setdefault(field, hashlib.sha256())
            digest.update(f"\0{place} {text}".encode())
    return {field: digest.hexdigest() for field, digest in digests.items()}


def _fields(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    items: Any = ()
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, list | tuple) and not all(isinstance(v, int | float) for v in value):
        items = enumerate(value)
    else:
        yield name, "\0".join(values_in(value))
    for key, item in items:
        yield from _fields(item, f"{name}/{key}")


# ---- the noise ------------------------------------------------------------------------------


@dataclass(frozen=True)
class NoisePlan:
    """The fixed numbers of a matrix mechanism.

    Attributes:
        bands: of C.
        steps: releases.
        groups: into which the examples are split; a step draws from one of them.
        examples: of all clients.
    """

    bands: int
    steps: int
    groups: int
    examples: int

    @property
    def matrices(self) -> Factorization:
        """Return the matrices by which noise is correlated."""
        return banded(self.steps, self.bands)

    @property
    def rounds(self) -> int:
        """Return how many mechanisms are composed."""
        return -(-self.steps // self.bands)

    def check_same(self, other: NoisePlan) -> None:
        """Raise an error unless the other plan is the same.

        Raises:
            DefenseError: says what differs.
        """
        for name, planned in vars(self).items():
            current = getattr(other, name)
            label = f"number of {name}" if name in PLAN_NUMBERS else name
            if planned != current:
                raise DefenseError(
                    f"DPSGD: the {label} was {planned} when the noise was planned, and is "
                    f"{current} now. Correlated noise holds for its plan alone: go on with the "
                    "max_epochs or max_steps, loader, data and settings of that plan, or begin a "
                    "new run."
                )


class MatrixNoise(ReleaseNoise):
    """The noise of a run's releases by a matrix mechanism, one after the other.

    Args:
        bands: of the matrix.

    Attributes:
        plan: of the fit; None before the training data are known.
        row: number of the next release in its mechanism.
        secret_name: digest of the last release, the same on all processes of a client and in
            checkpoints; empty before the first.
    """

    correlated = True

    def __init__(self, bands: int) -> None:
        self.bands = bands
        self.plan: NoisePlan | None = None
        self.secret_name = ""
        self.row = 0
        self._past: deque[dict[int, Tensor]] = deque(maxlen=max(1, bands - 1))
        self._current: dict[int, Tensor] = {}
        self._release: tuple[bytes, int] = (b"", 0)
        self._complete = True
        self._loaded = False
        self._saved: NoisePlan | None = None
        self._saved_row = 0
        self._device = ""
        self._file: Path | None = None
        self._places: Places | None = None
        self._saved_places: Places | None = None

    # ---- a fit ------------------------------------------------------------------------------

    def begin_fit(self) -> None:
        """Begin a fit, with the noise that was loaded for it or with a new mechanism."""
        self.plan = self._places = None
        if not self._loaded:
            self.forget()

    def end_fit(self) -> None:
        """End a fit. Its last noise stays in the file beside its last checkpoint alone."""
        self.forget()
        self.plan = self._saved = self._places = None

    def forget(self) -> None:
        """Begin a new mechanism with the next release."""
        self.row, self._complete, self._loaded = 0, True, False
        self.secret_name, self._file, self._saved_places = "", None, None
        self._past.clear()

    def count_groups(self, steps: int, share: int, batch_size: int) -> int:
        """Return the number of groups that batches are drawn from in turn.

        Raises:
            DefenseError: a group is smaller than a batch.
        """
        if self.bands * batch_size > share:
            raise DefenseError(
                f"DPSGD: {share} examples or users in {self.bands} groups are fewer than "
                f"batch_size={batch_size} in each. Use at most "
                f"bands={max(1, share // batch_size)}, or smaller batches."
            )
        return self.bands

    def plan_steps(
        self,
        count_steps: Callable[[str], int],
        loader: Any,
        groups: int,
        examples: int,
        users: Mapping[Any, Sequence[int]] | None = None,
    ) -> Callable[[], int]:
        """Set the plan, now that the training data are known.

        Raises:
            DefenseError: the mechanism that goes on has another plan, or examples are at other
                places than before in this fit.
        """
        steps = count_steps(f"mechanism={MECHANISM!r}")
        plan = NoisePlan(self.bands, steps, groups, examples)
        self.settle(plan, places_of(loader.dataset, loader.batch_sampler.shard, users))
        return lambda: plan.rounds

    def settle(self, plan: NoisePlan, places: Places | None) -> None:
        """Set the plan.

        Raises:
            DefenseError: as :meth:`plan_steps`.
        """
        for earlier in (self._saved, self.plan):
            if earlier is not None:
                earlier.check_same(plan)
        if not self.row or self._places is None or places is None:
            self._places = places
        elif self._places.differ(places):
            raise DefenseError(
                "DPSGD: the training data were loaded again within the fit, and examples are at "
                "other places, so that one could take part more often than is accounted. Nothing "
                "more was released. Split and shuffle the dataset once, before the fit or by a "
                "fixed seed, or leave reload_dataloaders_every_n_epochs out."
            )
        self.plan = plan

    @property
    def is_moved(self) -> bool:  # type: ignore[override]
        """Return whether examples are at other places than when the loaded noise was written."""
        saved, places = self._saved_places, self._places
        return saved is not None and places is not None and places.differ(saved)

    def warn_if_lost(self, releases: int) -> None:
        """Warn where the next release begins a mechanism although the last had not ended."""
        ended = self._saved is not None and self._saved_row >= self._saved.steps
        if releases and not self.row and not ended:
            warnings.warn(
                f"DPSGD: the correlated noise of the {releases} releases before cannot be "
                "continued (the run was killed, the file beside its checkpoint is gone, or "
                "examples are at other places). A new mechanism begins, and its cost is added.",
                stacklevel=3,
            )

    # ---- a release --------------------------------------------------------------------------

    @property
    def scale(self) -> float:  # type: ignore[override]
        """Return the standard deviation of the next noise, over that of independent noise."""
        row = min(self.row, self._planned.steps - 1)
        return float(self._planned.matrices.noise_norms[row])

    @property
    def is_accounted(self) -> bool:  # type: ignore[override]
        """Return whether the next release is the first of those that are accounted as one."""
        return self.row % self.bands == 0

    def check_planned(self) -> None:
        """Raise an error for a release beyond the plan.

        Raises:
            DefenseError: says how many there may be.
        """
        if self.row >= self._planned.steps:
            raise DefenseError(
                f"DPSGD: the noise was planned for {self._planned.steps} steps, and all were made. "
                "Nothing more was released: let max_epochs or max_steps be all steps of the run."
            )

    def begin(self, base: bytes, release: int) -> None:
        """Begin a release: delete the file of the noise so far.

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
        name = noise_key(base, release, 0, client=0, name="correlated", stream="name")
        self.secret_name = name[:16].hex()
        self._release = base, release
        self._current, self._complete = {}, False

    def add(self, number: int, target: Tensor, scale: float, key: Key) -> None:
        """Add ``scale`` times the result of :meth:`draw`, in place.

        Raises:
            DefenseError: as :meth:`draw`.
        """
        target.add_(self.draw(number, target, key), alpha=scale)

    def draw(self, number: int, like: Tensor, key: Key) -> Tensor:
        """Return the noise on one parameter, over the standard deviation of independent noise.

        Args:
            number: of the parameter, and of this process's shard of it.
            like: gives shape, device and dtype.
            key: returns the key of a draw.

        Returns:
            A tensor that must not be written to.

        Raises:
            DefenseError: the parameter was not trained in the steps before, or had another shape.
        """
        self._device = like.device.type
        draw_key = key(*self._release, number)
        total = standard_normal(draw_key, like.shape, like.device, like.dtype)
        weights = self._planned.matrices.rows[self.row].tolist()
        for back, noises in enumerate(self._past, 1):
            noise = noises.get(number)
            if noise is None or noise.shape != total.shape:
                raise DefenseError(
                    f"DPSGD: a parameter of shape {tuple(like.shape)} was not trained in the step "
                    "before, or had another shape: train the same parameters in all steps."
                )
            total.add_(noise.to(total.device), alpha=-weights[back])
        total.div_(weights[0])
        if len(self._past) == self.bands - 1 and self._past:
            del self._past[-1][number]  # its last use: memory does not grow in the step
        self._current[number] = total
        return total

    def end(self) -> None:
        """End a release that was made."""
        if self.bands > 1:
            self._past.appendleft(self._current)
        self.row, self._current, self._complete = self.row + 1, {}, True

    def _delete(self) -> bool:
        """Delete the file and return whether it was there, which is True in one of several runs."""
        assert self._file is not None
        try:
            self._file.unlink()
            sync_folder(self._file.parent)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise DefenseError(
                f"DPSGD: '{self._file}' cannot be deleted ({error}). It holds the noise of the "
                "last release, which must not be used twice: nothing more was released."
            ) from error
        return True

    @property
    def _planned(self) -> NoisePlan:
        assert self.plan is not None
        return self.plan

    # ---- between processes ------------------------------------------------------------------

    def settings(self) -> dict[str, str | int]:
        """Return the mechanism and its bands, for records."""
        return {"mechanism": MECHANISM, "bands": self.bands}

    def state_dict(self) -> dict[str, Tensor | int | float | str]:
        """Return what is not secret: the plan, and the number of the next release in it."""
        numbers = {} if self.plan is None else {n: getattr(self.plan, n) for n in PLAN_NUMBERS}
        return {
            **self.settings(),
            "row": self.row,
            "noise": self.secret_name,
            **{f"planned_{name}": number for name, number in numbers.items()},
        }

    def load_state_dict(self, state: State) -> None:
        """Begin a new mechanism and read the plan of the last, which :meth:`load` may continue.

        Raises:
            DefenseError: the releases were made by another mechanism.
        """
        self.forget()
        super().load_state_dict(state)
        self._saved, self._saved_row = None, int(state.get("row", 0))
        self.secret_name = str(state.get("noise", ""))
        if "planned_steps" in state:
            numbers = {name: int(state[f"planned_{name}"]) for name in PLAN_NUMBERS}
            self._saved = NoisePlan(self.bands, **numbers)
            if self.plan is not None:
                self._saved.check_same(self.plan)

    def save(self, path: Path, releases: int) -> None:
        """Write what the next draws need into a file that this user alone may read.

        Nothing is written where no draw follows. A file in another folder is deleted first.

        Args:
            path: of the file.
            releases: of the run.

        Raises:
            DefenseError: it cannot be written.
        """
        for draft in path.parent.glob(f".{path.name}.*"):  # what a kill left behind
            if draft.stat().st_mtime < time.time() - HOUR:
                draft.unlink(missing_ok=True)
        if self.plan is None or not 0 < self.row < self.plan.steps or not self._complete:
            return
        if self._file == path or (self._file is not None and not self._delete()):
            return  # where another run has it, the next release says so
        self._file = None
        tensors = {
            f"{back} {number}": tensor
            for back, noises in enumerate(self._past)
            for number, tensor in noises.items()
        }
        metadata = _metadata(self.plan, self.row, self.secret_name, releases, self._device)
        metadata["sha256"] = hash_tensors(tensors)
        if self._places is not None:
            metadata["places"] = json.dumps(vars(self._places))
        try:
            save_private(path, tensors, metadata)
        except OSError as error:
            raise DefenseError(
                f"DPSGD: the noise that the next steps need cannot be written to '{path}' "
                f"({error}). Save checkpoints in a folder that may be written and has free space."
            ) from error
        self._file = path

    def load(self, path: Path, releases: int, device: str) -> bool:
        """Continue the noise of the last release, if the file holds it.

        Args:
            path: of the file.
            releases: that the checkpoint has counted.
            device: the type of device on which noise is drawn now, because others draw other noise.

        Returns:
            Whether it is continued. After a kill, without the file, or with one that is damaged or
            that another user could have written, a new mechanism begins.
        """
        try:
            check_private(path)
            with safetensors.safe_open(path, "pt") as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (OSError, ValueError, safetensors.SafetensorError):
            return False
        places, digest = metadata.pop("places", None), metadata.pop("sha256", None)
        if (
            digest != hash_tensors(tensors)
            or self._saved is None
            or metadata
            != _metadata(self._saved, self._saved_row, self.secret_name, releases, device)
        ):
            return False
        self.row, self._loaded, self._file = self._saved_row, True, path
        self._saved_places = None if places is None else Places(**json.loads(places))
        for name, tensor in tensors.items():
            back, number = map(int, name.split(" "))
            while len(self._past) <= back:
                self._past.append({})
            self._past[back][number] = tensor
        return True


def _metadata(plan: NoisePlan, row: int, name: str, releases: int, device: str) -> dict[str, str]:
    """Return what must be the same where noise is continued."""
    numbers = {"row": row, "noise": name, "releases": releases, "device": device}
    numbers["torch"] = torch.__version__
    return {name: str(value) for name, value in {**vars(plan), **numbers}.items()}
