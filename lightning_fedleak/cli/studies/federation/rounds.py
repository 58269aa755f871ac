"""The rounds of a federation: its server, and its clients one after the other in one process.

What a round showed is read from its files.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from lightning_fedleak.cli.studies.federation.federation import Federation
from lightning_fedleak.engine import LeakageLimitExceeded
from lightning_fedleak.federation import (
    SUM,
    ClientDP,
    OutgoingUpdates,
    RoundObserver,
    UpdateError,
    difference,
    moved,
    recording,
    trained_state,
)
from lightning_fedleak.report import records


class Server:
    """Holds the model, closes rounds, and looks at the sum of what came back.

    Args:
        federation: what is trained.
        folder: of the ledgers.

    Attributes:
        state: of what is trained, as it is sent in the next round.
        loss: the validation loss of ``state``.
        dp: its account where it adds the noise; None elsewhere.
    """

    def __init__(self, federation: Federation, folder: Path) -> None:
        self._federation, self._folder = federation, folder
        self._model = federation.make_model()
        self.state: dict[str, Tensor] = trained_state(self._model)
        self.loss = federation.validation_loss(self._model, self.state)
        central = federation.trust == "central"
        self.dp = federation.account(folder / "server.ledger") if central else None
        # The draw and the divisor of the sum do not depend on who adds the noise.
        self._terms = self.dp or federation.account(None)

    @property
    def epsilon(self) -> float | None:
        """Return epsilon so far; where clients add the noise, of the one that has released most."""
        if self._terms is None:
            return None
        if self.dp is not None:
            return self.dp.privacy.epsilon
        return self._federation.epsilon_spent(self._folder)

    @property
    def noise(self) -> float | None:
        """Return the norm of the noise over the largest norm of the mean of clipped updates.

        It depends on no data. None without differential privacy.
        """
        if self._terms is None:
            return None
        return self._terms.relative_noise(sum(tensor.numel() for tensor in self.state.values()))

    def draw_clients(self) -> list[int]:
        """Return the clients of a round."""
        everyone = list(range(self._federation.clients))
        if self.dp is not None:
            self.dp.check_affords_another()
        return everyone if self._terms is None else self._terms.drawn(everyone)

    def close(
        self,
        round_: int,
        returned: Mapping[int, Mapping[str, Tensor] | None],
        observer: RoundObserver | None,
    ) -> dict[int, str]:
        """Compute the next model from what came back; return why clients count for nothing.

        Args:
            round_: number of the round.
            returned: state by client that was drawn; None for one that sent nothing.
            observer: looks at the sum.

        Raises:
            BudgetSpent: the account allows no more.
        """
        sent = self.state
        updates: dict[int, Mapping[str, Tensor]] = {}
        silent: dict[int, str] = {}
        for client, state in returned.items():
            if state is None:
                silent[client] = "sent nothing"
                continue
            try:
                updates[client] = difference(sent, state)
            except UpdateError as error:
                silent[client] = str(error)
        if self.dp is not None:
            mean = self.dp.mean(dict.fromkeys(returned) | updates, sent).update
        else:
            expected = len(updates) if self._terms is None else self._terms.per_round
            mean = {n: t.double() * 0.0 for n, t in sent.items()}
            for update in updates.values():
                for name, tensor in mean.items():
                    tensor.add_(update[name].double(), alpha=1 / expected)
        self.state = moved(sent, mean)
        self.loss = self._federation.validation_loss(self._model, self.state)
        if observer is not None:
            self._look(round_, sent, self.state, list(updates), observer)
        return silent

    def _look(
        self,
        round_: int,
        sent: Mapping[str, Tensor],
        returned: Mapping[str, Tensor],
        clients: list[int],
        observer: RoundObserver,
    ) -> None:
        """Attack the sum: all that a server sees behind a secure aggregation."""
        batches = [b for client in clients for b in self._federation.batches(client, round_)]
        utility = {} if math.isnan(self.loss) else {"val_loss": self.loss}
        observer.begin(round_, sent)
        look = observer.look(
            returned,
            SUM,
            batches=batches,
            noise_std=0.0 if self._terms is None else self._terms.mean_noise_std,
            utility=utility,
            logged=False,
        )
        observer.log(look, defenses=[] if self.dp is None else [self.dp])


Closed = Callable[[int, Server, dict[int, str]], None]
"""Called after each round with its number, the server, and why clients sent nothing; 0 at first."""


def train_in_process(federation: Federation, folder: Path, closed: Closed) -> Server:
    """Train all rounds, the clients of a round one after the other.

    Args:
        federation: what is trained.
        folder: of logs and ledgers.
        closed: called after each round.

    Raises:
        ValueError: a gate that watches what is not logged.
        BudgetSpent: the account allows no more.
    """
    server = Server(federation, folder)
    closed(0, server, {})
    model = federation.make_model()
    accounts = [federation.client_account(folder, c) for c in range(federation.clients)]
    observer = federation.observer(folder) if federation.attack != "none" else None
    gates = federation.gates()
    outs = None
    if observer is not None:
        outs = [OutgoingUpdates(observer, gates, dp, client=c) for c, dp in enumerate(accounts)]
    outcome = "finished"
    try:
        for round_ in range(1, federation.rounds + 1):
            sent = server.state
            returned: dict[int, Mapping[str, Tensor] | None] = {}
            for client in server.draw_clients():
                with recording() as batches:
                    state, loss = federation.train(model, sent, client, round_)
                if outs is None:
                    returned[client] = _release_unwatched(accounts[client], sent, state)
                    continue
                try:
                    leaving = outs[client].leaves(
                        round_, sent, state, batches, utility={"train_loss": loss}
                    )
                    returned[client] = leaving.state
                except LeakageLimitExceeded:
                    returned[client] = None
            closed(round_, server, server.close(round_, returned, observer))
    except BaseException as error:
        outcome = type(error).__name__
        raise
    finally:
        if observer is not None:
            observer.end(outcome)
    return server


def _release_unwatched(
    dp: ClientDP | None, sent: dict[str, Tensor], state: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Return what leaves a client without attacks: with its own noise, where it adds some."""
    if dp is None:
        return state
    try:
        update = difference(sent, state)
    except UpdateError:  # NaN, say: zero leaves, with the same noise
        update = None
    return moved(sent, dp.privatized(update, sent))


