"""A LoRA as PEFT makes it, on the model of a command."""

from __future__ import annotations

import torch

from lightning_fedleak.anatomy import Anatomy, find_anatomy
from lightning_fedleak.extras import install
from lightning_fedleak.finetuning.assets import SourceError


def with_lora(anatomy: Anatomy, rank: int, targets: str | None, seed: int) -> Anatomy:
    """The model with adapters, of which alone is trained; as it is for rank 0.

    Args:
        anatomy: of the model.
        rank: of the adapters.
        targets: names of modules with commas between, or ``all-linear``; None: PEFT's.
        seed: of the adapters.

    Raises:
        SourceError: no package peft, no such modules, or modules for no adapters.
    """
    if rank == 0 and targets is not None:
        raise SourceError(
            f"--targets {targets} names modules with a LoRA: give its rank too, --lora-r 8 say"
        )
    if rank == 0:
        return anatomy
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise SourceError(
            f"--lora-r needs the package peft: {install('peft')} (--lora-r 0 trains the whole "
            "model)"
        ) from error
    names = None if targets is None else targets.split(",")
    torch.manual_seed(seed)
    try:
        config = LoraConfig(
            r=rank,
            lora_alpha=2 * rank,
            target_modules=names if names != ["all-linear"] else "all-linear",
            fan_in_fan_out=hasattr(anatomy.model, "transformer"),
        )
        model = get_peft_model(anatomy.model, config)
    except ValueError as error:
        raise SourceError(f"--targets {targets}: {error}") from error
    return find_anatomy(model.eval(), kind=anatomy.kind)


__all__ = ["with_lora"]
