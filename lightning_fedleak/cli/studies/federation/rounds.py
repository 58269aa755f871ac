"""The rounds of a federation: its server, and its clients one after the other in one process."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from lightning_fedleak import federation as fed
from lightning_fedleak.cli.studies.federation.federation import Federation
from lightning_fedleak.federation.updates import State
from lightning_fedleak.report.records import STANDARD_FAMILIES

Values = Mapping[str | int, float]
"""The highest headline of a family's attacks, by client or ``"sum"``; NaN if all are unknown."""


@dataclass(frozen=True)
class Round:
    """The result of a round; round 0 is the model before the first one.

    Attributes:
        number: The number of the round.
        loss: The validation loss of the model after the round.
        leakage: The highest headlines, by family and headline.
        withheld: The clients whose update a gate held back.
        absent: The reasons for which clients' updates were not averaged, by client.
        epsilon: The epsilon spent so far; None without differential privacy.
        noise: The norm of the noise over the largest possible norm of the mean of clipped updates;
            None without differential privacy.
    """

    number: int
    loss: float
    leakage: Mapping[str, Values] = field(default_factory=dict)
    withheld: Collection[str | int] = ()
    absent: Mapping[int, str] = field(default_factory=dict)
    epsilon: float | None = None
    noise: float | None = None


def leakage_of(looks: Iterable[fed.RoundLook]) -> dict[str, Values]:
    """Return the highest headlines of a round, by family and headline.

    Args:
        looks: The looks at each client's update, and at their sum.
    """
    values: dict[str, dict[str | int, float]] = {}
    families = {family.name: family for family in STANDARD_FAMILIES}  # in the order of the table
    for look in looks:
        for series, channel in look.engine.series.items():
            families[channel.leak.name] = channel.leak
            by_client = values.setdefault(channel.leak.name, {})
            value = look.now.get(f"{series.log_name}/{channel.headline}", math.nan)
            highest = by_client.get(look.client, math.nan)
            by_client[look.client] = value if math.isnan(highest) else max(highest, value)
    return {
        f"{family.short_title}, {family.headline.replace('_', ' ').upper()}": values[name]
        for name, family in families.items()
        if name in values
    }


class _Server:
    """The server: it holds the model, averages the updates of a round, and looks at their sum.

    Args:
        federation: The federation.
        folder: The folder of the ledgers.

    Attributes:
        state: The trained parameters, as they are sent in the next round.
        loss: The validation loss of ``state``.
        dp: The server's privacy account; None unless the server adds the noise.
    """

    def __init__(self, federation: Federation, folder: Path) -> None:
        self._federation, self._folder = federation, folder
        self._model = federation.make_model()
        self.state: dict[str, Tensor] = fed.trained_state(self._model)
        self.loss = federation.validation_loss(self._model, self.state)
        central = federation.trust == "central"
        self.dp = federation.account(folder / "server.ledger") if central else None
        # The draw and the divisor of the sum do not depend on who adds the noise.
        self._terms = self.dp or federation.account(None)

    @property
    def epsilon(self) -> float | None:
        """The epsilon so far; if clients add the noise, that of the client with most releases."""
        if self._terms is None:
            return None
        if self.dp is not None:
            return self.dp.privacy.epsilon
        return self._federation.epsilon_spent(self._folder)

    @property
    def noise(self) -> float | None:
        """The norm of the noise over the largest possible norm of the mean of clipped updates.

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
        self, round_: int, returned: Mapping[int, State | None], observer: fed.RoundObserver
    ) -> tuple[dict[int, str], fed.RoundLook]:
        """Compute the next model; return why updates were not averaged, and a look at the sum.

        Args:
            round_: The number of the round.
            returned: The state of each client that was drawn; None if it sent nothing.
            observer: The observer that looks at the sum.
        """
        sent = self.state
        updates: dict[int, State] = {}
        absent: dict[int, str] = {}
        for client, state in returned.items():
            if state is None:
                absent[client] = "sent nothing"
                continue
            try:
                updates[client] = fed.difference(sent, state)
            except fed.UpdateError as error:
                absent[client] = str(error)
        if self.dp is not None:
            mean = self.dp.mean(dict.fromkeys(returned) | updates, sent).update
        else:
            expected = len(updates) if self._terms is None else self._terms.per_round
            mean = {n: t.double() * 0.0 for n, t in sent.items()}
            for update in updates.values():
                for name, tensor in mean.items():
                    tensor.add_(update[name].double(), alpha=1 / expected)
        self.state = fed.moved(sent, mean)
        self.loss = self._federation.validation_loss(self._model, self.state)
        return absent, self._look(round_, sent, list(updates), observer)

    def _look(
        self, round_: int, sent: State, clients: list[int], observer: fed.RoundObserver
    ) -> fed.RoundLook:
        """Attack the sum, which is all that a server sees with secure aggregation."""
        batches = [b for client in clients for b in self._federation.batches(client, round_)]
        utility = {} if math.isnan(self.loss) else {"val_loss": self.loss}
        observer.begin(round_, sent)
        look = observer.look(
            self.state,
            fed.SUM,
            batches=batches,
            noise_std=0.0 if self._terms is None else self._terms.mean_noise_std,
            utility=utility,
            logged=False,
        )
        observer.log(look, defenses=[] if self.dp is None else [self.dp])
        return look


def train_in_process(
    federation: Federation, folder: Path, show_round: Callable[[Round], None]
) -> _Server:
    """Train all rounds, the clients of a round one after the other.

    Args:
        federation: The federation.
        folder: The folder of logs and ledgers.
        show_round: A function that is called with round 0 at first, then with each round.

    Raises:
        ValueError: A gate watches a value that is not logged.
        BudgetSpent: The account allows no further round.
    """
    server = _Server(federation, folder)
    show_round(Round(0, server.loss))
    model = federation.make_model()
    ledgers = [folder / f"client_{c}.ledger" for c in range(federation.clients)]
    central = federation.trust == "central"
    accounts = [None if central else federation.account(path) for path in ledgers]
    observer, gates = federation.observer(folder), federation.gates()
    outs = [fed.OutgoingUpdates(observer, gates, dp, client=c) for c, dp in enumerate(accounts)]
    with ExitStack() as stack:
        stack.push(lambda error, *_: observer.end(error.__name__ if error else "finished"))
        for round_ in range(1, federation.rounds + 1):
            sent = server.state
            returned: dict[int, State | None] = {}
            looks: list[fed.RoundLook | None] = []
            withheld: list[str | int] = []
            for client in server.draw_clients():
                with fed.recording() as batches:
                    state, loss = federation.train(model, sent, client, round_)
                leaving = outs[client].leaves(
                    round_, sent, state, batches, utility={"train_loss": loss}
                )
                returned[client] = leaving.state
                looks.append(leaving.look)
                withheld += [client] if leaving.withheld else []
            absent, sum_look = server.close(round_, returned, observer)
            leakage = leakage_of(look for look in (*looks, sum_look) if look is not None)
            show_round(
                Round(round_, server.loss, leakage, withheld, absent, server.epsilon, server.noise)
            )
    return server
