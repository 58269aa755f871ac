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
"""Gets each round: its number, the server after it, and who sent nothing, and why; 0 at first."""


def run(setting: Setting, folder: Path, closed: Closed) -> Server:
    """Trains all rounds.

    Args:
        setting: of the federation.
        folder: of logs and ledgers.
        closed: is told of each round.

    Raises:
        ValueError: a gate that watches what is not logged.
        BudgetSpent: the account allows no more.
    """
    server = Server(setting, folder)
    closed(0, server, {})
    model = setting.make_model()
    own = [account_of(setting, folder, client) for client in range(setting.clients)]
    watches = setting.attack != "none"
    observer = setting.observer(folder) if watches else None
    gates = setting.gates()
    outs = None
    if observer is not None:
        outs = [OutgoingUpdates(observer, gates, dp, client=c) for c, dp in enumerate(own)]
    how = "KeyboardInterrupt"
    try:
        for round_ in range(1, setting.rounds + 1):
            sent = server.state
            returned: dict[int, dict[str, Tensor] | None] = {}
            for client in server.drawn():
                with recording() as batches:
                    state, loss = setting.train(model, sent, client, round_)
                if outs is None:
                    returned[client] = unwatched(own[client], sent, state)
                    continue
                try:
                    left = outs[client].leaves(
                        round_, sent, state, batches, utility={"train_loss": loss}
                    )
                    returned[client] = left.state
                except LeakageLimitExceeded:
                    returned[client] = None
            closed(round_, server, server.close(round_, returned, observer))
        how = "finished"
    except Exception as error:
        how = type(error).__name__
        raise
    finally:
        if observer is not None:
            observer.end(how)
    return server


def account_of(setting: Setting, folder: Path, client: int) -> ClientDP | None:
    """A client's own account, where it adds noise; None elsewhere."""
    if setting.trust == "central":
        return None
    return setting.account(folder / f"client_{client}.ledger")


def unwatched(
    dp: ClientDP | None, sent: dict[str, Tensor], state: dict[str, Tensor]
) -> dict[str, Tensor]:
    """What leaves a client that nobody watches: with its own noise, where it adds some."""
    if dp is None:
        return state
    try:
        update = difference(sent, state)
    except UpdateError:  # NaN, say: zero leaves, with the same noise
        update = None
    return moved(sent, dp.privatized(update, sent))


__all__ = ["account_of", "run", "unwatched"]
