"""What leaves a client in a round, and what does not: gated and defended before it leaves."""

from __future__ import annotations

import fnmatch
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from torch import Tensor

from lightning_fedleak.engine import (
    GateDecision,
    LeakageLimitExceeded,
    announce,
    check_threshold,
    is_worst,
    names_there_are,
    reason,
)
from lightning_fedleak.federation.client_dp import ClientDP
from lightning_fedleak.federation.compression import client_compression, compressed_state
from lightning_fedleak.federation.observer import RoundObserver
from lightning_fedleak.federation.round_look import RoundLook
from lightning_fedleak.federation.updates import State, UpdateError, difference, moved
from lightning_fedleak.validate import check_choice, check_integer

_NEXT = "next_look"

Action = Literal["withhold", "harden", "raise", "warn"]

TELLS = (
    "that this client withholds tells the server one bit about its data: the update was above the "
    "threshold. With ClientDP a withheld update is zero plus noise, which nobody can tell apart"
)
DILUTES = (
    "zero leaves in its place. It counts in the mean over clients with this client's weight, and "
    "so holds the model back at what was sent"
)


@dataclass(frozen=True)
class RoundEvent:
    """What a gate found in a round when it acted.

    Attributes:
        gate: its name.
        metric: the watched name.
        round_: number of the round.
        client: whose update it was.
        value: what was measured; NaN where it is unknown.
        at_most: the threshold.
        source: whose value it is, where the worst of a family is watched; else empty.
        why: why nothing is known.
        hardened: what was turned up.
    """

    gate: str
    metric: str
    round_: int
    client: str | int
    value: float
    at_most: float
    source: str = ""
    why: str = ""
    hardened: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Return what happened, as users see it."""
        if math.isnan(self.value):
            measurement = f"{self.metric} is unknown ({self.why}), which counts as a breach"
        else:
            source = f", of {self.source}" if self.source else ""
            measurement = f"{self.metric} = {self.value:.3f}{source}"
        limit = f"  allowed:  at most {self.at_most:g}"
        text = f"in round {self.round_}\n  measured: {measurement}\n{limit}"
        if self.hardened:
            text += f"\n  hardened: {'; '.join(self.hardened)}"
        return text


class RoundGate:
    """A threshold on what a round's update gives away, judged before the update leaves.

    Every round is judged by its own value, not by one that is pooled over rounds. What is
    *unknown* counts as a breach: an attack that failed, that waits for its first result, that is
    not played, or whose surface is not shared; and a rate at or below the threshold of fewer than
    16 texts of the round and 16 others. A value that no update here can have is refused beforehand.

    In the first round of a LoRA nothing can be read of its words *yet*, as long as its B is zero:
    one update of a client is let pass by a gate on words for that, and a second one is not.

    Args:
        metric: a name in the logs, ``"leakage/<attack>/<metric>"`` or ``"leakage/worst/<family>"``.
            Of membership the AUC, not what the attack's own threshold gives.
        at_most: the largest value that is allowed.
        action: ``"withhold"``: the update does not leave. Under a :class:`ClientDP` whose noise the
            client adds, zero with that noise leaves in its place; under a secure aggregation zero
            does; else nothing does, which *tells one bit*. ``"harden"``: the noise of the client's
            ClientDP is turned up until the update passes; if it cannot be, the update is withheld.
            ``"raise"`` raises :class:`~lightning_fedleak.LeakageLimitExceeded`: the client fails,
            which is seen outside, so it is refused beside noise that the client adds. ``"warn"``
            lets it leave.
        patience: unknown values in a row of a client that are let pass.
        name: in the logs, ``gate/<name>``; default the metric without ``leakage/``.

    Attributes:
        unknown: by client, how many values in a row were unknown so far.
        unread: by client, the round whose update left while nothing could be read yet.

    Raises:
        ValueError: arguments that cannot be meant.
    """

    def __init__(
        self,
        metric: str,
        *,
        at_most: float,
        action: Action = "withhold",
        patience: int = 0,
        name: str | None = None,
    ) -> None:
        check_choice("action", action, get_args(Action))
        self.patience = check_integer("patience", patience, at_least=0)
        check_threshold("RoundGate", metric, at_most)
        self.metric = metric
        self.at_most = float(at_most)
        self.action: Action = action
        self.name = name or metric.removeprefix("leakage/")
        self.unknown: dict[str | int, int] = {}
        self.unread: dict[str | int, int] = {}

    def about(self) -> dict[str, object]:
        """Return the gate's settings, for the record of a run."""
        return {
            "name": self.name,
            "metric": self.metric,
            "at_most": self.at_most,
            "action": self.action,
            "bound": "value",
            "patience": self.patience,
            "strict": True,
        }

    def check(self, observer: RoundObserver) -> None:
        """Refuse a metric that the observer does not log, or by which no update can be judged.

        Raises:
            ValueError: with the names that exist, or that can be watched.
        """
        names = observer.metric_names()
        if self.metric not in names:
            raise ValueError(
                f"RoundGate watches '{self.metric}', which this RoundObserver does not log."
                f"{names_there_are(self.metric, names)}"
            )
        if (why := observer.never_judged(self.metric)) is not None:
            can = [name for name in observer.headlines() if observer.never_judged(name) is None]
            raise ValueError(
                f"RoundGate watches '{self.metric}', by which it can judge no update of this "
                f"federation: {why}. It would withhold every one. "
                + (f"Watch {' or '.join(can)}." if can else "Nor can it by any other value.")
            )

    def judge(self, look: RoundLook, watched: Sequence[str] = ()) -> RoundEvent | None:
        """Return what the gate measured if an update gives away more than is allowed, else None.

        Args:
            look: at the update.
            watched: of the worst of a family, the values that it is the highest of.
        """
        value, why = self._value(look, watched)
        source = ""
        if math.isnan(value) and self.not_yet(look) is not None:
            return None
        if math.isnan(value):
            self.unknown[look.client] = self.unknown.get(look.client, 0) + 1
            if self.unknown[look.client] <= self.patience:
                return None
        else:
            self.unknown[look.client] = 0
            if value <= self.at_most:
                return None
            source = next((name for name in watched if look.now.get(name) == value), "")
        return RoundEvent(
            self.name, self.metric, look.round_, look.client, value, self.at_most, source, why
        )

    def not_yet(self, look: RoundLook) -> RoundEvent | None:
        """Return why an update may leave unjudged: nothing can be read yet. Else return None."""
        why = look.not_yet.get(self.metric) or look.not_yet.get(self.metric.rpartition("/")[0])
        if why is None or self.unread.get(look.client, look.round_) != look.round_:
            return None
        return RoundEvent(
            self.name, self.metric, look.round_, look.client, math.nan, self.at_most, why=why
        )

    def _value(self, look: RoundLook, watched: Sequence[str]) -> tuple[float, str]:
        """Return the watched value, and why it is unknown."""
        names = watched if is_worst(self.metric) else (self.metric,)
        roots = [name.rpartition("/")[0] for name in names]
        if not is_worst(self.metric) and look.now.get(f"{roots[0]}/exposed") == 0:
            return math.nan, "what the attack reads is not shared, and something else is"
        values = [v for name in names if not math.isnan(v := look.now.get(name, math.nan))]
        if values and max(values) > self.at_most:  # whatever else of the worst is unknown
            return max(values), ""
        value = look.now.get(self.metric, math.nan)
        few = [look.too_few[root] for root in roots if root in look.too_few]
        if not math.isnan(value) and not few:
            return value, ""
        failures = [look.unknown[root] for root in roots if root in look.unknown]
        waits = [look.not_yet[root] for root in roots if root in look.not_yet]
        nothing = "no result yet, or an attack that is not played here"
        return math.nan, next(iter([*few, *failures, *waits, *look.unknown.values()]), nothing)


