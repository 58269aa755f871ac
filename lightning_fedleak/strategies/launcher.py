"""Brings the defences' states back from processes that the Trainer starts and ends itself."""

from __future__ import annotations

import io
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from lightning.pytorch.trainer.states import TrainerFn

_STATES = "lightning_fedleak_defenses"


class BringsBackStates(_MultiProcessingLauncher):
    """Lightning's launcher for ``ddp_spawn``, ``ddp_fork`` and ``ddp_notebook``.

    It hands the trained weights to the main process. The defences there would know nothing of what
    was released for them, and begin to count anew with the next fit.
    """

    def get_extra_results(self, trainer: pl.Trainer) -> dict[str, Any]:
        """In the first process, at its end: also the defences' states after a fit."""
        extra = super().get_extra_results(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            buffer = io.BytesIO()
            torch.save(trainer.strategy._fedleak.state_dict(), buffer)  # type: ignore[attr-defined]
            extra[_STATES] = buffer.getvalue()
        return extra

    def update_main_process_results(self, trainer: pl.Trainer, extra: dict[str, Any]) -> None:
        """In the main process: hands each defence its state."""
        super().update_main_process_results(trainer, extra)
        if _STATES in extra:
            states = torch.load(io.BytesIO(extra[_STATES]), weights_only=True)
            for defense in trainer.strategy._fedleak.defenses:  # type: ignore[attr-defined]
                defense.load_state_dict(states[defense.name])


__all__ = ["BringsBackStates"]