@dataclass(frozen=True)
class FamilyLeakage:
    """What attacks of one family read in a round.

    Attributes:
        family: of the attacks.
        values: by client (``"sum"`` of all together) the highest headline that any attack had; NaN
            where all are unknown.
    """

    family: records.Family
    values: Mapping[str | int, float]

    @property
    def headline(self) -> str:
        """Return the metric as a table names it."""
        return self.family.headline.replace("_", " ").upper()

    @property
    def title(self) -> str:
        """Return the family and its headline as a table names them."""
        return f"{self.family.short_title}, {self.headline}"

    @property
    def updates(self) -> dict[str | int, float]:
        """Return the values of single clients."""
        return {client: value for client, value in self.values.items() if client != SUM}

    @property
    def total(self) -> float | None:
        """Return the value of all clients together; None where nothing looked at their sum."""
        return self.values.get(SUM)


@dataclass(frozen=True)
class Round:
    """A round as its files describe it; round 0 is the model that the first one begins with.

    Attributes:
        number: of the round.
        loss: validation loss of the model after it.
        leakage: of the families that were read.
        withheld: clients whose update a gate or an error held back.
        absent: why clients sent nothing that counts, by client.
        epsilon: what was spent so far; None without differential privacy.
        noise: its norm over the largest norm that the mean of clipped updates can have; None
            without differential privacy.
    """

    number: int
    loss: float
    leakage: Sequence[FamilyLeakage] = ()
    withheld: frozenset[str | int] = frozenset()
    absent: Mapping[int, str] = field(default_factory=dict)
    epsilon: float | None = None
    noise: float | None = None


def read_leakage(folder: Path, number: int) -> list[FamilyLeakage]:
    """Return what was read in a round, by the families that the files below ``folder`` record."""
    families = {
        family.name: family for family in records.STANDARD_FAMILIES
    }  # whose order is a table's
    values: dict[str, dict[str | int, float]] = {}
    for path in sorted(folder.rglob(records.RESULTS)):
        lines = records.read_lines(path.with_name(records.RECORD)).lines
        begin = next((line for line in lines if isinstance(line, records.BeginLine)), None)
        if begin is None:  # the disk is full, say
            continue
        families |= {family.name: family for family in begin.families}
        for line in records.read_results(path):
            if line.round != number or line.client is None or line.client == "all":
                continue
            if (family := begin.family_of(line.attack)) is None:
                continue
            by_client = values.setdefault(family.name, {})
            value = line.value_of_this_look(family.headline)
            highest = by_client.get(line.client, math.nan)
            by_client[line.client] = highest if value is None or highest > value else value
    return [FamilyLeakage(families[name], values[name]) for name in families if name in values]


def read_withheld(folder: Path, number: int) -> frozenset[str | int]:
    """Return the clients whose update was held back in a round."""
    return frozenset(
        decision.client
        for path in folder.rglob(records.RECORD)
        for decision in records.read_lines(path).lines
        if isinstance(decision, records.GateLine)
        and decision.step == number
        and decision.did in ("withheld", "raise")
        and decision.client is not None
    )
