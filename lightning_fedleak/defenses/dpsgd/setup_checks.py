"""Checks of DP-SGD before the first step: of the Trainer, the model and the number of steps.

Each raises an error for a setting under which the guarantee would not hold, and says what to
change. The *host* is the trainer or training loop. Several processes may together be one client (a
*team*); then their shards and data are checked too.
"""

import hashlib
from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils.data import DataLoader

from lightning_fedleak.defenses.adam import DPAdamBC
from lightning_fedleak.defenses.base import DefenseContext, DefenseError, refuse
from lightning_fedleak.defenses.dpsgd import experts
from lightning_fedleak.defenses.dpsgd.recorder import trains, values_in
from lightning_fedleak.defenses.dpsgd.rerun import adapted_layers, plain_type
from lightning_fedleak.defenses.dpsgd.rules import rule_of
from lightning_fedleak.defenses.host import Host
from lightning_fedleak.defenses.processes import Team

# The number of examples by which the datasets of two processes are compared. More take more time at
# setup. Not tuned.
COMPARED = 5
PRECISIONS = ("32-true", "64-true", "bf16-mixed", "bf16-true")
"""Lightning's names of the precisions without a gradient scaler."""


def check_trainer(context: DefenseContext) -> None:
    """Refuse settings of the Trainer that break the guarantee or have no effect.

    Raises:
        DefenseError: Names the setting.
    """
    refusals = {
        f": precision={context.precision!r} is not supported. Use 'bf16-mixed' or '32-true'.": (
            context.precision not in PRECISIONS
        ),
        " needs float64, which an Apple GPU (mps) does not have. Use accelerator='cpu', or "
        "use_cpu=True under transformers.": context.device.type == "mps",
        **context.host.refusals(),
    }
    refuse("DPSGD", refusals)


def check_no_other_noise(host: Host, names: Sequence[str]) -> None:
    """Refuse another defence that changes the gradients that a :class:`DPAdamBC` gets.

    Args:
        host: The host, which has the optimizers.
        names: The names of the defences that change gradients after DPSGD.

    Raises:
        DefenseError: Names the defence.
    """
    if names and any(isinstance(optimizer, DPAdamBC) for optimizer in host.optimizers):
        raise DefenseError(
            f"{', '.join(names)} changes the gradients after DPSGD: leave it out, or use AdamW "
            "instead of DPAdamBC"
        )


def check_shards(root: nn.Module, processes: int) -> None:
    """Refuse a trained parameter that is not sharded over exactly the client's processes (FSDP2).

    Raises:
        DefenseError: Names the parameter.
    """
    for name, parameter in root.named_parameters():
        if not (parameter.requires_grad and isinstance(parameter, DTensor)):
            continue
        size, placements = parameter.device_mesh.size(), parameter.placements
        is_plain = all(type(placement) in (Shard, Replicate) for placement in placements)
        if size != processes or not is_plain:
            raise DefenseError(
                f"DPSGD: '{name}' is placed as {placements} over {size} processes: use only "
                f"fully_shard, with a mesh of all {processes}"
            )


def check_model(root: nn.Module) -> None:
    """Refuse a model with trained layers for which there are no per-sample gradients.

    Raises:
        DefenseError: Names the layer and the remedy.
    """
    trainable = any(p.requires_grad for p in root.parameters())
    refuse("DPSGD: ", {"every parameter is frozen: unfreeze some, or omit DPSGD": not trainable})
    # Some PEFT layers are run again as a whole; the modules inside them need no rule.
    adapted, inner = adapted_layers(root)
    for name, module in root.named_modules():
        owner = f"DPSGD: '{name or type(module).__name__}' ({plain_type(module).__name__}) "
        refuse(owner, experts.refusals(module))
        is_trained = module in adapted or (module not in inner and trains(module))
        if is_trained and module not in adapted:
            rule_of(name, module)
        is_instance_norm = isinstance(module, nn.modules.instancenorm._InstanceNorm)
        refusals: dict[str, object] = {
            "normalises by statistics of the batch. Use GroupNorm or LayerNorm "
            "(opacus.validators.ModuleValidator.fix does it), or freeze it in eval mode.": (
                isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training
            ),
            "keeps statistics of the data. Build it with track_running_stats=False.": (
                is_instance_norm and module.training and module.track_running_stats
            ),
            "changes ranks by gradients without noise. Use LoraConfig(use_rslora=True), or "
            "LoHaConfig.": hasattr(module, "update_and_allocate"),
            "has NEFTune's noise, whose size depends on the length of the longest text of a batch. "
            "Leave out neftune_noise_alpha.": getattr(module, "neftune_noise_alpha", None),
            "is in eval mode and trained. Call `model.train()` where you build it, or freeze it.": (
                is_trained and not module.training
            ),
        }
        refuse(owner, refusals)


def planned_steps(context: DefenseContext, per_epoch: int) -> int:
    """Return the number of optimizer steps of the run.

    Args:
        context: The context, which has the trainer.
        per_epoch: The number of batches of the loader.

    Raises:
        DefenseError: The run has no end, or the learning rate finder runs first.
    """
    host = context.host
    if host.finds_learning_rate:
        raise DefenseError("DPSGD: the learning rate finder needs noise_multiplier")
    steps = host.count_steps(per_epoch)
    if steps is None or steps < 1:
        raise DefenseError(
            f"DPSGD: with target_epsilon give {host.name} {host.steps_by}, or pass noise_multiplier"
        )
    return steps


def check_same_data(loader: DataLoader[Any], team: Team) -> None:
    """Refuse processes of one client whose datasets differ; this is a collective.

    Each process takes some indices of the dataset. If processes have shuffled or split it
    differently, an example may be drawn by several of them, and is then more than once in the sum.
    A few examples are compared, unless loading them twice gives different values.

    Args:
        loader: The training loader, with the full dataset in each process.
        team: The processes of this client.

    Raises:
        DefenseError: The datasets differ, or another process cannot load an example.
    """
    if team.size == 1:
        return
    with team.together():
        digest, second_digest = _digest(loader.dataset), _digest(loader.dataset)
    is_random, high, low = team.largest([digest != second_digest, digest, -digest])
    if high != -low and not is_random:
        raise DefenseError(
            "DPSGD: processes hold different examples at one index: shuffle and split the data by "
            "one seed in all processes"
        )


def _digest(dataset: Any) -> int:
    """Return a digest of a few examples, of 48 bits, which float64 represents exactly."""
    last = len(dataset) - 1
    examples = [dataset[last * i // (COMPARED - 1)] for i in range(COMPARED)]
    digest = hashlib.sha256("\0".join(values_in(examples)).encode()).digest()
    return int.from_bytes(digest[:6], "big")