@dataclass(frozen=True)
class Leaving:
    """What leaves a client in a round.

    Attributes:
        state: what is returned to the server, by the names that were sent; None where nothing is.
        withheld: the client's update did not leave.
        events: of the gates that acted.
        look: at what would have left; None where the update could not be read at all, or
            ``max_overhead`` let none be made.
    """

    state: dict[str, Tensor] | None
    withheld: bool
    events: tuple[RoundEvent, ...]
    look: RoundLook | None


class OutgoingUpdates:
    """One client's way out: each round's update is defended, attacked, and gated before it leaves.

    With a :class:`ClientDP` of local trust, or under secure aggregation, what is attacked is a
    *rehearsal*: the clipped update with noise of the same law. What leaves has other noise. So the
    account of the release also covers the decision to withhold, which depends on the data and on
    noise that nobody sees. It does not cover why noise was turned up (``action="harden"``), nor the
    logs.

    A :class:`~lightning_fedleak.GradientCompression` among the observer's ``defenses`` acts last,
    with a memory of this client's own. With error feedback a look is at the update before it, all
    of which leaves in time. What is withheld is not remembered.

    Under a secure aggregation the server sees nothing but the sum. So a withheld update, or one
    that cannot be read, leaves as zero, masked like every other: nobody is told which client
    withheld, and the aggregation loses none.

    Args:
        observer: of this client; ``side="client"``.
        gates: in the order in which they judge.
        dp: this client's own. With central trust the server clips and noises, and nothing is done
            here.
        client: its name in the logs.
        drop: names of parameters, or patterns of them (``"*.wte.*"``), whose changes never
            leave: they return as they were sent.
        secure_aggregation: what leaves is masked, so that the server sees the sum of all clients
            alone.
        zero: a withheld update leaves as zero though the server sees it, where an engine's round
            would not survive a client that sends nothing.

    Raises:
        ValueError: gates that watch what is not logged, two of one name, or one that hardens
            without noise that can be turned up.
    """

    def __init__(
        self,
        observer: RoundObserver,
        gates: Sequence[RoundGate] = (),
        dp: ClientDP | None = None,
        *,
        client: str | int = 0,
        drop: Sequence[str] = (),
        secure_aggregation: bool = False,
        zero: bool = False,
    ) -> None:
        self.observer = observer
        self.drop, self.gates = tuple(drop), tuple(gates)
        self.zero, self.secure_aggregation = zero, secure_aggregation
        self.client = client
        self.own: ClientDP | None = None if dp is None or dp.trust == "central" else dp
        self.compression = client_compression(observer.run.defenses, dp)
        if observer.start is not None and (dp is not None or self.compression is not None):
            observer.start.incomparable = "noise or a compression is in what the server sends"
        names = [gate.name for gate in self.gates]
        double = sorted({n for n in names if names.count(n) > 1})
        if double:
            raise ValueError(f"two RoundGates are named '{double[0]}': give one of them name=...")
        for gate in self.gates:
            gate.check(observer)
            if gate.action == "raise" and self.own is not None:
                raise ValueError(
                    "RoundGate(action='raise') ends a client's round by what its data show, which "
                    "is seen outside and no noise of the ClientDP hides: use action='withhold', "
                    "under which zero with the same noise leaves"
                )
            if gate.action == "harden" and (self.own is None or not self.own.can_harden):
                raise ValueError(
                    "RoundGate(action='harden') turns up the noise that this client adds, and "
                    "there is none that can be: give ClientDP(trust='local', "
                    "accountant='filter', target_epsilon=...)"
                )
        self._watched = {g.name: observer.headlines_of(g.metric) for g in self.gates}
        observer.expect_gates([gate.about() for gate in self.gates])

    def leaves(
        self,
        round_: int,
        sent: State,
        returned: State,
        batches: Sequence[Any],
        *,
        learning_rate: float | None = None,
        utility: Mapping[str, float] | None = None,
        seconds: float | None = None,
    ) -> Leaving:
        """Return what may leave of a round.

        With a gate every round is looked at; without one as often as the observer's
        ``max_overhead`` lets it.

        Args:
            round_: its number.
            sent: what this client got.
            returned: what it has made of it.
            batches: that it was trained on.
            learning_rate: the mean over the local steps, where a schedule changes it.
            utility: further values of this round for the logs.
            seconds: that the round took to train, for ``max_overhead``.

        Raises:
            LeakageLimitExceeded: a gate with ``action="raise"`` acted.
            UpdateError: what was sent is not of the observer's model.
            BudgetSpent: one more release would cost more than the client's budget.
        """
        observer = self.observer
        like, refusal = self._begin_round(round_, sent)
        if refusal is not None:
            return self._withhold(sent, like, refusal)
        start, dropped = time.perf_counter(), self._find_dropped(like)
        try:
            update: dict[str, Tensor] | None = difference(sent, returned, trained=like)
        except UpdateError as error:
            return self._withhold(sent, like, str(error))
        if dropped:
            returned = {n: sent[n] if n in dropped else t for n, t in returned.items()}
            update = difference(sent, returned, trained=like)
        if self.own is None:  # it was to be checked; a look makes its own
            update = None

        def leave(look: RoundLook | None, events: Sequence[RoundEvent] = ()) -> Leaving:
            state = self._release(sent, returned, update, like)
            try:
                observer.leaves(self.client, batches, returned)
            except Exception as error:  # which the client's data or disk may have provoked
                announce(f"RoundObserver: what left in this round was not noted: {reason(error)}")
            return Leaving(state, False, tuple(events), look)

        if not self.gates and not observer.due(self.client):
            return leave(None)

        def look_once() -> RoundLook:
            state, noise_std, method = returned, 0.0, ""
            if self.own is not None:
                state = moved(sent, self.own.rehearsed(update, like))
                noise_std = self.own.own_noise_std
            if self.compression is not None and not self.compression.defers:
                state = compressed_state(self.compression, sent, state, like, leaves=False)
                method = self.compression.method
            return observer.look(
                state,
                self.client,
                batches=batches,
                learning_rate=learning_rate,
                noise_std=noise_std,
                compression=method,
                utility=utility,
                logged=False,
            )

        judged = self._judge(look_once)
        if isinstance(judged, str):
            if self.gates:
                return self._withhold(sent, like, judged)
            announce(f"RoundObserver: in round {round_} {judged}. The update leaves")
            return leave(None)
        look, events, did = judged
        if did in ("withhold", "raise"):
            zero = self._zero(sent, like) if did == "withhold" else None
            leaving = Leaving(zero, did == "withhold", tuple(events), look)
        else:
            leaving = leave(look, events)
        self._write(look, events, did)
        if seconds is not None:
            beside = max(0.0, time.perf_counter() - start - look.seconds)
            observer.paid(self.client, look.seconds, seconds, beside)
        return leaving

    def _judge(
        self, look_once: Callable[[], RoundLook]
    ) -> tuple[RoundLook, list[RoundEvent], Action | Literal["leave"]] | str:
        """Return a look at the update, the gates that act on it, and what is done; or why no look.

        The noise is turned up, and the update looked at again, as long as a gate asks for that.
        """
        while True:
            try:
                look = look_once()
            except Exception as error:  # which the client's data may have provoked
                return f"the look failed: {reason(error)}"
            events = [
                event
                for gate in self.gates
                if (event := gate.judge(look, self._watched[gate.name])) is not None
            ]
            did = self._choose_action(events)
            if did != "harden":
                return look, events, did
            change = None if self.own is None else self.own.harden()
            if change is None:  # nothing is left to be turned up
                return look, events, "withhold"
            for event in events:
                self._record(event, "hardened", (change,))
            self.observer.forget(look)

    def _write(
        self, look: RoundLook, events: Sequence[RoundEvent], did: Action | Literal["leave"]
    ) -> None:
        """Write a look and what the gates did; say it once.

        Raises:
            LeakageLimitExceeded: a gate with ``action="raise"`` acted.
        """
        if did not in ("withhold", "raise"):
            for gate in self.gates:
                if (event := gate.not_yet(look)) is not None:
                    gate.unread[look.client] = look.round_
                    self._record(event, "not yet")
        acted = {f"gate/{g.name}": float(any(e.gate == g.name for e in events)) for g in self.gates}
        self.observer.log(look, acted, () if self.own is None else (self.own,))
        for event in events:
            self._record(event, "withheld" if did == "withhold" else did)
        for event in [e for e in events if self._action_of(e) in (did, "harden")][:1]:
            if did == "raise":
                raise LeakageLimitExceeded(f"RoundGate '{event.gate}' raised {event}")
            if did == "withhold":
                self._announce(f"RoundGate '{event.gate}' withheld the update {event}")
            else:
                announce(f"RoundGate '{event.gate}' warns {event}")

    def _find_dropped(self, like: State) -> set[str]:
        """Return the names of what never leaves.

        Raises:
            ValueError: a pattern that no trained parameter has, or all of them.
        """
        dropped: set[str] = set()
        for pattern in self.drop:
            names = fnmatch.filter(like, pattern)
            if not names:
                raise ValueError(
                    f"drop='{pattern}' is the name of nothing that is trained and sent "
                    f"(such names are {', '.join(list(like)[:3])}, ...)"
                )
            dropped.update(names)
        if dropped and len(dropped) == len(like):
            raise ValueError("drop= names all that is trained: nothing would be shared")
        return dropped

    def _release(
        self, sent: State, returned: State, update: Mapping[str, Tensor] | None, like: State
    ) -> dict[str, Tensor]:
        """Return what leaves where no gate withholds it: noised, then compressed, if at all."""
        if self.own is not None:
            returned = moved(sent, self.own.privatized(update, like))
        if self.compression is not None:
            return compressed_state(self.compression, sent, returned, like, leaves=True)
        return {n: t.detach().clone() for n, t in returned.items()}

    def _zero(self, sent: State, like: State) -> dict[str, Tensor] | None:
        """Return what leaves in place of a withheld update; None where nothing leaves."""
        if self.own is not None:
            return self._release(sent, sent, None, like)
        if self.secure_aggregation or self.zero:
            return {n: t.detach().clone() for n, t in sent.items()}
        return None

    def nothing(self, round_: int, sent: State, why: str) -> Leaving:
        """Return what leaves in a round in which this client has trained nothing: it failed, say.

        Under a ClientDP whose noise this client adds that is zero with the same noise, so that a
        failure that data provoked stays hidden.

        Args:
            round_: its number.
            sent: what this client got.
            why: for the logs.

        Raises:
            UpdateError: what was sent is not of the observer's model.
            BudgetSpent: one more release would cost more than the client's budget.
        """
        like, _ = self._begin_round(round_, sent)
        return self._withhold(sent, like, why)

    def memory(self) -> dict[str, int]:
        """Return what this client's next process goes on with: see :meth:`recall`."""
        memory = {f"gate/{gate.name}": gate.unknown.get(self.client, 0) for gate in self.gates}
        unread = (g for g in self.gates if self.client in g.unread)
        memory |= {f"unread/{g.name}": g.unread[self.client] for g in unread}
        if self.client in self.observer.next_look:
            memory[_NEXT] = self.observer.next_look[self.client]
        return memory

    def recall(self, memory: Mapping[str, int] | None) -> None:
        """Take up what an earlier process of this client has noted.

        That is how often a gate has let unknown pass, when the next look is due, and that the
        client took part.

        Args:
            memory: from :meth:`memory`; None in a client's first process.
        """
        self.observer.took_part.setdefault(self.client, memory is not None)
        if memory is None:
            return
        for gate in self.gates:
            gate.unknown[self.client] = int(memory.get(f"gate/{gate.name}", 0))
            if (round_ := memory.get(f"unread/{gate.name}")) is not None:
                gate.unread[self.client] = int(round_)
        if _NEXT in memory:
            self.observer.next_look[self.client] = int(memory[_NEXT])

    def _begin_round(self, round_: int, sent: State) -> tuple[dict[str, Tensor], str | None]:
        """Open the round; return what is trained of what was sent, and why it is refused, if so."""
        refusal = self.observer.refusal(round_, sent)
        shared = {name: sent[name] for name in self.observer.trained_names()}
        if self.own is not None:
            self.own.check_affords_another()
            if self.observer.shares_twice(shared):
                raise UpdateError(
                    "a tied parameter is sent under two names, and would get noise twice: share "
                    "each parameter once, as trained_state(model) does"
                )
            self.own.check_rounding(shared)
        return shared, refusal

    def _action_of(self, event: RoundEvent) -> Action:
        return next(gate.action for gate in self.gates if gate.name == event.gate)

    def _choose_action(self, events: Sequence[RoundEvent]) -> Action | Literal["leave"]:
        """Return the strongest action of the gates that acted."""
        actions = {self._action_of(event) for event in events}
        strongest: tuple[Action, ...] = ("raise", "withhold", "harden", "warn")
        return next((action for action in strongest if action in actions), "leave")

    def _withhold(self, sent: State, like: State, why: str) -> Leaving:
        """Record why an update that cannot be read or looked at is withheld."""
        self.observer.record_decision(
            GateDecision(
                gate="",
                did="withheld",
                step=self.observer.round_,
                client=self.client,
                metric="",
                source="",
                reason=why,
                hardened=(),
            )
        )
        self._announce(f"the update of round {self.observer.round_} did not leave: {why}")
        return Leaving(self._zero(sent, like), True, (), None)

    def _announce(self, message: str) -> None:
        if self.own is None and not self.secure_aggregation:
            message += f"\n  Note: {TELLS}." + (f"\n  Note: {DILUTES}." if self.zero else "")
        announce(message)

    def _record(self, event: RoundEvent, did: str, hardened: Sequence[str] = ()) -> None:
        self.observer.record_decision(
            GateDecision(
                gate=event.gate,
                did=did,
                step=event.round_,
                client=event.client,
                metric=event.metric,
                source=event.source,
                measured=event.value,
                at_most=event.at_most,
                reason=event.why,
                hardened=tuple(hardened),
            )
        )
