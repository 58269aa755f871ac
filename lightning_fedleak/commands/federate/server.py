"""The server of a federation, for any engine that returns what clients send."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from lightning_fedleak.commands.federate.setting import Setting
from lightning_fedleak.federation import (
    SUM,
    ClientDP,
    RoundObserver,
    UpdateError,
    difference,
    moved,
    trained_state,
)


class Server:
    """Holds the model, closes rounds, and looks at the sum of what came back.

    Args:
        setting: of the federation.
        folder: of the ledger.

    Attributes:
        state: of what is trained, as it is sent in the next round.
        loss: the validation loss of ``state``.
        dp: its account, where it adds noise.
    """

    def __init__(self, setting: Setting, folder: Path) -> None:
        self._setting = setting
        self._model = setting.make_model()
        self.state: dict[str, Tensor] = trained_state(self._model)
        self.loss = setting.validation_loss(self._model, self.state)
        self._noise = setting.account(folder / "server.ledger") if _central(setting) else None
        # The draw and the divisor of the sum do not depend on who adds the noise.
        self._terms = self._noise or setting.account(None)

    @property
    def dp(self) -> ClientDP | None:
        """Return its account, where it adds the noise."""
        return self._noise

    @property
    def noise(self) -> float | None:
        """Return the norm of the noise over the largest norm of the mean of clipped updates.

        It depends on no data. None without differential privacy.
        """
        if self._terms is None:
            return None
        numbers = sum(tensor.numel() for tensor in self.state.values())
        return self._terms.mean_noise_std * math.sqrt(numbers) / self._terms.clip

    def draw_clients(self) -> list[int]:
        """Return the clients of a round."""
        everyone = list(range(self._setting.clients))
        if self._noise is not None:
            self._noise.check_affords_another()
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
        updates: dict[int, Mapping[str, Tensor] | None] = {}
        silent: dict[int, str] = {}
        for client, state in returned.items():
            updates[client] = None
            try:
                if state is None:
                    silent[client] = "sent nothing"
                else:
                    updates[client] = difference(sent, state)
            except UpdateError as error:
                silent[client] = str(error)
        read = {c: u for c, u in updates.items() if u is not None}
        if self._noise is not None:
            mean = self._noise.mean(updates, sent).update
        else:
            expected = len(read) if self._terms is None else self._terms.per_round
            mean = {n: t.double() * 0.0 for n, t in sent.items()}
            for update in read.values():
                for name, tensor in mean.items():
                    tensor.add_(update[name].double(), alpha=1 / expected)
        self.state = moved(sent, mean)
        self.loss = self._setting.validation_loss(self._model, self.state)
        if observer is not None:
            self._look(round_, sent, list(read), observer)
        return silent

    def _look(
        self, round_: int, sent: Mapping[str, Tensor], clients: list[int], observer: RoundObserver
    ) -> None:
        """Attack the sum: all that a server sees behind a secure aggregation."""
        batches = [b for client in clients for b in self._setting.batches(client, round_)]
        utility = {} if math.isnan(self.loss) else {"val_loss": self.loss}
        observer.begin(round_, sent)
        look = observer.look(
            self.state,
            SUM,
            batches=batches,
            noise_std=0.0 if self._terms is None else self._terms.mean_noise_std,
            utility=utility,
            logged=False,
        )
        observer.log(look, defenses=[] if self._noise is None else [self._noise])


def _central(setting: Setting) -> bool:
    return setting.trust == "central"
