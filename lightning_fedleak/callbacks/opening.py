"""How the watch over a fit begins: what is planned for each attack, and its calibration."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import lightning.pytorch as L
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities import rank_zero_info

from lightning_fedleak.anatomy import Anatomy
from lightning_fedleak.attacks.base import Attack
from lightning_fedleak.attacks.hidden import whole_model
from lightning_fedleak.attacks.inversion import InversionAttack
from lightning_fedleak.callbacks.cadence import Cadence
from lightning_fedleak.callbacks.checks import check_optimizers, plan_attack
from lightning_fedleak.callbacks.kinds import Kind
from lightning_fedleak.callbacks.ledger import Series
from lightning_fedleak.callbacks.live_games import LiveGames
from lightning_fedleak.callbacks.live_inversion import LiveInversion
from lightning_fedleak.callbacks.look import Plan
from lightning_fedleak.callbacks.pooling import Witness
from lightning_fedleak.callbacks.sources import GameSettings
from lightning_fedleak.callbacks.watch import Watch
from lightning_fedleak.snapshots import HeadOwnPart, Stage
from lightning_fedleak.threats import Capability


def watch_over(
    trainer: L.Trainer,
    anatomy: Anatomy,
    attacks: Sequence[Attack],
    *,
    assume: Collection[Capability],
    client: str,
    stages: Sequence[Stage],
    cadence: Cadence,
    local_steps: int | None,
    own_part: HeadOwnPart | None,
    games: GameSettings,
    texts: int,
    kinds: Mapping[Series, Kind],
    witness: Witness,
) -> Watch:
    """The watch over a fit whose strategy is set up; its taps are in. See :class:`Watch`.

    Args:
        trainer: of this fit.
        anatomy: the model's parts.
        attacks: the monitor's.
        assume: what the adversary has besides what it sees.
        client: ``"rank"`` or ``"world"``.
        stages: where to measure.
        cadence: when to look.
        local_steps: optimizer steps of a round; None for single gradients.
        own_part: the head's own part of a tied matrix; None without.
        games: of membership attacks.
        texts: that inversion attacks reconstruct at a look, at most.
        kinds: what the results of each series are.
        witness: shown each guess beside the truth.

    Raises:
        ValueError: an attack does not fit the model or the run.
    """
    check_optimizers(trainer.optimizers, attacks)
    assumed = frozenset(assume)
    ddp_rank = isinstance(trainer.strategy, DDPStrategy) and client == "rank"

    def plan() -> list[Plan]:
        return [
            plan_attack(a, anatomy, trainer.optimizers, assumed, reduces_all=ddp_rank)
            for a in attacks
        ]

    inverters = [a for a in attacks if isinstance(a, InversionAttack)]
    return Watch(
        trainer,
        anatomy,
        plan,
        stages=stages,
        client=client,
        cadence=cadence,
        local_steps=local_steps,
        own_part=own_part,
        games=LiveGames(trainer, anatomy, games, trainer.global_rank if client == "rank" else 0),
        inversion=LiveInversion(trainer, anatomy, inverters, texts=texts, stages=stages),
        kinds=kinds,
        witness=witness,
    )


def calibrate(watch: Watch, restored: Mapping[str, Any]) -> None:
    """Prepares every attack that has something to read, and tries its games on two short texts.

    Args:
        watch: over the fit that begins.
        restored: of a checkpoint, by the attack's name: its settings then, and its calibration,
            which is used where the settings are the same.

    Raises:
        ValueError: an attack does not fit the model.
    """
    with whole_model(watch.anatomy.root):
        for attack in (plan.attack for plan in watch.exposed):
            saved = restored.get(attack.name)
            if saved is not None and saved["config"] == repr(sorted(attack.given().items())):
                attack.load_state_dict(saved["tensors"])
                watch.prepared.add(attack.name)
            started = time.perf_counter()
            watch.prepare(attack)
            seconds = time.perf_counter() - started
            if seconds > 1:
                rank_zero_info(f"LeakageMonitor: '{attack.name}' calibrated in {seconds:.1f} s")
    watch.games.check()


__all__ = ["calibrate", "watch_over"]
