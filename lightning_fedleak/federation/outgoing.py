"""Attacks, gates and defends the updates of a client before they leave: :class:`OutgoingUpdates`.

In each round the trained state is checked, the attacks run on the update as the server would get it
(a *look*), the gates judge their results, and the noised and compressed update leaves, or none.
To *harden* is to increase the noise of the client's ClientDP.

A gate (:class:`RoundGate`) reads one logged metric of the look: of one attack, or the worst value
of a family of attacks. A value above the threshold is a breach, and so is an unknown one. A
*control* is the same attack on words that are known; if it fails, the attack does not work here,
and its low value proves nothing.
"""

import copy
import logging
import math
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor

from lightning_fedleak import engine
from lightning_fedleak.defenses import DefenseError, GradientCompression
from lightning_fedleak.federation.client_dp import ClientDP
from lightning_fedleak.federation.observer import RoundObserver
from lightning_fedleak.federation.round_look import RoundLook
from lightning_fedleak.federation.updates import State, UpdateError, difference, moved
from lightning_fedleak.validate import check_choice

# A function that returns the state that a client has trained, and the batches of its local steps.
Training = Callable[[], tuple[State, Sequence[Any]]]

log = logging.getLogger(__name__)

_NEXT_KEY = "next_look"  # the key of the round of the next look in `OutgoingUpdates.memory`
# The decisions on an update, from the weakest to the strongest. If gates differ, the strongest one
# is carried out.
_STRENGTH = ("leave", "warn", "harden", "withhold", "raise")

# Notes that are shown when an update is withheld without noise.
_LEAK_NOTE = (
    "a withheld update tells the server one bit about this client's data: the update was above the "
    "threshold. With ClientDP it would be zero plus noise, which nobody can distinguish from others"
)
_ZERO_NOTE = (
    "zero leaves in its place. It enters the mean over clients with this client's weight, and so "
    "keeps the mean closer to the model that was sent"
)


