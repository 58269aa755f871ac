"""What is kept of chosen steps, so that somebody else can repeat them to the bit."""

from __future__ import annotations

import hashlib
import hmac
import os
import random
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_fedleak.engine.run import Refusal, Run, reason
from lightning_fedleak.engine.scheduler import Phase, Scheduler
from lightning_fedleak.evaluation.canaries.items import digest_of
from lightning_fedleak.messages import rank_zero_info, rank_zero_warn
from lightning_fedleak.private_files import digest_weights, hash_weights, load_state, save_state
from lightning_fedleak.report import records
from lightning_fedleak.validate import check_integer, check_number

BYTES_PER_SECOND = 3e8
"""It is for the estimate at set-up alone: copying, writing and hashing on one core and a disk."""


class StepRepeated(Exception):
    """Ends the training of a replay, whose step is over."""


@dataclass(frozen=True)
class Evidence:
    """Keep chosen steps, so that ``fedleak replay`` can repeat them to the bit.

    A kept step is looked at too. Its file holds the trained weights, the state of the optimizer and
    of the attacks, and the random states before the step, and no text; it is as secret as the
    texts, since two of them differ by an update. Which steps are kept is drawn by a secret seed:
    the log's first line commits to it, its last line reveals it.

    Examples:
        >>> from lightning_fedleak.engine import Evidence
        >>> Evidence("evidence").share
        0.01

    Attributes:
        folder: where files are kept, of mode 0700 and outside of the run's folder; a folder for
            each run is made in it.
        share: of the steps that are kept.
        steps: those that are kept instead, as an auditor gives them.
        repeats: file of the one step that a replay repeats, and of nothing else.

    Raises:
        ValueError: a number out of its range.
    """

    folder: str | Path
    share: float = 0.01
    steps: Sequence[int] | None = None
    repeats: Path | None = None

    def __post_init__(self) -> None:
        check_number("share", self.share, above=0, at_most=1)
        for step in self.steps or ():
            check_integer("steps", step, at_least=0)

    @cached_property
    def kept(self) -> Any:
        """What a replay begins with; empty where steps are kept."""
        return {} if self.repeats is None else load_state(self.repeats)

    def check(self, run: Run, folder: Path) -> None:
        """Refuse a run whose steps cannot be kept, and make the folder.

        Args:
            run: the run.
            folder: of its logs.

        Raises:
            ValueError: says why, and what to do.
        """
        place = Path(self.folder)
        noisy = [one.name for one in run.defenses if type(one).__name__ != "Freeze"]
        reasons = {
            f"beside the defence '{', '.join(noisy)}': noise that is kept voids its guarantee, and "
            "its own state is not kept": bool(noisy),
            "of the rounds of a federation": run.unit != "step",
            "of several processes, or of shards": run.processes > 1 or run.is_sharded,
            "under precision 16-mixed, whose loss scale is not kept (bf16-mixed has none)": (
                run.precision == "16-mixed"
            ),
        }
        if why := next((text for text, applies in reasons.items() if applies), None):
            raise ValueError(f"evidence=Evidence(...) keeps no steps {why}: leave it out")
        if place.resolve().is_relative_to(folder.resolve()):
            raise ValueError(
                f"Evidence(folder='{place}') lies in the run's folder '{folder}', which others may "
                "get: name one outside of it"
            )
        try:
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
            mode = place.stat().st_mode & 0o077 if os.name == "posix" else 0
        except OSError as error:
            raise ValueError(f"Evidence(folder='{place}') cannot be made: {error}") from None
        if mode:
            raise ValueError(f"others may read Evidence(folder='{place}'): chmod 700 {place}")


