"""A federation in one process: the clients of a round train one after the other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from lightning_fedleak.callbacks import LeakageLimitExceeded
from lightning_fedleak.commands.federate.server import Server
from lightning_fedleak.commands.federate.setting import Setting
from lightning_fedleak.federation import (
    ClientDP,
    OutgoingUpdates,
    UpdateError,
    difference,
    moved,
    recording,
)

Closed = Callable[[int, Server, dict[int, str]], None]
"""Called after each round with its number, the server, and why clients sent nothing; 0 at first."""


def run(setting: Setting, folder: Path, closed: Closed) -> Server:
    """Train all rounds.

    Args:
        setting: of the federation.
        folder: of logs and ledgers.
        closed: called after each round.

    Raises:
        ValueError: a gate that watches what is not logged.
        BudgetSpent: the account allows no more.
    """
    server = Server(setting, folder)
    closed(0, server, {})
    model = setting.make_model()
    accounts = [account_of(setting, folder, client) for client in range(setting.clients)]
    watches = setting.attack != "none"
    observer = setting.observer(folder) if watches else None
    gates = setting.gates()
    outs = None
    if observer is not None:
        outs = [OutgoingUpdates(observer, gates, dp, client=c) for c, dp in enumerate(accounts)]
    outcome = "KeyboardInterrupt"
    try:
        for round_ in range(1, setting.rounds + 1):
            sent = server.state
            returned: dict[int, dict[str, Tensor] | None] = {}
            for client in server.draw_clients():
                with recording() as batches:
                    state, loss = setting.train(model, sent, client, round_)
                if outs is None:
                    returned[client] = unwatched(accounts[client], sent, state)
                    continue
                try:
                    released = outs[client].leaves(
                        round_, sent, state, batches, utility={"train_loss": loss}
                    )
                    returned[client] = released.state
                except LeakageLimitExceeded:
                    returned[client] = None
            closed(round_, server, server.close(round_, returned, observer))
        outcome = "finished"
    except Exception as error:
        outcome = type(error).__name__
        raise
    finally:
        if observer is not None:
            observer.end(outcome)
    return server


def account_of(setting: Setting, folder: Path, client: int) -> ClientDP | None:
    """Return a client's own account where clients add noise; None elsewhere."""
    if setting.trust == "central":
        return None
    return setting.account(folder / f"client_{client}.ledger")


def unwatched(
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
