"""What DP-SGD refuses at setup, each with what to change."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from lightning_fedleak.defenses.base import DefenseContext, DefenseError
from lightning_fedleak.defenses.dpsgd.batch import trainer_of
from lightning_fedleak.defenses.dpsgd.clipped_sum import LayerNoise, MaxGradNorm
from lightning_fedleak.defenses.dpsgd.correlated_noise import Mechanism
from lightning_fedleak.defenses.dpsgd.per_sample import Clipping, has_ghost_rule, refusal
from lightning_fedleak.defenses.dpsgd.recorder import owns_parameters, trains

PRECISIONS = ("32-true", "64-true", "bf16-mixed", "bf16-true")


def check_trainer(context: DefenseContext, *, poisson: bool) -> None:
    """Refuses settings of the Trainer that break the guarantee or would be lost in silence.

    Args:
        context: holds the Trainer.
        poisson: batches are Poisson samples.

    Raises:
        DefenseError: says which setting.
    """
    if context.precision not in PRECISIONS:
        raise DefenseError(
            f"DPSGD: precision={context.precision!r} is not supported: a gradient scaler unscales "
            "the summed gradient only, not each sample's. Use 'bf16-mixed' or '32-true'."
        )
    if context.device.type == "mps":
        raise DefenseError(
            "DPSGD adds up squared norms in float64, which an Apple GPU (mps) does not have. Use "
            "Trainer(accelerator='cpu')."
        )
    if not getattr(context.root, "automatic_optimization", True):
        raise DefenseError(
            "DPSGD: manual optimization hides the loss, and with it whether it is a mean of "
            "per-sample means. Return the loss from training_step with "
            "automatic_optimization=True."
        )
    trainer = trainer_of(context)
    if trainer is None:
        return
    if getattr(trainer, "gradient_clip_val", None):
        raise DefenseError(
            "DPSGD clips each sample's gradient by max_grad_norm, and gradient_clip_val of the "
            "Trainer would have no effect on what it releases. Leave gradient_clip_val out."
        )
    accumulated = getattr(trainer, "accumulate_grad_batches", 1)
    if accumulated != 1:
        raise DefenseError(
            f"DPSGD: accumulate_grad_batches={accumulated} joins several batches into one release, "
            "in which a sample can occur more than once and each loss is divided before it is "
            f"clipped. Use accumulate_grad_batches=1 and a batch_size {accumulated} times as big: "
            "DPSGD(max_physical_batch=...) runs it in pieces of as many rows as fit into memory."
        )
    if poisson and getattr(trainer, "overfit_batches", False):
        raise DefenseError(
            f"DPSGD draws each batch from all of the data, so that "
            f"overfit_batches={trainer.overfit_batches} would not repeat the same batches. Give "
            "the loader a few rows alone (torch.utils.data.Subset), or DPSGD(poisson=False)."
        )


def check_shards(root: nn.Module, processes: int) -> None:
    """Refuses trained parameters that are not shared by all processes of the client (FSDP2).

    Raises:
        DefenseError: says which.
    """
    for name, parameter in root.named_parameters():
        if not (parameter.requires_grad and isinstance(parameter, DTensor)):
            continue
        if parameter.device_mesh.size() != processes:
            raise DefenseError(
                f"DPSGD: '{name}' is sharded over {parameter.device_mesh.size()} of the client's "
                f"{processes} processes. Give fully_shard a mesh of all of them."
            )
        if not all(type(p) in (Shard, Replicate) for p in parameter.placements):
            raise DefenseError(
                f"DPSGD: '{name}' is placed as {parameter.placements}, and only plain shards and "
                "replicas are supported. Use fully_shard alone, without tensor parallelism."
            )


def check_model(root: nn.Module, clipping: Clipping) -> None:
    """Refuses a model whose trainable parameters have no per-sample gradients.

    Raises:
        DefenseError: says which layer, and what to do with it.
    """
    if not any(p.requires_grad for p in root.parameters()):
        raise DefenseError(
            "DPSGD: every parameter is frozen, so nothing is trained. Unfreeze some, or leave "
            "DPSGD out."
        )
    for name, module in root.named_modules():
        _check_statistics(name, module)
        if not (owns_parameters(module) and trains(module)):
            continue
        reason = refusal(name, module)
        if reason:
            raise DefenseError(f"DPSGD: {reason}")
        if not module.training:
            raise DefenseError(
                f"DPSGD: '{name or type(module).__name__}' is in eval mode and trained, as after "
                "`from_pretrained`: without dropout, against most recipes. Call `model.train()` "
                "where you build it, or freeze it."
            )
        own = [p for p in module._parameters.values() if p is not None and p.requires_grad]
        if clipping == "ghost" and not has_ghost_rule(module) and any(p.dim() > 1 for p in own):
            raise DefenseError(
                f"DPSGD: clipping='ghost' has no rule for '{name}' ({type(module).__name__}). Use "
                "clipping='auto', which multiplies out what has none, or freeze it."
            )


def _check_statistics(name: str, module: nn.Module) -> None:
    kind = type(module).__name__
    if not module.training:
        return
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        raise DefenseError(
            f"DPSGD: '{name}' ({kind}) normalises each sample by the others of its batch. Use "
            "GroupNorm or LayerNorm (opacus.validators.ModuleValidator.fix does it), or put the "
            "layer into eval mode and freeze it."
        )
    if isinstance(module, nn.modules.instancenorm._InstanceNorm) and module.track_running_stats:
        raise DefenseError(
            f"DPSGD: '{name}' ({kind}) keeps statistics of the data, which no noise covers. Build "
            "it with track_running_stats=False."
        )


def planned_steps(
    context: DefenseContext, per_epoch: int, mechanism: Mechanism = "independent"
) -> int:
    """How many optimizer steps the Trainer is going to take.

    Args:
        context: where.
        per_epoch: batches of the loader.
        mechanism: that needs to know, if it is not ``target_epsilon`` that does.

    Raises:
        DefenseError: that has no end.
    """
    trainer = trainer_of(context)
    correlated = mechanism != "independent"
    needs = f"mechanism={mechanism!r}" if correlated else "target_epsilon"
    if any(type(c).__name__ == "_LRCallback" for c in getattr(trainer, "callbacks", ())):
        other = "" if correlated else ", or give noise_multiplier: then its steps are accounted too"
        raise DefenseError(
            "DPSGD: the learning rate finder trains for steps of its own, and the noise for "
            f"{needs} would be found for those alone. Find the learning rate on public data "
            f"or in a run without DPSGD{other}."
        )
    limit = getattr(trainer, "limit_train_batches", 1.0)
    if isinstance(limit, int):
        per_epoch = min(per_epoch, limit)
    else:
        per_epoch = int(per_epoch * limit)
    epochs, most = getattr(trainer, "max_epochs", None), getattr(trainer, "max_steps", -1)
    counts = []
    if epochs is not None and epochs >= 0:
        counts.append(epochs * per_epoch)
    if most >= 0:
        counts.append(most)
    if not counts or min(counts) < 1:
        other = "" if correlated else ", or DPSGD a noise_multiplier instead"
        raise DefenseError(
            f"DPSGD: {needs} needs to know for how many steps the run goes. Give the Trainer "
            f"max_epochs or max_steps{other}."
        )
    return int(min(counts))


def check_choices(**choices: tuple[str, tuple[str, ...]]) -> None:
    """Refuses a value that is not one of those known; each argument with its value and those.

    Raises:
        DefenseError: says which argument.
    """
    for argument, (value, known) in choices.items():
        if value not in known:
            raise DefenseError(f"DPSGD: {argument}={value!r} must be one of {known}")


def check_hardening(harden_factor: float, most_notches: int | None) -> None:
    """Refuses a factor that hardens nothing, and what is no number of notches.

    Raises:
        DefenseError: says which.
    """
    if not (math.isfinite(harden_factor) and harden_factor > 1):
        raise DefenseError(f"DPSGD: harden_factor={harden_factor!r} must be a number above 1")
    whole = isinstance(most_notches, int) and not isinstance(most_notches, bool)
    if most_notches is not None and (not whole or most_notches < 0):
        raise DefenseError(
            f"DPSGD: most_notches={most_notches!r} must be a whole number of at least 0, or None"
        )


def check_mechanism(
    mechanism: str, bands: int | None, *, poisson: bool, fixed_budget: bool
) -> None:
    """Refuses bands that cannot be, and settings that correlated noise does not go with.

    Raises:
        DefenseError: says which.
    """
    check_choices(mechanism=(mechanism, ("independent", "banded", "banded_inverse")))
    if mechanism == "independent":
        if bands is not None:
            raise DefenseError(
                f"DPSGD: bands={bands!r} is for mechanism='banded' or 'banded_inverse', and the "
                "noise is independent. Pass one of them, or leave bands out."
            )
        return
    whole = isinstance(bands, int) and not isinstance(bands, bool)
    if not whole or bands < 1:  # type: ignore[operator]
        raise DefenseError(
            f"DPSGD: bands={bands!r} must be at least 1 with mechanism={mechanism!r}: over how "
            "many steps noise is correlated. 4 to 16 are usual."
        )
    if not poisson:
        raise DefenseError(
            f"DPSGD: mechanism={mechanism!r} settles itself how batches are drawn, and "
            "poisson=False takes the loader's as they are: leave it out"
        )
    if fixed_budget:
        raise DefenseError(
            f"DPSGD: mechanism={mechanism!r} needs noise that is settled before the run, and "
            "accountant='filter' is there to turn it up. Use accountant='prv' or 'rdp'."
        )


def check_clip(
    max_grad_norm: MaxGradNorm, gamma: float, per_layer: bool, layer_noise: LayerNoise
) -> None:
    """Refuses settings of clipping that are out of range or do nothing.

    Raises:
        DefenseError: says which.
    """
    if not (math.isfinite(gamma) and gamma > 0):
        raise DefenseError(f"DPSGD: gamma={gamma!r} must be a positive number")
    check_choices(layer_noise=(layer_noise, ("equal", "by_clip")))
    several = isinstance(max_grad_norm, Mapping)
    if several and per_layer:
        raise DefenseError(
            "DPSGD: max_grad_norm names layers already; leave per_layer out, which gives each "
            "layer an equal share of one norm"
        )
    if layer_noise != "equal" and not (several or per_layer):
        raise DefenseError(
            f"DPSGD: layer_noise={layer_noise!r} shares noise among layers that are clipped by "
            "themselves: pass per_layer=True, or max_grad_norm by the names of layers"
        )


def check_pieces(max_physical_batch: int | None) -> None:
    """Refuses what is no number of rows.

    Raises:
        DefenseError: says what is.
    """
    whole = isinstance(max_physical_batch, int) and not isinstance(max_physical_batch, bool)
    if max_physical_batch is not None and (not whole or max_physical_batch < 1):
        raise DefenseError(
            f"DPSGD: max_physical_batch={max_physical_batch!r} must be how many rows are run at "
            "once, at least 1, or None for all of a batch"
        )


def check_users(unit: str, grouped: bool, rows_per_user: int | None, *, poisson: bool) -> None:
    """Refuses a unit of privacy that cannot be told, or settings that do nothing for it.

    Raises:
        DefenseError: says which.
    """
    if unit == "user" and not grouped:
        raise DefenseError(
            "DPSGD: unit='user' needs group_by: the name of a column, a function of an example, or "
            "one key for each row"
        )
    if unit != "user" and (grouped or rows_per_user is not None):
        raise DefenseError(
            "DPSGD: group_by and rows_per_user are for unit='user', and the unit is an example. "
            "Pass unit='user', or leave them out."
        )
    if unit == "user" and not poisson:
        raise DefenseError(
            "DPSGD: unit='user' draws users by chance, and poisson=False takes the loader's "
            "batches as they are: leave it out"
        )
    whole = isinstance(rows_per_user, int) and not isinstance(rows_per_user, bool)
    if rows_per_user is not None and (not whole or rows_per_user < 1):
        raise DefenseError(
            f"DPSGD: rows_per_user={rows_per_user!r} must be at least 1, or None for all rows"
        )


def check_settings(
    max_grad_norm: MaxGradNorm,
    noise_multiplier: float | None,
    target_epsilon: float | None,
    target_delta: float | None,
    seed: int | None = None,
    *,
    fixed_budget: bool = False,
) -> None:
    """Refuses numbers that are out of range or contradict each other.

    With a ``fixed_budget`` the noise may be given together with the epsilon, which must be.

    Raises:
        DefenseError: says which.
    """
    norms: Iterable[object] = () if max_grad_norm == "auto" else (max_grad_norm,)
    if isinstance(max_grad_norm, Mapping):
        norms = max_grad_norm.values() or (None,)
    if not all(isinstance(n, int | float) and math.isfinite(n) and n > 0 for n in norms):
        raise DefenseError(
            f"DPSGD: max_grad_norm={max_grad_norm!r} must be a positive number, 'auto', or such "
            "numbers by the names of layers"
        )
    if fixed_budget and target_epsilon is None:
        raise DefenseError(
            "DPSGD: accountant='filter' keeps the run within a budget that is fixed before it. "
            "Give target_epsilon and target_delta."
        )
    if not fixed_budget and (noise_multiplier is None) == (target_epsilon is None):
        given = "neither" if noise_multiplier is None else "both"
        raise DefenseError(
            f"DPSGD: {given} of noise_multiplier and target_epsilon given. Give one: the noise, or "
            "the epsilon that the whole run may cost."
        )
    if noise_multiplier is not None and not (
        math.isfinite(noise_multiplier) and noise_multiplier >= 0
    ):
        raise DefenseError(
            f"DPSGD: noise_multiplier={noise_multiplier!r} must be a number of at least 0"
        )
    if target_epsilon is not None:
        if not (math.isfinite(target_epsilon) and target_epsilon > 0):
            raise DefenseError(f"DPSGD: target_epsilon={target_epsilon!r} must be positive")
        if target_delta is None:
            raise DefenseError(
                "DPSGD: target_epsilon means nothing without target_delta. Give one, below one "
                "over the number of examples."
            )
        if seed is not None:
            raise DefenseError(
                "DPSGD: with a seed the noise can be guessed and no epsilon holds. Leave out seed "
                "or target_epsilon."
            )
    if target_delta is not None and not 0 < target_delta < 1:
        raise DefenseError(f"DPSGD: target_delta={target_delta!r} must lie between 0 and 1")


__all__ = [
    "PRECISIONS",
    "check_choices",
    "check_clip",
    "check_hardening",
    "check_mechanism",
    "check_model",
    "check_pieces",
    "check_settings",
    "check_shards",
    "check_trainer",
    "check_users",
    "planned_steps",
]
