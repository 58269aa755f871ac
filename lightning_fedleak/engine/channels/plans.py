"""Plans: whether an attack fits a model and a run, and which gradients it reads there.

Attacks name the parameters that they read by *roles*, such as ``"head.weight"`` for the matrix of
the output head, or by the model's own parameter names. The plan of an attack has these roles, the
optimizer that steps the parameters, and whether their gradients are shared (*exposed*). It is made
before the first step and again if layers are frozen or unfrozen.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch.optim import Optimizer

from lightning_fedleak.attacks import Attack, Capability, RunFacts, require
from lightning_fedleak.engine.run import AUTOCAST, Run
from lightning_fedleak.model.anatomy import EMBEDDING_WEIGHT, HEAD_BIAS, HEAD_WEIGHT, Anatomy
from lightning_fedleak.model.model_runs import why_not_run

# What an adversary sees through the gradient of a parameter, by its role.
SURFACE_CAPABILITIES = {
    HEAD_WEIGHT: Capability.SEES_HEAD_GRADIENT,
    HEAD_BIAS: Capability.SEES_HEAD_BIAS_GRADIENT,
    EMBEDDING_WEIGHT: Capability.SEES_EMBEDDING_GRADIENT,
}
# An adversary with one of these runs the model, or its first layers, on texts.
_MODEL_CAPABILITIES = frozenset((Capability.KNOWS_MODEL, Capability.KNOWS_BOTTOM_MODEL))
# Attacks that need one of these read words off the output head.
HEAD_CAPABILITIES = frozenset((Capability.SEES_HEAD_GRADIENT, Capability.SEES_HEAD_BIAS_GRADIENT))


@dataclass(frozen=True)
class Plan:
    """What an attack reads in one run.

    Attributes:
        attack: The attack.
        roles: The parameters whose gradients it reads, by role; empty if it reads layers that a
            server adds, or hidden states at a split.
        exposed: Whether all of these gradients are shared.
        optimizer: The optimizer of these parameters; None if no optimizer has any of them.
    """

    attack: Attack
    roles: tuple[str, ...]
    exposed: bool
    optimizer: Optimizer | None

    def facts(self, run: Run, local_steps: int | None, step: int) -> RunFacts:
        """Return the facts of the run that the attack gets, see :meth:`Attack.meet`.

        Args:
            run: The run.
            local_steps: The number of optimizer steps of a round; None for single gradients.
            step: The optimizer step at which the run begins.
        """
        compression, defended = None, set[Literal["gradients", "batches", "activations"]]()
        for defense in run.defenses:
            # A defence that defers releases parts of an update later: attacks read its input.
            compression = compression or (None if defense.defers else defense.compression)
            if defense.acts_on_gradients:
                defended.add("gradients")
            if defense.acts_on_batches:
                defended.add("batches")
            if defense.activation_layers:
                defended.add("activations")
        return RunFacts(
            precision=run.precision,
            autocast=AUTOCAST.get(run.precision),
            optimizer=None if self.optimizer is None else type(self.optimizer).__name__,
            optimizer_settings=self._settings(run),
            local_steps=local_steps,
            defended=frozenset(defended),
            step=step,
            compression=compression,
        )

    def _settings(self, run: Run) -> Mapping[str, object]:
        """Return the settings of the parameter group that the attack reads, without tensors."""
        if self.optimizer is None:
            return {}
        ids = {id(run.anatomy.parameter(role)) for role in self.roles}
        groups = self.optimizer.param_groups
        group = next((g for g in groups if ids & {id(p) for p in g["params"]}), groups[0])
        return plain_settings(group)


def plain_settings(group: Mapping[str, object]) -> dict[str, object]:
    """Return the settings of plain types of an optimizer's parameter group."""
    plain = (int, float, bool, str, tuple, type(None))
    return {name: value for name, value in group.items() if isinstance(value, plain)}


def admit(attack: Attack, sees: Collection[Capability], run: Run) -> None:
    """Check, once in a fit, that the adversary has the capabilities that an attack needs.

    An adversary who knows the model also knows its bottom part.

    Args:
        attack: The attack.
        sees: The capabilities that the adversary has because the channel shows it something.
        run: The run.

    Raises:
        ValueError: Capabilities are missing; the message names all of them.
    """
    surfaces = SURFACE_CAPABILITIES.items()
    capabilities = {*run.assumed, *sees}
    capabilities.update(c for role, c in surfaces if run.anatomy.parameter(role) is not None)
    if Capability.KNOWS_MODEL in capabilities:
        capabilities.add(Capability.KNOWS_BOTTOM_MODEL)
    for role, layer in ((HEAD_WEIGHT, run.anatomy.head), (EMBEDDING_WEIGHT, run.anatomy.embedding)):
        is_absent = SURFACE_CAPABILITIES[role] in attack.threat_model.needs - capabilities
        if layer is not None and is_absent:
            why = "no parameter here (pruned, or parametrized)"
            raise ValueError(f"attack '{attack.name}' reads {role}, which is {why}: remove it")
    require(attack.name, attack.threat_model, capabilities)


def no_sum(plan: Plan) -> str | None:
    """Return why an attack cannot read the updates of its optimizer; None if it can.

    A weight change is a sum of gradients only under SGD. Adaptive optimizers, such as Adam, scale
    each entry; few attacks can read their updates.
    """
    optimizer = plan.optimizer
    adaptive = optimizer is not None and type(optimizer) is not torch.optim.SGD
    if not adaptive or plan.attack.reads_adaptive_updates:
        return None
    return (
        f"the update of {type(optimizer).__name__} is no sum of gradients, and this attack reads "
        "these; AlignedFlatChat and GradientMembership read such updates"
    )


def check_forward(attack: Attack, anatomy: Anatomy) -> None:
    """Refuse an attack that runs the model on its own texts if the model cannot run on token ids.

    Raises:
        ValueError: The model cannot; the message names the method to define.
    """
    why_not = why_not_run(anatomy) if _MODEL_CAPABILITIES & attack.threat_model.needs else None
    if why_not is not None:
        raise ValueError(f"attack '{attack.name}' runs the model on texts, and {why_not}")


def gradient_plan(attack: Attack, run: Run) -> Plan:
    """Return the plan of an attack on gradients of the client's own parameters, checked.

    Raises:
        ValueError: The attack reads words off a head whose rows are a classifier's outputs, or
            parameters of several optimizers.
    """
    anatomy = run.anatomy
    if anatomy.kind == "classifier" and HEAD_CAPABILITIES & attack.threat_model.needs:
        raise ValueError(
            f"attack '{attack.name}' reads words off an output head with a row for each token, and "
            "this model has no such head. Remove it; BagOfWords reads the embeddings' "
            "gradient, SubspaceWords that of the first projections."
        )
    # DDP reduces every trainable parameter, not only those that an optimizer owns.
    reduces_all = run.under_ddp and run.client == "rank"
    roles = attack.needs(anatomy).gradients
    owners: list[Optimizer] = []
    exposed = True
    for role in roles:
        groups = ((o, p) for o in run.optimizers for g in o.param_groups for p in g["params"])
        owner = next((o for o, p in groups if p is anatomy.parameter(role)), None)
        exposed &= anatomy.trainable(role) and (owner is not None or reduces_all)
        if owner is not None and all(owner is not o for o in owners):
            owners.append(owner)
    if exposed and len(owners) > 1:
        raise ValueError(
            f"attack '{attack.name}' reads {', '.join(roles)}, which are stepped by different "
            "optimizers. Give these parameters to one optimizer, or leave this attack out."
        )
    return Plan(attack, roles, exposed, owners[0] if owners else None)
