"""The table that is logged with ``attacks="auto"``: the cost of each attack and what it reads.

With ``"auto"`` every attack that fits the model and the run is *played*, that is, it runs. The
table has a line for each candidate: what it costs and which gradients it reads, or why it does not
run. At its end is the number of shared parameters that no attack tests.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_fedleak.engine.channels.plans import Plan
from lightning_fedleak.model.anatomy import EMBEDDING_WEIGHT, HEAD_WEIGHT, Anatomy
from lightning_fedleak.report.records.files import first_of

MAX_LINES = 3
"""Largest number of lines of an attack in the table; ``run.jsonl`` has the full reason."""
WIDTH = 110
"""Width of the table in characters."""

# Follows the title if a causal model generates the text on which attacks are calibrated.
_TEXT_NOTE = ". Calibrated on text that the model writes itself; public_text= takes yours:"
_NO_ATTACK = "no attack. Nothing is tested in this run. That is 'unknown', not 'safe'."


@dataclass(frozen=True)
class Row:
    """The decision about one attack in this run.

    Attributes:
        attack: The name of the attack.
        reads: The parameters whose gradient it reads; empty if it reads layers of a server.
        why_not: Why it does not run; None if it does.
        exposed: Whether the gradients that it reads are shared, as far as is known.
        seconds: The estimated duration of a look; None if it was not measured.
        never: Why it can read no round of this run, whatever the data; None if it may.
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
    sentence = refusal.partition(". ")[0]
    sentence = re.sub(rf"^(\w+: )?(attack '\w+' |'{attack}' )?", "", sentence)
    return re.sub(r"(: remove (the attack|it))?\.?$", "", sentence)


def table(
    rows: Sequence[Row],
    unread: Sequence[str],
    *,
    writes: bool = False,
    watcher: str = "LeakageMonitor",
) -> str:
    """Return the table: a line for each attack, or a few.

    Args:
        rows: A row for each attack.
        unread: The names of shared parameters that no attack reads.
        writes: Whether attacks are calibrated on text that the model writes itself.
        watcher: The name of the class that runs the attacks.
    """
    played = any(row.why_not is None for row in rows)
    title = f"these attacks{_TEXT_NOTE if writes else ':'}" if played else _NO_ATTACK
    lines = [f"{watcher} plays {title}"]
    width = max((len(row.attack) for row in rows), default=0)
    first_with: dict[str, str] = {}  # the first attack with each reason, which is written once
    for row in rows:
        if row.never is not None:
            text = f"unknown in every round: {row.never}"
        elif row.why_not is None:
            cost = "" if row.seconds is None else f", about {row.seconds:.2g} s a look"
            reads = first_of(row.reads, 1) or "layers that the server adds"
            text = f"played{cost}: reads {reads}"
        elif first_with.setdefault(row.why_not, row.attack) != row.attack:
            text = f"not played, as {first_with[row.why_not]}"
        else:
            text = f"not played: {row.why_not}"
        label = f"  {row.attack:<{width}}  "
        lines += textwrap.wrap(
            text,
            WIDTH,
            initial_indent=label,
            subsequent_indent=" " * len(label),
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