class RoundGate(engine.Threshold):
    """A threshold on the leakage of a round's update, which decides before the update leaves.

    Each round is judged by the value of that round, not by a value that is pooled over rounds. An
    *unknown* value counts as a breach: the attack failed, waits for its first result, does not run,
    or reads parameters that are not shared. A rate at or below the threshold also counts as a
    breach if it is measured on fewer than 16 texts of the round or fewer than 16 non-members. A
    metric that no update of this federation can have is refused at setup.

    In the first round of a LoRA, its matrix B is zero, and no words can be recovered *yet*. A gate
    on words lets one such update of each client pass, but not a second one.

    Examples:
        >>> from lightning_fedleak import RoundGate
        >>> RoundGate("leakage/worst/words", at_most=0.3)
        RoundGate('leakage/worst/words', at_most=0.3, withhold)

    Args:
        metric: The name in the logs, ``"leakage/<attack>/<metric>"`` or
            ``"leakage/worst/<family>"``. Of a membership attack only the AUC can be watched, not
            the rates at the threshold that the attack sets.
        at_most: The largest value that is allowed.
        action: The action after a breach.

            - ``"withhold"``: The update does not leave. Under a :class:`ClientDP` whose noise the
              client adds, it is replaced by zero with that noise. Under a secure aggregation it is
              replaced by zero. Otherwise nothing leaves, which *reveals one bit* about the data.
            - ``"harden"``: The noise of the client's ClientDP is increased until the update passes.
              If that is impossible, or the value is unknown, the update is withheld: more noise
              does not make an unknown value known.
            - ``"raise"``: :class:`~lightning_fedleak.LeakageLimitExceeded` is raised. The client
              fails, and the server sees that. So this is refused if the client adds noise.
            - ``"warn"``: The update leaves, and a warning is logged.
        patience: The number of consecutive unknown values of a client that may pass.
        name: The name in the logs, ``gate/<name>``; by default the metric without ``leakage/``.

    Raises:
        ValueError: The arguments are out of range or contradict each other.
    """

    # All possible actions, where a threshold of a training run has others.
    actions = ("withhold", "harden", "raise", "warn")

    def __init__(
        self,
        metric: str,
        at_most: float,
        *,
        action: Literal["withhold", "harden", "raise", "warn"] = "withhold",
        patience: int = 0,
        name: str | None = None,
    ) -> None:
        check_choice("action", action, self.actions)
        round_action: Any = action  # Threshold is annotated with the actions of a run
        super().__init__(metric, at_most, action=round_action, patience=patience, name=name)

    def watch_rounds(self, observer: RoundObserver) -> None:
        """Check that the observer logs the metric, and that the metric can judge an update.

        Raises:
            ValueError: One of these is false. The message names the metrics that can be watched.
        """
        self.check_logged(observer.engine.metric_names(), "RoundObserver")
        if (reason := observer.never_judged(self.metric)) is not None:
            usable = [n for n in observer.headlines() if observer.never_judged(n) is None]
            raise ValueError(
                f"RoundGate watches '{self.metric}': {reason}. It would withhold every update: "
                f"watch one of {usable}, or remove the gate if there is none"
            )
        self._check_value()

    def read(self, look: RoundLook) -> engine.GateEvent:
        """Return the event of a look: the value that the gate judges, or why it is unknown."""
        self._warn_of_uninformed(look.engine)
        event = self.judge(look.engine, look.now, self._unknown(look))
        # Intervals use the games of all rounds, and the value is that of this round.
        event = replace(event, low=math.nan, high=math.nan)
        return replace(event, step=look.round_, client=look.client)

    def _unknown(self, look: RoundLook) -> dict[str, str]:
        """Return why values of the round are unknown unless they are a breach, by log name.

        They have too few candidates, or there is no result; or the update does not contain what a
        single watched attack reads.
        """
        names = look.engine.results.headlines_of(self.metric) or (self.metric,)
        roots = {name: name.rpartition("/")[0] for name in names}
        unknown = {n: look.too_few[root] for n, root in roots.items() if root in look.too_few}
        if look.now.get(f"{self.metric.rpartition('/')[0]}/exposed") == 0:
            why = "the update does not contain the parameters that the attack reads"
            unknown[self.metric] = why
        elif math.isnan(look.now.get(self._name_in(look.now), math.nan)):
            failed = [look.unknown[root] for root in roots.values() if root in look.unknown]
            pending = [look.not_yet[root] for root in roots.values() if root in look.not_yet]
            default = "no result yet, or an attack that does not run here"
            reasons = [*failed, *pending, *look.unknown.values(), default]
            unknown.setdefault(self.metric, reasons[0])
        return unknown


_Events = dict[RoundGate, engine.GateEvent]


@dataclass(frozen=True)
class Leaving:
    """The reply of a client in a round.

    Attributes:
        state: the state that is returned to the server, by the sent names; None if nothing leaves.
        withheld: whether the client's update is withheld.
        events: the events of the gates that acted.
        look: the results of the attacks on the update; None if the update could not be read, or
            ``max_overhead`` allowed no look.
        answer: the message to the server if nothing leaves.
    """

    state: dict[str, Tensor] | None
    withheld: bool
    events: tuple[engine.GateEvent, ...]
    look: RoundLook | None
    answer: str = "withheld (the update cannot be read)"


