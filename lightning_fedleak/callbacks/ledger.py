"""The results that a monitor gives: under which names, of which kind, and which are waited for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lightning_fedleak.attacks.base import Attack
from lightning_fedleak.attacks.inversion import InversionAttack
from lightning_fedleak.attacks.membership import MembershipAttack
from lightning_fedleak.callbacks.kinds import Kind, kind_of
from lightning_fedleak.callbacks.outcome import Outcome, unknown
from lightning_fedleak.callbacks.sources import GameSettings

HEAD_ONLY = "head_only"
AUDIT = "audit"
PREFIX = {
    "local": "leakage_local",
    "shared": "leakage",
    "aggregate": "leakage_aggregate",
    AUDIT: "audit",
}
STAGE_OF = {prefix: stage for stage, prefix in PREFIX.items()} | {"audit": "shared"}
MAX_WAITS = 20

Series = tuple[str, str]
"""(prefix, name) under which one attack's results at one stage are logged."""


def series_name(stage: str, attack: str) -> Series:
    """(prefix, attack) under which a result is logged."""
    if stage == HEAD_ONLY:
        return PREFIX["local"], f"{attack}_{HEAD_ONLY}"
    return PREFIX[stage], attack


def exists_at(attack: Attack, stage: str) -> bool:
    """Whether what the attack reads is there at a stage: no activations are reduced."""
    return stage != "aggregate" or not isinstance(attack, InversionAttack)


class Ledger:
    """Every series of one monitor, over all its fits.

    Args:
        attacks: the monitor's.
        stages: that it measures.
        head_own_part: whether it measures that too, of attacks on words.
        games: of its membership games.
        texts: of a batch that inversion attacks reconstruct at a look.
    """

    def __init__(
        self,
        attacks: Sequence[Attack],
        stages: Sequence[str],
        games: GameSettings,
        *,
        head_own_part: bool,
        texts: int = 1,
    ) -> None:
        members = [a for a in attacks if isinstance(a, MembershipAttack)]
        measured = [
            (str(stage), a) for stage in stages for a in attacks if exists_at(a, str(stage))
        ]
        if head_own_part:
            others = (MembershipAttack, InversionAttack)
            measured += [(HEAD_ONLY, a) for a in attacks if not isinstance(a, others)]
        if games.canaries is not None:
            measured += [(AUDIT, attack) for attack in members]
        self.kinds: dict[Series, Kind] = {
            series_name(stage, a.name): kind_of(
                a, targets=games.targets, window=games.window, texts=texts
            )
            for stage, a in measured
        }
        self._waits: dict[Series, int] = {}
        self._answered: set[Series] = set()

    @property
    def prefixes(self) -> list[str]:
        """The first parts of the log names."""
        return list(dict.fromkeys(prefix for prefix, _ in self.kinds))

    def names(self, series: Iterable[Series] | None = None) -> list[str]:
        """Log names of the values of some series; of all without an argument."""
        ends = ("", "_low", "_high", "_worst_client")
        found = []
        for one in self.kinds if series is None else series:
            root = "/".join(one)
            found.append(f"{root}/exposed")
            found += [f"{root}/{m}{end}" for m in self.kinds[one].metrics for end in ends]
        return found

    def clear(self) -> None:
        """A new fit: earlier looks were at another run."""
        self._waits.clear()
        self._answered.clear()
        self._forget()

    def _forget(self) -> None:
        for kind in self.kinds.values():
            kind.clear()

    def begin(self, *, first: bool) -> None:
        """Training begins: what an earlier fit had found is no result of this one.

        Args:
            first: this is process 0, which alone goes on with a checkpoint's games, of all clients.
        """
        self._answered.clear()
        if not first:
            self._forget()

    def all_unknown(self, why: str) -> dict[Series, Outcome]:
        """No series has a result."""
        return {series: unknown(kind.metrics, why) for series, kind in self.kinds.items()}

    def wait(self, outcomes: Mapping[Series, Outcome]) -> dict[Series, Outcome]:
        """Counts who waits; in place of what has been pending for too long, *unknown*."""
        self._waits = {s: self._waits.get(s, 0) + 1 for s, o in outcomes.items() if o.pending}
        self._answered |= {s for s, o in outcomes.items() if not o.pending or self._late(s)}
        why = f"for more than {MAX_WAITS} looks"
        return {
            s: unknown(self.kinds[s].metrics, f"{o.pending}, {why}") if self._late(s) else o
            for s, o in outcomes.items()
        }

    def _late(self, series: Series) -> bool:
        return self._waits.get(series, 0) > MAX_WAITS

    def pending(self) -> frozenset[str]:
        """Log names of the series that wait."""
        return frozenset(self.names(s for s in self._waits if not self._late(s)))

    def never(self) -> dict[Series, Outcome]:
        """*Unknown* for the series that had no result since training began, when it ends."""
        why = "training ended before there was a first result"
        silent = self.kinds.keys() - self._answered
        return {s: unknown(k.metrics, why) for s, k in self.kinds.items() if s in silent}

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers and tensors, by the names of the series."""
        return {
            "waits": {"/".join(series): n for series, n in self._waits.items()},
            "kinds": {"/".join(series): kind.state_dict() for series, kind in self.kinds.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes back what :meth:`state_dict` gave."""
        waits, kinds = state.get("waits", {}), state.get("kinds", {})
        for series, kind in self.kinds.items():
            kind.load_state_dict(kinds.get("/".join(series), {}))
        self._waits = {s: waits[n] for s in self.kinds if (n := "/".join(s)) in waits}


def check_names(mine: Ledger, all_of_run: Iterable[Ledger]) -> None:
    """Refuses two monitors of one run that log under the same names.

    Raises:
        ValueError: names them.
    """
    for other in all_of_run:
        both = {"/".join(series) for series in mine.kinds.keys() & other.kinds.keys()}
        if other is not mine and both:
            raise ValueError(
                f"another LeakageMonitor of this run logs {', '.join(sorted(both))} too; give "
                "the attacks of one of them other names"
            )


def values_of(outcomes: Mapping[Series, Outcome]) -> tuple[dict[str, float], dict[str, float]]:
    """Numbers by log name, and those of this look alone."""
    values: dict[str, float] = {}
    now: dict[str, float] = {}
    for (prefix, name), outcome in outcomes.items():
        values |= outcome.values(prefix, name)
        now |= outcome.values_now(prefix, name)
    return values, now
