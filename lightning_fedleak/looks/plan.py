"""Checks before the first step: attacks, stages, clients, surfaces, texts."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_fedleak.anatomy import EMBEDDING_WEIGHT, HEAD_BIAS, HEAD_WEIGHT, Anatomy
from lightning_fedleak.anatomy.wrappers import matrix_shape, without_peft
from lightning_fedleak.attacks.base import Attack
from lightning_fedleak.attacks.public_text import PublicText
from lightning_fedleak.looks.run import Plan, Run
from lightning_fedleak.model_runs import why_not_run
from lightning_fedleak.snapshots import Stage
from lightning_fedleak.threats import Capability, ThreatModelError, require

SURFACE_CAPABILITIES = {
    HEAD_WEIGHT: Capability.SEES_HEAD_GRADIENT,
    HEAD_BIAS: Capability.SEES_HEAD_BIAS_GRADIENT,
    EMBEDDING_WEIGHT: Capability.SEES_EMBEDDING_GRADIENT,
}
_SMALLEST_SHARE = 0.8  # tokens over rows of the embedding; lower: fewer warnings; not tuned
_LARGEST_SHARE = 1.05  # the same ratio from above; higher: fewer warnings; not tuned
_DIFFERING_MARKS = 2  # special ids that differ before a warning; higher: fewer warnings; not tuned
_MODEL_CAPABILITIES = frozenset((Capability.KNOWS_MODEL, Capability.KNOWS_BOTTOM_MODEL))
_HEAD_CAPABILITIES = frozenset((Capability.SEES_HEAD_GRADIENT, Capability.SEES_HEAD_BIAS_GRADIENT))


def check_attacks(attacks: Sequence[Attack]) -> None:
    """Refuse an empty list, classes in place of instances, and names that cannot be logged.

    Raises:
        ValueError: no attacks, two alike, or a name that is no part of a log name.
        TypeError: something that is no attack.
    """
    if not attacks:
        raise ValueError("attacks= needs at least one attack; got an empty list")
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
        if attack.name == "worst":
            raise ValueError(
                "an attack cannot be named 'worst': leakage/worst/... is the highest of all"
            )
    names = [a.name for a in attacks]
    double = sorted({n for n in names if names.count(n) > 1})
    if double:
        raise ValueError(
            f"several attacks are named {', '.join(double)}: their results would overwrite each "
            "other in the logs. Give each a name: FlatChat(name='flatchat_abs')."
        )


def check_rounds(local_steps: int | None, stages: Sequence[Stage], *, head_own_part: bool) -> None:
    """Refuse rounds of local steps beside settings that read single gradients.

    Raises:
        ValueError: names the settings to leave out.
    """
    if local_steps is None:
        return
    if local_steps < 1 or tuple(stages) != (Stage.SHARED,) or head_own_part:
        raise ValueError(
            "local_steps must be a positive number with stages=('shared',) and without "
            f"head_own_part; got local_steps={local_steps}, "
            f"stages={tuple(str(s) for s in stages)}, head_own_part={head_own_part}"
        )


def known_stages(stages: Sequence[str] | str) -> tuple[Stage, ...]:
    """Return the stages in their order on the way to the server, each once.

    Raises:
        ValueError: an unknown stage, or none.
    """
    names = [stages] if isinstance(stages, str) else list(stages)
    choices = [str(s) for s in Stage]
    if not names or any(s not in choices for s in names):
        raise ValueError(f"stages must be some of {choices}, got {names}")
    return tuple(s for s in Stage if str(s) in names)


def require_capabilities(attack: Attack, run: Run, sees: AbstractSet[Capability]) -> None:
    """Refuse an attack whose adversary lacks a capability that it needs.

    An adversary who knows the model knows its bottom too.

    Args:
        attack: the attack.
        run: the run, with the model and the capabilities that the adversary is assumed to have.
        sees: what the adversary sees besides gradients.

    Raises:
        ThreatModelError: names every capability that is missing.
    """
    anatomy = run.anatomy
    capabilities = set(run.assumed)
    capabilities.update(
        c for role, c in SURFACE_CAPABILITIES.items() if anatomy.parameter(role) is not None
    )
    capabilities |= sees
    if Capability.KNOWS_MODEL in capabilities:
        capabilities.add(Capability.KNOWS_BOTTOM_MODEL)
    require(attack.name, attack.threat_model, capabilities)


def check_forward(attack: Attack, anatomy: Anatomy) -> None:
    """Refuse an attack that runs the model on texts of its own, where that is impossible.

    Raises:
        ValueError: names the method to give.
    """
    why_not = why_not_run(anatomy) if _MODEL_CAPABILITIES & attack.threat_model.needs else None
    if why_not is not None:
        raise ValueError(f"attack '{attack.name}' runs the model on texts, and {why_not}")


def gradient_plan(attack: Attack, run: Run) -> Plan:
    """Return the plan of an attack on gradients of the client's own parameters, checked.

    Raises:
        ThreatModelError: it reads words off a head whose rows are a classifier's outputs.
        ValueError: the attack reads parameters of several optimizers, or no gradients.
    """
    anatomy = run.anatomy
    if anatomy.kind == "classifier" and _HEAD_CAPABILITIES & attack.threat_model.needs:
        model = type(without_peft(anatomy.model)).__name__
        n = anatomy.vocab_size
        head = f"the labels of {model} are classes"
        if anatomy.head is not None:
            outputs = "one output" if n == 1 else f"{n} outputs"
            head = f"the rows of '{anatomy.head_name}' of {model} are its {outputs}"
        raise ThreatModelError(
            f"attack '{attack.name}' reads words off an output head with a row for each token, and "
            f"{head}. Remove the attack; BagOfWords reads the gradient of the embeddings, "
            "SubspaceWords that of the first block's projections."
        )
    # DDP reduces every trainable parameter, not only those that an optimizer owns.
    reduces_all = run.under_ddp and run.client == "rank"
    surfaces = attack.needs(anatomy)
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
        owner = _owner(anatomy.parameter(role), run.optimizers)
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
    """Refuse attacks on gradients where no optimizer steps, so that none is seen to leave.

    Raises:
        ValueError: the only optimizer is Lightning's stand-in for none.
    """
    split = Capability.SEES_ACTIVATIONS
    names = [a.name for a in attacks if split not in a.threat_model.needs]
    if names and not any(group["params"] for o in optimizers for group in o.param_groups):
        raise ValueError(
            f"LeakageMonitor: '{names[0]}' reads what leaves the client as an optimizer steps, and "
            "configure_optimizers returned None. Return the optimizer; where gradients are sent "
            "without one, torch.optim.SGD(self.parameters(), lr=0.0) changes no weight."
        )


# ---- whose tokens ---------------------------------------------------------------------------


def check_texts(
    attacks: Sequence[Attack], others: Mapping[str, PublicText | None], anatomy: Anatomy
) -> None:
    """Refuse public text that the model cannot read.

    Args:
        attacks: the attacks whose ``public_text`` is checked.
        others: further texts, by the name that a message uses.
        anatomy: the model.

    Raises:
        ValueError: names the tokenizer, the largest id and the embedding's rows; or says that an
            attack on the head needs texts of the target's vocabulary.
    """
    named = {name: text for name, text in others.items() if text is not None}
    for attack in attacks:
        text = getattr(attack, "public_text", None)
        if isinstance(text, PublicText):
            named[f"the public text of attack '{attack.name}'"] = text
            pairs = anatomy.target_rows is None or text.targets is not None
            if not pairs and _HEAD_CAPABILITIES & attack.threat_model.needs:
                raise ValueError(
                    f"attack '{attack.name}' is calibrated on texts and what they map to, and in "
                    "this model source and target have vocabularies of their own: give "
                    "PublicText(texts, targets=...), token ids of each"
                )
    rows = matrix_shape(anatomy.embedding)
    for name, text in named.items():
        if rows is not None:
            _check_ids(name, text, text.sentences, f"'{anatomy.embedding_name}'", rows[0])
        if text.targets is not None and anatomy.kind == "seq2seq":
            _check_ids(name, text, text.targets, f"'{anatomy.head_name}'", anatomy.vocab_size)


def _check_ids(name: str, text: PublicText, ids: Sequence[Tensor], matrix: str, rows: int) -> None:
    largest = max((int(row.max()) for row in ids if len(row)), default=0)
    if largest < rows:
        return
    origin = "" if text.tokenizer is None else f" (by {_describe(text.tokenizer)})"
    raise ValueError(
        f"{name} holds token id {largest}{origin}, and the model's {matrix} has {rows} rows, for "
        f"ids 0 to {rows - 1}: another model's tokenizer made it. Give the tokenizer that "
        "this model was trained with; if tokens were added to it, call "
        "model.resize_token_embeddings(len(tokenizer)) first."
    )


def _describe(tokenizer: Any) -> str:
    """Return the name and size of a tokenizer."""
    name = str(getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__)
    size = _size_of(tokenizer)
    return f"'{name}'" if size is None else f"'{name}', of {size} tokens"


def _size_of(tokenizer: Any) -> int | None:
    try:
        return len(tokenizer)
    except TypeError:
        return None


def warn_of_other_tokenizers(tokenizers: Collection[Any], anatomy: Anatomy) -> None:
    """Warn of tokenizers that are hardly the model's own, though their ids fit.

    Such a tokenizer has a twentieth more tokens than the embedding has rows, or a fifth fewer:
    embeddings are padded, and a few tokens added, by less. Another sign is a different size
    together with two special ids that differ and none that agrees. A tokenizer of the same size is
    not recognised.
    """
    rows = matrix_shape(anatomy.embedding)
    if rows is None:
        return
    config = getattr(without_peft(anatomy.model), "config", None)
    for tokenizer in {id(t): t for t in tokenizers if t is not None}.values():
        size = _size_of(tokenizer)
        if size is None or size == rows[0]:
            continue
        why = f"the embedding '{anatomy.embedding_name}' has {rows[0]} rows"
        if _SMALLEST_SHARE * rows[0] <= size <= _LARGEST_SHARE * rows[0]:
            other = _other_marks(tokenizer, config, rows[0])
            if len(other) < _DIFFERING_MARKS:
                continue
            why += f" and the model's config has other ids for {' and '.join(other)}"
        rank_zero_warn(
            f"lightning-fedleak: the tokenizer {_describe(tokenizer)}, is hardly this model's: "
            f"{why}. Its ids fit, but stand for other words. Give the tokenizer that the "
            "model was trained with."
        )


def _other_marks(tokenizer: Any, config: Any, rows: int) -> list[str]:
    """Return the special tokens whose ids differ; none where one is the same."""
    marks = []
    for mark in ("bos", "eos", "pad"):
        token_id = getattr(tokenizer, f"{mark}_token_id", None)
        config_id = getattr(config, f"{mark}_token_id", None)
        ids = [
            i
            for i in (config_id if isinstance(config_id, list) else [config_id])
            if isinstance(i, int)
        ]
        if not isinstance(token_id, int) or not ids or max(ids) >= rows:
            continue
        if token_id in ids:
            return []
        marks.append(mark)
    return marks


def _owner(parameter: nn.Parameter | None, optimizers: Sequence[Optimizer]) -> Optimizer | None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if any(p is parameter for p in group["params"]):
                return optimizer
    return None


def unread_names(plans: Sequence[Plan], anatomy: Anatomy) -> tuple[str, ...]:
    """Return the names of the trained parameters whose gradient no attack reads."""
    tested = _names(anatomy, {r for plan in plans if plan.exposed for r in plan.roles})
    return tuple(n for n in anatomy.trainable_names() if n not in tested)


def listed(names: Sequence[str]) -> str:
    """Return all names in one line; blocks are joined, as in ``h.{0..5}.w``."""
    groups: dict[str, list[int]] = {}
    for name in names:
        head, *rest = re.split(r"(?<=\.)(\d+)(?=\.)", name, maxsplit=1)
        number = [int(rest[0])] if rest else []
        groups.setdefault("{}".join([head, *rest[1:]]), []).extend(number)
    return ", ".join(_with_numbers(name, numbers) for name, numbers in groups.items())


def _with_numbers(name: str, numbers: Sequence[int]) -> str:
    head, *rest = name.split("{}")
    if not rest:
        return head
    if len(numbers) == 1:
        return f"{head}{numbers[0]}{rest[0]}"
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    texts = [f"{r[0]}..{r[-1]}" if len(r) > 1 else str(r[0]) for r in runs]
    return f"{head}{{{', '.join(texts)}}}{rest[0]}"


def _names(anatomy: Anatomy, roles: Collection[str]) -> set[str]:
    names = {anatomy.parameter_name(r) for r in roles}
    one = anatomy.parameter(HEAD_WEIGHT) is anatomy.parameter(EMBEDDING_WEIGHT)
    if one and {HEAD_WEIGHT, EMBEDDING_WEIGHT} & set(roles):
        names |= {anatomy.parameter_name(HEAD_WEIGHT), anatomy.parameter_name(EMBEDDING_WEIGHT)}
    return {n for n in names if n is not None}