class OutgoingUpdates:
    """Attacks, gates and defends each update of one client before it leaves.

    If the client adds noise itself (a :class:`ClientDP` with ``trust="local"`` or
    ``"secure_aggregation"``), attacks read a *rehearsal*: the clipped update with noise from the
    same distribution. The released update has independent noise. So the account of the release also
    covers the decision to withhold, which depends on the data and on noise that nobody sees. It
    covers neither the decision to increase the noise (``action="harden"``) nor the logs.

    A :class:`~lightning_fedleak.GradientCompression` among the observer's ``defenses`` acts last.
    Each client has a copy of it with an error memory. With error feedback attacks read the update
    before compression, because all of it leaves over time. A withheld update is not added to the
    memory.

    Under a secure aggregation the server sees only the sum. So a withheld or unreadable update is
    replaced by zero, masked like every other update: the server does not see which client withheld
    its update, and no client is missing in the aggregation.

    Examples:
        >>> from functools import partial
        >>> import torch
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> from lightning_fedleak import BagOfWords, OutgoingUpdates, RoundGate, RoundObserver
        >>> config = GPT2Config(vocab_size=64, n_embd=8, n_head=1, tie_word_embeddings=False)
        >>> observer = RoundObserver(
        ...     GPT2LMHeadModel(config), partial(torch.optim.SGD, lr=0.1), 1, attacks=[BagOfWords()]
        ... )
        >>> gates = [RoundGate("leakage/bag_of_words/f1", at_most=0.3)]
        >>> OutgoingUpdates(observer, gates).gates[0].at_most
        0.3

    Args:
        observer: the observer of this client, with ``side="client"``.
        gates: the gates, in the order in which they judge.
        dp: the :class:`ClientDP` of this client. With central trust the server clips and adds
            noise, and the client does neither.
        client: the client's name in the logs.
        secure_aggregation: whether updates are masked, so that the server sees only the sum of all
            clients.
        zero: whether a withheld update is replaced by zero, which the server sees. It is for
            frameworks whose rounds fail if a client sends nothing.

    Attributes:
        dp: the ClientDP that adds this client's noise; None if the client adds none.
        compression: this client's copy of the compression; None without one.
        unknown: the number of consecutive unknown values so far, by gate.
        unread: the round whose update left because nothing could be recovered yet, by gate.

    Raises:
        ValueError: a gate watches a value that is not logged, two gates have one name, or a gate
            hardens and no noise can be increased.
        DefenseError: a compression would act before the noise, or on a sum.
    """

    def __init__(
        self,
        observer: RoundObserver,
        gates: Sequence[RoundGate] = (),
        dp: ClientDP | None = None,
        *,
        client: str | int = 0,
        secure_aggregation: bool = False,
        zero: bool = False,
    ) -> None:
        self.observer, self.client = observer, client
        self.gates = tuple(gates)
        self.zero, self.secure_aggregation = zero, secure_aggregation
        self.dp: ClientDP | None = None if dp is None or dp.trust == "central" else dp
        self.compression = _copy_compression(observer, dp)
        self.unknown: dict[str, int] = {}
        self.unread: dict[str, int] = {}
        names = [gate.name for gate in self.gates]
        for gate in self.gates:
            gate.watch_rounds(observer)
            problem = None
            if names.count(gate.name) > 1:
                problem = f"two RoundGates have the name '{gate.name}': pass another name= to one"
            elif gate.action == "raise" and self.dp is not None:
                problem = (
                    "RoundGate(action='raise') ends a client's round depending on its data, and "
                    "no noise of the ClientDP hides that: use action='withhold'"
                )
            elif gate.action == "harden" and (self.dp is None or not self.dp.can_harden):
                problem = (
                    "RoundGate(action='harden') increases the noise that this client adds: pass "
                    "ClientDP(trust='local', accountant='filter', target_epsilon=...)"
                )
            if problem:
                raise ValueError(problem)
            # The engine records these when the first round begins. A client may come here often.
            if gate.facts not in observer.engine.gates:
                observer.engine.subscribe(facts=gate.facts)

    # ---- a round ----------------------------------------------------------------------------

    def leaves(
        self,
        round_: int,
        sent: State,
        returned: State,
        batches: Sequence[Any],
        *,
        utility: Mapping[str, float] | None = None,
        seconds: float | None = None,
    ) -> Leaving:
        """Return the part of a round's result that may leave.

        With a gate there is a look in every round, otherwise as often as the observer's
        ``max_overhead`` allows.

        Args:
            round_: the number of the round.
            sent: the state that this client got.
            returned: the state that it has trained.
            batches: the batches of its local steps.
            utility: further values of this round for the logs.
            seconds: the duration of the round's training, for ``max_overhead``.

        Raises:
            LeakageLimitExceeded: a gate with ``action="raise"`` acted.
            UpdateError: the sent state does not fit the observer's model.
            BudgetSpent: one more release would cost more than the client's budget.
        """
        observer = self.observer
        tensors = self._begin_round(round_, sent)
        start = time.perf_counter()
        try:
            update = difference(sent, returned, trained=tensors)
        except UpdateError as error:
            return self._withhold(sent, tensors, str(error))
        if self.dp is None:
            update = {}  # only the check was needed, because a look computes the difference again

        if not self.gates and not observer.due(self.client):
            return Leaving(self._release(sent, returned, update, tensors), False, (), None)
        unknown_before = dict(self.unknown)
        while True:
            try:
                facts = {"batches": batches, "utility": utility}
                look = self._measure(sent, returned, update, tensors, **facts)
                readings = {gate: gate.read(look) for gate in self.gates}
            except Exception as error:  # the client's data may have caused it
                cause = f"the measurement failed: {engine.reason(error)}"
                if self.gates:
                    return self._withhold(sent, tensors, cause)
                engine.announce(f"RoundObserver: in round {round_} {cause}. The update leaves")
                return Leaving(self._release(sent, returned, update, tensors), False, (), None)
            with look:
                acting, unread = self._acting(readings, look)
                action = max(["leave", *(str(gate.action) for gate in acting)], key=_STRENGTH.index)
                if action == "harden":
                    if self._hardens(acting.values()):
                        self.unknown = dict(unknown_before)
                        continue  # the update has more noise now, and this look does not count
                    action = "withhold"
                leaves = action in ("leave", "warn")
                state = self._zero(sent, tensors) if action == "withhold" else None
                if leaves:
                    state = self._release(sent, returned, update, tensors)
                events = tuple(acting.values())
                answer = f"withheld ({'; '.join(event.gate for event in events)})"
                self._write(look, acting, unread if leaves else (), action)
            if seconds is not None:
                other_seconds = max(0.0, time.perf_counter() - start - look.seconds)
                observer.paid(self.client, look.seconds, seconds, other_seconds)
            return Leaving(state, not leaves, events, look, answer)

    def answer(
        self, round_: int, sent: State, train: Training, start: float | None = None
    ) -> Leaving:
        """Train, and return the part of the result that may leave, even if the training fails.

        If it fails under a ClientDP whose noise this client adds, zero with the same noise leaves.
        So a failure that the data caused stays hidden.

        Args:
            round_: the number of the round.
            sent: the state that this client got.
            train: a function that returns the trained state, and the batches of the local steps.
            start: the time at which the training began, by ``time.perf_counter``; None for now.

        Raises:
            UpdateError: the sent state does not fit the observer's model.
            BudgetSpent: one more release would cost more than the client's budget.
        """
        start = time.perf_counter() if start is None else start
        try:
            returned, batches = train()
        except Exception as error:  # its message may quote private text, and is not sent
            answer = f"training failed: {engine.reason(error, leaves=False)}"
            cause = str(error) if isinstance(error, UpdateError) else answer
            trace = "".join(traceback.format_tb(error.__traceback__))
            log.error("lightning-fedleak: %s\n%s", cause, trace)  # lines of code, no private text
            tensors = self._begin_round(round_, sent)
            return replace(self._withhold(sent, tensors, cause), answer=answer)
        seconds = time.perf_counter() - start
        try:
            return self.leaves(round_, sent, returned, batches, seconds=seconds)
        except engine.LeakageLimitExceeded as exceeded:
            log.error("%s", exceeded)
            return Leaving(None, True, (), None, "a gate ended this client's round")

    def _begin_round(self, round_: int, sent: State) -> dict[str, Tensor]:
        """Begin the round, and return the trained tensors that were sent."""
        self.observer.begin(round_, sent)
        tensors = {name: sent[name] for name in self.observer.trained_names()}
        if self.dp is not None:
            self.dp.check_affords_another()
            if self.observer.shares_twice(tensors):
                raise UpdateError(
                    "a tied parameter has two names: share it once, by trained_state(model)"
                )
            self.dp.check_rounding(tensors)
        return tensors

    # ---- looks and gates --------------------------------------------------------------------

    def _measure(
        self, sent: State, returned: State, update: State, tensors: State, **facts: Any
    ) -> RoundLook:
        """Attack the update with new noise, and with a copy of the compression.

        Args:
            sent: the state that this client got.
            returned: the state that it has trained.
            update: the difference of the two.
            tensors: the trained tensors of ``sent``.
            facts: further arguments of :meth:`RoundObserver.measure`.
        """
        facts |= {"undefended": returned, "compression": ""}
        if self.dp is not None:
            returned = moved(sent, self.dp.rehearsed(update, tensors))
            facts["noise_std"] = self.dp.own_noise_std
        if self.compression is not None and not self.compression.defers:
            change = difference(sent, returned, trained=tensors)
            compression = copy.copy(self.compression)
            compression.memory = dict(compression.memory)
            returned = moved(sent, compression.send(change))
            facts["compression"] = compression.method
        return self.observer.measure(returned, self.client, **facts)

    def _acting(self, readings: _Events, look: RoundLook) -> tuple[_Events, list[engine.GateEvent]]:
        """Return the gates that act, with their events, and the events of those that cannot judge.

        These let the update leave, because nothing can be recovered from it yet, but only one
        update of a client: a server may repeat a round. An attack whose number is unknown (the
        event's source) has read something. The patience of the others is counted.
        """
        acting, unread = _Events(), list[engine.GateEvent]()
        for gate, event in readings.items():
            is_unknown = math.isnan(event.value)
            may_leave = is_unknown and not event.source and gate.name not in self.unread
            if may_leave and {gate.metric, gate.metric.rpartition("/")[0]} & look.not_yet.keys():
                unread.append(event)
                continue
            count = self.unknown[gate.name] = (
                self.unknown.get(gate.name, 0) + 1 if is_unknown else 0
            )
            if count > gate.patience if is_unknown else event.value > gate.at_most:
                acting[gate] = event
        return acting, unread

    def _hardens(self, events: Collection[engine.GateEvent]) -> bool:
        """Increase the noise if that can make the update pass, and return whether it could."""
        is_known = not any(math.isnan(event.value) for event in events)
        change = self.dp.harden() if is_known and self.dp is not None else None
        if change is None:
            return False
        for event in events:
            self.observer.engine.record_decision(event.decision("hardened", (change,)))
        return True

    def _write(
        self, look: RoundLook, acting: _Events, unread: Sequence[engine.GateEvent], action: str
    ) -> None:
        """Log a look and the decisions of the gates, and announce the strongest decision.

        Args:
            look: the look.
            acting: the gates that act, with their events.
            unread: the events of the gates that let this update leave undecided.
            action: the decision.

        Raises:
            LeakageLimitExceeded: the decision is to raise.
        """
        record = self.observer.engine.record_decision
        for event in unread:
            self.unread[event.gate] = look.round_
            record(event.decision("not yet"))
        values = {f"gate/{gate.name}": float(gate in acting) for gate in self.gates}
        look.log(values, () if self.dp is None else (self.dp,))
        for event in acting.values():
            record(event.decision("withheld" if action == "withhold" else action))
        strongest = next((e for g, e in acting.items() if g.action in (action, "harden")), None)
        if strongest is None:
            return
        start = f"RoundGate '{strongest.gate}'"
        if action == "raise":
            raise engine.LeakageLimitExceeded(f"{start} raised {strongest}")
        message = f"{start} {'warns' if action == 'warn' else 'withheld the update'} {strongest}"
        if action != "warn" and self.dp is None and not self.secure_aggregation:
            message += f"\n  Note: {_LEAK_NOTE}." + f"\n  Note: {_ZERO_NOTE}." * self.zero
        engine.announce(message)

    # ---- the returned state -----------------------------------------------------------------

    def _release(
        self, sent: State, returned: State, update: Mapping[str, Tensor] | None, tensors: State
    ) -> dict[str, Tensor]:
        """Return the state that leaves if no gate withholds it: noised, then compressed.

        Args:
            sent: the state that this client got.
            returned: the state that it has trained.
            update: the difference of the two; None for zero.
            tensors: the trained tensors of ``sent``.
        """
        if self.dp is not None:
            returned = moved(sent, self.dp.privatized(update, tensors))
        if self.compression is not None:
            update = difference(sent, returned, trained=tensors)
            return moved(sent, self.compression.send(update))
        return {n: t.detach().clone() for n, t in returned.items()}

    def _zero(self, sent: State, tensors: State) -> dict[str, Tensor] | None:
        """Return the state that leaves in place of a withheld update; None if nothing leaves."""
        if self.dp is not None:
            return self._release(sent, sent, None, tensors)
        if self.secure_aggregation or self.zero:
            return {n: t.detach().clone() for n, t in sent.items()}
        return None

    def _withhold(self, sent: State, tensors: State, cause: str) -> Leaving:
        """Record why an update that cannot be read or attacked is withheld; return the reply."""
        self.observer.engine.record_decision(
            engine.GateLine(
                run="",
                gate="",
                did="withheld",
                step=self.observer.round_,
                client=self.client,
                reason=cause,
            )
        )
        engine.announce(f"the update of round {self.observer.round_} did not leave: {cause}")
        return Leaving(self._zero(sent, tensors), True, (), None)

    # ---- state for a client's next process --------------------------------------------------

    def memory(self) -> dict[str, int]:
        """Return the counts that :meth:`recall` loads in this client's next process."""
        memory = {f"gate/{gate.name}": self.unknown.get(gate.name, 0) for gate in self.gates}
        memory |= {f"unread/{name}": round_ for name, round_ in self.unread.items()}
        if self.client in self.observer.next_look:
            memory[_NEXT_KEY] = self.observer.next_look[self.client]
        return memory

    def recall(self, memory: Mapping[str, int] | None) -> None:
        """Load the counts of an earlier process of this client.

        They are the number of consecutive unknown values of each gate, the round in which it let an
        update leave undecided, and the round of the next look.

        Args:
            memory: the result of :meth:`memory`; None in a client's first process.
        """
        for key, value in (memory or {}).items():
            prefix, _, name = key.partition("/")
            counts = {"gate": self.unknown, "unread": self.unread}.get(prefix)
            if counts is not None:
                counts[name] = int(value)
            elif key == _NEXT_KEY:
                self.observer.next_look[self.client] = int(value)


def _copy_compression(observer: RoundObserver, dp: ClientDP | None) -> GradientCompression | None:
    """Return a copy of the compression among an observer's defences, with an empty error memory.

    Raises:
        DefenseError: the compression would act before the noise, or on a sum.
    """
    defenses = observer.run.defenses
    compression = next((d for d in defenses if isinstance(d, GradientCompression)), None)
    if compression is None:
        return None
    if dp is not None and dp.trust != "local":
        raise DefenseError(
            f"GradientCompression with ClientDP(trust='{dp.trust}') would keep an error without "
            "noise for later rounds: use ClientDP(trust='local')"
        )
    client_compression = copy.copy(compression)
    client_compression.memory = {}
    return client_compression
