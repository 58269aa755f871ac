"""Settings of DP-SGD, the guarantee, and the checks before the first step.

A *release* is one noised update. A *gate* is a rule that acts during training if measured leakage
is too high; with ``action="harden"`` it doubles the noise.

The checks are of the Trainer, the model and the number of steps. Each raises an error for a setting
under which the guarantee would not hold, and says what to change. The *host* is the trainer or
training loop. Several processes may together be one client (a *team*); then their shards and data
are checked too.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils.data import DataLoader

from lightning_fedleak.defenses.accounting.accounting import Trust
from lightning_fedleak.defenses.base import (
    DefenseContext,
    DefenseError,
    State,
    check_choice,
    check_integer,
    check_number,
    refuse,
)
from lightning_fedleak.defenses.dpsgd.adam import DPAdamBC
from lightning_fedleak.defenses.dpsgd.clipped_sum import MaxGradNorm, QuantileClip
from lightning_fedleak.defenses.dpsgd.per_sample import Clipping
from lightning_fedleak.defenses.dpsgd.recorder import trains
from lightning_fedleak.defenses.dpsgd.rerun import adapted_layers, check_adapted, rerun
from lightning_fedleak.defenses.dpsgd.rules import GHOST_RULES, check_experts, rule_of
from lightning_fedleak.defenses.host import Host
from lightning_fedleak.defenses.processes import Team

# How the user of a row is found: by the name of a column, a function of an example, or a sequence
# with a key for each row.
GroupBy = str | Callable[[Any], Any] | Sequence[Any]


@dataclass(frozen=True)
class ClipSettings:
    """How gradients are clipped.

    Attributes:
        form: The form of per-sample gradients in memory: ``"ghost"`` for factors, ``"per_sample"``
            for all numbers, ``"auto"`` for the smaller one in each layer.
        gamma: The gamma of automatic clipping, ``max_grad_norm="auto"``.
        loss: ``"trusted"`` if you have proved that the loss is a mean over samples of terms that
            depend on one sample each, ``"checked"`` to let DPSGD check it.

    Raises:
        DefenseError: A value is out of range.
    """

    form: Clipping = "auto"
    gamma: float = 0.01
    loss: Literal["checked", "trusted"] = "checked"

    def __post_init__(self) -> None:
        check_choice("DPSGD: form", self.form, ("auto", "per_sample", "ghost"))
        check_number("DPSGD: gamma", self.gamma, above=0)
        check_choice("DPSGD: loss", self.loss, ("checked", "trusted"))


@dataclass(frozen=True)
class ReleaseSettings:
    """The trust in the server, and what happens when the budget is spent.

    Attributes:
        trust: ``"local"`` if the server sees the update of each client, ``"central"`` if it sees
            only their sum (secure aggregation), so that each client adds a share of the noise.
        on_budget: Whether the fit ends (``"stop"``) or :class:`BudgetSpent` is raised (``"raise"``)
            when ``target_epsilon`` is spent. Nothing more is released.
        max_hardenings: The number of times that a gate may double the noise, which needs
            ``accountant="filter"``; None for no limit.

    Raises:
        DefenseError: A value is out of range.
    """

    trust: Trust = "local"
    on_budget: Literal["stop", "raise"] = "stop"
    max_hardenings: int | None = None

    def __post_init__(self) -> None:
        check_choice("DPSGD: trust", self.trust, ("local", "central"))
        check_choice("DPSGD: on_budget", self.on_budget, ("stop", "raise"))
        check_integer("DPSGD: max_hardenings", self.max_hardenings, at_least=0, optional=True)


@dataclass(frozen=True)
class Users:
    """Users as the unit of privacy: all rows of a user are drawn, clipped and accounted together.

    Examples:
        >>> from lightning_fedleak import DPSGD, Users
        >>> user = Users(group_by="author", rows_per_user=4)
        >>> DPSGD(1.0, noise_multiplier=1.0, target_delta=1e-5, unit=user).name
        'dpsgd'

    Attributes:
        group_by: What gives the user of a row: the name of a column, a function of an example, or
            a sequence with a key for each row.
        rows_per_user: The largest number of rows of one user in a batch, drawn at random; None for
            all rows.

    Raises:
        DefenseError: A value is out of range.
    """

    group_by: GroupBy
    rows_per_user: int | None = None

    def __post_init__(self) -> None:
        check_integer("DPSGD: rows_per_user", self.rows_per_user, optional=True)


Unit = Literal["example"] | Users
"""The unit of privacy: what is added or removed between neighbouring datasets."""


def check_budget(
    noise_multiplier: float | None,
    target_epsilon: float | None,
    target_delta: float | None,
    seed: int | None,
    accountant: str,
) -> None:
    """Raise an error for arguments of the budget that are out of range or contradict each other.

    ``accountant="filter"`` needs ``target_epsilon``; ``noise_multiplier`` may be passed with it.
    Other accountants need exactly one of them.

    Raises:
        DefenseError: Names the arguments.
    """
    check_choice("DPSGD: accountant", accountant, ("prv", "rdp", "filter"))
    is_filter, has_target = accountant == "filter", target_epsilon is not None
    has_both_or_none = (noise_multiplier is not None) == has_target
    check_number("DPSGD: noise_multiplier", noise_multiplier, at_least=0, optional=True)
    check_number("DPSGD: target_epsilon", target_epsilon, above=0, optional=True)
    refusals: dict[str, object] = {
        "give one of noise_multiplier and target_epsilon": not is_filter and has_both_or_none,
        "target_epsilon needs target_delta, and accountant='filter' needs both": (
            target_delta is None if has_target else is_filter
        ),
        "with a seed no epsilon holds: leave out seed or target_epsilon": has_target
        and seed is not None,
    }
    refuse("DPSGD: ", refusals)
    check_number("DPSGD: target_delta", target_delta, above=0, below=1, optional=True)


def check_combination(
    max_grad_norm: MaxGradNorm, unit: Unit, max_physical_batch_size: int | None
) -> None:
    """Raise an error for a clip norm, unit or piece size that is invalid or contradicts another.

    Raises:
        DefenseError: Names the argument.
    """
    if max_grad_norm != "auto" and not isinstance(max_grad_norm, QuantileClip):
        check_number(
            "DPSGD: max_grad_norm", max_grad_norm, above=0, hint="or 'auto', QuantileClip()"
        )
    max_rows = max_physical_batch_size
    check_integer("DPSGD: max_physical_batch_size", max_rows, optional=True)
    if not isinstance(unit, Users):
        check_choice("DPSGD: unit", unit, ("example",), hint="or Users(group_by)")
    elif max_rows is not None and (unit.rows_per_user or math.inf) > max_rows:
        raise DefenseError(
            f"DPSGD: with max_physical_batch_size={max_rows} pass Users(..., "
            f"rows_per_user={max_rows}) or fewer"
        )


def check_audit(
    check: bool | int, unit: Unit, noise_multiplier: float | None, max_grad_norm: MaxGradNorm
) -> None:
    """Raise an error for settings under which ``DPSGD(check=...)`` cannot audit the training.

    That audit plants a gradient in a batch now and then, and tests whether the release shows it.

    Raises:
        DefenseError: Names the contradicting arguments.
    """
    interval = int(check) if isinstance(check, bool) else check
    check_integer("DPSGD: check", interval, at_least=0, hint="True, or steps between probes")
    if check and (
        isinstance(unit, Users) or isinstance(max_grad_norm, QuantileClip) or noise_multiplier == 0
    ):
        raise DefenseError("DPSGD: check needs noise, a fixed clip norm, and unit='example'")


def check_continued(state: State, releases: int, trust: Trust, unit: str) -> None:
    """Raise an error for a checkpoint whose releases cannot be accounted together with this run.

    Raises:
        DefenseError: They were made under ``trust="central"`` and this run is under ``"local"``, or
            they were made for another unit of privacy.
    """
    earlier_trust, earlier_unit = state.get("trust", trust), state.get("unit", "example")
    refusals = {
        "trust='central'": earlier_trust == "central" and trust == "local",
        f"unit={earlier_unit!r}": earlier_unit != unit,
    }
    owner = f"DPSGD: continue with the setting of the checkpoint's {releases} releases, or begin a "
    refuse(f"{owner}new run from a model that this data did not train: ", refusals)


def guarantee_of(trust: Trust, seed: int | None, unit: str, *, fixed_budget: bool) -> str:
    """Return what DP-SGD with these settings guarantees, and against whom.

    Args:
        trust: The trust in the server.
        seed: The seed of the noise, which can be guessed; None for secret noise.
        unit: The unit of privacy, ``"example"`` or ``"user"``.
        fixed_budget: Whether the accountant is a filter, with a budget fixed before the run.
    """
    if seed is not None:
        return "none: with a seed the noise can be guessed and subtracted"
    central = "only the sum of all clients' updates (secure aggregation)"
    server = "every client's shared updates" if trust == "local" else central
    protected = "one example" if unit == "example" else "one user with all of their rows,"
    shared = "an example" if unit == "example" else "a user"
    budget = "the budget that was fixed before the run"
    if not fixed_budget:
        budget = "the epsilon that `privacy` gives"
    return (
        f"against whoever sees {server}: (epsilon, delta)-differential privacy of {protected} "
        f"added or removed, for all releases together, with {budget}. If several clients hold "
        f"{shared}, add their epsilons. Not covered: what is logged or sent otherwise, and "
        "decisions taken in sight of the data."
    )


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


def check_model(root: nn.Module, clipping: str) -> None:
    """Refuse a model with trained layers for which there are no per-sample gradients.

    Raises:
        DefenseError: Names the layer and the remedy.
    """
    trainable = any(p.requires_grad for p in root.parameters())
    refuse("DPSGD: ", {"every parameter is frozen: unfreeze some, or omit DPSGD": not trainable})
    check_experts(root)
    # Some PEFT layers are run again as a whole; the modules inside them need no rule.
    adapted, inner = adapted_layers(root)
    for name, module in root.named_modules():
        layer = f"DPSGD: '{name or type(module).__name__}' ({type(module).__name__}) "
        is_batch_norm = isinstance(module, nn.modules.batchnorm._BatchNorm)
        is_instance_norm = isinstance(module, nn.modules.instancenorm._InstanceNorm)
        refusals: dict[str, object] = {
            "normalises by statistics of the batch. Use GroupNorm or LayerNorm "
            "(opacus.validators.ModuleValidator.fix does it), or freeze it in eval mode.": (
                is_batch_norm and module.training
            ),
            "changes ranks by gradients without noise. Use LoraConfig(use_rslora=True), or "
            "LoHaConfig.": hasattr(module, "update_and_allocate"),
            "keeps statistics of the data. Build it with track_running_stats=False.": (
                is_instance_norm and module.training and module.track_running_stats
            ),
        }
        if module in adapted or (module not in inner and trains(module)):
            rule = rerun if module in adapted else rule_of(name, module)
            weights = module.parameters(recurse=module in adapted)
            has_matrix = any(p.dim() > 1 for p in weights if p.requires_grad)
            refusals |= {
                "is in eval mode and trained. Call `model.train()` where you build it, or freeze "
                "it.": not module.training,
                "has no rule for clip=ClipSettings(form='ghost'). Use form='auto'.": (
                    clipping == "ghost" and rule not in GHOST_RULES and has_matrix
                ),
            }
        refuse(layer, refusals)
    check_adapted(adapted)


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
    digest = hashlib.sha256("\0".join(_values_in(examples)).encode()).digest()
    return int.from_bytes(digest[:6], "big")


def _values_in(value: Any) -> Iterator[str]:
    """Yield the content of an example, or of a value in it, as texts."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield repr(key)
            yield from _values_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _values_in(item)
    elif hasattr(value, "tolist"):
        yield repr(value.tolist())
    elif hasattr(value, "tobytes"):  # an image
        yield repr(value.tobytes())
    elif isinstance(value, str | bytes | int | float):
        yield repr(value)
