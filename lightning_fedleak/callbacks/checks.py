"""What is checked before the first step: attacks, stages, clients, surfaces."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

import torch
from lightning.pytorch.strategies import (
    DDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
    Strategy,
)
from lightning.pytorch.utilities import rank_zero_warn
from torch import nn
from torch.optim import Optimizer

from lightning_fedleak.anatomy import EMBEDDING_WEIGHT, HEAD_BIAS, HEAD_WEIGHT, Anatomy
from lightning_fedleak.attacks.base import Attack
from lightning_fedleak.attacks.inversion import InversionAttack
from lightning_fedleak.attacks.membership import MembershipAttack
from lightning_fedleak.attacks.public_text import PublicText
from lightning_fedleak.callbacks.look import Plan
from lightning_fedleak.snapshots import Stage
from lightning_fedleak.strategies import DefendedStrategy
from lightning_fedleak.threats import (
    DISHONEST_SERVER,
    HONEST_BUT_CURIOUS,
    Capability,
    require,
)

SURFACE_CAPABILITIES = {
    HEAD_WEIGHT: Capability.SEES_HEAD_GRADIENT,
    HEAD_BIAS: Capability.SEES_HEAD_BIAS_GRADIENT,
    EMBEDDING_WEIGHT: Capability.SEES_EMBEDDING_GRADIENT,
}


def check_attacks(attacks: Sequence[Attack]) -> None:
    """Refuses an empty list, classes in place of instances, and names that cannot be logged.

    Raises:
        ValueError: no attacks, two alike, or a name that is no part of a log name.
        TypeError: something that is no attack.
    """
    if not attacks:
        raise ValueError("LeakageMonitor needs at least one attack; got an empty list")
    for attack in attacks:
        if not isinstance(attack, Attack):
            raise TypeError(
                f"attacks must be instances of Attack, such as FlatChat(); got {attack!r}"
            )
        if not re.fullmatch(r"[A-Za-z0-9_.\-]+", attack.name):
            raise ValueError(
                f"the name {attack.name!r} cannot be part of a log name: use letters, digits, "
                "'_', '-' and '.'"
            )
    names = [a.name for a in attacks]
    double = sorted({n for n in names if names.count(n) > 1})
    if double:
        raise ValueError(
            f"several attacks are named {', '.join(double)}: their results would overwrite each "
            "other in the logs. Give each a name: FlatChat(name='flatchat_abs')."
        )


def assumed_of(
    attacks: Sequence[Attack], given: Collection[Capability] | None
) -> frozenset[Capability]:
    """What the adversary has besides what it sees; by default what the attacks are about."""
    if given is not None:
        return frozenset(given)
    games = any(isinstance(a, MembershipAttack) for a in attacks)
    return DISHONEST_SERVER if games else HONEST_BUT_CURIOUS


def check_rounds(
    local_steps: int | None,
    attacks: Sequence[Attack],
    stages: Sequence[Stage],
    *,
    head_own_part: bool,
) -> None:
    """Refuses rounds of local steps beside what reads single gradients.

    Raises:
        ValueError: says what to leave out.
    """
    if local_steps is None:
        return
    if local_steps < 1 or tuple(stages) != (Stage.SHARED,) or head_own_part:
        raise ValueError(
            "local_steps must be a positive number with stages=('shared',) and without "
            f"head_own_part; got local_steps={local_steps}, "
            f"stages={tuple(str(s) for s in stages)}, head_own_part={head_own_part}"
        )
    others = [a.name for a in attacks if isinstance(a, MembershipAttack | InversionAttack)]
    if others:
        raise ValueError(
            f"local_steps attacks a weight change, and '{others[0]}' reads what one step sends: "
            "give membership and inversion attacks a LeakageMonitor of their own, without "
            "local_steps"
        )


def check_processes(
    processes: int, client: str, *, scored: bool, rounds: bool, head_own_part: bool
) -> None:
    """Refuses what one process cannot tell of a run of several.

    Args:
        processes: of the run.
        client: ``"rank"`` or ``"world"``.
        scored: the user's canaries are scored over looks.
        rounds: weight changes of several steps are attacked.
        head_own_part: the head's own part of a tied matrix is attacked.

    Raises:
        ValueError: says what to leave out.
    """
    if processes == 1:
        return
    if scored:
        raise ValueError(
            "score_canaries= needs every release of the run, and each process sees its own "
            "client's: run one process, or leave score_canaries out"
        )
    if rounds and client == "rank":
        raise ValueError(
            "local_steps describes one client that trains on its own; DDP averages at every step. "
            "Use client='world', or run one process."
        )
    if head_own_part and client == "world":
        raise ValueError(
            "head_own_part=True is taken inside each process's backward, and with client='world' "
            "the client's batch is spread over several: leave it out, or run one process"
        )


def check_canaries(attacks: Sequence[Attack], stages: Sequence[Stage]) -> None:
    """Refuses canaries of the user's that nothing would be asked about.

    Raises:
        ValueError: no membership attack, or what leaves the client is not measured.
    """
    if not any(isinstance(a, MembershipAttack) for a in attacks):
        raise ValueError(
            "canaries= are texts that membership attacks are asked for, and none is listed: add "
            "FCMembership(layer=6), say"
        )
    if Stage.SHARED not in stages:
        raise ValueError("canaries= are measured on what leaves the client: add 'shared' to stages")


def check_held_out(attacks: Sequence[Attack], held_out: PublicText | None) -> None:
    """Refuses non-members that a membership attack was calibrated on.

    Raises:
        ValueError: the attack's public text is the text that is held out.
    """
    for attack in attacks:
        public = getattr(attack, "public_text", None)
        if not isinstance(attack, MembershipAttack) or held_out is None:
            continue
        if isinstance(public, PublicText) and same_texts(public, held_out):
            raise ValueError(
                f"held_out= is the public text that '{attack.name}' is calibrated on, so that the "
                "games' non-members would be texts it knows to be outside: split the text, one "
                "part for each"
            )


def same_texts(one: PublicText, other: PublicText) -> bool:
    """Whether two public texts are one, token by token."""
    if one is other:
        return True
    both = zip(one.sentences, other.sentences, strict=False)
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in both)


def known_stages(stages: Sequence[str] | str) -> tuple[Stage, ...]:
    """Stages in their order on the way to the server, each once.

    Raises:
        ValueError: an unknown stage, or none.
    """
    given = [stages] if isinstance(stages, str) else list(stages)
    known = [str(s) for s in Stage]
    if not given or any(s not in known for s in given):
        raise ValueError(f"stages must be some of {known}, got {given}")
    return tuple(s for s in Stage if str(s) in given)


def resolve_client(given: str | None, strategy: Strategy) -> str:
    """Who is a client: what the user said, else what the strategy says, else each rank.

    Raises:
        ValueError: the two contradict each other, or it is unknown what the strategy shares when.
    """
    of_strategy = strategy.client if isinstance(strategy, DefendedStrategy) else None
    if of_strategy and given and of_strategy != given:
        raise ValueError(
            f"LeakageMonitor(client={given!r}) contradicts the strategy's client={of_strategy!r}: "
            "leave the monitor's out"
        )
    client = str(given or of_strategy or "rank")
    if isinstance(strategy, (SingleDeviceStrategy, DDPStrategy)):
        return client
    if isinstance(strategy, ModelParallelStrategy) and client == "world":
        return client
    raise ValueError(
        f"LeakageMonitor does not know what {type(strategy).__name__} shares when. It works with a "
        "single device, with DDP, and with ModelParallelStrategy under client='world'."
    )


def plan_attack(
    attack: Attack,
    anatomy: Anatomy,
    optimizers: Sequence[Optimizer],
    assumed: frozenset[Capability],
    *,
    reduces_all: bool,
) -> Plan:
    """Checks an attack against this model and run.

    What a :class:`MembershipAttack` reads is always exposed: the server has added it itself, in
    front of which no layer of the client's needs to be trained. So are the hidden states that an
    :class:`InversionAttack` reads: who lists one has a split there. Who knows the model knows its
    bottom.

    Args:
        attack: the attack.
        anatomy: the model's parts.
        optimizers: the run's optimizers.
        assumed: what the adversary has besides what it sees.
        reduces_all: every trainable parameter leaves the client (DDP), not only those that an
            optimizer owns.

    Raises:
        ThreatModelError: the adversary lacks a capability in this setting.
        ValueError: the attack reads parameters of several optimizers, or no gradients; or the model
            has no such layer.
    """
    held = set(assumed)
    held.update(
        c for role, c in SURFACE_CAPABILITIES.items() if anatomy.parameter(role) is not None
    )
    if anatomy.kind == "classifier":
        held -= set(SURFACE_CAPABILITIES.values())
    if isinstance(attack, InversionAttack):
        held.add(Capability.SEES_ACTIVATIONS)
    if Capability.KNOWS_MODEL in held:
        held.add(Capability.KNOWS_BOTTOM_MODEL)
    require(attack.name, attack.threat_model, held)
    surfaces = attack.needs(anatomy)
    if isinstance(attack, MembershipAttack | InversionAttack):
        return Plan(attack, (), True, None)
    roles = surfaces.gradients
    if not roles or surfaces.layers:
        raise ValueError(
            f"attack '{attack.name}' asks for activations or for nothing; LeakageMonitor shows "
            "attacks the gradients of parameters, plays membership games, and shows activations to "
            "an InversionAttack"
        )
    owners: list[Optimizer] = []
    exposed = True
    for role in roles:
        owner = _owner(anatomy.parameter(role), optimizers)
        exposed &= anatomy.trainable(role) and (owner is not None or reduces_all)
        if owner is not None and all(owner is not o for o in owners):
            owners.append(owner)
    if exposed and len(owners) > 1:
        raise ValueError(
            f"attack '{attack.name}' reads {', '.join(roles)}, which are stepped by different "
            "optimizers. Give these parameters to one optimizer, or leave this attack out."
        )
    return Plan(attack, roles, exposed, owners[0] if owners else None)


def check_optimizers(optimizers: Sequence[Optimizer], attacks: Sequence[Attack]) -> None:
    """Refuses attacks on gradients where nothing steps, so that none is seen to leave.

    Raises:
        ValueError: Lightning's stand-in for no optimizer is all there is.
    """
    names = [a.name for a in attacks if not isinstance(a, InversionAttack)]
    if names and not any(group["params"] for o in optimizers for group in o.param_groups):
        raise ValueError(
            f"LeakageMonitor: '{names[0]}' reads what leaves the client as an optimizer steps, and "
            "configure_optimizers returned None. Return the optimizer; where gradients are sent "
            "without one, torch.optim.SGD(self.parameters(), lr=0.0) changes no weight."
        )


def check_games(
    attacks: Sequence[Attack], strategy: Strategy, stages: Sequence[Stage], client: str
) -> None:
    """Refuses membership games where the client's part of them cannot be told.

    Raises:
        ValueError: says which setting to change.
    """
    names = [a.name for a in attacks if isinstance(a, MembershipAttack)]
    if not names:
        return
    who = f"LeakageMonitor: '{names[0]}' plays membership games, which"
    if isinstance(strategy, ModelParallelStrategy):
        raise ValueError(
            f"{who} need whole layers; {type(strategy).__name__} shards them. Use DDP with "
            "client='rank', or one device; attacks on words and texts run under FSDP2 too."
        )
    if getattr(strategy, "world_size", 1) == 1:
        return
    if client == "world":
        raise ValueError(
            f"{who} ask one process's batch; with client='world' the batch is spread over "
            "several. Use client='rank', or run one process."
        )
    if Stage.AGGREGATE in stages:
        raise ValueError(
            f"{who} ask one client's batch; what is left of it in the mean over clients is not "
            "computed. Leave 'aggregate' out of stages=, or give these attacks a monitor of their "
            "own."
        )


def _owner(parameter: nn.Parameter | None, optimizers: Sequence[Optimizer]) -> Optimizer | None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if any(p is parameter for p in group["params"]):
                return optimizer
    return None


def warn_of_adaptive_updates(plans: Sequence[Plan]) -> None:
    """Says that attacks made for gradients understate what an adaptive optimizer's update tells."""
    adaptive = {
        type(p.optimizer).__name__
        for p in plans
        if p.optimizer is not None and type(p.optimizer) is not torch.optim.SGD
    }
    if adaptive:
        rank_zero_warn(
            f"LeakageMonitor(local_steps=...): the update of {', '.join(sorted(adaptive))} is no "
            "sum of gradients, and these attacks read little from it (measured: F1 .94 to .98 "
            "after SGD, below .25 after Adam). Values near 0 do not mean 'safe': an adversary "
            "that calibrates on such updates was not tried."
        )