class Keeper:
    """Keep the steps of a run, or repeat one.

    Args:
        evidence: which steps, and where.
        run: the run.
        name: of the run's own folder.
        write: gets a line of each step.
        state: returns the state of the attacks and results.

    Attributes:
        seed: draws the steps; None where they were given.
        facts: what the first line says.
    """

    def __init__(
        self,
        evidence: Evidence,
        run: Run,
        name: str,
        write: Callable[[records.KeptLine], object],
        state: Callable[[], object],
    ) -> None:
        self._evidence, self._run, self._state = evidence, run, state
        self._folder, self._write = Path(evidence.folder, name), write
        self._line: records.KeptLine | None = None
        self._next, self._key = run.step, b""
        self._batches: list[str] = []
        self._losses: list[Tensor] = []
        self.seed = secrets.token_hex(32) if evidence.steps is None else None
        facts: dict[str, object] = {"steps": sorted(evidence.steps or ())}
        if self.seed is not None:
            seed_hash = records.hash_line(self.seed.encode())
            facts = {"share": evidence.share, "seed_hash": seed_hash}
        self.facts = {"first": run.step, **facts}
        if evidence.repeats is None:
            size = 3 * sum(tensor.nbytes for tensor in self._trained().values())
            steps = 1 / evidence.share if self.seed is not None else 0
            words = f"1 step in {steps:.0f}" if steps else f"{len(evidence.steps or ())} steps"
            rank_zero_info(
                f"{run.watcher}: {words} is kept in {evidence.folder}, each with up to "
                f"{size / 1e6:.1f} MB (weights, and twice that for Adam) in about "
                f"{size / BYTES_PER_SECOND:.2g} s and a look"
            )

    def _trained(self) -> dict[str, Tensor]:
        named = self._run.anatomy.root.named_parameters()
        return {name: p.detach() for name, p in named if p.requires_grad}

    def _buffers(self) -> dict[str, Tensor]:
        root = self._run.anatomy.root
        saved = root.state_dict()
        return {name: one for name, one in root.named_buffers() if name in saved}

    def is_before(self) -> bool:
        """Return whether a replay has not come to its step."""
        repeated, run = self._evidence.kept, self._run
        return (
            bool(repeated) and run.step != repeated["step"] and run.position != repeated["position"]
        )

    def _is_chosen(self, step: int) -> bool:
        if self.seed is None:
            return step in (self._evidence.steps or ())
        return records.is_drawn(self.seed, self._evidence.share, step)

    def batch_begins(self, batch: Any, scheduler: Scheduler, controls: Any) -> None:
        """Keep the state before a chosen step, or put it back; the step is looked at.

        Raises:
            Refusal: a state cannot be put back.
        """
        if self._line is not None and scheduler.phase is Phase.ACCUMULATING:
            self._batches.append(_hash(batch))
            return
        started, self._line, cadence = time.perf_counter(), None, scheduler.cadence
        cadence.evidence_step = None
        repeated, run = self._evidence.kept, self._run
        try:
            is_chosen = not repeated and self._is_chosen(run.step)
            is_there = bool(repeated) and run.reaches(repeated["step"], repeated["position"])
            if is_chosen or is_there:
                self._batches, self._losses = [_hash(batch)], []
            if is_there:
                self._put_back(repeated)
                controls.restore(repeated["controls"])
                self._key = bytes.fromhex(repeated["key"])
                self._line = records.KeptLine(run="", step=0)
            elif is_chosen:
                self._line = self._keep(controls.state())
        except Exception as error:
            if repeated:
                raise Refusal(error) from error
            rank_zero_warn(f"step {run.step} is not kept as evidence: {reason(error)}")
        if self._line is not None:
            cadence.evidence_step = run.step
            seconds = time.perf_counter() - started
            self._line = replace(self._line, step=run.step, seconds=seconds)

    def _keep(self, controls: Mapping[str, object]) -> records.KeptLine:
        self._key = secrets.token_bytes(32)
        run = self._run
        path = self._folder / f"step-{run.step}.safetensors"
        path.parent.mkdir(mode=0o700, exist_ok=True)
        state = {
            "step": run.step,
            "key": self._key.hex(),  # which also hides what the file's hash is of
            "position": run.position,
            "weights": self._trained() | self._buffers(),
            "optimizers": [optimizer.state_dict() for optimizer in run.optimizers],
            "random": _random_states(),
            "engine": self._state(),
            "controls": controls,
        }
        if state["engine"] is None:
            raise ValueError("the state of the attacks cannot be read")
        save_state(path, state)
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        return records.KeptLine(run="", step=0, file=digest, bytes=path.stat().st_size)

    @torch.no_grad()
    def _put_back(self, state: Any) -> None:
        tensors = self._trained() | self._buffers()
        if tensors.keys() != state["weights"].keys():
            raise ValueError(
                "the function trains other tensors than the run did: build the model as it did"
            )
        for name, tensor in tensors.items():
            tensor.copy_(state["weights"][name])
        for optimizer, one in zip(self._run.optimizers, state["optimizers"], strict=True):
            _load_exactly(optimizer, one)
        version, internal, gauss = state["random"]["python"]
        random.setstate((version, tuple(internal), gauss))
        name, keys, *rest = state["random"]["numpy"]
        np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
        torch.set_rng_state(state["random"]["torch"])
        if state["random"]["cuda"]:
            torch.cuda.set_rng_state_all(state["random"]["cuda"])

    def loss_computed(self, loss: Tensor) -> None:
        """Note the loss of a batch of a kept step."""
        if self._line is not None:
            self._losses.append(loss.detach())

    def end(self) -> str | None:
        """Write a line of a step that an error of the loop has ended, and return the seed."""
        self.batch_ends()
        return self.seed

    def batch_ends(self) -> bool:
        """Write a line of a kept step that is over; return whether one is."""
        run, line = self._run, self._line
        is_over = line is not None and run.step > line.step
        if line is not None and is_over:
            started, self._line = time.perf_counter(), None
            try:
                weights = digest_weights(hash_weights(self._trained()))
                losses = [float(one) for loss in self._losses for one in loss.reshape(-1)]
                codes = [
                    hmac.digest(self._key, text.encode(), "sha256").hex()
                    for text in (" ".join(self._batches), weights)
                ]
            except Exception as error:
                rank_zero_warn(f"step {line.step} is not kept as evidence: {reason(error)}")
                line = None
            else:
                seconds = (line.seconds or 0) + time.perf_counter() - started
                line = replace(line, batch=codes[0], weights=codes[1], loss=tuple(losses))
                self._write(replace(line, seconds=seconds))
        for step in range(self._next, run.step):
            written = is_over and line is not None and step == line.step
            if self._is_chosen(step) and not written and not self._evidence.kept:
                self._write(records.KeptLine(run="", step=step))
        self._next = run.step
        return is_over


def _hash(batch: Any) -> str:
    """Return the SHA-256 of what is in a batch, on whatever device."""
    is_plain = isinstance(batch, Mapping | Sequence | Tensor)
    return digest_of(batch if is_plain else vars(batch), "the batch").hex()


def _random_states() -> dict[str, object]:
    name, keys, *rest = np.random.get_state()
    cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return {
        "python": random.getstate(),
        "numpy": [name, torch.from_numpy(np.asarray(keys, np.int64)), *rest],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if cuda else [],
    }


def _load_exactly(optimizer: Optimizer, state: Any) -> None:
    """Give an optimizer its state, of which torch rounds what has another type than its weights."""
    optimizer.load_state_dict(dict(state))
    indices = (index for group in state["param_groups"] for index in group["params"])
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    for index, parameter in zip(indices, parameters, strict=True):
        for name, value in state["state"].get(index, {}).items():
            loaded = optimizer.state[parameter][name]
            if isinstance(value, Tensor) and value.dtype != loaded.dtype:
                optimizer.state[parameter][name] = value.to(loaded.device)
