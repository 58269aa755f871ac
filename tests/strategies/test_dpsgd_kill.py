"""A fit under DPSGD is killed at ten random points: nothing is forgotten, nothing drawn twice.

Every life is a forked process: a real Trainer, resumed from the last whole checkpoint, that tells
through a pipe what leaves it, until it gets SIGKILL. This process only forks, counts and kills.
"""

import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback

from lightning_fedleak.defenses import DPSGD
from lightning_fedleak.defenses.accounting.account import Accountant
from lightning_fedleak.defenses.accounting.accounting import epsilon_of
from lightning_fedleak.strategies import DefendedStrategy
from tests.helpers.processes import one_process
from tests.strategies.dpsgd_runs import BATCH, CLIP, CausalLM, N, loader, trainer

LIVES, NUMBERS, SAVED_EVERY = 10, 256, 3
NOISE = 50.0
"""So much that the clipped sums beside it are nothing: two releases alike would be noise alike."""


def defense(folder: Path, **settings: Any) -> DPSGD:
    return DPSGD(
        CLIP, noise_multiplier=NOISE, target_delta=1e-3, accountant="rdp", ledger=folder / "ledger",
        max_physical_batch_size=2, **settings,
    )  # fmt: skip


class Save(Callback):
    """A checkpoint every few steps; a kill while one is written leaves the one before."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, run: Any, *_: Any) -> None:
        if run.global_step % SAVED_EVERY == 0:
            unfinished = self.path.with_suffix(".unfinished")
            run.save_checkpoint(unfinished)
            os.replace(unfinished, self.path)


def live(folder: Path, pipe: int | None, **limits: Any) -> DPSGD:
    """Trains; of every release the step's number and the first coordinates go into the pipe."""
    dpsgd, checkpoint = defense(folder), folder / "last.ckpt"
    strategy = DefendedStrategy("auto", [dpsgd])
    saves = Save(checkpoint)
    run = trainer(strategy, callbacks=[saves], **{"max_epochs": 10**6, **limits})

    def tell(stage: str, optimizer: Any) -> None:
        if stage == "shared" and pipe is not None:
            first = optimizer.param_groups[0]["params"][0].grad.flatten()[: NUMBERS - 1]
            record = np.r_[run.global_step, first.numpy()].astype(np.float32)
            os.write(pipe, record.tobytes())  # less than PIPE_BUF: whole or not at all

    strategy.add_tap(tell)
    run.fit(CausalLM(lr=1e-6), loader(), ckpt_path=str(checkpoint) if checkpoint.exists() else None)
    return dpsgd


def read(pipe: int) -> np.ndarray | None:
    """A release, None once the other end is closed."""
    data = b""
    while len(data) < 4 * NUMBERS:
        more = os.read(pipe, 4 * NUMBERS - len(data))
        if not more:
            return None
        data += more
    return np.frombuffer(data, dtype=np.float32)


def main() -> None:
    folder, lives_to_live = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    releases: list[np.ndarray] = []
    lives = []
    for _ in range(lives_to_live):
        until, fraction = int(rng.integers(0, 7)), float(rng.random())
        before = len(releases)
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reader)
            try:
                live(folder, writer)
            except BaseException:
                traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
        os.close(writer)
        start = time.monotonic()
        gap = 0.5  # of a setup, then of a step
        for _ in range(until):
            release = read(reader)
            if release is None:
                break
            releases.append(release)
            gap, start = time.monotonic() - start, time.monotonic()
        time.sleep(fraction * gap)
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        while (release := read(reader)) is not None:
            releases.append(release)
        os.close(reader)
        lives.append(
            {
                "killed": os.WIFSIGNALED(status),
                "until": until,
                "seen": len(releases) - before,
                "ledger": Accountant(ledger=folder / "ledger").steps,
            }
        )
    np.save(folder / "releases.npy", np.stack(releases))
    (folder / "lives.json").write_text(json.dumps(lives))


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="kills forked processes"),
]


def test_killed_at_ten_random_points_it_forgets_no_release_and_repeats_no_noise(tmp_path) -> None:
    said = one_process("tests.strategies.test_dpsgd_kill", tmp_path, LIVES, log=tmp_path / "log")
    lives = json.loads((tmp_path / "lives.json").read_text())
    releases = np.load(tmp_path / "releases.npy")

    assert len(lives) == LIVES == 10
    counted = 0
    for life in lives:
        assert life["killed"], said[-4000:]
        assert life["seen"] >= life["until"]
        assert life["seen"] <= life["ledger"] - counted <= life["seen"] + 1
        counted = life["ledger"]
    steps, draws = releases[:, 0], releases[:, 1:]
    assert len(set(steps.tolist())) < len(steps)  # kills undid steps, but not their releases

    scale = NOISE * 0.9 / BATCH
    assert np.std(draws) == pytest.approx(scale, rel=0.05)
    alike = np.corrcoef(draws)
    np.fill_diagonal(alike, 0.0)
    assert np.abs(alike).max() < 0.5

    last = live(tmp_path, None, max_steps=int(steps.max()) + 3)
    assert last.accountant.steps > counted
    assert last.accountant.history == ((NOISE, BATCH / N, last.accountant.steps),)
    epsilon = epsilon_of([(NOISE, BATCH / N, counted)], 1e-3, "rdp")
    assert last.privacy.epsilon >= epsilon > 0


if __name__ == "__main__":
    main()