def warn_of_untested(plans: Sequence[Plan], anatomy: Anatomy) -> None:
    """Says once which attacks have nothing to read, and which surfaces no attack reads."""
    tested = {r for plan in plans if plan.exposed for r in plan.roles}
    trained = [n for n in anatomy.trainable_names() if n not in _names(anatomy, tested)]
    shown = ", ".join(trained[:3]) + (f" and {len(trained) - 3} more" if trained[3:] else "")
    for plan in plans:
        if not plan.exposed:
            rank_zero_warn(
                f"LeakageMonitor: '{plan.attack.name}' reads the gradient of "
                f"{', '.join(plan.roles)}, which is not shared in this run (not trained). It is "
                f"logged as 0 with leakage/{plan.attack.name}/exposed = 0. That is not 'safe': "
                f"the gradients of {len(trained)} other parameters ({shown or 'none'}) do leave "
                "the client, and no attack of this monitor reads them."
            )


def _names(anatomy: Anatomy, roles: Collection[str]) -> set[str]:
    names = {anatomy.parameter_name(r) for r in roles}
    if anatomy.tied and {HEAD_WEIGHT, EMBEDDING_WEIGHT} & set(roles):
        names |= {anatomy.parameter_name(HEAD_WEIGHT), anatomy.parameter_name(EMBEDDING_WEIGHT)}
    return {n for n in names if n is not None}
