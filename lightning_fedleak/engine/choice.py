"""The table of the attacks of one run: what each of them costs and reads."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from lightning_fedleak import attacks
from lightning_fedleak.engine.channels.plans import Plan
from lightning_fedleak.engine.run import reason
from lightning_fedleak.model.anatomy import EMBEDDING_WEIGHT, HEAD_WEIGHT, Anatomy
from lightning_fedleak.model.batches import TokenBatch
from lightning_fedleak.model.model_runs import context_length
from lightning_fedleak.model.snapshots import (
    GradientSnapshot,
    Observation,
    Stage,
    UnusableObservation,
    UpdateSnapshot,
)
from lightning_fedleak.model.whole_models import whole_model
from lightning_fedleak.progress import measure_seconds

MAX_LINES = 3
"""Lines of an attack in the table that is logged before the first step; run.jsonl has more."""
WIDTH = 110
"""Columns of that table."""

_WRITTEN = ". Calibrated on text that the model writes itself; public_text= takes yours:"
_NOTHING = "no attack. Nothing is tested in this run. That is 'unknown', not 'safe'."
ROWS = 8
"""Texts of the batch that a look is tried on."""
_LENGTH = 64


# ---- what a look costs ----------------------------------------------------------------------


def look_seconds(
    anatomy: Anatomy,
    plans: Iterable[Plan],
    texts: int,
    *,
    local_steps: int | None = None,
    step: int = 0,
) -> tuple[dict[str, float], dict[str, str]]:
    """Return what each attack's look takes, tried on the gradient of 8 rows of 64 tokens.

    The rows are public text of a causal model, else random tokens, frequent ones more often. Where
    a LoRA's B is zero still it is given small values, so that A has a gradient.

    Args:
        anatomy: The parts of a model on which the attacks are prepared.
        plans: The plans of the attacks; those that read no gradients are passed over.
        texts: The number of texts that a membership attack is queried with.
        local_steps: The optimizer steps of a round whose weight change is shared; None: gradients
            are shared.
        step: The optimizer step that the fit begins at.

    Returns:
        Seconds by the attack's name, and why an attack's look fails on this model, if it does.
    """
    tried = [plan for plan in plans if plan.roles]
    if not tried:
        return {}, {}
    roles = dict.fromkeys(role for plan in tried for role in plan.roles)
    generator = torch.Generator().manual_seed(0)
    with whole_model(anatomy.root):
        begins = attacks.nonzero_starts(anatomy, generator)
        if anatomy.kind == "classifier":
            ids = _tokens(anatomy, ROWS, generator)
            tensors = attacks.gradient_through_blocks(
                anatomy, ids, list(roles), generator, instead=begins
            )
        else:
            batch = _trial_batch(anatomy, tried, generator)
            tensors = attacks.gradient_of(anatomy, batch, list(roles), instead=begins)
    snapshot = GradientSnapshot(step, Stage.SHARED, tensors, tied=anatomy.tied)
    if local_steps is not None:
        snapshot = UpdateSnapshot(
            step, Stage.SHARED, tensors, anatomy.tied, local_steps=local_steps, learning_rate=1e-3
        )
    observation = Observation((snapshot,))
    query = attacks.Query(_tokens(anatomy, min(texts, 2 * ROWS), generator))
    seconds, failures = {}, {}
    for plan in tried:
        try:
            plan.attack.refresh(anatomy, step)  # which sees the weights that a round begins with
            with torch.no_grad(), suppress(UnusableObservation):
                run = partial(plan.attack.run, observation, query)
                seconds[plan.attack.name] = measure_seconds(run, anatomy.device)
        except Exception as error:
            failures[plan.attack.name] = f"its looks fail on this model ({reason(error)})"
    return seconds, failures


def _trial_batch(anatomy: Anatomy, plans: Sequence[Plan], generator: torch.Generator) -> TokenBatch:
    sources = (getattr(plan.attack, "public_text", None) for plan in plans)
    source = next(filter(None, sources), None)
    if anatomy.kind == "causal" and source is not None:
        texts = attacks.PublicText.resolve(source, anatomy, n=ROWS)
        rows = [row % len(texts) for row in range(ROWS)]
        return texts.rows(rows, _length(anatomy), generator)
    ids = _tokens(anatomy, ROWS, generator)
    labels = ids if anatomy.target_rows is None else ids % anatomy.target_rows
    return TokenBatch(ids, labels, torch.ones_like(ids), anatomy.kind)


def _tokens(anatomy: Anatomy, rows: int, generator: torch.Generator) -> Tensor:
    return attacks.frequent_tokens(anatomy, rows, _length(anatomy), generator)


def _length(anatomy: Anatomy) -> int:
    return min(_LENGTH, context_length(anatomy) or _LENGTH)


# ---- the table ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """Say what becomes of one attack in this run.

    Attributes:
        attack: its name.
        reads: the parameters whose gradient it reads; none where it reads layers of its own.
        why_not: why it is not played; None where it is.
        exposed: whether what it reads is shared, as far as is known.
        seconds: that a look is estimated to take; None where that was not tried.
        never: why it can read no round of this run, whatever the data; None where it may.
    """

    attack: str
    reads: tuple[str, ...]
    why_not: str | None
    exposed: bool
    seconds: float | None
    never: str | None = None


def reads_of(plan: Plan | None, anatomy: Anatomy) -> tuple[str, ...]:
    """Return the names of the parameters whose gradient an attack reads."""
    roles = () if plan is None else plan.roles
    return tuple(dict.fromkeys(anatomy.parameter_name(role) or role for role in roles))


def in_short(attack: str, refusal: str) -> str:
    """Return why an attack is refused, in one sentence without its name."""
    first = refusal.partition(". ")[0]
    first = re.sub(rf"^(\w+: )?(attack '\w+' |'{attack}' )?", "", first)
    return re.sub(r"(: remove (the attack|it))?\.?$", "", first)


def table(
    rows: Sequence[Row],
    unread: Sequence[str],
    *,
    writes: bool = False,
    watcher: str = "LeakageMonitor",
) -> str:
    """Return the table: a line for each attack, or a few.

    Args:
        rows: one for each attack.
        unread: names of shared parameters that none of them reads.
        writes: they are calibrated on text that the model writes itself.
        watcher: who plays them.
    """
    played = any(row.why_not is None for row in rows)
    does = f"these attacks{_WRITTEN if writes else ':'}" if played else _NOTHING
    lines = [f"{watcher} plays {does}"]
    width = max((len(row.attack) for row in rows), default=0)
    first_with: dict[str, str] = {}
    for row in rows:
        if row.never is not None:
            text = f"unknown in every round: {row.never}"
        elif row.why_not is None:
            cost = "" if row.seconds is None else f", about {row.seconds:.2g} s a look"
            reads = listed(row.reads) or "layers that the server adds"
            text = f"played{cost}: reads {reads}"
        elif first_with.setdefault(row.why_not, row.attack) != row.attack:
            text = f"not played, as {first_with[row.why_not]}"
        else:
            text = f"not played: {row.why_not}"
        begin = f"  {row.attack:<{width}}  "
        lines += textwrap.wrap(
            text,
            WIDTH,
            initial_indent=begin,
            subsequent_indent=" " * len(begin),
            max_lines=MAX_LINES,
            placeholder=" ...",
        )
    if unread:
        n = len(unread)
        lines.append(f"  Shared, tested by no attack: {n} parameters. Their names: run.jsonl.")
    return "\n".join(lines)


def unread_names(plans: Sequence[Plan], anatomy: Anatomy) -> tuple[str, ...]:
    """Return the names of the trained parameters whose gradient no attack reads."""
    roles = {role for plan in plans if plan.exposed for role in plan.roles}
    tested = {anatomy.parameter_name(role) for role in roles}
    ends = {HEAD_WEIGHT, EMBEDDING_WEIGHT}
    if roles & ends and anatomy.parameter(HEAD_WEIGHT) is anatomy.parameter(EMBEDDING_WEIGHT):
        tested |= {anatomy.parameter_name(role) for role in ends}
    return tuple(name for name in anatomy.trainable_names() if name not in tested)


def listed(names: Sequence[str]) -> str:
    """Return the first name, and how many more there are."""
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{names[0]}{more}" if names else ""
